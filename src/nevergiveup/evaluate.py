"""Pass rates, and what they are worth: unbiased pass@k, intervals, difficulty buckets.

Layer 2. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, sqrt

BUCKETS: tuple[str, ...] = ("easy", "medium", "hard", "extra_hard")
"""By the pass rate of the initial policy: above .7, .3 to .7, .02 to .3, below .02."""

_LOWER_BOUNDS = (0.7, 0.3, 0.02)


def bucket_of(pass_rate: float) -> str:
    """Difficulty bucket of a prompt from its initial pass rate in [0, 1]."""
    if pass_rate > _LOWER_BOUNDS[0]:
        return "easy"
    if pass_rate >= _LOWER_BOUNDS[1]:
        return "medium"
    return "hard" if pass_rate >= _LOWER_BOUNDS[2] else "extra_hard"


def assign_buckets(pass_rates: Mapping[str, float]) -> dict[str, str]:
    """Prompt id -> bucket. The rates must not come from samples that also serve as the baseline of a comparison: prompts
    that happened to fail would show a gain without any learning (regression to the mean)."""
    return {prompt_id: bucket_of(rate) for prompt_id, rate in pass_rates.items()}


def mean_by_bucket(pass_rates: Mapping[str, float], buckets: Mapping[str, str]) -> dict[str, float]:
    """Mean pass rate of the prompts in each bucket that has any, and under "all" of every prompt."""
    groups: dict[str, list[float]] = {}
    for prompt_id, rate in pass_rates.items():
        groups.setdefault(buckets[prompt_id], []).append(rate)
        groups.setdefault("all", []).append(rate)
    return {name: sum(groups[name]) / len(groups[name]) for name in (*BUCKETS, "all") if name in groups}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from c right ones of n samples, 1 - C(n-c, k)/C(n, k) (arXiv 2107.03374).

    Raises ValueError for k > n: fewer samples cannot tell.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k needs 0 <= c <= n and k >= 1, not n = {n}, c = {c}, k = {k}")
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, there are {n}: draw more, or lower k")
    return 1.0 - comb(n - c, k) / comb(n, k)


def wilson_interval(c: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval (95 % for the default z) of a pass rate from c right ones of n samples (Wilson, 1927)."""
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"an interval needs 0 <= c <= n and n >= 1, not c = {c}, n = {n}")
    centre = (c + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * sqrt(c * (n - c) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> tuple[float, int]:
    """Mean pass@k over prompts given as (n, c), and how many were left out because they have fewer than k samples."""
    usable = [(n, c) for n, c in counts if n >= k]
    if not usable:
        raise ValueError(f"no prompt has the {k} samples that pass@{k} needs")
    return sum(pass_at_k(n, c, k) for n, c in usable) / len(usable), len(counts) - len(usable)
