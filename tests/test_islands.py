"""Starting from one model, joining, leaving, and islands that go bad."""

import dataclasses
import gc
import json
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diloco
from diloco import data, inner, islands, wire
from diloco import train as training
from diloco.leaves import named_leaves
from diloco.recipes import load_recipe


ONE = diloco.DiLoCoConfig(num_islands=1, sync_period=1, outer_learning_rate=1.0, outer_momentum=0.0)
CONFIG = diloco.DiLoCoConfig(
    num_islands=2, sync_period=4, num_fragments=2, overlap_steps=1, error_feedback=True
)
ADAM = optax.adam(1e-2)


def trained(seed=0):
    """An inner state with moments and a count, as after some training."""
    rng = np.random.default_rng(seed)
    params = {
        "layers": {"w": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)},
        "head": jnp.asarray(rng.normal(size=(6,)), jnp.float32),
    }
    opt_state = jax.tree.map(
        lambda x: x + jnp.asarray(rng.integers(1, 9), x.dtype), ADAM.init(params)
    )
    return {"params": params, "opt_state": opt_state, "key": jax.random.key(seed)}


def values(tree):
    return {
        name: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for name, x in named_leaves(tree).items()
    }


def assert_equal(a, b):
    a, b = values(a), values(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def island(state, m):
    return jax.tree.map(lambda x: x[m], state.inner)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ours")
    diloco.save(directory, ONE, diloco.init(ONE, trained())._replace(step=jnp.int32(7)))
    return directory


def test_bootstrap_takes_the_whole_state_of_one_island(ours, caplog):
    with caplog.at_level("INFO", logger="diloco"):
        state = diloco.bootstrap(CONFIG, ours, abstract(trained()), take="state")
    assert_equal(state, diloco.init(CONFIG, trained()))
    names = named_leaves(trained())
    assert all(f"bootstrap: read {name}," in caplog.text for name in names)
    assert f"bootstrap: {len(names)} leaves read" in caplog.text
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert int(state.step) == 0 and not np.any(jax.tree.leaves(state.outer_opt_state)[0])


def test_bootstrap_takes_parameters_only_and_keeps_the_rest(ours):
    state = diloco.bootstrap(CONFIG, ours, trained(seed=1), take="params")
    assert_equal(state.outer_params, trained()["params"])
    want = diloco.init(CONFIG, trained(seed=1) | {"params": trained()["params"]})
    assert_equal(state, want)
    with pytest.raises(ValueError, match="key is abstract and take='params'"):
        diloco.bootstrap(CONFIG, ours, abstract(trained()), take="params")


@pytest.mark.parametrize("below", [(), ("params",), ("params", "params")])
@pytest.mark.parametrize("items", ["", "items"])
def test_bootstrap_reads_plain_parameter_trees_and_maxtexts_layout(below, items, tmp_path):
    tree = trained()["params"]
    for key in reversed(below):
        tree = {key: tree}
    if len(below) == 2:
        tree |= {"opt_state": {"mu": jnp.zeros(3)}, "step": jnp.int32(9)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "there" / items, tree)
    fresh = trained(seed=1)
    start = fresh | {"params": abstract(fresh["params"])}
    state = diloco.bootstrap(CONFIG, tmp_path / "there", start, take="params")
    assert_equal(state, diloco.init(CONFIG, fresh | {"params": trained()["params"]}))


def test_bootstrap_reads_a_whole_state_that_orbax_wrote(tmp_path):
    whole = {k: v for k, v in trained().items() if k != "key"}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "there", whole)
    state = diloco.bootstrap(CONFIG, tmp_path / "there", abstract(whole), take="state")
    assert_equal(state, diloco.init(CONFIG, whole))


def test_bootstrap_reads_straight_to_a_mesh(ours):
    mesh = diloco.sharding.make_mesh(2, devices=jax.devices()[:4])
    place = NamedSharding(mesh, P(None, "fsdp"))
    inner = trained(seed=1)
    inner["params"]["layers"]["w"] = jax.device_put(inner["params"]["layers"]["w"], place)
    state = diloco.bootstrap(CONFIG, ours, inner, take="params", mesh=mesh)
    assert_equal(state.outer_params, trained()["params"])
    assert tuple(state.inner["params"]["layers"]["w"].sharding.spec) == ("islands", None, "fsdp")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("head"), "has, beyond what the run wants, head"),
        (lambda p: p.update(bias=jnp.zeros(2)), "lacks bias"),
        (lambda p: p.update(head=jnp.zeros(5)), r"has head as float32\[6\], but .* float32\[5\]"),
        (lambda p: p["layers"].update(w=jnp.zeros((4, 8), jnp.int32)), "has layers/w as float32"),
    ],
)
def test_bootstrap_names_a_leaf_that_differs(change, message, tmp_path):
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "there", trained()["params"])
    inner = trained()
    change(inner["params"])
    with pytest.raises(ValueError, match=message):
        diloco.bootstrap(CONFIG, tmp_path / "there", inner, take="params")


def test_bootstrap_casts_a_bfloat16_checkpoint(tmp_path):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained()["params"])
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "there", half)
    state = diloco.bootstrap(CONFIG, tmp_path / "there", trained(), take="params")
    assert_equal(state.outer_params, jax.tree.map(lambda x: x.astype(jnp.float32), half))


def test_bootstrap_refuses_what_is_no_source(ours, tmp_path):
    (tmp_path / "file").write_text("")
    for source in (tmp_path, tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(ValueError, match="no checkpoint of ours and no tree that Orbax wrote"):
            diloco.bootstrap(CONFIG, source, trained(), take="params")
    with pytest.raises(ValueError, match="take 'all' is not known"):
        diloco.bootstrap(CONFIG, ours, trained(), take="all")
    diloco.save(tmp_path, CONFIG, diloco.init(CONFIG, trained()))
    with pytest.raises(ValueError, match=r"is of 2 islands, whose states differ.*diloco\.resize"):
        diloco.bootstrap(CONFIG, tmp_path, trained(), take="state")
    state = diloco.bootstrap(CONFIG, tmp_path, trained(seed=1), take="params")
    assert_equal(state.outer_params, trained()["params"])


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_bootstrap_reads_no_part_of_a_source_that_has_lost_one(use_ocdbt, tmp_path, monkeypatch):
    """A file that is missing is an error, or was not needed: it never reads as zeros."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Orbax leaves coroutines unfinished
    source, copy = tmp_path / "source", tmp_path / "copy"
    params = trained()["params"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as writer:
        writer.save(source, params)
    refused = 0
    for file in [f for f in sorted(source.rglob("*")) if f.is_file() and f.name != "_METADATA"]:
        shutil.copytree(source, copy)
        (copy / file.relative_to(source)).unlink()
        try:
            state = diloco.bootstrap(CONFIG, copy, trained(seed=1), take="params")
        except ValueError as error:
            assert re.search(rf"{copy} cannot be read \(.+\); copy it anew", str(error))
            refused += 1
        else:
            assert_equal(state.outer_params, params)
        shutil.rmtree(copy)
    assert refused >= 2
    (source / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="source cannot be read"):
        diloco.bootstrap(CONFIG, source, trained(seed=1), take="params")
    gc.collect()


@pytest.mark.parametrize("take", ["params", "state"])
def test_bootstrap_refuses_parameters_that_are_not_finite(take, tmp_path):
    bad = trained()
    bad["params"]["head"] = bad["params"]["head"].at[3].set(jnp.nan)
    diloco.save(tmp_path, ONE, diloco.init(ONE, bad))
    with pytest.raises(ValueError, match="has values in head that are not finite"):
        diloco.bootstrap(CONFIG, tmp_path, trained(), take=take)


def apart(num_islands=2):
    """A state whose islands differ and owe something."""
    config = dataclasses.replace(CONFIG, num_islands=num_islands)
    state = diloco.init(config, trained())

    def differ(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return x + jnp.arange(num_islands).reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)

    return config, state._replace(
        inner=jax.tree.map(differ, state.inner),
        residual=jax.tree.map(differ, state.residual),
        skipped=jnp.arange(num_islands, dtype=jnp.int32),
        step=jnp.int32(5),
    )


@pytest.mark.parametrize("newcomers", ["copy", trained(seed=3)])
def test_islands_that_stay_keep_everything_and_newcomers_start_from_theta(newcomers):
    config, state = apart()
    new = diloco.resize(config, state, 4, newcomers=newcomers)
    for part in ("outer_params", "outer_opt_state", "step"):
        assert_equal(getattr(new, part), getattr(state, part))
    for m in (0, 1):
        assert_equal(island(new, m), island(state, m))
    source = island(state, 0) if newcomers == "copy" else newcomers
    for m in (2, 3):
        assert_equal(island(new, m)["params"], state.outer_params)
        assert_equal(island(new, m)["opt_state"], source["opt_state"])
        assert not any(np.any(r[m]) for r in jax.tree.leaves(new.residual))
    assert new.skipped.tolist() == [0, 1, 0, 0]
    keys = np.asarray(jax.random.key_data(new.inner["key"]))
    assert len({key.tobytes() for key in keys}) == 4
    step = diloco.build_train_step(
        dataclasses.replace(config, num_islands=4), lambda s, b: (s, {"b": b})
    )
    assert int(jax.jit(step)(new, jnp.zeros(4))[0].step) == 6


def test_islands_leave():
    config, state = apart(4)
    assert_equal(island(diloco.resize(config, state, 2, newcomers="copy"), 1), island(state, 1))
    new = diloco.resize(config, state, 2, newcomers="copy", stay=(3, 1))
    assert_equal(island(new, 0), island(state, 3))
    assert_equal(island(new, 1), island(state, 1))
    assert new.skipped.tolist() == [3, 1]
    assert_equal(new.outer_params, state.outer_params)


@pytest.mark.parametrize("devices", [(4, 8), (8, 2), (8, 1)])
def test_resize_moves_to_another_mesh(devices):
    before, after = devices
    config, state = apart()
    mesh = diloco.sharding.make_mesh(2, devices=jax.devices()[:before])
    inner = trained()
    place = NamedSharding(mesh, P(None, "fsdp"))
    inner["params"]["layers"]["w"] = jax.device_put(inner["params"]["layers"]["w"], place)
    state = diloco.init(config, inner, mesh=mesh)
    new_mesh = diloco.sharding.make_mesh(min(after, 4), devices=jax.devices()[:after])
    new = diloco.resize(config, state, 4, newcomers="copy", mesh=new_mesh)
    w = new.inner["params"]["layers"]["w"]
    assert w.sharding.mesh == new_mesh and tuple(w.sharding.spec) == ("islands", None, "fsdp")
    assert_equal(new.outer_params, state.outer_params)
    assert_equal(island(new, 1), island(state, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_islands": 1, "stay": (0, 1)}, "stay names 2 islands for num_islands 1"),
        ({"num_islands": 2, "stay": (0, 0)}, r"stay \[0, 0\] does not name islands of 0 to 1 once"),
        ({"num_islands": 2, "stay": (2,)}, r"stay \[2\] does not name islands"),
        ({"num_islands": 2, "stay": ()}, r"stay \[\] does not name islands"),
        ({"num_islands": 3, "newcomers": {"params": trained()["params"]}}, "newcomers lacks"),
        ({"num_islands": 3, "newcomers": "fresh"}, "newcomers 'fresh' is not known; use 'copy'"),
        ({"num_islands": 0}, "num_islands 0"),
    ],
)
def test_resize_refuses_what_cannot_be(arguments, message):
    config, state = apart()
    with pytest.raises(ValueError, match=message):
        diloco.resize(config, state, **{"newcomers": "copy"} | arguments)


def test_newcomers_never_draw_the_keys_of_islands_that_stay():
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
    wider = dataclasses.replace(config, num_islands=3)
    state = diloco.init(config, {"params": jnp.ones(3), "key": jax.random.key(0)})
    state = diloco.resize(config, state, 3, newcomers="copy")
    state = diloco.resize(wider, state, 2, newcomers="copy", stay=(0, 2))
    for num_islands in (3, 5):
        new = diloco.resize(config, state, num_islands, newcomers="copy")
        keys = np.asarray(jax.random.key_data(new.inner["key"]))
        # `init` gives all islands one key; those that join later have their own.
        assert len({key.tobytes() for key in keys}) == num_islands


def test_a_config_of_another_number_of_islands_is_refused(tmp_path):
    """Island 1 would be lost without a word, or saved as what nobody can restore."""
    _, state = apart()
    message = r"state\.inner/\S+ has shape \(2.*must be num_islands 1; give the config of the state"
    with pytest.raises(ValueError, match=message):
        diloco.resize(ONE, state, 3, newcomers="copy")
    with pytest.raises(ValueError, match=message):
        diloco.save(tmp_path, ONE, state)
    with pytest.raises(ValueError, match="must be num_islands 1; start the state with"):
        diloco.flush(ONE, state)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(2000)))

    def make(*overrides):
        small = [
            "model.name=tiny",
            "data.sequence_length=16",
            "train.global_batch_size=8",
            "train.warmup_steps=2",
            "train.eval_every=6",
            "train.eval_sequences=8",
            "diloco.sync_period=3",
            "train.steps=6",
        ]
        return load_recipe("laptop-diloco", [*small, f'data.corpus="{path}"', *overrides])

    return make


def test_a_run_goes_on_with_more_islands_and_no_example_twice(recipe, tmp_path, monkeypatch):
    drawn, open_batches = [], training.open_batches

    class Seen:
        def __init__(self, batches):
            self.batches = batches
            self.get_state, self.set_state = batches.get_state, batches.set_state

        def __next__(self):
            drawn.append(next(self.batches))
            return drawn[-1]

    monkeypatch.setattr(training, "open_batches", lambda *a: Seen(open_batches(*a)))
    training.train(recipe(), tmp_path / "run", save_every=3)
    wider = recipe("diloco.num_islands=4", "train.steps=9")
    with pytest.raises(ValueError, match=r"diloco\.num_islands was 2 and is 4.*--allow-change"):
        training.train(wider, tmp_path / "run")
    result = training.train(wider, tmp_path / "run", allow_change=True)
    assert [d.shape[0] for d in drawn] == [2] * 6 + [4] * 3
    examples = [row.tobytes() for d in drawn for row in d.reshape(-1, d.shape[-1])]
    corpus = data.load_corpus(wider.data.corpus)
    assert corpus.train.size // 16 > len(examples) == len(set(examples))
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines if r["kind"] == "train"] == list(range(1, 10))
    assert jax.tree.leaves(result.state.inner)[0].shape[0] == 4
    alone = recipe("diloco.num_islands=1", "train.steps=12")
    result = training.train(alone, tmp_path / "run", allow_change=True)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    steps = [6 * 4 + 3 * 2 + 3 * 8, 6 * 4 + 3 * 2, 3 * 2, 3 * 2]  # sequences of each island
    assert last["tokens"] == [16 * n for n in steps]
    assert result.summary["tokens"] == 12 * 8 * 16


@pytest.mark.parametrize("mesh", [None, 4])
@pytest.mark.parametrize("wire_format", ["float32", "bfloat16", "int8", "float4_e3m0"])
def test_theta_never_turns_bad(wire_format, mesh):
    """Island 1's parameters turn NaN or infinite at step 3, before the send of step 4."""
    wire.codec(wire_format)
    mesh = diloco.sharding.make_mesh(2, devices=jax.devices()[:mesh]) if mesh else None

    def inner_step(state, bad):
        return {"params": jax.tree.map(lambda p: p * 0.9 + bad, state["params"])}, {"loss": bad}

    for policy in ("error", "skip"):
        config = dataclasses.replace(
            CONFIG, wire_format=wire_format, on_bad_island=policy, error_feedback=True
        )
        start = diloco.init(config, {"params": trained()["params"]}, mesh=mesh)
        step = jax.jit(diloco.build_train_step(config, inner_step, mesh=mesh))
        for bad in (jnp.nan, jnp.inf):
            state = start
            for t in range(1, 9):
                before = state
                state, _ = step(state, jnp.array([0.0, bad if t == 3 else 0.0]))
                finite = [np.isfinite(x).all() for x in values(state.outer_params).values()]
                assert all(finite), (policy, t)
                if policy == "error" and state.skipped[1] > before.skipped[1]:
                    assert_equal(state.outer_params, before.outer_params)
                    assert_equal(state.outer_opt_state, before.outer_opt_state)
            assert state.skipped[1] > 0 and state.skipped[0] == 0
            moved = not np.array_equal(
                values(state.outer_params)["layers/w"], values(start.outer_params)["layers/w"]
            )
            assert moved
            if policy == "error":
                break
        for m, leaf in islands.bad_leaves(state):
            assert m == 1 and leaf.startswith("params/")


def test_a_bad_island_stops_the_run_with_its_name_step_and_leaf(recipe, tmp_path, monkeypatch):
    build_step = inner.build_step

    def poisoned(recipe, mesh=None):
        step = build_step(recipe, mesh)

        def inner_step(state, tokens):
            state, metrics = step(state, tokens)
            count = state["opt_state"][1][0].count
            own = count == 4
            params = state["params"]
            norm = jnp.where(own, jnp.float32(jnp.nan), params["final_norm"])
            return state | {"params": params | {"final_norm": norm}}, metrics

        return inner_step

    monkeypatch.setattr(inner, "build_step", poisoned)
    with pytest.raises(
        ValueError, match=r"the state of island [01] is not finite at step 4; .* params/final_norm"
    ):
        training.train(recipe(), tmp_path / "run", save_every=2)
    assert diloco.latest(tmp_path / "run" / "checkpoints") == 2  # no bad state is saved


def test_a_skipped_island_is_counted_and_told(recipe, tmp_path, capsys, monkeypatch):
    start = training.start

    def poisoned(*args):
        state = start(*args)
        norm = state.inner["params"]["final_norm"].at[1].set(jnp.nan)
        params = state.inner["params"] | {"final_norm": norm}
        return state._replace(inner=state.inner | {"params": params})

    monkeypatch.setattr(training, "start", poisoned)
    skip = recipe("diloco.on_bad_island=skip")
    result = training.train(skip, tmp_path / "run", progress=True)
    assert "islands [1] are not finite and left out of the mean" in capsys.readouterr().out
    assert result.summary["skipped"] == np.asarray(result.state.skipped).tolist() == [0, 2]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.outer_params))


def test_a_run_stops_when_no_island_is_left(recipe, tmp_path):
    bad = recipe("diloco.on_bad_island=skip", "train.learning_rate=1e18", "train.warmup_steps=0")
    with pytest.raises(ValueError, match="no island is finite at step 3"):
        training.train(bad, tmp_path / "run")
