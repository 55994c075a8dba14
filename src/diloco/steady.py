r"""Long-run utilization of equal islands: the cycle of waits that sets the pace.

One period has a fixed order of events: the island's clock at each send and apply, and the link at
the end of each transfer. Each starts when what it waits for is done, so the time is a longest path,
and the period takes the largest ratio of seconds to periods over all cycles, :eq:`eq-cycle`. A
cycle of compute alone gives utilization 1; one of transfers alone, the average bandwidth; one of a
transfer and the compute outside its window, a burst that does not fit. It is what
`diloco.events.simulate` tends to, without a warm-up.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco.links import check_positive
from diloco.schedule import Schedule


class Cycle(NamedTuple):
    """The slowest cycle: `(seconds + bytes / rate) / periods` is the length of a period."""

    seconds: float  # of compute and latency
    bytes: float  # that one island sends
    periods: int  # it goes around in


class _Edge(NamedTuple):
    source: int  # node that is waited for
    seconds: float
    bytes: float
    periods: int  # 1 if the source is in the period before


def critical_cycle(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    *,
    step_seconds: float,
    bytes_per_second: float,
    latency_seconds: float = 0.0,
) -> Cycle:
    """Finds the cycle that sets the length of a period.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        step_seconds: One inner step.
        bytes_per_second: Of each island's link, one way; may be infinite.
        latency_seconds: From the last byte's departure to its arrival.

    Returns:
        The cycle.

    Raises:
        ValueError: If a number is not positive (the latency and a size may be 0), or there are not
            P sizes.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> config = DiLoCoConfig(num_islands=2, sync_period=10, overlap_steps=1)
        >>> critical_cycle(schedule(config), [50.0], step_seconds=1.0, bytes_per_second=10.0)
        Cycle(seconds=9.0, bytes=50.0, periods=1)
    """
    check_positive("step_seconds", step_seconds, "seconds")
    check_positive("latency_seconds", latency_seconds, "seconds", zero=True)
    if bytes_per_second != math.inf:
        check_positive("bytes_per_second", bytes_per_second, "bytes/s")
    if len(fragment_bytes) != schedule.num_fragments:
        raise ValueError(
            f"fragment_bytes has {len(fragment_bytes)} entries for {schedule.num_fragments} "
            "fragments; give one each"
        )
    for size in fragment_bytes:
        check_positive("fragment_bytes", size, "bytes", zero=True)
    into = _edges(schedule, fragment_bytes, step_seconds, latency_seconds)
    best = Cycle(schedule.sync_period * step_seconds, 0.0, 1)
    while True:
        better = _longer(into, best, 1 / bytes_per_second)
        if better is None:
            return best
        best = better


def _edges(
    schedule: Schedule, fragment_bytes: Sequence[float], step_seconds: float, latency: float
) -> list[list[_Edge]]:
    """What each event waits for; those of one period are in the order they happen in.

    The nodes are, for each mark of the schedule, the clock after it, and behind each send's the
    end of its transfer.
    """
    H, V = schedule.sync_period, schedule.overlap_steps
    marks = [(t, 0, p) for p, t in enumerate(schedule.offsets)]  # a send is before an apply
    marks += [((t + V) % H, 1, p) for p, t in enumerate(schedule.offsets)]
    marks.sort()
    clock, link, size = [], {}, 0
    for _, is_apply, p in marks:
        clock.append(size)
        if not is_apply:
            link[p] = size + 1
        size += 1 if is_apply else 2
    into: list[list[_Edge]] = []
    for k, (t, is_apply, p) in enumerate(marks):
        wrap = int(k == 0)
        passed = (t - marks[k - 1][0] + wrap * H) * step_seconds
        own = [_Edge(clock[k - 1], passed, 0.0, wrap)]
        if is_apply:
            own.append(_Edge(link[p], latency, 0.0, int(schedule.offsets[p] + V >= H)))
        into.append(own)
        if not is_apply:
            before = _Edge(link[(p - 1) % len(link)], 0.0, fragment_bytes[p], int(p == 0))
            into.append([_Edge(clock[k], 0.0, fragment_bytes[p], 0), before])
    return into


def _longer(into: list[list[_Edge]], best: Cycle, per_byte: float) -> Cycle | None:
    """A cycle with a larger ratio than `best`, by longest paths that charge its ratio a period."""
    pace = (best.seconds + best.bytes * per_byte) / best.periods
    reach = [0.0] * len(into)
    chosen: list[_Edge | None] = [None] * len(into)
    while True:
        changed = False
        for node, edges in enumerate(into):
            for edge in edges:
                value = reach[edge.source] + edge.seconds + edge.bytes * per_byte
                value -= edge.periods * pace
                if value > reach[node] + 1e-12 * pace:
                    reach[node], chosen[node], changed = value, edge, True
        if not changed:
            return None
        if (cycle := _find_cycle(chosen)) is not None:
            return cycle


def _find_cycle(chosen: list[_Edge | None]) -> Cycle | None:
    color = [0] * len(chosen)
    for root in range(len(chosen)):
        node = root
        while color[node] == 0 and (edge := chosen[node]) is not None:
            color[node], node = root + 1, edge.source
        if color[node] == root + 1 and chosen[node] is not None:
            edges, at = [], node
            while not edges or at != node:
                edge = chosen[at]
                assert edge is not None
                edges.append(edge)
                at = edge.source
            return Cycle(
                sum(e.seconds for e in edges),
                sum(e.bytes for e in edges),
                sum(e.periods for e in edges),
            )
    return None


def utilization(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    *,
    step_seconds: float,
    bytes_per_second: float,
    latency_seconds: float = 0.0,
) -> float:
    r"""Share of the time that an island computes, in the long run, :eq:`eq-cycle`.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        step_seconds: One inner step.
        bytes_per_second: Of each island's link, one way; may be infinite.
        latency_seconds: From the last byte's departure to its arrival.

    Returns:
        In (0, 1].

    Raises:
        ValueError: As `critical_cycle`.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> config = DiLoCoConfig(num_islands=2, sync_period=10)
        >>> s = schedule(config)
        >>> round(utilization(s, [50.0], step_seconds=1.0, bytes_per_second=10.0), 3)
        0.667
    """
    cycle = critical_cycle(
        schedule,
        fragment_bytes,
        step_seconds=step_seconds,
        bytes_per_second=bytes_per_second,
        latency_seconds=latency_seconds,
    )
    period = (cycle.seconds + cycle.bytes / bytes_per_second) / cycle.periods
    return schedule.sync_period * step_seconds / period


def bytes_per_second_for(
    schedule: Schedule,
    fragment_bytes: Sequence[float],
    target: float,
    *,
    step_seconds: float,
    latency_seconds: float = 0.0,
) -> float:
    """Slowest link with at least the target utilization.

    A period is the largest of functions that are linear in the seconds a byte takes, so Newton's
    method from a slow link ends at the exact answer.

    Args:
        schedule: H, P, V.
        fragment_bytes: Bytes one island sends for each of the P fragments.
        target: Utilization, in (0, 1]; with 1 it is `diloco.windows.zero_stall_bytes_per_second`.
        step_seconds: One inner step.
        latency_seconds: From the last byte's departure to its arrival.

    Returns:
        Bytes per second; infinite if no link reaches the target, 0 if nothing is sent.

    Raises:
        ValueError: If the target is not in (0, 1], and as `critical_cycle`.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> from diloco.schedule import schedule
        >>> s = schedule(DiLoCoConfig(num_islands=2, sync_period=10))
        >>> round(bytes_per_second_for(s, [50.0], 0.9, step_seconds=1.0), 3)
        45.0
    """
    if not 0 < target <= 1:
        raise ValueError(f"target {target:g} is outside (0, 1]; use a share such as 0.95")
    if not any(fragment_bytes):
        return 0.0
    period = schedule.sync_period * step_seconds / target
    rate = sum(fragment_bytes) / period / 2
    while True:
        cycle = critical_cycle(
            schedule,
            fragment_bytes,
            step_seconds=step_seconds,
            bytes_per_second=rate,
            latency_seconds=latency_seconds,
        )
        if (cycle.seconds + cycle.bytes / rate) / cycle.periods <= period * (1 + 1e-9):
            return rate
        room = cycle.periods * period - cycle.seconds
        if room <= 1e-12 * period:
            return math.inf
        rate = cycle.bytes / room
