"""Trackers get what metrics.jsonl holds, under the same names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nevergiveup import build
from nevergiveup.report.trackers import check_trackers
from test_train import run, small, start  # noqa: F401

pytestmark = pytest.mark.slow


def test_tensorboard_gets_every_figure_of_every_step(start: Path, tmp_path: Path) -> None:  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = run(small(start, track="tensorboard"), tmp_path / "run")
    (folder,) = (tmp_path / "run" / "trackers").iterdir()
    logged = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in {name for row in rows for name in row}:
        wanted = [(row["step"], row[name]) for row in rows if name in row]
        assert [(event.step, event.value) for event in logged.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-5)) for step, value in wanted
        ]
    rates = [row["pass_rates"]["all"] for row in summary["evaluations"] if row["split"] == "heldout"]
    assert [event.value for event in logged.Scalars("eval/heldout/all")] == pytest.approx(rates)


def test_unknown_trackers_and_missing_packages_are_refused_before_anything_is_loaded(start: Path) -> None:  # noqa: F811
    with pytest.raises(
        ValueError, match='track = "tensorbord" is no tracker that is known: use one or more of tensorboard'
    ):
        build.check(small(start, track="tensorbord"))
    with pytest.raises(ValueError, match='track = "wandb" needs a package that is not installed: pip install wandb'):
        check_trackers(["tensorboard", "wandb"])
