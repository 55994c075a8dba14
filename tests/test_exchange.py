"""The exchange: what goes into Theta, what stays owed, and what crosses islands in the compiled step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diloco
from diloco import DiLoCoConfig, sharding, wire
from diloco.traffic import device_islands, traffic


FORMATS = ("float32", "bfloat16", "int8", "float4_e3m0")
LOSSY = FORMATS[1:]
N = 300


def config(**kw):
    return DiLoCoConfig(**{"num_islands": 2, "sync_period": 1, **kw})


@functools.cache
def start(config):
    return diloco.init(config, {"params": jnp.zeros(N)})


@functools.cache
def sender(config):
    """Compiled `send(state, delta [M, N])`: every island has gone delta from Theta, then all is sent."""

    @jax.jit
    def send(state, delta):
        own = state.outer_params[None].astype(jnp.float32) - delta
        return diloco.flush(config, state._replace(inner={"params": own}))

    return send


def deltas(num_islands=2, seed=0):
    return np.random.default_rng(seed).normal(0, 1e-2, (num_islands, N)).astype(np.float32)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", FORMATS)
def test_every_island_counts_with_its_decoded_value(name):
    plain = config(num_islands=3, wire_format=name, outer_learning_rate=1.0, outer_momentum=0.0)
    delta = deltas(3)
    codec = wire.codec(name)
    sent = np.stack([codec.decode(codec.encode(jnp.asarray(d)), (N,)) for d in delta])
    theta = sender(plain)(start(plain), delta).outer_params
    np.testing.assert_allclose(theta, -sent.mean(0), rtol=1e-5, atol=1e-8)
    if name in LOSSY:
        assert np.abs(sent - delta).max() > 1e-6


def test_feedback_over_a_lossless_wire_changes_nothing():
    without, with_feedback = config(), config(error_feedback=True)
    a, b = start(without), start(with_feedback)
    for seed in range(3):
        delta = deltas(seed=seed)
        a, b = sender(without)(a, delta), sender(with_feedback)(b, delta)
    same_bits(a, b._replace(residual=None))
    assert not np.any(b.residual)


@pytest.mark.parametrize("name", LOSSY)
def test_mean_of_what_feedback_sends_converges(name):
    """Theta falls by what is sent each round; feedback makes n sends worth n pseudo-gradients, up to one residual."""
    delta, rounds = deltas(), 64

    def mean_error(error_feedback):
        c = config(
            wire_format=name,
            error_feedback=error_feedback,
            outer_learning_rate=1.0,
            outer_momentum=0.0,
        )
        send, state, total = sender(c), start(c), np.zeros(N)
        for _ in range(rounds):
            state = send(state._replace(outer_params=jnp.zeros(N)), delta)
            total -= np.asarray(state.outer_params, np.float64)
        return np.abs(total / rounds - delta.mean(0)).max(), state

    lost, _ = mean_error(False)
    error, state = mean_error(True)
    owed = np.abs(np.asarray(state.residual).mean(0)).max()
    assert error <= owed / rounds + 1e-8
    assert error < lost / 8


@pytest.mark.parametrize("error_feedback", [False, True])
def test_outer_step_is_linear_in_the_outer_learning_rate(error_feedback):
    def after(eta):
        c = config(
            wire_format="float4_e3m0", error_feedback=error_feedback, outer_learning_rate=eta
        )
        state = start(c)
        if error_feedback:
            state = state._replace(residual=jnp.asarray(deltas(seed=1)))
        return sender(c)(state, deltas())

    half, whole = after(0.5), after(1.0)
    np.testing.assert_array_equal(2 * half.outer_params, whole.outer_params)
    same_bits(half.residual, whole.residual)
    assert np.abs(whole.outer_params).max() > 1e-3


@pytest.mark.parametrize("name", ["float32", "float4_e3m0"])
def test_permuting_the_islands_permutes_them_and_leaves_theta(name):
    c = config(wire_format=name, error_feedback=True)
    a, b = start(c), start(c)
    for seed in range(3):
        delta = deltas(seed=seed)
        a, b = sender(c)(a, delta), sender(c)(b, delta[::-1])
    same_bits(a.outer_params, b.outer_params)
    same_bits(a.residual, b.residual[::-1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_error_leaves_everything_and_counts_the_island(name, bad):
    c = config(wire_format=name, error_feedback=True)
    before = sender(c)(start(c), deltas())
    delta = deltas(seed=1)
    delta[1, 7] = bad  # one number
    after = sender(c)(before, delta)
    same_bits(after.outer_params, before.outer_params)
    same_bits(after.outer_opt_state, before.outer_opt_state)
    same_bits(after.residual, before.residual)
    assert after.skipped.tolist() == [0, 1]


@pytest.mark.parametrize("name", FORMATS)
def test_skip_takes_the_mean_of_the_others(name):
    three = config(num_islands=3, wire_format=name, on_bad_island="skip", error_feedback=True)
    two = config(num_islands=2, wire_format=name, error_feedback=True)
    before = sender(three)(start(three), deltas(3))
    delta = deltas(3, seed=1)
    delta[1, 7] = np.nan
    after = sender(three)(before, delta)
    others = start(two)._replace(
        outer_params=before.outer_params,
        outer_opt_state=before.outer_opt_state,
        residual=before.residual[::2],
    )
    expected = sender(two)(others, delta[::2])
    np.testing.assert_allclose(after.outer_params, expected.outer_params, rtol=1e-6, atol=1e-9)
    same_bits(after.residual[::2], expected.residual)
    same_bits(after.residual[1], before.residual[1])
    assert after.skipped.tolist() == [0, 1, 0]
    assert np.isfinite(after.inner["params"]).all()  # alpha = 0: the island is back


def test_skip_with_no_island_left_changes_nothing():
    c = config(wire_format="int8", on_bad_island="skip", error_feedback=True)
    before = sender(c)(start(c), deltas())
    after = sender(c)(before, np.full((2, N), np.nan, np.float32))
    same_bits(after.outer_params, before.outer_params)
    same_bits(after.outer_opt_state, before.outer_opt_state)
    same_bits(after.residual, before.residual)
    assert after.skipped.tolist() == [1, 1]


# On a mesh of two islands of two devices. The third axis of `w` is no whole number of blocks.

SPECS = {"embed": P("fsdp", None), "layers": {"w": P(None, "fsdp", None), "norm": P(None, None)}}
SHAPES = {"embed": (64, 256), "layers": {"w": (4, 16, 96), "norm": (4, 256)}}


def meshed(name, **kw):
    """The compiled step, its start and its mesh."""
    c = config(
        sync_period=4, num_fragments=3, wire_format=name, error_feedback=name != "float32", **kw
    )
    mesh = sharding.make_mesh(2, fsdp=2, devices=jax.devices()[:4])
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda shape, spec: jax.device_put(
            jax.random.normal(key, shape), NamedSharding(mesh, spec)
        ),
        SHAPES,
        SPECS,
        is_leaf=lambda x: isinstance(x, tuple) and not isinstance(x, P),
    )

    def inner_step(state, batch):
        own = jax.tree.map(lambda p: p - batch * jnp.sin(p), state["params"])
        return {"params": own}, {}

    state = diloco.init(c, {"params": params}, mesh=mesh)
    step = jax.jit(diloco.build_train_step(c, inner_step, mesh=mesh))
    batch = jax.device_put(jnp.array([0.1, 0.2]), NamedSharding(mesh, P("islands")))
    return c, mesh, state, step.lower(state, batch).compile(), batch


@pytest.fixture(scope="module", params=FORMATS)
def program(request):
    return meshed(request.param)


def test_only_the_payload_crosses_islands_and_only_in_a_send(program):
    c, mesh, state, step, _ = program
    moved = traffic(step.as_text(), device_islands(mesh))
    assert moved.unconditional == {}
    assert moved.within == {}
    # A chip sends its half of the fragment, and all of what both chips of an island hold: the norms.
    norms = wire.codec(c.wire_format).payload_bytes((2, 256))
    wanted = {
        (f.wire_bytes + norms * ("layers/norm" in f.leaves)) / 2
        for f in diloco.partition(state.outer_params, c).fragments
    }
    sizes = sorted(sum(branch.across.values()) for branch in moved.sends)
    assert sizes == pytest.approx(sorted(wanted), rel=0.01)
    assert len(sizes) == 2  # fragment 0, and one branch for the two of layers
    # Whether all is finite: one byte for the pseudo-gradients, one for their mean.
    assert all(sum(branch.within.values()) <= 2 for branch in moved.sends)
    if c.wire_format != "float32":
        kind = {"bfloat16": "u16", "int8": "s8", "float4_e3m0": "u8"}[c.wire_format]
        gathered = set(re.findall(r"= (\w+)\[\S* all-gather\(", step.as_text()))
        assert kind in gathered
        assert gathered <= {kind, "f32"}  # the steps of the blocks


def test_theta_has_the_same_bits_on_every_island(program):
    c, mesh, state, step, batch = program
    for _ in range(4):
        state, _ = step(state, batch)
    for leaf in jax.tree.leaves((state.outer_params, state.outer_opt_state)):
        seen = {}
        for shard in leaf.addressable_shards:
            first = seen.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, shard.data)
        assert 4 // len(seen) >= 2  # each part lies on both islands
    alone = diloco.flush(c, jax.device_put(jax.device_get(state)))
    together = diloco.flush(c, state, mesh=mesh)
    for a, b in zip(
        jax.tree.leaves(alone.outer_params), jax.tree.leaves(together.outer_params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
