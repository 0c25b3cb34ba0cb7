"""What a report says, section by section: prose, tables and charts as data, which `page` renders. Layer 3.

Standard library only. Text is plain here; whoever renders it escapes it. What cannot be shown is said, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nevergiveup.evaluate import BUCKETS
from nevergiveup.metrics import ALL
from nevergiveup.report.charts import (
    Areas,
    Axis,
    Chart,
    Column,
    Columns,
    Figure,
    Line,
    Lines,
    Rows,
    Texture,
    count_axis,
    difference_axis,
    log_axis,
    share_axis,
)
from nevergiveup.report.compare import HARD, Comparison, Estimate, caveats, headline, percent, points, span
from nevergiveup.report.runs import (
    BUCKET_FILE,
    CONFIG,
    EVENTS,
    METRICS,
    NO_CONTRAST,
    RATES,
    SAMPLES,
    UNPLACED,
    Bin,
    Evaluation,
    Run,
)

N_FINE_BINS = 14
MOST_LISTED = 100
"""Rows of a list of prompts on the page; the files to download hold all."""
MOST_ROUNDS_SHOWN = 25
MOST_AGES = 12
STEADY_FROM = 0.1
"""As in the summary of a run, idle shares leave out the first tenth, in which both sides start up."""
CHANGED = 0.1
"""A prompt's pass rate rose or fell if it moved by more."""
SOLVED, UNSOLVED = 0.7, 0.3
"""By its pass rate a prompt is solved above, and not solved below."""

FATES: Sequence[tuple[str, str, Texture]] = (
    ("contrast", "trained, with contrast", "solid"),
    (NO_CONTRAST, "trained, without contrast", "mid"),
    ("left_out", "left out", "faint"),
    ("filtered", "filtered (all right)", "pale"),
    ("given_up", "given up", "hatch"),
    ("stale", "stale", "dots"),
    ("trouble", "unverified or failed", "grey"),
    ("held", "held", "none"),
)
OUTCOMES: Sequence[tuple[str, str, Texture]] = (
    ("varied", "contrast", "solid"),
    ("flat", "the same partial score", "mid"),
    ("all_right", "all right", "pale"),
    ("all_wrong", "all wrong", "hatch"),
    ("no_verdict", "no verdict", "grey"),
)
SHADES: Mapping[str, Texture] = {"extra_hard": "solid", "hard": "mid", "medium": "pale", "easy": "faint"}
"""Of buckets, where they are stacked: the harder, the stronger the colour."""


@dataclass(frozen=True, slots=True)
class Prose:
    text: str
    is_note: bool = False
    """Something is missing, or to be taken with care."""


@dataclass(frozen=True, slots=True)
class Table:
    """header: (words, run whose colour they get). rows: the first cell names the row. strong: rows that stand out. links: of
    row i, the run and prompt that its first cell leads to."""

    caption: str
    header: Sequence[tuple[str, int | None]]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()
    links: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    n_words: int = 1
    """Leading columns that hold words: set to the left; the others are figures."""


@dataclass(frozen=True, slots=True)
class Special:
    """A place that only the page fills: "exports" or "browser"."""

    name: str


Block: TypeAlias = Prose | Table | Figure | Special


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Report:
    """headline: one sentence; because: why; caveats: how far to trust it."""

    runs: Sequence[Run]
    headline: str
    because: Sequence[str]
    caveats: Sequence[str]
    sections: Sequence[Section]


def build(runs: Sequence[Run]) -> Report:
    c = Comparison(runs)
    first, because = headline(c)
    sections = [
        Section("buckets", "By difficulty", list(_by_difficulty(c))),
        Section("matthew", "Who gained: the Matthew plot", list(_matthew(c))),
        Section("curves", "Pass rates over completions", list(_curves(c))),
        Section("samples-went", "Where the samples went", list(_spent(c))),
        Section("verdicts", "What came back", list(_verdicts(c))),
        Section("retries", "Retries, and prompts given up", list(_retries(c))),
        Section("ages", "Ages of what was trained on", list(_ages(c))),
        Section("idle", "Idle shares", list(_idle(c))),
        Section("regressions", "What was solved and is not", list(_regressions(c))),
        Section("browser", "What the policy wrote", list(_texts(c))),
        Section("settings", "Settings", list(_settings(c))),
    ]
    return Report(runs, first, because, caveats(c), sections)


def words(name: str) -> str:
    return name.replace("_", " ")


def _missing(runs: Sequence[Run], *names: str) -> Iterator[Prose]:
    for name in names:
        without = [run for run in runs if name in run.missing]
        if without:
            labels = " and ".join(run.label for run in without)
            has = "has" if len(without) == 1 else "have"
            yield Prose(f"{labels} {has} no {name}: {without[0].missing[name]}.", is_note=True)


def _legend(runs: Sequence[Run]) -> list[tuple[str, int | None, Texture]]:
    return [(run.label, i, "solid") for i, run in enumerate(runs)]


def _texture_legend(kinds: Sequence[tuple[str, str, Texture]], used: set[str]) -> list[tuple[str, int | None, Texture]]:
    return [(name, None, texture) for key, name, texture in kinds if key in used]


def _completions_axis(runs: Sequence[Run], also: int = 0) -> Axis:
    return count_axis(max([also, *(run.drawn for run in runs)]), "completions drawn")


# -------------------------------------------------------------------------- pass rates


def _by_difficulty(c: Comparison) -> Iterator[Block]:
    runs = c.runs
    if not any(c.ends):
        yield Prose("No evaluation has been made yet.", is_note=True)
        return
    together = c.hard_buckets == HARD
    named: list[tuple[str, tuple[str, ...]]] = [(words(name), (name,)) for name in c.shown_buckets if name != ALL]
    if together:
        named.append(("hard and extra hard", HARD))
    if ALL in c.shown_buckets:
        named.append((ALL, (ALL,)))
    header: list[tuple[str, int | None]] = [("difficulty", None), ("start, %", None)]
    header += [(f"{run.label}, %", i) for i, run in enumerate(runs)]
    if len(runs) == 1:
        header += [("gain, points", None), ("95 % interval", None)]
    for run in runs[1:]:
        header += [(f"{run.label} − {runs[0].label}, points", None), ("95 % interval", None)]
    header += [(f"drawn, {run.label}", i) for i, run in enumerate(runs)] + [("prompts", None)]
    rows = []
    for name, buckets in named:
        n = c.n_prompts(buckets)
        start = next((rate for row in c.starts if (rate := c.rate(row, buckets)) is not None), None)
        row = [name, _bare(start)]
        row += [_bare(c.rate(end, buckets)) for end in c.ends]
        leads = [c.gain(0, buckets)] if len(runs) == 1 else [c.lead(i, 0, buckets) for i in range(1, len(runs))]
        for lead in leads:
            row += ["–", "–"] if lead is None else [points(lead.mean), span(lead.interval) or "–"]
        knows = [c.knows_training(i) or buckets == (ALL,) for i in range(len(runs))]
        drawn = [f"{c.drawn(i, buckets):,}" if known else "–" for i, known in enumerate(knows)]
        rows.append([*row, *drawn, "–" if n is None else f"{n:,}"])
    split = "held-out prompts, which are not trained on" if c.split == "heldout" else "training prompts"
    yield Table(
        f"pass@1 on {split}, at the start and after {c.budget:,} completions, by difficulty for the policy at the start; "
        "then completions drawn for training prompts of that difficulty in the whole run.",
        header,
        rows,
        strong=frozenset(i for i, (_, buckets) in enumerate(named) if buckets == HARD),
    )
    yield from _missing(runs, RATES, BUCKET_FILE)


def _bare(share: float | None) -> str:
    """A share in percent, without the sign: the heading has it."""
    return "–" if share is None else f"{100 * share:.1f}"


def _matthew(c: Comparison) -> Iterator[Block]:
    yield Prose(
        "The Matthew effect: plain training gives to those who have. Prompts that are solved half of the time gain, prompts "
        "that are hardly ever solved gain little, because a group that is all wrong teaches nothing."
    )
    buckets = [name for name in c.shown_buckets if name != ALL]
    gains = [[c.gain(i, [name]) for name in buckets] for i in range(len(c.runs))]
    fine = [c.gains_by_rate(i, N_FINE_BINS) for i in range(len(c.runs))]
    every: list[Estimate] = [gain for row in gains for gain in row if gain] + [gain for row in fine for _, gain in row]
    if not buckets or not every:
        yield Prose("Gains by difficulty need buckets.json and two evaluations.", is_note=True)
        yield from _missing(c.runs, BUCKET_FILE)
        return
    y = difference_axis(
        min(low for low, _ in map(_ends, every)), max(high for _, high in map(_ends, every)), "gain, points"
    )
    charts: list[Chart] = [
        Columns(
            "By bucket",
            [words(name) for name in buckets],
            [
                Column(
                    run.label,
                    i,
                    "solid",
                    [g.mean if g else None for g in gains[i]],
                    [g.interval if g else None for g in gains[i]],
                )
                for i, run in enumerate(c.runs)
            ],
            "difficulty at the start",
            y,
            lambda value: f"{points(value)} points",
        )
    ]
    if any(fine):
        ceiling = [(k / 50, 1 - k / 50) for k in range(51)]
        x = Axis(
            0,
            1,
            [(v, f"{100 * v:g}") for v in (0, 0.02, 0.1, 0.3, 0.7, 1)],
            "pass rate at the start, %",
            "share",
            root=True,
        )
        reach = difference_axis(y.low, max(y.high, 1.0), "gain, points")
        charts.append(
            Lines(
                "By initial pass rate",
                x,
                reach,
                [
                    Line("the most there is to gain", None, ceiling),
                    *(
                        Line(
                            run.label,
                            i,
                            [(at, gain.mean) for at, gain in fine[i]],
                            [(at, *gain.interval) for at, gain in fine[i] if gain.interval],
                            has_marks=True,
                        )
                        for i, run in enumerate(c.runs)
                    ),
                ],
            )
        )
    yield Figure(
        "matthew",
        "Height is what pass@1 gained from the start, in percentage points, with a 95 % interval: first by bucket, then from "
        "never to always solved, equally many prompts a point; the dashed line is the most there is to gain.",
        charts,
        _legend(c.runs),
    )
    if not any(fine):
        yield from _missing(c.runs, RATES)


def _ends(gain: Estimate) -> tuple[float, float]:
    return gain.interval or (gain.mean, gain.mean)


def _curves(c: Comparison) -> Iterator[Block]:
    histories = [run.of(c.split) for run in c.runs]
    if not any(histories):
        yield Prose("No evaluation has been made yet.", is_note=True)
        return
    x = _completions_axis(c.runs, max(rows[-1].completions for rows in histories if rows))
    yield Figure(
        "pass-rates",
        f"Height is pass@1 on {'held-out' if c.split == 'heldout' else 'training'} prompts of one difficulty; further right, "
        "more completions have been drawn for all prompts together: a higher line got more out of the same number.",
        [
            Lines(
                words(bucket),
                x,
                share_axis("pass@1"),
                [
                    Line(run.label, i, _points(c, rows, bucket))
                    for i, (run, rows) in enumerate(zip(c.runs, histories, strict=True))
                ],
            )
            for bucket in c.shown_buckets
        ],
        _legend(c.runs),
    )


def _points(c: Comparison, rows: Sequence[Evaluation], bucket: str) -> list[tuple[float, float]]:
    return [(row.completions, rate) for row in rows if (rate := c.rate(row, [bucket])) is not None]


# -------------------------------------------------------------------------- where samples went


def _piece(counts: Mapping[str, int], key: str) -> int:
    """The count of one of FATES."""
    if key == "contrast":
        return counts.get("trained", 0) - counts.get(NO_CONTRAST, 0)
    if key == "trouble":
        return counts.get("unverified", 0) + counts.get("failed", 0)
    return counts.get(key, 0)


def _spent(c: Comparison) -> Iterator[Block]:
    runs = c.runs
    if not any(run.drawn for run in runs):
        yield Prose("No completion has been drawn yet.", is_note=True)
        yield from _missing(runs, EVENTS)
        return
    buckets = [name for name in (*BUCKETS, UNPLACED) if any(run.fates(name)["drawn"] for run in runs)]
    if buckets == [UNPLACED]:
        buckets = [ALL]
    longest = max(run.fates(name)["drawn"] for run in runs for name in buckets)
    used = {key for key, _, _ in FATES for run in runs if _piece(run.fates(ALL), key)}
    yield Figure(
        "where-samples-went",
        "A bar is as long as the completions drawn for training prompts of that difficulty; its parts say what became of them, "
        "and only the solid part could teach something.",
        [
            Rows(
                run.label,
                i,
                [
                    (words(name), [(label, texture, _piece(run.fates(name), key)) for key, label, texture in FATES])
                    for name in buckets
                ],
                count_axis(longest, "completions"),
                "completions",
            )
            for i, run in enumerate(runs)
        ],
        _texture_legend(FATES, used),
    )
    header: list[tuple[str, int | None]] = [("run", None), ("difficulty", None), ("drawn", None)]
    columns = ("trained", NO_CONTRAST, "left_out", "filtered", "given_up", "stale", "unverified", "failed", "held")
    header += [("trained, no contrast" if name == NO_CONTRAST else words(name), None) for name in columns]
    shown = [*(name for name in buckets if name != ALL), ALL]
    rows = [
        [run.label, words(name), *(f"{run.fates(name)[column]:,}" for column in ("drawn", *columns))]
        for run in runs
        for name in shown
    ]
    strong = frozenset(i for i, row in enumerate(rows) if row[1] == ALL)
    yield Table(
        "Completions by what became of them: drawn is the sum of the others, except that those trained without contrast are "
        "among the trained ones.",
        header,
        rows,
        strong=strong,
        n_words=2,
    )
    yield Figure(
        "fates-over-time",
        "A slice shows what became of the completions that were settled around then, as shares; from left to right, more "
        "completions have been drawn.",
        [_stacked(run, i, runs, FATES, _fate_of_bin, "share of settled") for i, run in enumerate(runs)],
        _texture_legend(FATES, used - {"held"}),
    )
    if buckets != [ALL]:
        kinds = [(name, words(name), SHADES[name]) for name in reversed(buckets) if name != UNPLACED]
        yield Figure(
            "drawn-over-time",
            "A slice shows for which prompts completions were drawn around then, as shares: the stronger the "
            "colour, the harder.",
            [
                _stacked(run, i, runs, kinds, lambda bin, key: bin.counts[f"completions/{key}/drawn"], "share of drawn")
                for i, run in enumerate(runs)
            ],
            _texture_legend(kinds, set(buckets)),
        )
    yield from _missing(runs, EVENTS, BUCKET_FILE)


def _fate_of_bin(bin: Bin, key: str) -> int:
    prefix = f"completions/{ALL}/"
    return _piece({name.removeprefix(prefix): n for name, n in bin.counts.items() if name.startswith(prefix)}, key)


def _stacked(
    run: Run,
    i: int,
    runs: Sequence[Run],
    kinds: Sequence[tuple[str, str, Texture]],
    count: Callable[[Bin, str], int],
    y_label: str,
) -> Areas:
    """Shares of each bin by kind."""
    counts = {key: [max(count(bin, key), 0) for bin in run.bins] for key, _, _ in kinds}
    wholes = [sum(column) or 1 for column in zip(*counts.values(), strict=True)]
    edges = [bin.start for bin in run.bins] + ([run.bins[-1].end] if run.bins else [0])
    bands = [
        (name, texture, [n / whole for n, whole in zip(counts[key], wholes, strict=True)])
        for key, name, texture in kinds
    ]
    return Areas(run.label, i, _completions_axis(runs), edges, bands, y_label)


def _verdicts(c: Comparison) -> Iterator[Block]:
    runs = [run for run in c.runs if run.bins]
    if not runs:
        yield Prose("No group has been scored yet.", is_note=True)
        yield from _missing(c.runs, EVENTS)
        return
    used = {key for key, _, _ in OUTCOMES if any(bin.counts[key] for run in runs for bin in run.bins)}
    yield Figure(
        "verdicts",
        "A slice shows how the rounds that came back around then were rewarded, as shares: only those with contrast can teach "
        "something.",
        [
            _stacked(run, i, c.runs, OUTCOMES, lambda bin, key: bin.counts[key], "share of rounds")
            for i, run in enumerate(c.runs)
            if run.bins
        ],
        _texture_legend(OUTCOMES, used),
    )
    for run in runs:
        for sentence in run.tally.in_words():
            yield Prose(f"{run.label}: {sentence}.")


# -------------------------------------------------------------------------- retries and give-ups


def _retries(c: Comparison) -> Iterator[Block]:
    runs = c.runs
    histograms = [(run.tally.rounds_when_trained, run.tally.rounds_when_given_up) for run in runs]
    if not any(trained or given_up for trained, given_up in histograms):
        yield Prose("No group has been trained on or given up yet.", is_note=True)
        yield from _missing(runs, EVENTS)
        return
    most = max(max(trained | given_up, default=1) for trained, given_up in histograms)
    shown = min(most, MOST_ROUNDS_SHOWN)
    categories = [str(n) for n in range(1, shown + 1)]
    if most > shown:
        categories[-1] = f"{shown}+"
    lists = [[_by_rounds(counts, shown) for counts in pair] for pair in histograms]
    y = log_axis(max(max(row) for pair in lists for row in pair), "groups")
    yield Figure(
        "retries",
        "Height is how many groups were trained on, or given up, after so many rounds; on the scale each line is ten times the "
        "one below.",
        [
            Columns(
                run.label,
                categories,
                [
                    Column("trained on", i, "solid", lists[i][0]),
                    Column("given up", i, "hatch", lists[i][1]),
                ],
                "rounds",
                y,
                lambda value: f"{value:,.0f} groups",
                is_log=True,
            )
            for i, run in enumerate(runs)
        ],
        [("trained on", None, "solid"), ("given up", None, "hatch")],
    )
    rows = []
    for run, (trained, given_up) in zip(runs, histograms, strict=True):
        n = sum(trained.values())
        mean = f"{sum(r * k for r, k in trained.items()) / n:.2f}" if n else "–"
        never_right = sum(p.given_up > 0 and p.right == 0 for p in run.prompts.values())
        rows.append(
            [run.label, f"{run.tally.retries:,}", f"{n:,}", mean, f"{sum(given_up.values()):,}",
             f"{sum(p.given_up > 0 for p in run.prompts.values()):,}", f"{never_right:,}"]
        )  # fmt: skip
    yield Table(
        "Rounds asked again, groups trained on and given up, and the prompts behind the latter.",
        [
            (name, None)
            for name in (
                "run",
                "rounds asked again",
                "groups trained on",
                "rounds of such a group, mean",
                "groups given up",
                "prompts given up",
                "of those never right",
            )
        ],
        rows,
    )
    given_up_rows = given_up_list(runs)
    if not given_up_rows:
        yield Prose("No prompt was given up.")
        return
    yield Prose(
        "Prompts given up, those that were never right and cost most first. A prompt that many tries never solve may be too "
        "hard, or its gold answer may be wrong: bad labels collect here."
    )
    shown_rows = given_up_rows[:MOST_LISTED]
    index = {run.label: i for i, run in enumerate(runs)}
    links = {
        i: (index[row["run"]], row["prompt"])
        for i, row in enumerate(shown_rows)
        if row["prompt"] in runs[index[row["run"]]].samples
    }
    several = len(runs) > 1
    header = ["prompt", *(["run"] if several else []), "difficulty", "gold answer", "times given up", "visits"]
    rest = len(given_up_rows) - len(shown_rows)
    yield Table(
        "Training prompts that were given up at least once; tried and right are completions over all their visits."
        + (f" The first {len(shown_rows)} of {len(given_up_rows):,}; the files hold all." if rest else "")
        + (" A prompt with a link has its texts below." if links else ""),
        [(name, None) for name in (*header, "tried", "right")],
        [
            [
                row["prompt"],
                *([row["run"]] if several else []),
                words(row["bucket"] or "–"),
                _short(row["answer"] or "–"),
                f"{row['times_given_up']:,}",
                f"{row['visits']:,}",
                f"{row['tried']:,}",
                f"{row['right']:,}",
            ]
            for row in shown_rows
        ],
        links=links,
        n_words=4 if several else 3,
    )
    yield Special("exports")
    yield from _missing(runs, SAMPLES)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _by_rounds(counts: Mapping[int, int], shown: int) -> list[float]:
    values = [0.0] * shown
    for rounds, n in counts.items():
        values[min(max(rounds, 1), shown) - 1] += n
    return values


def given_up_list(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a run and prompt that was given up there; those that were never right and cost most first."""
    rows = [
        {
            "run": run.label,
            "prompt": prompt_id,
            "bucket": run.buckets.get(prompt_id),
            "times_given_up": prompt.given_up,
            "visits": prompt.visits,
            "tried": prompt.tried,
            "right": prompt.right,
            "answer": run.samples[prompt_id].answer if prompt_id in run.samples else None,
        }
        for run in runs
        for prompt_id, prompt in run.prompts.items()
        if prompt.given_up
    ]
    return sorted(rows, key=lambda row: (row["right"] > 0, -row["tried"], row["prompt"], row["run"]))


# -------------------------------------------------------------------------- ages and idle shares


def _ages(c: Comparison) -> Iterator[Block]:
    known = [{age: n for age, n in run.tally.ages.items() if age >= 0} for run in c.runs]
    if not any(known):
        yield Prose("Nothing with a known age has been trained on yet.", is_note=True)
        yield from _missing(c.runs, EVENTS)
        return
    most = max(max(ages, default=0) for ages in known)
    shown = min(most, MOST_AGES)
    categories = [str(age) for age in range(shown + 1)]
    if most > shown:
        categories[-1] = f"{shown}+"
    columns = []
    for i, (run, ages) in enumerate(zip(c.runs, known, strict=True)):
        values = [0.0] * (shown + 1)
        for age, n in ages.items():
            values[min(age, shown)] += n / sum(ages.values())
        columns.append(Column(run.label, i, "solid", values))
    highest = max(value or 0.0 for column in columns for value in column.values)
    yield Figure(
        "ages",
        "Height is the share of trained completions that were so many policy versions old when they were trained on: further "
        "left is fresher.",
        [
            Columns(
                "Age",
                categories,
                columns,
                "age in policy versions",
                share_axis("share of trained", next(top for top in (0.2, 0.4, 0.6, 0.8, 1.0) if highest <= top + 1e-9)),
                percent,
            )
        ],
        _legend(c.runs),
    )
    rows = []
    for run, ages in zip(c.runs, known, strict=True):
        n = sum(ages.values())
        mean = sum(age * k for age, k in ages.items()) / n if n else None
        rows.append(
            [run.label, "–" if mean is None else f"{mean:.2f}", str(max(ages, default=0)), f"{run.tally.ages[-1]:,}",
             f"{run.fates(ALL)['stale']:,}"]
        )  # fmt: skip
    header = ("run", "mean age, versions", "oldest, versions", "age unknown, completions", "stale, completions")
    yield Table("Ages of trained completions, and completions that became too old.", [(n, None) for n in header], rows)


def _idle(c: Comparison) -> Iterator[Block]:
    rows = []
    for run in c.runs:
        idle = _idle_shares(run)
        rate = run.drawn / run.seconds if run.seconds else None
        rows.append(
            [run.label, percent(idle.get("engine")), percent(idle.get("learner")), f"{run.seconds:,.0f} s",
             f"{run.steps:,}", "–" if rate is None else f"{rate:,.0f}"]
        )  # fmt: skip
    yield Table(
        "How much of the time each side waited for the other, without the first tenth of the run; and how long it all took.",
        [
            (n, None)
            for n in ("run", "engine idle", "trainer idle", "duration", "optimizer steps", "completions a second")
        ],
        rows,
    )
    if any(run.pace for run in c.runs):
        x = _completions_axis(c.runs)
        yield Figure(
            "idle",
            "Height is the share of time in which that side had nothing to do: both low is a run that is well balanced.",
            [
                Lines(
                    title,
                    x,
                    share_axis("share of time"),
                    [
                        Line(run.label, i, [(pace.completions, getattr(pace, name)) for pace in run.pace])
                        for i, run in enumerate(c.runs)
                    ],
                )
                for title, name in (("Engine", "engine_idle"), ("Trainer", "learner_idle"))
            ],
            _legend(c.runs),
        )
    yield from _missing(c.runs, METRICS)


def _idle_shares(run: Run) -> Mapping[str, float]:
    """Those of the summary; else those of metrics.jsonl, of its later nine tenths."""
    if run.summary and run.summary.get("idle"):
        return dict(run.summary["idle"])
    steady = run.pace[int(len(run.pace) * STEADY_FROM) :]
    seconds = sum(pace.seconds for pace in steady)
    if not seconds:
        return {}
    return {
        "engine": sum(pace.seconds * pace.engine_idle for pace in steady) / seconds,
        "learner": sum(pace.seconds * pace.learner_idle for pace in steady) / seconds,
    }


# -------------------------------------------------------------------------- regressions


def _regressions(c: Comparison) -> Iterator[Block]:
    runs = c.runs
    twice = [[p for p in run.prompts.values() if p.visits > 1] for run in runs]
    if any(twice):
        yield Table(
            "Training prompts by the first round of their visits. Such a round is a handful of completions: some of these "
            "changes are chance, which moves prompts both ways alike.",
            [
                (n, None)
                for n in (
                    "run",
                    "visited twice or more",
                    "all right once, none right at the last visit",
                    "none right once, all right at the last visit",
                )
            ],
            [
                [
                    run.label,
                    f"{len(seen):,}",
                    f"{sum(p.got_lost for p in seen):,}",
                    f"{sum(p.was_found for p in seen):,}",
                ]
                for run, seen in zip(runs, twice, strict=True)
            ],
        )
    else:
        yield Prose(
            "No training prompt has been visited twice: whether one was lost cannot be seen there.", is_note=True
        )
        yield from _missing(runs, EVENTS)
    rated = [
        [run.label, "held out" if split == "heldout" else "training", *_changes(run, split)]
        for run in runs
        for split in ("heldout", "train")
        if len([row for row in run.of(split) if row.rates]) > 1
    ]
    if rated:
        yield Table(
            f"Prompts by their pass rates at the evaluations: rose or fell by more than {100 * CHANGED:.0f} points from the "
            f"start to the end; lost: above {percent(SOLVED, 0)} at some evaluation, below {percent(UNSOLVED, 0)} at the end.",
            [(n, None) for n in ("run", "prompts", "evaluated", "rose", "fell", "lost")],
            rated,
            n_words=2,
        )
    yield from _missing(runs, RATES)
    yield from _lost(c)


def _changes(run: Run, split: str) -> list[str]:
    rows = [row for row in run.of(split) if row.rates]
    start, end = rows[0].rates, rows[-1].rates
    both = [key for key in start if key in end]
    rose = sum(end[key] - start[key] > CHANGED for key in both)
    fell = sum(start[key] - end[key] > CHANGED for key in both)
    return [f"{n:,}" for n in (len(both), rose, fell, len(_lost_by_rate(run, split)))]


def _lost_by_rate(run: Run, split: str) -> list[tuple[str, float, float]]:
    """(prompt, highest rate, last rate) of those that were solved and are not."""
    rows = [row for row in run.of(split) if row.rates]
    last = rows[-1].rates
    best = {key: max(row.rates.get(key, 0.0) for row in rows) for key in last}
    lost = [(key, best[key], last[key]) for key in last if best[key] > SOLVED and last[key] < UNSOLVED]
    return sorted(lost, key=lambda row: (row[2] - row[1], row[0]))


def _lost(c: Comparison) -> Iterator[Block]:
    listed: list[tuple[int, str, str, str]] = []  # run, prompt, seen in, what
    for i, run in enumerate(c.runs):
        for split in ("heldout", "train"):
            if any(row.rates for row in run.of(split)):
                listed += [
                    (i, key, "pass rate, held out" if split == "heldout" else "pass rate, training",
                     f"{percent(best, 0)} at best, {percent(last, 0)} at the end")
                    for key, best, last in _lost_by_rate(run, split)
                ]  # fmt: skip
        listed += [
            (
                i,
                key,
                "first rounds",
                f"all right at version {p.all_right_at}, none of {p.last_n} at version {p.last_at}",
            )
            for key, p in run.prompts.items()
            if p.got_lost
        ]
    if not listed:
        return
    shown = listed[:MOST_LISTED]
    yield Table(
        "Prompts that were solved and are not now"
        + (f"; the first {len(shown)} of {len(listed):,}." if len(listed) > len(shown) else "."),
        [("prompt", None), ("run", None), ("difficulty", None), ("seen in", None), ("what", None)],
        [[key, c.runs[i].label, words(c.runs[i].buckets.get(key, "–")), where, what] for i, key, where, what in shown],
        links={k: (i, key) for k, (i, key, _, _) in enumerate(shown) if key in c.runs[i].samples},
        n_words=5,
    )


# -------------------------------------------------------------------------- texts and settings


def _texts(c: Comparison) -> Iterator[Block]:
    if not any(run.samples for run in c.runs):
        yield from _missing(c.runs, SAMPLES)
        if not any(SAMPLES in run.missing for run in c.runs):
            yield Prose("No completion has been kept as text yet.", is_note=True)
        return
    yield Prose(
        "Texts of some training prompts, chosen by the seed, and the last round of prompts that were given up. Choose a prompt "
        "to see its completions, oldest first."
    )
    for run in c.runs:
        if run.n_prompts_without_texts:
            yield Prose(f"{run.label}: {run.n_prompts_without_texts:,} more prompts are in {SAMPLES}.", is_note=True)
    yield from _missing(c.runs, SAMPLES)
    yield Special("browser")


def _settings(c: Comparison) -> Iterator[Block]:
    flat = [dict(_flatten(run.config or {})) for run in c.runs]
    if not any(flat):
        yield from _missing(c.runs, CONFIG)
        return
    keys = list({key: None for row in flat for key in row})
    header: list[tuple[str, int | None]] = [("setting", None), *((run.label, i) for i, run in enumerate(c.runs))]
    rows = [[key, *(row.get(key, "–") for row in flat)] for key in keys]
    n_words = 1 + len(flat)
    if len(c.runs) == 1:
        yield Table("Settings of the run.", header, rows, n_words=n_words)
    else:
        differ = [row for row, run_has in ((r, r[1:]) for r in rows) if len(set(run_has)) > 1]
        if differ:
            yield Table(
                f"Settings that differ; {len(rows) - len(differ)} others are equal. – stands for a setting that the run does "
                "not have.",
                header,
                differ,
                n_words=n_words,
            )
        else:
            yield Prose(f"All {len(rows)} settings are equal.")
    yield from _missing(c.runs, CONFIG)


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)
