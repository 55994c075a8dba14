"""Figures follow the theme, carry their alt text, and are the same for the same data."""

import re

import matplotlib.pyplot as plt
import pytest

from diloco import figures


def draw():
    fig, ax = figures.subplots()
    for slope in range(3):
        ax.plot([0, 1], [0, slope], label=f"slope {slope}")
    ax.legend()
    ax.set(title="lines & slopes", xlabel="$t$")
    return fig


def test_every_colour_follows_the_theme():
    text = figures.show(draw(), alt="Three lines.").text
    bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", text)
    assert "var(--diloco-c3" in text
    assert not re.search(r"#[0-9a-f]{6}\b", bare)
    assert "<style" not in text  # it would reach the rest of the page


def test_lines_differ_in_style_too():
    styles = {str(line.get_linestyle()) for line in draw().axes[0].lines}
    assert len(styles) == 3


def test_equal_figures_give_equal_text():
    assert figures.show(draw(), alt="a").text == figures.show(draw(), alt="a").text


def test_alt_is_needed_and_escaped():
    with pytest.raises(TypeError, match="alt"):
        figures.show(draw())
    for blank in ("", "  \n"):
        with pytest.raises(ValueError, match="alt is empty; say in a sentence"):
            figures.show(draw(), alt=blank)
    html = figures.show(draw(), alt='less < "more"')._repr_html_()
    assert 'role="img" aria-label="less &lt; &quot;more&quot;"' in html


def test_a_pyplot_figure_is_closed_and_themed():
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    text = figures.show(fig, alt="A line.").text
    assert "var(--diloco-c1, #1f77b4)" in text
    assert not plt.fignum_exists(fig.number)
