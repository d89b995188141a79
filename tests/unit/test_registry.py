"""The registry: names that cannot collide, queues of one flavour, and handlers that stay plain functions."""

import functools
import inspect
from collections.abc import Iterator

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxq import AsyncContext, Backoff, Context, Handler, Jobs
from outboxq.errors import ArgumentError, RegistryError, UnknownKind


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


def credit(ctx: Context, cents: int = 0) -> None:
    """Credit some cents."""


def debit(ctx: Context, cents: int) -> None: ...


async def mail(ctx: AsyncContext, cents: int) -> None: ...


def test_a_handler_is_named_after_its_function() -> None:
    """Kind and queue have defaults."""
    handler = Jobs().handler()(credit)
    assert (handler.kind, handler.queue, handler.aliases, handler.retry) == ("credit", "default", (), Backoff())


def test_a_handler_stays_callable_as_the_plain_function() -> None:
    """With its name, its text and its signature, for unit tests and other handlers."""
    calls: list[tuple[object, int]] = []

    def record(ctx: Context, cents: int) -> None:
        """Record it."""
        calls.append((ctx, cents))

    handler = Jobs().handler()(record)
    handler(None, 5)  # type: ignore[arg-type]
    handler(None, cents=6)  # type: ignore[arg-type]
    assert calls == [(None, 5), (None, 6)]
    assert (handler.__name__, handler.__doc__, handler.__wrapped__) == ("record", "Record it.", record)  # type: ignore[attr-defined]
    assert inspect.signature(handler) == inspect.signature(record)


def test_another_decorators_attributes_are_not_taken_for_ours() -> None:
    """A retrying decorator leaves a `retry` on its function; the handler's own policy counts."""

    def work(ctx: Context) -> None: ...

    for name in ("retry", "kind", "queue", "aliases", "function", "flavour"):
        setattr(work, name, "theirs")
    handler = Jobs().handler(queue="ours", retry=Backoff(max_attempts=3))(work)
    assert (handler.kind, handler.queue, handler.aliases) == ("work", "ours", ())
    assert (handler.retry.max_attempts, handler.flavour, handler.function) == (3, "sync", work)


def test_jobs_of_an_earlier_name_still_find_their_handler() -> None:
    """kind= and aliases= keep stored names valid when a function is renamed."""
    jobs = Jobs()
    handler = jobs.handler(kind="money.credit", aliases=("credit", "old"))(credit)
    registry = jobs.resolve()
    assert [registry.find(name) for name in ("money.credit", "credit", "old")] == [handler] * 3
    assert registry.known_kinds("sync") == ("money.credit", "credit", "old")
    assert registry.known_kinds("async") == ()


def test_an_unknown_kind_lists_those_that_are_known() -> None:
    """A misspelt kind shows in the message."""
    jobs = Jobs()
    jobs.handler(aliases=("old",))(credit)
    with pytest.raises(UnknownKind, match=r"no handler for kind 'credti' \(known: credit, old\)"):
        jobs.resolve().find("credti")


@pytest.mark.parametrize(
    ("kind", "aliases", "taken"),
    [("credit", (), "credit"), ("other", ("credit",), "credit"), ("old", (), "old"), ("other", ("x", "old"), "old")],
)
def test_a_name_belongs_to_one_handler(kind: str, aliases: tuple[str, ...], taken: str) -> None:
    """Kind against kind, alias against kind, kind against alias, alias against alias; nothing is half registered."""
    jobs = Jobs()
    first = jobs.handler(aliases=("old",))(credit)
    with pytest.raises(
        RegistryError, match=rf"kind '{taken}' is registered twice: by .*\.credit and by .*\.debit\. Give one"
    ):
        jobs.handler(kind=kind, aliases=aliases)(debit)
    assert jobs.resolve().handlers == {"credit": first, "old": first}


def test_an_included_registry_brings_all_its_names() -> None:
    """Aliases too; a clash is an error."""
    jobs, other = Jobs(), Jobs()
    handler = other.handler(kind="money.credit", aliases=("credit",))(credit)
    jobs.include(other)
    assert jobs.resolve().handlers == {"money.credit": handler, "credit": handler}
    clashing = Jobs()
    clashing.handler()(credit)
    with pytest.raises(RegistryError, match="registered twice"):
        jobs.include(clashing)


def test_a_registry_that_is_included_by_two_others_is_registered_once() -> None:
    """The same handler twice is no clash."""
    shared, left, right, top = Jobs(), Jobs(), Jobs(), Jobs()
    handler = shared.handler()(credit)
    left.include(shared)
    right.include(shared)
    top.include(left)
    top.include(right)
    top.include(top)
    assert top.resolve().handlers == {"credit": handler}


def test_a_registry_with_a_lifespan_is_not_included() -> None:
    """Its lifespan would never be entered."""

    def lifespan() -> Iterator[object]:
        yield None

    with pytest.raises(RegistryError, match="an included registry has a lifespan, which would not run"):
        Jobs().include(Jobs(lifespan=lifespan))


def test_a_queue_holds_one_flavour() -> None:
    """The message names both handlers and contains the line that mends it."""
    jobs = Jobs()
    jobs.handler(queue="money")(credit)
    jobs.handler(queue="money")(mail)
    with pytest.raises(
        RegistryError,
        match=r"queue 'money' has sync handlers \(credit\) and async ones \(mail\): .*"
        r"@jobs\.handler\(queue='money-async'\)",
    ):
        jobs.resolve()


def test_two_queues_may_differ_in_flavour() -> None:
    """One relay serves both."""
    jobs = Jobs()
    jobs.handler(queue="money")(credit)
    jobs.handler(queue="mail")(mail)
    assert jobs.resolve().flavours == {"money": "sync", "mail": "async"}


def test_an_empty_registry_is_refused() -> None:
    """Mostly the module with the handlers was never imported."""
    with pytest.raises(RegistryError, match="no handlers: is the module that defines them imported"):
        Jobs().resolve()


def _no_context() -> None: ...


def _keyword_context(*, ctx: Context) -> None: ...


def _star_context(*args: Context) -> None: ...


@pytest.mark.parametrize("function", [_no_context, _keyword_context, _star_context])
def test_a_function_without_a_context_is_refused(function: object) -> None:
    """Its first argument is the context."""
    with pytest.raises(
        RegistryError, match=rf"handler {function.__name__} takes no context: its first argument is `ctx"
    ):  # type: ignore[attr-defined]
        Jobs().handler()(function)  # type: ignore[arg-type]


def _yields(ctx: Context) -> Iterator[int]:
    yield 1


async def _yields_too(ctx: AsyncContext):
    yield 1


@pytest.mark.parametrize("function", [_yields, _yields_too])
def test_a_generator_is_refused(function: object) -> None:
    """Calling it would run nothing, and the job would count as done."""
    with pytest.raises(RegistryError, match="yields: a handler returns when its work is done"):
        Jobs().handler()(function)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "thing",
    [functools.partial(credit, cents=5), "credit", len, object(), None, Jobs],
    ids=lambda thing: type(thing).__name__,
)
def test_only_a_function_becomes_a_handler(thing: object) -> None:
    """A partial or a class has no name or no signature to store arguments by."""
    with pytest.raises(RegistryError, match="a handler is a function whose first argument is its context, got"):
        Jobs().handler()(thing)  # type: ignore[arg-type]


def test_aliases_are_a_collection_and_no_text() -> None:
    """`aliases="old"` would be three names of one letter."""
    with pytest.raises(RegistryError, match="aliases takes a tuple or a list of names, got the text 'old'"):
        Jobs().handler(aliases="old")


@pytest.mark.parametrize("names", [{"kind": "a\0"}, {"queue": ""}, {"aliases": ("x" * 64,)}, {"queue": "a=1"}], ids=str)
def test_a_name_that_cannot_be_carried_is_refused_at_the_decorator(names: dict[str, str]) -> None:
    """Nothing is registered then."""
    jobs = Jobs()
    with pytest.raises(ArgumentError, match="name"):
        jobs.handler(**names)(credit)  # type: ignore[arg-type]
    assert not jobs._handlers


def test_a_signature_that_cannot_be_stored_is_found_when_the_registry_is_resolved() -> None:
    """Before the relay claims anything; defining the handler needs no types yet."""
    jobs = Jobs()

    @jobs.handler()
    def settle_all(ctx: Context, accounts: list[Account]) -> None: ...

    assert isinstance(settle_all, Handler)
    with pytest.raises(RegistryError, match="handler 'settle_all', argument 'accounts': an entity must be an argument"):
        jobs.resolve()
