"""Objects in real processes: the same answers, the same exceptions, and no hang when they die."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from nevergiveup.engines.torch import TorchEngine
from nevergiveup.models import tiny_llama
from nevergiveup.protocols import InfrastructureError, Restarted
from nevergiveup.runtimes.process import ProcessDied, ProcessRuntime
from nevergiveup.types import Prompt

pytestmark = pytest.mark.slow


class Service:
    def __init__(self, offset=0):
        if offset is None:
            raise ValueError("offset must be a number")
        self.offset = offset
        self.tensors = {}
        self.cancelled = 0

    async def add(self, a, b):
        return a + b + self.offset

    async def fail(self, kind):
        raise {"infrastructure": InfrastructureError, "key": KeyError}[kind]("from afar")

    async def load(self, weights, version):
        self.tensors = {name: tensor.clone() for name, tensor in weights.items()}
        return version

    async def sums(self):
        return {name: tensor.double().sum().item() for name, tensor in self.tensors.items()}

    async def dtype(self, name):
        return str(self.tensors[name].dtype)

    async def block(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def n_cancelled(self):
        return self.cancelled

    async def pid(self):
        return os.getpid()


def with_service(check, *args, **options):
    async def main():
        runtime = ProcessRuntime(**options)
        try:
            service = await runtime.place(Service, "service", *args)
            await asyncio.wait_for(check(service), 60)
        finally:
            began = time.perf_counter()
            await runtime.close()
            assert time.perf_counter() - began < 5
        assert not runtime._folder.exists()

    asyncio.run(main())


def test_calls_exceptions_tensors_and_cancellation():
    async def check(service):
        assert await service.pid() != os.getpid()
        assert await asyncio.gather(*(service.add(i, 1) for i in range(200))) == [i + 11 for i in range(200)]

        with pytest.raises(InfrastructureError, match="from afar"):
            await service.fail("infrastructure")
        with pytest.raises(KeyError, match="from afar") as caught:
            await service.fail("key")
        assert "in fail" in "".join(caught.value.__notes__)
        with pytest.raises(AttributeError):
            await service.no_such_method()

        weights = {"a": torch.arange(10.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
        assert await service.load(weights, 7) == 7
        assert await service.sums() == {"a": 45.0, "b": 15.0}
        assert await service.dtype("b") == "torch.bfloat16"

        blocked = asyncio.create_task(service.block())
        await service.add(0, 0)
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        while not await service.n_cancelled():
            pass

    with_service(check, 10)


def make_engine():
    torch.set_num_threads(1)
    model = tiny_llama(20, bos_id=0, eos_id=1, pad_id=2, max_positions=32, seed=0, hidden=16, layers=1, heads=2)
    return TorchEngine(model, max_new_tokens=6, n_top=3)


def test_a_completion_crosses_as_it_is():
    prompt = Prompt(id="p", tokens=(5, 6, 7))

    async def main():
        runtime = ProcessRuntime()
        try:
            engine = await runtime.place(make_engine, "engine")
            return await asyncio.wait_for(engine.sample(prompt, 4, 9), 60)
        finally:
            await runtime.close()

    completions = asyncio.run(main())
    assert completions == asyncio.run(make_engine().sample(prompt, 4, 9))
    for completion in completions:
        assert [len(ids) for ids in completion.top_ids] == [3] * len(completion.tokens)
        assert [len(logprobs) for logprobs in completion.top_logprobs] == [3] * len(completion.tokens)


def test_large_messages_both_ways_at_once_do_not_lock():
    async def check(service):
        big = bytes(5_000_000)
        answers = await asyncio.gather(*(service.add(big, b"") for _ in range(8)))
        assert all(answer == big for answer in answers)

    async def main():
        runtime = ProcessRuntime()
        try:
            service = await runtime.place(Service, "service", b"")
            await asyncio.wait_for(check(service), 60)
        finally:
            await runtime.close()

    asyncio.run(main())


def test_a_constructor_that_raises_raises_here():
    async def main():
        runtime = ProcessRuntime()
        try:
            with pytest.raises(ValueError, match="offset must be a number"):
                await runtime.place(Service, "service", None)
        finally:
            await runtime.close()

    asyncio.run(main())


def test_kill_9_reaches_every_caller_now_and_later():
    async def check(service):
        waiting = [asyncio.create_task(service.block()) for _ in range(3)]
        os.kill(await service.pid(), signal.SIGKILL)
        for task in waiting:
            with pytest.raises(ProcessDied, match=r"the service died \(killed by signal 9\)"):
                await task
        with pytest.raises(ProcessDied):
            await service.add(1, 1)

    with_service(check)


async def kill(service):
    os.kill(await service.pid(), signal.SIGKILL)


def test_a_killed_process_is_replaced_and_has_the_last_weights_again():
    notes = []

    async def check(service):
        for version, value in ((1, 1.0), (2, 2.0)):
            await service.load({"w": torch.full((3,), value)}, version)
        with pytest.raises(TypeError):
            await service.load({"w": torch.full((3,), 9.0)})  # was not taken
        first = await service.pid()
        waiting = [asyncio.create_task(service.block()) for _ in range(3)]
        await kill(service)
        for task in waiting:
            with pytest.raises(Restarted, match=r"the process of the service died \(killed by signal 9\)"):
                await task
        assert await service.pid() != first  # it waits for the new one
        assert await service.sums() == {"w": 6.0}
        assert len(notes) == 1

    with_service(check, max_restarts=1, note=notes.append)


def test_restarts_are_bounded():
    async def check(service):
        for _ in range(2):
            waiting = asyncio.create_task(service.block())
            await kill(service)
            with pytest.raises(Restarted):
                await waiting
        waiting = asyncio.create_task(service.block())
        await kill(service)
        for call in (waiting, service.add(1, 1)):
            with pytest.raises(ProcessDied, match=r"killed by signal 9\), after 2 restarts in 10 minutes"):
                await call

    with_service(check, max_restarts=2)


class OnlyOnce(Service):
    """Cannot be built a second time."""

    def __init__(self, mark):
        super().__init__()
        Path(mark).touch(exist_ok=False)


def test_a_process_that_cannot_be_replaced_is_given_up_with_the_reason(tmp_path):
    async def main():
        runtime = ProcessRuntime(max_restarts=3)
        try:
            service = await runtime.place(OnlyOnce, "service", str(tmp_path / "mark"))
            waiting = asyncio.create_task(service.block())
            await kill(service)
            with pytest.raises(Restarted):
                await waiting
            with pytest.raises(ProcessDied, match=r"it did not start again: FileExistsError.*after 3 restarts"):
                await service.add(1, 1)
        finally:
            await runtime.close()

    asyncio.run(main())


def test_close_leaves_no_file_behind():
    async def main():
        runtime = ProcessRuntime()
        folder = Path(runtime._folder)
        assert folder.is_dir()
        await runtime.close()
        assert not folder.exists()

    asyncio.run(main())


def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not():
    runtime = ProcessRuntime()
    parent = runtime._folder.parent
    prefix = runtime._folder.name.partition(str(os.getpid()))[0]
    killed, living = parent / f"{prefix}4194305-x", parent / f"{prefix}{os.getpid()}-x"  # no pid is that large
    for folder in (killed, living):
        folder.mkdir()
        (folder / "weights").write_text("")
    other = ProcessRuntime()
    assert not killed.exists()
    assert living.exists()
    (living / "weights").unlink()
    living.rmdir()
    for each in (runtime, other):
        asyncio.run(each.close())
