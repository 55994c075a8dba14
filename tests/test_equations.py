"""Each numbered equation of the pages, written out in NumPy, against the function that is it.

One test an equation, named after its label: `eq-outer-step` would be `test_eq_outer_step`. Those of the arithmetic of
links, of the simulators and of the wire formats are beside the other tests of their modules.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diloco
from diloco import events, inner, links, outer, recipes, windows


ROOT = Path(__file__).parents[1]


def test_every_equation_has_its_test():
    pages = "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    tests = "\n".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    labels = set(re.findall(r":label: (eq-[\w-]+)", pages))
    assert len(labels) >= 7
    missing = [
        label
        for label in sorted(labels)
        if not re.search(
            rf"def test_{label.replace('-', '_')}\b|def test_{label.replace('-', '_')}_", tests
        )
    ]
    assert not missing


@given(st.integers(0, 1000))
@settings(max_examples=6, deadline=None)
def test_eq_adamw(seed):
    rng = np.random.default_rng(seed)
    train = recipes.Train(
        steps=8,
        global_batch_size=1,
        learning_rate=rng.uniform(1e-3, 0.3),
        warmup_steps=2,
        beta1=rng.uniform(0.5, 0.95),
        beta2=rng.uniform(0.8, 0.999),
        weight_decay=rng.uniform(0, 0.3),
        gradient_clip=1e9,
    )
    optimizer = inner.optimizer(train)
    x = rng.normal(size=4)
    theta = {"w": jnp.asarray(x, jnp.float32), "norm": jnp.asarray(x, jnp.float32)}
    state = optimizer.init(theta)
    y, r, s = x.copy(), np.zeros(4), np.zeros(4)
    for t in range(1, 9):
        g = rng.normal(size=4)
        updates, state = optimizer.update(
            {"w": jnp.asarray(g, jnp.float32), "norm": jnp.asarray(g, jnp.float32)}, state, theta
        )
        theta = optax.apply_updates(theta, updates)

        rate = float(inner.learning_rate(train, t - 1))
        r = train.beta1 * r + (1 - train.beta1) * g
        s = train.beta2 * s + (1 - train.beta2) * g**2
        d = (r / (1 - train.beta1**t)) / (np.sqrt(s / (1 - train.beta2**t)) + 1e-8)
        x = x - rate * (d + train.weight_decay * x)
        y = y - rate * d  # scales of norms are not decayed
    np.testing.assert_allclose(theta["w"], x, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(theta["norm"], y, rtol=2e-5, atol=2e-6)


def one_sync(theta, islands, u=None, eta=1.0, beta=0.0, mixing=0.0, dtype=jnp.float32):
    """One step with H = 1 whose inner step does nothing: one send and one apply of `islands` against `theta`."""
    config = diloco.DiLoCoConfig(
        num_islands=len(islands),
        sync_period=1,
        outer_learning_rate=eta,
        outer_momentum=beta,
        mixing=mixing,
    )
    state = diloco.init(config, {"params": jnp.asarray(theta, dtype)})
    state = state._replace(
        inner={"params": jnp.asarray(islands, dtype)}, outer_params=jnp.asarray(theta, jnp.float32)
    )
    if u is not None:
        state = state._replace(
            outer_opt_state=jax.tree.map(
                lambda x: jnp.asarray(u, jnp.float32), state.outer_opt_state
            )
        )
    step = diloco.build_train_step(config, lambda state, batch: (state, {}))
    return step(state, jnp.zeros(len(islands)))[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_eq_pseudo_gradient(dtype):
    """With eta = 1, beta = 0 and no momentum yet, Theta moves by minus the mean of old minus new."""
    rng = np.random.default_rng(0)
    theta, islands = rng.normal(size=5), rng.normal(size=(3, 5))
    seen = np.asarray(jnp.asarray(islands, dtype).astype(jnp.float32), np.float64)
    delta = np.mean([theta - seen[m] for m in range(3)], axis=0)
    state = one_sync(theta, islands, dtype=dtype)
    np.testing.assert_allclose(theta - np.asarray(state.outer_params), delta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.outer_opt_state[0].trace, delta, rtol=1e-5, atol=1e-6)


@given(st.floats(0.01, 2.0), st.floats(0.0, 0.99), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_eq_nesterov(eta, beta, seed):
    deltas = np.random.default_rng(seed).normal(size=(10, 3))
    config = diloco.DiLoCoConfig(
        num_islands=2, sync_period=1, outer_learning_rate=eta, outer_momentum=beta
    )
    optimizer = outer.outer_optimizer(config)
    got = jnp.zeros(3)
    state = optimizer.init(got)
    theta, u = np.zeros(3), np.zeros(3)
    expanded, m = np.zeros(3), np.zeros(3)
    for delta in deltas:
        updates, state = optimizer.update(jnp.asarray(delta, jnp.float32), state, got)
        got = optax.apply_updates(got, updates)
        u = beta * u + delta
        theta = theta - eta * (delta + beta * u)
        expanded = expanded - eta * (beta**2 * m + (1 + beta) * delta)  # Async Local-SGD, Eq. 4
        m = beta * m + delta
    np.testing.assert_allclose(got, theta, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state[0].trace, u, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(expanded, theta, rtol=1e-9, atol=1e-9)


def test_eq_nesterov_in_the_train_step():
    rng = np.random.default_rng(1)
    theta, islands, u = rng.normal(size=4), rng.normal(size=(2, 4)), rng.normal(size=4)
    delta = np.mean(theta - islands, axis=0)
    new_u = 0.9 * u + delta
    state = one_sync(theta, islands, u=u, eta=0.7, beta=0.9)
    np.testing.assert_allclose(
        state.outer_params, theta - 0.7 * (delta + 0.9 * new_u), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(state.outer_opt_state[0].trace, new_u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("H", "P"), [(1, 1), (7, 3), (10, 4), (12, 12), (100, 8), (500, 37)])
def test_eq_send(H, P):
    plan = diloco.schedule(
        diloco.DiLoCoConfig(num_islands=2, sync_period=H, num_fragments=P, overlap_steps=H // 2)
    )
    for t in range(3 * H + 1):
        sent = [p for p in range(P) if t >= 1 and (t - int(np.floor(p * H / P))) % H == 0]
        assert list(plan.sends(t)) == sent
        s = t - H // 2
        landed = [p for p in range(P) if s > 0 and (s - int(np.floor(p * H / P))) % H == 0]
        assert list(plan.applies(t)) == landed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_eq_apply(alpha, dtype):
    rng = np.random.default_rng(2)
    theta, islands = rng.normal(size=6), rng.normal(size=(3, 6))
    before = np.asarray(jnp.asarray(islands, dtype).astype(jnp.float32))
    state = one_sync(theta, islands, eta=0.7, beta=0.9, mixing=alpha, dtype=dtype)
    new = np.asarray(state.outer_params)
    mixed = alpha * before + (1 - alpha) * new[None]
    got = np.asarray(state.inner["params"].astype(jnp.float32))
    assert state.inner["params"].dtype == dtype
    # One rounding: half a unit in the last place of the inner type.
    np.testing.assert_allclose(got, mixed, rtol=float(jnp.finfo(dtype).eps) * 0.51, atol=1e-6)


sizes = st.integers(1, 50).flatmap(lambda L: st.tuples(st.just(L), st.integers(2, L + 1)))


def owners(L, P, pattern):
    """Fragment of each layer, read off the partition; fragment 0 holds all that is not a layer."""
    params = {"embed": jnp.zeros((2, 1)), "layers": jnp.zeros((L, 1))}
    config = diloco.DiLoCoConfig(
        num_islands=2, sync_period=60, num_fragments=P, fragment_pattern=pattern
    )
    parts = diloco.partition(params, config).fragments
    assert parts[0].leaves == ("embed",)
    owner = {l: f.number for f in parts for l in f.layers}
    return [owner[l] for l in range(L)]


@given(sizes)
@settings(max_examples=20, deadline=None)
def test_eq_strided(size):
    L, P = size
    assert owners(L, P, "strided") == [1 + l % (P - 1) for l in range(L)]


@given(sizes)
@settings(max_examples=20, deadline=None)
def test_eq_sequential(size):
    L, P = size
    assert owners(L, P, "sequential") == [1 + int(np.floor(l * (P - 1) / L)) for l in range(L)]


def test_eq_blocking():
    for x in np.geomspace(0.01, 100, 9):
        assert links.blocking_roofline(x, 1.0) == pytest.approx(1 / (1 + 1.0 / x))


def test_eq_window_intensity():
    """V F B / b_p reaches the ridge where fragment p, alone, fits its window."""
    step_flops, flops_per_second, rate = 8e9, 2e9, 3e6
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=10, num_fragments=2, overlap_steps=3)
    for b in (1e7, 3.5e7, 3.7e7, 1e8):
        intensity = links.model_intensity(step_flops, b, steps=3)
        assert intensity == pytest.approx(3 * step_flops / b)
        window = windows.windows(
            diloco.schedule(config),
            [b, 1.0],
            step_seconds=step_flops / flops_per_second,
            bytes_per_second=rate,
        )[0]
        fits = window.own_bytes_per_second <= rate
        assert fits == (intensity >= links.hardware_intensity(flops_per_second, rate))


def test_eq_events():
    """x_k and y_m(t) by recursion, two islands whose steps take a random time."""
    rng = np.random.default_rng(3)
    H, P, V, W, latency, b = 7, 3, 4, 10.0, 0.3, [20.0, 3.0, 9.0]
    T = rng.uniform(0.5, 1.5, (2, 4 * H))
    plan = diloco.schedule(
        diloco.DiLoCoConfig(num_islands=2, sync_period=H, num_fragments=P, overlap_steps=V)
    )
    y, x, before = np.zeros((2, 4 * H + 1)), {}, 0.0
    for t in range(1, 4 * H + 1):
        tilde = y[:, t - 1] + T[:, t - 1]
        for p in plan.sends(t):
            x[t] = before = max(before, tilde.max()) + b[p] / W
        y[:, t] = np.maximum(tilde, x[t - V] + latency) if plan.applies(t) else tilde
    run = events.simulate(
        plan, b, step_seconds=T, bytes_per_second=W, latency_seconds=latency, periods=4
    )
    np.testing.assert_allclose(run.clock, y, rtol=1e-12)
    np.testing.assert_allclose([s.end for s in run.transfers], list(x.values()), rtol=1e-12)
    assert run.stalls.max() > 0
