"""The common parts of the Python drivers: the protocol with the runner, and the clock. Standard library only.

A driver is called as `driver.py prepare|work|produce OPTIONS`, OPTIONS being one JSON object, and prints a JSON object
a line. `work` and `produce` print `ready` and wait for a line on standard input. `work` ends at the next line.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

TOUCH = "UPDATE business_row SET touched = touched + 1 WHERE id = {}"

_PROGRESS_SECONDS = 0.02

Options = dict[str, Any]


@dataclass(slots=True)
class Meter:
    """The work that the handlers of this process have done. Times are of the machine's monotonic clock, in ns."""

    executed: int = 0
    started: list[tuple[int, int]] = field(default_factory=list)

    def note_start(self, index: int) -> None:
        self.started.append((index, time.monotonic_ns()))


Prepare = Callable[[Options], Awaitable[None]]
Work = Callable[[Options, Meter], AbstractAsyncContextManager[None]]
Produce = Callable[[Options], AbstractAsyncContextManager[Callable[[int], Awaitable[object]]]]


def main(prepare: Prepare, work: Work, produce: Produce) -> None:
    """Do what the command line says."""
    action, options = sys.argv[1], json.loads(sys.argv[2])
    if action == "prepare":
        asyncio.run(prepare(options))
        _emit("done")
    elif action == "work":
        asyncio.run(_work(work, options))
    else:
        asyncio.run(_produce(produce, options))


async def _work(work: Work, options: Options) -> None:
    meter = Meter()
    _emit("ready")
    await _line()
    async with work(options, meter):
        reporter = asyncio.create_task(_report(meter))
        await _line()
        reporter.cancel()
    _emit("done", executed=meter.executed, started=meter.started)


async def _report(meter: Meter) -> None:
    while True:
        _emit("progress", at=time.monotonic_ns(), executed=meter.executed)
        await asyncio.sleep(_PROGRESS_SECONDS)


async def _produce(produce: Produce, options: Options) -> None:
    committed: list[tuple[int, int]] = []
    async with produce(options) as enqueue:
        _emit("ready")
        await _line()
        begin = time.monotonic_ns()
        for index in range(options["jobs"]):
            due = begin + int(index * 1e9 / options["rate"])
            await asyncio.sleep(max(0, due - time.monotonic_ns()) / 1e9)
            await enqueue(index)
            committed.append((index, time.monotonic_ns()))
    _emit("done", committed=committed)


async def _line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def _emit(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
