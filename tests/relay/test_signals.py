"""SIGTERM and SIGINT are taken over for a while, and given back as they were."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outboxq.postgres import Database
from tests.support.cli import command, environment
from tests.support.waiting import PATIENCE, wait_until

# No server listens there, and none is asked.
NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
EMBEDDED = """
import ctypes, os, signal, sys

# As a program that embeds Python does, before Python starts: its module looks at the handlers when it is made.
calls = []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(calls.append)
libc = ctypes.CDLL(None)
libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
libc.signal(signal.SIGTERM, ctypes.cast(handler, ctypes.c_void_p))
del sys.modules["_signal"]
import _signal
assert _signal.getsignal(signal.SIGTERM) is None, "C's own"
own = signal.default_int_handler
signal.signal(signal.SIGINT, own)

from outboxq.relay.signals import stop_signals

stops = []
with stop_signals(lambda: stops.append(1)):
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) not in (own, None)
assert signal.getsignal(signal.SIGINT) is own
os.kill(os.getpid(), signal.SIGTERM)
assert calls == [signal.SIGTERM] * 2 and not stops, (calls, stops)
print("as it was")
"""


def test_a_handler_that_was_installed_from_c_stays_the_programs_own() -> None:
    """Python names it None and cannot put it back: it is not taken over, and the block ends without an error."""
    run = subprocess.run([sys.executable, "-c", EMBEDDED], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("as it was\n", "", 0)


def wait_until_caught(process: "subprocess.Popen[str]") -> None:
    """Until the process has a handler for SIGTERM."""

    def catches() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)

    wait_until(catches, "a handler for SIGTERM")


SLOW = """
import pathlib, time
pathlib.Path({mark!r}).touch()
{sleep}
from tests.support.app import jobs
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_relay_that_is_told_to_stop_before_it_imports_anything_ends_in_order(processes: int) -> None:
    """As a service manager does that starts and stops it at once: 143 would be a failure to it."""
    words = ("relay", "tests.support.app:jobs", "--processes", str(processes))
    process = subprocess.Popen(command(*words), env=environment(NOWHERE), stderr=subprocess.PIPE, text=True)
    wait_until_caught(process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[1]
    assert (process.returncode, said) == (0, "outboxq was told to stop before it had begun\n")


@pytest.mark.parametrize(
    "sleep", ["time.sleep(600)", "try:\n    time.sleep(600)\nexcept BaseException:\n    pass"], ids=["dies", "swallows"]
)
def test_a_relay_that_is_told_to_stop_while_its_application_is_imported_ends_in_order(
    sleep: str, tmp_path: Path, outboxq_database: Database
) -> None:
    """Also where the application swallows it."""
    mark = tmp_path / "imported"
    (tmp_path / "slow_application.py").write_text(SLOW.format(mark=str(mark), sleep=sleep))
    more = environment(outboxq_database.url, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    process = subprocess.Popen(command("relay", "slow_application:jobs"), env=more, stderr=subprocess.PIPE, text=True)
    wait_until(mark.exists, "the import")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, said
    assert said.startswith("outboxq was told to stop before it had begun\n")


def test_a_signal_behind_the_end_of_a_relay_is_the_programs_own_again() -> None:
    """What ended as it should is not asked to begin anew."""
    program = (
        "import os, signal\n"
        "from outboxq.relay.signals import end_in_order_until_begun, stop_signals\n"
        "end_in_order_until_begun()\n"
        "with stop_signals(lambda: None): pass\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
