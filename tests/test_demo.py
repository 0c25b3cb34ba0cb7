"""The comparison and its files, on a policy that is hardly taught; the figures of the real demonstration are in the README."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from nevergiveup import demo
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import EvalSettings, ModelSettings
from nevergiveup.strategies import FixedK, NeverGiveUp

pytestmark = pytest.mark.slow


def test_both_arms_differ_in_strategy_and_batch_only():
    arms = demo.arms(RECIPES["demo"].settings)
    assert isinstance(arms["fixed"].strategy, FixedK)
    assert isinstance(arms["ngu"].strategy, NeverGiveUp)
    assert arms["fixed"].batch.n_groups * arms["fixed"].strategy.k == 256
    same = {"strategy": arms["ngu"].strategy, "batch": arms["ngu"].batch}
    assert replace(arms["fixed"], **same) == arms["ngu"]


def test_comparison_of_two_seeds(tmp_path):
    settings = replace(
        RECIPES["demo"].settings,
        model=ModelSettings(warm_steps=80, warm_batch=64),
        eval=EvalSettings(every=0),
        max_completions=1024,
        runtime="here",
    )
    text = StringIO()
    comparison = demo.main([0, 1], tmp_path, Console(file=text, width=80), settings)

    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison
    assert comparison["seeds"] == [0, 1]
    for split in ("heldout", "train"):
        for arm in ("fixed", "ngu"):
            mean = comparison[split][arm]
            per_seed = [comparison["per_seed"][seed][split][arm] for seed in ("0", "1")]
            assert mean["completions"] == 1024
            for when in ("before", "after"):
                assert mean[when]["all"] == pytest.approx(sum(row[when]["all"] for row in per_seed) / 2)
                assert mean[when].keys() <= {"easy", "medium", "hard", "extra_hard", "all"}
        for seed in ("0", "1"):  # the same start for both
            row = comparison["per_seed"][seed][split]
            assert row["fixed"]["before"] == row["ngu"]["before"]
            assert row["fixed"]["after"] != row["ngu"]["after"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    last_row = next(line for line in text.getvalue().splitlines() if line.startswith("│ all"))
    assert f"{comparison['heldout']['ngu']['after']['all']:.3f}" in last_row
    assert last_row.count("1,024") == 2
