"""Effects as operators see them, and deciding what nobody could know."""

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text

from outboxq.admin import effects
from outboxq.admin.effects import EffectFilter, WasApplied, WasNotApplied
from outboxq.errors import ArgumentError, EffectError, EffectNotFound
from outboxq.migrations.runner import migrate
from outboxq.statements import effects as protocol
from outboxq.statements.effects import EffectLock, Status
from tests.support.urls import libpq_url

SCHEMA = 'effects\' "odd"; 50% :place'
MINUTE = timedelta(minutes=1)


def add(
    connection: Connection,
    status: str,
    key: str = "k",
    *,
    scope: str = "pay",
    in_doubt: bool = False,
    locked_for: timedelta = -MINUTE,
    result: str | None = None,
) -> UUID:
    """An effect as the protocol leaves it; the token of its caller."""
    token = uuid4()
    values = {
        "scope": scope, "key": key, "status": status, "in_doubt": in_doubt, "token": token, "locked_for": locked_for,
        "result": result, "keep": timedelta(days=1) if status in ("done", "failed") else None,
    }  # fmt: skip
    connection.execute(
        text(
            "INSERT INTO outboxq.effect (scope, key, fingerprint, status, in_doubt, provider_key, lock_token, "
            "locked_until, result, error, expires_at) VALUES (:scope, :key, 'abc', :status, :in_doubt, "
            "gen_random_uuid(), :token, clock_timestamp() + CAST(:locked_for AS interval), CAST(:result AS jsonb), "
            "'builtins.Boom', clock_timestamp() + CAST(:keep AS interval))"
        ),
        values,
    )
    return token


def added(engine: Engine, status: str, key: str = "k", **options: object) -> UUID:
    with engine.begin() as connection:
        return add(connection, status, key, **options)  # type: ignore[arg-type]


def shown(engine: Engine, key: str = "k") -> effects.EffectDetail:
    with engine.connect() as connection:
        return effects.show_effect(connection, "pay", key)


def resolve(engine: Engine, verdict: effects.Verdict, **options: timedelta) -> effects.EffectRecord:
    with engine.begin() as connection:
        return effects.resolve_effect(connection, "pay", "k", verdict, **options)


def row_of(engine: Engine) -> dict[str, object]:
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT * FROM outboxq.effect")).one()._mapping)


# What nobody else settles: how it lies there, and who may still come back for it.
OPEN: dict[str, dict[str, object]] = {
    "unknown": {"status": "unknown"},
    "started, and nobody came back": {"status": "started"},
    "in doubt": {"status": "retryable", "in_doubt": True},
}
open_effects = pytest.mark.parametrize("lies", OPEN.values(), ids=list(OPEN))


def test_the_list_has_the_latest_change_first_and_takes_filters(engine: Engine) -> None:
    """By scope, by status, and no more than asked for."""
    for number, (scope, status) in enumerate([("pay", "done"), ("pay", "unknown"), ("mail", "unknown")]):
        added(engine, status, f"k{number}", scope=scope)

    def keys(wanted: EffectFilter | None = None, **options: int) -> list[str]:
        with engine.connect() as connection:
            return [found.key for found in effects.list_effects(connection, wanted, **options)]

    assert keys() == ["k2", "k1", "k0"]
    assert keys(limit=2) == ["k2", "k1"]
    assert keys(EffectFilter(status="unknown")) == ["k2", "k1"]
    assert keys(EffectFilter(scope="pay")) == ["k1", "k0"]
    assert keys(EffectFilter(scope="pay", status="unknown")) == ["k1"]
    assert keys(EffectFilter(scope="%")) == []


def test_effects_that_are_not_settled_come_first(engine: Engine) -> None:
    """The unknown ones, then calls under way, the latest lock first; then those that are settled, as long as kept."""
    statuses = {"u": "unknown", "s": "started", "d1": "done", "f": "failed", "d2": "done", "t": "started"}
    for key, status in statuses.items():
        added(engine, status, key)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET locked_until = now() + interval '1 hour' WHERE key = 's'"))
        for key, kept in (("d1", "2 hours"), ("f", "1 hour"), ("d2", "3 hours")):
            connection.execute(
                text("UPDATE outboxq.effect SET expires_at = now() + CAST(:kept AS interval) WHERE key = :key"),
                {"key": key, "kept": kept},
            )
    with engine.connect() as connection:
        assert [each.key for each in effects.list_effects(connection)] == ["u", "s", "t", "d2", "d1", "f"]
        assert [each.key for each in effects.list_effects(connection, limit=4)] == ["u", "s", "t", "d2"]


def test_an_effect_that_is_settled_while_they_are_listed_is_listed_once(engine: Engine) -> None:
    """As it was seen first; and the list is as long as it was to be."""
    for number in range(3):
        added(engine, "started", f"s{number}")
        added(engine, "done", f"d{number}")
    settled = []

    def settle(_: object, __: object, statement: str, *___: object) -> None:
        if "expires_at IS NOT NULL" in statement and not settled:
            settled.append(statement)
            with psycopg.connect(libpq_url(engine.url), autocommit=True) as other:
                other.execute(
                    "UPDATE outboxq.effect SET status = 'done', expires_at = now() + interval '9 days' WHERE key = 's1'"
                )

    event.listen(engine, "before_cursor_execute", settle)
    with engine.connect() as connection:
        keys = [each.key for each in effects.list_effects(connection, limit=5)]
    assert settled
    assert (len(keys), len(set(keys)), keys.count("s1")) == (5, 5, 1)


@pytest.mark.parametrize(("status", "index"), [("unknown", "effect_unknown"), ("started", "effect_open")])
def test_a_list_of_what_is_not_settled_reads_the_index_of_that(status: Status, index: str, engine: Engine) -> None:
    """However many effects are remembered, a look at those that need an operator costs what they cost."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until, expires_at) "
                "SELECT 'pay', number::text, CASE WHEN number < 9 THEN :status ELSE 'done' END, gen_random_uuid(), "
                "gen_random_uuid(), now(), CASE WHEN number >= 9 THEN now() END FROM generate_series(1, 3000) AS number"
            ),
            {"status": status},
        )
        connection.execute(text("ANALYZE outboxq.effect"))
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _, __, statement, *___: sent.append(statement))
    with engine.connect() as connection:
        wanted = EffectFilter(status=status)
        assert len(effects.list_effects(connection, wanted)) == 8
        assert not any("expires_at IS NOT NULL" in each for each in sent)
        (part,) = (each for each in effects.statements.PARTS if status in each.statuses)
        statement = effects.statements.select_effects(wanted, part, part.where, limit=10)
        compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {compiled}".replace("%%", "%")).scalars())
    assert index in plan
    assert "Sort" not in plan


def test_show_has_what_is_stored(engine: Engine) -> None:
    """The result as JSON text and the fingerprint as hexadecimal digits; neither shows in a repr."""
    added(engine, "done", result='{"charge": "hunter2"}')
    found = shown(engine)
    assert json.loads(found.result or "") == {"charge": "hunter2"}
    assert found.fingerprint == b"abc".hex()
    assert (found.effect.scope, found.effect.key, found.effect.status) == ("pay", "k", "done")
    assert "hunter2" not in repr(found)
    assert "hunter2" not in repr(WasApplied('"hunter2"'))


def test_whether_it_is_locked_is_judged_by_the_databases_clock(engine: Engine) -> None:
    """A lock holds until the database says otherwise; what is settled has none."""
    added(engine, "started", "held", locked_for=MINUTE)
    added(engine, "started", "ran out")
    added(engine, "done", "settled", locked_for=MINUTE)
    assert [shown(engine, key).is_locked for key in ("held", "ran out", "settled")] == [True, False, False]


def test_what_is_not_there_is_an_error_with_its_name(engine: Engine) -> None:
    """Looking and resolving say the same."""
    with engine.begin() as connection:
        for look in (
            lambda: effects.show_effect(connection, "pay", "k"),
            lambda: effects.resolve_effect(connection, "pay", "k", WasNotApplied()),
        ):
            with pytest.raises(EffectNotFound, match="no effect of scope 'pay' with key 'k'") as missing:
                look()
            assert (missing.value.scope, missing.value.key) == ("pay", "k")


@open_effects
def test_resolved_as_applied_it_is_done_and_replays_the_result(engine: Engine, lies: dict[str, object]) -> None:
    """The result is stored as it was given, and kept for as long as was said."""
    added(engine, **lies)  # type: ignore[arg-type]
    before = shown(engine).effect
    found = resolve(engine, WasApplied('{"amount": 1.10}'), keep=timedelta(days=7))
    after = shown(engine)
    assert found == after.effect
    assert (found.status, found.in_doubt, found.error) == ("done", False, None)
    assert json.loads(after.result or "") == {"amount": 1.10}
    assert (found.provider_key, found.attempts) == (before.provider_key, before.attempts)
    assert found.changed_at > before.changed_at
    assert found.expires_at is not None
    assert timedelta(days=6.9) < found.expires_at - found.changed_at < timedelta(days=7.1)


@open_effects
def test_resolved_as_not_applied_the_next_caller_calls(engine: Engine, lies: dict[str, object]) -> None:
    """The claim that follows gets the call, free of doubt and with the key that the other side may know."""
    added(engine, **lies)  # type: ignore[arg-type]
    provider_key = shown(engine).effect.provider_key
    found = resolve(engine, WasNotApplied())
    assert (found.status, found.in_doubt) == ("retryable", False)
    assert found.expires_at is not None
    assert timedelta(days=29.9) < found.expires_at - found.changed_at < timedelta(days=30.1)
    with engine.begin() as connection:
        seen = protocol.EffectState(
            *connection.execute(protocol.claim(EffectLock("pay", "k", uuid4()), b"abc", uuid4(), MINUTE)).one()
        )
    assert (seen.claimed, seen.in_doubt, seen.provider_key) == (True, False, provider_key)


def test_without_a_result_a_caller_learns_why_there_is_none(engine: Engine) -> None:
    """Nothing is SQL's NULL with its reason; JSON's null is a result."""
    added(engine, "unknown")
    assert resolve(engine, WasApplied()).error == "resolved as applied by an operator, without a result"
    assert shown(engine).result is None
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.effect"))
    added(engine, "unknown")
    assert resolve(engine, WasApplied("null")).error is None
    assert shown(engine).result == "null"


def test_what_is_done_without_a_result_can_be_given_one(engine: Engine) -> None:
    """One that JSON could not hold, or that an operator left out; what has a result keeps it."""
    added(engine, "done")
    assert resolve(engine, WasApplied('{"id": 7}')).status == "done"
    assert shown(engine).result == '{"id": 7}'
    for verdict in (WasApplied('{"id": 8}'), WasApplied(), WasNotApplied()):
        with pytest.raises(EffectError, match="it is done"):
            resolve(engine, verdict)
    assert shown(engine).result == '{"id": 7}'


def test_what_is_done_is_never_made_undone(engine: Engine) -> None:
    """Without a result either: it was applied, and calling again would apply it twice."""
    added(engine, "done")
    for verdict in (WasApplied(), WasNotApplied()):
        with pytest.raises(EffectError, match="it is done"):
            resolve(engine, verdict)


@pytest.mark.first_and_last
@pytest.mark.parametrize("verdict", [WasApplied('"mine"'), WasNotApplied()], ids=["applied", "not applied"])
@open_effects
def test_a_caller_that_wakes_afterwards_cannot_record(
    engine: Engine, lies: dict[str, object], verdict: effects.Verdict
) -> None:
    """Its token is not the row's any more: neither its result nor its sign of life changes anything."""
    token = added(engine, **lies)  # type: ignore[arg-type]
    resolve(engine, verdict)
    settled = row_of(engine)
    with engine.begin() as connection:
        late = protocol.record(EffectLock("pay", "k", token), "done", result='"late"', keep=MINUTE)
        assert connection.execute(late).one_or_none() is None
        connection.execute(protocol.extend(EffectLock("pay", "k", token), MINUTE))
    assert row_of(engine) == settled


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ({"status": "started", "locked_for": MINUTE}, "a call is under way, and has 60 s left: ask again then"),
        ({"status": "done", "result": "2"}, "it is done, so there is nothing to resolve"),
        ({"status": "failed"}, "it is failed, so there is nothing to resolve"),
        ({"status": "retryable"}, "it is retryable, so there is nothing to resolve"),
    ],
    ids=["under way", "done", "failed", "not applied"],
)
@pytest.mark.parametrize("verdict", [WasApplied("1"), WasNotApplied()], ids=["applied", "not applied"])
def test_what_is_settled_or_under_way_is_left_alone(
    engine: Engine, lies: dict[str, object], said: str, verdict: effects.Verdict
) -> None:
    """An operator does not overrule what is known; the message names the present status."""
    added(engine, **lies)  # type: ignore[arg-type]
    before = row_of(engine)
    with pytest.raises(EffectError, match=said):
        resolve(engine, verdict)
    assert row_of(engine) == before


def test_a_row_that_somebody_holds_is_reported_and_not_waited_for(engine: Engine) -> None:
    """A takeover that is just being committed decides; the operator is told to look again."""
    added(engine, "started")
    with engine.connect() as caller, engine.begin() as operator:
        taken = caller.execute(protocol.claim(EffectLock("pay", "k", uuid4()), b"abc", uuid4(), MINUTE)).one()
        assert taken.claimed
        operator.execute(text("SET LOCAL lock_timeout = '10ms'"))
        with pytest.raises(EffectError, match="another transaction has it at this moment"):
            effects.resolve_effect(operator, "pay", "k", WasNotApplied())
        caller.commit()
    with pytest.raises(EffectError, match="a call is under way"):
        resolve(engine, WasNotApplied())


def test_two_operators_do_not_overrule_each_other(engine: Engine) -> None:
    """The first verdict stands, whatever the second one is."""
    added(engine, "unknown")
    resolve(engine, WasApplied("1"))
    with pytest.raises(EffectError, match="it is done"):
        resolve(engine, WasNotApplied())
    assert shown(engine).result == "1"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "result",
    ["hunter2", "", "{'id': 1}", "NaN", '"hunter2\\u0000"', "\udc80", '"\\ud800"', "[" * 100_000, "1e999999", "1 2"],
    ids=["bare", "empty", "python", "nan", "nul", "bytes", "surrogate", "deep", "huge number", "two"],
)
def test_a_result_that_cannot_be_stored_is_refused_before_anything_is_sent(engine: Engine, result: str) -> None:
    """The message does not quote it, and the effect stays as it was."""
    added(engine, "unknown")
    with pytest.raises(ArgumentError) as refused:
        resolve(engine, WasApplied(result))
    assert "hunter2" not in str(refused.value)
    assert shown(engine).effect.status == "unknown"


def test_a_result_over_the_cap_is_refused(engine: Engine) -> None:
    """The same cap as for what a call returns."""
    added(engine, "unknown")
    with pytest.raises(ArgumentError, match="over the cap of 262,144"):
        resolve(engine, WasApplied(f'"{"x" * 262_144}"'))


def test_a_rolled_back_verdict_was_never_given(engine: Engine) -> None:
    """The module commits nothing itself."""
    added(engine, "unknown")
    with engine.connect() as connection:
        effects.resolve_effect(connection, "pay", "k", WasApplied("1"))
        connection.rollback()
    assert shown(engine).effect.status == "unknown"


def test_every_operation_works_in_a_schema_of_another_name(engine: Engine) -> None:
    """`schema_translate_map` leads all of them to the caller's schema, whatever its name."""
    with engine.begin() as connection:
        migrate(connection, schema=SCHEMA)
    elsewhere = engine.execution_options(schema_translate_map={"outboxq": SCHEMA})
    with elsewhere.begin() as connection:
        connection.execute(protocol.claim(EffectLock("pay", "k", uuid4()), None, uuid4(), -MINUTE))
    assert resolve(elsewhere, WasApplied("1")).status == "done"
    assert shown(elsewhere).result == "1"
    with elsewhere.connect() as connection:
        assert [found.key for found in effects.list_effects(connection)] == ["k"]
    assert shown(elsewhere).effect.changed_at < datetime.now(UTC) + MINUTE
    with pytest.raises(EffectNotFound):
        shown(engine)
