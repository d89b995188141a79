"""docs/command-line.md is what the commands print."""

import re
from pathlib import Path

import pytest

from tests.cli.test_help import COMMANDS
from tests.support.cli import call
from tests.tools import command_line
from tests.tools.command_line import COLUMNS, PAGE, main, sections


@pytest.mark.large
@pytest.mark.timeout(1_200)
def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Its help and its samples are those of today's commands; if not: `python -m tests.tools.command_line`."""
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_current_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that writes it."""
    page = tmp_path / "page.md"
    page.write_text("of yesterday\n")
    monkeypatch.setattr(command_line, "PAGE", page)
    monkeypatch.setattr(command_line, "REPOSITORY", tmp_path)
    monkeypatch.setattr(command_line, "page", lambda: "of today\n")
    assert main(["--check"]) == 1
    assert "page.md is not current: python -m tests.tools.command_line" in capsys.readouterr().err
    assert main([]) == 0
    assert page.read_text() == "of today\n"


def test_every_command_has_its_section() -> None:
    """In the order and under the headings of `outboxq --help`, with its help, and a link in the table of commands."""
    text = PAGE.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["All commands", "Common options", *sections()]
    named = [name for names in sections().values() for name in names]
    assert sorted(named) == sorted(" ".join(words) for words in COMMANDS)
    assert re.findall(r"^### outboxq (.*)$", text, re.MULTILINE) == named
    for name in named:
        assert f"[{name}](#outboxq-{name.replace(' ', '-')})" in text.partition("## Common options")[0]
        assert section_of(name).startswith("\n```text\n"), name


@pytest.mark.wide
def test_every_option_is_in_the_section_of_its_command_or_among_the_common_ones() -> None:
    """What a section leaves out, the table of common options has, with the name of the command."""
    table = PAGE.read_text().partition("## Common options\n")[2].partition("\n## ")[0]
    for heading, names in sections().items():
        for name in names:
            found = call(*name.split(), "--help").ok().stdout.partition("\nOptions:\n")[2]
            for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", found, re.MULTILINE):
                if option != "--help" and not re.search(rf"^  (?:-\w, )?{option}\b", section_of(name), re.MULTILINE):
                    rows = re.findall(rf"^\| `{option}\b.*\| (.*) \|$", table, re.MULTILINE)
                    assert any(is_named(name, heading, commands) for commands in rows), (name, option)


def section_of(name: str) -> str:
    return PAGE.read_text().partition(f"\n### outboxq {name}\n")[2].partition("\n##")[0]


def is_named(name: str, heading: str, commands: str) -> bool:
    """True if a cell of the table names the command: by itself, by its heading, or as not left out."""
    if commands.startswith("all but "):
        return f"`{name}`" not in commands
    return f"`{name}`" in commands or f"all under [{heading}]" in commands


def test_what_the_page_shows_fits_a_terminal() -> None:
    """Of 80 columns: all that is printed, but for log lines, errors, JSON and what --wide shows."""
    blocks = re.findall(r"```text\n\$ (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    long = [
        line
        for command, printed in blocks
        if not re.search("relay myapp|--json|--wide", command)
        for line in printed.splitlines()
        if len(line) > COLUMNS and not line.startswith("Error: ")
    ]
    assert long == []
