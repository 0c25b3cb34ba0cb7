"""The problems of Manufactoria: what each family asks, how its problems and tests are made, and how they are put to a model.

Layer 3. Standard library only; everything follows from one seed, on any machine.

A problem is a family, its parameters (plain JSON, see `FAMILIES`) and the colours that its tapes hold. A family is a plain
function: `expected(family, params, tape)` says what a right program does. There are families that accept some tapes and
reject the others, and families that accept every tape and are judged by what they leave on it (`WRITING`).

    level       the problems of a family that belong together: `problems(family, level)`
    ensemble    problems of some levels, split into train and test: `ensemble(name)`
    tests       of the published kind, which a reward is made of: `Problem.tests`
    hidden      further ones, for evaluation only: `hidden_tests(problem)`. Where the former are few and lean to rejection,
                these are as many of either verdict as can be, and made from words that a program should accept and words
                one or two edits away from them. No tape is in both.

Families, levels, ensembles and the way tests are made follow the published environment (DELTA, arXiv 2509.21016); every text
is ours. Three things differ. There is a seed, and ids are those of the content. No problem is in one ensemble twice: the
published "prepend" lists four changes of its medium level twice, which gave test problems that were trained on; here the level
has the 13 different changes and, to be of the same size, some words of length 6. The statements say all that tests ask for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations, product
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias

Params: TypeAlias = Mapping[str, Any]
Test: TypeAlias = dict[str, Any]
"""{"input", "expected_output", "expected_accepted", "check_output"}; the output counts only where it is checked."""
Level: TypeAlias = Literal["basic", "easy", "medium", "hard"]

TWO, FOUR = "RB", "RBYG"
NAMES = {"R": "red", "B": "blue", "Y": "yellow", "G": "green"}
OPERATORS = (">", ">=", "<", "<=", "=")
EXPONENTS = ("n", "n+1", "n+2", "n+3", "2n")

WRITING = frozenset(("append_sequence", "prepend_sequence", "numerical_operations", "numerical_max_min"))
"""Families whose right programs accept every tape; the tape they leave is checked."""

N_TESTS = 35
"""Most tests of a problem. There are 11 or more."""

N_HIDDEN = 80
"""Hidden tests of a problem: half to accept and half to reject, where there are so many such tapes."""

ENOUGH = 3
"""Tests of each verdict that are tried for, and half of those of a writing family."""


# ---------------------------------------------------------------------------------------------- the families, as functions


def number(word: str) -> int:
    """A tape as a number: R is 0, B is 1, the most significant first; the empty tape is 0. Raises ValueError for others."""
    if word.strip(TWO):
        raise ValueError(f"a number is written in R and B only, not as {word!r}")
    return int("0" + word.translate(_TO_BITS), 2)


def digits(value: int) -> str:
    """A number as a tape, without leading zeros; zero and what is below is the empty tape."""
    return f"{value:b}".translate(_TO_COLOURS) if value > 0 else ""


_TO_BITS = str.maketrans("RB", "01")
_TO_COLOURS = str.maketrans("01", "RB")


def _is_subsequence(word: str, tape: str) -> bool:
    rest = iter(tape)
    return all(colour in rest for colour in word)


def _has_counts(counts: Mapping[str, int], tape: str) -> bool:
    return all(tape.count(colour) >= n for colour, n in counts.items())


def pattern(parts: Sequence[Sequence[str]]) -> str:
    """The regular expression of regex_pattern, as statements show it."""
    return "".join(f"({word}){operator}" for word, operator in parts)


def _repeats(exponent: str, n: int) -> int:
    if exponent not in EXPONENTS:
        raise ValueError(f"an exponent of regex_same_num must be one of {', '.join(EXPONENTS)}, not {exponent!r}")
    return 2 * n if exponent == "2n" else n + int(exponent[2:] or 0)


def _counted(segments: Sequence[Sequence[str]], n: int) -> str:
    return "".join(colour * _repeats(exponent, n) for colour, exponent in segments)


def _is_counted(segments: Sequence[Sequence[str]], tape: str) -> bool:
    least = len(_counted(segments, 0))
    n, rest = divmod(len(tape) - least, len(_counted(segments, 1)) - least)  # the length leaves one n only
    return rest == 0 and n >= 1 and tape == _counted(segments, n)


def _compare(operator: str, value: int, threshold: int) -> bool:
    match operator:
        case ">":
            return value > threshold
        case ">=":
            return value >= threshold
        case "<":
            return value < threshold
        case "<=":
            return value <= threshold
        case "=":
            return value == threshold
    raise ValueError(f"an operator of numerical_comparison must be one of {' '.join(OPERATORS)}, not {operator!r}")


def _changed(change: Sequence[str], tape: str) -> str:
    match change:
        case ["keep"]:
            return tape
        case ["swap"]:
            return tape.translate(_SWAPPED)
        case ["replace", old, new] if old:
            return tape.replace(old, new)
    raise ValueError(f"a change of prepend_sequence must be keep, swap or replace OLD NEW, not {change!r}")


_SWAPPED = str.maketrans("RB", "BR")


def _operate(operation: str, value: int, constant: int) -> int:
    match operation:
        case "add":
            return value + constant
        case "subtract":
            return value - constant
        case "and":
            return value & constant
        case "or":
            return value | constant
        case "xor":
            return value ^ constant
        case "floor_div":
            return value // constant
        case "not":
            return value ^ ((1 << max(8, value.bit_length())) - 1)
    raise ValueError(f"unknown operation {operation!r} of numerical_operations")


def _best(which: str, value: int, constant: int) -> int:
    if which not in ("max", "min"):
        raise ValueError(f"numerical_max_min is max or min, not {which!r}")
    return max(value, constant) if which == "max" else min(value, constant)


_ACCEPTS: dict[str, Callable[[Params, str], bool]] = {
    "starts_with": lambda p, tape: tape.startswith(p["sequence"]),
    "exact_sequence": lambda p, tape: tape == p["sequence"],
    "ends_with": lambda p, tape: tape.endswith(p["sequence"]),
    "contains_substring": lambda p, tape: p["sequence"] in tape,
    "contains_ordered": lambda p, tape: _is_subsequence(p["sequence"], tape),
    "contains_count": lambda p, tape: _has_counts(p["counts"], tape),
    "regex_pattern": lambda p, tape: re.fullmatch(pattern(p["parts"]), tape) is not None,
    "regex_same_num": lambda p, tape: _is_counted(p["segments"], tape),
    "numerical_comparison": lambda p, tape: _compare(p["operator"], number(tape), p["threshold"]),
    "not_contains": lambda p, tape: p["colour"] not in tape,
}

_WRITES: dict[str, Callable[[Params, str], str]] = {
    "append_sequence": lambda p, tape: tape + p["sequence"],
    "prepend_sequence": lambda p, tape: p["sequence"] + _changed(p["change"], tape),
    "numerical_operations": lambda p, tape: digits(_operate(p["operation"], number(tape), p["constant"])),
    "numerical_max_min": lambda p, tape: digits(_best(p["which"], number(tape), p["constant"])),
}

FAMILIES = (*_ACCEPTS, *_WRITES)
"""Names. Parameters, by family:

    starts_with, exact_sequence, ends_with, contains_substring, contains_ordered, append_sequence    {"sequence": "RB"}
    contains_count          {"counts": {"R": 2, "B": 1}}, at least so many
    regex_pattern           {"parts": [["RB", "+"], ["R", "?"]]}
    regex_same_num          {"segments": [["R", "n"], ["B", "n+1"]]}
    numerical_comparison    {"operator": ">=", "threshold": 5}
    prepend_sequence        {"sequence": "RB", "change": ["keep"] or ["swap"] or ["replace", old, new]}
    numerical_operations    {"operation": "add", "constant": 3}, of floor_div the divisor
    numerical_max_min       {"which": "max", "constant": 9}
    not_contains            {"colour": "Y"}
"""


def expected(family: str, params: Params, tape: str) -> tuple[bool, str]:
    """(whether a right program accepts the tape, the tape it leaves; "" in the families where that does not matter).

    Raises ValueError for an unknown family, or parameters that are none of it.
    """
    if family in _ACCEPTS:
        return _ACCEPTS[family](params, tape), ""
    if family in _WRITES:
        return True, _WRITES[family](params, tape)
    raise ValueError(f"unknown Manufactoria family {family!r}: use one of {', '.join(FAMILIES)}")


# ------------------------------------------------------------------------------------------------------------- statements


def statement(family: str, params: Params, colours: str = FOUR) -> str:
    """What the problem asks for, in words."""
    text = _STATEMENTS[family](params)
    if family.startswith("numerical_"):
        text = f"{_READ_AS_NUMBER} {text}"
    if colours == TWO:
        text += " The input tape holds no other colours than red and blue."
    return text


_READ_AS_NUMBER = (
    "Read the tape as a binary number: R is 0, B is 1, and the front of the tape is the most significant digit. The empty "
    "tape is 0, and there may be any number of R in front of the number."
)
_AS_BINARY = (
    "Write it in the same way, without any R in front of its first B. If it is zero{below}, the tape must be empty in the "
    "end."
)


def _say_sequence(text: str) -> Callable[[Params], str]:
    return lambda p: text.format(p["sequence"])


def _say_counts(p: Params) -> str:
    wanted = [f"at least {n} {NAMES[colour]}" for colour, n in p["counts"].items()]
    listed = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} and {wanted[-1]}"
    noun = "symbols" if len(wanted) > 1 or max(p["counts"].values()) > 1 else "symbol"
    return (
        f"Accept the tape if and only if it has {listed} {noun}. Where they are, and what else is on the tape, does not "
        "matter."
    )


def _say_pattern(p: Params) -> str:
    return (
        f"Accept the tape if and only if all of it, from front to back, matches the pattern `{pattern(p['parts'])}`. The "
        "operator behind a group says how often the group comes in a row: `+` once or more, `?` once or not at all, `*` any "
        "number of times or not at all."
    )


def _say_segments(p: Params) -> str:
    runs = [f"{exponent} times {colour}" for colour, exponent in p["segments"]]
    return (
        f"Accept the tape if and only if there is a whole number n, at least 1, such that the tape is {', then '.join(runs)}, "
        "and nothing else. It is the same n throughout."
    )


_RELATIONS = {
    ">": "greater than",
    ">=": "greater than or equal to",
    "<": "less than",
    "<=": "less than or equal to",
    "=": "equal to",
}
_OPERATIONS = {
    "add": "the sum of the number and {}",
    "subtract": "the number minus {}",
    "and": "the bitwise AND of the number and {}",
    "or": "the bitwise OR of the number and {}",
    "xor": "the bitwise XOR of the number and {}",
    "floor_div": "the number divided by {}, rounded down",
    "not": "the number with each of its digits inverted, after it was filled up with zeros in front to 8 digits if it has less",
}


def _say_operation(p: Params) -> str:
    result = _OPERATIONS[p["operation"]].format(p["constant"])
    below = " or negative" if p["operation"] == "subtract" else ""
    return f"Accept every tape, and replace what is on it by {result}. {_AS_BINARY.format(below=below)}"


def _say_best(p: Params) -> str:
    larger = "larger" if p["which"] == "max" else "smaller"
    return (
        f"Accept every tape, and replace what is on it by the {larger} one of the number and {p['constant']}. "
        f"{_AS_BINARY.format(below='')}"
    )


def _say_prepend(p: Params) -> str:
    match p["change"]:
        case ["keep"]:
            return f"Accept every tape, and put `{p['sequence']}` in front of what is on it."
        case ["swap"]:
            change = "turn every R into B and every B into R, both at once"
        case ["replace", old, ""]:
            change = f"remove every {_called(old)}"
        case [_, old, new]:
            change = f"replace every {_called(old)} by {_called(new)}"
    text = (
        f"Accept every tape, and do two things to what is on it. First {change}. Then put `{p['sequence']}` in front."
    )
    if len(p["change"]) == 3 and len(p["change"][1]) > 1:
        text += " Look for what is to be changed from front to back; what has been changed is not looked at again."
    return text


def _called(word: str) -> str:
    return word if len(word) == 1 else f"`{word}`"


_STATEMENTS: dict[str, Callable[[Params], str]] = {
    "starts_with": _say_sequence("Accept the tape if and only if it begins with `{}`; anything may follow."),
    "exact_sequence": _say_sequence(
        "Accept the tape if and only if it is exactly `{}`, with nothing before or after it."
    ),
    "ends_with": _say_sequence("Accept the tape if and only if it ends with `{}`; anything may stand before that."),
    "contains_substring": _say_sequence(
        "Accept the tape if and only if `{}` stands somewhere on it, in one piece, with nothing in between."
    ),
    "contains_ordered": _say_sequence(
        "Accept the tape if and only if the symbols of `{}` stand on it in this order. Others may stand before, between and "
        "after them."
    ),
    "contains_count": _say_counts,
    "regex_pattern": _say_pattern,
    "regex_same_num": _say_segments,
    "numerical_comparison": lambda p: (
        f"Accept the tape if and only if the number is {_RELATIONS[p['operator']]} {p['threshold']}."
    ),
    "append_sequence": _say_sequence("Accept every tape, and put `{}` after what is on it."),
    "prepend_sequence": _say_prepend,
    "numerical_operations": _say_operation,
    "numerical_max_min": _say_best,
    "not_contains": lambda p: f"Accept the tape if and only if there is no {NAMES[p['colour']]} symbol on it.",
}


# --------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """colours: those of its tapes, in the order R, B, Y, G. seed: what random tapes its tests have."""

    family: str
    params: Params = field(hash=False)
    colours: str
    level: Level
    seed: int = 42

    @cached_property
    def id(self) -> str:
        """Of family, parameters and colours: what is asked, whatever the seed."""
        content = json.dumps([self.family, self.params, self.colours], sort_keys=True)
        return f"{self.family}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    @property
    def statement(self) -> str:
        return statement(self.family, self.params, self.colours)

    @property
    def writes(self) -> bool:
        return self.family in WRITING

    @cached_property
    def tests(self) -> tuple[Test, ...]:
        return tuple(_make_tests(self))


def _test(problem: Problem, tape: str) -> Test:
    accepted, output = expected(problem.family, problem.params, tape)
    return {
        "input": tape,
        "expected_output": output,
        "expected_accepted": accepted,
        "check_output": problem.writes,
    }


# ------------------------------------------------------------------------------------- tests, made as the published ones are


class _Draw(NamedTuple):
    """Random pieces of tape."""

    rng: Random
    colours: str

    def some(self, n: int, colours: str = "") -> str:
        return "".join(self.rng.choices(colours or self.colours, k=n))

    def upto(self, least: int, most: int, colours: str = "") -> str:
        return self.some(self.rng.randint(least, most), colours)

    def other(self, colour: str) -> str:
        return self.rng.choice(self.colours.replace(colour, ""))

    def without(self, word: str) -> str:
        """The colours that the word does not have; "" where it has all."""
        return "".join(colour for colour in self.colours if colour not in word)

    def shuffled(self, word: str) -> str:
        return "".join(self.rng.sample(word, len(word)))

    def spread(self, word: str, least: int = 1, most: int = 1) -> str:
        """The word with random symbols between any two of its own."""
        return word[:1] + "".join(self.upto(least, most) + symbol for symbol in word[1:])


Strings: TypeAlias = Iterator[str]


def _make_tests(problem: Problem) -> list[Test]:
    draw = _Draw(Random(f"manufactoria tests {problem.seed} {problem.id}"), problem.colours)
    tests: dict[str, Test] = {}
    for tape in (*_common(draw), *_OWN[problem.family](draw, problem.params)):
        if tape not in tests:
            tests[tape] = _test(problem, tape)
    if problem.writes:
        while len(tests) < 2 * ENOUGH:
            tape = draw.upto(1, 12)
            tests[tape] = _test(problem, tape)
    else:
        for wanted in (True, False):
            n_left = ENOUGH - sum(test["expected_accepted"] == wanted for test in tests.values())
            for i in range(50):
                if n_left <= 0:
                    break
                tape = draw.upto(1, min(2 + i // 10, 12))
                test = _test(problem, tape)
                if tape not in tests and test["expected_accepted"] == wanted:
                    tests[tape] = test
                    n_left -= 1
    return list(tests.values())[:N_TESTS]


def _common(draw: _Draw) -> Strings:
    """Short tapes that every problem begins with."""
    first = draw.colours[0]
    yield from ("", first, draw.colours[:2])
    short = ["", *_words(draw.colours, 1, 2)]
    yield from draw.rng.choices(short, k=5)
    yield from ("RB", "BR", "RBR", "BRB", "RRB", "BBR")


def _starts_with(draw: _Draw, p: Params) -> Strings:
    q = p["sequence"]
    yield q
    yield q + draw.colours[0]
    yield draw.other(q[0]) + q
    yield q + draw.some(12)
    yield q * 3 + draw.some(3)
    yield draw.other(q[0]) + q[1:] + draw.some(6)
    yield draw.some(12, draw.without(q[0]))


def _exact_sequence(draw: _Draw, p: Params) -> Strings:
    q = p["sequence"]
    middle = len(q) // 2
    yield q
    yield q[:-1]
    yield q + draw.colours[0]
    yield draw.other(q[0]) + q[1:]
    yield q + draw.some(9)
    yield draw.some(6) + q
    yield draw.some(3) + q + draw.some(6)
    yield q[:middle] + draw.other(q[middle]) + q[middle + 1 :] + draw.some(6)
    yield draw.some(12)


def _ends_with(draw: _Draw, p: Params) -> Strings:
    q = p["sequence"]
    yield q
    yield draw.colours[0] + q
    yield q + draw.colours[0]
    yield draw.some(9) + q
    yield draw.some(15) + q
    yield q * 3 + draw.some(3) + q
    yield q + draw.some(6)
    yield draw.some(3) + q + draw.some(6)
    yield draw.some(6) + q[:-1]
    yield draw.some(5) + q[:-1] + draw.other(q[-1])
    if unused := draw.without(q):
        yield draw.some(12, unused)


def _contains_substring(draw: _Draw, p: Params) -> Strings:
    q = p["sequence"]
    middle = len(q) // 2
    yield q
    yield q + draw.some(3)
    yield draw.some(6) + q
    yield draw.upto(1, 3) + q + draw.upto(1, 3)
    yield q + draw.upto(1, 3) + q
    yield draw.upto(3, 5) + q + draw.upto(3, 5)
    if len(set(q)) < len(q):
        n_shared = next(n for n in range(len(q) - 1, -1, -1) if q.startswith(q[len(q) - n :]))
        yield q + q[n_shared:]
    yield draw.spread(q)
    for n in range(1, len(q)):
        pad = draw.upto(3, 6)
        yield pad + q[:n] + pad
    pad = draw.upto(2, 4)
    yield pad + q[::-1] + pad
    pad = draw.some(3)
    yield pad + draw.shuffled(q) + pad
    yield q[:middle] + draw.some(1) + q[middle:]
    if unused := draw.without(q):
        yield draw.some(12, unused)
    at = draw.rng.randint(0, len(q))
    pad = draw.some(3)
    yield pad + q[:at] + draw.some(1) + q[at:] + pad
    yield draw.some(2) + draw.spread(q) + draw.some(2)


def _contains_ordered(draw: _Draw, p: Params) -> Strings:
    q = p["sequence"]
    middle = len(q) // 2
    yield q
    for at in range(1, len(q)):
        yield q[:at] + draw.some(1) + q[at:]
    yield draw.spread(q)
    yield q + draw.some(3)
    yield draw.some(6) + q
    yield draw.upto(2, 4) + draw.spread(q, 1, 3) + draw.upto(2, 4)
    yield q[:middle] + draw.some(1) + q[middle:] + draw.some(2) + q
    yield q[1:]
    yield q[:-1]
    yield q[:middle] + q[middle + 1 :]
    pad = draw.upto(2, 5)
    yield pad + q[::-1] + pad
    pad = draw.some(3)
    yield pad + q[-1] + q[:-1] + pad
    pad = draw.some(9)
    yield pad + q[:-2] + q[-1] + pad
    if unused := draw.without(q):
        yield draw.some(12, unused)
    pad = draw.some(18)
    yield pad + q[:middle] + q[middle + 1 :] + pad


def _contains_count(draw: _Draw, p: Params) -> Strings:
    counts: Mapping[str, int] = p["counts"]
    required = "".join(counts)
    others = draw.without(required) or draw.colours
    exact = "".join(colour * n for colour, n in counts.items())
    first, last = required[0], required[-1]
    one_short = exact.replace(first, "", 1)

    def plus(least: int, most: int) -> str:
        return exact + "".join(colour * draw.rng.randint(least, most) for colour in counts)

    def padded(word: str, length: int, colours: str) -> str:
        return draw.shuffled(word + draw.some(length - len(word), colours))

    yield draw.shuffled(exact)
    yield draw.shuffled(plus(1, 2))
    yield draw.shuffled(exact + draw.some(3, others))
    yield padded(plus(0, 2), 12, draw.colours)
    mixed = "".join(draw.some(1, required if draw.rng.random() < 0.6 else others) for _ in range(18 - len(exact)))
    yield draw.shuffled(exact + mixed)
    yield draw.shuffled(exact.replace(last, "") + draw.some(5, others))
    yield draw.shuffled(one_short + draw.some(3, others))
    yield draw.some(12, others)
    yield padded("".join(colour * (n - 1) for colour, n in counts.items()), 12, others)
    yield padded(one_short, 18, others)


def _regex_pattern(draw: _Draw, p: Params) -> Strings:
    parts = p["parts"]
    words = [word for word, _ in parts]

    def match(least: int, most: int) -> list[str]:
        """For each part as much as matches it, repeated so often where it may be."""
        return [
            word * (draw.rng.randint(min(least, 1), min(most, 1)) if operator == "?" else draw.rng.randint(least, most))
            for word, operator in parts
        ]

    minimal = [word * (operator == "+") for word, operator in parts]
    typical = match(1, 3)
    yield "".join(minimal)
    yield "".join(typical)
    yield "".join(match(2, 4))
    yield words[0]
    yield words[-1]
    for i, (_, operator) in enumerate(parts):
        if operator == "+":
            yield "".join(typical[:i] + typical[i + 1 :])
    yield "".join(reversed(typical))
    yield typical[0] + "".join(draw.some(1) + word for word in typical[1:])
    for word in words:
        pad = draw.some(3)
        yield pad + word[:-1] + pad
    yield draw.upto(5, 8)


def _regex_same_num(draw: _Draw, p: Params) -> Strings:
    segments = p["segments"]
    once, twice = _counted(segments, 1), _counted(segments, 2)
    for n in range(1, 5):
        yield _counted(segments, n)
    yield once + draw.some(1)
    yield once[:-1]
    yield _counted(segments[::-1], 2)
    yield "RB" * (len(twice) // 2)
    yield twice[1:]
    yield ""
    yield from draw.colours
    for _ in range(3):
        yield draw.upto(2, 8)


_SHORT = ("R", "B", "RB", "BR", "RRB", "BBR", "RBRB")
_LONG = (
    "BRBRBR",
    "BBBBBB",
    "RRBRBB",
    "BRRRRRB",
    "RBBBRBR",
    "BBRRBBRR",
    "RRRRBRBB",
    "BRBBRBBRB",
    "BBBBRRRR",
    "RBRBRBRBR",
)
"""Tapes of 6 to 9 symbols, with zeros in front and without."""


def _numerical_comparison(draw: _Draw, p: Params) -> Strings:
    t, operator = p["threshold"], p["operator"]
    values = [t, t - 1, t + 1]
    yield from _SHORT
    if operator != "=":
        values += [t - 2, t + 2]
    if operator in (">", ">="):
        values += [2 * t] + [value for value in (4 * t, t + 100, t + 50) if value < 1024]
    if operator in ("<", "<=") and t > 10:
        values += [t // 2, t // 4, t - 10, t - 5]
    yield from (digits(value) or "R" for value in values if value >= 0)
    if t >= 8:
        yield from _LONG[:8]


def _append_sequence(draw: _Draw, p: Params) -> Strings:
    yield from ("", draw.colours[0], draw.colours[:2])
    for n in (4, 8, 12, 15):
        yield draw.some(n)


def _prepend_sequence(draw: _Draw, p: Params) -> Strings:
    yield from ("", *_words(TWO, 1, 2), "BBB", "RRR", "BRBR", "RBRB")
    for n in (4, 8, 12):
        yield draw.some(n)


def _numerical_operations(draw: _Draw, p: Params) -> Strings:
    operation, k = p["operation"], p["constant"]
    yield from ("", *_SHORT)
    if operation in ("add", "subtract"):
        values = [0, 1, k - 1, k, k + 1, 2 * k, 4 * k, 64, 128, 255, 127, 63, 31, 15]
    elif operation == "floor_div":
        values = [0, 1, k - 1, k, k + 1, 2 * k, 3 * k, 255, 127, 63, 31, 15]
    else:
        values = [0, 1, k, k - 1, k + 1, 85, 170, 255, 127, 63, 31, 15]
    yield from map(digits, values)
    yield from _LONG


def _numerical_max_min(draw: _Draw, p: Params) -> Strings:
    k = p["constant"]
    yield from ("", *_SHORT)
    values = [0, 1, *range(k - 2, k + 3), *(2**i for i in range(1, 8)), 3, 5, 7, 15, 31, 63, 127, 85, 170, 255]
    yield from map(digits, values)
    yield from _LONG


def _not_contains(draw: _Draw, p: Params) -> Strings:
    colour = p["colour"]
    others = draw.without(colour)
    yield colour
    yield others
    for n in (4, 8, 12):
        tape = draw.some(n, others)
        at = draw.rng.randint(0, n)
        yield tape
        yield tape[:at] + colour + tape[at:]
    yield draw.some(15)


_OWN: dict[str, Callable[[_Draw, Params], Strings]] = {
    "starts_with": _starts_with,
    "exact_sequence": _exact_sequence,
    "ends_with": _ends_with,
    "contains_substring": _contains_substring,
    "contains_ordered": _contains_ordered,
    "contains_count": _contains_count,
    "regex_pattern": _regex_pattern,
    "regex_same_num": _regex_same_num,
    "numerical_comparison": _numerical_comparison,
    "not_contains": _not_contains,
    "append_sequence": _append_sequence,
    "prepend_sequence": _prepend_sequence,
    "numerical_operations": _numerical_operations,
    "numerical_max_min": _numerical_max_min,
}


# ----------------------------------------------------------------------------------------------------------- hidden tests


def hidden_tests(problem: Problem, n: int = N_HIDDEN) -> list[Test]:
    """n further tests, none on a tape of `problem.tests`; n/2 of each verdict, where there are enough such tapes.

    The tapes in turn: one that is telling (made to be accepted, or to lead astray), one that is one edit away from such, one
    that is two edits away, and a random one of some of the colours. Their lengths are such that an ordinary right
    program stays well below the limit of visits.
    """
    draw = _Draw(Random(f"manufactoria hidden tests {problem.seed} {problem.id}"), problem.colours)
    make = _TELLING[problem.family]
    longest = _LONGEST.get(problem.family, 40)
    seen = {test["input"] for test in problem.tests}
    room = {True: n if problem.writes else n // 2, False: 0 if problem.writes else n // 2}
    tests: list[Test] = []
    for i in range(20 * n):
        if i % 4 == 3:
            colours = "".join(draw.rng.sample(draw.colours, draw.rng.randint(1, len(draw.colours))))
            tape = draw.upto(0, min(longest, draw.rng.choice((4, 8, 16))), colours)
        else:
            tape = make(draw, problem.params)
            for _ in range(i % 4):
                tape = _edited(draw, tape)
        if len(tape) > longest or tape in seen:
            continue
        test = _test(problem, tape)
        if room[test["expected_accepted"]]:
            room[test["expected_accepted"]] -= 1
            seen.add(tape)
            tests.append(test)
            if not any(room.values()):
                break
    return tests


_LONGEST = {
    "regex_same_num": 60,  # longer words must have their chance; the robot goes round once for each n
    "numerical_comparison": 24,
    "numerical_operations": 12,  # the robot goes round once for each digit
    "numerical_max_min": 16,
}
"""Longest hidden tape, by family; 40 for the others."""


def _edited(draw: _Draw, tape: str) -> str:
    """One symbol changed, left out, put in, or brought before the one in front of it."""
    if not tape:
        return draw.some(1)
    at = draw.rng.randrange(len(tape))
    match draw.rng.randrange(4):
        case 0:
            return tape[:at] + draw.other(tape[at]) + tape[at + 1 :]
        case 1:
            return tape[:at] + tape[at + 1 :]
        case 2:
            return tape[:at] + draw.some(1) + tape[at:]
    return tape[: max(at - 1, 0)] + tape[max(at - 1, 0) : at + 1][::-1] + tape[at + 1 :]


def _about(draw: _Draw, value: int, most_zeros: int) -> str:
    """A number near the value, or of the same size or less, perhaps with zeros in front."""
    near = value + draw.rng.randint(-4, 4)
    somewhere = draw.rng.randint(0, 2 * value + 4)
    chosen = max(0, draw.rng.choice((near, somewhere)))
    return "R" * draw.rng.choice((0, 0, draw.rng.randint(1, most_zeros))) + digits(chosen)


def _tried(draw: _Draw, word: str) -> str:
    """The word, or a tape that begins like it, goes wrong, and goes on with an end of it as if nothing had happened."""
    if draw.rng.random() < 0.4:
        return word
    n = draw.rng.randint(0, len(word))
    wrong = draw.other(word[n]) if n < len(word) else draw.some(1)
    return word[:n] + wrong + word[draw.rng.randrange(len(word)) :]


def _telling_count(draw: _Draw, p: Params) -> str:
    exact = "".join(colour * n for colour, n in p["counts"].items())
    return draw.shuffled(exact + draw.upto(0, 14, draw.rng.choice((draw.colours, draw.without(exact)))))


def _telling_pattern(draw: _Draw, p: Params) -> str:
    return "".join(
        word * draw.rng.randint(int(operator == "+"), 1 if operator == "?" else draw.rng.choice((2, 6, 24)))
        for word, operator in p["parts"]
    )


def _telling_comparison(draw: _Draw, p: Params) -> str:
    while True:
        tape = _about(draw, p["threshold"], 16)
        if _compare(p["operator"], number(tape), p["threshold"]) or draw.rng.random() < 0.2:
            return tape


def _telling_operation(draw: _Draw, p: Params) -> str:
    """Near the constant and its multiples, runs of ones (carries go far), and anything."""
    k = p["constant"]
    match draw.rng.randrange(4):
        case 0:
            return _about(draw, k * draw.rng.choice((1, 1, 2, 3, 4)), 4)
        case 1:
            return digits((1 << draw.rng.randint(2, 10)) - draw.rng.randint(0, 2))
        case 2:
            return _about(draw, 500, 2)
    return draw.upto(0, 12)


def _telling_prepend(draw: _Draw, p: Params) -> str:
    """Words that begin like what is to be replaced, over and over."""
    match p["change"]:
        case ["replace", old, _]:
            return "".join(draw.rng.choice((old, old, old[0], draw.some(1))) for _ in range(draw.rng.randint(1, 12)))
    return draw.upto(0, 20)


_TELLING: dict[str, Callable[[_Draw, Params], str]] = {
    "starts_with": lambda draw, p: p["sequence"] + draw.upto(0, 16),
    "exact_sequence": lambda draw, p: p["sequence"],
    "ends_with": lambda draw, p: draw.upto(0, 12) + _tried(draw, p["sequence"]),
    "contains_substring": lambda draw, p: draw.upto(0, 8) + _tried(draw, p["sequence"]) + draw.upto(0, 8),
    "contains_ordered": lambda draw, p: draw.upto(0, 6) + draw.spread(p["sequence"], 0, 4) + draw.upto(0, 6),
    "contains_count": _telling_count,
    "regex_pattern": _telling_pattern,
    "regex_same_num": lambda draw, p: _counted(p["segments"], draw.rng.randint(1, 10)),
    "numerical_comparison": _telling_comparison,
    "not_contains": lambda draw, p: draw.upto(0, 20, draw.without(p["colour"])),
    "append_sequence": lambda draw, p: draw.upto(0, 30),
    "prepend_sequence": _telling_prepend,
    "numerical_operations": _telling_operation,
    "numerical_max_min": lambda draw, p: _about(draw, p["constant"], 5),
}


# ------------------------------------------------------------------------------------------------------ levels, ensembles


def _words(colours: str, shortest: int, longest: int) -> list[str]:
    return ["".join(word) for n in range(shortest, longest + 1) for word in product(colours, repeat=n)]


def _sequences(colours: str, shortest: int, longest: int) -> list[Params]:
    return [{"sequence": word} for word in _words(colours, shortest, longest)]


def _counts() -> list[Params]:
    """At most three colours, at most six symbols in all."""
    return [
        {"counts": dict(zip(wanted, counts, strict=True))}
        for n_colours in (1, 2, 3)
        for wanted in combinations(FOUR, n_colours)
        for counts in product(range(1, 7), repeat=n_colours)
        if sum(counts) <= 6
    ]


def _patterns(n_parts: int, rng: Random) -> list[Params]:
    """1000 patterns at random, where there are more."""
    parts = [(word, operator) for word in _words(FOUR, 1, 2) for operator in "+?*"]
    n = len(parts) ** n_parts
    chosen = range(n) if n <= 1000 else rng.sample(range(n), 1000)
    places = [len(parts) ** i for i in reversed(range(n_parts))]
    return [{"parts": [list(parts[i // place % len(parts)]) for place in places]} for i in chosen]


def _comparisons(first: int, last: int) -> list[Params]:
    return [{"operator": operator, "threshold": t} for operator in OPERATORS for t in range(first, last + 1)]


def _prepends(longest: int, changes: list[list[str]]) -> list[Params]:
    prepends: list[Params] = [
        {"sequence": word, "change": change} for word in _words(TWO, 1, longest) for change in changes
    ]
    return prepends[:1000]


def _replacements(n_symbols: int) -> list[list[str]]:
    """Every change of a word of so many symbols into another of at most two."""
    return [
        ["replace", old, new]
        for old in _words(TWO, n_symbols, n_symbols)
        for new in ("", *_words(TWO, 1, 2))
        if new != old
    ]


_CONSTANTS = (3, 5, 7, 15, 31, 63, 127)


def _operations(*operations: str) -> list[Params]:
    return [{"operation": operation, "constant": k} for operation in operations for k in _CONSTANTS]


def _templates() -> list[Params]:
    templates: list[Params] = []
    for x, y in (("R", "B"), ("B", "R")):
        for first, second in product(EXPONENTS, repeat=2):
            segments = [[x, first], [y, second], [x, first]]
            templates += [{"segments": segments[:2]}, {"segments": segments}]
    return templates


LEVELS: Mapping[tuple[str, Level], tuple[str, Callable[[Random], list[Params]]]] = {
    ("starts_with", "basic"): (TWO, lambda _: _sequences(TWO, 1, 6)),
    ("exact_sequence", "basic"): (TWO, lambda _: _sequences(TWO, 1, 6)),
    ("append_sequence", "basic"): (FOUR, lambda _: _sequences(FOUR, 1, 6)[:1000]),
    ("contains_count", "easy"): (FOUR, lambda _: _counts()),
    ("contains_ordered", "easy"): (FOUR, lambda _: _sequences(FOUR, 1, 4)),
    ("contains_substring", "easy"): (FOUR, lambda _: _sequences(FOUR, 1, 4)),
    ("not_contains", "easy"): (FOUR, lambda _: [{"colour": colour} for colour in FOUR]),
    ("regex_pattern", "easy"): (FOUR, lambda rng: _patterns(1, rng)),
    ("regex_pattern", "medium"): (FOUR, lambda rng: _patterns(2, rng)),
    ("regex_pattern", "hard"): (FOUR, lambda rng: _patterns(3, rng)),
    ("numerical_comparison", "easy"): (TWO, lambda _: _comparisons(1, 63)),
    ("numerical_comparison", "medium"): (TWO, lambda _: _comparisons(64, 126)),
    ("numerical_comparison", "hard"): (TWO, lambda _: _comparisons(127, 256)),
    ("ends_with", "easy"): (TWO, lambda _: _sequences(TWO, 1, 4)),
    ("ends_with", "medium"): (TWO, lambda _: _sequences(TWO, 5, 6)),
    ("prepend_sequence", "easy"): (TWO, lambda _: _prepends(4, [["keep"]])),
    ("prepend_sequence", "medium"): (TWO, lambda _: _prepends(6, [["swap"], *_replacements(1)])),
    ("prepend_sequence", "hard"): (TWO, lambda _: _prepends(4, _replacements(2))),
    ("numerical_max_min", "medium"): (
        TWO,
        lambda _: [{"which": which, "constant": k} for which in ("max", "min") for k in range(1, 257)],
    ),
    ("numerical_operations", "easy"): (
        TWO,
        lambda _: [{"operation": "floor_div", "constant": 2**k} for k in range(1, 8)],
    ),
    ("numerical_operations", "medium"): (TWO, lambda _: _operations("and", "or", "xor")),
    ("numerical_operations", "hard"): (TWO, lambda _: _operations("add", "subtract")),
    ("regex_same_num", "hard"): (FOUR, lambda _: _templates()),
}
"""(family, level) -> (colours, parameters of its problems, some of which are chosen at random)."""


@cache
def problems(family: str, level: Level, seed: int = 42) -> tuple[Problem, ...]:
    """The problems of a level, all different, in a systematic order. Raises ValueError if there is no such level."""
    if (family, level) not in LEVELS:
        known = ", ".join(f"{family} {level}" for family, level in LEVELS)
        raise ValueError(f"Manufactoria has no level {level!r} of {family!r}: use one of {known}")
    colours, parameters = LEVELS[family, level]
    rng = Random(f"manufactoria level {seed} {family} {level}")
    return tuple(Problem(family, params, colours, level, seed) for params in parameters(rng))


class Ensemble(NamedTuple):
    """parts: (family, level, most problems to take). per_cent: share that is for training."""

    parts: tuple[tuple[str, Level, int], ...]
    per_cent: int


ENSEMBLES: Mapping[str, Ensemble] = {
    "basic_mix": Ensemble(
        (("append_sequence", "basic", 125), ("exact_sequence", "basic", 125), ("starts_with", "basic", 125)), 93
    ),
    "has": Ensemble(
        (("contains_count", "easy", 194), ("contains_ordered", "easy", 340), ("contains_substring", "easy", 340)), 85
    ),
    "regex": Ensemble((("regex_pattern", "easy", 60), ("regex_pattern", "medium", 600)), 85),
    "compr": Ensemble((("numerical_comparison", "easy", 315), ("numerical_comparison", "medium", 315)), 85),
    "ends": Ensemble((("ends_with", "easy", 300), ("ends_with", "medium", 1000)), 85),
    "prepend": Ensemble((("prepend_sequence", "easy", 30), ("prepend_sequence", "medium", 670)), 85),
    "mutate": Ensemble((("prepend_sequence", "hard", 720),), 85),
    "minmax": Ensemble((("numerical_max_min", "medium", 512),), 98),
    "bit_op": Ensemble((("numerical_operations", "medium", 21),), 0),
    "fdiv": Ensemble((("numerical_operations", "easy", 30),), 0),
    "add": Ensemble((("numerical_operations", "hard", 14),), 0),
    "symm": Ensemble((("regex_same_num", "hard", 100),), 0),
}
"""The last four have no training problems: they are for testing what was learnt elsewhere."""


@cache
def ensemble(name: str, seed: int = 42) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """(problems to train on, problems to test with); no problem twice, in one of them or in both.

    Raises ValueError for an unknown name.
    """
    if name not in ENSEMBLES:
        raise ValueError(f"Manufactoria has no ensemble {name!r}: use one of {', '.join(ENSEMBLES)}")
    parts, per_cent = ENSEMBLES[name]
    rng = Random(f"manufactoria ensemble {seed} {name}")
    chosen: list[Problem] = []
    for family, level, n in parts:
        there = problems(family, level, seed)
        chosen += rng.sample(there, min(n, len(there)))
    rng.shuffle(chosen)
    n_train = len(chosen) * per_cent // 100
    return tuple(chosen[:n_train]), tuple(chosen[n_train:])


# ----------------------------------------------------------------------------------------------------------------- prompt


def prompt_text(problem: Problem) -> str:
    """All that a model is told: the machine, the language, what counts as solved, the problem."""
    goal, end = (_GOAL_WRITING, _END_WRITING) if problem.writes else (_GOAL_ACCEPTING, _END_ACCEPTING)
    return _PROMPT.format(goal=goal, end=end, statement=problem.statement)


_GOAL_ACCEPTING = (
    "The robot accepts a tape by coming to the END node, and rejects it in any other case. For every tape your program must "
    "accept or reject as the task asks. What is left on the tape does not matter."
)
_GOAL_WRITING = (
    "The robot accepts a tape by coming to the END node, and rejects it in any other case. Your program must accept as the "
    "task asks, and what is on the tape when the robot comes to END, from front to back, must be just what the task asks for."
)
_END_ACCEPTING = "the tape is accepted"
_END_WRITING = "the tape is accepted, as it then is"

_PROMPT = """\
# A robot and its tape

Write a program for a robot. It carries a tape, a row of coloured symbols: R (red), B (blue), Y (yellow), G (green). The tape \
may be empty. The robot can do three things:

- look at the symbol at the front of the tape and, depending on it, take it off;
- paint a new symbol at the back of the tape;
- go on to another node of the program.

So the tape is a queue: symbols leave at the front and come in at the back.

## What your program has to do

{goal}

## The program

A program is a list of nodes. The robot begins at START and follows the routes from node to node.

```manufactoria
START start:
    NEXT first

PULLER_RB first:
    [R] second
    [B] NONE
    [EMPTY] end

PAINTER_BLUE second:
    NEXT first

END end
```

START and the painters have exactly one route, `NEXT name`. Pullers have these, in any order:

```manufactoria
PULLER_RB name:
    [R] a        # R is at the front: take it off, go to a
    [B] b        # B is at the front: take it off, go to b
    [EMPTY] c    # neither: the tape is empty, or Y or G is at its front. Take nothing, go to c

PULLER_YG name:
    [Y] a        # Y is at the front: take it off, go to a
    [G] b        # G is at the front: take it off, go to b
    [EMPTY] c    # neither: the tape is empty, or R or B is at its front. Take nothing, go to c
```

Painters add their colour at the back of the tape: `PAINTER_RED name:`, `PAINTER_BLUE name:`, `PAINTER_YELLOW name:`, \
`PAINTER_GREEN name:`.

Where a route leads:

- to the name of a node; `start` may be entered again;
- to `end` (in small letters; `END` is no target): the robot stops, and {end};
- to `NONE`: the robot stops, and the tape is rejected. A route that a puller lacks leads to NONE, too; its colour is \
taken off all the same.

The tape is also rejected if the robot has not come to END by its 1000th visit to a node, START and END included.

## Rules of writing

1. There is one `START start:` and one `END end`. END alone has no colon. In all other nodes the colon follows the name \
directly.
2. Nodes begin at the left margin. Their routes are indented by 4 spaces or a tab, never by less.
3. A name consists of letters, digits and underscores. No two nodes have the same name, and every route leads to a node that \
exists or to NONE.
4. Node types and colours are written in capitals, just as above. PULLER_RB has no [Y] or [G], PULLER_YG no [R] or [B].
5. `#` begins a comment.
6. A text that breaks a rule is no program and counts as wrong on every tape.

## Example

Task: accept the tape if and only if it is exactly `G`.

```manufactoria
START start:
    NEXT one

PULLER_YG one:
    [G] none_left

PULLER_RB none_left:
    [EMPTY] no_more

PULLER_YG no_more:
    [EMPTY] end

END end
```

## Your task

{statement}

You may think first. Then write the whole program in one code block that begins with ```manufactoria and ends with ```. Only \
the last code block of your answer counts, so write no other after it.
"""
