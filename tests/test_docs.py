"""The documentation points at what is there: links lead to the line of code that they name, and every choice is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nevergiveup.objectives import LOSSES
from nevergiveup.strategies import STRATEGIES

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
