"""A host of its own: a network namespace behind a pair of virtual interfaces, whose cable can be pulled."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """The other end: `our_address` is where it reaches us."""

    namespace: str
    our_address: str
    network: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs on that host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def pull_cable(self) -> None:
        """From now on every packet is lost, in both directions, without a word."""
        _ip("-n", self.namespace, "link", "set", "there", "down")

    def plug_in(self) -> None:
        """Packets pass again."""
        _ip("-n", self.namespace, "link", "set", "there", "up")


@contextmanager
def another_host() -> Iterator[Host]:
    """Skips the test where network namespaces are not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a host of its own needs root and iproute2")
    name = f"oq{secrets.token_hex(4)}"
    # A /30 of the range for benchmarks, which is not routed.
    base = f"198.18.{secrets.randbelow(256)}.{secrets.randbelow(64) * 4}"
    stem, _, last = base.rpartition(".")
    here, there = f"{stem}.{int(last) + 1}", f"{stem}.{int(last) + 2}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        try:
            _ip("link", "add", name, "type", "veth", "peer", "name", "there", "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"virtual interfaces are not allowed here: {error.stderr.strip()}")
        _ip("addr", "add", f"{here}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "addr", "add", f"{there}/30", "dev", "there")
        _ip("-n", name, "link", "set", "there", "up")
        yield Host(name, here, f"{base}/30")
    finally:
        # Ours goes too, but only when the kernel gets to it; the next test may draw its addresses.
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
