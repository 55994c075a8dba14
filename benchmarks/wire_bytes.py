"""Bytes that cross islands in one sync, by wire format, from compiled programs.

Two islands of two CPU devices, and two TPU slices of four chips (libtpu's compiler; no TPU is needed). Prints what one
chip sends and fails if a format sends more than its share of float32: 1/2, 1/3.9 and 1/7.7, scales included.

    python benchmarks/wire_bytes.py
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import sys

import jax

import diloco
from diloco import aot, inner, sharding, spmd, tpu
from diloco.recipes import Recipe, load_recipe
from diloco.traffic import device_islands, traffic


LEAST = {"float32": 1.0, "bfloat16": 2.0, "int8": 3.9, "float4_e3m0": 7.7}
SIZES = (
    "model.model_dim=512",
    "model.mlp_dim=1024",
    "model.num_heads=8",  # heads as in real models: a TPU sends narrower ones padded to its tiles of 8 x 128
    "model.num_kv_heads=8",
    "model.head_dim=128",
    "train.global_batch_size=8",
    "hardware.name=tpu-v5p",
    "hardware.topology=v5p:2x2x1",
    "hardware.slices=2",
)


def on_cpu(recipe: Recipe) -> tuple[int, int]:
    """Returns the bytes a device sends in a sync, and at other steps."""
    mesh = sharding.make_mesh(2, fsdp=2)
    step = spmd.build_train_step(recipe.diloco, inner.build_step(recipe, mesh), mesh=mesh)
    state, batch = aot.abstract_state(recipe, mesh), aot.abstract_batch(recipe, mesh)
    moved = traffic(jax.jit(step).lower(state, batch).compile().as_text(), device_islands(mesh))
    (send,) = moved.sends
    return sum(send.across.values()), sum(moved.unconditional.values())


def on_tpu(recipe: Recipe) -> tuple[int, int]:
    """Returns the bytes a chip sends in a sync, and at other steps."""
    compiled = tpu.compile_recipe(recipe)
    (send,) = compiled.sends
    return sum(send.across.values()), sum(compiled.plain_across.values())


def main() -> int:
    """Prints the table; returns 1 if a format sends too much."""
    missed = False
    targets = {"CPU, 2 x 2": (on_cpu, 2), "TPU v5p, 2 x 4": (on_tpu, 4)}
    print(
        "| compiled for | wire format | bytes sent by a chip | float32 over it | at least | over wire bytes / chips | other steps |"
    )
    print("|---|---|---|---|---|---|---|")
    for target, (measure, chips) in targets.items():
        full = 0
        for name, least in LEAST.items():
            recipe = load_recipe("laptop-diloco", [*SIZES, f"diloco.wire_format={name}"])
            sent, other = measure(recipe)
            full = full or sent
            params = jax.eval_shape(lambda r=recipe: inner.init(r)["params"])
            (fragment,) = diloco.partition(params, recipe.diloco).fragments
            share = sent / (fragment.wire_bytes / chips)
            missed |= full / sent < least or other > 0 or abs(share - 1) > 0.01
            print(
                f"| {target} | {name} | {sent:,} | {full / sent:.3f} | {least} | {share:.4f} | {other} |"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
