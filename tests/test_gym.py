"""Data sets of reasoning-gym: the same prompts every time, none of them in both splits, scored as the package scores."""

import asyncio
import subprocess
import sys
from fractions import Fraction

import pytest

from nevergiveup.grading.pool import GraderPool
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.tasks.gym import INSTRUCTION, ReasoningGym, stated_answer
from nevergiveup.tasks.own import columns_of
from nevergiveup.types import NO_ANSWER, Completion, Score

pytest.importorskip("reasoning_gym")


def completion(text):
    return Completion((1,), (-0.1,), text, "stop", 0, 0)


@pytest.fixture(scope="module")
def sums():
    return ReasoningGym("chain_sum", 300, 7, {"min_terms": 3, "max_terms": 3})


def test_prompts_ask_for_the_answer_and_carry_the_entry(sums):
    prompt = sums.prompts("train")[0]
    entry = columns_of(prompt)
    assert prompt.messages == ({"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"},)
    assert entry["metadata"]["num_terms"] == 3
    with pytest.raises(ValueError, match="no split 'dev'"):
        sums.prompts("dev")


def test_the_same_seed_gives_the_same_prompts_in_every_process(sums):
    code = (
        "from nevergiveup.tasks.gym import ReasoningGym\n"
        "for name in ('chain_sum', 'word_ladder', 'list_functions'):\n"  # the others hang on a hash seed, a global generator
        "    task = ReasoningGym(name, 5, 7)\n"
        "    print([prompt.id for split in ('train', 'test') for prompt in task.prompts(split)])"
    )
    printed = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 3


def test_no_problem_is_there_twice_nor_in_both_splits(sums):
    ids = [prompt.id for split in ("train", "test") for prompt in sums.prompts(split)]
    assert len(set(ids)) == len(ids)
    assert (len(sums.prompts("train")), len(sums.prompts("test"))) == (
        300,
        99,
    )  # one of the test split was known already
    few = ReasoningGym("coin_flip", 40, 0, {"min_trials": 3, "max_trials": 3})  # few different ones
    train, test = few.prompts("train"), few.prompts("test")
    assert 0 < len(train) < 40
    assert {p.messages[0]["content"] for p in train}.isdisjoint(p.messages[0]["content"] for p in test)
    assert [p.id for p in ReasoningGym("chain_sum", 10, 8).prompts("train")] != ids[:10]


def test_the_stated_answer_is_scored_in_a_worker_and_partly_right_stays_so(sums):
    prompt = sums.prompts("train")[0]
    gold = prompt.answer["answer"]
    texts = [
        f"<answer>1</answer> no: <answer> {gold}\n</answer>",
        "<answer>no idea</answer>",
        f"It is {gold}",
        f"<answer>{gold} m</answer>",
    ]
    with GraderPool(1, timeout_s=5) as pool:
        grades = asyncio.run(TaskGrader(sums, pool).grade(prompt, [completion(text) for text in texts]))
    assert grades[:3] == [Score(1, "right", gold), Score(0, "wrong", "no idea"), Score(0, NO_ANSWER)]
    assert reward_of(grades[3]) == Fraction(len(gold) / (len(gold) + 2))
    assert grades[3].reason == "partly right"


def test_data_sets_without_a_single_answer_are_scored_by_their_rule():
    task = ReasoningGym("graph_color", 3, 0, {"min_num_vertices": 4, "max_num_vertices": 4})
    prompt = task.prompts("train")[0]
    entry = columns_of(prompt)
    assert entry["answer"] is None
    possible = entry["metadata"]["possible_answer"]
    text = "{" + ", ".join(f'"{vertex}": {colour}' for vertex, colour in possible.items()) + "}"
    right, wrong = asyncio.run(
        TaskGrader(task).grade(prompt, [completion(f"<answer>{answer}</answer>") for answer in (text, "{}")])
    )
    assert (right.reward, wrong.reward < 1) == (1, True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 1\n2 </answer>", "1\n2"),
        ("<answer>1</answer><answer>2</answer> done", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("1</answer>", None),
        ("<answer>1", None),
        ("", None),
    ],
)
def test_stated_answer(text, answer):
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chain_sun",), "task.dataset = 'chain_sun' is no data set of reasoning-gym: did you mean chain_sum"),
        (("xyzzy",), "is no data set of reasoning-gym: there are .*, as chain_sum"),
        (
            ("chain_sum", 10, 0, {"min_term": 3}),
            "task.options = .*unexpected.*'min_term' .options of chain_sum: min_terms, ",
        ),
        (("chain_sum", 10, 0, {"min_terms": 9}), "max_terms must be >= min_terms"),
        (("chain_sum", 10, 0, {"size": 5}), "task.options must not have 'size'"),
    ],
)
def test_what_the_package_does_not_know_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        ReasoningGym(*arguments)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='reasoning_gym')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"pip install 'nevergiveup\[reasoning-gym\]'"):
        ReasoningGym("chain_sum")
