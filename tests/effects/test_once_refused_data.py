"""`once` and what the database refuses for its data: the call was made, and that is recorded all the same."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, event, text

from outboxq import CallNotApplied, CallRefused
from outboxq.errors import EffectFailed, EffectNotRecorded, EffectUnknown, ResultNotStorable
from tests.support.effects import AsyncOnce, SyncOnce, row

DAY = timedelta(days=1)
FLAVOURS = pytest.mark.parametrize("flavour", [SyncOnce, AsyncOnce], ids=["sync", "async"])


@pytest.fixture(params=[SyncOnce, AsyncOnce], ids=["sync", "async"])
def once(request: pytest.FixtureRequest, engine: Engine) -> Iterator[SyncOnce | AsyncOnce]:
    once = request.param(engine)
    yield once
    once.dispose()


@pytest.fixture
def latin(engine: Engine) -> Iterator[Engine]:
    """Connections that can send Western European texts only."""
    narrow = create_engine(engine.url.update_query_dict({"client_encoding": "latin1"}))
    yield narrow
    narrow.dispose()


class Counted:
    """Counts the calls; raises the answer, or returns it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.count = 0

    def __call__(self, _provider_key: str) -> Any:
        self.count += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def raised(error: type[Exception], run: Callable[[], object]) -> Any:
    with pytest.raises(error) as caught:
        run()
    return caught.value


# Results


def refuse_results(engine: Engine) -> None:
    """By the limits of an index, and by a check, both of the user's."""
    with engine.begin() as connection:
        connection.execute(text("CREATE INDEX ON outboxq.effect ((result::text))"))
        connection.execute(text("ALTER TABLE outboxq.effect ADD CHECK (result::text <> '\"refused\"')"))


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("result", "sqlstate"),
    [
        pytest.param("".join(map(str, range(20_000))), "54000", id="more than an index of the user's takes"),
        pytest.param("refused", "23514", id="what a check of the user's refuses"),
    ],
)
def test_a_result_that_the_database_refuses_is_done_and_not_kept(
    once, engine: Engine, result: object, sqlstate: str
) -> None:
    """It was called, which is recorded without the result, and never called again."""
    refuse_results(engine)
    call = Counted(result)
    first, later = (raised(ResultNotStorable, lambda: once("charge", key="1", call=call)) for _ in range(2))
    assert call.count == 1
    assert first.reason == later.reason == f"the database refused it: SQLSTATE {sqlstate}"
    assert row(engine, "1") | {"status": "done", "result": None} == row(engine, "1")


@pytest.mark.first_and_last
@pytest.mark.parametrize("written", [b'"\xff"', b"1e400000", b"{", b'"\\ud800"'], ids=repr)
def test_a_result_that_is_no_json_is_done_and_not_kept(once, engine: Engine, written: bytes) -> None:
    """What a serializer wrote may be any bytes."""
    call = Counted(msgspec.Raw(written))
    for _ in range(2):
        raised(ResultNotStorable, lambda: once("charge", key="1", call=call))
    assert call.count == 1
    assert row(engine, "1") | {"status": "done", "result": None} == row(engine, "1")


def test_a_result_outside_the_connections_encoding_is_done_and_not_kept(latin: Engine, engine: Engine) -> None:
    """The driver refuses it, before the server is asked."""
    once, call = SyncOnce(latin), Counted("Ж😀")
    for _ in range(2):
        raised(ResultNotStorable, lambda: once("charge", key="1", call=call))
    once.dispose()
    assert call.count == 1
    assert row(engine, "1") | {"status": "done", "result": None} == row(engine, "1")


class Interrupting:
    """Its serializer is interrupted."""

    def model_dump(self, **_: object) -> object:
        raise KeyboardInterrupt


def test_an_interruption_while_a_result_is_encoded_does_not_lose_that_it_is_done(engine: Engine) -> None:
    """Recorded without its result; then the interruption goes on."""
    once, call = SyncOnce(engine), Counted(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        once("charge", key="1", call=call)
    raised(ResultNotStorable, lambda: once("charge", key="1", call=call))
    once.dispose()
    assert call.count == 1


def test_an_interruption_before_the_database_refuses_a_result_does_not_lose_that_it_is_done(engine: Engine) -> None:
    """Recorded without its result, though the interruption came first; then that goes on."""
    refuse_results(engine)
    once, call = SyncOnce(engine), Counted("refused")
    interruptions = [KeyboardInterrupt()]

    def interrupt(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if interruptions and statement.startswith("UPDATE outboxq.effect"):
            raise interruptions.pop()

    event.listen(Engine, "before_cursor_execute", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            once("charge", key="1", call=call)
    finally:
        event.remove(Engine, "before_cursor_execute", interrupt)
    assert row(engine, "1") | {"status": "done", "result": None} == row(engine, "1")
    assert raised(ResultNotStorable, lambda: once("charge", key="1", call=call)).reason.endswith("SQLSTATE 23514")
    once.dispose()
    assert call.count == 1


# Errors


class Unreadable(CallRefused):
    """Its reason cannot be read."""

    def __init__(self) -> None:
        Exception.__init__(self)

    @property
    def reason(self) -> str:
        raise RuntimeError


def refusal(reason: object) -> CallRefused:
    return CallRefused(reason)  # type: ignore[arg-type]  # as an untyped caller may


def test_a_refusal_is_recorded_whatever_its_reason_is(once, engine: Engine) -> None:
    """Refused for good, and replayed in the same words."""
    refusals = {
        "card\N{REPLACEMENT CHARACTER}declined": refusal("card\0declined"),
        "card ? declined": refusal("card \ud800 declined"),
        "x" * 2_000: refusal("x" * 10_000),
        "b'declined'": refusal(b"declined"),
        "None": refusal(None),
        "(this text cannot be read)": Unreadable(),
    }
    for number, (stored, error) in enumerate(refusals.items()):
        call = Counted(error)
        ask = partial(once, "charge", key=str(number), call=call)
        assert [raised(EffectFailed, ask).reason for _ in range(2)] == [stored] * 2
        assert call.count == 1


def test_a_refusal_outside_the_connections_encoding_is_recorded_in_ascii(latin: Engine, engine: Engine) -> None:
    """A provider answers in any language."""
    once, call = SyncOnce(latin), Counted(CallRefused("отказ"))
    reasons = {raised(EffectFailed, lambda: once("charge", key="1", call=call)).reason for _ in range(2)}
    once.dispose()
    assert reasons == {r"\u043e\u0442\u043a\u0430\u0437"}
    assert call.count == 1


def odd_errors() -> dict[str, type[Exception]]:
    nameless = type("Nameless", (Exception,), {})
    nameless.__module__ = None
    return {
        # A class cannot be made with such a name, but it can be given one.
        "a NUL": renamed("Odd\0Error"),
        "half a character": renamed("Odd\ud800Error"),
        "10 kB": renamed("Odd" * 3_500),
        "no module": nameless,
    }


def renamed(name: str) -> type[Exception]:
    error = type("Odd", (Exception,), {})
    error.__module__ = name
    return error


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"classify": lambda _: "final"}, {"status": "failed"}, id="final"),
        pytest.param({"classify": lambda _: "retryable"}, {"status": "retryable", "in_doubt": False}, id="retryable"),
        pytest.param({"provider_remembers": DAY}, {"status": "retryable", "in_doubt": True}, id="key honoured"),
        pytest.param({"already_applied": str}, {"status": "started", "in_doubt": True}, id="can be asked"),
        pytest.param({}, {"status": "unknown"}, id="neither"),
    ],
)
def test_an_error_is_recorded_however_its_class_is_called(
    engine: Engine, options: dict[str, Any], expected: dict[str, object]
) -> None:
    """What it means for the effect stands, with as much of the name as can be stored."""
    once = SyncOnce(engine)
    for oddity, error in odd_errors().items():
        with pytest.raises((error, EffectFailed, EffectUnknown)):
            once("charge", key=oddity, call=Counted(error()), **options)
        found = row(engine, oddity)
        assert found | expected == found
        assert 0 < len(found["error"]) < 2_300
    once.dispose()


@FLAVOURS
def test_a_deadlock_costs_no_result(engine: Engine, flavour) -> None:
    """Ended by the server for the sake of others, a record is made again, with its result."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE SEQUENCE public.records; CREATE FUNCTION public.deadlock_once() RETURNS trigger AS $$ BEGIN "
                "IF NEW.status = 'done' AND nextval('public.records') = 1 THEN "
                "RAISE SQLSTATE '40P01'; END IF; RETURN NEW; END $$ LANGUAGE plpgsql; "
                "CREATE TRIGGER deadlock_once BEFORE UPDATE ON outboxq.effect "
                "FOR EACH ROW EXECUTE FUNCTION public.deadlock_once()"
            )
        )
    once = flavour(engine)
    assert once("charge", key="1", call=Counted("done")) == "done"
    once.dispose()


def test_what_cannot_be_recorded_at_all_is_said(engine: Engine) -> None:
    """A role that may not write, for one: the next caller finds it in doubt."""
    once = SyncOnce(engine)

    def call(_provider_key: str) -> str:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE outboxq.effect ADD CHECK (status = 'started')"))
        return "done"

    raised(EffectNotRecorded, lambda: once("charge", key="1", call=call))
    once.dispose()
    assert row(engine, "1")["status"] == "started"


def test_a_call_that_was_not_applied_stays_retryable_whatever_it_says(once, engine: Engine) -> None:
    """Its text is not stored, only its class."""
    raised(CallNotApplied, lambda: once("charge", key="1", call=Counted(CallNotApplied("busy\0"))))
    assert row(engine, "1") | {"status": "retryable", "in_doubt": False} == row(engine, "1")
