"""docs/coming-from-other-queues.md names what there is: functions, options, settings and commands."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

import outboxq
from outboxq import Backoff, JobKind, Jobs
from tests.support.cli import call

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-other-queues.md").read_text()
# The right column of each table, which speaks of outboxq.
OURS = "\n".join(line.rsplit("|", 2)[1] for line in PAGE.splitlines() if line.startswith("| "))


def _names_of(function: Callable[..., object]) -> set[str]:
    """The arguments of a function, those of its typed dictionary too."""
    names = set(inspect.signature(function).parameters)
    for hint in get_type_hints(function).values():
        for options in get_args(hint) if get_origin(hint) is Unpack else ():
            names |= set(get_type_hints(options))
    return names


def test_every_example_of_ours_is_python_and_uses_what_there_is() -> None:
    """The arguments of the decorator, and of the backoff, are theirs; the names are public."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "# outboxq" in block]
    assert len(blocks) == 4
    for block in blocks:
        compile(block, "<page>", "exec")
        for name in re.findall(r"\b(Backoff|Context)\b", block):
            assert name in outboxq.__all__
        for argument in re.findall(r"@jobs\.handler\((\w+)=|, (retry)=", block):
            assert set(argument) - {""} <= _names_of(Jobs.handler)


def test_the_options_in_the_tables_are_options() -> None:
    """`options(...)` of a kind takes each of them, and the defaults of the backoff are the ones that the page says."""
    named = set(re.findall(r"options\((\w+)=", OURS))
    assert {"delay", "expires", "priority", "run_at"} == named
    assert named <= _names_of(JobKind.options)
    (said,) = re.findall(r"`Backoff\((max_attempts=15[^)]*)\)`", OURS)
    assert eval(f"Backoff({said})", {"Backoff": Backoff}) == Backoff()


@pytest.mark.large
def test_the_commands_in_the_page_are_commands() -> None:
    """Each `outboxq ...` has a help of its own."""
    for command in sorted(set(re.findall(r"`outboxq ((?:[a-z]+ ?){1,2})", PAGE))):
        if not command.startswith("testing"):
            assert call(*command.split(), "--help").exit_code == 0, command
