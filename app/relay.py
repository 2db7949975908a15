"""The way from the router to one pool: opens an answer, and ends it if its replica falls silent.

In: a `PoolRequest`. Out: a `Reply`; `Refused` if the pool does not take it, `ReplicaLost` if it
died before the first byte, after it `StreamBroken`. The only file that knows that pools are
reached through Ray Serve handles.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError

from app.contracts.exchange import (
    Admitted,
    PoolRequest,
    Refusal,
    Refused,
    ReplicaLost,
    Reply,
)
from app.contracts.placement import Kind
from app.contracts.pool import PoolSnapshot
from app.errors import PoolUnavailable, StreamBroken
from app.routing.view import PoolView

logger = logging.getLogger(__name__)

# How often silence is looked for.
WATCH_PERIOD_S = 0.5
# Guess of an engine's start before the first one was seen; vLLM alone takes about this long here.
DEFAULT_START_S = 35.0
# A place that Serve itself refuses is not in the pool's own count; one may be free soon.
SERVE_BUSY_RETRY_S = 1
# An engine behind its own bound says so with this status; the pool's admission should have.
ENGINE_BUSY = 503
NOT_IMPLEMENTED = 501
LOST = (RayError, RayServeException)
GONE = (RayActorError, TimeoutError)


class PoolClient:
    """One pool as one router replica reaches it."""

    def __init__(self, pool: str, handle: Any, view: PoolView, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.view = view
        self._stream = handle.options(method_name="respond", stream=True)
        self._clock = clock
        self._alive_at = clock()
        self._start_s = DEFAULT_START_S
        self._limits: dict[str, set[asyncio.Timeout]] = {}
        self._borrowers: list[asyncio.Future[None]] = []

    def told(self, snapshot: PoolSnapshot) -> None:
        """A replica's word on itself."""
        self.view.told(snapshot)
        self._alive_at = self._clock()
        self._start_s = snapshot.start_s
        waiting = [waiter for waiter in self._borrowers if not waiter.done()]
        for waiter in waiting[: snapshot.occupancy.lendable_slots]:
            waiter.set_result(None)

    async def until_lending(self) -> None:
        """Until a replica says that it lends; in the order of asking, as many as it has slots."""
        waiter = asyncio.get_running_loop().create_future()
        self._borrowers.append(waiter)
        try:
            await waiter
        finally:
            self._borrowers.remove(waiter)

    async def open(
        self, request: PoolRequest, on_admitted: Callable[[], None] | None = None
    ) -> Reply:
        """The answer to one request, once its first chunk is there."""
        call = _Call(self._stream.remote(request), request, self)
        try:
            return await call.begun(on_admitted)
        except BaseException:
            call.end()
            raise

    async def watch(self) -> None:
        """End what waits for a silent replica, for ever."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = asyncio.get_running_loop().time()
            for replica in [r for r in self._limits if not self.view.is_live(r)]:
                for limit in self._limits.pop(replica):
                    limit.reschedule(now)

    def unavailable(self) -> PoolUnavailable:
        """What to tell a client while no replica lives."""
        left_s = max(1, math.ceil(self._start_s - (self._clock() - self._alive_at)))
        return PoolUnavailable(f"pool {self.pool} has no live replica", self.pool, left_s)

    def bound(self, replica: str | None, limit: asyncio.Timeout) -> None:
        """Let silence of this replica end what runs under `limit`."""
        if replica is not None:
            self._limits.setdefault(replica, set()).add(limit)

    def unbound(self, replica: str | None, limit: asyncio.Timeout) -> None:
        if replica is not None and replica in self._limits:
            self._limits[replica].discard(limit)
            if not self._limits[replica]:
                del self._limits[replica]


class _Call:
    """One request at one replica, from its first item to its last."""

    def __init__(self, response: Any, request: PoolRequest, client: PoolClient) -> None:
        self._response = response
        self._request = request
        self._client = client
        self._is_open = True
        self._hold(request.demand.slots)

    def end(self) -> None:
        """Give back what is held for it, and let the pool know."""
        if not self._is_open:
            return
        self._is_open = False
        self._hold(-self._request.demand.slots)
        self._response.cancel()

    def _hold(self, slots: int) -> None:
        if self._request.replica is not None and self._request.kind is not Kind.BORROW:
            self._client.view.hold(self._request.replica, slots)

    async def begun(self, on_admitted: Callable[[], None] | None) -> Reply:
        try:
            async with _Silence(self._client, self._request.replica):
                return await self._first(on_admitted)
        except BackPressureError as error:
            raise self._refused("it takes no more requests now") from error
        except RequestCancelledError:
            raise
        except (*LOST, TimeoutError, StopAsyncIteration) as error:
            # A request that failed by itself says nothing of its neighbours.
            if self._request.replica is not None and isinstance(error, GONE):
                self._client.view.gone(self._request.replica)
            raise ReplicaLost(type(error).__name__) from error

    async def _first(self, on_admitted: Callable[[], None] | None) -> Reply:
        item = await anext(self._response)
        if isinstance(item, Admitted):
            if on_admitted is not None:
                on_admitted()
            item = await anext(self._response)
        if isinstance(item, Refusal):
            raise Refused(self._client.pool, self._request, item)
        if item.status == ENGINE_BUSY:
            raise self._refused("its engine takes no more requests now")
        if item.status >= 500 and item.status != NOT_IMPLEMENTED:
            raise ReplicaLost(f"its engine answered {item.status}")
        return Reply(item, self._rest(await anext(self._response)), self.end)

    def _refused(self, reason: str) -> Refused:
        refusal = Refusal(reason, SERVE_BUSY_RETRY_S)
        return Refused(self._client.pool, self._request, refusal)

    async def _rest(self, first: bytes) -> AsyncGenerator[bytes, None]:
        pool = self._client.pool
        chunk: bytes | None = first
        while chunk is not None:
            # Outside of what silence ends: a slow client is not a silent replica.
            yield chunk
            try:
                async with _Silence(self._client, self._request.replica):
                    chunk = await anext(self._response, None)
            except (*LOST, TimeoutError) as error:
                raise StreamBroken(f"pool {pool} broke off this answer", pool, 1) from error


class _Silence:
    """Ends its block with TimeoutError when the replica falls silent."""

    def __init__(self, client: PoolClient, replica: str | None) -> None:
        self._client = client
        self._replica = replica
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._client.bound(self._replica, self._limit)

    async def __aexit__(self, *failure: Any) -> None:
        self._client.unbound(self._replica, self._limit)
        await self._limit.__aexit__(*failure)
