"""NGU on one page: the whole loop, with nothing between you and it but the strategy itself.

    python examples/ngu_on_one_page.py            trains the same policy twice, fixed-K GRPO and NGU, in 15 seconds

The task: a value goes through one to three operators; the policy writes each result. It learned from a sloppy teacher, so
some operators it knows (pass rate near 1) and some it hardly ever gets right; the problems with several of those are the
hardest. Everything a real run adds (engines, processes, checkpoints, eight-bit this and that) is left out; everything that
makes NGU is here: draw K, skip what is solved, train on contrast, ask again with probability p and remember every attempt,
leave old completions out of the step but not out of the baseline.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from nevergiveup.strategies import FixedK, NeverGiveUp, Strategy
from nevergiveup.types import Attempt, Completion, Group, Prompt, Verdict

N_VALUES, N_OPERATORS, SLOPPY = 16, 12, 4  # the last SLOPPY operators are taught badly
RELIABILITY = [0.97] * (N_OPERATORS - SLOPPY) + [0.12] * SLOPPY

world = random.Random(0)
TABLES = [world.sample(range(N_VALUES), N_VALUES) for _ in range(N_OPERATORS)]
WRONG = [
    [world.randrange(N_VALUES) for _ in range(N_VALUES)] for _ in range(N_OPERATORS)
]  # the teacher's favourite mistakes


def make_prompt(start: int, operators: tuple[int, ...]) -> Prompt:
    value, answer = start, []
    for operator in operators:
        value = TABLES[operator][value]
        answer.append(value)
    return Prompt(f"{start} {operators}", answer=tuple(answer), tokens=(start, *operators))


def make_prompts(n: int, rng: random.Random) -> list[Prompt]:
    """Two thirds easy; a third needs two or three of the operators that the teacher got wrong."""
    prompts = {}
    while len(prompts) < n:
        hard = rng.random() < 1 / 3
        pool = range(N_OPERATORS - SLOPPY, N_OPERATORS) if hard else range(N_OPERATORS - SLOPPY)
        operators = tuple(rng.choice(pool) for _ in range(rng.randint(2, 3) if hard else rng.randint(1, 3)))
        prompt = make_prompt(rng.randrange(N_VALUES), operators)
        prompts[prompt.id] = prompt
    return list(prompts.values())


class Policy(nn.Module):
    """p(next value | operator, value): a language model with a memory of one token, which is all this task needs."""

    def __init__(self) -> None:
        super().__init__()
        self.operator, self.value = nn.Embedding(N_OPERATORS, 64), nn.Embedding(N_VALUES, 64)
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, N_VALUES))

    def forward(self, operator: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.operator(operator), self.value(value)], -1)).log_softmax(-1)


def warm_start(policy: Policy, rng: random.Random) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), 2e-3)
    for _ in range(600):
        pairs = [(rng.randrange(N_OPERATORS), rng.randrange(N_VALUES)) for _ in range(256)]
        labels = [
            TABLES[o][v] if rng.random() < RELIABILITY[o] else rng.choice((WRONG[o][v], rng.randrange(N_VALUES)))
            for o, v in pairs
        ]
        operator, value = torch.tensor(pairs).T
        loss = nn.functional.nll_loss(policy(operator, value), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(policy: Policy, prompt: Prompt, n: int, version: int) -> list[Attempt]:
    """n completions, graded: 1 for the right values, else 0."""
    start, *operators = prompt.tokens
    value = torch.full((n,), start)
    tokens, logprobs = [], []
    for operator in operators:
        log_p = policy(torch.full((n,), operator), value)
        value = torch.multinomial(log_p.exp(), 1).squeeze(-1)
        tokens.append(value)
        logprobs.append(log_p.gather(-1, value[:, None]).squeeze(-1))
    rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
    return [
        Attempt(int(tuple(t) == prompt.answer), version, Completion(tuple(t), tuple(lp), "", "stop", version, version))
        for t, lp in rows
    ]


@torch.no_grad()
def pass_rate(policy: Policy, prompts: list[Prompt]) -> torch.Tensor:
    """Exact: the product of the probabilities of the right values."""
    rates = []
    for prompt in prompts:
        start, *operators = prompt.tokens
        log_p = policy(torch.tensor(operators), torch.tensor([start, *prompt.answer[:-1]]))
        rates.append(log_p.gather(-1, torch.tensor(prompt.answer)[:, None]).sum().exp())
    return torch.stack(rates)


@dataclass
class Chain:
    """One visit of a prompt: what is still fresh, and exact sums over all that was ever drawn."""

    prompt: Prompt
    fresh: list[Attempt] = field(default_factory=list)
    tried: int = 0
    total: int = 0
    best: int | None = None
    rounds: int = 0

    def add(self, attempts: list[Attempt], oldest: int) -> Group:
        before, rewards = self.best, [a.reward for a in attempts]
        self.tried, self.total, self.rounds = self.tried + len(attempts), self.total + sum(rewards), self.rounds + 1
        self.best = max(rewards) if before is None else max(before, *rewards)
        self.fresh = [a for a in [*self.fresh, *attempts] if a.version >= oldest]
        return Group(
            self.prompt, tuple(self.fresh), self.tried, self.total, before, min(rewards), max(rewards), self.rounds
        )


def train(
    policy: Policy, strategy: Strategy, prompts: list[Prompt], n_groups: int, budget: int, rng: random.Random
) -> int:
    """Draws `budget` completions; a step whenever n_groups groups are ready. Returns the number of steps."""
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    queue: deque[Chain] = deque()
    ready: list[Group] = []
    version = 0
    while budget > 0:
        if not queue:  # the next prompts, each a new chain; retries were put in front of them
            queue.extend(Chain(prompt) for prompt in rng.sample(prompts, 64))
        chain = queue.popleft()
        n = strategy.open(chain.prompt)
        budget -= n
        group = chain.add(sample(policy, chain.prompt, n, version), oldest=version - strategy.window)
        decision = strategy.judge(group, rng)
        if decision.verdict is Verdict.RETRY:
            queue.append(chain)
        elif decision.verdict is Verdict.TRAIN:
            ready.append(group)  # SOLVED and GIVE_UP close the chain: the prompt comes again on another visit
        if len(ready) == n_groups:  # judged on arrival, weighed now: what went stale while it waited is left out
            ready = [
                replace(g, fresh=tuple(a for a in g.fresh if a.version >= version - strategy.window)) for g in ready
            ]
            step(policy, optimizer, [(g, strategy.weigh(g)) for g in ready])
            ready, version = [], version + 1
    return version


def step(policy: Policy, optimizer: torch.optim.Optimizer, batch: list[tuple[Group, Sequence[float | None]]]) -> None:
    """One step on the clipped objective of GRPO, averaged over all tokens of the batch."""
    operator, value, token, mu, advantage = [], [], [], [], []
    for group, weights in batch:
        start, *operators = group.prompt.tokens
        for attempt, weight in zip(group.fresh, weights, strict=True):
            if weight is None:
                continue
            operator += operators
            value += [start, *attempt.completion.tokens[:-1]]
            token += attempt.completion.tokens
            mu += attempt.completion.logprobs
            advantage += [weight] * len(operators)
    log_p = policy(torch.tensor(operator), torch.tensor(value)).gather(-1, torch.tensor(token)[:, None]).squeeze(-1)
    ratio, advantage = (log_p - torch.tensor(mu)).exp(), torch.tensor(advantage)
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(budget: int = 40_000) -> dict[str, tuple[float, float]]:
    rng = random.Random(1)
    prompts = make_prompts(600, rng)
    torch.manual_seed(0)
    start = Policy()
    warm_start(start, rng)
    before = pass_rate(start, prompts)
    hard = before < 0.02
    print(
        f"before        all {before.mean():.3f}   extra hard {before[hard].mean():.3f}  ({int(hard.sum())} of 600 prompts)"
    )
    results = {}
    for name, strategy, n_groups in (
        ("fixed-K GRPO", FixedK(k=4), 64),
        ("NGU", NeverGiveUp(k=4, p=0.95, window=4), 16),
    ):
        policy = Policy()
        policy.load_state_dict(start.state_dict())
        n_steps = train(policy, strategy, prompts, n_groups, budget, random.Random(2))
        after = pass_rate(policy, prompts)
        results[name] = (after.mean().item(), after[hard].mean().item())
        print(f"{name:12}  all {after.mean():.3f}   extra hard {after[hard].mean():.3f}  ({n_steps} steps)")
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
