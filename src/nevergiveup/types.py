"""The values that travel through a run: frozen, exact, free of tensors and of anything that runs.

Layer 0. Standard library only. The algorithm sees only `Attempt` and `Group`; tokens are carried along untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from math import isfinite
from typing import Any, Literal, TypeAlias

Exact: TypeAlias = int | Fraction
"""A reward, or a sum of rewards, without rounding. 0/1 rewards stay `int`, which is also the fast case."""

Finish: TypeAlias = Literal["stop", "length"]
"""Why a completion ended: it sampled an end-of-sequence token, or it reached the token limit (truncated)."""

Message: TypeAlias = Mapping[str, str]
"""One chat message: `{"role": ..., "content": ...}`."""

Metrics: TypeAlias = dict[str, float]


def exact(reward: float | Fraction) -> Exact:
    """The reward as an exact rational: whether a group has contrast must never hang on a rounding error.

    Raises ValueError for NaN and infinity, which no grader may return.
    """
    if isinstance(reward, int):  # bool too: True is 1
        return int(reward)
    if hasattr(reward, "item"):  # a scalar of numpy or torch
        return exact(reward.item())
    if isinstance(reward, Fraction):
        return reward.numerator if reward.denominator == 1 else reward
    if not isfinite(reward):
        raise ValueError(f"a reward must be a finite number, not {reward}")
    return int(reward) if reward.is_integer() else Fraction(reward)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set.

    id: stable across runs and machines (content hash; plus the row number where rows repeat).
    messages: the chat; empty when the task speaks in token ids.
    answer: what the task's grader needs; opaque to everything else.
    tokens: token ids of the encoded prompt, the chat template applied exactly once.
    max_reward: the best score a completion can get; a chain whose every reward equals it is solved.
    """

    id: str
    messages: tuple[Message, ...] = ()
    answer: Any = None
    tokens: tuple[int, ...] = ()
    max_reward: Exact = 1


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy wrote after a prompt.

    tokens: ids, the end-of-sequence token included when it was sampled.
    logprobs: one natural log-probability a token, under the sampling distribution (temperature applied).
    mask: False on tokens that the policy did not sample (tool output); None means that it sampled all of them.
    top_ids, top_logprobs: for each token the ids that were most likely at its place, and their natural log-probabilities
    under the sampling distribution, most likely first; None unless the engine was asked for them (score centering).
    version_first, version_last: policy versions that sampled the first and the last token. Weights may change in
    mid-sequence; age counts from `version_first`, the oldest.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    version_first: int
    version_last: int
    mask: tuple[bool, ...] | None = None
    top_ids: tuple[tuple[int, ...], ...] | None = None
    top_logprobs: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One scored completion. A grader that could not decide yields no Attempt at all.

    version: the oldest policy version in it; None when the engine could not tell (kept, never counted as stale).
    completion: None in the simulator.
    """

    reward: Exact
    version: int | None
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Unverified:
    """A grader's statement that it could not decide (timeout, exception, unusable gold answer). Not a wrong answer."""

    reason: str


NO_ANSWER = "no_answer"
"""Reason of a Score: the completion states no answer at all. It scores 0 and is counted apart."""


@dataclass(frozen=True, slots=True)
class Score:
    """A grade that tells how it came about.

    reward: what counts. reason: why, in a few words; the same words for the same cause, for they are counted.
    answer: what was read from the completion as its answer; None when nothing was.
    parts: what the reward is made of, by name, each before its weight; they are logged apart.
    """

    reward: float | Fraction
    reason: str = ""
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


Grade: TypeAlias = float | Fraction | Score | Unverified


@dataclass(frozen=True, slots=True)
class Check:
    """A grade that is still to be worked out, where time and memory are bounded: `function(*arguments)` returns it.

    function: importable by name. arguments: picklable. key: checks of one function with equal keys have equal grades, and
    are worked out once; None: always anew.
    """

    function: Callable[..., Grade]
    arguments: tuple[Any, ...]
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Sum:
    """A reward that is the weighted sum of named parts: name -> (weight, part). Unverified when one of them is."""

    parts: Mapping[str, tuple[Exact, Grade | Check]]


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row of a data set that is left out. where: file and line; answer: as it stands there; reason: why, in a few words."""

    where: str
    answer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one visit of a prompt (the chain), as the strategy sees them.

    fresh: attempts young enough to train on, oldest first.
    tried, total: count and exact sum of every reward ever drawn in this chain. They never shrink.
    best_before: best reward before the newest round; None when there is nothing to beat (first round, or the first one
    after a success went stale before it could be trained on).
    new_min, new_max: extremes of the whole newest round, stale or not.
    rounds: finished rounds, the newest included.
    """

    prompt: Prompt
    fresh: tuple[Attempt, ...]
    tried: int
    total: Exact
    best_before: Exact | None
    new_min: Exact
    new_max: Exact
    rounds: int

    @property
    def baseline(self) -> Fraction:
        """b, the mean reward over the whole chain, stale attempts included. Biased as a pass rate: never show it as one."""
        return Fraction(self.total) / self.tried

    @property
    def has_contrast(self) -> bool:
        """Whether the fresh rewards differ (exact comparison). Without contrast every advantage is zero."""
        if not self.fresh:
            return False
        first = self.fresh[0].reward
        if isinstance(first, int):
            return any(attempt.reward != first for attempt in self.fresh)
        ratio = first.as_integer_ratio()  # comparing fractions by `!=` takes several times as long
        return any(attempt.reward.as_integer_ratio() != ratio for attempt in self.fresh)

    @property
    def is_solved(self) -> bool:
        """Every reward ever drawn in this chain is the maximum score."""
        return self.total == self.tried * self.prompt.max_reward


class Verdict(StrEnum):
    """What becomes of a group after a round."""

    SOLVED = "solved"
    TRAIN = "train"
    RETRY = "retry"
    GIVE_UP = "give_up"
    WAIT = "wait"
    """Of an allocator only: decided later, together with other prompts."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A strategy's answer. draws: completions to ask for when the verdict is RETRY. retire: never visit the prompt again."""

    verdict: Verdict
    draws: int = 0
    retire: bool = False


Memory: TypeAlias = tuple[int | float, ...]
"""What an allocator keeps of a prompt from visit to visit: plain numbers, which go into checkpoints as they are."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that waits for its share of an allocator's budget.

    group: its attempts at this visit; None before the first round. memory: what `learn` returned last; None if it never ran.
    gradient_norm: mean gradient norm of log pi over its right attempts, where a learner measured it (0.0: none is right).
    """

    prompt: Prompt
    group: Group | None
    memory: Memory | None
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """n completions wanted for one prompt. `seed` differs for every visit, round and trouble of every prompt; a
    request that was in flight when a checkpoint was restored is issued again under its old number and seed."""

    id: int
    prompt: Prompt
    n: int
    seed: int
    round: int
    visit: int

    @property
    def seeds(self) -> tuple[int, ...]:
        return completion_seeds(self.seed, self.n)


def completion_seeds(seed: int, n: int) -> tuple[int, ...]:
    """One sampling seed (63 bits) for each of the n completions of a request; all different."""
    return tuple((seed + i * 0x1F123BB5A9E3779B) & 0x7FFF_FFFF_FFFF_FFFF for i in range(n))


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A group as the learner gets it: one weight (advantage) an attempt, None = leave the attempt out.

    None is not 0.0: an attempt of weight 0.0 still counts in a token-normalised loss.
    fell_back: the advantages could not be anchored without breaking the order of the rewards, and were centred instead.
    """

    prompt: Prompt
    attempts: tuple[Attempt, ...]
    weights: tuple[float | None, ...]
    baseline: float
    tried: int
    rounds: int
    fell_back: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on. version: of the policy that is about to be updated."""

    version: int
    groups: tuple[TrainGroup, ...]

    @property
    def n_completions(self) -> int:
        return sum(weight is not None for group in self.groups for weight in group.weights)


Prompts: TypeAlias = Sequence[Prompt]
