"""Which K, p and T suit a data set, by what a probe found. Layer 3. Standard library only.

Rules of thumb from closed forms (see docs/evaluate.md), each with its reason in words; change them in the tables below.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from nevergiveup.evaluate import Drawn, signal_at_k

KS = (2, 4, 8, 16, 32, 64)

P_BY_UNSOLVED: tuple[tuple[float, float], ...] = ((0.5, 0.75), (0.2, 0.9), (0.0, 0.95))
"""Share of prompts never solved in the probe, from which on -> p. Each of them may cost K / (1 - p) completions a visit."""


def cost_table(drawn: Sequence[Drawn]) -> list[tuple[int, float, float | None]]:
    """(K, share of groups with signal, completions for each such group or None if there is none), for the K that the probe has
    enough completions for. Without bias: the signal of K of the n that were drawn."""
    rows: list[tuple[int, float, float | None]] = []
    for k in KS:
        usable = [d for d in drawn if d.n >= k]
        if not usable:
            break
        signal = mean(signal_at_k(d.n, d.right, k) for d in usable)
        rows.append((k, signal, k / signal if signal > 0 else None))
    return rows


def suggest(drawn: Sequence[Drawn]) -> list[tuple[str, str, str]]:
    """(setting, value, reason) for strategy "ngu"; what should be mended first comes first."""
    n_drawn = sum(d.n + d.unverified for d in drawn)
    truncated = sum(d.truncated for d in drawn) / n_drawn
    unsolved = mean(d.right == 0 for d in drawn)
    solved = mean(d.right == d.n for d in drawn)
    out = []
    if truncated >= 0.25:
        out.append(
            (
                "sampling.max_new_tokens",
                "more",
                f"{truncated:.0%} of completions are cut, and count as wrong whatever they would say",
            )
        )
    costs = {k: cost for k, _, cost in cost_table(drawn) if k >= 4}
    if not any(costs.values()):
        what = "always solved" if solved >= 0.5 else "never solved"
        out.append(
            (
                "task",
                "other prompts",
                f"no prompt was solved now and then, most were {what}: nothing can be learned from them",
            )
        )
        return out
    k = min((k for k in costs if costs[k] is not None), key=lambda k: costs[k] or 0.0)
    others = ", ".join(
        f"{cost:,.1f} at K = {other}" for other, cost in costs.items() if other != k and cost is not None
    )
    out.append(("strategy.k", str(k), f"{costs[k]:,.1f} completions for each group with signal ({others})"))
    p = next(p for share, p in P_BY_UNSOLVED if unsolved >= share)
    out.append(
        (
            "strategy.p",
            str(p),
            f"{unsolved:.0%} of prompts were never solved: each costs {k / (1 - p):.0f} completions a visit if it cannot be",
        )
    )
    lengths = [d.tokens for d in drawn]
    uneven = max(lengths) / max(mean(lengths), 1.0)
    window = 8 if uneven >= 4 else 4
    why = (
        f"the longest prompts take {uneven:.1f} times the mean length, and would be stale when they come back"
        if window == 8
        else f"as published; lengths are even enough (the longest prompts take {uneven:.1f} times the mean)"
    )
    out.append(("strategy.window", str(window), why))
    return out
