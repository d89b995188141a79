"""docs/coming-from-other-queues.md: each name of outboxq in its tables exists, as a name, a keyword or a command."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest
from typer.main import get_command

import outboxq
from outboxq import JobHandle, JobKind, Jobs, NewJob, OutboxSession, Relay, schedules, testing
from outboxq.cli.app import app
from outboxq.handlers.schedules import Scheduled
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "coming-from-other-queues.md"

# Names that stand for an object of the class in the samples of all pages.
OBJECTS = {"ctx": outboxq.Context, "handle": JobHandle, "job": NewJob, "jobs": Jobs, "session": OutboxSession}
MODULES: dict[str, ModuleType] = {"outboxq": outboxq, "outboxq.testing": testing, "schedules": schedules}
# The argument of a scheduled handler.
ARGUMENTS = {"fire_time"}
TAKES_KEYWORDS = (Jobs, Jobs.handler, Jobs.batch_handler, JobKind.options, Scheduled.schedule, Relay)


def ours(page: str) -> list[str]:
    """The code in the right column of each table."""
    columns = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("| ")]
    return [code for column in columns for code in re.findall(r"`([^`]+)`", column)]


def keywords_of(function: Callable[..., object]) -> set[str]:
    """The keyword arguments of a function, with those of its typed dictionary."""
    function = inspect.unwrap(function)
    names = {each.name for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD}
    called = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]  # mypy fears a subclass
    for hint in get_type_hints(called).values():
        for options in get_args(hint) if get_origin(hint) is Unpack else ():
            names |= set(get_type_hints(options))
    return names


def check_expression(node: ast.expr) -> Any:
    """The object that an expression names, or the class of one; every keyword of a call must be the function's."""
    match node:
        case ast.Call(function, _, keywords):
            called = check_expression(function)
            missing = {each.arg for each in keywords} - keywords_of(called)
            assert not missing, f"{ast.unparse(node)}: {called} takes no {missing}"
            return called
        case ast.Attribute(ast.Name("outboxq"), "testing"):
            return testing
        case ast.Attribute(value, name):
            return _member(check_expression(value), name)
        case ast.Name(name):
            known: Mapping[str, object] = {**OBJECTS, **MODULES}
            return known[name] if name in known else getattr(outboxq, name)
    raise AssertionError(f"not a name: {ast.unparse(node)}")


def _member(owner: object, name: str) -> Any:
    """An attribute of a class or module, or the type of a field."""
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        fields = {each.name for each in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        if name not in fields:
            raise
        return object


def check_command(words: list[str]) -> None:
    """The command exists, and has the options."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for each in command.params for option in each.opts}
    assert set(words) <= options, f"{command.name} has no {set(words) - options}"


def check(code: str) -> None:
    """One piece of code of the page.

    Raises:
        AssertionError, AttributeError, KeyError: outboxq has no such name, keyword, command or option.
    """
    if code.startswith("outboxq "):
        check_command(code.split()[1:])
    elif keyword := re.match(r"(\w+)=(?!=)", code):
        assert any(keyword[1] in keywords_of(each) for each in TAKES_KEYWORDS), f"no {keyword[1]}="
        value = code.partition("=")[2]
        if value:
            check_expression(ast.parse(value, mode="eval").body)
    elif code not in ARGUMENTS:
        check_expression(ast.parse(code.removeprefix("@"), mode="eval").body)


@pytest.mark.parametrize("code", sorted(set(ours(PAGE.read_text()))))
def test_a_name_of_the_page_exists(code: str) -> None:
    """A user who looks it up finds it."""
    check(code)


def test_the_page_is_read() -> None:
    """Names of each sort are found in it, in the tables of all queues."""
    page = PAGE.read_text()
    assert {"session.add_job", "unique=", "@jobs.schedule", "outboxq dead retry"} <= set(ours(page))
    assert len(re.findall(r"^## ", page, re.MULTILINE)) == 15
    assert page.count("|---|---|") == 15


@pytest.mark.parametrize(
    "wrong",
    [
        "session.add_task",
        "uniq=",
        "retry=Backoff(attempts=3)",
        "jobs.limit(per_key=...)",
        "@jobs.cron",
        "Retries",
        "outboxq dead requeue",
        "outboxq relay --burst",
        "outboxq.testing.drain_all",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    """A name that outboxq does not have fails the test above."""
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        check(wrong)
