"""What a checkpoint says about itself: the algorithm, every leaf, every file with its SHA-256.

The manifest is written last and in one piece, so a directory is a checkpoint if and only if it has an intact one.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
from etils import epath

from diloco.config import DiLoCoConfig
from diloco.fragments import partition
from diloco.leaves import kind, named_leaves
from diloco.state import DiLoCoState


NAME = "manifest.json"
_FORMAT = 1


def describe(
    config: DiLoCoConfig,
    state: DiLoCoState,
    step: int,
    *,
    settings: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describes a state: the manifest without its files.

    Args:
        config: The algorithm.
        state: The state, concrete or abstract.
        step: t, completed inner steps.
        settings: What else must be the same when the run goes on, fit for JSON: the model, the data, the optimizer.
        extras: What belongs to the state but is no array, fit for JSON: the positions of the data iterators.

    Returns:
        A dict fit for JSON.

    Raises:
        TypeError: If the settings or extras are not fit for JSON.
    """
    return {
        "format": _FORMAT,
        "step": step,
        "algorithm": _plain(dataclasses.asdict(config), "config"),
        "fragments": fragments_digest(config, state.outer_params),
        "settings": _plain(settings or {}, "settings"),
        "extras": _plain(extras or {}, "extras"),
        "leaves": {name: kind(leaf) for name, leaf in named_leaves(state).items()},
        "versions": dict(_versions()),
    }


@functools.cache  # reads files: not in every save
def _versions() -> dict[str, str]:
    names = ("diloco", "jax", "orbax-checkpoint")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


def fragments_digest(config: DiLoCoConfig, outer_params: Any) -> str:
    """Digests which parameter lies in which fragment, as the code that runs computes it.

    Args:
        config: The algorithm.
        outer_params: Theta, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        SHA-256 in hexadecimal digits.

    Example:
        >>> import jax.numpy as jnp
        >>> theta = {"layers": jnp.ones((4, 2)), "head": jnp.ones(2)}
        >>> one, other = (DiLoCoConfig(num_islands=2, sync_period=8, num_fragments=3, fragment_pattern=p)
        ...               for p in ("strided", "sequential"))
        >>> fragments_digest(one, theta) == fragments_digest(other, theta)
        False
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outer_params)
    cut = partition(abstract, config)
    return _digest([[f.leaves, f.cuts, f.indices] for f in cut.fragments])


def differences(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists what differs between a checkpoint and the run that wants to go on from it.

    Args:
        manifest: Of the checkpoint.
        now: What `describe` returns for the run.

    Returns:
        One line a difference; none if the run goes on as it was.

    Example:
        >>> differences({"algorithm": {"sync_period": 30}}, {"algorithm": {"sync_period": 20}})
        ['diloco.sync_period was 30 and is 20']
    """
    absent, lines = object(), []
    for part, prefix in (("algorithm", ("diloco",)), ("settings", ())):
        old, new = (_flat(m.get(part, {}), prefix) for m in (manifest, now))
        lines += [
            f"{'.'.join(key)} was {_shown(old, key)} and is {_shown(new, key)}"
            for key in {**old, **new}
            if old.get(key, absent) != new.get(key, absent)
        ]
    if not lines and manifest.get("fragments") != now.get("fragments"):
        lines = ["the parameters are cut into other fragments than by the version that saved them"]
    return lines


def write(folder: epath.Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest in one piece: it is there whole or not at all.

    Args:
        folder: Of the step.
        manifest: Fit for JSON; its own checksum is added.
    """
    text = json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1)
    if "://" in str(folder):  # an object store shows an object once it is whole
        (folder / NAME).write_text(text)
        return
    scratch = folder / f"{NAME}.tmp"
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / NAME)
    where = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every network file system can
        os.fsync(where)
    os.close(where)


def read(folder: epath.Path) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
        ValueError: If it is missing, cannot be read, or is damaged or of another program.
    """
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        whole = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except OSError as error:  # such as a folder in its place
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: its content does not have its checksum")
    if manifest["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']}, but this version reads {_FORMAT}; use the version that wrote it"
        )
    return manifest


def hash_files(folder: epath.Path) -> dict[str, list[Any]]:
    """Returns `[bytes, SHA-256]` of every file below a folder, by its path relative to it."""
    files = {}
    for path in _files(folder):
        name = str(path)[len(str(folder)) + 1 :]
        with path.open("rb") as file:  # never whole in memory
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[name] = [path.stat().length, digest]
    return files


def damage(folder: epath.Path, manifest: Mapping[str, Any]) -> str:
    """Says what is wrong with a checkpoint's files.

    Args:
        folder: Of the step.
        manifest: What `read` returns for it.

    Returns:
        One clause that names the file; empty if all files are there, bit for bit.
    """
    data = folder / manifest["data"]
    if not data.exists():
        return f"{data} is missing"
    there, wanted = hash_files(data), manifest["files"]
    for name in sorted({*there, *wanted}):
        if name not in there:
            return f"{data / name} is missing"
        if name not in wanted:
            if name.rpartition("/")[2].startswith("."):
                continue  # what a desktop or a network file system puts anywhere
            return f"{data / name} does not belong to it"
        if there[name][0] != wanted[name][0]:
            return f"{data / name} has {there[name][0]} bytes instead of {wanted[name][0]}"
        if there[name][1] != wanted[name][1]:
            return f"{data / name} does not have its checksum"
    return ""


def _files(folder: epath.Path) -> list[epath.Path]:
    found = []
    for path in sorted(folder.iterdir()):
        found += _files(path) if path.is_dir() else [path]
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain(value: Any, name: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} cannot be written as JSON ({error}); use dicts, lists, strings and finite numbers"
        ) from None


def _flat(tree: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, Mapping) or (prefix and not tree):
        return {prefix: tree}
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, (*prefix, str(key)))
    return flat


def _shown(flat: Mapping[tuple[str, ...], Any], key: tuple[str, ...]) -> str:
    return json.dumps(flat[key]) if key in flat else "not there"
