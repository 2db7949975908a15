"""The deployment of one pool: an engine that has proved itself, behind an actor boundary.

In: `PoolRequest`. Out: a `ReplyHead`, then chunks of bytes. Knows nothing of other pools.
"""

import os
import time
from collections.abc import AsyncGenerator, Callable
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
        chunk_interval_s: float,
        reference: Any,
    ) -> None:
        begun = time.monotonic()
        self._pool = pool
        self._engine = make_engine()
        self._chunk_interval_s = chunk_interval_s
        await self._engine.start()
        ask = None if reference is None else reference.known_answers.remote
        self._agreement = await proof.run(self._engine, ask)
        self._start_s = time.monotonic() - begun

    async def respond(self, request: PoolRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        async for item in joined(self._engine.respond(request), self._chunk_interval_s):
            yield item

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
