"""Time to encode and to decode, over the time to copy the same array on the same machine.

Each round times a copy and then the codec, so that both see the same load; the table has the median of the ratios.

    python benchmarks/wire_speed.py
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from diloco import wire


SHAPE = (16, 1024, 1024)  # 64 MiB of float32
ROUNDS = 15


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    x = 1e-3 * jax.random.normal(jax.random.key(0), SHAPE)
    copy = jax.jit(jnp.copy)
    copies = []
    print("| wire format | encode / copy | decode / copy | both / copy |\n|---|---|---|---|")
    for name in ("bfloat16", "int8", "float4_e3m0"):
        codec = wire.codec(name)
        encode = jax.jit(codec.encode)
        decode = jax.jit(lambda payload, c=codec: c.decode(payload, SHAPE))
        payload = encode(x)
        jax.block_until_ready((copy(x), decode(payload)))
        there, back = [], []
        for _ in range(ROUNDS):
            copies.append(seconds(lambda: copy(x)))
            there.append(seconds(lambda e=encode: e(x)) / copies[-1])
            back.append(seconds(lambda d=decode, p=payload: d(p)) / copies[-1])
        both = [a + b for a, b in zip(there, back, strict=True)]
        print(
            f"| {name} | "
            + " | ".join(f"{statistics.median(r):.2f}" for r in (there, back, both))
            + " |"
        )
    print(
        f"\ncopy of {x.nbytes / 2**20:.0f} MiB: {x.nbytes / statistics.median(copies) / 1e9:.2f} GB/s, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
