"""Whole runs on the CPU: a real tiny transformer, the real loop, real folders."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from nevergiveup.checkpoints import newest_checkpoint
from nevergiveup.evaluate import assign_buckets, mean_by_bucket
from nevergiveup.events import read_events
from nevergiveup.objectives import Cispo
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.scheduler import Ledger
from nevergiveup.settings import BatchSettings, EvalSettings, ModelSettings
from nevergiveup.strategies import DynamicSampling, FixedK, GvmRaft, Knapsack, NeverGiveUp
from nevergiveup.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A barely taught policy: enough right answers to train on."""
    from nevergiveup import build

    folder = tmp_path_factory.mktemp("policy") / "start"
    settings = RECIPES["demo"].settings
    build.warm_start(
        replace(settings, model=ModelSettings(warm_steps=80, warm_batch=64)), folder, progress=lambda text: None
    )
    return folder


def small(start, **changes):
    settings = RECIPES["demo"].settings
    return replace(
        settings,
        model=ModelSettings(path=str(start)),
        batch=BatchSettings(n_groups=4, lag=1.0),
        eval=EvalSettings(every=0),
        runtime="here",
        steps=6,
        max_completions=None,
        checkpoint_every=4,
        **changes,
    )


def run(settings, out, **options):
    return train(settings, out, PlainView(Console(quiet=True)), **options)


def events(out):
    return [event for _, event in read_events(out / "events.jsonl")]


@pytest.mark.parametrize("strategy", [FixedK(), DynamicSampling(), NeverGiveUp()], ids=lambda s: s.name)
def test_every_strategy_trains_and_its_folder_tells_the_truth(start, tmp_path, strategy):
    summary = run(replace(small(start), strategy=strategy), tmp_path)
    assert summary["steps"] == 6
    ledger = {key: value for key, value in summary["ledger"].items() if key not in ("chains", "held")}
    assert Ledger(**ledger).settled + summary["ledger"]["held"] == ledger["drawn"]

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["same_version_gap_max"] < 1e-4 for row in rows if "same_version_gap_max" in row)

    seen = events(tmp_path)
    assert sum(e.n for e in seen if e.kind == "dispatched") == ledger["drawn"]
    assert sum(e.n_trained for e in seen if e.kind == "trained") == ledger["trained"]
    assert max(age for e in seen if e.kind == "trained" for age in e.ages) <= strategy.window
    assert newest_checkpoint(tmp_path).name == "step-000006"


def test_the_trained_model_loads_like_any_other_and_has_changed(start, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(small(start), tmp_path)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (start, tmp_path / "model"))
    changed = [not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([3, 41]) == "3 <bos>"


def test_here_the_same_seed_gives_the_same_events_and_weights(start, tmp_path):
    from safetensors.torch import load_file

    for name, every in (
        ("one", 0),
        ("two", 1),
    ):  # nor does it matter how often it is evaluated, and how long that takes
        run(replace(small(start), strategy=NeverGiveUp(), eval=EvalSettings(every=every)), tmp_path / name)
    assert events(tmp_path / "one") == events(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert all(one[key].equal(two[key]) for key in one)


def test_a_resumed_run_goes_on_and_counts_nothing_twice(start, tmp_path):
    run(replace(small(start), steps=4), tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind":"publ')  # a line that a crash cut in two

    summary = run(replace(small(start), steps=9), tmp_path, resume=True)
    assert summary["steps"] == 9
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 10))
    seen = events(tmp_path)
    assert sum(e.n_trained for e in seen if e.kind == "trained") == summary["ledger"]["trained"]
    assert [e.version for e in seen if e.kind == "published"] == list(range(1, 10))
    assert summary["totals"]["completions/all/drawn"] == summary["ledger"]["drawn"]


def test_after_a_resume_the_kl_term_still_refers_to_the_policy_that_the_run_began_with(start, tmp_path):
    settings = small(start, strategy=FixedK(), learner=replace(RECIPES["demo"].settings.learner, kl_beta=0.01))
    run(replace(settings, steps=4), tmp_path)
    run(replace(settings, steps=5), tmp_path, resume=True)
    rows = [json.loads(line)["kl_reference"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == pytest.approx(0, abs=1e-9)  # nothing has been learned yet
    assert rows[4] > 1e-6  # against the restored policy it would be 0 again


@pytest.mark.parametrize("strategy", [GvmRaft(), Knapsack()], ids=lambda s: s.name)
def test_a_run_says_at_its_start_what_it_will_cost_and_what_the_shares_follow(start, tmp_path, strategy):
    text = StringIO()
    settings = replace(small(start), strategy=strategy, loss=Cispo(), steps=1)
    train(settings, tmp_path, PlainView(Console(file=text, width=1000)))
    assert f"{strategy}" in text.getvalue()
    assert strategy.cost_in_words() in text.getvalue()
    assert f"{Cispo()}" in text.getvalue()
    assert ("come from the learner" in text.getvalue()) == isinstance(strategy, GvmRaft)


def test_a_run_folder_is_never_overwritten(start, tmp_path):
    run(replace(small(start), steps=1), tmp_path)
    with pytest.raises(ValueError, match="holds another run"):
        run(small(start), tmp_path)


def test_generation_and_training_in_two_processes(start, tmp_path):
    settings = replace(small(start), runtime="process", strategy=NeverGiveUp(), eval=EvalSettings(every=3))
    summary = run(settings, tmp_path)
    assert summary["steps"] == 6
    assert [row["step"] for row in summary["evaluations"] if row["split"] == "heldout"] == [0, 3, 6]
    assert set(summary["idle"]) == {"engine", "learner"}
    ages = {age for e in events(tmp_path) if e.kind == "trained" for age in e.ages}
    assert max(ages) >= 1  # it did run ahead


def test_two_runs_cannot_share_a_folder(start, tmp_path):
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being trained by another process"):
            run(small(start), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_run_that_never_came_to_a_checkpoint_begins_again(start, tmp_path):
    run(replace(small(start), steps=3), tmp_path)
    expected = events(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    summary = run(replace(small(start), steps=3), tmp_path, resume=True)
    assert summary["steps"] == 3
    assert events(tmp_path) == expected


def test_a_damaged_checkpoint_and_a_shortened_log_are_refused_by_name(start, tmp_path):
    run(replace(small(start), steps=2), tmp_path)
    scheduler = newest_checkpoint(tmp_path) / "scheduler.json"
    good = scheduler.read_text()
    scheduler.write_text(good[:100])
    with pytest.raises(ValueError, match="step-000002 cannot be restored"):
        run(small(start), tmp_path, resume=True)
    scheduler.write_text(good)
    weights = newest_checkpoint(tmp_path) / "learner" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="step-000002 cannot be restored"):
        run(small(start), tmp_path, resume=True)
    weights.write_bytes(whole)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"events\.jsonl is shorter than \d+ bytes"):
        run(small(start), tmp_path, resume=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_of_some_prompts_and_of_those_given_up_are_kept(start, tmp_path):
    """What is kept is all of it, agrees with the events, and the advantages are those of the batch."""
    settings = replace(small(start), strategy=NeverGiveUp(k=4, p=0.5), sample_prompts=400)
    run(settings, tmp_path)
    rows, seen = lines(tmp_path / "samples.jsonl"), events(tmp_path)
    samples = [row for row in rows if row["kind"] == "sample"]
    prompts = [row["prompt"] for row in rows if row["kind"] == "prompt"]
    assert len(set(prompts)) == len(prompts)
    assert {row["prompt"] for row in samples} == set(prompts)
    assert all(row["text"] for row in rows if row["kind"] != "trained")

    judged = {e.request: e for e in seen if e.kind == "judged"}
    for request in {row["request"] for row in samples}:
        rewards = [row["reward"] for row in samples if row["request"] == request]
        assert rewards == [float(reward) for reward in judged[request].rewards]
    given_up = [e for e in judged.values() if e.outcome == "given_up"]
    assert given_up
    assert {e.prompt for e in given_up} <= set(prompts)
    chosen = {row["prompt"] for row in samples} - {e.prompt for e in given_up}
    assert {e.request for e in judged.values() if e.prompt in chosen} <= {row["request"] for row in samples}

    trained = [row for row in rows if row["kind"] == "trained"]
    assert trained
    keys = {(row["prompt"], row["key"]) for row in samples}
    n_trained = {(e.prompt, e.version + 1): e.n_trained for e in seen if e.kind == "trained"}
    for row in trained:
        assert all((row["prompt"], key) in keys for key, *_ in row["attempts"])
        weights = [weight for *_, weight in row["attempts"] if weight is not None]
        assert len(weights) == n_trained[row["prompt"], row["step"]]
        assert sum(weights) == pytest.approx(0, abs=1e-9)


def test_pass_rates_prompt_by_prompt_and_buckets_that_stay(start, tmp_path):
    summary = run(replace(small(start), eval=EvalSettings(every=3)), tmp_path)
    buckets = json.loads((tmp_path / "buckets.json").read_text())
    rows = lines(tmp_path / "rates.jsonl")
    assert [(row["split"], row["step"]) for row in rows] == [(s, n) for n in (0, 3, 6) for s in ("heldout", "train")]
    first = rows[0]["rates"] | rows[1]["rates"]
    assert buckets["rates"] == first
    assert buckets["buckets"] == assign_buckets(first)
    for row, told in zip(rows, summary["evaluations"], strict=True):
        assert mean_by_bucket(row["rates"], buckets["buckets"]) == told["pass_rates"]


def test_a_resumed_run_keeps_every_line_once(start, tmp_path):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    settings = replace(
        small(start), strategy=NeverGiveUp(p=0.5), steps=8, checkpoint_every=4, eval=EvalSettings(every=2)
    )
    run(settings, straight)
    run(replace(settings, steps=4), cut)
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps(config | {"steps": 8}))
    for name in ("rates", "samples", "metrics"):
        with (cut / f"{name}.jsonl").open("a") as file:
            file.write('{"kind":"prompt"}\n')  # written after the checkpoint; it will happen again
    run(settings, cut, resume=True)
    for folder in (straight, cut):
        samples = Counter(row["request"] for row in lines(folder / "samples.jsonl") if row["kind"] == "sample")
        judged = {e.request: len(e.rewards) for e in events(folder) if e.kind == "judged"}
        assert samples
        assert all(judged[request] == n for request, n in samples.items())
        assert [row["step"] for row in lines(folder / "rates.jsonl")] == [n for n in (0, 2, 4, 6, 8) for _ in range(2)]
