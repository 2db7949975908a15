"""What becomes of one request, whatever the pools do: exactly one outcome."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.contracts.exchange import PoolRequest, Refusal, Refused, Reply
from app.contracts.placement import Demand, Destination, Kind, Placement
from app.contracts.pool import Occupancy
from app.contracts.request import Urgency
from app.dispatch import Dispatcher
from app.errors import PoolBusy, PoolUnavailable, WaitedTooLong
from app.routing.policy import LoanTerms, Policy
from tests.unit.fakes import LOST, Answer, Clock, FakeClient, decision, reply, snapshot

POLICY = Policy({"latency": Destination("throughput", -20)}, {"latency": LoanTerms(512, 128, 1.0)})
BATCH = decision(Destination("throughput", 10), Urgency.DEFERRABLE)
ONE = Demand(1, 5, 21)
REQUEST = PoolRequest("/v1/chat/completions", b"{}", "id")


class Scene:
    """A latency pool and a throughput pool that has a queue."""

    def __init__(self, latency: list[Answer], throughput: list[Answer]) -> None:
        self.clock = Clock()
        self.latency = FakeClient("latency", self.clock, *latency)
        self.throughput = FakeClient("throughput", self.clock, *throughput)
        self.latency.view.told(snapshot("latency", "l1"))
        self.throughput.view.told(snapshot("throughput", "t1", queue_limit=8))
        clients = {"latency": self.latency, "throughput": self.throughput}
        self.dispatcher = Dispatcher(clients, POLICY, "me", self.clock)

    def run(self, made: Any = None, max_wait_s: float | None = None) -> tuple[Reply, Placement]:
        job = self.dispatcher.job(made or decision(), ONE, REQUEST, max_wait_s)
        return asyncio.run(self.dispatcher.open(job))


def test_a_chat_goes_home_with_what_its_pool_has_to_know() -> None:
    scene = Scene([reply(b"{}")], [])
    _, placement = scene.run(max_wait_s=4.0)
    assert (placement.kind, placement.replica) == (Kind.HOME, "l1")
    asked = scene.latency.asked[0]
    assert (asked.router, asked.replica, asked.demand) == ("me", "l1", ONE)
    assert (asked.is_short, asked.is_deferrable, asked.max_wait_s) == (True, False, 4.0)
    assert not asked.may_move


def test_a_refused_chat_spills_to_the_front_of_the_other_queue() -> None:
    scene = Scene([Refusal("full", 3)], [reply(b"{}")])
    _, placement = scene.run()
    assert placement.kind is Kind.SPILL
    assert scene.throughput.asked[0].priority == -20
    assert "spilled" in placement.reason


def test_the_last_refusal_is_the_answer_with_its_own_retry_after() -> None:
    scene = Scene([Refusal("full", 3)], [Refusal("8 requests wait already", 7)])
    with pytest.raises(PoolBusy, match="throughput is busy: 8 requests wait") as busy:
        scene.run()
    assert busy.value.retry_after_s == 7


def test_every_replica_of_a_pool_is_asked_before_it_spills() -> None:
    scene = Scene([Refusal("full", 3), reply(b"{}")], [])
    scene.latency.view.told(snapshot("latency", "l2"))
    _, placement = scene.run()
    assert placement.kind is Kind.HOME
    assert {r.replica for r in scene.latency.asked} == {"l1", "l2"}


def test_a_wait_limit_that_has_passed_ends_the_search() -> None:
    scene = Scene([], [Refusal("too late", 5, is_late=True)])
    with pytest.raises(WaitedTooLong):
        scene.run(decision(Destination("throughput")))


def test_a_replica_lost_before_the_first_byte_is_tried_again_once() -> None:
    assert Scene([LOST, reply(b"{}")], []).run()[1].kind is Kind.HOME
    with pytest.raises(PoolUnavailable):
        Scene([LOST, LOST], []).run()


def test_no_live_replica_anywhere_is_unavailable() -> None:
    scene = Scene([], [])
    scene.clock.now += 60.0
    with pytest.raises(PoolUnavailable):
        scene.run()


def test_a_chat_whose_pool_is_dead_is_served_by_the_other() -> None:
    scene = Scene([], [reply(b"{}")])
    scene.latency.view.gone("l1")
    assert scene.run()[1].kind is Kind.SPILL


def lending(scene: Scene, lendable: int = 2) -> None:
    scene.latency.view.told(
        snapshot("latency", "l1", number=2, occupancy=Occupancy(lendable_slots=lendable))
    )
    busy = Occupancy(slots=8, queued=1, queued_slots=1)
    scene.throughput.view.told(
        snapshot("throughput", "t1", number=2, queue_limit=8, occupancy=busy)
    )


def test_deferrable_work_borrows_when_home_is_full() -> None:
    scene = Scene([reply(b"{}")], [])
    lending(scene)
    _, placement = scene.run(BATCH)
    assert (placement.kind, placement.destination.pool) == (Kind.BORROW, "latency")
    assert scene.latency.asked[0].is_deferrable


@pytest.mark.parametrize(
    "made",
    [
        decision(Destination("throughput", 10), Urgency.DEFERRABLE, is_stream=True),
        decision(Destination("throughput", 10), Urgency.DEFERRABLE, max_output_tokens=None),
        decision(Destination("throughput"), Urgency.UNDECLARED),
    ],
    ids=["streams", "unbounded", "not_deferrable"],
)
def test_what_could_not_be_taken_back_does_not_borrow(made: Any) -> None:
    scene = Scene([], [reply(b"{}")])
    lending(scene)
    assert scene.run(made)[1].kind is Kind.HOME


def test_evicted_work_goes_home_once_keeps_its_age_and_is_not_refused() -> None:
    scene = Scene([Refusal("needed", 1, is_eviction=True)], [reply(b"{}")])
    lending(scene)
    # What it spent in the lent slot counts as waiting, so that it is not last again at home.
    scene.latency.takes_s = 0.75
    _, placement = scene.run(BATCH, max_wait_s=1.0)
    assert placement.kind is Kind.HOME
    again = scene.throughput.asked[0]
    assert again.waited_s == 0.75
    assert (again.must_finish, again.max_wait_s, again.may_move) == (True, None, False)


class Queueing(FakeClient):
    """A pool whose answer comes when the test says so."""

    def __init__(self, pool: str, clock: Clock) -> None:
        super().__init__(pool, clock)
        self.opened = asyncio.Event()
        self.lends = asyncio.Event()
        self.admit = asyncio.Event()
        self.finish = asyncio.Event()
        self.cancelled = 0
        self.ended = 0

    async def open(
        self, request: PoolRequest, on_admitted: Callable[[], None] | None = None
    ) -> Reply:
        self.asked.append(request)
        self.opened.set()
        try:
            await self.admit.wait()
            if on_admitted is not None:
                on_admitted()
            await self.finish.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.answers and isinstance(self.answers[0], Refusal):
            raise Refused(self.pool, request, self.answers[0])
        return reply(b"{}", ended=self._end)

    def _end(self) -> None:
        self.ended += 1

    async def until_lending(self) -> None:
        await self.lends.wait()
        self.lends.clear()


def queued() -> tuple[Scene, Queueing, Queueing]:
    scene = Scene([], [])
    latency = Queueing("latency", scene.clock)
    throughput = Queueing("throughput", scene.clock)
    scene.latency, scene.throughput = latency, throughput
    clients = {"latency": latency, "throughput": throughput}
    scene.dispatcher = Dispatcher(clients, POLICY, "me", scene.clock)
    lending(scene, lendable=0)
    return scene, latency, throughput


async def waiting_at_home() -> tuple["asyncio.Task[Any]", Queueing, Queueing]:
    """A deferrable request in the throughput pool's queue."""
    scene, latency, throughput = queued()
    job = scene.dispatcher.job(BATCH, ONE, REQUEST, None)
    opened = asyncio.create_task(scene.dispatcher.open(job))
    await asyncio.wait_for(throughput.opened.wait(), 5)
    return opened, latency, throughput


def lend(latency: Queueing) -> None:
    now = Occupancy(lendable_slots=1)
    latency.view.told(snapshot("latency", "l1", number=9, occupancy=now))
    latency.lends.set()


def test_work_that_waits_at_home_moves_when_a_slot_is_lent() -> None:
    """The overnight case: the backlog was there before the chat went quiet."""

    async def play() -> None:
        opened, latency, throughput = await waiting_at_home()
        lend(latency)
        await asyncio.wait_for(latency.opened.wait(), 5)
        latency.admit.set()
        latency.finish.set()
        _, placement = await asyncio.wait_for(opened, 5)
        assert placement.kind is Kind.BORROW
        assert throughput.cancelled == 1

    asyncio.run(play())


def test_work_that_begins_at_home_first_does_not_borrow_as_well() -> None:
    async def play() -> None:
        opened, latency, throughput = await waiting_at_home()
        lend(latency)
        await asyncio.wait_for(latency.opened.wait(), 5)
        throughput.admit.set()
        throughput.finish.set()
        _, placement = await asyncio.wait_for(opened, 5)
        assert placement.kind is Kind.HOME
        assert latency.cancelled == 1
        assert throughput.cancelled == 0

    asyncio.run(play())


def test_an_answer_that_comes_as_the_client_leaves_is_ended() -> None:
    """Dropped unread, it would hold its slots for ever."""

    async def play() -> None:
        opened, _, throughput = await waiting_at_home()
        throughput.admit.set()
        throughput.finish.set()
        await asyncio.sleep(0)
        opened.cancel()
        await asyncio.gather(opened, return_exceptions=True)
        assert throughput.cancelled + throughput.ended == 1

    asyncio.run(play())


def test_a_client_that_leaves_gives_up_its_place() -> None:
    async def play() -> None:
        opened, _, throughput = await waiting_at_home()
        opened.cancel()
        await asyncio.gather(opened, return_exceptions=True)
        assert throughput.cancelled == 1

    asyncio.run(play())
