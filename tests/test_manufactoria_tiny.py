"""The task `manufactoria-tiny`: right programs, tests that find mistakes, exact rewards, a teacher as unreliable as it says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import sqrt
from random import Random

import pytest

from nevergiveup.tasks.manufactoria_machine import Suite, compile, results, run
from nevergiveup.tasks.manufactoria_problems import expected
from nevergiveup.tasks.manufactoria_tiny import (
    COLOURS,
    ELSEWHERE,
    FAMILIES,
    N_HIDDEN,
    N_TESTS,
    REJECT_ALL,
    ManufactoriaTiny,
    Node,
    Problem,
    make_tests,
    program_text,
    right_program,
    taught,
)
from nevergiveup.types import NO_ANSWER, Completion, Prompt, Score

TASK = ManufactoriaTiny(seed=0)
ALL_TESTS = ManufactoriaTiny(seed=0, reward="all-tests")
ALL = (*TASK.prompts("train"), *TASK.prompts("test"))

ACCEPT_ALL: tuple[Node, ...] = (("PULL", "END", "END", "END"),)


def completion(tokens: Sequence[int]) -> Completion:
    return Completion(tuple(tokens), (-1.0,) * len(tokens), "", "stop", 0, 0)


def graded(prompt: Prompt, nodes: Sequence[Node], task: ManufactoriaTiny = TASK) -> Score:
    return task.grade(prompt, completion(task.completion_tokens(nodes)))


def words(text: str) -> tuple[int, ...]:
    return tuple(TASK.vocabulary.index(word) for word in text.split())


@cache
def every_tape(family: str, word: str) -> Suite:
    """What the family wants of all tapes that are up to 3 symbols longer than the word."""
    tapes = ["".join(tape) for n in range(len(word) + 4) for tape in product(COLOURS, repeat=n)]
    tests = []
    for tape in tapes:
        accepted, output = expected(family, {"sequence": word}, tape)
        tests.append(
            {
                "input": tape,
                "expected_accepted": accepted,
                "expected_output": output,
                "check_output": family == "append_sequence",
            }
        )
    return Suite.of(tests)


# Problems and programs


def test_an_example() -> None:
    prompt = next(prompt for prompt in ALL if prompt.id == "ends_with-RB")
    assert TASK.text(prompt.tokens) == "<bos> ends_with R B _ _ _ _ ="
    assert TASK.text(TASK.target(prompt)) == "PULL 1 0 NONE PULL 1 2 NONE PULL 1 0 END <eos>"
    assert program_text(right_program("append_sequence", "RB")).splitlines() == [
        "START start:",
        "    NEXT n0",
        "PAINTER_RED n0:",
        "    NEXT n1",
        "PAINTER_BLUE n1:",
        "    NEXT end",
        "END end",
    ]


def test_the_right_program_is_right_on_every_tape() -> None:
    for prompt in ALL:
        problem: Problem = prompt.answer
        text = program_text(right_program(problem.family, problem.word))
        assert all(results(text, every_tape(problem.family, problem.word))), prompt.id


def test_the_right_program_gets_the_best_reward() -> None:
    for prompt in ALL:
        for task in (TASK, ALL_TESTS):
            score = task.grade(prompt, completion(task.target(prompt)))
            assert score.reward == prompt.max_reward == 1
            assert score.parts == {"pass_rate": 1.0, "all_pass": 1.0}


def test_splits_share_no_problem_and_the_longest_words_are_to_train_on() -> None:
    train, test = TASK.prompts("train"), TASK.prompts("test")
    assert (len(train), len(test)) == (462, 142)
    assert len({prompt.tokens for prompt in ALL}) == len({prompt.id for prompt in ALL}) == 604
    for family, options in FAMILIES.items():
        found = {prompt.answer.word for prompt in ALL if prompt.answer.family == family}
        assert found == set(options.words)
        lengths = [len(prompt.answer.word) for prompt in test if prompt.answer.family == family]
        assert min(lengths) == options.lengths[0]
        assert max(lengths) == options.lengths[1] - 1


def test_tests_are_balanced_where_they_can_be() -> None:
    for split, n in (("train", N_TESTS), ("test", N_TESTS + N_HIDDEN)):
        for prompt in TASK.prompts(split):
            cases = prompt.answer.tests.cases
            n_wanted = sum(case.wanted for case in cases)
            assert len({case.tape for case in cases}) == len(cases)
            match prompt.answer.family:
                case "append_sequence":
                    assert (n_wanted, len(cases)) == (n, n)
                case "exact_sequence":
                    assert n_wanted == 1
                    assert n // 3 <= len(cases) <= 1 + n // 2
                case _:
                    assert n_wanted <= n // 2
                    assert len(cases) - n_wanted <= n // 2
                    assert split == "test" or len(cases) == n


def test_hidden_tests_are_added_to_those_of_training() -> None:
    """The tests that a problem would have in the training split are among those that it has for evaluation."""
    for prompt in TASK.prompts("test"):
        few = make_tests(prompt.answer.family, prompt.answer.word, N_TESTS, TASK.seed)
        assert set(few.cases) < set(prompt.answer.tests.cases)


def test_most_mistakes_at_one_place_fail_the_tests() -> None:
    """Of all programs with one wrong target that are wrong on some tape, the share that still passes every test."""
    missed = {}
    for split in ("train", "test"):
        n_wrong = n_missed = 0
        for prompt in TASK.prompts(split)[:40]:
            family, word, tests = prompt.answer
            for text in one_change(right_program(family, word)):
                passes = all(results(text, tests))
                is_wrong = not passes or not all(results(text, every_tape(family, word)))
                n_wrong += is_wrong
                n_missed += is_wrong and passes
        assert n_wrong > 1000
        missed[split] = n_missed / n_wrong
    assert missed["test"] < 0.08 < missed["train"] < 0.2


def one_change(right: Sequence[Node]) -> Iterator[str]:
    for i, node in enumerate(right):
        for place in range(1, len(node)):
            for target in [*(str(n) for n in range(len(right))), "END", "NONE"]:
                if target != node[place]:
                    yield program_text((*right[:i], (*node[:place], target, *node[place + 1 :]), *right[i + 1 :]))


# Rewards


def test_the_reward_is_the_exact_share_of_tests_that_pass_visit_by_visit() -> None:
    rng = Random(1)
    seen = set()
    for prompt in TASK.prompts("train"):
        family, word, tests = prompt.answer
        nodes = taught(rng, family, word)
        machine = compile(program_text(nodes))
        n_passed = 0
        for tape, wanted, output in tests.cases:
            outcome = run(machine, tape)
            n_passed += (outcome.accepted and output in (None, outcome.output)) == wanted
        share = Fraction(n_passed, len(tests.cases))
        seen.add(share)
        score, strict = graded(prompt, nodes), graded(prompt, nodes, ALL_TESTS)
        assert score.reward == share
        assert strict.reward == (share == 1)
        assert score.parts == strict.parts == {"pass_rate": float(share), "all_pass": float(share == 1)}
        assert score.answer == TASK.text(TASK.completion_tokens(nodes)[:-1])
    assert len(seen) > 10, "wrong programs are to be told apart"


def test_doing_nothing_earns_what_it_must() -> None:
    for prompt in ALL:
        family, _, tests = prompt.answer
        share = Fraction(sum(case.wanted for case in tests.cases), len(tests.cases))
        accepted, rejected = graded(prompt, ACCEPT_ALL).reward, graded(prompt, REJECT_ALL).reward
        if family == "append_sequence":  # a symbol that is taken is not what the tape must end with
            assert (accepted, rejected) == (0, 0)
        else:
            assert (accepted, rejected) == (share, 1 - share)
            assert rejected >= Fraction(1, 2) or len(tests.cases) > N_TESTS
        for nodes in (ACCEPT_ALL, REJECT_ALL):
            assert graded(prompt, nodes, ALL_TESTS).reward == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cut off before the end"),
        ("PULL NONE NONE NONE", "cut off before the end"),
        ("<eos>", NO_ANSWER),
        ("PULL NONE NONE <eos>", "not a program"),
        ("PULL NONE NONE NONE NONE <eos>", "not a program"),
        ("PULL NONE NONE PULL <eos>", "not a program"),
        ("RED <eos>", "not a program"),
        ("1 0 NONE <eos>", "not a program"),
        ("PULL R B = <eos>", "not a program"),
        ("PULL NONE NONE NONE <eos> PULL NONE NONE NONE <eos>", "not a program"),
        ("PULL 0 1 NONE <eos>", "undefined target"),
        ("RED 1 BLUE 2 <eos>", "undefined target"),
    ],
)
def test_what_is_no_program_scores_0_and_says_why(text: str, reason: str) -> None:
    for prompt in ALL[::100]:
        for task in (TASK, ALL_TESTS):
            score = task.grade(prompt, completion(words(text)))
            assert (score.reward, score.reason, score.answer) == (0, reason, None)
            assert score.parts == {"pass_rate": 0.0, "all_pass": 0.0}


def test_tokens_of_a_larger_vocabulary_are_no_program() -> None:
    for token in (-1, len(TASK.vocabulary), 10**9):
        assert TASK.grade(ALL[0], completion((token, TASK.eos_id))).reason == "not a program"


def test_a_program_that_never_ends_is_rejected_everywhere() -> None:
    loop = (("RED", "1"), ("PULL", "0", "0", "0"))
    for prompt in ALL[::20]:
        assert graded(prompt, loop).reward == graded(prompt, REJECT_ALL).reward


# The teacher


def test_what_the_teacher_writes_are_programs_for_the_problems() -> None:
    problems = {prompt.tokens for prompt in ALL}
    for prompt, written in TASK.teacher_sequences(Random(0), 2000):
        assert prompt in problems
        assert isinstance(TASK.nodes(written), list)
        assert len(written) <= TASK.max_completion_tokens
        assert len(prompt) + len(written) <= TASK.context
        assert TASK.pad_id not in (*prompt, *written)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_as_reliable_as_its_family_says(family: str) -> None:
    """Drawn programs against the stated probabilities, within 4.5 binomial standard errors."""
    options = FAMILIES[family]
    rng, word = Random(2), "RBBRRB"[: options.lengths[1]]
    right = right_program(family, word)
    programs = [taught(rng, family, word) for _ in range(4000)]
    tried = [program for program in programs if program != REJECT_ALL]
    outcomes = {"gives_up": [program == REJECT_ALL for program in programs]}
    stated = {"gives_up": options.gives_up, "inside": options.inside, "after": options.after, "elsewhere": ELSEWHERE}
    for program in tried:
        assert len(program) == len(right)
        for i, (node, wanted) in enumerate(zip(program, right, strict=True)):
            if family == "append_sequence":
                outcomes.setdefault("inside", []).append(node[0] == wanted[0])
                assert node[1] == wanted[1]
                continue
            for symbol, target, good in zip((*COLOURS, ""), node[1:], wanted[1:], strict=True):
                is_easy = symbol == "" or word[i : i + 1] == symbol
                kind = "elsewhere" if is_easy else "after" if i == len(word) else "inside"
                outcomes.setdefault(kind, []).append(target == good)
    for kind, hits in outcomes.items():
        p = stated[kind]
        assert abs(sum(hits) / len(hits) - p) <= 4.5 * sqrt(p * (1 - p) / len(hits)), kind


def test_half_of_the_slips_are_to_the_usual_mistake() -> None:
    rng = Random(3)
    slips = []
    for _ in range(4000):
        program = taught(rng, "contains_ordered", "RBBRRB")
        if program != REJECT_ALL and program[3][2] != "3":
            slips.append(program[3][2] == "0")
    # One of the other 7 targets is that one, too.
    p = 0.5 + 0.5 / 7
    assert abs(sum(slips) / len(slips) - p) < 4.5 * sqrt(p * (1 - p) / len(slips))


# Determinism


def test_everything_follows_from_the_seed() -> None:
    again = ManufactoriaTiny(seed=0)
    assert again.prompts("train") == TASK.prompts("train")
    assert again.teacher_sequences(Random(5), 20) == TASK.teacher_sequences(Random(5), 20)
    assert ALL_TESTS.prompts("test") == TASK.prompts("test")
    other = ManufactoriaTiny(seed=1)
    assert {p.id for p in other.prompts("train")} != {p.id for p in TASK.prompts("train")}
    # The same on every machine and in every version: checkpoints and curves refer to prompts by id.
    lines = [f"{prompt.id} {' '.join(case.tape for case in prompt.answer.tests.cases)}" for prompt in ALL]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest().startswith("f4d1ad8740449493")


def test_words_are_tokens_and_all_differ() -> None:
    assert len(set(TASK.vocabulary)) == len(TASK.vocabulary)
    assert not any(" " in word for word in TASK.vocabulary)
    assert {TASK.bos_id, TASK.eos_id, TASK.pad_id} == set(words("<bos> <eos> <pad>"))


def test_bad_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per-test or all-tests, not 'half'"):
        ManufactoriaTiny(reward="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"train, test, not 'heldout'"):
        TASK.prompts("heldout")
