"""Rows from files and data sets: what is read, where defects are told to be, and what is left out (case C39)."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from pathlib import Path

import pytest

from nevergiveup.loop import InPlace
from nevergiveup.tasks.gsm8k import load_rows
from nevergiveup.tasks.math import SPLITS, Gold, Math
from nevergiveup.tasks.own import Own
from nevergiveup.tasks.rows import Written, read_rows, text_of
from nevergiveup.types import Completion

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, kind: str) -> str:
    """The same rows in a file or folder of that kind; returns the source."""
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            path.write_text(lines(ROWS))
        case "json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines(ROWS).encode()))
        case "csv":
            path.write_text("question,answer\r\n" + "".join(f'"{r["question"]}",{r["answer"]}\r\n' for r in ROWS))
        case "parquet":
            import datasets

            datasets.Dataset.from_list(ROWS).to_parquet(path)
        case "saved":
            import datasets

            datasets.Dataset.from_list(ROWS).save_to_disk(path)
        case "splits":
            import datasets

            whole = datasets.Dataset.from_list(ROWS)
            datasets.DatasetDict({"train": whole, "test": whole.select(range(3))}).save_to_disk(path)
        case "folder":
            path.mkdir()
            (path / "train.jsonl").write_text(lines(ROWS))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "csv", "parquet", "saved", "splits", "folder"])
def test_every_kind_of_source_gives_the_same_prompts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    source = written(tmp_path, kind)
    prompts = load_rows(source).prompts
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in ROWS]
    reference = load_rows(written(tmp_path, "jsonl")).prompts
    assert [prompt.id for prompt in prompts] == [prompt.id for prompt in reference]
    if kind == "splits":
        assert len(read_rows(f"{source}:test")) == 3
        with pytest.raises(ValueError, match="cannot be loaded"):
            read_rows(f"{source}:dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", None, "there is no such file"),
        ("rows.txt", b"x", "what kind of file is it"),
        ("rows.parquet", b"PAR", "is no Parquet file"),
        ("rows.jsonl.gz", b"no gzip", "cannot be read"),
        ("rows.json", b'[{"question": "x",]', "line 1: broken JSON at column"),
        ("rows.csv", b'question,answer\n"x,4\n', "broken CSV"),
        ("rows.csv", b"question,answer\nx\n", "not the 2 columns of the first line"),
        ("rows.csv", b"question,answer\nx,4,5\n", "not the 2 columns of the first line"),
        ("no such name", None, "there is no such file, and it is no name of a Hugging Face data set"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        load_rows(path)
    assert name in str(refused.value)


def test_a_name_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"the data set nobody/nothing:test cannot be loaded: .*name/config:split"):
        read_rows("nobody/nothing:test")


def test_numbers_stay_as_they_were_written() -> None:
    (row,) = json.loads('[{"a": 0.10}]', parse_float=Written)
    assert text_of(row["a"]) == "0.10"
    assert row["a"] == 0.1
    assert type(pickle.loads(pickle.dumps(row["a"]))) is float
    assert [text_of(value) for value in (4, 2.5, "x", True, None, [1])] == ["4", "2.5", "x", None, None, None]


# ---- mathematics


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"question": "q", "answer": "work\n#### 1,234"}, Gold("1,234", True)),  # GSM8K
        (
            {"problem": "q", "solution": r"so \boxed{\frac12}", "answer": r"\frac{1}{2}"},
            Gold(r"\frac{1}{2}"),
        ),  # MATH-500
        ({"problem": "q", "solution": r"so \boxed{3}, or rather \boxed{\sqrt{2}}."}, Gold(r"\sqrt{2}")),  # MATH
        ({"problem": "q", "answer": r"-\frac{2}{3}", "solution": "..."}, Gold(r"-\frac{2}{3}")),  # DeepScaleR
        ({"ID": "2024-I-1", "problem": "q", "answer": 73}, Gold("73", True)),  # AIME
        ({"problem_idx": 1, "problem": "q", "answer": "2^{99}"}, Gold("2^{99}")),  # BRUMO, HMMT
        ({"problem": "q", "expected_answer": "$x+1$"}, Gold("x+1")),
        ({"prompt": [{"role": "user", "content": "q"}], "gold": 0.5}, Gold("0.5")),
    ],
)
def test_the_layouts_of_well_known_data_sets(tmp_path: Path, row: dict[str, object], gold: Gold) -> None:
    (tmp_path / "rows.jsonl").write_text(lines([row]))
    (prompt,) = Math(str(tmp_path / "rows.jsonl")).prompts("train")
    assert prompt.answer == gold
    assert prompt.messages[-1]["content"].startswith("q")


def test_where_all_answers_are_whole_numbers_a_numeral_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines([{"problem": f"q{i}", "answer": str(2**i)} for i in range(11)]))
    task = Math(str(tmp_path / "rows.jsonl"))
    prompt = task.prompts("train")[10]
    for text, reward in ((r"\boxed{1024}", 1), (r"\boxed{1{,}024}", 1), (r"\boxed{2^{10}}", 0), (r"\boxed{1023}", 0)):
        assert task.grade(prompt, Completion((), (), text, "stop", 0, 0)).reward == reward  # type: ignore[union-attr]


def validated(task: Math | Own) -> Math | Own:
    asyncio.run(task.validate(InPlace()))
    return task


def test_the_shipped_rows_can_all_be_verified() -> None:
    task = validated(Math())
    assert [len(task.prompts(split)) for split in SPLITS] == [779, 500]
    assert task.excluded == []
    train, test = ({p.messages[0]["content"] for p in task.prompts(split)} for split in SPLITS)
    assert not train & test
    for split in SPLITS:
        for prompt in task.prompts(split):
            stated = Completion((), (), rf"So it is \boxed{{{prompt.answer.text}}}.", "stop", 0, 0)
            assert task.grade(prompt, stated).reward == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", ["see solution", "n/a", "?", r"\frac{1}{", r"\frac{1}{0}", "9^{9^{9^{9}}}"])
def test_c39_answers_that_nothing_can_be_compared_with_are_listed_and_left_out(tmp_path: Path, bad: str) -> None:
    good = [{"problem": f"q{i}", "answer": rf"\frac{{{i}}}{{7}}"} for i in range(1, 20)]
    file = tmp_path / "rows.jsonl"
    for make in (Math, Own):
        file.write_text(lines([*good, {"problem": "x", "answer": bad}]))
        task = validated(make(str(file)))
        assert len(task.prompts("train")) == 19
        assert [(row.where, row.answer) for row in task.excluded] == [(f"{file}, line 20", bad)]
        file.write_text(lines([*good[1:], {"problem": "x", "answer": bad}]))
        with pytest.raises(ValueError, match=r"answers of 1 of 19 rows cannot be verified(?s:.*)line 19: the answer"):
            validated(make(str(file)))
        assert len(validated(make(str(file), allow_unverifiable=True)).prompts("train")) == 18


def test_c39_line_by_line(tmp_path: Path) -> None:
    """Each defective line is named; what is sound is taken as it is meant."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt":"2+2?"}\r\n{"prompt":"2+2?","answer":""}\r\n{"prompt":"2+2?","answer":null}\r\n'
        b'{"prompt":"","answer":"4"}\r\n{"prompt":"y","answer":"5"}\r\n{"prompt":"x","answer":4}\r\n{"prompt": broken\r\n'
        b'{"prompt":[{"role":"user","content":"2+2?"}],"answer":"4"}\r\n'
    )
    with pytest.raises(ValueError, match="5 of 8 rows cannot be used") as refused:
        Math(str(file)).prompts("train")
    told = str(refused.value).splitlines()[1:]
    assert [line.strip().partition(":")[0] for line in told] == ["line 1", "line 2", "line 3", "line 4", "line 7"]
    for line, words in zip(
        told, ("no answer", "empty answer", "empty answer", "empty prompt", "column 12"), strict=True
    ):
        assert words in line
