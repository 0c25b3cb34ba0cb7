"""Every strategy and every loss trains the task chains: fifty real steps each, from one warm-started policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from nevergiveup import build
from nevergiveup.events import Planned, Trained, read_events
from nevergiveup.objectives import LOSSES, Cispo, Clipped, Loss, Reinforce
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.settings import BatchSettings, EvalSettings, Settings
from nevergiveup.strategies import STRATEGIES, AnyStrategy, FixedK, GvmRaft, NeverGiveUp
from nevergiveup.train import read_settings, train

N_STEPS = 50


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    demo = RECIPES["demo"].settings
    build.warm_start(
        replace(demo, model=replace(demo.model, warm_steps=120, warm_batch=128)), folder, lambda text: None
    )
    return folder


def run(start: Path, out: Path, strategy: AnyStrategy, loss: Loss | None = None, **changes: Any) -> dict[str, Any]:
    demo = RECIPES["demo"].settings
    settings: Settings = replace(
        demo,
        model=replace(demo.model, path=str(start)),
        strategy=strategy,
        loss=loss or Clipped(),
        batch=BatchSettings(n_groups=4, max_pending=32),
        eval=EvalSettings(n_prompts=0),
        steps=N_STEPS,
        max_completions=None,
        runtime="here",
    )
    return train(replace(settings, **changes), out, PlainView(Console(quiet=True)))


def assert_trained(summary: dict[str, Any], start: Path, out: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == len(rows) == N_STEPS
    assert not any(row["skipped"] for row in rows)
    before, after = load_file(start / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    ledger = dict(summary["ledger"])
    del ledger["chains"]
    drawn = ledger.pop("drawn")
    assert drawn == sum(ledger.values()), "a completion has no fate, or two"
    return rows


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains(name: str, start: Path, tmp_path: Path) -> None:
    strategy = STRATEGIES[name]()
    summary = run(start, tmp_path / "run", strategy)
    assert_trained(summary, start, tmp_path / "run")
    events = [event for _, event in read_events(tmp_path / "run" / "events.jsonl")]
    ages = [age for event in events if isinstance(event, Trained) for age in event.ages]
    assert max(ages) <= 4
    planned = [event for event in events if isinstance(event, Planned)]
    assert bool(planned) == hasattr(strategy, "allocate")
    assert all((event.gradient_norm is not None) == (name == "gvm-raft") for event in planned)


def test_gradient_norms_are_measured_beside_an_engine_in_its_own_process(start: Path, tmp_path: Path) -> None:
    strategy = GvmRaft(probe=4, budget=4, block=4)
    summary = run(start, tmp_path / "run", strategy, runtime="process", steps=6)
    assert summary["steps"] == 6
    events = [event for _, event in read_events(tmp_path / "run" / "events.jsonl")]
    norms = [event.gradient_norm for event in events if isinstance(event, Planned)]
    assert all(norm is not None for norm in norms)
    assert any(norm for norm in norms)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(name: str, start: Path, tmp_path: Path) -> None:
    rows = assert_trained(run(start, tmp_path / "run", FixedK(), LOSSES[name]()), start, tmp_path / "run")
    assert any(row["grad_norm"] > 0 for row in rows)


def test_all_options_of_the_learner_together(start: Path, tmp_path: Path) -> None:
    demo = RECIPES["demo"].settings
    options = replace(
        demo.learner, normalize="group", ratio_mask_low=0.5, ratio_mask_high=5.0, score_centering=8, kl_beta=0.01
    )
    changes = {
        "learner": options,
        "sampling": replace(demo.sampling, overlong_buffer=2),
        "batch": BatchSettings(n_completions=24, n_groups=8, max_pending=32),
    }
    rows = assert_trained(
        run(start, tmp_path / "run", NeverGiveUp(p=0.5), Reinforce(), **changes), start, tmp_path / "run"
    )
    assert rows[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl_reference"] > 0
    assert all("masked_share" in row for row in rows)
    sizes = [row["n_completions"] for row in rows]
    assert all(size <= 24 or row["n_groups"] == 1 for size, row in zip(sizes, rows, strict=True))
    assert sum(sizes) / len(sizes) > 12, "batches are cut by completions"


def test_a_run_with_score_centering_resumes(start: Path, tmp_path: Path) -> None:
    """The sampler's top tokens of groups that wait go through the checkpoint."""
    demo = RECIPES["demo"].settings
    options = replace(demo.learner, score_centering=4, kl_beta=0.01)
    run(start, tmp_path / "run", NeverGiveUp(p=0.5), Cispo(), learner=options, steps=4, checkpoint_every=2)
    longer = replace(read_settings(tmp_path / "run"), steps=8)
    summary = train(longer, tmp_path / "run", PlainView(Console(quiet=True)), resume=True)
    assert summary["steps"] == 8
