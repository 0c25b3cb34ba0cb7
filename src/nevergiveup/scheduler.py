"""The scheduler: which prompt is sampled next, which group is trained on, and what became of every completion.

Layer 1. Standard library only. A synchronous state machine without clock, thread, tensor, socket or global random state:
everything asynchronous calls it, it calls nothing but the strategy. So one object serves the trainer, the simulator and other
people's trainers; every interleaving can be replayed; and its whole state fits into a checkpoint.

One visit of a prompt is a chain: a round of completions, judged on arrival, perhaps asked again (RETRY), at last closed.

    queued -> in flight -> ready -> trained          closed: solved, solved_after_retry, given_up,
       ^        |    |       |                               unverified, failed, stale
       +- RETRY +    | WAIT  |
       +---- went stale -----+
       +-- waiting <-+        with an allocator: a block of chains is decided together

Judged on arrival, weighed when the batch is cut: in between attempts can go stale, and then the advantages change.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import islice, takewhile
from math import ceil, isfinite
from random import Random
from typing import Any, Literal

from nevergiveup.advantages import Weights
from nevergiveup.events import (
    Dispatched,
    EventSink,
    Failed,
    Judged,
    Planned,
    Published,
    Reissued,
    Trained,
    WentStale,
    from_json,
    to_json,
)
from nevergiveup.strategies import Allocator, Strategy
from nevergiveup.types import (
    Attempt,
    Batch,
    Completion,
    Decision,
    Exact,
    Group,
    Memory,
    Prompt,
    Request,
    TrainGroup,
    Verdict,
    Waiting,
    exact,
)

RetryOrder = Literal["back", "front"]

MAX_TROUBLE = 3
"""A request lost to trouble is asked this often in all before its chain is closed, unscored; likewise for a group that
goes stale before it can be trained on."""


@dataclass(slots=True)
class Ledger:
    """What became of every completion ever asked for, counted once each; and how the chains closed.

    drawn = trained + left_out + filtered + given_up + stale + unverified + failed + reissued + held, at every moment,
    where held (in flight, open or ready) is `Scheduler.held`.

    trained: had a weight, 0.0 included. left_out: in a trained group, but weight None. filtered: in a group without
    contrast closed as solved. given_up, unverified, failed: in a chain that closed so, or (the latter two) itself without
    verdict or never returned. stale: older than the window. reissued: in flight when a checkpoint was restored, or in a chain
    that was dropped then.
    """

    drawn: int = 0
    trained: int = 0
    left_out: int = 0
    filtered: int = 0
    given_up: int = 0
    stale: int = 0
    unverified: int = 0
    failed: int = 0
    reissued: int = 0
    chains: Counter[str] = field(default_factory=Counter)
    """opened, trained, solved, solved_after_retry, given_up, stale, unverified, failed, dropped; and events: retries,
    went_stale, planned (draws that an allocator decided)."""

    def as_dict(self) -> dict[str, Any]:
        counts = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return counts | {"chains": dict(self.chains)}

    @property
    def settled(self) -> int:
        """Completions whose fate is known."""
        return (
            self.trained + self.left_out + self.filtered + self.given_up
            + self.stale + self.unverified + self.failed + self.reissued
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Chain:
    """One visit of a prompt. best: of the rounds since the chain last had to start over (None: nothing to beat). size: of
    a ready group, its share of a batch. gradient_norm: measured by the learner while the chain waits."""

    row: int
    epoch: int
    draws: int
    fresh: list[Attempt] = field(default_factory=list)
    tried: int = 0
    total: Exact = 0
    best: Exact | None = None
    new_min: Exact = 0
    new_max: Exact = 0
    rounds: int = 0
    trouble: int = 0
    times_stale: int = 0
    request: int | None = None
    size: int = 1
    gradient_norm: float | None = None


class Scheduler:
    """Hands out requests, takes back scored attempts, cuts batches.

    prompts: the data set; each row is visited once an epoch, in an order shuffled by (seed, epoch), one live chain a row.
    n_groups: N, groups in a batch.
    n_completions: cut batches by completions instead: whole groups, in order, until the next one would not fit (a group
    larger than a batch makes one alone). What does not fit is carried over to the next batch.
    lag: batches that generation may be ahead of training; 0 is the synchronous run. Nothing is asked for while
    ceil((lag + 1) * N) groups (or completions) are ready or in the step that is running.
    max_pending: most groups open, ready or in that step; by default ceil((lag + 1) * n_groups). More of them keep an engine
    full when few rounds end in a group to train on; what they yield above the bound of `lag` waits, and ages.
    retry_order: retries go to the "back" of the dispatch queue (as published) or to the "front" (fresher, burstier).
    max_epochs, max_completions: bounds of the run; None is no bound.
    max_barren_epochs: passes over the data without a single trained group after which the run ends with a reason.
    gradient_norms: whether somebody answers `norms_wanted`. If not, an allocator that would use them does without, and its
    `Planned` events say so.
    on_event: called with every event, in order.
    """

    def __init__(
        self,
        strategy: Strategy,
        prompts: Sequence[Prompt],
        *,
        n_groups: int,
        n_completions: int | None = None,
        lag: float = 1,
        max_pending: int | None = None,
        retry_order: RetryOrder = "back",
        max_epochs: int | None = None,
        max_completions: int | None = None,
        max_barren_epochs: int = 3,
        seed: int = 0,
        gradient_norms: bool = False,
        on_event: EventSink | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("there is no prompt to sample: the data set is empty")
        if n_groups < 1:
            raise ValueError(f"n_groups = {n_groups} (N, groups in a batch) must be at least 1")
        if lag < 0:
            raise ValueError(f"lag = {lag} must be 0 (synchronous) or more")
        self.max_ready = ceil((lag + 1) * (n_completions or n_groups))
        self.max_pending = ceil((lag + 1) * n_groups) if max_pending is None else max_pending
        if self.max_pending < n_groups:
            raise ValueError(
                f"max_pending = {self.max_pending} is below n_groups = {n_groups}: a batch could never fill; raise it"
            )
        if retry_order not in ("back", "front"):
            raise ValueError(f'retry_order = {retry_order!r} must be "back" or "front"')
        for name, bound in (
            ("n_completions", n_completions),
            ("max_epochs", max_epochs),
            ("max_completions", max_completions),
        ):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} = {bound} must be at least 1, or left out for no bound")
        if max_barren_epochs < 1:
            raise ValueError(f"max_barren_epochs = {max_barren_epochs} must be at least 1")
        self.strategy = strategy
        self.prompts = prompts
        self.n_groups = n_groups
        self.n_completions = n_completions
        self.retry_order = retry_order
        self.max_epochs = max_epochs
        self.max_completions = max_completions
        self.max_barren_epochs = max_barren_epochs
        self.seed = seed
        self.on_event = on_event
        self.version = 0
        self.ledger = Ledger()
        self.epoch = 0

        self._allocator = strategy if isinstance(strategy, Allocator) else None
        self._measures_norms = gradient_norms and self._allocator is not None and self._allocator.wants_gradient_norms
        self._falls_back: Callable[[Group], bool] | None = getattr(strategy, "falls_back", None)
        self._rng = Random(f"{seed}/judge")
        self._order = self._shuffled(0)
        self._position = 0
        self._live: dict[int, _Chain] = {}
        self._owed: dict[int, None] = {}  # rows whose turn came while their chain was live; an ordered set
        self._due: deque[int] = deque()  # of those, the rows whose chain has closed meanwhile
        self._retired: set[int] = set()
        self._memory: dict[int, Memory] = {}
        self._waiting: deque[_Chain] = deque()
        self._queue: deque[_Chain] = deque()
        self._in_flight: dict[int, _Chain] = {}
        self._ready: deque[_Chain] = deque()
        self._n_training = 0
        self._training_size = 0
        self._n_requests = 0
        self._n_barren = 0  # chains closed in a row without one that was trained

    # ---------------------------------------------------------------- drawing

    def next(self) -> Request | None:
        """The next request to hand to an engine; None when there is none now (back-pressure, or nothing left)."""
        self._refill()
        if not self._queue or self._over_budget(self._queue[0].draws):
            return None
        if self._far_enough_ahead() and not self._is_restoring():
            return None
        chain = self._queue.popleft()
        prompt = self.prompts[chain.row]
        if chain.request is None:  # else: restored from a checkpoint, issued again under its old number
            chain.request = self._n_requests
            self._n_requests += 1
        request = Request(
            chain.request, prompt, chain.draws, self._seed_of(prompt.id, chain), chain.rounds + 1, chain.epoch
        )
        self._in_flight[request.id] = chain
        self.ledger.drawn += request.n
        if self.on_event:
            self.on_event(
                Dispatched(
                    request.id, prompt.id, chain.epoch, request.round, request.n, request.seed, self.version
                )
            )  # fmt: skip
        return request

    def _refill(self) -> None:
        if self._is_restoring():
            return
        self._open_chains()
        while self._waiting and self._allocate():
            self._open_chains()  # in the place of chains that were closed

    def _open_chains(self) -> None:
        while len(self._live) + self._n_training < self.max_pending and not self._over_budget(0):
            row = self._next_row()
            if row is None:
                return
            chain = _Chain(row, self.epoch, self.strategy.open(self.prompts[row]))
            self.ledger.chains["opened"] += 1
            self._live[row] = chain
            (self._queue if chain.draws else self._waiting).append(chain)

    def _is_restoring(self) -> bool:
        """Whether what was in flight when the checkpoint was taken still has to go out again: before anything else does."""
        return bool(self._queue) and self._queue[0].request is not None

    def _far_enough_ahead(self) -> bool:
        return self._ready_size() + self._training_size >= self.max_ready

    def _ready_size(self) -> int:
        """Of all ready groups, in what batches are cut by: groups, or completions."""
        return len(self._ready) if self.n_completions is None else sum(chain.size for chain in self._ready)

    def _allocate(self) -> bool:
        """Decides the waiting chains that are due; False when none are."""
        allocator = self._allocator
        assert allocator is not None
        n = self._n_measured() if self._measures_norms else self._n_due()
        chains = [self._waiting.popleft() for _ in range(n)]
        for chain in chains:
            self._prune(chain)
        waiting = [
            Waiting(
                self.prompts[chain.row],
                self._group(chain, chain.best) if chain.tried else None,
                self._memory.get(chain.row),
                chain.gradient_norm,
            )
            for chain in chains
        ]
        if chains:
            for chain, decision in zip(chains, allocator.allocate(waiting), strict=True):
                self._plan(chain, decision)
        return bool(chains)

    def _n_due(self) -> int:
        """How many waiting chains are to be decided together now: a block, or all when nothing else can move."""
        assert self._allocator is not None
        n = len(self._waiting)
        if n >= self._allocator.block:
            return self._allocator.block
        return 0 if self._queue or self._in_flight else n

    def _n_measured(self) -> int:
        return sum(1 for _ in takewhile(lambda chain: chain.gradient_norm is not None, self._waiting))

    def _plan(self, chain: _Chain, decision: Decision) -> None:
        norm, chain.gradient_norm = chain.gradient_norm, None
        n_fresh, outcome = len(chain.fresh), ""
        if decision.verdict is Verdict.RETRY:
            self.ledger.chains["planned"] += decision.draws
            chain.draws = decision.draws
            if chain.rounds:
                self._requeue(chain)
            else:
                self._queue.append(chain)
        else:
            outcome = self._settle(chain, decision)
        if self.on_event:
            self.on_event(
                Planned(
                    self.prompts[chain.row].id, chain.epoch, decision.verdict.value, decision.draws, outcome,
                    chain.rounds, chain.tried, chain.total, n_fresh, norm, self.version,
                )
            )  # fmt: skip

    def norms_wanted(self) -> list[Group]:
        """Groups whose gradient norms an allocator waits for; empty when there are none now. See `give_norms`."""
        if not self._measures_norms or not self._waiting or self._n_measured():
            return []
        chains = list(islice(self._waiting, self._n_due()))
        for chain in chains:
            self._prune(chain)
        return [self._group(chain, chain.best) for chain in chains]

    def give_norms(self, norms: Sequence[float]) -> None:
        """The answer to the last `norms_wanted`: one number a group, in that order (see `protocols.Learner`)."""
        if len(norms) > len(self._waiting) or any(not isfinite(norm) or norm < 0 for norm in norms):
            raise ValueError(f"gradient norms must be finite, at least 0, and one a group that waits, not {norms}")
        for chain, norm in zip(self._waiting, norms, strict=False):
            chain.gradient_norm = norm

    def _over_budget(self, n: int) -> bool:
        if self.max_completions is None:
            return False
        spent = self.ledger.drawn - self.ledger.reissued
        return spent + max(n, 1) > self.max_completions

    def _next_row(self) -> int | None:
        """The row to visit next, each once an epoch; None when every row left is live, or there are no more epochs."""
        while True:
            if self._due:
                return self._due.popleft()
            if self._position < len(self._order):
                row = self._order[self._position]
                self._position += 1
                if row in self._live:
                    self._owed[row] = None
                elif row not in self._retired:
                    return row
            elif self._owed or self._no_more_rows():
                return None  # the next epoch begins when all visits of this one have begun
            else:
                self.epoch += 1
                self._order = self._shuffled(self.epoch)
                self._position = 0

    def _no_more_rows(self) -> str:
        """Why no epoch follows this one, in words; empty when one does."""
        if self.max_epochs is not None and self.epoch + 1 >= self.max_epochs:
            return f"all {self.max_epochs} passes over the data are done"
        if len(self._retired) == len(self.prompts):
            return "every prompt has been retired by the strategy"
        # Chains that are still open count as barren until they are ready: the last pass is waited for, not overtaken.
        n_barren = self._n_barren + len(self._live)
        if n_barren >= self.max_barren_epochs * (len(self.prompts) - len(self._retired)) and not self._ready:
            return f"{self.max_barren_epochs} passes over the data gave nothing to train on: {self._closed_in_words()}"
        return ""

    def _closed_in_words(self) -> str:
        chains = self.ledger.chains
        closed = {
            "solved at once": chains["solved"] + chains["solved_after_retry"],
            "given up without a success": chains["given_up"],
            "without any verdict from the grader": chains["unverified"],
            "lost to infrastructure trouble": chains["failed"],
            "gone stale before they could be trained on": chains["stale"],
        }
        n = max(sum(closed.values()), 1)
        return ", ".join(f"{100 * count / n:.0f} % of groups {what}" for what, count in closed.items() if count)

    def _shuffled(self, epoch: int) -> array[int]:
        order = array("L", range(len(self.prompts)))
        Random(f"{self.seed}/order/{epoch}").shuffle(order)
        return order

    def _seed_of(self, prompt_id: str, chain: _Chain) -> int:
        # Depends on what is asked, not on when: an interleaving or a restart does not change the samples.
        key = f"{self.seed}|{prompt_id}|{chain.row}|{chain.epoch}|{chain.rounds}|{chain.trouble}"
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1

    # ------------------------------------------------------------- delivering

    def deliver(self, request_id: int, attempts: Sequence[Attempt], n_unverified: int = 0) -> Decision | None:
        """Takes the scored completions of a request and judges the group.

        n_unverified: completions that the grader could not decide; those that are missing altogether count as failed.
        Neither enters the baseline. Returns the decision, or None when no completion has a verdict (no coin is drawn).
        Raises ValueError for a request that is not in flight, too many attempts, or a reward above the maximum score.
        """
        chain = self._in_flight.get(request_id)
        if chain is None:
            raise ValueError(f"request {request_id} is not in flight: delivered twice, or never handed out")
        prompt = self.prompts[chain.row]
        n_failed = chain.draws - len(attempts) - n_unverified
        if n_failed < 0 or n_unverified < 0:
            raise ValueError(
                f"request {request_id} (prompt {prompt.id}) asked for {chain.draws} completions but got "
                f"{len(attempts)} attempts and {n_unverified} unverified ones"
            )
        attempts = [a if type(a.reward) is int else Attempt(exact(a.reward), a.version, a.completion) for a in attempts]
        rewards = tuple([a.reward for a in attempts])
        if rewards and max(rewards) > prompt.max_reward:
            raise ValueError(
                f"reward {max(rewards)} of prompt {prompt.id} is above its max_reward {prompt.max_reward}: "
                "scale the reward, or set the prompt's max_reward"
            )
        if not attempts and not n_unverified:
            self.fail(request_id, "no completion came back")
            return None

        del self._in_flight[request_id]
        chain.request = None
        this_round = chain.rounds + 1
        self.ledger.unverified += n_unverified
        self.ledger.failed += n_failed
        decision: Decision | None = None
        verdict, outcome = "trouble", ""
        if attempts:
            chain.trouble = 0
            best_before = chain.best
            chain.new_min, chain.new_max = min(rewards), max(rewards)
            chain.best = chain.new_max if best_before is None else max(best_before, chain.new_max)
            chain.tried += len(attempts)
            chain.total += sum(rewards)
            chain.rounds += 1
            chain.fresh.extend(attempts)
            self._prune(chain)
            if self._allocator is not None:
                self._remember(chain.row, self._allocator.learn(self._memory.get(chain.row), prompt, rewards))
            decision = self.strategy.judge(self._group(chain, best_before), self._rng)
            verdict, outcome = decision.verdict.value, self._settle(chain, decision)
        else:
            chain.trouble += 1
            if chain.tried == 0 or chain.trouble >= MAX_TROUBLE:
                outcome = "unverified"
                self.ledger.unverified += len(chain.fresh)
                self._close(chain, outcome)
            else:  # a history worth keeping: ask again
                self._requeue(chain)
        if self.on_event:
            n_truncated = sum(a.completion is not None and a.completion.finish == "length" for a in attempts)
            self.on_event(
                Judged(
                    request_id, prompt.id, chain.epoch, this_round, rewards,
                    tuple([a.version for a in attempts]), n_unverified, n_failed, n_truncated,
                    verdict, outcome, chain.tried, chain.total, len(chain.fresh), self.version,
                )
            )  # fmt: skip
        return decision

    def fail(self, request_id: int, reason: str) -> None:
        """The request was lost to trouble that says nothing about the policy. Asked again, at most MAX_TROUBLE times in all.

        Nothing is scored, no coin is drawn. Raises ValueError for a request that is not in flight.
        """
        chain = self._in_flight.pop(request_id, None)
        if chain is None:
            raise ValueError(f"request {request_id} is not in flight: it cannot fail")
        chain.request = None
        chain.trouble += 1
        self.ledger.failed += chain.draws
        closed = chain.trouble >= MAX_TROUBLE
        if closed:
            self.ledger.failed += len(chain.fresh)
            self._close(chain, "failed")
        else:
            self._requeue(chain)
        if self.on_event:
            prompt = self.prompts[chain.row]
            self.on_event(Failed(request_id, prompt.id, chain.epoch, chain.draws, reason, closed))

    def _remember(self, row: int, memory: Memory | None) -> None:
        if memory is not None:
            self._memory[row] = memory

    def _settle(self, chain: _Chain, decision: Decision) -> str:
        """Moves a judged chain on; returns how it closed, or the empty string while it is open."""
        outcome = ""
        n_fresh = len(chain.fresh)
        if decision.retire:
            self._retired.add(chain.row)
        match decision.verdict:
            case Verdict.TRAIN:
                if self.n_completions is not None:
                    chain.size = _n_weighed(self.strategy.weigh(self._group(chain, chain.best)))
                self._ready.append(chain)
            case Verdict.WAIT:
                self._waiting.append(chain)
            case Verdict.RETRY:
                chain.draws = decision.draws
                self.ledger.chains["retries"] += 1
                self._requeue(chain)
            case Verdict.SOLVED:
                solved = chain.total == chain.tried * self.prompts[chain.row].max_reward
                outcome = "solved" if solved else "solved_after_retry"
                self.ledger.filtered += n_fresh
                self._close(chain, outcome)
            case Verdict.GIVE_UP:
                outcome = "given_up"
                self.ledger.given_up += n_fresh
                self._close(chain, outcome)
        return outcome

    def _requeue(self, chain: _Chain) -> None:
        if self.retry_order == "front":
            self._queue.appendleft(chain)
        else:
            self._queue.append(chain)

    def _close(self, chain: _Chain, outcome: str) -> None:
        self.ledger.chains[outcome] += 1
        self._n_barren = 0 if outcome == "trained" else self._n_barren + 1
        del self._live[chain.row]
        if chain.row in self._owed:
            del self._owed[chain.row]
            if chain.row not in self._retired:
                self._due.append(chain.row)

    def _prune(self, chain: _Chain) -> None:
        """Drops attempts older than the window. An unknown version is kept: it is not known to be stale."""
        window = self.strategy.window
        if window is None:
            return
        oldest = self.version - window
        fresh = [a for a in chain.fresh if a.version is None or a.version >= oldest]
        self.ledger.stale += len(chain.fresh) - len(fresh)
        chain.fresh = fresh

    def _group(self, chain: _Chain, best_before: Exact | None) -> Group:
        return Group(
            self.prompts[chain.row], tuple(chain.fresh), chain.tried, chain.total,
            best_before, chain.new_min, chain.new_max, chain.rounds,
        )  # fmt: skip

    # ---------------------------------------------------------------- training

    def take(self) -> Batch | None:
        """The next batch, or None when it is not full yet.

        Ages are checked against the policy that is about to be trained. A group that can no longer be trained is dropped as
        stale and its prompt asked again, its history kept. When nothing more can come before a training step (a small data
        set, the end of the run), a batch may hold fewer groups.
        """
        size = self.n_completions or self.n_groups
        if self._waiting:
            self._refill()  # plans may make groups ready
        if not self._ready or (self._ready_size() < size and not self._is_dry()):
            return None
        groups: list[tuple[_Chain, TrainGroup]] = []
        total, is_full = 0, False
        for chain in list(self._ready):
            self._prune(chain)
            group = self._group(chain, chain.best)
            weights = tuple(self.strategy.weigh(group))
            if len(weights) != len(group.fresh):
                raise ValueError(f"{self.strategy} gave {len(weights)} weights for {len(group.fresh)} attempts")
            n_weighed = _n_weighed(weights)
            if not n_weighed:
                self._ready.remove(chain)
                self._drop_stale(chain)
                continue
            if self.n_completions is not None:
                chain.size = n_weighed
            if groups and total + chain.size > size:
                is_full = True  # it is carried over
                break
            total += chain.size
            fell_back = self._falls_back is not None and self._falls_back(group)
            baseline = float(group.baseline)
            groups.append(
                (chain, TrainGroup(group.prompt, group.fresh, weights, baseline, chain.tried, chain.rounds, fell_back))
            )
            if total >= size:
                is_full = True
                break
        if not groups or not (is_full or self._is_dry()):
            return None  # groups went stale, and others may still come
        for chain, train_group in groups:
            self._ready.popleft()
            self._train(chain, train_group)
        self._n_training += len(groups)
        self._training_size += total
        return Batch(self.version, tuple([train_group for _, train_group in groups]))

    def _is_dry(self) -> bool:
        """Nothing is in flight and nothing can be dispatched before a step is trained."""
        if self._in_flight:
            return False
        self._refill()
        if self._queue:
            return self._over_budget(self._queue[0].draws)
        if self._waiting:
            return False  # for gradient norms
        return self._n_training == 0 or len(self._live) + self._n_training < self.max_pending

    def _train(self, chain: _Chain, group: TrainGroup) -> None:
        ages = []
        for attempt, weight in zip(group.attempts, group.weights, strict=True):
            age = -1 if attempt.version is None else self.version - attempt.version
            if self.strategy.window is not None and age > self.strategy.window:
                raise AssertionError(f"an attempt of age {age} of prompt {group.prompt.id} reached a batch")
            if weight is not None:
                ages.append(age)
        n_left_out = len(group.attempts) - len(ages)
        self.ledger.trained += len(ages)
        self.ledger.left_out += n_left_out
        self._close(chain, "trained")
        if self.on_event:
            self.on_event(
                Trained(
                    group.prompt.id, chain.epoch, chain.rounds, len(ages), n_left_out,
                    chain.tried, chain.total, tuple(ages), self.version,
                )
            )  # fmt: skip

    def _drop_stale(self, chain: _Chain) -> None:
        n = len(chain.fresh)
        self.ledger.stale += n
        self.ledger.chains["went_stale"] += 1
        chain.fresh = []
        chain.best = None  # its success is gone untrained: there is nothing to beat
        chain.times_stale += 1
        closed = chain.times_stale >= MAX_TROUBLE
        if closed:
            self._close(chain, "stale")
        else:
            chain.draws = self.strategy.open(self.prompts[chain.row])
            if chain.draws:
                self._requeue(chain)
            else:
                self._waiting.append(chain)
        if self.on_event:
            self.on_event(WentStale(self.prompts[chain.row].id, chain.epoch, n, closed, self.version))

    def publish(self, version: int) -> None:
        """The step is done and the engines hold `version` (the same one again if the step was skipped)."""
        if version < self.version:
            raise ValueError(f"policy version {version} is older than the published {self.version}")
        self.version = version
        self._n_training = self._training_size = 0
        if self.on_event:
            self.on_event(Published(version))

    # ------------------------------------------------------------------- state

    @property
    def held(self) -> int:
        """Completions whose fate is still open: in flight, or fresh in an open or ready chain."""
        in_flight = sum(chain.draws for chain in self._in_flight.values())
        return in_flight + sum(len(chain.fresh) for chain in self._live.values())

    @property
    def is_training(self) -> bool:
        """Whether a batch has been taken whose step is not done yet (see `publish`)."""
        return self._n_training > 0

    @property
    def n_open(self) -> int:
        """Chains queued, in flight or waiting."""
        return len(self._live) - len(self._ready)

    @property
    def n_ready(self) -> int:
        """Groups waiting for a batch."""
        return len(self._ready)

    @property
    def finished(self) -> str | None:
        """Why the run is over, in words; None while there is something to draw, to wait for or to train."""
        if self._ready or self._n_training or not self._is_dry():
            return None
        if self._over_budget(self._queue[0].draws if self._queue else 0):
            return f"the budget of {self.max_completions} completions is spent"
        return self._no_more_rows()

    def check_balance(self) -> None:
        """Raises AssertionError unless every completion ever drawn is accounted for exactly once."""
        if self.ledger.drawn != self.ledger.settled + self.held:
            raise AssertionError(
                f"the ledger does not balance: {self.ledger.drawn} completions were drawn, but {self.ledger.settled} are "
                f"settled and {self.held} held: {self.ledger}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON-able values. In-flight chains are saved as to be issued again."""
        rng_version, rng_words, rng_gauss = self._rng.getstate()
        return {
            "prompts": self._fingerprint(),
            "seed": self.seed,
            "version": self.version,
            "epoch": self.epoch,
            "position": self._position,
            "rng": [rng_version, list(rng_words), rng_gauss],
            "ledger": self.ledger.as_dict(),
            "waiting": [self._chain_to_json(chain) for chain in self._waiting],
            "memory": {str(row): list(memory) for row, memory in self._memory.items()},
            "in_flight": [self._chain_to_json(chain) for chain in self._in_flight.values()],
            "queue": [self._chain_to_json(chain) for chain in self._queue],
            "ready": [self._chain_to_json(chain) for chain in self._ready],
            "owed": list(self._owed),
            "due": list(self._due),
            "retired": sorted(self._retired),
            "n_training": self._n_training,
            "training_size": self._training_size,
            "n_requests": self._n_requests,
            "n_barren": self._n_barren,
        }

    def _chain_to_json(self, chain: _Chain) -> dict[str, Any]:
        row = _shallow(chain)
        for name in ("total", "best", "new_min", "new_max"):
            row[name] = None if row[name] is None else to_json(row[name])
        row["fresh"] = [
            [to_json(a.reward), a.version, None if a.completion is None else _shallow(a.completion)]
            for a in chain.fresh
        ]
        return {"prompt": self.prompts[chain.row].id, **row}

    def load_state_dict(self, state: dict[str, Any], *, drop_chains: bool = False) -> None:
        """Goes on where `state_dict` was taken; what was in flight then is issued again, first.

        drop_chains: for data or a strategy that have changed since. All chains of the state are dropped, its completions
        counted as reissued; a new pass over the data begins. What was counted, the version and the random state stay.
        Raises ValueError when the data set (unless chains are dropped) or the seed differs from the saved one.
        """
        if state["prompts"] != self._fingerprint() and not drop_chains:
            raise ValueError(
                "the data set differs from the one this state was saved with: its prompts or their order changed"
            )
        if state["seed"] != self.seed:
            raise ValueError(f"seed = {self.seed} differs from the saved {state['seed']}")
        rng_version, rng_words, rng_gauss = state["rng"]
        self._rng.setstate((rng_version, tuple(rng_words), rng_gauss))
        self.version = state["version"]
        self.ledger = Ledger(**{**state["ledger"], "chains": Counter(state["ledger"]["chains"])})
        self._n_training = state["n_training"]
        self._training_size = state["training_size"]
        self._n_requests = state["n_requests"]
        self._in_flight = {}
        for row in state["in_flight"]:
            self._reissued(row["prompt"], row["epoch"], row["request"], row["draws"])
        if drop_chains:
            for row in (row for place in _PLACES for row in state[place]):
                self.ledger.chains["dropped"] += 1
                self._reissued(row["prompt"], row["epoch"], None, len(row["fresh"]))
            state = {**state, **dict.fromkeys((*_PLACES, "owed", "due", "retired"), ()), "memory": {}}
            state |= {"epoch": state["epoch"] + 1, "position": 0, "n_barren": 0}
        self.epoch = state["epoch"]
        self._order = self._shuffled(self.epoch)
        self._position = state["position"]
        self._queue = deque(map(_chain_from_json, (*state["in_flight"], *state["queue"])))
        self._ready = deque(map(_chain_from_json, state["ready"]))
        self._waiting = deque(map(_chain_from_json, state["waiting"]))
        self._memory = {int(row): tuple(memory) for row, memory in state["memory"].items()}
        self._live = {chain.row: chain for chain in [*self._queue, *self._waiting, *self._ready]}
        self._owed = dict.fromkeys(state["owed"])
        self._due = deque(state["due"])
        self._retired = set(state["retired"])
        self._n_barren = state["n_barren"]

    def _reissued(self, prompt_id: str, epoch: int, request: int | None, n: int) -> None:
        self.ledger.reissued += n
        if self.on_event:
            self.on_event(Reissued(request, prompt_id, epoch, n))

    def _fingerprint(self) -> str:
        digest = blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(prompt.id.encode())
            digest.update(b"\0")
        return f"{len(self.prompts)} prompts, {digest.hexdigest()}"


_PLACES = ("in_flight", "queue", "waiting", "ready")
"""Where a live chain is, as named in `Scheduler.state_dict`."""


def _n_weighed(weights: Weights) -> int:
    """Attempts that are trained on, with weight 0.0 too."""
    return len(weights) - sum(weight is None for weight in weights)


def _shallow(value: _Chain | Completion) -> dict[str, Any]:
    """The fields by name. Not `asdict`, which copies token by token: a checkpoint may hold millions."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _chain_from_json(row: dict[str, Any]) -> _Chain:
    row = {name: value for name, value in row.items() if name != "prompt"}
    for name in ("total", "best", "new_min", "new_max"):
        row[name] = None if row[name] is None else from_json(row[name])
    row["fresh"] = [Attempt(from_json(reward), version, _completion(c)) for reward, version, c in row["fresh"]]
    return _Chain(**row)


def _completion(row: dict[str, Any] | None) -> Completion | None:
    if row is None:
        return None
    flat = {name: tuple(row[name]) for name in ("tokens", "logprobs", "mask") if row[name] is not None}
    nested = {name: tuple(map(tuple, row[name])) for name in ("top_ids", "top_logprobs") if row[name] is not None}
    return Completion(**{**row, **flat, **nested})
