"""Joins what an engine produces while the last chunk was on its way; the first goes at once.

Each item that crosses an actor boundary costs as much as many tokens do, so a caller that falls
behind gets several in one. Nothing is held back to make a chunk larger unless an interval is set.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.contracts.exchange import ReplyHead


async def joined(
    source: AsyncGenerator[ReplyHead | bytes, None], interval_s: float
) -> AsyncGenerator[ReplyHead | bytes, None]:
    """The head, then the chunks of `source`, at least `interval_s` apart; closes `source`."""
    waiting: list[bytes] = []
    changed = asyncio.Event()

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
        try:
            while waiting or not task.done():
                await changed.wait()
                changed.clear()
                if waiting:
                    chunk = b"".join(waiting)
                    waiting.clear()
                    yield chunk
                    await asyncio.sleep(interval_s)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
