"""Objects that live in this process: in place, or in a thread of their own. Layer 3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from nevergiveup.protocols import Learner, Weights
from nevergiveup.types import Batch, Group, Metrics

T = TypeVar("T")


class HereRuntime:
    """Makes the object in place. With an engine and a learner both here, a run is a function of its seed."""

    async def place(self, make: Callable[..., T], name: str, /, *args: Any, **kwargs: Any) -> T:
        return make(*args, **kwargs)

    async def close(self) -> None:
        pass


class ThreadedLearner:
    """A learner whose steps run in one worker thread, so that the event loop keeps engines and graders busy meanwhile.

    Never call the inner learner while a step is awaited. The thread does not outlive the program, even if a step hangs.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._work: SimpleQueue[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]] = SimpleQueue()
        Thread(target=self._run, name="learner", daemon=True).start()

    @property
    def version(self) -> int:
        return self._learner.version

    async def step(self, batch: Batch) -> Metrics:
        metrics: Metrics = await self._in_thread(self._learner.step(batch))
        return metrics

    async def gradient_norms(self, groups: Sequence[Group]) -> list[float]:
        norms: list[float] = await self._in_thread(self._learner.gradient_norms(groups))
        return norms

    async def weights(self) -> Weights:
        return await self._learner.weights()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def restore(self, folder: Path) -> None:
        self._learner.restore(folder)

    def export(self, folder: Path) -> None:
        self._learner.export(folder)

    async def _in_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._work.put((work, answer))
        return await answer

    def _run(self) -> None:
        while True:
            work, answer = self._work.get()
            value, failure = None, None
            try:
                value = asyncio.run(work)
            except BaseException as error:  # belongs to whoever waits for it
                failure = error
            with suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
                answer.get_loop().call_soon_threadsafe(_settle, answer, value, failure)


def _settle(answer: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if answer.done():  # cancelled
        return
    if failure is None:
        answer.set_result(value)
    else:
        answer.set_exception(failure)
