// graphile-worker: the same work at its documented settings. definitions.py says where they are from.
import { TOUCH, fromEnvironment, main } from "../driver_kit/kit.mjs";

const { Logger, makeWorkerUtils, run } = fromEnvironment("graphile-worker");
const { Pool } = fromEnvironment("pg");

const ENQUEUE_CHUNK = 10_000;

const silent = new Logger(() => () => {});

async function prepare({ url, jobs }) {
  const utils = await makeWorkerUtils({ connectionString: url, logger: silent });
  await utils.migrate();
  for (let start = 0; start < jobs; start += ENQUEUE_CHUNK) {
    const length = Math.min(ENQUEUE_CHUNK, jobs - start);
    await utils.addJobs(Array.from({ length }, (_, n) => ({ identifier: "touch", payload: { id: start + n } })));
  }
  await utils.release();
}

function handler(scenario, pool, meter) {
  switch (scenario) {
    case "noop":
      return () => {
        meter.executed++;
      };
    case "update":
      return async ({ id }) => {
        await pool.query({ name: "touch", text: TOUCH, values: [id] });
        meter.executed++;
      };
    default:
      return ({ id }) => {
        meter.noteStart(id);
        meter.executed++;
      };
  }
}

async function work({ url, scenario, settings }, meter) {
  const pool = new Pool({ connectionString: url, max: settings.pool });
  const runner = await run({
    preset: {
      worker: {
        connectionString: url,
        concurrentJobs: settings.concurrentJobs,
        maxPoolSize: settings.maxPoolSize,
        localQueue: { size: settings["localQueue.size"] },
        completeJobBatchDelay: settings.completeJobBatchDelay,
        failJobBatchDelay: settings.failJobBatchDelay,
      },
    },
    logger: silent,
    noHandleSignals: true,
    taskList: { touch: handler(scenario, pool, meter) },
  });
  return async () => {
    await runner.stop();
    await pool.end();
  };
}

async function produce({ url }) {
  const utils = await makeWorkerUtils({ connectionString: url, logger: silent });
  return { enqueue: (id) => utils.addJob("touch", { id }), stop: () => utils.release() };
}

await main({ prepare, work, produce });
