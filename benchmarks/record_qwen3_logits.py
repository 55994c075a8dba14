"""Records logits of Hugging Face transformers' Qwen3 and Qwen3-MoE on tiny random models.

    pip install "torch>=2.9" "transformers>=5" numpy
    python benchmarks/record_qwen3_logits.py tests/data

It writes `qwen3.npz` and `qwen3_moe.npz`: the weights under this package's names, tokens, logits,
and the versions that made them. `tests/test_decoder.py` and `tests/test_moe.py` compare
`diloco.models.decoder` to them, so the tests need no torch.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "model_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rope_base": 1e4,
    "norm_eps": 1e-6,
}
DENSE = {**SIZES, "mlp_dim": 48}
EXPERTS = {**SIZES, "num_experts": 8, "experts_per_token": 3, "expert_dim": 16}


def build(sizes: dict) -> torch.nn.Module:
    common = {
        "vocab_size": sizes["vocab_size"],
        "num_hidden_layers": sizes["num_layers"],
        "hidden_size": sizes["model_dim"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "rms_norm_eps": sizes["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_base"]},
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if "num_experts" not in sizes:
        return Qwen3ForCausalLM(Qwen3Config(intermediate_size=sizes["mlp_dim"], **common))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            num_experts=sizes["num_experts"],
            num_experts_per_tok=sizes["experts_per_token"],
            moe_intermediate_size=sizes["expert_dim"],
            norm_topk_prob=True,
            decoder_sparse_step=1,
            **common,
        )
    )


def convert(model: torch.nn.Module, sizes: dict) -> dict[str, np.ndarray]:
    """Renames and transposes the weights; linear layers are stored as (out, in) over there."""
    weights = {name: w.detach().numpy() for name, w in model.state_dict().items()}
    dim, head = sizes["model_dim"], sizes["head_dim"]

    def stack(name: str, change=lambda w: w) -> np.ndarray:
        layers = range(sizes["num_layers"])
        return np.stack([change(weights[f"model.layers.{i}.{name}"]) for i in layers])

    out = {
        "embed": weights["model.embed_tokens.weight"],
        "final_norm": weights["model.norm.weight"],
        "head": weights["lm_head.weight"].T,
        "layers.attention_norm": stack("input_layernorm.weight"),
        "layers.mlp_norm": stack("post_attention_layernorm.weight"),
        "layers.q_norm": stack("self_attn.q_norm.weight"),
        "layers.k_norm": stack("self_attn.k_norm.weight"),
        "layers.wo": stack("self_attn.o_proj.weight", lambda w: w.T),
    }
    for letter in "qkv":
        out[f"layers.w{letter}"] = stack(
            f"self_attn.{letter}_proj.weight", lambda w: w.T.reshape(dim, -1, head)
        )
    if "num_experts" not in sizes:
        for part in ("gate", "up", "down"):
            out[f"layers.w_{part}"] = stack(f"mlp.{part}_proj.weight", lambda w: w.T)
    else:
        gate_up = stack("mlp.experts.gate_up_proj", lambda w: w.swapaxes(-1, -2))
        out["layers.w_gate"], out["layers.w_up"] = np.split(gate_up, 2, axis=-1)
        out["layers.w_down"] = stack("mlp.experts.down_proj", lambda w: w.swapaxes(-1, -2))
        out["layers.router"] = stack("mlp.gate.weight", lambda w: w.T)
    return out


def record(sizes: dict, path: Path) -> None:
    torch.manual_seed(0)
    model = build(sizes).eval()
    with torch.no_grad():
        for weight in model.parameters():  # large enough that every part shows in the logits
            scale = 0.3 if weight.ndim > 1 else 0.2
            weight.copy_(scale * torch.randn_like(weight) + (0.0 if weight.ndim > 1 else 1.0))
        tokens = torch.randint(sizes["vocab_size"], (2, 16))
        logits = model(tokens).logits
    about = {
        "config": sizes,
        "command": "python benchmarks/record_qwen3_logits.py tests/data",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    arrays = {name: np.ascontiguousarray(w) for name, w in convert(model, sizes).items()}
    np.savez_compressed(
        path, about=json.dumps(about), tokens=tokens.numpy(), logits=logits.numpy(), **arrays
    )
    print(path, path.stat().st_size, "bytes; largest logit", float(logits.abs().max()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    record(DENSE, folder / "qwen3.npz")
    record(EXPERTS, folder / "qwen3_moe.npz")
