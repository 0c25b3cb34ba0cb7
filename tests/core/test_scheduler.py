"""The scheduler, one behaviour at a time: order, back-pressure, batches, trouble, staleness, ends, checkpoints.

The laws that hold under any interleaving are in `test_laws.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from driver import attempts, binary, prompts_named

from nevergiveup.events import Dispatched, Event, Failed, Judged, Planned, Published, Trained, WentStale
from nevergiveup.scheduler import MAX_TROUBLE, Scheduler
from nevergiveup.strategies import DynamicSampling, FixedK, GvmRaft, Knapsack, NeverGiveUp, ReinforceAda, SpeedRL
from nevergiveup.types import Attempt, Completion, Decision, Group, Prompt, Request, Verdict

ALWAYS_RETRY = NeverGiveUp(4, p=1.0, max_attempts=1000)
WRONG, RIGHT, MIXED = [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]


def scheduler_for(strategy: Any, n_prompts: int, **arguments: Any) -> tuple[Scheduler, list[Event]]:
    events: list[Event] = []
    arguments = {"n_groups": 2, **arguments}
    return Scheduler(strategy, prompts_named(n_prompts), on_event=events.append, **arguments), events


def requests(scheduler: Scheduler) -> list[Request]:
    """All that can be dispatched now."""
    found = []
    while (request := scheduler.next()) is not None:
        found.append(request)
    return found


def only_request(scheduler: Scheduler) -> Request:
    (request,) = requests(scheduler)
    return request


def deliver(scheduler: Scheduler, request: Request, rewards: list[Any]) -> Verdict:
    decision = scheduler.deliver(request.id, attempts(rewards, scheduler.version))
    assert decision is not None
    return decision.verdict


# ------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_groups": 0}, "n_groups = 0"),
        ({"n_groups": 2, "lag": -1}, "lag = -1"),
        ({"n_groups": 8, "max_pending": 7}, "max_pending = 7 is below n_groups = 8"),
        ({"n_groups": 2, "retry_order": "middle"}, "retry_order = 'middle'"),
        ({"n_groups": 2, "max_barren_epochs": 0}, "max_barren_epochs = 0"),
        ({"n_groups": 2, "max_epochs": 0}, "max_epochs = 0"),
        ({"n_groups": 2, "max_completions": 0}, "max_completions = 0"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(NeverGiveUp(), prompts_named(3), **arguments)


def test_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match="data set is empty"):
        Scheduler(NeverGiveUp(), [], n_groups=1)


# ---------------------------------------------------------------------------------- order and pressure


def test_every_row_once_an_epoch_in_an_order_of_its_own() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.0), 50, max_epochs=3)
    orders: list[list[str]] = []
    while (request := scheduler.next()) is not None:
        if request.visit == len(orders):
            orders.append([])
        orders[request.visit].append(request.prompt.id)
        deliver(scheduler, request, WRONG if request.visit < 2 else RIGHT)
    assert [len(order) for order in orders] == [50, 50, 50]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1
    assert scheduler.finished == "all 3 passes over the data are done"
    assert scheduler.epoch == 2


def test_back_pressure_bounds_what_is_open_ready_or_in_the_running_step() -> None:
    scheduler, _ = scheduler_for(FixedK(), 100, n_groups=4, lag=0.5)
    assert scheduler.max_pending == 6
    first = requests(scheduler)
    assert len(first) == 6
    for request in first:
        deliver(scheduler, request, MIXED)
        assert scheduler.next() is None
    assert scheduler.n_ready == 6
    batch = scheduler.take()
    assert batch is not None
    assert len(batch.groups) == 4
    assert scheduler.next() is None, "the step is still running"
    assert scheduler.take() is None
    scheduler.publish(1)
    assert len(requests(scheduler)) == 4


def test_in_flight_stays_constant_under_retries() -> None:
    """Each finished attempt causes exactly one dispatch: its own retry or the next prompt."""
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.5), 1000, n_groups=8, lag=1)
    in_flight = requests(scheduler)
    for _ in range(300):
        deliver(scheduler, in_flight.pop(0), WRONG)
        in_flight.append(only_request(scheduler))
        assert len(in_flight) == 16


@pytest.mark.parametrize(("order", "position"), [("front", 0), ("back", 2)])
def test_retry_order(order: str, position: int) -> None:
    scheduler, _ = scheduler_for(ALWAYS_RETRY, 10, n_groups=4, lag=0, retry_order=order)
    first = scheduler.next()  # the other three wait in the queue
    assert first is not None
    second = scheduler.next()
    assert second is not None
    assert deliver(scheduler, first, WRONG) is Verdict.RETRY
    waiting = requests(scheduler)
    assert [request.prompt.id for request in waiting].index(first.prompt.id) == position
    assert waiting[position].round == 2
    assert waiting[position].visit == first.visit


def test_a_row_whose_chain_is_still_live_waits_for_its_next_visit() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.0), 3, n_groups=3, lag=1)
    slow, *others = requests(scheduler)
    visits = Counter({slow.prompt.id: 1})
    for request in others:
        deliver(scheduler, request, RIGHT)
        visits[request.prompt.id] += 1
    again = requests(scheduler)
    for request in again:
        visits[request.prompt.id] += 1
        deliver(scheduler, request, RIGHT)
    assert requests(scheduler) == [], "the next epoch begins when all visits of this one have begun"
    assert {request.visit for request in again} == {1}
    deliver(scheduler, slow, RIGHT)
    late, *_ = requests(scheduler)
    assert (late.prompt.id, late.visit) == (slow.prompt.id, 1)


def test_repeated_rows_are_visited_each() -> None:
    scheduler = Scheduler(NeverGiveUp(p=0.0), [Prompt("same"), Prompt("same")], n_groups=2, max_epochs=1)
    first, second = requests(scheduler)
    assert first.seed != second.seed


def test_a_retired_prompt_is_never_visited_again() -> None:
    @dataclass(frozen=True)
    class RetiresWhatIsSolved(DynamicSampling):
        def judge(self, group: Group, rng: Random) -> Decision:
            verdict = super().judge(group, rng).verdict
            return Decision(verdict, retire=verdict is Verdict.SOLVED)

    scheduler, _ = scheduler_for(RetiresWhatIsSolved(), 4, n_groups=4, lag=1)
    visits: Counter[str] = Counter()
    for _ in range(4):
        for request in requests(scheduler):
            visits[request.prompt.id] += 1
            deliver(scheduler, request, RIGHT if request.prompt.id in ("p0", "p1") else MIXED)
        while scheduler.take() is not None:
            scheduler.publish(scheduler.version + 1)
    assert (visits["p0"], visits["p1"]) == (1, 1)
    assert min(visits["p2"], visits["p3"]) >= 3

    scheduler, _ = scheduler_for(RetiresWhatIsSolved(), 4, n_groups=4, lag=1)
    for request in requests(scheduler):
        deliver(scheduler, request, RIGHT)
    assert scheduler.next() is None
    assert scheduler.finished == "every prompt has been retired by the strategy"


def test_a_strategy_decides_how_many_more_it_asks_for() -> None:
    @dataclass(frozen=True)
    class AsksForMore(NeverGiveUp):
        def judge(self, group: Group, rng: Random) -> Decision:
            decision = super().judge(group, rng)
            return Decision(Verdict.RETRY, 10) if decision.verdict is Verdict.RETRY else decision

    scheduler, _ = scheduler_for(AsksForMore(4, p=1.0, window=0, max_attempts=9), 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), WRONG)
    request = only_request(scheduler)
    assert request.n == len(request.seeds) == 10
    deliver(scheduler, request, [1, *[0] * 9])
    scheduler.publish(1)
    assert scheduler.take() is None
    assert only_request(scheduler).n == 4, "what went stale starts over"
    assert scheduler.ledger.drawn == 18


# ----------------------------------------------------------------------------------------------- batches


def test_a_batch_holds_the_oldest_ready_groups() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(), 10, n_groups=2, lag=1)
    first = requests(scheduler)
    for request in reversed(first):
        deliver(scheduler, request, MIXED)
    batch = scheduler.take()
    assert batch is not None
    assert [group.prompt for group in batch.groups] == [first[3].prompt, first[2].prompt]
    assert batch.n_completions == 8
    assert batch.groups[0].weights == (0.75, -0.25, -0.25, -0.25)
    assert (batch.groups[0].baseline, batch.groups[0].tried, batch.groups[0].rounds) == (0.25, 4, 1)


def test_nothing_is_asked_for_while_enough_batches_are_ready_or_in_training() -> None:
    """lag 1, N = 2: four groups. More may be open, and their retries wait too, until a step is done."""
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.5), 100, n_groups=2, lag=1, max_pending=8)
    in_flight = requests(scheduler)
    assert len(in_flight) == 8
    for request in in_flight[:4]:
        deliver(scheduler, request, MIXED)
    for request in in_flight[4:6]:
        deliver(scheduler, request, WRONG)
    assert scheduler.next() is None
    assert scheduler.take() is not None
    assert scheduler.next() is None, "two in training and two ready are as far ahead"
    scheduler.publish(1)
    assert len(requests(scheduler)) == 4, "two open in flight, two ready, four more"


def test_a_small_data_set_trains_on_what_there_is() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(), 3, n_groups=8, lag=1)
    first, *others = requests(scheduler)
    for request in others:
        deliver(scheduler, request, MIXED)
    assert scheduler.take() is None, "one is still in flight"
    deliver(scheduler, first, MIXED)
    batch = scheduler.take()
    assert batch is not None
    assert len(batch.groups) == 3
    assert scheduler.finished is None


def test_attempts_that_a_strategy_leaves_out_are_counted_apart() -> None:
    @dataclass(frozen=True)
    class KeepsOnePair(NeverGiveUp):
        def weigh(self, group: Group) -> list[float | None]:
            rewards = [attempt.reward for attempt in group.fresh]
            weights: list[float | None] = [None] * len(rewards)
            weights[rewards.index(1)], weights[rewards.index(0)] = 0.5, -0.5
            return weights

    scheduler, events = scheduler_for(KeepsOnePair(), 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), MIXED)
    batch = scheduler.take()
    assert batch is not None
    assert batch.n_completions == 2
    assert (scheduler.ledger.trained, scheduler.ledger.left_out) == (2, 2)
    trained = events[-1]
    assert isinstance(trained, Trained)
    assert (trained.n_trained, trained.n_left_out, trained.ages) == (2, 2, (0, 0))
    scheduler.check_balance()


def test_a_strategy_with_the_wrong_number_of_weights_is_an_error() -> None:
    @dataclass(frozen=True)
    class Forgets(NeverGiveUp):
        def weigh(self, group: Group) -> list[float | None]:
            return [1.0]

    scheduler, _ = scheduler_for(Forgets(), 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), MIXED)
    with pytest.raises(ValueError, match="1 weights for 4 attempts"):
        scheduler.take()


# --------------------------------------------------------------------------------- bad calls and trouble


def test_bad_deliveries_are_refused_and_change_nothing() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(), 4)
    request = scheduler.next()
    assert request is not None
    n_events, state = len(events), scheduler.state_dict()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: scheduler.deliver(99, attempts(WRONG)), "request 99 is not in flight"),
        (lambda: scheduler.fail(99, "gone"), "request 99 is not in flight"),
        (lambda: scheduler.deliver(request.id, attempts([0] * 5)), "asked for 4 completions but got 5 attempts"),
        (lambda: scheduler.deliver(request.id, attempts([0] * 3), 2), "3 attempts and 2 unverified"),
        (lambda: scheduler.deliver(request.id, [], -1), "-1 unverified"),
        (lambda: scheduler.deliver(request.id, attempts([0, 2, 0, 0])), "reward 2 of prompt .* above its max_reward 1"),
        (lambda: scheduler.deliver(request.id, attempts([0, float("nan")])), "finite number, not nan"),
        (lambda: scheduler.deliver(request.id, attempts([0, float("-inf")])), "finite number, not -inf"),
        (lambda: scheduler.publish(-1), "older than the published 0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert scheduler.state_dict() == state
    assert len(events) == n_events
    assert deliver(scheduler, request, RIGHT) is Verdict.SOLVED
    with pytest.raises(ValueError, match=f"request {request.id} is not in flight"):
        scheduler.deliver(request.id, attempts(RIGHT))


def test_rewards_of_any_number_type_are_exact() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(), 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), [True, 0.0, 0.1, Fraction(1, 3)])
    judged = events[-1]
    assert isinstance(judged, Judged)
    assert judged.rewards == (1, 0, Fraction(0.1), Fraction(1, 3))
    assert judged.total == 1 + Fraction(0.1) + Fraction(1, 3)


def test_a_lost_request_is_asked_three_times_in_all_with_new_seeds() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(), 1, n_groups=1, max_epochs=1)
    seeds = []
    for _ in range(MAX_TROUBLE):
        request = only_request(scheduler)
        assert request.round == 1
        seeds.append(request.seed)
        scheduler.fail(request.id, "connection lost")
    assert len(set(seeds)) == MAX_TROUBLE == 3
    assert scheduler.next() is None
    assert scheduler.finished == "all 1 passes over the data are done"
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.closed for event in failed] == [False, False, True]
    assert {event.reason for event in failed} == {"connection lost"}
    assert scheduler.ledger.failed == 12
    assert scheduler.ledger.chains == {"opened": 1, "failed": 1}


def test_a_good_round_forgives_earlier_trouble() -> None:
    scheduler, _ = scheduler_for(ALWAYS_RETRY, 1, n_groups=1)
    for _ in range(5):
        for _ in range(MAX_TROUBLE - 1):
            scheduler.fail(only_request(scheduler).id, "connection lost")
        assert deliver(scheduler, only_request(scheduler), WRONG) is Verdict.RETRY
    request = only_request(scheduler)
    assert request.round == 6
    deliver(scheduler, request, MIXED)
    batch = scheduler.take()
    assert batch is not None
    assert batch.groups[0].tried == 24


def test_a_chain_with_history_that_gets_no_verdict_is_asked_again() -> None:
    scheduler, events = scheduler_for(ALWAYS_RETRY, 1, n_groups=1, max_epochs=1)
    deliver(scheduler, only_request(scheduler), WRONG)
    for attempt in range(MAX_TROUBLE):
        assert scheduler.deliver(only_request(scheduler).id, [], n_unverified=4) is None
        judged = events[-1]
        assert isinstance(judged, Judged)
        assert judged.verdict == "trouble"
        assert (judged.round, judged.tried, judged.total) == (2, 4, 0)
        assert judged.outcome == ("unverified" if attempt == MAX_TROUBLE - 1 else "")
    assert scheduler.ledger.unverified == 16  # the four wrong ones of the first round had no use either
    assert scheduler.ledger.chains["unverified"] == 1
    scheduler.check_balance()


def test_a_chain_with_history_that_is_lost_for_good_keeps_the_balance() -> None:
    scheduler, _ = scheduler_for(ALWAYS_RETRY, 1, n_groups=1, max_epochs=1)
    deliver(scheduler, only_request(scheduler), WRONG)
    for _ in range(MAX_TROUBLE):
        scheduler.fail(only_request(scheduler).id, "connection lost")
    assert scheduler.ledger.failed == 16
    assert scheduler.finished is not None
    scheduler.check_balance()


def test_an_empty_delivery_is_a_failure() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(), 1, n_groups=1)
    assert scheduler.deliver(only_request(scheduler).id, []) is None
    assert isinstance(events[-1], Failed)
    assert scheduler.ledger.failed == 4


# --------------------------------------------------------------------------------------------- staleness


def test_a_ready_group_that_lost_its_contrast_is_asked_again_with_its_history() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(window=1), 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), MIXED)
    scheduler.publish(2)
    assert scheduler.take() is None
    assert events[-1] == WentStale("p0", 0, 0, False, 2)
    assert scheduler.ledger.stale == 4
    request = only_request(scheduler)
    assert (request.round, request.visit) == (2, 0)
    assert deliver(scheduler, request, MIXED) is Verdict.TRAIN, "the success that went stale is not there to be beaten"
    batch = scheduler.take()
    assert batch is not None
    (group,) = batch.groups
    assert (group.tried, group.baseline, group.rounds) == (8, 0.25, 2)
    assert scheduler.ledger.chains == {"opened": 1, "went_stale": 1, "trained": 1}
    scheduler.check_balance()


def test_a_group_that_goes_stale_again_and_again_is_closed_till_the_next_epoch() -> None:
    scheduler, events = scheduler_for(NeverGiveUp(window=0), 1, n_groups=1, lag=0)
    for _ in range(MAX_TROUBLE):
        request = only_request(scheduler)
        assert request.visit == 0
        deliver(scheduler, request, MIXED)
        scheduler.publish(scheduler.version + 1)
        assert scheduler.take() is None
    assert [event.closed for event in events if isinstance(event, WentStale)] == [False, False, True]
    assert scheduler.ledger.chains["stale"] == 1
    request = only_request(scheduler)
    assert (request.visit, request.round) == (1, 1)
    scheduler.check_balance()


def test_stale_groups_make_room_for_others_in_the_batch() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(window=1), 10, n_groups=2, lag=1)
    old, *newer = requests(scheduler)
    scheduler.deliver(old.id, attempts(MIXED, 0))
    scheduler.publish(2)
    deliver(scheduler, newer[0], MIXED)
    assert scheduler.take() is None, "one of the two is stale, and others are on their way"
    deliver(scheduler, newer[1], MIXED)
    batch = scheduler.take()
    assert batch is not None
    assert [group.prompt for group in batch.groups] == [newer[0].prompt, newer[1].prompt]


def test_unknown_versions_are_kept_and_shown() -> None:
    """Oracle 4.4."""
    scheduler, events = scheduler_for(NeverGiveUp(window=0), 1, n_groups=1, lag=0)
    request = only_request(scheduler)
    scheduler.deliver(request.id, [Attempt(1, None), Attempt(0, 0), Attempt(0, None), Attempt(0, None)])
    scheduler.publish(9)
    batch = scheduler.take()
    assert batch is not None
    assert [attempt.version for attempt in batch.groups[0].attempts] == [None] * 3
    trained = events[-1]
    assert isinstance(trained, Trained)
    assert trained.ages == (-1, -1, -1)


def test_fixed_k_trains_on_the_fresh_part_of_a_group() -> None:
    scheduler, _ = scheduler_for(FixedK(window=1), 1, n_groups=1, lag=0)
    request = only_request(scheduler)
    scheduler.deliver(request.id, [Attempt(1, 0), Attempt(0, 1), Attempt(1, 1), Attempt(0, 1)])
    scheduler.publish(2)
    batch = scheduler.take()
    assert batch is not None
    assert batch.groups[0].weights == (-1 / 3, 2 / 3, -1 / 3)
    assert scheduler.ledger.stale == 1


# -------------------------------------------------------------------------------------------------- ends


def play(scheduler: Scheduler, rewards: Callable[[Request], list[Any]]) -> tuple[str, int]:
    """Everything that can be dispatched goes out, everything comes back, a step is trained; to the end."""
    n_steps = 0
    for _ in range(100_000):
        reason = scheduler.finished
        if reason is not None:
            scheduler.check_balance()
            return reason, n_steps
        for request in requests(scheduler):
            deliver(scheduler, request, rewards(request))
        if scheduler.take() is not None:
            n_steps += 1
            scheduler.publish(scheduler.version + 1)
    raise AssertionError("no end")


@pytest.mark.parametrize("n_prompts", [1, 5, 200])
@pytest.mark.parametrize("n_barren", [1, 3])
def test_data_that_can_never_train_ends_with_a_reason(n_prompts: int, n_barren: int) -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.5), n_prompts, n_groups=16, max_barren_epochs=n_barren)
    reason, n_steps = play(scheduler, lambda request: WRONG)
    assert reason == (
        f"{n_barren} passes over the data gave nothing to train on: 100 % of groups given up without a success"
    )
    assert n_steps == 0
    assert scheduler.ledger.chains["opened"] == n_barren * n_prompts


def test_the_reason_says_what_became_of_the_groups() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.0), 4, n_groups=4)
    reason, _ = play(scheduler, lambda request: WRONG if request.prompt.id == "p0" else RIGHT)
    assert reason.endswith(": 75 % of groups solved at once, 25 % of groups given up without a success")


def test_a_pass_that_is_still_in_flight_is_not_barren() -> None:
    """The data set is smaller than what may be pending, so the next pass could begin before anything came back."""
    scheduler, _ = scheduler_for(NeverGiveUp(), 4, n_groups=4, lag=1, max_barren_epochs=1)
    for request in requests(scheduler):
        deliver(scheduler, request, MIXED)
    assert scheduler.take() is not None
    scheduler.publish(1)
    assert scheduler.finished is None
    assert len(requests(scheduler)) == 4


def test_a_success_in_the_last_moment_goes_on() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.0), 20, n_groups=1, lag=3, max_barren_epochs=2)
    reason, n_steps = play(scheduler, lambda r: MIXED if r.visit == 1 and r.prompt.id == "p7" else WRONG)
    assert n_steps == 1
    assert reason.startswith("2 passes over the data gave nothing")
    assert scheduler.epoch in (3, 4)


def test_the_budget_of_completions_is_kept_exactly() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(p=0.9), 50, n_groups=4, max_completions=203)
    reason, n_steps = play(scheduler, binary)
    assert reason == "the budget of 203 completions is spent"
    assert scheduler.ledger.drawn == 200
    assert n_steps > 0
    assert scheduler.n_ready == 0, "what was ready is trained on, in a smaller batch if need be"


def test_the_last_batch_may_be_smaller() -> None:
    scheduler, _ = scheduler_for(FixedK(), 10, n_groups=4, lag=1, max_epochs=1)
    sizes = []
    while scheduler.finished is None:
        for request in requests(scheduler):
            deliver(scheduler, request, MIXED)
        batch = scheduler.take()
        assert batch is not None
        sizes.append(len(batch.groups))
        scheduler.publish(scheduler.version + 1)
    assert sizes == [4, 4, 2]


# ------------------------------------------------------------------------------------------- checkpoints


def test_the_order_of_events_tells_the_story() -> None:
    scheduler, events = scheduler_for(ALWAYS_RETRY, 1, n_groups=1)
    deliver(scheduler, only_request(scheduler), WRONG)
    deliver(scheduler, only_request(scheduler), MIXED)
    scheduler.take()
    scheduler.publish(1)
    kinds = [Dispatched, Judged, Dispatched, Judged, Trained, Published]
    assert [type(event) for event in events] == kinds
    assert events[4] == Trained("p0", 0, 2, 8, 0, 8, 1, (0,) * 8, 0)


def test_a_checkpoint_keeps_tokens_and_exact_numbers() -> None:
    top = (((5, 1), (6, 0), (2, 5)), ((-0.25, -2.0),) * 3)
    completion = Completion((5, 6, 2), (-0.25, -1.0, -0.125), "so", "stop", 0, 1, (True, False, True), *top)
    plain = Completion((7,), (-0.5,), "no", "length", 0, 0)
    scheduler, _ = scheduler_for(NeverGiveUp(), 2, n_groups=2, seed=3)
    first, second = requests(scheduler)
    scheduler.deliver(
        first.id, [Attempt(Fraction(0.1), 0, completion), Attempt(Fraction(1, 3), None, plain), Attempt(0, 0)]
    )
    state = json.loads(json.dumps(scheduler.state_dict()))
    restored, _ = scheduler_for(NeverGiveUp(), 2, n_groups=2, seed=3)
    restored.load_state_dict(state)
    assert restored.ledger.reissued == 4
    assert restored.held == 3
    restored.check_balance()
    assert restored.next() == second
    for each in (scheduler, restored):
        deliver(each, second, MIXED)
    assert restored.take() == scheduler.take()
    assert restored.finished is None


def test_a_checkpoint_taken_twice_issues_again_once() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(), 4, n_groups=2, lag=0)
    in_flight = requests(scheduler)
    for _ in range(3):
        state = json.loads(json.dumps(scheduler.state_dict()))
        scheduler, _ = scheduler_for(NeverGiveUp(), 4, n_groups=2, lag=0)
        scheduler.load_state_dict(state)
    assert scheduler.ledger.reissued == 8
    assert requests(scheduler) == in_flight
    scheduler.check_balance()


@pytest.mark.parametrize("slow", ["p0", "p1"])
def test_what_was_in_flight_is_issued_again_before_anything_new_is_opened(slow: str) -> None:
    """A row counts as live until its chain closes, so opening others too early would change the order of the next epoch."""
    orders = []
    for restore in (False, True):
        scheduler, _ = scheduler_for(NeverGiveUp(), 2, n_groups=2, lag=0)
        in_flight = {request.prompt.id: request for request in requests(scheduler)}
        late = in_flight.pop(slow)
        (quick,) = in_flight.values()
        deliver(scheduler, quick, RIGHT)
        if restore:
            state = scheduler.state_dict()
            scheduler, _ = scheduler_for(NeverGiveUp(), 2, n_groups=2, lag=0)
            scheduler.load_state_dict(state)
            assert scheduler.finished is None
            assert scheduler.take() is None
            assert scheduler.next() == late
        deliver(scheduler, late, RIGHT)
        orders.append([request.prompt.id for request in requests(scheduler)])
    assert orders[0] == orders[1]


def test_what_was_in_flight_is_issued_again_even_when_far_enough_ahead() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(), 10, n_groups=2, lag=0, max_pending=5)
    in_flight = requests(scheduler)
    for request in in_flight[:2]:
        deliver(scheduler, request, MIXED)
    restored, _ = scheduler_for(NeverGiveUp(), 10, n_groups=2, lag=0, max_pending=5)
    restored.load_state_dict(scheduler.state_dict())
    assert requests(restored) == in_flight[2:]


def test_a_checkpoint_of_other_data_or_another_seed_is_refused() -> None:
    state = scheduler_for(NeverGiveUp(), 3)[0].state_dict()
    with pytest.raises(ValueError, match="data set differs"):
        scheduler_for(NeverGiveUp(), 4)[0].load_state_dict(state)
    renamed = Scheduler(NeverGiveUp(), [Prompt("p0"), Prompt("p1"), Prompt("q2")], n_groups=2)
    with pytest.raises(ValueError, match="data set differs"):
        renamed.load_state_dict(state)
    with pytest.raises(ValueError, match="seed = 1 differs from the saved 0"):
        scheduler_for(NeverGiveUp(), 3, seed=1)[0].load_state_dict(state)


def test_the_run_may_be_made_longer_after_a_checkpoint() -> None:
    scheduler, _ = scheduler_for(NeverGiveUp(), 3, n_groups=3, max_epochs=1)
    for request in requests(scheduler):
        deliver(scheduler, request, RIGHT)
    assert scheduler.finished == "all 1 passes over the data are done"
    longer, _ = scheduler_for(NeverGiveUp(), 3, n_groups=3, max_epochs=2)
    longer.load_state_dict(scheduler.state_dict())
    assert longer.finished is None
    assert len(requests(longer)) == 3


# ------------------------------------------------------------------------------- batches by completions


def sizes_of_batches(scheduler: Scheduler, rewards: Callable[[Request], list[Any]]) -> list[list[int]]:
    """Trained completions of each group of each batch, of a run in which everything comes back at once."""
    sizes = []
    while scheduler.finished is None:
        for request in requests(scheduler):
            deliver(scheduler, request, rewards(request))
        if (batch := scheduler.take()) is not None:
            sizes.append([sum(weight is not None for weight in group.weights) for group in batch.groups])
            scheduler.publish(scheduler.version + 1)
        scheduler.check_balance()
    return sizes


def test_batches_are_cut_by_completions_and_the_rest_is_carried_over() -> None:
    """Groups of 4 and, after one all-wrong round, of 8: as many whole ones as fit into 12; none is lost."""
    scheduler, events = scheduler_for(
        NeverGiveUp(4, p=1.0, max_attempts=9), 30, n_completions=12, max_pending=8, max_epochs=1
    )
    sizes = sizes_of_batches(scheduler, lambda r: MIXED if r.round == 2 or int(r.prompt.id[1:]) % 3 else WRONG)
    assert {size for batch in sizes for size in batch} == {4, 8}
    assert all(sum(batch) <= 12 for batch in sizes)
    assert sum(map(len, sizes)) == 30
    assert scheduler.ledger.trained == scheduler.ledger.drawn == 20 * 4 + 10 * 8
    trained = [event.prompt for event in events if isinstance(event, Trained)]
    assert len(set(trained)) == 30
    for batch, after in pairwise(sizes[:-1]):
        assert sum(batch) + after[0] > 12, "the next group would have fitted"


def test_a_group_larger_than_a_batch_makes_one_alone() -> None:
    scheduler, _ = scheduler_for(FixedK(8), 5, n_completions=6, max_epochs=1)
    assert sizes_of_batches(scheduler, lambda _: [1, 0] * 4) == [[8]] * 5


def test_attempts_that_are_left_out_do_not_fill_a_batch() -> None:
    """Reinforce-Ada draws 8 and trains on 4 of them: 12 completions are three groups."""
    scheduler, _ = scheduler_for(ReinforceAda(), 12, n_completions=12, n_groups=4, max_epochs=1)
    assert sizes_of_batches(scheduler, lambda _: [1, 0] * 4) == [[4, 4, 4]] * 4
    assert (scheduler.ledger.trained, scheduler.ledger.left_out) == (48, 48)


def test_back_pressure_counts_completions_when_batches_do() -> None:
    scheduler, _ = scheduler_for(FixedK(4), 100, n_completions=8, lag=1, max_pending=50)
    for n in range(4):
        request = scheduler.next()
        assert request is not None, f"{4 * n} of 16 completions are ready"
        deliver(scheduler, request, MIXED)
    assert scheduler.next() is None
    assert scheduler.take() is not None
    assert scheduler.next() is None, "8 are ready and 8 in training"
    scheduler.publish(1)
    assert scheduler.next() is not None


# ------------------------------------------------------------------------------------------- allocators


def test_chains_wait_for_their_block() -> None:
    scheduler, events = scheduler_for(Knapsack(budget=4, block=3), 7, n_groups=3, max_pending=7, max_epochs=1)
    first = requests(scheduler)
    assert [event.prompt for event in events if isinstance(event, Planned)] == [request.prompt.id for request in first]
    assert len(first) == 6, "two blocks; the seventh waits"
    assert sum(request.n for request in first) == 24
    assert scheduler.n_open == 7
    for request in first[:5]:
        deliver(scheduler, request, [0] * request.n)
    assert requests(scheduler) == [], "something is still in flight"
    deliver(scheduler, first[5], [0] * first[5].n)
    assert scheduler.take() is not None
    scheduler.publish(1)
    (last,) = requests(scheduler)
    assert last.n == 4, "nothing else can move: it is decided alone"


def test_what_an_allocator_learned_is_in_the_checkpoint() -> None:
    """A prompt that is never solved gets more at its second visit than one that always is; also after a restore."""
    rewards = {"p0": 0, "p1": 1}

    def visit(scheduler: Scheduler) -> dict[str, int]:
        found = requests(scheduler)
        for request in found:
            deliver(scheduler, request, [rewards[request.prompt.id]] * request.n)
        scheduler.take()
        scheduler.publish(scheduler.version + 1)
        return {request.prompt.id: request.n for request in found}

    strategy = Knapsack(budget=8, block=2)
    scheduler, _ = scheduler_for(strategy, 2, n_groups=2, lag=0)
    assert visit(scheduler) == {"p0": 8, "p1": 8}
    state = json.loads(json.dumps(scheduler.state_dict()))
    second = visit(scheduler)
    assert second["p0"] > second["p1"]
    restored, _ = scheduler_for(strategy, 2, n_groups=2, lag=0)
    restored.load_state_dict(state)
    assert visit(restored) == second


@pytest.mark.parametrize("measured", [False, True])
def test_gradient_norms_are_asked_for_and_used_when_somebody_can_measure(measured: bool) -> None:
    strategy = GvmRaft(probe=4, budget=3, block=2)
    scheduler, events = scheduler_for(strategy, 2, gradient_norms=measured)
    for request in requests(scheduler):
        assert deliver(scheduler, request, MIXED) is Verdict.WAIT
    groups = scheduler.norms_wanted()
    assert [len(group.fresh) for group in groups] == ([4, 4] if measured else [])
    if measured:
        assert scheduler.next() is None, "the norms are missing"
        assert scheduler.take() is None
        assert scheduler.finished is None
        restored, _ = scheduler_for(strategy, 2, gradient_norms=True)
        restored.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        assert restored.norms_wanted() == groups
        scheduler.give_norms([1.0, 2.0])
        assert scheduler.norms_wanted() == []
    draws = [request.n for request in requests(scheduler)]
    assert draws == ([2, 4] if measured else [3, 3])
    planned = [event for event in events if isinstance(event, Planned)]
    assert [event.gradient_norm for event in planned] == ([1.0, 2.0] if measured else [None, None])
    scheduler.check_balance()


@pytest.mark.parametrize("norms", [[float("nan")], [-1.0], [1.0] * 9])
def test_bad_gradient_norms_are_refused(norms: list[float]) -> None:
    scheduler, _ = scheduler_for(GvmRaft(probe=2, block=1), 2, gradient_norms=True)
    deliver(scheduler, requests(scheduler)[0], [1, 0])
    with pytest.raises(ValueError, match="gradient norms"):
        scheduler.give_norms(norms)


def test_a_chain_that_is_closed_by_its_plan_makes_room_at_once() -> None:
    """Everything is wrong, so that GVM gives nothing: the run goes on to other prompts, and ends with a reason."""
    scheduler, _ = scheduler_for(GvmRaft(probe=2, budget=2, block=1), 20, n_groups=1, max_barren_epochs=2)
    reason, _ = play(scheduler, lambda request: [0] * request.n)
    assert "2 passes over the data gave nothing to train on: 100 % of groups given up" in reason
    assert scheduler.ledger.drawn == 2 * 20 * 2


def test_speed_merges_both_rounds() -> None:
    scheduler, _ = scheduler_for(SpeedRL(n_init=2, n_cont=3), 1, n_groups=1, max_epochs=1)
    deliver(scheduler, only_request(scheduler), [1, 0])
    more = only_request(scheduler)
    assert more.n == 3
    deliver(scheduler, more, [0, 0, 0])
    batch = scheduler.take()
    assert batch is not None
    assert batch.groups[0].weights == (0.8, -0.2, -0.2, -0.2, -0.2)
