"""Judging Manufactoria responses: the package against a plain dictionary interpreter, side by side in one run.

    python benchmarks/manufactoria.py

Both extract the program from a response, parse it and judge it by the published number of tests; the package has prepared
the tests once, as its task does. Microseconds a response, the best of seven, and how many times the package is faster.
Right responses are the solver's programs for problems of an ensemble; endless programs are judged by the tests of `has`.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from time import perf_counter

import plain_robot

from nevergiveup.tasks.manufactoria import Suite, reward, solve
from nevergiveup.tasks.manufactoria_problems import ensemble

N_PROBLEMS = 50

ENDLESS = {
    "takes and paints back": """\
START start:
    NEXT a
PULLER_RB a:
    [R] red
    [B] blue
    [EMPTY] b
PULLER_YG b:
    [Y] yellow
    [G] green
    [EMPTY] red
PAINTER_RED red:
    NEXT a
PAINTER_BLUE blue:
    NEXT a
PAINTER_YELLOW yellow:
    NEXT a
PAINTER_GREEN green:
    NEXT a
END end""",
    "paints and never takes": """\
START start:
    NEXT a
PAINTER_RED a:
    NEXT b
PAINTER_BLUE b:
    NEXT a
END end""",
    "goes round without work": """\
START start:
    NEXT a
PULLER_RB a:
    [R] a
    [B] a
    [EMPTY] b
PULLER_YG b:
    [Y] b
    [G] b
    [EMPTY] a
END end""",
}


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, the best of seven passes of at least 20 ms."""
    n = 1
    while True:
        began = perf_counter()
        for _ in range(n):
            call()
        if perf_counter() - began > 0.02:
            break
        n *= 2
    best = float("inf")
    for _ in range(7):
        began = perf_counter()
        for _ in range(n):
            call()
        best = min(best, perf_counter() - began)
    return best / n * 1e6


def response(program: str) -> str:
    return f"The robot reads the tape from the front.\n\n```manufactoria\n{program}\n```\n"


def compare(label: str, cases: list[tuple[str, tuple[dict, ...]]]) -> None:
    plain, ours = [], []
    for text, tests in cases:
        suite = Suite.of(tests)
        assert plain_robot.reward(text, tests) == reward(text, suite)
        plain.append(microseconds(lambda text=text, tests=tests: plain_robot.reward(text, tests)))
        ours.append(microseconds(lambda text=text, suite=suite: reward(text, suite)))
    ratios = [a / b for a, b in zip(plain, ours, strict=True)]
    print(
        f"{label:36}{mean(plain):10.1f}{mean(ours):10.1f}{sum(plain) / sum(ours):9.1f}{min(ratios):10.1f}", flush=True
    )


def main() -> None:
    print(f"{'microseconds a response':36}{'plain':>10}{'package':>10}{'times':>9}{'at least':>10}")
    for name in ("has", "basic_mix", "compr", "prepend", "minmax"):
        train, _ = ensemble(name)
        chosen = train[:: max(len(train) // N_PROBLEMS, 1)][:N_PROBLEMS]
        cases = [(response(solve(p.family, p.params, p.colours)), p.tests) for p in chosen]
        compare(f"right, {name}", cases)
    tests = ensemble("has")[0][0].tests
    for label, program in ENDLESS.items():
        compare(f"endless, {label}", [(response(program), tests)])


if __name__ == "__main__":
    main()
