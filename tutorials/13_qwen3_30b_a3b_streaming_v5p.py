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
# # Qwen3-30B-A3B on two v5p slices: streaming a mixture of experts
#
# | | |
# |---|---|
# | **You will** | run a mixture of experts in 49 fragments over ArrayRecord data |
# | **You will see** | that traffic follows all parameters while compute follows the active ones, the compiler's report, a toy run with experts, the scripts |
# | **You need** | two v5p-128 slices for the run itself; for this page the package only: no TPU, no network |
# | **Time** | under a minute for this page on two idle cores |
#
# A token meets 3.3 of 30.5 billion parameters. Compute shrinks ninefold and the exchange does not, so the link matters more than for a dense model of the same speed.

# %%
import tempfile
from pathlib import Path

from IPython.display import Markdown

from diloco import conf, figures, recipes, report, tpu, tuning
from diloco.models import decoder
from diloco.plan import plan_command
from diloco.train import train


NAME = "qwen3-30b-a3b-streaming-v5p-128x2"
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
# ## What the TPU compiler says
#
# `diloco compile qwen3-30b-a3b-streaming-v5p-128x2` hands the whole train step, model, optimizer and exchange, to the TPU compiler for two slices of 64 chips.
# It needs no TPU. The report below was recorded with `python benchmarks/record_compiles.py`, and `--check` compiles again and fails on a drift over 1 %.

# %%
data = conf.conf_dir().parent / "docs" / "data"
compiled = tpu.from_json((data / "compiled" / f"{NAME}.json").read_text())
Markdown(tpu.table(compiled))

# %% [markdown]
# *Compiled*, for jax and libtpu of the versions in the record. Nearly all of a fragment is experts. Their output matrices are cut along the experts: along their 768 rows, 64 chips would get 12 each, which the chip pads to 16 on the wire too.

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
# Same settings, on 48 thin layers with four experts each.

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
    "model sends: a bar of nearly the same height after every step.",
)

# %% [markdown]
# *Measured* above, on the machine that built this page ({doc}`/reference/status`): the toy's loss. *Simulated* below: the wire bytes that the
# full-size model sends after each step, by the same schedule. The twin shows the schedule at work. It says nothing about the loss at full size, which was not measured.

# %% [markdown]
# ## Run it
#
# Data is read with Grain from ArrayRecord files, so that a resumed run goes on at its own place. Every script passes shellcheck, and the XPK one was accepted by the real `xpk --dry-run`.
#
# ::::{tab-set}
# :sync-group: target
#
# :::{tab-item} XPK (GKE)
# :sync: xpk
#
# Submits the MaxText command below to a GKE cluster of TPU slices.
#
# ```{literalinclude} /data/scripts/qwen3-30b-a3b-streaming-v5p-128x2.xpk.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} MaxText
# :sync: maxtext
#
# For TPU slices that are yours already: run it on every host.
#
# ```{literalinclude} /data/scripts/qwen3-30b-a3b-streaming-v5p-128x2.maxtext.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Slurm
# :sync: slurm
#
# This package on the GPUs of one node.
#
# ```{literalinclude} /data/scripts/qwen3-30b-a3b-streaming-v5p-128x2.slurm.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Here
# :sync: local
#
# This package on whatever JAX finds on this machine; it stops at once if the state does not fit the memory.
#
# ```{literalinclude} /data/scripts/qwen3-30b-a3b-streaming-v5p-128x2.local.sh
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
#
# * This package gives an expert a fixed number of slots (`model.capacity_factor`); MaxText drops no token. Losses of the two are close, not equal.

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
# * Plan a mixture of experts by all its parameters.
# * Here fragment 0 is no larger than a layer, so `strided` is balanced already.
# :::
