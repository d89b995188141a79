"""Results: waiting for the value that a job's handler returns, in a thread or in an event loop."""

import asyncio
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.clock import clock
from outboxq.codec.values import build_decoder, decode_stored
from outboxq.config import check_schema
from outboxq.database.answers import Answer
from outboxq.database.engines import AnyEngine, beside_connector
from outboxq.database.errors import describe_error
from outboxq.errors import ConfigError, JobNotDone, ResultNotFound, ResultTimeout
from outboxq.forks import forget_in_children
from outboxq.outbox.result_listener import ResultLimits, ResultListener
from outboxq.outbox.result_wait import Ending, Wait
from outboxq.tables import SCHEMA, mapped_schema


class ResultListeners:
    """The listeners of this process, one for each database and schema whose results it waits for."""

    def __init__(self) -> None:
        self.limits = ResultLimits()
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """Begin without listeners: a forked process does not have their threads."""
        self._lock = threading.Lock()
        # A listener lives as long as its thread.
        self._listeners = WeakValueDictionary[Hashable, ResultListener]()

    def add(self, place: Hashable, schema: str, wait: Wait) -> ResultListener:
        """Add a wait to the listener of this place; start a listener if there is none.

        `place`: identifies the database and schema: an engine's pool, or a URL, with the schema's name.
        """
        with self._lock:
            listener = self._listeners.get(place)
            if listener is None or not listener.add(wait):
                listener = ResultListener(schema, self.limits, wait)
                listener.start()
                self._listeners[place] = listener
            return listener


listeners = ResultListeners()


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checked arguments of a caller that waits for a result."""

    job_id: UUID
    schema: str
    seconds: float
    decoder: "msgspec.json.Decoder[object]"

    def deadline(self) -> float:
        """Return the time, by `clock()`, at which a wait that begins now ends."""
        return clock() + self.seconds

    def value(self, ending: Ending) -> object:
        """Return the value that the handler returned, decoded as the caller wants it.

        Raises:
            JobNotDone, ResultNotFound, PayloadError: there is no value, or it is of another type.
        """
        if ending.outcome == "gone":
            raise ResultNotFound(
                self.job_id,
                "it is in no table: its transaction was rolled back, or the job ended and its result is not kept, or "
                "not any more (keep=timedelta(days=7), keep_result=True at its handler)",
            )
        if ending.outcome != "done":
            raise JobNotDone(self.job_id, ending.outcome, ending.reason)
        if ending.result is None:
            raise ResultNotFound(self.job_id, "it is done, and its kind keeps no results: write keep_result=True")
        return decode_stored(f"the result of job {self.job_id}", self.decoder, ending.result)

    def timed_out(self, trouble: Exception | None) -> ResultTimeout:
        """Return the error for a time-out; `trouble` is the error that kept the listener from querying, if any."""
        why = "" if trouble is None else f"; the database could not be asked: {describe_error(trouble)}"
        return ResultTimeout(self.job_id, f"it was not over within {self.seconds:g} s, and goes on{why}")


def wait(
    engine: AnyEngine,
    job_id: UUID,
    *,
    timeout: timedelta | float,
    returns: type[Any] | None,
    schema: str | None,
) -> Any:
    """Wait until a job has ended, and return its handler's value; return a coroutine if the engine is async.

    The arguments and further errors are those of `JobHandle.result`.

    Raises:
        ConfigError: the engine, the time, the type or the schema cannot be used.
    """
    if not isinstance(engine, str | URL | Engine | AsyncEngine):
        raise ConfigError(
            f"a result is waited for with an engine or a URL, as the wait has a connection of its own; got "
            f"{type(engine).__name__}"
        )
    decoder = build_decoder(f"the result of job {job_id}", object if returns is None else returns)
    asked = _Asked(job_id, _schema_of(engine, schema), _seconds_of(timeout), decoder)
    if isinstance(engine, AsyncEngine):
        return Answer(_wait_in_loop(engine, asked), "wait_for_result(...)")
    return _wait_in_thread(engine, asked)


def _wait_in_thread(engine: str | URL | Engine, asked: _Asked) -> object:
    place = engine.pool if isinstance(engine, Engine) else str(engine) if isinstance(engine, str) else engine
    wait = Wait(asked.job_id, asked.deadline(), beside_connector(engine, lambda: None))
    listener = listeners.add((place, asked.schema), asked.schema, wait)
    try:
        ending = wait.future.result(asked.seconds)
    except TimeoutError:
        raise asked.timed_out(listener.trouble) from listener.trouble
    finally:
        listener.forget(wait)
    return asked.value(ending)


async def _wait_in_loop(engine: AsyncEngine, asked: _Asked) -> object:
    loop = asyncio.get_running_loop()
    connect = beside_connector(engine, lambda: loop if loop.is_running() else None)
    wait = Wait(asked.job_id, asked.deadline(), connect, loop)
    # Not through the loop: an open connection belongs to no loop, and serves all waits.
    listener = listeners.add((engine.pool, asked.schema), asked.schema, wait)
    try:
        ending = await asyncio.wait_for(asyncio.wrap_future(wait.future), asked.seconds)
    except TimeoutError:
        raise asked.timed_out(listener.trouble) from listener.trouble
    finally:
        listener.forget(wait)
    return asked.value(ending)


def _schema_of(engine: AnyEngine, schema: str | None) -> str:
    if schema is not None:
        return check_schema(schema)
    if isinstance(engine, str | URL):
        return SCHEMA
    return mapped_schema(engine.sync_engine if isinstance(engine, AsyncEngine) else engine)


def _seconds_of(timeout: object) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= threading.TIMEOUT_MAX:
        return seconds
    raise ConfigError(f"timeout takes a timedelta, or seconds, of more than 0, got {timeout!r}")
