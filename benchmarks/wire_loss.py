"""Validation loss by wire format, with and without error feedback, on the laptop recipe over three seeds.

Writes docs/data/wire_loss.json after every run, and leaves out what the file already has.

    python benchmarks/wire_loss.py
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"

import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

import diloco
from diloco import inner
from diloco.recipes import load_recipe
from diloco.train import train


FILE = Path(__file__).parents[1] / "docs" / "data" / "wire_loss.json"
RECIPE = "laptop-diloco"
SEEDS = (0, 1, 2)
WIRES = (
    ("float32", False),
    ("float4_e3m0", False),
    ("float4_e3m0", True),
    ("int8", False),
    ("bfloat16", False),
    ("int8", True),
    ("bfloat16", True),
)


def run(wire_format: str, error_feedback: bool, seed: int) -> dict:
    """Trains once; returns the steps and held-out losses of Theta, and the bytes of a sync."""
    recipe = load_recipe(
        RECIPE,
        [
            f"diloco.wire_format={wire_format}",
            f"diloco.error_feedback={str(error_feedback).lower()}",
            f"train.seed={seed}",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(recipe, Path(folder) / "run")
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    evals = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    params = jax.eval_shape(lambda: inner.init(recipe)["params"])
    fragments = diloco.partition(params, recipe.diloco).fragments
    return {
        "wire_format": wire_format,
        "error_feedback": error_feedback,
        "seed": seed,
        "sync_bytes": sum(f.wire_bytes for f in fragments),
        "sync_period": recipe.diloco.sync_period,
        "num_parameters": sum(f.num_parameters for f in fragments),
        "step": [r["step"] for r in evals],
        "loss": [round(r["outer_loss"], 5) for r in evals],
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
    for seed in SEEDS:
        for wire_format, error_feedback in WIRES:
            if (wire_format, error_feedback, seed) in have:
                continue
            new = run(wire_format, error_feedback, seed)
            runs.append(new)
            FILE.write_text(json.dumps(record(runs), indent=1) + "\n")
            print(wire_format, error_feedback, seed, new["loss"][-1], file=sys.stderr)


if __name__ == "__main__":
    main()
