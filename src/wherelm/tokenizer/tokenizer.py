"""Text and control tokens to ids and back; every kind of tokenizer is one tokenizer.json.

V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from wherelm.data.messages import Span, check_encodable
from wherelm.tokenizer.vocabulary import (
    BYTE_OF,
    CONTROL,
    OWN_PRE_TOKENIZERS,
    WORDS,
)

MOST_WORDS = 1 << 17  # kept with their ids at a time


class Tokenizer:
    """Encodes text as text: whatever it contains, it never becomes a control id.

    `pad`, `bos`, `eos`, `user`, `assistant` and `system` are the ids of the control tokens: 0 to 5
    in a tokenizer that was trained here, others in a given file that lacks them. `fingerprint` is a
    sha256 of the whole tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        # The library does not save this one in tokenizer.json, so it is set on every load.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        _add_control_tokens(backend)
        self._backend = backend
        content = backend.to_str()
        self._description: dict[str, Any] = json.loads(content)
        self._word_ids: dict[str, list[int]] = {}
        self._own = self._description["pre_tokenizer"] in OWN_PRE_TOKENIZERS
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._control = {name: backend.token_to_id(name) for name in CONTROL}
        self._names = {i: name for name, i in self._control.items()}
        self._special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.pad, self.bos, self.eos, self.user, self.assistant, self.system = (
            self._control.values()
        )
        _check_control_is_closed(backend, self._description)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a tokenizer.json; ValueError if there is none, or one that cannot serve."""
        path = Path(os.path.expanduser(path))
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a tokenizer.json (tokenizer.path=…)")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        except Exception as error:  # the library raises no narrower class
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: not a tokenizer.json ({reason})") from error

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return self._backend.to_str()

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self._backend.to_str(pretty=True) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, never a control id. ValueError for text that the tokenizer cannot hold."""
        return self._encode_all([text])[0]

    def encode_spans(self, example: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Ids of one example, and for each whether it is to be learned."""
        return self.encode_examples([example])[0]

    def encode_examples(
        self, examples: Sequence[Sequence[Span]]
    ) -> list[tuple[list[int], list[bool]]]:
        """`encode_spans` for many examples at once, on all cores."""
        ids, learned, ends = self.encode_flat(examples)
        parts = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
        return [(ids[part].tolist(), learned[part].tolist()) for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out; bytes that are no text become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def control_name(self, id: int) -> str | None:
        """The name of a control token, such as "<EOS>"; None for any other token."""
        return self._names.get(int(id))

    def token_text(self, id: int) -> str:
        """One token made readable for pictures: white space visible, broken characters in hex."""
        name = self.control_name(id)
        if name is not None:
            return name
        text = self._token_bytes[int(id)].decode("utf-8", errors="backslashreplace")
        return text.translate({32: "␣", 10: "↵", 9: "⇥", 13: "␍"})

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each token's text, (V,), 0 for control tokens."""
        return np.array([len(part) for part in self._token_bytes], dtype=np.int64)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        decoder = self._description["decoder"] or {}
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
        added = self._backend.get_added_tokens_decoder()
        result = []
        for id in range(self.vocab_size):
            token = self._backend.id_to_token(id)
            if token is None or id in self._special:
                result.append(b"")
            elif id in added:
                result.append(token.encode())
            elif "ByteLevel" in steps and BYTE_OF.keys() >= set(token):
                result.append(bytes(BYTE_OF[character] for character in token))
            elif "ByteFallback" in steps and token.startswith("<0x") and len(token) == 6:
                result.append(bytes([int(token[3:5], 16)]))
            else:
                # SentencePiece writes spaces as U+2581; our own alphabets hold it as itself.
                result.append((token if self._own else token.replace("▁", " ")).encode())
        return result

    def encode_flat(
        self, examples: Sequence[Sequence[Span]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and flags of all examples in a row; example i is [ends[i] : ends[i + 1]]."""
        everything = [span for example in examples for span in example]
        encoded = iter(self._encode_all([span.text for span in everything if not span.control]))
        control = {name: [id] for name, id in self._control.items()}
        parts = [control[s.text] if s.control else next(encoded) for s in everything]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int32, int(lengths.sum()))
        learned = np.repeat(np.array([span.learned for span in everything], dtype=bool), lengths)
        spans_before = np.cumsum([0, *map(len, examples)])
        return ids, learned, np.concatenate(([0], np.cumsum(lengths)))[spans_before]

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each word once: the library needs microseconds for each, a lookup does not."""
        if not self._own:
            return self._encode_plainly(texts)
        words = [WORDS.findall(text) for text in texts]
        if len(self._word_ids) > MOST_WORDS:
            self._word_ids.clear()
        known = self._word_ids
        new = list(dict.fromkeys(word for part in words for word in part if word not in known))
        known.update(zip(new, self._encode_plainly(new), strict=True))
        return [[id for word in part for id in known[word]] for part in words]

    def _encode_plainly(self, texts: Sequence[str]) -> list[list[int]]:
        """What the library makes of whole texts."""
        try:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises no narrower class
            for text in texts:
                self._check(text)
            raise AssertionError(f"the tokenizer failed: {error}") from error
        return [encoding.ids for encoding in encoded]

    def _check(self, text: str) -> None:
        check_encodable(text)
        if self._description["model"]["type"] == "WordLevel":
            vocabulary = self._description["model"]["vocab"]
            for character in text:
                if character not in vocabulary:
                    raise ValueError(
                        f"the character {character!r} (U+{ord(character):04X}) does not occur in "
                        "the training split, whose alphabet tokenizer=characters is; "
                        "use tokenizer=bpe or tokenizer=bytes"
                    )


def _add_control_tokens(backend: tokenizers.Tokenizer) -> None:
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens([name for name in CONTROL if name not in special])


def _check_control_is_closed(backend: tokenizers.Tokenizer, description: dict[str, Any]) -> None:
    """No merge, and no control token's name as text, may give a control token's id."""
    for merge in description["model"].get("merges", ()):
        spelled = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
        if spelled in CONTROL:
            raise ValueError(f"has a merge that spells {spelled}, which no text may produce")
    closed = {backend.token_to_id(name) for name in CONTROL}
    for text in (form for name in CONTROL for form in (name, f" {name} ", f"a{name}b")):
        try:
            ids = backend.encode(text, add_special_tokens=False).ids
        except Exception:  # outside the alphabet: then it produces nothing at all
            continue
        if closed & set(ids):
            raise ValueError(f"encodes the text {text!r} as a control token")
