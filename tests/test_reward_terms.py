"""Rewards put together of parts: exact weights, the right best value, clear errors; and what format and length mean."""

import asyncio
import sys
from fractions import Fraction

import pytest

from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.rewards import format_reward, length_share
from nevergiveup.strategies import STRATEGIES
from nevergiveup.tasks.own import load_function
from nevergiveup.tasks.reward_terms import Term, WithReward, needs_correct, parse_terms
from nevergiveup.types import Attempt, Check, Completion, Group, Prompt, Score, Sum, Unverified


class Letters:
    """Scores the share of letters that are a."""

    best = 1

    def prompts(self, split):
        return [
            Prompt(f"{split} {i}", ({"role": "user", "content": "a?"},), "a", max_reward=self.best) for i in range(2)
        ]

    def grade(self, prompt, completion):
        return Score(Fraction(completion.text.count("a"), len(completion.text)), "counted", completion.text)


class Parts(Letters):
    def grade(self, prompt, completion):
        return Sum({"x": (Fraction(1, 2), 1), "y": (Fraction(1, 2), Check(float, (completion.text,)))})


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "terms_mine.py").write_text(
        "def style(completion): return 0.25\n"
        "def brevity(n_tokens): return 1 / n_tokens\n"
        "def parted(completion): return {'one': 0.25, 'two': 0.5}\n"
        "def sign(completion): return float(completion)\n"
        "def format(level, answer): return 1\n"
    )
    (tmp_path / "my-terms.py").write_text("def style(completion): return 0.5\n")
    yield "terms_mine"
    sys.modules.pop("terms_mine", None)
    load_function.cache_clear()


def completion(text, n_tokens=4):
    return Completion((1,) * n_tokens, (-0.1,) * n_tokens, text, "stop", 0, 0)


def grade(task, text, n_tokens=4):
    (one,) = asyncio.run(TaskGrader(task).grade(task.prompts("train")[0], [completion(text, n_tokens)]))
    return one


def made(expression, task=None, max_reward=1):
    return WithReward(task or Letters(), expression, max_reward, max_new_tokens=8)


# ------------------------------------------------------------------------------------------------ expressions


@pytest.mark.parametrize(
    ("expression", "terms"),
    [
        ("correct", [(1, "correct")]),
        ("correct+0.1*format", [(1, "correct"), (Fraction(1, 10), "format")]),
        (" correct  - length*2e-1 ", [(1, "correct"), (Fraction(-1, 5), "length")]),
        ("-.5*length + 3 * correct", [(Fraction(-1, 2), "length"), (3, "correct")]),
        ("my.module:f - a/b-c/judge.py:style", [(1, "my.module:f"), (-1, "a/b-c/judge.py:style")]),
        ("0.5*../x.py:f+correct", [(Fraction(1, 2), "../x.py:f"), (1, "correct")]),
        ("correct + 0*format", [(1, "correct"), (0, "format")]),
    ],
)
def test_terms_and_exact_weights(expression, terms):
    assert parse_terms(expression) == [Term(*term) for term in terms]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "a term is missing at the end"),
        ("corect + format", r"there is no part corect \(did you mean correct\?\)"),
        ("banana", "there is no part banana; parts are correct, format, length, and functions of yours"),
        ("correct format", r"between correct and format there is no \+ or -"),
        ("correct +", "a term is missing at the end"),
        ("correct + * format", r"a term is missing before \*"),
        ("correct + -format", "a term is missing before -"),
        ("0.5 + correct", "0.5 is not one part with at most one weight"),
        ("correct*format", r"correct\*format is not one part"),
        ("2*3*correct", r"2\*3\*correct is not one part"),
        ("correct + 0.1 / format", "/ at character 15 is no term"),
        ("correct + my_module:", ": at character 20 is no term"),
        ("correct + correct", "correct is there twice: add up its weights"),
    ],
)
def test_malformed_expressions_are_refused_in_clear_words(expression, said):
    with pytest.raises(ValueError, match=said) as error:
        parse_terms(expression)
    assert str(error.value).startswith(f"task.reward = {expression!r}: ")


def test_whether_answers_are_needed():
    assert needs_correct("")
    assert needs_correct("0.5*correct + my:f")
    assert not needs_correct("my:f - length")


# ------------------------------------------------------------------------------------------------ rewards


def test_parts_are_weighed_exactly_and_logged_apart(mine):
    task = made(f"correct + 0.1*format + 0.5*{mine}:style - 0.2*length")
    assert grade(task, r"aaax\boxed{1}"[:4], n_tokens=6) == Score(
        Fraction(3, 4) + Fraction(1, 8) - Fraction(1, 10),
        "counted",
        "aaax",
        {"correct": 0.75, "format": 0.0, "style": 0.25, "length": 0.5},
    )


def test_the_best_reward_is_the_sum_of_the_best_of_the_parts(mine):
    task = Letters()
    task.best = 3
    expression = f"2*correct + 0.1*format + 0.5*{mine}:style + 0*{mine}:brevity - 0.2*length - {mine}:sign"
    assert {p.max_reward for p in made(expression, task, 10).prompts("train")} == {6 + Fraction(1, 10) + 5}
    assert made("correct").prompts("test")[0].max_reward == 1


def test_a_right_completion_of_right_format_is_solved(mine):
    task = made("correct + 0.1*format")
    task.task.grade = lambda prompt, completion: 1
    assert reward_of(grade(task, r"\boxed{a}")) == task.prompts("train")[0].max_reward == Fraction(11, 10)


def test_one_part_of_weight_1_is_the_grade_itself(mine):
    assert grade(made(f"{mine}:parted"), "x") == Score(Fraction(3, 4), parts={"one": 0.25, "two": 0.5})
    assert grade(made("correct"), "aaxx") == Score(Fraction(1, 2), "counted", "aaxx")


def test_a_task_that_has_parts_itself_keeps_them(mine):
    assert grade(made("2*correct + format", Parts()), "0.5") == Score(
        Fraction(3, 2), parts={"correct/x": 1.0, "correct/y": 0.5, "format": 0.0}
    )


def test_what_is_taken_off_cannot_be_earned_by_going_below_0(mine):
    task = made(f"correct - {mine}:sign")
    assert grade(task, "0.5").reward == Fraction(0) - Fraction(1, 2)
    assert grade(task, "-1").reason.endswith("returned less than 0, which its weight forbids")
    assert grade(made(f"correct + {mine}:sign"), "-1").reward == -1
    assert isinstance(grade(made(f"correct + {mine}:sign"), "2"), Unverified)


def test_functions_are_labelled_by_their_own_name_where_that_is_clear(mine):
    parts = grade(made(f"correct + {mine}:style + {mine}:brevity + my-terms.py:style"), "a").parts
    assert list(parts) == ["correct", f"{mine}:style", "brevity", "my-terms.py:style"]


def test_a_parameter_that_no_row_can_give_is_refused_when_the_prompts_are_read(mine):
    with pytest.raises(
        ValueError, match=r"terms_mine:format needs level, which 2 of 2 rows do not have .there are prompt"
    ):
        made(f"{mine}:format").prompts("train")


@pytest.mark.parametrize(
    ("expression", "max_reward", "said"),
    [
        ("-1*length", 1, "nothing can be earned"),
        ("0*correct", 1, "nothing can be earned"),
        ("format - correct", 1, "correct cannot have a weight below 0"),
        ("no_such_module_anywhere:f", 1, "there is no module no_such_module_anywhere"),
        ("correct", 0, "task.max_reward = 0 must be a number above 0"),
        ("correct", float("inf"), "task.max_reward = inf must be a number above 0"),
    ],
)
def test_rewards_that_cannot_work_are_refused_at_once(mine, expression, max_reward, said):
    with pytest.raises(ValueError, match=said):
        made(expression, None, max_reward)


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"So it is \boxed{42}.", 1),
        (r"\boxed {\frac{1}{2}} and \fbox is nice", 1),
        (r"\fbox{\{1, 2\}}", 1),
        (r"\boxed{\boxed{42}}", 1),
        (r"<think>first \boxed{1}?</think> \boxed{2}", 1),
        (r"opened in the prompt: \boxed{1} </think>\boxed{2}", 1),
        ("<think>a</think><answer>\n1 2\n</answer>", 1),
        ("42", 0),
        (r"\boxed{}", 0),
        (r"\boxed{ }", 0),
        (r"\boxed{12", 0),
        (r"\boxed{1\}", 0),
        (r"\boxed{1} or \boxed{2}", 0),
        (r"\boxed{1} \boxed{2", 0),
        (r"<think>maybe \boxed{9}", 0),
        (r"<think>maybe \boxed{9}</think> yes", 0),
        (r"<think>a</think>b</think>\boxed{1}", 0),
        (r"<think>a<think>b</think>\boxed{1}", 0),
        (r"hm <think>b</think>\boxed{1}", 0),
        (r"\boxed{1}<think>late", 0),
        ("<answer>1</answer> <answer>2</answer>", 0),
        ("<answer>1", 0),
        ("1</answer>", 0),
        ("<answer><answer>1</answer></answer>", 0),
        (r"<answer>\boxed{1}</answer>", 0),
    ],
)
def test_format(text, reward):
    assert format_reward(text) == reward


def test_format_takes_linear_time_on_hostile_text():
    for text in (
        r"\boxed{" * 100_000,
        "<answer>" * 100_000,
        "<think>" * 100_000,
        r"\boxed{1}" * 100_000,
        "{" * 500_000,
    ):
        assert format_reward(text) == 0


def test_length():
    assert [length_share(n, 100) for n in (0, 50, 51, 75, 100, 130)] == [0, 0, Fraction(1, 50), Fraction(1, 2), 1, 1]
    assert length_share(2, 3) == Fraction(1, 3)
    assert length_share(1, 1) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_rubric_scores_that_are_equal_are_no_contrast_to_any_strategy(mine, name):
    strategy = STRATEGIES[name]()

    def weights(*texts):
        task = made(f"{mine}:sign")
        rewards = [reward_of(grade(task, text)) for text in texts]
        attempts = tuple(Attempt(reward, 0) for reward in rewards)
        prompt = task.prompts("train")[0]
        group = Group(prompt, attempts, len(rewards), sum(rewards), None, min(rewards), max(rewards), 1)
        return [weight for weight in strategy.weigh(group) if weight is not None]

    for texts in (["0.7"] * 4, ["0.7"] * 16, ["0.1"] * 6, ["0.95"] * 7):  # whose float means are off by a bit
        assert not any(weights(*texts))
    mixed = weights("0.7", "0.7", "0.7", "1.0")
    assert min(mixed) <= max(mixed)
    assert 0 < max(mixed) < 2  # only what is right is trained on by some
