"""The formulas of the policy-gradient loss: tensors in, tensors out, nothing else.

Layer 3. Each function works in the precision of its inputs (never below float32), so float64 checks are exact. Sources: the
clipped objective is PPO's (arXiv 1707.06347) with the two-sided range of DAPO (2503.14476) and one advantage a completion as
in GRPO (2402.03300); the KL estimator is "k3" of http://joschu.net/blog/kl-approx.html.

Shapes: N trained tokens of a micro-batch, all sequences one after the other, V vocabulary.
Symbols: pi is the policy being trained, mu the one that sampled; rho = pi / mu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log rho| is cut here, far outside any clip range, so that exp never overflows; no gradient beyond it."""


class TokenLoss(NamedTuple):
    """The objective, token by token. Only `loss_N` carries gradients.

    log_ratio_N: log rho; 0 where the sampler's log-probability is unusable.
    known_N: where the sampler's log-probability is a finite number.
    clipped_low_N, clipped_high_N: where the clip range stops the gradient (rho too low and A < 0; too high and A > 0).
    """

    loss_N: Tensor
    log_ratio_N: Tensor
    known_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids, [N], without forming the [N, V] log-probabilities.

    Half-precision logits are widened to float32 first. The temperature is that of sampling: both sides must agree.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    chosen_N = logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    return chosen_N - logits_NV.logsumexp(-1)


def clipped_objective(
    logprobs_N: Tensor, sampler_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) for every token; not yet averaged.

    Where the sampler's log-probability is NaN or infinite the ratio is neutral: rho is 1 with the gradient of log pi, as if
    mu were the present policy.
    """
    sampler_logprobs_N = sampler_logprobs_N.to(logprobs_N.dtype)
    advantages_N = advantages_N.to(logprobs_N.dtype)
    known_N = sampler_logprobs_N.isfinite()
    reference_N = torch.where(known_N, sampler_logprobs_N, logprobs_N.detach())
    log_ratio_N = logprobs_N - reference_N
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    with torch.no_grad():
        clipped_low_N = (ratio_N < 1 - clip_low) & (advantages_N < 0)
        clipped_high_N = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    return TokenLoss(-torch.minimum(free_N, clipped_N), log_ratio_N.detach(), known_N, clipped_low_N, clipped_high_N)


def kl_k3(log_ratio_N: Tensor) -> Tensor:
    """Per-token estimate of KL(mu || pi) from tokens that mu sampled: rho - 1 - log rho. Never negative."""
    return torch.expm1(log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio_N
