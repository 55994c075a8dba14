"""Recipes: one TOML file is one run, read into frozen dataclasses and written back resolved.

A recipe names the algorithm, the model, the data, the training settings and, for a cluster, the
hardware. `load_recipe` reads it strictly; `Recipe.to_toml` writes every value out again.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from diloco import conf, tables
from diloco.config import DiLoCoConfig
from diloco.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a recipe is for, in words.

    Args:
        title: A line for a heading.
        summary: One sentence.
        sources: Where the settings come from.
        expected: What the run ends with, tagged *measured* or *compiled*, and on what.
        minutes: Wall time of the run on the hardware that `expected` names.
        deviations: Where the recipe departs from its sources.
        twin: The laptop recipe with the same algorithm settings; empty for none.
    """

    title: str
    summary: str
    sources: tuple[str, ...] = ()
    expected: str = ""
    minutes: float = 0.0
    deviations: str = ""
    twin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where the tokens come from.

    Args:
        corpus: `"python"` (the standard library's own source and prose), or a file or folder.
        split: `"iid"` deals every file to every island, `"non-iid"` gives each island its own.
        sequence_length: Tokens that are predicted in one sequence.
    """

    corpus: str = "python"
    split: Literal["iid", "non-iid"] = "iid"
    sequence_length: int = 128

    def __post_init__(self):
        """Checks every value."""
        _check_choice("data.split", self.split, ("iid", "non-iid"))
        _check_range("data.sequence_length", self.sequence_length, 1, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The inner optimization of every island, and the length of the run.

    Args:
        steps: Inner steps of the run.
        global_batch_size: Sequences of one inner step over all islands.
        learning_rate: Peak of the inner AdamW, after the warm-up.
        warmup_steps: Inner steps of linear warm-up from zero.
        final_learning_rate_fraction: Learning rate at the end, as a share of its peak (cosine).
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        weight_decay: AdamW's decoupled weight decay, times the learning rate.
        gradient_clip: Largest global norm of an island's gradient.
        z_loss: Weight of the squared log-partition in the loss; 0 for none.
        load_balance_loss: Weight of the experts' load-balance loss; 0 for none.
        router_z_loss: Weight of the routers' squared log-partition; 0 for none.
        eval_every: Inner steps between two validations.
        eval_sequences: Held-out sequences of one validation.
        seed: Of the initial parameters and the data order.
    """

    steps: int
    global_batch_size: int
    learning_rate: float
    warmup_steps: int = 0
    final_learning_rate_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    z_loss: float = 0.0
    load_balance_loss: float = 0.0
    router_z_loss: float = 0.0
    eval_every: int = 50
    eval_sequences: int = 64
    seed: int = 0

    def __post_init__(self):
        """Checks every value."""
        for name in ("steps", "global_batch_size", "eval_every", "eval_sequences"):
            _check_range(f"train.{name}", getattr(self, name), 1, math.inf)
        _check_range("train.warmup_steps", self.warmup_steps, 0, self.steps)
        _check_range("train.final_learning_rate_fraction", self.final_learning_rate_fraction, 0, 1)
        for name in ("weight_decay", "z_loss", "load_balance_loss", "router_z_loss"):
            _check_range(f"train.{name}", getattr(self, name), 0, math.inf)
        _check_range("train.seed", self.seed, 0, 2**32 - 1)
        for name in ("learning_rate", "gradient_clip"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"train.{name} {value} is not positive and finite; use 1e-4 to 1")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"train.{name} {value} is outside [0, 1); use 0.9 to 0.99")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """The cluster a recipe is made for.

    Args:
        name: An entry of `conf/hardware`.
        topology: Chips of one island as `type:AxBxC`, such as `"v5p:4x4x4"`.
        slices: Pod slices over all islands.
        utilization: Share of the peak FLOP/s that the model gets; used for estimates of time.
    """

    name: str
    topology: str = ""
    slices: int = 1
    utilization: float = 0.4

    def __post_init__(self):
        """Checks every value."""
        _check_choice("hardware.name", self.name, tuple(conf.names("hardware")))
        _check_range("hardware.slices", self.slices, 1, math.inf)
        if not 0 < self.utilization <= 1:
            raise ValueError(
                f"hardware.utilization {self.utilization} is outside (0, 1]; use 0.3 to 0.6"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a run.

    Args:
        name: Of the file, without `.toml`.
        meta: In words.
        diloco: The algorithm.
        model_name: The entry of `conf/models` that `model` started from.
        model: The model's sizes.
        data: Where the tokens come from.
        train: Inner optimization.
        hardware: The cluster; None for whatever devices JAX finds.

    Raises:
        ValueError: If the global batch is not divisible by the islands.
    """

    name: str
    meta: Meta
    diloco: DiLoCoConfig
    model_name: str
    model: DecoderConfig
    data: Data
    train: Train
    hardware: Hardware | None = None

    def __post_init__(self):
        """Checks what more than one section has a say in."""
        batch, islands = self.train.global_batch_size, self.diloco.num_islands
        if batch % islands:
            below = batch - batch % islands
            near = f"{below} or {below + islands}" if below else f"{islands}"
            raise ValueError(
                f"train.global_batch_size {batch} is not divisible by diloco.num_islands "
                f"{islands}; use {near}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the sections as nested dicts of plain values, every default written out."""
        sections = {
            f: dataclasses.asdict(getattr(self, f))
            for f in ("meta", "diloco", "model", "data", "train")
        }
        sections["model"] = {"name": self.model_name} | sections["model"]
        if self.hardware is not None:
            sections["hardware"] = dataclasses.asdict(self.hardware)
        return sections

    def to_toml(self) -> str:
        """Returns the recipe as TOML that `load_recipe` reads back to an equal one."""
        return tables.dumps(self.to_dict())


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and checks it.

    Args:
        name: An entry of `conf/recipes`, or the path of a `.toml` file.
        overrides: Values to change, each `section.key=value`; a later one wins.

    Returns:
        The resolved recipe.

    Raises:
        ValueError: If a recipe, section, key or model is not known, or a value is out of range.
        TypeError: If a value has the wrong type.

    Example:
        >>> recipe = load_recipe("laptop-diloco", ["diloco.num_islands=4", "train.steps=60"])
        >>> recipe.diloco.num_islands, recipe.train.steps
        (4, 60)
        >>> load_recipe("laptop-diloco", ["train.step=60"])
        Traceback (most recent call last):
        ValueError: [train] of laptop-diloco has no key 'step'; did you mean steps?
    """
    raw = conf.load("recipes", name)
    stem = Path(name).stem if str(name).endswith(".toml") else str(name)
    for section, table in raw.items():
        if not isinstance(table, dict):
            raise ValueError(
                f"{section} of {stem} stands outside a section; write it below one of {', '.join(f'[{s}]' for s in _SECTIONS)}"
            )
        if section not in _SECTIONS:
            remedy = conf.nearest(section, list(_SECTIONS))
            raise ValueError(f"{stem} has no section [{section}]; {remedy}")
    for text in overrides:
        tables.override(raw, text, list(_SECTIONS))
    model_name, model = _model_table(raw.get("model", {}), stem)
    raw["model"] = model
    built = {
        section: tables.build(cls, raw.get(section, {}), f"[{section}] of {stem}")
        for section, cls in _SECTIONS.items()
        if section in raw or section != "hardware"
    }
    return Recipe(name=stem, model_name=model_name, **built)


_SECTIONS: dict[str, type] = {
    "meta": Meta,
    "diloco": DiLoCoConfig,
    "model": DecoderConfig,
    "data": Data,
    "train": Train,
    "hardware": Hardware,
}


def _model_table(table: dict[str, Any], stem: str) -> tuple[str, dict[str, Any]]:
    """Returns the entry of `conf/models` and its sizes, with the recipe's own on top."""
    name = table.get("name")
    if not isinstance(name, str):
        known = ", ".join(conf.names("models"))
        raise ValueError(f"[model] of {stem} lacks the key 'name'; use one of {known}")
    return name, conf.load("models", name) | {k: v for k, v in table.items() if k != "name"}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or value == math.inf:
        remedy = f"{low} or more" if high == math.inf else f"{low} to {high}"
        limit = f"below {low}" if value < low else f"not in {low} to {high}"
        raise ValueError(f"{name} {value} is {limit}; use {remedy}")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
