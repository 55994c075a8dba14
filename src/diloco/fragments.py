"""Cuts a parameter tree into fragments, and reads and writes one fragment in a compiled step.

Fragments that are alike in shape form a group. A group is one branch of the compiled step; which of its members is
meant is data (indices along the cut axis), so the program does not grow with the number of fragments.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import assignment, wire
from diloco.config import DiLoCoConfig
from diloco.layers import Leaf, find_leaves, layer_numbers


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


@dataclasses.dataclass(frozen=True)
class Fragment:
    """One fragment.

    Attributes:
        number: p.
        leaves: Names of the leaves it has a part of.
        layers: Layers it holds, numbered over all stacks.
        num_parameters: Parameters.
        wire_bytes: Bytes that one island sends for it, scales and padding included.
        cuts: Its part of each leaf.
        indices: For each cut, the indices along the view.
    """

    number: int
    leaves: tuple[str, ...]
    layers: tuple[int, ...]
    num_parameters: int
    wire_bytes: int
    cuts: tuple[Cut, ...]
    indices: tuple[tuple[int, ...], ...]


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


@dataclasses.dataclass(frozen=True)
class Partition:
    """A parameter tree cut into fragments; prints as the report.

    Attributes:
        fragments: The fragments, p = 0 .. P - 1.
        groups: The branches of the compiled step.
    """

    fragments: tuple[Fragment, ...]
    groups: tuple[Group, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole tree."""
        return sum(f.num_parameters for f in self.fragments)

    @property
    def largest_over_mean(self) -> float:
        """Parameters of the largest fragment over the mean: the peak of the traffic over its average."""
        return (
            max(f.num_parameters for f in self.fragments)
            * len(self.fragments)
            / self.num_parameters
        )

    def rows(self) -> list[tuple[int, str, str, int, int, float]]:
        """The report as data: fragment, layers, leaves, parameters, wire bytes, share of the mean."""
        mean = self.num_parameters / len(self.fragments)
        return [
            (
                f.number,
                _ranges(f.layers),
                _names(f.leaves),
                f.num_parameters,
                f.wire_bytes,
                f.num_parameters / mean,
            )
            for f in self.fragments
        ]

    def table(self) -> str:
        """The report as a Markdown table."""
        lines = [
            "| fragment | layers | leaves | parameters | wire bytes | over mean |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {p} | {la} | {le} | {n:,} | {b:,} | {r:.3f} |" for p, la, le, n, b, r in self.rows()
        ]
        return "\n".join(lines)

    def __str__(self):
        head = f"{len(self.fragments)} fragments of {self.num_parameters:,} parameters, largest {self.largest_over_mean:.3f}x the mean"
        return f"{head}\n{self.table()}"


def partition(params: Any, config: DiLoCoConfig) -> Partition:
    """Cuts a parameter tree into the configuration's fragments.

    With one fragment it holds everything. Otherwise layers are found by name (`config.layer_keys`; stacked along axis 0,
    or one subtree a layer, or several stacks) and dealt to fragments, :eq:`eq-strided` and :eq:`eq-sequential`; all
    other leaves are fragment 0. `balanced` deals whole layers over all fragments, the largest first to the emptiest,
    and fills up with slices of the embedding and head along their longest axis (the vocabulary).

    Args:
        params: Parameters without the island axis; arrays or `jax.ShapeDtypeStruct`s.
        config: The algorithm.

    Returns:
        The partition.

    Raises:
        ValueError: If no layers are found, a fragment would be empty, a stack has no common layer axis, or the axis to be
            cut is sharded in a way that a cut would move data between chips.

    Example:
        >>> params = {"embed": jnp.zeros((16, 4)), "layers": jnp.zeros((6, 4))}
        >>> config = DiLoCoConfig(num_islands=2, sync_period=8, num_fragments=4)
        >>> [f.layers for f in partition(params, config).fragments]
        [(), (0, 3), (1, 4), (2, 5)]

    References:
        :cite:t:`douillard2025streaming` (Section 2.2, Figure 2) draws both patterns; the place of the embedding is ours.
    """
    leaves = find_leaves(params, config.layer_keys)
    if not leaves or all(math.prod(leaf.shape) == 0 for leaf in leaves):
        raise ValueError(
            "the parameter tree has no parameters; pass ParamsLens(get, set) if they are elsewhere in the state"
        )
    num_fragments = config.num_fragments
    if num_fragments == 1:
        parts = [{i: (0, 1, None) for i in range(len(leaves))}]
        layers: list[tuple[int, ...]] = [tuple(sorted(layer_numbers(leaves).values()))]
    else:
        numbers = layer_numbers(leaves)
        if not numbers:
            shown = ", ".join(leaf.name for leaf in leaves[:4])
            raise ValueError(
                f"no layers found in {len(leaves)} leaves ({shown}, ...) for keys {', '.join(config.layer_keys)}; "
                "name the layer stack in DiLoCoConfig(layer_keys=...) or use num_fragments=1"
            )
        layers, parts = assignment.assign(leaves, numbers, num_fragments, config.fragment_pattern)
    codec = wire.codec(config.wire_format)
    fragments = []
    for number, (part, own_layers) in enumerate(zip(parts, layers, strict=True)):
        if not any(math.prod(leaves[i].shape) for i in part):
            raise ValueError(
                f"fragment {number} of {num_fragments} is empty with {len(layer_numbers(leaves))} layers and pattern "
                f"{config.fragment_pattern!r}; use fewer fragments"
            )
        cuts, indices = zip(*(_cut(i, leaves[i], *part[i]) for i in sorted(part)), strict=True)
        shapes = [_cut_shape(leaves[c.leaf].shape, c) for c in cuts]
        fragments.append(
            Fragment(
                number=number,
                leaves=tuple(leaves[c.leaf].name for c in cuts),
                layers=own_layers,
                num_parameters=sum(math.prod(s) for s in shapes),
                wire_bytes=sum(codec.payload_bytes(s) for s in shapes),
                cuts=cuts,
                indices=indices,
            )
        )
    by_cuts: dict[tuple[Cut, ...], list[Fragment]] = {}
    for f in fragments:
        by_cuts.setdefault(f.cuts, []).append(f)
    groups = []
    for cuts, members in by_cuts.items():
        tables = [np.array([f.indices[k] for f in members], np.int32) for k in range(len(cuts))]
        tables = [t[:, 0] if c.contiguous else t for c, t in zip(cuts, tables, strict=True)]
        groups.append(Group(cuts, tuple(f.number for f in members), tuple(tables)))
    return Partition(tuple(fragments), tuple(groups))


def _cut(
    i: int, leaf: Leaf, axis: int, outer: int, indices: tuple[int, ...] | None
) -> tuple[Cut, tuple[int, ...]]:
    """The cut of leaf i that takes `indices` of its axis viewed as `[outer, n / outer]`; None takes the whole leaf."""
    if indices is None:
        return Cut(i, None, 1, 1, True), (0,)
    n = leaf.shape[axis]
    if outer % leaf.sharded[axis]:
        raise ValueError(
            f"{leaf.name} is sharded {leaf.sharded[axis]} ways along axis {axis}, along which it is cut into fragments; "
            "shard another axis, or a cut would move parameters between chips"
        )
    count = len(indices)
    if count * outer == n:
        return Cut(i, None, 1, 1, True), (0,)
    steps = np.diff(indices)
    if (
        outer == 1
        and count > 1
        and steps[0] > 1
        and np.all(steps == steps[0])
        and count * steps[0] == n
    ):
        return Cut(i, axis, count, 1, True), (
            indices[0],
        )  # every k-th of n: one column of the view [n / k, k]
    return Cut(i, axis, outer, count, bool(np.all(steps == 1))), tuple(indices)


def _cut_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
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
    """Returns `table[i]` for a constant table and an index that is never negative, in one operation."""
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
    return part.reshape(x.shape[:lead] + _cut_shape(x.shape[lead:], cut))


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


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-3, 7`: consecutive numbers joined."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs) or "none"


def _names(names: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
