"""The one-program train step: special cases, equal results everywhere it runs, shardings, refusals."""

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import diloco
import toy
from diloco import conf, outer
from diloco.models import decoder
from diloco.sharding import make_mesh, split_batch, state_sharding


def config(**kw):
    return diloco.DiLoCoConfig(**{"num_islands": 2, "sync_period": 4, **kw})


def trees_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), **tolerance)


@pytest.fixture(scope="module")
def data():
    tree = toy.params(4)
    curvature, target = toy.problem(2, 12, toy.flat(tree).size)
    return tree, curvature, target


# Special cases


def test_one_fragment_is_vanilla_written_out_to_the_bit(data):
    """H inner steps under vmap, one mean, one optax step, one broadcast: no fragments, no schedule."""
    tree, curvature, target = data
    optimizer = toy.adamw()
    state, _ = toy.run(config(), optimizer, tree, curvature, target)
    nesterov, inner = optax.sgd(0.7, 0.9, nesterov=True), jax.vmap(toy.inner(optimizer))

    def both(x):
        return jnp.stack([x, x])

    def sync(carry):
        theta, momentum, islands = carry
        delta = jax.tree.map(lambda g, p: jnp.mean(both(g) - p, 0), theta, islands["params"])
        ok = jnp.all(jnp.stack([jnp.all(jnp.isfinite(d)) for d in jax.tree.leaves(delta)]))
        updates, new = nesterov.update(delta, momentum)
        momentum = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, momentum)
        moved = optax.apply_updates(theta, updates)
        theta = jax.tree.map(lambda n, o: jnp.where(ok, n, o), moved, theta)
        return theta, momentum, {**islands, "params": jax.tree.map(both, theta)}

    def step(carry, x):
        t, theta, momentum, islands = carry
        islands, _ = inner(islands, (jnp.asarray(curvature), x))
        carry = theta, momentum, islands
        return (t + 1, *jax.lax.cond((t + 1) % 4 == 0, sync, lambda c: c, carry)), None

    islands = jax.tree.map(both, {"params": tree, "opt": optimizer.init(tree)})
    start = (jnp.int32(0), tree, nesterov.init(tree), islands)
    (_, theta, momentum, islands), _ = jax.jit(lambda c, x: jax.lax.scan(step, c, x))(
        start, jnp.asarray(target)
    )
    jax.tree.map(np.testing.assert_array_equal, state.outer_params, theta)
    jax.tree.map(np.testing.assert_array_equal, state.outer_opt_state[0].trace, momentum[0].trace)
    jax.tree.map(np.testing.assert_array_equal, state.inner, islands)


def test_unit_outer_step_is_the_mean_of_the_islands(data):
    tree, curvature, target = data
    setting = config(outer_learning_rate=1.0, outer_momentum=0.0)
    before, _ = toy.run(config(sync_period=100), toy.sgd(), tree, curvature, target[:4])
    after, _ = toy.run(setting, toy.sgd(), tree, curvature, target[:4])
    mean = jax.tree.map(lambda x: jnp.mean(x, 0), before.inner["params"])
    trees_close(after.outer_params, mean, rtol=1e-6, atol=1e-6)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), after.outer_params)
    jax.tree.map(np.testing.assert_array_equal, after.inner["params"], both)


def test_one_island_with_unit_outer_step_is_plain_training(data):
    tree, curvature, target = data
    setting = config(num_islands=1, outer_learning_rate=1.0, outer_momentum=0.0)
    state, _ = toy.run(setting, toy.adamw(), tree, curvature[:1], target[:, :1])
    inner, plain = (
        jax.jit(toy.inner(toy.adamw())),
        {"params": tree, "opt": toy.adamw().init(tree)},
    )
    for x in target[:, 0]:
        plain, _ = inner(plain, (jnp.asarray(curvature[0]), jnp.asarray(x)))
    trees_close(state.outer_params, plain["params"], rtol=1e-6, atol=1e-6)


def test_period_one_with_sgd_is_large_batch_data_parallelism(data):
    tree, curvature, target = data
    setting = config(sync_period=1, outer_learning_rate=1.0, outer_momentum=0.0)
    state, _ = toy.run(setting, toy.sgd(), tree, curvature, target)
    flat = toy.flat(tree)
    for x in target:
        flat = flat - 0.1 * np.mean(curvature * (flat[None] - x), 0)
    np.testing.assert_allclose(toy.flat(state.outer_params), flat, rtol=1e-5, atol=1e-5)


# Where it runs


@pytest.mark.parametrize(
    "setting",
    [
        config(),
        config(num_fragments=3, overlap_steps=1, mixing=0.5),
        config(num_fragments=3, overlap_steps=2, wire_format="float4_e3m0", error_feedback=True),
    ],
    ids=["vanilla", "streaming", "4 bit"],
)
def test_same_numbers_step_by_step_in_a_scan_and_on_a_mesh(data, setting):
    tree, curvature, target = data
    scanned, metrics = toy.run(setting, toy.adamw(), tree, curvature, target)
    step = jax.jit(diloco.build_train_step(setting, toy.inner(toy.adamw())))
    state = diloco.init(setting, {"params": tree, "opt": toy.adamw().init(tree)})
    for t, x in enumerate(target):
        state, m = step(state, (jnp.asarray(curvature), jnp.asarray(x)))
        np.testing.assert_allclose(m["norm"], metrics["norm"][t], rtol=1e-5)
    assert step._cache_size() == 1  # nothing is compiled again
    trees_close(state, scanned, rtol=1e-5, atol=1e-5)
    for mesh in (
        make_mesh(2, fsdp=2, devices=jax.devices()[:4]),
        make_mesh(1, fsdp=1, devices=jax.devices()[3:4]),
    ):
        if mesh.shape["islands"] == 1:
            placed = jax.device_put(tree, jax.NamedSharding(mesh, P()))
        else:
            specs = {"embed": P("fsdp"), "layers": {"w": P()}}
            placed = jax.tree.map(
                lambda x, s, mesh=mesh: jax.device_put(x, jax.NamedSharding(mesh, s)),
                tree,
                specs,
                is_leaf=lambda x: isinstance(x, P),
            )
        meshed, m = toy.run(setting, toy.adamw(), placed, curvature, target, mesh=mesh)
        trees_close(meshed, scanned, rtol=1e-5, atol=1e-5)
        trees_close(m, metrics, rtol=1e-5, atol=1e-5)


def test_every_leaf_keeps_the_sharding_asked_for(data):
    tree, curvature, target = data
    mesh = make_mesh(2, fsdp=2, devices=jax.devices()[:4])
    setting = config(num_fragments=3, overlap_steps=1, mixing=0.5, error_feedback=True)
    specs = {"embed": P("fsdp"), "layers": {"w": P()}}
    placed = jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s)), tree, specs)
    # optax's moments are made like the parameters, so they lie like them
    inner = {"params": placed, "opt": toy.adamw().init(placed)}
    want = state_sharding(setting, inner, mesh)
    state = diloco.init(setting, inner, mesh=mesh)
    step = jax.jit(
        diloco.build_train_step(setting, toy.inner(toy.adamw()), mesh=mesh),
        donate_argnums=0,
        out_shardings=(want, None),
    )
    for t in range(-1, 5):
        if t >= 0:
            state, _ = step(state, (jnp.asarray(curvature), jnp.asarray(target[t])))
        for (path, x), s in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(want), strict=True
        ):
            assert x.sharding.is_equivalent_to(s, x.ndim), (t, jax.tree_util.keystr(path))
    assert want.outer_opt_state[0].trace["embed"].spec == P("fsdp")
    assert state.outer_params["embed"].sharding.spec == P("fsdp")


def test_state_buffers_are_donated_and_nothing_whole_is_copied(data):
    """All of the state is updated in place; temporaries stay below one fragment beyond the bare inner step's."""
    tree = {"embed": jnp.zeros((8, 64)), "layers": {"w": jnp.zeros((16, 64, 64))}}
    size = toy.flat(tree).size
    setting = config(sync_period=17, num_fragments=17, overlap_steps=2, mixing=0.5)
    state = diloco.init(setting, {"params": tree, "opt": toy.adamw().init(tree)})
    batch = (jnp.zeros((2, size)), jnp.zeros((2, size)))
    bare = jax.jit(jax.vmap(toy.inner(toy.adamw())), donate_argnums=0)
    bare = bare.lower(state.inner, batch).compile().memory_analysis()
    step = jax.jit(
        diloco.build_train_step(setting, toy.inner(toy.adamw())), donate_argnums=0
    ).lower(state, batch)
    memory = step.compile().memory_analysis()
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    # the flags of the [M] vectors may stay out
    assert memory.alias_size_in_bytes >= 0.999 * whole
    fragment = 2 * 64 * 64 * 4  # both islands are on this one device
    extra = memory.temp_size_in_bytes - bare.temp_size_in_bytes
    print(
        f"temporaries beyond the inner step: {extra} bytes, {extra / fragment:.3f} of one fragment"
    )
    assert extra <= 1.05 * fragment


def test_program_does_not_grow_with_fragments():
    model = dataclasses.replace(
        conf.build(decoder.DecoderConfig, conf.load("models", "tiny"), "tiny"), num_layers=36
    )
    params = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    optimizer = toy.adamw()

    def inner_step(state, tokens):
        (_, metrics), grad = jax.value_and_grad(
            lambda p: decoder.loss(model, p, tokens), has_aux=True
        )(state["params"])
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = optimizer.update(grad, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    for overlap in (0, 5):
        sizes = {}
        for count in (2, 37):
            setting = config(sync_period=37, num_fragments=count, overlap_steps=overlap, mixing=0.5)
            state = jax.eval_shape(
                lambda s=setting: diloco.init(
                    s,
                    {
                        "params": jax.tree.map(lambda x: jnp.zeros(x.shape), params),
                        "opt": optimizer.init(jax.tree.map(lambda x: jnp.zeros(x.shape), params)),
                    },
                )
            )
            tokens = jax.ShapeDtypeStruct((2, 2, 17), jnp.int32)
            step = jax.jit(diloco.build_train_step(setting, inner_step))
            sizes[count] = len(step.lower(state, tokens).as_text())
        ratio = sizes[37] / sizes[2]
        print(f"V = {overlap}: StableHLO {sizes} bytes, ratio {ratio:.3f}")
        assert ratio <= 1.15


def test_drjax_finds_the_mesh(data, caplog):
    """DrJAX warns and constrains nothing when it finds no mesh; it must always be handed one."""
    tree, curvature, target = data
    logging.getLogger("absl").propagate = True
    with caplog.at_level(logging.WARNING):
        toy.run(config(), toy.sgd(), tree, curvature, target[:4], flush=True)
        mesh = make_mesh(2, fsdp=1, devices=jax.devices()[:2])
        toy.run(config(), toy.sgd(), tree, curvature, target[:4], mesh=mesh)
    assert not [r.getMessage() for r in caplog.records if "mesh" in r.getMessage().lower()]


# States and optimizers


class TrainState(NamedTuple):
    params: Any
    count: jax.Array
    key: jax.Array


def test_named_tuple_state_with_a_random_key():
    setting = config(num_islands=3, sync_period=2)
    start = TrainState({"w": jnp.zeros(4)}, jnp.int32(0), jax.random.key(7))

    def inner_step(state, batch):
        key, use = jax.random.split(state.key)
        noise = jax.random.normal(use, (4,))
        params = {"w": state.params["w"] - 0.1 * (noise + batch)}
        return TrainState(params, state.count + 1, key), noise

    state = diloco.init(setting, start)
    keys = jax.random.key_data(state.inner.key)
    np.testing.assert_array_equal(keys[0], jax.random.key_data(start.key))
    assert len({tuple(k) for k in keys.tolist()}) == 3
    step = jax.jit(diloco.build_train_step(setting, inner_step))
    state, noise = step(state, jnp.zeros((3, 1)))
    assert noise.shape == (3, 4) and len(np.unique(noise)) == 12
    state, _ = step(state, jnp.zeros((3, 1)))
    assert state.inner.count.tolist() == [2, 2, 2] and state.step.dtype == jnp.int32
    assert np.ptp(np.asarray(state.inner.params["w"]), axis=0).max() == 0


def test_lens_and_state_that_is_not_a_parameter_stays_per_island():
    setting = config(sync_period=1)
    lens = diloco.ParamsLens(lambda s: s[0], lambda s, p: (p, s[1]))

    def inner_step(state, batch):
        return (state[0] - batch, state[1] + batch), batch

    state = diloco.init(setting, (jnp.zeros(3), jnp.zeros(3)), params=lens)
    step = jax.jit(diloco.build_train_step(setting, inner_step, params=lens))
    state, _ = step(state, jnp.array([[1.0, 1, 1], [2.0, 2, 2]]))
    assert state.inner[0][0].tolist() == state.inner[0][1].tolist()
    assert state.inner[1].tolist() == [[1, 1, 1], [2, 2, 2]]


def test_bfloat16_islands_have_a_float32_outer_copy(data):
    _, curvature, target = data
    tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy.params(4))
    setting = config(num_fragments=3, overlap_steps=1, mixing=0.5)
    state, _ = toy.run(setting, toy.sgd(), tree, curvature, target)
    assert {x.dtype for x in jax.tree.leaves(state.inner["params"])} == {jnp.bfloat16.dtype}
    assert {x.dtype for x in jax.tree.leaves((state.outer_params, state.outer_opt_state))} == {
        np.dtype("float32")
    }
    # Theta is finer than bfloat16 can hold: it was not rounded on its way
    assert np.any(
        toy.flat(state.outer_params)
        != toy.flat(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.outer_params))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adam(0.05),
        lambda: optax.sgd(optax.linear_schedule(1.0, 0.1, 3), momentum=0.5),
        lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
    ],
    ids=["adam", "schedule", "decay"],
)
def test_own_outer_optimizer_is_stepped_once_a_fragment_and_period(data, make):
    """Each fragment sees the optimizer as if it were alone: its own count, moments and rate."""
    tree, curvature, target = data
    setting = config(num_fragments=3)
    state, _ = toy.run(setting, toy.sgd(), tree, curvature, target, outer_optimizer=make())
    found = toy.positions(setting, tree)
    flat, optimizer = toy.flat(tree).astype(np.float32), make()
    theta = [jnp.asarray(flat[f]) for f in found]
    states = [optimizer.init(x) for x in theta]
    island = np.stack([flat, flat])
    for t in range(1, 13):
        island = island - np.float32(0.1) * curvature * (island - target[t - 1])
        for p in diloco.schedule(setting).sends(t):
            delta = jnp.asarray(np.mean(np.asarray(theta[p])[None] - island[:, found[p]], 0))
            with jax.numpy_dtype_promotion("standard"):
                updates, states[p] = optimizer.update(delta, states[p], theta[p])
                theta[p] = optax.apply_updates(theta[p], updates)
            island[:, found[p]] = np.asarray(theta[p])[None]
    for f, x in zip(found, theta, strict=True):
        np.testing.assert_allclose(toy.flat(state.outer_params)[f], x, rtol=2e-5, atol=2e-5)


def test_outer_optimizer_that_cannot_be_cut_is_refused(data):
    tree, *_ = data
    for optimizer in (optax.lbfgs(), optax.adafactor(min_dim_size_to_factor=2)):
        with pytest.raises(ValueError, match=r"does not mirror.*use for example optax\.sgd"):
            outer.mirror(optimizer, tree)
        with pytest.raises(ValueError, match="does not mirror"):
            diloco.init(config(), {"params": tree}, outer_optimizer=optimizer)


# Refusals


def test_wrong_input_is_refused_with_a_sentence(data):
    tree, *_ = data
    inner = {"params": tree}

    def same(state, batch):
        return state, batch

    with pytest.raises(ValueError, match=r"mesh has axes x but no 'islands'; make it with"):
        diloco.build_train_step(config(), same, mesh=jax.make_mesh((2,), ("x",)))
    with pytest.raises(ValueError, match=r"num_islands 3 is not divisible by the mesh axis"):
        diloco.build_train_step(
            config(num_islands=3), same, mesh=make_mesh(2, fsdp=1, devices=jax.devices()[:2])
        )
    with pytest.raises(ValueError, match=r"parameters neither under \.params nor under"):
        diloco.init(config(), {"weights": tree})
    with pytest.raises(TypeError, match="parameter n is int32, not floating point"):
        diloco.init(config(), {"params": {"n": jnp.zeros(3, jnp.int32)}})
    state = diloco.init(config(), inner)
    step = diloco.build_train_step(config(), same)
    with pytest.raises(ValueError, match=r"batch has shape \(3, 4\).*num_islands 2; split it"):
        step(state, jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"state\.inner/params/embed has shape \(2, 4, 3\)"):
        diloco.build_train_step(config(num_islands=4), same)(state, jnp.zeros((4, 1)))
    for bad, message in [
        (lambda s, b: ({**s, "extra": b}, b), "returned a state of structure"),
        (
            lambda s, b: (jax.tree.map(lambda x: x.astype(jnp.bfloat16), s), b),
            r"turned params/embed from float32\[4, 3\] into bfloat16",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            diloco.build_train_step(config(), bad)(state, jnp.zeros((2, 1)))


def test_split_batch_moves_nothing_between_islands():
    mesh = make_mesh(2, fsdp=2, devices=jax.devices()[:4])
    batch = jax.device_put(
        jnp.arange(16.0).reshape(8, 2), jax.NamedSharding(mesh, P(("islands", "fsdp")))
    )
    split = jax.jit(lambda x: split_batch(config(), x, mesh))
    text = split.lower(batch).compile().as_text()
    assert not any(
        op in text for op in ("all-gather", "all-reduce", "collective-permute", "all-to-all")
    )
    assert split(batch).shape == (2, 4, 2)
    with pytest.raises(
        ValueError, match="batch of 7 examples is not divisible by num_islands 2; use 6 or 8"
    ):
        split_batch(config(), jnp.zeros(7))


def test_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="8 devices do not form 3 islands x 2 x 1"):
        make_mesh(3)
    with pytest.raises(ValueError, match="has an axis below 1"):
        make_mesh(0, fsdp=1)


def test_parameters_may_contain_none():
    """Equinox leaves None where a module held a function; the outer state has them too."""
    config = diloco.DiLoCoConfig(
        num_islands=2, sync_period=1, outer_learning_rate=1.0, outer_momentum=0.5
    )
    params = {"a": None, "w": jnp.zeros(2), "z": [None, jnp.ones(3)]}
    step = diloco.build_train_step(
        config, lambda s, b: (jax.tree.map(lambda p: p + b, s), {}), params=None
    )
    state, _ = step(diloco.init(config, {"params": params}), jnp.array([1.0, 3.0]))
    assert jax.tree.structure(state.outer_params) == jax.tree.structure(params)
    # Nesterov from rest: 1 + beta times the mean progress.
    assert state.outer_params["w"].tolist() == [3.0, 3.0]
    assert state.outer_opt_state[0].trace["z"][1].tolist() == [-2.0] * 3


def test_state_of_another_configuration_is_refused():
    params, own = {"w": jnp.ones(4), "layers": jnp.ones((4, 4))}, optax.adam(0.1)
    state = diloco.init(config(num_fragments=2), {"params": params}, outer_optimizer=own)

    def train_step(**changes):
        return diloco.build_train_step(config(**changes), lambda s, b: (s, b), outer_optimizer=own)(
            state, jnp.ones(2)
        )

    with pytest.raises(ValueError, match=r"counts of shape \(2,\), but num_fragments is 4"):
        train_step(num_fragments=4)
    with pytest.raises(ValueError, match="no residual, but error_feedback is True"):
        train_step(num_fragments=2, error_feedback=True, wire_format="int8")
