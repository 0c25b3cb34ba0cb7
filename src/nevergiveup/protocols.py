"""The seams: what an engine, a learner, a task and a runtime must offer. Typing only; nothing here runs.

Layer 1. Everything asynchronous sits behind these; the scheduler calls none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from nevergiveup.types import Batch, Check, Completion, Exact, Excluded, Grade, Group, Metrics, Prompt, Sum

Weights: TypeAlias = Mapping[str, Any]
"""Parameter name -> tensor. Opaque to everything but learners, engines and the runtimes that carry them."""

T = TypeVar("T")


class InfrastructureError(RuntimeError):
    """Trouble that says nothing about the policy (dead engine, lost connection). Tried again, never scored."""


class Restarted(InfrastructureError):
    """What was asked is dead, and another one takes its place. How often is bounded by whoever starts it."""


class Engine(Protocol):
    """Samples completions. `sample` may be called many times at once; completions of all calls are decoded together."""

    async def sample(self, prompt: Prompt, n: int, seed: int) -> list[Completion]:
        """n completions of `prompt.tokens`. Completion i depends on `completion_seeds(seed, n)[i]` alone (and the policy).

        Fewer than n when some failed. Raises InfrastructureError when none could be drawn.
        """
        ...

    async def load(self, weights: Weights, version: int) -> None:
        """Swap the weights between two decode steps; running sequences go on. Returns when the new version is in use."""
        ...

    async def counters(self) -> dict[str, float]:
        """Cumulative since the start, by name: at least `tokens` (sampled), `busy_s`, `waiting_s` (no sequence to decode)."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """Knows tokens, sampler log-probs and weights; blind to the sampling strategy."""

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        ...

    async def step(self, batch: Batch) -> Metrics:
        """One optimizer step. A batch in which nothing can be trained leaves the weights alone and says `skipped: 1`."""
        ...

    async def gradient_norms(self, groups: Sequence[Group]) -> list[float]:
        """For each group the mean, over its right fresh attempts (reward = max_reward), of the L2 norm of the gradient of
        log pi(completion); 0.0 when none is right. Changes nothing. For allocators that share out by it (GVM)."""
        ...

    async def weights(self) -> Weights: ...

    def save(self, folder: Path) -> None:
        """Everything needed to go on (weights, optimizer, schedule), safetensors and JSON only."""
        ...

    def restore(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A standard Hugging Face model folder."""
        ...


class Task(Protocol):
    """Prompts and the rule that scores a completion."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The prompts of a split, "train" or "test"; the latter may be empty. Raises ValueError for any other."""
        ...

    def grade(self, prompt: Prompt, completion: Completion) -> Grade | Check | Sum:
        """Quick and safe whatever the completion holds. What may take long, or run anything, is returned as a Check."""
        ...


@runtime_checkable
class SelfTested(Protocol):
    """A task that brings completions whose grades are known; a wrong one stops the run before it starts."""

    def canaries(self) -> Sequence[tuple[Prompt, Completion, Exact]]: ...


@runtime_checkable
class Validated(Protocol):
    """A task that looks through its answers before a run and leaves out those that nothing could be compared with."""

    excluded: list[Excluded]

    async def validate(self, checker: Checker) -> None:
        """Fills `excluded`, and leaves those prompts out of `prompts`. Raises ValueError when they are too many."""
        ...


class Checker(Protocol):
    """Works out a Check somewhere. What the check raises comes back as Unverified, never as a score."""

    async def check(self, check: Check) -> Grade: ...


class Grader(Protocol):
    """Scores completions, somewhere. Exceptions of a task's `grade` come back as Unverified, never as a score."""

    async def grade(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Grade]: ...


class Runtime(Protocol):
    """Where an object lives. `make` builds it there; the proxy offers the same asynchronous methods here."""

    def place(self, make: Callable[..., T], name: str, /, *args: Any, **kwargs: Any) -> Awaitable[T]: ...

    async def close(self) -> None: ...
