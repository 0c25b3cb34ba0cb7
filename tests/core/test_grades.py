"""What a task's rule returns becomes one exact number, a story to tell, or no verdict; never a wrong answer by accident."""

import asyncio
from fractions import Fraction

import pytest

from nevergiveup.events import Graded, Judged, decode, encode
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.metrics import Tally
from nevergiveup.types import NO_ANSWER, Check, Completion, Prompt, Score, Sum, Unverified

PROMPT = Prompt("p")


def completion(text):
    return Completion((1,), (-0.1,), text, "stop", 0, 0)


class Rule:
    def __init__(self, grade):
        self._grade = grade

    def prompts(self, split):
        return []

    def grade(self, prompt, completion):
        return self._grade(completion.text)


def grades(rule, *texts):
    return asyncio.run(TaskGrader(Rule(rule)).grade(PROMPT, [completion(text) for text in texts]))


def to_number(text):
    return float(text)


def test_a_check_is_worked_out_and_what_it_raises_is_no_verdict():
    right, broken = grades(lambda text: Check(to_number, (text,)), "0.25", "boom")
    assert right == 0.25
    assert isinstance(broken, Unverified)
    assert "could not convert string to float: 'boom'" in broken.reason


def test_weighted_parts_are_summed_exactly_and_kept_apart():
    def rule(text):
        return Sum(
            {
                "correct": (1, Score(1, "equal", answer=text, parts={"exact": 1.0})),
                "format": (Fraction(1, 10), Check(to_number, ("0.5",))),
                "length": (-1, Fraction(1, 3)),
            }
        )

    (grade,) = grades(rule, "42")
    assert grade == Score(
        1 + Fraction(1, 20) - Fraction(1, 3),
        "equal",
        "42",
        {"correct": 1.0, "correct/exact": 1.0, "format": 0.5, "length": 1 / 3},
    )


def test_one_part_without_a_verdict_leaves_the_whole_without_one_and_is_named():
    (grade,) = grades(lambda text: Sum({"correct": (1, 1), "style": (1, Unverified("no server"))}), "x")
    assert grade == Unverified("style: no server")


@pytest.mark.parametrize("bad", ["1", None, float("nan"), Score(float("inf")), [1]])
def test_what_is_no_number_is_no_verdict(bad):
    (grade,) = grades(lambda text: bad, "x")
    assert isinstance(grade, Unverified)


def test_c18_what_raises_for_one_completion_says_nothing_about_it():
    def rule(text):
        if text == "?":
            raise RuntimeError("boom")
        return int(text)

    first, second, raised, fourth = grades(rule, "1", "0", "?", "0")
    assert [reward_of(grade) for grade in (first, second, fourth)] == [1, 0, 0]
    assert isinstance(raised, Unverified)
    assert raised.reason.strip().endswith("RuntimeError: boom")


def test_what_the_grader_says_is_counted_and_shown():
    tally = Tally()
    event = Graded(3, "p", 3, {NO_ANSWER: 2, "equal": 1}, {"timeout after 5 s": 1}, {"correct": 1.0, "format": 1.5})
    assert decode(encode(event, 1.0)) == (1.0, event)
    tally.add(event)
    tally.add(Judged(3, "p", 0, 1, (1, 0, 0), (0, 0, 0), 1, 0, 0, "train", "", 3, 1, 3, 0))
    figures = tally.figures()
    assert figures["no_answer"] == 2 / 3
    assert figures["unverified"] == 1 / 4
    assert figures["reward/correct"] == 1 / 3
    assert figures["reward/format"] == 0.5
    words = " / ".join(tally.in_words())
    assert "1 of 4 completions got no verdict and left their groups: timeout after 5 s (1)" in words
    for _ in range(30):
        tally.add(event)
        tally.add(Judged(3, "p", 0, 1, (1, 0, 0), (0, 0, 0), 1, 0, 0, "train", "", 3, 1, 3, 0))
    assert "67 % of completions state no answer at all" in " / ".join(tally.in_words())
