"""The README: its application is built and run as it is printed, and its picture is what the demo prints."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from outboxq.postgres import Database, Server
from tests.support import cli
from tests.support.pages import README, blocks
from tests.support.readme import matches, read_steps, run_steps

FENCE = "```"


def shell_environment(database: Database) -> Mapping[str, str]:
    """What the README has its reader export, and the commands of this interpreter on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = cli.environment(database.url, SHOP_DATABASE_URL=database.url, PATH=path)
    return {name: value for name, value in kept.items() if name != "PYTHONPATH"}


@pytest.mark.large
@pytest.mark.timeout(600)
def test_the_application_of_ten_minutes_works_as_it_is_printed(outboxq_server: Server, tmp_path: Path) -> None:
    """Its files, written in their order between its commands, give what is printed beneath these."""
    ran = 0
    with outboxq_server.create_database() as database:
        for block in blocks(README):
            if block.file:
                (tmp_path / block.file).parent.mkdir(exist_ok=True)
                (tmp_path / block.file).write_text(block.text)
            steps = read_steps(f"{FENCE}{block.language}\n{block.text}{FENCE}\n")
            if steps:
                environment = shell_environment(database)
                run_steps(steps, directory=tmp_path, environment=environment, limit_seconds=300)
            ran += len(steps)
    assert ran > 10


def masked(text: str) -> list[str]:
    """The lines with every number as a digit, and every run of spaces as one."""
    shown = (" ".join(re.sub(r"\d[\d,.]*", "9", line).split()) for line in text.splitlines())
    return [line for line in shown if line]


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_the_picture_of_the_demo_is_what_the_demo_prints() -> None:
    """Each line of it comes in this order, but for the numbers; `...` stands for the rest of a line."""
    picture = README.read_text().partition("<!-- demo -->\n```text\n")[2].partition("```")[0]
    printed = masked(cli.run("demo", seconds=500, env={"COLUMNS": "160"}).ok().stdout)
    for line in masked(picture):
        place = next((number for number, shown in enumerate(printed) if matches(line, shown)), None)
        assert place is not None, f"{line!r} does not come, or not here, in {printed}"
        printed = printed[place + 1 :]
