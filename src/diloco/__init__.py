"""DiLoCo and Streaming DiLoCo in JAX: islands that train apart and talk rarely."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from diloco.config import DiLoCoConfig
from diloco.schedule import schedule


if TYPE_CHECKING:
    from diloco import sharding, wire
    from diloco.checkpoint import Checkpoints, save
    from diloco.fragments import partition
    from diloco.islands import bootstrap, resize
    from diloco.restoring import latest, restore
    from diloco.spmd import build_train_step, flush, init
    from diloco.state import DiLoCoState, ParamsLens


__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "DiLoCoConfig",
    "DiLoCoState",
    "ParamsLens",
    "bootstrap",
    "build_train_step",
    "flush",
    "init",
    "latest",
    "partition",
    "resize",
    "restore",
    "save",
    "schedule",
    "sharding",
    "wire",
]

_MODULE = {
    "Checkpoints": "checkpoint",
    "DiLoCoState": "state",
    "ParamsLens": "state",
    "bootstrap": "islands",
    "build_train_step": "spmd",
    "flush": "spmd",
    "init": "spmd",
    "latest": "restoring",
    "partition": "fragments",
    "resize": "islands",
    "restore": "restoring",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Imports a public name or a module at its first use, so that `diloco --help` does not wait for JAX."""
    module = f"{__name__}.{_MODULE.get(name, name)}"
    if name.startswith("_") or not importlib.util.find_spec(module):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(module)
    return getattr(found, name) if name in _MODULE else found
