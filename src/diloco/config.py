"""The algorithm's settings, checked once at construction."""

import dataclasses
from typing import Literal


FRAGMENT_PATTERNS = ("strided", "sequential", "balanced")
BAD_ISLAND_POLICIES = ("error", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoConfig:
    """Settings of DiLoCo and Streaming DiLoCo.

    `num_fragments=1, overlap_steps=0, mixing=0` is vanilla DiLoCo.

    Args:
        num_islands: M, islands that train apart; at least 1.
        sync_period: H, inner steps between two syncs of the same fragment; at least 1.
        num_fragments: P, fragments sent in turn; 1 to H.
        overlap_steps: V, inner steps between sending a fragment and applying it; 0 to H - 1.
        mixing: alpha, weight of the island's own parameters when a fragment is applied; in [0, 1).
        fragment_pattern: How layers go to fragments: `"strided"`, `"sequential"` or `"balanced"`.
        outer_learning_rate: eta of the outer Nesterov step; positive.
        outer_momentum: beta of the outer Nesterov step; in [0, 1).
        wire_format: What an island sends, a name known to `diloco.wire`.
        error_feedback: Whether an island adds what its last send lost to the next one.
        on_bad_island: What a send does with an island whose pseudo-gradient is not finite: `"error"` leaves
            the outer parameters untouched, `"skip"` leaves the island out of the mean. Both count it in
            `DiLoCoState.skipped`.
        layer_keys: Names in the parameter tree that hold the layers, see `diloco.partition`.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is outside its range; the message has the value, the limit and the remedy.

    Example:
        >>> DiLoCoConfig(num_islands=2, sync_period=100).num_fragments
        1
        >>> DiLoCoConfig(num_islands=2, sync_period=8, num_fragments=9)
        Traceback (most recent call last):
        ValueError: num_fragments 9 exceeds sync_period 8; use at most 8 fragments or a longer period

    References:
        :cite:t:`douillard2025streaming` (Algorithm 2); :cite:t:`douillard2023diloco` (Algorithm 1).
    """

    num_islands: int
    sync_period: int
    num_fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    fragment_pattern: Literal["strided", "sequential", "balanced"] = "strided"
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    wire_format: str = "float32"
    error_feedback: bool = False
    on_bad_island: Literal["error", "skip"] = "error"
    layer_keys: tuple[str, ...] = ("layers", "blocks")

    def __post_init__(self):
        """Checks every value."""
        for name in ("num_islands", "sync_period", "num_fragments", "overlap_steps"):
            _check_type(name, getattr(self, name), (int,), "a whole number")
        for name in ("mixing", "outer_learning_rate", "outer_momentum"):
            _check_type(name, getattr(self, name), (int, float), "a number")
        for name in ("fragment_pattern", "wire_format", "on_bad_island"):
            _check_type(name, getattr(self, name), (str,), "a string")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(
                f"error_feedback {self.error_feedback!r} is not a bool; use True or False"
            )

        keys = self.layer_keys
        if (
            not isinstance(keys, (tuple, list))
            or not keys
            or not all(isinstance(k, str) and k for k in keys)
        ):
            raise TypeError(
                f"layer_keys {keys!r} is not a tuple of names; use for example ('layers', 'blocks')"
            )
        object.__setattr__(self, "layer_keys", tuple(keys))

        m, h, p, v = self.num_islands, self.sync_period, self.num_fragments, self.overlap_steps
        if m < 1:
            raise ValueError(f"num_islands {m} is below 1; use 1 or more islands")
        if h < 1:
            raise ValueError(f"sync_period {h} is below 1; use 1 or more inner steps")
        if p < 1:
            raise ValueError(f"num_fragments {p} is below 1; use 1 for vanilla DiLoCo")
        if p > h:
            raise ValueError(
                f"num_fragments {p} exceeds sync_period {h}; use at most {h} fragments or a longer period"
            )
        if v < 0:
            raise ValueError(
                f"overlap_steps {v} is below 0; use 0 to apply a fragment at the step that sends it"
            )
        if v >= h:
            raise ValueError(f"overlap_steps {v} is not below sync_period {h}; use at most {h - 1}")
        if not 0 <= self.mixing < 1:
            raise ValueError(
                f"mixing {self.mixing} is outside [0, 1); use 0 to take the outer parameters as they are "
                "(1 would pay for traffic that nobody receives)"
            )
        if not 0 < self.outer_learning_rate < float("inf"):
            raise ValueError(
                f"outer_learning_rate {self.outer_learning_rate} is not positive and finite; use 0.4 to 1.0"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum {self.outer_momentum} is outside [0, 1); use 0.9, or 0 for none"
            )
        for name, known in (
            ("fragment_pattern", FRAGMENT_PATTERNS),
            ("on_bad_island", BAD_ISLAND_POLICIES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
        from diloco import wire  # here, since a wire format is the one value that users can add to

        wire.codec(self.wire_format)


def _check_type(name: str, value: object, types: tuple[type, ...], what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{name} {value!r} is a {type(value).__name__}; use {what}")
