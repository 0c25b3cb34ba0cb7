"""Microseconds that a strategy takes to judge and weigh a group of 16, for every strategy with its defaults.

    python benchmarks/strategies.py

0/1 rewards, and partial scores in twelfths (exact fractions); a second round, so that there is a history. Best of five.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random
from timeit import repeat

from nevergiveup.strategies import STRATEGIES, Strategy
from nevergiveup.types import Attempt, Group, Prompt

N = 16


def group_of(rewards: list[int | Fraction]) -> Group:
    fresh = tuple(Attempt(reward, 0) for reward in rewards)
    return Group(Prompt("p"), fresh, 2 * N, sum(rewards), 0, min(rewards), max(rewards), 2)


def microseconds(strategy: Strategy, group: Group, n: int = 5000) -> float:
    rng = Random(0)
    return min(repeat(lambda: (strategy.judge(group, rng), strategy.weigh(group)), number=n, repeat=5)) / n * 1e6


def main() -> None:
    binary = group_of([int(i % 4 == 0) for i in range(N)])
    graded = group_of([Fraction(i % 5, 12) for i in range(N)])
    print(f"{'strategy':16}{'0/1':>8}{'twelfths':>10}   microseconds for judge + weigh, {N} attempts")
    for name, cls in STRATEGIES.items():
        print(f"{name:16}{microseconds(cls(), binary):8.1f}{microseconds(cls(), graded):10.1f}")


if __name__ == "__main__":
    main()
