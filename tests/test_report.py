"""The report: its figures are those of the runs, nothing a run holds can break the page, and what is missing is said."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nevergiveup.evaluate import BUCKETS, bootstrap_interval
from nevergiveup.events import EventWriter, Judged, Trained, read_events
from nevergiveup.report import page
from nevergiveup.report.charts import Axis, Line, Lines, count_axis, difference_axis, svg
from nevergiveup.report.compare import Comparison, headline
from nevergiveup.report.glossary import GLOSSARY
from nevergiveup.report.runs import MOST_TEXT, N_BINS, NO_CONTRAST, Round, Run, Sampled, Timeline, read_run
from nevergiveup.strategies import FixedK
from report_runs import write_run

BAD = "</script><script>window.hacked = 1; alert(1)</script><img src=x onerror='window.hacked=1'>\u2028&\"'"
"""What a completion, an id or a reason may hold."""

BAD_NAME = '<img src=x onerror="window.hacked=1">&'

VOID = {"meta", "link", "input", "img", "br"}


class Parsed(HTMLParser):
    """A page: its tables as lists of rows, its text, and tags that were not closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: Counter[str] = Counter()
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self.open):
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def table(self, *header: str) -> list[dict[str, str]]:
        """The rows of the table that has these columns."""
        for table in self.tables:
            if set(header) <= set(table[0]):
                return [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        raise AssertionError(f"no table with {header}")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """fixed and ngu: the same start and budget. bad: texts and ids that want to break the page."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "fixed", FixedK(k=4))
    write_run(root / "ngu")
    write_run(root / BAD_NAME, n_completions=2000, rename={"p5": BAD, "p7": f"seven {BAD}"}, text=BAD, reason=BAD)
    return {"fixed": root / "fixed", "ngu": root / "ngu", "bad": root / BAD_NAME}


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in short: fixed and ngu."""
    root = tmp_path_factory.mktemp("short")
    write_run(root / "fixed", FixedK(k=4), n_completions=1200)
    write_run(root / "ngu", n_completions=1200)
    return root


@pytest.fixture
def copied(short: Path, tmp_path: Path) -> Any:
    """Copies of short runs, to be damaged."""

    def copy(*names: str) -> list[Path]:
        return [Path(shutil.copytree(short / name, tmp_path / name)) for name in names]

    return copy


def parsed(*runs: Path) -> Parsed:
    return Parsed(page.to_html(page.build(page.read_runs(runs))))


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


# -------------------------------------------------------------------------- figures


def test_completions_by_fate_are_those_of_the_summary(folders):
    rows = parsed(folders["fixed"], folders["ngu"]).table("drawn", "trained", "filtered", "held")
    assert len(rows) == 2 * (len(BUCKETS) + 1)
    for row in rows:
        totals = summary_of(folders[row["run"]])["totals"]
        bucket = row["difficulty"].replace(" ", "_")
        fates = ("trained", "left out", "filtered", "given up", "stale", "unverified", "failed")
        for name in ("drawn", *fates):
            assert number(row[name]) == totals.get(f"completions/{bucket}/{name.replace(' ', '_')}", 0)
        assert number(row["drawn"]) == sum(number(row[name]) for name in (*fates, "held"))
    # The ledger counts an attempt of an open chain as stale at once, the events tell it when the chain closes.
    ledger = summary_of(folders["ngu"])["ledger"]
    whole = next(row for row in rows if (row["run"], row["difficulty"]) == ("ngu", "all"))
    assert number(whole["held"]) + number(whole["stale"]) == ledger["held"] + ledger["stale"]


def test_pass_rates_and_leads_are_those_of_the_evaluations(folders):
    rows = parsed(folders["fixed"], folders["ngu"]).table("difficulty", "fixed, %", "ngu, %")
    final = {
        name: next(row for row in reversed(summary_of(folders[name])["evaluations"]) if row["split"] == "heldout")
        for name in ("fixed", "ngu")
    }
    start = next(row for row in summary_of(folders["ngu"])["evaluations"] if row["split"] == "heldout")
    for row in rows:
        bucket = row["difficulty"].replace(" ", "_")
        if bucket in (*BUCKETS, "all"):
            for name in ("fixed", "ngu"):
                assert row[f"{name}, %"] == f"{100 * final[name]['pass_rates'][bucket]:.1f}"
            assert row["start, %"] == f"{100 * start['pass_rates'][bucket]:.1f}"
            lead = 100 * (final["ngu"]["pass_rates"][bucket] - final["fixed"]["pass_rates"][bucket])
            assert number(row["ngu − fixed, points"]) == pytest.approx(lead, abs=0.051)
    together = next(row for row in rows if row["difficulty"] == "hard and extra hard")
    hard = [row for row in rows if row["difficulty"] in ("hard", "extra hard")]
    n = [number(row["prompts"]) for row in hard]
    mean = sum(number(row["ngu, %"]) * k for row, k in zip(hard, n, strict=True)) / sum(n)
    assert number(together["ngu, %"]) == pytest.approx(mean, abs=0.06)
    assert number(together["prompts"]) == sum(n) == 100


def test_curves_over_time_add_up_to_the_totals(folders):
    for name in ("fixed", "ngu"):
        run = read_run(folders[name])
        assert N_BINS / 2 <= len(run.bins) <= N_BINS + 1
        assert run.bins[-1].end == run.drawn == summary_of(folders[name])["completions"]
        whole = sum((bin.counts for bin in run.bins), Counter())
        assert whole["varied"] == run.tally.varied
        assert whole["all_wrong"] == run.tally.all_wrong
        for bucket in (*BUCKETS, "all"):
            for fate, n in run.tally.completions[bucket].items():
                assert whole[f"completions/{bucket}/{fate}"] == n


@example([1, 0])
@example([9] * 200 + [1])
@given(st.lists(st.integers(0, 50), max_size=400))
def test_bins_hold_everything_once_and_are_not_too_many(sizes):
    """Merged in twos as they become too many; what is left over joins the last one, or stands alone."""
    run = Run(Path())
    timeline = Timeline(run)
    drawn = 0
    for n in sizes:
        drawn += n
        run.tally.varied += 1
        timeline.reached(drawn)
    bins = timeline.bins(drawn)
    assert sum(bin.counts["varied"] for bin in bins) == len(sizes)
    assert len(bins) <= N_BINS + 1
    edges = [bin.start for bin in bins] + [bin.end for bin in bins[-1:]]
    assert edges == sorted(edges)
    assert edges[:1] + edges[-1:] == ([0, drawn] if sizes else [])
    assert all(a.end == b.start for a, b in pairwise(bins))


def test_completions_that_could_teach_are_counted_from_the_rewards_of_their_groups(folders):
    """With 0/1 rewards a group has contrast if it has neither no success nor successes alone."""
    for name in ("fixed", "ngu"):
        run = read_run(folders[name])
        trained = [e for _, e in read_events(folders[name] / "events.jsonl") if isinstance(e, Trained)]
        flat = sum(e.n_trained for e in trained if e.total in (0, e.tried))
        assert run.fates("all")[NO_CONTRAST] == flat
        assert Comparison([run]).teaching(0, BUCKETS) == sum(e.n_trained for e in trained) - flat
    assert read_run(folders["ngu"]).fates("all")[NO_CONTRAST] == 0
    assert read_run(folders["fixed"]).fates("all")[NO_CONTRAST] > 0


def test_prompts_given_up_and_their_tries(folders, tmp_path):
    found: dict[str, Counter[str]] = {}
    for _, event in read_events(folders["ngu"] / "events.jsonl"):
        if isinstance(event, Judged):
            counts = found.setdefault(event.prompt, Counter())
            counts.update(tried=len(event.rewards), right=int(sum(event.rewards)), given_up=event.outcome == "given_up")
    expected = {key: counts for key, counts in found.items() if counts["given_up"]}
    assert expected
    file = tmp_path / "given-up.jsonl"
    assert page.main([str(folders["ngu"]), "--out", str(tmp_path / "r.html"), "--given-up", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["prompt"] for row in rows} == expected.keys()
    for row in rows:
        counts = expected[row["prompt"]]
        assert (row["times_given_up"], row["tried"], row["right"]) == (
            counts["given_up"],
            counts["tried"],
            counts["right"],
        )
    assert [row["right"] > 0 for row in rows] == sorted(row["right"] > 0 for row in rows)  # never right first
    shown = parsed(folders["ngu"]).table("times given up", "tried", "right")
    assert [row["prompt"] for row in shown] == [row["prompt"] for row in rows][:100]


def test_every_advantage_of_the_learner_stands_beside_its_text(folders):
    """Of prompts whose texts are all kept; 0 is an advantage, too."""
    for name in ("fixed", "ngu"):
        run = read_run(folders[name])
        whole = [
            key for key in run.samples if sum(len(r.samples) for r in run.samples[key].rounds) == run.prompts[key].tried
        ]
        assert len(whole) >= 12
        rows = [json.loads(line) for line in (folders[name] / "advantages.jsonl").read_text().splitlines()]
        expected = Counter(
            (row["prompt"], row["step"], row["reward"], round(row["weight"], 9))
            for row in rows
            if row["prompt"] in whole
        )
        shown = Counter(
            (key, s.step, s.reward, round(s.advantage, 9))
            for key in whole
            for r in run.samples[key].rounds
            for s in r.samples
            if s.advantage is not None
        )
        assert shown == expected


def test_advantages_reach_the_visit_that_was_trained_on(tmp_path):
    """The newest visit that has the completions is the one that was trained on; what was left out has none."""
    write_run(tmp_path / "run", n_completions=64)
    sample = {"kind": "sample", "prompt": "a", "round": 1, "version": 0, "finish": "length", "n_tokens": 2,
              "reason": "", "text": "x", "t": 1.0}  # fmt: skip
    rows = [
        {"kind": "prompt", "prompt": "a", "text": "?", "answer": "!"},
        *({**sample, "epoch": 0, "request": 1, "key": key, "reward": 0.0} for key in ("k0", "k1")),
        *(
            {**sample, "epoch": 1, "request": 9, "key": key, "reward": r}
            for key, r in (("k0", 1.0), ("k1", None), ("k2", 0.0))
        ),
        {"kind": "trained", "prompt": "a", "step": 3, "attempts": [["k0", 1.0, 0, 0.75], ["k2", 0.0, 0, None]]},
    ]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rounds = read_run(tmp_path / "run").samples["a"].rounds
    got = [[(s.reward, s.advantage, s.step) for s in round.samples] for round in rounds]
    assert got == [
        [(0.0, None, None), (0.0, None, None)],
        [(1.0, 0.75, 3), (None, None, None), (0.0, None, 3)],
    ]
    assert all(s.is_cut for round in rounds for s in round.samples)


def test_a_prompt_is_lost_if_all_was_right_once_and_nothing_is_at_the_last_visit(tmp_path):
    write_run(tmp_path / "run", n_completions=64)
    writer = EventWriter(tmp_path / "run" / "events.jsonl", lambda: 99.0)
    visits = {"lost": [(1, 1), (0, 0)], "found": [(0, 0), (1, 1)], "unsure": [(1, 1), (0, 1)], "once": [(0, 0)]}
    for prompt, rounds in visits.items():
        for epoch, rewards in enumerate(rounds):
            for number_of_round in (1, 2):  # what a retry brings does not count
                shown = rewards if number_of_round == 1 else (1, 0)
                verdict = ("retry", "") if number_of_round == 1 else ("give_up", "given_up")
                writer.write(
                    Judged(
                        9000, prompt, epoch, number_of_round, shown, (0, 0), 0, 0, 0, *verdict, 2, sum(shown), 2, epoch
                    )
                )
    writer.close()
    run = read_run(tmp_path / "run")
    assert {key for key in visits if run.prompts[key].got_lost} == {"lost"}
    assert {key for key in visits if run.prompts[key].was_found} == {"found"}
    rows = parsed(tmp_path / "run").table("prompt", "seen in", "what")
    assert [row["what"] for row in rows if row["prompt"] == "lost"] == [
        "all right at version 0, none of 2 at version 1"
    ]


# -------------------------------------------------------------------------- intervals and headline


def test_interval_is_that_of_the_normal_approximation_for_many_prompts():
    rng = Random(1)
    values = [rng.gauss(0.2, 0.5) for _ in range(400)]
    mean = sum(values) / 400
    half = 1.96 * sqrt(sum((v - mean) ** 2 for v in values) / 400) / sqrt(400)
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(mean - half, abs=0.1 * half)
    assert high == pytest.approx(mean + half, abs=0.1 * half)


@given(st.floats(-1, 1), st.integers(2, 50))
def test_a_shift_that_all_prompts_share_is_certain(shift, n):
    """Paired: how much prompts differ from each other is no uncertainty of a difference."""
    low, high = bootstrap_interval([shift] * n)
    assert low == pytest.approx(shift)
    assert high == pytest.approx(shift)


def with_rates(folder: Path, rates: dict[str, float], n: int | None = None) -> Run:
    """A run whose last evaluation on held-out prompts has these rates."""
    lines = (folder / "rates.jsonl").read_text().splitlines()
    last = {"split": "heldout", "step": 10_000, "completions": 1200, "n": n, "rates": rates}
    (folder / "rates.jsonl").write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    return read_run(folder)


def test_headline_names_the_better_run_only_if_samples_can_tell(copied):
    a, b = copied("fixed", "ngu")
    hard = [f"h{i}" for i in range(160) if i % 8 >= 3]
    base = dict.fromkeys(hard, 0.5)
    for lead, is_clear in ((0.2, True), (0.0, False)):
        rng = Random(2)
        runs = [
            with_rates(a, base),
            with_rates(b, {key: 0.5 + lead + rng.choice((-0.3, 0.3)) for key in hard}),
        ]
        first, because = headline(Comparison(runs))
        assert first.startswith("ngu was better on hard prompts" if is_clear else "No difference on hard prompts")
        interval = re.search(r"95 % interval ([+−\d.]+) to ([+−\d.]+)", because[0])
        assert interval
        low, high = (number(text) for text in interval.groups())
        assert (low > 0) is is_clear
        assert low <= 100 * lead + 5
        assert high >= 100 * lead - 5


def test_headline_of_the_real_runs_says_what_was_spent(folders):
    runs = page.read_runs([folders["fixed"], folders["ngu"]])
    c = Comparison(runs)
    first, because = headline(c)
    words = " ".join(because)
    assert first.startswith("ngu was better on hard prompts")
    for i, run in enumerate(runs):
        assert f"{c.drawn(i, ('hard', 'extra_hard')):,} of {run.drawn:,}" in words
        assert f"{run.label} trained on {c.teaching(i, ['all']):,} such completions" in words


def test_runs_of_unequal_length_are_compared_at_the_budget_of_the_shorter(folders, tmp_path):
    write_run(tmp_path / "short", FixedK(k=4), n_completions=2000)
    c = Comparison(page.read_runs([folders["ngu"], tmp_path / "short"]))
    assert c.budget == 2000
    assert c.ends[0] is not None
    assert abs(c.ends[0].completions - 2000) < 600
    assert c.ends[0] is not c.runs[0].of("heldout")[-1]


def test_without_rates_prompt_by_prompt_there_is_no_interval_and_it_says_so(copied):
    runs = copied("fixed", "ngu")
    for run in runs:
        (run / "rates.jsonl").unlink()
        summary = summary_of(run)
        sizes = {"easy": 40, "medium": 20, "hard": 40, "extra_hard": 60}
        (run / "summary.json").write_text(json.dumps(summary | {"n_by_bucket": {"heldout": sizes}}))
    first, because = headline(Comparison(page.read_runs(runs)))
    assert re.match(r"(ngu|fixed) ended ahead on hard prompts: ", first)
    assert "how sure that is cannot be said" in because[0]
    rows = parsed(*runs).table("difficulty", "fixed, %", "ngu, %")
    assert all(row["95 % interval"] == "–" for row in rows)


def test_the_fine_curve_stands_where_the_buckets_are_from_and_not_on_its_own_start(copied):
    """Prompts that failed by chance at the start would all seem to gain; a probe of its own tells them apart."""
    (folder,) = copied("ngu")
    probe = {f"h{i}": i / 160 for i in range(160)}
    (folder / "buckets.json").write_text(
        json.dumps({"rates": probe, "buckets": dict.fromkeys(probe, "hard"), "source": "file"})
    )
    run = with_rates(folder, dict.fromkeys(probe, 0.75))
    curve = Comparison([run]).gains_by_rate(0, 4)
    assert [at for at, _ in curve] == pytest.approx([(40 * k + 19.5) / 160 for k in range(4)])
    start = run.of("heldout")[0].rates
    for k, (_, gain) in enumerate(curve):
        part = [f"h{i}" for i in range(40 * k, 40 * k + 40)]
        assert gain.mean == pytest.approx(sum(0.75 - start[key] for key in part) / 40)


# -------------------------------------------------------------------------- the page


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(short):
    text = page.to_html(page.build(page.read_runs([short / "fixed", short / "ngu"])))
    html = Parsed(text)
    assert html.wrong == []
    assert html.open == []
    assert "http" not in text
    assert not [value for name, value in html.attributes if name in ("src", "srcset", "data")]
    assert {value for name, value in html.attributes if name == "href" and not value.startswith("#")} == {"data:,"}
    ids = [value for name, value in html.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    sections = ["Who gained", "Pass rates", "Where the samples went", "What came back", "Retries", "Ages", "Idle",
                "What was solved and is not", "What the policy wrote", "Settings"]  # fmt: skip
    places = [html.text.index(f"{name}", html.text.index("By difficulty")) for name in sections]
    assert places == sorted(places)


def test_what_a_run_holds_is_text_and_never_markup(folders, short):
    plain = parsed(short / "ngu", short / "fixed")
    text = page.to_html(page.build(page.read_runs([folders["bad"], folders["fixed"]])))
    html = Parsed(text)
    assert html.wrong == []
    assert html.open == []
    assert html.tags["script"] == plain.tags["script"] == 2
    assert html.tags["img"] == 0
    assert not [value for name, value in html.attributes if name.startswith("on")]
    assert html.text.count(BAD_NAME) > 5
    data = text.split('id="data">')[1].split("</script>")[0]
    assert "<" not in data
    data = json.loads(data)
    assert any(prompt["id"] == BAD for prompt in data["runs"][0]["prompts"])
    assert BAD in data["words"]
    assert BAD in {row["prompt"] for row in html.table("prompt", "times given up")}


def test_texts_are_cut_so_that_the_page_stays_small(tmp_path):
    write_run(tmp_path / "run", n_completions=64)
    with (tmp_path / "run" / "samples.jsonl").open("w") as file:
        for i in range(64):
            file.write(
                json.dumps({"kind": "prompt", "prompt": f"p{i}", "text": "x" * 4000, "answer": "y" * 4000}) + "\n"
            )
            for request in range(100):
                row = {"kind": "sample", "prompt": f"p{i}", "epoch": request, "round": 1, "request": 100 * i + request,
                       "key": "k", "version": request, "finish": "stop", "n_tokens": 999, "reward": 0.0, "reason": "",
                       "text": f"{request} " + "z" * 1000, "t": 0.0}  # fmt: skip
                file.write(json.dumps(row) + "\n")
    run = read_run(tmp_path / "run")
    rounds = [round for sampled in run.samples.values() for round in sampled.rounds]
    assert sum(len(s.text) for round in rounds for s in round.samples) < 1.3 * MOST_TEXT
    assert all(len(sampled.rounds) + sampled.n_dropped == 100 for sampled in run.samples.values())
    assert len(page.to_html(page.build([run])).encode()) < 1_500_000


@given(st.integers(0, 500), st.integers(4, 60))
def test_rounds_are_dropped_from_the_middle(n, most):
    sampled = Sampled(rounds=[Round(i, i, 1, 0.0) for i in range(n)])
    sampled.thin(most)
    kept = [round.request for round in sampled.rounds]
    assert len(kept) + sampled.n_dropped == n
    assert len(kept) <= max(most, 0)
    assert kept == sorted(kept)
    assert len(kept) == n if n <= most else len(kept) > most / 3
    if n:
        assert kept[0] == 0
        assert kept[-most // 4 :][-1] == n - 1


FILES = ("config.json", "events.jsonl", "metrics.jsonl", "summary.json", "buckets.json", "rates.jsonl", "samples.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(copied, name):
    fixed, ngu = copied("fixed", "ngu")
    for run in (fixed, ngu):
        (run / name).unlink()
    html = parsed(fixed, ngu)
    assert html.wrong == []
    assert re.search(rf"fixed and ngu have no {re.escape(name)}: |ngu: no {re.escape(name)}", html.text)
    assert "Settings" in html.text


def test_a_run_that_has_only_begun(copied):
    (run,) = copied("ngu")
    for name in FILES:
        if name not in ("config.json", "events.jsonl"):
            (run / name).unlink()
    (run / "events.jsonl").write_text("")
    html = parsed(run)
    assert "Nothing has been evaluated" in html.text
    assert "No completion has been drawn yet" in html.text


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_run_that_was_killed_in_mid_write(copied, share):
    fixed, ngu = copied("fixed", "ngu")
    (ngu / "summary.json").unlink()
    for name in FILES:
        if name.endswith("l"):
            content = (ngu / name).read_bytes()
            cut = int(share * len(content))
            while content[cut - 1 : cut] == b"\n":
                cut -= 1
            (ngu / name).write_bytes(content[:cut])
    html = parsed(fixed, ngu)
    assert html.wrong == []
    assert "ngu: no summary.json, so in progress or killed" in html.text


def test_an_older_run_has_its_buckets_and_evaluations_from_its_checkpoint(copied):
    (run,) = copied("ngu")
    buckets = json.loads((run / "buckets.json").read_text())["buckets"]
    saved = {"evaluations": summary_of(run)["evaluations"], "buckets": buckets}
    for name in ("summary.json", "buckets.json", "rates.jsonl", "samples.jsonl"):
        (run / name).unlink()
    for step in ("step-000010", "step-000020", ".step-000030.new"):
        (run / "checkpoints" / step).mkdir(parents=True)
        (run / "checkpoints" / step / "run.json").write_text(json.dumps(saved))
    rows = parsed(run).table("difficulty", "ngu, %")
    assert {row["difficulty"] for row in rows} >= {"easy", "medium", "hard", "extra hard", "all"}


# -------------------------------------------------------------------------- the command


def test_command_writes_what_is_asked_for(short, tmp_path, capsys):
    out, markdown, pictures = tmp_path / "r.html", tmp_path / "r.md", tmp_path / "png"
    words = [
        str(short / "fixed"),
        str(short / "ngu"),
        "--out",
        str(out),
        "--md",
        str(markdown),
        "--png",
        str(pictures),
    ]
    assert page.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    text = markdown.read_text()
    assert text.splitlines()[0] == f"# {said[0]}"
    html = Parsed(out.read_text())
    for row in html.table("difficulty", "fixed, %", "ngu, %"):
        assert re.search(rf"\| \**{row['difficulty']}\** \| .*{re.escape(row['ngu, %'])}", text)
    figures = page.figures(page.build(page.read_runs([short / "fixed", short / "ngu"])))
    assert {path.stem for path in pictures.iterdir()} == {figure.name for figure in figures}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
    assert len(figures) == 9


def test_default_place_is_the_run_folder_for_one_run_and_here_for_several(copied, tmp_path, monkeypatch):
    fixed, ngu = copied("fixed", "ngu")
    monkeypatch.chdir(tmp_path)
    assert page.main([str(ngu)]) == 0
    assert (ngu / "report.html").is_file()
    assert page.main([str(ngu), str(fixed)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_runs_of_the_same_name_are_told_apart(short, tmp_path):
    shutil.copytree(short / "ngu", tmp_path / "seed-0" / "ngu")
    shutil.copytree(short / "ngu", tmp_path / "seed-1" / "ngu")
    runs = page.read_runs([tmp_path / "seed-0" / "ngu", tmp_path / "seed-1" / "ngu"])
    assert [run.label for run in runs] == ["seed-0/ngu", "seed-1/ngu"]
    assert headline(Comparison(runs))[0].startswith("No difference on hard prompts that these samples can tell")


def test_bad_input_is_refused_in_one_sentence(copied, tmp_path, capsys):
    def refused(*words: object) -> str:
        assert page.main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    (run,) = copied("ngu")
    assert "no folder" in refused(tmp_path / "nowhere")
    assert f"it contains runs: {run}" in refused(tmp_path)
    assert "given twice" in refused(run, run)
    assert "8 at most" in refused(*[run] * 9)
    for name, line in (("events.jsonl", 2), ("rates.jsonl", 1), ("samples.jsonl", 3), ("metrics.jsonl", 2)):
        whole = (run / name).read_text()
        lines = whole.splitlines()
        lines[line - 1] = '{"kind": "sample"'
        (run / name).write_text("\n".join(lines) + "\n")
        assert f"{name}, line {line}" in refused(run)
        (run / name).write_text(whole)
    (run / "buckets.json").write_text('{"buckets": {"p1": "hardest"}}')
    assert "'hardest' is no bucket" in refused(run)


# -------------------------------------------------------------------------- charts


@given(st.floats(-1, 1), st.floats(0, 1))
def test_difference_axis_holds_its_values_and_zero(low, size):
    axis = difference_axis(low, low + size, "")
    assert axis.low <= min(low, 0) + 1e-9
    assert axis.high >= max(low + size, 0) - 1e-9
    assert any(value == 0 for value, _ in axis.ticks)
    assert 2 <= len(axis.ticks) <= 8


@given(st.integers(0, 10**10))
def test_count_axis_has_a_few_round_ticks_within(high):
    axis = count_axis(high, "")
    values = [value for value, _ in axis.ticks]
    assert axis.high >= high
    assert 2 <= len(values) <= 6
    assert all(axis.low <= value <= axis.high for value in values)
    assert len({words for _, words in axis.ticks}) == len(values)


def test_points_stand_where_their_values_are_and_names_are_escaped():
    x = Axis(0, 1, [], "x", root=True)
    text = svg(Lines("<b>", x, Axis(0, 2, [], "y"), [Line("a & b", 0, [(0.0, 0.0), (0.25, 1.0), (1.0, 2.0)])]))
    assert "<b>" not in text
    assert "a &amp; b" in text
    points = re.search(r'<polyline class="line r0" points="([^"]+)"', text)
    assert points
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in points[1].split())
    assert x1 - x0 == pytest.approx((x2 - x0) / 2, abs=0.2)  # a quarter is half of the way on a square-root scale
    assert y0 - y1 == pytest.approx((y0 - y2) / 2, abs=0.2)


# -------------------------------------------------------------------------- in a browser

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
             "--disable-component-update --disable-sync").split()  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Any:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    if CHROMIUM is None:
        pytest.skip("needs the browser chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else errors.append(request.url)
    )
    tab.on("dialog", lambda dialog: (errors.append("a dialog"), dialog.dismiss()))
    tab.goto(path.as_uri())
    return tab, errors


@pytest.fixture(scope="module")
def written(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert page.main([str(folders["bad"]), str(folders["fixed"]), "--out", str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_page_opens_without_errors_and_never_scrolls_sideways(chromium, written, width, scheme):
    tab, errors = opened(chromium, written, width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.hacked") is None
    is_dark = "rgb(22, 23, 26)"
    paper = "getComputedStyle(document.body).backgroundColor"
    assert (tab.evaluate(paper) == is_dark) == (scheme == "dark")
    tab.click("#theme")
    assert (tab.evaluate(paper) == is_dark) == (scheme == "light")
    assert errors == []
    tab.close()


@pytest.mark.slow
def test_browser_of_texts_finds_prompts_and_shows_what_they_got(chromium, written, folders):
    tab, errors = opened(chromium, written, 1280, "light")
    rows = tab.locator("#browser-list button")
    bad, run = read_run(folders["bad"]), read_run(folders["fixed"])
    assert rows.count() == len(bad.samples) + len(run.samples)
    prompt = max(run.samples)
    tab.fill("#search", f"SOLVE {prompt}".upper())
    n = sum(f"solve {prompt}" in sampled.text for r in (bad, run) for sampled in r.samples.values())
    assert rows.count() == n
    tab.select_option("#which-run", "1")
    assert 1 <= rows.count() < n
    rows.first.click()
    detail = tab.locator("#browser-detail")
    visits = run.prompts[prompt]
    assert f"{visits.right} of {visits.tried} completions right" in detail.inner_text()
    n_shown = [int(text.split("×")[1]) if "×" in text else 1 for text in detail.locator(".reward").all_inner_texts()]
    assert sum(n_shown) == sum(len(round.samples) for round in run.samples[prompt].rounds)
    for bucket in BUCKETS:
        tab.select_option("#bucket", bucket)
        assert (rows.count() > 0) == (bucket == run.buckets[prompt])
    tab.select_option("#bucket", "")
    tab.fill("#search", "")
    tab.select_option("#which-run", "0")
    tab.select_option("#outcome", "given-up")
    given_up = [key for key in bad.samples if bad.prompts[key].given_up]
    assert rows.count() == len(given_up) > 0
    assert tab.evaluate("window.hacked") is None
    assert errors == []
    tab.close()


@pytest.mark.slow
def test_long_texts_open_on_demand(chromium, tmp_path):
    write_run(tmp_path / "run", n_completions=64, text="a long chain of thought, " * 100)
    assert page.main([str(tmp_path / "run")]) == 0
    tab, errors = opened(chromium, tmp_path / "run" / "report.html", 360, "light")
    text, more = tab.locator(".try pre").first, tab.locator(".try .more").first
    low = text.bounding_box()["height"]
    more.click()
    assert more.inner_text() == "show less"
    assert text.bounding_box()["height"] > 3 * low
    more.click()
    assert text.bounding_box()["height"] == low
    assert errors == []
    tab.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_words_are_explained_where_they_stand(chromium, written, width):
    tab, errors = opened(chromium, written, width, "dark")
    for word in ("contrast", "stale", "95 % interval"):  # in prose, and in the heads of tables that scroll
        tab.locator(".term", has_text=word).first.hover()
        tip = tab.locator("#tip")
        assert tip.inner_text() == GLOSSARY[word]
        box = tip.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 800
    tab.locator("h1").hover()
    assert tip.is_hidden()
    assert errors == []
    tab.close()


@pytest.mark.slow
def test_prompts_given_up_lead_to_their_texts_and_can_be_saved(chromium, written, folders, tmp_path):
    tab, errors = opened(chromium, written, 360, "light")
    link = tab.locator("td a", has_text=f"seven {BAD[:9]}")
    link.first.click()
    tab.locator("#browser-detail .note", has_text=f"seven {BAD[:9]}").wait_for()
    for kind in ("csv", "json"):
        with tab.expect_download() as download:
            tab.click(f"[data-export={kind}]")
        download.value.save_as(tmp_path / f"saved.{kind}")
    rows = json.loads((tmp_path / "saved.json").read_text())
    assert BAD in {row["prompt"] for row in rows}
    lines = (tmp_path / "saved.csv").read_text().replace(BAD.replace('"', '""'), "BAD").splitlines()
    assert len(lines) == 1 + len(rows)
    assert lines[0] == ",".join(rows[0])
    assert errors == []
    tab.close()
