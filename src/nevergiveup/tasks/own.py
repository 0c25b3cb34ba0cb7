"""What a user brings: the task `own` (rows of one's own), reward functions, and whole tasks, by the names of their modules.

Layer 3. Standard library only.

    Own(data)                              rows with a prompt, graded as mathematics, or only by reward functions
    load_function("my_module:my_reward")   a reward function; also "path/to/file.py:my_reward"
    load_task("my_module:MyTask")          a task: a class with `prompts` and `grade`

Whatever a user's code does, it does in a worker process that can be killed. It is imported there before the clock of a check
starts. A reward function is called with keyword arguments, of these only those that it names (all with `**kwargs`):

    prompt      text of the last user message           completion   text that the policy wrote
    messages    the whole chat                          finish       "stop", or "length" where it was cut
    answer      the answer of the row                   n_tokens     length of the completion
    and every column of the row by its name, unless it is one of these

and returns a number, None when it cannot decide, a dict of named parts, which are summed, a Score or an Unverified.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from math import fsum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nevergiveup.grading.math import grade_math
from nevergiveup.loop import reward_of
from nevergiveup.protocols import Checker, SelfTested, Task
from nevergiveup.tasks.math import Gold, Math, gold_of, valid, with_numerals
from nevergiveup.tasks.rows import (
    ANSWER_KEYS,
    QUESTION_KEYS,
    Chat,
    Row,
    chat_of,
    check_excluded,
    make_prompts,
    read_rows,
    value_of,
)
from nevergiveup.types import Check, Completion, Exact, Excluded, Grade, Prompt, Score, Sum, Unverified, exact

FACTS = ("prompt", "messages", "completion", "finish", "n_tokens")
"""What a reward function can ask for besides `answer` and the columns of the row."""

ROUNDING = Fraction(1, 10**9)
"""A reward this close (relative) to the best one is the best one: 0.1 + 0.2 + 0.7 in floating point is solved, too."""

REWARD_KEY, TASK_KEY = "task.reward", "task.target"


# ------------------------------------------------------------------------------------------------ rows of one's own


class Given(NamedTuple):
    """The answer of a prompt. text, numeral: as of `math.Gold`. columns: the whole row, with `answer` under that name."""

    text: str = ""
    numeral: bool = False
    columns: Mapping[str, Any] = {}


class Own:
    """The task own: rows from a file or a Hugging Face data set (see `tasks.rows.read_rows`), graded as mathematics.

    A row has a question ("question", "prompt", "problem": a text, or "messages": a chat), an answer ("answer", "solution",
    "gold", "expected_answer"), and any other columns. instruction: text that goes below every question that is a text.
    needs_answer: False where only reward functions are to score (see `reward_terms.WithReward`): then no row needs an answer.

    excluded: the rows that `validate` has left out, because nothing could be compared with their answer.
    """

    def __init__(
        self,
        data: str,
        test_data: str = "",
        *,
        instruction: str = "",
        needs_answer: bool = True,
        allow_unverifiable: bool = False,
    ) -> None:
        if not data:
            raise ValueError("task.data is empty: name a file or a Hugging Face data set, as in --data my.jsonl")
        self.excluded: list[Excluded] = []
        self._sources = {"train": data, "test": test_data}
        self._instruction = instruction
        self._needs_answer = needs_answer
        self._allow_unverifiable = allow_unverifiable
        self._prompts: dict[str, list[Prompt]] = {}
        self._where: dict[str, str] = {}

    def prompts(self, split: str) -> list[Prompt]:
        if split not in self._sources:
            raise ValueError(f"own has no split {split!r}: use one of {', '.join(self._sources)}")
        if split not in self._prompts:
            self._prompts[split] = self._read(self._sources[split])
        return self._prompts[split]

    def _read(self, source: str) -> list[Prompt]:
        if not source:
            return []
        made = make_prompts(read_rows(source), source, self._row, allow_unverifiable=self._allow_unverifiable)
        self.excluded += made.excluded
        self._where |= made.where
        return with_numerals(made.prompts) if self._needs_answer else made.prompts

    def _row(self, row: Row) -> tuple[Chat, Given]:
        messages = chat_of(value_of(row, QUESTION_KEYS, "question"), self._asked)
        gold = gold_of(value_of(row, ANSWER_KEYS, "answer")) if self._needs_answer else Gold("")
        columns = dict(row.values)
        if key := next((key for key in ANSWER_KEYS if key in columns), None):
            columns["answer"] = columns[key]
        return messages, Given(*gold, columns)

    def _asked(self, question: str) -> Chat:
        content = f"{question}\n\n{self._instruction}" if self._instruction else question
        return ({"role": "user", "content": content},)

    async def validate(self, checker: Checker) -> None:
        """Leaves out the prompts whose answer would not be recognised itself. Raises ValueError when they are many."""
        if not self._needs_answer:
            return
        for split, source in self._sources.items():
            prompts = self.prompts(split)
            self._prompts[split], excluded = await valid(prompts, self._where, checker)
            self.excluded += excluded
            if prompts:
                check_excluded(excluded, len(prompts), source, self._allow_unverifiable)

    def grade(self, prompt: Prompt, completion: Completion) -> Score | Check:
        if not self._needs_answer:
            raise ValueError(
                "the rows of this task need no answers, so nothing can be compared with them: give a reward"
            )
        given: Given = prompt.answer
        return grade_math(given.text, completion.text, numeral=given.numeral)

    def canaries(self) -> list[tuple[Prompt, Completion, int]]:
        return Math().canaries() if self._needs_answer else []


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What a task keeps of a row for its grader, by name; at least `answer`, where there is one."""
    answer = prompt.answer
    columns = getattr(answer, "columns", answer)
    if isinstance(columns, Mapping):
        return dict(columns)
    return {"answer": answer.text if isinstance(answer, Gold) else answer}


def facts_of(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """The keyword arguments that a reward function can have (see the top of this file)."""
    asked = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return columns_of(prompt) | {
        "prompt": asked[-1] if asked else "",
        "messages": [dict(message) for message in prompt.messages],
        "completion": completion.text,
        "finish": completion.finish,
        "n_tokens": len(completion.tokens),
    }


# ------------------------------------------------------------------------------------------------ functions of one's own


class Function:
    """A user's function, found by `load_function`.

    It travels between processes by its name, and is imported over there while it is unpacked: before the clock of a check
    starts. required: parameters that it must be given.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise ValueError(f"{REWARD_KEY}: the parameters of {name} cannot be found out: wrap it in a def") from None
        if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise ValueError(
                f"{REWARD_KEY}: {name} takes {', '.join(positional)} by position only; it is called with keyword arguments"
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = frozenset(p.name for p in named if p.default is p.empty)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = None if takes_all else frozenset(p.name for p in named)

    def __reduce__(self) -> tuple[Callable[[str], Function], tuple[str]]:
        return load_function, (self.name,)

    def picked(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the facts that the function asks for."""
        return {name: value for name, value in facts.items() if self._named is None or name in self._named}

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        """What it returns; of an async function, what it comes to."""
        value = self._function(**self.picked(facts))
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    def check(self, prompt: Prompt, completion: Completion, low: Exact | None, high: Exact) -> Check:
        """Its grade of a completion, still to be worked out; outside [low, high] there is no verdict."""
        return Check(call, (self, self.picked(facts_of(prompt, completion)), low, high))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def call(function: Function, facts: Mapping[str, Any], low: Exact | None, high: Exact) -> Grade:
    """The grade that a user's function gives. Runs in a worker. The last line of a reason is the same for the same cause."""
    value = function(facts)
    if value is None:
        return Unverified(f"{function.name} cannot decide: it returned None")
    if isinstance(value, Unverified):
        return value
    score = value if isinstance(value, Score) else None
    try:
        if isinstance(value, Mapping):
            parts = {str(name): float(part) for name, part in value.items()}
            score = Score(fsum(parts.values()), parts=parts)  # rounded once, whatever the order
        reward = reward_of(score if score is not None else value)
    except (TypeError, ValueError):
        return Unverified(f"{value!r:.200}\n{function.name} returned no finite number, nor a dict of them")
    if abs(Fraction(reward) - high) <= ROUNDING * Fraction(high):
        reward = high
    if reward > high:
        return Unverified(f"{value!r:.200}\n{function.name} returned more than task.max_reward = {float(high):g}")
    if low is not None and reward < low:
        return Unverified(
            f"{float(reward)}\n{function.name} returned less than {float(low):g}, which its weight forbids"
        )
    return reward if score is None else replace(score, reward=reward)


@cache
def load_function(name: str) -> Function:
    """The function "my_module:my_function" or "path/to/file.py:my_function". Modules in the current directory are found.

    Raises ValueError for a name that leads nowhere, a module that fails, and a thing that cannot be called by keywords.
    """
    function = _load(name, REWARD_KEY, "my_module:my_reward")
    if not callable(function):
        raise ValueError(f"{REWARD_KEY} = {name!r} is no function but {type(function).__name__}: name a function")
    return Function(name, function)


def _load(name: str, key: str, example: str) -> Any:
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise ValueError(f"{key} = {name!r} is not {example} (or path/to/file.py:{example.partition(':')[2]})")
    module = _module(where, name, key)
    if not hasattr(module, attribute):
        raise ValueError(f"{key} = {name!r}: {where} has no {attribute}{_meant(attribute, _own_names(module))}")
    return getattr(module, attribute)


def _module(where: str, name: str, key: str) -> ModuleType:
    folder = os.getcwd()
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        return _file_module(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        if not where.endswith(".py") or Path(where).exists():
            raise ValueError(f"{key} = {name!r}: importing {where} fails: {error}") from error
        raise ValueError(f"{key} = {name!r}: there is no file {where}") from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise ValueError(f"{key} = {name!r}: importing {where} fails: {error}; install what it needs") from error
        near = _meant(where, [path.stem for path in Path().glob("*.py")])
        raise ValueError(
            f"{key} = {name!r}: there is no module {where} in {folder} or among the installed packages{near}"
        ) from None
    except (Exception, SystemExit) as error:  # whatever its top level raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{key} = {name!r}: importing {where} fails in {place.filename}, line {place.lineno}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _file_module(path: Path) -> ModuleType:
    name = str(path)  # no other module has it
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever the file raises: half a module must not be found by the next import
        del sys.modules[name]
        raise
    return module


def _own_names(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _meant(wrong: str, right: Sequence[str]) -> str:
    near = get_close_matches(wrong, right, n=1)
    return f"; did you mean {near[0]}?" if near else ""


# ------------------------------------------------------------------------------------------------ tasks of one's own


class Custom:
    """A task whose class is the user's: its `grade` runs in a worker, where another instance of the class is made once."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.task = task
        self._prompts: dict[str, list[Prompt]] = {}

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return _there, (self.name,)

    def prompts(self, split: str) -> list[Prompt]:
        if split not in self._prompts:
            prompts = list(self.task.prompts(split))
            if wrong := next((prompt for prompt in prompts if not isinstance(prompt, Prompt)), None):
                raise ValueError(
                    f"{TASK_KEY} = {self.name!r}: prompts({split!r}) must return nevergiveup Prompts, not {wrong!r:.80}"
                )
            if len({prompt.id for prompt in prompts}) < len(prompts):
                raise ValueError(f"{TASK_KEY} = {self.name!r}: two prompts of {split!r} have the same id")
            self._prompts[split] = prompts
        return self._prompts[split]

    def grade(self, prompt: Prompt, completion: Completion) -> Check:
        light = replace(completion, top_ids=None, top_logprobs=None)  # the bulk of it, and of no use there
        return Check(_grade_there, (self, replace(prompt, tokens=()), light))

    def canaries(self) -> Sequence[tuple[Prompt, Completion, Exact]]:
        return self.task.canaries() if isinstance(self.task, SelfTested) else ()


def _grade_there(custom: Custom, prompt: Prompt, completion: Completion) -> Grade:
    grade = custom.task.grade(prompt, completion)
    if isinstance(grade, Check | Sum):
        raise TypeError(
            f"{custom.name}: its grade returned a {type(grade).__name__}: set `instant = True` in the class, and what it "
            "returns is worked out as it is for other tasks"
        )
    return grade


@cache
def _there(name: str) -> Custom:
    return Custom(name, _instance(name))


def load_task(name: str) -> Task:
    """The task of the class "my_module:MyTask" (or "path/to/file.py:MyTask"), made without arguments.

    Its `grade` is run in killable workers, unless the class says `instant = True`: then it is called as it is, in the main
    process, and may return a Check or a Sum itself. Raises ValueError for a name that leads nowhere, and for a class that
    lacks a method.
    """
    task = _instance(name)
    return task if getattr(task, "instant", False) else Custom(name, task)


def _instance(name: str) -> Task:
    made = _load(name, TASK_KEY, "my_module:MyTask")
    if not isinstance(made, type):
        raise ValueError(f"{TASK_KEY} = {name!r} is no class: name a class with the methods prompts and grade")
    if lacking := [method for method in ("prompts", "grade") if not callable(getattr(made, method, None))]:
        raise ValueError(
            f"{TASK_KEY} = {name!r} has no {' and no '.join(lacking)}: write prompts(self, split), which returns Prompts, "
            "and grade(self, prompt, completion), which returns a number"
        )
    try:
        task: Task = made()
    except TypeError as error:
        raise ValueError(f"{TASK_KEY} = {name!r} must be made without arguments: {error}") from error
    return task


def best(high: float) -> Exact:
    """max_reward, exact. Raises ValueError unless it is a finite number above 0."""
    if not high > 0 or high == float("inf"):
        raise ValueError(f"task.max_reward = {high} must be a number above 0")
    return exact(high)
