"""The decoder equals Hugging Face's Qwen3, and the same function however it is computed."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco import conf
from diloco.models import decoder


TINY = decoder.DecoderConfig(**conf.load("models", "tiny"))
TOKENS = jax.random.randint(jax.random.key(1), (4, 17), 0, 256)


@pytest.fixture(scope="module")
def params():
    return decoder.init(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def value_and_grad():
    """Loss and gradient of TINY, compiled once."""

    @functools.partial(jax.jit, static_argnums=0)
    def function(config, params, tokens):
        return jax.value_and_grad(lambda p: decoder.loss(config, p, tokens)[0])(params)

    return function


def recorded(name):
    """Reads a record of benchmarks/record_qwen3_logits.py."""
    file = dict(np.load(Path(__file__).parent / "data" / name))
    config = decoder.DecoderConfig(**json.loads(str(file.pop("about")))["config"])
    tokens, logits = file.pop("tokens"), file.pop("logits")
    layers = {n[7:]: jnp.asarray(w) for n, w in file.items() if n.startswith("layers.")}
    params = {n: jnp.asarray(w) for n, w in file.items() if not n.startswith("layers.")}
    return config, {**params, "layers": layers}, jnp.asarray(tokens, jnp.int32), logits


def is_spec(x):
    return isinstance(x, PartitionSpec)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_logits_equal_hugging_face_qwen3():
    config, params, tokens, logits = recorded("qwen3.npz")
    template = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, template)
    ours = decoder.apply(config, params, tokens)
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(ours, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("qwen3-8b", 8.19e9, 8.19e9), ("qwen3-30b-a3b", 30.5e9, 3.3e9)],
)
def test_published_parameter_counts(name, total, active):
    config = decoder.DecoderConfig(**conf.load("models", name))
    assert decoder.num_parameters(config) == pytest.approx(total, rel=2e-3)
    assert decoder.active_parameters(config) == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize("name", conf.names("models"))
def test_every_model_of_conf_builds(name):
    config = conf.build(decoder.DecoderConfig, conf.load("models", name), name)
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    assert sum(math.prod(s.shape) for s in jax.tree.leaves(shapes)) == decoder.num_parameters(
        config
    )


@pytest.mark.parametrize("name", ["tiny", "laptop"])
def test_loss_starts_near_that_of_a_uniform_guess(name):
    config = decoder.DecoderConfig(**conf.load("models", name))
    value, _ = decoder.loss(config, decoder.init(config, jax.random.key(0)), TOKENS)
    assert float(value) == pytest.approx(math.log(config.vocab_size), abs=0.06)


def test_no_token_sees_a_later_one(params):
    changed = TOKENS.at[:, 9:].set(0)
    a, b = (decoder.apply(TINY, params, t)[:, :9] for t in (TOKENS, changed))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_loss_is_the_mean_over_tokens_and_auxiliary_losses_are_weighted(params):
    value, metrics = decoder.loss(TINY, params, TOKENS, z_loss=0.5)
    logits = np.asarray(decoder.apply(TINY, params, TOKENS[:, :-1]), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    target = np.take_along_axis(logits, np.asarray(TOKENS[:, 1:, None]), -1)[..., 0]
    assert float(metrics["cross_entropy"]) == pytest.approx((log_z - target).mean(), rel=1e-5)
    assert float(metrics["z_loss"]) == pytest.approx((log_z**2).mean(), rel=1e-5)
    assert float(value) == pytest.approx((log_z - target + 0.5 * log_z**2).mean(), rel=1e-5)


def test_saving_memory_changes_no_number(params, value_and_grad):
    lean = dataclasses.replace(TINY, remat=True, attention_block=4, loss_block=8)
    plain = value_and_grad(TINY, params, TOKENS)
    assert_trees_close(plain, value_and_grad(lean, params, TOKENS), atol=2e-6)


def test_islands_are_mapped_with_vmap(params, value_and_grad):
    both = jax.tree.map(lambda p: jnp.stack([p, 1.1 * p]), params)
    tokens = jnp.stack([TOKENS[::-1], TOKENS])
    mapped = jax.vmap(functools.partial(value_and_grad, TINY))(both, tokens)
    alone = value_and_grad(TINY, jax.tree.map(lambda p: 1.1 * p, params), TOKENS)
    assert_trees_close(jax.tree.map(lambda x: x[1], mapped), alone, atol=1e-5)


def test_sharded_islands_equal_one_device(params, value_and_grad):
    axes, auto = ("islands", "fsdp", "tensor"), jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(auto,) * 3)
    both = jax.tree.map(lambda p: jnp.stack([1.1 * p, p]), params)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec("islands", *spec)),
        # the single key-value head of the tiny model cannot be cut over "tensor"
        decoder.param_specs(TINY, ("islands", "fsdp")),
        is_leaf=is_spec,
    )

    def grad(p, t):
        return jax.value_and_grad(lambda p: decoder.loss(TINY, p, t, mesh=mesh)[0])(p)

    mapped = jax.jit(jax.vmap(grad, spmd_axis_name="islands"))(
        jax.device_put(both, shardings),
        jax.device_put(
            jnp.stack([TOKENS[::-1], TOKENS]),
            NamedSharding(mesh, PartitionSpec("islands", "fsdp")),
        ),
    )
    alone = value_and_grad(TINY, params, TOKENS)
    assert_trees_close(jax.tree.map(lambda x: x[1], mapped), alone, atol=1e-5)


def test_fsdp_spares_the_layer_axis_and_the_last():
    for name in ("qwen3-8b", "qwen3-30b-a3b"):
        config = decoder.DecoderConfig(**conf.load("models", name))
        shapes = jax.eval_shape(lambda config=config: decoder.init(config, jax.random.key(0)))
        specs = decoder.param_specs(config)
        flat = jax.tree.leaves(specs, is_leaf=is_spec)
        for shape, spec in zip(jax.tree.leaves(shapes), flat, strict=True):
            assert len(spec) == len(shape.shape)
            if math.prod(shape.shape) > 1e6:
                at = spec.index("fsdp")
                assert at < len(spec) - 1 and shape.shape[at] % 64 == 0
        assert all(spec[0] is None for spec in jax.tree.leaves(specs["layers"], is_leaf=is_spec))


def test_bfloat16_computes_in_bfloat16_with_a_float32_loss(params):
    config = dataclasses.replace(TINY, dtype="bfloat16")
    value, _ = decoder.loss(config, params, TOKENS)
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(float(decoder.loss(TINY, params, TOKENS)[0]), abs=0.02)
    text = jax.jit(lambda p: decoder.loss(config, p, TOKENS)[0]).lower(params).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("xbf16>" in line for line in products)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"mlp_dim": 0}, "mlp_dim is 0; it must be at least 1"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"num_experts": 2, "experts_per_token": 3, "expert_dim": 8}, "3 is over num_experts 2"),
        ({"num_experts": 2, "experts_per_token": 1}, "expert_dim is 0"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; it must be over 0"),
        ({"dtype": "float16"}, "dtype is 'float16'; use float32 or bfloat16"),
        ({"attention_block": -1}, "attention_block is -1; it must be at least 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_loss_block_that_does_not_divide_is_refused(params):
    with pytest.raises(ValueError, match="loss_block 5 does not divide the 16 tokens"):
        decoder.loss(dataclasses.replace(TINY, loss_block=5), params, TOKENS)
