"""The README and the page of ten minutes: their programs run as printed, and the demo prints its picture."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from outboxq.postgres import Database, Server
from tests.support import cli
from tests.support.pages import README, TEN_MINUTES, Block, blocks
from tests.support.readme import matches, read_steps, run_steps

FENCE = "```"


def shell_environment(database: Database) -> Mapping[str, str]:
    """The variables that a reader exports, and the commands of this interpreter on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = cli.environment(database.url, SHOP_DATABASE_URL=database.url, PATH=path)
    return {name: value for name, value in kept.items() if name != "PYTHONPATH"}


def first_program(document: Path) -> tuple[Block, Block]:
    """The program of one file that a document begins with, and the shell lines that run it."""
    found = blocks(document)
    (place,) = (number for number, block in enumerate(found) if block.file == "first.py")
    return found[place], found[place + 1]


def test_the_program_of_the_readme_works_as_it_is_printed(outboxq_server: Server, tmp_path: Path) -> None:
    """Against an empty database its last shell line leaves an order that is confirmed, and no job."""
    program, shell = first_program(README)
    (tmp_path / "first.py").write_text(program.text)
    (line,) = (line for line in shell.text.splitlines() if "first.py" in line)
    with outboxq_server.create_database() as database:
        command = ["bash", "--noprofile", "--norc", "-c", line]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=shell_environment(database),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        engine = create_engine(database.url)
        with engine.connect() as connection:
            assert connection.scalars(text("SELECT state FROM first_order")).all() == ["confirmed"]
            assert connection.scalar(text("SELECT count(*) FROM outboxq.job")) == 0
        engine.dispose()


def test_a_reader_sees_python_at_once() -> None:
    """Within the first 120 words of the README; and the page of ten minutes begins with the same program."""
    before, _, _ = README.read_text().partition("```python\n")
    assert len(before.split()) <= 120
    assert [block.text for block in first_program(README)] == [block.text for block in first_program(TEN_MINUTES)]


@pytest.mark.large
@pytest.mark.timeout(600)
def test_the_application_of_ten_minutes_works_as_it_is_printed(outboxq_server: Server, tmp_path: Path) -> None:
    """Its files, written in their order between its commands, give what is printed beneath these."""
    ran = 0
    with outboxq_server.create_database() as database:
        for block in blocks(TEN_MINUTES):
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
