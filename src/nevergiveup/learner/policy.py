"""The policy being trained: a Hugging Face causal LM, its AdamW optimizer, and their checkpoints.

Layer 3. torch, transformers and accelerate. Blind to the sampling strategy: it sees tokens, sampler log-probabilities and
one weight (advantage) a completion.

Shapes: S completions of a micro-batch, T positions (padded on the right), T1 = T + 1, N trained tokens, V vocabulary,
H hidden size, or the sampler's most likely tokens.
Symbols: pi is the policy being trained, mu the one that sampled; rho = pi / mu.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nevergiveup.checkpoints import fsync
from nevergiveup.learner.losses import (
    RatioMask,
    TokenLoss,
    kl_k3,
    kl_to_reference,
    policy_loss,
    score_centering,
    token_logprobs,
)
from nevergiveup.objectives import Clipped, Gspo, Loss, Normalize
from nevergiveup.types import Attempt, Batch, Group, Metrics, Prompt

Schedule: TypeAlias = Literal["constant", "cosine"]
Truncated: TypeAlias = Literal["wrong", "mask", "keep"]

FORMAT = 2
"""Of the checkpoint; another number is refused."""

WEIGHTS = "model.safetensors"
"""As `from_pretrained` calls them: a checkpoint is a model folder, too."""


@dataclass(slots=True)
class Sample:
    """A completion to train on.

    trained: one flag a completion token; None means all of them.
    same_version: sampled by the very policy that is about to be updated.
    group: its number in the batch. scale: what the loss of each of its tokens is multiplied by (`Normalize`); set once all
        samples of the step are known.
    top_ids, top_logprobs: as in `Completion`.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...] | None
    weight: float
    same_version: bool
    group: int = 0
    scale: float = 1.0
    top_ids: tuple[tuple[int, ...], ...] | None = None
    top_logprobs: tuple[tuple[float, ...], ...] | None = None

    @property
    def length(self) -> int:
        """Positions that the model reads: all tokens but the last, after which nothing is predicted."""
        return len(self.prompt) + len(self.completion) - 1

    @property
    def n_trained(self) -> int:
        return len(self.completion) if self.trained is None else sum(self.trained)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples as tensors. Everything is found from lengths, never from token values, so the pad id may be any id."""

    inputs_ST: Tensor
    predicting_N: Tensor  # places in the flattened inputs whose next token is trained
    targets_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    same_version_N: Tensor
    scale_N: Tensor
    sample_N: Tensor
    top_ids_NH: Tensor | None
    top_sampler_logprobs_NH: Tensor | None


class TorchLearner:
    """Trains `model` in place, one optimizer step a batch (`nevergiveup.protocols.Learner`).

    model: any Hugging Face causal LM. It is moved to the accelerator's device and its weights are kept in at least
        float32: in bfloat16 an update smaller than 1/256 of a weight would be lost. Dropout is off, because it would be
        noise in rho.
    tokenizer: only saved along by `export`.
    lr: peak learning rate. It rises linearly over the first `n_warmup` steps, then stays ("constant") or falls on half a
        cosine to 0 after `n_steps` ("cosine"). The schedule is a function of the version alone.
    weight_decay: decoupled, of matrices only (not of biases and norm scales).
    max_grad_norm: the gradient is scaled down to this L2 norm; `math.inf` turns clipping off.
    loss: which one, with its numbers. normalize: what it is averaged over: "token", all trained tokens of the step;
        "sequence", completions of their means; "constant", completions of their sums over `max_new_tokens`; "group", groups
        of the means over their tokens. Only completions and groups with a trained token are counted.
    ratio_mask: IcePop, tokens with rho outside of [low, high] add nothing to the loss (the paper: 0.5 to 5).
    score_centering: with the top tokens that come with each completion; not with gspo.
    kl_beta, reference: weight of the k3 estimate of KL(pi || reference). The reference is a model of its own, is frozen and
        kept in the precision of `model`, and is not saved along.
    temperature: of sampling; log pi is taken at the same temperature.
    micro_batch_tokens: budget of one forward and backward pass, padding included. A longer completion goes alone. The
        budget changes memory and speed, never the gradient: what a token counts depends on the whole step alone.
    truncated: what to do with completions that were cut by the length limit. "mask": no loss, and not counted in the
        average. "wrong" and "keep": trained on like any other; they differ in the reward that the completion was given
        before it came here (the worst reward, or what the grader said).
    version: optimizer steps already done to `model`.

    Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        lr: float = 1e-6,
        schedule: Schedule = "constant",
        n_warmup: int = 0,
        n_steps: int | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        loss: Loss | None = None,
        normalize: Normalize = "token",
        max_new_tokens: int | None = None,
        ratio_mask: RatioMask = None,
        score_centering: bool = False,
        kl_beta: float = 0.0,
        reference: PreTrainedModel | None = None,
        temperature: float = 1.0,
        micro_batch_tokens: int = 4096,
        truncated: Truncated = "wrong",
        version: int = 0,
    ) -> None:
        _check(schedule in ("constant", "cosine"), "schedule", schedule, 'use "constant" or "cosine"')
        _check(truncated in ("wrong", "mask", "keep"), "truncated", truncated, 'use "wrong", "mask" or "keep"')
        _check(lr >= 0, "lr", lr, "use a number of at least 0")
        _check(n_warmup >= 0, "n_warmup", n_warmup, "use a number of at least 0")
        _check(
            schedule == "constant" or (n_steps is not None and n_steps > n_warmup),
            "n_steps",
            n_steps,
            'schedule "cosine" needs a number of steps above n_warmup',
        )
        _check(max_grad_norm > 0, "max_grad_norm", max_grad_norm, "use a number above 0, or infinity for no clipping")
        choices = get_args(Normalize)
        _check(normalize in choices, "normalize", normalize, f"use one of {', '.join(choices)}")
        _check(
            normalize != "constant" or (max_new_tokens or 0) > 0,
            "max_new_tokens",
            max_new_tokens,
            'normalize = "constant" divides by it',
        )
        _check(
            ratio_mask is None or 0 <= ratio_mask[0] < 1 < ratio_mask[1],
            "ratio_mask",
            ratio_mask,
            "use a number below 1 and one above it",
        )
        _check(kl_beta >= 0, "kl_beta", kl_beta, "use a number of at least 0")
        _check((kl_beta > 0) == (reference is not None), "kl_beta", kl_beta, "a reference model goes with kl_beta > 0")
        _check(reference is not model, "reference", "the model itself", "use a copy: the reference is frozen")
        _check(
            not (score_centering and isinstance(loss, Gspo)),
            "score_centering",
            score_centering,
            'loss "gspo" has one weight a completion, none a token: use another loss',
        )
        _check(temperature > 0, "temperature", temperature, "use a number above 0")
        _check(micro_batch_tokens >= 1, "micro_batch_tokens", micro_batch_tokens, "use a number of at least 1")
        self.version = version
        self._tokenizer = tokenizer
        self._lr = lr
        self._schedule = schedule
        self._n_warmup = n_warmup
        self._n_steps = n_steps
        self._max_grad_norm = max_grad_norm
        self._loss = loss or Clipped()
        self._normalize = normalize
        self._max_new_tokens = max_new_tokens
        self._ratio_mask = ratio_mask
        self._score_centering = score_centering
        self._kl_beta = kl_beta
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._truncated = truncated

        for each in (model,) if reference is None else (model, reference):
            if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in each.parameters()):
                nn.Module.float(each)
        # Checkpointed layers recompute only in training mode.
        model.train(any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))
        self._accelerator = Accelerator()
        # On its device first: the optimizer must be made for the parameters where they will live.
        self._bare_model = model
        self._reference = reference
        if reference is not None:
            reference.eval().requires_grad_(False).to(self._accelerator.device)  # type: ignore[arg-type]
        self._model = self._accelerator.prepare(model)
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameter_groups: list[dict[str, Any]] = [
            {"params": [p for p in self._trainable.values() if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self._trainable.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(parameter_groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._optimizer = self._accelerator.prepare(adamw)

    async def step(self, batch: Batch) -> Metrics:
        """One optimizer step; blocks until it is done. Raises ValueError for a batch that cannot be made sense of.

        A batch without a trained token, or whose gradient is not finite, leaves weights, optimizer and version alone and
        says `skipped: 1`. Metrics without a value are left out.

        Metrics, over the trained tokens of the step whose weight is not 0.0 (with a KL term: all), unless said otherwise:
        loss, lr, grad_norm (before clipping), step_s, skipped, nonfinite_grad
        n_tokens (trained, weight 0.0 included), n_completions (with a trained token), n_zero_weight (of these, not passed
            through the model: without a KL term they only count in the average)
        n_micro_batches, padding_share (of positions computed)
        truncated_share: completions cut by the length limit / completions with a weight, masked ones included
        entropy: mean -log pi, an estimate when on-policy
        n_nan_logprobs: tokens whose sampler log-probability is not finite, which all that follows leaves out
        clip_fraction, clip_fraction_low, clip_fraction_high: share of tokens (gspo: of completions) whose gradient the loss
            stopped or bounded, because the ratio was too low or too high
        masked_share: of tokens whose ratio is outside the ratio mask (if there is one)
        kl_reference: k3 estimate of KL(pi || reference) (if there is one)
        ratio_mean, ratio_max: rho
        kl_sampler: k3 estimate of KL(mu || pi)
        effective_sample_share: (sum rho)^2 / (N sum rho^2); 1 when on-policy
        logprob_gap_mean, logprob_gap_max: |log pi - log mu|
        same_version_gap_mean, same_version_gap_max: the same over completions of the version that is being updated, where
            it is nothing but the disagreement of engine and learner
        """
        started_s = time.perf_counter()
        samples, n_weighted, n_truncated = self._samples(batch)
        n_tokens = sum(sample.n_trained for sample in samples)
        lr = self.learning_rate(self.version)
        metrics: Metrics = {
            "lr": lr,
            "n_tokens": n_tokens,
            "n_completions": len(samples),
            "truncated_share": n_truncated / max(1, n_weighted),
        }
        if n_tokens == 0:
            return metrics | {"loss": 0.0, "skipped": 1, "step_s": time.perf_counter() - started_s}

        # A weight of 0.0 adds its tokens to the count above and nothing to the gradient: no pass through the model.
        if self._reference is None:
            samples = [sample for sample in samples if sample.weight != 0.0]
        metrics["n_zero_weight"] = metrics["n_completions"] - len(samples)
        micro_batches = list(split(samples, self._micro_batch_tokens))
        statistics = _Statistics(self._accelerator.device, by_completion=isinstance(self._loss, Gspo))
        for chunk in micro_batches:
            micro_batch = collate(chunk, self._accelerator.device)
            loss, logprobs_N, kl_N = self._token_loss(micro_batch)
            self._accelerator.backward((loss.loss_N * micro_batch.scale_N).sum())
            statistics.add(logprobs_N, loss, kl_N, micro_batch)
        n_padded = sum(len(chunk) * chunk[0].length for chunk in micro_batches)
        metrics |= statistics.metrics()
        if self._ratio_mask is None:
            metrics.pop("masked_share", None)
        if self._reference is None:
            metrics.pop("kl_reference", None)
        metrics["n_micro_batches"] = len(micro_batches)
        if samples:
            metrics["padding_share"] = 1 - sum(sample.length for sample in samples) / n_padded
        else:  # still a step: the optimizer's momentum goes on
            for parameter in self._trainable.values():
                parameter.grad = torch.zeros_like(parameter)

        grad_norm = float(self._accelerator.clip_grad_norm_(list(self._trainable.values()), self._max_grad_norm))
        if math.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.version += 1
            metrics |= {"grad_norm": grad_norm, "skipped": 0, "nonfinite_grad": 0}
        else:
            metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
            metrics |= {"skipped": 1, "nonfinite_grad": 1}
        self._optimizer.zero_grad()
        return metrics | {"step_s": time.perf_counter() - started_s}

    def _token_loss(self, micro_batch: MicroBatch) -> tuple[TokenLoss, Tensor, Tensor]:
        """The loss of each token with all its terms; log pi and the KL estimate without gradients."""
        targets = micro_batch.targets_N
        if micro_batch.top_ids_NH is not None:
            targets = torch.cat((targets.unsqueeze(-1), micro_batch.top_ids_NH), dim=-1)
        logprobs = token_logprobs(self._logits(self._model, micro_batch), targets, self._temperature)
        logprobs_N = logprobs if logprobs.ndim == 1 else logprobs[:, 0]
        loss = policy_loss(
            self._loss,
            logprobs_N,
            micro_batch.sampler_logprobs_N,
            micro_batch.advantages_N,
            sample_N=micro_batch.sample_N,
            ratio_mask=self._ratio_mask,
        )
        loss_N, kl_N = loss.loss_N, torch.zeros_like(logprobs_N.detach())
        if micro_batch.top_sampler_logprobs_NH is not None:
            loss_N = loss_N + loss.known_N * score_centering(
                self._loss,
                logprobs[:, 1:],
                micro_batch.top_sampler_logprobs_NH,
                micro_batch.advantages_N,
                ratio_mask=self._ratio_mask,
            )
        if self._reference is not None:
            with torch.no_grad(), self._accelerator.autocast():  # as the forward pass of the prepared model
                logits_NV = self._logits(self._reference, micro_batch)
                reference_N = token_logprobs(logits_NV, micro_batch.targets_N, self._temperature)
            with_gradient_N = kl_to_reference(logprobs_N, reference_N)
            loss_N, kl_N = loss_N + self._kl_beta * with_gradient_N, with_gradient_N.detach()
        return loss._replace(loss_N=loss_N), logprobs_N.detach(), kl_N

    async def gradient_norms(self, groups: Sequence[Group]) -> list[float]:
        """For each group the mean over its right fresh attempts (reward = max_reward) of the L2 norm of the gradient of
        log pi(completion), which is the sum over its trained tokens; 0.0 when none is right. One backward pass an attempt.
        Weights, their gradients, optimizer and version stay as they are."""
        parameters = list(self._trainable.values())
        norms = []
        for group in groups:
            of_group = []
            for attempt in group.fresh:
                sample = (
                    self._sample(group.prompt, attempt, 1.0, 0) if attempt.reward == group.prompt.max_reward else None
                )
                if sample is None:
                    continue
                micro_batch = collate([sample], self._accelerator.device)
                logits_NV = self._logits(self._model, micro_batch)
                logprob = token_logprobs(logits_NV, micro_batch.targets_N, self._temperature).sum()
                gradients = torch.autograd.grad(logprob, parameters, allow_unused=True)
                of_group.append(float(nn.utils.get_total_norm([g for g in gradients if g is not None])))
            norms.append(sum(of_group) / len(of_group) if of_group else 0.0)
        return norms

    async def weights(self) -> dict[str, Tensor]:
        """A snapshot on the CPU, name -> tensor: parameters and saved buffers, tied ones once, under their first name."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._own_state().items()}

    def learning_rate(self, version: int) -> float:
        """Of the step that updates policy `version`."""
        if version < self._n_warmup:
            return self._lr * (version + 1) / self._n_warmup
        if self._schedule == "constant" or self._n_steps is None:
            return self._lr
        progress = min(1.0, (version - self._n_warmup) / (self._n_steps - self._n_warmup))
        return self._lr * 0.5 * (1 + math.cos(math.pi * progress))

    def save(self, folder: Path) -> None:
        """A Hugging Face folder as of `export`, with the optimizer's state and the version, which is also the place in the
        schedule. Replaces `folder` at once."""
        state = self._optimizer.state
        moments = {
            f"{key}/{name}": value.detach().cpu().contiguous()
            for name, parameter in self._trainable.items()
            for key, value in state.get(parameter, {}).items()
        }

        def write(temporary: Path) -> None:
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self._own_state().items()}
            save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
            self._save_configuration(temporary)
            save_file(moments, temporary / "optimizer.safetensors")
            (temporary / "learner.json").write_text(json.dumps({"format": FORMAT, "version": self.version}) + "\n")

        _replace_folder(folder, write)

    def restore(self, folder: Path) -> None:
        """Go on where `save` was called, bit for bit. Settings such as `lr` stay those of this learner.

        Raises ValueError, and changes nothing, when the checkpoint does not fit the model.
        """
        head = json.loads((folder / "learner.json").read_text())
        if head.get("format") != FORMAT:
            raise ValueError(f"{folder}: checkpoint format is {head.get('format')}; this version reads format {FORMAT}")
        weights = load_file(folder / WEIGHTS)
        moments = load_file(folder / "optimizer.safetensors")
        own = self._own_state()
        for name in sorted(own.keys() | weights.keys()):
            there, here = _shape(weights.get(name)), _shape(own.get(name))
            if there != here:
                raise ValueError(
                    f"{folder}: {name} is {there} in the checkpoint and {here} in the model; restore with the saved model"
                )
        parameters = {key: self._trainable.get(key.split("/", 1)[1]) for key in moments}
        for key, parameter in parameters.items():
            if parameter is None:
                raise ValueError(f"{folder}: {key} belongs to no trained parameter; restore with the same ones frozen")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        state = self._optimizer.state
        state.clear()
        for key, parameter in parameters.items():
            state[parameter][key.split("/", 1)[0]] = moments[key].to(self._accelerator.device)
        self.version = int(head["version"])

    def export(self, folder: Path) -> None:
        """A standard Hugging Face folder (safetensors, configuration, tokenizer) for `from_pretrained`."""

        def write(temporary: Path) -> None:
            self._bare_model.save_pretrained(temporary)
            self._save_configuration(temporary)

        _replace_folder(folder, write)

    def _save_configuration(self, folder: Path) -> None:
        self._bare_model.config.save_pretrained(folder)
        if self._bare_model.generation_config is not None:
            self._bare_model.generation_config.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)

    def _samples(self, batch: Batch) -> tuple[list[Sample], int, int]:
        """Completions with a trained token; how many completions have a weight; how many of those are truncated."""
        samples: list[Sample] = []
        n_weighted = n_truncated = 0
        for number, group in enumerate(batch.groups):
            for attempt, weight in zip(group.attempts, group.weights, strict=True):
                if weight is None:
                    continue
                if not math.isfinite(weight):
                    raise ValueError(f"prompt {group.prompt.id}: weight {weight} must be a finite number, or None")
                sample = self._sample(group.prompt, attempt, float(weight), number)
                is_truncated = attempt.completion is not None and attempt.completion.finish == "length"
                n_weighted += 1
                n_truncated += is_truncated
                if sample is not None and not (self._truncated == "mask" and is_truncated):
                    samples.append(sample)
        n_top = {len(row) for s in samples for rows in (s.top_ids, s.top_logprobs) for row in rows or ()}
        if len(n_top) > 1:
            raise ValueError(
                f"learner.score_centering: completions of a step come with {min(n_top)} to {max(n_top)} of the sampler's most "
                "likely tokens at each place; sample all of them with the same number"
            )
        self._set_scales(samples)
        return samples, n_weighted, n_truncated

    def _sample(self, prompt: Prompt, attempt: Attempt, weight: float, group: int) -> Sample | None:
        """None: no token of it is trained. Raises ValueError for what cannot be trained on."""
        completion = attempt.completion
        if completion is None:
            raise ValueError(f"prompt {prompt.id}: an attempt without a completion cannot be trained on")
        n = len(completion.tokens)
        n_mask = n if completion.mask is None else len(completion.mask)
        if not n == len(completion.logprobs) == n_mask:
            raise ValueError(
                f"prompt {prompt.id}: a completion of {n} tokens comes with {len(completion.logprobs)} "
                f"log-probabilities and a mask of {n_mask}; there must be one of each a token"
            )
        if n == 0 or (completion.mask is not None and not any(completion.mask)):
            return None
        if not prompt.tokens:
            raise ValueError(
                f"prompt {prompt.id} has no tokens, so nothing predicts the first token of a completion; "
                "encode it with at least a beginning-of-sequence token"
            )
        top_ids, top_logprobs = (completion.top_ids, completion.top_logprobs) if self._score_centering else (None, None)
        if self._score_centering and (
            top_ids is None or top_logprobs is None or not len(top_ids) == len(top_logprobs) == n
        ):
            raise ValueError(
                f"prompt {prompt.id}: a completion came without the sampler's most likely tokens, which "
                "learner.score_centering needs at each place: use an engine that returns them, or set it to 0"
            )
        return Sample(
            prompt.tokens, completion.tokens, completion.logprobs, completion.mask, weight,
            attempt.version == self.version, group, 1.0, top_ids, top_logprobs,
        )  # fmt: skip

    def _set_scales(self, samples: list[Sample]) -> None:
        """So that the sum of scale * loss over all tokens of `samples`, the whole step, is the average that was asked for."""
        n_tokens = sum(sample.n_trained for sample in samples)
        of_group: Counter[int] = Counter()
        for sample in samples:
            of_group[sample.group] += sample.n_trained
        for sample in samples:
            if self._normalize == "token":
                sample.scale = 1 / n_tokens
            elif self._normalize == "sequence":
                sample.scale = 1 / (len(samples) * sample.n_trained)
            elif self._normalize == "constant":
                sample.scale = 1 / (len(samples) * (self._max_new_tokens or 1))
            else:
                sample.scale = 1 / (len(of_group) * of_group[sample.group])

    def _logits(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Logits of the positions that predict trained tokens, [N, V].

        No attention mask: sequences are padded on the right, so a causal model sees no padding before a real token, and
        attention takes its fastest path. The output layer reads the N positions only; logits of a whole padded
        micro-batch would be the largest tensor of the step.
        """
        bare_model = model if isinstance(model, PreTrainedModel) else self._bare_model
        with _output_layer_reads(bare_model, micro_batch.predicting_N):
            logits: Tensor = model(micro_batch.inputs_ST, use_cache=False).logits
        return logits.flatten(0, -2)

    def _own_state(self) -> dict[str, Tensor]:
        """Parameters and saved buffers by name, the very tensors, tied ones once."""
        by_identity: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._bare_model.state_dict(keep_vars=True).items():
            by_identity.setdefault(id(tensor), (name, tensor))
        return dict(by_identity.values())


def split(samples: Sequence[Sample], n_tokens: int) -> Iterator[list[Sample]]:
    """Micro-batches of at most `n_tokens` positions (samples x longest), longest samples first.

    A sample longer than the budget makes a micro-batch of its own.
    """
    chunk: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: sample.length, reverse=True):
        if chunk and (len(chunk) + 1) * chunk[0].length > n_tokens:
            yield chunk
            chunk = []
        chunk.append(sample)
    if chunk:
        yield chunk


def collate(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Pad `samples` on the right. No Python loop over tokens."""

    def flat(rows: Iterator[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)

    n_prompt_S = torch.tensor([len(sample.prompt) for sample in samples])
    n_total_S = n_prompt_S + torch.tensor([len(sample.completion) for sample in samples])
    places_T1 = torch.arange(int(n_total_S.max()))
    real_ST1 = places_T1 < n_total_S.unsqueeze(1)
    completion_ST1 = real_ST1 & (places_T1 >= n_prompt_S.unsqueeze(1))

    tokens_ST1 = torch.zeros(real_ST1.shape, dtype=torch.long)
    tokens_ST1[real_ST1] = flat((part for s in samples for part in (s.prompt, s.completion)), torch.long)
    trained_ST1 = completion_ST1.clone()
    logprobs = flat((s.logprobs for s in samples), torch.float32)
    if any(sample.trained is not None for sample in samples):
        trained = flat((s.trained or (True,) * len(s.completion) for s in samples), torch.bool)
        trained_ST1[completion_ST1] = trained
        logprobs = logprobs[trained]

    n_trained_S = trained_ST1.sum(1)

    def by_token(values: list[Any]) -> Tensor:
        return torch.tensor(values).repeat_interleave(n_trained_S).to(device)

    def top(rows: Iterator[Any], dtype: torch.dtype) -> Tensor | None:
        if samples[0].top_ids is None:
            return None
        every_NH = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
        return (every_NH[trained] if any(sample.trained is not None for sample in samples) else every_NH).to(device)

    return MicroBatch(
        inputs_ST=tokens_ST1[:, :-1].to(device),
        predicting_N=trained_ST1[:, 1:].flatten().nonzero().squeeze(1).to(device),
        targets_N=tokens_ST1[trained_ST1].to(device),
        sampler_logprobs_N=logprobs.to(device),
        advantages_N=by_token([sample.weight for sample in samples]),
        same_version_N=by_token([sample.same_version for sample in samples]),
        scale_N=by_token([sample.scale for sample in samples]),
        sample_N=by_token(list(range(len(samples)))),
        top_ids_NH=top((sample.top_ids for sample in samples), torch.long),
        top_sampler_logprobs_NH=top((sample.top_logprobs for sample in samples), torch.float32),
    )


class _Statistics:
    """Sums and maxima over the tokens of a step, kept on the device: one transfer at the end.

    by_completion: clip fractions count completions, not tokens.
    """

    SUMS = (
        "loss", "entropy", "known", "low", "high", "ratio", "ratio_squared", "kl", "gap", "same", "same_gap",
        "masked", "kl_reference", "units",
    )  # fmt: skip
    MAXIMA = ("ratio", "gap", "same_gap")

    def __init__(self, device: torch.device, *, by_completion: bool) -> None:
        self._by_completion = by_completion
        self._n = 0
        self._sums = torch.zeros(len(self.SUMS), device=device)
        self._maxima = torch.zeros(len(self.MAXIMA), device=device)

    @torch.no_grad()
    def add(self, logprobs_N: Tensor, loss: TokenLoss, kl_reference_N: Tensor, micro_batch: MicroBatch) -> None:
        known_N = loss.known_N
        ratio_N = loss.log_ratio_N.exp() * known_N
        gap_N = loss.log_ratio_N.abs()
        same_N = micro_batch.same_version_N & known_N
        same_gap_N = gap_N * same_N
        low_N, high_N, units_N = loss.clipped_low_N, loss.clipped_high_N, known_N
        if self._by_completion:  # each of its tokens says the same: 1 / n for each of n
            units_N = 1 / torch.bincount(micro_batch.sample_N)[micro_batch.sample_N]
            low_N, high_N = low_N * units_N, high_N * units_N
        columns = (
            loss.loss_N * micro_batch.scale_N, -logprobs_N, known_N, low_N, high_N, ratio_N, ratio_N.square(),
            kl_k3(loss.log_ratio_N), gap_N, same_N, same_gap_N, loss.masked_N, kl_reference_N, units_N,
        )  # fmt: skip
        self._n += len(logprobs_N)
        self._sums += torch.stack(columns).sum(1)
        self._maxima = torch.maximum(self._maxima, torch.stack((ratio_N, gap_N, same_gap_N)).amax(1))

    def metrics(self) -> Metrics:
        total = dict(zip(self.SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(self.MAXIMA, self._maxima.tolist(), strict=True))
        n_known = total["known"]
        metrics = {"loss": total["loss"], "n_nan_logprobs": self._n - n_known}
        if self._n:
            metrics["entropy"] = total["entropy"] / self._n
            metrics["masked_share"] = total["masked"] / self._n
            metrics["kl_reference"] = total["kl_reference"] / self._n
        if n_known:
            metrics |= {
                "clip_fraction": (total["low"] + total["high"]) / total["units"],
                "clip_fraction_low": total["low"] / total["units"],
                "clip_fraction_high": total["high"] / total["units"],
                "ratio_mean": total["ratio"] / n_known,
                "ratio_max": largest["ratio"],
                "kl_sampler": total["kl"] / n_known,
                "effective_sample_share": total["ratio"] ** 2 / (n_known * total["ratio_squared"]),
                "logprob_gap_mean": total["gap"] / n_known,
                "logprob_gap_max": largest["gap"],
            }
        if total["same"]:
            metrics["same_version_gap_mean"] = total["same_gap"] / total["same"]
            metrics["same_version_gap_max"] = largest["same_gap"]
        return metrics


@contextmanager
def _output_layer_reads(model: PreTrainedModel, places_N: Tensor) -> Iterator[None]:
    """Within it, the output layer of `model` is applied to N of the flattened positions instead of to all.

    A hook rather than the argument `logits_to_keep`: that keeps the same positions of every sequence, and not every
    architecture has it. What an architecture does after the layer (scaling, soft cap) still happens.
    """

    def select(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_STH, *others = arguments
        return (hidden_STH.flatten(0, 1).index_select(0, places_N).unsqueeze(0), *others)

    output_layer: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    handle = output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder and put it in the place of `folder`, so that a crash leaves a whole one, old or new.

    Between the two renames of a replacement the old one is at `folder` + ".old".
    """
    temporary, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for path in (*temporary.iterdir(), temporary):
        fsync(path)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"


def _check(fine: bool, key: str, value: object, remedy: str) -> None:
    if not fine:
        raise ValueError(f"{key} = {value!r}: {remedy}")
