"""Runs that are killed, starved and lied to, over and over, and what their folders tell afterwards. Linux, two cores.

    python benchmarks/chaos.py kills [--n 100]     kill -9 of the whole run at random moments, resumed each time (25 minutes)
    python benchmarks/chaos.py trouble [--n 60]    kill -9 of engine, graders and trainer, engines and graders that stand still,
                                                   weight syncs that fail or come late, a disk that is full (10 minutes)

Both end with 1 when a law is broken: after every end of a process the checkpoint that is there is whole; at the end every
prompt has exactly one outcome an epoch, and the events, the ledger and the metrics agree. `kills` also compares the pass rates
with those of runs that nobody disturbed, from the same start with the same budget.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import methodcaller
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from safetensors import safe_open

from nevergiveup.checkpoints import newest_checkpoint
from nevergiveup.cli import main as ngu
from nevergiveup.events import Failed, Judged, Planned, Reissued, Trained, WentStale, read_events

UNDISTURBED = 4
BUDGET = 600_000
"""Completions of a run of `kills`: enough for a hundred short lives."""
LIFE_S = 9.0
"""A life is killed at a random moment up to so long: starting up is about half of that."""
GROW_S = 60.0
"""A life in which nothing was killed ends after so long."""


# ------------------------------------------------------------------------ the laws


def check_checkpoint(out: Path) -> int:
    """Reads every byte of the newest checkpoint; returns its step, -1 where there is none."""
    newest = newest_checkpoint(out)
    if newest is None:
        return -1
    for path in newest.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    file.get_tensor(name)
    return int(newest.name.split("-")[1].partition(".")[0])


def ends(out: Path) -> Iterator[tuple[str, int]]:
    """(prompt, epoch) of every outcome, in the order of the events."""
    for _, event in read_events(out / "events.jsonl"):
        match event:
            case Judged() | Planned():
                is_end = bool(event.outcome)
            case Failed() | WentStale():
                is_end = event.closed
            case Reissued():
                is_end = event.request is None
            case _:
                is_end = isinstance(event, Trained)
        if is_end:
            yield event.prompt, event.epoch  # type: ignore[union-attr]  # every one of these has both


def check_run(out: Path) -> str:
    """Raises AssertionError for a law that does not hold; returns what was checked, in words."""
    n_ends = Counter(ends(out))
    twice = [key for key, n in n_ends.items() if n > 1]
    assert not twice, f"{len(twice)} prompts with two outcomes in an epoch: {twice[:3]}"

    state = json.loads((newest_checkpoint(out) / "scheduler.json").read_text())  # type: ignore[operator]
    prompts = [json.loads(line.split(" ", 1)[1]) for line in (out / "prompts.txt").read_text().splitlines()]
    last = max(epoch for _, epoch in n_ends)
    places = ("in_flight", "queue", "waiting", "ready")
    still_open = {(chain["prompt"], chain["epoch"]) for place in places for chain in state[place]}
    missing = [
        (prompt, epoch)
        for epoch in range(last)
        for prompt in prompts
        if (prompt, epoch) not in n_ends and (prompt, epoch) not in still_open
    ]
    assert not missing, f"{len(missing)} prompts without an outcome in an epoch: {missing[:3]}"

    summary = json.loads((out / "summary.json").read_text())
    ledger = {key: n for key, n in summary["ledger"].items() if key != "chains"}
    assert ledger.pop("drawn") == sum(ledger.values()), ledger
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, summary["steps"] + 1)), "a step is missing, or there twice"
    trained = sum(event.n_trained for _, event in read_events(out / "events.jsonl") if isinstance(event, Trained))
    assert trained == ledger["trained"], (trained, ledger)
    return (
        f"{sum(n_ends.values()):,} outcomes of {len(prompts)} prompts in {last + 1} epochs, each once; "
        f"{summary['ledger']['drawn']:,} completions, each with one fate, {ledger['reissued']} of them asked for again"
    )


# --------------------------------------------------------------------- processes


def start(out: Path, words: list[str], log: Path, faults: int | None = None) -> subprocess.Popen[bytes]:
    """`ngu train`, in a process group of its own; with --resume where there is a run. faults: seed of those from within."""
    words = ["train", "--resume", str(out)] if (out / "config.json").exists() else ["train", *words, "--out", str(out)]
    within = [] if faults is None else ["within", str(faults)]
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, __file__, *(within or ["plain"]), *words],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(of: subprocess.Popen[bytes]) -> dict[str, list[int]]:
    """Those of a run, by part: engine, grader (the workers, and what makes them)."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    children = [pid for pid, parent in parents.items() if parent == of.pid]
    nursery = [pid for pid in children if "nursery" in commands.get(pid, "")]
    workers = [pid for pid, parent in parents.items() if parent in nursery]
    return {"engine": [pid for pid in children if "spawn_main" in commands.get(pid, "")], "grader": nursery + workers}


def first_life(out: Path, words: list[str], log: Path) -> None:
    """As far as the first checkpoint, then kill -9: the warm start takes longer than any of the lives that follow."""
    process = start(out, words, log)
    while newest_checkpoint(out) is None:
        if process.poll() is not None:
            sys.exit(f"the run failed with {process.returncode}: {log.read_text()[-2000:]}")
        time.sleep(0.2)
    kill(process)


# -------------------------------------------------------------------------- kills


def kills(n: int, root: Path) -> None:
    rng = Random(0)
    out, log = root / "killed", root / "killed.log"
    words = ["demo", "--max-completions", str(BUDGET), "--checkpoint-every", "2", "--eval.every", "0"]
    words += ["--learner.lr", "1e-4"]  # so that there is still something to learn when the budget ends
    n_killed, steps = 0, [-1]
    first_life(out, words, log)
    began = time.monotonic()
    while True:
        process = start(out, words, log)
        if n_killed < n:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, LIFE_S))
        else:
            process.wait()
        if process.poll() is None:
            kill(process)
            n_killed += 1
            steps.append(check_checkpoint(out))
            assert steps[-1] >= steps[-2], "it fell back"
            print(f"kill {n_killed}: checkpoint of step {steps[-1]} is whole", flush=True)
            continue
        if process.returncode:
            sys.exit(f"the run failed with {process.returncode}: {log.read_text()[-2000:]}")
        if n_killed < n:
            sys.exit(f"the run ended after {n_killed} kills: give it a larger budget")
        break
    seconds = time.monotonic() - began
    print(f"{n_killed} kills in {seconds:.0f} s, at {len(set(steps)) - 1} different checkpoints")
    print(check_run(out))

    rates = []
    for i in range(UNDISTURBED):
        again = root / f"undisturbed-{i}"
        shutil.rmtree(again, ignore_errors=True)
        process = start(again, [*words, "--model.path", str(out / "start")], root / "undisturbed.log")
        if process.wait():
            sys.exit(f"an undisturbed run failed: {(root / 'undisturbed.log').read_text()[-2000:]}")
        check_run(again)
        rates.append(final_rates(again))
    killed = final_rates(out)
    print("\nheld-out pass@1 at the end      killed   undisturbed")
    worst = 0.0
    for bucket, rate in killed.items():
        others = [other[bucket] for other in rates]
        slack = max(max(others) - min(others), 0.01)
        worst = max(worst, (min(others) - rate) / slack, (rate - max(others)) / slack)
        print(f"{bucket:28}  {rate:8.3f}   {mean(others):.3f} ({', '.join(f'{other:.3f}' for other in others)})")
    print(f"outside the range of the undisturbed runs by at most {max(worst, 0):.2f} of that range (or of .01)")
    if worst > 1:
        sys.exit("the killed run is outside the noise")


def final_rates(out: Path) -> dict[str, float]:
    rows = json.loads((out / "summary.json").read_text())["evaluations"]
    rates: dict[str, float] = [row for row in rows if row["split"] == "heldout"][-1]["pass_rates"]
    return rates


# ------------------------------------------------------------------------ trouble


def trouble(n: int, root: Path) -> None:
    rng = Random(1)
    out, log = root / "troubled", root / "troubled.log"
    words = [
        *("manufactoria-tiny", "--checkpoint-every", "3", "--eval.every", "0", "--eval.n", "4"),
        *("--max-completions", "400_000", "--engine-restarts", "1000", "--sync-s", "20", "--stall-s", "60"),
        *("--grading.timeout-s", "3"),
    ]
    first_life(out, words, log)
    did: Counter[str] = Counter()
    n_lives = 0
    while True:
        process = start(out, words, log, faults=n_lives)
        n_lives += 1
        is_over = False
        await_delivery(process, out / "events.jsonl")
        while process.poll() is None:
            quiet = rng.uniform(0.5, 6) if sum(did.values()) < n else GROW_S
            with suppress(subprocess.TimeoutExpired):
                process.wait(quiet)
            if process.poll() is not None:
                break
            if sum(did.values()) >= n:
                process.send_signal(signal.SIGTERM)  # it has had enough: it saves and ends
                process.wait()
                is_over = True
                break
            disturb(process, rng, did)
        code = process.returncode
        step = check_checkpoint(out)
        print(f"life {n_lives} ended with {code} at step {step}; so far {dict(did)}", flush=True)
        if code not in (0, 1, 130, -signal.SIGKILL):
            sys.exit(f"status {code}: {log.read_text()[-2000:]}")
        if code == 0 or is_over:
            break
    text = log.read_text()
    assert "AssertionError" not in text, text[-3000:]
    seen = {
        "engine started again": "started again",
        "checkpoint that found no room": "cannot be written",
        "weight sync that failed for good": "injected: the weights were refused",
        "weight sync that took too long": "did not take the weights",
    }
    for what, words_of_it in seen.items():
        print(f"{what}: {text.count(words_of_it)} times")
    print(f"{n_lives} lives, {dict(did)}")
    print(check_run(out))


def await_delivery(process: subprocess.Popen[bytes], events: Path) -> None:
    """Until a life has come so far that its log grows (a resume cuts it first): starting up is what `kills` disturbs."""
    lowest = events.stat().st_size
    while process.poll() is None and (size := events.stat().st_size) < lowest + 4096:
        lowest = min(lowest, size)
        time.sleep(0.2)


def disturb(process: subprocess.Popen[bytes], rng: Random, did: Counter[str]) -> None:
    """Kills a process, or has it stand still for a while."""
    part, kills_it = rng.choices((("trainer", True), *product(("engine", "grader"), (True, False))), (1, 3, 2, 3, 3))[0]
    if part == "trainer":
        kill(process)
    elif not (found := processes(process)[part]):
        return  # it is just starting
    elif kills_it:
        _signal(rng.choice(found), signal.SIGKILL)
    else:
        victim = rng.choice(found)
        _signal(victim, signal.SIGSTOP)
        time.sleep(rng.choice((1, 3, 25) if part == "engine" else (0.5, 2, 5)))
        _signal(victim, signal.SIGCONT)
    did[f"{part} {'killed' if kills_it else 'stood still'}"] += 1


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def within(seed: int, words: list[str]) -> int:
    """`ngu` whose checkpoints find the disk full, and whose weight syncs fail before or after they are done, now and then.
    The verdicts of its task come from grader processes, as they do for tasks that need time."""
    from nevergiveup import checkpoints
    from nevergiveup.loop import Loop
    from nevergiveup.protocols import InfrastructureError, Weights
    from nevergiveup.tasks.manufactoria_tiny import ManufactoriaTiny
    from nevergiveup.types import Check, Completion, Prompt

    rng = Random(seed)
    sync_file = checkpoints.fsync

    def fsync(path: Path) -> None:
        if rng.random() < 0.02:
            with suppress(OSError):  # as far as it came
                os.truncate(path, rng.randrange(path.stat().st_size + 1))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync_file(path)

    class LyingEngine:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        async def load(self, weights: Weights, version: int) -> None:
            fate = rng.random()
            if fate < 0.10:
                raise InfrastructureError("injected: the weights were refused")
            await self._engine.load(weights, version)
            if fate < 0.20:
                raise InfrastructureError("injected: the weights were refused, after they had come")
            if fate < 0.25:
                time.sleep(0.5)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    make = Loop.__init__

    def grade_elsewhere(self: ManufactoriaTiny, prompt: Prompt, completion: Completion) -> Check:
        light = replace(completion, top_ids=None, top_logprobs=None)
        return Check(methodcaller("grade", prompt, light), (self,))  # over there it is the real one

    def init(self: Loop, scheduler: Any, engine: Any, *more: Any, **options: Any) -> None:
        make(self, scheduler, LyingEngine(engine), *more, **options)

    checkpoints.fsync = fsync
    Loop.__init__ = init  # type: ignore[method-assign]
    ManufactoriaTiny.grade = grade_elsewhere  # type: ignore[method-assign]
    return ngu(words)


def main() -> None:
    if sys.argv[1:2] == ["plain"]:
        sys.exit(ngu(sys.argv[2:]))
    if sys.argv[1:2] == ["within"]:
        sys.exit(within(int(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "trouble"])
    parser.add_argument("--n", type=int, help="how often (default: 100 kills, or 60 times of trouble)")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), metavar="DIR", help="default: runs/chaos")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.out.glob("killed*" if options.what == "kills" else "troubled*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if options.what == "kills":
        kills(options.n or 100, options.out)
    else:
        trouble(options.n or 60, options.out)


if __name__ == "__main__":
    main()
