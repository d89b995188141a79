"""A handler's annotations as types, resolved when they are first needed, not when the module is imported.

By then all modules are imported, so that even names that a module imports only below `if TYPE_CHECKING:` can be found.
"""

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

from outboxq.errors import RegistryError


def declared_signature(function: Callable[..., object]) -> inspect.Signature:
    """Return a function's signature, even if its annotations use names that are not defined yet.

    On Python 3.14, such a name becomes a forward reference.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def resolve_annotation(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return the type that `parameter` is annotated with.

    Raises:
        RegistryError: a name in the annotation cannot be found, or the annotation is not a type.
    """
    what = f"the annotation of argument {parameter.name!r} of {function.__module__}.{function.__qualname__}"
    return _resolve(function, parameter.annotation, what)


def resolve_head(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return the type that `parameter` is annotated with, even if some names in the annotation cannot be found.

    A name that cannot be found is replaced by `Any`, so that `Context[State]` can still be recognized as a context. If
    the result is not a type, `object` is returned.
    """
    try:
        return resolve_annotation(function, parameter)
    except RegistryError:
        names: dict[str, object] = {**_globals_of(function), **_type_checking_names_of(function)}
    while True:
        try:
            return _hints(_carrier(parameter.annotation), names)
        except NameError as error:
            if error.name is None or error.name in names:
                return object
            names[error.name] = Any
        except (AttributeError, SyntaxError, TypeError):
            return object


def resolve_return(call: Callable[..., object]) -> object:
    """Return the declared type of a function's result (of an async function's: when awaited); None if not declared.

    Raises:
        RegistryError: a name in the annotation cannot be found, or the annotation is not a type.
    """
    function = call
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return None
    annotation = declared_signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return None
    what = f"what {function.__module__}.{function.__qualname__} is declared to return"
    resolved = _resolve(function, annotation, what)
    if get_origin(resolved) in (Awaitable, Coroutine):
        return get_args(resolved)[-1]
    return resolved


def _resolve(function: Callable[..., object], annotation: object, what: str) -> object:
    globals_, carrier = _globals_of(function), _carrier(annotation)
    try:
        return _hints(carrier, globals_)
    except (NameError, AttributeError, SyntaxError, TypeError):
        type_checking = _type_checking_names_of(function)
    try:
        return _hints(carrier, {**globals_, **type_checking})
    except NameError as error:
        raise RegistryError(
            f"{what} names {error.name!r}, which cannot be found: import it at the top of the module"
        ) from error
    except (AttributeError, SyntaxError, TypeError) as error:
        raise RegistryError(f"{what} is not a type ({error}): mend it") from error


def _carrier(annotation: object) -> type[object]:
    """Return an empty class annotated with `annotation` alone.

    `get_type_hints` can then resolve this annotation, even if others of the function name types that cannot be found.
    """
    return type("carrier", (), {"__annotations__": {"value": annotation}})


def _globals_of(function: Callable[..., object]) -> dict[str, object]:
    found: dict[str, object] = getattr(inspect.unwrap(function), "__globals__", {})
    return found


def _hints(carrier: type[object], globals_: Mapping[str, object]) -> object:
    return get_type_hints(carrier, globalns=dict(globals_), include_extras=True)["value"]


def _type_checking_names_of(function: Callable[..., object]) -> Mapping[str, object]:
    module = sys.modules.get(function.__module__)
    return _type_checking_names(module) if module is not None else {}


@functools.cache
def _type_checking_names(module: ModuleType) -> Mapping[str, object]:
    """Run the imports that a module has below `if TYPE_CHECKING:`, and return the imported objects by name.

    With them, annotations that name such objects can be resolved.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
    except (OSError, TypeError, SyntaxError):
        return {}
    imports = [
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
    ]
    names: dict[str, object] = {"__name__": module.__name__, "__package__": module.__package__}
    for statement in imports:
        # Imported one by one: some modules, such as _typeshed, exist for type checkers only.
        with contextlib.suppress(ImportError):
            # Only the module's own import statements run: the ones that a type checker would follow.
            exec(compile(ast.Module([statement], []), module.__file__ or "<module>", "exec"), names)  # noqa: S102  # imports alone
    return names


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case _:
            return False
