"""One reply's tokens as text that ends before a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wherelm.tokenizer.streaming import DecodeStream
from wherelm.tokenizer.tokenizer import Tokenizer


class Printer:
    """Turns one reply's tokens into text that ends before any of the `stops`.

    `write` gets the text as soon as it is certain: never half a character, and never what might
    become a stop.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], write: Callable | None = None):
        self.stream, self.stops, self.write = DecodeStream(tokenizer), stops, write
        self.text, self.held, self.stopped = "", "", False

    def push(self, token: int) -> bool:
        """Takes the next token; True where the reply ends with it."""
        self._take(self.stream.push(token))
        return self.stopped

    def close(self) -> str:
        """Writes what was held back; returns the whole text."""
        if not self.stopped:
            self._take(self.stream.flush())
        if not self.stopped:
            self._emit(len(self.held))
        return self.text

    def _take(self, text: str) -> None:
        self.held += text
        # The one that is complete first, wherever tokens begin and end.
        found = [(at + len(s), at) for s in self.stops if (at := self.held.find(s)) >= 0]
        self.stopped = bool(found)
        self._emit(min(found)[1] if found else len(self.held) - self._possible_stop())

    def _possible_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop."""
        sizes = [
            size
            for stop in self.stops
            for size in range(1, min(len(stop), len(self.held) + 1))
            if self.held.endswith(stop[:size])
        ]
        return max(sizes, default=0)

    def _emit(self, size: int) -> None:
        text, self.held = self.held[:size], self.held[size:]
        self.text += text
        if self.write is not None and text:
            self.write(text)
