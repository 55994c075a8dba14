"""Hands Theta to other software: as one safetensors file, or as a plain Orbax checkpoint of a tree."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from diloco import storage
from diloco.leaves import named_leaves


def to_safetensors(params: Any, path: Path | str) -> Path:
    """Writes parameters as one safetensors file, which is there whole or not at all.

    Args:
        params: Such as `state.outer_params`, after `diloco.flush`; pytree of arrays.
        path: The file; one that is there is replaced.

    Returns:
        `path`.

    Raises:
        ValueError: If two parameters share a name, or one is called `__metadata__`.
        OSError: If it cannot be written.

    Example:
        >>> import tempfile, safetensors.numpy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = to_safetensors({"layers": {"wq": np.ones(2, np.float32)}}, f"{folder}/theta.safetensors")
        ...     safetensors.numpy.load_file(path)
        {'layers.wq': array([1., 1.], dtype=float32)}
    """
    path = Path(path)
    flat = flat_params(params)
    if "__metadata__" in flat:
        raise ValueError(
            "safetensors keeps the name __metadata__ for itself; rename that parameter"
        )
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with storage.writing(path):
            scratch.touch()
            mode = scratch.stat().st_mode  # the user's, which safetensors narrows
            save_file(flat, scratch)
            scratch.chmod(mode)
            os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    return path


def to_orbax(params: Any, path: Path | str) -> Path:
    """Writes parameters as a plain Orbax checkpoint: nested dicts of arrays, which Orbax restores with nothing of ours.

    Args:
        params: Such as `state.outer_params`, after `diloco.flush`; pytree of arrays, lists and other nodes become dicts.
        path: The directory; it must not exist yet.

    Returns:
        `path`.

    Raises:
        ValueError: If the directory exists, or two parameters share a name.
        OSError: If it cannot be written.

    Example:
        >>> import tempfile, orbax.checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = to_orbax({"layers": {"wq": np.ones(2, np.float32)}}, f"{folder}/theta")
        ...     orbax.checkpoint.StandardCheckpointer().restore(path)["layers"]["wq"].tolist()
        [1.0, 1.0]
    """
    import orbax.checkpoint as ocp  # here, since Orbax takes a second to import

    path = Path(path).absolute()
    unfinished = path.with_name(f"{path.name}.orbax-checkpoint-tmp")
    for there in (path, unfinished):
        if there.exists():
            raise ValueError(f"{there} exists already; give another path or remove it")
    named_leaves(params)  # two of one name would be one
    tree: dict[str, Any] = {}
    for path_to, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path_to]
        *folders, last = names or ["params"]
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = np.asarray(leaf)
    try:
        # Not the asynchronous one: its threads would wait for minutes for a folder that cannot be made.
        with storage.writing(path), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.StandardSave(tree))
    except Exception:
        storage.clear(lambda: [p for p in (path, unfinished) if p.exists()])
        raise
    return path


def flat_params(params: Any) -> dict[str, np.ndarray]:
    """Returns a parameter tree as one dict of arrays, its keys joined by dots; one array alone is `params`.

    Example:
        >>> list(flat_params({"layers": {"wq": np.ones(2)}}))
        ['layers.wq']
    """
    named = named_leaves(params, separator=".").items()
    return {name or "params": np.asarray(leaf, order="C") for name, leaf in named}
