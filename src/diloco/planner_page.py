"""What the interactive planner page needs from Python: sizes, hardware, layouts and sentences.

The page's script has the formulas of `diloco.windows`, `diloco.steady` and `diloco.planner` again;
everything else it reads from here, so that no figure and no sentence is typed twice.
"""

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import jax

from diloco import conf, links, planner, wire
from diloco.config import FRAGMENT_PATTERNS, DiLoCoConfig
from diloco.cuts import Cut
from diloco.fragments import partition
from diloco.models import decoder


WIRE_FORMATS = ("float32", "bfloat16", "int8", "float4_e3m0")


def page_data() -> dict[str, Any]:
    """Everything the page reads, as plain values.

    Returns:
        `models`, `hardware`, `patterns`, `wires`, `targets`, `verdicts` and `sentences`.

    Raises:
        ValueError: If a layout is not what the page's rule for empty fragments says.
    """
    return {
        "models": {name: _model(name) for name in conf.names("models")},
        "hardware": {
            name: dataclasses.asdict(links.load_hardware(name)) for name in conf.names("hardware")
        },
        "patterns": list(FRAGMENT_PATTERNS),
        "wires": list(WIRE_FORMATS),
        "targets": list(planner.TARGETS),
        "verdicts": planner.VERDICTS,
        "sentences": sentences(),
    }


def _model(name: str) -> dict[str, Any]:
    model = conf.build(decoder.DecoderConfig, conf.load("models", name), f"model {name}")
    shapes = jax.eval_shape(lambda key: decoder.init(model, key), jax.random.key(0))
    base, one = (links.flops_per_token(model, s) for s in (0, 1))
    return {
        "parameters": decoder.num_parameters(model),
        "active_parameters": decoder.active_parameters(model),
        "num_layers": model.num_layers,
        "parameter_bytes": 2 if model.param_dtype == "bfloat16" else 4,
        "flops_per_token": base,
        "flops_per_token_per_position": one - base,
        "layouts": {
            pattern: [_layout(shapes, pattern, p) for p in range(1, model.num_layers + 2)]
            for pattern in FRAGMENT_PATTERNS
        },
    }


def _layout(shapes: Any, pattern: str, num_fragments: int) -> list[list[int]]:
    """Runs of equal fragments in order: how many, and the payload bytes in each wire format."""
    config = DiLoCoConfig(
        num_islands=2,
        sync_period=num_fragments,
        num_fragments=num_fragments,
        fragment_pattern=pattern,  # type: ignore[arg-type]
    )
    leaves = [leaf.shape for leaf in jax.tree.leaves(shapes)]
    payloads = []
    for fragment in partition(shapes, config).fragments:
        sizes = [_cut_size(leaves[cut.leaf], cut) for cut in fragment.cuts]
        payloads.append([sum(_payload(name, n) for n in sizes) for name in WIRE_FORMATS])
    return [[len(list(run)), *same] for same, run in itertools.groupby(payloads)]


def _cut_size(shape: tuple[int, ...], cut: Cut) -> int:
    whole = math.prod(shape)
    return whole if cut.axis is None else whole // shape[cut.axis] * cut.outer * cut.count


def _payload(name: str, size: int) -> int:
    """`Codec.payload_bytes` of any shape of this size: it only depends on the number of blocks."""
    codec, (blocks, rest) = wire.codec(name), divmod(size, wire.BLOCK)
    return blocks * codec.payload_bytes((wire.BLOCK,)) + (
        codec.payload_bytes((rest,)) if rest else 0
    )


def sentences() -> dict[str, str]:
    """The refusals as templates, taken from the errors themselves.

    Each check is made to fail with values that stand for the page's, which then become `{name}`s.

    Returns:
        One template a check, by name.

    Example:
        >>> sentences()["too_many_fragments"]
        'num_fragments {P} exceeds sync_period {H}; use at most {H} fragments or a longer period'
    """
    tiny = conf.build(decoder.DecoderConfig, conf.load("models", "tiny"), "model tiny")
    laptop = links.load_hardware("laptop")

    def config(**change: Any) -> Callable[[], Any]:
        return lambda: DiLoCoConfig(**({"num_islands": 2, "sync_period": 654321} | change))

    def plan(**change: Any) -> Callable[[], Any]:
        good = {"chips_per_island": 1, "sequence_length": 1, "sequences_per_island": 1}
        return lambda: planner.plan(tiny, laptop, config()(), **(good | change))

    def unknown(kind: str, name: str) -> Callable[[], Any]:
        return lambda: conf.load(kind, name)

    checks: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
        "whole": (config(num_islands=0.25), {"num_islands": "name", "0.25": "value"}),
        "islands": (config(num_islands=-77), {"-77": "M"}),
        "period": (config(sync_period=-77), {"-77": "H"}),
        "fragments": (config(num_fragments=-77), {"-77": "P"}),
        "too_many_fragments": (config(num_fragments=987654), {"987654": "P", "654321": "H"}),
        "negative_overlap": (config(overlap_steps=-77), {"-77": "V"}),
        "long_overlap": (
            config(overlap_steps=987654),
            {"987654": "V", "654321": "H", "654320": "longest"},
        ),
        "pattern": (config(fragment_pattern="?"), {"'?'": "'{value}'"}),
        "wire": (config(wire_format="?"), {"'?'": "'{value}'"}),
        "count": (plan(chips_per_island=-77), {"chips_per_island": "name", "-77": "value"}),
        "flops": (plan(model_flops_utilization=77.0), {"77": "value"}),
        "bandwidth": (plan(gbit_per_second=-77.0), {"-77": "value"}),
        "latency": (plan(latency_seconds=-77.0), {"-77": "value"}),
        "empty": (
            lambda: planner.fragment_payloads(tiny, config(num_fragments=77)()),
            {
                "fragment 3 of 77": "fragment {number} of {P}",
                f"with {tiny.num_layers} layers": "with {num_layers} layers",
                "'strided'": "'{pattern}'",
            },
        ),
    }
    for kind in ("models", "hardware"):
        known = conf.names(kind)
        wrong = known[0] + "?"
        near = {f"'{wrong}'": "'{name}'", f"mean {known[0]}": "mean {near}"}
        checks[f"near_{kind}"] = (unknown(kind, wrong), near)
        checks[f"unknown_{kind}"] = (
            unknown(kind, "?"),
            {"'?'": "'{name}'", ", ".join(known): "known"},
        )
    said = {key: _template(call, stands_for) for key, (call, stands_for) in checks.items()}
    return said | {
        "beyond_page": "num_fragments {P} with pattern '{pattern}' is more than this page lists for "
        "{num_layers} layers; use `diloco plan`, or at most {most} here"
    }


def _template(call: Callable[[], Any], stands_for: dict[str, str]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        text = str(error)
    else:
        raise AssertionError(f"nothing refused {stands_for}")
    for stand_in, name in stands_for.items():
        text = text.replace(stand_in, name if "{" in name else f"{{{name}}}")
    return text


def page_html(data: dict[str, Any] | None = None) -> str:
    """The planner's place in a page, with its data beside it.

    Args:
        data: From `page_data`.

    Returns:
        HTML; `planner.js` and `planner-page.js` fill it.
    """
    text = json.dumps(page_data() if data is None else data, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c")
    lost = html.escape("This planner needs JavaScript; `diloco plan` has the same figures.")
    return (
        f'<div id="diloco-planner" class="planner"><noscript><p>{lost}</p></noscript></div>\n'
        f'<script type="application/json" id="diloco-planner-data">{escaped}</script>'
    )
