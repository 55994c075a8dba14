"""What a decoder is made of: its sizes, and each parameter's shape, start and sharding.

The legend of the shapes written into names: V `vocab_size`, L `num_layers`, D `model_dim`,
N `num_heads`, K `num_kv_heads`, h `head_dim`, F `mlp_dim` or `expert_dim`, E `num_experts`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and numerics of a decoder.

    Args:
        vocab_size: V, tokens.
        num_layers: L.
        model_dim: D, width of the residual stream.
        num_heads: N, query heads; a multiple of `num_kv_heads`.
        num_kv_heads: K, key-value heads.
        head_dim: h, width of one head; even.
        mlp_dim: F, width of the dense SwiGLU; not used with experts.
        rope_base: Wavelength base of the rotary positions.
        norm_eps: Added to the mean square in a norm.
        num_experts: E; 0 is a dense MLP.
        experts_per_token: Experts each token is sent to; 1 to E.
        expert_dim: F, width of one expert's SwiGLU.
        capacity_factor: Slots of an expert over the mean number of tokens sent to one; over 0.
        expert_group: Tokens that share an expert's slots; at most a sequence, which it divides.
        dtype: Of the computation. Norms, softmax, router and loss are float32 whatever it is.
        param_dtype: Of the parameters.
        remat: Keep only each layer's input for the backward pass, and compute the rest again.
        attention_block: Query positions taken at once; 0 is all. Divides the sequence.
        loss_block: Positions whose logits exist at once; 0 is all. Divides the sequence.

    Raises:
        ValueError: If a value is outside the limits above.

    Example:
        >>> DecoderConfig(vocab_size=256, num_layers=2, model_dim=32, num_heads=3, num_kv_heads=2,
        ...               head_dim=16, mlp_dim=64)
        Traceback (most recent call last):
        ValueError: num_heads 3 is not a multiple of num_kv_heads 2; make it one
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int = 0
    rope_base: float = 1e4
    norm_eps: float = 1e-6
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    capacity_factor: float = 1.25
    expert_group: int = 512
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    attention_block: int = 0
    loss_block: int = 0

    def __post_init__(self):
        """Checks the values."""
        sizes = ["vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim"]
        if self.num_experts:
            sizes += ["experts_per_token", "expert_dim", "expert_group"]
        else:
            sizes += ["mlp_dim"]
        at_least_0 = ["num_experts", "attention_block", "loss_block"]
        for limit, names in ((1, sizes), (0, at_least_0)):
            for name in names:
                if getattr(self, name) < limit:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}; it must be at least {limit}"
                    )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}; make it one"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is over num_experts "
                f"{self.num_experts}; lower it"
            )
        if self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor is {self.capacity_factor}; it must be over 0")
        for name in ("dtype", "param_dtype"):
            if (value := getattr(self, name)) not in ("float32", "bfloat16"):
                raise ValueError(f"{name} is {value!r}; use float32 or bfloat16")


class Leaf(NamedTuple):
    """One parameter.

    Attributes:
        shape: Its shape.
        std: Deviation of its normal start; 0 is a norm's scale, which starts at one.
        axes: Mesh axis (or a tuple of them) along which each dimension is cut.
    """

    shape: tuple[int, ...]
    std: float
    axes: tuple[Any, ...]


def leaves(config: DecoderConfig) -> dict[str, Any]:
    """Lists every parameter once.

    `fsdp` is never put on the layer axis, along which fragments are cut, nor on the last axis,
    along which the wire formats form their blocks.
    """
    c, L, D, E = config, config.num_layers, config.model_dim, config.num_experts
    Nh, residual = c.num_heads * c.head_dim, (2 * c.num_layers) ** -0.5
    heads = (None, "fsdp", "tensor", None)
    layers = {
        "attention_norm": Leaf((L, D), 0.0, (None, None)),
        "wq": Leaf((L, D, c.num_heads, c.head_dim), D**-0.5, heads),
        "wk": Leaf((L, D, c.num_kv_heads, c.head_dim), D**-0.5, heads),
        "wv": Leaf((L, D, c.num_kv_heads, c.head_dim), D**-0.5, heads),
        "q_norm": Leaf((L, c.head_dim), 0.0, (None, None)),
        "k_norm": Leaf((L, c.head_dim), 0.0, (None, None)),
        "wo": Leaf((L, Nh, D), residual * Nh**-0.5, (None, ("tensor", "fsdp"), None)),
        "mlp_norm": Leaf((L, D), 0.0, (None, None)),
    }
    if E:
        F = c.expert_dim
        layers["router"] = Leaf((L, D, E), D**-0.5, (None, "fsdp", None))
        up = Leaf((L, E, D, F), D**-0.5, (None, "expert", "fsdp", "tensor"))
        # Not along F: its 768 rows over 64 chips are 12, and TPU memory pads rows to 8.
        down_axes = (None, ("expert", "fsdp"), "tensor", None)
        down = Leaf((L, E, F, D), residual * F**-0.5, down_axes)
    else:
        F = c.mlp_dim
        up = Leaf((L, D, F), D**-0.5, (None, "fsdp", "tensor"))
        down = Leaf((L, F, D), residual * F**-0.5, (None, ("tensor", "fsdp"), None))
    layers |= {"w_gate": up, "w_up": up, "w_down": down}
    return {
        "embed": Leaf((c.vocab_size, D), 1.0, ("fsdp", None)),
        "layers": layers,
        "final_norm": Leaf((D,), 0.0, (None,)),
        "head": Leaf((D, c.vocab_size), 0.25 * D**-0.5, ("fsdp", "tensor")),
    }


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def init(config: DecoderConfig, key: Array) -> dict[str, Any]:
    """Draws parameters: normal with standard deviation fan_in^(-1/2), norms at one.

    Matrices that write to the residual stream are a factor sqrt(2 L) smaller, and the head a factor
    of four, so that the loss starts within about 0.05 nats of ln V.

    Args:
        config: Sizes.
        key: A key of `jax.random.key`.

    Returns:
        `{"embed": (V, D), "layers": {name: (L, ...)}, "final_norm": (D,), "head": (D, V)}`, each in
        `param_dtype`.

    Example:
        >>> from diloco import conf
        >>> config = DecoderConfig(**conf.load("models", "tiny"))
        >>> init(config, jax.random.key(0))["layers"]["w_down"].shape
        (2, 64, 32)
    """
    flat, treedef = jax.tree.flatten(leaves(config), is_leaf=_is_leaf)
    dtype = jnp.dtype(config.param_dtype)

    def draw(leaf: Leaf, leaf_key: Array) -> Array:
        if leaf.std == 0.0:
            return jnp.ones(leaf.shape, dtype)
        return (leaf.std * jax.random.normal(leaf_key, leaf.shape, jnp.float32)).astype(dtype)

    keys = jax.random.split(key, len(flat))
    return treedef.unflatten([draw(leaf, k) for leaf, k in zip(flat, keys, strict=True)])


def num_parameters(config: DecoderConfig) -> int:
    """Counts all parameters.

    Example:
        >>> from diloco import conf
        >>> num_parameters(DecoderConfig(**conf.load("models", "qwen3-8b")))
        8190735360
    """
    flat = jax.tree.leaves(leaves(config), is_leaf=_is_leaf)
    return sum(math.prod(leaf.shape) for leaf in flat)


def active_parameters(config: DecoderConfig) -> int:
    """Counts the parameters one token meets: all but the experts it is not sent to.

    Example:
        >>> from diloco import conf
        >>> active_parameters(DecoderConfig(**conf.load("models", "qwen3-30b-a3b")))
        3353032704
    """
    one_expert = 3 * config.model_dim * config.expert_dim * config.num_layers
    return num_parameters(config) - (config.num_experts - config.experts_per_token) * one_expert


def present(axes: tuple[Any, ...], axis_names: tuple[str, ...]) -> PartitionSpec:
    """Makes a `PartitionSpec` of the axes a mesh has, and drops the others.

    Args:
        axes: Mesh axes wanted for each dimension.
        axis_names: Axes of the mesh.

    Returns:
        The specification.

    Example:
        >>> tuple(present(("layer", ("tensor", "fsdp"), None), ("islands", "fsdp")))
        (None, 'fsdp', None)
    """

    def one(axis: Any) -> Any:
        kept = tuple(a for a in (axis if isinstance(axis, tuple) else (axis,)) if a in axis_names)
        return kept if len(kept) > 1 else (kept[0] if kept else None)

    return PartitionSpec(*map(one, axes))


def param_specs(
    config: DecoderConfig, axis_names: tuple[str, ...] = ("islands", "fsdp")
) -> dict[str, Any]:
    """Says how the parameters of one island are cut over its devices.

    Args:
        config: Sizes.
        axis_names: Axes of the mesh. `"fsdp"`, `"tensor"` and `"expert"` are used where they exist.

    Returns:
        A tree like the parameters with a `PartitionSpec` for each, without the island axis.

    Example:
        >>> from diloco import conf
        >>> config = DecoderConfig(**conf.load("models", "tiny"))
        >>> tuple(param_specs(config)["layers"]["wo"])
        (None, 'fsdp', None)
    """
    return jax.tree.map(
        lambda leaf: present(leaf.axes, axis_names), leaves(config), is_leaf=_is_leaf
    )
