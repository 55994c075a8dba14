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
# # Qwen3-8B on two v5p slices: streaming
#
# | | |
# |---|---|
# | **You will** | run the model in 37 fragments, one sent after each step |
# | **You will see** | why fragment 0 sets the link you need, the compiler's report for each kind of fragment, a toy run, the scripts |
# | **You need** | two v5p-128 slices for the run itself; for this page the package only: no TPU, no network |
# | **Time** | under a minute for this page on two idle cores |
#
# The same average traffic as one exchange of the model every 37 steps, but a layer at a time. It is MaxText's streaming example with the mixing of the paper.

# %%
import tempfile
from pathlib import Path

from IPython.display import Markdown

from diloco import conf, figures, recipes, report, tpu, tuning
from diloco.models import decoder
from diloco.plan import plan_command
from diloco.train import train


NAME = "qwen3-8b-streaming-v5p-128x2"
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
# Fragment 0, embedding and head, is several layers large and has the same window. Over 2 Gbit/s the average fits and fragment 0 is late:

# %%
plan_command(NAME, gbit=2.0)

# %% [markdown]
# ## What the TPU compiler says
#
# `diloco compile qwen3-8b-streaming-v5p-128x2` hands the whole train step, model, optimizer and exchange, to the TPU compiler for two slices of 64 chips.
# It needs no TPU. The report below was recorded with `python benchmarks/record_compiles.py`, and `--check` compiles again and fails on a drift over 1 %.

# %%
data = conf.conf_dir().parent / "docs" / "data"
compiled = tpu.from_json((data / "compiled" / f"{NAME}.json").read_text())
Markdown(tpu.table(compiled))

# %% [markdown]
# *Compiled*, for jax and libtpu of the versions in the record. The program has one branch for fragment 0 and one for all 36 layers: which layer is meant is data, so the program does not grow with $P$.

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
# Same settings, on 36 thin layers over bytes.

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
    "model sends: a short bar after every step and a tall one every 37 steps, when "
    "embedding and head go.",
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
# ```{literalinclude} /data/scripts/qwen3-8b-streaming-v5p-128x2.xpk.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} MaxText
# :sync: maxtext
#
# For TPU slices that are yours already: run it on every host.
#
# ```{literalinclude} /data/scripts/qwen3-8b-streaming-v5p-128x2.maxtext.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Slurm
# :sync: slurm
#
# This package on the GPUs of one node.
#
# ```{literalinclude} /data/scripts/qwen3-8b-streaming-v5p-128x2.slurm.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Here
# :sync: local
#
# This package on whatever JAX finds on this machine; it stops at once if the state does not fit the memory.
#
# ```{literalinclude} /data/scripts/qwen3-8b-streaming-v5p-128x2.local.sh
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
# * Streaming lowers the burst to the largest fragment, not to the mean.
# * $H = P$ sends after every step: no step is free of latency. {doc}`14_qwen3_8b_balanced_v5p` sends less often, and evenly.
# :::
