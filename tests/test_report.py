"""The report: right numbers, one file, and nothing that a reader cannot read."""

import json
import re
from xml.etree import ElementTree

import pytest

from diloco import charts
from diloco.models import decoder
from diloco.recipes import load_recipe
from diloco.report import bytes_per_step, read_run, write_report


def make_run(folder, name="laptop-diloco", overrides=(), steps=40, loss=lambda t, m: 5 / t + m):
    recipe = load_recipe(name, [*overrides, f"train.steps={steps}", "train.warmup_steps=0"])
    m, seen = recipe.diloco.num_islands, 0
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe.to_toml())
    records = []
    for t in range(1, steps + 1):
        seen += 1024
        train = {"loss": [loss(t, i) for i in range(m)], "gradient_norm": [1.0] * m}
        records.append({"kind": "train", "step": t, **train, "tokens": [seen] * m})
        if t % 10 == 0:
            outer = {"pseudo_gradient_norm": [2.0] * m, "cosine": None if m == 1 else 0.25}
            records.append({"kind": "outer", "step": t, **outer, "tokens": [seen] * m})
            ev = {"outer_loss": 7 / t, "island_loss": [8 / t] * m}
            records.append({"kind": "eval", "step": t, **ev, "tokens": [seen] * m})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    plain = make_run(
        folder / "plain", overrides=["diloco.num_islands=1", "diloco.sync_period=1"], steps=40
    )
    islands = make_run(folder / "islands <2>", steps=40)
    return write_report([plain, islands], folder / "new" / "report.html").read_text()


def test_the_report_needs_nothing_else(page):
    assert page.startswith("<!doctype html>")
    assert not re.search(r"(src|href)=|url\(|@import|https?://|<script", page)
    assert page.count("<svg") == 5
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img"
        assert len(root.attrib["aria-label"]) > 30
        assert not re.search(r"nan|inf", svg.replace("aria-label", ""))
    assert "prefers-color-scheme:dark" in page and "width=device-width" in page
    assert "islands &lt;2&gt;" in page and "islands <2>" not in page


def test_results_and_differences_are_the_runs(page):
    text = re.sub(r"<[^>]+>", "|", page)
    assert f"{7 / 40:.4f}" in text
    assert "40 of 40" in text
    assert re.search(r"diloco\.sync_period\|+1\|+20\|", text)
    assert re.search(r"diloco\.num_islands\|+1\|+2\|", text)
    assert "train.learning_rate" not in text


def test_bytes_per_step_are_the_whole_model_once_a_period():
    streaming = ["diloco.num_fragments=3", "diloco.sync_period=6", "diloco.wire_format=bfloat16"]
    recipe = load_recipe("laptop-diloco", streaming)
    sent = bytes_per_step(recipe, 12)
    assert [t for t, b in enumerate(sent, 1) if b] == [2, 4, 6, 8, 10, 12]
    assert sum(sent[:6]) == 2 * decoder.num_parameters(recipe.model)
    assert sum(sent) == 2 * sum(sent[6:])


def test_training_loss_is_averaged_in_bins(tmp_path):
    run = make_run(tmp_path / "long", steps=400, loss=lambda t, m: float(t))
    page = write_report([run], tmp_path / "report.html").read_text()
    path = re.search(r"Training loss.*?<path[^>]* d=\"([^\"]+)\"", page, re.DOTALL)[1]
    assert 100 < len(re.findall(r"[ML]", path)) <= 150
    assert "long, island 0 from 2 to 400" in page


def test_a_run_that_diverged_or_has_just_begun_is_still_reported(tmp_path):
    run = make_run(tmp_path / "a", steps=4, loss=lambda t, m: None if t == 3 else float(t))
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "no value yet" in page
    assert 'd="M' in page


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "recipe.toml").unlink(), "has no recipe.toml; name one that diloco train"),
        (lambda d: (d / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
        (lambda d: (d / "metrics.jsonl").write_text(""), "holds no step yet"),
        (lambda d: (d / "metrics.jsonl").write_text('{"kind": 1\n'), "line 1, is no record"),
        (lambda d: (d / "metrics.jsonl").write_text('{"kind": "x"}\n'), "line 1, is no record"),
        (lambda d: (d / "metrics.jsonl").write_text("3\n"), "line 1, is no record"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, damage, message):
    run = make_run(tmp_path / "a", steps=2)
    damage(run)
    with pytest.raises(ValueError, match=message):
        read_run(run)


def test_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run to report"):
        write_report([], tmp_path / "report.html")


def test_a_full_disk_is_one_sentence(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    with pytest.raises(
        OSError, match=r"/dev/full could not be written \(No space left .*make room"
    ):
        write_report([run], "/dev/full")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.0), (5.0, 5.0), (-3.0, 2.0), (1e-9, 2e-9), (0.0, 7e12), (1.7, 5.5)]
)
def test_ticks_cover_the_range_and_are_few(low, high):
    ticks = charts.ticks(low, high, 5)
    assert ticks[0] <= low and ticks[-1] >= high
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))


def test_a_line_breaks_where_a_value_is_not_finite():
    series = charts.Series("a", [0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0], 0)
    svg = charts.line_chart([series], x_label="x", y_label="y", alt="Broken.")
    d = re.search(r' d="([^"]+)"', svg)[1]
    assert re.sub(r"[^ML]", "", d) == "MML"
