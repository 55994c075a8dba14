"""Bytes counted in compiled programs: saved texts, and programs whose traffic is known."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import traffic as traffic_lib
from diloco.traffic import device_islands, traffic


HLO = Path(__file__).parent / "data" / "hlo"
ISLANDS = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("islands", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def compiled(mesh, function, shape, spec, dtype=jnp.float32, **scalars):
    """Compiles a function of one sharded array and scalars; returns its text."""
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return jax.jit(function).lower(x, **scalars).compile().as_text()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
    ],
)
def test_device_groups(groups, expected):
    line = f"replica_groups={groups}, use_global_device_ids=true"
    assert traffic_lib._GROUPS.search(line)[1] == groups
    assert traffic_lib._groups(groups, 8) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[2,3]{1,0:T(8,128)}", 24),
        ("(bf16[4]{0}, u32[], token[])", 12),
        ("s4[3]{0}", 2),
        ("pred[5]", 5),
        ("f8e4m3fn[7]{0}", 7),
        ("token[]", 0),
    ],
)
def test_shape_bytes(shape, expected):
    assert traffic_lib._num_bytes(shape) == expected


def test_tpu_text_counts_what_leaves_a_slice():
    # Codes uint8[64, 48, 128] and scales float32[64, 48] of one chip, in the second branch only.
    result = traffic((HLO / "tpu-two-slices-4bit.txt").read_text(), [0] * 64 + [1] * 64)
    assert result.unconditional == {}
    assert result.within == {}
    assert [branch.across for branch in result.conditional] == [
        {},
        {"all-gather": 64 * 48 * 128 + 4 * 64 * 48},
    ]
    assert [branch.path for branch in result.sends] == ["conditional/1"]


def test_async_conditional_and_loop_text():
    result = traffic((HLO / "gpu-async-loop.txt").read_text(), ISLANDS)
    # 12 iterations gather 64 bytes in each island; the true branch permutes 16 bytes between them.
    assert result.within == {"all-gather": 12 * 64}
    assert result.unconditional == {"all-reduce": 4}
    assert {branch.path: branch.across for branch in result.conditional} == {
        "conditional.1/1": {"collective-permute": 16},
        "conditional.1/0": {},
    }


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        traffic("HloModule empty", ISLANDS)


def test_device_islands_follows_the_mesh_order():
    assert device_islands(jax.make_mesh((2, 4), ("islands", "fsdp"))) == ISLANDS
    assert device_islands(jax.make_mesh((2, 4), ("fsdp", "islands"))) == [0, 1, 2, 3] * 2


def test_mean_over_islands_is_one_all_reduce(mesh):
    text = compiled(mesh, lambda x: jnp.mean(x, axis=0), (2, 64, 8), P("islands", "fsdp"))
    result = traffic(text, device_islands(mesh))
    assert result.unconditional == {"all-reduce": 64 * 8 * 4 // 4}
    assert result.within == {}
    assert result.conditional == ()


def test_mean_over_shards_stays_inside_the_island(mesh):
    text = compiled(mesh, lambda x: jnp.mean(x, axis=1), (2, 64, 8), P("islands", "fsdp"))
    result = traffic(text, device_islands(mesh))
    assert result.unconditional == {}
    assert result.within == {"all-reduce": 8 * 4}


def test_narrow_payload_inside_a_branch(mesh):
    def send(x):
        codes = jnp.round(x).astype(jnp.uint8)
        for spec in (
            P("islands", "fsdp"),
            P(None, "fsdp"),
        ):  # without the first the CPU compiler gathers float32
            codes = jax.lax.with_sharding_constraint(codes, NamedSharding(mesh, spec))
        return jnp.mean(codes.astype(jnp.float32), axis=0)

    def step(x, is_send):
        return jax.lax.cond(is_send, send, lambda x: jnp.zeros(x.shape[1:], x.dtype), x)

    text = compiled(mesh, step, (2, 64, 8), P("islands", "fsdp"), is_send=True)
    result = traffic(text, device_islands(mesh))
    assert result.unconditional == {}
    assert [branch.across for branch in result.conditional] == [{}, {"all-gather": 64 * 8 // 4}]


def test_branch_under_vmap_becomes_unconditional(mesh):
    # A conditional that vmap turns into a select runs its collective at every step.
    def step(x, is_send):
        flags = jnp.broadcast_to(is_send, (3,))
        return jax.vmap(
            lambda flag: jax.lax.cond(flag, lambda y: y.mean(0), lambda y: y[0] * 2, x)
        )(flags)

    result = traffic(
        compiled(mesh, step, (2, 64, 8), P("islands", "fsdp"), is_send=True), device_islands(mesh)
    )
    assert result.conditional == ()
    assert sum(result.unconditional.values()) >= 64 * 8 * 4 // 4


def test_permutation_between_islands(mesh):
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("islands", "fsdp"), out_specs=P("islands", "fsdp")
    )
    def swap(x):
        return jax.lax.ppermute(x, "islands", [(0, 1), (1, 0)])

    result = traffic(compiled(mesh, swap, (2, 64, 8), P("islands", "fsdp")), device_islands(mesh))
    assert result.unconditional == {"collective-permute": 64 * 8 * 4 // 4}


def test_loop_counts_every_iteration(mesh):
    def loop(x):
        return jax.lax.scan(
            lambda c, _: (c * 0.5 + jnp.mean(c, axis=1, keepdims=True), None), x, length=5
        )[0]

    result = traffic(compiled(mesh, loop, (2, 64, 8), P("islands", "fsdp")), device_islands(mesh))
    assert result.unconditional == {}
    assert result.within == {"all-reduce": 5 * 8 * 4}
