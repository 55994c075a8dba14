"""Arithmetic intensity, zero-stall windows, and their equations as literal NumPy."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from diloco import conf, links, wire
from diloco.config import DiLoCoConfig
from diloco.models import decoder
from diloco.schedule import schedule
from diloco.windows import windows, zero_stall_bytes_per_second


DENSE = decoder.DecoderConfig(
    vocab_size=512,
    num_layers=3,
    model_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
)
EXPERTS = decoder.DecoderConfig(
    vocab_size=512,
    num_layers=3,
    model_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_dim=32,
)


def make(H, P, V):
    return schedule(DiLoCoConfig(num_islands=2, sync_period=H, num_fragments=P, overlap_steps=V))


schedules = st.integers(1, 24).flatmap(
    lambda h: st.tuples(st.just(h), st.integers(1, h), st.integers(0, h - 1))
)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_eq_flops(model):
    """6 x (parameters of matrix products a token meets) + 6 L N h S, from the parameter tree."""
    params = jax.eval_shape(lambda key: decoder.init(model, key), jax.random.key(0))
    S, matrices = 2000, params["head"].size
    for name, leaf in params["layers"].items():
        if "norm" in name:
            continue
        is_expert = model.num_experts and name in ("w_gate", "w_up", "w_down")
        matrices += leaf.size * (model.experts_per_token / model.num_experts if is_expert else 1)
    scores = (
        sum(2 * 2 * model.num_heads * model.head_dim * (s + 1) for s in range(S)) / S
    )  # q k, a v
    by_hand = 3 * (2 * matrices + model.num_layers * scores)
    got = links.flops_per_token(model, S)
    # A query attends to its own position too: (S + 1) / 2 keys on average, S / 2 in the formula.
    assert got == pytest.approx(by_hand, rel=1e-3)
    active = decoder.active_parameters(model) - params["embed"].size
    assert got == pytest.approx(6 * active + 6 * 3 * 64 * S, rel=5e-3)


def test_flops_match_the_compiler():
    """The forward FLOPs that XLA counts are a third of the formula's, but for elementwise work."""
    model = decoder.DecoderConfig(
        vocab_size=512,
        num_layers=1,
        model_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=512,
    )
    S = 128
    params = jax.eval_shape(lambda key: decoder.init(model, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, S), np.int32)
    forward = jax.jit(lambda p, x: decoder.apply(model, p, x))
    counted = forward.lower(params, tokens).compile().cost_analysis()["flops"] / S
    full_attention = 2 * S * model.num_heads * model.head_dim  # the masked half is computed too
    assert counted == pytest.approx(links.flops_per_token(model, S) / 3 + full_attention, rel=0.06)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "float4_e3m0"])
@pytest.mark.parametrize("M", [1, 2, 4, 8])
def test_eq_exchange(name, M):
    n = 256 * 12
    payload = wire.codec(name).payload_bytes((n,))
    factor = 2 * (M - 1) / M if name == "float32" else M - 1
    assert links.exchange_bytes(n, M, name) == payload * factor


def test_eq_exchange_counts_a_ring():
    """What one member of a ring all-reduce and a ring all-gather sends, by walking the ring."""
    M, size = 4, 12.0
    reduce_scatter = sum(size / M for _ in range(M - 1))
    gather = sum(size / M for _ in range(M - 1))
    assert links.exchange_factor(M, "float32") * size == reduce_scatter + gather
    assert links.exchange_factor(M, "int8") * size == sum(size for _ in range(M - 1))


def test_eq_intensity():
    N, B, M, H = 8.2e9, 2**20, 4, 100
    step = 6 * N * B / M
    one = links.model_intensity(step, links.exchange_bytes(N, M, "float32"))
    assert one == pytest.approx(6 * N * B / M / (2 * (M - 1) / M * 4 * N))
    many = links.model_intensity(step, links.exchange_bytes(N, M, "float32"), H)
    assert many == pytest.approx(H * one)
    assert links.model_intensity(step, links.exchange_bytes(N, 1, "float32")) == math.inf


def test_eq_ridge_explains_146_000():
    v5p = links.load_hardware("tpu-v5p")
    host = links.hardware_intensity(4 * v5p.flops_per_second, v5p.dcn_bytes_per_second)
    assert host == 4 * 4.59e14 / 1.25e10 == 146_880


def test_eq_roofline_and_blocking():
    for x in np.geomspace(0.01, 100, 9):
        compute, send = 1.0, 1.0 / x  # seconds; intensity over ridge is their ratio
        assert links.roofline(x, 1.0) == pytest.approx(compute / max(compute, send))
        assert links.blocking_roofline(x, 1.0) == pytest.approx(compute / (compute + send))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float4_e3m0"])
@pytest.mark.parametrize("H", [1, 30])
@pytest.mark.parametrize("batch", [2**14, 2**19, 2**22])
def test_eq_most_islands(name, H, batch):
    """The closed form is the last M whose average intensity reaches the ridge."""
    F, N, ridge = 6e9, 1e9, 146_880.0
    got = links.largest_num_islands(
        batch_tokens=batch,
        token_flops=F,
        parameters=N,
        ridge=ridge,
        sync_period=H,
        wire_format=name,
    )

    def reaches(M):
        bytes_ = links.exchange_bytes(N, M, name)
        return links.model_intensity(F * batch / M, bytes_, H) >= ridge

    assert reaches(got) and not reaches(got + 1)


def test_eq_window():
    """The FIFO recursion written out, and each fragment's own rate."""
    H, P, V, T, rate, lat = 10, 4, 2, 0.5, 3.0, 0.1
    sizes, offsets = [4.0, 0.3, 0.2, 0.5], [0, 2, 5, 7]
    finish, slack = 0.0, {}
    for cycle in range(6):
        for p in range(P):
            sent = (cycle * H + offsets[p]) * T
            finish = max(finish, sent) + sizes[p] / rate
            slack[p] = sent + V * T - (finish + lat)
    got = windows(make(H, P, V), sizes, step_seconds=T, bytes_per_second=rate, latency_seconds=lat)
    assert [w.slack_seconds for w in got] == pytest.approx([slack[p] for p in range(P)])
    assert [w.own_bytes_per_second for w in got] == pytest.approx([b / 0.9 for b in sizes])
    assert [w.gap_seconds for w in got] == pytest.approx([1.0, 1.5, 1.0, 1.5])
    assert sum(w.gap_seconds for w in got) == pytest.approx(H * T)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(schedules, st.data())
def test_eq_zero_stall(hpv, data):
    """The closed form is where the smallest slack changes sign."""
    s = make(*hpv)
    sizes = data.draw(st.lists(st.floats(0.1, 10), min_size=hpv[1], max_size=hpv[1]))
    latency = data.draw(st.sampled_from([0.0, 0.3]))
    rate = zero_stall_bytes_per_second(s, sizes, step_seconds=1.0, latency_seconds=latency)
    if hpv[2] == 0:
        assert rate == math.inf
        return

    def least(r):
        table = windows(s, sizes, step_seconds=1.0, bytes_per_second=r, latency_seconds=latency)
        return min(w.slack_seconds for w in table)

    assert least(rate * 1.0001) >= 0 > least(rate * 0.9999)
    assert rate >= sum(sizes) / hpv[0]


def test_window_intensity_is_the_zero_stall_condition_of_one_fragment():
    """Eq. window-intensity: V F / b >= ridge says the same as the window's own rate."""
    F, b, V, T, H = 1e12, 5e6, 3, 0.25, 10
    rate = zero_stall_bytes_per_second(make(H, 1, V), [b], step_seconds=T)
    ridge = links.hardware_intensity(F / T, rate)
    assert links.model_intensity(F, b, V) == pytest.approx(ridge)


def test_every_hardware_entry_loads_and_names_a_source():
    names = conf.names("hardware")
    assert {"tpu-v5e", "tpu-v5p", "tpu-v6e", "laptop"} <= set(names)
    for name in names:
        assert links.load_hardware(name).sources


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: links.load_hardware("tpu-v9"), "no hardware entry 'tpu-v9'; did you mean"),
        (lambda: links.hardware_intensity(1.0, -5.0), "bytes_per_second -5 is not positive"),
        (lambda: make(8, 9, 0), "num_fragments 9 exceeds sync_period 8"),
        (lambda: make(8, 2, 8), "overlap_steps 8 is not below sync_period 8"),
        (
            lambda: windows(make(4, 2, 1), [1.0], step_seconds=1.0, bytes_per_second=1.0),
            "1 entries for 2 fragments",
        ),
        (
            lambda: zero_stall_bytes_per_second(make(4, 1, 1), [1.0], step_seconds=math.nan),
            "step_seconds nan is not positive and finite",
        ),
        (
            lambda: zero_stall_bytes_per_second(
                make(4, 1, 1), [1.0], step_seconds=1.0, latency_seconds=-1
            ),
            "latency_seconds -1 is negative or not finite",
        ),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and ";" in str(error.value)
