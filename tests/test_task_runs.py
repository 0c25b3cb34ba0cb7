"""`ngu train` on every kind of task and data: two real steps each, with a tiny random model that speaks bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nevergiveup.cli import BAD_INPUT, FAILED, main
from nevergiveup.events import Graded, Judged, read_events
from nevergiveup.models import tiny_llama

pytestmark = pytest.mark.slow

SMALL = [
    *("--strategy", "fixed", "--strategy.k", "4", "--batch.n-groups", "2", "--sampling.max-new-tokens", "8"),
    *("--steps", "2", "--runtime", "here", "--eval.n-prompts", "2", "--eval.n", "1", "--learner.truncated", "keep"),
    *("--task.max-prompt-tokens", "8000", "--checkpoint-every", "2"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<bos>", "<eos>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ",
    )  # fmt: skip
    fast.save_pretrained(folder)
    tiny_llama(
        len(words), bos_id=0, eos_id=1, pad_id=2, max_positions=8192, seed=0, hidden=32, layers=1, heads=2
    ).save_pretrained(folder)
    return folder


def train(model: Path, *words: str) -> Path:
    assert main(["train", *words, "--model.path", str(model), "--out", "run", *SMALL]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == 2
    ledger = summary["ledger"]
    del ledger["chains"]
    assert ledger.pop("drawn") == sum(ledger.values())
    return Path("run")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


REWARD = """
def my_reward(completion, answer, tag):
    assert tag == "t"
    return {"vowels": sum(c in "aeiou" for c in completion) / 80, "long": len(completion) > 4}
"""


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_rows_and_a_reward_function_of_ones_own(model: Path, suffix: str) -> None:
    rows = [{"prompt": f"Say {i}.", "answer": str(i), "tag": "t"} for i in range(6)]
    if suffix == "jsonl":
        Path("my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Path("my.csv").write_text("prompt,answer,tag\n" + "".join(f"Say {i}.,{i},t\n" for i in range(6)))
    Path(f"rewards_{suffix}.py").write_text(REWARD)
    run = train(model, "--data", f"my.{suffix}", "--reward", f"rewards_{suffix}:my_reward", "--task.max-reward", "1.2")
    graded = [event for _, event in read_events(run / "events.jsonl") if isinstance(event, Graded)]
    assert graded
    assert all(not event.unverified for event in graded), graded[0]
    assert any("vowels" in part for part in graded[0].parts)


def test_a_reward_function_that_raises_ends_the_run_with_its_traceback(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.jsonl").write_text('{"prompt": "x", "answer": "1"}\n' * 40)
    Path("raising_module.py").write_text("def my_reward(completion):\n    raise RuntimeError('boom')\n")
    words = [
        "train",
        "--data",
        "my.jsonl",
        "--reward",
        "raising_module:my_reward",
        "--model.path",
        str(model),
        "--out",
        "run",
    ]
    assert main([*words, *SMALL]) == FAILED
    printed = capsys.readouterr().err
    assert "of the last 64 completions got no verdict" in printed
    assert "RuntimeError: boom" in printed


def test_a_reward_function_that_is_not_there_is_bad_input(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.jsonl").write_text('{"prompt": "x", "answer": "1"}\n')
    words = [
        "train",
        "--data",
        "my.jsonl",
        "--reward",
        "absent_module:my_reward",
        "--model.path",
        str(model),
        "--out",
        "run",
    ]
    assert main([*words, *SMALL]) == BAD_INPUT
    assert "absent_module" in capsys.readouterr().err
    assert not Path("run/events.jsonl").exists()


def test_gsm8k_with_a_reward_of_weighted_parts(model: Path) -> None:
    run = train(model, "--task", "gsm8k", "--task.reward", "correct + 0.1*format")
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"window/reward/correct", "window/reward/format", "window/no_answer"} <= metrics.keys()


def test_math_with_symbolic_answers(model: Path) -> None:
    train(model, "--task", "math", "--task.n-prompts", "4")


def test_a_set_of_reasoning_gym(model: Path) -> None:
    train(model, "--task", "reasoning-gym:chain_sum", "--task.size", "8")


def test_manufactoria(model: Path) -> None:
    run = train(model, "--task", "manufactoria", "--task.n-prompts", "4")
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"window/reward/pass_rate", "window/reward/all_pass"} <= metrics.keys()


def test_a_task_of_ones_own(model: Path) -> None:
    Path("my_task.py").write_text(
        "from nevergiveup.types import Prompt\n"
        "class MyTask:\n"
        "    def prompts(self, split):\n"
        "        rows = [Prompt(str(i), ({'role': 'user', 'content': f'{i}?'},), i) for i in range(4)]\n"
        "        return rows if split == 'train' else []\n"
        "    def grade(self, prompt, completion):\n"
        "        return len(completion.text) % 2\n"
    )
    run = train(model, "--task", "my_task:MyTask")
    rewards = {r for _, e in read_events(run / "events.jsonl") if isinstance(e, Judged) for r in e.rewards}
    assert rewards <= {0, 1}


def test_the_tiny_variant_of_manufactoria() -> None:
    words = ["--model.warm-steps", "4", "--model.warm-batch", "16", "--task.n-prompts", "8"]
    assert main(
        ["train", "--task", "manufactoria-tiny", *words, "--out", "run", *SMALL, "--sampling.max-new-tokens", "30",
         "--task.max-prompt-tokens", "16"]
    ) == 0  # fmt: skip
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 2
