"""DiLoCo and Streaming DiLoCo in JAX: islands that train apart and talk rarely."""

import importlib
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
    "sharding": "sharding",
    "wire": "wire",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `diloco --help` does not wait for JAX."""
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"diloco.{_MODULE[name]}")
    return module if _MODULE[name] == name else getattr(module, name)
