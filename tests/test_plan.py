"""The plan against its own formulas, and the command's output."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from diloco import conf, events, links
from diloco.cli import main
from diloco.config import DiLoCoConfig
from diloco.fragments import partition
from diloco.models import decoder
from diloco.plan import plan_command, render, rows, to_json
from diloco.planner import VERDICTS, fragment_payloads, plan
from diloco.schedule import schedule


TINY = conf.build(decoder.DecoderConfig, conf.load("models", "tiny"), "tiny")
QWEN = conf.build(decoder.DecoderConfig, conf.load("models", "qwen3-8b"), "qwen3-8b")
V5P = links.load_hardware("tpu-v5p")
SIZE = {"chips_per_island": 64, "sequence_length": 2048, "sequences_per_island": 512}


def qwen(gbit=5.0, latency=0.0, **change):
    base = {"num_islands": 2, "sync_period": 37, "num_fragments": 37, "overlap_steps": 1}
    config = DiLoCoConfig(**(base | change))
    return plan(QWEN, V5P, config, **SIZE, gbit_per_second=gbit, latency_seconds=latency)


def test_figures_of_a_real_recipe_by_hand():
    found = qwen()
    N, T = 8_190_735_360, 2048 * 512
    assert found.parameters == N and found.tokens_per_island_step == T
    matrices = N - 151_936 * 4096 - (2 * 36 + 1) * 4096 - 2 * 36 * 128  # no embedding, no norms
    flops = 6 * T * (matrices + 36 * 32 * 128 * 2048)
    assert found.flops_per_island_step == pytest.approx(flops, rel=1e-12)
    assert found.step_seconds == pytest.approx(flops / (64 * 4.59e14 * 0.4))
    assert found.sent_bytes_per_period == 4 * N  # all-reduce between two: once the payload
    assert found.average_gbit_per_second == pytest.approx(32 * N / 1e9 / (37 * found.step_seconds))
    assert found.hbm_bytes["inner_optimizer"] == 8 * N / 64
    assert sum(found.hbm_bytes.values()) == 20 * N / 64
    assert found.hosts_per_island == 16
    embedding = 4 * (2 * 151_936 * 4096 + 4096)
    assert found.largest_fragment_bytes == embedding
    assert found.zero_stall_gbit_per_second == pytest.approx(
        embedding * 8 / 1e9 / found.step_seconds
    )
    assert found.largest_over_mean == pytest.approx(5.62, abs=0.01)


def test_payloads_are_the_fragments():
    config = DiLoCoConfig(num_islands=2, sync_period=8, num_fragments=3, wire_format="float4_e3m0")
    params = decoder.init(TINY, jax.random.key(0))
    assert fragment_payloads(TINY, config) == [
        f.wire_bytes for f in partition(params, config).fragments
    ]


def test_utilization_is_what_the_events_give():
    for change in ({}, {"overlap_steps": 0}, {"fragment_pattern": "balanced"}):
        found = qwen(**change)
        run = events.simulate(
            schedule(found.diloco),
            [w.bytes for w in found.windows],
            step_seconds=found.step_seconds,
            bytes_per_second=found.gbit_per_second * 1e9 / 8,
        )
        assert run.utilization[0] == pytest.approx(found.utilization, rel=1e-6)
        assert run.stall_seconds_per_step[0] == pytest.approx(
            found.stall_seconds_per_step, abs=1e-6
        )


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"gbit": 10.0}, "hidden"),
        ({"gbit": 5.0}, "late"),
        ({"gbit": 5.0, "overlap_steps": 0}, "waits"),
        ({"gbit": 1.0}, "overloaded"),
        ({"num_islands": 1}, "alone"),
        ({"gbit": 5.0, "fragment_pattern": "balanced"}, "hidden"),
        ({"gbit": 10.0, "latency": 4.0}, "late"),
    ],
)
def test_verdicts(change, verdict):
    found = qwen(**change)
    assert found.verdict == verdict
    assert (found.utilization > 1 - 1e-9) == (verdict in ("hidden", "alone"))
    assert found.sentence.split("{")[0] and set(VERDICTS) >= {verdict}


def test_needed_links_reach_their_targets():
    found = qwen()
    for target, gbit in found.needed_gbit_per_second.items():
        assert qwen(gbit).utilization == pytest.approx(float(target), abs=1e-6)
    assert qwen(found.zero_stall_gbit_per_second * 1.0001).verdict == "hidden"
    assert qwen(found.zero_stall_gbit_per_second * 0.9999).verdict == "late"


def test_changes_are_planned_not_guessed():
    found = qwen(2.0)
    assert found.verdict == "late" and found.changes
    for text, used in found.changes:
        change = dict(pair.split(" = ") for pair in text.split(", "))
        change = {k: int(v) if v.isdigit() else v for k, v in change.items()}
        again = qwen(2.0, **change)
        assert again.utilization == pytest.approx(used)
        assert used > found.utilization
    assert not qwen(10.0).changes


def test_data_parallel_is_h1_p1_v0():
    one = qwen(sync_period=1, num_fragments=1, overlap_steps=0, latency=0.01)
    assert one.utilization == pytest.approx(one.data_parallel_utilization)


def test_default_link_is_the_hosts_egress():
    assert qwen(None).gbit_per_second == pytest.approx(16 * 1.25e10 * 8 / 1e9)


def test_error_feedback_and_narrow_parameters_in_hbm():
    config = DiLoCoConfig(num_islands=2, sync_period=4, error_feedback=True)
    narrow = dataclasses.replace(TINY, param_dtype="bfloat16")
    size = {"chips_per_island": 2, "sequence_length": 8, "sequences_per_island": 1}
    N = decoder.num_parameters(TINY)
    got = plan(narrow, V5P, config, **size).hbm_bytes
    assert list(got.values()) == [2 * N / 2, 4 * N / 2, 4 * N / 2, 4 * N / 2, 4 * N / 2]


def test_json_has_the_plan_and_is_strict(capsys):
    plan_command(
        model="tiny", hardware="laptop", sync_period=8, fragments=3, sequence_length=64, json=True
    )
    got = json.loads(capsys.readouterr().out, parse_constant=lambda x: pytest.fail(x))
    assert got["model"] == "tiny" and len(got["windows"]) == 3
    assert got["zero_stall_gbit_per_second"] is None  # V = 0: no link is enough
    found = qwen()
    plain = to_json(found)
    assert plain["utilization"] == found.utilization
    assert plain["windows"][0]["bytes"] == found.windows[0].bytes
    json.dumps(plain, allow_nan=False)


def test_table_says_what_a_person_acts_on(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    plan_command(
        model="qwen3-8b",
        hardware="tpu-v5p",
        chips=64,
        sequences=512,
        sync_period=37,
        fragments=37,
        overlap_steps=1,
        gbit=5.0,
    )
    out = capsys.readouterr().out
    for words in (
        "8,190,735,360",
        "2 x 64 (16)",
        "97.65%",
        "2 of 37 fragments are back after their window",
        "fragment_pattern = balanced: utilization 100.00%",
        "H = P = 37 exchanges a fragment every inner step",
        "9.452 Gbit/s",
    ):
        assert words in out
    assert len(rows(qwen())) == 15 and len(render(qwen(), "", QWEN)) > 3


def test_recipe_and_options_over_it(capsys):
    plan_command("laptop-diloco", json=True)
    base = json.loads(capsys.readouterr().out)
    plan_command("laptop-diloco", sync_period=77, gbit=0.01, json=True)
    other = json.loads(capsys.readouterr().out)
    assert base["model"] == "laptop" and other["diloco"]["sync_period"] == 77
    assert other["gbit_per_second"] == 0.01
    assert base["flops_per_island_step"] == other["flops_per_island_step"]


@pytest.mark.parametrize("name", conf.names("recipes"))
def test_every_recipe_has_a_plan(name, capsys):
    plan_command(name, json=True)
    got = json.loads(capsys.readouterr().out)
    assert 0 < got["utilization"] <= 1 and got["step_seconds"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hardware": "tpu-v9p"}, "no hardware entry 'tpu-v9p'; did you mean tpu-v"),
        ({"hardware": "h100"}, "no hardware entry 'h100'; known: laptop, "),
        ({"model": "qwen3-9b"}, "no models entry 'qwen3-9b'; did you mean qwen3-8b?"),
        ({"model": None}, "plan was given no recipe and not both --model and --hardware"),
        ({"gbit": -1.0}, "gbit_per_second -1 is not positive and finite; use Gbit/s above 0"),
        ({"gbit": math.nan}, "gbit_per_second nan is not positive and finite"),
        ({"latency_ms": -1.0}, "latency_seconds -0.001 is negative or not finite"),
        ({"sync_period": 8, "fragments": 9}, "num_fragments 9 exceeds sync_period 8"),
        ({"sync_period": 8, "overlap_steps": 8}, "overlap_steps 8 is not below sync_period 8"),
        ({"islands": 0}, "num_islands 0 is below 1"),
        ({"chips": 0}, "chips_per_island 0 is below 1; use 1 or more"),
        ({"utilization": 1.2}, "model_flops_utilization 1.2 is outside (0, 1]"),
        ({"fragments": 9}, "fragment 3 of 9 is empty with 2 layers and pattern 'strided'"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(ValueError) as error:
        plan_command(**({"model": "tiny", "hardware": "laptop"} | change))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert ";" in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hardware", "tpu-v9p"], "no hardware entry 'tpu-v9p'; did you mean tpu-v5p?"),
        (["--gbit", "-5"], "gbit_per_second -5 is not positive and finite; use Gbit/s above 0"),
        (["--fragments", "101"], "num_fragments 101 exceeds sync_period 100; use at most 100"),
        (["--overlap-steps", "100"], "overlap_steps 100 is not below sync_period 100; use at most"),
    ],
)
def test_command_refuses_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "tiny", "--hardware", "laptop", *words])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.startswith("diloco: error: ") and said in err and err.count("\n") == 1


def test_command_prints_the_plan(capsys):
    main(["plan", "laptop-diloco", "--gbit", "0.01", "--json"])
    assert json.loads(capsys.readouterr().out)["gbit_per_second"] == 0.01


def test_infinite_link_hides_all_but_latency():
    found = qwen(1e12, overlap_steps=0, latency=0.1)
    by_hand = found.step_seconds / (found.step_seconds + 0.1)  # one exchange every step
    assert found.utilization == pytest.approx(by_hand, rel=1e-6)
    assert np.isinf(found.zero_stall_gbit_per_second)
