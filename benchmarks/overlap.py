"""Idle shares of engine and trainer in two processes, once with the trainer as the faster side and once with the engine.

    python benchmarks/overlap.py [--steps 60]

Fixed-K GRPO on the task chains with the demo's model; nothing is filtered, so every batch costs the engine the same. The faster
side is made by giving the slower one more work: few decoding slots for the engine, one completion a pass for the trainer. The
slower side should be idle for less than 10 % of the steady state (the first tenth of the steps is left out).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nevergiveup import build
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.settings import BatchSettings, EvalSettings, Settings
from nevergiveup.strategies import FixedK
from nevergiveup.train import train


def regimes(settings: Settings) -> dict[str, Settings]:
    plain = replace(
        settings,
        strategy=FixedK(k=4),
        batch=BatchSettings(n_groups=64),
        eval=EvalSettings(n_prompts=0),
        max_completions=None,
        checkpoint_every=10_000,
    )
    return {
        "engine": replace(plain, sampling=replace(plain.sampling, n_slots=8)),
        "trainer": replace(plain, learner=replace(plain.learner, micro_batch_tokens=100)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    quiet = Console(quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        settings = RECIPES["demo"].settings
        build.warm_start(settings, start, lambda text: None)
        for slower, regime in regimes(settings).items():
            run = replace(regime, model=replace(regime.model, path=str(start)), steps=steps)
            idle = train(run, Path(folder) / slower, PlainView(quiet))["idle"]
            name = {"engine": "engine", "trainer": "learner"}[slower]
            verdict = "below 10 %" if idle[name] < 0.1 else "NOT below 10 %"
            print(
                f"the {slower:7} is the slower side: engine idle {idle['engine']:6.1%}, trainer idle {idle['learner']:6.1%}"
                f"   -> the {slower}'s share is {verdict}"
            )


if __name__ == "__main__":
    main()
