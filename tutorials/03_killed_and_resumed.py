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
# # Killed and resumed
#
# | | |
# |---|---|
# | **You will** | train, kill the run with `SIGKILL` while a fragment is on its way, resume it, and compare it with a run that nobody killed |
# | **You will see** | two curves that are one: every number, every byte of the log and every parameter is the same |
# | **You need** | the package; no accelerator, no network |
# | **Time** | under a minute on two idle cores |
#
# `SIGKILL` is the harshest end a process can have: it gets no chance to write anything. What the run goes on from is the last
# checkpoint that was complete by then.
#
# ## The run
#
# Streaming DiLoCo with three fragments: each is sent every 12 steps and applied 4 steps later, as 4-bit floats with error feedback.
# So there are steps between which a fragment has been sent and has not reached the islands yet.

# %%
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
from safetensors.numpy import load_file

import diloco
from diloco import figures, recipes
from diloco.train import train


SETTINGS = [
    "model.name=tiny",
    "data.sequence_length=32",
    "train.steps=45",
    "train.warmup_steps=5",
    "train.global_batch_size=8",
    "train.eval_every=15",
    "train.eval_sequences=8",
    "diloco.sync_period=12",
    "diloco.num_fragments=3",
    "diloco.overlap_steps=4",
    "diloco.mixing=0.5",
    "diloco.wire_format=float4_e3m0",
    "diloco.error_feedback=true",
]
recipe = recipes.load_recipe("laptop-diloco", SETTINGS)
plan = diloco.schedule(recipe.diloco)
folder = Path(tempfile.mkdtemp())
# Three runs of one program: compile it once.
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def in_flight(t):
    """Fragments that were sent by step t and are applied after it."""
    ages = range(recipe.diloco.overlap_steps)
    return [p for age in ages if t - age > 0 for p in plan.sends(t - age)]


print("fragments in flight after steps 28 to 36:", {t: in_flight(t) for t in range(28, 37)})

# %% [markdown]
# ## Kill it
#
# The same command line that anyone would use, in a process of its own, with a checkpoint every 7 steps. We watch its log and kill
# it after step 30, when fragment 1 is on its way.

# %%
command = [sys.executable, "-m", "diloco", "train", "laptop-diloco"]
command += ["--run-dir", str(folder / "killed"), "--save-every", "7"]
for setting in SETTINGS:
    command += ["--set", setting]
environment = os.environ | {
    # One device, as here: sums over several CPU devices may differ in their last bit. Else the same compiler settings.
    "XLA_FLAGS": " ".join(
        f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f
    ),
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
with open(folder / "output", "w") as output:
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def steps_done(run):
    metrics = folder / run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


while process.poll() is None and not any(r["step"] >= 30 for r in steps_done("killed")):
    time.sleep(0.002)
process.send_signal(signal.SIGKILL)
process.wait()

died = steps_done("killed")[-1]["step"]
saved = diloco.latest(folder / "killed" / "checkpoints")
print("exit status:", process.returncode)
print("last step in the log:", died)
print("newest intact checkpoint: step", saved, "with fragments", in_flight(saved), "in flight")
assert process.returncode == -signal.SIGKILL and in_flight(saved)

# %% [markdown]
# ## Resume it, and run it undisturbed
#
# The same call does both: a run directory with a checkpoint goes on, an empty one starts.

# %%
resumed = train(recipe, folder / "killed", save_every=7)
whole = train(recipe, folder / "whole", save_every=7)

# %% [markdown]
# ## Compare

# %%
same_log = (folder / "killed" / "metrics.jsonl").read_bytes() == (
    folder / "whole" / "metrics.jsonl"
).read_bytes()
theta = [load_file(folder / run / "outer_params.safetensors") for run in ("killed", "whole")]
same_theta = all(theta[0][name].tobytes() == theta[1][name].tobytes() for name in theta[1])
print("the logs are equal byte for byte:", same_log)
print("every parameter of the result is equal bit for bit:", same_theta)
assert same_log and same_theta

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.4))
for run, style, width in (("whole", "-", 5), ("killed", "--", 1.5)):
    rows = [r for r in steps_done(run) if r["kind"] == "train"]
    label = (
        "never interrupted" if run == "whole" else f"killed after step {died}, resumed at {saved}"
    )
    ax.plot(
        [r["step"] for r in rows],
        [sum(r["loss"]) / len(r["loss"]) for r in rows],
        style,
        lw=width,
        alpha=0.45 if run == "whole" else 1.0,
        label=label,
    )
ax.axvline(saved, lw=1, ls=":", color="gray")
ax.axvline(died, lw=1, ls=":", color="gray")
ax.set_xlabel("inner step")
ax.set_ylabel("training loss, nats a byte")
ax.legend()
figures.show(
    fig,
    alt="Training loss against inner step of the interrupted and of the undisturbed run: the two curves lie on top of each other.",
)

# %% [markdown]
# ## Why it works
#
# Between two steps nothing is on its way. A send updates Θ at once; applying it later only reads Θ. So the state after any step, also
# between a send and its application, is all there is, and a checkpoint of it loses nothing: {doc}`../design/state` has the list.
# The page {doc}`../how-to/checkpoints` has the options, and what happens when a disk is full or a file is damaged.
#
# What this does not show: bit-equality holds on the same kind of device with the same software. On other hardware sums are taken in
# another order, and a resumed run differs by rounding.
