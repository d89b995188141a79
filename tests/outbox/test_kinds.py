"""What a producer names: kinds, options and jobs that are not enqueued yet."""

import gc
import pickle
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from uuid import UUID

import msgspec
import pytest

from outboxq import Context, JobHandle, Jobs, external
from outboxq.codec.values import MAX_ARGS_BYTES
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge
from outboxq.outbox.options import JobOptions

jobs = Jobs()
ship = external("ship", queue="depot")


@jobs.handler(queue="accounts")
def credit(ctx: Context, account_id: int, cents: int = 0, tags: list[str] | None = None) -> None: ...


class Nowhere(tzinfo):
    """A time zone that does not know its offset."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None


def arguments(args: str) -> object:
    return msgspec.json.decode(args)


def test_arguments_are_stored_by_name() -> None:
    """However the call gave them; defaults are left out."""
    assert arguments(credit.job(1, cents=5).args) == {"account_id": 1, "cents": 5}
    assert arguments(credit.job(1).args) == {"account_id": 1}


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "missing a required argument: 'account_id'"),
        ((), {"acount_id": 1}, "required argument: 'account_id', and there is no argument 'acount_id'"),
        ((), {"account_id": 1, "cent": 5}, "got an unexpected keyword argument 'cent'"),
        ((1, 2, [], 4), {}, "too many positional arguments"),
        ((1,), {"account_id": 1}, "multiple values for argument 'account_id'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_signature(
    args: tuple[object, ...], kwargs: Mapping[str, object], says: str
) -> None:
    """The message shows what the handler takes."""
    with pytest.raises(ArgumentError, match=rf"credit\(account_id: int, cents: int = 0, .*{says}"):
        credit.job(*args, **kwargs)  # type: ignore[arg-type]


def test_an_external_kind_takes_any_arguments_but_only_by_name() -> None:
    """Nothing else tells what a position means."""
    assert arguments(ship.job(order_id=7, self="x", kind="y").args) == {"order_id": 7, "self": "x", "kind": "y"}
    with pytest.raises(ArgumentError, match="'ship' is handled elsewhere: pass its arguments by name"):
        ship.job(7)


@pytest.mark.parametrize("name", ["", "a\0", "\ud800", "x" * 64], ids=ascii)
def test_an_external_kind_takes_no_argument_name_that_cannot_be_stored(name: str) -> None:
    """A NUL in a name is refused at the call, as in a value."""
    with pytest.raises(ArgumentError, match="argument name"):
        ship.job(**{name: 1})


def test_arguments_are_those_of_the_call() -> None:
    """A list that is changed afterwards does not change the job."""
    tags = ["a"]
    new = credit.job(1, tags=tags)
    tags.append("b")
    assert arguments(new.args) == {"account_id": 1, "tags": ["a"]}


def test_arguments_may_take_256_kib_and_no_byte_more() -> None:
    """Counted as JSON in UTF-8, of all arguments together."""
    overhead = len('{"a":"","b":""}')
    half = (MAX_ARGS_BYTES - overhead) // 2
    rest = MAX_ARGS_BYTES - overhead - half
    assert len(ship.job(a="x" * half, b="x" * rest).args) == 262_144
    with pytest.raises(
        JobTooLarge, match=r"'ship' take 262,145 bytes as JSON, over the cap of 262,144: store"
    ) as error:
        ship.job(a="x" * half, b="x" * (rest + 1))
    assert (error.value.kind, error.value.size_bytes, error.value.max_bytes) == ("ship", 262_145, 262_144)
    with pytest.raises(JobTooLarge):
        ship.job(a="ä" * (MAX_ARGS_BYTES // 2))


def test_a_job_does_not_show_its_payload() -> None:
    """Its repr may end up in a log."""
    new = ship.options(headers={"trace": "hunter2"}).job(password="hunter2")
    assert "hunter2" not in repr(new)
    assert "ship" in repr(new)


def test_the_garbage_collector_does_not_walk_new_jobs() -> None:
    """A bulk holds all of its jobs until it is flushed."""
    assert not gc.is_tracked(credit.job(1))
    assert not gc.is_tracked(credit.options(priority=5, headers={"a": "1"}).job(1))


def test_headers_are_those_of_the_call() -> None:
    """Changing them afterwards does not change the job, but those that are made after it."""
    headers = {"trace": "a"}
    traced = credit.options(headers=headers)
    before = traced.job(1)
    headers["trace"] = "b"
    assert [new.envelope.headers for new in (before, traced.job(1))] == ['{"trace":"a"}', '{"trace":"b"}']


def test_options_add_up_and_leave_their_kind_alone() -> None:
    """Each call gives a new kind; what it does not name stays as it was."""
    urgent = credit.options(priority=5, headers={"a": "1"})
    later = urgent.options(delay=timedelta(hours=1), max_attempts=3)
    assert credit.job_options == JobOptions()
    assert urgent.job_options == JobOptions(priority=5, headers={"a": "1"})
    assert later.job_options == JobOptions(priority=5, headers={"a": "1"}, delay=timedelta(hours=1), max_attempts=3)
    assert (later.kind, later.queue) == (credit.kind, credit.queue)


def test_a_later_delay_replaces_an_earlier_run_at() -> None:
    """And the other way round: both say when."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    at = credit.options(run_at=moment)
    delayed = at.options(delay=timedelta(1))
    assert (delayed.job_options.delay, delayed.job_options.run_at) == (timedelta(1), None)
    assert delayed.options(run_at=moment).job_options == at.job_options


def test_a_priority_can_be_set_back_to_zero() -> None:
    """Zero is a value, not an absence."""
    assert credit.options(priority=5).options(priority=0).job_options.priority == 0
    assert credit.options(headers={"a": "b"}).options(headers={}).job_options.headers == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "delay= or run_at=, not both"),
        ({"delay": 60}, "delay takes a timedelta, got int"),
        ({"delay": timedelta(seconds=-1)}, "delay takes 0 to 36,500 days"),
        ({"delay": timedelta(days=36_501)}, "delay takes 0 to 36,500 days"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at takes a datetime with a time zone"),
        ({"run_at": datetime(2030, 1, 1, tzinfo=Nowhere())}, "run_at takes a datetime with a time zone"),
        ({"run_at": "2030-01-01"}, "run_at takes a datetime with a time zone"),
        ({"priority": 32_768}, "priority takes an int from -32767 to 32767, got 32768"),
        ({"priority": -32_768}, "priority takes an int"),
        ({"priority": 1.5}, "priority takes an int"),
        ({"priority": True}, "priority takes an int"),
        ({"max_attempts": 0}, "max_attempts takes an int from 1 to 32767, got 0"),
        ({"max_attempts": 32_768}, "max_attempts takes an int"),
        ({"max_attempts": True}, "max_attempts takes an int"),
    ],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any], says: str) -> None:
    """At the call of options(), for handlers and external kinds."""
    for kind in (credit, ship):
        with pytest.raises(ArgumentError, match=says):
            kind.options(**options)


def test_headers_are_checked_with_the_job() -> None:
    """Strings only."""
    with pytest.raises(EnqueueError, match="headers take strings for keys and values"):
        ship.options(headers={"a": 1}).job()  # type: ignore[dict-item]


def test_a_run_at_in_any_time_zone_is_accepted() -> None:
    """An offset is enough."""
    moment = datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert ship.options(run_at=moment).job_options.run_at == moment


@pytest.mark.parametrize(("kind", "queue"), [("", "q"), ("k", ""), ("k\0", "q"), ("x" * 64, "q"), ("k", "q" * 64)])
def test_a_kind_with_a_name_that_cannot_be_carried_is_refused(kind: str, queue: str) -> None:
    """Where it is defined."""
    with pytest.raises(ArgumentError, match="name"):
        external(kind, queue=queue)


def test_a_handle_cannot_be_changed() -> None:
    """What add_job returned stays what it was."""
    handle = JobHandle(UUID(int=1).hex, "credit", "accounts")
    for name in ("id", "hex", "kind", "queue", "other"):
        with pytest.raises(AttributeError):
            setattr(handle, name, "other")


def test_a_handle_is_a_value() -> None:
    """Equal ones are one key of a dict; it travels to another process, and its repr has the id as people write it."""
    handle, same, other = (JobHandle(UUID(int=number).hex, "credit", "accounts") for number in (1, 1, 2))
    assert handle.id == UUID(int=1)
    assert {handle, same, other} == {handle, other}
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert repr(handle) == f"JobHandle(id={UUID(int=1)!r}, kind='credit', queue='accounts')"


def test_the_garbage_collector_does_not_walk_handles() -> None:
    """Those of a bulk live on together: each would be walked again and again, with all that the process holds."""
    assert not gc.is_tracked(JobHandle(UUID(int=1).hex, "credit", "accounts"))
