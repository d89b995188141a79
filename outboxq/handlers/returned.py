"""Translates the values that handlers return into outcomes, such as `Done` or `Retry`.

None, or any other value, means done; if the kind keeps results, the value is encoded. A value is an error only if it
shows that the handler's work was not done, or if it cannot be kept as a result. The error is permanent, since the next
attempt would return the same.
"""

import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, Union, get_args, get_origin

import msgspec

from outboxq.codec.sameness import change_of_result, refusal_of
from outboxq.codec.signature import resolve_return
from outboxq.codec.values import MAX_ARGS_BYTES, encode_value, json_decoder
from outboxq.errors import ArgumentError, HandlerError, NothingDone, ResultNotKept
from outboxq.names import with_article
from outboxq.outcomes import DeadLetter, Discard, Done, Outcome, Retry, Snooze

logger = logging.getLogger("outboxq.relay")

_DONE = Done()
_OUTCOMES = (Done, Retry, Snooze, DeadLetter, Discard)
# The largest size of a result as JSON, in bytes: the same as for arguments.
MAX_RESULT_BYTES = MAX_ARGS_BYTES


@dataclass(frozen=True, slots=True)
class DoneWithResult(Done):
    """Done, with the handler's return value as JSON text."""

    result: str


class Returned:
    """Reads outcomes from the return values of one kind's handler.

    A value that is no outcome is dropped if results are not kept; that is logged once.

    Args:
        function: The function of a handler whose results are kept; its annotation declares their type.
    """

    def __init__(self, kind: str, function: Callable[..., object] | None = None) -> None:
        self._kind = kind
        self._function = function
        # The first thread that logs it takes this lock and keeps it.
        self._said = threading.Lock()

    def outcome(self, returned: object) -> Outcome:
        """Return the outcome of the job whose handler returned this value.

        Raises:
            NothingDone: a coroutine or the like that was never run, or the class of an outcome.
            ResultNotKept: the value is to be kept, but JSON cannot store it, or changes it, or it is too large.
        """
        if returned is None or type(returned) is Done:
            return _DONE if self._function is None else DoneWithResult("null")
        if isinstance(returned, _OUTCOMES):
            return returned
        _refuse_undone(returned)
        if self._function is not None:
            return DoneWithResult(self._encoded(returned))
        self._drop(returned)
        return _DONE

    def outcomes(self, returned: object, count: int) -> list[Outcome]:
        """Return the outcomes of `count` jobs whose batch handler returned this value.

        That is one outcome for each if the value is a list of outcomes, and otherwise `Done` for all.

        Raises:
            NothingDone: one is a coroutine or the like that was never run, or the class of an outcome.
            HandlerError: the numbers of outcomes and jobs differ, or a single outcome other than `Done` was returned.
        """
        if isinstance(returned, Retry | Snooze | DeadLetter | Discard):
            raise HandlerError(
                f"the batch handler returned one {type(returned).__name__}: return a list with the outcome of each "
                "job, in their order, or raise"
            )
        if not _is_list(returned):
            return [self.outcome(returned)] * count
        if len(returned) == count:
            return [self.outcome(each) for each in returned]
        if returned and not any(each is None or isinstance(each, _OUTCOMES) or _is_undone(each) for each in returned):
            self._drop(returned)
            return [_DONE] * count
        raise HandlerError(
            f"the batch handler returned {len(returned)} outcomes for {count} jobs: return one for each, in their order"
        )

    @functools.cached_property
    def declared(self) -> msgspec.json.Decoder[object]:
        """The JSON decoder of the handler's declared return type, without outcomes.

        A result is read back with it, to refuse one that JSON would change.

        Raises:
            RegistryError: a name in its annotation cannot be found.
        """
        stated = None if self._function is None else resolve_return(self._function)
        if get_origin(stated) in (Union, types.UnionType):
            values = tuple(each for each in get_args(stated) if not (isinstance(each, type) and _is_outcome(each)))
            stated = Union[values] if values else None  # noqa: UP007  # at run time
        try:
            return json_decoder(Any if stated is None or stated is object else stated)
        except TypeError:
            # JSON cannot distinguish two dataclasses, so a value is compared as an object of its own class.
            return json_decoder(Any)

    def _encoded(self, value: object) -> str:
        try:
            encoded = encode_value("result", value)
            # A value with its own JSON (`msgspec.Raw`) may contain invalid JSON.
            msgspec.json.decode(encoded)
        except ArgumentError as error:
            raise ResultNotKept(self._kind, str(error).removeprefix("argument 'result' ")) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ResultNotKept(self._kind, f"cannot be read from its JSON: {error}") from None
        change = change_of_result(value, encoded, self.declared)
        if change is not None:
            raise ResultNotKept(self._kind, refusal_of(change))
        if len(encoded) > MAX_RESULT_BYTES:
            raise ResultNotKept(self._kind, f"is {len(encoded):,} bytes as JSON, over the cap of {MAX_RESULT_BYTES:,}")
        return encoded.decode()

    def _drop(self, value: object) -> None:
        if self._said.acquire(blocking=False):
            logger.warning(
                "the value that a handler returned is dropped: kind=%s type=%s",
                self._kind,
                type(value).__name__,
                extra={"outboxq_kind": self._kind, "outboxq_type": type(value).__name__},
            )


def _is_list(returned: object) -> TypeGuard[Sequence[object]]:
    return isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray | memoryview)


def _is_outcome(kind: type[object]) -> bool:
    return issubclass(kind, _OUTCOMES)


def _is_undone(returned: object) -> bool:
    # This includes generators and futures: their work has not run, or runs on without its job.
    return (
        inspect.isawaitable(returned)
        or inspect.isgenerator(returned)
        or inspect.isasyncgen(returned)
        or (isinstance(returned, type) and _is_outcome(returned))
    )


def _refuse_undone(returned: object) -> None:
    if not _is_undone(returned):
        return
    if isinstance(returned, type):
        name = returned.__name__
        raise NothingDone(f"the handler returned the class {name}, which is no outcome: return {name}(...)")
    if inspect.iscoroutine(returned):
        # It is closed, else Python warns.
        returned.close()
    raise NothingDone(
        f"the handler returned {with_article(type(returned).__name__)} that was not run to its end: `await` it in an "
        "async handler, or run it before returning"
    )
