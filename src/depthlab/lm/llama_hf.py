"""Between `depthlab.lm.Llama` and Hugging Face's ``LlamaForCausalLM``: config and weights, without transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthlab.lm.llama import Llama, LlamaConfig

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2", "none": "linear"}
_FIELDS = {
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


def load_hf(config: Mapping[str, Any], weights: Mapping[str, Tensor], **changes: Any) -> Llama:
    """A Llama with Hugging Face's config (``config.to_dict()`` or config.json) and state dict.

    Args:
        weights: names as in ``LlamaForCausalLM.state_dict()``; with a tied head ``lm_head.weight`` may be missing.
        changes: fields of `LlamaConfig` to replace, for example a shorter seq_len.

    Returns:
        a float32 model whose logits equal theirs.

    Raises:
        ValueError: a config with something this Llama has not (scaled rotary positions, biases, heads of another
            width), names missing or left over, or a tied head whose two matrices differ.
    """
    own = config_from_hf(config, **changes)
    given = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if own.tied and "lm_head.weight" in given:
        head, embedding = given.pop("lm_head.weight"), given.get("model.embed_tokens.weight")
        if embedding is not None and not torch.equal(head, embedding):
            raise ValueError("The config ties the head to the embedding, but their weights differ; use tied=False.")
    with torch.device("meta"):
        model = Llama(own)
    wanted = model.state_dict()
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or extra:
        raise ValueError(
            f"The weights are not those of this Llama: {len(missing)} are missing ({_some(missing)}), {len(extra)} are "
            f"unknown ({_some(extra)}); give the whole state dict of a LlamaForCausalLM."
        )
    for name, value in wanted.items():
        if given[name].shape != value.shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}; the config needs {list(value.shape)}.")
    model.load_state_dict({name: value.detach().float().clone() for name, value in given.items()}, assign=True)
    return model.requires_grad_(True)


def to_hf(model: Llama) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``(config, state dict)`` of the equal LlamaForCausalLM: ``LlamaForCausalLM(LlamaConfig(**config))``.

    The tensors are the model's own. Raises ValueError where Hugging Face has no equal: any residual but "prenorm".
    """
    own = model.config
    if own.residual != "prenorm":
        raise ValueError(f"residual={own.residual!r} has no equal in Hugging Face's Llama; only 'prenorm' has one.")
    config = {theirs: getattr(own, ours) for ours, theirs in _FIELDS.items()}
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": _ACTIVATIONS[own.activation],
        "num_key_value_heads": own.n_kv_heads or own.n_heads,
        "head_dim": own.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": own.rope_base,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": own.rope_base},  # read by transformers 5
    }
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    if own.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return config, weights


def config_from_hf(config: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """Our config of theirs; `changes` and errors as in `load_hf`."""
    if config.get("model_type", "llama") != "llama":
        raise ValueError(f"model_type={config['model_type']!r} is no Llama; give the config of a LlamaForCausalLM.")
    missing = [name for name in _FIELDS.values() if name not in config and name not in _DEFAULTS]
    if missing:
        raise ValueError(f"The config lacks {', '.join(missing)}; give all of a LlamaForCausalLM's config.")
    config = _DEFAULTS | dict(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"The config has rotary positions of the kind {kind!r}; this Llama has only 'default'.")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ValueError(f"The config has {name}=True; this Llama has no biases.")
    width = config["hidden_size"] // config["num_attention_heads"]
    if (config.get("head_dim") or width) != width:
        raise ValueError(f"The config has head_dim={config['head_dim']}; this Llama needs {width}, the even share.")
    ours = {theirs: name for name, theirs in _ACTIVATIONS.items()} | {"swish": "silu"}
    if config["hidden_act"] not in ours:
        raise ValueError(f"hidden_act={config['hidden_act']!r} is unknown; use one of {', '.join(ours)}.")
    fields = {name: config[theirs] for name, theirs in _FIELDS.items()}
    fields["activation"] = ours[config["hidden_act"]]
    fields["rope_base"] = float(rope.get("rope_theta", config.get("rope_theta") or 10_000.0))
    return LlamaConfig(**fields | changes)


# What config.json leaves out where it is Hugging Face's default.
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": None}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "") if names else "none"
