"""Single-turn environments of the package verifiers, 0.4: real ones, written here; all others are refused by name."""

import asyncio
import sys
import textwrap
import zlib
from fractions import Fraction

import pytest

from nevergiveup.grading.pool import GraderPool
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.tasks.environments import VerifiersEnvironment, split_thoughts
from nevergiveup.tasks.own import columns_of
from nevergiveup.types import Completion, Unverified

pytest.importorskip("verifiers.v1")

HEAD = """
import asyncio, os, time
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Config(vf.TasksetConfig):
    n: int = 30
"""

GOOD = (
    HEAD
    + """
class Sum(vf.Task[Data]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "sleep":
            time.sleep(10**6)
        if trace.last_reply == "raise":
            raise RuntimeError("boom")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, task, trace) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"brief": 1.0 if len(trace.last_reply) < 4 else 0.5}

    @vf.metric
    async def turns(self, trace) -> float:
        assert [m.role for m in trace.messages] == ["system", "user", "assistant"]
        assert trace.num_turns == 1
        return float(trace.is_truncated)

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.n):
            yield Sum(Data(prompt=f"{i} + {i}?", system_prompt="Add.", answer=str(2 * i)), self.config.task)

__all__ = ["Sums"]
"""
)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Writes the package of an environment."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)

    def write(name, code):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(textwrap.dedent(code))
        return name

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def completion(text, finish="stop"):
    return Completion((1,), (-0.1,), text, finish, 0, 0)


def test_a_single_turn_environment_gives_prompts_and_is_scored_in_a_worker(environment):
    task = VerifiersEnvironment(environment("sums_env", GOOD).replace("_", "-"), {"n": 25})
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (23, 2)
    prompt = train[3]
    assert prompt.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 3?"})
    assert columns_of(prompt)["answer"] == "6"
    assert {prompt.max_reward for prompt in train} == {Fraction(0.8) + Fraction(0.2)}
    again = VerifiersEnvironment("sums-env", {"n": 26})
    assert [prompt.id for prompt in again.prompts("train")][:23] == [prompt.id for prompt in train]

    with GraderPool(1, timeout_s=1) as pool:
        texts = ["6", "<think>3 and 3</think>\n6", "seven", "sleep", "raise", "6"]
        grades = asyncio.run(TaskGrader(task, pool).grade(prompt, [completion(text, "length") for text in texts]))
    right, thought, wrong, sleeps, raises, again = grades
    assert right.parts == {"right": 1.0, "brief": 1.0}
    assert reward_of(right) == reward_of(thought) == reward_of(again) == prompt.max_reward
    assert reward_of(wrong) == Fraction(0.2) / 2
    assert isinstance(sleeps, Unverified)
    assert "boom" in raises.reason


def test_tasks_without_end_are_cut_and_equal_ones_are_taken_once(environment):
    endless = """
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield Sum(Data(prompt=f"{i % 600}?", system_prompt="Add.", answer="1"), self.config.task)
"""
    code = "import itertools\n" + GOOD.replace("__all__", f"class Base(Sums):{endless}\n__all__").replace(
        '["Sums"]', '["Base"]'
    )
    task = VerifiersEnvironment(environment("endless_env", code))
    asked = [prompt.messages[1]["content"] for split in ("train", "test") for prompt in task.prompts(split)]
    assert len(asked) == len(set(asked)) == 600


TOOLS = "    @classmethod\n    def toolsets(cls, config):\n        return [vf.Toolset(vf.ToolsetConfig())]\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("class Sum(vf.Task[Data]):\n", f"class Sum(vf.Task[Data]):\n{TOOLS}"), "it gives the policy tools"),
        (("    def load", f"{TOOLS}    def load"), "it gives the policy tools"),
        (("class Sum(vf.Task[Data]):\n", "class Sum(vf.Task[Data]):\n    NEEDS_CONTAINER = True\n"), "its tasks need a cont"),
        (
            ("    @vf.metric", "    async def setup(self, trace, runtime): ...\n    @vf.metric"),
            "its tasks have a setup that needs a running machine",
        ),
        (
            ("    @vf.metric", "    @vf.reward\n    async def ran(self, trace, runtime): ...\n    @vf.metric"),
            "its reward ran needs a running machine",
        ),
        (
            ("    @vf.metric", "    @vf.stop\n    async def enough(self, trace): ...\n    @vf.metric"),
            "its enough steers a conversation",
        ),
        (
            ("    @vf.metric", "    @vf.intercept\n    async def edit(self, request: vf.Request): ...\n    @vf.metric"),
            "its edit steers a conversation",
        ),
        (("prompt=f", "name=f"), "its task 0 has no prompt: a simulated user would have to begin"),
        (
            ('prompt=f"{i} + {i}?"', 'prompt=[vf.ToolMessage(tool_call_id="1", content="x")]'),
            "its task 0 has pictures or tool calls in its prompt",
        ),
        (
            ('__all__ = ["Sums"]', 'class Duel(vf.Env[vf.SingleAgentEnvConfig]):\n    async def run(self, task, agents): ...\n'
             '__all__ = ["Sums", "Duel"]'),
            r"it brings a way of its own for agents to interact \(Duel\)",
        ),
        (
            ('__all__ = ["Sums"]', "from verifiers.v1.harnesses.null import NullHarness\n"
             'class Agent(NullHarness): ...\n__all__ = ["Sums", "Agent"]'),
            r"it brings an agent program \(harness\) of its own",
        ),
    ],
    ids=[
        "tools", "shared tools", "container", "setup", "runtime", "stop", "intercept", "no prompt", "tool message",
        "own env", "own harness",
    ],
)  # fmt: skip
def test_what_is_not_single_turn_is_refused_by_kind(environment, change, said):
    assert change[0] in GOOD
    name = environment(f"refused_env_{zlib.crc32(change[1].encode())}", GOOD.replace(*change))
    with pytest.raises(ValueError, match=f"task.environment = '{name}' is not a single-turn environment: {said}"):
        VerifiersEnvironment(name)


def test_other_trouble_is_named(environment):
    with pytest.raises(ValueError, match=r"task.environment = 'no-such-env' cannot be loaded: .*not found"):
        VerifiersEnvironment("no-such-env")
    with pytest.raises(ValueError, match=r"needy_env.*cannot be loaded: .*No module named 'not_there_at_all'"):
        VerifiersEnvironment(environment("needy_env", "import not_there_at_all"))
    with pytest.raises(ValueError, match=r"is no environment of verifiers 0.4 or newer: .*__all__"):
        VerifiersEnvironment(environment("old_env", "def load_environment(): ..."))
    name = environment("plain_env", GOOD)
    with pytest.raises(ValueError, match=r"task.options = .*m: .*options of plain_env: task, system_prompt, n"):
        VerifiersEnvironment(name, {"m": 3})
    with pytest.raises(ValueError, match=r"task.options = .*n: .*integer"):
        VerifiersEnvironment(name, {"n": "many"})
    with pytest.raises(ValueError, match="has no tasks"):
        VerifiersEnvironment(name, {"n": 0})
    unrewarded = environment(
        "unrewarded_env", GOOD.replace("@vf.reward(weight=0.8)", "").replace("weight=0.2", "weight=0.0")
    )
    with pytest.raises(ValueError, match="has no reward that can be earned"):
        VerifiersEnvironment(unrewarded)


def test_more_than_the_weights_is_no_verdict(environment):
    name = environment("generous_env", GOOD.replace("return float(trace", "return 3 * float(trace"))
    prompt = (task := VerifiersEnvironment(name, {"n": 2})).prompts("train")[1]
    check = task.grade(prompt, completion("2"))
    grade = check.function(*check.arguments)
    assert grade.reason.endswith("the rewards come to more than their weights, 1: each must be at most 1")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", (None, "plain")),
        ("<think>a</think> b", ("a", "b")),
        ("opened before</think>b", ("opened before", "b")),
        (" <think>never closed", ("never closed", "")),
        ("<think></think>b", ("", "b")),
    ],
)
def test_thoughts_and_reply(text, parts):
    assert split_thoughts(text) == parts


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(
        ValueError, match=r"needs the package verifiers, 0.4 or newer .*pip install 'nevergiveup\[verifiers\]'"
    ):
        VerifiersEnvironment("any")
