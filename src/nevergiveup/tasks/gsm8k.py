r"""The task `gsm8k`: grade-school word problems whose answer is one number. Also any data of one's own in that style.

Layer 3. Standard library only; the rows are shipped with the package (see `data/README.md` for where they come from).

    train   GSM8K, 7,473 problems
    test    GSM8K-Platinum, 1,209 problems: the test set without its errors

A completion scores 1 if its final answer (the last `\boxed{}`, or where there is none, what follows `####` or "The
answer is") is exactly the gold number, else 0; no answer scores 0.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nevergiveup.grading.numbers import final_answer, number, same_number
from nevergiveup.types import Completion, Message, Prompt

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

QUESTION_KEYS = ("question", "prompt")
ANSWER_KEYS = ("answer", "solution", "gold")
_MOST_SHOWN = 10


class GSM8K:
    """The Task of the shipped rows. `grade` judges any prompt whose `answer` is a number as text (see `load_rows`)."""

    def __init__(self, style: Style = "steps") -> None:
        self.style = style

    def prompts(self, split: str) -> list[Prompt]:
        if split not in SPLITS:
            raise ValueError(f"gsm8k has no split {split!r}: use one of {', '.join(SPLITS)}")
        name = SPLITS[split]
        return _prompts(
            gzip.decompress(files("nevergiveup.tasks").joinpath("data", name).read_bytes()), name, self.style
        )

    def grade(self, prompt: Prompt, completion: Completion) -> int:
        gold = number(prompt.answer)
        if gold is None:  # rows were checked when they were loaded
            raise ValueError(f"prompt {prompt.id}: the gold answer {prompt.answer!r} is not a number")
        stated = final_answer(completion.text)
        answer = None if stated is None else number(stated)
        return int(answer is not None and same_number(gold, answer))


def load_rows(path: Path, style: Style = "steps") -> list[Prompt]:
    """Prompts from a JSONL file of one's own, one object a line (UTF-8; a byte order mark, CRLF and empty lines do no harm).

    "question" or "prompt": text, which is put into the chat of that style, or a list of chat messages, which is left as
    it is. "answer", "solution" or "gold": a number, or a text that is one or has one after its last `####`.

    Raises ValueError that names the file and every defective line (the first ten): nothing is skipped in silence.
    """
    return _prompts(Path(path).read_bytes(), str(path), style)


def _prompts(data: bytes, name: str, style: Style) -> list[Prompt]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}: not UTF-8 text; save the file in UTF-8") from None
    prompts: list[Prompt] = []
    defects: list[str] = []
    seen: set[str] = set()
    for line, row in enumerate(text.split("\n"), start=1):  # not splitlines: JSON texts may hold other line separators
        if not row.strip():
            continue
        try:
            messages, answer = _row(row, style)
        except ValueError as error:
            defects.append(f"line {line}: {error}")
            continue
        content = json.dumps([messages, answer], ensure_ascii=False).encode()
        row_id = hashlib.sha256(content).hexdigest()[:16]
        if row_id in seen:
            row_id = f"{row_id}-{line}"
        seen.add(row_id)
        prompts.append(Prompt(id=row_id, messages=messages, answer=answer))
    if defects:
        more = f"\n  and {len(defects) - _MOST_SHOWN} more" if len(defects) > _MOST_SHOWN else ""
        listed = "".join(f"\n  {defect}" for defect in defects[:_MOST_SHOWN])
        raise ValueError(f"{name}: {len(defects)} of {len(prompts) + len(defects)} rows cannot be used:{listed}{more}")
    if not prompts:
        raise ValueError(f"{name} has no rows; write one JSON object a line, with a question and an answer")
    return prompts


def _row(text: str, style: Style) -> tuple[tuple[Message, ...], str]:
    """The chat and the gold answer of one line; numbers are kept as they are written. Raises ValueError."""
    try:
        row = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON at column {error.colno}: {error.msg}") from None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object; write {"question": ..., "answer": ...}')
    return _messages(_first(row, QUESTION_KEYS, "question"), style), _gold(_first(row, ANSWER_KEYS, "answer"))


def _first(row: dict[str, Any], keys: tuple[str, ...], what: str) -> Any:
    for key in keys:
        if key in row:
            value = row[key]
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                raise ValueError(f"empty {key}")
            return value
    raise ValueError(f"no {what} (looked for {', '.join(keys)})")


def _messages(question: Any, style: Style) -> tuple[Message, ...]:
    if isinstance(question, str) and style == "answer":
        turns = [(asked, rf"The answer is \boxed{{{answer}}}.") for asked, answer in EXAMPLES]
        chat = [text for turn in turns for text in turn] + [question.strip()]
        return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat))
    if isinstance(question, str):
        return ({"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"},)
    if not isinstance(question, list):
        raise ValueError(f"the question {question!r} is neither a text nor a list of chat messages")
    for message in question:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f'the message {message!r} is not {{"role": text, "content": text}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in question)


def _gold(answer: Any) -> str:
    gold = answer.rpartition("####")[2].strip() if isinstance(answer, str) else None
    if gold is None or number(gold) is None:
        shown = json.dumps(answer, ensure_ascii=False)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"the answer {shown} is not a number; give one, alone or after ####")
    return gold
