"""The documentation points at what is there: links lead to the line of code that they name, and every choice is described."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nevergiveup.objectives import LOSSES
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.strategies import STRATEGIES, NeverGiveUp
from nevergiveup.train import train

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for name, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, line = target.partition("#L")
        assert (page.parent / path).exists(), f"{page.name}: {target}"
        if line:
            text = (page.parent / path).read_text().splitlines()[int(line) - 1]
            assert re.match(rf"(class|def) {re.escape(name.strip('`'))}\b", text), f"{page.name}: {target} is {text!r}"


def test_every_strategy_and_loss_is_described() -> None:
    strategies, losses = ((ROOT / "docs" / name).read_text() for name in ("strategies.md", "losses.md"))
    for name, strategy in STRATEGIES.items():
        assert re.search(rf"^###.*`{name}`", strategies, re.MULTILINE), name
        assert f"[`{strategy.__name__}`]" in strategies, name
    for name, loss in LOSSES.items():
        assert f"| `{name}` |" in losses, name
        assert f"[`{loss.__name__}`]" in losses, name


@pytest.mark.slow
def test_every_figure_of_a_run_stands_in_the_glossary(tmp_path: Path) -> None:
    """Of a run in which most things happen: unverified and truncated completions, give-ups, a KL term, an age."""
    settings = RECIPES["demo"].settings
    settings = replace(
        settings,
        model=replace(settings.model, warm_steps=60, warm_batch=64),
        learner=replace(settings.learner, kl_beta=0.01, ratio_mask_low=0.5, ratio_mask_high=5.0),
        strategy=NeverGiveUp(k=4, p=0.5),
        runtime="here",
        steps=4,
    )
    summary = train(settings, tmp_path / "run", PlainView(Console(quiet=True)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} | {f"window/{name}" for name in summary["totals"]}
    text = (ROOT / "docs" / "metrics.md").read_text()
    patterns = [
        re.compile(re.sub(r"\b(PART|TEXT|OUTCOME|BUCKET|FATE)\b", "[^/]+", re.escape(name)))
        for cells in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", cells)
    ]
    assert {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    assert len(names) > 70
