"""What becomes a handler: a function that receives its context first, with arguments that can be stored."""

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional, Protocol, TypeVar

import pytest

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchContext,
    BatchHandler,
    BatchItem,
    Context,
    Handler,
    Jobs,
    OutboxSession,
)
from outboxq.errors import ArgumentError, RegistryError

if TYPE_CHECKING:
    from outboxq import Context as OnlyForCheckers


@dataclass
class Credit:
    account_id: int


@dataclass
class Measured:
    sample: complex


@dataclass
class Loose:
    cents: int
    spare: complex | None = None


Bound = TypeVar("Bound", bound="OnlyForCheckers[str]")


class LazyAlias:
    """As the statement `type` makes one, of a name that is imported for type checkers alone."""

    @property
    def __value__(self) -> object:
        raise NameError("OnlyForCheckers")


class HasSession(Protocol):
    @property
    def session(self) -> OutboxSession: ...


class Special(Context[str]):
    pass


def place(function: Callable[..., object]) -> str:
    return f"; defined at {__file__}:{function.__code__.co_firstlineno}"


def refused(function: Any, register: Callable[[Jobs], Any] = Jobs.handler) -> str:
    """What is said of a function when it is registered, or else when the registry is resolved."""
    jobs = Jobs()

    def load() -> None:
        register(jobs)(function)
        jobs.resolve()

    with pytest.raises(RegistryError) as error:
        load()
    assert str(error.value).endswith(place(function))
    return str(error.value).removesuffix(place(function))


def batched(jobs: Jobs) -> Any:
    return jobs.batch_handler(Credit)


def number_first(a: int) -> None: ...
def number_lazily(a: "int", b: str = "x") -> None: ...
def unannotated(a, cents: int) -> None: ...
def anything(payload: Any) -> None: ...
def no_type(cents: [1, 2]) -> None: ...
def sync_in_async_clothes(ctx: AsyncContext, cents: int) -> None: ...
def lazily_wrong(ctx: "AsyncContext[int]") -> None: ...
async def async_in_sync_clothes(ctx: Context, cents: int) -> None: ...
def of_a_batch(ctx: BatchContext) -> None: ...


WRONG = {
    number_first: "is annotated `a: int`, and what it receives first is a Context: define it as "
    "`def number_first(ctx: Context, a: int)`",
    number_lazily: "receives first is a Context: "
    "define it as `def number_lazily(ctx: Context, a: 'int', b: str = 'x')`",
    unannotated: "does not say what 'a' is, and receives a Context there: write `a: Context` if it is that, else "
    "`def unannotated(ctx: Context, a, cents: int)`",
    anything: "does not say what 'payload' is",
    no_type: "is annotated `cents: [1, 2]`, and what it receives first is a Context",
    sync_in_async_clothes: "is a plain `def`, which receives a Context first, and is annotated "
    "`ctx: AsyncContext`: define it as `def sync_in_async_clothes(ctx: Context, cents: int)`, or "
    "make it an `async def`",
    lazily_wrong: "define it as `def lazily_wrong(ctx: Context)`, or make it an `async def`",
    async_in_sync_clothes: "is an `async def`, which receives an AsyncContext first, and is annotated "
    "`ctx: Context`: define it as `async def async_in_sync_clothes(ctx: AsyncContext, cents: int)`, "
    "or make it a plain `def`",
    of_a_batch: "define it as `def of_a_batch(ctx: Context)`",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_first_parameter_that_is_not_the_context_is_refused(function: Callable[..., None]) -> None:
    """Else the context would be passed for an argument, and the job would count as done."""
    assert WRONG[function] in refused(function)


def credit_one(ctx: Context, items: Sequence[BatchItem[Credit]]) -> None: ...
def credit_in_async_clothes(ctx: AsyncBatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...
async def credit_in_sync_clothes(ctx: "BatchContext", items: Sequence[BatchItem[Credit]]) -> None: ...
def credit_items(items: Sequence[BatchItem[Credit]], ctx: BatchContext) -> None: ...
def credit_nothing(ctx: BatchContext) -> None: ...


WRONG_BATCHES = {
    credit_one: "def credit_one(ctx: BatchContext, items: Sequence[BatchItem[Credit]])",
    credit_in_async_clothes: "def credit_in_async_clothes(ctx: BatchContext, items: Sequence[BatchItem[Credit]])`, or "
    "make it an `async def`",
    credit_in_sync_clothes: "async def credit_in_sync_clothes(ctx: AsyncBatchContext, items: Sequence[",
    credit_items: "def credit_items(ctx: BatchContext, items: Sequence[BatchItem[Credit]])",
    credit_nothing: "takes no items: define it as `def credit_nothing(ctx: BatchContext, items: Sequence[",
}


@pytest.mark.parametrize("function", WRONG_BATCHES, ids=lambda function: function.__name__)
def test_a_batch_handler_receives_its_own_context(function: Callable[..., None]) -> None:
    """The message shows its definition, with the class of its arguments."""
    assert WRONG_BATCHES[function] in refused(function, batched)


def lazily_known(ctx: "OnlyForCheckers[str]", cents: int) -> None: ...
def generic(ctx: Context[int]) -> None: ...
def special(ctx: Special) -> None: ...
def structural(ctx: HasSession) -> None: ...
def either(ctx: Context | AsyncContext) -> None: ...
def untyped(ctx, cents) -> None: ...
def unused(_ctx: Any) -> None: ...
def underscore(_) -> None: ...
def spelled_out(context) -> None: ...
def half_known(job: "Context[Nowhere]") -> None: ...  # noqa: F821
def unknown(ctx: "Nowhere") -> None: ...  # noqa: F821
async def asynchronous(job: "AsyncContext") -> None: ...
def known_but_for_its_state(job: Context["Nowhere"]) -> None: ...  # noqa: F821
def optional(job: "Context[Nowhere] | None") -> None: ...  # noqa: F821
def annotated(job: "Annotated[Context['Nowhere'], 1]") -> None: ...  # noqa: F821
def quoted_inside(job: Optional["OnlyForCheckers[str]"]) -> None: ...
def bound(ctx: Bound) -> None: ...
def lazy_alias(ctx: LazyAlias()) -> None: ...  # type: ignore[valid-type]


RIGHT = [
    lazily_known, generic, special, structural, either, untyped, unused, underscore, spelled_out, half_known, unknown,
    asynchronous, known_but_for_its_state, optional, annotated, quoted_inside, bound, lazy_alias,
]  # fmt: skip


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_every_way_to_say_that_it_is_the_context_is_taken(function: Callable[..., None]) -> None:
    """By its class, a base, a Protocol, a subclass, an alias that is imported for type checkers, or its name."""
    jobs = Jobs()
    jobs.handler()(function)
    assert jobs.resolve().find(function.__name__)


class Shop:
    def credit(self, ctx: Context, cents: int) -> None: ...

    @staticmethod
    def debit(ctx: Context, cents: int) -> None: ...


def test_a_method_is_refused_and_a_static_one_is_not() -> None:
    """There is no object to call it on."""
    said = refused(Shop.credit)
    assert "handler Shop.credit is a method, and a job has no 'self' to call it on" in said
    with pytest.raises(
        RegistryError, match=r"got <bound method .*define one with `def`, which finds the object"
    ) as bound:
        Jobs().handler()(Shop().credit)  # type: ignore[call-overload]
    assert str(bound.value).endswith(place(Shop.credit))
    assert Jobs().handler()(Shop.debit).kind == "debit"


def test_a_lambda_is_refused_unless_it_is_given_a_name() -> None:
    """It has none to store jobs under; what it takes first is checked as a function's is."""
    nameless = lambda ctx: None  # noqa: E731
    assert "got a lambda, which has no name to store jobs under: define a function with `def`" in refused(nameless)
    assert Jobs().handler(kind="named")(nameless).kind == "named"
    assert "does not say what 'cents' is" in refused(lambda cents: None, lambda jobs: jobs.handler(kind="named"))


def test_what_only_calls_a_function_is_refused_with_the_way_out() -> None:
    """The place is that of the function behind it, if there is one."""
    with pytest.raises(RegistryError, match="which passes on what the partial has bound, and register that") as partial:
        Jobs().handler()(functools.partial(generic, cents=5))  # type: ignore[arg-type]
    assert str(partial.value).endswith(place(generic))
    with pytest.raises(RegistryError, match=r"which calls it, and register that$"):
        Jobs().handler()(len)  # type: ignore[arg-type]


def stores_complex(ctx: Context, x: set[complex]) -> None: ...
def stores_path(ctx: Context, paths: "dict[str, list[pathlib.Path]]") -> None: ...
def stores_measured(ctx: Context, measured: Measured) -> None: ...
def stores_either(ctx: Context, x: complex | None) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameter", "named"),
    [
        (stores_complex, "x", "complex"),
        (stores_path, "paths", "pathlib.Path"),
        (stores_measured, "measured", "complex"),
        (stores_either, "x", "complex"),
    ],
)
def test_an_argument_that_json_cannot_hold_is_refused_before_the_first_job(
    function: Callable[..., None], parameter: str, named: str
) -> None:
    """When the registry is resolved: handler, parameter, type and place."""
    said = refused(function)
    assert f"handler {function.__name__!r}, argument {parameter!r}: JSON cannot hold {named}: store what it is" in said


def test_a_field_that_may_be_left_empty_does_not_matter() -> None:
    """A class of the application's is its own affair, as long as it can be stored at all."""
    jobs = Jobs()

    @jobs.handler
    def keep(ctx: Context, loose: Loose, tree: dict[str, Any]) -> None: ...

    jobs.resolve()
    assert keep.job(Loose(5), {}).args == '{"loose":{"cents":5,"spare":null},"tree":{}}'


def test_an_argument_that_may_be_left_out_does_not_matter() -> None:
    """A clock or a client that only tests pass is the handler's own affair; enqueueing one is refused."""
    jobs = Jobs()

    @jobs.handler
    def send(ctx: Context, to: str, clock: Callable[[], float] = time.time) -> None: ...

    jobs.resolve()
    assert send.job("me").args == '{"to":"me"}'
    with pytest.raises(ArgumentError, match="handler 'send', argument 'clock' cannot be stored as JSON"):
        send.job("me", time.time)


def test_brackets_without_options_may_be_left_out() -> None:
    """`@jobs.handler` and `@jobs.handler()` are the same."""
    jobs = Jobs()

    @jobs.handler
    def credit(ctx: Context, cents: int) -> None: ...

    @jobs.handler
    async def mail(ctx: AsyncContext) -> None: ...

    assert isinstance(credit, Handler)
    assert (credit.kind, credit.queue, credit.retry) == ("credit", "default", Backoff())
    assert mail.flavour == "async"
    with pytest.raises(
        RegistryError, match="a handler is a function whose first argument is its context, got 'credit'"
    ):
        jobs.handler("credit")  # type: ignore[call-overload]


def test_a_batch_handler_without_its_class_is_told_what_it_takes() -> None:
    """The brackets hold the class of one job's arguments."""

    def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...

    with pytest.raises(
        RegistryError, match=r"names the class of its arguments, .*: @jobs\.batch_handler\(Credit\), got"
    ):
        Jobs().batch_handler(credit_all)
    assert isinstance(Jobs().batch_handler(Credit)(credit_all), BatchHandler)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("retry", 5, "retry takes a Backoff: Backoff(max_attempts=5)"),
        ("retry", 0, "retry takes a Backoff: Backoff(max_attempts=5)"),
        ("retry", 3, "retry takes a Backoff: Backoff(max_attempts=3)"),
        ("queue", 5, 'queue takes a name, such as queue="mail", got 5'),
        ("kind", 5, 'kind takes a name, such as kind="generic", got 5'),
        ("aliases", "old", "aliases takes a tuple or a list of names, got the text 'old': aliases=('old',)"),
        ("aliases", 5, 'aliases takes a tuple or a list of names, such as aliases=("old",), got 5'),
        ("claim", "leese", "claim takes 'transaction' or 'lease', got 'leese'"),
        ("timeout_seconds", "30", "timeout_seconds takes 0.001 to 604,800, or None for no deadline, got '30'"),
        ("batchable", "yes", "batchable takes True or False, got 'yes'"),
        ("messages", "", "messages takes 'redacted' or 'withheld' or 'whole', got ''"),
    ],
)
def test_an_option_of_the_wrong_type_is_told_what_it_takes(option: str, value: object, said: str) -> None:
    """With the handler's name, and where it is defined."""
    jobs = Jobs()
    with pytest.raises(RegistryError) as error:
        jobs.handler(**{option: value})(generic)  # type: ignore[call-overload]
    assert str(error.value) == f"handler 'generic': {said}{place(generic)}"
    assert not jobs._handlers


def test_a_name_that_cannot_be_carried_names_its_handler() -> None:
    """As every other option that is refused does."""
    with pytest.raises(ArgumentError, match="handler 'generic': the queue name 'a=1' may not hold") as error:
        Jobs().handler(queue="a=1")(generic)
    assert str(error.value).endswith(place(generic))


def test_an_argument_that_does_not_fit_names_the_handler() -> None:
    """At the line that enqueues it."""
    credit = Jobs().handler()(lazily_known)
    with pytest.raises(ArgumentError, match=r"^handler 'lazily_known', argument 'cents': Expected `int`, got `str`$"):
        credit.job(cents="5")  # type: ignore[arg-type]
