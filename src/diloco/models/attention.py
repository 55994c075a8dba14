"""Causal self-attention with grouped queries and rotary positions, in memory one chooses.

Shapes are written into names: B sequences, S positions, K key-value heads, G query heads for each
of them, h width of a head. Softmax is taken in float32 whatever the inputs are.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def rotate(x_BxSxNxh: Array, base: float) -> Array:
    r"""Applies rotary position embedding to every head.

    Pair :math:`(x_i, x_{i + h/2})` of position :math:`s` is rotated by the angle
    :math:`s \cdot base^{-2i/h}`, so that a dot product of two heads sees only their distance.

    Args:
        x_BxSxNxh: Queries or keys, shape `(B, S, heads, h)` with `h` even.
        base: Wavelength base; larger reaches further.

    Returns:
        The rotated heads, same shape and dtype.

    Example:
        >>> x = jnp.ones((1, 2, 1, 2))
        >>> rotate(x, 10_000.0)[0, 0, 0].tolist()  # position 0 is left alone
        [1.0, 1.0]

    References:
        Su et al. (2021), RoFormer, section 3.2.2; the split into halves is that of GPT-NeoX.
    """
    _, S, _, h = x_BxSxNxh.shape
    frequency_h = base ** (-jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    angle_Sxh = jnp.arange(S, dtype=jnp.float32)[:, None] * frequency_h[None, :]
    cos, sin = jnp.cos(angle_Sxh)[None, :, None, :], jnp.sin(angle_Sxh)[None, :, None, :]
    a, b = jnp.split(x_BxSxNxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_BxSxNxh.dtype)


def _attend(q_BxQxKxGxh: Array, k_BxSxKxh: Array, v_BxSxKxh: Array, first: Array | int) -> Array:
    """Lets queries at positions `first, first + 1, ...` look at every key that is not ahead."""
    Q, S, h = q_BxQxKxGxh.shape[1], k_BxSxKxh.shape[1], q_BxQxKxGxh.shape[-1]
    scores_BxKxGxQxS = jnp.einsum(
        "bqkgh,bskh->bkgqs", q_BxQxKxGxh, k_BxSxKxh, preferred_element_type=jnp.float32
    ) * (h**-0.5)
    seen_QxS = (first + jnp.arange(Q))[:, None] >= jnp.arange(S)[None, :]
    scores_BxKxGxQxS = jnp.where(seen_QxS[None, None, None], scores_BxKxGxQxS, -jnp.inf)
    weights_BxKxGxQxS = jax.nn.softmax(scores_BxKxGxQxS, axis=-1).astype(v_BxSxKxh.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights_BxKxGxQxS, v_BxSxKxh)


def causal_attention(
    q_BxSxNxh: Array, k_BxSxKxh: Array, v_BxSxKxh: Array, *, block: int = 0
) -> Array:
    r"""Computes :math:`\mathrm{softmax}(q k^\top / \sqrt h + \text{mask})\, v` for each head.

    With `block` set, queries are taken that many positions at a time and each block is computed
    again in the backward pass. The result is the same; memory falls from `B N S S` scores to
    `B N block S`.

    Args:
        q_BxSxNxh: Queries; head n looks at key-value head n // (N / K).
        k_BxSxKxh: Keys.
        v_BxSxKxh: Values.
        block: Query positions a block; 0 takes all at once.

    Returns:
        Shape `(B, S, N, h)`, dtype of the values.

    Raises:
        ValueError: If `block` is smaller than the sequence but does not divide it.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
        >>> whole, blocks = causal_attention(q, k, v), causal_attention(q, k, v, block=2)
        >>> bool(jnp.allclose(whole, blocks, atol=1e-6))
        True

    References:
        Ainslie et al. (2023) for grouped queries; Rabe and Staats (2021) for attention in blocks.
    """
    B, S, N, h = q_BxSxNxh.shape
    K = k_BxSxKxh.shape[2]
    q_BxSxKxGxh = q_BxSxNxh.reshape(B, S, K, N // K, h)
    if not 0 < block < S:
        return _attend(q_BxSxKxGxh, k_BxSxKxh, v_BxSxKxh, 0).reshape(B, S, N, h)
    if S % block:
        raise ValueError(f"attention_block {block} does not divide the {S} tokens; use a divisor")

    @jax.checkpoint
    def one_block(index, q_BxQxKxGxh):
        return index + 1, _attend(q_BxQxKxGxh, k_BxSxKxh, v_BxSxKxh, index * block)

    blocks = jnp.moveaxis(q_BxSxKxGxh.reshape(B, S // block, block, K, N // K, h), 1, 0)
    _, out = lax.scan(one_block, jnp.int32(0), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(B, S, N, h)
