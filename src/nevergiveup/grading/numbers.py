r"""Which number is written in a text, and whether two numbers are the same, exactly.

Layer 3, standard library only. Pure functions:

    number(text)         the one number that a text writes down; None when it is anything else
    same_number(a, b)    exact equality, percent signs understood

Nothing is evaluated: sums, powers and factorials are not numerals, so `\boxed{9^{9^{9}}}` costs what any text costs.
Whatever names several candidates is no number. Time is linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple


class Number(NamedTuple):
    """A number as it was written: `35%` is value 35 with percent True."""

    value: int | Fraction
    percent: bool = False


def same_number(a: Number, b: Number) -> bool:
    """Exact and symmetric. 35% equals 0.35, which it is, and 35, as people leave the sign out; 0.35 does not equal 35."""
    if a.value == b.value:
        return True
    if a.percent == b.percent:
        return False
    whole, part = (a, b) if a.percent else (b, a)
    return whole.value == 100 * part.value


# ---- which number is it? ------------------------------------------------------------------------------------------

_LONGEST_ANSWER = 300
_PLAIN = re.compile(r"[+-]?[0-9]+")
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:!> ]|~")
_SIGNED = re.compile(r"\(\s*([+-]?\s*[0-9.]+)\s*\)")
_NAME = re.compile(r"(?P<words>[A-Za-z][A-Za-z ]*)?=")  # x = 5
_TERM = r"(?:[0-9.,()\s$]|\\[$,])+"
_WORK = re.compile(rf"{_TERM}(?:(?:[-+*/×÷]|\\(?:times|cdot|div)){_TERM})+=")  # 16 - 3 = 13
_NUMERAL = re.compile(
    r"""\s*(?P<sign>[+-]?)\s*(?:\\?\$|[€£¥])?\s*(?P<late_sign>[+-]?)\s*
    (?:
        (?P<mixed>[0-9]+\s*)?
        \\[dtc]?frac\s*(?:\{\s*(?P<top>[+-]?\s*[0-9]+)\s*\}|(?P<top1>[0-9]))
                   \s*(?:\{\s*(?P<bottom>[+-]?\s*[0-9]+)\s*\}|(?P<bottom1>[0-9]))
      | (?:(?P<mixed2>[0-9]+)\s+)?(?P<top2>[0-9]+)\s*/\s*(?P<bottom2>[0-9]+)
      | (?P<decimal>
            (?: [1-9][0-9]{0,2}(?P<comma>\{,\}|\\!,|,|\\[, ]|[ ~])[0-9]{3}(?:(?P=comma)[0-9]{3})*(?![0-9]) | [0-9]+ )
            (?:\.[0-9]+)?
          | \.[0-9]+ )
    )""",
    re.VERBOSE,
)
_PERCENT = re.compile(r"\s*(?:\\?%|per\s?cent\b)")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:[23]|\{[23]\})")
_UNIT_SPLIT = re.compile(r"[\s/.]+|(?<=[A-Za-z])-(?=[A-Za-z])")
_MOST_UNIT_WORDS = 6
_UNIT_LETTERS = frozenset("mgshlLCF")
# Words that make something else of the number before them: another candidate, a doubt, a bound, a scale, an operation.
_NO_UNIT = frozenset(
    """and or nor but if unless otherwise else either neither not no except wrong incorrect maybe perhaps possibly
    probably about approximately approx around roughly almost nearly circa to through till until than between at least
    most more less fewer below under over above negative minus plus times divided multiplied by squared cubed factorial
    hundred thousand million billion trillion half halves third thirds point equals is was does because since so
    zero one two three four five six seven eight nine ten eleven twelve""".split()
)


def number(text: str) -> Number | None:
    r"""The one number written in `text`: digits with sign, decimals, thousands separators (`12,500`, `12{,}500`,
    `12\,500`, `12 500`), a fraction, a mixed number; currency, percent sign and units beside it are allowed.

    None for everything else: expressions, lists, ranges, words, a division left undone (`36/2`). Value is exact.
    """
    text = text.strip()
    if len(text) > _LONGEST_ANSWER:
        return None
    if _PLAIN.fullmatch(text):
        return Number(int(text))
    if not text.isascii():
        if any(map(hides_digits, text)):
            return None
        text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    text = _unwrap(text)
    if name := _NAME.match(text):
        if not _NO_UNIT.isdisjoint((name["words"] or "").lower().split()):
            return None
        text = text[name.end() :]
    while work := _WORK.match(text):
        text = text[work.end() :]
    match = _NUMERAL.match(text)
    if match is None:
        return None
    value = _value(match)
    if value is None:
        return None
    tail = text[match.end() :]
    percent = _PERCENT.match(tail)
    if sign := percent or _DEGREE.match(tail):
        tail = tail[sign.end() :]
    return Number(value, percent is not None) if is_unit(_SPACE.sub(" ", tail)) else None


def hides_digits(char: str) -> bool:
    """Characters that would turn into digits at another place: 4² is not 42, 3½ is not 31/2. Full-width 42 is 42."""
    if char.isascii() or unicodedata.decomposition(char).startswith(("<wide>", "<font>")):
        return False
    return any(part.isdecimal() for part in unicodedata.normalize("NFKC", char))


def _unwrap(text: str) -> str:
    """Without font commands, math delimiters, outer braces, the brackets of "(-5)" and a final full stop."""
    before = ""
    while text != before:
        before = text
        text = _WRAPPER.sub(r" \1 ", text).strip()
        if len(text) > 1 and text[0] == text[-1] == "$":
            text = text[1:-1]
        elif text.startswith((r"\(", r"\[")) and text.endswith((r"\)", r"\]")):
            text = text[2:-2]
        elif text.startswith("{") and text.endswith("}") and "}" not in text[: text.rfind("{")]:
            text = text[1:-1]
        elif text.endswith("."):
            text = text[:-1]
        elif signed := _SIGNED.fullmatch(text):
            text = signed[1]
    return text


def _value(match: re.Match[str]) -> int | Fraction | None:
    sign, late_sign = match["sign"], match["late_sign"]
    if sign and late_sign:
        return None
    if decimal := match["decimal"]:
        digits = decimal.replace(match["comma"], "") if match["comma"] else decimal
        value = Fraction(digits) if "." in digits else Fraction(int(digits))
    else:
        top = int((match["top"] or match["top1"] or match["top2"]).replace(" ", ""))
        bottom = int((match["bottom"] or match["bottom1"] or match["bottom2"]).replace(" ", ""))
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
        if value.denominator == 1 and abs(bottom) != 1:
            return None  # a division left undone
        if mixed := match["mixed"] or match["mixed2"]:
            if not 0 < value < 1:
                return None
            value += int(mixed)
    if "-" in (sign, late_sign):
        value = -value
    return value.numerator if value.denominator == 1 else value


def is_unit(text: str) -> bool:
    """Whether the words can be dropped: few, no digits, and none that changes what the number says."""
    text = _UNIT_POWER.sub(" ", text).strip().removeprefix(r"\$").removeprefix("$").strip(" .")
    if not text:
        return True
    words = _UNIT_SPLIT.split(text.removeprefix("/").lstrip())
    return len(words) <= _MOST_UNIT_WORDS and all(
        word.isascii() and word.isalpha() and (len(word) > 1 or word in _UNIT_LETTERS) and word.lower() not in _NO_UNIT
        for word in words
    )
