"""Changes of many rows: what is previewed, counted, stopped and gone on with, whatever ends the process."""

import threading
from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outboxq.admin.actions import (
    Actions,
    Actor,
    CancelJobs,
    CancelRunning,
    ChangeJobs,
    DiscardDead,
    RetryDead,
    Total,
    preview,
)
from outboxq.admin.bulk_actions import BulkAction
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.jobs import JobChange, JobFilter
from outboxq.errors import ArgumentError, AuditNotFound, RunElsewhere, RunNotResumable
from outboxq.postgres import Database
from outboxq.testing import CommitProxy
from tests.support import operators
from tests.support.operators import Table, add, audited, beginning, count, marked

ANNA = Actor("anna", role="operator", via="web")
JOBS, DEAD = JobFilter(queue="many"), DeadFilter(queue="many")
# What an action does to which table, and how many of the rows it has done it to.
ACTIONS: dict[str, tuple[BulkAction, Table]] = {
    "cancel": (CancelJobs(JOBS), "job"),
    "cancel running": (CancelRunning(JOBS), "job"),
    "change": (ChangeJobs(JOBS, JobChange(priority=7)), "job"),
    "retry": (RetryDead(DEAD), "dead_job"),
    "discard": (DiscardDead(DEAD), "dead_job"),
}


class Halt(Exception):
    """Raised by a test in the midst of a run."""


def done(engine: Engine, name: str, of: int) -> int:
    """How many rows were changed, by the tables themselves."""
    if name == "change":
        with engine.connect() as connection:
            return connection.execute(text("SELECT count(*) FROM outboxq.job WHERE priority = 7")).scalar_one()
    return of - count(engine, ACTIONS[name][1])


def halt_after(pages: int) -> Callable[[Total], None]:
    seen: list[Total] = []

    def see(total: Total) -> None:
        seen.append(total)
        if len(seen) == pages:
            raise Halt

    return see


def test_a_preview_counts_shows_and_bounds_and_locks_nothing(engine: Engine) -> None:
    """Counted up to a number; samples; and what comes later is not part of the action."""
    add(engine, 12)
    add(engine, 3, kind="b")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        found = preview(connection, CancelJobs(JOBS))
        capped = preview(connection, CancelJobs(JOBS), most=14, samples=2)
        connection.rollback()
    assert [(each.kind, each.count) for each in found.kinds] == [("a", 12), ("b", 3)]
    assert (found.count, found.is_capped, len(found.samples)) == (15, False, 10)
    assert (capped.count, capped.is_capped, len(capped.samples)) == (15, True, 2)
    assert marked(engine) == 0
    add(engine, 4)
    total = Actions(ANNA).run(beginning(engine), found)
    assert (total.changed, count(engine, "job")) == (15, 4)
    (row,) = audited(engine)
    assert (row["expected"], row["changed"], row["finished_at"] is not None) == (15, 15, True)


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", ACTIONS)
def test_each_page_is_counted_with_its_rows(engine: Engine, name: str) -> None:
    """Pages of 200, one row of the audit, and at each point as many as were changed."""
    action, table = ACTIONS[name]
    add(engine, 450, table)
    seen: list[int] = []

    def see(total: Total) -> None:
        (row,) = audited(engine)
        assert row["changed"] == total.changed == done(engine, name, 450)
        seen.append(total.changed)

    total = Actions(ANNA, "because").run(beginning(engine), action, on_page=see)
    assert seen == [200, 400, 450]
    (row,) = audited(engine)
    assert (row["id"], row["action"], row["reason"], row["actor"], row["role"], row["via"]) == (
        total.entry, action.name, "because", "anna", "operator", "web",
    )  # fmt: skip
    assert row["filter"] == {"queue": "many"}
    assert row["finished_at"] is not None


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", ACTIONS)
def test_what_was_cut_off_is_gone_on_with(engine: Engine, name: str) -> None:
    """Behind the last page, to the end, without rows that came after the preview; counted in one row."""
    action, table = ACTIONS[name]
    add(engine, 450, table)
    with engine.connect() as connection:
        found = preview(connection, action)
    with pytest.raises(Halt):
        Actions(ANNA).run(beginning(engine), found, on_page=halt_after(1))
    (row,) = audited(engine)
    assert (row["changed"], row["finished_at"], row["error"]) == (200, None, "Halt")
    with engine.begin() as connection:
        # Sorted behind all others.
        later = UUID(int=2**128 - 1)
        connection.execute(text(f"UPDATE outboxq.{table} SET {'created_at' if table == 'job' else 'died_at'} = now() + "
                                "interval '1 hour', id = :later WHERE id = (SELECT max(id::text)::uuid FROM "
                                f"outboxq.{table})"), {"later": later})  # fmt: skip
    total = Actions(Actor("bob")).resume(beginning(engine), row["id"])
    assert total.changed == 249
    first, second = audited(engine)
    assert (first["changed"], first["error"], first["finished_at"] is not None) == (449, None, True)
    assert (second["action"], second["actor"], second["target"]) == ("bulk.resume", "bob", str(row["id"]))
    assert done(engine, name, 450) == 449
    with pytest.raises(RunNotResumable):
        Actions(ANNA).resume(beginning(engine), row["id"])


def test_what_is_asked_of_relays_is_asked_once(engine: Engine) -> None:
    """The jobs that run are told by their ids, also those behind the place at which it was gone on with."""
    ids = add(engine, 450)
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = ANY (:ids)"), {"ids": [ids[10], ids[410]]})
        with pytest.raises(Halt):
            Actions(ANNA).run(beginning(engine), CancelRunning(JOBS, "dead"), on_page=halt_after(1))
        entry = audited(engine)[0]["id"]
        total = Actions(ANNA).resume(beginning(engine), entry)
        relay.rollback()
    assert (total.changed, total.requested) == (250, [ids[410]])
    assert (audited(engine)[0]["changed"], count(engine, "job"), count(engine, "dead_job")) == (450, 2, 448)
    with engine.connect() as connection:
        asked = connection.execute(text("SELECT job_id, outcome FROM outboxq.cancel_request ORDER BY 1")).all()
    assert asked == [(ids[10], "dead"), (ids[410], "dead")]


def test_a_run_is_stopped_before_its_next_page(engine: Engine) -> None:
    """From another process, by its id; what was changed stays, and the run can be resumed."""
    add(engine, 450)

    def stop(total: Total) -> None:
        if total.changed == 200 and not total.is_stopped:
            assert total.entry is not None
            with engine.begin() as connection:
                assert Actions(ANNA, "too many").stop(connection, total.entry) == "stopped"
            with engine.begin() as connection:
                assert Actions(ANNA).stop(connection, total.entry) == "stopped already"

    total = Actions(ANNA).run(beginning(engine), CancelJobs(JOBS), on_page=stop)
    assert (total.changed, total.is_stopped, count(engine, "job")) == (200, True, 250)
    assert total.entry is not None
    run, stopped = audited(engine)
    assert (run["changed"], run["finished_at"], stopped["reason"]) == (200, None, "too many")
    assert Actions(ANNA).resume(beginning(engine), total.entry).changed == 250
    assert audited(engine)[0]["changed"] == 450
    with engine.begin() as connection:
        assert Actions(ANNA).stop(connection, total.entry) == "over"
        with pytest.raises(AuditNotFound):
            Actions(ANNA).stop(connection, UUID(int=0))


def test_two_processes_do_not_work_on_one_run(engine: Engine) -> None:
    """One that was taken over ends at its next page, and each row is changed and counted once."""
    add(engine, 650)
    others: list[Total] = []

    def take_over(total: Total) -> None:
        if not others:
            assert total.entry is not None
            others.append(Actions(Actor("bob")).resume(beginning(engine), total.entry))

    with pytest.raises(RunElsewhere):
        Actions(ANNA).run(beginning(engine), CancelJobs(JOBS), on_page=take_over)
    assert [each.changed for each in others] == [450]
    assert (audited(engine)[0]["changed"], count(engine, "job")) == (650, 0)


def test_one_that_was_taken_over_does_no_page_again(engine: Engine) -> None:
    """Also if the other one has come to no end: rows that still match would be changed, and counted, twice."""
    action = ACTIONS["change"][0]
    add(engine, 650)

    def take_over(total: Total) -> None:
        assert total.entry is not None
        with pytest.raises(Halt):
            Actions(Actor("bob")).resume(beginning(engine), total.entry, on_page=halt_after(1))

    with pytest.raises(RunElsewhere):
        Actions(ANNA).run(beginning(engine), action, on_page=take_over)
    (row, _) = audited(engine)
    assert row["changed"] == done(engine, "change", 650) == 400
    Actions(ANNA).resume(beginning(engine), row["id"])
    assert audited(engine)[0]["changed"] == done(engine, "change", 650) == 650


def test_a_run_is_not_taken_over_in_the_midst_of_a_page(engine: Engine) -> None:
    """The row is locked: who comes is told, and does not wait."""
    ids = add(engine, 450)
    operators.on_change(engine, operators.wait_at(ids[300]))
    totals: list[Total] = []
    with operators.closed_gate(engine) as gate:
        thread = threading.Thread(target=lambda: totals.append(Actions(ANNA).run(beginning(engine), CancelJobs(JOBS))))
        thread.start()
        try:
            operators.wait_until(lambda: operators.waiting_pid(engine), "the second page")
            with pytest.raises(RunElsewhere):
                Actions(ANNA).resume(beginning(engine), audited(engine)[0]["id"])
        finally:
            gate.rollback()
            thread.join(60)
    assert [each.changed for each in totals] == [450]


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_answer_to_commit_is_lost_and_the_audit_is_right(
    outboxq_database: Database, engine: Engine, name: str, cut: str, at: int
) -> None:
    """At whichever page, before COMMIT arrives or after: the audit says what the tables say, and the rest follows."""
    action, table = ACTIONS[name]
    add(engine, 450, table)
    with CommitProxy(outboxq_database.url) as proxy:
        through = create_engine(proxy.url, use_native_hstore=False)
        pages: list[Total] = []

        def trap(total: Total | None = None) -> None:
            if len(pages) == at:
                (proxy.cut_before_commit if cut == "before" else proxy.cut_after_commit)()
            pages.append(total or Total())

        trap()
        with pytest.raises(DBAPIError) as lost:
            Actions(ANNA, warn=[].append).run(beginning(through), action, on_page=trap)
        through.dispose()
    committed = [200, 400, 450][at] if cut == "after" else [0, 200, 400][at]
    operators.wait_until(lambda: done(engine, name, 450) == committed, "the server to know of it")
    rows = audited(engine)
    assert [row["changed"] for row in rows] == ([committed] if committed else [])
    if table == "job":
        assert marked(engine) == 0
    # Later pages have told the id.
    notes = getattr(lost.value, "__notes__", [])
    assert len(notes) == (at == 0)
    assert not notes or not rows or f"`outboxq audit show {rows[0]['id']}`" in notes[0]
    if rows and committed < 450:
        operators.wait_until(lambda: operators.is_free(engine), "the server to end the page that was cut off")
        Actions(ANNA).resume(beginning(engine), rows[0]["id"])
        assert audited(engine)[0]["changed"] == done(engine, name, 450) == 450


@pytest.mark.parametrize("name", ["cancel", "change"])
def test_a_page_that_is_rolled_back_leaves_no_suspects_and_no_count(engine: Engine, name: str) -> None:
    """The pages before it stand."""
    action, _ = ACTIONS[name]
    ids = add(engine, 450)
    with engine.begin() as connection:
        verb = "DELETE" if name == "cancel" else "UPDATE"
        connection.exec_driver_sql(
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN IF OLD.id = '{ids[430]}' THEN "
            "RAISE 'not this one'; END IF; RETURN OLD; END$$; "
            f"CREATE CONSTRAINT TRIGGER refuse AFTER {verb} ON outboxq.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            "EXECUTE FUNCTION refuse()"
        )
    with pytest.raises(DBAPIError, match="not this one"):
        Actions(ANNA).run(beginning(engine), action)
    (row,) = audited(engine)
    assert (row["changed"], done(engine, name, 450), marked(engine)) == (400, 400, 0)
    assert row["error"] == "RaiseException (P0001)"


def test_a_first_page_that_was_refused_leaves_no_doubt(engine: Engine) -> None:
    """The server has answered: there is no row of the audit, and no word of one."""
    (job_id,) = add(engine, 1)
    operators.on_change(engine, f"IF OLD.id = '{job_id}' THEN RAISE 'not this one'; END IF", at_commit=True)
    with pytest.raises(DBAPIError, match="not this one") as refused:
        Actions(ANNA).run(beginning(engine), ACTIONS["cancel"][0])
    assert not getattr(refused.value, "__notes__", [])
    assert audited(engine) == []


def test_rows_that_others_hold_are_passed_over_and_counted(engine: Engine) -> None:
    """They are not waited for, and are told by their ids."""
    ids = add(engine, 5)
    with engine.connect() as holder:
        holder.execute(text("SELECT FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        total = Actions(ANNA).run(beginning(engine), CancelJobs(JOBS))
    assert (total.changed, total.held) == (4, [ids[1]])
    assert (audited(engine)[0]["changed"], audited(engine)[0]["held"]) == (4, 1)


def test_ids_are_changed_in_pages_and_those_that_are_not_there_are_told(engine: Engine) -> None:
    """Cancelled, retried and discarded by id, more than one page of them."""
    ids, missing = add(engine, 250), UUID(int=5)
    total = Actions(ANNA).run(beginning(engine), CancelJobs(JobFilter(ids=(*ids, missing))))
    assert (total.changed, total.not_found) == (250, [missing])
    dead = add(engine, 250, "dead_job")
    total = Actions(ANNA).run(beginning(engine), RetryDead(DeadFilter(ids=(missing, *dead, *dead))))
    assert (total.changed, total.not_found) == (250, [missing])
    (one,) = add(engine, 1, "dead_job")
    Actions(ANNA).run(beginning(engine), DiscardDead(DeadFilter(ids=(one,))))
    assert [row["target"] for row in audited(engine)] == [None, None, str(one)]


def test_dead_letters_are_retried_with_other_arguments(engine: Engine) -> None:
    """Once they are checked, for each kind that is meant; the audit does not keep them, and asks for them again."""
    add(engine, 250, "dead_job", kind="a")
    action = RetryDead(DEAD, '{"card": "4111-1111"}')
    checked: list[tuple[str, str]] = []

    def refuse(kind: str, args: str) -> None:
        checked.append((kind, args))
        raise ArgumentError("no")

    with pytest.raises(ArgumentError):
        Actions(ANNA).run(beginning(engine), action, check=refuse)
    assert checked == [("a", '{"card": "4111-1111"}')]
    assert (count(engine, "dead_job"), audited(engine)) == (250, [])
    with pytest.raises(Halt):
        Actions(ANNA).run(beginning(engine), action, on_page=halt_after(1))
    (row,) = audited(engine)
    assert row["change"] == {"args": "not kept"}
    assert "4111-1111" not in operators.audit_text(engine)
    with pytest.raises(ArgumentError, match="give them again"):
        Actions(ANNA).resume(beginning(engine), row["id"])
    with pytest.raises(ArgumentError):
        Actions(ANNA).resume(beginning(engine), row["id"], args="{}", check=refuse)
    Actions(ANNA).resume(beginning(engine), row["id"], args='{"card": "4111-1111"}')
    with engine.connect() as connection:
        found = connection.execute(text("SELECT args::text, count(*) FROM outboxq.job GROUP BY 1")).all()
    assert found == [('{"card": "4111-1111"}', 250)]


def test_a_change_is_gone_on_with_as_it_was_asked_for(engine: Engine) -> None:
    """Priority, time and arguments come back from the audit, but for the arguments."""
    add(engine, 250)
    change = JobChange(priority=-3, run_now=True, args='{"a": 1}')
    with pytest.raises(Halt):
        Actions(ANNA).run(beginning(engine), ChangeJobs(JOBS, change), on_page=halt_after(1))
    (row,) = audited(engine)
    assert row["change"] == {"priority": -3, "run_now": True, "args": "not kept"}
    Actions(ANNA).resume(beginning(engine), row["id"], args='{"a": 1}')
    with engine.connect() as connection:
        found = connection.execute(text("SELECT priority, args::text, count(*) FROM outboxq.job GROUP BY 1, 2")).all()
    assert found == [(-3, '{"a": 1}', 250)]


def test_a_rolled_back_cancellation_of_a_job_that_holds_up_its_group_is_cleared(engine: Engine) -> None:
    """It waits in a state that no claim takes a mark from, and the others' marks are known to be gone."""
    ids = add(engine, 3)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outboxq.job SET group_key = 'g', state = 'group_waiting' WHERE id = :id"), {"id": ids[0]}
        )
    said: list[str] = []
    operators.on_change(engine, "RAISE 'no'", at_commit=True)
    with pytest.raises(DBAPIError):
        Actions(ANNA, warn=said.append).run(beginning(engine), CancelJobs(JOBS))
    assert said == []
