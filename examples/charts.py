"""Line charts as SVG, without a library: enough to look at a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 64, 48
COLOURS = ("#2563a8", "#c2512f", "#3d8a4d", "#7b5aa6", "#97771c", "#4b5563")
_TICKS = 6
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#374151"'
_END = 'text-anchor="end"'
_MIDDLE = 'text-anchor="middle"'


def line_chart(title: str, series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str) -> str:
    """The first value of each series is that of turn 1."""
    longest = max((len(values) for values in series.values()), default=0)
    across = _Scale(1, max(longest, 2), LEFT, WIDTH - RIGHT)
    highest = max((value for values in series.values() for value in values), default=1)
    lowest = min((value for values in series.values() for value in values), default=0)
    base = min(lowest, 0)
    step = _round_step((max(highest, base + 1e-9) - base) / _TICKS)
    upward = _Scale(math.floor(base / step) * step, math.ceil(highest / step) * step or step, HEIGHT - BOTTOM, TOP)
    box = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {_FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fbfaf7"/>',
        _text(LEFT, 24, title, 'font-size="16" font-weight="600" fill="#111827"'),
        *_axes(across, upward, x_label, y_label),
        *_lines(series, across, upward),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def stacked(*charts: str) -> str:
    """Several charts below each other in one picture."""
    height = HEIGHT * len(charts)
    placed = [chart.replace("<svg ", f'<svg y="{HEIGHT * place}" ', 1) for place, chart in enumerate(charts)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    return f"{head}\n{''.join(placed)}</svg>\n"


class _Scale:
    """From values to places on the picture."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.step = _round_step((high - low) / _TICKS)
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step), math.floor(self.high / self.step)
        return [number * self.step for number in range(first, last + 1)]


def _round_step(raw: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))


def _axes(across: _Scale, upward: _Scale, x_label: str, y_label: str) -> list[str]:
    bottom, middle = HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2
    parts = []
    for value in upward.ticks():
        y = upward.at(value)
        parts += [_stroke(LEFT, y, WIDTH - RIGHT, y, "#e3e0d8"), _text(LEFT - 8, y + 4, _number(value), _END)]
    for value in across.ticks():
        x = across.at(value)
        parts += [_stroke(x, bottom, x, bottom + 5, "#6b7280"), _text(x, bottom + 18, _number(value), _MIDDLE)]
    return [
        *parts,
        _stroke(LEFT, bottom, WIDTH - RIGHT, bottom, "#6b7280"),
        _stroke(LEFT, TOP, LEFT, bottom, "#6b7280"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, _MIDDLE),
        _text(16, middle, y_label, f'{_MIDDLE} transform="rotate(-90 16 {middle})"'),
    ]


def _lines(series: Mapping[str, Sequence[float]], across: _Scale, upward: _Scale) -> list[str]:
    parts = []
    legend = float(LEFT)
    for place, (name, values) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        points = " ".join(f"{across.at(turn)},{upward.at(value)}" for turn, value in enumerate(values, 1))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>',
            f'<rect x="{legend}" y="38" width="14" height="4" fill="{colour}"/>',
            _text(legend + 20, 44, name),
        ]
        legend += 44 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _number(value: float) -> str:
    return f"{value:.6g}"
