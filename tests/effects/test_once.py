"""`once`: called once, recorded at once, replayed ever after; what nobody can know is never guessed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from uuid import uuid5

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import Applied, CallNotApplied, CallRefused, Effects, NotApplied, Unknown
from outboxq.errors import (
    ArgumentError,
    ConfigError,
    EffectConflict,
    EffectFailed,
    EffectInProgress,
    EffectLockLost,
    EffectUnknown,
    HandlerError,
    InvalidKey,
    PayloadError,
    ResultNotStorable,
)
from outboxq.postgres import Database
from tests.support.app import Account
from tests.support.effects import AsyncOnce, SyncOnce, age, counted_work, let_lock_run_out, row
from tests.support.waiting import PATIENCE, wait_until

DAY = timedelta(days=1)


@dataclass
class Charge:
    id: str
    cents: int


class Provider:
    """Counts the calls, and answers or fails as it is told."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.keys: list[str] = []

    def __call__(self, provider_key: str) -> object:
        self.keys.append(provider_key)
        answer = self.answers.pop(0) if self.answers else {"id": provider_key}
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(params=[SyncOnce, AsyncOnce], ids=["sync", "async"])
def once(request: pytest.FixtureRequest, engine: Engine) -> Iterator[SyncOnce | AsyncOnce]:
    once = request.param(engine)
    yield once
    once.dispose()


def fail(once: Callable[..., object], error: type[BaseException], key: str, call: Provider, **options: object) -> None:
    with pytest.raises(error):
        once("charge", key=key, call=call, **options)


# Replaying


def test_a_result_is_replayed_and_never_asked_for_again(once, engine: Engine) -> None:
    """Once success is recorded, the call is never made again."""
    provider = Provider({"id": "ch_1"})
    results = [once("charge", key="1", call=provider) for _ in range(3)]
    assert results == [{"id": "ch_1"}] * 3
    assert len(provider.keys) == 1
    assert row(engine, "1")["status"] == "done"


def test_the_first_caller_gets_exactly_what_a_replay_gives(once) -> None:
    """A result comes back as its declared type, through JSON, the first time too."""

    def call(provider_key: str) -> Charge:
        return Charge("ch_1", 500)

    assert [once("charge", key="1", call=call) for _ in range(2)] == [Charge("ch_1", 500)] * 2
    undeclared = [once("charge", key="2", call=lambda _: Charge("ch_2", 1)) for _ in range(2)]
    assert undeclared == [{"id": "ch_2", "cents": 1}] * 2


def test_the_type_of_a_result_can_be_given(once) -> None:
    """`returns` types what a lambda returns."""
    results = [once("charge", key="1", call=lambda _: {"id": "a", "cents": 2}, returns=Charge) for _ in range(2)]
    assert results == [Charge("a", 2)] * 2


def test_a_result_that_would_come_back_changed_is_not_stored(once) -> None:
    """The call was made, and is not made again; a type that is declared is read as it was."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    keys: list[str] = []

    def provider(key: str) -> Any:
        keys.append(key)
        return {"at": moment}

    with pytest.raises(ResultNotStorable, match=r"would not come back the same: \[key 1\], a datetime, would be a str"):
        once("charge", key="1", call=provider)
    with pytest.raises(ResultNotStorable):
        once("charge", key="1", call=provider)
    assert len(keys) == 1
    assert once("charge", key="2", call=provider, returns=dict[str, datetime]) == {"at": moment}


def test_none_is_a_result(once) -> None:
    """A call that returns nothing is done all the same, and replayed."""
    provider = Provider(None)
    assert [once("charge", key="1", call=provider) for _ in range(2)] == [None, None]
    assert len(provider.keys) == 1


def test_once_costs_two_short_transactions_and_a_replay_one(engine: Engine) -> None:
    """Claim and record, a statement each; the id of the deployment is read once per process."""
    once = SyncOnce(engine)
    once("charge", key="warm", call=Provider())
    with counted_work() as sent:
        once("charge", key="1", call=Provider())
    assert [word.split()[0] for word in sent] == ["WITH", "COMMIT", "UPDATE", "COMMIT"]
    with counted_work() as sent:
        once("charge", key="1", call=Provider())
    assert [word.split()[0] for word in sent] == ["WITH", "COMMIT"]
    once.dispose()


# The provider's key


def test_the_provider_key_is_the_same_at_every_try_and_nobody_elses(once, engine: Engine) -> None:
    """A UUIDv5 of deployment, scope and key."""
    provider = Provider(CallNotApplied("busy"))
    fail(once, CallNotApplied, "1", provider)
    once("charge", key="1", call=provider)
    other = Provider()
    once("refund", key="1", call=other)
    once("charge", key="2", call=other)
    with engine.connect() as connection:
        deployment = connection.execute(text("SELECT id FROM outboxq.deployment")).scalar_one()
    assert provider.keys == [str(uuid5(deployment, "charge\n1"))] * 2
    assert len({*provider.keys, *other.keys}) == 3


def test_a_started_effect_keeps_its_provider_key_whatever_becomes_of_the_deployment(engine: Engine) -> None:
    """The other side is asked again with the key that it was given."""
    provider = Provider(TimeoutError())
    first, second = SyncOnce(engine), SyncOnce(engine)
    fail(first, TimeoutError, "1", provider, provider_remembers=DAY)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.deployment SET id = gen_random_uuid()"))
    second("charge", key="1", call=provider, provider_remembers=DAY)
    assert provider.keys[0] == provider.keys[1]
    first.dispose()
    second.dispose()


# Errors of the call


def test_a_call_that_was_not_applied_is_made_again(once, engine: Engine) -> None:
    """CallNotApplied, and a refused connection, leave no doubt."""
    provider = Provider(CallNotApplied("busy"), ConnectionRefusedError(), {"id": "ch_1"})
    fail(once, CallNotApplied, "1", provider)
    assert row(engine, "1") | {"status": "retryable", "in_doubt": False} == row(engine, "1")
    fail(once, ConnectionRefusedError, "1", provider)
    assert once("charge", key="1", call=provider) == {"id": "ch_1"}
    assert row(engine, "1")["attempts"] == 3


def test_a_refusal_is_recorded_and_replayed(once, engine: Engine) -> None:
    """What was refused for good is never asked for again."""
    provider = Provider(CallRefused("card declined"))
    for _ in range(2):
        with pytest.raises(EffectFailed, match="card declined") as caught:
            once("charge", key="1", call=provider)
        assert caught.value.reason == "card declined"
    assert len(provider.keys) == 1
    assert row(engine, "1")["expires_at"] is not None


def test_classify_sorts_the_errors_of_a_client_library(once) -> None:
    """Its word decides between retryable, final and ambiguous."""
    words = {KeyError: "retryable", LookupError: "final"}
    provider = Provider(KeyError(), LookupError())

    def classify(error: Exception) -> str:
        return words.get(type(error), "ambiguous")

    fail(once, KeyError, "1", provider, classify=classify)
    fail(once, EffectFailed, "1", provider, classify=classify)
    fail(once, EffectUnknown, "2", Provider(ZeroDivisionError()), classify=classify)


def test_what_nobody_can_know_is_unknown_and_never_called_again(once, engine: Engine) -> None:
    """Neither a look-up nor a provider that honours keys: an operator decides."""
    provider = Provider(TimeoutError())
    for _ in range(3):
        fail(once, EffectUnknown, "1", provider)
    assert len(provider.keys) == 1
    assert row(engine, "1") | {"status": "unknown", "expires_at": None} == row(engine, "1")


def test_an_ambiguous_error_is_tried_again_with_the_same_key_where_the_provider_honours_it(once) -> None:
    """At once: a second call with its key is no second effect."""
    provider = Provider(TimeoutError(), {"id": "ch_1"})
    fail(once, TimeoutError, "1", provider, provider_remembers=DAY)
    assert once("charge", key="1", call=provider, provider_remembers=DAY) == {"id": "ch_1"}
    assert provider.keys[0] == provider.keys[1]


def test_a_provider_that_has_forgotten_its_key_is_not_called_again(once, engine: Engine) -> None:
    """Past provider_remembers, counted from the first call, it is unknown."""
    provider = Provider(TimeoutError())
    fail(once, TimeoutError, "1", provider, provider_remembers=DAY)
    age(engine, "1", hours=25)
    fail(once, EffectUnknown, "1", provider, provider_remembers=DAY)
    assert len(provider.keys) == 1


def test_a_doubt_outlives_a_call_that_was_surely_not_applied(once, engine: Engine) -> None:
    """The second call did nothing, but the first one may have."""
    provider = Provider(TimeoutError(), ConnectionRefusedError())
    fail(once, TimeoutError, "1", provider, provider_remembers=DAY)
    fail(once, ConnectionRefusedError, "1", provider, provider_remembers=DAY)
    assert row(engine, "1") | {"in_doubt": True, "expires_at": None} == row(engine, "1")
    fail(once, EffectUnknown, "1", provider)
    assert len(provider.keys) == 2


# Asking


def test_an_ambiguous_call_gets_until_its_lock_runs_out_to_arrive(once, engine: Engine) -> None:
    """A look-up that comes too early would say "not applied" of a call that is still on its way."""
    provider, look_up = Provider(TimeoutError()), Provider()
    fail(once, TimeoutError, "1", provider, already_applied=look_up)
    fail(once, EffectInProgress, "1", provider, already_applied=look_up)
    assert look_up.keys == []


def test_a_look_up_that_finds_the_call_gives_its_result(once, engine: Engine) -> None:
    """Applied: recorded, replayed, not called again."""
    provider, look_up = Provider(TimeoutError()), Provider(Applied({"id": "ch_1"}))
    fail(once, TimeoutError, "1", provider, already_applied=look_up)
    let_lock_run_out(engine, "1")
    results = [once("charge", key="1", call=provider, already_applied=look_up) for _ in range(2)]
    assert results == [{"id": "ch_1"}] * 2
    assert look_up.keys == provider.keys == [provider.keys[0]]


def test_a_look_up_that_finds_nothing_leads_to_another_call(once, engine: Engine) -> None:
    """NotApplied: called again, with the same key, and without doubt."""
    provider, look_up = Provider(TimeoutError(), CallNotApplied("busy")), Provider(NotApplied())
    fail(once, TimeoutError, "1", provider, already_applied=look_up)
    let_lock_run_out(engine, "1")
    fail(once, CallNotApplied, "1", provider, already_applied=look_up)
    assert row(engine, "1")["in_doubt"] is False
    assert once("charge", key="1", call=provider, already_applied=look_up) == {"id": provider.keys[0]}
    assert len(look_up.keys) == 1


def test_a_look_up_that_cannot_tell_leaves_it_to_an_operator(once, engine: Engine) -> None:
    """Unknown, and no key that still counts: nothing is called."""
    provider, look_up = Provider(TimeoutError()), Provider(Unknown())
    fail(once, TimeoutError, "1", provider, already_applied=look_up)
    let_lock_run_out(engine, "1")
    fail(once, EffectUnknown, "1", provider, already_applied=look_up)
    assert len(provider.keys) == 1


def test_a_look_up_that_cannot_tell_may_be_followed_by_a_call_with_a_key_that_counts(once, engine: Engine) -> None:
    """Where the provider honours keys, the second call is no second effect."""
    provider, look_up = Provider(TimeoutError(), {"id": "ch_1"}), Provider(Unknown())
    options = {"already_applied": look_up, "provider_remembers": DAY}
    fail(once, TimeoutError, "1", provider, **options)
    let_lock_run_out(engine, "1")
    assert once("charge", key="1", call=provider, **options) == {"id": "ch_1"}
    assert len(look_up.keys) == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("answer", [OSError(), "yes"], ids=["it raises", "it answers something else"])
def test_a_look_up_that_fails_is_made_again(once, engine: Engine, answer: object) -> None:
    """The doubt stays, and nothing is called meanwhile."""
    provider, look_up = Provider(TimeoutError()), Provider(answer, Applied("ch_1"))
    fail(once, TimeoutError, "1", provider, already_applied=look_up)
    let_lock_run_out(engine, "1")
    with pytest.raises((OSError, HandlerError)):
        once("charge", key="1", call=provider, already_applied=look_up)
    assert row(engine, "1")["in_doubt"] is True
    assert once("charge", key="1", call=provider, already_applied=look_up) == "ch_1"
    assert len(provider.keys) == 1


# Callers that die, and others that come meanwhile


def test_a_dead_callers_effect_is_in_doubt_once_its_lock_has_run_out(once, engine: Engine) -> None:
    """Before, it is in progress; after, only a key that counts leads to another call."""
    with Holding(engine, "1"):
        provider = Provider()
        with pytest.raises(EffectInProgress) as caught:
            once("charge", key="1", call=provider, provider_remembers=DAY)
        assert 0 < caught.value.retry_after_seconds <= 30
        let_lock_run_out(engine, "1")
        once("charge", key="1", call=provider, provider_remembers=DAY)
        assert len(provider.keys) == 1


def test_a_dead_callers_effect_is_unknown_where_nobody_can_tell(once, engine: Engine) -> None:
    """Taken over, but never called: the dead caller may have."""
    provider = Provider()
    with Holding(engine, "1"):
        let_lock_run_out(engine, "1")
        fail(once, EffectUnknown, "1", provider)
    assert provider.keys == []


def test_a_caller_that_was_taken_over_cannot_record(once, engine: Engine) -> None:
    """Its token is worth nothing any more, whatever it brings back: zero rows."""
    provider = Provider({"id": "second"})
    with Holding(engine, "1") as first:
        let_lock_run_out(engine, "1")
        assert once("charge", key="1", call=provider, provider_remembers=DAY) == {"id": "second"}
    assert isinstance(first.error, EffectLockLost)
    assert once("charge", key="1", call=provider) == {"id": "second"}


def test_a_slow_caller_that_nobody_took_over_from_records(once, engine: Engine) -> None:
    """A lock that ran out is not lost before somebody takes it."""
    with Holding(engine, "1") as first:
        let_lock_run_out(engine, "1")
    assert first.error is None
    assert once("charge", key="1", call=Provider()) == "held"


def test_of_many_callers_at_once_one_calls(engine: Engine) -> None:
    """16 threads, one key: one call; the others find its result, or that it is under way."""
    effects = Effects(engine)
    provider = Provider()
    start, outcomes = threading.Barrier(16), []

    def run() -> None:
        start.wait()
        try:
            outcomes.append(effects.once("charge", key="1", call=provider))
        except EffectInProgress as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 16
    assert len(provider.keys) == 1
    assert {"id": provider.keys[0]} in outcomes
    effects.dispose()


@pytest.mark.parametrize("flavour", [SyncOnce, AsyncOnce], ids=["sync", "async"])
def test_the_lock_of_a_long_call_is_kept(engine: Engine, flavour) -> None:
    """A call that takes longer than its lock lasts stays its caller's."""
    with Holding(engine, "1", flavour(engine, lease_seconds=0.5)) as first:
        before = row(engine, "1")["locked_until"]
        wait_until(lambda: (row(engine, "1")["locked_until"] - before).total_seconds() > 1, "the lock to be extended")
        other = SyncOnce(engine)
        fail(other, EffectInProgress, "1", Provider(), provider_remembers=DAY)
        other.dispose()
    assert first.error is None


class Holding:
    """A caller in a thread of its own, whose call does not return before the block ends."""

    def __init__(self, engine: Engine, key: str, once: SyncOnce | AsyncOnce | None = None) -> None:
        self.error: BaseException | None = None
        self._once = once or SyncOnce(engine)
        self._called, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(key,))

    def _run(self, key: str) -> None:
        try:
            self._once("charge", key=key, call=self._call)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            self.error = error
        finally:
            self._once.dispose()

    def _call(self, provider_key: str) -> str:
        self._called.set()
        assert self._release.wait(PATIENCE)
        return "held"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._called.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._thread.join(PATIENCE)


# What cannot be used as given


def test_a_result_that_json_cannot_hold_is_done_and_not_called_again(once, engine: Engine) -> None:
    """Recorded as done, its result marked as not kept: a clear error each time."""
    provider = Provider(object())
    for _ in range(2):
        with pytest.raises(ResultNotStorable, match=r"not kept.*type object"):
            once("charge", key="1", call=provider)
    assert len(provider.keys) == 1
    assert row(engine, "1") | {"status": "done", "result": None} == row(engine, "1")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "result",
    [float("nan"), "a\0b", "\ud800", "x" * 300_000, Account(id=1), {1, object()}],
    ids=["NaN", "NUL", "surrogate", "too large", "an entity", "a set of objects"],
)
def test_every_result_that_cannot_be_kept_is_recorded_as_done(once, engine: Engine, result: object) -> None:
    """Whatever the database could not take, the effect is never called again for it."""
    provider = Provider(result)
    for _ in range(2):
        fail(once, ResultNotStorable, "1", provider)
    assert len(provider.keys) == 1


def test_a_result_that_does_not_fit_its_declared_type_is_recorded(once, engine: Engine) -> None:
    """Stored as it is: with the type mended, it is read."""
    provider = Provider({"id": "ch_1"})
    for _ in range(2):
        with pytest.raises(PayloadError, match="result of effect 'charge'"):
            once("charge", key="1", call=provider, returns=Charge)
    assert once("charge", key="1", call=provider) == {"id": "ch_1"}
    assert len(provider.keys) == 1


def test_a_key_stands_for_one_request(once, engine: Engine) -> None:
    """The same key with another content is refused, whether it is done or not."""
    provider = Provider(CallNotApplied("busy"))
    fail(once, CallNotApplied, "1", provider, payload={"cents": 5, "to": "a"})
    fail(once, EffectConflict, "1", provider, payload={"cents": 6, "to": "a"})
    once("charge", key="1", call=provider, payload={"to": "a", "cents": 5})
    fail(once, EffectConflict, "1", provider, payload={"cents": 6, "to": "a"})
    assert len(provider.keys) == 2


@pytest.mark.parametrize("key", ["", "x" * 513, "\N{EURO SIGN}" * 171, "a\0b", "a\nb", "\ud800", 5])
def test_a_key_that_cannot_be_stored_is_refused_before_the_call(once, key: object) -> None:
    """Nothing is called, and the error says what a key takes."""
    provider = Provider()
    with pytest.raises(InvalidKey, match="key"):
        once("charge", key=key, call=provider)
    with pytest.raises(InvalidKey, match="scope"):
        once(key, key="1", call=provider)
    assert provider.keys == []


def test_the_longest_key_and_scope_are_stored(once) -> None:
    """512 and 255 bytes."""
    assert once("s" * 255, key="\N{EURO SIGN}" * 170 + "ab", call=lambda _: 1) == 1


def test_arguments_that_make_no_sense_are_refused_before_the_call(once) -> None:
    """A window that is none, a payload that JSON cannot hold, a result type that nothing can be read as."""
    provider = Provider()
    for options, error in (
        ({"provider_remembers": timedelta(0)}, ConfigError),
        ({"provider_remembers": 3600}, ConfigError),
        ({"payload": object()}, ArgumentError),
        ({"returns": Account}, ConfigError),
        ({"returns": dict[tuple[int, int], str] | list[int] | set[int]}, ConfigError),
    ):
        with pytest.raises(error):
            once("charge", key="1", call=provider, **options)
    assert provider.keys == []


def test_an_async_function_given_to_the_sync_form_is_refused_and_left_open(engine: Engine) -> None:
    """It was not called: nothing is in doubt."""
    once = SyncOnce(engine)

    async def call(provider_key: str) -> str:
        return provider_key

    with pytest.raises(CallNotApplied, match="async"):
        once("charge", key="1", call=call)
    assert row(engine, "1")["status"] == "retryable"
    once.dispose()


@pytest.mark.parametrize("seconds", [0, 0.4, 3601, float("nan")])
def test_a_lease_out_of_range_is_refused(engine: Engine, seconds: float) -> None:
    """Half a second to an hour."""
    with pytest.raises(ConfigError, match="lease"):
        Effects(engine, lease_seconds=seconds)


def test_the_wrong_engine_is_refused(engine: Engine) -> None:
    """With the name of the class that takes it."""
    with pytest.raises(ConfigError, match="AsyncEffects"):
        Effects(create_async_engine(engine.url))


# Where its transactions run


def test_a_caller_that_holds_the_only_connection_of_its_pool_is_not_starved(outboxq_database: Database) -> None:
    """The pool is another one: nothing to wait for that itself waits."""
    engine = create_engine(outboxq_database.url, pool_size=1, max_overflow=0, pool_timeout=1)
    effects = Effects(engine)
    with engine.begin():
        assert effects.once("charge", key="1", call=lambda _: 1) == 1
    effects.dispose()
    engine.dispose()


def test_its_transactions_are_read_committed_whatever_the_engine_does(outboxq_database: Database) -> None:
    """A serialization failure would turn a known result into an unknown one."""
    engine = create_engine(outboxq_database.url, isolation_level="SERIALIZABLE")
    effects = Effects(engine)
    seen: list[str] = []
    effects._transactions.run(
        lambda connection: seen.append(connection.execute(text("SHOW transaction_isolation")).scalar_one())
    )
    assert seen == ["read committed"]
    effects.dispose()
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
def test_other_drivers_do_as_well(outboxq_database: Database, driver: str) -> None:
    """A web process keeps its driver."""
    url = outboxq_database.url.replace("+psycopg", f"+{driver}")
    if driver == "psycopg2":
        engine = create_engine(url)
        once = SyncOnce(engine)
    else:
        once = AsyncOnce(create_engine(outboxq_database.url))
        once._url = url
    provider = Provider(CallNotApplied("busy"))
    fail(once, CallNotApplied, "1", provider, payload=b"x")
    assert [once("charge", key="1", call=provider, payload=b"x") for _ in range(2)] == [{"id": provider.keys[0]}] * 2
    fail(once, EffectConflict, "1", provider, payload=b"y")
    once.dispose()
    if driver == "psycopg2":
        engine.dispose()


def test_another_schema_is_found_by_the_engines_translation(outboxq_database: Database) -> None:
    """As `add_job` finds it."""
    from outboxq.migrations.runner import migrate

    engine = create_engine(outboxq_database.url)
    with engine.begin() as connection:
        migrate(connection, schema="jobs")
    effects = Effects(engine.execution_options(schema_translate_map={"outboxq": "jobs"}))
    effects.once("charge", key="1", call=lambda _: 1)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs.effect")).scalar_one() == 1
    effects.dispose()
    engine.dispose()
