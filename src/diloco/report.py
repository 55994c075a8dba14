"""One HTML file that compares runs: charts, a table of results, and what their recipes differ in."""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from diloco import charts, storage
from diloco.fragments import partition
from diloco.models import decoder
from diloco.recipes import Recipe, load_recipe
from diloco.schedule import schedule


_POINTS = 150  # of a line at most; more steps are averaged in bins


class Run(NamedTuple):
    """A run directory, read.

    Attributes:
        name: Of the directory.
        recipe: The resolved recipe.
        train: A line of `metrics.jsonl` a step.
        outer: A line a measured send.
        evals: A line a validation; the last one is after the flush.
        summary: Wall time and final losses; empty while the run goes on.
    """

    name: str
    recipe: Recipe
    train: list[dict[str, Any]]
    outer: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    summary: dict[str, Any]


def read_run(run_dir: Path | str) -> Run:
    """Reads a run directory.

    Args:
        run_dir: As `diloco train` writes it.

    Returns:
        The run.

    Raises:
        ValueError: If it is not a run directory, holds no step yet, or a line of the metrics is broken.

    Example:
        >>> read_run("no/such/run")
        Traceback (most recent call last):
        ValueError: no/such/run is not a run directory: it has no recipe.toml; name one that diloco train wrote
    """
    folder = Path(run_dir)
    for file in ("recipe.toml", "metrics.jsonl"):
        if not (folder / file).is_file():
            raise ValueError(
                f"{run_dir} is not a run directory: it has no {file}; "
                "name one that diloco train wrote"
            )
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "outer": [], "eval": []}
    for number, text in enumerate((folder / "metrics.jsonl").read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            lines[line["kind"]].append({k: _number(v) for k, v in line.items()})
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"{folder / 'metrics.jsonl'}, line {number}, is no record of a run; remove the line"
            ) from None
    if not lines["train"]:
        raise ValueError(f"{run_dir} holds no step yet; train for a step or more")
    summary = folder / "summary.json"
    try:
        end = json.loads(summary.read_text()) if summary.is_file() else {}
    except ValueError:
        raise ValueError(f"{summary} is damaged; remove it to report without a summary") from None
    return Run(
        name=folder.resolve().name,
        recipe=load_recipe(folder / "recipe.toml"),
        train=lines["train"],
        outer=lines["outer"],
        evals=lines["eval"],
        summary=end,
    )


def bytes_per_step(recipe: Recipe, steps: int) -> list[int]:
    """Computes what one island sends after each inner step, from the schedule and the fragments.

    Args:
        recipe: Of the run.
        steps: Inner steps.

    Returns:
        Bytes on the wire after steps 1, 2, ..., scales and padding included.

    Example:
        >>> from diloco.recipes import load_recipe
        >>> sent = bytes_per_step(load_recipe("laptop-diloco", ["diloco.sync_period=3"]), 4)
        >>> [b > 0 for b in sent]
        [False, False, True, False]
    """
    params = jax.eval_shape(lambda key: decoder.init(recipe.model, key), jax.random.key(0))
    fragments = partition(params, recipe.diloco).fragments
    plan = schedule(recipe.diloco)
    return [sum(fragments[p].wire_bytes for p in plan.sends(t)) for t in range(1, steps + 1)]


def write_report(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Writes the comparison of runs.

    Args:
        run_dirs: Run directories, the first being the one to compare with.
        out: The HTML file; it needs no other file and no network.

    Returns:
        `out`.

    Raises:
        ValueError: If there is no run, or one cannot be read.
        OSError: If the file cannot be written.
    """
    if not run_dirs:
        raise ValueError("there is no run to report; name at least one run directory")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    out = Path(out)
    with storage.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(runs), encoding="utf-8")
    return out


def render(runs: Sequence[Run]) -> str:
    """Returns the comparison of runs as a page of HTML."""
    figures = "".join(
        f"<figure><h2>{title}</h2>{chart}<figcaption>{caption}</figcaption></figure>"
        for title, chart, caption in _charts(runs)
    )
    heading = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_esc(heading)} – diloco report</title><style>{_STYLE}{charts.STYLE}</style></head>"
        f"<body><main><h1>{_esc(heading)}</h1>{_results(runs)}"
        f'<div class="charts">{figures}</div>{_differences(runs)}</main></body></html>\n'
    )


def _charts(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Returns title, SVG and caption of each chart."""
    every = list(enumerate(runs))
    validation = [
        charts.Series(
            run.name,
            [sum(line["tokens"]) for line in run.evals],
            [line["outer_loss"] for line in run.evals],
            i,
        )
        for i, run in every
    ]
    training = []
    for run in runs:
        for m in range(run.recipe.diloco.num_islands):
            x, y = _binned(run.train, m)
            training.append(charts.Series(f"{run.name}, island {m}", x, y, len(training)))
    norm = [_outer(run, "pseudo_gradient_norm", i) for i, run in every]
    cosine = [_outer(run, "cosine", i) for i, run in every if run.recipe.diloco.num_islands > 1]
    sent = []
    for i, run in every:
        steps = min(run.recipe.train.steps, 2 * max(r.recipe.diloco.sync_period for r in runs))
        y = bytes_per_step(run.recipe, steps)
        sent.append(charts.Series(run.name, range(1, steps + 1), y, i))
    specs = [
        ("Validation loss of Θ", validation, "tokens, all islands", "nats a token",
         "Held-out text, the outer parameters Θ; the last point is after the final flush."),
        ("Training loss of each island", training, "inner step", "nats a token",
         f"Each island on its own batches, averaged over bins of steps to {_POINTS} points."),
        ("Pseudo-gradient", norm, "inner step", "norm",
         "Norm of Θ − θ over all parameters before a send, mean over islands."),
        ("Agreement of the islands", cosine, "inner step", "cosine",
         "Cosine between the pseudo-gradients of two islands, mean over pairs."),
        ("Bytes sent after each step", sent, "inner step", "bytes an island",
         "Simulated from the schedule and the fragments, the wire format's scales included. "
         "With one island nothing has to leave it: the line is then what it would send."),
    ]  # fmt: skip
    return [
        (
            title,
            charts.line_chart(series, x_label=x, y_label=y, alt=_alt(title, series, x)),
            caption,
        )
        for title, series, x, y, caption in specs
        if series
    ]


def _outer(run: Run, key: str, style: int) -> charts.Series:
    y = [line[key] for line in run.outer]
    y = [sum(v) / len(v) if isinstance(v, list) else v for v in y]
    return charts.Series(run.name, [line["step"] for line in run.outer], y, style)


def _binned(lines: list[dict[str, Any]], island: int) -> tuple[list[float], list[float]]:
    size = math.ceil(len(lines) / _POINTS)
    bins = [lines[i : i + size] for i in range(0, len(lines), size)]
    return [b[-1]["step"] for b in bins], [sum(s["loss"][island] for s in b) / len(b) for b in bins]


def _alt(title: str, series: Sequence[charts.Series], x_label: str) -> str:
    ends = [f"{s.label} from {s.y[0]:.4g} to {s.y[-1]:.4g}" for s in series if len(s.y)]
    return f"{title} against {x_label}: {'; '.join(ends) or 'no value yet'}."


def _results(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        steps = run.recipe.train.steps
        sent = bytes_per_step(run.recipe, steps)
        last = run.evals[-1] if run.evals else {"outer_loss": math.nan}
        seconds = run.summary.get("seconds", math.nan)
        rows.append([
            run.name,
            f"{last['outer_loss']:.4f}" if math.isfinite(last["outer_loss"]) else "–",
            f"{run.train[-1]['step']} of {steps}",
            charts.short(float(sum(run.train[-1]["tokens"]))),
            charts.short(sum(sent) / steps),
            charts.short(float(max(sent))),
            f"{seconds:.0f}" if math.isfinite(seconds) else "–",
        ])  # fmt: skip
    head = ["run", "validation loss of Θ, nats a token", "steps", "tokens",
            "bytes a step, mean", "largest send, bytes", "wall time, s"]  # fmt: skip
    return _table("Results", head, rows)


def _differences(runs: Sequence[Run]) -> str:
    flat = [
        {f"{s}.{k}": v for s, table in run.recipe.to_dict().items() if s != "meta"
         for k, v in table.items()}
        for run in runs
    ]  # fmt: skip
    keys = dict.fromkeys(k for table in flat for k in table)
    rows = [
        [key, *(str(table.get(key, "–")) for table in flat)]
        for key in keys
        if len({str(table.get(key)) for table in flat}) > 1
    ]
    if not rows:
        return "" if len(runs) == 1 else "<p>The recipes have the same settings.</p>"
    return _table("Where the recipes differ", ["setting", *(run.name for run in runs)], rows)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{_esc(c)}</th>' for c in head)
    body = "".join(
        f'<tr><th scope="row">{_esc(row[0])}</th>'
        + "".join(f"<td>{_esc(c)}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<section aria-label="{_esc(caption)}"><h2>{_esc(caption)}</h2>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_esc(caption)}, table">'
        f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _number(value: Any) -> Any:
    """Reads the null of a value that was not finite."""
    if isinstance(value, list):
        return [_number(v) for v in value]
    return math.nan if value is None else value


def _esc(text: str) -> str:
    return html.escape(text, quote=True)


_STYLE = """
:root{color-scheme:light dark;--text:#1b1b1f;--page:#fff;--rule:#c9c9d1}
@media (prefers-color-scheme:dark){:root{--text:#e8e8ec;--page:#16161a;--rule:#44444c}}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:72rem;margin:auto;padding:1rem}
h1{font-size:1.6rem}h2{font-size:1.1rem;margin:1.2rem 0 .4rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1.5rem}
figure{margin:0;max-width:34rem}figcaption{font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th:first-child{text-align:left}thead th{vertical-align:bottom;white-space:normal}
"""
