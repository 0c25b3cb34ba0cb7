"""Group-relative advantages, computed exactly and rounded once.

Layer 0. Standard library only. `rewards` are exact (`int` or `Fraction`), so contrast and zero sums are decided without
rounding; the floats that come out are the correctly rounded exact values. Symbols as in the NGU paper (arXiv 2609.13443):
b is the mean reward of the whole chain, stale attempts included; n+ attempts are tied with the group's maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import sqrt

from nevergiveup.types import Exact

STD_EPS = 1e-6
"""Added to the standard deviation before dividing by it (GRPO, arXiv 2402.03300)."""


def centred(rewards: Sequence[Exact], *, std: bool = False) -> tuple[float, ...]:
    """r_i - mean(r); with `std` divided by the population standard deviation + STD_EPS (GRPO, DAPO). Sums to zero.

    Without contrast every advantage is exactly 0.0, with or without `std`. An empty group gives an empty tuple.
    """
    n = len(rewards)
    total = sum(rewards)
    values = set(rewards)
    of_value = {value: _ratio(value * n - total, n) for value in values}
    if std and len(values) > 1:
        variance = sum(of_value[reward] ** 2 for reward in rewards) / n
        scale = 1.0 / (sqrt(variance) + STD_EPS)
        of_value = {value: advantage * scale for value, advantage in of_value.items()}
    return tuple([of_value[reward] for reward in rewards])


def anchored(rewards: Sequence[Exact], tried: int, total: Exact) -> tuple[float, ...]:
    """Advantages of the fresh survivors, anchored at the baseline b = total / tried of the whole chain (NGU, `shift`).

    The maximum keeps r_max - b. One constant is added to every other reward so that the survivors' mean becomes b; so
    the sum is zero and the order of the rewards is kept. For 0/1 rewards this is the closed form
    A+ = 1 - b, A- = -(n+/n-)(1 - b). When nothing was pruned it equals `centred`.

    Where a shifted reward would reach the maximum (possible with graded rewards only, oracle 6.4) the result is
    `centred(rewards)` instead; `shift_reaches_max` tells.

    Raises ValueError for a group without contrast: there is no other reward to shift.
    """
    if shift_reaches_max(rewards, tried, total):
        return centred(rewards)
    top = max(rewards)
    n, n_other = len(rewards), sum(reward != top for reward in rewards)
    # A_other = r + (n b - sum r)/n_other - b, brought to the denominator n_other * tried
    common = n * total - tried * sum(rewards) - n_other * total
    of_value = {value: _ratio(value * n_other * tried + common, n_other * tried) for value in set(rewards)}
    of_value[top] = _ratio(top * tried - total, tried)
    return tuple([of_value[reward] for reward in rewards])


def shift_reaches_max(rewards: Sequence[Exact], tried: int, total: Exact) -> bool:
    """Whether the shift of `anchored` would lift another reward to the maximum, which would break the order."""
    top = max(rewards)
    others = [reward for reward in rewards if reward != top]
    if not others:
        raise ValueError("anchored advantages need contrast: every fresh reward of the group is the same")
    # max(other) + (n b - sum r)/n_other >= top, times n_other * tried
    shift = len(rewards) * total - tried * sum(rewards)
    return (top - max(others)) * len(others) * tried <= shift


def _ratio(numerator: Exact, denominator: int) -> float:
    """The quotient, rounded once (int / int and float(Fraction) are both correctly rounded)."""
    return numerator / denominator if isinstance(numerator, int) else float(Fraction(numerator, denominator))
