"""Annotations are resolved when they are first needed, names below `if TYPE_CHECKING:` included."""

import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from outboxq import Context, Jobs
from outboxq.errors import ArgumentError, RegistryError

Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes a module and imports it."""
    names: list[str] = []

    def load(name: str, source: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    monkeypatch.syspath_prepend(tmp_path)
    yield load
    for name in names:
        sys.modules.pop(name, None)


TYPES = """
    import dataclasses

    @dataclasses.dataclass
    class Money:
        cents: int
    """


@pytest.mark.parametrize("annotation", ["Money", "'Money'", "list[Money] | None", "Annotated[Money, 1]"])
@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_a_name_that_is_imported_for_type_checkers_only_is_found(load: Load, annotation: str, future: str) -> None:
    """The module's own imports below `if TYPE_CHECKING:` are made when the signature is first read."""
    load("annotated_types_of_app", TYPES)
    quoted = annotation if future else f'"{annotation}"' if "'" not in annotation else annotation
    app = load(
        "annotated_app",
        f"""
        {future}
        from typing import TYPE_CHECKING, Annotated
        from outboxq import Context, Jobs

        if TYPE_CHECKING:
            from _typeshed import SupportsRead
            from annotated_types_of_app import Money

        jobs = Jobs()

        @jobs.handler()
        def pay(ctx: Context, money: {quoted}) -> None: ...
        """,
    )
    app.jobs.resolve()
    with pytest.raises(ArgumentError):
        app.pay.job(money="not money")
    money = sys.modules["annotated_types_of_app"].Money(5)
    assert "5" in app.pay.job(money=[money] if "list" in annotation else money).args


@pytest.mark.parametrize("test", ["typing.TYPE_CHECKING", "t.TYPE_CHECKING"])
def test_the_flag_is_found_under_its_module_too(load: Load, test: str) -> None:
    """`typing.TYPE_CHECKING` as well as the bare name."""
    load("annotated_types_of_app", TYPES)
    app = load(
        "annotated_app",
        f"""
        import typing
        import typing as t
        from outboxq import Context, Jobs

        if {test}:
            import annotated_types_of_app as types_

        jobs = Jobs()

        @jobs.handler()
        def pay(ctx: Context, money: "types_.Money") -> None: ...
        """,
    )
    app.jobs.resolve()


def test_two_modules_that_import_each_other_for_type_checkers_are_resolved(load: Load) -> None:
    """Nothing is resolved at import time, when the other module is half there."""
    load("annotated_app", "")
    load(
        "annotated_types_of_app",
        f"""
        import annotated_app
        {textwrap.indent(textwrap.dedent(TYPES), "        ")}
        """,
    )
    app = load(
        "annotated_app",
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from outboxq import Context, Jobs
        if TYPE_CHECKING:
            from annotated_types_of_app import Money
        jobs = Jobs()
        @jobs.handler()
        def pay(ctx: Context, money: Money) -> None: ...
        """,
    )
    app.jobs.resolve()


def test_annotations_that_are_not_arguments_never_matter(load: Load) -> None:
    """The context's, the return's and a local name there may be anything."""
    app = load(
        "annotated_app",
        """
        from __future__ import annotations
        from outboxq import Jobs
        jobs = Jobs()
        @jobs.handler()
        def pay(ctx: NotThere, cents: int) -> NeitherThis: ...
        """,
    )
    app.jobs.resolve()
    assert app.pay.job(cents=5).args == '{"cents":5}'


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        ("Missing", "names 'Missing', which cannot be found: import it at the top of the module"),
        ("list[Missing]", "names 'Missing', which cannot be found"),
        ("json.Missing", r"is not a type \(module 'json' has no attribute 'Missing'\)"),
        ("int int", "is not a type"),
    ],
)
def test_an_annotation_that_cannot_be_resolved_names_its_argument(load: Load, annotation: str, says: str) -> None:
    """With the handler's module, and what to do."""
    app = load(
        "annotated_app",
        f"""
        import json
        from outboxq import Context, Jobs
        jobs = Jobs()
        @jobs.handler()
        def pay(ctx: Context, cents: int, money: "{annotation}") -> None: ...
        """,
    )
    for attempt in (app.jobs.resolve, lambda: app.pay.job(1, 2)):
        with pytest.raises(RegistryError, match=rf"the annotation of argument 'money' of annotated_app\.pay {says}"):
            attempt()


def test_a_decorated_handler_is_read_where_it_was_written(load: Load) -> None:
    """functools.wraps from another module: the names are those of the function's own module."""
    load(
        "annotated_decorators",
        """
        import functools
        def logged(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)
            return wrapper
        """,
    )
    app = load(
        "annotated_app",
        """
        from __future__ import annotations
        from decimal import Decimal as Amount
        from annotated_decorators import logged
        from outboxq import Context, Jobs
        jobs = Jobs()
        @jobs.handler()
        @logged
        def pay(ctx: Context, amount: Amount) -> None: ...
        """,
    )
    app.jobs.resolve()
    with pytest.raises(ArgumentError, match="argument 'amount'"):
        app.pay.job("not a decimal")


def test_an_argument_without_an_annotation_takes_any_json() -> None:
    """It comes back as plain JSON types."""
    jobs = Jobs()

    @jobs.handler()
    def pay(ctx, anything): ...

    assert pay.job({"a": [1, None]}).args == '{"anything":{"a":[1,null]}}'
    assert pay.signature().decode('{"anything": {"a": [1, null]}}') == {"anything": {"a": [1, None]}}


@pytest.mark.parametrize(
    ("args", "kwargs", "values"),
    [
        ((1, "b"), {"c": 3}, {"a": 1, "b": "b", "c": 3}),
        ((), {"c": 3, "b": "b", "a": 1}, {"a": 1, "b": "b", "c": 3}),
        ((1,), {"b": "b"}, {"a": 1, "b": "b", "c": 7}),
        ((1,), {}, {"a": 1, "b": "default", "c": 7}),
    ],
)
def test_all_values_are_those_that_the_handler_would_be_called_with(
    args: tuple[object, ...], kwargs: dict[str, object], values: dict[str, object]
) -> None:
    """However the call gives them, and with the defaults of those that it leaves out: keys are made of them."""
    jobs = Jobs()

    @jobs.handler(queue="q")
    def pay(ctx: Context, a: int, b: str = "default", *, c: int = 7) -> None:
        """Nothing."""

    assert dict(pay.signature().all_values(args, kwargs)) == values


def test_all_values_of_a_call_that_gives_an_argument_twice_are_none() -> None:
    """As Python refuses it: one of the two would be dropped."""
    jobs = Jobs()

    @jobs.handler(queue="q")
    def pay(ctx: Context, a: int, b: int) -> None:
        """Nothing."""

    with pytest.raises(TypeError):
        pay.signature().all_values((1, 2), {"a": 3})
