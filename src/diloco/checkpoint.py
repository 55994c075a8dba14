"""Checkpoints of a run: Orbax writes the arrays beside the training, one small file commits them.

`DIRECTORY/STEP/manifest.json` names the folder of arrays next to it. Until the manifest is there the step is no
checkpoint, so a save that was killed is never taken for one, on a disk and in an object store alike.
"""

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from diloco import folders, storage
from diloco import manifest as manifests
from diloco.config import DiLoCoConfig
from diloco.folders import Path
from diloco.leaves import named_leaves
from diloco.state import DiLoCoState, check_islands


log = logging.getLogger("diloco")


class Checkpoints:
    """A directory of checkpoints that one run writes, in the background.

    `save` returns once the state is copied to the host; the files are written, hashed and committed meanwhile. An
    error of a save is raised by the next `save` or `wait`. A context manager: leaving it waits for the last save. For
    one thread: it is not safe to save from several.

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
        if keep is not None and (keep < 1 or keep != int(keep)):
            raise ValueError(f"keep {keep} is below 1 or no whole number; use 1 or more")
        self._directory, self._keep = folders.root_of(directory), keep
        self._lock = storage.lock(self._directory)
        # Also when an object that was never closed is collected.
        held = self._lock is not None
        self._unlock = weakref.finalize(self, os.close, self._lock) if held else None
        self._open, self._begun = True, False
        # Weights hardly compress; trying would take processor time from the training.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        # Blocking: this store's own errors would otherwise come up in a later call, in place of ours.
        metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        # Its threads would wait for minutes for a folder that cannot be made.
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(
            handler, async_options=options, checkpoint_metadata_store=metadata
        )
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        try:
            for folder in folders.step_folders(self._directory).values():
                if folders.is_ours(folder):
                    folders.drop_unfinished(folder)
        except BaseException:
            self.close()
            raise

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
            OSError: If the save before this one failed, or this one cannot begin; older checkpoints are as they were.
            TypeError: If the settings or extras are not fit for JSON.
            ValueError: If the folder of the step holds something else, the directory was removed or moved, the state
                is of another number of islands, a leaf has no elements or a type that JAX does not hold, or this
                object is closed.
        """
        if not self._open:
            raise ValueError(f"the checkpoints in {self._directory} are closed; open them again")
        check_islands(state.inner, config.num_islands, remedy="give the config of the state")
        self.wait()
        if self._lock is not None and not storage.is_locked(self._directory, self._lock):
            # With it went what kept others out: what is there now may be another run's.
            raise ValueError(
                f"{self._directory} was removed or moved while the run had it; give another directory, and leave it to the run"
            )
        manifest = manifests.describe(
            config, state, int(state.step), settings=settings, extras=extras
        )
        manifest["data"] = f"state-{secrets.token_hex(4)}"
        folder = self._directory / str(manifest["step"])
        with storage.writing(folder):
            ours = folders.is_ours(folder)
        if not ours:
            raise ValueError(
                f"{folder} holds something that is no checkpoint of this run; give another directory"
            )
        arrays = {name: _stored(name, leaf) for name, leaf in named_leaves(state).items()}
        if not self._begun and (later := self._later(manifest["step"])):
            log.warning(
                "%s has checkpoints of later steps (%s), and a restore takes the newest that is intact; "
                "drop_after(%d) removes them",
                self._directory,
                ", ".join(map(str, later)),
                manifest["step"],
            )
        self._begun = True
        folders.drop_unfinished(folder)  # of a save that failed
        try:
            if os.path.islink(folder):
                os.unlink(folder)  # what it leads to is not replaced
            folder.mkdir(parents=True, exist_ok=True)
            self._writer.save(folder / manifest["data"], args=ocp.args.PyTreeSave(arrays))
        except Exception as error:
            raise self._failed(folder, manifest["data"], error) from error
        arguments = folder, manifest, storage.identity(folder)
        self._thread = threading.Thread(target=self._commit, args=arguments)
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
        """Removes the checkpoints of later steps, when a run goes back to an earlier one.

        Raises:
            OSError: If one cannot be removed, since a later resume would take it for this run's; or if the save
                before failed.
        """
        self.wait()
        for later in self._later(step):
            folders.remove(self._directory / str(later))

    def close(self) -> None:
        """Waits for the last save, stops the writer and opens the lock."""
        try:
            self.wait()
        finally:
            self._open = False
            self._writer.close()  # has nothing left to wait for, so nothing to fail
            if self._unlock is not None:
                self._unlock()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.close()
        except OSError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # never in place of the error that ended the block

    def _later(self, step: int) -> list[int]:
        return [s for s in folders.steps(self._directory) if s > step]

    def _commit(
        self, folder: epath.Path, manifest: dict[str, Any], was: tuple[int, int] | None
    ) -> None:
        try:
            self._writer.wait_until_finished()
            manifest["files"] = manifests.hash_files(folder / manifest["data"])
            manifests.write(folder, manifest)
        except Exception as error:
            removed = storage.identity(folder) != was
            self._error = self._failed(folder, manifest["data"], error)
            if removed:
                self._error = OSError(
                    f"the checkpoint {folder} was removed while it was written; leave the directory to the run"
                )
            self._error.__cause__ = error
            return
        # Committed. What cannot be removed now only takes up room.
        folders.drop_unfinished(folder)  # what this one replaced
        # Later ones are damaged, or of another run: they do not count as those to go on from.
        there = [s for s in folders.steps(self._directory) if s <= manifest["step"]]
        for old in [] if self._keep is None else there[: -self._keep]:
            try:
                folders.remove(self._directory / str(old))
            except OSError as error:
                log.warning("%s", error)

    def _failed(self, folder: epath.Path, data: str, error: Exception) -> OSError:
        folders.drop_failed(folder, data)
        return OSError(
            f"the checkpoint {folder} could not be written ({storage.reason(error)}); "
            f"older checkpoints are as they were; {storage.remedy(error)}"
        )


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


def _stored(name: str, leaf: Any) -> Any:
    """Returns what Orbax is to store for a leaf, random keys as their words; refuses what would not come back."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = jax.random.key_data(leaf) if is_key else leaf
    if not array.size:
        raise ValueError(
            f"{name} has no elements, which Orbax cannot store; leave it out of the state"
        )
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held != array.dtype:
        raise ValueError(
            f"{name} is {array.dtype}, which would come back as {held}; convert it, or set jax_enable_x64"
        )
    return array
