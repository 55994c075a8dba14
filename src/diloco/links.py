r"""Arithmetic intensity: FLOPs of a model against bytes on the links between islands.

A byte count here is what **one island sends** (egress); an island receives as much. A rate is for
one direction of a link. Divide by hosts or chips for what one of them sends: a fragment is sharded
over all chips of its island.
"""

import dataclasses
import math

from diloco import conf, wire
from diloco.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of chip and the network of its hosts.

    Raises:
        ValueError: If a figure is not positive.
    """

    title: str  # for a heading
    flops_per_second: float  # peak of one chip, FLOP/s, bf16 on a TPU
    hbm_bytes: float  # of one chip, bytes
    hbm_bytes_per_second: float  # of one chip, bytes/s
    chips_per_host: int  # chips that share one host's network
    dcn_bytes_per_second: float  # egress of one host between slices, bytes/s
    ici_bytes_per_second: float = 0.0  # one inter-chip link, one way, bytes/s; 0 for none
    sources: tuple[str, ...] = ()  # where the figures come from

    def __post_init__(self):
        """Checks every figure."""
        for field in dataclasses.fields(self):
            if field.name not in ("title", "sources", "ici_bytes_per_second"):
                check_positive(field.name, getattr(self, field.name), "a figure")


def load_hardware(name: str) -> Hardware:
    """Reads an entry of `conf/hardware`, or a TOML file by its path.

    Args:
        name: An entry, such as `"tpu-v5p"`, or a path that ends in `.toml`.

    Returns:
        The hardware.

    Raises:
        ValueError: If there is no such entry or file, or a key is unknown or missing.

    Example:
        >>> load_hardware("tpu-v5p").chips_per_host
        4
        >>> load_hardware("tpu-v5")
        Traceback (most recent call last):
        ValueError: no hardware entry 'tpu-v5'; did you mean tpu-v5p?
    """
    table = conf.load("hardware", name)
    table["sources"] = tuple(table.get("sources", ()))
    return conf.build(Hardware, table, f"hardware {name}")


def check_positive(name: str, value: float, what: str, *, zero: bool = False) -> None:
    """Refuses a value that is not a finite number above 0.

    Args:
        name: Of the argument.
        value: To check.
        what: What to use instead, such as `"Gbit/s"`.
        zero: Whether 0 is allowed.

    Raises:
        ValueError: If `value` is NaN, infinite, negative, or 0 without `zero`.

    Example:
        >>> check_positive("gbit_per_second", -1, "Gbit/s")
        Traceback (most recent call last):
        ValueError: gbit_per_second -1 is not positive and finite; use Gbit/s above 0
    """
    if not (0 < value < math.inf or (zero and value == 0)):
        sign, limit = ("negative or not", "from 0 up") if zero else ("not positive and", "above 0")
        raise ValueError(f"{name} {value:g} is {sign} finite; use {what} {limit}")


def flops_per_token(model: DecoderConfig, sequence_length: int) -> float:
    r"""Training FLOPs of one token, :eq:`eq-flops`.

    Three times the forward pass: 2 FLOPs for each parameter of a matrix product that the token
    meets (with experts, the router and the ones it is sent to; the embedding is a lookup), and for
    attention 2 S a layer and query feature, half of the 4 S being masked.

    Args:
        model: Sizes.
        sequence_length: S, tokens.

    Returns:
        FLOPs. Norms, rotary positions, softmax and recomputation (`remat`) are not counted.

    Example:
        >>> from diloco.models.decoder import DecoderConfig
        >>> tiny = DecoderConfig(vocab_size=256, num_layers=2, model_dim=32, num_heads=2,
        ...                      num_kv_heads=1, head_dim=16, mlp_dim=64)
        >>> flops_per_token(tiny, 128)
        208896.0
    """
    c = model
    attention = c.model_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    width = c.experts_per_token * c.expert_dim if c.num_experts else c.mlp_dim
    mlp = 3 * c.model_dim * width + c.model_dim * c.num_experts
    matrices = c.num_layers * (attention + mlp) + c.model_dim * c.vocab_size
    scores = c.num_layers * c.num_heads * c.head_dim * sequence_length
    return 6.0 * matrices + 6.0 * scores


def exchange_factor(num_islands: int, wire_format: str) -> float:
    r"""Bytes one island sends over bytes of its payload, :eq:`eq-exchange`.

    `float32` goes through a ring all-reduce, 2 (M - 1) / M. The other formats cannot be added up on
    the way: every island needs every payload, and an all-gather sends M - 1 of them.

    Args:
        num_islands: M.
        wire_format: A name known to `diloco.wire.codec`.

    Returns:
        The factor; 0 for one island.

    Example:
        >>> exchange_factor(4, "float32"), exchange_factor(4, "float4_e3m0")
        (1.5, 3.0)
    """
    return 2 * (num_islands - 1) / num_islands if wire_format == "float32" else num_islands - 1.0


def exchange_bytes(parameters: float, num_islands: int, wire_format: str) -> float:
    """Bytes one island sends to exchange so many parameters once, :eq:`eq-exchange`.

    Args:
        parameters: Of a fragment, or of the model.
        num_islands: M.
        wire_format: A name known to `diloco.wire.codec`; scales are counted, padding is not.

    Returns:
        Bytes. Over the island's hosts or chips it is what one host or chip sends.

    Example:
        >>> exchange_bytes(256, 2, "float4_e3m0")  # 128 bytes of codes and a scale
        132.0
    """
    payload = parameters * wire.codec(wire_format).bits_per_parameter / 8
    return payload * exchange_factor(num_islands, wire_format)


def model_intensity(island_step_flops: float, bytes_per_sync: float, steps: int = 1) -> float:
    r"""FLOPs an island computes for each byte it sends, :eq:`eq-intensity`.

    With the model's bytes it is the average: data parallel for 1 step, DiLoCo of either kind for H
    steps. With a fragment's bytes and V steps it is that of the fragment's window,
    :eq:`eq-window-intensity`.

    Args:
        island_step_flops: FLOPs of one inner step of one island.
        bytes_per_sync: Bytes it sends in that time.
        steps: Inner steps that the bytes may take.

    Returns:
        FLOPs per byte; infinite if nothing is sent.

    Example:
        >>> model_intensity(6e9, 4e3), model_intensity(6e9, 4e3, steps=100)
        (1500000.0, 150000000.0)

    References:
        :cite:t:`maxtext2026` states the factor H for the average.
    """
    return island_step_flops * steps / bytes_per_sync if bytes_per_sync else math.inf


def hardware_intensity(
    flops_per_second: float, bytes_per_second: float, model_flops_utilization: float = 1.0
) -> float:
    r"""FLOPs to do for each byte sent, so that a link is not the bottleneck, :eq:`eq-ridge`.

    Args:
        flops_per_second: Peak of what shares the link: one chip (ICI), one host (DCN), one island
            (WAN).
        bytes_per_second: Of the link, one way.
        model_flops_utilization: Share of the peak that the model gets without the link.

    Returns:
        FLOPs per byte.

    Example:
        >>> v5p = load_hardware("tpu-v5p")
        >>> hardware_intensity(v5p.chips_per_host * v5p.flops_per_second, v5p.dcn_bytes_per_second)
        146880.0

    References:
        :cite:t:`austin2025scaling`, which counts ingress and egress together and so gets half.
    """
    check_positive("bytes_per_second", bytes_per_second, "bytes/s")
    return flops_per_second * model_flops_utilization / bytes_per_second


def roofline(intensity: float, ridge: float) -> float:
    r"""Largest share of the compute rate with all traffic hidden, :eq:`eq-roofline`.

    Args:
        intensity: Of the model, FLOPs per byte.
        ridge: Of the hardware, FLOPs per byte.

    Returns:
        A share in [0, 1].

    Example:
        >>> roofline(2e5, 1e5), roofline(5e4, 1e5)
        (1.0, 0.5)
    """
    return min(1.0, intensity / ridge)


def blocking_roofline(intensity: float, ridge: float) -> float:
    r"""Share of the compute rate when nothing is hidden (V = 0), :eq:`eq-blocking`.

    Args:
        intensity: Of the model, FLOPs per byte.
        ridge: Of the hardware, FLOPs per byte.

    Returns:
        A share in [0, 1).

    Example:
        >>> blocking_roofline(1e5, 1e5)
        0.5
    """
    return 1.0 / (1.0 + ridge / intensity)


def largest_num_islands(
    *,
    batch_tokens: float,
    token_flops: float,
    parameters: float,
    ridge: float,
    sync_period: int = 1,
    wire_format: str = "float32",
) -> int:
    r"""Most islands that can share a batch before the link binds, :eq:`eq-most-islands`.

    An island's share of the batch shrinks with M while its bytes do not, so the average intensity
    falls as M grows.

    Args:
        batch_tokens: Tokens of one step over all islands.
        token_flops: Training FLOPs of a token.
        parameters: Of the model.
        ridge: Intensity of the hardware that shares the link, FLOPs per byte. Every host of an
            island has the same link and the same share of FLOPs and bytes, so the ridge of one host
            is the island's.
        sync_period: H; 1 is data parallel.
        wire_format: A name known to `diloco.wire.codec`.

    Returns:
        M, at least 1. It says nothing of bursts.

    Example:
        >>> largest_num_islands(batch_tokens=2**20, token_flops=6e9, parameters=1e9, ridge=146_880)
        6
    """
    one_payload = parameters * wire.codec(wire_format).bits_per_parameter / 8
    budget = token_flops * batch_tokens * sync_period / (ridge * one_payload)
    if wire_format == "float32":
        return 1 + math.floor(budget / 2)
    return max(1, math.floor((1 + math.sqrt(1 + 4 * budget)) / 2))
