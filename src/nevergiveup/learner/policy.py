"""The policy being trained: a Hugging Face causal LM, its AdamW optimizer, and their checkpoints.

Layer 3. torch, transformers and accelerate. Blind to the sampling strategy: it sees tokens, sampler log-probabilities and
one weight (advantage) a completion.

Shapes: S completions of a micro-batch, T positions (padded on the right), T1 = T + 1, N trained tokens, V vocabulary,
H hidden size.
Symbols: pi is the policy being trained, mu the one that sampled; rho = pi / mu.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nevergiveup.learner.losses import TokenLoss, clipped_objective, kl_k3, token_logprobs
from nevergiveup.types import Batch, Metrics

Schedule: TypeAlias = Literal["constant", "cosine"]
Truncated: TypeAlias = Literal["wrong", "mask", "keep"]

FORMAT = 1
"""Of the checkpoint; another number is refused."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to train on.

    trained: one flag a completion token; None means all of them.
    same_version: sampled by the very policy that is about to be updated.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...] | None
    weight: float
    same_version: bool

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
    clip_low, clip_high: rho is clipped to [1 - clip_low, 1 + clip_high].
    temperature: of sampling; log pi is taken at the same temperature.
    micro_batch_tokens: budget of one forward and backward pass, padding included. A longer completion goes alone. The
        budget changes memory and speed, never the gradient: every token counts 1 / (trained tokens of the whole step).
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
        clip_low: float = 0.2,
        clip_high: float = 0.2,
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
        _check(0 < clip_low <= 1, "clip_low", clip_low, "use a number above 0 and at most 1")
        _check(clip_high > 0, "clip_high", clip_high, "use a number above 0")
        _check(temperature > 0, "temperature", temperature, "use a number above 0")
        _check(micro_batch_tokens >= 1, "micro_batch_tokens", micro_batch_tokens, "use a number of at least 1")
        self.version = version
        self._tokenizer = tokenizer
        self._lr = lr
        self._schedule = schedule
        self._n_warmup = n_warmup
        self._n_steps = n_steps
        self._max_grad_norm = max_grad_norm
        self._clip_low = clip_low
        self._clip_high = clip_high
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._truncated = truncated

        if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
            nn.Module.float(model)
        # Checkpointed layers recompute only in training mode.
        model.train(any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))
        self._accelerator = Accelerator()
        # On its device first: the optimizer must be made for the parameters where they will live.
        self._bare_model = model
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

        Metrics, over the trained tokens of the step whose weight is not 0.0, unless said otherwise:
        loss, lr, grad_norm (before clipping), step_s, skipped, nonfinite_grad
        n_tokens (trained, weight 0.0 included), n_completions (with a trained token), n_zero_weight (of these, not passed
            through the model: without a KL term they only count in the average)
        n_micro_batches, padding_share (of positions computed)
        truncated_share: completions cut by the length limit / completions with a weight, masked ones included
        entropy: mean -log pi, an estimate when on-policy
        n_nan_logprobs: tokens whose sampler log-probability is not finite, which all that follows leaves out
        clip_fraction, clip_fraction_low, clip_fraction_high: share of tokens whose gradient the clip range stopped
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
        samples = [sample for sample in samples if sample.weight != 0.0]
        metrics["n_zero_weight"] = metrics["n_completions"] - len(samples)
        micro_batches = list(split(samples, self._micro_batch_tokens))
        statistics = _Statistics(self._accelerator.device)
        for chunk in micro_batches:
            micro_batch = collate(chunk, self._accelerator.device)
            logprobs_N = token_logprobs(self._logits(micro_batch), micro_batch.targets_N, self._temperature)
            loss = clipped_objective(
                logprobs_N,
                micro_batch.sampler_logprobs_N,
                micro_batch.advantages_N,
                clip_low=self._clip_low,
                clip_high=self._clip_high,
            )
            self._accelerator.backward(loss.loss_N.sum() / n_tokens)
            statistics.add(logprobs_N.detach(), loss, micro_batch.same_version_N)
        n_padded = sum(len(chunk) * chunk[0].length for chunk in micro_batches)
        metrics |= statistics.metrics(n_tokens)
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
        """Weights, optimizer state and version, which is also the place in the schedule. Replaces `folder` at once."""
        state = self._optimizer.state
        moments = {
            f"{key}/{name}": value.detach().cpu().contiguous()
            for name, parameter in self._trainable.items()
            for key, value in state.get(parameter, {}).items()
        }

        def write(temporary: Path) -> None:
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self._own_state().items()}
            save_file(weights, temporary / "weights.safetensors")
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
        weights = load_file(folder / "weights.safetensors")
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
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(temporary)

        _replace_folder(folder, write)

    def _samples(self, batch: Batch) -> tuple[list[Sample], int, int]:
        """Completions with a trained token; how many completions have a weight; how many of those are truncated."""
        samples: list[Sample] = []
        n_weighted = n_truncated = 0
        for group in batch.groups:
            for attempt, weight in zip(group.attempts, group.weights, strict=True):
                if weight is None:
                    continue
                completion = attempt.completion
                if completion is None:
                    raise ValueError(f"prompt {group.prompt.id}: an attempt without a completion cannot be trained on")
                n = len(completion.tokens)
                n_mask = n if completion.mask is None else len(completion.mask)
                if not n == len(completion.logprobs) == n_mask:
                    raise ValueError(
                        f"prompt {group.prompt.id}: a completion of {n} tokens comes with {len(completion.logprobs)} "
                        f"log-probabilities and a mask of {n_mask}; there must be one of each a token"
                    )
                if not math.isfinite(weight):
                    raise ValueError(f"prompt {group.prompt.id}: weight {weight} must be a finite number, or None")
                n_weighted += 1
                n_truncated += completion.finish == "length"
                if self._truncated == "mask" and completion.finish == "length":
                    continue
                if n == 0 or (completion.mask is not None and not any(completion.mask)):
                    continue
                if not group.prompt.tokens:
                    raise ValueError(
                        f"prompt {group.prompt.id} has no tokens, so nothing predicts the first token of a completion; "
                        "encode it with at least a beginning-of-sequence token"
                    )
                samples.append(
                    Sample(
                        group.prompt.tokens,
                        completion.tokens,
                        completion.logprobs,
                        completion.mask,
                        float(weight),
                        attempt.version == self.version,
                    )
                )
        return samples, n_weighted, n_truncated

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        """Logits of the positions that predict trained tokens, [N, V].

        No attention mask: sequences are padded on the right, so a causal model sees no padding before a real token, and
        attention takes its fastest path. The output layer reads the N positions only; logits of a whole padded
        micro-batch would be the largest tensor of the step.
        """
        with _output_layer_reads(self._bare_model, micro_batch.predicting_N):
            logits: Tensor = self._model(micro_batch.inputs_ST, use_cache=False).logits
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
    advantages_S = torch.tensor([sample.weight for sample in samples])
    same_version_S = torch.tensor([sample.same_version for sample in samples])
    return MicroBatch(
        inputs_ST=tokens_ST1[:, :-1].to(device),
        predicting_N=trained_ST1[:, 1:].flatten().nonzero().squeeze(1).to(device),
        targets_N=tokens_ST1[trained_ST1].to(device),
        sampler_logprobs_N=logprobs.to(device),
        advantages_N=advantages_S.repeat_interleave(n_trained_S).to(device),
        same_version_N=same_version_S.repeat_interleave(n_trained_S).to(device),
    )


class _Statistics:
    """Sums and maxima over the tokens of a step, kept on the device: one transfer at the end."""

    SUMS = ("loss", "entropy", "known", "low", "high", "ratio", "ratio_squared", "kl", "gap", "same", "same_gap")
    MAXIMA = ("ratio", "gap", "same_gap")

    def __init__(self, device: torch.device) -> None:
        self._n = 0
        self._sums = torch.zeros(len(self.SUMS), device=device)
        self._maxima = torch.zeros(len(self.MAXIMA), device=device)

    @torch.no_grad()
    def add(self, logprobs_N: Tensor, loss: TokenLoss, same_version_N: Tensor) -> None:
        known_N = loss.known_N
        ratio_N = loss.log_ratio_N.exp() * known_N
        gap_N = loss.log_ratio_N.abs()
        same_N = same_version_N & known_N
        same_gap_N = gap_N * same_N
        columns = (
            loss.loss_N, -logprobs_N, known_N, loss.clipped_low_N, loss.clipped_high_N, ratio_N, ratio_N.square(),
            kl_k3(loss.log_ratio_N), gap_N, same_N, same_gap_N,
        )  # fmt: skip
        self._n += len(logprobs_N)
        self._sums += torch.stack(columns).sum(1)
        self._maxima = torch.maximum(self._maxima, torch.stack((ratio_N, gap_N, same_gap_N)).amax(1))

    def metrics(self, n_trained: int) -> Metrics:
        """n_trained: tokens that the loss is averaged over, those of weight 0.0 included."""
        total = dict(zip(self.SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(self.MAXIMA, self._maxima.tolist(), strict=True))
        n_known = total["known"]
        metrics = {"loss": total["loss"] / n_trained, "n_nan_logprobs": self._n - n_known}
        if self._n:
            metrics["entropy"] = total["entropy"] / self._n
        if n_known:
            metrics |= {
                "clip_fraction": (total["low"] + total["high"]) / n_known,
                "clip_fraction_low": total["low"] / n_known,
                "clip_fraction_high": total["high"] / n_known,
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
        _fsync(path)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"


def _check(fine: bool, key: str, value: object, remedy: str) -> None:
    if not fine:
        raise ValueError(f"{key} = {value!r}: {remedy}")
