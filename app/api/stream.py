"""Writes an answer to the socket and notices when the client goes away.

Per chunk: one send, nothing else. Knows nothing of pools: it gets an opener and relays.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Receive, Scope, Send

from app.api import problems
from app.contracts.exchange import Reply
from app.errors import SplitpoolError, StreamBroken

DONE = b"data: [DONE]\n\n"
Opener = Callable[[], Awaitable[tuple[Reply, Mapping[str, str]]]]


class RelayResponse:
    """An ASGI response: opens the answer, relays it, cancels both when the client has gone."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._relay(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _relay(self, send: Send) -> None:
        try:
            reply, headers = await self._opener()
        except SplitpoolError as error:
            await _send_problem(send, error)
            return
        try:
            await self._send_reply(send, reply, headers)
        finally:
            await reply.chunks.aclose()
            reply.end()

    async def _send_reply(self, send: Send, reply: Reply, headers: Mapping[str, str]) -> None:
        await _start(send, reply.head.status, reply.head.content_type, headers)
        if reply.head.status >= 400:
            body = b"".join([chunk async for chunk in reply.chunks])
            await _body(send, problems.bounded(body), more=False)
            return
        try:
            async for chunk in reply.chunks:
                await _body(send, chunk, more=True)
        except StreamBroken as error:
            if not reply.head.is_stream:
                raise
            await _body(send, b"data: " + problems.body_of(error) + b"\n\n" + DONE, more=True)
        await _body(send, b"", more=False)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_problem(send: Send, error: SplitpoolError) -> None:
    headers = problems.headers_of(error)
    await _start(send, problems.status_of(error), "application/json", headers)
    await _body(send, problems.body_of(error), more=False)


async def _start(send: Send, status: int, content_type: str, headers: Mapping[str, str]) -> None:
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _body(send: Send, chunk: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": more})
