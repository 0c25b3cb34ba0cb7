"""`ngu eval` and `ngu probe`: completions of one policy, drawn and graded as a run would, and what they are worth. Layer 4.

Both write JSON Lines, a header and then one row a completion, the completions of a prompt together:

    {"format": "nevergiveup samples 1", "model", "task", "split", "n", "temperature", "max_new_tokens", "seed", "purpose"}
    {"prompt", "i", "reward", "right", "finish", "n_tokens", "reason", "answer", "text", "parts"}

reward and right are null where the grader had no verdict. Killed at any moment, the same command goes on: whole prompts are
kept. Seeds follow from purpose, seed, prompt and i, so those of a probe are never those of an evaluation: buckets made of
samples that also serve as a baseline would show gains where there are none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from nevergiveup import build
from nevergiveup.checkpoints import model_in, write_json
from nevergiveup.config import changed, resolve, settings_to_json
from nevergiveup.evaluate import (
    BUCKETS,
    PROBE_FORMAT,
    Drawn,
    assign_buckets,
    bootstrap_interval,
    mean_pass_at_k,
    pass_at_k,
    read_probe,
    wilson_interval,
)
from nevergiveup.loop import TaskGrader, reward_of
from nevergiveup.settings import Settings
from nevergiveup.suggest import cost_table, suggest
from nevergiveup.train import read_settings
from nevergiveup.types import NO_ANSWER, Completion, Grade, Prompt, Score, Unverified

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "nevergiveup samples 1"
LONGEST_TEXT = 20_000
"""Characters of a completion that are written."""

MOST_LISTED = 10

Purpose = Literal["eval", "probe"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is drawn: n completions each of so many prompts (None: all) of a split. settings: with the model in model.path.
    chosen_by: names the choice of prompts; build.TRAIN_CHOICE and EVAL_CHOICE are those of a run."""

    settings: Settings
    purpose: Purpose
    split: str
    n_prompts: int | None
    n: int
    temperature: float
    chosen_by: str = "prompts"

    def check(self) -> None:
        if self.n < 1:
            raise ValueError(f"-n {self.n} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature} must be 0 (greedy) or more")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(
                f"-n {self.n} at --temperature 0 draws the same greedy completion {self.n} times: use -n 1, or a temperature "
                "above 0"
            )
        if self.n_prompts is not None and self.n_prompts < 1:
            raise ValueError(f"--prompts {self.n_prompts} must be at least 1")

    def header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.settings.model.path,
            "task": settings_to_json(self.settings)["task"],
            "split": self.split,
            "n": self.n,
            "temperature": self.temperature,
            "max_new_tokens": self.settings.sampling.max_new_tokens,
            "seed": self.settings.seed,
            "purpose": self.purpose,
            "chosen_by": self.chosen_by,
        }


Rows = dict[str, list[dict[str, Any]]]
"""Prompt id -> its rows, i = 0 to n-1."""


def draw(asked: Asked, out: Path, note: Callable[[str], None]) -> tuple[list[Prompt], Rows]:
    """The prompts, and a row for each completion: those in `out` already, and those that are drawn now, written as they come.

    Raises ValueError for bad input and for a file that holds other samples than these.
    """
    asked.check()
    settings = asked.settings
    task = build.check(settings)
    done = _read(out, asked)
    with build.make_pool(settings) as pool:
        asyncio.run(build.prepare(settings, task, pool, note))
        tokenizer = build.load_tokenizer(build.model_folder(settings))
        prompts = _prompts(asked, task, tokenizer, note)
        wanted = [prompt for prompt in prompts if prompt.id not in done]
        if len(wanted) < len(prompts):
            note(f"{len(prompts) - len(wanted)} of {len(prompts)} prompts are in {out} already")
        if wanted:
            _rewrite(out, asked, done)
            model = build.load_model(build.model_folder(settings), settings.model.engine_dtype)
            engine = build.engine_of(settings, model, tokenizer, asked.temperature)
            grader = TaskGrader(task, pool)
            asyncio.run(_draw(asked, wanted, engine, grader, out, done, note))
    return prompts, {prompt.id: done[prompt.id] for prompt in prompts}


async def _draw(
    asked: Asked,
    prompts: Sequence[Prompt],
    engine: Any,
    grader: TaskGrader,
    out: Path,
    done: Rows,
    note: Callable[[str], None],
) -> None:
    n_done = n_told = 0

    async def one(prompt: Prompt) -> None:
        nonlocal n_done, n_told
        async with free:
            completions = await engine.sample(prompt, asked.n, _seed(asked, prompt.id))
            grades = await grader.grade(prompt, completions)
        rows = [_row(prompt, i, *pair) for i, pair in enumerate(zip(completions, grades, strict=True))]
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        done[prompt.id] = rows
        n_done += 1
        if 10 * n_done // len(prompts) > n_told:
            n_told = 10 * n_done // len(prompts)
            note(f"{n_done} of {len(prompts)} prompts")

    # Enough requests for every slot, and not all at once: what was drawn is then written prompt by prompt.
    free = asyncio.Semaphore(max(2 * asked.settings.sampling.n_slots // asked.n, 2))
    with out.open("a", encoding="utf-8") as file:
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    tasks.create_task(one(prompt))
        finally:
            await engine.close()
            os.fsync(file.fileno())


def _row(prompt: Prompt, i: int, completion: Completion, grade: Grade) -> dict[str, Any]:
    reward = None if isinstance(grade, Unverified) else reward_of(grade)
    row: dict[str, Any] = {
        "prompt": prompt.id,
        "i": i,
        "reward": None if reward is None else float(reward),
        "right": None if reward is None else reward == prompt.max_reward,
        "finish": completion.finish,
        "n_tokens": len(completion.tokens),
        "reason": grade.reason.strip().rpartition("\n")[2] if isinstance(grade, Score | Unverified) else "",
        "answer": grade.answer if isinstance(grade, Score) else None,
        "text": completion.text[:LONGEST_TEXT],
    }
    if isinstance(grade, Score) and grade.parts:
        row["parts"] = dict(grade.parts)
    return row


def _seed(asked: Asked, prompt_id: str) -> int:
    key = f"{asked.purpose}/{asked.settings.seed}/{prompt_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def _prompts(asked: Asked, task: Any, tokenizer: Any, note: Callable[[str], None]) -> list[Prompt]:
    prompts = list(task.prompts(asked.split))
    if not prompts:
        raise ValueError(
            f"the task {asked.settings.task.name} has no prompts in its split {asked.split!r}: choose another --split"
        )
    if asked.n_prompts is not None:
        prompts = Random(asked.chosen_by).sample(prompts, min(asked.n_prompts, len(prompts)))
    return build.encoded(prompts, tokenizer, asked.settings.task.max_prompt_tokens, asked.split, note)


# ------------------------------------------------------------------------------------------------------- the file


def _read(path: Path, asked: Asked) -> Rows:
    """Whole prompts of an earlier attempt. A last line that was cut is left out."""
    if not path.exists():
        return {}
    lines = path.read_bytes().split(b"\n")[:-1]
    rows: Rows = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == 1:
                _check_header(path, row, asked.header())
            else:
                rows.setdefault(row["prompt"], []).append(row)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: no row of ngu {asked.purpose} ({error}); choose another --out"
            ) from error
    return {name: found for name, found in rows.items() if [row["i"] for row in found] == list(range(asked.n))}


def _check_header(path: Path, header: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    different = [key for key in wanted if header.get(key) != wanted[key]]
    if different:
        told = "; ".join(f"{key} {header.get(key)!r} there, {wanted[key]!r} now" for key in different)
        raise ValueError(f"{path} holds other samples: {told}. Choose another --out, or remove it")


def _rewrite(path: Path, asked: Asked, done: Rows) -> None:
    """The header and what is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asked.header()) + "\n")
        for rows in done.values():
            file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def drawn_of(rows: Sequence[Mapping[str, Any]]) -> Drawn:
    verified = [row for row in rows if row["right"] is not None]
    return Drawn(
        n=len(verified),
        right=sum(row["right"] for row in verified),
        reward=mean(row["reward"] for row in verified) if verified else 0.0,
        tokens=mean(row["n_tokens"] for row in rows),
        truncated=sum(row["finish"] == "length" for row in rows),
        no_answer=sum(row["reason"] == NO_ANSWER for row in rows),
        unverified=len(rows) - len(verified),
    )


# ------------------------------------------------------------------------------------------------------------ eval


def summarize(
    drawn: Mapping[str, Drawn], ks: Sequence[int], buckets: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Unbiased pass@k with 95 % intervals (bootstrap over prompts), over all prompts and by bucket.

    A prompt with fewer than k verified completions is left out of pass@k and counted. Prompts without a bucket count under
    "all" only.
    """
    groups: dict[str, list[Drawn]] = {"all": list(drawn.values())}
    for prompt_id, found in drawn.items():
        if buckets and prompt_id in buckets:
            groups.setdefault(buckets[prompt_id], []).append(found)
    return {name: _of_group(groups[name], ks) for name in (*BUCKETS, "all") if name in groups}


def _of_group(group: Sequence[Drawn], ks: Sequence[int]) -> dict[str, Any]:
    n_drawn = sum(d.n + d.unverified for d in group)
    scored = [d for d in group if d.n]
    figures: dict[str, Any] = {
        "prompts": len(group),
        "completions": n_drawn,
        "reward": mean(d.reward for d in scored) if scored else None,
        "truncated": sum(d.truncated for d in group) / n_drawn,
        "no_answer": sum(d.no_answer for d in group) / n_drawn,
        "unverified": sum(d.unverified for d in group) / n_drawn,
        "tokens": mean(d.tokens for d in group),
    }
    for k in ks:
        values = [pass_at_k(d.n, d.right, k) for d in group if d.n >= k]
        figures[f"pass@{k}"] = {
            "mean": mean(values) if values else None,
            "interval": bootstrap_interval(values) if values else None,
            "left_out": len(group) - len(values),
        }
    return figures


def eval_main(words: Sequence[str]) -> int:
    """`ngu eval`; returns the exit status. Raises ValueError for bad input."""
    from rich.console import Console

    parser = _parser("eval", "Evaluates a policy: unbiased pass@k with intervals, by difficulty if there is a probe.")
    parser.add_argument("-n", type=int, default=8, metavar="N", help="completions a prompt (default: 8)")
    parser.add_argument("-k", default="1", metavar="LIST", help="pass@k for these k, each at most N (default: 1)")
    parser.add_argument("--buckets", type=Path, metavar="PROBE", help="difficulty of the prompts, from `ngu probe`")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: eval.temperature; 0 is greedy")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/eval-TASK")
    options, rest = parser.parse_known_args(_model_first(words))
    ks = _ks(options.k, options.n)
    buckets = assign_buckets(rates_of(read_probe(options.buckets))) if options.buckets else None
    settings = _settings(options.model, options.recipe, options.config, rest)
    out: Path = options.out or Path("runs") / f"eval-{settings.task.name}"
    temperature = settings.eval.temperature if options.temperature is None else options.temperature
    asked = Asked(settings, "eval", options.split or _test_split(settings), options.prompts, options.n, temperature)
    console = Console()
    _, rows = draw(asked, out / "samples.jsonl", _noting(console))
    drawn = {prompt_id: drawn_of(found) for prompt_id, found in rows.items()}
    if buckets is not None and not set(buckets) & set(drawn):
        raise ValueError(f"{options.buckets} has none of the {len(drawn)} prompts: it is of another task or split")
    summary = summarize(drawn, ks, buckets)
    each = {
        prompt_id: {
            **asdict(d),
            "pass@1": [d.right / d.n if d.n else None, *(wilson_interval(d.right, d.n) if d.n else ())],
        }
        for prompt_id, d in drawn.items()
    }
    write_json(out / "summary.json", {**asked.header(), "figures": summary, "prompts": each})
    _print_eval(console, asked, summary, ks)
    console.print(f"completions: {out / 'samples.jsonl'}   figures: {out / 'summary.json'}", highlight=False)
    return 0


def _ks(text: str, n: int) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"-k {text} is no list of numbers: write 1,8,32") from None
    if ks[0] < 1:
        raise ValueError(f"-k {ks[0]} must be at least 1")
    if ks[-1] > n:
        raise ValueError(f"-k {ks[-1]} needs at least as many completions of each prompt as -n {n}: raise -n")
    return ks


def _print_eval(console: Console, asked: Asked, summary: Mapping[str, Any], ks: Sequence[int]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{asked.settings.model.path}, {asked.settings.task.name}, split {asked.split}",
        title_justify="left",
        box=None,
    )
    table.add_column("difficulty")
    table.add_column("prompts", justify="right")
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    table.add_column("mean reward", justify="right")
    for name, figures in summary.items():
        cells = []
        for k in ks:
            found = figures[f"pass@{k}"]
            interval = "" if found["interval"] is None else " {:.3f}-{:.3f}".format(*found["interval"])
            cells.append("" if found["mean"] is None else f"{found['mean']:.3f}{interval}")
        reward = "" if figures["reward"] is None else f"{figures['reward']:.3f}"
        table.add_row(name.replace("_", " "), f"{figures['prompts']:,}", *cells, reward)
    console.print(table)
    everything = summary["all"]
    console.print(
        f"{everything['completions']:,} completions, {everything['tokens']:.0f} tokens each in the mean; "
        f"{everything['truncated']:.1%} cut by the length limit, {everything['no_answer']:.1%} without answer, "
        f"{everything['unverified']:.1%} without verdict",
        highlight=False,
    )
    for k in ks:
        if left_out := everything[f"pass@{k}"]["left_out"]:
            console.print(f"{left_out} prompts have fewer than {k} verified completions and are left out of pass@{k}")


# ----------------------------------------------------------------------------------------------------------- probe


def rates_of(drawn: Mapping[str, Drawn]) -> dict[str, float]:
    """Pass rates of the prompts that have verified completions."""
    return {prompt_id: d.right / d.n for prompt_id, d in drawn.items() if d.n}


@dataclass(frozen=True, slots=True)
class Suspect:
    """A prompt whose gold answer should be looked at, and why."""

    prompt: str
    gold: str
    why: str


def suspects(prompts: Sequence[Prompt], rows: Rows) -> list[Suspect]:
    """Prompts never solved on which most completions agree on one other answer, or that hardly any completion answers."""
    found = []
    for prompt in prompts:
        mine = rows[prompt.id]
        gold = str(getattr(prompt.answer, "text", prompt.answer))[:60]
        answers = Counter(row["answer"] for row in mine if row["answer"] is not None)
        n_unverified = sum(row["right"] is None for row in mine)
        if 2 * n_unverified > len(mine):
            found.append(Suspect(prompt.id, gold, f"{n_unverified} of {len(mine)} completions got no verdict"))
        elif not any(row["right"] for row in mine) and answers:
            answer, n = answers.most_common(1)[0]
            if n >= 4 and 2 * n > len(mine):
                found.append(
                    Suspect(prompt.id, gold, f"never right, and {n} of {len(mine)} completions say {answer[:60]}")
                )
    return found


def probe(
    asked: Asked, samples: Path, out: Path, note: Callable[[str], None]
) -> tuple[list[Prompt], Rows, dict[str, Drawn]]:
    """Draws, and writes the probe file at `out`."""
    prompts, rows = draw(asked, samples, note)
    drawn = {prompt_id: drawn_of(found) for prompt_id, found in rows.items()}
    header = {key: value for key, value in asked.header().items() if key not in ("format", "purpose", "chosen_by")}
    write_json(
        out,
        {
            "format": PROBE_FORMAT,
            **header,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "prompts": {prompt_id: asdict(d) for prompt_id, d in drawn.items()},
            "buckets": assign_buckets(rates_of(drawn)),
        },
    )
    return prompts, rows, drawn


def probe_main(words: Sequence[str]) -> int:
    """`ngu probe`; returns the exit status. Raises ValueError for bad input."""
    from rich.console import Console

    parser = _parser("probe", "Tells what a policy makes of a data set, before anything is spent on training.")
    parser.add_argument("-n", type=int, default=32, metavar="N", help="completions a prompt (default: 32)")
    parser.add_argument("--out", type=Path, default=Path("probe.json"), metavar="FILE", help="default: probe.json")
    options, rest = parser.parse_known_args(_model_first(words))
    if options.n < 4:
        raise ValueError(f"-n {options.n} tells nothing about groups: use at least 4, better 32")
    settings = _settings(options.model, options.recipe, options.config, rest)
    asked = Asked(
        settings, "probe", options.split or "train", options.prompts, options.n, settings.sampling.temperature
    )
    console = Console()
    prompts, rows, drawn = probe(asked, options.out.with_suffix(".jsonl"), options.out, _noting(console))
    for line in in_words(drawn, suspects(prompts, rows)):
        console.print(line, highlight=False, markup=False)
    console.print(f"probe: {options.out}   completions: {options.out.with_suffix('.jsonl')}", highlight=False)
    return 0


def in_words(drawn: Mapping[str, Drawn], suspicious: Sequence[Suspect] = ()) -> Iterator[str]:
    """What the command prints, line by line."""
    usable = [d for d in drawn.values() if d.n]
    if not usable:
        yield "no completion got a verdict: look at the reasons in the file of completions"
        return
    n = min(d.n for d in usable)
    yield f"pass rates of {len(usable):,} prompts, {n} completions each"
    rates = [d.right / d.n for d in usable]
    edges = [0.0, 1e-9, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0 - 1e-9]
    labels = ["never", "to .02", ".02-.1", ".1-.3", ".3-.5", ".5-.7", ".7-.9", ".9-1", "always"]
    for i, label in enumerate(labels):
        upper = edges[i + 1] if i + 1 < len(edges) else float("inf")
        count = sum(edges[i] <= rate < upper for rate in rates)
        low, high = wilson_interval(count, len(rates))
        bar = "#" * round(40 * count / len(rates))
        yield f"  {label:>7} {count:6,} {count / len(rates):6.1%} ({low:.1%} to {high:.1%})  {bar}"
    ceiling, _ = mean_pass_at_k([(d.n, d.right) for d in usable], n)
    yield f"pass@1 {mean(rates):.3f}; pass@{n} {ceiling:.3f}: prompts solved at least once, about what there is to reinforce"
    if n_never := sum(d.right == 0 for d in usable):
        most = wilson_interval(0, n)[1]
        yield f"{n_never:,} prompts were never right in {n}: a pass rate of up to {most:.1%} may look like that"
    n_drawn = sum(d.n + d.unverified for d in drawn.values())
    yield (
        f"length {mean(d.tokens for d in usable):.0f} tokens in the mean; "
        f"{sum(d.truncated for d in usable) / n_drawn:.1%} cut, "
        f"{sum(d.no_answer for d in usable) / n_drawn:.1%} without answer, "
        f"{sum(d.unverified for d in drawn.values()) / n_drawn:.1%} without verdict"
    )
    yield "groups with signal, and completions for each of them:"
    for k, signal, cost in cost_table(usable):
        yield f"  K = {k:<3} {signal:6.1%}   {'-' if cost is None else f'{cost:,.1f}'}"
    for key, value, why in suggest(usable):
        yield f"suggested: {key} = {value}: {why}"
    if suspicious:
        yield f"{len(suspicious)} gold answers to look at:"
        for suspect in suspicious[:MOST_LISTED]:
            yield f"  {suspect.prompt}: gold {suspect.gold!r}; {suspect.why}"
        if len(suspicious) > MOST_LISTED:
            yield f"  and {len(suspicious) - MOST_LISTED} more"


# --------------------------------------------------------------------------------------------------------- common


def _parser(command: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"ngu {command}",
        allow_abbrev=False,
        description=f"{what} Every setting of ngu train can be given, too: --task NAME, --task.data FILE, ...",
    )
    parser.add_argument(
        "model", help="a Hugging Face name, a folder, smollm2, or the folder of a run (its task is taken over)"
    )
    parser.add_argument("--recipe", help="start from the settings of a recipe")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file, as for ngu train")
    parser.add_argument("--split", help="of the task: train or test")
    parser.add_argument("--prompts", type=int, metavar="N", help="so many prompts, chosen at random (default: all)")
    return parser


def _model_first(words: Sequence[str]) -> list[str]:
    """Else the value of a setting would pass for the model. Raises ValueError."""
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise ValueError(
            f"the model comes first, then {words[0]}: a Hugging Face name, a folder, or the folder of a run"
        )
    return list(words)


def _settings(model: str, recipe: str | None, config: Path | None, words: Sequence[str]) -> Settings:
    """Of the run that the model is from, where it is one; else of the recipe; with file and flags on top."""
    run, folder = model_in(Path(model))
    if run is None or recipe is not None or config is not None:
        return resolve(recipe, config, [*words, f"--model.path={folder if run else model}"])
    settings = changed(read_settings(run), words)
    return replace(settings, model=replace(settings.model, path=str(folder)))


def _test_split(settings: Settings) -> str:
    return "heldout" if settings.task.name == "chains" else "test"


def _noting(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False)
