"""The view of a run: the figures appear at every width, nothing breaks where they are missing, the terminal comes back."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nevergiveup.report.live import FULL_HEIGHT, FULL_WIDTH, WIDE_WIDTH, WIDEST_WIDTH, LiveView, PlainView, make_view

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

ROW = {
    "step": 3,
    "t": 6.0,
    "completions": 768,
    "tokens": 4608,
    "loss": -0.0123,
    "grad_norm": 0.456,
    "lr": 5e-4,
    "ratio_mean": 1.0017,
    "clip_fraction": 0.021,
    "logprob_gap_mean": 0.0034,
    "entropy": 0.789,
    "n_completions": 256,
    "step_s": 0.065,
    "window/reward": 0.4321,
    "window/signal": 0.38,
    "window/all_right": 0.22,
    "window/all_wrong": 0.40,
    "window/requeued": 31,
    "window/chains/given_up": 2,
    "window/truncated": 0.01,
    "window/age_mean": 1.25,
    "window/age_max": 4,
    "window/completions_unverified": 5,
    "completions_per_s": 3812.3,
    "tokens_per_s": 15324.1,
    "engine_idle": 0.03,
    "learner_idle": 0.21,
    "n_open": 64,
    "n_ready": 12,
}
START = {"easy": 0.931, "medium": 0.512, "hard": 0.123, "extra_hard": 0.008, "all": 0.502}
NOW = {"easy": 0.942, "medium": 0.634, "hard": 0.345, "extra_hard": 0.456, "all": 0.678}


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int, height: int) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, record=True, _environ={})


def drawn(view: LiveView, console: Console) -> str:
    """What the view shows just now, alone (its own console would add the panels once more)."""
    other = terminal(console.width, console.height)
    other.print(view)
    return other.export_text()


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown_run(console: Console) -> LiveView:
    view = LiveView(console, clock=Hands())
    view.begin("chains, ngu", ["fact"], 12, 10_000)
    view.evaluated("heldout", START, 0)
    view.evaluated("train", {"all": 0.111}, 0)
    view.step(ROW)
    view.evaluated("heldout", NOW, 3)
    return view


@pytest.mark.parametrize("width", [FULL_WIDTH, 80, WIDE_WIDTH, 120, WIDEST_WIDTH, 200])
def test_panels_hold_the_figures_uncut(width: int) -> None:
    console = terminal(width, FULL_HEIGHT)
    view = shown_run(console)
    for note in ("first", "second", "third"):
        view.note(note)
    text = drawn(view, console)
    view.close()
    for figure in (
        *("chains, ngu", "step 3/12", "768/10,000 completions", "25 %"),
        *("38 %", "22 %", "40 %", "0.432", "31, gave up 2", "1.2 mean, 4 max", "5 completions"),
        *("3,812", "15.3k", "3 %", "21 %"),
        *("-0.0123", "0.456", "0.0005", "1.002", "2 %", "0.0034", "0.789", "0.07 s"),
        *("heldout pass@1 at step 3", "0.008 0.456 +0.448", "0.931 0.942 +0.011", "extra hard"),
        *("first", "second", "third"),
    ):
        assert figure in text, figure
    assert "…" not in text
    lines = text.splitlines()
    assert len(lines) <= FULL_HEIGHT
    assert not lines[-1].strip()  # where the terminal echoes ^C
    assert max(map(len, lines)) <= width
    assert ("0.111" in text) == (width >= WIDEST_WIDTH)


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 12), (40, 8), (20, 5), (8, 3), (1, 1)])
def test_small_terminals_get_the_most_important(width: int, height: int) -> None:
    console = terminal(width, height)
    view = shown_run(console)
    view.note("a sentence")
    text = drawn(view, console)
    view.close()
    assert max(map(len, text.splitlines())) <= max(width, 1)
    if width >= 20:
        assert "step 3/12" in text
        assert "0.432" in text.replace("\n", " ")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_any_figure_may_be_missing(width: int) -> None:
    console = terminal(width, 30)
    view = LiveView(console, clock=Hands())
    assert drawn(view, console)
    view.evaluated("heldout", {}, 0)
    view.evaluated("heldout", {"pass@1": 0.25}, 1)
    assert "0.250" in drawn(view, console)
    for key in ROW:
        view = LiveView(console, clock=Hands())  # not begun: nothing is drawn but what is asked for
        view.step({name: value for name, value in ROW.items() if name != key})
        text = drawn(view, console)
        assert ("0.432" in text) == (key != "window/reward")
        assert ("3,812" in text) == (key != "completions_per_s")


def test_figures_that_are_no_numbers_do_not_stop_a_run() -> None:
    console = terminal(120, 30)
    view = LiveView(console, clock=Hands())
    view.begin("t", [], 10, None)
    view.step(dict.fromkeys(ROW, float("nan")) | {"step": 1.0})
    assert "nan" in drawn(view, console)
    view.close()


@pytest.mark.parametrize(
    ("total_steps", "total_completions", "share", "left"),
    [(20, None, "50 %", "0:20 left"), (None, 5120, "50 %", "0:20 left"), (40, 3200, "80 %", "0:05 left")],
)
def test_time_left_follows_the_nearer_limit(
    total_steps: int | None, total_completions: int | None, share: str, left: str
) -> None:
    console, clock = terminal(100, 30), Hands()
    view = LiveView(console, clock=clock)
    clock.now += 500  # an evaluation before the first step does not count
    view.begin("t", [], total_steps, total_completions)
    clock.now += 70
    for step in range(1, 11):
        clock.now += 2
        view.step({"step": step, "completions": 256 * step})
    text = drawn(view, console)
    assert share in text
    assert left in text
    assert "1:30" in text  # since begin
    clock.now += 3  # the next step is not there yet
    assert left not in drawn(view, console)
    view.close()


def test_no_limit_no_time_left() -> None:
    console = terminal(100, 30)
    view = LiveView(console, clock=Hands())
    view.begin("t", [], None, None)
    view.step({"step": 1})
    view.step({"step": 2})
    text = drawn(view, console)
    assert "step 2" in text
    assert "left" not in text
    view.close()


def test_nothing_that_is_noted_gets_lost() -> None:
    console = terminal(80, 30)
    view = LiveView(console, clock=Hands())
    view.note("before the start")
    view.begin("t", ["a fact"], 10, None)
    notes = [f"note {i} " + "that is too long for one line of the terminal " * 2 + f"end {i}" for i in range(6)]
    for note in notes:
        view.note(note)
    view.close()
    view.note("afterwards")
    text = " ".join(written(console).split())
    for note in ("before the start", "a fact", *(note.strip() for note in notes), "afterwards"):
        assert note in text


def test_the_terminal_comes_back_after_an_exception() -> None:
    console = terminal(80, 30)
    view = LiveView(console, clock=Hands())
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        try:
            view.begin("t", [], 10, None)
            assert written(console).count(HIDE_CURSOR) == 1
            raise KeyboardInterrupt
        finally:
            view.close()
    assert written(console).rindex(SHOW_CURSOR) > written(console).rindex(HIDE_CURSOR)
    view.close()


def test_a_view_can_show_one_run_after_another() -> None:
    console = terminal(80, 30)
    view = shown_run(console)
    view.close()
    view.begin("second run", [], 10, None)
    text = drawn(view, console)
    assert "second run" in text
    assert "0.456" not in text
    view.close()


def plain() -> tuple[PlainView, Console, Hands]:
    console, clock = Console(file=io.StringIO(), width=80), Hands()
    return PlainView(console, clock=clock), console, clock


def test_plain_lines_hold_the_figures_in_one_line() -> None:
    view, console, _ = plain()
    view.begin("chains, ngu", ["fact [in brackets]"], 12, 10_000)
    view.evaluated("heldout", START, 0)
    view.step(ROW)
    view.evaluated("heldout", NOW, 3)
    view.note("a sentence " * 20)
    view.close()
    title, fact, start, row, now, note = written(console).splitlines()
    assert (title, fact) == ("chains, ngu", "fact [in brackets]")
    assert note == "a sentence " * 20
    assert start == "heldout pass@1 at step 0: easy 0.931, medium 0.512, hard 0.123, extra hard 0.008, all 0.502"
    assert "extra hard 0.456 (0.008)" in now
    for figure in (
        *("step 3/12", "768/10,000 completions", "reward 0.432", "signal 38 %, all right 22 %, all wrong 40 %"),
        *("asked again 31", "gave up 2", "age 1.2 (max 4)", "loss -0.0123", "3,812 completions/s", "15.3k tokens/s"),
        "idle: engine 3 %, trainer 21 %",
    ):
        assert figure in row
    assert "\x1b" not in written(console)


def test_plain_lines_come_every_few_seconds_or_percent_and_at_the_end() -> None:
    view, console, clock = plain()
    view.begin("t", [], 1000, None)
    for step in range(1, 121):
        clock.now += 1.0
        view.step({"step": step})
    view.close()
    steps = [line.split()[1] for line in written(console).splitlines()[1:]]
    assert steps == [f"{step}/1,000" for step in (*range(1, 121, 10), 120)]
    view, console, clock = plain()
    view.begin("t", [], 40, None)
    for step in range(1, 41):
        view.step({"step": step})
    view.close()
    steps = [line.split()[1] for line in written(console).splitlines()[1:]]
    assert steps == [f"{step}/40" for step in (*range(1, 41, 2), 40)]


def test_panels_only_in_a_real_terminal() -> None:
    assert isinstance(make_view(Console(file=io.StringIO())), PlainView)
    assert isinstance(make_view(terminal(80, 24)), LiveView)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_view(dumb), PlainView)
