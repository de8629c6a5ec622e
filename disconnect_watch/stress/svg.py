"""Plots as SVG elements in a page, which need nothing from anywhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "bars", "lines"]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 14, 40
_NUM_TICKS = 4
_BAR, _LABEL, _NUMBER = 22, 150, 60


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: its name, its class in the style sheet, its points in order of x."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def lines(title: str, of: Sequence[Line], *, x_name: str, y_name: str) -> str:
    """Lines over a common pair of axes, both from 0."""
    xs = [x for line in of for x, _ in line.points]
    ys = [y for line in of for _, y in line.points]
    x_end, y_end = max([*xs, 1e-9]), max([*ys, 1e-9]) * 1.05
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x_at(x: float) -> float:
        return _LEFT + x / x_end * (right - _LEFT)

    def y_at(y: float) -> float:
        return bottom - y / y_end * (bottom - _TOP)

    parts = []
    for tick in range(_NUM_TICKS + 1):
        x, y = x_end * tick / _NUM_TICKS, y_end * tick / _NUM_TICKS
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y_at(y) + 4:.1f}" text-anchor="end">'
            f'{_brief(y)}</text><text class="tick" x="{x_at(x):.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{_brief(x)}</text>'
        )
    for line in of:
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line {line.kind}" points="{points}"/>')
    parts.append(
        f'<text class="name" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f'{escape(x_name)}</text><text class="name" x="14" y="{(_TOP + bottom) / 2}" '
        f'text-anchor="middle" transform="rotate(-90 14 {(_TOP + bottom) / 2})">{escape(y_name)}'
        "</text>"
    )
    legend = " ".join(
        f'<span class="key {line.kind}">{escape(line.name)}</span>' for line in of if line.name
    )
    return _figure(title, _WIDTH, _HEIGHT, "".join(parts), legend)


def bars(title: str, numbers: Mapping[str, float], *, kind: str) -> str:
    """A bar for each number, longest first."""
    longest = max([*numbers.values(), 1e-9])
    room = _WIDTH - _LABEL - _NUMBER
    parts = []
    ordered = sorted(numbers.items(), key=lambda item: -item[1])
    for place, (name, number) in enumerate(ordered):
        y = place * _BAR
        parts.append(
            f'<text class="tick" x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}'
            f'</text><rect class="bar {kind}" x="{_LABEL}" y="{y + 3}" height="{_BAR - 6}" '
            f'width="{number / longest * room:.1f}"/><text class="tick" '
            f'x="{_LABEL + number / longest * room + 6:.1f}" y="{y + 15}">{number:,.6g}</text>'
        )
    return _figure(title, _WIDTH, max(1, len(numbers)) * _BAR, "".join(parts), "")


def _brief(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _figure(title: str, width: int, height: int, drawn: str, legend: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)} {legend}</figcaption><svg role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {width} {height}" '
        f'xmlns="http://www.w3.org/2000/svg">{drawn}</svg></figure>'
    )
