r"""Reward shaping: what is added to a graded reward. Pure rules on the text and the length of a completion.

Layer 1. Standard library only.
"""

from __future__ import annotations

import re
from fractions import Fraction

from nevergiveup.types import Exact

_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_TAG = re.compile(r"<(/?)answer>")


def overlong_penalty(n_tokens: int, max_new_tokens: int, buffer: int) -> Exact:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), exact: 0 up to max_new_tokens - buffer tokens, then
    falling on a line to -1 at max_new_tokens and beyond."""
    excess = n_tokens - (max_new_tokens - buffer)
    if excess <= 0:
        return 0
    return -1 if excess >= buffer else Fraction(-excess, buffer)


def length_share(n_tokens: int, max_new_tokens: int) -> Exact:
    """How far a completion is into the second half of what it may have, exact: 0 up to max_new_tokens / 2 tokens, then rising
    on a line to 1 at max_new_tokens and beyond. To be taken off the reward: "correct - 0.2*length"."""
    excess = 2 * n_tokens - max_new_tokens
    if excess <= 0:
        return 0
    return 1 if excess >= max_new_tokens else Fraction(excess, max_new_tokens)


def format_reward(text: str) -> int:
    r"""1 if the answer is marked as such exactly once, in a closed and filled `\boxed{}` (or `\fbox{}`) or in
    `<answer></answer>`, and else 0.

    Where there is a block of thoughts, it must be closed, once, and the mark must come after it; what is marked inside does
    not count. A chat template may have opened the block (`<think>`) in the prompt: only its end is asked for.
    """
    thoughts, closing, reply = text.rpartition("</think>")
    if closing and ("</think>" in thoughts or thoughts.count("<think>") > 1 or thoughts.lstrip().find("<think>") > 0):
        return 0
    if "<think>" in reply:
        return 0
    answers = _boxes(reply) + _tagged(reply)
    return int(len(answers) == 1 and bool((answers[0] or "").strip()))


def _boxes(text: str) -> list[str | None]:
    """What is in each outermost box; None for one that is never closed."""
    found: list[str | None] = []
    position = 0
    while box := _BOX.search(text, position):
        depth, position = 1, box.end()
        while depth and (brace := _BRACE.search(text, position)):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            position = brace.end()
        if depth:
            return [*found, None]
        found.append(text[box.end() : position - 1])
    return found


def _tagged(text: str) -> list[str | None]:
    """What is in each <answer> tag; None for a tag without its partner."""
    tags = list(_TAG.finditer(text))
    found: list[str | None] = []
    for opening, closing in zip(tags[::2], tags[1::2], strict=False):
        found.append(text[opening.end() : closing.start()] if not opening[1] and closing[1] else None)
    return [*found, None] if len(tags) % 2 else found
