"""Protection against forks in users' code: the child runs the rest of that code, and none of outboxq's own.

A forked child has copies of its parent's connections, whose sockets both share; of locks, whose owners are threads that
the child lacks; and of an event loop with the parent's tasks. So the child's connections are cut off when it begins.
When it returns from the users' code in which it was forked, it ends as by `os._exit`; otherwise the interpreter's exit
handlers would run twice.
"""

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")


class Forgetting(Protocol):
    """An object with state that a forked child must not take over from its parent, for `forget_in_children`."""

    def forget(self) -> None:
        """Return to the initial state."""
        ...


class _HasFile(Protocol):
    def fileno(self) -> int: ...


_forgetting = weakref.WeakSet[Forgetting]()
_files = weakref.WeakSet[_HasFile]()
# The number of forks between the first process and this one: asking the kernel for the process id takes a microsecond.
_depth = 0
# The event loop of a relay, by the thread that runs it.
_loops = weakref.WeakValueDictionary[int, "asyncio.AbstractEventLoop"]()


def forget_in_children(owner: Forgetting) -> None:
    """Register `owner` so that each forked child calls `owner.forget()` as it begins."""
    _forgetting.add(owner)


def cut_off_in_children(owner: _HasFile) -> None:
    """Redirect the descriptor of a connection or another socket to a socket without a peer in each forked child.

    The child's statements on it then fail, instead of mixing with the parent's. A child that outlives its parent keeps
    none of its transactions or ports open.
    """
    _files.add(owner)


def runs_here(loop: "asyncio.AbstractEventLoop") -> None:
    """Record that the calling thread runs this event loop of a relay, so that a child forked in the thread ends."""
    _loops[threading.get_ident()] = loop


def call_here(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call users' code. A child process that this code forks ends when the call returns or raises."""
    depth = _depth
    try:
        returned = function(*args, **kwargs)
    except BaseException as error:
        if _depth != depth:
            _end_raising(error)
        raise
    if _depth != depth:
        _end("returned", 0)
    return returned


async def await_here(awaitable: Awaitable[T]) -> T:
    """Await users' code. A child process that this code forks ends when the awaited code returns or raises."""
    depth = _depth
    try:
        returned = await awaitable
    except BaseException as error:
        if _depth != depth:
            _end_raising(error)
        raise
    if _depth != depth:
        _end("returned", 0)
    return returned


def _end_raising(error: BaseException) -> NoReturn:
    """End this forked child after an error in the users' code, with the exit code that Python would have given it."""
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if type(error.code) is int else int(error.code is not None)
    _end(f"raised {type(error).__name__}", code)


def _end(how: str, code: int) -> NoReturn:
    # Not by logging, nor through sys.stderr: a thread that this process lacks may hold their locks.
    with suppress(OSError):
        os.write(2, f"outboxq: process {os.getpid()}, forked by users' code, {how} and was ended\n".encode())
    os._exit(code & 0xFF)


def _begin_child() -> None:
    global _depth
    _depth += 1
    nowhere, other_end = socket.socketpair()
    other_end.close()
    for file in list(_files):
        # A closed connection has no descriptor.
        with suppress(Exception):
            os.dup2(nowhere.fileno(), file.fileno(), inheritable=False)
    nowhere.close()
    loop = _loops.get(threading.get_ident())
    if loop is not None and not loop.is_closed():
        loop.call_soon(_end, "awaited", 1)
        # Before the steps of other tasks, unless the loop has another name for its queue.
        getattr(loop, "_ready", deque[object]()).rotate(1)
    # Last: an error here is printed, and not raised.
    for owner in list(_forgetting):
        owner.forget()


os.register_at_fork(after_in_child=_begin_child)
