"""Runs a recipe: the loop, and the run directory it leaves behind.

The loop is `(state, batches, step)`: everything that a run needs to go on is in these three.
"""

import json
import math
import platform
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import diloco
from diloco import data, inner, sharding, spmd
from diloco.models import decoder
from diloco.recipes import Recipe
from diloco.runlog import RunLog
from diloco.schedule import schedule
from diloco.state import DiLoCoState


class Result(NamedTuple):
    """What a run ends with.

    Attributes:
        run_dir: Where it was written.
        state: The last state, after the flush.
        summary: As in `summary.json`.
    """

    run_dir: Path
    state: DiLoCoState
    summary: dict[str, Any]


class Program(NamedTuple):
    """The compiled functions of a run.

    Attributes:
        step: `(state, batch) -> (state, metrics)`; takes the state's buffers over.
        measure: `(state, batch) -> values`, the divergence of the islands before a send.
        evaluate: `(state, tokens) -> values`, the held-out losses.
        flush: `state -> state`, everything sent and applied.
    """

    step: Any
    measure: Any
    evaluate: Any
    flush: Any


def build(recipe: Recipe, mesh: Mesh | None = None) -> Program:
    """Builds the compiled functions of a run.

    Args:
        recipe: Of the run.
        mesh: A mesh with an `islands` axis; None for one device.

    Returns:
        The functions; each compiles when it is first called.
    """
    step = spmd.build_train_step(recipe.diloco, inner.build_step(recipe, mesh), mesh=mesh)
    return Program(
        step=jax.jit(step, donate_argnums=0),
        measure=jax.jit(inner.build_measure(recipe, mesh)),
        evaluate=jax.jit(inner.build_evaluate(recipe, mesh)),
        flush=lambda state: spmd.flush(recipe.diloco, state, mesh=mesh),
    )


def start(recipe: Recipe, mesh: Mesh | None = None) -> DiLoCoState:
    """Returns the state at step 0, on the mesh."""
    one = inner.init(recipe)
    if mesh is not None:
        specs = decoder.param_specs(recipe.model, mesh.axis_names)
        one["params"] = jax.tree.map(
            lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), one["params"], specs
        )
        one["opt_state"] = jax.jit(inner.optimizer(recipe.train).init)(one["params"])
    return spmd.init(recipe.diloco, one, mesh=mesh)


def device_mesh(recipe: Recipe) -> Mesh | None:
    """Returns a mesh over all devices, islands outermost; None if there is one device.

    Raises:
        ValueError: If the islands do not divide the devices, or the devices of an island its sequences.
    """
    devices, islands = jax.device_count(), recipe.diloco.num_islands
    if devices == 1:
        return None
    if devices % islands:
        raise ValueError(
            f"{devices} devices do not divide into diloco.num_islands {islands}; "
            f"use a number of islands that divides {devices}"
        )
    sequences, each = recipe.train.global_batch_size // islands, devices // islands
    if sequences % each:
        raise ValueError(
            f"the {sequences} sequences of an island are not divisible by its {each} devices; "
            f"use train.global_batch_size={-(-sequences // each) * each * islands}"
        )
    return sharding.make_mesh(islands, fsdp=each)


def train(
    recipe: Recipe,
    run_dir: Path | str | None = None,
    *,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Result:
    """Trains a recipe and writes its run directory.

    `recipe.toml` has every setting, `versions.json` the software, `metrics.jsonl` a record a step, a measured send
    and a validation, `outer_params.safetensors` Theta after the last send, `summary.json` the end.

    Args:
        recipe: What to run.
        run_dir: Where to write; `runs/NAME` if None.
        mesh: A mesh with an `islands` axis, such as `device_mesh(recipe)`; None for one device.
        progress: Whether to show progress.

    Returns:
        The last state and the summary.

    Raises:
        ValueError: If the directory holds a run already, the corpus does not fit, or the loss of an island is
            not finite while `on_bad_island` is `"error"`.
        OSError: If the directory cannot be written.
    """
    began = time.perf_counter()
    run_dir = Path(run_dir) if run_dir is not None else Path("runs") / recipe.name
    if (run_dir / "metrics.jsonl").exists():
        raise ValueError(f"{run_dir} already holds a run; give another --run-dir or remove it")
    corpus = data.load_corpus(recipe.data.corpus)
    batches, tokens = open_batches(recipe, corpus), _held_out(recipe, corpus)
    program, state = build(recipe, mesh), start(recipe, mesh)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    (run_dir / "versions.json").write_text(
        json.dumps(versions() | {"corpus": corpus.digest}, indent=2) + "\n"
    )

    log = RunLog(run_dir / "metrics.jsonl", steps=recipe.train.steps, show=progress)
    try:
        log.say(f"{recipe.name}: {corpus.train.size:,} bytes of {corpus.name} to train on")
        state = _loop(recipe, program, state, batches, tokens, log, mesh)
        state, summary = _finish(recipe, program, state, tokens, log)
    finally:
        log.close()
    summary["unigram_entropy"] = round(data.unigram_entropy(corpus), 4)
    summary["seconds"] = round(time.perf_counter() - began, 3)
    summary["tokens_per_second"] = round(log.tokens_per_second, 1)
    save_file(flat_params(state.outer_params), run_dir / "outer_params.safetensors")
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return Result(run_dir, state, summary)


def open_batches(recipe: Recipe, corpus: data.Corpus) -> data.IslandBatches:
    """Returns the batches of a run from its first step on, `[M, B / M, S + 1]` each."""
    return data.island_iterators(
        corpus,
        num_islands=recipe.diloco.num_islands,
        batch_size=recipe.train.global_batch_size,
        sequence_length=recipe.data.sequence_length,
        split=recipe.data.split,
        seed=recipe.train.seed,
    )


def _held_out(recipe: Recipe, corpus: data.Corpus) -> np.ndarray:
    """Returns the tokens of a validation, `[K, B, S + 1]`, at most 16 sequences at a time."""
    tokens = data.held_out(corpus, recipe.data.sequence_length, recipe.train.eval_sequences)
    return tokens.reshape(-1, math.gcd(len(tokens), 16), tokens.shape[-1])


def _loop(
    recipe: Recipe,
    program: Program,
    state: DiLoCoState,
    batches: Iterator[np.ndarray],
    held_out: np.ndarray,
    log: RunLog,
    mesh: Mesh | None,
) -> DiLoCoState:
    period, every = recipe.diloco.sync_period, recipe.train.eval_every
    measure_every = period * math.ceil(every / period)
    for step in range(int(state.step) + 1, recipe.train.steps + 1):
        batch = _put(next(batches), mesh)
        if step % measure_every == 0:
            log.add("outer", step, program.measure(state, batch))
        state, metrics = program.step(state, batch)
        _check(recipe, log.add("train", step, metrics))
        if step % every == 0 and step < recipe.train.steps:
            _check(recipe, log.add("eval", step, program.evaluate(state, held_out)))
    return state


def _finish(
    recipe: Recipe, program: Program, state: DiLoCoState, held_out: np.ndarray, log: RunLog
) -> tuple[DiLoCoState, dict[str, Any]]:
    """Evaluates, sends what no island has sent yet, and evaluates again."""
    config, steps = recipe.diloco, recipe.train.steps
    log.add("eval", steps, program.evaluate(state, held_out))
    plan = schedule(config)
    up_to_date = config.num_fragments == 1 and config.overlap_steps == 0 and plan.sends(steps)
    if not up_to_date:
        log.say(
            f"step {steps}: some inner steps are not in Θ yet; sending every fragment once more"
        )
        state = program.flush(state)
        log.add("eval", steps, program.evaluate(state, held_out))
    records = log.drain()
    _check(recipe, records)
    losses = [r["outer_loss"] for r in records if r["kind"] == "eval"]
    return state, {
        "steps": steps,
        "tokens": sum(records[-1]["tokens"]),
        "outer_loss": losses[-1],
        "outer_loss_before_flush": losses[0],
        "flushed": not up_to_date,
        "skipped": np.asarray(state.skipped).tolist(),
    }


def _check(recipe: Recipe, records: list[dict[str, Any]]) -> None:
    """Stops the run at the first loss that is not finite, unless bad islands are to be skipped."""
    if recipe.diloco.on_bad_island == "skip":
        return
    for record in records:
        losses = record["loss"] if record["kind"] == "train" else []
        for island, value in enumerate(losses):
            if value is None:
                raise ValueError(
                    f"the loss of island {island} is not finite at step {record['step']}; lower "
                    "train.learning_rate, or leave such islands out with diloco.on_bad_island=skip"
                )


def _put(batch: np.ndarray, mesh: Mesh | None) -> Any:
    """Moves a batch `[M, B / M, S + 1]` to the devices, islands and their sequences spread over the mesh."""
    return (
        batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P("islands", "fsdp")))
    )


def flat_params(params: Any) -> dict[str, np.ndarray]:
    """Returns a parameter tree as one dict of arrays, its keys joined by dots.

    Example:
        >>> list(flat_params({"layers": {"wq": np.ones(2)}}))
        ['layers.wq']
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.ascontiguousarray(leaf)
        for path, leaf in leaves
    }


def versions() -> dict[str, str]:
    """Returns the versions of the software and the kind of device that make a run what it is."""
    packages = ("jax", "jaxlib", "optax", "drjax", "grain", "numpy")
    device = jax.devices()[0]
    return {
        "diloco": diloco.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "device": f"{jax.device_count()} x {device.platform} {device.device_kind}",
    }
