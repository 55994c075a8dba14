"""Experts equal Hugging Face's Qwen3-MoE and a literal transcription, with and without drops."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco import conf
from diloco.models import decoder
from diloco.models.moe import capacity, mixture_of_experts


B, S, D, E, F, K = 2, 16, 8, 4, 6, 2
TINY = dataclasses.replace(
    decoder.DecoderConfig(**conf.load("models", "tiny")),
    num_experts=4,
    experts_per_token=2,
    expert_dim=16,
    capacity_factor=2.0,
    expert_group=8,
)
TOKENS = jax.random.randint(jax.random.key(1), (4, 17), 0, 256)


@pytest.fixture(scope="module")
def weights():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, S, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    return tuple(jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))


def literal(x, router, w_gate, w_up, w_down, group, slots):
    """Sends tokens one by one, first choices first; returns outputs and the number dropped."""
    x, router, w_gate, w_up, w_down = (
        np.asarray(a, np.float64) for a in (x, router, w_gate, w_up, w_down)
    )
    tokens, out, dropped = x.reshape(-1, D), np.zeros((B * S, D)), 0
    logits = tokens @ router
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-probs, axis=-1)[:, :K]
    for start in range(0, B * S, group):
        used = np.zeros(E, int)
        for choice in range(K):
            for t in range(start, start + group):
                e = best[t, choice]
                if used[e] == slots:
                    dropped += 1
                    continue
                used[e] += 1
                gate = tokens[t] @ w_gate[e]
                hidden = gate / (1 + np.exp(-gate)) * (tokens[t] @ w_up[e])
                out[t] += probs[t, e] / probs[t, best[t]].sum() * (hidden @ w_down[e])
    return out.reshape(B, S, D), dropped, probs, best, logits


@pytest.mark.parametrize(("group", "factor"), [(64, 2.0), (8, 1.0), (16, 0.5)])
def test_equals_the_definition(weights, group, factor):
    y, report = mixture_of_experts(
        *weights, experts_per_token=K, capacity_factor=factor, group=group
    )
    group = min(group, S)
    slots = capacity(group, E, K, factor)
    expected, dropped, probs, best, logits = literal(*weights, group, slots)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    assert float(report["dropped"]) == pytest.approx(dropped / (B * S * K))
    assert (dropped > 0) == (factor < 2)
    share = np.bincount(best.ravel(), minlength=E) / (B * S)
    assert float(report["load_balance_loss"]) == pytest.approx(E * share @ probs.mean(0), rel=1e-5)
    log_z = np.log(np.exp(logits).sum(-1))
    assert float(report["router_z_loss"]) == pytest.approx((log_z**2).mean(), rel=1e-5)


def test_slots_cover_the_mean_load():
    assert capacity(512, 128, 8, 1.25) == 40
    assert capacity(8, 4, 2, 100.0) == 8  # an expert never needs more than the group
    assert capacity(8, 64, 1, 1.0) == 1


def test_logits_equal_hugging_face_qwen3_moe():
    file = dict(np.load(Path(__file__).parent / "data" / "qwen3_moe.npz"))
    sizes = json.loads(str(file.pop("about")))["config"]
    sizes["capacity_factor"] = sizes["num_experts"] / sizes["experts_per_token"]  # drops nothing
    config = decoder.DecoderConfig(**sizes)
    tokens, logits = file.pop("tokens"), file.pop("logits")
    params = {n: jnp.asarray(w) for n, w in file.items() if not n.startswith("layers.")}
    layers = {n[7:]: jnp.asarray(w) for n, w in file.items() if n.startswith("layers.")}
    ours = decoder.apply(config, {**params, "layers": layers}, jnp.asarray(tokens, jnp.int32))
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(ours, logits, atol=1e-4, rtol=0)


def test_losses_of_the_router_join_the_total():
    params = decoder.init(TINY, jax.random.key(0))
    weights = {"load_balance_loss": 0.1, "router_z_loss": 0.2, "z_loss": 0.3}
    value, metrics = decoder.loss(TINY, params, TOKENS, **weights)
    total = metrics["cross_entropy"] + sum(w * metrics[name] for name, w in weights.items())
    assert float(value) == pytest.approx(float(total))
    assert 1 <= float(metrics["load_balance_loss"]) < 4  # 2 choices a token, so 2 when balanced
    assert float(metrics["dropped"]) == 0


def test_sharded_islands_equal_one_device():
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("islands", "fsdp", "expert"), axis_types=auto)
    config = dataclasses.replace(TINY, remat=True)
    params = decoder.init(config, jax.random.key(0))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec("islands", *spec)),
        decoder.param_specs(config, mesh.axis_names),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def grad(p, t, mesh=None):
        def total(p):
            return decoder.loss(config, p, t, mesh=mesh, load_balance_loss=0.01)[0]

        return jax.value_and_grad(total)(p)

    both = jax.device_put(jax.tree.map(lambda p: jnp.stack([p, p]), params), shardings)
    mapped = jax.jit(jax.vmap(lambda p, t: grad(p, t, mesh), spmd_axis_name="islands"))
    sharded = mapped(both, jnp.stack([TOKENS, TOKENS[::-1]]))
    alone = jax.jit(grad)(params, TOKENS)
    first = jax.tree.map(lambda x: x[0], sharded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), first, alone)


def test_a_group_that_does_not_divide_is_refused(weights):
    with pytest.raises(ValueError, match="expert_group 5 does not divide the 16 tokens"):
        mixture_of_experts(*weights, experts_per_token=K, capacity_factor=1.0, group=5)
