"""Programs of the distribution that stand between a relay and its server: found, or installed once for all tests."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def program(package: str) -> str:
    """The path of the program that has its package's name; skips the test where it is not and cannot be installed."""
    # One of the test processes installs it, the others wait.
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _find(package) or _install(package)
    if found is None:
        # Contributors' machines: `.ci/run` is root on a system with apt-get, and runs these tests.
        pytest.skip(f"{package} is not installed, and cannot be without root and apt-get: apt-get install {package}")
    return found


def free_port() -> int:
    """A port below those of outgoing connections, as for our servers."""
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def _find(package: str) -> str | None:
    return shutil.which(package, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def _install(package: str) -> str | None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return None
    # RUNLEVEL: no package starts a service of its own.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    install = ("apt-get", "install", "-y", "--no-install-recommends", package)
    for command in (install, ("apt-get", "update"), install):
        subprocess.run(command, env=environment, capture_output=True, check=False)
        found = _find(package)
        if found is not None:
            return found
    return None
