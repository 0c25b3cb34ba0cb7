"""The number grader and the rows of `gsm8k`: what counts as an answer, when two numbers are the same, what is refused."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nevergiveup.grading.answers import final_answer
from nevergiveup.grading.numbers import Number, number, same_number
from nevergiveup.tasks.gsm8k import EXAMPLES, GSM8K, INSTRUCTION, SPLITS, load_rows
from nevergiveup.types import Completion, Finish, Prompt

TASK = GSM8K()


def score(gold: str, text: str, finish: Finish = "stop") -> int:
    completion = Completion(tokens=(), logprobs=(), text=text, finish=finish, version_first=0, version_last=0)
    return TASK.grade(Prompt(id="row", answer=gold), completion).reward


# ---- which text is the answer -------------------------------------------------------------------------------------


@given(st.integers(0, 999), st.integers(0, 999))
def test_the_last_box_is_the_answer(first: int, last: int) -> None:
    text = rf"First try: \boxed{{{first}}}. That double counts, so the total is \boxed{{{last}}}."
    assert score(str(last), text) == 1
    assert score(str(first), text) == int(first == last)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed {42}",
        r"\fbox{42}",
        r"\boxed{ 42 }",
        r"\boxed{\boxed{42}}",
        r"\boxed{\fbox{42}}",
        r"\boxed{{42}}",
        r"\boxed{$42$}",
        r"\boxed{\(42\)}",
        r"\boxed{\text{42}}",
        r"\boxed{\textbf{42} \text{ eggs}}",
        r"\boxed 42",
        r"\boxed{42}}",
        r"a set {1, 2 and \boxed{42}",
        r"\boxed{\boxed{ oops, once more: \boxed{42}",
        r"I write \boxed for the result. The result is \boxed{42}",
        r"The task says \boxed{}. So it is $\boxed{42}$.",
        r"\boxed{42}, that is, \boxed{42}",
        r"\[ x = \boxed{42}. \] Check: 6 * 7 = 42, not 41.",
        r"\boxed{x = 42}",
        r"\boxed{6 \times 7 = 42}",
        r"\boxed{40 + 2 = 42 \text{ eggs}}",
        "<think> maybe \\boxed{41}? </think> It is \\boxed{42}",
        "6 * 7 = 42\n#### 42",
        "####42",
        "#### 12\nOops, that is only the first day.\n#### 42",
        "#### Step 1: multiply\n6 * 7\nThe answer is 42.",
        "#### 1. Multiply\nThe answer is 42.",
        "The answer is 42",
        "The answer is $42$. I hope it is correct.",
        "The answer is $42.",
        "The answer is 12. Wait, the answer is 42.",
        "**Final Answer:** 42",
        "✅ Final Answer: **42**",
        "the answer is:\n\n42 eggs.",
    ],
)
def test_spellings_of_an_answer(text: str) -> None:
    assert score("42", text) == 1
    assert score("41", text) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n\t",
        "I think it is 42.",
        "She has 42 sheep. 42 sheep",
        r"\boxed{}",
        r"\boxed{ }",
        r"I tried 42 but the answer is \boxed{}",
        "The answer is 42. I write \\boxed{}",
        r"so we get \boxed{42",
        r"it is \boxed{42}, no, wait, \boxed{43",
        r"The result is \boxed",
        r"<think> maybe \boxed{42}",
        "Therefore, the answer is",
        "6 * 7 =\n####",
        "The answer is not 42.",
        "The answer is forty-two.",
        "The answer is 42 or 43.",
        "The answer is 42, 43.",
        "The answer is between 42 and 50.",
        "#### 42 or 43",
    ],
)
def test_no_answer(text: str) -> None:
    assert final_answer(text) is None
    assert score("42", text, "length") == 0


CANDIDATES = [
    "{} or {}",
    "{}, {}",
    "{} and {}",
    "{};{}",
    "{}?{}",
    "{}-{}",
    r"{} \quad {}",
    r"{} \text{{ or }} {}",
    "{} (or {})",
]


@given(st.integers(0, 99999), st.integers(0, 99999), st.sampled_from(CANDIDATES))
def test_naming_several_candidates_never_pays(n: int, other: int, form: str) -> None:
    for text in (form.format(n, other), form.format(other, n)):
        assert score(str(n), rf"\boxed{{{text}}}") == 0
        assert final_answer(f"The answer is {text}.") is None


@given(st.integers(0, 99), st.integers(0, 99))
def test_two_numbers_side_by_side_are_no_number(n: int, other: int) -> None:
    assert number(f"{n} {other}") is None


@given(
    st.lists(st.integers(0, 99).map(str), min_size=2, max_size=9, unique=True),
    st.sampled_from([", ", " and ", " or ", " ", "$, $"]),
)
def test_a_row_of_boxes_is_a_list(values: list[str], joint: str) -> None:
    text = joint.join(rf"\boxed{{{value}}}" for value in values)
    assert all(score(value, text) == 0 for value in values)


@pytest.mark.parametrize(
    "inside",
    [
        r"17 \text{ or } 18",
        r"17\text{ or 18}",
        r"17\mbox{ or maybe 18}",
        r"17 \text{ (wrong), the value is } 18 \text{ units}",
        r"17 \text{ if } n \text{ is even}",
        r"\text{not } 17",
        r"x \neq 17",
        r"\geq 17",
        r"17 \approx 18",
        r"\approx 17",
        r"\pm 17",
        r"16 = 17",
        r"16 < x < 18",
        r"17 \quad 18",
        r"at least 17",
        "17 or more",
        "17 or so",
        "17x",
        "17i",
        r"17\pi",
        "17!",
        "17 squared",
        "17 thousand",
        "17 dozen and 3",
        "17^2",
        r"17 \text{}^2",
        "10 + 7",
        "34/2",
        r"\frac{34}{2}",
        "17/0",
        "+-17",
        "--17",
        "17:00",
        "17²",
        "17½",
        "⑰",
        "l7",
        "1е1",
        "nan",
        "inf",
        "1e400",
        r"\text{True}",
        r"\gold",
        r"1\phantom{8}7",
    ],
)
def test_what_is_no_numeral_for_17(inside: str) -> None:
    assert score("17", rf"\boxed{{{inside}}}") == 0
    assert number(inside) is None


# ---- which number it is -------------------------------------------------------------------------------------------


@given(st.integers(-(10**9), 10**9), st.sampled_from([",", "{,}", r"\,", r"\ ", " ", "\u00a0", "\u2009"]))
def test_thousands_separators(n: int, separator: str) -> None:
    written = f"{n:,}".replace(",", separator)
    assert number(written) == Number(n)
    assert score(str(n), rf"\boxed{{{written}}}") == 1
    assert score(f"{n:,}", f"#### {n}") == 1
    assert score(str(n + 1), rf"\boxed{{{written}}}") == 0


@pytest.mark.parametrize(
    "inside", ["3, 125", "(3,125)", "3,1250", "31,25", "0,3125", "3,12 5", "3,125,5", "3.125", "3 125 0"]
)
def test_a_list_is_not_joined_to_one_number(inside: str) -> None:
    assert score("3125", rf"\boxed{{{inside}}}") == 0


def test_a_point_is_no_thousands_separator() -> None:
    assert score("1000", r"\boxed{1.000}") == 0
    assert score("1", r"\boxed{1.000}") == 1


@given(st.integers(1, 10**6), st.sampled_from(["-", "\u2212", "- ", "\uff0d"]))
def test_signs(n: int, minus: str) -> None:
    for form in (r"\boxed{%s}", "#### %s", "The answer is %s."):
        assert score(str(-n), form % f"{minus}{n}") == 1
        assert score(str(n), form % f"{minus}{n}") == 0
        assert score(str(-n), form % n) == 0
        assert score(str(-n), form % f"+{n}") == 0
        assert score(str(n), form % f"+{n}") == 1
    assert score(str(-n), rf"\boxed{{({minus}{n})}}") == 1
    assert score(str(-n), rf"\boxed{{{minus}\${n}}}") == 1
    assert score(str(-n), rf"\boxed{{\${minus}{n}}}") == 1


def test_gold_with_sign_separator_and_decimals() -> None:
    assert score("-1,234.5", "#### -1234.5") == 1
    assert score("-1,234.5", "#### 1234.5") == 0
    assert score("0", r"\boxed{-0}") == 1


@given(st.integers(0, 999), st.integers(0, 4))
def test_leading_zeros_count_for_nothing(n: int, zeros: int) -> None:
    padded = "0" * zeros + str(n)
    assert score(padded, rf"\boxed{{{n}}}") == score(str(n), rf"\boxed{{{padded}}}") == 1
    if n:
        assert score(padded, rf"\boxed{{{n}0}}") == 0


@given(st.integers(-(10**6), 10**6), st.integers(0, 6))
def test_decimals_are_exact(n: int, places: int) -> None:
    value = Fraction(n, 10**places)
    sign, digits = ("-" if n < 0 else ""), str(abs(n)).zfill(places + 1)
    written = f"{sign}{digits[: len(digits) - places]}.{digits[len(digits) - places :]}"
    assert number(written) == Number(value)
    assert number(f"{written}00" if places else written) == Number(value)
    assert not same_number(Number(value), Number(value + Fraction(1, 10**30)))


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            "0.5",
            [r"\frac{1}{2}", r"\dfrac12", r"\frac 1 2", "1/2", ".5", "0.50", "2/4"],
            ["0.5000004", "0.5000000000000000001"],
        ),
        ("3.5", [r"3\frac{1}{2}", r"3 \frac{1}{2}", "3 1/2", "7/2", r"\frac{7}{2}"], [r"3\frac{3}{2}", "31/2", "3"]),
        ("-0.75", [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", r"-0\frac34"], [r"\frac34", "0.75"]),
        ("1/3", [r"\frac{1}{3}", "2/6"], ["0.33", "0.333333", "0.3333333333333333"]),
        ("0.1", ["0.10", "1/10"], ["0.1000000000000000055511151231257827"]),  # that is the float
        ("9007199254740993", ["9,007,199,254,740,993"], ["9007199254740992"]),  # the same float
        ("7", ["7.0", "７"], ["7.0000001", "８", "70"]),
    ],
)
def test_equal_is_exact(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [score(gold, rf"\boxed{{{text}}}") for text in right] == [1] * len(right)
    assert [score(gold, rf"\boxed{{{text}}}") for text in wrong] == [0] * len(wrong)


@given(st.integers(1, 10**5), st.sampled_from([r"\%", "%", " percent", r" \text{ percent}"]))
def test_percent(n: int, sign: str) -> None:
    share = f"{n / 100:.2f}"
    percent = f"{n}{sign}"
    for gold, answer, verdict in [
        (str(n), percent, 1),
        (percent, share, 1),
        (share, percent, 1),
        (percent, percent, 1),
        (str(n), share, 0),
        (str(n), f"{n}00{sign}", 1),  # 3500 % is 35
        (percent, f"{n}00{sign}", 0),
    ]:
        assert score(gold, rf"\boxed{{{answer}}}") == verdict
        assert score(answer, rf"\boxed{{{gold}}}") == verdict


MONEY_AND_UNITS = [
    r"\$%d",
    "$%d",
    "€%d",
    "£ %d",
    r"%d \$",
    r"\$%d.00",
    r"\text{\$%d}",
    r"%d\text{ dollars}",
    r"%d \text{ dollars per day}",
    "$%d/day",
    "%d.",
    "%d meters",
    "%d ice-cream cones",
    r"%d\,\text{mph}",
    r"%d\text{ cm}^2",
    r"%d \text{ square units}",
    r"%d \mathrm{~km/h}",
    r"%d \, \mathrm{m/s^2}",
    r"%d^\circ",
    "%d°",
]


@given(st.integers(2, 10**4))
def test_money_and_units_are_ignored(n: int) -> None:
    for form in MONEY_AND_UNITS:
        assert score(str(n), rf"\boxed{{{form % n}}}") == 1, form
        assert score(str(n + 9), rf"\boxed{{{form % n}}}") == 0, form
    assert score(f"{n} dollars", rf"\boxed{{{n}}}") == 1


@given(st.text(max_size=400))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert score("5", text) in (0, 1)
    assert score("5", rf"\boxed{{{text}}}") in (0, 1)


@given(st.text(alphabet=r"0123456789+-*/^{}()\,.$% =textfracboxed", max_size=60))
def test_two_readings_of_one_answer_agree(inside: str) -> None:
    value = number(inside)
    if value is not None:
        assert number(str(value.value) + ("%" if value.percent else "")) == value


# ---- bombs --------------------------------------------------------------------------------------------------------

HUGE = 100_000


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{(10^{8})!}",
        r"\boxed{9**9**9}",
        r"\boxed{10^{-10^{10}}}",
        r"\boxed{1e999999999}",
        r"\boxed{" + "9" * HUGE + "}",
        r"\boxed{0." + "3" * 5000 + "}",
        r"\boxed{" + "-" * 3001 + "57}",
        r"\boxed{" + "(" * 1500 + "57" + ")" * 1500 + "}",
        r"\boxed{" * (HUGE // 7),
        r"\boxed{" * 600 + "58" + "}" * 600,
        r"\boxed{58}" + " }" * HUGE,
        r"\[ 1 \boxed{" * 1500,
        r"\boxed" + " " * HUGE,
        " ".join(rf"\boxed{{{n}}}" for n in range(HUGE // 10)),
        r"\boxed{1+" + "1+" * 4000 + "1}",
        "{" * HUGE,
        "}" * HUGE,
        "\\" * HUGE,
        "The answer is " * (HUGE // 14),
        "The answer is " + "5 " * HUGE,
        ("answer" + " " * 300) * 300,
        "#### a\n" * (HUGE // 7),
        " " * HUGE,
    ],
    ids=range(24),
)
def test_bombs_are_no_numbers_and_cost_nothing(text: str) -> None:
    assert score("57", text) == 0  # in 10 ms or so; the tests would not end if it were not linear


# ---- the rows -----------------------------------------------------------------------------------------------------


def test_the_shipped_rows() -> None:
    train, test = TASK.prompts("train"), TASK.prompts("test")
    assert (len(train), len(test)) == (7473, 1209)
    assert len({prompt.id for prompt in [*train, *test]}) == 7473 + 1209
    assert train[0].answer == "72"
    assert train[0].messages[0]["content"].startswith("Natalia sold clips to 48 of her friends in April")
    assert not {p.messages[0]["content"] for p in train} & {p.messages[0]["content"] for p in test}
    assert TASK.prompts("train") == train  # ids and order do not change
    with pytest.raises(ValueError, match=r"no split 'dev': use one of train, test"):
        TASK.prompts("dev")


def test_every_gold_answer_is_right_and_nothing_else_is() -> None:
    for prompt in [*TASK.prompts("train"), *TASK.prompts("test")]:
        assert score(prompt.answer, rf"So it is \boxed{{{prompt.answer}}}.") == 1
        assert score(prompt.answer, rf"So it is \boxed{{{prompt.answer}7}}.") == 0


def test_the_shipped_files_are_small_and_reproducible() -> None:
    data = files("nevergiveup.tasks").joinpath("data")
    total = 0
    for name in SPLITS.values():
        packed = data.joinpath(name).read_bytes()
        total += len(packed)
        assert packed[3] & 8 == 0  # no file name in it
        assert packed[4:8] == bytes(4)  # no time
        assert set(json.loads(gzip.decompress(packed).splitlines()[0])) == {"question", "answer"}
    assert total < 1_500_000
    assert "Copyright (c) 2021 OpenAI" in data.joinpath("LICENSE-GSM8K").read_text()


def rows(folder: Path, data: bytes) -> list[Prompt]:
    file = folder / "my.jsonl"
    file.write_bytes(data)
    return load_rows(file).prompts


def test_rows_of_ones_own(tmp_path: Path) -> None:
    prompts = rows(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "2+2?", "answer": 4}\r\n'
        b'{"question": "Work it out.", "answer": "2 * 3 = 6, so\\n#### 6"}\r\n'
        b"\r\n"
        b'{"prompt": "x", "answer": 0.10}\r\n'
        b'{"prompt": "y", "solution": "#### -1,234.5"}\r\n'
        b'{"prompt": [{"role": "user", "content": "2+2?"}], "gold": "35%"}\r\n'
        b'{"prompt": "2+2?", "answer": "4"}\r\n'
        b'{"prompt": "one\\u2028line", "answer": "\xc2\xa0007"}',
    )
    assert [prompt.answer for prompt in prompts] == ["4", "6", "0.10", "-1,234.5", "35%", "4", "007"]
    assert prompts[0].messages == ({"role": "user", "content": f"2+2?\n\n{INSTRUCTION}"},)
    assert prompts[4].messages == ({"role": "user", "content": "2+2?"},)
    assert prompts[5].id == f"{prompts[0].id}-7"  # the same row again, on line 7
    assert len({prompt.id for prompt in prompts}) == 7


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"prompt":"2+2?"}', r"no answer \(looked for answer, solution, gold, expected_answer\)"),
        (b'{"answer":"4"}', r"no question \(looked for question, prompt, problem, messages\)"),
        (b'{"prompt":"2+2?","answer":""}', "empty answer"),
        (b'{"prompt":"2+2?","answer":" "}', "empty answer"),
        (b'{"prompt":"2+2?","answer":null}', "empty answer"),
        (b'{"prompt":"","answer":"4"}', "empty prompt"),
        (b'{"prompt":[],"answer":"4"}', "empty prompt"),
        (b'{"prompt":{"a":1},"answer":"4"}', "neither a text nor a list of chat messages"),
        (b'{"prompt":[{"content":"2+2?"}],"answer":"4"}', "the message .* is not"),
        (
            b'{"prompt":[{"role":"user","content":"2+2?"},{"role":"assistant","content":"4"}],"answer":"4"}',
            "assistant's",
        ),
        (b'{"prompt":[{"role":"human","content":"2+2?"}],"answer":"4"}', "the role 'human' is none of"),
        (b'{"prompt":"x" "answer":"4"}', "broken JSON at column 15"),
        (b'{"prompt":"x",', "broken JSON at column 15"),
        (b"[1, 2]", "not a JSON object"),
    ],
)
def test_defective_rows_are_named(tmp_path: Path, row: bytes, message: str) -> None:
    good = b'{"prompt":"2+2?","answer":"4"}\n'
    with pytest.raises(ValueError, match=rf"my\.jsonl: 1 of 8 rows cannot be used:\s+line 7: .*{message}"):
        rows(tmp_path, good * 6 + row + b"\n" + good)


@pytest.mark.parametrize("answer", [b'"see solution"', b'"#### "', b'"3 or 4"', b"true", b"NaN", b"[4]"])
def test_c39_answers_that_are_no_numbers_are_left_out_and_listed_unless_they_are_many(
    tmp_path: Path, answer: bytes
) -> None:
    good, bad = b'{"prompt":"2+2?","answer":"4"}\n', b'{"prompt":"x","answer":%s}\n' % answer
    file = tmp_path / "my.jsonl"
    file.write_bytes(good * 19 + bad)
    made = load_rows(file)
    assert len(made.prompts) == 19
    (left_out,) = made.excluded
    assert left_out.where == f"{file}, line 20"
    assert left_out.reason == "not a number, alone or after ####"
    file.write_bytes(good * 18 + bad)
    with pytest.raises(
        ValueError, match=r"answers of 1 of 19 rows cannot be verified.*allow_unverifiable(?s:.*)line 19: "
    ):
        load_rows(file)
    assert len(load_rows(file, allow_unverifiable=True).prompts) == 18
    file.write_bytes(bad)
    with pytest.raises(ValueError, match="1 of 1 rows cannot be verified"):
        load_rows(file, allow_unverifiable=True)


def test_all_defects_are_counted_and_the_first_ten_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)12 of 12 rows.*line 1: .*line 10: .*and 2 more"):
        rows(tmp_path, b'{"prompt":"x"}\n' * 12)


def test_files_that_hold_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        rows(tmp_path, b"\n")
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        rows(tmp_path, b'{"prompt":"x","answer":"4"}\n\xff')


def test_a_gold_that_is_no_number_is_an_error_not_a_verdict() -> None:
    with pytest.raises(ValueError, match="the gold answer 'see solution' is not a number"):
        score("see solution", r"\boxed{4}")


def test_the_answer_style_shows_solved_examples_that_the_grader_accepts() -> None:
    prompt = GSM8K(style="answer").prompts("train")[0]
    assert [message["role"] for message in prompt.messages] == ["user", "assistant"] * 3 + ["user"]
    assert prompt.messages[-1]["content"] == GSM8K().prompts("train")[0].messages[0]["content"].partition("\n\n")[0]
    for (_, gold), shown in zip(EXAMPLES, prompt.messages[1::2], strict=True):
        assert final_answer(shown["content"]) == str(gold)
