"""The registry: names that cannot collide, queues of one flavour, and handlers that stay plain functions."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxq import AsyncContext, Backoff, Context, Handler, Jobs, RelayConfig, external
from outboxq.errors import ArgumentError, ConfigError, InvalidKey, RegistryError, UnknownKind
from outboxq.inbox import Inbox


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
        Jobs().handler(aliases="old")(credit)


@pytest.mark.parametrize("names", [{"kind": "a\0"}, {"queue": ""}, {"aliases": ("x" * 64,)}, {"queue": "a=1"}], ids=str)
def test_a_name_that_cannot_be_carried_is_refused_at_the_decorator(names: dict[str, str]) -> None:
    """Nothing is registered then."""
    jobs = Jobs()
    with pytest.raises(ArgumentError, match="name"):
        jobs.handler(**names)(credit)  # type: ignore[arg-type]
    assert not jobs._handlers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Jobs().handler(quue="mail"),
            "handler() got an unexpected keyword argument 'quue': did you mean queue=? (it takes aliases, batchable, ",
        ),
        (
            lambda: Jobs().handler(delay=None),
            "handler() got an unexpected keyword argument 'delay': it is one job's: give it where the job is added",
        ),
        (lambda: Jobs().handler(max_attempts=3), "'max_attempts': it is the retry's: retry=Backoff(max_attempts=...)"),
        (lambda: Jobs().batch_handler(object, batchable=True), "batch_handler() got an unexpected keyword argument"),
        (
            lambda: external("ship", queue="depot").options(dealy=None),
            "options() got an unexpected keyword argument 'dealy': did you mean delay=? (it takes coalesce, delay, ",
        ),
        (lambda: external("ship", queue="depot").options(queue="mail"), "'queue': it is the handler's, for all of its"),
        (
            lambda: Backoff(max_retries=3),
            "'max_retries': did you mean max_attempts=? (it takes cap_seconds, factor, first_seconds, jitter, ",
        ),
        (
            lambda: Backoff(max_attempt=3),
            "Backoff() got an unexpected keyword argument 'max_attempt': did you mean max_",
        ),
        (
            lambda: Jobs().limit("mail", runing=1),
            "limit() got an unexpected keyword argument 'runing': did you mean run",
        ),
        (
            lambda: Jobs(life_span=None),
            "Jobs() got an unexpected keyword argument 'life_span': did you mean lifespan=?",
        ),
        (lambda: Jobs().schedule("@daily", timezone="UTC"), "schedule() got an unexpected keyword argument 'timezone'"),
        (lambda: Jobs().scope("mail", retain=None), "scope() got an unexpected keyword argument 'retain'"),
        (
            lambda: Jobs().inbox("mail", kind=()),
            "inbox() got an unexpected keyword argument 'kind': did you mean kinds",
        ),
        (
            lambda: RelayConfig(batchsize=3),
            "RelayConfig() got an unexpected keyword argument 'batchsize': did you mean",
        ),
    ],
)
def test_an_option_that_there_is_not_is_refused_where_it_is_given(call: Callable[[], object], message: str) -> None:
    """As Python refuses it, before a function is decorated, and with those that there are."""
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("registry", "got the module 'tests.support.app': include(tests.support.app."),
        ("other", "got the module 'tests.support.waiting': it has none"),
        ("list", "include takes a registry, as `mail = Jobs()`, got list"),
    ],
)
def test_what_is_included_is_a_registry(given: str, says: str) -> None:
    """A module has one, or several: the message names them."""
    modules = {"registry": "tests.support.app", "other": "tests.support.waiting"}
    with pytest.raises(RegistryError, match=re.escape(says)):
        Jobs().include(importlib.import_module(modules[given]) if given in modules else [])  # type: ignore[arg-type]


def test_an_error_names_the_place_of_its_function_once() -> None:
    """Also if two checks of a function are under way, one within the other."""
    jobs = Jobs()

    @jobs.handler()
    def settle_all(ctx: Context, accounts: list[Account]) -> None: ...

    for resolve in (jobs.resolve, settle_all.signature):
        with pytest.raises(RegistryError) as refused:
            resolve()
        assert str(refused.value).count("defined at") == 1


def test_a_signature_that_cannot_be_stored_is_found_when_the_registry_is_resolved() -> None:
    """Before the relay claims anything; defining the handler needs no types yet."""
    jobs = Jobs()

    @jobs.handler()
    def settle_all(ctx: Context, accounts: list[Account]) -> None: ...

    assert isinstance(settle_all, Handler)
    with pytest.raises(RegistryError, match="handler 'settle_all', argument 'accounts': an entity must be an argument"):
        jobs.resolve()


# 10 + 20 s of pauses, and three attempts of 30 s.
TWO_MINUTES = Backoff(max_attempts=3, first_seconds=10, jitter=0)
HORIZON = timedelta(minutes=2)


def declare_scope(jobs: Jobs, retention: timedelta, kinds: tuple[str, ...] = ()) -> object:
    return jobs.scope("stripe-charge", retention=retention, kinds=kinds)


def declare_inbox(jobs: Jobs, retention: timedelta, kinds: tuple[str, ...] = ()) -> object:
    return jobs.inbox("stripe-charge", retention=retention, kinds=kinds)


both = pytest.mark.parametrize(
    ("declare", "owner"), [(declare_scope, "scope"), (declare_inbox, "consumer")], ids=["scope", "inbox"]
)
Declare = Callable[..., object]


def jobs_with_a_quick_and_a_slow_handler() -> Jobs:
    jobs = Jobs()
    jobs.handler(retry=TWO_MINUTES, timeout_seconds=30, aliases=("old",))(credit)
    jobs.handler(retry=Backoff(max_attempts=1), timeout_seconds=1)(debit)
    return jobs


def test_a_declared_scope_is_its_name_and_an_inbox_an_inbox() -> None:
    """Constants to be imported where they are used."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    assert jobs.scope("stripe-charge", retention=timedelta(days=90)) == "stripe-charge"
    assert jobs.inbox("payments", retention=timedelta(days=7)) == Inbox("payments", timedelta(days=7))
    assert jobs.inbox("orders").retention == Inbox("orders").retention
    registry = jobs.resolve()
    assert registry.effect_retention("stripe-charge") == timedelta(days=90)
    assert registry.effect_retention("payments") == timedelta(days=30), "a consumer's window is no scope's"


@both
def test_a_window_that_a_retry_outlives_is_refused(declare: Declare, owner: str) -> None:
    """The message names the window, the handler, how long that may retry, and both ways out."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    declare(jobs, HORIZON - timedelta(seconds=1))
    with pytest.raises(RegistryError) as refused:
        jobs.resolve()
    said = str(refused.value)
    assert f"{owner} 'stripe-charge' is remembered for 1 minute 59 seconds, and handler 'credit' may still run" in said
    assert "2 minutes after its first attempt began" in said
    assert "('stripe-charge', retention=...)" in said
    assert "Backoff(max_attempts=..., cap_seconds=...) or timeout_seconds" in said
    assert "kinds=(...)" in said


@both
def test_a_window_as_long_as_the_longest_retries_is_enough(declare: Declare, owner: str) -> None:
    """And not a second longer needs it to be."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    declare(jobs, HORIZON)
    jobs.resolve()


@both
def test_only_the_handlers_that_use_it_count(declare: Declare, owner: str) -> None:
    """`kinds` names them, by their kind or by an alias."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    declare(jobs, timedelta(seconds=1), ("debit",))
    jobs.resolve()
    for kinds in (("old",), ("debit", "credit")):
        jobs = jobs_with_a_quick_and_a_slow_handler()
        declare(jobs, timedelta(seconds=1), kinds)
        with pytest.raises(RegistryError, match=r"is remembered for 1 second, and handler '(old|credit)'") as refused:
            jobs.resolve()
        assert "kinds=(...)" not in str(refused.value), "it says already who uses it"


@both
def test_a_window_for_a_kind_that_nobody_has_is_refused(declare: Declare, owner: str) -> None:
    """A misspelt kind would take its handler out of the check."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    declare(jobs, timedelta(days=1), ("credit", "credti"))
    with pytest.raises(RegistryError, match=rf"{owner} 'stripe-charge' .* the kind 'credti', .* \(known: credit, old"):
        jobs.resolve()


@both
def test_a_window_is_declared_once(declare: Declare, owner: str) -> None:
    """The same again is fine; another window, or other kinds, would depend on which module is imported first."""
    jobs = Jobs()
    first = declare(jobs, timedelta(days=90), ("credit", "debit"))
    assert declare(jobs, timedelta(days=90), ("debit", "credit")) == first
    with pytest.raises(
        RegistryError, match=f"{owner} 'stripe-charge' is declared twice: 90 days for credit, debit, and"
    ):
        declare(jobs, timedelta(days=30), ("credit", "debit"))
    with pytest.raises(RegistryError, match="is declared twice"):
        declare(jobs, timedelta(days=90))


def test_a_scope_and_a_consumer_may_have_one_name() -> None:
    """They are two tables."""
    jobs = Jobs()
    jobs.scope("payments", retention=timedelta(days=90))
    assert jobs.inbox("payments", retention=timedelta(days=7)) == Inbox("payments", timedelta(days=7))


@both
def test_an_included_registry_brings_its_windows(declare: Declare, owner: str) -> None:
    """They are held against the handlers of the registry on top, and clash as its own do."""
    jobs, other = jobs_with_a_quick_and_a_slow_handler(), Jobs()
    declare(other, timedelta(seconds=1))
    jobs.include(other)
    jobs.include(other)
    with pytest.raises(RegistryError, match=f"{owner} 'stripe-charge' is remembered for 1 second"):
        jobs.resolve()
    clashing = Jobs()
    declare(clashing, timedelta(days=1))
    with pytest.raises(RegistryError, match="is declared twice"):
        clashing.include(other)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": ""}, InvalidKey),
        ({"name": "a\0"}, InvalidKey),
        ({"retention": timedelta(0)}, ConfigError),
        ({"retention": timedelta(days=4000)}, ConfigError),
        ({"retention": 90}, ConfigError),
        ({"kinds": "credit"}, RegistryError),
        ({"kinds": (debit,)}, ArgumentError),
    ],
    ids=("no name", "a NUL", "no time", "too long", "no timedelta", "a text of kinds", "a handler as kind"),
)
def test_a_declaration_that_cannot_be_is_refused(arguments: dict[str, object], error: type[Exception]) -> None:
    """At the line that makes it, for scopes and inboxes alike; nothing is declared then."""
    jobs = Jobs()
    given = {"name": "n", "retention": timedelta(days=1), **arguments}
    with pytest.raises(error):
        jobs.scope(**given)  # type: ignore[arg-type]
    given["consumer"] = given.pop("name")
    with pytest.raises(error):
        jobs.inbox(**given)  # type: ignore[arg-type]
    assert not jobs._windows


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (TWO_MINUTES, timedelta(days=30)),
        (Backoff(max_attempts=31, first_seconds=86_400, factor=1, cap_seconds=1e9), timedelta(days=31, minutes=15.5)),
        (Backoff(max_attempts=32_767, first_seconds=1e9, cap_seconds=1e9), timedelta(days=36_500)),
    ],
    ids=["short", "long", "silly"],
)
def test_a_scope_that_nobody_declared_is_never_too_short(retry: Backoff, expected: timedelta) -> None:
    """30 days, or a day more than any handler may retry, up to what a timestamp can hold."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    jobs.handler(kind="patient", retry=retry, timeout_seconds=30)(credit)
    registry = jobs.resolve()
    assert registry.effect_retention("undeclared") == expected
    assert registry.find("patient").retry_horizon() <= expected


def test_a_scope_is_for_the_kinds_that_it_names() -> None:
    """By any name of the handler; a scope that names nobody, or that nobody declared, is for all."""
    jobs = jobs_with_a_quick_and_a_slow_handler()
    declare_scope(jobs, HORIZON, ("old",))
    jobs.scope("for-all", retention=timedelta(days=1))
    registry = jobs.resolve()
    allowed = {
        scope: [kind for kind in ("credit", "old", "debit") if registry.may_call(scope, kind)]
        for scope in ("stripe-charge", "for-all", "undeclared")
    }
    assert allowed == {
        "stripe-charge": ["credit", "old"],
        "for-all": ["credit", "old", "debit"],
        "undeclared": ["credit", "old", "debit"],
    }
    with pytest.raises(UnknownKind):
        registry.may_call("stripe-charge", "credti")


def test_a_jobs_own_attempts_lengthen_its_horizon() -> None:
    """Beyond its handler's, which the check at the start has looked at."""
    registry = jobs_with_a_quick_and_a_slow_handler().resolve()
    assert registry.find("credit").retry_horizon() == registry.find("old").retry_horizon(3) == HORIZON
    assert registry.find("credit").retry_horizon(4) == HORIZON + timedelta(seconds=40 + 30)
    with pytest.raises(UnknownKind):
        registry.find("credti")
