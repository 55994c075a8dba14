"""The folders of checkpoints: `DIRECTORY/STEP` with arrays and the manifest that commits them.

What cannot be removed only takes up room, so that is a warning and never the end of a run.
"""

import contextlib
import logging
import os
import re

from etils import epath

from diloco import manifest as manifests
from diloco import storage


log = logging.getLogger("diloco")

Path = str | os.PathLike[str]

_STEP = re.compile(r"0|[1-9][0-9]*")  # as `str` writes it: no other folder is ours
# Our folders of arrays, Orbax's before they are whole, and the manifest before it is.
_OURS = re.compile(rf"state-[0-9a-f]{{8}}(\..*)?|{re.escape(manifests.NAME)}(\.tmp)?")


def root_of(directory: Path) -> epath.Path:
    """Returns a directory as an absolute path; one with a scheme, such as `gs://`, stays as it is."""
    text = os.fspath(directory)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def step_folders(directory: epath.Path) -> dict[int, epath.Path]:
    """Lists the folders whose name is a step, in order, finished or not."""
    if not directory.is_dir():
        return {}
    folders = {
        int(p.name): p for p in directory.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()
    }
    return dict(sorted(folders.items()))


def steps(directory: Path) -> list[int]:
    """Lists the steps that have a committed checkpoint, oldest first; their files are not checked."""
    folders = step_folders(root_of(directory))
    return [step for step, folder in folders.items() if (folder / manifests.NAME).exists()]


def is_ours(folder: epath.Path) -> bool:
    """Tells whether a step's folder may be written or removed: it is a checkpoint, or holds only what saves make."""
    if not folder.is_dir():
        return not folder.exists()
    try:
        manifests.read(folder)
    except ValueError:
        names = [path.name for path in folder.iterdir()]
        # Other programs have a manifest.json too; a damaged one of ours has its arrays beside it.
        arrays = any(name.startswith("state-") for name in names)
        return all(map(_OURS.fullmatch, names)) and (arrays or manifests.NAME not in names)
    return True


def remove(folder: epath.Path) -> None:
    """Removes a checkpoint, its manifest first: a removal that is cut short leaves no checkpoint.

    If it is a link, perhaps to another run's checkpoint, the link alone is removed. What is not ours stays.

    Raises:
        OSError: If it is a checkpoint still.
    """
    if not is_ours(folder):
        return
    try:
        if os.path.islink(folder):
            os.unlink(folder)
            return
        (folder / manifests.NAME).unlink()
    except OSError as error:
        raise OSError(
            f"the checkpoint {folder} could not be removed ({storage.reason(error)}); remove it by hand"
        ) from error
    drop_unfinished(folder)


def drop_unfinished(folder: epath.Path) -> None:
    """Removes the arrays in a step's folder that its manifest does not name, and the folder if it is empty then.

    A folder whose manifest is damaged is left for a person to look at, and one that is elsewhere, behind a link, to
    its run.
    """
    if os.path.islink(folder):
        return
    try:
        keep = manifests.read(folder)["data"] if (folder / manifests.NAME).exists() else None
    except ValueError:
        return
    try:
        left = [path for path in _ours(folder) if path.name not in (manifests.NAME, keep)]
        for path in left:
            storage.remove(path)
        if left:
            _drop_empty(folder)
    except OSError as error:
        why = storage.reason(error)
        log.warning("%s holds what is no checkpoint and cannot be removed (%s)", folder, why)


def drop_failed(folder: epath.Path, data: str) -> None:
    """Removes what a failed save wrote, if that is possible; else whoever opens the directory next does.

    Args:
        folder: Of the step.
        data: Name of the folder of arrays.
    """
    unfinished = (data, f"{manifests.NAME}.tmp")
    if storage.clear(lambda: [p for p in _ours(folder) if p.name.startswith(unfinished)]):
        with contextlib.suppress(OSError):
            _drop_empty(folder)


def _ours(folder: epath.Path) -> list[epath.Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]


def _drop_empty(folder: epath.Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
