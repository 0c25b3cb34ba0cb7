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
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from nevergiveup.protocols import InfrastructureError, Restarted

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For building the object in the child: large models load slowly."""

RESTART_WINDOW_S = 600.0
"""Restarts are counted over so many seconds."""


class ProcessDied(RuntimeError):
    """The process is gone for good; every call that waited for it, and every later one, raises this."""


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """Stands in a message for a mapping of tensors."""

    path: str


class ProcessRuntime:
    """Places each object in a spawned process. The proxy answers to every asynchronous method of the object.

    max_restarts: a process that dies is replaced by a new one, at most so often within `RESTART_WINDOW_S`. Calls that waited
    for the dead one raise `Restarted`; later ones wait for the new one, in which the last successful `state_method` call (the
    weights) has been repeated before. When it has died too often, all calls raise ProcessDied.
    note: is told of every restart, in words.
    """

    def __init__(
        self, *, max_restarts: int = 0, state_method: str = "load", note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._max_restarts = max_restarts
        self._state_method = state_method
        self._note = note
        self._proxies: list[_Proxy] = []
        memory = Path("/dev/shm")
        parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _remove_leftovers(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))

    async def place(self, make: Callable[..., T], name: str, /, *args: Any, **kwargs: Any) -> T:
        """`make` must be importable by name. Raises what it raises there, or ProcessDied."""
        proxy = _Proxy(
            name, partial(_Child.spawn, name, make, args, kwargs), self._folder,
            self._max_restarts, self._state_method, self._note,
        )  # fmt: skip
        self._proxies.append(proxy)
        await proxy.begin()
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


class _Child:
    """One process, until it ends. `gone` is set, with how it ended, after every call that waited has been told."""

    def __init__(
        self, process: multiprocessing.process.BaseProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._n_calls = 0
        self._is_gone = False
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # see `_Proxy._keep`
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, name: str, make: Callable[..., Any], args: Any, kwargs: Any) -> _Child:
        """Returns when the object is built. Raises what building it raises, _Gone, or TimeoutError."""
        here, there = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_child, args=(there, make, args, kwargs), name=name, daemon=True)
        process.start()
        there.close()
        child = cls(process, *await asyncio.open_connection(sock=here))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.call("__ready__", [])
        except BaseException:  # a cancellation, too, must leave no process behind
            await child.end()
            raise
        return child

    async def call(self, method: str, sent: list[Any]) -> Any:
        if self._is_gone or self._writer.is_closing():  # the latter is known first
            raise _Gone
        number = self._n_calls
        self._n_calls += 1
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            _send(self._writer, (number, method, sent))
            return await answer
        except asyncio.CancelledError:
            if not self._is_gone and not self._writer.is_closing():
                _send(self._writer, (number, "__cancel__", []))
            raise
        finally:
            self._calls.pop(number, None)

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
        self._is_gone = True
        await asyncio.to_thread(self.process.join, 5)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_Gone())
        if not self.gone.done():
            self.gone.set_result(_how_it_ended(self.process.exitcode))

    async def end(self) -> None:
        """The process leaves when its socket closes, and is killed if it does not."""
        self._is_gone = True
        self._writer.close()
        await asyncio.to_thread(self.process.join, 5)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join)
        self._listener.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_Gone())


class _Gone(Exception):
    """The process of this call has ended."""


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code}"


class _Proxy:
    """An object in a process, and in the one that takes its place when that dies."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[_Child]],
        folder: Path,
        max_restarts: int,
        state_method: str,
        note: Callable[[str], None],
    ) -> None:
        self._name = name
        self._spawn = spawn
        self._folder = folder
        self._max_restarts = max_restarts
        self._state_method = state_method
        self._note = note
        self._n_calls = 0
        self._state: tuple[list[Any], list[Path]] | None = None  # the last state that was taken, and its files
        self._deaths: list[float] = []
        self._dead = ""  # why there will be no other process
        self._is_closed = False

    async def begin(self) -> None:
        try:
            self._child = await self._spawn()
        except _Gone:
            raise ProcessDied(f"the process of the {self._name} died while it started") from None
        self._is_ready = asyncio.Event()
        self._is_ready.set()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep the {self._name} alive")

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await self._call(method, args)

        return call

    async def _call(self, method: str, args: Sequence[Any]) -> Any:
        files: list[Path] = []
        try:
            await self._is_ready.wait()
            if self._dead:
                raise ProcessDied(self._dead)
            child, sent = self._child, self._written(args, files)
            try:
                value = await child.call(method, sent)
            except _Gone:
                raise await self._what_it_means(child) from None
            if method == self._state_method and child is self._child:
                old, self._state = self._state, (sent, files)
                files = [] if old is None else old[1]
            return value
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def _written(self, args: Sequence[Any], files: list[Path]) -> list[Any]:
        """The arguments as they are sent; tensors go into files."""
        sent: list[Any] = []
        for arg in args:
            if _is_tensors(arg):
                files.append(self._folder / f"{self._name}-{self._n_calls}.safetensors")
                self._n_calls += 1
                _write_tensors(arg, files[-1])
                sent.append(_TensorFile(str(files[-1])))
            else:
                sent.append(arg)
        return sent

    async def _what_it_means(self, child: _Child) -> Exception:
        """For a call whose process is gone."""
        last_words = "" if self._is_closed else await asyncio.shield(child.verdict)
        if self._is_closed:
            return InfrastructureError(f"the {self._name} was closed")
        if last_words:
            return ProcessDied(last_words)
        return Restarted(f"the process of the {self._name} died ({child.gone.result()}) and is started again")

    def _too_often(self) -> bool:
        recent = [death for death in self._deaths if time.monotonic() - death < RESTART_WINDOW_S]
        return len(recent) >= self._max_restarts

    def _last_words(self, how: str) -> str:
        words = f"the process of the {self._name} died ({how})"
        if self._max_restarts:
            words += f", after {len(self._deaths)} restarts in {RESTART_WINDOW_S / 60:g} minutes"
        return words

    async def _keep(self) -> None:
        """Waits for the process to die, and starts another one, as long as that may be done. The verdict of a process that
        died is empty when another one is on its way."""
        while True:
            dead = self._child
            how = await asyncio.shield(dead.gone)
            self._is_ready.clear()
            child = None
            while child is None and not self._too_often():
                if not dead.verdict.done():
                    dead.verdict.set_result("")
                self._deaths.append(time.monotonic())
                began = time.monotonic()
                try:
                    child = await self._replacement()
                except _Gone:
                    how = "the one that took its place died while it started"
                except Exception as error:  # whatever keeps it from starting: it is tried again, so often
                    how = f"it did not start again: {type(error).__name__} {error}".strip()
            if child is None:
                self._dead = self._last_words(how)
                if not dead.verdict.done():
                    dead.verdict.set_result(self._dead)
                self._is_ready.set()
                return
            self._child = child
            self._is_ready.set()
            self._note(
                f"the process of the {self._name} died ({how}) and was started again within "
                f"{time.monotonic() - began:.1f} s; what it was at work on is asked again"
            )

    async def _replacement(self) -> _Child:
        child = await self._spawn()
        if self._state is not None:
            try:
                await child.call(self._state_method, self._state[0])
            except BaseException:  # a cancellation, too, must leave no process behind
                await child.end()
                raise
        return child

    async def end(self) -> None:
        self._is_closed = True
        if hasattr(self, "_keeper"):
            self._keeper.cancel()
            await self._child.end()
            if not self._child.verdict.done():
                self._child.verdict.set_result("closed")


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
