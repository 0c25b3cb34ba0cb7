"""The task `reasoning-gym`: a data set of the package reasoning-gym, generated: `--task reasoning-gym:chain_sum`.

Layer 3. Needs the extra `reasoning-gym`; standard library only until prompts are made.

The answer is what stands in the last <answer></answer>, as the package itself reads it, and scores what the data set says of
it, 0 to 1. Problems are generated in a process of their own with a fixed hash seed and a seeded global generator, for some
data sets depend on either: the same seed gives the same prompts, also when a run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from nevergiveup.loop import reward_of
from nevergiveup.types import NO_ANSWER, Check, Completion, Grade, Prompt, Score, Unverified

INSTRUCTION = (
    "Please reason step by step, and put your final answer, and nothing else, between <answer> and </answer>. "
    "Where the question shows how an answer is to be written, write it so."
)

N_TEST = 100
"""Problems to evaluate on, at most."""

TEST_SEED = 1_000_000_000
"""How far the seed of the test split is from that of the training split: problem i of a data set is drawn from seed + i."""

Entry = dict[str, Any]
"""What the package calls an entry: `question`, `answer` (None where many answers are right) and `metadata`."""


class ReasoningGym:
    """The task reasoning-gym. size: training problems, of which repeated ones are left out. options: of the data set, as
    {"min_terms": 3}.

    Raises ValueError when the package is not installed, and for a name or an option that the package does not know.
    """

    def __init__(
        self, dataset: str, size: int = 1000, seed: int = 0, options: Mapping[str, object] | None = None
    ) -> None:
        options = dict(options or {})
        if reserved := sorted({"size", "seed"}.intersection(options)):
            raise ValueError(f"task.options must not have {reserved[0]!r}: set task.size, and seed for the whole run")
        self.dataset = dataset
        self._options = json.dumps(options, sort_keys=True)
        entries = _generate(dataset, self._options, ((seed, size), (seed + TEST_SEED, min(size, N_TEST))))
        seen: set[str] = set()  # no problem twice, and none of the training split in the test split
        self._prompts: dict[str, list[Prompt]] = {"train": [], "test": []}
        for prompts, drawn in zip(self._prompts.values(), entries, strict=True):
            for entry in drawn:
                if entry["question"] not in seen:
                    seen.add(entry["question"])
                    prompts.append(self._prompt(entry))

    def prompts(self, split: str) -> list[Prompt]:
        if split not in self._prompts:
            raise ValueError(f"reasoning-gym has no split {split!r}: use one of {', '.join(self._prompts)}")
        return self._prompts[split]

    def _prompt(self, entry: Entry) -> Prompt:
        question = entry["question"]
        row_id = hashlib.sha256(f"{self.dataset}\n{question}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return Prompt(row_id, ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},), entry)

    def grade(self, prompt: Prompt, completion: Completion) -> Score | Check:
        answer = stated_answer(completion.text)
        if answer is None:
            return Score(0, NO_ANSWER)
        return Check(
            _score, (_Scorer(self.dataset, self._options), answer, prompt.answer), (self.dataset, prompt.id, answer)
        )


def stated_answer(text: str) -> str | None:
    """What stands in the last closed <answer> tag."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


class _Scorer:
    """A data set that scores. It travels by its name, and is made over there, once, before the clock of a check starts."""

    def __init__(self, dataset: str, options: str) -> None:
        self._spec = (dataset, options)

    def __reduce__(self) -> tuple[Callable[[str, str], _Scorer], tuple[str, str]]:
        return _scorer, self._spec

    def __call__(self, answer: str, entry: Entry) -> float:
        return float(_dataset(*self._spec).score_answer(answer, entry))


@cache
def _scorer(dataset: str, options: str) -> _Scorer:
    _dataset(dataset, options)
    return _Scorer(dataset, options)


@cache
def _dataset(dataset: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(options))


def _score(scorer: _Scorer, answer: str, entry: Entry) -> Grade:
    score = scorer(answer, entry)
    if not 0 <= score <= 1:
        return Unverified(f"the data set scored {score}, which is not from 0 to 1")
    return Score(reward_of(score), "right" if score == 1 else "partly right" if score else "wrong", answer)


# ------------------------------------------------------------------------------------------------ generation


def _generate(dataset: str, options: str, draws: tuple[tuple[int, int], ...]) -> list[list[Entry]]:
    """The entries of each (seed, size), from a process of its own."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from nevergiveup.tasks.gym import write; write()"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path), dataset, options, json.dumps(draws)],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"task.dataset = {dataset!r}: the problems cannot be generated: {last_line}")
    found: str | list[list[Entry]] = pickle.loads(done.stdout)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def write() -> None:
    """Of the process that generates: writes the entries, or what is wrong with the settings, to standard output."""
    out = os.dup(1)
    os.dup2(2, 1)  # some data sets print while they are generated
    dataset, options, draws = sys.argv[2:]
    with os.fdopen(out, "wb") as stream:
        pickle.dump(
            _wrong(dataset, json.loads(options)) or _entries(dataset, json.loads(options), json.loads(draws)), stream
        )


def _entries(dataset: str, options: dict[str, Any], draws: list[tuple[int, int]]) -> list[list[Entry]]:
    import reasoning_gym

    found = []
    for seed, size in draws:
        random.seed(seed)
        made = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
        found.append([made[i] for i in range(size)])
    return found


def _wrong(dataset: str, options: dict[str, Any]) -> str:
    """What is wrong with the settings; empty if nothing is."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        return (
            f"task.name = reasoning-gym needs a package that is not installed ({error.name}): "
            "pip install 'nevergiveup[reasoning-gym]'"
        )
    if dataset not in DATASETS:
        near = get_close_matches(dataset, DATASETS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {len(DATASETS)}, as chain_sum"
        return f"task.dataset = {dataset!r} is no data set of reasoning-gym: {meant}"
    try:
        reasoning_gym.create_dataset(dataset, seed=0, size=1, **options)
    except (TypeError, ValueError, AssertionError) as error:
        known = [name for name in vars(DATASETS[dataset][1]()) if name not in ("seed", "size")]
        return f"task.options = {json.dumps(options)}: {error} (options of {dataset}: {', '.join(known)})"
    return ""
