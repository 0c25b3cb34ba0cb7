"""Concrete cases with their right values, as far as they concern the core: C18, C21 to C26, C32, C35, C37."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from driver import Drive, attempts, binary, prompts_named

from nevergiveup.advantages import centred
from nevergiveup.events import Event, Failed, Judged, Reissued, Trained, WentStale
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import NeverGiveUp
from nevergiveup.types import Attempt, Group, Request, Verdict, exact

WRONG, RIGHT, MIXED = [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]


def ngu(**changes: Any) -> NeverGiveUp:
    """K = 4, T = 4, and a coin that always says: try again."""
    return NeverGiveUp(**{"k": 4, "p": 1.0, "window": 4, "max_attempts": 1000, **changes})


class OnePrompt:
    """A scheduler over one prompt, and what it said."""

    def __init__(self, strategy: NeverGiveUp, **arguments: Any) -> None:
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            strategy, prompts_named(1), n_groups=1, on_event=self.events.append, **{"lag": 0, **arguments}
        )

    def request(self) -> Request:
        request = self.scheduler.next()
        assert request is not None
        return request

    def round(self, rewards: list[Any], version: int | None = None, n_unverified: int = 0) -> Verdict | None:
        """One round; `version` is that of its completions, the current one by default."""
        sampled = self.scheduler.version if version is None else version
        decision = self.scheduler.deliver(self.request().id, attempts(rewards, sampled), n_unverified)
        return None if decision is None else decision.verdict

    @property
    def chains(self) -> Counter[str]:
        return self.scheduler.ledger.chains

    def judged(self) -> Judged:
        return next(event for event in reversed(self.events) if isinstance(event, Judged))


def test_c18_one_reward_raises() -> None:
    """Four completions, one without a verdict: a group of three, and a baseline of three."""
    one = OnePrompt(ngu())
    assert one.round([1, 0, 0], n_unverified=1) is Verdict.TRAIN
    batch = one.scheduler.take()
    assert batch is not None
    (group,) = batch.groups
    assert group.weights == (2 / 3, -1 / 3, -1 / 3)
    assert (group.tried, group.baseline) == (3, 1 / 3)
    assert one.scheduler.ledger.unverified == 1
    one.scheduler.publish(1)
    assert one.round(WRONG) is Verdict.RETRY, "the run goes on"
    one.scheduler.check_balance()


def test_c18_every_reward_raises() -> None:
    """No verdict at all: the group is discarded, and no coin decides about it."""
    one = OnePrompt(NeverGiveUp(p=0.0))  # any coin would be a give-up
    rng = one.scheduler.state_dict()["rng"]
    assert one.round([], n_unverified=4) is None
    assert one.scheduler.state_dict()["rng"] == rng
    judged = one.judged()
    assert (judged.verdict, judged.outcome, judged.tried, judged.n_unverified) == ("trouble", "unverified", 0, 4)
    assert one.chains["given_up"] == 0
    assert one.request().visit == 1, "met again in the next epoch"


def test_c21_anchored_advantages() -> None:
    """Five rounds all wrong and stale, then one right of four: 23/24 and -23/72."""
    one = OnePrompt(ngu(window=0))
    for _ in range(5):
        assert one.round(WRONG) is Verdict.RETRY
        one.scheduler.publish(one.scheduler.version + 1)
    assert one.round(MIXED) is Verdict.TRAIN
    batch = one.scheduler.take()
    assert batch is not None
    (group,) = batch.groups
    assert (group.tried, group.baseline) == (24, 1 / 24)
    positive, negative = Fraction(23, 24), Fraction(-23, 72)
    assert positive + 3 * negative == 0
    assert group.weights == (float(positive), *[float(negative)] * 3)


def test_c22_the_oldest_trainable_age_is_trained() -> None:
    """T = 4, version 15: eight failures of version 10 are dropped, four of version 11 stay."""
    one = OnePrompt(ngu())
    one.scheduler.publish(10)
    one.round(WRONG)
    one.round(WRONG)
    one.scheduler.publish(11)
    one.round(WRONG)
    one.scheduler.publish(15)
    assert one.round(MIXED) is Verdict.TRAIN
    assert one.scheduler.ledger.stale == 8
    batch = one.scheduler.take()
    assert batch is not None
    (group,) = batch.groups
    assert [attempt.version for attempt in group.attempts] == [11] * 4 + [15] * 4
    assert (group.tried, group.baseline) == (16, 1 / 16)
    negative = float(Fraction(-15, 112))
    assert group.weights == (negative,) * 4 + (0.9375,) + (negative,) * 3
    trained = one.events[-1]
    assert isinstance(trained, Trained)
    assert trained.ages == (4,) * 4 + (0,) * 4


def test_c23a_right_after_stale_failures() -> None:
    one = OnePrompt(ngu())
    for _ in range(3):
        one.round(WRONG)
    one.scheduler.publish(5)
    assert one.round(RIGHT) is Verdict.SOLVED
    assert one.judged().outcome == "solved_after_retry"
    assert one.chains["solved_after_retry"] == 1
    assert one.chains["solved"] == 0
    assert one.scheduler.take() is None
    assert (one.scheduler.ledger.stale, one.scheduler.ledger.filtered, one.scheduler.ledger.trained) == (12, 4, 0)
    again = one.request()
    assert (again.visit, again.round) == (1, 1)


def test_c23a_right_after_fresh_failures_trains() -> None:
    one = OnePrompt(ngu())
    for _ in range(3):
        one.round(WRONG)
    one.scheduler.publish(4)
    assert one.round(RIGHT) is Verdict.TRAIN
    batch = one.scheduler.take()
    assert batch is not None
    assert batch.groups[0].weights == (-0.25,) * 12 + (0.75,) * 4


def test_c23b_better_but_without_contrast() -> None:
    one = OnePrompt(ngu())
    for _ in range(3):
        one.round([0.0] * 4)
    one.scheduler.publish(5)
    assert one.round([0.5] * 4) is Verdict.RETRY
    judged = one.judged()
    assert (judged.tried, judged.total, judged.n_fresh) == (16, 2, 4)
    assert one.scheduler.take() is None
    given_up = OnePrompt(NeverGiveUp(p=0.0, window=4))
    assert given_up.round([0.5] * 4) is Verdict.GIVE_UP, "it is left to the coin"


def test_c23c_a_queued_group_goes_stale() -> None:
    """The trainer stalls. The group is dropped, counted as stale and asked again with its history; it is not "wrong"."""
    one = OnePrompt(ngu())
    one.round(WRONG)
    assert one.round(MIXED) is Verdict.TRAIN
    rng = one.scheduler.state_dict()["rng"]
    one.scheduler.publish(5)
    assert one.scheduler.take() is None
    assert one.scheduler.state_dict()["rng"] == rng
    assert one.events[-1] == WentStale("p0", 0, 0, False, 5)
    assert one.scheduler.ledger.stale == 8
    assert one.chains["went_stale"] == 1
    assert one.chains["given_up"] == 0
    again = one.request()
    assert (again.visit, again.round, again.n) == (0, 3, 4)
    one.scheduler.deliver(again.id, attempts(MIXED, 5))
    batch = one.scheduler.take()
    assert batch is not None
    assert (batch.groups[0].tried, batch.groups[0].baseline) == (12, 1 / 6)
    one.scheduler.check_balance()


def test_c23c_part_of_a_queued_group_goes_stale() -> None:
    """Its contrast survives, so it is trained on, with what is left and the whole history in the baseline."""
    one = OnePrompt(ngu())
    one.round(WRONG)
    one.scheduler.publish(3)
    one.round(MIXED)
    one.scheduler.publish(7)
    batch = one.scheduler.take()
    assert batch is not None
    (group,) = batch.groups
    assert [attempt.version for attempt in group.attempts] == [3] * 4
    assert group.weights == (0.875, *[float(Fraction(-7, 24))] * 3)


@pytest.mark.parametrize(
    ("k", "rounds"), [(16, [[0.7] * 16]), (4, [[0.1] * 4] * 6), (7, [[0.95] * 7])], ids=["0.7", "0.1", "0.95"]
)
def test_c24_graded_rewards_without_signal(k: int, rounds: list[list[float]]) -> None:
    one = OnePrompt(ngu(k=k))
    for rewards in rounds:
        assert one.round(rewards) is Verdict.RETRY
    assert one.scheduler.take() is None


def test_c24_graded_rewards_with_signal() -> None:
    one = OnePrompt(ngu(k=8))
    assert one.round([0.95] * 7 + [0.0]) is Verdict.TRAIN
    batch = one.scheduler.take()
    assert batch is not None
    weights = [weight for weight in batch.groups[0].weights if weight is not None]
    assert len(weights) == 8
    assert all(abs(weight) <= 1 for weight in weights)
    assert weights == list(centred([exact(0.95)] * 7 + [0]))
    assert OnePrompt(ngu(k=7)).round([1.0] * 7) is Verdict.SOLVED


@pytest.mark.parametrize(("u", "verdict"), [(0.9499, Verdict.RETRY), (0.95, Verdict.GIVE_UP)])
def test_c25_the_give_up_draw(u: float, verdict: Verdict) -> None:
    """u < p asks again, u = p gives up."""

    class Shows(Random):
        def random(self) -> float:
            return u

    group = Group(prompts_named(1)[0], tuple(attempts(WRONG)), 4, 0, None, 0, 0, 1)
    assert NeverGiveUp(p=0.95).judge(group, Shows()).verdict is verdict


def test_c25_giving_up_forgets_the_chain() -> None:
    one = OnePrompt(NeverGiveUp(p=0.0))
    assert one.round(WRONG) is Verdict.GIVE_UP
    assert one.round(MIXED) is Verdict.TRAIN
    judged = one.judged()
    assert (judged.epoch, judged.round, judged.tried, judged.total) == (1, 1, 4, 1)


def cost_of_never_solvable(k: int, p: float, n: int) -> float:
    scheduler = Scheduler(NeverGiveUp(k, p), prompts_named(n), n_groups=64, max_epochs=1)
    wrong = attempts([0] * k)
    while (request := scheduler.next()) is not None:
        scheduler.deliver(request.id, wrong)
    assert scheduler.finished == "all 1 passes over the data are done"
    assert scheduler.ledger.given_up == scheduler.ledger.drawn
    assert scheduler.ledger.chains["given_up"] == n
    return scheduler.ledger.drawn / n


@pytest.mark.parametrize(("k", "p", "n", "mean", "sd"), [(4, 0.95, 800, 80, 78), (16, 0.875, 500, 128, 120)])
def test_c25_the_cost_of_giving_up(k: int, p: float, n: int, mean: float, sd: float) -> None:
    """sd of K * attempts is K sqrt(p)/(1-p); the full 20 000 prompts are in the slow test."""
    assert sd == pytest.approx(k * p**0.5 / (1 - p), rel=0.01)
    assert abs(cost_of_never_solvable(k, p, n) - mean) < 4 * sd / n**0.5


def test_c25_p_0_costs_exactly_k() -> None:
    assert cost_of_never_solvable(4, 0.0, 500) == 4


@pytest.mark.slow
def test_c25_twenty_thousand_prompts() -> None:
    assert abs(cost_of_never_solvable(4, 0.95, 20_000) - 80) < 1.7


def test_c26_the_easy_filter_lasts_one_pass() -> None:
    n = 12
    events: list[Event] = []
    scheduler = Scheduler(NeverGiveUp(p=0.5), prompts_named(n), n_groups=4, lag=1, max_epochs=6, on_event=events.append)
    visits: Counter[str] = Counter()
    opened: set[tuple[str, int]] = set()
    in_flight: list[Request] = []
    rng = Random(0)
    while scheduler.finished is None:
        while (request := scheduler.next()) is not None:
            in_flight.append(request)
            if (request.prompt.id, request.visit) not in opened:
                opened.add((request.prompt.id, request.visit))
                visits[request.prompt.id] += 1
                counts = [visits[prompt.id] for prompt in scheduler.prompts]
                assert max(counts) - min(counts) <= 1
        if in_flight:
            request = in_flight.pop(rng.randrange(len(in_flight)))
            easy = request.prompt.id in ("p0", "p1", "p2")
            rewards = (RIGHT if request.visit % 2 == 0 else [1, 0, 1, 1]) if easy else rng.choice([WRONG, RIGHT, MIXED])
            scheduler.deliver(request.id, attempts(rewards, scheduler.version))
        if scheduler.take() is not None:
            scheduler.publish(scheduler.version + 1)
    assert set(visits.values()) == {6}
    for name in ("p0", "p1", "p2"):
        judged = [event for event in events if isinstance(event, Judged) and event.prompt == name]
        assert [(event.outcome, event.tried) for event in judged if event.epoch % 2 == 0] == [("solved", 4)] * 3
        trained = {event.epoch for event in events if isinstance(event, Trained) and event.prompt == name}
        assert trained == {1, 3, 5}


def test_c32_one_completion_is_lost() -> None:
    """The engine answers 500 for one of four: a group of three."""
    one = OnePrompt(ngu())
    assert one.round([1, 0, 0]) is Verdict.TRAIN
    judged = one.judged()
    assert (judged.n_failed, judged.tried) == (1, 3)
    assert one.scheduler.ledger.failed == 1
    batch = one.scheduler.take()
    assert batch is not None
    assert batch.groups[0].weights == (2 / 3, -1 / 3, -1 / 3)


@pytest.mark.parametrize("empty_delivery", [True, False])
def test_c32_everything_is_lost_each_time(empty_delivery: bool) -> None:
    """At most three attempts, nothing scored, no coin; the other prompts keep flowing."""
    events: list[Event] = []
    scheduler = Scheduler(
        NeverGiveUp(p=0.0), prompts_named(20), n_groups=4, lag=1, max_epochs=1, on_event=events.append
    )
    rng = scheduler.state_dict()["rng"]
    n_asked = 0
    while (request := scheduler.next()) is not None:
        if request.prompt.id != "p7":
            scheduler.deliver(request.id, attempts(MIXED))
            if scheduler.take() is not None:
                scheduler.publish(0)
            continue
        n_asked += 1
        if empty_delivery:
            scheduler.deliver(request.id, [])
        else:
            scheduler.fail(request.id, "HTTP 500")
    while scheduler.take() is not None:
        scheduler.publish(0)
    assert n_asked == 3
    assert scheduler.state_dict()["rng"] == rng
    assert scheduler.finished == "all 1 passes over the data are done"
    assert [event.closed for event in events if isinstance(event, Failed)] == [False, False, True]
    assert not any(isinstance(event, Judged) and event.prompt == "p7" for event in events)
    assert scheduler.ledger.failed == 12
    assert scheduler.ledger.trained == 19 * 4
    assert scheduler.ledger.chains["failed"] == 1
    scheduler.check_balance()


def drive(seed: int, strategy: NeverGiveUp | None = None) -> Drive:
    def make(**options: Any) -> Scheduler:
        return Scheduler(
            strategy or ngu(p=0.75), prompts_named(30), n_groups=4, lag=1, max_pending=8, seed=1, **options
        )

    return Drive(make, binary, seed)


def outcomes(events: list[Event]) -> Counter[tuple[str, int]]:
    """How often each prompt got its outcome, by (prompt, epoch)."""
    return Counter(
        (event.prompt, event.epoch)
        for event in events
        if isinstance(event, Trained)
        or (isinstance(event, Judged) and event.outcome)
        or (isinstance(event, Failed | WentStale) and event.closed)
        or (isinstance(event, Reissued) and event.request is None)
    )


def assert_one_outcome_an_epoch(run: Drive) -> None:
    """One for every prompt in the epochs that are over; in those that are open, one at most."""
    state = run.scheduler.state_dict()
    still_open = {
        (row["prompt"], row["epoch"]) for place in ("in_flight", "queue", "waiting", "ready") for row in state[place]
    }
    n = outcomes(run.events)
    assert set(n.values()) == {1}
    assert run.scheduler.epoch > 8
    for epoch in range(run.scheduler.epoch):
        for prompt in run.scheduler.prompts:
            assert n[prompt.id, epoch] + ((prompt.id, epoch) in still_open) == 1


def until(run: Drive, version: int) -> None:
    while run.scheduler.version < version:
        run.step()


@pytest.mark.parametrize("seed", [2, 3])
def test_c35_resume_is_no_resume(seed: int) -> None:
    """40 steps straight, and 40 that stop at 17 with 3 requests in flight and 2 prompts waiting for a retry."""
    straight, stopped = drive(seed), drive(seed)
    until(straight, 40)
    until(stopped, 17)
    while [len(stopped.scheduler.state_dict()[place]) for place in ("in_flight", "queue")] != [3, 2]:
        stopped.step()
    assert stopped.scheduler.version == 17
    stopped.restore()
    until(stopped, 40)
    assert stopped.batches == straight.batches  # rows of every step, their baselines, attempts and weights
    assert stopped.events == straight.events  # draws, data order, outcomes
    assert stopped.scheduler.ledger.stale > 0  # and yet none of the groups that went stale holds up its epoch
    assert_one_outcome_an_epoch(stopped)
    stopped.scheduler.check_balance()


def test_c35_a_changed_strategy_drops_what_is_open_and_loses_nothing_else() -> None:
    run = drive(4)
    until(run, 17)
    n_open = run.scheduler.n_open
    state = run.scheduler.state_dict()
    assert n_open == 3
    run.scheduler = drive(4, ngu(p=0.0)).scheduler
    run.scheduler.on_event = run.events.append
    run.in_flight.clear()
    run.scheduler.load_state_dict(state, drop_chains=True)
    run.scheduler.check_balance()
    assert run.scheduler.ledger.chains["dropped"] == n_open
    until(run, 40)
    run.scheduler.check_balance()
    n = outcomes(run.events)
    assert set(n.values()) == {1}
    dropped = state["epoch"]
    for epoch in range(dropped + 1, run.scheduler.epoch - 1):
        assert all(n[prompt.id, epoch] == 1 for prompt in run.scheduler.prompts)
    assert {epoch for _, epoch in n} >= set(range(run.scheduler.epoch))


def seeds_of_two_rounds(run_seed: int) -> list[int]:
    one = OnePrompt(ngu(), seed=run_seed)
    seeds: list[int] = []
    for _ in range(2):
        request = one.request()
        seeds += request.seeds
        one.scheduler.deliver(request.id, [Attempt(0, 0)] * request.n)
    return seeds


def test_c37_sampling_seeds() -> None:
    """Two rounds of four: eight seeds; the same again for the same run seed, others for another."""
    seeds = seeds_of_two_rounds(0)
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds_of_two_rounds(0) == seeds
    assert not set(seeds_of_two_rounds(1)) & set(seeds)


def test_c37_no_seed_comes_twice_in_a_run() -> None:
    scheduler = Scheduler(NeverGiveUp(p=0.5), prompts_named(50), n_groups=8, max_epochs=10, max_barren_epochs=10)
    seeds: Counter[int] = Counter()
    rng = Random(1)
    while (request := scheduler.next()) is not None:
        seeds.update(request.seeds)
        if rng.random() < 0.2:
            scheduler.fail(request.id, "lost")
        else:
            scheduler.deliver(request.id, attempts(WRONG))
    assert len(seeds) > 4000
    assert set(seeds.values()) == {1}
