"""Draws ``docs/img/side_by_side.svg`` from ``results/side_by_side.json``.

    python -m bench.sides_plot [--results FILE] [--out FILE]

For each server: of the answers a second that it gives while nobody leaves, those that it still
gives while half of its clients do.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._harness import BENCH_DIR
from bench._sides_peers import PEERS
from bench.plot import STYLE, text

__all__ = ["AMONG", "IMAGE", "QUIET", "draw", "main", "names_of"]

IMAGE = BENCH_DIR.parent / "docs" / "img" / "side_by_side.svg"
RESULTS = BENCH_DIR / "results" / "side_by_side.json"
#: What stands behind a server's name in the names of its rows.
QUIET, AMONG = ": answers, nobody leaves", ": answers, half leave"

WIDTH, LEFT, TOP, BAR, BAR_GAP = 860, 330, 56, 20, 8
#: Share at the right end.
END = 1.25
OURS, OTHERS = "#2f9e44", "#e0503c"


def names_of(results: Mapping[str, Any]) -> list[str]:
    """The servers in a results file, in its order."""
    return [
        row["name"].removesuffix(QUIET) for row in results["rows"] if row["name"].endswith(QUIET)
    ]


def draw(results: Mapping[str, Any]) -> str:
    """The image of a run of ``bench.side_by_side``, as SVG."""
    medians = {row["name"]: row["median"] for row in results["rows"]}
    names = names_of(results)
    ours = {peer.name for peer in PEERS if peer.is_ours}
    height = TOP + len(names) * (BAR + BAR_GAP) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Answers a second while half of the clients leave</title>",
        f"<style>{STYLE}</style>",
        text(LEFT, 24, "answers a second while half leave, of those while nobody does", "title"),
    ]
    for percent in range(0, 126, 25):
        x = _x(percent / 100)
        parts += [
            f'<path class="grid" d="M{x:g} {TOP - 8}V{height - 26}"/>',
            text(x, height - 8, f"{percent} %", anchor="middle"),
        ]
    for place, name in enumerate(names):
        share = medians[name + AMONG] / medians[name + QUIET]
        y = TOP + place * (BAR + BAR_GAP)
        colour = OURS if name in ours else OTHERS
        parts += [
            text(LEFT - 8, y + 15, name.replace("`", ""), anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{_x(min(share, END)) - LEFT:g}" height="{BAR}" '
            f'fill="{colour}"/>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _x(share: float) -> float:
    return round(LEFT + share / END * (WIDTH - LEFT - 30), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.sides_plot")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=IMAGE)
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(json.loads(options.results.read_text())))


if __name__ == "__main__":
    main()
