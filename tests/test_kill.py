"""kill -9 at twenty random moments, some inside a save: each run ends bit-equal to one that was never interrupted.

A process that has imported everything, but has not started JAX's backend and so has one thread, forks a child for each
attempt; only the first child compiles. A child writes down the tokens it was given and the saves it began.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest


KILLS, PER_RUN, STEPS = 20, 5, 24
OVERRIDES = [
    "model.name=tiny",
    "data.sequence_length=16",
    f"train.steps={STEPS}",
    "train.global_batch_size=8",
    "train.warmup_steps=2",
    "train.eval_every=8",
    "train.eval_sequences=8",
    "diloco.sync_period=6",
    "diloco.num_fragments=3",
    "diloco.overlap_steps=2",
    "diloco.mixing=0.5",
    "diloco.wire_format=float4_e3m0",
    "diloco.error_feedback=true",
]


def train(folder, text):
    """Trains in a child; every step's tokens and every save's begin become a line of `seen`."""
    from diloco import train as training
    from diloco.checkpoint import Checkpoints
    from diloco.recipes import load_recipe

    seen = os.open(folder / "seen", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    class Seen:
        def __init__(self, batches):
            self.batches = batches
            self.get_state, self.set_state = batches.get_state, batches.set_state

        def __next__(self):
            tokens = next(self.batches)
            step = self.get_state()["deals"][-1][2]
            digest = hashlib.sha256(tokens.tobytes()).hexdigest()
            os.write(seen, f"tokens {step} {digest}\n".encode())
            return tokens

    open_batches, save = training.open_batches, Checkpoints.save

    def said_save(self, config, state, **kwargs):
        os.write(seen, f"save {int(state.step)}\n".encode())
        save(self, config, state, **kwargs)

    training.open_batches = lambda *args: Seen(open_batches(*args))
    Checkpoints.save = said_save
    recipe = load_recipe("laptop-diloco", [*OVERRIDES, f'data.corpus="{text}"'])
    training.train(recipe, folder / "run", save_every=3)


def serve(cache, text):
    """Forks a child for each folder named on stdin; says its process and then how it ended."""
    import diloco.train  # noqa: F401

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for line in sys.stdin:
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads: a fork would not be safe"
        child = os.fork()
        if child == 0:
            try:
                train(Path(line.strip()), text)
            except BaseException as error:
                print("failed", repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc to tell that a fork is safe")
    folder = tmp_path_factory.mktemp("kill")
    (folder / "text.txt").write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(2000)))
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        [sys.executable, __file__, folder / "cache", folder / "text.txt"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield folder, process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def attempt(process, folder, until=None, delay=0.0):
    """Trains in a folder; kills the child `delay` seconds after `until` of its new lines holds. Returns its status."""
    folder.mkdir(exist_ok=True)
    (folder / "seen").touch()
    start = (folder / "seen").stat().st_size
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    while until is not None and Path(f"/proc/{child}").exists():
        with open(folder / "seen") as file:
            file.seek(start)
            if until(file.read().splitlines()):
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(child, signal.SIGKILL)
                break
        time.sleep(0.001)
    return int(process.stdout.readline())


def final(folder):
    """Everything a run ends with: the log, Theta, the summary, every leaf of the last state, the tokens seen."""
    from diloco import manifest, restoring

    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    found = restoring.inspect(run / "checkpoints")
    assert found["step"] == STEPS
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
        for name, (dtype, shape) in found["leaves"].items()
    }
    arrays = restoring.load(
        restoring.root_of(run / "checkpoints" / str(STEPS) / found["data"]), leaves
    )
    tokens = {}
    for line in (folder / "seen").read_text().splitlines():
        if line.startswith("tokens"):
            _, step, digest = line.split()
            tokens.setdefault(int(step), set()).add(digest)
    return {
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "theta": (run / "outer_params.safetensors").read_bytes(),
        "summary": {k: v for k, v in summary.items() if "second" not in k},
        "state": {name: np.asarray(x).tobytes() for name, x in arrays.items()},
        "tokens": tokens,
        "manifest name": manifest.NAME,
    }


def unfinished(folder):
    """Tells whether a kill came inside a save: arrays that no manifest names."""
    named = {
        json.loads(path.read_text())["data"]
        for path in folder.glob("run/checkpoints/*/manifest.json")
    }
    return any(p.name.split(".")[0] not in named for p in folder.glob("run/checkpoints/*/state-*"))


def test_twenty_kills(server):
    folder, process = server
    assert attempt(process, folder / "whole") == 0
    whole = final(folder / "whole")
    assert sorted(whole["tokens"]) == list(range(1, STEPS + 1))
    for part in ("inner/params/embed", "residual/embed", "outer_opt_state/0/trace/embed"):
        assert part in whole["state"]
    assert any(name.startswith("inner/opt_state/") for name in whole["state"])

    draw = random.Random(7)
    kills = inside = number = 0
    while kills < KILLS:
        number += 1
        assert number <= KILLS, "hardly a kill is faster than its run"
        here = folder / f"run{number}"
        for k in range(min(PER_RUN, KILLS - kills)):
            if k % 2:  # a moment after a save began that is not the one at the start
                until = lambda lines: any(  # noqa: E731
                    line.startswith("save") and line != "save 0" for line in lines
                )
                delay = draw.uniform(0, 0.04)
            else:  # a moment after a few steps, or before the first
                steps = draw.randrange(6)
                until = lambda lines, n=steps: (  # noqa: E731
                    sum(line.startswith("tokens") for line in lines) >= n
                )
                delay = draw.uniform(0, 0.05)
            status = attempt(process, here, until, delay)
            if status == 0:
                break  # the run was faster than the kill
            assert status == -signal.SIGKILL
            kills += 1
            inside += unfinished(here)
        else:
            assert attempt(process, here) == 0
        end = final(here)
        for part in whole:
            assert end[part] == whole[part], part
    print(f"{kills} kills in {number} runs, {inside} of them inside a save")
    assert kills == KILLS and inside >= 3


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
