"""A toy shared by tests: quadratic islands on a small stacked model, and its positions by fragment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco
from diloco import cuts


ADAMW = (0.9, 0.95, 1e-8, 0.1)


def params(num_layers, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(size=(4, width)), jnp.float32),
        "layers": {"w": jnp.asarray(rng.normal(size=(num_layers, width)), jnp.float32)},
    }


def flat(tree):
    """[...] leaves to one float64 vector, in tree order; island leaves [M, ...] to [M, N]."""
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])


def flat_islands(tree):
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.asarray(x, np.float64).reshape(x.shape[0], -1) for x in leaves], 1)


def positions(config, tree):
    """Flat positions of each fragment, read through the package's own cuts."""
    sizes = np.cumsum([0, *(x.size for x in jax.tree.leaves(tree))])
    places = [
        jnp.arange(a, b).reshape(x.shape)
        for a, b, x in zip(sizes[:-1], sizes[1:], jax.tree.leaves(tree), strict=True)
    ]
    result = [None] * config.num_fragments
    for group in diloco.partition(tree, config).groups:
        for k, p in enumerate(group.members):
            found = cuts.look_up(group, jnp.int32(k))
            parts = [
                cuts.take(places[c.leaf], c, ix) for c, ix in zip(group.cuts, found, strict=True)
            ]
            result[p] = np.concatenate([np.asarray(x).reshape(-1) for x in parts])
    return result


def problem(num_islands, steps, size, seed=0):
    """Curvature `[M, N]` and targets `[T, M, N]`: island m's loss at t is 0.5 c (x - target)^2, summed."""
    rng = np.random.default_rng(seed)
    curvature = rng.uniform(0.2, 1.5, (num_islands, size)).astype(np.float32)
    return curvature, rng.normal(size=(steps, num_islands, size)).astype(np.float32)


def inner(optimizer):
    """One island's step on `(curvature [N], target [N])`; `optimizer` is an optax transformation."""

    def inner_step(state, batch):
        curvature, target = batch
        leaves, treedef = jax.tree.flatten(state["params"])
        cuts = np.cumsum([0, *(x.size for x in leaves)])
        grads = [
            curvature[a:b].reshape(x.shape).astype(x.dtype)
            * (x - target[a:b].reshape(x.shape).astype(x.dtype))
            for a, b, x in zip(cuts[:-1], cuts[1:], leaves, strict=True)
        ]
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer counts with floats
            updates, opt = optimizer.update(
                jax.tree.unflatten(treedef, grads), state["opt"], state["params"]
            )
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "norm": optax.tree.norm(grads)
        }

    return inner_step


def sgd(rate=0.1):
    return optax.sgd(rate)


def adamw(rate=0.1):
    b1, b2, eps, decay = ADAMW
    return optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=decay)


def run(config, optimizer, tree, curvature, target, *, mesh=None, flush=False, **kw):
    """Runs all steps in one compiled scan; returns the final state and the metrics `[T, M]`."""
    state = diloco.init(config, {"params": tree, "opt": optimizer.init(tree)}, mesh=mesh, **kw)
    step = diloco.build_train_step(config, inner(optimizer), mesh=mesh, **kw)

    def body(state, target_t):
        return step(state, (jnp.asarray(curvature), target_t))

    state, metrics = jax.jit(lambda s, x: jax.lax.scan(body, s, x))(state, jnp.asarray(target))
    if flush:
        state = diloco.flush(config, state, mesh=mesh, **kw)
    return state, metrics
