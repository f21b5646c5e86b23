"""A tokeniser made from the training split, or taken from a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from wherelm.data.cache import code_of, key_of, stored_text
from wherelm.data.messages import messages_of
from wherelm.tokenizer.tokenizer import Tokenizer
from wherelm.tokenizer.vocabulary import (
    CONTROL,
    SMALLEST_BPE,
    byte_level_backend,
    character_backend,
)

if TYPE_CHECKING:
    import datasets

    from wherelm.data.examples import Examples

KINDS = ("bpe", "bytes", "characters", "file")
CHARACTERS_PER_TOKEN = 2048  # more text than this for each word of the vocabulary teaches little


@dataclass(frozen=True)
class TokenizerConfig:
    """`vocab_size` (control tokens included) belongs to bpe, `path` to file."""

    kind: str = "bpe"
    vocab_size: int | None = None
    path: str | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"tokenizer.kind={self.kind}: expected one of {', '.join(KINDS)}")
        if self.kind == "bpe" and (self.vocab_size is None or self.vocab_size < SMALLEST_BPE):
            raise ValueError(
                f"tokenizer.vocab_size={_shown(self.vocab_size)}: expected at least {SMALLEST_BPE} "
                f"({len(CONTROL)} control tokens and 256 bytes) for tokenizer.kind=bpe"
            )
        if self.kind != "bpe" and self.vocab_size is not None:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size}: expected null, for the vocabulary of "
                f"tokenizer.kind={self.kind} is given (only bpe takes a size)"
            )
        if self.kind == "file" and self.path is None:
            raise ValueError("tokenizer.path=null: expected tokenizer.path=FOLDER/tokenizer.json")
        if self.kind != "file" and self.path is not None:
            raise ValueError(f"tokenizer.path={self.path}: expected null, or tokenizer=file")


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the configuration asks for; `texts` are those of the training split.

    The same texts in the same order give the same tokenizer in every process. The vocabulary may
    turn out smaller than `vocab_size`: pairs that occur once are not merged.
    """
    if config.kind == "file":
        return Tokenizer.load(Path(config.path))
    if config.kind == "characters":
        return Tokenizer(character_backend(texts))
    size = SMALLEST_BPE if config.kind == "bytes" else config.vocab_size
    return Tokenizer(byte_level_backend(texts if config.kind == "bpe" else (), size))


def build_tokenizer(config: TokenizerConfig, examples: Examples, root: Path) -> Tokenizer:
    """`train_tokenizer` on the examples of the training split, kept in their cache.

    Merges are learned from about CHARACTERS_PER_TOKEN characters for each word of the vocabulary:
    from every n-th example, where there is more text. tokenizer.path counts from the working
    directory, else from `root`.
    """
    if config.kind == "file":
        path = Path(os.path.expanduser(config.path))
        here = path.is_file() or not (root / path).is_file()
        return Tokenizer.load(path if here else root / path)

    def content() -> str:
        dataset = examples.dataset
        if config.kind == "bpe":
            every = -(-_characters_of(dataset) // (CHARACTERS_PER_TOKEN * config.vocab_size))
            dataset = dataset.select(range(0, len(dataset), every))
        texts = (message.content for example in messages_of(dataset) for message in example)
        return train_tokenizer(config, texts).to_json()

    code = code_of("tokenizer.vocabulary")
    parts = (code, tokenizers.__version__, examples.key, config.kind, config.vocab_size)
    saved = stored_text(examples.cache, f"tokenizer-{key_of(*parts)[:32]}", content)
    return Tokenizer(tokenizers.Tokenizer.from_str(saved))


def _characters_of(dataset: datasets.Dataset) -> int:
    import pyarrow.compute as pc

    turns = dataset.with_format("arrow")[:]["messages"].combine_chunks().flatten()
    return pc.sum(pc.utf8_length(turns.field("content"))).as_py()


def _shown(value: object) -> object:
    return "null" if value is None else value
