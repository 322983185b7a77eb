"""Writes a tiny language model with random weights, and a repository whose models use it."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}
"""
ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,  # nothing is compiled: the start is faster, the texts are slower
    "gpu_memory_utilization": 0.02,  # of the memory, also on a CPU
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 1,
}
CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1, kind: KIND_MODEL } ]\n'
SEPARATOR = 'parameters { key: "OPENAI_LORA_SEPARATOR" value { string_value: "-" } }\n'
LETTERS = b"abcdefghijklmnopqrstuvwxyz ,."
RANK = 4


def main(folder):
    torch.manual_seed(1)
    weights, adapter = folder / "weights", folder / "adapter"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(weights)
    network = tiny_llama(tokenizer)
    network.save_pretrained(weights)
    write_adapter(network, adapter)
    repository = folder / "models"
    write_model(repository / "tiny_llama", {"model": weights, "enable_lora": True, **ENGINE})
    loras = json.dumps({"loud": str(adapter.absolute())})
    (repository / "tiny_llama" / "1" / "multi_lora.json").write_text(loras)
    (repository / "tiny_llama" / "config.pbtxt").write_text(CONFIG + SEPARATOR)
    pooling = {"model": weights, "runner": "pooling", "convert": "embed", **ENGINE}
    write_model(repository / "tiny_embed", pooling)


def byte_tokenizer():
    """A token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def tiny_llama(tokenizer):
    """Two layers with random weights, which write letters only."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(config)
    letters = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(LETTERS.decode()))
    with torch.no_grad():  # the first dimension is large everywhere: a bias for the letters
        network.model.embed_tokens.weight[:, 0] = 20.0
        network.lm_head.weight[:, 0] = -10.0
        network.lm_head.weight[letters, 0] = 0.0
    return network


def write_adapter(network, folder):
    """Writes a LoRA adapter in the format of the package peft."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 64,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for index, layer in enumerate(network.model.layers):
        rows, columns = layer.self_attn.q_proj.weight.shape
        name = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK)
    torch.save(tensors, folder / "adapter_model.bin")


def write_model(folder, arguments):
    (folder / "1").mkdir(parents=True, exist_ok=True)
    arguments["model"] = str(arguments["model"].absolute())
    (folder / "1" / "model.json").write_text(json.dumps(arguments, indent=2))
    (folder / "config.pbtxt").write_text(CONFIG)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
