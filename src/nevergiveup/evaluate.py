"""Pass rates, and what they are worth: unbiased pass@k, intervals, difficulty buckets, signal at K, probe files.

Layer 2. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import comb, sqrt
from pathlib import Path
from random import Random

BUCKETS: tuple[str, ...] = ("easy", "medium", "hard", "extra_hard")
"""By the pass rate of the initial policy: above .7, .3 to .7, .02 to .3, below .02."""

_LOWER_BOUNDS = (0.7, 0.3, 0.02)


def bucket_of(pass_rate: float) -> str:
    """Difficulty bucket of a prompt from its initial pass rate in [0, 1]."""
    if pass_rate > _LOWER_BOUNDS[0]:
        return "easy"
    if pass_rate >= _LOWER_BOUNDS[1]:
        return "medium"
    return "hard" if pass_rate >= _LOWER_BOUNDS[2] else "extra_hard"


def assign_buckets(pass_rates: Mapping[str, float]) -> dict[str, str]:
    """Prompt id -> bucket. The rates must not come from samples that also serve as the baseline of a comparison: prompts
    that happened to fail would show a gain without any learning (regression to the mean)."""
    return {prompt_id: bucket_of(rate) for prompt_id, rate in pass_rates.items()}


def mean_by_bucket(pass_rates: Mapping[str, float], buckets: Mapping[str, str]) -> dict[str, float]:
    """Mean pass rate of the prompts in each bucket that has any, and under "all" of every prompt."""
    groups: dict[str, list[float]] = {}
    for prompt_id, rate in pass_rates.items():
        groups.setdefault(buckets[prompt_id], []).append(rate)
        groups.setdefault("all", []).append(rate)
    return {name: sum(groups[name]) / len(groups[name]) for name in (*BUCKETS, "all") if name in groups}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from c right ones of n samples, 1 - C(n-c, k)/C(n, k) (arXiv 2107.03374).

    Raises ValueError for k > n: fewer samples cannot tell.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k needs 0 <= c <= n and k >= 1, not n = {n}, c = {c}, k = {k}")
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, there are {n}: draw more, or lower k")
    return 1.0 - comb(n - c, k) / comb(n, k)


def wilson_interval(c: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval (95 % for the default z) of a pass rate from c right ones of n samples (Wilson, 1927)."""
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"an interval needs 0 <= c <= n and n >= 1, not c = {c}, n = {n}")
    centre = (c + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * sqrt(c * (n - c) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> tuple[float, int]:
    """Mean pass@k over prompts given as (n, c), and how many were left out because they have fewer than k samples."""
    usable = [(n, c) for n, c in counts if n >= k]
    if not usable:
        raise ValueError(f"no prompt has the {k} samples that pass@{k} needs")
    return sum(pass_at_k(n, c, k) for n, c in usable) / len(usable), len(counts) - len(usable)


def bootstrap_interval(values: Sequence[float], n_resamples: int = 1000) -> tuple[float, float] | None:
    """95 % interval of the mean over prompts: percentiles of resampled means (Efron, 1979); None for fewer than 2 values.

    Equal values give equal intervals. With very many prompts there are fewer resamples, 200 at least.
    """
    n = len(values)
    if n < 2:
        return None
    n_resamples = max(min(n_resamples, 2_000_000 // n), 200)
    rng = Random(0)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(n_resamples))
    return means[round(0.025 * (n_resamples - 1))], means[round(0.975 * (n_resamples - 1))]


def signal_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that K completions of a prompt are neither all right nor all wrong, from c right ones of n: of the K
    subsets, 1 - (C(c, K) + C(n-c, K)) / C(n, K). Raises ValueError for k > n."""
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"signal needs 0 <= c <= n and k >= 1, not n = {n}, c = {c}, k = {k}")
    if k > n:
        raise ValueError(f"signal at K = {k} needs at least {k} samples of a prompt, there are {n}")
    return 1.0 - (comb(c, k) + comb(n - c, k)) / comb(n, k)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What n verified completions of a prompt came to. right: those with the best reward; the rest are means and counts over
    all that were drawn: length in tokens, cut by the length limit, without an answer, without a verdict."""

    n: int
    right: int
    reward: float = 0.0
    tokens: float = 0.0
    truncated: int = 0
    no_answer: int = 0
    unverified: int = 0


PROBE_FORMAT = "nevergiveup probe 1"


def read_initial_rates(path: Path) -> dict[str, float]:
    """Prompt id -> pass rate: of a file of `ngu probe`, or of the buckets.json of a run. Raises ValueError for any other."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(run, dict) and "buckets" in run and isinstance(run.get("rates"), dict):
            return {prompt_id: float(rate) for prompt_id, rate in run["rates"].items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):
        pass  # the next one says what is wrong with it
    return {prompt_id: drawn.right / drawn.n for prompt_id, drawn in read_probe(path).items() if drawn.n}


def read_probe(path: Path) -> dict[str, Drawn]:
    """Prompt id -> what `ngu probe` found. Raises ValueError for a file that is none of its."""
    names = {field.name for field in fields(Drawn)}
    try:
        probe = json.loads(path.read_text(encoding="utf-8"))
        if probe["format"] != PROBE_FORMAT:
            raise ValueError(f"its format is {probe['format']!r}, not {PROBE_FORMAT!r}")
        return {
            prompt_id: Drawn(**{name: value for name, value in row.items() if name in names})
            for prompt_id, row in probe["prompts"].items()
        }
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file that `ngu probe` wrote: {error}") from error
