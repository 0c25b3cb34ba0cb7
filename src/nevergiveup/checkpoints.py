"""What a run folder holds to go on from: checkpoints, written whole or not at all, and what the data were.

Layer 2. Standard library only.

out/checkpoints/step-000050/      all that is needed to go on, as JSON and safetensors
out/checkpoints/step-000050.2/    the same step, saved once more later on
out/checkpoints/.step-*.new/      being written, or left behind by a crash: nobody reads it, the next save removes it

A checkpoint gets its name when every byte of it is on the disk, and no name is ever given twice: so whatever interrupts a
save, at whatever byte, the checkpoints before it are as they were.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nevergiveup.types import Prompt

FOLDER, LEARNER = "checkpoints", "learner"

PROMPTS = "prompts.txt"


def newest_checkpoint(out: Path) -> Path | None:
    """The complete checkpoint of most steps in a run folder."""
    return max(_complete(out), key=_order, default=None)


def write_checkpoint(out: Path, step: int, fill: Callable[[Path], None], *, keep: int) -> Path:
    """Has `fill` write into an empty folder, makes that the newest checkpoint, and removes others: those that it replaces, of
    the same step, and all but the newest `keep`.

    Whatever `fill` raises, and OSError of a full disk, leaves the checkpoints as they were.
    """
    parent = out / FOLDER
    parent.mkdir(exist_ok=True)
    for leftover in parent.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    name = f"step-{step:06d}"
    again = [_order(path)[1] for path in _complete(out) if _order(path)[0] == step]
    if again:
        name += f".{max(again) + 1}"
    half_made = parent / f".{name}.new"
    half_made.mkdir()
    try:
        fill(half_made)
        for folder, _, files in os.walk(half_made):
            for file in files:
                fsync(Path(folder) / file)
            fsync(Path(folder))
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(half_made, ignore_errors=True)  # it may be what fills the disk
        raise
    half_made.rename(parent / name)
    fsync(parent)
    newest_of = {_order(path)[0]: path for path in sorted(_complete(out), key=_order)}
    kept = sorted(newest_of.values(), key=_order)[-keep:]
    for old in set(_complete(out)).difference(kept):
        gone = old.with_name(f".{old.name}.old")  # first the name: half a checkpoint must not pass for one
        old.rename(gone)
        shutil.rmtree(gone)
    return parent / name


def model_in(path: Path) -> tuple[Path | None, Path]:
    """Of a folder that somebody named as a model: the run that it is or belongs to, if any, and the model folder meant.

    RUN is the newest that it has learned, RUN/checkpoints/step-N a certain checkpoint; RUN/model is meant as such.
    Raises ValueError for a run that holds no model yet.
    """
    for run in (path, *path.absolute().parents[:3]):
        if not (run / "config.json").is_file() or not (run / "events.jsonl").is_file():
            continue
        if run == path:
            newest = newest_checkpoint(run)
            model = newest / LEARNER if newest else run / "model"
            if not (model / "config.json").is_file():
                raise ValueError(f"{run} holds no trained model: it has neither a checkpoint nor {model}")
            return run, model
        return run, path / LEARNER if path.parent.name == FOLDER else path
    return None, path


def write_prompts(out: Path, prompts: Sequence[Prompt]) -> None:
    """Notes what the training data were, one line a prompt: a digest of what it says, and its id."""
    temporary = out / f".{PROMPTS}.new"
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{_digest(prompt)} {json.dumps(prompt.id)}\n" for prompt in prompts)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / PROMPTS)


def data_changes(out: Path, prompts: Sequence[Prompt]) -> str:
    """What is different from when `write_prompts` was called, in words; empty when nothing is."""
    if not (out / PROMPTS).is_file():
        return ""
    rows = [line.split(" ", 1) for line in (out / PROMPTS).read_text(encoding="utf-8").splitlines()]
    was = {json.loads(prompt_id): digest for digest, prompt_id in rows}
    now = {prompt.id: _digest(prompt) for prompt in prompts}
    gone = [prompt_id for prompt_id in was if prompt_id not in now]
    new = [prompt_id for prompt_id in now if prompt_id not in was]
    changed = [prompt_id for prompt_id, digest in now.items() if was.get(prompt_id, digest) != digest]
    parts = [
        f"{len(some)} {what} (the first is {some[0]})"
        for some, what in ((gone, "gone"), (new, "new"), (changed, "with another text or answer"))
        if some
    ]
    if parts:
        return f"of {len(was)} training prompts then and {len(now)} now: " + ", ".join(parts)
    return "" if list(was) == list(now) else f"the same {len(now)} training prompts in another order"


def _digest(prompt: Prompt) -> str:
    said = prompt.messages or prompt.tokens
    text = json.dumps([said, prompt.answer, prompt.max_reward], default=_plain, skipkeys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """What JSON does not know, without anything that differs from process to process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, Fraction | Decimal | Path) else type(value).__name__


def write_json(path: Path, value: Any) -> None:
    """Replaces the file at once: a reader sees the old or the new content, never half of it."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _complete(out: Path) -> list[Path]:
    return [path for path in (out / FOLDER).glob("step-*") if all(p.isdigit() for p in path.name[5:].split("."))]


def _order(checkpoint: Path) -> tuple[int, int]:
    """(step, how often that step had been saved before)."""
    step, _, again = checkpoint.name[5:].partition(".")
    return int(step), int(again or 1)


def fsync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
