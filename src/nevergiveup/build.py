"""Turns settings into live objects: task, prompts, model folder, engine, learner, evaluation. Layer 4: knows everything.

torch and transformers are imported inside the functions, so that bad settings are refused before they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from nevergiveup.config import model_context, model_vocabulary
from nevergiveup.evaluate import read_initial_rates
from nevergiveup.fetch import FOLDER, cache_folder
from nevergiveup.grading.pool import GraderPool, check_canaries
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.protocols import Checker, Engine, Grader, SelfTested, Task, Validated
from nevergiveup.report.trackers import check_trackers
from nevergiveup.settings import Settings
from nevergiveup.task_settings import (
    TINY,
    ChainsTask,
    CustomTask,
    Gsm8kTask,
    ManufactoriaTask,
    ManufactoriaTinyTask,
    MathTask,
    OwnTask,
    ReasoningGymTask,
    VerifiersTask,
    json_object,
)
from nevergiveup.tasks.chains import Chains, Sequences
from nevergiveup.tasks.reward_terms import WithReward, needs_correct, parse_terms
from nevergiveup.types import Check, Grade, Prompt, Unverified, completion_seeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nevergiveup.engines.torch import TorchEngine
    from nevergiveup.learner.policy import TorchLearner
    from nevergiveup.tasks.manufactoria_tiny import ManufactoriaTiny

Progress = Callable[[str], None]

MOST_LISTED = 10

TRAIN_CHOICE, EVAL_CHOICE = "n_prompts", "eval"
"""Seeds of the choice of training and of held-out prompts, the same in every run."""

PRELOAD = {
    "math": ("math_verify",),
    "own": ("math_verify",),
    "reasoning-gym": ("reasoning_gym",),
    "verifiers": ("verifiers.v1",),
}
"""Task -> modules that its checks need, imported once for all worker processes."""


class TinyTask(Protocol):
    """A task that speaks in token ids and has a teacher, by which a tiny model is warm-started."""

    @property
    def vocabulary(self) -> tuple[str, ...]: ...
    @property
    def bos_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def context(self) -> int:
        """Positions that prompt and completion may take together."""
        ...

    def teacher_sequences(self, rng: Random, n: int) -> Sequences: ...


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts as the policy sees them. heldout may be empty: then nothing is evaluated."""

    task: Task
    train: list[Prompt]
    heldout: list[Prompt]


def make_task(settings: Settings) -> Task:
    """The task of a run, its reward included. Imports a task's library, if it needs one. Raises ValueError."""
    options = settings.task
    task: Task
    match options:
        case ChainsTask() | ManufactoriaTinyTask():
            task = _tiny_task(settings)
        case Gsm8kTask():
            from nevergiveup.tasks.gsm8k import GSM8K

            task = GSM8K(options.style, options.data, options.test_data, allow_unverifiable=options.allow_unverifiable)
        case MathTask():
            from nevergiveup.tasks.math import Math

            task = Math(options.data, options.test_data, allow_unverifiable=options.allow_unverifiable)
        case ManufactoriaTask():
            from nevergiveup.tasks.manufactoria import Manufactoria

            task = Manufactoria(options.ensemble, options.score, hidden=options.hidden)
        case OwnTask():
            from nevergiveup.tasks.own import Own

            task = Own(
                options.data,
                options.test_data,
                instruction=options.instruction,
                needs_answer=not options.reward or needs_correct(options.reward),
                allow_unverifiable=options.allow_unverifiable,
            )
        case ReasoningGymTask():
            from nevergiveup.tasks.gym import ReasoningGym

            task = ReasoningGym(
                options.dataset, options.size, settings.seed, json_object("task.options", options.options)
            )
        case VerifiersTask():
            from nevergiveup.tasks.environments import VerifiersEnvironment

            task = VerifiersEnvironment(options.environment, json_object("task.options", options.options))
        case CustomTask():
            from nevergiveup.tasks.own import load_task

            task = load_task(options.target)
    if options.reward:
        return WithReward(task, options.reward, options.max_reward, max_new_tokens=settings.sampling.max_new_tokens)
    return task


def _tiny_task(settings: Settings) -> Chains | ManufactoriaTiny:
    if isinstance(settings.task, ChainsTask):
        return Chains(settings.seed, settings.task.preset, settings.task.impossible)
    from nevergiveup.tasks.manufactoria_tiny import ManufactoriaTiny

    assert isinstance(settings.task, ManufactoriaTinyTask)
    return ManufactoriaTiny(settings.seed, settings.task.score)


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


def check(settings: Settings) -> Task:
    """Finds everything that can be known to be wrong before a model is loaded, the data included. Raises ValueError.

    Returns the task, with its data read.
    """
    settings.check()
    check_trackers(settings.trackers)
    probed_rates(settings)
    if isinstance(settings.task, TINY) and not settings.model.path:
        tiny = _tiny_task(settings)
        settings.check_context(tiny.context)
        settings.check_vocabulary(len(tiny.vocabulary))
    else:
        folder = model_folder(settings)
        if isinstance(folder, Path) and (context := model_context(folder)) is not None:
            settings.check_context(context)
        if isinstance(folder, Path) and (n_tokens := model_vocabulary(folder)) is not None:
            settings.check_vocabulary(n_tokens)
    task = make_task(settings)
    if not isinstance(settings.task, TINY):
        task.prompts("test")
        if not task.prompts("train"):
            raise ValueError(f"there are no training prompts in the task {settings.task.name}: choose other data")
    return task


def warm_start(settings: Settings, folder: Path, progress: Progress) -> None:
    """Makes the starting policy of a tiny task: a tiny Llama taught by the noisy teacher. Writes a model folder."""
    import torch
    from transformers.utils import logging

    from nevergiveup.models import fit_supervised, tiny_llama, word_tokenizer

    logging.disable_progress_bar()  # it would write over the view of the run
    torch.set_num_threads(1)  # a model this small gains nothing from more, and loses a lot beside a busy neighbour

    task: TinyTask = _tiny_task(settings)
    model = tiny_llama(
        len(task.vocabulary),
        bos_id=task.bos_id,
        eos_id=task.eos_id,
        pad_id=task.pad_id,
        max_positions=task.context,
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
    word_tokenizer(task.vocabulary).save_pretrained(folder)


def make_pool(settings: Settings) -> GraderPool:
    """Worker processes for checks; they start with the first one."""
    options = settings.grading
    return GraderPool(options.n_workers, options.timeout_s, options.memory_mb, preload=_preload(settings))


def _preload(settings: Settings) -> list[str]:
    """Modules that checks will need; of functions and tasks of the user's, too."""
    names = [term.name for term in parse_terms(settings.task.reward)] if settings.task.reward else []
    if isinstance(settings.task, CustomTask):
        names.append(settings.task.target)
    own = [name.partition(":")[0] for name in names if ":" in name and ".py:" not in name]
    return [*PRELOAD.get(settings.task.name, ()), *own]


def checker(settings: Settings, pool: GraderPool) -> Checker:
    """The pool; where a run is to be replayed, one check at a time, so that verdicts come in an order of their own making."""
    return _OneByOne(pool) if settings.runtime == "here" else pool


class _OneByOne:
    def __init__(self, pool: GraderPool) -> None:
        self._pool = pool

    async def check(self, check: Check) -> Grade:
        return self._pool.grade(check)


async def prepare(settings: Settings, task: Task, pool: GraderPool, progress: Progress) -> None:
    """Before a model is loaded: the worker processes start, answers that cannot be verified are left out, and the grader
    must pass its own test.

    Raises ValueError when too many answers are of no use, GraderBroken when the processes cannot start or a verdict that is
    known comes out wrong.
    """
    if _preload(settings):
        pool.start()
    inner = task.task if isinstance(task, WithReward) else task
    grader = TaskGrader(inner, pool)
    if isinstance(inner, Validated):
        await inner.validate(pool)
        for row in inner.excluded[:MOST_LISTED]:
            progress(f"left out: {row.where}: the answer {row.answer!r} cannot be verified ({row.reason})")
        if (n_more := len(inner.excluded) - MOST_LISTED) > 0:
            progress(f"left out: {n_more} more rows whose answers cannot be verified")
    if isinstance(inner, SelfTested):
        await check_canaries(grader, inner.canaries())


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


def load_data(task: Task, settings: Settings, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> Data:
    """Prompts of the run, encoded. What is too long for `task.max_prompt_tokens` or holds control tokens is left out, counted
    and told."""
    train = list(task.prompts("train"))
    heldout = list(task.prompts("heldout" if isinstance(task, Chains) else "test"))
    if settings.task.n_prompts is not None:
        train = Random(TRAIN_CHOICE).sample(train, min(settings.task.n_prompts, len(train)))
    n_heldout = settings.eval.n_prompts
    if n_heldout is not None:
        heldout = Random(EVAL_CHOICE).sample(heldout, min(n_heldout, len(heldout)))
    limit = settings.task.max_prompt_tokens
    return Data(
        task,
        encoded(train, tokenizer, limit, "training", progress),
        encoded(heldout, tokenizer, limit, "evaluation", progress),
    )


def probed_rates(settings: Settings) -> dict[str, float]:
    """Initial pass rates of the prompts in the files of eval.buckets. Raises ValueError for what is no such file."""
    rates: dict[str, float] = {}
    for name in filter(None, (part.strip() for part in settings.eval.buckets.split(","))):
        rates |= read_initial_rates(Path(name))
    return rates


def encoded(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int, name: str, progress: Progress
) -> list[Prompt]:
    """The prompts that can be used, with tokens; what is left out is counted and told."""
    from nevergiveup.encode import encode_prompts

    too_long: list[int] = []
    controlled: list[tuple[str, str]] = []

    def drop(prompt: Prompt, n_tokens: int, control: str) -> None:
        if control:
            controlled.append((prompt.id, control))
        else:
            too_long.append(n_tokens)

    kept = encode_prompts(prompts, tokenizer, max_prompt_tokens=limit, on_drop=drop)
    if too_long:
        progress(
            f"{len(too_long)} {name} prompts are longer than task.max_prompt_tokens = {limit} and are left out "
            f"(the longest has {max(too_long)})"
        )
    if controlled:
        progress(
            f"{len(controlled)} {name} prompts hold control tokens of the model in their text and are left out "
            f"(the first is {controlled[0][0]}, with {controlled[0][1]})"
        )
    return kept


def engine_of(
    settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> TorchEngine:
    """An engine in this process, over a model that is loaded, for measuring."""
    from nevergiveup.engines.torch import TorchEngine

    return TorchEngine(
        model,
        tokenizer=None if isinstance(settings.task, TINY) else tokenizer,
        temperature=temperature,
        max_new_tokens=settings.sampling.max_new_tokens,
        n_slots=settings.sampling.n_slots,
    )


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
        "decode_text": not isinstance(settings.task, TINY),
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
    if isinstance(settings.task, TINY):
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
    settings: Settings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    grader: Grader,
    seed: int,
) -> dict[str, tuple[int, int]]:
    """Prompt id -> (completions drawn and verified, right ones) on the held-out prompts, by the model as it is now.

    Right is what gets the best reward: all tests passed, where the reward is the share of tests.
    """
    import asyncio

    engine = engine_of(settings, model, tokenizer, settings.eval.temperature)
    seeds = completion_seeds(seed, len(data.heldout))

    async def count(prompt: Prompt, prompt_seed: int) -> tuple[int, int]:
        completions = await engine.sample(prompt, settings.eval.n, prompt_seed)
        grades = await grader.grade(prompt, completions)
        verified = [grade for grade in grades if not isinstance(grade, Unverified)]
        return len(verified), sum(reward_of(grade) == prompt.max_reward for grade in verified)

    counts = await asyncio.gather(*(count(p, s) for p, s in zip(data.heldout, seeds, strict=True)))
    await engine.close()
    return {prompt.id: pair for prompt, pair in zip(data.heldout, counts, strict=True)}
