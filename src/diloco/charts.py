"""Line charts as inline SVG: they need nothing, follow the page's colours, and scale to a phone."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple


WIDTH, HEIGHT = 420, 280  # user units; a chart is drawn at about this size in pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 40

STYLE = """
.chart{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}
.chart .grid{stroke:currentColor;stroke-opacity:.18}
.chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.c0{--c:#0072b2}.c1{--c:#c44e00}.c2{--c:#00785a}.c3{--c:#b0448a}.c4{--c:#7a6200}.c5{--c:#555}
@media (prefers-color-scheme:dark){
.c0{--c:#56b4e9}.c1{--c:#ff9d5c}.c2{--c:#3ecf9f}.c3{--c:#e89ac7}.c4{--c:#f0e442}.c5{--c:#bbb}}
.line,.key line{stroke:var(--c)}
"""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 4")


class Series(NamedTuple):
    """One line of a chart.

    Attributes:
        label: Its name in the key.
        x: Positions, increasing.
        y: Values; one that is not finite breaks the line.
        style: Number of its colour and dash, 0 to 5 and then again.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: int


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, alt: str) -> str:
    """Draws lines over a grid.

    Args:
        series: The lines.
        x_label: What is along, with its unit.
        y_label: What is up, with its unit.
        alt: What the chart shows, for those who do not see it.

    Returns:
        An `<svg>` element with a key below the axes; its colours are the classes of `STYLE`.

    Example:
        >>> svg = line_chart([Series("a", [0, 1], [2, 3], 0)], x_label="t", y_label="y", alt="A line.")
        >>> svg.count("<path"), "A line." in svg
        (1, True)
    """
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 5), ticks(min(ys), max(ys), 5)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-12)
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{short(y)}</text>'
        )
    for x in x_ticks:
        if x_low <= x <= x_high:
            parts.append(
                f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{short(x)}</text>"
            )
    middle, height = (LEFT + WIDTH - RIGHT) / 2, HEIGHT + 20 * len(series)
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{_esc(x_label)}</text>')
    parts.append(
        f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{_esc(y_label)}</text>'
    )
    for row, s in enumerate(series):
        dash, at = _DASHES[s.style % 6], HEIGHT + 20 * row + 6
        parts.append(
            f'<path class="line c{s.style % 6}" stroke-dasharray="{dash}" d="{_path(s, across, up)}"/>'
            f'<g class="key c{s.style % 6}"><line x1="{LEFT}" x2="{LEFT + 30}" y1="{at}" y2="{at}" '
            f'stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text x="{LEFT + 38}" y="{at + 4}">{_esc(s.label)}</text></g>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_esc(alt)}">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns round values that cover a range: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: Start of the range.
        high: Its end.
        count: Steps that the values should have at most.

    Returns:
        The values, in order.

    Example:
        >>> ticks(0.0, 270.0, 5)
        [0.0, 100.0, 200.0, 300.0]
    """
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * count >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """Writes a number in a few characters, with k, M, G or T for large ones.

    Example:
        >>> short(614400.0), short(0.25), short(2e9), short(0.0)
        ('614k', '0.25', '2G', '0')
    """
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def _path(series: Series, across, up) -> str:
    parts, pen = [], "M"
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(y):
            parts.append(f"{pen}{across(x):.1f} {up(y):.1f}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(parts)


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
