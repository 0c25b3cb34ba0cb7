"""The other side of `pool.py`: the process that forks grading workers, and what a worker does. Layer 3, standard library only.

The nursery is the parent of all workers and has one thread, so that forking it is safe. It alone kills and buries them: a
process that it has not waited for yet keeps its identifier, so that no signal can reach a stranger. It goes, with its
workers and all that these have started, when the pool's process is gone.

Pool to nursery, and nursery to pool: `MESSAGE`s. Pool to worker: `LENGTH`, then the pickled (function, arguments) of a check.
Worker to pool: a `LENGTH` of zero when it starts on the check; then `LENGTH` and its grade as JSON. What a worker says is read
as data and never as code.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Container, Sequence
from contextlib import suppress
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from nevergiveup.loop import reward_of
from nevergiveup.types import Grade, Score, Unverified

MESSAGE = struct.Struct(">cIi")
"""What, worker, value. FORK comes with the worker's end of its socket; FAILED is followed by that many bytes of text."""

FORK, KILL = b"f", b"k"
READY, FAILED, FORKED, ENDED = b"R", b"E", b"F", b"X"

LENGTH = struct.Struct(">Q")
"""Number of bytes that follow."""

MAX_RESULT = 16 << 20
"""Bytes of a grade; a longer one is no verdict."""

ORPHAN_CHECK_S = 1.0
"""How often the nursery looks whether its parent lives: a fork of the parent may hold the socket open."""

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of Linux' prctl


def main(fd: int, parent: int, preload: Sequence[str], memory_mb: int) -> NoReturn:
    """Runs until the other side of `fd` is closed, or the process `parent` is gone."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PDEATHSIG, signal.SIGKILL)  # nobody looks at the socket while modules are imported
    for module in preload:
        try:
            import_module(module)
        except BaseException as error:  # whatever an import raises is told to the pool
            text = f"import of {module} failed: {''.join(traceback.format_exception_only(error)).strip()}".encode()
            with suppress(OSError):
                control.sendall(MESSAGE.pack(FAILED, 0, len(text)) + text)
            os._exit(1)
    _prctl(_PDEATHSIG, 0)  # from here on it must live to end what the workers started
    _prctl(_CHILD_SUBREAPER, 1)  # what a dead worker leaves becomes a child of ours
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    os.close(silent)
    gc.collect()
    gc.freeze()  # workers share these pages until they write to them
    children: dict[int, int] = {}  # process -> worker
    try:
        control.sendall(MESSAGE.pack(READY, 0, 0))
        _nurse(control, parent, memory_mb, children)
    except (OSError, EOFError):
        pass  # the pool has gone
    finally:
        _end_all(children)
        os._exit(0)  # no exit handler of an imported module may hold the end up


def _nurse(control: socket.socket, parent: int, memory_mb: int, children: dict[int, int]) -> None:
    bell, hammer = socket.socketpair()
    for end in (bell, hammer):
        end.setblocking(False)
    signal.set_wakeup_fd(hammer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # what rings the bell
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(bell, selectors.EVENT_READ)
    ours = (control, bell, hammer, selector)
    while os.getppid() == parent:
        for key, _ in selector.select(ORPHAN_CHECK_S):
            if key.fileobj is bell:
                with suppress(BlockingIOError):
                    bell.recv(4096)
                continue
            message, fds, _, _ = socket.recv_fds(control, MESSAGE.size, 1)
            what, worker, _ = MESSAGE.unpack(message + read_exactly(control, MESSAGE.size - len(message)))
            if what == FORK:
                children[_fork(fds[0], memory_mb, ours)] = worker
                control.sendall(MESSAGE.pack(FORKED, worker, 0))
            else:
                for process in [process for process, its in children.items() if its == worker]:
                    _kill(process)
        for process, status in _buried(children):
            if process in children:
                control.sendall(MESSAGE.pack(ENDED, children.pop(process), status))


def _buried(workers: Container[int]) -> list[tuple[int, int]]:
    """Children that have ended, and their exit status (negative: a signal). What is left of a worker's group ends with it."""
    found = []
    with suppress(ChildProcessError):
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid in workers:
                with suppress(OSError):
                    os.killpg(info.si_pid, signal.SIGKILL)
            found.append((info.si_pid, os.waitstatus_to_exitcode(os.waitpid(info.si_pid, 0)[1])))
    return found


def _kill(process: int) -> None:
    """A child of ours, its group, and what it has started in groups of their own (sandboxes of a reward function)."""
    with suppress(OSError):
        os.kill(process, signal.SIGSTOP)  # it can bury nobody now, so that the identifiers of its children stay theirs
    for started in _descendants(process):
        with suppress(OSError):
            os.kill(started, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(process, signal.SIGKILL)
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)  # where it has left its group


def _descendants(process: int) -> list[int]:
    found = []
    with suppress(OSError):  # no such folder: it has ended, or the system has none
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _end_all(children: dict[int, int]) -> None:
    for process in children:
        _kill(process)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for process in _descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        _buried(children)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(0.001)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _fork(fd: int, memory_mb: int, ours: Sequence[Any]) -> int:
    os.set_inheritable(fd, False)
    nursery = os.getpid()
    process = os.fork()
    if process:
        os.close(fd)
        with suppress(OSError):
            os.setpgid(process, process)  # here and there, so that it is done before either goes on
        return process
    try:
        for end in ours:
            end.close()
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(name, signal.SIG_DFL)
        with suppress(OSError):
            os.setpgid(0, 0)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            _, hard = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a crash is an ordinary event here
            _work(socket.socket(fileno=fd), memory_mb)
    finally:
        os._exit(1)


def _work(source: socket.socket, memory_mb: int) -> NoReturn:
    process = os.getpid()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = _held()  # by imports; what checks leave behind is not added to it
    while True:
        try:
            data = read_exactly(source, LENGTH.unpack(read_exactly(source, LENGTH.size))[0])
        except (OSError, EOFError):
            os._exit(0)  # the pool has gone
        is_out_of_memory = False
        grade: Grade
        try:
            before = _held()
            function, arguments = pickle.loads(data)  # imports the module of the function
            held += max(0, _held() - before)
            source.sendall(LENGTH.pack(0))
            if held:
                limit = held + (memory_mb << 20)
                resource.setrlimit(
                    resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
                )
            grade = _checked(function(*arguments))
        except MemoryError:
            grade, is_out_of_memory = Unverified(f"memory: more than {memory_mb} MiB"), True
        except BaseException:  # SystemExit too: whatever a reward function raises says nothing about the completion
            grade = Unverified(traceback.format_exc())
        if os.getpid() != process:
            os._exit(0)  # a fork that the function forgot to end
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was left set would end another check
        is_spent = is_out_of_memory or _held() > held + (memory_mb << 19) or not _has_streams()
        answer = _encoded(grade, is_out_of_memory, is_spent)
        source.sendall(LENGTH.pack(len(answer)) + answer)
        if is_spent:
            os._exit(0)


def _held() -> int:
    """Bytes of address space of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _has_streams() -> bool:
    try:
        for fd in range(3):
            os.fstat(fd)
    except OSError:
        return False
    return True


def _checked(grade: Any) -> Grade:
    """The grade with an exact reward. Raises TypeError and ValueError for what is none."""
    if isinstance(grade, Unverified):
        return grade
    if isinstance(grade, Score):
        parts = {name: float(part) for name, part in grade.parts.items()}
        return Score(reward_of(grade), grade.reason, grade.answer, parts)
    return reward_of(grade)


def _encoded(grade: Grade, is_out_of_memory: bool, is_spent: bool) -> bytes:
    said: dict[str, Any] = {"is_out_of_memory": is_out_of_memory, "is_spent": is_spent}
    try:
        if isinstance(grade, Unverified):
            words: dict[str, Any] = {"unverified": grade.reason}
        elif isinstance(grade, Score):
            story = {"reason": grade.reason, "answer": grade.answer, "parts": dict(grade.parts)}
            words = {"reward": Fraction(grade.reward).as_integer_ratio(), "story": story}
        else:
            words = {"reward": Fraction(grade).as_integer_ratio()}
        data = json.dumps(said | words).encode()
        if len(data) <= MAX_RESULT:
            return data
        problem = f"its grade takes {len(data)} bytes, more than {MAX_RESULT}"
    except (TypeError, ValueError, MemoryError) as error:
        problem = f"its grade cannot be sent: {error}"
    return json.dumps(said | {"unverified": problem}).encode()


def decoded(data: bytes) -> tuple[Grade, bool, bool]:
    """A grade; whether memory ran out; whether the worker leaves. Raises ValueError, TypeError or KeyError for what is none."""
    said = json.loads(data)
    grade: Grade
    if "unverified" in said:
        grade = Unverified(said["unverified"])
    else:
        reward = Fraction(*said["reward"])
        grade = reward.numerator if reward.denominator == 1 else reward
        if "story" in said:
            grade = Score(grade, **said["story"])
    return grade, bool(said["is_out_of_memory"]), bool(said["is_spent"])


def read_exactly(source: socket.socket, n: int) -> bytes:
    """n bytes. Raises EOFError when the other side ends before."""
    data = bytearray()
    while len(data) < n:
        chunk = source.recv(min(n - len(data), 1 << 20))
        if not chunk:
            raise EOFError("the other side has gone")
        data += chunk
    return bytes(data)
