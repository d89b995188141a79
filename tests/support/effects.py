"""`once` for tests, on threads and on event loops alike, and what stands in the table `effect`."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncEffects, Effects

Once = Callable[..., Any]


class SyncOnce:
    """`Effects` in the test's thread."""

    flavour = "sync"

    def __init__(self, engine: Engine, lease_seconds: float = 30.0) -> None:
        self._effects = Effects(engine, lease_seconds=lease_seconds)

    def __call__(self, scope: str, *, key: str, call: Callable[[str], object], **options: Any) -> Any:
        return self._effects.once(scope, key=key, call=call, **options)

    def dispose(self) -> None:
        self._effects.dispose()


class AsyncOnce:
    """`AsyncEffects`, each call in an event loop of its own."""

    flavour = "async"

    def __init__(self, engine: Engine, lease_seconds: float = 30.0) -> None:
        self._url = engine.url
        self._lease_seconds = lease_seconds

    def __call__(self, scope: str, *, key: str, call: Callable[[str], object], **options: Any) -> Any:
        async def run() -> Any:
            engine = create_async_engine(self._url)
            effects = AsyncEffects(engine, lease_seconds=self._lease_seconds)
            try:
                return await effects.once(scope, key=key, call=_awaited(call), **_all_awaited(options))
            finally:
                await effects.dispose()
                await engine.dispose()

        return asyncio.run(run())

    def dispose(self) -> None:
        pass


def _all_awaited(options: dict[str, Any]) -> dict[str, Any]:
    asked = options.get("already_applied")
    return options if asked is None else {**options, "already_applied": _awaited(asked)}


def _awaited(function: Callable[[str], object]) -> Callable[[str], Any]:
    async def wrapped(provider_key: str) -> object:
        # Away from the loop and back, as a call over a network is.
        return await asyncio.to_thread(function, provider_key)

    declared = getattr(function, "__annotations__", {})
    wrapped.__annotations__["return"] = declared.get("return", object)
    return wrapped


def row(engine: Engine, key: str) -> dict[str, Any]:
    """The effect's row; its key names it in these tests."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT * FROM outboxq.effect WHERE key = :key"), {"key": key})
        return dict(found.mappings().one())


def let_lock_run_out(engine: Engine, key: str) -> None:
    """Time passes for one effect's lock."""
    _change(engine, key, "locked_until = clock_timestamp() - interval '1 second'")


def age(engine: Engine, key: str, hours: int) -> None:
    """Time passes since the first call."""
    _change(engine, key, f"first_called_at = first_called_at - interval '{hours} hours'")


def _change(engine: Engine, key: str, change: str) -> None:
    with engine.begin() as connection:
        changed = connection.execute(text(f"UPDATE outboxq.effect SET {change} WHERE key = :key"), {"key": key})
        assert changed.rowcount == 1


@contextmanager
def counted_work() -> Iterator[list[str]]:
    """Every statement and COMMIT that any engine sends in the block."""
    sent: list[str] = []

    def on_execute(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    def on_commit(_connection: object) -> None:
        sent.append("COMMIT")

    event.listen(Engine, "before_cursor_execute", on_execute)
    event.listen(Engine, "commit", on_commit)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", on_execute)
        event.remove(Engine, "commit", on_commit)
