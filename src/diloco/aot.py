"""The process that `diloco.tpu` starts: traces a recipe's train step and compiles it with libtpu.

Run as `python -m diloco.aot RECIPE.toml`. Its last line of output is JSON, the fields of
`diloco.tpu.Compiled` or `{"error": message}`.
"""

import importlib.metadata
import json
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco import conf, fragments, inner, sharding, spmd
from diloco.models import decoder
from diloco.recipes import Recipe, load_recipe
from diloco.state import DiLoCoState
from diloco.traffic import Traffic, device_islands, traffic


def compile_here(recipe: Recipe) -> dict[str, Any]:
    """Compiles in this process, into which libtpu is loaded.

    Args:
        recipe: A recipe whose `hardware.topology` libtpu knows.

    Returns:
        The fields of `diloco.tpu.Compiled`.
    """
    hardware, config = recipe.hardware, recipe.diloco
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=hardware.topology, num_slices=hardware.slices
    ).devices
    mesh = sharding.make_mesh(config.num_islands, devices=devices)
    state, batch = abstract_state(recipe, mesh), abstract_batch(recipe, mesh)
    step = spmd.build_train_step(config, inner.build_step(recipe, mesh), mesh=mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)

    start, processor = time.perf_counter(), time.process_time()
    traced = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).trace(state, batch)
    lowered = traced.lower()
    compiled = lowered.compile()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor

    memory = compiled.memory_analysis()
    moved = traffic(compiled.as_text(), device_islands(mesh))
    per_chip = 2 if hardware.topology.startswith("tpu7x") else 1
    new_output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "recipe": recipe.name,
        "topology": hardware.topology,
        "slices": hardware.slices,
        "devices": len(devices),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.argument_size_in_bytes + new_output + memory.temp_size_in_bytes,
        "hbm_bytes": round(conf.load("hardware", hardware.name)["hbm_bytes"] / per_chip),
        "plain_across": moved.unconditional,
        "plain_within": moved.within,
        "sends": sends(moved, recipe),
        "flops": matmul_flops(traced.jaxpr.jaxpr) / len(devices),
        "program_lines": lowered.as_text().count("\n"),
        "compile_seconds": round(seconds, 1),
        "compile_cpu_seconds": round(processor, 1),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def abstract_state(recipe: Recipe, mesh: Mesh) -> DiLoCoState:
    """Returns the state at step 0 as shapes with shardings; nothing is allocated.

    Args:
        recipe: Model and settings.
        mesh: A mesh with an `islands` axis.

    Returns:
        A `DiLoCoState` of `jax.ShapeDtypeStruct`.
    """
    one = jax.eval_shape(lambda: inner.init(recipe))
    of_params = decoder.param_specs(recipe.model, mesh.axis_names)
    specs = {
        "params": of_params,
        "opt_state": optax.tree.map_params(
            inner.optimizer(recipe.train),
            lambda _, spec: spec,
            one["opt_state"],
            of_params,
            transform_non_params=lambda _: PartitionSpec(),
        ),
    }
    shardings = sharding.state_sharding(recipe.diloco, one, mesh, specs=specs)
    shapes = jax.eval_shape(lambda s: spmd.init(recipe.diloco, s), one)
    return jax.tree.map(_struct, shapes, shardings)


def abstract_batch(recipe: Recipe, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the batch of a step as a shape with its sharding.

    Args:
        recipe: Gives the islands, the sequences and their length.
        mesh: The mesh it would lie on.

    Returns:
        int32 `[M, B / M, S + 1]`.
    """
    islands = recipe.diloco.num_islands
    each = recipe.train.global_batch_size // islands
    shape = jax.ShapeDtypeStruct((islands, each, recipe.data.sequence_length + 1), jnp.int32)
    return _struct(shape, NamedSharding(mesh, PartitionSpec("islands", "fsdp", None)))


def _struct(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def sends(moved: Traffic, recipe: Recipe) -> list[dict[str, Any]]:
    """Names the fragments of every branch that crosses islands: branch g + 1 sends group g.

    Args:
        moved: The traffic of the compiled step.
        recipe: The recipe it was compiled from.

    Returns:
        The fields of `diloco.tpu.Send`, one dict a branch.
    """
    params = jax.eval_shape(lambda: decoder.init(recipe.model, jax.random.key(0)))
    cut = fragments.partition(params, recipe.diloco)
    found = []
    for branch in moved.sends:
        group = cut.groups[int(branch.path.rsplit("/", 1)[1]) - 1]
        found.append(
            {
                "fragments": group.members,
                "wire_bytes": cut.fragments[group.members[0]].wire_bytes,
                "across": branch.across,
                "within": branch.within,
            }
        )
    return found


def matmul_flops(jaxpr: Any) -> float:
    """Counts the operations of all matrix products in a traced program, loops included.

    Args:
        jaxpr: A jaxpr, such as `jax.make_jaxpr(f)(x).jaxpr`.

    Returns:
        Multiplications and additions; of a conditional the dearest branch.

    Example:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0]
        >>> matmul_flops(jax.make_jaxpr(f)(jnp.ones((8, 8))).jaxpr)
        3072.0
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = 1
            for axis in contracted:
                depth *= shape[axis]
            total += 2.0 * eqn.outvars[0].aval.size * depth
        inner = [matmul_flops(j) for j in _inner_jaxprs(eqn.params)]
        if inner:
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            total += times * (max(inner) if eqn.primitive.name == "cond" else sum(inner))
    return total


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                found.append(item)
    return found


def main(path: str) -> None:
    """Compiles the recipe at `path` and prints the answer."""
    try:
        answer = compile_here(load_recipe(path))
    except (ValueError, RuntimeError, OSError) as error:  # XLA's errors are RuntimeErrors
        answer = {"error": f"{error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
