"""Meshes with the islands outermost, and the shardings of state and batch on them."""

from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import outer
from diloco.config import DiLoCoConfig
from diloco.state import DiLoCoState, ParamsLens, params_lens


AXIS = "islands"
"""Name of the mesh axis, and of the DrJAX placement, of the islands."""


def make_mesh(
    num_islands: int, *, fsdp: int | None = None, tensor: int = 1, devices: list[Any] | None = None
) -> Mesh:
    """Makes a mesh `islands x fsdp (x tensor)` whose outermost axis runs across slices.

    Args:
        num_islands: M, length of the `islands` axis.
        fsdp: Devices of one island along `fsdp`; None takes all that are left.
        tensor: Devices along `tensor`; 1 leaves the axis out.
        devices: The devices, all of JAX's by default. On hardware with several slices an island is one or more whole slices.

    Returns:
        The mesh.

    Raises:
        ValueError: If the devices, or the slices, do not divide into the islands.

    Example:
        >>> make_mesh(1, fsdp=1, devices=jax.devices()[:1]).axis_names
        ('islands', 'fsdp')
    """
    devices = list(jax.devices() if devices is None else devices)
    if num_islands < 1 or tensor < 1 or (fsdp is not None and fsdp < 1):
        raise ValueError(
            f"mesh {num_islands} x {fsdp} x {tensor} has an axis below 1; use 1 or more"
        )
    if fsdp is None:
        fsdp = len(devices) // (num_islands * tensor)
    if num_islands * fsdp * tensor != len(devices):
        raise ValueError(
            f"{len(devices)} devices do not form {num_islands} islands x {fsdp} x {tensor}; pass devices=... or another shape"
        )
    slices = len({getattr(d, "slice_index", None) for d in devices})
    shape, names = ((fsdp, tensor), ("fsdp", "tensor")) if tensor > 1 else ((fsdp,), ("fsdp",))
    if slices > 1:
        if num_islands > slices or slices % num_islands:
            raise ValueError(
                f"{slices} slices do not divide into {num_islands} islands; use one or more whole slices an island"
            )
        per_island = slices // num_islands
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, shape[0] // per_island, *shape[1:]),
            (num_islands, per_island, *(1 for _ in shape[1:])),
            devices,
        )
    else:
        grid = np.array(devices).reshape(num_islands, *shape)
    return Mesh(grid, (AXIS, *names))


def check_mesh(config: DiLoCoConfig, mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """Returns the mesh to trace with; without one, a mesh of one device that constrains nothing.

    Args:
        config: The algorithm.
        mesh: The user's mesh, or None.

    Returns:
        A mesh with an `islands` axis.

    Raises:
        ValueError: If the mesh has no `islands` axis, or that axis does not divide the islands.

    Example:
        >>> check_mesh(DiLoCoConfig(num_islands=3, sync_period=1), None).shape["islands"]
        1
    """
    if mesh is None:
        return AbstractMesh((1,), (AXIS,))
    if AXIS not in mesh.shape:
        raise ValueError(
            f"the mesh has axes {', '.join(mesh.axis_names)} but no {AXIS!r}; make it with diloco.sharding.make_mesh({config.num_islands})"
        )
    if config.num_islands % mesh.shape[AXIS]:
        raise ValueError(
            f"num_islands {config.num_islands} is not divisible by the mesh axis {AXIS!r} of length {mesh.shape[AXIS]}; use a mesh with {config.num_islands}"
        )
    return mesh


def island_sharding(shardings: Any) -> Any:
    """Prepends the island axis to a tree of shardings or partition specs of one island.

    Args:
        shardings: Pytree of `NamedSharding` or `PartitionSpec`.

    Returns:
        The same tree for leaves with the island axis in front.

    Example:
        >>> tuple(island_sharding(P("fsdp", None)))
        ('islands', 'fsdp', None)
    """

    def prepend(s):
        return P(AXIS, *s) if isinstance(s, P) else NamedSharding(s.mesh, P(AXIS, *s.spec))

    return jax.tree.map(prepend, shardings, is_leaf=lambda s: isinstance(s, (P, NamedSharding)))


def state_sharding(
    config: DiLoCoConfig,
    inner_state: Any,
    mesh: Mesh,
    *,
    specs: Any = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> DiLoCoState:
    """The sharding of every leaf of a `DiLoCoState`.

    Theta and the outer state lie within each island as its parameters do, and are the same on all islands.

    Args:
        config: The algorithm.
        inner_state: One island's state, arrays or `jax.ShapeDtypeStruct`s.
        mesh: A mesh with an `islands` axis.
        specs: Pytree of `PartitionSpec` like `inner_state`; None reads them from its leaves' own `NamedSharding`.
        params: Where the parameters are, as for `init`.
        outer_optimizer: As for `init`.

    Returns:
        A `DiLoCoState` of `NamedSharding`s.

    Example:
        >>> mesh = make_mesh(1, fsdp=1, devices=jax.devices()[:1])
        >>> state = {"params": jax.ShapeDtypeStruct((4, 2), "float32")}
        >>> config = DiLoCoConfig(num_islands=1, sync_period=2)
        >>> tuple(state_sharding(config, state, mesh, specs={"params": P("fsdp")}).outer_params.spec)
        ('fsdp',)
    """
    check_mesh(config, mesh)
    if specs is None:
        specs = jax.tree.map(_spec, inner_state)

    def on_mesh(tree: Any) -> Any:
        return jax.tree.map(
            lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda s: isinstance(s, P)
        )

    lens = params_lens(inner_state, params)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), lens.get(inner_state)
    )
    param_specs = lens.get(specs)
    optimizer = outer.outer_optimizer(config, outer_optimizer)
    flat = jax.tree.leaves(param_specs, is_leaf=lambda s: isinstance(s, P))
    labels = outer.mirror(optimizer, abstract)
    opt_specs = [flat[i] if i >= 0 else P() for i in labels]
    island_params = on_mesh(island_sharding(param_specs))
    return DiLoCoState(
        inner=on_mesh(island_sharding(specs)),
        outer_params=on_mesh(param_specs),
        outer_opt_state=on_mesh(
            jax.tree.unflatten(
                jax.tree.structure(jax.eval_shape(optimizer.init, abstract)), opt_specs
            )
        ),
        step=NamedSharding(mesh, P()),
        residual=island_params if config.error_feedback else None,
        skipped=NamedSharding(mesh, P(AXIS)),
    )


def _spec(x: Any) -> P:
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def split_batch(config: DiLoCoConfig, batch: Any, mesh: Mesh | None = None) -> Any:
    """Splits a global batch among the islands, island m taking the m-th run of examples.

    Args:
        config: The algorithm.
        batch: Pytree of arrays `[B, ...]`.
        mesh: Puts the result on the mesh, islands across `islands` and examples across `fsdp`; a batch that already lies
            in that order on the mesh is not moved between islands.

    Returns:
        Pytree of arrays `[M, B / M, ...]`.

    Raises:
        ValueError: If M does not divide B.

    Example:
        >>> split_batch(DiLoCoConfig(num_islands=2, sync_period=1), np.arange(4)).tolist()
        [[0, 1], [2, 3]]
    """
    m = config.num_islands

    def split(x):
        if x.ndim < 1 or x.shape[0] % m:
            size = x.shape[0] if x.ndim else 0
            raise ValueError(
                f"batch of {size} examples is not divisible by num_islands {m}; use {size // m * m or m} or {(size // m + 1) * m}"
            )
        x = x.reshape(m, x.shape[0] // m, *x.shape[1:])
        if mesh is None:
            return x
        sharding = NamedSharding(mesh, P(AXIS, "fsdp" if "fsdp" in mesh.shape else None))
        return (
            jax.lax.with_sharding_constraint(x, sharding)
            if isinstance(x, jax.core.Tracer)
            else jax.device_put(x, sharding)
        )

    return jax.tree.map(split, batch)
