r"""The task `math`: problems whose answer is an expression, compared symbolically.

Layer 3. Standard library only; what needs a symbolic comparison is left to a checker (see `grading.math`).

    train   a part of DeepScaleR, 779 problems          test   MATH-500

Rows of one's own may have the layout of GSM8K, MATH, DeepScaleR, AIME, BRUMO, HMMT or any other with a question ("question",
"prompt", "problem" or "messages") and an answer ("answer", "solution", "gold" or "expected_answer"; the number behind `####`
or the last box of a worked solution). A data set whose answers are all whole numbers, as AIME's, wants a numeral:
`\boxed{2^{10}}` is not 1024 there. Answers with which nothing could be compared are listed and left out.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple

from nevergiveup.grading.answers import final_answer
from nevergiveup.grading.math import check_gold, grade_math, is_numeral
from nevergiveup.protocols import Checker
from nevergiveup.tasks.gsm8k import INSTRUCTION
from nevergiveup.tasks.rows import (
    ANSWER_KEYS,
    QUESTION_KEYS,
    Chat,
    Row,
    Unverifiable,
    chat_of,
    check_excluded,
    make_prompts,
    parse_rows,
    read_rows,
    text_of,
    value_of,
)
from nevergiveup.types import Check, Completion, Excluded, Prompt, Score, Unverified

SPLITS: Mapping[str, str] = {"train": "deepscaler_part.jsonl.gz", "test": "math_500.jsonl.gz"}


_PLACEHOLDER = re.compile(
    r"(?:see|refer\s+to|cf\.?)\s.{0,40}|(?:the\s+)?(?:solution|proof|prove|answer)s?(?:\s.{0,20})?|n\s*/?\s*a|unknown|tbd|todo|"
    r"omitted|not\s+(?:given|available|provided|applicable)|no\s+answer|\?+|-+|\.+",
    re.IGNORECASE,
)
"""Of a row without an answer: "see solution", "n/a", "?"."""


class Gold(NamedTuple):
    """The answer of a prompt. numeral: only a number that is written out counts."""

    text: str
    numeral: bool = False


class Math:
    """The task math. data, test_data: rows of one's own in place of the shipped ones; with data alone nothing is evaluated.

    excluded: the rows that `validate` has left out.
    """

    def __init__(self, data: str = "", test_data: str = "", *, allow_unverifiable: bool = False) -> None:
        self.excluded: list[Excluded] = []
        self._sources = {"train": data, "test": test_data}
        self._allow_unverifiable = allow_unverifiable
        self._prompts: dict[str, list[Prompt]] = {}
        self._where: dict[str, str] = {}

    def prompts(self, split: str) -> list[Prompt]:
        if split not in SPLITS:
            raise ValueError(f"math has no split {split!r}: use one of {', '.join(SPLITS)}")
        if split not in self._prompts:
            self._prompts[split] = self._read(split)
        return self._prompts[split]

    def _read(self, split: str) -> list[Prompt]:
        source = self._sources[split]
        if source:
            rows = read_rows(source)
        elif self._sources["train"] and split == "test":
            return []
        else:
            source = SPLITS[split]
            data = gzip.decompress(files("nevergiveup.tasks").joinpath("data", source).read_bytes())
            rows = parse_rows(data, source)
        made = make_prompts(rows, source, _row, allow_unverifiable=self._allow_unverifiable)
        self.excluded += made.excluded
        self._where |= made.where
        return with_numerals(made.prompts)

    async def validate(self, checker: Checker) -> None:
        """Leaves out the prompts whose gold answer would not be recognised itself. Raises ValueError when they are many."""
        for split in SPLITS:
            prompts = self.prompts(split)
            self._prompts[split], excluded = await valid(prompts, self._where, checker)
            self.excluded += excluded
            if prompts:
                source = self._sources[split] or SPLITS[split]
                check_excluded(excluded, len(prompts), source, self._allow_unverifiable)

    def grade(self, prompt: Prompt, completion: Completion) -> Score | Check:
        gold: Gold = prompt.answer
        return grade_math(gold.text, completion.text, numeral=gold.numeral)

    def canaries(self) -> list[tuple[Prompt, Completion, int]]:
        pairs = (
            (r"1-\sqrt{2}", r"\boxed{-\sqrt{2}+1}", 1),
            (r"1-\sqrt{2}", r"\boxed{1}", 0),
            (r"\frac{3}{4}", r"\boxed{0.75}", 1),
            ("(x+1)^2", r"\boxed{x^2+2x+1}", 1),
            ("(x+1)^2", r"\boxed{x^2+2x+2}", 0),
            ("5", r"\boxed{5}", 1),
            ("5", r"\boxed{6}", 0),
        )
        return [
            (Prompt("canary", answer=Gold(gold)), Completion((), (), text, "stop", 0, 0), reward)
            for gold, text, reward in pairs
        ]


def with_numerals(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts of one data set: where all golds are whole numbers, all want numerals."""
    if not prompts or not all(is_numeral(prompt.answer.text) for prompt in prompts):
        return prompts
    return [replace(prompt, answer=prompt.answer._replace(numeral=True)) for prompt in prompts]


async def valid(
    prompts: list[Prompt], where: Mapping[str, str], checker: Checker
) -> tuple[list[Prompt], list[Excluded]]:
    """The prompts (answers: `Gold`) whose gold answer can be verified, and the others. where: prompt id -> row."""
    grades = await asyncio.gather(*(check_gold(p.answer.text, checker, numeral=p.answer.numeral) for p in prompts))
    kept: list[Prompt] = []
    excluded: list[Excluded] = []
    for prompt, grade in zip(prompts, grades, strict=True):
        if isinstance(grade, Unverified) or (isinstance(grade, Score) and not grade.reward):
            excluded.append(Excluded(where[prompt.id], prompt.answer.text, grade.reason.rpartition("\n")[2]))
        else:
            kept.append(prompt)
    return kept, excluded


def _row(row: Row) -> tuple[Chat, Gold]:
    messages = chat_of(value_of(row, QUESTION_KEYS, "question"), asked)
    return messages, gold_of(value_of(row, ANSWER_KEYS, "answer"))


def asked(question: str) -> Chat:
    return ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},)


def gold_of(answer: Any) -> Gold:
    """The gold answer of a row: as it stands, or where a solution is given, what stands after #### or in the last box."""
    text = text_of(answer)
    if text is None:
        raise Unverifiable(str(answer)[:60], "neither a text nor a number")
    gold = text.strip()
    if _PLACEHOLDER.fullmatch(gold):
        raise Unverifiable(gold, "it stands for an answer that is not there")
    if "####" in gold:
        gold = gold.rpartition("####")[2].strip()
    elif "boxed" in gold or "fbox" in gold:
        stated = final_answer(gold)
        if stated is None:
            raise Unverifiable(text[:60], "a solution without a box that can be read")
        gold = stated
    is_formula = gold.count("$") == 2 and gold[0] == gold[-1] == "$"
    return Gold(gold[1:-1].strip() if is_formula else gold)
