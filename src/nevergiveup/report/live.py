"""A run while it is running: panels that are redrawn in a terminal, single lines everywhere else.

Layer 3. rich. Two classes with the same methods, see `View`; `make_view` chooses. What a row of figures may hold is what a
line of metrics.jsonl holds; every figure may be missing, and then its place stays empty.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = Mapping[str, float]
Clock = Callable[[], float]

REFRESHES_PER_S = 4
PLAIN_EVERY_S = 10.0
PLAIN_EVERY_SHARE = 0.05
"""A plain line after this share of the run, or after PLAIN_EVERY_S, whatever is first."""
N_NOTES = 3

FULL_WIDTH, FULL_HEIGHT = 78, 23
"""Columns and lines from which panels are drawn."""
WIDE_WIDTH, WIDEST_WIDTH = 116, 136
"""Columns from which three panels stand side by side; from which every split of an evaluation is shown."""

_BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Shows a run. Steps and evaluations are given in order; `begin` comes before the first step."""

    @property
    def began(self) -> bool: ...

    def begin(self, title: str, facts: list[str], total_steps: int | None, total_completions: int | None) -> None:
        """The run is about to train. Totals are those of the settings; None where there is no such limit."""
        ...

    def step(self, row: dict[str, float]) -> None:
        """Figures of one optimizer step."""
        ...

    def evaluated(self, split: str, by_bucket: dict[str, float], step: int) -> None:
        """Pass rates by bucket. The first ones of a split are those that later ones are compared with."""
        ...

    def note(self, text: str) -> None:
        """A sentence that the person should read."""
        ...

    def close(self) -> None:
        """Leaves the last state on the screen and gives the terminal back. May be called again, and followed by `begin`."""
        ...


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read the output has left: the run goes on unseen."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_view(console: Console | None = None) -> LiveView | PlainView:
    """Panels if standard output is a terminal that can move the cursor, else lines."""
    console = console or _Console()
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console)


@dataclass(slots=True)
class _Progress:
    """How far the run is, and how long it will take at the pace of the last steps."""

    total_steps: int | None
    total_completions: int | None
    clock: Clock
    began_at: float = 0.0
    step: float = 0.0
    completions: float | None = None
    pace: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=32))  # (time, share done)

    def update(self, row: Row) -> None:
        self.step = row.get("step", self.step)
        self.completions = row.get("completions", self.completions)
        if (share := self.share) is not None:
            self.pace.append((self.clock(), share))

    @property
    def share(self) -> float | None:
        """In [0, 1], by whichever limit is nearer; None without a limit."""
        parts = [self.step / self.total_steps] if self.total_steps else []
        if self.total_completions:
            parts.append((self.completions or 0) / self.total_completions)
        return min(max(parts), 1.0) if parts else None

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_at

    @property
    def left_s(self) -> float | None:
        """Expected seconds to the end; None before the second step, and without a limit."""
        if len(self.pace) < 2:
            return None
        (t0, share0), (t1, share1) = self.pace[0], self.pace[-1]
        if share1 <= share0:
            return None
        return max((1.0 - share1) * (t1 - t0) / (share1 - share0) - (self.clock() - t1), 0.0)

    def in_words(self) -> str:
        of_steps = f"/{self.total_steps:,}" if self.total_steps else ""
        words = f"step {self.step:,.0f}{of_steps}"
        if self.completions is not None:
            of_completions = f"/{self.total_completions:,}" if self.total_completions else ""
            words += f"  {self.completions:,.0f}{of_completions} completions"
        return words

    def left_in_words(self) -> str:
        if self.share == 1.0 or (left_s := self.left_s) is None:
            return ""
        return f"{_duration(left_s)} left"


@dataclass(slots=True)
class _Evaluations:
    """Pass rates of one split, by bucket, from the first evaluation on."""

    history: dict[str, list[float]] = field(default_factory=dict)
    step: int = 0

    def add(self, by_bucket: Mapping[str, float], step: int) -> None:
        self.step = step
        for bucket, rate in by_bucket.items():
            self.history.setdefault(bucket, []).append(rate)


class PlainView:
    """Single lines, for files, pipes and terminals that cannot move the cursor."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self.began = False
        self._console = console
        self._clock = clock
        self._start()

    def _start(self) -> None:
        self._progress = _Progress(None, None, self._clock, self._clock())
        self._evaluations: dict[str, _Evaluations] = {}
        self._printed_at: tuple[float, float] | None = None  # (time, share done)
        self._unprinted: Row | None = None

    def begin(self, title: str, facts: list[str], total_steps: int | None, total_completions: int | None) -> None:
        self.began = True
        self._progress = _Progress(total_steps, total_completions, self._clock, self._clock())
        for line in (title, *facts):
            self._print(line)

    def step(self, row: dict[str, float]) -> None:
        self._progress.update(row)
        self._unprinted = row
        now, share = self._clock(), self._progress.share or 0.0
        if self._printed_at:
            last_at, last_share = self._printed_at
            if now - last_at < PLAIN_EVERY_S and share - last_share < PLAIN_EVERY_SHARE - 1e-9:  # sums of steps
                return
        self._printed_at = (now, share)
        self._print_row()

    def evaluated(self, split: str, by_bucket: dict[str, float], step: int) -> None:
        evaluations = self._evaluations.setdefault(split, _Evaluations())
        evaluations.add(by_bucket, step)
        self._print(evaluation_line(split, evaluations))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        self._print_row()
        self._start()

    def _print_row(self) -> None:
        if self._unprinted is not None:
            parts = (self._progress.in_words(), self._progress.left_in_words(), row_line(self._unprinted))
            self._print("  ".join(filter(None, parts)))
        self._unprinted = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Panels in a terminal. They stay below whatever else is printed, and follow its size."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self.began = False
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._start()

    def _start(self) -> None:
        # A thread of rich draws while the run changes these: they are replaced, never changed in place.
        self._title = ""
        self._progress = _Progress(None, None, self._clock, self._clock())
        self._row: Row = {}
        self._evaluations: dict[str, _Evaluations] = {}
        self._notes: tuple[str, ...] = ()

    def begin(self, title: str, facts: list[str], total_steps: int | None, total_completions: int | None) -> None:
        self.began = True
        for fact in facts:
            self._print(fact)
        self._title = title
        self._progress = _Progress(total_steps, total_completions, self._clock, self._clock())
        if self._live is None:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=REFRESHES_PER_S,
                vertical_overflow="crop",
            )
            self._live.start()

    def step(self, row: dict[str, float]) -> None:
        self._progress.update(row)
        self._row = {**self._row, **row}

    def evaluated(self, split: str, by_bucket: dict[str, float], step: int) -> None:
        evaluations = _Evaluations()
        if (earlier := self._evaluations.get(split)) is not None:
            evaluations.history = {bucket: list(rates) for bucket, rates in earlier.history.items()}
        evaluations.add(by_bucket, step)
        self._evaluations = {**self._evaluations, split: evaluations}

    def note(self, text: str) -> None:
        if self._live is None:
            self._print(text)
            return
        self._notes = (*self._notes, text)
        if len(self._notes) > N_NOTES:
            oldest, self._notes = self._notes[0], self._notes[1:]
            self._print(oldest)  # above the panels: nothing that was noted is lost

    def close(self) -> None:
        notes, self._notes = self._notes, ()
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        for text in notes:  # in full, where they stay readable
            self._print(text)
        self._start()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def __rich__(self) -> RenderableType:
        width, height = self._console.size
        return draw(self._title, self._progress, self._row, self._evaluations, self._notes, width, height)


# ----------------------------------------------------------------------- drawing


def draw(
    title: str,
    progress: _Progress,
    row: Row,
    evaluations: Mapping[str, _Evaluations],
    notes: Sequence[str],
    width: int,
    height: int,
) -> RenderableType:
    """The state of a run, in at most width x height characters."""
    if width < FULL_WIDTH or height < FULL_HEIGHT:
        return _compact(title, progress, row, evaluations, notes)
    header = Panel(
        _progress_line(progress), title=_bold(f"{title}  {_duration(progress.elapsed_s)}"), title_align="left"
    )
    body = Table.grid(expand=True)
    if width >= WIDE_WIDTH:
        body.add_column(width=35)
        body.add_column(ratio=1)
        body.add_column(width=37)
        pass_rates = _evaluation_panel(evaluations, 12, all_splits=width >= WIDEST_WIDTH)
        speed_and_learner = Group(_panel("speed", _speed(row), 6), _panel("learner", _learner(row), 6))
        body.add_row(_panel("groups", _groups(row), 12), pass_rates, speed_and_learner)
    else:
        body.add_column(ratio=4)
        body.add_column(ratio=5)
        body.add_row(_panel("groups", _groups(row), 10), _evaluation_panel(evaluations, 10, all_splits=False))
        body.add_row(_panel("speed", _speed(row), 6), _panel("learner", _learner(row), 6))
    lines = [Text(f" {note}", no_wrap=True, overflow="ellipsis", style="yellow") for note in notes]
    return Group(header, body, *lines, Text())  # Ctrl-C is echoed at the end of the last line: it must not wrap


def _compact(
    title: str, progress: _Progress, row: Row, evaluations: Mapping[str, _Evaluations], notes: Sequence[str]
) -> RenderableType:
    """For small terminals: the most important first, the rest is cut off at the bottom."""
    parts: list[RenderableType] = [
        Text(f"{title}  {_duration(progress.elapsed_s)}", style="bold", no_wrap=True, overflow="ellipsis"),
        Text("  ".join(filter(None, (progress.in_words(), progress.left_in_words())))),
        _progress_bar_line(progress),
        Text(row_line(row) or "waiting for the first batch"),
    ]
    parts += [Text(evaluation_line(split, evaluation), style="cyan") for split, evaluation in evaluations.items()]
    parts += [Text(note, style="yellow") for note in notes[-1:]]
    return Group(*parts, Text())


def row_line(row: Row) -> str:
    """The figures of a row that matter most, in one line."""
    shares = [
        f"{name} {_percent(row[key])}"
        for key, name in (
            ("window/signal", "signal"),
            ("window/all_right", "all right"),
            ("window/all_wrong", "all wrong"),
        )
        if key in row
    ]
    idle = [
        f"{name} {_percent(row[key])}"
        for key, name in (("engine_idle", "engine"), ("learner_idle", "trainer"))
        if key in row
    ]
    named = [
        f"{key.removeprefix('window/reward/')} {value:.2f}"
        for key, value in row.items()
        if key.startswith("window/reward/")
    ]
    parts = [
        _filled("reward {:.3f}", row, "window/reward") + (f" ({', '.join(named)})" if named else ""),
        ", ".join(shares),
        *_trouble(row),
        _filled("asked again {:.0f}", row, "window/requeued"),
        _filled("gave up {:.0f}", row, "window/chains/given_up"),
        _filled("age {:.1f}", row, "window/age_mean") + _filled(" (max {:.0f})", row, "window/age_max"),
        _filled("loss {:.4f}", row, "loss"),
        f"{_rate(row['completions_per_s'])} completions/s" if "completions_per_s" in row else "",
        f"{_rate(row['tokens_per_s'])} tokens/s" if "tokens_per_s" in row else "",
        f"idle: {', '.join(idle)}" if idle else "",
    ]
    return "  ".join(part for part in parts if part.strip())


def _trouble(row: Row) -> list[str]:
    """What keeps completions from being scored as what they are, where it happens at all."""
    return [
        f"{_percent(row[key])} {words}"
        for key, words in (("window/no_answer", "without answer"), ("window/unverified", "no verdict"))
        if row.get(key)
    ]


def evaluation_line(split: str, evaluation: _Evaluations) -> str:
    """The newest pass rates of a split, in brackets those of the start."""
    parts = []
    for bucket, rates in evaluation.history.items():
        start = f" ({rates[0]:.3f})" if len(rates) > 1 else ""
        parts.append(f"{_words(bucket)} {rates[-1]:.3f}{start}")
    return f"{_words(split)} {_what(evaluation)} at step {evaluation.step}: {', '.join(parts)}"


def _progress_line(progress: _Progress) -> RenderableType:
    share = progress.share
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_column(no_wrap=True, justify="right")
    line.add_row(
        progress.in_words(),
        _bar(progress),
        "" if share is None else _percent(share),
        progress.left_in_words(),
    )
    return line


def _progress_bar_line(progress: _Progress) -> RenderableType:
    line = Table.grid(expand=True)  # the bar alone does not end its line
    line.add_row(_bar(progress))
    return line


def _bar(progress: _Progress) -> ProgressBar:
    share = progress.share
    return ProgressBar(total=1.0, completed=share or 0.0, pulse=share is None)


def _panel(title: str, content: RenderableType, height: int) -> Panel:
    return Panel(content, title=_bold(title), title_align="left", height=height, border_style="dim")


def _groups(row: Row) -> RenderableType:
    if not row:
        return Text("waiting for the first batch", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    shares = [
        (label, row.get(key), colour)
        for label, key, colour in (
            ("signal", "window/signal", "green"),
            ("all right", "window/all_right", "blue"),
            ("all wrong", "window/all_wrong", "red"),
        )
    ]
    for label, share, colour in shares:
        table.add_row(Text.assemble(("■ ", colour), label), "" if share is None else _percent(share))
    given_up = _filled(", gave up {:.0f}", row, "window/chains/given_up")
    cut = f"{_percent(row['window/truncated'])} cut" if "window/truncated" in row else ""
    unverified = row.get("window/completions_unverified", 0)
    silent = f"{_percent(row['window/no_answer'])} no answer" if row.get("window/no_answer") else ""
    table.add_row("reward", ", ".join(filter(None, (_filled("{:.3f}", row, "window/reward"), cut, silent))))
    table.add_row("asked again", _filled("{:.0f}", row, "window/requeued") + given_up)
    table.add_row(
        "age", _filled("{:.1f} mean", row, "window/age_mean") + _filled(", {:.0f} max", row, "window/age_max")
    )
    if unverified:
        table.add_row("no verdict", Text(f"{unverified:.0f} completions", style="red"))
    table.add_row("waiting", _filled("{:.0f} open", row, "n_open") + _filled(", {:.0f} ready", row, "n_ready"))
    return Group(_Stack([(share, colour) for _, share, colour in shares if share is not None]), table)


def _evaluation_panel(evaluations: Mapping[str, _Evaluations], height: int, *, all_splits: bool) -> Panel:
    """Start, now, and the way between of the first split; now and start of the others where there is room."""
    if not evaluations:
        return _panel("evaluation", Text("none yet", style="dim"), height)
    name, first = next(iter(evaluations.items()))
    others = [(split, other) for split, other in evaluations.items() if split != name] if all_splits else []
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for header in ("start", "now", "change"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for split, _ in others:
        table.add_column(_words(split), justify="right", no_wrap=True, header_style="dim")
        table.add_column("now", justify="right", no_wrap=True)
    for bucket, rates in first.history.items():
        change = rates[-1] - rates[0]
        colour = "green" if change >= 0.001 else "red" if change <= -0.001 else "dim"
        cells: list[RenderableType] = [
            Text(_words(bucket), style="bold" if bucket == "all" else ""),
            f"{rates[0]:.3f}",
            _bold(f"{rates[-1]:.3f}"),
            Text(f"{change:+.3f}", style=colour),
            Text(_trend(rates, 9), style="cyan"),
        ]
        for _, other in others:
            there = other.history.get(bucket)
            cells += [f"{there[0]:.3f}", f"{there[-1]:.3f}"] if there else ["", ""]
        table.add_row(*cells)
    return _panel(f"{_words(name)} {_what(first)} at step {first.step}", table, height)


def _speed(row: Row) -> RenderableType:
    return _pairs(
        ("completions/s", _rate(row["completions_per_s"]) if "completions_per_s" in row else ""),
        ("tokens/s", _rate(row["tokens_per_s"]) if "tokens_per_s" in row else ""),
        ("engine idle", _percent(row["engine_idle"]) if "engine_idle" in row else ""),
        ("trainer idle", _percent(row["learner_idle"]) if "learner_idle" in row else ""),
    )


def _learner(row: Row) -> RenderableType:
    left = _pairs(
        ("loss", _filled("{:.4f}", row, "loss")),
        ("grad norm", _filled("{:.3g}", row, "grad_norm")),
        ("entropy", _filled("{:.3f}", row, "entropy")),
        ("lr", _filled("{:.2g}", row, "lr")),
    )
    right = _pairs(
        ("ratio", _filled("{:.3f}", row, "ratio_mean")),
        ("clipped", _percent(row["clip_fraction"]) if "clip_fraction" in row else ""),
        ("gap", _filled("{:.2g}", row, "logprob_gap_mean")),
        ("step", _filled("{:.2f} s", row, "step_s")),
    )
    both = Table.grid(padding=(0, 2))
    both.add_row(left, right)
    return both


def _pairs(*pairs: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    for label, value in pairs:
        table.add_row(label, value)
    return table


@dataclass(frozen=True, slots=True)
class _Stack:
    """One bar, cut into shares of 1; what is missing to 1 stays dim."""

    shares: Sequence[tuple[float, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        text, position = Text(), 0.0
        for share, colour in self.shares:
            start, position = round(position * width), min(position + (share if share > 0 else 0.0), 1.0)
            text.append("━" * (round(position * width) - start), style=colour)
        text.append("━" * (width - len(text)), style="dim")
        yield text


def _trend(rates: Sequence[float], n: int) -> str:
    """At most n bars on the scale from 0 to 1, the first and the last rate among them."""
    if len(rates) > n:
        rates = [rates[round(i * (len(rates) - 1) / (n - 1))] for i in range(n)]
    return "".join(_BARS[max(0, min(int(rate * len(_BARS)), len(_BARS) - 1))] for rate in rates)


def _what(evaluation: _Evaluations) -> str:
    return "evaluation" if any(bucket.startswith("pass@") for bucket in evaluation.history) else "pass@1"


def _filled(template: str, row: Row, key: str) -> str:
    return template.format(row[key]) if key in row else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rate(per_s: float) -> str:
    if per_s >= 10_000:
        return f"{per_s / 1000:.1f}k"
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _bold(text: str) -> Text:
    return Text(text, style="bold")
