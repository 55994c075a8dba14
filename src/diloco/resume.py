"""Where a run goes on: what must be the same, its place in the data and in the log, the signal to stop."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from diloco import inner, islands, restoring, spmd
from diloco.config import DiLoCoConfig
from diloco.data import Corpus, IslandBatches
from diloco.recipes import Recipe
from diloco.state import DiLoCoState


log = logging.getLogger("diloco")

Resume = Literal["auto", "never"] | int


def settings(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Returns what must be the same when a run goes on, besides the algorithm: the text counts by its content.

    Args:
        recipe: Of the run.
        corpus: What it trains on.

    Returns:
        The settings for `diloco.save` and `diloco.restore`.
    """
    data = dataclasses.asdict(recipe.data) | {"corpus": corpus.digest}
    return {
        "model": dataclasses.asdict(recipe.model),
        "data": data,
        "train": dataclasses.asdict(recipe.train),
    }


def place(recipe: Recipe, run_dir: Path, resume: Resume) -> int | None:
    """Finds the step at which a run goes on.

    Args:
        recipe: What to run.
        run_dir: Its run directory, with `checkpoints` in it.
        resume: `"auto"` takes the newest intact checkpoint, if there is one; `"never"` starts; a number takes the
            checkpoint of that step.

    Returns:
        The step, or None to start.

    Raises:
        ValueError: If the directory holds a run that cannot or shall not go on, or all its checkpoints are damaged.
    """
    metrics, summary = run_dir / "metrics.jsonl", run_dir / "summary.json"
    directory = run_dir / "checkpoints"
    saved = restoring.steps(directory)
    if resume != "never" and saved:
        finished = summary.exists() and saved[-1] >= recipe.train.steps
        if resume != "auto" or not finished:
            step = restoring.inspect(directory, None if resume == "auto" else resume)["step"]
            if step > recipe.train.steps:
                raise ValueError(
                    f"the checkpoint of step {step} in {directory} is beyond train.steps {recipe.train.steps}; "
                    "raise train.steps, or give an earlier step to --resume"
                )
            return step
    elif isinstance(resume, int):
        raise ValueError(
            f"{run_dir} has no checkpoint to resume from; leave --resume out to start a run"
        )
    results = (metrics, summary, run_dir / "outer_params.safetensors", run_dir / "recipe.toml")
    if saved or any(path.exists() for path in results):
        raise ValueError(f"{run_dir} already holds a run; give another --run-dir or remove it")
    return None


def load(
    recipe: Recipe,
    run_dir: Path,
    step: int,
    like: DiLoCoState,
    batches: IslandBatches,
    settings: dict[str, Any],
    *,
    mesh: Mesh | None,
    allow_change: bool,
) -> tuple[DiLoCoState, int, list[int]]:
    """Restores the state, puts the batches at their place, and finds the place in the log; writes nothing.

    With `allow_change` the number of islands may differ too: those that stay keep their state, newcomers copy the
    optimizer state of island 0, and the examples nobody has seen are dealt again.

    Args:
        recipe: What to run.
        run_dir: Its run directory.
        step: What `place` returned.
        like: The state as it is to be, arrays or `jax.ShapeDtypeStruct`s.
        batches: Of the recipe, at their start.
        settings: What `settings` returns.
        mesh: Of the run.
        allow_change: Whether the recipe may differ from the one that was saved.

    Returns:
        The state, the bytes of the log that belong to it, and the tokens that each island has seen.

    Raises:
        ValueError: As for `diloco.restore`, or if the log lacks what was in it or is damaged.
    """
    directory = run_dir / "checkpoints"
    manifest = restoring.inspect(directory, step)
    before, now = DiLoCoConfig(**manifest["algorithm"]), recipe.diloco
    resized = before.num_islands != now.num_islands and allow_change
    old = dataclasses.replace(now, num_islands=before.num_islands)
    if resized:
        like = jax.eval_shape(lambda: spmd.init(old, inner.init(recipe)))
    state, extras = restoring.restore(
        directory, now, like, step=step, settings=settings, allow_change=allow_change
    )
    if resized:
        state = islands.resize(old, state, now.num_islands, newcomers="copy", mesh=mesh)
    saved = manifest["settings"]
    if (saved["data"], saved["train"]["seed"]) == (settings["data"], settings["train"]["seed"]):
        batches.set_state(extras["data"])
    else:
        log.warning("the data or their order differ; they start at their beginning")
    size = log_bytes(run_dir)
    if size < extras["log_bytes"]:
        raise ValueError(
            f"{run_dir / 'metrics.jsonl'} has {size} bytes, but had {extras['log_bytes']} at step {step}; "
            "put it back, or start anew with another --run-dir"
        )
    seen = _tokens(run_dir / "metrics.jsonl", extras["log_bytes"])
    return state, extras["log_bytes"], [*seen, *[0] * now.num_islands][: now.num_islands]


def abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns shape, type and place of an array without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def log_bytes(run_dir: Path) -> int:
    """Returns the length of the run's log; what is written behind it later belongs to later steps."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.stat().st_size if metrics.exists() else 0


def cut_log(run_dir: Path, size: int) -> None:
    """Cuts the run's log back to its first bytes; what comes behind belongs to steps that are done again.

    Args:
        run_dir: The run directory.
        size: Bytes to keep.
    """
    if log_bytes(run_dir) > size:
        os.truncate(run_dir / "metrics.jsonl", size)


def _tokens(metrics: Path, size: int) -> list[int]:
    """Reads the tokens each island has seen from the last line that is kept; empty if there is none."""
    if not size:
        return []
    with metrics.open("rb") as file:
        kept = file.read(size)
    try:
        seen = json.loads(kept.splitlines()[-1])["tokens"]
        if kept.endswith(b"\n") and all(type(n) is int for n in seen):
            return seen
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{metrics} is damaged: no record ends at byte {size}; put it back, or start anew with another --run-dir"
    )


@contextlib.contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM, which announces that the machine will be taken away, or Ctrl-C sets.

    A second Ctrl-C stops at once.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(*_):
        event.set()
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    try:
        for number in before:
            signal.signal(number, stop)
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
