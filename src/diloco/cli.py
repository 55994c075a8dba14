"""The command `diloco`: one function per subcommand, whose annotations and docstring are its help.

JAX is imported inside the functions, so that `--help` answers at once.
"""

import contextlib
import functools
import io
import json
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diloco import conf


Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
Overrides = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(metavar="SECTION.KEY=VALUE"),
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[str | None, tyro.conf.arg(metavar="PATH")]


def train(
    recipe: Name,
    *,
    set: Overrides = (),
    data: File = None,
    run_dir: Folder = None,
    save_every: int = 50,
    keep: int = 2,
    resume: Annotated[str, tyro.conf.arg(metavar="never|auto|STEP")] = "auto",
    allow_change: Flag = False,
) -> None:
    """Trains a recipe on this machine and writes a run directory; goes on where an interrupted run was saved.

    Example: diloco train laptop-diloco --set train.steps=120 --run-dir runs/short

    Args:
        recipe: A name that `diloco recipes` lists, or the path of a .toml file.
        set: Changes a value of the recipe; give it once or more.
        data: UTF-8 text to train on, a file or a folder, .gz too; instead of the recipe's corpus.
        run_dir: Where the run is written; runs/RECIPE if not given.
        save_every: Inner steps between two checkpoints.
        keep: Newest checkpoints to keep.
        resume: auto goes on from the newest intact checkpoint if there is one, never starts a run, a number goes
            back to the checkpoint of that step.
        allow_change: Goes on although the recipe differs from the one that was saved, or the log was lost.
    """
    from diloco.program import device_mesh
    from diloco.recipes import load_recipe
    from diloco.train import train as run

    if resume not in ("auto", "never") and not resume.isdecimal():
        raise ValueError(
            f"--resume {resume} is not known; use never, auto or the step of a checkpoint"
        )
    settings = load_recipe(recipe, _changes(set, data))
    # The storage library reports an error in its threads and event loops too; we say it once.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    threading.excepthook = sys.unraisablehook = lambda _: None
    run(
        settings,
        run_dir,
        mesh=device_mesh(settings),
        progress=True,
        save_every=save_every,
        keep=keep,
        resume=int(resume) if resume.isdecimal() else resume,
        allow_change=allow_change,
    )


def report(
    runs: Runs, *, out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
) -> None:
    """Compares runs in one HTML file that needs nothing else.

    Example: diloco report runs/laptop-data-parallel runs/laptop-diloco --out report.html

    Args:
        runs: Run directories; the first is the one that the others are compared with.
        out: The file to write.
    """
    from diloco.report import write_report

    if not runs:
        raise ValueError(
            "report was given no run; name at least one run directory, such as runs/laptop-diloco"
        )
    write_report(runs, out)
    print(f"wrote {out}")


def recipes() -> None:
    """Lists the recipes, with a line each.

    Example: diloco recipes
    """
    for name in conf.names("recipes"):
        print(f"{name:<36} {conf.load('recipes', name).get('meta', {}).get('summary', '')}")


def recipe(
    name: Name,
    *,
    target: Literal["maxtext", "xpk", "slurm", "local"] = "local",
    set: Overrides = (),
) -> None:
    """Prints a recipe as the command or script that runs it somewhere.

    Example: diloco recipe qwen3-8b-streaming-v5p-128x2 --target xpk > run.sh

    Args:
        name: A name that `diloco recipes` lists, or the path of a .toml file.
        target: What is to run it.
        set: Changes a value of the recipe; give it once or more.
    """
    from diloco import targets
    from diloco.recipes import load_recipe

    print(targets.render(load_recipe(name, list(set)), target), end="")


def compile(name: Name, *, json: Flag = False, set: Overrides = ()) -> None:
    """Compiles a recipe for its TPU topology, without a TPU, and reports memory and traffic.

    Example: diloco compile qwen3-8b-streaming-v5p-128x2 --json

    Args:
        name: A name that `diloco recipes` lists, or the path of a .toml file.
        json: Print JSON in place of a table.
        set: Changes a value of the recipe; give it once or more.
    """
    from diloco.tpu import compile_command

    print(compile_command(name, json, set))


def plan() -> Callable[..., None]:
    """Says whether a link hides the exchanges of a run, and what to change if not."""
    from diloco.plan import plan_command

    return plan_command


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train,
    "report": report,
    "recipes": recipes,
    "recipe": recipe,
    "plan": plan,
    "compile": compile,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake of the user is one line on stderr and exit status 2.

    Args:
        argv: Words after `diloco`; those of the process if None.

    Raises:
        SystemExit: With 2 after a mistake, 0 after `--help`, 130 after Ctrl-C (the first one lets `train` save and end
            with 0), 141 if nobody reads the output any more.

    Example:
        >>> main(["recipe", "laptop-dilco"])
        Traceback (most recent call last):
        SystemExit: 2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            _run(words)
        finally:
            sys.stdout.flush()  # here, where an error has a sentence
    except BrokenPipeError:
        _abandon_output()
        raise SystemExit(141) from None  # as a program ends that SIGPIPE ends
    except (ValueError, TypeError, OSError) as error:
        if not (isinstance(error, OSError) or _is_ours(error)):
            raise  # a defect, not a mistake of the user
        print(f"diloco: error: {' '.join(_sentence(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if words else 2)
    _quiet_libtpu()
    if words[0] not in COMMANDS:
        raise ValueError(f"no command {words[0]!r}; {conf.nearest(words[0], list(COMMANDS))}")
    _parse(words[0], words[1:])()


def _sentence(error: Exception) -> str:
    """Gives an error of the system, which is no sentence of ours, its path and a remedy."""
    if not (isinstance(error, OSError) and error.errno):
        return str(error)
    from diloco import storage

    if not error.filename:  # files of ours are named where they are written: this is the output
        _abandon_output()
    return f"{error.filename or 'the output'}: {error.strerror}; {storage.remedy(error)}"


def _abandon_output() -> None:
    """Lets go of what could not be printed; the interpreter would try it again, and complain, at its end."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(command: str, words: list[str]) -> Callable[[], None]:
    """Binds the arguments; what tyro would print in a frame becomes one line."""
    function = plan() if command == "plan" else COMMANDS[command]
    bind = functools.wraps(function)(
        lambda *args, **kwargs: functools.partial(function, *args, **kwargs)
    )
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(bind, prog=f"diloco {command}", args=words)
    except SystemExit as stop:
        if not stop.code:
            raise
    lines = [line.strip("│╭╮╰╯─ \n") for line in message.getvalue().splitlines()]
    text = " ".join(
        line for line in lines[1:] if line and not line.startswith(("For full helptext", "diloco "))
    )
    wrong = re.search(r"Error parsing (--\S+): .*?Argument helptext: --\S+ (\S+)", text)
    if wrong:  # the parser tells how it tried, at length
        text = f"{wrong[1]} is not of the kind {wrong[2]}"
    raise ValueError(f"{text.rstrip('.')}; see diloco {command} --help")


def _quiet_libtpu() -> None:
    """Keeps an installed libtpu from complaining at length, before any work, that this machine has no TPU."""
    if not (list(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists()):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")


def _is_ours(error: Exception) -> bool:
    """Tells a message for the user, raised by a line of this package, from a defect."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(
        Path(__file__).parent
    )


def _changes(overrides: tuple[str, ...], data: str | None) -> list[str]:
    if data is None:
        return list(overrides)
    return [*overrides, f"data.corpus={json.dumps(data, ensure_ascii=False)}"]


def _overview() -> str:
    lines = [
        f"  {name:<9} {(function.__doc__ or '').splitlines()[0]}"
        for name, function in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: diloco COMMAND ...",
            "",
            "DiLoCo and Streaming DiLoCo in JAX: train, compare, plan and compile recipes.",
            "",
            *lines,
            "",
            "Example: diloco train laptop-diloco && diloco report runs/laptop-diloco",
            "`diloco COMMAND --help` has the options and an example of each command.",
        ]
    )
