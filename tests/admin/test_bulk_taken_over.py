"""A change of many rows that is resumed while its first process lives: one of them goes on, and no page is twice."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.admin import bulk
from outboxq.admin.actions import Actions, Actor, CancelJobs, ChangeJobs, Total
from outboxq.admin.audit import Journal
from outboxq.admin.jobs import JobChange, JobFilter
from outboxq.errors import OutboxqError, RunElsewhere, RunNotResumable
from tests.support.operators import add, audited, beginning
from tests.support.waiting import PATIENCE, wait_until

ANNA, BOB = Actor("anna"), Actor("bob")
# Rows that were changed match still: a page that is done twice would be counted twice.
ACTION = ChangeJobs(JobFilter(queue="many"), JobChange(priority=7))


class Held:
    """Begins transactions, and waits in front of one of them until it is let go."""

    def __init__(self, engine: Engine, at: int) -> None:
        self._engine, self._at, self._begun = engine, at, 0
        self.is_there, self.go = threading.Event(), threading.Event()

    def __call__(self) -> AbstractContextManager[Connection]:
        self._begun += 1
        if self._begun == self._at:
            self.is_there.set()
            assert self.go.wait(PATIENCE)
        return self._engine.begin()


class InThread:
    """Runs something in a thread of its own, and keeps what came of it."""

    def __init__(self, run: Callable[[], Total]) -> None:
        self._run = run
        self.total: Total | None = None
        self.error: OutboxqError | None = None
        self._thread = threading.Thread(target=self._go)
        self._thread.start()

    def _go(self) -> None:
        try:
            self.total = self._run()
        except OutboxqError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def changes(engine: Engine) -> Iterator[Callable[[], Counter[UUID]]]:
    """How often each job was changed."""
    add(engine, 450)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE changes (id uuid); CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN INSERT INTO public.changes VALUES (NEW.id); RETURN NULL; END$$; "
            "CREATE TRIGGER note_change AFTER UPDATE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION note_change()"
        )

    def read() -> Counter[UUID]:
        with engine.connect() as connection:
            return Counter(connection.execute(text("SELECT id FROM changes")).scalars())

    yield read
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP FUNCTION note_change() CASCADE; DROP TABLE changes")


def resumed(engine: Engine, entry: UUID) -> bulk.BulkRun:
    """The run is taken over, and has done nothing yet."""
    return bulk.resume(beginning(engine), Journal(BOB), entry, warn=[].append)


# A page takes two transactions: in one it looks for its rows, and in the other it changes them.
@pytest.mark.first_and_last
@pytest.mark.parametrize("at", [3, 4, 5, 6])
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "not stopped"])
@pytest.mark.parametrize("pages", [0, 1, 3], ids="after {} pages of the other".format)
def test_one_that_was_resumed_elsewhere_ends_wherever_it_is(
    engine: Engine, changes: Callable[[], Counter[UUID]], at: int, pages: int, *, stopped: bool
) -> None:
    """It says so, and the other one does the rest: each row once, and none left out."""
    begin = Held(engine, at)
    first = InThread(lambda: Actions(ANNA).run(begin, ACTION))
    assert begin.is_there.wait(PATIENCE)
    entry = audited(engine)[0]["id"]
    if stopped:
        with engine.begin() as connection:
            assert Actions(BOB).stop(connection, entry) == "stopped"
    second = resumed(engine, entry)
    seen: list[Total] = []

    def let_go(total: Total | None = None) -> None:
        if len(seen) == pages:
            begin.go.set()
            first.join()
        seen.append(total or Total())

    let_go()
    total = second.run(let_go)
    begin.go.set()
    first.join()
    assert isinstance(first.error, RunElsewhere)
    assert "resumed elsewhere" in str(first.error)
    assert total.changed == 250 if at < 5 else total.changed == 50
    row = audited(engine)[0]
    assert (row["changed"], row["error"], row["finished_at"] is not None) == (450, None, True)
    assert set(changes().values()) == {1}
    assert len(changes()) == 450


def test_of_two_that_resume_at_once_one_goes_on(engine: Engine, changes: Callable[[], Counter[UUID]]) -> None:
    """The other one is refused, or ends at its next page; neither does what the other has done."""
    held = Held(engine, 3)
    first = InThread(lambda: Actions(ANNA).run(held, ACTION))
    assert held.is_there.wait(PATIENCE)
    entry = audited(engine)[0]["id"]
    with engine.begin() as connection:
        Actions(BOB).stop(connection, entry)
    ready = threading.Barrier(3)

    def resume() -> Total:
        ready.wait(PATIENCE)
        return Actions(BOB).resume(beginning(engine), entry)

    others = [InThread(resume) for _ in range(3)]
    for each in others:
        each.join()
    held.go.set()
    first.join()
    assert isinstance(first.error, RunElsewhere)
    assert len([each for each in others if each.total is not None]) == 1
    assert all(isinstance(each.error, RunElsewhere | RunNotResumable) for each in others if each.total is None)
    assert audited(engine)[0]["changed"] == 450
    assert set(changes().values()) == {1}
    assert len(changes()) == 450


def test_the_last_one_that_resumes_goes_on(engine: Engine, changes: Callable[[], Counter[UUID]]) -> None:
    """Before either has done a page."""
    held = Held(engine, 3)
    first = InThread(lambda: Actions(ANNA).run(held, ACTION))
    assert held.is_there.wait(PATIENCE)
    entry = audited(engine)[0]["id"]
    earlier, later = resumed(engine, entry), resumed(engine, entry)
    with pytest.raises(RunElsewhere):
        earlier.run()
    held.go.set()
    first.join()
    assert later.run().changed == 250
    assert isinstance(first.error, RunElsewhere)
    assert len(changes()) == 450


def test_one_that_was_resumed_elsewhere_notes_no_error_of_its_own(
    engine: Engine, changes: Callable[[], Counter[UUID]]
) -> None:
    """The row is the other one's by now."""

    def taken_over(total: Total) -> None:
        assert total.entry is not None
        resumed(engine, total.entry)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Actions(ANNA).run(beginning(engine), ACTION, on_page=taken_over)
    assert audited(engine)[0]["error"] is None
    assert len(changes()) == 200


class FailsAtPageTwo:
    """Begins transactions: the second page is rolled back, and what clears its marks is held before and at its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._begun = engine, 0
        self.rolled_back, self.clear, self.cleared, self.commit = (threading.Event() for _ in range(4))

    @contextmanager
    def __call__(self) -> Iterator[Connection]:
        self._begun += 1
        is_clearing = self._begun == 5
        if is_clearing:
            self.rolled_back.set()
            assert self.clear.wait(PATIENCE)
        with self._engine.begin() as connection:
            yield connection
            if self._begun == 4:
                raise RunNotResumable(UUID(int=0), "a refusal")
            if is_clearing:
                self.cleared.set()
                assert self.commit.wait(PATIENCE)


def test_no_job_is_passed_over_because_its_mark_is_cleared(engine: Engine) -> None:
    """The marks of a page that was rolled back, in one process, while another one goes on with it."""
    add(engine, 450)
    begin = FailsAtPageTwo(engine)
    first = InThread(lambda: Actions(ANNA).run(begin, CancelJobs(JobFilter(queue="many"))))
    assert begin.rolled_back.wait(PATIENCE)
    second = resumed(engine, audited(engine)[0]["id"])
    begin.clear.set()
    assert begin.cleared.wait(PATIENCE)
    other = InThread(second.run)
    wait_until(lambda: waits_for_a_row(engine) or other.total is not None, "the other process to come to its page")
    begin.commit.set()
    first.join()
    other.join()
    assert isinstance(first.error, RunNotResumable)
    assert other.total is not None
    assert (other.total.changed, other.total.held) == (250, [])


def waits_for_a_row(engine: Engine) -> bool:
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return connection.execute(text(waiting)).first() is not None


def test_one_that_was_taken_over_touches_no_job(engine: Engine) -> None:
    """It has changed none, so that there is no mark to clear, and none is named in a warning."""
    add(engine, 450)
    held, said = Held(engine, 4), list[str]()
    action = CancelJobs(JobFilter(queue="many"))
    first = InThread(lambda: Actions(ANNA, warn=said.append).run(held, action))
    assert held.is_there.wait(PATIENCE)
    second = resumed(engine, audited(engine)[0]["id"])
    with engine.connect() as other:
        # As a page of the other process would.
        other.execute(text("SELECT FROM outboxq.job FOR UPDATE"))
        held.go.set()
        first.join()
    assert isinstance(first.error, RunElsewhere)
    assert said == []
    assert second.run().changed == 250
