"""Runs a recipe: the loop, and the run directory it leaves behind.

The loop is `(state, batches, step)`: everything that a run needs to go on is in these three.
"""

import json
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import diloco
from diloco import data, export, health, storage
from diloco import resume as resuming
from diloco.checkpoint import Checkpoints
from diloco.program import Program, build, check_memory, open_batches, start
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


def train(
    recipe: Recipe,
    run_dir: Path | str | None = None,
    *,
    mesh: Mesh | None = None,
    progress: bool = False,
    save_every: int = 50,
    keep: int = 2,
    resume: resuming.Resume = "auto",
    allow_change: bool = False,
) -> Result:
    """Trains a recipe and writes its run directory; goes on by itself where an interrupted run was saved last.

    `recipe.toml` has every setting, `versions.json` the software, `metrics.jsonl` a record a step, a measured send
    and a validation, `outer_params.safetensors` Theta after the last send, `summary.json` the end, `checkpoints` what
    a run goes on from. SIGTERM or Ctrl-C saves and ends the run early; a run that went on writes the same files as one that was
    never interrupted.

    Args:
        recipe: What to run.
        run_dir: Where to write; `runs/NAME` if None.
        mesh: A mesh with an `islands` axis, such as `device_mesh(recipe)`; None for one device.
        progress: Whether to show progress.
        save_every: Inner steps between two checkpoints, 1 or more.
        keep: Newest checkpoints to keep.
        resume: `"auto"`, `"never"`, or the step of a checkpoint; checkpoints of later steps are removed then.
        allow_change: Whether a run may go on with another recipe; see `diloco.restore` and `diloco.resize`.

    Returns:
        The last state and the summary; after these the summary is `{"stopped_at": step}`.

    Raises:
        ValueError: If the directory holds a run already that cannot go on, or is in use, the corpus or the memory
            does not fit, or an island's loss or pseudo-gradient is not finite while `on_bad_island` is `"error"`.
        OSError: If the directory cannot be written.
    """
    began = time.perf_counter()
    run_dir = Path(run_dir) if run_dir is not None else Path("runs") / recipe.name
    if ":/" in str(run_dir):
        raise ValueError(f"run_dir {run_dir} is not a local path; give one")
    if save_every < 1:
        raise ValueError(f"save_every {save_every} is below 1; use 1 or more inner steps")
    if recipe.model.vocab_size < 256:
        raise ValueError(
            f"model.vocab_size {recipe.model.vocab_size} is below 256, the bytes of a text; use 256 or more"
        )
    # Before anything is written: a mistake in the recipe leaves no directory behind.
    corpus = data.load_corpus(recipe.data.corpus)
    batches, tokens = open_batches(recipe, corpus), _held_out(recipe, corpus)
    check_memory(recipe)
    with (
        storage.writing(run_dir),
        Checkpoints(run_dir / "checkpoints", keep=keep) as checkpoints,
        resuming.stop_signal() as stop,
    ):
        step = resuming.place(recipe, run_dir, resume)
        program, state = build(recipe, mesh), start(recipe, mesh)
        settings = resuming.settings(recipe, corpus)

        def save(state: DiLoCoState, log_bytes: int, tokens: list[int]) -> None:
            extras = {"data": batches.get_state(), "log_bytes": log_bytes, "tokens": tokens}
            checkpoints.save(recipe.diloco, state, settings=settings, extras=extras)

        seen = [0] * recipe.diloco.num_islands
        if step is None:
            save(state, 0, seen)
            checkpoints.wait()  # from here on there is always something to go on from
        else:
            like = jax.tree.map(resuming.abstract, state)
            del state  # before the restored one takes its place
            state, size, seen = resuming.load(
                recipe, run_dir, step, like, batches, settings, mesh=mesh, allow_change=allow_change
            )
            if resume != "auto":
                checkpoints.drop_after(step)  # first: none may need what is cut off the log
            resuming.cut_log(run_dir, size)
        (run_dir / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
        (run_dir / "versions.json").write_text(
            json.dumps(versions() | {"corpus": corpus.digest}, indent=2) + "\n"
        )
        (run_dir / "summary.json").unlink(missing_ok=True)

        log = RunLog(
            run_dir / "metrics.jsonl",
            seen,
            steps=recipe.train.steps,
            start=step or 0,
            show=progress,
        )
        try:
            log.say(f"{recipe.name}: {corpus.train.size:,} bytes of {corpus.name} to train on")
            if step is not None:
                log.say(f"step {step}: going on from the checkpoint in {run_dir}")
            state = _loop(
                recipe, program, state, batches, tokens, log, mesh, save, save_every, stop
            )
            if stop.is_set():
                checkpoints.wait()
                log.say(
                    f"step {int(state.step)}: asked to stop; saved, the same command goes on from here"
                )
                return Result(run_dir, state, {"stopped_at": int(state.step)})
            state, summary = _finish(recipe, program, state, tokens, log)
        finally:
            log.close()
        summary["unigram_entropy"] = round(data.unigram_entropy(corpus), 4)
        summary["seconds"] = round(time.perf_counter() - began, 3)
        rate = log.tokens_per_second
        summary["tokens_per_second"] = round(rate, 1) if math.isfinite(rate) else None
        checkpoints.wait()
        export.to_safetensors(state.outer_params, run_dir / "outer_params.safetensors")
        # A run killed here has no summary rather than half of one.
        scratch = run_dir / "summary.json.tmp"
        scratch.write_text(json.dumps(summary, indent=2) + "\n")
        scratch.replace(run_dir / "summary.json")
        return Result(run_dir, state, summary)


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
    save: Callable[[DiLoCoState, int, list[int]], None],
    save_every: int,
    stop: threading.Event,
) -> DiLoCoState:
    period, every, last = recipe.diloco.sync_period, recipe.train.eval_every, recipe.train.steps
    measure_every = period * math.ceil(every / period)
    skipped = np.asarray(state.skipped).tolist()
    for step in range(int(state.step) + 1, last + 1):
        batch = _put(next(batches), mesh)
        if step % measure_every == 0:
            log.add("outer", step, program.measure(state, batch))
        state, metrics = program.step(state, batch)
        records = log.add("train", step, metrics)
        skipped = health.check_records(recipe.diloco, records, state, skipped, log.say)
        if step % every == 0 and step < last:
            records = log.add("eval", step, program.evaluate(state, held_out))
            skipped = health.check_records(recipe.diloco, records, state, skipped, log.say)
        stopping = stop.is_set()
        if stopping or step % save_every == 0 or step == last:
            # What is saved is checked first, and its records are in the log.
            skipped = health.check_records(recipe.diloco, log.drain(), state, skipped, log.say)
            health.check_state(recipe.diloco, state)
            save(state, log.bytes, log.tokens)
            log.check()  # after the save: what it lacks can be put back
        if stopping:
            break
    return state


def _finish(
    recipe: Recipe, program: Program, state: DiLoCoState, held_out: np.ndarray, log: RunLog
) -> tuple[DiLoCoState, dict[str, Any]]:
    """Evaluates, sends what no island has sent yet, and evaluates again."""
    config, steps = recipe.diloco, recipe.train.steps
    skipped = np.asarray(state.skipped).tolist()
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
    sent = {
        "kind": "train",
        "step": steps,
        "loss": [],
        "skipped": np.asarray(state.skipped).tolist(),
    }
    health.check_records(config, [sent], state, skipped, log.say)
    losses = [r["outer_loss"] for r in records if r["kind"] == "eval"]
    return state, {
        "steps": steps,
        "tokens": sum(records[-1]["tokens"]),
        "outer_loss": losses[-1],
        "outer_loss_before_flush": losses[0],
        "flushed": not up_to_date,
        "skipped": np.asarray(state.skipped).tolist(),
    }


def _put(batch: np.ndarray, mesh: Mesh | None) -> Any:
    """Moves a batch `[M, B / M, S + 1]` to the devices, islands and their sequences spread over the mesh."""
    return (
        batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P("islands", "fsdp")))
    )


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
