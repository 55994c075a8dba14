r"""Zero-stall conditions: each fragment's burst against its own window of V inner steps.

Fragment p is sent after step t_p = floor(p H / P) of every period and must be back V steps later.
All of them share one link, first in, first out. An average says whether the link keeps up over a
period; the windows say whether anyone waits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco.links import check_positive
from diloco.schedule import Schedule


class Window(NamedTuple):
    """One fragment's exchange in one period, when no island waits."""

    fragment: int  # p
    offset: int  # inner steps from the start of the period to its send
    bytes: float  # that one island sends for it
    window_seconds: float  # V steps
    gap_seconds: float  # to the next send of any fragment
    own_bytes_per_second: float  # fits it into its window, alone; infinite if V = 0
    slack_seconds: float  # from its arrival, queue included, to the end of its window


def windows(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    *,
    step_seconds: float,
    bytes_per_second: float,
    latency_seconds: float = 0.0,
) -> list[Window]:
    r"""Charges each fragment's bytes to its own window, :eq:`eq-window`.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        step_seconds: One inner step.
        bytes_per_second: Of the link, one way.
        latency_seconds: From the last byte's departure to its arrival; the link is free meanwhile.

    Returns:
        One window a fragment. With V = 0 the island waits for each send: the window is empty and
        the slack is minus what it waits. If the period's bytes do not fit the period every slack is
        minus infinity.

    Raises:
        ValueError: If a number is not positive (the latency may be 0) or there are not P sizes.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4, num_fragments=2, overlap_steps=1)
        >>> table = windows(schedule(config), [5.0, 20.0], step_seconds=1.0, bytes_per_second=10.0)
        >>> [w.slack_seconds for w in table]
        [0.5, -1.0]
    """
    _check(schedule, fragment_bytes, step_seconds, latency_seconds)
    check_positive("bytes_per_second", bytes_per_second, "bytes/s")
    period, offsets = schedule.sync_period * step_seconds, schedule.offsets
    length = schedule.overlap_steps * step_seconds
    fits = sum(fragment_bytes) <= bytes_per_second * period
    finish, slack = 0.0, [-math.inf] * len(offsets)
    for k in range(2 * len(offsets) if fits else 0):  # the second period starts behind the first
        cycle, p = divmod(k, len(offsets))
        sent = cycle * period + offsets[p] * step_seconds
        finish = max(finish, sent) + fragment_bytes[p] / bytes_per_second
        slack[p] = sent + length - latency_seconds - finish
    own = length - latency_seconds
    return [
        Window(
            fragment=p,
            offset=offset,
            bytes=fragment_bytes[p],
            window_seconds=length,
            gap_seconds=((*offsets, schedule.sync_period)[p + 1] - offset) * step_seconds,
            own_bytes_per_second=fragment_bytes[p] / own if own > 0 else math.inf,
            slack_seconds=slack[p],
        )
        for p, offset in enumerate(offsets)
    ]


def zero_stall_bytes_per_second(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    *,
    step_seconds: float,
    latency_seconds: float = 0.0,
) -> float:
    r"""Slowest link with which no island ever waits, :eq:`eq-zero-stall`.

    The fragments sent from i to j go through the link back to back, from the send of i to the end
    of j's window at the latest. The worst such run counts, and so does the average over a period.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        step_seconds: One inner step.
        latency_seconds: From the last byte's departure to its arrival.

    Returns:
        Bytes per second; infinite if V = 0 or the latency fills the window, and 0 if nothing is
        sent.

    Raises:
        ValueError: As `windows`.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4, num_fragments=2, overlap_steps=1)
        >>> zero_stall_bytes_per_second(schedule(config), [5.0, 20.0], step_seconds=1.0)
        20.0
    """
    _check(schedule, fragment_bytes, step_seconds, latency_seconds)
    if not any(fragment_bytes):
        return 0.0
    period, count = schedule.sync_period * step_seconds, schedule.num_fragments
    own = schedule.overlap_steps * step_seconds - latency_seconds
    if own <= 0:
        return math.inf
    worst = sum(fragment_bytes) / period
    for first in range(count):
        total = 0.0
        for j in range(first, first + count):
            cycle, p = divmod(j, count)
            total += fragment_bytes[p]
            span = schedule.offsets[p] - schedule.offsets[first]
            worst = max(worst, total / (cycle * period + span * step_seconds + own))
    return worst


def _check(
    schedule: Schedule, fragment_bytes: Sequence[float], step_seconds: float, latency: float
) -> None:
    check_positive("step_seconds", step_seconds, "seconds")
    check_positive("latency_seconds", latency, "seconds", zero=True)
    for size in fragment_bytes:
        check_positive("fragment_bytes", size, "bytes", zero=True)
    if len(fragment_bytes) != schedule.num_fragments:
        raise ValueError(
            f"fragment_bytes has {len(fragment_bytes)} entries for {schedule.num_fragments} "
            "fragments; give one each"
        )
