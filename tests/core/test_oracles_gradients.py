"""The numbers of advantages as gradients: what a weighted group estimates, how noisily, and what neighbouring methods do.

Expectations are exact sums over all outcomes of a group; the weights are those of the real functions. Scores are d log pi/dp of
a Bernoulli policy (right 1/p, wrong -1/(1-p)) unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, log, log1p, sqrt

import pytest

from nevergiveup.advantages import anchored, centred, focal, leave_one_out, virtual_maximum
from nevergiveup.evaluate import pass_at_k
from nevergiveup.strategies import GvmRaft, fill_knapsack, share_out
from nevergiveup.types import Group, Prompt, Waiting

F = Fraction


def binomial(n: int, c: int, p: float) -> float:
    return comb(n, c) * p**c * (1 - p) ** (n - c)


def dot(weights: Sequence[float | None], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True) if weight is not None)


# ------------------------------------------------------------------------- section 5: modes and divisors

SURVIVORS = [1, 0, 0, 0]  # of a chain of 256 with one success


def test_modes_of_a_rare_success() -> None:
    """Oracle 5.8, b = 1/256."""
    assert anchored(SURVIVORS, 256, 1, mode="none", divide_by="baseline") == (255.0, -1.0, -1.0, -1.0)
    count_ratio = (256 - 1) / 1  # failures to successes of the chain: the same number
    assert anchored(SURVIVORS, 256, 1, divide_by="baseline")[0] == count_ratio
    top = anchored(SURVIVORS, 256, 1)[0]
    assert top is not None
    assert top * 4 / 256 == pytest.approx(0.015564, abs=1e-6)
    assert anchored(SURVIVORS, 256, 1, divide_by="std")[0] == pytest.approx(2.3004, abs=1e-4)
    chain_std = sqrt((1 - F(1, 256)) * F(1, 256) * F(256, 255))  # n - 1
    assert top / chain_std == pytest.approx(15.9375, abs=1e-9)


def test_without_rescaling_the_sum_is_not_zero() -> None:
    """Oracle 5.5: what `none` leaves over."""
    for tried, rest in ((256, 0.984375), (24, 0.833333), (8, 0.5)):
        weights = anchored(SURVIVORS, tried, 1, mode="none")
        assert weights[1] == -1 / tried
        assert sum(w for w in weights if w is not None) == pytest.approx(rest, abs=1e-6)
        recomputed = anchored(SURVIVORS, tried, 1, mode="recompute")
        assert recomputed == (0.75, -0.25, -0.25, -0.25)


def test_conventions_of_one_right_of_four() -> None:
    """Oracle 5.9."""
    assert leave_one_out(SURVIVORS) == (1.0, -1 / 3, -1 / 3, -1 / 3)
    assert centred(SURVIVORS, divide_by="std")[:2] == pytest.approx((1.7321, -0.5774), abs=1e-4)
    assert centred(SURVIVORS, divide_by="sample_std")[:2] == pytest.approx((1.5, -0.5), abs=1e-5)
    assert centred(SURVIVORS, divide_by="baseline") == (3.0, -1.0, -1.0, -1.0)


def test_neighbours_of_grpo() -> None:
    """Oracle 8.5: F-GRPO, NGRPO, GVM, Knapsack."""
    assert focal((1.0,), 0.25, 0.5)[0] == pytest.approx(0.866025, abs=1e-6)
    assert focal((1.0, None), 0.25, 1.0) == (0.75, None)
    for n in (2, 4, 9, 16):
        assert virtual_maximum([0] * n, 1) == pytest.approx([-1 / sqrt(n)] * n, rel=1e-12)
    waiting = [Waiting(Prompt("p"), Group(Prompt("p"), (), 100, total, None, 0, 1, 1), None) for total in (50, 10, 2)]
    decisions = GvmRaft(budget=10_000).allocate(waiting)
    assert [d.draws / 30_000 for d in decisions] == pytest.approx([0.1720, 0.3674, 0.4606], abs=1e-4)
    assert share_out(10_000, [0.1720, 0.3674, 0.4606]) == [1720, 3674, 4606]
    assert fill_knapsack([0.5, 0.1, 0.02], 16, 2, 128) == [6, 8, 2]


# ------------------------------------------------------------------------------ section 7: gradient level


@pytest.mark.parametrize("n_pruned", [0, 8, 252])
def test_anchoring_is_the_full_history_with_the_negatives_measured_on_fresh_ones(n_pruned: int) -> None:
    """Oracle 7.1: sum A s = n+ (1 - b)(s+ - s-), s- the mean over fresh negatives."""
    rewards, scores = [1, 0, 1, 0, 0, 0], [0.7, -0.1, 0.4, 0.2, -0.6, 0.3]
    tried = len(rewards) + n_pruned
    s_plus, s_minus = (0.7 + 0.4) / 2, (-0.1 + 0.2 - 0.6 + 0.3) / 4
    expected = 2 * (1 - 2 / tried) * (s_plus - s_minus)
    assert dot(anchored(rewards, tried, 2), scores) == pytest.approx(expected, abs=1e-12)


def test_noise_and_drift_of_the_modes() -> None:
    """Oracles 7.2 and 7.3: one success of 64, eight kept; scores of variance 1, means .95 and -.05, and a common drift."""
    kept = [1] + [0] * 7
    scores = [0.95] + [-0.05] * 7
    full = centred([1] + [0] * 63)
    rows = {"full": (full, 0.984375), "anchored": (anchored(kept, 64, 1), 1.107422)}
    rows["recomputed"] = (anchored(kept, 64, 1, mode="recompute"), 0.875)
    rows["no rescale"] = (anchored(kept, 64, 1, mode="none"), 0.970703)
    for name, (weights, variance) in rows.items():
        assert sum((weight or 0.0) ** 2 for weight in weights) == pytest.approx(variance, abs=1e-6), name
    assert dot(rows["recomputed"][0], scores) == pytest.approx(0.875, abs=1e-9)
    assert dot(rows["no rescale"][0], scores) == pytest.approx(0.940625, abs=1e-9)
    assert dot(rows["anchored"][0], scores) == pytest.approx(0.984375, abs=1e-9)
    drift = {name: dot(weights, [1.0] * len(weights)) for name, (weights, _) in rows.items()}
    assert [drift[name] for name in ("full", "anchored", "recomputed")] == pytest.approx([0.0] * 3, abs=1e-12)
    assert drift["no rescale"] == pytest.approx(0.875, abs=1e-9)
    ratio = {name: dot(rows[name][0], scores) / sqrt(rows[name][1]) for name in ("anchored", "recomputed")}
    assert ratio["anchored"] == pytest.approx(ratio["recomputed"], rel=1e-6), "the signal-to-noise ratio is the same"


@pytest.mark.parametrize(("n_kept", "p"), [(2, 0.05), (8, 0.05), (64, 0.3)])
def test_a_bernoulli_policy_does_not_see_the_pruning(n_kept: int, p: float) -> None:
    """Oracle 7.4: with scores r - p the anchored sum is n+ (1 - b), whatever was pruned."""
    rewards = [1] + [0] * (n_kept - 1)
    assert dot(anchored(rewards, 64, 1), [r - p for r in rewards]) == pytest.approx(1 - 1 / 64, abs=1e-12)


TABLE = [
    *((4, 0.95, p, w) for p, w in ((1e-9, 76.85), (0.001, 71.33), (0.01, 43.43), (0.05, 16.29), (0.1, 9.54))),
    *((4, 0.95, p, w) for p, w in ((0.25, 4.85), (0.5, 3.35), (0.9, 3.00))),
    *((16, 0.875, p, w) for p, w in ((1e-9, 125.6), (0.001, 113.0), (0.01, 61.3), (0.05, 25.1), (0.1, 18.2))),
    *((16, 0.875, p, w) for p, w in ((0.25, 15.2), (0.5, 15.0), (0.9, 15.0))),
    *((4, 1 - 1e-9, p, w) for p, w in ((0.01, 99.0), (0.05, 20.2), (0.1, 10.6))),
]


@pytest.mark.parametrize(("k", "rho", "p", "printed"), TABLE)
def test_implicit_objective(k: int, rho: float, p: float, printed: float) -> None:
    """Oracle 7.5: W(p) in closed form, against the sum over attempts of what the anchored weights of a chain add up to."""
    g = rho * (1 - p) ** k
    closed = (k / (1 - g) + (1 - p + k * p) * log1p(-g) / g) / (1 - p)
    assert closed == pytest.approx(printed, abs=0.06 if printed > 20 else 0.0105 if printed < 10 else 0.06)
    if p < 0.01:
        return  # the sum over attempts is long, and cancels
    total, probability = 0.0, 1.0
    for attempt in range(1, 4000):
        for n_right in range(1, k + 1):
            if attempt == 1 and n_right == k:
                continue  # solved at once
            rewards = [1] * n_right + [0] * max(1, k - n_right)  # an old failure is kept where none is new
            positive = anchored(rewards, k * attempt, n_right)[0]
            assert positive is not None
            total += probability * binomial(k, n_right, p) * n_right * positive
        probability *= g
        if probability < 1e-15:
            break
    assert total / (p * (1 - p)) == pytest.approx(closed, rel=1e-6)


def test_fixed_k_weighs_every_prompt_alike() -> None:
    """Oracle 7.5: with g -> 0, K - 1 at any pass rate."""
    for k in (4, 16):
        for p in (0.01, 0.3, 0.9):
            total = sum(
                binomial(k, c, p) * dot(centred([1] * c + [0] * (k - c)), [1 / p] * c + [-1 / (1 - p)] * (k - c))
                for c in range(k + 1)
            )
            assert total == pytest.approx(k - 1, rel=1e-9)


# ---------------------------------------------------------------------------- section 8: other objectives


def test_pkpo() -> None:
    """Oracle 8.3: right k/n, wrong (k/n) pass@(k-1) of the n - 1 others: the gradient of pass@k, k (1-p)^(k-1) dp."""
    n, k, p = 8, 4, 0.2
    total = sum(
        binomial(n, c, p) * (c * k / n / p - (n - c) * k / n * pass_at_k(n - 1, c, k - 1) / (1 - p))
        if c < n
        else binomial(n, c, p) * c * k / n / p
        for c in range(n + 1)
    )
    assert total == pytest.approx(2.048, abs=1e-9)
    assert total == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-9)


def test_maxrl() -> None:
    """Oracle 8.4: divided by the mean reward, the gradient of a truncated log-likelihood."""
    k, p = 6, 0.3
    by_baseline = uncentred = 0.0
    for c in range(1, k + 1):
        rewards, scores = [1] * c + [0] * (k - c), [1 / p] * c + [-1 / (1 - p)] * (k - c)
        by_baseline += binomial(k, c, p) * dot(centred(rewards, divide_by="baseline"), scores) / k
        uncentred += binomial(k, c, p) * dot([r * k / c for r in rewards], scores) / k
    assert by_baseline == pytest.approx(2.7731, abs=1e-4)
    assert by_baseline == pytest.approx((1 - (1 - p) ** (k - 1)) / p, rel=1e-9)
    assert uncentred == pytest.approx(2.94117, abs=1e-5)


def test_what_none_of_n_allows() -> None:
    """Oracle 8.2: the exact one-sided bound, 1 - .05^(1/n); with it pass@1 of 0 of n is .05-likely."""
    for n, bound in ((32, 0.0894), (64, 0.0457), (128, 0.0231), (1024, 0.0029)):
        assert 1 - 0.05 ** (1 / n) == pytest.approx(bound, abs=6e-5)
        assert binomial(n, 0, 1 - 0.05 ** (1 / n)) == pytest.approx(0.05, rel=1e-9)


# ------------------------------------------------------------------------------- sections 1, 2 and 9: rest


def test_mixed_groups() -> None:
    """Oracles 1.2 and 1.4: at p = .95 the 81 % are one failure OR MORE; contrast is symmetric and greatest at p = .5."""
    p, k = 0.95, 32
    assert 1 - p**k - (1 - p) ** k == pytest.approx(0.806289, abs=1e-6)
    assert binomial(k, 31, p) + binomial(k, 30, p) == pytest.approx(0.592403, abs=1e-6)
    assert 1 - 0.5**4 - 0.5**4 == 0.875


@pytest.mark.parametrize(("k", "rho", "pooled", "mean_b"), [(4, 0.95, 0.0221, 0.0592), (16, 0.875, 0.0172, 0.0315)])
def test_baselines_of_trained_chains(k: int, rho: float, pooled: float, mean_b: float) -> None:
    """Oracle 2.7 at p = .01, both biased up. (The last printed digit is that of a simulation: hence the tolerance.)"""
    p, g = 0.01, rho * 0.99**k
    rows = [(r, c, g ** (r - 1) * binomial(k, c, p)) for r in range(1, 900) for c in range(1, k + (r > 1))]
    assert sum(c * q for _, c, q in rows) / sum(k * r * q for r, _, q in rows) == pytest.approx(pooled, abs=1.2e-4)
    assert sum(c / (k * r) * q for r, c, q in rows) / sum(q for _, _, q in rows) == pytest.approx(mean_b, abs=1.2e-4)


def test_single_draws_until_success() -> None:
    """Oracle 2.7: K = 1, rho = 1, E[1/R] = p ln(1/p)/(1-p), .04652 at p = .01."""
    p = 0.01
    series = sum(p * (1 - p) ** (r - 1) / r for r in range(1, 5000))
    assert series == pytest.approx(p * log(1 / p) / (1 - p), rel=1e-9)
    assert series == pytest.approx(0.04652, abs=1e-5)


def test_story_numbers() -> None:
    """Oracle 9: 255 wrong get -1/256 each; five failed attempts of four and a sixth are 24 completions."""
    assert centred([1] + [0] * 255)[1] == -0.00390625
    assert anchored(SURVIVORS, 24, 1)[0] == pytest.approx(0.958333, abs=1e-6)
    assert pytest.approx(0.041667, abs=1e-6) == 1 / 24
    assert pytest.approx(2.74, abs=5e-3) == 4.278 / 1.562
