"""SIGTERM and SIGINT are taken over for a while, and given back as they were."""

import subprocess
import sys

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

from outboxq.signals import stop_signals

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
    run = subprocess.run([sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("as it was\n", "", 0)
