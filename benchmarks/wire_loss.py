"""Validation loss by wire format, with and without error feedback, on the laptop recipe over three seeds.

Writes docs/data/wire_loss.json after every run, and leaves out what the file already has.

    python benchmarks/wire_loss.py
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import json
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

import diloco
from diloco import data, inner, train
from diloco.recipes import load_recipe


FILE = Path(__file__).parents[1] / "docs" / "data" / "wire_loss.json"
RECIPE = "laptop-diloco"
SEEDS = (0, 1, 2)
WIRES = (
    ("float32", False),
    ("float4_e3m0", False),
    ("float4_e3m0", True),
    ("int8", False),
    ("bfloat16", False),
)


def run(wire_format: str, error_feedback: bool, seeds: list[int]) -> Iterator[dict]:
    """Trains once a seed with one compiled program; yields steps, losses of Theta and bytes of a sync."""
    recipe = load_recipe(
        RECIPE,
        [
            f"diloco.wire_format={wire_format}",
            f"diloco.error_feedback={str(error_feedback).lower()}",
        ],
    )
    size, length = recipe.train.global_batch_size, recipe.data.sequence_length
    corpus, program = data.load_corpus(recipe.data.corpus), train.build(recipe)
    held_out = data.held_out(corpus, length, recipe.train.eval_sequences)[None]
    params = jax.eval_shape(lambda: inner.init(recipe)["params"])
    fragments = diloco.partition(params, recipe.diloco).fragments
    for seed in seeds:
        seeded = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=seed))
        state, losses = train.start(seeded), {}
        batches = data.island_iterators(
            corpus,
            num_islands=recipe.diloco.num_islands,
            batch_size=size,
            sequence_length=length,
            split=recipe.data.split,
            seed=seed,
        )
        for step in range(1, recipe.train.steps + 1):
            state, _ = program.step(state, next(batches))
            if step % recipe.train.eval_every == 0:
                loss = program.evaluate(state, held_out)["outer_loss"]
                losses[step] = round(float(loss), 5)
        yield {
            "wire_format": wire_format,
            "error_feedback": error_feedback,
            "seed": seed,
            "sync_bytes": sum(f.wire_bytes for f in fragments),
            "sync_period": recipe.diloco.sync_period,
            "num_parameters": sum(f.num_parameters for f in fragments),
            "step": list(losses),
            "loss": list(losses.values()),
        }


def record(runs: list[dict]) -> dict:
    """Returns what the file holds."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "record": {
            "command": "python benchmarks/wire_loss.py",
            "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, {memory:.0f} GiB",
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("jax", "jaxlib", "diloco")},
            "kind": "measured",
            "unit": {
                "wire_format": "name of the codec",
                "error_feedback": "whether it was on",
                "seed": "of parameters and data order",
                "sync_bytes": "bytes one island sends in a sync, scales included",
                "sync_period": "inner steps",
                "num_parameters": "parameters",
                "step": "inner steps at each validation",
                "loss": "held-out cross entropy of the outer parameters, nats a byte",
            },
        },
        "recipe": RECIPE,
        "runs": runs,
    }


def main() -> None:
    """Runs what is missing."""
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    have = {(r["wire_format"], r["error_feedback"], r["seed"]) for r in runs}
    for wire_format, error_feedback in WIRES:
        seeds = [s for s in SEEDS if (wire_format, error_feedback, s) not in have]
        for new in run(wire_format, error_feedback, seeds):
            runs.append(new)
            FILE.write_text(json.dumps(record(runs), indent=1) + "\n")
            print(wire_format, error_feedback, new["seed"], new["loss"][-1], file=sys.stderr)


if __name__ == "__main__":
    main()
