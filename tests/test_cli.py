"""The command `ngu`: what it prints, where runs go, and its exit status, in real processes where that matters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from nevergiveup.cli import BAD_INPUT, FAILED, INTERRUPTED, main
from nevergiveup.config import CHOICES, resolve, settings_to_json
from nevergiveup.objectives import LOSSES
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import Settings
from nevergiveup.strategies import STRATEGIES

CHOSEN = [(section, name) for section in CHOICES for name in CHOICES[section]]


def word_for(section: str, name: str) -> str:
    """What is written to choose it; some names go on behind a colon."""
    return f"{name}:x" if getattr(CHOICES[section][name], "after_colon", "") else name


TINY = [
    *("--model.warm-steps", "2", "--model.warm-batch", "8", "--task.n-prompts", "16", "--eval.n-prompts", "8"),
    *("--batch.n-groups", "4", "--strategy", "fixed", "--eval.every", "0"),
]


def ngu(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nevergiveup.cli", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "demo"]) == BAD_INPUT
    assert capsys.readouterr().err == 'ngu: there is no command "trian": did you mean train?\n'


def test_recipes_are_listed_with_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for recipe in RECIPES.values():
        assert recipe.name in printed
        assert recipe.expect.split()[0] in printed


def test_train_without_a_recipe_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == BAD_INPUT
    printed = capsys.readouterr().err
    assert all(name in printed for name in RECIPES)


def test_help_shows_the_values_and_the_strategy_of_this_very_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as done:
        main(["train", "demo", "--strategy", "fixed", "--learner.lr", "0.25", "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert "(default: 0.25)" in printed
    assert "--strategy.leave-one-out" in printed
    assert "--loss.clip-high" in printed
    for name in (*STRATEGIES, *LOSSES):
        assert f"\n  {name} " in re.sub(r"[│╭╰]", "", printed), name
    assert "--strategy.p " not in printed
    assert "--resume DIR" in printed


@pytest.mark.parametrize(("section", "name"), CHOSEN)
def test_help_without_a_recipe_shows_the_settings_of_what_is_chosen(
    section: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as done:
        main(["train", f"--{section}", word_for(section, name), "--help"])
    assert done.value.code == 0
    shown = set(re.findall(rf"--{section}\.(?!no-)([a-z-]+)", capsys.readouterr().out))
    assert shown == {field.name.replace("_", "-") for field in fields(CHOICES[section][name])}
    assert main(["train", f"--{section}", "nothing", "--help"]) == BAD_INPUT


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "dmo"], "did you mean demo?"),
        (["train", "--steps", "2"], "the recipe comes first"),
        (["train", "demo", "--out"], "--out needs a value"),
        (["train", "demo", "--config", "missing.toml"], "missing.toml cannot be read"),
        (["train", "demo", "--resume", "runs/demo-1"], "leave out demo"),
        (["train", "--resume", "nowhere", "--steps", "3"], "nowhere is no run folder"),
        (["train", "demo", "--accept-changes"], "--accept-changes belongs to --resume"),
        (["train", "demo", "--init", "nowhere"], "--init nowhere: there is no such folder"),
        (["train", "--init", "full", "--strategy", "ngu"], "--init full is no run"),
        (["train", "demo", "--out", "full"], "ngu train --resume full"),
    ],
)
def test_bad_input(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    assert main(words) == BAD_INPUT
    printed = capsys.readouterr().err
    assert part in printed
    assert printed.startswith("ngu: ")
    assert printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


# What each row of cases.md C38 asks for, on the command line: words, and what the one message must hold.
DEFECTS = {
    "one completion": (["--strategy.k", "1"], ["strategy.k = 1", "use 2 or more"]),
    "never gives up": (["--strategy.p", "1.0"], ["strategy.p = 1.0", "never gives up", "use p < 1"]),
    "no probability": (["--strategy.p", "1.2"], ["strategy.p = 1.2", "from 0 up to"]),
    "negative age": (["--strategy.window", "-1"], ["strategy.window = -1", "0 or more"]),
    "misspelt": (["--strategy.p_nug", "0.9"], ["strategy.p_nug", "did you mean --strategy.p (p_ngu)?"]),
    "asks again without filter": (["--strategy", "fixed", "--strategy.p", "0.9"], ["strategy.p", "--strategy ngu"]),
    "too few to evaluate": (["--eval.n", "4", "--eval.k", "8"], ["eval.k = 8", "eval.n = 4", "raise eval.n"]),
    "greedy copies": (["--eval.n", "8", "--eval.temperature", "0"], ["eval.n = 8", "set eval.n = 1"]),
    "no number": (["--learner.lr", "fast"], ['learner.lr = "fast"', "a finite number"]),
    "context": (
        ["--model.path", "model", "--task.max-prompt-tokens", "512", "--sampling.max-new-tokens", "600"],
        ["sampling.max_new_tokens = 600", "task.max_prompt_tokens = 512", "context is 1024", "lower one of them"],
    ),
    "more tokens than a model has": (
        ["--model.path", "model", "--learner.score-centering", "129"],
        ["learner.score_centering = 129", "vocabulary of 128 tokens", "lower it"],
    ),
    "more tokens than chains have": (
        [
            "--task.name",
            "chains",
            "--model.path=",
            "--task.max-prompt-tokens",
            "8",
            "--learner.score-centering",
            "1000",
        ],
        ["learner.score_centering = 1000", "vocabulary of 46 tokens", "lower it"],
    ),
}


def values_that_cannot_be() -> dict[str, tuple[list[str], list[str]]]:
    """For every setting of every strategy and loss, and of all sections, what is below it or no such value."""
    sections = {field.name: type(getattr(Settings(), field.name)) for field in fields(Settings)}
    every = [(section, cls, []) for section, cls in sections.items() if is_dataclass(cls) and section not in CHOICES]
    every += [(section, CHOICES[section][name], [f"--{section}", word_for(section, name)]) for section, name in CHOSEN]
    defects = {}
    for section, cls, choose in every:
        for name, hint in get_type_hints(cls).items():
            if name in {field.name for field in fields(cls)} and hint is not str:
                value = "-1" if {int, float} & {hint, *get_args(hint)} else "nonsense"
                words = [*choose, f"--{section}.{name.replace('_', '-')}={value}"]
                defects[" ".join(words)] = (words, [f"{section}.{name} = "])
    return defects


def test_defects_end_in_one_message_before_torch_is_loaded(tmp_path: Path) -> None:
    defects = DEFECTS | values_that_cannot_be()
    assert len(defects) > 100
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 1024, "vocab_size": 128}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "words.json").write_text(json.dumps({name: words for name, (words, _) in defects.items()}))
    script = """
import contextlib, io, json, sys
from nevergiveup.cli import main
results = {}
for name, words in json.load(open("words.json")).items():
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main(["train", "gsm8k-smollm2", *words])
    results[name] = [status, stderr.getvalue()]
print(json.dumps([results, sorted({"torch", "transformers", "numpy"} & sys.modules.keys())]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    results, loaded = json.loads(done.stdout)
    assert loaded == []
    for name, (_, parts) in defects.items():
        status, message = results[name]
        assert status == BAD_INPUT, name
        assert [part for part in parts if part not in message] == [], name
        assert message.count("\n") == 1, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "words.json"]


def test_exit_status_of_the_process(tmp_path: Path) -> None:
    refused = ngu("train", "demo", "--strategy.k", "1", cwd=tmp_path)
    assert refused.returncode == BAD_INPUT
    assert refused.stderr.count("\n") == 1
    assert ngu("--version", cwd=tmp_path).returncode == 0


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from nevergiveup.cli import main; sys.exit(main(sys.argv[1:]))"
    for words in (["train", "demo"], ["demo"]):
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == FAILED
        assert "(torch): pip install 'nevergiveup[train]'" in done.stderr
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_no_use_are_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    words = ["--model.path", str(model), "--task.data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "run")]
    assert main(["train", "gsm8k-smollm2", *words]) == BAD_INPUT
    assert "rows.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_made_in_the_first_free_folder_and_says_where_its_model_is(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    (tmp_path / "runs" / "demo-1" / "summary.json").touch()
    (tmp_path / "runs" / "demo-2").mkdir()  # empty: free
    done = ngu("train", "demo", *TINY, "--steps", "2", "--runtime", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "demo-2"
    assert f"the trained model is in {Path('runs/demo-2/model')}" in done.stdout
    assert (run / "model" / "config.json").is_file()
    saved = json.loads((run / "config.json").read_text())
    flags = [*TINY, "--steps", "2", "--runtime", "here"]
    assert saved == settings_to_json(resolve("demo", None, flags))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ["train", "demo", *TINY, "--steps", "60", "--runtime", "here", "--out", "run"]
    command = [sys.executable, "-m", "nevergiveup.cli", *words]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == INTERRUPTED
    assert "go on with: ngu train --resume run" in stderr
    assert len(metrics.read_text().splitlines()) < 60
    resumed = ngu("train", "--resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 61))
