"""The loop on one page trains, and stays on about a page."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "ngu_on_one_page.py"


@pytest.mark.slow
def test_it_trains():
    page = runpy.run_path(str(EXAMPLE))
    results = page["main"](budget=24_000)
    assert set(results) == {"fixed-K GRPO", "NGU"}
    for overall, extra_hard in results.values():
        assert overall > 0.7  # .63 before
        assert extra_hard > 0.05  # .006 before
