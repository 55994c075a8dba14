"""DiLoCo and Streaming DiLoCo in JAX: islands that train apart and talk rarely."""

from diloco import sharding, wire
from diloco.config import DiLoCoConfig
from diloco.fragments import partition
from diloco.schedule import schedule
from diloco.spmd import build_train_step, flush, init
from diloco.state import DiLoCoState, ParamsLens


__version__ = "0.1.0"

__all__ = [
    "DiLoCoConfig",
    "DiLoCoState",
    "ParamsLens",
    "build_train_step",
    "flush",
    "init",
    "partition",
    "schedule",
    "sharding",
    "wire",
]
