"""Prints a plan: the command `diloco plan`."""

import dataclasses
import json as json_module
import math
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from diloco import conf, links, tuning
from diloco.config import DiLoCoConfig
from diloco.models import decoder
from diloco.planner import Plan, plan
from diloco.windows import Window


def _option(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Name = Annotated[str | None, _option("NAME")]
Count = Annotated[int | None, _option("INT")]
Number = Annotated[float | None, _option("FLOAT")]
Pattern = Annotated[str | None, _option("{strided,sequential,balanced}")]


def rows(found: Plan) -> list[tuple[str, str]]:
    """The plan as lines of a table, each with its unit.

    Args:
        found: A plan.

    Returns:
        Pairs of what and how much.
    """
    c, gib = found.diloco, 2**30
    hbm = ", ".join(f"{k.replace('_', ' ')} {v / gib:.2f}" for k, v in found.hbm_bytes.items() if v)
    needed = ", ".join(
        f"{float(k):.0%}: {_gbit(v)}" for k, v in found.needed_gbit_per_second.items()
    )
    state = sum(found.hbm_bytes.values())
    return [
        (
            "parameters, and that a token meets",
            f"{found.parameters:,}, {found.active_parameters:,}",
        ),
        (
            "islands x chips (hosts)",
            f"{c.num_islands} x {found.chips_per_island} ({found.hosts_per_island})",
        ),
        ("tokens of an inner step of an island", f"{found.tokens_per_island_step:,}"),
        ("FLOPs of an inner step of an island", f"{found.flops_per_island_step:.3g}"),
        (
            f"inner step at {found.model_flops_utilization:.0%} of the peak",
            f"{found.step_seconds:.3g} s",
        ),
        ("state of a chip, GiB", f"{state / gib:.2f} of {found.hbm_limit_bytes / gib:.1f}: {hbm}"),
        (
            "fragment on the wire, largest and mean",
            f"{found.largest_fragment_bytes / 1e6:.4g} MB, {found.mean_fragment_bytes / 1e6:.4g} MB "
            f"({found.largest_over_mean:.2f}x)",
        ),
        ("sent by an island in H steps", f"{found.sent_bytes_per_period / 1e9:.4g} GB"),
        ("average of an island", _gbit(found.average_gbit_per_second)),
        (
            f"largest fragment in {max(c.overlap_steps, 1)} step(s): an island, a host",
            f"{_gbit(found.peak_gbit_per_second)}, {_gbit(found.peak_gbit_per_second_per_host)}",
        ),
        ("link needed so that no island waits", _gbit(found.zero_stall_gbit_per_second)),
        ("link needed for a utilization of", needed),
        (
            "planned link",
            f"{_gbit(found.gbit_per_second)}, latency {found.latency_seconds * 1e3:g} ms",
        ),
        (
            "utilization, and of data parallel",
            f"{found.utilization:.2%}, {found.data_parallel_utilization:.2%}",
        ),
        ("mean wait of an inner step", f"{found.stall_seconds_per_step:.3g} s"),
    ]


def _gbit(value: float) -> str:
    return "no link is enough" if value == math.inf else f"{value:.4g} Gbit/s"


def render(found: Plan, title: str, model: decoder.DecoderConfig) -> list[Any]:
    """The plan as tables and lines for a terminal.

    Args:
        found: A plan.
        title: Of the table.
        model: For the tuning advice.

    Returns:
        What `rich.console.Console.print` prints.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    for what, how_much in rows(found):
        table.add_row(what, how_much)
    w = Table(title="Windows", title_justify="left")
    for head in ("fragments", "MB sent", "window s", "alone it needs", "slack s", "hidden"):
        w.add_column(head, justify="left" if head == "fragments" else "right")
    for numbers, x in _alike(found.windows):
        w.add_row(
            numbers,
            f"{x.bytes / 1e6:.4g}",
            f"{x.window_seconds:.3g}",
            _gbit(x.own_bytes_per_second * 8 / 1e9),
            f"{x.slack_seconds:.3g}",
            "yes" if x.slack_seconds >= 0 else "no",
        )
    out: list[Any] = [table, w, found.sentence]
    out += [f"  {text}: utilization {used:.2%}" for text, used in found.changes]
    notes: dict[str, list[tuning.Advice]] = {}
    for advice in tuning.advise(found.diloco, found.parameters, model.num_layers):
        if advice.warning:
            notes.setdefault(advice.warning, []).append(advice)
    for warning, alike in notes.items():
        sources = "; ".join(a.source for a in alike)
        out.append(f"note: {', '.join(a.setting for a in alike)}: {warning} ({sources})")
    return out


def _alike(table: tuple[Window, ...]) -> list[tuple[str, Window]]:
    """Neighbouring fragments with equal bytes and slack, under one label."""
    runs: list[list[Window]] = []
    for x in table:
        if runs and (runs[-1][0].bytes, round(runs[-1][0].slack_seconds, 9)) == (
            x.bytes,
            round(x.slack_seconds, 9),
        ):
            runs[-1].append(x)
        else:
            runs.append([x])
    return [
        (f"{r[0].fragment}" if len(r) == 1 else f"{r[0].fragment}-{r[-1].fragment}", r[0])
        for r in runs
    ]


def to_json(found: Plan) -> dict[str, Any]:
    """The plan as plain values; an infinite rate, or a slack of minus infinity, is null.

    Args:
        found: A plan.

    Returns:
        Names as in `Plan`, units in the names, and `sentence`.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Window):
            return {k: plain(v) for k, v in value._asdict().items()}
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(dataclasses.asdict(found) | {"windows": found.windows}) | {
        "sentence": found.sentence
    }


def plan_command(
    recipe: Annotated[str | None, tyro.conf.Positional, _option("[RECIPE]")] = None,
    *,
    model: Name = None,
    hardware: Name = None,
    islands: Count = None,
    sync_period: Count = None,
    fragments: Count = None,
    overlap_steps: Count = None,
    pattern: Pattern = None,
    wire_format: Name = None,
    chips: Count = None,
    sequence_length: Count = None,
    sequences: Count = None,
    utilization: Number = None,
    gbit: Number = None,
    latency_ms: float = 0.0,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Says whether a link hides the exchanges of a run, and what to change if not.

    Example: diloco plan --model qwen3-8b --hardware tpu-v5p --islands 2 --chips 64 --sequences 512
    --sync-period 37 --fragments 37 --overlap-steps 1 --gbit 100

    Args:
        recipe: A recipe to start from; the options change it. Without one, --model and --hardware
            are needed.
        model: An entry of conf/models, or a .toml file.
        hardware: An entry of conf/hardware, or a .toml file.
        islands: M; 2 if nothing says otherwise.
        sync_period: H, inner steps between two syncs of a fragment; 100.
        fragments: P; 1.
        overlap_steps: V, inner steps between sending and applying a fragment; 0.
        pattern: How layers go to fragments; strided.
        wire_format: float32, bfloat16, int8 or float4_e3m0; float32.
        chips: Of one island; one host's.
        sequence_length: Tokens; 2048.
        sequences: Of one inner step of one island; one a chip.
        utilization: Share of the peak FLOP/s that the model gets; 0.4.
        gbit: Gbit/s of one island's link, one way; its hosts' egress together.
        latency_ms: Milliseconds of that link.
        json: Print JSON in place of tables.

    Raises:
        ValueError: If a name is not known or a value is out of its range.
    """
    base: dict[str, Any] = {"num_islands": 2, "sync_period": 100}
    given: dict[str, Any] = {}
    decoder_config = None
    if recipe is not None:
        from diloco.recipes import load_recipe

        r = load_recipe(recipe)
        base = {f.name: getattr(r.diloco, f.name) for f in dataclasses.fields(r.diloco)}
        decoder_config, model = (r.model, r.model_name) if model is None else (None, model)
        cluster = r.hardware
        hardware = hardware or (cluster.name if cluster else "laptop")
        given = {
            "sequence_length": r.data.sequence_length,
            "sequences": r.train.global_batch_size // (islands or r.diloco.num_islands),
            "chips": _chips(cluster.topology) if cluster and cluster.topology else 1,
            "utilization": cluster.utilization if cluster else None,
        }
    if model is None or hardware is None:
        raise ValueError(
            "plan was given no recipe and not both --model and --hardware; name a recipe, or a model "
            f"({', '.join(conf.names('models'))}) and hardware ({', '.join(conf.names('hardware'))})"
        )
    if decoder_config is None:
        table = conf.load("models", model)
        decoder_config = conf.build(decoder.DecoderConfig, table, f"model {model}")
    chip = links.load_hardware(hardware)
    options = {
        "num_islands": islands,
        "sync_period": sync_period,
        "num_fragments": fragments,
        "overlap_steps": overlap_steps,
        "fragment_pattern": pattern,
        "wire_format": wire_format,
    }
    config = DiLoCoConfig(**(base | {k: v for k, v in options.items() if v is not None}))

    def first(*values: Any) -> Any:
        return next(v for v in values if v is not None)

    chips = first(chips, given.get("chips"), chip.chips_per_host)
    found = plan(
        decoder_config,
        chip,
        config,
        chips_per_island=chips,
        sequence_length=first(sequence_length, given.get("sequence_length"), 2048),
        sequences_per_island=first(sequences, given.get("sequences"), chips),
        model_flops_utilization=first(utilization, given.get("utilization"), 0.4),
        gbit_per_second=gbit,
        latency_seconds=latency_ms / 1e3,
    )
    if json:
        print(json_module.dumps({"model": model, "hardware": hardware} | to_json(found), indent=1))
        return
    title = f"{model} on {config.num_islands} islands of {chip.title} (simulated)"
    for part in render(found, title, decoder_config):
        Console(highlight=False, markup=False, force_jupyter=False).print(part)


def _chips(topology: str) -> int:
    """Chips of `type:AxBxC`."""
    return math.prod(int(n) for n in topology.rpartition(":")[2].split("x"))
