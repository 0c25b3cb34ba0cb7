"""A run folder as a report needs it: aggregates, read once and in one pass, of files that may be long, cut or missing.

Layer 3. Standard library only. events.jsonl may have millions of lines: counts are kept, never events. What is missing is
named in `Run.missing`, in words that the page shows; what is damaged raises ValueError with file and line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nevergiveup.evaluate import BUCKETS
from nevergiveup.events import (
    Dispatched,
    Failed,
    Judged,
    Planned,
    Published,
    Trained,
    WentStale,
    read_events,
)
from nevergiveup.metrics import ALL, Tally
from nevergiveup.types import Exact

N_BINS = 48
"""Points of a curve over time, at most; half as many at least, once there are so many completions."""
MOST_ROUNDS = 120
"""Rounds of one prompt whose texts are kept."""
MOST_PROMPTS = 400
"""Prompts whose texts are kept."""
MOST_TEXT = 500_000
"""Characters of completions on the page, for one run."""
SHORTEST_CUT = 160
"""Texts are cut to no less than this; rather, fewer are kept."""

EVENTS, METRICS, SUMMARY, CONFIG = "events.jsonl", "metrics.jsonl", "summary.json", "config.json"
BUCKET_FILE, RATES, SAMPLES = "buckets.json", "rates.jsonl", "samples.jsonl"

UNPLACED = "unknown"
"""Stands for the training prompts that have no bucket."""
NO_CONTRAST = "no_contrast"
"""Besides the fates that a Tally counts: how many of the trained ones were in a group whose rewards were all equal."""

Split = Literal["heldout", "train"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Pass rates in [0, 1] after `completions` were drawn. means: by bucket, and "all". rates: prompt by prompt, where they
    were kept. n: samples behind each rate; None when it is exact, or not known."""

    split: str
    step: int
    completions: int
    means: Mapping[str, float]
    rates: Mapping[str, float] = field(default_factory=dict)
    n: int | None = None


@dataclass(slots=True)
class Visits:
    """What the events say of one training prompt. right: rewards that are 1 (or more). The first round of a visit is the
    fair look at a prompt: whether later rounds are drawn hangs on its outcome."""

    visits: int = 0
    tried: int = 0
    right: int = 0
    given_up: int = 0
    all_right_at: int | None = None
    """Policy version when all of a first round were right, the last time."""
    none_right_at: int | None = None
    """Policy version when none of a first round was right, the first time."""
    last_at: int = -1
    last_right: int = 0
    last_n: int = 0

    @property
    def is_all_right(self) -> bool:
        return self.last_n > 0 and self.last_right == self.last_n

    @property
    def got_lost(self) -> bool:
        """All right in the first round of some visit, none right in the first round of the last one."""
        return self.last_n > 0 and self.last_right == 0 and self.all_right_at is not None

    @property
    def was_found(self) -> bool:
        """The reverse: none right at some visit, all right at the last one."""
        return self.is_all_right and self.none_right_at is not None


@dataclass(slots=True)
class Sample:
    """One completion. reward: None for no verdict. advantage: None unless it was trained on, in step `step`; a completion
    that was left out of its batch has a step and no advantage."""

    key: str
    reward: float | None
    reason: str
    version: int | None
    is_cut: bool
    n_tokens: int
    text: str
    advantage: float | None = None
    step: int | None = None


@dataclass(slots=True)
class Round:
    request: int
    visit: int
    number: int
    t: float
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """Texts of one prompt. n_dropped: rounds that are in the file and not here, evenly from the middle."""

    text: str = ""
    answer: str = ""
    rounds: list[Round] = field(default_factory=list)
    n_dropped: int = 0

    def thin(self, most: int) -> None:
        """Drops every other round between the first and the newest until there are at most `most`, which is 4 or more."""
        while len(self.rounds) > most:
            n_newest = most // 4
            middle = self.rounds[1:-n_newest]
            kept = [self.rounds[0], *middle[1::2], *self.rounds[-n_newest:]]
            self.n_dropped += len(self.rounds) - len(kept)
            self.rounds = kept


@dataclass(slots=True)
class Bin:
    """What happened while completions `start` to `end` were drawn: rounds by their rewards, and completions under the names
    of `Tally.figures`."""

    start: int
    end: int
    counts: Counter[str]


@dataclass(slots=True)
class Pace:
    """Of an interval that ends at `completions`: shares in [0, 1] of its seconds."""

    completions: float
    seconds: float
    engine_idle: float
    learner_idle: float


@dataclass(slots=True)
class Run:
    """One run. `label` is set by whoever shows several of them together."""

    folder: Path
    label: str = ""
    config: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    buckets: dict[str, str] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)
    """Pass rates that the buckets are from."""
    bucket_source: str = ""
    tally: Tally = field(default_factory=Tally)
    no_contrast: Counter[str] = field(default_factory=Counter)
    """Bucket -> trained completions in groups whose rewards were all equal."""
    bins: list[Bin] = field(default_factory=list)
    prompts: dict[str, Visits] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    pace: list[Pace] = field(default_factory=list)
    samples: dict[str, Sampled] = field(default_factory=dict)
    n_prompts_without_texts: int = 0
    """Prompts that samples.jsonl has and that were too many."""
    seconds: float = 0.0
    steps: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    """File name -> what cannot be shown without it."""

    @property
    def drawn(self) -> int:
        return self.tally.completions.get(ALL, Counter())["drawn"]

    @property
    def strategy(self) -> str:
        section = (self.config or {}).get("strategy")
        return str(section.get("name", "")) if isinstance(section, dict) else ""

    def of(self, split: str) -> list[Evaluation]:
        """Evaluations of one split, by the completions drawn before them."""
        return [row for row in self.evaluations if row.split == split]

    def fates(self, bucket: str) -> Counter[str]:
        """Completions of a bucket by what became of them: "drawn", the fates of a Tally, and "held", which are in flight,
        open or ready. Of "trained", those in groups without contrast are counted under NO_CONTRAST once more."""
        if bucket == UNPLACED:
            rest = self.fates(ALL)
            rest.subtract(sum((self.fates(name) for name in BUCKETS), Counter[str]()))
            return rest
        counts = Counter(self.tally.completions.get(bucket, Counter()))
        settled = sum(n for name, n in counts.items() if name != "drawn")
        counts["held"] = max(counts["drawn"] - settled, 0)
        counts[NO_CONTRAST] = self.no_contrast[bucket]
        return counts


def read_run(folder: Path) -> Run:
    """Everything a report says of a run. Raises ValueError for a folder that is none, and for damaged files."""
    _check_is_run(folder)
    run = Run(folder, folder.resolve().name)
    run.config = _object(folder / CONFIG)
    run.summary = _object(folder / SUMMARY)
    _read_buckets(run)
    _read_events(run)
    _read_evaluations(run)
    _read_metrics(run)
    _read_samples(run)
    for name, consequence in (
        (CONFIG, "settings cannot be shown"),
        (SUMMARY, "the run is in progress, or was killed; figures are those up to now"),
        (BUCKET_FILE, "" if run.buckets else "nothing can be told apart by difficulty"),
        (EVENTS, "where samples went is not known"),
        (METRICS, "idle shares over time are not known"),
        (RATES, "pass rates are known as means only: no intervals, no curve over single prompts"),
        (SAMPLES, "there are no texts to browse"),
    ):
        if consequence and not (folder / name).is_file():
            run.missing[name] = consequence
    return run


def _check_is_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a run, as --out of ngu train named it")
    if not any((folder / name).is_file() for name in (CONFIG, EVENTS)):
        inside = sorted(
            {str(path.parent) for pattern in (EVENTS, f"*/{EVENTS}") for path in folder.glob(f"*/{pattern}")}
        )
        remedy = f"; it contains runs: {' '.join(inside[:4])}" if inside else ""
        raise ValueError(f"{folder} is no run folder: it has neither {CONFIG} nor {EVENTS}{remedy}")


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; it is damaged: remove it to have a report without it") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} holds no JSON object; it is damaged: remove it to have a report without it")
    return row


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSON Lines file; none where there is no such file. A last line without its end, as a
    killed run leaves it, is left out; any other line that is no object raises ValueError."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}: {line[:80]!r}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: no JSON object: {line[:80]!r}")
            yield number, row


def _read_buckets(run: Run) -> None:
    """From buckets.json; of an older run from its newest checkpoint."""
    path = run.folder / BUCKET_FILE
    row = _object(path) or _checkpoint(run)
    if row is None:
        return
    buckets, rates = row.get("buckets"), row.get("rates", row.get("initial_rates", {}))
    if not isinstance(buckets, dict) or not isinstance(rates, dict):
        raise ValueError(f'{path}: "buckets" and "rates" must be objects from prompt id to bucket and to pass rate')
    unknown = next((name for name in buckets.values() if name not in BUCKETS), None)
    if unknown is not None:
        raise ValueError(f"{path}: {unknown!r} is no bucket: {', '.join(BUCKETS)}")
    run.buckets, run.initial, run.bucket_source = buckets, rates, str(row.get("source", ""))


# -------------------------------------------------------------------------- events


class Timeline:
    """What a tally counted over completions drawn, in bins that are merged in twos when they are too many."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._width = 1
        self._start = 0
        self._before: Counter[str] = Counter()
        self._bins: list[Bin] = []

    def reached(self, drawn: int) -> None:
        """After an event that settled something, with so many completions drawn."""
        if drawn - self._start < self._width:
            return
        self._bins.append(self._cut(drawn))
        if len(self._bins) > N_BINS:
            pairs = [self._bins[i : i + 2] for i in range(0, len(self._bins), 2)]
            self._bins = [
                Bin(pair[0].start, pair[-1].end, sum((b.counts for b in pair), Counter[str]())) for pair in pairs
            ]
            self._width = max(bin.end - bin.start for bin in self._bins)

    def _cut(self, drawn: int) -> Bin:
        """What came since the last cut."""
        counts = _counts(self._run)
        bin = Bin(self._start, drawn, counts - self._before)
        self._start, self._before = drawn, counts
        return bin

    def bins(self, drawn: int) -> list[Bin]:
        rest = self._cut(drawn)
        if not rest.counts:
            return self._bins
        if self._bins and rest.end - rest.start < self._width / 2:  # too little to stand alone
            last = self._bins.pop()
            rest = Bin(last.start, rest.end, last.counts + rest.counts)
        return [*self._bins, rest]


def _counts(run: Run) -> Counter[str]:
    """What can be added up: rounds by their rewards, and completions by bucket and fate."""
    tally = run.tally
    counts = Counter(
        varied=tally.varied, all_right=tally.all_right, all_wrong=tally.all_wrong, flat=tally.flat,
        no_verdict=tally.no_verdict,
    )  # fmt: skip
    for bucket, by_fate in tally.completions.items():
        counts.update({f"completions/{bucket}/{fate}": n for fate, n in by_fate.items()})
    counts.update({f"completions/{bucket}/{NO_CONTRAST}": n for bucket, n in run.no_contrast.items()})
    return counts


def _read_events(run: Run) -> None:
    tally = run.tally = Tally(run.buckets)
    timeline = Timeline(run)
    spans: dict[tuple[str, int], tuple[Exact, Exact]] = {}  # of open chains: lowest and highest reward
    drawn, last_t = 0, 0.0
    path = run.folder / EVENTS
    for t, event in read_events(path) if path.is_file() else ():
        last_t = t if t is not None else last_t
        tally.add(event)
        match event:
            case Dispatched():
                drawn += event.n
                continue
            case Published():
                run.steps = event.version
            case Judged():
                _judged(run, event)
                key = (event.prompt, event.epoch)
                if event.outcome:
                    spans.pop(key, None)
                elif event.rewards:
                    low, high = min(event.rewards), max(event.rewards)
                    before = spans.get(key)
                    spans[key] = (min(low, before[0]), max(high, before[1])) if before else (low, high)
            case Trained():
                low, high = spans.pop((event.prompt, event.epoch), (0, 1))
                if low == high:
                    for bucket in {ALL, run.buckets.get(event.prompt, ALL)}:
                        run.no_contrast[bucket] += event.n_trained
            case Planned() if event.outcome:
                spans.pop((event.prompt, event.epoch), None)
                _closed(run, event.prompt, event.outcome)
            case WentStale() | Failed() if event.closed:
                spans.pop((event.prompt, event.epoch), None)
        timeline.reached(drawn)
    run.bins = timeline.bins(drawn)
    run.seconds = last_t
    if run.summary:
        run.seconds = float(run.summary.get("seconds", last_t))
        run.steps = int(run.summary.get("steps", run.steps))


def _judged(run: Run, event: Judged) -> None:
    prompt = run.prompts.get(event.prompt)
    if prompt is None:
        prompt = run.prompts[event.prompt] = Visits()
    n, right = len(event.rewards), sum(reward >= 1 for reward in event.rewards)
    prompt.tried += n
    prompt.right += right
    if event.round == 1 and n:
        prompt.visits += 1
        prompt.last_at, prompt.last_right, prompt.last_n = event.version, right, n
        if right == n:
            prompt.all_right_at = event.version
        elif not right and prompt.none_right_at is None:
            prompt.none_right_at = event.version
    _closed(run, event.prompt, event.outcome)


def _closed(run: Run, prompt_id: str, outcome: str) -> None:
    if outcome == "given_up":
        run.prompts.setdefault(prompt_id, Visits()).given_up += 1


# -------------------------------------------------------------------------- evaluations and pace


def means_by_bucket(rates: Mapping[str, float], buckets: Mapping[str, str]) -> dict[str, float]:
    """As `evaluate.mean_by_bucket`; prompts without a bucket count under "all" only. Empty for no rates."""
    values: dict[str, list[float]] = {}
    for prompt_id, rate in rates.items():
        for bucket in {ALL, buckets.get(prompt_id, ALL)}:
            values.setdefault(bucket, []).append(rate)
    return {name: sum(values[name]) / len(values[name]) for name in (*BUCKETS, ALL) if name in values}


def _read_evaluations(run: Run) -> None:
    """From rates.jsonl; what it lacks from summary.json, or of a run that has none from its newest checkpoint."""
    found: dict[tuple[str, int], Evaluation] = {}
    path = run.folder / RATES
    for number, row in _rows(path):
        try:
            split, step, rates = str(row["split"]), int(row["step"]), dict(row["rates"])
            found[split, step] = Evaluation(
                split, step, int(row["completions"]), means_by_bucket(rates, run.buckets), rates, row.get("n")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not pass rates of a prompt set ({error!r})") from error
    for row in _evaluation_rows(run):
        key = (row["split"], row["step"])
        if key not in found:
            means = dict(row["pass_rates"])
            if ALL not in means and "pass@1" in means:
                means[ALL] = means["pass@1"]
            found[key] = Evaluation(*key, row["completions"], means)
    run.evaluations = sorted(found.values(), key=lambda row: (row.completions, row.step))


def _evaluation_rows(run: Run) -> list[dict[str, Any]]:
    if run.summary is not None:
        return list(run.summary.get("evaluations", []))
    return list((_checkpoint(run) or {}).get("evaluations", []))


def _checkpoint(run: Run) -> dict[str, Any] | None:
    """What the newest checkpoint says of the run."""
    saved = [path for path in run.folder.glob("checkpoints/step-*/run.json") if path.parent.name[5:].isdigit()]
    return _object(max(saved, key=lambda path: int(path.parent.name[5:]))) if saved else None


def _read_metrics(run: Run) -> None:
    paces: list[Pace] = []
    before = 0.0
    for _, row in _rows(run.folder / METRICS):
        if not all(isinstance(row.get(key), int | float) for key in ("t", "completions")):
            continue
        seconds, before = max(row["t"] - before, 0.0), row["t"]
        if "engine_idle" in row and "learner_idle" in row:
            paces.append(Pace(row["completions"], seconds, row["engine_idle"], row["learner_idle"]))
        if len(paces) >= N_BINS:
            paces = _in_twos(paces)
    run.pace = paces


def _in_twos(paces: Sequence[Pace]) -> list[Pace]:
    out = []
    for i in range(0, len(paces), 2):
        pair = paces[i : i + 2]
        seconds = sum(pace.seconds for pace in pair) or 1e-9
        out.append(
            Pace(
                pair[-1].completions,
                seconds,
                sum(pace.seconds * pace.engine_idle for pace in pair) / seconds,
                sum(pace.seconds * pace.learner_idle for pace in pair) / seconds,
            )
        )
    return out


# -------------------------------------------------------------------------- texts


def _read_samples(run: Run) -> None:
    path = run.folder / SAMPLES
    for number, row in _rows(path):
        try:
            prompt_id = str(row["prompt"])
            if prompt_id not in run.samples and len(run.samples) >= 2 * MOST_PROMPTS:
                run.n_prompts_without_texts += row["kind"] == "prompt"
                continue
            sampled = run.samples.setdefault(prompt_id, Sampled())
            if row["kind"] == "prompt":
                sampled.text, sampled.answer = str(row["text"]), str(row["answer"])
            elif row["kind"] == "sample":
                _add_sample(sampled, row)
            elif row["kind"] == "trained":
                _add_weights(sampled, int(row["step"]), row["attempts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: no row of a sample log ({error!r})") from error
    _fit(run)


def _add_sample(sampled: Sampled, row: Mapping[str, Any]) -> None:
    request = int(row["request"])
    if not sampled.rounds or sampled.rounds[-1].request != request:
        sampled.rounds.append(Round(request, int(row["epoch"]), int(row["round"]), float(row["t"])))
        if len(sampled.rounds) > 2 * MOST_ROUNDS:
            sampled.thin(MOST_ROUNDS)
    reward = row["reward"]
    sampled.rounds[-1].samples.append(
        Sample(
            str(row["key"]),
            None if reward is None else float(reward),
            str(row.get("reason") or ""),
            row["version"],
            row["finish"] == "length",
            int(row["n_tokens"]),
            str(row["text"]),
        )
    )


def _add_weights(sampled: Sampled, step: int, attempts: Sequence[Sequence[Any]]) -> None:
    """The newest visit that has these completions is the one that was trained on."""
    weights = {str(key): advantage for key, _, _, advantage in attempts}
    visit = None
    for round in reversed(sampled.rounds):
        if visit is not None and round.visit != visit:
            return
        for sample in round.samples:
            if sample.key in weights and sample.step is None:
                sample.advantage, sample.step = weights[sample.key], step
                visit = round.visit


def _fit(run: Run) -> None:
    """Keeps as many prompts, rounds and characters as a page can hold: prompts with most rounds first."""
    ordered = sorted(
        run.samples.items(), key=lambda item: (len(item[1].rounds) < 2, -run.prompts.get(item[0], Visits()).given_up)
    )
    run.n_prompts_without_texts += max(len(ordered) - MOST_PROMPTS, 0)
    run.samples = dict(ordered[:MOST_PROMPTS])
    most, most_of_prompt = MOST_ROUNDS, MOST_TEXT // max(len(run.samples), 1)
    for sampled in run.samples.values():
        sampled.thin(most)
        sampled.text, sampled.answer = _cut(sampled.text, most_of_prompt), _cut(sampled.answer, SHORTEST_CUT)
    while True:
        texts = [s for sampled in run.samples.values() for round in sampled.rounds for s in round.samples]
        longest = max(MOST_TEXT // max(len(texts), 1), SHORTEST_CUT)
        if sum(min(len(s.text), longest) for s in texts) <= MOST_TEXT or most <= 4:
            break
        most = max(most // 2, 4)
        for sampled in run.samples.values():
            sampled.thin(most)
    if sum(len(s.text) for s in texts) > MOST_TEXT:
        for sample in texts:
            sample.text = _cut(sample.text, longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … [{len(text) - longest} more characters]"
