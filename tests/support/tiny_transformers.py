"""Tiny Hugging Face models of the architectures people train."""

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

SETTINGS = {
    "llama": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "llama_tied": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    "gpt2": {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
    "bert": SIZES,
    "vit": {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5},
}

CLASSES = {
    "llama": "LlamaForCausalLM",
    "llama_tied": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForSequenceClassification",
    "vit": "ViTForImageClassification",
}


def config(name):
    """The content of a config.json."""
    model_type = name.partition("_")[0]
    return {"model_type": model_type, "architectures": [CLASSES[name]], **SETTINGS[name]}


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    built = getattr(transformers, CLASSES[name])(transformers.AutoConfig.for_model(**config(name)))
    return built.to(dtype).train()
