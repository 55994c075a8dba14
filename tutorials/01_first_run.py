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
# # A first run
#
# | | |
# |---|---|
# | **You will** | train a small decoder on real text twice, with data parallelism and with DiLoCo, compare them, and let the model write |
# | **You will see** | what a recipe is, what a run leaves behind, and what two islands do between two syncs |
# | **You need** | the package; no accelerator, no network |
# | **Time** | under a minute on two idle cores |
#
# On the command line the whole tutorial is
#
# ```bash
# diloco train laptop-data-parallel
# diloco train laptop-diloco
# diloco report runs/laptop-data-parallel runs/laptop-diloco
# ```
#
# Below the same happens from Python, with fewer steps so that the page builds fast.
#
# ## A recipe
#
# A recipe is one TOML file under `conf/recipes`. It is read strictly: a key that does not exist is an error that names the nearest
# one. `--set section.key=value` changes a value on the command line; here the list does.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from diloco import conf, figures, recipes, report
from diloco.data import load_corpus
from diloco.models import decoder
from diloco.program import open_batches
from diloco.train import train


print((conf.conf_dir() / "recipes" / "laptop-diloco.toml").read_text())

# %%
SHORT = [
    "train.steps=120",
    "train.warmup_steps=20",
    "train.eval_every=20",
    "train.eval_sequences=16",
    "data.sequence_length=64",
]
islands = recipes.load_recipe("laptop-diloco", SHORT)
plain = recipes.load_recipe("laptop-data-parallel", SHORT)

try:
    recipes.load_recipe("laptop-diloco", ["diloco.sync_perod=10"])
except ValueError as error:
    print(error)

# %% [markdown]
# Both recipes have the same model, the same tokens and the same inner optimizer. They differ in four lines of `[diloco]`: the
# baseline has one island that syncs after every step with $\eta = 1$, $\beta = 0$, which is plain training
# ({doc}`/theory/bilevel` shows why).
#
# ## Train
#
# The text is the source of the Python that runs this page, as bytes. {doc}`/how-to/own-data` says how to train on yours.

# %%
folder = Path(tempfile.mkdtemp())
runs = {
    "data parallel": train(plain, folder / "data-parallel"),
    "DiLoCo": train(islands, folder / "diloco"),
}
for name, run in runs.items():
    s = run.summary
    print(
        f"{name:14s}{s['tokens']:8,d} tokens  validation loss of Θ {s['outer_loss']:.3f} nats a byte"
    )
entropy = runs["DiLoCo"].summary["unigram_entropy"]
print(f"what a model that knows only how often each byte occurs can reach: {entropy:.3f}")

# %% tags=["remove-cell"]
assert all(run.summary["outer_loss"] < entropy for run in runs.values())

# %% [markdown]
# *Measured* on the machine that built this page ({doc}`/reference/status`). At this size the islands lose something against data
# parallelism: each takes its steps on half the batch, and they have met only a few times. The papers' comparisons are at a
# thousand times the parameters and more ({cite:t}`douillard2023diloco`); a laptop shows the mechanism, not the verdict.
#
# ## What a run leaves behind

# %%
for path in sorted((folder / "diloco").iterdir()):
    print(path.name)
print((folder / "diloco" / "metrics.jsonl").read_text().splitlines()[0])

# %% [markdown]
# `recipe.toml` has every setting, defaults too; `diloco train` takes it as a recipe again. `metrics.jsonl` has a record a step and a
# validation. `outer_params.safetensors` is Θ. `checkpoints` is what an interrupted run goes on from: type the same command again.
#
# ## What happens between two syncs

# %%
fig, axes = figures.subplots(3, 1, height=7.0)
for name, run in runs.items():
    read = report.read_run(run.run_dir)
    axes[0].plot(
        [sum(e["tokens"]) for e in read.evals],
        [e["outer_loss"] for e in read.evals],
        marker="o",
        markersize=4,
        label=name,
    )
read = report.read_run(folder / "diloco")
loss = np.array([line["loss"] for line in read.train])
smooth = loss.reshape(-1, 4, 2).mean(axis=1)  # four steps a point
for m in range(2):
    axes[1].plot(range(4, 121, 4), smooth[:, m], label=f"island {m}")
axes[2].plot(
    [line["step"] for line in read.outer],
    [line["cosine"] for line in read.outer],
    marker="o",
    markersize=4,
    label="cosine between the islands",
)
axes[0].set(xlabel="tokens", ylabel="validation loss of Θ")
axes[1].set(xlabel="inner step", ylabel="training loss (nats)")
axes[2].set(xlabel="inner step", ylabel="cosine", ylim=(0, 1))
for ax in axes:
    ax.legend(fontsize=9)
figures.show(
    fig,
    alt="Above, the validation loss of both runs falls with the tokens. In the middle, the training losses of the two islands fall together. "
    "Below, the cosine between the islands' pseudo-gradients before each sync.",
)

# %% [markdown]
# The cosine says how much the islands agree on the way they went. It starts near one, when every island learns which bytes are
# frequent, and falls when what is left to learn depends on the batch.
#
# `report.write_report`, or `diloco report` on the command line, writes the comparison as one HTML file that needs nothing else, with
# the bytes sent after each step and a table of what the recipes differ in.

# %%
page = report.write_report([run.run_dir for run in runs.values()], folder / "report.html")
sent = {
    name: report.bytes_per_step(r, 120)
    for name, r in (("data parallel", plain), ("DiLoCo", islands))
}
for name, s in sent.items():
    print(f"{name:14s}{sum(s) / 1e6:8.1f} MB an island would send in 120 steps")

# %% [markdown]
# *Simulated* from the schedule and the size of the parameters, float32. The ratio is $H$.
#
# ## Let it write
#
# Θ is a dictionary of arrays; nothing of this package is needed to load it. Here the decoder continues a line of Python, taking the
# most likely byte each time. After so few steps, expect keywords and indentation rather than sense.

# %%
flat = load_file(folder / "diloco" / "outer_params.safetensors")
params: dict = {"layers": {}}
for name, array in flat.items():
    *parents, leaf = name.split(".")
    (params["layers"] if parents else params)[leaf] = jnp.asarray(array)

next_logits = jax.jit(lambda tokens: decoder.apply(islands.model, params, tokens[None])[0])
text = list(b"    def __init__(self, ")
for _ in range(80):
    window = text[-64:]
    padded = jnp.asarray(window + [0] * (64 - len(window)), jnp.int32)
    text.append(int(next_logits(padded)[len(window) - 1].argmax()))
print(bytes(text).decode("utf-8", "replace"))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
#
# * A run is a recipe and a directory; everything in the directory is a function of the recipe and the text.
# * Two islands that meet every $H$ steps send $H$ times less than data parallelism.
# * Evaluate and export Θ, never an island.
# :::
#
# ## Exercises
#
# **1.** What does `--set diloco.num_islands=4` change, and what stays?
#
# :::{admonition} Answer
# :class: dropdown
#
# The global batch stays, so each island gets a quarter of it; tokens and steps are equal. The initial parameters are the same too,
# since they come from the seed alone.
# :::

# %% tags=["hide-input"]
four = recipes.load_recipe("laptop-diloco", [*SHORT, "diloco.num_islands=4"])
print("sequences an island:", four.train.global_batch_size // four.diloco.num_islands)

# %% [markdown]
# **2.** The two runs saw the same text. In the same order?
#
# :::{admonition} Answer
# :class: dropdown
#
# Yes: with the `iid` split one shuffled stream is dealt to the islands, so the global batches are equal.
# :::

# %% tags=["hide-input"]
batches = [next(open_batches(recipe, load_corpus())) for recipe in (plain, islands)]
same = np.array_equal(batches[0].reshape(8, -1), batches[1].reshape(8, -1))
print("shapes:", [b.shape for b in batches], " same tokens:", same)
