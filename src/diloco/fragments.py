"""Cuts a parameter tree into fragments.

Fragments that are alike in shape form a group. A group is one branch of the compiled step; which of its members is
meant is data (indices along the cut axis), so the program does not grow with the number of fragments.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from diloco import assignment, wire
from diloco.config import DiLoCoConfig
from diloco.cuts import Cut, Group, cut_shape
from diloco.layers import Leaf, find_leaves, layer_numbers


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
        >>> import jax.numpy as jnp
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
        shapes = [cut_shape(leaves[c.leaf].shape, c) for c in cuts]
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
