"""Who takes part in a run: start islands from one trained model, let islands join and leave, find a bad one."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import restoring, sources, spmd
from diloco import state as states
from diloco.config import DiLoCoConfig
from diloco.leaves import check_leaves, kind, named_leaves
from diloco.sharding import check_mesh, state_sharding
from diloco.state import DiLoCoState, ParamsLens


log = logging.getLogger("diloco")


def bootstrap(
    config: DiLoCoConfig,
    source: restoring.Path,
    inner_state: Any,
    *,
    take: Literal["params", "state"],
    mesh: Mesh | None = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> DiLoCoState:
    """Starts M islands from the checkpoint of one model; Theta is its parameters, the outer state is fresh.

    The source is a directory of our checkpoints (its newest intact one), or a tree that Orbax wrote: the parameters
    themselves, or below `params/` or `params/params/` as MaxText has them; in the directory itself or its `items/`.

    Args:
        config: The algorithm.
        source: The checkpoint.
        inner_state: One island's initial state, without the island axis; leaves that are read may be abstract, and
            those with a `NamedSharding` are read straight to their devices. They are read in the types they have
            here, so Theta, which is float32, starts rounded if these are bfloat16.
        take: `"params"` reads the parameters (Theta, from ours) and keeps the rest of `inner_state`, the optimizer's
            moments and counts too. `"state"` reads every leaf of `inner_state`; from ours that needs a run of one
            island.
        mesh: As for `diloco.init`.
        params: As for `diloco.init`.
        outer_optimizer: As for `diloco.init`.

    Returns:
        The state at step 0; every leaf is concrete, and each that was read is named in the log.

    Raises:
        ValueError: If the source is no such checkpoint or cannot be read, a parameter is not finite, or a leaf is
            missing, extra, of another shape, or abstract though it is not read.

    Example:
        >>> import tempfile, diloco
        >>> one = {"params": {"w": jnp.arange(3.0)}, "moment": jnp.zeros(3)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     diloco.save(directory, DiLoCoConfig(num_islands=1, sync_period=1), diloco.init(DiLoCoConfig(num_islands=1, sync_period=1), one))
        ...     state = bootstrap(DiLoCoConfig(num_islands=2, sync_period=4), directory, one, take="params")
        >>> state.inner["params"]["w"].tolist()
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    if take not in ("params", "state"):
        raise ValueError(f"take {take!r} is not known; use 'params' or 'state'")
    lens = states.params_lens(inner_state, params)
    wanted = lens.get(inner_state) if take == "params" else inner_state
    root = restoring.root_of(source)
    found = sources.read(root, named_leaves(wanted), take)
    new = jax.tree.unflatten(jax.tree.structure(wanted), list(found.values()))
    inner = lens.set(inner_state, new) if take == "params" else new
    for name, leaf in named_leaves(inner).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name} is abstract and take={take!r} does not read it; give inner_state with values, or take='state'"
            )
    for name, leaf in found.items():
        log.info("bootstrap: read %s, %s%s", name, leaf.dtype, list(leaf.shape))
    for name, leaf in named_leaves(lens.get(inner)).items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
            raise ValueError(
                f"{root} has values in {name} that are not finite as {leaf.dtype}; name an earlier checkpoint, or a wider type"
            )
    log.info("bootstrap: %d leaves read from %s", len(found), root)
    return spmd.init(config, inner, mesh=mesh, params=params, outer_optimizer=outer_optimizer)


def resize(
    config: DiLoCoConfig,
    state: DiLoCoState,
    num_islands: int,
    *,
    newcomers: Any,
    stay: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> DiLoCoState:
    """Changes the number of islands of a run from M to M', between two steps.

    Islands that stay keep their state bit for bit and come first. Newcomers start from Theta, owe no residual, and
    draw random keys of their own. Theta, its optimizer state and the step stay as they are. Works leaf by leaf on the
    host.

    Args:
        config: The algorithm as it was, with M islands; go on with `dataclasses.replace(config, num_islands=...)`.
        state: The state after any step.
        num_islands: M'.
        newcomers: `"copy"` gives newcomers the rest of the first staying island's inner state (moments, counts);
            an inner state of one island, as for `diloco.init`, gives them that. Mind a learning-rate schedule that
            counts its own steps: a fresh count starts it again.
        stay: Islands that stay, in their new order; by default the first min(M, M').
        mesh: The mesh to go on with; None for one device.
        params: As for `diloco.init`.
        outer_optimizer: As for `diloco.init`.

    Returns:
        The state of M' islands.

    Raises:
        ValueError: If an island in `stay` does not exist, occurs twice, or there are more of them than M'; if M' is
            below 1, the state has not M islands, or `newcomers` has other leaves than the inner state.

    Example:
        >>> import diloco
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4)
        >>> state = diloco.init(config, {"params": jnp.zeros(())})
        >>> state = state._replace(inner={"params": jnp.array([1.0, 2.0])})
        >>> resize(config, state, 3, newcomers="copy").inner["params"].tolist()
        [1.0, 2.0, 0.0]
    """
    new_config = dataclasses.replace(config, num_islands=num_islands)
    states.check_islands(state.inner, config.num_islands, remedy="give the config of the state")
    keep = list(range(min(config.num_islands, num_islands)) if stay is None else stay)
    if not keep or len(set(keep)) < len(keep) or not set(keep) <= set(range(config.num_islands)):
        raise ValueError(
            f"stay {keep} does not name islands of 0 to {config.num_islands - 1} once each; name one or more"
        )
    if len(keep) > num_islands:
        raise ValueError(
            f"stay names {len(keep)} islands for num_islands {num_islands}; name fewer"
        )
    check_mesh(new_config, mesh)
    first = jax.tree.map(lambda x: x[keep[0]], state.inner)
    lens = states.params_lens(first, params)
    if isinstance(newcomers, str) and newcomers != "copy":
        raise ValueError(
            f"newcomers {newcomers!r} is not known; use 'copy', or give the inner state of one island"
        )
    source = first if isinstance(newcomers, str) else newcomers
    check_leaves(
        {name: kind(leaf) for name, leaf in named_leaves(source).items()},
        named_leaves(first),
        "newcomers",
    )
    theta = jax.tree.map(lambda t, p: t.astype(p.dtype), state.outer_params, lens.get(first))
    source = lens.set(source, theta)

    def join(old: Any, new: Any) -> Any:
        numbers = range(len(keep), num_islands)
        if not jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
            return np.concatenate(
                [np.asarray(old)[keep], *(np.asarray(new)[None] for _ in numbers)]
            )
        words = join(jax.random.key_data(old), jax.random.key_data(new))
        taken, number = {key.tobytes() for key in words[: len(keep)]}, len(keep)
        for m in numbers:
            # An island that stays may have drawn the key of this number when it joined.
            while (key := _key_words(new, number)).tobytes() in taken:
                number += 1
            taken.add(key.tobytes())
            words[m] = key
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(old))

    def join_zeros(old: Any) -> Any:
        return join(old, np.zeros(old.shape[1:], old.dtype))

    new = jax.tree.map(np.asarray, state._replace(inner=None))._replace(
        inner=jax.tree.map(join, state.inner, source),
        residual=jax.tree.map(join_zeros, state.residual),
        skipped=join_zeros(state.skipped),
    )
    if mesh is None:
        return jax.device_put(new)
    specs = jax.tree.map(_island_spec, state.inner)
    return jax.device_put(
        new,
        state_sharding(
            new_config, first, mesh, specs=specs, params=params, outer_optimizer=outer_optimizer
        ),
    )


def bad_leaves(state: DiLoCoState) -> list[tuple[int, str]]:
    """Finds the islands whose state is not finite: what to name when a run stops.

    Args:
        state: The state.

    Returns:
        Each bad island with its first leaf that has a NaN or an infinity; parameters come first where they are called so.

    Example:
        >>> import diloco
        >>> state = diloco.init(diloco.DiLoCoConfig(num_islands=2, sync_period=4), {"params": {"w": jnp.zeros(2)}})
        >>> bad_leaves(state._replace(inner={"params": {"w": jnp.array([[0.0, 1.0], [0.0, jnp.inf]])}}))
        [(1, 'params/w')]
    """
    finite = jax.device_get(_finite(named_leaves(state.inner)))
    bad: dict[int, str] = {}
    for name in sorted(finite, key=lambda name: "params" not in name.split("/")):
        for island in np.flatnonzero(~finite[name]):
            bad.setdefault(int(island), name)
    return sorted(bad.items())


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Says for each floating-point leaf `[M, ...]` which islands have it finite, `[M]`."""
    return {
        name: jnp.isfinite(x).reshape(x.shape[0], -1).all(1)
        for name, x in leaves.items()
        if jnp.issubdtype(x.dtype, jnp.floating)
    }


def _island_spec(leaf: jax.Array) -> P:
    return P(*leaf.sharding.spec[1:]) if isinstance(leaf.sharding, NamedSharding) else P()


def _key_words(keys: jax.Array, number: int) -> np.ndarray:
    """Returns the words of the keys that island `number` draws from these."""
    folded = jnp.vectorize(jax.random.fold_in)(keys, jnp.full(keys.shape, number, jnp.uint32))
    return np.asarray(jax.random.key_data(folded))
