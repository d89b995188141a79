"""What is remembered of a failed attempt never shows the payload, and can always be stored."""

import json
import re
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, date, datetime
from types import FrameType, TracebackType
from typing import NoReturn
from uuid import UUID

import msgspec
import psycopg
import psycopg.errors
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError, StatementError

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS
from outboxq.error_record import ErrorRecord, read_attempts
from outboxq.errors import EntityGone, PayloadError, PermanentError
from outboxq.execution.failure import (
    KEPT_ERRORS,
    MOST_VALUES,
    READ_CHARACTERS,
    Redactor,
    describe_failure,
    describe_reason,
    frames_of,
    kept_errors,
)
from outboxq.job import Job
from tests.support.growth import LINEAR, growth

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job_with(args: object) -> Job:
    stored = json.dumps(args, ensure_ascii=False)
    return Job(UUID(int=7), "accounts", "credit", stored, "{}", 0, 3, None, 0, 0, None, None, "[]", NOW, NOW, 1)


def redact(message: str, args: str) -> str:
    return Redactor([args]).redact(message)


def message_of(error: BaseException, args: object = None) -> str:
    return describe_failure(error, job_with(args or {})).record.message


class Diagnosed(psycopg.errors.UniqueViolation):
    """As the server sends it; the driver's own object cannot be made without one."""

    sqlstate = "23505"

    class diag:  # noqa: N801  # psycopg's name
        message_primary = 'duplicate key value violates unique constraint "person_email_key"'
        message_detail = "Key (email)=(ann@example.org) already exists."

    def __str__(self) -> str:
        return f"{self.diag.message_primary}\nDETAIL:  {self.diag.message_detail}"


class DataError(psycopg.errors.InvalidTextRepresentation):
    sqlstate = "22P02"

    class diag:  # noqa: N801  # psycopg's name
        message_primary = 'invalid input syntax for type integer: "ann@example.org"'

    def __str__(self) -> str:
        return f"{self.diag.message_primary}\nLINE 1: SELECT 'ann@example.org'::int"


def wrapped(original: BaseException, kind: type[DBAPIError] = DBAPIError) -> DBAPIError:
    return kind("INSERT INTO person VALUES (%(email)s)", {"email": "ann@example.org"}, original)


def _raised_from(original: BaseException) -> BaseException:
    try:
        try:
            raise wrapped(original)
        except DBAPIError as error:
            raise RuntimeError(f"could not save: {error}") from error
    except RuntimeError as error:
        return error


def _pending_rollback(original: BaseException) -> BaseException:
    return PendingRollbackError(
        "This Session's transaction has been rolled back due to a previous exception during flush. To begin a new "
        f"transaction with this Session, first issue Session.rollback(). Original exception was: {wrapped(original)}"
    )


@pytest.mark.parametrize("original", [Diagnosed("x"), DataError("x")], ids=lambda e: e.sqlstate)
@pytest.mark.parametrize(
    "wrap", [lambda e: e, wrapped, _raised_from, _pending_rollback], ids=["bare", "sqlalchemy", "own", "pending"]
)
def test_a_database_error_shows_no_row_and_no_parameter(original: psycopg.Error, wrap) -> None:
    """DETAIL, the texts of class 22 and SQLAlchemy's parameters are left out, also where a user's text took them over.

    The values are not the job's own arguments, so that nothing else would take them out.
    """
    error = wrap(original)
    assert "ann@example.org" in str(error), "there is something to leave out"
    record = describe_failure(error, job_with({})).record
    assert "ann@example.org" not in record.as_json()
    assert record.message


def test_a_constraint_is_named() -> None:
    """What is left is enough to find the fault."""
    record = describe_failure(wrapped(Diagnosed("x"), IntegrityError), job_with({})).record
    assert record.type.endswith("Diagnosed")
    assert record.message == 'duplicate key value violates unique constraint "person_email_key" (SQLSTATE 23505)'


def test_errors_of_other_drivers_are_treated_alike() -> None:
    """asyncpg and psycopg2 put DETAIL into the text; both name the SQLSTATE."""

    class FromAsyncpg(Exception):
        sqlstate = "22P02"

    class FromPsycopg2(Exception):
        pgcode = "23505"

    data = message_of(StatementError("x", "SELECT", {}, FromAsyncpg('invalid input: "ann@example.org"')))
    assert data == "SQLSTATE 22P02 (its text is withheld, because it may quote data)"
    assert message_of(FromPsycopg2("duplicate key\nDETAIL:  Key (email)=(ann@example.org)")) == "duplicate key"


@pytest.mark.parametrize(
    "args",
    [
        {"email": "ann@example.org"},
        {"data": {"deep": [{"email": "ann@example.org"}]}},
        {"data": {"ann@example.org": 1}},
        {"data": ["x", ["ann@example.org"]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["no such person: ann@example.org", "'ann@example.org'", "xann@example.orgx"])
def test_argument_values_are_replaced_by_their_names(args: dict[str, object], text: str) -> None:
    """Wherever they stand in the arguments, and inside other words too."""
    (name,) = args
    assert message_of(ValueError(text), args) == text.replace("ann@example.org", f"<{name}>")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('it\'s\na "secret"', repr('it\'s\na "secret"')),
        ("línea\tsecreta", ascii("línea\tsecreta")),
        ("back\\slash", json.dumps("back\\slash")),
        ("2026-03-04T05:06:07Z", str(datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC))),
        ("2026-03-04T05:06:07.089Z", repr(datetime(2026, 3, 4, 5, 6, 7, 89_000, tzinfo=UTC))),
        ("2026-03-04", repr(date(2026, 3, 4))),
        (-12_345, "balance is -12345"),
        (123.75, "123.75 is too much"),
        (10**30, f"{10**30}!"),
    ],
)
def test_values_are_found_in_the_spellings_of_python(value: object, text: str) -> None:
    """A repr, an escape or a datetime's own text is the value all the same."""
    message = message_of(ValueError(text), {"value": value})
    assert "<value>" in message
    assert all(piece not in message for piece in ("secret", "slash", "05:06", "5, 6", "12345", "123.75", "000000"))


def test_a_short_value_leaves_longer_words_alone() -> None:
    """An argument "order" does not eat into "ordered"; a single character identifies nothing."""
    args = {"what": "order", "state": "x", "flag": True, "n": 7}
    assert message_of(ValueError("the order was ordered, 7 x True"), args) == "the <what> was ordered, 7 x True"


def test_a_longer_value_is_replaced_before_a_shorter_one_inside_it() -> None:
    """Nothing of the longer one is left standing."""
    assert redact("ann.example.org", json.dumps({"host": "example", "full": "ann.example.org"})) == "<full>"


def test_a_short_value_beside_a_longer_one_is_replaced() -> None:
    """A value that was replaced is no part of the word beside it."""
    assert redact("MarianneNg", json.dumps({"last": "Ng", "first": "Marianne"})) == "<first><last>"


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=30)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), words, min_size=1), st.data())
@example({"a": "\\\\\\\\\\\\\\\\"}, None)
def test_no_long_value_survives(args: dict[str, str], data: st.DataObject | None) -> None:
    """Whatever stands around it. Only the names that were put in could spell it again, and those are known."""
    value = data.draw(st.sampled_from(sorted(args.values()))) if data else next(iter(args.values()))
    message = redact(f"before{value}after", json.dumps(args, ensure_ascii=False))
    assert value not in message.replace("<a>", "").replace("<b>", "").replace("<c>", "")


@given(st.lists(st.text("ab", min_size=8, max_size=12), min_size=1, max_size=4), st.text("ab", max_size=60))
@example(["aaaabbbb", "bbbbaaaa"], "aaaabbbbaaaa")
@example(["aaaabbbb", "bbbbaaaab", "aaaabaaa"], "aaaabbbbaaaabaaa")
def test_every_character_of_a_long_value_is_taken_out(values: list[str], message: str) -> None:
    """Also if two values overlap, and whatever is taken out first."""
    covered = {place for value in values for found in re.finditer(value, message) for place in range(*found.span())}
    left = "".join(character for place, character in enumerate(message) if place not in covered)
    assert redact(message, json.dumps({"x": values})).replace("<x>", "") == left


@pytest.mark.parametrize("length", [200, 1_000])
@pytest.mark.parametrize("place", [1, 7, 1_500])
def test_a_value_that_the_cut_goes_through_is_taken_out(place: int, length: int) -> None:
    """A message is read up to a bound; a value that begins before it is found by as many characters as the bound."""
    value = "secret-" + "0123456789" * length
    message = "x" * (READ_CHARACTERS - place) + value
    assert redact(message, json.dumps({"document": value})) == "x" * (READ_CHARACTERS - place) + "<document>"


def test_a_value_that_reads_like_a_database_error_uncovers_nothing() -> None:
    """DETAIL ends what is kept, also if an argument spells it; a text with DETAIL in it is withheld whole."""
    error = ValueError('could not save\nDETAIL:  Key (email)=("ann@example.org")')
    assert message_of(error, {"what": "DETAIL", "which": "DETAIL:  Key"}) == "could not save"

    class FromAsyncpg(Exception):
        sqlstate = "22P02"

    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError('failed: bad value "ann@example.org DETAIL: x"') from FromAsyncpg(
            'bad value "ann@example.org DETAIL: x"'
        )
    assert message_of(raised.value) == "failed: (text withheld)"


def test_a_long_name_does_not_blow_up_a_message() -> None:
    """Arguments that SQL stored may have names of any length, and values that stand anywhere."""
    assert len(redact("10 " * 10_000, json.dumps({"n" * 100_000: 10}))) < 100_000


def _quoting_all(count: int) -> tuple[str, str]:
    args = json.dumps({"document": [f"value {number:07}" for number in range(count)]})
    return args, args


def _of_short_ones(count: int) -> tuple[str, str]:
    return "10 a0 " * count, json.dumps({"document": [f"{number:x}" for number in range(count)]})


def _of_repeated_letters(count: int) -> tuple[str, str]:
    return "a" * count * 60, json.dumps({"document": ["a" * 25 + f"{number:06}" + "a" * 25 for number in range(count)]})


def _of_one_value(count: int) -> tuple[str, str]:
    return "10 " * count, json.dumps({f"n{number}": "10" for number in range(count)})


@pytest.mark.first_and_last
@pytest.mark.parametrize("build", [_quoting_all, _of_short_ones, _of_repeated_letters, _of_one_value])
def test_an_error_is_redacted_in_linear_time(build: Callable[[int], tuple[str, str]]) -> None:
    """It happens in the claim's transaction: 90 kB of arguments, all of them quoted, took 4.6 s."""
    assert growth(lambda given: redact(*given), build, 50 if build is _of_repeated_letters else 150) < LINEAR


def test_a_chain_of_causes_is_described_in_linear_time() -> None:
    """Each cause that quotes data is taken out of the text that took it over."""

    class FromAsyncpg(Exception):
        sqlstate = "22P02"

    def build(count: int) -> BaseException:
        texts = [f"invalid input {number:07}" for number in range(count)]
        error: BaseException = ValueError(" ".join(texts))
        first = error
        for text in texts:
            error.__cause__ = FromAsyncpg(text)
            error = error.__cause__
        return first

    assert growth(message_of, build, 150) < LINEAR


def test_our_own_errors_are_left_as_they_are() -> None:
    """They never quote a value, and the names in them are needed."""
    args = {"account": "account", "Account": "missing"}
    assert "argument 'account'" in message_of(EntityGone("account", "Account"), args)
    assert message_of(PayloadError("argument 'account': Expected `int`"), args) == "argument 'account': Expected `int`"


class Declined(PermanentError):
    """Of an application."""


@pytest.mark.parametrize("kind", [PermanentError, Declined])
def test_errors_that_handlers_raise_are_redacted_although_their_class_is_ours(kind: type[PermanentError]) -> None:
    """Their texts are written by the application, and may quote values."""
    assert message_of(kind("no such card 4111-1111"), {"card": "4111-1111"}) == "no such card <card>"


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_an_error_of_any_name_can_be_stored(name: str) -> None:
    kind = type("Odd", (Exception,), {})
    kind.__qualname__ = name
    stored = json.loads(describe_failure(kind(), job_with({})).record.as_json())["type"]
    assert "\0" not in stored
    stored.encode()


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 100_000, "\0" * 5000, ""], ids=lambda t: ascii(t[:4]))
def test_every_text_can_be_stored(text: str) -> None:
    """NUL and lone surrogates would make jsonb refuse the record, and the job would never be settled."""
    record = describe_failure(ValueError(text), job_with({})).record
    stored = json.loads(record.as_json())["message"]
    assert len(stored) <= MAX_MESSAGE_CHARACTERS
    assert "\0" not in stored
    stored.encode()


def test_an_error_whose_text_cannot_be_read_is_still_recorded() -> None:
    """A broken __str__ must not take the relay with it."""

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    record = describe_failure(Broken(), job_with({})).record
    assert record.message == "(the text of this Broken cannot be read)"
    assert record.type.endswith("Broken")


def test_errors_that_cause_each_other_are_read_once() -> None:
    """A chain of causes may be a circle."""
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert message_of(first) == "first"


@pytest.mark.parametrize(
    ("reason", "kept"), [("no ann@example.org", "no <email>"), ("a\0b", "a\ufffdb"), (5, "5"), (None, "None")]
)
def test_a_reason_is_redacted_and_can_be_stored(reason: object, kept: str) -> None:
    """What a handler returns with a retry, a dead letter or a discard."""
    assert describe_reason(reason, job_with({"email": "ann@example.org"}).args) == kept
    assert len(describe_reason("x" * 100_000, job_with({}).args)) == MAX_MESSAGE_CHARACTERS


def test_the_users_frames_are_kept_and_ours_are_not() -> None:
    """The innermost five, without libraries: where the fault is."""

    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        Redactor(["{}"]).redact(None)  # type: ignore[arg-type]

    try:
        fail(8)
    except TypeError as error:
        where = describe_failure(error, job_with({})).record.where
    assert len(where) == 5
    assert all(frame.startswith("tests/execution/test_failure.py:") and frame.endswith(" in fail") for frame in where)


@pytest.mark.parametrize(
    ("sqlstate", "transient"), [("40001", True), ("40P01", True), ("23505", False), ("57014", False)]
)
def test_deadlocks_and_serialization_failures_are_nobodys_fault(sqlstate: str, transient: bool) -> None:
    """Bare or wrapped by SQLAlchemy."""
    original = psycopg.errors.lookup(sqlstate)("x")
    assert describe_failure(original, job_with({})).transient is transient
    assert describe_failure(wrapped(original), job_with({})).transient is transient


@given(st.integers(0, 60))
def test_the_history_keeps_the_last_25(length: int) -> None:
    """What is stored plus one more is never longer, and the oldest go first."""
    stored = json.dumps([{"attempt": n} for n in range(length)])
    kept = json.loads(kept_errors(stored))
    assert len(kept) == min(length, KEPT_ERRORS - 1) == min(length, 24)
    assert kept == json.loads(stored)[-24:]


@pytest.mark.parametrize("stored", ["{}", "null", "nonsense", '"x"'])
def test_a_broken_history_is_begun_again(stored: str) -> None:
    """It never stops a job from being settled."""
    assert kept_errors(stored) == "[]"


def test_a_record_is_plain_json() -> None:
    """The database adds the time."""
    record = ErrorRecord(3, "ValueError", "bad", ("app.py:1 in f",))
    assert json.loads(record.as_json()) == {
        "attempt": 3, "type": "ValueError", "message": "bad", "where": ["app.py:1 in f"]
    }  # fmt: skip


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:  # noqa: BLE001  # whatever the test raises
        return error
    raise AssertionError("nothing was raised")


def _chained() -> None:
    try:
        {}["ann@example.org"]
    except KeyError as error:
        raise ValueError("no such ann@example.org") from error


def _in_context() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second")  # noqa: B904  # its context is what is looked at


def _without_context() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second") from None


def _grouped() -> None:
    error = ExceptionGroup("two of ann@example.org", [raised(_chained), TypeError("other")])
    error.add_note("while ann@example.org was written to")
    raise error


def traceback_of(act: Callable[[], object], args: object = None) -> str:
    return describe_failure(raised(act), job_with(args or {})).record.traceback()


@pytest.mark.parametrize("act", [_chained, _in_context, _without_context, _grouped], ids=lambda act: act.__name__)
def test_a_traceback_reads_as_python_prints_it(act: Callable[[], None]) -> None:
    """Causes, contexts and groups, in Python's own words; without the lines of the sources."""
    printed = [
        line
        for line in "".join(traceback.format_exception(raised(act))).rstrip().split("\n")
        if not re.fullmatch(r"[ |]* {4,}(raise|act|\{|\^|~|error).*", line)
    ]
    assert traceback_of(act).split("\n") == printed


def test_no_text_of_a_chain_shows_the_payload() -> None:
    """Messages of causes and of members of groups, and notes, are redacted like the message."""
    told = traceback_of(_grouped, {"email": "ann@example.org"})
    assert "ann@example.org" not in told
    assert "two of <email>" in told
    assert "while <email> was written to" in told
    assert "KeyError: '<email>'" in told


def _fails_deep(times: int) -> None:
    if times:
        _fails_deep(times - 1)
    raise ValueError("deep")


def test_a_deep_stack_keeps_both_of_its_ends() -> None:
    """An endless recursion is no more than twenty lines; where it began and where it ended are among them."""
    told = traceback_of(lambda: _fails_deep(900)).split("\n")
    assert len(told) <= 23
    assert "<lambda>" in "".join(told[:5])
    assert "in _fails_deep" in told[-2]
    assert any("frames left out]" in line for line in told)


def _long_chain(length: int) -> BaseException:
    error: BaseException = ValueError("number 0")
    for number in range(1, length):
        try:
            raise RuntimeError(f"number {number}") from error
        except RuntimeError as caught:
            error = caught
    return error


def test_a_long_chain_keeps_both_of_its_ends() -> None:
    """The last that was raised, and the first, which is the cause of all."""
    told = describe_failure(_long_chain(100), job_with({})).record.traceback()
    assert "number 99" in told
    assert "number 0\n" in told
    assert "[90 exceptions between the one above and the one below left out]" in told


WIDE = "\N{GRINNING FACE}" * 2_000


@pytest.mark.parametrize(
    "error",
    [
        _long_chain(100),
        ExceptionGroup(WIDE, [ExceptionGroup(WIDE, [ValueError(WIDE)] * 100)] * 100),
        raised(lambda: _fails_deep(900)),
    ],
    ids=["chain", "group", "deep"],
)
def test_what_is_stored_of_a_traceback_is_small(error: BaseException) -> None:
    """A failure that is told at length takes no more room than 8 KiB beside its message."""
    error.add_note(WIDE)
    record = describe_failure(error, job_with({})).record
    assert len(msgspec.json.encode(record.chain)) <= 8 * 1024
    assert record.chain


def test_every_text_is_withheld_if_there_are_too_many_values() -> None:
    """The number of values is capped, in all of their spellings, and beyond it no text is shown unredacted."""
    values = [f"value {number:07}" for number in range(MOST_VALUES)]
    within, beyond = (
        describe_failure(ValueError(" ".join(values)), job_with({"values": each})).record
        for each in (values, [*values, "line\nbreak"])
    )
    assert within.message.startswith("<values> <values> ")
    assert beyond.message == "(text withheld: there are too many values that it may quote)"
    assert "value 0" not in beyond.as_json()


def test_a_long_text_is_searched_for_many_values_in_its_beginning_only() -> None:
    """A megabyte that quotes 10,000 arguments is searched once for each argument, and again behind each match in the
    characters that are kept."""
    args = {f"argument{number}": f"value {number:07}" for number in range(MOST_VALUES)}
    text = " ".join(args.values()) * 8
    assert len(text) > 1_000_000
    searches = 0

    def count(_frame: FrameType, event: str, called: object) -> None:
        nonlocal searches
        searches += event == "c_call" and getattr(called, "__name__", "") == "find"

    redactor = Redactor([json.dumps(args)])
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        redacted = redactor.redact(text)
    finally:
        sys.setprofile(before)
    assert "value" not in redacted
    assert MOST_VALUES <= searches <= MOST_VALUES + READ_CHARACTERS / len("value 0000000")


def _stack_of(length: int) -> BaseException:
    innermost = raised(lambda: _fails_deep(0))
    step = innermost.__traceback__
    assert step is not None
    for _ in range(length):
        step = TracebackType(step, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return innermost.with_traceback(step)


@pytest.mark.large
def test_an_endless_recursion_is_described_by_its_ends() -> None:
    """Of a hundred thousand frames a hundred and fifty are looked at: all of them took four seconds."""
    error = _stack_of(100_000)
    assert len(frames_of(error)) == 151
    assert "[99,983 frames left out]" in describe_failure(error, job_with({})).record.traceback()


class Odd(Exception):
    """Its attributes are no more what they are of other exceptions."""

    def __init__(self) -> None:
        self.__notes__ = 5

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise SystemExit

    @property
    def __suppress_context__(self) -> bool:  # type: ignore[override]
        raise SystemExit


class Refusing(Exception):
    """Lets nothing be read of it."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit(name)


class OddlyTraced(Exception):
    __traceback__ = 5  # type: ignore[assignment]


class Wrapping(StatementError):
    """Looks like an error of a driver that SQLAlchemy has wrapped, and has none."""

    def __init__(self) -> None:
        super().__init__("no", "SELECT", {}, ValueError("no"))

    @property
    def orig(self) -> BaseException:  # type: ignore[override]
        raise SystemExit

    @orig.setter
    def orig(self, _: object) -> None:
        pass


class Lying(Exception):
    """Pretends to be an error of a driver that SQLAlchemy has wrapped."""

    __class__ = property(lambda _: DBAPIError)  # type: ignore[assignment]


class OddGroup(ExceptionGroup[ValueError]):
    exceptions = (1, "x", None)  # type: ignore[assignment]


class OddNotes(list[object]):
    def __getitem__(self, _: object) -> NoReturn:
        raise SystemExit


def _oddly_noted() -> ValueError:
    error = ValueError("no")
    error.__notes__ = OddNotes(["x"])
    return error


ODD = [Odd, Refusing, OddlyTraced, Wrapping, Lying, lambda: OddGroup("two", [ValueError("no")]), _oddly_noted]


@pytest.mark.parametrize("make", ODD)
def test_an_exception_that_cannot_be_looked_at_is_recorded(make: Callable[[], BaseException]) -> None:
    """Whatever a user's class makes of what exceptions have, the attempt has its type, message and place."""

    def fail() -> None:
        raise make()

    with pytest.raises(BaseException) as failed:  # all of them
        fail()
    record = describe_failure(failed.value, job_with({})).record
    assert record.type.endswith(type(failed.value).__name__)
    assert "in fail" in record.where[-1]
    assert "in fail" in record.traceback()


def test_old_records_are_read_and_broken_ones_left_out() -> None:
    """What an earlier version stored, and what nothing of ours wrote."""
    old = '{"attempt": 1, "type": "ValueError", "message": "bad", "where": ["a.py:1 in f"], "at": "2026-01-01"}'
    (read,) = read_attempts(f'[5, {old}, {{"attempt": "x"}}]')
    assert (read.type, read.message, read.at, read.traceback()) == ("ValueError", "bad", "2026-01-01", "")
    assert read_attempts("nonsense") == []


def test_texts_are_whole_only_if_the_handler_says_so() -> None:
    """Then also those of drivers, with the rows that they quote."""
    error = wrapped(Diagnosed("x"), IntegrityError)
    assert "ann@example.org" in describe_failure(error, job_with({}), is_whole=True).record.message
