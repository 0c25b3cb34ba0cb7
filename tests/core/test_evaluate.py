"""Unbiased pass@k, intervals and buckets (case C40, oracles 8.1 and 8.2)."""

from random import Random

import pytest

from nevergiveup.evaluate import (
    assign_buckets,
    bucket_of,
    mean_by_bucket,
    mean_pass_at_k,
    pass_at_k,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (8, 2, 4, 0.785714),
        (4, 1, 4, 1.0),
        (1024, 1, 256, 0.25),
        (32, 1, 8, 0.25),
        (16, 4, 4, 0.728022),
        (10, 3, 5, 0.916667),
        (7, 0, 3, 0.0),
    ],
)
def test_pass_at_k_vectors(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-6)


def test_too_few_samples_are_refused_never_one():
    with pytest.raises(ValueError, match="needs at least 8 samples of a prompt, there are 4"):
        pass_at_k(4, 4, 8)


def test_prompts_with_too_few_samples_are_left_out_and_counted():
    value, n_left_out = mean_pass_at_k([(8, 8), (6, 0)], 8)
    assert (value, n_left_out) == (1.0, 1)


def test_pass_at_k_is_unbiased():
    """Mean over many draws of n = 10 samples is 1 - (1 - p)^k, within 4 standard errors."""
    rng, p, n, k, draws = Random(3), 0.2, 10, 4, 20_000
    values = [pass_at_k(n, sum(rng.random() < p for _ in range(n)), k) for _ in range(draws)]
    mean = sum(values) / draws
    error = (sum((v - mean) ** 2 for v in values) / draws / draws) ** 0.5
    assert abs(mean - (1 - 0.8**4)) < 4 * error


def test_none_of_32_still_allows_nine_percent():
    low, high = wilson_interval(0, 32)
    assert low == 0.0
    assert 0.0894 < high < 0.12  # the exact one-sided bound is .0894 (oracle 8.2); Wilson's two-sided is wider


def test_wilson_covers_at_its_level():
    rng, p, n = Random(5), 0.1, 50
    intervals = [wilson_interval(sum(rng.random() < p for _ in range(n)), n) for _ in range(4000)]
    covered = sum(low <= p <= high for low, high in intervals) / len(intervals)
    assert 0.93 < covered < 0.99


def test_bucket_bounds():
    assert [bucket_of(p) for p in (0.71, 0.7, 0.3, 0.29, 0.02, 0.019, 0.0)] == [
        "easy", "medium", "medium", "hard", "hard", "extra_hard", "extra_hard",
    ]  # fmt: skip


def test_bucket_trap_and_the_way_out():
    """1000 prompts at p = .1: the samples that made the "extra hard" bucket show a gain of .10 against a re-test that is
    not there between two fresh sets of samples."""
    rng, p = Random(7), 0.1
    draw = lambda: {str(i): sum(rng.random() < p for _ in range(8)) / 8 for i in range(1000)}  # noqa: E731
    first, second, third = draw(), draw(), draw()
    buckets = assign_buckets(first)
    zero = mean_by_bucket(first, buckets)["extra_hard"], mean_by_bucket(second, buckets)["extra_hard"]
    assert zero[0] == 0.0
    assert zero[1] - zero[0] > 0.08
    honest = mean_by_bucket(third, buckets)["extra_hard"] - zero[1]
    assert abs(honest) < 4 * (2 * p * (1 - p) / 8 / 430) ** 0.5
