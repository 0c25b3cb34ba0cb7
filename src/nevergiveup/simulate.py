"""`ngu simulate`: a run without any model, on a virtual clock, by the scheduler that real runs use. Layer 4; numpy, no torch.

    simulate(strategy, population, cluster, plan)   one run -> Result
    high_k_table(...), sweep(...)                   many of them
    main(words)                                     the command

Time passes in an event heap. Engines are slots in which sequences are decoded side by side at a constant rate; a request is
handed over when its last completion is done and graded. The trainer takes a batch when there is one, and what is sampled after
it has published is of the next version. Strategies, back-pressure, staleness and the ledger are not modelled: they are the
Scheduler's own.

What is modelled, and simple, is learning: a prompt of initial log-odds z is solved with probability
sigmoid(z + ability of its bucket + its own gain). A trained group whose positive advantages sum to s adds learning * s,
of which a part `own` to the prompt itself, and the rest to abilities: a part `transfer` of that evenly to all buckets, the rest
to its bucket, each divided by the number of prompts that it is for. That orders strategies by where their contrast comes from;
it is no forecast of what a language model learns.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import product
from math import exp, inf, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nevergiveup.config import strategies_named
from nevergiveup.evaluate import bucket_of, read_probe
from nevergiveup.events import Event, EventWriter, Planned
from nevergiveup.scheduler import RetryOrder, Scheduler
from nevergiveup.strategies import Allocator, AnyStrategy, FixedK, NeverGiveUp
from nevergiveup.types import Attempt, Exact, Prompt, Request

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

N_KEPT_VERSIONS = 64
"""Abilities are remembered for so many versions: completions that were begun even earlier count as begun by the oldest."""

BLOCK = 1 << 16
"""Random numbers drawn at once."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one kind. weight: share of the data. rate: pass rate at the start, or where `spread` is given, the mean of a
    Beta distribution of that many pseudo-counts. tokens: mean length of a completion; tokens_sd: standard deviation of its
    logarithm (lognormal); 0: all of one length."""

    name: str
    weight: float
    rate: float
    spread: float = 0.0
    tokens: float = 500.0
    tokens_sd: float = 0.6


MIX: tuple[Kind, ...] = (
    Kind("easy", 0.40, 0.85, 8, 400),
    Kind("medium", 0.20, 0.5, 8, 600),
    Kind("hard", 0.20, 0.12, 8, 900),
    Kind("extra_hard", 0.20, 0.005, 200, 1200),
)
"""About what a mid-sized model makes of a mathematics data set."""


@dataclass(slots=True)
class Population:
    """The prompts, by row: name of the kind, log-odds of the initial pass rate, mean length in tokens, spread of its log."""

    kinds: list[str]
    log_odds: list[float]
    tokens: list[float]
    tokens_sd: list[float]

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def rates(self) -> list[float]:
        return [_sigmoid(z) for z in self.log_odds]

    @classmethod
    def of_mix(cls, mix: Sequence[Kind], n: int, seed: int = 0) -> Population:
        """n prompts in the proportions of the mix (the last kind takes what rounding leaves)."""
        total = sum(kind.weight for kind in mix)
        if n < 1 or not mix or any(kind.weight < 0 for kind in mix) or total <= 0:
            raise ValueError("a mix needs prompts, and kinds with weights of at least 0, one of them above 0")
        rng = np.random.default_rng([seed, 1])
        out = cls([], [], [], [])
        for i, kind in enumerate(mix):
            count = n - len(out) if i == len(mix) - 1 else round(n * kind.weight / total)
            if not 0 <= kind.rate <= 1 or kind.spread < 0:
                raise ValueError(
                    f"{kind.name}: rate = {kind.rate} must be in [0, 1], spread = {kind.spread} at least 0"
                )
            if kind.spread and 0 < kind.rate < 1:
                rates = rng.beta(kind.rate * kind.spread, (1 - kind.rate) * kind.spread, count).tolist()
            else:
                rates = [kind.rate] * count
            out._add([kind.name] * count, rates, [kind.tokens] * count, [kind.tokens_sd] * count)
        return out

    @classmethod
    def of_probe(cls, path: Path, n: int | None = None, seed: int = 0, tokens_sd: float = 0.6) -> Population:
        """From the file that `ngu probe` writes. Rates are drawn from Beta(1/2 + right, 1/2 + wrong), what the counts allow:
        0 of 32 is not taken for impossible. n: so many prompts, drawn with replacement; None: those of the file.

        Raises ValueError for what is no such file.
        """
        rows = list(read_probe(path).values())
        n_right = np.array([row.right for row in rows], dtype=float)
        n_drawn = np.array([row.n for row in rows], dtype=float)
        lengths = [row.tokens or 1.0 for row in rows]
        usable = np.flatnonzero(n_drawn > 0)
        if not usable.size:
            raise ValueError(f"{path} holds no prompt with a graded completion")
        rng = np.random.default_rng([seed, 1])
        chosen = usable if n is None else rng.choice(usable, n)
        rates = rng.beta(0.5 + n_right[chosen], 0.5 + n_drawn[chosen] - n_right[chosen]).tolist()
        kinds = [bucket_of(n_right[i] / n_drawn[i]) for i in chosen]
        out = cls([], [], [], [])
        out._add(kinds, rates, [lengths[i] for i in chosen], [tokens_sd] * len(kinds))
        return out

    def _add(self, kinds: list[str], rates: list[float], tokens: list[float], tokens_sd: list[float]) -> None:
        self.kinds += kinds
        self.log_odds += [_logit(rate) for rate in rates]
        self.tokens += tokens
        self.tokens_sd += tokens_sd


@dataclass(frozen=True, slots=True)
class Cluster:
    """Speeds. Every engine decodes `slots` sequences side by side."""

    engines: int = 1
    slots: int = 64
    tokens_per_s: float = 40.0
    """Of one sequence."""
    prefill_s: float = 0.05
    """From a slot becoming free to the first token."""
    max_new_tokens: int = 4096
    """Longer completions are cut there, and score 0."""
    grade_s: float = 0.01
    """Of a request, once its last completion is done."""
    step_s: float = 1.0
    """Of an optimizer step, whatever its size."""
    trained_tokens_per_s: float = 20_000.0
    """Of the trainer, on top of step_s."""
    sync_s: float = 0.5
    """Until engines hold the new weights; they go on with the old ones meanwhile, and the trainer waits."""

    def __post_init__(self) -> None:
        for name, least in (("engines", 1), ("slots", 1), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        for name in ("tokens_per_s", "trained_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        for name in ("prefill_s", "grade_s", "step_s", "sync_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be 0 or more")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: batches, bounds, learning, seed. One of steps, completions, epochs, hours must bound it."""

    n_groups: int = 64
    lag: float = 1.0
    max_pending: int | None = None
    """Most groups open; none: enough to keep every slot busy, and at least (lag + 1) * n_groups."""
    retry_order: RetryOrder = "back"
    steps: int | None = None
    completions: int | None = None
    epochs: int | None = None
    hours: float | None = None
    """Of virtual time."""
    learning: float = 0.0
    """See the top of this file; 0: rates stay as they are."""
    own: float = 0.0
    transfer: float = 0.25
    n_tests: int = 0
    """Rewards are shares of so many tests, passed independently, so that all pass at the pass rate; 0: right or wrong."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is self.completions is self.epochs is self.hours is None:
            raise ValueError("the simulation has no end: set steps, completions, epochs or hours")
        for name in ("own", "transfer"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be in [0, 1]")
        if self.learning < 0 or self.n_tests < 0:
            raise ValueError(f"learning = {self.learning} and n_tests = {self.n_tests} must be 0 or more")


@dataclass(slots=True)
class Result:
    """drawn, trained_groups, given_up: by kind of prompt; trained_groups are those with contrast (without it all advantages are
    0). busy: share of slots in use; trainer_busy: share of time. seconds: virtual; scheduler_s, wall_s: real ones, of the
    scheduler's calls and of the whole simulation. rates: mean pass rate by kind, before and after."""

    seconds: float = 0.0
    steps: int = 0
    epochs: int = 0
    reason: str = ""
    ledger: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    retries: int = 0
    drawn: dict[str, int] = field(default_factory=dict)
    trained_groups: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    busy: float = 0.0
    trainer_busy: float = 0.0
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    scheduler_s: float = 0.0
    wall_s: float = 0.0

    @property
    def completions(self) -> int:
        return int(self.ledger["drawn"])

    @property
    def stale_share(self) -> float:
        return float(self.ledger["stale"]) / max(self.completions, 1)

    @property
    def per_trained_group(self) -> float:
        """Completions drawn for each group with contrast that was trained on."""
        return self.completions / max(sum(self.trained_groups.values()), 1)

    @property
    def age_mean(self) -> float:
        known = {age: n for age, n in self.ages.items() if age >= 0}
        return sum(age * n for age, n in known.items()) / max(sum(known.values()), 1)

    def share(self, counts: Mapping[str, int], kind: str) -> float:
        return counts.get(kind, 0) / max(sum(counts.values()), 1)

    def as_dict(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        extra = ("completions", "stale_share", "per_trained_group", "age_mean")
        return row | {name: getattr(self, name) for name in extra}


def simulate(
    strategy: AnyStrategy,
    population: Population,
    cluster: Cluster,
    plan: Plan,
    on_event: Callable[[float, Event], None] | None = None,
) -> Result:
    """One run. on_event: called with virtual seconds and every event of the scheduler.

    The ledger is checked at the end (RuntimeError if it does not balance). The same arguments give the same events.
    """
    return _Run(strategy, population, cluster, plan, on_event).run()


class _Run:
    def __init__(
        self,
        strategy: AnyStrategy,
        population: Population,
        cluster: Cluster,
        plan: Plan,
        on_event: Callable[[float, Event], None] | None,
    ) -> None:
        self.population = population
        self.cluster = cluster
        self.plan = plan
        self.now = 0.0
        self.on_event = on_event
        self.kind_names = list(dict.fromkeys(population.kinds))
        numbers = {name: i for i, name in enumerate(self.kind_names)}
        self.kind_of = [numbers[kind] for kind in population.kinds]
        self.n_by_kind = [self.kind_of.count(i) for i in range(len(numbers))]
        prompts = [Prompt(f"{kind}-{i}", answer=i) for i, kind in enumerate(population.kinds)]
        n_slots = cluster.engines * cluster.slots
        self.drawn = dict.fromkeys(self.kind_names, 0)
        self.trained = dict.fromkeys(self.kind_names, 0)
        self.given_up = dict.fromkeys(self.kind_names, 0)
        self.ages: dict[int, int] = {}
        self.rounds = 0
        first = max(strategy.open(prompts[0]), 1)
        enough = max(int((plan.lag + 1) * plan.n_groups + 0.999999), plan.n_groups, 2 * n_slots // first)
        # Allocators end chains outside of deliveries. For all others events are not needed, which saves a third of the time.
        self.counts_events = isinstance(strategy, Allocator)
        lengths = zip(population.tokens, population.tokens_sd, strict=True)
        self.median = [mean_length * exp(-sd * sd / 2) - (0.0 if sd else 0.5) for mean_length, sd in lengths]
        self.scheduler = Scheduler(
            strategy,
            prompts,
            n_groups=plan.n_groups,
            lag=plan.lag,
            max_pending=enough if plan.max_pending is None else plan.max_pending,
            retry_order=plan.retry_order,
            max_epochs=plan.epochs,
            max_completions=plan.completions,
            max_barren_epochs=10**9,
            seed=plan.seed,
            on_event=self._event if self.counts_events or on_event is not None else None,
        )
        self.max_in_flight = 4 * n_slots
        self.n_out = 0
        self.free_at = [0.0] * n_slots  # a heap: when each slot becomes free
        self.busy_s = 0.0
        self.trainer_s = 0.0
        self.trainer_free = True
        self.heap: list[tuple[float, int, int, Any]] = []
        self.n_pushed = 0
        self.published_at = [0.0]  # when each of the kept versions came, with the abilities it has
        self.abilities: list[list[float]] = [[0.0] * len(numbers)]
        self.first_kept = 0  # version of abilities[0]
        self.ability = [0.0] * len(numbers)  # of the weights in the trainer
        self.gains: dict[int, float] = {}
        self.attempts: dict[int, dict[Exact, Attempt]] = {}
        self.random = _Random(plan.seed)
        self.scheduler_s = 0.0

    def _event(self, event: Event) -> None:
        if self.counts_events and isinstance(event, Planned) and event.outcome == "given_up":
            self.given_up[_kind(event.prompt)] += 1
        if self.on_event is not None:
            self.on_event(self.now, event)

    def run(self) -> Result:
        began = time.perf_counter()
        end_s = inf if self.plan.hours is None else 3600 * self.plan.hours
        max_steps = inf if self.plan.steps is None else self.plan.steps
        scheduler = self.scheduler
        reason = ""
        while True:
            self._dispatch()
            if self._start_step():
                self._dispatch()
            if scheduler.version >= max_steps:
                reason = f"all {max_steps} steps are done"
            elif not self.heap:
                reason = scheduler.finished or "nothing can move any more"
            elif self.heap[0][0] > end_s:
                reason = f"{self.plan.hours:g} hours are over"
            if reason:
                break
            self.now, _, kind, what = heapq.heappop(self.heap)
            if kind == _DELIVERED:
                self._deliver(*what)
            else:
                self._publish()
        scheduler.check_balance()
        return self._result(reason, time.perf_counter() - began)

    def _push(self, at: float, kind: int, what: Any) -> None:
        self.n_pushed += 1
        heapq.heappush(self.heap, (at, self.n_pushed, kind, what))

    def _dispatch(self) -> None:
        """Hands requests to slots: each completion takes the slot that becomes free first, as a queue would."""
        cluster, free_at, median, spreads = self.cluster, self.free_at, self.median, self.population.tokens_sd
        replace_first, now, most, token_s = (
            heapq.heapreplace,
            self.now,
            cluster.max_new_tokens,
            1 / cluster.tokens_per_s,
        )
        while self.n_out < self.max_in_flight:
            began = time.perf_counter()
            request = self.scheduler.next()
            self.scheduler_s += time.perf_counter() - began
            if request is None:
                return
            row: int = request.prompt.answer
            self.n_out += request.n
            self.drawn[self.kind_names[self.kind_of[row]]] += request.n
            factor = self.random.length(spreads[row])
            last = 0.0
            starts = []
            for _ in range(request.n):
                n_tokens = int(median[row] * factor()) + 1
                was_cut = n_tokens >= most
                start = free_at[0]
                if start < now:
                    start = now
                end = start + cluster.prefill_s + (most if was_cut else n_tokens) * token_s
                replace_first(free_at, end)
                self.busy_s += end - start
                if end > last:
                    last = end
                starts.append((start, was_cut))
            self._push(last + cluster.grade_s, _DELIVERED, (request, starts))

    def _deliver(self, request: Request, starts: list[tuple[float, bool]]) -> None:
        row: int = request.prompt.answer
        kind = self.kind_of[row]
        base = self.population.log_odds[row] + (self.gains.get(row, 0.0) if self.gains else 0.0)
        published_at = self.published_at
        newest = len(published_at) - 1
        known, rate = -1, 0.0
        attempts = []
        of_version: dict[Exact, Attempt] = {}
        uniform, graded = self.random.uniform, self.plan.n_tests > 0
        for start, was_cut in starts:
            at = newest if start >= published_at[newest] else max(bisect_right(published_at, start) - 1, 0)
            if at != known:
                known, rate = at, _sigmoid(base + self.abilities[at][kind])
                of_version = self.attempts_of(self.first_kept + at)
            reward: Exact = 0 if was_cut else self._share(rate) if graded else int(uniform() < rate)
            attempt = of_version.get(reward)
            if attempt is None:
                attempt = of_version[reward] = Attempt(reward, self.first_kept + at)
            attempts.append(attempt)
        self.n_out -= request.n
        self.rounds += 1
        chains = self.scheduler.ledger.chains
        n_given_up = chains["given_up"]
        began = time.perf_counter()
        self.scheduler.deliver(request.id, attempts)
        self.scheduler_s += time.perf_counter() - began
        if chains["given_up"] > n_given_up:
            self.given_up[self.kind_names[kind]] += 1

    def attempts_of(self, version: int) -> dict[Exact, Attempt]:
        """Reward -> the attempt of that version: they are values, and need not be made anew millions of times."""
        found = self.attempts.get(version)
        if found is None:
            found = self.attempts[version] = {}
            self.attempts.pop(version - N_KEPT_VERSIONS, None)
        return found

    def _share(self, rate: float) -> Exact:
        """Of n tests, all of which pass at that rate."""
        n = self.plan.n_tests
        each = rate ** (1 / n)
        return Fraction(sum(self.random.uniform() < each for _ in range(n)), n)

    def _start_step(self) -> bool:
        """Whether that made room for requests: a batch was taken, or groups were found too old."""
        if not self.trainer_free:
            return False
        chains = self.scheduler.ledger.chains
        n_stale = chains["went_stale"] + chains["stale"]
        began = time.perf_counter()
        batch = self.scheduler.take()
        self.scheduler_s += time.perf_counter() - began
        if batch is None:
            return chains["went_stale"] + chains["stale"] > n_stale
        self.trainer_free = False
        n_tokens = 0.0
        learning = self.plan.learning
        for group in batch.groups:
            row: int = group.prompt.answer
            weights = [weight for weight in group.weights if weight is not None]
            for attempt, weight in zip(group.attempts, group.weights, strict=True):
                if weight is not None:
                    age = -1 if attempt.version is None else batch.version - attempt.version
                    self.ages[age] = self.ages.get(age, 0) + 1
            n_tokens += self.population.tokens[row] * len(weights)
            self.trained[self.kind_names[self.kind_of[row]]] += any(weights)
            if learning:
                self._learn(row, learning * sum(weight for weight in weights if weight > 0))
        took = self.cluster.step_s + n_tokens / self.cluster.trained_tokens_per_s + self.cluster.sync_s
        self.trainer_s += took
        self._push(self.now + took, _PUBLISHED, None)
        return True

    def _learn(self, row: int, gain: float) -> None:
        kind = self.kind_of[row]
        if own := gain * self.plan.own:
            self.gains[row] = self.gains.get(row, 0.0) + own
            gain -= own
        shared = gain * self.plan.transfer
        self.ability[kind] += (gain - shared) / self.n_by_kind[kind]
        if shared:
            everywhere = shared / len(self.kind_of)
            self.ability = [ability + everywhere for ability in self.ability]

    def _publish(self) -> None:
        self.trainer_free = True
        began = time.perf_counter()
        self.scheduler.publish(self.scheduler.version + 1)
        self.scheduler_s += time.perf_counter() - began
        self.published_at.append(self.now)
        self.abilities.append(list(self.ability))
        if len(self.abilities) > N_KEPT_VERSIONS:
            del self.abilities[0], self.published_at[0]
            self.first_kept += 1

    def _result(self, reason: str, wall_s: float) -> Result:
        seconds = max(self.now, 1e-9)
        kinds = self.kind_names
        log_odds, kind_of = np.array(self.population.log_odds), np.array(self.kind_of)
        before = _mean_rates(log_odds, kind_of, len(kinds))
        log_odds += np.array(self.ability)[kind_of]
        for row, gain in self.gains.items():
            log_odds[row] += gain
        after = _mean_rates(log_odds, kind_of, len(kinds))
        # Completions that the slots will only finish after the end are not work that was done.
        beyond = sum(at - self.now for at in self.free_at if at > self.now)
        return Result(
            seconds=self.now,
            steps=self.scheduler.version,
            epochs=self.scheduler.epoch + 1,
            reason=reason,
            ledger=self.scheduler.ledger.as_dict() | {"held": self.scheduler.held},
            rounds=self.rounds,
            retries=self.scheduler.ledger.chains["retries"],
            drawn=self.drawn,
            trained_groups=self.trained,
            given_up=self.given_up,
            ages=dict(sorted(self.ages.items())),
            busy=min(max((self.busy_s - beyond) / (seconds * len(self.free_at)), 0.0), 1.0),
            trainer_busy=min(self.trainer_s / seconds, 1.0),
            rates=dict(zip(kinds, zip(before, after, strict=True), strict=True)),
            scheduler_s=self.scheduler_s,
            wall_s=wall_s,
        )


_DELIVERED, _PUBLISHED = 0, 1


def _kind(prompt_id: str) -> str:
    return prompt_id.rpartition("-")[0]


class _Random:
    """One number at a time from blocks that numpy draws."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = np.random.default_rng([seed, 2])
        self.uniform = _one_by_one(lambda: rng.random(BLOCK).tolist()).__next__
        self._lengths: dict[float, Callable[[], float]] = {0.0: lambda: 1.0}

    def length(self, spread: float) -> Callable[[], float]:
        """Factors on the median length, lognormal."""
        found = self._lengths.get(spread)
        if found is None:
            rng = self._rng
            block = _one_by_one(lambda: np.exp(spread * rng.standard_normal(BLOCK)).tolist())
            found = self._lengths[spread] = block.__next__
        return found


def _one_by_one(block: Callable[[], list[float]]) -> Iterator[float]:
    while True:
        yield from block()


def _logit(rate: float) -> float:
    return -inf if rate <= 0 else inf if rate >= 1 else log(rate / (1 - rate))


def _sigmoid(z: float) -> float:
    if z >= 0:
        return 1 / (1 + exp(-z))
    return exp(z) / (1 + exp(z))


def _mean_rates(log_odds: Floats, kinds: Ints, n_kinds: int) -> list[float]:
    """Mean pass rate of each kind."""
    with np.errstate(over="ignore"):
        rates = 1 / (1 + np.exp(-log_odds))
    return (np.bincount(kinds, rates, n_kinds) / np.bincount(kinds, minlength=n_kinds)).tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- many runs


def high_k_table(
    ks: Sequence[int] = (4, 8, 16, 32), batch: int = 256, n_prompts: int = 4000, seed: int = 0
) -> list[dict[str, float | str]]:
    """What GRPO with a larger K learns from, at K * N = batch completions a step: shares of the groups with contrast by kind,
    from MIX, without learning. The share of easy prompts rises with K: the high-K paradox."""
    population = Population.of_mix(MIX, n_prompts, seed)
    rows: list[dict[str, float | str]] = []
    for k in ks:
        n_groups = max(batch // k, 1)
        plan = Plan(n_groups=n_groups, epochs=2, seed=seed)
        result = simulate(FixedK(k=k), population, Cluster(), plan)
        shares = {kind.name: result.share(result.trained_groups, kind.name) for kind in MIX}
        rows.append({"k": k, "n_groups": n_groups, **shares, "per_trained_group": result.per_trained_group})
    return rows


def cluster_rows(
    sizes: Sequence[int] = (8, 64, 512, 4096), seed: int = 0, requests_per_slot: float = 2.0
) -> list[dict[str, float | str]]:
    """How much of one core the scheduler takes when NGU runs on so many GPUs: a quarter of them train, each of the others
    decodes 256 sequences of 60 tokens a second. scheduler: real seconds of its calls on this machine, over virtual seconds in
    which all slots are busy; at 1 it would be the bottleneck."""
    rows: list[dict[str, float | str]] = []
    for n_gpus in sizes:
        trainers = max(n_gpus // 4, 1)
        cluster = Cluster(
            engines=n_gpus - trainers,
            slots=256,
            tokens_per_s=60.0,
            max_new_tokens=8192,
            trained_tokens_per_s=8_000.0 * trainers,
        )
        n_slots = cluster.engines * cluster.slots
        budget = int(max(requests_per_slot * n_slots, 20_000))
        n_groups = max(64, n_slots // 64)
        population = Population.of_mix(MIX, max(budget // 4, 1000), seed)
        result = simulate(
            NeverGiveUp(k=4, p=0.95), population, cluster, Plan(n_groups=n_groups, completions=budget, seed=seed)
        )
        full_s = result.seconds * result.busy  # what it would take without the emptier slots of beginning and end
        rows.append(
            {
                "gpus": n_gpus,
                "slots": n_slots,
                "completions_per_s": result.completions / full_s,
                "rounds_per_s": result.rounds / full_s,
                "microseconds_per_round": 1e6 * result.scheduler_s / result.rounds,
                "scheduler": result.scheduler_s / full_s,
            }
        )
    return rows


SWEPT = ("n_groups", "lag", "max_pending", "learning", "own", "transfer", "n_tests")
"""Keys of --sweep that belong to the Plan; those of Cluster are swept likewise, and all others are the strategy's."""


Job: TypeAlias = tuple[str, AnyStrategy, Population, Cluster, Plan]


def _run_one(job: Job) -> tuple[str, Result]:
    return job[0], simulate(*job[1:])


def run_all(jobs: Sequence[Job]) -> list[tuple[str, Result]]:
    """Side by side where there are several, one process a core."""
    n_processes = min(len(jobs), len(os.sched_getaffinity(0)))
    if n_processes < 2:
        return [_run_one(job) for job in jobs]
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run_one, jobs))


# ------------------------------------------------------------------------------------------------ command

HELP = """\
Simulates runs on a virtual clock, with the scheduler that real runs use and no model: where completions would go, how stale
they would get, who would wait for whom.

  ngu simulate                                              NGU and GRPO on a made-up mix of prompts, one engine
  ngu simulate --probe probe.json --engines 8 --slots 256   your data (from `ngu probe`), your cluster
  ngu simulate --strategies fixed:k=16,ngu:p=0.9 --completions 1000000
  ngu simulate --sweep k=2,4,8 p=0.5,0.9,0.95 lag=0,1       every combination, for one strategy
  ngu simulate --high-k                                     what a larger K learns from
  ngu simulate --scaling                                    8 to 4,096 GPUs: when the scheduler would be the bottleneck
"""


def main(words: Sequence[str]) -> int:
    """The command; returns its exit status. Raises ValueError for bad input."""
    options = _parser().parse_args(list(words))
    if options.high_k:
        rows = high_k_table(seed=options.seed or 0)
        return _print_rows(
            "Share of the groups with contrast by difficulty, K * N = 256, fixed K, no learning", rows, options
        )
    if options.scaling:
        return _print_rows("The scheduler's share of one core", cluster_rows(seed=options.seed or 0), options)
    given = {name: value for name, value in vars(options).items() if value is not None}
    cluster = Cluster(**{f.name: given[f.name] for f in fields(Cluster) if f.name in given})
    plan_values = {f.name: given[f.name] for f in fields(Plan) if f.name in given}
    if not {"steps", "completions", "epochs", "hours"} & plan_values.keys():
        plan_values["completions"] = 200_000
    plan = Plan(**plan_values)
    population = (
        Population.of_probe(options.probe, options.prompts, plan.seed)
        if options.probe
        else Population.of_mix(_mix(options.mix), options.prompts or 10_000, plan.seed)
    )
    strategies = strategies_named(options.strategies or ("ngu" if options.sweep else "fixed,ngu"))
    if options.sweep and len(strategies) != 1:
        raise ValueError("--sweep varies one strategy: name one in --strategies")
    jobs = _swept(strategies, population, cluster, plan, options.sweep or [])
    results = run_all(jobs)
    if options.events is not None:
        _write_events(jobs[0], options.events)
    told: list[dict[str, float | str]] = [{"run": label, **_row(result)} for label, result in results]
    _print_rows(f"{len(population):,} prompts, {jobs[0][3].engines} engines of {jobs[0][3].slots} slots", told, options)
    if options.json is None:
        for label, result in results:
            print(f"{label}: {_in_words(result)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ngu simulate", allow_abbrev=False, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", metavar="LIST", help="for example fixed:k=16,ngu:p=0.9 (default: fixed,ngu)")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="prompts as `ngu probe` found them")
    parser.add_argument("--prompts", type=int, metavar="N", help="how many (default: those of the probe, or 10000)")
    parser.add_argument(
        "--mix", nargs="+", metavar="NAME:WEIGHT:RATE[:SPREAD[:TOKENS]]", help="kinds of prompts instead of a probe"
    )
    for section, cls in (("cluster", Cluster), ("plan", Plan)):
        group = parser.add_argument_group(section)
        for option in fields(cls):
            if option.name == "retry_order":
                group.add_argument("--retry-order", choices=("back", "front"), default=None)
                continue
            kind = int if "int" in str(option.type) else float
            flag = "--" + option.name.replace("_", "-")
            group.add_argument(flag, type=kind, default=None, metavar=kind.__name__, help=f"default: {option.default}")
    parser.add_argument("--sweep", nargs="+", metavar="KEY=A,B,C", help="every combination of these values")
    parser.add_argument("--high-k", action="store_true", help="the table of the high-K paradox")
    parser.add_argument("--scaling", action="store_true", help="clusters of 8 to 4,096 GPUs")
    parser.add_argument(
        "--events", type=Path, metavar="FILE", help="write the events of the first run, as in a run folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing a table")
    return parser


def _mix(words: Sequence[str] | None) -> Sequence[Kind]:
    if not words:
        return MIX
    kinds = []
    for word in words:
        name, *numbers = word.split(":")
        try:
            weight, rate, *rest = map(float, numbers)
            kinds.append(Kind(name, weight, rate, *rest[:2]))
        except ValueError:
            raise ValueError(f"--mix {word}: write NAME:WEIGHT:RATE, for example hard:0.3:0.1") from None
    if len({kind.name for kind in kinds}) != len(kinds):
        raise ValueError("--mix: two kinds have the same name")
    return kinds


def _swept(
    strategies: Mapping[str, AnyStrategy], population: Population, cluster: Cluster, plan: Plan, sweep: Sequence[str]
) -> list[Job]:
    if not sweep:
        return [(label, strategy, population, cluster, plan) for label, strategy in strategies.items()]
    axes: dict[str, list[str]] = {}
    for word in sweep:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ValueError(f"--sweep {word}: write KEY=A,B,C, for example k=2,4,8")
        axes[key] = values.split(",")
    jobs = []
    (named,) = strategies
    for combination in product(*axes.values()):
        given = dict(zip(axes, combination, strict=True))
        of_cluster: dict[str, Any] = {}
        of_plan: dict[str, Any] = {}
        name = named
        for key, value in given.items():
            if key in SWEPT:
                of_plan[key] = _number(key, value)
            elif key in {f.name for f in fields(Cluster)}:
                of_cluster[key] = _number(key, value)
            else:
                name += f":{key}={value}"
        (strategy,) = strategies_named(name).values()
        label = " ".join(f"{key}={value}" for key, value in given.items())
        jobs.append((label, strategy, population, replace(cluster, **of_cluster), replace(plan, **of_plan)))
    return jobs


def _number(key: str, value: str) -> float | int:
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        raise ValueError(f"--sweep {key}={value}: not a number") from None


def _write_events(job: Job, path: Path) -> None:
    """The same run again, with its events written: the same arguments give the same events."""
    clock = [0.0]
    path.unlink(missing_ok=True)
    writer = EventWriter(path, lambda: clock[0])

    def write(seconds: float, event: Event) -> None:
        clock[0] = seconds
        writer.write(event)

    try:
        simulate(*job[1:], on_event=write)
    finally:
        writer.close()


def _row(result: Result) -> dict[str, float | str]:
    row: dict[str, float | str] = {
        "hours": result.seconds / 3600,
        "steps": result.steps,
        "completions": result.completions,
        "per_trained_group": result.per_trained_group,
        "retries": result.retries / max(result.rounds, 1),
        "age": result.age_mean,
        "stale": result.stale_share,
        "slots_busy": result.busy,
        "trainer_busy": result.trainer_busy,
    }
    for kind in result.drawn:
        row[f"drawn/{kind}"] = result.share(result.drawn, kind)
    for kind in result.drawn:
        row[f"trained/{kind}"] = result.share(result.trained_groups, kind)
    if any(before != after for before, after in result.rates.values()):
        for kind, (before, after) in result.rates.items():
            row[f"rate/{kind}"] = f"{before:.3f} -> {after:.3f}"
    return row


def _in_words(result: Result) -> str:
    most = max(result.drawn, key=lambda kind: result.drawn[kind])
    slower = "generation" if result.busy > result.trainer_busy else "training"
    return (
        f"{result.share(result.drawn, most):.0%} of completions go to {most.replace('_', ' ')} prompts; "
        f"{result.per_trained_group:.1f} completions for each group with contrast; {slower} is the slower side "
        f"(slots busy {result.busy:.0%}, trainer {result.trainer_busy:.0%}); {result.reason}"
    )


def _print_rows(title: str, rows: Sequence[Mapping[str, float | str]], options: argparse.Namespace) -> int:
    """Runs side by side as columns, quantities as lines."""
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    names = list(dict.fromkeys(name for row in rows for name in row))
    table.add_column(names[0])
    for row in rows:
        table.add_column(_shown(row[names[0]]), justify="right")
    for name in names[1:]:
        table.add_row(name.replace("_", " "), *(_shown(row.get(name, "")) for row in rows))
    Console().print(table)
    return 0


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
