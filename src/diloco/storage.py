"""The disk: one writer a directory, and every error of writing said in one sentence."""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from etils import epath


@contextlib.contextmanager
def writing(path: Path | epath.Path | str) -> Iterator[None]:
    """Turns the system's errors inside a `with` block into one sentence with the path, the reason and the remedy.

    Args:
        path: What is written, a file or a folder, for the message.

    Raises:
        OSError: If the block failed for a reason of the system, whichever library reported it. Other errors stay
            as they are.

    Example:
        >>> import errno
        >>> with writing("runs/mine"):
        ...     raise OSError(errno.ENOSPC, "as a write to a full disk does")
        Traceback (most recent call last):
        OSError: runs/mine could not be written (No space left on device); make room or give another path
    """
    try:
        yield
    except BrokenPipeError:
        raise  # somebody stopped reading what is printed meanwhile
    except Exception as error:
        if not system_code(error):
            raise
        # The file below it, where the system names one; never a scratch file beside it.
        named = getattr(error, "filename", None)
        where = named if named and Path(path) in Path(str(named)).parents else path
        raise OSError(f"{where} could not be written ({reason(error)}); {remedy(error)}") from error


def system_code(error: Exception) -> int | None:
    """Returns the system's number for an error, also if a library hides it in its text; None if there is none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = re.search(r"os_error_code='?(\d+)|\(os error (\d+)\)", str(error))
    return int(found[1] or found[2]) if found else None


def reason(error: Exception) -> str:
    """Says why something failed: in the system's words if it was the system, else in the error's, on one line."""
    code = system_code(error)
    return os.strerror(code) if code else " ".join(str(error).split())[:300]


def remedy(error: Exception) -> str:
    """Says what to do about an error of writing."""
    if system_code(error) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room or give another path"
    return "give another path, or make this one usable"


def clear(left: Callable[[], Sequence[Path | epath.Path]]) -> bool:
    """Removes what a failed write left, until it stays away.

    Orbax reports the first part that fails while others still write for a moment, and would make their folder anew.

    Args:
        left: Lists the files and folders that are there now.

    Returns:
        Whether all is gone.
    """
    for _ in range(10):
        with contextlib.suppress(OSError):  # a file came or went meanwhile
            paths = left()
            for path in paths:
                remove(path)
            if not paths:
                return True
        time.sleep(0.2)
    return False


def remove(path: Path | epath.Path) -> None:
    """Removes a file, a folder with all it holds, or a link without what it leads to."""
    path = epath.Path(path)
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink()


def lock(directory: epath.Path) -> int | None:
    """Locks a local directory, which is made if need be; the system opens the lock when the process ends.

    Args:
        directory: Which one.

    Returns:
        The file that holds the lock until it is closed; None for an object store, which has no locks.

    Raises:
        ValueError: If another run has the directory, or another program's `.lock` is in it.
        OSError: If it cannot be written.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if "://" in str(directory):
            return None
        file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not re.fullmatch(rb"(process \d*)?", os.pread(file, 30, 0)):
                raise ValueError(f"{directory}/.lock is of another program; give another directory")
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()}".encode())
            return file
        except BlockingIOError:
            holder = os.read(file, 20).decode() or "another process"
            os.close(file)
            own = holder == f"process {os.getpid()}"  # machines that share a disk number alike
            which = (
                " (this one, unless another machine has the directory too: close it)" if own else ""
            )
            raise ValueError(
                f"{directory} is in use by {holder}{which}; wait for that run to end, or give another directory"
            ) from None
        except (OSError, ValueError):
            os.close(file)
            raise


def is_locked(directory: epath.Path, file: int) -> bool:
    """Tells whether a lock still is the one that keeps others out: the directory may have been removed or moved.

    Args:
        directory: Which one.
        file: What `lock` returned for it.

    Returns:
        Whether the directory has this very lock.
    """
    return identity(directory / ".lock") == identity(file)


def identity(path: epath.Path | int) -> tuple[int, int] | None:
    """Returns what tells a local file or folder from another of the same name; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
