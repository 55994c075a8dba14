"""The outer optimizer: an optax transformation over Theta that can be stepped one fragment at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco import cuts as cutting
from diloco.config import DiLoCoConfig


def outer_optimizer(
    config: DiLoCoConfig, own: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Returns the outer optimizer: the user's own, else Nesterov SGD, :eq:`eq-nesterov`.

    Args:
        config: Gives eta and beta.
        own: Any optax transformation whose state mirrors the parameters. It is stepped with one fragment at a time, so one
            that takes a norm over all leaves takes it over the fragment.

    Returns:
        A transformation to be fed the pseudo-gradient.

    Example:
        >>> opt = outer_optimizer(DiLoCoConfig(num_islands=2, sync_period=4, outer_learning_rate=0.5, outer_momentum=0.0))
        >>> opt.update(jnp.ones(1), opt.init(jnp.ones(1)))[0].tolist()
        [-0.5]

    References:
        :cite:t:`douillard2023diloco` (Section 3); the buffer equations are those of optax and PyTorch.
    """
    if own is not None:
        return own
    return optax.sgd(config.outer_learning_rate, config.outer_momentum, nesterov=True)


def mirror(optimizer: optax.GradientTransformation, params: Any) -> list[int]:
    """Says for each leaf of the optimizer's state which parameter leaf it mirrors, or -1 for a scalar of its own.

    Args:
        optimizer: The outer optimizer.
        params: Theta, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        One number a leaf of `optimizer.init(params)`.

    Raises:
        ValueError: If a leaf of the state is neither: it could not be cut into fragments.

    Example:
        >>> mirror(optax.adam(0.1), {"a": jnp.ones(2), "b": jnp.ones(3)})
        [-1, 0, 1, 0, 1]
    """
    leaves, treedef = jax.tree.flatten(params)
    state = jax.eval_shape(optimizer.init, params)
    places = jax.tree.unflatten(treedef, list(range(len(leaves))))
    try:
        labels = optax.tree.map_params(
            optimizer, lambda _, i: i, state, places, transform_non_params=lambda _: -1
        )
        labels = jax.tree.leaves(labels)
    except (
        Exception
    ) as error:  # whatever an optimizer raises when it is shown a tree of another kind
        raise ValueError(
            "the state of the outer optimizer does not mirror the parameters, so it cannot be cut into fragments; "
            "use for example optax.sgd or optax.adam"
        ) from error
    for label, leaf in zip(labels, jax.tree.leaves(state), strict=True):
        if leaf.shape != (leaves[label].shape if label >= 0 else ()):
            raise ValueError(
                f"the state of the outer optimizer has a leaf of shape {leaf.shape} that does not mirror a parameter, "
                "so it cannot be cut into fragments; use for example optax.sgd or optax.adam"
            )
    return labels


def init(optimizer: optax.GradientTransformation, params: Any, num_fragments: int) -> Any:
    """Starts the outer state: as the optimizer does, its scalars (step counts) repeated once a fragment.

    Args:
        optimizer: The outer optimizer.
        params: Theta.
        num_fragments: P.

    Returns:
        The state; mirrored leaves like Theta, scalars `[P]`.

    Example:
        >>> init(optax.adam(0.1), jnp.ones(2), 3)[0].count.shape
        (3,)
    """
    labels = mirror(optimizer, params)
    leaves, treedef = jax.tree.flatten(optimizer.init(params))
    return jax.tree.unflatten(
        treedef,
        [
            x if label >= 0 else jnp.full((num_fragments,), x)
            for label, x in zip(labels, leaves, strict=True)
        ],
    )


def step_fragment(
    optimizer: optax.GradientTransformation,
    labels: list[int],
    outer_params: Any,
    opt_state: Any,
    cuts: tuple[cutting.Cut, ...],
    indices: list[jax.Array],
    number: jax.Array,
    delta: list[jax.Array],
    ok: jax.Array,
) -> tuple[Any, Any]:
    """Feeds one fragment's mean pseudo-gradient to the outer optimizer, :eq:`eq-nesterov`, and leaves the rest alone.

    Args:
        optimizer: The outer optimizer.
        labels: What `mirror` returns.
        outer_params: Theta.
        opt_state: Its state.
        cuts: The fragment's cuts.
        indices: Their indices.
        number: p, int32.
        delta: The mean pseudo-gradient of each cut, float32.
        ok: bool; where False nothing changes.

    Returns:
        Theta and its state with the fragment replaced.
    """
    leaves, treedef = jax.tree.flatten(outer_params)
    place = {cut.leaf: k for k, cut in enumerate(cuts)}

    # Leaves outside the fragment become None, an empty subtree to optax.
    def tree(parts: list[jax.Array]) -> Any:
        return jax.tree.unflatten(
            treedef, [parts[place[i]] if i in place else None for i in range(len(leaves))]
        )

    def cut(x: jax.Array, label: int) -> jax.Array | None:
        if label < 0:
            return jax.lax.dynamic_index_in_dim(
                x, number, keepdims=False, allow_negative_indices=False
            )
        return (
            cutting.take(x, cuts[place[label]], indices[place[label]]) if label in place else None
        )

    parts = [cutting.take(leaves[c.leaf], c, ix) for c, ix in zip(cuts, indices, strict=True)]
    state_leaves, state_treedef = jax.tree.flatten(opt_state)
    own_state = jax.tree.unflatten(
        state_treedef, [cut(x, label) for x, label in zip(state_leaves, labels, strict=True)]
    )
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer counts with floats
        updates, new_state = optimizer.update(tree(delta), own_state, tree(parts))
        new_parts = jax.tree.leaves(optax.apply_updates(tree(parts), updates))
    for c, ix, old, new in zip(cuts, indices, parts, new_parts, strict=True):
        leaves[c.leaf] = cutting.put(leaves[c.leaf], c, ix, jnp.where(ok, new, old))
    news = state_treedef.flatten_up_to(new_state)
    olds = state_treedef.flatten_up_to(own_state)
    for k, (label, old, new) in enumerate(zip(labels, olds, news, strict=True)):
        if label < 0:
            state_leaves[k] = jax.lax.dynamic_update_index_in_dim(
                state_leaves[k], jnp.where(ok, new, old), number, 0
            )
        elif label in place:
            i = place[label]
            state_leaves[k] = cutting.put(
                state_leaves[k], cuts[i], indices[i], jnp.where(ok, new, old)
            )
    return jax.tree.unflatten(treedef, leaves), jax.tree.unflatten(state_treedef, state_leaves)
