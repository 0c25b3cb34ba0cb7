"""Runs that are stopped, killed or changed, and go on: a real tiny transformer, real folders, real processes."""

import asyncio
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from rich.console import Console
from safetensors.torch import load_file

from nevergiveup import build
from nevergiveup.checkpoints import data_changes, model_in, newest_checkpoint, write_checkpoint, write_prompts
from nevergiveup.cli import BAD_INPUT, FAILED, main
from nevergiveup.events import Published, Reissued, Trained, read_events
from nevergiveup.protocols import InfrastructureError
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.settings import BatchSettings, EvalSettings, ModelSettings
from nevergiveup.strategies import FixedK, NeverGiveUp
from nevergiveup.train import read_settings, train
from nevergiveup.types import Prompt

pytestmark = pytest.mark.slow

N_STEPS = 12


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A small run in one process, from a barely taught policy, that saves after every step."""
    folder = tmp_path_factory.mktemp("policy") / "start"
    demo = RECIPES["demo"].settings
    build.warm_start(
        replace(demo, model=ModelSettings(warm_steps=80, warm_batch=64)), folder, progress=lambda text: None
    )
    return replace(
        demo,
        model=ModelSettings(path=str(folder)),
        strategy=NeverGiveUp(k=4, p=0.75),
        batch=BatchSettings(n_groups=4, lag=1.0),
        eval=EvalSettings(every=0),
        runtime="here",
        steps=N_STEPS,
        max_completions=None,
        checkpoint_every=1,
    )


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory):
    """The run that nobody interrupts."""
    out = tmp_path_factory.mktemp("straight") / "run"
    run(settings, out)
    return out


def run(settings, out, **options):
    return train(settings, out, PlainView(Console(quiet=True)), **options)


def events(out):
    return [event for _, event in read_events(out / "events.jsonl")]


def assert_same(out, other):
    assert events(out) == events(other)
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (out, other))
    assert all(one[key].equal(two[key]) for key in one)
    one, two = (load_file(newest_checkpoint(folder) / "learner" / "optimizer.safetensors") for folder in (out, other))
    assert all(one[key].equal(two[key]) for key in one)


def test_ten_random_stops_change_not_one_bit(settings, straight, tmp_path):
    """Each time the whole process is forgotten and the run goes on from its folder."""
    stops = sorted(Random(3).sample(range(1, N_STEPS), 10))
    for i, steps in enumerate([*stops, N_STEPS]):
        run(replace(settings, steps=steps), tmp_path / "run", resume=i > 0)
        shutil.rmtree(tmp_path / "run" / "model")  # what a finished run adds: an interrupted one has not
        (tmp_path / "run" / "summary.json").unlink()
    run(settings, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", straight)


def test_kill_9_between_two_checkpoints_changes_not_one_bit(settings, tmp_path):
    """What happened after the last checkpoint happens again, and stands in the logs once."""
    settings = replace(settings, checkpoint_every=4)
    run(settings, tmp_path / "straight")
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-m", "nevergiveup.cli", "train", "--resume", str(tmp_path / "run")]
    run(replace(settings, steps=4), tmp_path / "run")
    config = json.loads((tmp_path / "straight" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while metrics.read_text().count("\n") < 6 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run(settings, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_finished_run_can_be_extended(settings, straight, tmp_path):
    run(replace(settings, steps=5), tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", str(N_STEPS)]) == 0
    assert read_settings(tmp_path / "run").steps == N_STEPS
    assert_same(tmp_path / "run", straight)


def test_changed_settings_are_refused_with_the_difference_and_accepted_by_a_flag(settings, tmp_path, capsys):
    out = tmp_path / "run"
    run(replace(settings, steps=2), out)
    before = (out / "config.json").read_bytes()
    words = ["train", "--resume", str(out), "--steps", "3", "--learner.lr", "0.25"]
    assert main(words) == BAD_INPUT
    printed = capsys.readouterr().err
    assert f"learner.lr was {settings.learner.lr} and is 0.25 now" in printed
    assert "--accept-changes" in printed
    assert (out / "config.json").read_bytes() == before
    assert main([*words, "--accept-changes"]) == 0
    assert read_settings(out).learner.lr == 0.25
    assert main(["train", "--resume", str(out), "--seed", "9", "--accept-changes"]) == BAD_INPUT
    assert "seed was 0 and is 9 now: that would be another run" in capsys.readouterr().err


def test_another_strategy_drops_what_is_open_and_the_books_still_balance(settings, tmp_path):
    out = tmp_path / "run"
    run(replace(settings, steps=2), out)
    words = ["train", "--resume", str(out), "--strategy", "fixed", "--steps", "4", "--accept-changes"]
    assert main(words) == 0
    assert isinstance(read_settings(out).strategy, FixedK)
    ledger = json.loads((out / "summary.json").read_text())["ledger"]
    dropped = [event for event in events(out) if isinstance(event, Reissued) and event.request is None]
    assert len(dropped) == ledger["chains"]["dropped"] > 0
    del ledger["chains"]
    assert ledger.pop("drawn") == sum(ledger.values())


def test_changed_data_are_refused_with_the_difference_and_accepted_by_a_flag(settings, tmp_path):
    out = tmp_path / "run"
    run(replace(settings, steps=2), out)
    path = out / "prompts.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["0" * 16 + lines[0][16:], *lines[2:]]))  # another text then; and one that is new now
    with pytest.raises(ValueError, match=r"1 new \(the first is .*\), 1 with another text or answer"):
        run(replace(settings, steps=3), out, resume=True)
    summary = run(replace(settings, steps=3), out, resume=True, accept_changes=True)
    assert summary["steps"] == 3
    assert path.read_text().splitlines(keepends=True) == lines


def test_a_new_run_begins_with_what_another_one_has_learned(settings, straight, tmp_path):
    out = tmp_path / "revived"
    assert main(["train", "--init", str(straight), "--strategy", "fixed", "--steps", "1", "--out", str(out)]) == 0
    assert isinstance(read_settings(out).strategy, FixedK)
    learned = load_file(straight / "model" / "model.safetensors")
    begun = load_file(out / "start" / "model.safetensors")
    assert all(learned[key].equal(begun[key]) for key in learned)
    buckets = [json.loads((folder / "buckets.json").read_text())["buckets"] for folder in (straight, out)]
    assert buckets[0] == buckets[1], "difficulty is that of the very beginning"
    rows = [json.loads((folder / "summary.json").read_text())["evaluations"] for folder in (straight, out)]
    last = [row for row in rows[0] if row["split"] == "heldout"][-1]
    first = next(row for row in rows[1] if row["split"] == "heldout")
    assert first["pass_rates"] == pytest.approx(last["pass_rates"])


def test_a_ledger_that_does_not_balance_fails_the_run(settings, tmp_path):
    out = tmp_path / "run"
    run(replace(settings, steps=2), out)
    last = newest_checkpoint(out)
    path = last / "scheduler.json"
    state = json.loads(path.read_text())
    state["ledger"]["given_up"] += 4
    path.write_text(json.dumps(state))
    with pytest.raises(AssertionError, match="drawn"):
        run(replace(settings, steps=4), out, resume=True)
    assert newest_checkpoint(out) == last, "nothing is saved that does not balance"


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_that_breaks_off_at_any_byte_leaves_the_last_one(tmp_path):
    """The disk is full after so many bytes of a file: a real limit of the system, at every byte of what is written."""
    whole = bytes(range(256))
    write_checkpoint(tmp_path, 1, lambda folder: (folder / "a.bin").write_bytes(whole) and None, keep=2)

    def fill(folder):
        (folder / "a.bin").write_bytes(whole)
        (folder / "b.bin").write_bytes(whole * 2)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for n_bytes in range(len(whole) * 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                write_checkpoint(tmp_path, 2, fill, keep=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert newest_checkpoint(tmp_path).name == "step-000001"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert write_checkpoint(tmp_path, 2, fill, keep=2) == newest_checkpoint(tmp_path)


def test_what_a_crash_left_behind_is_no_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 1, lambda folder: None, keep=2)
    (tmp_path / "checkpoints" / ".step-000002.new").mkdir()
    (tmp_path / "checkpoints" / ".step-000000.old").mkdir()
    assert newest_checkpoint(tmp_path).name == "step-000001"
    write_checkpoint(tmp_path, 1, lambda folder: None, keep=2)
    write_checkpoint(tmp_path, 3, lambda folder: None, keep=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000001.2", "step-000003"]
    write_checkpoint(
        tmp_path, 3, lambda folder: None, keep=2
    )  # in the place of the one that there is, not of an older one
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000001.2", "step-000003.2"]


def test_the_model_that_a_folder_stands_for(straight, settings, tmp_path):
    newest = newest_checkpoint(straight)
    assert model_in(straight) == (straight, newest / "learner")
    assert model_in(newest) == (straight, newest / "learner")
    assert model_in(straight / "model") == (straight, straight / "model")
    plain = tmp_path / "plain"
    shutil.copytree(settings.model.path, plain)
    assert model_in(plain) == (None, plain)


def test_what_changed_in_the_data_is_told(tmp_path):
    prompts = [Prompt(str(i), tokens=(i, 1)) for i in range(4)]
    write_prompts(tmp_path, prompts)
    assert data_changes(tmp_path, prompts) == ""
    assert "in another order" in data_changes(tmp_path, prompts[::-1])
    assert "1 gone (the first is 3)" in data_changes(tmp_path, prompts[:3])
    assert "1 with another text or answer (the first is 0)" in data_changes(
        tmp_path, [Prompt("0", tokens=(7,)), *prompts[1:]]
    )


# ------------------------------------------------------------ an engine that dies


class DyingEngine:
    """The real one until its third request; what that one and all later ones come to is `die`."""

    def __init__(self, engine, die):
        self.engine, self.die, self.n_requests = engine, die, 0

    async def sample(self, prompt, n, seed):
        self.n_requests += 1
        if self.n_requests >= 3:
            await self.die()
        return await self.engine.sample(prompt, n, seed)

    def __getattr__(self, name):
        return getattr(self.engine, name)


async def raises():
    raise RuntimeError("boom")


async def never_answers():
    await asyncio.Event().wait()


async def leaves():
    os._exit(0)


make_engine = build.make_engine


def make_dying(die, *args, **kwargs):
    return DyingEngine(make_engine(*args, **kwargs), die)


@pytest.mark.parametrize(
    ("die", "runtime", "words"),
    [
        (raises, "here", "boom"),
        (raises, "process", "boom"),
        (never_answers, "here", "nothing came back for 2 s"),
        (leaves, "process", r"the process of the engine died \(exit code 0\)"),
    ],
)
def test_c29_the_generator_dies(settings, tmp_path, monkeypatch, capfd, die, runtime, words):
    """With its own words, an exit code, and the checkpoint of the last step, from which the run goes on."""
    out = tmp_path / "run"
    run(replace(settings, steps=3), out)
    learned = {path.name: path.read_bytes() for path in (newest_checkpoint(out) / "learner").iterdir()}
    asked = ["train", "--resume", str(out), "--steps", str(N_STEPS)]
    with monkeypatch.context() as patch:
        patch.setattr(build, "make_engine", partial(make_dying, die))
        end = [
            *asked,
            "--stall-s",
            "2",
            "--grading.timeout-s",
            "1",
            "--engine-restarts",
            "0",
            "--runtime",
            runtime,
            "--accept-changes",
        ]
        try:
            assert main(end) == FAILED
            printed = capfd.readouterr().err
        except RuntimeError as error:  # what nobody foresaw keeps its traceback
            printed = "".join(traceback.format_exception(error))
            assert "in raises" in printed
    assert re.search(words, printed)
    assert f"go on from the last checkpoint: ngu train --resume {out}" in " ".join(printed.split())
    assert newest_checkpoint(out).name.startswith("step-000003")
    assert {path.name: path.read_bytes() for path in (newest_checkpoint(out) / "learner").iterdir()} == learned
    assert main([*asked, "--runtime", "here", "--accept-changes"]) == 0
    assert [e.version for e in events(out) if isinstance(e, Published)] == list(range(1, N_STEPS + 1))


def test_an_engine_killed_in_mid_run_is_started_again(settings, tmp_path):
    """The run ends as if nothing had happened: all its steps, and books that balance."""
    out = tmp_path / "run"
    settings = replace(settings, runtime="process", steps=200, checkpoint_every=100)
    path = tmp_path / "child.py"
    path.write_text(
        "import os, signal, sys, threading, time, multiprocessing\n"
        "from pathlib import Path\n"
        "from nevergiveup.cli import main\n"
        "def killer(metrics):\n"
        "    while not metrics.exists() or metrics.read_text().count('\\n') < 20:\n"
        "        time.sleep(0.01)\n"
        "    for child in multiprocessing.active_children():\n"
        "        os.kill(child.pid, signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    run = Path(sys.argv[-1])\n"
        "    threading.Thread(target=killer, args=(run / 'metrics.jsonl',), daemon=True).start()\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    from nevergiveup.config import settings_to_json

    out.mkdir()
    (out / "config.json").write_text(json.dumps(settings_to_json(settings)))
    done = subprocess.run(
        [sys.executable, str(path), "train", "--resume", str(out)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "started again" in done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 200
    ledger = summary["ledger"]
    del ledger["chains"]
    assert ledger.pop("drawn") == sum(ledger.values())
    assert [e.version for e in events(out) if isinstance(e, Published)] == list(range(1, 201))


class RefusingEngine(DyingEngine):
    """Takes no weights of version 3."""

    async def sample(self, prompt, n, seed):
        return await self.engine.sample(prompt, n, seed)

    async def load(self, weights, version):
        if version == 3:
            raise InfrastructureError("answer 500")
        await self.engine.load(weights, version)


def test_c30_a_step_whose_weights_did_not_arrive_is_neither_lost_nor_done_twice(settings, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(build, "make_engine", lambda *args, **kwargs: RefusingEngine(make_engine(*args, **kwargs), None))
        with pytest.raises(InfrastructureError, match="answer 500"):
            run(replace(settings, steps=6), out)
    assert [event.version for event in events(out) if isinstance(event, Published)] == [1, 2]
    run(replace(settings, steps=6), out, resume=True)
    assert [event.version for event in events(out) if isinstance(event, Published)] == [1, 2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    trained = sum(event.n_trained for event in events(out) if isinstance(event, Trained))
    assert sum(row["n_completions"] for row in rows) == trained
