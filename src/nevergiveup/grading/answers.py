r"""Which text is the answer that a completion states?

Layer 3, standard library only, linear in the length of the text. Nothing is evaluated.

The answer is the last balanced `\boxed{...}` (or `\fbox{...}`, `\boxed 9`) after any thinking. Where there is no box at
all, it is what the last `####`, "answer is" or "answer:" states, if that is one number, one formula, one letter or one
word. A number that nothing marks, a box that is still open at the end and an unfinished `<think>` are no answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nevergiveup.grading.formulas import read
from nevergiveup.grading.numbers import number

_BOX_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox)\s*(?:\{|(?P<bare>[0-9]+))|\\.|[{}]", re.DOTALL)
_BOX_JOINT = re.compile(r"(?:\\[()]|[\s,;&$])*(?:(?:\\text\s*\{\s*)?(?:and|or)\b\s*\}?)?(?:\\[()]|[\s,;&$])*")
_LONGEST_JOINT = 40
_MARK = re.compile(r"(?<!#)####(?!#)|\banswer\b[*_\s]*(?:is\b|:)[*_\s]*:?", re.IGNORECASE)
_HEADING = re.compile(r"\s*(?:[A-Za-z]|[0-9]+[.)][ \t]+\S)")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_FORMULA_ALONE = re.compile(r"[\s*_]*(?:[.!\n]|$)|[ ]*\n")
_LONGEST_FORMULA = 1000
_LETTER = re.compile(r"\(?[A-Za-z]\)?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_NO_WORDS = frozenset("not unknown undefined it that this the none wrong correct unclear".split())
_RANGE = re.compile(r"[0-9.,\s]+-[0-9.,\s]+")
_BOMBS = ("a huge power", "a huge factorial", "a huge binomial")
_CLAUSE_END = re.compile(r"\n|[.!?](?=[\s*$)\]]|$)")


def final_answer(text: str) -> str | None:
    r"""The last balanced `\boxed{...}` (or `\fbox`) after any thinking; where there is no box at all, the number behind
    the last `####`, "answer is" or "answer:".

    Boxes joined by nothing but "and", "or" and commas are one list ("17, 18"). An empty box, a box that is still open
    at the end, an unfinished `<think>` and a statement of anything but one number are no answer: None.
    """
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    if "box" in text:
        boxes, open_from = _boxes(text)
        if boxes or open_from >= 0:
            if not boxes or open_from >= boxes[-1].end:
                return None  # cut in the middle of the answer
            return _joined(text, boxes).strip() or None
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() : mark.end() + _LONGEST_FORMULA]
        if mark.group() == "####" and _HEADING.match(rest) and not _is_stated(rest.partition("\n")[0].strip()):
            continue  # a Markdown heading
        return _stated(rest.lstrip(" \t\r\n*_:"))
    return None


def _stated(text: str) -> str | None:
    """The answer with which the text begins: a formula up to its end, or a clause."""
    formula = _FORMULA.match(text)
    if formula is not None and _FORMULA_ALONE.match(text, formula.end()):
        inside = next(group for group in formula.groups() if group is not None).strip()
        if inside and (number(inside) is not None or read(inside).tree is not None or _WORD.fullmatch(inside)):
            return inside
    clause = _CLAUSE_END.split(text, maxsplit=1)[0].strip(" \t\r*_")
    return clause if _is_stated(clause) else None


def _is_stated(clause: str) -> bool:
    """One number; one letter or word; or one formula without words that is no list of candidates."""
    if not clause:
        return False
    if number(clause) is not None:
        return True
    if _LETTER.fullmatch(clause):
        return True
    if _WORD.fullmatch(clause):
        return clause.casefold() not in _NO_WORDS
    if _RANGE.fullmatch(clause):
        return False
    reading = read(clause)
    if reading.tree is None:
        return reading.refusal.endswith(_BOMBS)
    return reading.tree[0] not in ("list", "or")


class _Box(NamedTuple):
    start: int
    end: int
    content: str


def _boxes(text: str) -> tuple[list[_Box], int]:
    """The outermost closed boxes in order, and where the last box that never closes begins (-1: none)."""
    boxes: list[_Box] = []
    braces: list[tuple[int, int]] = []  # of each open brace: start of its box, start of the content; (-1, -1): no box
    for token in _BOX_TOKEN.finditer(text):
        mark = token.group()
        if mark == "}":
            start, inside = braces.pop() if braces else (-1, -1)
            if start < 0:
                continue
            box = _Box(start, token.end(), text[inside : token.start()])
        elif token["bare"]:
            box = _Box(token.start(), token.end(), token["bare"])
        else:
            if mark == "{":
                braces.append((-1, -1))
            elif mark[-1] == "{" and len(mark) > 2:
                braces.append((token.start(), token.end()))
            continue
        while boxes and boxes[-1].start > box.start:  # they lie inside this one
            boxes.pop()
        boxes.append(box)
    return boxes, max((start for start, _ in braces), default=-1)


def _joined(text: str, boxes: list[_Box]) -> str:
    contents = {boxes[-1].content: None}  # an ordered set, the last first
    for left, right in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        gap = text[left.end : right.start]
        if len(gap) > _LONGEST_JOINT or not _BOX_JOINT.fullmatch(gap):
            break
        contents[left.content] = None
    return ", ".join(reversed(contents))
