"""A report as one HTML page with plots; it loads nothing, so it can be kept and mailed."""

import json
from html import escape
from typing import Any

from disconnect_watch.stress.report import Report
from disconnect_watch.stress.svg import Line, bars, lines

__all__ = ["as_html"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fff; --faint: #d8dde6;
  --good: #1a7f4b; --bad: #c0392b; --left: #b7791f; --cool: #2563eb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8f0; --paper: #14181f; --faint: #343c49;
  --good: #4ade80; --bad: #f87171; --left: #fbbf24; --cool: #60a5fa; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h1 small { font-weight: normal; }
.verdict { font-size: 1.1rem; padding: .6rem 1rem; border-left: .4rem solid var(--left); }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
table { border-collapse: collapse; margin: 1rem 0; } td, th { text-align: left;
  padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 1rem; } figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; }
.grid { stroke: var(--faint); } .tick, .name { fill: var(--ink); font-size: 12px; }
.line { fill: none; stroke-width: 2; } .line.answered { stroke: var(--good); }
.line.left { stroke: var(--left); } .line.failed { stroke: var(--bad); }
.line.first { stroke: var(--cool); } .line.whole { stroke: var(--good); }
.bar { fill: var(--left); } .bar.effect { fill: var(--cool); }
.key { font-weight: normal; margin-left: .8rem; } .key::before { content: "\\25A0 "; }
.key.answered::before, .key.whole::before { color: var(--good); }
.key.left::before { color: var(--left); } .key.failed::before { color: var(--bad); }
.key.first::before { color: var(--cool); }
.good { color: var(--good); } .bad { color: var(--bad); } p.verdict { color: var(--ink); }
"""


def as_html(report: Report) -> str:
    """The page."""
    told = report.as_dict()
    kind = {True: "good", False: "bad", None: ""}[report.cancels]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.target)}: stress</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(report.target)} <small>{report.counts.num_sent:,} of "
        f"{report.counts.num_planned:,} clients in {report.seconds:.1f} s, seed {report.seed}"
        f"{' (interrupted)' * report.is_interrupted}</small></h1>"
        f'<p class="verdict {kind}">{escape(report.verdict)}</p>'
        f"<p>{escape(report.counts.equation)}</p>"
        f"{_checks(told)}{_latencies(told)}{_errors(told)}"
        f'<div class="plots">{"".join(_plots(told))}</div>'
        f"<details><summary>All of it as JSON</summary><pre>{escape(json.dumps(told, indent=1))}"
        "</pre></details></body></html>\n"
    )


def _checks(told: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="{"good" if check["holds"] else "bad"}">'
        f"{'ok' if check['holds'] else 'FAIL'}</td><td>{escape(check['name'])}</td>"
        f"<td>{escape(check['detail'])}</td></tr>"
        for check in told["checks"]
    )
    return f"<table><tr><th></th><th>check</th><th>seen</th></tr>{rows}</table>"


def _latencies(told: dict[str, Any]) -> str:
    found = told["latency_ms"]
    if not found["whole"]:
        return ""
    head = "".join(f"<th>{name}</th>" for name in found["whole"])
    rows = "".join(
        f"<tr><td>{said}</td>"
        + "".join(f'<td class="number">{value:,.1f}</td>' for value in found[name].values())
        + "</tr>"
        for name, said in (("first", "to the first piece, ms"), ("whole", "to the whole, ms"))
    )
    return f"<table><tr><th>who stayed waited</th>{head}</tr>{rows}</table>"


def _errors(told: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="number">{count:,}</td><td>{escape(error)}</td></tr>'
        for error, count in told["errors"].items()
    )
    return f"<table><tr><th>failed</th><th>why</th></tr>{rows}</table>" if rows else ""


def _plots(told: dict[str, Any]) -> list[str]:
    plots = []
    seconds = told["by_second"]
    if len(seconds) > 1:
        by_outcome = [
            Line(name, name, [(at, second[name]) for at, second in enumerate(seconds)])
            for name in ("answered", "left", "failed")
        ]
        plots.append(
            lines("Clients that ended", by_outcome, x_name="second", y_name="clients a second")
        )
    curve = told["curve_ms"]
    if curve["whole"]:
        waited = [
            Line(
                name,
                kind,
                list(zip(curve["percentiles"], curve[kind], strict=True)),
            )
            for name, kind in (("first piece", "first"), ("whole answer", "whole"))
        ]
        plots.append(lines("Who stayed waited", waited, x_name="percentile", y_name="ms"))
    for title, name in (("Left by", "ways"), ("Left at", "points")):
        if told[name]:
            plots.append(bars(title, told[name], kind="left"))
    if (effect := told["effect"]) is not None:
        times = {"alone": effect["alone_ms"], f"beside {effect['others']}": effect["beside_ms"]}
        times["once they have left"] = effect["behind_ms"]
        plots.append(bars("An answer takes, ms", times, kind="effect"))
    return plots
