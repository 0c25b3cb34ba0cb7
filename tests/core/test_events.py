"""Events: one line of JSON each, exact both ways, readable after a run was killed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from nevergiveup.events import (
    Dispatched,
    Event,
    EventWriter,
    Failed,
    Judged,
    Planned,
    Published,
    Reissued,
    Trained,
    WentStale,
    cut_events,
    decode,
    encode,
    event_parts,
    read_events,
)

EVENTS: list[Event] = [
    Dispatched(request=3, prompt="p1", epoch=0, round=2, n=4, seed=2**62 + 1, version=7),
    Judged(
        request=3, prompt="p1", epoch=0, round=2, rewards=(0, 1, Fraction(7, 12)), versions=(6, None, 7),
        n_unverified=1, n_failed=0, n_truncated=2, verdict="train", outcome="", tried=7, total=Fraction(19, 12),
        n_fresh=3, version=7,
    ),
    Judged(
        request=4, prompt="p2", epoch=1, round=1, rewards=(), versions=(), n_unverified=4, n_failed=0, n_truncated=0,
        verdict="trouble", outcome="unverified", tried=0, total=0, n_fresh=0, version=7,
    ),
    Failed(request=5, prompt="ä\n\"", epoch=0, n=4, reason="connection lost\r\n\u2028 at é", closed=True),
    Trained(
        prompt="p1", epoch=0, rounds=2, n_trained=3, n_left_out=1, tried=7, total=Fraction(0.1), ages=(1, -1, 0),
        version=7,
    ),
    Planned(
        prompt="p4", epoch=1, verdict="retry", draws=12, outcome="", rounds=1, tried=8, total=Fraction(5, 12), n_fresh=8,
        gradient_norm=0.25, version=7,
    ),
    WentStale(prompt="p3", epoch=2, n=2, closed=False, version=9),
    Reissued(request=None, prompt="p3", epoch=2, n=5),
    Published(version=8),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
@pytest.mark.parametrize("t", [None, 0.0, 1.25])
def test_decode_is_the_inverse_of_encode(event: Event, t: float | None) -> None:
    line = encode(event, t)
    assert "\n" not in line
    assert decode(line) == (t, event)


def test_a_line_names_kind_time_and_fields_in_order() -> None:
    assert encode(EVENTS[0], 2.00049) == (
        '{"kind":"dispatched","t":2.0,"request":3,"prompt":"p1","epoch":0,"round":2,"n":4,'
        '"seed":4611686018427387905,"version":7}'
    )
    row = json.loads(encode(EVENTS[1]))
    assert row["rewards"] == [0, 1, "7/12"]
    assert row["versions"] == [6, None, 7]
    assert row["total"] == "19/12"
    assert "t" not in row


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[1]",
        "3",
        '"trained"',
        "{}",
        '{"kind":"unheard_of"}',
        '{"kind":"published"}',
        '{"kind":"published","version":1,"extra":2}',
        '{"kind":"trained","total":"one"}',
        '{"kind":"trained","total":"1/0"}',
    ],
)
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own message is as good)
        decode(line)


def test_written_events_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    times = (i / 2 for i in range(len(EVENTS)))
    writer = EventWriter(path, lambda: next(times))
    for event in EVENTS[:4]:
        writer.write(event)
    assert writer.sync() == (0, path.stat().st_size)
    for event in EVENTS[4:]:
        writer.write(event)
    writer.close()
    assert list(read_events(path)) == [(i / 2, event) for i, event in enumerate(EVENTS)]


def test_a_second_writer_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for event in EVENTS[:2]:
        writer = EventWriter(path, lambda: 1.0)
        writer.write(event)
        writer.close()
    assert [event for _, event in read_events(path)] == EVENTS[:2]


def test_a_log_is_kept_in_parts_and_can_be_cut_back_to_any_place(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, lambda: 1.0, part_bytes=100)
    places, n_events = [writer.sync()], 4 * len(EVENTS)
    for event in 4 * EVENTS:
        writer.write(event)
        places.append(writer.sync())
    writer.close()
    parts = event_parts(path)
    assert len(parts) > 12
    assert parts[11] == tmp_path / "events.11.jsonl", "in order of number, not of name"
    assert max(part.stat().st_size for part in parts) < 100 + max(len(encode(event, 1.0)) + 2 for event in EVENTS)
    assert [event for _, event in read_events(path)] == 4 * EVENTS
    for n in range(n_events, -1, -3):
        cut_events(path, *places[n])
        assert [event for _, event in read_events(path)] == (4 * EVENTS)[:n]
    writer = EventWriter(path, lambda: 1.0, part_bytes=100)
    writer.write(EVENTS[0])
    writer.close()
    assert [event for _, event in read_events(path)] == [*(4 * EVENTS)[:n], EVENTS[0]]
    with pytest.raises(ValueError, match=r"events\.1\.jsonl is shorter than 60 bytes"):
        cut_events(path, 1, 60)


def test_a_cut_line_is_left_out_in_the_last_part_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = encode(EVENTS[0])
    path.write_text(f"{line}\n{line[:50]}")
    (tmp_path / "events.1.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2: "):
        list(read_events(path))


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    """A killed run may leave half a line, or half a character."""
    path = tmp_path / "events.jsonl"
    whole = (encode(EVENTS[0]) + "\n").encode()
    last = encode(EVENTS[3]).encode()
    for n in (0, 1, *range(40, len(last) + 1)):
        path.write_bytes(whole + last[:n])
        assert [event for _, event in read_events(path)] == EVENTS[:1]


def test_any_other_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(encode(EVENTS[0]) + "\nhalf a li\n" + encode(EVENTS[5]) + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2: "):
        list(read_events(path))
    path.write_bytes(b'{"kind":"\xff"}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 1: "):
        list(read_events(path))
