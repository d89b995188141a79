"""An answer on its way from the application to the server: held back until it is recorded, or passed on as it comes."""

from asyncio import Task
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from outboxq.http.responses import NOT_REPLAYABLE, Answer
from outboxq.http.settlement import RequestSettlement
from outboxq.http.shielding import UncancelledWrites

# As ASGI servers and applications have them.
Send: TypeAlias = Callable[[Any], Awaitable[None]]

_CUT_SHORT = ", and was cut short"


class ResponseRecorder:
    """Takes what the application sends, and settles it with its guard.

    A response of known and bearable length is recorded before its first byte leaves. Anything else passes through, and
    is recorded, without its content, before its last one does.

    Args:
        send: The server's.
        max_bytes: Of a response that is held back.
    """

    def __init__(self, guard: RequestSettlement, send: Send, max_bytes: int, undisturbed: UncancelledWrites) -> None:
        self._guard = guard
        self._undisturbed = undisturbed
        self._settling: Task[Answer | None] | None = None
        self._send = send
        self._max_bytes = max_bytes
        self._start: MutableMapping[str, Any] | None = None
        self._body = bytearray()
        self._whole: Answer | None = None
        self._streams: str | None = None
        self._is_settled = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Given to the application in place of the server's."""
        if self._is_settled or message["type"] not in ("http.response.start", "http.response.body"):
            await self._send(message)
        elif message["type"] == "http.response.start":
            # The specification allows any iterable, also one that can be read once.
            self._start = {**message, "headers": _headers(message)}
            self._hold_no_more_than(_declared_bytes(message) or 0)
            if self._streams is not None:
                await self._pass_start()
        else:
            await self._take_body(message)

    async def finish(self) -> None:
        """The application has returned."""
        if self._is_settled:
            return
        if self._whole is not None:
            await self._settle(self._whole, at_end=True)
        else:
            await self.fail(None)

    async def fail(self, error: BaseException | None) -> bool:
        """The application has raised, or returned without an answer; whether it was answered nevertheless."""
        if self._settling is not None and await self._settling is not None:
            # Interrupted while it was written: what is written stands.
            self._is_settled = True
        if self._is_settled:
            return False
        self._is_settled = True
        if self._streams is not None and self._start is not None:
            await self._guard.settle_stream(self._start["status"], self._streams + _CUT_SHORT)
            return False
        answer = await self._guard.fail(error)
        if answer is not None:
            await self._answer(answer)
        return answer is not None

    async def _take_body(self, message: MutableMapping[str, Any]) -> None:
        assert self._start is not None, "a body came before its start"
        goes_on = bool(message.get("more_body", False))
        if self._streams is None:
            self._body += message.get("body", b"")
            self._hold_no_more_than(len(self._body))
            if goes_on and _declared_bytes(self._start) is None:
                self._streams = "its response is a stream"
            if self._streams is not None:
                await self._pass_start()
                message = {**message, "body": bytes(self._body)}
                self._body.clear()
        if self._streams is not None:
            await self._pass_body(message, goes_on=goes_on)
        elif not goes_on:
            self._whole = Answer(self._start["status"], _headers(self._start), bytes(self._body))
            await self._settle(self._whole, at_end=False)

    def _hold_no_more_than(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            self._streams = f"its response takes over {self._max_bytes:,} bytes"

    async def _pass_start(self) -> None:
        assert self._start is not None
        await self._send({**self._start, "headers": [*_headers(self._start), NOT_REPLAYABLE]})

    async def _pass_body(self, message: MutableMapping[str, Any], *, goes_on: bool) -> None:
        if not goes_on:
            assert self._start is not None
            assert self._streams is not None
            self._is_settled = True
            # Before the last byte: who has seen the end of it finds it executed, and not under way.
            await self._undisturbed.run(self._guard.settle_stream(self._start["status"], self._streams))
        await self._send(message)

    async def _settle(self, whole: Answer, *, at_end: bool) -> None:
        self._settling = self._undisturbed.start(self._guard.settle(whole, at_end=at_end))
        answer = await self._undisturbed.wait(self._settling)
        if answer is not None:
            self._is_settled = True
            await self._answer(answer)

    async def _answer(self, answer: Answer) -> None:
        for message in answer.messages():
            await self._send(message)


def _headers(start: MutableMapping[str, Any]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((bytes(name), bytes(value)) for name, value in start.get("headers", ()))


def _declared_bytes(start: MutableMapping[str, Any]) -> int | None:
    values = [value for name, value in _headers(start) if name.lower() == b"content-length"]
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None
