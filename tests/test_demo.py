"""The comparison and its files, on a policy that is hardly taught; the figures of the real demonstration are in the README."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import mean

import pytest
from rich.console import Console

from nevergiveup import demo
from nevergiveup.cli import BAD_INPUT
from nevergiveup.cli import main as ngu
from nevergiveup.compare import groups_per_batch
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import EvalSettings, ModelSettings
from nevergiveup.strategies import FixedK, NeverGiveUp

pytestmark = pytest.mark.slow


def test_both_arms_differ_in_strategy_and_batch_only():
    settings = RECIPES["demo"].settings
    fixed, ngu = demo.arms(settings)
    assert isinstance(fixed.strategy, FixedK)
    assert isinstance(ngu.strategy, NeverGiveUp)
    assert fixed.batch.n_groups * fixed.strategy.k == 256
    assert (ngu.strategy, ngu.batch) == (settings.strategy, settings.batch)


def test_comparison_of_two_seeds(tmp_path):
    settings = replace(
        RECIPES["demo"].settings,
        model=ModelSettings(warm_steps=80, warm_batch=64),
        eval=EvalSettings(every=0),
        max_completions=1024,
        runtime="here",
    )
    text = StringIO()
    comparison = demo.main([0, 1], tmp_path, Console(file=text, width=100), settings)

    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(json.dumps(comparison))
    assert comparison["seeds"] == ["0", "1"]
    for label in ("fixed-K", "NGU"):
        means = comparison["mean"][label]
        per_seed = [comparison["per_seed"][seed][label] for seed in ("0", "1")]
        assert means["completions"] == 1024
        assert sum(means["spent"].values()) == 1024
        for when in ("before", "after"):
            assert means[when]["all"] == pytest.approx(sum(row[when]["all"] for row in per_seed) / 2)
            assert means[when].keys() <= {"easy", "medium", "hard", "extra_hard", "all"}
    for arms in comparison["per_seed"].values():  # the same start for both
        assert arms["fixed-K"]["before"] == arms["NGU"]["before"]
        assert arms["fixed-K"]["after"] != arms["NGU"]["after"]
    difference = comparison["differences"]["NGU"]["all"]
    after = {label: comparison["mean"][label]["after"]["all"] for label in ("fixed-K", "NGU")}
    assert difference["mean"] == pytest.approx(after["NGU"] - after["fixed-K"])
    assert difference["interval"][0] <= difference["mean"] <= difference["interval"][1]
    assert mean(difference["by_seed"]) == pytest.approx(difference["mean"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    last_row = next(line for line in text.getvalue().splitlines() if line.startswith("all "))
    assert f"{after['NGU']:.3f}" in last_row
    assert last_row.count("1,024") == 2
    assert "| all |" in (tmp_path / "comparison.md").read_text()


def test_a_comparison_goes_on_where_it_was_stopped_and_probes_where_rates_are_not_exact(tmp_path, capsys, monkeypatch):
    """Manufactoria without text has no exact pass rates: difficulty comes from a probe, and baselines from other samples."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", "manufactoria-tiny", "--strategies", "fixed,ngu:p=0.9", "--seeds", "1", "--budget", "512"]
    words += [
        "--probe-n",
        "4",
        "--eval.n",
        "2",
        "--eval.n-prompts",
        "40",
        "--task.n-prompts",
        "40",
        "--runtime",
        "here",
    ]
    words += ["--model.warm-steps", "60", "--model.warm-batch", "64", "--out", "c"]
    assert ngu(words) == 0
    first = json.loads(Path("c/comparison.json").read_text())
    assert first["labels"] == ["fixed", "ngu:p=0.9"]
    assert Path("c/seed-0/probe-train.json").exists()
    buckets = json.loads(Path("c/seed-0/ngu-p=0.9/buckets.json").read_text())
    assert buckets["source"] == "probe"
    assert len(buckets["buckets"]) == 80  # the very prompts that are trained and evaluated on
    before = {path: path.stat().st_mtime_ns for path in Path("c/seed-0").rglob("events.jsonl")}
    shutil.rmtree("c/seed-0/fixed")
    assert ngu(words) == 0  # what is there is not run again
    after = {path: path.stat().st_mtime_ns for path in Path("c/seed-0").rglob("events.jsonl")}
    assert [path.parent.name for path in after if after[path] != before[path]] == ["fixed"]
    assert (
        json.loads(Path("c/comparison.json").read_text())["mean"]["fixed"]["after"] == first["mean"]["fixed"]["after"]
    )
    assert "ngu report c/seed-0/fixed c/seed-0/ngu-p=0.9" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--strategies", "ngu"], "at least two strategies"),
        (["demo", "--strategies", "ngu,nug"], "did you mean ngu?"),
        (["demo", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--task", "gsm8k", "--budget", "100"], "model.path is empty"),
        (["demo", "--budget", "2"], "max_completions = 2 is below"),
        (["gsm8k-smollm2", "--model.path", "nowhere/at/all"], "needs a budget"),
        (["demo", "--eval.n-prompts", "0"], "needs held-out prompts: give --eval.n-prompts"),
    ],
)
def test_bad_input_is_one_sentence(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ngu(["compare", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_batches_cost_about_the_same_at_the_start():
    """GRPO trains on all 256 completions; of NGU's groups as many as 256 completions buy on prompts that are mostly hard."""
    rates = {f"q{i}": (0.9, 0.1, 0.01, 0.0)[i % 4] for i in range(400)}
    assert groups_per_batch(FixedK(k=4), rates, 0) == 64
    assert groups_per_batch(FixedK(k=16), rates, 0) == 16
    # Oracles 2.9: (4.00 + 10.62 + 45.75 + 80) completions for (.31 + .91 + .45 + 0) groups; 256 buy 3.1.
    assert groups_per_batch(NeverGiveUp(k=4, p=0.95), rates, 0) == 3
