"""A tokenizer that puts its first token before every text, as Llama's, Gemma's and Mistral's do."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

FIRST = "<s>"


def tokenizer_with_first_token() -> PreTrainedTokenizerFast:
    """Return one that knows the letters of "hi", and FIRST, which is token 0."""
    made = Tokenizer(models.WordLevel({FIRST: 0, "h": 1, "i": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens([FIRST])
    made.post_processor = processors.TemplateProcessing(single=f"{FIRST} $A", special_tokens=[(FIRST, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=FIRST)
