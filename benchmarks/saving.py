"""What saving costs the training loop: the same steps with and without a checkpoint, side by side in one process.

Blocks of 50 steps alternate; every second one saves once, in the background, as `diloco train` does. Prints the ratio
of the medians, and of the sums of CPU time; exits 1 if the time ratio is above the bar.
"""

import argparse
import statistics
import sys
import tempfile
import time

import jax

from diloco import data, recipes
from diloco import train as training
from diloco.checkpoint import Checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="laptop-diloco")
    parser.add_argument("--steps", type=int, default=50, help="inner steps between two saves")
    parser.add_argument("--pairs", type=int, default=8, help="blocks with and without a save")
    parser.add_argument("--bar", type=float, default=1.05, help="largest ratio that passes")
    arguments = parser.parse_args()

    recipe = recipes.load_recipe(arguments.recipe)
    corpus = data.load_corpus(recipe.data.corpus)
    batches = training.open_batches(recipe, corpus)
    program, state = training.build(recipe), training.start(recipe)
    seconds = {False: [], True: []}
    cpu = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as directory,
        Checkpoints(directory, keep=2) as checkpoints,
    ):

        def block(state, save):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            if save:
                checkpoints.save(recipe.diloco, state, extras={"data": batches.get_state()})
            for _ in range(arguments.steps):
                state, metrics = program.step(state, next(batches))
                jax.block_until_ready(metrics)
            checkpoints.wait()  # a save may not leak into the block without one
            times = time.perf_counter() - begin, time.process_time() - begin_cpu
            return state, times

        for save in (False, True):  # compiles, and makes the first files
            state, _ = block(state, save)
        for pair in range(2 * arguments.pairs):
            save = pair % 4 in (1, 2)  # without, with, with, without, ...
            state, (wall, used) = block(state, save)
            seconds[save].append(wall)
            cpu[save].append(used)

    ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
    used = sum(cpu[True]) / sum(cpu[False])
    print(f"{arguments.recipe}, {arguments.steps} steps a block, {arguments.pairs} blocks each")
    for save, name in ((False, "without a save"), (True, "with one save")):
        print(f"{name}: {statistics.median(seconds[save]):.3f} s a block (median)")
    print(f"ratio of time {ratio:.3f}, of CPU time {used:.3f}, bar {arguments.bar}")
    sys.exit(ratio > arguments.bar)


if __name__ == "__main__":
    main()
