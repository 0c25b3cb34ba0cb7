"""The laws of the design as one state machine: a scheduler under random interleavings, beside a simple model of it.

The model keeps what the scheduler must not keep, every completion with its fate, and states the rules as the text does. It
gives each completion a number of its own (its single token), so that it can follow it through rounds, batches and checkpoints.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import Drive, Rewards, binary, graded, prompts_named
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nevergiveup.advantages import centred
from nevergiveup.events import Event, Failed, Judged, Planned, Trained, WentStale, decode, encode
from nevergiveup.scheduler import MAX_TROUBLE, RetryOrder, Scheduler
from nevergiveup.strategies import (
    STRATEGIES,
    Allocator,
    AnyStrategy,
    DynamicSampling,
    FixedK,
    GvmRaft,
    Knapsack,
    NeverGiveUp,
    NoPositiveResampling,
    ReinforceAda,
    ReinforceAdaOnline,
    ReinforceAdaStatic,
    SpeedRL,
    Strategy,
)
from nevergiveup.types import (
    Attempt,
    Batch,
    Completion,
    Decision,
    Group,
    Prompt,
    Request,
    Verdict,
    completion_seeds,
    exact,
)

TRAINS_ON_ALL = (FixedK, ReinforceAdaOnline, Knapsack)
"""Strategies without a filter: only a bound of the run ends them."""

seeds = st.integers(0, 2**16)


class CountsCoins:
    """A strategy as it is, with a count of the judgements and of those that drew a random number."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.window = inner.window
        self.open = inner.open
        self.weigh = inner.weigh
        self.n_judged = self.n_coins = 0

    def judge(self, group: Group, rng: Random) -> Decision:
        before = rng.getstate()
        decision = self.inner.judge(group, rng)
        self.n_judged += 1
        self.n_coins += rng.getstate() != before
        return decision


class CountsCoinsOfAllocator(CountsCoins):
    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self.block = inner.block
        self.wants_gradient_norms = inner.wants_gradient_norms
        self.learn = inner.learn
        self.allocate = inner.allocate


def some_strategies(rng: Random) -> list[AnyStrategy]:
    """Every strategy, with small numbers and some of its options."""
    window = rng.choice([0, 1, 2, 4, None])
    k = rng.choice([2, 3, 4])
    mode = rng.choice(["positive", "balanced"])
    accept = rng.choice(["better", "above_mean", "varied"])
    anchor = rng.choice(["shift", "scale", "recompute", "none", "downsample"])
    return [
        FixedK(k, divide_by=rng.choice(["nothing", "std", "sample_std"]), window=window),
        FixedK(k, leave_one_out=True, gamma=rng.choice([0.0, 0.5]), window=window),
        DynamicSampling(k, window=window),
        NeverGiveUp(k, p=rng.choice([0.0, 0.5]), window=window),
        NeverGiveUp(k, p=0.8, window=window),
        NeverGiveUp(k, p=0.8, window=window, accept=accept, anchor=anchor),
        NeverGiveUp(k, p=0.5, window=window, virtual_max=True),
        NeverGiveUp(k, p=rng.choice([0.6, 1.0]), window=window, max_attempts=rng.choice([1, 2, 5])),
        NoPositiveResampling(k, threshold=rng.choice([0.5, 1.0]), window=window),
        ReinforceAda(mode, per_round=k, max_rounds=3, keep=rng.choice([2, 3, 4]), window=window),
        SpeedRL(n_init=2, n_cont=3, window=window),
        ReinforceAdaStatic(window=window),
        ReinforceAdaOnline(k_min=2, k_max=6, window=window),
        GvmRaft(probe=2, budget=3, block=rng.choice([1, 3]), weights=rng.choice(["raft", "centred"]), window=window),
        Knapsack(budget=3, k_max=8, block=rng.choice([1, 4]), window=window),
    ]  # fmt: skip


@dataclass
class Sample:
    """One completion that came back with a verdict."""

    reward: Any
    version: int | None
    fresh: bool = True


@dataclass
class Chain:
    """One visit: every round of it, and the first round since it last had to start over."""

    visit: int
    rounds: list[list[Sample]] = field(default_factory=list)
    start: int = 0
    lost_in_a_row: int = 0
    times_stale: int = 0
    ready: bool = False

    @property
    def samples(self) -> list[Sample]:
        return [sample for samples in self.rounds for sample in samples]

    @property
    def fresh(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.fresh]

    @property
    def total(self) -> Any:
        return sum((exact(sample.reward) for sample in self.samples), 0)


class SchedulerLaws(RuleBasedStateMachine):
    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        rng = Random(seed)
        self.max_reward = rng.choice([1, 1, 1, 12])
        self.strategy = rng.choice(some_strategies(rng))
        self.prompts = [Prompt(f"p{i}", max_reward=self.max_reward) for i in range(rng.choice([1, 2, 5, 12, 30]))]
        n_groups = rng.choice([1, 2, 3])
        self.arguments: dict[str, Any] = {
            "n_groups": n_groups,
            "n_completions": rng.choice([None, None, 5, 12]),
            "gradient_norms": rng.random() < 0.5,
            "lag": rng.choice([0, 0.5, 1, 3]),
            "max_pending": rng.choice([None, None, 3, 7]),
            "retry_order": rng.choice(["back", "front"]),
            "max_epochs": rng.choice([None, None, 2, 5]),
            "max_completions": rng.choice([None, None, 400]),
            "max_barren_epochs": rng.choice([1, 2]),
            "seed": seed,
        }
        never_barren = isinstance(self.strategy, TRAINS_ON_ALL) or getattr(self.strategy, "virtual_max", False)
        if never_barren and self.arguments["max_epochs"] is None:
            self.arguments["max_completions"] = 400  # it trains on anything: only a bound ends it
        self.counter = (
            CountsCoinsOfAllocator(self.strategy)
            if isinstance(self.strategy, Allocator)
            else CountsCoins(self.strategy)
        )
        self.n_planned = 0  # events looked at
        self.wanted: dict[str, int] = {}  # what the next request of a prompt has to ask for
        self.retired: set[str] = set()
        self.most_drawn = 0
        self.events: list[Event] = []
        self.scheduler = self.make()

        self.chains: dict[str, Chain] = {}  # the open ones, by prompt id
        self.visits: Counter[str] = Counter()
        self.in_flight: dict[int, Request] = {}
        self.lost: dict[int, Request] = {}  # in flight when a checkpoint was restored, not yet issued again
        self.samples: dict[int, tuple[str, Sample]] = {}
        self.trained: set[int] = set()
        self.fate: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.n_barren = 0
        self.n_training = 0
        self.n_requests = 0
        self.seeds: set[int] = set()

    def make(self) -> Scheduler:
        return Scheduler(self.counter, self.prompts, on_event=self.events.append, **self.arguments)

    # ------------------------------------------------------------------ what happens to the scheduler

    # Hypothesis leaves rules out at random, so each rule asks for what it needs itself.

    @rule(seed=seeds)
    def deliver(self, seed: int) -> None:
        rng = Random(seed)
        for _ in range(rng.randint(1, 8)):
            request = self.one_in_flight(rng)
            if request is None:
                return
            top, half = self.max_reward, Fraction(self.max_reward, 2)
            kinds: list[list[Any]] = [
                [0],
                [0],
                [top],
                [0, 0, 0, top],
                [0, top],
                [0.1 * top, half],
                [half],
                [half, 0.7 * top, top],
            ]
            values = rng.choice(kinds)
            self.give_back(request, [rng.choice(values) for _ in range(request.n)], rng)

    @rule(seed=seeds, n_unverified=st.integers(0, 4), n_missing=st.integers(0, 4))
    def deliver_with_trouble(self, seed: int, n_unverified: int, n_missing: int) -> None:
        rng = Random(seed)
        request = self.one_in_flight(rng)
        if request is not None:
            n_unverified = min(n_unverified, request.n)
            n_missing = min(n_missing, request.n - n_unverified)
            rewards = [rng.choice([0, 0, self.max_reward]) for _ in range(request.n - n_unverified - n_missing)]
            self.give_back(request, rewards, rng, n_unverified)

    @rule(seed=seeds)
    def fail(self, seed: int) -> None:
        request = self.one_in_flight(Random(seed))
        if request is not None:
            before = self.counter.n_judged
            self.scheduler.fail(request.id, "connection lost")
            self.request_was_lost(request)
            assert self.counter.n_judged == before, "trouble was judged"

    @rule(steps=st.sampled_from([1, 1, 1, 1, 0, 2, 5]))
    def train(self, steps: int) -> None:
        if self.n_training:
            self.scheduler.publish(self.scheduler.version + steps)
            self.n_training = 0
            return
        self.answer_norms()
        batch = self.scheduler.take()
        self.see_plans()
        if batch is not None:
            self.took(batch)

    @rule()
    def save_and_restore(self) -> None:
        state = json.loads(json.dumps(self.scheduler.state_dict()))
        self.scheduler = self.make()
        self.scheduler.load_state_dict(state)
        self.fate["reissued"] += sum(request.n for request in self.in_flight.values())
        self.lost |= self.in_flight
        self.in_flight = {}

    @rule(seed=seeds)
    def a_busy_while(self, seed: int) -> None:
        rng = Random(seed)
        for _ in range(10):
            u = rng.random()
            if u < 0.6:
                self.deliver(rng.randrange(2**16))
            elif u < 0.7:
                self.deliver_with_trouble(rng.randrange(2**16), rng.randrange(3), rng.randrange(3))
            else:
                self.train(rng.choice([1, 1, 1, 1, 0, 2, 5]))
            self.nothing_is_lost()
            self.back_pressure_holds()

    def one_in_flight(self, rng: Random) -> Request | None:
        for _ in range(rng.choice([0, 1, 2, 20]) if self.in_flight else 20):
            request = self.next()
            if request is None:
                break
            self.asked(request)
        return self.in_flight[rng.choice(list(self.in_flight))] if self.in_flight else None

    def next(self) -> Request | None:
        self.answer_norms()
        request = self.scheduler.next()
        self.see_plans()
        return request

    def answer_norms(self) -> None:
        groups = self.scheduler.norms_wanted()
        assert not groups or (self.arguments["gradient_norms"] and isinstance(self.strategy, GvmRaft))
        if groups:
            self.scheduler.give_norms(
                [Random(len(self.events) + i).choice([0.0, 1.0, 3.0]) for i in range(len(groups))]
            )

    # ------------------------------------------------------------------------------- the simple model

    def see_plans(self) -> None:
        """Follows what the scheduler decided by itself meanwhile: allocators' plans, and what went stale."""
        for event in self.events[self.n_planned :]:
            if isinstance(event, WentStale):
                self.went_stale(event)
            if not isinstance(event, Planned):
                continue
            assert (event.gradient_norm is not None) == (
                self.arguments["gradient_norms"] and isinstance(self.strategy, GvmRaft)
            )
            chain = self.chains.get(event.prompt)
            if event.verdict == "retry":
                self.wanted[event.prompt] = event.draws
            assert (event.verdict == "retry") == (event.draws > 0)
            if chain is None:
                assert event.verdict == "retry"
                continue
            self.drop_old(chain)
            assert (event.tried, event.total) == (len(chain.samples), chain.total)
            assert event.n_fresh == len(chain.fresh)
            chain.ready = event.verdict == "train"
            if event.outcome:
                self.fate["filtered" if "solved" in event.outcome else event.outcome] += len(chain.fresh)
                self.close(event.prompt, event.outcome)
        self.n_planned = len(self.events)

    def asked(self, request: Request) -> None:
        name = request.prompt.id
        self.fate["drawn"] += request.n
        assert all(other.prompt.id != name for other in self.in_flight.values()), "two live groups of one prompt"
        self.in_flight[request.id] = request
        if request.id in self.lost:
            assert request == self.lost.pop(request.id), "a request changed when it was issued again"
            return
        assert request.id == self.n_requests
        self.n_requests += 1
        new_seeds = set(request.seeds)
        assert len(new_seeds) == request.n
        self.most_drawn = max(self.most_drawn, request.n)
        assert not new_seeds & self.seeds, "a sampling seed came back"
        self.seeds |= new_seeds
        if name not in self.chains:
            self.visits[name] += 1
            self.chains[name] = Chain(request.visit)
            assert request.round == 1
            assert name not in self.retired, "a retired prompt was visited again"
            counts = [self.visits[prompt.id] for prompt in self.prompts if prompt.id not in self.retired]
            if not isinstance(
                self.strategy, Knapsack | ReinforceAdaOnline | ReinforceAdaStatic
            ):  # those wait to be drawn
                assert max(counts) - min(counts) <= 1, "a row was visited twice before another was visited once"
            if first := self.strategy.open(request.prompt):
                self.wanted[name] = first
        chain = self.chains[name]
        assert not chain.ready, "two live groups of one prompt"
        assert (request.visit, request.round) == (chain.visit, len(chain.rounds) + 1)
        assert request.n == self.wanted[name]

    def give_back(self, request: Request, rewards: list[Any], rng: Random, n_unverified: int = 0) -> None:
        name = request.prompt.id
        age = rng.choice([0, 0, 0, 1, 2, 6])
        samples = []
        attempts = []
        for reward in rewards:
            version = None if rng.random() < 0.05 else self.scheduler.version - age - (rng.random() < 0.2)
            number = len(self.samples)
            completion = Completion((number,), (-0.5,), "", "stop", version or 0, version or 0)
            samples.append(Sample(reward, version))
            attempts.append(Attempt(reward, version, completion))
            self.samples[number] = (name, samples[-1])
        judged, coins = self.counter.n_judged, self.counter.n_coins
        decision = self.scheduler.deliver(request.id, attempts, n_unverified)
        drew_coin = self.counter.n_coins - coins
        if not samples:
            assert decision is None
            assert self.counter.n_judged == judged, "trouble was judged"
            if n_unverified == 0:
                self.request_was_lost(request)
            else:
                self.round_was_unverified(request, n_unverified)
            return

        del self.in_flight[request.id]
        self.fate["unverified"] += n_unverified
        self.fate["failed"] += request.n - n_unverified - len(samples)
        chain = self.chains[name]
        chain.lost_in_a_row = 0
        chain.rounds.append(samples)
        self.drop_old(chain)
        assert decision is not None
        allowed, may_draw_coin = self.verdicts(chain)
        assert decision.verdict in allowed
        assert drew_coin == (may_draw_coin and isinstance(self.strategy, NeverGiveUp))
        if decision.verdict is Verdict.RETRY:
            self.wanted[name] = decision.draws
        all_of_it = len(chain.samples) * self.max_reward
        is_enough = (
            isinstance(self.strategy, NoPositiveResampling) and chain.total >= self.strategy.threshold * all_of_it
        )
        assert decision.retire == is_enough
        if is_enough:
            self.retired.add(name)
        event = self.events[-1]
        assert isinstance(event, Judged)
        assert (event.request, event.prompt, event.epoch, event.round) == (request.id, name, chain.visit, request.round)
        assert (event.tried, event.total) == (len(chain.samples), chain.total), "the history of a chain is not exact"
        assert event.n_fresh == len(chain.fresh)
        all_right = all(exact(sample.reward) == self.max_reward for sample in chain.samples)
        outcome = {
            Verdict.SOLVED: "solved" if all_right else "solved_after_retry",
            Verdict.GIVE_UP: "given_up",
        }.get(decision.verdict, "")
        assert event.outcome == outcome
        chain.ready = decision.verdict is Verdict.TRAIN
        if outcome:
            self.fate["filtered" if "solved" in outcome else outcome] += len(chain.fresh)
            self.close(name, outcome)

    def verdicts(self, chain: Chain) -> tuple[set[Verdict], bool]:
        """What the rules allow, and whether it is left to the coin."""
        new = [exact(sample.reward) for sample in chain.rounds[-1]]
        before = [exact(sample.reward) for samples in chain.rounds[chain.start : -1] for sample in samples]
        fresh = {exact(sample.reward) for sample in chain.fresh}
        right = [reward == self.max_reward for reward in map(exact, (sample.reward for sample in chain.fresh))]
        varied = len(set(new)) > 1
        has_contrast = len(fresh) > 1 or varied
        strategy = self.strategy
        if isinstance(strategy, TRAINS_ON_ALL):
            return {Verdict.TRAIN}, False
        if isinstance(strategy, GvmRaft) and len(chain.rounds) == 1:
            return {Verdict.WAIT}, False
        if isinstance(strategy, GvmRaft) and strategy.weights == "raft":
            return {Verdict.TRAIN if any(right) or max(new) == self.max_reward else Verdict.GIVE_UP}, False
        if isinstance(strategy, ReinforceAda) and len(chain.rounds) < strategy.max_rounds:
            half = strategy.keep // 2
            is_enough = any(right) if strategy.mode == "positive" else min(sum(right), len(right) - sum(right)) >= half
            if not is_enough:
                return {Verdict.RETRY}, False
        if all(exact(sample.reward) == self.max_reward for sample in chain.samples):
            return {Verdict.SOLVED}, False
        closed = {Verdict.SOLVED} if set(new) == {self.max_reward} else {Verdict.GIVE_UP}
        if isinstance(strategy, SpeedRL) and len(chain.rounds) == 1 and has_contrast:
            return {Verdict.RETRY}, False
        if not isinstance(strategy, NeverGiveUp):
            return {Verdict.TRAIN} if has_contrast else closed, False
        if strategy.accept == "above_mean":
            progress = max([*fresh, max(new)]) > Fraction(chain.total) / len(chain.samples)
        elif not before:
            progress = varied
        else:
            better = max(new) > max(before)
            progress = better or (strategy.accept == "varied" and (varied or max(new) != max(before)))
        if progress and has_contrast:
            return {Verdict.TRAIN}, False
        if closed == {Verdict.SOLVED}:
            return closed, False
        is_best = fresh == {max(before + new)} != {self.max_reward}
        teaches = strategy.virtual_max and (len(fresh) > 1 or is_best)
        given_up = Verdict.TRAIN if teaches else Verdict.GIVE_UP
        if strategy.max_attempts is not None and len(chain.rounds) >= strategy.max_attempts:
            return {given_up}, False
        return {0.0: {given_up}, 1.0: {Verdict.RETRY}}.get(strategy.p, {given_up, Verdict.RETRY}), True

    def request_was_lost(self, request: Request) -> None:
        del self.in_flight[request.id]
        chain = self.chains[request.prompt.id]
        chain.lost_in_a_row += 1
        self.fate["failed"] += request.n
        event = self.events[-1]
        assert isinstance(event, Failed)
        assert (event.prompt, event.n, event.closed) == (
            request.prompt.id,
            request.n,
            chain.lost_in_a_row == MAX_TROUBLE,
        )
        if event.closed:
            self.fate["failed"] += len(chain.fresh)
            self.close(request.prompt.id, "failed")

    def round_was_unverified(self, request: Request, n_unverified: int) -> None:
        del self.in_flight[request.id]
        chain = self.chains[request.prompt.id]
        chain.lost_in_a_row += 1
        self.fate["unverified"] += n_unverified
        self.fate["failed"] += request.n - n_unverified
        event = self.events[-1]
        assert isinstance(event, Judged)
        assert (event.verdict, event.rewards) == ("trouble", ())
        assert (event.tried, event.total) == (len(chain.samples), chain.total), "trouble moved the baseline"
        assert (event.outcome == "unverified") == (not chain.rounds or chain.lost_in_a_row == MAX_TROUBLE)
        if event.outcome:
            self.fate["unverified"] += len(chain.fresh)
            self.close(request.prompt.id, "unverified")

    def took(self, batch: Batch) -> None:
        assert batch.version == self.scheduler.version
        assert batch.groups
        most = self.arguments["n_completions"]
        if most is None:
            assert len(batch.groups) <= self.arguments["n_groups"]
        else:
            assert batch.n_completions <= most or len(batch.groups) == 1
        events = [event for event in self.events[-len(batch.groups) :] if isinstance(event, Trained)]
        assert len(events) == len(batch.groups)
        for group, event in zip(batch.groups, events, strict=True):
            chain = self.chains[group.prompt.id]
            assert chain.ready
            self.drop_old(chain)
            numbers = [attempt.completion.tokens[0] for attempt in group.attempts if attempt.completion is not None]
            assert not self.trained & set(numbers), "a completion was trained on twice"
            assert [self.samples[number] for number in numbers] == [(group.prompt.id, s) for s in chain.fresh]
            assert [attempt.version for attempt in group.attempts] == [sample.version for sample in chain.fresh]
            ages = [batch.version - a.version for a in group.attempts if a.version is not None]
            assert self.strategy.window is None or max(ages, default=0) <= self.strategy.window, "too old to train on"
            rewards = [exact(sample.reward) for sample in chain.fresh]
            assert [attempt.reward for attempt in group.attempts] == rewards
            assert (group.tried, group.rounds) == (len(chain.samples), len(chain.rounds))
            assert group.baseline == float(Fraction(chain.total) / group.tried)
            weighed = [(r, w) for r, w in zip(rewards, group.weights, strict=True) if w is not None]
            assert (event.tried, event.total, event.n_trained) == (group.tried, chain.total, len(weighed))
            assert event.n_left_out == len(rewards) - len(weighed)
            self.check_weights(rewards, weighed, len(chain.fresh) == len(chain.samples))
            self.fate["trained"] += len(weighed)
            self.fate["left_out"] += event.n_left_out
            self.trained |= set(numbers)
            self.close(group.prompt.id, "trained")
        self.n_training += len(batch.groups)

    def check_weights(self, rewards: list[Any], weighed: list[tuple[Any, float]], is_whole: bool) -> None:
        """What a strategy claims of its weights."""
        strategy, weights = self.strategy, [weight for _, weight in weighed]
        if isinstance(strategy, ReinforceAda):
            assert len(weighed) == min(strategy.keep, len(rewards))
        elif not (isinstance(strategy, NeverGiveUp) and strategy.anchor == "downsample"):
            assert len(weighed) == len(rewards)
        if isinstance(strategy, GvmRaft) and strategy.weights == "raft":
            assert weights == [float(reward == self.max_reward) for reward in rewards]
            return
        is_virtual = isinstance(strategy, NeverGiveUp) and strategy.virtual_max and len(set(rewards)) == 1
        if is_virtual:
            assert max(weights) < 0, "a given-up group is pushed away from"
            return
        anchor = strategy.anchor if isinstance(strategy, NeverGiveUp) else ""
        is_binary = set(rewards) <= {0, self.max_reward}
        if not isinstance(strategy, ReinforceAda) and anchor != "none" and (anchor != "scale" or is_binary):
            assert abs(sum(weights)) < 1e-9 * max(1, self.max_reward), "the weights do not sum to zero"
        if anchor != "scale" or is_binary:
            for (reward, weight), (next_reward, next_weight) in pairwise(sorted(weighed)):
                assert (reward < next_reward) == (weight < next_weight), "the order of rewards is lost"
        if is_whole and anchor in ("shift", "scale", "recompute", "none"):
            assert weights == pytest.approx(centred(rewards), abs=1e-12), (
                "anchored is not centred though nothing is stale"
            )
        if is_whole and anchor == "shift":
            assert tuple(weights) == centred(rewards)

    def went_stale(self, event: WentStale) -> None:
        chain = self.chains[event.prompt]
        assert chain.ready
        self.drop_old(chain)
        assert event.n == len(chain.fresh)
        if isinstance(self.strategy, TRAINS_ON_ALL):
            assert not chain.fresh
        elif isinstance(self.strategy, GvmRaft) and self.strategy.weights == "raft":
            assert self.max_reward not in {exact(sample.reward) for sample in chain.fresh}
        else:
            assert len({exact(sample.reward) for sample in chain.fresh}) <= 1, "a group with contrast was dropped"
        for sample in chain.fresh:
            sample.fresh = False
        self.fate["stale"] += event.n
        chain.ready = False
        chain.start = len(chain.rounds)
        chain.times_stale += 1
        if again := self.strategy.open(Prompt(event.prompt)):
            self.wanted[event.prompt] = again
        assert event.closed == (chain.times_stale == MAX_TROUBLE)
        if event.closed:
            self.close(event.prompt, "stale")

    def drop_old(self, chain: Chain) -> None:
        window = self.strategy.window
        for sample in chain.fresh:
            if window is not None and sample.version is not None and self.scheduler.version - sample.version > window:
                sample.fresh = False
                self.fate["stale"] += 1

    def close(self, name: str, outcome: str) -> None:
        del self.chains[name]  # KeyError: a second outcome of one visit
        self.closed[outcome] += 1
        self.n_barren = 0 if outcome == "trained" else self.n_barren + 1

    # ----------------------------------------------------------------------------- true at every moment

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check_balance()
        ledger = self.scheduler.ledger
        for name in ("drawn", "trained", "left_out", "filtered", "given_up", "unverified", "failed", "reissued"):
            assert getattr(ledger, name) == self.fate[name], name
        # A ready group that a batch passed over may have been pruned already; the model prunes it later.
        held = sum(len(chain.fresh) for chain in self.chains.values()) + sum(r.n for r in self.in_flight.values())
        assert ledger.stale + self.scheduler.held == self.fate["stale"] + held
        for name in ("trained", "solved", "solved_after_retry", "given_up", "stale", "unverified", "failed"):
            assert ledger.chains[name] == self.closed[name], name
        assert ledger.chains["opened"] >= sum(self.visits.values())

    @invariant()
    def back_pressure_holds(self) -> None:
        assert len(self.chains) + self.n_training <= self.scheduler.max_pending
        assert self.scheduler.n_ready == sum(chain.ready for chain in self.chains.values())
        assert self.scheduler.n_ready + self.scheduler.n_open >= len(self.chains)

    @invariant()
    def the_budget_is_kept(self) -> None:
        most = self.arguments["max_completions"]
        assert most is None or self.fate["drawn"] - self.fate["reissued"] <= most

    def teardown(self) -> None:
        """From here on everything is wrong, and the run must come to an end that has a reason."""
        if not hasattr(self, "scheduler"):
            return
        rng = Random(0)
        for _ in range(3000):
            reason = self.scheduler.finished
            self.see_plans()
            if reason is not None:
                break
            while (request := self.next()) is not None:
                self.asked(request)
            for request in list(self.in_flight.values()):
                self.give_back(request, [0] * request.n, rng)
            self.nothing_is_lost()
            self.train(1)
        assert reason, "the run never ends"
        assert not self.in_flight
        assert not self.lost
        assert self.scheduler.n_ready == 0
        if "passes over the data gave nothing" in reason:
            n_left = len(self.prompts) - len(self.retired)
            assert self.n_barren >= self.arguments["max_barren_epochs"] * n_left, reason
        elif "budget" in reason:
            next_one = max(self.most_drawn, *self.wanted.values())
            assert self.fate["drawn"] - self.fate["reissued"] + next_one > self.arguments["max_completions"]
        elif "retired" in reason:
            assert len(self.retired) == len(self.prompts)
        else:
            kept = [self.visits[prompt.id] for prompt in self.prompts if prompt.id not in self.retired]
            assert set(kept) == {self.arguments["max_epochs"]}, reason
        if "budget" not in reason:
            assert not self.chains, "a visit never got its outcome"
            assert sum(self.closed.values()) == sum(self.visits.values())
            assert len({self.visits[prompt.id] for prompt in self.prompts if prompt.id not in self.retired}) <= 1
            assert self.scheduler.ledger.stale == self.fate["stale"]
        for event in self.events:
            assert decode(encode(event)) == (None, event)


TestSchedulerLaws = SchedulerLaws.TestCase
TestSchedulerLaws.settings = settings(max_examples=40, stateful_step_count=15)


@pytest.mark.parametrize("block", range(5))
def test_laws_hold_in_long_runs(block: int) -> None:
    """The same machine without the search: many settings, long runs."""
    for seed in range(40 * block, 40 * (block + 1)):
        machine = SchedulerLaws()
        machine.start(seed)
        for step in range(10):
            machine.a_busy_while(1000 * seed + step)
            machine.the_budget_is_kept()
            if step % 3 == 2:
                machine.save_and_restore()
        machine.teardown()


def test_completion_seeds_differ() -> None:
    assert len(set(completion_seeds(2**63 - 1, 1000))) == 1000


# -------------------------------------------------------------------------------- laws about two runs


def some_run(case: int) -> Drive:
    """A run with settings that depend on `case`, as do its samples and its interleaving."""
    rng = Random(case)
    prompts = prompts_named(rng.choice([1, 3, 7, 20]))
    strategy = rng.choice(some_strategies(rng))
    arguments: dict[str, Any] = {
        "n_groups": rng.choice([1, 2, 4]),
        "n_completions": rng.choice([None, None, 9]),
        "lag": rng.choice([0, 0.5, 1, 2]),
        "max_pending": rng.choice([None, 4, 9]),
        "retry_order": rng.choice(["back", "front"]),
        "max_epochs": rng.choice([None, 2, 4]),
        "max_completions": rng.choice([None, 150]),
        "max_barren_epochs": rng.choice([1, 3]),
        "seed": case,
    }
    rewards = rng.choice([binary, graded])
    return Drive(partial(Scheduler, strategy, prompts, **arguments), rewards, case)


def log(drive: Drive) -> str:
    return "\n".join(map(encode, drive.events))


@pytest.mark.parametrize("block", range(5))
def test_save_and_restore_change_nothing(block: int) -> None:
    for case in range(20 * block, 20 * (block + 1)):
        straight, stopped = some_run(case), some_run(case)
        rng = Random(case)
        n_steps = rng.randrange(20, 300)
        stops = {rng.randrange(n_steps) for _ in range(rng.randint(1, 3))}
        for step in range(n_steps):
            straight.step()
            if step in stops:
                stopped.restore()
            stopped.step()
        assert log(stopped) == log(straight), f"case {case}, stopped at {stops}"
        assert stopped.batches == straight.batches
        assert stopped.decisions == straight.decisions
        assert stopped.in_flight == straight.in_flight


def test_same_seed_same_events() -> None:
    for case in range(20):
        first, second = some_run(case), some_run(case)
        for drive in (first, second):
            for _ in range(150):
                drive.step()
        assert log(first) == log(second)


@pytest.mark.parametrize("rewards", [binary, graded])
@pytest.mark.parametrize("window", [0, 1, 4, None])
def test_never_trying_again_is_dynamic_sampling(rewards: Rewards, window: int | None) -> None:
    """p = 0: the same log to the byte, whatever goes stale or wrong."""
    logs = []
    for strategy in (NeverGiveUp(4, p=0.0, window=window), DynamicSampling(4, window=window)):
        make = partial(Scheduler, strategy, prompts_named(40), n_groups=4, lag=2, max_epochs=6)
        drive = Drive(make, rewards, seed=5, trouble=0.2)
        drive.run()
        logs.append(log(drive))
    assert logs[0] == logs[1]
    assert '"kind":"trained"' in logs[0]
    if window in (0, 1):
        assert '"kind":"went_stale"' in logs[0]


@pytest.mark.parametrize(
    "strategy", [*(cls() for cls in STRATEGIES.values()), NeverGiveUp(p=0.8, window=0)], ids=lambda s: s.name
)
@pytest.mark.parametrize("retry_order", ["back", "front"])
def test_lag_0_is_the_synchronous_run(strategy: Strategy, retry_order: RetryOrder) -> None:
    """Every attempt that is trained on comes from the policy that is about to be updated."""
    make = partial(Scheduler, strategy, prompts_named(30), n_groups=4, lag=0, max_epochs=3, retry_order=retry_order)
    drive = Drive(make, binary, trouble=0.05)
    drive.run()
    trained = [event for event in drive.events if isinstance(event, Trained)]
    assert len(trained) > 20
    assert {age for event in trained for age in event.ages} == {0}
    assert not any(isinstance(event, WentStale) for event in drive.events)


@pytest.mark.parametrize("make_strategy", [NeverGiveUp, DynamicSampling])
def test_more_lag_means_older_attempts(make_strategy: type[NeverGiveUp]) -> None:
    """With room for n batches ahead ages reach n, and not more (nothing waits longer here than for its batch)."""
    for lag in (0, 1, 2, 3):
        strategy = make_strategy(4, window=None)
        make = partial(Scheduler, strategy, prompts_named(500, max_reward=2), n_groups=4, lag=lag, max_epochs=1)
        scheduler = make()
        ages: set[int] = set()
        while scheduler.finished is None:
            flight = []
            while (request := scheduler.next()) is not None:
                flight.append((request, scheduler.version))
            for request, version in flight:
                scheduler.deliver(request.id, [Attempt(reward, version) for reward in (0, 1, 0, 1)])
            batch = scheduler.take()
            assert batch is not None
            ages |= {batch.version - (a.version or 0) for group in batch.groups for a in group.attempts}
            scheduler.publish(scheduler.version + 1)
        assert ages == set(range(lag + 1))
