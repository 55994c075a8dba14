"""The planner page in a real browser: at least 50 settings against Python, and the same refusals."""

import contextlib
import math
import random
import shutil
from pathlib import Path

import pytest

from diloco import conf, links, planner, planner_page
from diloco.config import DiLoCoConfig
from diloco.models import decoder


CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
STATIC = Path(__file__).parents[1] / "docs" / "_static"
GOOD = {
    "model": "qwen3-8b",
    "hardware": "tpu-v5p",
    "chips_per_island": 64,
    "sequence_length": 2048,
    "sequences_per_island": 512,
    "model_flops_utilization": 0.4,
    "num_islands": 2,
    "sync_period": 37,
    "num_fragments": 37,
    "overlap_steps": 1,
    "fragment_pattern": "strided",
    "wire_format": "float32",
    "gbit_per_second": 5.0,
    "latency_ms": 0.0,
}
CONFIG = [
    "num_islands",
    "sync_period",
    "num_fragments",
    "overlap_steps",
    "fragment_pattern",
    "wire_format",
]


def settings(count, seed=0):
    """Valid settings that span the page's choices."""
    draw, layers = random.Random(seed), {}
    for name in conf.names("models"):
        layers[name] = conf.load("models", name)["num_layers"]
    for k in range(count):
        model = list(layers)[k % len(layers)]
        P = draw.choice([1, 2, layers[model] // 2 + 1, layers[model] + 1])
        H = P * draw.choice([1, 2, 3]) + draw.choice([0, 1, 7])
        big = model.startswith("qwen")
        yield {
            "model": model,
            "hardware": draw.choice(conf.names("hardware")) if big else "laptop",
            "chips_per_island": draw.choice([8, 60, 256]) if big else 1,
            "sequence_length": draw.choice([128, 2048, 8192]),
            "sequences_per_island": draw.choice([8, 500]),
            "model_flops_utilization": draw.choice([0.3, 0.55, 1.0]),
            "num_islands": draw.choice([1, 2, 2, 4, 8]),
            "sync_period": H,
            "num_fragments": P,
            "overlap_steps": min(H - 1, draw.choice([0, 1, 1, 2, 5])),
            "fragment_pattern": draw.choice(["strided", "sequential", "balanced"]),
            "wire_format": draw.choice(planner_page.WIRE_FORMATS),
            "gbit_per_second": draw.choice([None, 0.05, 1.5, 20.0, 300.0]),
            "latency_ms": draw.choice([0.0, 0.5, 40.0]),
        }


def python_plan(s):
    """What the command computes, in the command's order of checks."""
    table = conf.load("models", s["model"])
    hardware = links.load_hardware(s["hardware"])
    config = DiLoCoConfig(**{k: s[k] for k in CONFIG})
    return planner.plan(
        conf.build(decoder.DecoderConfig, table, s["model"]),
        hardware,
        config,
        chips_per_island=s["chips_per_island"],
        sequence_length=s["sequence_length"],
        sequences_per_island=s["sequences_per_island"],
        model_flops_utilization=s["model_flops_utilization"],
        gbit_per_second=s["gbit_per_second"],
        latency_seconds=s["latency_ms"] / 1e3,
        suggest=False,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no chromium at {CHROMIUM}; install the system's chromium")
    folder = tmp_path_factory.mktemp("planner")
    for name in ("planner.js", "planner-page.js", "planner.css"):
        shutil.copy(STATIC / name, folder)
    (folder / "index.html").write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>planner</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="planner.css">'
        f"<body>{planner_page.page_html()}"
        '<script src="planner.js"></script><script src="planner-page.js"></script></body></html>'
    )
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=arguments)
        context = browser.new_context(offline=True)
        tab = context.new_page()
        problems = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        tab.address = (folder / "index.html").as_uri()
        tab.goto(tab.address)
        yield tab
        assert not problems
        with contextlib.suppress(Exception):
            browser.close()


def drive(page, s):
    """Types a setting into the form and reads what the page then says."""
    return page.evaluate(
        """(s) => {
          for (const [name, value] of Object.entries(s)) {
            const input = document.getElementById(`planner-${name}`);
            input.value = value === null ? "" : value;
          }
          document.getElementById("planner-latency_ms").dispatchEvent(new Event("input"));
          const cells = document.querySelectorAll("[data-key]");
          const message = document.querySelector(".planner-verdict");
          return {
            said: message.textContent,
            state: message.dataset.state,
            shown: !document.querySelector(".planner-results").hidden,
            values: Object.fromEntries([...cells].map((c) => [c.dataset.key, Number(c.dataset.value)])),
          };
        }""",
        s,
    )


def test_sixty_settings_agree_with_python(page):
    worst = 0.0
    for s in settings(60):
        found, got = python_plan(s), drive(page, s)
        assert got["shown"], (s, got["said"])
        expected = {
            name: getattr(found, name)
            for name in got["values"]
            if name != "hbm_bytes" and not name.startswith("needed_")
        }
        expected["hbm_bytes"] = sum(found.hbm_bytes.values())
        expected |= {f"needed_{k}": v for k, v in found.needed_gbit_per_second.items()}
        assert set(expected) == set(got["values"]) and len(expected) > 20
        for name, value in expected.items():
            read = got["values"][name]
            if value in (0, math.inf):
                assert read == value, (s, name, read, value)
            elif name == "stall_seconds_per_step":  # a difference of like numbers
                assert read == pytest.approx(value, rel=1e-3, abs=1e-9 * found.step_seconds)
            else:
                assert read == pytest.approx(value, rel=1e-3), (s, name)
                worst = max(worst, abs(read / value - 1))
        assert got["state"] == found.verdict
        assert got["said"].startswith(found.sentence)
    print(f"largest difference {worst:.1e}")


REFUSED = [
    {"gbit_per_second": -5.0},
    {"gbit_per_second": -0.00000125},
    {"gbit_per_second": -12345678.0},
    {"gbit_per_second": 0.0},
    {"latency_ms": -1.0},
    {"num_fragments": 38},
    {"sync_period": 100, "num_fragments": 101},
    {"overlap_steps": 37},
    {"overlap_steps": 400},
    {"overlap_steps": -1},
    {"num_islands": 0},
    {"num_islands": 2.5},
    {"sync_period": 0},
    {"num_fragments": 0},
    {"chips_per_island": 0},
    {"chips_per_island": 1.5},
    {"sequence_length": -3},
    {"sequences_per_island": 0},
    {"model_flops_utilization": 1.5},
    {"model_flops_utilization": 0.0},
    {"sync_period": 100, "num_fragments": 38},
    {"sync_period": 100, "num_fragments": 64, "fragment_pattern": "sequential"},
    {"sync_period": 100, "num_fragments": 38, "fragment_pattern": "sequential"},
    {"sync_period": 100, "num_fragments": 99, "model": "laptop", "fragment_pattern": "sequential"},
    {"sync_period": 100, "num_fragments": 8, "model": "laptop"},
]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_page_refuses_with_pythons_sentence(page, change):
    s = GOOD | change
    with pytest.raises((ValueError, TypeError)) as error:
        python_plan(s)
    got = drive(page, s)
    assert got["said"] == str(error.value)
    assert got["state"] == "refused" and not got["shown"]


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": "tpu-v9p"},
        {"hardware": "h100"},
        {"hardware": "v5p"},
        {"model": "qwen"},
        {"model": "qwen3-8"},
        {"model": "llama"},
        {"fragment_pattern": "striped"},
        {"wire_format": "fp8"},
    ],
    ids=str,
)
def test_unknown_names_in_the_address(page, change):
    s = GOOD | change
    with pytest.raises(ValueError) as error:
        python_plan(s)
    query = "&".join(f"{k}={v}" for k, v in s.items())
    page.goto(f"{page.address}?{query}")
    assert page.locator(".planner-verdict").inner_text() == str(error.value)
    page.goto(page.address)


def test_nearest_name_is_difflibs(page):
    import difflib

    words = ["tpu-v5p", "tpu-v6e", "laptop", "tpu7x", "qwen3-8b", "v5", "abcabc", "a", "", "xpu-v5"]
    for a in words:
        for b in words:
            ours = page.evaluate("([a, b]) => DilocoPlanner.ratio(a, b)", [a, b])
            theirs = difflib.SequenceMatcher(None, a, b).ratio() if a or b else 0
            assert ours == pytest.approx(theirs), (a, b)


def test_numbers_print_as_pythons(page):
    for x in (0.0, -5.0, 1e6, -1234567.0, 0.1, 1e-5, -0.00012345678, 123456.7, 99999.95):
        assert page.evaluate("(x) => DilocoPlanner.g(x)", x) == f"{x:g}"


def test_setting_is_in_the_address(page):
    s = GOOD | {"overlap_steps": 2, "fragment_pattern": "balanced", "gbit_per_second": 7.5}
    got = drive(page, s)
    shared = page.locator(".planner-link").get_attribute("href").partition("?")[2]
    page.goto(f"{page.address}?{shared}")
    again = page.locator("[data-key=utilization]").get_attribute("data-value")
    assert float(again) == got["values"]["utilization"]
    assert page.locator("#planner-overlap_steps").input_value() == "2"
    page.goto(page.address)


def test_keyboard_and_screen_reader(page):
    """Every control has a label and is reached by Tab; an arrow key moves the verdict."""
    page.goto(page.address)
    controls = page.locator("#diloco-planner :is(input, select)")
    count = controls.count()
    assert count == len(GOOD)
    for k in range(count):
        name = controls.nth(k).get_attribute("id")
        assert page.locator(f"label[for={name}]").inner_text().strip()
    controls.first.focus()
    reached = []
    for _ in range(count):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert len(set(reached)) == count
    status = page.locator(".planner-verdict")
    assert (
        status.get_attribute("aria-live") == "polite" and status.get_attribute("role") == "status"
    )
    before = status.inner_text()
    page.locator("#planner-overlap_steps").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#planner-overlap_steps").input_value() == "2"
    assert status.inner_text() != before
    for picture in page.locator("#diloco-planner svg").all():
        assert picture.get_attribute("role") == "img"
        assert len(picture.locator("title").first.text_content()) > 40


def test_fits_a_phone_and_shows_in_dark(page):
    page.set_viewport_size({"width": 360, "height": 740})
    drive(page, GOOD)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    page.evaluate(
        """() => { const s = document.documentElement.style;
        s.setProperty("--pst-color-text-base", "rgb(230, 230, 230)");
        s.setProperty("--pst-color-background", "rgb(18, 18, 18)"); }"""
    )
    color = page.evaluate("getComputedStyle(document.querySelector('#planner-model')).color")
    assert color == "rgb(230, 230, 230)"
    page.evaluate("document.documentElement.removeAttribute('style')")
    page.set_viewport_size({"width": 1280, "height": 720})


def test_layouts_are_the_partitions():
    """Runs of payloads, for every model, against the fragments themselves."""
    data = planner_page.page_data()
    for name, model in data["models"].items():
        sizes = conf.build(decoder.DecoderConfig, conf.load("models", name), name)
        for pattern in data["patterns"]:
            for P in sorted({1, 2, 3, model["num_layers"] // 2 + 1, model["num_layers"] + 1}):
                for column, wire_format in enumerate(data["wires"], 1):
                    config = DiLoCoConfig(
                        num_islands=2,
                        sync_period=P,
                        num_fragments=P,
                        fragment_pattern=pattern,
                        wire_format=wire_format,
                    )
                    runs = model["layouts"][pattern][P - 1]
                    flat = [run[column] for run in runs for _ in range(run[0])]
                    assert flat == planner.fragment_payloads(sizes, config)
    assert data["sentences"]
