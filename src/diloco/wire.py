"""What an island sends: codecs from a float32 tensor to a small payload and back.

A block is 256 neighbouring numbers that share one float32 step; a code counts steps. Blocks lie along the trailing axes
of a tensor, so a tensor that is sharded along an earlier axis is encoded where it lies. Only a tensor whose size is no
multiple of 256 is padded, once, at its end.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


BLOCK = 256
"""Numbers that share one step."""


class Codec(NamedTuple):
    """One wire format.

    `decode(encode(x), x.shape)` must be a function of `x` alone, map zeros to zeros, keep finite numbers finite and let a
    NaN or infinity show in what is decoded. Both functions are pure, and are mapped over islands with `jax.vmap`.

    Attributes:
        encode: float32 tensor to a pytree of integer and scale arrays.
        decode: That pytree and the tensor's shape to float32.
        bits_per_parameter: Bits on the wire for one parameter of a large tensor, scales included.
    """

    encode: Callable[[jax.Array], Any]
    decode: Callable[[Any, tuple[int, ...]], jax.Array]
    bits_per_parameter: float

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the payload of one tensor, scales and padding included.

        Example:
            >>> codec("float4_e3m0").payload_bytes((4, 256))
            528
        """
        return _payload_bytes(self.encode, tuple(shape))


@functools.lru_cache(maxsize=4096)  # a model has many parts of few shapes
def _payload_bytes(encode: Callable[[jax.Array], Any], shape: tuple[int, ...]) -> int:
    payload = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))


def blocks(x: jax.Array) -> jax.Array:
    """Views a tensor as blocks.

    Trailing axes are merged until their product is a multiple of 256; if it never is, the flat tensor is padded with zeros.

    Args:
        x: Any shape.

    Returns:
        Shape `(*leading, number of blocks, 256)`.

    Example:
        >>> blocks(jnp.zeros((3, 512))).shape, blocks(jnp.zeros((3, 5))).shape
        ((3, 2, 256), (1, 256))
    """
    lead, size = _layout(x.shape)
    x = x.reshape(*lead, size)
    if size % BLOCK:
        x = jnp.pad(x, ((0, -size % BLOCK),))
    return x.reshape(*lead, -(-size // BLOCK), BLOCK)


def unblocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `blocks`.

    Args:
        x: Shape `(*leading, number of blocks, 256)`.
        shape: The tensor's own shape.

    Returns:
        The tensor, without padding.

    Example:
        >>> unblocks(blocks(jnp.arange(6.0).reshape(2, 3)), (2, 3)).tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    lead, size = _layout(shape)
    x = x.reshape(*lead, x.shape[-2] * BLOCK)
    return (x if size % BLOCK == 0 else x[:size]).reshape(shape)


def _layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    size = 1
    for axis in reversed(range(len(shape))):
        size *= shape[axis]
        if size % BLOCK == 0:
            return shape[:axis], size
    return (), size


def _step(x_blocks: jax.Array, largest_code: int) -> jax.Array:
    """The step of each block, `[..., 1]`: its largest magnitude (at most 2^127) over the largest code.

    16 bits of mantissa are kept, so that code times step is exact and a decoded block has the same step again.
    0 stands for a step too small to divide by.
    """
    amax = jnp.max(jnp.abs(x_blocks), axis=-1, keepdims=True)
    amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, jnp.float32(2.0**127)), amax)
    step = jax.lax.reduce_precision(amax / largest_code, exponent_bits=8, mantissa_bits=16)
    return jnp.where(step < jnp.finfo(jnp.float32).tiny, jnp.float32(0), step)


def _in_steps(x_blocks: jax.Array, step: jax.Array) -> jax.Array:
    return x_blocks / jnp.where(step == 0, jnp.float32(1), step)


def _encode_bfloat16(x: jax.Array) -> jax.Array:
    # The largest float32 numbers would round to infinity.
    top = jnp.float32(jnp.finfo(jnp.bfloat16).max)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x)
    # As integers, so that no compiler widens the collective to float32.
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _decode_bfloat16(payload: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.bitcast_convert_type(payload, jnp.bfloat16).astype(jnp.float32).reshape(shape)


def _encode_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = blocks(x)
    step = _step(x, 127)
    code = jnp.clip(jnp.round(_in_steps(x, step)), -127, 127)
    return code.astype(jnp.int8), step[..., 0]


def _decode_int8(payload: tuple[jax.Array, jax.Array], shape: tuple[int, ...]) -> jax.Array:
    code, step = payload
    return unblocks(code.astype(jnp.float32) * step[..., None], shape)


def _encode_e3m0(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = blocks(x)
    step = _step(x, 64)
    bits = jax.lax.bitcast_convert_type(_in_steps(x, step), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    # Half a unit added to the exponent rounds to the nearest power of two; below 0.75 zero is a neighbour too.
    exponent = ((magnitude + (1 << 22)) >> 23) - 126
    at_least_half = (magnitude >= 126 << 23).astype(jnp.int32)
    code = (jnp.clip(exponent, at_least_half, 7) | (bits >> 28 & 8)).astype(jnp.uint8)
    return code[..., : BLOCK // 2] | code[..., BLOCK // 2 :] << 4, step[..., 0]


def _decode_e3m0(payload: tuple[jax.Array, jax.Array], shape: tuple[int, ...]) -> jax.Array:
    byte, step = payload
    code = jnp.concatenate([byte & 15, byte >> 4], axis=-1).astype(jnp.int32)
    exponent = code & 7
    # 2^(exponent - 1) from its float32 bits: exact on every backend.
    power = jax.lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
    magnitude = jnp.where(exponent == 0, jnp.float32(0), power)
    return unblocks(jnp.where(code >= 8, -magnitude, magnitude) * step[..., None], shape)


_CODECS = {
    "float32": Codec(lambda x: x, lambda payload, shape: payload.reshape(shape), 32.0),
    "bfloat16": Codec(_encode_bfloat16, _decode_bfloat16, 16.0),
    "int8": Codec(_encode_int8, _decode_int8, 8 + 32 / BLOCK),
    "float4_e3m0": Codec(_encode_e3m0, _decode_e3m0, 4 + 32 / BLOCK),
}


def codec(name: str) -> Codec:
    """Returns a wire format by its name.

    `float32` sends the numbers as they are. `bfloat16` rounds to 8 bits of mantissa. `int8` is symmetric,
    :eq:`eq-int8`: a block with largest magnitude s holds the multiples of s / 127. `float4_e3m0` has a sign and three
    exponent bits, :eq:`eq-e3m0`: a block holds 0 and s 2^-6, s 2^-5, ..., s. Each number goes to the nearest of these.
    Numbers beyond the range of a format (bfloat16's own; 2^127 with a block) go to its end, blocks below 2^-119 to zero.
    A block with a NaN or an infinity decodes to numbers that are not finite. Decoding is exact, so that every machine
    gets the same bits, and what was decoded encodes to itself.

    Args:
        name: `"float32"`, `"bfloat16"`, `"int8"`, `"float4_e3m0"`, or a name given to `register`.

    Returns:
        The codec.

    Raises:
        ValueError: If the name is not known.

    Example:
        >>> wire = codec("float4_e3m0")
        >>> wire.decode(wire.encode(jnp.array([1.0, -0.4, 0.005, 0.0])), (4,)).tolist()
        [1.0, -0.5, 0.0, 0.0]

    References:
        :cite:t:`douillard2025streaming` (Section 2.4) sends E3M0 numbers, a type of
        :cite:t:`agrawal2024exmy`, and gives neither scale nor rounding; both are ours.
    """
    if name not in _CODECS:
        raise ValueError(
            f"wire_format {name!r} is not known; use one of {', '.join(_CODECS)}, or diloco.wire.register it"
        )
    return _CODECS[name]


def register(name: str, new: Codec) -> None:
    """Makes an own codec known under a name, for `DiLoCoConfig(wire_format=name)`.

    Args:
        name: A new name.
        new: The codec.

    Raises:
        ValueError: If the name is taken, or zeros do not decode to zeros of the same shape.

    Example:
        >>> half = Codec(lambda x: x.astype(jnp.float16), lambda p, shape: p.astype(jnp.float32).reshape(shape), 16.0)
        >>> register("float16", half)
        >>> codec("float16").payload_bytes((10,))
        20
    """
    if name in _CODECS and _CODECS[name] != new:
        raise ValueError(f"wire_format {name!r} is taken; choose another name")
    for shape in ((), (3,), (2, BLOCK)):
        zeros = np.asarray(new.decode(new.encode(jnp.zeros(shape)), shape))
        if zeros.shape != shape or zeros.dtype != np.float32 or np.any(zeros != 0):
            raise ValueError(
                f"codec {name!r} decodes zeros of shape {shape} to {zeros.dtype} {zeros.shape}; return float32 zeros"
            )
    _CODECS[name] = new


def compression(name: str) -> float:
    """How many times fewer bits than float32 a format sends for a large tensor.

    Example:
        >>> round(compression("float4_e3m0"), 2)
        7.76
    """
    return 32 / codec(name).bits_per_parameter
