import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contracts.placement import Demand, Destination, Kind
from app.routing.policy import LoanTerms, Policy
from app.routing.view import PoolState

CHAT, BATCH = Destination("latency"), Destination("throughput", 10)
SPILL = Destination("throughput", -20)
SPILLING = Policy({"latency": SPILL}, {"latency": LoanTerms(512, 128, 0.5)})
REFUSING = Policy({}, {})
GONE = PoolState()
FREE = PoolState(0.2, room="r", any_replica="r")
FULL = PoolState(1.0, any_replica="r")
QUEUEING = PoolState(1.0, queue="q", any_replica="q")
LENDING = PoolState(0.0, room="r", loan="r", any_replica="r")


@pytest.mark.parametrize(
    ("policy", "home", "latency", "throughput", "placed"),
    [
        pytest.param(SPILLING, CHAT, FREE, FREE, (Kind.HOME, "latency", 0), id="free"),
        pytest.param(SPILLING, CHAT, FULL, FREE, (Kind.SPILL, "throughput", -20), id="spill"),
        pytest.param(SPILLING, CHAT, FULL, QUEUEING, (Kind.SPILL, "throughput", -20), id="queue"),
        pytest.param(SPILLING, CHAT, GONE, FREE, (Kind.SPILL, "throughput", -20), id="home_dead"),
        pytest.param(SPILLING, CHAT, FULL, GONE, (Kind.HOME, "latency", 0), id="ask_anyway"),
        pytest.param(REFUSING, CHAT, FULL, FREE, (Kind.HOME, "latency", 0), id="no_spill"),
        pytest.param(SPILLING, CHAT, GONE, GONE, None, id="all_dead"),
        pytest.param(SPILLING, BATCH, FREE, FREE, (Kind.HOME, "throughput", 10), id="batch"),
        pytest.param(SPILLING, BATCH, FREE, QUEUEING, (Kind.HOME, "throughput", 10), id="waits"),
        pytest.param(SPILLING, BATCH, LENDING, GONE, (Kind.BORROW, "latency", 10), id="stands_in"),
        pytest.param(SPILLING, BATCH, LENDING, QUEUEING, (Kind.BORROW, "latency", 10), id="lent"),
        pytest.param(SPILLING, BATCH, LENDING, FREE, (Kind.HOME, "throughput", 10), id="not_busy"),
    ],
)
def test_placements(
    policy: Policy,
    home: Destination,
    latency: PoolState,
    throughput: PoolState,
    placed: tuple[Kind, str, int] | None,
) -> None:
    states = {"latency": latency, "throughput": throughput}
    lenders = policy.lenders(home, Demand(1, 100, 200), 100) if home == BATCH else ()
    found = policy.place(home, "why", states, lenders)
    if placed is None:
        assert found is None
        return
    assert found is not None
    destination = found.destination
    assert (found.kind, destination.pool, destination.priority) == placed
    assert found.reason.startswith("why")


@pytest.mark.parametrize(
    ("prompt", "output", "lends"),
    [(512, 128, True), (513, 128, False), (512, 129, False), (1, None, False)],
)
def test_only_short_prompts_with_a_short_declared_output_borrow(
    prompt: int, output: int | None, lends: bool
) -> None:
    assert SPILLING.lenders(BATCH, Demand(1, prompt, prompt), output) == (
        ("latency",) if lends else ()
    )


def test_a_pool_does_not_lend_to_its_own() -> None:
    assert SPILLING.lenders(CHAT, Demand(1, 1, 1), 1) == ()


STATES = st.builds(
    PoolState,
    busy_fraction=st.floats(0, 1),
    room=st.sampled_from([None, "a"]),
    queue=st.sampled_from([None, "a"]),
    loan=st.sampled_from([None, "a"]),
    any_replica=st.just("a"),
)


@given(latency=STATES, throughput=STATES)
def test_chat_never_queues_for_throughput_while_a_latency_slot_is_free(
    latency: PoolState, throughput: PoolState
) -> None:
    placed = SPILLING.place(CHAT, "", {"latency": latency, "throughput": throughput})
    assert placed is not None
    if latency.room is not None:
        assert (placed.kind, placed.destination) == (Kind.HOME, CHAT)


@given(latency=STATES, throughput=STATES)
def test_work_that_is_not_deferrable_never_borrows(
    latency: PoolState, throughput: PoolState
) -> None:
    states = {"latency": latency, "throughput": throughput}
    for home in (CHAT, Destination("throughput")):
        placed = SPILLING.place(home, "", states)
        assert placed is not None
        assert placed.kind is not Kind.BORROW
