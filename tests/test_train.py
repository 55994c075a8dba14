"""Training: the loop against a plain one, its measurements, and the run directory it leaves."""

import functools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import diloco
from diloco import data, inner, restoring, resume, sharding
from diloco import program as programs
from diloco import train as training
from diloco.models import decoder
from diloco.recipes import load_recipe


SMALL = [
    "model.name=tiny",
    "data.sequence_length=16",
    "train.steps=12",
    "train.global_batch_size=8",
    "train.warmup_steps=2",
    "train.eval_every=4",
    "train.eval_sequences=8",
    "diloco.sync_period=3",
]
STREAMING = ["diloco.num_fragments=3", "diloco.overlap_steps=1", "diloco.mixing=0.5"]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Equal recipes share their compiled functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build", functools.cache(training.build))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def small(text):
    def recipe(name="laptop-diloco", *overrides):
        return load_recipe(name, [*SMALL, f'data.corpus="{text}"', *overrides])

    return recipe


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    return training.train(small(), tmp_path_factory.mktemp("runs") / "vanilla")


def records(result, kind):
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_a_run_learns_and_says_so(run, small):
    train, evals = records(run, "train"), records(run, "eval")
    assert [r["step"] for r in train] == list(range(1, 13))
    assert train[-1]["tokens"] == [12 * 4 * 16] * 2
    assert all(len(r["loss"]) == len(r["gradient_norm"]) == 2 for r in train)
    assert [r["step"] for r in evals] == [4, 8, 12]
    assert evals[-1]["outer_loss"] < evals[0]["outer_loss"] < math.log(256) + 0.1
    # At a sync the islands are Theta, and the last step is one.
    assert evals[-1]["island_loss"] == pytest.approx([evals[-1]["outer_loss"]] * 2, rel=1e-6)
    assert run.summary["outer_loss"] == evals[-1]["outer_loss"]
    assert (run.summary["flushed"], run.summary["skipped"]) == (False, [0, 0])
    assert run.summary["tokens"] == 2 * 12 * 4 * 16
    assert load_recipe(run.run_dir / "recipe.toml").diloco == small().diloco
    assert json.loads((run.run_dir / "versions.json").read_text())["jax"] == jax.__version__


def test_theta_is_exported(run):
    saved = load_file(run.run_dir / "outer_params.safetensors")
    theta = run.state.outer_params
    assert set(saved) >= {"embed", "head", "layers.wq"}
    np.testing.assert_array_equal(saved["layers.wq"], theta["layers"]["wq"])
    assert len(saved) == len(jax.tree.leaves(theta))


def test_two_equal_runs_write_equal_files(run, small, tmp_path):
    again = training.train(small(), tmp_path / "again")
    for name in ("metrics.jsonl", "outer_params.safetensors"):
        assert (again.run_dir / name).read_bytes() == (run.run_dir / name).read_bytes()


def test_the_data_parallel_recipe_is_plain_training(small, tmp_path):
    recipe = small("laptop-data-parallel", "diloco.sync_period=1", "train.weight_decay=0.3")
    result = training.train(recipe, tmp_path / "run")
    t = recipe.train

    def cosine(step):
        if step < t.warmup_steps:
            return t.learning_rate * (step + 1) / t.warmup_steps
        part = (step - t.warmup_steps) / (t.steps - t.warmup_steps)
        low = t.final_learning_rate_fraction
        return t.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * part)) / 2)

    gradient = jax.jit(
        jax.grad(lambda params, tokens: decoder.loss(recipe.model, params, tokens)[0])
    )
    params = jax.device_get(decoder.init(recipe.model, jax.random.key(t.seed)))
    m = v = jax.tree.map(np.zeros_like, params)
    batches = training.open_batches(recipe, data.load_corpus(recipe.data.corpus))
    for step in range(t.steps):
        g = jax.device_get(gradient(params, next(batches)[0]))
        norm = math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x, n=norm: x * min(1.0, t.gradient_clip / n), g)
        m = jax.tree.map(lambda a, x: t.beta1 * a + (1 - t.beta1) * x, m, g)
        v = jax.tree.map(lambda a, x: t.beta2 * a + (1 - t.beta2) * x * x, v, g)

        def update(path, p, a, b, step=step):
            a, b = a / (1 - t.beta1 ** (step + 1)), b / (1 - t.beta2 ** (step + 1))
            decay = 0.0 if "norm" in jax.tree_util.keystr(path) else t.weight_decay
            return p - np.float32(cosine(step)) * (a / (np.sqrt(b) + 1e-8) + decay * p)

        params = jax.tree_util.tree_map_with_path(update, params, m, v)
    for expected, got in zip(
        jax.tree.leaves(params), jax.tree.leaves(result.state.outer_params), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=2e-4)
    assert [r["cosine"] for r in records(result, "outer")] == [None] * 3


def test_the_measured_pseudo_gradient_is_the_one_that_is_sent(small):
    """The first outer step is eta (1 + beta) times the mean of what measure saw."""
    recipe = small()
    program, state = training.build(recipe), training.start(recipe)
    batches = training.open_batches(recipe, data.load_corpus(recipe.data.corpus))
    for _ in range(2):
        state, _ = program.step(state, next(batches))
    batch, before = next(batches), jax.device_get(state.outer_params)
    seen = jax.device_get(program.measure(state, batch))
    state, _ = program.step(state, batch)
    moved = optax.tree.norm(jax.tree.map(lambda a, b: a - b, before, state.outer_params))
    a, b = seen["pseudo_gradient_norm"]
    mean = math.sqrt(a**2 + b**2 + 2 * a * b * seen["cosine"]) / 2
    c = recipe.diloco
    assert float(moved) == pytest.approx(
        c.outer_learning_rate * (1 + c.outer_momentum) * mean, rel=1e-4
    )
    assert -1 < seen["cosine"] < 1
    assert program.step._cache_size() == 1  # nothing is compiled again


def test_divergence_is_the_literal_formula():
    rng = np.random.default_rng(0)
    theta = {"a": rng.normal(size=(3, 2)), "b": rng.normal(size=4)}
    own = {"a": rng.normal(size=(3, 3, 2)), "b": rng.normal(size=(3, 4))}
    out = inner.divergence(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (theta, own)))
    delta = [np.concatenate([(theta[k] - own[k][m]).ravel() for k in theta]) for m in range(3)]
    norms = [np.linalg.norm(d) for d in delta]
    pairs = [(0, 1), (0, 2), (1, 2)]
    cosine = np.mean([delta[i] @ delta[j] / (norms[i] * norms[j]) for i, j in pairs])
    np.testing.assert_allclose(out["pseudo_gradient_norm"], norms, rtol=1e-5)
    assert float(out["cosine"]) == pytest.approx(cosine, abs=1e-6)


def test_a_mesh_gives_the_same_numbers(run, small):
    recipe, mesh = small(), sharding.make_mesh(2, fsdp=2, devices=jax.devices()[:4])
    program, state = training.build(recipe, mesh), training.start(recipe, mesh)
    batches = training.open_batches(recipe, data.load_corpus(recipe.data.corpus))
    losses, placed = [], jax.tree.map(lambda x: x.sharding, state)
    for _ in range(4):
        state, metrics = program.step(state, training._put(next(batches), mesh))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, [r["loss"] for r in records(run, "train")[:4]], rtol=1e-4)
    # Every leaf stays where it was put, moments too, so that step 2 is the program of step 1.
    same = jax.tree.map(lambda s, x: s.is_equivalent_to(x.sharding, x.ndim), placed, state)
    assert all(jax.tree.leaves(same))
    _, adam, *_ = state.inner["opt_state"]
    for layers in (
        state.outer_params["layers"],
        state.inner["params"]["layers"],
        adam[0].mu["layers"],
    ):
        assert "fsdp" in layers["wq"].sharding.spec


def test_unsent_work_is_flushed_and_told(small, tmp_path, capsys):
    result = training.train(
        small("laptop-diloco", *STREAMING, "train.eval_every=13"), tmp_path / "run", progress=True
    )
    out = capsys.readouterr().out
    assert "sending every fragment once more" in out
    assert "step 12/12  loss" in out
    assert result.summary["flushed"]
    losses = [r["outer_loss"] for r in records(result, "eval") if r["step"] == 12]
    assert losses == [result.summary["outer_loss_before_flush"], result.summary["outer_loss"]]
    assert losses[0] != losses[1]


def test_islands_of_a_non_iid_split_are_trained_on_their_own(small, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}{name} " * 4000)
    recipe = small("laptop-diloco", "data.split=non-iid", f'data.corpus="{tmp_path}"')
    first = next(training.open_batches(recipe, data.load_corpus(tmp_path)))
    letters = [set(island.ravel().tolist()) & {ord("a"), ord("b")} for island in first]
    assert sorted(map(len, letters)) == [1, 1] and letters[0] != letters[1]


def test_text_that_is_grouped_otherwise_is_other_data_if_islands_have_their_own(small, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name}{name} " * 4000)
    before = data.load_corpus(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("b", "c"):
        (tmp_path / f"{name}.txt").rename(tmp_path / "b" / f"{name}.txt")
    after = data.load_corpus(tmp_path)
    assert before.digest == after.digest
    for split, same in (("iid", True), ("non-iid", False)):
        recipe = small("laptop-diloco", f"data.split={split}")
        assert (resume.settings(recipe, before) == resume.settings(recipe, after)) is same


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path, monkeypatch):
    def start(recipe, mesh=None, healthy=training.start):
        state = healthy(recipe, mesh)
        head = state.inner["params"]["head"]
        params = state.inner["params"] | {"head": head.at[1, 0, 0].set(jnp.inf)}
        return state._replace(inner=state.inner | {"params": params})

    monkeypatch.setattr(training, "start", start)
    with pytest.raises(ValueError, match="loss of island 1 is not finite at step 1; lower"):
        training.train(small(), tmp_path / "run")


def test_a_disk_that_is_full_during_the_training_is_one_sentence(small, tmpfs, monkeypatch):
    disk = tmpfs("size=8m")
    with monkeypatch.context() as patch:
        patch.setattr(training, "_loop", None)
        with pytest.raises(TypeError):  # right after the first checkpoint
            training.train(small(), disk / "run")
    (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
    with pytest.raises(OSError, match=r"run could not be written \(No space left on .*make room"):
        training.train(small(), disk / "run")
    (disk / "ballast").unlink()
    assert training.train(small(), disk / "run").summary["steps"] == 12


def test_a_directory_that_holds_a_run_is_left_alone(run, small):
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run; give another --run-dir"):
        training.train(small(), run.run_dir)
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["recipe.toml", "summary.json", "outer_params.safetensors"])
def test_a_new_run_overwrites_nobodys_files(name, small, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="already holds a run"):
        training.train(small(), tmp_path, resume="never")
    assert (tmp_path / name).read_text() == "mine"


def test_a_run_directory_is_a_local_path(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run_dir in ("gs://bucket/run", Path("gs://bucket/run"), "file:///run"):
        with pytest.raises(ValueError, match="is not a local path"):
            training.train(small(), run_dir)
    assert not any(tmp_path.iterdir())


def test_a_mesh_is_made_only_if_it_fits(small):
    assert programs.device_mesh(small()).shape == {"islands": 2, "fsdp": 4}
    with pytest.raises(ValueError, match=r"8 devices do not divide into diloco\.num_islands 3"):
        programs.device_mesh(
            small("laptop-diloco", "diloco.num_islands=3", "train.global_batch_size=6")
        )
    with pytest.raises(ValueError, match=r"the 2 sequences of .* use train\.global_batch_size=8"):
        programs.device_mesh(small("laptop-diloco", "train.global_batch_size=4"))


def test_sigterm_saves_and_the_same_command_goes_on(run, small, tmp_path, monkeypatch, capsys):
    program = training.build(small())

    def step(state, batch):
        if int(state.step) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return program.step(state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "build", lambda recipe, mesh: program._replace(step=step))
        stopped = training.train(small(), tmp_path / "run", progress=True)
    assert stopped.summary == {"stopped_at": 5}
    assert (
        "step 5: asked to stop; saved, the same command goes on from here"
        in capsys.readouterr().out
    )
    whole = training.train(small(), tmp_path / "run")
    for name in ("metrics.jsonl", "outer_params.safetensors"):
        assert (whole.run_dir / name).read_bytes() == (run.run_dir / name).read_bytes()


def test_a_checkpoint_of_another_loop_is_refused(small, tmp_path):
    state = training.start(small())
    diloco.save(tmp_path / "run" / "checkpoints", small().diloco, state)
    with pytest.raises(ValueError, match=r"step 0 in .* was not saved by this version of diloco"):
        training.train(small(), tmp_path / "run", allow_change=True)


def test_a_log_that_is_moved_away_stops_the_run_and_can_be_put_back(
    run, small, tmp_path, monkeypatch, caplog
):
    log, away, drain = tmp_path / "run" / "metrics.jsonl", tmp_path / "away", training.RunLog.drain

    def rotated(self):
        records = drain(self)
        log.rename(away)
        return records

    with monkeypatch.context() as patch:
        patch.setattr(training.RunLog, "drain", rotated)
        with pytest.raises(ValueError, match=r"was removed, moved or changed .*; put it back"):
            training.train(small(), log.parent, save_every=4)
    assert restoring.steps(log.parent / "checkpoints") == [0, 4]
    with pytest.raises(ValueError, match=r"has 0 bytes, but had .*; put it back, or go on with"):
        training.train(small(), log.parent, save_every=4)
    without = shutil.copytree(log.parent, tmp_path / "without")
    away.rename(log)
    training.train(small(), log.parent, save_every=4)
    for name in ("metrics.jsonl", "outer_params.safetensors"):
        assert (log.parent / name).read_bytes() == (run.run_dir / name).read_bytes()

    result = training.train(small(), without, save_every=4, allow_change=True)
    assert "the run goes on with what there is of it" in caplog.text
    assert result.summary["tokens"] == run.summary["tokens"]
    assert records(result, "train") == records(run, "train")[4:]
    lines = (without / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (without / "metrics.jsonl").write_bytes(b"".join([lines[0], b"junk\n", *lines[2:]]))
    training.train(small(), without, save_every=4, resume=8, allow_change=True)
    assert [r["step"] for r in records(result, "train")] == [5, 9, 10, 11, 12]


def test_a_run_goes_back_to_a_named_step_or_refuses_to_resume(run, small, tmp_path):
    first = training.train(small(), tmp_path / "run", save_every=4, keep=9)
    again = training.train(small(), tmp_path / "run", save_every=4, keep=9, resume=8)
    for name in ("metrics.jsonl", "outer_params.safetensors"):
        assert (again.run_dir / name).read_bytes() == (run.run_dir / name).read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        training.train(small(), first.run_dir, resume="never")
    with pytest.raises(ValueError, match="7"):
        training.train(small(), first.run_dir, resume=7)
    with pytest.raises(ValueError, match=r"step 8 in .* is beyond train\.steps 6"):
        training.train(
            small("laptop-diloco", "train.steps=6"), first.run_dir, resume=8, allow_change=True
        )
    log = (first.run_dir / "metrics.jsonl").read_bytes()
    for damaged in (b"# mine\n" + log, b"\xff" * len(log), log.replace(b"}", b"} ")):
        (first.run_dir / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: .* does not end at"):
            training.train(small(), first.run_dir, resume=8)
        assert (first.run_dir / "metrics.jsonl").read_bytes() == damaged
        assert restoring.steps(first.run_dir / "checkpoints")[-1] > 8
    (first.run_dir / "metrics.jsonl").write_bytes(log)
    (first.run_dir / "summary.json").unlink()
    last = training.train(small(), first.run_dir)  # nothing was left to do
    assert last.summary["tokens_per_second"] is None
    assert "NaN" not in (first.run_dir / "summary.json").read_text()
    (first.run_dir / "metrics.jsonl").unlink()  # its checkpoints would be taken for the new run's
    with pytest.raises(ValueError, match="already holds a run"):
        training.train(small(), first.run_dir, resume="never")
    with pytest.raises(ValueError, match=r"metrics.jsonl has 0 bytes, but had"):
        training.train(small(), first.run_dir, resume=8)
