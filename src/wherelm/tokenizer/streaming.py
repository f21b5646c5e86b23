"""Decoding one token after the other."""

from __future__ import annotations

from wherelm.tokenizer.tokenizer import Tokenizer


class DecodeStream:
    """Streaming decode that never shows half a character.

    All that `push` and `flush` return, one after the other, is what `Tokenizer.decode` gives.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, id: int) -> str:
        """The text that has become certain with this token."""
        self._ids.append(id)
        # A character whose last bytes are still to come decodes to U+FFFD at the end, one for all
        # of its bytes or, by a tokeniser that falls back to bytes, one for each.
        return self._new(self._tokenizer.decode(self._ids).rstrip("\ufffd"))

    def flush(self) -> str:
        """What is left when no token follows."""
        return self._new(self._tokenizer.decode(self._ids))

    def _new(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        return new
