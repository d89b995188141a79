"""What leads to a failure, or is repeated in its texts, shows no payload; and redacting it takes bounded work."""

from collections.abc import Callable

import psycopg
import psycopg.errors
import pydantic
import pytest
from sqlalchemy import Engine

from outboxq.execution.failure import describe_failure, describe_reason
from tests.execution.test_failure import job_with, raised

# Not an argument of the job, so that nothing but the place that quotes it would take it out.
DERIVED = "4111-1111-derived"


class FromAsyncpg(Exception):
    sqlstate = "22P02"


def _refused() -> None:
    raise FromAsyncpg(f'invalid input syntax for type integer: "{DERIVED}"')


def _repeated() -> None:
    try:
        _refused()
    except FromAsyncpg as error:
        raise RuntimeError(f"could not save: {error}") from None


def _repeated_in_a_group() -> None:
    try:
        _refused()
    except FromAsyncpg as error:
        inner = RuntimeError(f"could not save: {error}")
        inner.__cause__ = error
    raise ExceptionGroup(f"one failed: {inner}", [inner])


def _repeated_in_a_note() -> None:
    try:
        _refused()
    except FromAsyncpg as error:
        later = RuntimeError("could not save")
        later.add_note(str(error))
        raise later from error


@pytest.mark.parametrize("fail", [_repeated, _repeated_in_a_group, _repeated_in_a_note])
def test_what_a_data_error_quotes_shows_nowhere(fail: Callable[[], None]) -> None:
    """Whichever text repeats it, and whether or not its chain is shown: `from None` hides the error, not its text."""
    record = describe_failure(raised(fail), job_with({})).record
    assert DERIVED not in record.as_json()
    assert "text withheld" in record.as_json()


class Translated(psycopg.errors.UniqueViolation):
    """As a server with messages in French sends it."""

    sqlstate = "23505"

    class diag:  # noqa: N801  # psycopg's name
        message_primary = "la valeur d'une clé dupliquée rompt la contrainte unique"
        message_detail = f"La clé « (card)=({DERIVED}) » existe déjà."

    def __str__(self) -> str:
        return f"{self.diag.message_primary}\nDÉTAIL : {self.diag.message_detail}"


def test_a_row_that_the_server_quotes_is_taken_out_in_its_language() -> None:
    """The fields of the server's report are known; the titles before them are those of its language."""

    def fail() -> None:
        try:
            raise Translated
        except Translated as error:
            raise RuntimeError(f"could not save: {error}") from error

    record = describe_failure(raised(fail), job_with({})).record
    assert DERIVED not in record.as_json()
    assert "rompt la contrainte unique" in record.message


def test_the_row_of_a_copy_is_taken_out(engine: Engine) -> None:
    """PostgreSQL quotes it in its CONTEXT, which is part of the error's text."""

    def fail() -> None:
        with engine.connect() as connection:
            cursor = connection.connection.cursor()
            cursor.execute("CREATE TEMPORARY TABLE paid (card text) ON COMMIT DROP")
            try:
                with cursor.copy("COPY paid FROM STDIN (FORMAT csv)") as copy:  # type: ignore[attr-defined]  # psycopg's
                    copy.write(f"{DERIVED},{DERIVED}\n")
            except psycopg.Error as error:
                raise RuntimeError(f"could not save: {error}") from None

    error = raised(fail)
    assert DERIVED in str(error), "there is something to leave out"
    record = describe_failure(error, job_with({})).record
    assert DERIVED not in record.as_json()
    assert "could not save" in record.message


@pytest.mark.parametrize(
    "text",
    [
        f"duplicate key\nDETAIL:  Key (card)=({DERIVED}) already exists.",
        f"(UniqueViolation) duplicate key\n[SQL: INSERT]\n[parameters: {{'card': '{DERIVED}'}}]",
    ],
)
def test_rows_are_taken_out_of_reasons_and_notes(text: str) -> None:
    """A handler that repeats the text of an error, as its reason or in a note, shows no more than the error itself."""
    error = ValueError("no")
    error.add_note(text)
    assert DERIVED not in describe_failure(error, job_with({})).record.as_json()
    assert DERIVED not in describe_reason(text, "{}")
    assert "duplicate key" in describe_reason(text, "{}")


class Payment(pydantic.BaseModel):
    card: int
    text: str = ""


@pytest.mark.parametrize("card", ["4111-1111-" + "0123456789" * 10, {"number": "4111-1111-" + "0123456789" * 10}])
def test_the_input_that_pydantic_quotes_is_taken_out(card: object) -> None:
    """It leaves out the middle of a long one, so that it is not found by the argument's value."""
    error = raised(lambda: Payment.model_validate({"card": card, "text": 4}))
    assert "4111-1111" in str(error), "there is something to leave out"
    message = describe_failure(error, job_with({"card": card})).record.message
    assert "4111-1111" not in message
    assert "input_value=(withheld), input_type=" in message
    assert "Input should be a valid integer" in message
    assert "Input should be a valid string" in message


def _of_a_class_that_was_made(value: str) -> None:
    raise type(f"Refused{value}", (ValueError,), {"__module__": f"made.{value}"})("no")


def _in_a_file_that_was_made(value: str) -> None:
    exec(compile("def work():\n    raise ValueError('no')\nwork()", f"/templates/{value}.html", "exec"), {})


def _in_a_function_that_was_made(value: str) -> None:
    exec(compile(f"def {value}():\n    raise ValueError('no')\n{value}()", "/templates/a.html", "exec"), {})


@pytest.mark.parametrize(
    "fail",
    [_of_a_class_that_was_made, _in_a_file_that_was_made, _in_a_function_that_was_made],
    ids=lambda f: f.__name__,
)
def test_names_that_were_made_from_values_show_none(fail: Callable[[str], None]) -> None:
    """Of classes, files and functions that are not those of a module; those keep their names, whatever the values."""
    args = {"card": "card_4111_1111", "what": fail.__name__, "error": "ValueError"}
    record = describe_failure(raised(lambda: fail("card_4111_1111")), job_with(args)).record
    assert "card_4111_1111" not in record.as_json()
    assert "<card>" in record.as_json()
    assert f"in {fail.__name__}" in record.traceback()
    assert "ValueError" in record.type or fail is _of_a_class_that_was_made
