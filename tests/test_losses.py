"""The loss formulas against arithmetic written out in plain Python floats (which are float64)."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nevergiveup.learner.losses import MAX_LOG_RATIO, TokenLoss, kl_k3, policy_loss, token_logprobs
from nevergiveup.objectives import Clipped

LOW, HIGH = 0.2, 0.28
CLIPPED = Clipped(LOW, HIGH)


def reference_logprob(logits: list[float], target: int, temperature: float) -> float:
    scaled = [logit / temperature for logit in logits]
    return scaled[target] - math.log(sum(math.exp(value) for value in scaled))


def reference_loss(logprob: float, sampler_logprob: float, advantage: float) -> float:
    ratio = math.exp(logprob - sampler_logprob)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def objective(logprobs: list[float], sampler: list[float], advantages: list[float]) -> TokenLoss:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (logprobs, sampler, advantages))
    return policy_loss(CLIPPED, *tensors)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.018150), (1.0, -0.126928)])
def test_temperature_is_applied_to_the_logits(temperature: float, expected: float) -> None:
    logprob = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature)
    assert logprob.item() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_token_logprobs_equal_the_formula_in_float64(temperature: float) -> None:
    rng = random.Random(0)
    logits = [[rng.gauss(0, 3) for _ in range(7)] for _ in range(20)]
    targets = [rng.randrange(7) for _ in logits]
    got = token_logprobs(torch.tensor(logits, dtype=torch.float64), torch.tensor(targets), temperature)
    expected = [reference_logprob(row, target, temperature) for row, target in zip(logits, targets, strict=True)]
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_token_logprobs_gradient_equals_finite_differences(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2, 3])
    assert torch.autograd.gradcheck(lambda logits: token_logprobs(logits, targets, temperature), (logits,))


def test_half_precision_logits_are_widened_and_get_a_gradient_of_their_own_type() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50).bfloat16().requires_grad_()
    wide = logits.detach().float().requires_grad_()
    targets = torch.tensor([1, 2, 3, 49])
    got, expected = token_logprobs(logits, targets, 0.7), token_logprobs(wide, targets, 0.7)
    got.sum().backward()
    expected.sum().backward()
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    assert torch.equal(logits.grad, wide.grad.bfloat16())


def test_clipped_objective_equals_the_formula() -> None:
    rng = random.Random(1)
    logprobs = [rng.uniform(-4, 0) for _ in range(300)]
    sampler = [logprob + rng.gauss(0, 0.4) for logprob in logprobs]
    advantages = [rng.choice([-1.5, -0.25, 0.0, 0.75]) for _ in logprobs]
    loss = objective(logprobs, sampler, advantages)
    expected = [reference_loss(*values) for values in zip(logprobs, sampler, advantages, strict=True)]
    assert loss.loss_N.tolist() == pytest.approx(expected, abs=1e-14)

    ratios = [math.exp(logprob - mu) for logprob, mu in zip(logprobs, sampler, strict=True)]
    low = [ratio < 1 - LOW and advantage < 0 for ratio, advantage in zip(ratios, advantages, strict=True)]
    high = [ratio > 1 + HIGH and advantage > 0 for ratio, advantage in zip(ratios, advantages, strict=True)]
    assert any(low)
    assert any(high)
    assert loss.clipped_low_N.tolist() == low
    assert loss.clipped_high_N.tolist() == high


def test_loss_gradient_equals_finite_differences_through_the_logits() -> None:
    rng = random.Random(2)
    logits = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(24)]
    targets = [rng.randrange(5) for _ in logits]
    sampler = [reference_logprob(row, t, 0.8) + rng.gauss(0, 0.3) for row, t in zip(logits, targets, strict=True)]
    advantages = [rng.choice([-0.7, 0.4]) for _ in logits]

    def total(rows: list[list[float]]) -> float:
        return sum(
            reference_loss(reference_logprob(row, target, 0.8), mu, advantage)
            for row, target, mu, advantage in zip(rows, targets, sampler, advantages, strict=True)
        )

    variable = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        CLIPPED,
        token_logprobs(variable, torch.tensor(targets), 0.8),
        torch.tensor(sampler, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
    )
    assert (loss.clipped_low_N | loss.clipped_high_N).any()
    loss.loss_N.sum().backward()
    h = 1e-6
    for n in range(len(logits)):
        for v in range(5):
            up, down = [row[:] for row in logits], [row[:] for row in logits]
            up[n][v] += h
            down[n][v] -= h
            assert variable.grad[n, v].item() == pytest.approx((total(up) - total(down)) / (2 * h), abs=1e-8)


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.75, -0.25, 0.0], dtype=torch.float64)
    loss = policy_loss(CLIPPED, logprobs, logprobs.detach().clone(), advantages)
    loss.loss_N.sum().backward()
    assert loss.loss_N.tolist() == [-0.75, 0.25, 0.0]
    assert logprobs.grad.tolist() == [-0.75, 0.25, 0.0]


@pytest.mark.parametrize("unusable", [math.nan, math.inf, -math.inf])
def test_an_unusable_sampler_logprob_makes_the_ratio_neutral(unusable: float) -> None:
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([unusable, -2.0], dtype=torch.float64)
    loss = policy_loss(CLIPPED, logprobs, sampler, torch.tensor([-0.25, 0.5], dtype=torch.float64))
    loss.loss_N.sum().backward()
    assert loss.loss_N.tolist() == [0.25, -0.5]
    assert loss.log_ratio_N.tolist() == [0.0, 0.0]
    assert loss.known_N.tolist() == [False, True]
    assert logprobs.grad.tolist() == [0.25, -0.5]


def test_a_huge_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -2000.0], requires_grad=True)
    loss = policy_loss(CLIPPED, logprobs, torch.tensor([-2000.0, 0.0]), torch.tensor([-1.0, -1.0]))
    loss.loss_N.sum().backward()
    assert loss.loss_N.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO), 1 - LOW])
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_kl_k3_numbers() -> None:
    log_ratios = torch.tensor([0.0, math.log(2.0), -math.log(2.0)], dtype=torch.float64)
    assert kl_k3(log_ratios).tolist() == pytest.approx([0.0, 1 - math.log(2.0), math.log(2.0) - 0.5], abs=1e-15)
