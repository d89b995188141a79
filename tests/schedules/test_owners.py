"""Whose schedules are: two applications of one database, versions of one application, and relays that put none."""

import logging
import shlex
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from outboxq import Context, Jobs, Relay, RelayConfig, schedules
from outboxq.admin import schedule_owners
from outboxq.cli.relay import RelayOptions
from outboxq.errors import InvalidKey, ScheduleOwned
from outboxq.events import Event
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.tables import OWNERS_VERSION
from tests.conftest import StartRelay
from tests.support.cli import call, run
from tests.support.ledger import rows
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]

shop, post = Jobs(), Jobs()


@shop.schedule("@daily", name="of the shop")
@shop.handler(queue="shop")
def sell(ctx: Context) -> None: ...


def made(*names: str, owner: str | None = "shop", queue: str = "reports", kind: str = "report") -> Jobs:
    """A registry with a handler that has schedules of these names."""
    jobs = Jobs(name=owner)

    def report(ctx: Context) -> None: ...

    handler = jobs.handler(queue=queue, kind=kind)(report)
    for name in names:
        jobs.schedule("@daily", name=name)(handler)
    return jobs


def stored(engine: Engine) -> dict[str, schedules.Schedule]:
    with engine.connect() as connection:
        return {each.name: each for each in schedules.list_schedules(connection)}


def disabled(engine: Engine) -> list[str]:
    return [name for name, each in stored(engine).items() if each.disabled]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "no longer declared" in record.getMessage()]


def test_a_registry_is_named_by_its_module_and_its_name_there() -> None:
    """The same in each process and version; by the function if no name of the module leads to it, or as it is given."""
    assert (shop.name, post.name) == ("tests.schedules.test_owners:shop", "tests.schedules.test_owners:post")
    assert made(owner=None).name == "tests.schedules.test_owners:made"
    assert made(owner="billing").name == "billing"

    class Mine(Jobs):
        def __init__(self) -> None:
            super().__init__()

    assert Mine().name.startswith("tests.schedules.test_owners:test_a_registry_is_named")
    with pytest.raises(InvalidKey, match="name of the registry"):
        Jobs(name="")
    top = Jobs(name="top")
    top.include(shop)
    assert [(new.name, new.owner) for new in top.resolve().schedules] == [("of the shop", shop.name)]
    assert set(top.resolve().owners) == {"top", shop.name}


@pytest.mark.wide
def test_a_program_that_runs_is_named_as_it_is_imported(tmp_path: object, fresh_processes: None) -> None:
    """Not `__main__`, which every program is."""
    import subprocess
    import sys
    from pathlib import Path

    file = Path(str(tmp_path)) / "worker.py"
    file.write_text("from outboxq import Jobs\njobs = Jobs()\nprint(jobs.name)\n")
    for command in ([str(file)], ["-m", "worker"]):
        ran = subprocess.run([sys.executable, *command], cwd=file.parent, capture_output=True, text=True, check=True)
        assert ran.stdout == "worker:jobs\n"


def test_a_name_that_another_registry_declares_is_refused(
    outboxq_database: Database, engine: Engine, drain: Drain
) -> None:
    """With both names, and the command that hands it over; the relay does not start, and changes nothing."""
    drain(made("nightly", "hourly"))
    before = stored(engine)
    with pytest.raises(ScheduleOwned) as refused:
        drain(made("a new one", "nightly", "hourly", owner="the post"))
    assert (refused.value.names, refused.value.owner, refused.value.claimant) == (
        ("hourly", "nightly"), "shop", "the post",
    )  # fmt: skip
    assert stored(engine) == before
    message = str(refused.value)
    assert "'hourly', 'nightly'" in message
    assert "name=..." in message
    command = message.partition("`outboxq ")[2].partition("`")[0]
    done = call(*shlex.split(command), url=outboxq_database.url).ok()
    assert done.stdout == "'hourly' belongs to 'the post' now\n'nightly' belongs to 'the post' now\n"
    drain(made("a new one", "nightly", "hourly", owner="the post"))
    assert {name: each.owner for name, each in stored(engine).items()} == {
        "a new one": "the post", "nightly": "the post", "hourly": "the post",
    }  # fmt: skip
    with pytest.raises(ScheduleOwned):
        drain(made("nightly"))


def test_of_two_that_start_at_the_same_moment_one_has_the_name(engine: Engine) -> None:
    """The second waits for the first's COMMIT, and finds whose it is."""
    first, second = made("nightly").resolve(), made("nightly", owner="the post").resolve()
    with engine.connect() as one, engine.connect() as other:
        schedule_owners.declare(one, first.schedules)
        one.commit()
        with pytest.raises(ScheduleOwned):
            schedule_owners.declare(other, second.schedules)


def test_what_leaves_the_code_is_disabled_and_comes_back_with_it(
    engine: Engine, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next relay of the same owner, with its log line; its times pass by, until code declares it again."""
    drain(made("nightly", "hourly"))
    with caplog.at_level(logging.WARNING, "outboxq.relay"):
        drain(made("hourly"))
    assert disabled(engine) == ["nightly"]
    (line,) = said(caplog)
    assert line.startswith("schedule 'nightly' of kind 'report' is no longer declared in the code, and is disabled: ")
    gone = stored(engine)["nightly"]
    assert (gone.disabled, gone.owner) == ("the code of 'shop' does not declare it any more", "shop")
    assert gone.paused_at is not None
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.schedule SET next_at = now() - interval '3 days'"))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "outboxq.relay"):
        drain(made("hourly"))
    assert said(caplog) == []
    assert rows(engine, "SELECT headers ->> 'outboxq.schedule' FROM outboxq.job") == []
    drain(made("nightly", "hourly"))
    back = stored(engine)["nightly"]
    assert (back.disabled, back.paused_at) == (None, None)
    assert rows(engine, "SELECT next_at > now() FROM outboxq.schedule WHERE name = 'nightly'") == [(True,)]


def test_the_last_schedule_of_a_registry_is_disabled_too(engine: Engine, drain: Drain) -> None:
    """Also if its handler and its queue have left the code with it; those of other registries stay as they are."""
    drain(made("nightly"))
    drain(made("theirs", owner="the post"))
    drain(made(queue="another", kind="another"))
    assert disabled(engine) == ["nightly"]


def test_an_old_version_that_starts_last_puts_it_back(engine: Engine, drain: Drain, start_relay: StartRelay) -> None:
    """Two versions of one application beside one another: the one that started last is right."""
    drain(made("nightly"))
    with start_relay(made("hourly")):
        wait_until(lambda: disabled(engine) == ["nightly"], "the new version")
        drain(made("nightly"))
        assert disabled(engine) == ["hourly"]
    drain(made("hourly"))
    assert disabled(engine) == ["nightly"]


@pytest.mark.wide
def test_another_application_with_the_same_name_of_its_registry_is_left_alone(
    engine: Engine, start_relay: StartRelay, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """While its relays live, as they know the kind; the log says what to do."""
    with start_relay(made("theirs", queue="theirs", kind="theirs")):
        lives = "SELECT kinds FROM outboxq.relay_status WHERE state = 'serving'"
        wait_until(lambda: rows(engine, lives) == [(["theirs"],)], "their relay")
        with caplog.at_level(logging.WARNING, "outboxq.relay"):
            drain(made("ours"))
        assert disabled(engine) == []
        assert ["Jobs(name=...)" in line for line in said(caplog)] == [True]
    assert disabled(engine) == []


def test_an_operators_pause_stays_whatever_the_code_does(engine: Engine, drain: Drain) -> None:
    """A schedule that was paused before it left the code, or while it was gone, is paused when it comes back."""
    drain(made("before", "meanwhile"))
    with engine.begin() as connection:
        assert schedules.pause(connection, "before") == ("before",)
    drain(made())
    assert disabled(engine) == ["meanwhile"]
    with engine.begin() as connection:
        assert schedules.pause(connection, "before", "meanwhile") == ("meanwhile",)
    assert disabled(engine) == []
    drain(made("before", "meanwhile"))
    assert all(each.paused_at for each in stored(engine).values())


@pytest.mark.wide
def test_an_operator_adopts_what_has_left_the_code(outboxq_database: Database, engine: Engine, drain: Drain) -> None:
    """From then on it is theirs: it can be put, it stays, and it adds jobs when it is resumed."""
    url = outboxq_database.url
    drain(made("nightly"))
    drain(made())
    assert call("schedules", "adopt", "nightly", "none", url=url).exit_code == 1
    mine = stored(engine)["nightly"]
    assert (mine.declared, mine.owner, mine.disabled) == (False, None, None)
    assert mine.paused_at is not None
    again = call("schedules", "adopt", "nightly", url=url).ok()
    assert again.stdout == "'nightly' belonged to operators already\n"
    call("schedules", "resume", "nightly", url=url).ok()
    drain(made())
    call("schedules", "put", "nightly", "--kind", "report", "--queue", "reports", "--every", "1h", url=url).ok()
    shown = call("schedules", "show", "nightly", "--json", url=url).ok().json
    assert (shown["every_seconds"], shown["owner"], shown["disabled"]) == (3600, None, None)
    drain(made("nightly"))
    assert stored(engine)["nightly"].owner == "shop"


@pytest.mark.first_and_last
@pytest.mark.parametrize("how", ["the setting", "the option", "the variable"])
def test_a_relay_that_is_to_put_none_puts_none(
    outboxq_database: Database, engine: Engine, drain: Drain, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It disables none either, and fires what is stored."""
    drain(made("nightly"))
    url = outboxq_database.url
    if how == "the option":
        run("relay", "tests.schedules.test_owners:shop", "--drain", "--no-schedules", url=url).ok()
    else:
        monkeypatch.setenv("OUTBOXQ_NO_SCHEDULES", "1")
        of_variable = RelayOptions(target="a:b").config(None)
        Relay(url, shop, RelayConfig(declare_schedules=False) if how == "the setting" else of_variable).drain()
    assert list(stored(engine)) == ["nightly"]


def test_tables_of_the_step_before_have_schedules_without_owners(
    outboxq_database: Database, engine: Engine, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """Code declares them as the version before did; the first that declares one after the step owns it."""
    with engine.begin() as connection:
        migrate(connection, to=OWNERS_VERSION - 1)
    drain(made("nightly", "gone"))
    drain(made("nightly", owner="the post"))
    assert [each.owner for each in stored(engine).values()] == [None, None]
    refused = call("schedules", "adopt", "nightly", url=outboxq_database.url)
    assert refused.exit_code == 1
    assert "run `outboxq migrate`" in refused.stderr
    with engine.begin() as connection:
        migrate(connection)
    with caplog.at_level(logging.WARNING, "outboxq.relay"):
        drain(made("nightly"))
    assert [(each.owner, each.disabled) for each in stored(engine).values()] == [(None, None), ("shop", None)]
    assert [line for line in said(caplog) if "'gone'" in line and "goes on" in line] == said(caplog) != []
    with pytest.raises(ScheduleOwned):
        drain(made("nightly", owner="the post"))
