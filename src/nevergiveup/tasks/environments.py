"""The task `verifiers`: a single-turn environment of the package verifiers: `--task verifiers:NAME`.

Layer 3. Needs the extra `verifiers` (0.4 or newer, whose environments are packages that export a `Taskset`); standard library
only until an environment is loaded.

A task of the environment becomes a prompt; the policy answers once, without tools, and the task scores the finished trace with
its own rewards, weights and judges (`Task.score`, as the package re-scores saved traces), in a worker. What that leaves out is
refused by name when the environment is loaded: several agents, an agent program, tools, containers, and hooks or rewards that
need a running machine. Thoughts (`<think>...</think>`) are handed over as reasoning, apart from the reply, as model servers do.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from nevergiveup.types import Check, Completion, Exact, Grade, Message, Prompt, Score, Unverified, exact

if TYPE_CHECKING:
    from types import ModuleType

    import verifiers.v1 as vf

ENDLESS = 1000
"""Tasks that are taken of an environment which makes them without end."""

HELD_OUT = (10, 100)
"""Every tenth task is held out to evaluate on, up to 100: environments have no splits of their own."""

KEY = "task.environment"


class Kept(NamedTuple):
    """The answer of a prompt. task: pickled, so that a process can pass it on without the package. columns: its data."""

    task: bytes
    columns: Mapping[str, Any]


class VerifiersEnvironment:
    """The task verifiers. options: of the environment's `Taskset`, as {"split": "train"}.

    Raises ValueError when the package is not installed, when there is no such environment, for options that it does not take,
    and for an environment that is not single-turn.
    """

    def __init__(self, name: str, options: Mapping[str, object] | None = None) -> None:
        self.name = name
        try:
            package: ModuleType = importlib.import_module("verifiers.v1")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"task.name = verifiers needs the package verifiers, 0.4 or newer ({error}): "
                "pip install 'nevergiveup[verifiers]'"
            ) from None
        tasks = list(_tasks(package, name, dict(options or {})))
        if not tasks:
            raise ValueError(f"{KEY} = {name!r} has no tasks")
        self._best = _check_task(package, name, tasks[0])
        self._prompts: dict[str, list[Prompt]] = {"train": [], "test": []}
        every, most = HELD_OUT
        seen: set[str] = set()
        for i, task in enumerate(tasks):
            prompt = self._prompt(task)
            if prompt.id in seen:
                continue  # it would count twice, or be trained and evaluated on
            seen.add(prompt.id)
            is_held_out = i % every == every - 1 and len(self._prompts["test"]) < most
            self._prompts["test" if is_held_out else "train"].append(prompt)

    def prompts(self, split: str) -> list[Prompt]:
        if split not in self._prompts:
            raise ValueError(f"verifiers has no split {split!r}: use one of {', '.join(self._prompts)}")
        return self._prompts[split]

    def _prompt(self, task: vf.Task[Any, Any, Any]) -> Prompt:
        from verifiers.v1.task import task_key

        columns = task.data.model_dump(mode="json")
        try:
            packed = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise _refused(self.name, f"its tasks cannot be sent to another process ({error})") from None
        place = columns.pop("idx", None)
        return Prompt(
            task_key(columns)[:16], _chat(self.name, task.data, place), Kept(packed, columns), max_reward=self._best
        )

    def grade(self, prompt: Prompt, completion: Completion) -> Check:
        return Check(
            _score, (_Parcel(prompt.answer.task), prompt.messages, completion.text, completion.finish, self._best)
        )


def _refused(name: str, why: str) -> ValueError:
    return ValueError(f"{KEY} = {name!r} is not a single-turn environment: {why}; single-turn ones are supported")


def _tasks(package: Any, name: str, options: dict[str, object]) -> Iterable[vf.Task[Any, Any, Any]]:
    from pydantic import ValidationError

    try:
        package.import_taskset(name)
        config_type = package.taskset_config_type(name)
    except ModuleNotFoundError as error:
        cause = error.__cause__ or error.__context__
        raise ValueError(f"{KEY} = {name!r} cannot be loaded: {error}" + (f" ({cause})" if cause else "")) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{KEY} = {name!r} is no environment of verifiers 0.4 or newer: {error}") from None
    environment = package.environment_class(name)
    if environment is not package.SingleAgentEnv:
        raise _refused(name, f"it brings a way of its own for agents to interact ({environment.__name__})")
    if package.default_harness_id(name) == name:
        raise _refused(name, "it brings an agent program (harness) of its own")
    try:
        config = config_type.model_validate({**options, "id": name})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        known = ", ".join(field for field in config_type.model_fields if field != "id")
        raise ValueError(f"task.options = {json.dumps(options)}: {wrong} (options of {name}: {known})") from None
    taskset = package.load_taskset(config)
    if taskset.toolsets(config) or type(taskset).task_type().toolsets(config.task):
        raise _refused(name, "it gives the policy tools")
    return taskset if taskset.bounded else islice(taskset, ENDLESS)


def _check_task(package: Any, name: str, task: vf.Task[Any, Any, Any]) -> Exact:
    """The best reward: the sum of the positive weights. Refuses what scoring without a machine would leave out in silence."""
    if task.NEEDS_CONTAINER or task.data.image or task.data.skills or task.data.artifacts:
        raise _refused(name, "its tasks need a container")
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(package.Task, hook):
            raise _refused(name, f"its tasks have a {hook} that needs a running machine")
    steering = [*task.hooks("stop"), *package.utils.decorators.discover_decorated(task, "intercept")]
    if steering:
        raise _refused(name, f"its {steering[0].__name__} steers a conversation")
    rewards = [(reward.__name__, reward, getattr(reward, "_vf_weight", 1.0)) for reward in task.hooks("reward")]
    rewards += [(judge.reward_name, judge.score, judge.config.weight) for judge in task.plugged_judges()]
    best = sum((exact(weight) for _, _, weight in rewards if weight > 0), start=Fraction(0))
    if not best:
        raise ValueError(f"{KEY} = {name!r} has no reward that can be earned: nothing would ever be learned")
    for reward_name, reward, _ in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            raise _refused(name, f"its reward {reward_name} needs a running machine")
    return exact(best)


def _chat(name: str, data: vf.TaskData, place: int | None) -> tuple[Message, ...]:
    if not data.prompt:
        raise _refused(name, f"its task {place} has no prompt: a simulated user would have to begin")
    messages: list[Message] = []
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return (*messages, {"role": "user", "content": data.prompt})
    for message in data.prompt:
        content = _text(message.content)
        if content is None or message.role == "tool" or getattr(message, "tool_calls", None):
            raise _refused(name, f"its task {place} has pictures or tool calls in its prompt")
        messages.append({"role": message.role, "content": content})
    return tuple(messages)


def _text(content: Any) -> str | None:
    """The text of a message; None if there is anything else in it."""
    if content is None or isinstance(content, str):
        return content or ""
    if all(part.type == "text" for part in content):
        return "\n".join(part.text for part in content)
    return None


# ------------------------------------------------------------------------------------------------ scoring


class _Parcel:
    """A pickled task. Where it arrives it is opened at once, which imports what it needs before the clock of a check starts."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def task(self) -> vf.Task[Any, Any, Any]:
        task: vf.Task[Any, Any, Any] = pickle.loads(self._data)
        return task

    def __reduce__(self) -> tuple[Callable[[bytes], _Parcel], tuple[bytes]]:
        return _opened, (self._data,)


def _opened(data: bytes) -> _Parcel:
    parcel = _Parcel(data)
    _ = parcel.task
    return parcel


def _score(parcel: _Parcel, messages: tuple[Message, ...], text: str, finish: str, best: Exact) -> Grade:
    """Runs in a worker. Whatever a reward of the environment raises is no verdict."""
    trace = _trace(parcel.task, messages, text, finish)
    asyncio.run(parcel.task.score(trace))
    total = Fraction(0)  # exact: whether it is the best must not hang on rounding
    parts: dict[str, float] = {}
    for name, reward in trace.rewards.items():
        if reward is None:
            return Unverified(f"the environment left its reward {name} without a score")
        total += exact(reward.score) * exact(reward.weight)
        parts[name] = reward.score
    if total > best:
        return Unverified(
            f"{parts}\nthe rewards come to more than their weights, {float(best):g}: each must be at most 1"
        )
    return Score(exact(total), parts=parts)


def _trace(
    task: vf.Task[Any, Any, Any], messages: tuple[Message, ...], text: str, finish: str
) -> vf.Trace[Any, Any, Any]:
    """The trace that a run of the environment would have left: the prompt, and one reply."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import ModelCall

    thoughts, reply = split_thoughts(text)
    roles = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    chat: list[Any] = [roles[message["role"]](content=message["content"]) for message in messages]
    chat.append(vf.AssistantMessage(content=reply, reasoning_content=thoughts))
    nodes = [
        vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=i == len(chat) - 1)
        for i, message in enumerate(chat)
    ]
    stop = "length" if finish == "length" else "stop"
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=state_cls(type(task))(),
        nodes=nodes,
        calls=[ModelCall(node=len(nodes) - 1, finish_reason=stop)],
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )


def split_thoughts(text: str) -> tuple[str | None, str]:
    """Thoughts (None where there are none) and reply. Thoughts that are never closed leave no reply."""
    thoughts, closing, reply = text.rpartition("</think>")
    if closing:
        return thoughts.strip().removeprefix("<think>").strip(), reply.strip()
    if text.lstrip().startswith("<think>"):
        return text.strip().removeprefix("<think>").strip(), ""
    return None, text
