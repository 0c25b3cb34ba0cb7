"""The solver's programs against the plain reading of each family, on all short tapes and some long ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from nevergiveup.tasks.manufactoria_machine import compile as compile_program
from nevergiveup.tasks.manufactoria_machine import judge, run
from nevergiveup.tasks.manufactoria_problems import LEVELS, expected, hidden_tests, problems
from nevergiveup.tasks.manufactoria_solver import solve

EXPONENTS = ("n", "n+1", "n+2", "n+3", "2n")


def words(colours: str, lengths: range) -> list[str]:
    return ["".join(word) for n in lengths for word in product(colours, repeat=n)]


def red_blue(value: int) -> str:
    return f"{value:b}".replace("0", "R").replace("1", "B")


SHORT = {"RB": words("RB", range(8)), "RBYG": words("RBYG", range(5))}


def settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(family, colours, params): settings of every level, a sample where there are many."""
    rng = Random(4)
    two, four = words("RB", range(1, 7)), words("RBYG", range(1, 5))
    for colours, sequences in (("RB", two), ("RBYG", four)):
        for family in ("starts_with", "exact_sequence", "ends_with", "contains_substring", "contains_ordered"):
            yield from ((family, colours, {"sequence": word}) for word in rng.sample(sequences, 12))
        yield from (("append_sequence", colours, {"sequence": word}) for word in rng.sample(sequences, 4))
        yield from (("not_contains", colours, {"colour": colour}) for colour in colours)
    for colours_wanted in (*"RY", "RB", "BG", "RYG"):
        for counts in product((1, 2, 3), repeat=len(colours_wanted)):
            if sum(counts) <= 6:
                yield "contains_count", "RBYG", {"counts": dict(zip(colours_wanted, counts, strict=True))}
    pieces = [[word, operator] for word in words("RBYG", range(1, 3)) for operator in "+?*"]
    for n_parts in (1, 2, 2, 2, 3, 3):
        yield from (("regex_pattern", "RBYG", {"parts": rng.choices(pieces, k=n_parts)}) for _ in range(10))
    for threshold in (0, 1, 2, 5, 6, 63, 64, 85, 126):
        for operator in (">", ">=", "<", "<=", "="):
            yield "numerical_comparison", "RB", {"operator": operator, "threshold": threshold}
    for constant in (1, 2, 6, 21, 64, 127):
        yield from (("numerical_max_min", "RB", {"which": which, "constant": constant}) for which in ("max", "min"))
    for constant in (0, 1, 3, 6, 31, 85, 127):
        for operation in ("add", "subtract", "and", "or", "xor"):
            yield "numerical_operations", "RB", {"operation": operation, "constant": constant}
    yield from (("numerical_operations", "RB", {"operation": "floor_div", "constant": 2**k}) for k in range(8))
    yield "numerical_operations", "RB", {"operation": "not", "constant": 0}
    symbols = [["keep"], ["swap"], *(["replace", old, new] for old in "RB" for new in ("", "R", "B", "RB", "BB"))]
    pairs = [["replace", old, new] for old in words("RB", range(2, 3)) for new in words("RB", range(3)) if old != new]
    for change in [*symbols, *pairs]:
        yield "prepend_sequence", "RB", {"sequence": rng.choice(two), "change": change}
    for first, second in permutations("RBYG", 2):
        segments = [[first, rng.choice(EXPONENTS)], [second, rng.choice(EXPONENTS)]]
        yield "regex_same_num", "RBYG", {"segments": segments}
        yield "regex_same_num", "RBYG", {"segments": [*segments, segments[0]]}


SETTINGS = list(settings())


def check(family: str, colours: str, params: dict[str, Any], tapes: list[str], n_visits: int = 1000) -> None:
    machine = compile_program(solve(family, params, colours))
    for tape in tapes:
        accepted, output, steps, reason = run(machine, tape)
        want_accepted, want_output = expected(family, params, tape)
        assert accepted == want_accepted, (params, tape, reason)
        assert steps <= n_visits, (params, tape)
        if family.startswith(("append", "prepend", "numerical_operations", "numerical_max_min")):
            assert output == want_output, (params, tape)


@pytest.mark.parametrize("family", sorted({family for family, _, _ in SETTINGS}))
def test_right_on_all_short_tapes_and_on_long_ones(family: str) -> None:
    rng = Random(5)
    for _, colours, params in (setting for setting in SETTINGS if setting[0] == family):
        # A number whose carry or borrow runs through more than 20 bits may not fit the limit of visits.
        longest = 20 if family == "numerical_operations" else 40
        long = ["".join(rng.choices(colours, k=rng.randint(8, longest))) for _ in range(15)]
        check(family, colours, params, SHORT[colours] + long)


def test_patterns_on_words_that_match_and_words_that_nearly_do() -> None:
    rng = Random(6)
    n_repeats = {"+": range(1, 5), "?": range(2), "*": range(5)}
    for _, colours, params in (setting for setting in SETTINGS if setting[0] == "regex_pattern"):
        tapes = []
        for _ in range(20):
            word = "".join(part * rng.choice(n_repeats[operator]) for part, operator in params["parts"])
            i = rng.randint(0, len(word))
            tapes += [word, word[:-1], word[:i] + rng.choice(colours) + word[i + rng.randint(0, 1) :]]
        check("regex_pattern", colours, params, tapes)


def test_equal_numbers_are_not_taken_in_by_marks_on_the_tape() -> None:
    rng = Random(7)
    for _, colours, params in (setting for setting in SETTINGS if setting[0] == "regex_same_num"):
        tapes = []
        for n in range(1, 5):
            word = "".join(c * (2 * n if e == "2n" else n + int(e[2:] or 0)) for c, e in params["segments"])
            i = rng.randint(0, len(word))
            changed = [word[:i] + colour + word[i + rng.randint(0, 1) :] for colour in ("", *colours)]
            tapes += [word, *changed]
            for mark in colours:
                tapes += [mark + word, word + mark, word + mark * 2, word + mark + word, (word + mark) * 2, mark]
        check("regex_same_num", colours, params, tapes)


@pytest.mark.parametrize(("family", "level"), LEVELS)
def test_every_problem_of_every_level_is_solved(family: str, level: Any) -> None:
    for i, problem in enumerate(problems(family, level)):
        program = solve(family, problem.params, problem.colours)
        tests = [*problem.tests, *(hidden_tests(problem) if i % 40 == 0 else [])]
        assert judge(program, tests).all_passed, problem.params


@pytest.mark.parametrize("operation", ["add", "subtract", "and", "or", "xor"])
def test_operations_are_as_short_as_the_published_sets_need(operation: str) -> None:
    """Runs on tapes of up to ten bits take at most 292 visits, programs have at most 427 nodes."""
    for constant in (3, 5, 7, 15, 31, 63, 127):
        values = {0, 1, 15, 31, 63, 64, 85, 127, 128, 170, 255, 511, 512, 1023}
        values |= {constant - 1, constant + 1, 2 * constant, 4 * constant}
        params = {"operation": operation, "constant": constant}
        check("numerical_operations", "RB", params, ["", *map(red_blue, values), "R" * 5 + "B" * 5], n_visits=292)
        assert solve("numerical_operations", params).count(":\n") <= 427


@pytest.mark.parametrize("operation", ["add", "subtract", "xor", "not"])
def test_operations_fit_the_limit_up_to_twenty_bits(operation: str) -> None:
    for constant in (1, 85, 127, 255):
        params = {"operation": operation, "constant": constant}
        check("numerical_operations", "RB", params, ["B" * 20, "B" + "R" * 19, "RRR" + "BR" * 10])


def test_states_that_behave_alike_are_merged() -> None:
    """Comparing with a number of nine bits takes two states a bit or so, not one a value."""
    for operator in (">", ">=", "<", "<=", "="):
        program = solve("numerical_comparison", {"operator": operator, "threshold": 341})
        assert program.count("PULLER_RB") <= 18


def test_one_puller_where_the_other_pair_cannot_matter() -> None:
    assert solve("starts_with", {"sequence": "RY"}) == (
        "START start:\n    NEXT got0\n\n"
        "PULLER_RB got0:\n    [R] got1\n\n"
        "PULLER_YG got1:\n    [Y] end\n\n"
        "END end\n"
    )  # fmt: skip
    assert solve("not_contains", {"colour": "Y"}) == (
        "START start:\n    NEXT scan\n\n"
        "PULLER_RB scan:\n    [R] scan\n    [B] scan\n    [EMPTY] scan_yg\n\n"
        "PULLER_YG scan_yg:\n    [G] scan\n    [EMPTY] end\n\n"
        "END end\n"
    )


@pytest.mark.parametrize(
    ("family", "params", "colours", "words_of_error"),
    [
        ("reverse", {}, None, "unknown Manufactoria family 'reverse'"),
        ("prepend_sequence", {"sequence": "R", "change": ["keep"]}, "RBYG", "must be some of RB, not 'RBYG'"),
        ("prepend_sequence", {"sequence": "R", "change": ["replace", "", "B"]}, None, "change of prepend_sequence"),
        ("starts_with", {"sequence": "R"}, "RX", "must be some of RBYG, not 'RX'"),
        ("regex_pattern", {"parts": [["R", "!"]]}, None, "one of"),
        ("regex_same_num", {"segments": [["R", "n"], ["R", "n"]]}, None, "must differ in colour"),
        ("regex_same_num", {"segments": [["R", "n"], ["B", "3n"]]}, None, "not '3n'"),
        ("numerical_comparison", {"operator": "!=", "threshold": 3}, None, "not '!='"),
        ("numerical_max_min", {"which": "mean", "constant": 3}, None, "not 'mean'"),
        ("numerical_operations", {"operation": "floor_div", "constant": 6}, None, "power of two, not 6"),
        ("numerical_operations", {"operation": "multiply", "constant": 3}, None, "not 'multiply'"),
    ],
)
def test_other_problems_are_refused(
    family: str, params: dict[str, Any], colours: str | None, words_of_error: str
) -> None:
    with pytest.raises(ValueError, match=words_of_error.replace("?", r"\?").replace("!", r"\!")):
        solve(family, params, colours)
