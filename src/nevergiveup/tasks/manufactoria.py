"""The task `manufactoria`: write programs for a robot that reads and paints a coloured tape, judged by running them.

Layer 3. Standard library only. The language and the judge are in `manufactoria_machine`, the problems and their tests in
`manufactoria_problems`, programs that solve them in `manufactoria_solver`; what others need of those is offered here, too.

The reward of a completion is the share of a problem's tests that its program passes ("per-test"), or 1 if it passes all of
them and else 0 ("all-tests"). A text that is no program gets 0 in both cases, although a program that rejects every tape
gets half of the tests or more in the families where tapes are to be told apart: mean per-test reward by set,

                    basic_mix   has   regex   compr   ends   symm   the others
    accept all          .10     .34    .19     .46    .27    .16    up to .40: tapes that are right as they are
    reject all          .57     .66    .81     .54    .73    .84    0

So completions that all get the same may be all right, all wrong, or do nothing at all. `Score.reason` tells, in the same
words for the same case:

    all tests passed, some tests failed
    parse error: KIND           see `ParseError.kind`
    no_answer                   no code block, and nothing in the text that is like a program
    stray fence                 there is a program, but three backticks too many made something else the last code block
    unclosed fence              there is a program, but its code block has no end, so that all of the text was taken
    overruled by a later block  there is a program, but in an earlier code block than the last one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, get_args

from nevergiveup.task_settings import PerTest
from nevergiveup.tasks.manufactoria_machine import (
    Judgement,
    Machine,
    ParseError,
    Run,
    Suite,
    compile,
    extract,
    judge,
    results,
    reward,
    run,
    trace,
)
from nevergiveup.tasks.manufactoria_problems import (
    ENSEMBLES,
    Problem,
    Test,
    ensemble,
    expected,
    hidden_tests,
    prompt_text,
)
from nevergiveup.tasks.manufactoria_solver import solve
from nevergiveup.types import NO_ANSWER, Completion, Exact, Prompt, Score

__all__ = [
    "Answer",
    "Judgement",
    "Machine",
    "Manufactoria",
    "ParseError",
    "Problem",
    "Run",
    "Suite",
    "compile",
    "ensemble",
    "expected",
    "extract",
    "judge",
    "reward",
    "run",
    "solve",
    "trace",
]

SPLITS = ("train", "test")


class Answer(NamedTuple):
    """The answer of a prompt. tests: the published kind first, `n_shown` of them, then the hidden ones, if any."""

    problem: Problem
    tests: Suite
    n_shown: int


@dataclass(frozen=True)
class Manufactoria:
    """The task `manufactoria`. Two equal instances have equal problems, splits and tests, on any machine.

    ensemble: the set of problems (`manufactoria_problems.ENSEMBLES`). bit_op, fdiv, add and symm have test problems only.
    reward: per-test or all-tests.
    hidden: test problems have hidden tests, too. A test problem is then solved only if all tests are passed, and the parts of
    a score tell `shown_all_pass` besides: whether the tests of the published kind are, which is what published results count.

    Raises ValueError for an unknown ensemble or reward.
    """

    ensemble: str = "has"
    reward: PerTest = "per-test"
    seed: int = 42
    hidden: bool = True

    def __post_init__(self) -> None:
        if self.ensemble not in ENSEMBLES:
            raise ValueError(f"ensemble must be one of {', '.join(ENSEMBLES)}, not {self.ensemble!r}")
        if self.reward not in get_args(PerTest):
            raise ValueError(f"reward must be {' or '.join(get_args(PerTest))}, not {self.reward!r}")

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split not in SPLITS:
            raise ValueError(f"manufactoria has no split {split!r}: use one of {', '.join(SPLITS)}")
        return self._train if split == "train" else self._test

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        return tuple(make_prompt(problem) for problem in ensemble(self.ensemble, self.seed)[0])

    @cached_property
    def _test(self) -> tuple[Prompt, ...]:
        problems = ensemble(self.ensemble, self.seed)[1]
        return tuple(make_prompt(problem, hidden_tests(problem) if self.hidden else ()) for problem in problems)

    def grade(self, prompt: Prompt, completion: Completion) -> Score:
        """Parts: pass_rate and all_pass, whichever of them is the reward; with hidden tests shown_all_pass, too."""
        answer: Answer = prompt.answer
        program = extract(completion.text)
        try:
            passed = results(program, answer.tests)
        except ParseError as error:
            reason = _reason(completion.text, program, error)
            return Score(0, reason, None if reason == NO_ANSWER else program, self._parts(answer, 0, False, False))
        pass_rate, is_right = Fraction(sum(passed), len(passed)), all(passed)
        return Score(
            pass_rate if self.reward == "per-test" else int(is_right),
            "all tests passed" if is_right else "some tests failed",
            program,
            self._parts(answer, pass_rate, is_right, all(passed[: answer.n_shown])),
        )

    def _parts(self, answer: Answer, pass_rate: Exact, is_right: bool, is_right_where_shown: bool) -> dict[str, float]:
        parts = {"pass_rate": float(pass_rate), "all_pass": float(is_right)}
        if len(answer.tests.cases) > answer.n_shown:
            parts["shown_all_pass"] = float(is_right_where_shown)
        return parts

    def canaries(self) -> list[tuple[Prompt, Completion, Exact]]:
        """Completions of a problem made for this, and what they are worth."""
        prompt = Prompt("canary", answer=Answer(_CANARY, Suite.of(_CANARY_TESTS), len(_CANARY_TESTS)))
        passed = {
            f"It must begin with red.\n\n{_fenced(_BEGINS_WITH_RED)}": 5,
            _BEGINS_WITH_RED: 5,
            _fenced(_BEGINS_WITH_RED) + _fenced("START start:\n    NEXT end\nEND end"): 3,
            _fenced("START start:\n    NEXT NONE\nEND end"): 2,
            _fenced(_GOES_ROUND): 4,
            _fenced(_BEGINS_WITH_RED.replace("    ", "  ")): 0,
            _fenced(_BEGINS_WITH_RED) + _fenced("R B -> accepted"): 0,
            "I do not know.": 0,
        }
        return [
            (prompt, Completion((), (), text, "stop", 0, 0), Fraction(n, 5) if self.reward == "per-test" else n // 5)
            for text, n in passed.items()
        ]


def make_prompt(problem: Problem, hidden: Sequence[Test] = ()) -> Prompt:
    """One user message. Its answer are the problem and its tests."""
    tests = problem.tests
    return Prompt(
        problem.id,
        ({"role": "user", "content": prompt_text(problem)},),
        Answer(problem, Suite.of([*tests, *hidden]), len(tests)),
    )


def _reason(response: str, program: str, error: ParseError) -> str:
    """Why a response whose program does not parse got nothing."""
    pieces = response.split("```")
    n_paired = (len(pieces) - 1) // 2 * 2  # fences, two to a block
    if any(_is_program(piece) for piece in pieces[1:n_paired:2]):
        return "overruled by a later block"
    if any(_is_program(piece) for piece in [*pieces[:n_paired:2], *pieces[n_paired:]]):
        return "stray fence" if n_paired else "unclosed fence"
    if not n_paired and "START" not in program:
        return NO_ANSWER
    return f"parse error: {error.kind}"


def _is_program(text: str) -> bool:
    if "START" not in text:
        return False
    try:
        compile(text.removeprefix("manufactoria").strip())
    except ParseError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- canaries


def _fenced(program: str) -> str:
    return f"```manufactoria\n{program}\n```\n"


_CANARY = Problem("starts_with", {"sequence": "R"}, "RB", "basic")
_CANARY_TESTS: list[dict[str, Any]] = [
    {"input": tape, "expected_output": "", "expected_accepted": accepted, "check_output": False}
    for tape, accepted in (("R", True), ("B", False), ("RBB", True), ("", False), ("RRRR", True))
]
_BEGINS_WITH_RED = "START start:\n    NEXT look\nPULLER_RB look:\n    [R] end\nEND end"
_GOES_ROUND = (  # for ever, where the tape begins with blue; accepts the empty one
    "START start:\n    NEXT look\nPULLER_RB look:\n    [R] end\n    [B] round\n    [EMPTY] end\n"
    "PAINTER_BLUE round:\n    NEXT again\nPULLER_RB again:\n    [R] round\n    [B] round\n    [EMPTY] round\nEND end"
)
