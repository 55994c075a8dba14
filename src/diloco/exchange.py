"""One fragment's exchange: pseudo-gradients, the wire, their mean, the outer step; and its application."""

from typing import Any, NamedTuple

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import cuts, outer, wire
from diloco.config import DiLoCoConfig
from diloco.cuts import Group
from diloco.fragments import Partition
from diloco.state import DiLoCoState, ParamsLens


class Exchange(NamedTuple):
    """What a send and an apply need to know besides the state.

    Attributes:
        config: The algorithm.
        mesh: A mesh with an `islands` axis.
        partition: The fragments of the parameters.
        lens: Where the parameters are in the inner state.
        optimizer: The outer optimizer.
        labels: `outer.mirror` of it.
    """

    config: DiLoCoConfig
    mesh: Mesh | AbstractMesh
    partition: Partition
    lens: ParamsLens
    optimizer: optax.GradientTransformation
    labels: list[int]


def send(x: Exchange, state: DiLoCoState, number: jax.Array) -> DiLoCoState:
    """Sends fragment `number` and steps Theta with it, :eq:`eq-pseudo-gradient` and :eq:`eq-nesterov`.

    With error feedback an island sends what its last send lost as well, :eq:`eq-feedback`.

    Args:
        x: The exchange.
        state: The state after the inner step.
        number: p, int32; P means that no fragment is due.

    Returns:
        The state with the fragment of Theta, its outer state, residual and count replaced.
    """
    own_leaves = jax.tree.leaves(x.lens.get(state.inner))

    def branch(group: Group):
        def run(position, moving):
            return _send_group(
                x,
                group,
                cuts.look_up(group, position),
                number,
                own_leaves,
                *moving,
            )

        return run

    moving = (state.outer_params, state.outer_opt_state, state.residual, state.skipped)
    theta, opt_state, residual, skipped = _switch(x, number, branch, moving)
    return state._replace(
        outer_params=theta, outer_opt_state=opt_state, residual=residual, skipped=skipped
    )


def apply(x: Exchange, state: DiLoCoState, number: jax.Array) -> DiLoCoState:
    """Mixes fragment `number` of Theta into every island, :eq:`eq-apply`.

    Args:
        x: The exchange.
        state: The state after the inner step and the send.
        number: p, int32; P means that no fragment is due.

    Returns:
        The state with the islands' parameters replaced; nothing crosses islands.
    """
    theta = jax.tree.leaves(state.outer_params)
    params = x.lens.get(state.inner)
    leaves, treedef = jax.tree.flatten(params)
    alpha = x.config.mixing

    def branch(group: Group):
        def run(position, own):
            own = list(own)
            for cut, index in zip(group.cuts, cuts.look_up(group, position), strict=True):
                new = jnp.expand_dims(cuts.take(theta[cut.leaf], cut, index), 0)
                old = cuts.take(own[cut.leaf], cut, index, lead=1)
                if alpha:
                    new = alpha * old.astype(jnp.float32) + (1 - alpha) * new
                new = jnp.broadcast_to(new.astype(old.dtype), old.shape)
                own[cut.leaf] = cuts.put(own[cut.leaf], cut, index, new, lead=1)
            return own

        return run

    leaves = _switch(x, number, branch, leaves)
    return state._replace(inner=x.lens.set(state.inner, jax.tree.unflatten(treedef, leaves)))


def _switch(x: Exchange, number: jax.Array, branch: Any, moving: Any) -> Any:
    """Runs the branch of the fragment's group on `moving`, or returns it as it is where number = P."""
    groups = x.partition.groups
    places = np.zeros((x.config.num_fragments + 1, 2), np.int32)  # (branch, position in its group)
    for g, group in enumerate(groups):
        for position, p in enumerate(group.members):
            places[p] = g + 1, position
    branch_of, position = cuts.row(places, number)
    branches = [lambda _, moving: moving, *(branch(group) for group in groups)]
    return jax.lax.switch(branch_of, branches, position, moving)


def _send_group(
    x: Exchange,
    group: Group,
    indices: list[jax.Array],
    number: jax.Array,
    own_leaves: list[jax.Array],
    theta: Any,
    opt_state: Any,
    residual: Any,
    skipped: jax.Array,
) -> tuple[Any, Any, Any, jax.Array]:
    """Sends one fragment of a group; returns Theta, its state, the residual and the count."""
    leaves = jax.tree.leaves(theta)
    delta = []
    for cut, index in zip(group.cuts, indices, strict=True):
        global_part = drjax.broadcast(cuts.take(leaves[cut.leaf], cut, index), mesh=x.mesh)
        delta.append(
            global_part - cuts.take(own_leaves[cut.leaf], cut, index, lead=1).astype(jnp.float32)
        )
    valid = drjax.map_fn(_all_finite, (delta,), mesh=x.mesh)  # [M], each island its own
    codec = wire.codec(x.config.wire_format)
    shapes = [d.shape[1:] for d in delta]
    if residual is not None:
        owed, treedef = jax.tree.flatten(residual)
        old = [
            cuts.take(owed[cut.leaf], cut, index, lead=1)
            for cut, index in zip(group.cuts, indices, strict=True)
        ]
        delta = [d + e for d, e in zip(delta, old, strict=True)]
    payload = drjax.map_fn(lambda *d: [codec.encode(part) for part in d], tuple(delta), mesh=x.mesh)
    mean = _mean(x, codec, payload, shapes, valid)
    ok = _all_finite(mean)
    if residual is not None:
        sent = valid & ok
        decoded = drjax.map_fn(
            lambda p: [codec.decode(q, s) for q, s in zip(p, shapes, strict=True)],
            (payload,),
            mesh=x.mesh,
        )
        for cut, index, d, got, e in zip(group.cuts, indices, delta, decoded, old, strict=True):
            # Where nothing of an island went into Theta it owes what it owed before.
            new = jnp.where(_like(sent, d), d - got, e)
            owed[cut.leaf] = cuts.put(owed[cut.leaf], cut, index, new, lead=1)
        residual = jax.tree.unflatten(treedef, owed)
    theta, opt_state = outer.step_fragment(
        x.optimizer, x.labels, theta, opt_state, group.cuts, indices, number, mean, ok
    )
    return theta, opt_state, residual, skipped + (~valid).astype(jnp.int32)


def _mean(
    x: Exchange,
    codec: wire.Codec,
    payload: list[Any],
    shapes: list[tuple[int, ...]],
    valid: jax.Array,
) -> list[jax.Array]:
    """The mean over islands of what they sent, the same bits on every island."""
    skip = x.config.on_bad_island == "skip"
    if skip:
        valid = _everywhere(x, valid)
        count = jnp.sum(valid.astype(jnp.float32))  # no island left: 0 / 0, and Theta stays
    if (
        x.config.wire_format == "float32"
    ):  # one all-reduce: no island needs the others' numbers one by one
        if not skip:
            return drjax.reduce_mean(payload)
        kept = [jnp.where(_like(valid, p), p, jnp.float32(0)) for p in payload]
        return [total / count for total in drjax.reduce_sum(kept)]
    payload = jax.tree.map(lambda p: _everywhere(x, p), payload)

    def add(total, sent):
        one, fine = sent
        decoded = [codec.decode(p, s) for p, s in zip(one, shapes, strict=True)]
        if skip:
            decoded = [jnp.where(fine, d, jnp.float32(0)) for d in decoded]
        return [t + d for t, d in zip(total, decoded, strict=True)], None

    total, _ = jax.lax.scan(add, [jnp.zeros(s, jnp.float32) for s in shapes], (payload, valid))
    return [t / (count if skip else x.config.num_islands) for t in total]


def _everywhere(x: Exchange, value: jax.Array) -> jax.Array:
    """Gathers `[M, ...]` from the islands to every island; how it lies within an island stays as it is."""
    placed = P("islands", *[P.UNCONSTRAINED] * (value.ndim - 1))
    whole = P(None, *[P.UNCONSTRAINED] * (value.ndim - 1))
    value = jax.lax.with_sharding_constraint(value, NamedSharding(x.mesh, placed))
    return jax.lax.with_sharding_constraint(value, NamedSharding(x.mesh, whole))


def _all_finite(parts: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(p)) for p in parts]))


def _like(valid: jax.Array, x: jax.Array) -> jax.Array:
    return valid.reshape(valid.shape + (1,) * (x.ndim - 1))
