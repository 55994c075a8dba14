"""When each fragment is sent and applied: pure functions of the step."""

import dataclasses

from diloco.config import DiLoCoConfig


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The exchanges of a run, :eq:`eq-send` and :eq:`eq-apply`.

    Fragment p has offset floor(p H / P) and is sent at every step t >= 1 with (t - offset) mod H = 0. The offsets are
    all different, so a step sends at most one fragment and applies at most one.

    Attributes:
        sync_period: H, inner steps.
        num_fragments: P.
        overlap_steps: V, inner steps.

    Example:
        >>> s = schedule(DiLoCoConfig(num_islands=2, sync_period=10, num_fragments=4, overlap_steps=1))
        >>> s.offsets
        (0, 2, 5, 7)
        >>> s.sends(12), s.applies(13), s.sends(13)
        ((1,), (1,), ())
    """

    sync_period: int
    num_fragments: int
    overlap_steps: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each fragment, inner steps."""
        return tuple(p * self.sync_period // self.num_fragments for p in range(self.num_fragments))

    def sends(self, t: int) -> tuple[int, ...]:
        """Fragments sent after inner step t, :eq:`eq-send`.

        Args:
            t: Completed inner steps; none is sent at 0.

        Returns:
            One fragment number or none.
        """
        offset = t % self.sync_period
        p = -(-offset * self.num_fragments // self.sync_period)
        due = (
            t > 0
            and p < self.num_fragments
            and p * self.sync_period // self.num_fragments == offset
        )
        return (p,) if due else ()

    def applies(self, t: int) -> tuple[int, ...]:
        """Fragments applied after inner step t: those sent V steps earlier, :eq:`eq-apply`."""
        return self.sends(t - self.overlap_steps)

    def events(self, steps: int) -> list[tuple[int, str, int]]:
        """All exchanges of a run in order, `(step, "send" | "apply", fragment)`.

        Args:
            steps: Inner steps of the run.

        Example:
            >>> schedule(DiLoCoConfig(num_islands=2, sync_period=4)).events(4)
            [(4, 'send', 0), (4, 'apply', 0)]
        """
        return [
            (t, kind, p)
            for t in range(1, steps + 1)
            for kind, fragments in (("send", self.sends(t)), ("apply", self.applies(t)))
            for p in fragments
        ]

    def table(self) -> str:
        """One line a fragment: offset, first send, first apply, then every H steps (Markdown)."""
        lines = [
            "| fragment | offset | first sent at t | first applied at t | then every |",
            "|---|---|---|---|---|",
        ]
        for p, offset in enumerate(self.offsets):
            first = offset or self.sync_period
            lines.append(
                f"| {p} | {offset} | {first} | {first + self.overlap_steps} | {self.sync_period} |"
            )
        return "\n".join(lines)

    def __str__(self):
        return self.table()

    def send_table(self) -> list[int]:
        """Fragment sent at each offset 0 .. H - 1, or P where none is: what the compiled step looks up."""
        table = [self.num_fragments] * self.sync_period
        for p, offset in enumerate(self.offsets):
            table[offset] = p
        return table


def schedule(config: DiLoCoConfig) -> Schedule:
    """Returns the schedule of a configuration.

    Args:
        config: The algorithm.

    Returns:
        `.sends(t)`, `.applies(t)`, `.offsets`, `.events(steps)`, and a table when printed.

    Example:
        >>> schedule(DiLoCoConfig(num_islands=2, sync_period=100)).sends(100)
        (0,)

    References:
        :cite:t:`douillard2025streaming` (Algorithm 2). Its worked example starts fragments p >= 1 one period later.
    """
    return Schedule(config.sync_period, config.num_fragments, config.overlap_steps)
