"""Draws ``docs/img/engine.svg`` from ``results/engine.json``: what is spent on who has left.

    python -m bench.engine_plot [--results FILE] [--out FILE]

One panel for tokens, one for block-seconds, in the mean of all who left, over logarithmic axes.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench._engine_serving import Policy
from bench._harness import BENCH_DIR
from bench.engine import NAMES, SHARES
from bench.plot import STYLE, text

__all__ = ["IMAGE", "draw", "main"]

IMAGE = BENCH_DIR.parent / "docs" / "img" / "engine.svg"
RESULTS = BENCH_DIR / "results" / "engine.json"

WIDTH, HEIGHT = 860, 330
PANEL_WIDTH, PANEL_HEIGHT, PANEL_TOP = 360, 220, 40
#: Name of the rows, title, left edge, and the powers of ten at the ends of the axis.
PANELS = (
    ("tokens after a leave", "tokens computed for a client that had left", 60, -3, 3),
    ("block-seconds after a leave", "block-seconds held by it", 480, -3, 3),
)
COLOURS: dict[Policy, str] = {"off": "#e0503c", "steps": "#4c8fe0", "on": "#2f9e44"}
BAR = 28


def draw(results: dict[str, Any]) -> str:
    """The image of a run of ``bench.engine``, as SVG.

    Raises:
        KeyError: the results lack a row; made by another version.
    """
    means = {row["name"]: row["median"] for row in results["rows"] if row["name"].endswith("mean")}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>What the engine spends on a client after it has left</title>",
        f"<style>{STYLE}</style>",
    ]
    for what, title, left, low, high in PANELS:
        parts += _axes(title, left, low, high)
        for group, share in enumerate(SHARES):
            x = left + 20 + group * PANEL_WIDTH // len(SHARES)
            for bar, policy in enumerate(COLOURS):
                value = means[f"{what}, {NAMES[policy]}, {share} % leave: mean"]
                parts.append(_bar(x + bar * BAR, _y(value, low, high), COLOURS[policy]))
            middle = x + BAR * len(COLOURS) / 2
            parts.append(
                text(middle, PANEL_TOP + PANEL_HEIGHT + 18, f"{share} % leave", anchor="middle")
            )
    for index, (policy, colour) in enumerate(COLOURS.items()):
        x, y = 60 + index * 230, HEIGHT - 14
        parts.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, y, NAMES[policy]))
    return "\n".join([*parts, "</svg>", ""])


def _axes(title: str, left: int, low: int, high: int) -> Iterator[str]:
    yield text(left, PANEL_TOP - 16, title, "title")
    for power in range(low, high + 1):
        y = _y(10.0**power, low, high)
        yield f'<path class="grid" d="M{left} {y:g}h{PANEL_WIDTH}"/>'
        yield text(left - 6, y + 4, f"{10.0**power:g}", anchor="end")


def _bar(x: float, y: float, colour: str) -> str:
    height = PANEL_TOP + PANEL_HEIGHT - y
    return f'<rect x="{x:g}" y="{y:g}" width="{BAR - 4}" height="{height:g}" fill="{colour}"/>'


def _y(value: float, low: int, high: int) -> float:
    """Where a value lies; what is less than the axis shows has no bar."""
    power = min(max(math.log10(value) if value > 0 else low, low), high)
    return round(PANEL_TOP + PANEL_HEIGHT * (high - power) / (high - low), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_plot")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=IMAGE)
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(json.loads(options.results.read_text())))


if __name__ == "__main__":
    main()
