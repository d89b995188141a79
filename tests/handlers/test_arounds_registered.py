"""Arounds and hooks in the registry: which handlers and events they are of, and what is refused."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest

from outboxq import AsyncContext, Context, Jobs
from outboxq.errors import RegistryError
from outboxq.events import ChildDied, JobDied, JobDone, RelayStarted


def around(name: str) -> Any:
    def wrap(ctx: Any) -> Any:
        return nullcontext()

    wrap.__qualname__ = name
    return wrap


def names(jobs: Jobs) -> dict[str, list[str]]:
    """The arounds of each kind, the outermost first."""
    return {
        kind: [each.name.rpartition(".")[2] for each in found.all] for kind, found in jobs.resolve().arounds.items()
    }


def with_handler(kind: str, *arounds: str, flavour: str = "sync") -> Jobs:
    """A registry with one handler and these arounds."""
    jobs = Jobs()
    for name in arounds:
        jobs.around(around(name))
    if flavour == "sync":

        @jobs.handler(kind=kind, aliases=[f"old-{kind}"])
        def act(ctx: Context) -> None: ...

    else:

        @jobs.handler(kind=kind, queue="async")
        async def act_async(ctx: AsyncContext) -> None: ...

    return jobs


def test_the_first_around_is_the_outermost_and_they_wrap_aliases_too() -> None:
    """Wherever a handler stands in the module: also one that is defined before the around."""
    jobs = with_handler("one", "first", "second")
    jobs.around(around("third"))
    assert names(jobs) == {"one": ["first", "second", "third"], "old-one": ["first", "second", "third"]}


def test_arounds_of_an_including_registry_are_outside_of_the_included_one_s() -> None:
    """An included registry's wrap its own handlers alone, also if they were registered behind `include`."""
    top, inner, other = with_handler("top", "of top"), with_handler("inner", "of inner"), with_handler("other")
    top.include(inner)
    top.include(other)
    inner.around(around("late"))
    found = names(top)
    assert found["top"] == ["of top"]
    assert found["inner"] == ["of top", "of inner", "late"]
    assert found["other"] == ["of top"]
    assert names(inner)["inner"] == ["of inner", "late"]


def test_arounds_of_a_registry_that_is_included_twice_wrap_once() -> None:
    """By two registries, whose own are both outside of it."""
    top, left, right, shared = with_handler("top"), with_handler("left"), with_handler("right"), with_handler("shared")
    for jobs, name in ((top, "t"), (left, "l"), (right, "r"), (shared, "s")):
        jobs.around(around(name))
    for jobs in (left, right):
        jobs.include(shared)
        top.include(jobs)
    assert names(top)["shared"] == ["t", "l", "r", "s"]
    # Two that include each other are no reason to go round for ever.
    shared.include(left)
    assert sorted(names(top)["shared"]) == ["l", "r", "s", "t"]


def test_an_around_can_be_for_one_flavour() -> None:
    """It does not wrap the others, and so may be async in a registry with sync handlers."""
    jobs = with_handler("plain")
    jobs.include(with_handler("coroutine", flavour="async"))

    @jobs.around(flavour="async")
    async def span(ctx: AsyncContext) -> AsyncIterator[None]:
        yield

    @jobs.around(flavour="sync")
    def timed(ctx: Context) -> Iterator[None]:
        yield

    assert names(jobs)["coroutine"] == ["span"]
    assert names(jobs)["plain"] == ["timed"]


class AsyncOnly:
    def __init__(self, ctx: Any) -> None: ...

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class Called:
    async def __call__(self, ctx: Any) -> None: ...


async def coroutine(ctx: Any, more: int = 0) -> None: ...


async def generator(ctx: Any) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    "function",
    [coroutine, generator, asynccontextmanager(generator), partial(coroutine, more=1), AsyncOnly, Called()],
    ids=["coroutine", "generator", "asynccontextmanager", "partial", "class", "callable"],
)
def test_an_async_around_of_a_sync_handler_is_refused_when_the_relay_starts(function: Any) -> None:
    """The message names both, and the way out."""
    jobs = with_handler("plain")
    jobs.around(function)
    with pytest.raises(RegistryError, match=r"is async, and cannot wrap handler 'plain'.*flavour=\"async\""):
        jobs.resolve()


@contextmanager
def no_context() -> Iterator[None]:
    yield


@pytest.mark.parametrize("function", [None, 5, nullcontext(), no_context()], ids=str.split("none number entered made"))
def test_an_around_that_is_no_function_is_refused(function: Any) -> None:
    """At the decorator; also a context manager that was made already."""
    with pytest.raises(RegistryError, match="takes a function of the handler's context"):
        Jobs().around(flavour="sync")(function)


def test_an_around_without_a_context_or_of_an_unknown_flavour_is_refused() -> None:
    """At the decorator, with what it takes."""
    with pytest.raises(RegistryError, match=r"no_context takes one argument, the handler's context"):
        Jobs().around(no_context)
    with pytest.raises(RegistryError, match="flavour takes 'sync' or 'async', got 'both'"):
        Jobs().around(flavour="both")  # type: ignore[call-overload]


def test_hooks_are_told_what_they_asked_for_included_ones_too() -> None:
    """By `Jobs(hooks=...)` all events, by `on` those of the named classes; once each, however often included."""
    told = list[object]()
    top, inner = Jobs(hooks=[told.append]), with_handler("inner")
    inner.on(JobDied, JobDone)(told.remove)
    top.include(inner)
    top.include(inner)
    hooks = top.resolve().hooks
    assert [hook.function for hook in hooks] == [told.append, told.remove]
    assert [hook.wants(RelayStarted((), 1, 1)) for hook in hooks] == [True, False]


def test_events_that_a_hook_cannot_be_told_are_refused() -> None:
    """None, other things, and those of the process that keeps several relays running; with the reason."""
    jobs = Jobs()
    with pytest.raises(RegistryError, match=r"names no event.*@jobs.on\(JobDied\)"):
        jobs.on()
    for wrong in (lambda event: None, "JobDied", Context, ["unhashable"]):
        with pytest.raises(RegistryError, match=r"jobs.on takes classes of outboxq.events"):
            jobs.on(wrong)  # type: ignore[call-overload]
    with pytest.raises(RegistryError, match="no hook of a registry receives ChildDied"):
        jobs.on(ChildDied)
    for no_function in (5, JobDied):
        with pytest.raises(RegistryError, match="a hook is a function of an event"):
            Jobs(hooks=[no_function])  # type: ignore[list-item]


def no_event() -> None: ...
def two_events(first: JobDone, second: JobDone) -> None: ...
def yields(event: JobDone) -> Iterator[None]:
    yield


async def yields_async(event: JobDone) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("register", [lambda hook: Jobs(hooks=[hook]), Jobs().on(JobDied)], ids=["hooks", "on"])
@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (no_event, f"hook {__name__}.no_event takes one argument, the event: too many positional arguments"),
        (two_events, f"hook {__name__}.two_events takes one argument, the event: missing a required argument"),
        (yields, f"hook {__name__}.yields yields, and its code would never run: a hook is a function of an event"),
        (yields_async, f"hook {__name__}.yields_async yields, and"),
    ],
)
def test_a_hook_that_could_never_be_told_is_refused_before_the_first_event(hook: Any, said: str, register: Any) -> None:
    """Which may be the first dead letter, of which nothing would be told."""
    with pytest.raises(RegistryError) as error:
        register(hook)
    assert str(error.value).startswith(said)


def test_every_callable_that_takes_an_event_is_a_hook() -> None:
    """Bound and builtin ones, partials, those that take anything, and one whose signature cannot be read."""
    hooks = [list[object]().append, max, partial(two_events, JobDone), lambda *events, **more: None]
    assert [hook.function for hook in Jobs(hooks=hooks)._hooks] == hooks
