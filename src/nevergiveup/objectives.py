"""Which loss is minimised, and with which numbers: frozen values, read by the learner.

Layer 0. Standard library only, so that a wrong number is refused before torch is loaded. The formulas are in
`nevergiveup.learner.losses`; docs/losses.md says when to use which.

Symbols: pi is the policy being trained, mu the one that sampled, rho = pi / mu for a token, A the advantage of its completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

Normalize: TypeAlias = Literal["token", "sequence", "constant", "group"]
"""What the sum over tokens is divided by: see docs/losses.md."""


@dataclass(frozen=True, slots=True)
class Clipped:
    """PPO's clipped objective with one advantage a completion (GRPO, arXiv 2402.03300; the asymmetric range: DAPO, 2503.14476):
    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)."""

    name: ClassVar[str] = "grpo"

    clip_low: float = 0.2
    """The importance ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and at 1 + clip_high (DAPO: 0.28)."""
    dual_clip: float | None = None
    """Dual clip (arXiv 1912.09729): where A < 0 the loss is at most dual_clip * |A| (usually 3); none is off."""

    def __post_init__(self) -> None:
        _check_range(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1 (usually 3), or left out")


@dataclass(frozen=True, slots=True)
class Reinforce:
    """REINFORCE with truncated importance weights (IMPALA, arXiv 1802.01561): -sg(min(rho, cap)) A log pi."""

    name: ClassVar[str] = "reinforce"

    cap: float = 2.0
    """C: importance weights are cut at it."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"cap = {self.cap} (largest importance weight) must be above 0, usually 2")


@dataclass(frozen=True, slots=True)
class Cispo:
    """CISPO (arXiv 2506.13585): -sg(min(rho, 1 + clip_high)) A log pi. No token loses its gradient, its weight is bounded."""

    name: ClassVar[str] = "cispo"

    clip_high: float = 0.28
    """Importance weights are cut at 1 + clip_high."""

    def __post_init__(self) -> None:
        _check_range(1.0, self.clip_high)


@dataclass(frozen=True, slots=True)
class Gspo:
    """GSPO (arXiv 2507.18071): the clipped objective with one ratio a completion, exp(mean over its tokens of log rho)."""

    name: ClassVar[str] = "gspo"

    clip_low: float = 3e-4
    """The sequence ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 4e-4
    """... and at 1 + clip_high."""

    def __post_init__(self) -> None:
        _check_range(self.clip_low, self.clip_high)


Loss: TypeAlias = Clipped | Reinforce | Cispo | Gspo

LOSSES: dict[str, type[Clipped] | type[Reinforce] | type[Cispo] | type[Gspo]] = {
    cls.name: cls for cls in (Clipped, Reinforce, Cispo, Gspo)
}
"""Name on the command line -> loss."""


def _check_range(clip_low: float, clip_high: float) -> None:
    if not 0 < clip_low <= 1:
        raise ValueError(f"clip_low = {clip_low} must be above 0 and at most 1: the ratio is clipped at 1 - clip_low")
    if not clip_high > 0:
        raise ValueError(f"clip_high = {clip_high} must be above 0: the ratio is clipped at 1 + clip_high")
