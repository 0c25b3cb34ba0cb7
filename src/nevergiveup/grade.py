"""`ngu grade`: a file of answers, graded as a run would grade them, with the reasons. Layer 4.

Rows are {"id", "gold", "response"}; each gives one line of JSON {"id", "verdict": 1 | 0 | null, "reason", "answer",
"seconds"}, in the order of the file. verdict null: nobody could say, and a run would leave the completion out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nevergiveup.grading.math import check_gold, grade_math
from nevergiveup.grading.pool import GraderPool
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.settings import GradingSettings
from nevergiveup.tasks.rows import Row, read_rows, text_of
from nevergiveup.types import Check, Completion, Grade, Prompt, Score, Unverified

GradedAs: TypeAlias = Literal["math", "gsm8k"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """The grading rule of the tasks math and gsm8k without their data."""

    numeral: bool

    def prompts(self, split: str) -> Sequence[Prompt]:
        return ()

    def grade(self, prompt: Prompt, completion: Completion) -> Grade | Check:
        return grade_math(prompt.answer, completion.text, numeral=self.numeral)


def grade_file(path: Path, task: GradedAs, options: GradingSettings, *, golds_only: bool = False) -> AsyncIterator[str]:
    """The lines of output. golds_only: whether each gold answer can be verified at all, without any response.

    Raises ValueError, before anything is graded, for rows that lack a key.
    """
    rows = [_checked(row, ("gold",) if golds_only else ("gold", "response")) for row in read_rows(str(path))]
    return _lines(rows, _Rule(numeral=task == "gsm8k"), options, golds_only)


def _checked(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """The row with its texts as texts: a gold answer may be a number, or a solution that ends in `#### 18`."""
    texts = {key: text_of(row.values.get(key)) for key in keys}
    for key, text in texts.items():
        if text is None:
            raise ValueError(
                (row.defect and f"{row.where}: {row.defect}")
                or f'{row.where}: no text under "{key}"; write {{"id": ..., "gold": ..., "response": ...}}'
            )
    texts["gold"] = (texts["gold"] or "").rpartition("####")[2].strip()
    return {"id": row.where, **row.values, **texts}


async def _lines(
    rows: Sequence[dict[str, Any]], rule: _Rule, options: GradingSettings, golds_only: bool
) -> AsyncIterator[str]:
    with GraderPool(options.n_workers, options.timeout_s, options.memory_mb, preload=("math_verify",)) as pool:
        grader = TaskGrader(rule, pool)
        free = asyncio.Semaphore(
            options.n_workers
        )  # nothing waits in the pool, so that the seconds are those of grading

        async def graded(row: dict[str, Any]) -> str:
            async with free:
                began = time.perf_counter()
                if golds_only:
                    grade = await check_gold(row["gold"], pool, numeral=rule.numeral)
                else:
                    text = row["response"]
                    (grade,) = await grader.grade(
                        Prompt(str(row["id"]), answer=row["gold"]), [Completion((), (), text, "stop", 0, 0)]
                    )
                return _line(row["id"], grade, time.perf_counter() - began)

        tasks = [asyncio.create_task(graded(row)) for row in rows]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()


def _line(row_id: Any, grade: Grade, seconds: float) -> str:
    answer: str | None = None
    if isinstance(grade, Unverified):
        verdict, reason = None, grade.reason.strip().rpartition("\n")[2]
    elif isinstance(grade, Score):
        verdict, reason, answer = int(grade.reward), grade.reason, grade.answer
    else:
        verdict, reason = int(reward_of(grade)), ""
    line = {"id": row_id, "verdict": verdict, "reason": reason, "answer": answer, "seconds": round(seconds, 4)}
    return json.dumps(line, ensure_ascii=False)
