"""Every setting of a run: frozen values whose field docstrings are the help texts of the command line.

Layer 1. Standard library only. A recipe is one complete `Settings`; a TOML file and flags change single fields of it.
Checks that concern one field or several fields together are in `check`, and run before any model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Literal

from nevergiveup.objectives import Clipped, Gspo, Loss, Normalize
from nevergiveup.scheduler import RetryOrder
from nevergiveup.strategies import AnyStrategy, DynamicSampling, FixedK, NeverGiveUp, NoPositiveResampling
from nevergiveup.task_settings import AnyTask, Gsm8kTask
from nevergiveup.types import Prompt


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The policy to start from."""

    path: str = ""
    """Hugging Face name or folder of a causal language model; empty makes a tiny one, for tasks without text."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the learner's weights."""
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which the engine samples."""
    warm_steps: int = 300
    """Supervised steps of the warm start of a tiny model."""
    warm_batch: int = 224
    """Sequences in a warm-up step."""
    warm_lr: float = 6e-3
    """Peak learning rate of the warm start."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How completions are drawn."""

    temperature: float = 1.0
    """Of the softmax, applied by the engine and by the learner alike."""
    max_new_tokens: int = 256
    """A completion that reaches it is cut, and counted as truncated."""
    overlong_buffer: int | None = None
    """DAPO's soft penalty on length: the reward falls by up to 1 over the last so many tokens before max_new_tokens."""
    n_slots: int = 64
    """Sequences that the engine decodes side by side."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How groups become batches, and how far generation may run ahead."""

    n_groups: int = 64
    """N: groups in a batch."""
    n_completions: int | None = None
    """Cut batches by completions instead: whole groups as long as they fit; what does not is carried over. n_groups then only
    says how many groups are kept open."""
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
    normalize: Normalize = "token"
    """The loss is a mean over: all trained tokens of the step (token), completions of their means (sequence: classic GRPO),
    completions of sums over max_new_tokens (constant: Dr. GRPO), or groups of their means (group)."""
    ratio_mask_low: float | None = None
    """IcePop: tokens whose importance ratio is below this get no gradient (0.5); none is off."""
    ratio_mask_high: float | None = None
    """IcePop: ... nor those above this (2 to 5); none is off."""
    score_centering: int = 0
    """Score Centering with so many of the sampler's most likely tokens at each place; 0 is off."""
    kl_beta: float = 0.0
    """Weight of the KL divergence (k3 estimate) from the policy that the run began with; 0 is off."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 16384
    """Most tokens (padding included) in one forward pass."""
    truncated: Literal["wrong", "mask", "keep"] = "wrong"
    """Completions cut by the length limit: scored 0, left out of the loss, or scored like any other."""


@dataclass(frozen=True, slots=True)
class GradingSettings:
    """Worker processes for what may take long or run anything: symbolic mathematics, reward functions of yours."""

    n_workers: int = 2
    """Processes. Functions that wait for a server want many; rules that compute, as many as there are cores to spare."""
    timeout_s: float = 5.0
    """Seconds for one completion, from when its grading starts; then the worker is killed and the completion is unverified."""
    memory_mb: int = 1024
    """Memory (MiB) that grading one completion may take on top of what the worker holds when it starts."""


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
    buckets: str = ""
    """File of `ngu probe`, or buckets.json of a run, that tells how difficult prompts are; several, for training and held-out
    prompts, with commas."""


FREE_SECTIONS = ("eval", "grading")
FREE_KEYS = (
    "steps", "max_completions", "epochs", "runtime", "checkpoint_every", "keep_checkpoints", "sample_prompts", "track",
    "stall_s", "sync_s", "engine_restarts", "sampling.n_slots", "learner.micro_batch_tokens",
)  # fmt: skip
"""How long, how and where a run goes on, and what is seen of it."""

FIXED_KEYS = ("model.path", "seed", "eval.buckets", "task.name")
"""What a run cannot change at all: that would be another run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One complete run."""

    task: AnyTask = field(default_factory=Gsm8kTask)
    model: ModelSettings = field(default_factory=ModelSettings)
    strategy: AnyStrategy = field(default_factory=NeverGiveUp)
    loss: Loss = field(default_factory=Clipped)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    grading: GradingSettings = field(default_factory=GradingSettings)
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
    sample_prompts: int = 64
    """Training prompts whose completions are kept as texts in samples.jsonl; 0 for none. Of prompts that are given up, the
    last ones are kept, too."""
    track: str = ""
    """Trackers that get the figures of each step too, separated by commas: tensorboard, wandb, trackio."""
    stall_s: float = 900.0
    """Seconds without any progress (nothing delivered while the trainer waits, a step that does not end) after which the run
    ends with an error."""
    sync_s: float = 600.0
    """Seconds within which the engine must have taken new weights."""
    engine_restarts: int = 3
    """How often within ten minutes an engine process that died is started again; after that the run ends."""

    @property
    def trackers(self) -> list[str]:
        return [name.strip() for name in self.track.split(",") if name.strip()]

    def may_change(self, key: str) -> bool:
        """Whether a resume may change this dotted key without being asked to: what is computed stays what it was."""
        if key == "steps" and self.learner.schedule != "constant":
            return False  # the learning rate follows it
        return key in FREE_KEYS or (key.partition(".")[0] in FREE_SECTIONS and key != "eval.n_prompts")

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
        first = self.strategy.open(Prompt(""))
        if self.max_completions is not None and self.max_completions < first:
            raise ValueError(
                f"max_completions = {self.max_completions} is below the {first} that strategy {self.strategy.name} asks "
                "for at first: not even one prompt could be tried; raise it"
            )
        if s.overlong_buffer is not None and not 1 <= s.overlong_buffer < s.max_new_tokens:
            raise ValueError(
                f"sampling.overlong_buffer = {s.overlong_buffer} must be at least 1 and below sampling.max_new_tokens = "
                f"{s.max_new_tokens}, or left out for no penalty on length"
            )
        if s.overlong_buffer is not None and self.learner.truncated == "mask":
            raise ValueError(
                f'sampling.overlong_buffer = {s.overlong_buffer} punishes what learner.truncated = "mask" leaves out: '
                "use one of them"
            )
        self.task.check()
        self._check_loss()
        if self.batch.max_pending is not None and self.batch.max_pending < self.batch.n_groups:
            raise ValueError(
                f"batch.max_pending = {self.batch.max_pending} is below batch.n_groups = {self.batch.n_groups}: "
                "a batch could never fill; raise it"
            )
        self._check_batch_of_completions(first)
        if self.learner.schedule == "cosine" and self.steps is None:
            raise ValueError('learner.schedule = "cosine" needs steps, to know where it ends')

    def _check_batch_of_completions(self, first: int) -> None:
        """Refuses what could never fill, for strategies whose groups have `first` completions and no more."""
        batch = self.batch
        if batch.n_completions is None or not isinstance(
            self.strategy, FixedK | DynamicSampling | NoPositiveResampling
        ):
            return
        n_needed = ceil(batch.n_completions / first)
        n_open = ceil((batch.lag + 1) * batch.n_groups) if batch.max_pending is None else batch.max_pending
        if n_open < n_needed:
            raise ValueError(
                f"batch.n_completions = {batch.n_completions} takes {n_needed} groups of {first}, but no more than {n_open} "
                f"are open at once, so that a batch could never fill: set batch.max_pending = {n_needed} or more"
            )

    def _check_loss(self) -> None:
        low, high = self.learner.ratio_mask_low, self.learner.ratio_mask_high
        if (low is None) != (high is None):
            raise ValueError(
                f"learner.ratio_mask_low = {low} and learner.ratio_mask_high = {high} go together: set both, or none"
            )
        if low is not None and high is not None and not 0 <= low < 1 < high:
            raise ValueError(
                f"learner.ratio_mask_low = {low} and learner.ratio_mask_high = {high} must lie below and above 1, as 0.5 and 5"
            )
        if self.learner.score_centering and isinstance(self.loss, Gspo):
            raise ValueError(
                f'learner.score_centering = {self.learner.score_centering} needs a weight for each token, and loss "gspo" has '
                "one a completion: use another loss, or leave it out"
            )

    def check_context(self, context: int) -> None:
        """Raises ValueError unless the longest prompt and completion fit into the model's context of `context` tokens."""
        needed = self.task.max_prompt_tokens + self.sampling.max_new_tokens
        if needed > context:
            raise ValueError(
                f"task.max_prompt_tokens = {self.task.max_prompt_tokens} and sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens} need {needed} tokens, but the model's context is {context}: lower one of them"
            )

    def check_vocabulary(self, n_tokens: int) -> None:
        """Raises ValueError unless the sampler's most likely tokens, as many as asked for, exist in a model of `n_tokens`."""
        if self.learner.score_centering > n_tokens:
            raise ValueError(
                f"learner.score_centering = {self.learner.score_centering} is more than the model's vocabulary of {n_tokens} "
                "tokens: lower it, usually to 8 to 128, or set 0 for off"
            )

    def _check_positive(self) -> None:
        at_least = {
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
            "batch.n_completions": (self.batch.n_completions, 1),
            "learner.score_centering": (self.learner.score_centering, 0),
            "learner.kl_beta": (self.learner.kl_beta, 0),
            "learner.micro_batch_tokens": (self.learner.micro_batch_tokens, 1),
            "grading.n_workers": (self.grading.n_workers, 1),
            "grading.memory_mb": (self.grading.memory_mb, 64),
            "eval.every": (self.eval.every, 0),
            "eval.n_prompts": (self.eval.n_prompts, 0),
            "eval.n": (self.eval.n, 1),
            "eval.k": (self.eval.k, 1),
            "steps": (self.steps, 1),
            "max_completions": (self.max_completions, 1),
            "epochs": (self.epochs, 1),
            "checkpoint_every": (self.checkpoint_every, 1),
            "keep_checkpoints": (self.keep_checkpoints, 1),
            "sample_prompts": (self.sample_prompts, 0),
            "engine_restarts": (self.engine_restarts, 0),
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
        for key, seconds in (("stall_s", self.stall_s), ("sync_s", self.sync_s)):
            if not seconds > 0:
                raise ValueError(f"{key} = {seconds} must be above 0")
        if not 0 < self.grading.timeout_s < self.stall_s:
            raise ValueError(
                f"grading.timeout_s = {self.grading.timeout_s} must be above 0 and below stall_s = {self.stall_s}"
            )
