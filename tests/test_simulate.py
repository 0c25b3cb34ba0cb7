"""The simulator against closed forms (chains and streams of prompts), and its laws."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import pytest

from nevergiveup.cli import BAD_INPUT
from nevergiveup.cli import main as ngu
from nevergiveup.evaluate import PROBE_FORMAT
from nevergiveup.events import Judged, Trained, read_events
from nevergiveup.simulate import (
    Cluster,
    Kind,
    Plan,
    Population,
    Result,
    cluster_rows,
    high_k_table,
    simulate,
)
from nevergiveup.strategies import STRATEGIES, AnyStrategy, DynamicSampling, FixedK, NeverGiveUp

FAST = Cluster(slots=256, step_s=0.1, sync_s=0.0, trained_tokens_per_s=1e6)
N_SEEDS = 6


def runs(strategy: AnyStrategy, kinds: list[Kind], n: int, **plan: object) -> list[Result]:
    """Whole passes over the data with fixed rates, several seeds. Nothing goes stale: the closed forms do not know age."""
    return [
        simulate(strategy, Population.of_mix(kinds, n, seed), FAST, Plan(n_groups=16, epochs=2, seed=seed, **plan))  # type: ignore[arg-type]
        for seed in range(N_SEEDS)
    ]


def agrees(values: list[float], exact: float, rounding: float = 0.0, n: int = 0) -> None:
    """The mean of independent runs lies within 4 standard errors of what is exact (given with so much rounding). n: visits that
    a share is of, all runs together: rare events may not show in the spread of a few runs."""
    error = max(stdev(values) / sqrt(len(values)), sqrt(exact * (1 - exact) / n) if n else 0.0)
    assert abs(mean(values) - exact) <= 4 * error + rounding, (mean(values), exact, error)


def closed(result: Result, outcome: str) -> float:
    """Share of the visits that ended so."""
    return result.ledger["chains"].get(outcome, 0) / result.ledger["chains"]["opened"]


# ------------------------------------------------------------------------------------------ one chain (oracles, section 2)

ONE_CHAIN = [  # K = 4, rho = .95: p, P(train) fixed, P(train), P(give up), E[attempts], E[samples] (2.9)
    (0.0, 0.0, 0.0, 1.0, 20.0, 80.0),
    (0.001, 0.0040, 0.0742, 0.9258, 18.589, 74.36),
    (0.01, 0.0394, 0.4507, 0.5493, 11.437, 45.75),
    (0.03, 0.1147, 0.7216, 0.2784, 6.290, 25.16),
    (0.1, 0.3438, 0.9128, 0.0871, 2.655, 10.62),
    (0.25, 0.6797, 0.9735, 0.0226, 1.430, 5.72),
    (0.5, 0.8750, 0.9342, 0.0033, 1.063, 4.25),
    (0.75, 0.6797, 0.6834, 0.0002, 1.004, 4.01),
    (0.95, 0.1855, 0.1855, 0.0, 1.000, 4.00),
]


@pytest.mark.parametrize(("p", "fixed", "trained", "given_up", "attempts", "samples"), ONE_CHAIN)
def test_one_chain(p: float, fixed: float, trained: float, given_up: float, attempts: float, samples: float) -> None:
    found = runs(NeverGiveUp(k=4, p=0.95, window=None), [Kind("all", 1, p, tokens_sd=0)], 150)
    n = 2 * 150 * N_SEEDS
    agrees([closed(r, "trained") for r in found], trained, 5e-5, n)
    agrees([closed(r, "given_up") for r in found], given_up, 5e-5, n)
    agrees([r.rounds / r.ledger["chains"]["opened"] for r in found], attempts, 5e-4)
    agrees([r.completions / r.ledger["chains"]["opened"] for r in found], samples, 5e-3)
    filtered = runs(DynamicSampling(k=4, window=None), [Kind("all", 1, p, tokens_sd=0)], 150)
    agrees([closed(r, "trained") for r in filtered], fixed, 5e-5, n)


@pytest.mark.parametrize(
    ("k", "rho", "samples"),
    [
        (4, 0.95, 80),
        (4, 0.9, 40),
        (4, 0.9375, 64),
        (8, 0.875, 64),
        (16, 0.5, 32),
        (16, 0.75, 64),
        (16, 0.875, 128),
        (16, 0.95, 320),
    ],
)
def test_what_an_unsolvable_prompt_costs(k: int, rho: float, samples: float) -> None:
    """2.5; and one that is always solved costs K exactly."""
    found = runs(NeverGiveUp(k=k, p=rho, window=None), [Kind("never", 1, 0, tokens_sd=0)], 60)
    agrees([r.completions / r.ledger["chains"]["opened"] for r in found], samples)
    easy = runs(NeverGiveUp(k=k, p=rho, window=None), [Kind("always", 1, 1, tokens_sd=0)], 50)
    assert {r.completions / r.ledger["chains"]["opened"] for r in easy} == {k}


@pytest.mark.parametrize(("cap", "samples"), [(8, 26.926), (16, 44.790), (32, 64.503)])
def test_a_cap_bounds_the_cost(cap: int, samples: float) -> None:
    """2.6, K = 4, rho = .95."""
    found = runs(NeverGiveUp(k=4, p=0.95, max_attempts=cap, window=None), [Kind("never", 1, 0, tokens_sd=0)], 60)
    agrees([r.completions / r.ledger["chains"]["opened"] for r in found], samples, 5e-4)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_asking_again_makes_no_success_cheaper(rho: float) -> None:
    """2.8: completions for each group with contrast are K / m whatever rho is, but for all-right retries, which train."""
    p, k = 0.01, 4
    a, z = p**k, (1 - p) ** k
    m = 1 - a - z
    found = runs(NeverGiveUp(k=k, p=rho, window=None), [Kind("all", 1, p, tokens_sd=0)], 400)
    agrees([1 / r.per_trained_group for r in found], m / k, 1e-6)


def test_baselines_are_biased_and_pooled_rates_are_not() -> None:
    """2.7 (exact: .05925 and .02219): over all chains right ones / completions is p; over trained chains it is more."""
    n_right = n_tried = 0
    trained: list[tuple[int, int]] = []

    def keep(t: float, event: object) -> None:
        nonlocal n_right, n_tried
        if isinstance(event, Judged):
            n_right += sum(map(int, event.rewards))
            n_tried += len(event.rewards)
        elif isinstance(event, Trained):
            trained.append((int(event.total), event.tried))

    population = Population.of_mix([Kind("all", 1, 0.01, tokens_sd=0)], 3000)
    simulate(NeverGiveUp(k=4, p=0.95, window=None), population, FAST, Plan(n_groups=16, epochs=1), keep)
    assert n_right / n_tried == pytest.approx(0.01, abs=4 * sqrt(0.01 * 0.99 / n_tried))
    means = [right / tried for right, tried in trained]
    assert mean(means) == pytest.approx(0.05925, abs=4 * stdev(means) / sqrt(len(means)))
    pooled = sum(right for right, _ in trained) / sum(tried for _, tried in trained)
    assert pooled == pytest.approx(0.02219, rel=0.1)


# ----------------------------------------------------------------------------------- a stream of prompts (section 3)

FOUR = [Kind(name, 1, p, tokens_sd=0) for name, p in (("a", 0.95), ("b", 0.5), ("c", 0.1), ("d", 0.005))]
STREAMS = [  # strategy, shares generated, shares trained, completions for each trained group, share of retries (3.5)
    (FixedK(k=4, window=None), (0.25,) * 4, (0.1302, 0.6144, 0.2414, 0.0139), 11.235, 0.0),
    (FixedK(k=32, window=None), (0.25,) * 4, (0.2761, 0.3424, 0.3307, 0.0508), 43.833, 0.0),
    (NeverGiveUp(k=4, p=0.95, window=None), (0.0520, 0.0553, 0.1380, 0.7548), (0.0801, 0.4015, 0.3940, 0.1244), 33.221, 0.7921),
    (NeverGiveUp(k=4, p=0.9, window=None), (0.0770, 0.0816, 0.1880, 0.6533), (0.0875, 0.4372, 0.3959, 0.0794), 24.495, None),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "generated", "trained", "per_group", "retries"), STREAMS)
def test_a_stream(
    strategy: AnyStrategy,
    generated: tuple[float, ...],
    trained: tuple[float, ...],
    per_group: float,
    retries: float | None,
) -> None:
    found = runs(strategy, FOUR, 400)
    for name, drawn, taught in zip("abcd", generated, trained, strict=True):
        agrees([r.share(r.drawn, name) for r in found], drawn, 5e-5)
        agrees([r.share(r.trained_groups, name) for r in found], taught, 5e-5)
    agrees([r.per_trained_group for r in found], per_group, 5e-4 * per_group)
    if retries is not None:
        agrees([r.retries / r.rounds for r in found], retries, 5e-5)


def test_a_larger_k_learns_more_from_easy_prompts_at_equal_cost() -> None:
    rows = high_k_table(n_prompts=2000)
    easy = [float(row["easy"]) for row in rows]
    assert easy == sorted(easy)
    assert easy[-1] > easy[0] + 0.03
    assert all(float(row["k"]) * float(row["n_groups"]) == 256 for row in rows)


# ------------------------------------------------------------------------------------------------------------------ laws

SMALL = Population.of_mix([Kind("e", 1, 0.8, 8), Kind("h", 1, 0.1, 8), Kind("x", 1, 0.0)], 60)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n_tests", [0, 12])
def test_the_ledger_balances_for_every_strategy(name: str, n_tests: int) -> None:
    plan = Plan(n_groups=8, completions=6000, max_pending=64, learning=3, own=0.3, n_tests=n_tests, hours=200)
    result = simulate(STRATEGIES[name](), SMALL, Cluster(slots=32), plan)
    ledger = {key: value for key, value in result.ledger.items() if key != "chains"}
    assert ledger.pop("drawn") == sum(ledger.values()) == result.completions > 1000
    assert sum(result.drawn.values()) == result.completions
    assert result.reason != "nothing can move any more"
    assert 0 <= result.busy <= 1
    assert 0 <= result.trainer_busy <= 1
    assert all(0 <= rate <= 1 for pair in result.rates.values() for rate in pair)
    assert result.rates["x"] == (0, 0)


def test_the_same_seed_gives_the_same_events_and_another_seed_others() -> None:
    def events(seed: int) -> list[object]:
        seen: list[object] = []
        plan = Plan(n_groups=4, completions=3000, learning=2, seed=seed)
        simulate(NeverGiveUp(), SMALL, Cluster(slots=16), plan, lambda t, event: seen.append((t, event)))
        return seen

    assert events(1) == events(1)
    assert events(1) != events(2)


def test_without_lag_nothing_that_is_trained_on_is_old() -> None:
    """One round is one batch here: what is asked again is younger than what the trainer has seen."""
    plan = Plan(n_groups=8, lag=0, max_pending=8, steps=40)
    assert set(simulate(FixedK(), SMALL, Cluster(slots=64), plan).ages) == {0}
    late = simulate(FixedK(), SMALL, Cluster(slots=64, step_s=60), replace(plan, lag=2, max_pending=None))
    assert max(late.ages) >= 1


def test_more_engines_and_a_faster_trainer_never_take_longer() -> None:
    plan = Plan(n_groups=8, steps=60)
    slow, more, most = (simulate(NeverGiveUp(), SMALL, Cluster(engines=n, slots=16), plan) for n in (1, 2, 8))
    assert slow.seconds > more.seconds > most.seconds
    assert slow.busy > 0.9
    trainer = [simulate(FixedK(), SMALL, Cluster(slots=512, step_s=s), plan).seconds for s in (1, 10, 100)]
    assert trainer == sorted(trainer)
    assert trainer[2] == pytest.approx(60 * 100.5, rel=0.1)


def test_learning_raises_what_is_trained_on_and_transfer_the_rest() -> None:
    plan = Plan(n_groups=8, completions=8000, learning=5, transfer=0.0, max_pending=64)
    alone = simulate(NeverGiveUp(), SMALL, Cluster(), plan).rates
    assert alone["h"][1] > alone["h"][0] + 0.1
    frozen = simulate(NeverGiveUp(), SMALL, Cluster(), Plan(n_groups=8, completions=8000, max_pending=64)).rates
    assert all(before == after for before, after in frozen.values())


def test_graded_rewards_pass_all_tests_at_the_pass_rate() -> None:
    rewards: list[object] = []

    def keep(t: float, event: object) -> None:
        rewards.extend(getattr(event, "rewards", ()))

    population = Population.of_mix([Kind("all", 1, 0.3, tokens_sd=0)], 200)
    simulate(FixedK(), population, FAST, Plan(n_groups=8, epochs=20, n_tests=5), keep)
    share = mean(reward == 1 for reward in rewards)
    assert share == pytest.approx(0.3, abs=4 * sqrt(0.21 / len(rewards)))
    assert len(set(rewards)) == 6


def test_completions_beyond_the_limit_are_cut_and_score_nothing() -> None:
    population = Population.of_mix([Kind("all", 1, 1.0, tokens=1000, tokens_sd=0)], 20)
    cut = simulate(FixedK(), population, Cluster(max_new_tokens=500), Plan(n_groups=4, epochs=1))
    whole = simulate(FixedK(), population, Cluster(max_new_tokens=2000), Plan(n_groups=4, epochs=1))
    assert cut.seconds < whole.seconds
    for result, reward in ((cut, 0), (whole, 1)):
        rewards: set[object] = set()
        simulate(
            FixedK(),
            population,
            Cluster(max_new_tokens=500 if result is cut else 2000),
            Plan(n_groups=4, epochs=1),
            lambda t, event, rewards=rewards: rewards.update(getattr(event, "rewards", ())),
        )
        assert rewards == {reward}


def test_a_scheduler_can_serve_large_clusters() -> None:
    small, large = cluster_rows((8, 64), requests_per_slot=1.0)
    assert float(large["rounds_per_s"]) == pytest.approx(8 * float(small["rounds_per_s"]), rel=0.35)
    assert 0 < float(small["scheduler"]) < float(large["scheduler"]) < 1


# --------------------------------------------------------------------------------------------------------- probe, command


def probe(path: Path) -> Path:
    rows = {f"q{i}": {"n": 32, "right": (0, 4, 16, 32)[i % 4], "tokens": 100.0 * (i % 4 + 1)} for i in range(40)}
    path.write_text(json.dumps({"format": PROBE_FORMAT, "prompts": rows}))
    return path


def test_prompts_from_a_probe(tmp_path: Path) -> None:
    population = Population.of_probe(probe(tmp_path / "probe.json"))
    assert population.kinds[:4] == ["extra_hard", "hard", "medium", "easy"]
    assert population.tokens[:4] == [100, 200, 300, 400]
    rates = population.rates
    assert all(0 < rate < 0.25 for rate in rates[0::4])  # 0 of 32 is not impossible
    assert mean(rates[2::4]) == pytest.approx(0.5, abs=0.1)
    assert len(Population.of_probe(tmp_path / "probe.json", 1000)) == 1000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe(tmp_path / "probe.json")
    assert (
        ngu(["simulate", "--probe", "probe.json", "--completions", "2000", "--slots", "16", "--events", "e.jsonl"]) == 0
    )
    text = capsys.readouterr().out
    assert "40 prompts, 1 engines of 16 slots" in text
    assert "ngu:" in text
    assert "of completions go to" in text
    drawn = sum(event.n for _, event in read_events(Path("e.jsonl")) if event.kind == "dispatched")
    assert 1900 <= drawn <= 2000

    sweep = ["simulate", "--completions", "1000", "--sweep", "k=2,4", "lag=0,1", "slots=8", "--json", "out.json"]
    assert ngu(sweep) == 0
    rows = json.loads(Path("out.json").read_text())
    assert [row["run"] for row in rows] == [f"k={k} lag={lag} slots=8" for k in (2, 4) for lag in (0, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "nug"], "did you mean ngu?"),
        (["--probe", "absent.json"], "absent.json cannot be read"),
        (["--mix", "hard:0.3"], "write NAME:WEIGHT:RATE"),
        (["--mix", "hard:1:2"], "rate = 2.0 must be in [0, 1]"),
        (["--sweep", "k"], "write KEY=A,B,C"),
        (["--sweep", "k=2,x"], 'strategy.k = "x"'),
        (["--sweep", "lag=x"], "not a number"),
        (["--engines", "0"], "engines = 0 must be at least 1"),
        (["--tokens-per-s", "0"], "tokens_per_s = 0.0 must be above 0"),
        (["--n-groups", "0"], "n_groups = 0"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ngu(["simulate", *words]) == BAD_INPUT
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
