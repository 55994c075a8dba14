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
#   mystnb:
#     render_markdown_format: myst
# ---

# %% [markdown]
# # Qwen3-8B on two v5p slices: vanilla DiLoCo
#
# | | |
# |---|---|
# | **You will** | take the simplest full-size recipe from plan to script |
# | **You will see** | the link it needs, the compiler's memory and traffic report, a toy run with the same settings, the scripts |
# | **You need** | two v5p-128 slices for the run itself; for this page the package only: no TPU, no network |
# | **Time** | under a minute for this page on two idle cores |
#
# One exchange of everything every 100 steps, while both islands wait. It is where to start: fewest settings, and any link shows its cost in one figure.

# %%
import tempfile
from pathlib import Path

from IPython.display import Markdown

from diloco import conf, figures, recipes, report, tpu, tuning
from diloco.models import decoder
from diloco.plan import plan_command
from diloco.train import train


NAME = "qwen3-8b-vanilla-v5p-128x2"
recipe = recipes.load_recipe(NAME)
twin = recipes.load_recipe(recipe.meta.twin)
notes = [f"Source: {source}." for source in recipe.meta.sources]
notes.append(f"What departs: {recipe.meta.deviations}")
Markdown("\n* ".join([f"{recipe.meta.summary}\n", *notes]))

# %% [markdown]
# ## Will the link hide it?
#
# The planner answers for a runtime in which islands go on computing while bytes travel. One program for all islands, MaxText's trainer
# and ours, waits for each exchange ({doc}`/theory/overlap`); add the transfer times to the step for it.
#
# *Simulated*, at the data-centre network of the slices' hosts:

# %%
plan_command(NAME)

# %% [markdown]
# The same over a link of 10 Gbit/s:

# %%
plan_command(NAME, gbit=10.0)

# %% [markdown]
# ## What the TPU compiler says
#
# `diloco compile qwen3-8b-vanilla-v5p-128x2` hands the whole train step, model, optimizer and exchange, to the TPU compiler for two slices of 64 chips.
# It needs no TPU. The report below was recorded with `python benchmarks/record_compiles.py`, and `--check` compiles again and fails on a drift over 1 %.

# %%
data = conf.conf_dir().parent / "docs" / "data"
compiled = tpu.from_json((data / "compiled" / f"{NAME}.json").read_text())
Markdown(tpu.table(compiled))

# %% [markdown]
# *Compiled*, for jax and libtpu of the versions in the record. A plain step crosses no slice. On the hundredth a chip sends the whole of its share of the model, in float32.

# %%
for send in compiled.sends:
    share = tpu.device_payload(compiled, send)
    sent = sum(send.across.values())
    print(f"{len(send.fragments):3d} fragment(s): {sent / 1e6:8.3f} MB a chip,", end=" ")
    print(f"{sent / share - 1:+.2%} against the payload")
print(f"peak {compiled.peak_bytes / compiled.hbm_bytes:.0%} of a chip's memory")

# %% [markdown]
# ## The twin, run here
#
# Same $M$, $H$, $P$, $V$, $\alpha$, pattern and wire format, on a decoder of four thin layers over bytes.

# %%
assert twin.diloco == recipe.diloco
folder = Path(tempfile.mkdtemp()) / "twin"
summary = train(twin, folder, save_every=10_000).summary
print(f"{decoder.num_parameters(twin.model):,} parameters", end=", ")
print(f"{summary['tokens']:,} tokens, {summary['seconds']:.1f} s")
print(f"validation loss of the outer parameters {summary['outer_loss']:.3f} nats a byte")
print(f"unigram entropy of the text {summary['unigram_entropy']:.3f} nats a byte")

# %%
losses = [line["loss"] for line in report.read_run(folder).train]
sent = report.bytes_per_step(recipe, twin.train.steps)
figures.losses_and_traffic(
    losses,
    sent,
    alt="Above, the training loss of two islands, which falls. Below, what the full-size "
    "model sends: nothing but three tall bars, one every hundred steps.",
)

# %% [markdown]
# *Measured* above, on the machine that built this page ({doc}`/reference/status`): the toy's loss. *Simulated* below: the wire bytes that the
# full-size model sends after each step, by the same schedule. The twin shows the schedule at work. It says nothing about the loss at full size, which was not measured.

# %% [markdown]
# ## Run it
#
# Set the variables that the script names and run it; it stops with a message if one is missing. Every script passes shellcheck, and the XPK one was accepted by the real `xpk --dry-run`.
#
# ::::{tab-set}
# :sync-group: target
#
# :::{tab-item} XPK (GKE)
# :sync: xpk
#
# Submits the MaxText command below to a GKE cluster of TPU slices.
#
# ```{literalinclude} /data/scripts/qwen3-8b-vanilla-v5p-128x2.xpk.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} MaxText
# :sync: maxtext
#
# For TPU slices that are yours already: run it on every host.
#
# ```{literalinclude} /data/scripts/qwen3-8b-vanilla-v5p-128x2.maxtext.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Slurm
# :sync: slurm
#
# This package on the GPUs of one node.
#
# ```{literalinclude} /data/scripts/qwen3-8b-vanilla-v5p-128x2.slurm.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Here
# :sync: local
#
# This package on whatever JAX finds on this machine; it stops at once if the state does not fit the memory.
#
# ```{literalinclude} /data/scripts/qwen3-8b-vanilla-v5p-128x2.local.sh
# :language: bash
# ```
# :::
#
# ::::

# %% [markdown]
# ## Checkpoint, resume, bootstrap
#
# ```{include} /data/maxtext-commands.txt
# ```

# %% [markdown]
# ## Read the logs
#
# ```{include} /data/maxtext-logs.txt
# ```

# %% [markdown]
# ## Tune
#
# Published advice for these settings, each with where it was found; the last column says what is outside of it here.

# %% tags=["hide-input"]
parameters = decoder.num_parameters(recipe.model)
advice = tuning.advise(recipe.diloco, parameters, recipe.model.num_layers)
Markdown(tuning.table(advice))

# %% [markdown]
# ## What MaxText does that you must know
#
# ```{include} /data/maxtext-behaviour.txt
# ```

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
#
# * One setting, $H$, trades traffic against how far the islands part.
# * The burst is the whole model. If the link cannot carry it within a step or so, stream: {doc}`12_qwen3_8b_streaming_v5p`.
# :::
