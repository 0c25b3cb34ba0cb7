"""The numbers of NGU: closed forms, exactly, and the same numbers out of the real scheduler by Monte Carlo.

Model: every completion of a prompt is right with probability p, independently; the policy stands still. u = 1-p, a = p^K (all
right), z = u^K (all wrong), m = 1-a-z (mixed), rho = p_ngu, g = rho z. When nothing is stale an all-right retry trains, since a
failure survives ("kept"); when only the newest round is fresh it is filtered ("stale").

Monte Carlo: seeded, and within 4 standard errors of the closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import comb, log1p, sqrt
from random import Random

import pytest
from driver import attempts, prompts_named

from nevergiveup.advantages import anchored, centred
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import DynamicSampling, NeverGiveUp, Strategy
from nevergiveup.types import Attempt, Batch, Exact, Group, Prompt, Verdict

F = Fraction


# ------------------------------------------------------------------- exact: the strategy as a Markov chain


class Retries(Random):
    """A coin that always says: try again."""

    def random(self) -> float:
        return 0.0


def binomial(k: int, p: Fraction) -> list[Fraction]:
    return [comb(k, c) * p**c * (1 - p) ** (k - c) for c in range(k + 1)]


@dataclass(frozen=True)
class Round:
    """Probabilities of one round's verdicts; `coin` is what is left to the coin."""

    solved: Fraction
    train: Fraction
    coin: Fraction


def round_of(k: int, p: Fraction, *, first: bool, kept: bool) -> Round:
    """Asks the real strategy about every outcome of a round; earlier rounds were all wrong."""
    share = dict.fromkeys(Verdict, F(0))
    for n_right, probability in enumerate(binomial(k, p)):
        new = attempts([1] * n_right + [0] * (k - n_right))
        old = [] if first else attempts([0] * k)
        group = Group(
            Prompt("p0"), tuple(old + new if kept else new), len(old) + k, n_right,
            None if first else 0, int(n_right == k), int(n_right > 0), 1 if first else 2,
        )  # fmt: skip
        share[NeverGiveUp(k, 0.5).judge(group, Retries()).verdict] += probability
    assert share[Verdict.GIVE_UP] == 0
    return Round(share[Verdict.SOLVED], share[Verdict.TRAIN], share[Verdict.RETRY])


@dataclass(frozen=True)
class ChainOdds:
    """How a chain ends, and what it costs."""

    solved: Fraction
    train: Fraction
    give_up: Fraction
    n_attempts: Fraction
    n_attempts_if_trained: Fraction
    n_attempts_squared_if_trained: Fraction


def chain(k: int, p: Fraction, rho: Fraction, *, kept: bool) -> ChainOdds:
    """Sums the geometric series over rounds of the real verdicts: the first round, then rounds that are all alike."""
    first, later = round_of(k, p, first=True, kept=kept), round_of(k, p, first=False, kept=kept)
    again = rho * first.coin  # a second round happens
    n_later = again / (1 - rho * later.coin)  # expected number of later rounds
    # sums over rounds r >= 2: r g2^(r-2) gives (2 - g2)/(1 - g2)^2, and r^2 g2^(r-2) gives (4 - 3 g2 + g2^2)/(1 - g2)^3
    g2 = rho * later.coin
    train = first.train + n_later * later.train
    trained_rounds = first.train + again * later.train * (2 - g2) / (1 - g2) ** 2
    trained_squares = first.train + again * later.train * (4 - 3 * g2 + g2**2) / (1 - g2) ** 3
    return ChainOdds(
        solved=first.solved + n_later * later.solved,
        train=train,
        give_up=(1 - rho) * (first.coin + n_later * later.coin),
        n_attempts=1 + n_later,
        n_attempts_if_trained=trained_rounds / train if train else F(0),
        n_attempts_squared_if_trained=trained_squares / train if train else F(0),
    )


ROWS = [(F(1, 100), 4, F(95, 100)), (F(1, 10), 4, F(95, 100)), (F(3, 10), 4, F(9, 10)), (F(2, 100), 16, F(7, 8)),
        (F(6, 10), 2, F(1, 2)), (F(0), 4, F(95, 100)), (F(1), 4, F(95, 100)), (F(1, 2), 4, F(0))]  # fmt: skip


@pytest.mark.parametrize(("p", "k", "rho"), ROWS)
def test_chain_closed_forms(p: Fraction, k: int, rho: Fraction) -> None:
    """Oracles 1.1, 2.1 to 2.4 and 2.8, without rounding."""
    a, z = p**k, (1 - p) ** k
    m, g = 1 - a - z, rho * z
    kept, stale = chain(k, p, rho, kept=True), chain(k, p, rho, kept=False)
    for odds in (kept, stale):
        assert odds.solved + odds.train + odds.give_up == 1
        assert odds.n_attempts == 1 / (1 - g)
        assert odds.give_up == z * (1 - rho) / (1 - g)
    assert (kept.solved, kept.train) == (a, m + g * (1 - z) / (1 - g))
    assert (stale.solved, stale.train) == (a / (1 - g), m / (1 - g))
    if kept.train:
        assert kept.n_attempts_if_trained * kept.train == m + z * rho * (1 - z) * (2 - g) / (1 - g) ** 2
    if m:  # the cost of a trained group does not depend on rho: NGU moves budget between prompts
        assert k * stale.n_attempts / stale.train == k / m


@pytest.mark.parametrize("rho", [F(0), F(1, 2), F(95, 100)])
def test_cost_of_a_trained_group(rho: Fraction) -> None:
    """Oracle 2.8, p = .01: asking again makes no success cheaper."""
    odds = chain(4, F(1, 100), rho, kept=False)
    assert float(4 * odds.n_attempts / odds.train) == pytest.approx(101.51, abs=5e-3)


def test_one_group() -> None:
    """Oracles 1.2 to 1.4."""
    p = F(95, 100)
    assert round(float(p**4), 6) == 0.814506
    assert round(float(p**32), 6) == 0.193711
    assert round(float(sum(binomial(32, p)[30:32])), 6) == 0.592403
    assert [round(float(1 / m), 3) for m in (mixed(4, F(95, 100)), mixed(4, F(1, 2)), mixed(4, F(1, 100)))] == [
        5.391, 1.143, 25.378,
    ]  # fmt: skip
    assert mixed(4, F(1, 2)) == F(7, 8) == max(mixed(4, F(i, 100)) for i in range(101))
    assert mixed(4, F(1, 10)) == mixed(4, F(9, 10))


def mixed(k: int, p: Fraction) -> Fraction:
    return round_of(k, p, first=True, kept=True).train


@pytest.mark.parametrize(
    ("k", "rho", "n_completions"),
    [(4, ".95", 80), (4, ".9", 40), (4, ".9375", 64), (8, ".875", 64), (16, ".5", 32), (16, ".75", 64),
     (16, ".875", 128), (16, ".95", 320)],
)  # fmt: skip
def test_cost_of_an_unsolvable_prompt(k: int, rho: str, n_completions: int) -> None:
    """Oracle 2.5."""
    assert k * chain(k, F(0), F(rho), kept=False).n_attempts == n_completions
    assert chain(k, F(1), F(rho), kept=False).n_attempts == 1


TABLE = [  # oracle 2.9: p, filtered and trained by dynamic sampling; trained, given up, attempts, completions of NGU
    ("0", "1", "0", "0", "1", "20", "80"),
    (".001", ".9960", ".0040", ".0742", ".9258", "18.589", "74.36"),
    (".01", ".9606", ".0394", ".4507", ".5493", "11.437", "45.75"),
    (".03", ".8853", ".1147", ".7216", ".2784", "6.290", "25.16"),
    (".1", ".6562", ".3438", ".9128", ".0871", "2.655", "10.62"),
    (".25", ".3203", ".6797", ".9735", ".0226", "1.430", "5.72"),
    (".5", ".1250", ".8750", ".9342", ".0033", "1.063", "4.25"),
    (".75", ".3203", ".6797", ".6834", ".0002", "1.004", "4.01"),
    (".95", ".8145", ".1855", ".1855", "0", "1.000", "4.00"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_reference_table(row: tuple[str, ...]) -> None:
    p, rho = F(row[0]), F(95, 100)
    odds, one = chain(4, p, rho, kept=True), round_of(4, p, first=True, kept=True)
    exact = [one.solved + one.coin, one.train, odds.train, odds.give_up, odds.n_attempts, 4 * odds.n_attempts]
    for printed, value in zip(row[1:], exact, strict=True):
        digits = len(printed.partition(".")[2]) or 4
        assert abs(F(printed) - value) <= F(1, 2 * 10**digits), (printed, float(value))


# ---------------------------------------------------------------------- Monte Carlo: the real scheduler


@dataclass
class Outcome:
    """What came out of n chains."""

    n: int
    scheduler: Scheduler
    n_right: int = 0
    trained: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Of every trained group: rounds, attempts in the batch, how many of them right, baseline."""

    @property
    def n_attempts(self) -> int:
        return self.n + self.scheduler.ledger.chains["retries"]

    def share(self, *outcomes: str) -> float:
        return sum(self.scheduler.ledger.chains[outcome] for outcome in outcomes) / self.n


def run(
    strategy: Strategy,
    pass_rates: list[float],
    *,
    k: int = 4,
    history: str = "kept",
    seed: int = 0,
) -> Outcome:
    """One visit of every prompt. history: "kept" (no policy step: nothing goes stale) or "stale" (a step between any two
    rounds of a chain; with window 0 only the newest round is fresh)."""
    scheduler = Scheduler(
        strategy, prompts_named(len(pass_rates)), n_groups=1, max_pending=len(pass_rates), max_epochs=1, seed=seed
    )
    pass_rate = {prompt.id: p for prompt, p in zip(scheduler.prompts, pass_rates, strict=True)}
    outcome = Outcome(len(pass_rates), scheduler)
    random = Random(seed).random
    while scheduler.finished is None:
        in_flight = []
        while (request := scheduler.next()) is not None:
            in_flight.append(request)
        version = scheduler.version
        of_count = [attempts([1] * c + [0] * (k - c), version) for c in range(k + 1)]
        for request in in_flight:
            p = pass_rate[request.prompt.id]
            n_right = 0
            for _ in range(k):
                n_right += random() < p
            outcome.n_right += n_right
            scheduler.deliver(request.id, of_count[n_right])
            batch = scheduler.take() if scheduler.n_ready else None
            if batch is not None:
                (group,) = batch.groups
                right = sum(attempt.reward for attempt in group.attempts)
                outcome.trained.append((group.rounds, len(group.attempts), int(right), group.baseline))
                scheduler.publish(version)
        if history == "stale":
            scheduler.publish(version + 1)
    scheduler.check_balance()
    assert scheduler.ledger.chains["opened"] == outcome.n
    return outcome


def near(measured: float, exact: float, sd: float, n: int) -> None:
    assert abs(measured - exact) <= 4 * sd / sqrt(n) + 1e-12, f"{measured} is not {exact} +- {sd / sqrt(n)}"


def share_near(measured: float, exact: float, n: int) -> None:
    near(measured, exact, sqrt(exact * (1 - exact)), n)


def check_chain(outcome: Outcome, p: Fraction, k: int, rho: Fraction, *, kept: bool) -> None:
    """Oracles 2.1, 2.2, 2.4 and 2.7 (Wald)."""
    odds, g, n = chain(k, p, rho, kept=kept), float(rho * (1 - p) ** k), outcome.n
    share_near(outcome.share("solved", "solved_after_retry"), float(odds.solved), n)
    share_near(outcome.share("trained"), float(odds.train), n)
    share_near(outcome.share("given_up"), float(odds.give_up), n)
    near(outcome.n_attempts / n, float(odds.n_attempts), sqrt(g) / (1 - g), n)
    # right = p times drawn, whatever made the chains stop: their difference is a martingale
    near(outcome.n_right / n, float(p) * outcome.n_attempts * k / n,
         sqrt(float(p * (1 - p) * k * odds.n_attempts)), n)  # fmt: skip
    if outcome.trained:
        rounds = [trained[0] for trained in outcome.trained]
        sd = sqrt(odds.n_attempts_squared_if_trained - odds.n_attempts_if_trained**2)
        near(sum(rounds) / len(rounds), float(odds.n_attempts_if_trained), sd, len(rounds))


N_GROUPS = 3000
"""Groups that a Monte-Carlo row may generate: it bounds the time, and the rows differ in attempts per chain."""


def n_chains(k: int, p: Fraction, rho: Fraction) -> int:
    return int(N_GROUPS / chain(k, p, rho, kept=True).n_attempts)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_reference_table_through_the_scheduler(row: tuple[str, ...]) -> None:
    p, rho = F(row[0]), F(95, 100)
    outcome = run(NeverGiveUp(4, float(rho), window=None), [float(p)] * n_chains(4, p, rho), seed=1)
    check_chain(outcome, p, 4, rho, kept=True)
    for rounds, n_attempts, _, _ in outcome.trained:
        assert n_attempts == 4 * rounds, "nothing is pruned: all of the chain is trained on"


@pytest.mark.parametrize(("p", "k", "rho"), ROWS[:5])
@pytest.mark.parametrize("history", ["kept", "stale"])
def test_chains_through_the_scheduler(p: Fraction, k: int, rho: Fraction, history: str) -> None:
    strategy = NeverGiveUp(k, float(rho), window=None if history == "kept" else 0)
    outcome = run(strategy, [float(p)] * n_chains(k, p, rho), k=k, history=history, seed=2)
    check_chain(outcome, p, k, rho, kept=history == "kept")
    chains = outcome.scheduler.ledger.chains
    if history == "kept":
        assert chains["solved_after_retry"] == 0
    else:
        assert all(n_attempts == k for _, n_attempts, _, _ in outcome.trained)
        assert outcome.n_attempts * k == outcome.scheduler.ledger.drawn
        if p == F(6, 10):
            assert chains["solved_after_retry"] > 0


@pytest.mark.parametrize(("p", "k"), [(F(95, 100), 4), (F(1, 2), 4), (F(1, 100), 4), (F(95, 100), 32)])
def test_dynamic_sampling_through_the_scheduler(p: Fraction, k: int) -> None:
    """Oracles 1.1 to 1.3."""
    outcome = run(DynamicSampling(k), [float(p)] * 1500, k=k, seed=3)
    share_near(outcome.share("trained"), float(mixed(k, p)), outcome.n)
    share_near(outcome.share("solved"), float(p**k), outcome.n)
    share_near(outcome.share("given_up"), float((1 - p) ** k), outcome.n)
    assert outcome.n_attempts == outcome.n


@pytest.mark.parametrize(("max_attempts", "n_completions"), [(8, 26.926), (16, 44.790), (32, 64.503)])
def test_cap_on_attempts(max_attempts: int, n_completions: float) -> None:
    """Oracle 2.6, p = 0: K (1 - rho^M)/(1 - rho)."""
    rho = 0.95
    exact = 4 * (1 - rho**max_attempts) / (1 - rho)
    assert exact == pytest.approx(n_completions, abs=5e-4)
    square = sum((2 * r - 1) * rho ** (r - 1) for r in range(1, max_attempts + 1))  # E[R^2] = sum (2r-1) P(R >= r)
    outcome = run(NeverGiveUp(4, rho, max_attempts=max_attempts), [0.0] * 400, seed=4)
    near(4 * outcome.n_attempts / outcome.n, exact, 4 * sqrt(square - (exact / 4) ** 2), outcome.n)
    assert outcome.share("given_up") == 1.0


def test_cap_on_attempts_of_a_hard_prompt() -> None:
    """Oracle 2.6: E[R] and P(train) times 1 - g^M."""
    p, k, rho, cap = 0.02, 4, 0.95, 10
    g = rho * (1 - p) ** k
    kept = (1 - g**cap) / (1 - g)
    outcome = run(NeverGiveUp(k, rho, window=0, max_attempts=cap), [p] * 1500, history="stale", seed=5)
    share_near(outcome.share("trained"), float(mixed(k, F(p))) * kept, outcome.n)
    near(outcome.n_attempts / outcome.n, kept, sqrt(g) / (1 - g), outcome.n)


def test_p_1_gives_up_at_the_cap_only() -> None:
    """Oracle 3.7."""
    outcome = run(NeverGiveUp(4, 1.0, max_attempts=7), [0.0] * 50)
    assert outcome.n_attempts == 7 * 50
    assert outcome.share("given_up") == 1.0


def test_give_ups_are_binomial() -> None:
    """Oracle 3.7: among failing draws, 1 - rho of them."""
    outcome = run(NeverGiveUp(4, 0.875), [0.0] * 1000, seed=6)
    share_near(outcome.n / outcome.n_attempts, 0.125, outcome.n_attempts)


def test_the_baseline_of_trained_chains_is_no_pass_rate() -> None:
    """Oracle 2.7: over trained chains both ways of averaging are far above p = .01; over all chains they are not."""
    p, k, rho = 0.01, 4, 0.95
    g = rho * (1 - p) ** k
    odds = [float(probability) for probability in binomial(k, F(p))]
    trained = [(r, c, g ** (r - 1) * odds[c]) for r in range(1, 800) for c in range(1, k + (r > 1))]
    total = sum(probability for _, _, probability in trained)
    mean_b = sum(c / (k * r) * probability for r, c, probability in trained) / total
    pooled = sum(c * q for _, c, q in trained) / sum(k * r * q for r, _, q in trained)
    assert mean_b == pytest.approx(0.0592, abs=1e-4)
    assert pooled == pytest.approx(0.0221, abs=1e-4)
    outcome = run(NeverGiveUp(k, rho, window=None), [p] * 1200, seed=7)
    sd = sqrt(sum((c / (k * r)) ** 2 * q for r, c, q in trained) / total - mean_b**2)
    near(sum(row[3] for row in outcome.trained) / len(outcome.trained), mean_b, sd, len(outcome.trained))
    everything = outcome.n_right / outcome.scheduler.ledger.drawn
    near(everything, p, sqrt(p * (1 - p)), outcome.scheduler.ledger.drawn)


@pytest.mark.parametrize(
    ("p", "k", "rho", "printed"),
    [(0.01, 4, 0.95, 43.43), (0.1, 4, 0.95, 9.54), (0.5, 4, 0.95, 3.35), (0.01, 16, 0.875, 61.3)],
)
def test_implicit_weight_of_a_prompt(p: float, k: int, rho: float, printed: float) -> None:
    """Oracle 7.5: E[n+ (1 - b)]/(p (1 - p)) per visit = [K/(1-g) + (1-p+Kp) ln(1-g)/g]/(1-p)."""
    g = rho * (1 - p) ** k
    exact = (k / (1 - g) + (1 - p + k * p) * log1p(-g) / g) / (1 - p)
    assert exact == pytest.approx(printed, rel=2e-3)
    outcome = run(NeverGiveUp(k, rho, window=None), [p] * n_chains(k, F(p), F(rho)), k=k, seed=8)
    values = [n_right * (1 - b) / (p * (1 - p)) for _, _, n_right, b in outcome.trained]
    mean = sum(values) / outcome.n
    near(mean, exact, sqrt(sum(value**2 for value in values) / outcome.n - mean**2), outcome.n)


# ---------------------------------------------------------------------------------- a stream of prompts

BUCKETS = [F(95, 100), F(1, 2), F(1, 10), F(5, 1000)]


@dataclass(frozen=True)
class Shares:
    generated: list[Fraction]
    trained: list[Fraction]
    n_completions: Fraction
    """Generated per trained group."""
    retries: Fraction
    """Share of generated groups."""


@cache
def shares(k: int, rho: Fraction) -> Shares:
    """Oracles 3.1 to 3.4, equal visit probabilities, only the newest round fresh."""
    odds = [chain(k, p, rho, kept=False) for p in BUCKETS]
    n_attempts, n_trained = sum(o.n_attempts for o in odds), sum(o.train for o in odds)
    return Shares(
        [o.n_attempts / n_attempts for o in odds],
        [o.train / n_trained for o in odds],
        F(k * n_attempts / n_trained),
        F((n_attempts - len(odds)) / n_attempts),
    )


@pytest.mark.parametrize(
    ("k", "rho", "generated", "trained", "n_completions"),
    [
        (4, "0", [0.25] * 4, [0.1302, 0.6144, 0.2414, 0.0139], 11.235),
        (32, "0", [0.25] * 4, [0.2761, 0.3424, 0.3307, 0.0508], 43.833),
        (4, ".95", [0.0520, 0.0553, 0.1380, 0.7548], [0.0801, 0.4015, 0.3940, 0.1244], 33.221),
        (4, ".9", [0.0770, 0.0816, 0.1880, 0.6533], [0.0875, 0.4372, 0.3959, 0.0794], 24.495),
    ],
)
def test_reference_shares(k: int, rho: str, generated: list[float], trained: list[float], n_completions: float) -> None:
    """Oracle 3.5."""
    exact = shares(k, F(rho))
    assert [float(share) for share in exact.generated] == pytest.approx(generated, abs=5.1e-5)
    assert [float(share) for share in exact.trained] == pytest.approx(trained, abs=5.1e-5)
    assert float(exact.n_completions) == pytest.approx(n_completions, abs=5e-4)
    # NGU is, in composition, fixed K with visits weighed by E[R]
    e = [chain(k, p, F(rho), kept=False).n_attempts for p in BUCKETS]
    weighed = [attempts_ * mixed(k, p) for attempts_, p in zip(e, BUCKETS, strict=True)]
    assert exact.trained == [weight / sum(weighed) for weight in weighed]
    if rho == ".95":
        assert round(float(exact.retries), 4) == 0.7921


def test_shares_through_the_scheduler() -> None:
    """Oracles 3.1 to 3.6; the standard errors come from 10 independent streams."""
    exact = shares(4, F(95, 100))
    ids = {f"p{i}": i % 4 for i in range(240)}
    measured: list[list[float]] = []
    for seed in range(10):
        n_generated, n_trained = [0] * 4, [0] * 4
        scheduler = Scheduler(
            NeverGiveUp(4, 0.95, window=0), prompts_named(240), n_groups=1, max_pending=240, max_epochs=1, seed=seed
        )
        rng = Random(seed)
        while scheduler.finished is None:
            requests = list(iter(scheduler.next, None))
            for request in requests:
                bucket = ids[request.prompt.id]
                n_generated[bucket] += 1
                rewards = [int(rng.random() < float(BUCKETS[bucket])) for _ in range(4)]
                scheduler.deliver(request.id, attempts(rewards, scheduler.version))
                batch = scheduler.take()
                if batch is not None:
                    n_trained[bucket] += 1
                    scheduler.publish(scheduler.version)
            scheduler.publish(scheduler.version + 1)
        chains = scheduler.ledger.chains
        assert (
            chains["opened"] == chains["trained"] + chains["solved"] + chains["solved_after_retry"] + chains["given_up"]
        )
        assert sum(n_generated) == chains["opened"] + chains["retries"] == scheduler.ledger.drawn // 4
        measured.append(
            [n / sum(n_generated) for n in n_generated]
            + [n / sum(n_trained) for n in n_trained]
            + [4 * sum(n_generated) / sum(n_trained), chains["retries"] / sum(n_generated)]
        )
    expected = [*exact.generated, *exact.trained, exact.n_completions, exact.retries]
    for values, value in zip(zip(*measured, strict=True), expected, strict=True):
        mean = sum(values) / len(values)
        near(mean, float(value), sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)), len(values))


# ---------------------------------------------------------------------------------------------- staleness


def rounds_of_one_prompt(
    strategy: Strategy, rounds: Sequence[Sequence[Exact]], steps_between: int = 1, max_reward: Exact = 1
) -> tuple[Scheduler, Batch | None]:
    """Delivers the rounds in order, with so many policy steps between any two of them, and takes."""
    scheduler = Scheduler(strategy, prompts_named(1, max_reward=max_reward), n_groups=1)
    for i, rewards in enumerate(rounds):
        request = scheduler.next()
        assert request is not None
        assert request.round == i + 1
        scheduler.deliver(request.id, [Attempt(reward, scheduler.version) for reward in rewards])
        if i < len(rounds) - 1:
            scheduler.publish(scheduler.version + steps_between)
    return scheduler, scheduler.take()


@pytest.mark.parametrize("n_rounds", [1, 2, 5, 64])
@pytest.mark.parametrize(("window", "tau"), [(4, 1), (4, 2), (4, 3), (4, 5), (0, 1), (16, 4), (None, 1)])
def test_survivors(n_rounds: int, window: int | None, tau: int) -> None:
    """Oracles 4.1 to 4.3: 1 + min(R-1, floor(T/tau)) attempts; all of them without a window."""
    strategy = NeverGiveUp(4, p=1.0, window=window, max_attempts=100)
    scheduler, batch = rounds_of_one_prompt(strategy, [[0] * 4] * (n_rounds - 1) + [[1, 0, 0, 0]], tau)
    assert batch is not None
    (group,) = batch.groups
    n_rounds_kept = 1 + min(n_rounds - 1, 10**9 if window is None else window // tau)
    assert len(group.attempts) == 4 * n_rounds_kept
    assert (group.tried, group.baseline) == (4 * n_rounds, 1 / (4 * n_rounds))
    assert scheduler.ledger.stale == 4 * (n_rounds - n_rounds_kept)
    rewards = [attempt.reward for attempt in group.attempts]
    assert group.weights == anchored(rewards, 4 * n_rounds, 1)
    if window is None:
        assert group.weights == centred(rewards)
    if n_rounds == 64 and (window, tau) == (4, 1):
        assert len(rewards) == 20


@pytest.mark.parametrize(
    ("n_rounds", "positive", "negative"), [(64, 0.99609375, -0.33203125), (6, 23 / 24, -23 / 72), (2, 0.875, -7 / 24)]
)
def test_published_vectors_through_the_scheduler(n_rounds: int, positive: float, negative: float) -> None:
    """Oracle 5.5: 1/256, 1/24 and 1/8, one right and three fresh failures."""
    strategy = NeverGiveUp(4, p=1.0, window=0, max_attempts=100)
    _, batch = rounds_of_one_prompt(strategy, [[0] * 4] * (n_rounds - 1) + [[1, 0, 0, 0]])
    assert batch is not None
    assert batch.groups[0].weights == (positive, negative, negative, negative)


def test_per_test_rewards_through_the_scheduler() -> None:
    """Oracle 6.5."""
    strategy = NeverGiveUp(4, p=1.0, window=0, max_attempts=100)
    rounds = [[F(7, 12)] * 4, [F(n, 12) for n in (7, 7, 8, 6)]]
    _, batch = rounds_of_one_prompt(strategy, rounds)
    assert batch is not None
    assert batch.groups[0].weights == (0.0, 0.0, 1 / 12, -1 / 12)


# ------------------------------------------------------------------------------------------ graded rewards

LATTICE = [(F(0), F(5, 10)), (F(1, 4), F(3, 10)), (F(1, 2), F(15, 100)), (F(3, 4), F(4, 100)), (F(1), F(1, 100))]


def test_rewards_on_a_lattice() -> None:
    """Oracle 6.7: closed form, and the scheduler."""
    k, rho = 4, F(9, 10)
    constant = [probability**k for _, probability in LATTICE]
    below = list(cumulative(probability for _, probability in LATTICE))
    g = [rho * share**k for share in below]
    n_attempts = 1 + sum(constant[i] * rho / (1 - g[i]) for i in range(4))
    give_up = sum(constant[i] * (1 - rho) / (1 - g[i]) for i in range(4))
    assert round(float(n_attempts), 5) == 1.07287
    assert round(float(give_up), 6) == 0.008097

    n = 1500
    scheduler = Scheduler(
        NeverGiveUp(k, float(rho), window=None), prompts_named(n), n_groups=1, max_pending=64, max_epochs=1
    )
    rng = Random(9)
    values, weights = [value for value, _ in LATTICE], [float(probability) for _, probability in LATTICE]
    squares = 0
    while (request := scheduler.next()) is not None:
        scheduler.deliver(request.id, attempts(rng.choices(values, weights, k=k)))
        squares += 2 * request.round - 1
        if scheduler.take() is not None:
            scheduler.publish(0)
    chains = scheduler.ledger.chains
    mean = 1 + chains["retries"] / n
    near(mean, float(n_attempts), sqrt(squares / n - mean**2), n)
    share_near(chains["given_up"] / n, float(give_up), n)
    share_near(chains["solved"] / n, float(constant[4]), n)


def cumulative(shares_: Iterator[Fraction]) -> Iterator[Fraction]:
    total = F(0)
    for share in shares_:
        total += share
        yield total
