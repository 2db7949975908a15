"""Joins chunks of one stream when a replica has more to send than the way to the client carries.

Each item that crosses an actor boundary costs as much as many tokens do. The first chunk and the
last go at once; between them a stream sends no oftener than its share of the replica's rate, so
that at one stream nothing is held back and at many several tokens travel together. A wait that
ends late says that this process cannot keep up; the next one grows by as much.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.contracts.exchange import ReplyHead


async def joined(
    source: AsyncGenerator[ReplyHead | bytes, None], interval_s: Callable[[], float]
) -> AsyncGenerator[ReplyHead | bytes, None]:
    """The head, then the chunks of `source`, at least `interval_s()` apart; closes `source`."""
    waiting: list[bytes] = []
    changed = asyncio.Event()
    now = asyncio.get_running_loop().time

    async def pump() -> None:
        try:
            async for item in source:
                waiting.append(item if isinstance(item, bytes) else b"")
                changed.set()
        finally:
            changed.set()

    async with aclosing(source):
        yield await anext(source)
        task = asyncio.create_task(pump())
        due = now()
        try:
            while waiting or not task.done():
                await changed.wait()
                changed.clear()
                late_s = 0.0
                if now() < due:
                    await asyncio.wait((task,), timeout=due - now())
                    late_s = max(0.0, now() - due)
                if waiting:
                    chunk = b"".join(waiting)
                    waiting.clear()
                    yield chunk
                    due = now() + interval_s() + late_s
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
