"""When fragments are sent and applied, over drawn H, P and V."""

from hypothesis import given
from hypothesis import strategies as st

import diloco


@st.composite
def schedules(draw):
    period = draw(st.integers(1, 300))
    config = diloco.DiLoCoConfig(
        num_islands=2,
        sync_period=period,
        num_fragments=draw(st.integers(1, period)),
        overlap_steps=draw(st.integers(0, period - 1)),
    )
    return config, diloco.schedule(config)


@given(schedules(), st.integers(1, 1000))
def test_each_fragment_once_in_any_period(drawn, start):
    config, schedule = drawn
    for due in (schedule.sends, schedule.applies):
        first = start + config.overlap_steps
        seen = [p for t in range(first, first + config.sync_period) for p in due(t)]
        assert sorted(seen) == list(range(config.num_fragments))


@given(schedules())
def test_sends_are_the_printed_rule(drawn):
    config, schedule = drawn
    h, offsets = config.sync_period, schedule.offsets
    for t in range(2 * h + 1):
        want = tuple(p for p, o in enumerate(offsets) if t > 0 and (t - o) % h == 0)
        assert schedule.sends(t) == want
        assert schedule.send_table()[t % h] == (want[0] if want else config.num_fragments) or not t


@given(schedules())
def test_nothing_is_applied_before_it_was_sent(drawn):
    config, schedule = drawn
    sent = set()
    for t, kind, p in schedule.events(3 * config.sync_period):
        if kind == "send":
            sent.add((t, p))
        else:
            assert (t - config.overlap_steps, p) in sent


def test_a_wrapped_step_counter_would_apply_too_early():
    """H = 9, P = 3, V = 2: at t = 1 an unsigned t - V is 2^32 - 1, a multiple of 3."""
    config = diloco.DiLoCoConfig(num_islands=2, sync_period=9, num_fragments=3, overlap_steps=2)
    schedule = diloco.schedule(config)
    assert (2**32 + 1 - 2) % 3 == 0
    assert schedule.applies(1) == schedule.applies(2) == ()
    assert "| 1 | 3 | 3 | 5 | 9 |" in str(schedule)
