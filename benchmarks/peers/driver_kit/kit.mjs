// What the Node drivers have in common: the protocol with the runner (kit.py says it), and the clock.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const PROGRESS_MS = 20;

export const TOUCH = "UPDATE business_row SET touched = touched + 1 WHERE id = $1";

// The packages are in the environment, which is the working directory, and not beside the driver.
export const fromEnvironment = createRequire(`${process.cwd()}/package.json`);

// The clock that Python's time.monotonic_ns() reads too.
const now = () => Number(process.hrtime.bigint());

const emit = (event, fields = {}) => process.stdout.write(`${JSON.stringify({ event, ...fields })}\n`);

// Handlers call `noteStart` and add to `executed`.
class Meter {
  executed = 0;
  started = [];
  noteStart(index) {
    this.started.push([index, now()]);
  }
}

async function work(start, options, lines) {
  const meter = new Meter();
  emit("ready");
  await lines.next();
  const stop = await start(options, meter);
  const reporter = setInterval(() => emit("progress", { at: now(), executed: meter.executed }), PROGRESS_MS);
  await lines.next();
  clearInterval(reporter);
  await stop();
  emit("done", { executed: meter.executed, started: meter.started });
}

async function produce(start, options, lines) {
  const { enqueue, stop } = await start(options);
  const committed = [];
  emit("ready");
  await lines.next();
  const begin = now();
  for (let index = 0; index < options.jobs; index++) {
    const due = begin + (index * 1e9) / options.rate;
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, due - now()) / 1e6));
    await enqueue(index);
    committed.push([index, now()]);
  }
  await stop();
  emit("done", { committed });
}

export async function main(peer) {
  const [action, given] = process.argv.slice(2);
  const options = JSON.parse(given);
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  if (action === "prepare") {
    await peer.prepare(options);
    emit("done");
  } else if (action === "work") {
    await work(peer.work, options, lines);
  } else {
    await produce(peer.produce, options, lines);
  }
  process.stdout.write("", () => process.exit(0));
}
