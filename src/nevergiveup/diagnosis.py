"""What is wrong with a run and what to change, in words. Layer 1. Standard library only.

    diagnose(figures)   rule name -> sentence, most serious first

figures: those of `metrics.Tally.figures`, and where they are known, means of the figures of the optimizer steps (idle shares,
clip_fraction, ...) under the names of metrics.jsonl. A rule whose figures are missing says nothing. To change what is said,
change RULES; docs/metrics.md explains the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, float]

N_ROUNDS = 16
"""Scored rounds from which shares of rounds are worth a sentence."""

N_COMPLETIONS = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """applies: whether the sentence is true of figures that hold all of `needs`. words: the sentence with its remedy."""

    name: str
    needs: tuple[str, ...]
    applies: Callable[[Figures], bool]
    words: Callable[[Figures], str]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _many_rounds(f: Figures) -> bool:
    return f.get("rounds", 0) >= N_ROUNDS


def _graded(f: Figures) -> float:
    return f.get("completions_scored", 0) + f.get("completions_unverified", 0)


def _drawn(f: Figures) -> float:
    return f.get("completions/all/drawn", 0.0)


def _share_of_drawn(f: Figures, fate: str) -> float:
    return f.get(f"completions/all/{fate}", 0.0) / _drawn(f) if _drawn(f) else 0.0


RULES: tuple[Rule, ...] = (
    Rule(
        "grader",
        ("unverified",),
        lambda f: _graded(f) >= N_COMPLETIONS and f["unverified"] >= 0.05,
        lambda f: (
            f"{percent(f['unverified'])} of completions got no verdict from the grader. They do not count as wrong, but they "
            "are paid for: mend the reward function, or raise grading.timeout_s or grading.memory_mb"
        ),
    ),
    Rule(
        "no_answer",
        ("no_answer",),
        lambda f: _graded(f) >= N_COMPLETIONS and f["no_answer"] >= 0.2,
        lambda f: (
            f"{percent(f['no_answer'])} of completions state no answer at all: check that the prompt asks for the form that "
            "the grader reads, and that there is room for it (sampling.max_new_tokens)"
        ),
    ),
    Rule(
        "length_limit",
        ("all_wrong", "length_limited"),
        lambda f: _many_rounds(f) and f["all_wrong"] >= 0.5 and f["length_limited"] >= 0.5,
        lambda f: (
            f"{percent(f['all_wrong'])} of groups are all wrong, and {percent(f['length_limited'])} of those were cut by the "
            "length limit throughout: raise sampling.max_new_tokens before strategy.p"
        ),
    ),
    Rule(
        "truncated",
        ("truncated",),
        lambda f: (
            _graded(f) >= N_COMPLETIONS
            and f["truncated"] >= 0.25
            and not (f.get("all_wrong", 0) >= 0.5 and f.get("length_limited", 0) >= 0.5)
        ),
        lambda f: (
            f"{percent(f['truncated'])} of completions are cut by the length limit: raise "
            "sampling.max_new_tokens, or penalise length softly (sampling.overlong_buffer)"
        ),
    ),
    Rule(
        "nothing_solved",
        ("all_wrong", "signal"),
        lambda f: _many_rounds(f) and f["all_wrong"] >= 0.95 and f.get("length_limited", 0) < 0.5,
        lambda f: (
            f"{percent(f['all_wrong'])} of groups are all wrong: hardly anything is solvable for this policy. `ngu probe` "
            "tells what more samples would find; mix easier prompts in, start from a better model, and look at what the "
            "grader calls wrong (samples.jsonl)"
        ),
    ),
    Rule(
        "all_solved",
        ("all_right",),
        lambda f: _many_rounds(f) and f["all_right"] >= 0.8,
        lambda f: (
            f"{percent(f['all_right'])} of groups are all right: the data are too easy for this policy by now. Bring harder "
            "prompts, or stop: what is left costs a round for each prompt and teaches little"
        ),
    ),
    Rule(
        "flat",
        ("flat",),
        lambda f: _many_rounds(f) and f["flat"] >= 0.3,
        lambda f: (
            f"{percent(f['flat'])} of groups have one and the same partial score throughout, which teaches nothing: score in "
            "finer steps, or draw more at once (strategy.k)"
        ),
    ),
    Rule(
        "given_up",
        ("chains/given_up",),
        lambda f: f["chains/given_up"] >= N_ROUNDS and _share_of_drawn(f, "given_up") >= 0.4,
        lambda f: (
            f"{percent(_share_of_drawn(f, 'given_up'))} of completions went to prompts that were given up: look at the list "
            "of these (`ngu report`), where wrong gold answers collect; a lower strategy.p spends less on them"
        ),
    ),
    Rule(
        "stale",
        ("went_stale",),
        lambda f: _drawn(f) >= N_COMPLETIONS and _share_of_drawn(f, "stale") >= 0.25 and f["went_stale"] > 0,
        lambda f: (
            f"{percent(_share_of_drawn(f, 'stale'))} of completions became too old to train on, and "
            f"{f['went_stale']:.0f} groups lost their contrast by that: keep fewer groups open (batch.max_pending, "
            "batch.lag), or raise strategy.window"
        ),
    ),
    Rule(
        "engine_waits",
        ("engine_idle", "learner_idle"),
        lambda f: f["engine_idle"] >= 0.3 and f["engine_idle"] > f["learner_idle"],
        lambda f: (
            f"the engine waits {percent(f['engine_idle'])} of the time: the trainer is the slower side, or back-pressure "
            "holds the engine up. Raise batch.max_pending if few rounds end in a group to train on; else speed the "
            "trainer up (learner.micro_batch_tokens, model.dtype)"
        ),
    ),
    Rule(
        "learner_waits",
        ("engine_idle", "learner_idle"),
        lambda f: f["learner_idle"] >= 0.6 and f["engine_idle"] < 0.3,
        lambda f: (
            f"the trainer waits {percent(f['learner_idle'])} of the time: generation is the slower side. Raise "
            "sampling.n_slots, use model.engine_dtype = bfloat16, or add engines"
        ),
    ),
    Rule(
        "disagreement",
        ("same_version_gap_mean",),
        lambda f: f["same_version_gap_mean"] >= 0.05,
        lambda f: (
            f"engine and trainer disagree by {f['same_version_gap_mean']:.3f} nats a token about the same weights: use the "
            "same number format (model.engine_dtype), or mask what is far off (learner.ratio_mask_low and -high)"
        ),
    ),
    Rule(
        "off_policy",
        ("effective_sample_share",),
        lambda f: f["effective_sample_share"] <= 0.5,
        lambda f: (
            f"importance weights leave {percent(f['effective_sample_share'])} of the batch effective: the policy moves too "
            "far between sampling and training. Lower learner.lr, batch.lag or strategy.window"
        ),
    ),
    Rule(
        "clipped",
        ("clip_fraction",),
        lambda f: f["clip_fraction"] >= 0.2,
        lambda f: (
            f"{percent(f['clip_fraction'])} of tokens are clipped and give no gradient: lower learner.lr or batch.lag"
        ),
    ),
    Rule(
        "not_finite",
        ("nonfinite_grad",),
        lambda f: f["nonfinite_grad"] > 0,
        lambda f: (
            f"{percent(f['nonfinite_grad'])} of steps were skipped because a gradient was not finite: lower learner.lr, or "
            "use model.dtype = float32"
        ),
    ),
)
"""The most serious first."""


def diagnose(figures: Figures) -> dict[str, str]:
    """Name of each rule that applies -> its sentence, in the order of RULES."""
    return {
        rule.name: rule.words(figures)
        for rule in RULES
        if all(name in figures for name in rule.needs) and rule.applies(figures)
    }
