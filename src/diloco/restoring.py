"""Reads checkpoints back: every file, every leaf and every setting is checked first."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from diloco import manifest as manifests
from diloco.config import DiLoCoConfig
from diloco.folders import Path, root_of, steps
from diloco.leaves import check_leaves, kind, named_leaves
from diloco.state import DiLoCoState, check_residual


log = logging.getLogger("diloco")


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
    was = DiLoCoConfig(**manifest["algorithm"])
    _check_state(manifest["leaves"], wanted, was, config, f"{where} in {directory}")
    remedy = "make it with diloco.init of the same configuration"
    check_residual(like, config.error_feedback, "the state to restore", remedy)
    loaded = load(folder / manifest["data"], {n: target(x) for n, x in wanted.items()})
    for name, leaf in wanted.items():
        loaded[name] = as_wanted(loaded[name], leaf)
        log.debug("restored %s %s", name, manifest["leaves"][name])
    log.info("restored step %d: %d leaves", manifest["step"], len(loaded))
    leaves = [loaded[name] for name in wanted]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Restored(state, manifest["extras"])


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
        inside = root / "checkpoints"
        other = inside if not found and steps(inside) else "another directory or step"
        raise ValueError(f"{root} has no {what}, it has {have}; name {other}")
    problems = []
    for number in [step] if step is not None else reversed(found):
        folder = root / str(number)
        try:
            manifest = manifests.read(folder)
            problem = manifests.damage(folder, manifest)
            if manifest["step"] != number:
                problem = f"{folder} holds the checkpoint of step {manifest['step']}"
        except (ValueError, OSError) as error:  # such as a folder where a file should be
            problem = str(error)
        if not problem:
            return folder, manifest
        log.warning("the checkpoint of step %d cannot be used: %s", number, problem)
        problems.append(f"step {number}: {problem}")
    raise ValueError(
        f"no checkpoint in {root} can be used ({'; '.join(problems)}); restore the files, or start anew"
    )


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


def _check_state(
    found: Mapping[str, list[Any]],
    wanted: Mapping[str, Any],
    was: DiLoCoConfig,
    config: DiLoCoConfig,
    where: str,
) -> None:
    """Checks the leaves part by part: each setting that shapes the state has a part, and a remedy, of its own."""
    resized = set()  # other in the number of islands, and in nothing else
    if was.num_islands != config.num_islands:
        for name in set(found) & set(wanted):
            (dtype, shape), want = found[name], kind(wanted[name])
            per_island = name.startswith(("inner", "residual", "skipped"))
            if per_island and [dtype, shape[1:]] == [want[0], want[1][1:]]:
                resized.add(name)

    def check(part: tuple[str, ...], setting: str = "", why: str = "") -> None:
        a, b = (
            {n: x for n, x in leaves.items() if n.startswith(part) and n not in resized}
            for leaves in (found, wanted)
        )
        changed = setting and getattr(was, setting) != getattr(config, setting)
        check_leaves(a, b, where, remedy=f"set diloco.{setting} back: {why}" if changed else "")

    check(("inner", "outer_params", "step", "skipped"))
    own = "this outer optimizer keeps a part of its own a fragment"
    check(("outer_opt_state",), "num_fragments", own)
    check(("residual",), "error_feedback", "the residuals are part of the state")
    remedy = f"restore {was.num_islands} islands, then change their number with diloco.resize"
    check_leaves(found, wanted, where, remedy=remedy)
