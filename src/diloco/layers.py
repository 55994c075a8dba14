"""Finds the layers in a parameter tree by the names of its keys."""

import re
from typing import Any, NamedTuple

import jax


class Leaf(NamedTuple):
    """One leaf of a parameter tree, without the island axis.

    Attributes:
        name: Its path, such as `layers/attention/wq`.
        shape: Its shape.
        stack: Name of the stack it belongs to, or None for a leaf outside the layers.
        layer: Layer within the stack if the leaf belongs to one layer, None if it is stacked along axis 0.
        sharded: Number of pieces each axis is sharded into.
    """

    name: str
    shape: tuple[int, ...]
    stack: str | None
    layer: int | None
    sharded: tuple[int, ...]


def find_leaves(params: Any, layer_keys: tuple[str, ...]) -> list[Leaf]:
    """Lists the leaves of a tree in its own order, each with its stack and layer.

    A key is a layer key if it equals an entry of `layer_keys` or ends with `_` and one (`dense_layers`). Below it, a
    number (`layers/3`, a list), or a number behind the name or its singular (`layers_3`, `block_3`), names one
    layer; without a number the leaf is stacked along axis 0.

    Args:
        params: Pytree of arrays or `jax.ShapeDtypeStruct`s.
        layer_keys: Names that hold layers.

    Returns:
        One entry a leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> [(leaf.name, leaf.stack, leaf.layer) for leaf in find_leaves({"head": jnp.ones(2), "layers_1": jnp.ones(2)}, ("layers",))]
        [('head', None, None), ('layers_1', 'layers', 1)]
    """
    words = "|".join(
        sorted({re.escape(k) for key in layer_keys for k in (key, key.removesuffix("s"))})
    )
    numbered = re.compile(rf"((?:.*_)?(?:{words}))[_.]?(\d+)")
    stacked = re.compile(rf"(?:.*_)?(?:{'|'.join(map(re.escape, layer_keys))})")
    leaves = []
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        stack, layer = None, None
        for i, key in enumerate(keys):
            prefix = "/".join(keys[:i])
            if match := numbered.fullmatch(key):
                stem = match[1] if match[1].endswith("s") else match[1] + "s"
                stack, layer = f"{prefix}/{stem}".lstrip("/"), int(match[2])
                break
            if stacked.fullmatch(key):
                stack = f"{prefix}/{key}".lstrip("/")
                layer = int(keys[i + 1]) if i + 1 < len(keys) and keys[i + 1].isdigit() else None
                break
        leaves.append(
            Leaf("/".join(keys) or "params", tuple(value.shape), stack, layer, _sharded(value))
        )
    return leaves


def layer_numbers(leaves: list[Leaf]) -> dict[tuple[str, int], int]:
    """Numbers the layers of all stacks 0 .. L - 1, stack after stack in tree order.

    Args:
        leaves: What `find_leaves` returns.

    Returns:
        `(stack, layer within it)` to layer.

    Raises:
        ValueError: If leaves of one stack have no axis 0, or disagree in its length.
    """
    sizes: dict[str, dict[int, list[str]]] = {}
    seen: dict[str, set[int]] = {}
    for leaf in leaves:
        if leaf.stack is None:
            continue
        layers = seen.setdefault(leaf.stack, set())
        if leaf.layer is not None:
            layers.add(leaf.layer)
        elif not leaf.shape:
            raise ValueError(
                f"{leaf.name} is a scalar below the layer key of {leaf.stack!r}; stack it over the layers on axis 0"
            )
        else:
            layers.update(range(leaf.shape[0]))
            sizes.setdefault(leaf.stack, {}).setdefault(leaf.shape[0], []).append(leaf.name)
    for stack, by_size in sizes.items():
        if len(by_size) > 1:
            parts = "; ".join(
                f"{n}: {', '.join(names[:3])}" for n, names in sorted(by_size.items())
            )
            raise ValueError(
                f"leaves of {stack!r} disagree in the length of the layer axis 0 ({parts}); move the odd ones out of it"
            )
    numbers: dict[tuple[str, int], int] = {}
    for stack, layers in seen.items():
        for layer in sorted(layers):
            numbers[stack, layer] = len(numbers)
    return numbers


def _sharded(value: Any) -> tuple[int, ...]:
    sharding = getattr(value, "sharding", None)
    if sharding is None or not value.shape:
        return (1,) * len(value.shape)
    local = sharding.shard_shape(tuple(value.shape))
    return tuple(-(-n // k) if k else 1 for n, k in zip(value.shape, local, strict=True))
