"""One request at one replica, through a stand-in for Ray Serve's handle."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from app import relay
from app.contracts.exchange import (
    Admitted,
    Item,
    PoolRequest,
    Refusal,
    Refused,
    ReplicaLost,
    ReplyHead,
)
from app.contracts.placement import Demand, Kind
from app.contracts.pool import Occupancy
from app.errors import StreamBroken
from app.relay import PoolClient
from app.routing.view import PoolView
from tests.unit.fakes import Clock, snapshot

OK = ReplyHead(200, "text/event-stream")
SERVE_FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)
REQUEST = PoolRequest("/v1/chat/completions", b"{}", "id", demand=Demand(3, 1, 9), replica="r1")


class Response:
    """What a streaming call gives: items, then an end, a failure, or nothing more."""

    def __init__(self, items: list[Item | Exception | None]) -> None:
        self.items = items
        self.cancelled = 0
        self._given = self._give()

    async def _give(self) -> AsyncIterator[Item]:
        for item in self.items:
            if item is None:
                await asyncio.Event().wait()
            elif isinstance(item, Exception):
                raise item
            else:
                yield item

    def __aiter__(self) -> AsyncIterator[Item]:
        return self._given

    def __anext__(self) -> Awaitable[Item]:
        return self._given.__anext__()

    def cancel(self) -> None:
        self.cancelled += 1


class Handle:
    """Gives one response."""

    def __init__(self, *items: Item | Exception | None) -> None:
        self.response = Response(list(items))

    def options(self, **options: Any) -> "Handle":
        return self

    @property
    def respond(self) -> "Handle":
        return self

    def remote(self, request: PoolRequest) -> Response:
        return self.response


def client(handle: Handle) -> tuple[PoolClient, Clock]:
    clock = Clock()
    made = PoolClient("latency", handle, PoolView("me", 3.0, clock), clock)
    made.told(snapshot())
    return made, clock


def free(made: PoolClient) -> bool:
    return made.view.state(Demand(8, 1, 1), is_deferrable=False).room is not None


async def read(made: PoolClient, request: PoolRequest = REQUEST) -> list[bytes]:
    reply = await made.open(request)
    try:
        return [chunk async for chunk in reply.chunks]
    finally:
        reply.end()


def test_slots_are_held_from_the_sending_to_the_last_chunk() -> None:
    async def scene() -> None:
        handle = Handle(OK, b"a", b"b")
        made, _ = client(handle)
        reply = await made.open(REQUEST)
        assert not free(made)
        assert [chunk async for chunk in reply.chunks] == [b"a", b"b"]
        reply.end()
        assert free(made)
        assert handle.response.cancelled == 1

    asyncio.run(scene())


def test_an_answer_that_nobody_reads_gives_its_slots_back() -> None:
    async def scene() -> None:
        handle = Handle(OK, b"a", None)
        made, _ = client(handle)
        reply = await made.open(REQUEST)
        assert not free(made)
        reply.end()
        reply.end()
        assert free(made)
        assert handle.response.cancelled == 1

    asyncio.run(scene())


def test_a_loan_is_not_held_against_the_pools_own_work() -> None:
    async def scene() -> None:
        made, _ = client(Handle(OK, b"a", None))
        await made.open(replace(REQUEST, kind=Kind.BORROW))
        assert free(made)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("items", "failure", "is_live"),
    [
        pytest.param([Refusal("full", 4)], Refused, True, id="refusal"),
        pytest.param(
            [Admitted(), Refusal("needed", 1, is_eviction=True)], Refused, True, id="eviction"
        ),
        pytest.param([ReplyHead(503, "application/json")], Refused, True, id="engine_full"),
        pytest.param([SERVE_FULL], Refused, True, id="serve_full"),
        pytest.param([ReplyHead(500, "application/json")], ReplicaLost, True, id="engine_500"),
        pytest.param([RayActorError()], ReplicaLost, False, id="killed"),
        pytest.param([], ReplicaLost, True, id="nothing"),
        pytest.param([OK], ReplicaLost, True, id="head_only"),
    ],
)
def test_before_the_first_byte_it_is_a_refusal_or_a_lost_replica(
    items: list[Item | Exception | None], failure: type[Exception], is_live: bool
) -> None:
    handle = Handle(*items)
    made, _ = client(handle)
    with pytest.raises(failure):
        asyncio.run(read(made))
    assert handle.response.cancelled == 1
    assert made.view.is_live("r1") is is_live


def test_after_the_first_byte_a_killed_replica_breaks_the_stream() -> None:
    made, _ = client(Handle(OK, b"a", RayActorError()))
    with pytest.raises(StreamBroken):
        asyncio.run(read(made))


@pytest.mark.parametrize(
    ("items", "failure"), [([None], ReplicaLost), ([OK, b"a", None], StreamBroken)]
)
def test_what_waits_for_a_silent_replica_is_ended(
    monkeypatch: pytest.MonkeyPatch,
    items: list[Item | Exception | None],
    failure: type[Exception],
) -> None:
    monkeypatch.setattr(relay, "WATCH_PERIOD_S", 0.01)

    async def scene() -> None:
        made, clock = client(Handle(*items))
        watching = asyncio.create_task(made.watch())
        reading = asyncio.create_task(read(made))
        await asyncio.sleep(0.05)
        assert not reading.done()
        clock.now += 4.0
        with pytest.raises(failure):
            await asyncio.wait_for(reading, 5)
        watching.cancel()

    asyncio.run(scene())


def test_a_snapshot_wakes_as_many_borrowers_as_it_lends_slots_in_their_order() -> None:
    async def scene() -> None:
        made, _ = client(Handle())
        waiting = [asyncio.create_task(made.until_lending()) for _ in range(3)]
        await asyncio.sleep(0)
        made.told(snapshot(number=2, occupancy=Occupancy(lendable_slots=2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, True, False]
        waiting[2].cancel()

    asyncio.run(scene())
