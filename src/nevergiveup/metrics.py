"""Figures and sentences from events: where the samples went, overall and by initial difficulty.

Layer 1. Standard library only. `Tally` counts; it never averages baselines, which are biased as pass rates (oracle 2.7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nevergiveup.diagnosis import diagnose
from nevergiveup.events import (
    Dispatched,
    Event,
    Failed,
    Graded,
    Judged,
    Planned,
    Reissued,
    Trained,
    WentStale,
    from_json,
    to_json,
)
from nevergiveup.types import NO_ANSWER, Exact

ALL = "all"

_EXACT = ("reward_sum", "closed_reward")
_BY_NUMBER = ("ages", "rounds_when_trained", "rounds_when_given_up")


@dataclass(slots=True)
class Tally:
    """Counts events. `bucket_of` maps prompt ids to difficulty buckets; prompts without one count under "all" only.

    A scored round is one that has at least one verified completion. `completions[bucket]` counts drawn, trained, left_out,
    filtered, given_up, stale, unverified, failed, reissued; stale is known when a chain closes or loses its group.
    """

    bucket_of: Mapping[str, str] = field(default_factory=dict)
    n_rounds: int = 0
    all_right: int = 0
    all_wrong: int = 0
    varied: int = 0
    flat: int = 0
    """Scored rounds whose rewards are all equal, but neither 0 nor the maximum (graded rewards)."""
    no_verdict: int = 0
    retries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    length_limited: int = 0
    """All-wrong rounds in which every completion was cut by the length limit."""
    n_scored: int = 0
    n_unverified: int = 0
    n_failed: int = 0
    n_truncated: int = 0
    reward_sum: Exact = 0
    n_graded: int = 0
    """Completions with a grade that told more than a number."""
    reasons: Counter[str] = field(default_factory=Counter)
    unverified_reasons: Counter[str] = field(default_factory=Counter)
    part_sums: dict[str, float] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)
    rounds_when_trained: Counter[int] = field(default_factory=Counter)
    rounds_when_given_up: Counter[int] = field(default_factory=Counter)
    went_stale: int = 0
    planned: int = 0
    """Draws that an allocator decided, over prompts that waited for their share."""
    completions: dict[str, Counter[str]] = field(default_factory=dict)
    closed_tried: int = 0
    closed_reward: Exact = 0

    def add(self, event: Event, max_reward: Exact = 1) -> None:
        """Counts one event; max_reward is that of its prompt."""
        match event:
            case Dispatched():
                self._count(event.prompt, drawn=event.n)
            case Graded():
                self.n_graded += event.n
                self.reasons.update(event.reasons)
                self.unverified_reasons.update(event.unverified)
                for part, total in event.parts.items():
                    self.part_sums[part] = self.part_sums.get(part, 0.0) + total
            case Judged():
                self._add_round(event, max_reward)
            case Planned():
                self.planned += event.draws
                self._add_outcome(event.outcome, event.rounds, event.tried, event.total, event.n_fresh, event.prompt)
            case Trained():
                self.outcomes["trained"] += 1
                self.rounds_when_trained[event.rounds] += 1
                self.ages.update(event.ages)
                stale = event.tried - event.n_trained - event.n_left_out
                self._count(event.prompt, trained=event.n_trained, left_out=event.n_left_out, stale=stale)
                self._close(event.tried, event.total)
            case WentStale():
                self.went_stale += 1
                if event.closed:
                    self.outcomes["stale"] += 1
            case Failed():
                self.n_failed += event.n
                self._count(event.prompt, failed=event.n)
                if event.closed:
                    self.outcomes["failed"] += 1
            case Reissued():
                self._count(event.prompt, reissued=event.n)
                if event.request is None:
                    self.outcomes["dropped"] += 1

    def _add_round(self, event: Judged, max_reward: Exact) -> None:
        self.n_unverified += event.n_unverified
        self.n_failed += event.n_failed
        self._count(event.prompt, unverified=event.n_unverified, failed=event.n_failed)
        if event.rewards:
            self.n_rounds += 1
            self.n_scored += len(event.rewards)
            self.n_truncated += event.n_truncated
            self.reward_sum += sum(event.rewards)
            low, high = min(event.rewards), max(event.rewards)
            if low != high:
                self.varied += 1
            elif low == max_reward:
                self.all_right += 1
            elif low <= 0:  # below 0: with a length penalty
                self.all_wrong += 1
                self.length_limited += event.n_truncated == len(event.rewards)
            else:
                self.flat += 1
        else:
            self.no_verdict += 1
        if event.verdict == "retry":
            self.retries += 1
        self._add_outcome(event.outcome, event.round, event.tried, event.total, event.n_fresh, event.prompt)

    def _add_outcome(self, outcome: str, rounds: int, tried: int, total: Exact, n_fresh: int, prompt_id: str) -> None:
        """How a judged chain closed; nothing if it is still open."""
        if not outcome:
            return
        self.outcomes[outcome] += 1
        fate = {"given_up": "given_up", "unverified": "unverified"}.get(outcome, "filtered")
        self._count(prompt_id, **{fate: n_fresh}, stale=tried - n_fresh)
        self._close(tried, total)
        if outcome == "given_up":
            self.rounds_when_given_up[rounds] += 1

    def _count(self, prompt_id: str, **counts: int) -> None:
        for bucket in {ALL, self.bucket_of.get(prompt_id, ALL)}:
            self.completions.setdefault(bucket, Counter()).update(counts)

    def _close(self, tried: int, total: Exact) -> None:
        self.closed_tried += tried
        self.closed_reward += total

    def state_dict(self) -> dict[str, Any]:
        """Everything but the buckets, as JSON-able values."""
        state: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _EXACT:
                value = to_json(value)
            elif entry.name in _BY_NUMBER:
                value = list(value.items())
            if entry.name != "bucket_of":
                state[entry.name] = value
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], bucket_of: Mapping[str, str]) -> Tally:
        """The inverse of `state_dict`."""
        tally = cls(bucket_of)
        for name, value in state.items():
            if name in _EXACT:
                value = from_json(value)
            elif name in _BY_NUMBER:
                value = Counter(dict(value))
            elif name == "completions":
                value = {bucket: Counter(counts) for bucket, counts in value.items()}
            elif isinstance(value, dict) and name != "part_sums":
                value = Counter(value)
            setattr(tally, name, value)
        return tally

    def figures(self) -> dict[str, float]:
        """Shares and counts under their metric names. Shares of an empty window are left out."""
        out: dict[str, float] = {
            "rounds": self.n_rounds,
            "no_verdict_groups": self.no_verdict,
            "requeued": self.retries,
            "went_stale": self.went_stale,
            "completions_planned": self.planned,
            "completions_scored": self.n_scored,
            "completions_unverified": self.n_unverified,
            "completions_failed": self.n_failed,
        }
        for outcome in ("trained", "solved", "solved_after_retry", "given_up", "stale", "unverified", "failed"):
            out[f"chains/{outcome}"] = self.outcomes[outcome]
        if self.n_scored + self.n_unverified:
            out["unverified"] = self.n_unverified / (self.n_scored + self.n_unverified)
        if self.n_graded:
            out["no_answer"] = self.reasons[NO_ANSWER] / self.n_graded
            for part, total in self.part_sums.items():
                out[f"reward/{part}"] = total / self.n_graded
            for reason, n in self.reasons.items():
                out[f"reason/{reason}"] = n
        if self.n_rounds:
            out["signal"] = self.varied / self.n_rounds
            out["all_right"] = self.all_right / self.n_rounds
            out["all_wrong"] = self.all_wrong / self.n_rounds
            out["flat"] = self.flat / self.n_rounds
            out["reward"] = float(self.reward_sum) / self.n_scored
            out["truncated"] = self.n_truncated / self.n_scored
        if self.all_wrong:
            out["length_limited"] = self.length_limited / self.all_wrong
        if self.closed_tried:
            out["pooled_pass_rate"] = float(self.closed_reward) / self.closed_tried
        known = {age: n for age, n in self.ages.items() if age >= 0}
        if known:
            out["age_mean"] = sum(age * n for age, n in known.items()) / sum(known.values())
            out["age_max"] = max(known)
        if self.ages[-1]:
            out["age_unknown"] = self.ages[-1]
        if self.rounds_when_trained:
            n = sum(self.rounds_when_trained.values())
            out["rounds_per_trained_group"] = sum(r * count for r, count in self.rounds_when_trained.items()) / n
        for bucket, counts in self.completions.items():
            for fate, count in counts.items():
                out[f"completions/{bucket}/{fate}"] = count
        return out

    def in_words(self) -> list[str]:
        """What happened, and after that what is wrong and what to change, in sentences; the first is always there."""
        n = self.n_rounds
        wrong = list(diagnose(self.figures()).values())
        if not n:
            return ["no group has been scored yet", *self._no_verdicts(), *wrong]
        parts = [
            f"{_percent(self.varied, n)} of {n} groups had signal",
            f"{_percent(self.all_right, n)} were all right",
            f"{_percent(self.all_wrong, n)} all wrong",
        ]
        if self.flat:
            parts.append(f"{_percent(self.flat, n)} the same partial score throughout")
        sentence = ", ".join(parts)
        if self.retries or self.outcomes["given_up"]:
            sentence += f" ({self.retries} asked again, {self.outcomes['given_up']} given up)"
        return [sentence, *self._no_verdicts(), *wrong]

    def _no_verdicts(self) -> list[str]:
        words = []
        if self.no_verdict:
            words.append(f"{self.no_verdict} groups got no verdict from the grader and were not counted as wrong")
        if self.n_unverified:
            total = self.n_scored + self.n_unverified
            causes = ", ".join(f"{reason} ({n})" for reason, n in self.unverified_reasons.most_common(3))
            words.append(
                f"{self.n_unverified} of {total} completions got no verdict and left their groups"
                + (f": {causes}" if causes else "")
            )
        return words


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
