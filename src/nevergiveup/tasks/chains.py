"""The generated task `chains`: apply a chain of secret operators to a value, writing every intermediate value.

Layer 3. Standard library only; everything follows from (seed, preset, impossible).

There are 16 values and 25 operators. Each operator is a fixed random permutation of the values. A prompt is a start
value and 1 to 4 operators; its one right completion is the value after each operator, then the end of sequence:

    prompt      <bos> 7 a3 d1 d0 _ =        completion   12 0 5 <eos>

The policy meets the operators in supervised warm-up data written by a noisy teacher. Operators come in four tiers, `a`
(the teacher is nearly always right) to `d` (rarely right). A wrong step goes half the time to one fixed wrong value, so
that the best guess of the warm-started policy is wrong there. A chain is right only if all its steps are: pass rates
range from nearly 1 to well below 1/100, and the prompts with several `d` operators are the hardest. In the prompts, `d`
operators come only in twos and threes, so that nothing easier teaches them.

As there is exactly one right completion, pass@1 of a policy is the product of its token probabilities: exact, without
sampling noise (`nevergiveup.models.exact_pass_rate`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import exp, log
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from nevergiveup.types import Completion, Prompt

N_VALUES = 16
MAX_OPERATORS = 4

TIERS: Mapping[str, int] = {"a": 10, "b": 5, "c": 4, "d": 6}
"""Operators in each tier, the most reliably taught first."""

RELIABILITY: Mapping[str, tuple[float, float, float, float]] = {
    "demo": (0.97, 0.70, 0.25, 0.18),
    "study": (0.97, 0.70, 0.20, 0.12),
}
"""How often the teacher applies an operator of each tier correctly, by preset (before the jitter of a table entry)."""

JITTER = 0.35
"""Standard deviation of the noise on the log-odds of each (operator, value), so that no two steps are equally hard."""

Sequences: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""(prompt tokens, completion tokens) pairs."""


class Composition(NamedTuple):
    """A kind of prompt: operators that it must have, between how many others it may have, and of which tiers."""

    required: str
    others: str
    n_others: tuple[int, int]
    n_train: int
    n_heldout: int


COMPOSITIONS: Mapping[str, Composition] = {
    "only a": Composition("", "a", (1, 4), 358, 287),
    "one b": Composition("b", "a", (0, 3), 154, 123),
    "one c": Composition("c", "ab", (0, 3), 154, 123),
    "two c": Composition("cc", "a", (0, 1), 51, 41),
    "two d": Composition("dd", "a", (0, 1), 225, 180),
    "three d": Composition("ddd", "", (0, 0), 82, 66),
}
"""The mix of prompts: 35, 15, 15, 5, 22 and 8 % of 1,024 prompts to train on and 820 held out."""


@dataclass(frozen=True)
class Chains:
    """The task `chains`. Two equal instances have equal operators, teacher and prompts, on any machine.

    impossible: share of the training prompts that no completion can solve, as bad labels would be; their ids end in
    "-impossible". Held-out prompts are all sound.

    Raises ValueError for an unknown preset, and a share outside [0, 1].
    """

    seed: int = 0
    preset: Literal["demo", "study"] = "demo"
    impossible: float = 0.0

    def __post_init__(self) -> None:
        if self.preset not in RELIABILITY:
            raise ValueError(f"preset must be one of {', '.join(RELIABILITY)}, not {self.preset!r}")
        if not 0 <= self.impossible <= 1:
            raise ValueError(f"impossible must be a share from 0 to 1, not {self.impossible}")

    # The vocabulary: ids are positions. Values come first, so that the id of a value is the value itself.

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The word of each token id."""
        values = tuple(str(value) for value in range(N_VALUES))
        operators = tuple(f"{tier}{i}" for tier, n in TIERS.items() for i in range(n))
        return (*values, *operators, "<bos>", "<eos>", "<pad>", "_", "=")

    @property
    def bos_id(self) -> int:
        return self.vocabulary.index("<bos>")

    @property
    def eos_id(self) -> int:
        return self.vocabulary.index("<eos>")

    @property
    def pad_id(self) -> int:
        """Padding for whoever batches sequences; in no prompt, as an empty operator place is "_", an ordinary word."""
        return self.vocabulary.index("<pad>")

    @property
    def context(self) -> int:
        """Positions of the tiny model: a prompt takes 7, a completion at most 5."""
        return 32

    @property
    def max_completion_tokens(self) -> int:
        return MAX_OPERATORS + 1

    # The operators and the teacher

    @cached_property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """tables[operator][value]: the right result. Each row is a permutation of the values."""
        rng = Random(f"chains operators {self.seed}")
        return tuple(tuple(rng.sample(range(N_VALUES), N_VALUES)) for _ in range(sum(TIERS.values())))

    @cached_property
    def teacher(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """teacher[operator][value][result]: the probability that the teacher writes that result."""
        rng = Random(f"chains teacher {self.seed} {self.preset}")
        reliabilities = [r for r, n in zip(RELIABILITY[self.preset], TIERS.values(), strict=True) for _ in range(n)]
        return tuple(
            tuple(_teacher_entry(rng, right, reliability) for right in table)
            for table, reliability in zip(self.tables, reliabilities, strict=True)
        )

    @cached_property
    def _teacher_cumulated(self) -> list[list[list[float]]]:
        return [[list(accumulate(entry)) for entry in table] for table in self.teacher]

    def teacher_sequences(self, rng: Random, n: int) -> Sequences:
        """n random chains (value, length and operators uniform) as the noisy teacher completes them: warm-up data."""
        sequences: Sequences = []
        results = range(N_VALUES)
        for _ in range(n):
            start = value = rng.randrange(N_VALUES)
            operators = [rng.randrange(len(self.tables)) for _ in range(rng.randint(1, MAX_OPERATORS))]
            completion = []
            for operator in operators:  # a wrong value is carried on: the teacher goes on from what it wrote
                value = rng.choices(results, cum_weights=self._teacher_cumulated[operator][value])[0]
                completion.append(value)
            sequences.append((self._prompt_tokens(start, operators), (*completion, self.eos_id)))
        return sequences

    # The prompts

    def prompts(self, split: str) -> Sequence[Prompt]:
        """1,024 prompts of split "train", 820 of "heldout", none in both. Raises ValueError for any other split."""
        if split not in self._splits:
            raise ValueError(f"split must be one of {', '.join(self._splits)}, not {split!r}")
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[str, tuple[Prompt, ...]]:
        rng = Random(f"chains prompts {self.seed}")
        train: list[Prompt] = []
        heldout: list[Prompt] = []
        for composition in COMPOSITIONS.values():
            n = composition.n_train + composition.n_heldout
            found: dict[tuple[int, ...], Prompt] = {}
            while len(found) < n:
                prompt = self._draw(rng, composition)
                found.setdefault(prompt.tokens, prompt)
            drawn = list(found.values())
            rng.shuffle(drawn)  # the short ones come early, as they run out: both splits must get their share
            train += drawn[: composition.n_train]
            heldout += drawn[composition.n_train :]
        rng.shuffle(train)
        rng.shuffle(heldout)
        rng = Random(f"chains impossible {self.seed}")
        for i in rng.sample(range(len(train)), round(self.impossible * len(train))):
            # It demands twice the values that the longest prompt asks for: more than a completion has room for.
            values = (*train[i].answer[:-1], *[0] * 2 * MAX_OPERATORS)[: 2 * MAX_OPERATORS]
            train[i] = replace(train[i], id=f"{train[i].id}-impossible", answer=(*values, self.eos_id))
        return {"train": tuple(train), "heldout": tuple(heldout)}

    def _draw(self, rng: Random, composition: Composition) -> Prompt:
        others = [operator for tier in composition.others for operator in self._tier(tier)]
        operators = [rng.choice(self._tier(tier)) for tier in composition.required]
        operators += [rng.choice(others) for _ in range(rng.randint(*composition.n_others))]
        rng.shuffle(operators)
        start = value = rng.randrange(N_VALUES)
        answer = []
        for operator in operators:
            value = self.tables[operator][value]
            answer.append(value)
        tokens = self._prompt_tokens(start, operators)
        answer.append(self.eos_id)
        digest = hashlib.sha256(self.text((*tokens, *answer)).encode()).hexdigest()
        return Prompt(id=digest[:16], answer=tuple(answer), tokens=tokens)

    def _tier(self, tier: str) -> range:
        first = sum(n for name, n in TIERS.items() if name < tier)
        return range(first, first + TIERS[tier])

    def _prompt_tokens(self, start: int, operators: Sequence[int]) -> tuple[int, ...]:
        # Aligned to the left: the k-th operator, and the k-th value to write, are always at the same position.
        blank, equals = self.vocabulary.index("_"), self.vocabulary.index("=")
        places = [N_VALUES + operator for operator in operators] + [blank] * (MAX_OPERATORS - len(operators))
        return (self.bos_id, start, *places, equals)

    # What can be asked about a prompt

    def target(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the one right completion, end of sequence included."""
        answer: tuple[int, ...] = prompt.answer
        return answer

    def grade(self, prompt: Prompt, completion: Completion) -> int:
        """1 for the right completion, end of sequence included; 0 for any other."""
        return int(completion.tokens == self.target(prompt))

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as words, readable: `text(prompt.tokens)` is like "<bos> 7 a3 d1 _ _ ="."""
        return " ".join(self.vocabulary[token] for token in tokens)

    def composition(self, prompt: Prompt) -> str:
        """Which of `COMPOSITIONS` the prompt was drawn from."""
        operators = range(N_VALUES, N_VALUES + len(self.tables))
        tiers = [self.vocabulary[token][0] for token in prompt.tokens if token in operators]
        if n_d := tiers.count("d"):
            return {2: "two d", 3: "three d"}[n_d]
        if n_c := tiers.count("c"):
            return {1: "one c", 2: "two c"}[n_c]
        return "one b" if "b" in tiers else "only a"


def _teacher_entry(rng: Random, right: int, reliability: float) -> tuple[float, ...]:
    """Probabilities of the results for one (operator, value): half of the error goes to one favourite wrong value."""
    log_odds = log(reliability / (1 - reliability)) + rng.gauss(0, JITTER)
    error = 1 / (1 + exp(log_odds))
    favourite = rng.choice([value for value in range(N_VALUES) if value != right])
    entry = [error / 2 / (N_VALUES - 2)] * N_VALUES
    entry[favourite] = error / 2
    entry[right] = 1 - error
    return tuple(entry)
