"""What one island computes: AdamW on the decoder's loss, and the measurements of a run.

All functions are pure; `diloco.train` compiles them once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from diloco.models import decoder
from diloco.recipes import Recipe, Train
from diloco.state import DiLoCoState


def learning_rate(train: Train, step: Array | int) -> Array:
    r"""Computes the inner learning rate: linear warm-up, then a cosine.

    The peak times :math:`\min(1, (t + 1) / w)` times a cosine from 1 at :math:`t = w` to the final fraction.

    Args:
        train: Peak, warm-up, length and the fraction left at the end.
        step: Completed inner steps.

    Returns:
        The rate of the next inner step, float32.

    Example:
        >>> train = Train(steps=100, global_batch_size=1, learning_rate=0.1, warmup_steps=10)
        >>> [round(float(learning_rate(train, t)), 4) for t in (0, 9, 55, 100)]
        [0.01, 0.1, 0.055, 0.01]
    """
    t = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum((t + 1) / max(train.warmup_steps, 1), 1.0)
    part = (t - train.warmup_steps) / max(train.steps - train.warmup_steps, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(part, 0.0, 1.0)))
    low = train.final_learning_rate_fraction
    return train.learning_rate * warm * (low + (1 - low) * cosine)


def optimizer(train: Train) -> optax.GradientTransformation:
    """Makes the inner optimizer: clipping by the global norm, then AdamW, :eq:`eq-adamw`.

    Weights are decayed, the scales of norms are not.

    Args:
        train: The settings.

    Returns:
        An optax transformation for one island.

    Example:
        >>> params = {"w": jnp.ones(2), "final_norm": jnp.ones(2)}
        >>> tx = optimizer(Train(steps=1, global_batch_size=1, learning_rate=1.0))
        >>> updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        >>> [float(u[0]) for u in (updates["w"], updates["final_norm"])]
        [-0.1, 0.0]

    References:
        :cite:t:`loshchilov2019adamw`.
    """

    def decayed(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" not in jax.tree_util.keystr(path), params
        )

    tx = optax.chain(
        optax.clip_by_global_norm(train.gradient_clip),
        optax.adamw(
            lambda step: learning_rate(train, step),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=decayed,
        ),
    )

    def update(updates: Any, state: Any, params: Any):
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32 power
            return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def init(recipe: Recipe) -> dict[str, Any]:
    """Draws the inner state of one island, `{"params": ..., "opt_state": ...}`, from the seed."""
    params = decoder.init(recipe.model, jax.random.key(recipe.train.seed))
    return {"params": params, "opt_state": optimizer(recipe.train).init(params)}


def build_step(recipe: Recipe, mesh: Mesh | None = None):
    """Returns one island's train step.

    Args:
        recipe: Model and settings.
        mesh: The mesh of the run; None for one device.

    Returns:
        `inner_step(state, tokens_BxS1) -> (state, metrics)` with the cross entropy as `loss` (nats a token), the
        `gradient_norm` before clipping, and the `tokens` predicted.
    """
    train, tx = recipe.train, optimizer(recipe.train)

    def loss(params: Any, tokens_BxS1: Array):
        return decoder.loss(
            recipe.model,
            params,
            tokens_BxS1,
            mesh=mesh,
            z_loss=train.z_loss,
            load_balance_loss=train.load_balance_loss,
            router_z_loss=train.router_z_loss,
        )

    def inner_step(state: dict[str, Any], tokens_BxS1: Array):
        params = state["params"]
        (_, parts), gradient = jax.value_and_grad(loss, has_aux=True)(params, tokens_BxS1)
        updates, opt_state = tx.update(gradient, state["opt_state"], params)
        metrics = {
            "loss": parts["cross_entropy"],
            "gradient_norm": optax.tree.norm(gradient),
            "tokens": jnp.int32(tokens_BxS1[:, 1:].size),
        }
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, metrics

    return inner_step


def divergence(outer_params: Any, params: Any) -> dict[str, Array]:
    """Measures how far the islands are from Theta, and how much they agree, over all parameters.

    Args:
        outer_params: Theta.
        params: Parameters of the islands, leaves `[M, ...]`.

    Returns:
        `pseudo_gradient_norm`, shape `(M,)`, and `cosine`, the mean over pairs of islands of the cosine between
        their pseudo-gradients; NaN with one island.

    Example:
        >>> out = divergence(jnp.zeros(2), jnp.array([[3.0, 4.0], [4.0, 3.0]]))
        >>> out["pseudo_gradient_norm"].tolist(), round(float(out["cosine"]), 2)
        ([5.0, 5.0], 0.96)
    """

    def gram(theta: Array, own: Array) -> Array:
        delta = (theta[None] - own.astype(jnp.float32)).reshape(own.shape[0], -1)
        return delta @ delta.T

    gram_MxM = sum(jax.tree.leaves(jax.tree.map(gram, outer_params, params)))
    norm_M = jnp.sqrt(jnp.diagonal(gram_MxM))
    m = norm_M.shape[0]
    cosines = gram_MxM / jnp.maximum(norm_M[:, None] * norm_M[None, :], 1e-30)
    pairs = m * (m - 1)
    cosine = (jnp.sum(cosines) - jnp.trace(cosines)) / pairs if pairs else jnp.float32(jnp.nan)
    return {"pseudo_gradient_norm": norm_M, "cosine": cosine}


def build_measure(recipe: Recipe, mesh: Mesh | None = None):
    """Returns `measure(state, batch)`: the divergence after one more inner step, before anything is sent.

    It repeats the inner step, so that the train step need not return what only a plot wants.

    Args:
        recipe: Model and settings.
        mesh: A mesh with an `islands` axis; None for one device.

    Returns:
        The function; its values are the norm of the mean pseudo-gradient and the cosine between islands.
    """
    inner_step = build_step(recipe, mesh)

    def measure(state: DiLoCoState, batch: Array) -> dict[str, Array]:
        inner, _ = jax.vmap(inner_step)(state.inner, batch)
        return divergence(state.outer_params, inner["params"])

    return measure


def build_evaluate(recipe: Recipe, mesh: Mesh | None = None):
    """Returns `evaluate(state, tokens_KxBxS1)`: the held-out cross entropy of Theta and of each island.

    Args:
        recipe: Model and settings.
        mesh: A mesh with an `islands` axis; None for one device.

    Returns:
        The function; its values are in nats a token.
    """

    def loss(params: Any, tokens_KxBxS1: Array) -> Array:
        def add(total: Array, tokens_BxS1: Array):
            return total + decoder.loss(recipe.model, params, tokens_BxS1, mesh=mesh)[1][
                "cross_entropy"
            ], None

        return jax.lax.scan(add, jnp.float32(0), tokens_KxBxS1)[0] / tokens_KxBxS1.shape[0]

    def evaluate(state: DiLoCoState, tokens_KxBxS1: Array) -> dict[str, Array]:
        own = state.inner["params"]
        theta = jax.tree.map(lambda t, p: t.astype(p.dtype), state.outer_params, own)
        return {
            "outer_loss": loss(theta, tokens_KxBxS1),
            "island_loss": jax.vmap(loss, in_axes=(0, None))(own, tokens_KxBxS1),
        }

    return evaluate
