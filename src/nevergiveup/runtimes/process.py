"""Objects that live in a spawned process of their own, behind the same asynchronous methods. Layer 3.

Messages are length-prefixed pickles over a socket pair between parent and child, both ours; nothing from outside is ever
unpickled. Neither side blocks on a write (asyncio buffers), so large answers and large requests cannot lock each other out.
Tensors do not travel in messages: a mapping of tensors is written once to a safetensors file, in memory where the system has
such a folder, and mapped by the child.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from nevergiveup.protocols import InfrastructureError

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For building the object in the child: large models load slowly."""


class ProcessDied(RuntimeError):
    """The process is gone; every call that waited for it, and every later one, raises this."""


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """Stands in a message for a mapping of tensors."""

    path: str


class ProcessRuntime:
    """Places each object in a spawned process. The proxy answers to every asynchronous method of the object."""

    def __init__(self) -> None:
        self._proxies: list[_Proxy] = []
        memory = Path("/dev/shm")
        parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _remove_leftovers(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))

    async def place(self, make: Callable[..., T], name: str, /, *args: Any, **kwargs: Any) -> T:
        """`make` must be importable by name. Raises what it raises there, or ProcessDied."""
        here, there = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_child, args=(there, make, args, kwargs), name=name, daemon=True)
        process.start()
        there.close()
        reader, writer = await asyncio.open_connection(sock=here)
        proxy = _Proxy(name, process, reader, writer, self._folder)
        self._proxies.append(proxy)
        async with asyncio.timeout(START_TIMEOUT_S):
            await proxy.call("__ready__")
        return cast(T, proxy)

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.end()
        shutil.rmtree(self._folder, ignore_errors=True)


_PREFIX = "nevergiveup-"


def _remove_leftovers(parent: Path) -> None:
    """Folders of processes that were killed before they could remove them."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


class _Proxy:
    def __init__(
        self,
        name: str,
        process: multiprocessing.process.BaseProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        folder: Path,
    ) -> None:
        self._name = name
        self._process = process
        self._reader = reader
        self._writer = writer
        self._folder = folder
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._n_calls = 0
        self._listener = asyncio.create_task(self._listen(), name=f"listen to {name}")
        self._dead: str = ""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await self.call(method, *args)

        return call

    async def call(self, method: str, *args: Any) -> Any:
        if self._dead:
            raise ProcessDied(self._dead)
        number = self._n_calls
        self._n_calls += 1
        files = []
        sent = []
        for i, arg in enumerate(args):
            if _is_tensors(arg):
                files.append(self._folder / f"{self._name}-{number}-{i}.safetensors")
                _write_tensors(arg, files[-1])
                sent.append(_TensorFile(str(files[-1])))
            else:
                sent.append(arg)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            _send(self._writer, (number, method, sent))
            return await answer
        except asyncio.CancelledError:
            if not self._dead:
                _send(self._writer, (number, "__cancel__", []))
            raise
        finally:
            self._calls.pop(number, None)
            for file in files:
                file.unlink(missing_ok=True)

    async def _listen(self) -> None:
        while (message := await _receive(self._reader)) is not None:
            number, value, error = message
            answer = self._calls.get(number)
            if answer is None or answer.done():
                continue
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)
        await asyncio.to_thread(self._process.join, 5)
        self._dead = f"the process of the {self._name} died (exit code {self._process.exitcode})"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ProcessDied(self._dead))

    async def end(self) -> None:
        """Ends the child: it leaves when its socket closes, and is killed if it does not."""
        self._writer.close()
        await asyncio.to_thread(self._process.join, 5)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._listener.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(InfrastructureError(f"the {self._name} was closed"))


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(struct.pack("<Q", len(data)))
    writer.write(data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    """The next message, or None when the other side is gone."""
    try:
        (length,) = struct.unpack("<Q", await reader.readexactly(8))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _is_tensors(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or "torch" not in sys.modules:
        return False
    import torch

    return all(isinstance(item, torch.Tensor) for item in value.values())


def _write_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _read_tensors(path: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def _child(sock: socket.socket, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent decides what to end, and when
        signal.signal(name, signal.SIG_IGN)
    asyncio.run(_serve(sock, make, args, kwargs))
    sys.stdout.flush()
    os._exit(0)  # no destructor of a half-finished decode step may hold the parent up


async def _serve(sock: socket.socket, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks: dict[int, asyncio.Task[None]] = {}
    target: Any = None

    async def answer(number: int, method: str, sent: list[Any]) -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            received = [_read_tensors(arg.path) if isinstance(arg, _TensorFile) else arg for arg in sent]
            value = await getattr(target, method)(*received)
        except Exception as error:  # every exception of a call belongs to its caller
            failure = _portable(error)
        finally:
            tasks.pop(number, None)
        _send(writer, (number, value, failure))

    made: Exception | None = None
    try:
        target = make(*args, **kwargs)
    except Exception as error:  # belongs to whoever asked for the object
        made = _portable(error)
    while (message := await _receive(reader)) is not None:
        number, method, sent = message
        if method == "__ready__":
            _send(writer, (number, None, made))
        elif method == "__cancel__":
            if task := tasks.get(number):
                task.cancel()
        else:
            tasks[number] = asyncio.create_task(answer(number, method, sent))


def _portable(error: Exception) -> Exception:
    """The exception with its traceback as a note, in a form that survives the way to the parent."""
    text = "".join(traceback.format_exception(error))
    try:
        carried = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign exception does when it is copied
        carried = RuntimeError(f"{type(error).__name__}: {error}")
    carried.add_note(f"In its process:\n{text}")
    return cast(Exception, carried)
