"""The claims of suspects in lease mode: most run in company, and a crash counts for a job that ran alone."""

import json
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.database.driver import ANY_SERVER, NOT_PREPARED, PreparedStatements, ServerSession, run_script
from outboxq.error_record import ErrorRecord
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.failure import KEPT_ERRORS, kept_errors
from outboxq.statements import lease
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.group_claim import AnyScript, GroupScript

MAX_CRASHES = 3
DIED = {"type": lease.RELAY_DIED, "message": "its relay died"}
FAILED = {"type": "ValueError", "message": f"not {lease.RELAY_DIED}"}
ADD = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key, run_at, errors)
VALUES (gen_random_uuid(), 'mail', 'send', CAST(:args AS jsonb), :state, :key, now(), CAST(:errors AS jsonb))"""
GROUPED = pytest.mark.parametrize("is_grouped", [False, True], ids=["plain", "grouped"])


def add(engine: Engine, name: str, errors: object = (), *, key: str | None = None, suspect: bool = True) -> None:
    state = ("suspect" if suspect else "ready") if key is None else ("group_suspect" if suspect else "grouped")
    values = {"args": json.dumps({"name": name}), "state": state, "key": key, "errors": json.dumps(errors)}
    with engine.begin() as connection:
        connection.execute(text(ADD), values)


def begin_lease(engine: Engine) -> UUID:
    owner = uuid4()
    with engine.begin() as connection:
        run_script(connection, lease.extend("outboxq", owner, 60.0, "host", 1))
    return owner


def die(engine: Engine, owner: UUID) -> list[object]:
    """The relay dies, and another one takes its jobs back; those that are dead letters now."""
    with engine.begin() as connection:
        run_script(connection, lease.end("outboxq", owner))
    with engine.begin() as connection:
        reaped = [run_script(connection, lease.reap("outboxq", MAX_CRASHES, 100, in_group=g)) for g in (False, True)]
    return [row[0] for rows in reaped for row in rows if row[4]]


def script_of(owner: UUID, *, is_grouped: bool, in_company: bool | None, **limits: object) -> AnyScript:
    if is_grouped:
        return GroupScript("outboxq", "mail", owner, suspects=True, in_company=in_company, **limits)  # type: ignore[arg-type]  # what fits each
    claims = ClaimStatements("outboxq", "mail", owner, **limits)  # type: ignore[arg-type]  # what fits each
    return {None: claims.lease_suspect, True: claims.lease_suspects_in_company, False: claims.lease_suspect_alone}[
        in_company
    ]


def claimed(engine: Engine, script: AnyScript, limit: int, prepared: PreparedStatements = NOT_PREPARED) -> Claimed:
    with engine.connect() as connection, connection.begin():
        cursor = "" if script.takes_firsts else None
        return claim(connection, ClaimRequest(script, limit, cursor, server=ServerSession(claims=prepared)))


def names(found: Claimed) -> list[str]:
    return [json.loads(job.args)["name"] for job in found.jobs]


def crashes_of(connection: Connection) -> int:
    return int(connection.execute(text("SELECT crashes FROM outboxq.job")).scalar_one())


@GROUPED
@pytest.mark.parametrize("is_prepared", [False, True], ids=["as text", "prepared"])
def test_suspects_whose_relay_died_once_are_claimed_together_and_others_alone(
    engine: Engine, is_grouped: bool, is_prepared: bool
) -> None:
    """Each of the two claims passes the other's jobs, takes its own in their order, and finds nothing in the end."""
    # Failures that name it count as little as an error of that text.
    few, many = [FAILED, DIED, FAILED], [DIED, FAILED, DIED]
    for number in range(9):
        key = f"account {number}" if is_grouped else None
        add(engine, f"job {number}", many if number % 3 == 0 else few, key=key)
    owner, prepared = begin_lease(engine), PreparedStatements() if is_prepared else NOT_PREPARED
    company, alone = (script_of(owner, is_grouped=is_grouped, in_company=either) for either in (True, False))
    found = [names(claimed(engine, company, 4, prepared)) for _ in range(3)]
    assert found == [["job 1", "job 2", "job 4", "job 5"], ["job 7", "job 8"], []]
    assert [names(claimed(engine, alone, 1, prepared)) for _ in range(4)] == [["job 0"], ["job 3"], ["job 6"], []]
    with engine.connect() as connection:
        crashes = connection.execute(text("SELECT args ->> 'name', crashes FROM outboxq.job ORDER BY 1")).all()
    assert crashes == [(f"job {number}", int(number % 3 == 0)) for number in range(9)]


@GROUPED
def test_a_job_that_kills_each_relay_runs_in_company_once(engine: Engine, is_grouped: bool) -> None:
    """Then alone, with its crashes counted, until it is a dead letter; other jobs lost no crash to it."""
    add(engine, "killer", key="account" if is_grouped else None, suspect=False)
    owner = begin_lease(engine)
    first = (
        GroupScript("outboxq", "mail", owner) if is_grouped else ClaimStatements("outboxq", "mail", owner).lease_ready
    )
    assert names(claimed(engine, first, 10)) == ["killer"]
    ways: list[tuple[bool, int]] = []
    while not die(engine, owner) and len(ways) < 10:
        owner = begin_lease(engine)
        for in_company in (True, False):
            found = claimed(engine, script_of(owner, is_grouped=is_grouped, in_company=in_company), 1)
            if found.jobs:
                with engine.connect() as connection:
                    ways.append((in_company, crashes_of(connection)))
                # The number before this claim: an orderly end writes it back.
                assert found.jobs[0].crashes == max(0, ways[-1][1] - 1)
    assert ways == [(True, 0), *((False, crashes) for crashes in range(1, MAX_CRASHES + 1))]


@pytest.mark.parametrize("others", [0, 1, KEPT_ERRORS - 3, KEPT_ERRORS - 2])
def test_two_deaths_are_remembered_up_to_as_many_failures_as_a_row_keeps(engine: Engine, others: int) -> None:
    """A job whose attempts end in order after that is like any other one, if its relay dies again."""
    errors = json.dumps([DIED, *[FAILED] * 5])
    for _ in range(others):
        errors = json.dumps([*json.loads(kept_errors(errors)), json.loads(ErrorRecord(1, "E", "m").as_json())])
    add(engine, "job", json.loads(errors), suspect=False)
    owner = begin_lease(engine)
    assert names(claimed(engine, ClaimStatements("outboxq", "mail", owner).lease_ready, 1)) == ["job"]
    assert die(engine, owner) == []
    owner = begin_lease(engine)
    is_forgotten = others + 5 > KEPT_ERRORS - 2
    company = script_of(owner, is_grouped=False, in_company=True)
    assert names(claimed(engine, company, 1)) == (["job"] if is_forgotten else [])


def test_of_each_group_the_first_suspect_is_claimed_if_no_other_job_is_before_it(engine: Engine) -> None:
    """In company too: the next one of its group begins when this one is settled."""
    add(engine, "second", key="waits", suspect=False)
    for name, key in (("behind", "waits"), ("a", "one"), ("b", "one"), ("c", "two")):
        add(engine, name, [DIED], key=key)
    add(engine, "alone", [DIED, DIED], key="three")
    add(engine, "behind it", [DIED], key="three")
    owner = begin_lease(engine)
    assert names(claimed(engine, script_of(owner, is_grouped=True, in_company=True), 16)) == ["a", "c"]
    assert names(claimed(engine, script_of(owner, is_grouped=True, in_company=True), 16)) == []
    assert names(claimed(engine, script_of(owner, is_grouped=True, in_company=False), 1)) == ["alone"]


@GROUPED
def test_suspects_in_company_keep_a_limit_that_counts(engine: Engine, is_grouped: bool) -> None:
    """They are as many as there is room for, and find the queue full after that."""
    for number in range(6):
        add(engine, str(number), [DIED], key=str(number) if is_grouped else None)
    owner = begin_lease(engine)
    script = script_of(owner, is_grouped=is_grouped, in_company=True, most=4, counts_leases=True)
    found = [claimed(engine, script, limit) for limit in (3, 3, 3)]
    assert [(names(each), each.is_full) for each in found] == [(["0", "1", "2"], False), (["3"], False), ([], True)]


@GROUPED
@pytest.mark.parametrize("in_company", [True, False])
def test_a_suspect_that_another_claim_takes_meanwhile_is_skipped(
    engine: Engine, is_grouped: bool, in_company: bool
) -> None:
    """Two relays claim at once: neither waits, and no job is claimed twice."""
    for name in ("first", "second"):
        add(engine, name, [DIED] if in_company else [DIED, DIED], key=name if is_grouped else None)
    one, other = (script_of(begin_lease(engine), is_grouped=is_grouped, in_company=in_company) for _ in range(2))
    with engine.connect() as connection, connection.begin():
        run_script(connection, one.text(1))
        assert names(claimed(engine, other, 2)) == ["second"]


@pytest.mark.parametrize("in_company", [True, False])
def test_a_suspect_that_comes_first_in_a_locked_group_is_taken_by_the_claim_of_its_sort(
    engine: Engine, in_company: bool
) -> None:
    """The first of the group may go after the claim has looked at the groups."""
    few, many = [DIED], [DIED, DIED]
    add(engine, "goes", few if in_company else many, key="account")
    add(engine, "comes", many if in_company else few, key="account")
    script = script_of(begin_lease(engine), is_grouped=True, in_company=in_company)
    parts = script.parts(1, "", ANY_SERVER)  # type: ignore[arg-type]
    at = next(place for place, (owner, _) in enumerate(parts) if owner == "claim")
    with engine.connect() as connection, connection.begin():
        assert "account" in str(run_script(connection, *(statement for _, statement in parts[:at])))
        with engine.begin() as other:
            other.execute(text('DELETE FROM outboxq.job WHERE args = \'{"name": "goes"}\''))
        assert run_script(connection, parts[at][1]) == []
    assert names(claimed(engine, script_of(begin_lease(engine), is_grouped=True, in_company=not in_company), 1)) == [
        "comes"
    ]
