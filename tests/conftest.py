"""Strict numerics and eight CPU devices for every test, set before JAX is used."""

import os
import subprocess


os.environ["JAX_PLATFORMS"] = "cpu"
# Test programs are tiny and run a few times: compile them quickly rather than well.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts a file system of a given size; skips where that is not allowed."""
    mounted = []

    def mount(options, at=None):
        place = tmp_path / (at or f"disk{len(mounted)}")
        place.mkdir(parents=True)
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", place], check=True)
