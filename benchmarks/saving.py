"""What saving costs the training loop: the same steps with and without a checkpoint, side by side in one process.

Blocks of 50 steps; half of them save once, in the background, as `diloco train` does, in the order without, with, with,
without, so that a machine that grows faster or slower does not count. Prints the median of the ratios of such fours,
the smallest and largest of them, and the ratio of CPU time; exits 1 if the median is above the bar.
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
    parser.add_argument("--fours", type=int, default=6, help="times four blocks are run")
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
        for save in (False, True, True, False) * arguments.fours:
            state, (wall, used) = block(state, save)
            seconds[save].append(wall)
            cpu[save].append(used)

    fours = range(0, 2 * arguments.fours, 2)
    ratios = [sum(seconds[True][i : i + 2]) / sum(seconds[False][i : i + 2]) for i in fours]
    ratio, used = statistics.median(ratios), sum(cpu[True]) / sum(cpu[False])
    print(f"{arguments.recipe}, {arguments.steps} steps a block, {len(seconds[True])} blocks each")
    for save, name in ((False, "without a save"), (True, "with one save")):
        print(f"{name}: {statistics.median(seconds[save]):.3f} s a block (median)")
    print(
        f"ratio of time {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), of CPU time {used:.3f}, "
        f"bar {arguments.bar}"
    )
    sys.exit(ratio > arguments.bar)


if __name__ == "__main__":
    main()
