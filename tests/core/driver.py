"""Drives a scheduler the way a run does, for the core tests.

`Drive` is a random but reproducible interleaving: its own generator decides what is called next, while what a completion is
worth depends on the seed of its request alone, so that two runs which ask for the same samples also get them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from nevergiveup.events import Event
from nevergiveup.scheduler import Scheduler
from nevergiveup.types import Attempt, Batch, Decision, Prompt, Request

Rewards = Callable[[Request], list[Any]]


def prompts_named(n: int, **fields: Any) -> list[Prompt]:
    return [Prompt(f"p{i}", **fields) for i in range(n)]


def attempts(rewards: Sequence[Any], version: int | None = 0) -> list[Attempt]:
    return [Attempt(reward, version) for reward in rewards]


def binary(request: Request) -> list[int]:
    """0/1 rewards; a prompt's pass rate is spread over the data set: never, rarely, often, always right."""
    pass_rate = (0.0, 0.05, 0.3, 0.7, 0.95, 1.0)[int(request.prompt.id[1:]) % 6]
    return [int(Random(seed).random() < pass_rate) for seed in request.seeds]


def graded(request: Request) -> list[Any]:
    """Rewards in twelfths and decimal fractions that no float holds; many groups without contrast."""
    values = ((0,), (0, Fraction(7, 12)), (0.1,), (0.1, 0.7), (Fraction(1, 3), 0.95, 1), (1,))
    values_here = values[int(request.prompt.id[1:]) % 6]
    return [Random(seed).choice(values_here) for seed in request.seeds]


class Drive:
    """One run: `step` does one thing at random. `events` and `batches` are what came out of it."""

    def __init__(
        self,
        make: Callable[..., Scheduler],
        rewards: Rewards,
        seed: int = 0,
        trouble: float = 0.1,
    ) -> None:
        self.events: list[Event] = []
        self.batches: list[Batch] = []
        self.decisions: list[Decision | None] = []
        self.in_flight: list[tuple[Request, int]] = []  # with the policy version that samples it
        self.training = False
        self._make = make
        self._rewards = rewards
        self._trouble = trouble
        self._rng = Random(seed)
        self.scheduler = make(on_event=self.events.append)

    def step(self) -> None:
        u = self._rng.random()
        scheduler = self.scheduler
        if u < 0.45:
            request = scheduler.next()
            if request is not None:
                self.in_flight.append((request, scheduler.version))
        elif u < 0.85:
            if self.in_flight:
                self._return(*self.in_flight.pop(self._rng.randrange(len(self.in_flight))))
        elif self.training:
            scheduler.publish(scheduler.version + 1)
            self.training = False
        else:
            batch = scheduler.take()
            if batch is not None:
                self.batches.append(batch)
                self.training = True

    def _return(self, request: Request, version: int) -> None:
        rewards = self._rewards(request)
        rng = Random(request.seed)
        if rng.random() < self._trouble:  # some or all completions without a verdict, or the whole request lost
            kind = rng.randrange(3)
            if kind == 0:
                self.scheduler.fail(request.id, "connection lost")
                return
            n_kept = rng.randrange(request.n) if kind == 1 else 0
            n_unverified = rng.randint(0, request.n - n_kept)
            self.decisions.append(self.scheduler.deliver(request.id, attempts(rewards[:n_kept], version), n_unverified))
            return
        self.decisions.append(self.scheduler.deliver(request.id, attempts(rewards, version)))

    def restore(self) -> None:
        """Stop here and go on in a new scheduler, from a checkpoint that has been through JSON."""
        state = json.loads(json.dumps(self.scheduler.state_dict()))
        self.scheduler = self._make(on_event=None)  # what is issued again is no new event
        self.scheduler.load_state_dict(state)
        self.scheduler.check_balance()
        for request, _ in self.in_flight:
            assert self.scheduler.next() == request
        self.scheduler.on_event = self.events.append

    def run(self, max_steps: int = 100_000) -> str:
        """Steps until the run is over; returns why."""
        for _ in range(max_steps):
            reason = self.scheduler.finished
            if reason is not None:
                return reason
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.ledger}")
