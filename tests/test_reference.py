"""The train step against the plain loops of `reference.py`, over drawn configurations."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diloco
import reference
import toy


@st.composite
def cases(draw):
    period = draw(st.integers(1, 9))
    num_fragments = draw(st.integers(1, period))
    num_layers = draw(st.integers(max(1, num_fragments - 1), 8))
    config = diloco.DiLoCoConfig(
        num_islands=draw(st.integers(1, 3)),
        sync_period=period,
        num_fragments=num_fragments,
        overlap_steps=draw(st.integers(0, period - 1)),
        mixing=draw(st.sampled_from([0.0, 0.25, 0.5, 0.9])),
        fragment_pattern=draw(st.sampled_from(["strided", "sequential", "balanced"])),
        outer_learning_rate=draw(st.sampled_from([0.3, 0.7, 1.0])),
        outer_momentum=draw(st.sampled_from([0.0, 0.6, 0.9])),
    )
    adamw, flush, seed = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99))
    return config, num_layers, adamw, flush, seed


def fragment_positions(config, num_layers, width, rows=4):
    """Positions by the rule of the contract, written out; `balanced` is read from the package."""
    tree = toy.params(num_layers, width)
    P, L = config.num_fragments, num_layers
    if P == 1:
        return [list(range(rows * width + L * width))]
    if config.fragment_pattern == "balanced":
        return toy.positions(config, tree)
    result = [list(range(rows * width))] + [[] for _ in range(P - 1)]
    for layer in range(L):
        strided = config.fragment_pattern == "strided"
        p = 1 + (layer % (P - 1) if strided else layer * (P - 1) // L)
        start = (rows + layer) * width
        result[p] += range(start, start + width)
    return result


@settings(
    max_examples=220, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(cases())
def test_step_is_the_reference(case):
    config, num_layers, adamw, flush, seed = case
    steps, width = 2 * config.sync_period + config.overlap_steps + 2, 3
    tree = toy.params(num_layers, width, seed)
    theta = toy.flat(tree)
    curvature, target = toy.problem(config.num_islands, steps, theta.size, seed)
    found = fragment_positions(config, num_layers, width)
    assert sorted(np.concatenate(found)) == list(range(theta.size))
    want = reference.run(
        theta,
        lambda m, t, x: curvature[m] * (x - target[t - 1, m]),
        found,
        config.num_islands,
        config.sync_period,
        config.overlap_steps,
        config.mixing,
        config.outer_learning_rate,
        config.outer_momentum,
        steps,
        adamw=toy.ADAMW if adamw else None,
        flush=flush,
    )
    optimizer = toy.adamw() if adamw else toy.sgd()
    state, _ = toy.run(config, optimizer, tree, curvature, target, flush=flush)
    got = (
        toy.flat(state.outer_params),
        toy.flat(state.outer_opt_state[0].trace),
        toy.flat_islands(state.inner["params"]),
    )
    for g, w in zip(got, want[:3], strict=True):
        # AdamW divides by the root of a small second moment, so one float32 ulp can grow there.
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5 if not adamw else 2e-4)
    assert diloco.schedule(config).events(steps) == want[3]
    assert int(state.step) == steps


def test_a_wrong_reference_is_noticed():
    """The comparison can fail: applying one step late is seen."""
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=4, overlap_steps=1)
    tree = toy.params(2)
    theta = toy.flat(tree)
    curvature, target = toy.problem(2, 9, theta.size)
    state, _ = toy.run(config, toy.sgd(), tree, curvature, target)
    wrong = reference.run(
        theta,
        lambda m, t, x: curvature[m] * (x - target[t - 1, m]),
        [list(range(theta.size))],
        *(2, 4, 2, 0.0, 0.7, 0.9, 9),
    )
    assert np.abs(toy.flat(state.outer_params) - wrong[0]).max() > 1e-2
