"""One run from settings to a trained model, and the folder that tells what happened. Layer 4.

out/config.json      the resolved settings            out/checkpoints/step-N/   all that is needed to go on
out/events.jsonl     one line a decision              out/model/                the trained policy, Hugging Face format
out/metrics.jsonl    one line an optimizer step       out/summary.json          how it ended, ledger, evaluations
out/rates.jsonl      pass rates, prompt by prompt     out/buckets.json          difficulty of each prompt at the start
out/samples.jsonl    what was written, for some prompts
out/evaluations.jsonl    figures by difficulty        out/prompts.txt         what the training data were
out/start/           the warm-started policy (chains, unless a model was given)
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from nevergiveup import build
from nevergiveup.checkpoints import (
    LEARNER,
    data_changes,
    newest_checkpoint,
    write_checkpoint,
    write_json,
    write_prompts,
)
from nevergiveup.config import ACCEPT, differences, settings_from_json, settings_to_json
from nevergiveup.diagnosis import diagnose
from nevergiveup.evaluate import assign_buckets, mean_by_bucket, mean_pass_at_k
from nevergiveup.events import Event, EventWriter, Graded, cut_events, event_parts
from nevergiveup.loop import Loop, Step, TaskGrader
from nevergiveup.metrics import Tally
from nevergiveup.protocols import InfrastructureError
from nevergiveup.report.live import View
from nevergiveup.report.trackers import Trackers
from nevergiveup.rewards import overlong_penalty
from nevergiveup.runtimes.here import HereRuntime, ThreadedLearner
from nevergiveup.runtimes.process import ProcessRuntime
from nevergiveup.samples import SampleLog
from nevergiveup.scheduler import Scheduler
from nevergiveup.settings import FIXED_KEYS, Settings
from nevergiveup.strategies import Allocator, NeverGiveUp
from nevergiveup.task_settings import TINY
from nevergiveup.tasks.chains import Chains
from nevergiveup.types import Completion, Exact, Grade, Request, Score, Unverified, exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nevergiveup.protocols import Engine, Grader, Runtime, Task

STOPS = {
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGHUP: "stopped because its terminal was closed",
}
"""Signals that end a run in good order, and the reason that is given."""

EVENTS = "events.jsonl"
GROWING = ("metrics", "rates", "samples", "evaluations")
"""Files of lines. A resume cuts them, and the events, back to where the checkpoint was saved: what followed happens again."""

DIAGNOSE_STEPS, DIAGNOSE_ROUNDS = 20, 1000
"""Optimizer steps, or scored rounds where there are no steps, after which what they came to is diagnosed."""

SAID_FOR_S = 1800.0
"""A sentence of the diagnosis is not said again for so long."""

STEADY_FROM = 0.1
"""Idle shares of the summary leave out the first tenth of the steps, in which both sides start up."""


def train(
    settings: Settings, out: Path, view: View, *, resume: bool = False, accept_changes: bool = False
) -> dict[str, Any]:
    """Trains until the settings say that it is enough, or until Ctrl-C; returns what summary.json holds.

    resume: go on from the newest checkpoint in `out`, or from the start where there is none yet. Settings that do not change
    what is computed may differ from the saved ones; others, and other data, are refused, unless `accept_changes`.
    Raises ValueError for bad input, before a model is loaded; whatever ends a run early is raised as it is.
    """
    drop_chains = resume and _check_changes(read_settings(out), settings, accept_changes)
    task = build.check(settings)
    checkpoint = newest_checkpoint(out) if resume else None
    if not resume and (out / EVENTS).exists() and (out / EVENTS).stat().st_size:
        raise ValueError(f"{out} holds another run: choose another folder, or go on with it (resume)")
    out.mkdir(parents=True, exist_ok=True)
    with _sole_user(out), build.make_pool(settings) as pool:
        if checkpoint is None:  # where there was a run, it ended before the first one: begin again
            for path in (*event_parts(out / EVENTS), *(out / f"{name}.jsonl" for name in GROWING)):
                path.unlink(missing_ok=True)
        if not resume:
            settings = _with_own_start(settings, out)
        asyncio.run(build.prepare(settings, task, pool, view.note))
        grader = TaskGrader(task, build.checker(settings, pool))
        return _train(settings, out, view, task, grader, _Resume(checkpoint, accept_changes, drop_chains))


@dataclass(frozen=True, slots=True)
class _Resume:
    """checkpoint: to go on from; None begins. accept_changes: other data are no error. drop_chains: see `load_state_dict`."""

    checkpoint: Path | None
    accept_changes: bool
    drop_chains: bool


def _check_changes(was: Settings, now: Settings, accept: bool) -> bool:
    """Whether chains that are open cannot go on. Raises ValueError for changes that are refused."""
    changes = differences(was, now)

    def listed(keys: Iterable[str]) -> str:
        return ", ".join(f"{key} was {changes[key][0]!r} and is {changes[key][1]!r} now" for key in keys)

    if fixed := [key for key in changes if key in FIXED_KEYS]:
        raise ValueError(
            f"{listed(fixed)}: that would be another run; begin one from what this one has learned: ngu train --init RUN"
        )
    asked = [key for key in changes if not now.may_change(key)]
    if asked and not accept:
        raise ValueError(
            f"the run was begun with other settings: {listed(asked)}. Leave them out to go on as before, or add {ACCEPT}"
        )
    return "strategy.name" in changes


def _train(settings: Settings, out: Path, view: View, task: Task, grader: Grader, resume: _Resume) -> dict[str, Any]:
    if resume.checkpoint is None:
        write_json(out / "config.json", settings_to_json(settings))
    try:
        if not settings.model.path and isinstance(settings.task, TINY):
            start: Path | str = out / "start"
            if not Path(start).is_dir():
                _warm_start(settings, Path(start), view.note)
        else:
            start = build.model_folder(settings)
        with closing(Trackers(settings.trackers, out, settings_to_json(settings))) as trackers:
            return asyncio.run(_Run(settings, out, view, trackers, task, grader, start, resume).run())
    finally:
        view.close()


@contextmanager
def _sole_user(out: Path) -> Iterator[None]:
    """Holds the run folder; the lock goes with the process, however it ends."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out} is being trained by another process: choose another folder") from None
        yield


def read_settings(out: Path) -> Settings:
    path = out / "config.json"
    if not path.is_file():
        raise ValueError(f"{out} is no run folder: it has no config.json")
    try:
        row = json.loads(path.read_text())
        if not isinstance(row, dict):
            raise ValueError("it holds no JSON object")
        return settings_from_json(row)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; it was changed or damaged since the run was started") from error


def _with_own_start(settings: Settings, out: Path) -> Settings:
    """A run that begins with a checkpoint of another one keeps a copy of its policy: the other run may remove it."""
    checkpoint = Path(settings.model.path)
    if not (checkpoint / "learner.json").is_file():
        return settings
    half_made = out / ".start.new"
    shutil.rmtree(half_made, ignore_errors=True)
    shutil.copytree(checkpoint, half_made, ignore=shutil.ignore_patterns("learner.json", "optimizer.safetensors"))
    shutil.rmtree(out / "start", ignore_errors=True)
    half_made.rename(out / "start")
    return replace(settings, model=replace(settings.model, path=str((out / "start").absolute())))


def _warm_start(settings: Settings, folder: Path, progress: build.Progress) -> None:
    half_made = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(half_made, ignore_errors=True)
    build.warm_start(settings, half_made, progress)
    half_made.rename(folder)


class _Run:
    """The state of one run: what is counted, when it is evaluated, saved and shown."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        view: View,
        trackers: Trackers,
        task: Task,
        grader: Grader,
        start: Path | str,
        resume: _Resume,
    ) -> None:
        self.settings = settings
        self.task = task
        self.grader = grader
        self.out = out
        self.view = view
        self.trackers = trackers
        self.start = start
        self.resume = resume
        self.is_unsaved = False  # the last checkpoint could not be written
        self.began = time.perf_counter()
        self.earlier_s = 0.0  # of the parts before a resume
        self.total = Tally()
        self.window = Tally()  # since the last step
        self.recent = Tally()  # since the last diagnosis, with the rows of its steps
        self.rows: list[dict[str, float]] = []
        self.recorded: Step | None = None  # the last one in metrics.jsonl
        self.said_at: dict[str, float] = {}  # rule -> seconds
        self.evaluations: list[dict[str, Any]] = []  # split, step, completions, pass_rates by bucket; oldest first
        self.buckets: dict[str, str] = {}
        self.initial: dict[str, float] = {}  # pass rates that the buckets are from
        self.eval_s = 0.0
        self.counters: dict[str, float] = {}
        self.steady: list[
            tuple[float, float, float]
        ] = []  # seconds: of the interval, engine without work, learner waiting

    def seconds(self) -> float:
        return self.earlier_s + time.perf_counter() - self.began

    async def run(self) -> dict[str, Any]:
        import torch

        settings = self.settings
        n_threads = build.threads_per_process(settings)
        if n_threads is not None:
            torch.set_num_threads(n_threads)
        self.tokenizer = build.load_tokenizer(self.start)
        self.data = build.load_data(self.task, settings, self.tokenizer, self.view.note)
        model = build.load_model(self.start, settings.model.dtype)
        self.learner = build.make_learner(settings, model, self.tokenizer, self.start)
        self.model = model
        state = self._restore(self.resume.checkpoint) if self.resume.checkpoint else None
        write_json(self.out / "config.json", settings_to_json(settings))
        write_prompts(self.out, self.data.train)
        self.total.bucket_of = self.window.bucket_of = self.recent.bucket_of = self.buckets
        self.writer = EventWriter(self.out / EVENTS, self.seconds)
        self.metrics_file = (self.out / "metrics.jsonl").open("a", encoding="utf-8")
        self.samples = SampleLog(
            self.out / "samples.jsonl",
            self.data.train,
            n_prompts=settings.sample_prompts,
            seed=settings.seed,
            clock=self.seconds,
            read=lambda tokens: str(self.tokenizer.decode(list(tokens))),
        )
        self.scheduler = self._make_scheduler()
        if state is not None:
            self.scheduler.load_state_dict(state, drop_chains=self.resume.drop_chains)
        runtime = self._make_runtime()
        try:
            await self._show_and_evaluate_start()
            engine: Engine = await runtime.place(
                build.make_engine, "engine", self.start, **build.engine_arguments(settings, n_threads)
            )
            if state is not None:
                await engine.load(await self.learner.weights(), self.learner.version)
                if (
                    self.learner.version > self.scheduler.version
                ):  # it was saved because the engine could not be reached
                    self.scheduler.publish(self.learner.version)
            try:
                reason = await self._loop(engine)
            except Exception as error:  # whatever ends the run: what it has learned is saved, and the error goes on
                self._save_after(error)
                raise
            await engine.close()
            return await self._finish(reason)
        finally:
            await runtime.close()
            self.writer.close()
            self.samples.close()
            self.metrics_file.close()

    def _make_runtime(self) -> Runtime:
        if self.settings.runtime == "here":
            return HereRuntime()
        return ProcessRuntime(max_restarts=self.settings.engine_restarts, note=self.view.note)

    async def _show_and_evaluate_start(self) -> None:
        settings = self.settings
        self.view.begin(
            f"{settings.task.name}, {settings.strategy.name}", self._facts(), settings.steps, settings.max_completions
        )
        steps = {row["step"] for row in self.evaluations}
        for row in self.evaluations:  # a resumed run shows where it began and where it is
            if row["step"] in (min(steps), max(steps)):
                self.view.evaluated(row["split"], row["pass_rates"], row["step"])
        if not self.evaluations:
            if rates := build.probed_rates(settings):
                ids = {prompt.id for prompt in (*self.data.train, *self.data.heldout)}
                self._place({prompt_id: rate for prompt_id, rate in rates.items() if prompt_id in ids}, "probe")
                self.view.note(
                    f"{len(self.buckets)} of {len(ids)} prompts have a difficulty, from {settings.eval.buckets}"
                )
            await self._evaluate(0)

    def _make_scheduler(self) -> Scheduler:
        settings = self.settings
        return Scheduler(
            settings.strategy,
            self.data.train,
            n_groups=settings.batch.n_groups,
            n_completions=settings.batch.n_completions,
            lag=settings.batch.lag,
            max_pending=settings.batch.max_pending,
            retry_order=settings.batch.retry_order,
            max_epochs=settings.epochs,
            max_completions=settings.max_completions,
            seed=settings.seed,
            gradient_norms=True,
            on_event=self._on_event,
        )

    def _facts(self) -> list[str]:
        strategy = self.settings.strategy
        n_parameters = sum(p.numel() for p in self.model.parameters())
        return [
            f"{len(self.data.train)} training prompts, {len(self.data.heldout)} for evaluation; "
            f"policy of {n_parameters / 1e6:.1f} M parameters from {self.start}",
            f"{strategy}",
            strategy.cost_in_words(),
            *(
                ["gradient norms of the right attempts of a probe come from the learner"]
                if isinstance(strategy, Allocator) and strategy.wants_gradient_norms
                else []
            ),
            f"{self.settings.loss}",
            f"run folder {self.out}",
        ]

    def _shaped(self, reward: Exact, completion: Completion) -> Exact:
        sampling = self.settings.sampling
        assert sampling.overlong_buffer is not None
        return exact(
            reward + overlong_penalty(len(completion.tokens), sampling.max_new_tokens, sampling.overlong_buffer)
        )

    def _on_graded(
        self,
        request: Request,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
        rewards: Sequence[Exact | None],
    ) -> None:
        """Keeps what the grader had to say beyond plain numbers, and some of the texts."""
        self.samples.graded(request, completions, grades, rewards)
        scores = [grade for grade in grades if isinstance(grade, Score)]
        unverified = [grade for grade in grades if isinstance(grade, Unverified)]
        if not scores and not unverified:
            return
        parts: dict[str, float] = {}
        for score in scores:
            for name, part in score.parts.items():
                parts[name] = parts.get(name, 0.0) + part
        reasons = Counter(score.reason for score in scores if score.reason)
        causes = Counter(_last_line(grade.reason) for grade in unverified)
        self._on_event(Graded(request.id, request.prompt.id, len(scores), reasons, causes, parts))

    def _on_event(self, event: Event) -> None:
        self.writer.write(event)
        self.samples.event(event)
        self.total.add(event)
        self.window.add(event)
        self.recent.add(event)
        if self.recent.n_rounds + self.recent.no_verdict >= DIAGNOSE_ROUNDS:
            self._diagnose()

    async def _loop(self, engine: Engine) -> str:
        settings = self.settings
        learner = ThreadedLearner(self.learner) if settings.runtime == "process" else self.learner
        loop = Loop(
            self.scheduler,
            engine,
            self.grader,
            learner,
            n_steps=settings.steps,
            max_in_flight=4 * settings.sampling.n_slots,  # a slot that becomes free finds the next sequence waiting
            truncated_is_wrong=settings.learner.truncated == "wrong",
            shape=None if settings.sampling.overlong_buffer is None else self._shaped,
            on_graded=self._on_graded,
            on_step=lambda step: self._on_step(step, engine),
            stall_s=settings.stall_s,
            sync_s=settings.sync_s,
        )
        self.loop = loop
        self.counters = await engine.counters()
        self.stepped_at = time.perf_counter()
        self.eval_s = 0.0
        with _stop_signals(loop.stop):
            return await loop.run()

    async def _on_step(self, step: Step, engine: Engine) -> None:
        settings = self.settings
        try:
            counters = await engine.counters()
        except InfrastructureError:  # it has just died: the loop finds out what that means
            counters = self.counters
        self._record(step, counters)
        if len(self.rows) >= DIAGNOSE_STEPS:
            self._diagnose()
        began = time.perf_counter()
        if settings.eval.every and step.version % settings.eval.every == 0:
            await self._evaluate(step.version)
        if self.is_unsaved or step.version % settings.checkpoint_every == 0:
            await self._save_if_possible()
        self.eval_s = time.perf_counter() - began

    def _record(self, step: Step, counters: dict[str, float]) -> None:
        self.recorded = step
        row = self._row(step, counters)
        self.samples.trained(step.batch, step.version)
        self.view.step(row)
        self.trackers.log(row, step.version)
        self.metrics_file.write(json.dumps(row) + "\n")
        self.metrics_file.flush()
        self.samples.flush()
        self.writer.flush()
        self.rows.append(row)

    def _row(self, step: Step, counters: dict[str, float]) -> dict[str, float]:
        now = time.perf_counter()
        interval_s = max(now - self.stepped_at - self.eval_s, 1e-9)
        before = self.counters if counters["tokens"] >= self.counters["tokens"] else {}  # a new engine counts from 0
        delta = {name: value - before.get(name, 0.0) for name, value in counters.items()}
        # While an evaluation holds the trainer up the engine runs into back-pressure: that wait is not the engine's.
        engine_idle_s = max(delta["waiting_s"] - self.eval_s, 0.0)
        self.steady.append((interval_s, min(engine_idle_s, interval_s), min(step.waited_s, interval_s)))
        row: dict[str, float] = {
            "step": step.version,
            "t": round(self.seconds(), 3),
            "completions": self.scheduler.ledger.drawn,
            "tokens": counters["tokens"],
            **step.metrics,
            "n_groups": len(step.batch.groups),
            "n_completions": step.batch.n_completions,
            "sync_s": step.sync_s,
            "engine_idle": min(engine_idle_s / interval_s, 1.0),
            "learner_idle": min(step.waited_s / interval_s, 1.0),
            "completions_per_s": delta["completions"] / interval_s,
            "tokens_per_s": delta["tokens"] / interval_s,
            "n_open": self.scheduler.n_open,
            "n_ready": self.scheduler.n_ready,
        }
        if isinstance(self.settings.strategy, NeverGiveUp):
            row["anchor_fallbacks"] = sum(group.fell_back for group in step.batch.groups)
        row |= {f"window/{name}": value for name, value in self.window.figures().items()}
        self.window = Tally(self.buckets)
        self.stepped_at, self.counters = now, counters
        return row

    def _diagnose(self) -> None:
        names = {name for row in self.rows for name in row if not name.startswith("window/")}
        means = {name: mean(row[name] for row in self.rows if name in row) for name in names}
        for name, sentence in diagnose(means | self.recent.figures()).items():
            if self.seconds() - self.said_at.get(name, -SAID_FOR_S) >= SAID_FOR_S:
                self.said_at[name] = self.seconds()
                self.view.note(sentence)
        self.recent = Tally(self.buckets)
        self.rows.clear()

    # -------------------------------------------------------------- evaluation

    async def _evaluate(self, step: int) -> None:
        """Pass rates of the policy as it is now. chains: exact, of both splits; else sampled, of the held-out prompts.

        In a thread, so that an engine in its own process goes on meanwhile; but not where a run is to be replayed: how far
        the engine gets in the meantime would depend on the machine.
        """
        if not self.data.heldout:
            return
        task, first = self.data.task, not self.evaluations
        if isinstance(task, Chains):
            temperature = self.settings.sampling.temperature
            for split, prompts in (("heldout", self.data.heldout), ("train", self.data.train)):
                if self.settings.runtime == "here":
                    rates = build.exact_rates(self.model, task, prompts, temperature)
                else:
                    rates = await asyncio.to_thread(build.exact_rates, self.model, task, prompts, temperature)
                if first and not self.settings.eval.buckets:
                    self._place(rates, "exact")
                self._evaluated(split, self._by_bucket(rates), rates, None, step)
        else:
            sampling = build.sampled_counts(
                self.settings, self.model, self.tokenizer, self.data, self.grader, self.settings.seed + step
            )
            if self.settings.runtime == "here":
                counts = await sampling
            else:
                counts = await asyncio.to_thread(asyncio.run, sampling)
            rates = {prompt_id: right / n for prompt_id, (n, right) in counts.items() if n}
            by_k = {}
            for k in sorted({1, self.settings.eval.k}):
                by_k[f"pass@{k}"], n_short = mean_pass_at_k(list(counts.values()), k)
                if n_short:
                    self.view.note(
                        f"{n_short} prompts have fewer than {k} graded completions and are left out of pass@{k}"
                    )
            by_bucket = self._by_bucket(rates)
            del by_bucket["all"]  # pass@1
            self._evaluated("heldout", by_k | by_bucket, rates, self.settings.eval.n, step)

    def _by_bucket(self, rates: dict[str, float]) -> dict[str, float]:
        """Mean rates of the prompts in each bucket, and of all prompts, whether they have a bucket or not."""
        placed = {prompt_id: rate for prompt_id, rate in rates.items() if prompt_id in self.buckets}
        return mean_by_bucket(placed, self.buckets) | {"all": mean(rates.values())}

    def _place(self, rates: dict[str, float], source: str) -> None:
        """Puts prompts into difficulty buckets, which stay as they are from then on."""
        self.buckets |= assign_buckets(rates)
        self.initial |= rates
        write_json(self.out / "buckets.json", {"source": source, "rates": self.initial, "buckets": self.buckets})

    def _evaluated(
        self, split: str, figures: dict[str, float], rates: dict[str, float], n: int | None, step: int
    ) -> None:
        """n: samples behind each of the rates; None where they are exact."""
        row = {"split": split, "step": step, "completions": self.scheduler.ledger.drawn, "pass_rates": figures}
        self.evaluations.append(row)
        with (self.out / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.trackers.log({f"eval/{split}/{name}": rate for name, rate in figures.items()}, step)
        whole = {"split": split, "step": step, "completions": row["completions"], "n": n, "rates": rates}
        with (self.out / "rates.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
        self.view.evaluated(split, figures, step)

    # ------------------------------------------------------------- checkpoints

    async def _save_if_possible(self) -> None:
        """A full disk does not end a run: it is tried again after the next step. Where a run is to be replayed, everything that
        is under way is waited for first, so that a resume loses nothing and repeats the uninterrupted run."""
        if self.settings.runtime == "here":
            await self.loop.drain()
        try:
            self._save()
        except OSError as error:
            if not self.is_unsaved:
                self.view.note(
                    f"the checkpoint of step {self.learner.version} cannot be written ({error}): make room; it is tried again "
                    "after every step"
                )
            self.is_unsaved = True

    def _save(self) -> None:
        """Raises AssertionError when the books do not balance, and OSError for a full disk."""
        self._check_books()
        places = self._sync()

        def fill(folder: Path) -> None:
            self.learner.save(folder / LEARNER)
            write_json(folder / "scheduler.json", self.scheduler.state_dict())
            write_json(
                folder / "run.json",
                {
                    "seconds": self.seconds(),
                    "places": places,
                    "buckets": self.buckets,
                    "initial_rates": self.initial,
                    "total": self.total.state_dict(),
                },
            )

        write_checkpoint(self.out, self.learner.version, fill, keep=self.settings.keep_checkpoints)
        self.is_unsaved = False

    def _save_after(self, error: Exception) -> None:
        """What there is when the run fails, unless a batch is lost: then the last checkpoint is what to go on from."""
        is_lost = self.scheduler.is_training and self.learner.version == self.scheduler.version
        if is_lost or isinstance(error, AssertionError):
            return
        if (step := self.loop.last_step) is not None and step is not self.recorded:  # its weights did not arrive
            self._record(step, self.counters)
        try:
            self._save()
        except (OSError, AssertionError) as another:
            self.view.note(f"no checkpoint could be written at the end: {another}")

    def _check_books(self) -> None:
        """Every completion has one fate, and the events tell of the same ones as the ledger."""
        self.scheduler.check_balance()
        counts, ledger = self.total.completions.get("all", Counter()), self.scheduler.ledger
        for fate in ("drawn", "trained", "left_out", "reissued"):
            if counts[fate] != getattr(ledger, fate):
                raise AssertionError(
                    f"the ledger has {getattr(ledger, fate)} completions {fate}, the events {counts[fate]}"
                )

    def _sync(self) -> dict[str, int | list[int]]:
        """Waits until all that was written is on the disk; returns the lengths of the files."""
        self.metrics_file.flush()
        os.fsync(self.metrics_file.fileno())
        self.samples.sync()
        places: dict[str, int | list[int]] = {"events": list(self.writer.sync())}
        for name in GROWING:
            path = self.out / f"{name}.jsonl"
            places[name] = path.stat().st_size if path.exists() else 0
        return places

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the state of the scheduler. Raises ValueError for what does not fit, before anything is changed."""
        if (changes := data_changes(self.out, self.data.train)) and not self.resume.accept_changes:
            raise ValueError(
                f"the data changed since the run was started: {changes}. Bring them back, or add {ACCEPT}: what is open is "
                "then dropped, and a new pass begins"
            )
        try:
            state: dict[str, Any] = json.loads((checkpoint / "scheduler.json").read_text())
            saved = json.loads((checkpoint / "run.json").read_text())
            self.earlier_s = saved["seconds"]
            self.buckets = saved["buckets"]
            self.initial = saved["initial_rates"]
            self.total = Tally.from_state(saved["total"], self.buckets)
            self.learner.restore(checkpoint / LEARNER)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"{checkpoint} cannot be restored: {error}. If it is damaged, remove it to go on from the one before"
            ) from error
        if changes:
            self.view.note(f"the data changed: {changes}; what was open is dropped, and a new pass begins")
            self.resume = replace(self.resume, drop_chains=True)
        places = saved["places"]
        for name in GROWING:
            path = self.out / f"{name}.jsonl"
            if places[name] and (not path.is_file() or path.stat().st_size < places[name]):
                raise ValueError(
                    f"{path} is shorter than when {checkpoint} was saved ({places[name]} bytes): it was changed"
                )
        cut_events(self.out / EVENTS, *places["events"])
        for name in GROWING:
            if places[name]:
                os.truncate(self.out / f"{name}.jsonl", places[name])
            else:
                (self.out / f"{name}.jsonl").unlink(missing_ok=True)
        with suppress(FileNotFoundError), (self.out / "evaluations.jsonl").open(encoding="utf-8") as file:
            self.evaluations = [json.loads(line) for line in file]
        return state

    async def _finish(self, reason: str) -> dict[str, Any]:
        stopped = reason in STOPS.values()
        version = self.learner.version
        if not stopped and all(row["step"] != version for row in self.evaluations):
            await self._evaluate(version)
        self._save()
        self.learner.export(self.out / "model")
        summary = {
            "reason": reason,
            "stopped": stopped,
            "steps": version,
            "seconds": round(self.seconds(), 2),
            "completions": self.scheduler.ledger.drawn,
            "epochs": self.scheduler.epoch + 1,
            "ledger": self.scheduler.ledger.as_dict() | {"held": self.scheduler.held},
            "idle": self._idle_shares(),
            "evaluations": self.evaluations,
            "n_by_bucket": self._bucket_sizes(),
            "totals": self.total.figures(),
        }
        words = self.total.in_words()
        summary["in_words"] = words
        write_json(self.out / "summary.json", summary)
        self.view.note(reason)
        for sentence in words:
            self.view.note(sentence)
        return summary

    def _idle_shares(self) -> dict[str, float]:
        steady = self.steady[int(len(self.steady) * STEADY_FROM) :]
        seconds = sum(interval_s for interval_s, _, _ in steady)
        if not seconds:
            return {}
        return {
            "engine": sum(engine_s for _, engine_s, _ in steady) / seconds,
            "learner": sum(learner_s for _, _, learner_s in steady) / seconds,
        }

    def _bucket_sizes(self) -> dict[str, dict[str, int]]:
        splits = {"train": self.data.train, "heldout": self.data.heldout}
        return {
            split: dict(Counter(self.buckets[p.id] for p in prompts if p.id in self.buckets))
            for split, prompts in splits.items()
        }


def _last_line(reason: str) -> str:
    """Of a traceback: the exception. Short enough to be counted and shown."""
    return reason.strip().rpartition("\n")[2][:120]


@contextmanager
def _stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run in good order; a second one at once."""
    loop = asyncio.get_running_loop()

    def leave_alone() -> None:
        for name in STOPS:
            loop.remove_signal_handler(name)

    def first(name: signal.Signals) -> None:
        leave_alone()
        stop(STOPS[name])

    try:
        for name in STOPS:
            loop.add_signal_handler(name, first, name)
    except (RuntimeError, ValueError):  # not the main thread: whoever runs that has the signals
        yield
        return
    try:
        yield
    finally:
        leave_alone()
