"""An application whose jobs take their relay, their connection or their process with them.

Every effect says under which attempt, and after how many crashes, it was written: `name: attempt 1, crashes 0` is the
trace of a job that was charged for nothing.
"""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from outboxq import AsyncContext, Backoff, Context, Jobs
from outboxq.job import Job
from tests.support.app import Effect

QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)
# Less than what a relay's own deadline would take: what happens then is the server's doing.
HOLD_TIMEOUT_SECONDS = 1.0
# A finished job leaves a row, which is there if and only if its effect is.
KEEP = timedelta(days=7)

jobs = Jobs()


@jobs.handler(queue="tx", retry=QUICK, keep=KEEP)
def work(ctx: Context, name: str, fault: str = "", marker: str = "") -> None:
    """Write the effect, then meet the fault: once where there is a marker, else each time."""
    run(ctx.session, ctx.job, name, fault, marker)


@jobs.handler(queue="tx-async", retry=QUICK, keep=KEEP)
async def work_async(ctx: AsyncContext, name: str, fault: str = "", marker: str = "") -> None:
    """As `work`."""
    await ctx.session.run_sync(run, ctx.job, name, fault, marker)


@jobs.handler(queue="lease", retry=QUICK, keep=KEEP, claim="lease")
def work_leased(ctx: Context, name: str, fault: str = "", marker: str = "") -> None:
    """As `work`."""
    run(ctx.session, ctx.job, name, fault, marker)


@jobs.handler(queue="lease-async", retry=QUICK, keep=KEEP, claim="lease")
async def work_leased_async(ctx: AsyncContext, name: str, fault: str = "", marker: str = "") -> None:
    """As `work`."""
    await ctx.session.run_sync(run, ctx.job, name, fault, marker)


@jobs.handler(queue="tx-hasty", retry=QUICK, timeout_seconds=HOLD_TIMEOUT_SECONDS)
def work_hastily(ctx: Context, name: str, fault: str = "", marker: str = "") -> None:
    """As `work`."""
    run(ctx.session, ctx.job, name, fault, marker)


@jobs.handler(queue="lease-hasty", retry=QUICK, claim="lease", timeout_seconds=HOLD_TIMEOUT_SECONDS)
def work_leased_hastily(ctx: Context, name: str, fault: str = "", marker: str = "") -> None:
    """As `work`."""
    run(ctx.session, ctx.job, name, fault, marker)


def run(session: Session, job: Job, name: str, fault: str, marker: str) -> None:
    session.add(Effect(name=trace(name, job.attempt, job.crashes)))
    session.flush()
    if fault and not (marker and Path(marker).exists()):
        if marker:
            Path(marker).touch()
        FAULTS[fault](session, marker)


def trace(name: str, attempt: int = 1, crashes: int = 0) -> str:
    """The effect of a job; as given, of one that nothing was charged to."""
    return f"{name}: attempt {attempt}, crashes {crashes}"


def _terminate(session: Session, marker: str) -> None:
    """The server ends this handler's backend, and no other."""
    del marker
    connection = session.connection()
    pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with connection.engine.connect() as other:
        assert other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid}).scalar_one()


def _hold(session: Session, marker: str) -> None:
    """Stand still until the test opens the gate."""
    del session
    gate = Path(marker + ".open")
    while not gate.exists():
        time.sleep(0.01)


def _kill(session: Session, marker: str) -> None:
    """As the kernel does where memory is over."""
    del session, marker
    os.kill(os.getpid(), signal.SIGKILL)


def _die_slowly(session: Session, marker: str) -> None:
    """What else runs in this process has time to begin."""
    time.sleep(0.2)
    _kill(session, marker)


def _exit(session: Session, marker: str) -> None:
    del session, marker
    os._exit(86)


def _segfault(session: Session, marker: str) -> None:
    del session, marker
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _exhaust_memory(session: Session, marker: str) -> None:
    """Take all that the process may have, and keep it for a while: every thread meets a MemoryError."""
    del session, marker
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 64 * 1024**2
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    taken, chunk = [], 16 * 1024**2
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        try:
            taken.append(bytearray(chunk))
        except MemoryError:
            chunk = max(chunk // 2, 64)
    raise MemoryError


def _dawdle(session: Session, marker: str) -> None:
    """Longer than one takes that dies slowly."""
    del session, marker
    time.sleep(0.4)


def _keyboard_interrupt(session: Session, marker: str) -> None:
    """As Ctrl-C does elsewhere."""
    del session, marker
    raise KeyboardInterrupt


FAULTS: dict[str, Callable[[Session, str], None]] = {
    "terminate": _terminate,
    "hold": _hold,
    "kill": _kill,
    "die-slowly": _die_slowly,
    "exit": _exit,
    "segfault": _segfault,
    "exhaust-memory": _exhaust_memory,
    "dawdle": _dawdle,
    "keyboard-interrupt": _keyboard_interrupt,
}
