"""A thread that does not come up must not hold whoever starts it."""

import subprocess
import sys
import threading

import pytest

import outboxq.relay.threads as threads
from outboxq.relay.threads import BoundedStart


def test_a_thread_runs_its_target() -> None:
    """It is a thread like any other."""
    ran = threading.Event()
    thread = BoundedStart(ran.set, "outboxq-test")
    thread.start()
    thread.join(10)
    assert ran.is_set()
    assert not thread.is_alive()


# The new thread fails before it has told whoever waits for it.
DIES_ON_ITS_WAY = """
import sys, threading
from outboxq.relay.threads import BoundedStart

def dies(self):
    raise MemoryError

threading.Thread._bootstrap_inner = dies
threading.excepthook = sys.unraisablehook = lambda _: None
if sys.argv[1] == "threading":
    threading.Thread(target=print, daemon=True).start()
else:
    import outboxq.relay.threads
    outboxq.relay.threads._UP_SECONDS = 0.2
    try:
        BoundedStart(print, "outboxq-test").start()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.large
def test_a_thread_that_dies_before_it_is_up_holds_nobody() -> None:
    """As MemoryError does to it; threading's own start() waits for it without an end."""
    command = [sys.executable, "-c", DIES_ON_ITS_WAY]
    done = subprocess.run([*command, "bounded"], capture_output=True, text=True, check=True)
    assert done.stdout == "the thread 'outboxq-test' did not come up within 0.2 s\n"
    assert threads._UP_SECONDS > 10, "a process that was stopped for a while starts threads as ever"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "threading"], timeout=2, capture_output=True, check=True)
