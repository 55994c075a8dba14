"""One hash over everything that an executed page can read, apart from the page itself."""

import hashlib
import importlib.metadata
import sys
from pathlib import Path


READ_BY_PAGES = (
    "src",
    "conf",
    "docs/conf.py",
    "docs/_ext",
    "docs/data",
    "docs/refs.bib",
    "docs/reference/notation.toml",
)


def fingerprint(root: Path) -> str:
    """Hashes the package, the configuration, the recorded data and the installed versions.

    Args:
        root: The root of the checkout.

    Returns:
        Sixteen hexadecimal digits.
    """
    digest = hashlib.sha256(sys.version.encode())
    for entry in READ_BY_PAGES:
        path = root / entry
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    versions = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    digest.update("\n".join(versions).encode())
    return digest.hexdigest()[:16]
