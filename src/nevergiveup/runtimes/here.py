"""Objects that live in this process: in place, or in a thread of their own. Layer 3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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

    Never call the inner learner while a step is awaited.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")

    @property
    def version(self) -> int:
        return self._learner.version

    async def step(self, batch: Batch) -> Metrics:
        return await asyncio.get_running_loop().run_in_executor(self._thread, asyncio.run, self._learner.step(batch))

    async def gradient_norms(self, groups: Sequence[Group]) -> list[float]:
        work = self._learner.gradient_norms(groups)
        return await asyncio.get_running_loop().run_in_executor(self._thread, asyncio.run, work)

    async def weights(self) -> Weights:
        return await self._learner.weights()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def restore(self, folder: Path) -> None:
        self._learner.restore(folder)

    def export(self, folder: Path) -> None:
        self._learner.export(folder)
