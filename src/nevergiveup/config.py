"""From a recipe, a TOML file and flags to one checked `Settings`. A flag beats the file, the file beats the recipe.

Layer 4. Loads neither torch nor transformers, so bad input fails in a fraction of a second. Wherever a value comes from, it
passes the same gates: the key exists, the value has its type, the strategy accepts it, the settings fit together. What fails
is one `ConfigError` that says where it was written, key, value and remedy.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nevergiveup.objectives import LOSSES
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import Settings
from nevergiveup.strategies import STRATEGIES, AnyStrategy
from nevergiveup.task_settings import TASKS, CustomTask

COMMAND_LINE = "command line"

CHOICES: Mapping[str, Mapping[str, type[Any]]] = {"task": TASKS, "strategy": STRATEGIES, "loss": LOSSES}
"""Sections that are chosen by name, and what there is to choose from: each has keys of its own."""

KEPT_KEYS = ("strategy.k", "strategy.window")
"""What stays when another one of its section is chosen; all other fields of a choice start from their defaults."""

NAMES_ELSEWHERE: Mapping[str, str] = {
    "p_ngu": "strategy.p",
    "K": "strategy.k",
    "group_size": "strategy.k",
    "num_generations": "strategy.k",
    "n_samples": "strategy.k",
    "T": "strategy.window",
    "async_steps": "strategy.window",
    "max_staleness": "strategy.window",
    "N": "batch.n_groups",
    "n_prompts_per_batch": "batch.n_groups",
    "batch_size": "batch.n_groups",
    "learning_rate": "learner.lr",
    "scale_rewards": "strategy.divide_by",
    "std": "strategy.divide_by",
    "loss_type": "loss",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "clip_range": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "eps_clip": "loss.clip_low",
    "eps_clip_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "clip_ratio_c": "loss.dual_clip",
    "importance_sampling_cap": "loss.cap",
    "tis_imp_ratio_cap": "loss.cap",
    "loss_agg_mode": "learner.normalize",
    "beta": "learner.kl_beta",
    "kl": "learner.kl_beta",
    "kl_coef": "learner.kl_beta",
    "kl_loss_coef": "learner.kl_beta",
    "overlong_buffer_len": "sampling.overlong_buffer",
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "dataset": "task.data",
    "dataset_name": "task.data",
    "train_files": "task.data",
    "val_files": "task.test_data",
    "reward_funcs": "task.reward",
    "custom_reward_function": "task.reward",
    "model_name_or_path": "model.path",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
}
"""What papers and other trainers call a key -> its name here. Refused all the same: one name for one thing."""

_CUT_DISTRIBUTION = (
    "the learner computes probabilities over the whole vocabulary, and sampler and learner must have the same distribution: "
    "leave it out, use sampling.temperature"
)

NOT_OFFERED: Mapping[str, str] = {
    "top_p": _CUT_DISTRIBUTION,
    "top_k": _CUT_DISTRIBUTION,
    "min_p": _CUT_DISTRIBUTION,
    "repetition_penalty": _CUT_DISTRIBUTION,
    "requeue": 'strategy "ngu" asks failed prompts again, with probability strategy.p: choose it with strategy = "ngu"',
    "filter": 'strategies like "ngu" and "dapo" drop groups without contrast, "fixed" keeps them: set strategy',
    "recipe": "the recipe stands on the command line: ngu train RECIPE --config FILE",
}
"""Keys of other trainers that have no counterpart here -> why, and what to do."""

ACCEPT = "--accept-changes"
"""The flag of a resume that takes other settings, or other data, as they are now."""


class ConfigError(ValueError):
    """Bad input. The message is one clear sentence for the person who wrote it."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was written, and where."""

    value: object
    where: str


_Layer: TypeAlias = dict[str, _Given]
"""Dotted key -> value. Keys are not checked yet."""


# ------------------------------------------------------------------------ public


def resolve(recipe: str | None, toml: Path | None = None, flags: Sequence[str] = ()) -> Settings:
    """The settings of a run. flags: command-line words such as `["--strategy", "dapo", "--learner.lr", "1e-6"]`.

    recipe: None stands for the default of every field, which the help page shows.
    Raises ConfigError.
    """
    if recipe is not None and recipe not in RECIPES:
        near = get_close_matches(recipe, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"
        raise ConfigError(f'there is no recipe "{recipe}": {hint}')
    layers = [] if toml is None else [_read_toml(toml)]
    base = Settings() if recipe is None else RECIPES[recipe].settings
    return _merge(base, [*layers, _read_flags(flags)])


def changed(settings: Settings, flags: Sequence[str], toml: Path | None = None) -> Settings:
    """Settings with a TOML file, and command-line words on top of that. Raises ConfigError."""
    return _merge(settings, [*([] if toml is None else [_read_toml(toml)]), _read_flags(flags)])


def strategies_named(text: str) -> dict[str, AnyStrategy]:
    """Strategies of a list such as `fixed,ngu,ngu:p=0.75:k=8`, by what stands there. Raises ConfigError."""
    found: dict[str, AnyStrategy] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, *options = item.split(":")
        words = ["--strategy", name]
        for option in options:
            key, equals, value = option.partition("=")
            if not equals:
                raise ConfigError(f'"{option}" in the strategy "{item}" is no option: write {name}:k=8, for example')
            words += [f"--strategy.{key.strip()}", value.strip()]
        found[item] = _merge(Settings(), [_read_flags(words)], check=False).strategy
    if not found:
        raise ConfigError(f'"{text}" names no strategy: write fixed,ngu, for example')
    return found


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Plain values by section; task, strategy and loss carry their names."""
    row = asdict(settings)
    for section in CHOICES:
        row[section] = {"name": getattr(settings, section).name, **row[section]}
    return row


def settings_from_json(row: Mapping[str, Any]) -> Settings:
    """The inverse of `settings_to_json`. A key that is missing takes its default.

    Raises ConfigError for an unknown key and a value that does not fit.
    """
    return _merge(Settings(), [{key: _Given(value, "saved settings") for key, value in _flatten(row)}], check=False)


def differences(was: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its two values, for every key whose values differ; None where one of them has no such key."""
    a, b = (dict(_flatten(settings_to_json(settings))) for settings in (was, now))
    return {key: (a.get(key), b.get(key)) for key in (*a, *(b.keys() - a.keys())) if a.get(key) != b.get(key)}


def model_context(folder: str | Path) -> int | None:
    """Most tokens that a Hugging Face model folder says it can take; None when it does not say, or is no such folder.

    Reads config.json alone. Raises ConfigError when that is not JSON.
    """
    return _of_model(folder, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


def model_vocabulary(folder: str | Path) -> int | None:
    """Token ids that a Hugging Face model folder says it has; None and ConfigError as in `model_context`."""
    return _of_model(folder, "vocab_size")


def _of_model(folder: str | Path, *keys: str) -> int | None:
    """The first of these numbers that the model folder's config.json has."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: it holds no JSON object")
    text_config = config.get("text_config")  # of models that also see or hear
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in keys:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


# ----------------------------------------------------------------------- sources


def _read_toml(path: Path) -> _Layer:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: save it as such") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    lines = _lines_of_keys(text)
    return {key: _Given(value, f"{path}, line {lines[key]}") for key, value in _flatten(table)}


def _lines_of_keys(text: str) -> dict[str, int]:
    """Dotted key -> line on which it is set, counted from 1. The text must be valid TOML.

    In valid TOML, the fewest lines from the start of a statement that are valid by themselves are that statement; below its
    section header it gives the key. (The parts of a multi-line value are not valid: its key gets the line on which it starts.)
    """
    lines: dict[str, int] = {}
    header, start, statement = "", 1, ""
    for n, row in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        statement += row + "\n"
        if n > start and not any(end in row for end in ("]", "}", '"""', "'''")):
            continue  # a multi-line value does not end here: parsing it after every row would take its length squared
        if statement.lstrip(" \t").startswith("["):
            header, statement = statement, ""
        try:
            table = tomllib.loads(header + statement)
        except tomllib.TOMLDecodeError:
            continue
        for key, _ in _flatten(table):
            lines.setdefault(key, start)
        start, statement = n + 1, ""
    return lines


def _read_flags(words: Sequence[str]) -> _Layer:
    """`--key value`, `--key=value`, and `--key` or `--section.no-key` for true and false. The last one of a key counts."""
    switches = {key for key, hint in _ALL_TYPES if hint is bool}
    layer: _Layer = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f'{COMMAND_LINE}: "{word}" belongs to no flag: settings are written --section.key value, and a recipe comes '
                "first"
            )
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        switched_off = key.replace(".no_", ".")
        value: object = text
        if not equals and key in switches:
            value = True
        elif not equals and switched_off in switches:
            key, value = switched_off, False
        elif not equals:
            if key in _KEYS and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"{COMMAND_LINE}: --{name} needs a value")
            value = rest.pop(0) if rest else ""
        layer[key] = _Given(value, COMMAND_LINE)
    return layer


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping) and (value or key in _SECTIONS):
            yield from _flatten(value, f"{key}.")
        else:  # an empty section of a wrong name, too: it must not pass unseen
            yield key, value


# ------------------------------------------------------------------------- gates


def _merge(base: Settings, layers: Iterable[_Layer], *, check: bool = True) -> Settings:
    """Applies the layers in order; only the outcome has to fit together."""
    chosen: dict[str, Any] = {section: getattr(base, section) for section in CHOICES}
    given: _Layer = {}
    for layer in layers:
        for section in CHOICES:
            item = layer.get(f"{section}.name") or layer.get(section)
            if item is None:
                continue
            name, after_colon = _name_of(section, item)
            if name != chosen[section].name:
                chosen[section] = _another(section, name, chosen[section])
                kept = [key for key in KEPT_KEYS if key in _keys_of(section, name)]
                given = {key: item for key, item in given.items() if key in kept or not key.startswith(f"{section}.")}
            given |= {key: _Given(value, item.where) for key, value in after_colon.items()}
        names = {section: choice.name for section, choice in chosen.items()}
        types = _types(names)
        for key, item in layer.items():
            if key.removesuffix(".name") in CHOICES:
                continue
            if key not in types:
                raise _refusal(key, item, names)
            given[key] = _Given(_converted(key, item, types[key]), item.where)
    try:
        settings = _built(replace(base, **chosen), given)
        if check:
            settings.check()
    except ValueError as error:
        raise ConfigError(_placed(str(error), given)) from None
    return settings


def _built(base: Settings, given: _Layer) -> Settings:
    changes: dict[str, Any] = {}
    by_section: dict[str, dict[str, Any]] = {}
    for key, item in given.items():
        section, dot, name = key.partition(".")
        if dot:
            by_section.setdefault(section, {})[name] = item.value
        else:
            changes[section] = item.value
    for section, values in by_section.items():
        try:
            changes[section] = replace(getattr(base, section), **values)
        except ValueError as error:  # strategies and losses check themselves; their messages start with the field
            raise ValueError(f"{section}.{error}") from None
    return replace(base, **changes)


def _name_of(section: str, item: _Given) -> tuple[str, dict[str, str]]:
    """The name of a choice, and the value of the field that stood behind a colon, as in reasoning-gym:chain_sum."""
    variants = CHOICES[section]
    if isinstance(item.value, str):
        name, colon, rest = item.value.partition(":")
        if not colon and name in variants:
            return name, {}
        field = getattr(variants.get(name), "after_colon", "")
        if rest and field:
            return name, {f"{section}.{field}": rest}
        if rest and section == "task":
            return CustomTask.name, {f"{section}.{CustomTask.after_colon}": item.value}
    near = get_close_matches(str(item.value), variants, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(variants)}"
    raise ConfigError(f"{item.where}: {section} = {_shown(item.value)} is no {section}: {hint}")


def _another(section: str, name: str, old: Any) -> Any:
    """The choice of that name, with its defaults and what it keeps from the old one."""
    keys = _keys_of(section, name) & _keys_of(section, old.name) & set(KEPT_KEYS)
    return CHOICES[section][name](**{key.partition(".")[2]: getattr(old, key.partition(".")[2]) for key in keys})


def _keys_of(section: str, name: str) -> set[str]:
    return {f"{section}.{field.name}" for field in fields(CHOICES[section][name])}


def _types(names: Mapping[str, str]) -> dict[str, Any]:
    """Dotted key -> type of its value, with the keys of the choices of these names."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(Settings).items():
        section = CHOICES[name][names[name]] if name in CHOICES else hint
        if is_dataclass(section):
            hints = get_type_hints(section)
            types |= {f"{name}.{field.name}": hints[field.name] for field in fields(section)}
        else:
            types[name] = hint
    return types


_FIRST = {section: next(iter(variants)) for section, variants in CHOICES.items()}

_ALL_TYPES = [
    pair
    for section, variants in CHOICES.items()
    for name in variants
    for pair in _types({**_FIRST, section: name}).items()
]
"""Keys of all choices with their types; most of them several times."""

_KEYS = tuple(
    dict.fromkeys([*(f"{s}{end}" for s in CHOICES for end in ("", ".name")), *(key for key, _ in _ALL_TYPES)])
)

_SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in _KEYS if "." in key))


def _converted(key: str, item: _Given, hint: Any) -> object:
    """The value in its type. Text of a number is taken as that number; true is no number, 2.5 no count."""
    value = item.value
    options = get_args(hint) if get_origin(hint) is not Literal else ()
    if NoneType in options and isinstance(value, str) and value.lower() == "none":
        return None  # TOML has no other way to say it
    try:
        if isinstance(value, bool) != (hint is bool) and not isinstance(value, str):
            raise TypeError
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except (ValidationError, TypeError):
        raise ConfigError(f"{item.where}: {key} = {_shown(value)} must be {_expected(hint)}") from None


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if options := get_args(hint):
        return " or ".join(_expected(option) for option in options)
    return {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
        NoneType: '"none"',
    }[hint]


def _placed(message: str, given: _Layer) -> str:
    """The message of a check, with the place at which the first of the keys that it names was set by the user."""
    for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        if key in given:
            return f"{given[key].where}: {message}"
    return message


# ---------------------------------------------------------------------- messages


def _refusal(key: str, item: _Given, chosen: Mapping[str, str]) -> ConfigError:
    """Why a key that this run does not have is refused. chosen: section -> name."""
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    is_flag = item.where == COMMAND_LINE
    start = f"{item.where}: {key} = {_shown(item.value)}"
    if key in _SECTIONS:
        names = ", ".join(known.partition(".")[2] for known in _KEYS if known.startswith(f"{key}."))
        example = f"--{key}.KEY VALUE" if is_flag else f"[{key}] and below it KEY = VALUE"
        return ConfigError(f"{start}: {key} is a section: write {example}, where KEY is one of {names}")
    if owners := [owner for owner in CHOICES.get(section, ()) if key in _keys_of(section, owner)]:
        choose = f"--{section} {owners[0]}" if is_flag else f'{section}.name = "{owners[0]}"'
        names = " and ".join(", ".join(f'"{owner}"' for owner in owners).rsplit(", ", 1))
        has = f'this run has "{chosen[section]}"'
        return ConfigError(f"{start} belongs to {section} {names}, but {has}: set {choose}, or leave {name} out")
    what = f"there is no flag --{key}" if is_flag else f'there is no key "{key}"'
    for spelling in (name, name.lower()):
        if spelling in NOT_OFFERED:
            return ConfigError(f"{item.where}: {what}: {NOT_OFFERED[spelling]}")
    target, alias = _nearest(key)
    if not target:
        return ConfigError(f"{item.where}: {what}: `ngu train --help` lists them all")
    spelled = f"--{target.replace('_', '-')}" if is_flag else target
    if not is_flag and section in _SECTIONS and "." not in target:
        spelled += ", above the first section"
    return ConfigError(f"{item.where}: {what}: did you mean {spelled}{f' ({alias})' if alias else ''}?")


def _nearest(key: str) -> tuple[str, str]:
    """(the right key, the name elsewhere that led to it or ""); ("", "") when nothing is near."""
    section, name = key.rpartition(".")[::2]
    name = name.replace("-", "_")
    for spelling in (name, name.lower()):
        if spelling in NAMES_ELSEWHERE:
            return NAMES_ELSEWHERE[spelling], spelling
    scored: list[tuple[float, str, str]] = []
    for target in _KEYS:
        target_section, target_name = target.rpartition(".")[::2]
        score = _likeness(name, target_name) + 0.1 * _likeness(section, target_section)
        scored.append((max(score, _likeness(key, target)) if "." not in key else score, target, ""))
    scored += [(_likeness(name, alias), target, alias) for alias, target in NAMES_ELSEWHERE.items() if len(alias) > 1]
    score, target, alias = max(scored)
    return (target, alias) if score >= 0.65 else ("", "")


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _shown(value: object) -> str:
    """A value nearly as TOML writes it."""
    return json.dumps(value, default=str, ensure_ascii=False)
