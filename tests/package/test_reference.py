"""The reference: everything public is in it, and its tables are those of the code."""

import dataclasses
import importlib
import inspect
import re

import pytest

import outboxq
from outboxq import Backoff, RelayConfig, errors, events
from tests.support.pages import ROOT

REFERENCE = {path.name: path.read_text() for path in sorted(ROOT.glob("docs/reference/*.md"))}
EVERYTHING = "\n".join(REFERENCE.values())
# What the submodules show, whose names are all documented. The names of `testing` that are constants or types of
# literals are explained in its text.
SUBMODULES = ("http", "postgres", "testing", "doctor")


def documented(name: str) -> bool:
    """Whether the reference has an entry for it, or a text that explains it."""
    return re.search(rf"^::: outboxq\.(?:[\w.]+\.)?{name}$", EVERYTHING, re.MULTILINE) is not None


@pytest.mark.parametrize("name", [name for name in outboxq.__all__ if name != "__version__"])
def test_every_public_name_has_an_entry(name: str) -> None:
    """What is in `outboxq.__all__` is in the reference, under this name."""
    assert re.search(rf"^::: outboxq\.{name}$", EVERYTHING, re.MULTILINE) or hasattr(errors, name)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_every_name_of_a_submodule_is_in_the_reference(submodule: str) -> None:
    """What a documented submodule exports has an entry, or is named in the text."""
    module = importlib.import_module(f"outboxq.{submodule}")
    assert [name for name in module.__all__ if not documented(name) and f"`{name}`" not in EVERYTHING] == []


def test_every_entry_is_there() -> None:
    """An entry names what exists."""
    for name in re.findall(r"^::: (outboxq[\w.]*)$", EVERYTHING, re.MULTILINE):
        found: object = outboxq
        for part in name.split(".")[1:]:
            found = getattr(found, part, None) or importlib.import_module(f"{getattr(found, '__name__', '')}.{part}")
        assert found is not None, name


def test_the_table_of_errors_is_that_of_the_code() -> None:
    """Each error is in the table with its bases, and no other."""
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", REFERENCE["errors.md"], re.MULTILINE))
    found = {
        name: ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.OutboxqError)
    }
    assert table == found


def test_the_events_are_documented_where_they_are_defined() -> None:
    """The page shows the module itself, and each event has a docstring."""
    assert "::: outboxq.events\n" in REFERENCE["events.md"]
    assert [kind.__name__ for kind in events.Event.__args__ if not kind.__doc__] == []


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
