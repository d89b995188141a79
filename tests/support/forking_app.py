"""An application that forks wherever users' code is called. The child goes back, in the way that its job names."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session, configure_mappers

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs
from outboxq.events import JobDiscarded
from outboxq.outcomes import Discard
from tests.support.app import Effect

ONCE = Backoff(max_attempts=1)
# How long a parent waits for its child.
PATIENCE_SECONDS = 100.0
_ONE_PARENT = threading.Lock()
LIFESPAN, RESULTS = "FORKS_IN_LIFESPAN", "FORKS_RESULTS"


@dataclass
class Way:
    way: str


def fork(way: str, session: Session | None = None) -> str:
    """In the parent, what became of the child; the child comes back as `way` says."""
    child = os.fork()
    if child:
        return f"{way} {_code_of(child)}"
    if way == "raise":
        raise ValueError("4111 1111 1111 1111")
    if way == "exit":
        sys.exit(7)
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "write" and session is not None:
        session.execute(text("INSERT INTO effect_ledger (name) VALUES ('of a child')"))
    if way == "close" and session is not None:
        session.connection().connection.driver_connection.close()
    return "of a child"


def _code_of(child: int) -> int:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child goes on")


def _told(place: str, found: str) -> None:
    """Record what was found where there is no session."""
    (Path(os.environ[RESULTS]) / f"{place} {found}").touch()


@contextmanager
def lifespan() -> Iterator[None]:
    if LIFESPAN in os.environ:
        _told("enter", fork("raise"))
    yield
    if LIFESPAN in os.environ:
        _told("leave", fork("return"))


jobs = Jobs(lifespan=lifespan)


@jobs.handler(queue="sync", retry=ONCE)
def alone(ctx: Context, way: str) -> None:
    ctx.session.flush()
    ctx.session.add(Effect(name=f"alone {fork(way, ctx.session)}"))


@jobs.handler(queue="sync", retry=ONCE, batchable=True)
def shared(ctx: Context, way: str) -> None:
    ctx.session.add(Effect(name=f"shared {fork(way)}"))


@jobs.batch_handler(Way, queue="together", retry=ONCE)
def together(ctx: BatchContext, items: list[BatchItem[Way]]) -> None:
    for item in items:
        ctx.session.add(Effect(name=f"together {fork(item.args.way)}"))


@jobs.handler(queue="lease", retry=ONCE, claim="lease")
def leased(ctx: Context, way: str) -> None:
    ctx.session.add(Effect(name=f"leased {fork(way, ctx.session)}"))


@jobs.handler(queue="lease", retry=ONCE, claim="lease")
def once(ctx: Context, way: str) -> None:
    found = ctx.once("fork", key=way, call=lambda _: fork(way))
    ctx.session.add(Effect(name=f"once {found}"))


@jobs.handler(queue="async", retry=ONCE)
async def task(ctx: AsyncContext, way: str) -> None:
    await ctx.session.flush()
    found = fork(way, ctx.session.sync_session)
    if way == "await":
        await asyncio.sleep(0)
    ctx.session.add(Effect(name=f"task {found}"))


@jobs.handler(queue="async", retry=ONCE)
async def subtask(ctx: AsyncContext, way: str) -> None:
    """The child is forked in a task of the handler's own, and another handler's task is ready to run."""

    async def forking() -> str:
        found = fork(way)
        await asyncio.sleep(0)
        return found

    ctx.session.add(Effect(name=f"subtask {await asyncio.create_task(forking())}"))


@jobs.handler(queue="sync", retry=ONCE)
def multiprocess(ctx: Context, way: str) -> None:
    """Send signals to children: SIGTERM as soon as they are there, SIGINT when they are at work."""
    codes, (read_end, write_end) = [], os.pipe()
    # `multiprocessing` looks after the children of all threads: another one's would be gone before its end is known.
    with _ONE_PARENT:
        for _ in range(20):
            child = multiprocessing.get_context("fork").Process(target=_work, args=(write_end,))
            child.start()
            if way == "interrupt":
                os.read(read_end, 1)
            os.kill(child.pid, signal.SIGINT if way == "interrupt" else signal.SIGTERM)
            child.join(0.2)
            until = time.monotonic() + PATIENCE_SECONDS
            while child.exitcode is None and time.monotonic() < until:
                # Python 3.13.0 loses an interrupt that comes just before a forked thread sleeps, in any program.
                if way == "interrupt":
                    os.kill(child.pid, signal.SIGINT)
                child.join(0.2)
            codes.append(child.exitcode)
            child.kill()
    ctx.session.add(Effect(name=f"{way} {set(codes)}"))


def _work(write_end: int) -> None:
    try:
        os.write(write_end, b"!")
        # Not for ever, if the relay is killed.
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
    except KeyboardInterrupt:
        # A second one would come in the middle of the child's end, on a busy machine.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


# Its arounds are of its own handlers alone.
inner = Jobs()


@inner.handler(queue="sync", retry=ONCE)
def surrounded(ctx: Context, way: str) -> None:
    ctx.session.add(Effect(name="surrounded"))


@jobs.handler(queue="sync", retry=ONCE)
def discarded(ctx: Context, way: str) -> Discard:
    return Discard(way)


@inner.around
@contextmanager
def around(ctx: Context) -> Iterator[None]:
    ctx.session.add(Effect(name=f"entered {fork('raise')}"))
    yield
    ctx.session.add(Effect(name=f"left {fork('return')}"))


@jobs.on(JobDiscarded)
def heard(event: JobDiscarded) -> None:
    _told("heard", fork("exit"))


jobs.include(inner)
# Or a thread that a child lacks might be about to do it, and hold the lock that the child then waits for.
configure_mappers()
