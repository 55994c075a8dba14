"""What a run says while it goes: `metrics.jsonl`, and a progress bar or plain lines."""

import itertools
import json
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diloco import storage


class RunLog:
    """Takes values that are still being computed, and writes them once they are there.

    The loop hands over device arrays and goes on; a value is read only when `lag` newer ones have been handed
    over, so that reading it never makes the device wait. Everything in the file is a function of the recipe:
    two equal runs write equal files.

    Args:
        path: The file to append to.
        tokens: Tokens that each island has seen before, also those of islands that have left.
        steps: Inner steps of the run.
        start: Inner steps done before.
        show: Whether to show progress: a bar on a terminal, else a line a validation.
        lag: Values to keep back.
    """

    def __init__(
        self,
        path: Path,
        tokens: Sequence[int],
        *,
        steps: int,
        start: int = 0,
        show: bool = False,
        lag: int = 2,
    ):
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")
        self.bytes, self.tokens = path.stat().st_size, list(tokens)
        self._pending: deque[tuple[str, int, Any]] = deque()
        self._steps, self._lag = steps, lag
        self._shown = {"loss": math.nan, "validation": math.nan}
        self._begin: tuple[float, int, int] | None = (
            None  # time, step, tokens after the compilation
        )
        self._show = show
        self._bar = _bar() if show and Console(file=sys.stderr).is_terminal else None
        if self._bar:
            self._task = self._bar.add_task("", total=steps, completed=start, rate="", losses="")
            self._bar.start()
        self.tokens_per_second = math.nan

    def add(self, kind: str, step: int, values: Any) -> list[dict[str, Any]]:
        """Hands over the values of one record.

        Args:
            kind: `"train"`, `"outer"` or `"eval"`.
            step: Completed inner steps.
            values: Field name to an array, of shape `(M,)` if it is per island.

        Returns:
            The records that were written meanwhile.
        """
        self._pending.append((kind, step, values))
        return self._write(self._lag)

    def drain(self) -> list[dict[str, Any]]:
        """Writes everything that is pending."""
        return self._write(0)

    def check(self) -> None:
        """Checks that the file still is the one that was written.

        Raises:
            ValueError: If it was removed, moved or changed.
        """
        there = storage.identity(self._path) == storage.identity(self._file.fileno())
        if not there or self._path.stat().st_size != self.bytes:
            raise ValueError(
                f"{self._path} was removed, moved or changed while the run wrote it; put it back, and the same command goes on"
            )

    def close(self) -> None:
        """Stops the bar and closes the file; what is pending is not written."""
        if self._bar:
            self._bar.stop()
        self._file.close()

    def say(self, text: str) -> None:
        """Shows a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        elif self._show:
            print(text, flush=True)

    def _write(self, keep: int) -> list[dict[str, Any]]:
        records = []
        while len(self._pending) > keep:
            kind, step, values = self._pending.popleft()
            record = {"kind": kind, "step": step}
            record |= {name: _plain(v.tolist()) for name, v in jax.device_get(values).items()}
            if kind == "train":
                both = itertools.zip_longest(self.tokens, record["tokens"], fillvalue=0)
                self.tokens = [a + b for a, b in both]
            record["tokens"] = self.tokens
            line = json.dumps(record) + "\n"  # ASCII
            self._file.write(line)
            self.bytes += len(line)
            self._progress(record)
            records.append(record)
        if records:
            self._file.flush()
        return records

    def _progress(self, record: dict[str, Any]) -> None:
        now, tokens = time.perf_counter(), sum(record["tokens"])
        if record["kind"] == "train":
            losses = [_number(x) for x in record["loss"]]
            self._shown["loss"] = sum(losses) / len(losses)
            if self._begin is None:
                self._begin = (now, record["step"], tokens)
            elif now > self._begin[0]:
                self.tokens_per_second = (tokens - self._begin[2]) / (now - self._begin[0])
        elif record["kind"] == "eval":
            self._shown["validation"] = _number(record["outer_loss"])
        losses = " ".join(f"{k} {v:.3f}" for k, v in self._shown.items() if math.isfinite(v))
        known = math.isfinite(self.tokens_per_second)
        rate = f"{self.tokens_per_second:,.0f} tokens/s" if known else ""
        if self._bar:
            self._bar.update(self._task, completed=record["step"], rate=rate, losses=losses)
        elif self._show and record["kind"] == "eval":
            print(
                f"step {record['step']}/{self._steps}  {losses}  {rate}{self._left(record, now)}",
                flush=True,
            )

    def _left(self, record: dict[str, Any], now: float) -> str:
        if self._begin is None or record["step"] <= self._begin[1]:
            return ""
        each = (now - self._begin[0]) / (record["step"] - self._begin[1])
        return f"  {(self._steps - record['step']) * each:.0f} s left"


def _bar() -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[losses]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )


def _plain(value: Any) -> Any:
    """Turns what is not finite into None, since JSON has no word for it."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
