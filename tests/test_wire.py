"""Wire formats: the bounds, symmetries and sizes that the page promises, for any tensor."""

import dataclasses
import functools
import json
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

import diloco
from diloco import DiLoCoConfig, inner, wire
from diloco.recipes import load_recipe


LOSSY = ("bfloat16", "int8", "float4_e3m0")
FORMATS = ("float32", *LOSSY)
SHAPES = ((), (3,), (256,), (257,), (2, 128), (3, 512), (5, 7, 11), (0, 4))
END = 2.0**127  # where the formats with blocks end
SMALL = 2.0**-119  # blocks below it may become zero

per_format = pytest.mark.parametrize("name", LOSSY)
many = settings(max_examples=40, deadline=None, derandomize=True)


def tensors(**numbers):
    """float32 tensors of a few shapes; numbers from the whole range or of similar size."""
    any_size = st.floats(width=32, allow_nan=False, allow_infinity=False, **numbers)
    similar = st.floats(-2, 2, width=32)
    return st.sampled_from(SHAPES).flatmap(
        lambda shape: st.sampled_from((any_size, similar)).flatmap(
            lambda elements: arrays(np.float32, shape, elements=elements, fill=elements)
        )
    )


@functools.cache
def compiled(name, shape):
    codec = wire.codec(name)
    return jax.jit(lambda x: codec.decode(codec.encode(x), shape))


def round_trip(name, x):
    y = np.asarray(compiled(name, x.shape)(x))
    assert y.shape == x.shape
    assert y.dtype == np.float32
    return y


def block_max(x):
    """Largest magnitude of the block that holds each number; blocks follow the flat order."""
    flat = np.abs(x.astype(np.float64)).reshape(-1)
    padded = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    return np.repeat(padded.max(1, initial=0), 256)[: flat.size].reshape(x.shape)


def bound(name, x):
    """The largest error that the page allows each number."""
    size = np.abs(x.astype(np.float64))
    if name == "bfloat16":
        top = float(jnp.finfo(jnp.bfloat16).max)
        return np.maximum(size * 2.0**-8, size - top) + 2.0**-126
    s = np.minimum(block_max(x), END)
    near = s / 254 if name == "int8" else np.maximum(size / 3, s / 128)
    return np.maximum(near * (1 + 2.0**-14), size - END * (1 - 2.0**-16)) + SMALL


@per_format
def test_error_is_within_the_bound(name):
    @many
    @given(tensors())
    def check(x):
        y = round_trip(name, x).astype(np.float64)
        assert np.isfinite(y).all()
        assert (np.abs(y - x) <= bound(name, x)).all()

    check()


@per_format
def test_idempotent_odd_and_zero_stays_zero(name):
    @many
    @given(tensors())
    def check(x):
        y = round_trip(name, x)
        np.testing.assert_array_equal(round_trip(name, y), y)
        np.testing.assert_array_equal(round_trip(name, -x), -y)
        assert (y[x == 0] == 0).all()

    check()


@per_format
def test_what_is_not_finite_shows_in_its_block_and_only_there(name):
    @many
    @given(
        st.sampled_from([np.nan, np.inf, -np.inf]),
        st.integers(0, 599),
        st.floats(2.0**-100, 2.0**100, width=32),
    )
    def check(bad, where, scale):
        x = np.full(600, scale, np.float32)
        x[where] = bad
        finite = np.isfinite(round_trip(name, x))
        first = where // 256 * 256
        assert not finite[first : first + 256].all()
        assert np.delete(finite, np.s_[first : first + 256]).all()

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_payload_has_the_promised_bytes_and_types(name):
    codec = wire.codec(name)
    for shape in SHAPES:
        payload = jax.tree.leaves(jax.jit(codec.encode)(jnp.zeros(shape)))
        assert sum(leaf.nbytes for leaf in payload) == codec.payload_bytes(shape)
    kinds = {
        "float32": ["float32"],
        "bfloat16": ["uint16"],
        "int8": ["int8", "float32"],
        "float4_e3m0": ["uint8", "float32"],
    }
    assert [str(leaf.dtype) for leaf in payload] == kinds[name]
    assert codec.payload_bytes((64, 1024)) * 8 == 64 * 1024 * codec.bits_per_parameter


@pytest.mark.parametrize(
    ("name", "least"), [("bfloat16", 2.0), ("int8", 3.9), ("float4_e3m0", 7.7)]
)
def test_compression(name, least):
    assert wire.compression(name) >= least


@pytest.mark.parametrize("name", FORMATS)
def test_islands_and_jit_change_no_bit(name):
    codec = wire.codec(name)
    x = jax.random.normal(jax.random.key(0), (3, 4, 300)) * 1e-3
    together = jax.jit(jax.vmap(codec.encode))(x)
    for m in range(3):
        alone = codec.encode(x[m])
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(a[m], b)


def test_blocks_keep_leading_axes_and_hide_the_padding():
    assert wire.blocks(jnp.zeros((6, 5, 512))).shape == (6, 5, 2, 256)
    assert wire.blocks(jnp.zeros((6, 8, 96))).shape == (6, 3, 256)
    assert wire.blocks(jnp.zeros((5, 7))).shape == (1, 256)
    for shape in SHAPES:
        x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        np.testing.assert_array_equal(wire.unblocks(wire.blocks(x), shape), x)


def normal(*shape, scale=1e-3, seed=0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def rounded(step):
    """17 significant bits, ties to even."""
    mantissa, exponent = np.frexp(step.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**17), exponent - 17)


def test_eq_int8():
    x = normal(7, 256).astype(np.float64)
    step = rounded(np.abs(x).max(1, keepdims=True) / 127)
    expected = step * np.round(x / step)
    np.testing.assert_array_equal(round_trip("int8", x.astype(np.float32)), expected)


def test_eq_e3m0():
    x = normal(7, 256).astype(np.float64)
    step = rounded(np.abs(x).max(1, keepdims=True) / 64)
    levels = np.array([0, 1, 2, 4, 8, 16, 32, 64])
    nearest = levels[np.abs(np.abs(x / step)[..., None] - levels).argmin(-1)]
    expected = step * np.sign(x) * nearest
    np.testing.assert_array_equal(round_trip("float4_e3m0", x.astype(np.float32)), expected)


def test_e3m0_rounds_at_the_middles():
    middles = np.array([0.5, 0.75, 1.5, 3, 6, 12, 24, 48], np.float32)
    below = np.nextafter(middles, np.float32(0))
    x = np.concatenate([middles, below, [64]]).astype(np.float32)
    levels = [1, 1, 2, 4, 8, 16, 32, 64], [0, 1, 1, 2, 4, 8, 16, 32]
    assert round_trip("float4_e3m0", x).tolist() == [*levels[0], *levels[1], 64]


def send(config, state, delta):
    """Sends the pseudo-gradients `[M, n]`: islands that have gone that far from Theta."""
    return diloco.flush(config, state._replace(inner={"params": state.outer_params[None] - delta}))


def test_eq_feedback():
    """Three sends, against the recursion written out."""
    config = DiLoCoConfig(
        num_islands=2, sync_period=1, wire_format="float4_e3m0", error_feedback=True
    )
    state = diloco.init(config, {"params": jnp.zeros(300)})
    theta, u, owed = np.zeros(300), np.zeros(300), np.zeros((2, 300))
    for t in range(3):
        delta = normal(2, 300, scale=1.0, seed=t)
        state = send(config, state, delta)
        d = (delta + owed).astype(np.float32)
        sent = np.stack([round_trip("float4_e3m0", row) for row in d])
        owed = d - sent
        u = 0.9 * u + sent.mean(0)
        theta = theta - 0.7 * (sent.mean(0) + 0.9 * u)
    np.testing.assert_allclose(state.outer_params, theta, atol=1e-5)
    np.testing.assert_allclose(state.residual, owed, atol=1e-5)
    assert np.abs(owed).max() > 0.1


def test_own_codec_is_known_to_the_configuration():
    sign = wire.Codec(
        encode=lambda x: (jnp.sign(x).astype(jnp.int8), jnp.mean(jnp.abs(x))),
        decode=lambda p, shape: (p[0].astype(jnp.float32) * p[1]).reshape(shape),
        bits_per_parameter=8.0,
    )
    wire.register("test_sign", sign)
    wire.register("test_sign", sign)  # again is no error
    config = DiLoCoConfig(num_islands=2, sync_period=1, wire_format="test_sign")
    delta = normal(2, 5)
    state = send(config, diloco.init(config, {"params": jnp.zeros(5)}), delta)
    mean = (np.sign(delta) * np.abs(delta).mean(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(state.outer_params, -0.7 * 1.9 * mean, rtol=1e-5)


def test_bad_names_and_codecs_are_refused():
    with pytest.raises(ValueError, match="'int4' is not known; use one of float32, bfloat16"):
        wire.codec("int4")
    with pytest.raises(ValueError, match="'int8' is taken"):
        wire.register("int8", wire.codec("bfloat16"))
    flat = wire.Codec(lambda x: x.reshape(-1), lambda p, shape: p, 32.0)
    with pytest.raises(ValueError, match=r"decodes zeros of shape \(\) to float32 \(1,\)"):
        wire.register("test_flat", flat)


def test_loss_record_is_of_the_recipe_as_it_is():
    """The page plots a record; it must hold every format, three seeds, and today's recipe."""
    recorded = json.loads((Path(__file__).parents[1] / "docs/data/wire_loss.json").read_text())
    assert set(recorded["record"]) == {"command", "machine", "versions", "kind", "unit"}
    assert recorded["record"]["kind"] == "measured"
    runs = {(r["wire_format"], r["error_feedback"], r["seed"]): r for r in recorded["runs"]}
    assert len(runs) == len(recorded["runs"])
    # Feedback matters where much is lost: it was recorded for 4 bits only.
    wanted = [("float32", False), *((name, False) for name in LOSSY), ("float4_e3m0", True)]
    assert set(runs) == {(*key, seed) for key in wanted for seed in range(3)}

    recipe = load_recipe(recorded["recipe"])
    every = recipe.train.eval_every
    params = jax.eval_shape(lambda: inner.init(recipe)["params"])
    for (name, _, _), run in runs.items():
        assert set(run) == set(recorded["record"]["unit"])
        config = dataclasses.replace(recipe.diloco, wire_format=name)
        fragments = diloco.partition(params, config).fragments
        assert run["sync_bytes"] == sum(f.wire_bytes for f in fragments)
        assert run["sync_period"] == recipe.diloco.sync_period
        assert run["num_parameters"] == sum(f.num_parameters for f in fragments)
        assert run["step"] == list(range(every, recipe.train.steps + 1, every))
        assert len(run["loss"]) == len(run["step"])
        assert 0 < run["loss"][-1] < run["loss"][0] < np.log(256)
