"""The application's response on its way to the server: held back until it is recorded, or passed on at once."""

import asyncio
from asyncio import Task

from outboxq.effects.shielding import UncancelledWrites
from outboxq.http.asgi import Headers, Message, Send, declared_bytes
from outboxq.http.responses import NOT_REPLAYABLE, Answer
from outboxq.http.settlement import RequestSettlement

_CUT_SHORT = ", and was cut short"


class ResponseRecorder:
    """Receives the messages of the application's response, records the outcome of the request, and sends them on.

    A response of known and acceptable length is recorded before its first byte is sent. Any other response passes
    through, and is recorded, without its content, before its last byte is sent.
    """

    def __init__(self, settlement: RequestSettlement, send: Send, writes: UncancelledWrites) -> None:
        self._settlement = settlement
        self._writes = writes
        self._settling: Task[Answer | None] | None = None
        self._send = send
        self._max_bytes = settlement.max_response_bytes
        self._start: Message | None = None
        self._body = bytearray()
        self._whole: Answer | None = None
        self._streams: str | None = None
        self._is_settled = False

    async def send(self, message: Message) -> None:
        """Receive a message of the application's response.

        The application calls this in place of the server's `send`.
        """
        if self._is_settled or message["type"] not in ("http.response.start", "http.response.body"):
            await self._send(message)
        elif message["type"] == "http.response.start":
            # The specification allows any iterable, even one that can be read only once.
            self._start = {**message, "headers": _headers(message)}
            self._hold_no_more_than(declared_bytes(_headers(message)) or 0)
            if self._streams is not None:
                await self._pass_start()
        else:
            await self._take_body(message)

    async def finish(self) -> None:
        """Record the request's outcome once the application has returned, unless its last message led to that."""
        if self._is_settled:
            return
        if self._whole is not None:
            await self._settle(self._whole, at_end=True)
        else:
            await self.fail(None)

    async def fail(self, error: BaseException | None) -> bool:
        """Record the request's outcome if the application raised an error, or returned without an answer.

        Return True if this has sent an answer to the client.

        Args:
            error: The error that the application raised; None if it returned without an answer.
        """
        if self._settling is not None and await self._settling is not None:
            # Interrupted while the outcome was recorded: the record counts.
            self._is_settled = True
        if self._is_settled:
            return False
        self._is_settled = True
        if self._streams is not None and self._start is not None:
            await self._settlement.settle_stream(self._start["status"], self._streams + _CUT_SHORT)
            return False
        answer = await self._settlement.fail(error)
        if answer is not None:
            await answer.send_to(self._send)
        return answer is not None

    async def _take_body(self, message: Message) -> None:
        assert self._start is not None, "a body came before its start"
        goes_on = bool(message.get("more_body", False))
        if self._streams is None:
            self._body += message.get("body", b"")
            self._hold_no_more_than(len(self._body))
            if goes_on and declared_bytes(_headers(self._start)) is None:
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

    async def _pass_body(self, message: Message, *, goes_on: bool) -> None:
        if not goes_on:
            assert self._start is not None
            assert self._streams is not None
            self._is_settled = True
            # Before the last byte: a client that has the whole answer must not find its request still in progress.
            await self._writes.run(self._settlement.settle_stream(self._start["status"], self._streams))
        await self._send(message)

    async def _settle(self, whole: Answer, *, at_end: bool) -> None:
        self._settling = self._writes.start(self._settlement.settle(whole, at_end=at_end))
        answer = await asyncio.shield(self._settling)
        if answer is not None:
            self._is_settled = True
            await answer.send_to(self._send)


def _headers(start: Message) -> Headers:
    return tuple((bytes(name), bytes(value)) for name, value in start.get("headers", ()))
