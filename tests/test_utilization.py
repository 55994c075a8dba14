"""The published table, the two simulators' limits, and where they overlap."""

import collections
import itertools
import json
import math
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from diloco import events, steady, utilization
from diloco.config import DiLoCoConfig
from diloco.schedule import schedule
from diloco.windows import zero_stall_bytes_per_second


TABLE = Path(__file__).parents[1] / "docs" / "data" / "streaming_table4.json"
RATES = np.geomspace(0.05, 500, 41)


def make(H, P=1, V=0):
    return schedule(DiLoCoConfig(num_islands=2, sync_period=H, num_fragments=P, overlap_steps=V))


def long_run(s, sizes, rates=RATES, **kwargs):
    """Utilization at each rate."""
    rest = {"step_seconds": 1.0} | kwargs
    return np.array([steady.utilization(s, sizes, bytes_per_second=r, **rest) for r in rates])


schedules = st.integers(1, 16).flatmap(
    lambda h: st.tuples(st.just(h), st.integers(1, h), st.integers(0, h - 1))
)


def test_published_table():
    published = json.loads(TABLE.read_text())
    began = time.perf_counter()
    entries = utilization.simulate_table(published)
    seconds = time.perf_counter() - began
    steps = collections.Counter(e["steps"] for e in entries)
    print(f"{steps[0]} of {len(entries)} exact, {dict(steps)}, {seconds:.2f} s")
    assert len(entries) == 75
    assert set(steps) <= {-1, 0, 1}
    assert steps[0] >= 67
    assert seconds < 10


def test_published_table_is_on_the_grid():
    published = json.loads(TABLE.read_text())
    rows = [r for m in published["models"].values() for r in m["gbit_per_second"].values()]
    for entry in itertools.chain(*rows):
        point = utilization.GRID_GBIT_PER_SECOND[utilization.grid_index(entry)]
        assert abs(point - entry) <= 0.1
    assert all(row == sorted(row) and len(row) == 5 for row in rows)


def test_one_constant_serves_all_entries():
    """Without it the table is not reproduced: the check above can fail."""
    published = json.loads(TABLE.read_text())
    entries = utilization.simulate_table(published, payload_fraction=1.0)
    assert sum(e["steps"] == 0 for e in entries) < 30


def test_eq_layer_dag():
    """A literal walk over the graph's nodes for a small model, one bandwidth, two methods."""
    L, T, bits, rate = 3, 1.0, 0.7, 1.9
    node = T / (3 * L - 1)
    for (period, layers), V in [
        (utilization.layer_sends(L), 0),
        (utilization.layer_sends(L, 4, 2), 1),
    ]:
        now = link = 0.0
        ready, ends = {}, []
        for step in range(1, 81):
            for l in range(L):
                now = max(now, ready.get((step, l), 0.0)) + node  # forward
            for l in reversed(range(L)):
                now += node  # gradient of the parameters
                if l in layers.get(step % period, []):
                    link = max(link, now) + bits / rate
                    ready[step + V + 1, l] = link
                if l:
                    now += node  # gradient of the activations
            ends.append(now)
        by_hand = 40 * T / (ends[79] - ends[39])
        got = utilization.layer_utilization(
            L, T, (period, layers), bits, V, np.array([rate]), periods=40 // period
        )
        assert got[0] == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("H", "V"), [(1, 0), (5, 0), (5, 1), (5, 4), (12, 3)])
def test_simulators_agree_on_one_layer(H, V):
    """One layer has nothing to overlap inside a step, so both are the same chain."""
    layer = utilization.layer_utilization(
        1, 1.0, utilization.layer_sends(1, H), 6.0, V, RATES, periods=4
    )
    event = long_run(make(H, 1, V), [6.0])
    np.testing.assert_allclose(layer, event, rtol=1e-12)


@pytest.mark.parametrize(("H", "P", "V"), [(12, 1, 0), (12, 4, 0), (12, 4, 1), (12, 6, 3)])
def test_simulators_differ_by_less_than_a_step_a_send(H, P, V):
    """A layer is released within its step and waited for within a later one."""
    L = 12
    layer = utilization.layer_utilization(
        L, 1.0, utilization.layer_sends(L, H, P), 1.0, V, RATES, periods=4
    )
    event = long_run(make(H, P, V), [L / P] * P)
    assert np.all(layer >= event - 1e-12)
    assert np.all(H / event - H / layer <= P + 1e-9)
    assert np.all(layer <= long_run(make(H, P, min(V + 1, H - 1)), [L / P] * P) + 1 / H)


def test_h1_p1_is_data_parallel():
    np.testing.assert_allclose(long_run(make(1), [3.0], latency_seconds=0.2), 1 / (1.2 + 3 / RATES))
    assert utilization.layer_sends(5, 1, 1) == utilization.layer_sends(5)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(schedules, st.data())
def test_long_windows_leave_the_average(hpv, data):
    """With V = H - 1 a period takes the larger of compute and traffic, within a step."""
    H, P, _ = hpv
    sizes = data.draw(st.lists(st.floats(0.1, 10), min_size=P, max_size=P))
    wall = H / long_run(make(H, P, H - 1), sizes)
    bound = np.maximum(H, sum(sizes) / RATES)
    assert np.all(wall >= bound * (1 - 1e-9))
    # A fragment may be waited for one step longer than the link needs.
    assert np.all(wall <= (bound + 1 + max(sizes) / RATES) * (1 + 1e-9))


def test_very_long_windows_reach_the_average():
    H = 400
    got = long_run(make(H, 100, H - 1), [1.0] * 100)
    np.testing.assert_allclose(got, np.minimum(1.0, H * RATES / 100), rtol=0.012)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(schedules)
def test_infinite_bandwidth_and_no_latency_is_one(hpv):
    s = make(*hpv)
    free = np.array([math.inf])
    assert long_run(s, [1.0] * hpv[1], free)[0] == pytest.approx(1.0, abs=1e-12)
    run = events.simulate(s, [1.0] * hpv[1], step_seconds=1.0, bytes_per_second=math.inf)
    assert run.utilization[0] == pytest.approx(1.0, abs=1e-12)
    sends = utilization.layer_sends(7, hpv[0], hpv[1])
    got = utilization.layer_utilization(7, 1.0, sends, 1.0, hpv[2], free)
    assert got[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("latency", [0.0, 0.4])
@pytest.mark.parametrize("rate", [0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(
    ("H", "P", "V"), [(1, 1, 0), (12, 1, 0), (12, 1, 5), (12, 4, 0), (12, 5, 2), (7, 7, 3)]
)
def test_eq_cycle_is_what_the_events_tend_to(H, P, V, rate, latency):
    sizes = [1.0 + (p % 3) for p in range(P)]
    run = events.simulate(
        make(H, P, V), sizes, step_seconds=1.0, bytes_per_second=rate, latency_seconds=latency
    )
    got = long_run(make(H, P, V), sizes, [rate], latency_seconds=latency)[0]
    assert run.utilization[0] == pytest.approx(got, rel=1e-9)
    assert run.stall_seconds_per_step[0] == pytest.approx(1 / got - 1, abs=1e-6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(schedules, st.data())
def test_eq_cycle_bounds_any_run(hpv, data):
    """From an empty link, a run is never more than a constant away from its long-run pace."""
    s = make(*hpv)
    sizes = data.draw(st.lists(st.floats(0.1, 10), min_size=hpv[1], max_size=hpv[1]))
    rate, latency = data.draw(st.floats(0.1, 50)), data.draw(st.floats(0, 2))
    run = events.simulate(
        s, sizes, step_seconds=1.0, bytes_per_second=rate, latency_seconds=latency, periods=64
    )
    pace = hpv[0] / long_run(s, sizes, [rate], latency_seconds=latency)[0]
    drift = 2 * (hpv[0] + sum(sizes) / rate + latency)
    assert abs(run.clock[0, -1] - 64 * pace) <= drift
    assert abs(run.clock[0, 32 * hpv[0]] - 32 * pace) <= drift


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(schedules, st.data())
def test_no_stall_from_the_zero_stall_rate_on(hpv, data):
    H, P, V = hpv
    hypothesis.assume(V > 0)
    sizes = data.draw(st.lists(st.floats(0.1, 10), min_size=P, max_size=P))
    s = make(H, P, V)
    rate = zero_stall_bytes_per_second(s, sizes, step_seconds=1.0)
    at, below = long_run(s, sizes, np.array([rate * 1.001, rate * 0.98]))
    assert at == pytest.approx(1.0, abs=1e-9)
    assert below < 1.0


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(schedules, st.floats(0.2, 0.98))
def test_rate_for_a_target(hpv, target):
    s, sizes = make(*hpv), [1.0 + p for p in range(hpv[1])]
    rate = steady.bytes_per_second_for(s, sizes, target, step_seconds=1.0)
    above, below = long_run(s, sizes, np.array([rate, rate * 0.9999]))
    assert above >= target * (1 - 1e-9) > below


def test_latency_alone_can_forbid_a_target():
    rate = steady.bytes_per_second_for(make(1), [1.0], 0.95, step_seconds=1.0, latency_seconds=0.1)
    assert rate == math.inf
    hidden = steady.bytes_per_second_for(
        make(2, 1, 1), [1.0], 0.95, step_seconds=1.0, latency_seconds=0.1
    )
    assert hidden < math.inf


def test_slow_island_sets_the_pace_and_a_shared_link_carries_both():
    s = make(10)
    run = events.simulate(s, [20.0], step_seconds=[1.0, 0.8, 0.5], bytes_per_second=10.0)
    assert run.utilization.tolist() == pytest.approx([10 / 12, 8 / 12, 5 / 12])
    assert run.link_occupancy == pytest.approx(2 / 12)
    shared = events.simulate(
        s, [20.0], step_seconds=[1.0, 0.8, 0.5], bytes_per_second=10.0, shared=True
    )
    assert shared.utilization.tolist() == pytest.approx([10 / 16, 8 / 16, 5 / 16])
    slow = events.simulate(s, [20.0], step_seconds=[1.0] * 2, bytes_per_second=[10.0, 4.0])
    assert slow.utilization.tolist() == pytest.approx([10 / 15, 10 / 15])


def test_jitter_is_waited_for_at_each_exchange():
    H, periods = 5, 8
    steps = np.ones((2, H * periods))
    steps[0, ::2] = 1.5
    steps[1, 1::2] = 1.5
    run = events.simulate(make(H), [0.0], step_seconds=steps, bytes_per_second=1.0, periods=periods)
    by_hand = sum(max(*steps[:, k : k + H].sum(1)) for k in range(0, H * periods, H))
    assert run.clock[:, -1].tolist() == pytest.approx([by_hand, by_hand])


def test_timeline_is_causal():
    run = events.simulate(
        make(12, 4, 2), [9.0, 1, 1, 1], step_seconds=1.0, bytes_per_second=2.0, latency_seconds=0.5
    )
    for a, b in itertools.pairwise(run.transfers):
        assert a.sent <= a.start <= a.end < a.arrival and a.end <= b.start
    assert np.all(np.diff(run.clock, axis=1) >= 1.0) and np.all(run.stalls >= 0)
    assert [x.step for x in run.transfers][:5] == [3, 6, 9, 12, 15]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"bytes_per_second": -1.0}, "bytes_per_second -1 is not positive and finite"),
        ({"step_seconds": [1.0, 0.0]}, "step_seconds 0 is not positive and finite"),
        ({"latency_seconds": -0.1}, "latency_seconds -0.1 is negative or not finite"),
    ],
)
def test_refusals(kwargs, words):
    good = {"step_seconds": 1.0, "bytes_per_second": 1.0}
    with pytest.raises(ValueError, match="; use") as error:
        events.simulate(make(4), [1.0], **(good | kwargs))
    assert words in str(error.value)
    with pytest.raises(ValueError, match="outside"):
        steady.bytes_per_second_for(make(4), [1.0], 1.5, step_seconds=1.0)
    with pytest.raises(ValueError, match="2 entries for 1 fragments"):
        events.simulate(make(4), [1.0, 2.0], **good)
