"""A model small enough for a test, made here: random weights, and a tokenizer of bytes.

The weights are large, so that the output depends on the whole prompt: with a wrong KV cache other
tokens come out.
"""

from __future__ import annotations

import sys
from pathlib import Path

LAYERS, HIDDEN, HEADS, KV_HEADS, TOKENS_MAX = 2, 128, 4, 2, 4096


def make(folder: Path) -> None:
    """Write a Llama model and its tokenizer into a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        model_max_length=TOKENS_MAX,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS,
        max_position_embeddings=TOKENS_MAX, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
