"""The report of one run or several: one HTML file that needs nothing else; Markdown and PNG on demand. Layer 3.

Standard library only (PNG: matplotlib). What comes from a run, such as texts of completions, ids and reasons, is data: it is
escaped in HTML and reaches the script as JSON, which puts it on the page as text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nevergiveup.evaluate import BUCKETS
from nevergiveup.report.charts import Figure, svg, swatch
from nevergiveup.report.glossary import GLOSSARY
from nevergiveup.report.runs import Run, Sample, Sampled, Visits, read_run
from nevergiveup.report.sections import Block, Prose, Report, Special, Table, build, given_up_list

MOST_RUNS = 8
"""There are as many colours."""
MOST_EXPORTED = 5_000
"""Prompts given up that the page carries; --given-up writes all."""

OUTCOMES = (
    ("never-right", "never right"),
    ("given-up", "given up at least once"),
    ("all-right", "all right at the last visit"),
    ("lost", "was solved and is not"),
)


def main(words: list[str]) -> int:
    """Writes the report that the command line asks for; returns the exit status: 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="ngu report",
        description="One HTML page about a run, or about several side by side: which was better on hard prompts, and why.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, finished or not")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="default: RUN/report.html; ./report.html for several runs"
    )
    parser.add_argument("--md", type=Path, metavar="FILE.md", help="headline and tables as Markdown, too")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="the charts as PNG files, too")
    parser.add_argument(
        "--given-up",
        type=Path,
        metavar="FILE.jsonl",
        help="prompts that were given up, one a line: bad labels collect there",
    )
    options = parser.parse_args(words)
    try:
        report = build(read_runs(options.runs))
        out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
        text = to_html(report)
        _write(out, text)
        print(report.headline)
        print(f"{out} ({len(text.encode()) / 1e6:.1f} MB)")
        if options.md:
            _write(options.md, to_markdown(report))
            print(options.md)
        if options.given_up:
            rows = given_up_list(report.runs)
            _write(options.given_up, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            print(f"{options.given_up} ({len(rows):,} prompts)")
        if options.png:
            from nevergiveup.report.plots import draw

            options.png.mkdir(parents=True, exist_ok=True)
            for figure in figures(report):
                draw(figure, [run.label for run in report.runs], options.png / f"{figure.name}.png")
            print(f"{options.png} ({len(figures(report))} pictures)")
    except ValueError as error:
        print(f"ngu report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"ngu report: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, with labels that tell them apart. Raises ValueError."""
    if len(folders) > MOST_RUNS:
        raise ValueError(f"{len(folders)} runs are too many to tell apart by colour: give {MOST_RUNS} at most")
    whole = [folder.resolve() for folder in folders]
    twice = next((folder for i, folder in enumerate(whole) if folder in whole[:i]), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: a run cannot be compared with itself")
    runs = [read_run(folder) for folder in folders]
    depth = 1
    while len({tuple(folder.parts[-depth:]) for folder in whole}) < len(whole):
        depth += 1
    for run, folder in zip(runs, whole, strict=True):
        run.label = "/".join(folder.parts[-depth:])
    return runs


def figures(report: Report) -> list[Figure]:
    return [block for section in report.sections for block in section.blocks if isinstance(block, Figure)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# -------------------------------------------------------------------------- HTML


def to_html(report: Report) -> str:
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = "ngu report: " + ", ".join(run.label for run in report.runs)
    nav = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in report.sections)
    explained: set[str] = set()  # in the head; every section explains what else it says
    head = _head(report, explained)
    sections = "\n".join(
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>\n'
        + "\n".join(_Blocks(report, explained).html(section.blocks))
        + "</section>"
        for section in report.sections
    )
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in GLOSSARY.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<svg class="defs" aria-hidden="true"><defs>{_patterns()}</defs></svg>
<header>
<div class="top"><span>nevergiveup report</span><button id="theme" type="button" title="light or dark">Dark</button></div>
{head}<nav>{nav}<a href="#glossary">Glossary</a></nav>
</header>
<main>
{sections}
<section id="glossary"><h2>Glossary</h2><details><summary>Words that are used here</summary><dl>{terms}</dl></details></section>
<footer>Made by ngu report from the files of the runs. pass@1 is in percent, differences are in percentage points, intervals
cover 95 %.</footer>
</main>
<script type="application/json" id="data">{_data(report)}</script>
<script>
{script}</script>
</body>
</html>
"""


def _run_item(i: int, run: Run) -> str:
    facts = [
        run.strategy and f"strategy {run.strategy}",
        f"{run.drawn:,} completions",
        f"{run.steps:,} steps",
        "" if run.summary else "in progress, or killed",
        str(run.summary.get("reason", "")) if run.summary and run.summary.get("stopped") else "",
    ]
    return (
        f'<li class="r{i}">{swatch(i, "solid")}<span><b>{escape(run.label)}</b> '
        f"<small>{escape(', '.join(filter(None, facts)))}</small></span></li>"
    )


def _head(report: Report, explained: set[str]) -> str:
    def paragraphs(sentences: Sequence[str]) -> str:
        return "".join(f"<p>{gloss(sentence, explained)}</p>" for sentence in sentences)

    caveats = f'<div class="caveats">{paragraphs(report.caveats)}</div>\n' if report.caveats else ""
    return (
        f"<h1>{escape(report.headline)}</h1>\n"
        f'<ul class="runs">{"".join(_run_item(i, run) for i, run in enumerate(report.runs))}</ul>\n'
        f'<div class="because">{paragraphs(report.because)}</div>\n{caveats}'
    )


def _patterns() -> str:
    """Hatched and dotted, in the colour of each run and of the text."""
    return "".join(
        f'<pattern id="hatch-{name}" class="{kind}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V5"/></pattern>'
        f'<pattern id="dots-{name}" class="{kind}" width="5" height="5" patternUnits="userSpaceOnUse">'
        f'<circle cx="2" cy="2" r="1"/></pattern>'
        for name, kind in [*((str(i), f"r{i}") for i in range(MOST_RUNS)), ("ink", "ink")]
    )


class _Blocks:
    """Renders the blocks of one section; each word of the glossary is explained once in it, unless it was before."""

    def __init__(self, report: Report, explained: set[str]) -> None:
        self._report = report
        self._explained = set(explained)

    def html(self, blocks: Sequence[Block]) -> list[str]:
        return [self._one(block) for block in blocks]

    def _one(self, block: Block) -> str:
        match block:
            case Prose():
                kind = ' class="note"' if block.is_note else ""
                return f"<p{kind}>{gloss(block.text, self._explained)}</p>"
            case Table():
                return self._table(block)
            case Figure():
                charts = "".join(f"<div>{svg(chart)}</div>" for chart in block.charts)
                items = "".join(f"<li>{swatch(run, texture)}{escape(name)}</li>" for name, run, texture in block.legend)
                return (
                    f'<figure id="figure-{block.name}"><ul class="legend">{items}</ul>'
                    f'<div class="charts n{len(block.charts)}">{charts}</div>'
                    f"<figcaption>{gloss(block.caption, self._explained)}</figcaption></figure>"
                )
            case Special("exports"):
                return (
                    '<div class="tools"><button type="button" data-export="csv">Download as CSV</button>'
                    '<button type="button" data-export="json">Download as JSON</button></div>'
                )
        return _browser(self._report)

    def _table(self, table: Table) -> str:
        head = "".join(
            f'<th scope="col" class="{"word" if i < table.n_words else "figure"}{"" if run is None else f" r{run}"}">'
            f"{gloss(name, self._explained) if run is None else escape(name)}</th>"
            for i, (name, run) in enumerate(table.header)
        )
        rows = []
        for i, row in enumerate(table.rows):
            cells = []
            for j, cell in enumerate(row):
                text = escape(cell)
                if j == 0 and i in table.links:
                    run, prompt_id = table.links[i]
                    text = f'<a href="#prompt/{run}/{escape(quote(prompt_id, safe=""))}">{text}</a>'
                cells.append(f"<td{' class=word' if j < table.n_words else ''}>{text}</td>")
            rows.append(f"<tr{' class=strong' if i in table.strong else ''}>{''.join(cells)}</tr>")
        long = " long" if len(table.rows) > 20 else ""
        return (
            f'<p class="caption">{gloss(table.caption, self._explained)}</p><div class="wide{long}" tabindex="0"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


_TERMS = re.compile(
    r"(?<![\w@-])("
    + "|".join(re.escape(escape(term)) for term in sorted(GLOSSARY, key=len, reverse=True))
    + r")(?![\w-])"
)


def gloss(text: str, explained: set[str]) -> str:
    """Escapes text, and puts the meaning of each word of the glossary to where it stands first; `explained` grows."""

    def explain(match: re.Match[str]) -> str:
        term = match[1]
        if term in explained:
            return term
        explained.add(term)
        return f'<span class="term" tabindex="0" data-tip="{escape(GLOSSARY[term])}">{term}</span>'

    return _TERMS.sub(explain, escape(text))


def _browser(report: Report) -> str:
    def options(pairs: Sequence[tuple[str, str]]) -> str:
        return "".join(f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in pairs)

    buckets = options([(name, name.replace("_", " ")) for name in BUCKETS])
    runs = options([(str(i), run.label) for i, run in enumerate(report.runs)])
    hidden = "" if len(report.runs) > 1 else " hidden"
    return (
        '<div class="tools"><input id="search" type="search" placeholder="search prompts" aria-label="search prompts">'
        f'<select id="bucket" aria-label="difficulty"><option value="">every difficulty</option>{buckets}</select>'
        f'<select id="outcome" aria-label="outcome"><option value="">every outcome</option>{options(OUTCOMES)}</select>'
        f'<select id="which-run" aria-label="run"{hidden}><option value="">every run</option>{runs}</select></div>'
        '<p class="note" id="n-shown"></p>'
        '<div class="browser"><div class="list" id="browser-list"></div><div id="browser-detail"></div></div>'
    )


def _data(report: Report) -> str:
    """What the script needs, as JSON that no text in it can end early. Each string stands once, in `words`."""
    words: dict[str, int] = {}

    def index(text: str) -> int:
        return words.setdefault(text, len(words))

    def sample(s: Sample) -> list[Any]:
        advantage = None if s.advantage is None else round(s.advantage, 4)
        return [s.reward, index(s.reason), s.version, int(s.is_cut), s.n_tokens, index(s.text), advantage, s.step]

    def prompt(run: Run, prompt_id: str, sampled: Sampled) -> dict[str, Any]:
        visits = run.prompts.get(prompt_id, Visits())
        outcomes = {
            "never-right": visits.right == 0,
            "given-up": visits.given_up > 0,
            "all-right": visits.is_all_right,
            "lost": visits.got_lost,
        }
        return {
            "id": prompt_id,
            "text": sampled.text,
            "answer": sampled.answer,
            "bucket": run.buckets.get(prompt_id, ""),
            "outcomes": [name for name, holds in outcomes.items() if holds],
            "visits": visits.visits,
            "tried": visits.tried,
            "right": visits.right,
            "given_up": visits.given_up,
            "dropped": sampled.n_dropped,
            "rounds": [[r.visit, r.number, round(r.t, 1), [sample(s) for s in r.samples]] for r in sampled.rounds],
        }

    runs = [
        {"label": run.label, "prompts": [prompt(run, key, sampled) for key, sampled in run.samples.items()]}
        for run in report.runs
    ]
    row = {"runs": runs, "given_up": given_up_list(report.runs)[:MOST_EXPORTED], "words": list(words)}
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# -------------------------------------------------------------------------- Markdown


def to_markdown(report: Report) -> str:
    """Headline and tables. Figures are pictures and stay out; --png draws them."""
    parts = [f"# {_plain(report.headline)}", *map(_plain, report.because)]
    if report.caveats:
        parts.append("\n".join(f"> {_plain(sentence)}" for sentence in report.caveats))
    for section in report.sections:
        blocks = [_block_in_markdown(block) for block in section.blocks if isinstance(block, Prose | Table)]
        if any(isinstance(block, Table) for block in section.blocks):
            parts += [f"## {section.title}", *blocks]
    return "\n\n".join(parts) + "\n"


def _block_in_markdown(block: Prose | Table) -> str:
    if isinstance(block, Prose):
        return _plain(block.text)
    lines = [
        "| " + " | ".join(_plain(name) for name, _ in block.header) + " |",
        "|" + "|".join(" --- " if i < block.n_words else " ---: " for i in range(len(block.header))) + "|",
    ]
    for i, row in enumerate(block.rows):
        cells = [f"**{_plain(cell)}**" if i in block.strong else _plain(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{_plain(block.caption)}"


def _plain(text: str) -> str:
    """Text that means nothing to Markdown."""
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
