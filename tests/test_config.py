"""Every refusal of the configuration, with its message."""

import dataclasses

import pytest

import diloco


BASE = {"num_islands": 2, "sync_period": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_islands": 0}, "num_islands 0 is below 1; use 1 or more islands"),
        ({"sync_period": 0}, "sync_period 0 is below 1; use 1 or more inner steps"),
        ({"num_fragments": 0}, "num_fragments 0 is below 1; use 1 for vanilla DiLoCo"),
        ({"num_fragments": 9}, "num_fragments 9 exceeds sync_period 8; use at most 8 fragments"),
        ({"overlap_steps": -1}, "overlap_steps -1 is below 0; use 0"),
        ({"overlap_steps": 8}, "overlap_steps 8 is not below sync_period 8; use at most 7"),
        ({"mixing": 1.0}, r"mixing 1.0 is outside \[0, 1\)"),
        ({"mixing": -0.1}, r"mixing -0.1 is outside \[0, 1\)"),
        ({"mixing": float("nan")}, r"mixing nan is outside \[0, 1\)"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate 0.0 is not positive and finite"),
        ({"outer_learning_rate": float("inf")}, "outer_learning_rate inf is not positive"),
        ({"outer_momentum": 1.0}, r"outer_momentum 1.0 is outside \[0, 1\)"),
        ({"fragment_pattern": "stride"}, "fragment_pattern 'stride' is not known; use one of"),
        ({"wire_format": "fp4"}, "wire_format 'fp4' is not known; use one of float32"),
        ({"on_bad_island": "stop"}, "on_bad_island 'stop' is not known; use one of error, skip"),
    ],
)
def test_bad_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        diloco.DiLoCoConfig(**{**BASE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_islands": 2.0}, "num_islands 2.0 is a float; use a whole number"),
        ({"sync_period": "8"}, "sync_period '8' is a str; use a whole number"),
        ({"num_islands": True}, "num_islands True is a bool; use a whole number"),
        ({"mixing": "half"}, "mixing 'half' is a str; use a number"),
        ({"wire_format": 4}, "wire_format 4 is a int; use a string"),
        ({"error_feedback": 1}, "error_feedback 1 is not a bool; use True or False"),
        ({"layer_keys": "layers"}, "layer_keys 'layers' is not a tuple of names"),
    ],
)
def test_wrong_type_is_refused(change, message):
    with pytest.raises(TypeError, match=message):
        diloco.DiLoCoConfig(**{**BASE, **change})


def test_unknown_key_positional_and_change_are_refused():
    with pytest.raises(TypeError, match="sync_perod"):
        diloco.DiLoCoConfig(**BASE, sync_perod=3)
    with pytest.raises(TypeError):
        diloco.DiLoCoConfig(2, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        diloco.DiLoCoConfig(**BASE).sync_period = 9
