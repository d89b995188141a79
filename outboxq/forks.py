"""Forks: the child that users' code forks from a process of ours runs their code, and nothing of ours.

Such a child has copies of everything: connections, whose sockets are its parent's too; locks, whose owners are threads
that it lacks; an event loop, with the tasks of others. So as it begins, its connections are cut off, and when it
returns from the call in which it was forked, it ends as by `os._exit`: the interpreter's work at its end would be done
twice.
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
    """An object of the parent's of which a child keeps nothing."""

    def forget(self) -> None:
        """Return to the initial state."""
        ...


class _HasFile(Protocol):
    def fileno(self) -> int: ...


_forgetting = weakref.WeakSet[Forgetting]()
_files = weakref.WeakSet[_HasFile]()
# How many forks lie between the first process and this one: to ask the kernel for its number costs a microsecond.
_depth = 0
# By the thread that runs it.
_loops = weakref.WeakValueDictionary[int, "asyncio.AbstractEventLoop"]()


def forget_in_children(owner: Forgetting) -> None:
    """Register `owner` so that each child calls `owner.forget()` as it begins."""
    _forgetting.add(owner)


def cut_off_in_children(owner: _HasFile) -> None:
    """Point the descriptor of a connection, or of another socket, at nothing in each child.

    Statements of the child on it fail, instead of mixing with those of its parent. A child that outlives its
    parent keeps no transaction of it open, and no port.
    """
    _files.add(owner)


def runs_here(loop: "asyncio.AbstractEventLoop") -> None:
    """Record that the calling thread runs this event loop of a relay: in a child it runs nothing more."""
    _loops[threading.get_ident()] = loop


def call_here(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call users' code. A child that was forked in it ends when it returns, also by an error."""
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
    """Await users' code. A child that was forked in it ends when it returns, also by an error."""
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
    """End this child with the code that its interpreter would have ended with."""
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if type(error.code) is int else int(error.code is not None)
    _end(f"raised {type(error).__name__}", code)


def _end(how: str, code: int) -> NoReturn:
    # Not by the log, nor through sys.stderr: a thread that this process lacks may hold their locks.
    with suppress(OSError):
        os.write(2, f"outboxq: process {os.getpid()}, forked by users' code, {how} and was ended\n".encode())
    os._exit(code & 0xFF)


def _begin_child() -> None:
    global _depth
    _depth += 1
    nowhere, other_end = socket.socketpair()
    other_end.close()
    for file in list(_files):
        # A connection that is closed has no descriptor.
        with suppress(Exception):
            os.dup2(nowhere.fileno(), file.fileno(), inheritable=False)
    nowhere.close()
    loop = _loops.get(threading.get_ident())
    if loop is not None and not loop.is_closed():
        loop.call_soon(_end, "awaited", 1)
        # Before the steps of other tasks, unless the loop names its queue otherwise.
        getattr(loop, "_ready", deque[object]()).rotate(1)
    # Last: an error here is printed, and goes no further.
    for owner in list(_forgetting):
        owner.forget()


os.register_at_fork(after_in_child=_begin_child)
