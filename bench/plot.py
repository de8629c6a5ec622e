"""Draws ``docs/img/latency.svg`` from ``results/baselines.json``: who notices, and when.

    python -m bench.plot [--results FILE] [--out FILE]

Cumulative distributions over a logarithmic time, one panel a kind of close. Drawn by
hand: the image is small, has no font or size of its own, and follows the reader's
light or dark scheme.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench._harness import BENCH_DIR, CURVE
from bench.baselines import PIPELINED, PLAIN, WAYS

__all__ = ["IMAGE", "STYLE", "draw", "main", "text"]

IMAGE = BENCH_DIR.parent / "docs" / "img" / "latency.svg"
RESULTS = BENCH_DIR / "results" / "baselines.json"

WIDTH, HEIGHT = 860, 430
PANEL_WIDTH, PANEL_HEIGHT = 370, 250
PANEL_LEFTS = {PLAIN: 60, PIPELINED: 475}
PANEL_TOP = 50
LEGEND_TOP = PANEL_TOP + PANEL_HEIGHT + 60
#: Microseconds at the ends of the time axis.
FIRST, LAST = 10.0, 1e6
TICKS = {10: "10 µs", 100: "100 µs", 1e3: "1 ms", 1e4: "10 ms", 1e5: "100 ms", 1e6: "1 s"}

#: One a way, told apart in both schemes and by dashes where colour is not enough.
STROKES = (
    'stroke="#2f9e44" stroke-width="3"',
    'stroke="#37b24d" stroke-width="3" stroke-dasharray="9 4"',
    'stroke="#94c11f" stroke-width="3" stroke-dasharray="2 3"',
    'stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 2"',
    'stroke="#4c8fe0" stroke-width="1.5"',
    'stroke="#a269d9" stroke-width="2"',
    'stroke="#f08c00" stroke-width="2"',
    'stroke="#e0503c" stroke-width="2"',
)

STYLE = """
text { font: 12px sans-serif; fill: #33383d }
.title { font-weight: bold; font-size: 13px }
.grid { stroke: #8a9199; stroke-opacity: .35 }
svg { color: #33383d }
polyline { fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #d5dae0 }
  svg { color: #d5dae0 }
}
"""


def draw(results: dict[str, Any]) -> str:
    """The image of a run of ``bench.baselines``, as SVG.

    Raises:
        KeyError: the results lack a way; made by another version.
    """
    rows = {row["name"]: row for row in results["rows"]}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>How long after a client's close who has noticed it</title>",
        f"<style>{STYLE}</style>",
    ]
    for close, left in PANEL_LEFTS.items():
        parts += _axes(close, left)
        for who, stroke in zip(WAYS, STROKES, strict=True):
            share = rows[f"noticed: {who}, {close}"]["median"] / 100
            curve = rows[f"{who}, {close}"]["curve"] if share else []
            parts.append(_line(_points(curve, share, left), stroke))
    parts += _legend(results["config"]["give_up"])
    return "\n".join([*parts, "</svg>", ""])


def _axes(close: str, left: int) -> Iterator[str]:
    bottom = PANEL_TOP + PANEL_HEIGHT
    yield text(left, PANEL_TOP - 18, close, "title")
    for us, label in TICKS.items():
        x = _x(us, left)
        yield f'<path class="grid" d="M{x} {PANEL_TOP}V{bottom}"/>'
        yield text(x, bottom + 18, label, anchor="middle")
    for percent in range(0, 101, 25):
        y = _y(percent / 100)
        yield f'<path class="grid" d="M{left} {y}h{PANEL_WIDTH}"/>'
        yield text(left - 6, y + 4, f"{percent}%", anchor="end")


def _points(curve: Sequence[float], share: float, left: int) -> list[tuple[float, float]]:
    """The distribution as a line from end to end; on the floor where nobody noticed."""
    points = [(_x(us, left), _y(q / 100 * share)) for us, q in zip(curve, CURVE, strict=False)]
    first_x = points[0][0] if points else left
    return [(left, _y(0)), (first_x, _y(0)), *points, (left + PANEL_WIDTH, _y(share))]


def _line(points: list[tuple[float, float]], stroke: str) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline {stroke} points="{path}"/>'


def _legend(give_up: float) -> Iterator[str]:
    for i, (who, stroke) in enumerate(zip(WAYS, STROKES, strict=True)):
        left, y = 60 + i // 3 * 270, LEGEND_TOP + i % 3 * 20
        yield _line([(left, y - 4), (left + 34, y - 4)], stroke)
        yield text(left + 42, y, who)
    ends = f"time after the client's close(); a line on the floor: never within {give_up:g} s"
    yield text(WIDTH / 2, PANEL_TOP + PANEL_HEIGHT + 36, ends, anchor="middle")


def text(x: float, y: float, words: str, css: str = "", *, anchor: str = "start") -> str:
    """A line of text at a point."""
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{css}>{escape(words)}</text>'


def _x(us: float, left: int) -> float:
    share = math.log(min(max(us, FIRST), LAST) / FIRST) / math.log(LAST / FIRST)
    return round(left + PANEL_WIDTH * share, 1)


def _y(share: float) -> float:
    return round(PANEL_TOP + PANEL_HEIGHT * (1 - share), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=IMAGE)
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(json.loads(options.results.read_text())))


if __name__ == "__main__":
    main()
