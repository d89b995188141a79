"""A check that raises is a finding that says whose fault it is: a row's, or outboxq's own."""

import re
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import InvalidRequestError, NoSuchColumnError

from outboxq.doctor import checks
from outboxq.doctor.findings import Check, CheckContext, Finding
from outboxq.errors import PayloadError, SchemaError

OF_A_VALUE = (OverflowError, ValueError, RecursionError, psycopg.DataError)
OURS = (TypeError, KeyError, AttributeError, IndexError, AssertionError, NotImplementedError, LookupError,
        InvalidRequestError, NoSuchColumnError, psycopg.ProgrammingError)  # fmt: skip


def found(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Finding:
    """What the doctor says of a check that raises this."""

    def raises(context: CheckContext) -> Iterator[Finding]:
        raise error

    monkeypatch.setattr(checks, "CHECKS", (Check("it", raises),))
    (one,) = [each for each in checks.run_checks(engine.connect) if each.code == "check-not-made"]
    assert "secret" not in one.title + one.advice
    return one


@pytest.mark.parametrize("kind", OF_A_VALUE)
def test_a_value_that_cannot_be_read_is_a_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """By the type of the error, without its text, which may quote the value."""
    one = found(engine, monkeypatch, kind("secret"))
    assert one.title == f"could not look at it: there is a row that cannot be read ({kind.__name__})"


@pytest.mark.first_and_last
@pytest.mark.parametrize("kind", OURS)
def test_any_other_error_is_a_defect_of_outboxq(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """With its type and its innermost line, to be reported; no row is to blame."""
    one = found(engine, monkeypatch, kind("secret"))
    assert re.match(rf"could not look at it: a defect of outboxq: (\w+\.)*{kind.__name__} \(", one.title)
    assert "tests/doctor/test_refused.py:" in one.title
    assert "report" in one.advice


@pytest.mark.parametrize("error", [SchemaError("the tables are old"), PayloadError("it is broken")])
def test_an_error_of_ours_speaks_for_itself(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Its text says what to do, and quotes no value."""
    assert found(engine, monkeypatch, error).title == f"could not look at it: {error}"


def test_a_value_that_the_driver_cannot_read_is_a_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that no datetime holds, as psycopg meets it."""

    def reads(context: CheckContext) -> Iterator[Finding]:
        context.connection.execute(text("SELECT 'infinity'::timestamptz")).scalar()
        yield from ()

    monkeypatch.setattr(checks, "CHECKS", (Check("it", reads),))
    (one,) = [each for each in checks.run_checks(engine.connect) if each.code == "check-not-made"]
    assert "a row that cannot be read" in one.title
