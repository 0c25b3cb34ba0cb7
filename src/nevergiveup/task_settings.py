"""Tasks by name, with the options of each: frozen values whose field docstrings are the help texts of the command line.

Layer 1. Standard library only. The tasks themselves are in `tasks/`; `build.make_task` makes one of its settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

PerTest: TypeAlias = Literal["per-test", "all-tests"]
"""The reward of a program: the share of tests that it passes, or 1 if it passes all of them and else 0."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What every task has."""

    name: ClassVar[str]
    after_colon: ClassVar[str] = ""
    """The field that takes what stands behind the colon in `--task name:value`."""

    reward: str = ""
    """The reward as a sum of weighted parts, as "correct + 0.1*format + my_module:my_reward"; empty for the task's own rule.
    Parts: correct (the task's own rule), format, length, and functions of yours as module:function."""
    max_reward: float = 1.0
    """The best value that functions of yours return; a prompt is solved when every completion gets the best of every part."""
    n_prompts: int | None = None
    """Use only so many training prompts (the first of a fixed shuffle); none for all."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted, never cut."""

    def check(self) -> None:
        """Raises ValueError, with key, value and remedy."""
        for key, value in (("n_prompts", self.n_prompts), ("max_prompt_tokens", self.max_prompt_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"task.{key} = {value} must be at least 1")
        if not self.max_reward > 0:
            raise ValueError(f"task.max_reward = {self.max_reward} must be above 0")


@dataclass(frozen=True, slots=True)
class ChainsTask(TaskSettings):
    """Generated puzzles for a tiny model that is made and warm-started here, with exact pass rates."""

    name: ClassVar[str] = "chains"

    preset: Literal["demo", "study"] = "demo"
    """How reliable the teacher of the warm-up is, by tier."""
    impossible: float = 0.0
    """Share of training prompts that nothing can solve, as bad labels are."""

    def check(self) -> None:
        TaskSettings.check(self)
        if not 0 <= self.impossible <= 1:
            raise ValueError(f"task.impossible = {self.impossible} must be a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class _RowsTask(TaskSettings):
    """What tasks have whose rows may come from a file."""

    data: str = ""
    """Training rows: a JSON Lines, CSV or Parquet file, or a Hugging Face data set as name, name:split or name/config:split.
    Empty for the rows that come with the package, where there are some."""
    test_data: str = ""
    """Rows to evaluate on, as in data. Empty for those that come with the package, or none."""
    allow_unverifiable: bool = False
    """Go on although more than 5 % of the rows have answers that the grader cannot verify; they are left out in any case."""


@dataclass(frozen=True, slots=True)
class Gsm8kTask(_RowsTask):
    """Grade-school mathematics: GSM8K and GSM8K-Platinum, or rows of yours whose answer is a number."""

    name: ClassVar[str] = "gsm8k"

    style: Literal["steps", "answer"] = "steps"
    """Ask for step-by-step reasoning, or for the bare answer after three solved examples (tiny models)."""


@dataclass(frozen=True, slots=True)
class MathTask(_RowsTask):
    """Mathematics with symbolic answers: a part of DeepScaleR and MATH-500, or rows of yours (AIME, BRUMO, HMMT, ...)."""

    name: ClassVar[str] = "math"


@dataclass(frozen=True, slots=True)
class ManufactoriaTask(TaskSettings):
    """Programs for a robot that reads and paints a coloured tape (DELTA), judged by running them."""

    name: ClassVar[str] = "manufactoria"

    ensemble: Literal[
        "basic_mix", "has", "regex", "compr", "ends", "prepend", "mutate", "minmax", "bit_op", "fdiv", "add", "symm"
    ] = "has"
    """Set of problems."""
    score: PerTest = "per-test"
    """The share of tests passed, or all or nothing."""
    hidden: bool = True
    """Evaluate with tests that no prompt and no reward has shown, too: few tests let wrong programs pass."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out and counted, never cut."""


@dataclass(frozen=True, slots=True)
class ManufactoriaTinyTask(TaskSettings):
    """Manufactoria without text, for a tiny model that is made and warm-started here."""

    name: ClassVar[str] = "manufactoria-tiny"

    score: PerTest = "per-test"
    """The share of tests passed, or all or nothing."""


@dataclass(frozen=True, slots=True)
class OwnTask(_RowsTask):
    """Rows of yours: a prompt (or messages), an answer, any other columns; graded as mathematics or by your function."""

    name: ClassVar[str] = "own"

    instruction: str = ""
    """Text that is put after every prompt that is not a list of messages."""


@dataclass(frozen=True, slots=True)
class ReasoningGymTask(TaskSettings):
    """A data set of the package reasoning-gym, generated: --task reasoning-gym:chain_sum."""

    name: ClassVar[str] = "reasoning-gym"
    after_colon: ClassVar[str] = "dataset"

    dataset: str = ""
    """Its name, as chain_sum."""
    size: int = 1000
    """Training problems to generate."""
    options: str = "{}"
    """Options of the data set as JSON, as '{"min_terms": 3}'."""

    def check(self) -> None:
        TaskSettings.check(self)
        _named(self.dataset, "task.dataset", "--task reasoning-gym:chain_sum")
        if self.size < 1:
            raise ValueError(f"task.size = {self.size} must be at least 1")
        json_object("task.options", self.options)


@dataclass(frozen=True, slots=True)
class VerifiersTask(TaskSettings):
    """An environment of the package verifiers, single-turn: --task verifiers:NAME."""

    name: ClassVar[str] = "verifiers"
    after_colon: ClassVar[str] = "environment"

    environment: str = ""
    """Its name, as vf.load_environment takes it."""
    options: str = "{}"
    """Arguments of its load_environment as JSON."""

    def check(self) -> None:
        TaskSettings.check(self)
        _named(self.environment, "task.environment", "--task verifiers:NAME")
        json_object("task.options", self.options)


@dataclass(frozen=True, slots=True)
class CustomTask(TaskSettings):
    """A task of yours, in Python: --task my_module:MyTask."""

    name: ClassVar[str] = "custom"
    after_colon: ClassVar[str] = "target"

    target: str = ""
    """Where its class is, as my_module:MyTask."""

    def check(self) -> None:
        TaskSettings.check(self)
        _named(self.target, "task.target", "--task my_module:MyTask")


AnyTask: TypeAlias = (
    Gsm8kTask
    | MathTask
    | ManufactoriaTask
    | ManufactoriaTinyTask
    | ChainsTask
    | OwnTask
    | ReasoningGymTask
    | VerifiersTask
    | CustomTask
)

TASKS: Mapping[str, type[AnyTask]] = {
    cls.name: cls
    for cls in (
        Gsm8kTask,
        MathTask,
        ManufactoriaTask,
        OwnTask,
        ReasoningGymTask,
        VerifiersTask,
        CustomTask,
        ChainsTask,
        ManufactoriaTinyTask,
    )
}
"""Name on the command line -> options."""

TINY = (ChainsTask, ManufactoriaTinyTask)
"""Tasks that speak in token ids; where no model is given, a tiny one is made and warm-started for them."""


def json_object(key: str, text: str) -> dict[str, object]:
    """The object that a setting holds as JSON text. Raises ValueError naming the key."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{key} = {text!r} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{key} = {text!r} must be a JSON object, as {{"min_terms": 3}}')
    return value


def _named(value: str, key: str, example: str) -> None:
    if not value:
        raise ValueError(f"{key} is empty: name it, as in {example}")
