"""TensorBoard, Weights & Biases, trackio: the figures of metrics.jsonl under the same names. Layer 3.

accelerate's trackers do the work; nothing of theirs is imported unless one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

TRACKERS: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Name in the settings -> package that it needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that is not known, or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f'track = "{name}" is no tracker that is known: use one or more of {", ".join(TRACKERS)}')
        if find_spec(TRACKERS[name]) is None:
            raise ValueError(f'track = "{name}" needs a package that is not installed: pip install {TRACKERS[name]}')


class Trackers:
    """names: checked by `check_trackers`. folder: the run's; TensorBoard writes below its `trackers`."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._accelerator: Accelerator | None = None
        if not names:
            return
        from accelerate import Accelerator

        self._accelerator = Accelerator(log_with=list(names), project_dir=folder / "trackers")
        self._accelerator.init_trackers("nevergiveup", dict(_flat(config)), _named(names, folder))

    def log(self, row: Mapping[str, float], step: int) -> None:
        if self._accelerator is not None:
            self._accelerator.log(dict(row), step=step)

    def close(self) -> None:
        if self._accelerator is not None:
            self._accelerator.end_training()
            self._accelerator = None


def _named(names: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The run goes under the name of its folder where the tracker knows names of runs."""
    return {name: {"name": folder.name} for name in names if name in ("wandb", "trackio")}


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str | int | float | bool]]:
    rows: list[tuple[str, str | int | float | bool]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value if isinstance(value, str | int | float | bool) else str(value)))
    return rows
