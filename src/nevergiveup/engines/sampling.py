"""Drawing tokens from logits, each completion from its own stream of random numbers. Layer 3. torch and numpy.

Shapes: N sequences, V vocabulary, H most likely tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Array: TypeAlias = "np.ndarray[Any, Any]"

BLOCK = 256
"""Tokens in one block of the vocabulary."""


def streams(seed_N: Array) -> Array:
    """What a seed (int64, not negative) brings into `uniforms`."""
    return _mix(seed_N.astype(np.uint64))


def uniforms(stream_N: Array, index_N: Array) -> Array:
    """One number of [0, 1) (float64, 53 bits) for each pair of stream and token index, independent of all others.

    Counter-based: it depends on nothing else. Two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014,
    doi 10.1145/2660193.2660195), the first in `streams`, the index entering between them.
    """
    bits_N = _mix(stream_N + (index_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Drawn(NamedTuple):
    """Tokens with their natural log-probabilities (float32).

    top: ids and log-probabilities [N, H] of the most likely ones of each row, most likely first; None when H is 0.
    """

    token_N: Tensor
    logprob_N: Tensor
    top: tuple[Tensor, Tensor] | None


def sample_tokens(logits_NV: Tensor, temperature: float, uniform_N: Tensor, n_top: int = 0) -> Drawn:
    """A token for each row, by inverting the cumulative distribution, and the n_top most likely ones.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1. The arithmetic is float32 with
    float64 sums, whatever the logits are. Logits that are not finite give a log-probability that is not.
    """
    logits_NV = logits_NV.float()
    if temperature not in (0, 1):
        logits_NV = logits_NV / temperature
    greatest_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - greatest_N1).exp_()
    if temperature == 0:
        token_N1, total_N1 = logits_NV.argmax(-1, keepdim=True), weights_NV.sum(-1, keepdim=True, dtype=torch.float64)
    elif (n_vocab := weights_NV.shape[1]) <= BLOCK:
        token_N1, sums_NV, _ = _search(weights_NV, uniform_N[:, None])
        total_N1 = sums_NV[:, -1:]
    else:  # first a block of the vocabulary, then a token in it: one pass over all weights instead of several
        blocks = F.pad(weights_NV, (0, -n_vocab % BLOCK)).unflatten(1, (-1, BLOCK))
        block_N1, sums_NV, target_N1 = _search(blocks.sum(-1), uniform_N[:, None])
        total_N1 = sums_NV[:, -1:]
        below_N1 = F.pad(sums_NV, (1, 0)).gather(1, block_N1)
        share_N1 = (target_N1 - below_N1) / (sums_NV.gather(1, block_N1) - below_N1)
        block = blocks.take_along_dim(block_N1[:, :, None], 1)[:, 0]
        within_N1, _, _ = _search(block, share_N1.clamp_(0, 1 - 2.0**-53))
        token_N1 = (block_N1 * BLOCK + within_N1).clamp_(max=n_vocab - 1)
    logprob_N = (weights_NV.gather(1, token_N1) / total_N1).log()[:, 0].float()
    if not n_top:
        return Drawn(token_N1[:, 0], logprob_N, None)
    top_NH, top_ids_NH = logits_NV.topk(n_top, dim=-1)
    seen_NH = weights_NV.gather(1, top_ids_NH)
    # As the drawn token's, bit for bit. Where a weight is too small for float32 (0, or but a few bits of it), the logit tells.
    has_all_bits_NH = (seen_NH >= torch.finfo(torch.float32).tiny) | (top_ids_NH == token_N1)
    top_logprobs_NH = torch.where(
        has_all_bits_NH, (seen_NH / total_N1).log(), (top_NH - greatest_N1).double() - total_N1.log()
    )
    return Drawn(token_N1[:, 0], logprob_N, (top_ids_NH, top_logprobs_NH.float()))


def _search(weights_NV: Tensor, share_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index where the running sum of each row first exceeds a share [0, 1) of its total; the running sums; the share
    as a sum. An index of weight 0 is never returned."""
    sums_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    target_N1 = share_N1 * sums_NV[:, -1:]
    index_N1 = torch.searchsorted(sums_NV, target_N1, right=True)
    return index_N1.clamp_(max=weights_NV.shape[1] - 1), sums_NV, target_N1  # with NaN it runs off the end
