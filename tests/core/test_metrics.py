"""What a run says about itself (case C28), in figures and in words."""

import json
from fractions import Fraction

from nevergiveup.events import Dispatched, Failed, Graded, Judged, Planned, Reissued, Trained, WentStale
from nevergiveup.metrics import Tally


def judged(rewards, verdict, outcome="", *, n_unverified=0, n_truncated=0, prompt="p", tried=None, n_fresh=None):
    tried = len(rewards) if tried is None else tried
    n_fresh = len(rewards) if n_fresh is None else n_fresh
    return Judged(
        0, prompt, 0, 1, tuple(rewards), (0,) * len(rewards), n_unverified, 0, n_truncated,
        verdict, outcome, tried, sum(rewards), n_fresh, 0,
    )  # fmt: skip


def c28_window() -> Tally:
    tally = Tally()
    for _ in range(5):
        tally.add(judged([1, 1, 1, 1], "solved", "solved"))
    for _ in range(3):
        tally.add(judged([0, 0, 0, 0], "retry"))
    tally.add(judged([0, 0, 0, 0], "give_up", "given_up"))
    for _ in range(3):
        tally.add(judged([1, 0, 0, 0], "train"))
    tally.add(judged([], "trouble", "unverified", n_unverified=4))
    return tally


def test_c28_figures():
    figures = c28_window().figures()
    assert figures["signal"] == 0.25
    assert round(figures["all_right"], 4) == 0.4167
    assert round(figures["all_wrong"], 4) == 0.3333
    assert figures["no_verdict_groups"] == 1
    assert figures["requeued"] == 3
    assert figures["chains/given_up"] == 1
    assert figures["completions_scored"] == 48
    assert figures["completions_unverified"] == 4


def test_c28_in_words():
    words = c28_window().in_words()
    assert words[0] == ("25 % of 12 groups had signal, 42 % were all right, 33 % all wrong (3 asked again, 1 given up)")
    assert "1 groups got no verdict from the grader and were not counted as wrong" in words


def test_all_wrong_because_of_the_length_limit_says_what_to_raise_first():
    tally = Tally()
    for n_truncated in (4, 4, 4, 3) * 4:
        tally.add(judged([0, 0, 0, 0], "retry", n_truncated=n_truncated))
    for _ in range(4):
        tally.add(judged([1, 0, 0, 0], "train"))
    assert tally.length_limited == 12
    assert tally.figures()["length_limited"] == 0.75
    assert (
        "75 % of those were cut by the length limit throughout: raise sampling.max_new_tokens" in tally.in_words()[-1]
    )


def test_graded_groups_without_contrast_are_neither_right_nor_wrong():
    tally = Tally()
    tally.add(judged([Fraction(7, 12)] * 4, "retry"))
    assert (tally.flat, tally.all_right, tally.all_wrong, tally.varied) == (1, 0, 0, 0)
    assert "100 % the same partial score throughout" in tally.in_words()[0]


def test_pass_rate_is_pooled_over_closed_chains_and_is_not_the_mean_baseline():
    """Oracle 2.7: one chain of 24 with 1 right and one of 4 with 4 right pool to 5/28, not to (1/24 + 1)/2."""
    tally = Tally()
    tally.add(Trained("hard", 0, 6, 4, 0, 24, 1, (0, 0, 0, 0), 5))
    tally.add(judged([1, 1, 1, 1], "solved", "solved", prompt="easy"))
    assert tally.figures()["pooled_pass_rate"] == 5 / 28


def test_every_completion_of_a_bucket_has_one_fate():
    tally = Tally({"e": "easy", "h": "hard"})
    for prompt, n in (("e", 4), ("h", 4), ("h", 4)):
        tally.add(Dispatched(0, prompt, 0, 1, n, 0, 0))
    tally.add(judged([1, 1, 1, 1], "solved", "solved", prompt="e"))
    tally.add(judged([0, 0, 0, 0], "retry", prompt="h"))
    tally.add(judged([1, 0, 0, 0], "train", prompt="h", tried=8, n_fresh=6))
    tally.add(Trained("h", 0, 2, 6, 0, 8, 1, (1, 1, 0, 0, 0, 0), 3))
    for bucket, drawn in (("easy", 4), ("hard", 8), ("all", 12)):
        counts = dict(tally.completions[bucket])
        assert counts.pop("drawn") == drawn
        assert sum(counts.values()) == drawn
    assert tally.completions["hard"]["stale"] == 2
    assert tally.figures()["age_mean"] == 2 / 6


def test_a_tally_goes_on_where_it_was_saved():
    """Through JSON, at any moment, with fractions and numbers as keys."""
    events = [
        Dispatched(0, "a", 0, 1, 4, 1, 0),
        Graded(0, "a", 4, {"no answer": 1}, {"too slow": 2}, {"format": 0.5}),
        judged([Fraction(1, 3), 1, 0], "train", prompt="a", n_unverified=1),
        Trained("a", 0, 2, 3, 1, 8, Fraction(4, 3), (-1, 0, 2), 3),
        judged([0, 0], "give_up", "given_up", prompt="b", tried=6, n_fresh=2),
        Planned("b", 0, "retry", 12, "", 1, 4, 1, 4, None, 3),
        WentStale("a", 1, 4, True, 5),
        Failed(7, "b", 1, 4, "lost", True),
        Reissued(8, "b", 1, 4),
        Reissued(None, "a", 1, 3),
    ]
    buckets = {"a": "hard"}
    for n in range(len(events) + 1):
        straight, first = Tally(buckets), Tally(buckets)
        for event in events:
            straight.add(event)
        for event in events[:n]:
            first.add(event)
        second = Tally.from_state(json.loads(json.dumps(first.state_dict())), buckets)
        assert second == first
        for event in events[n:]:
            second.add(event)
        assert second == straight
    assert straight.figures()["completions/all/reissued"] == 7
    assert straight.figures()["completions/hard/reissued"] == 3
