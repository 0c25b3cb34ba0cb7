"""The formulas of the policy-gradient loss: tensors in, tensors out, nothing else.

Layer 3. Each function works in the precision of its inputs, but never below float32. Sources: the clipped objective is
that of PPO (arXiv 1707.06347) with the two-sided range of DAPO (2503.14476) and one advantage a completion as in GRPO
(2402.03300); the KL estimate is "k3" of http://joschu.net/blog/kl-approx.html.

Shapes: N trained tokens of a micro-batch, all sequences one after the other; V vocabulary.
Symbols: pi is the policy being trained, mu the one that sampled; rho = pi / mu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log rho| is cut here, far outside any clip range, so that exp never overflows; no gradient beyond it."""


class TokenLoss(NamedTuple):
    """The objective, token by token. Only `loss_N` carries gradients.

    log_ratio_N: log rho, cut to +-MAX_LOG_RATIO; 0 where the sampler's log-probability is unusable.
    known_N: where the sampler's log-probability is a finite number.
    clipped_low_N, clipped_high_N: where the clip range stops the gradient (rho too low and A < 0; too high and A > 0).
    """

    loss_N: Tensor
    log_ratio_N: Tensor
    known_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids, [N].

    Half-precision logits are widened to float32. The temperature is that of sampling: both sides must agree. Memory: the
    logits and one more [N, V] tensor in the backward pass; log-probabilities of the whole vocabulary are never kept.
    """
    logprobs_N: Tensor = _TokenLogprobs.apply(logits_NV, targets_N, temperature)  # type: ignore[no-untyped-call]
    return logprobs_N


def clipped_objective(
    logprobs_N: Tensor, sampler_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) for every token; not yet averaged.

    Where the sampler's log-probability is NaN or infinite the ratio is neutral: rho is 1, with the gradient of log pi, as
    if mu were the present policy.
    """
    sampler_logprobs_N = sampler_logprobs_N.to(logprobs_N.dtype)
    advantages_N = advantages_N.to(logprobs_N.dtype)
    known_N = sampler_logprobs_N.isfinite()
    reference_N = torch.where(known_N, sampler_logprobs_N, logprobs_N.detach())
    log_ratio_N = (logprobs_N - reference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        clipped_low_N = (ratio_N < 1 - clip_low) & (advantages_N < 0)
        clipped_high_N = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    return TokenLoss(loss_N, log_ratio_N.detach(), known_N, clipped_low_N, clipped_high_N)


def kl_k3(log_ratio_N: Tensor) -> Tensor:
    """Estimate of KL(mu || pi) from each token that mu sampled: rho - 1 - log rho. Never negative."""
    return torch.expm1(log_ratio_N) - log_ratio_N


class _TokenLogprobs(torch.autograd.Function):
    """By hand, because autograd would keep several [N, V] tensors, each the largest of a training step."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        scaled_NV = _scaled(logits_NV, temperature)
        normalizer_N = scaled_NV.logsumexp(-1)
        ctx.save_for_backward(logits_NV, targets_N, normalizer_N)
        ctx.temperature = temperature
        return scaled_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) - normalizer_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # d log p[target] / d logits = (one-hot(target) - p) / temperature
        logits_NV, targets_N, normalizer_N = ctx.saved_tensors
        grad_N1 = (grads[0] / ctx.temperature).unsqueeze(-1)
        scaled_NV = _scaled(logits_NV, ctx.temperature)
        grad_NV = torch.sub(scaled_NV, normalizer_N.unsqueeze(-1)).exp_().mul_(-grad_N1)
        grad_NV.scatter_add_(-1, targets_N.unsqueeze(-1), grad_N1)
        return grad_NV.to(logits_NV.dtype), None, None


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    """logits / temperature in at least float32; the logits themselves where nothing changes."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1.0 else logits_NV / temperature
