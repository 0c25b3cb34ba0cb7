"""The robot of Manufactoria, plainly: dictionaries, one visit at a time, the whole path kept, 1,000 visits.

As the published environment works. The benchmark measures the package against it; the tests compare verdicts with it.
"""

from __future__ import annotations

import re

LIMIT = 1000
FENCED = re.compile(r"```(?:manufactoria)?(.*?)```", re.DOTALL)
DECLARATION = re.compile(
    r"(START|END|PULLER_RB|PULLER_YG|PAINTER_RED|PAINTER_BLUE|PAINTER_YELLOW|PAINTER_GREEN)\s+(\w+)(:?)\s*(?:#.*)?$"
)
PULLER_ROUTE = re.compile(r"\[(R|B|Y|G|EMPTY)\]\s+(\w+)\s*(?:#.*)?$")
NEXT_ROUTE = re.compile(r"NEXT\s+(\w+)\s*(?:#.*)?$")
PAINT = {"PAINTER_RED": "R", "PAINTER_BLUE": "B", "PAINTER_YELLOW": "Y", "PAINTER_GREEN": "G"}
PULL = {"PULLER_RB": "RB", "PULLER_YG": "YG"}


class PlainError(Exception):
    def __init__(self, kind, line=None):
        super().__init__(kind)
        self.kind = kind
        self.line = line


def extract(response):
    blocks = FENCED.findall(response)
    return (blocks[-1] if blocks else response).strip()


def compile(program):
    lines = program.strip().split("\n")
    if lines and lines[0].strip() == "```":
        lines = lines[1:]
    if lines and lines[-1].strip() == "```":
        lines = lines[:-1]
    lines = [
        (number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")
    ]
    if not lines:
        raise PlainError("empty_program")
    nodes = {}
    i = 0
    while i < len(lines):
        number, line = lines[i]
        if line.startswith(("    ", "\t")):
            raise PlainError("invalid_node_declaration", number)
        match = DECLARATION.match(line.strip())
        if match is None:
            raise PlainError("invalid_node_declaration", number)
        kind, name, colon = match.groups()
        if kind == "END" and colon:
            raise PlainError("end_with_colon", number)
        if kind != "END" and not colon:
            raise PlainError("missing_colon", number)
        if name in nodes:
            raise PlainError("duplicate_id", number)
        if kind == "START" and name != "start":
            raise PlainError("start_wrong_id", number)
        if kind == "END" and name != "end":
            raise PlainError("end_wrong_id", number)
        routes = []
        i += 1
        while i < len(lines) and lines[i][1].startswith(("    ", "\t")):
            at, text = lines[i]
            if kind == "END":
                raise PlainError("end_with_route", at)
            if kind in PULL:
                match = PULLER_ROUTE.match(text.strip())
                if match is None:
                    raise PlainError("invalid_puller_route", at)
                routes.append(match.groups())
            else:
                match = NEXT_ROUTE.match(text.strip())
                if match is None:
                    raise PlainError("invalid_next_route", at)
                routes.append(("NEXT", match.group(1)))
            i += 1
        if kind in PULL:
            for colour, _ in routes:
                if colour != "EMPTY" and colour not in PULL[kind]:
                    raise PlainError("wrong_colour_for_puller", number)
        elif kind != "END" and len(routes) != 1:
            raise PlainError("start_route_count" if kind == "START" else "painter_route_count", number)
        table = {}
        for colour, target in routes:
            table.setdefault(colour, target)
        nodes[name] = {"kind": kind, "routes": table, "line": number}
    if nodes.get("start", {}).get("kind") != "START":
        raise PlainError("no_start")
    if nodes.get("end", {}).get("kind") != "END":
        raise PlainError("no_end")
    for node in nodes.values():
        for target in node["routes"].values():
            if target not in nodes and target not in ("NONE", "END"):
                raise PlainError("undefined_target", node["line"])
    return nodes


def run(nodes, tape):
    current = "start"
    path = []
    while len(path) < LIMIT:
        path.append(current)
        if current == "NONE":
            return False, tape, len(path), "none"
        node = nodes.get(current)
        if node is None:
            return False, tape, len(path), "unknown_node"
        kind = node["kind"]
        if kind == "END":
            return True, tape, len(path), "end"
        if kind == "START":
            current = node["routes"]["NEXT"]
        elif kind in PULL:
            if tape and tape[0] in PULL[kind]:
                colour, tape = tape[0], tape[1:]
            else:
                colour = "EMPTY"
            current = node["routes"].get(colour, "NONE")
        else:
            tape += PAINT[kind]
            current = node["routes"]["NEXT"]
    return False, tape, len(path), "step_limit"


def matches(expected, output):
    if any(c in expected for c in ".+*?|()"):
        try:
            return re.fullmatch(expected, output) is not None
        except re.error:
            pass
    return output == expected


def judge(program, tests):
    try:
        nodes = compile(program)
    except PlainError:
        return False, [], False
    passed = []
    for test in tests:
        accepted, output, _, _ = run(nodes, test.get("input", ""))
        good = accepted and (not test.get("check_output", True) or matches(test.get("expected_output", ""), output))
        passed.append(good == test.get("expected_accepted", True))
    return True, passed, all(passed)


def reward(response, tests):
    if not tests:
        return 0.0, 0.0
    valid, passed, every = judge(extract(response), tests)
    return (sum(passed) / len(tests), float(every)) if valid else (0.0, 0.0)
