import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from app.contracts.placement import Demand, Kind
from app.pools.admission import AdmissionLimits, Gate, State, Ticket, TurnedAway
from app.pools.lending import Lending, LendingRules
from tests.unit.fakes import Clock


def gate(
    slots: int = 4,
    headroom: int = 1,
    queued: int = 0,
    lending: LendingRules | None = None,
    kv_tokens: int = 1000,
) -> tuple[Gate, Clock]:
    clock = Clock()
    limits = AdmissionLimits(slots, kv_tokens, headroom, queued, 10_000, aging_s=10.0)
    return Gate(limits, Lending(lending, clock) if lending else None, clock), clock


def ticket(slots: int = 1, kind: Kind = Kind.HOME, **fields: object) -> Ticket:
    return Ticket(Demand(slots, 10, 20 * slots), kind, "router", **fields)  # type: ignore[arg-type]


def offered(to: Gate, *tickets: Ticket) -> list[State]:
    for one in tickets:
        to.offer(one)
    return [one.state for one in tickets]


LOANS = LendingRules(max_slots=2, yield_to="slot", resume_after_s=2.0, max_tpot_increase=1.25)


def test_a_burst_takes_every_slot_and_one_more_is_turned_away_at_once() -> None:
    four, _ = gate()
    assert offered(four, *(ticket() for _ in range(4))) == [State.RUNNING] * 4
    with pytest.raises(TurnedAway, match="all 4 slots, or the KV"):
        four.offer(ticket())
    assert four.occupancy().queued == 0


def test_a_request_counts_a_slot_a_sequence() -> None:
    four, _ = gate()
    offered(four, ticket(slots=3))
    with pytest.raises(TurnedAway):
        four.offer(ticket(slots=2))
    assert offered(four, ticket()) == [State.RUNNING]


def test_kv_tokens_are_reserved_at_worst_and_given_back_when_counted() -> None:
    four, _ = gate(queued=1, kv_tokens=100)
    first = Ticket(Demand(1, 80, 90), Kind.HOME, "router")
    second = Ticket(Demand(1, 10, 50), Kind.HOME, "router")
    assert offered(four, first, second) == [State.RUNNING, State.WAITING]
    four.counted(first, 30)
    assert second.state is State.RUNNING
    assert four.occupancy().kv_tokens == 40 + 50


def test_deferrable_work_never_takes_the_headroom() -> None:
    four, _ = gate(queued=9)
    batch = [ticket(is_deferrable=True) for _ in range(5)]
    assert offered(four, *batch) == [State.RUNNING] * 3 + [State.WAITING] * 2
    assert offered(four, ticket()) == [State.RUNNING]


def test_the_queue_goes_by_priority_then_arrival_and_waiting_makes_up_for_it() -> None:
    one, clock = gate(slots=1, headroom=0, queued=9)
    holder = ticket()
    old_batch, late_batch = ticket(priority=10), ticket(priority=10)
    urgent = ticket(priority=-20)
    offered(one, holder, old_batch)
    clock.now += 299.0
    offered(one, late_batch, urgent)
    one.release(holder)
    assert urgent.state is State.RUNNING
    one.release(urgent)
    assert old_batch.state is State.RUNNING
    assert late_batch.state is State.WAITING
    clock.now += 2.0
    newest = ticket(priority=-20)
    one.offer(newest)
    one.release(old_batch)
    assert newest.state is State.RUNNING


def test_nothing_starves() -> None:
    """Thirty levels at ten seconds each: after 300 s of waiting a batch line is next."""
    one, clock = gate(slots=1, headroom=0, queued=9)
    holder, line = ticket(), ticket(priority=10)
    offered(one, holder, line)
    clock.now += 301.0
    urgent = ticket(priority=-20)
    one.offer(urgent)
    one.release(holder)
    assert (line.state, urgent.state) == (State.RUNNING, State.WAITING)


def test_a_full_queue_turns_away_whoever_is_last() -> None:
    one, _ = gate(slots=1, headroom=0, queued=1)
    holder, line, urgent = ticket(), ticket(priority=10), ticket(priority=-20)
    offered(one, holder, line)
    with pytest.raises(TurnedAway, match="1 requests wait already"):
        one.offer(ticket(priority=10))
    assert offered(one, urgent) == [State.WAITING]
    assert line.state is State.DISPLACED


def test_what_must_finish_waits_beyond_the_bound() -> None:
    one, _ = gate(slots=1, headroom=0, queued=0)
    back = ticket(must_finish=True, is_deferrable=True)
    assert offered(one, ticket(), back) == [State.RUNNING, State.WAITING]


def test_time_already_waited_elsewhere_counts() -> None:
    one, _ = gate(slots=1, headroom=0, queued=9)
    holder, first, back = ticket(), ticket(), ticket(waited_s=5.0)
    offered(one, holder, first, back)
    one.release(holder)
    assert (back.state, first.state) == (State.RUNNING, State.WAITING)


def test_retry_after_is_the_measured_drain_and_grows_with_each_promise() -> None:
    """Two requests leave in 8 s: a place is due every 4 s, and each one told is sent behind."""
    two, clock = gate(slots=2, headroom=0)
    running = [ticket(), ticket()]
    offered(two, *running)
    for leaving in tuple(running):
        clock.now += 4.0
        two.release(leaving)
        two.offer(ticket())
    waits = []
    for _ in range(3):
        with pytest.raises(TurnedAway) as refused:
            two.offer(ticket())
        waits.append(refused.value.retry_after_s)
    assert waits == [2, 4, 6]


def test_no_more_are_sent_to_one_second_than_there_are_places() -> None:
    """Ten leave a second, but two slots cannot take ten who come back on the same second."""
    two, clock = gate(slots=2, headroom=0)
    for _ in range(20):
        passing = ticket()
        two.offer(passing)
        clock.now += 0.1
        two.release(passing)
    offered(two, ticket(), ticket())
    waits = []
    for _ in range(4):
        with pytest.raises(TurnedAway) as refused:
            two.offer(ticket())
        waits.append(refused.value.retry_after_s)
    assert waits == [1, 1, 2, 2]


def test_idle_slots_are_lent_outside_the_headroom_and_up_to_the_share() -> None:
    four, clock = gate(headroom=1, lending=LOANS)
    offered(four, ticket())
    assert four.occupancy().lendable_slots == 2
    lent = [ticket(kind=Kind.BORROW, is_deferrable=True) for _ in range(2)]
    assert offered(four, *lent) == [State.RUNNING] * 2
    with pytest.raises(TurnedAway):
        four.offer(ticket(kind=Kind.BORROW, is_deferrable=True))
    assert four.occupancy().lent_slots == 2
    assert clock.now == 100.0


def test_loans_follow_one_another_at_the_interval() -> None:
    rules = LendingRules(2, "slot", resume_after_s=2.0, max_tpot_increase=1.25, interval_s=0.5)
    four, clock = gate(headroom=1, lending=rules)
    first, second = (ticket(kind=Kind.BORROW, is_deferrable=True) for _ in range(2))
    four.offer(first)
    assert four.occupancy().lendable_slots == 0
    with pytest.raises(TurnedAway):
        four.offer(second)
    clock.now += 0.5
    assert offered(four, second) == [State.RUNNING]


def test_a_lent_slot_that_is_needed_is_taken_back_latest_first() -> None:
    four, _ = gate(headroom=1, lending=LOANS)
    early, late = (ticket(kind=Kind.BORROW, is_deferrable=True) for _ in range(2))
    offered(four, early, late, ticket(), ticket())
    chat = ticket()
    assert offered(four, chat) == [State.WAITING]
    assert (early.state, late.state) == (State.RUNNING, State.EVICTED)
    four.release(late)
    assert chat.state is State.RUNNING


def test_chat_that_reaches_the_headroom_stops_lending_for_a_while() -> None:
    four, clock = gate(headroom=1, lending=LOANS)
    chats = [ticket() for _ in range(4)]
    offered(four, *chats)
    for chat in chats:
        four.release(chat)
    assert four.occupancy().lendable_slots == 0
    clock.now += 2.0
    assert four.occupancy().lendable_slots == 2


def test_where_loans_yield_to_chat_the_first_one_ends_them_all() -> None:
    rules = LendingRules(2, "chat", resume_after_s=2.0, max_tpot_increase=1.25)
    four, clock = gate(headroom=1, lending=rules)
    lent = ticket(kind=Kind.BORROW, is_deferrable=True)
    chat = ticket()
    assert offered(four, lent, chat) == [State.EVICTED, State.RUNNING]
    four.release(lent)
    clock.now += 60.0
    assert four.occupancy().lendable_slots == 0
    four.release(chat)
    assert four.occupancy().lendable_slots == 0
    clock.now += 2.0
    assert four.occupancy().lendable_slots == 2


def test_loans_that_cost_running_chats_too_much_end() -> None:
    four, _ = gate(headroom=1, lending=LOANS)
    chat = ticket()
    offered(four, chat)
    four.observe(0.010)
    lent = ticket(kind=Kind.BORROW, is_deferrable=True)
    four.offer(lent)
    four.observe(0.012)
    assert lent.state is State.RUNNING
    for _ in range(4):
        four.observe(0.020)
    assert lent.state is State.EVICTED
    assert four.occupancy().lendable_slots == 0


def test_no_more_chats_wait_than_slots_are_given_back() -> None:
    """Ten chats at four slots, two of them lent: two run, two wait for the lent ones, six go."""
    four, _ = gate(headroom=1, lending=LOANS)
    lent = [ticket(kind=Kind.BORROW, is_deferrable=True) for _ in range(2)]
    offered(four, *lent)
    away = 0
    chats = [ticket() for _ in range(10)]
    for chat in chats:
        try:
            four.offer(chat)
        except TurnedAway:
            away += 1
    assert [c.state for c in chats[:4]] == [State.RUNNING] * 2 + [State.WAITING] * 2
    assert away == 6
    assert [t.state for t in lent] == [State.EVICTED] * 2
    for one in lent:
        four.release(one)
    assert chats[3].state is State.RUNNING


def test_a_loan_gives_back_kv_tokens_too() -> None:
    four, _ = gate(headroom=1, lending=LOANS, kv_tokens=100)
    loan = Ticket(Demand(1, 10, 90), Kind.BORROW, "router", is_deferrable=True)
    chat = Ticket(Demand(1, 10, 50), Kind.HOME, "router")
    assert offered(four, loan, chat) == [State.EVICTED, State.WAITING]


def test_a_queue_is_bounded_in_prompt_tokens() -> None:
    clock = Clock()
    limits = AdmissionLimits(1, 1000, 0, 9, max_queued_tokens=25, aging_s=10.0)
    one = Gate(limits, None, clock)
    offered(one, ticket(), ticket(), ticket())
    with pytest.raises(TurnedAway, match="25 tokens"):
        one.offer(ticket())


class GateMachine(RuleBasedStateMachine):
    """Whatever comes and goes: no limit is passed, and every ticket has one outcome."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.clock = gate(slots=4, headroom=1, queued=3, lending=LOANS, kv_tokens=200)
        self.all: list[Ticket] = []

    @rule(
        target=tickets,
        slots=st.integers(1, 3),
        kv_tokens=st.integers(1, 200),
        kind=st.sampled_from(Kind),
        priority=st.sampled_from([-20, 0, 10]),
        is_deferrable=st.booleans(),
    )
    def offer(
        self, slots: int, kv_tokens: int, kind: Kind, priority: int, is_deferrable: bool
    ) -> Ticket:
        made = Ticket(Demand(slots, 1, kv_tokens), kind, "router", priority, is_deferrable)
        if kind is Kind.BORROW:
            made.is_deferrable = True
        try:
            self.gate.offer(made)
        except TurnedAway:
            made.state = State.DONE
        self.all.append(made)
        return made

    @rule(gone=consumes(tickets))
    def release(self, gone: Ticket) -> None:
        if gone.state is not State.DONE:
            self.gate.release(gone)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def limits_hold(self) -> None:
        running = [t for t in self.all if t.state in (State.RUNNING, State.EVICTED)]
        waiting = [t for t in self.all if t.state is State.WAITING]
        assert sum(t.demand.slots for t in running) <= 4
        assert len(running) == 1 or sum(t.demand.kv_tokens for t in running) <= 200
        assert sum(t.demand.slots for t in running if t.kind is Kind.BORROW) <= 2
        assert len([t for t in waiting if not t.must_finish]) <= 3
        assert self.gate.occupancy().slots == sum(t.demand.slots for t in running)
        assert self.gate.occupancy().queued == len(waiting)

    @invariant()
    def nobody_waits_for_an_empty_replica(self) -> None:
        if not any(t.state in (State.RUNNING, State.EVICTED) for t in self.all):
            assert not any(t.state is State.WAITING for t in self.all)


TestGate = GateMachine.TestCase


@given(lent=st.integers(0, 8), free=st.integers(0, 8), headroom=st.integers(0, 8))
def test_lent_never_exceeds_the_share_nor_touches_the_headroom(
    lent: int, free: int, headroom: int
) -> None:
    rules = LendingRules(3, "slot", resume_after_s=0.0, max_tpot_increase=1.0)
    more = Lending(rules, Clock()).lendable(lent, free, headroom)
    assert 0 <= more <= max(0, 3 - lent)
    assert more == 0 or free - more >= headroom
