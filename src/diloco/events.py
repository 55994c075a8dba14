r"""An event simulator of one run: islands with their own step times that share or join links.

It follows the schedule of `diloco.schedule` exchange by exchange, :eq:`eq-events`. A fragment's
exchange starts when every island has sent it and the link is free, occupies the link for its bytes,
and arrives one latency later; each island that reaches the step V inner steps after the send waits
there for it. Compute and exchange overlap, as in the runtime with one process an island.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco.links import check_positive
from diloco.schedule import Schedule


class Transfer(NamedTuple):
    """One fragment's way over the link, seconds from the start of the run."""

    fragment: int  # p
    step: int  # inner step that sent it
    sent: float  # when the last island sent it
    start: float  # when the link was free
    end: float  # when the last byte left
    arrival: float  # end plus latency


class Timeline(NamedTuple):
    """What happened in a run; its last `measured_steps` are what the shares are taken over."""

    utilization: np.ndarray  # (M,), share of the time each island computes
    clock: np.ndarray  # (M, steps + 1), end of each inner step with its wait, seconds
    stalls: np.ndarray  # (M, steps), wait at the end of each inner step, seconds
    transfers: list[Transfer]  # in order
    link_occupancy: float  # share of the time in which the link is busy
    measured_steps: int  # the first half of the run is left out

    @property
    def stall_seconds_per_step(self) -> np.ndarray:
        """Mean wait of each island in a measured step, shape `(M,)`, seconds."""
        return self.stalls[:, -self.measured_steps :].mean(1)


def simulate(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    *,
    step_seconds: float | Sequence[float] | np.ndarray,
    bytes_per_second: float | Sequence[float],
    latency_seconds: float = 0.0,
    shared: bool = False,
    periods: int = 8,
) -> Timeline:
    """Runs the schedule and records every wait.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        step_seconds: One inner step: one number, one an island `(M,)`, or one an island and step
            `(M, periods * H)`.
        bytes_per_second: Of each island's own link, one way: one number or `(M,)`; the slowest sets
            the pace of an exchange. Infinite for no limit.
        latency_seconds: From the last byte's departure to its arrival; the link is free meanwhile.
        shared: Whether all islands send through one link, whose rate is then `bytes_per_second`.
        periods: Of H steps to run; the first half is warm-up.

    Returns:
        The timeline.

    Raises:
        ValueError: If a number is not positive (the latency may be 0), or shapes do not agree.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> config = DiLoCoConfig(num_islands=2, sync_period=10)
        >>> run = simulate(schedule(config), [50.0], step_seconds=[1.0, 0.5], bytes_per_second=10.0)
        >>> run.utilization.round(3).tolist(), round(run.link_occupancy, 3)
        ([0.667, 0.333], 0.333)
    """
    steps = periods * schedule.sync_period
    times = np.asarray(step_seconds, float)
    times = times[:, None] if times.ndim == 1 else times
    times = np.broadcast_to(times, (times.shape[0] if times.ndim else 1, steps))
    rates = np.atleast_1d(np.asarray(bytes_per_second, float))
    for name, values in (("step_seconds", times), ("bytes_per_second", rates)):
        for value in np.unique(values[values < math.inf] if name == "bytes_per_second" else values):
            check_positive(name, float(value), name.split("_", 1)[1].replace("_per_", "/"))
    check_positive("latency_seconds", latency_seconds, "seconds", zero=True)
    if len(fragment_bytes) != schedule.num_fragments:
        raise ValueError(
            f"fragment_bytes has {len(fragment_bytes)} entries for {schedule.num_fragments} "
            "fragments; give one each"
        )
    load = len(times) if shared else 1  # every island's bytes pass a shared link
    clock, stalls = np.zeros((len(times), steps + 1)), np.zeros((len(times), steps))
    sent_at: dict[int, Transfer] = {}
    link = 0.0
    for t in range(1, steps + 1):
        now = clock[:, t - 1] + times[:, t - 1]
        for p in schedule.sends(t):
            start = max(link, float(now.max()))
            end = start + load * fragment_bytes[p] / float(rates.min())
            link = end
            sent_at[t] = Transfer(p, t, float(now.max()), start, end, end + latency_seconds)
        if schedule.applies(t):
            stalls[:, t - 1] = np.maximum(0.0, sent_at[t - schedule.overlap_steps].arrival - now)
        clock[:, t] = now + stalls[:, t - 1]
    half = steps // 2
    wall = clock[:, -1] - clock[:, half]
    transfers = list(sent_at.values())
    begin, finish = float(clock[:, half].max()), float(clock[:, -1].max())
    busy = sum(max(0.0, min(x.end, finish) - max(x.start, begin)) for x in transfers)
    return Timeline(
        utilization=times[:, half:].sum(1) / wall,
        clock=clock,
        stalls=stalls,
        transfers=transfers,
        link_occupancy=busy / (finish - begin),
        measured_steps=steps - half,
    )
