"""Compiles a recipe's whole train step for a TPU topology on a machine without a TPU.

libtpu holds the real compiler, and JAX can hand it a topology in place of devices. What comes back is
the program a pod would run: whether it fits the memory of a chip, and every byte it moves. libtpu runs
in a process of its own, since it takes over the one it is loaded into.
"""

import dataclasses
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from diloco.recipes import Recipe, load_recipe


GIB = 2**30
_TOPOLOGY = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):(\d+)x(\d+)(?:x(\d+))?")
_ACCELERATOR = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}  # TensorCores a chip, by which the product's name counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
    """What one send moves between islands.

    Args:
        fragments: Numbers of the fragments that share this branch of the program.
        wire_bytes: Bytes of the payload of one such fragment, from one island.
        across: Bytes one device sends, by operation.
        within: Bytes one device hands to operations inside its island, by operation.
    """

    fragments: tuple[int, ...]
    wire_bytes: int
    across: dict[str, int]
    within: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says about a recipe. A device is a chip, on TPU7x half of one.

    Args:
        recipe: Name.
        topology: Of one slice, such as `"v5p:4x4x4"`.
        slices: Slices.
        devices: Devices over all slices.
        versions: Of jax and libtpu.
        state_bytes: Parameters, optimizer states, Theta and batch on one device.
        temporary_bytes: What the step needs besides, on one device.
        peak_bytes: Both, and outputs that are no donated input.
        hbm_bytes: Memory of one device.
        plain_across: Bytes between islands on a step without a send, by operation.
        plain_within: Bytes one device hands to operations inside its island at every step, by operation.
        sends: One entry per branch that sends.
        flops: Matrix-product operations of one step on one device, recomputation included.
        program_lines: Lines of the StableHLO program.
        compile_seconds: Wall time of tracing and compiling.
        compile_cpu_seconds: Processor time of it, on all cores.
        host_bytes: Peak memory of the compiling process.
    """

    recipe: str
    topology: str
    slices: int
    devices: int
    versions: dict[str, str]
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    hbm_bytes: int
    plain_across: dict[str, int]
    plain_within: dict[str, int]
    sends: tuple[Send, ...]
    flops: float
    program_lines: int
    compile_seconds: float
    compile_cpu_seconds: float
    host_bytes: int


def compile_recipe(recipe: Recipe) -> Compiled:
    """Compiles the recipe's DiLoCo train step with libtpu, in a process of its own.

    Args:
        recipe: A recipe with a `[hardware]` section that names a topology.

    Returns:
        The compiler's report.

    Raises:
        ValueError: If the recipe names no topology or an unknown one, libtpu is missing or cannot be
            loaded here, the slices do not divide into islands, or the program does not fit the memory.
    """
    topology = _topology(recipe)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"libtpu is not installed on {platform.system()} {platform.machine()}; on Linux x86-64 "
            "install it with: pip install 'diloco[tpu]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{recipe.name}.toml"
        path.write_text(recipe.to_toml(), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-m", "diloco.aot", str(path)],
            env=os.environ | _environment(topology),
            capture_output=True,
            text=True,
            check=False,
        )
    lines = run.stdout.splitlines()
    answer = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if "error" in answer:
        raise ValueError(_sentence(answer["error"], recipe))
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the TPU compiler stopped with status {run.returncode}: {last}")
    return _from_dict(answer)


def compile_command(name: str, json_output: bool = False, overrides: tuple[str, ...] = ()) -> str:
    """Compiles a recipe for its TPU topology and returns the report as text.

    Args:
        name: An entry of `conf/recipes`, or the path of a `.toml` file.
        json_output: Return JSON instead of a table.
        overrides: Values of the recipe to change, each `section.key=value`.

    Returns:
        The text to print.
    """
    compiled = compile_recipe(load_recipe(name, overrides))
    return to_json(compiled) if json_output else table(compiled)


def to_json(compiled: Compiled) -> str:
    """Returns the report as JSON that reads back to the same fields."""
    return json.dumps(dataclasses.asdict(compiled), indent=1)


def from_json(text: str) -> Compiled:
    """Reads back what `to_json` wrote.

    Args:
        text: The report as JSON.

    Returns:
        The report.
    """
    return _from_dict(json.loads(text))


def _from_dict(fields: dict[str, Any]) -> Compiled:
    sends = tuple(Send(**s | {"fragments": tuple(s["fragments"])}) for s in fields["sends"])
    return Compiled(**fields | {"sends": sends})


def device_payload(compiled: Compiled, send: Send) -> float:
    """Returns the bytes of one fragment's payload that fall to one device of an island.

    Args:
        compiled: The report.
        send: One of its sends.

    Returns:
        Bytes; a whole number where the devices divide the payload.
    """
    return send.wire_bytes * compiled.slices / compiled.devices


def table(compiled: Compiled) -> str:
    """Returns the report as a Markdown table, one quantity a row."""
    c = compiled
    rows = [
        ("slices", f"{c.slices} x {c.topology}, {c.devices} devices"),
        ("state", f"{c.state_bytes / GIB:.2f} GiB"),
        ("temporaries", f"{c.temporary_bytes / GIB:.2f} GiB"),
        ("peak", f"{c.peak_bytes / GIB:.2f} of {c.hbm_bytes / GIB:.2f} GiB"),
        ("across slices, plain step", _bytes(c.plain_across)),
    ]
    for send in c.sends:
        share = device_payload(c, send)
        rows += [
            (f"across slices, sending {_fragments(send.fragments)}", _bytes(send.across)),
            ("  payload over the devices of an island", f"{share / 1e6:.3f} MB"),
        ]
    rows += [
        ("inside a slice, every step", _bytes(c.plain_within)),
        ("matrix products, one step", f"{c.flops / 1e12:.1f} TFLOP"),
        ("program", f"{c.program_lines} lines of StableHLO"),
        (
            "compiled in",
            f"{c.compile_seconds:.0f} s ({c.compile_cpu_seconds:.0f} s of processor time)",
        ),
        ("host memory", f"{c.host_bytes / GIB:.1f} GiB"),
    ]
    lines = [f"| {c.recipe} | one device |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines)


def _topology(recipe: Recipe) -> str:
    if recipe.hardware is None or not recipe.hardware.topology:
        raise ValueError(
            f"recipe {recipe.name} names no TPU; add hardware.topology, such as v5p:4x4x4"
        )
    return recipe.hardware.topology


def accelerator(topology: str) -> str:
    """Returns the product's name of a slice, which for some chips counts TensorCores.

    Example:
        >>> accelerator("v5p:4x4x4"), accelerator("v5e:4x4")
        ('v5p-128', 'v5litepod-16')
    """
    match = _TOPOLOGY.fullmatch(topology)
    if not match:
        raise ValueError(
            f"topology {topology!r} is not known; use v5p:4x4x4 or another size of "
            f"{', '.join(_ACCELERATOR)}"
        )
    kind, *sides = match.groups()
    return f"{_ACCELERATOR[kind]}-{_CORES.get(kind, 1) * math.prod(int(s or 1) for s in sides)}"


def _environment(topology: str) -> dict[str, str]:
    """What keeps libtpu quiet and off the network."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": accelerator(topology),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _sentence(error: str, recipe: Recipe) -> str:
    """Turns the compiler's message into one sentence with its remedy."""
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", error)
    used = used or re.search(r"\(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", error)
    if used:
        return (
            f"recipe {recipe.name} needs {used[1]} of a device's {used[2]} of memory; lower "
            "train.global_batch_size or data.sequence_length, or set model.remat and the blocks"
        )
    return f"recipe {recipe.name} does not compile for {recipe.hardware.topology}: {error}"


def _bytes(by_operation: dict[str, int]) -> str:
    return ", ".join(f"{k} {v / 1e6:,.3f} MB" for k, v in by_operation.items()) or "nothing"


def _fragments(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"fragment {numbers[0]}"
    return f"one of {len(numbers)} fragments like {numbers[0]}"
