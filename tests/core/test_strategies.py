"""Strategies: verdicts round by round on hand-made groups, and the settings that are refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import ceil, log, sqrt
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import attempts
from hypothesis import given

from nevergiveup.advantages import anchored, centred
from nevergiveup.strategies import (
    STRATEGIES,
    Allocator,
    DynamicSampling,
    FixedK,
    GvmRaft,
    Knapsack,
    NeverGiveUp,
    NoPositiveResampling,
    ReinforceAda,
    ReinforceAdaOnline,
    ReinforceAdaStatic,
    SpeedRL,
    Strategy,
    fill_knapsack,
    share_out,
)
from nevergiveup.types import Decision, Group, Prompt, Verdict, Waiting, exact

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
    ("cls", "fields", "message"),
    [
        *((cls, {"k": k}, f"k = {k} .* 2 or more") for cls in (NeverGiveUp, FixedK) for k in (0, 1)),
        *((cls, {"k": 1}, "k = 1 .* 2 or more") for cls in (DynamicSampling, NoPositiveResampling)),
        *((cls, {"window": -1}, "window = -1 .* 0 or more") for cls in STRATEGIES.values()),
        *(
            (cls, {"divide_by": "max"}, "divide_by = 'max' .* nothing, std, sample_std, baseline")
            for cls in STRATEGIES.values()
            if "divide_by" in cls.__dataclass_fields__
        ),
        *(
            (cls, {"gamma": gamma}, f"gamma = {gamma} .* at least 0")
            for cls in STRATEGIES.values()
            if "gamma" in cls.__dataclass_fields__
            for gamma in (-0.5, float("nan"), float("inf"))
        ),
        *(
            (cls, {"discount": discount}, f"discount = {discount} .* at most 1")
            for cls in (ReinforceAdaOnline, Knapsack)
            for discount in (0.0, 1.1, float("nan"))
        ),
        (NeverGiveUp, {"p": 1.0}, "p = 1.0 .* use p < 1"),
        (NeverGiveUp, {"p": 1.2}, "p = 1.2 .* from 0 up to"),
        (NeverGiveUp, {"p": -0.1}, "p = -0.1 .* from 0 up to"),
        (NeverGiveUp, {"p": float("nan")}, "p = nan .* from 0 up to"),
        (NeverGiveUp, {"max_attempts": 0}, "max_attempts = 0 .* at least 1"),
        (NeverGiveUp, {"accept": "best"}, "accept = 'best' .* better, above_mean, varied"),
        (NeverGiveUp, {"anchor": "ignore"}, "anchor = 'ignore' .* shift, scale, recompute, none, downsample"),
        (FixedK, {"leave_one_out": True, "divide_by": "std"}, "leave_one_out = true .* divide_by"),
        (NoPositiveResampling, {"threshold": 0.0}, "threshold = 0.0 .* 0.875"),
        (NoPositiveResampling, {"threshold": 1.5}, "threshold = 1.5 .* 0.875"),
        (ReinforceAda, {"per_round": 1}, "per_round = 1 .* at least 2"),
        (ReinforceAda, {"keep": 1}, "keep = 1 .* at least 2"),
        (ReinforceAda, {"max_rounds": 0}, "max_rounds = 0 .* at least 1"),
        (ReinforceAda, {"mode": "both"}, "mode = 'both' .* positive, balanced"),
        (SpeedRL, {"n_init": 1}, "n_init = 1 .* at least 2"),
        (SpeedRL, {"n_cont": 0}, "n_cont = 0 .* at least 1"),
        (ReinforceAdaOnline, {"k_min": 1}, "k_min = 1 .* at least 2"),
        (ReinforceAdaOnline, {"k_max": 3}, "k_max = 3 .* at least 4"),
        (ReinforceAdaOnline, {"eps": 0.0}, "eps = 0.0 .* above 0"),
        (GvmRaft, {"probe": 1}, "probe = 1 .* at least 2"),
        (GvmRaft, {"budget": 0}, "budget = 0 .* at least 1"),
        (GvmRaft, {"block": 0}, "block = 0 .* at least 1"),
        (GvmRaft, {"penalty": -1e-3}, "penalty = -0.001 .* at least 0"),
        (GvmRaft, {"power": 0.5}, "power = 0.5 .* at least 1"),
        (GvmRaft, {"weights": "std"}, "weights = 'std' .* raft, centred"),
        (Knapsack, {"k_min": 1}, "k_min = 1 .* at least 2"),
        (Knapsack, {"k_max": 1}, "k_max = 1 .* at least 2"),
        (Knapsack, {"block": 0}, "block = 0 .* at least 1"),
        (Knapsack, {"budget": 1}, "budget = 1 .* k_min = 2"),
        (Knapsack, {"budget": 129}, "budget = 129 .* k_max = 128"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(cls: Any, fields: dict[str, Any], message: str) -> None:
    """The first word is the field: config.py puts its section in front."""
    with pytest.raises(ValueError, match=f"^{message}"):
        cls(**fields)


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


# ------------------------------------------------------------------------------------ NGU's options


@pytest.mark.parametrize(
    ("rounds", "n_fresh", "better", "above_mean", "varied"),
    [
        ([[0.5] * 4, [0.3] * 4], None, RETRY, TRAIN, TRAIN),  # oracle 6.6, first vector
        ([[0.5] * 4, [0, 0, 0, 0.5]], None, RETRY, TRAIN, TRAIN),  # second vector: strict retries, different accepts
        ([[0.5] * 4, [0.5] * 4], None, RETRY, RETRY, RETRY),
        ([[0.0] * 12, [0.5] * 4], 4, RETRY, RETRY, RETRY),  # C23b: all old ones stale, n- = 0
        ([[0, 0, 0, 0], [0, 0, 1, 0]], None, TRAIN, TRAIN, TRAIN),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], None, RETRY, RETRY, RETRY),
        ([[1, 0, 0, 0]], None, TRAIN, TRAIN, TRAIN),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], 4, SOLVED, SOLVED, SOLVED),  # C23a
        ([[0, 0, 0, 0], [1, 1, 1, 1]], 5, TRAIN, TRAIN, TRAIN),
    ],
)
def test_accept_rules(rounds: Any, n_fresh: Any, better: Verdict, above_mean: Verdict, varied: Verdict) -> None:
    state = group(*rounds, n_fresh=n_fresh)
    assert verdict(NeverGiveUp(), state) == better
    assert verdict(NeverGiveUp(accept="above_mean"), state) == above_mean
    assert verdict(NeverGiveUp(accept="varied"), state) == varied


@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=4))
def test_accept_rules_agree_on_binary_rewards(rounds: list[list[int]]) -> None:
    """As long as the chain goes on as chains do: earlier rounds of the same reward throughout, all wrong."""
    state = group(*[[0, 0, 0, 0] for _ in rounds[:-1]], rounds[-1])
    verdicts = {verdict(NeverGiveUp(accept=accept), state) for accept in ("better", "above_mean", "varied")}  # type: ignore[arg-type]
    assert len(verdicts) == 1


def test_virtual_maximum_trains_what_is_given_up() -> None:
    ngu = NeverGiveUp(p=0.5, virtual_max=True)
    state = group([0, 0, 0, 0])
    assert verdict(ngu, state, u=0.4) == RETRY
    assert verdict(ngu, state, u=0.6) == TRAIN
    at_weigh = group([0, 0, 0, 0], [0] * 4)  # best_before is then the chain's best
    assert ngu.weigh(at_weigh) == pytest.approx([-1 / sqrt(8)] * 8)
    assert NeverGiveUp(p=0.5).weigh(at_weigh) == (None,) * 8


def test_virtual_maximum_is_not_for_groups_whose_success_went_stale() -> None:
    ngu = NeverGiveUp(virtual_max=True)
    assert ngu.weigh(group([1, 0, 0, 0], [0, 0], n_fresh=2)) == (None, None), "the best of the chain is 1"
    assert ngu.weigh(group([1, 1, 1, 1], [1, 1], n_fresh=2)) == (None, None), "all right: nothing to push away from"


def test_modes_and_divisors_reach_the_weights() -> None:
    state = group([0] * 252, [1, 0, 0, 0], n_fresh=4)
    for mode in ("shift", "scale", "recompute", "none"):
        for divide_by in ("nothing", "std", "sample_std", "baseline"):
            got = NeverGiveUp(anchor=mode, divide_by=divide_by).weigh(state)  # type: ignore[arg-type]
            assert got == anchored([1, 0, 0, 0], 256, 1, mode=mode, divide_by=divide_by)  # type: ignore[arg-type]
    assert NeverGiveUp(anchor="downsample").weigh(state) == (1 - 1 / 256, None, None, -(1 - 1 / 256))
    halved = NeverGiveUp(gamma=1.0).weigh(group([1, 0]))
    assert halved == (0.25, -0.25), "(1 - b) times .5 and -.5"


def test_fallback_of_the_shift_is_told() -> None:
    """Oracle 6.4."""
    state = group([0.9] * 17, [0.5, 0.95, 1], n_fresh=3)
    ngu = NeverGiveUp()
    assert ngu.falls_back(state)
    assert ngu.weigh(state) == centred([exact(0.5), exact(0.95), 1])
    assert not ngu.falls_back(group([0] * 20, [1, 0]))
    assert not NeverGiveUp(anchor="none").falls_back(state)
    assert NeverGiveUp(anchor="downsample").falls_back(group([0.9] * 97, [0.8, 0.95, 1], n_fresh=3)) is False
    assert NeverGiveUp(anchor="downsample").falls_back(group([1] * 97, [0.8, 0.9, 0.95], n_fresh=3)), "b is above .95"


@st.composite
def chains(draw: Any, n_rounds: int = 3) -> Group:
    """Any chain of one to three rounds of four, of which any number of the newest attempts survives."""
    reward = draw(st.sampled_from([st.integers(0, 1), st.sampled_from([0, 1, Fraction(7, 12), exact(0.1)])]))
    rounds = draw(st.lists(st.lists(reward, min_size=4, max_size=4), min_size=1, max_size=n_rounds))
    return group(*rounds, n_fresh=draw(st.integers(0, 4 * len(rounds))))


@given(chains(n_rounds=1), st.floats(0, 1, exclude_max=True))
def test_p_0_decides_as_dynamic_sampling(state: Group, u: float) -> None:
    """Oracle 3.7: without retries every chain has one round, whatever of it is fresh."""
    assert NeverGiveUp(p=0.0).judge(state, Coin(u)) == DynamicSampling().judge(state, Coin(u))


@given(chains(), st.sampled_from(list(STRATEGIES)))
def test_weights_are_finite_and_silent_without_contrast(state: Group, name: str) -> None:
    """One an attempt; a group without contrast gets zeros or nothing, of every strategy with its defaults but RAFT."""
    weights = STRATEGIES[name]().weigh(state)
    assert len(weights) == len(state.fresh)
    assert all(weight is None or abs(weight) < 1e6 for weight in weights)
    if not state.has_contrast and name != "gvm-raft":
        assert all(not weight for weight in weights)


# ------------------------------------------------------------------------------- one prompt at a time


@pytest.mark.parametrize(
    ("threshold", "rewards", "expected"),
    [
        (1.0, [1] * 16, Decision(SOLVED, retire=True)),
        (1.0, [1] * 15 + [0], Decision(TRAIN)),
        (0.875, [1] * 14 + [0] * 2, Decision(TRAIN, retire=True)),
        (0.875, [1] * 13 + [0] * 3, Decision(TRAIN)),
        (1.0, [0] * 16, Decision(GIVE_UP)),
    ],
)
def test_no_positive_resampling_retires(threshold: float, rewards: list[int], expected: Decision) -> None:
    assert NoPositiveResampling(16, threshold).judge(group(rewards), Coin(0)) == expected


def test_the_threshold_is_met_exactly_and_on_any_scale() -> None:
    """.55 * 100 is 55.00000000000001 in floats; 7 of 8 of twelve points each are .875."""
    assert NoPositiveResampling(100, 0.55).judge(group([1] * 55 + [0] * 45), Coin(0)) == Decision(TRAIN, retire=True)
    assert NoPositiveResampling(100, 0.55).judge(group([1] * 54 + [0] * 46), Coin(0)) == Decision(TRAIN)
    twelfths = group([12] * 7 + [0], max_reward=12)
    assert NoPositiveResampling(8, 0.875).judge(twelfths, Coin(0)).retire
    assert not NoPositiveResampling(8, 0.876).judge(twelfths, Coin(0)).retire
    tenths = group([0.9] * 8)
    assert NoPositiveResampling(8, 0.875).judge(tenths, Coin(0)) == Decision(GIVE_UP, retire=True), (
        "without contrast too"
    )


@pytest.mark.parametrize(
    ("mode", "rounds", "expected"),
    [
        ("positive", [[0] * 8], RETRY),
        ("positive", [[0] * 8, [0] * 7 + [1]], TRAIN),
        ("positive", [[0] * 8] * 4, GIVE_UP),
        ("positive", [[1] * 8], SOLVED),
        ("balanced", [[0] * 7 + [1]], RETRY),
        ("balanced", [[0] * 6 + [1] * 2], TRAIN),
        ("balanced", [[1] * 7 + [0]], RETRY),
        ("balanced", [[1] * 8], RETRY),
        ("balanced", [[1] * 8] * 4, SOLVED),
        ("balanced", [[0] * 7 + [1], [0] * 8, [0] * 8, [0] * 8], TRAIN),
    ],
)
def test_reinforce_ada_stops(mode: Any, rounds: list[list[int]], expected: Verdict) -> None:
    assert verdict(ReinforceAda(mode), group(*rounds)) == expected


def test_all_right_after_stale_failures_is_solved() -> None:
    """Not given up: what it lacks is a fresh failure to contrast with."""
    state = group([0] * 8, [1] * 8, n_fresh=8)
    assert verdict(ReinforceAda("positive"), state) == SOLVED
    assert verdict(DynamicSampling(), state) == SOLVED


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0, 1, 0, 1, 0, 1, 0, 0], {3, 5, 6, 7}),  # half right, half wrong, the newest
        ([0, 1, 0, 0, 0, 0, 0, 0], {1, 5, 6, 7}),  # one right: filled up with wrong ones
        ([1, 1, 1, 1, 1, 1, 0, 1], {4, 5, 6, 7}),
        ([1, 0], {0, 1}),
    ],
)
def test_reinforce_ada_keeps_half_of_each(rewards: list[int], kept: set[int]) -> None:
    weights = ReinforceAda().weigh(group(rewards))
    assert {i for i, weight in enumerate(weights) if weight is not None} == kept
    b = sum(rewards) / len(rewards)
    assert [weights[i] for i in sorted(kept)] == pytest.approx([rewards[i] - b for i in sorted(kept)])


@given(chains(), st.integers(2, 6))
def test_reinforce_ada_keep_rule(state: Group, keep: int) -> None:
    """keep, or all there are; half of them at the maximum unless one side is short; the newest of each side."""
    weights = ReinforceAda(keep=keep).weigh(state)
    rewards = [attempt.reward for attempt in state.fresh]
    if not state.has_contrast:
        assert all(weight is None for weight in weights)
        return
    best = [i for i, reward in enumerate(rewards) if reward == max(rewards)]
    others = [i for i, reward in enumerate(rewards) if reward != max(rewards)]
    kept = [i for i, weight in enumerate(weights) if weight is not None]
    assert len(kept) == min(keep, len(rewards))
    n_best = sum(i in best for i in kept)
    assert [i for i in kept if i in best] == best[len(best) - n_best :]
    assert [i for i in kept if i in others] == others[len(others) - (len(kept) - n_best) :]
    is_short = len(best) < keep // 2 or len(others) < keep - keep // 2
    assert n_best == keep // 2 or (is_short and n_best >= min(len(best), keep // 2))
    assert [weights[i] for i in kept] == [float(rewards[i] - state.baseline) for i in kept]


def test_reinforce_ada_divides_by_the_deviation_of_all_fresh_draws() -> None:
    weights = ReinforceAda(divide_by="std").weigh(group([1] * 2 + [0] * 14))
    std = sqrt(0.125 * 0.875)
    assert [weight for weight in weights if weight is not None] == pytest.approx(
        [0.875 / std] * 2 + [-0.125 / std] * 2, rel=1e-5
    )


def test_reinforce_ada_takes_its_mean_over_all_draws() -> None:
    weights = ReinforceAda().weigh(group([0] * 24, [1, 0, 0, 0, 0, 0, 0, 0], n_fresh=8))
    assert [weight for weight in weights if weight is not None] == [31 / 32, -1 / 32, -1 / 32, -1 / 32]


def test_speed_asks_on_where_the_first_few_differ() -> None:
    speed = SpeedRL(n_init=4, n_cont=12)
    assert speed.judge(group([1, 0, 0, 0]), Coin(0)) == Decision(RETRY, 12)
    assert verdict(speed, group([0] * 4)) == GIVE_UP
    assert verdict(speed, group([1] * 4)) == SOLVED
    assert verdict(speed, group([1, 0, 0, 0], [0] * 12)) == TRAIN
    assert speed.weigh(group([1, 0, 0, 0], [0] * 12)) == (0.9375, *[-0.0625] * 15)


# ------------------------------------------------------------------------------------------- allocators


def waits(memory: Any = None, *rounds: list[Any], norm: float | None = None) -> Waiting:
    return Waiting(Prompt("p0"), group(*rounds) if rounds else None, memory, norm)


@pytest.mark.parametrize(
    ("n_right", "draws"), [(0, 32), (1, 32), (2, 16), (3, 16), (4, 8), (7, 8), (8, 4), (31, 4), (32, 4)]
)
def test_static_estimates(n_right: int, draws: int) -> None:
    ada = ReinforceAdaStatic()
    memory = ada.learn(None, Prompt("p0"), [1] * n_right + [0] * (32 - n_right))
    assert memory == (32, n_right)
    assert ada.learn(memory, Prompt("p0"), [1] * 4) == memory, "later visits change nothing"
    assert ada.allocate([waits(), waits(memory)]) == [Decision(RETRY, 32), Decision(RETRY, draws)]


def test_static_estimates_wait_for_32_verdicts() -> None:
    ada, prompt = ReinforceAdaStatic(), Prompt("p0", max_reward=12)
    memory = ada.learn(None, prompt, [12, 6] * 10)
    assert memory == (20, 10), "a partial score is not right"
    assert ada.allocate([waits(memory)]) == [Decision(RETRY, 12)]
    memory = ada.learn(memory, prompt, [0] * 10)
    assert ada.allocate([waits(memory)]) == [Decision(RETRY, 4)], "the smallest group"
    assert ada.learn(memory, prompt, [0, 0, 12, 12]) == (32, 10)
    assert verdict(ada, group([1, 0, 0, 0])) == TRAIN
    assert verdict(ada, group([0] * 4)) == GIVE_UP
    assert ada.weigh(group([1, 0, 0, 0])) == (0.75, -0.25, -0.25, -0.25)


def test_online_estimates() -> None:
    """N ~ 1/sqrt(p + eps): 32 for what is never solved, 4 times fewer at 15 eps more; forgotten by .9 a visit."""
    ada = ReinforceAdaOnline()
    memory = ada.learn(None, Prompt("p0"), [1, 0, 0, 0])
    assert memory == pytest.approx((0.9 + 1, 0.9 + 3))
    assert ada.learn(memory, Prompt("p0"), [1] * 4) == pytest.approx((0.9 * 1.9 + 4, 0.9 * 3.9))
    half = ada.learn(None, Prompt("p0", max_reward=12), [6, 6])
    assert half == pytest.approx((0.9 + 1, 0.9 + 1)), "partial scores count in part"
    never, rarely, always = (0.0, 1.0), (0.75, 0.25), (1.0, 0.0)
    assert [d.draws for d in ada.allocate([waits(m) for m in (never, rarely, always)])] == [32, 8, 7]
    assert ada.allocate([waits()])[0].draws == round(32 * sqrt(0.05 / 0.55))
    assert ReinforceAdaOnline(k_max=8).allocate([waits(always)])[0].draws == 4
    weights = ada.weigh(group([1, 0, 0, 0]))
    assert weights == pytest.approx([0.75 / sqrt(0.3), *[-0.25 / sqrt(0.3)] * 3])
    assert ada.weigh(group([0, 0])) == (0.0, 0.0)


@given(st.floats(0, 1), st.floats(1e-3, 0.5))
def test_online_law(p: float, eps: float) -> None:
    """N sqrt(p + eps) is constant within rounding, and N within its range."""
    free = ReinforceAdaOnline(k_min=2, k_max=4096, eps=eps)
    n = free.allocate([waits((p, 1 - p))])[0].draws
    assert n == 2 or abs(n - 4096 * sqrt(eps / (p + eps))) <= 0.5
    assert 4 <= ReinforceAdaOnline(eps=eps).allocate([waits((p, 1 - p))])[0].draws <= 32


@given(st.lists(st.lists(st.sampled_from([-3, 0, 6, 12, Fraction(1, 3)]), min_size=1, max_size=8), max_size=8))
def test_pass_rates_are_discounted_mean_scores(visits: list[list[Any]]) -> None:
    """Mean reward as a share of max_reward, clipped to [0, 1]; what came before counts .9 at each new visit."""
    for strategy in (ReinforceAdaOnline(), Knapsack()):
        memory, alpha, beta = None, 1.0, 1.0
        for rewards in visits:
            memory = strategy.learn(memory, Prompt("p0", max_reward=12), rewards)
            rate = max(0.0, float(sum(rewards) / Fraction(12 * len(rewards))))
            alpha, beta = 0.9 * alpha + len(rewards) * rate, 0.9 * beta + len(rewards) * (1 - rate)
        assert (memory or (1.0, 1.0)) == pytest.approx((alpha, beta), abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 30)), min_size=1, max_size=20), st.integers(2, 12))
def test_knapsack_spends_its_budget_exactly(memories: list[tuple[float, float]], budget: int) -> None:
    draws = [d.draws for d in Knapsack(budget=budget, k_max=16).allocate([waits(memory) for memory in memories])]
    assert sum(draws) == budget * len(memories)
    assert all(2 <= n <= 16 for n in draws)


def test_gvm_published_shares() -> None:
    """Oracle 8.5: equal G, p = .5, .1, .02; and the same with scores out of 12."""
    for scale in (1, 12):
        rounds = [[scale] * n + [0] * (50 - n) for n in (25, 5, 1)]
        probes = [Waiting(Prompt("p", max_reward=scale), group(r, max_reward=scale), None, 2.5) for r in rounds]
        draws = [decision.draws for decision in GvmRaft(budget=10_000).allocate(probes)]
        assert [n / 30_000 for n in draws] == pytest.approx([0.1720, 0.3674, 0.4606], abs=1e-4)
    tiny = waits(None, [exact(1e-200), 0])
    assert sum(d.draws for d in GvmRaft(penalty=0, power=9.0).allocate([tiny, waits(None, [1, 0])])) == 16, (
        "no overflow"
    )


def test_gvm_shares_follow_pass_rates_and_norms() -> None:
    gvm = GvmRaft(probe=4, budget=100)
    assert gvm.judge(group([1, 0, 0, 0]), Coin(0)).verdict == Verdict.WAIT
    probes = [waits(None, [1, 1, 0, 0]), waits(None, [1, 0, 0, 0]), waits(None, [0, 0, 0, 0])]
    by_p = gvm.allocate(probes)
    assert sum(decision.draws for decision in by_p) == 300
    assert by_p[2] == Decision(GIVE_UP)
    share = [1 / sqrt(p + 1e-3 / p) for p in (0.5, 0.25)]
    assert by_p[0].draws / 300 == pytest.approx(share[0] / sum(share), abs=1 / 300)
    measured = [
        waits(None, [1, 1, 0, 0], norm=1.0),
        waits(None, [1, 1, 0, 0], norm=3.0),
        waits(None, [1, 0, 0, 0], norm=0.0),
    ]
    decisions = gvm.allocate(measured)
    assert [decision.draws for decision in decisions] == [75, 225, 0]
    assert decisions[2] == Decision(TRAIN), "it has a right one, and is trained on as it is"


def test_gvm_weights() -> None:
    state = group([1, 0, 1, 0], [0, 0])
    assert GvmRaft().weigh(state) == (1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    assert GvmRaft(weights="centred").weigh(state) == centred([1, 0, 1, 0, 0, 0])
    assert GvmRaft().weigh(group([0, 0])) == (None, None)
    assert verdict(GvmRaft(), group([0] * 8, [0] * 3)) == GIVE_UP
    assert verdict(GvmRaft(), group([1] * 8, [1] * 3)) == TRAIN
    assert verdict(GvmRaft(weights="centred"), group([1] * 8, [1] * 3)) == SOLVED


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, 500))
def test_shares_sum_to_the_budget(shares: list[float], total: int) -> None:
    counts = share_out(total, shares)
    whole = sum(shares)
    assert sum(counts) == (total if whole > 0 else 0)
    for count, share in zip(counts, shares, strict=True):
        assert whole == 0 or abs(count - total * share / whole) <= 1
        assert share > 0 or count == 0


def value(rates: list[float], counts: Any) -> float:
    return sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2 for p, n in zip(rates, counts, strict=True))


@pytest.mark.parametrize("rates", [[0.5, 0.1, 0.02], [0.3, 0.3, 0.9], [0.01, 0.02, 0.03], [0.0, 0.5, 1.0]])
def test_the_knapsack_is_filled_best(rates: list[float]) -> None:
    for total in (6, 9, 16):
        counts = fill_knapsack(rates, total, 2, 10)
        assert sum(counts) == total
        best = max(value(rates, c) for c in product(range(2, 11), repeat=3) if sum(c) == total)
        assert value(rates, counts) == pytest.approx(best, abs=1e-12)
    assert fill_knapsack(rates, 1000, 2, 10) == [10, 10, 10]


def test_knapsack_published_shares() -> None:
    """Oracle 8.5."""
    assert fill_knapsack([0.5, 0.1, 0.02], 16, 2, 128) == [6, 8, 2]


def test_knapsack_gives_most_to_what_is_in_between() -> None:
    knapsack = Knapsack(budget=8)
    easy, middle, hopeless = (9.0, 0.1), (2.0, 8.0), (0.01, 9.0)
    draws = [decision.draws for decision in knapsack.allocate([waits(m) for m in (easy, middle, hopeless)])]
    assert sum(draws) == 24
    assert draws[1] == max(draws)
    assert draws[0] == 2


def test_who_is_an_allocator() -> None:
    allocators = {name for name, cls in STRATEGIES.items() if isinstance(cls(), Allocator)}
    assert allocators == {"ada-static", "ada-online", "gvm-raft", "knapsack"}
    assert [name for name in allocators if STRATEGIES[name]().wants_gradient_norms] == ["gvm-raft"]  # type: ignore[union-attr]


def test_every_strategy_says_what_it_costs() -> None:
    for cls in STRATEGIES.values():
        assert "completions" in cls().cost_in_words()
