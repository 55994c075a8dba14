"""The state of a run, and where the parameters are in the user's own state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class DiLoCoState(NamedTuple):
    """Everything a run needs to go on: no message is in flight between two steps.

    Attributes:
        inner: The user's state of every island; each leaf has the island axis `[M, ...]` in front.
        outer_params: Theta, float32, without the island axis.
        outer_opt_state: State of the outer optimizer over Theta; its scalars are kept once a fragment, `[P]`.
        step: t, completed inner steps, int32.
        residual: What error feedback still owes, params-like `[M, ...]` float32; None without it.
        skipped: int32 `[M]`, sends at which an island's pseudo-gradient was not finite.

    Example:
        >>> import diloco
        >>> config = diloco.DiLoCoConfig(num_islands=3, sync_period=4)
        >>> state = diloco.init(config, {"params": jnp.zeros(5)})
        >>> state.inner["params"].shape, state.outer_params.shape, int(state.step)
        ((3, 5), (5,), 0)
    """

    inner: Any
    outer_params: Any
    outer_opt_state: Any
    step: jax.Array
    residual: Any
    skipped: jax.Array


class ParamsLens(NamedTuple):
    """Where the trained parameters are in an inner state.

    Attributes:
        get: Inner state to its parameters, a pytree of floating-point arrays.
        set: `(inner state, parameters)` to the inner state with them replaced.

    Example:
        >>> lens = ParamsLens(get=lambda s: s[0], set=lambda s, p: (p, *s[1:]))
        >>> lens.set((1.0, "adam"), 2.0)
        (2.0, 'adam')
    """

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]


def params_lens(inner_state: Any, params: ParamsLens | None) -> ParamsLens:
    """Returns the lens that was given, else one for `.params` or `["params"]`.

    Args:
        inner_state: The user's state.
        params: A lens, or None to look for the parameters.

    Returns:
        The lens.

    Raises:
        ValueError: If there is neither a lens nor parameters in the two usual places.

    Example:
        >>> params_lens({"params": 1.0, "count": 0}, None).set({"params": 1.0, "count": 0}, 2.0)
        {'params': 2.0, 'count': 0}
    """
    if params is not None:
        return params
    if isinstance(inner_state, Mapping) and "params" in inner_state:
        return ParamsLens(lambda s: s["params"], lambda s, p: type(s)({**s, "params": p}))
    if hasattr(inner_state, "params"):
        return ParamsLens(lambda s: s.params, _replace_params)
    raise ValueError(
        f"the inner state, a {type(inner_state).__name__}, has its parameters neither under .params nor under "
        '["params"]; pass params=ParamsLens(get, set)'
    )


def _replace_params(state: Any, params: Any) -> Any:
    if hasattr(state, "_replace"):
        return state._replace(params=params)
    if hasattr(state, "replace"):
        return state.replace(params=params)
    return dataclasses.replace(state, params=params)


def as_outer(params: Any) -> Any:
    """Copies parameters to float32, the precision of Theta whatever the inner one is.

    Raises:
        TypeError: If a leaf is not a real floating-point array.

    Example:
        >>> as_outer({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
        dtype('float32')
    """

    def convert(path, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"parameter {name} is {x.dtype}, not floating point; leave it out of the parameters with ParamsLens(get, set)"
            )
        return jnp.array(x, jnp.float32)

    return jax.tree_util.tree_map_with_path(convert, params)


def check_residual(
    state: DiLoCoState,
    error_feedback: bool,
    name: str = "the state",
    remedy: str = "start the state with diloco.init of the same configuration",
) -> None:
    """Checks that a state has residuals if and only if error feedback is on.

    Args:
        state: The state, concrete or abstract.
        error_feedback: As in the configuration.
        name: What the state is, for the message.
        remedy: How the message ends.

    Raises:
        ValueError: If it has residuals without error feedback, or none with it.

    Example:
        >>> import diloco
        >>> state = diloco.init(diloco.DiLoCoConfig(num_islands=2, sync_period=4), {"params": jnp.ones(3)})
        >>> check_residual(state, True)
        Traceback (most recent call last):
        ValueError: the state has no residual, but error_feedback is True; start the state with diloco.init of the same configuration
    """
    if (state.residual is not None) != error_feedback:
        has = "no residual" if state.residual is None else "a residual"
        raise ValueError(f"{name} has {has}, but error_feedback is {error_feedback}; {remedy}")


def check_islands(
    tree: Any,
    num_islands: int,
    name: str = "state.inner",
    remedy: str = "start the state with diloco.init of the same configuration",
) -> None:
    """Checks that every leaf has the island axis in front.

    Args:
        tree: Any pytree, leaves `[M, ...]`.
        num_islands: M.
        name: What the tree is, for the message.
        remedy: How the message ends.

    Raises:
        ValueError: If a leaf has not; the message names it.

    Example:
        >>> check_islands({"w": jnp.ones((2, 5))}, 3)
        Traceback (most recent call last):
        ValueError: state.inner/w has shape (2, 5), but its first axis must be num_islands 3; ...
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != num_islands:
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            where = f"{name}/{key}" if key else name
            raise ValueError(
                f"{where} has shape {shape}, but its first axis must be num_islands {num_islands}; {remedy}"
            )
