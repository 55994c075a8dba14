"""A mixture of SwiGLU experts with a fixed number of slots for each expert.

Tokens are dispatched in groups by two matrix products, so that shapes are static and the layer runs
under `vmap`, which is how islands are mapped (a ragged product has no batching rule for that). An
expert has C slots for the tokens of a group; what does not fit is passed on by the residual stream
alone.

Shapes are written into names: T groups of G tokens, E experts, k of them for a token, C slots,
D width of the model, F width of an expert.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def capacity(group: int, num_experts: int, experts_per_token: int, capacity_factor: float) -> int:
    """Returns the slots one expert has for the tokens of one group.

    Args:
        group: Tokens of a group.
        num_experts: Experts.
        experts_per_token: Experts that each token goes to.
        capacity_factor: Slots over what an even load would need.

    Returns:
        Slots, at most one a token.

    Example:
        >>> capacity(512, 128, 8, 1.25)
        40
    """
    return min(group, math.ceil(group * experts_per_token * capacity_factor / num_experts))


def _unconstrained(x: Array, *axes: Any) -> Array:
    return x


def mixture_of_experts(
    x_BxSxD: Array,
    router_DxE: Array,
    w_gate_ExDxF: Array,
    w_up_ExDxF: Array,
    w_down_ExFxD: Array,
    *,
    experts_per_token: int,
    capacity_factor: float,
    group: int,
    constrain: Callable[..., Array] = _unconstrained,
) -> tuple[Array, dict[str, Array]]:
    r"""Sends each token to its best experts and adds what they return.

    With router probabilities :math:`p = \mathrm{softmax}(x W^r)` and :math:`\mathcal T` the k
    experts with the largest,

    .. math:: y = \sum_{e \in \mathcal T} \frac{p_e}{\sum_{e' \in \mathcal T} p_{e'}}\,
              \bigl(\mathrm{silu}(x W^g_e) \odot x W^u_e\bigr) W^d_e .

    Slots are given to every token's first choice before any second choice, and to earlier tokens
    first. Router and losses are float32.

    Args:
        x_BxSxD: Tokens after the norm.
        router_DxE: Router matrix.
        w_gate_ExDxF: Gate matrices, dtype of x.
        w_up_ExDxF: Up matrices, dtype of x.
        w_down_ExFxD: Down matrices, dtype of x.
        experts_per_token: k.
        capacity_factor: Slots over the mean number of tokens an expert gets; E / k drops nothing.
        group: Tokens that share slots, at most S. Dispatch and return cost `4 E C D` operations a
            token forward, and C grows with the group.
        constrain: `constrain(x, *axes)` fixes how an activation is cut over the mesh.

    Returns:
        Shape `(B, S, D)` and scalars: `load_balance_loss` (E times the sum over experts of the
        share of tokens sent there times the mean probability; k when balanced), `router_z_loss`
        (mean squared log-sum-exp) and `dropped` (share of assignments that found no slot).

    Raises:
        ValueError: If `group` is smaller than S but does not divide it.

    References:
        Lepikhin et al. (2020), GShard, for the dispatch; Fedus et al. (2021), equations 4 to 6, for
        the load-balance loss; Zoph et al. (2022), equation 5, for the router's z-loss.
    """
    B, S, D = x_BxSxD.shape
    E, k, G = router_DxE.shape[-1], experts_per_token, min(group, S)
    if S % G:
        raise ValueError(f"expert_group {G} does not divide the {S} tokens; use a divisor")
    C, dtype, batch = capacity(G, E, k, capacity_factor), x_BxSxD.dtype, ("fsdp", "expert")
    x_TxGxD = x_BxSxD.reshape(B * S // G, G, D)

    logits_TxGxE = jnp.einsum(
        "tgd,de->tge",
        x_TxGxD.astype(jnp.float32),
        router_DxE.astype(jnp.float32),
        precision="highest",  # a TPU would round the factors to bfloat16
    )
    probs_TxGxE = jax.nn.softmax(logits_TxGxE, axis=-1)
    weight_TxGxk, expert_TxGxk = lax.top_k(probs_TxGxE, k)
    weight_TxGxk = weight_TxGxk / jnp.sum(weight_TxGxk, axis=-1, keepdims=True)

    chosen_TxGxkxE = jax.nn.one_hot(expert_TxGxk, E, dtype=jnp.int32)
    queue = jnp.swapaxes(chosen_TxGxkxE, 1, 2).reshape(-1, k * G, E)  # first choices first
    place = (jnp.cumsum(queue, axis=1) - 1).reshape(-1, k, G, E)
    place_TxGxk = jnp.sum(jnp.swapaxes(place, 1, 2) * chosen_TxGxkxE, axis=-1)
    slot_TxGxkxC = jax.nn.one_hot(place_TxGxk, C, dtype=dtype)  # zero where the place is C or more

    chosen = chosen_TxGxkxE.astype(dtype)
    dispatch_TxGxExC = jnp.einsum("tgke,tgkc->tgec", chosen, slot_TxGxkxC)
    combine_TxGxExC = jnp.einsum(
        "tgk,tgke,tgkc->tgec", weight_TxGxk.astype(dtype), chosen, slot_TxGxkxC
    )
    x_TxExCxD = jnp.einsum("tgec,tgd->tecd", dispatch_TxGxExC, x_TxGxD)
    x_TxExCxD = constrain(x_TxExCxD, "fsdp", "expert", None, None)
    gate = jax.nn.silu(jnp.einsum("tecd,edf->tecf", x_TxExCxD, w_gate_ExDxF))
    up = jnp.einsum("tecd,edf->tecf", x_TxExCxD, w_up_ExDxF)
    hidden_TxExCxF = constrain(gate * up, "fsdp", "expert", None, "tensor")
    y_TxExCxD = jnp.einsum("tecf,efd->tecd", hidden_TxExCxF, w_down_ExFxD)
    y_TxExCxD = constrain(y_TxExCxD, "fsdp", "expert", None, None)
    y_TxGxD = constrain(jnp.einsum("tgec,tecd->tgd", combine_TxGxExC, y_TxExCxD), batch, None, None)

    share_E = jnp.mean(jnp.sum(chosen_TxGxkxE, axis=2).astype(jnp.float32), axis=(0, 1))
    losses = {
        "load_balance_loss": E * jnp.sum(share_E * jnp.mean(probs_TxGxE, axis=(0, 1))),
        "router_z_loss": jnp.mean(jnp.square(jax.nn.logsumexp(logits_TxGxE, axis=-1))),
        "dropped": jnp.mean((place_TxGxk >= C).astype(jnp.float32)),
    }
    return y_TxGxD.reshape(B, S, D), losses
