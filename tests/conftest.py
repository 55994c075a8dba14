"""Strict numerics and eight CPU devices for every test, set before JAX is used."""

import os


os.environ["JAX_PLATFORMS"] = "cpu"
# Test programs are tiny and run a few times: compile them quickly rather than well.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)

import jax


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
