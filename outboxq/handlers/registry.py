"""The registry: an application's handlers, lifespan, scopes and inboxes, and their checks at the relay's start."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Concatenate, Literal, TypeVar, Unpack, get_args, overload

from outboxq.errors import ArgumentError, InvalidKey, RegistryError
from outboxq.events import Event
from outboxq.handlers.around import Around, Arounds, F, checked_around
from outboxq.handlers.context import AsyncContext, Context
from outboxq.handlers.dead_letters import KeepsDead
from outboxq.handlers.handler import (
    AnyHandler,
    Arguments,
    BatchHandlerDecorator,
    Flavour,
    Handler,
    HandlerDecorator,
    R_outcome,
    ResultHandlerDecorator,
)
from outboxq.handlers.hooks import EventHook, On, checked_events, checked_hook
from outboxq.handlers.limited import Limited
from outboxq.handlers.options import DEFAULT_MAX_SIZE, CommonOptions, HandlerOptions, Messages, check_choice
from outboxq.handlers.place import place_of
from outboxq.handlers.resolved import Lifespan, Registry
from outboxq.handlers.retention import Retained, check_windows, default_retention
from outboxq.handlers.schedules import Scheduled, checked_schedules
from outboxq.names import MAX_SCOPE_BYTES, check_key, check_keywords, named_options
from outboxq.outbox.callback_batch import batch as open_batch
from outboxq.outbox.kinds import P
from outboxq.outbox.options import FlowOptions, JobOptions
from outboxq.outcomes import Backoff

T = TypeVar("T")
E1 = TypeVar("E1")
E2 = TypeVar("E2")
E3 = TypeVar("E3")
E4 = TypeVar("E4")

_BATCH_OPTIONS = frozenset({*CommonOptions.__annotations__, "max_size"})
_HANDLER_OPTIONS = frozenset({*CommonOptions.__annotations__, "batchable", "keep_result"})
_OF_ONE_JOB = MappingProxyType(
    {
        **dict.fromkeys(
            ("delay", "run_at", "priority", "headers"),
            "it is one job's: give it where the job is added, as in add_job(kind.options(...))",
        ),
        "max_attempts": "it is the retry's: retry=Backoff(max_attempts=...)",
        "slots": "it is the relay's: `outboxq relay --queue NAME=SLOTS`",
        "batch_size": "it is the relay's: `outboxq relay --batch-size`",
    }
)


class Jobs(Retained, Scheduled, Limited, KeepsDead):
    """A registry of handlers, given to the relay.

    Args:
        lifespan: A function without arguments that returns a context manager, sync or async, entered once per relay
            process before the first job; the value that it yields is `ctx.state`.
        messages: The part of error texts that is stored, for handlers without a setting of their own; explained at
            `CommonOptions`.
        name: The owner of this registry's schedules: up to 255 bytes, the same in each version of the application,
            and another one in each application that uses the database. By default the module in which the registry is
            made and its name there, such as "myapp.jobs:jobs".
        hooks: Functions, sync or async, that receive the events of each relay process. The frequent events
            `JobsClaimed`, `ClaimsEmpty`, `ClaimsFailed` and `EffectCalled` reach only hooks that name them with `on`.
            No hook of a registry receives the events of supervisors (`ChildDied` and the like), which are only logged,
            or those of producers (`JobsEnqueued`, `MessageSeen`), which the hooks of their engines receive.

    Raises:
        RegistryError: `messages` is not "redacted", "withheld" or "whole", or a hook cannot be called with an event.
        InvalidKey: the name is invalid.
    """

    @named_options
    def __init__(
        self,
        *,
        lifespan: Lifespan | None = None,
        messages: Messages = "redacted",
        hooks: Iterable[Callable[[Event], object]] = (),
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.lifespan = lifespan
        self._name = None if name is None else check_key("name of the registry", name, MAX_SCOPE_BYTES)
        self._place = place_of(self)
        self._hooks: list[EventHook] = [checked_hook(hook) for hook in hooks]
        self._arounds: list[Around] = []
        self._included: list[Jobs] = []
        check_choice("messages", messages, Messages)
        self._messages: Messages = messages
        self._handlers: dict[str, AnyHandler] = {}

    @overload
    def handler(
        self, function: Callable[Concatenate[Context[Any], P], R_outcome], /
    ) -> Handler[P, Context[Any], R_outcome]: ...

    @overload
    def handler(
        self, function: Callable[Concatenate[AsyncContext[Any], P], Awaitable[R_outcome]], /
    ) -> Handler[P, AsyncContext[Any], Awaitable[R_outcome]]: ...

    @overload
    def handler(
        self, *, batchable: bool = False, keep_result: Literal[False] = False, **options: Unpack[CommonOptions]
    ) -> HandlerDecorator: ...

    @overload
    def handler(
        self, *, batchable: bool = False, keep_result: Literal[True], **options: Unpack[CommonOptions]
    ) -> ResultHandlerDecorator: ...

    def handler(
        self,
        function: Callable[..., Any] | None = None,
        *,
        batchable: bool = False,
        keep_result: bool = False,
        **options: Unpack[CommonOptions],
    ) -> HandlerDecorator | ResultHandlerDecorator | AnyHandler:
        """Register a handler: `@jobs.handler`, or `@jobs.handler(queue="mail")` with options.

        Args:
            batchable: The handler only writes rows through its session, and defers statements. Such jobs that are
                claimed together share the loading and writing of rows; if anything goes wrong, each job runs once more
                in a transaction of its own.
            keep_result: The handler's return value is kept with its finished job, as JSON up to 256 KiB: needs `keep`.
                `find_job` returns it.
            options: The options that `CommonOptions` explains. Those of `FlowOptions` apply to all jobs of the handler;
                `Handler.options` sets them for some jobs.

        Raises:
            RegistryError: the function cannot be a handler, the kind or an alias is taken, or an option does not fit.
            ArgumentError: a name has more than 63 bytes, or control characters.
        """
        check_keywords("handler", options, _HANDLER_OPTIONS, _OF_ONE_JOB)
        checked = self._options(options, batchable=batchable, keep_result=keep_result)
        decorator = HandlerDecorator(self.add, options.get("kind"), checked)
        if function is not None:
            return decorator(function)
        return ResultHandlerDecorator(decorator) if keep_result else decorator

    def batch_handler(
        self, arguments: Callable[P, T], *, max_size: int = DEFAULT_MAX_SIZE, **options: Unpack[CommonOptions]
    ) -> BatchHandlerDecorator[P, T]:
        """Register a handler that receives many jobs at a time: for set-based SQL, or in lease mode for a service.

        The handler returns None if all jobs are done, or an outcome for each, in their order; rows that it wrote for
        jobs that are not done stay. If it raises, all of its rows are undone, and it is called for each job alone.

        Args:
            arguments: The class that holds the arguments of one job: a dataclass, a `msgspec.Struct`, an attrs class.
            max_size: The most jobs of a call, 1 to 10,000. A queue claims so many at once.
            options: Those of `handler` without `batchable` and `keep_result`, as `CommonOptions` explains them.

        Raises:
            RegistryError: the kind or an alias is taken, an option is out of its range, or the class's arguments cannot
                be determined.
            ArgumentError: a name has more than 63 bytes, or control characters.
        """
        check_keywords("batch_handler", options, _BATCH_OPTIONS, _OF_ONE_JOB)
        declared = Arguments(arguments)
        return BatchHandlerDecorator(self.add, options.get("kind"), self._options(options, max_size=max_size), declared)

    def _options(self, given: CommonOptions, **others: Any) -> Callable[[], HandlerOptions]:
        """Return a function that makes and checks a handler's options: those given, and the registry's defaults."""
        flow = {name: value for name, value in given.items() if name in FlowOptions.__annotations__}
        others |= {name: value for name, value in given.items() if name not in flow and name != "kind"}
        messages, retry = given.get("messages"), given.get("retry")
        others["messages"] = self._messages if messages is None else messages
        others["retry"] = Backoff() if retry is None else retry

        def make() -> HandlerOptions:
            try:
                enqueued = JobOptions(**flow)  # type: ignore[arg-type]  # checked by JobOptions
            except (ArgumentError, InvalidKey) as error:
                raise RegistryError(str(error)) from error
            return HandlerOptions(**others, enqueued=enqueued)

        return make

    batch = staticmethod(open_batch)

    @property
    def name(self) -> str:
        """The name of this registry, which is stored as the owner of its schedules."""
        return self._place.name_of(self) if self._name is None else self._name

    @overload
    def on(self, event: type[E1], /) -> On[E1]: ...

    @overload
    def on(self, event: type[E1], second: type[E2], /) -> On[E1 | E2]: ...

    @overload
    def on(self, event: type[E1], second: type[E2], third: type[E3], /) -> On[E1 | E2 | E3]: ...

    @overload
    def on(self, event: type[E1], second: type[E2], third: type[E3], fourth: type[E4], /) -> On[E1 | E2 | E3 | E4]: ...

    @overload
    def on(self, *events: type[object]) -> On[Any]: ...

    def on(self, *events: type[object]) -> On[Any]:
        """Register a hook: a function, sync or async, that receives the events of these classes.

        In each relay process, a separate thread runs all hooks of the registry, one after the other. A hook that raises
        is logged and counted, without further effect; a slow hook may miss events, which are counted too.

        Raises:
            RegistryError: no event, a value that is no class of `outboxq.events`, or an event of supervisors or
                producers, which no hook of a registry receives.
        """
        return On(self._hooks.append, checked_events(events))

    @overload
    def around(self, function: F, /, *, flavour: Flavour | None = None) -> F: ...

    @overload
    def around(self, function: None = None, /, *, flavour: Flavour | None = None) -> Callable[[F], F]: ...

    def around(self, function: Any = None, /, *, flavour: Flavour | None = None) -> Any:
        """Wrap a context manager around each call of this registry's handlers, and of those that it includes.

        The function receives the call's context before the handler's rows are loaded. It returns a context manager,
        which is entered for the loading and the call; or an outcome, which replaces the call; or None, to wrap nothing.
        The context manager may be async for async handlers. A generator function that yields once becomes a context
        manager. For async handlers the function may itself be async.

        The first around is the outermost; the arounds of an including registry are outside those of the included one.
        An around is part of the attempt: its rows are committed with the handler's, its error fails the attempt, and
        the time-out covers it. An error that a context manager swallows still fails the attempt.

        Args:
            flavour: "sync" or "async": wrap only handlers of this flavour.

        Raises:
            RegistryError: the function cannot be called with a context, or there is no such flavour.
        """
        if flavour is not None:
            check_choice("flavour", flavour, Flavour)

        def register(function: F) -> F:
            self._arounds.append(checked_around(function, flavour))
            return function

        return register if function is None else register(function)

    def add(self, handler: AnyHandler) -> None:
        """Register a handler that was made elsewhere.

        Raises:
            RegistryError: its kind or an alias is taken by another handler.
        """
        for name in (handler.kind, *handler.aliases):
            taken = self._handlers.get(name)
            # The same handler arrives twice if two included registries include a third one.
            if taken is not None and taken is not handler:
                raise RegistryError(
                    f"kind {name!r} is registered twice: by {_where(taken)} and by {_where(handler)}. "
                    "Give one of them another name with kind=..."
                )
        for name in (handler.kind, *handler.aliases):
            self._handlers[name] = handler

    def include(self, other: "Jobs") -> None:
        """Register every handler of another registry here too, with its scopes, inboxes and queue settings.

        The hooks of the other registry receive the events of the relay that runs this one; the arounds of the other
        registry wrap only the other's handlers. That also applies to hooks and arounds that are registered there later.

        Raises:
            RegistryError: a kind is taken, a scope, an inbox or a limit is declared differently, or `other` has a
                lifespan of its own, which would never be entered.
        """
        if not isinstance(other, Jobs):
            raise RegistryError(f"include takes a registry, {_instead_of(other)}")
        if other.lifespan is not None:
            raise RegistryError(
                "an included registry has a lifespan, which would not run: give it to the registry on top"
            )
        for handler in tuple(dict.fromkeys(other._handlers.values())):  # noqa: SLF001  # the same class
            self.add(handler)
        for window in tuple(other._windows.values()):  # noqa: SLF001  # the same class
            self._declare(window)
        for queue, limits in other._limits.items():  # noqa: SLF001  # the same class
            self._declare_limits(queue, limits)
        for queue, time in other._keep_dead.items():  # noqa: SLF001  # the same class
            self._declare_keep_dead(queue, time)
        self._included.append(other)

    def _with_included(self) -> list["Jobs"]:
        """Return this registry and all that it includes, at any depth: each once, before those that it includes."""
        found: dict[Jobs, None] = {}
        entered = set[Jobs]()

        def enter(jobs: Jobs) -> None:
            if jobs not in entered:
                entered.add(jobs)
                for other in reversed(jobs._included):
                    enter(other)
                found[jobs] = None

        enter(self)
        return list(reversed(found))

    def _arounds_by_kind(self) -> dict[str, Arounds]:
        """Return the arounds of each kind and alias that has any, the outermost first."""
        wrapping: dict[AnyHandler, list[Around]] = {}
        for each in self._with_included():
            for handler in dict.fromkeys(each._handlers.values()):  # noqa: SLF001  # the same class
                found = [around for around in each._arounds if around.wraps(handler)]  # noqa: SLF001  # the same class
                wrapping.setdefault(handler, []).extend(found)
        arounds = {handler: Arounds(tuple(found)) for handler, found in wrapping.items() if found}
        return {name: arounds[handler] for name, handler in self._handlers.items() if handler in arounds}

    def resolve(self) -> "Registry":
        """Return the registry as relays use it, after all checks that need every handler.

        Raises:
            RegistryError: there is no handler, a queue has both sync and async handlers, or both claim modes, a
                signature cannot be stored, a sync handler has an async around, a scope or an inbox forgets while a
                handler may still retry, or a schedule's job cannot be made.
        """
        if not self._handlers:
            raise RegistryError("this registry has no handlers: is the module that defines them imported?")
        by_queue: dict[str, list[AnyHandler]] = {}
        for handler in dict.fromkeys(self._handlers.values()):
            handler.check()
            by_queue.setdefault(handler.queue, []).append(handler)
            _check_same_queue(by_queue[handler.queue][0], handler)
        self._check_limits(set(by_queue))
        self._check_keep_dead(set(by_queue))
        horizons = {name: handler.retry_horizon() for name, handler in self._handlers.items()}
        check_windows(self._windows.values(), horizons)
        return Registry(
            MappingProxyType(dict(self._handlers)),
            MappingProxyType({name: handler.signature() for name, handler in self._handlers.items()}),
            {flavour: _of_flavour(self._handlers, flavour) for flavour in get_args(Flavour)},
            by_queue,
            MappingProxyType({queue: first.flavour for queue, (first, *_) in by_queue.items()}),
            MappingProxyType({queue: first.claim for queue, (first, *_) in by_queue.items()}),
            self.lifespan,
            MappingProxyType({name: window for (owner, name), window in self._windows.items() if owner == "scope"}),
            default_retention(horizons.values()),
            tuple(hook for each in self._with_included() for hook in each._hooks),  # noqa: SLF001  # the same class
            MappingProxyType(self._arounds_by_kind()),
            MappingProxyType(dict(self._limits)),
            checked_schedules(
                {schedule: each.name for each in self._with_included() for schedule in each._schedules},  # noqa: SLF001  # the same class
                self._handlers.values(),
            ),
            MappingProxyType(dict(self._keep_dead)),
            tuple(each.name for each in self._with_included()),
        )


def _of_flavour(handlers: Mapping[str, AnyHandler], flavour: Flavour) -> Mapping[str, AnyHandler]:
    return MappingProxyType({name: handler for name, handler in handlers.items() if handler.flavour == flavour})


def _check_same_queue(first: AnyHandler, other: AnyHandler) -> None:
    """Refuse two handlers that cannot share a queue: a sync and an async one, or ones with different claim modes."""
    if first.flavour != other.flavour:
        raise RegistryError(
            f"queue {other.queue!r} has {first.flavour} handlers ({first.kind}) and {other.flavour} ones "
            f"({other.kind}): put one flavour into a queue of its own, "
            f"such as @jobs.handler(queue={other.queue + '-' + other.flavour!r})"
        )
    if first.claim != other.claim:
        raise RegistryError(
            f"queue {other.queue!r} has handlers with claim={first.claim!r} ({first.kind}) and with "
            f"claim={other.claim!r} ({other.kind}): put one mode into a queue of its own, "
            f"such as @jobs.handler(queue={other.queue + '-' + other.claim!r}, claim={other.claim!r})"
        )


def _where(handler: AnyHandler) -> str:
    return f"{handler.function.__module__}.{handler.function.__qualname__}"


def _instead_of(other: object) -> str:
    """Describe, for an error, a value that was given in place of a registry; of a module, name its registries."""
    if not isinstance(other, ModuleType):
        return f"as `mail = Jobs()`, got {type(other).__name__}"
    named = sorted(name for name, value in vars(other).items() if isinstance(value, Jobs))
    found = " or ".join(f"include({other.__name__}.{name})" for name in named)
    return f"got the module {other.__name__!r}: {found or 'it has none'}"
