"""Checkpoints: exact, checked, atomic, and clear when something is wrong."""

import dataclasses
import gc
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diloco
from diloco import manifest, restoring
from diloco.checkpoint import Checkpoints
from diloco.leaves import named_leaves


CONFIG = diloco.DiLoCoConfig(
    num_islands=2,
    sync_period=6,
    num_fragments=3,
    overlap_steps=2,
    mixing=0.5,
    wire_format="float4_e3m0",
    error_feedback=True,
)
ADAM = optax.adam(1e-2)


def initial():
    params = {
        "layers": {"w": jax.random.normal(jax.random.key(0), (4, 8, 6))},
        "head": jax.random.normal(jax.random.key(1), (6,)).astype(jnp.bfloat16),
    }
    return {"params": params, "opt_state": ADAM.init(params), "key": jax.random.key(2)}


def inner_step(state, batch):
    key, now = jax.random.split(state["key"])

    def loss(params):
        x = batch
        for w in params["layers"]["w"]:
            x = x + jnp.tanh(x @ w) @ jnp.swapaxes(w, 0, 1)
        keep = jax.random.bernoulli(now, 0.8, x.shape).astype(jnp.float32)
        y = (x * keep)[:, :6] * params["head"].astype(jnp.float32)[None]
        return jnp.mean((y - 1.0) ** 2)

    value, grad = jax.value_and_grad(loss)(state["params"])
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = ADAM.update(grad, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, {"loss": value}


@pytest.fixture(scope="module")
def step():
    return jax.jit(diloco.build_train_step(CONFIG, inner_step), donate_argnums=0)


def batch(t):
    return np.random.default_rng(t).normal(size=(2, 4, 8)).astype(np.float32)


def run(step, state, first, last):
    for t in range(first, last + 1):
        state, _ = step(state, batch(t))
    return state


@pytest.fixture(scope="module")
def saved(step, tmp_path_factory):
    """Checkpoints of steps 3, 6 and 9, and the values that were saved; the next step takes the buffers over."""
    directory = tmp_path_factory.mktemp("saved")
    state, states = diloco.init(CONFIG, initial()), {}
    with Checkpoints(directory) as checkpoints:
        for t in range(1, 11):
            state = run(step, state, t, t)
            if t in (3, 6, 9):
                states[t] = values(state)
                checkpoints.save(CONFIG, state, settings={"model": {"size": 4}}, extras={"at": t})
    return directory, states


def restore(directory, like=None, **kwargs):
    kwargs = {"config": CONFIG, "settings": {"model": {"size": 4}}} | kwargs
    like = diloco.init(CONFIG, initial()) if like is None else like
    return diloco.restore(directory, kwargs.pop("config"), like, **kwargs)


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def values(state):
    """Every leaf by name, as bytes that can be compared."""
    leaves = named_leaves(state)
    return {
        name: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ).copy()
        for name, x in leaves.items()
    }


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_every_leaf_comes_back_bit_for_bit_though_its_buffers_were_donated(saved):
    directory, states = saved
    for t in (3, 6, 9):
        restored = restore(directory, step=t)
        assert_equal(values(restored.state), states[t])
        assert restored.extras == {"at": t}
    names = restore(directory).state and set(states[9])
    for part in (
        "inner/params/head",
        "inner/opt_state/0/mu/layers/w",
        "inner/key",
        "residual/head",
    ):
        assert part in names
    assert any(name.startswith("outer_opt_state/") for name in names)


def test_a_run_goes_on_from_every_step_as_if_it_had_not_stopped(step, tmp_path):
    """Steps 1 to 9 cover a whole period; steps 3 and 5, for two, are inside a V window."""
    whole = run(step, diloco.init(CONFIG, initial()), 1, 9)
    chain = diloco.init(CONFIG, initial())
    like = jax.eval_shape(lambda: diloco.init(CONFIG, initial()))
    for t in range(1, 10):
        chain = run(step, chain, t, t)
        diloco.save(tmp_path, CONFIG, chain, keep=1)
        chain = diloco.restore(tmp_path, CONFIG, like).state
    assert_equal(values(chain), values(whole))


def test_an_abstract_target_is_enough(saved):
    like = jax.eval_shape(lambda: diloco.init(CONFIG, initial()))
    assert_equal(values(restore(saved[0], like).state), saved[1][9])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (8, 1)])
def test_a_state_moves_to_another_mesh(before, after, step, tmp_path):
    def mesh(n):
        return diloco.sharding.make_mesh(2 if n > 1 else 1, devices=jax.devices()[:n])

    def start(n):
        inner = initial()
        place = NamedSharding(mesh(n), P(None, "fsdp"))
        inner["params"]["layers"]["w"] = jax.device_put(inner["params"]["layers"]["w"], place)
        inner["opt_state"] = ADAM.init(inner["params"])
        return diloco.init(CONFIG, inner, mesh=mesh(n))

    state = start(before)
    diloco.save(tmp_path, CONFIG, state)
    like = start(after)
    restored = diloco.restore(tmp_path, CONFIG, like).state
    assert_equal(values(restored), values(state))
    for name, leaf in named_leaves(restored).items():
        want = named_leaves(like)[name].sharding
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sync_period", 9),
        ("num_fragments", 2),
        ("overlap_steps", 1),
        ("mixing", 0.25),
        ("fragment_pattern", "sequential"),
        ("wire_format", "int8"),
        ("outer_momentum", 0.8),
    ],
)
def test_a_changed_algorithm_is_refused_unless_allowed(field, value, saved):
    changed = dataclasses.replace(CONFIG, **{field: value})
    was = json.dumps(getattr(CONFIG, field))
    with pytest.raises(ValueError, match=f"diloco.{field} was {was} and is {json.dumps(value)}"):
        restore(saved[0], config=changed)
    restored = restore(saved[0], config=changed, allow_change=True)
    assert_equal(values(restored.state), saved[1][9])


def test_the_new_schedule_holds_from_the_next_step_on(step, saved):
    """Going on with V = 0 sends and applies as V = 0 does; what V = 2 had sent waits for its next turn."""
    changed = dataclasses.replace(CONFIG, overlap_steps=0)
    state = restore(saved[0], config=changed, allow_change=True).state  # t = 9
    new_step = jax.jit(diloco.build_train_step(changed, inner_step))
    plan = diloco.schedule(changed)
    frozen = diloco.build_train_step(changed, lambda s, b: (s, {"loss": b[0, 0]}))
    for t in range(10, 13):
        before, (after, _) = state, jax.jit(frozen)(state, batch(t))
        moved = {
            i
            for i in range(4)
            if not np.array_equal(
                before.inner["params"]["layers"]["w"][:, i],
                after.inner["params"]["layers"]["w"][:, i],
            )
        }
        fragments = diloco.partition(before.outer_params, changed).fragments
        due = {layer for p in plan.applies(t) for layer in fragments[p].layers}
        assert moved == due, t
        state, _ = new_step(state, batch(t))
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(state.outer_params))


def test_other_settings_are_refused_with_the_difference(saved):
    with pytest.raises(ValueError, match=r"model\.size was 4 and is 5"):
        restore(saved[0], settings={"model": {"size": 5}})


def test_another_fragment_layout_is_refused(copy, monkeypatch):
    monkeypatch.setattr(manifest, "fragments_digest", lambda *_: "other")
    with pytest.raises(ValueError, match="cut into other fragments"):
        restore(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("key"), "has, beyond what the run wants, inner/key"),
        (lambda s: s.update(extra=jnp.zeros(2)), "lacks inner/extra"),
        (lambda s: s.update(key=jax.random.key(0, impl="rbg")), r"has inner/key as key<fry>\[2\]"),
        (
            lambda s: s.update(opt_state=ADAM.init({**s["params"], "head": jnp.zeros(7)})),
            r"opt_state/0/mu/head as bfloat16\[2, 6\], but the run wants float32\[2, 7\]",
        ),
    ],
)
def test_a_leaf_that_differs_is_named(change, message, saved):
    inner = initial()
    change(inner)
    config = CONFIG
    with pytest.raises(ValueError, match=message):
        restore(saved[0], diloco.init(config, inner), allow_change=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error_feedback": False}, "residual/head.*; set diloco.error_feedback back"),
        ({"num_islands": 3}, r"key<fry>\[3\]; restore 2 islands, then .* diloco.resize"),
        ({"num_islands": 3, "error_feedback": False}, "set diloco.error_feedback back: [^;]*$"),
        ({"num_islands": 3, "num_fragments": 2}, r"key<fry>\[3\]; restore 2 islands, [^;]*$"),
    ],
)
def test_a_change_that_gives_the_state_other_leaves_says_what_to_do(changes, message, saved):
    changed = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        restore(saved[0], diloco.init(changed, initial()), config=changed, allow_change=True)


@pytest.mark.parametrize("feedback", [True, False])
def test_a_target_that_does_not_fit_its_own_config_is_refused(feedback, tmp_path):
    config = dataclasses.replace(CONFIG, error_feedback=feedback)
    state = diloco.init(config, initial())
    diloco.save(tmp_path, config, state)
    other = dataclasses.replace(config, error_feedback=not feedback)
    with pytest.raises(
        ValueError, match=f"residual, but error_feedback is {not feedback}; make it"
    ):
        diloco.restore(tmp_path, other, state, allow_change=True)


@pytest.mark.parametrize("changes", [{"num_islands": 3}, {"num_fragments": 2}, {}])
def test_another_model_is_said_first_whatever_else_was_changed(changes, saved):
    changed, other = dataclasses.replace(CONFIG, **changes), initial()
    other["params"]["layers"]["w"] = jnp.zeros((5, 8, 6))
    other["opt_state"] = ADAM.init(other["params"])
    message = r"layers/w as float32\[2, 4, 8, 6\], but .*\[\d, 5, 8, 6\]; build the same model"
    with pytest.raises(ValueError, match=message):
        restore(saved[0], diloco.init(changed, other), config=changed, allow_change=True)


def test_other_fragments_do_not_fit_an_outer_optimizer_that_counts(tmp_path):
    counts = optax.adam(1e-3)
    state = diloco.init(CONFIG, initial(), outer_optimizer=counts)
    diloco.save(tmp_path, CONFIG, state)
    fewer = dataclasses.replace(CONFIG, num_fragments=2)
    like = diloco.init(fewer, initial(), outer_optimizer=counts)
    with pytest.raises(ValueError, match=r"set diloco\.num_fragments back"):
        restore(tmp_path, like, config=fewer, allow_change=True)


def damage_one(directory, step, how):
    """Damages the largest file of a checkpoint's arrays."""
    files = [
        p for p in (directory / str(step)).rglob("*") if p.is_file() and p.name != manifest.NAME
    ]
    path = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[:-7])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "missing":
        path.unlink()
    elif how == "foreign":
        (path.parent / "stranger").write_text("?")
    elif how == "manifest flipped":
        text = (directory / str(step) / manifest.NAME).read_text()
        (directory / str(step) / manifest.NAME).write_text(text.replace('"at": ', '"at": 1'))
    elif how == "manifest truncated":
        os.truncate(directory / str(step) / manifest.NAME, 100)
    elif how == "no arrays":
        shutil.rmtree(next((directory / str(step)).glob("state-*")))
    elif how == "other format":
        body = manifest.read(restoring.root_of(directory / str(step)))
        manifest.write(restoring.root_of(directory / str(step)), body | {"format": 99})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "bytes instead of"),
        ("flipped", "does not have its checksum"),
        ("missing", "is missing"),
        ("foreign", "does not belong to it"),
        ("manifest flipped", "manifest.json is damaged"),
        ("manifest truncated", "manifest.json is damaged"),
        ("no arrays", "is missing"),
        ("other format", "has format 99, but this version reads 1"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(how, message, copy, saved, caplog):
    damage_one(copy, 9, how)
    with caplog.at_level(logging.WARNING, logger="diloco"):
        restored = restore(copy)
    assert_equal(values(restored.state), saved[1][6])
    assert "the checkpoint of step 9 cannot be used" in caplog.text and message in caplog.text
    assert diloco.latest(copy) == 6
    with pytest.raises(ValueError, match=f"step 9: .*{message}"):
        restore(copy, step=9)


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(copy):
    for t in (3, 6, 9):
        damage_one(copy, t, "flipped")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* can be used \(step 9: .*step 6: .*step 3"
    ):
        restore(copy)
    with pytest.raises(
        ValueError, match="has no checkpoint of step 7, it has those of steps 3, 6, 9"
    ):
        restore(copy, step=7)
    with pytest.raises(ValueError, match="has no checkpoint, it has none"):
        restore(copy / "nothing")


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleared_away(copy, saved):
    (copy / "9" / manifest.NAME).rename(
        copy / "9" / f"{manifest.NAME}.tmp"
    )  # one step before the end
    shutil.copytree(next((copy / "6").glob("state-*")), copy / "6" / "state-0badbeef")
    assert diloco.latest(copy) == 6
    with Checkpoints(copy):
        assert not (copy / "9").exists()
        assert not (copy / "6" / "state-0badbeef").exists()
    assert_equal(values(restore(copy).state), saved[1][6])


def test_a_stranger_with_the_name_of_a_step_is_left_alone(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "thesis.txt").write_text("mine")
    state = diloco.init(CONFIG, initial())._replace(step=jnp.int32(3))
    with pytest.raises(ValueError, match="holds something that is no checkpoint"):
        diloco.save(tmp_path, CONFIG, state)
    assert (tmp_path / "3" / "thesis.txt").read_text() == "mine"


def test_saving_a_step_again_replaces_it(copy):
    state = restore(copy).state
    diloco.save(copy, CONFIG, diloco.flush(CONFIG, state))
    again = diloco.restore(copy, CONFIG, state)
    assert_equal(values(again.state), values(diloco.flush(CONFIG, state)))
    assert len(list((copy / "9").glob("state-*"))) == 1


def test_only_the_newest_are_kept(copy):
    with Checkpoints(copy, keep=2) as checkpoints:
        state = restore(copy).state._replace(step=jnp.int32(12))
        checkpoints.save(CONFIG, state, settings={"model": {"size": 4}})
    assert restoring.steps(copy) == [9, 12]
    assert sorted(p.name for p in copy.iterdir()) == [".lock", "12", "9"]
    with pytest.raises(ValueError, match="keep 0 is below 1"):
        Checkpoints(copy, keep=0)


def test_two_runs_cannot_share_a_directory(copy):
    with Checkpoints(copy):
        with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} \(this one, "):
            Checkpoints(copy)
        restore(copy)  # reading is harmless
    Checkpoints(copy).close()
    forgotten = Checkpoints(copy)
    del forgotten
    gc.collect()
    Checkpoints(copy).close()


def test_a_linked_step_is_read_and_what_it_leads_to_stays(saved, tmp_path, caplog):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shutil.copytree(saved[0], theirs)
    (theirs / "9" / "state-0badbeef").mkdir()  # they are saving
    (theirs / "9" / "state-0badbeef" / "part").touch()
    before = {p: p.is_dir() or p.read_bytes() for p in theirs.rglob("*")}
    ours.mkdir()
    for number in ("3", "6", "9"):
        (ours / number).symlink_to(theirs / number)
    state = restore(ours).state
    with Checkpoints(ours, keep=1) as checkpoints:
        checkpoints.drop_after(6)
        assert sorted(p.name for p in ours.iterdir()) == [".lock", "3", "6"]
        checkpoints.save(CONFIG, state._replace(step=jnp.int32(6)))
    assert sorted(p.name for p in ours.iterdir()) == [".lock", "6"]
    assert not (ours / "6").is_symlink()
    assert before == {p: p.is_dir() or p.read_bytes() for p in theirs.rglob("*")}
    assert not caplog.records


def test_later_checkpoints_are_named_and_do_not_count_as_kept(tmp_path, caplog):
    for step in (10, 999, 1000):
        diloco.save(tmp_path, *small_state(step))
    assert not caplog.records
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (11, 12, 13):
            checkpoints.save(*small_state(step))
    assert restoring.steps(tmp_path) == [12, 13, 999, 1000]
    (warning,) = caplog.messages
    assert "checkpoints of later steps (999, 1000)" in warning
    assert "drop_after(11)" in warning


def test_a_folder_of_another_step_and_files_with_a_dot(copy, caplog):
    (copy / "9").rename(copy / "12")
    (copy / "6" / restoring.inspect(copy, 6)["data"] / ".DS_Store").touch()
    assert diloco.latest(copy) == 6
    assert "12 holds the checkpoint of step 9" in caplog.text
    with pytest.raises(ValueError, match="12 holds the checkpoint of step 9"):
        restoring.inspect(copy, 12)
    (copy.parent / "run").mkdir()
    copy.rename(copy.parent / "run" / "checkpoints")
    with pytest.raises(ValueError, match=r"it has none; name .*/run/checkpoints"):
        restore(copy.parent / "run")


def test_a_full_disk_loses_nothing(step, tmpfs, monkeypatch):
    # The storage library reports the failure in its threads too, and leaves coroutines unfinished.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    disk = tmpfs("size=512k")
    state = run(step, diloco.init(CONFIG, initial()), 1, 3)
    before = values(state)
    diloco.save(disk, CONFIG, state)
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(b"x" * (free - 8192))
    state = run(step, state, 4, 4)
    for _ in range(5):  # which part of a save fails first is chance
        with pytest.raises(OSError, match=r"could not be written \(No space left on device\)"):
            diloco.save(disk, CONFIG, state)
        assert sorted(p.name for p in disk.iterdir()) == [".lock", "3", "ballast"]
    assert_equal(values(diloco.restore(disk, CONFIG, state).state), before)
    (disk / "ballast").unlink()
    diloco.save(disk, CONFIG, state)  # and with room again, it goes on
    assert restoring.steps(disk) == [3, 4]
    gc.collect()


def test_a_read_only_directory_is_a_clear_error_for_a_save_and_none_for_a_restore(saved, tmpfs):
    disk = tmpfs("size=8m")
    shutil.copytree(saved[0], disk / "run")
    (disk / "run" / "9" / "state-0badbeef").mkdir()  # as a killed save leaves it
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    state = diloco.init(CONFIG, initial())
    message = r"run.* could not be written \(Read-only file system\); give another path"
    for _ in range(2):
        with pytest.raises(OSError, match=message):
            diloco.save(disk / "run", CONFIG, state)
    assert_equal(values(restore(disk / "run").state), saved[1][9])
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    diloco.save(disk / "run", CONFIG, state)
    assert sorted(p.name for p in (disk / "run").iterdir()) == [".lock", "0", "3", "6", "9"]
    assert not (disk / "run" / "9" / "state-0badbeef").exists()


def test_a_step_that_cannot_be_written_is_a_clear_error_each_time(tmp_path, tmpfs):
    disk = tmpfs("size=8m,ro", at="run/2")
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(*small_state(1))
        for _ in range(2):
            with pytest.raises(OSError, match=r"could not be written \(Read-only file system\)"):
                checkpoints.save(*small_state(2))
                checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        checkpoints.save(*small_state(2))
    assert restoring.steps(tmp_path / "run") == [1, 2]


def test_a_directory_that_cannot_be_opened_is_not_kept_from_the_next_try(tmpfs):
    disk = tmpfs("size=64k")
    (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
    with pytest.raises(
        OSError, match=r"could not be written \(No space left on device\); make room"
    ):
        Checkpoints(disk)
    (disk / "ballast").unlink()
    Checkpoints(disk).close()


def test_a_failed_save_removes_what_it_wrote_also_beside_a_damaged_manifest(
    saved, tmpfs, monkeypatch
):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    disk = tmpfs("size=2m")
    shutil.copytree(saved[0], disk / "run")
    damage_one(disk / "run", 9, "manifest flipped")
    state = restore(saved[0]).state
    (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 8192))
    before = sorted((disk / "run").rglob("*"))
    for _ in range(3):
        with pytest.raises(OSError, match="could not be written"):
            diloco.save(disk / "run", CONFIG, state)
        assert sorted((disk / "run").rglob("*")) == before
    (disk / "ballast").unlink()
    diloco.save(disk / "run", CONFIG, state)
    assert len(list((disk / "run" / "9").glob("state-*"))) == 1
    assert diloco.latest(disk / "run") == 9
    gc.collect()


def test_a_path_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file could not be written \(File exists\)"):
        diloco.save(tmp_path / "file", *small_state())
    (tmp_path / "5").write_text("mine")
    with pytest.raises(ValueError, match="5 holds something that is no checkpoint"):
        diloco.save(tmp_path, *small_state(5))
    assert (tmp_path / "5").read_text() == "mine"


@pytest.mark.parametrize("take_away", [shutil.rmtree, lambda d: d.rename(f"{d}-old")])
def test_a_run_whose_directory_was_taken_away_writes_in_no_other(take_away, tmp_path):
    """What is there now may be another run's, one that ended too."""
    directory = tmp_path / "run"
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(*small_state(1))
        checkpoints.wait()
        take_away(directory)
        with pytest.raises(ValueError, match="was removed or moved while the run had it"):
            checkpoints.save(*small_state(2))
        diloco.save(directory, *small_state(9))
        for _ in range(2):
            with pytest.raises(ValueError, match="was removed or moved while the run had it"):
                checkpoints.save(*small_state(2))
    assert restoring.steps(directory) == [9]
    with pytest.raises(ValueError, match="are closed; open them again"):
        checkpoints.save(*small_state(3))


def test_what_is_dropped_includes_a_save_that_is_running(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(*small_state(3))
        checkpoints.save(*small_state(6))
        checkpoints.drop_after(3)
        assert restoring.steps(tmp_path) == [3]


def test_the_error_that_ends_a_block_is_not_replaced_by_that_of_the_save(
    tmp_path, monkeypatch, caplog
):
    def fail(folder):
        raise OSError("no hash")

    monkeypatch.setattr(manifest, "hash_files", fail)
    with (
        pytest.raises(ValueError, match="loss is nan"),
        Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(*small_state(1))
        raise ValueError("loss is nan")
    assert "no hash" in caplog.text


@pytest.mark.parametrize("files", [("manifest.json",), ("state-12345678/mine", "notes"), ()])
def test_a_numbered_folder_of_another_program_is_left_as_it_is(files, tmp_path):
    folder = tmp_path / "1"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"name": "my web app"}')
    before = sorted(folder.rglob("*"))
    for step in (2, 3):
        diloco.save(tmp_path, *small_state(step), keep=1)
    if files:
        with pytest.raises(ValueError, match="holds something that is no checkpoint of this run"):
            diloco.save(tmp_path, *small_state(1))
    assert folder.is_dir() and sorted(folder.rglob("*")) == before


def test_a_lock_file_of_another_program_is_left_as_it_is(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with pytest.raises(ValueError, match=r"\.lock is of another program"):
        Checkpoints(tmp_path)
    (tmp_path / "precious").write_text("")
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="could not be written"):
        Checkpoints(tmp_path)
    assert (tmp_path / "precious").read_text() == ""


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_a_leaf_that_would_come_back_in_half_is_refused(dtype, tmp_path):
    config, state = small_state()
    state = state._replace(inner={**state.inner, "n": np.ones(config.num_islands, dtype)})
    with pytest.raises(ValueError, match=r"inner/n is \w+64, which would come back as \w+32"):
        diloco.save(tmp_path, config, state)
    assert restoring.steps(tmp_path) == []


def test_settings_hide_nothing_whatever_they_are_called():
    def of(algorithm, settings):
        return {"algorithm": algorithm, "settings": settings}

    same = {"diloco": "0.1"}
    assert manifest.differences(of({"mixing": 0.0}, same), of({"mixing": 0.5}, same)) == [
        "diloco.mixing was 0.0 and is 0.5"
    ]
    for old, new in (({"a.b": 1}, {"a": {"b": 1}}), ({"a": {}}, {}), ({"a": {}}, {"a": 0})):
        assert manifest.differences(of({}, old), of({}, new))


def test_a_folder_that_is_removed_during_its_save_is_said_to_be(tmp_path, monkeypatch):
    def remove_first(folder, hash_files=manifest.hash_files):
        shutil.rmtree(tmp_path / "1")
        return hash_files(folder)

    monkeypatch.setattr(manifest, "hash_files", remove_first)
    with pytest.raises(OSError, match="1 was removed while it was written"):
        diloco.save(tmp_path, *small_state(1))
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, caplog):
    diloco.save(tmp_path, *small_state(1))
    (tmp_path / "1" / manifest.NAME).unlink()
    (tmp_path / "1" / manifest.NAME / "mine").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (2, 3):
            checkpoints.save(*small_state(step))
        checkpoints.wait()
        assert caplog.text.count("1 could not be removed (Directory not empty); remove it") == 2
        with pytest.raises(OSError, match="1 could not be removed"):
            checkpoints.drop_after(0)  # it would be resumed from
    assert diloco.latest(tmp_path) == 3


def test_restore_reads_no_pickle(saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert_equal(values(restore(saved[0]).state), saved[1][9])
    for path in saved[0].rglob("*"):
        assert path.is_dir() or not path.read_bytes().startswith(b"\x80\x04")


def test_settings_and_extras_must_be_json(tmp_path):
    state = diloco.init(CONFIG, initial())
    with pytest.raises(TypeError, match="extras cannot be written as JSON"):
        diloco.save(tmp_path, CONFIG, state, extras={"data": object()})
    with pytest.raises(TypeError, match="settings cannot be written as JSON"):
        diloco.save(tmp_path, CONFIG, state, settings={"rate": float("nan")})
    assert diloco.latest(tmp_path) is None


def small_state(step=0):
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
    state = diloco.init(config, {"params": jnp.ones(3)})
    return config, state._replace(step=jnp.int32(step))


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "2024" / "state-of-texas").mkdir(parents=True)
    (tmp_path / "2024" / "state-of-texas" / "notes.txt").write_text("mine")
    (tmp_path / "007").mkdir()
    (tmp_path / "5").write_text("a file")
    (tmp_path / "6").mkdir()
    for name in ("manifest.json", "data.bin"):
        (tmp_path / "6" / name).write_text('{"of": "another program"}')
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (7, 8):
            checkpoints.save(*small_state(step))
        checkpoints.wait()
        checkpoints.drop_after(3)
        with pytest.raises(ValueError, match="6 holds something that is no checkpoint of this run"):
            checkpoints.save(*small_state(6))
        checkpoints.save(*small_state(1))
    assert len(list((tmp_path / "6").iterdir())) == 2
    assert "another program" in (tmp_path / "6" / "manifest.json").read_text()
    assert (tmp_path / "2024" / "state-of-texas" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "007").is_dir() and (tmp_path / "5").is_file()
    assert diloco.latest(tmp_path) == 1


def test_the_save_just_made_is_kept_whatever_is_there(tmp_path):
    for step in (100, 200):
        diloco.save(tmp_path, *small_state(step), keep=2)
    diloco.save(tmp_path, *small_state(150), keep=1)
    assert diloco.restore(tmp_path, *small_state(), step=150).state.step == 150


def test_leaves_that_would_share_a_name_are_refused(tmp_path):
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="two leaves would both be named 'inner/params/a/b'"):
        diloco.save(tmp_path, config, diloco.init(config, {"params": params}))
    params = {"a": jnp.ones(3), "a/": jnp.zeros(3)}  # a path, to the store of arrays
    with pytest.raises(ValueError, match="two leaves would both be named 'inner/params/a/'"):
        diloco.save(tmp_path, config, diloco.init(config, {"params": params}))


def test_a_leaf_without_elements_is_refused(tmp_path):
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
    state = diloco.init(config, {"params": jnp.ones(3), "none": jnp.zeros((0, 4))})
    with pytest.raises(ValueError, match="inner/none has no elements"):
        diloco.save(tmp_path, config, state)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_a_folder_in_place_of_a_manifest_falls_back(tmp_path):
    for step in (1, 2):
        diloco.save(tmp_path, *small_state(step))
    (tmp_path / "2" / "manifest.json").unlink()
    (tmp_path / "2" / "manifest.json").mkdir()
    assert diloco.latest(tmp_path) == 1
