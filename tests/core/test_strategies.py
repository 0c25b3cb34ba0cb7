"""Strategies: verdicts round by round on hand-made groups, and the settings that are refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, log, sqrt
from random import Random
from typing import Any

import pytest
from driver import attempts

from nevergiveup.advantages import anchored, centred
from nevergiveup.strategies import STRATEGIES, DynamicSampling, FixedK, NeverGiveUp, Strategy
from nevergiveup.types import Group, Prompt, Verdict, exact

SOLVED, TRAIN, RETRY, GIVE_UP = Verdict.SOLVED, Verdict.TRAIN, Verdict.RETRY, Verdict.GIVE_UP


class Coin(Random):
    """A generator that shows the number it is told to, and counts."""

    def __init__(self, u: float) -> None:
        super().__init__()
        self.u = u
        self.n_draws = 0

    def random(self) -> float:
        self.n_draws += 1
        return self.u


def group(*rounds: list[Any], n_fresh: int | None = None, max_reward: int = 1) -> Group:
    """The group after these rounds; only the newest `n_fresh` attempts survive (all of them by default)."""
    exact_rounds = [[exact(reward) for reward in rewards] for rewards in rounds]
    flat = [reward for rewards in exact_rounds for reward in rewards]
    earlier = [reward for rewards in exact_rounds[:-1] for reward in rewards]
    return Group(
        prompt=Prompt("p0", max_reward=max_reward),
        fresh=tuple(attempts(flat[len(flat) - (len(flat) if n_fresh is None else n_fresh) :])),
        tried=len(flat),
        total=sum(flat),
        best_before=max(earlier, default=None),
        new_min=min(exact_rounds[-1]),
        new_max=max(exact_rounds[-1]),
        rounds=len(rounds),
    )


def verdict(strategy: Strategy, state: Group, u: float = 0.0) -> Verdict:
    return strategy.judge(state, Coin(u)).verdict


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[1, 1, 1, 1]], SOLVED),
        ([[0, 0, 0, 0]], RETRY),
        ([[1, 0, 0, 0]], TRAIN),
        ([[0] * 4, [0] * 4], RETRY),
        ([[0] * 4, [0, 0, 1, 0]], TRAIN),
        ([[0] * 4, [1, 1, 1, 1]], TRAIN),  # the failures are fresh: there is contrast
        ([[0.1] * 4], RETRY),  # no contrast and not solved, though not zero either
        ([[0.7] * 16], RETRY),
        ([[0.95] * 7], RETRY),
        ([[0.1] * 4] * 6, RETRY),
        ([[0.95] * 7 + [0.0]], TRAIN),
        ([[1.0] * 7], SOLVED),
        ([[0.5] * 4, [0.3] * 4], RETRY),  # oracle 6.6: some survivor is above the mean, but nothing beats .5
        ([[0.5] * 4, [0, 0, 0, 0.5]], RETRY),  # varied, but a tie with the best
        ([[0.5] * 4, [0, 0, 0, 0.6]], TRAIN),
        ([[0.5] * 4, [0.3] * 4, [0.4] * 4], RETRY),  # better than the round before is not better than the chain
    ],
)
def test_ngu_verdicts_when_nothing_is_stale(rounds: list[list[float]], expected: Verdict) -> None:
    assert verdict(NeverGiveUp(), group(*rounds)) is expected
    if expected is RETRY:
        assert verdict(NeverGiveUp(), group(*rounds), u=0.99) is GIVE_UP


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[0] * 12, [1, 1, 1, 1]], SOLVED),  # solved after retry: no failure is left to contrast with
        ([[0] * 12, [0.5] * 4], RETRY),  # progress without contrast
        ([[0] * 4, [1, 0, 0, 0]], TRAIN),
        ([[0.5] * 4, [0.3, 0.4, 0.4, 0.4]], RETRY),
    ],
)
def test_ngu_verdicts_when_only_the_newest_round_is_fresh(rounds: list[list[float]], expected: Verdict) -> None:
    assert verdict(NeverGiveUp(), group(*rounds, n_fresh=4)) is expected


def test_ngu_draws_the_coin_only_where_it_decides() -> None:
    for rounds, n_draws in [([[1] * 4], 0), ([[1, 0, 0, 0]], 0), ([[0] * 4], 1), ([[0] * 4, [1] * 4], 0)]:
        coin = Coin(0.5)
        NeverGiveUp().judge(group(*rounds), coin)
        assert coin.n_draws == n_draws, rounds
    capped = Coin(0.5)
    assert NeverGiveUp(max_attempts=2).judge(group([0] * 4, [0] * 4), capped).verdict is GIVE_UP
    assert capped.n_draws == 0


def test_ngu_asks_for_k_more() -> None:
    assert NeverGiveUp(7).judge(group([0] * 7), Coin(0.0)).draws == 7
    assert NeverGiveUp(7).open(Prompt("p0")) == 7


def test_a_success_that_is_stale_on_arrival_is_no_failure() -> None:
    """Its contrast is judged on the whole round: the scheduler finds it stale when the batch is cut, no coin is drawn."""
    coin = Coin(0.0)
    assert NeverGiveUp().judge(group([0] * 4, [1, 0, 0, 0], n_fresh=1), coin).verdict is TRAIN
    assert coin.n_draws == 0
    assert NeverGiveUp().weigh(group([0] * 4, [1, 0, 0, 0], n_fresh=1)) == (None,)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1] * 4, SOLVED), ([0] * 4, GIVE_UP), ([0.5] * 4, GIVE_UP), ([1, 0, 1, 1], TRAIN), ([0.5, 0.6], TRAIN)],
)
def test_dynamic_sampling_verdicts(rewards: list[float], expected: Verdict) -> None:
    coin = Coin(0.0)
    assert DynamicSampling().judge(group(rewards), coin).verdict is expected
    assert coin.n_draws == 0


def test_fixed_k_trains_on_everything() -> None:
    for rewards in ([0] * 4, [1] * 4, [1, 0, 0, 0]):
        assert verdict(FixedK(), group(rewards)) is TRAIN
    assert FixedK().weigh(group([0] * 4)) == (0.0,) * 4
    assert FixedK(divide_by="std").weigh(group([1] * 4)) == (0.0,) * 4


def test_weights() -> None:
    state = group([0] * 4, [0] * 4, [1, 0, 0, 0], n_fresh=6)
    assert NeverGiveUp().weigh(state) == anchored([0, 0, 1, 0, 0, 0], 12, 1)
    assert FixedK().weigh(state) == centred([0, 0, 1, 0, 0, 0])
    assert DynamicSampling().weigh(state) == centred([0, 0, 1, 0, 0, 0], divide_by="std")
    assert DynamicSampling(divide_by="nothing").weigh(state) == centred([0, 0, 1, 0, 0, 0])
    for strategy in (NeverGiveUp(), DynamicSampling()):
        assert strategy.weigh(group([1] * 4, n_fresh=3)) == (None,) * 3
        assert strategy.weigh(group([1, 0], n_fresh=0)) == ()


@pytest.mark.parametrize(
    ("make", "key", "remedy"),
    [
        (lambda: NeverGiveUp(k=1), "k = 1", "2 or more"),
        (lambda: FixedK(k=0), "k = 0", "2 or more"),
        (lambda: DynamicSampling(k=1), "k = 1", "2 or more"),
        (lambda: NeverGiveUp(p=1.0), "p = 1.0", "use p < 1"),
        (lambda: NeverGiveUp(p=1.2), "p = 1.2", "from 0 up to"),
        (lambda: NeverGiveUp(p=-0.1), "p = -0.1", "from 0 up to"),
        (lambda: NeverGiveUp(p=float("nan")), "p = nan", "from 0 up to"),
        (lambda: NeverGiveUp(window=-1), "window = -1", "0 or more"),
        (lambda: FixedK(window=-2), "window = -2", "0 or more"),
        (lambda: NeverGiveUp(max_attempts=0), "max_attempts = 0", "at least 1"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(make: Callable[[], Any], key: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"p =|k =|window =|max_attempts =") as caught:
        make()
    assert key in str(caught.value)
    assert remedy in str(caught.value)


def test_legal_corners() -> None:
    assert NeverGiveUp(window=0).window == 0
    assert NeverGiveUp(p=1.0, max_attempts=3).p == 1.0
    assert NeverGiveUp(p=0.0).cost_in_words() == "a prompt that is never solved costs 4 completions"


@pytest.mark.parametrize(
    ("strategy", "mean", "worst"),
    [
        (NeverGiveUp(4, 0.95), 80, 360),
        (NeverGiveUp(4, 0.9), 40, 176),
        (NeverGiveUp(16, 0.875), 128, 560),
        (NeverGiveUp(4, 0.95, max_attempts=16), 45, 64),
        (NeverGiveUp(4, 1.0, max_attempts=16), 64, None),
    ],
)
def test_cost_in_words(strategy: NeverGiveUp, mean: int, worst: int | None) -> None:
    """Oracles 2.5 and 2.6: E = K/(1-p), and P(more than r attempts) = p^r."""
    words = strategy.cost_in_words()
    assert f" {mean} completions" in words
    if worst is not None:
        assert f" {worst} at the 99th percentile" in words
        assert strategy.p ** (worst // strategy.k) <= 0.01 or strategy.max_attempts is not None


def test_attempts_of_an_unsolvable_prompt() -> None:
    """Oracle 2.5, p_ngu = .95: spread, median and percentiles of the number of attempts."""
    assert round(sqrt(0.95) / 0.05, 3) == 19.494
    assert [ceil(log(tail) / log(0.95)) for tail in (0.5, 0.05, 0.01)] == [14, 59, 90]


def test_names_on_the_command_line() -> None:
    assert list(STRATEGIES) == [
        "ngu", "fixed", "dapo", "no-positive", "reinforce-ada", "ada-static", "ada-online", "gvm-raft", "speed", "knapsack",
    ]  # fmt: skip
    for name, cls in STRATEGIES.items():
        assert cls.name == name
        assert cls().window == 4


def test_baseline_is_exact_and_of_the_whole_chain() -> None:
    state = group([0.1] * 4, [Fraction(1, 3)] * 2, n_fresh=2)
    assert state.baseline == (4 * Fraction(0.1) + Fraction(2, 3)) / 6
    assert not state.has_contrast
    assert not group([1], n_fresh=0).has_contrast
