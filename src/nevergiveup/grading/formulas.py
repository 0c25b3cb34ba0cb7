r"""Reads an answer written in LaTeX or plain text into a tree. Nothing is evaluated, dropped or guessed.

Layer 3, standard library only. `read(text)` gives a `Reading`; time is linear in the length, which is limited, and so is
the depth. A tree is made of tuples whose first member says what it is:

    ("num", Fraction)  ("sym", name)  ("const", "e" | "i" | "pi")  ("oo", +1 | -1)
    ("add", ...)  ("mul", ...)  ("div", a, b)  ("neg", a)  ("pow", a, b)  ("fact", a)  ("binom", n, k)
    ("fn", name, argument...)        sqrt is ("fn", "root", index, a), log is ("fn", "log", base, a)
    ("percent", a)  ("pm", a, b) and ("mp", a, b): both signs at once
    ("tuple", open, items, close): an ordered tuple or an interval      ("set", items)  ("list", items)  ("or", items)
    ("union", a, b)  ("inter", a, b)  ("minus", a, b)  ("rel", sides, operators)
    ("such", head, conditions): {head | conditions}
    ("matrix", rows)  ("ratio", items): 3:4 and clock times  ("base", digits, base): 1101_2  ("reals",)

What is refused (no tree, and a reason): more than 300 characters or 20 levels, towers and other huge powers, factorials
and binomials (see LARGEST_*), sums, products, integrals and limits, `\approx` and dots, two numbers side by side, words
that are no units, commands that nobody needs for an answer, and characters that look like digits of another place.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, isqrt
from typing import Any, NamedTuple, TypeAlias

from nevergiveup.grading.numbers import hides_digits, is_unit

Tree: TypeAlias = tuple[Any, ...]

LONGEST = 300
DEEPEST = 20
LARGEST_EXPONENT = 10_000
LARGEST_BITS = 100_000
LARGEST_FACTORIAL = 3_000

REFUSED = "refused: "


class Refused(ValueError):
    """The text breaks a rule; the message says which."""


class NotUnderstood(ValueError):
    """The text is no formula of this grammar, but breaks no rule either."""


@dataclass(frozen=True)
class Reading:
    """An answer as it was read.

    tree: None when it is refused (`refusal` says why), is words, or is not understood.
    key: equal keys are the same answer in other fonts and spacing. words: the text as words, "" for a formula.
    units: what was left out of it as units, in order.
    """

    tree: Tree | None
    key: str
    words: str = ""
    refusal: str = ""
    units: tuple[str, ...] = ()


def read(text: str) -> Reading:
    """Never raises."""
    text = text.strip()
    return _read(text) if len(text) <= LONGEST else Reading(None, text, refusal=REFUSED + "too long")


@lru_cache(maxsize=10_000)
def _read(text: str) -> Reading:
    try:
        tokens = _tokens(_ascii(text))
    except Refused as reason:
        return Reading(None, text, refusal=REFUSED + str(reason))
    except NotUnderstood:
        return Reading(None, text)
    key = _key(tokens)
    words = _words(tokens) if any(token.kind == "text" for token in tokens) else ""
    parser = _Parser(tokens)
    try:
        tree = parser.answer()
    except _Words:
        return Reading(None, key, words, REFUSED + "words in the answer")
    except Refused as reason:
        return Reading(None, key, words, REFUSED + str(reason))
    except NotUnderstood:
        return Reading(None, key, words)
    units = tuple(parser.units) or (("dollar",) if "\\$" in text else ())
    return Reading(tree, key, words, units=units)


class _Words(Refused):
    pass


# ---- tokens -------------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """kind: num, let (a variable or constant), name (AB), cmd, op, text (words), sep (and, or, a comma), or end.

    gap: there is a space before it. value: a Fraction for num, else text.
    """

    kind: str
    value: Any
    gap: bool
    raw: str = ""


_END = Token("end", "", False)
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
        "÷": r"\div ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "°": r"^\circ ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "±": r"\pm ", "∓": r"\mp ", "ℝ": r"\mathbb{R}", "…": r"\ldots ", "⟨": r"\langle ", "⟩": r"\rangle ",
        "€": "$", "£": "$", "¥": "$", "′": "'", "’": "'", "∣": "|", "，": ",", "；": ";", "：": ":", "。": ".",
        "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "∑": r"\sum ", "∫": r"\int ", "∏": r"\prod ", "\u200b": "", "\ufeff": "",
    }
)  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
        "omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(),
        strict=True,
    )
)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_FROM_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")


def _ascii(text: str) -> str:
    """Unicode signs as LaTeX commands, full-width forms as ASCII. Superscripts stay superscripts: 4² is no 42."""
    if text.isascii():
        return text
    text = re.sub(r"√\s*([0-9]+|[a-z]|)", lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt ", text)
    text = text.translate(_CHARACTERS)
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m[0].translate(_FROM_SUPERSCRIPT) + "}", text)
    text = _SUBSCRIPT.sub(lambda m: "_{" + m[0].translate(_FROM_SUPERSCRIPT) + "}", text)
    if any(map(hides_digits, text)):
        raise Refused("characters that look like digits")
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    return "".join(rf"\{_GREEK[char]} " if char in _GREEK else char for char in text)


_GROUPED = r"[0-9]{1,3}(?:(?:\{,\}|,?\\!|\\,|,(?=[0-9]{3}(?![0-9])))\s?[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
_TOKEN = re.compile(
    rf"""(?P<space>\s+|~|\\[,;:!>\s]|\\q?quad(?![A-Za-z])|\\(?:thin|en)space(?![A-Za-z]))
    | (?P<row>\\\\)
    | \\(?P<cmd>[A-Za-z]+)\*? | \\(?P<escaped>.)
    | (?P<rep>[0-9]*\.[0-9]*\\(?:overline|bar)\s*(?:\{{[0-9]+\}}|[0-9]))
    | (?P<grouped>{_GROUPED})
    | (?P<num>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+(?![0-9.]))?)
    | (?P<run>[^\W\d_]+)
    | (?P<op><=|>=|!=|\*\*|''|.)""",
    re.VERBOSE | re.DOTALL,
)
_IGNORED = frozenset(
    """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits
    scriptstyle nolimits rm bf it mathopen mathclose""".split()
)
_FONTS = frozenset(
    """text mbox hbox textrm textbf textit textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mathcal emph
    operatorname boxed fbox bm boldsymbol underline""".split()
)
_TEXT_FONTS = frozenset(("text", "mbox", "hbox", "textrm", "mathrm", "textnormal", "textbf", "textit"))
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "lbrace": "{", "rbrace": "}", "vert": "|",
    "lvert": "|", "rvert": "|", "ast": "cdot", "varnothing": "emptyset", "lbrack": "[", "rbrack": "]",
    "land": "and", "lor": "or", "vee": "or", "wedge": "and", "colon": ":", "isin": "in",
    "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "arctan": "atan", "arcsin": "asin", "arccos": "acos",
    "lg": "log10", "tg": "tan", "R": "reals", "infin": "infty",
}  # fmt: skip
_FUNCTIONS = frozenset(
    """sin cos tan cot sec csc asin acos atan sinh cosh tanh ln log log10 exp arcsin arccos arctan""".split()
)
_SYMBOLS = frozenset(_GREEK.values()) - {"pi"} | {"ell", "hbar"}
_RUN_WORDS = frozenset(
    """yes no all odd the not inf nan none true false and or day max min lim mod gcd lcm det per non any one two six ten
    east west north south up is to of by if an am pm red""".split()
)
UNITS = {
    name: names.split()[0]
    for names in """cm centimeter centimeters centimetre centimetres|mm millimeter millimeters millimetre millimetres
|m meter meters metre metres|km kilometer kilometers kilometre kilometres|in inch inches|ft foot feet|yd yard yards yds
|mi mile miles|kg kilogram kilograms|g gram grams|mg milligram milligrams|lb lbs pound pounds|oz ounce ounces
|s sec secs second seconds|min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months
|year years yr yrs|L l liter liters litre litres|ml mL milliliter milliliters|dollar dollars|cent cents|degree degrees
|radian radians rad|unit units|mph|kmh kph|percent|gallon gallons gal|euro euros|bit bits|byte bytes|am|pm""".replace(
        "\n", ""
    ).split("|")
    for name in names.split()
}
"""Common units, abbreviated and in full -> one name. Other words are taken as units too, unless they may mean more."""
_LETTER_PRODUCTS = (frozenset("abcd"), frozenset("wxyz"), frozenset("pqrs"), frozenset("klmn"))
_CONSTANTS = {"e": "e", "i": "i", "pi": "pi"}


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    _tokenise(text, tokens, 0)
    while tokens and tokens[-1].raw in (".", ",", ";"):
        tokens.pop()
    return tokens


def _tokenise(text: str, tokens: list[Token], depth: int) -> None:
    if depth > DEEPEST:
        raise Refused("too deep")
    # a comma between groups of three digits is no separator if no comma outside brackets is anything else
    plain_groups = _commas_are_separators(text)
    at, gap = 0, bool(depth)
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, raw = match.lastgroup or "", match[0]
        at = match.end()
        if kind == "space":
            gap = True
            continue
        if kind == "grouped":
            if not plain_groups and re.search(r"[0-9],[0-9]", raw):
                raw = re.match(r"[0-9]+", raw)[0]  # type: ignore[index]
                at = match.start() + len(raw)
            digits = re.sub(r"[^0-9.]", "", raw)
            tokens.append(Token("num", Fraction(digits), gap, digits))
        elif kind == "num":
            tokens.append(_numeral(raw, gap))
        elif kind == "rep":
            tokens.append(Token("num", _repeating(raw), gap, raw))
        elif kind == "row":
            tokens.append(Token("op", "\\\\", gap, raw))
        elif kind == "run":
            _run(raw, gap, tokens)
        elif kind == "escaped":
            if match["escaped"] in "()[]$":
                gap = True
                continue
            tokens.append(Token("op", "\\" + match["escaped"], gap, raw))
        elif kind == "cmd":
            name = match["cmd"]
            name = _RENAMED.get(name, name)
            if name in _FONTS:
                content, at = _argument(text, at)
                _font(name, content, gap, tokens, depth)
            elif name in ("mathbb", "Bbb"):
                content, at = _argument(text, at)
                tokens.append(
                    Token("cmd", "reals", gap, "R") if content.strip() == "R" else Token("text", content, gap, content)
                )
            elif name == "hspace" or name == "vspace":
                raise Refused("layout commands")
            elif name in _IGNORED:
                if name in ("left", "right") and text[at : at + 1] == ".":
                    at += 1
                gap = True
                continue
            elif name in ("begin", "end"):
                content, at = _argument(text, at)
                if content == "array" and name == "begin":
                    _, at = _argument(text, at)
                tokens.append(Token("cmd", f"{name} {content}", gap, f"{name} {content}"))
            elif name == "degree":
                tokens += (Token("op", "^", gap, "^"), Token("cmd", "circ", False, "circ"))
            elif name in ("and", "or"):
                tokens.append(Token("sep", name, gap, name))
            elif len(name) == 1 and name in "<>{}|[]:":
                tokens.append(Token("op", "\\" + name if name in "{}" else name, gap, name))
            elif name in ("overline", "bar", "vec", "hat", "tilde", "overrightarrow", "widehat", "dot"):
                content, at = _argument(text, at)
                if not content.strip().isalnum():
                    raise NotUnderstood
                tokens.append(Token("let", f"{name} {content.strip()}", gap, f"{name} {content.strip()}"))
            elif name in _SYMBOLS or name == "pi":
                tokens.append(Token("let", name, gap, name))
            else:
                tokens.append(Token("cmd", name, gap, name))
        elif raw == "$":
            gap = True
            continue
        elif raw in ",;":
            tokens.append(Token("sep", raw, gap, raw))
        else:
            value = {"**": "^", "<=": r"\le", ">=": r"\ge", "!=": r"\ne"}.get(raw, raw)
            tokens.append(
                Token("cmd", value[1:], gap, value[1:])
                if value[0] == "\\" and len(value) > 1
                else Token("op", value, gap, value)
            )
        gap = False


_GROUPS = re.compile(r"(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")


def _commas_are_separators(text: str) -> bool:
    if "," not in text:
        return True
    rest = _GROUPS.sub("0", text).replace("{,}", "").replace(",\\!", "")
    if "," in rest:
        return False
    for match in _GROUPS.finditer(text):
        before = text[: match.start()]
        if (
            before.count("(") > before.count(")")
            or before.count("[") > before.count("]")
            or before.count("{") > before.count("}")
        ):
            return False
    return True


def _numeral(raw: str, gap: bool) -> Token:
    mantissa, e, exponent = raw.replace("E", "e").partition("e")
    value = Fraction(mantissa)
    if e:
        if abs(int(exponent)) > LARGEST_EXPONENT:
            raise Refused("a huge power")
        value *= Fraction(10) ** int(exponent)
    return Token("num", value, gap, raw)


def _repeating(raw: str) -> Fraction:
    plain, _, period = raw.partition("\\")
    digits = re.search(r"[0-9]+", period)[0]  # type: ignore[index]
    whole, _, places = plain.partition(".")
    shift = 10 ** len(places)
    return Fraction(int((whole + places) or "0"), shift) + Fraction(int(digits), (10 ** len(digits) - 1) * shift)


def _argument(text: str, at: int) -> tuple[str, int]:
    """What a command takes: a group in braces, or the next character."""
    while at < len(text) and text[at].isspace():
        at += 1
    if at >= len(text):
        raise NotUnderstood
    if text[at] != "{":
        return text[at], at + 1
    level = 0
    for i in range(at, len(text)):
        if text[i] in "{}" and (i == 0 or text[i - 1] != "\\"):
            level += 1 if text[i] == "{" else -1
            if not level:
                return text[at + 1 : i], i + 1
    raise NotUnderstood


_WORD = re.compile(r"[^\W\d_]+")
_SIGNS = {"percent": ("op", "\\%"), "per cent": ("op", "\\%"), "infinity": ("cmd", "infty"), "oo": ("cmd", "infty")}
_CONNECTORS = {"and": "and", "or": "or", "and/or": "or", ", and": "and", ", or": "or", ",": ","}


def _font(name: str, content: str, gap: bool, tokens: list[Token], depth: int) -> None:
    stripped = content.replace("~", " ").strip()
    before = tokens[-1] if tokens else _END
    if not stripped:
        return
    if stripped.lower() in _SIGNS:
        tokens.append(_sign(stripped.lower(), gap))
        return
    if stripped.lower() in _CONNECTORS:
        tokens.append(Token("sep", _CONNECTORS[stripped.lower()], gap, stripped))
        return
    runs = _WORD.findall(stripped)
    is_operand = before.kind in ("num", "let", "name", "text") or before.value in (")", "}", "]", "/", "circ", "\\%")
    if name in _TEXT_FONTS and runs and (is_operand or content[0] in " ~") and is_unit(stripped):
        tokens.append(Token("text", stripped, True, stripped))
    elif any(len(run) > 1 for run in runs) and "\\" not in stripped and name not in ("boxed", "fbox"):
        if name == "operatorname" and _RENAMED.get(stripped, stripped) in _FUNCTIONS:
            tokens.append(Token("cmd", _RENAMED.get(stripped, stripped), gap, stripped))
        elif len(runs) == 1 and runs[0].isupper() and len(runs[0]) < 4 and runs[0] == stripped:
            tokens.append(Token("name", stripped, gap, stripped))
        elif (
            name in _TEXT_FONTS
            and re.search(r"\b(?:and|or)\b", stripped)
            and not re.search(r"[A-Za-z]{2,}", re.sub(r"\b(?:and|or)\b", "", stripped))
        ):
            _tokenise(stripped, tokens, depth + 1)  # {5 or 6}
        elif name in _TEXT_FONTS and ("=" in stripped or stripped[0].isdecimal()):
            _tokenise(stripped, tokens, depth + 1)
        else:
            tokens.append(Token("text", stripped, True, stripped))
    else:
        _tokenise(stripped, tokens, depth + 1)


def _sign(word: str, gap: bool) -> Token:
    kind, value = _SIGNS[word]
    return Token(kind, value, gap, value)


def _run(run: str, gap: bool, tokens: list[Token]) -> None:
    """A run of letters: a word, a unit, a function, a name in capitals, or variables side by side."""
    lower = run.lower()
    if lower in ("and", "or"):
        tokens.append(Token("sep", lower, gap, lower))
    elif lower in _SIGNS:
        tokens.append(_sign(lower, gap))
    elif _RENAMED.get(run, run) in _FUNCTIONS or run in ("sqrt", "infty", "pi", "theta", "cup"):
        value = _RENAMED.get(run, run)
        tokens.append(Token("let" if run in ("pi", "theta") else "cmd", value, gap, value))
    elif len(run) == 1:
        after_number = gap and bool(tokens) and tokens[-1].kind == "num"
        tokens.append(Token("let", run, after_number, run) if run.isascii() else Token("text", run, gap, run))
    elif run.isupper() and run.isascii() and len(run) < 6 and run not in ("AM", "PM"):
        tokens.append(Token("name", run, gap, run))
    elif (
        (not run.isascii() or lower in _RUN_WORDS or (run[0].isupper() and run[1:].islower()))
        or (run in UNITS and bool(tokens) and tokens[-1].kind in ("num", "text"))
        or (run in UNITS and bool(tokens) and tokens[-1].value in ("/", "}"))
        or (len(run) > 3 and not any(set(run) <= letters for letters in _LETTER_PRODUCTS))
        or (bool(tokens) and tokens[-1].kind == "text" and tokens[-1].raw.isalpha())
    ):
        tokens.append(Token("text", run, True, run))
    else:
        tokens.extend(Token("let", letter, gap and not i, letter) for i, letter in enumerate(run))


def _key(tokens: Sequence[Token]) -> str:
    parts: list[str] = []
    for before, token in zip((_END, *tokens), tokens, strict=False):
        if before.kind == token.kind == "num":
            parts.append(" ")
        if token.kind == "text":
            parts.append("<" + _spaceless(token.raw) + ">")
        elif token.kind == "cmd":
            parts.append("\\" + token.raw + " ")
        else:
            parts.append(token.raw if token.kind != "let" or len(token.raw) == 1 else "\\" + token.raw + " ")
    return "".join(parts)


_SPACES = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def _spaceless(text: str) -> str:
    return _SPACES.sub("", " ".join(text.replace("-", " ").casefold().split()))


def _words(tokens: Sequence[Token]) -> str:
    """The text as words: without fonts, spaces, articles, hyphens and final full stops; case does not count."""
    text = " ".join(token.raw if token.kind != "sep" or token.raw != "," else "," for token in tokens)
    text = re.sub(r"^(?:an?|the)\s+", "", text.strip(), flags=re.IGNORECASE)
    sign = "-" if text.startswith("-") else ""  # not the hyphen of well-known
    return sign + _spaceless(text).strip(".!")


# ---- grammar ------------------------------------------------------------------------------------------------------

_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in"}
_OPEN = {"(": ")", "[": "]", "langle": "rangle"}
_TABLES = frozenset(("pmatrix", "bmatrix", "matrix", "array", "smallmatrix"))
_REFUSED_COMMANDS = {
    **dict.fromkeys(
        ("sum", "prod", "int", "iint", "oint", "lim", "limsup", "sup", "inf"), "sums, products, integrals and limits"
    ),
    **dict.fromkeys(("approx", "sim", "simeq", "cong", "doteq"), "an approximation"),
    **dict.fromkeys(("ldots", "dots", "cdots", "vdots", "ddots"), "dots"),
    **dict.fromkeys(
        ("phantom", "hphantom", "vphantom", "rule", "kern", "color", "textcolor", "not"), "layout commands"
    ),
    **dict.fromkeys(("det",), "a determinant"),
}
_EXPRESSIONS = frozenset(
    ("num", "sym", "const", "oo", "add", "mul", "div", "neg", "pow", "fact", "binom", "fn", "percent", "pm", "mp")
)
_ONE = ("num", Fraction(1))


def is_expression(tree: Tree) -> bool:
    return tree[0] in _EXPRESSIONS


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = [*tokens, _END]
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.in_function = 0
        self.units: list[str] = []

    # ---- helpers
    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def has(self, *values: str) -> bool:
        token = self.tokens[self.at]
        return token.kind in ("op", "cmd") and token.value in values

    def skip(self, *values: str) -> bool:
        if self.has(*values):
            self.at += 1
            return True
        return False

    def need(self, *values: str) -> None:
        if not self.skip(*values):
            self.fail()

    def fail(self) -> None:
        """Says what is wrong with the token that nothing can be done with."""
        token = self.token
        if token.kind == "text" or any(t.kind == "text" for t in self.tokens):
            raise _Words("words in the answer")
        if token.kind == "num" and self.at and self.tokens[self.at - 1].kind == "num":
            raise Refused("two numbers side by side")
        if token.kind == "cmd" and token.value in _REFUSED_COMMANDS:
            raise Refused(_REFUSED_COMMANDS[token.value])
        if token.kind == "op" and token.value == "?":
            raise Refused("a question mark")
        raise NotUnderstood

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Refused("too deep")

    # ---- lists, relations, sets
    def answer(self) -> Tree:
        for token in self.tokens:
            if token.kind == "cmd" and token.value in _REFUSED_COMMANDS:
                raise Refused(_REFUSED_COMMANDS[token.value])
        if self.token.kind == "end":
            raise NotUnderstood
        tree = self.items()
        if self.token.kind != "end":
            self.fail()
        return tree

    def items(self) -> Tree:
        items = [self.item()]
        joints: set[str] = set()
        while self.token.kind == "sep":
            while self.token.kind == "sep":
                joints.add(self.take().value)
            if self.token.kind == "end":
                raise NotUnderstood
            items.append(self.item())
        if len(items) == 1:
            return items[0]
        return ("or" if joints <= {"or", ","} and "or" in joints else "list", tuple(items))

    def item(self) -> Tree:
        self.deeper()
        if self.token.kind in ("text", "name"):  # Area = 5
            end = self.at
            while self.tokens[end].kind in ("text", "name"):
                end += 1
            words = " ".join(token.raw for token in self.tokens[self.at : end])
            if self.tokens[end].value == "=" and (self.token.kind == "name" or is_unit(words)):
                self.at = end
                tree = self.relation(("sym", words))
                self.depth -= 1
                return tree
        tree = self.relation(self.ratio())
        self.depth -= 1
        return tree

    def relation(self, first: Tree) -> Tree:
        sides, operators = [first], []
        while self.token.kind in ("op", "cmd") and self.token.value in _RELATIONS:
            operators.append(_RELATIONS[self.take().value])
            sides.append(self.ratio())
        return ("rel", tuple(sides), tuple(operators)) if operators else first

    def ratio(self) -> Tree:
        items = [self.union()]
        while not self.bars and self.has(":"):
            self.take()
            items.append(self.union())
        return items[0] if len(items) == 1 else ("ratio", tuple(items))

    def union(self) -> Tree:
        left = self.sum()
        while self.has("cup", "cap", "setminus", "backslash"):
            kind = {"cup": "union", "cap": "inter"}.get(self.take().value, "minus")
            left = (kind, left, self.sum())
        return left

    # ---- arithmetic
    def sum(self) -> Tree:
        self.deeper()
        tree = self.signed()
        while self.has("+", "-", "pm", "mp"):
            sign = self.take().value
            self.one_sign()
            right = self.product()
            self.arithmetic(tree, right)
            if sign in ("pm", "mp"):
                tree = (sign, tree, right)
            else:
                right = right if sign == "+" else ("neg", right)
                tree = (*tree, right) if tree[0] == "add" else ("add", tree, right)
        self.unit()
        self.depth -= 1
        return tree

    def signed(self) -> Tree:
        if self.has("+", "-", "pm", "mp"):
            sign = self.take().value
            self.one_sign()
            tree = self.product()
            if sign == "+":
                return tree
            if sign in ("pm", "mp"):
                self.arithmetic(tree)
                return (sign, ("num", Fraction(0)), tree)
            if tree[0] == "oo":
                return ("oo", -tree[1])
            if tree[0] == "matrix":
                return ("matrix", tuple(tuple(("neg", cell) for cell in row) for row in tree[1]))
            self.arithmetic(tree)
            return ("neg", tree)
        return self.product()

    def one_sign(self) -> None:
        if self.has("+", "-", "pm", "mp"):
            raise Refused("two signs")

    def arithmetic(self, *trees: Tree) -> None:
        if not all(map(is_expression, trees)):
            raise NotUnderstood

    def product(self) -> Tree:
        tree = self.factor()
        while True:
            if self.has("*", "cdot", "times", "/", "div"):
                operator = self.take().value
                right = self.factor(signed=True)
            elif self.skip("\\%", "%"):
                self.arithmetic(tree)
                tree = ("percent", tree)
                continue
            elif self.starts_factor():
                operator = "*"
                if self.token.kind == "num":
                    before = self.tokens[self.at - 1]
                    if before.kind == "num":
                        mixed = self.slash_mixed(before)
                        if mixed is not None:
                            tree = mixed
                            continue
                        raise Refused("two numbers side by side")
                    if before.value not in (")", "!"):
                        raise NotUnderstood
                right = self.factor()
                if self.is_mixed(tree, right):
                    tree = ("add", tree, right)
                    continue
            else:
                return tree
            tree = self.multiplied(tree, right, operator)

    def multiplied(self, tree: Tree, right: Tree, operator: str) -> Tree:
        if right[0] == "matrix" and operator != "/" and is_expression(tree):
            return ("matrix", tuple(tuple(("mul", tree, cell) for cell in row) for row in right[1]))
        self.arithmetic(tree, right)
        if operator in ("/", "div"):
            return ("div", tree, right)
        return (*tree, right) if tree[0] == "mul" else ("mul", tree, right)

    def slash_mixed(self, before: Token) -> Tree | None:
        """3 1/2"""
        top, slash, bottom = (
            self.tokens[self.at : self.at + 3] if self.at + 3 <= len(self.tokens) else (_END, _END, _END)
        )
        if not (
            slash.value == "/"
            and bottom.kind == "num"
            and before.raw.isdigit()
            and top.raw.isdigit()
            and bottom.raw.isdigit()
        ):
            return None
        if not 0 < top.value < bottom.value:
            return None
        self.at += 3
        return ("num", before.value + top.value / bottom.value)

    def is_mixed(self, tree: Tree, right: Tree) -> bool:
        if not (tree[0] == "num" and right[0] == "div" and right[1][0] == right[2][0] == "num"):
            return False
        whole, top, bottom = tree[1], right[1][1], right[2][1]
        return bool(whole.denominator == top.denominator == bottom.denominator == 1 and 0 < top < bottom)

    def starts_factor(self) -> bool:
        token = self.token
        if token.kind in ("num", "let", "name"):
            return True
        if token.kind == "op":
            return token.value in ("(", "{", "[") or (token.value == "|" and not self.bars)
        return token.kind == "cmd" and (
            token.value in _FUNCTIONS
            or token.value in ("frac", "sqrt", "binom", "lfloor", "lceil", "infty", "begin pmatrix", "begin bmatrix")
        )

    def factor(self, signed: bool = False) -> Tree:
        if signed and self.has("-", "+"):
            sign = self.take().value
            tree = self.factor()
            self.arithmetic(tree)
            return ("neg", tree) if sign == "-" else tree
        tree = self.base()
        while True:
            if self.has("^"):
                self.take()
                tree = self.power(tree)
            elif self.has("!"):
                self.take()
                self.arithmetic(tree)
                tree = bounded(("fact", tree))
            elif self.has("''", "'"):
                mark = self.take().value
                if tree[0] == "num":
                    self.units.append("in" if mark == "''" else "ft")
                elif tree[0] == "sym":
                    tree = ("sym", tree[1] + mark)
                else:
                    raise NotUnderstood
            else:
                return tree

    def power(self, tree: Tree) -> Tree:
        start = self.at
        braces = self.skip("{")
        if self.has("circ"):
            self.take()
            if braces:
                self.need("}")
            self.units.append("degree")
            return ("mul", tree, ("const", "pi"), ("num", Fraction(1, 180))) if self.in_function else tree
        if self.token.kind == "text" and tree[0] == "num" and self.token.raw in ("th", "st", "nd", "rd"):
            self.take()
            if braces:
                self.need("}")
            return tree
        self.at = start
        if self.token.kind == "text":
            self.fail()
        if self.has("-", "+"):
            sign = self.take().value
            exponent = self.factor()
            exponent = ("neg", exponent) if sign == "-" else exponent
        elif self.token.kind == "num":
            exponent = self.factor()  # 9^9^9 and 2^10
        else:
            exponent = self.argument()
            if self.has("^"):
                self.take()
                exponent = self.power(exponent)
        self.arithmetic(tree, exponent)
        return bounded(("pow", tree, exponent))

    def argument(self) -> Tree:
        """What a command takes: a group, one digit, one letter, or another command with what it takes."""
        self.deeper()
        token = self.token
        if token.kind == "num" and token.raw.isdigit() and len(token.raw) > 1:
            self.tokens[self.at] = Token("num", Fraction(token.raw[1:]), False, token.raw[1:])
            self.depth -= 1
            return ("num", Fraction(token.raw[0]))
        tree = self.base()
        self.depth -= 1
        return tree

    def base(self) -> Tree:
        self.deeper()
        tree = self._base()
        self.depth -= 1
        return tree

    def _base(self) -> Tree:
        token = self.token
        if token.kind == "num":
            self.take()
            if self.has("_"):
                self.take()
                base = self.argument() if self.has("{") or self.token.kind != "num" else ("num", self.take().value)
                if base[0] != "num" or not token.raw.isdigit():
                    raise NotUnderstood
                return ("base", token.raw.lstrip("0") or "0", base[1])
            return ("num", token.value)
        if token.kind in ("let", "name"):
            self.take()
            name = token.value
            if self.skip("_"):
                name += "_" + self.subscript()
            elif name in _CONSTANTS:
                return ("const", name)
            if name in ("f", "g") and self.has("(") and not self.token.gap:
                self.take()
                arguments = self.sequence(")")
                return ("fn", name, *arguments)
            return ("sym", name)
        if (token.kind == "op" and token.value in _OPEN) or self.has("langle"):
            return self.brackets()
        if self.skip("{"):
            return self.group("}")
        if self.skip("\\{"):
            return self.set()
        if self.has("|") and not self.bars:
            self.take()
            self.bars += 1
            inside = self.sum()
            self.bars -= 1
            self.need("|")
            self.arithmetic(inside)
            return ("fn", "abs", inside)
        if token.kind == "cmd":
            self.take()
            return self.command(str(token.value))
        self.fail()
        raise NotUnderstood

    def subscript(self) -> str:
        if not self.skip("{"):
            return self.take().raw
        start, level = self.at, 1
        while level:
            token = self.take()
            if token.kind == "end":
                raise NotUnderstood
            level += {"{": 1, "}": -1}.get(token.value if token.kind == "op" else "", 0)
        return "".join(token.raw for token in self.tokens[start : self.at - 1])

    def sequence(self, close: str) -> tuple[Tree, ...]:
        bars, self.bars = self.bars, 0
        items = [self.item()]
        while self.token.kind == "sep" and self.token.value in ",;":
            self.take()
            items.append(self.item())
        self.bars = bars
        self.need(close)
        return tuple(items)

    def brackets(self) -> Tree:
        opening = self.take().value
        bars, self.bars = self.bars, 0
        items = [self.item()]
        while self.token.kind == "sep" and self.token.value in ",;":
            self.take()
            items.append(self.item())
        self.bars = bars
        opening = "(" if opening == "langle" else opening
        close = str(self.token.value)
        if close not in (")", "]", "rangle") or self.token.kind not in ("op", "cmd"):
            self.fail()
        self.take()
        close = ")" if close == "rangle" else close
        if len(items) == 1:
            if _OPEN[opening] != close:
                raise NotUnderstood
            if items[0][0] == "rel":
                raise NotUnderstood
            return items[0]
        return ("tuple", opening, tuple(items), close)

    def group(self, close: str) -> Tree:
        bars, self.bars = self.bars, 0
        if self.has(close):
            raise NotUnderstood
        tree = self.items()
        if self.has("over", "choose"):
            command = self.take().value
            bottom = self.items()
            self.arithmetic(tree, bottom)
            tree = ("div", tree, bottom) if command == "over" else bounded(("binom", tree, bottom))
        self.bars = bars
        self.need(close)
        return ("set", tree[1]) if tree[0] == "list" else tree

    def set(self) -> Tree:
        if self.skip("\\}"):
            return ("set", ())
        outer, self.bars = self.bars, 1  # here | and : end the head
        head = self.items()
        self.bars = 0
        if self.skip("mid", "|", ":"):
            conditions = self.items()
            self.bars = outer
            self.need("\\}")
            return ("such", head, conditions)
        self.bars = outer
        self.need("\\}")
        return ("set", head[1] if head[0] in ("list", "or") else (head,))

    def command(self, name: str) -> Tree:
        if name == "frac":
            top, bottom = self.argument(), self.argument()
            self.arithmetic(top, bottom)
            return ("div", top, bottom)
        if name == "binom":
            top, bottom = self.argument(), self.argument()
            self.arithmetic(top, bottom)
            return bounded(("binom", top, bottom))
        if name == "sqrt":
            index: Tree = ("num", Fraction(2))
            if self.skip("["):
                index = self.sum()
                self.need("]")
            # nobody who writes \sqrt13 means 3 times the root of 1
            inside = ("num", self.take().value) if self.token.kind == "num" else self.argument()
            self.arithmetic(index, inside)
            return bounded(("fn", "root", index, inside))
        if name in _FUNCTIONS:
            return self.function(_RENAMED.get(name, name))
        if name == "infty":
            return ("oo", 1)
        if name == "reals":
            return ("reals",)
        if name == "emptyset":
            return ("set", ())
        if name in ("lfloor", "lceil"):
            inside = self.sum()
            self.need("r" + name[1:])
            self.arithmetic(inside)
            return ("fn", name[1:], inside)
        if name.startswith("begin "):
            return self.table(name[6:])
        self.at -= 1
        self.fail()
        raise NotUnderstood

    def function(self, name: str) -> Tree:
        base: Tree | None = None
        exponent: Tree | None = None
        while self.has("_", "^"):
            if self.take().value == "_":
                base = self.argument() if self.has("{") or self.token.kind != "num" else ("num", self.take().value)
            elif self.has("{") or self.token.kind != "num":
                exponent = self.argument()
            else:
                exponent = ("num", self.take().value)
        self.in_function += 1
        if self.has("(", "{", "["):
            inside = self.base()
        else:
            inside = self.factor(signed=True)
            while self.token.kind in ("num", "let", "name") or self.has("frac", "sqrt", "{"):
                inside = self.multiplied(inside, self.factor(), "*")
        self.in_function -= 1
        self.arithmetic(inside)
        if name == "exp":
            tree = bounded(("pow", ("const", "e"), inside))
        elif name in ("ln", "log", "log10"):
            base = ("const", "e") if name == "ln" else base or ("num", Fraction(10))
            self.arithmetic(base)
            tree = ("fn", "log", base, inside)
        else:
            if base is not None:
                raise NotUnderstood
            if exponent == ("neg", _ONE):
                exponent, name = None, {"sin": "asin", "cos": "acos", "tan": "atan"}.get(name, "")
                if not name:
                    raise NotUnderstood
            tree = ("fn", name, inside)
        return tree if exponent is None else bounded(("pow", tree, exponent))

    def table(self, name: str) -> Tree:
        if name not in _TABLES:
            raise NotUnderstood
        rows: list[list[Tree]] = [[]]
        while True:
            cell = self.sum()
            self.arithmetic(cell)
            rows[-1].append(cell)
            if self.skip("&"):
                continue
            if self.skip("\\\\") and not self.has(f"end {name}"):
                rows.append([])
                continue
            self.need(f"end {name}")
            break
        if len({len(row) for row in rows}) != 1:
            raise NotUnderstood
        return ("matrix", tuple(map(tuple, rows)))

    # ---- units
    def unit(self) -> None:
        """Leaves out words behind a value, if they may be a unit."""
        if self.in_function or self.bars:
            return
        if self.token.kind != "text":
            return
        words: list[str] = []
        while True:
            if self.token.kind == "text":
                words.append(self.take().raw)
            elif self.has("^") and words:
                self.take()
                braces = self.skip("{")
                if self.token.raw not in ("2", "3"):
                    raise _Words("words in the answer")
                words.append("^" + self.take().raw)
                if braces:
                    self.need("}")
            elif self.has("/", ".", "-") and words and self.unit_goes_on(self.tokens[self.at + 1]):
                words.append(self.take().raw)
                if self.token.kind in ("let", "name"):
                    words.append(self.take().raw)
            else:
                break
        if not words or not is_unit(" ".join(word for word in words if word[0] != "^")):
            raise _Words("words in the answer")
        self.units.append(_unit_name(words))

    def unit_goes_on(self, token: Token) -> bool:
        """m/s, and not the pi of yd. pi"""
        return token.kind in ("text", "name", "end") or (token.kind == "let" and len(token.raw) == 1)


def _unit_name(words: Sequence[str]) -> str:
    """One name for a unit and its spellings, if it is a common one; else ""."""
    text = " ".join(words).replace("^ ", "^")
    power = "^2" if re.search(r"\^2|square|sq\b", text) else "^3" if re.search(r"\^3|cubic|cu\b", text) else ""
    parts = [part for part in re.split(r"[\s.]+|\^[23]|\b(?:square|sq|cubic|cu)\b", text) if part]
    if len(parts) != 1 or (parts[0] not in UNITS and parts[0].lower() not in UNITS):
        return ""
    return (UNITS.get(parts[0]) or UNITS[parts[0].lower()]) + power


# ---- bounds -------------------------------------------------------------------------------------------------------


def bounded(tree: Tree) -> Tree:
    """The tree, unless its value would be huge. Raises Refused."""
    kind = tree[0]
    if kind == "pow":
        exponent = constant(tree[2])
        if exponent is None:
            return tree
        base = constant(tree[1])
        if abs(exponent) > LARGEST_EXPONENT:
            raise Refused("a huge power")
        if base is not None and abs(exponent) * (_bits(base) + 1) > LARGEST_BITS:
            raise Refused("a huge power")
    elif kind == "fact":
        n = constant(tree[1])
        if n is not None and n > LARGEST_FACTORIAL:
            raise Refused("a huge factorial")
        if n is None and tree[1][0] == "fact":
            raise Refused("a factorial of a factorial")
    elif kind == "binom":
        n = constant(tree[1])
        if n is not None and n > LARGEST_FACTORIAL:
            raise Refused("a huge binomial")
    elif kind == "fn" and tree[1] == "root":
        index = constant(tree[2])
        if index is not None and not 1 <= abs(index) <= LARGEST_EXPONENT:
            raise Refused("a huge root")
    return tree


def _bits(value: Fraction) -> int:
    return max(abs(value.numerator), value.denominator).bit_length()


def constant(tree: Tree) -> Fraction | None:
    """The exact value of a tree without variables whose value is rational, as far as that is plain to see.

    Sizes are bounded: whatever grows beyond LARGEST_BITS counts as not plain (None).
    """
    kind = tree[0]
    if kind == "num":
        return tree[1]  # type: ignore[no-any-return]
    if kind in ("neg", "percent"):
        value = constant(tree[1])
        return None if value is None else -value if kind == "neg" else value / 100
    if kind in ("add", "mul"):
        values = [constant(part) for part in tree[1:]]
        result = Fraction(kind == "mul")
        for value in values:
            if value is None:
                return None
            result = result + value if kind == "add" else result * value
            if _bits(result) > LARGEST_BITS:
                return None
        return result
    if kind == "div":
        top, bottom = constant(tree[1]), constant(tree[2])
        return None if top is None or not bottom else top / bottom
    if kind == "pow":
        base, exponent = constant(tree[1]), constant(tree[2])
        if base is None or exponent is None:
            return None
        if exponent.denominator != 1:
            return _root(base, exponent.denominator, exponent.numerator)
        if (base == 0 and exponent <= 0) or abs(exponent) * (_bits(base) + 1) > LARGEST_BITS:
            return None
        return base**exponent.numerator
    if kind == "fact":
        n = constant(tree[1])
        return _factorial(n.numerator) if n is not None and n.denominator == 1 and 0 <= n <= LARGEST_FACTORIAL else None
    if kind == "binom":
        n, k = constant(tree[1]), constant(tree[2])
        if (
            n is None
            or k is None
            or n.denominator != 1
            or k.denominator != 1
            or k < 0
            or not 0 <= n <= LARGEST_FACTORIAL
        ):
            return None
        return _comb(n.numerator, k.numerator)
    if kind == "fn" and tree[1] == "root":
        index, inside = constant(tree[2]), constant(tree[3])
        if index is None or inside is None or index.denominator != 1 or index < 2:
            return None
        return _root(inside, index.numerator, 1)
    if kind == "fn" and tree[1] == "abs":
        value = constant(tree[2])
        return None if value is None else abs(value)
    return None


@lru_cache(maxsize=64)
def _factorial(n: int) -> Fraction:
    return Fraction(factorial(n))


@lru_cache(maxsize=64)
def _comb(n: int, k: int) -> Fraction:
    return Fraction(comb(n, k))


def _root(value: Fraction, index: int, exponent: int) -> Fraction | None:
    """value ** (exponent / index) if value is a perfect power."""
    if value < 0 or index > 64 or abs(exponent) * (_bits(value) + 1) > LARGEST_BITS or (value == 0 and exponent <= 0):
        return None
    top, bottom = _integer_root(value.numerator, index), _integer_root(value.denominator, index)
    return None if top is None or bottom is None else Fraction(top, bottom) ** exponent


def _integer_root(n: int, index: int) -> int | None:
    if n < 2:
        return n
    if index == 2:
        root = isqrt(n)
        return root if root * root == n else None
    low, high = 1, 1 << (n.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= n else (low, middle - 1)
    return low if low**index == n else None
