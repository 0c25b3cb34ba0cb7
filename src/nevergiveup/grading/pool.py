"""Worker processes in which checks are worked out, and killed when they take too long or too much memory.

Layer 3. Standard library only; `nursery.py` beside it is what runs on the other side. Who does what:

    this process     one thread (`_Dispatcher`) hands one check at a time to each idle worker, and keeps its clock
    nursery          one process, started as a command: imports what checks need once, forks the workers, kills and buries them
    worker           reads a check, says that it starts, works it out, writes the grade

The clock of a check starts when its worker starts on it: neither queueing nor the import of its module counts. A worker that
is killed is replaced at once by a fork of the nursery. As nothing here depends on `multiprocessing`, the pool works the same
in the main thread, a worker thread, an asyncio task, a spawned and a daemonic process. A fork of this process that uses the
pool gets processes of its own.

Workers have no input, and what they print goes nowhere. They keep what functions leave behind (modules, caches, threads), but
are replaced when that is much memory or a closed stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO

from nevergiveup.grading.nursery import (
    ENDED,
    FAILED,
    FORK,
    FORKED,
    KILL,
    LENGTH,
    MAX_RESULT,
    MESSAGE,
    READY,
    decoded,
)
from nevergiveup.loop import GraderBroken, TaskGrader, reward_of
from nevergiveup.types import Check, Completion, Exact, Grade, Prompt, Unverified

START_S = 120.0
"""Longest time for the imports of the nursery; and for a worker to read a check, which may import its module."""

KILL_S = 3.0
"""Longest time for a killed worker, or for the nursery of a closed pool, to be gone; then the nursery itself is killed."""

MAX_TRIES = 2
"""How often a check is handed out when something from outside kills its worker."""

MAX_LOST_IN_A_ROW = 10
"""Processes that were lost for no check's fault, without a grade in between, after which the pool gives up."""

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_CLOSED = "the grader pool was closed"
_GARBLED = "worker said what no worker says: its function has written to a file that it did not open"

_BOOT = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path'); "
    "from nevergiveup.grading.nursery import main; main(**options)"
)


class GraderPool:
    """A Checker with `n_workers` killable processes. They start with the first check, or with `start`.

    timeout_s: wall-clock limit of one check. memory_mb: what a check may allocate (MiB of address space) on top of what its
    worker holds after imports. preload: modules imported once, for all workers (("math_verify",) takes half a second and
    60 MB). cache_size: grades of checks with a key that are kept, the latest; those without a verdict are not.

    A check without a grade in time, that raises, that runs out of memory or whose worker dies is Unverified, with the reason.
    Leaving the context, or `close`, ends all processes within seconds, whatever they do; checks that are still out become
    Unverified. A pool that is dropped ends its processes once its last check is done. When the processes cannot be made
    (a module of `preload` fails), `start`, `grade`, `check` and the futures raise GraderBroken.
    """

    def __init__(
        self,
        n_workers: int = 2,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        preload: Sequence[str] = (),
        cache_size: int = 100_000,
    ) -> None:
        for name, value, least in (
            ("n_workers", n_workers, 1),
            ("memory_mb", memory_mb, 1),
            ("cache_size", cache_size, 0),
        ):
            if value < least:
                raise ValueError(f"{name} of a grader pool must be at least {least}, not {value}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s of a grader pool must be more than 0 seconds, not {timeout_s}")
        if isinstance(preload, str):
            raise ValueError(
                f"preload of a grader pool must be a list of module names, not {preload!r}: write ({preload!r},)"
            )
        self._make = partial(_Dispatcher, n_workers, timeout_s, memory_mb, tuple(preload), cache_size)
        self._lock = threading.Lock()
        self._dispatcher: _Dispatcher | None = None
        self._closed = False
        _pools.add(self)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the processes and waits until all can work. Raises GraderBroken."""
        self._running().wait_until_ready()

    def close(self) -> None:
        """Ends all processes; returns when they are gone. May be called again, and from any thread."""
        with self._lock:
            self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.ask_to_end()
            if threading.current_thread() is not self._dispatcher:  # the callback of a future may close the pool
                self._dispatcher.join()

    def submit(self, check: Check) -> Future[Grade]:
        """The grade to come. Thread-safe, does not block.

        A future can be cancelled at any time. A check that nobody waits for is not begun; one that runs goes on, and its
        grade is kept if it has a key. Raises RuntimeError when the pool is closed, ValueError for a check that cannot be
        sent to another process.
        """
        return self._running().submit(check, self)

    async def check(self, check: Check) -> Grade:
        return await asyncio.wrap_future(self.submit(check))

    def grade(self, check: Check) -> Grade:
        """As `check`, blocking. Not for callbacks of futures: these run in the thread that would have to answer."""
        return self.submit(check).result()

    def counters(self) -> dict[str, int]:
        """Cumulative: n_checked (a worker answered), n_cached (answered from the cache, or together with an equal check),
        n_timeouts (killed by the clock), n_out_of_memory (part of n_checked), n_died (workers that ended unasked, with or
        without a check). n_workers: alive now."""
        names = ("n_checked", "n_cached", "n_timeouts", "n_out_of_memory", "n_died", "n_workers")
        return dict.fromkeys(names, 0) if self._dispatcher is None else self._dispatcher.counters()

    def _running(self) -> _Dispatcher:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader pool is closed")
            if self._dispatcher is None:
                dispatcher = self._make()
                self._finalizer = weakref.finalize(self, dispatcher.ask_to_end)
                dispatcher.start()
                self._dispatcher = dispatcher
            return self._dispatcher

    def _after_fork(self) -> None:
        """In the child: the thread is gone, the processes belong to the parent, and the lock may be in any state."""
        self._lock = threading.Lock()
        if self._dispatcher is not None:
            self._finalizer.detach()
            self._dispatcher.let_go()
            self._dispatcher = None


_pools: weakref.WeakSet[GraderPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class _Job:
    """One check and all who wait for its grade. pool: keeps it alive until then."""

    key: Hashable
    data: bytes
    futures: list[Future[Grade]]
    pool: GraderPool
    tries: int = 0


@dataclass(slots=True)
class _Worker:
    """is_alive: it can be given checks. has_begun: with its job. deadline: when it is to be killed or, once it is, must have
    ended; None while it is idle. killed_for: why we killed it, "" if we did not. out, got: bytes to write, and read so far."""

    id: int
    socket: socket.socket
    is_alive: bool = False
    job: _Job | None = None
    has_begun: bool = False
    deadline: float | None = None
    killed_for: str = ""
    timed_out: bool = False
    out: bytearray = field(default_factory=bytearray)
    got: bytearray = field(default_factory=bytearray)


class _Dispatcher(threading.Thread):
    """Owns the processes of a pool. The first methods are for any thread; the others run in this one."""

    def __init__(
        self, n_workers: int, timeout_s: float, memory_mb: int, preload: tuple[str, ...], cache_size: int
    ) -> None:
        super().__init__(name="grader pool", daemon=True)
        self._n_workers, self._timeout_s, self._memory_mb, self._preload = n_workers, timeout_s, memory_mb, preload
        self._lock = threading.Lock()  # of what follows, up to the blank line
        self._queue: deque[_Job] = deque()
        self._open: dict[Hashable, _Job] = {}  # queued or running, by key
        self._cache: OrderedDict[Hashable, Grade] = OrderedDict()
        self._cache_size = cache_size
        self._has_ended = False
        self._n_cached = 0

        self._asked_to_end = False
        self._broken = ""
        self._counts = dict.fromkeys(("n_checked", "n_timeouts", "n_out_of_memory", "n_died"), 0)
        self._ready = threading.Event()
        self._workers: dict[int, _Worker] = {}
        self._n_forked = self._n_lost_in_a_row = 0
        self._nursery: subprocess.Popen[bytes] | None = None
        self._nursery_errors: IO[bytes] | None = None
        self._control: socket.socket | None = None
        self._control_got = bytearray()
        self._start_deadline: float | None = None
        self._selector = selectors.DefaultSelector()
        self._bell, self._hammer = socket.socketpair()
        self._bell.setblocking(False)
        self._hammer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._hear_bell)

    def submit(self, check: Check, pool: GraderPool) -> Future[Grade]:
        future: Future[Grade] = Future()
        key = None if check.key is None else (check.function.__module__, check.function.__qualname__, check.key)
        if key is not None:
            with self._lock:
                if self._is_shared(key, future):
                    return future
        data = _packed(check)  # outside the lock: it may run anything
        with self._lock:
            if self._has_ended:
                if self._broken:
                    future.set_exception(GraderBroken(self._broken))
                else:
                    future.set_result(Unverified(_CLOSED))
                return future
            if key is not None and self._is_shared(key, future):
                return future
            job = _Job(key, data, [future], pool)
            self._queue.append(job)
            if key is not None:
                self._open[key] = job
        self._ring()
        return future

    def ask_to_end(self) -> None:
        """Without a lock: the garbage collector may call this in the middle of anything."""
        self._asked_to_end = True
        self._ring()

    def wait_until_ready(self) -> None:
        self._ready.wait()
        if self._broken:
            raise GraderBroken(self._broken)

    def counters(self) -> dict[str, int]:
        n_workers = sum(worker.is_alive for worker in list(self._workers.values()))
        return self._counts | {"n_cached": self._n_cached, "n_workers": n_workers}

    def let_go(self) -> None:
        """In a fork of the process: closes what would keep sockets open, and touches nothing that is shared."""
        for worker in self._workers.values():
            worker.socket.close()
        if self._control is not None:
            self._control.close()
        self._bell.close()
        self._hammer.close()
        self._selector.close()

    def _ring(self) -> None:
        with suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._hammer.send(b".")

    def _is_shared(self, key: Hashable, future: Future[Grade]) -> bool:
        """Whether the grade is known, or being worked out. Under the lock."""
        if key in self._cache:
            self._cache.move_to_end(key)
            future.set_result(self._cache[key])
        elif key in self._open:
            self._open[key].futures.append(future)
        else:
            return False
        self._n_cached += 1
        return True

    # -- in the thread

    def run(self) -> None:
        try:
            self._start_nursery()
            while not self._asked_to_end and not self._broken:
                self._hand_out()
                for key, events in self._selector.select(self._patience()):
                    key.data(events)
                self._keep_clock()
        except BaseException as error:  # whatever ends the thread is told to those who wait
            self._broken = f"the thread of the grader pool ended: {error!r}"
            raise
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            jobs = [*(worker.job for worker in self._workers.values() if worker.job is not None), *self._queue]
            self._queue.clear()
            self._open.clear()
        if self._control is not None:
            self._control.close()  # at which the nursery ends its workers and goes
        for worker in self._workers.values():
            worker.socket.close()
        self._workers.clear()
        for job in jobs:
            for future in job.futures:
                if future.set_running_or_notify_cancel():
                    if self._broken:
                        future.set_exception(GraderBroken(self._broken))
                    else:
                        future.set_result(Unverified(_CLOSED))
        self._end_nursery()
        self._selector.close()
        self._bell.close()
        self._hammer.close()
        self._ready.set()

    def _hear_bell(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)

    # -- the nursery

    def _start_nursery(self) -> None:
        here, there = socket.socketpair()
        options = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "fd": there.fileno(),
            "parent": os.getpid(),
            "preload": self._preload,
            "memory_mb": self._memory_mb,
        }
        self._control = here
        self._control_got.clear()
        with there:
            try:
                self._nursery_errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end_nursery)
                self._nursery = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, json.dumps(options)],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._nursery_errors,
                    start_new_session=True,  # Ctrl-C in the terminal is for this process
                )
            except OSError as error:
                self._broken = f"the processes for grading cannot be started: {error}"
                return
        self._start_deadline = time.monotonic() + START_S
        self._selector.register(here, selectors.EVENT_READ, self._hear_nursery)

    def _hear_nursery(self, _: int) -> None:
        assert self._control is not None
        try:
            chunk = self._control.recv(1 << 16)
        except OSError:
            chunk = b""
        got = self._control_got
        got += chunk
        while len(got) >= MESSAGE.size:
            what, worker_id, value = MESSAGE.unpack_from(got)
            n_bytes = MESSAGE.size + (value if what == FAILED else 0)
            if len(got) < n_bytes:
                break
            text = bytes(got[MESSAGE.size : n_bytes]).decode()
            del got[:n_bytes]
            if what == FAILED:
                self._broken = f"the processes for grading cannot be started: {text}"
            elif what == READY:
                self._start_deadline = None
                for _ in range(self._n_workers):
                    self._fork()
            elif what == FORKED and worker_id in self._workers:
                self._workers[worker_id].is_alive = True
                if all(worker.is_alive for worker in self._workers.values()):
                    self._ready.set()
            elif what == ENDED and worker_id in self._workers:
                worker = self._workers[worker_id]
                if worker.job is None and not worker.killed_for:
                    self._lose("workers without a check")
                self._bury(worker, value)
                self._fork()
        if not chunk and not self._broken:
            self._lose_nursery()

    def _lose_nursery(self) -> None:
        """Something has killed it, and its workers with it: a new one takes over."""
        if self._start_deadline is not None:
            self._broken = f"the processes for grading cannot be started: {self._why_not_started()}"
            return
        for worker in list(self._workers.values()):
            self._bury(worker, -signal.SIGKILL)
        self._end_nursery()
        self._lose("the process that makes the grading workers")
        if not self._broken:
            self._start_nursery()

    def _why_not_started(self) -> str:
        assert self._nursery is not None
        assert self._nursery_errors is not None
        with suppress(subprocess.TimeoutExpired):
            self._nursery.wait(KILL_S)
        self._nursery_errors.seek(0)
        lines = self._nursery_errors.read().decode(errors="replace").strip().splitlines()
        return f"{sys.executable} ended with status {self._nursery.returncode}: {lines[-1] if lines else 'it said nothing'}"

    def _end_nursery(self) -> None:
        if self._control is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._control)
            self._control.close()
            self._control = None
        if self._nursery is not None:
            try:
                self._nursery.wait(KILL_S if self._start_deadline is None else 0)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
            self._nursery = None
        if self._nursery_errors is not None:
            self._nursery_errors.close()
            self._nursery_errors = None

    def _lose(self, what: str) -> None:
        self._n_lost_in_a_row += 1
        if self._n_lost_in_a_row > MAX_LOST_IN_A_ROW:
            self._broken = f"{what} died again and again ({self._n_lost_in_a_row} times in a row)"

    # -- workers

    def _fork(self) -> None:
        assert self._control is not None
        here, there = socket.socketpair()
        here.setblocking(False)
        self._n_forked += 1
        worker = _Worker(self._n_forked, here)
        self._workers[worker.id] = worker
        self._selector.register(here, selectors.EVENT_READ, partial(self._serve, worker))
        with there, suppress(OSError):  # a dead nursery is noticed by its end of file
            socket.send_fds(self._control, [MESSAGE.pack(FORK, worker.id, 0)], [there.fileno()])

    def _kill(self, worker: _Worker, why: str) -> None:
        worker.killed_for = why
        worker.is_alive = False
        worker.deadline = time.monotonic() + KILL_S
        if self._control is not None:
            with suppress(OSError):  # a dead nursery is noticed by its end of file
                self._control.sendall(MESSAGE.pack(KILL, worker.id, 0))

    def _bury(self, worker: _Worker, status: int) -> None:
        """What a dead worker had to say still counts; else its check is tried again, or gets no verdict."""
        while self._read(worker):
            pass
        del self._workers[worker.id]
        with suppress(KeyError, ValueError):
            self._selector.unregister(worker.socket)
        worker.socket.close()
        if not worker.killed_for:
            self._counts["n_died"] += 1
        job, worker.job = worker.job, None
        if job is None:
            return
        if worker.killed_for:
            self._counts["n_timeouts"] += worker.timed_out
            self._finish(job, Unverified(worker.killed_for))
        elif -status in _FROM_OUTSIDE and job.tries < MAX_TRIES:
            with self._lock:
                self._queue.appendleft(job)
        else:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            self._finish(job, Unverified(f"worker died {how}"))

    def _hand_out(self) -> None:
        for worker in self._workers.values():
            if worker.is_alive and worker.job is None:
                job = self._next_job()
                if job is None:
                    return
                job.tries += 1
                worker.job, worker.has_begun = job, False
                worker.deadline = time.monotonic() + START_S
                worker.out += LENGTH.pack(len(job.data)) + job.data
                self._write(worker)

    def _next_job(self) -> _Job | None:
        with self._lock:
            while self._queue:
                job = self._queue.popleft()
                if not all(future.cancelled() for future in job.futures):
                    return job
                self._open.pop(job.key, None)
        return None

    def _serve(self, worker: _Worker, events: int) -> None:
        if worker.id not in self._workers:
            return  # buried a moment ago, by an earlier event of the same turn
        if events & selectors.EVENT_WRITE:
            self._write(worker)
        if events & selectors.EVENT_READ and not self._read(worker):
            self._selector.unregister(worker.socket)
            if not worker.killed_for:  # it is dying, which the nursery will tell, or its function has closed the socket
                worker.is_alive = False
                worker.deadline = time.monotonic() + KILL_S / 3

    def _write(self, worker: _Worker) -> None:
        waited = bool(worker.out)
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.out:
                del worker.out[: worker.socket.send(worker.out[: 1 << 20])]
        if waited or worker.out:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.out else 0)
            with suppress(KeyError, ValueError):
                self._selector.modify(worker.socket, events, partial(self._serve, worker))

    def _read(self, worker: _Worker) -> bool:
        """Takes a piece of what has come; False when nothing more will come, or nothing is there."""
        try:
            chunk = worker.socket.recv(1 << 18)
        except OSError:
            return False
        if not chunk:
            return False
        got = worker.got
        got += chunk
        while len(got) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(got)
            if length > MAX_RESULT:
                self._distrust(worker)
                return False
            if len(got) < LENGTH.size + length:
                break
            data = bytes(got[LENGTH.size : LENGTH.size + length])
            del got[: LENGTH.size + length]
            self._hear(worker, data)
        return True

    def _hear(self, worker: _Worker, data: bytes) -> None:
        if worker.job is None:
            return
        if not data:
            worker.has_begun = True
            if not worker.killed_for:
                worker.deadline = time.monotonic() + self._timeout_s
            return
        try:
            grade, is_out_of_memory, is_spent = decoded(data)
        except (ValueError, TypeError, KeyError, ZeroDivisionError):
            self._distrust(worker)
            return
        job, worker.job = worker.job, None
        self._n_lost_in_a_row = 0
        self._counts["n_checked"] += 1
        self._counts["n_out_of_memory"] += is_out_of_memory
        if not worker.killed_for:
            worker.deadline = None
            if is_spent:
                self._kill(worker, "it leaves")
        self._finish(job, grade)

    def _distrust(self, worker: _Worker) -> None:
        """Nothing that it says from here on counts."""
        self._kill(worker, _GARBLED)
        job, worker.job = worker.job, None
        if job is not None:
            self._finish(job, Unverified(_GARBLED))

    def _finish(self, job: _Job, grade: Grade) -> None:
        with self._lock:
            if job.key is not None:
                self._open.pop(job.key, None)
                if not isinstance(grade, Unverified):
                    self._cache[job.key] = grade
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
        for future in job.futures:  # nobody can join any more
            if future.set_running_or_notify_cancel():
                future.set_result(grade)

    # -- the clock

    def _patience(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers.values() if worker.deadline is not None]
        if self._start_deadline is not None:
            deadlines.append(self._start_deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _keep_clock(self) -> None:
        now = time.monotonic()
        if self._start_deadline is not None and self._start_deadline <= now:
            self._broken = f"the processes for grading were not ready within {START_S:g} s"
        for worker in list(self._workers.values()):
            if worker.deadline is None or worker.deadline > now:
                continue
            if worker.killed_for:  # and not buried: the nursery hangs
                assert self._nursery is not None
                self._nursery.kill()
                self._lose_nursery()
                return
            if not worker.is_alive:
                self._kill(worker, "worker closed its connection")
            elif not worker.has_begun:
                self._kill(worker, f"the check could not be loaded within {START_S:g} s")
            else:
                worker.timed_out = True
                self._kill(worker, f"timeout: no grade within {self._timeout_s:g} s")


def _packed(check: Check) -> bytes:
    name = getattr(check.function, "__qualname__", repr(check.function))
    if getattr(check.function, "__module__", "") == "__main__":
        raise ValueError(
            f"the function {name} of a check is defined in the program itself; move it into a module of its own"
        )
    try:
        return pickle.dumps((check.function, check.arguments), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the check {name} cannot be sent to another process ({error}); its function must be importable by name and its "
            "arguments picklable"
        ) from error


async def check_canaries(grader: TaskGrader, canaries: Sequence[tuple[Prompt, Completion, Exact]]) -> None:
    """Grades completions whose reward is known, the way that a run grades. Raises GraderBroken for the first wrong one."""
    for prompt, completion, expected in canaries:
        (grade,) = await grader.grade(prompt, [completion])
        if isinstance(grade, Unverified):
            got = f"no verdict: {grade.reason}"
        elif (reward := reward_of(grade)) == expected:
            continue
        else:
            got = str(reward)
        raise GraderBroken(
            f"the grader fails its own test: the answer {completion.text!r} to {prompt.id} (gold answer {prompt.answer!r}) "
            f"must score {expected}, but got {got}"
        )
