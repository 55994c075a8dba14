"""Which layers and vocabulary rows go to which fragment.

A part is `{leaf: (axis, outer, indices)}`: the indices of that axis, viewed as `[outer, n / outer]`, that a fragment
holds; indices None means the whole leaf.
"""

import math

from diloco.layers import Leaf


Part = dict[int, tuple[int, int, tuple[int, ...] | None]]

_MOST_ROWS = (
    128  # rows of the vocabulary's view: a cut stays within each shard if their number divides this
)
_UNEVEN = 0.02  # of the mean: how much larger one fragment may get so that the others are alike


def assign(
    leaves: list[Leaf], numbers: dict[tuple[str, int], int], num_fragments: int, pattern: str
) -> tuple[list[tuple[int, ...]], list[Part]]:
    """Deals the layers, and for `balanced` the vocabulary, to two or more fragments.

    Args:
        leaves: The leaves of the tree.
        numbers: Layer number of each `(stack, layer)`.
        num_fragments: P, at least 2.
        pattern: `"strided"`, `"sequential"` or `"balanced"`.

    Returns:
        For each fragment its layers, and its part.

    Example:
        >>> leaves = [Leaf("embed", (8, 2), None, None, (1, 1)), Leaf("layers", (3, 2), "layers", None, (1, 1))]
        >>> assign(leaves, {("layers", l): l for l in range(3)}, 3, "strided")[0]
        [(), (0, 2), (1,)]
    """
    num_layers = len(numbers)
    if pattern == "strided":
        owner = [1 + l % (num_fragments - 1) for l in range(num_layers)]
    elif pattern == "sequential":
        owner = [1 + l * (num_fragments - 1) // num_layers for l in range(num_layers)]
    else:
        owner = _emptiest(_layer_sizes(leaves, numbers), num_fragments)
    layers = [tuple(l for l in range(num_layers) if owner[l] == p) for p in range(num_fragments)]
    parts: list[Part] = [{} for _ in range(num_fragments)]
    for i, leaf in enumerate(leaves):
        if leaf.stack is None:
            parts[0][i] = (0, 1, None)
        elif leaf.layer is not None:
            parts[owner[numbers[leaf.stack, leaf.layer]]][i] = (0, 1, None)
        else:
            for p in range(num_fragments):
                rows = tuple(r for r in range(leaf.shape[0]) if owner[numbers[leaf.stack, r]] == p)
                if rows:
                    parts[p][i] = (0, 1, rows)
    if pattern == "balanced":
        _spread_vocabulary(leaves, parts)
    return layers, parts


def _layer_sizes(leaves: list[Leaf], numbers: dict[tuple[str, int], int]) -> list[int]:
    sizes = [0] * len(numbers)
    for leaf in leaves:
        if leaf.stack is None:
            continue
        if leaf.layer is not None:
            sizes[numbers[leaf.stack, leaf.layer]] += math.prod(leaf.shape)
        else:
            for row in range(leaf.shape[0]):
                sizes[numbers[leaf.stack, row]] += math.prod(leaf.shape[1:])
    return sizes


def _emptiest(sizes: list[int], num_fragments: int) -> list[int]:
    """Deals the largest layer first, each to the emptiest fragment; fragment 0, which has the small leaves, comes last."""
    load = [0] * num_fragments
    owner = [0] * len(sizes)
    for l in sorted(range(len(sizes)), key=lambda l: -sizes[l]):
        p = min(range(num_fragments), key=lambda p: (load[p], p == 0, p))
        owner[l] = p
        load[p] += sizes[l]
    return owner


def _spread_vocabulary(leaves: list[Leaf], parts: list[Part]) -> None:
    """Fills the fragments up to one level with slices of the large leaves outside the layers."""
    mean = sum(math.prod(leaf.shape) for leaf in leaves) / len(parts)
    size = [_part_size(leaves, part) for part in parts]
    cut = [
        i
        for i in parts[0]
        if leaves[i].stack is None and len(leaves[i].shape) >= 2 and 0 not in leaves[i].shape
    ]
    size[0] -= sum(math.prod(leaves[i].shape) for i in cut)
    for done, i in enumerate(cut):
        leaf = leaves[i]
        axis = max(range(len(leaf.shape)), key=lambda a: leaf.shape[a])
        outer = _view_rows(leaf.shape[axis], len(parts))
        n = leaf.shape[axis] // outer
        unit = math.prod(leaf.shape) // n
        # Each leaf fills a proportional share, so that fragments alike so far stay alike.
        remaining = sum(math.prod(leaves[j].shape) for j in cut[done:])
        want = _fill(size, remaining)
        share = math.prod(leaf.shape) / remaining
        counts = _round([w * share / unit for w in want], n, int(_UNEVEN * mean / unit))
        del parts[0][i]
        start = 0
        for p, count in enumerate(counts):
            if count:
                parts[p][i] = (axis, outer, tuple(range(start, start + count)))
                size[p] += count * unit
            start += count


def _view_rows(n: int, num_fragments: int) -> int:
    """Rows of the view `[rows, n / rows]` of the vocabulary: a power of two that leaves at least 8 columns a fragment."""
    rows = 1
    while rows < _MOST_ROWS and n % (2 * rows) == 0 and n // (2 * rows) >= 8 * num_fragments:
        rows *= 2
    return rows


def _part_size(leaves: list[Leaf], part: Part) -> int:
    total = 0
    for i, (axis, outer, indices) in part.items():
        shape = leaves[i].shape
        whole = math.prod(shape)
        total += whole if indices is None else whole // shape[axis] * outer * len(indices)
    return total


def _fill(size: list[int], amount: float) -> list[float]:
    """Water-filling: how much of `amount` goes to each fragment so that the lowest levels rise together."""
    low = sorted(size)
    level, used = float(low[0]), 0.0
    for k in range(1, len(low) + 1):
        step = (low[k] - level) * k if k < len(low) else float("inf")
        if used + step >= amount:
            level += (amount - used) / k
            break
        used += step
        level = low[k]
    return [max(0.0, level - s) for s in size]


def _round(want: list[float], total: int, most: int) -> list[int]:
    """Whole numbers near `want` with the given sum.

    Equal where `want` is equal, so that these fragments share a branch of the program: what is left over goes to the one
    with the fewest like it. If it is more than `most`, each gets one more in turn instead.
    """
    counts = [int(w + 1e-6) for w in want]  # equal wants differ by rounding errors
    rest = total - sum(counts)
    if rest <= most:
        alike = [sum(abs(v - w) < 1e-6 for v in want) for w in want]
        fewest = min((p for p in range(len(want)) if want[p] > 0), key=lambda p: (alike[p], p))
        counts[fewest] += rest
        return counts
    order = sorted(range(len(want)), key=lambda p: (counts[p] - want[p], p))
    for k in range(rest):
        counts[order[k % len(order)]] += 1
    return counts
