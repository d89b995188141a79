"""The exporter: queries the tables every 15 seconds, and keeps the results for Prometheus's requests (scrapes).

Each database has a thread of its own. So a scrape never waits for a database, and the cost of queries does not depend
on the number of scrapes. The doctor is called once a minute.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Connection

from outboxq.clock import clock
from outboxq.database.driver import driver_connection
from outboxq.errors import SchemaError
from outboxq.observability.metrics.minutes import MinuteSums
from outboxq.observability.metrics.reading import Reading
from outboxq.observability.metrics.tables import look_at_tables, timed
from outboxq.tables import SCHEMA

logger = logging.getLogger("outboxq.metrics")

LOOK_SECONDS, DOCTOR_SECONDS = 15.0, 60.0
# The database counts as unreachable after this time without a poll.
_STALE_SECONDS = 60.0
_FIRST_SECONDS = 5.0
# Polls that take longer are stuck.
_STUCK_SECONDS = 180.0
_UP = "outboxq_exporter_up"


class FindingLike(Protocol):
    """The attributes of a doctor's finding (`outboxq.doctor.findings.Finding`) that the exporter reads."""

    @property
    def code(self) -> str:
        """The finding's name, such as "effects-abandoned"."""
        ...

    @property
    def severity(self) -> str:
        """The finding's severity, such as "warning"."""
        ...

    @property
    def detail(self) -> object:
        """The finding's details, a mapping."""
        ...


@dataclass(eq=False)
class DatabaseExporter:
    """Polls one database in a thread, and keeps the last reading.

    Args:
        connect: Opens a connection, which may take some seconds.
        find: Calls the doctor, on connections of its own, every `doctor_seconds`.
        minutes: The sums of jobs' outcomes, if these are exported too.
        look_seconds: The pause between two polls.

    Attributes:
        missing: The reason why parts of the last poll failed, if tables are missing.
    """

    connect: Callable[[], AbstractContextManager[Connection]]
    schema: str
    find: Callable[[], Iterable[FindingLike]]
    minutes: MinuteSums | None = None
    look_seconds: float = LOOK_SECONDS
    doctor_seconds: float = DOCTOR_SECONDS
    missing: SchemaError | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _seen: Reading | None = field(default=None, init=False)
    _seen_at: float = field(default=float("-inf"), init=False)
    _findings: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _abandoned: int = field(default=0, init=False)
    _asked_at: float = field(default=float("-inf"), init=False)
    _doctor_took: float = field(default=0.0, init=False)
    _is_failing: bool = field(default=False, init=False)
    _first: threading.Event = field(default_factory=threading.Event, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def start(self) -> None:
        """Begin to poll, in a thread."""
        threading.Thread(target=self._run, name="outboxq-exporter", daemon=True).start()

    def stop(self) -> None:
        """Stop polling, without waiting for a poll in progress."""
        self._over.set()

    def read(self) -> Reading:
        """Return the last poll's reading, together with the metric `outboxq_exporter_up`.

        If `is_up` is False, the reading has only that metric, with the value 0. Waits for the first poll, 5 seconds at
        most.
        """
        self._first.wait(_FIRST_SECONDS)
        reading = Reading.without_caps()
        with self._lock:
            seen, is_up = self._seen, self.is_up
        if seen is not None and is_up:
            reading.merge(seen)
        reading.add(_UP, (), int(is_up))
        return reading

    @property
    def is_up(self) -> bool:
        """True if the last poll succeeded, less than 60 seconds ago."""
        return self._seen is not None and clock() - self._seen_at < _STALE_SECONDS

    @property
    def is_alive(self) -> bool:
        """True if a poll ended, even with an error, less than 180 seconds ago, or if none has ended yet."""
        return not self._first.is_set() or clock() - self._seen_at < _STUCK_SECONDS

    def look(self) -> None:
        """Poll once. Never raises."""
        # Separate caps for the queues that exist now, because queues come and go.
        reading, counted = Reading(), Reading()
        try:
            with self.connect() as given:
                # A pooler's next backend does not have the statements prepared on this one.
                driver_connection(given).prepare_threshold = None
                options = {"isolation_level": "READ COMMITTED", "schema_translate_map": {SCHEMA: self.schema}}
                connection = given.execution_options(**options)
                try:
                    self._say(look_at_tables(connection, self.schema, reading))
                    if self.minutes is not None:
                        minutes = self.minutes
                        timed("history", lambda: minutes.look(connection), connection, reading)
                        counted = minutes.read()
                except BaseException:
                    # Closing it would send a ROLLBACK to a server that may be gone.
                    given.invalidate()
                    raise
            self._ask_doctor(reading)
        except Exception as error:  # noqa: BLE001  # after any error the next poll may succeed
            if not self._is_failing:
                logger.warning("the database cannot be looked at: error_type=%s", type(error).__name__)
            self._is_failing = True
            self._keep(None)
        else:
            self._is_failing = False
            whole = Reading.without_caps()
            whole.merge(reading)
            whole.merge(counted)
            self._keep(whole)

    def _say(self, missing: SchemaError | None) -> None:
        if missing is not None and self.missing is None:
            logger.warning("parts of the looks are not answered: %s", missing)
        self.missing = missing

    def _keep(self, reading: Reading | None) -> None:
        with self._lock:
            self._seen, self._seen_at = reading, clock()
        self._first.set()

    def _ask_doctor(self, reading: Reading) -> None:
        if clock() - self._asked_at >= self.doctor_seconds:
            began_at = time.perf_counter()
            found = list(self.find())
            self._findings = Counter((finding.code, finding.severity) for finding in found)
            self._abandoned = sum(_effects(finding) for finding in found if finding.code == "effects-abandoned")
            self._asked_at, self._doctor_took = clock(), time.perf_counter() - began_at
        for labels, findings in self._findings.items():
            reading.add("outboxq_doctor_findings", labels, findings)
        reading.add("outboxq_effects", ("abandoned",), self._abandoned)
        reading.highest("outboxq_exporter_query_seconds", ("doctor",), self._doctor_took)

    def _run(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(self.look_seconds)


def _effects(finding: FindingLike) -> int:
    detail = finding.detail
    number = detail.get("effects") if isinstance(detail, dict) else None
    return number if isinstance(number, int) else 1
