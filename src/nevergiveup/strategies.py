"""Sampling strategies: how many completions a prompt gets, what becomes of its group, what each attempt weighs.

Layer 0. Standard library only. A strategy is a frozen value: it is its own configuration, holds no state, and draws random
numbers only from the generator it is handed. To add one, write a frozen dataclass with the members of `Strategy` (or of
`Allocator`) and a `cost_in_words`, and name it in `STRATEGIES`. docs/strategies.md compares them.

Here are those that look at one prompt at a time; `allocators` has those that share a budget out among prompts. K is the
number of completions of one attempt, b the mean reward of a chain, p a pass rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from random import Random
from typing import ClassVar, Literal, TypeAlias

from nevergiveup.advantages import (
    Anchor,
    Divisor,
    Weights,
    anchored,
    as_integers,
    centred,
    leave_one_out,
    shift_reaches_max,
    virtual_maximum,
)
from nevergiveup.allocators import (
    GvmRaft,
    Knapsack,
    ReinforceAdaOnline,
    ReinforceAdaStatic,
    fill_knapsack,
    share_out,
)
from nevergiveup.judging import (
    GIVE_UP,
    SOLVED,
    TRAIN,
    Allocator,
    Strategy,
    centred_if_contrast,
    check_choice,
    check_k,
    check_least,
    check_weights,
    check_window,
    filtered,
    focused,
    n_right,
    pass_rate,
    rewards_of,
)
from nevergiveup.types import Decision, Exact, Group, Prompt, Verdict

__all__ = [
    "STRATEGIES",
    "Allocator",
    "AnyStrategy",
    "DynamicSampling",
    "FixedK",
    "GvmRaft",
    "Knapsack",
    "NeverGiveUp",
    "NoPositiveResampling",
    "ReinforceAda",
    "ReinforceAdaOnline",
    "ReinforceAdaStatic",
    "SpeedRL",
    "Strategy",
    "fill_knapsack",
    "share_out",
]

Accept: TypeAlias = Literal["better", "above_mean", "varied"]
Enough: TypeAlias = Literal["positive", "balanced"]


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
        check_k(self.k)
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)
        if self.leave_one_out and self.divide_by != "nothing":
            raise ValueError(f'leave_one_out = true is not combined with divide_by = "{self.divide_by}": leave one out')

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        return TRAIN

    def weigh(self, group: Group) -> Weights:
        if self.leave_one_out:
            return focused(leave_one_out(rewards_of(group)), group, self.gamma)
        return focused(centred(rewards_of(group), divide_by=self.divide_by), group, self.gamma)

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
        check_k(self.k)
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        return filtered(group)

    def weigh(self, group: Group) -> Weights:
        return centred_if_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        contrast = 1 - 0.05**self.k - 0.95**self.k
        return (
            f"every prompt costs {self.k} completions a pass; a group with contrast at pass rate p costs "
            f"{self.k} / (1 - p^{self.k} - (1-p)^{self.k}), for example {self.k / contrast:.0f} at p = .05"
        )


@dataclass(frozen=True, slots=True)
class NeverGiveUp:
    """NGU (arXiv 2609.13443): a group without contrast or progress is asked again with probability p, its history kept."""

    name: ClassVar[str] = "ngu"

    k: int = 4
    """K: completions per attempt."""
    p: float = 0.95
    """p_ngu: probability to try again; an unsolvable prompt costs K/(1-p) completions in expectation."""
    accept: Accept = "better"
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
        check_k(self.k)
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)
        check_choice("accept", self.accept, Accept)
        check_choice("anchor", self.anchor, Anchor)
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
            return SOLVED
        # Contrast of the newest round counts even if part of it is stale on arrival: `weigh` then finds nothing to train
        # and the scheduler handles it as staleness, which must not pass for a failure.
        if self._progresses(group) and (group.new_max > group.new_min or group.has_contrast):
            return TRAIN
        if group.new_min == group.prompt.max_reward:
            return SOLVED  # all right after failures, and no failure is fresh enough to contrast with
        if (self.max_attempts is None or group.rounds < self.max_attempts) and rng.random() < self.p:
            return Decision(Verdict.RETRY, self.k)
        best = group.new_max if group.best_before is None else max(group.best_before, group.new_max)
        teaches = self.virtual_max and (group.has_contrast or self._fell_short(group, best))
        return TRAIN if teaches else GIVE_UP

    def _fell_short(self, group: Group, best: Exact | None) -> bool:
        """Whether fresh attempts of one reward are a failure to push away from: below the maximum score, and nothing better
        was ever drawn. Else a success went stale, which is no failure of the others."""
        return bool(group.fresh) and group.fresh[0].reward == best != group.prompt.max_reward

    def _progresses(self, group: Group) -> bool:
        if self.accept == "above_mean":
            values, total, _ = as_integers([group.new_max, *rewards_of(group)], group.total)
            return max(values) * group.tried > total
        if group.best_before is None:
            return group.new_max > group.new_min
        if self.accept == "varied":
            return group.new_max > group.new_min or group.new_max != group.best_before
        return group.new_max > group.best_before

    def weigh(self, group: Group) -> Weights:
        if group.has_contrast:
            weights = anchored(
                rewards_of(group), group.tried, group.total, mode=self.anchor, divide_by=self.divide_by
            )  # fmt: skip
            return focused(weights, group, self.gamma)
        if self.virtual_max and self._fell_short(group, group.best_before):
            return focused(virtual_maximum(rewards_of(group), group.prompt.max_reward), group, self.gamma)
        return (None,) * len(group.fresh)

    def falls_back(self, group: Group) -> bool:
        """Whether `weigh` had to use the survivors' mean, because the shift would have broken the order of the rewards."""
        return (
            self.anchor in ("shift", "downsample")
            and group.has_contrast
            and shift_reaches_max(rewards_of(group), group.tried, group.total, mode=self.anchor)
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
        check_k(self.k)
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold = {self.threshold} is a pass rate above 0 and at most 1: use 1.0 or 0.875")

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        decision = filtered(group)
        if pass_rate(group) >= self.threshold:
            return Decision(decision.verdict, retire=True)
        return decision

    def weigh(self, group: Group) -> Weights:
        return centred_if_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.k} completions a pass until {100 * self.threshold:g} % of them are right: then it is gone"


@dataclass(frozen=True, slots=True)
class ReinforceAda:
    """Reinforce-Ada, sequential (arXiv 2510.04996): rounds of M until enough is right, then n attempts are kept, half of
    them right, and weighed by r - b with b over all draws."""

    name: ClassVar[str] = "reinforce-ada"

    mode: Enough = "balanced"
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
        check_least("per_round", self.per_round, 2)
        check_least("max_rounds", self.max_rounds, 1)
        check_least("keep", self.keep, 2)
        check_choice("mode", self.mode, Enough)
        check_window(self.window)
        check_weights(self.divide_by)

    def open(self, prompt: Prompt) -> int:
        return self.per_round

    def judge(self, group: Group, rng: Random) -> Decision:
        right, half = n_right(group), self.keep // 2
        if self.mode == "positive":
            is_enough = right >= 1
        else:
            is_enough = right >= half and len(group.fresh) - right >= half
        if not is_enough and group.rounds < self.max_rounds:
            return Decision(Verdict.RETRY, self.per_round)
        return filtered(group)

    def weigh(self, group: Group) -> Weights:
        rewards = rewards_of(group)
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
        check_least("n_init", self.n_init, 2)
        check_least("n_cont", self.n_cont, 1)
        check_window(self.window)
        check_weights(self.divide_by, self.gamma)

    def open(self, prompt: Prompt) -> int:
        return self.n_init

    def judge(self, group: Group, rng: Random) -> Decision:
        decision = filtered(group)
        if decision is TRAIN and group.rounds == 1:
            return Decision(Verdict.RETRY, self.n_cont)
        return decision

    def weigh(self, group: Group) -> Weights:
        return centred_if_contrast(group, self.divide_by, self.gamma)

    def cost_in_words(self) -> str:
        return f"a prompt costs {self.n_init} completions, and {self.n_cont} more if those are neither all right nor all wrong"


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
