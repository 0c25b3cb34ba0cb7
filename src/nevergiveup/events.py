"""What happened, one typed event a decision, and the JSON Lines file that keeps it.

Layer 0. Standard library only. Events carry no clock (the core has none); the writer adds `t`, seconds since the run began,
so two runs of the same seed have equal events whatever their speed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, TextIO, TypeAlias

from nevergiveup.types import Exact


@dataclass(frozen=True, slots=True)
class Dispatched:
    """n completions of a prompt were asked for. epoch: which visit of the prompt; round: 1 for the first attempt."""

    kind: ClassVar[str] = "dispatched"
    request: int
    prompt: str
    epoch: int
    round: int
    n: int
    seed: int
    version: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A round came back and was judged.

    rewards, versions: of the verified completions of this round (version: oldest in it, None = unknown).
    n_unverified: the grader could not decide; n_failed: never came back; n_truncated: cut by the length limit.
    verdict: solved, train, retry, give_up; or "trouble" when no completion of the round was verified.
    outcome: how the chain closed ("solved", "solved_after_retry", "given_up", "unverified"); empty while it is open.
    tried, total: count and exact sum of all rewards of the chain so far; n_fresh: how many of them are still trainable.
    version: policy version at the judgement.
    """

    kind: ClassVar[str] = "judged"
    request: int
    prompt: str
    epoch: int
    round: int
    rewards: tuple[Exact, ...]
    versions: tuple[int | None, ...]
    n_unverified: int
    n_failed: int
    n_truncated: int
    verdict: str
    outcome: str
    tried: int
    total: Exact
    n_fresh: int
    version: int


@dataclass(frozen=True, slots=True)
class Graded:
    """What the grader had to say about the completions of a request, beyond their rewards; it precedes their `Judged`.

    n: completions that got a grade. reasons: how often each reason was given. unverified: how often each reason was given for
    no verdict. parts: named part of the reward -> its sum over the completions that got a grade.
    """

    kind: ClassVar[str] = "graded"
    request: int
    prompt: str
    n: int
    reasons: Mapping[str, int]
    unverified: Mapping[str, int]
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Planned:
    """An allocator decided about a chain that waited: `draws` more completions (verdict retry), or its end.

    outcome, rounds, tried, total, n_fresh: as in `Judged`. gradient_norm: what the share was computed from; None: not measured.
    """

    kind: ClassVar[str] = "planned"
    prompt: str
    epoch: int
    verdict: str
    draws: int
    outcome: str
    rounds: int
    tried: int
    total: Exact
    n_fresh: int
    gradient_norm: float | None
    version: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request was lost to infrastructure trouble. closed: tried often enough, the chain was closed unscored."""

    kind: ClassVar[str] = "failed"
    request: int
    prompt: str
    epoch: int
    n: int
    reason: str
    closed: bool


@dataclass(frozen=True, slots=True)
class Reissued:
    """After a resume: the completions of a chain that do not count, though they were drawn. Either they were in flight when
    the checkpoint was saved (request: the number under which they are asked for again), or the chain was dropped because the
    data or the strategy changed (request: None; it closed)."""

    kind: ClassVar[str] = "reissued"
    request: int | None
    prompt: str
    epoch: int
    n: int


@dataclass(frozen=True, slots=True)
class Trained:
    """A group entered a batch. ages: of its trained attempts, in policy versions (-1 = unknown)."""

    kind: ClassVar[str] = "trained"
    prompt: str
    epoch: int
    rounds: int
    n_trained: int
    n_left_out: int
    tried: int
    total: Exact
    ages: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class WentStale:
    """A group could not be trained any more when its batch was cut. closed: after several times, till the next epoch."""

    kind: ClassVar[str] = "went_stale"
    prompt: str
    epoch: int
    n: int
    closed: bool
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """The engines hold a new policy version."""

    kind: ClassVar[str] = "published"
    version: int


Event: TypeAlias = Dispatched | Graded | Judged | Planned | Failed | Reissued | Trained | WentStale | Published
EventSink: TypeAlias = Callable[[Event], None]

_KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Dispatched, Graded, Judged, Planned, Failed, Reissued, Trained, WentStale, Published)
}
_FIELDS = {cls: tuple(field.name for field in fields(cls)) for cls in _KINDS.values()}


def to_json(value: Exact) -> int | str:
    """An exact number as JSON: 3 stays 3, 7/12 becomes "7/12"."""
    return value if isinstance(value, int) else f"{value.numerator}/{value.denominator}"


def from_json(value: int | str) -> Exact:
    return value if isinstance(value, int) else Fraction(value)


def encode(event: Event, t: float | None = None) -> str:
    """One line of JSON, keys in the order of the fields, without the newline."""
    row: dict[str, Any] = {"kind": event.kind}
    if t is not None:
        row["t"] = round(t, 3)
    for name in _FIELDS[type(event)]:
        value = getattr(event, name)
        if isinstance(value, Fraction):
            value = to_json(value)
        elif name == "rewards":
            value = [to_json(reward) for reward in value]
        row[name] = value
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def decode(line: str) -> tuple[float | None, Event]:
    """Inverse of `encode`. Raises ValueError for a line that is no event."""
    try:
        row = json.loads(line)
        cls = _KINDS[row.pop("kind")]
        t = row.pop("t", None)
        if "total" in row:
            row["total"] = from_json(row["total"])
        for name in ("rewards", "versions", "ages"):
            if name in row:
                row[name] = tuple(from_json(v) if isinstance(v, str) else v for v in row[name])
        return t, cls(**row)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"not an event: {line[:200]!r}") from error


PART_BYTES = 256 * 2**20
"""A part of the event log that has reached this size is complete; the next one is begun."""


def event_parts(path: Path) -> list[Path]:
    """The files of an event log, oldest first: events.jsonl, events.1.jsonl, events.2.jsonl, ... Those that exist."""
    return list(_numbered_parts(path).values())


def _numbered_parts(path: Path) -> dict[int, Path]:
    parts = {0: path} if path.is_file() else {}
    for part in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        middle = part.name[len(path.stem) + 1 : -len(path.suffix)]
        if middle.isdigit():
            parts[int(middle)] = part
    return dict(sorted(parts.items()))


class EventWriter:
    """Appends events to a log of JSON Lines files (see `event_parts`); `clock` gives the seconds to stamp them with."""

    def __init__(self, path: Path, clock: Callable[[], float], *, part_bytes: int = PART_BYTES) -> None:
        self._path = path
        self._clock = clock
        self._part_bytes = part_bytes
        self._open(max(_numbered_parts(path), default=0))

    def _open(self, part: int) -> None:
        self._part = part
        self._file: TextIO = _part_path(self._path, part).open("a", encoding="utf-8")
        self._size = self._file.tell()

    def write(self, event: Event) -> None:
        self._size += self._file.write(encode(event, self._clock()) + "\n")
        if self._size >= self._part_bytes:
            self.sync()
            self._file.close()
            self._open(self._part + 1)

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file.flush()

    def sync(self) -> tuple[int, int]:
        """As `flush`, and waits until it is on the disk; returns the place: number of the part, and its length in bytes."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._part, self._file.tell()

    def close(self) -> None:
        self._file.close()


def cut_events(path: Path, part: int, n_bytes: int) -> None:
    """Removes everything after a place that `EventWriter.sync` returned. Raises ValueError for a log that ends before it."""
    last = _part_path(path, part)
    if not last.is_file() or last.stat().st_size < n_bytes:
        raise ValueError(f"{last} is shorter than {n_bytes} bytes, which it had: it was changed")
    for number, later in _numbered_parts(path).items():
        if number > part:
            later.unlink()
    os.truncate(last, n_bytes)


def _part_path(path: Path, part: int) -> Path:
    return path.with_name(f"{path.stem}.{part}{path.suffix}") if part else path


def read_events(path: Path) -> Iterator[tuple[float | None, Event]]:
    """The events of a log with their times, part after part. A last line that was cut in mid-write (a killed run) is left out.

    Raises ValueError with file and line number for any other line that is no event, and FileNotFoundError where there is none.
    """
    parts = event_parts(path)
    for part in parts or [path]:
        with part.open("rb") as file:  # bytes: the cut may lie within a character
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and part == parts[-1]:
                    return
                try:
                    yield decode(line.decode())
                except ValueError as error:
                    raise ValueError(f"{part}, line {number}: {error}") from error
