"""A small language model with random weights, for trying text generation without a download."""

from __future__ import annotations

from pathlib import Path

_EOS = "<end>"


def make_demo(folder: Path, *, width: int = 512, num_layers: int = 12) -> int:
    """Write a random Llama with a byte-level tokenizer into ``folder``; return the bytes of its weights.

    Its text is noise; what it shows is how weights larger than the budget are streamed.

    Raises:
        FileExistsError: there is something in the folder already.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder for the demo model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, _EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=vocabulary[_EOS],
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS).save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())
