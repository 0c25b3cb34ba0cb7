"""The problems of Manufactoria, their tests, and the task that grades programs by them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product
from random import Random
from statistics import mean, median
from typing import Any

import pytest

from nevergiveup.grading import pool
from nevergiveup.loop import InPlace, TaskGrader
from nevergiveup.tasks.manufactoria import (
    Answer,
    Manufactoria,
    Suite,
    compile,
    expected,
    extract,
    judge,
    make_prompt,
    run,
    solve,
)
from nevergiveup.tasks.manufactoria_problems import (
    ENSEMBLES,
    LEVELS,
    WRITING,
    Level,
    Problem,
    Test,
    ensemble,
    hidden_tests,
    problems,
    prompt_text,
)
from nevergiveup.types import NO_ANSWER, Completion, Prompt, Score

ACCEPT_ALL = "START start:\n    NEXT end\nEND end"
REJECT_ALL = "START start:\n    NEXT NONE\nEND end"


def completion(text: str) -> Completion:
    return Completion((), (), text, "stop", 0, 0)


def fenced(program: str) -> str:
    return f"```manufactoria\n{program}\n```"


@cache
def all_of(name: str) -> tuple[Problem, ...]:
    train, test = ensemble(name)
    return train + test


# -------------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("family", "params", "accepted", "rejected"),
    [
        ("starts_with", {"sequence": "RB"}, ["RB", "RBB"], ["", "R", "BRB"]),
        ("exact_sequence", {"sequence": "RB"}, ["RB"], ["", "R", "RBR", "RBRB"]),
        ("ends_with", {"sequence": "RB"}, ["RB", "BRB"], ["", "B", "RBB"]),
        ("contains_substring", {"sequence": "RYR"}, ["RYR", "GRYRG"], ["", "RYYR", "RY"]),
        ("contains_ordered", {"sequence": "RYR"}, ["RYR", "RGYBR"], ["", "RRY", "YRR"]),
        ("contains_count", {"counts": {"R": 2, "G": 1}}, ["RRG", "GBRR", "RGRG"], ["", "RG", "RRR", "GGG"]),
        ("regex_pattern", {"parts": [["RB", "+"], ["G", "?"]]}, ["RB", "RBRBG"], ["", "G", "RBGG", "RBB"]),
        ("regex_pattern", {"parts": [["RB", "*"]]}, ["", "RBRB"], ["R", "RBR"]),
        ("regex_same_num", {"segments": [["R", "n"], ["B", "n+1"]]}, ["RBB", "RRBBB"], ["", "B", "RB", "RRBB"]),
        ("regex_same_num", {"segments": [["R", "2n"], ["B", "n"], ["R", "2n"]]}, ["RRBRR"], ["", "RBR", "RRBRRR"]),
        ("numerical_comparison", {"operator": ">=", "threshold": 2}, ["BR", "RRBR", "BB"], ["", "R", "RRB"]),
        ("numerical_comparison", {"operator": ">", "threshold": 2}, ["BB"], ["BR", ""]),
        ("numerical_comparison", {"operator": "<", "threshold": 2}, ["", "RRR", "B"], ["BR"]),
        ("numerical_comparison", {"operator": "<=", "threshold": 2}, ["", "BR"], ["BB"]),
        ("numerical_comparison", {"operator": "=", "threshold": 2}, ["BR", "RBR"], ["", "BB", "BRR"]),
        ("not_contains", {"colour": "Y"}, ["", "RBG"], ["Y", "RYG"]),
    ],
)
def test_families_that_accept(family: str, params: dict[str, Any], accepted: list[str], rejected: list[str]) -> None:
    assert [tape for tape in accepted + rejected if expected(family, params, tape) == (True, "")] == accepted


@pytest.mark.parametrize(
    ("family", "params", "outputs"),
    [
        ("append_sequence", {"sequence": "RB"}, {"": "RB", "YG": "YGRB"}),
        ("prepend_sequence", {"sequence": "RB", "change": ["keep"]}, {"": "RB", "BB": "RBBB"}),
        ("prepend_sequence", {"sequence": "R", "change": ["swap"]}, {"RRB": "RBBR"}),
        ("prepend_sequence", {"sequence": "B", "change": ["replace", "R", ""]}, {"RBRB": "BBB", "R": "B"}),
        ("prepend_sequence", {"sequence": "B", "change": ["replace", "RR", "R"]}, {"RRRRR": "BRRR", "BRR": "BBR"}),
        ("numerical_operations", {"operation": "add", "constant": 3}, {"": "BB", "RRB": "BRR"}),
        ("numerical_operations", {"operation": "subtract", "constant": 3}, {"BB": "", "B": "", "RBRR": "B"}),
        ("numerical_operations", {"operation": "and", "constant": 5}, {"BBB": "BRB", "BR": ""}),
        ("numerical_operations", {"operation": "or", "constant": 5}, {"BR": "BBB", "": "BRB"}),
        ("numerical_operations", {"operation": "xor", "constant": 5}, {"BRB": "", "BBBB": "BRBR"}),
        ("numerical_operations", {"operation": "floor_div", "constant": 4}, {"BB": "", "BRBB": "BR"}),
        (
            "numerical_operations",
            {"operation": "not", "constant": 0},
            {"": "B" * 8, "B" * 8: "", "B" + "R" * 8: "B" * 8},
        ),
        ("numerical_max_min", {"which": "max", "constant": 3}, {"": "BB", "RBRR": "BRR"}),
        ("numerical_max_min", {"which": "min", "constant": 3}, {"": "", "RR": "", "RRB": "B", "BRR": "BB"}),
    ],
)
def test_families_that_write(family: str, params: dict[str, Any], outputs: dict[str, str]) -> None:
    assert {tape: expected(family, params, tape) for tape in outputs} == {
        tape: (True, output) for tape, output in outputs.items()
    }


@pytest.mark.parametrize(
    ("family", "params", "tape", "message"),
    [
        ("reverse", {}, "", "unknown Manufactoria family 'reverse'"),
        ("numerical_max_min", {"which": "max", "constant": 3}, "RYB", "R and B only, not as 'RYB'"),
        ("numerical_max_min", {"which": "mean", "constant": 3}, "", "not 'mean'"),
        ("numerical_comparison", {"operator": "!=", "threshold": 3}, "", "not '!='"),
        ("numerical_operations", {"operation": "power", "constant": 3}, "", "'power'"),
        ("prepend_sequence", {"sequence": "R", "change": ["replace", "", "B"]}, "", "keep, swap or replace"),
        ("regex_same_num", {"segments": [["R", "3n"]]}, "R", "not '3n'"),
    ],
)
def test_what_is_no_problem_is_refused(family: str, params: dict[str, Any], tape: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        expected(family, params, tape)


# ------------------------------------------------------------------------------------------------------ levels, ensembles


@pytest.mark.parametrize(
    ("family", "level", "n", "colours"),
    [
        ("starts_with", "basic", 126, "RB"),
        ("exact_sequence", "basic", 126, "RB"),
        ("append_sequence", "basic", 1000, "RBYG"),
        ("contains_count", "easy", 194, "RBYG"),
        ("contains_ordered", "easy", 340, "RBYG"),
        ("contains_substring", "easy", 340, "RBYG"),
        ("regex_pattern", "easy", 60, "RBYG"),
        ("regex_pattern", "medium", 1000, "RBYG"),
        ("regex_pattern", "hard", 1000, "RBYG"),
        ("numerical_comparison", "easy", 315, "RB"),
        ("numerical_comparison", "medium", 315, "RB"),
        ("numerical_comparison", "hard", 650, "RB"),
        ("ends_with", "easy", 30, "RB"),
        ("ends_with", "medium", 96, "RB"),
        ("prepend_sequence", "easy", 30, "RB"),
        ("prepend_sequence", "medium", 1000, "RB"),
        ("prepend_sequence", "hard", 720, "RB"),
        ("numerical_max_min", "medium", 512, "RB"),
        ("numerical_operations", "easy", 7, "RB"),
        ("numerical_operations", "medium", 21, "RB"),
        ("numerical_operations", "hard", 14, "RB"),
        ("regex_same_num", "hard", 100, "RBYG"),
    ],
)
def test_levels_have_the_published_sizes(family: str, level: Level, n: int, colours: str) -> None:
    found = problems(family, level)
    assert len(found) == n
    assert {problem.colours for problem in found} == {colours}
    assert len({problem.id for problem in found}) == len({problem.statement for problem in found}) == n


SIZES = {
    "basic_mix": (348, 27),
    "has": (742, 132),
    "regex": (561, 99),
    "compr": (535, 95),
    "ends": (107, 19),
    "prepend": (595, 105),
    "mutate": (612, 108),
    "minmax": (501, 11),
    "bit_op": (0, 21),
    "fdiv": (0, 7),
    "add": (0, 14),
    "symm": (0, 100),
}


def test_ensembles_have_the_published_sizes() -> None:
    assert {name: tuple(map(len, ensemble(name))) for name in ENSEMBLES} == SIZES
    assert {name: tuple(map(len, ensemble(name, seed=7))) for name in ENSEMBLES} == SIZES


@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize("name", ENSEMBLES)
def test_nothing_is_asked_twice(name: str, seed: int) -> None:
    """Neither in one split nor in both."""
    train, test = ensemble(name, seed)
    n = len(train) + len(test)
    assert len({problem.id for problem in train + test}) == n
    assert len({(problem.statement, problem.colours) for problem in train + test}) == n
    assert len({prompt_text(problem) for problem in train + test}) == n


def test_seeds_change_splits_and_tests_and_not_ids() -> None:
    assert ensemble("has", 42) != ensemble("has", 7)
    first, other = (problems("contains_ordered", "easy", seed)[100] for seed in (42, 7))
    assert first.id == other.id
    assert first.tests != other.tests


def test_all_is_the_same_in_another_process() -> None:
    program = (
        "import hashlib; from nevergiveup.tasks.manufactoria_problems import *\n"
        "found = [(p.id, prompt_text(p), p.tests, hidden_tests(p)) for name in ('regex', 'symm') for p in ensemble(name)[1]]\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())"
    )

    def digest(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout

    first = digest("1")
    assert len(first) == 65
    assert digest("2") == first


# ------------------------------------------------------------------------------------------------------------------ tests


def share(name: str, split: int, passes: Callable[[Test], bool]) -> float:
    return mean(mean(passes(test) for test in problem.tests) for problem in ensemble(name)[split])


@pytest.mark.parametrize(
    ("name", "split", "accept_all", "reject_all"),
    [
        ("basic_mix", 0, 0.10, 0.56),
        ("has", 0, 0.35, 0.65),
        ("regex", 0, 0.21, 0.79),
        ("compr", 0, 0.47, 0.53),
        ("ends", 0, 0.27, 0.73),
        ("symm", 1, 0.16, 0.84),
        ("minmax", 0, 0.41, 0),
        ("bit_op", 1, 0.16, 0),
        ("add", 1, 0.02, 0),
        ("fdiv", 1, 0.03, 0),
        ("mutate", 0, 0, 0),
        ("prepend", 0, 0, 0),
    ],
)
def test_doing_nothing_earns_what_it_earns_in_the_published_sets(
    name: str, split: int, accept_all: float, reject_all: float
) -> None:
    """Means over a set by its published counterpart, which was made with other random numbers."""
    accepting = share(
        name, split, lambda t: t["expected_accepted"] and (not t["check_output"] or t["expected_output"] == t["input"])
    )
    assert accepting == pytest.approx(accept_all, abs=0.03)
    assert share(name, split, lambda t: not t["expected_accepted"]) == pytest.approx(reject_all, abs=0.03)


def test_clearing_the_tape_earns_what_it_earns_in_the_published_sets() -> None:
    assert share("fdiv", 1, lambda t: t["expected_output"] == "") == pytest.approx(0.43, abs=0.04)
    assert share("add", 1, lambda t: t["expected_output"] == "") == pytest.approx(0.23, abs=0.04)


def test_number_and_length_of_tests_are_as_published() -> None:
    tests = [problem.tests for name in ENSEMBLES for problem in all_of(name)]
    assert min(map(len, tests)) == 11
    assert max(map(len, tests)) == 35
    lengths = [len(test["input"]) for suite in tests for test in suite]
    assert median(lengths) == 3
    assert max(lengths) <= 39
    assert mean(test["expected_accepted"] for suite in tests for test in suite) == pytest.approx(0.61, abs=0.01)


@pytest.mark.parametrize("name", ENSEMBLES)
def test_tests_are_of_the_problem(name: str) -> None:
    for problem in all_of(name):
        tapes = [test["input"] for test in problem.tests]
        assert len(set(tapes)) == len(tapes)
        assert not set("".join(tapes)) - set(problem.colours)
        assert {test["check_output"] for test in problem.tests} == {problem.family in WRITING}
        assert tapes[0] == ""


@pytest.mark.parametrize("name", ENSEMBLES)
def test_every_problem_can_be_solved(name: str) -> None:
    """The solver's program passes all tests, those of the test split also the hidden ones, well below the limit."""
    train, test = ensemble(name)
    for problem in train + test:
        tests = [*problem.tests, *(hidden_tests(problem) if problem in test[:100] else ())]
        program = solve(problem.family, problem.params, problem.colours)
        assert judge(program, tests).all_passed, problem
        assert max(run(compile(program), test["input"]).steps for test in tests) <= 650


def test_every_level_can_be_solved() -> None:
    """A sample of the levels that are in no ensemble."""
    for family, level in (("not_contains", "easy"), ("regex_pattern", "hard"), ("numerical_comparison", "hard")):
        for problem in problems(family, level)[::40]:
            program = solve(family, problem.params, problem.colours)
            assert judge(program, [*problem.tests, *hidden_tests(problem)]).all_passed, problem
    assert {family for family, _ in LEVELS} >= {"not_contains", "regex_pattern", "numerical_comparison"}


# ----------------------------------------------------------------------------------------------------------- hidden tests


@pytest.mark.parametrize(("family", "level"), LEVELS)
def test_hidden_tests_are_other_tapes_of_either_verdict(family: str, level: Level) -> None:
    for problem in Random(1).sample(problems(family, level), min(7, len(problems(family, level)))):
        tests = hidden_tests(problem, 80)
        tapes = {test["input"] for test in tests}
        assert len(tapes) == len(tests)
        assert not tapes & {test["input"] for test in problem.tests}
        assert not set("".join(tapes)) - set(problem.colours)
        n_accepting = sum(test["expected_accepted"] for test in tests)
        if problem.writes:
            assert n_accepting == 80
        else:
            assert len(tests) - n_accepting >= 38
            if family not in ("exact_sequence", "regex_pattern", "regex_same_num", "numerical_comparison"):
                assert n_accepting == 40  # in those, there may be no 40 other tapes to accept


@pytest.mark.parametrize("name", ["has", "ends"])
def test_hidden_tests_catch_what_passes_the_others(name: str) -> None:
    """Programs with one route led astray, wrong on some near-by tape: a fifth and more passes the tests, hardly any both."""
    rng = Random(1)
    n_wrong = n_pass = n_pass_hidden = 0
    for problem in rng.sample(all_of(name), 25):
        program = solve(problem.family, problem.params, problem.colours)
        tapes = ["".join(word) for n in range(6) for word in product(problem.colours, repeat=n)]
        short = [test["input"] for test in problem.tests if len(test["input"]) < 16]
        tapes += [tape[:i] + c + tape[i:] for tape in short for c in problem.colours for i in range(len(tape) + 1)]
        near = Suite.of(
            {
                "input": tape,
                "expected_accepted": expected(problem.family, problem.params, tape)[0],
                "check_output": False,
            }
            for tape in rng.sample(tapes, min(600, len(tapes)))
        )
        tests, hidden = Suite.of(problem.tests), Suite.of(hidden_tests(problem))
        for _ in range(25):
            wrong = _misled(rng, program)
            if not judge(wrong, near).all_passed:
                n_wrong += 1
                if judge(wrong, tests).all_passed:
                    n_pass += 1
                    n_pass_hidden += judge(wrong, hidden).all_passed
    assert n_pass / n_wrong > 0.15
    assert n_pass_hidden / n_wrong < 0.07


def _misled(rng: Random, program: str) -> str:
    lines = program.split("\n")
    targets = [*re.findall(r"^\w+ (\w+):", program, re.MULTILINE), "end", "NONE"]
    at = rng.choice([i for i, line in enumerate(lines) if line.startswith("    ")])
    label, _, target = lines[at].rpartition(" ")
    lines[at] = f"{label} {rng.choice([other for other in targets if other != target])}"
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------- prompt


def test_the_prompt_shows_programs_that_do_what_it_says() -> None:
    text = prompt_text(problems("contains_ordered", "easy")[0])
    blocks = re.findall(r"```manufactoria\n(.*?)```", text, re.DOTALL)
    programs = [block for block in blocks if "START" in block]
    assert len(programs) == 2
    skeleton, example = map(compile, programs)
    assert run(skeleton, "RY").output == "YB"
    tapes = ["".join(word) for n in range(4) for word in product("RBYG", repeat=n)]
    assert [tape for tape in tapes if run(example, tape).accepted] == ["G"]
    pullers = "START start:\n    NEXT name\n" + next(block for block in blocks if "START" not in block)
    pullers = pullers.replace("PULLER_YG name", "PULLER_YG other") + "".join(
        f"PAINTER_RED {name}:\n    NEXT end\n" for name in "abc"
    )
    assert run(compile(pullers + "END end"), "RB").output == "BR"


def test_the_prompt_has_two_variants() -> None:
    reading = problems("starts_with", "basic")[4]
    writing = problems("prepend_sequence", "easy")[4]
    first, second = prompt_text(reading), prompt_text(writing)
    assert "What is left on the tape does not matter" in first
    assert "must be just what the task asks for" in second
    assert "not matter" not in second
    for text, problem in ((first, reading), (second, writing)):
        assert problem.statement in text
        assert not re.search(r"[{}]", text)
        assert "1000th visit" in text
        assert "4 spaces or a tab" in text
        assert len(text.split()) < 750


def test_statements_say_what_tests_ask_for() -> None:
    statement = Problem("numerical_max_min", {"which": "min", "constant": 5}, "RB", "medium").statement
    for words in (
        "smaller",
        "5",
        "most significant",
        "empty tape is 0",
        "If it is zero, the tape must be empty",
        "no other",
    ):
        assert words in statement
    statement = Problem("contains_count", {"counts": {"R": 1, "Y": 2, "G": 3}}, "RBYG", "easy").statement
    assert "at least 1 red, at least 2 yellow and at least 3 green symbols" in statement
    assert "colours than" not in statement
    statement = Problem("regex_same_num", {"segments": [["R", "2n"], ["B", "n+1"]]}, "RBYG", "hard").statement
    assert "2n times R, then n+1 times B" in statement
    assert "at least 1" in statement


# --------------------------------------------------------------------------------------------------------------- the task


TAPES = {"R": True, "B": False, "RBB": True, "": False, "RRRR": True}
PROMPT = Prompt(
    "five",
    answer=Answer(
        Problem("starts_with", {"sequence": "R"}, "RB", "basic"),
        Suite.of({"input": t, "expected_accepted": accepted, "check_output": False} for t, accepted in TAPES.items()),
        n_shown=4,
    ),
)
RIGHT = "START start:\n    NEXT look\nPULLER_RB look:\n    [R] end\nEND end"
ONLY_SHORT = (  # wrong on RRRR alone, which is the hidden test
    "START start:\n    NEXT a\nPULLER_RB a:\n    [R] b\nPULLER_RB b:\n    [R] NONE\n    [B] end\n    [EMPTY] end\nEND end"
)


def test_both_rewards_are_exact_and_both_are_told() -> None:
    per_test, all_tests = Manufactoria(), Manufactoria(reward="all-tests")
    for text, n in ((fenced(RIGHT), 5), (fenced(ONLY_SHORT), 4), (fenced(ACCEPT_ALL), 3), (fenced(REJECT_ALL), 2)):
        score, whole = (task.grade(PROMPT, completion(text)) for task in (per_test, all_tests))
        assert score.reward == Fraction(n, 5)
        assert whole.reward == n // 5
        assert score.parts == whole.parts == {"pass_rate": n / 5, "all_pass": n // 5, "shown_all_pass": float(n >= 4)}
        assert score.reason == whole.reason == ("all tests passed" if n == 5 else "some tests failed")
        assert score.answer == extract(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NO_ANSWER),
        ("I give up.", NO_ANSWER),
        ("Let me see. Red must come first, so" + " R" * 50, NO_ANSWER),
        (fenced(""), "parse error: empty_program"),
        (fenced("accept R"), "parse error: invalid_node_declaration"),
        (fenced(RIGHT.replace("    ", "  ")), "parse error: start_route_count"),
        (fenced(RIGHT.replace("END end", "END end:")), "parse error: end_with_colon"),
        (f"Here it is:\n{RIGHT}", "parse error: invalid_node_declaration"),
        (f"```python\n{RIGHT}\n```", "parse error: invalid_node_declaration"),
        (f"```manufactoria\n{RIGHT[:40]}", "parse error: invalid_node_declaration"),
        (f"Between ``` and the like: {fenced(RIGHT)}", "stray fence"),
        (f"Between ``` and the like: {fenced(RIGHT)}\n{fenced('x')}", "stray fence"),
        (f"So:\n```manufactoria\n{RIGHT}\n", "unclosed fence"),
        (f"{fenced(RIGHT)}\nIt goes so:\n```\nR: start, look, end\n```", "overruled by a later block"),
    ],
)
def test_what_is_no_program_gets_nothing_and_is_told_apart(text: str, reason: str) -> None:
    for task in (Manufactoria(), Manufactoria(reward="all-tests")):
        score = task.grade(PROMPT, completion(text))
        assert (score.reward, score.reason) == (0, reason)
        assert set(score.parts.values()) == {0.0}
        assert (score.answer is None) == (reason == NO_ANSWER)


def test_a_bare_program_counts() -> None:
    assert Manufactoria().grade(PROMPT, completion(RIGHT)).reward == 1


def test_a_text_of_fences_alone_is_graded_at_once() -> None:
    text = "```START" * 100_000
    score = Manufactoria().grade(PROMPT, completion(text))
    assert score.reward == 0


def test_prompts_are_of_the_ensemble() -> None:
    task = Manufactoria("ends", seed=3)
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == SIZES["ends"]
    assert [prompt.id for prompt in train] == [problem.id for problem in ensemble("ends", 3)[0]]
    for prompt in (*train, *test):
        (message,) = prompt.messages
        assert message == {"role": "user", "content": prompt_text(prompt.answer.problem)}
        assert prompt.max_reward == 1
        assert prompt.answer.n_shown == len(prompt.answer.problem.tests)
    assert all(len(prompt.answer.tests.cases) == prompt.answer.n_shown for prompt in train)
    assert all(len(prompt.answer.tests.cases) > prompt.answer.n_shown + 40 for prompt in test)
    assert task.prompts("train") is train
    assert Manufactoria("ends", seed=3) == task
    assert Manufactoria("ends", seed=3).prompts("test") == test


def test_without_hidden_tests_the_test_split_is_as_published() -> None:
    for prompt in Manufactoria("ends", hidden=False).prompts("test"):
        assert len(prompt.answer.tests.cases) == prompt.answer.n_shown
        score = Manufactoria("ends", hidden=False).grade(prompt, completion(ACCEPT_ALL))
        assert set(score.parts) == {"pass_rate", "all_pass"}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_right_programs_get_everything(name: str) -> None:
    task = Manufactoria(name, "all-tests")
    for prompt in (*task.prompts("train")[:20], *task.prompts("test")[:20]):
        problem = prompt.answer.problem
        score = task.grade(prompt, completion(fenced(solve(problem.family, problem.params, problem.colours))))
        assert score.reward == 1
        assert task.grade(prompt, completion(fenced(REJECT_ALL))).reward == 0


@pytest.mark.parametrize("reward", ["per-test", "all-tests"])
def test_canaries_live(reward: Any) -> None:
    task = Manufactoria(reward=reward)
    canaries = task.canaries()
    assert len({number for _, _, number in canaries}) >= 2
    for prompt, answer, number in canaries:
        assert task.grade(prompt, answer).reward == number


async def _check(task: Manufactoria) -> None:
    await pool.check_canaries(TaskGrader(task, InPlace()), task.canaries())


def test_canaries_pass_the_check_of_a_run() -> None:
    import asyncio

    asyncio.run(_check(Manufactoria()))


def test_a_program_without_end_fails_its_test_only() -> None:
    """Test 3 of 5 goes round for ever, tests 1, 2 and 5 pass, 4 does not."""
    tapes = {"R": True, "RR": True, "B": True, "": True, "RB": True}
    tests = Suite.of({"input": t, "expected_accepted": wanted, "check_output": False} for t, wanted in tapes.items())
    loops = (
        "START start:\n    NEXT look\nPULLER_RB look:\n    [R] end\n    [B] round\n    [EMPTY] NONE\n"
        "PAINTER_BLUE round:\n    NEXT again\nPULLER_RB again:\n    [R] round\n    [B] round\n    [EMPTY] round\nEND end"
    )
    prompt = Prompt("loops", answer=Answer(PROMPT.answer.problem, tests, 5))
    assert run(compile(loops), "B").reason == "step_limit"
    assert Manufactoria().grade(prompt, completion(fenced(loops))).reward == Fraction(3, 5)
    assert Manufactoria(reward="all-tests").grade(prompt, completion(fenced(loops))).reward == 0


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ensemble must be one of basic_mix, has, .* not 'hass'"):
        Manufactoria("hass")
    with pytest.raises(ValueError, match="reward must be per-test or all-tests, not 'full_pass'"):
        Manufactoria(reward="full_pass")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no split 'dev': use one of train, test"):
        Manufactoria().prompts("dev")
    with pytest.raises(ValueError, match="no ensemble 'hass'"):
        ensemble("hass")
    with pytest.raises(ValueError, match="no level 'hard' of 'starts_with'"):
        problems("starts_with", "hard")


def test_make_prompt_takes_any_problem() -> None:
    problem = Problem("not_contains", {"colour": "Y"}, "RBYG", "easy")
    prompt = make_prompt(problem, hidden_tests(problem, 10))
    assert len(prompt.answer.tests.cases) == len(problem.tests) + 10
    score = Manufactoria().grade(prompt, completion(solve("not_contains", problem.params)))
    assert score == Score(
        1, "all tests passed", score.answer, {"pass_rate": 1.0, "all_pass": 1.0, "shown_all_pass": 1.0}
    )
