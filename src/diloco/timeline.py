"""Draws a schedule: islands over steps, what each step sends, how long it is under way, where it lands."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from diloco import figures
from diloco.config import DiLoCoConfig
from diloco.schedule import schedule


def draw(config: DiLoCoConfig, steps: int) -> Figure:
    """Draws the first steps of a run.

    One lane an island with a box for each inner step, and one lane for the link. A fragment that is sent leaves
    the islands along a vertical line, is under way for V steps (a bar on the link, with the fragment's number)
    and lands where the arrow meets the islands. With V = 0 it lands where it was sent.

    Args:
        config: The algorithm.
        steps: Inner steps to draw.

    Returns:
        A figure, for `diloco.figures.show`.

    Example:
        >>> config = DiLoCoConfig(num_islands=2, sync_period=6, num_fragments=3, overlap_steps=1)
        >>> fig = draw(config, steps=12)
        >>> [text.get_text() for text in fig.axes[0].texts]
        ['1', '2', '0', '1', '2', '0']
    """
    plan, islands = schedule(config), config.num_islands
    fig, ax = figures.subplots(height=1.1 + 0.35 * islands)
    ax.grid(False)
    for m in range(islands):
        for t in range(1, steps + 1):
            box = (t - 0.94, islands - m - 0.3)
            ax.add_patch(Rectangle(box, 0.88, 0.6, facecolor=figures.GRID, edgecolor="none"))
    top = islands + 0.4
    for t, kind, p in plan.events(steps):
        color = figures.COLORS[p % len(figures.COLORS)]
        if kind == "send":
            ax.plot([t, t], [0.3, top], color=color, linestyle="-", linewidth=2)
            width = max(config.overlap_steps, 0.5)
            bar = Rectangle((t, -0.3), width, 0.6, facecolor="none", edgecolor=color, linewidth=2)
            ax.add_patch(bar)
            ax.text(t + width / 2, 0, str(p), ha="center", va="center", fontsize=9)
        elif config.overlap_steps:
            ax.plot([t, t], [0.3, top], color=color, linestyle=":", linewidth=1.5)
            for m in range(islands):
                ax.plot(t, islands - m, marker="<", color=color, linestyle="none", markersize=6)
    ax.set(
        xlim=(-0.2, steps + max(config.overlap_steps, 0.5) + 0.2),
        ylim=(-0.6, top + 0.1),
        xlabel="inner step",
        yticks=range(islands + 1),
        yticklabels=["link", *(f"island {m}" for m in reversed(range(islands)))],
    )
    ax.xaxis.get_major_locator().set_params(integer=True)
    return fig
