"""The learner on tiny random transformers: its gradient against one computed completion by completion, and its checkpoints."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nevergiveup.learner.policy import Sample, TorchLearner, collate, split
from nevergiveup.models import word_tokenizer
from nevergiveup.objectives import Cispo, Clipped, Gspo, Loss, Normalize, Reinforce
from nevergiveup.types import Attempt, Batch, Completion, Group, Metrics, Prompt, TrainGroup

VOCABULARY = 31
CPU = torch.device("cpu")


def make_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends))
    if family == "qwen2":  # ties its output layer to the embedding, and has biases
        return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **ends, tie_word_embeddings=True))
    # learned positions and dropout of 0.1
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, **ends))


def make_completion(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    finish: Any = "stop",
    mask: Sequence[bool] | None = None,
    version: int = 0,
) -> Completion:
    logprobs = [-3.0] * len(tokens) if logprobs is None else logprobs
    return Completion(
        tuple(tokens), tuple(logprobs), "", finish, version, version, None if mask is None else tuple(mask)
    )


def make_batch(groups: Sequence[tuple[Sequence[int], Sequence[tuple[Completion, float | None]]]]) -> Batch:
    """Groups of (prompt tokens, [(completion, weight), ...])."""
    return Batch(
        0,
        tuple(
            TrainGroup(
                Prompt(str(i), tokens=tuple(prompt)),
                tuple(Attempt(0, completion.version_first, completion) for completion, _ in rows),
                tuple(weight for _, weight in rows),
                0.5,
                len(rows),
                1,
            )
            for i, (prompt, rows) in enumerate(groups)
        ),
    )


def random_batch(seed: int = 0, n_groups: int = 5, spread: float = 0.4) -> Batch:
    """Groups of 1 to 7 completions, prompts of 1 to 6 tokens, completions of 1 to 12; some weights are None or 0.

    Sampler log-probabilities are around those of an untrained model, near enough that some ratios are clipped, not all.
    """
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(n)]

    def row() -> tuple[Completion, float | None]:
        n = rng.randint(1, 12)
        logprobs = [-math.log(VOCABULARY) + rng.gauss(0, spread) for _ in range(n)]
        mask = [rng.random() < 0.7 for _ in range(n)] if rng.random() < 0.3 else None
        return make_completion(tokens(n), logprobs, mask=mask), rng.choice([None, 0.0, 0.75, -0.25, -1.0])

    return make_batch([(tokens(rng.randint(1, 6)), [row() for _ in range(rng.randint(1, 7))]) for _ in range(n_groups)])


def step(learner: TorchLearner, batch: Batch) -> Metrics:
    return asyncio.run(learner.step(batch))


def step_and_gradient(
    learner: TorchLearner, model: PreTrainedModel, batch: Batch
) -> tuple[Metrics, dict[str, torch.Tensor]]:
    """The metrics of a step and the gradient it took (seen before it is thrown away)."""
    gradient: dict[str, torch.Tensor] = {}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradient.__setitem__(name, p.grad.clone()))
        for name, p in model.named_parameters()
    ]
    metrics = step(learner, batch)
    for handle in handles:
        handle.remove()
    return metrics, gradient


def reference(
    model: PreTrainedModel, batch: Batch, temperature: float = 1.0, low: float = 0.2, high: float = 0.28
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, trained tokens and gradient of algorithm.md section 5: one completion at a time, no padding, no tricks."""
    total, n = torch.zeros((), dtype=torch.float64), 0
    for group in batch.groups:
        for attempt, weight in zip(group.attempts, group.weights, strict=True):
            completion = attempt.completion
            if weight is None or completion is None:
                continue
            sequence = torch.tensor([group.prompt.tokens + completion.tokens])
            logprobs = torch.log_softmax(model(sequence, use_cache=False).logits[0] / temperature, dim=-1)
            for i, (token, mu) in enumerate(zip(completion.tokens, completion.logprobs, strict=True)):
                if completion.mask is not None and not completion.mask[i]:
                    continue
                ratio = (logprobs[len(group.prompt.tokens) + i - 1, token] - mu).exp()
                clipped = ratio.clamp(1 - low, 1 + high)
                total = total - torch.minimum(ratio * weight, clipped * weight)
                n += 1
    model.zero_grad()
    (total / n).backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return (total / n).item(), n, gradient


def on_policy(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Batch:
    """The same batch, as if the present weights had sampled it."""
    groups = []
    for group in batch.groups:
        attempts = []
        for attempt in group.attempts:
            old = attempt.completion
            assert old is not None
            with torch.no_grad():
                logits = model(torch.tensor([group.prompt.tokens + old.tokens]), use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(group.prompt.tokens) - 1 : -1]
            chosen = logprobs.gather(1, torch.tensor(old.tokens).unsqueeze(1)).squeeze(1).tolist()
            attempts.append(replace(attempt, completion=replace(old, logprobs=tuple(chosen))))
        groups.append(replace(group, attempts=tuple(attempts)))
    return replace(batch, groups=tuple(groups))


def assert_same_gradient(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= tolerance * max(1.0, value.abs().max().item()), name


# The gradient


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(("budget", "temperature"), [(1, 1.0), (40, 0.7), (100_000, 1.3)])
def test_gradient_is_that_of_one_completion_at_a_time(family: str, budget: int, temperature: float) -> None:
    model = make_model(family).double().eval()
    batch = random_batch(1)
    loss, n, expected = reference(model, batch, temperature)
    learner = TorchLearner(model, lr=1e-3, loss=Clipped(0.2, 0.28), temperature=temperature, micro_batch_tokens=budget)
    metrics, got = step_and_gradient(learner, model, batch)
    assert metrics["n_tokens"] == n
    assert metrics["clip_fraction_low"] > 0
    assert metrics["clip_fraction_high"] > 0
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert_same_gradient(got, expected, 1e-6)
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_micro_batches_change_neither_gradient_nor_metrics() -> None:
    batch, seen = random_batch(2), []
    for budget in (1, 30, 64, 100_000):
        model = make_model()
        metrics, gradient = step_and_gradient(TorchLearner(model, micro_batch_tokens=budget), model, batch)
        seen.append((metrics, gradient))
    assert [metrics["n_micro_batches"] for metrics, _ in seen] == sorted(
        (metrics["n_micro_batches"] for metrics, _ in seen), reverse=True
    )
    assert seen[0][0]["n_micro_batches"] > seen[1][0]["n_micro_batches"] > seen[-1][0]["n_micro_batches"] == 1
    assert seen[0][0]["padding_share"] == 0 < seen[-1][0]["padding_share"]
    for metrics, gradient in seen[:-1]:
        assert_same_gradient(gradient, seen[-1][1], 1e-6)
        for key in metrics.keys() - {"n_micro_batches", "padding_share", "step_s"}:
            assert metrics[key] == pytest.approx(seen[-1][0][key], rel=1e-5, abs=1e-6), key


def test_activation_checkpointing_recomputes_and_changes_nothing() -> None:
    batch, gradients, calls = random_batch(3), [], []
    for checkpointing in (False, True):
        model = make_model()
        if checkpointing:
            model.activation_checkpointing_enable()
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, on=checkpointing: calls.append(on))
        gradients.append(step_and_gradient(TorchLearner(model), model, batch)[1])
    assert calls == [False, True, True]
    assert_same_gradient(gradients[1], gradients[0], 1e-7)


def test_on_policy_step_is_the_plain_policy_gradient() -> None:
    model = make_model().double().eval()
    batch = on_policy(model, random_batch(4), temperature=0.8)
    surrogate, n = torch.zeros((), dtype=torch.float64), 0
    for group in batch.groups:
        for attempt, weight in zip(group.attempts, group.weights, strict=True):
            completion = attempt.completion
            if weight is None or completion is None:
                continue
            logits = model(torch.tensor([group.prompt.tokens + completion.tokens]), use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits / 0.8, dim=-1)[len(group.prompt.tokens) - 1 : -1]
            chosen = logprobs.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
            trained = torch.tensor(completion.mask or [True] * len(completion.tokens))
            surrogate = surrogate - weight * chosen[trained].sum()
            n += int(trained.sum())
    (surrogate / n).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    metrics, got = step_and_gradient(TorchLearner(model, temperature=0.8), model, batch)
    assert_same_gradient(got, expected, 1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["kl_sampler"] == pytest.approx(0, abs=1e-6)
    assert metrics["effective_sample_share"] == pytest.approx(1, abs=1e-6)
    assert metrics["logprob_gap_max"] == pytest.approx(0, abs=1e-6)


def test_a_weight_of_zero_counts_in_the_average_and_none_does_not() -> None:
    model = make_model().eval()
    rows = [([1, 5], [(make_completion([4, 6, 2]), 0.5), (make_completion([7] * 9), None)])]
    batch = on_policy(model, make_batch(rows))
    alone = step(TorchLearner(model, lr=0.0), batch)
    with_zero = replace(batch.groups[0], weights=(0.5, 0.0))
    diluted = step(TorchLearner(model, lr=0.0), replace(batch, groups=(with_zero,)))
    assert (alone["n_tokens"], alone["n_completions"]) == (3, 1)
    assert (diluted["n_tokens"], diluted["n_completions"]) == (12, 2)
    assert alone["loss"] == pytest.approx(-0.5, abs=1e-5)
    assert diluted["loss"] == pytest.approx(-0.5 * 3 / 12, abs=1e-5)


# Losses and normalisations


def slow_loss(
    model: PreTrainedModel, batch: Batch, loss: Loss, normalize: Normalize, max_new_tokens: int, reference: PreTrainedModel
) -> torch.Tensor:  # fmt: skip
    """The objective from its definition, a completion at a time: means over lists of numbers. With .1 times the k3 KL."""
    groups: list[list[torch.Tensor]] = []
    for group in batch.groups:
        rows = []
        for attempt, weight in zip(group.attempts, group.weights, strict=True):
            completion = attempt.completion
            if weight is None or completion is None or not any(completion.mask or [True]):
                continue
            n_prompt, sequence = len(group.prompt.tokens), torch.tensor([group.prompt.tokens + completion.tokens])
            trained = torch.tensor(completion.mask or [True] * len(completion.tokens))
            places = (range(n_prompt - 1, sequence.shape[1] - 1), list(completion.tokens))
            log_pi = model(sequence, use_cache=False).logits[0].log_softmax(-1)[places][trained]
            with torch.no_grad():
                log_ref = reference(sequence, use_cache=False).logits[0].log_softmax(-1)[places][trained]
            log_ratio = log_pi - torch.tensor(completion.logprobs, dtype=log_pi.dtype)[trained]
            if isinstance(loss, Reinforce):
                values = -log_ratio.exp().clamp(max=loss.cap).detach() * weight * log_pi
            elif isinstance(loss, Cispo):
                values = -log_ratio.exp().clamp(max=1 + loss.clip_high).detach() * weight * log_pi
            else:
                ratio = log_ratio.exp() if isinstance(loss, Clipped) else log_ratio.mean().exp().expand(len(log_pi))
                bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
                values = -torch.minimum(ratio * weight, bounded * weight)
            rows.append(values + 0.1 * ((log_ref - log_pi).exp() - (log_ref - log_pi) - 1))
        if rows:
            groups.append(rows)
    every = [row for rows in groups for row in rows]
    if normalize == "token":
        return torch.cat(every).mean()
    if normalize == "sequence":
        return torch.stack([row.mean() for row in every]).mean()
    if normalize == "constant":
        return torch.stack([row.sum() / max_new_tokens for row in every]).mean()
    return torch.stack([torch.cat(rows).mean() for rows in groups]).mean()


@pytest.mark.parametrize(
    "loss", [Clipped(0.2, 0.28), Reinforce(), Cispo(), Gspo(0.05, 0.1)], ids=lambda loss: loss.name
)
@pytest.mark.parametrize("normalize", ["token", "sequence", "constant", "group"])
def test_every_loss_under_every_normalization(loss: Loss, normalize: Normalize) -> None:
    """Groups of 1 to 7 completions of 1 to 12 tokens, weights of 0 and None among them; whatever the micro-batches are."""
    batch = random_batch(7)
    for budget in (1, 40, 100_000):
        model, other = make_model().double().eval(), make_model(seed=1).double().eval()
        expected = slow_loss(model, batch, loss, normalize, 12, other)
        expected.backward()
        gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        learner = TorchLearner(
            model, loss=loss, normalize=normalize, max_new_tokens=12, kl_beta=0.1, reference=other,
            micro_batch_tokens=budget,
        )  # fmt: skip
        metrics, got = step_and_gradient(learner, model, batch)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert metrics["kl_reference"] > 0
        assert_same_gradient(got, gradient, 1e-6)


def test_normalizations_by_hand() -> None:
    """On policy the loss of a token is -weight. Two groups: completions of 1 and 4 tokens, and one of 2."""
    rows = [
        ([1, 5], [(make_completion([2]), 1.0), (make_completion([4, 6, 7, 2]), -0.5)]),
        ([1], [(make_completion([5, 2]), 0.25)]),
    ]
    model = make_model().eval()
    batch = on_policy(model, make_batch(rows))
    expected = {
        "token": -(1.0 - 2.0 + 0.5) / 7,
        "sequence": -(1.0 - 0.5 + 0.25) / 3,
        "constant": -(1.0 - 2.0 + 0.5) / (3 * 10),
        "group": -((1.0 - 2.0) / 5 + 0.25) / 2,
    }
    for normalize, loss in expected.items():
        learner = TorchLearner(model, lr=0.0, normalize=normalize, max_new_tokens=10)
        assert step(learner, batch)["loss"] == pytest.approx(loss, abs=1e-5), normalize


@pytest.mark.parametrize(
    ("normalize", "expected"), [("token", 25 / 25), ("sequence", 5 / 5), ("constant", 25 / (5 * 8)), ("group", 2 / 2)]
)
def test_masked_truncations_leave_every_average(normalize: Normalize, expected: float) -> None:
    """C33: 30 tokens, 5 of them in a truncated completion with a group of its own: the average is over 25 tokens, 5 of 6
    completions, 2 of 3 groups."""
    rows = [(make_completion([4] * 5, finish="length" if i == 0 else "stop"), 1.0) for i in range(6)]
    model = make_model().eval()
    batch = on_policy(model, make_batch([([1], rows[:1]), ([1], rows[1:3]), ([1], rows[3:])]))
    learner = TorchLearner(model, lr=0.0, truncated="mask", normalize=normalize, max_new_tokens=8)
    metrics = step(learner, batch)
    assert (metrics["n_tokens"], metrics["n_completions"]) == (25, 5)
    assert metrics["loss"] == pytest.approx(-expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_to_the_present_weights_adds_nothing(dtype: torch.dtype) -> None:
    """Also when both come in half precision: the policy is widened, and the reference with it."""
    outcomes = []
    for kl in ({}, {"kl_beta": 10.0, "reference": make_model().to(dtype)}):
        model = make_model().to(dtype)
        outcomes.append(step_and_gradient(TorchLearner(model, temperature=0.7, **kl), model, random_batch(5)))
    (metrics, plain), (with_metrics, with_kl) = outcomes
    assert with_metrics["kl_reference"] == 0.0
    assert with_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert_same_gradient(with_kl, plain, 1e-6)


def test_kl_starts_at_zero_and_pulls_back() -> None:
    model, start = make_model().double(), make_model().double()
    batch = on_policy(model, random_batch(5))
    learner = TorchLearner(model, lr=1e-2, kl_beta=0.5, reference=start)
    assert step(learner, batch)["kl_reference"] == pytest.approx(0, abs=1e-9)
    away = step(learner, batch)["kl_reference"]
    assert away > 1e-4
    zeros = replace(batch, groups=tuple(replace(group, weights=(0.0,) * len(group.weights)) for group in batch.groups))
    for _ in range(30):
        metrics = step(learner, zeros)
    assert metrics["kl_reference"] < away / 2, "a weight of 0 leaves the KL term alone"


def test_the_reference_is_frozen_and_not_saved(tmp_path: Path) -> None:
    model, start = make_model(), make_model(seed=1)
    before = {name: p.clone() for name, p in start.named_parameters()}
    learner = TorchLearner(model, lr=1e-2, kl_beta=0.5, reference=start)
    step(learner, random_batch(5))
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in start.named_parameters())
    assert not any(p.requires_grad for p in start.parameters())
    learner.save(tmp_path / "with")
    TorchLearner(make_model(seed=2)).save(tmp_path / "without")
    names = [set(load_file(tmp_path / name / "model.safetensors")) for name in ("with", "without")]
    assert names[0] == names[1]


def test_masked_share_counts_ratios_outside_the_mask() -> None:
    model = make_model()
    batch = on_policy(model, make_batch([([1], [(make_completion([4, 6, 7, 2]), 1.0)])]))
    own = batch.groups[0].attempts[0].completion
    assert own is not None
    shifted = replace(own, logprobs=(own.logprobs[0] + 2.0, *own.logprobs[1:]))  # a ratio of e^-2
    group = replace(batch.groups[0], attempts=(Attempt(1, 0, shifted),))
    metrics = step(TorchLearner(model, lr=0.0, ratio_mask=(0.5, 5.0)), replace(batch, groups=(group,)))
    assert metrics["masked_share"] == 0.25
    assert metrics["loss"] == pytest.approx(-3 / 4, abs=1e-5)


def test_gspo_counts_clipped_completions() -> None:
    """Two of three completions have a ratio out of range, one of these with a single usable token of four."""
    model = make_model()
    rows = [(make_completion([4, 6, 7, 2]), 1.0), (make_completion([5, 2]), -1.0), (make_completion([8] * 9), 1.0)]
    batch = on_policy(model, make_batch([([1], rows)]))
    attempts = list(batch.groups[0].attempts)
    for i, logprobs in enumerate([lambda old: (old[0] - 1.0, *[math.nan] * 3), lambda old: (old[0] + 1.0, old[1])]):
        own = attempts[i].completion
        assert own is not None
        attempts[i] = replace(attempts[i], completion=replace(own, logprobs=logprobs(own.logprobs)))
    batch = replace(batch, groups=(replace(batch.groups[0], attempts=tuple(attempts)),))
    for budget in (1, 100_000):
        metrics = step(TorchLearner(model, lr=0.0, loss=Gspo(), micro_batch_tokens=budget), batch)
        assert metrics["clip_fraction_high"] == pytest.approx(1 / 3)
        assert metrics["clip_fraction_low"] == pytest.approx(1 / 3)
        assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def with_top(batch: Batch, n: int = 2) -> Batch:
    """The batch with n of the sampler's most likely tokens at each place."""

    def add(attempt: Attempt) -> Attempt:
        own = attempt.completion
        assert own is not None
        ids = tuple(tuple((token + i) % VOCABULARY for i in range(n)) for token in own.tokens)
        logprobs = tuple((logprob, *[math.log(0.01)] * (n - 1)) for logprob in own.logprobs)
        return replace(attempt, completion=replace(own, top_ids=ids, top_logprobs=logprobs))

    return replace(batch, groups=tuple(replace(g, attempts=tuple(map(add, g.attempts))) for g in batch.groups))


def test_score_centering_needs_the_top_tokens_and_uses_them() -> None:
    batch = random_batch(6)
    with pytest.raises(ValueError, match=r"prompt 0: .*learner\.score_centering"):
        step(TorchLearner(make_model(), score_centering=True), batch)
    two, three = with_top(batch).groups, with_top(batch, 3).groups
    with pytest.raises(ValueError, match=r"learner\.score_centering: .* 2 to 3 of the sampler's"):
        step(TorchLearner(make_model(), score_centering=True), replace(batch, groups=two[:2] + three[2:]))

    seen = []
    for budget in (1, 40, 100_000):
        model = make_model()
        learner = TorchLearner(model, loss=Reinforce(1.0), score_centering=True, micro_batch_tokens=budget)
        seen.append(step_and_gradient(learner, model, with_top(batch))[1])
    model = make_model()
    plain = step_and_gradient(TorchLearner(model, loss=Reinforce(1.0)), model, batch)[1]
    assert_same_gradient(seen[0], seen[1], 1e-6)
    assert_same_gradient(seen[0], seen[2], 1e-6)
    assert any((seen[0][name] - plain[name]).abs().max() > 1e-4 for name in plain)


@pytest.mark.parametrize(
    "loss", [Clipped(0.2, 0.28, dual_clip=1.5), Reinforce(1.2), Cispo(0.1)], ids=lambda loss: loss.name
)
@pytest.mark.parametrize("budget", [1, 100_000])
def test_score_centering_is_that_of_one_completion_at_a_time(loss: Loss, budget: int) -> None:
    """Another model samples; masks on tokens and on ratios, a temperature, and the 4 ids that the sampler finds likeliest."""
    model, sampler = make_model().double().eval(), make_model(seed=1).double().eval()
    with torch.no_grad():
        for each in (model, sampler):
            each.lm_head.weight.mul_(5)  # untrained, both are nearly uniform: every ratio would be near 1
    low, high, temperature = 0.5, 2.0, 0.8

    def weight_of(ratio: float, advantage: float) -> float:
        if not low <= ratio <= high:
            return 0.0
        if isinstance(loss, Reinforce):
            return min(ratio, 1.2)
        if isinstance(loss, Cispo):
            return min(ratio, 1.1)
        stopped = ratio > 1.28 if advantage > 0 else ratio < 0.8 or ratio > 1.5
        return 0.0 if stopped else ratio

    batch, groups = random_batch(1), []
    total, n, n_context, n_masked = torch.zeros((), dtype=torch.float64), 0, 0, 0
    for group in batch.groups:
        attempts = []
        for attempt, advantage in zip(group.attempts, group.weights, strict=True):
            own = attempt.completion
            assert own is not None
            sequence, first = torch.tensor([group.prompt.tokens + own.tokens]), len(group.prompt.tokens) - 1
            log_p = (model(sequence, use_cache=False).logits[0, first:-1] / temperature).log_softmax(-1)
            with torch.no_grad():
                log_q = (sampler(sequence, use_cache=False).logits[0, first:-1] / temperature).log_softmax(-1)
            top = log_q.topk(4)
            chosen = log_q[range(len(own.tokens)), list(own.tokens)]
            completion = replace(
                own, logprobs=tuple(chosen.tolist()), top_ids=tuple(map(tuple, top.indices.tolist())),
                top_logprobs=tuple(map(tuple, top.values.tolist())),
            )  # fmt: skip
            attempts.append(replace(attempt, completion=completion))
            if advantage is None:
                continue
            for i, token in enumerate(own.tokens):
                if own.mask is not None and not own.mask[i]:
                    n_context += advantage != 0.0
                    continue
                n += 1
                p, q = log_p[i].detach().exp().tolist(), log_q[i].exp().tolist()
                ids = top.indices[i].tolist()
                a = (1 - sum(q[v] for v in ids)) / (1 - sum(p[v] for v in ids))
                n_masked += advantage != 0.0 and not low <= p[token] / q[token] <= high
                total = total - weight_of(p[token] / q[token], advantage) * advantage * log_p[i, token]
                for v in ids:
                    centre = q[v] * weight_of(p[v] / q[v], advantage) - a * weight_of(1 / a, advantage) * p[v]
                    total = total + advantage * centre * log_p[i, v]
        groups.append(replace(group, attempts=tuple(attempts)))
    assert n_context > 0
    assert n_masked > 0
    (total / n).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    learner = TorchLearner(
        model,
        loss=loss,
        score_centering=True,
        ratio_mask=(low, high),
        temperature=temperature,
        micro_batch_tokens=budget,
    )
    metrics, got = step_and_gradient(learner, model, replace(batch, groups=tuple(groups)))
    assert metrics["masked_share"] > 0
    assert_same_gradient(got, expected, 1e-6)


@pytest.mark.parametrize("loss", [Clipped(), Clipped(dual_clip=3.0), Reinforce(), Cispo()], ids=str)
def test_unusable_sampler_logprobs_are_neutral_under_score_centering(loss: Loss) -> None:
    """As if the present policy had sampled there: the plain gradient, without a correction."""
    model = make_model().double().eval()
    plain = on_policy(model, random_batch(6))
    usable = step_and_gradient(TorchLearner(model, lr=0.0, loss=loss), model, plain)[1]

    def spoil(attempt: Attempt, *, head: bool) -> Attempt:
        own = attempt.completion
        assert own is not None
        assert own.top_logprobs is not None
        nothing = tuple((math.nan,) * len(row) for row in own.top_logprobs)
        completion = replace(
            own, logprobs=(math.nan,) * len(own.tokens), top_logprobs=nothing if head else own.top_logprobs
        )
        return replace(attempt, completion=completion)

    for head in (False, True):
        groups = tuple(
            replace(group, attempts=tuple(spoil(attempt, head=head) for attempt in group.attempts))
            for group in with_top(plain).groups
        )
        learner = TorchLearner(model, lr=0.0, loss=loss, score_centering=True)
        metrics, got = step_and_gradient(learner, model, replace(plain, groups=groups))
        assert metrics["skipped"] == 0
        assert_same_gradient(got, usable, 1e-6)


def test_gradient_norms(tmp_path: Path) -> None:
    model = make_model().double()
    right, wrong = make_completion([4, 6, 2]), make_completion([7, 2])
    masked = make_completion([5, 9, 2], mask=[True, False, True])
    prompt = Prompt("p", tokens=(1, 5))

    def group(*attempts: Attempt) -> Group:
        return Group(prompt, attempts, len(attempts), 1, None, 0, 1, 1)

    def norm(completion: Completion) -> float:
        logits = model(torch.tensor([prompt.tokens + completion.tokens]), use_cache=False).logits[0] / 0.7
        chosen = logits.log_softmax(-1)[range(1, 1 + len(completion.tokens)), list(completion.tokens)]
        chosen[torch.tensor(completion.mask or [True] * len(completion.tokens))].sum().backward()
        value = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        model.zero_grad()
        return value

    learner = TorchLearner(model, temperature=0.7)
    step(learner, random_batch())  # the optimizer has a state to lose
    expected = (norm(right) + norm(masked)) / 2
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner.save(tmp_path / "before")
    groups = [group(Attempt(1, 0, right), Attempt(0, 0, wrong), Attempt(1, 0, masked)), group(Attempt(0, 0, wrong))]
    norms = asyncio.run(learner.gradient_norms(groups))
    assert norms == [pytest.approx(expected, rel=1e-6), 0.0]
    assert learner.version == 1
    assert all(torch.equal(before[name], p) and (p.grad == 1).all() for name, p in model.named_parameters())
    learner.save(tmp_path / "after")
    moments = [load_file(tmp_path / name / "optimizer.safetensors") for name in ("before", "after")]
    assert moments[0].keys() == moments[1].keys() != set()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


def test_training_makes_rewarded_completions_likelier() -> None:
    model = make_model()
    good, bad = make_completion([4, 6, 2], [math.nan] * 3), make_completion([9, 2], [math.nan] * 2)
    batch = make_batch([([1, 5], [(good, 0.5), (bad, -0.5)])])

    def probability(completion: Completion) -> float:
        with torch.no_grad():
            logprobs = model(torch.tensor([(1, 5, *completion.tokens)])).logits[0, 1:-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).sum().exp().item()

    before = probability(good), probability(bad)
    learner = TorchLearner(model, lr=3e-3)
    for _ in range(15):
        step(learner, batch)
    assert probability(good) > 100 * before[0]
    assert probability(bad) < before[1] / 10


# Masks


def test_end_of_sequence_is_trained_and_padding_is_not_even_if_they_share_an_id() -> None:
    short = Sample((1,), (5, 6, 2), (-1.0, -2.0, -3.0), None, 0.5, True)
    long = Sample((1, 2), (7, 2, 2, 2, 8), (-4.0,) * 5, (True, False, True, True, True), -0.25, False)
    micro_batch = collate([long, short], CPU)
    assert micro_batch.inputs_ST.tolist() == [[1, 2, 7, 2, 2, 2], [1, 5, 6, 2, 0, 0]]
    assert micro_batch.targets_N.tolist() == [7, 2, 2, 8, 5, 6, 2]
    assert micro_batch.predicting_N.tolist() == [1, 3, 4, 5, 6, 7, 8]
    assert micro_batch.sampler_logprobs_N.tolist() == [-4, -4, -4, -4, -1, -2, -3]
    assert micro_batch.advantages_N.tolist() == [-0.25] * 4 + [0.5] * 3
    assert micro_batch.same_version_N.tolist() == [False] * 4 + [True] * 3


def test_masked_tokens_are_context_but_not_trained() -> None:
    model = make_model().double().eval()
    tool = make_completion([4, 6, 8, 2], mask=[True, False, False, True])
    other = make_completion([4, 7, 8, 2], mask=[True, False, False, True])
    outcomes = [
        step_and_gradient(TorchLearner(model, lr=0.0), model, make_batch([([1, 5], [(completion, 0.5)])]))
        for completion in (tool, other)
    ]
    assert [metrics["n_tokens"] for metrics, _ in outcomes] == [2, 2]
    assert outcomes[0][0]["entropy"] != outcomes[1][0]["entropy"]  # the last token was predicted after another context


@pytest.mark.parametrize(("truncated", "n_tokens"), [("mask", 25), ("wrong", 30), ("keep", 30)])
def test_masked_truncation_leaves_the_denominator(truncated: Any, n_tokens: int) -> None:
    model = make_model().eval()
    rows = [(make_completion([3] * 5), 1.0) for _ in range(5)] + [(make_completion([4] * 5, finish="length"), 0.0)]
    batch = on_policy(model, make_batch([([1], rows)]))
    metrics = step(TorchLearner(model, truncated=truncated), batch)
    assert metrics["n_tokens"] == n_tokens
    assert metrics["loss"] == pytest.approx(-25 / n_tokens, abs=1e-5)
    assert metrics["truncated_share"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "rows",
    [
        [(make_completion([4, 6], finish="length"), 0.5), (make_completion([4] * 9, finish="length"), -0.5)],
        [(make_completion([]), 0.5)],
        [(make_completion([4, 6, 2]), None), (make_completion([4, 2]), None)],
        [(make_completion([4, 6, 2], mask=[False] * 3), 0.5)],
        [],
    ],
    ids=["truncated", "empty", "none", "masked", "nothing"],
)
def test_a_batch_without_a_trained_token_is_skipped(rows: Any) -> None:
    model = make_model()
    learner = TorchLearner(model, lr=1.0, weight_decay=0.5, truncated="mask", version=3)
    before = asyncio.run(learner.weights())
    metrics = step(learner, make_batch([([1, 5], rows)]))
    assert metrics["skipped"] == 1
    assert metrics["loss"] == 0
    assert metrics["n_tokens"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert learner.version == 3
    after = asyncio.run(learner.weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_empty_completions_do_not_disturb_the_others() -> None:
    model = make_model()
    good = (make_completion([4, 6, 2]), 0.5)
    without = step_and_gradient(TorchLearner(model, lr=0.0), model, make_batch([([1, 5], [good])]))
    with_empty = step_and_gradient(
        TorchLearner(model, lr=0.0), model, make_batch([([1, 5], [(make_completion([]), -0.5), good])])
    )
    assert with_empty[0]["n_tokens"] == 3
    assert_same_gradient(with_empty[1], without[1], 0.0)


# Sampler log-probabilities


def fixed_logits_model(logits: list[float]) -> PreTrainedModel:
    """A model with a vocabulary of two whose logits after the one-token prompt [1] are as given."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([[1]])).last_hidden_state[0, 0]
        model.lm_head.weight.copy_(torch.tensor(logits).unsqueeze(1) * hidden / hidden.square().sum())
    return model


def test_both_sides_use_the_temperature() -> None:
    batch = make_batch([([1], [(make_completion([0], [-0.018150]), 1.0)])])
    matched = step(TorchLearner(fixed_logits_model([2.0, 0.0]), lr=0.0, temperature=0.5), batch)
    assert matched["entropy"] == pytest.approx(0.018150, abs=1e-6)
    assert matched["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert matched["same_version_gap_max"] < 1e-6
    unmatched = step(TorchLearner(fixed_logits_model([2.0, 0.0]), lr=0.0, temperature=1.0), batch)
    assert unmatched["entropy"] == pytest.approx(0.126928, abs=1e-6)
    assert unmatched["same_version_gap_max"] == pytest.approx(0.126928 - 0.018150, abs=1e-6)


def test_a_nan_sampler_logprob_is_neutral_and_counted() -> None:
    model = make_model().double().eval()
    rows = [([1, 5], [(make_completion([4, 6, 2]), 0.5), (make_completion([7, 2]), -0.5)])]
    clean = on_policy(model, make_batch(rows))
    first, second = (attempt.completion for attempt in clean.groups[0].attempts)
    assert first is not None
    assert second is not None
    spoiled_logprobs = (first.logprobs[0], math.nan, first.logprobs[2])
    spoiled = make_batch([([1, 5], [(make_completion(first.tokens, spoiled_logprobs), 0.5), (second, -0.5)])])
    expected_metrics, expected = step_and_gradient(TorchLearner(model, lr=0.0), model, clean)
    metrics, got = step_and_gradient(TorchLearner(model, lr=0.0), model, spoiled)
    assert expected_metrics["n_nan_logprobs"] == 0
    assert metrics["n_nan_logprobs"] == 1
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["n_tokens"] == 5
    assert metrics["skipped"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert_same_gradient(got, expected, 1e-7)


def test_gap_of_the_same_version_is_told_apart() -> None:
    model = make_model().eval()
    groups = on_policy(model, make_batch([([1, 5], [(make_completion([4, 6, 2]), 0.5)])])).groups
    fresh = groups[0].attempts[0].completion
    assert fresh is not None
    old = make_completion([7, 8], [-1.0, -1.0], version=6)
    now = make_completion(fresh.tokens, fresh.logprobs, version=7)
    both = step(TorchLearner(model, lr=0.0, version=7), make_batch([([1, 5], [(now, 0.5), (old, -0.5)])]))
    assert both["same_version_gap_max"] < 1e-5 < 1 < both["logprob_gap_max"]
    assert both["same_version_gap_mean"] < 1e-5 < both["logprob_gap_mean"]
    only_old = step(TorchLearner(model, lr=0.0, version=7), make_batch([([1, 5], [(old, -0.5)])]))
    assert "same_version_gap_max" not in only_old


def test_learning_rate_of_zero_leaves_weights_and_gap_alone() -> None:
    model = make_model()
    learner = TorchLearner(model, lr=0.0, weight_decay=0.1)
    before, batch = asyncio.run(learner.weights()), random_batch(5)
    gaps = [step(learner, batch)["logprob_gap_mean"] for _ in range(20)]
    assert learner.version == 20
    assert gaps == [gaps[0]] * 20
    after = asyncio.run(learner.weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


# The optimizer step


def test_gradient_is_clipped_to_the_norm() -> None:
    """Seen in the first moment: the size of Adam's first update does not depend on the norm of the gradient."""
    batch, first_moments = random_batch(6), []
    for max_grad_norm in (math.inf, 1e-3):
        model = make_model()
        learner = TorchLearner(model, lr=1e-3, max_grad_norm=max_grad_norm)
        metrics = step(learner, batch)
        moments = [learner._optimizer.state[p]["exp_avg"] for p in model.parameters()]
        first_moments.append(math.sqrt(sum(m.square().sum().item() for m in moments)) / (1 - 0.9))
        assert metrics["grad_norm"] > 0.01  # reported as it was
    assert first_moments[0] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert first_moments[1] == pytest.approx(1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = math.inf
    learner = TorchLearner(model, lr=1e-3)
    before = asyncio.run(learner.weights())
    metrics = step(learner, random_batch(7))
    assert (metrics["skipped"], metrics["nonfinite_grad"]) == (1, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert learner.version == 0
    after = asyncio.run(learner.weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weight_decay_is_of_matrices_only() -> None:
    model = make_model("qwen2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = make_batch([([1, 5], [(make_completion([4, 6, 2]), 0.0)])])
    step(TorchLearner(model, lr=0.1, weight_decay=0.5), zero)
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if parameter.ndim >= 2 else 1.0)
        assert torch.allclose(parameter, expected, atol=1e-7), name


def test_schedules() -> None:
    model = make_model()
    constant = TorchLearner(model, lr=2.0, n_warmup=4)
    assert [constant.learning_rate(v) for v in (0, 1, 3, 4, 1000)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = TorchLearner(model, lr=2.0, schedule="cosine", n_warmup=4, n_steps=12)
    assert [cosine.learning_rate(v) for v in (0, 3, 4, 6, 8, 12, 50)] == pytest.approx(
        [0.5, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 0.0, 0.0], abs=1e-12
    )
    assert step(TorchLearner(model, lr=2e-3, n_warmup=4, version=1), random_batch())["lr"] == 1e-3


def test_weights_in_half_precision_are_widened() -> None:
    model = make_model().bfloat16()
    learner = TorchLearner(model, lr=1e-6)
    before = asyncio.run(learner.weights())
    step(learner, random_batch())
    after = asyncio.run(learner.weights())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_model_is_as_before_outside_a_step() -> None:
    model = make_model()
    step(TorchLearner(model), random_batch())
    assert model(torch.tensor([[1, 2, 3], [4, 5, 6]])).logits.shape == (2, 3, VOCABULARY)
    assert all(parameter.grad is None for parameter in model.parameters())


# Micro-batches


def test_split_keeps_every_sample_once_and_the_budget() -> None:
    rng = random.Random(0)
    for _ in range(50):
        samples = [
            Sample((1,) * rng.randint(1, 9), (2,) * n, (0.0,) * n, None, 0.0, True)
            for n in (rng.randint(1, 30) for _ in range(rng.randint(1, 40)))
        ]
        budget = rng.choice([1, 20, 60, 10_000])
        chunks = list(split(samples, budget))
        assert sorted(map(id, samples)) == sorted(id(sample) for chunk in chunks for sample in chunk)
        for chunk in chunks:
            longest = max(sample.length for sample in chunk)
            assert chunk[0].length == longest
            assert len(chunk) == 1 or len(chunk) * longest <= budget


# Weights and checkpoints


def test_weights_are_a_snapshot_and_hold_tied_parameters_once() -> None:
    model = make_model("qwen2")
    learner = TorchLearner(model, lr=1e-2)
    snapshot = asyncio.run(learner.weights())
    assert "model.embed_tokens.weight" in snapshot
    assert "lm_head.weight" not in snapshot
    kept = {name: tensor.clone() for name, tensor in snapshot.items()}
    step(learner, random_batch())
    assert all(torch.equal(snapshot[name], kept[name]) for name in kept)
    assert not any(tensor.requires_grad for tensor in snapshot.values())

    other = make_model("qwen2", seed=1)
    missing = other.load_state_dict(asyncio.run(learner.weights()), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert missing.unexpected_keys == []
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(other.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_save_and_restore_go_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine", "n_warmup": 2, "n_steps": 5, "weight_decay": 0.1}
    batches = [random_batch(seed) for seed in (8, 9, 10)]
    straight = TorchLearner(make_model(family), **settings)
    straight_metrics = [step(straight, batch) for batch in batches]

    first = TorchLearner(make_model(family), **settings)
    step(first, batches[0])
    first.save(tmp_path / "checkpoint")
    second = TorchLearner(make_model(family, seed=1), **settings)
    second.restore(tmp_path / "checkpoint")
    assert second.version == 1
    second_metrics = [step(second, batch) for batch in batches[1:]]

    for got, expected in zip(second_metrics, straight_metrics[1:], strict=True):
        assert {**got, "step_s": 0} == {**expected, "step_s": 0}
    weights, expected_weights = asyncio.run(second.weights()), asyncio.run(straight.weights())
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    assert second.version == straight.version == 3


def test_checkpoint_is_replaced_whole_and_holds_no_pickle(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "checkpoint"
    learner = TorchLearner(make_model(), lr=1e-2)
    learner.save(folder)
    (folder / "leftover").write_text("")
    step(learner, random_batch())
    learner.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "learner.json", "model.safetensors", "optimizer.safetensors",
    ]  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
    other = TorchLearner(make_model(seed=1))
    other.restore(folder)
    assert other.version == 1


def test_a_save_that_breaks_off_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = TorchLearner(make_model(), lr=1e-2)
    learner.save(tmp_path / "checkpoint")
    step(learner, random_batch())

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("nevergiveup.learner.policy.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        learner.save(tmp_path / "checkpoint")
    monkeypatch.undo()
    other = TorchLearner(make_model(seed=1))
    other.restore(tmp_path / "checkpoint")
    assert other.version == 0
    learner.save(tmp_path / "checkpoint")
    other.restore(tmp_path / "checkpoint")
    assert other.version == 1


def test_restore_refuses_another_model_and_changes_nothing(tmp_path: Path) -> None:
    TorchLearner(make_model("qwen2"), version=4).save(tmp_path / "checkpoint")
    learner = TorchLearner(make_model())
    before = asyncio.run(learner.weights())
    with pytest.raises(ValueError, match=r"lm_head\.weight is absent in the checkpoint and 31x32 in the model"):
        learner.restore(tmp_path / "checkpoint")
    assert learner.version == 0
    after = asyncio.run(learner.weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_restore_refuses_state_of_a_frozen_parameter(tmp_path: Path) -> None:
    learner = TorchLearner(make_model())
    step(learner, random_batch())
    learner.save(tmp_path / "checkpoint")
    frozen = make_model()
    frozen.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"exp_avg/lm_head\.weight belongs to no trained parameter"):
        TorchLearner(frozen).restore(tmp_path / "checkpoint")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_export_loads_with_from_pretrained(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    learner = TorchLearner(model, lr=1e-2)
    step(learner, random_batch())
    learner.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_export_holds_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(["<bos>", "<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 3))])
    TorchLearner(make_model(), tokenizer).export(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w0 w2").input_ids == [3, 5]


# Bad input


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"schedule": "linear"}, 'schedule = \'linear\': use "constant" or "cosine"'),
        ({"schedule": "cosine"}, "n_steps = None"),
        ({"schedule": "cosine", "n_warmup": 10, "n_steps": 10}, "n_steps = 10"),
        ({"truncated": "drop"}, "truncated = 'drop'"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": math.nan}, "lr = nan"),
        ({"n_warmup": -1}, "n_warmup = -1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0"),
        ({"normalize": "tokens"}, "normalize = 'tokens'"),
        ({"normalize": "constant"}, "max_new_tokens = None"),
        ({"ratio_mask": (1.2, 2.0)}, "ratio_mask = (1.2, 2.0)"),
        ({"kl_beta": 0.1}, "kl_beta = 0.1"),
        ({"score_centering": True, "loss": Gspo()}, "score_centering = True"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens = 0"),
    ],
)
def test_bad_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TorchLearner(make_model(), **setting)


def test_the_model_is_no_reference_for_itself() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="reference"):
        TorchLearner(model, kl_beta=0.1, reference=model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_batch([([], [(make_completion([4, 2]), 0.5)])]), "prompt 0 has no tokens"),
        (make_batch([([1], [(make_completion([4, 2], [-1.0]), 0.5)])]), "2 tokens comes with 1 log-probabilities"),
        (make_batch([([1], [(make_completion([4, 2], mask=[True]), 0.5)])]), "a mask of 1"),
        (make_batch([([1], [(make_completion([4, 2]), math.nan)])]), "weight nan"),
        (
            Batch(0, (TrainGroup(Prompt("p", tokens=(1,)), (Attempt(1, 0),), (0.5,), 0.5, 1, 1),)),
            "an attempt without a completion",
        ),
    ],
)
def test_bad_batches_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        step(TorchLearner(make_model()), batch)
