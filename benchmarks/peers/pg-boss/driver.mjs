// pg-boss: the same work at its documented settings. definitions.py says where they are from.
import { TOUCH, fromEnvironment, main } from "../driver_kit/kit.mjs";

const { PgBoss } = fromEnvironment("pg-boss");
const { Pool } = fromEnvironment("pg");

const QUEUE = "touch";
const ENQUEUE_CHUNK = 10_000;

async function connect(url, options = {}) {
  const boss = new PgBoss({ connectionString: url, schedule: false, ...options });
  boss.on("error", console.error);
  await boss.start();
  return boss;
}

async function prepare({ url, jobs }) {
  const boss = await connect(url);
  await boss.createQueue(QUEUE, { notify: true });
  for (let start = 0; start < jobs; start += ENQUEUE_CHUNK) {
    const length = Math.min(ENQUEUE_CHUNK, jobs - start);
    await boss.insert(QUEUE, Array.from({ length }, (_, n) => ({ data: { id: start + n } })));
  }
  await boss.stop();
}

function handler(scenario, pool, meter) {
  switch (scenario) {
    case "noop":
      return async (jobs) => {
        meter.executed += jobs.length;
      };
    case "update":
      return async (jobs, transaction) => {
        const update = transaction
          ? ({ data }) => transaction.executeSql(TOUCH, [data.id])
          : ({ data }) => pool.query({ name: "touch", text: TOUCH, values: [data.id] });
        // Counted one by one: a whole batch at once would make steps in the rate.
        await Promise.all(jobs.map((job) => update(job).then(() => meter.executed++)));
      };
    default:
      return async (jobs) => {
        for (const { data } of jobs) meter.noteStart(data.id);
        meter.executed += jobs.length;
      };
  }
}

async function work({ url, scenario, settings }, meter) {
  const pool = new Pool({ connectionString: url, max: settings.pool });
  const { pool: _, max, useListenNotify, ...options } = settings;
  const boss = await connect(url, { useListenNotify, max });
  await boss.work(QUEUE, options, handler(scenario, pool, meter));
  return async () => {
    await boss.stop();
    await pool.end();
  };
}

async function produce({ url }) {
  const boss = await connect(url);
  return { enqueue: (id) => boss.send(QUEUE, { id }), stop: () => boss.stop() };
}

await main({ prepare, work, produce });
