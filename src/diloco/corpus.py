"""Real text as bytes: the running Python's own library, or the user's files.

The default corpus is on every machine that can run this package: the source of Python's standard
library and the prose of `pydoc_data`. It depends on the Python version, so runs record its digest.
"""

import dataclasses
import gzip
import hashlib
import importlib
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np


_HELD_OUT_EVERY = 20  # one file in so many is held out
_LEFT_OUT = {
    "__phello__",
    "__pycache__",
    "dist-packages",
    "encodings",  # tables of codes, not text
    "idle_test",
    "pydoc_data",  # read as prose instead
    "site-packages",
    "test",
    "tests",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text as byte tokens, each file followed by a zero byte, with whole files held out.

    Args:
        name: What it is and where it came from.
        train: Training text, uint8, shape `(bytes,)`; groups follow one another.
        held_out: Text of the held-out files, uint8, shape `(bytes,)`.
        groups: Packages (or folders, or single files) of the training text.
        group_ends: End of each group in `train`, int64, shape `(groups,)`.
        num_files: Files read.
        digest: SHA-256 of `train` and `held_out`, hexadecimal.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    groups: tuple[str, ...]
    group_ends: np.ndarray
    num_files: int
    digest: str


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Reads a corpus and holds out one file in twenty.

    A text longer than a twentieth of the whole is first cut into pieces of that size, so that a
    single file has a held-out part too. Order, and with it everything drawn from the corpus,
    depends on names and bytes alone.

    Args:
        path: A UTF-8 text file, plain or `.gz`, or a folder of them, read with its sub-folders;
            names that begin with a dot are left out. None or `"python"` is Python's own library.

    Returns:
        The corpus. A group is a top-level package of the library, or the first folder (or the
        file) below `path`.

    Raises:
        ValueError: If there is no such file, a file cannot be read or is not UTF-8, or there is too
            little text to hold any out.

    Example:
        >>> corpus = load_corpus()
        >>> corpus.train.size > 5_000_000 and "asyncio" in corpus.groups
        True
    """
    if path == "":
        raise ValueError("the corpus has an empty path; name a file or folder with --data")
    if path is None or path == "python":
        name, files = "Python's standard library", list(_python_files())
    else:
        name, files = str(path), list(_user_files(Path(path)))
    total = sum(len(text) for _, _, text in files)
    if not total:
        raise ValueError(f"the corpus {name} holds no text; give files of UTF-8 text with --data")
    piece = max(1, -(-total // _HELD_OUT_EVERY))
    pieces = [
        (group, text[i : i + piece] + b"\0")
        for group, _, text in sorted(files)
        for i in range(0, len(text), piece)
    ]
    if len(pieces) < _HELD_OUT_EVERY:
        raise ValueError(
            f"the corpus {name} is too short ({total} bytes) to hold text out; give more text"
        )
    middle = _HELD_OUT_EVERY // 2
    held_out = b"".join(t for i, (_, t) in enumerate(pieces) if i % _HELD_OUT_EVERY == middle)
    kept = [p for i, p in enumerate(pieces) if i % _HELD_OUT_EVERY != middle]
    sizes: dict[str, int] = {}
    for group, text in kept:
        sizes[group] = sizes.get(group, 0) + len(text)
    train = b"".join(text for _, text in kept)
    return Corpus(
        name=name,
        train=np.frombuffer(train, np.uint8),
        held_out=np.frombuffer(held_out, np.uint8),
        groups=tuple(sizes),
        group_ends=np.cumsum(np.array(list(sizes.values()), np.int64)),
        num_files=len(files),
        digest=hashlib.sha256(train + held_out).hexdigest(),
    )


def unigram_entropy(corpus: Corpus) -> float:
    """Computes the entropy of the held-out bytes, in nats a byte.

    No model that ignores what came before can reach a lower validation loss.

    Example:
        >>> 2.5 < unigram_entropy(load_corpus()) < 3.5
        True
    """
    share = np.bincount(corpus.held_out) / corpus.held_out.size
    share = share[share > 0]
    return float(-np.sum(share * np.log(share)))


def _python_files() -> Iterator[tuple[str, str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _LEFT_OUT.intersection(parts):
            yield parts[0].removesuffix(".py"), "/".join(parts), _read(path)
    for topic, text in importlib.import_module("pydoc_data.topics").topics.items():
        yield "pydoc_data", topic, text.encode()


def _user_files(root: Path) -> Iterator[tuple[str, str, bytes]]:
    if root.is_file():
        yield root.name, root.name, _read(root)
        return
    if not root.is_dir():
        raise ValueError(f"there is no file or folder {root}; give the path of one with --data")
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            yield parts[0], "/".join(parts), _read(path)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it or take it out"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}); mend it or take it out") from None
    return text
