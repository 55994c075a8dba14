"""Reads and writes one fragment's part of a leaf inside a compiled step.

The shape of a part is static; which part is meant is data. So all fragments of one shape share one program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Cut(NamedTuple):
    """The shape of one leaf's part in a fragment: the static half of a cut, its indices being data.

    The cut axis, of length n, is viewed as `[outer, n / outer]`, and `count` indices are taken along the second half.

    Attributes:
        leaf: Position of the leaf in the flattened tree.
        axis: The axis that is cut, or None for the whole leaf.
        outer: Rows of the view.
        count: Indices taken along the second axis of the view.
        contiguous: Whether the indices follow one another.
    """

    leaf: int
    axis: int | None
    outer: int
    count: int
    contiguous: bool


class Group(NamedTuple):
    """Fragments with the same cuts.

    Attributes:
        cuts: The cuts they share.
        members: Their numbers.
        indices: For each cut an int32 table, `[members]` first indices if it is contiguous, else
            `[members, count]`.
    """

    cuts: tuple[Cut, ...]
    members: tuple[int, ...]
    indices: tuple[np.ndarray, ...]


def cut_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Returns the shape of a leaf's part in a fragment.

    Args:
        shape: The leaf's own shape.
        cut: Its cut.

    Returns:
        The shape that `take` returns.

    Example:
        >>> cut_shape((6, 4), Cut(0, 0, 3, 1, True))
        (3, 4)
    """
    if cut.axis is None:
        return shape
    return (*shape[: cut.axis], cut.outer * cut.count, *shape[cut.axis + 1 :])


def look_up(group: Group, position: jax.Array) -> list[jax.Array]:
    """Returns the indices of each cut for one member of a group; cuts with the same table share one lookup.

    Args:
        group: The group.
        position: Which of its members, int32.

    Returns:
        For each cut its first index, int32, if it is contiguous, else all of them, int32 `[count]`.

    Example:
        >>> cut = Cut(0, 0, 1, 1, True)
        >>> look_up(Group((cut,), (1, 2), (np.array([0, 5], np.int32),)), jnp.int32(1))[0].tolist()
        5
    """
    found: dict[tuple[int, bytes], jax.Array] = {}
    keys = [(table.ndim, table.tobytes()) for table in group.indices]
    for key, table in zip(keys, group.indices, strict=True):
        if key not in found:
            found[key] = row(table, position)
    return [found[key] for key in keys]


def row(table: np.ndarray, i: jax.Array) -> jax.Array:
    """Returns `table[i]` in one operation of the compiled program.

    Args:
        table: A constant table of whole numbers, `[n, ...]`.
        i: Its row, int32, 0 to n - 1.

    Returns:
        int32 `[...]`.

    Example:
        >>> row(np.array([[1, 2], [3, 4]]), jnp.int32(1)).tolist()
        [3, 4]
    """
    return jax.lax.dynamic_index_in_dim(
        jnp.asarray(table, jnp.int32), i, keepdims=False, allow_negative_indices=False
    )


def take(x: jax.Array, cut: Cut, indices: jax.Array, *, lead: int = 0) -> jax.Array:
    """Reads a cut.

    Args:
        x: The leaf, with `lead` extra axes in front.
        cut: The static half.
        indices: The data half, from `look_up`.
        lead: 1 for a leaf with the island axis, else 0.

    Returns:
        The part, the cut axis having length `outer * count`.

    Example:
        >>> take(jnp.arange(6), Cut(0, 0, 3, 1, True), jnp.int32(1)).tolist()  # every second, from 1
        [1, 3, 5]
    """
    if cut.axis is None:
        return x
    view, axis = _view(x, cut, lead)
    if cut.contiguous:
        part = jax.lax.dynamic_slice_in_dim(
            view, indices, cut.count, axis, allow_negative_indices=False
        )
    else:
        part = jnp.take(
            view, indices, axis, unique_indices=True, indices_are_sorted=True, mode="clip"
        )
    return part.reshape(x.shape[:lead] + cut_shape(x.shape[lead:], cut))


def put(x: jax.Array, cut: Cut, indices: jax.Array, part: jax.Array, *, lead: int = 0) -> jax.Array:
    """Writes a cut: the leaf with `take(x, cut, indices)` replaced by `part`.

    Args:
        x: The leaf, with `lead` extra axes in front.
        cut: The static half.
        indices: The data half, from `look_up`.
        part: What `take` returns for the same cut.
        lead: 1 for a leaf with the island axis, else 0.

    Returns:
        The new leaf.

    Example:
        >>> put(jnp.zeros(4), Cut(0, 0, 1, 2, True), jnp.int32(1), jnp.ones(2)).tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    if cut.axis is None:
        return part
    view, axis = _view(x, cut, lead)
    part = part.reshape(*view.shape[:axis], cut.count, *view.shape[axis + 1 :])
    if cut.contiguous:
        view = jax.lax.dynamic_update_slice_in_dim(
            view, part, indices, axis, allow_negative_indices=False
        )
    else:
        where = (slice(None),) * axis + (indices,)
        view = view.at[where].set(
            part, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
        )
    return view.reshape(x.shape)


def _view(x: jax.Array, cut: Cut, lead: int) -> tuple[jax.Array, int]:
    """The leaf with its cut axis viewed as `[outer, n / outer]`, and the axis along which indices are taken."""
    assert cut.axis is not None
    axis = cut.axis + lead
    if cut.outer == 1:
        return x, axis
    shape = (*x.shape[:axis], cut.outer, x.shape[axis] // cut.outer, *x.shape[axis + 1 :])
    return x.reshape(shape), axis + 1
