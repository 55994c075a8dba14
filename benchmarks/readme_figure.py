"""Draws the README's figure, docs/_static/readme.svg: what an island sends after each step, for Qwen3-8B.

`python benchmarks/readme_figure.py` writes the file; a test draws it again and compares.
"""

from pathlib import Path

import jax

import diloco
from diloco import conf, figures
from diloco.models import decoder


OUT = Path(__file__).parents[1] / "docs" / "_static" / "readme.svg"
RUNS = {
    "vanilla, float32": {"num_fragments": 1},
    "streaming, strided, float32": {"num_fragments": 37},
    "streaming, balanced, 4 bits": {
        "num_fragments": 37,
        "fragment_pattern": "balanced",
        "wire_format": "float4_e3m0",
    },
}


def draw() -> str:
    """Returns the figure as SVG text that follows the reader's light or dark setting."""
    model = conf.build(decoder.DecoderConfig, conf.load("models", "qwen3-8b"), "qwen3-8b")
    params = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    steps = range(1, 112)
    fig, ax = figures.subplots(width=7.0, height=2.9)
    for k, (label, setting) in enumerate(RUNS.items()):
        config = diloco.DiLoCoConfig(num_islands=2, sync_period=37, **setting)
        schedule, fragments = diloco.schedule(config), diloco.partition(params, config).fragments
        sent = [sum(fragments[p].wire_bytes for p in schedule.sends(t)) / 1e9 for t in steps]
        ax.step(steps, [max(s, 1e-3) for s in sent], where="mid", label=label, zorder=k + 2)
    ax.set(
        yscale="log",
        ylim=(0.05, 100),
        xlim=(1, 111),
        xlabel="inner step",
        ylabel="GB an island sends",
    )
    ax.legend(loc="upper center", ncols=3, fontsize=9)
    alt = (
        "Gigabytes that one island sends after each inner step, on a log scale: vanilla DiLoCo sends everything once in 37 "
        "steps, streaming a fragment every step with one large one a period, balanced 4-bit streaming a small even amount."
    )
    colors = {
        "c1": ("#0072b2", "#56b4e9"),
        "c2": ("#d55e00", "#ff9e4a"),
        "c3": ("#007a5a", "#4fd1a5"),
        "text": ("#212529", "#dee2e6"),
        "grid": ("#c8ccd0", "#495057"),
    }
    light, dark = (
        "".join(f"--diloco-{name}:{pair[i]};" for name, pair in colors.items()) for i in (0, 1)
    )
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    text = figures.show(fig, alt=alt).text
    return text.replace(">", f">\n{style}", 1)


if __name__ == "__main__":
    OUT.write_text(draw() + "\n", encoding="utf-8")
    print(f"wrote {OUT.relative_to(OUT.parents[2])}")
