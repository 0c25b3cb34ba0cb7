"""What a run is told about itself: each rule at its threshold, and the right sentence for runs that go wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver import attempts, prompts_named

from nevergiveup.diagnosis import RULES, diagnose
from nevergiveup.metrics import Tally
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import NeverGiveUp
from nevergiveup.types import Attempt, Completion, Request

MANY = {"rounds": 100.0, "completions_scored": 400.0, "completions/all/drawn": 400.0}

CASES: dict[str, tuple[dict[str, float], dict[str, float], str]] = {
    # rule: figures for which it speaks, figures for which it does not, a part of what it says
    "grader": ({"unverified": 0.06}, {"unverified": 0.04}, "6 % of completions got no verdict"),
    "no_answer": ({"no_answer": 0.2}, {"no_answer": 0.19}, "20 % of completions state no answer at all"),
    "length_limit": (
        {"all_wrong": 0.83, "length_limited": 0.7},
        {"all_wrong": 0.83, "length_limited": 0.4},
        "83 % of groups are all wrong, and 70 % of those were cut by the length limit throughout: raise "
        "sampling.max_new_tokens before strategy.p",
    ),
    "truncated": (
        {"truncated": 0.3},
        {"truncated": 0.9, "all_wrong": 0.9, "length_limited": 0.9},
        "30 % of completions are cut",
    ),
    "nothing_solved": (
        {"all_wrong": 0.97, "signal": 0.03},
        {"all_wrong": 0.97, "signal": 0.03, "length_limited": 0.9},
        "97 % of groups are all wrong: hardly anything is solvable",
    ),
    "all_solved": ({"all_right": 0.8}, {"all_right": 0.79}, "80 % of groups are all right"),
    "flat": ({"flat": 0.3}, {"flat": 0.29}, "30 % of groups have one and the same partial score"),
    "given_up": (
        {"chains/given_up": 20, "completions/all/given_up": 160},
        {"chains/given_up": 20, "completions/all/given_up": 150},
        "40 % of completions went to prompts that were given up",
    ),
    "stale": (
        {"went_stale": 3, "completions/all/stale": 100},
        {"went_stale": 3, "completions/all/stale": 99},
        "25 % of completions became too old to train on, and 3 groups lost",
    ),
    "engine_waits": (
        {"engine_idle": 0.3, "learner_idle": 0.1},
        {"engine_idle": 0.3, "learner_idle": 0.4},
        "the engine waits 30 % of the time",
    ),
    "learner_waits": (
        {"engine_idle": 0.0, "learner_idle": 0.6},
        {"engine_idle": 0.0, "learner_idle": 0.5},
        "the trainer waits 60 % of the time",
    ),
    "disagreement": ({"same_version_gap_mean": 0.05}, {"same_version_gap_mean": 0.04}, "disagree by 0.050 nats"),
    "off_policy": ({"effective_sample_share": 0.5}, {"effective_sample_share": 0.6}, "leave 50 % of the batch effective"),
    "clipped": ({"clip_fraction": 0.2}, {"clip_fraction": 0.1}, "20 % of tokens are clipped"),
    "not_finite": ({"nonfinite_grad": 0.1}, {"nonfinite_grad": 0.0}, "10 % of steps were skipped"),
}  # fmt: skip


def test_every_rule_has_its_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_from_its_threshold_on(name: str) -> None:
    speaks, silent, words = CASES[name]
    found = diagnose(MANY | speaks)
    assert list(found) == [name]
    assert words in found[name]
    assert name not in diagnose(MANY | silent)


OF_STEPS = ("engine_waits", "learner_waits", "disagreement", "off_policy", "clipped", "not_finite")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_STEPS])
def test_few_samples_say_nothing(name: str) -> None:
    few = {"rounds": 15.0, "completions_scored": 60.0, "completions/all/drawn": 60.0}
    assert name not in diagnose(few | {key: min(value, 15) for key, value in CASES[name][0].items()})


def test_missing_figures_say_nothing() -> None:
    assert diagnose({}) == {}
    assert diagnose(MANY) == {}


def run(rewards: Callable[[Request], list[Attempt]], *, n_truncated: int = 0, n_unverified: int = 0) -> dict[str, str]:
    """Sixty prompts through the real scheduler; what its events come to."""
    tally = Tally()
    scheduler = Scheduler(NeverGiveUp(k=4, p=0.5), prompts_named(60), n_groups=4, max_epochs=1, on_event=tally.add)
    while not scheduler.finished:
        while (request := scheduler.next()) is not None:
            scheduler.deliver(request.id, rewards(request), n_unverified)
        while scheduler.take() is not None:
            scheduler.publish(scheduler.version + 1)
    return diagnose(tally.figures())


def test_a_healthy_run_is_told_nothing() -> None:
    assert run(lambda request: attempts([1, 0, 0, 1])) == {}


def test_dead_graders() -> None:
    assert list(run(lambda request: [], n_unverified=4)) == ["grader"]


def test_everything_is_cut() -> None:
    cut = Completion((1, 2), (0.0, 0.0), "", "length", 0, 0)
    found = run(lambda request: [Attempt(0, 0, cut) for _ in range(request.n)])
    assert list(found) == ["length_limit", "given_up"]


def test_everything_is_solved() -> None:
    assert list(run(lambda request: attempts([1] * request.n))) == ["all_solved"]


def test_nothing_can_be_solved() -> None:
    found = run(lambda request: attempts([0] * request.n))
    assert list(found) == ["nothing_solved", "given_up"]
