"""Reward shaping: what is added to a graded reward.

Layer 1. Standard library only.
"""

from __future__ import annotations

from fractions import Fraction

from nevergiveup.types import Exact


def overlong_penalty(n_tokens: int, max_new_tokens: int, buffer: int) -> Exact:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), exact: 0 up to max_new_tokens - buffer tokens, then
    falling on a line to -1 at max_new_tokens and beyond."""
    excess = n_tokens - (max_new_tokens - buffer)
    if excess <= 0:
        return 0
    return -1 if excess >= buffer else Fraction(-excess, buffer)
