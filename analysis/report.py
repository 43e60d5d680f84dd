"""`python -m analysis.report`: one self-contained HTML page of all figures, their numbers, statuses and environments.

The page has no time stamp and no outside reference; the same rows make the same page. It goes to `.sonic/report.html`
by default, which git ignores.
"""

from __future__ import annotations

import argparse
import base64
import errno
import html
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import figures, load, paper
from sonic.record import EXPECTED, RecordError
from sonic.say import say

DEFAULT_OUT = load.RESULTS.parent / ".sonic" / "report.html"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }}
h2 {{ font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #d8dee4; padding-top: 1rem; }}
img {{ max-width: 100%; border: 1px solid #d8dee4; border-radius: 4px; }}
.claim {{ color: #57606a; }}
.scroll {{ overflow: auto; max-height: 32rem; border: 1px solid #d8dee4; border-radius: 4px; margin: .6rem 0; }}
table {{ border-collapse: collapse; font-size: 12.5px; width: 100%; }}
th {{ background: #f6f8fa; position: sticky; top: 0; text-align: right; padding: 4px 9px; white-space: nowrap; }}
td {{ text-align: right; padding: 3px 9px; border-top: 1px solid #eaeef2; font-variant-numeric: tabular-nums; }}
summary {{ cursor: pointer; }} nav a {{ margin-right: 1rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Figures, numbers and environments from the measured rows in <code>{folder}</code>.
The paper is SonicMoE, arXiv 2512.14080.</p>
<nav>{nav}</nav>
{body}
</body>
</html>
"""


def render(
    results: Path = load.RESULTS, gpu: str | None = None, method: int | None = None, clock: load.Clock = "auto"
) -> str:
    """The page as text. SelectionError when rows would be mixed, RecordError when a file cannot be read."""
    sections: list[tuple[str, str, str]] = []
    pending = []
    env_ids: set[str] = set()
    for figure_id in figures.discover():
        try:
            drawn = figures.build(figure_id, results, gpu, method, clock)
        except figures.NotDrawn as error:
            pending.append((figure_id, str(error)))
            continue
        env_ids |= set(drawn.data.env_id)
        sections.append((drawn.id, f"{drawn.title} ({drawn.gpu})", _figure(drawn)))
    everything, faults = load.rows(results, gpu=gpu, method=method, clock=clock)
    sections.append(("statuses", "Statuses", _statuses(everything)))
    sections.append(("environments", "Environments", _environments(results, env_ids)))
    sections.append(("paper", "The paper's headline claims", _table(paper.headline())))
    rest = [f"<li><b>{html.escape(name)}</b>: {_code(text)}</li>" for name, text in pending]
    rest += [
        f"<li>{html.escape(f'{fault.path.name}:{fault.line_number}: left out, {fault.reason}')}</li>"
        for fault in faults
    ]
    if rest:
        sections.append(("missing", "Not drawn, and lines left out", f"<ul>{''.join(rest)}</ul>"))
    nav = "".join(f'<a href="#{name}">{html.escape(name)}</a>' for name, _, _ in sections)
    body = "\n".join(f'<h2 id="{name}">{html.escape(title)}</h2>\n{content}' for name, title, content in sections)
    return _PAGE.format(title="sonic: measured MoE layers", folder=html.escape(results.name), nav=nav, body=body)


def _figure(drawn: figures.Drawn) -> str:
    picture = base64.b64encode(figures.png(drawn.figure, dpi=150)).decode()
    claim = "\n".join(f'<p class="claim">{_code(text)}</p>' for text in drawn.claim.split("\n\n"))
    return (
        f"{claim}\n"
        f'<img alt="{html.escape(drawn.title)}" src="data:image/png;base64,{picture}">\n'
        f"<details><summary>{len(drawn.table)} lines of numbers, sweep {html.escape(drawn.sweep)}</summary>"
        f"{_table(drawn.table)}</details>"
    )


def _statuses(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "<p>No rows.</p>"
    counts = rows.groupby(["sweep", "gpu", "impl", "status"]).size().unstack(fill_value=0).reset_index()
    bad = rows[~rows.status.isin(EXPECTED)]
    text = _table(counts)
    if len(bad):
        columns = ["sweep", "gpu", "impl", "op", "mode", "T", "d", "n", "E", "K", "status", "reason"]
        text += "<p>Rows that must not be:</p>" + _table(bad[columns])
    return text


def _environments(results: Path, env_ids: set[str]) -> str:
    table = load.environments(results, env_ids)
    if table.empty:
        return "<p>No environment is recorded for these rows.</p>"
    # One column per environment: there are many fields and few environments.
    turned = table.set_index("env_id").T.dropna(how="all").reset_index(names="field")
    return _table(turned)


def _table(table: pd.DataFrame) -> str:
    return f'<div class="scroll">{table.map(figures.cell).to_html(index=False, border=0)}</div>'


def _code(text: str) -> str:
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page; 0 when it is written, 2 for a wrong choice or where it cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=(__doc__ or "").splitlines()[0])
    figures.add_options(parser)
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="the page (default: .sonic/report.html)"
    )
    options = parser.parse_args(argv)
    figures.check_choice(parser, options)
    try:
        if options.out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        figures.try_folder(options.out.parent)
    except OSError as error:
        parser.error(_unwritable(options.out, error))
    try:
        page = render(options.results, options.gpu, options.method, options.clock)
    except (load.SelectionError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        options.out.write_text(page, encoding="utf-8")
    except OSError as error:
        print(_unwritable(options.out, error), file=sys.stderr)
        return 2
    say(f"wrote {options.out}")
    return 0


def _unwritable(page: Path, error: OSError) -> str:
    return f"--out must be a file that can be written, and {page} is none: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main())
