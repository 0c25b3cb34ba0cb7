"""The robot of Manufactoria: what is handed as right, and the same verdicts as a plain interpreter on anything."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nevergiveup.tasks.manufactoria_machine import (
    LIMIT,
    Judgement,
    ParseError,
    Run,
    Suite,
    compile,
    extract,
    judge,
    passes,
    reward,
    run,
    trace,
)

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import plain_robot  # the oracle

CASES = Path(__file__).parent / "data" / "manufactoria_conformance.jsonl.gz"
KINDS = ("run", "judge", "reward")


def rows(kind: str) -> Iterator[dict[str, Any]]:
    with gzip.open(CASES, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["kind"] == kind:
                yield row


# ------------------------------------------------------------------------------------------------------- handed as right


def test_runs_are_as_published() -> None:
    """All that a run tells: verdict, tape, visits and reason; of what is no program, the kind of error and its line."""
    n = 0
    for row in rows("run"):
        n += 1
        if row["error"]:
            with pytest.raises(ParseError) as told:
                compile(row["program"])
            assert (told.value.kind, told.value.line) == (row["error_kind"], row["error_line"]), row["id"]
        else:
            found = run(compile(row["program"]), row["input"])
            assert found == Run(row["accepted"], row["output"], row["steps"], row["reason"]), row["id"]
    assert n == 742


def test_judgements_are_as_published() -> None:
    found = {row["id"]: judge(row["program"], row["tests"]) for row in rows("judge")}
    assert found == {row["id"]: Judgement(row["valid"], row["passed"], row["all_passed"]) for row in rows("judge")}
    assert len(found) == 60


def test_rewards_are_as_published() -> None:
    found = {row["id"]: (extract(row["response"]), *reward(row["response"], row["tests"])) for row in rows("reward")}
    assert found == {row["id"]: (row["extracted"], row["pass_rate"], row["all_pass"]) for row in rows("reward")}
    assert len(found) == 30


# --------------------------------------------------------------------------------------------- against the plain machine


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Graphs of up to nine nodes with targets anywhere, in the order of the text or not; some parse, most of them do."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f", "NONE", "END"]), unique=True, max_size=7))
    targets = st.sampled_from([*names, *names, "end", "NONE", "start", "END"])
    nodes = [f"START start:\n    NEXT {draw(targets)}", "END end"]
    for name in names:
        if draw(st.booleans()):
            colour = draw(st.sampled_from(["RED", "BLUE", "YELLOW", "GREEN"]))
            nodes.append(f"PAINTER_{colour} {name}:\n    NEXT {draw(targets)}")
            continue
        pair = draw(st.sampled_from(["RB", "YG"]))
        symbols = draw(st.permutations([*pair, "EMPTY"]))[: draw(st.integers(0, 3))]
        routes = "".join(f"\n    [{symbol}] {draw(targets)}" for symbol in symbols)
        nodes.append(f"PULLER_{pair} {name}:{routes}")
    return draw(st.sampled_from(["\n", "\n\n"])).join(draw(st.permutations(nodes)))


tapes = st.text("RBYG", max_size=12) | st.text("RBYGx", max_size=60)


@given(programs(), tapes)
def test_runs_agree_with_the_plain_machine(program: str, tape: str) -> None:
    assert run(compile(program), tape) == plain_robot.run(plain_robot.compile(program), tape)


@given(programs(), st.lists(tapes, max_size=5))
def test_verdicts_agree_with_the_plain_machine(program: str, inputs: list[str]) -> None:
    """`judge` stops early, leaps and reads automata; what it says is what going visit by visit says."""
    plain = plain_robot.compile(program)
    outputs = [plain_robot.run(plain, tape)[1] for tape in inputs]
    tests = [
        {"input": tape, "expected_output": output, "expected_accepted": accepted, "check_output": check}
        for tape, output in zip(inputs, outputs, strict=True)
        for accepted in (True, False)
        for check in (True, False)
    ]
    assert judge(program, tests) == plain_robot.judge(program, tests)
    verdicts_only = [test for test in tests if not test["check_output"]]
    assert judge(program, verdicts_only) == plain_robot.judge(program, verdicts_only)


@given(programs(), st.randoms(use_true_random=False))
def test_damaged_programs_are_refused_as_the_plain_machine_refuses_them(program: str, random: Random) -> None:
    characters = list(program)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(characters))
        characters[at : at + random.randint(0, 4)] = random.choice(
            [
                "",
                "\n",
                " ",
                "\t",
                "    ",
                ":",
                "#",
                "# x",
                "end",
                "END",
                "[R]",
                "```",
                "PULLER_RB a:\n",
                "NEXT b\n",
                "\r",
            ]
        )
        characters = characters or ["x"]
    damaged = "".join(characters)

    def told(module_compile: Any, error: type[Exception]) -> object:
        try:
            module_compile(damaged)
        except error as refused:
            return refused.kind, refused.line  # type: ignore[attr-defined]
        return "a program"

    assert told(compile, ParseError) == told(plain_robot.compile, plain_robot.PlainError)
    tests = [{"input": "RB", "check_output": False}, {"input": "", "expected_accepted": False, "check_output": False}]
    assert judge(damaged, tests) == plain_robot.judge(damaged, tests)


# -------------------------------------------------------------------------------------------------------- one by one

WRITES_AND_TURNS = "START start:\n    NEXT a\nPAINTER_RED a:\n    NEXT b\nPULLER_RB b:\n    [R] a\n    [B] end\nEND end"


def test_c20_a_program_that_never_ends_fails_its_test_only() -> None:
    """With a B on the tape it accepts, else it takes and paints reds for ever."""
    tests = [
        {"input": "B", "check_output": False},
        {"input": "RB", "check_output": False},
        {"input": "R", "check_output": False},  # for ever
        {"input": "B", "expected_output": "", "check_output": True},  # wrong: R is left
        {"input": "Y", "expected_accepted": False, "check_output": False},
    ]
    assert run(compile(WRITES_AND_TURNS), "R") == Run(False, "RR", LIMIT, "step_limit")
    assert judge(WRITES_AND_TURNS, tests).passed == [True, True, False, False, True]
    assert reward(f"```manufactoria\n{WRITES_AND_TURNS}\n```", tests) == (0.6, 0.0)


@pytest.mark.parametrize("n_visits", range(LIMIT - 6, LIMIT + 7))
def test_the_last_visit_that_counts(n_visits: int) -> None:
    """START, one visit a symbol, one to see that the tape is empty, END: accepted within LIMIT visits, END's included."""
    program = "START start:\n    NEXT a\nPULLER_RB a:\n    [R] a\n    [B] a\n    [EMPTY] end\nEND end"
    tape = "R" * (n_visits - 3)
    accepted = n_visits <= LIMIT
    assert run(compile(program), tape)[::2] == (accepted, min(n_visits, LIMIT))
    for check in (False, True):
        tests = [{"input": tape, "expected_output": "", "check_output": check}]
        assert judge(program, tests).all_passed == accepted


def test_a_trace_is_the_run_visit_by_visit() -> None:
    machine = compile(WRITES_AND_TURNS)
    assert trace(machine, "RB") == [
        ("start", "RB"), ("a", "RB"), ("b", "RBR"), ("a", "BR"), ("b", "BRR"), ("end", "RR"),
    ]  # fmt: skip
    assert run(machine, "RB") == Run(True, "RR", 6, "end")


def test_tests_are_prepared_once_for_many_programs() -> None:
    tests = [{"input": "RB", "expected_output": "R+", "check_output": True}, {"input": "", "check_output": False}]
    suite = Suite.of(tests)
    for program in (WRITES_AND_TURNS, "START start:\n    NEXT end\nEND end"):
        assert judge(program, suite) == judge(program, tests)
        assert passes(compile(program), suite) == judge(program, tests).passed


@pytest.mark.parametrize("text", ["", " \n", "# nothing", "```", "START start:\n    NEXT end\nEND end\n    NEXT end"])
def test_errors_say_what_is_wrong(text: str) -> None:
    with pytest.raises(ParseError) as told:
        compile(text)
    assert told.value.message in str(told.value)
    assert len(str(told.value)) > 20
    assert judge(text, [{"expected_accepted": False, "check_output": False}]) == Judgement(False, [], False)


@pytest.mark.parametrize("unit", ["```\n", "START ", "PULLER_RB a:\n", "    [R] a\n", " \n", "#", "\t", "[", "a" * 50])
def test_reading_is_linear_in_the_text(unit: str) -> None:
    """A million characters of anything: what a quadratic reader would take minutes for."""
    text = unit * (1_000_000 // len(unit))
    with pytest.raises(ParseError):
        compile(extract(text))
