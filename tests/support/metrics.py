"""Metrics as tests read them: from a process that serves them, by prometheus_client's own parser, and by promtool."""

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cli import REPOSITORY, command, environment
from tests.support.waiting import PATIENCE, wait_until

NEEDED = "promtool is not installed: apt-get install prometheus"
Series = tuple[str, frozenset[tuple[str, str]]]


def promtool(*arguments: object, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run promtool; the test is skipped if there is none."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(NEEDED)
    return subprocess.run([program, *map(str, arguments)], input=given, capture_output=True, text=True, check=False)


def parsed(text: str) -> dict[Series, float]:
    """Every sample of an exposition."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Mapping[Series, float], name: str, **labels: str) -> float:
    """The sum of the samples with this name that have these labels."""
    wanted = set(labels.items())
    return sum(found for (of, having), found in samples.items() if of == name and wanted <= having)


class Serving:
    """A process that serves metrics."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process = process
        self.address = address

    def get(self, path: str = "/metrics") -> str:
        """What it answers."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=PATIENCE) as answer:
            return answer.read().decode()

    def samples(self) -> dict[Series, float]:
        """What a scrape finds."""
        return parsed(self.get())

    def value(self, name: str, **labels: str) -> float:
        """The sum of some samples, now."""
        return value(self.samples(), name, **labels)


@contextmanager
def serving(*arguments: object, url: str, log: Path, **variables: str) -> Iterator[Serving]:
    """A command that serves metrics on a free port, which it is given as 0; it does not outlive the block."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command(*arguments), cwd=REPOSITORY, env=environment(url, **variables), stderr=errors, text=True
        )
    try:
        with log.open() as said:
            yield Serving(process, _address(process, said))
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


def _address(process: "subprocess.Popen[str]", said: IO[str]) -> str:
    lines: list[str] = []

    def look() -> str | None:
        assert process.poll() is None, "".join(lines)
        lines.extend(said.readlines())
        found = re.search(r"metrics are served: host=(\S+) port=(\d+)", "".join(lines))
        return found and f"{found[1]}:{found[2]}"

    address = wait_until(look, "the address of the metrics")
    assert address is not None
    return address
