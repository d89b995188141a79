"""Every statement of `outboxq/statements/`: each function there is called with arguments made up from its annotations.

A new statement is found by itself. One with a new sort of parameter is refused, until `_SAMPLES` has two values for it.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import FunctionType, ModuleType
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import ClauseElement, Executable, Select, TextClause, true
from sqlalchemy.dialects.postgresql import psycopg

from outboxq import statements
from outboxq.database.driver import PreparedStatements, ServerSession
from outboxq.job import Job
from outboxq.new_job import JobEnvelope, JobKeys, NewJob, UniqueAnswer, UniqueJob, UniqueKey
from outboxq.statements.aside import WAITS
from outboxq.statements.audit import AuditFilter
from outboxq.statements.claim import ClaimScript, ClaimStatements, Cursor
from outboxq.statements.dead_letters import DeadFilter
from outboxq.statements.doctor.sessions import jobs_of
from outboxq.statements.done import (
    DoneFilter,
    FinishedColumns,
    PreparedInsert,
    execute_insert,
    insert_finished,
    select_done,
)
from outboxq.statements.effect_admin import PARTS, EffectFilter
from outboxq.statements.effects import EffectLock
from outboxq.statements.group_claim import GroupScript
from outboxq.statements.inbox import MessageFilter, accept_parameters
from outboxq.statements.job_changes import JobChange
from outboxq.statements.jobs import JobFilter
from outboxq.statements.lease_mode import finish_prepared, finishing
from outboxq.statements.limit import room
from outboxq.statements.progress import ProgressNote
from outboxq.statements.rate import TokenRequest
from outboxq.statements.settle import Bury, PutBack
from outboxq.statements.unique import add_unique
from outboxq.statements.windows import WantedWindow
from outboxq.tables import dead_job, job

DIALECT = psycopg.dialect()

_ID = UUID("00000000-0000-7000-8000-000000000007")
_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_JOB = Job(_ID, "mail", "send", "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", _NOW, _NOW, 1)
_LEASED = msgspec.structs.replace(_JOB, lease_token=3)
_IN_GROUP = msgspec.structs.replace(_LEASED, id=UUID(int=2), group_key="account-7")
_ROW = (_ID, "send", "done", 1, 0.0, 0.5, "{}", "{}", "null", None, 60.0)
_OTHER_ROW = (UUID(int=1), *_ROW[1:9], f"{{{_ID}}}", 60.0)
_DONE, _DONE_TWO = (FinishedColumns("mail", None, *zip(*rows, strict=True)) for rows in ([_ROW], [_ROW, _OTHER_ROW]))
_NEW = NewJob(JobEnvelope("send", "mail", "{}", 0, None, None, None), "{}", None)
_LATER = NewJob(JobEnvelope("send", "mail", "{}", 1, 5, _NOW, None), "{}", None)
_SCHEDULE = {
    "name": "nightly",
    "kind": "report",
    "queue": "reports",
    "args": "{}",
    "options": "{}",
    "cron": "@daily",
    "time_zone": "UTC",
    "missed": "one",
    "jitter_seconds": 0.0,
    "declared": False,
    "next_at": _NOW,
}
_UNIQUE, _UNIQUE_TOO = (
    UniqueJob(_NEW.envelope, "{}", None, JobKeys(unique=UniqueKey(key, kept)), answer=UniqueAnswer())
    for key, kept in (("send\x1f7", timedelta(hours=1)), ("send\x1f8", None))
)

_LOCK = EffectLock("pay", "order-7", _ID)

# What is given at the first and at the second call, by the parameter's name, else by its annotation.
_SAMPLES: Mapping[str, tuple[object, object]] = {
    "schema": ("outboxq", "outboxq"),
    "value": ("5s", "0"),
    "condition": (WAITS, WAITS),
    "state": ("ready", "scheduled"),
    "callback": ('{"kind": "send", "queue": "mail"}',) * 2,
    "xid": ("700", "700"),
    "job_id: str": (str(_ID), str(_ID)),
    "index": ("job_ready", "job_ready"),
    "job_ids": ([str(_ID)], [str(_ID)]),
    "transactions": (["700"], ["700"]),
    "names: list[str]": (["public"], ["public", "app"]),
    "names: tuple[str, ...]": (("work_mem", "jit"), ("jit",)),
    "wanted: list[tuple[str, str]]": ([("job", "DELETE")], [("job", "INSERT")]),
    "values": (
        {"id": _ID, "actor": "anna", "via": "cli", "action": "dead.retry", "filter": "{}", "expected": 7},
        {"id": _ID, "actor": "anna", "role": "admin", "via": "web", "action": "queue.pause", "reason": "why"},
    ),
    "AuditFilter": (AuditFilter(_NOW, "dead", "anna"), AuditFilter()),
    "errors": ("[]", importlib.import_module("outboxq.statements.settle").errors_with("[]", "{}")),
    "bool": (True, False),
    "str": ("mail", "mail"),
    "str | None": ("{}", None),
    "int": (7, 7),
    "int | None": (7, None),
    "datetime": (_NOW, _NOW),
    "before: UUID | None": (_ID, None),
    "rows: sqlalchemy.sql.schema.Table": (job, dead_job),
    "contains": (['{"order_id": 7}', '{"order_id": "7"}'], []),
    "actions": (["dead.retry", "job.cancel"], []),
    "after: tuple[str, str] | None": (("pay", "order-7"), None),
    "before": (_NOW, None),
    "datetime | None": (_NOW, None),
    "rows: Sequence[Mapping[str, object]]": ([_SCHEDULE], [_SCHEDULE, {**_SCHEDULE, "name": "weekly"}]),
    "without": ((), ("nightly", "weekly")),
    "given: Mapping[str, object]": ({"max_running": 5}, {"max_running": None, "max_per_group": 2}),
    "float": (7.5, 7.5),
    "float | None": (7.5, None),
    "bytes | None": (b"x", None),
    "UUID": (_ID, _ID),
    "UUID | None": (_ID, None),
    "timedelta": (timedelta(seconds=5), timedelta(seconds=5)),
    "timedelta | None": (timedelta(seconds=5), None),
    "statements.rate.TokenRequest": (
        TokenRequest(most=1, chunk=1, each_seconds=0.6, burst=1, keep_seconds=0.05),
        TokenRequest(most=50, chunk=10, each_seconds=0.002, burst=20, keep_seconds=0.02),
    ),
    "wanted: Sequence[statements.windows.WantedWindow]": (
        [WantedWindow("send\x1f7", _ID, 5_000_000)],
        [WantedWindow(f"send\x1f{n}", _ID, 5_000_000) for n in range(2)],
    ),
    "claimed: Sequence[UUID]": ([_ID], [_ID, _ID]),
    "room": tuple(room("outboxq", "mail", 5, counts_leases=counts) for counts in (False, True)),
    "EffectLock": (_LOCK, _LOCK),
    "Status": ("done", "unknown"),
    "Job": (_JOB, _LEASED),
    "Iterable[Job]": ([_LEASED], [_LEASED, _LEASED]),
    "Sequence[sqlalchemy.sql.elements.ColumnElement[bool]]": ([true()], []),
    "statements.effect_admin.Part": (PARTS[0], PARTS[2]),
    "column": (job.c.id, dead_job.c.died_at),
    "jobs: sqlalchemy.sql.selectable.TableClause": (jobs_of("outboxq"), jobs_of("outboxq")),
    "JobFilter": (JobFilter("mail", "send", "ready", (_ID, _ID), "account-7", _NOW), JobFilter()),
    "statements.job_changes.JobChange": (JobChange(priority=1, run_at=_NOW, args="{}"), JobChange(run_now=True)),
    "finished: statements.done.FinishedColumns": (_DONE, _DONE_TWO),
    "notes: Sequence[statements.progress.ProgressNote]": (
        [ProgressNote(_ID, 1, 0.4, "4 of 10")],
        [ProgressNote(_ID, 1, 0.4, "4 of 10"), ProgressNote(UUID(int=1), 2, 1.0, "")],
    ),
    # With it a part of another statement, which is `keeping`.
    "gone": (False, False),
    "changes: Sequence[statements.settle.PutBack]": (
        [PutBack(job=_LEASED, attempt=1, record="{}", delay=timedelta(seconds=5))],
        [PutBack(job=_LEASED, attempt=0, parks=True), PutBack(job=_IN_GROUP, attempt=1, passes=True)],
    ),
    "changes: Sequence[statements.settle.Bury]": (
        [Bury(job=_LEASED, reason="why", record="{}")],
        [Bury(job=_LEASED, reason="why"), Bury(job=_IN_GROUP, reason="it's \\")],
    ),
    "keeping": ("", insert_finished("outboxq", _DONE, _ID, gone=True)),
    "DoneFilter": (DoneFilter("mail", "send", "done", _NOW), DoneFilter()),
    "DeadFilter": (DeadFilter("mail", "send", "gone", (_ID, _ID), _NOW), DeadFilter()),
    "EffectFilter": (EffectFilter("mail", "unknown"), EffectFilter()),
    "MessageFilter": (MessageFilter("mail", "7", _NOW), MessageFilter()),
    "Mapping[str, NewJob]": ({_ID.hex: _NEW}, {_ID.hex: _NEW, UUID(int=1).hex: _LATER}),
    "Mapping[str, UniqueJob]": ({_ID.hex: _UNIQUE}, {_ID.hex: _UNIQUE, UUID(int=1).hex: _UNIQUE_TOO}),
    "keys": (["send\x1f7"], ["send\x1f7", "send\x1f8"]),
    "rows: Sequence[Sequence[object]]": (
        [("mail", "send", 1, 0, 0, 0, 0, 0, 0, 0.5, 0.25, [1] * 20, [1] * 20)],
        [],
    ),
    "gauges": ([("mail", 1, 0, 0, 0, 0, 0, True, 0.5)], [("mail", 1, 0, 0, 0, 0, 0, False, None)]),
    "kept": ("48 hours", "35 days"),
    "hour": ("2026-01-01 00:00:00+00", "2026-01-01 00:00:00+00"),
    "running": ("[]", "[]"),
    "limits: str": ("[]", "[{}]"),
    "pairs": ([("mail", "send")], [("mail", "send"), ("mail", "post")]),
    "by": ("minute", "kind"),
    "found": (select_done(DoneFilter("mail"), [], limit=7), select_done(DoneFilter(), [true()], limit=7)),
    "greatest": ("id", "finished_at"),
    "beside": ("", insert_finished("outboxq", _DONE, _ID)),
    "Sequence[UUID]": ([_ID, _ID], [_ID]),
    "Collection[UUID]": ([_ID, UUID(int=1)], [_ID]),
    "frozenset[UUID]": (frozenset({_ID, UUID(int=1)}), frozenset({_ID})),
    "Sequence[str]": (["mail", "post"], ["mail"]),
    "Collection[str]": (["mail", "post"], ["mail"]),
    "Iterable[str]": (["mail", "post"], ["mail"]),
    "tuple[str, ...]": (("mail", "post"), ("mail",)),
}
_PARAMETERS: Mapping[str, Mapping[str, object]] = {
    "accept_messages": accept_parameters("mail", {"7": b"x", "8": None}, timedelta(days=1)),
    "running": {"names": ["mail"], "most": [5]},
    "overdue": {"names": ["mail"], "seconds": [86_400.0], "late": 60.0},
    "_MARKER": {"marker": "outboxq.migration"},
    "_TRY_LOCK": {"schema": "outboxq"},
    "_LOCK": {"schema": "outboxq"},
    "_HOLDERS": {"schema": "outboxq"},
    "_ADD": add_unique({_ID.hex: _UNIQUE})[1],
    "NOTIFY_AS_BEFORE": {"was": ""},
    "NOTIFY": {"channel": "outboxq_outboxq", "payload": ""},
}
# They read rows, or make parts of statements that others here hold.
_NO_STATEMENTS = frozenset(
    {
        "accept_parameters",
        "array_text",
        "arrays_of",
        "channel_name",
        "count_kinds",
        "counted_columns",
        "ending",
        "errors_with",
        "execute_insert",
        "finish_prepared",
        "interval_text",
        "job_columns",
        "jobs_of",
        "key_is_free",
        "lock_class",
        "matching",
        "page_outcome",
        "pick_page",
        "qualified",
        "read_page",
        "result_channel",
        "room",
        "rows_of",
        "schema_name",
        "stored_key",
        "summary_columns",
        "take_for_dead",
        "text_array",
    }
)


def all_statements() -> Iterator[tuple[str, Executable | str, Mapping[str, object]]]:
    """Where each statement is made; the statement, as SQLAlchemy has it or the text that is sent; its parameters."""
    for module in _modules():
        name = module.__name__.rpartition(".")[2]
        for attribute, value in vars(module).items():
            made = inspect.unwrap(value) if callable(value) else value
            if isinstance(made, FunctionType) and made.__module__ == module.__name__:
                if attribute not in _NO_STATEMENTS and not _is_part(made):
                    yield from ((f"{name}.{attribute}", *statement) for statement in _called(made))
            elif isinstance(value, TextClause | Select):
                yield f"{name}.{attribute}", value, _PARAMETERS.get(attribute, {})
    yield from (("claim.ClaimStatements", text, {}) for text in _claims())


def compiled_text(statement: Executable | str) -> str:
    """The text with `$1`, `$2`, ... for parameters, as the psycopg dialect writes it."""
    if isinstance(statement, str):
        return statement
    assert isinstance(statement, ClauseElement)
    compiled = statement.compile(dialect=DIALECT, compile_kwargs={"render_postcompile": True})
    return str(compiled) % {name: f"${number}" for number, name in enumerate(compiled.params, 1)}


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(statements.__path__, f"{statements.__name__}."):
        yield importlib.import_module(found.name)


def _is_part(function: Callable[..., object]) -> bool:
    """Private, of a module of parts, or what sends a statement that is a constant beside it."""
    return (
        function.__name__.startswith("_")
        or function.__module__.endswith((".added", ".builtin", ".numbers", ".render"))
        or "connection" in inspect.signature(function).parameters
    )


def _called(function: Callable[..., Any]) -> Iterator[tuple[Executable | str, Mapping[str, object]]]:
    parameters = inspect.signature(function).parameters.values()
    for turn in (0, 1):
        given = {parameter.name: _sample(function, parameter)[turn] for parameter in parameters}
        positional = [given.pop(each.name) for each in parameters if each.kind is not each.KEYWORD_ONLY]
        made = function(*positional, **given)
        if isinstance(made, ClaimScript):
            yield from ((text, {}) for text in _of_script(made))
        elif isinstance(made, PreparedInsert):
            yield f"{made.definition}; {execute_insert('outboxq', _DONE, _ID)}", {}
        elif function is inspect.unwrap(finishing):
            yield f"{made[1]}; {finish_prepared('outboxq', [_LEASED])}", {}
        elif isinstance(made, tuple) and any(isinstance(part, Mapping) for part in made):
            yield made
        else:
            yield "; ".join(made) if isinstance(made, tuple) else made, _PARAMETERS.get(function.__name__, {})


def _sample(function: Callable[..., object], parameter: inspect.Parameter) -> tuple[object, object]:
    annotation = inspect.formatannotation(parameter.annotation)
    for package in ("outboxq.", "collections.abc.", "datetime.", "uuid.", "typing."):
        annotation = annotation.replace(package, "")
    annotation = annotation.rpartition(".")[2] if annotation.endswith(("Filter", ".Job")) else annotation
    annotation = "Status" if annotation.startswith("Literal[") else annotation
    for name in ("job.Job]", "new_job.NewJob", "new_job.UniqueJob", "statements.effects.EffectLock"):
        annotation = annotation.replace(name, name.rpartition(".")[2])
    for key in (f"{parameter.name}: {annotation}", parameter.name, annotation):
        if key in _SAMPLES:
            return _SAMPLES[key]
    raise LookupError(f"{function.__module__}.{function.__name__}: no sample of {parameter.name}: {annotation}")


def _claims() -> Iterator[str]:
    for most, counts_leases in ((None, False), (3, False), (3, True)):
        claims = ClaimStatements("outboxq", "mail", _ID, most=most, counts_leases=counts_leases)
        of_suspects = (claims.lease_suspect, claims.lease_suspects_in_company, claims.lease_suspect_alone)
        for script in (claims.ready, claims.due, claims.lease_ready, claims.lease_due, *of_suspects):
            yield from _of_script(script)
            if script.for_many is not None:
                yield from _of_script(script.for_many)
    for limit in ((None, False), (3, False), (3, True)):
        for groups in (GroupScript("outboxq", "mail", None, *limit), GroupScript("outboxq", "mail", _ID, *limit)):
            yield from (groups.text(5, "a"), _text(groups.clearing(5)), groups.one(_ID))
        for in_company in (None, True, False):
            yield GroupScript("outboxq", "mail", _ID, *limit, suspects=True, in_company=in_company).text(1)


def _of_script(script: ClaimScript) -> Iterator[str]:
    cursor = Cursor(0, 7) if script.is_keyed else None
    yield from (script.text(5), script.text(5, cursor), _text(script.clearing(5)))
    if script.texts.definition:
        yield _text(script.parts(5, cursor, ServerSession(claims=PreparedStatements())))


def _text(parts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(statement for _, statement in parts)
