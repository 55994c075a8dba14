"""The algorithm as plain loops in float64: the executable definition, written from the paper.

Fragments are given as lists of flat positions, islands hold one flat vector each.
"""

import numpy as np


def run(
    theta,  # [N] start of every island and of the outer copy
    gradient,  # gradient(m, t, theta_m) -> [N]
    fragments,  # P lists of positions, every position once
    num_islands,
    sync_period,
    overlap_steps,
    mixing,
    outer_learning_rate,
    outer_momentum,
    steps,
    inner_learning_rate=0.1,
    adamw=None,  # (beta1, beta2, eps, weight decay), or None for SGD
    flush=False,
):
    """Returns the outer copy, its momentum, the islands `[M, N]` and the events."""
    M, H, V, P = num_islands, sync_period, overlap_steps, len(fragments)
    outer = np.array(theta, np.float64)
    momentum = np.zeros_like(outer)
    island = np.stack([outer] * M)
    first, second = np.zeros_like(island), np.zeros_like(island)
    offset = [p * H // P for p in range(P)]
    events = []

    def send(p):
        for i in fragments[p]:
            delta = np.mean([outer[i] - island[m, i] for m in range(M)])
            momentum[i] = outer_momentum * momentum[i] + delta
            outer[i] -= outer_learning_rate * (delta + outer_momentum * momentum[i])

    def apply(p):
        for i in fragments[p]:
            for m in range(M):
                island[m, i] = mixing * island[m, i] + (1 - mixing) * outer[i]

    for t in range(1, steps + 1):
        for m in range(M):
            g = gradient(m, t, island[m])
            if adamw is None:
                island[m] -= inner_learning_rate * g
            else:
                beta1, beta2, eps, decay = adamw
                first[m] = beta1 * first[m] + (1 - beta1) * g
                second[m] = beta2 * second[m] + (1 - beta2) * g**2
                update = (first[m] / (1 - beta1**t)) / (np.sqrt(second[m] / (1 - beta2**t)) + eps)
                island[m] -= inner_learning_rate * (update + decay * island[m])
        for p in range(P):
            if (t - offset[p]) % H == 0:
                send(p)
                events.append((t, "send", p))
        for p in range(P):
            if t - V > 0 and (t - V - offset[p]) % H == 0:
                apply(p)
                events.append((t, "apply", p))
    if flush:
        for p in range(P):
            send(p)
        for p in range(P):
            apply(p)
    return outer, momentum, island, events
