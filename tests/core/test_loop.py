"""The loop against engines and graders that behave, fail, hang or lie: the run makes progress, or ends with a reason."""

import asyncio
from fractions import Fraction
from random import Random

import pytest

from nevergiveup.events import Judged, Planned
from nevergiveup.loop import GraderBroken, Loop, Stalled, TaskGrader
from nevergiveup.protocols import InfrastructureError, Restarted
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import STRATEGIES, FixedK, GvmRaft, NeverGiveUp
from nevergiveup.types import Attempt, Completion, Prompt, Unverified, completion_seeds


class DiceEngine:
    """Completions are right with the probability that is the prompt's answer, decided by their seed; takes some turns."""

    def __init__(self, trouble=lambda call: None, finish="stop"):
        self.version = 0
        self.n_calls = 0
        self.trouble = trouble
        self.finish = finish

    async def sample(self, prompt, n, seed):
        self.n_calls += 1
        call, version = self.n_calls, self.version
        for _ in range(1 + seed % 5):
            await asyncio.sleep(0)
        if (error := self.trouble(call)) is not None:
            raise error
        right = [Random(s).random() < prompt.answer for s in completion_seeds(seed, n)]
        return [Completion((int(r),), (-0.7,), str(int(r)), self.finish, version, self.version) for r in right]

    async def load(self, weights, version):
        await asyncio.sleep(0)
        self.version = version

    async def counters(self):
        return {}

    async def close(self):
        pass


class CountingLearner:
    """Keeps the batches that it was given."""

    def __init__(self):
        self.version = 0
        self.batches = []
        self.norm = 1.0

    async def step(self, batch):
        self.batches.append(batch)
        await asyncio.sleep(0)
        self.version += 1
        return {"loss": 0.0}

    async def gradient_norms(self, groups):
        self.measured = [*getattr(self, "measured", []), *groups]
        await asyncio.sleep(0)
        return [self.norm] * len(groups)

    async def weights(self):
        return {}


class DigitTask:
    def __init__(self, trouble=lambda prompt: None):
        self.trouble = trouble

    def prompts(self, split):
        return []

    def grade(self, prompt, completion):
        if (grade := self.trouble(prompt)) is not None:
            return grade
        return int(completion.text)


def prompts(*rates, n=20):
    return [Prompt(f"{rate}-{i}", answer=rate) for i in range(n) for rate in rates]


def make(
    data,
    *,
    strategy=None,
    engine=None,
    task=None,
    n_steps=10,
    stall_s=5.0,
    sync_s=5.0,
    truncated_is_wrong=True,
    shape=None,
    **options,
):
    events = []
    options = {"n_groups": 4, "lag": 1, **options}
    scheduler = Scheduler(strategy or NeverGiveUp(p=0.5), data, on_event=events.append, **options)
    learner = CountingLearner()
    loop = Loop(
        scheduler, engine or DiceEngine(), TaskGrader(task or DigitTask()), learner,
        n_steps=n_steps, max_in_flight=32, stall_s=stall_s, sync_s=sync_s, truncated_is_wrong=truncated_is_wrong, shape=shape,
    )  # fmt: skip
    return loop, scheduler, learner, events


def run(loop):
    return asyncio.run(asyncio.wait_for(loop.run(), 20))


def test_runs_the_steps_and_balances():
    loop, scheduler, learner, _ = make(prompts(0.5, 0.05))
    assert run(loop) == "all 10 steps are done"
    assert len(learner.batches) == 10
    assert all(len(batch.groups) == 4 for batch in learner.batches)
    scheduler.check_balance()


def test_the_same_seed_gives_the_same_events_and_another_seed_other_ones():
    first, again, other = [], [], []
    for events, seed in ((first, 1), (again, 1), (other, 2)):
        loop, _, _, seen = make(prompts(0.5, 0.05), seed=seed)
        run(loop)
        events += seen
    assert first == again
    assert first != other


def test_lag_0_trains_on_nothing_stale():
    loop, _, learner, _ = make(prompts(0.5, 0.05), lag=0)
    run(loop)
    ages = [batch.version - a.version for batch in learner.batches for g in batch.groups for a in g.attempts]
    assert ages
    assert set(ages) == {0}


def test_lag_1_keeps_the_engine_one_batch_ahead():
    loop, _, learner, _ = make(prompts(0.5), strategy=FixedK(), lag=1)
    run(loop)
    ages = {batch.version - a.version for batch in learner.batches for g in batch.groups for a in g.attempts}
    assert max(ages) >= 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("boom")])
def test_an_engine_that_breaks_ends_the_run_with_its_own_words(error):
    loop, *_ = make(prompts(0.5), engine=DiceEngine(lambda call: error if call >= 3 else None))
    with pytest.raises(type(error), match="boom"):
        run(loop)


def test_lost_requests_are_asked_again_and_are_not_wrong_answers():
    lose = lambda call: InfrastructureError("connection lost") if call % 3 == 0 else None  # noqa: E731
    loop, scheduler, learner, events = make(prompts(0.5, 0.9), engine=DiceEngine(lose))
    run(loop)
    assert len(learner.batches) == 10
    assert scheduler.ledger.failed > 0
    scheduler.check_balance()
    scored = sum(len(e.rewards) for e in events if e.kind == "judged")
    assert scored == sum(e.n for e in events if e.kind == "dispatched") - scheduler.ledger.failed - in_flight(events)


def in_flight(events):
    out = {e.request: e.n for e in events if e.kind == "dispatched"}
    for e in events:
        if e.kind in ("judged", "failed"):
            out.pop(e.request)
    return sum(out.values())


def test_an_engine_that_only_fails_ends_the_run_instead_of_burning_the_data():
    engine = DiceEngine(lambda call: InfrastructureError("no route to engine"))
    loop, scheduler, *_ = make(prompts(0.5, n=5000), engine=engine)
    with pytest.raises(InfrastructureError, match="no route to engine"):
        run(loop)
    assert engine.n_calls < 100
    assert scheduler.ledger.chains["trained"] == 0


def test_a_reward_that_raises_now_and_then_does_not_count_as_wrong():
    def trouble(prompt):
        if prompt.id.endswith("3"):
            raise KeyError("no such row")

    loop, _, learner, events = make(prompts(0.5), task=DigitTask(trouble))
    run(loop)
    unverified = [e for e in events if e.kind == "judged" and e.n_unverified]
    assert unverified
    assert all(e.rewards == () and e.verdict == "trouble" and e.tried == 0 for e in unverified)
    assert not any(g.prompt.id.endswith("3") for batch in learner.batches for g in batch.groups)


def test_a_broken_grader_ends_the_run_with_its_first_traceback():
    def trouble(prompt):
        raise KeyError("column gold is missing")

    loop, scheduler, *_ = make(prompts(0.5), task=DigitTask(trouble))
    with pytest.raises(GraderBroken, match="column gold is missing"):
        run(loop)
    assert scheduler.ledger.trained == 0
    assert scheduler.ledger.chains["given_up"] == 0


def test_a_grader_may_say_that_it_cannot_tell():
    loop, scheduler, *_ = make(
        prompts(0.5), task=DigitTask(lambda p: Unverified("timeout") if p.id == "0.5-1" else None)
    )
    run(loop)
    assert 0 < scheduler.ledger.unverified < 64


def test_a_silent_engine_is_noticed():
    class Silent(DiceEngine):
        async def sample(self, prompt, n, seed):
            await asyncio.Event().wait()

    loop, *_ = make(prompts(0.5), engine=Silent(), stall_s=0.2)
    with pytest.raises(Stalled, match="32 completions are out, 0 groups ready"):
        run(loop)


@pytest.mark.parametrize(
    ("rate", "words"), [(1.0, "100 % of groups solved at once"), (0.0, "given up without a success")]
)
def test_data_that_can_never_train_end_with_a_reason(rate, words):
    loop, _, learner, _ = make(prompts(rate, n=7))
    reason = run(loop)
    assert "gave nothing to train on" in reason
    assert words in reason
    assert not learner.batches


def test_a_data_set_smaller_than_a_batch_trains():
    loop, _, learner, _ = make(prompts(0.5, n=3), n_groups=64, n_steps=4)
    assert run(loop) == "all 4 steps are done"
    assert all(1 <= len(batch.groups) <= 3 for batch in learner.batches)


def test_the_budget_of_completions_is_not_exceeded_and_all_of_it_is_used():
    loop, scheduler, *_ = make(prompts(0.5), strategy=FixedK(), n_steps=None, max_completions=100)
    assert run(loop) == "the budget of 100 completions is spent"
    assert scheduler.ledger.drawn == 100
    assert scheduler.ledger.trained == 100  # the last batch is a partial one


def test_truncated_completions_are_wrong_unless_kept():
    for wrong, reward in ((True, {0}), (False, {0, 1})):
        loop, _, _, events = make(
            prompts(0.5), strategy=FixedK(), engine=DiceEngine(finish="length"), truncated_is_wrong=wrong
        )
        run(loop)
        judged = [e for e in events if e.kind == "judged"]
        assert {r for e in judged for r in e.rewards} == reward
        assert all(e.n_truncated == 4 for e in judged)


def test_an_engine_that_never_takes_new_weights_is_noticed():
    class Stuck(DiceEngine):
        async def load(self, weights, version):
            await asyncio.Event().wait()

    loop, scheduler, *_ = make(prompts(0.5), engine=Stuck(), sync_s=0.2)
    with pytest.raises(Stalled, match=r"did not take the weights of version 1 within 0\.2 s"):
        run(loop)
    assert scheduler.version == 0


class BadSync(DiceEngine):
    """Loses the first `n` tries to bring it version 3."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    async def load(self, weights, version):
        if version == 3 and self.n:
            self.n -= 1
            raise InfrastructureError("answer 500")
        await super().load(weights, version)


def test_the_version_moves_only_when_the_engine_has_acknowledged_it():
    """Case C30 (a)."""
    loop, scheduler, learner, _ = make(prompts(0.5), engine=BadSync(1000))
    with pytest.raises(InfrastructureError, match="answer 500"):
        run(loop)
    assert scheduler.version == 2
    assert learner.version == 3
    assert scheduler.is_training
    scheduler.publish(learner.version)  # what a start with these weights does
    scheduler.check_balance()
    again = Loop(scheduler, DiceEngine(), TaskGrader(DigitTask()), learner, n_steps=10, max_in_flight=32, stall_s=5)
    for request in list(scheduler._in_flight):  # the old engine is gone, and what it was at work on
        scheduler.fail(request, "gone")
    run(again)
    assert scheduler.version == 10


def test_a_sync_that_fails_now_and_then_is_tried_again():
    loop, scheduler, *_ = make(prompts(0.5), engine=BadSync(2))
    run(loop)
    assert scheduler.version == 10


def test_what_a_restarted_engine_lost_is_asked_again_however_much_it_is():
    """Each request is lost once, all in a row: more of them than an engine that only fails may lose."""

    class Dies(DiceEngine):
        def __init__(self):
            super().__init__()
            self.seen = set()

        async def sample(self, prompt, n, seed):
            if prompt.id not in self.seen and len(self.seen) < 40:
                self.seen.add(prompt.id)
                await asyncio.sleep(0)
                raise Restarted("the engine died and is started again")
            return await super().sample(prompt, n, seed)

    loop, scheduler, *_ = make(prompts(0.5, n=100), engine=Dies(), max_pending=64)
    run(loop)
    assert scheduler.version == 10
    assert scheduler.ledger.failed == 160
    assert scheduler.ledger.chains["failed"] == 0
    scheduler.check_balance()


def test_a_step_that_hangs_is_noticed():
    loop, scheduler, learner, _ = make(prompts(0.5), stall_s=0.2)

    async def hang(batch):
        await asyncio.Event().wait()

    learner.step = hang
    with pytest.raises(Stalled, match=r"step that makes version 1 took longer than 0\.2 s"):
        run(loop)
    assert scheduler.version == 0


def test_after_a_drain_nothing_is_under_way_and_the_run_goes_on():
    loop, scheduler, _learner, _ = make(prompts(0.5, n=200), max_pending=32)
    under_way = []

    async def on_step(step):
        before = len(scheduler._in_flight)
        await loop.drain()
        under_way.append((before, len(scheduler._in_flight)))

    loop.on_step = on_step
    run(loop)
    assert len(under_way) == 10
    assert all(after == 0 for _, after in under_way)
    assert sum(before for before, _ in under_way) > 10


def test_stop_ends_after_the_running_step():
    loop, _, learner, _ = make(prompts(0.5), n_steps=None)

    async def stop_later(step):
        if step.version == 3:
            loop.stop("enough")

    loop.on_step = stop_later
    assert run(loop) == "enough"
    assert learner.version == 3


def synchronous(scheduler, engine, n_steps):
    """The plain loop: draw all that may be drawn, judge it in order, train as soon as a batch is full, and again."""
    task, n_trained = DigitTask(), 0
    while n_trained < n_steps and scheduler.finished is None:
        in_flight = []
        while (request := scheduler.next()) is not None:
            in_flight.append(request)
        for request in in_flight:
            completions = asyncio.run(engine.sample(request.prompt, request.n, request.seed))
            attempts = [Attempt(task.grade(request.prompt, c), c.version_first, c) for c in completions]
            scheduler.deliver(request.id, attempts)
        if scheduler.take() is not None:
            n_trained += 1
            engine.version += 1
            scheduler.publish(engine.version)


class RoundEngine(DiceEngine):
    """Answers when everything that is out has come in: a synchronous rollout behind the asynchronous interface."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    async def sample(self, prompt, n, seed):
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        if len(self.waiting) == 1:
            asyncio.get_running_loop().call_soon(self._answer_all)
        await mine
        version = self.version
        right = [Random(s).random() < prompt.answer for s in completion_seeds(seed, n)]
        return [Completion((int(r),), (-0.7,), str(int(r)), "stop", version, version) for r in right]

    def _answer_all(self):
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.set_result(None)


EACH_ALONE = {"gvm-raft": GvmRaft(block=1)}
"""Shares of a budget depend on who happens to wait together, in whatever loop."""


@pytest.mark.parametrize("strategy", [EACH_ALONE.get(n, cls()) for n, cls in STRATEGIES.items()], ids=lambda s: s.name)
def test_lag_0_trains_on_what_the_synchronous_loop_trains_on(strategy):
    """Law 7: the same groups, attempts and weights, step by step, with nothing older than the policy in them."""
    data = prompts(0.5, 0.1, 0.95, n=30)
    options = {"n_groups": 4, "lag": 0, "max_pending": 4, "seed": 3}
    loop, _, learner, _ = make(data, strategy=strategy, engine=RoundEngine(), n_steps=12, **options)
    run(loop)
    batches = []
    scheduler = Scheduler(strategy, data, **options)
    take = scheduler.take
    scheduler.take = lambda: batches.append(take()) or batches[-1]
    synchronous(scheduler, DiceEngine(), 12)
    batches = [batch for batch in batches if batch is not None]
    assert len(batches) >= 10
    assert {a.version for batch in batches for group in batch.groups for a in group.attempts} == set(
        range(len(batches))
    )
    for ours, theirs in zip(learner.batches, batches, strict=True):
        assert ours.version == theirs.version
        assert [(g.prompt.id, g.weights, g.tried) for g in ours.groups] == [
            (g.prompt.id, g.weights, g.tried) for g in theirs.groups
        ]


def test_gradient_norms_are_measured_between_steps():
    loop, scheduler, learner, events = make(
        prompts(0.5, 0.05), strategy=GvmRaft(probe=4, budget=4, block=2), gradient_norms=True
    )
    assert run(loop) == "all 10 steps are done"
    planned = [event for event in events if isinstance(event, Planned)]
    assert len(learner.measured) >= len(planned) > 0
    assert all(event.gradient_norm == 1.0 for event in planned)
    scheduler.check_balance()


def test_gradient_norms_that_never_come_are_noticed():
    loop, _, learner, _ = make(prompts(0.5), strategy=GvmRaft(), stall_s=0.2, gradient_norms=True)

    async def hang(groups):
        await asyncio.Event().wait()

    learner.gradient_norms = hang
    with pytest.raises(Stalled, match=r"measuring the gradients of \d+ groups took longer than 0\.2 s"):
        run(loop)


def test_rewards_are_shaped_after_grading():
    def shape(reward, completion):
        return reward - Fraction(1, 4) if completion.finish == "length" else reward

    loop, _, _, events = make(
        prompts(0.5), engine=DiceEngine(finish="length"), truncated_is_wrong=False, shape=shape, strategy=FixedK()
    )
    run(loop)
    rewards = {reward for event in events if isinstance(event, Judged) for reward in event.rewards}
    assert rewards == {Fraction(-1, 4), Fraction(3, 4)}


def test_groups_that_an_allocator_sends_to_training_wake_the_trainer():
    """Norms of 0: nobody gets a share, and every group with a right answer is trained on as it is, decided in `next`."""
    for seed in range(20):
        loop, scheduler, learner, events = make(
            prompts(0.5, n=40), strategy=GvmRaft(probe=4, budget=4, block=8), n_steps=12, stall_s=1.0,
            max_pending=16, gradient_norms=True, seed=seed,
        )  # fmt: skip
        learner.norm = 0.0
        assert run(loop) == "all 12 steps are done"
        assert {event.verdict for event in events if isinstance(event, Planned)} == {"train", "give_up"}
        scheduler.check_balance()
