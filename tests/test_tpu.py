"""The TPU compiler on small recipes, errors in one sentence, and the recorded full-size reports."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from diloco import conf, tpu
from diloco.aot import matmul_flops
from diloco.recipes import load_recipe


ROOT = Path(__file__).parents[1]
COMPILED = ROOT / "docs" / "data" / "compiled"
FULL_SIZE = [n for n in conf.names("recipes") if load_recipe(n).hardware is not None]
SMALL = [
    "hardware.name=tpu-v5p",
    "hardware.topology=v5p:2x2x1",
    "hardware.slices=2",
    "model.model_dim=256",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.head_dim=128",
    "model.mlp_dim=512",
    "model.num_layers=4",
    "data.sequence_length=32",
    "train.global_batch_size=8",
    "diloco.sync_period=8",
]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: diloco[tpu]"
)


def small(*overrides):
    return load_recipe("laptop-diloco", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def streaming():
    wire = ["diloco.num_fragments=5", "diloco.wire_format=float4_e3m0"]
    return tpu.compile_recipe(small(*wire, "diloco.overlap_steps=1", "diloco.mixing=0.5"))


@needs_libtpu
@pytest.mark.tpu
def test_sends_are_the_only_traffic_between_slices(streaming):
    assert streaming.plain_across == {}
    assert sorted(f for send in streaming.sends for f in send.fragments) == list(range(5))
    for send in streaming.sends:
        share = send.wire_bytes / 4  # devices of an island
        assert tpu.device_payload(streaming, send) == share
        # Small leaves that every device holds whole are sent whole: 6 % at this size, 0.3 % at full size.
        assert share <= sum(send.across.values()) <= 1.1 * share
    assert streaming.devices == 8
    assert streaming.hbm_bytes == pytest.approx(95.74 * tpu.GIB, rel=1e-3)


@needs_libtpu
@pytest.mark.tpu
def test_state_is_what_the_formula_says(streaming):
    recipe = small()
    from diloco.models import decoder

    parameters = decoder.num_parameters(recipe.model)
    # Parameters, two moments, Theta, its momentum: 20 bytes each over 4 devices, plus whole norms.
    assert streaming.state_bytes == pytest.approx(20 * parameters / 4, rel=0.05)
    assert streaming.peak_bytes >= streaming.state_bytes + streaming.temporary_bytes


@needs_libtpu
@pytest.mark.tpu
def test_program_does_not_grow_with_the_fragments(streaming):
    two = tpu.compile_recipe(
        small("diloco.num_fragments=2", "diloco.wire_format=float4_e3m0", "diloco.mixing=0.5",
              "diloco.overlap_steps=1")
    )  # fmt: skip
    assert streaming.program_lines <= 1.15 * two.program_lines


@needs_libtpu
@pytest.mark.tpu
def test_table_and_json_say_the_same(streaming):
    table = tpu.table(streaming)
    assert f"{streaming.peak_bytes / tpu.GIB:.2f} of 95.74 GiB" in table
    assert "across slices, plain step | nothing" in table
    assert tpu.from_json(tpu.to_json(streaming)) == streaming


@needs_libtpu
@pytest.mark.tpu
def test_out_of_memory_is_one_sentence():
    recipe = small(
        "model.vocab_size=60000000", "hardware.topology=v5e:2x2", "hardware.name=tpu-v5e"
    )
    with pytest.raises(
        ValueError, match=r"needs .*G of a device's 15\.\d+G of memory; lower train"
    ):
        tpu.compile_recipe(recipe)


@needs_libtpu
@pytest.mark.tpu
def test_what_libtpu_refuses_is_passed_on():
    with pytest.raises(ValueError, match=r"does not compile for v5p:3x4x4: .*not divisible"):
        tpu.compile_recipe(small("hardware.topology=v5p:3x4x4"))


def test_unknown_topology_and_missing_hardware():
    with pytest.raises(ValueError, match=r"topology 'v5q:4x4x4' is not known; use v5p:4x4x4"):
        tpu.compile_recipe(small("hardware.topology=v5q:4x4x4"))
    with pytest.raises(ValueError, match=r"laptop-diloco names no TPU; add hardware.topology"):
        tpu.compile_recipe(load_recipe("laptop-diloco"))


def test_missing_libtpu_says_where_it_runs(monkeypatch):
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"libtpu is not installed on .*; on Linux x86-64 install"):
        tpu.compile_recipe(small())


def test_compiler_that_dies_says_why(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'libtpu.so: wrong ELF class' >&2\nexit 134\n")
    fake.chmod(0o755)
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ValueError, match=r"stopped with status 134: libtpu.so: wrong ELF class"):
        tpu.compile_recipe(small())


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v5p:4x4x4", "v5p-128"),
        ("v5e:4x4", "v5litepod-16"),
        ("v6e:16x16", "v6e-256"),
        ("tpu7x:4x4x4", "tpu7x-128"),
    ],
)
def test_product_names_count_tensorcores(topology, name):
    assert tpu.accelerator(topology) == name


def test_matmul_flops_of_loops_branches_and_gradients():
    w = jnp.ones((4, 8))

    def f(x):
        y = jax.lax.scan(lambda c, _: (c @ w @ w.T, None), x, length=5)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ w, lambda y: jnp.zeros((2, 8)), y).sum()

    forward = 5 * (2 * 2 * 4 * 8 * 2) + 2 * 2 * 4 * 8
    assert matmul_flops(jax.make_jaxpr(f)(jnp.ones((2, 4))).jaxpr) == forward
    # The backward pass multiplies once more for each product with a constant.
    assert matmul_flops(jax.make_jaxpr(jax.grad(f))(jnp.ones((2, 4))).jaxpr) == 2 * forward


@pytest.mark.parametrize("name", FULL_SIZE)
def test_recorded_report_keeps_the_bars(name):
    record = json.loads((COMPILED / f"{name}.json").read_text())
    assert set(record) == {f.name for f in dataclasses.fields(tpu.Compiled)}
    recipe = load_recipe(name)
    assert (record["topology"], record["slices"]) == (
        recipe.hardware.topology,
        recipe.hardware.slices,
    )
    assert record["peak_bytes"] <= record["hbm_bytes"]
    assert record["plain_across"] == {}
    sent = [f for send in record["sends"] for f in send["fragments"]]
    assert sorted(sent) == list(range(recipe.diloco.num_fragments))
    for send in record["sends"]:
        share = send["wire_bytes"] * record["slices"] / record["devices"]
        assert sum(send["across"].values()) == pytest.approx(share, rel=0.01)
    assert record["host_bytes"] <= 8 * tpu.GIB
