"""Text and control tokens to ids and back; every kind of tokenizer is one tokenizer.json.

V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from wherelm.cache import key_of, stored, stored_text
from wherelm.messages import Span, check_encodable, messages_of, spans
from wherelm.vocabulary import (
    BYTE_OF,
    CONTROL,
    OWN_PRE_TOKENIZERS,
    SMALLEST_BPE,
    WORDS,
    byte_level_backend,
    character_backend,
)

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from wherelm.sources import Examples

KINDS = ("bpe", "bytes", "characters", "file")

MOST_WORDS = 1 << 17  # kept with their ids at a time
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
    def train(cls, config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer that the configuration asks for; `texts` are those of the training split.

        The same texts in the same order give the same tokenizer in every process. The vocabulary
        may turn out smaller than `vocab_size`: pairs that occur once are not merged.
        """
        if config.kind == "file":
            return cls.load(Path(config.path))
        if config.kind == "characters":
            return cls(character_backend(texts))
        size = SMALLEST_BPE if config.kind == "bytes" else config.vocab_size
        return cls(byte_level_backend(texts if config.kind == "bpe" else (), size))

    @classmethod
    def build(cls, config: TokenizerConfig, examples: Examples, root: Path) -> Tokenizer:
        """`train` on the examples of the training split, kept in their cache.

        Merges are learned from about CHARACTERS_PER_TOKEN characters for each word of the
        vocabulary: from every n-th example, where there is more text. tokenizer.path counts from
        the working directory, else from `root`.
        """
        if config.kind == "file":
            path = Path(config.path).expanduser()
            return cls.load(path if path.is_file() or not (root / path).is_file() else root / path)

        def content() -> str:
            dataset = examples.dataset
            if config.kind == "bpe":
                every = -(-_characters_of(dataset) // (CHARACTERS_PER_TOKEN * config.vocab_size))
                dataset = dataset.select(range(0, len(dataset), every))
            texts = (message.content for example in messages_of(dataset) for message in example)
            return cls.train(config, texts)._backend.to_str()

        # Whoever changes how a tokenizer is trained must not meet one that was trained before.
        code = Path(__file__).with_name("vocabulary.py").read_bytes()
        parts = (code, tokenizers.__version__, examples.key, config.kind, config.vocab_size)
        saved = stored_text(examples.cache, f"tokenizer-{key_of(*parts)[:32]}", content)
        return cls(tokenizers.Tokenizer.from_str(saved))

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a tokenizer.json; ValueError if there is none, or one that cannot serve."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a tokenizer.json (tokenizer.path=…)")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        except Exception as error:  # the library raises no narrower class
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: not a tokenizer.json ({reason})") from error

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
        ids, learned, ends = self._encode_flat(examples)
        parts = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
        return [(ids[part].tolist(), learned[part].tolist()) for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out; bytes that are no text become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream(self) -> DecodeStream:
        """For decoding one token after the other."""
        return DecodeStream(self)

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

    def _encode_flat(
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


def tokenize(
    examples: Examples, tokenizer: Tokenizer, *, learn: str, overflow: str, context: int
) -> tuple[pa.Table, dict[str, int]]:
    """A table with the columns `ids` (int32), `learned` (bool) and `group`, and counts.

    An example may hold context + 1 tokens: context inputs, each with a next token as its target.
    One that is longer is cut at its end ("truncate"; it then has no <EOS>), cut into consecutive
    pieces that overlap by one token, so that every token but the first is a target exactly once
    ("split"), or left out ("skip"). What holds no learned target is left out.

    Counts of examples: truncated, split, too_long (left out); counts of pieces: pieces (the rows
    of the table) and nothing_learned (left out). The result is kept in the examples' cache, by
    their content, the tokenizer and the options. ValueError if nothing is left.
    """

    def build() -> tuple[datasets.Dataset, dict[str, int]]:
        import datasets

        with _collector_off():
            table, counts = _tokenized(examples.dataset, tokenizer, learn, overflow, context)
        if len(table) == 0:
            hint = "raise model.context" if learn == "all" else "data.learn=all learns every turn"
            raise ValueError(
                f"no example is left of {len(examples.table)}: {counts['too_long']} longer than "
                f"model.context={context} under data.overflow={overflow}, "
                f"{counts['nothing_learned']} without anything to learn ({hint})"
            )
        return datasets.Dataset(table, fingerprint=name[:16]), counts

    # Whoever changes how spans are cut and encoded must not meet the results of before.
    code = b"".join(
        Path(__file__).with_name(f"{m}.py").read_bytes() for m in ("messages", "tokenizer")
    )
    name = key_of(code, examples.key, tokenizer.fingerprint, learn, overflow, context)
    return stored(examples.cache, f"tokens-{name[:32]}", build)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """For millions of small objects and no cycles: looking for some takes as long as the work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tokenized(
    examples: datasets.Dataset, tokenizer: Tokenizer, learn: str, overflow: str, context: int
) -> tuple[pa.Table, dict[str, int]]:
    import pyarrow as pa

    counts = dict.fromkeys(("truncated", "split", "too_long", "pieces", "nothing_learned"), 0)
    groups = examples.with_format("arrow")[:]["group"].combine_chunks()
    tables, read = [], 0
    for batch in _batches(spans(messages, learn) for messages in messages_of(examples)):
        ids, learned, ends = tokenizer._encode_flat(batch)
        starts, stops = _cuts(ends, overflow, context, counts)
        # The first token of a piece has nothing before it that could predict it.
        learned_before = np.concatenate(([0], np.cumsum(learned)))
        kept = learned_before[stops] > learned_before[np.minimum(starts + 1, stops)]
        counts["pieces"] += int(kept.sum())
        counts["nothing_learned"] += int((~kept).sum())
        starts, lengths = starts[kept], (stops - starts)[kept]
        examples_of_pieces = read + np.searchsorted(ends, starts, side="right") - 1
        read += len(batch)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        lists = [
            pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(values[source]))
            for values in (ids, learned)
        ]
        columns = [*lists, groups.take(pa.array(examples_of_pieces))]
        tables.append(pa.table(columns, names=["ids", "learned", "group"]))
    return pa.concat_tables(tables), counts


def _cuts(
    ends: np.ndarray, overflow: str, context: int, counts: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Where the pieces start and stop; example i is [ends[i] : ends[i + 1]]."""
    starts, stops = ends[:-1], ends[1:]
    long = stops - starts > context + 1
    if overflow == "truncate":
        counts["truncated"] += int(long.sum())
        return starts, np.minimum(stops, starts + context + 1)
    if overflow == "skip":
        counts["too_long"] += int(long.sum())
        return starts[~long], stops[~long]
    assert overflow == "split", overflow
    counts["split"] += int(long.sum())
    pieces = np.maximum(1, -(-(stops - starts - 1) // context))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cuts = np.repeat(starts, pieces) + number * context
    return cuts, np.minimum(cuts + context + 1, np.repeat(stops, pieces))


def _batches(examples: Iterable[list[Span]], size: int = 4096) -> Iterator[list[list[Span]]]:
    batch = []
    for example in examples:
        batch.append(example)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _characters_of(dataset: datasets.Dataset) -> int:
    import pyarrow.compute as pc

    turns = dataset.with_format("arrow")[:]["messages"].combine_chunks().flatten()
    return pc.sum(pc.utf8_length(turns.field("content"))).as_py()


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


def _shown(value: object) -> object:
    return "null" if value is None else value
