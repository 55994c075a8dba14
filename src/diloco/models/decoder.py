"""A pre-norm decoder scanned over its layers, as a plain pytree and pure functions.

RMSNorm, rotary positions, grouped-query attention with QK-norm, SwiGLU or a mixture of SwiGLU
experts, untied head: the Qwen3 family. Shapes are written into names with the legend of
`diloco.models.parameters`, and B sequences of S tokens.

References:
    Qwen3 technical report (Yang et al., 2025), section 2; Zhang and Sennrich (2019), RMSNorm;
    Shazeer (2020), SwiGLU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from diloco.models.attention import causal_attention, rotate
from diloco.models.moe import mixture_of_experts
from diloco.models.parameters import (
    DecoderConfig,
    active_parameters,
    init,
    num_parameters,
    param_specs,
    present,
)


__all__ = [
    "DecoderConfig",
    "active_parameters",
    "apply",
    "init",
    "loss",
    "num_parameters",
    "param_specs",
]

_BATCH = ("fsdp", "expert")  # mesh axes along which sequences are cut
Constrain = Callable[..., Array]


def _constrain(mesh: Mesh | None) -> Constrain:
    """Returns `constrain(x, *axes)`, which fixes how an activation is cut.

    Without it the compiler may replicate the batch instead of gathering the weights.
    """

    def constrain(x: Array, *axes: Any) -> Array:
        if mesh is None:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, present(axes, mesh.axis_names)))

    return constrain


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * scale).astype(x.dtype)


def _layer(config: DecoderConfig, constrain: Constrain, x_BxSxD: Array, layer: dict[str, Array]):
    """Applies one layer; returns the residual stream and what the router reports."""
    c, w = config, {name: p.astype(x_BxSxD.dtype) for name, p in layer.items()}

    y_BxSxD = _rms_norm(x_BxSxD, layer["attention_norm"], c.norm_eps)
    q_BxSxNxh = jnp.einsum("bsd,dnh->bsnh", y_BxSxD, w["wq"])
    k_BxSxKxh = jnp.einsum("bsd,dkh->bskh", y_BxSxD, w["wk"])
    v_BxSxKxh = jnp.einsum("bsd,dkh->bskh", y_BxSxD, w["wv"])
    q_BxSxNxh = rotate(_rms_norm(q_BxSxNxh, layer["q_norm"], c.norm_eps), c.rope_base)
    k_BxSxKxh = rotate(_rms_norm(k_BxSxKxh, layer["k_norm"], c.norm_eps), c.rope_base)
    qkv = (constrain(a, _BATCH, None, "tensor", None) for a in (q_BxSxNxh, k_BxSxKxh, v_BxSxKxh))
    a_BxSxNxh = causal_attention(*qkv, block=c.attention_block)
    a_BxSxNh = a_BxSxNxh.reshape(*x_BxSxD.shape[:2], -1)
    x_BxSxD = constrain(x_BxSxD + a_BxSxNh @ w["wo"], _BATCH, None, None)

    y_BxSxD, report = _rms_norm(x_BxSxD, layer["mlp_norm"], c.norm_eps), {}
    if c.num_experts:
        y_BxSxD, report = mixture_of_experts(
            y_BxSxD,
            layer["router"],
            w["w_gate"],
            w["w_up"],
            w["w_down"],
            experts_per_token=c.experts_per_token,
            capacity_factor=c.capacity_factor,
            group=c.expert_group,
            constrain=constrain,
        )
    else:
        h_BxSxF = jax.nn.silu(y_BxSxD @ w["w_gate"]) * (y_BxSxD @ w["w_up"])
        y_BxSxD = constrain(h_BxSxF, _BATCH, None, "tensor") @ w["w_down"]
    return constrain(x_BxSxD + y_BxSxD, _BATCH, None, None), report


def _hidden(config: DecoderConfig, params: dict[str, Any], tokens_BxS: Array, constrain: Constrain):
    """Computes the normed last residual stream, and the routers' report averaged over layers."""
    x_BxSxD = params["embed"].astype(jnp.dtype(config.dtype))[tokens_BxS]
    x_BxSxD = constrain(x_BxSxD, _BATCH, None, None)

    def body(x, layer):
        return _layer(config, constrain, x, layer)

    if config.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    x_BxSxD, report = lax.scan(body, x_BxSxD, params["layers"])
    x_BxSxD = _rms_norm(x_BxSxD, params["final_norm"], config.norm_eps)
    return x_BxSxD, jax.tree.map(jnp.mean, report)


def _head(config: DecoderConfig, params: dict[str, Any], constrain: Constrain) -> Array:
    """Gathers the head once, so that a loop over blocks of the loss does not do it each time."""
    return constrain(params["head"].astype(jnp.dtype(config.dtype)), None, "tensor")


def _logits(head_DxV: Array, x_BxSxD: Array, constrain: Constrain) -> Array:
    logits_BxSxV = jnp.einsum("bsd,dv->bsv", x_BxSxD, head_DxV, preferred_element_type=jnp.float32)
    return constrain(logits_BxSxV, _BATCH, None, "tensor")


def apply(
    config: DecoderConfig, params: dict[str, Any], tokens_BxS: Array, *, mesh: Mesh | None = None
) -> Array:
    """Computes the next-token logits.

    Args:
        config: Sizes.
        params: Parameters of one island, as `init` gives them.
        tokens_BxS: Token numbers, int32, shape `(B, S)`.
        mesh: Cuts the activations: sequences over `"fsdp"` and `"expert"`, heads and MLP over
            `"tensor"`, where the mesh has these axes. None leaves it to the compiler.

    Returns:
        Logits, float32, shape `(B, S, V)`.

    Example:
        >>> from diloco import conf
        >>> config = DecoderConfig(**conf.load("models", "tiny"))
        >>> params = init(config, jax.random.key(0))
        >>> apply(config, params, jnp.zeros((1, 4), jnp.int32)).shape
        (1, 4, 256)
    """
    constrain = _constrain(mesh)
    x_BxSxD, _ = _hidden(config, params, tokens_BxS, constrain)
    return _logits(_head(config, params, constrain), x_BxSxD, constrain)


def loss(
    config: DecoderConfig,
    params: dict[str, Any],
    tokens_BxS1: Array,
    *,
    mesh: Mesh | None = None,
    z_loss: float = 0.0,
    load_balance_loss: float = 0.0,
    router_z_loss: float = 0.0,
) -> tuple[Array, dict[str, Array]]:
    r"""Computes the mean next-token cross entropy plus the weighted auxiliary losses.

    The z-loss is the mean of :math:`(\log \sum_v e^{z_v})^2` over tokens; it keeps the logits
    :math:`z` from drifting.

    Args:
        config: Sizes.
        params: Parameters of one island.
        tokens_BxS1: Token numbers, int32, shape `(B, S + 1)`; the last S are the targets.
        mesh: As in `apply`.
        z_loss: Weight of the z-loss.
        load_balance_loss: Weight of the experts' load-balance loss, averaged over layers.
        router_z_loss: Weight of the routers' z-loss, averaged over layers.

    Returns:
        The loss in nats a token, a float32 scalar, and unweighted metrics: `cross_entropy`,
        `z_loss`, and with experts `load_balance_loss`, `router_z_loss` and `dropped` (share of
        assignments that found no slot).

    Raises:
        ValueError: If `attention_block`, `loss_block` or `expert_group` is smaller than S but does
            not divide it.

    Example:
        >>> from diloco import conf
        >>> config = DecoderConfig(**conf.load("models", "tiny"))
        >>> params = init(config, jax.random.key(0))
        >>> value, metrics = loss(config, params, jnp.zeros((2, 9), jnp.int32))
        >>> value.shape, sorted(metrics)
        ((), ['cross_entropy', 'z_loss'])
    """
    constrain = _constrain(mesh)
    inputs_BxS, targets_BxS = tokens_BxS1[:, :-1], tokens_BxS1[:, 1:]
    x_BxSxD, report = _hidden(config, params, inputs_BxS, constrain)
    head_DxV = _head(config, params, constrain)
    B, S = inputs_BxS.shape

    def sums(x_BxSxD: Array, targets_BxS: Array) -> tuple[Array, Array]:
        logits_BxSxV = _logits(head_DxV, x_BxSxD, constrain)
        log_z_BxS = jax.nn.logsumexp(logits_BxSxV, axis=-1)
        target_BxS = jnp.take_along_axis(logits_BxSxV, targets_BxS[..., None], axis=-1)[..., 0]
        return jnp.sum(log_z_BxS - target_BxS), jnp.sum(jnp.square(log_z_BxS))

    if 0 < config.loss_block < S:
        nll, square = _sum_in_blocks(sums, config.loss_block, x_BxSxD, targets_BxS)
    else:
        nll, square = sums(x_BxSxD, targets_BxS)
    metrics = {"cross_entropy": nll / (B * S), "z_loss": square / (B * S), **report}
    total = metrics["cross_entropy"] + z_loss * metrics["z_loss"]
    if config.num_experts:
        total += load_balance_loss * metrics["load_balance_loss"]
        total += router_z_loss * metrics["router_z_loss"]
    return total, metrics


def _sum_in_blocks(sums: Callable, block: int, x_BxSxD: Array, targets_BxS: Array):
    """Adds `sums` over blocks of positions; the backward pass computes a block's logits again."""
    B, S, D = x_BxSxD.shape
    if S % block:
        raise ValueError(f"loss_block {block} does not divide the {S} tokens; use a divisor")
    x_blocks = jnp.moveaxis(x_BxSxD.reshape(B, S // block, block, D), 1, 0)
    target_blocks = jnp.moveaxis(targets_BxS.reshape(B, S // block, block), 1, 0)

    @jax.checkpoint
    def add(total, block):
        return jax.tree.map(jnp.add, total, sums(*block)), None

    return lax.scan(add, (jnp.float32(0), jnp.float32(0)), (x_blocks, target_blocks))[0]
