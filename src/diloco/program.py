"""What a run is made of before its first step: compiled functions, first state, mesh and batches."""

import os
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from diloco import data, inner, sharding, spmd
from diloco.models import decoder
from diloco.recipes import Recipe
from diloco.state import DiLoCoState


class Program(NamedTuple):
    """The compiled functions of a run.

    Attributes:
        step: `(state, batch) -> (state, metrics)`; takes the state's buffers over.
        measure: `(state, batch) -> values`, the divergence of the islands before a send.
        evaluate: `(state, tokens) -> values`, the held-out losses.
        flush: `state -> state`, everything sent and applied.
    """

    step: Any
    measure: Any
    evaluate: Any
    flush: Any


def build(recipe: Recipe, mesh: Mesh | None = None) -> Program:
    """Builds the compiled functions of a run.

    Args:
        recipe: Of the run.
        mesh: A mesh with an `islands` axis; None for one device.

    Returns:
        The functions; each compiles when it is first called.
    """
    step = spmd.build_train_step(recipe.diloco, inner.build_step(recipe, mesh), mesh=mesh)

    def counting_step(state: DiLoCoState, batch: Any):
        state, metrics = step(state, batch)
        return state, metrics | {"skipped": state.skipped}

    return Program(
        step=jax.jit(counting_step, donate_argnums=0),
        measure=jax.jit(inner.build_measure(recipe, mesh)),
        evaluate=jax.jit(inner.build_evaluate(recipe, mesh)),
        flush=lambda state: spmd.flush(recipe.diloco, state, mesh=mesh),
    )


def start(recipe: Recipe, mesh: Mesh | None = None) -> DiLoCoState:
    """Returns the state at step 0, on the mesh.

    Args:
        recipe: Model and settings.
        mesh: A mesh with an `islands` axis; None for one device.

    Returns:
        The state.
    """
    one = inner.init(recipe)
    if mesh is not None:
        specs = decoder.param_specs(recipe.model, mesh.axis_names)
        one["params"] = jax.tree.map(
            lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), one["params"], specs
        )
        # Not under jit, where zeros would forget how the parameters lie.
        one["opt_state"] = inner.optimizer(recipe.train).init(one["params"])
    return spmd.init(recipe.diloco, one, mesh=mesh)


def check_memory(recipe: Recipe) -> None:
    """Refuses a run whose state alone is larger than the memory here, before anything is allocated.

    Args:
        recipe: Model and settings.

    Raises:
        ValueError: If parameters, optimizer states and Theta do not fit the devices, or, on CPUs, the machine.
    """
    state = jax.eval_shape(lambda: spmd.init(recipe.diloco, inner.init(recipe)))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    stats = jax.local_devices()[0].memory_stats() or {}
    each = stats.get("bytes_limit")  # CPU devices have none: they share the machine's
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    have = each * jax.device_count() if each else machine
    if needed > have:
        other = f"the recipe {recipe.meta.twin}" if recipe.meta.twin else "a smaller model"
        more = "more devices" if each else "a machine with more memory"
        raise ValueError(
            f"the state of {recipe.name} takes {needed / 2**30:.1f} GiB, but there are {have / 2**30:.1f} GiB here; "
            f"use {other}, or {more}"
        )


def device_mesh(recipe: Recipe) -> Mesh | None:
    """Returns a mesh over all devices, islands outermost; None if there is one device.

    Raises:
        ValueError: If the islands do not divide the devices, or the devices of an island its sequences.
    """
    devices, islands = jax.device_count(), recipe.diloco.num_islands
    if devices == 1:
        return None
    if devices % islands:
        raise ValueError(
            f"{devices} devices do not divide into diloco.num_islands {islands}; "
            f"use a number of islands that divides {devices}, or show JAX fewer devices"
        )
    sequences, each = recipe.train.global_batch_size // islands, devices // islands
    if sequences % each:
        raise ValueError(
            f"the {sequences} sequences of an island are not divisible by its {each} devices; "
            f"use train.global_batch_size={-(-sequences // each) * each * islands}"
        )
    return sharding.make_mesh(islands, fsdp=each)


def open_batches(recipe: Recipe, corpus: data.Corpus) -> data.IslandBatches:
    """Returns the batches of a run from its first step on.

    Args:
        recipe: Gives the islands, the sequences, their length, the split and the seed.
        corpus: The text.

    Returns:
        An endless iterator of `[M, B / M, S + 1]` tokens.
    """
    return data.island_iterators(
        corpus,
        num_islands=recipe.diloco.num_islands,
        batch_size=recipe.train.global_batch_size,
        sequence_length=recipe.data.sequence_length,
        split=recipe.data.split,
        seed=recipe.train.seed,
    )
