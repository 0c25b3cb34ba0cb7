"""Reward shaping."""

from __future__ import annotations

from fractions import Fraction

import pytest

from nevergiveup.rewards import overlong_penalty


@pytest.mark.parametrize(
    ("n_tokens", "penalty"),
    [(1, 0), (16384, 0), (16385, Fraction(-1, 4096)), (18432, Fraction(-1, 2)), (20480, -1), (20481, -1), (30000, -1)],
)
def test_soft_overlong_penalty(n_tokens: int, penalty: Fraction) -> None:
    """Oracle 8.6: limit 20480, buffer 4096."""
    assert overlong_penalty(n_tokens, 20480, 4096) == penalty
