"""Every setting of a run: frozen values whose field docstrings are the help texts of the command line.

Layer 1. Standard library only. A recipe is one complete `Settings`; a TOML file and flags change single fields of it.
Checks that concern one field or several fields together are in `check`, and run before any model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from nevergiveup.scheduler import RetryOrder
from nevergiveup.strategies import DynamicSampling, FixedK, NeverGiveUp


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What is asked, and how answers are scored."""

    name: Literal["chains", "gsm8k"] = "gsm8k"
    """Task: chains (generated puzzles for a tiny model) or gsm8k (grade-school mathematics)."""
    data: str = ""
    """JSON Lines file of your own rows for gsm8k (question and answer); empty for the data that come with the package."""
    style: Literal["steps", "answer"] = "steps"
    """gsm8k only: ask for step-by-step reasoning, or for the bare answer after three solved examples (tiny models)."""
    preset: Literal["demo", "study"] = "demo"
    """chains only: how reliable the teacher of the warm-up is, by tier."""
    n_prompts: int | None = None
    """Use only the first so many training prompts (of a fixed shuffle); none for all."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted, never cut."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The policy to start from."""

    path: str = ""
    """Hugging Face name or folder of a causal language model; for the task chains empty builds and warm-starts a tiny one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the learner's weights."""
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which the engine samples."""
    warm_steps: int = 300
    """chains only: supervised steps of the warm start."""
    warm_batch: int = 224
    """chains only: sequences in a warm-up step."""
    warm_lr: float = 6e-3
    """chains only: peak learning rate of the warm start."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How completions are drawn."""

    temperature: float = 1.0
    """Of the softmax, applied by the engine and by the learner alike."""
    max_new_tokens: int = 256
    """A completion that reaches it is cut, and counted as truncated."""
    n_slots: int = 64
    """Sequences that the engine decodes side by side."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How groups become batches, and how far generation may run ahead."""

    n_groups: int = 64
    """N: groups in a batch."""
    lag: float = 1.0
    """Batches that generation may be ahead of training; 0 is synchronous."""
    max_pending: int | None = None
    """Most groups open, ready or in training at once; none for (lag + 1) * N. More keep an engine full when few rounds end
    in a group to train on."""
    retry_order: RetryOrder = "back"
    """Where a retry joins the dispatch queue: back (as published) or front (fresher, burstier)."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The optimizer step."""

    lr: float = 1e-6
    """Learning rate of AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate, after the warm-up; cosine ends at zero after the last step."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """Of AdamW."""
    clip_low: float = 0.2
    """The importance ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and at 1 + clip_high (DAPO: 0.28)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 16384
    """Most tokens (padding included) in one forward pass."""
    truncated: Literal["wrong", "mask", "keep"] = "wrong"
    """Completions cut by the length limit: scored 0, left out of the loss, or scored like any other."""


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Regular evaluation on prompts that are not trained on."""

    every: int = 0
    """Optimizer steps between two evaluations; 0 evaluates only before and after the run, if n_prompts allows."""
    n_prompts: int | None = None
    """Held-out prompts to use; none for all, 0 for no evaluation."""
    n: int = 4
    """Completions per prompt (tasks without an exact pass rate)."""
    k: int = 1
    """pass@k is reported for k = 1 and this k, at most n."""
    temperature: float = 1.0
    """Of the sampling in evaluation; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One complete run."""

    task: TaskSettings = field(default_factory=TaskSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    strategy: NeverGiveUp | FixedK | DynamicSampling = field(default_factory=NeverGiveUp)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    steps: int | None = 200
    """Optimizer steps; none to stop by max_completions or epochs."""
    max_completions: int | None = None
    """Budget: completions drawn in the whole run."""
    epochs: int | None = None
    """Most passes over the training prompts."""
    seed: int = 0
    """Of everything random in the run."""
    runtime: Literal["process", "here"] = "process"
    """process: the engine in a process of its own, generating while the learner trains. here: one process, replayable."""
    checkpoint_every: int = 50
    """Optimizer steps between two checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    stall_s: float = 900.0
    """Seconds without any progress after which the run ends with an error."""

    def check(self) -> None:
        """Raises ValueError, with key, value and remedy, for settings that cannot work together."""
        self._check_positive()
        s, e = self.sampling, self.eval
        if s.temperature <= 0:
            raise ValueError(
                f"sampling.temperature = {s.temperature}: training needs a sampled policy; use a value above 0, usually 1.0"
            )
        if e.k > e.n:
            raise ValueError(
                f"eval.k = {e.k} needs at least as many completions per prompt: eval.n = {e.n}; raise eval.n"
            )
        if e.temperature < 0:
            raise ValueError(f"eval.temperature = {e.temperature} must be 0 (greedy) or more")
        if e.temperature == 0 and e.n > 1:
            raise ValueError(
                f"eval.n = {e.n} at eval.temperature = 0 draws the same greedy completion {e.n} times: "
                "set eval.n = 1, or a temperature above 0"
            )
        if self.steps is None and self.max_completions is None and self.epochs is None:
            raise ValueError("the run has no end: set steps, max_completions or epochs")
        if self.max_completions is not None and self.max_completions < self.strategy.k:
            raise ValueError(
                f"max_completions = {self.max_completions} is below strategy.k = {self.strategy.k}: "
                "not even one prompt could be tried; raise it"
            )
        if self.batch.max_pending is not None and self.batch.max_pending < self.batch.n_groups:
            raise ValueError(
                f"batch.max_pending = {self.batch.max_pending} is below batch.n_groups = {self.batch.n_groups}: "
                "a batch could never fill; raise it"
            )
        if self.learner.schedule == "cosine" and self.steps is None:
            raise ValueError('learner.schedule = "cosine" needs steps, to know where it ends')

    def check_context(self, context: int) -> None:
        """Raises ValueError unless the longest prompt and completion fit into the model's context of `context` tokens."""
        needed = self.task.max_prompt_tokens + self.sampling.max_new_tokens
        if needed > context:
            raise ValueError(
                f"task.max_prompt_tokens = {self.task.max_prompt_tokens} and sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens} need {needed} tokens, but the model's context is {context}: lower one of them"
            )

    def _check_positive(self) -> None:
        at_least = {
            "task.n_prompts": (self.task.n_prompts, 1),
            "task.max_prompt_tokens": (self.task.max_prompt_tokens, 1),
            "model.warm_steps": (self.model.warm_steps, 1),
            "model.warm_batch": (self.model.warm_batch, 1),
            "model.warm_lr": (self.model.warm_lr, 0),
            "sampling.max_new_tokens": (self.sampling.max_new_tokens, 1),
            "sampling.n_slots": (self.sampling.n_slots, 1),
            "batch.n_groups": (self.batch.n_groups, 1),
            "batch.lag": (self.batch.lag, 0),
            "learner.lr": (self.learner.lr, 0),
            "learner.warmup_steps": (self.learner.warmup_steps, 0),
            "learner.weight_decay": (self.learner.weight_decay, 0),
            "learner.clip_low": (self.learner.clip_low, 0),
            "learner.clip_high": (self.learner.clip_high, 0),
            "learner.micro_batch_tokens": (self.learner.micro_batch_tokens, 1),
            "eval.every": (self.eval.every, 0),
            "eval.n_prompts": (self.eval.n_prompts, 0),
            "eval.n": (self.eval.n, 1),
            "eval.k": (self.eval.k, 1),
            "steps": (self.steps, 1),
            "max_completions": (self.max_completions, 1),
            "epochs": (self.epochs, 1),
            "checkpoint_every": (self.checkpoint_every, 1),
            "keep_checkpoints": (self.keep_checkpoints, 1),
        }
        for key, (value, least) in at_least.items():
            if value is not None and not value >= least:  # NaN too
                raise ValueError(f"{key} = {value} must be at least {least}")
        if not self.learner.max_grad_norm > 0:
            raise ValueError(f"learner.max_grad_norm = {self.learner.max_grad_norm} must be above 0")
        if not isfinite(self.batch.lag * self.batch.n_groups):
            raise ValueError(f"batch.lag = {self.batch.lag} is too large: use a few batches at most")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} must fit into 64 bits")
        if not self.stall_s > 0:
            raise ValueError(f"stall_s = {self.stall_s} must be above 0")
