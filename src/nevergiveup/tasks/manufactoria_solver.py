"""A right Manufactoria program for every problem of every family, found by construction.

Layer 3. Standard library only.

`solve(family, params)` returns program text that gives the right answer on every tape of the given colours, not just on
generated tests, as long as the run fits the machine's limit of visits. It shows that every problem can be solved, and
it yields right answers of the length that a policy must learn to write.

Each program starts as a queue automaton: a function `step(state, symbol) -> (word, next state)` says what to paint when
`symbol` is taken from the front of the tape. `EMPTY` is one of the symbols. `_program` lays any such function out:

1. it walks through all states that can be reached,
2. merges the states that behave alike (partition refinement, as for finite automata),
3. writes each state as one or two pullers and each word as a chain of painters, chains with the same end being shared.

The families come in two shapes.

*Acceptance over fixed words* (`_automaton`): an ordinary deterministic automaton, which paints nothing.

*Rotation*: a symbol that the tape does not hold serves as a mark. It is painted at the end, and the tape is read and
painted again behind it; meeting the mark means that one rotation is done. `append_sequence` needs no mark. All other
writing families do: a program that halts with the whole tape after a new front must know when it has been round, and
over four colours it cannot (were EMPTY ever met, the tape would be forgotten; otherwise the same reads would end the
run inside some longer tape). They are therefore limited to red and blue tapes, as their problems are.

Sums and bits work on the low end of a number, while the queue shows the high end first. So each rotation treats the
last bit that has not been treated: "high mark low mark" becomes "high' mark bit low mark". The effort is quadratic in
the length: tapes of up to 20 bits always fit the limit, longer ones as long as no carry runs through all their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

COLOURS = "RBYG"
EMPTY = ""
"""What `step` is given when the tape is empty."""

State: TypeAlias = tuple[Any, ...]
"""The name of a kind of state, which names its nodes in the program, then whatever tells its states apart."""
Move: TypeAlias = tuple[str, State]
"""A word to paint and the next state."""
Step: TypeAlias = Callable[[State, str], Move]
Params: TypeAlias = Mapping[str, Any]

ACCEPT: State = ("end",)
REJECT: State = ("NONE",)
REJECTED: Move = ("", REJECT)

MARK = "Y"
"""The mark on tapes that hold only red and blue."""
PAINTERS = {"R": "RED", "B": "BLUE", "Y": "YELLOW", "G": "GREEN"}


def solve(family: str, params: Params, colours: str | None = None) -> str:
    """Program text that solves a problem on every tape over `colours`.

    `colours` defaults to red and blue for the families that are only defined on them, and to all four for the others.

    Raises: ValueError for an unknown family, for parameters outside the family, and for other colours than red and
    blue where only those are possible.
    """
    if family not in _FAMILIES:
        raise ValueError(f"unknown Manufactoria family {family!r}; known are {', '.join(sorted(_FAMILIES))}")
    two_colours = family.startswith("numerical_") or family == "prepend_sequence"
    if colours is None:
        colours = "RB" if two_colours else COLOURS
    allowed = "RB" if two_colours else COLOURS
    if not colours or set(colours) - set(allowed):
        raise ValueError(f"colours of {family} must be some of {allowed}, not {colours!r}")
    return _FAMILIES[family](params, colours)


# --- From a step function to program text ----------------------------------------------------------------------------


def _program(symbols: str, start: State, step: Step, before: str = "") -> str:
    """The program that paints `before` and then follows `step` from `start`, on tapes of `symbols`."""
    table = _reachable(symbols, start, step)
    same = _merged(table)
    table = {
        state: {symbol: (word, same[target]) for symbol, (word, target) in moves.items()}
        for state, moves in table.items()
        if same[state] == state
    }
    layout = _Layout(table)
    layout.node("START", "start", {"NEXT": (before, same[start])})
    for state in table:
        layout.pullers(state)
    return "\n\n".join([*layout.nodes, "END end"]) + "\n"


def _reachable(symbols: str, start: State, step: Step) -> dict[State, dict[str, Move]]:
    """All states but the two final ones, nearest to the start first, with their move for each symbol and EMPTY."""
    table: dict[State, dict[str, Move]] = {}
    queue = [start]
    for state in queue:  # the queue grows under the loop
        if state not in table and state not in (ACCEPT, REJECT):
            table[state] = {symbol: step(state, symbol) for symbol in (*symbols, EMPTY)}
            queue += [target for _, target in table[state].values()]
    return table


def _merged(table: Mapping[State, Mapping[str, Move]]) -> dict[State, State]:
    """For each state the first one that behaves alike (Moore's partition refinement); REJECT for a dead end."""
    symbols = next(iter(table.values()), {})
    moves: Mapping[State, Mapping[str, Move]] = {ACCEPT: {}, REJECT: dict.fromkeys(symbols, REJECTED), **table}
    block = {state: int(state != ACCEPT) for state in moves}
    while True:
        n_blocks = len(set(block.values()))
        numbers: dict[Any, int] = {}
        alike = {
            state: (block[state], *((word, block[target]) for word, target in moves[state].values())) for state in moves
        }
        block = {state: numbers.setdefault(alike[state], len(numbers)) for state in moves}
        if len(numbers) == n_blocks:
            break
    first: dict[int, State] = {}
    return {state: first.setdefault(block[state], state) for state in moves}


class _Layout:
    """Writes pullers and painters, and names them: a kind of state and a number, a colour and a number."""

    def __init__(self, table: Mapping[State, Mapping[str, Move]]) -> None:
        self.nodes: list[str] = []
        self._table = table
        self._painters: dict[Move, str] = {}
        self._names: dict[State, str] = {ACCEPT: ACCEPT[0], REJECT: REJECT[0]}
        kinds: dict[str, list[State]] = {}
        for state in table:
            kinds.setdefault(state[0], []).append(state)
        for kind, states in kinds.items():
            self._names |= {state: kind + (str(i) if len(states) > 1 else "") for i, state in enumerate(states)}

    def node(self, kind: str, name: str, routes: Mapping[str, Move | str]) -> None:
        """A node and, after it, the painters that its routes need. A route leads to a move or to a node by its name."""
        place = len(self.nodes)
        lines = [f"    {label} {to if isinstance(to, str) else self._painter(to)}" for label, to in routes.items()]
        self.nodes.insert(place, "\n".join([f"{kind} {name}:", *lines]))

    def _painter(self, move: Move) -> str:
        """The name of the node that begins a move. Moves to one state share the end of what they paint."""
        word, target = move
        if not word:
            return self._names[target]
        if move not in self._painters:
            colour = PAINTERS[word[0]]
            name = self._painters[move] = f"{colour.lower()}{len(self._painters) + 1}"
            self.node(f"PAINTER_{colour}", name, {"NEXT": (word[1:], target)})
        return self._painters[move]

    def pullers(self, state: State) -> None:
        """The nodes of a state: a puller sees the other pair of colours as EMPTY, so that EMPTY may lead to the other.

        A pair needs no puller if all its symbols are rejected just as an empty tape is.
        """
        moves = self._table[state]
        routes = {symbol: move for symbol, move in moves.items() if move[1] != REJECT}
        looked_for = moves if EMPTY in routes else routes
        pairs = [pair for pair in ("RB", "YG") if set(pair) & set(looked_for)]
        names = [self._names[state] + ("_yg" if i else "") for i in range(len(pairs))]
        for i, pair in enumerate(pairs):
            lines: dict[str, Move | str] = {f"[{symbol}]": routes[symbol] for symbol in pair if symbol in routes}
            if i + 1 < len(pairs):
                lines["[EMPTY]"] = names[i + 1]
            elif EMPTY in routes:
                lines["[EMPTY]"] = routes[EMPTY]
            self.node(f"PULLER_{pair}", names[i], lines)


# --- Acceptance over fixed words -------------------------------------------------------------------------------------


def _automaton(
    colours: str, start: State, follow: Callable[[State, str], State], accepts: Callable[[State], bool]
) -> str:
    """The program of a deterministic automaton. `follow` may end early, with ACCEPT or REJECT."""

    def step(state: State, symbol: str) -> Move:
        if symbol == EMPTY:
            return ("", ACCEPT if accepts(state) else REJECT)
        return ("", follow(state, symbol))

    return _program(colours, start, step)


def _starts_with(params: Params, colours: str) -> str:
    word = params["sequence"]

    def follow(state: State, symbol: str) -> State:
        n = state[1]
        if symbol != word[n]:
            return REJECT
        return ("got", n + 1) if n + 1 < len(word) else ACCEPT

    return _automaton(colours, ("got", 0) if word else ACCEPT, follow, lambda state: False)


def _exact_sequence(params: Params, colours: str) -> str:
    word = params["sequence"]

    def follow(state: State, symbol: str) -> State:
        n = state[1]
        return ("got", n + 1) if word[n : n + 1] == symbol else REJECT

    return _automaton(colours, ("got", 0), follow, lambda state: state[1] == len(word))


def _overlap(text: str, word: str) -> int:
    """How long a beginning of `word` stands at the end of `text`."""
    return next(n for n in range(min(len(text), len(word)), -1, -1) if text.endswith(word[:n]))


def _ends_with(params: Params, colours: str) -> str:
    word = params["sequence"]

    def follow(state: State, symbol: str) -> State:
        return ("got", _overlap(word[: state[1]] + symbol, word))

    return _automaton(colours, ("got", 0), follow, lambda state: state[1] == len(word))


def _contains_substring(params: Params, colours: str) -> str:
    word = params["sequence"]

    def follow(state: State, symbol: str) -> State:
        n = _overlap(word[: state[1]] + symbol, word)
        return ("got", n) if n < len(word) else ACCEPT

    return _automaton(colours, ("got", 0) if word else ACCEPT, follow, lambda state: False)


def _contains_ordered(params: Params, colours: str) -> str:
    word = params["sequence"]

    def follow(state: State, symbol: str) -> State:
        n = state[1] + (symbol == word[state[1]])
        return ("got", n) if n < len(word) else ACCEPT

    return _automaton(colours, ("got", 0) if word else ACCEPT, follow, lambda state: False)


def _contains_count(params: Params, colours: str) -> str:
    counts: Mapping[str, int] = params["counts"]

    def left(missing: Mapping[str, int]) -> State:
        return ("left", *sorted(missing.items())) if any(missing.values()) else ACCEPT

    def follow(state: State, symbol: str) -> State:
        return left({colour: n - (n > 0 and colour == symbol) for colour, n in state[1:]})

    return _automaton(colours, left(counts), follow, lambda state: False)


def _not_contains(params: Params, colours: str) -> str:
    def follow(state: State, symbol: str) -> State:
        return REJECT if symbol == params["colour"] else state

    return _automaton(colours, ("scan",), follow, lambda state: True)


def _regex_pattern(params: Params, colours: str) -> str:
    """Subset construction. A place (i, n) in the pattern: n symbols of part i are read; w+ is w followed by w*."""
    parts: list[tuple[str, str]] = []
    for word, operator in params["parts"]:
        if not word or operator not in ("+", "?", "*"):
            raise ValueError(f"a part of regex_pattern is a word and one of + ? *, not {[word, operator]}")
        parts += [(word, ""), (word, "*")] if operator == "+" else [(word, operator)]

    def reach(places: set[tuple[int, int]]) -> State:
        """The places with those that can be reached from them without a symbol."""
        queue = list(places)
        for i, n in queue:
            if i == len(parts):
                continue
            word, operator = parts[i]
            nearby = []
            if n == len(word):
                nearby = [(i, 0) if operator == "*" else (i + 1, 0)]
            elif n == 0 and operator:
                nearby = [(i + 1, 0)]
            queue += [place for place in nearby if place not in queue]
        return ("at", frozenset(queue)) if queue else REJECT

    def follow(state: State, symbol: str) -> State:
        return reach({(i, n + 1) for i, n in state[1] if i < len(parts) and parts[i][0][n : n + 1] == symbol})

    return _automaton(colours, reach({(0, 0)}), follow, lambda state: (len(parts), 0) in state[1])


# --- Numbers: red is 0, blue is 1, the most significant first, any number of zeros in front --------------------------


def _value(word: str) -> int:
    return int("0" + word.replace("R", "0").replace("B", "1"), 2)


def _digits(value: int) -> str:
    """The number without leading zeros; zero is the empty word."""
    return f"{value:b}".replace("0", "R").replace("1", "B") if value else ""


def _numerical_comparison(params: Params, colours: str) -> str:
    """The state is the number so far; once above the limit it stays there. Merging leaves few of these states."""
    operator, limit = params["operator"], params["threshold"]
    if operator not in (">", ">=", "<", "<=", "="):
        raise ValueError(f"operator of numerical_comparison must be one of > >= < <= =, not {operator!r}")
    if operator in (">=", "<"):  # as > and <= of the number below
        limit -= 1

    def state_of(value: int) -> State:
        if value > limit:
            return ACCEPT if operator in (">", ">=") else REJECT
        return ("value", value)

    def accepts(state: State) -> bool:
        return state[1] == limit if operator == "=" else operator in ("<", "<=")

    return _automaton(colours, state_of(0), lambda state, bit: state_of(2 * state[1] + _value(bit)), accepts)


def _numerical_max_min(params: Params, colours: str) -> str:
    """One rotation drops leading zeros and compares; if the constant wins, it takes the place of what is on the tape."""
    which, constant = params["which"], params["constant"]
    if which not in ("max", "min"):
        raise ValueError(f"which of numerical_max_min must be max or min, not {which!r}")

    def step(state: State, symbol: str) -> Move:
        if state[0] == "clear":
            return (_digits(constant), ACCEPT) if symbol == EMPTY else ("", state)
        value = state[1]
        if symbol == MARK:
            tape_wins = value >= constant if which == "max" else value <= constant
            return ("", ACCEPT if tape_wins else ("clear",))
        if symbol == EMPTY:
            return REJECTED
        after = min(2 * value + _value(symbol), constant + 1)
        return (symbol if after else "", ("value", after))

    return _program(colours + MARK, ("value", 0), step, before=MARK)


def _numerical_operations(params: Params, colours: str) -> str:
    """Each rotation treats the lowest bit that is left: "high mark low mark" becomes "high' mark bit low mark".

    Between the bits only a remainder is kept, the part of the operation that the higher bits have still to meet. For
    a sum it is the number to be added to them, negative for a difference, so that it holds the carry as well. When it
    is 0, the bits that are left are kept, dropped or inverted. When it is negative at the end, so is the result.
    """
    operation, constant = params["operation"], params["constant"]
    kept, dropped, inverted = {"R": "R", "B": "B"}, {"R": "", "B": ""}, {"R": "B", "B": "R"}
    remainder, others = constant, kept
    if operation == "subtract":
        remainder = -constant
    elif operation == "and":
        others = dropped
    elif operation == "not":  # of at least eight bits
        remainder, others = 255, inverted
    elif operation == "floor_div":
        if constant < 1 or constant & (constant - 1):
            raise ValueError(f"constant of floor_div must be a power of two, not {constant}")
        remainder = constant.bit_length() - 1
    elif operation not in ("add", "or", "xor"):
        raise ValueError(
            f"operation of numerical_operations must be add, subtract, and, or, xor, not or floor_div, not {operation!r}"
        )

    def treat(bit: int, remainder: int) -> tuple[str, int]:
        """What the bit becomes, and the remainder for the bits above it."""
        if operation == "floor_div":
            return "", remainder - 1
        if operation in ("add", "subtract"):
            total = bit + remainder
            return "RB"[total & 1], total >> 1
        low = remainder & 1
        result = {"and": bit & low, "or": bit | low, "xor": bit ^ low, "not": bit ^ low}[operation]
        return "RB"[result], remainder >> 1

    def in_front(remainder: int) -> str:
        """What the remainder makes of the zeros in front of the number."""
        word = ""
        while remainder:
            digit, remainder = treat(0, remainder)
            word = digit + word
        return word.lstrip("R")

    def next_turn(remainder: int) -> State:
        return ("turn", remainder) if remainder else ("rest",)

    def tail(word: str) -> Move:
        """To what is treated: copy it if something stands before it, else without its leading zeros."""
        return (word, ("copy",)) if word else ("", ("trim",))

    def step(state: State, symbol: str) -> Move:
        kind = state[0]
        if symbol == EMPTY:
            return ("", ACCEPT) if kind == "clear" else REJECTED
        if kind == "turn":  # a rotation begins; zeros in front are dropped
            (remainder,) = state[1:]
            if symbol == MARK:
                return ("", ("clear",)) if remainder < 0 else tail(in_front(remainder))
            return ("", state if symbol == "R" else ("high", remainder, symbol, True))
        if kind == "high":  # one bit is held back, as it may be the last
            remainder, held, only = state[1:]
            if symbol != MARK:
                return (held, ("high", remainder, symbol, False))
            digit, remainder = treat(_value(held), remainder)
            if remainder or others is not kept:
                return (MARK + digit, ("low", remainder))
            return tail(digit.lstrip("R")) if only else (digit, ("copy",))
        if kind == "low":  # the bits that are treated
            return (symbol, state if symbol != MARK else next_turn(state[1]))
        if kind == "rest":  # the last rotation: the others, in front of the treated
            if symbol == MARK:
                return tail("")
            word = others[symbol].lstrip("R")
            return (word, ("others",) if word else state)
        if kind == "others":
            return ("", ("copy",)) if symbol == MARK else (others[symbol], state)
        if kind == "trim":
            if symbol == MARK:
                return ("", ACCEPT)
            return ("", state) if symbol == "R" else (symbol, ("copy",))
        if kind == "copy":
            return ("", ACCEPT) if symbol == MARK else (symbol, state)
        return ("", state)  # clear

    return _program(colours + MARK, next_turn(remainder), step, before=MARK + MARK)


# --- Sequences in front, at the end, and equal numbers ---------------------------------------------------------------


def _append_sequence(params: Params, colours: str) -> str:
    return _program(colours, ACCEPT, lambda state, symbol: REJECTED, before=params["sequence"])


def _prepend_sequence(params: Params, colours: str) -> str:
    """Mark the end, paint the sequence, then paint the changed tape behind it."""
    kind, *words = params["change"]
    if kind == "replace" and len(words) == 2 and words[0]:
        old, new = words
    elif kind not in ("keep", "swap") or words:
        raise ValueError(f"change of prepend_sequence must be keep, swap or replace OLD NEW, not {params['change']}")

    def step(state: State, symbol: str) -> Move:
        held = state[1]  # a beginning of the word to be replaced
        if symbol == MARK:
            return (held, ACCEPT)
        if symbol == EMPTY:
            return REJECTED
        if kind != "replace":
            return (symbol if kind == "keep" else "RB"["BR".index(symbol)], state)
        held += symbol
        if held == old:
            return (new, ("copy", ""))
        n = _overlap(held, old)
        return (held[: len(held) - n], ("copy", held[len(held) - n :]))

    return _program(colours + MARK, ("copy", ""), step, before=MARK + params["sequence"])


def _regex_same_num(params: Params, colours: str) -> str:
    """Each rotation takes what one more n adds from every segment, the first also what n = 0 has, until all are used up.

    The mark is a colour that no segment has, but the tape may hold it. That does no harm: each stretch up to a mark
    is treated as if it were the tape, and its mark is kept. Acceptance needs a stretch with nothing left but its mark,
    on a tape without any other mark.
    """
    segments: list[tuple[str, int, int]] = []  # colour, symbols for n = 0, symbols for one more n
    for colour, exponent in params["segments"]:
        if exponent not in ("n", "n+1", "n+2", "n+3", "2n"):
            raise ValueError(f"an exponent of regex_same_num must be n, n+1, n+2, n+3 or 2n, not {exponent!r}")
        segments.append((colour, int(exponent[2:] or 0), 1) if exponent[0] == "n" else (colour, 0, 2))
    used = [colour for colour, _, _ in segments]
    if any(colour == after for colour, after in pairwise(used)) or len(set(used)) > 3:
        raise ValueError(f"neighbouring segments of regex_same_num must differ in colour and one be unused: {used}")
    mark = next(colour for colour in reversed(COLOURS) if colour not in used)

    def take(i: int, first: bool, n_done: int = 0) -> State:
        _, n_extra, n_each = segments[i]
        n_left = n_each + n_extra * first - n_done
        return ("take", i, first, n_done) if n_left else ("keep", i, first)

    def step(state: State, symbol: str) -> Move:
        if state == ("over",):
            return ("", ACCEPT) if symbol == EMPTY else REJECTED
        kind, i, first = state[:3]
        colour = segments[i][0]
        if kind == "take":
            n_done = state[3]
            if symbol == colour:
                return ("", take(i, first, n_done + 1))
            nothing_left = symbol == mark and i == n_done == 0 and not first
            return ("", ("over",)) if nothing_left else REJECTED
        if symbol == colour:
            return (symbol, state)
        if i + 1 < len(segments):
            return ("", take(i + 1, first, 1)) if symbol == segments[i + 1][0] else REJECTED
        return (mark, take(0, False)) if symbol == mark else REJECTED

    return _program(COLOURS, take(0, True), step, before=mark)


_FAMILIES: dict[str, Callable[[Params, str], str]] = {
    "append_sequence": _append_sequence,
    "contains_count": _contains_count,
    "contains_ordered": _contains_ordered,
    "contains_substring": _contains_substring,
    "ends_with": _ends_with,
    "exact_sequence": _exact_sequence,
    "not_contains": _not_contains,
    "numerical_comparison": _numerical_comparison,
    "numerical_max_min": _numerical_max_min,
    "numerical_operations": _numerical_operations,
    "prepend_sequence": _prepend_sequence,
    "regex_pattern": _regex_pattern,
    "regex_same_num": _regex_same_num,
    "starts_with": _starts_with,
}
