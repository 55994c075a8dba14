"""Answers "will my link hide it?" for a model, a cluster and a configuration, before anything runs.

Every figure is simulated: it follows from the formulas of `diloco.links`, `diloco.windows` and
`diloco.steady`, the hardware's own figures and a stated utilization of its peak. Activations are
not counted; `diloco compile` has the compiler's count of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from diloco import links, steady
from diloco.config import DiLoCoConfig
from diloco.fragments import partition
from diloco.models import decoder
from diloco.schedule import schedule
from diloco.windows import Window, windows, zero_stall_bytes_per_second


TARGETS = (0.90, 0.95, 0.99)
"""Utilizations whose bandwidth a plan states."""

VERDICTS = {
    "alone": "One island exchanges nothing.",
    "hidden": "Every fragment is back within its window; no island waits.",
    "waits": "V = 0: the islands wait for every exchange.",
    "late": "{late} of {num_fragments} fragments are back after their window; the islands wait.",
    "overloaded": "The bytes of a period do not fit the period; the link sets the pace.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration costs. Rates are of one island, one way, unless they say otherwise."""

    diloco: DiLoCoConfig  # the algorithm
    chips_per_island: int  # over which its state is sharded
    hosts_per_island: int  # whose links together are the island's
    parameters: int  # of the model
    active_parameters: int  # that one token meets
    tokens_per_island_step: int  # tokens of one inner step of one island
    flops_per_island_step: float  # FLOPs of one inner step of one island
    model_flops_utilization: float  # share of the peak that the estimate of the time assumes
    step_seconds: float  # one inner step without waiting
    hbm_bytes: dict[str, float]  # of one chip, by use; activations not counted
    hbm_limit_bytes: float  # of one chip
    largest_fragment_bytes: float  # its payload on the wire
    mean_fragment_bytes: float  # mean payload on the wire
    largest_over_mean: float  # payloads, 1 if balanced
    sent_bytes_per_period: float  # that one island sends in H steps
    average_gbit_per_second: float  # over a period
    peak_gbit_per_second: float  # the largest fragment in V steps, or in one if V = 0
    peak_gbit_per_second_per_host: float  # the same, what one host sends
    zero_stall_gbit_per_second: float  # no island ever waits; infinite if V = 0
    needed_gbit_per_second: dict[str, float]  # for each of TARGETS; infinite if latency forbids it
    gbit_per_second: float  # of the link that is planned for
    latency_seconds: float  # of the link
    utilization: float  # share of the time the islands compute, in the long run
    stall_seconds_per_step: float  # mean wait of an inner step
    data_parallel_utilization: float  # of one all-reduce of float32 gradients a step, not hidden
    windows: tuple[Window, ...]  # one a fragment
    late_fragments: int  # whose window does not hold them
    verdict: str  # a key of VERDICTS
    changes: tuple[tuple[str, float], ...] = ()  # what to set instead, and its utilization

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return VERDICTS[self.verdict].format(
            late=self.late_fragments, num_fragments=self.diloco.num_fragments
        )


def fragment_payloads(model: decoder.DecoderConfig, config: DiLoCoConfig) -> list[int]:
    """Bytes on the wire of each fragment of a model, from its parameter shapes.

    Args:
        model: Sizes.
        config: P, pattern and wire format.

    Returns:
        One payload a fragment, scales and padding included.

    Raises:
        ValueError: If a fragment would be empty.
    """
    shapes = jax.eval_shape(lambda key: decoder.init(model, key), jax.random.key(0))
    return [f.wire_bytes for f in partition(shapes, config).fragments]


def check_count(name: str, value: int) -> None:
    """Refuses what is no whole number from 1 up.

    Args:
        name: Of the argument.
        value: To check.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} {value!r} is a {type(value).__name__}; use a whole number")
    if value < 1:
        raise ValueError(f"{name} {value} is below 1; use 1 or more")


def plan(
    model: decoder.DecoderConfig,
    hardware: links.Hardware,
    config: DiLoCoConfig,
    *,
    chips_per_island: int,
    sequence_length: int,
    sequences_per_island: int,
    model_flops_utilization: float = 0.4,
    gbit_per_second: float | None = None,
    latency_seconds: float = 0.0,
    suggest: bool = True,
) -> Plan:
    """Works out the plan.

    Args:
        model: Sizes.
        hardware: The chip and its host's network.
        config: The algorithm.
        chips_per_island: Over which an island's state and each fragment are sharded.
        sequence_length: Tokens.
        sequences_per_island: Of one inner step of one island.
        model_flops_utilization: Share of the peak FLOP/s that the model gets, in (0, 1].
        gbit_per_second: Of one island's link to the others, one way; None takes the sum over its
            hosts of the hardware's egress.
        latency_seconds: Of that link.
        suggest: Whether to look for changes if an island waits.

    Returns:
        The plan.

    Raises:
        TypeError: If a count is not a whole number.
        ValueError: If a value is out of its range, or a fragment would be empty.

    Example:
        >>> from diloco.models.decoder import DecoderConfig
        >>> tiny = DecoderConfig(vocab_size=256, num_layers=2, model_dim=32, num_heads=2,
        ...                      num_kv_heads=1, head_dim=16, mlp_dim=64)
        >>> config = DiLoCoConfig(num_islands=2, sync_period=10, overlap_steps=1)
        >>> laptop = links.load_hardware("laptop")
        >>> got = plan(tiny, laptop, config, chips_per_island=1, sequence_length=64,
        ...            sequences_per_island=8)
        >>> got.sentence
        'Every fragment is back within its window; no island waits.'
    """
    check_count("chips_per_island", chips_per_island)
    check_count("sequence_length", sequence_length)
    check_count("sequences_per_island", sequences_per_island)
    if not 0 < model_flops_utilization <= 1:
        raise ValueError(
            f"model_flops_utilization {model_flops_utilization:g} is outside (0, 1]; use 0.3 to 0.6"
        )
    hosts = math.ceil(chips_per_island / hardware.chips_per_host)
    if gbit_per_second is None:
        gbit_per_second = hosts * hardware.dcn_bytes_per_second * 8 / 1e9
    links.check_positive("gbit_per_second", gbit_per_second, "Gbit/s")
    links.check_positive("latency_seconds", latency_seconds, "seconds", zero=True)

    tokens = sequence_length * sequences_per_island
    flops = links.flops_per_token(model, sequence_length) * tokens
    peak_flops = chips_per_island * hardware.flops_per_second
    step_seconds = flops / (peak_flops * model_flops_utilization)
    payloads = fragment_payloads(model, config)
    factor = links.exchange_factor(config.num_islands, config.wire_format)
    sent = [factor * b for b in payloads]
    when, rate = schedule(config), gbit_per_second * 1e9 / 8
    timing = {"step_seconds": step_seconds, "latency_seconds": latency_seconds}
    table = windows(when, sent, bytes_per_second=rate, **timing)
    used = steady.utilization(when, sent, bytes_per_second=rate, **timing)
    late = sum(w.slack_seconds < 0 for w in table)
    parameters = decoder.num_parameters(model)
    all_reduce = links.exchange_bytes(parameters, config.num_islands, "float32")
    to_gbit = 8 / 1e9
    peak = max(sent) / (max(config.overlap_steps, 1) * step_seconds) * to_gbit
    found = Plan(
        diloco=config,
        chips_per_island=chips_per_island,
        hosts_per_island=hosts,
        parameters=parameters,
        active_parameters=decoder.active_parameters(model),
        tokens_per_island_step=tokens,
        flops_per_island_step=flops,
        model_flops_utilization=model_flops_utilization,
        step_seconds=step_seconds,
        hbm_bytes=_hbm_bytes(model, config, parameters, chips_per_island),
        hbm_limit_bytes=hardware.hbm_bytes,
        largest_fragment_bytes=max(payloads),
        mean_fragment_bytes=sum(payloads) / len(payloads),
        largest_over_mean=max(payloads) * len(payloads) / sum(payloads),
        sent_bytes_per_period=sum(sent),
        average_gbit_per_second=sum(sent) / (config.sync_period * step_seconds) * to_gbit,
        peak_gbit_per_second=peak,
        peak_gbit_per_second_per_host=peak / hosts,
        zero_stall_gbit_per_second=zero_stall_bytes_per_second(when, sent, **timing) * to_gbit,
        needed_gbit_per_second={
            f"{target:g}": steady.bytes_per_second_for(when, sent, target, **timing) * to_gbit
            for target in TARGETS
        },
        gbit_per_second=gbit_per_second,
        latency_seconds=latency_seconds,
        utilization=used,
        stall_seconds_per_step=step_seconds * (1 / used - 1),
        data_parallel_utilization=step_seconds
        / (step_seconds + all_reduce / rate + (latency_seconds if all_reduce else 0.0)),
        windows=tuple(table),
        late_fragments=late,
        verdict=_verdict(config, used, late, sum(sent), rate * config.sync_period * step_seconds),
    )
    if not suggest or found.verdict in ("alone", "hidden"):
        return found
    again = functools.partial(
        plan,
        model,
        hardware,
        chips_per_island=chips_per_island,
        sequence_length=sequence_length,
        sequences_per_island=sequences_per_island,
        model_flops_utilization=model_flops_utilization,
        gbit_per_second=gbit_per_second,
        latency_seconds=latency_seconds,
        suggest=False,
    )
    return dataclasses.replace(found, changes=_changes(model, config, found, again))


def _verdict(config: DiLoCoConfig, used: float, late: int, sent: float, room: float) -> str:
    if config.num_islands == 1:
        return "alone"
    if sent > room:
        return "overloaded"
    if config.overlap_steps == 0:
        return "waits"
    return "late" if late else "hidden"


def _hbm_bytes(
    model: decoder.DecoderConfig, config: DiLoCoConfig, parameters: int, chips: int
) -> dict[str, float]:
    """State of one chip, sharded over the island: AdamW's two moments have the parameters' type."""
    inner = 2 if model.param_dtype == "bfloat16" else 4
    one = parameters / chips
    return {
        "inner_parameters": inner * one,
        "inner_optimizer": 2 * inner * one,
        "outer_parameters": 4 * one,
        "outer_momentum": 4 * one,
        "residual": 4 * one if config.error_feedback else 0.0,
    }


def _changes(
    model: decoder.DecoderConfig, config: DiLoCoConfig, now: Plan, again: Callable[..., Plan]
) -> tuple[tuple[str, float], ...]:
    """Changes that raise the utilization by over 0.1 %, each planned for the same link."""
    H, V, rate = config.sync_period, config.overlap_steps, now.gbit_per_second * 1e9 / 8
    sent = [w.bytes for w in now.windows]
    timing = {"step_seconds": now.step_seconds, "latency_seconds": now.latency_seconds}

    def hides(v: int) -> bool:
        when = schedule(dataclasses.replace(config, overlap_steps=v))
        return zero_stall_bytes_per_second(when, sent, **timing) <= rate

    longer = range(V + 1, min(H, 6))  # beyond 5 steps nothing was tried
    tries: list[dict[str, Any]] = []
    if longer:
        tries.append({"overlap_steps": next((v for v in longer if hides(v)), longer[-1])})
    if config.num_fragments == 1 and H > 1:
        few = min(H, 1 + max(1, model.num_layers // 3))
        tries.append({"num_fragments": few, "fragment_pattern": "balanced", "overlap_steps": 1})
    elif config.fragment_pattern != "balanced":
        tries.append({"fragment_pattern": "balanced"})
    if config.wire_format != "float4_e3m0":
        tries.append({"wire_format": "float4_e3m0"})
    tries += [{"sync_period": k * H} for k in (2, 4) if k * H <= 500]  # the longest that was used
    found = []
    for change in tries:
        used = again(config=dataclasses.replace(config, **change)).utilization
        if used > now.utilization + 1e-3:
            found.append((", ".join(f"{k} = {v}" for k, v in change.items()), used))
    return tuple(found)
