"""Schedules that code declares: `@jobs.schedule(...)` above a handler, checked with all others at the relay's start."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from outboxq.admin.schedules import FIRE_TIME, Missed, NewSchedule
from outboxq.cron import Cron, cron_of, of_schedule
from outboxq.errors import ArgumentError, RegistryError
from outboxq.handlers.function import naming
from outboxq.handlers.handler import AnyHandler, Handler
from outboxq.names import named_options
from outboxq.new_job import NewJob

H = TypeVar("H", bound=AnyHandler)

# The argument of a handler that receives the time at which its job is due.
_FIRE_TIME = "fire_time"
_ANOTHER_TIME = FIRE_TIME.replace(year=2)


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredSchedule:
    """A schedule as declared above its handler; `check` makes its job, which is possible only after all imports."""

    name: str
    handler: AnyHandler
    cron: Cron
    missed: Missed
    jitter: timedelta
    args: Mapping[str, object]

    def check(self, owner: str) -> NewSchedule:
        """Check the schedule, and return it with its job, as one that the registry named `owner` owns.

        Raises:
            RegistryError: an argument of the handler has no value, or a value does not fit.
        """
        with naming(self.handler.function):
            return NewSchedule(
                name=self.name,
                job=self._job(),
                cron=self.cron,
                missed=self.missed,
                jitter=self.jitter,
                owner=owner,
            )

    def _job(self) -> NewJob:
        given = {_FIRE_TIME: FIRE_TIME} if _FIRE_TIME in self.handler.signature().parameters else {}
        try:
            job = self.handler.job(**{**given, **self.args})
            if given and job.keys != self.handler.job(**{_FIRE_TIME: _ANOTHER_TIME, **self.args}).keys:
                raise ArgumentError(f"a key of its job is made of {_FIRE_TIME}, and has to be known before")
        except ArgumentError as error:
            raise RegistryError(
                f"schedule {self.name!r}: {error}: give each argument of the handler a default, or a value by "
                f'@jobs.schedule({self.cron.text!r}, args={{"name": ...}}); {_FIRE_TIME} is a datetime'
            ) from error
        return job


@dataclass(frozen=True, slots=True)
class ScheduleDecorator:
    """The decorator that `jobs.schedule(...)` returns: it declares a handler's schedule, and returns the handler."""

    add: Callable[[DeclaredSchedule], None]
    cron: Cron
    missed: Missed
    jitter: timedelta
    name: str | None
    args: Mapping[str, object]

    def __call__(self, handler: H, /) -> H:
        """Declare the schedule of this handler."""
        if not isinstance(handler, Handler):
            raise RegistryError(
                f"@jobs.schedule({self.cron.text!r}) stands above @jobs.handler(...), and takes the handler that this "
                f"makes: got {handler!r}"
            )
        with naming(handler.function):
            name = handler.kind if self.name is None else self.name
            self.add(DeclaredSchedule(name, handler, self.cron, self.missed, self.jitter, self.args))
        return handler


class Scheduled:
    """The part of a registry that declares schedules."""

    def __init__(self) -> None:
        super().__init__()
        self._schedules: list[DeclaredSchedule] = []

    @named_options
    def schedule(
        self,
        cron: str | None = None,
        *,
        every: timedelta | None = None,
        time_zone: str = "UTC",
        missed: Missed = "one",
        jitter: timedelta = timedelta(0),
        name: str | None = None,
        args: Mapping[str, object] | None = None,
    ) -> ScheduleDecorator:
        """Add a job at certain times: `@jobs.schedule("30 2 * * *")` above `@jobs.handler`, once or several times.

        Relays store the schedule when they start, by its name. A handler with an argument `fire_time` receives the time
        at which the job was due, as the clocks of the time zone show it; `ctx.headers` has it too, as
        "outboxq.fire_time".

        Args:
            cron: Five fields (minute, hour, day of month, month, day of week), or `@hourly`, `@daily`, `@weekly`,
                `@monthly`, `@yearly`.
            every: In place of `cron`, an interval of whole seconds, from a second to 365 days: due at its multiples
                since 1970 in UTC, so that a change of the clocks moves none.
            time_zone: The time zone of `cron`, such as "Europe/Berlin".
            missed: The treatment of times at which no relay ran. "one": one job for all of them, with the newest as its
                time. "all": a job for each. "skip": no job for a time more than a minute ago.
            jitter: The longest random delay of each job, up to 24 hours, and less than `every`.
            name: The schedule's name, by default the handler's kind. Another name means another schedule.
            args: The handler's other arguments, by name.

        Raises:
            ArgumentError: the cron text is invalid or never due, there is no such time zone, or `cron` and `every` are
                both given or both missing.
            RegistryError: the name is taken by another schedule.
        """
        with of_schedule(name):
            due = cron_of(cron, every, time_zone)
        return ScheduleDecorator(self._add_schedule, due, missed, jitter, name, dict(args or {}))

    def _add_schedule(self, schedule: DeclaredSchedule) -> None:
        check_distinct(schedule, self._schedules)
        self._schedules.append(schedule)


def check_distinct(schedule: DeclaredSchedule, others: Iterable[DeclaredSchedule]) -> None:
    """Refuse a second schedule of one name.

    Raises:
        RegistryError: the name is taken. No number is appended to make it distinct: if the first schedule were removed,
            the second would take over its name and times.
    """
    if any(other.name == schedule.name and other is not schedule for other in others):
        raise RegistryError(
            f"two schedules have the name {schedule.name!r}, which by default is the handler's kind: give one of them "
            f'a name of its own, such as @jobs.schedule({schedule.cron.text!r}, name="{schedule.name}-2")'
        )


def checked_schedules(
    declared: Mapping[DeclaredSchedule, str], handlers: Collection[AnyHandler]
) -> tuple[NewSchedule, ...]:
    """Return the schedules of a registry and of those that it includes, with their jobs and owners.

    Args:
        declared: The name of the owning registry, by schedule.

    Raises:
        RegistryError: two schedules have the same name, a handler belongs to another registry, or its arguments do not
            fit.
    """
    for each in declared:
        check_distinct(each, declared)
        if each.handler not in handlers:
            raise RegistryError(
                f"schedule {each.name!r}: the handler {each.handler.kind!r} is not in this registry: use the "
                "decorators of one registry"
            )
    return tuple(each.check(owner) for each, owner in declared.items())
