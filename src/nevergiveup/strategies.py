"""Sampling strategies: how many completions a prompt gets, what becomes of its group, what each attempt weighs.

Layer 0. Standard library only. A strategy is a frozen value: it is its own configuration, holds no state, and draws random
numbers only from the generator it is handed. To add one, write a frozen dataclass with the members of `Strategy` (or of
`Allocator`) and a `cost_in_words`, and name it in `STRATEGIES`. docs/strategies.md compares them.

First those that look at one prompt at a time, then the allocators, which share a budget out among prompts. K is the number of
completions of one attempt, b the mean reward of a chain, p a pass rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil, floor, log, sqrt
from random import Random
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from nevergiveup.advantages import (
    Anchor,
    Divisor,
    Weights,
    anchored,
    as_integers,
    centred,
    focal,
    leave_one_out,
    shift_reaches_max,
    virtual_maximum,
)
from nevergiveup.types import Decision, Exact, Group, Memory, Prompt, Verdict, Waiting

_TRAIN = Decision(Verdict.TRAIN)
_SOLVED = Decision(Verdict.SOLVED)
_GIVE_UP = Decision(Verdict.GIVE_UP)
_WAIT = Decision(Verdict.WAIT)


class Strategy(Protocol):
    """One prompt's way through a pass. Called by the scheduler only."""

    @property
    def window(self) -> int | None:
        """T, the oldest age (in policy versions) that is still trained on; None keeps every age."""
        ...

    def open(self, prompt: Prompt) -> int:
        """Completions to draw in the first round; 0 (allocators only): that is decided together with other prompts."""
        ...

    def judge(self, group: Group, rng: Random) -> Decision:
        """After every round; attempts older than the window are already gone from `group.fresh`."""
        ...

    def weigh(self, group: Group) -> Weights:
        """When the batch is cut: one advantage a fresh attempt. All None: nothing here can be trained any more."""
        ...


@runtime_checkable
class Allocator(Strategy, Protocol):
    """A strategy that shares a budget out among prompts, by what it knows of them.

    A chain waits when `open` returned 0 or `judge` said WAIT. When `block` chains wait, or nothing else can move, they are
    decided together.
    """

    @property
    def block(self) -> int:
        """Prompts that are decided together."""
        ...

    @property
    def wants_gradient_norms(self) -> bool:
        """Whether `Waiting.gradient_norm` is of use; it is measured only if a learner can."""
        ...

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        """After every round, before `judge`: what to keep of the prompt from now on, given the rewards of the round."""
        ...

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        """One decision a prompt: RETRY with `draws`, or (when it has a group) TRAIN, SOLVED or GIVE_UP."""
        ...


@dataclass(frozen=True, slots=True)
class FixedK:
    """GRPO with a fixed number of completions (arXiv 2402.03300). Groups without contrast ride along with zeros."""

    name: ClassVar[str] = "fixed"

    k: int = 4
    """Completions per prompt."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing (Dr. GRPO), std (classic GRPO), sample_std, or baseline (MaxRL)."""
    leave_one_out: bool = False
    """Subtract the mean of the other attempts instead of that of all (RLOO)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)
        _check_gamma(self.gamma)
        if self.leave_one_out and self.divide_by != "nothing":
            raise ValueError(f'leave_one_out = true is not combined with divide_by = "{self.divide_by}": leave one out')

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        return _TRAIN

    def weigh(self, group: Group) -> Weights:
        if self.leave_one_out:
            return _focused(leave_one_out(_rewards(group)), group, self.gamma)
        return _focused(centred(_rewards(group), divide_by=self.divide_by), group, self.gamma)

    def cost_in_words(self) -> str:
        return f"every prompt costs {self.k} completions a pass, whether it teaches anything or not"


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """DAPO's filter (arXiv 2503.14476): groups without contrast are dropped and other prompts take their place."""

    name: ClassVar[str] = "dapo"

    k: int = 4
    """Completions per prompt."""
    divide_by: Divisor = "std"
    """Advantages are divided by it: nothing, std (of the group's rewards), sample_std, or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)
        _check_gamma(self.gamma)

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        return _filtered(group)

    def weigh(self, group: Group) -> Weights:
        return _of_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return (
            f"every prompt costs {self.k} completions a pass; a group with contrast at pass rate p costs "
            f"{self.k} / (1 - p^{self.k} - (1-p)^{self.k}), for example {self.k / _contrast(0.05, self.k):.0f} at p = .05"
        )


@dataclass(frozen=True, slots=True)
class NeverGiveUp:
    """NGU (arXiv 2609.13443): a group without contrast or progress is asked again with probability p, its history kept."""

    name: ClassVar[str] = "ngu"

    k: int = 4
    """K: completions per attempt."""
    p: float = 0.95
    """p_ngu: probability to try again; an unsolvable prompt costs K/(1-p) completions in expectation."""
    accept: Literal["better", "above_mean", "varied"] = "better"
    """When a later attempt is trained on: its best beats the chain's best (better); some fresh reward is above the chain's
    mean (above_mean); it varies, or its best differs from the chain's best (varied). The same for 0/1 rewards."""
    anchor: Anchor = "shift"
    """How survivors are weighed against the whole history: shift, scale, recompute, none or downsample."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std or sample_std (of the survivors), or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - b)^gamma (F-GRPO); 0 is off."""
    virtual_max: bool = False
    """Train on given-up groups too, weighed as if one more attempt had been right (NGRPO)."""
    max_attempts: int | None = None
    """Most attempts at one visit of a prompt; none means no cap (p < 1 bounds the cost in expectation)."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on, but count in the baseline."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)
        _check_gamma(self.gamma)
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"p = {self.p} (p_ngu) is no probability: give a number from 0 up to, not including, 1")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts = {self.max_attempts} must be at least 1, or left out for no cap")
        if self.p == 1.0 and self.max_attempts is None:
            raise ValueError(
                "p = 1.0 (p_ngu) never gives up: an unsolvable prompt costs an unbounded number of completions; "
                "use p < 1 (0.75 to 0.95), or set max_attempts"
            )

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        if group.is_solved:
            return _SOLVED
        # Contrast of the newest round counts even if part of it is stale on arrival: `weigh` then finds nothing to train
        # and the scheduler handles it as staleness, which must not pass for a failure.
        if self._progresses(group) and (group.has_contrast or group.new_max > group.new_min):
            return _TRAIN
        if group.new_min == group.prompt.max_reward:
            return _SOLVED  # all right after failures, and no failure is fresh enough to contrast with
        if (self.max_attempts is None or group.rounds < self.max_attempts) and rng.random() < self.p:
            return Decision(Verdict.RETRY, self.k)
        return _TRAIN if self.virtual_max and group.fresh else _GIVE_UP

    def _progresses(self, group: Group) -> bool:
        if self.accept == "above_mean":
            return max([group.new_max, *_rewards(group)]) * group.tried > group.total
        if group.best_before is None:
            return group.new_max > group.new_min
        if self.accept == "varied":
            return group.new_max > group.new_min or group.new_max != group.best_before
        return group.new_max > group.best_before

    def weigh(self, group: Group) -> Weights:
        if group.has_contrast:
            weights = anchored(
                _rewards(group), group.tried, group.total, mode=self.anchor, divide_by=self.divide_by
            )  # fmt: skip
            return _focused(weights, group, self.gamma)
        best = group.best_before
        if self.virtual_max and group.fresh and group.fresh[0].reward == best != group.prompt.max_reward:
            # Given up: nothing better was ever drawn. Else a success went stale, which is no failure of the others.
            return _focused(virtual_maximum(_rewards(group), group.prompt.max_reward), group, self.gamma)
        return (None,) * len(group.fresh)

    def falls_back(self, group: Group) -> bool:
        """Whether `weigh` had to use the survivors' mean, because the shift would have broken the order of the rewards."""
        return (
            self.anchor == "shift"
            and group.has_contrast
            and shift_reaches_max(_rewards(group), group.tried, group.total)
        )

    def cost_in_words(self) -> str:
        """What a prompt that is never solved may cost (oracles 2.5 and 2.6)."""
        if self.p == 0.0:
            return f"a prompt that is never solved costs {self.k} completions"
        if self.p == 1.0:
            return f"a prompt that is never solved costs {self.k * (self.max_attempts or 1)} completions"
        cap = self.max_attempts
        mean = self.k * ((1.0 - self.p**cap) if cap else 1.0) / (1.0 - self.p)
        attempts_p99 = ceil(log(0.01) / log(self.p) - 1e-9)  # P(more than r attempts) = p^r
        worst = self.k * (min(attempts_p99, cap) if cap else attempts_p99)
        return f"a prompt that is never solved costs {mean:.0f} completions on average, {worst} at the 99th percentile"


@dataclass(frozen=True, slots=True)
class NoPositiveResampling:
    """DAPO's filter that also retires a prompt for good once its pass rate reaches a threshold: what NGU is compared with
    (arXiv 2609.13443). Retired prompts are never sampled again, so nobody sees when they are forgotten."""

    name: ClassVar[str] = "no-positive"

    k: int = 16
    """Completions per prompt."""
    threshold: float = 1.0
    """Pass rate from which a prompt is retired (published: 1.0 and 0.875)."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std, sample_std, or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)
        _check_gamma(self.gamma)
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold = {self.threshold} is a pass rate above 0 and at most 1: use 1.0 or 0.875")

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        decision = _filtered(group)
        if group.total >= self.threshold * group.tried * group.prompt.max_reward:
            return Decision(decision.verdict, retire=True)
        return decision

    def weigh(self, group: Group) -> Weights:
        return _of_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.k} completions a pass until {100 * self.threshold:g} % of them are right: then it is gone"


@dataclass(frozen=True, slots=True)
class ReinforceAda:
    """Reinforce-Ada, sequential (arXiv 2510.04996): rounds of M until enough is right, then n attempts are kept, half of
    them right, and weighed by r - b with b over all draws."""

    name: ClassVar[str] = "reinforce-ada"

    mode: Literal["positive", "balanced"] = "balanced"
    """Enough is: one right attempt (positive), or keep/2 right and keep/2 wrong ones (balanced)."""
    per_round: int = 8
    """M: completions of a round."""
    max_rounds: int = 4
    """Rounds at one visit of a prompt."""
    keep: int = 4
    """n: attempts that are trained on."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std or sample_std (of all fresh draws), or baseline (MaxRL)."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_least("per_round", self.per_round, 2)
        _check_least("max_rounds", self.max_rounds, 1)
        _check_least("keep", self.keep, 2)
        _check_window(self.window)

    def open(self, prompt: Prompt) -> int:
        return self.per_round

    def judge(self, group: Group, rng: Random) -> Decision:
        n_right = _n_right(group)
        half = self.keep // 2
        if self.mode == "positive":
            is_enough = n_right >= 1
        else:
            is_enough = n_right >= half and len(group.fresh) - n_right >= half
        if not is_enough and group.rounds < self.max_rounds:
            return Decision(Verdict.RETRY, self.per_round)
        return _filtered(group)

    def weigh(self, group: Group) -> Weights:
        rewards = _rewards(group)
        values, _, _ = as_integers(rewards, 0)
        top = max(values, default=0)
        best = [i for i, value in enumerate(values) if value == top]
        others = [i for i, value in enumerate(values) if value != top]
        if not others:
            return (None,) * len(rewards)
        n_others = min(len(others), max(self.keep - self.keep // 2, self.keep - len(best)))
        kept = {*best[-(self.keep - n_others) :], *others[-n_others:]}  # the newest
        weights = anchored(rewards, group.tried, group.total, mode="none", divide_by=self.divide_by)
        return tuple([weight if i in kept else None for i, weight in enumerate(weights)])

    def cost_in_words(self) -> str:
        most = self.per_round * self.max_rounds
        return f"a prompt that is never solved costs {most} completions; {self.keep} of a group are trained on"


@dataclass(frozen=True, slots=True)
class SpeedRL:
    """SPEED-RL (arXiv 2506.09016): a few completions tell whether a prompt is worth the many; both are trained on."""

    name: ClassVar[str] = "speed"

    n_init: int = 8
    """Completions that tell: all right or all wrong ends the visit."""
    n_cont: int = 16
    """Completions that follow if they differ."""
    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std, sample_std, or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_least("n_init", self.n_init, 2)
        _check_least("n_cont", self.n_cont, 1)
        _check_window(self.window)
        _check_gamma(self.gamma)

    def open(self, prompt: Prompt) -> int:
        return self.n_init

    def judge(self, group: Group, rng: Random) -> Decision:
        decision = _filtered(group)
        if decision is _TRAIN and group.rounds == 1:
            return Decision(Verdict.RETRY, self.n_cont)
        return decision

    def weigh(self, group: Group) -> Weights:
        return _of_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.n_init} completions, and {self.n_cont} more if those are neither all right nor all wrong"


# ------------------------------------------------------------------------------------------- allocators


@dataclass(frozen=True, slots=True)
class ReinforceAdaStatic:
    """Reinforce-Ada-Est with fixed estimates (arXiv 2510.04996): the first visit of a prompt draws 32; how many of them are
    right decides for good what later visits draw: 8 or more 4, 4 or more 8, 2 or more 16, else 32."""

    name: ClassVar[str] = "ada-static"
    block: ClassVar[int] = 1
    wants_gradient_norms: ClassVar[bool] = False

    divide_by: Divisor = "nothing"
    """Advantages are divided by it: nothing, std, sample_std, or baseline (MaxRL)."""
    gamma: float = 0.0
    """Advantages are multiplied by (1 - pass rate)^gamma (F-GRPO); 0 is off."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_window(self.window)
        _check_gamma(self.gamma)

    def open(self, prompt: Prompt) -> int:
        return 0

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return (len(rewards), sum(reward == prompt.max_reward for reward in rewards)) if memory is None else memory

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        return [Decision(Verdict.RETRY, self._draws(one.memory)) for one in waiting]

    def _draws(self, memory: Memory | None) -> int:
        if memory is None:
            return 32
        n, n_right = memory
        of_32 = n_right * 32 / n  # some of the 32 may have come back without a verdict
        return 4 if of_32 >= 8 else 8 if of_32 >= 4 else 16 if of_32 >= 2 else 32

    def judge(self, group: Group, rng: Random) -> Decision:
        return _filtered(group)

    def weigh(self, group: Group) -> Weights:
        return _of_contrast(group, self.divide_by, self.gamma)

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
        _check_least("k_min", self.k_min, 2)
        _check_least("k_max", self.k_max, self.k_min)
        _check_discount(self.discount)
        _check_window(self.window)
        if not self.eps > 0:
            raise ValueError(f"eps = {self.eps} must be above 0, usually 0.05")

    def open(self, prompt: Prompt) -> int:
        return 0

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return _discounted(memory, prompt, rewards, self.discount)

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        draws = [round(self.k_max * sqrt(self.eps / (_estimate(one.memory) + self.eps))) for one in waiting]
        return [Decision(Verdict.RETRY, min(max(n, self.k_min), self.k_max)) for n in draws]

    def judge(self, group: Group, rng: Random) -> Decision:
        return _TRAIN

    def weigh(self, group: Group) -> Weights:
        rewards = _rewards(group)
        if not rewards:
            return ()
        values, top, _ = as_integers(rewards, group.prompt.max_reward)
        scale = sqrt(max(0.0, sum(values) / (len(values) * top)) + self.eps)
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
    weights: Literal["raft", "centred"] = "raft"
    """raft: right attempts weigh 1, others 0. centred: r - mean."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_least("probe", self.probe, 2)
        _check_least("budget", self.budget, 1)
        _check_least("block", self.block, 1)
        _check_window(self.window)
        if not self.penalty >= 0:
            raise ValueError(f"penalty = {self.penalty} (alpha) must be at least 0, usually 0.001")
        if not self.power >= 1:
            raise ValueError(f"power = {self.power} (beta) must be at least 1, usually 2")

    def open(self, prompt: Prompt) -> int:
        return self.probe

    def judge(self, group: Group, rng: Random) -> Decision:
        return _WAIT if group.rounds == 1 else self._end(group)

    def _end(self, group: Group) -> Decision:
        if self.weights == "centred":
            return _filtered(group)
        return _TRAIN if _n_right(group) or group.new_max == group.prompt.max_reward else _GIVE_UP

    def learn(self, memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact]) -> Memory | None:
        return None  # every visit has its own probe

    def allocate(self, waiting: Sequence[Waiting]) -> Sequence[Decision]:
        shares = [self._share(one) for one in waiting]
        draws = share_out(self.budget * len(waiting), shares)
        return [
            Decision(Verdict.RETRY, n) if n else _GIVE_UP if one.group is None else self._end(one.group)
            for one, n in zip(waiting, draws, strict=True)
        ]

    def _share(self, one: Waiting) -> float:
        p = 0.0 if one.group is None else _pass_rate(one.group)
        norm = 1.0 if one.gradient_norm is None else one.gradient_norm
        return norm / sqrt(p + self.penalty / p ** (self.power - 1)) if p > 0 else 0.0

    def weigh(self, group: Group) -> Weights:
        if self.weights == "centred":
            return _of_contrast(group, "nothing", 0.0)
        if not _n_right(group):
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
        _check_least("k_min", self.k_min, 2)
        _check_least("k_max", self.k_max, self.k_min)
        _check_least("block", self.block, 1)
        _check_discount(self.discount)
        _check_window(self.window)
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
        return _TRAIN

    def weigh(self, group: Group) -> Weights:
        return centred(_rewards(group), divide_by=self.divide_by)

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


AnyStrategy: TypeAlias = (
    NeverGiveUp
    | FixedK
    | DynamicSampling
    | NoPositiveResampling
    | ReinforceAda
    | ReinforceAdaStatic
    | ReinforceAdaOnline
    | GvmRaft
    | SpeedRL
    | Knapsack
)

STRATEGIES: dict[str, type[AnyStrategy]] = {
    cls.name: cls
    for cls in (
        NeverGiveUp,
        FixedK,
        DynamicSampling,
        NoPositiveResampling,
        ReinforceAda,
        ReinforceAdaStatic,
        ReinforceAdaOnline,
        GvmRaft,
        SpeedRL,
        Knapsack,
    )
}
"""Name on the command line -> strategy."""


# -------------------------------------------------------------------------------------- what they share


def _filtered(group: Group) -> Decision:
    """Trained with contrast, else closed. A newest round with contrast counts even if part of it is stale on arrival:
    `weigh` finds nothing to train then, and the scheduler handles it as staleness, which must not pass for a failure."""
    if group.is_solved:
        return _SOLVED
    if group.has_contrast or group.new_max > group.new_min:
        return _TRAIN
    return _SOLVED if group.new_min == group.prompt.max_reward else _GIVE_UP


def _rewards(group: Group) -> list[Exact]:
    return [attempt.reward for attempt in group.fresh]


def _n_right(group: Group) -> int:
    values, top, _ = as_integers(_rewards(group), group.prompt.max_reward)
    return sum([value == top for value in values])


def _pass_rate(group: Group) -> float:
    """Mean reward of the chain as a share of the maximum, in [0, 1]."""
    return min(1.0, max(0.0, float(group.total / (group.tried * group.prompt.max_reward))))


def _of_contrast(group: Group, divide_by: Divisor, gamma: float) -> Weights:
    if not group.has_contrast:
        return (None,) * len(group.fresh)
    return _focused(centred(_rewards(group), divide_by=divide_by), group, gamma)


def _focused(weights: Weights, group: Group, gamma: float) -> Weights:
    return focal(weights, _pass_rate(group), gamma) if gamma else weights


def _contrast(p: float, k: int) -> float:
    return 1.0 - p**k - (1.0 - p) ** k


def _discounted(memory: Memory | None, prompt: Prompt, rewards: Sequence[Exact], discount: float) -> Memory:
    """Beta counts of right and wrong (a partial score is both), what came before fading by `discount`; at first (1, 1)."""
    alpha, beta = memory or (1.0, 1.0)
    right = sum([min(1.0, max(0.0, float(reward / prompt.max_reward))) for reward in rewards])
    return (discount * alpha + right, discount * beta + len(rewards) - right)


def _estimate(memory: Memory | None) -> float:
    alpha, beta = memory or (1.0, 1.0)
    return alpha / (alpha + beta)


def _check_k(k: int) -> None:
    if k < 2:
        raise ValueError(f"k = {k} (completions per attempt) gives no contrast within a group: use 2 or more, 4 or 16")


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} = {value} must be at least {least}")


def _check_gamma(gamma: float) -> None:
    if not gamma >= 0:
        raise ValueError(f"gamma = {gamma} (F-GRPO's power of 1 - pass rate) must be 0 (off) or more")


def _check_discount(discount: float) -> None:
    if not 0 < discount <= 1:
        raise ValueError(f"discount = {discount} must be above 0 and at most 1 (never forget)")


def _check_window(window: int | None) -> None:
    if window is not None and window < 0:
        raise ValueError(
            f"window = {window} (T, oldest trainable age) must be 0 or more; leave it as none to train on every age"
        )
