"""Strategies: verdicts round by round on hand-made groups, and the settings that are refused."""

from __future__ import annotations

from collections.abc import Callable
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
