"""`docs/hooks.md` says what can be listened to, and its examples are valid."""

import ast
import re

from outboxq.handlers.hooks import HEARD
from tests.support.cli import REPOSITORY

PAGE = (REPOSITORY / "docs/hooks.md").read_text()


def test_the_table_names_each_event_that_a_hook_can_be_told() -> None:
    """One row for each class, and none for another."""
    table = PAGE.partition("| Event | When |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(event.__name__ for event in HEARD)


def test_the_examples_are_python() -> None:
    """Each block of code can be parsed."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 7
    for block in blocks:
        ast.parse(block)
