"""`ngu eval` and `ngu probe`: figures without bias, files that survive a kill, real models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean

import pytest

from nevergiveup import build
from nevergiveup.cli import BAD_INPUT
from nevergiveup.cli import main as ngu
from nevergiveup.evaluate import (
    Drawn,
    assign_buckets,
    bootstrap_interval,
    pass_at_k,
    read_probe,
    signal_at_k,
    wilson_interval,
)
from nevergiveup.measure import drawn_of, in_words, rates_of, summarize, suspects
from nevergiveup.suggest import cost_table, suggest
from nevergiveup.tasks.chains import Chains
from nevergiveup.tasks.math import Math
from nevergiveup.types import Prompt
from test_train import run, small, start  # noqa: F401

# ------------------------------------------------------------------------------------------------- figures without bias


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_signal_at_k_counts_subsets(k: int) -> None:
    n = 7
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        mixed = [len({right[i] for i in subset}) == 2 for subset in combinations(range(n), k)]
        assert signal_at_k(n, c, k) == pytest.approx(mean(mixed))
    with pytest.raises(ValueError, match="needs at least 8 samples"):
        signal_at_k(7, 3, 8)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_signal_at_k_has_no_bias(p: float) -> None:
    rng = Random(1)
    found = [signal_at_k(16, sum(rng.random() < p for _ in range(16)), 4) for _ in range(20_000)]
    exact = 1 - p**4 - (1 - p) ** 4
    assert mean(found) == pytest.approx(exact, abs=4 * sqrt(exact / 20_000))


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = Random(2)
    n_wilson = n_bootstrap = 0
    for _ in range(400):
        c = sum(rng.random() < 0.2 for _ in range(32))
        low, high = wilson_interval(c, 32)
        n_wilson += low <= 0.2 <= high
        values = [float(rng.random() < 0.3) for _ in range(60)]
        interval = bootstrap_interval(values, 300)
        assert interval is not None
        n_bootstrap += interval[0] <= 0.3 <= interval[1]
    assert n_wilson / 400 == pytest.approx(0.95, abs=0.035)
    assert n_bootstrap / 400 == pytest.approx(0.95, abs=0.04)


def sampled(rates: dict[str, float], n: int, rng: Random) -> dict[str, Drawn]:
    return {name: Drawn(n, sum(rng.random() < rate for _ in range(n))) for name, rate in rates.items()}


def test_c40_the_bucket_trap() -> None:
    """1000 prompts of .1, 8 samples each: 43 % look unsolvable; as their own baseline they would gain .1 without learning."""
    rng = Random(3)
    rates = {f"q{i}": 0.1 for i in range(1000)}
    probe, before, after = (sampled(rates, 8, rng) for _ in range(3))
    buckets = assign_buckets(rates_of(probe))
    zero = [name for name, bucket in buckets.items() if bucket == "extra_hard"]
    assert len(zero) == pytest.approx(430, abs=4 * sqrt(1000 * 0.43 * 0.57))

    def gain(first: dict[str, Drawn]) -> tuple[float, tuple[float, float]]:
        differences = [(after[name].right - first[name].right) / 8 for name in zero]
        interval = bootstrap_interval(differences)
        assert interval is not None
        return mean(differences), interval

    trap, (low, _) = gain(probe)
    assert trap == pytest.approx(0.1, abs=0.02)
    assert low > 0.05
    _, (low, high) = gain(before)
    assert low <= 0 <= high


def test_an_unchanged_model_gains_nothing_in_any_bucket() -> None:
    """20 seeds, four buckets: 95 % intervals leave out zero about 4 times in 80; more than 10 has a chance of 1 in 500."""
    n_out = n_all = 0
    for seed in range(20):
        rng = Random(seed)
        rates = {f"q{i}": rng.betavariate(0.4, 0.6) for i in range(300)}
        probe, before, after = (sampled(rates, n, rng) for n in (32, 8, 8))
        buckets = assign_buckets(rates_of(probe))
        for bucket in set(buckets.values()):
            names = [name for name in rates if buckets[name] == bucket]
            interval = bootstrap_interval([(after[name].right - before[name].right) / 8 for name in names])
            assert interval is not None
            n_all += 1
            n_out += not interval[0] <= 0 <= interval[1]
    assert n_all == 80
    assert n_out <= 10


def test_c40_prompts_with_too_few_samples_are_left_out_and_counted() -> None:
    assert pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert pass_at_k(4, 1, 4) == 1.0
    figures = summarize({"a": Drawn(8, 2), "b": Drawn(6, 6, unverified=2)}, [1, 8])["all"]
    assert figures["pass@8"]["left_out"] == 1
    assert figures["pass@8"]["mean"] == 1.0
    assert figures["pass@1"]["mean"] == pytest.approx((0.25 + 1) / 2)
    assert figures["unverified"] == 2 / 16


def test_c40_two_rows_of_equal_text_stay_two(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 2)
    first, second = Math(str(tmp_path / "rows.jsonl")).prompts("train")
    figures = summarize({first.id: Drawn(4, 4), second.id: Drawn(4, 0)}, [1])
    assert (figures["all"]["prompts"], figures["all"]["pass@1"]["mean"]) == (2, 0.5)


def test_buckets_are_those_of_the_probe() -> None:
    drawn = {"a": Drawn(4, 4, 1.0), "b": Drawn(4, 0), "c": Drawn(4, 2, 0.5)}
    figures = summarize(drawn, [1], {"a": "hard", "b": "hard"})
    assert list(figures) == ["hard", "all"]
    assert figures["hard"]["pass@1"]["mean"] == 0.5
    assert (figures["hard"]["prompts"], figures["all"]["prompts"]) == (2, 3)


# --------------------------------------------------------------------------------------------------------- suggestions


def settings_suggested(drawn: list[Drawn]) -> dict[str, str]:
    return {key: value for key, value, _ in suggest(drawn)}


def test_suggestions_follow_the_figures() -> None:
    half = [Drawn(64, 32, tokens=100.0)] * 10
    assert settings_suggested(half) == {"strategy.k": "4", "strategy.p": "0.95", "strategy.window": "4"}
    assert settings_suggested(half + [Drawn(64, 0, tokens=100.0)] * 4)["strategy.p"] == "0.9"
    assert settings_suggested(half + [Drawn(64, 0, tokens=100.0)] * 10)["strategy.p"] == "0.75"
    assert settings_suggested([*half, Drawn(64, 3, tokens=2000.0)])["strategy.window"] == "8"
    assert settings_suggested([Drawn(64, 32, tokens=100.0, truncated=20)] * 4)["sampling.max_new_tokens"] == "more"
    assert settings_suggested([Drawn(64, 0)] * 4) == {"task": "other prompts"}
    assert settings_suggested([Drawn(64, 64)] * 4) == {"task": "other prompts"}


def test_the_cost_of_a_group_with_signal() -> None:
    rows = {k: (signal, cost) for k, signal, cost in cost_table([Drawn(64, 32)] * 3)}
    assert list(rows) == [2, 4, 8, 16, 32, 64]
    assert rows[64] == (1.0, 64.0)
    assert rows[2][0] == pytest.approx(32 / 63)
    assert rows[2][1] == pytest.approx(2 * 63 / 32)
    assert list(dict.fromkeys(k for k, _, _ in cost_table([Drawn(8, 4)]))) == [2, 4, 8]


def rows_of(answers: list[str | None], right: list[bool | None]) -> list[dict[str, object]]:
    return [
        {
            "right": r,
            "reward": None if r is None else float(r),
            "answer": a,
            "finish": "stop",
            "n_tokens": 3,
            "reason": "",
        }
        for a, r in zip(answers, right, strict=True)
    ]


def test_gold_answers_to_look_at() -> None:
    prompts = [Prompt(name, answer="4") for name in ("agreed", "spread", "solved", "silent")]
    rows = {
        "agreed": rows_of(["5"] * 6 + ["7"] * 2, [False] * 8),
        "spread": rows_of([str(i) for i in range(8)], [False] * 8),
        "solved": rows_of(["5"] * 7 + ["4"], [False] * 7 + [True]),
        "silent": rows_of([None] * 8, [None] * 5 + [False] * 3),
    }
    found = suspects(prompts, rows)  # type: ignore[arg-type]
    assert [(s.prompt, s.gold) for s in found] == [("agreed", "4"), ("silent", "4")]
    assert found[0].why == "never right, and 6 of 8 completions say 5"
    assert found[1].why == "5 of 8 completions got no verdict"
    text = "\n".join(in_words({name: drawn_of(r) for name, r in rows.items()}, found))
    assert "2 gold answers to look at" in text
    assert "suggested: strategy.k" in text


def test_nothing_verified_is_told() -> None:
    assert "no completion got a verdict" in next(iter(in_words({"a": Drawn(0, 0, unverified=4)})))


# ------------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def trained(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("measured") / "run"
    run(small(start), folder)
    return folder


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_sampled_pass_rates_agree_with_exact_ones(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(trained), "-n", "16", "-k", "1,16", "--prompts", "150", "--out", str(tmp_path / "eval")]
    assert ngu(["probe", str(trained), "-n", "16", "--split", "heldout", "--out", str(tmp_path / "probe.json")]) == 0
    assert ngu(["eval", *words, "--buckets", str(tmp_path / "probe.json")]) == 0
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    task = Chains(0, "demo")
    prompts = [p for p in task.prompts("heldout") if p.id in summary["prompts"]]
    exact = build.exact_rates(build.load_model(trained / "model", "float32"), task, prompts, 1.0)
    error = sqrt(sum(rate * (1 - rate) / 16 for rate in exact.values())) / len(exact)
    assert summary["figures"]["all"]["pass@1"]["mean"] == pytest.approx(mean(exact.values()), abs=4 * error)
    low, high = summary["figures"]["all"]["pass@1"]["interval"]
    assert low < summary["figures"]["all"]["pass@1"]["mean"] < high
    assert (
        sum(figures["prompts"] for name, figures in summary["figures"].items() if name != "all") == len(prompts) == 150
    )
    assert read_probe(tmp_path / "probe.json").keys() >= summary["prompts"].keys()
    assert "suggested: strategy.p" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_a_probe_tells_a_run_how_difficult_its_prompts_are(start: Path, trained: Path, tmp_path: Path) -> None:  # noqa: F811
    assert (
        ngu(
            [
                "probe",
                str(trained),
                "-n",
                "8",
                "--split",
                "heldout",
                "--prompts",
                "60",
                "--out",
                str(tmp_path / "p.json"),
            ]
        )
        == 0
    )
    settings = small(start)
    settings = replace(settings, eval=replace(settings.eval, buckets=str(tmp_path / "p.json")), steps=2)
    summary = run(settings, tmp_path / "run")
    buckets = json.loads((tmp_path / "run" / "buckets.json").read_text())
    assert buckets["source"] == "probe"
    assert buckets["rates"] == rates_of(read_probe(tmp_path / "p.json"))
    (first,) = (row for row in summary["evaluations"] if row["split"] == "heldout" and row["step"] == 0)
    assert first["pass_rates"].keys() == {*buckets["buckets"].values(), "all"}


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_rows(trained: Path, tmp_path: Path) -> None:
    words = ["eval", str(trained), "-n", "4", "--prompts", "400", "--sampling.n-slots", "8", "--out"]
    assert ngu([*words, str(tmp_path / "whole")]) == 0
    samples = tmp_path / "cut" / "samples.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-m", "nevergiveup", *words, str(tmp_path / "cut")], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (samples.exists() and samples.read_bytes().count(b"\n") > 40):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    n_before = samples.read_bytes().count(b"\n")
    assert n_before < 1601
    with samples.open("ab") as file:
        file.write(b'{"prompt": "cut in mid-wr')
    assert ngu([*words, str(tmp_path / "cut")]) == 0
    whole, cut = (
        sorted(
            (row["prompt"], row["i"], row["text"], row["reward"])
            for row in lines(tmp_path / name / "samples.jsonl")[1:]
        )
        for name in ("whole", "cut")
    )
    assert whole == cut
    assert len(whole) == 1600


@pytest.mark.slow
def test_seeds_of_a_probe_are_not_those_of_an_evaluation(trained: Path, tmp_path: Path) -> None:
    from nevergiveup.measure import Asked, draw
    from nevergiveup.train import read_settings

    settings = read_settings(trained)
    settings = replace(settings, model=replace(settings.model, path=str(trained / "model")))
    found = {}
    for purpose in ("eval", "probe"):
        asked = Asked(settings, purpose, "heldout", 40, 8, 1.0)  # type: ignore[arg-type]
        _, rows = draw(asked, tmp_path / f"{purpose}.jsonl", lambda text: None)
        found[purpose] = [row["right"] for name in rows for row in rows[name]]
    assert found["eval"] != found["probe"]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "4", "-k", "8"], "-k 8 needs at least as many completions of each prompt as -n 4"),
        (["-n", "8", "--temperature", "0"], "draws the same greedy completion 8 times"),
        (["-k", "0"], "-k 0 must be at least 1"),
        (["-k", "one"], "-k one is no list of numbers"),
        (["--split", "validation"], "split must be one of train, heldout, not 'validation'"),
        (["--buckets", "absent.json"], "absent.json cannot be read"),
        (["--prompts", "0"], "--prompts 0 must be at least 1"),
        (["--strategy.q", "1"], "--strategy.q"),
        (["--see", "1"], "--see"),
    ],
)
def test_bad_input_is_one_sentence(
    trained: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ngu(["eval", str(trained), *words]) == BAD_INPUT
    told = capsys.readouterr().err
    assert message in told
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert ngu(["eval", "--task", "chains", "runs/mine"]) == BAD_INPUT
    assert "the model comes first, then --task" in capsys.readouterr().err
    assert ngu(["probe", "./nowhere"]) == BAD_INPUT
    assert "model.path = './nowhere': there is no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_with_other_samples_is_refused_with_the_difference(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["eval", str(trained), "--prompts", "4", "--out", str(tmp_path / "e")]
    assert ngu([*words, "-n", "4"]) == 0
    assert ngu([*words, "-n", "5"]) == BAD_INPUT
    assert "holds other samples: n 4 there, 5 now" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no file that `ngu probe` wrote"):
        read_probe(tmp_path / "e" / "summary.json")
