"""Whether two answers that were read are the same: structure here, values by a rule that is handed in.

Layer 3, standard library only. `same(gold, answer, values)` is True, False, or None (not decided); it is symmetric.

    lists and sets        unordered, the same number of members; one member is that member
    tuples, intervals     ordered, open is not closed; an inequality in one variable is the interval that it describes
    x = 5, x in S         the name is left out if the other side has none; two different names differ
    equations             the same up to a factor that is not 0; inequalities: up to a positive one
    a = b = c             all sides must be the same value
    35 %                  0.35, and also 35, as people leave the sign out; 0.35 is not 35

`fingerprint_values` decides most values without any algebra system: both trees are evaluated modulo a prime of 255 bits,
at points that hash functions choose (Schwartz, J. ACM 27 (1980) 701). Different fingerprints prove that rational functions
of independent quantities differ; equal ones prove equality but for a chance of about degree / 2^255. Roots, logarithms
and the like enter as opaque quantities named by the fingerprint of their argument, so for them only equality is proved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from nevergiveup.grading.formulas import Tree, constant, is_expression

Values: TypeAlias = Callable[[Tree, Tree], bool | None]
"""Whether two expressions have the same value; None: not decided."""

Factor: TypeAlias = Callable[[Tree, Tree], "int | None"]

_REALS: Tree = ("tuple", "(", (("oo", -1), ("oo", 1)), ")")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_ORDERS = frozenset(("<", ">", "<=", ">="))


# ---- values -------------------------------------------------------------------------------------------------------

PRIME = 2**255 - 19  # 5 modulo 8: 2 is no square, and its power below is a root of -1
_I = pow(2, (PRIME - 1) // 4, PRIME)


class Undefined(ArithmeticError):
    """A division by zero, or infinity inside an expression."""


@lru_cache(maxsize=4096)
def _quantity(*name: object) -> int:
    return int.from_bytes(hashlib.sha512(repr(name).encode()).digest(), "big") % PRIME


class _Print:
    """Evaluates a tree modulo PRIME. opaque: whether something entered under a name that may be related to others."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.opaque = False

    def of(self, tree: Tree) -> int:
        kind = tree[0]
        if kind == "num":
            return self.rational(tree[1])
        if kind == "sym":
            return _quantity("sym", tree[1], self.point)
        if kind == "const":
            return _I if tree[1] == "i" else _quantity("const", tree[1], self.point)
        if kind == "add":
            return sum(map(self.of, tree[1:])) % PRIME
        if kind == "mul":
            product = 1
            for part in tree[1:]:
                product = product * self.of(part) % PRIME
            return product
        if kind == "neg":
            return -self.of(tree[1]) % PRIME
        if kind == "percent":
            return self.of(("div", tree[1], ("num", Fraction(100))))
        if kind == "div":
            bottom = self.of(tree[2])
            if not bottom:
                raise Undefined
            return self.of(tree[1]) * pow(bottom, -1, PRIME) % PRIME
        if kind == "oo":
            raise Undefined
        value = constant(tree)
        if value is not None:
            return self.rational(value)
        if kind == "pow":
            return self.power(tree)
        if kind == "fact":
            return self.named("fact", tree[1])
        if kind == "binom":
            return self.named("binom", tree[1], tree[2])
        return self.named(*tree[1:])

    def rational(self, value: Fraction) -> int:
        bottom = value.denominator % PRIME
        if not bottom:
            raise Undefined
        return value.numerator * pow(bottom, -1, PRIME) % PRIME if bottom != 1 else value.numerator % PRIME

    def power(self, tree: Tree) -> int:
        exponent = constant(tree[2])
        base = tree[1]
        if exponent is not None and exponent.denominator == 1:
            value = self.of(base)
            if not value and exponent <= 0:
                raise Undefined
            return pow(value, exponent.numerator, PRIME)
        if exponent is not None and exponent.numerator != 0:  # x^(3/2) = root(x)^3
            root = self.named("root", ("num", Fraction(exponent.denominator)), base)
            if not root and exponent < 0:
                raise Undefined
            return pow(root, exponent.numerator, PRIME)
        if tree[2][0] == "add":  # 2^(n+1) = 2^n 2
            product = 1
            for part in tree[2][1:]:
                product = product * self.of(("pow", base, part)) % PRIME
            return product
        if tree[2][0] == "neg":
            value = self.of(("pow", base, tree[2][1]))
            if not value:
                raise Undefined
            return pow(value, -1, PRIME)
        return self.named("pow", base, tree[2])

    def named(self, name: str, *arguments: Tree) -> int:
        self.opaque = True
        if name == "root" and arguments[0] == ("num", Fraction(2)):
            return self.square_root(arguments[1])
        return _quantity(name, *map(self.of, arguments))

    def square_root(self, inside: Tree) -> int:
        """Root of a rational number as a rational number times roots of primes."""
        value = constant(inside)
        if value is None or value.numerator.bit_length() + value.denominator.bit_length() > 50:
            return _quantity("root", 2, self.of(inside))
        sign = _I if value < 0 else 1
        square, rest = _square_part(abs(value.numerator) * value.denominator)
        product = sign * square * pow(value.denominator, -1, PRIME)
        for prime in rest:
            product = product * _quantity("root of", prime) % PRIME
        return product % PRIME


@lru_cache(maxsize=1024)
def _square_part(n: int) -> tuple[int, tuple[int, ...]]:
    """n = square^2 times different factors without square parts (primes below 10,000, and what remains)."""
    square, rest, factor = 1, [], 2
    while factor * factor <= n and factor < 10_000:
        power = 0
        while n % factor == 0:
            n //= factor
            power += 1
        square *= factor ** (power // 2)
        if power % 2:
            rest.append(factor)
        factor += 1 if factor == 2 else 2
    if n > 1:
        rest.append(n)
    return square, tuple(rest)


def fingerprint_values(gold: Tree, answer: Tree) -> bool | None:
    """See the top of this file."""
    a, b = constant(gold), constant(answer)
    if a is not None and b is not None:
        return a == b
    prints = []
    opaque = False
    for tree in (gold, answer):
        printer = _Print(0)
        try:
            prints.append(printer.of(tree))
        except Undefined:
            return None
        opaque = opaque or printer.opaque
    if prints[0] == prints[1]:
        return True
    return None if opaque else False


def is_undefined(tree: Tree) -> bool:
    """Whether the expression divides by zero, or has infinity inside it, as far as that is plain to see."""
    if tree[0] == "oo":
        return False
    try:
        _Print(0).of(tree)
    except Undefined:
        return True
    return False


def symbols(tree: Tree) -> frozenset[str]:
    if tree[0] == "sym":
        return frozenset((tree[1],))
    found: set[str] = set()
    stack: list[object] = list(tree[1:])
    while stack:
        part = stack.pop()
        if isinstance(part, tuple):
            if len(part) == 2 and part[0] == "sym":
                found.add(part[1])
            else:
                stack.extend(part)
    return frozenset(found)


# ---- forms --------------------------------------------------------------------------------------------------------


def _with_signs(tree: Tree) -> tuple[Tree, ...]:
    """One tree a sign of plus-minus; just the tree where there is none."""
    if not _has_signs(tree):
        return (tree,)
    plus, minus = _choose(tree, True), _choose(tree, False)
    return (plus, minus)


def _has_signs(tree: object) -> bool:
    if not isinstance(tree, tuple):
        return False
    return (bool(tree) and tree[0] in ("pm", "mp")) or any(map(_has_signs, tree))


def _choose(tree: Tree, upper: bool) -> Tree:
    if tree and tree[0] in ("pm", "mp"):
        left, right = _choose(tree[1], upper), _choose(tree[2], upper)
        return ("add", left, right if (tree[0] == "pm") == upper else ("neg", right))
    return tuple(_choose(part, upper) if isinstance(part, tuple) else part for part in tree)


def _named(tree: Tree) -> tuple[str | None, Tree]:
    """The name before "=" or "in", and what it names. None: there is no name, or it is more than one."""
    if tree[0] != "rel":
        return None, tree
    sides, operators = tree[1], tree[2]
    if operators == ("in",) and sides[0][0] == "sym":
        return sides[0][1], sides[1]
    if operators != ("=",):
        return None, tree
    left, right = sides
    name = _name(left)
    if name is not None and not (right[0] == "sym" and left[0] != "fn"):
        if name == "" and symbols(right):
            return None, tree
        if left[0] == "sym" and left[1] in symbols(right):
            return None, tree
        return name or "?", right
    name = _name(right)
    if name and not symbols(left):
        return name, left
    return None, tree


def _name(tree: Tree) -> str | None:
    """x, f(x), (x, y), or something made of variables alone, such as m + n (""); None for all else."""
    if tree[0] == "sym":
        return str(tree[1])
    if tree[0] == "fn" and tree[1] in ("f", "g"):
        return str(tree[1])
    if tree[0] == "mul" and len(tree) == 3 and all(part[0] == "sym" for part in tree[1:]):
        return f"{tree[1][1]}{tree[2][1]}"
    if tree[0] == "tuple" and all(item[0] == "sym" for item in tree[2]):
        return ",".join(item[1] for item in tree[2])
    if is_expression(tree) and symbols(tree) and not _has_numbers(tree):
        return ""
    return None


def _has_numbers(tree: object) -> bool:
    return isinstance(tree, tuple) and ((bool(tree) and tree[0] == "num") or any(map(_has_numbers, tree)))


def _calculation(tree: Tree, values: Values) -> Tree | None:
    """3 + 4 = 7 is 7, x = 3 + 4 = 7 is x = 7; None if the sides are not the same, the tree itself if it is no such chain."""
    if tree[0] != "rel" or set(tree[2]) != {"="}:
        return tree
    sides = tree[1]
    first = int(_name(sides[0]) is not None)
    chain = sides[first:]
    if len(chain) < 2 or (not first and len(chain) == 2 and (symbols(chain[0]) or symbols(chain[1]))):
        return tree
    if not all(map(is_expression, chain)):
        return tree
    if all(values(left, right) for left, right in pairwise(chain)):
        return chain[-1] if first == 0 else ("rel", (sides[0], chain[-1]), ("=",))
    return None


class _Open(Exception):
    """Not decided."""


def settle(tree: Tree, values: Values) -> Tree | None:
    """The form in which trees are compared; None for what can be no answer (42 = 43)."""
    kind = tree[0]
    if kind in ("list", "set", "or"):
        items: list[Tree] = []
        name: Tree | None = None
        for item in tree[1]:
            if item[0] == "rel" and item[2] == ("=",) and item[1][0][0] == "sym":
                name = item[1][0]
            elif name is not None and is_expression(item) and kind != "set":  # n = 2, 5, 9
                item = ("rel", (name, item), ("=",))
            settled = settle(item, values)
            if settled is None:
                return None
            items.extend(settled[1] if settled[0] == "list" else (settled,))
        if len(items) == 1:
            return items[0]
        return ("or" if kind == "or" else "list", tuple(items))
    if kind == "such":
        head, condition = tree[1], tree[2]
        if head[0] == "rel" and head[2] == ("in",):
            head = head[1][0]
        if head[0] != "sym":
            return tree
        return settle(condition, values)
    if kind == "reals":
        return _REALS
    if kind == "rel":
        calculation = _calculation(tree, values)
        if calculation is None:
            return None
        if calculation[0] != "rel":
            return settle(calculation, values)
        sides, operators = calculation[1], calculation[2]
        if operators == ("in",) and sides[1][0] == "reals":
            return ("rel", (sides[0], _REALS), operators)
        if operators == ("in",) and sides[1][0] in ("set", "such"):
            inside = settle(sides[1], values)
            return None if inside is None else ("rel", (sides[0], inside), ("in",))
        if operators == ("=",):
            right = settle(sides[1], values) if sides[1][0] != "rel" else sides[1]
            if right is None:
                return None
            if right[0] == "list" and sides[0][0] == "sym":
                return ("list", tuple(("rel", (sides[0], item), ("=",)) for item in right[1]))
            return ("rel", (sides[0], right), ("=",))
        return calculation
    if kind in ("union", "inter"):
        left, right = settle(tree[1], values), settle(tree[2], values)
        if left is None or right is None:
            return None
        if kind == "inter":
            return ("inter", left, right)
        parts = [part for side in (left, right) for part in (side[1] if side[0] == "union" else (side,))]
        return ("union", tuple(parts))
    if kind == "minus":
        return _without_points(tree)
    signs = _with_signs(tree)
    if len(signs) == 1:
        return tree
    return ("list", signs)


def _without_points(tree: Tree) -> Tree:
    """(0,36) without {9} as (0,9) and (9,36); the tree itself if it is not an interval without rational points inside."""
    interval = _REALS if tree[1][0] == "reals" else tree[1]
    if interval[0] != "tuple" or len(interval[2]) != 2 or tree[2][0] != "set":
        return tree
    points = sorted({point for item in tree[2][1] if (point := constant(item)) is not None})
    low, high = (constant(end) if end[0] != "oo" else None for end in interval[2])
    inside = all((low is None or low < point) and (high is None or point < high) for point in points)
    if len(points) != len(tree[2][1]) or not inside:
        return tree
    ends = [interval[2][0], *(("num", point) for point in points), interval[2][1]]
    closing = [interval[1], *"(" * len(points)], [*")" * len(points), interval[3]]
    return (
        "union",
        tuple(("tuple", left, pair, right) for left, right, pair in zip(*closing, pairwise(ends), strict=True)),
    )


def _interval(tree: Tree) -> Tree | None:
    """The interval or union that an inequality in one variable describes, that it has been solved for."""
    if tree[0] in ("tuple", "union"):
        return tree
    if tree[0] in ("or", "list") and all(item[0] == "rel" for item in tree[1]):
        parts = [_interval(item) for item in tree[1]]
        if all(part is not None for part in parts) and tree[0] == "or":
            return ("union", tuple(parts))
        return None
    if tree[0] != "rel":
        return None
    sides, operators = list(tree[1]), list(tree[2])
    if operators == ["in"]:
        return _interval(sides[1])
    if not all(map(is_expression, sides)):
        return None
    if len(sides) == 2 and sides[1][0] == "sym" and sides[0][0] != "sym":
        sides.reverse()
        operators = [_FLIPPED[operators[0]]] if operators[0] in _FLIPPED else operators
    if len(sides) == 2 and sides[0][0] == "sym" and sides[0][1] not in symbols(sides[1]):
        bound = sides[1]
        if operators[0] == "!=":
            left: Tree = ("tuple", "(", (("oo", -1), bound), ")")
            return ("union", (left, ("tuple", "(", (bound, ("oo", 1)), ")")))
        if operators[0] in ("<", "<="):
            return ("tuple", "(", (("oo", -1), bound), "]" if operators[0] == "<=" else ")")
        if operators[0] in (">", ">="):
            return ("tuple", "[" if operators[0] == ">=" else "(", (bound, ("oo", 1)), ")")
        return None
    if len(sides) == 3 and sides[1][0] == "sym":
        if set(operators) <= {">", ">="}:
            sides.reverse()
            operators = [_FLIPPED[operator] for operator in reversed(operators)]
        if set(operators) <= {"<", "<="} and sides[1][1] not in symbols(sides[0]) | symbols(sides[2]):
            opening = "(" if operators[0] == "<" else "["
            return ("tuple", opening, (sides[0], sides[2]), ")" if operators[1] == "<" else "]")
    return None


# ---- comparison ---------------------------------------------------------------------------------------------------


def same(gold: Tree, answer: Tree, values: Values) -> bool | None:
    """See the top of this file."""
    settled_gold, settled_answer = settle(gold, values), settle(answer, values)
    if settled_gold is None or settled_answer is None:
        return False if values is not fingerprint_values else _undecided(gold, answer)
    return _same(settled_gold, settled_answer, values)


def _undecided(gold: Tree, answer: Tree) -> bool | None:
    """A chain of sides that fingerprints do not prove to be the same is left to better values, if they have roots in them."""
    return False if not _has_opaque(gold) and not _has_opaque(answer) else None


def _has_opaque(tree: object) -> bool:
    return isinstance(tree, tuple) and ((bool(tree) and tree[0] == "fn") or any(map(_has_opaque, tree)))


def _same(a: Tree, b: Tree, values: Values) -> bool | None:
    if a == b:
        return True
    if is_expression(a) and is_expression(b):
        return _same_value(a, b, values)
    if a[0] in ("list", "or") and b[0] in ("list", "or"):
        verdict = _same_members(_unnamed(a[1], b[1]), _unnamed(b[1], a[1]), values)
        if verdict is not True and a[0] != b[0]:
            return verdict
        return verdict
    name_a, inside_a = _named(a)
    name_b, inside_b = _named(b)
    if a[0] == "rel" and b[0] == "rel":
        if name_a is not None and name_a == name_b != "?" and a[2] == b[2]:
            return _same(inside_a, inside_b, values)
        by_form = _same_relation(a, b, values)
        if by_form is not False:
            return by_form
        if a[2] != ("=",) and b[2] != ("=",):
            return _same_intervals(a, b, values) if symbols(a) == symbols(b) else False
        return False
    if a[0] == "rel" and name_a is not None:
        return _same(inside_a, b, values)
    if b[0] == "rel" and name_b is not None:
        return _same(a, inside_b, values)
    if a[0] in ("list", "or") and b[0] not in ("tuple", "union"):
        return False
    if b[0] in ("list", "or") and a[0] not in ("tuple", "union"):
        return False
    if a[0] == b[0] == "tuple":
        if a[1] != b[1] or a[3] != b[3] or len(a[2]) != len(b[2]):
            return False
        return _all(_same(left, right, values) for left, right in zip(a[2], b[2], strict=True))
    if a[0] == b[0] == "union":
        return _same_members(a[1], b[1], values)
    if a[0] == b[0] == "matrix":
        if [len(row) for row in a[1]] != [len(row) for row in b[1]]:
            return False
        return _all(
            _same(left, right, values)
            for rows in zip(a[1], b[1], strict=True)
            for left, right in zip(*rows, strict=True)
        )
    if a[0] == b[0] == "ratio":
        if len(a[1]) != len(b[1]):
            return False
        return _all(_same(left, right, values) for left, right in zip(a[1], b[1], strict=True))
    if a[0] == b[0] == "base":
        return bool(a[1:] == b[1:])
    if a[0] == b[0] == "set":  # only the empty one is left
        return bool(a[1] == b[1])
    if a[0] == b[0] and a[0] in ("inter", "minus"):
        return _all(_same(left, right, values) for left, right in zip(a[1:], b[1:], strict=True))
    if {a[0], b[0]} & {"rel", "or"} and {a[0], b[0]} & {"tuple", "union"}:
        return _same_intervals(a, b, values)
    return False


def _same_intervals(a: Tree, b: Tree, values: Values) -> bool | None:
    first, second = _interval(a), _interval(b)
    if first is None or second is None or (first == a and second == b):
        return False
    return _same(first, second, values)


def _unnamed(items: Sequence[Tree], others: Sequence[Tree]) -> Sequence[Tree]:
    """x = 1, x = 2 without the name, if the others have none, and the names differ by an index at most."""
    if any(_named(other)[0] is not None for other in others):
        return items
    named = [_named(item) for item in items]
    names = {name.partition("_")[0] for name, _ in named if name is not None}
    if len(names) != 1 or any(name is None for name, _ in named):
        return items
    return [inside for _, inside in named]


def _same_value(a: Tree, b: Tree, values: Values) -> bool | None:
    if a[0] == "oo" or b[0] == "oo":
        return a == b
    if (a[0] == "percent") != (b[0] == "percent"):
        part, bare = (a, b) if a[0] == "percent" else (b, a)
        exact = values(part, bare)
        return exact if exact is not False else values(part[1], bare)
    return values(a, b)


def _same_members(a: Sequence[Tree], b: Sequence[Tree], values: Values) -> bool | None:
    """As multisets: equality is transitive, so the first match is as good as any."""
    if len(a) != len(b):
        return False
    left = list(b)
    undecided = False
    for item in a:
        for i, other in enumerate(left):
            verdict = _same(item, other, values)
            if verdict:
                del left[i]
                break
            undecided = undecided or verdict is None
        else:
            return None if undecided else False
    return True


def _all(verdicts: object) -> bool | None:
    undecided = False
    for verdict in verdicts:  # type: ignore[attr-defined]
        if verdict is False:
            return False
        undecided = undecided or verdict is None
    return None if undecided else True


def _same_relation(a: Tree, b: Tree, values: Values) -> bool | None:
    """Equations and inequalities, chains included, whatever side the terms stand on. Of numbers alone: side by side."""
    if not symbols(a) and not symbols(b):
        sides, operators = (b[1], b[2]) if a[2] == b[2] else (b[1][::-1], tuple(_FLIPPED.get(o, o) for o in b[2][::-1]))
        if a[2] != operators or len(a[1]) != len(sides) or not all(map(is_expression, (*a[1], *sides))):
            return False
        return _all(values(left, right) for left, right in zip(a[1], sides, strict=True))
    links_a, links_b = _links(a), _links(b)
    if links_a is None or links_b is None or len(links_a) != len(links_b):
        return False
    if len(links_a) == 2 and links_a[0][1] != links_b[0][1]:
        links_b = links_b[::-1]  # 5 > x > 2
    verdicts = []
    for (left, strict_a), (right, strict_b) in zip(links_a, links_b, strict=True):
        if strict_a != strict_b:
            return False
        verdicts.append(_proportional(left, right, positive=strict_a in ("<", "<="), values=values))
    forward = _all(verdicts)
    if forward is False and len(links_a) > 1:
        verdicts = []
        for (left, strict_a), (right, strict_b) in zip(links_a, links_b[::-1], strict=True):
            if strict_a != strict_b:
                return False
            verdicts.append(_proportional(left, right, positive=strict_a in ("<", "<="), values=values))
        return _all(verdicts)
    return forward


def _links(tree: Tree) -> list[tuple[Tree, str]] | None:
    """Each link of the chain as (expression, operator): expression < 0, <= 0, = 0 or != 0."""
    links: list[tuple[Tree, str]] = []
    for left, right, operator in zip(tree[1], tree[1][1:], tree[2], strict=False):
        if not (is_expression(left) and is_expression(right)) or operator == "in" or "oo" in (left[0], right[0]):
            return None
        if operator in (">", ">="):
            left, right, operator = right, left, _FLIPPED[operator]
        links.append((("add", left, ("neg", right)), operator))
    return links


def _proportional(a: Tree, b: Tree, *, positive: bool, values: Values) -> bool | None:
    """Whether a = c b for a number c that is not 0 (positive: above 0)."""
    zero: Tree = ("num", Fraction(0))
    if values(a, zero) or values(b, zero):
        return False
    verdict = values(a, b)
    if verdict or symbols(a) != symbols(b):
        return bool(verdict)
    factor = _factor(a, b)
    if factor is not None:
        return False if positive and factor <= 0 else values(a, ("mul", ("num", factor), b))
    if not positive and _by_numerators(a, b):
        return True
    # a(x) b(y) = a(y) b(x) for all x and y, or the ratio is no constant
    crossed = values(("mul", a, _renamed(b)), ("mul", _renamed(a), b))
    return None if crossed and positive else crossed


def _renamed(tree: Tree) -> Tree:
    if tree[0] == "sym":
        return ("sym", f"{tree[1]} elsewhere")
    return tuple(_renamed(part) if isinstance(part, tuple) and part else part for part in tree)


def _factor(a: Tree, b: Tree) -> Fraction | None:
    """The rational number a / b, if it is one with small terms: found from one fingerprint, still to be checked."""
    try:
        x, y = _Print(0).of(a), _Print(0).of(b)
    except Undefined:
        return None
    if not y:
        return None
    ratio = x * pow(y, -1, PRIME) % PRIME
    # rational reconstruction (Wang 1981): half-way through Euclid's algorithm
    r0, r1, t0, t1 = PRIME, ratio, 0, 1
    while r1 * r1 * 2 > PRIME:
        quotient = r0 // r1
        r0, r1, t0, t1 = r1, r0 - quotient * r1, t1, t0 - quotient * t1
    if not t1 or abs(t1) > 2**60 or abs(r1) > 2**60 or not r1:
        return None
    return Fraction(r1, t1)


def _by_numerators(a: Tree, b: Tree) -> bool | None:
    """Equations written with fractions: the same when the numerators over the common denominators are proportional."""
    ratios = []
    for point in (1, 2, 3):
        printer_a, printer_b = _Print(point), _Print(point)
        try:
            top_a, _ = _over(a, printer_a)
            top_b, _ = _over(b, printer_b)
        except Undefined:
            return None
        if printer_a.opaque or printer_b.opaque:
            return None
        if not top_a or not top_b:
            return False
        ratios.append(top_a * pow(top_b, -1, PRIME) % PRIME)
    return len(set(ratios)) == 1


def _over(tree: Tree, printer: _Print) -> tuple[int, int]:
    """Numerator and denominator, unreduced."""
    kind = tree[0]
    if kind == "add":
        top, bottom = 0, 1
        for part in tree[1:]:
            t, b = _over(part, printer)
            top, bottom = (top * b + t * bottom) % PRIME, bottom * b % PRIME
        return top, bottom
    if kind == "mul":
        top, bottom = 1, 1
        for part in tree[1:]:
            t, b = _over(part, printer)
            top, bottom = top * t % PRIME, bottom * b % PRIME
        return top, bottom
    if kind == "neg":
        top, bottom = _over(tree[1], printer)
        return -top % PRIME, bottom
    if kind == "div":
        top, bottom = _over(tree[1], printer)
        t, b = _over(tree[2], printer)
        return top * b % PRIME, bottom * t % PRIME
    return printer.of(tree), 1
