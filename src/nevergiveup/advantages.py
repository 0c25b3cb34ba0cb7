"""Group-relative advantages, computed exactly and rounded once.

Layer 0. Standard library only. `rewards` are exact (`int` or `Fraction`), so contrast and zero sums are decided without
rounding; the floats that come out are the correctly rounded exact values (but for a square root). Symbols as in the NGU paper
(arXiv 2609.13443): b is the mean reward of the whole chain, stale attempts included; n+ attempts are tied with the group's
maximum, n- are not. Everything works on the few distinct rewards of a group, not on its attempts: it runs once a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm, sqrt
from typing import Literal, TypeAlias, get_args

from nevergiveup.types import Exact

STD_EPS = 1e-6
"""Added to a standard deviation before dividing by it (GRPO, arXiv 2402.03300)."""

Divisor: TypeAlias = Literal["nothing", "std", "sample_std", "baseline"]
"""nothing (Dr. GRPO, arXiv 2503.20783); the population standard deviation of the group's rewards (GRPO, DAPO); that with
n - 1; or the mean reward that was subtracted (MaxRL)."""

Anchor: TypeAlias = Literal["shift", "scale", "recompute", "none", "downsample"]
"""How the survivors of a chain are weighed against its whole history: see `anchored`."""

Advantages: TypeAlias = tuple[float, ...]
Weights: TypeAlias = tuple[float | None, ...]
"""None: the attempt is left out."""


def centred(rewards: Sequence[Exact], *, divide_by: Divisor = "nothing") -> Advantages:
    """r_i - mean(r), divided as asked. Sums to zero. Without contrast every advantage is exactly 0.0.

    One right of four: .75, -.25, -.25, -.25; by std 1.7321, -.5774; by sample_std 1.5, -.5; by baseline 3, -1. An empty
    group gives an empty tuple. A baseline of 0 or below (length penalties) is not divided by.
    """
    n = len(rewards)
    values, _, unit = as_integers(rewards, 0)
    total, counts = sum(values), _counts(values)
    numerators = {value: value * n - total for value in counts}
    if len(counts) < 2:
        divide_by = "nothing"
    of_value = _rounded(numerators, n * unit, counts, unit, divide_by, total, n)
    return tuple([of_value[value] for value in values])


def leave_one_out(rewards: Sequence[Exact]) -> Advantages:
    """r_i minus the mean of the others (RLOO, arXiv 2402.14740): K/(K-1) times `centred`. 0.0 for a single attempt."""
    n = len(rewards)
    values, _, unit = as_integers(rewards, 0)
    total = sum(values)
    of_value = {value: (value * n - total) / (max(1, n - 1) * unit) for value in set(values)}
    return tuple([of_value[value] for value in values])


def anchored(
    rewards: Sequence[Exact], tried: int, total: Exact, *, mode: Anchor = "shift", divide_by: Divisor = "nothing"
) -> Weights:
    """Advantages of the fresh survivors, oldest first, anchored at the baseline b = total / tried of the whole chain (NGU).

    The maximum keeps r_max - b. What becomes of the others:

    shift: one constant is added to every other reward so that the survivors' mean becomes b. The sum is zero and the order
        of the rewards is kept; for 0/1 rewards A+ = 1 - b, A- = -(n+/n-)(1 - b). Where a shifted reward would reach the
        maximum (graded rewards only, oracle 6.4) the result is that of recompute; `shift_reaches_max` tells.
    scale: the others' r - b are multiplied so that the sum is zero. Equal to shift for 0/1 rewards; on graded ones it can
        turn the order round, and where they sum to 0 already nothing can be scaled and r - b is left (oracle 6.3).
    recompute: b is replaced by the mean of the survivors (`centred`), which weighs a rare success as if it were common.
    none: r - b as it is; does not sum to zero.
    downsample: as many of the others as there are at the maximum, the newest; the rest None. Those kept are shifted.

    When nothing was pruned every mode but downsample gives r - b, as `centred`. divide_by: the standard deviation of the
    survivors that are kept, or b (MaxRL; a b of 0 or below is not divided by). Raises ValueError for a group without
    contrast: there is nothing to anchor against.
    """
    n = len(rewards)
    values, drawn, unit = as_integers(rewards, total)  # drawn: the sum of all rewards of the chain, in the same unit
    counts = _counts(values)
    top = max(counts)
    n_top = counts[top]
    n_other = n - n_top
    if not n_other:
        raise ValueError("anchored advantages need contrast: every fresh reward of the group is the same")
    if mode == "downsample" and n_other > n_top:
        kept = _downsampled(values, top, n_top)
        weights: list[float | None] = [None] * n
        some = anchored([rewards[i] for i in kept], tried, total, divide_by=divide_by)
        for i, weight in zip(kept, some, strict=True):
            weights[i] = weight
        return tuple(weights)
    sum_fresh = sum(values)
    shifts = mode in ("shift", "downsample")
    if mode == "recompute" or (shifts and _reaches(counts, top, n, tried, drawn, sum_fresh)):
        numerators, denominator = {value: value * n - sum_fresh for value in counts}, n * unit
    elif shifts:
        # A_other = r + (n b - sum r)/n_other - b, brought to the denominator n_other * tried
        common, denominator = n_top * drawn - tried * sum_fresh, n_other * tried
        numerators = {value: value * denominator + common for value in counts}
        numerators[top] = (top * tried - drawn) * n_other
        denominator *= unit
    elif mode in ("scale", "none"):
        numerators, denominator = {value: value * tried - drawn for value in counts}, tried * unit
        rest = (sum_fresh - n_top * top) * tried - n_other * drawn  # sum of the others' r - b, times tried
        if mode == "scale" and rest:
            sign = 1 if rest > 0 else -1  # of the denominator: it stays positive
            others, of_top = -sign * n_top * numerators[top], abs(rest)
            numerators = {value: x * (of_top if value == top else others) for value, x in numerators.items()}
            denominator *= of_top
    else:
        raise ValueError(f"mode = {mode!r} must be one of {', '.join(get_args(Anchor))}")
    of_value = _rounded(numerators, denominator, counts, unit, divide_by, drawn, tried)
    return tuple([of_value[value] for value in values])


def shift_reaches_max(rewards: Sequence[Exact], tried: int, total: Exact, *, mode: Anchor = "shift") -> bool:
    """Whether the shift of `anchored` in this mode would lift another reward to the maximum, which would break the order.

    False in the modes that do not shift. Raises ValueError for a group without contrast.
    """
    values, drawn, _ = as_integers(rewards, total)
    counts = _counts(values)
    if len(counts) < 2:
        raise ValueError("anchored advantages need contrast: every fresh reward of the group is the same")
    if mode not in ("shift", "downsample"):
        return False
    top = max(counts)
    if mode == "downsample" and len(values) > 2 * counts[top]:
        values = [values[i] for i in _downsampled(values, top, counts[top])]
        counts = _counts(values)
    return _reaches(counts, top, len(values), tried, drawn, sum(values))


def virtual_maximum(rewards: Sequence[Exact], max_reward: Exact) -> Advantages:
    """NGRPO: the advantages, in units of the population standard deviation, that a group would have if one more attempt had
    got the maximum score. Each of an all-wrong group of G gets -1/sqrt(G). Sums below zero: it only pushes away.

    0.0 for everyone where all have the maximum already.
    """
    values, top, unit = as_integers(rewards, max_reward)
    n, total = len(values) + 1, sum(values) + top
    # n^2 times the population variance, exact up to the square root: A = (n r - S) / sqrt(n sum r^2 - S^2)
    spread = n * (sum([value * value for value in values]) + top * top) - total * total
    if not spread:
        return (0.0,) * len(values)
    root = sqrt(spread / (unit * unit))
    return tuple([(value * n - total) / unit / root for value in values])


def focal(weights: Sequence[float | None], b: float, gamma: float) -> Weights:
    """F-GRPO: every advantage times (1 - b)^gamma, so that groups of easy prompts weigh less. b: mean reward in [0, 1]."""
    factor = max(0.0, 1.0 - b) ** gamma
    return tuple([None if weight is None else weight * factor for weight in weights])


def as_integers(rewards: Sequence[Exact], other: Exact) -> tuple[Sequence[int], int, int]:
    """The rewards and the other number as integers, and the number of units in 1: integer arithmetic is exact and fast."""
    if type(other) is int and set(map(type, rewards)) <= {int}:
        return rewards, other, 1  # type: ignore[return-value]
    ratios = [reward.as_integer_ratio() for reward in rewards]
    other_numerator, other_denominator = other.as_integer_ratio()
    unit = lcm(other_denominator, *{denominator for _, denominator in ratios})
    values = [numerator * (unit // denominator) for numerator, denominator in ratios]
    return values, other_numerator * (unit // other_denominator), unit


def _counts(values: Sequence[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _reaches(counts: Mapping[int, int], top: int, n: int, tried: int, drawn: int, sum_fresh: int) -> bool:
    # max(other) + (n b - sum r)/n_other >= top, times n_other * tried
    shift = n * drawn - tried * sum_fresh
    if shift <= 0:
        return False
    second = max([value for value in counts if value != top])
    return (top - second) * (n - counts[top]) * tried <= shift


def _downsampled(values: Sequence[int], top: int, n_top: int) -> list[int]:
    """Places of the maximum and of as many others, the newest; in order."""
    others = [i for i, value in enumerate(values) if value != top]
    return sorted([*(i for i, value in enumerate(values) if value == top), *others[-n_top:]])


def _rounded(
    numerators: Mapping[int, int],
    denominator: int,
    counts: Mapping[int, int],
    unit: int,
    divide_by: Divisor,
    drawn: int,
    tried: int,
) -> dict[int, float]:
    """The advantage of each reward, divided as asked; rewards, their counts and their sum `drawn` in units of 1/unit."""
    if divide_by == "nothing":
        return {value: numerator / denominator for value, numerator in numerators.items()}
    if divide_by == "baseline":
        times, over = (tried * unit, denominator * drawn) if drawn > 0 else (1, denominator)
        return {value: numerator * times / over for value, numerator in numerators.items()}
    if divide_by not in ("std", "sample_std"):
        raise ValueError(f"divide_by = {divide_by!r} must be one of {', '.join(get_args(Divisor))}")
    n = sum_fresh = squares = 0
    for value, count in counts.items():
        n += count
        sum_fresh += value * count
        squares += value * value * count
    n_squared = n * n if divide_by == "std" else n * (n - 1)
    # n squares - sum^2 is n^2 times the population variance
    deviation = sqrt((n * squares - sum_fresh * sum_fresh) / (n_squared * unit * unit)) + STD_EPS
    return {value: numerator / denominator / deviation for value, numerator in numerators.items()}
