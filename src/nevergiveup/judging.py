"""What every strategy is made of: the two protocols, the plain filter on contrast, and the checks of fields that many have.

Layer 0. Standard library only. Strategies are in `strategies` and, those that share a budget out, in `allocators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from random import Random
from typing import Any, Protocol, get_args, runtime_checkable

from nevergiveup.advantages import Divisor, Weights, as_integers, centred, focal
from nevergiveup.types import Decision, Exact, Group, Memory, Prompt, Verdict, Waiting

TRAIN = Decision(Verdict.TRAIN)
SOLVED = Decision(Verdict.SOLVED)
GIVE_UP = Decision(Verdict.GIVE_UP)


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


# --------------------------------------------------------------------------------- of groups


def filtered(group: Group) -> Decision:
    """Trained with contrast, else closed. A newest round with contrast counts even if part of it is stale on arrival:
    `weigh` finds nothing to train then, and the scheduler handles it as staleness, which must not pass for a failure."""
    if group.is_solved:
        return SOLVED
    if group.new_max > group.new_min or group.has_contrast:
        return TRAIN
    return SOLVED if group.new_min == group.prompt.max_reward else GIVE_UP


def rewards_of(group: Group) -> list[Exact]:
    """Of the fresh attempts, oldest first."""
    return [attempt.reward for attempt in group.fresh]


def n_right(group: Group) -> int:
    """Fresh attempts with the maximum score."""
    top = group.prompt.max_reward
    return sum([attempt.reward == top for attempt in group.fresh])


def pass_rate(group: Group) -> float:
    """Mean reward of the whole chain as a share of the maximum score, clipped to [0, 1]: penalties can take it below."""
    return min(1.0, max(0.0, float(group.total / (group.tried * group.prompt.max_reward))))


def share_of_max(rewards: Sequence[Exact], max_reward: Exact) -> float:
    """The same of these rewards (at least one)."""
    values, top, _ = as_integers(rewards, max_reward)
    return min(1.0, max(0.0, sum(values) / (len(values) * top)))


def centred_if_contrast(group: Group, divide_by: Divisor, gamma: float = 0.0) -> Weights:
    """Centred advantages of the fresh attempts; without contrast nothing is trained."""
    if not group.has_contrast:
        return (None,) * len(group.fresh)
    return focused(centred(rewards_of(group), divide_by=divide_by), group, gamma)


def focused(weights: Weights, group: Group, gamma: float) -> Weights:
    """F-GRPO's factor (1 - b)^gamma, b being the mean reward of the whole chain; 0 is off."""
    return focal(weights, pass_rate(group), gamma) if gamma else weights


# --------------------------------------------------------------------------------- of fields


def check_k(k: int) -> None:
    if k < 2:
        raise ValueError(f"k = {k} (completions per attempt) gives no contrast within a group: use 2 or more, 4 or 16")


def check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} = {value} must be at least {least}")


def check_above(name: str, value: float, least: float, usual: str, *, or_equal: bool = True) -> None:
    if not isfinite(value) or value < least or (value == least and not or_equal):
        raise ValueError(f"{name} = {value} must be {'at least' if or_equal else 'above'} {least:g}, usually {usual}")


def check_discount(discount: float) -> None:
    if not 0 < discount <= 1:
        raise ValueError(f"discount = {discount} must be above 0 and at most 1 (never forget)")


def check_window(window: int | None) -> None:
    if window is not None and window < 0:
        raise ValueError(
            f"window = {window} (T, oldest trainable age) must be 0 or more; leave it as none to train on every age"
        )


def check_choice(name: str, value: str, choices: Any) -> None:
    """choices: a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name} = {value!r} must be one of {', '.join(get_args(choices))}")


def check_weights(divide_by: str, gamma: float = 0.0) -> None:
    check_choice("divide_by", divide_by, Divisor)
    check_above("gamma", gamma, 0, "0 (off), 0.5 or 1 (F-GRPO's power of 1 - pass rate)")
