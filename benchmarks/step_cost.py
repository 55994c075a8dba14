"""What the DiLoCo step costs beside the bare inner step: program, compile time, memory, time.

Both sides of every ratio are taken in this one run. `python benchmarks/step_cost.py` prints the figures and
fails if one is over its bar; `--quick` leaves out the timed steps.
"""

import os
import statistics
import sys
import time


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import diloco
from diloco import conf
from diloco.models import decoder
from diloco.sharding import make_mesh


LAYERS = 36


def setting(num_fragments, overlap_steps=0, **kw):
    return diloco.DiLoCoConfig(
        num_islands=2,
        sync_period=LAYERS + 1,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        mixing=0.5 if overlap_steps else 0.0,
        **kw,
    )


def problem(**changes):
    """The laptop model with 36 layers: its inner step and one island's state."""
    table = {**conf.load("models", "laptop"), "num_layers": LAYERS, **changes}
    model = conf.build(decoder.DecoderConfig, table, "laptop")
    optimizer = optax.adamw(1e-3)

    def inner_step(state, tokens):
        (_, metrics), grad = jax.value_and_grad(
            lambda p: decoder.loss(model, p, tokens), has_aux=True
        )(state["params"])
        updates, opt = optimizer.update(grad, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    params = decoder.init(model, jax.random.key(0))
    return inner_step, {"params": params, "opt": optimizer.init(params)}


def compiled(step, state, tokens):
    """Lowers and compiles, and returns (program, StableHLO bytes, seconds to lower and compile)."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, tokens)
    program = lowered.compile()
    return program, len(lowered.as_text()), time.perf_counter() - start


def growth():
    """Program size and compile time at P = L + 1 over P = 2, median of alternating compiles."""
    inner_step, inner = problem()
    tokens = jax.ShapeDtypeStruct((2, 1, 33), jnp.int32)
    worst = 0.0
    for overlap in (0, 5):
        size, seconds = {}, {2: [], LAYERS + 1: []}
        for _ in range(5):
            for count in seconds:
                config = setting(count, overlap)
                state = jax.eval_shape(lambda c=config: diloco.init(c, inner))
                _, size[count], spent = compiled(
                    diloco.build_train_step(config, inner_step), state, tokens
                )
                seconds[count].append(spent)
        text = size[LAYERS + 1] / size[2]
        spent = statistics.median(seconds[LAYERS + 1]) / statistics.median(seconds[2])
        print(
            f"P = {LAYERS + 1} over P = 2, V = {overlap}: StableHLO {text:.3f}x ({size[2]:,} to {size[LAYERS + 1]:,} "
            f"bytes), compile time {spent:.3f}x ({statistics.median(seconds[2]):.2f} s)"
        )
        worst = max(worst, text, spent)
    return worst


def memory():
    """Temporaries of one device beyond the bare inner step's, and state beyond the inner state's."""
    inner_step, inner = problem()
    mesh = make_mesh(2, fsdp=1, devices=jax.devices()[:2])
    config = setting(LAYERS + 1, 2)
    state = diloco.init(config, inner, mesh=mesh)
    tokens = jax.device_put(
        jnp.zeros((2, 1, 33), jnp.int32), jax.NamedSharding(mesh, jax.P("islands"))
    )
    bare, *_ = compiled(jax.vmap(inner_step), state.inner, tokens)
    step, *_ = compiled(diloco.build_train_step(config, inner_step, mesh=mesh), state, tokens)
    extra = step.memory_analysis().temp_size_in_bytes - bare.memory_analysis().temp_size_in_bytes
    partition = diloco.partition(inner["params"], config)
    fragment = 4 * max(f.num_parameters for f in partition.fragments)
    outer = sum(x.nbytes for x in jax.tree.leaves((state.outer_params, state.outer_opt_state)))
    params = sum(x.nbytes for x in jax.tree.leaves(inner["params"]))
    print(
        f"a device's temporaries beyond the inner step: {extra:,} bytes, {extra / fragment:.3f} of a fragment; "
        f"outer state {outer / params:.3f}x the parameters"
    )
    return extra / fragment


def overhead(rounds=5):
    """Time of a period of DiLoCo steps over the same number of bare inner steps, taken in turn step by step.

    The two programs alternate within the period, so that a slow spell of the machine falls on both.
    """
    inner_step, inner = problem()
    config = setting(LAYERS + 1, 2)
    tokens = jax.random.randint(jax.random.key(1), (2, 2, 65), 0, 256)
    diloco_state = diloco.init(config, inner)
    states = [jax.tree.map(jnp.copy, diloco_state.inner), diloco_state]
    programs = [
        compiled(jax.vmap(inner_step), states[0], tokens)[0],
        compiled(diloco.build_train_step(config, inner_step), states[1], tokens)[0],
    ]

    ratios, times = [], []
    for k in range(rounds + 1):
        spent = [0.0, 0.0]
        for _ in range(config.sync_period):
            for i, program in enumerate(programs):
                start = time.perf_counter()
                states[i], _ = program(states[i], tokens)
                jax.block_until_ready(states[i])
                spent[i] += time.perf_counter() - start
        if k:  # the first round warms up
            ratios.append(spent[1] / spent[0])
            times.append(spent[0] / config.sync_period)
    ratio = statistics.median(ratios)
    print(
        f"a DiLoCo step at P = H = {config.sync_period} over a bare inner step of {1e3 * statistics.median(times):.0f} ms: "
        f"{ratio:.3f}x (rounds: {', '.join(f'{r:.3f}' for r in ratios)})"
    )
    return ratio


if __name__ == "__main__":
    bars = [("growth", growth(), 1.15), ("memory", memory(), 1.05)]
    if "--quick" not in sys.argv:
        bars.append(("overhead", overhead(), 1.05))
    over = [f"{name} {value:.3f} is over {bar}" for name, value, bar in bars if value > bar]
    print("; ".join(over) or "every figure is within its bar")
    sys.exit(bool(over))
