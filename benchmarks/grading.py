r"""Verdicts about mathematics: how many a second on one core, against math-verify in the same run, and what needs a worker.

    python benchmarks/grading.py

GSM8K: the shipped rows with a worked solution of some hundred characters each, half of them right. math-verify gets the
gold answer in a box and its default settings, without its alarms. MATH-500: each gold answer, spelled differently, against
itself, and against the gold answer of another problem; the share that is decided at once, and the time the rest takes in
one worker process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import math_verify

from nevergiveup.grading.math import grade_math
from nevergiveup.grading.pool import GraderPool
from nevergiveup.tasks.gsm8k import GSM8K
from nevergiveup.tasks.math import Math
from nevergiveup.types import Check, Completion

STEPS = "Natalia sold 48 / 2 = 24 clips in May, and 48 + 24 = 72 clips in both months. " * 5


def per_second(call: Callable[[], int], repeats: int = 5) -> float:
    """call returns how much it did. Processor time of this process; the best of the repeats."""
    best = 0.0
    for _ in range(repeats):
        began = time.process_time()
        n = call()
        best = max(best, n / (time.process_time() - began))
    return best


def gsm8k() -> None:
    task = GSM8K()
    prompts = task.prompts("test")
    texts = [rf"{STEPS}So it is $\boxed{{{p.answer if i % 2 else int(p.answer) + 1}}}$." for i, p in enumerate(prompts)]
    completions = [Completion((), (), text, "stop", 0, 0) for text in texts]

    def ours() -> int:
        return len([task.grade(prompt, done) for prompt, done in zip(prompts, completions, strict=True)])

    def theirs() -> int:
        for prompt, text in zip(prompts[:100], texts[:100], strict=True):
            gold = math_verify.parse(rf"\boxed{{{prompt.answer}}}", parsing_timeout=None)
            math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None)
        return 100

    rewards = [task.grade(prompt, done).reward for prompt, done in zip(prompts, completions, strict=True)]
    assert rewards == [i % 2 for i in range(len(prompts))]
    theirs()  # imports
    fast, slow = per_second(ours), per_second(theirs, 3)
    print(f"GSM8K, verifications a second on one core: {fast:,.0f}; math-verify {slow:,.0f}; times {fast / slow:.0f}")


def respelled(gold: str) -> str:
    r"""\tfrac for \frac, blanks around signs, no \left."""
    text = gold.replace(r"\frac{", r"\tfrac{").replace(r"\left", "").replace(r"\right", "")
    return re.sub(r"(?<=[0-9a-z)}])([-+])(?=[0-9a-z(\\])", r" \1 ", text)


def math_500() -> None:
    golds = [prompt.answer.text for prompt in Math().prompts("test")]
    pairs = [(gold, respelled(gold), 1) for gold in golds]
    pairs += [
        (gold, other, int(gold == other.removeprefix("x=")))
        for gold, other in zip(golds, golds[1:] + golds[:1], strict=True)
    ]
    answers = [grade_math(gold, rf"\boxed{{{answer}}}") for gold, answer, _ in pairs]
    checks = [(check, want) for check, (_, _, want) in zip(answers, pairs, strict=True) if isinstance(check, Check)]
    wrong = sum(
        grade.reward != want for grade, (_, _, want) in zip(answers, pairs, strict=True) if not isinstance(grade, Check)
    )
    at_once = per_second(lambda: len([grade_math(gold, rf"\boxed{{{answer}}}") for gold, answer, _ in pairs]))
    print(
        f"MATH-500, {len(pairs):,} pairs: {1 - len(checks) / len(pairs):.1%} decided at once, {at_once:,.0f} a second"
    )
    with GraderPool(1, timeout_s=10, preload=("math_verify",)) as pool:
        pool.start()
        took = []
        for check, want in checks:
            began = time.perf_counter()
            grade = pool.grade(check)
            took.append(time.perf_counter() - began)
            wrong += getattr(grade, "reward", None) != want
    if took:
        print(
            f"the other {len(took)}: {1000 * sum(took) / len(took):.1f} ms each in a worker, the slowest {max(took):.3f} s"
        )
    print(f"not as they should be: {wrong}")


if __name__ == "__main__":
    gsm8k()
    math_500()
