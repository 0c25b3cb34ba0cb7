r"""The task `gsm8k`: grade-school word problems whose answer is one number. Also any data of one's own in that style.

Layer 3. Standard library only; the rows are shipped with the package (see `data/README.md` for where they come from).

    train   GSM8K, 7,473 problems
    test    GSM8K-Platinum, 1,209 problems: the test set without its errors

A completion scores 1 if its final answer (the last `\boxed{}`, or where there is none, what follows `####` or "The
answer is") is exactly the gold number, else 0; no answer scores 0.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nevergiveup.grading.math import grade_math
from nevergiveup.grading.numbers import number
from nevergiveup.protocols import Checker
from nevergiveup.tasks.rows import (
    ANSWER_KEYS,
    QUESTION_KEYS,
    Chat,
    Made,
    Row,
    Unverifiable,
    chat_of,
    make_prompts,
    parse_rows,
    read_rows,
    text_of,
    value_of,
)
from nevergiveup.types import Completion, Excluded, Prompt, Score

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

EXAMPLES = (
    ("Tom has 3 bags with 4 apples each. He eats 2 apples. How many apples are left?", 10),
    ("A pen costs $2 and a book costs $9. How much do 5 pens and a book cost?", 19),
    ("Ben has 24 marbles. He gives half of them to his sister and shares the rest equally among 4 friends. "
     "How many marbles does each friend get?", 3),
)  # fmt: skip
"""Solved problems, made up for this purpose."""

Style: TypeAlias = Literal["steps", "answer"]
"""steps: the question with a request to reason step by step. answer: after EXAMPLES, answered without any reasoning, as
earlier turns of the chat; for models too small to reason, whose rare right answers are guesses."""

SPLITS: Mapping[str, str] = {"train": "gsm8k_train.jsonl.gz", "test": "gsm8k_platinum.jsonl.gz"}


class GSM8K:
    """The task gsm8k.

    data, test_data: rows of one's own in place of the shipped ones (see `load_rows`). With data alone nothing is evaluated.
    excluded: the rows that were left out so far, because their answer is no number.
    """

    def __init__(
        self, style: Style = "steps", data: str = "", test_data: str = "", *, allow_unverifiable: bool = False
    ) -> None:
        self.style = style
        self.excluded: list[Excluded] = []
        self._sources = {"train": data, "test": test_data}
        self._allow_unverifiable = allow_unverifiable
        self._prompts: dict[str, list[Prompt]] = {}

    def prompts(self, split: str) -> list[Prompt]:
        if split not in SPLITS:
            raise ValueError(f"gsm8k has no split {split!r}: use one of {', '.join(SPLITS)}")
        if split not in self._prompts:
            self._prompts[split] = self._read(split)
        return self._prompts[split]

    def _read(self, split: str) -> list[Prompt]:
        source = self._sources[split]
        if source:
            made = load_rows(source, self.style, allow_unverifiable=self._allow_unverifiable)
            self.excluded += made.excluded
            return made.prompts
        return [] if self._sources["train"] and split == "test" else _shipped(SPLITS[split], self.style)

    def grade(self, prompt: Prompt, completion: Completion) -> Score:
        grade = grade_math(prompt.answer, completion.text, numeral=True)
        assert isinstance(grade, Score)  # numerals need no other process
        return grade

    async def validate(self, checker: Checker) -> None:
        """Reads the rows; whether an answer is a number shows there."""
        for split in SPLITS:
            self.prompts(split)

    def canaries(self) -> list[tuple[Prompt, Completion, int]]:
        prompt = Prompt("canary", answer="1,234")
        texts = {
            r"So it is \boxed{1234}.": 1,
            r"So it is \boxed{1235}.": 0,
            "It is 1234, I think.": 0,
            "#### 1,234.0": 1,
        }
        return [(prompt, Completion((), (), text, "stop", 0, 0), reward) for text, reward in texts.items()]


def load_rows(source: str | Path, style: Style = "steps", *, allow_unverifiable: bool = False) -> Made:
    """Prompts from rows of one's own (see `tasks.rows.read_rows`), and the rows that are left out.

    The question: text, which is put into the chat of that style, or a list of chat messages, which is left as it is. The
    answer: a number, or a text that is one or has one after its last `####`.

    Raises ValueError that names the file and every defective line (the first ten), and when too many answers are no numbers.
    """
    return make_prompts(
        read_rows(str(source)), str(source), partial(_row, style=style), allow_unverifiable=allow_unverifiable
    )


def _shipped(name: str, style: Style) -> list[Prompt]:
    data = gzip.decompress(files("nevergiveup.tasks").joinpath("data", name).read_bytes())
    return make_prompts(parse_rows(data, name), name, partial(_row, style=style)).prompts


def _row(row: Row, style: Style) -> tuple[Chat, str]:
    messages = chat_of(value_of(row, QUESTION_KEYS, "question"), partial(_asked, style=style))
    return messages, gold_number(value_of(row, ANSWER_KEYS, "answer"))


def _asked(question: str, style: Style) -> Chat:
    if style == "steps":
        return ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},)
    turns = [(asked, rf"The answer is \boxed{{{answer}}}.") for asked, answer in EXAMPLES]
    chat = [text for turn in turns for text in turn] + [question]
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat))


def gold_number(answer: Any) -> str:
    """The gold number of an answer, as it is written. Raises Unverifiable when there is none."""
    text = text_of(answer)
    gold = None if text is None else text.rpartition("####")[2].strip()
    if gold is None or number(gold) is None:
        shown = answer if isinstance(answer, str) else str(answer)
        raise Unverifiable(shown if len(shown) <= 60 else f"{shown[:57]}...", "not a number, alone or after ####")
    return gold
