"""When a run stops because islands are not finite, and with what words."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from diloco import islands
from diloco.config import DiLoCoConfig
from diloco.state import DiLoCoState


def check_records(
    config: DiLoCoConfig,
    records: Sequence[dict[str, Any]],
    state: DiLoCoState,
    skipped: list[int],
    say: Callable[[str], None],
) -> list[int]:
    """Stops at the first island that is not finite, unless such islands are to be left out and others are left.

    Args:
        config: The algorithm.
        records: Of the log, in order; those of kind `"train"` have the islands' losses, None where not finite, and
            `state.skipped`.
        state: The newest state, to name a leaf.
        skipped: The counts of `state.skipped` before the first record.
        say: Told which islands were left out.

    Returns:
        The counts of `state.skipped` in the last record.

    Raises:
        ValueError: If a loss or pseudo-gradient is not finite while `on_bad_island` is `"error"`, or no island's is.

    Example:
        >>> config = DiLoCoConfig(num_islands=2, sync_period=4, on_bad_island="skip")
        >>> record = {"kind": "train", "step": 4, "loss": [2.5, None], "skipped": [0, 1]}
        >>> check_records(config, [record], None, [0, 0], print)
        step 4: islands [1] are not finite and left out of the mean
        [0, 1]
    """
    for record in records:
        if record["kind"] != "train":
            continue
        losses, before, skipped = record["loss"], skipped, record["skipped"]
        lost = [m for m, loss in enumerate(losses) if loss is None]
        refused = [m for m, (a, b) in enumerate(zip(before, skipped, strict=True)) if b > a]
        if config.on_bad_island == "error" and (lost or refused):
            what = "loss" if lost else "pseudo-gradient"
            _stop(what, (lost or refused)[0], record["step"], state)
        if len(refused) == len(skipped):
            raise ValueError(
                f"no island is finite at step {record['step']}, so none is left to go on with; "
                "lower train.learning_rate, and go on from an earlier checkpoint (--resume STEP --allow-change)"
            )
        if refused:
            say(f"step {record['step']}: islands {refused} are not finite and left out of the mean")
    return skipped


def check_state(config: DiLoCoConfig, state: DiLoCoState) -> None:
    """Stops before a state is saved in which an island is not finite, unless such islands are to be left out.

    Args:
        config: The algorithm.
        state: The state.

    Raises:
        ValueError: If an island is not finite while `on_bad_island` is `"error"`.
    """
    bad = islands.bad_leaves(state)
    if bad and config.on_bad_island == "error":
        _stop("state", bad[0][0], int(state.step), state)


def _stop(what: str, island: int, step: int, state: DiLoCoState) -> NoReturn:
    leaf = dict(islands.bad_leaves(state)).get(island)
    where = f" (its first leaf that is not finite: {leaf})" if leaf else ""
    raise ValueError(
        f"the {what} of island {island} is not finite at step {step}; lower train.learning_rate, or leave such "
        f"islands out with diloco.on_bad_island=skip{where}"
    )
