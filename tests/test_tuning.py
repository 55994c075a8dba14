"""Published advice against the tables it is from."""

import math

import pytest

from diloco import tuning
from diloco.config import DiLoCoConfig


def test_outer_learning_rates_by_islands():
    assert [tuning.outer_learning_rate(m).value for m in (1, 2, 4, 8)] == [0.4, 0.6, 0.6, 0.8]
    assert not tuning.outer_learning_rate(4).warning
    far = tuning.outer_learning_rate(64)
    assert far.value == 0.8 and "64 islands" in far.warning


# Charles et al., Table 4: measured losses that the fits were made on.
@pytest.mark.parametrize(
    ("parameters", "islands", "measured"),
    [
        (1.3e9, 0, 2.460),
        (1.3e9, 2, 2.464),
        (1.3e9, 8, 2.493),
        (550e6, 1, 2.645),
        (550e6, 4, 2.673),
        (2.4e9, 2, 2.323),
        (90e6, 8, 3.265),
    ],
)
def test_loss_fits_meet_the_measured_losses(parameters, islands, measured):
    """Within the largest residual of the paper's own Table 11, 0.012 in the logarithm."""
    for joint in (False, True):
        if islands == 0 and joint:
            continue
        value = tuning.scaling_law("loss", parameters, islands, joint=joint).value
        assert abs(math.log(value / measured)) < 0.013


def test_eq_scaling_law():
    for quantity, (A, a, b) in {
        "loss": (19.226, -0.0985, 0.0116),
        "learning_rate": (22256, -0.8827, 0.2929),
        "batch_sequences": (0.00709, 0.4695, 0.3399),
    }.items():
        got = tuning.scaling_law(quantity, 1e9, 3)  # no fit of its own
        assert got.value == pytest.approx(A * 1e9**a * 3**b)
        assert "Table 10" in got.source


def test_batch_is_in_sequences():
    """As tokens the fit would be 178 at 1.3B parameters; as sequences it is 365 thousand tokens."""
    sequences = tuning.scaling_law("batch_sequences", 1.3e9, 2).value
    assert 2**16 < sequences * 2048 < 2**20


def test_size_outside_of_the_fits_warns():
    assert not tuning.scaling_law("loss", 1e9, 2).warning
    assert "checked at 4B and 10B" in tuning.scaling_law("loss", 8.2e9, 2).warning
    assert "outside" in tuning.scaling_law("loss", 1e6, 2).warning
    assert "beyond 8" in tuning.scaling_law("loss", 1e9, 16).warning


def test_every_advice_has_a_source_and_a_range():
    config = DiLoCoConfig(num_islands=2, sync_period=100, num_fragments=13, overlap_steps=1)
    entries = tuning.advise(config, 1.2e9, 36) + tuning.maxtext_heuristics(36)
    assert all(a.source and a.valid for a in entries)
    names = [a.setting for a in tuning.advise(config, 1.2e9, 36)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "setting", "words"),
    [
        ({"sync_period": 37, "num_fragments": 37}, "num_fragments", "every inner step"),
        ({"sync_period": 4, "num_fragments": 1}, "sync_period", "4 is outside"),
        ({"overlap_steps": 9}, "overlap_steps", "9 is beyond 5"),
        ({"mixing": 0.9}, "mixing", "0.9 was not"),
        ({"outer_learning_rate": 0.1}, "outer_learning_rate", "factor of 2"),
        ({"outer_momentum": 0.0}, "outer_momentum", "0 was not"),
    ],
)
def test_settings_outside_of_the_evidence_warn(change, setting, words):
    good = {"num_islands": 2, "sync_period": 100, "num_fragments": 13, "overlap_steps": 1}
    ok = {a.setting: a.warning for a in tuning.advise(DiLoCoConfig(**good), 1.2e9, 36)}
    assert not ok[setting]
    config = DiLoCoConfig(**(good | {"overlap_steps": 0} | change))
    got = {a.setting: a.warning for a in tuning.advise(config, 1.2e9, 36)}
    assert words in got[setting]


def test_unknown_quantity_and_bad_size_are_refused():
    with pytest.raises(ValueError, match="use one of loss"):
        tuning.scaling_law("lost", 1e9, 2)
    with pytest.raises(ValueError, match="use at least 1"):
        tuning.scaling_law("loss", 0, 2)
