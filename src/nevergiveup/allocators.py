"""Allocators: sampling strategies that share a budget of completions out among prompts, by what they know of them.

Layer 0. Standard library only. `judging.Allocator` says when the scheduler calls what; `strategies` has all others and the
list of all names. p is a prompt's pass rate: mean reward as a share of the maximum score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import floor, sqrt
from random import Random
from typing import ClassVar, Literal, TypeAlias

from nevergiveup.advantages import Divisor, Weights, centred
from nevergiveup.judging import (
    GIVE_UP,
    TRAIN,
    centred_if_contrast,
    check_above,
    check_choice,
    check_discount,
    check_least,
    check_weights,
    check_window,
    filtered,
    n_right,
    pass_rate,
    rewards_of,
    share_of_max,
)
from nevergiveup.types import Decision, Exact, Group, Memory, Prompt, Verdict, Waiting

RaftWeights: TypeAlias = Literal["raft", "centred"]

WAIT = Decision(Verdict.WAIT)


@dataclass(frozen=True, slots=True)
class ReinforceAdaStatic:
    """Reinforce-Ada-Est with fixed estimates (arXiv 2510.04996): a prompt's first 32 completions, trained on like any other,
    decide for good what later visits draw. 8 or more right: 4; 4 or more: 8; 2 or more: 16; else 32."""

    name: ClassVar[str] = "ada-static"
    block: ClassVar[int] = 1
    wants_gradient_norms: ClassVar[bool] = False
    probe: ClassVar[int] = 32

    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std, sample_std, or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)

    def open(self, prompt: Prompt) -> int:
        return 0

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        """Memory: how many of the first 32 are in, and how many of those are right."""
        n, right = memory or (0, 0)
        new = rewards[: max(0, self.probe - int(n))]
        return (n + len(new), right + sum([reward == prompt.max_reward for reward in new]))

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        return [Decision(Verdict.RETRY, self._draws(one.memory)) for one in waiting]

    def _draws(self, memory: Memory | None) -> int:
        n, right = memory or (0, 0)
        if n < self.probe:  # some came back without a verdict
            return max(4, self.probe - int(n))
        return 4 if right >= 8 else 8 if right >= 4 else 16 if right >= 2 else 32

    def judge(self, group: Group, rng: Random) -> Decision:
        return filtered(group)

    def weigh(self, group: Group) -> Weights:
        return centred_if_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return "the first visit of a prompt costs 32 completions, later ones 4 to 32 by how many of those were right"


@dataclass(frozen=True, slots=True)
class ReinforceAdaOnline:
    """Reinforce-Ada-Est with running estimates (arXiv 2510.04996): a prompt gets k_max sqrt(eps / (p + eps)) completions, so
    that N ~ 1/sqrt(p + eps), p being a discounted Beta estimate of its pass rate. All groups are trained on, weighed by
    (r - mean) / sqrt(mean + eps)."""

    name: ClassVar[str] = "ada-online"
    block: ClassVar[int] = 1
    wants_gradient_norms: ClassVar[bool] = False

    k_min: int = 4
    """Fewest completions of a prompt."""
    k_max: int = 32
    """Most completions of a prompt: those of one that is never solved."""
    eps: float = 0.05
    """Keeps the number of completions and the weights finite at pass rate 0."""
    discount: float = 0.9
    """What earlier visits count at each new one."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        check_least("k_min", self.k_min, 2)
        check_least("k_max", self.k_max, self.k_min)
        check_discount(self.discount)
        check_window(self.window)
        check_above("eps", self.eps, 0, "0.05", or_equal=False)

    def open(self, prompt: Prompt) -> int:
        return 0

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return _discounted(memory, prompt, rewards, self.discount)

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        draws = [round(self.k_max * sqrt(self.eps / (_estimate(one.memory) + self.eps))) for one in waiting]
        return [Decision(Verdict.RETRY, min(max(n, self.k_min), self.k_max)) for n in draws]

    def judge(self, group: Group, rng: Random) -> Decision:
        return TRAIN

    def weigh(self, group: Group) -> Weights:
        rewards = rewards_of(group)
        if not rewards:
            return ()
        scale = sqrt(share_of_max(rewards, group.prompt.max_reward) + self.eps)
        return tuple([weight / scale for weight in centred(rewards)])

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.k_min} to {self.k_max} completions a visit, more the less often it was solved"


@dataclass(frozen=True, slots=True)
class GvmRaft:
    """GVM-RAFT (arXiv 2505.02391): a probe of each prompt, then a budget shared out in proportion to
    G / sqrt(p + penalty / p^(power - 1)), where p is the pass rate of the probe and G the mean gradient norm of its right
    attempts; nothing for p = 0 or G = 0. G comes from the learner; without one the shares follow p alone."""

    name: ClassVar[str] = "gvm-raft"
    wants_gradient_norms: ClassVar[bool] = True

    probe: int = 8
    """Completions of the first round."""
    budget: int = 8
    """Completions after it, a prompt on average."""
    block: int = 16
    """Prompts that share a budget."""
    penalty: float = 1e-3
    """alpha: strength of the penalty on rarely solved prompts."""
    power: float = 2.0
    """beta: its power."""
    weights: RaftWeights = "raft"
    """raft: right attempts weigh 1, others 0. centred: r - mean."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        check_least("probe", self.probe, 2)
        check_least("budget", self.budget, 1)
        check_least("block", self.block, 1)
        check_window(self.window)
        check_above("penalty", self.penalty, 0, "0.001 (alpha)")
        check_above("power", self.power, 1, "2 (beta)")
        check_choice("weights", self.weights, RaftWeights)

    def open(self, prompt: Prompt) -> int:
        return self.probe

    def judge(self, group: Group, rng: Random) -> Decision:
        return WAIT if group.rounds == 1 else self._end(group)

    def _end(self, group: Group) -> Decision:
        if self.weights == "centred":
            return filtered(group)
        return TRAIN if n_right(group) or group.new_max == group.prompt.max_reward else GIVE_UP

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return None  # every visit has its own probe

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        shares = [self._share(one) for one in waiting]
        draws = share_out(self.budget * len(waiting), shares)
        return [
            Decision(Verdict.RETRY, n) if n else GIVE_UP if one.group is None else self._end(one.group)
            for one, n in zip(waiting, draws, strict=True)
        ]

    def _share(self, one: Waiting) -> float:
        p = 0.0 if one.group is None else pass_rate(one.group)
        norm = 1.0 if one.gradient_norm is None else one.gradient_norm
        inverse = p**self.power + self.penalty  # times p^(power - 1), above and below: nothing divides by p = 0
        return norm * sqrt(p ** (self.power - 1) / inverse) if p > 0 and inverse > 0 else 0.0

    def weigh(self, group: Group) -> Weights:
        if self.weights == "centred":
            return centred_if_contrast(group, "nothing")
        if not n_right(group):
            return (None,) * len(group.fresh)
        return tuple([float(attempt.reward == group.prompt.max_reward) for attempt in group.fresh])

    def cost_in_words(self) -> str:
        return (
            f"a prompt costs {self.probe} completions, and {self.budget} more on average, shared out over {self.block} prompts "
            "by pass rate and (where a learner measures it) gradient norm; one that is never solved gets no more"
        )


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Knapsack RL (arXiv 2509.25849): a budget is shared out so that sum (1 - p^n - (1-p)^n) p (1-p)^2 is greatest, p being a
    discounted Beta estimate from earlier visits. All groups are trained on."""

    name: ClassVar[str] = "knapsack"
    wants_gradient_norms: ClassVar[bool] = False

    budget: int = 8
    """Completions of a prompt, on average."""
    k_min: int = 2
    """Fewest completions of a prompt."""
    k_max: int = 128
    """Most completions of a prompt."""
    block: int = 16
    """Prompts that share a budget."""
    discount: float = 0.9
    """What earlier visits count at each new one."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std, sample_std, or baseline (MaxRL)."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        check_least("k_min", self.k_min, 2)
        check_least("k_max", self.k_max, self.k_min)
        check_least("block", self.block, 1)
        check_discount(self.discount)
        check_window(self.window)
        check_weights(self.divide_by)
        if not self.k_min <= self.budget <= self.k_max:
            raise ValueError(f"budget = {self.budget} must be from k_min = {self.k_min} to k_max = {self.k_max}")

    def open(self, prompt: Prompt) -> int:
        return 0

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return _discounted(memory, prompt, rewards, self.discount)

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        rates = [_estimate(one.memory) for one in waiting]
        return [
            Decision(Verdict.RETRY, n) for n in fill_knapsack(rates, self.budget * len(rates), self.k_min, self.k_max)
        ]

    def judge(self, group: Group, rng: Random) -> Decision:
        return TRAIN

    def weigh(self, group: Group) -> Weights:
        return centred(rewards_of(group), divide_by=self.divide_by)

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.budget} completions on average, {self.k_min} to {self.k_max} by its estimated pass rate"


def share_out(total: int, shares: Sequence[float]) -> list[int]:
    """`total` in whole numbers proportional to `shares` (at least 0), by largest remainder; sums to it exactly, or to 0 when
    every share is 0. Nothing goes to a share of 0."""
    whole = sum(shares)
    if not whole:
        return [0] * len(shares)
    exact_shares = [total * share / whole for share in shares]
    counts = [floor(share) for share in exact_shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact_shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def fill_knapsack(rates: Sequence[float], total: int, k_min: int, k_max: int) -> list[int]:
    """Completions for prompts of these pass rates that maximise sum (1 - p^n - (1-p)^n) p (1-p)^2 with `total` in all.

    One by one to where the next gains most: the value is concave in n, so that is optimal.
    """
    counts = [k_min] * len(rates)

    def gain(i: int) -> float:
        p, n = rates[i], counts[i]
        return (p**n * (1 - p) + (1 - p) ** n * p) * p * (1 - p) ** 2

    heap = [(-gain(i), i) for i in range(len(rates)) if k_min < k_max]
    heapify(heap)
    for _ in range(total - sum(counts)):
        if not heap or heap[0][0] == float("inf"):
            break
        i = heap[0][1]
        counts[i] += 1
        heapreplace(heap, (-gain(i) if counts[i] < k_max else float("inf"), i))
    return counts


def _discounted(memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact], discount: float) -> Memory:
    """Beta counts of right and wrong (a partial score is both), what came before fading by `discount`; at first (1, 1)."""
    alpha, beta = memory or (1.0, 1.0)
    right = len(rewards) * share_of_max(rewards, prompt.max_reward)
    return (discount * alpha + right, discount * beta + len(rewards) - right)


def _estimate(memory: Memory | None) -> float:
    alpha, beta = memory or (1.0, 1.0)
    return alpha / (alpha + beta)
