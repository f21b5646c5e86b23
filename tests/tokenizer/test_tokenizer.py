"""Text survives the round trip, no text becomes a control token, and nothing is cut by surprise."""

import itertools
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from wherelm.data.messages import Message, spans
from wherelm.data.sources import DataConfig, load_examples
from wherelm.tokenizer.streaming import DecodeStream
from wherelm.tokenizer.table import tokenize
from wherelm.tokenizer.tokenizer import Tokenizer
from wherelm.tokenizer.training import TokenizerConfig, build_tokenizer, train_tokenizer
from wherelm.tokenizer.vocabulary import CONTROL

CORPUS = [
    "Send the report before the slides.",
    "Do not file the invoice until you approve the budget.",
    "<EOS> <EOS><EOS><USER> <USER>,<PAD>\n",
    "Grüße, 谢谢 and 🙂👩‍👩‍👧!\t\tdone  \n\n",
] * 50
TOKENIZERS = {
    kind: train_tokenizer(TokenizerConfig(kind, 400 if kind == "bpe" else None), CORPUS)
    for kind in ("bpe", "bytes", "characters")
}
ALPHABET = sorted(set("".join(CORPUS)))
# White space of every sort beside letters, marks, digits and punctuation: where pieces are cut.
AWKWARD = st.text(" \n\t\r\x0b\x1c\x1f\x85\xa0\u2003\u2028\u3000a9é\u0301'.<>\ufffd\U0001f600")
TEXTS = st.text() | AWKWARD | st.text(ALPHABET) | st.lists(st.sampled_from(CONTROL)).map("".join)


@pytest.fixture(params=["bpe", "bytes"])
def tokenizer(request):
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(text=TEXTS)
@settings(max_examples=300, deadline=None)
def test_every_unicode_string_decodes_to_itself_without_control_ids(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(id >= len(CONTROL) for id in ids)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@given(text=st.text(ALPHABET))
@settings(max_examples=300, deadline=None)
def test_characters_decode_to_themselves_within_their_alphabet(text):
    tokenizer = TOKENIZERS["characters"]
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_every_code_point_decodes_to_itself(tokenizer):
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    text = "".join(points[:0x3000] + points[0x3000::37])
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(text=AWKWARD | TEXTS)
@settings(max_examples=500, deadline=None)
def test_encoding_word_by_word_equals_the_library_on_the_whole_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.encode(text) == tokenizer._encode_plainly([text])[0]


def test_white_space_of_every_sort_is_cut_where_the_library_cuts_it(tokenizer):
    spaces = [chr(c) for c in range(0x110000) if chr(c).isspace()] + ["\u180e", "\u200b", "\ufeff"]
    for space in spaces:
        for text in (f"!{space}!", f"a{space}b", f"a{space}{space} b", f"a {space}b", f".{space}"):
            assert tokenizer.encode(text) == tokenizer._encode_plainly([text])[0], (space, text)


def test_a_character_outside_the_alphabet_is_one_error_that_names_it():
    with pytest.raises(ValueError, match=r"'€' \(U\+20AC\).*tokenizer=bpe") as caught:
        TOKENIZERS["characters"].encode("costs € and ¥")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_lone_surrogates_are_refused(kind):
    with pytest.raises(ValueError, match=r"U\+D800"):
        TOKENIZERS[kind].encode("a\ud800")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_control_tokens_are_the_first_six_ids_and_decode_to_nothing(kind):
    t = TOKENIZERS[kind]
    assert [t.pad, t.bos, t.eos, t.user, t.assistant, t.system] == [0, 1, 2, 3, 4, 5]
    assert [t.control_name(id) for id in range(7)] == [*CONTROL, None]
    assert t.decode([t.bos, *t.encode("the"), t.eos]) == "the"
    assert t.byte_lengths[: len(CONTROL)].tolist() == [0] * len(CONTROL)
    assert len(t.byte_lengths) == t.vocab_size


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_a_corpus_full_of_control_names_teaches_no_control_id(kind, tmp_path):
    corpus = ["<EOS>" * 200, "<EOS> <USER>x<ASSISTANT> <PAD><BOS>" * 200, "<SYSTEM>"] * 20
    trained = train_tokenizer(TokenizerConfig(kind, 600 if kind == "bpe" else None), corpus)
    trained.save(tmp_path / "tokenizer.json")
    for tokenizer in (trained, Tokenizer.load(tmp_path / "tokenizer.json")):
        for text in corpus:
            ids = tokenizer.encode(text)
            assert min(ids) >= len(CONTROL)
            assert tokenizer.decode(ids) == text
        learned = [tokenizer.token_text(id) for id in range(6, tokenizer.vocab_size)]
        assert not set(learned) & set(CONTROL)


def test_a_file_whose_merges_spell_a_control_token_is_refused(tmp_path):
    parts = ["<", "E", "O", "S", ">", "<E", "<EO", "<EOS"]
    names = [*CONTROL, *parts]
    vocabulary = {token: id for id, token in enumerate(names)}
    merges = [("<", "E"), ("<E", "O"), ("<EO", "S"), ("<EOS", ">")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.save(str(tmp_path / "open.json"))
    with pytest.raises(ValueError, match=r"open\.json: has a merge that spells <EOS>"):
        Tokenizer.load(tmp_path / "open.json")
    words = tokenizers.Tokenizer(models.WordLevel({"<EOS>": 0, "a": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=r"words\.json: encodes the text '<EOS>'"):
        Tokenizer.load(tmp_path / "words.json")


def test_a_given_file_gets_control_tokens_behind_its_own_vocabulary(tmp_path):
    vocabulary = {token: id for id, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    foreign = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    foreign.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    foreign.decoder = tokenizers.decoders.ByteLevel()
    foreign.add_special_tokens(["<|end|>"])
    foreign.enable_truncation(3)
    foreign.save(str(tmp_path / "foreign.json"))
    t = train_tokenizer(TokenizerConfig("file", path=str(tmp_path / "foreign.json")), ())
    assert (t.pad, t.system, t.vocab_size) == (257, 262, 263)
    text = "Grüße <EOS> <|end|>"
    ids = t.encode(text)
    assert max(ids) < 256
    assert t.decode(ids) == text
    assert t.byte_lengths[ids].sum() == len(text.encode())
    t.save(tmp_path / "again.json")
    assert Tokenizer.load(tmp_path / "again.json").fingerprint == t.fingerprint


def test_a_missing_or_broken_file_is_one_line_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json: no such file"):
        Tokenizer.load(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_text("{\n")
    with pytest.raises(ValueError, match=r"broken\.json: not a tokenizer\.json") as caught:
        Tokenizer.load(tmp_path / "broken.json")
    assert "\n" not in str(caught.value)


def test_bpe_training_gives_the_same_file_in_every_process(tmp_path):
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 6))) for _ in range(2000)]
    corpus = [" ".join(generator.choices(words, k=12)) for _ in range(1000)]
    (tmp_path / "corpus.json").write_text(json.dumps(corpus))
    code = (
        "import json, sys; from wherelm.tokenizer.training import *; "
        "train_tokenizer(TokenizerConfig('bpe', 700), json.load(open('corpus.json')))"
        ".save(sys.argv[1])"
    )
    for name, seed, threads in (("a", "1", "1"), ("b", "2", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, name]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert Tokenizer.load(tmp_path / "a").vocab_size == 700


def test_one_unbroken_word_trains_and_encodes_quickly():
    generator = random.Random(0)
    word = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=200_000))
    started = time.perf_counter()
    tokenizer = train_tokenizer(TokenizerConfig("bpe", 1000), [word])
    ids = tokenizer.encode(word)
    assert time.perf_counter() - started < 10
    assert tokenizer.decode(ids) == word
    assert len(ids) < len(word)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_saving_and_loading_changes_nothing(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocab_size == tokenizer.vocab_size
    for text in CORPUS[:4]:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(tokenizer.encode(CORPUS[3])) == CORPUS[3]


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_streaming_shows_whole_characters_that_add_up_to_the_text(text):
    tokenizer = TOKENIZERS["bytes"]
    stream, shown = DecodeStream(tokenizer), ""
    for id in [tokenizer.bos, *tokenizer.encode(text), tokenizer.eos]:
        shown += stream.push(id)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


@given(ids=st.lists(st.integers(0, TOKENIZERS["bpe"].vocab_size - 1)))
@settings(max_examples=300, deadline=None)
def test_streaming_any_ids_adds_up_to_decoding_them(ids):
    tokenizer = TOKENIZERS["bpe"]
    stream = DecodeStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


def test_half_a_character_is_held_back_until_it_is_whole():
    tokenizer = TOKENIZERS["bytes"]
    stream = DecodeStream(tokenizer)
    assert [stream.push(id) for id in tokenizer.encode("é🙂")] == ["", "é", "", "", "", "🙂"]


@pytest.mark.parametrize("text", ["a 😀 b", "é", "日本語😀 é"])
def test_a_tokenizer_that_falls_back_to_bytes_streams_what_it_decodes(tmp_path, text):
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: id for id, token in enumerate(alphabet)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    stream, shown = DecodeStream(tokenizer), ""
    for id in tokenizer.encode(text):
        shown += stream.push(id)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_tokens_are_readable_in_pictures():
    single, merged = TOKENIZERS["bytes"], TOKENIZERS["bpe"]
    assert merged.token_text(merged.eos) == "<EOS>"
    assert "".join(map(single.token_text, single.encode(" \té\r\n"))) == "␣⇥\\xc3\\xa9␍↵"
    assert "␣the" in map(merged.token_text, merged.encode("in the end"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_spans_become_ids_with_their_flags(kind):
    tokenizer = TOKENIZERS[kind]
    conversation = spans([Message("user", "the <EOS>"), Message("assistant", "slides")])
    text = spans([Message("text", "report")])
    user, reply = tokenizer.encode("the <EOS>"), tokenizer.encode("slides")
    ids, learned = tokenizer.encode_spans(conversation)
    assert ids == [1, 3, *user, 4, *reply, 2]
    assert learned == [False] * (len(user) + 3) + [True] * (len(reply) + 1)
    assert tokenizer.encode_examples([conversation, text]) == [
        tokenizer.encode_spans(conversation),
        tokenizer.encode_spans(text),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bpe", 100), "tokenizer.vocab_size=100: expected at least 262"),
        (("bpe",), "tokenizer.vocab_size=null"),
        (("bytes", 300), "tokenizer.vocab_size=300: expected null"),
        (("words",), "tokenizer.kind=words: expected one of bpe, bytes"),
        (("file",), "tokenizer.path=null"),
        (("bytes", None, "x"), "tokenizer.path=x: expected null"),
    ],
)
def test_impossible_settings_name_the_key(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(*arguments)


CONTEXT = 12


def examples_of(tmp_path, rows, **options):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train=str(tmp_path / "train.jsonl"),
        validation=str(tmp_path / "train.jsonl"),
        cache=str(tmp_path / "cache"),
        **options,
    )
    return load_examples(config, tmp_path, ["train"])["train"]


def tokenized(examples, overflow, learn="replies", context=CONTEXT, kind="bytes"):
    table, counts = tokenize(
        examples, TOKENIZERS[kind], learn=learn, overflow=overflow, context=context
    )
    return [(row["ids"], row["learned"]) for row in table.to_pylist()], counts


LONG = {"text": "a text of far more than thirteen bytes"}
EDGE = {"text": "eleven byte"}
SHORT = {"text": "short"}


def test_truncate_cuts_the_end_and_with_it_eos(tmp_path):
    rows, counts = tokenized(examples_of(tmp_path, [LONG, EDGE, SHORT]), "truncate")
    assert [len(ids) for ids, _ in rows] == [13, 13, 7]
    assert [ids[-1] == 2 for ids, _ in rows] == [False, True, True]
    assert (counts["truncated"], counts["pieces"]) == (1, 3)


def test_skip_leaves_out_what_is_too_long(tmp_path):
    rows, counts = tokenized(examples_of(tmp_path, [LONG, EDGE, SHORT]), "skip")
    assert [len(ids) for ids, _ in rows] == [13, 7]
    assert (counts["too_long"], counts["pieces"]) == (1, 2)


@pytest.mark.parametrize("context", [1, 2, 7, 12, 38, 39, 40])
def test_split_makes_every_token_a_target_exactly_once(tmp_path, context):
    examples = examples_of(tmp_path, [LONG, SHORT])
    rows, counts = tokenized(examples, "split", context=context)
    whole = [
        TOKENIZERS["bytes"].encode_spans(spans([Message("text", row["text"])]))
        for row in (LONG, SHORT)
    ]
    assert all(2 <= len(ids) <= context + 1 for ids, _ in rows)
    assert [id for ids, _ in rows for id in ids[1:]] == [id for ids, _ in whole for id in ids[1:]]
    assert [f for _, flags in rows for f in flags[1:]] == [f for _, fs in whole for f in fs[1:]]
    for (before, _), (after, _) in itertools.pairwise(rows):
        assert after[0] in (before[-1], TOKENIZERS["bytes"].bos)
    assert counts["split"] == sum(len(ids) > context + 1 for ids, _ in whole)


def test_a_piece_without_a_learned_target_is_left_out_and_counted(tmp_path):
    talk = [{"role": "user", "content": "x" * 30}, {"role": "assistant", "content": "yes"}]
    examples = examples_of(tmp_path, [{"messages": talk}, {"messages": talk[:1]}, SHORT])
    rows, counts = tokenized(examples, "truncate")
    assert (len(rows), counts["nothing_learned"]) == (1, 2)
    rows, counts = tokenized(examples, "split")
    assert (len(rows), counts["nothing_learned"]) == (2, 5)
    assert sum(sum(flags) for _, flags in rows) == len("yes") + 1 + len("short") + 1
    rows, counts = tokenized(examples, "truncate", learn="all")
    assert (len(rows), counts["nothing_learned"]) == (3, 0)


def test_nothing_left_to_train_on_is_an_error_with_its_reasons(tmp_path):
    with pytest.raises(
        ValueError, match=r"no example is left of 1: 1 longer than model.context=12"
    ):
        tokenized(examples_of(tmp_path, [LONG]), "skip")


def test_thousands_of_examples_are_the_same_in_batches_and_one_by_one(tmp_path):
    rows = [{"text": f"message {n} {'ab' * (n % 5)}"} for n in range(9000)]
    pieces, _ = tokenized(examples_of(tmp_path, rows), "truncate", context=64, kind="bpe")
    assert len(pieces) == len(rows)
    for n in (0, 4095, 4096, 8191, 8192, 8999):
        expected = TOKENIZERS["bpe"].encode_spans(spans([Message("text", rows[n]["text"])]))
        assert pieces[n] == expected


def test_tokens_come_from_the_cache_until_anything_they_depend_on_changes(tmp_path, monkeypatch):
    examples = examples_of(tmp_path, [LONG, SHORT])
    first = tokenized(examples, "split")
    monkeypatch.setattr(Tokenizer, "encode_flat", None)
    assert tokenized(examples, "split") == first
    for change in ({"overflow": "truncate"}, {"learn": "all"}, {"context": 5}, {"kind": "bpe"}):
        with pytest.raises(TypeError):
            tokenized(examples, **{"overflow": "split", **change})
    with pytest.raises(TypeError):
        tokenized(examples_of(tmp_path, [SHORT, LONG]), "split")


def test_a_trained_tokenizer_comes_from_the_cache(tmp_path, monkeypatch):
    examples = examples_of(tmp_path, [LONG, SHORT])
    config = TokenizerConfig("bpe", 300)
    first = build_tokenizer(config, examples, tmp_path)
    direct = train_tokenizer(config, [LONG["text"], SHORT["text"]])
    assert first.fingerprint == direct.fingerprint
    monkeypatch.setattr("wherelm.tokenizer.training.train_tokenizer", None)
    assert build_tokenizer(config, examples, tmp_path).fingerprint == first.fingerprint
    with pytest.raises(TypeError):
        build_tokenizer(TokenizerConfig("bpe", 301), examples, tmp_path)


def test_a_given_tokenizer_is_found_from_the_project(tmp_path):
    TOKENIZERS["bytes"].save(tmp_path / "given.json")
    examples = examples_of(tmp_path, [SHORT])
    built = build_tokenizer(TokenizerConfig("file", path="given.json"), examples, tmp_path)
    assert built.fingerprint == TOKENIZERS["bytes"].fingerprint


def test_merges_are_learned_from_all_parts_of_a_large_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("wherelm.tokenizer.training.CHARACTERS_PER_TOKEN", 20)
    rows = [{"text": "first half here"}] * 1000 + [{"text": "zweite zweite zw"}] * 1000
    built = build_tokenizer(TokenizerConfig("bpe", 280), examples_of(tmp_path, rows), tmp_path)
    tokens = {built.token_text(id) for id in range(262, built.vocab_size)}
    assert any("zw" in token for token in tokens)
    assert any("ir" in token or "al" in token or "er" in token for token in tokens)


def test_the_flags_and_ids_have_small_types(tmp_path):
    table, _ = tokenize(
        examples_of(tmp_path, [SHORT]),
        TOKENIZERS["bytes"],
        learn="all",
        overflow="truncate",
        context=9,
    )
    assert table.schema.field("ids").type == pa.list_(pa.int32())
    assert table.schema.field("learned").type == pa.list_(pa.bool_())
    assert np.array(table["learned"][0].as_py()).sum() == 6
