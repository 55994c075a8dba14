"""Figures for pages: inline SVG that follows the theme of the page and cannot lack its alt text.

Colours become CSS variables with a light fallback; the site's style sheet gives each its value in
both themes. The first six lines of a plot differ in colour (a palette that colour-blind readers can
tell apart) and in line style.
"""

import dataclasses
import html
import io
import re
import sys
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure


COLORS = ("#0072b2", "#d55e00", "#007a5a", "#a8488b", "#7f6000", "#4a4a8f")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)))
TEXT, GRID = "#212529", "#c8ccd0"

STYLE = {
    "axes.prop_cycle": cycler(color=COLORS, linestyle=LINE_STYLES),
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}

# Our colours and Matplotlib's defaults, and the CSS variable that stands for each in the page.
VARIABLES = {
    **{color: f"--diloco-c{i}" for i, color in enumerate(COLORS, 1)},
    **{
        f"#{c}": f"--diloco-c{i}"
        for i, c in enumerate(("1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b"), 1)
    },
    TEXT: "--diloco-text",
    "#000000": "--diloco-text",
    GRID: "--diloco-grid",
    "#b0b0b0": "--diloco-grid",
    "#ffffff": "--diloco-background",
}


@dataclasses.dataclass(frozen=True)
class Svg:
    """A figure as a notebook shows it.

    Args:
        text: The `<svg>` element.
    """

    text: str

    def _repr_html_(self) -> str:
        return f'<div class="diloco-figure">{self.text}</div>'


def subplots(
    rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 3.2, **kwargs: Any
) -> tuple[Figure, Any]:
    """Starts a figure in the style of the pages.

    Args:
        rows: Rows of axes.
        columns: Columns of axes.
        width: Width in inches; the page scales it to its column.
        height: Height in inches.
        **kwargs: Passed on to :meth:`matplotlib.figure.Figure.subplots`.

    Returns:
        The figure and its axes, one or an array of them as Matplotlib does it.

    Example:
        >>> fig, ax = subplots()
        >>> line, = ax.plot([0, 1], [2.0, 1.0], label="loss")
        >>> line.get_color()
        '#0072b2'
    """
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height))
        return fig, fig.subplots(rows, columns, **kwargs)


def show(fig: Figure, *, alt: str) -> Svg:
    """Turns a figure into inline SVG that follows the theme of the page.

    Equal figures give equal text, so a page that did not change keeps its bytes.

    Args:
        fig: The figure, from :func:`subplots` or from Matplotlib itself.
        alt: What the figure shows, in a sentence, for readers who do not see it.

    Returns:
        The SVG; as the last value of a cell it is shown in the page.

    Raises:
        ValueError: If `alt` is empty or blank.

    Example:
        >>> fig, ax = subplots()
        >>> show(fig, alt="An empty plot.").text[:43]
        '<svg role="img" aria-label="An empty plot."'
        >>> show(fig, alt=" ")
        Traceback (most recent call last):
        ValueError: alt is empty; say in a sentence what the figure shows
    """
    if not alt.strip():
        raise ValueError("alt is empty; say in a sentence what the figure shows")
    for legend in filter(None, (ax.get_legend() for ax in fig.axes)):
        legend.set_frame_on(False)
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    if "matplotlib.pyplot" in sys.modules:  # else the notebook would show the figure a second time
        sys.modules["matplotlib.pyplot"].close(fig)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL
    )  # would style the whole page
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # two figures of a page must not share ids
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: _themed(m.group()), text)
    text = re.sub(
        r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--pst-font-family-base, sans-serif)", text
    )
    view_box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', text)
    style = f"max-width: {float(view_box.group(1)) / 72 * 6:.1f}rem; height: auto; fill: {_themed(TEXT)}"
    head = (
        f'<svg role="img" aria-label="{html.escape(alt)}" {view_box.group()} width="100%" '
        f'style="{style}" stroke-linejoin="round" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return Svg(head + text[text.index(">") + 1 :])


def losses_and_traffic(losses: Any, sent: Any, *, alt: str) -> Svg:
    """Draws the training loss of each island above what an island sends after each step.

    Args:
        losses: Nats, `[T, M]`.
        sent: Bytes, `[T]`.
        alt: As for :func:`show`.

    Returns:
        The figure.

    Example:
        >>> "island 1" in losses_and_traffic([[2.0, 2.1], [1.9, 1.8]], [0, 8_000_000], alt="Falling.").text
        True
    """
    fig, axes = subplots(2, 1, height=5.0, sharex=True)
    steps = range(1, len(losses) + 1)
    for island, loss in enumerate(zip(*losses, strict=True)):
        axes[0].plot(steps, loss, label=f"island {island}")
    axes[0].set(ylabel="training loss (nats)")
    axes[0].legend(fontsize=9)
    axes[1].vlines(steps, 0, [s / 1e6 for s in sent], color=COLORS[1])
    axes[1].set(xlabel="inner step", ylabel="MB an island sends\n(full size)", ylim=(0, None))
    return show(fig, alt=alt)


def _themed(color: str) -> str:
    return f"var({VARIABLES[color]}, {color})" if color in VARIABLES else color
