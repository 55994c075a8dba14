# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Vanilla against streaming
#
# | | |
# |---|---|
# | **You will** | train one small decoder twice on the same tokens: vanilla DiLoCo, and in fragments that are sent in turn and arrive late |
# | **You will see** | the loss of both, the bytes of each step, and the largest burst |
# | **You need** | the package; no accelerator, no network |
# | **Time** | under a minute on two idle cores |
#
# The runs are the recipes `laptop-diloco` and `laptop-streaming-overlap`: two islands, a byte-level decoder, the source of the
# Python standard library. The overrides make them small and short enough to run while this page is built. Nothing about the quality of the methods
# at scale can be read off runs of this size; what one can see is that both train, and what each sends.

# %%
import tempfile
from pathlib import Path

import numpy as np

import diloco
from diloco import figures, recipes, report, timeline
from diloco.train import train


SHORT = [
    "model.name=tiny",
    "model.num_layers=4",
    "diloco.sync_period=20",
    "train.steps=120",
    "train.warmup_steps=20",
    "train.global_batch_size=8",
    "train.eval_every=20",
    "train.eval_sequences=16",
    "data.sequence_length=64",
]
runs = {
    "vanilla": recipes.load_recipe("laptop-diloco", SHORT),
    "streaming": recipes.load_recipe("laptop-streaming-overlap", SHORT),
}

# %% [markdown]
# ## What will be sent, before anything runs
#
# Schedule and fragments are functions of the recipe. Here is the second run's timeline over its first two periods.

# %%
figures.show(
    timeline.draw(runs["streaming"].diloco, steps=40),
    alt="Timeline of two islands over 40 steps: every four steps one of five fragments is sent and lands three steps later.",
)

# %%
print(f"{'':18s}{'average':>12s}{'peak':>12s}{'peak / average':>16s}   (bytes after a step)")
for name, recipe in runs.items():
    sent = report.bytes_per_step(recipe, 40)[20:]  # one whole period
    print(f"{name:18s}{np.mean(sent):12,.0f}{max(sent):12,d}{max(sent) / np.mean(sent):16.1f}")

# %% [markdown]
# *Simulated*: the bytes are the wire bytes of each fragment, float32, by the schedule. Both send the same on average. In
# fragments the burst is a fraction of the model: one layer, or the embedding and the head.
#
# ## Train
#
# `train` runs a recipe and leaves a run directory, as `diloco train` does on the command line. At the end it flushes, so that all
# work is in Θ.

# %%
folder = Path(tempfile.mkdtemp())
for name, recipe in runs.items():
    result = train(recipe, folder / name)
    s = result.summary
    print(
        f"{name:18s}{s['tokens']:9,d} tokens  validation loss of Θ {s['outer_loss']:.3f}  {s['seconds']:.1f} s"
    )
print(f"for comparison, the unigram entropy of the text: {s['unigram_entropy']:.3f}")

# %% [markdown]
# *Measured* on the machine that built this page; {doc}`/reference/status` names it.
#
# ## Loss and traffic, side by side

# %%
fig, axes = figures.subplots(2, 1, height=5.2, sharex=True)
for i, name in enumerate(runs):
    run = report.read_run(folder / name)
    evals = {e["step"]: e["outer_loss"] for e in run.evals}  # the last one is after the flush
    axes[0].plot(list(evals), list(evals.values()), marker="o", markersize=4, label=name)
    sent = np.cumsum(report.bytes_per_step(runs[name], 120)) / 1e6
    axes[1].step(range(1, 121), sent, where="post", label=name, color=figures.COLORS[i])
axes[0].set(ylabel="validation loss of Θ (nats)")
axes[1].set(xlabel="inner step", ylabel="MB sent by an island")
axes[0].legend(fontsize=9)
figures.show(
    fig,
    alt="Above, the validation loss of the two runs, which both fall. Below, the megabytes an island has sent: vanilla climbs in "
    "six tall steps, streaming in thirty small ones to about the same height.",
)

# %% [markdown]
# The staircase is the point. Both lines end near the same height, but a link that is to be ready for the next step has to carry a
# whole step of the staircase at once. With $V = 3$ it has three steps of compute to do so.
#
# The two runs saw the same batches in the same order:

# %%
tokens = {name: [line["tokens"] for line in report.read_run(folder / name).train] for name in runs}
first = {name: report.read_run(folder / name).train[0]["loss"] for name in runs}
print(
    "tokens equal:",
    len({str(t) for t in tokens.values()}) == 1,
    " first losses equal:",
    len({str(f) for f in first.values()}) == 1,
)

# %% [markdown]
# The same comparison as one HTML file, with what the recipes differ in:
#
# ```bash
# diloco report runs/vanilla runs/streaming
# ```

# %%
page = report.write_report([folder / name for name in runs], folder / "report.html")
print(page.name, f"{page.stat().st_size / 1e3:.0f} kB")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
#
# * Streaming sends the same bytes as vanilla, in bursts as large as the largest fragment.
# * A few settings turn one into the other ($P$, $V$, $\alpha$); train step, data and evaluation stay as they are.
# * On one machine neither saves time. {doc}`/theory/overlap` says where it would.
# :::
#
# ## Exercises
#
# **1.** Give the model a vocabulary of 2,048. What becomes of the burst, with `strided` and with `balanced` fragments?
#
# :::{admonition} Answer
# :class: dropdown
#
# The embedding and the head outgrow a layer, and `strided` leaves them together in fragment 0. `balanced` cuts them.
# :::

# %% tags=["hide-input"]
for pattern in ("strided", "balanced"):
    changes = ["model.vocab_size=2048", f"diloco.fragment_pattern={pattern}"]
    sent = report.bytes_per_step(recipes.load_recipe("laptop-streaming", SHORT + changes), 20)
    print(
        f"{pattern:9s} burst {max(sent):9,d} bytes, {sum(sent) / max(sent):.2f} times smaller than vanilla's"
    )

# %% [markdown]
# **2.** What would a 4-bit wire change?
#
# :::{admonition} Answer
# :class: dropdown
#
# Average and peak alike fall by the bits, a little less than eight times, since each block carries its scale.
# :::

# %% tags=["hide-input"]
for wire in ("float32", "float4_e3m0"):
    recipe = recipes.load_recipe("laptop-streaming", [*SHORT, f"diloco.wire_format={wire}"])
    print(
        f"{wire:12s} burst {max(report.bytes_per_step(recipe, 20)):9,d} bytes, {diloco.wire.compression(wire):.2f}x fewer bits"
    )
