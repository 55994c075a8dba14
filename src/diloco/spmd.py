"""One program for all islands: wraps a user's train step into a DiLoCo train step, with DrJAX."""

from collections.abc import Callable
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from diloco import cuts, exchange, fragments, outer
from diloco import state as states
from diloco.config import DiLoCoConfig
from diloco.schedule import schedule
from diloco.sharding import AXIS, check_mesh, state_sharding
from diloco.state import DiLoCoState, ParamsLens


InnerStep = Callable[[Any, Any], tuple[Any, Any]]


def init(
    config: DiLoCoConfig,
    inner_state: Any,
    *,
    mesh: Mesh | None = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> DiLoCoState:
    """Starts a run: every island gets the same inner state, Theta is its parameters in float32.

    Random keys (typed, `jax.random.key`) are the exception: island 0 keeps them and island m folds m in, so that islands draw
    different dropout masks.

    Args:
        config: The algorithm.
        inner_state: One island's state, without the island axis.
        mesh: A mesh with an `islands` axis; leaves with a `NamedSharding` keep their spec within each island.
        params: Where the parameters are, if neither under `.params` nor `["params"]`.
        outer_optimizer: An own outer optimizer in place of Nesterov SGD.

    Returns:
        The state at step 0.

    Raises:
        ValueError: If there are no parameters, a fragment is empty, the mesh does not fit, or the outer optimizer's state
            does not mirror the parameters.
        TypeError: If a parameter is not floating point.

    Example:
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4)
        >>> state = init(config, {"params": {"w": jnp.ones(3)}})
        >>> state.inner["params"]["w"].shape, state.outer_params["w"].shape
        ((2, 3), (3,))

    References:
        :cite:t:`douillard2023diloco` (Algorithm 1, lines 1 to 3).
    """
    x = _exchange(config, inner_state, mesh, params, outer_optimizer)

    def start(inner_state):
        # A copy, so that donating the islands' parameters never takes Theta with them.
        theta = states.as_outer(x.lens.get(inner_state))
        inner = jax.tree.map(lambda leaf: _to_islands(config, leaf), inner_state)
        residual = None
        if config.error_feedback:
            residual = jax.tree.map(
                lambda p: jnp.zeros((config.num_islands, *p.shape), jnp.float32), theta
            )
        return DiLoCoState(
            inner=inner,
            outer_params=theta,
            outer_opt_state=outer.init(x.optimizer, theta, config.num_fragments),
            step=jnp.zeros((), jnp.int32),
            residual=residual,
            skipped=jnp.zeros((config.num_islands,), jnp.int32),
        )

    if mesh is None:
        return jax.jit(start)(inner_state)
    shardings = state_sharding(
        config, inner_state, mesh, params=params, outer_optimizer=outer_optimizer
    )
    # Leaves that lie elsewhere, such as scalars made on the default device, move to the mesh.
    on_mesh = jax.tree.map(
        lambda leaf, s: (
            jax.device_put(leaf, NamedSharding(mesh, s.spec)) if _concrete(leaf) else leaf
        ),
        inner_state,
        jax.tree.map(_drop_island_axis, shardings.inner),
    )
    return jax.jit(start, out_shardings=shardings)(on_mesh)


def build_train_step(
    config: DiLoCoConfig,
    inner_step: InnerStep,
    *,
    mesh: Mesh | None = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> Callable[[DiLoCoState, Any], tuple[DiLoCoState, Any]]:
    """Wraps one island's train step into the DiLoCo train step of all islands.

    After the inner step the fragment that is due is sent, :eq:`eq-send`, and the one sent V steps ago is applied,
    :eq:`eq-apply`. Nothing crosses islands on a step without a send.

    Args:
        config: The algorithm.
        inner_step: `(inner_state, batch) -> (inner_state, metrics)` of one island.
        mesh: A mesh with an `islands` axis, the one given to `init`; None for one device.
        params: As given to `init`.
        outer_optimizer: As given to `init`.

    Returns:
        `train_step(state, batch) -> (state, metrics)`, a pure function for `jax.jit(..., donate_argnums=0)` or `jax.lax.scan`.
        Batch leaves are `[M, ...]` (see `diloco.sharding.split_batch`), and so are those of the metrics: nothing is
        reduced over islands. On a mesh `jax.jit(..., out_shardings=(state_sharding(...), None))` keeps every leaf where it
        is. It raises `ValueError` when traced with a batch or state of another number of islands, or
        if `inner_step` changes the structure, a shape or a type of the state.

    Raises:
        ValueError: If the mesh has no `islands` axis, or one that does not divide M.

    Example:
        >>> def inner_step(state, batch):
        ...     loss, grad = jax.value_and_grad(lambda p: jnp.mean((p - batch) ** 2))(state["params"])
        ...     return {"params": state["params"] - 0.1 * grad}, {"loss": loss}
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4)
        >>> train_step = jax.jit(build_train_step(config, inner_step))
        >>> state, metrics = train_step(init(config, {"params": jnp.zeros(())}), jnp.ones((2, 8)))
        >>> metrics["loss"].tolist(), int(state.step)
        ([1.0, 1.0], 1)

    References:
        :cite:t:`douillard2025streaming` (Algorithm 2); :cite:t:`rush2024drjax` for `map_fn` and `reduce_mean`.
    """
    check_mesh(config, mesh)
    table = np.array(schedule(config).send_table(), np.int32)

    @jax.jit  # so that it also runs outside of the caller's own jit
    @drjax.program(placements={AXIS: config.num_islands})
    def train_step(state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        states.check_islands(state.inner, config.num_islands)
        remedy = "split it with diloco.sharding.split_batch"
        states.check_islands(batch, config.num_islands, "batch", remedy)
        x = _exchange(config, _one_island(state.inner), mesh, params, outer_optimizer)
        _check_state(x, state)
        inner, metrics = drjax.map_fn(inner_step, (state.inner, batch), mesh=x.mesh)
        _check_same(state.inner, inner)
        t = state.step + 1
        state = state._replace(inner=inner, step=t)
        state = exchange.send(x, state, cuts.row(table, t % config.sync_period))
        sent = t - config.overlap_steps  # signed: before the first send it is at most 0
        landed = jnp.where(
            sent > 0, cuts.row(table, sent % config.sync_period), config.num_fragments
        )
        return exchange.apply(x, state, landed), metrics

    return train_step


def flush(
    config: DiLoCoConfig,
    state: DiLoCoState,
    *,
    mesh: Mesh | None = None,
    params: ParamsLens | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> DiLoCoState:
    """Sends and applies all fragments now, so that Theta holds all the work: for the end of a run.

    Args:
        config: The algorithm.
        state: The state after any step.
        mesh: As given to `init`.
        params: As given to `init`.
        outer_optimizer: As given to `init`.

    Returns:
        The state with every fragment sent, then applied; `step` stays.

    Raises:
        ValueError: If the state was started with another number of islands or fragments, or other error feedback.

    Example:
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4, outer_learning_rate=1.0, outer_momentum=0.0)
        >>> state = init(config, {"params": jnp.zeros(())})
        >>> state = state._replace(inner={"params": jnp.array([1.0, 3.0])})
        >>> float(flush(config, state).outer_params)
        2.0
    """

    @drjax.program(placements={AXIS: config.num_islands})
    def run(state):
        states.check_islands(state.inner, config.num_islands)
        x = _exchange(config, _one_island(state.inner), mesh, params, outer_optimizer)
        _check_state(x, state)
        state = jax.lax.fori_loop(
            0, config.num_fragments, lambda p, s: exchange.send(x, s, p), state
        )
        return jax.lax.fori_loop(
            0, config.num_fragments, lambda p, s: exchange.apply(x, s, p), state
        )

    return jax.jit(run)(state)


def _exchange(config, inner_state, mesh, params, outer_optimizer) -> exchange.Exchange:
    lens = states.params_lens(inner_state, params)
    own = lens.get(inner_state)
    theta = jax.eval_shape(states.as_outer, own)
    optimizer = outer.outer_optimizer(config, outer_optimizer)
    return exchange.Exchange(
        config=config,
        mesh=check_mesh(config, mesh),
        partition=fragments.partition(own, config),
        lens=lens,
        optimizer=optimizer,
        labels=outer.mirror(optimizer, theta),
    )


def _to_islands(config: DiLoCoConfig, leaf: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    copies = jnp.broadcast_to(jnp.expand_dims(leaf, 0), (config.num_islands, *leaf.shape))
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return copies
    fold = jnp.vectorize(jax.random.fold_in)
    islands = jnp.arange(config.num_islands).reshape(-1, *(1 for _ in leaf.shape))
    folded = fold(copies, jnp.broadcast_to(islands, copies.shape))
    return jnp.where(islands == 0, copies, folded)


def _one_island(inner: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), inner)


def _concrete(leaf: Any) -> bool:
    return not isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _drop_island_axis(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, type(sharding.spec)(*sharding.spec[1:]))


def _check_state(x: exchange.Exchange, state: DiLoCoState) -> None:
    """Refuses a state that was started with another number of fragments, or other error feedback."""
    config, remedy = x.config, "start the state with diloco.init of the same configuration"
    for label, leaf in zip(x.labels, jax.tree.leaves(state.outer_opt_state), strict=True):
        if label < 0 and leaf.shape != (config.num_fragments,):
            raise ValueError(
                f"the outer optimizer has counts of shape {leaf.shape}, but num_fragments is {config.num_fragments}; {remedy}"
            )
    states.check_residual(state, config.error_feedback)


def _check_same(before: Any, after: Any) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"inner_step returned a state of structure {jax.tree.structure(after)}, not {jax.tree.structure(before)}; return the state it was given"
        )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if a.shape != b.shape or a.dtype != b.dtype:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"inner_step turned {name} from {a.dtype}{list(a.shape[1:])} into {b.dtype}{list(b.shape[1:])}; keep shape and type"
            )
