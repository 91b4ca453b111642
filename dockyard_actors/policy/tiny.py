"""The tiny model: a 0.3 M-parameter Llama and its character tokenizer, both ordinary Hugging Face objects.
A checkpoint of it is a plain model directory that transformers and vLLM open; head_dim 32 is the least that vLLM takes.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
MAX_POSITIONS = 512


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character (newline and printable ASCII); anything else becomes `<unk>`. No BOS."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def tiny_config() -> LlamaConfig:
    """Width 96, 3 layers, 3 heads of 32, tied embeddings."""
    return LlamaConfig(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
