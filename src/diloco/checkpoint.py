"""Checkpoints of a run: Orbax writes the arrays beside the training, one small file commits them.

`DIRECTORY/STEP/manifest.json` names the folder of arrays next to it. Until the manifest is there the step is no
checkpoint, so a save that was killed is never taken for one, on a disk and in an object store alike.
"""

import contextlib
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from diloco import manifest as manifests
from diloco.config import DiLoCoConfig
from diloco.leaves import named_leaves
from diloco.restoring import Path, root_of, step_folders, steps
from diloco.state import DiLoCoState


# Our folders of arrays, and Orbax's before they are whole.
_DATA = re.compile(r"state-[0-9a-f]{8}(\..*)?")


class Checkpoints:
    """A directory of checkpoints that one run writes, in the background.

    `save` returns once the state is copied to the host; the files are written, hashed and committed meanwhile. An
    error of a save is raised by the next `save` or `wait`. A context manager: leaving it waits for the last save.

    Args:
        directory: Where; a local path, or one that `etils.epath` knows, such as `gs://`. A local one is locked
            against a second run until `close`, or until the process ends, however it ends.
        keep: Newest checkpoints to keep; None keeps all.

    Raises:
        ValueError: If another run has the directory, or `keep` is below 1.
        OSError: If the directory cannot be written.

    Example:
        >>> import tempfile, diloco, jax.numpy as jnp
        >>> config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
        >>> state = diloco.init(config, {"params": jnp.ones(3)})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Checkpoints(directory, keep=1) as checkpoints:
        ...         for step in (1, 2):
        ...             checkpoints.save(config, state._replace(step=jnp.int32(step)))
        ...     diloco.latest(directory)
        2
    """

    def __init__(self, directory: Path, *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"keep {keep} is below 1; use 1 or more")
        self._directory, self._keep = root_of(directory), keep
        self._lock = _lock(self._directory)
        # Weights hardly compress; trying would take processor time from the training.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        # Blocking: this store's own errors would otherwise come up in a later call, in place of ours.
        metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        self._writer = ocp.AsyncCheckpointer(handler, checkpoint_metadata_store=metadata)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        for folder in step_folders(self._directory).values():
            _drop_unfinished(folder)

    def save(
        self,
        config: DiLoCoConfig,
        state: DiLoCoState,
        *,
        settings: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save a state as the checkpoint of its step; one of the same step is replaced.

        The state may be donated to the next train step as soon as this returns.

        Args:
            config: The algorithm.
            state: The state after any step.
            settings: What else must be the same when the run goes on, fit for JSON.
            extras: What belongs to the state but is no array, fit for JSON, such as positions in the data.

        Raises:
            OSError: If the save before this one failed; older checkpoints are as they were.
            TypeError: If the settings or extras are not fit for JSON.
            ValueError: If the folder of the step holds something else.
        """
        self.wait()
        manifest = manifests.describe(
            config, state, int(state.step), settings=settings, extras=extras
        )
        folder = self._directory / str(manifest["step"])
        if folder.exists():
            _drop_unfinished(folder)  # of a save that failed
        manifest["data"] = f"state-{secrets.token_hex(4)}"
        if folder.exists() and not (folder / manifests.NAME).exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} holds something that is no checkpoint of this run; give another directory"
            )
        arrays = {name: _stored(leaf) for name, leaf in named_leaves(state).items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer.save(folder / manifest["data"], args=ocp.args.PyTreeSave(arrays))
        except Exception as error:
            _drop_failed(folder)
            raise _failed(folder, error) from error
        self._thread = threading.Thread(target=self._commit, args=(folder, manifest))
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is committed.

        Raises:
            OSError: If it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, when a run goes back to an earlier one."""
        for later in [s for s in steps(self._directory) if s > step]:
            _remove(self._directory / str(later))

    def close(self) -> None:
        """Waits for the last save, stops the writer and opens the lock."""
        try:
            self.wait()
        finally:
            self._writer.close()  # has nothing left to wait for, so nothing to fail
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _commit(self, folder: epath.Path, manifest: dict[str, Any]) -> None:
        try:
            self._writer.wait_until_finished()
            manifest["files"] = manifests.hash_files(folder / manifest["data"])
            manifests.write(folder, manifest)
            _drop_unfinished(folder)  # what this one replaced
            old = [] if self._keep is None else steps(self._directory)[: -self._keep]
            for step in old:
                if step != manifest["step"]:  # never the one just written, whatever is there
                    _remove(self._directory / str(step))
        except Exception as error:
            self._error = _failed(folder, error)
            self._error.__cause__ = error
            _drop_failed(folder)


def save(
    directory: Path,
    config: DiLoCoConfig,
    state: DiLoCoState,
    *,
    settings: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Saves a state as the checkpoint of its step, and waits for it; `Checkpoints` does it beside the training.

    Args:
        directory: Where; see `Checkpoints`.
        config: The algorithm.
        state: The state after any step: nothing is in flight between two steps, also inside a V window.
        settings: What else must be the same when the run goes on, fit for JSON.
        extras: What belongs to the state but is no array, fit for JSON.
        keep: Newest checkpoints to keep; None keeps all.

    Raises:
        OSError: If it cannot be written; older checkpoints are as they were.
        ValueError: If another run has the directory, or the folder of the step holds something else.

    Example:
        >>> import tempfile, diloco, jax.numpy as jnp
        >>> config = diloco.DiLoCoConfig(num_islands=2, sync_period=4)
        >>> state = diloco.init(config, {"params": jnp.ones(3)})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(directory, config, state, extras={"examples": 7})
        ...     diloco.restore(directory, config, state).extras
        {'examples': 7}
    """
    with Checkpoints(directory, keep=keep) as checkpoints:
        checkpoints.save(config, state, settings=settings, extras=extras)


def _stored(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _failed(folder: epath.Path, error: Exception) -> OSError:
    # The storage library hides the system's error in a long text.
    found = re.search(r"os_error_code='?(\d+)", str(error))
    code = int(found[1]) if found else getattr(error, "errno", None)
    reason = os.strerror(code) if code else " ".join(str(error).split())[:300]
    return OSError(
        f"the checkpoint {folder} could not be written ({reason}); "
        "older checkpoints are as they were; make room or give another directory"
    )


def _lock(directory: epath.Path) -> int | None:
    """Locks a local directory for this process; the system opens the lock when the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    if "://" in str(directory):
        return None
    file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 20).decode() or "another process"
        os.close(file)
        raise ValueError(
            f"{directory} is in use by {holder}; wait for that run to end, or give another directory"
        ) from None
    os.truncate(file, 0)
    os.write(file, f"process {os.getpid()}".encode())
    return file


def _drop_unfinished(folder: epath.Path) -> bool:
    """Removes the arrays in a step's folder that its manifest does not name, and a folder that is empty then.

    Returns:
        Whether there was something to remove.
    """
    try:
        keep = manifests.read(folder)["data"] if (folder / manifests.NAME).exists() else None
    except ValueError:
        return False  # damaged: left for a person to look at
    dropped = False
    for path in folder.iterdir():
        if path.name == f"{manifests.NAME}.tmp":
            path.unlink()
        elif _DATA.fullmatch(path.name) and path.name != keep:
            path.rmtree()
        else:
            continue
        dropped = True
    if dropped and keep is None and not any(folder.iterdir()):
        folder.rmdir()
    return dropped


def _drop_failed(folder: epath.Path) -> None:
    """Removes the arrays of a failed save.

    The storage library reports the first part that fails while others still write for a moment, and would make
    their folder anew; so it is removed until it stays away.
    """
    for _ in range(10):
        with contextlib.suppress(OSError):  # a file came or went meanwhile
            if not folder.exists() or not _drop_unfinished(folder):
                return
        time.sleep(0.2)


def _remove(folder: epath.Path) -> None:
    (folder / manifests.NAME).unlink()  # first, so that a removal cut short leaves no checkpoint
    _drop_unfinished(folder)
