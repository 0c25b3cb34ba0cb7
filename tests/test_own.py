"""What a user brings: rows, reward functions and whole tasks. It is found at once, or refused in clear words."""

import asyncio
import json
import os
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from nevergiveup.grading.pool import GraderPool
from nevergiveup.loop import InPlace, TaskGrader, reward_of
from nevergiveup.tasks import own
from nevergiveup.tasks.own import Own, call, columns_of, facts_of, load_function, load_task
from nevergiveup.types import Completion, Prompt, Score, Unverified

EXAMPLES = Path(__file__).parents[1] / "examples"


def completion(text, n_tokens=3, finish="stop"):
    return Completion((1,) * n_tokens, (-0.1,) * n_tokens, text, finish, 0, 0)


def grades(task, prompt, *texts, checker=None):
    return asyncio.run(TaskGrader(task, checker).grade(prompt, [completion(text) for text in texts]))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    load_function.cache_clear()
    own._there.cache_clear()


def write_rows(folder, *rows, name="my.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------------ rows


def test_rows_become_prompts_with_every_column_kept(here):
    rows = [
        {"prompt": "2+2?", "answer": 4, "level": "easy"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "3+3?"}], "gold": "6"},
    ]
    first, second = Own(write_rows(here, *rows), instruction="Box it.").prompts("train")
    assert first.messages == ({"role": "user", "content": "2+2?\n\nBox it."},)
    assert second.messages == tuple(rows[1]["messages"])
    assert columns_of(first) == rows[0]
    assert columns_of(second) == rows[1] | {"answer": "6"}


def test_without_a_reward_rows_are_graded_as_mathematics(here):
    task = Own(write_rows(here, {"question": "2+2?", "answer": "4"}))
    (prompt,) = task.prompts("train")
    assert [grade.reward for grade in grades(task, prompt, r"\boxed{4}", r"\boxed{5}")] == [1, 0]
    assert prompt.answer.numeral
    assert task.prompts("test") == []
    assert len(task.canaries()) > 0


def test_answers_are_wanted_only_where_something_is_compared_with_them(here):
    source = write_rows(here, {"prompt": "a"}, {"prompt": "b", "answer": ""})
    with pytest.raises(ValueError, match=r"line 1: no answer .*\n.*line 2: empty answer"):
        Own(source).prompts("train")
    task = Own(source, needs_answer=False)
    first, second = task.prompts("train")
    assert columns_of(first) == {"prompt": "a"}
    assert columns_of(second)["answer"] == ""
    asyncio.run(task.validate(InPlace()))
    assert (len(task.prompts("train")), task.canaries()) == (2, [])
    with pytest.raises(ValueError, match="give a reward"):
        task.grade(first, completion("x"))


def test_answers_that_nothing_could_be_compared_with_are_listed_and_left_out(here):
    rows = [{"prompt": f"{i}+0?", "answer": i} for i in range(30)]
    task = Own(write_rows(here, *rows, {"prompt": "x", "answer": "{{{"}))
    asyncio.run(task.validate(InPlace()))
    assert len(task.prompts("train")) == 30
    assert [(row.where.rpartition(", ")[2], row.answer) for row in task.excluded] == [("line 31", "{{{")]


def test_no_data_and_no_such_split_are_refused(here):
    with pytest.raises(ValueError, match=r"task\.data is empty"):
        Own("")
    with pytest.raises(ValueError, match="no split 'dev'"):
        Own("x.jsonl").prompts("dev")


# ------------------------------------------------------------------------------------------------ functions


def graded(name, prompt=None, text="some text", low=None, high=1):
    check = load_function(name).check(prompt or Prompt("p", answer="a"), completion(text), low, high)
    return check.function(*check.arguments)


def test_a_function_is_called_with_what_it_names(here):
    (here / "mine.py").write_text(
        "seen = []\n"
        "def some(completion, level, *, missing=7): seen.append((completion, level, missing)); return True\n"
        "def all_of_it(**facts): seen.append(facts); return 0.5\n"
    )
    source = write_rows(here, {"prompt": "2+2?", "solution": "4", "level": 3, "finish": "column"})
    (prompt,) = Own(source, needs_answer=False).prompts("train")
    assert graded("mine:some", prompt) == 1
    assert graded("mine:all_of_it", prompt) == Fraction(1, 2)
    some, everything = sys.modules["mine"].seen
    assert some == ("some text", 3, 7)
    assert everything == {
        "prompt": "2+2?",
        "messages": [{"role": "user", "content": "2+2?"}],
        "completion": "some text",
        "answer": "4",
        "solution": "4",
        "level": 3,
        "finish": "stop",
        "n_tokens": 3,
    }


def test_the_prompt_is_the_last_message_of_the_user(here):
    chat = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"})
    assert facts_of(Prompt("p", chat), completion("x"))["prompt"] == "3"


def test_what_a_function_returns_becomes_a_grade(here):
    (here / "mine.py").write_text(
        "import asyncio\n"
        "from nevergiveup.types import Score, Unverified\n"
        "values = {'true': True, 'half': 0.5, 'none': None, 'nan': float('nan'), 'text': '1', 'list': [1],\n"
        "          'much': 1.5, 'huge': 10**400, 'less': -3, 'parts': {'a': 0.1, 'b': 0.2, 'c': 0.7},\n"
        "          'bad part': {'a': None}, 'score': Score(0.25, 'why', 'x'), 'no': Unverified('no idea'),\n"
        "          'nearly': 0.1 + 0.2 + 0.7 - 1e-12}\n"
        "def reward(completion): return values[completion]\n"
        "async def slowly(completion):\n    await asyncio.sleep(0)\n    return 0.25\n"
    )
    grade = {
        key: graded("mine:reward", text=key) for key in (*("true", "half", "less", "score", "no", "parts", "nearly"),)
    }
    assert (grade["true"], grade["half"], grade["less"]) == (1, Fraction(1, 2), -3)
    assert grade["score"] == Score(Fraction(1, 4), "why", "x")
    assert grade["no"] == Unverified("no idea")
    assert grade["parts"] == Score(1, parts={"a": 0.1, "b": 0.2, "c": 0.7})  # 0.1 + 0.2 + 0.7 is not quite 1
    assert grade["nearly"] == 1
    assert graded("mine:slowly") == Fraction(1, 4)
    assert graded("mine:reward", text="much", high=2) == Fraction(3, 2)
    reasons = {
        key: graded("mine:reward", text=key) for key in ("none", "nan", "text", "list", "much", "huge", "bad part")
    }
    reasons["negative"] = graded("mine:reward", text="less", low=0)
    assert all(isinstance(reason, Unverified) for reason in reasons.values())
    last = {key: reason.reason.rpartition("\n")[2] for key, reason in reasons.items()}
    assert last["none"] == "mine:reward cannot decide: it returned None"
    for key in ("nan", "text", "list", "bad part"):
        assert last[key] == "mine:reward returned no finite number, nor a dict of them"
    for key in ("much", "huge"):
        assert last[key] == "mine:reward returned more than task.max_reward = 1"
    assert last["negative"] == "mine:reward returned less than 0, which its weight forbids"
    assert reasons["much"].reason.startswith("1.5\n")


def test_a_function_is_found_in_a_file_beside_its_own_modules(here):
    (here / "sub dir").mkdir()
    (here / "sub dir" / "rules.py").write_text("import helper\ndef f(completion): return helper.VALUE\n")
    (here / "sub dir" / "helper.py").write_text("VALUE = 0.25\n")
    assert graded("sub dir/rules.py:f") == Fraction(1, 4)
    assert graded(f"{here}/sub dir/rules.py:f") == Fraction(1, 4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_reward", r"task.reward = 'my_reward' is not my_module:my_reward \(or path/to/file.py:my_reward\)"),
        ("a:b:", "is not my_module:my_reward"),
        ("mime:reward", "there is no module mime in .*; did you mean mine"),
        ("mine.deeper:reward", "there is no module mine.deeper|importing mine.deeper fails"),
        ("no/such.py:f", "there is no file no/such.py"),
        ("mine:rewrad", "mine has no rewrad; did you mean reward?"),
        ("mine:NUMBER", "is no function but int: name a function"),
        ("mine:by_position", "takes completion by position only"),
        ("needy:f", "importing needy fails: No module named 'not_there_at_all'; install what it needs"),
        ("broken:f", r"importing broken fails in .*broken.py, line 2: ZeroDivisionError: division by zero"),
        ("unwritten:f", "importing unwritten fails .*SyntaxError"),
        ("leaves:f", "importing leaves fails .*SystemExit"),
        ("opens:f", "importing opens fails: .*nowhere.txt"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_at_once(here, name, said):
    (here / "mine.py").write_text("NUMBER = 3\ndef reward(completion): ...\ndef by_position(completion, /): ...\n")
    (here / "needy.py").write_text("import not_there_at_all\n")
    (here / "broken.py").write_text("def f(): ...\n1 / 0\n")
    (here / "unwritten.py").write_text("def f(:\n")
    (here / "leaves.py").write_text("raise SystemExit(3)\n")
    (here / "opens.py").write_text("open('nowhere.txt')\n")
    with pytest.raises(ValueError, match=said):
        load_function(name)


def test_functions_run_in_workers_that_are_killed_and_import_without_a_clock(here, monkeypatch):
    (here / "mine.py").write_text(
        "import os, time\n"
        "if os.environ.get('HERE') != str(os.getpid()): time.sleep(1.2)  # a heavy import, in the worker\n"
        "def reward(completion):\n"
        "    if completion == 'sleep': time.sleep(10**6)\n"
        "    if completion == 'raise': raise RuntimeError('boom')\n"
        "    return {'1': 1, '0': 0}[completion]\n"
        "async def slowly(completion): return 0.5\n"
    )

    class Ruled:
        name = "mine:reward"

        def prompts(self, split):
            return []

        def grade(self, prompt, completion):
            return load_function(self.name).check(prompt, completion, None, 1)

    monkeypatch.setenv("HERE", str(os.getpid()))
    with GraderPool(2, timeout_s=0.6) as pool:
        right, sleeps, raises, wrong = grades(Ruled(), Prompt("p"), "1", "sleep", "raise", "0", checker=pool)
        Ruled.name = "mine:slowly"
        assert grades(Ruled(), Prompt("p"), "x", checker=pool) == [Fraction(1, 2)]
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert (right, wrong) == (1, 0)
    assert isinstance(sleeps, Unverified)
    assert "timeout" in sleeps.reason or "0.6 s" in sleeps.reason
    assert raises.reason.strip().endswith("RuntimeError: boom")


# ------------------------------------------------------------------------------------------------ tasks

TASK = """
from nevergiveup.types import Prompt, Score
made = 0
class MyTask:
    def __init__(self):
        global made
        made += 1
        self.number = made
    def prompts(self, split):
        return [Prompt(f"{split} {i}", answer=str(i)) for i in range(3)]
    def grade(self, prompt, completion):
        if completion.text == "sleep":
            import time; time.sleep(10**6)
        return Score(int(completion.text == prompt.answer), answer=str(self.number))
    def canaries(self):
        return [("p", "c", 1)]
class Instant(MyTask):
    instant = True
class NoGrade:
    prompts = MyTask.prompts
class Twice(MyTask):
    def prompts(self, split): return [Prompt("same"), Prompt("same")]
class Texts(MyTask):
    def prompts(self, split): return ["hello"]
class Wants(MyTask):
    def __init__(self, path): ...
def function(): ...
"""


def test_a_task_of_ones_own_is_graded_in_a_worker_that_makes_it_once(here):
    (here / "my_task.py").write_text(TASK)
    task = load_task("my_task:MyTask")
    prompts = task.prompts("train")
    assert [prompt.id for prompt in prompts] == ["train 0", "train 1", "train 2"]
    assert task.canaries() == [("p", "c", 1)]
    with GraderPool(1, timeout_s=0.5) as pool:
        wrong, right, sleeps, again = grades(task, prompts[1], "0", "1", "sleep", "1", checker=pool)
    assert (wrong, right, again) == (Score(0, answer="1"), Score(1, answer="1"), Score(1, answer="1"))
    assert isinstance(sleeps, Unverified)


def test_an_instant_task_is_called_as_it_is(here):
    (here / "my_task.py").write_text(TASK)
    task = load_task("my_task:Instant")
    assert type(task).__name__ == "Instant"
    assert grades(task, task.prompts("train")[2], "2", "x") == [Score(1, answer="1"), Score(0, answer="1")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_task:MyTsk", "task.target = 'my_task:MyTsk': my_task has no MyTsk; did you mean MyTask?"),
        ("my_task:NoGrade", "has no grade: write prompts"),
        ("my_task:function", "is no class"),
        ("my_task:Wants", "must be made without arguments: .*path"),
        ("my_task:Twice", r"two prompts of 'train' have the same id"),
        ("my_task:Texts", r"prompts\('train'\) must return nevergiveup Prompts, not 'hello'"),
        ("my_task", "is not my_module:MyTask"),
    ],
)
def test_tasks_that_cannot_be_used_are_refused_at_once(here, name, said):
    (here / "my_task.py").write_text(TASK)
    with pytest.raises(ValueError, match=said):
        load_task(name).prompts("train")


# ------------------------------------------------------------------------------------------------ examples


def test_the_example_of_a_task():
    task = load_task(f"{EXAMPLES}/my_task.py:MyTask")
    train, test = task.prompts("train"), task.prompts("test")
    assert len(train) == len(test) == 200
    assert [prompt.id for prompt in train] == [
        prompt.id for prompt in load_task(f"{EXAMPLES}/my_task.py:MyTask").prompts("train")
    ]
    right = train[0].answer
    assert [reward_of(grade) for grade in grades(task, train[0], f" {right}\n", right[::-1], "")] == [1, 0, 0]
    assert grades(task, train[199], train[199].answer[:4])[0].reward == Fraction(4 / 5)


def test_the_example_of_a_reward():
    prompts = Own(f"{EXAMPLES}/my_rows.jsonl", needs_answer=False).prompts("train")
    tower = prompts[1]
    name = f"{EXAMPLES}/my_reward.py:my_reward"
    assert [float(graded(name, tower, text)) for text in ("about 325 m", "350", "no idea")] == [1, 1 / 22, 0]
    assert len(prompts) == 5
    assert call(load_function(name), {"completion": "391.0", "answer": 391}, None, 1) == 1


def test_the_page_about_tasks_shows_what_the_examples_are():
    page = (EXAMPLES.parent / "docs" / "tasks.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert any(block in (EXAMPLES / name).read_text() for name in ("my_reward.py", "my_task.py")), block
    assert page.count("```python") == 2
