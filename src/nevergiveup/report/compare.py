"""What runs say against each other: differences with intervals, and the headline. Layer 3. Standard library only.

Runs are compared after equal numbers of completions, on the same prompts. Intervals are paired bootstraps over prompts
(Efron, 1979; percentiles): they say how far another set of prompts could move a figure, not what another seed of the
training would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nevergiveup.evaluate import BUCKETS, bootstrap_interval
from nevergiveup.metrics import ALL
from nevergiveup.report.runs import NO_CONTRAST, Evaluation, Run

HARD: tuple[str, ...] = ("hard", "extra_hard")
"""Hard prompts, together: solved by the policy at the start less than .3 of the time."""

SAME_BUDGET = 0.05
"""Evaluations up to this share apart in completions count as made after equal numbers."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` prompts, with a 95 % interval; none where there are no rates prompt by prompt, or fewer than 2."""

    mean: float
    n: int | None
    interval: tuple[float, float] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def estimate(values: Sequence[float]) -> Estimate | None:
    return Estimate(sum(values) / len(values), len(values), bootstrap_interval(values)) if values else None


class Comparison:
    """Several runs side by side. The buckets are those of the first run that has any, for all of them.

    split: prompts that are compared, "heldout" where there are such. ends: for each run its evaluation at the common budget,
    None for a run without any; starts likewise.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.bucket_run = next((run for run in runs if run.buckets), None)
        self.buckets: Mapping[str, str] = self.bucket_run.buckets if self.bucket_run else {}
        self.split = "heldout" if any(run.of("heldout") for run in runs) else "train"
        histories = [run.of(self.split) for run in runs]
        self.budget = min((rows[-1].completions for rows in histories if rows), default=0)
        self.starts = [rows[0] if rows else None for rows in histories]
        self.ends = [_nearest(rows, self.budget) for rows in histories]
        self._differences: dict[tuple[int, int, tuple[str, ...]], Estimate | None] = {}

    @property
    def shown_buckets(self) -> list[str]:
        """Those that have prompts in the compared split; last "all"."""
        names = {name for row in self.ends if row for name in row.means}
        return [name for name in (*BUCKETS, ALL) if name in names]

    @property
    def hard_buckets(self) -> tuple[str, ...]:
        """The hard buckets, or "all" where difficulty is not known."""
        return tuple(name for name in HARD if name in self.shown_buckets) or (ALL,)

    @property
    def has_equal_budgets(self) -> bool:
        return all(abs(row.completions - self.budget) <= SAME_BUDGET * max(self.budget, 1) for row in self.ends if row)

    @property
    def starts_differ(self) -> bool:
        """Whether some run began with another policy, as far as its pass rates tell."""
        means = [row.means.get(ALL) for row in self.starts if row]
        return len({None if mean is None else round(mean, 6) for mean in means}) > 1

    def n_prompts(self, buckets: Sequence[str]) -> int | None:
        row = next((row for row in self.ends if row and row.rates), None)
        return sum(self._is_in(prompt_id, buckets) for prompt_id in row.rates) if row else None

    def rate(self, row: Evaluation | None, buckets: Sequence[str]) -> float | None:
        """Mean pass rate of the prompts in some buckets; from means alone only for a single bucket."""
        if row is None:
            return None
        if row.rates:
            values = [rate for prompt_id, rate in row.rates.items() if self._is_in(prompt_id, buckets)]
            return sum(values) / len(values) if values else None
        return row.means.get(buckets[0]) if len(buckets) == 1 else self._pooled(row, buckets)

    def _pooled(self, row: Evaluation, buckets: Sequence[str]) -> float | None:
        """The means of several buckets weighed by their numbers of prompts, where those are known."""
        sizes: Mapping[str, Mapping[str, int]] = next(
            (run.summary["n_by_bucket"] for run in self.runs if run.summary and "n_by_bucket" in run.summary), {}
        )
        n = {name: sizes.get(self.split, {}).get(name, 0) for name in buckets if name in row.means}
        whole = sum(n.values())
        return sum(row.means[name] * n[name] for name in n) / whole if whole else None

    def gain(self, i: int, buckets: Sequence[str]) -> Estimate | None:
        """Of run i, from its start to the common budget."""
        return self._difference(self.starts[i], self.ends[i], buckets)

    def lead(self, i: int, j: int, buckets: Sequence[str]) -> Estimate | None:
        """By how much run i is ahead of run j at the common budget."""
        return self._difference(self.ends[j], self.ends[i], buckets)

    def _difference(self, a: Evaluation | None, b: Evaluation | None, buckets: Sequence[str]) -> Estimate | None:
        if a is None or b is None:
            return None
        if a.rates and b.rates:
            which = (id(a), id(b), tuple(buckets))
            if which not in self._differences:  # resampling takes its time
                both = [key for key in a.rates if key in b.rates and self._is_in(key, buckets)]
                self._differences[which] = estimate([b.rates[key] - a.rates[key] for key in both])
            return self._differences[which]
        before, after = self.rate(a, buckets), self.rate(b, buckets)
        return None if before is None or after is None else Estimate(after - before, self.n_prompts(buckets))

    def _is_in(self, prompt_id: str, buckets: Sequence[str]) -> bool:
        return ALL in buckets or self.buckets.get(prompt_id) in buckets

    def gains_by_rate(self, i: int, n_bins: int) -> list[tuple[float, Estimate]]:
        """(mean initial pass rate, gain) of about equally many prompts each, by initial pass rate: finer than buckets. Empty
        without rates prompt by prompt."""
        start, end = self.starts[i], self.ends[i]
        if start is None or end is None or start is end or not start.rates or not end.rates:
            return []
        initial = self.bucket_run.initial if self.bucket_run else {}
        triples = sorted(
            (initial.get(key, rate), rate, end.rates[key]) for key, rate in start.rates.items() if key in end.rates
        )
        n_bins = min(n_bins, max(len(triples) // 8, 1))
        out = []
        for k in range(n_bins):
            part = triples[k * len(triples) // n_bins : (k + 1) * len(triples) // n_bins]
            gain = estimate([after - before for _, before, after in part])
            if gain is not None:
                out.append((sum(first for first, _, _ in part) / len(part), gain))
        return out

    def drawn(self, i: int, buckets: Sequence[str]) -> int:
        return sum(self.runs[i].fates(bucket)["drawn"] for bucket in buckets)

    def knows_training(self, i: int) -> bool:
        """Whether run i tells its training prompts apart by difficulty."""
        return self.drawn(i, BUCKETS) > 0

    def teaching(self, i: int, buckets: Sequence[str]) -> int:
        """Completions that were trained on in groups with contrast: those that could teach."""
        fates = [self.runs[i].fates(bucket) for bucket in buckets]
        return sum(counts["trained"] - counts[NO_CONTRAST] for counts in fates)

    def order(self) -> list[int]:
        """Runs with an evaluation, the best on hard prompts first."""
        rates = [self.rate(row, self.hard_buckets) for row in self.ends]
        return sorted((i for i, rate in enumerate(rates) if rate is not None), key=lambda i: -(rates[i] or 0.0))


def _nearest(rows: Sequence[Evaluation], completions: int) -> Evaluation | None:
    """Of two that are equally near, the later one."""
    return min(rows, key=lambda row: (abs(row.completions - completions), -row.step), default=None)


# -------------------------------------------------------------------------- in words


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def points(value: float, digits: int = 1) -> str:
    """A difference of shares, in percentage points, with its sign."""
    rounded = round(100 * value, digits)
    return f"{abs(rounded):.{digits}f}" if not rounded else f"{'+' if rounded > 0 else '−'}{abs(rounded):.{digits}f}"


def span(interval: tuple[float, float] | None) -> str:
    """An interval in percentage points; empty for none."""
    return f"{points(interval[0])} to {points(interval[1])}" if interval else ""


def headline(c: Comparison) -> tuple[str, list[str]]:
    """One sentence on which run was better on hard prompts, and sentences on why. How far to trust it: `caveats`."""
    order = c.order()
    if not order:
        drawn = ", ".join(f"{run.drawn:,} completions drawn by {run.label}" for run in c.runs)
        return f"Nothing has been evaluated: {drawn}.", ["Without an evaluation no pass rate is known."]
    if len(c.runs) == 1:
        return _alone(c)
    if len(order) == 1:
        rest = ", ".join(run.label for i, run in enumerate(c.runs) if i not in order)
        return (
            f"Only {c.runs[order[0]].label} has been evaluated on {_whom(c)}.",
            [f"There is nothing to compare it with: no evaluation of {rest}."],
        )
    best, second = order[0], order[1]
    lead = c.lead(best, second, c.hard_buckets)
    rates = [percent(c.rate(c.ends[i], c.hard_buckets)) for i in (best, second)]
    names = [c.runs[i].label for i in (best, second)]
    if lead is None:  # no prompt in common
        return f"{names[0]} and {names[1]} were evaluated on different prompts: they cannot be compared.", []
    if lead.is_clear:
        first = f"{names[0]} was better on {_whom(c)}: {rates[0]} solved, {rates[1]} with {names[1]}."
    elif lead.interval is None:
        first = f"{names[0]} ended ahead on {_whom(c)}: {rates[0]} solved, {rates[1]} with {names[1]}."
    else:
        first = (
            f"No difference on {_whom(c)} that these samples can tell: {names[0]} {rates[0]}, {names[1]} {rates[1]}."
        )
    return first, [_lead_in_words(c, lead), *_spending(c, best, second), *_elsewhere(c, best, second)]


def _whom(c: Comparison) -> str:
    return "hard prompts" if c.hard_buckets != (ALL,) else "all prompts"


def _lead_in_words(c: Comparison, lead: Estimate) -> str:
    prompts = f"{lead.n:,} {_split(c)} prompts" if lead.n else f"{_split(c)} prompts"
    if lead.interval:
        return (
            f"The difference is {points(lead.mean)} percentage points (95 % interval {span(lead.interval)}) "
            f"over {prompts}, after {'' if c.has_equal_budgets else 'about '}{c.budget:,} completions each."
        )
    return (
        f"The difference is {points(lead.mean)} percentage points over {prompts}; how sure that is cannot be said, because "
        "there are no pass rates prompt by prompt (rates.jsonl)."
    )


def _split(c: Comparison) -> str:
    return "held-out" if c.split == "heldout" else "training"


def _spending(c: Comparison, *which: int) -> list[str]:
    """Where the completions went, and how much of it could teach anything."""
    out = []
    which = tuple(i for i in which if c.drawn(i, [ALL]))
    by_difficulty = c.hard_buckets != (ALL,) and all(c.knows_training(i) for i in which)
    if which and by_difficulty:
        hard = [
            f"{c.runs[i].label} spent {percent(c.drawn(i, c.hard_buckets) / c.drawn(i, [ALL]), 0)} of its completions on hard "
            f"prompts ({c.drawn(i, c.hard_buckets):,} of {c.drawn(i, [ALL]):,}) and {c.drawn(i, ['easy']):,} on easy ones"
            for i in which
        ]
        out.append("; ".join(hard) + ".")
    parts = []
    for i in which:
        trained, teaching = c.runs[i].fates(ALL)["trained"], c.teaching(i, [ALL])
        of_hard = f"; {c.teaching(i, c.hard_buckets):,} of them for hard prompts" if by_difficulty else ""
        share = percent(teaching / trained if trained else 0.0, 0)
        parts.append(
            f"{c.runs[i].label} trained on {teaching:,} such completions ({share} of all it trained on{of_hard})"
        )
    if parts:
        out.append(f"Only groups with contrast teach: {', '.join(parts)}.")
    return out


def _elsewhere(c: Comparison, best: int, second: int) -> list[str]:
    """What the better one lost on the other buckets, or that it lost nothing that can be told."""
    out = []
    for bucket in c.shown_buckets:
        if bucket in c.hard_buckets or bucket == ALL:
            continue
        lead = c.lead(best, second, [bucket])
        if lead is None or (lead.interval is not None and not lead.is_clear):
            continue
        side = "ahead" if lead.mean > 0 else "behind"
        interval = f" ({span(lead.interval)})" if lead.interval else ""
        out.append(f"{abs(100 * lead.mean):.1f} points {side} on {bucket} prompts{interval}")
    if out:
        return [f"Elsewhere {c.runs[best].label} is {', '.join(out)}."]
    others = [name for name in c.shown_buckets if name not in (*c.hard_buckets, ALL)]
    if others and c.n_prompts([ALL]):
        return [f"On {' and '.join(others)} prompts these samples tell no difference."]
    return []


def caveats(c: Comparison) -> list[str]:
    """How far figures can be trusted."""
    out = []
    several = len(c.runs) > 1
    if not c.has_equal_budgets:
        counts = ", ".join(
            f"{run.label} after {row.completions:,}" for run, row in zip(c.runs, c.ends, strict=True) if row
        )
        out.append(f"The evaluations that are compared were not made after equal numbers of completions: {counts}.")
    running = [run.label for run in c.runs if run.summary is None]
    if running:
        out.append(
            f"{' and '.join(running)}: no summary.json, so in progress or killed; the figures are those up to now."
        )
    if several and c.starts_differ:
        starts = ", ".join(
            f"{run.label} {percent(row.means.get(ALL))}" for run, row in zip(c.runs, c.starts, strict=True) if row
        )
        out.append(f"The runs did not begin with equal policies: at the start {starts} of all prompts solved.")
    if c.bucket_run is None:
        out.append(
            "The difficulty of the prompts at the start is not known (no buckets.json): only all prompts together."
        )
    elif c.bucket_run.bucket_source == "sampled":
        out.append(
            "Buckets come from samples that are also the start of the curves: prompts that failed there by chance show a "
            "gain without any learning. Differences between runs are free of that."
        )
    if any(row and row.n for row in c.ends):
        n = max(row.n or 0 for row in c.ends if row)
        out.append(f"Pass rates are from {n} completions a prompt; the intervals hold that noise, too.")
    if several and any(row and row.rates for row in c.ends):
        out.append("Intervals say what other prompts would change, not what training again with another seed would.")
    return out


def _alone(c: Comparison) -> tuple[str, list[str]]:
    run, start, end = c.runs[0], c.starts[0], c.ends[0]
    rates = [c.rate(row, c.hard_buckets) for row in (start, end)]
    whom = _whom(c).capitalize()
    gain = c.gain(0, c.hard_buckets)
    if start is end or gain is None:
        return f"{whom}: {percent(rates[1])} solved; there is one evaluation only.", []
    words = f"{whom} went from {percent(rates[0])} to {percent(rates[1])} solved"
    if gain.interval and not gain.is_clear:
        first = f"No change on {_whom(c)} that these samples can tell: {percent(rates[0])}, then {percent(rates[1])} solved."
    else:
        first = f"{words} in {end.completions if end else 0:,} completions."
    interval = f" (95 % interval {span(gain.interval)})" if gain.interval else ""
    prompts = f" over {gain.n:,} {_split(c)} prompts" if gain.n else ""
    sentences = [f"The gain is {points(gain.mean)} percentage points{interval}{prompts}."]
    return first, [*sentences, *_spending(c, 0), *(f"{words}." for words in run.tally.in_words()[:1])]
