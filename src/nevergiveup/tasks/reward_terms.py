r"""Rewards put together of parts, for any task: "correct + 0.1*format + 0.5*my_module:brevity - 0.2*length". Layer 3.

    correct              what the task itself says of the completion
    format               1 if the answer is marked exactly once, after any thoughts: `rewards.format_reward`
    length               0 to 1 over the second half of the tokens that it may have: `rewards.length_share`
    my_module:function   a function of the user's (see `tasks.own`), or path/to/file.py:function

A term may have a weight before or behind it (`0.1*format`, `format*0.1`); weight 0 logs a part that does not count. Signs
that belong to a path have no spaces around them: "correct - my-folder/judge.py:style".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from nevergiveup.protocols import Task
from nevergiveup.rewards import format_reward, length_share
from nevergiveup.tasks.own import FACTS, REWARD_KEY, Function, best, columns_of, load_function
from nevergiveup.types import Check, Completion, Exact, Grade, Prompt, Sum, exact

BUILT_IN = ("correct", "format", "length")

_TOKEN = re.compile(
    r"""\s*(?: (?P<path>[^\s*:]+\.py:[^\W\d]\w*)
             | (?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)
             | (?P<name>[^\W\d][\w.]*(?::[^\W\d]\w*)?)
             | (?P<sign>[-+*]) )""",
    re.VERBOSE,
)

Token: TypeAlias = tuple[Literal["path", "number", "name", "sign"], str]


class Term(NamedTuple):
    """name: one of BUILT_IN, or module:function."""

    weight: Exact
    name: str


def parse_terms(expression: str) -> list[Term]:
    """The terms of a reward expression. Loads nothing. Raises ValueError, with what is wrong and where."""
    tokens = _tokens(expression)
    terms: list[Term] = []
    while tokens or not terms:
        sign = tokens.pop(0)[1] if tokens and tokens[0][1] in "+-" else ""
        if terms and not sign:
            raise _malformed(expression, f"between {terms[-1].name} and {tokens[0][1]} there is no + or -")
        factors: list[Token] = []
        while True:
            if not tokens or tokens[0][0] == "sign":
                raise _malformed(
                    expression, f"a term is missing {f'before {tokens[0][1]}' if tokens else 'at the end'}"
                )
            factors.append(tokens.pop(0))
            if not tokens or tokens[0][1] != "*":
                break
            tokens.pop(0)
        names = [text for kind, text in factors if kind != "number"]
        weights = [text for kind, text in factors if kind == "number"]
        if len(names) != 1 or len(weights) > 1:
            said = "*".join(text for _, text in factors)
            raise _malformed(expression, f"{said} is not one part with at most one weight, as 0.5*{BUILT_IN[1]}")
        weight = exact(Fraction(weights[0]) if weights else 1)
        terms.append(Term(-weight if sign == "-" else weight, _known(names[0], expression)))
    if twice := [name for name, n in Counter(term.name for term in terms).items() if n > 1]:
        raise _malformed(expression, f"{twice[0]} is there twice: add up its weights")
    return terms


def needs_correct(expression: str) -> bool:
    """Whether the task's own grade is a part of the reward, as it is when nothing is said. Raises as `parse_terms` does."""
    return not expression or any(term.name == "correct" for term in parse_terms(expression))


def _tokens(expression: str) -> list[Token]:
    tokens: list[Token] = []
    position, end = 0, len(expression.rstrip())
    while position < end:
        found = _TOKEN.match(expression, position)
        if found is None:
            rest = expression[position:].strip()
            raise _malformed(
                expression, f"{rest.split()[0]} at character {expression.index(rest, position) + 1} is no term"
            )
        kind = found.lastgroup
        assert kind in ("path", "number", "name", "sign")
        tokens.append((kind, found[kind]))  # type: ignore[arg-type]
        position = found.end()
    return tokens


def _known(name: str, expression: str) -> str:
    if ":" in name or name in BUILT_IN:
        return name
    near = get_close_matches(name, BUILT_IN, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise _malformed(
        expression,
        f"there is no part {name}{meant}; parts are {', '.join(BUILT_IN)}, and functions of yours as my_module:my_reward",
    )


def _malformed(expression: str, what: str) -> ValueError:
    return ValueError(f"{REWARD_KEY} = {expression!r}: {what}")


class WithReward:
    """A task with the prompts of another, and a reward put together of parts, which are logged apart.

    max_reward: the best that functions of the user's return; more is no verdict, and so is less than 0 where it is taken off.
    max_new_tokens: what `length` is measured by. The max_reward of a prompt is the sum of the best of each part.

    Imports the functions at once. Raises ValueError for a malformed expression, for what cannot be imported, and, when the
    prompts are read, for a function that needs a parameter which the rows do not have.
    """

    def __init__(self, task: Task, expression: str, max_reward: float = 1, *, max_new_tokens: int) -> None:
        self.task = task
        self.terms = parse_terms(expression)
        self._expression = expression
        self._functions = {term.name: load_function(term.name) for term in self.terms if ":" in term.name}
        self._labels = _labels(self.terms)
        self._best = best(max_reward)
        self._max_new_tokens = max_new_tokens
        if not any(term.weight > 0 for term in self.terms):
            raise _malformed(expression, "nothing can be earned: at least one part must have a weight above 0")
        if any(term.name == "correct" and term.weight < 0 for term in self.terms):
            raise _malformed(expression, "correct cannot have a weight below 0")

    def prompts(self, split: str) -> Sequence[Prompt]:
        prompts = self.task.prompts(split)
        for function in self._functions.values():
            self._check_parameters(function, prompts)
        return [replace(prompt, max_reward=self._best_of(prompt)) for prompt in prompts]

    def grade(self, prompt: Prompt, completion: Completion) -> Grade | Check | Sum:
        if len(self.terms) == 1 and self.terms[0].weight == 1:
            return self._part(self.terms[0], prompt, completion)
        parts: dict[str, tuple[Exact, Grade | Check]] = {}
        for term in self.terms:
            label, part = self._labels[term.name], self._part(term, prompt, completion)
            if isinstance(part, Sum):
                inner = {f"{label}/{name}": (term.weight * weight, one) for name, (weight, one) in part.parts.items()}
                parts |= inner
            else:
                parts[label] = (term.weight, part)
        return Sum(parts)

    def _part(self, term: Term, prompt: Prompt, completion: Completion) -> Grade | Check | Sum:
        match term.name:
            case "correct":
                return self.task.grade(prompt, completion)
            case "format":
                return format_reward(completion.text)
            case "length":
                return length_share(len(completion.tokens), self._max_new_tokens)
        # Taken off, its best is its least: that must be known.
        return self._functions[term.name].check(prompt, completion, 0 if term.weight < 0 else None, self._best)

    def _best_of(self, prompt: Prompt) -> Exact:
        total = Fraction(0)
        for term in self.terms:
            if term.weight > 0:
                one: Exact = prompt.max_reward if term.name == "correct" else self._best if ":" in term.name else 1
                total += term.weight * one
        return exact(total)

    def _check_parameters(self, function: Function, prompts: Sequence[Prompt]) -> None:
        wanted = function.required.difference(FACTS)
        lacking = [(prompt, missing) for prompt in prompts if (missing := wanted.difference(columns_of(prompt)))]
        if lacking:
            prompt, missing = lacking[0]
            known = ", ".join([*FACTS, *columns_of(prompt)])
            raise ValueError(
                f"{REWARD_KEY}: {function.name} needs {', '.join(sorted(missing))}, which {len(lacking)} of {len(prompts)} "
                f"rows do not have (there are {known}): name one of these, give it a default, or add the column"
            )


def _labels(terms: Sequence[Term]) -> dict[str, str]:
    """Name of a term -> name of its part: of functions without the module, where that is clear."""
    short = Counter(term.name.rpartition(":")[2] for term in terms)
    return {term.name: label if short[label := term.name.rpartition(":")[2]] == 1 else term.name for term in terms}
