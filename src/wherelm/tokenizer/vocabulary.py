"""How text is cut into pieces, and how the vocabularies of our own tokenizers are learned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

CONTROL = ("<PAD>", "<BOS>", "<EOS>", "<USER>", "<ASSISTANT>", "<SYSTEM>")
SMALLEST_BPE = len(CONTROL) + 256

# GPT-4's pattern with three changes. Every piece has a longest length, because learning merges is
# quadratic in the longest piece. Marks stay with their letters. No piece mixes letters with "<" or
# ">", so that no merge can spell a control token.
PIECES = r" ?[\p{L}\p{M}]{1,24}|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]{1,8}|\s{1,8}(?!\S)|\s{1,8}"

# White space and what follows it up to the next. No piece of PIECES goes on into white space, so
# that words can be encoded one by one. U+001C to U+001F are white space to Python alone.
WORDS = re.compile(r"[^\S\x1c-\x1f]*[\S\x1c-\x1f]+|[^\S\x1c-\x1f]+")


def _byte_pieces() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _characters() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


def byte_level_backend(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019); without texts, plain bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = _byte_pieces()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend


def character_backend(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """One token a character of the texts, in the order of their code points."""
    alphabet = sorted(set().union(*map(set, texts)))
    vocabulary = {token: id for id, token in enumerate([*CONTROL, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = _characters()
    backend.decoder = decoders.Fuse()
    return backend


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def _description_of(pre_tokenizer: pre_tokenizers.PreTokenizer) -> dict[str, Any]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    return json.loads(backend.to_str())["pre_tokenizer"]


BYTE_OF = _byte_characters()
OWN_PRE_TOKENIZERS = [_description_of(_byte_pieces()), _description_of(_characters())]
