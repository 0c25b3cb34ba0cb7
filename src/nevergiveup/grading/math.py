r"""Verdicts about mathematical answers. What can be decided at once is decided here, exactly; the rest becomes a Check.

Layer 3, standard library only.

    grade_math(gold, response)    Score, or a Check for a process that can be killed (`symbolic.verdict`)
    quick_verdict(gold, answer)   the same for an answer that has been extracted; None when it needs the Check
    check_gold(gold, checker)     whether anything could be compared with this gold answer

Refused, which scores 0 with a reason that starts with "refused": what `formulas` refuses (too long, too deep, huge powers,
factorials and binomials, sums and integrals, approximations, dots, words that are no units, two numbers side by side);
divisions by zero; and all that is no numeral, where a numeral is asked for. So no tower and no huge factorial reaches a
worker: `\boxed{9^{9^{9^{9}}}}` is refused at once, not timed out. Whatever else takes a worker too long or too much
memory is Unverified, which is no verdict at all. A gold answer that is refused itself is still right for an answer
that is spelled the same.

A gold of words equals the same words, ignoring case, articles and fonts; a gold of one letter A to Z is also right when the
option's value stands behind it: `\textbf{(C)}\ 12`. Units and currency are left out, unless both sides have a common unit
and these differ.
"""

from __future__ import annotations

import re

from nevergiveup.grading import symbolic
from nevergiveup.grading.answers import final_answer
from nevergiveup.grading.equality import fingerprint_values, is_undefined, same
from nevergiveup.grading.formulas import REFUSED, Reading, Tree, is_expression, read
from nevergiveup.grading.numbers import Number, number, same_number
from nevergiveup.protocols import Checker
from nevergiveup.types import NO_ANSWER, Check, Grade, Score

EQUAL, DIFFERENT = symbolic.EQUAL, symbolic.DIFFERENT

_DIGITS = re.compile(r"-?[0-9]+")
_PLAIN = re.compile(r"[-+]?\s*(?:\\?\$)?(?:[0-9.,\s~]|\\[ ,!])+(?:\\?%)?\.?")
_UNIT_LETTER = re.compile(r"(.*[0-9])(?:[\s~]|\\[ ,])+[mgshLl]", re.DOTALL)


def grade_math(gold: str, response: str, *, numeral: bool = False) -> Score | Check:
    r"""numeral: the answer must be a number that is written out (12, 0.5, 3/4), not work that is left to do (2^{10})."""
    answer = final_answer(response)
    if answer is None:
        return Score(0, NO_ANSWER)
    verdict = numeral_verdict(gold, answer) if numeral else quick_verdict(gold, answer)
    if verdict is not None:
        return verdict
    return Check(symbolic.verdict, (gold, answer), key=(gold, answer))


def numeral_verdict(gold: str, answer: str) -> Score:
    """Raises ValueError when the gold answer is no numeral."""
    wanted = number(gold)
    if wanted is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    value = number(answer)
    if value is None:
        return Score(0, REFUSED + "not a numeral", answer)
    return _score(same_number(wanted, value), answer)


def is_numeral(gold: str) -> bool:
    """Whether the gold answer is a whole number."""
    value = number(gold)
    return value is not None and isinstance(value.value, int)


def quick_verdict(gold: str, answer: str) -> Score | None:
    """Exact, and never slow. None: only `symbolic.verdict` can tell."""
    if _DIGITS.fullmatch(gold) and _DIGITS.fullmatch(answer) and len(gold) < 300 and len(answer) < 300:
        return _score(int(gold) == int(answer), answer)
    wanted, given = read(gold), read(answer)
    if given.key == wanted.key and given.key:
        return _score(True, answer)
    if (choice := _choice(gold)) is not None and (letter := _chosen(answer)) is not None:
        return _score(choice == letter, answer)
    if wanted.tree is None and wanted.words:
        return _score(_same_words(wanted, given), answer)
    if given.tree is None and given.refusal:
        numerals = _numerals(gold, answer)
        if numerals is not None:
            return _score(same_number(*numerals), answer)
        return Score(0, given.refusal, answer)
    if wanted.tree is None or given.tree is None:
        return None
    if wanted.tree[0] == "num" and (shorter := _UNIT_LETTER.fullmatch(answer)):  # 5 m, where no variable is asked for
        return quick_verdict(gold, shorter[1])
    if _has_other_units(wanted, given):
        return _score(False, answer)
    if _has_undefined(given.tree):
        return Score(0, REFUSED + "not defined", answer)
    verdict = same(_without_base(wanted.tree, given.tree), given.tree, fingerprint_values)
    return None if verdict is None else _score(verdict, answer)


async def check_gold(gold: str, checker: Checker, *, numeral: bool = False) -> Grade:
    """1 if the gold answer can be read, so that answers in other forms can be compared with it; else 0 and why not."""
    if numeral:
        return _score(True, gold) if number(gold) is not None else Score(0, "the gold answer is not a number", gold)
    reading = read(gold)
    if reading.tree is not None or reading.words:
        if reading.tree is not None and _has_undefined(reading.tree):
            return Score(0, "the gold answer is not defined", gold)
        return _score(True, gold)
    if not gold.strip():
        return Score(0, "the gold answer is empty", gold)
    if reading.refusal:
        return Score(0, f"the gold answer is {reading.refusal}", gold)
    return await checker.check(Check(symbolic.gold_problem, (gold,), key=gold))


def _score(is_right: bool, answer: str) -> Score:
    return Score(int(is_right), EQUAL if is_right else DIFFERENT, answer)


def _numerals(gold: str, answer: str) -> tuple[Number, Number] | None:
    """Both as numbers that are written in digits alone: 12 500."""
    if not (_PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer)):
        return None
    wanted, given = number(gold), number(answer)
    return None if wanted is None or given is None else (wanted, given)


_FONT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|textit|mbox|boxed|fbox|bf|rm)\s*(?![A-Za-z])")
_CHOICE = re.compile(r"\(?([A-Z])\)?\.?")
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\((?P<a>[A-Za-z])\)|(?P<b>[A-Za-z])(?P<mark>[.):]|$))(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"\([A-Za-z]\)|\b(?:or|and|not|if|maybe)\b|(?<![A-Za-z\\])[A-Z](?![A-Za-z])", re.IGNORECASE)


def _choice(gold: str) -> str | None:
    match = _CHOICE.fullmatch(_without_fonts(gold))
    return match[1] if match else None


def _chosen(answer: str) -> str | None:
    """C, (C), C., (C) 12: the letter; None if it is anything else."""
    match = _CHOSEN.fullmatch(_without_fonts(answer)[:300])
    if match is None or _OTHER_CHOICE.search(match["rest"]):
        return None
    rest = match["rest"].strip(" .:")
    if rest.startswith(("+", "*", "/", "^", "=", "!")):
        return None
    if match["mark"] == "" and rest:
        return None
    if rest and (read(rest).tree is None and not read(rest).words):
        return None
    letter = match["a"] or match["b"]
    return letter if letter.isupper() else letter.upper() if letter in "abcde" else letter


def _without_fonts(text: str) -> str:
    text = _FONT.sub("", text).replace("{", "").replace("}", "").replace("$", "")
    return re.sub(r"\\[ ,;:!]|\\q?quad|~", " ", text).strip()


def _same_words(gold: Reading, answer: Reading) -> bool:
    words = answer.words or answer.key.casefold()
    return bool(words) and gold.words == words.strip(".!")


def _has_other_units(gold: Reading, answer: Reading) -> bool:
    for one, other in ((gold, answer), (answer, gold)):
        if one.tree is not None and one.tree[0] == "percent" and any(other.units):
            return True
    if len(gold.units) != len(answer.units):
        return False
    return any(a and b and a != b for a, b in zip(gold.units, answer.units, strict=True))


def _has_undefined(tree: Tree) -> bool:
    if is_expression(tree):
        return not _has_signs_inside(tree) and is_undefined(tree)
    return any(_has_undefined(part) for part in _parts(tree))


def _parts(tree: Tree) -> list[Tree]:
    found: list[Tree] = []
    for part in tree[1:]:
        if isinstance(part, tuple):
            if part and isinstance(part[0], str):
                found.append(part)
            else:
                found.extend(inner for inner in part if isinstance(inner, tuple) and inner)
    return found


def _has_signs_inside(tree: object) -> bool:
    return isinstance(tree, tuple) and ((bool(tree) and tree[0] in ("pm", "mp")) or any(map(_has_signs_inside, tree)))


def _without_base(gold: Tree, answer: Tree) -> Tree:
    """1101_2 asks for digits to base 2: they may be given without the base."""
    if gold[0] == "base" and answer[0] == "num" and answer[1].denominator == 1:
        return ("num", answer[1]) if str(answer[1]) == gold[1] else gold
    return gold
