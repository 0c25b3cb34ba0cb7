r"""Manufactoria programs: read from a response, run on tapes, judged against tests. Layer 3, standard library only.

A program is a graph of nodes; a robot walks it and carries a tape of the colours R, B, Y, G. The tape is a queue: pullers
take from its front, painters add at its back.

    START start:           exactly one route; the robot begins here
        NEXT read
    PULLER_RB read:        takes an R or a B off the front and follows its route. Anything else at the front (Y, G, any other
        [R] mark           character, or nothing at all) stays, and EMPTY is followed. A colour without a route is taken and
        [EMPTY] end        leads to NONE; of two routes for one colour the first counts
    PAINTER_BLUE mark:     adds a B at the back; exactly one route
        NEXT read
    END end                accepts. No colon

`NONE` as a target rejects. `END` in capitals is no node (unless one has that name): it parses, and rejects. A run has at most
LIMIT visits, START and END among them, and accepts only if END is one of them.

All of it agrees with the published environment, oddities included:

    - routes are indented by 4 spaces or a tab, nodes by less; `#` comments may stand anywhere; one bare fence of three
      backticks may stand before and one after the program
    - the program of a response is its last complete fenced block, fences being paired from the left; without one, all of it
    - a text that does not parse earns nothing, though a program that rejects every tape passes every test that wants that

`run` and `trace` go from visit to visit. `judge` finds out only what the tests ask for, which takes far less: `_reader` serves
programs that never paint, `_ending` all others. No verdict depends on time. The cost is linear in the response and, for each
test, in LIMIT and the tape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

LIMIT = 1000
"""Visits that a run may take, those of START, END and NONE included."""

Reason: TypeAlias = Literal["end", "none", "unknown_node", "step_limit"]
Routes: TypeAlias = dict[str, int]
Leap: TypeAlias = tuple[int, str, int]

_PULLS = {"PULLER_RB": ("R", "B"), "PULLER_YG": ("Y", "G")}
_PAINTS = {"PAINTER_RED": "R", "PAINTER_BLUE": "B", "PAINTER_YELLOW": "Y", "PAINTER_GREEN": "G"}

# Node numbers. The first three stop the robot.
_END, _NONE, _UNKNOWN = range(3)
_REASONS: tuple[Reason, ...] = ("end", "none", "unknown_node")

# What a leap may lead to besides a node: the run is decided, and the symbol at the front was not taken.
_ACCEPTED, _REJECTED = -1, -2


class ParseError(ValueError):
    """Why a text is no program.

    kind: a slug, the same for the same cause. line: counted from 1 after white space around the text and a fence in front
    are removed; of the declaration where a node lacks something; None where the whole text does.
    """

    def __init__(self, kind: str, line: int | None, message: str) -> None:
        super().__init__(kind, line, message)
        self.kind = kind
        self.line = line
        self.message = message

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A program as tables, indexed by node number.

    routes: symbol at the front -> next node, the symbol being taken; "" -> next node otherwise. Empty where the robot stops.
    paints: the colour that a node adds, or "".
    leaps, lost: what `_leap` and `_is_lost` found out so far.
    """

    start: int
    names: list[str]
    routes: list[Routes]
    paints: list[str]
    leaps: list[dict[str, Leap]]
    lost: dict[tuple[int, frozenset[str]], bool]


class Run(NamedTuple):
    """accepted: END was reached. output: the tape when the robot stopped, whatever the reason. steps: visits."""

    accepted: bool
    output: str
    steps: int
    reason: Reason


class Judgement(NamedTuple):
    """valid: the program parses; if not, `passed` is empty. all_passed: no test failed (true where there is none)."""

    valid: bool
    passed: list[bool]
    all_passed: bool


class Case(NamedTuple):
    """One test. output: what the tape must be in the end, as it is or as a pattern; None: it may be anything."""

    tape: str
    wanted: bool
    output: str | re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests, prepared once for the many programs that are judged by them.

    reading: all of them can be decided by reading the tape (see `_reader`).
    """

    cases: tuple[Case, ...]
    reading: bool

    @classmethod
    def of(cls, tests: Iterable[Mapping[str, Any]]) -> Suite:
        """From tests as published: {input, expected_output, expected_accepted, check_output}; by default "", "", True, True.

        An `expected_output` that holds one of `.+*?|()` is a regular expression, if a valid one. It is trusted.
        """
        cases = [
            Case(
                test.get("input", ""),
                bool(test.get("expected_accepted", True)),
                _expected(test.get("expected_output", "")) if test.get("check_output", True) else None,
            )
            for test in tests
        ]
        return cls(tuple(cases), all(output is None and len(tape) <= _READER_TAPE for tape, _, output in cases))


def _expected(output: str) -> str | re.Pattern[str]:
    if not frozenset(".+*?|()").isdisjoint(output):
        try:
            return re.compile(output)
        except re.error:
            pass
    return output


# ------------------------------------------------------------------------------------------------------ text to machine


def extract(response: str) -> str:
    """The program of a response: its last complete fenced block, or all of it.

    The tag `manufactoria` directly after the fence is no part of a block. Any other is, and the block will not parse.
    """
    pieces = response.split("```")
    if len(pieces) < 3:
        return response.strip()
    return pieces[(len(pieces) - 1) // 2 * 2 - 1].removeprefix("manufactoria").strip()


Node: TypeAlias = tuple[str, str, str, str, str, str, str, str, str]
"""A node: (of a puller "RB" or "", id, targets of R or Y, of B or G, and of EMPTY, "" where there is none; of a painter its
colour's name or "" of START, id, target; "END" of END). What does not apply is "", so that one pattern yields them all."""

_USUAL = re.compile(
    r"PULLER_(?:(RB)|YG) (\w++):\n"
    r"(?:    \[(?(1)R|Y)\] (\w++)\n|)(?:    \[(?(1)B|G)\] (\w++)\n|)(?:    \[EMPTY\] (\w++)\n|)\n*+"
    r"|(?:START|PAINTER_(RED|BLUE|YELLOW|GREEN)) (\w++):\n    NEXT (\w++)\n++"
    r"|(END) end\n++"
    r"|[^\n]*+\n"  # anything else is a node without any name
)
_COMMENT = re.compile(r"(?<![ \t])[ \t]*+#[^\n]*+")
_USUAL_LENGTH = 50_000
_RESERVED = frozenset(("start", "end", "NONE", "END"))

_LINE = re.compile(
    r"(?:(?: {4}|\t)[^\S\n]*+(\[(?:R|B|Y|G|EMPTY)\]|NEXT)"  # a route, or else a node,
    r"|(?! {4}|\t)[^\S\n]*+(START|END|PULLER_(?:RB|YG)|PAINTER_(?:RED|BLUE|YELLOW|GREEN)))"
    r"[^\S\n]++(\w++)(:?)[^\S\n]*+(?:#[^\n]*+)?\n"  # and its target or id
    r"|[^\S\n]*+(?:#[^\n]*+)?\n"  # nothing
    r"|([^\n]*+)\n"  # anything else, which is an error
)
"""One line, whatever it is. Nothing is ever tried twice, so that the cost is linear."""

_PULLER_ROUTES = {"[R]": "R", "[B]": "B", "[Y]": "Y", "[G]": "G", "[EMPTY]": ""}
_NEXT_ROUTES = {"NEXT": ""}

Declared: TypeAlias = tuple[str, str, int, list[tuple[str, str]]]
"""A node as it is written: kind, id, line, and its routes as (symbol, target), with the symbol "" for NEXT and EMPTY."""


def compile(program: str) -> Machine:
    """Reads a program. Raises ParseError for what is wrong first, in the published parser's order."""
    machine = _machine(_usual(program)) or _machine(_parsed(program))
    assert machine is not None, "what was parsed is a program"
    return machine


def _usual(program: str) -> list[Node]:
    """The nodes of a program that is written as usual; anything else yields a list that `_machine` does not take.

    Usual are single spaces, indentation by 4, comments, and routes in the order R, B, EMPTY or Y, G, EMPTY (some may lack).
    That is several times as fast as going through the text line by line.
    """
    if len(program) > _USUAL_LENGTH or not program.startswith(("START", "#")):
        return []
    if "#" in program:
        program = _COMMENT.sub("", program).lstrip("\n")
    return _USUAL.findall(program + "\n")


def _parsed(program: str) -> list[Node]:
    """The nodes of any program. Raises ParseError."""
    declared = _declared(program)
    ids = {name for _, name, _, _ in declared} | {"NONE", "END"}
    nodes: list[Node] = []
    for kind, name, line, routes in declared:
        for _, target in routes:
            if target not in ids:
                raise ParseError(
                    "undefined_target", line, f"`{_shown(name)}` leads to `{_shown(target)}`, which is no node"
                )
        to = dict(reversed(routes))  # the first for a colour counts
        if kind in _PULLS:
            first, second = _PULLS[kind]
            is_rb = "RB" if kind == "PULLER_RB" else ""
            nodes.append((is_rb, name, to.get(first, ""), to.get(second, ""), to.get("", ""), "", "", "", ""))
        elif kind == "END":
            nodes.append(("", "", "", "", "", "", "", "", kind))
        else:
            nodes.append(
                ("", "", "", "", "", kind.removeprefix("PAINTER_") if kind != "START" else "", name, to[""], "")
            )
    return nodes


def _machine(nodes: list[Node]) -> Machine | None:
    """The tables of a program. None unless there is one START and one END, each id once, and no target undefined."""
    ids = [node[1] or node[6] for node in nodes]
    numbers = {"END": _UNKNOWN} | {name: i for i, name in enumerate(ids, 3) if name}
    if len(set(ids)) != len(nodes) or "" not in ids or "end" in numbers:
        return None
    numbers[""] = numbers["NONE"] = _NONE  # a node may be called NONE, but nothing leads there
    numbers["end"] = _END
    start, has_end = _UNKNOWN, False
    routes: list[Routes] = [{}, {}, {}]
    paints = ["", "", ""]
    try:
        for is_rb, name, first, second, empty, colour, painter, target, is_end in nodes:
            if name:
                one, two = ("R", "B") if is_rb else ("Y", "G")
                routes.append({one: numbers[first], two: numbers[second], "": numbers[empty]})
            elif painter:
                if not colour:
                    if painter != "start":
                        return None
                    start = len(routes)
                routes.append({"": numbers[target]})
            else:
                if not is_end:
                    return None
                has_end = True
                routes.append({})
            paints.append(colour[:1])
    except KeyError:
        return None
    if start == _UNKNOWN or not has_end:
        return None
    names = ["end", "NONE", "END", *ids]
    return Machine(start, names, routes, paints, [{} for _ in names], {})


def _declared(program: str) -> list[Declared]:
    """The nodes of a program in the order of the text, right but for targets that may be undefined."""
    text = program.strip()
    first, _, rest = text.partition("\n")
    if first.strip() == "```":
        text = rest
    rest, _, last = text.rpartition("\n")
    if last.strip() == "```":
        text = rest
    declared: list[Declared] = []
    seen: set[str] = set()
    allowed: Mapping[str, str] = {}
    routes: list[tuple[str, str]] = []
    for number, match in enumerate(_LINE.finditer(text + "\n"), 1):
        route, kind, name, colon, other = match.groups()
        if route is not None:
            if colon or route not in allowed:
                raise _unfit(number, match[0], declared)
            routes.append((allowed[route], name))
        elif kind is not None:
            if declared:
                _check_routes(declared[-1])
            if not colon and kind != "END":
                raise ParseError("missing_colon", number, f"the id needs a colon: `{kind} {name}:`")
            if colon and kind == "END":
                raise ParseError("end_with_colon", number, f"END takes no colon: `END {name}`")
            if name in seen:
                raise ParseError("duplicate_id", number, f"there is a node `{_shown(name)}` already")
            if kind in ("START", "END") and name != kind.lower():
                raise ParseError(
                    f"{kind.lower()}_wrong_id",
                    number,
                    f"the id of {kind} must be `{kind.lower()}`, not `{_shown(name)}`",
                )
            seen.add(name)
            routes = []
            declared.append((kind, name, number, routes))
            allowed = _PULLER_ROUTES if kind in _PULLS else {} if kind == "END" else _NEXT_ROUTES
        elif other is not None:
            raise _unfit(number, other, declared)
    if not declared:
        raise ParseError("empty_program", None, "there is nothing but blank lines and comments")
    _check_routes(declared[-1])
    kinds = {kind for kind, _, _, _ in declared}
    for kind, example in (("START", "START start:"), ("END", "END end")):
        if kind not in kinds:
            raise ParseError(f"no_{kind.lower()}", None, f"there is no {kind} node: `{example}`")
    return declared


def _check_routes(node: Declared) -> None:
    kind, name, line, routes = node
    if kind in _PULLS:
        wrong = sorted({symbol for symbol, _ in routes} - {*_PULLS[kind], ""})
        if wrong:
            raise ParseError("wrong_colour_for_puller", line, f"{kind} `{_shown(name)}` cannot take [{wrong[0]}]")
    elif kind != "END" and len(routes) != 1:
        slug = "start_route_count" if kind == "START" else "painter_route_count"
        raise ParseError(
            slug,
            line,
            f"{kind} `{_shown(name)}` needs one line `NEXT name`, indented by 4 spaces or a tab; there are {len(routes)}",
        )


def _unfit(number: int, line: str, declared: list[Declared]) -> ParseError:
    """What is wrong with a line that is neither a node nor a route of the node above it."""
    kind = declared[-1][0] if declared else ""
    is_route = line.startswith(("    ", "\t"))
    if kind and not is_route:
        _check_routes(declared[-1])
    shown = f"`{_shown(line)}`"
    if not kind or not is_route:
        return ParseError("invalid_node_declaration", number, f"{shown} declares no node, as `PULLER_RB name:` would")
    if kind == "END":
        return ParseError("end_with_route", number, f"{shown} is indented like a route, and END has none")
    if kind in _PULLS:
        return ParseError("invalid_puller_route", number, f"{shown} is no route of a puller, as `[R] name` would be")
    return ParseError("invalid_next_route", number, f"{shown} is no route of {kind}, as `NEXT name` would be")


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------------------ visit by visit


def run(machine: Machine, tape: str) -> Run:
    """Runs a program on a tape."""
    return _walk(machine, tape, None)


def trace(machine: Machine, tape: str) -> list[tuple[str, str]]:
    """What `run` does, for people to follow: each visit as (id of the node, tape on arrival there)."""
    path: list[tuple[str, str]] = []
    _walk(machine, tape, path)
    return path


def _walk(machine: Machine, tape: str, path: list[tuple[str, str]] | None) -> Run:
    routes, paints = machine.routes, machine.paints
    symbols = list(tape)
    head = 0
    node = machine.start
    for steps in range(1, LIMIT + 1):
        if path is not None:
            path.append((machine.names[node], "".join(symbols[head:])))
        table = routes[node]
        if not table:
            return Run(node == _END, "".join(symbols[head:]), steps, _REASONS[node])
        front = symbols[head] if head < len(symbols) else ""
        if front in table and front:
            head += 1
        else:
            front = ""
        if paints[node]:
            symbols.append(paints[node])
        node = table[front]
    return Run(False, "".join(symbols[head:]), LIMIT, "step_limit")


# ----------------------------------------------------------------------------------------------------- verdicts, sooner


def _leap(machine: Machine, node: int, front: str) -> Leap:
    """Goes from `node` until the symbol at the front is taken: (next node, colours painted on the way, visits).

    How the tape goes on does not matter, so each such leap has to be made once only. `front` is "" for an empty tape, which
    no symbol can be taken from; there it ends with the first colour that is painted. The next node is _ACCEPTED or _REJECTED
    if the run is decided before the symbol is taken; so it is if a node is met twice, since nothing that a node sees of
    the tape has changed.
    """
    routes, paints = machine.routes, machine.paints
    painted: list[str] = []
    leap: Leap = (_REJECTED, "", 0)
    origin = node
    for visits in range(1, min(len(routes), LIMIT) + 1):  # more visits would be the second of some node
        table = routes[node]
        if not table:
            if node == _END:
                leap = (_ACCEPTED, "".join(painted), visits)
            break
        if front and front in table:
            leap = (table[front], "".join(painted), visits)
            break
        colour = paints[node]
        node = table[""]
        if colour:
            painted.append(colour)
            if not front:
                leap = (node, colour, visits)
                break
    machine.leaps[origin][front] = leap
    return leap


def _ending(machine: Machine, tape: str) -> str | None:
    """The output of a run that accepts; None for one that does not. Agrees with `run`, but stops as soon as this is known.

    The tape is read in rounds. A round takes what was on the tape when it began, leap by leap; what is painted meanwhile is
    the tape of the next. Node and tape at the beginning of a round decide all that follows, so a run that comes to the same
    pair again never ends. Nor does one that can no longer get to END (`_is_lost`).
    """
    leaps = machine.leaps
    node = machine.routes[machine.start][""]
    visits = 1
    seen: set[tuple[int, str]] = set()
    is_young = True
    while (node, tape) not in seen:
        seen.add((node, tape))
        if is_young and visits > _YOUTH and tape:
            is_young = False
            if _is_lost(machine, node, frozenset(tape)):
                return None
        painted: list[str] = []
        symbols = iter(tape[:LIMIT] or ("",))  # there is no time for more than LIMIT: each costs a visit
        for front in symbols:
            leap = leaps[node].get(front)
            if leap is None:
                if visits >= LIMIT:
                    return None
                leap = _leap(machine, node, front)
            node, word, n = leap
            visits += n
            if node < 0:
                if node == _REJECTED or visits > LIMIT:
                    return None
                return "".join([front, *symbols, tape[LIMIT:], *painted, word])
            painted.append(word)
        if visits >= LIMIT:
            return None
        tape = "".join(painted)
    return None


_YOUTH = 30
"""Visits after which it is worth asking whether END is still within reach; most runs that accept are over by then."""

_SEARCH = 64
"""Nodes among which a way to END is looked for; where there are more, it is not known."""


def _is_lost(machine: Machine, node: int, colours: frozenset[str]) -> bool:
    """Whether END is out of reach from `node` with any tape of just these colours. False if that is not plain to see.

    Follows the leaps for every colour that is on the tape or can get there. As long as each of them paints something the
    tape never runs out, and no other leaps are made.
    """
    known = machine.lost.get((node, colours))
    if known is None:
        known = machine.lost[node, colours] = _has_no_way(machine, node, set(colours))
    return known


def _has_no_way(machine: Machine, node: int, colours: set[str]) -> bool:
    found = {node}
    todo = [node]
    while todo:
        node = todo.pop()
        for front in tuple(colours):
            after, word, _ = machine.leaps[node].get(front) or _leap(machine, node, front)
            if after == _REJECTED:
                continue
            if after == _ACCEPTED or not word or len(found) > _SEARCH:
                return False
            if not colours.issuperset(word):
                colours.update(word)
                todo = list(found)  # all over again, with the new colour
            if after not in found:
                found.add(after)
                todo.append(after)
    return True


# ------------------------------------------------------------------------------------------- programs that only read

State: TypeAlias = dict[str, Any]
"""Colour at the front -> state after it was taken; "" -> state to which an empty tape leads."""

_ENDED: State = {}
_FAILED: State = {}
for _symbol in ("R", "B", "Y", "G", ""):
    _ENDED[_symbol] = _ENDED
    _FAILED[_symbol] = _FAILED

_READER_TAPE = 490
"""Longest tape that a program which only reads is certain to finish within LIMIT visits, as `_automaton` reads it."""


def _automaton(nodes: list[Node]) -> State | None:
    """The first state of a program that never paints, as a finite automaton. None for any other.

    Most right answers to the problems that only ask for a verdict are of this kind. A state is a puller; the detour over
    EMPTY, which must lead to a puller of the other kind, END or NONE, is already made, so that a symbol costs one step. A
    step stands for two visits at most, and the end of the tape for three.
    """
    states: dict[str, State] = {node[1]: {} for node in nodes}
    if len(states) != len(nodes) - 1 or not _RESERVED.isdisjoint(states):
        return None  # not one START and one END, an id twice, or one to be careful with
    states[""] = states["NONE"] = states["END"] = _FAILED
    states["end"] = _ENDED
    start = end = None
    red_blue: list[tuple[State, State]] = []
    yellow_green: list[tuple[State, State]] = []
    try:
        for is_rb, name, first, second, empty, colour, _, target, is_end in nodes:
            if is_rb:
                state = states[name]
                state["R"] = states[first]
                state["B"] = states[second]
                state[""] = detour = states[empty]
                red_blue.append((state, detour))
            elif name:
                state = states[name]
                state["Y"] = states[first]
                state["G"] = states[second]
                state[""] = detour = states[empty]
                yellow_green.append((state, detour))
            elif target and not colour:
                start = states[target]
            elif is_end:
                end = is_end
            else:
                return None
        to_yg = [(detour["Y"], detour["G"], detour[""]) for _, detour in red_blue]
        to_rb = [(detour["R"], detour["B"], detour[""]) for _, detour in yellow_green]
    except KeyError:
        return None  # an undefined target, or a detour to a puller of the same kind
    for (state, _), (yellow, green, nothing) in zip(red_blue, to_yg, strict=True):
        state["Y"] = yellow
        state["G"] = green
        state[""] = nothing
    for (state, _), (red, blue, nothing) in zip(yellow_green, to_rb, strict=True):
        state["R"] = red
        state["B"] = blue
        state[""] = nothing
    return start if end else None


def _read(start: State, cases: Iterable[Case]) -> list[bool] | None:
    """Which tests a program passes that only reads. None if a tape holds no colour, or EMPTY leads on and on."""
    ended, failed = _ENDED, _FAILED
    passed = []
    try:
        for tape, wanted, _ in cases:
            state = start
            for front in tape:
                state = state[front]
            state = state[""]
            if state is ended:
                passed.append(wanted)
            elif state is failed:
                passed.append(not wanted)
            else:
                return None
    except KeyError:
        return None
    return passed


# ---------------------------------------------------------------------------------------------------------- judgement


def results(program: str, tests: Suite | Iterable[Mapping[str, Any]]) -> list[bool]:
    """Which tests a program passes. Raises ParseError."""
    suite = tests if isinstance(tests, Suite) else Suite.of(tests)
    passed = _passed(_usual(program), suite)
    if passed is None:
        passed = _passed(_parsed(program), suite)
        assert passed is not None, "what was parsed is a program"
    return passed


def _passed(nodes: list[Node], suite: Suite) -> list[bool] | None:
    """Which tests a program passes. None if the nodes make up no program."""
    if suite.reading:
        start = _automaton(nodes)
        if start is not None:
            passed = _read(start, suite.cases)
            if passed is not None:
                return passed
    machine = _machine(nodes)
    return None if machine is None else passes(machine, suite)


def passes(machine: Machine, suite: Suite) -> list[bool]:
    """Which tests a compiled program passes: (accepted, and the output is right if it is checked) == wanted."""
    passed = []
    for tape, wanted, expected in suite.cases:
        output = _ending(machine, tape)
        if output is None:
            good = False
        elif expected is None:
            good = True
        elif isinstance(expected, str):
            good = output == expected
        else:
            good = expected.fullmatch(output) is not None
        passed.append(good == wanted)
    return passed


def judge(program: str, tests: Suite | Iterable[Mapping[str, Any]]) -> Judgement:
    """Runs a program on every test. A program that does not parse passes none, not even one that wants it to reject."""
    try:
        passed = results(program, tests)
    except ParseError:
        return Judgement(False, [], False)
    return Judgement(True, passed, all(passed))


def reward(response: str, tests: Suite | Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(share of the tests that the program of a response passes, 1.0 if it passes all of them and else 0.0).

    Both 0.0 if there are no tests. The share is rounded to a float; where it must be exact, count the `results`.
    """
    _, passed, all_passed = judge(extract(response), tests)
    return (sum(passed) / len(passed), float(all_passed)) if passed else (0.0, 0.0)
