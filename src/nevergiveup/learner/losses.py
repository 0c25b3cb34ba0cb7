"""The formulas of the policy-gradient loss: tensors in, tensors out, nothing else.

Layer 3. Each function works in the precision of its inputs, but never below float32. Which loss with which numbers:
`nevergiveup.objectives`; sources and when to use which: docs/losses.md. The KL estimate is "k3" of
http://joschu.net/blog/kl-approx.html.

Shapes: N trained tokens of a micro-batch, all sequences one after the other; V vocabulary; H the sampler's most likely tokens.
Symbols: pi is the policy being trained, mu the one that sampled; rho = pi / mu; sg stops gradients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nevergiveup.objectives import Cispo, Clipped, Gspo, Loss, Reinforce

MAX_LOG_RATIO = 20.0
"""|log rho| is cut here, far outside any clip range, so that exp never overflows; no gradient through rho beyond it."""

RatioMask: TypeAlias = tuple[float, float] | None
"""IcePop: tokens with rho outside [low, high] add nothing to the loss."""


class TokenLoss(NamedTuple):
    """The objective, token by token. Only `loss_N` carries gradients.

    log_ratio_N: log rho, cut to +-MAX_LOG_RATIO; 0 where the sampler's log-probability is unusable.
    known_N: where the sampler's log-probability is a finite number.
    clipped_low_N, clipped_high_N: where the clip range stops or bounds the gradient (rho too low and A < 0; rho too high).
    masked_N: where the ratio is outside the ratio mask, so that the token adds nothing.
    """

    loss_N: Tensor
    log_ratio_N: Tensor
    known_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    masked_N: Tensor


def token_logprobs(logits_NV: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids, [N], or [N, H] for H ids in each place.

    Half-precision logits are widened to float32. The temperature is that of sampling: both sides must agree. Memory: the
    logits and one more [N, V] tensor in the backward pass; log-probabilities of the whole vocabulary are never kept.
    """
    is_flat = targets.ndim == 1
    targets_NH = targets.unsqueeze(-1) if is_flat else targets
    logprobs_NH: Tensor = _TokenLogprobs.apply(logits_NV, targets_NH, temperature)  # type: ignore[no-untyped-call]
    return logprobs_NH.squeeze(-1) if is_flat else logprobs_NH


def policy_loss(
    loss: Loss,
    logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    sample_N: Tensor | None = None,
    ratio_mask: RatioMask = None,
) -> TokenLoss:
    """The loss of every token; not yet averaged. sample_N: which completion a token belongs to, counted from 0 (gspo only).

    grpo        -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); with dual_clip at most dual_clip |A| where A < 0
    reinforce   -sg(min(rho, cap)) A log pi
    cispo       -sg(min(rho, 1 + clip_high)) A log pi
    gspo        as grpo with one ratio a completion, exp(mean over its tokens of log rho)

    Where the sampler's log-probability is NaN or infinite the ratio is neutral: rho is 1, with the gradient of log pi, as
    if mu were the present policy. The ratio mask looks at each token's own rho, whatever the loss; under gspo a masked token
    still counts in the ratio of its completion.
    """
    sampler_logprobs_N = sampler_logprobs_N.to(logprobs_N.dtype)
    advantages_N = advantages_N.to(logprobs_N.dtype)
    known_N = sampler_logprobs_N.isfinite()
    reference_N = torch.where(known_N, sampler_logprobs_N, logprobs_N.detach())
    log_ratio_N = (logprobs_N - reference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    compared_N = ratio_N  # with the clip range
    if isinstance(loss, Reinforce | Cispo):
        loss_N = -gradient_weight(loss, ratio_N.detach(), advantages_N) * advantages_N * logprobs_N
    else:
        if isinstance(loss, Gspo):
            compared_N = _sequence_ratio(log_ratio_N, sample_N)
        clipped_N = compared_N.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        loss_N = -torch.minimum(compared_N * advantages_N, clipped_N * advantages_N)
        if isinstance(loss, Clipped) and loss.dual_clip is not None:
            loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -loss.dual_clip * advantages_N), loss_N)
    with torch.no_grad():
        low_N, high_N = _bounded(loss, compared_N, advantages_N)
        masked_N = _outside(ratio_N, ratio_mask)
    if ratio_mask is not None:
        loss_N = loss_N.masked_fill(masked_N, 0.0)
    return TokenLoss(loss_N, log_ratio_N.detach(), known_N, low_N, high_N, masked_N)


def gradient_weight(loss: Loss, ratio: Tensor, advantages: Tensor, ratio_mask: RatioMask = None) -> Tensor:
    """f(rho, A) of a loss with one ratio a token: its gradient is -f A grad log pi. Never above rho. Any shape."""
    if isinstance(loss, Reinforce):
        weight = ratio.clamp(max=loss.cap)
    elif isinstance(loss, Cispo):
        weight = ratio.clamp(max=1 + loss.clip_high)
    elif isinstance(loss, Clipped):
        low, high = _bounded(loss, ratio, advantages)
        weight = ratio.masked_fill(low | high, 0.0)
    else:
        raise ValueError(f'loss "{loss.name}" has one weight a completion, none a token')
    return weight if ratio_mask is None else weight.masked_fill(_outside(ratio, ratio_mask), 0.0)


def score_centering(
    loss: Loss,
    top_logprobs_NH: Tensor,
    top_sampler_logprobs_NH: Tensor,
    advantages_N: Tensor,
    *,
    ratio_mask: RatioMask = None,
) -> Tensor:
    """What Score Centering (arXiv 2609.20807) adds to the loss of each token, so that the weighted score
    f(rho) grad log pi has mean zero over what the sampler might have drawn there.

    It is A sum_H sg(q f - a f(1/a) p) log p over the sampler's most likely tokens: q and p are the sampler's and the policy's
    probabilities, f the weight of the loss; the tail is taken to be q = a p with a = (1 - sum_H q) / (1 - sum_H p), and
    sum over all of p grad log p = 0 turns its part into one over H. Exact importance weights (f = rho) make it vanish.

    top_logprobs_NH: log p, with gradients; top_sampler_logprobs_NH: log q, of the same ids. A place where one of these is
    NaN or +infinite gets no correction, as if q were p.
    """
    advantages_N = advantages_N.to(top_logprobs_NH.dtype)
    q_NH = top_sampler_logprobs_NH.to(top_logprobs_NH.dtype).exp()
    p_NH = top_logprobs_NH.detach().exp()
    log_ratio_NH = (top_logprobs_NH.detach() - top_sampler_logprobs_NH).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    head_NH = q_NH * gradient_weight(loss, log_ratio_NH.exp(), advantages_N.unsqueeze(-1), ratio_mask)
    least = torch.finfo(p_NH.dtype).tiny
    tail_q_N, tail_p_N = (1 - q_NH.sum(-1)).clamp(min=0), (1 - p_NH.sum(-1)).clamp(min=least)
    # a f(1/a): from 0 to 1, as f never is above rho, so that a head that holds everything does no harm
    tail_weight_N = gradient_weight(loss, tail_p_N / tail_q_N.clamp(min=least), advantages_N, ratio_mask)
    tail_N = tail_q_N / tail_p_N * tail_weight_N
    known_N1 = (top_sampler_logprobs_NH < math.inf).all(-1, keepdim=True)
    coefficient_NH = torch.where(known_N1, head_NH - tail_N.unsqueeze(-1) * p_NH, 0.0)
    return advantages_N * (coefficient_NH * top_logprobs_NH).sum(-1)


def kl_k3(log_ratio_N: Tensor) -> Tensor:
    """Estimate of KL(a || b) from each token that a sampled, from log(b/a): b/a - 1 - log(b/a). Never negative."""
    return torch.expm1(log_ratio_N) - log_ratio_N


def kl_to_reference(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """k3 estimate of KL(pi || reference) for each token (GRPO, arXiv 2402.03300, equation 4); gradients through pi."""
    return kl_k3((reference_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _bounded(loss: Loss, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ratio is too low or too high for the loss, so that its gradient is stopped (grpo, gspo) or bounded."""
    if isinstance(loss, Reinforce):
        return torch.zeros_like(ratio, dtype=torch.bool), ratio > loss.cap
    if isinstance(loss, Cispo):
        return torch.zeros_like(ratio, dtype=torch.bool), ratio > 1 + loss.clip_high
    low = (ratio < 1 - loss.clip_low) & (advantages < 0)
    high = (ratio > 1 + loss.clip_high) & (advantages > 0)
    if isinstance(loss, Clipped) and loss.dual_clip is not None:
        high = high | ((ratio > loss.dual_clip) & (advantages < 0))
    return low, high


def _outside(ratio: Tensor, ratio_mask: RatioMask) -> Tensor:
    if ratio_mask is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return (ratio < ratio_mask[0]) | (ratio > ratio_mask[1])


def _sequence_ratio(log_ratio_N: Tensor, sample_N: Tensor | None) -> Tensor:
    if sample_N is None:
        raise ValueError("gspo needs to know which completion each token belongs to (sample_N)")
    n_samples = int(sample_N.max()) + 1 if len(sample_N) else 0
    sums_S = log_ratio_N.new_zeros(n_samples).index_add(0, sample_N, log_ratio_N)
    counts_S = torch.bincount(sample_N, minlength=n_samples).clamp(min=1)
    return (sums_S / counts_S).exp()[sample_N]


class _TokenLogprobs(torch.autograd.Function):
    """By hand, because autograd would keep several [N, V] tensors, each the largest of a training step."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_NH: Tensor, temperature: float) -> Tensor:
        scaled_NV = _scaled(logits_NV, temperature)
        normalizer_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits_NV, targets_NH, normalizer_N1)
        ctx.temperature = temperature
        return scaled_NV.gather(-1, targets_NH) - normalizer_N1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # d log p[target] / d logits = (one-hot(target) - p) / temperature
        logits_NV, targets_NH, normalizer_N1 = ctx.saved_tensors
        grad_NH = grads[0] / ctx.temperature
        scaled_NV = _scaled(logits_NV, ctx.temperature)
        grad_NV = torch.sub(scaled_NV, normalizer_N1).exp_().mul_(-grad_NH.sum(-1, keepdim=True))
        grad_NV.scatter_add_(-1, targets_NH, grad_NH)
        return grad_NV.to(logits_NV.dtype), None, None


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    """logits / temperature in at least float32; the logits themselves where nothing changes."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1.0 else logits_NV / temperature
