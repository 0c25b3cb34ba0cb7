"""The loss formulas against arithmetic written out in plain Python floats (which are float64)."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nevergiveup.learner.losses import (
    MAX_LOG_RATIO,
    RatioMask,
    TokenLoss,
    gradient_weight,
    kl_k3,
    kl_to_reference,
    policy_loss,
    score_centering,
    token_logprobs,
)
from nevergiveup.objectives import LOSSES, Cispo, Clipped, Gspo, Loss, Reinforce

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


# ------------------------------------------------------------------------------------------ every loss

N_SAMPLES = 6
EVERY_LOSS = [
    Clipped(0.2, 0.28), Clipped(0.1, 0.3, dual_clip=3.0), Clipped(0.2, 0.2, dual_clip=1.2), Reinforce(2.0), Reinforce(1.1),
    Cispo(0.28), Gspo(3e-4, 4e-4), Gspo(0.05, 0.1),
]  # fmt: skip


def weight_of(loss: Loss, ratio: float, advantage: float) -> float:
    """What multiplies A grad log pi, written from the formulas; one ratio a token."""
    if isinstance(loss, Reinforce):
        return min(ratio, loss.cap)
    if isinstance(loss, Cispo):
        return min(ratio, 1 + loss.clip_high)
    assert isinstance(loss, Clipped)
    if advantage > 0:
        return ratio if ratio <= 1 + loss.clip_high else 0.0
    if ratio < 1 - loss.clip_low:
        return 0.0
    return ratio if loss.dual_clip is None or ratio <= loss.dual_clip else 0.0


def value_of(
    loss: Loss, logprobs: list[float], frozen: list[float], sampler: list[float], advantages: list[float], sample: list[int],
    mask: tuple[float, float] | None = None,
) -> list[float]:  # fmt: skip
    """The loss of each token in plain floats. frozen: log pi as the stopped gradients see it."""
    values = []
    for i, (logprob, mu, advantage) in enumerate(zip(logprobs, sampler, advantages, strict=True)):
        stopped = math.exp(frozen[i] - mu)
        if isinstance(loss, Reinforce | Cispo):
            value = -weight_of(loss, stopped, advantage) * advantage * logprob
        else:
            ratio = math.exp(logprob - mu)
            if isinstance(loss, Gspo):
                own = [j for j in range(len(sample)) if sample[j] == sample[i]]
                ratio = math.exp(sum(logprobs[j] - sampler[j] for j in own) / len(own))
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            value = -min(ratio * advantage, clipped * advantage)
            if isinstance(loss, Clipped) and loss.dual_clip is not None and advantage < 0:
                value = min(value, loss.dual_clip * -advantage)
        if mask is not None and not mask[0] <= stopped <= mask[1]:
            value = 0.0
        values.append(value)
    return values


def random_tokens(
    seed: int, n: int = 60, spread: float = 0.5
) -> tuple[list[float], list[float], list[float], list[int]]:
    """log pi, log mu, advantages (one a completion), and which completion: consecutive tokens."""
    rng = random.Random(seed)
    sample = sorted(rng.randrange(N_SAMPLES) for _ in range(n))
    sample = [sorted(set(sample)).index(i) for i in sample]
    logprobs = [rng.uniform(-4, -0.1) for _ in range(n)]
    sampler = [logprob + rng.gauss(0, spread) for logprob in logprobs]
    of_sample = [rng.choice([-1.5, -0.25, 0.75]) for _ in range(N_SAMPLES)]
    return logprobs, sampler, [of_sample[i] for i in sample], sample


@pytest.mark.parametrize("mask", [None, (0.7, 1.5)])
@pytest.mark.parametrize("loss", EVERY_LOSS, ids=str)
def test_every_loss_and_its_gradient_equal_the_formula(loss: Loss, mask: tuple[float, float] | None) -> None:
    logprobs, sampler, advantages, sample = random_tokens(seed=3)
    variable = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    got = policy_loss(
        loss, variable, torch.tensor(sampler, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64),
        sample_N=torch.tensor(sample), ratio_mask=mask,
    )  # fmt: skip
    expected = value_of(loss, logprobs, logprobs, sampler, advantages, sample, mask)
    assert got.loss_N.tolist() == pytest.approx(expected, abs=1e-13)
    assert bool(got.masked_N.any()) == (mask is not None)
    assert (got.clipped_low_N | got.clipped_high_N).any(), "the test reaches no bound"
    got.loss_N.sum().backward()
    h = 1e-6
    for i in range(len(logprobs)):
        sides = []
        for moved in (logprobs[i] + h, logprobs[i] - h):
            near = [*logprobs[:i], moved, *logprobs[i + 1 :]]
            sides.append(sum(value_of(loss, near, logprobs, sampler, advantages, sample, mask)))
        assert variable.grad[i].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), abs=1e-7)


@pytest.mark.parametrize("loss", [loss for loss in EVERY_LOSS if not isinstance(loss, Gspo)], ids=str)
def test_gradient_weight_is_that_of_the_loss(loss: Loss) -> None:
    logprobs, sampler, advantages, _ = random_tokens(seed=4, spread=0.8)
    variable = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    policy_loss(loss, variable, torch.tensor(sampler, dtype=torch.float64), advantages_N).loss_N.sum().backward()
    ratio_N = (variable.detach() - torch.tensor(sampler, dtype=torch.float64)).exp()
    weight_N = gradient_weight(loss, ratio_N, advantages_N)
    assert torch.allclose(variable.grad, -weight_N * advantages_N, atol=1e-12)
    assert (weight_N <= ratio_N).all()


def test_gspo_has_no_weight_a_token() -> None:
    with pytest.raises(ValueError, match="gspo"):
        gradient_weight(Gspo(), torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("loss", [cls() for cls in LOSSES.values()], ids=str)
@pytest.mark.parametrize("unusable", [math.nan, -math.inf])
def test_every_loss_is_neutral_where_the_sampler_is_unusable(loss: Loss, unusable: float) -> None:
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([unusable, -2.0], dtype=torch.float64)
    got = policy_loss(
        loss, logprobs, sampler, torch.tensor([-0.25, 0.5], dtype=torch.float64), sample_N=torch.tensor([0, 1])
    )
    got.loss_N.sum().backward()
    assert got.known_N.tolist() == [False, True]
    assert logprobs.grad.tolist() == [0.25, -0.5]


def test_truncated_weights_and_masks() -> None:
    """Oracle 8.6: C = 2 on a ratio of 4 gives 2; IcePop (.5, 2) gives 0."""
    four, one = torch.tensor([4.0]), torch.tensor([1.0])
    assert gradient_weight(Reinforce(2.0), four, one).tolist() == [2.0]
    assert gradient_weight(Reinforce(2.0), four, one, (0.5, 2.0)).tolist() == [0.0]
    assert gradient_weight(Reinforce(8.0), four, one).tolist() == [4.0]


# -------------------------------------------------------------------------------------- score centering


def scores(p: torch.Tensor) -> torch.Tensor:
    """grad of log p_v in the logits, a row for each v."""
    return torch.eye(len(p), dtype=p.dtype) - p


def centred_gradient(
    loss: Loss, p: torch.Tensor, q: torch.Tensor, token: int, advantage: float, n_top: int, mask: RatioMask = None
) -> torch.Tensor:
    """Gradient in the logits of the loss of one token that was drawn from q, score centering included."""
    logits = p.log().clone().requires_grad_()
    top = q.topk(n_top).indices
    logprobs = token_logprobs(logits.unsqueeze(0), torch.cat((torch.tensor([token]), top)).unsqueeze(0))
    advantages_N = torch.tensor([advantage], dtype=torch.float64)
    plain = policy_loss(loss, logprobs[:, 0], q[token].log().unsqueeze(0), advantages_N, ratio_mask=mask).loss_N
    more = score_centering(loss, logprobs[:, 1:], q[top].log().unsqueeze(0), advantages_N, ratio_mask=mask)
    (plain + more).sum().backward()
    return logits.grad


@pytest.mark.parametrize("mask", [None, (0.7, 1.5)])
@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize(
    "loss", [Reinforce(1.0), Reinforce(2.0), Cispo(0.1), Clipped(0.2, 0.28, dual_clip=3.0)], ids=str
)
def test_the_centred_score_has_mean_zero_under_the_sampler(loss: Loss, advantage: float, mask: RatioMask) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(9, dtype=torch.float64).softmax(0), torch.randn(9, dtype=torch.float64).softmax(0)
    plain = sum(
        q[v] * gradient_weight(loss, p[v] / q[v], torch.tensor(advantage), mask) * scores(p)[v] for v in range(9)
    )  # fmt: skip
    assert plain.abs().max() > 1e-3, "there is nothing to centre"
    mean = sum(q[v] * centred_gradient(loss, p, q, v, advantage, n_top=9, mask=mask) for v in range(9))
    assert mean.abs().max() < 1e-12


@pytest.mark.parametrize("mask", [None, (0.7, 1.5)])
@pytest.mark.parametrize("loss", [loss for loss in EVERY_LOSS if not isinstance(loss, Gspo)], ids=str)
def test_score_centering_and_its_gradient_equal_the_formula(loss: Loss, mask: RatioMask) -> None:
    """Heads that hold 20 to 90 % of the sampler, tails with a from .3 to 4: A sum_H sg(q f - a f(1/a) p) log p."""
    rng = random.Random(5)

    def head(mass: float) -> list[float]:
        parts = [rng.uniform(0.2, 1.0) for _ in range(3)]
        return [mass * part / sum(parts) for part in parts]

    p, q = ([head(rng.uniform(0.2, 0.9)) for _ in range(40)] for _ in range(2))
    advantages = [rng.choice([-1.5, 0.75]) for _ in p]

    def weight(ratio: float, advantage: float) -> float:
        return 0.0 if mask is not None and not mask[0] <= ratio <= mask[1] else weight_of(loss, ratio, advantage)

    coefficients = []
    for p_H, q_H, advantage in zip(p, q, advantages, strict=True):
        a = (1 - sum(q_H)) / (1 - sum(p_H))
        tail = a * weight(1 / a, advantage)
        coefficients.append([
            advantage * (q_v * weight(p_v / q_v, advantage) - tail * p_v) for p_v, q_v in zip(p_H, q_H, strict=True)
        ])  # fmt: skip

    def value(i: int, p_H: list[float]) -> float:
        """With the stopped gradients frozen."""
        return sum(c * math.log(p_v) for c, p_v in zip(coefficients[i], p_H, strict=True))

    logprobs = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    got = score_centering(
        loss, logprobs, torch.tensor(q, dtype=torch.float64).log(), torch.tensor(advantages, dtype=torch.float64),
        ratio_mask=mask,
    )  # fmt: skip
    assert got.tolist() == pytest.approx([value(i, p_H) for i, p_H in enumerate(p)], abs=1e-12)
    got.sum().backward()
    h = 1e-6
    for i, p_H in enumerate(p):
        for v in range(3):
            up, down = p_H[:], p_H[:]
            up[v] *= math.exp(h)
            down[v] *= math.exp(-h)
            assert logprobs.grad[i, v].item() == pytest.approx((value(i, up) - value(i, down)) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("unusable", [math.nan, math.inf])
def test_an_unusable_head_gets_no_correction(unusable: float) -> None:
    """And -inf is a probability of 0, not an unusable one."""
    logprobs = torch.tensor([[0.6, 0.3], [0.6, 0.3], [0.6, 0.3]], dtype=torch.float64).log().requires_grad_()
    sampler = torch.tensor([[0.5, 0.2], [0.5, 0.2], [0.5, 0.0]], dtype=torch.float64).log()
    sampler[1, 0] = unusable
    more = score_centering(Reinforce(1.0), logprobs, sampler, torch.tensor([-1.0, -1.0, -1.0]))
    more.sum().backward()
    # the weights of the head are 1; in the tail a is 3, then 5, and f(1/a) = 1/a, so that a f = 1: A (q - p)
    expected = [[0.1, 0.1], [0.0, 0.0], [0.1, 0.3]]
    for got, row in zip(logprobs.grad.tolist(), expected, strict=True):
        assert got == pytest.approx(row, abs=1e-12)


def test_score_centering_numbers() -> None:
    """Oracle 8.7: p = (.6, .4), q = (.5, .5), weights 1: the mean score is q - p; centred it is 0."""
    p, q = torch.tensor([0.6, 0.4], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert (q @ scores(p)).tolist() == pytest.approx([-0.1, 0.1])
    ones = Reinforce(1e-9)  # min(rho, C) = C everywhere: REINFORCE without weights, times C
    mean = sum(q[v] * centred_gradient(ones, p, q, v, 1.0, n_top=2) for v in range(2)) / 1e-9
    assert mean.abs().max() < 1e-12


def test_exact_importance_weights_make_the_correction_vanish() -> None:
    torch.manual_seed(1)
    p, q = torch.randn(2, 8, dtype=torch.float64).softmax(-1)
    logits = p.log().clone().requires_grad_()
    for n_top in (1, 3, 8):
        top = q.topk(n_top).indices
        logprobs = token_logprobs(logits.unsqueeze(0), top.unsqueeze(0))
        more = score_centering(Reinforce(1e9), logprobs, q[top].log().unsqueeze(0), torch.ones(1, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(more.sum(), logits)
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("n_top", [1, 3, 7, 8])
def test_the_tail_identity(n_top: int) -> None:
    """Oracle 8.7: sum over all v of qhat_v f_v s_v is what the head alone gives, for qhat = a p in the tail."""
    torch.manual_seed(2)
    p, q = torch.randn(2, 8, dtype=torch.float64).softmax(-1)
    loss, top = Reinforce(1.3), q.topk(n_top).indices
    is_top = torch.zeros(8, dtype=torch.bool)
    is_top[top] = True
    a = (1 - q[top].sum()) / (1 - p[top].sum()) if n_top < 8 else torch.tensor(0.0)
    qhat = torch.where(is_top, q, a * p)
    weight = torch.tensor(
        [min(float(p[v] / qhat[v]), 1.3) if qhat[v] > 0 else 0.0 for v in range(8)], dtype=torch.float64
    )
    expected = (qhat * weight) @ scores(p)
    logits = p.log().clone().requires_grad_()
    logprobs = token_logprobs(logits.unsqueeze(0), top.unsqueeze(0))
    more = score_centering(loss, logprobs, q[top].log().unsqueeze(0), torch.ones(1, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(more.sum(), logits)
    assert (gradient - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", [Reinforce(2.0), Cispo(0.28), Clipped(), Clipped(dual_clip=3.0)], ids=str)
def test_score_centering_when_a_head_holds_everything(loss: Loss, advantage: float, dtype: torch.dtype) -> None:
    """Rows: of the policy (a is huge), of the sampler (a = 0), of both. What is left of A (q f - a f(1/a) p)."""
    everything, some = [0.0, -80.0], [math.log(0.5), math.log(0.2)]
    logprobs = torch.tensor([everything, some, everything], dtype=dtype, requires_grad=True)
    sampler = torch.tensor([some, everything, everything], dtype=dtype)
    more = score_centering(loss, logprobs, sampler, torch.full((3,), advantage))
    more.sum().backward()
    stopped_low = isinstance(loss, Clipped) and advantage < 0
    tail = 0.0 if stopped_low else 1.0  # a f(1/a): the ratio of the tail, 1/a, is about 0
    first, second = 0.5 * weight_of(loss, 2.0, advantage) - tail, weight_of(loss, 0.5, advantage)
    got = [value / advantage for value in logprobs.grad[:, 0].tolist()]
    assert got == pytest.approx([first, second, 1.0], abs=1e-6)
    assert logprobs.grad[:, 1].abs().max() < 1e-6
    assert torch.isfinite(more).all()


# ------------------------------------------------------------------------------------------- reference


def test_kl_to_the_reference_and_its_gradient() -> None:
    logprobs = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -0.5], dtype=torch.float64)
    got = kl_to_reference(logprobs, reference)
    expected = [math.exp(r - p) - (r - p) - 1 for p, r in zip(logprobs.tolist(), reference.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(expected, abs=1e-14)
    assert torch.autograd.gradcheck(lambda values: kl_to_reference(values, reference), (logprobs,))
    got.sum().backward()
    assert logprobs.grad[0] == 0.0


def test_several_ids_a_row_are_as_each_alone() -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 5], [5, 1], [2, 2], [2, 3], [3, 0]])
    got = token_logprobs(logits, ids, 0.7)
    assert torch.equal(got[:, 0], token_logprobs(logits, ids[:, 0], 0.7))
    assert torch.equal(got[:, 1], token_logprobs(logits, ids[:, 1], 0.7))
    assert torch.autograd.gradcheck(lambda values: token_logprobs(values, ids, 0.7), (logits,))
