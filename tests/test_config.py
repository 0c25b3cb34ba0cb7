"""Settings from recipe, file and flags: who wins, what is refused, and where a message points."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from nevergiveup.config import (
    CHOICES,
    NAMES_ELSEWHERE,
    NOT_OFFERED,
    ConfigError,
    model_context,
    resolve,
    settings_from_json,
    settings_to_json,
)
from nevergiveup.objectives import LOSSES, Cispo, Clipped, Gspo
from nevergiveup.recipes import RECIPES
from nevergiveup.settings import EvalSettings, LearnerSettings, Settings
from nevergiveup.strategies import STRATEGIES, DynamicSampling, FixedK, NeverGiveUp
from nevergiveup.task_settings import TASKS, CustomTask, Gsm8kTask, OwnTask, ReasoningGymTask

RECIPE = "gsm8k-smollm2"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str | None, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(RECIPE, None if text is None else write(folder, text), flags)
    return str(caught.value)


# ------------------------------------------------------------------ who wins


def test_flag_beats_file_beats_recipe(tmp_path: Path) -> None:
    toml = write(tmp_path, "seed = 7\n[learner]\nlr = 3e-6\n[loss]\nclip_high = 0.28\n")
    settings = resolve(RECIPE, toml, ["--learner.lr", "5e-6"])
    assert settings.learner.lr == 5e-6
    assert settings.loss == Clipped(clip_high=0.28)
    assert settings.seed == 7
    assert settings.sampling == RECIPES[RECIPE].settings.sampling


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_together(name: str) -> None:
    assert resolve(name) == RECIPES[name].settings
    assert RECIPES[name].name == name


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ('strategy = "fixed"', FixedK(k=4, window=4)),
        ('[strategy]\nname = "dapo"\ndivide_by = "nothing"', DynamicSampling(k=4, divide_by="nothing", window=4)),
        ('strategy = { name = "ngu", p = 0.5 }', NeverGiveUp(k=4, p=0.5, window=4)),
        ("strategy.k = 8\nstrategy.max_attempts = 3", NeverGiveUp(k=8, p=0.9, window=4, max_attempts=3)),
        ("[strategy]\nwindow = 0", NeverGiveUp(k=4, p=0.9, window=0)),
        ('[strategy]\nwindow = "none"', NeverGiveUp(k=4, p=0.9, window=None)),
        ("[strategy]\np = 1.0\nmax_attempts = 5", NeverGiveUp(k=4, p=1.0, window=4, max_attempts=5)),
    ],
)
def test_strategy_from_a_file(tmp_path: Path, text: str, strategy: object) -> None:
    assert resolve(RECIPE, write(tmp_path, text)).strategy == strategy


def test_another_strategy_keeps_k_and_window_and_nothing_else(tmp_path: Path) -> None:
    toml = write(tmp_path, "[strategy]\nk = 8\np = 0.5\nwindow = 2\nmax_attempts = 3")
    assert resolve(RECIPE, toml, ["--strategy", "fixed"]).strategy == FixedK(k=8, window=2)
    assert resolve(RECIPE, toml, ["--strategy=ngu"]).strategy == NeverGiveUp(k=8, p=0.5, window=2, max_attempts=3)


def test_the_file_may_be_wrong_where_a_flag_sets_it_right(tmp_path: Path) -> None:
    toml = write(tmp_path, "[strategy]\np = 1.0")
    assert resolve(RECIPE, toml, ["--strategy.p", "0.75"]).strategy == NeverGiveUp(k=4, p=0.75, window=4)


@pytest.mark.parametrize(
    "flags",
    [
        ["--learner.lr", "1e-6", "--steps", "2"],
        ["--learner.lr=2e-6", "--sampling.max-new-tokens", "64", "--batch.retry_order", "front"],
        ["--eval.temperature", "0", "--eval.n=1", "--strategy.window", "0"],
        ["--task.data", "rows of mine.jsonl", "--max-completions", "1000", "--max-completions", "2000"],
    ],
)
def test_flags_mean_what_the_help_page_says(flags: list[str]) -> None:
    """The help page is made by tyro from the same fields: it must describe what is accepted here."""
    default = RECIPES[RECIPE].settings
    assert resolve(RECIPE, None, flags) == tyro.cli(
        Settings, default=default, args=flags, config=(tyro.conf.AvoidSubcommands,)
    )


def test_switches(tmp_path: Path) -> None:
    assert resolve(RECIPE, None, ["--strategy", "ngu", "--strategy.no-virtual-max"]).strategy == NeverGiveUp(p=0.9)
    assert resolve(RECIPE, None, ["--strategy.leave-one-out", "--strategy", "fixed"]).strategy == FixedK(
        leave_one_out=True
    )


# ------------------------------------------------------------------- refused

DEFECTS = [  # table of cases.md C38: text of the file, line, what the message must hold
    ("[strategy]\nk = 1", 2, ["strategy.k = 1", "use 2 or more"]),
    ("[strategy]\np = 1.0", 2, ["strategy.p = 1.0", "never gives up", "unbounded", "max_attempts"]),
    ("[strategy]\np = 1.2", 2, ["strategy.p = 1.2", "give a number from 0"]),
    ("[strategy]\nwindow = -1", 2, ["strategy.window = -1", "must be 0 or more"]),
    ("[strategy]\n# a typo\np_nug = 0.9", 3, ['"strategy.p_nug"', "did you mean strategy.p (p_ngu)?"]),
    ('[strategy]\nname = "fixed"\np = 0.9', 3, ["strategy.p = 0.9", 'this run has "fixed"', 'name = "ngu"']),
    ("[eval]\nn = 4\nk = 8", 3, ["eval.k = 8", "eval.n = 4", "raise eval.n"]),
    ("[eval]\ntemperature = 0\nn = 8", 3, ["eval.n = 8", "eval.temperature = 0", "set eval.n = 1"]),
    ('[learner]\n\nlr = "fast"', 3, ['learner.lr = "fast"', "must be a finite number"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), DEFECTS)
def test_defects_are_refused_with_file_line_key_value_and_remedy(
    tmp_path: Path, text: str, line: int, parts: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert f"run.toml, line {line}: " in message
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--strategy.k", "1"], ["strategy.k = 1", "use 2 or more"]),
        (["--strategy.p=1.0"], ["strategy.p = 1.0", "never gives up"]),
        (["--strategy.window", "-1"], ["strategy.window = -1"]),
        (["--p_nug", "0.9"], ["no flag --p_nug", "did you mean --strategy.p (p_ngu)?"]),
        (["--p_ngu", "0.9"], ["did you mean --strategy.p (p_ngu)?"]),
        (["--sampling.max-tokens", "9"], ["did you mean --sampling.max-new-tokens (max_tokens)?"]),
        (
            ["--strategy", "fixed", "--strategy.p", ".9"],
            ["strategy.p", 'belongs to strategy "ngu", but this run has "fixed"', "--strategy ngu", "leave p out"],
        ),
        (["--strategy", "speed", "--strategy.max-attempts", "2"], ['"ngu", but this run has "speed"']),
        (["--strategy.k-max", "9"], ['strategy "ada-online" and "knapsack", but', "--strategy ada-online"]),
        (["--strategy", "fixd"], ['"fixd"', "did you mean fixed?"]),
        (["--learner.lr"], ["--learner.lr needs a value"]),
        (["--learner.lr", "--steps", "2"], ["--learner.lr needs a value"]),
        (["--steps", "2.5"], ['steps = "2.5"', "whole number"]),
        (["--learner.lr", "nan"], ["learner.lr", "finite number"]),
        (["--max-completions", "3"], ["max_completions = 3", "the 4 that strategy", "raise it"]),
        (["--steps", "none"], ["the run has no end"]),
        (["--strategy", "no-positive", "--strategy.threshold", "1.5"], ["strategy.threshold = 1.5", "0.875"]),
        (["--strategy", "reinforce-ada", "--strategy.keep", "1"], ["strategy.keep = 1", "at least 2"]),
        (["--strategy", "knapsack", "--strategy.budget", "1"], ["strategy.budget = 1", "k_min = 2"]),
        (["--strategy", "ada-online", "--strategy.discount", "0"], ["strategy.discount = 0.0", "above 0"]),
        (["--strategy", "gvm-raft", "--strategy.power", "0"], ["strategy.power = 0.0", "at least 1"]),
        (
            ["--strategy", "speed", "--strategy.k", "4"],
            ['"ngu", "fixed", "dapo" and "no-positive", but this run has "speed"'],
        ),
        (
            ["--strategy", "fixed", "--strategy.leave-one-out", "--strategy.divide-by", "std"],
            ["strategy.leave_one_out"],
        ),
        (["--strategy.gamma", "-1"], ["strategy.gamma = -1.0", "F-GRPO"]),
        (["--loss", "cispoo"], ['"cispoo"', "did you mean cispo?"]),
        (["--loss", "ppo"], ['"ppo" is no loss: there are grpo, reinforce, cispo, gspo']),
        (["--strategy", "grpo"], ['"grpo" is no strategy: there are ngu, fixed, dapo']),
        (["--clip_ratio_high", "0.28"], ["did you mean --loss.clip-high (clip_ratio_high)?"]),
        (["--loss-type", "cispo"], ["did you mean --loss (loss_type)?"]),
        (["--loss.clip-low", "0"], ["loss.clip_low = 0.0", "above 0"]),
        (["--loss.dual-clip", "1"], ["loss.dual_clip = 1.0", "usually 3"]),
        (["--loss", "reinforce", "--loss.cap", "0"], ["loss.cap = 0.0", "usually 2"]),
        (["--loss", "reinforce", "--loss.clip-high", "1"], ["loss.clip_high", '"grpo"', 'this run has "reinforce"']),
        (["--learner.score-centering", "8", "--loss", "gspo"], ["learner.score_centering = 8", "gspo"]),
        (["--learner.ratio-mask-low", "0.5"], ["learner.ratio_mask_low = 0.5", "set both"]),
        (
            ["--learner.ratio-mask-low", "2", "--learner.ratio-mask-high", "5"],
            ["learner.ratio_mask_low = 2.0", "below"],
        ),
        (["--learner.kl-beta", "-1"], ["learner.kl_beta = -1.0"]),
        (["--learner.normalize", "mean"], ["learner.normalize", '"sequence"']),
        (["--batch.n-completions", "0"], ["batch.n_completions = 0"]),
        (
            ["--batch.n-completions", "100", "--strategy", "dapo"],
            ["batch.n_completions = 100 takes 25 groups of 4", "no more than 24", "batch.max_pending = 25"],
        ),
        (
            ["--batch.n-completions", "33", "--strategy", "fixed", "--batch.max-pending", "none"],
            ["batch.n_completions = 33 takes 9 groups of 4", "no more than 8"],
        ),
        (["--sampling.overlong-buffer", "16"], ["sampling.overlong_buffer = 16", "sampling.max_new_tokens = 16"]),
        (["--task.impossible", "0.1"], ["task.impossible", "0.1", "belongs to task", "chains"]),
        (["steps", "2"], ['"steps" belongs to no flag']),
    ],
)
def test_refused_flags(tmp_path: Path, flags: list[str], parts: list[str]) -> None:
    message = refusal(tmp_path, None, *flags)
    assert message.startswith("command line: ")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("K = 4", "strategy.k (K)"),
        ("T = 4", "strategy.window (T)"),
        ("N = 64", "batch.n_groups (N)"),
        ("[learner]\nlearning_rate = 1", "learner.lr (learning_rate)"),
        ("[sampling]\nmax_completion_length = 1", "sampling.max_new_tokens (max_completion_length)"),
        ("[lerner]\nlr = 1", "learner.lr?"),
        ("[lerner]", "learner"),
        ("[learner]\nlrr = 1", "learner.lr?"),
        ("learner_lr = 1", "learner.lr?"),
        ("[learner]\nsteps = 1", "steps, above the first section?"),
        ("[eval]\nlr = 1", "learner.lr?"),
        ("learner = 1", "learner is a section: write [learner]"),
        ("[sampling]\ntop_p = 0.9", "must have the same distribution"),
        ("[learner]\nbeta = 0.1", "learner.kl_beta"),
        ("requeue = true", 'strategy "ngu" asks failed prompts again'),
        ("[strategy]\nstd = true", "strategy.divide_by"),
        ("xyzzy = 1", "ngu train --help"),
    ],
)
def test_an_unknown_key_gets_the_nearest_name_or_the_reason(tmp_path: Path, text: str, remedy: str) -> None:
    assert remedy in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[learner]\nlr = true", "learner.lr = true must be a finite number"),
        ("[learner]\nlr = inf", "must be a finite number"),
        ("steps = 2.5", 'steps = 2.5 must be a whole number or "none"'),
        ("seed = true", "seed = true must be a whole number"),
        ('strategy = { name = "fixed", leave_one_out = 1 }', "strategy.leave_one_out = 1 must be true or false"),
        ('[task]\nname = "maths"', 'task = "maths" is no task: did you mean math?'),
        ("[model]\npath = 3", "model.path = 3 must be text"),
        ("[steps]", "steps = {} must be a whole number"),
        ("[[learner]]\nlr = 1", "learner is a section"),
        ("strategy = 3", "strategy = 3 is no strategy"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_numbers_may_be_written_as_text(tmp_path: Path) -> None:
    settings = resolve(RECIPE, write(tmp_path, 'steps = "12"\n[learner]\nlr = "1e-6"'))
    assert settings.learner.lr == 1e-6
    assert settings.steps == 12


def test_every_alias_leads_to_a_key_and_hides_none() -> None:
    keys = settings_keys()
    assert set(NAMES_ELSEWHERE.values()) <= keys | {"loss"}
    names = {key.rpartition(".")[2] for key in keys}
    assert not names & (NAMES_ELSEWHERE.keys() | NOT_OFFERED.keys())


def settings_keys() -> set[str]:
    keys = set()
    every = [Settings(strategy=cls()) for cls in STRATEGIES.values()] + [
        Settings(loss=cls()) for cls in LOSSES.values()
    ]
    for settings in every:
        for section, value in settings_to_json(settings).items():
            keys |= {f"{section}.{name}" for name in value} if isinstance(value, dict) else {section}
    return keys


# -------------------------------------------------------------- line numbers


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n\n# comment\n\nbad = 1\n", 5),
        ('[task]\ndata = """\nbad = 1\n[learner]\n"""\n\n[learner]\nbad = 1', 8),
        ("[task]\nname = 'gsm8k' # bad = 1\n\n[learner]\n'bad' = [\n  1,\n  2,\n]\nlr = 1\n", 5),
        ("learner.lr = 1\n  learner . bad = 2", 2),
        ("learner = { lr = 1, bad = 2 }", 1),
        ("\ufeffseed = 1\r\n[learner]\r\nbad = 1\r\n", 3),
        ("[learner]\nlr = 1\n\n  [ bad . worse ] # no section\n  lr = 1", 5),
        ("[learner]\nlr = 1\n[bad]\n[eval]\nn = 1", 3),
        ("[[bad]]\nlr = 1\n[bad.learner]\nlr = 1\n[[bad]]\nlr = 2", 1),
        ("bad = [\n  [1, 2],\n  { n = 1 },\n]\n[bad2]\nn = 1", 1),
        ("seed = 1\n" + "# comment\n" * 20_000 + "bad = 1", 20_002),
        ("task.data = '''\n" + "[learner]\n" * 500 + "'''\nlearner.bad = 1", 503),
    ],
)
def test_the_line_is_the_one_on_which_the_key_stands(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=rf"line {line}: there is no key"):
        resolve(RECIPE, path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"seed = \n", "not valid TOML.*line 1"),
        (b"seed = 1\nseed = 2\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_toml(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        resolve(RECIPE, path)
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(RECIPE, tmp_path / "missing.toml")


def test_unknown_recipe() -> None:
    with pytest.raises(ConfigError, match="did you mean demo"):
        resolve("dmo")
    with pytest.raises(ConfigError, match="demo, manufactoria-tiny, gsm8k-smollm2"):
        resolve("zzz")


# ---------------------------------------------------------------- saved runs


@pytest.mark.parametrize(
    "settings",
    [
        *(recipe.settings for recipe in RECIPES.values()),
        Settings(strategy=FixedK(k=3, divide_by="std", window=None)),
        Settings(strategy=DynamicSampling(window=0), steps=None, epochs=3),
        Settings(
            strategy=NeverGiveUp(p=1 / 3, max_attempts=7),
            task=Gsm8kTask(data="a b.jsonl", n_prompts=5),
            learner=LearnerSettings(lr=1.1e-7),
            eval=EvalSettings(n=8, temperature=0.0),  # does not fit together: reading must not mind
            stall_s=0.1 + 0.2,
        ),
    ],
)
def test_saved_settings_come_back_exactly(settings: Settings) -> None:
    assert settings_from_json(json.loads(json.dumps(settings_to_json(settings)))) == settings


def test_saved_settings_hold_every_field() -> None:
    row = settings_to_json(Settings())
    assert list(row) == [field.name for field in fields(Settings)]
    assert row["strategy"]["name"] == "ngu"
    assert {"k", "p", "window", "max_attempts"} <= row["strategy"].keys()
    assert row["loss"] == {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (section, name)
        for section, variants in CHOICES.items()
        for name, variant in variants.items()
        if not getattr(variant, "after_colon", "")  # those need a word more
    ],
)
def test_every_choice_is_made_by_one_word(section: str, name: str, tmp_path: Path) -> None:
    kept = {"k": 4} if section == "strategy" and "k" in {f.name for f in fields(CHOICES[section][name])} else {}
    there = getattr(RECIPES[RECIPE].settings, section)
    expected = there if there.name == name else CHOICES[section][name](**kept)
    by_flag = resolve(RECIPE, None, [f"--{section}", name])
    assert getattr(by_flag, section) == expected
    assert resolve(RECIPE, write(tmp_path, f'{section} = "{name}"')) == by_flag
    assert resolve(RECIPE, write(tmp_path, f'[{section}]\nname = "{name}"')) == by_flag
    row = json.loads(json.dumps(settings_to_json(by_flag)))
    assert row[section]["name"] == name
    assert settings_from_json(row) == by_flag


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_of_completions_that_may_fill_is_accepted(name: str) -> None:
    flags = ["--strategy", name, "--batch.n-completions"]
    assert resolve(RECIPE, None, [*flags, "96"]).batch.n_completions == 96  # 24 groups of 4, all that may be open


def test_settings_of_a_loss() -> None:
    settings = resolve(RECIPE, None, ["--loss", "cispo", "--loss.clip-high", "5"])
    assert settings.loss == Cispo(clip_high=5.0)
    assert resolve(RECIPE, None, ["--loss.clip-high", "0.28"]).loss == Clipped(clip_high=0.28)
    assert resolve(RECIPE, None, ["--loss", "gspo"]).loss == Gspo(), "its clip range is of another kind"


def test_saved_settings_with_an_unknown_key_are_refused() -> None:
    row: dict[str, Any] = settings_to_json(Settings())
    row["learner"]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"learner\.momentum"):
        settings_from_json(row)
    row = settings_to_json(Settings())
    row["seed"] = "one"
    with pytest.raises(ConfigError, match="seed"):
        settings_from_json(row)


# ------------------------------------------------------------- model context


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 40960}}, 40960),
        ({"vocab_size": 5}, None),
    ],
)
def test_model_context(tmp_path: Path, config: dict[str, Any], context: int | None) -> None:
    assert model_context(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context(tmp_path) == context


def test_model_context_of_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        model_context(tmp_path)


def test_prompt_and_completion_must_fit_into_the_context() -> None:
    settings = RECIPES[RECIPE].settings
    needed = settings.task.max_prompt_tokens + settings.sampling.max_new_tokens
    settings.check_context(needed)
    with pytest.raises(ValueError, match=rf"need {needed} tokens.*context is {needed - 1}: lower one"):
        replace(settings).check_context(needed - 1)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_chosen_and_survives_the_settings_file(name: str) -> None:
    value = {"reasoning-gym": "reasoning-gym:chain_sum", "verifiers": "verifiers:wordle", "custom": "a.b:Mine"}.get(
        name, name
    )
    settings = resolve(RECIPE, None, ["--task", value])
    assert settings.task.name == name
    assert settings_from_json(settings_to_json(settings)) == settings


def test_what_stands_behind_the_colon_of_a_task_goes_into_its_field(tmp_path: Path) -> None:
    assert resolve(RECIPE, None, ["--task", "reasoning-gym:chain_sum", "--task.size", "7"]).task == ReasoningGymTask(
        dataset="chain_sum", size=7
    )
    assert resolve(RECIPE, write(tmp_path, 'task = "my_task:MyTask"')).task == CustomTask(target="my_task:MyTask")
    assert "task.dataset is empty" in refusal(tmp_path, 'task = "reasoning-gym"')
    assert 'task.options = "[1]"' in refusal(
        tmp_path, 'task = {name = "reasoning-gym", dataset = "chain_sum", options = "[1]"}'
    ).replace("'", '"')


def test_a_reward_of_ones_own_for_any_task() -> None:
    flags = ["--task", "own", "--task.data=rows.jsonl", "--task.reward=correct + 0.1*format", "--task.max_reward", "2"]
    assert resolve(RECIPE, None, flags).task == OwnTask(
        data="rows.jsonl", reward="correct + 0.1*format", max_reward=2.0
    )
