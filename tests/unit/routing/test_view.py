from typing import Any

from app.contracts.placement import Demand
from app.contracts.pool import Occupancy
from app.routing.view import PoolState, PoolView
from tests.unit.fakes import Clock, snapshot


def slots(count: int, kv_tokens: int = 1) -> Demand:
    return Demand(count, 1, kv_tokens)


def view(*told: Any) -> tuple[PoolView, Clock]:
    clock = Clock()
    made = PoolView("me", 3.0, clock)
    for one in told:
        made.told(one)
    return made, clock


def test_a_pool_that_never_spoke_can_do_nothing() -> None:
    assert view()[0].state(slots(1), is_deferrable=False) == PoolState()


def test_a_replica_that_is_silent_longer_than_its_lease_is_gone_and_comes_back() -> None:
    seen, clock = view(snapshot())
    clock.now += 3.0
    assert seen.is_live("r1")
    clock.now += 0.1
    assert seen.live() == []
    assert seen.state(slots(1), is_deferrable=False).any_replica is None
    seen.told(snapshot(number=2))
    assert seen.is_live("r1")


def test_one_silent_replica_leaves_the_others() -> None:
    """cases.md 39: the silence of one is no reason to doubt another."""
    seen, clock = view(snapshot(replica="r1"), snapshot(replica="r2"))
    clock.now += 2.0
    seen.told(snapshot(replica="r2", number=2))
    clock.now += 2.0
    assert [s.replica for s in seen.live()] == ["r2"]
    assert seen.state(slots(8), is_deferrable=False).room == "r2"


def test_an_older_word_changes_nothing() -> None:
    seen, _ = view(snapshot(number=5, occupancy=Occupancy(slots=8)))
    seen.told(snapshot(number=4))
    assert seen.state(slots(1), is_deferrable=False).room is None


def test_own_requests_are_counted_by_what_was_sent_not_by_an_older_snapshot() -> None:
    occupancy = Occupancy(slots=5, by_router={"me": 2, "you": 3})
    seen, _ = view(snapshot(occupancy=occupancy))
    assert seen.state(slots(5), is_deferrable=False).room == "r1"
    seen.hold("r1", 4)
    assert seen.state(slots(1), is_deferrable=False).room == "r1"
    assert seen.state(slots(2), is_deferrable=False).room is None
    seen.hold("r1", -4)
    assert seen.state(slots(5), is_deferrable=False).room == "r1"


def test_headroom_is_not_for_deferrable_work() -> None:
    seen, _ = view(snapshot(occupancy=Occupancy(slots=6)))
    assert seen.state(slots(2), is_deferrable=False).room == "r1"
    assert seen.state(slots(1), is_deferrable=True).room is None


def test_lent_slots_are_free_for_the_pools_own_work_only() -> None:
    """They are given back when they are needed: a chat must not spill because of a loan."""
    seen, _ = view(snapshot(occupancy=Occupancy(slots=6, lent_slots=4)))
    assert seen.state(slots(6), is_deferrable=False).room == "r1"
    assert seen.state(slots(7), is_deferrable=False).room is None
    assert seen.state(slots(1), is_deferrable=True).room is None


def test_a_request_wider_than_a_replica_needs_all_of_it() -> None:
    seen, _ = view(snapshot())
    assert seen.state(slots(16), is_deferrable=False).room == "r1"
    seen.hold("r1", 1)
    assert seen.state(slots(16), is_deferrable=False).room is None


def test_the_replica_with_most_room_the_shortest_queue_and_the_most_to_lend() -> None:
    seen, _ = view(
        snapshot(replica="a", queue_limit=4, occupancy=Occupancy(slots=3, queued=1)),
        snapshot(replica="b", queue_limit=4, occupancy=Occupancy(slots=5, lendable_slots=1)),
    )
    state = seen.state(slots(1), is_deferrable=False)
    assert (state.room, state.queue, state.loan) == ("a", "b", "b")
    assert state.busy_fraction == 0.5
    without = seen.state(slots(1), is_deferrable=False, without={"a"})
    assert (without.room, without.any_replica) == ("b", "b")


def test_what_is_held_on_a_lost_replica_is_not_held_twice_when_it_comes_back() -> None:
    seen, _ = view(snapshot())
    seen.hold("r1", 3)
    seen.gone("r1")
    assert seen.live() == []
    seen.told(snapshot(number=2))
    seen.hold("r1", -3)
    assert seen.state(slots(8), is_deferrable=False).room == "r1"


def test_the_age_is_that_of_the_oldest_word() -> None:
    seen, clock = view(snapshot(replica="a"))
    clock.now += 1.0
    seen.told(snapshot(replica="b"))
    assert seen.age_s() == 1.0


def test_a_slot_without_the_kv_tokens_behind_it_is_no_room() -> None:
    """A replica holds 1,000: a chat that may come to 400 does not fit beside 700."""
    seen, _ = view(snapshot(occupancy=Occupancy(slots=1, kv_tokens=700)))
    assert seen.state(slots(1, 300), is_deferrable=False).room == "r1"
    assert seen.state(slots(1, 400), is_deferrable=False).room is None
