"""Words of a report and what they mean, for those who meet them for the first time. Layer 3. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

GLOSSARY: Mapping[str, str] = {
    "95 % interval": "Where the figure would fall 95 times out of 100 with other prompts of the same kind (paired bootstrap "
    "over prompts). A difference whose interval leaves out zero is hardly chance.",
    "advantage": "How much a completion is rewarded above its group's baseline: the weight it trains with. All advantages are "
    "zero when the rewards of a group are equal.",
    "age": "Policy versions between the one that sampled a completion and the one that trains on it.",
    "all right": "Every completion of the round got the full reward.",
    "all wrong": "No completion of the round got any reward.",
    "completions": "Answers that the policy wrote. Drawing them is what a run pays for.",
    "contrast": "The rewards in a group differ. Without contrast every advantage is zero, and there is nothing to learn.",
    "difficulty": "By the pass rate of the policy at the start: easy above 70 %, medium 30 to 70 %, hard 2 to 30 %, "
    "extra hard below 2 %.",
    "drawn": "Asked for from the engine, whatever became of them.",
    "failed": "Asked for and never returned: lost to trouble of the machinery.",
    "filtered": "In a group that was closed as solved: nothing to learn there at this visit.",
    "given up": "In a group without contrast that was closed after one or more rounds; the prompt comes back in the next pass.",
    "gold answer": "The answer that the data set holds for right.",
    "held": "In flight, open or ready to train on when the file ended.",
    "held-out": "Not trained on.",
    "idle": "Nothing to do: the engine because enough is drawn, or the trainer because no batch is full.",
    "left out": "In a group that was trained on, but without a weight of its own.",
    "Matthew effect": "Unto every one that hath shall be given: gains go to prompts that are solved already.",
    "pass@1": "Share of completions that are right, as a mean over prompts: how likely one try solves a prompt.",
    "points": "Percentage points: from 60 % to 63 % is 3 points.",
    "signal": "The same as contrast.",
    "policy": "The language model that is trained.",
    "policy version": "Counts the optimizer steps whose weights the engine has.",
    "rounds": "Completions of one prompt that were asked for together. A retry is another round at the same visit.",
    "stale": "Too old to train on. They still count in the baseline.",
    "trained": "Went into an optimizer step with a weight.",
    "unverified": "The grader could not decide. Such a completion is no wrong answer; it leaves its group.",
    "visits": "Times that a prompt's turn came: once in each pass over the data.",
}
"""Term, as it stands in the text -> its meaning."""
