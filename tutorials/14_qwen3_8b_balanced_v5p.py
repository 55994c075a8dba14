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
# # Qwen3-8B over a slow link: balanced fragments in 4 bits
#
# | | |
# |---|---|
# | **You will** | see what the planner prefers when the islands are far apart |
# | **You will see** | three recipes compared over three links, the compiler's report, a toy run, the scripts |
# | **You need** | two v5p-128 slices, or GPUs, for the run itself; for this page the package only: no TPU, no network |
# | **Time** | under a minute for this page on two idle cores |
#
# Our own settings. 37 fragments within 2 % of one size, 100 steps between two sends of the same, four bits a parameter, and one step for each to arrive.

# %%
import tempfile
from pathlib import Path

from IPython.display import Markdown

from diloco import conf, figures, links, recipes, report, targets, tpu, tuning
from diloco.models import decoder
from diloco.plan import plan_command
from diloco.planner import plan
from diloco.train import train


NAME = "qwen3-8b-balanced-v5p-128x2"
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
# *Simulated*, over a link of 1 Gbit/s between the islands:

# %%
plan_command(NAME, gbit=1.0)

# %% [markdown]
# ### Against the other two
#
# The share of the time in which the islands compute, *simulated*:

# %%
NAMES = {
    "vanilla": "qwen3-8b-vanilla-v5p-128x2",
    "streaming": "qwen3-8b-streaming-v5p-128x2",
    "balanced, 4 bits": NAME,
}
chip = links.load_hardware(recipe.hardware.name)
rows = []
for label, name in NAMES.items():
    other = recipes.load_recipe(name)
    settings = {
        "chips_per_island": 64,
        "sequence_length": other.data.sequence_length,
        "sequences_per_island": other.train.global_batch_size // 2,
        "model_flops_utilization": other.hardware.utilization,
    }
    found = [
        plan(other.model, chip, other.diloco, gbit_per_second=g, **settings)
        for g in (10.0, 1.0, 0.25)
    ]
    f = found[0]
    rates = f"{f.average_gbit_per_second:.3f} | {f.peak_gbit_per_second:.3f}"
    used = " | ".join(f"{p.utilization:.1%}" for p in found)
    rows.append(f"| {label} | {rates} | {f.largest_over_mean:.2f} | {used} |")
head = "| recipe | average Gbit/s | burst Gbit/s | largest / mean "
head += "| at 10 Gbit/s | at 1 Gbit/s | at 0.25 Gbit/s |"
Markdown("\n".join([head, "|---|---|---|---|---|---|---|", *rows]))

# %% [markdown]
# ## What the TPU compiler says
#
# `diloco compile qwen3-8b-balanced-v5p-128x2` hands the whole train step, model, optimizer and exchange, to the TPU compiler for two slices of 64 chips.
# It needs no TPU. The report below was recorded with `python benchmarks/record_compiles.py`, and `--check` compiles again and fails on a drift over 1 %.

# %%
data = conf.conf_dir().parent / "docs" / "data"
compiled = tpu.from_json((data / "compiled" / f"{NAME}.json").read_text())
Markdown(tpu.table(compiled))

# %% [markdown]
# *Compiled*, for jax and libtpu of the versions in the record. The payload is bytes: the compiler gathers `uint8` codes and a scale for each 256 of them, inside the send branch only. The program has two branches, as with `strided`: fragment 0, which holds no layer, and all 36 others, which hold a layer and equal slices of embedding and head.

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
# Same settings, balanced fragments and 4-bit wire included, on 36 thin layers over bytes.

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
    "model sends: short bars of one height, about one in three steps.",
)

# %% [markdown]
# *Measured* above, on the machine that built this page ({doc}`/reference/status`): the toy's loss. *Simulated* below: the wire bytes that the
# full-size model sends after each step, by the same schedule. The twin shows the schedule at work. It says nothing about the loss at full size, which was not measured.

# %% [markdown]
# ## Run it
#
# MaxText has no flag for balanced fragments or for a wire format, and the renderer says so in place of dropping them:

# %%
try:
    targets.render(recipe, "maxtext")
except ValueError as error:
    print(error)

# %% [markdown]
# Both of these pass shellcheck.
#
# ::::{tab-set}
# :sync-group: target
#
# :::{tab-item} Slurm
# :sync: slurm
#
# This package on the GPUs of one node.
#
# ```{literalinclude} /data/scripts/qwen3-8b-balanced-v5p-128x2.slurm.sh
# :language: bash
# ```
# :::
#
# :::{tab-item} Here
# :sync: local
#
# This package on whatever JAX finds on this machine; it stops at once if the state does not fit the memory.
#
# ```{literalinclude} /data/scripts/qwen3-8b-balanced-v5p-128x2.local.sh
# :language: bash
# ```
# :::
#
# ::::

# %% [markdown]
# ## Checkpoint, resume, bootstrap
#
#
# `diloco train` saves every `--save-every` steps and goes on by itself after a kill:
#
# ```bash
# bash run.sh                       # start, and resume: same RUN_DIR
# bash run.sh --resume 500          # go back to a checkpoint
# ```
#
# {doc}`/how-to/checkpoints` has bootstrap from one island and a changed number of islands.

# %% [markdown]
# ## Read the logs
#
#
# * `metrics.jsonl` has a line a step with the loss and gradient norm of each island, and a line a validation with the loss of $\Theta$.
# * `skipped` counts sends at which an island's pseudo-gradient was not finite.
# * `diloco report RUN_DIR...` draws loss, divergence and traffic of runs side by side.

# %% [markdown]
# ## Tune
#
# Published advice for these settings, each with where it was found; the last column says what is outside of it here.

# %% tags=["hide-input"]
parameters = decoder.num_parameters(recipe.model)
advice = tuning.advise(recipe.diloco, parameters, recipe.model.num_layers)
Markdown(tuning.table(advice))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
#
# * Balance first: the largest fragment sets the link.
# * Four bits and $H = 100$ cut the average by the same factors that they cut the burst.
# * Nothing was trained at this size. {doc}`/theory/compression` says what is known about 4 bits.
# :::
