"""Recipes: named, complete settings, each with the result to expect.

Layer 4. Costs nothing to import. `ngu recipes` prints them; a TOML file and flags change single values of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from nevergiveup.settings import (
    BatchSettings,
    EvalSettings,
    LearnerSettings,
    ModelSettings,
    SamplingSettings,
    Settings,
)
from nevergiveup.strategies import NeverGiveUp
from nevergiveup.task_settings import ChainsTask, Gsm8kTask, ManufactoriaTinyTask


@dataclass(frozen=True, slots=True)
class Recipe:
    """summary: one line on what is trained. expect: what comes out, and what it takes."""

    name: str
    summary: str
    expect: str
    settings: Settings


_ALL = (
    Recipe(
        name="demo",
        summary="NGU on generated puzzles (task chains), with a tiny model that is warm-started first",
        expect="held-out pass@1 of extra-hard prompts from about .01 to .55-.95 (by seed); a minute and a half on two cores",
        settings=Settings(
            task=ChainsTask(preset="demo", max_prompt_tokens=8),
            strategy=NeverGiveUp(k=4, p=0.95, window=4),
            sampling=SamplingSettings(max_new_tokens=6, n_slots=256),
            batch=BatchSettings(n_groups=8, max_pending=64, retry_order="front"),
            learner=LearnerSettings(lr=5e-4),
            eval=EvalSettings(every=20),
            steps=None,
            max_completions=61_440,
        ),
    ),
    Recipe(
        name="manufactoria-tiny",
        summary="NGU on programs for a robot, without text, rewarded per test; a tiny model that is warm-started first",
        expect="held-out programs that pass all tests, hidden ones too, from about .4 to .7-.86 (by seed); two minutes on two "
        "cores",
        settings=Settings(
            task=ManufactoriaTinyTask(max_prompt_tokens=9),
            model=ModelSettings(warm_steps=250, warm_batch=128),
            strategy=NeverGiveUp(k=4, p=0.95, window=4),
            sampling=SamplingSettings(max_new_tokens=29, n_slots=256),
            batch=BatchSettings(n_groups=32, max_pending=128, retry_order="front"),
            learner=LearnerSettings(lr=3e-4),
            eval=EvalSettings(n=16),
            steps=None,
            max_completions=40_960,
        ),
    ),
    Recipe(
        name="gsm8k-smollm2",
        summary="NGU on grade-school mathematics (GSM8K) with SmolLM2-135M-Instruct; first: ngu fetch smollm2",
        expect="a real model on real rows, on a CPU: one to two minutes a step, 2 GB of disk. "
        "It guesses 1 to 3 % of the answers at the start; "
        "no lasting gain has been measured",
        settings=Settings(
            task=Gsm8kTask(style="answer", max_prompt_tokens=224),
            model=ModelSettings(path="smollm2", engine_dtype="bfloat16"),
            strategy=NeverGiveUp(k=4, p=0.9, window=4),
            sampling=SamplingSettings(max_new_tokens=16, n_slots=64),
            batch=BatchSettings(n_groups=4, max_pending=24),
            learner=LearnerSettings(lr=1e-6, micro_batch_tokens=4096),
            eval=EvalSettings(n_prompts=0),
            steps=200,
        ),
    ),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Name on the command line -> recipe."""
