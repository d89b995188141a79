"""Options of flow control: how they are checked, and how the jobs that have them are written."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Jobs, OutboxSession, Unique, external
from outboxq.errors import ArgumentError, InvalidKey, RegistryError
from outboxq.handlers.context import Context

MINUTE = timedelta(minutes=1)
LONG = "ж" * 257


def test_keys_and_expiry_are_columns_of_the_job(sessions: sessionmaker[OutboxSession], engine: Engine) -> None:
    """Each where the claim looks for it; a job without any is written as ever, also in the same flush."""
    kind = external("credit", queue="ledger")
    with sessions.begin() as session:
        session.add_job(kind, n=1)
        session.add_job(kind.options(coalesce="a"), n=2)
        session.add_job(kind.options(coalesce="a", every=MINUTE), n=3)
        session.add_job(kind.options(group="g"), n=4)
        session.add_job(kind.options(expires=MINUTE, delay=timedelta(seconds=30)), n=5)
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT (args->>'n')::int, unique_key, group_key, state, expires_at - created_at, "
                "extract(epoch FROM run_at) FROM outboxq.job ORDER BY seq"
            )
        ).all()
    assert [tuple(row[:4]) for row in rows] == [
        (1, None, None, "ready"),
        (2, "credit\x1fa", None, "ready"),
        (3, "credit\x1fa", None, "scheduled"),
        (4, None, "g", "grouped"),
        (5, None, None, "scheduled"),
    ]
    assert [row[4] is not None for row in rows] == [False] * 4 + [True]
    assert abs(rows[4][4] - MINUTE) < timedelta(seconds=1)
    assert rows[2][5] % 60 == 0


def test_keys_are_made_of_the_arguments(sessions: sessionmaker[OutboxSession], engine: Engine) -> None:
    """By their names, with the handler's defaults for those that were left out."""
    jobs = Jobs()

    @jobs.handler(
        queue="ledger", group=lambda tenant, **_: f"t{tenant}", coalesce=lambda tenant, day: f"{tenant}/{day}"
    )
    def close(ctx: Context, tenant: int, day: str = "today") -> None: ...

    jobs.resolve()
    with sessions.begin() as session:
        session.add_job(close, 7)
        session.add_job(close.options(group="other"), tenant=8, day="monday")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT unique_key, group_key FROM outboxq.job ORDER BY seq")).all()
    assert [tuple(row) for row in rows] == [("close\x1f7/today", "t7"), ("close\x1f8/monday", "other")]


def test_a_function_of_arguments_that_the_handler_does_not_have_is_refused_at_the_start() -> None:
    """By name, and with those that it has."""
    jobs = Jobs()

    @jobs.handler(group=lambda account: account)
    def close(ctx: Context, tenant: int) -> None: ...

    with pytest.raises(RegistryError, match="'account', which the handler does not have: it has tenant"):
        jobs.resolve()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "g", "delay": MINUTE}, "leave out delay="),
        ({"every": MINUTE}, "give that too"),
        ({"coalesce": "a", "every": timedelta(0)}, "more than 0"),
        ({"coalesce": "a", "every": MINUTE, "group": "g"}, "leave out"),
        ({"coalesce": "a", "unique": "a"}, "not both"),
        ({"expires": timedelta(0)}, "more than 0"),
        ({"expires": 5}, "takes a timedelta, got int"),
        ({"expires": MINUTE, "delay": MINUTE}, "would never run"),
        ({"group": 7}, "a group key is a string"),
        ({"coalesce": ""}, "it is empty"),
        ({"unique": LONG}, "512 bytes"),
    ],
)
def test_options_that_cannot_be_are_refused_at_the_call(options: dict[str, object], says: str) -> None:
    """With what to do instead; the same at registration."""
    with pytest.raises((ArgumentError, InvalidKey), match=says):
        external("k", queue="q").options(**options)  # type: ignore[arg-type]
    flow = {name: value for name, value in options.items() if name != "delay"}
    if "delay" not in options:
        with pytest.raises(RegistryError, match=says):

            @Jobs().handler(**flow)  # type: ignore[arg-type]
            def handle(ctx: Context) -> None: ...


@pytest.mark.parametrize(("key", "says"), [(lambda n: n, "is a string"), (lambda n: LONG, "512 bytes")])
def test_a_function_that_returns_no_key_is_refused_when_the_job_is_made(key: object, says: str) -> None:
    """As the same key would be."""
    with pytest.raises(InvalidKey, match=says):
        external("k", queue="q").options(unique=Unique(key)).job(n=1)  # type: ignore[arg-type]
