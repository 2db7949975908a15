"""The way from the router to a pool: opens an answer, retries once, watches who is alive.

In: a `PoolRequest`. Out: a `Reply`, or `PoolBusy` / `PoolUnavailable`; after the first byte,
`StreamBroken`. The only file that knows that pools are reached through Ray Serve handles.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)

from app.contracts.exchange import PoolRequest, Reply
from app.contracts.pool import PoolSnapshot
from app.errors import PoolBusy, PoolUnavailable, StreamBroken

logger = logging.getLogger(__name__)

# How often each pool is asked for its state, and how long an answer counts.
WATCH_PERIOD_S = 1.0
LEASE_S = 5.0
# Guess of an engine's start before the first one was seen; vLLM alone takes about this long here.
DEFAULT_START_S = 35.0
ATTEMPTS = 2
# A pool that turns a request away has others running; a slot may be free within this time.
BUSY_RETRY_AFTER_S = 1
LOST = (RayError, RayServeException)


class PoolClient:
    """One pool as the router sees it."""

    def __init__(self, pool: str, handle: Any, clock: Callable[[], float]) -> None:
        self.pool = pool
        self._stream = handle.options(method_name="respond", stream=True)
        self._handle = handle
        self._clock = clock
        self._snapshots: Sequence[PoolSnapshot] = ()
        self._seen_at = -math.inf
        self._alive_at = clock()
        self._start_s = DEFAULT_START_S

    def snapshots(self) -> Sequence[PoolSnapshot]:
        """The live replicas' states; none once the last answer is older than its lease."""
        return self._snapshots if self._clock() - self._seen_at <= LEASE_S else ()

    async def open(self, request: PoolRequest) -> Reply:
        """The answer to one request, once its first chunk is there."""
        for attempt in range(1, ATTEMPTS + 1):
            if not self.snapshots():
                raise self._unavailable("has no live replica")
            response = self._stream.remote(request)
            try:
                return await self._begun(response)
            except BackPressureError as error:
                message = f"pool {self.pool} takes no more requests now"
                raise PoolBusy(message, self.pool, BUSY_RETRY_AFTER_S) from error
            except RequestCancelledError:
                raise
            except (*LOST, _EngineFailed) as error:
                logger.warning(
                    "pool %s failed before the first byte of %s, attempt %d: %s",
                    self.pool, request.request_id, attempt, type(error).__name__,
                )  # fmt: skip
                await self.refresh()
        raise self._unavailable("failed twice before the first byte")

    async def watch(self) -> None:
        """Keep the snapshots fresh, for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(WATCH_PERIOD_S)

    async def refresh(self) -> None:
        """Ask every replica for its state once."""
        broadcast = self._handle.broadcast("snapshot")
        try:
            results = await broadcast.results_async(timeout_s=LEASE_S, return_exceptions=True)
        except DeploymentUnavailableError:
            results = []
        except (*LOST, TimeoutError) as error:
            logger.warning("pool %s cannot be asked: %s", self.pool, type(error).__name__)
            return
        found = [result for result in results if isinstance(result, PoolSnapshot)]
        if len(found) != len(self._snapshots):
            logger.info("pool %s has %d live replicas", self.pool, len(found))
        self._snapshots = found
        self._seen_at = self._clock()
        if found:
            self._alive_at = self._seen_at
            self._start_s = max(snapshot.start_s for snapshot in found)

    async def _begun(self, response: Any) -> Reply:
        try:
            head = await anext(response)
            if head.status >= 500 and head.status != 501:
                raise _EngineFailed(f"status {head.status}")
            first = await anext(response)
        except StopAsyncIteration as error:
            response.cancel()
            raise _EngineFailed("an empty answer") from error
        except BaseException:
            response.cancel()
            raise
        return Reply(head, self._rest(first, response))

    async def _rest(self, first: bytes, response: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for chunk in _translated(response, self.pool):
                yield chunk
        finally:
            response.cancel()

    def _unavailable(self, what: str) -> PoolUnavailable:
        left_s = max(1, math.ceil(self._start_s - (self._clock() - self._alive_at)))
        return PoolUnavailable(f"pool {self.pool} {what}", self.pool, left_s)


class _EngineFailed(Exception):
    """The engine answered with a server error before its first token."""


async def _translated(response: Any, pool: str) -> AsyncIterator[bytes]:
    try:
        async for chunk in response:
            yield chunk
    except LOST as error:
        raise StreamBroken(f"pool {pool} broke off this answer", pool, 1) from error
