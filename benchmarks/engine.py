"""Tokens a second of the rollout engine side by side with `model.generate`, on the same cores, in one run.

    python benchmarks/engine.py                    needs SmolLM2 in the cache folder: `ngu fetch smollm2`
    python benchmarks/engine.py --model FOLDER     any other Hugging Face model folder instead

demo            the model (0.4 M parameters) and the prompts (7 tokens) of the recipe `demo`, warm-started as there:
                64 prompts x 4 completions at once, which end by themselves after 2 to 5 tokens
demo, queued    the same with 384 prompts waiting: the engine refills its 256 slots, `generate` runs one batch after another
demo, 16 each   the untrained model, no end-of-sequence token, exactly 16 new tokens: nothing ends early, little is alike
model           32 chats with a GSM8K question x 4 completions, no end-of-sequence token, exactly 32 new tokens

Both sample at temperature 1 from the whole vocabulary (top_k off), in float32 and in bfloat16, with the same number of
threads; log-probabilities of the sampled tokens come out of the engine only. `generate` draws 4 completions of a prompt
with num_return_sequences, prompts padded on the left. The runs of both alternate, and medians are reported; tokens are
counted up to the end-of-sequence token. The engine is built once; warm-up runs are not counted. The last column is the
ratio in processor time, which busy neighbours disturb less.

Exits with 1 when a target is missed: 2.2 times the tokens of `generate` for `demo` and `model`, each in its better dtype.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from nevergiveup.encode import encode_prompts
from nevergiveup.engines.torch import TorchEngine
from nevergiveup.fetch import FOLDER, cache_folder
from nevergiveup.models import fit_supervised, tiny_llama
from nevergiveup.tasks.chains import Chains
from nevergiveup.tasks.gsm8k import GSM8K
from nevergiveup.types import Prompt

K = 4
TARGET = 2.2
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Workload:
    """batch: prompts in one call of `generate`; the engine has K slots for each. passes: runs inside one measurement."""

    name: str
    prompts: Sequence[Prompt]
    max_new_tokens: int
    eos_id: int | None
    batch: int
    repeats: int
    warmups: int
    passes: int
    has_target: bool


@dataclass(frozen=True)
class Measured:
    n_tokens: int
    wall_s: float
    processor_s: float


def timed(run: Callable[[int], int], passes: Sequence[int]) -> Measured:
    wall, processor = perf_counter(), process_time()
    n_tokens = sum(run(i) for i in passes)
    return Measured(n_tokens, perf_counter() - wall, process_time() - processor)


def generate(model: Any, load: Workload, seed: int) -> int:
    """The number of tokens sampled."""
    torch.manual_seed(seed)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=load.max_new_tokens,
        num_return_sequences=K,
        eos_token_id=load.eos_id,
        pad_token_id=0,
    )
    n_tokens = 0
    for start in range(0, len(load.prompts), load.batch):
        rows = [prompt.tokens for prompt in load.prompts[start : start + load.batch]]
        longest = max(map(len, rows))
        ids = torch.tensor([(0,) * (longest - len(row)) + row for row in rows])
        is_prompt = torch.tensor([(0,) * (longest - len(row)) + (1,) * len(row) for row in rows])
        new = model.generate(ids, attention_mask=is_prompt, generation_config=config)[:, longest:]
        is_end = new == (-1 if load.eos_id is None else load.eos_id)
        n_tokens += int(((is_end.cumsum(1) - is_end.int()) == 0).sum())  # up to the first end, included
    return n_tokens


async def sample(engine: TorchEngine, load: Workload, seed: int) -> int:
    """The number of tokens sampled."""
    requests = (engine.sample(prompt, K, seed * 1_000_003 + i) for i, prompt in enumerate(load.prompts))
    return sum(len(completion.tokens) for group in await asyncio.gather(*requests) for completion in group)


def measure(load: Workload, models: dict[torch.dtype, Any]) -> bool:
    """Prints the lines of one workload. Whether its target is met."""
    runs: dict[tuple[torch.dtype, str], Callable[[int], int]] = {}
    loop = asyncio.Runner()
    for dtype, model in models.items():
        engine = TorchEngine(
            model,
            max_new_tokens=load.max_new_tokens,
            n_slots=K * load.batch,
            eos_ids=[] if load.eos_id is None else [load.eos_id],
        )
        runs[dtype, "generate"] = partial(generate, model, load)
        runs[dtype, "engine"] = lambda seed, engine=engine: loop.run(sample(engine, load, seed))  # type: ignore[misc]
    for run in runs.values():
        timed(run, range(load.warmups))
    measured: dict[tuple[torch.dtype, str], list[Measured]] = {key: [] for key in runs}
    for repeat in range(load.repeats):
        seeds = range(1000 + repeat * load.passes, 1000 + (repeat + 1) * load.passes)
        for key, run in runs.items():
            measured[key].append(timed(run, seeds))

    wall = {key: median(m.n_tokens / m.wall_s for m in many) for key, many in measured.items()}
    processor = {key: median(m.n_tokens / m.processor_s for m in many) for key, many in measured.items()}
    for dtype in models:
        ours, theirs = (dtype, "engine"), (dtype, "generate")
        line(
            load.name,
            str(dtype).removeprefix("torch."),
            wall[theirs],
            wall[ours],
            wall[ours] / wall[theirs],
            processor[ours] / processor[theirs],
        )
    best = [max(rates[dtype, who] for dtype in models) for rates in (wall, processor) for who in ("generate", "engine")]
    line(load.name, "better of each", best[0], best[1], best[1] / best[0], best[3] / best[2])
    return not load.has_target or best[1] / best[0] >= TARGET


def line(name: str, dtype: str, theirs: float, ours: float, ratio: float, processor_ratio: float) -> None:
    print(f"{name:<15} {dtype:<15} {theirs:>12,.0f} {ours:>12,.0f} {ratio:>7.2f} {processor_ratio:>11.2f}", flush=True)


def demo() -> list[tuple[Workload, Any]]:
    task = Chains(seed=0, preset="demo")

    def untrained() -> Any:
        ids = {"bos_id": task.bos_id, "eos_id": task.eos_id, "pad_id": task.pad_id}
        return tiny_llama(len(task.vocabulary), **ids, max_positions=32, seed=0).eval()

    model, rng = untrained(), Random(0)
    fit_supervised(model, lambda: task.teacher_sequences(rng, 224), 300, lr=6e-3)
    prompts, most, end = task.prompts("train"), task.max_completion_tokens, task.eos_id
    return [
        (Workload("demo", prompts[:64], most, end, 64, repeats=9, warmups=6, passes=6, has_target=True), model),
        (
            Workload("demo, queued", prompts[:384], most, end, 64, repeats=9, warmups=3, passes=1, has_target=False),
            model,
        ),
        (
            Workload("demo, 16 each", prompts[:64], 16, None, 64, repeats=9, warmups=3, passes=2, has_target=False),
            untrained(),
        ),
    ]


def large(folder: Path, repeats: int) -> Workload:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    some = GSM8K().prompts("train")[:64]
    kept = encode_prompts(some, tokenizer, max_prompt_tokens=128, on_drop=lambda prompt, n_tokens, control: None)[:32]
    lengths = sorted(len(prompt.tokens) for prompt in kept)
    print(f"model: {folder.name}, prompts of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(kept) // 2]}")
    return Workload("model", kept, 32, None, len(kept), repeats, warmups=0, passes=1, has_target=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache_folder() / FOLDER, help="Hugging Face model folder")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for both sides")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of the large model, a side and dtype")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: no model there; run `ngu fetch smollm2`, or name another folder")
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} thread(s)")
    print(f"{'workload':<15} {'dtype':<15} {'generate':>12} {'engine':>12} {'ratio':>7} {'processor':>11}")
    met = [measure(load, {dtype: deepcopy(model).to(dtype) for dtype in DTYPES}) for load, model in demo()]
    load = large(arguments.model, arguments.repeats)
    models = {dtype: AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval() for dtype in DTYPES}
    met.append(measure(load, models))
    print(f"target of {TARGET} times for demo and model: {'met' if all(met) else 'MISSED'}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
