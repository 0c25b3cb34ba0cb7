"""One run from settings to a trained model, and the folder that tells what happened. Layer 4.

out/config.json      the resolved settings            out/checkpoints/step-N/   all that is needed to go on
out/events.jsonl     one line a decision              out/model/                the trained policy, Hugging Face format
out/metrics.jsonl    one line an optimizer step       out/summary.json          how it ended, ledger, evaluations
out/rates.jsonl      pass rates, prompt by prompt     out/buckets.json          difficulty of each prompt at the start
out/samples.jsonl    what was written, for some prompts
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
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from nevergiveup import build
from nevergiveup.config import settings_from_json, settings_to_json
from nevergiveup.diagnosis import diagnose
from nevergiveup.evaluate import assign_buckets, mean_by_bucket, mean_pass_at_k
from nevergiveup.events import Event, EventWriter, Graded, read_events
from nevergiveup.loop import Loop, Step, TaskGrader
from nevergiveup.metrics import Tally
from nevergiveup.report.live import View
from nevergiveup.report.trackers import Trackers
from nevergiveup.rewards import overlong_penalty
from nevergiveup.runtimes.here import HereRuntime, ThreadedLearner
from nevergiveup.runtimes.process import ProcessRuntime
from nevergiveup.samples import SampleLog
from nevergiveup.scheduler import Scheduler
from nevergiveup.settings import Settings
from nevergiveup.strategies import Allocator, NeverGiveUp
from nevergiveup.task_settings import TINY
from nevergiveup.tasks.chains import Chains
from nevergiveup.types import Completion, Exact, Grade, Request, Score, Unverified, exact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nevergiveup.protocols import Engine, Grader, Task

STOPS = {
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGHUP: "stopped because its terminal was closed",
}
"""Signals that end a run in good order, and the reason that is given."""

GROWING = ("events", "metrics", "rates", "samples")
"""Files of lines. A resume cuts them back to where the checkpoint was saved: what followed will happen again."""

DIAGNOSE_STEPS, DIAGNOSE_ROUNDS = 20, 1000
"""Optimizer steps, or scored rounds where there are no steps, after which what they came to is diagnosed."""

SAID_FOR_S = 1800.0
"""A sentence of the diagnosis is not said again for so long."""

STEADY_FROM = 0.1
"""Idle shares of the summary leave out the first tenth of the steps, in which both sides start up."""


def train(settings: Settings, out: Path, view: View, *, resume: bool = False) -> dict[str, Any]:
    """Trains until the settings say that it is enough, or until Ctrl-C; returns what summary.json holds.

    resume: go on from the newest checkpoint in `out`, or from the start where there is none yet, with the settings that
    are saved there.
    Raises ValueError for bad input, before a model is loaded; whatever ends a run early is raised as it is.
    """
    if resume:
        settings = read_settings(out)
    task = build.check(settings)
    checkpoint = newest_checkpoint(out) if resume else None
    if resume and checkpoint is None:  # it ended before the first one: begin again
        for name in GROWING:
            (out / f"{name}.jsonl").unlink(missing_ok=True)
    if not resume and (out / "events.jsonl").exists():
        raise ValueError(f"{out} holds another run: choose another folder, or go on with it (resume)")
    out.mkdir(parents=True, exist_ok=True)
    with _sole_user(out), build.make_pool(settings) as pool:
        asyncio.run(build.prepare(settings, task, pool, view.note))
        return _train(settings, out, view, task, TaskGrader(task, build.checker(settings, pool)), checkpoint)


def _train(
    settings: Settings, out: Path, view: View, task: Task, grader: Grader, checkpoint: Path | None
) -> dict[str, Any]:
    write_json(out / "config.json", settings_to_json(settings))
    try:
        if not settings.model.path and isinstance(settings.task, TINY):
            start: Path | str = out / "start"
            if not Path(start).is_dir():
                _warm_start(settings, Path(start), view.note)
        else:
            start = build.model_folder(settings)
        with closing(Trackers(settings.trackers, out, settings_to_json(settings))) as trackers:
            return asyncio.run(_Run(settings, out, view, trackers, task, grader, start, checkpoint).run())
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


def newest_checkpoint(out: Path) -> Path | None:
    """The complete checkpoint of most steps in a run folder."""
    complete = [path for path in (out / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    return max(complete, key=lambda path: int(path.name[5:]), default=None)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file at once: a reader sees the old or the new content, never half of it."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
        checkpoint: Path | None,
    ) -> None:
        self.settings = settings
        self.task = task
        self.grader = grader
        self.out = out
        self.view = view
        self.trackers = trackers
        self.start = start
        self.checkpoint = checkpoint
        self.began = time.perf_counter()
        self.earlier_s = 0.0  # of the parts before a resume
        self.total = Tally()
        self.window = Tally()  # since the last step
        self.recent = Tally()  # since the last diagnosis, with the rows of its steps
        self.rows: list[dict[str, float]] = []
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
        self.scheduler = self._make_scheduler()
        if self.checkpoint:
            self._restore(self.checkpoint)
        self.view.begin(
            f"{settings.task.name}, {settings.strategy.name}", self._facts(), settings.steps, settings.max_completions
        )
        steps = {row["step"] for row in self.evaluations}
        for row in self.evaluations:  # a resumed run shows where it began and where it is
            if row["step"] in (min(steps), max(steps)):
                self.view.evaluated(row["split"], row["pass_rates"], row["step"])
        if not self.evaluations:
            (self.out / "rates.jsonl").write_text("")
            if rates := build.probed_rates(settings):
                ids = {prompt.id for prompt in (*self.data.train, *self.data.heldout)}
                self._place({prompt_id: rate for prompt_id, rate in rates.items() if prompt_id in ids}, "probe")
                self.view.note(
                    f"{len(self.buckets)} of {len(ids)} prompts have a difficulty, from {settings.eval.buckets}"
                )
            await self._evaluate(0)
        self.total.bucket_of = self.window.bucket_of = self.buckets

        self.writer = EventWriter(self.out / "events.jsonl", self.seconds)
        self.metrics_file = (self.out / "metrics.jsonl").open("a", encoding="utf-8")
        self.samples = SampleLog(
            self.out / "samples.jsonl",
            self.data.train,
            n_prompts=settings.sample_prompts,
            seed=settings.seed,
            clock=self.seconds,
            read=lambda tokens: str(self.tokenizer.decode(list(tokens))),
        )
        runtime = ProcessRuntime() if settings.runtime == "process" else HereRuntime()
        try:
            engine: Engine = await runtime.place(
                build.make_engine, "engine", self.start, **build.engine_arguments(settings, n_threads)
            )
            if self.checkpoint:
                await engine.load(await self.learner.weights(), self.learner.version)
            reason = await self._loop(engine)
            await engine.close()
            return await self._finish(reason)
        finally:
            await runtime.close()
            self.writer.close()
            self.samples.close()
            self.metrics_file.close()

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
        )
        self.counters = await engine.counters()
        self.stepped_at = time.perf_counter()
        self.eval_s = 0.0
        with _stop_signals(loop.stop):
            return await loop.run()

    async def _on_step(self, step: Step, engine: Engine) -> None:
        settings = self.settings
        row = await self._row(step, engine)
        self.samples.trained(step.batch, step.version)
        self.view.step(row)
        self.trackers.log(row, step.version)
        self.metrics_file.write(json.dumps(row) + "\n")
        self.metrics_file.flush()
        self.samples.flush()
        self.writer.flush()
        self.rows.append(row)
        if len(self.rows) >= DIAGNOSE_STEPS:
            self._diagnose()
        began = time.perf_counter()
        if settings.eval.every and step.version % settings.eval.every == 0:
            await self._evaluate(step.version)
        if step.version % settings.checkpoint_every == 0:
            self._save()
        self.eval_s = time.perf_counter() - began

    async def _row(self, step: Step, engine: Engine) -> dict[str, float]:
        counters = await engine.counters()
        now = time.perf_counter()
        interval_s = max(now - self.stepped_at - self.eval_s, 1e-9)
        delta = {name: value - self.counters.get(name, 0.0) for name, value in counters.items()}
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
        self.trackers.log({f"eval/{split}/{name}": rate for name, rate in figures.items()}, step)
        whole = {"split": split, "step": step, "completions": row["completions"], "n": n, "rates": rates}
        with (self.out / "rates.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
        self.view.evaluated(split, figures, step)

    # ------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        """A checkpoint that appears whole or not at all; older ones than the last few are removed."""
        self.scheduler.check_balance()
        folder = self.out / "checkpoints" / f"step-{self.learner.version:06d}"
        half_made = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(half_made, ignore_errors=True)
        half_made.mkdir(parents=True)
        self.learner.save(half_made / "learner")
        write_json(half_made / "scheduler.json", self.scheduler.state_dict())
        write_json(
            half_made / "run.json",
            {
                "seconds": self.seconds(),
                "bytes": self._sync(),
                "evaluations": self.evaluations,
                "buckets": self.buckets,
                "initial_rates": self.initial,
            },
        )
        old_one = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old_one, ignore_errors=True)
        if folder.exists():
            folder.rename(old_one)
        half_made.rename(folder)
        shutil.rmtree(old_one, ignore_errors=True)
        complete = sorted(self.out.glob("checkpoints/step-*"))
        for old in complete[: -self.settings.keep_checkpoints]:
            shutil.rmtree(old)

    def _sync(self) -> dict[str, int]:
        """Waits until all that was written is on the disk; returns the lengths of the files."""
        self.metrics_file.flush()
        os.fsync(self.metrics_file.fileno())
        self.writer.sync()
        self.samples.sync()
        return {name: (self.out / f"{name}.jsonl").stat().st_size for name in GROWING}

    def _restore(self, checkpoint: Path) -> None:
        try:
            self.learner.restore(checkpoint / "learner")
            self.scheduler.load_state_dict(json.loads((checkpoint / "scheduler.json").read_text()))
            saved = json.loads((checkpoint / "run.json").read_text())
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{checkpoint} cannot be restored: {error}. If it is damaged, remove it to go on from the one before"
            ) from error
        self.earlier_s = saved["seconds"]
        self.evaluations = saved["evaluations"]
        self.buckets = self.total.bucket_of = saved["buckets"]
        self.initial = saved["initial_rates"]
        for name, n_bytes in saved["bytes"].items():
            path = self.out / f"{name}.jsonl"
            if not path.is_file() or path.stat().st_size < n_bytes:
                raise ValueError(
                    f"{path} is shorter than when {checkpoint} was saved ({n_bytes} bytes): it was changed"
                )
            os.truncate(path, n_bytes)
        for _, event in read_events(self.out / "events.jsonl"):
            self.total.add(event)

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
