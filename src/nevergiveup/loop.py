"""The coroutines that tie a scheduler to an engine, a grader and a learner. One loop for every runtime.

Layer 2. Standard library only. Who waits for whom:

    generator   waits for back-pressure: it asks the scheduler for requests while fewer than `max_in_flight` completions
                are out, and hands each to a server
    server      (one a request) waits for the engine, then for the grader, then delivers
    trainer     waits for a full batch, then for the learner, then until the engine holds the new weights

The scheduler waits for nobody. The first exception of any of them ends the run and is raised. What trouble is worth: an
`InfrastructureError` fails the one request; too many of them in a row, and the run ends.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from nevergiveup.protocols import Checker, Engine, Grader, InfrastructureError, Learner, Restarted, Task, Weights
from nevergiveup.scheduler import Scheduler
from nevergiveup.types import (
    Attempt,
    Batch,
    Check,
    Completion,
    Exact,
    Grade,
    Metrics,
    Prompt,
    Request,
    Score,
    Sum,
    Unverified,
    exact,
)

T = TypeVar("T")

MAX_FAILURES_IN_A_ROW = 16
"""Requests lost to infrastructure trouble, with no success in between, after which the run ends. Those that a dead engine
leaves behind when it is started again do not count: restarts are bounded on their own."""

MAX_SYNCS = 3
"""Tries to bring one version's weights to the engine."""

UNVERIFIED_WINDOW = 64
"""When more than half of the last so many completions got no verdict, the grader is broken and the run ends."""


class GraderBroken(RuntimeError):
    """Most completions get no verdict. The message holds the first reason of the window."""


class Stalled(RuntimeError):
    """Nothing was delivered for too long while the trainer waited; or a step, or the way of weights to the engine, took too
    long."""


class InPlace:
    """A Checker that runs checks here and now, without any bound on time or memory: for trusted rules."""

    async def check(self, check: Check) -> Grade:
        try:
            return check.function(*check.arguments)
        except Exception:  # whatever a reward function raises says nothing about the completion
            return Unverified(traceback.format_exc())


class TaskGrader:
    """Grades with a task's own `grade`, and has `checker` work out what that leaves to be checked.

    What either raises becomes Unverified, never a score.
    """

    def __init__(self, task: Task, checker: Checker | None = None) -> None:
        self._task = task
        self._checker = checker or InPlace()

    async def grade(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Grade]:
        return list(await asyncio.gather(*(self._grade(prompt, completion) for completion in completions)))

    async def _grade(self, prompt: Prompt, completion: Completion) -> Grade:
        await asyncio.sleep(0)  # a slow rule must not hold up everything else
        try:
            grade = await self._resolved(self._task.grade(prompt, completion))
            if not isinstance(grade, Unverified):
                reward_of(grade)  # refuses what is no number
            return grade
        except Exception:  # whatever a reward function raises says nothing about the completion
            return Unverified(traceback.format_exc())

    async def _resolved(self, grade: Grade | Check | Sum) -> Grade:
        if isinstance(grade, Check):
            return await self._checker.check(grade)
        if not isinstance(grade, Sum):
            return grade
        total: Exact = 0
        parts: dict[str, float] = {}
        first: Score | None = None
        parts_of = await asyncio.gather(*(self._resolved(part) for _, part in grade.parts.values()))
        for (name, (weight, _)), part in zip(grade.parts.items(), parts_of, strict=True):
            if isinstance(part, Unverified):
                return Unverified(f"{name}: {part.reason}")
            if first is None and isinstance(part, Score):
                first = part
            reward = reward_of(part)
            total += weight * reward
            parts[name] = float(reward)
            if isinstance(part, Score):
                parts |= {f"{name}/{inner}": value for inner, value in part.parts.items()}
        total = exact(total)
        return Score(total, parts=parts) if first is None else replace(first, reward=total, parts=parts)


def reward_of(grade: float | Fraction | Score) -> Exact:
    """The number that counts, exact. Raises ValueError and TypeError for what is no finite number."""
    reward = grade.reward if isinstance(grade, Score) else grade
    if reward is None or isinstance(reward, str):
        raise TypeError(f"a reward must be a number, not {reward!r}")
    return exact(reward)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as the observer gets it. Times in seconds: of the step, of the weight transfer, of waiting before."""

    batch: Batch
    metrics: Metrics
    version: int
    step_s: float
    sync_s: float
    waited_s: float


class Loop:
    """Runs until `n_steps` optimizer steps, the end of the scheduler's data or budget, or `stop()`.

    max_in_flight: completions handed to the engine at once.
    truncated_is_wrong: completions cut by the length limit score 0 whatever the grader says (unverified ones stay so).
    shape: the reward that counts, from the one that was graded (a length penalty, for example).
    on_graded: called with every request's completions, their grades and the rewards that count (None: unverified), before
    they are delivered.
    on_step: awaited after every step, before the next batch is cut.
    stall_s: longest wait for a batch without anything being delivered, and for an optimizer step.
    sync_s: longest wait until the engine has acknowledged new weights.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        grader: Grader,
        learner: Learner,
        *,
        n_steps: int | None,
        max_in_flight: int,
        truncated_is_wrong: bool = True,
        shape: Callable[[Exact, Completion], Exact] | None = None,
        on_graded: Callable[[Request, Sequence[Completion], Sequence[Grade], Sequence[Exact | None]], None]
        | None = None,
        on_step: Callable[[Step], Awaitable[None]] | None = None,
        stall_s: float = 900.0,
        sync_s: float = 600.0,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.grader = grader
        self.learner = learner
        self.n_steps = n_steps
        self.max_in_flight = max_in_flight
        self.truncated_is_wrong = truncated_is_wrong
        self.shape = shape
        self.on_graded = on_graded
        self.on_step = on_step
        self.stall_s = stall_s
        self.sync_s = sync_s
        self.last_step: Step | None = None
        """Made, whether or not the engine has acknowledged its weights; `on_step` may not have been told of it."""
        self._n_out = 0
        self._failures_in_a_row = 0
        self._verdicts: deque[str | None] = deque(maxlen=UNVERIFIED_WINDOW)  # None: verified; else the reason
        self._changed = asyncio.Event()  # something was delivered, lost or published
        self._servers: set[asyncio.Task[None]] = set()
        self._stopped = ""
        self._is_draining = False

    def stop(self, reason: str) -> None:
        """Ends the run after the step that is running now."""
        self._stopped = self._stopped or reason
        self._changed.set()

    async def drain(self) -> None:
        """Waits, within `on_step`, until all that was asked for has been delivered; nothing more is asked for meanwhile.

        So that a checkpoint holds all there is, and a run that goes on from it is the run that was never interrupted.
        Raises Stalled when nothing comes back for too long.
        """
        self._is_draining = True
        try:
            while self._n_out:
                await self._wait_for_delivery()
        finally:
            self._is_draining = False
            self._changed.set()

    async def run(self) -> str:
        """Returns why the run ended, in words."""
        try:
            async with asyncio.TaskGroup() as tasks:
                generator = tasks.create_task(self._generate(tasks))
                reason = await self._train()
                for task in (generator, *self._servers):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None
        return reason

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            n_ready = self.scheduler.n_ready
            while (
                not self._is_draining
                and self._n_out < self.max_in_flight
                and (request := self.scheduler.next()) is not None
            ):
                self._n_out += request.n
                server = tasks.create_task(self._serve(request))
                self._servers.add(server)
                server.add_done_callback(self._servers.discard)
            if self.scheduler.n_ready > n_ready:
                self._changed.set()  # an allocator decided to train: the trainer may be waiting for just that
            await self._wait_for_change()

    async def _serve(self, request: Request) -> None:
        try:
            completions = await self.engine.sample(request.prompt, request.n, request.seed)
        except InfrastructureError as error:
            self._failures_in_a_row += not isinstance(error, Restarted)
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise
            self.scheduler.fail(request.id, str(error))
        else:
            self._failures_in_a_row = 0
            await self._deliver(request, completions)
        self._n_out -= request.n
        self._changed.set()

    async def _deliver(self, request: Request, completions: list[Completion]) -> None:
        grades = await self.grader.grade(request.prompt, completions)
        self._verdicts += [grade.reason if isinstance(grade, Unverified) else None for grade in grades]
        rewards = [self._reward(completion, grade) for completion, grade in zip(completions, grades, strict=True)]
        if self.on_graded is not None:
            self.on_graded(request, completions, grades, rewards)
        attempts = [
            Attempt(reward, completion.version_first, completion)
            for completion, reward in zip(completions, rewards, strict=True)
            if reward is not None
        ]
        self._check_grader()
        self.scheduler.deliver(request.id, attempts, len(grades) - len(attempts))

    def _reward(self, completion: Completion, grade: Grade) -> Exact | None:
        if isinstance(grade, Unverified):
            return None
        reward = 0 if self.truncated_is_wrong and completion.finish == "length" else reward_of(grade)
        return reward if self.shape is None else self.shape(reward, completion)

    def _check_grader(self) -> None:
        reasons = [reason for reason in self._verdicts if reason is not None]
        if len(self._verdicts) == UNVERIFIED_WINDOW and 2 * len(reasons) > UNVERIFIED_WINDOW:
            raise GraderBroken(
                f"{len(reasons)} of the last {UNVERIFIED_WINDOW} completions got no verdict from the grader; "
                f"the first reason was:\n{reasons[0]}"
            )

    async def _train(self) -> str:
        waiting_since = time.perf_counter()
        while True:
            if self._stopped:
                return self._stopped
            if self.n_steps is not None and self.scheduler.version >= self.n_steps:
                return f"all {self.n_steps} steps are done"
            if groups := self.scheduler.norms_wanted():
                norms = self.learner.gradient_norms(groups)
                self.scheduler.give_norms(await self._learn(norms, f"measuring the gradients of {len(groups)} groups"))
                self._changed.set()
            batch = self.scheduler.take()
            if batch is None:
                self._changed.set()  # groups that went stale may be asked again
                if reason := self.scheduler.finished:
                    return reason
                await self._wait_for_delivery()
                continue
            started = time.perf_counter()
            what = f"the optimizer step that makes version {self.learner.version + 1}"
            metrics = await self._learn(self.learner.step(batch), what)
            stepped = time.perf_counter()
            self.last_step = step = Step(
                batch, metrics, self.learner.version, stepped - started, sync_s=0.0, waited_s=started - waiting_since
            )
            if not metrics.get("skipped"):
                await self._load(await self.learner.weights())
            self.scheduler.publish(self.learner.version)
            self._changed.set()
            self.last_step = step = replace(step, sync_s=time.perf_counter() - stepped)
            if self.on_step:
                await self.on_step(step)
            waiting_since = time.perf_counter()

    async def _learn(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.stall_s):
                return await work
        except TimeoutError:
            raise Stalled(
                f"{what} took longer than {self.stall_s:g} s; if that is normal for this model, raise stall_s"
            ) from None

    async def _load(self, weights: Weights) -> None:
        """Returns when the engine has acknowledged the weights: only then the version may move."""
        version = self.learner.version
        n_tried = 0
        while True:
            n_tried += 1
            try:
                async with asyncio.timeout(self.sync_s):
                    await self.engine.load(weights, version)
                return
            except TimeoutError:
                raise Stalled(
                    f"the engine did not take the weights of version {version} within {self.sync_s:g} s"
                ) from None
            except InfrastructureError:
                if n_tried == MAX_SYNCS:
                    raise

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _wait_for_delivery(self) -> None:
        try:
            async with asyncio.timeout(self.stall_s):
                await self._wait_for_change()
        except TimeoutError:
            raise Stalled(
                f"nothing came back for {self.stall_s:g} s while the trainer waited for a batch "
                f"({self._n_out} completions are out, {self.scheduler.n_ready} groups ready, {self.scheduler.n_open} open)"
            ) from None


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
