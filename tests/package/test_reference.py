"""The reference: everything public is in it, and its tables are those of the code.

tests/tools/test_api_reference.py checks that its generated parts are current.
"""

import dataclasses
import importlib
import inspect
import re

import pytest

import outboxq
from outboxq import Backoff, RelayConfig, errors, events
from outboxq.handlers.options import HandlerOptions
from outboxq.outbox.options import JobOptions
from tests.support.pages import GENERATED, ROOT

REFERENCE = {path.name: path.read_text() for path in sorted(ROOT.glob("docs/reference/*.md"))}
EVERYTHING = "\n".join(REFERENCE.values())
# The names with an entry, of which each has its heading or its table.
ENTRIES = {name for part in GENERATED.finditer(EVERYTHING) for name in part["names"].split() if name[0] != "-"}
# What the submodules show, whose names are all documented. The names of `testing` that are constants or types of
# literals are explained in its text.
SUBMODULES = ("http", "postgres", "testing", "doctor")


def documented(name: str) -> bool:
    """True if the reference has an entry for it."""
    return any(entry.rpartition(".")[2] == name for entry in ENTRIES)


@pytest.mark.parametrize("name", [name for name in outboxq.__all__ if name != "__version__"])
def test_every_public_name_has_an_entry(name: str) -> None:
    """Each name of `outboxq.__all__` is in the reference, under this name, or is in the table of errors."""
    is_shown = f"\n### `{name}`\n" in EVERYTHING and f"outboxq.{name}" in ENTRIES
    assert is_shown or f"\n| `{name}` |" in REFERENCE["errors.md"]


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_every_name_of_a_submodule_is_in_the_reference(submodule: str) -> None:
    """What a documented submodule exports has an entry, or is named in the text."""
    module = importlib.import_module(f"outboxq.{submodule}")
    by_hand = GENERATED.sub("", EVERYTHING)
    assert [name for name in module.__all__ if not documented(name) and f"`{name}`" not in by_hand] == []


def test_the_table_of_errors_is_that_of_the_code() -> None:
    """Each error is in the table with its bases, and no other."""
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", REFERENCE["errors.md"], re.MULTILINE))
    found = {
        name: ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.OutboxqError)
    }
    assert table == found


def test_every_event_is_in_the_table_of_events() -> None:
    """With its fields."""
    table = dict(re.findall(r"^\| `(\w+)` \| .*? \| (`.*) \|$", REFERENCE["events.md"], re.MULTILINE))
    found = {kind.__name__: [field.name for field in dataclasses.fields(kind)] for kind in events.Event.__args__}
    assert {name: re.findall(r"`(\w+): ", fields) for name, fields in table.items()} == found


@pytest.mark.parametrize("options", [HandlerOptions, JobOptions])
def test_every_option_of_a_handler_is_in_its_table(options: type) -> None:
    """With its default, unless it is one of another place: of the registry, of the job, of one sort of handlers."""
    table = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \| .* \|$", REFERENCE["handlers.md"], re.MULTILINE))
    others = {
        "enqueued",
        "batchable",
        "max_size",
        "keep_result",
        "delay",
        "run_at",
        "priority",
        "max_attempts",
        "headers",
    }
    shown = [field for field in dataclasses.fields(options) if field.name not in others]
    assert {field.name for field in shown} <= table.keys()
    for field in shown:
        if field.name not in ("retry", "messages"):
            assert table[field.name] == "`" + repr(field.default).replace("'", '"') + "`", field.name


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """Each setting of a relay is in docs/configuration.md with its default."""
    text = (ROOT / "docs" / "configuration.md").read_text().partition("## The environment")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.MULTILINE))
    found = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(RelayConfig)}
    assert table == found


def test_the_defaults_of_backoff_are_those_of_the_code() -> None:
    """docs/errors-and-retries.md has each default of `Backoff`."""
    text = (ROOT / "docs" / "errors-and-retries.md").read_text()
    for field in dataclasses.fields(Backoff):
        assert f"{field.name}={field.default!r}," in text
