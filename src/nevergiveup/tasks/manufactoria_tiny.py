"""The task `manufactoria-tiny`: Manufactoria without text, for tiny models on a CPU.

Layer 3. Standard library only; everything follows from (seed, reward).

A problem is a family of Manufactoria and a word of two colours. The policy writes a program for the robot, node by node,
as token ids; it is translated into the language of Manufactoria (`program_text`) and run by the same machine:

    prompt      <bos> ends_with R B _ _ _ _ =
    completion  PULL 1 0 NONE  PULL 1 2 NONE  PULL 1 0 END  <eos>

The robot enters at node 0. `PULL r b e` takes the front of the tape and goes to node r if it is red, b if it is blue, e if
the tape is empty. `RED t` and `BLUE t` paint at the back and go to node t. END accepts, NONE rejects.

The reward is the share of tests that a program passes ("per-test"), or 1 if it passes all of them and else 0
("all-tests"). As in Manufactoria proper, doing nothing pays in the first case: where tapes are to be told apart, a program
that rejects everything passes half of the tests or more. What is no program at all scores 0.

The policy meets the problems in supervised warm-up data written by a noisy teacher, who knows what every program looks
like but slips at the places that take thought: what to do after a wrong symbol, and after the end of the word. Half of the
slips are to one fixed target, which would be right in another family or nearly so. Sometimes the teacher gives up, and
writes the program that rejects everything. How often it does either depends on the family. As a program must be right at
all places, its pass rate falls with their number: from .9 (starts_with) to below 1/100 (contains_ordered, ends_with), where
wrong programs still pass more or fewer of the tests.

What a program does at a place follows from the word up to there. The longest words are all in the training split, so that
it teaches every place that a shorter word of the test split asks about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from random import Random
from typing import Any, NamedTuple, TypeAlias, get_args

from nevergiveup.task_settings import PerTest
from nevergiveup.tasks.chains import Sequences
from nevergiveup.tasks.manufactoria_machine import Suite, results
from nevergiveup.tasks.manufactoria_problems import expected
from nevergiveup.types import NO_ANSWER, Completion, Prompt, Score

COLOURS = "RB"
MAX_WORD = 6
MAX_NODES = MAX_WORD + 1

N_TESTS = 24
"""Tests of a problem: half of them to be accepted, where so many tapes are."""

N_HIDDEN = 40
"""Further tests of a problem of the test split: few tests let wrong programs pass."""

Node: TypeAlias = tuple[str, ...]
"""("PULL", target after R, after B, on the empty tape) or ("RED" or "BLUE", target); a target is a node, END or NONE."""

SIZES = {"PULL": 4, "RED": 2, "BLUE": 2}
"""Tokens of a node, by kind."""

REJECT_ALL: tuple[Node, ...] = (("PULL", "NONE", "NONE", "NONE"),)


class Family(NamedTuple):
    """How the teacher deals with the problems of a family.

    lengths: of the shortest and the longest word.
    inside: how often the teacher is right about what follows a wrong symbol (append_sequence: about a colour).
    after: how often it is right about what follows another symbol after the whole word, where the program goes on there.
    slip: the target of half of its slips; "stay" is the node itself. After the whole word it is END.
    gives_up: share of the programs that it does not try.
    """

    lengths: tuple[int, int]
    inside: float
    after: float = 1.0
    slip: str = "stay"
    gives_up: float = 0.0

    @property
    def words(self) -> list[str]:
        return [word for length in range(self.lengths[0], self.lengths[1] + 1) for word in _words(length)]


FAMILIES: Mapping[str, Family] = {
    "starts_with": Family((1, 6), inside=0.98),
    "append_sequence": Family((1, 6), inside=0.95),
    "exact_sequence": Family((3, 6), inside=0.75, after=0.5, gives_up=0.2),
    "contains_substring": Family((2, 5), inside=0.7, gives_up=0.2),
    "contains_ordered": Family((4, 6), inside=0.35, slip="0", gives_up=0.3),
    "ends_with": Family((2, 5), inside=0.55, after=0.65, slip="NONE", gives_up=0.4),
}

ELSEWHERE = 0.995
"""How often the teacher is right at the places that take no thought."""


class Problem(NamedTuple):
    """The answer of a prompt."""

    family: str
    word: str
    tests: Suite


@dataclass(frozen=True)
class ManufactoriaTiny:
    """The task `manufactoria-tiny`. Two instances of one seed have equal problems, tests and splits, on any machine.

    reward: the share of tests that are passed (per-test), or 1 if all are and else 0 (all-tests).

    Raises ValueError for any other reward.
    """

    seed: int = 0
    reward: PerTest = "per-test"

    def __post_init__(self) -> None:
        if self.reward not in get_args(PerTest):
            raise ValueError(f"reward must be {' or '.join(get_args(PerTest))}, not {self.reward!r}")

    # The vocabulary: ids are positions.

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The word of each token id."""
        nodes = tuple(str(node) for node in range(MAX_NODES))
        return (*nodes, "END", "NONE", *SIZES, *FAMILIES, *COLOURS, "<bos>", "<eos>", "<pad>", "_", "=")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.vocabulary)}

    @property
    def bos_id(self) -> int:
        return self._ids["<bos>"]

    @property
    def eos_id(self) -> int:
        return self._ids["<eos>"]

    @property
    def pad_id(self) -> int:
        """Padding for whoever batches sequences; in no prompt, as an empty place of a word is "_", an ordinary token."""
        return self._ids["<pad>"]

    @property
    def context(self) -> int:
        """Positions of the tiny model: a prompt takes 9, a completion at most 29."""
        return 48

    @property
    def max_completion_tokens(self) -> int:
        """Those of the longest program that the teacher writes."""
        return SIZES["PULL"] * MAX_NODES + 1

    # The problems

    def prompts(self, split: str) -> Sequence[Prompt]:
        """462 problems of split "train", 142 of "test", none in both. Raises ValueError for any other split."""
        if split not in self._splits:
            raise ValueError(f"split must be one of {', '.join(self._splits)}, not {split!r}")
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[str, tuple[Prompt, ...]]:
        train: list[Prompt] = []
        test: list[Prompt] = []
        for family, options in FAMILIES.items():
            shortest, longest = options.lengths
            for length in range(shortest, longest + 1):
                words = _words(length)
                Random(f"manufactoria-tiny split {self.seed} {family} {length}").shuffle(words)
                n_train = len(words) if length == longest else len(words) // 2
                train += [self._prompt(family, word, N_TESTS) for word in words[:n_train]]
                test += [self._prompt(family, word, N_TESTS + N_HIDDEN) for word in words[n_train:]]
        for name, split in (("train", train), ("test", test)):
            Random(f"manufactoria-tiny order {self.seed} {name}").shuffle(split)
        return {"train": tuple(train), "test": tuple(test)}

    def _prompt(self, family: str, word: str, n_tests: int) -> Prompt:
        problem = Problem(family, word, make_tests(family, word, n_tests, self.seed))
        return Prompt(id=f"{family}-{word}", answer=problem, tokens=self.prompt_tokens(family, word))

    def prompt_tokens(self, family: str, word: str) -> tuple[int, ...]:
        # Aligned to the left: the k-th symbol, and the k-th node to write, are always at the same position.
        places = [*word, *"_" * (MAX_WORD - len(word))]
        return tuple(self._ids[token] for token in ("<bos>", family, *places, "="))

    def completion_tokens(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        """A program as a completion, end of sequence included."""
        return (*(self._ids[token] for node in nodes for token in node), self.eos_id)

    # The teacher

    def teacher_sequences(self, rng: Random, n: int) -> Sequences:
        """n random problems (family uniform, then the word) as the noisy teacher solves them: warm-up data."""
        families = list(FAMILIES)
        words = {family: options.words for family, options in FAMILIES.items()}
        sequences: Sequences = []
        for _ in range(n):
            family = rng.choice(families)
            word = rng.choice(words[family])
            nodes = taught(rng, family, word)
            sequences.append((self.prompt_tokens(family, word), self.completion_tokens(nodes)))
        return sequences

    # What can be asked about a prompt

    def target(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a right completion, end of sequence included. Others may be right, too."""
        return self.completion_tokens(right_program(prompt.answer.family, prompt.answer.word))

    def grade(self, prompt: Prompt, completion: Completion) -> Score:
        """The share of tests that the program passes, or all or nothing. What is no program scores 0 and says why.

        Parts: pass_rate and all_pass, whichever of the two is the reward.
        """
        nodes = self.nodes(completion.tokens)
        if isinstance(nodes, str):
            return Score(0, nodes, parts={"pass_rate": 0.0, "all_pass": 0.0})
        passed = results(program_text(nodes), prompt.answer.tests)
        pass_rate, is_right = Fraction(sum(passed), len(passed)), all(passed)
        return Score(
            pass_rate if self.reward == "per-test" else int(is_right),
            "all tests passed" if is_right else "some tests failed",
            self.text(completion.tokens[:-1]),
            {"pass_rate": float(pass_rate), "all_pass": float(is_right)},
        )

    def nodes(self, tokens: Sequence[int]) -> list[Node] | str:
        """The program that a completion writes, or why it is none, in a few words."""
        if not tokens or tokens[-1] != self.eos_id:
            return "cut off before the end"
        if not all(0 <= token < len(self.vocabulary) for token in tokens):
            return "not a program"
        words = [self.vocabulary[token] for token in tokens[:-1]]
        nodes: list[Node] = []
        at = 0
        while at < len(words):
            size = SIZES.get(words[at])
            if size is None or at + size > len(words):
                return "not a program"
            nodes.append(tuple(words[at : at + size]))
            at += size
        targets = {target for node in nodes for target in node[1:]} - {"END", "NONE"}
        if any(not target.isdigit() for target in targets):
            return "not a program"
        if any(int(target) >= len(nodes) for target in targets):
            return "undefined target"
        return nodes or NO_ANSWER

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as words, readable: `text(prompt.tokens)` is like "<bos> ends_with R B _ _ _ _ ="."""
        return " ".join(self.vocabulary[token] for token in tokens)


def program_text(nodes: Sequence[Node]) -> str:
    """A program in the language of Manufactoria."""
    names = {"END": "end", "NONE": "NONE"}
    lines = ["START start:", "    NEXT n0"]
    for i, (kind, *targets) in enumerate(nodes):
        places = [names.get(target) or f"n{target}" for target in targets]
        if kind == "PULL":
            lines.append(f"PULLER_RB n{i}:")
            lines += [f"    [{symbol}] {place}" for symbol, place in zip(("R", "B", "EMPTY"), places, strict=True)]
        else:
            lines += [f"PAINTER_{kind} n{i}:", f"    NEXT {places[0]}"]
    return "\n".join([*lines, "END end"])


# ------------------------------------------------------------------------------------------------------- right programs


def right_program(family: str, word: str) -> tuple[Node, ...]:
    """A program that solves the problem. The robot is at node i when i symbols of the word are found, or painted."""
    if family == "append_sequence":
        after_last = {len(word): "END"}
        kinds = {"R": "RED", "B": "BLUE"}
        return tuple((kinds[colour], after_last.get(i, str(i))) for i, colour in enumerate(word, 1))
    goes_on = family in ("exact_sequence", "ends_with")
    names: dict[int | None, str] = {i: str(i) for i in range(len(word) + 1)}
    names[None] = "NONE"
    if not goes_on:
        names[len(word)] = "END"
    nodes: list[Node] = []
    for i in range(len(word) + goes_on):
        targets = [names[_found(family, word, i, symbol)] for symbol in COLOURS]
        nodes.append(("PULL", *targets, "END" if i == len(word) else "NONE"))
    return tuple(nodes)


def _found(family: str, word: str, i: int, symbol: str) -> int | None:
    """Symbols of the word that are found when i were and this one follows; None: the tape is rejected."""
    if word[i : i + 1] == symbol:
        return i + 1
    if family == "contains_ordered":
        return i
    if family in ("contains_substring", "ends_with"):
        seen = word[:i] + symbol
        return next(n for n in range(len(word), -1, -1) if seen.endswith(word[:n]))
    return None


# ---------------------------------------------------------------------------------------------------------- the teacher


def taught(rng: Random, family: str, word: str) -> tuple[Node, ...]:
    """A program by the noisy teacher."""
    options = FAMILIES[family]
    if rng.random() < options.gives_up:
        return REJECT_ALL
    right = right_program(family, word)
    if family == "append_sequence":
        other = {"RED": "BLUE", "BLUE": "RED"}
        return tuple((kind if rng.random() < options.inside else other[kind], target) for kind, target in right)
    anything = [*(str(i) for i in range(len(right))), "END", "NONE"]
    nodes: list[Node] = []
    for i, (kind, *targets) in enumerate(right):
        for place, symbol in enumerate((*COLOURS, "")):
            if symbol == "" or word[i : i + 1] == symbol:
                reliability, slip = ELSEWHERE, ""
            elif i == len(word):
                reliability, slip = options.after, "END"
            else:
                reliability, slip = options.inside, str(i) if options.slip == "stay" else options.slip
            if rng.random() >= reliability:
                wrong = [target for target in anything if target != targets[place]]
                targets[place] = slip if slip in wrong and rng.random() < 0.5 else rng.choice(wrong)
        nodes.append((kind, *targets))
    return tuple(nodes)


# ---------------------------------------------------------------------------------------------------------------- tests


def make_tests(family: str, word: str, n: int, seed: int) -> Suite:
    """n tests, half of them to be accepted; fewer where there are too few such tapes. append_sequence accepts all."""
    rng = Random(f"manufactoria-tiny tests {seed} {family} {word}")
    writes = family == "append_sequence"
    room = {True: n if writes else n // 2, False: n // 2}
    tests: dict[str, dict[str, Any]] = {}
    for tape in _tapes(rng, family, word, 20 * n):
        accepted, output = expected(family, {"sequence": word}, tape)
        if tape not in tests and room[accepted]:
            room[accepted] -= 1
            tests[tape] = {
                "input": tape,
                "expected_accepted": accepted,
                "expected_output": output,
                "check_output": writes,
            }
            if len(tests) == n:
                break
    return Suite.of(tests.values())


def _tapes(rng: Random, family: str, word: str, n: int) -> Iterator[str]:
    """Tapes that take a careful program: once or several times the beginning of the word and a wrong symbol after it, then
    the rest of the word, or what would be the rest if the robot went to a wrong node. Every place has its turn, so that a
    wrong target hardly ever goes unnoticed. First the plain ones, then n random tries."""
    length = len(word)
    places = rng.sample(range(length), length)
    yield from (word, "", word[:-1], word + "R", word + "B")
    yield from (word[:at] + _other(word[at]) + word[at:] for at in places)
    yield from (word[:at] for at in places)
    for _ in range(n):
        tape, found, after, at = "", 0, None, 0
        for _ in range(rng.randint(1, 3)):
            places = places or rng.sample(range(length + 1), length + 1)
            at = max(found, places.pop())
            symbol = rng.choice(COLOURS) if at == length else _other(word[at])
            tape += word[found:at] + symbol
            after = _found(family, word, at, symbol)
            if after is None:
                break
            found = after
        goes_on = rng.choice((at if after is None else after, at, rng.randint(0, length)))
        yield tape + word[goes_on:]
        if family != "exact_sequence":  # there, what comes after the word is a reason to reject by itself
            yield tape + word[goes_on:] + "".join(rng.choices(COLOURS, k=rng.randint(1, 3)))


def _other(colour: str) -> str:
    return "B" if colour == "R" else "R"


def _words(length: int) -> list[str]:
    return ["".join(word) for word in product(COLOURS, repeat=length)]
