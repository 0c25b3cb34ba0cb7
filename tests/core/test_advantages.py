"""Advantages: the published vectors, and the properties that every group must have. Exact values are rounded once."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import sqrt
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from nevergiveup.advantages import (
    STD_EPS,
    anchored,
    centred,
    focal,
    leave_one_out,
    shift_reaches_max,
    virtual_maximum,
)
from nevergiveup.types import exact

F = Fraction
binary_groups = st.lists(st.integers(0, 1), min_size=2, max_size=20).filter(lambda rewards: len(set(rewards)) > 1)
graded_rewards = st.one_of(
    st.integers(0, 3),
    st.fractions(0, 3, max_denominator=12),
    st.sampled_from([0.1, 0.2, 0.7, 0.95, 1e-3, 2.5]).map(exact),
)
graded_groups = st.lists(graded_rewards, min_size=2, max_size=12).filter(lambda rewards: len(set(rewards)) > 1)


def test_centred_is_reward_minus_mean() -> None:
    assert centred([1, 0, 0, 0]) == (0.75, -0.25, -0.25, -0.25)
    assert centred([1, 1, 0]) == (1 / 3, 1 / 3, -2 / 3)
    assert centred([F(7, 12), F(6, 12)]) == (1 / 24, -1 / 24)
    assert centred([]) == ()


def test_std_is_the_population_standard_deviation() -> None:
    """Oracle 5.9: +1.7321 and -.5774 for one right of four; the sample standard deviation would give 1.5 and -.5."""
    high, *low = centred([1, 0, 0, 0], divide_by="std")
    assert high == pytest.approx(0.75 / (sqrt(3) / 4 + STD_EPS), rel=1e-12)
    assert (round(high, 4), round(low[0], 4)) == (1.732, -0.5773)
    assert high == pytest.approx(1.7321, abs=1e-4)
    assert low == [pytest.approx(-0.5774, abs=1e-4)] * 3


@pytest.mark.parametrize("divide_by", ["nothing", "std", "sample_std", "baseline"])
@pytest.mark.parametrize("reward", [0, 1, 0.1, 0.7, 0.95, F(7, 12)])
@pytest.mark.parametrize("n", [1, 3, 7, 16])
def test_no_contrast_gives_exact_zeros(divide_by: Any, reward: float, n: int) -> None:
    """Float means and deviations find signal here: the mean of sixteen .7 is .6999999999999998."""
    assert centred([exact(reward)] * n, divide_by=divide_by) == (0.0,) * n


@pytest.mark.parametrize(
    ("tried", "positive", "negative"),
    [
        (256, 0.99609375, -0.33203125),
        (24, F(23, 24), F(-23, 72)),
        (8, 0.875, F(-7, 24)),
        (4, 0.75, -0.25),  # nothing pruned
    ],
)
def test_anchored_one_right_three_fresh_failures(tried: int, positive: float, negative: float) -> None:
    """Oracle 5.5."""
    assert anchored([1, 0, 0, 0], tried, 1) == (float(positive), *[float(negative)] * 3)


def test_anchored_authors_unit_vector() -> None:
    assert anchored([0, 0, 1], 5, 1) == (-0.4, -0.4, 0.8)


@given(binary_groups, st.integers(0, 300))
def test_anchored_closed_form_for_binary_rewards(rewards: list[int], n_stale_failures: int) -> None:
    """Oracles 5.1, 5.3 and 5.4: A+ = 1 - b, A- = -(n+/n-)(1 - b), one factor (1 - b)/(1 - b') times the recomputed ones."""
    n_pos, n_fresh = sum(rewards), len(rewards)
    tried = n_fresh + n_stale_failures
    b, b_fresh = F(n_pos, tried), F(n_pos, n_fresh)
    closed = [1 - b if reward else -F(n_pos, n_fresh - n_pos) * (1 - b) for reward in rewards]
    assert sum(closed) == 0
    assert closed == [(1 - b) / (1 - b_fresh) * (reward - b_fresh) for reward in rewards]
    assert anchored(rewards, tried, n_pos) == tuple(float(advantage) for advantage in closed)
    assert not shift_reaches_max(rewards, tried, n_pos)
    if n_stale_failures == 0:
        assert anchored(rewards, tried, n_pos) == centred(rewards)


@given(graded_groups, st.lists(graded_rewards, max_size=30))
def test_anchored_properties_for_graded_rewards(rewards: list[F], stale: list[F]) -> None:
    """Oracle 6.1: zero sum, r_max - b for the maximum, the order of the rewards; and no change when nothing is stale."""
    everything = [*rewards, *stale]
    tried, total = len(everything), sum(everything)
    advantages = anchored(rewards, tried, total)
    assert abs(sum(advantages)) < 1e-12 * len(rewards)
    for (reward, advantage), (next_reward, next_advantage) in pairwise(sorted(zip(rewards, advantages, strict=True))):
        assert (reward < next_reward) == (advantage < next_advantage)
    if not stale:
        assert advantages == centred(rewards)
    if not shift_reaches_max(rewards, tried, total):
        assert max(advantages) == float(max(rewards) - F(total) / tried)
    else:
        assert advantages == centred(rewards)


@given(graded_groups, st.lists(graded_rewards, max_size=30))
def test_shift_is_reported_exactly_where_it_would_break_the_order(rewards: list[F], stale: list[F]) -> None:
    """Oracle 6.2: delta = (n_s b - sum r)/n_other on every other reward."""
    b = F(sum(rewards) + sum(stale), len(rewards) + len(stale))
    top = max(rewards)
    others = [reward for reward in rewards if reward != top]
    delta = (len(rewards) * b - sum(rewards)) / len(others)
    reaches = max(others) + delta >= top
    assert shift_reaches_max(rewards, len(rewards) + len(stale), sum(rewards) + sum(stale)) == reaches
    assume(not reaches)
    shifted = tuple(float((reward if reward == top else reward + delta) - b) for reward in rewards)
    assert anchored(rewards, len(rewards) + len(stale), sum(rewards) + sum(stale)) == shifted


@pytest.mark.parametrize(
    ("rewards", "shifted"),
    [
        ([".8", ".9", "1"], [-0.5, -0.4, 0.9]),
        (["0", ".2", "1"], [-0.55, -0.35, 0.9]),
        (["0", ".2001", "1"], [-0.55005, -0.34995, 0.9]),
    ],
)
def test_shift_where_scaling_misbehaves(rewards: list[str], shifted: list[float]) -> None:
    """Oracle 6.3, b = .1."""
    assert anchored([F(reward) for reward in rewards], 10, 1) == tuple(shifted)


def test_shift_that_reaches_the_maximum_falls_back_to_the_mean_of_the_survivors() -> None:
    """Oracle 6.4: left alone, the advantages would sum to -.25."""
    rewards = [F(".5"), F(".95"), F(1)]
    assert shift_reaches_max(rewards, 10, 9)
    assert anchored(rewards, 10, 9) == centred(rewards)
    assert sum(anchored(rewards, 10, 9)) == pytest.approx(0, abs=1e-15)


def test_shift_that_just_reaches_the_maximum_falls_back_too() -> None:
    """b = .85 lifts .95 to exactly 1: two different rewards would get the same advantage."""
    rewards = [F(".5"), F(".95"), F(1)]
    assert shift_reaches_max(rewards, 20, 17)
    assert anchored(rewards, 20, 17) == centred(rewards)
    assert not shift_reaches_max(rewards, 2000, 1699)


def test_per_test_rewards() -> None:
    """Oracle 6.5: four stale attempts passed 7 of 12 tests, the new ones 7, 7, 8 and 6."""
    rewards = [F(n, 12) for n in (7, 7, 8, 6)]
    assert anchored(rewards, 8, sum(rewards) + 4 * F(7, 12)) == (0.0, 0.0, 1 / 12, -1 / 12)


@pytest.mark.parametrize("rewards", [[1], [1, 1, 1], [0, 0]])
def test_anchored_refuses_a_group_without_contrast(rewards: list[int]) -> None:
    with pytest.raises(ValueError, match="need contrast"):
        anchored(rewards, 10, 3)
    with pytest.raises(ValueError, match="need contrast"):
        shift_reaches_max(rewards, 10, 3)


# --------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("rewards", "scaled"),
    [
        ([".8", ".9", "1"], [-0.42, -0.48, 0.9]),  # the order is turned round
        (["0", ".2", "1"], [-0.1, 0.1, 0.9]),  # nothing to scale: left as it is
        (["0", ".2001", "1"], [900, -900.9, 0.9]),  # explodes
    ],
)
def test_scale_is_as_published(rewards: list[str], scaled: list[float]) -> None:
    """Oracle 6.3, b = .1."""
    assert anchored([F(reward) for reward in rewards], 10, 1, mode="scale") == pytest.approx(scaled, rel=1e-12)


@given(binary_groups, st.integers(0, 300))
def test_scale_is_shift_for_binary_rewards(rewards: list[int], n_stale_failures: int) -> None:
    """Oracle 5.2."""
    tried, n_right = len(rewards) + n_stale_failures, sum(rewards)
    assert anchored(rewards, tried, n_right, mode="scale") == anchored(rewards, tried, n_right)


@given(graded_groups, st.sampled_from(["nothing", "std", "sample_std", "baseline"]))
def test_anchored_is_centred_when_nothing_was_pruned(rewards: list[F], divide_by: Any) -> None:
    """Oracle 5.4, to the last bit; downsample where it leaves nothing out."""
    for mode in ("shift", "scale", "recompute", "none"):
        got = anchored(rewards, len(rewards), sum(rewards), mode=mode, divide_by=divide_by)
        assert got == centred(rewards, divide_by=divide_by)
    if 2 * rewards.count(max(rewards)) >= len(rewards):
        got = anchored(rewards, len(rewards), sum(rewards), mode="downsample", divide_by=divide_by)
        assert got == centred(rewards, divide_by=divide_by)


def exactly(rewards: list[F], b: F, mode: str) -> list[F | None]:
    """The definitions of the modes, one attempt at a time."""
    top = max(rewards)
    if mode == "downsample":
        n_top = rewards.count(top)
        others = [i for i, reward in enumerate(rewards) if reward != top][-n_top:]
        kept = [i for i, reward in enumerate(rewards) if reward == top or i in others]
        of_kept = iter(exactly([rewards[i] for i in kept], b, "shift"))
        return [next(of_kept) if i in kept else None for i in range(len(rewards))]
    n_other = len(rewards) - rewards.count(top)
    if mode == "shift":
        delta = (len(rewards) * b - sum(rewards)) / n_other
        if any(reward != top and reward + delta >= top for reward in rewards):
            mode = "recompute"
        else:
            return [reward - b if reward == top else reward + delta - b for reward in rewards]
    if mode == "recompute":
        b = F(sum(rewards)) / len(rewards)
    rest = sum(reward - b for reward in rewards if reward != top)
    factor = -(len(rewards) - n_other) * (top - b) / rest if mode == "scale" and rest else F(1)
    return [reward - b if reward == top else (reward - b) * factor for reward in rewards]


@given(
    graded_groups,
    st.lists(graded_rewards, max_size=30),
    st.sampled_from(["shift", "scale", "recompute", "none", "downsample"]),
    st.sampled_from(["nothing", "baseline"]),
)
def test_rational_weights_are_exact_and_rounded_once(
    rewards: list[F], stale: list[F], mode: Any, divide_by: Any
) -> None:
    tried, total = len(rewards) + len(stale), F(sum(rewards) + sum(stale))
    divisor = total / tried if divide_by == "baseline" else F(1)
    weights = anchored(rewards, tried, total, mode=mode, divide_by=divide_by)
    assert weights == tuple(None if w is None else float(w / divisor) for w in exactly(rewards, total / tried, mode))
    assert not any(str(weight) == "-0.0" for weight in weights)
    centred_exactly = [float(r - F(sum(rewards)) / len(rewards)) for r in rewards]
    assert centred(rewards) == tuple(centred_exactly)


@given(binary_groups, st.integers(0, 300))
def test_what_sums_to_zero(rewards: list[int], n_stale_failures: int) -> None:
    """Oracles 5.1 and 5.5: every mode but none, whose rest is n+ - n_s b."""
    tried, n_right = len(rewards) + n_stale_failures, sum(rewards)
    for mode in ("shift", "scale", "recompute", "downsample"):
        weights = anchored(rewards, tried, n_right, mode=mode)
        assert sum(weight or 0.0 for weight in weights) == pytest.approx(0, abs=1e-12)
    rest = sum(weight or 0.0 for weight in anchored(rewards, tried, n_right, mode="none"))
    assert rest == pytest.approx(n_right - len(rewards) * n_right / tried, abs=1e-12)


@given(graded_groups, st.lists(graded_rewards, max_size=30))
def test_recompute_and_none_equal_their_formulas(rewards: list[F], stale: list[F]) -> None:
    tried, total = len(rewards) + len(stale), sum(rewards) + sum(stale)
    b = F(total) / tried
    assert anchored(rewards, tried, total, mode="recompute") == centred(rewards)
    assert anchored(rewards, tried, total, mode="none") == tuple(float(reward - b) for reward in rewards)


@given(graded_groups, st.lists(graded_rewards, max_size=30))
def test_downsample_keeps_as_many_of_each_and_sums_to_zero(rewards: list[F], stale: list[F]) -> None:
    tried, total = len(rewards) + len(stale), sum(rewards) + sum(stale)
    weights = anchored(rewards, tried, total, mode="downsample")
    top = max(rewards)
    n_top, n_other = rewards.count(top), len(rewards) - rewards.count(top)
    kept = [i for i, weight in enumerate(weights) if weight is not None]
    others = [i for i, reward in enumerate(rewards) if reward != top]
    assert [i for i in kept if rewards[i] == top] == [i for i, reward in enumerate(rewards) if reward == top]
    assert [i for i in kept if rewards[i] != top] == others[-min(n_top, n_other) :]
    assert sum(weight for weight in weights if weight is not None) == pytest.approx(0, abs=1e-12 * len(rewards))


def test_the_fallback_is_told_for_what_is_kept() -> None:
    """Oracle 6.4 in the modes: only those that shift can fall back, and downsample shifts what it keeps."""
    rewards = [F(".5"), F(".95"), F(1)]
    for mode, falls_back in (
        ("shift", True),
        ("downsample", False),
        ("scale", False),
        ("recompute", False),
        ("none", False),
    ):
        assert shift_reaches_max(rewards, 10, 9, mode=mode) == falls_back, mode  # type: ignore[arg-type]
    turned = [F(".95"), F(".5"), F(1)]  # .95 is dropped, .5 moves up to .8
    assert anchored(turned, 10, 9, mode="downsample") == (None, -0.1, 0.1)
    assert shift_reaches_max([F(".9"), F(".8"), F(1)], 100, 101, mode="downsample"), "a mean above the maximum kept"
    assert anchored([F(".9"), F(".8"), F(1)], 100, 101, mode="downsample") == (None, -0.1, 0.1)


def test_a_mean_of_zero_or_below_is_not_divided_by() -> None:
    """Length penalties take rewards below 0: MaxRL has nothing to divide by there."""
    assert centred([1, -1], divide_by="baseline") == (1.0, -1.0)
    assert centred([-1, -2], divide_by="baseline") == (0.5, -0.5)
    assert anchored([1, 0], 8, -2, divide_by="baseline") == anchored([1, 0], 8, -2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="mode = 'shifted' must be one of shift, scale"):
        anchored([1, 0], 4, 1, mode="shifted")  # type: ignore[arg-type]
    for refuses in (centred, lambda rewards, divide_by: anchored(rewards, 4, 1, divide_by=divide_by)):
        with pytest.raises(ValueError, match="divide_by = 'max' must be one of nothing, std"):
            refuses([1, 0], divide_by="max")


def test_downsample_of_one_success() -> None:
    assert anchored([0, 0, 1, 0, 0], 10, 1, mode="downsample") == (None, None, 0.9, None, -0.9)


@given(graded_groups, st.lists(graded_rewards, max_size=10))
def test_divisors(rewards: list[F], stale: list[F]) -> None:
    tried, total = len(rewards) + len(stale), sum(rewards) + sum(stale)
    plain = anchored(rewards, tried, total)
    mean = sum(rewards) / F(len(rewards))
    squares = sum((reward - mean) ** 2 for reward in rewards)
    divisors = {
        "std": sqrt(squares / len(rewards)) + STD_EPS,
        "sample_std": sqrt(squares / (len(rewards) - 1)) + STD_EPS,
    }
    if total:
        divisors["baseline"] = float(F(total) / tried)
    for name, divisor in divisors.items():
        got = anchored(rewards, tried, total, divide_by=name)  # type: ignore[arg-type]
        assert got == pytest.approx([weight / divisor for weight in plain if weight is not None], rel=1e-9)


@given(graded_groups)
def test_leave_one_out_is_against_the_mean_of_the_others(rewards: list[F]) -> None:
    n, total = len(rewards), sum(rewards)
    assert leave_one_out(rewards) == tuple(float(r - (total - r) / F(n - 1)) for r in rewards)


def test_leave_one_out_of_one_is_zero() -> None:
    assert leave_one_out([1]) == (0.0,)
    assert leave_one_out([]) == ()


@given(st.lists(graded_rewards, min_size=1, max_size=12))
def test_virtual_maximum_is_a_group_with_one_more(rewards: list[F]) -> None:
    more = [*rewards, F(1)]
    mean = sum(more) / F(len(more))
    std = sqrt(sum((reward - mean) ** 2 for reward in more) / len(more))
    expected = [float(reward - mean) / std for reward in rewards] if std else [0.0] * len(rewards)
    assert virtual_maximum(rewards, 1) == pytest.approx(expected, abs=1e-9)


def test_virtual_maximum_of_all_wrong_and_all_right() -> None:
    """Oracle 8.5: -1/sqrt(G)."""
    for n in (1, 4, 16):
        assert virtual_maximum([0] * n, 1) == pytest.approx([-1 / sqrt(n)] * n, rel=1e-15)
        assert virtual_maximum([0] * n, 12) == virtual_maximum([0] * n, 1), "the scale of the scores cancels"
    assert virtual_maximum([1, 1], 1) == (0.0, 0.0)
    assert virtual_maximum([exact(1e-300)], 1) == (-1.0,), "no overflow on the way"


def test_focal_weight_of_a_penalised_or_perfect_group() -> None:
    assert focal((0.5, None), 1.0, 0.5) == (0.0, None)
    assert focal((0.5,), 0.3, 0.0) == (0.5,)
