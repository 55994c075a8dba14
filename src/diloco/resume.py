"""Where a run goes on: what must be the same, its place in the data and in the log, the signal to stop."""

import contextlib
import dataclasses
import hashlib
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

from diloco import folders, inner, islands, restoring, spmd
from diloco import manifest as manifests
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
    if recipe.data.split == "non-iid":  # which text is of which file decides who reads it
        data["groups"] = hashlib.sha256(corpus.group_ends.tobytes()).hexdigest()
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
        The state, the bytes of the log that belong to it, and the tokens that each island has seen, also those that
        have left.

    Raises:
        ValueError: As for `diloco.restore`, or if the log lacks what was in it or is damaged, or the checkpoint is of
            another loop.
    """
    directory = run_dir / "checkpoints"
    # `place` has checked its files, and `restore` will.
    manifest = manifests.read(folders.root_of(directory) / str(step))
    if not {"data", "log_bytes", "tokens"} <= set(manifest["extras"]):
        raise ValueError(
            f"the checkpoint of step {step} in {directory} was not saved by this version of diloco train; "
            "read it with diloco.restore, or give another --run-dir"
        )
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
    size, seen = extras["log_bytes"], extras["tokens"]
    if problem := _log_problem(run_dir / "metrics.jsonl", size, seen):
        if not allow_change:
            raise ValueError(
                f"{problem}; put it back, or go on with what there is of it (--allow-change)"
            )
        log.warning("%s; the run goes on with what there is of it", problem)
        size = _whole_records(run_dir / "metrics.jsonl", size, step)
    return state, size, seen


def abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns shape, type and place of an array without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def cut_log(run_dir: Path, size: int) -> None:
    """Cuts the run's log back to its first bytes; what comes behind belongs to steps that are done again.

    Args:
        run_dir: The run directory.
        size: Bytes to keep.
    """
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > size:
        os.truncate(metrics, size)


def _log_problem(metrics: Path, size: int, tokens: list[int]) -> str:
    """Says what is wrong with the first `size` bytes of a log, whose last record has these tokens; empty if nothing."""
    kept = _head(metrics, size)
    if len(kept) < size:
        return f"{metrics} has {len(kept)} bytes, but had {size} when the checkpoint was saved"
    if not size:
        return ""
    try:
        if kept.endswith(b"\n") and json.loads(kept.splitlines()[-1])["tokens"] == tokens:
            return ""
    except (ValueError, KeyError, TypeError):
        pass
    return f"{metrics} is damaged: the checkpoint's record does not end at byte {size}"


def _whole_records(metrics: Path, size: int, step: int) -> int:
    """Returns the bytes of the records, at the start of the first `size` bytes, that are whole and not of later steps."""
    kept = 0
    for line in _head(metrics, size).splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept += len(line)
    return kept


def _head(metrics: Path, size: int) -> bytes:
    if not metrics.exists():
        return b""
    with metrics.open("rb") as file:
        return file.read(size)


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
