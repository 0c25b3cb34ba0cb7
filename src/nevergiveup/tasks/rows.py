"""Rows of a data set, from a file or a Hugging Face name, and the prompts made of them. Layer 3.

    read_rows(source)        rows with the place at which each stands: JSON Lines, JSON, CSV, Parquet, or a data set by name
    make_prompts(rows, ...)  prompts with stable ids; every defective row is named, nothing is skipped in silence

Standard library only, except that Parquet files and data set names are read by the package `datasets`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from nevergiveup.types import Excluded, Message, Prompt

QUESTION_KEYS = ("question", "prompt", "problem", "messages")
ANSWER_KEYS = ("answer", "solution", "gold", "expected_answer")

ROLES = ("system", "developer", "user", "assistant", "tool")

MOST_SHOWN = 10
"""Defective rows that an error lists."""

MOST_EXCLUDED = 0.05
"""Share of rows without a verifiable answer above which the data are not used, unless that is allowed."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

Chat: TypeAlias = tuple[Message, ...]


class Written(float):
    """A number of a JSON file that is no whole number, with its spelling: 0.10 stays "0.10" where it is an answer."""

    text: str

    def __new__(cls, text: str) -> Written:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


@dataclass(frozen=True, slots=True)
class Row:
    """values: column -> value. defect: why the row could not be read at all; empty for all others."""

    source: str
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    defect: str = ""

    @property
    def where(self) -> str:
        return f"{self.source}, {self.place}"


class Unverifiable(ValueError):
    """The row is well formed, but nothing could be compared with its answer: it is left out and counted."""


# ------------------------------------------------------------------------------------------------ reading


def read_rows(source: str) -> list[Row]:
    """The rows of a file (.jsonl, .json, .csv, each also .gz, or .parquet), a folder, or a Hugging Face data set given as
    name, name:split or name/config:split (split "train" by default).

    UTF-8; a byte order mark, CRLF and empty lines do no harm. A line of JSON that is no object comes back as a row with its
    defect. Raises ValueError for what cannot be read at all, naming the file and the place.
    """
    path = Path(source)
    name = path.name.removesuffix(".gz")
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    if suffix and not path.is_file():
        raise ValueError(f"{source}: there is no such file")
    if suffix == ".parquet":
        return _parquet(path)
    if suffix:
        return parse_rows(_bytes(path), source, suffix)
    if path.is_file():
        raise ValueError(f"{source}: what kind of file is it? Name it {', '.join(SUFFIXES)}, or .gz behind those")
    return _data_set(source)


def parse_rows(data: bytes, source: str, suffix: str = ".jsonl") -> list[Row]:
    """The rows in the bytes of a file of that suffix (.jsonl, .json, .csv). source: the name that messages give."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source}, line {line}: not UTF-8 text; save the file in UTF-8") from None
    if suffix == ".csv":
        return _csv(text, source)
    if suffix == ".json" and text.lstrip().startswith("["):
        return _json_list(text, source)
    # Not splitlines: texts may hold other line separators.
    lines = enumerate(text.split("\n"), start=1)
    return [_json_row(line, source, f"line {n}") for n, line in lines if line.strip()]


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _constant(name: str) -> str:
    return name  # NaN and Infinity are no JSON; as a text they are no number either


def _json_row(line: str, source: str, place: str) -> Row:
    try:
        values = json.loads(line, parse_float=Written, parse_constant=_constant)
    except json.JSONDecodeError as error:
        return Row(source, place, defect=f"broken JSON at column {error.colno}: {error.msg}")
    except (RecursionError, ValueError) as error:  # nested too deeply, a whole number of thousands of digits
        return Row(source, place, defect=f"JSON that cannot be read: {error}")
    return _row(values, source, place)


def _json_list(text: str, source: str) -> list[Row]:
    try:
        values = json.loads(text, parse_float=Written, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {error.lineno}: broken JSON at column {error.colno}: {error.msg}") from None
    return [_row(value, source, f"row {n}") for n, value in enumerate(values, start=1)]


def _row(values: Any, source: str, place: str) -> Row:
    if not isinstance(values, dict):
        return Row(source, place, defect='not a JSON object; write {"question": ..., "answer": ...}')
    return Row(source, place, values)


def _csv(text: str, source: str) -> list[Row]:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for values in reader:
            place = f"line {reader.line_num}"
            if None in values or None in values.values():
                n = len(reader.fieldnames or ())
                rows.append(Row(source, place, defect=f"not the {n} columns of the first line"))
            else:
                rows.append(Row(source, place, dict(values)))
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num}: broken CSV: {error}") from None
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from None
    return [Row(str(path), f"row {n}", values) for n, values in enumerate(rows, start=1)]


def _data_set(source: str) -> list[Row]:
    import datasets

    name, _, split = source.partition(":")
    split = split or "train"
    is_folder = Path(name).is_dir()
    if not is_folder and not re.fullmatch(r"[\w.-]+(/[\w.-]+){0,2}", name):
        raise ValueError(f"{source}: there is no such file, and it is no name of a Hugging Face data set")
    parts = name.split("/")
    config = parts.pop() if not is_folder and len(parts) == 3 else None
    try:
        if is_folder and (Path(name) / "dataset_dict.json").is_file():
            found: Any = datasets.load_from_disk(name)[split]
        elif is_folder and (Path(name) / "state.json").is_file():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name if is_folder else "/".join(parts), config, split=split)
    # The library lets through whatever its parts raise: no connection, no such name, no such split, a broken file.
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the data set {source} cannot be loaded: {first_line or type(error).__name__}. Give a file, a folder, or a "
            "Hugging Face name as name, name:split or name/config:split"
        ) from None
    return [Row(source, f"row {n}", values) for n, values in enumerate(found, start=1)]


# ------------------------------------------------------------------------------------------------ prompts


class Made(NamedTuple):
    """where: prompt id -> the row it comes from."""

    prompts: list[Prompt]
    excluded: list[Excluded]
    where: dict[str, str]


def make_prompts(
    rows: Sequence[Row],
    source: str,
    make: Callable[[Row], tuple[Chat, Any]],
    *,
    allow_unverifiable: bool = False,
) -> Made:
    """Prompts from what `make` says of each row (its chat and its answer), and the rows that are left out.

    The id is a hash of both; a row that repeats an earlier one gets its place on top. `make` raises ValueError for a defect,
    which ends in one error with all of them (the first ten listed), and Unverifiable for an answer that nothing could be
    compared with: such rows are left out, as long as they are not more than MOST_EXCLUDED of all or `allow_unverifiable`.
    """
    prompts: list[Prompt] = []
    defects: list[str] = []
    excluded: list[Excluded] = []
    where: dict[str, str] = {}
    for row in rows:
        try:
            if row.defect:
                raise ValueError(row.defect)
            messages, answer = make(row)
        except Unverifiable as error:
            excluded.append(Excluded(row.where, *error.args))
            continue
        except ValueError as error:
            defects.append(f"{row.place}: {error}")
            continue
        content = json.dumps([messages, answer], ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
        row_id = hashlib.sha256(content).hexdigest()[:16]
        if row_id in where:
            row_id = f"{row_id}-{row.place.rpartition(' ')[2]}"
        where[row_id] = row.where
        prompts.append(Prompt(id=row_id, messages=messages, answer=answer))
    if defects:
        raise ValueError(f"{source}: {len(defects)} of {len(rows)} rows cannot be used:{_listed(defects)}")
    if not rows:
        raise ValueError(f"{source} has no rows; write one JSON object a line, with a question and an answer")
    check_excluded(excluded, len(rows), source, allow_unverifiable)
    return Made(prompts, excluded, where)


def check_excluded(excluded: Sequence[Excluded], n_rows: int, source: str, allow_unverifiable: bool) -> None:
    """Raises ValueError when too many rows, or all of them, would be left out."""
    n = len(excluded)
    if n == n_rows or (n > MOST_EXCLUDED * n_rows and not allow_unverifiable):
        places = [f"{row.where.rpartition(', ')[2]}: the answer {row.answer!r}: {row.reason}" for row in excluded]
        remedy = "" if n == n_rows else "; correct them, or leave them out with task.allow_unverifiable = true"
        raise ValueError(f"{source}: the answers of {n} of {n_rows} rows cannot be verified{remedy}:{_listed(places)}")


def _listed(lines: Sequence[str]) -> str:
    more = f"\n  and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
    return "".join(f"\n  {line}" for line in lines[:MOST_SHOWN]) + more


def value_of(row: Row, keys: Iterable[str], what: str) -> Any:
    """The value under the first of `keys` that the row has. Raises ValueError when it has none, or it is empty."""
    for key in keys:
        if key in row.values:
            value = row.values[key]
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                raise ValueError(f"empty {key}")
            return value
    raise ValueError(f"no {what} (looked for {', '.join(keys)})")


def text_of(value: Any) -> str | None:
    """An answer as text: a text as it is, a number as it was written; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Written):
        return value.text
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def chat_of(question: Any, wrap: Callable[[str], Chat]) -> Chat:
    """A text as the chat that `wrap` makes of it; a list of chat messages as it is. Raises ValueError for anything else."""
    if isinstance(question, str):
        return wrap(question.strip())
    if not isinstance(question, list | tuple):
        raise ValueError(f"the question {question!r} is neither a text nor a list of chat messages")
    messages = tuple(_messages(question))
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: the policy would have to answer itself; leave it out")
    return messages


def _messages(question: Iterable[Any]) -> Iterator[Message]:
    for message in question:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f'the message {message!r} is not {{"role": text, "content": text}}')
        if message["role"] not in ROLES:
            raise ValueError(f"the role {message['role']!r} is none of {', '.join(ROLES)}")
        yield {"role": message["role"], "content": message["content"]}
