"""Attention equals a literal transcription, in one piece and in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models.attention import causal_attention, rotate


B, S, N, K, H = 2, 12, 4, 2, 6


@pytest.fixture(scope="module")
def heads():
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, (B, S, n, H)) for k, n in zip(keys, (N, K, K), strict=True))


def literal(q, k, v):
    """Loops over every query, as the definition reads."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((B, S, N, H))
    for b in range(B):
        for n in range(N):
            for s in range(S):
                kv = n // (N // K)
                score = np.array([q[b, s, n] @ k[b, t, kv] / np.sqrt(H) for t in range(s + 1)])
                weight = np.exp(score - score.max())
                out[b, s, n] = weight / weight.sum() @ v[b, : s + 1, kv]
    return out


@pytest.mark.parametrize("block", [0, 3, 12, 64])
def test_equals_the_definition(heads, block):
    out = causal_attention(*heads, block=block)
    np.testing.assert_allclose(out, literal(*heads), atol=2e-6)


def test_blocks_have_the_same_gradient(heads):
    def total(block):
        return jax.grad(lambda x: jnp.sum(jnp.sin(causal_attention(*x, block=block))))(heads)

    for whole, blocks in zip(total(0), total(4), strict=True):
        np.testing.assert_allclose(whole, blocks, atol=2e-6)


def test_blocks_bound_the_memory():
    """The backward pass keeps no scores; without blocks they are the largest temporary."""

    def temporaries(block):
        x = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
        grad = jax.grad(lambda q, k, v: jnp.sum(causal_attention(q, k, v, block=block)), (0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    scores = 2 * 1024 * 1024 * 4
    assert temporaries(0) > scores
    assert temporaries(32) < scores / 4


def test_a_block_that_does_not_divide_is_refused(heads):
    with pytest.raises(ValueError, match="attention_block 5 does not divide the 12 tokens"):
        causal_attention(*heads, block=5)


def test_rotation_depends_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(1), (2, H))
    x = jnp.broadcast_to(q[None, None, None], (1, S, 1, H))
    y = jnp.broadcast_to(k[None, None, None], (1, S, 1, H))
    products = np.einsum("sh,th->st", rotate(x, 100.0)[0, :, 0], rotate(y, 100.0)[0, :, 0])
    for distance in range(-S + 1, S):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(products[0, 0] - products[0, 3]) > 1e-2


def test_rotation_turns_each_pair_by_its_angle():
    x = np.asarray(jax.random.normal(jax.random.key(2), (1, S, 1, H)))
    out = rotate(jnp.asarray(x), 50.0)
    half = H // 2
    for s in range(S):
        for i in range(half):
            angle = s * 50.0 ** (-2 * i / H)
            pair = x[0, s, 0, i] + 1j * x[0, s, 0, i + half]
            turned = pair * np.exp(1j * angle)
            np.testing.assert_allclose(out[0, s, 0, i], turned.real, atol=1e-5)
            np.testing.assert_allclose(out[0, s, 0, i + half], turned.imag, atol=1e-5)
