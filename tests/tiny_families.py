"""Small random configs of many families of language models, their dropout and noise on."""

import transformers

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
OTHER_NAMES = {
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "xglm": {"ffn_dim": 32, "d_model": 32, "num_layers": 2, "attention_heads": 2},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "bloom": {"n_layer": 2, "n_head": 2},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
}
NOISE = {
    "mixtral": {"router_jitter_noise": 0.3},
    "minimax": {"router_jitter_noise": 0.3},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}


def random_config(kind):
    """A small config with every dropout at one half, and with router noise."""
    config_class = transformers.CONFIG_MAPPING[kind]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    settings = {name: value for name, value in SMALL.items() if name in known}
    config = config_class(**{**settings, **OTHER_NAMES.get(kind, {}), **NOISE.get(kind, {})})
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.5)
    return config
