r"""Verdicts that need real algebra: roots, logarithms, trigonometry, and whatever only math-verify can read.

Layer 3. Meant for a process that can be killed: everything here is bounded in practice, nothing is bounded by proof.
mpmath, sympy and math-verify are imported when first used.

Answers that `formulas` understands are evaluated at several points with hundreds of digits, and enough of them that terms
of any size count; they are the same if nothing is left of the difference. What it does not understand goes to math-verify
as `\boxed{gold}` and `\boxed{answer}`; its yes is then checked again, exactly for rational numbers and in the same way
for all others, for it compares decimals after rounding and drops what it takes for units.
"""

from __future__ import annotations

import hashlib
import logging
from fractions import Fraction
from typing import Any

from nevergiveup.grading.equality import Undefined, fingerprint_values, same, symbols
from nevergiveup.grading.formulas import Tree, constant, read
from nevergiveup.types import Score, Unverified

EQUAL, DIFFERENT = "equal", "different"

_DIGITS = 60
_MOST_DIGITS = 4_000
_GUARD = 40
_N_POINTS = 4


def verdict(gold: str, answer: str) -> Score | Unverified:
    """Whether the answer equals the gold answer. For pairs on which `math.quick_verdict` says nothing."""
    gold_tree, answer_tree = read(gold).tree, read(answer).tree
    if gold_tree is not None and answer_tree is not None:
        is_same = same(gold_tree, answer_tree, same_values)
    else:
        is_same = _by_math_verify(gold, answer)
    if is_same is None:
        return Unverified("not decided")
    return Score(int(is_same), EQUAL if is_same else DIFFERENT, answer)


def gold_problem(gold: str) -> Score:
    """1 if math-verify reads the gold answer as all of what it says; else 0 and the reason."""
    import sympy

    value = _parsed(gold)
    if value is None:
        return Score(0, "the gold answer cannot be read")
    read_symbols = {str(symbol) for symbol in value.free_symbols} if isinstance(value, sympy.Basic) else set()
    for sign, found in ((r"\pi", "pi" in str(value)), (r"\sqrt", "sqrt" in str(value) or "**" in str(value))):
        if sign in gold and not found:
            return Score(0, f"the gold answer is read without its {sign}")
    letters = {token for token in "abcdfghjklmnopqrstuvwxyz" if f" {token} " in f" {gold} "}
    if letters - read_symbols:
        return Score(0, "the gold answer is read without some of its variables")
    if any(sign in gold for sign in "=<>") and not isinstance(value, sympy.core.relational.Relational):
        return Score(0, "the gold answer is read without its relation")
    return Score(1, EQUAL)


# ---- values to many digits ----------------------------------------------------------------------------------------


def same_values(a: Tree, b: Tree) -> bool | None:
    """Whether two expressions are the same: at positive points, and at points of either sign where both are real."""
    quick = fingerprint_values(a, b)
    if quick is not None:
        return quick
    variables = sorted(symbols(a) | symbols(b))
    n_compared = 0
    for point in range(_N_POINTS if variables else 1):
        compared = _agree(a, b, _point(variables, point, signed=False), signed=False)
        if compared is False:
            return False
        n_compared += compared is not None
    if not n_compared:
        return None
    if variables:
        for point in range(2 * _N_POINTS):
            if _agree(a, b, _point(variables, point, signed=True), signed=True) is False:
                return False
    return True


def _point(variables: list[str], point: int, *, signed: bool) -> dict[str, Fraction]:
    values = {}
    for i, name in enumerate(variables):
        digest = hashlib.sha256(f"{name} {point}".encode()).digest()
        value = Fraction(int.from_bytes(digest[:6], "big") * 3 + 2**46, 2**48)
        negative = signed and ((point + 1) >> (i % 3)) & 1
        values[name] = -value if negative else value
    return values


def _agree(a: Tree, b: Tree, values: dict[str, Fraction], *, signed: bool) -> bool | None:
    """None where one of them has no value (or, signed, no real one)."""
    import mpmath

    digits = _DIGITS
    try:
        rough = _Number(values, digits)
        rough.of(a), rough.of(b)
        span = rough.span()
        digits = 2 * span + 4 * _DIGITS
        if digits > _MOST_DIGITS:
            return None
        fine = _Number(values, digits)
        x, y = fine.of(a), fine.of(b)
        context = fine.context
        if signed and (_is_complex(x, context) or _is_complex(y, context)):
            return None
        difference = abs(x - y)
        if not context.isfinite(difference):
            return None
        return bool(difference < context.mpf(10) ** (rough.smallest() - 2 * _GUARD))
    except (ArithmeticError, ValueError, Undefined, mpmath.libmp.NoConvergence, NotImplementedError):
        return None


def _is_complex(value: Any, context: Any) -> bool:
    return bool(abs(context.im(value)) > abs(value) * context.mpf(10) ** -_GUARD)


class _Number:
    """Evaluates trees to `digits` digits, and keeps the exponents of the smallest and largest value on the way."""

    def __init__(self, values: dict[str, Fraction], digits: int) -> None:
        import mpmath

        self.context = mpmath.mp.clone() if hasattr(mpmath.mp, "clone") else mpmath.MPContext()
        self.context.dps = digits
        self.values = values
        self.low, self.high = 0, 0

    def span(self) -> int:
        return self.high - self.low

    def smallest(self) -> int:
        return self.low

    def rational(self, value: Fraction) -> Any:
        return self.context.mpf(value.numerator) / value.denominator

    def of(self, tree: Tree) -> Any:
        value = self._of(tree)
        if not self.context.isfinite(value):
            raise Undefined
        size = abs(value)
        if size:
            exponent = int(self.context.floor(self.context.log10(size)))
            if abs(exponent) > 100_000:
                raise Undefined
            self.low, self.high = min(self.low, exponent), max(self.high, exponent)
        return value

    def _of(self, tree: Tree) -> Any:
        mp = self.context
        kind = tree[0]
        exact = constant(tree)
        if exact is not None:
            return self.rational(exact)
        if kind == "sym":
            return self.rational(self.values[tree[1]])
        if kind == "const":
            return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[tree[1]]
        if kind == "oo":
            raise Undefined
        if kind == "fn":
            return self.function(str(tree[1]), tree[2:])
        parts = [self.of(part) for part in tree[1:]]
        if kind == "add":
            return mp.fsum(parts)
        if kind == "mul":
            return mp.fprod(parts)
        if kind == "neg":
            return -parts[0]
        if kind == "percent":
            return parts[0] / 100
        if kind == "div":
            if not parts[1]:
                raise Undefined
            return parts[0] / parts[1]
        if kind == "pow":
            return self.power(*parts)
        if kind == "fact":
            return mp.factorial(self.moderate(parts[0]))
        if kind == "binom":
            return mp.binomial(self.moderate(parts[0]), self.moderate(parts[1]))
        raise Undefined

    def moderate(self, value: Any) -> Any:
        if abs(value) > 10_000:
            raise Undefined
        return value

    def power(self, base: Any, exponent: Any) -> Any:
        if base and abs(exponent) * abs(self.context.log(base)) > 200_000:
            raise Undefined
        if not base and self.context.re(exponent) <= 0:
            raise Undefined
        return self.context.power(base, exponent)

    def function(self, name: str, arguments: tuple[Tree, ...]) -> Any:
        mp = self.context
        values = [self.of(argument) for argument in arguments]
        if name == "root":
            index, inside = values
            if not index:
                raise Undefined
            if index != int(mp.re(index)) or int(mp.re(index)) % 2 == 0 or mp.im(inside) or inside >= 0:
                return self.power(inside, 1 / index)
            return -self.power(-inside, 1 / index)  # the real root
        if name == "log":
            base, inside = values
            if not inside or not base or base == 1:
                raise Undefined
            return mp.log(inside) / mp.log(base)
        if name in ("abs", "floor", "ceil"):
            return {"abs": abs, "floor": mp.floor, "ceil": mp.ceil}[name](values[0])
        if name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"):
            self.moderate(values[0])
            return getattr(mp, name)(values[0])
        if name in ("f", "g"):  # some function, the same for equal arguments
            rounded = [mp.nstr(value, _DIGITS // 2) for value in values]
            digest = hashlib.sha256(repr((name, rounded)).encode()).digest()
            return self.rational(Fraction(int.from_bytes(digest[:6], "big") + 1, 2**47))
        raise Undefined


# ---- math-verify --------------------------------------------------------------------------------------------------


def _parsed(text: str) -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    found = math_verify.parse(
        rf"\boxed{{{text}}}", [math_verify.LatexExtractionConfig()], parsing_timeout=None, raise_on_error=False
    )
    return found[0] if found and not isinstance(found[0], str) else None


def _by_math_verify(gold: str, answer: str) -> bool | None:
    import math_verify
    import sympy

    a, b = _parsed(gold), _parsed(answer)
    if a is None or b is None:
        return False if b is None else None
    if not math_verify.verify([a], [b], timeout_seconds=None, raise_on_error=False, allow_set_relation_comp=True):
        return False
    if gold_problem(gold).reward == 0 or gold_problem(answer).reward == 0:
        return False  # a yes about less than what was written
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(a == b)
    difference = sympy.nsimplify(a, rational=True) - sympy.nsimplify(b, rational=True)
    if difference.is_rational and not difference.free_symbols:
        return bool(difference == 0)
    return bool(difference.equals(0))
