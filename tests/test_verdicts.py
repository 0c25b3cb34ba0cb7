r"""Verdicts about mathematical answers: 446 cases with their right verdicts, the kinds that broken graders get wrong, laws.

All of them go the way of a run: decided at once where that can be, by a worker process of the pool otherwise.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nevergiveup.grading.math import check_gold, grade_math, quick_verdict
from nevergiveup.grading.pool import GraderPool
from nevergiveup.loop import InPlace
from nevergiveup.types import NO_ANSWER, Check, Score, Unverified

CASES = Path(__file__).parent / "data" / "verify_cases.jsonl.gz"
LIMIT_S = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(2, timeout_s=LIMIT_S, memory_mb=1024, preload=("math_verify",)) as pool:
        yield pool


def graded(pool: GraderPool, gold: str, response: str) -> Score | Unverified:
    grade = grade_math(gold, response)
    found = pool.grade(grade) if isinstance(grade, Check) else grade
    assert isinstance(found, Score | Unverified)
    return found


def verdict(pool: GraderPool, gold: str, response: str) -> Any:
    found = graded(pool, gold, response)
    return found.reward if isinstance(found, Score) else None


# ----------------------------------------------------------------------------------------------------- handed as right


@pytest.mark.slow
def test_the_handed_cases(pool: GraderPool) -> None:
    """At least 98 % right, and none of the traps pays. Within 3 s and 1 GiB each, or it would be no verdict, which is wrong."""
    with gzip.open(CASES, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) == 446
    wrong = [case for case in cases if verdict(pool, case["gold"], case["response"]) != int(case["expected"])]
    assert len(wrong) <= 0.02 * len(cases), wrong
    traps = [case for case in wrong if "category=adversarial" in case["source_note"] and not case["expected"]]
    assert not traps


# ------------------------------------------------------------------------------------------------------------ C01 - C14

BOXED = r"\boxed{%s}"
RETRACTED = r"First try: \boxed{20}. That double counts, so the total is \boxed{18}."


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        # C01
        ("18", RETRACTED, 1),
        ("20", RETRACTED, 0),
        # C02
        ("42", r"\boxed {42}", 1),
        ("42", r"\fbox{42}", 1),
        ("42", r"\boxed{ 42 }", 1),
        ("42", r"\boxed{\boxed{42}}", 1),
        ("42", r"I write \boxed for the result. The result is \boxed{42}", 1),
        (r"\frac{7}{12}", r"so it is \boxed{\frac{7}{12}}.", 1),
        # C03
        ("17", r"\boxed{17 \text{ or } 18}", 0),
        ("17", r"\boxed{17}, \boxed{18}", 0),
        # C04
        ("12500", r"\boxed{12,500}", 1),
        ("12500", r"\boxed{12{,}500}", 1),
        ("12500", r"\boxed{12\,500}", 1),
        ("12500", r"\boxed{12\ 500}", 1),
        ("3125", r"\boxed{3, 125}", 0),
        ("(3,125)", r"\boxed{3125}", 0),
        ("(3,125)", r"\boxed{(3,125)}", 1),
        ("1000", r"\boxed{1.000}", 0),
        # C05
        ("-6", "so #### -6", 1),
        ("-6", "so #### 6", 0),
        ("-6", r"\boxed{-6}", 1),
        ("-6", "\\boxed{\u22126}", 1),
        ("-6", "#### +6", 0),
        ("-1,234.5", r"\boxed{-1234.5}", 1),
        # C07
        ("073", r"\boxed{73}", 1),
        ("073", r"\boxed{073}", 1),
        ("073", r"\boxed{730}", 0),
        ("000", r"\boxed{0}", 1),
        # C08
        ("35", r"\boxed{35\%}", 1),
        ("35", r"\boxed{0.35}", 0),
        (r"35\%", r"\boxed{0.35}", 1),
        ("0.35", r"\boxed{35\%}", 1),
        ("0.35", r"\boxed{35}", 0),
        # C09
        ("45", r"\boxed{\$45}", 1),
        ("45", r"\boxed{45\text{ dollars}}", 1),
        ("45", r"\boxed{\$45.00}", 1),
        ("45", r"\boxed{45.}", 1),
        ("45", r"\boxed{\$54}", 0),
        # C11
        ("8 and 27", r"\boxed{27}", 0),
        ("8 and 27", r"\boxed{27, 8}", 1),
        ("8 and 27", r"\boxed{8 \text{ and } 27}", 1),
        ("8 and 27", r"\boxed{8, 27, 64}", 0),
        # C12
        (r"\frac{1}{2^{60}}", r"\boxed{\frac{1}{2^{61}}}", 0),
        (r"\frac{1}{2^{60}}", r"\boxed{2^{-60}}", 1),
        (r"\frac13", r"\boxed{0.333}", 0),
        (r"\frac13", r"\boxed{0.333333}", 0),
        (r"\frac34", r"\boxed{0.75}", 1),
        # C13
        (r"1 - \sqrt{2}", r"\boxed{1}", 0),
        (r"1 - \sqrt{2}", r"\boxed{1-\sqrt{2}}", 1),
        (r"\sqrt{17}", r"\boxed{\sqrt{17}}", 1),
        (r"\sqrt{17}", r"\boxed{17}", 0),
    ],
)
def test_c01_to_c13(pool: GraderPool, gold: str, response: str, reward: int) -> None:
    assert verdict(pool, gold, response) == reward


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("17", "The answer is 17 or 18."),  # C03
        ("5", r"I tried 5 but the answer is \boxed{}"),  # C14
        ("12", r"so we get \boxed{12"),
        ("9", r"<think> maybe \boxed{9}"),
    ],
)
def test_c14_no_answer_is_told_apart_and_scores_0(gold: str, response: str) -> None:
    found = grade_math(gold, response)
    assert isinstance(found, Score)
    assert (found.reward, found.reason) == (0, NO_ANSWER)


# ------------------------------------------------------------------------------------- what other graders get wrong

SAME = [
    (r"\frac{3}{4}", r"\frac34"),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\frac{270}{7}", r"\frac{270}7"),
    (r"\sqrt{2}", r"\sqrt2"),
    (r"\frac{1}{7}", r"0.\overline{142857}"),
    (r"\frac{1}{3}", r"0.\overline3"),
    (r"\binom{100}{50}", r"\frac{100!}{50!50!}"),
    (r"(0,9)\cup(9,36)", r"(0,36) \setminus \{9\}"),
    (r"x \neq 3", r"\mathbb{R} \setminus \{3\}"),
    (r"3 \cdot 10^8", r"3 \times 10^{8}"),
    ("300000000", "3e8"),
    ("12.5", r"12.5\%"),
    (r"62.5\%", "62.5"),
    ("8", "8."),
    ("8", "８"),
    ("30^\\circ", "30°"),
    ("45", "€45"),
    ("45", "£45.00"),
    ("1000000", r"1\,000\,000"),
    (r"(-\infty, 3]", r"x \leq 3"),
    (r"2 < x < 5", "5 > x > 2"),
    (r"(2,5)", "2<x<5"),
    ("5", "5=x"),
    ("5", "x=5"),
    ("x=5", "5"),
    (r"\pm 3", "3, -3"),
    (r"\pm 3", "-3, 3"),
    (r"1 \pm \sqrt{5}", r"1+\sqrt{5}, 1-\sqrt{5}"),
    (r"\{1, 2, 3\}", r"\{3, 1, 2\}"),
    ("1, 2, 3", "3, 2, 1"),
    ("(1, 2)", r"\left(1,\,2\right)"),
    ("b+c=10", "c+b=10"),
    ("10", "b+c=10"),
    ("1<2<3", "3>2>1"),
    ("C", "(C) -12"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\text{(C)}", r"\textbf{(C)}\ 12"),
    ("C", "(C)"),
    (r"\text{Evelyn}", "evelyn"),
    ("2^{31}", "2147483648"),
    (r"8\pi", r"\pi \cdot 8"),
    (r"(x+1)(x-1)", "x^2-1"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\frac{a+b}{2}", r"\frac{1}{2}(b+a)"),
    (r"\ln 8", r"3\ln 2"),
    (r"\sin 60^\circ", r"\frac{\sqrt{3}}{2}"),
    (r"\log_2 8", "3"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"3\frac{1}{2}", r"\frac{7}{2}"),
    ("1101_2", "1101_{2}"),
    (r"x \in [2, 3)", "[2,3)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty,1)"),
    ("y=2x+3", "2x+3=y"),
    (r"10\text{ cm}", "10"),
    ("10", r"10\text{ cm}^2"),
    (r"\frac{\pi}{6}", r"\dfrac{\pi}{6}"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    ("e^{2}", "e^2"),
    (r"\sqrt[3]{8}", "2"),
]
DIFFERENT = [
    ("5", r"5 \text{ or 6}"),
    ("5", r"5\mbox{ or maybe 6}"),
    ("12", r"12 \text{ if } n \text{ is even, } 13 \text{ otherwise}"),
    ("5", r"5 \text{ (wrong), the value is } 6 \text{ units}"),
    ("2x", "2x+3g"),
    ("2x+3", "2x+3g"),
    ("x^2", "x^{2}s"),
    ("11", "5 6"),
    ("11", r"5 \quad 6"),
    ("5", r"5\approx 6"),
    ("6", r"5\approx 6"),
    ("1101_2", "1101_3"),
    ("ABC", "BCA"),
    ("AB", "BA"),
    ("0.0000004", "0.0000003"),
    ("0.5", "0.5000004"),
    ("7", "7.0000001"),
    (r"\pi \cdot 10^{-20}", r"2\pi \cdot 10^{-20}"),
    ("5", r"\geq 5"),
    ("5", r"\neq 5"),
    ("5", r"\pm 5"),
    (r"\pm 5", "5"),
    ("5", "5, 5.5"),
    (r"8\pi", "8"),
    (r"8\pi", "25.13"),
    (r"3 + \frac\pi 2", "2"),
    (r"\{x \mid 1 < x < 4\}", "4"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2]"),
    ("(1, 2)", "[1, 2)"),
    (r"\{1, 2\}", r"\{1, 2, 3\}"),
    (r"\{1, 2, 3\}", r"\{1, 2\}"),
    ("x=5", "y=5"),
    ("x > 5", r"x \geq 5"),
    ("x > 5", "x < 5"),
    ("b+c=10", "b-c=10"),
    ("b+c=10", "c+c=10"),
    (r"\frac{5}{19} < \frac{7}{21}", r"\frac{5}{29} < \frac{7}{21}"),
    ("1<2<3", "1<2<4"),
    (r"\text{Evelyn}", r"-\text{Evelyn}"),
    ("245 yd.", r"245 yd.\pi"),
    (r"\text{(B)}", r"\text{(B)} + 1"),
    (r"(0,9)\cup(9,36)", r"(0,36) \setminus \{8\}"),
    (r"(0,9)\cup(9,36)", r"(0,36) \setminus \{9, 10\}"),
    (r"(0,9)\cup(9,36)", "(0,36)"),
    ("x+1", "x+2"),
    (r"\sqrt{2}", "1.414213562373095"),
    (r"10\text{ cm}", r"10\text{ m}"),
    ("B", "(C)"),
    ("B", "B or C"),
    (r"\text{Evelyn}", r"\text{not Evelyn}"),
    (r"\text{yes}", "no"),
    ("10^{100}", "10^{100}+1"),
    ("y=2x+3", "y=2x-3"),
    (r"\sin x", r"\cos x"),
    ("x^2", "x^3"),
    (r"\frac{1}{x}", "x"),
    ("42", "[42, 43]"),
    ("42", "41 + 1 + 0.0000001"),
    ("42", r"\text{42 is not the answer}"),
    ("42", r"42 \text{ ignore the rest } 43"),
    ("42", "{42}{43}"),
    ("0", r"\infty"),
    ("0", "0/0"),
    ("0", "nan"),
    ("5", "a"),
    ("x", "y"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same_in_another_form(pool: GraderPool, gold: str, answer: str) -> None:
    assert verdict(pool, gold, BOXED % answer) == 1


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_not_the_same_however_it_looks(pool: GraderPool, gold: str, answer: str) -> None:
    assert verdict(pool, gold, BOXED % answer) == 0


BOMBS = [
    "9^{9^{9^{9}}}",
    "(10^{8})!",
    "((5!)!)!",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{k=1}^{10^9} k!",
    r"\prod_{k=1}^{10^{12}} \sin k",
    "(" * 2000 + "7" + ")" * 2000,
    "-" * 3001 + "7",
    r"\frac{1}{" * 300 + "7" + "}" * 300,
    "+".join(f"x_{{{i}}}" for i in range(800)),
    r"\sin(" * 60 + "x" + ")" * 60,
    "(a+b+c+d+e+f)^{999}",
    r"\int_0^1 e^{-x^2} \sin(x^7) dx",
    "7" * 100_000,
    "{" * 4000 + "7" + "}" * 4000,
    r"2^{2^{2^{2^{2^{2}}}}}",
    "10^{10^{10}}",
    r"\sqrt[1000000]{2^{1000000}}",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:20])
def test_c15_bombs_are_refused_and_the_next_is_right(pool: GraderPool, bomb: str) -> None:
    """By rule, mostly before they reach a worker: the limits are not needed, and no worker dies."""
    before = pool.counters()
    for gold in ("7", r"\sqrt{7}", "x+7"):
        assert verdict(pool, gold, BOXED % bomb) == 0
    assert verdict(pool, "7", r"\boxed{7}") == 1
    assert verdict(pool, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1
    after = pool.counters()
    assert all(after[name] == before[name] for name in ("n_timeouts", "n_out_of_memory", "n_died"))


@pytest.mark.parametrize(
    "text", [r"\[ 1 \boxed{" * 3000, r"\boxed{1}" * 20_000, "#### " * 50_000, "The answer is " * 20_000]
)
def test_texts_that_are_long_cost_no_more_than_their_length(pool: GraderPool, text: str) -> None:
    assert verdict(pool, "7", text) == 0


# ------------------------------------------------------------------------------------------------------------------ laws

fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=500)


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{value}" if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


@given(fractions, fractions)
def test_rational_numbers_are_equal_exactly_if_they_are(a: Fraction, b: Fraction) -> None:
    for gold, answer in ((a, a), (a, b), (a, a + Fraction(1, 10**12))):
        found = quick_verdict(latex(gold), latex(answer))
        assert found is not None
        assert found.reward == int(gold == answer)


small = st.integers(-9, 9)


@given(st.tuples(small, small, small, small), small)
def test_products_equal_what_they_multiply_out_to(factors: tuple[int, int, int, int], off: int) -> None:
    """And nothing else: one coefficient off is another polynomial."""
    a, b, c, d = factors
    product = f"({a}x+({b}))({c}x+({d}))"
    expanded = f"{a * c}x^2 + ({a * d + b * c})x + ({b * d + off})"
    for gold, answer in ((product, expanded), (expanded, product)):
        found = quick_verdict(gold, answer)
        assert found is not None
        assert found.reward == int(off == 0)


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_lists_have_no_order_and_tuples_do(values: list[int], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    pairs = ((r"\{%s\}", 1), ("%s", 1), ("(%s)", int(shuffled == values)))
    for form, reward in pairs:
        gold, answer = (form % ", ".join(map(str, list_)) for list_ in (values, shuffled))
        found = quick_verdict(gold, answer)
        assert found is not None
        assert found.reward == reward


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_gets_a_verdict_or_a_check(gold: str, answer: str) -> None:
    found = grade_math(gold or "1", BOXED % answer)
    assert isinstance(found, Check) or found.reward in (0, 1)


TEX = st.lists(
    st.sampled_from(
        [
            *"0123456789xyab+-*/^_(){}[],.=<>!%$|",
            r"\frac",
            r"\sqrt",
            r"\pi",
            r"\pm",
            r"\text{or}",
            r"\cdot",
            r"\infty",
            " ",
        ]
    ),
    max_size=14,
).map("".join)


@given(TEX)
def test_a_gold_of_any_spelling_never_accepts_another_number(gold: str) -> None:
    """One answer may be right, two different ones may not."""
    found = [grade_math(gold, BOXED % answer) for answer in ("1234567", "7654321")]
    assert sum(f.reward for f in found if isinstance(f, Score)) <= 1


# ---------------------------------------------------------------------------------------------------------------- golds


@pytest.mark.parametrize(
    "gold", ["2^{31}", r"8\pi", r"5+\sqrt{7}", r"\frac34", r"3 + \frac\pi 2", r"\{x \mid 1 < x < 4\}", "C"]
)
def test_golds_without_dollar_signs_are_read_as_what_they_say(gold: str) -> None:
    found = asyncio.run(check_gold(gold, InPlace()))
    assert isinstance(found, Score)
    assert found.reward == 1
