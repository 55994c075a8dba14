"""Batches for islands: shuffled, resumable, and dealt again when the number of islands changes.

The training text is cut into examples of S + 1 tokens. Islands draw them without replacement from
streams: one stream that all islands share (i.i.d.), or one an island over its own groups of files
(non-i.i.d.). What was drawn is a pure function of the deals so far, `(islands, batch size, steps)`,
so a state is a few integers, and a new deal goes on with the examples nobody has seen.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from diloco.corpus import Corpus, load_corpus, unigram_entropy


__all__ = [
    "Corpus",
    "IslandBatches",
    "held_out",
    "island_iterators",
    "load_corpus",
    "unigram_entropy",
]

_MANY_STEPS = 2**40


def island_iterators(
    corpus: Corpus,
    *,
    num_islands: int,
    batch_size: int,
    sequence_length: int,
    split: str = "iid",
    seed: int = 0,
    islands: Sequence[int] | None = None,
) -> "IslandBatches":
    """Deals a corpus to islands.

    Args:
        corpus: What `load_corpus` returns.
        num_islands: M.
        batch_size: B, sequences a step over all islands.
        sequence_length: S, tokens the model reads; an example has one more.
        split: `"iid"`: every island draws from the whole text. `"non-iid"`: whole groups (packages,
            folders, files) belong to one island, balanced by bytes.
        seed: Of the order.
        islands: The islands whose batches are wanted, such as the one a process trains; None is all.

    Returns:
        An iterator of int32 tokens, shape `(islands, B / M, S + 1)`, without end.

    Raises:
        ValueError: If the split is unknown, M does not divide B, there are fewer groups than islands
            in a non-i.i.d. split, an island is out of range, or a stream has less text than one step takes.

    Example:
        >>> batches = island_iterators(load_corpus(), num_islands=2, batch_size=8, sequence_length=64)
        >>> next(batches).shape
        (2, 4, 65)
        >>> batches.get_state()
        {'deals': [[2, 8, 1]]}
    """
    return IslandBatches(
        _Deal(corpus, num_islands, batch_size, sequence_length, split, seed), islands
    )


def held_out(corpus: Corpus, sequence_length: int, limit: int | None = None) -> np.ndarray:
    """Cuts the held-out text into examples.

    Args:
        corpus: What `load_corpus` returns.
        sequence_length: S, tokens.
        limit: The most examples to return, evenly spread over the text; None is all.

    Returns:
        int32 tokens, shape `(examples, S + 1)`.

    Raises:
        ValueError: If the held-out text is shorter than one example.

    Example:
        >>> held_out(load_corpus(), 128, limit=4).shape
        (4, 129)
    """
    total = (corpus.held_out.size - 1) // sequence_length
    if total < 1:
        raise ValueError(
            f"the held-out text of {corpus.name} has {corpus.held_out.size} bytes, under one example "
            f"of {sequence_length + 1}; give more text or shorten sequence_length"
        )
    number = total if limit is None else min(limit, total)
    return _cut(corpus.held_out, np.arange(number) * total // number, sequence_length)


def _cut(text: np.ndarray, examples: np.ndarray, sequence_length: int) -> np.ndarray:
    """Returns examples by number; neighbours share one token, the last target and first input."""
    at = examples[..., None] * sequence_length + np.arange(sequence_length + 1)
    return text[at].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class _Deal:
    """How a corpus is dealt; equal deals draw the same examples."""

    corpus: Corpus
    num_islands: int
    batch_size: int
    sequence_length: int
    split: str
    seed: int

    def __post_init__(self):
        if self.split not in ("iid", "non-iid"):
            raise ValueError(f"split is {self.split!r}; use iid or non-iid")
        for name in ("num_islands", "batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch_size % self.num_islands:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by {self.num_islands} islands; "
                f"use {-(-self.batch_size // self.num_islands) * self.num_islands}"
            )
        for members in self.members():
            if members.size < self.take:
                raise ValueError(
                    f"the corpus {self.corpus.name} is too short: {members.size} examples of "
                    f"{self.sequence_length + 1} tokens where one step takes {self.take}; give more "
                    "text, shorten sequence_length or lower batch_size"
                )

    @property
    def take(self) -> int:
        """Examples a step takes from one stream."""
        return self.batch_size if self.split == "iid" else self.batch_size // self.num_islands

    @property
    def num_examples(self) -> int:
        return max(0, (self.corpus.train.size - 1) // self.sequence_length)

    def members(self) -> list[np.ndarray]:
        """Lists the examples of each stream. An example belongs to the group of its first token."""
        numbers = np.arange(self.num_examples)
        if self.split == "iid":
            return [numbers]
        sizes = np.diff(self.corpus.group_ends, prepend=0)
        if len(sizes) < self.num_islands:
            raise ValueError(
                f"the corpus {self.corpus.name} has {len(sizes)} groups for {self.num_islands} "
                "islands; use the iid split or fewer islands"
            )
        owner, load = np.zeros(len(sizes), np.int64), np.zeros(self.num_islands, np.int64)
        for group in np.argsort(-sizes, kind="stable"):  # the largest first, to the least loaded
            owner[group] = np.argmin(load)
            load[owner[group]] += sizes[group]
        starts = numbers * self.sequence_length
        island = owner[np.searchsorted(self.corpus.group_ends, starts, side="right")]
        return [numbers[island == m] for m in range(self.num_islands)]


class _Stream:
    """The order in which one stream gives its examples.

    First those that were drawn less often than others, then all of them, again and again.
    """

    def __init__(self, members: np.ndarray, drawn: np.ndarray, seed: int):
        self._members, counts = members, drawn[members]
        levels = range(counts.min(), counts.max())
        behind = [
            np.random.default_rng([seed, n]).permutation(members[counts <= n]) for n in levels
        ]
        self._behind = np.concatenate([np.empty(0, np.int64), *behind])
        order = grain.MapDataset.source(members).seed(seed + int(counts.max()))
        self._order = order.shuffle().repeat()

    def __getitem__(self, index: int) -> int:
        if index < self._behind.size:
            return int(self._behind[index])
        return int(self._order[index - self._behind.size])

    def count(self, drawn: np.ndarray, number: int) -> None:
        """Adds the first `number` examples to how often each was drawn."""
        np.add.at(drawn, self._behind[:number], 1)
        rounds, rest = divmod(max(0, number - self._behind.size), self._members.size)
        drawn[self._members] += rounds
        first = self._behind.size + rounds * self._members.size
        for index in range(first, first + rest):
            drawn[self[index]] += 1


class IslandBatches(grain.DatasetIterator[np.ndarray]):
    """An endless Grain iterator of `(islands, B / M, S + 1)` tokens; see `island_iterators`.

    Its state is `{"deals": [[num_islands, batch_size, steps], ...]}`, the last deal being the current
    one. A state of another number of islands or batch size may be set: the examples that no island
    has drawn yet are dealt again.

    Args:
        deal: How the examples are dealt now.
        islands: The islands whose batches are wanted; None for all.
    """

    def __init__(self, deal: _Deal, islands: Sequence[int] | None = None):
        super().__init__()
        self._deal = deal
        self._islands = tuple(range(deal.num_islands) if islands is None else islands)
        for m in self._islands:
            if not 0 <= m < deal.num_islands:
                raise ValueError(f"there is no island {m} among {deal.num_islands}; use 0 to M - 1")
        self._start([], 0)

    def _start(self, past: list[list[int]], step: int) -> None:
        """Replays the past deals and opens the current one at a step."""
        deal = self._deal
        drawn = np.zeros(deal.num_examples, np.int64)
        for num_islands, batch_size, steps in past:
            earlier = dataclasses.replace(deal, num_islands=num_islands, batch_size=batch_size)
            for stream in self._streams(earlier, drawn.copy()):
                stream.count(drawn, steps * earlier.take)
        self._past, streams = past, self._streams(deal, drawn)

        def batch(step: int) -> np.ndarray:
            drawn = range(step * deal.take, (step + 1) * deal.take)
            examples = np.array([[stream[i] for i in drawn] for stream in streams])
            examples = examples.reshape(deal.num_islands, -1)[list(self._islands)]
            return _cut(deal.corpus.train, examples, deal.sequence_length)

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        steps = grain.MapDataset.range(_MANY_STEPS).map(batch).to_iter_dataset(options)
        self._batches = iter(steps)
        self._batches.set_state({"next_index": step})

    @staticmethod
    def _streams(deal: _Deal, drawn: np.ndarray) -> list[_Stream]:
        return [_Stream(members, drawn, deal.seed) for members in deal.members()]

    def __next__(self) -> np.ndarray:
        """Returns the next step's tokens."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Returns the deals so far, fit for JSON."""
        steps = int(self._batches.get_state()["next_index"])
        return {"deals": [*self._past, [self._deal.num_islands, self._deal.batch_size, steps]]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken, dealing again if the islands or the batch changed."""
        *past, last = [[int(n) for n in deal] for deal in state["deals"]]
        if last[:2] == [self._deal.num_islands, self._deal.batch_size]:
            self._start(past, last[2])
        else:
            self._start([*past, last], 0)
