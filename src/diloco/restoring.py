"""Reads checkpoints back: every file, every leaf and every setting is checked first."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from diloco import manifest as manifests
from diloco.config import DiLoCoConfig
from diloco.leaves import check_leaves, named_leaves
from diloco.state import DiLoCoState


log = logging.getLogger("diloco")

_STEP = re.compile(r"0|[1-9][0-9]*")  # as `str` writes it: no other folder is ours

# Settings that give the state other leaves, and what to do then.
_SHAPING = {
    "diloco.num_islands": "restore it as it was, then change the number of islands with diloco.resize",
    "diloco.error_feedback": "set diloco.error_feedback back: the residuals are part of the state",
    "diloco.num_fragments": "set diloco.num_fragments back: this outer optimizer keeps a part of its own a fragment",
}

Path = str | os.PathLike[str]


class Restored(NamedTuple):
    """What `restore` returns.

    Attributes:
        state: The state, every leaf concrete and placed like its target.
        extras: What was saved with it that is no array.
    """

    state: DiLoCoState
    extras: dict[str, Any]


def restore(
    directory: Path,
    config: DiLoCoConfig,
    like: DiLoCoState,
    *,
    step: int | None = None,
    settings: Mapping[str, Any] | None = None,
    allow_change: bool = False,
) -> Restored:
    """Reads a checkpoint back, after checking every file, every leaf and every setting.

    Args:
        directory: Where it was saved.
        config: The algorithm that is to go on.
        like: A state of arrays or `jax.ShapeDtypeStruct`s; a leaf's `sharding`, if it has one, is where the restored
            leaf goes. It may lie on other devices than the state that was saved.
        step: Which checkpoint; None takes the newest intact one, with a warning in the log for each damaged one.
        settings: As given to `save`.
        allow_change: Whether the algorithm and settings may differ. The new schedule then holds from the next step
            on, as if it had always held: a fragment that the old one sent and had not applied yet reaches the
            islands when the new one next applies it.

    Returns:
        The state and the extras.

    Raises:
        ValueError: If there is no such checkpoint, all are damaged, a leaf is missing, extra or of another shape or
            type, or the algorithm or settings differ and `allow_change` is False.

    Example:
        >>> import tempfile, diloco, jax.numpy as jnp
        >>> config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
        >>> state = diloco.init(config, {"params": jnp.ones(3)})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     diloco.save(directory, config, state)
        ...     restore(directory, diloco.DiLoCoConfig(num_islands=2, sync_period=9), state)
        Traceback (most recent call last):
        ValueError: ...diloco.sync_period was 4 and is 9...
    """
    folder, manifest = intact(root_of(directory), step)
    where = f"the checkpoint of step {manifest['step']}"
    wanted = named_leaves(like)
    now = manifests.describe(config, like, manifest["step"], settings=settings)
    changed = manifests.differences(manifest, now)
    if changed and not allow_change:
        raise ValueError(
            f"{where} in {directory} is of a run with other settings: {'; '.join(changed)}; "
            "set them back, or allow the change (--allow-change, allow_change=True)"
        )
    for line in changed:
        log.warning("%s: %s", where, line)
    remedies = [text for key, text in _SHAPING.items() if any(x.startswith(key) for x in changed)]
    there = f"{where} in {directory}"
    check_leaves(manifest["leaves"], wanted, there, remedy="; ".join(remedies))
    loaded = load(folder / manifest["data"], {n: target(x) for n, x in wanted.items()})
    for name, leaf in wanted.items():
        loaded[name] = as_wanted(loaded[name], leaf)
        log.debug("restored %s %s", name, manifest["leaves"][name])
    log.info("restored step %d: %d leaves", manifest["step"], len(loaded))
    leaves = [loaded[name] for name in wanted]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Restored(state, manifest["extras"])


def steps(directory: Path) -> list[int]:
    """Lists the steps that have a committed checkpoint, oldest first; their files are not checked."""
    folders = step_folders(root_of(directory))
    return [step for step, folder in folders.items() if (folder / manifests.NAME).exists()]


def latest(directory: Path) -> int | None:
    """Returns the newest step whose checkpoint is intact, every file read and checked; None if there is none.

    Example:
        >>> latest("no/such/directory")
    """
    try:
        return intact(root_of(directory), None)[1]["step"]
    except ValueError:
        return None


def inspect(directory: Path, step: int | None = None) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files are intact.

    Args:
        directory: Where it was saved.
        step: Which one; None takes the newest intact one.

    Raises:
        ValueError: If there is no such checkpoint, or it is damaged.
    """
    return intact(root_of(directory), step)[1]


def load(folder: epath.Path, targets: Any) -> Any:
    """Reads arrays that Orbax wrote.

    Args:
        folder: Of one Orbax checkpoint of a tree.
        targets: The tree of `jax.ShapeDtypeStruct`s, their sharding saying where an array goes; `ocp.PLACEHOLDER`
            leaves an array unread.

    Returns:
        The tree of arrays.
    """

    def argument(x):
        if x is ocp.PLACEHOLDER:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(
            folder,
            args=ocp.args.PyTreeRestore(targets, restore_args=jax.tree.map(argument, targets)),
        )


def intact(root: epath.Path, step: int | None = None) -> tuple[epath.Path, dict[str, Any]]:
    """Finds a checkpoint and checks its files.

    Args:
        root: What `root_of` returns.
        step: Which one; None takes the newest that is intact.

    Returns:
        The folder of the step, and its manifest.

    Raises:
        ValueError: If there is no such checkpoint, or it is damaged.
    """
    found = steps(root)
    if not found or (step is not None and step not in found):
        have = f"those of steps {', '.join(map(str, found))}" if found else "none"
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise ValueError(f"{root} has no {what}, it has {have}; name another directory or step")
    problems = []
    for number in [step] if step is not None else reversed(found):
        folder = root / str(number)
        try:
            manifest = manifests.read(folder)
            problem = manifests.damage(folder, manifest)
        except (ValueError, OSError) as error:  # such as a folder where a file should be
            problem = str(error)
        if not problem:
            return folder, manifest
        log.warning("the checkpoint of step %d cannot be used: %s", number, problem)
        problems.append(f"step {number}: {problem}")
    raise ValueError(
        f"no checkpoint in {root} can be used ({'; '.join(problems)}); restore the files, or start anew"
    )


def root_of(directory: Path) -> epath.Path:
    """Returns a directory as an absolute path; one with a scheme, such as `gs://`, stays as it is."""
    text = os.fspath(directory)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def step_folders(directory: epath.Path) -> dict[int, epath.Path]:
    """Lists the folders whose name is a step, in order, finished or not."""
    if not directory.exists():
        return {}
    folders = {
        int(p.name): p for p in directory.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()
    }
    return dict(sorted(folders.items()))


def target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns what Orbax is to read for a leaf: random keys are stored as their words."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def as_wanted(loaded: jax.Array, leaf: Any) -> jax.Array:
    """Makes random keys of their words, as the target wants them; leaves anything else as it is.

    Args:
        loaded: What was read for `target(leaf)`.
        leaf: The leaf that is wanted, an array or `jax.ShapeDtypeStruct`.

    Returns:
        An array of the type of `leaf`.
    """
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return loaded
    found = []
    abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), abstract)
    return jax.random.wrap_key_data(loaded, impl=found[0])
