"""The leaves of a state by name: what a checkpoint, an export and a change of islands agree on.

A leaf that is missing, extra, of another shape or of a name that is taken is an error that names it.
"""

from collections.abc import Mapping
from typing import Any

import jax


def named_leaves(tree: Any, separator: str = "/") -> dict[str, Any]:
    """Names every leaf by its path, such as `inner/params/layers/wq`.

    Args:
        tree: Any pytree.
        separator: Between the keys of a path.

    Returns:
        The leaves by name, in the order of the tree.

    Raises:
        ValueError: If two leaves would share a name, since one of them would be lost.

    Example:
        >>> list(named_leaves({"a": {"b": 1.0}, "c": [2.0, 3.0]}))
        ['a/b', 'c/0', 'c/1']
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named: dict[str, Any] = {}
    taken = set()
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=separator)
        stored = name.rstrip(separator)  # a store of arrays sees no separator at the end
        if stored in taken:
            raise ValueError(
                f"two leaves would both be named {name!r}; rename one of them, without a separator in its key"
            )
        taken.add(stored)
        named[name] = leaf
    return named


def check_leaves(
    found: Mapping[str, list[Any]],
    wanted: Mapping[str, Any],
    where: str,
    *,
    cast: bool = False,
    remedy: str = "",
) -> None:
    """Checks that a checkpoint holds exactly the leaves that are wanted.

    Args:
        found: Name to `[dtype, shape]`, as in a manifest.
        wanted: Name to an array or `jax.ShapeDtypeStruct`.
        where: The checkpoint, for the message.
        cast: Whether one floating-point type may stand for another.
        remedy: How the message ends, if there is more to say than to build the same model and optimizer.

    Raises:
        ValueError: If a leaf is missing, extra, or has another shape or type; the message names it.

    Example:
        >>> check_leaves({"w": ["float32", [2]]}, {"w": jax.ShapeDtypeStruct((3,), "float32")}, "step 4")
        Traceback (most recent call last):
        ValueError: step 4 has w as float32[2], but the run wants float32[3]; build the same model and optimizer as the ones that were saved
    """
    remedy = remedy or "build the same model and optimizer as the ones that were saved"
    for title, names in (
        ("lacks", [n for n in wanted if n not in found]),
        ("has, beyond what the run wants,", [n for n in found if n not in wanted]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{where} {title} {', '.join(names[:3])}{more}; {remedy}")
    for name, leaf in wanted.items():
        dtype, shape = found[name]
        want = kind(leaf)
        floats = cast and "float" in dtype and "float" in want[0]
        if list(shape) != want[1] or (dtype != want[0] and not floats):
            raise ValueError(
                f"{where} has {name} as {dtype}{list(shape)}, but the run wants {want[0]}{want[1]}; {remedy}"
            )


def kind(leaf: Any) -> list[Any]:
    """Returns `[dtype, shape]` of a leaf, as a manifest has it."""
    return [str(leaf.dtype), list(leaf.shape)]
