"""samples.jsonl: what the policy wrote, for people to read. Layer 2. Standard library only.

Kept are all completions of some training prompts, chosen by the seed, and the last round of each prompt that is given up (the
first time only, and of so many prompts at most: wrong gold answers collect there). Three kinds of rows:

    {"kind": "prompt", "prompt", "text", "answer"}              before the first sample of a prompt
    {"kind": "sample", "prompt", "epoch", "round", "request", "key", "version", "finish", "n_tokens", "reward", "reason",
     "text", "t"}
    {"kind": "trained", "prompt", "step", "attempts": [[key, reward, version, advantage], ...]}

epoch: which visit of the prompt, from 0. version: of the policy that began it. reward: null for no verdict. key: names a
completion, so that the rows of its group in a batch can be found. advantage: null where the attempt was left out.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from nevergiveup.events import Event, Judged
from nevergiveup.types import Batch, Completion, Exact, Grade, Prompt, Request, Score, Unverified

LONGEST_TEXT = 4_000
"""Characters of a completion that are kept."""

MOST_GIVEN_UP = 1_000
"""Prompts whose last round is kept because they were given up."""


class SampleLog:
    """Appends to the file at `path`; what it holds already counts. `read`: the text of token ids, where there is no other."""

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        *,
        n_prompts: int,
        seed: int,
        clock: Callable[[], float],
        read: Callable[[Sequence[int]], str],
    ) -> None:
        chosen = Random(f"samples {seed}").sample(range(len(prompts)), min(n_prompts, len(prompts)))
        self._chosen = {prompts[i].id for i in chosen}
        self._keeps_given_up = n_prompts > 0
        self._clock = clock
        self._read = read
        self._known = _prompts_in(path)
        self._held: tuple[Prompt, int, list[dict[str, Any]]] | None = None
        self._file = path.open("a", encoding="utf-8")

    def graded(
        self,
        request: Request,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
        rewards: Sequence[Exact | None],
    ) -> None:
        """A round, before it is delivered. rewards: those that count."""
        prompt = request.prompt
        is_chosen = prompt.id in self._chosen
        if not is_chosen and (
            not self._keeps_given_up
            or prompt.id in self._known
            or len(self._known) >= MOST_GIVEN_UP + len(self._chosen)
        ):
            return
        rows = [self._row(request, *each) for each in zip(completions, grades, rewards, strict=True)]
        if is_chosen:
            self._write_samples(prompt, rows)
        else:
            self._held = (prompt, request.id, rows)

    def event(self, event: Event) -> None:
        """Follows `graded` at once, with what became of the round."""
        if self._held is None or not isinstance(event, Judged):
            return
        (prompt, request, rows), self._held = self._held, None
        if event.request == request and event.outcome == "given_up":
            self._write_samples(prompt, rows)

    def trained(self, batch: Batch, step: int) -> None:
        for group in batch.groups:
            if group.prompt.id in self._chosen:
                attempts = [
                    [_key(attempt.completion), float(attempt.reward), attempt.version, weight]
                    for attempt, weight in zip(group.attempts, group.weights, strict=True)
                    if attempt.completion is not None
                ]
                self._write({"kind": "trained", "prompt": group.prompt.id, "step": step, "attempts": attempts})

    def _row(self, request: Request, completion: Completion, grade: Grade, reward: Exact | None) -> dict[str, Any]:
        return {
            "kind": "sample",
            "prompt": request.prompt.id,
            "epoch": request.visit,
            "round": request.round,
            "request": request.id,
            "key": _key(completion),
            "version": completion.version_first,
            "finish": completion.finish,
            "n_tokens": len(completion.tokens),
            "reward": None if reward is None else float(reward),
            "reason": grade.reason.strip().rpartition("\n")[2] if isinstance(grade, Score | Unverified) else "",
            "text": (completion.text or self._read(completion.tokens))[:LONGEST_TEXT],
            "t": round(self._clock(), 3),
        }

    def _write_samples(self, prompt: Prompt, rows: list[dict[str, Any]]) -> None:
        if prompt.id not in self._known:
            self._known.add(prompt.id)
            text = prompt.messages[-1]["content"] if prompt.messages else self._read(prompt.tokens)
            answer = "" if prompt.answer is None else str(prompt.answer)
            self._write(
                {"kind": "prompt", "prompt": prompt.id, "text": text[:LONGEST_TEXT], "answer": answer[:LONGEST_TEXT]}
            )
        for row in rows:
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> int:
        """Waits until all is on the disk; returns the length of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def _key(completion: Completion | None) -> str:
    """The same after a resume, which makes new objects."""
    assert completion is not None
    return f"{crc32(array('q', [completion.version_first, *completion.tokens]).tobytes()):08x}"


def _prompts_in(path: Path) -> set[str]:
    if not path.exists():
        return set()
    with path.open(encoding="utf-8") as file:
        return {json.loads(line)["prompt"] for line in file if line.startswith('{"kind":"prompt"')}
