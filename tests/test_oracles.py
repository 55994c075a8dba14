"""Recorded traces of the contract, made by an independent program in float64."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diloco


TRACES = sorted((Path(__file__).parent / "data" / "oracles").glob("*.json"))
CONFIG = (
    "num_islands",
    "sync_period",
    "num_fragments",
    "overlap_steps",
    "mixing",
    "fragment_pattern",
    "outer_learning_rate",
    "outer_momentum",
)


def close(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_trace(path):
    trace = json.loads(path.read_text())
    case = trace["case"]
    config = diloco.DiLoCoConfig(**{k: case[k] for k in CONFIG})
    if case["inner_optimizer"] == "sgd":
        inner = optax.sgd(case["inner_learning_rate"])
    else:
        inner = optax.adamw(
            case["inner_learning_rate"], b1=0.9, b2=0.95, weight_decay=case["weight_decay"]
        )

    def inner_step(state, batch):
        def loss(p):
            parts = [0.5 * batch["curvature"][k] * (p[k] - batch["target"][k]) ** 2 for k in p]
            return sum(jnp.sum(part) for part in parts)

        value, grad = jax.value_and_grad(loss)(state["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer counts with floats
            updates, opt = inner.update(grad, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {k: jnp.asarray(v, jnp.float32) for k, v in trace["init"].items()}
    state = diloco.init(config, {"params": params, "opt": inner.init(params)})
    train_step = jax.jit(diloco.build_train_step(config, inner_step))
    curvature = {k: jnp.asarray(v, jnp.float32) for k, v in trace["curvature"].items()}
    for t, row in enumerate(trace["trace"], start=1):
        # the recorded targets are one entry a step, of one entry an island
        target = {k: jnp.asarray(v[t - 1], jnp.float32) for k, v in trace["target"].items()}
        state, loss = train_step(state, {"curvature": curvature, "target": target})
        assert row["step"] == t == int(state.step)
        close(loss, row["loss"])
        close(optax.tree.norm(state.outer_params), row["outer_l2"])
        close(jax.vmap(optax.tree.norm)(state.inner["params"]), row["inner_l2"])
    final = trace["final"]
    momentum = state.outer_opt_state[0].trace
    for leaf in params:
        close(state.outer_params[leaf], final["outer"][leaf])
        close(momentum[leaf], final["momentum"][leaf])
        close(state.inner["params"][leaf], final["inner"][leaf])
    events = diloco.schedule(config).events(case["steps"])
    assert [list(e) for e in events] == trace["events"]


def test_the_traces_are_here():
    assert len(TRACES) >= 3
