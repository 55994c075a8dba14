"""A recipe as MaxText's flags, checked against MaxText's own declarations.

`conf/maxtext_flags.toml` records the keys and types at one commit. Rules between keys are those that
MaxText checks when it starts. What a recipe asks for and MaxText cannot do is an error, never a
dropped flag.
"""

import math
import tomllib
from typing import Any, NamedTuple

from diloco import conf
from diloco.models.decoder import DecoderConfig
from diloco.recipes import Recipe


class Variable(NamedTuple):
    """A value that the user sets in the environment.

    Attributes:
        name: Of the variable.
        meaning: What to set it to, in words that need no quoting.
        default: Value if it is not set; None if it must be.
    """

    name: str
    meaning: str
    default: str | None = None


RUN_NAME = Variable("RUN_NAME", "the name of the run, under which its checkpoints are found")
OUTPUT = Variable("BASE_OUTPUT_DIRECTORY", "where runs are written, such as a gs:// folder")
DATASET = Variable("DATASET_PATH", "the ArrayRecord files to train on, a pattern")
TOKENIZER = Variable("TOKENIZER_PATH", "a Hugging Face tokenizer, a name or a folder")
CHECKPOINT_PERIOD = Variable("CHECKPOINT_PERIOD", "steps between two checkpoints", "500")

_CHOICES = {
    "DatasetType": ("grain", "hf", "synthetic", "tfds"),
    "DType": ("bfloat16", "float32"),
    "OptimizerType": ("adamw",),
    "TokenizerType": ("huggingface", "sentencepiece", "tiktoken"),
}


def table() -> dict[str, Any]:
    """Returns the recorded table: `commit`, `models`, and `flags`, key to type."""
    return tomllib.loads((conf.conf_dir() / "maxtext_flags.toml").read_text(encoding="utf-8"))


def flags(recipe: Recipe) -> dict[str, Any]:
    """Translates a recipe to MaxText's keys.

    Args:
        recipe: What to run, with a `[hardware]` section.

    Returns:
        Key to value; a `Variable` where the user's environment has the value.

    Raises:
        ValueError: If MaxText cannot express the recipe.

    Example:
        >>> from diloco.recipes import load_recipe
        >>> flags(load_recipe("qwen3-8b-streaming-v5p-128x2"))["num_diloco_fragments"]
        37
    """
    _check_expressible(recipe)
    c, t, hardware = recipe.diloco, recipe.train, recipe.hardware
    chips = math.prod(int(n) for n in hardware.topology.split(":")[1].split("x")) * hardware.slices
    found = {
        "run_name": RUN_NAME,
        "base_output_directory": OUTPUT,
        "model_name": recipe.model_name,
        "dataset_type": "grain",
        "grain_train_files": DATASET,
        "tokenizer_type": "huggingface",
        "tokenizer_path": TOKENIZER,
        "steps": t.steps,
        "max_target_length": recipe.data.sequence_length,
        "per_device_batch_size": t.global_batch_size / chips,
        "opt_type": "adamw",
        "learning_rate": t.learning_rate,
        "learning_rate_schedule_steps": t.steps,
        "warmup_steps_fraction": t.warmup_steps / t.steps,
        "learning_rate_final_fraction": t.final_learning_rate_fraction,
        "adam_b1": t.beta1,
        "adam_b2": t.beta2,
        "adam_weight_decay": t.weight_decay,
        "gradient_clipping_threshold": t.gradient_clip,
        "z_loss_multiplier": t.z_loss,
        "data_shuffle_seed": t.seed,
        "weight_dtype": recipe.model.param_dtype,
        "dtype": recipe.model.dtype,
        "pure_nnx": True,
        "scan_layers": True,
        "enable_checkpointing": True,
        "async_checkpointing": True,
        "checkpoint_period": CHECKPOINT_PERIOD,
        "enable_diloco": True,
        "dcn_diloco_parallelism": c.num_islands,
        "dcn_data_parallelism": hardware.slices // c.num_islands,
        "diloco_sync_period": c.sync_period,
        "diloco_outer_lr": c.outer_learning_rate,
        "diloco_outer_momentum": c.outer_momentum,
    }
    if recipe.model.remat:
        found["remat_policy"] = "full"
    if recipe.model.num_experts:
        found["load_balance_loss_weight"] = t.load_balance_loss
    if c.num_fragments > 1:
        found |= {
            "enable_streaming_diloco": True,
            "num_diloco_fragments": c.num_fragments,
            "use_sequential_layers": c.fragment_pattern == "sequential",
            "num_communication_overlapping_steps": c.overlap_steps,
            "communication_overlapping_alpha": c.mixing,
        }
    check(found, recipe.model.num_layers)
    return found


def check(found: dict[str, Any], num_layers: int) -> None:
    """Checks keys, types and the rules between keys, as MaxText does when it starts.

    Args:
        found: Key to value.
        num_layers: Layers of the model.

    Raises:
        ValueError: If a key is not in the recorded table, or a rule between keys is broken.
        TypeError: If a value is not of the type that MaxText declares.
    """
    recorded = table()
    known = recorded["flags"]
    for key, value in found.items():
        if key not in known:
            raise ValueError(
                f"MaxText at {recorded['commit']} has no key {key!r}; {conf.nearest(key, list(known))}"
            )
        if not isinstance(value, Variable) and not _is_of(value, known[key]):
            raise TypeError(f"MaxText's {key} is {known[key]}, not {value!r}; change the recipe")
    streaming = found.get("enable_streaming_diloco", False)
    fragments = found.get("num_diloco_fragments")
    rules = [
        (
            not streaming or found.get("enable_diloco", False),
            "enable_streaming_diloco needs enable_diloco=true",
        ),
        (not streaming or (fragments or 0) >= 2, "num_diloco_fragments must be 2 or more"),
        (
            not streaming or found.get("scan_layers", True),
            "enable_streaming_diloco needs scan_layers=true",
        ),
        (
            not streaming or (fragments or 0) < 2 or num_layers % (fragments - 1) == 0,
            f"num_diloco_fragments - 1 must divide the {num_layers} layers",
        ),
        (
            not found.get("enable_diloco") or found.get("pure_nnx", True),
            "enable_diloco needs pure_nnx=true",
        ),
        (
            not (found.get("enable_diloco") and found.get("use_tokamax_gmm", False)),
            "enable_diloco refuses use_tokamax_gmm=true",
        ),
        (
            0 <= found.get("communication_overlapping_alpha", 0.0) <= 1,
            "communication_overlapping_alpha must be in [0, 1]",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"MaxText at {recorded['commit']} refuses these flags: {rule}")


def _is_of(value: Any, kind: str) -> bool:
    if kind in _CHOICES:
        return value in _CHOICES[kind]
    if isinstance(value, bool):
        return kind == "bool"
    if isinstance(value, str):
        return "str" in kind.lower() or kind == "ModelName"
    if "float" in kind.lower():
        return isinstance(value, (int, float)) and (value >= 0 or "NonNegative" not in kind)
    least = {"PositiveInt": 1, "NonNegativeInt": 0}.get(kind, -math.inf)
    return "int" in kind.lower() and isinstance(value, int) and value >= least


def _check_expressible(recipe: Recipe) -> None:
    """Refuses what MaxText has no flag for, or does otherwise."""
    c, commit, name = recipe.diloco, table()["commit"], recipe.model_name
    h, p = c.sync_period, c.num_fragments
    if recipe.hardware is None or not recipe.hardware.topology:
        raise ValueError(
            f"recipe {recipe.name} has no TPU topology; add hardware.topology, such as v5p:4x4x4"
        )
    period = max(1, round(h / p)) * p
    sizes = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim")
    sizes += ("mlp_dim", "num_experts", "experts_per_token", "expert_dim")
    published = DecoderConfig(**conf.load("models", name))
    problems = [
        (
            name not in table()["models"],
            f"a model {name!r}; use {' or '.join(table()['models'])}",
        ),
        (
            any(getattr(recipe.model, s) != getattr(published, s) for s in sizes),
            f"other sizes than those of {name}; leave them as they are",
        ),
        (
            p > 1 and c.fragment_pattern == "balanced",
            "balanced fragments; use fragment_pattern strided or sequential",
        ),
        (
            c.wire_format != "float32",
            f"the wire format {c.wire_format}; use wire_format float32",
        ),
        (c.error_feedback, "error feedback; use error_feedback false"),
        (c.on_bad_island != "error", "on_bad_island skip; use error"),
        (
            p > 1 and recipe.model.num_layers % max(p - 1, 1) != 0,
            f"{p} fragments of {recipe.model.num_layers} layers; use a num_fragments with "
            "num_fragments - 1 dividing the layers",
        ),
        (
            period != h,
            f"sync_period {h} with {p} fragments (it would sync every {period} steps); use a "
            f"multiple of {p}",
        ),
        (
            p == 1 and c.overlap_steps > 0,
            "overlap_steps without fragments; use 0 or more fragments",
        ),
        (p == 1 and c.mixing > 0, "mixing without fragments; use 0 or more fragments"),
        (
            recipe.model.param_dtype != "float32",
            "a float32 Theta beside bfloat16 parameters; use model.param_dtype float32",
        ),
        (recipe.data.split != "iid", "data that differ between islands; use data.split iid"),
        (recipe.train.router_z_loss > 0, "a z-loss of the routers; use train.router_z_loss 0"),
    ]
    for holds, what in problems:
        if holds:
            raise ValueError(f"MaxText at {commit} cannot express {what}")
