"""The demonstration: fixed-K GRPO and NGU from the same policy, with the same number of completions. Layer 4.

A comparison (see compare.py) of two arms whose batches are set by hand. Figures are exact pass rates on prompts that no run
saw.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nevergiveup.compare import Arm, compare, print_comparison
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import Settings
from nevergiveup.strategies import FixedK, NeverGiveUp


def arms(settings: Settings) -> list[Arm]:
    """The two runs that are compared. They differ in the strategy and in how batches are cut: a fixed-K batch of 64 groups
    is 256 completions whether or not they teach anything; an NGU batch holds groups with contrast only, and 8 of them come
    from about as many completions, so that both make about as many optimizer steps. Learning rate and all else are equal.
    """
    assert isinstance(settings.strategy, NeverGiveUp)
    fixed = FixedK(k=settings.strategy.k)
    return [
        Arm("fixed-K", fixed, replace(settings.batch, n_groups=64, max_pending=128)),
        Arm("NGU", settings.strategy, settings.batch),
    ]


def main(
    seeds: Sequence[int], out: Path, console: Console | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """Runs the comparison for every seed and prints it; returns what comparison.json holds. settings: of the NGU run."""
    console = console or Console()
    settings = settings or RECIPES["demo"].settings
    for seed in seeds:
        shutil.rmtree(out / f"seed-{seed}", ignore_errors=True)  # of an earlier demonstration
    comparison = compare(settings, arms(settings), seeds, out, console)
    print_comparison(comparison, console)
    console.print(f"Curves: {out / 'curves.png'}   figures: {out / 'comparison.json'}", highlight=False)
    folders = " ".join(str(out / f"seed-{seeds[0]}" / arm.folder) for arm in arms(settings))
    console.print(f"A page on both runs: ngu report {folders}", highlight=False)
    return comparison
