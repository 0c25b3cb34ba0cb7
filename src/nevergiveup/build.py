"""Turns settings into live objects: task, prompts, model folder, engine, learner, evaluation. Layer 4: knows everything.

torch and transformers are imported inside the functions, so that bad settings are refused before they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from nevergiveup.config import model_context, model_vocabulary
from nevergiveup.fetch import FOLDER, cache_folder
from nevergiveup.protocols import Engine, Task
from nevergiveup.settings import Settings
from nevergiveup.tasks.chains import Chains
from nevergiveup.tasks.gsm8k import GSM8K, load_rows
from nevergiveup.types import Prompt, completion_seeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nevergiveup.learner.policy import TorchLearner

Progress = Callable[[str], None]

CHAINS_CONTEXT = 32
"""Positions of the tiny model of the task chains; a prompt takes 7, a completion at most 5."""


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts as the policy sees them. heldout may be empty: then nothing is evaluated."""

    task: Task
    train: list[Prompt]
    heldout: list[Prompt]


def make_task(settings: Settings) -> Task:
    if settings.task.name == "chains":
        return Chains(settings.seed, settings.task.preset, settings.task.impossible)
    return GSM8K(settings.task.style)


def model_folder(settings: Settings) -> Path | str:
    """The folder or Hugging Face name of the model to start from; "smollm2" is the one that `ngu fetch smollm2` makes."""
    path = settings.model.path
    if path == "smollm2":
        folder = cache_folder() / FOLDER
        if not folder.is_dir():
            raise ValueError('model.path = "smollm2" has not been fetched yet: run `ngu fetch smollm2` once')
        return folder
    if not path:
        raise ValueError(
            f"model.path is empty: the task {settings.task.name} needs a model, a folder or a Hugging Face name"
        )
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"model.path = {path!r}: there is no such folder")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path = {path!r} is no Hugging Face model folder: it has no config.json")
    return Path(path) if Path(path).exists() else path


def check(settings: Settings) -> None:
    """Everything that can be known to be wrong before a model is loaded. Raises ValueError."""
    settings.check()
    if settings.task.name == "chains":
        if settings.task.data:
            raise ValueError("task.data is for gsm8k: the task chains generates its own prompts")
        if not settings.model.path:
            settings.check_context(CHAINS_CONTEXT)
            settings.check_vocabulary(len(Chains(settings.seed, settings.task.preset).vocabulary))
            return
    folder = model_folder(settings)
    if isinstance(folder, Path) and (context := model_context(folder)) is not None:
        settings.check_context(context)
    if isinstance(folder, Path) and (n_tokens := model_vocabulary(folder)) is not None:
        settings.check_vocabulary(n_tokens)
    if settings.task.data:
        if not Path(settings.task.data).is_file():
            raise ValueError(f"task.data = {settings.task.data!r} is no file")
        load_rows(Path(settings.task.data))  # its defects are told now, not after a model was loaded


def warm_start(settings: Settings, folder: Path, progress: Progress) -> None:
    """Makes the starting policy of the task chains: a tiny Llama taught by the noisy teacher. Writes a model folder."""
    import torch
    from transformers.utils import logging

    from nevergiveup.models import chains_tokenizer, fit_supervised, tiny_llama

    logging.disable_progress_bar()  # it would write over the view of the run
    torch.set_num_threads(1)  # a model this small gains nothing from more, and loses a lot beside a busy neighbour

    task = Chains(seed=settings.seed, preset=settings.task.preset)
    model = tiny_llama(
        len(task.vocabulary),
        bos_id=task.bos_id,
        eos_id=task.eos_id,
        pad_id=task.pad_id,
        max_positions=CHAINS_CONTEXT,
        seed=settings.seed,
    )
    rng = Random(f"warm start {settings.seed}")
    n_steps = settings.model.warm_steps
    progress(f"warm start: {n_steps} supervised steps on one core, under a minute for 300")

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == n_steps:
            progress(f"warm start: step {step} of {n_steps}, loss {loss:.3f}")

    fit_supervised(
        model,
        lambda: task.teacher_sequences(rng, settings.model.warm_batch),
        n_steps,
        lr=settings.model.warm_lr,
        progress=report,
    )
    model.save_pretrained(folder)
    chains_tokenizer(task.vocabulary).save_pretrained(folder)


def load_model(folder: Path | str, dtype: str) -> PreTrainedModel:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_loaded(folder, error) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type, no-any-return]


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _not_loaded(folder, error) from error
    return tokenizer


def _not_loaded(folder: Path | str, error: Exception) -> ValueError:
    first_line = str(error).strip().partition("\n")[0]
    return ValueError(
        f"model.path = {str(folder)!r} cannot be loaded as a Hugging Face model with tokenizer: {first_line}"
    )


def load_data(settings: Settings, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> Data:
    """Prompts of the run, encoded; what is too long for `task.max_prompt_tokens` is left out and counted."""
    from nevergiveup.encode import encode_prompts

    task = make_task(settings)
    train = (
        load_rows(Path(settings.task.data), settings.task.style) if settings.task.data else list(task.prompts("train"))
    )
    heldout = list(task.prompts("heldout" if settings.task.name == "chains" else "test"))
    if settings.task.n_prompts is not None:
        train = Random("n_prompts").sample(train, min(settings.task.n_prompts, len(train)))
    n_heldout = settings.eval.n_prompts
    if n_heldout is not None:
        heldout = Random("eval").sample(heldout, min(n_heldout, len(heldout)))
    limit = settings.task.max_prompt_tokens
    kept = {}
    for name, prompts in (("training", train), ("evaluation", heldout)):
        dropped: dict[str, int] = {}

        def drop(prompt: Prompt, n_tokens: int, dropped: dict[str, int] = dropped) -> None:
            dropped[prompt.id] = n_tokens

        kept[name] = encode_prompts(prompts, tokenizer, max_prompt_tokens=limit, on_drop=drop)
        if dropped:
            progress(
                f"{len(dropped)} {name} prompts are longer than task.max_prompt_tokens = {limit} and are left out "
                f"(the longest has {max(dropped.values())})"
            )
    return Data(task, kept["training"], kept["evaluation"])


def make_engine(
    folder: Path | str,
    *,
    dtype: str,
    temperature: float,
    max_new_tokens: int,
    n_slots: int,
    decode_text: bool,
    n_threads: int | None,
    n_top: int,
) -> Engine:
    """An engine with a model of its own. Importable by name, so that it can be built in another process."""
    import torch

    from nevergiveup.engines.torch import TorchEngine

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    return TorchEngine(
        load_model(folder, dtype),
        tokenizer=load_tokenizer(folder) if decode_text else None,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        n_slots=n_slots,
        n_top=n_top,
    )


def engine_arguments(settings: Settings, n_threads: int | None) -> dict[str, Any]:
    return {
        "dtype": settings.model.engine_dtype,
        "temperature": settings.sampling.temperature,
        "max_new_tokens": settings.sampling.max_new_tokens,
        "n_slots": settings.sampling.n_slots,
        "decode_text": settings.task.name != "chains",
        "n_threads": n_threads,
        "n_top": settings.learner.score_centering,
    }


def make_learner(
    settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, start: Path | str
) -> TorchLearner:
    """start: folder of the policy that the run began with, which a KL term refers to."""
    from nevergiveup.learner.policy import TorchLearner

    settings.check_vocabulary(model.config.get_text_config().vocab_size)  # of a model that had no folder to look into
    options = settings.learner
    low, high = options.ratio_mask_low, options.ratio_mask_high
    return TorchLearner(
        model,
        tokenizer,
        lr=options.lr,
        schedule=options.schedule,
        n_warmup=options.warmup_steps,
        n_steps=settings.steps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        loss=settings.loss,
        normalize=options.normalize,
        max_new_tokens=settings.sampling.max_new_tokens,
        ratio_mask=None if low is None or high is None else (low, high),
        score_centering=options.score_centering > 0,
        kl_beta=options.kl_beta,
        reference=load_model(start, settings.model.dtype) if options.kl_beta else None,
        temperature=settings.sampling.temperature,
        micro_batch_tokens=options.micro_batch_tokens,
        truncated=options.truncated,
    )


def threads_per_process(settings: Settings) -> int | None:
    """torch threads of engine and learner each; None leaves torch's own choice.

    Side by side they share the cores. Threads of one process that wait for each other beside a busy neighbour are slower
    than one thread by an order of magnitude; a tiny model never needs two.
    """
    if settings.task.name == "chains":
        return 1
    return max(1, (os.cpu_count() or 2) // 2) if settings.runtime == "process" else None


def exact_rates(
    model: PreTrainedModel, task: Chains, prompts: Sequence[Prompt], temperature: float
) -> dict[str, float]:
    """Prompt id -> exact pass@1 (chains: the product of the token probabilities of the one right completion)."""
    from nevergiveup.models import exact_pass_rate

    rates = exact_pass_rate(model, [p.tokens for p in prompts], [task.target(p) for p in prompts], temperature)
    return {prompt.id: rate for prompt, rate in zip(prompts, rates, strict=True)}


async def sampled_counts(
    settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int
) -> dict[str, tuple[int, int]]:
    """Prompt id -> (completions drawn and verified, right ones) on the held-out prompts, by the model as it is now."""
    import asyncio

    from nevergiveup.engines.torch import TorchEngine
    from nevergiveup.loop import TaskGrader
    from nevergiveup.types import Unverified

    engine = TorchEngine(
        model,
        tokenizer=tokenizer,
        temperature=settings.eval.temperature,
        max_new_tokens=settings.sampling.max_new_tokens,
        n_slots=settings.sampling.n_slots,
    )
    grader = TaskGrader(data.task)
    seeds = completion_seeds(seed, len(data.heldout))

    async def count(prompt: Prompt, prompt_seed: int) -> tuple[int, int]:
        completions = await engine.sample(prompt, settings.eval.n, prompt_seed)
        grades = await grader.grade(prompt, completions)
        verified = [grade for grade in grades if not isinstance(grade, Unverified)]
        return len(verified), sum(grade == prompt.max_reward for grade in verified)

    counts = await asyncio.gather(*(count(p, s) for p, s in zip(data.heldout, seeds, strict=True)))
    await engine.close()
    return {prompt.id: pair for prompt, pair in zip(data.heldout, counts, strict=True)}
