"""The checkpoint of one model that islands can start from: ours, or a tree that Orbax wrote, as MaxText does."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import restoring, storage
from diloco.leaves import check_leaves, kind, named_leaves


def read(root: epath.Path, wanted: dict[str, Any], take: str) -> dict[str, Any]:
    """Reads leaves by name.

    Args:
        root: A directory of our checkpoints, of which the newest intact one is taken, or one that Orbax wrote.
        wanted: The leaves by name, arrays or `jax.ShapeDtypeStruct`s of one island.
        take: `"params"` or `"state"`, as for `diloco.bootstrap`.

    Returns:
        The arrays by name.

    Raises:
        ValueError: If the source is no such checkpoint or cannot be read, or a leaf is missing, extra or of another
            shape or type.
    """
    folder, prefixes, islands = _open(root, take)
    if not (folder / "_METADATA").exists():
        raise ValueError(
            f"{root} holds no checkpoint of ours and no tree that Orbax wrote; "
            "name the directory of a run's checkpoints, or one with a _METADATA file"
        )
    with _reading(folder):
        metadata = _metadata(folder)
    stored = named_leaves(metadata)

    def below(prefix: str) -> dict[str, str]:
        names = {n: n[len(prefix) :].lstrip("/") for n in stored}
        inside = [n for n in stored if not prefix or n == prefix or n.startswith(f"{prefix}/")]
        return {names[n]: n for n in inside}

    full = max(map(below, prefixes), key=lambda names: len(wanted.keys() & names.keys()))
    lead = (1,) if islands else ()
    targets = {
        name: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, sharding=_lead(leaf, lead))
        for name, leaf in wanted.items()
    }
    words = {name: restoring.target(leaf) for name, leaf in targets.items()}
    check_leaves({name: kind(stored[n]) for name, n in full.items()}, words, str(folder), cast=True)
    by_name = {full[name]: leaf for name, leaf in words.items()}
    tree = jax.tree.structure(metadata).unflatten(by_name.get(n, ocp.PLACEHOLDER) for n in stored)
    with _reading(folder):
        loaded = named_leaves(restoring.load(folder, tree))
    found = {name: restoring.as_wanted(loaded[full[name]], targets[name]) for name in wanted}
    return {name: leaf[0] if lead else leaf for name, leaf in found.items()}


def _open(root: epath.Path, take: str) -> tuple[epath.Path, tuple[str, ...], bool]:
    """Finds the folder of arrays, where in it the leaves may be, and whether they have an island axis."""
    if not restoring.steps(root):
        places = [root, root / "items", root / "default", root / "state"]
        folder = next((p for p in places if (p / "_METADATA").exists()), root)
        return folder, ("", "params", "params/params") if take == "params" else ("",), False
    folder, manifest = restoring.intact(root)
    islands = manifest["algorithm"]["num_islands"]
    if take == "state" and islands != 1:
        raise ValueError(
            f"step {manifest['step']} in {root} is of {islands} islands, whose states differ; take='params' starts "
            "from Theta, and diloco.resize goes on with another number of islands"
        )
    place = ("outer_params",) if take == "params" else ("inner",)
    return folder / manifest["data"], place, take == "state"


def _metadata(folder: epath.Path) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.metadata(folder)
    tree = getattr(getattr(found, "item_metadata", found), "tree", None)
    if tree is None:
        raise ValueError("its metadata or a part that they name is missing or damaged")
    return tree


@contextlib.contextmanager
def _reading(folder: epath.Path) -> Iterator[None]:
    """Says which checkpoint it was, whatever Orbax, TensorStore or JSON says."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{folder} cannot be read ({storage.reason(error)}); copy it anew, or name another checkpoint"
        ) from error


def _lead(leaf: Any, lead: tuple[int, ...]) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if lead and isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P(None, *sharding.spec))
    return sharding
