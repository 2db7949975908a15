"""The deployment of one pool: an engine that has proved itself, behind an actor boundary.

In: `PoolRequest`. Out: a `ReplyHead`, then chunks of bytes. Knows nothing of other pools.
"""

import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import PoolSnapshot
from app.pools.chunks import joined
from app.pools.engine import Engine
from app.pools.proof import Answer, Proof, answer_known


class PoolServer:
    """One replica of a pool. Constructed by Ray Serve; ready when the constructor returns.

    The engine is made here: Serve pickles the arguments again later, and a running engine is not
    to be pickled.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        pool: str,
        make_engine: Callable[[], Engine],
        proof: Proof,
        chunks_per_s: float,
        reference: Any,
    ) -> None:
        begun = time.monotonic()
        self._pool = pool
        self._engine = make_engine()
        self._chunks_per_s = chunks_per_s
        self._streams = 0
        await self._engine.start()
        ask = None if reference is None else reference.known_answers.remote
        self._agreement = await proof.run(self._engine, ask)
        self._start_s = time.monotonic() - begun

    async def respond(self, request: PoolRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        self._streams += 1
        try:
            async with aclosing(joined(self._engine.respond(request), self._interval_s)) as items:
                async for item in items:
                    yield item
        finally:
            self._streams -= 1

    def _interval_s(self) -> float:
        """A stream's share of this replica's chunks, as the time from one to the next."""
        return self._streams / self._chunks_per_s

    async def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            pool=self._pool,
            pid=os.getpid(),
            facts=self._engine.facts(),
            load=self._engine.load(),
            agreement=self._agreement,
            start_s=self._start_s,
        )

    async def known_answers(self) -> list[Answer]:
        """This engine's answers to the known prompts, for another pool to be held against."""
        return await answer_known(self._engine)

    async def check_health(self) -> None:
        await self._engine.check_health()
