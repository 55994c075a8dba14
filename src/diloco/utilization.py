r"""The layer-level simulator behind the published table of bandwidths, :eq:`eq-layer-dag`.

One inner step of an L-layer model is a chain of 3 L - 1 equal compute nodes: L forward, then from
the top layer down one for the parameters' gradient and one for the activations' (none below layer
0). With L reductions that makes the published 4 L - 1 nodes. A layer's reduction is released by its
parameter node, passes one first-in first-out link, and is waited for by the same layer's forward
node V + 1 steps later. The paper gives the graph, the step times and the layers; one link, no
latency and `PAYLOAD_FRACTION` are our reading, the same for all 75 entries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


GRID_GBIT_PER_SECOND = np.logspace(-1, 3, 50)
"""The bandwidths that were tried: every published entry is one of these, rounded to 0.1."""

PAYLOAD_FRACTION = 0.853
"""Bits on the link over bits per parameter times parameters; our one constant.

The paper does not say what it counts. 0.84 to 0.855 give 65 to 67 of the 75 entries exactly, and
the others one grid step off; 1.0 gives 15.
"""

Sends = tuple[int, dict[int, list[int]]]
"""A period in inner steps, and the layers sent after each step of it."""


def layer_sends(num_layers: int, sync_period: int = 1, num_fragments: int = 1) -> Sends:
    """Which layers each step of a period sends: layer l is in fragment l mod P.

    Args:
        num_layers: L; embeddings are not in the model.
        sync_period: H; with one fragment, 1 is data parallel.
        num_fragments: P.

    Returns:
        The period, and for each step of it (0 is the period's end) the layers sent.

    Example:
        >>> layer_sends(4, sync_period=10, num_fragments=2)
        (10, {0: [0, 2], 5: [1, 3]})
    """
    return sync_period, {
        p * sync_period // num_fragments: list(range(p, num_layers, num_fragments))
        for p in range(num_fragments)
    }


def layer_utilization(
    num_layers: int,
    step_seconds: float,
    sends: Sends,
    bits_per_layer: float,
    overlap_steps: int,
    bits_per_second: np.ndarray,
    periods: int = 4,
) -> np.ndarray:
    """Share of the time in which an island computes, at many bandwidths at once.

    Args:
        num_layers: L.
        step_seconds: T, one inner step without waiting.
        sends: From `layer_sends`.
        bits_per_layer: Of one layer's reduction on the link.
        overlap_steps: V, steps between the one that sends a layer and the last that does without.
        bits_per_second: Of the link, shape `(K,)`.
        periods: Measured, after as many that are not.

    Returns:
        Shape `(K,)`, in (0, 1].

    Example:
        >>> sends = layer_sends(1)  # data parallel, one layer: nothing overlaps
        >>> layer_utilization(1, 1.0, sends, 8.0, 0, np.array([8.0, 24.0])).tolist()
        [0.5, 0.75]
    """
    L, node = num_layers, step_seconds / (3 * num_layers - 1)
    period, layers = sends
    half = max(period * periods, 20)  # inner steps before, and in, the measurement
    clock, link, start = (np.zeros_like(bits_per_second) for _ in range(3))
    waits: dict[int, list[tuple[int, np.ndarray]]] = {}
    for step in range(1, 2 * half + 1):
        forward_end = clock + L * node
        for l, ready in waits.pop(step, []):
            forward_end = np.maximum(forward_end, ready + (L - l) * node)
        for l in reversed(layers.get(step % period, [])):
            released = forward_end + (2 * (L - 1 - l) + 1) * node
            link = np.maximum(link, released) + bits_per_layer / bits_per_second
            waits.setdefault(step + overlap_steps + 1, []).append((l, link))
        clock = forward_end + (2 * L - 1) * node
        if step == half:
            start = clock
    return half * step_seconds / (clock - start)


def grid_index(gbit_per_second: float) -> int:
    """Position of a published entry on the grid, the nearest in ratio.

    Example:
        >>> grid_index(86.8)
        36
    """
    return int(np.argmin(np.abs(np.log(GRID_GBIT_PER_SECOND / gbit_per_second))))


def simulate_table(
    published: Mapping[str, Any], payload_fraction: float = PAYLOAD_FRACTION
) -> list[dict[str, Any]]:
    """Simulates every entry of the published table.

    Args:
        published: `docs/data/streaming_table4.json`: `targets`, and for each of `models` its
            `num_layers`, `step_seconds`, `parameters`, `num_fragments` and `gbit_per_second` by
            method; `methods` has each method's H (null is 1), whether it streams, V and bits.
        payload_fraction: Bits on the link over bits per parameter times parameters.

    Returns:
        One dict an entry: `model`, `method`, `target`, `published` and `simulated` (Gbit/s, the
        first grid point that reaches the target), and `steps`, the grid steps between the two.

    References:
        :cite:t:`douillard2025streaming` (Table 4, Section 3.1).
    """
    entries = []
    for name, model in published["models"].items():
        for method, how in published["methods"].items():
            fragments = model["num_fragments"] if how["streams"] else 1
            used = layer_utilization(
                model["num_layers"],
                model["step_seconds"],
                layer_sends(model["num_layers"], how["sync_period"], fragments),
                payload_fraction * how["bits"] * model["parameters"] / model["num_layers"],
                how["overlap_steps"],
                GRID_GBIT_PER_SECOND * 1e9,
                periods=2,
            )
            rows = zip(published["targets"], model["gbit_per_second"][method], strict=True)
            for target, printed in rows:
                index = first_reaching(used, target)
                entries.append(
                    {
                        "model": name,
                        "method": method,
                        "target": target,
                        "published": printed,
                        "simulated": float(GRID_GBIT_PER_SECOND[index]),
                        "steps": index - grid_index(printed),
                    }
                )
    return entries


def first_reaching(utilization: Sequence[float] | np.ndarray, target: float) -> int:
    """First position with at least the target.

    Args:
        utilization: Shares, at rising bandwidths.
        target: A share.

    Returns:
        The position; the length if there is none.

    Example:
        >>> first_reaching([0.2, 0.6, 0.9], 0.5)
        1
    """
    reached = np.flatnonzero(np.asarray(utilization) >= target)
    return int(reached[0]) if reached.size else len(utilization)
