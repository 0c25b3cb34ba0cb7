"""Sampling strategies: how many completions a prompt gets, what becomes of its group, what each attempt weighs.

Layer 0. Standard library only. A strategy is a frozen value: it is its own configuration, holds no state, and draws random
numbers only from the generator it is handed. To add one, write a frozen dataclass with the four members of `Strategy` and
name it in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from random import Random
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from nevergiveup.advantages import anchored, centred
from nevergiveup.types import Decision, Exact, Group, Memory, Prompt, Verdict, Waiting

Weights: TypeAlias = Sequence[float | None]

_TRAIN = Decision(Verdict.TRAIN)
_SOLVED = Decision(Verdict.SOLVED)
_GIVE_UP = Decision(Verdict.GIVE_UP)


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
    std: bool = False
    """Divide advantages by the group's standard deviation (classic GRPO); off is Dr. GRPO (arXiv 2503.20783)."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        return _TRAIN

    def weigh(self, group: Group) -> Weights:
        return centred([attempt.reward for attempt in group.fresh], std=self.std)


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """DAPO's filter (arXiv 2503.14476): groups without contrast are dropped and other prompts take their place."""

    name: ClassVar[str] = "dapo"

    k: int = 4
    """Completions per prompt."""
    std: bool = True
    """Divide advantages by the group's standard deviation."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)

    def open(self, prompt: Prompt) -> int:
        return self.k

    def judge(self, group: Group, rng: Random) -> Decision:
        if group.is_solved:
            return _SOLVED
        if group.has_contrast or group.new_max > group.new_min:
            return _TRAIN
        return _SOLVED if group.new_min == group.prompt.max_reward else _GIVE_UP

    def weigh(self, group: Group) -> Weights:
        if not group.has_contrast:
            return (None,) * len(group.fresh)
        return centred([attempt.reward for attempt in group.fresh], std=self.std)


@dataclass(frozen=True, slots=True)
class NeverGiveUp:
    """NGU (arXiv 2609.13443): a group without contrast or progress is asked again with probability p, its history kept."""

    name: ClassVar[str] = "ngu"

    k: int = 4
    """K: completions per attempt."""
    p: float = 0.95
    """p_ngu: probability to try again; an unsolvable prompt costs K/(1-p) completions in expectation."""
    window: int | None = 4
    """T: completions older than this many policy versions are not trained on, but count in the baseline."""
    max_attempts: int | None = None
    """Most attempts at one visit of a prompt; none means no cap (p < 1 bounds the cost in expectation)."""

    def __post_init__(self) -> None:
        _check_k(self.k)
        _check_window(self.window)
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
        if group.best_before is None:
            progress = group.new_max > group.new_min
        else:
            progress = group.new_max > group.best_before
        # Contrast of the newest round counts even if part of it is stale on arrival: `weigh` then finds nothing to train
        # and the scheduler handles it as staleness, which must not pass for a failure.
        if progress and (group.has_contrast or group.new_max > group.new_min):
            return _TRAIN
        if group.new_min == group.prompt.max_reward:
            return _SOLVED  # all right after failures, and no failure is fresh enough to contrast with
        if self.max_attempts is not None and group.rounds >= self.max_attempts:
            return _GIVE_UP
        return Decision(Verdict.RETRY, self.k) if rng.random() < self.p else _GIVE_UP

    def weigh(self, group: Group) -> Weights:
        if not group.has_contrast:
            return (None,) * len(group.fresh)
        return anchored([attempt.reward for attempt in group.fresh], group.tried, group.total)

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


STRATEGIES: dict[str, type[FixedK] | type[DynamicSampling] | type[NeverGiveUp]] = {
    cls.name: cls for cls in (NeverGiveUp, FixedK, DynamicSampling)
}
"""Name on the command line -> strategy."""


def _check_k(k: int) -> None:
    if k < 2:
        raise ValueError(f"k = {k} (completions per attempt) gives no contrast within a group: use 2 or more, 4 or 16")


def _check_window(window: int | None) -> None:
    if window is not None and window < 0:
        raise ValueError(
            f"window = {window} (T, oldest trainable age) must be 0 or more; leave it as none to train on every age"
        )
