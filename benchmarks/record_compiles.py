"""Compiles every recipe for its TPU topology and records what the compiler says, or checks the records.

python benchmarks/record_compiles.py            # writes docs/data/compiled/NAME.json
python benchmarks/record_compiles.py --check    # compiles again; fails if a figure drifted over 1 %

Needs libtpu (`pip install 'diloco[tpu]'`, Linux x86-64); no TPU. Name recipes to take only those.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from diloco import conf, tpu
from diloco.recipes import load_recipe


FOLDER = Path(__file__).parents[1] / "docs" / "data" / "compiled"
MEASURED = ("compile_seconds", "compile_cpu_seconds", "host_bytes")  # of the machine, not compared
LIMIT_SECONDS, LIMIT_BYTES = 4 * 60, 8 * tpu.GIB


def drift(recorded, found, where=""):
    """Yields (what, recorded, found) wherever two reports differ by over 1 %."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            if key not in MEASURED and key != "versions":
                yield from drift(recorded.get(key), found.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, pair in enumerate(zip(recorded, found, strict=True)):
            yield from drift(*pair, f"{where}[{i}]")
    elif isinstance(recorded, (int, float)) and isinstance(found, (int, float)):
        if abs(found - recorded) > 0.01 * abs(recorded):
            yield where, recorded, found
    elif recorded != found:
        yield where, recorded, found


def bars(compiled):
    """Yields the bars that a report misses."""
    if compiled.peak_bytes > compiled.hbm_bytes:
        yield f"peak {compiled.peak_bytes / tpu.GIB:.1f} GiB is over the chip's memory"
    if compiled.plain_across:
        yield f"a step without a send crosses slices: {compiled.plain_across}"
    for send in compiled.sends:
        share = tpu.device_payload(compiled, send)
        if abs(sum(send.across.values()) / share - 1) > 0.01:
            yield f"fragments {send.fragments} send {send.across}, not {share:.0f} bytes a device"
    # Processor time over two cores: what an idle machine would take at least.
    if compiled.compile_cpu_seconds / 2 > LIMIT_SECONDS or compiled.host_bytes > LIMIT_BYTES:
        yield f"{compiled.compile_cpu_seconds} s of processor time, {compiled.host_bytes} bytes"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    every = [name for name in conf.names("recipes") if load_recipe(name).hardware is not None]
    failed = False
    for name in arguments.recipes or every:
        compiled = tpu.compile_recipe(load_recipe(name))
        print(f"{tpu.table(compiled)}\n", flush=True)
        problems = list(bars(compiled))
        path = FOLDER / f"{name}.json"
        if arguments.check:
            found = json.loads(json.dumps(dataclasses.asdict(compiled)))
            for what, was, now in drift(json.loads(path.read_text()), found):
                problems.append(f"{what} was {was}, is {now}")
        elif not problems:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(tpu.to_json(compiled) + "\n")
        for problem in problems:
            print(f"{name}: {problem}", file=sys.stderr)
        failed = failed or bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
