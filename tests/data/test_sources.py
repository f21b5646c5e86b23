"""Every kind of file becomes examples, and what does not is counted and named."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wherelm.data.messages import Message, messages_of
from wherelm.data.readers import READERS
from wherelm.data.sources import DataConfig, load_examples

CORPORA = Path(__file__).resolve().parents[3] / "shared" / "corpora"
TEXTS = ["first", "NA", 'say "hi', "null", "Grüße, 谢谢"]
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def load(root, train, splits=("train",), **options):
    options = {"validation": train, "cache": None, **options}
    return load_examples(DataConfig(train=train, **options), Path(root), splits)


def conversations(examples):
    return list(messages_of(examples.dataset))


def texts(examples):
    return [message.content for example in conversations(examples) for message in example]


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


def files_of(lines):
    """The same texts in each kind of file."""
    table = pa.table({"text": lines})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return {
        ".txt": "\n".join(lines).encode(),
        ".jsonl": "\n".join(json.dumps({"text": line}) for line in lines).encode(),
        ".ndjson": "\n".join(json.dumps({"text": line}) for line in lines).encode(),
        ".json": json.dumps([{"text": line} for line in lines], indent=1).encode(),
        ".csv": ("text,label\r\n" + "".join(f"{quoted(t)},x\r\n" for t in lines)).encode(),
        ".tsv": ("label\ttext\n" + "".join(f"x\t{t}\n" for t in lines)).encode(),
        ".parquet": sink.getvalue().to_pybytes(),
    }


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("suffix", READERS)
def test_every_kind_of_file_gives_the_same_messages(tmp_path, suffix, zipped):
    content = files_of(TEXTS)[suffix]
    name = f"data{suffix}.gz" if zipped else f"data{suffix}"
    (tmp_path / name).write_bytes(gzip.compress(content) if zipped else content)
    train = load(tmp_path, name)["train"]
    assert texts(train) == TEXTS
    assert train.counts["read"] == train.counts["kept"] == len(TEXTS)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".tsv"])
def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path, suffix):
    content = files_of(["one", "two"])[suffix].replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    (tmp_path / f"data{suffix}").write_bytes(b"\xef\xbb\xbf" + content)
    assert texts(load(tmp_path, f"data{suffix}")["train"]) == ["one", "two"]


def test_a_text_file_has_a_message_a_line_whatever_else_could_end_one(tmp_path):
    lines = ["a\u2028b", "c\x0bd", "e\x85f", " kept "]
    (tmp_path / "data.txt").write_bytes("\n".join(lines).encode() + b"\n")
    assert texts(load(tmp_path, "data.txt")["train"]) == lines


def test_csv_fields_may_hold_commas_quotes_and_line_ends(tmp_path):
    (tmp_path / "data.csv").write_text('text,n\n"a, ""b""\nc",1\nd,2\n')
    assert texts(load(tmp_path, "data.csv")["train"]) == ['a, "b"\nc', "d"]


def test_a_very_long_csv_field_is_read(tmp_path):
    (tmp_path / "data.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(texts(load(tmp_path, "data.csv")["train"])[0]) == 200_000


def test_quotes_in_tsv_are_text_even_when_unbalanced(tmp_path):
    (tmp_path / "data.tsv").write_text('text\tn\n"open\t1\nit"s\t2\n"\t3\n')
    assert texts(load(tmp_path, "data.tsv")["train"]) == ['"open', 'it"s', '"']


def test_columns_decide_between_texts_pairs_and_conversations(tmp_path):
    rows = [{"messages": TALK}, {"prompt": "p", "completion": "c"}, {"text": "t"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert conversations(load(tmp_path, "data.jsonl")["train"]) == [
        [Message("user", "a"), Message("assistant", "b")],
        [Message("user", "p"), Message("assistant", "c")],
        [Message("text", "t")],
    ]
    pq.write_table(pa.table({"messages": [TALK, TALK[:1]]}), tmp_path / "data.parquet")
    assert list(map(len, conversations(load(tmp_path, "data.parquet")["train"]))) == [2, 1]
    (tmp_path / "data.csv").write_text(f"messages\n{quoted(json.dumps(TALK))}\n")
    assert texts(load(tmp_path, "data.csv")["train"]) == ["a", "b"]


def test_json_may_be_rows_one_after_the_other(tmp_path):
    (tmp_path / "data.json").write_text('{"text": "a"}\n{\n "text":\n "b"}\n"c"')
    assert texts(load(tmp_path, "data.json")["train"]) == ["a", "b", "c"]


def test_the_text_column_can_be_named(tmp_path):
    (tmp_path / "data.tsv").write_text("Label\tSMS\nham\thello\n")
    assert texts(load(tmp_path, "data.tsv", text_column="SMS")["train"]) == ["hello"]
    with pytest.raises(ValueError, match=r"data\.tsv:2: has Label, SMS; .*data\.text_column="):
        load(tmp_path, "data.tsv")


def test_malformed_lines_are_counted_and_named_with_file_and_line(tmp_path):
    lines = [b'{"text": "good"}', b"{broken", b'{"text": ""}', b'{"text": "\xff"}', b"", b"[1]"]
    (tmp_path / "data.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "\\ud800"}']))
    counts = load(tmp_path, "data.jsonl")["train"].counts
    assert (counts["read"], counts["kept"], counts["empty"], counts["malformed"]) == (7, 1, 2, 4)
    places, reasons = zip(*(p.split(": ", 1) for p in counts["first_malformed"]), strict=True)
    assert places == tuple(f"data.jsonl:{line}" for line in (2, 4, 6, 7))
    for reason, expected in zip(
        reasons, ["not valid JSON", "not valid UTF-8", "expected an object", "U+D800"], strict=True
    ):
        assert expected in reason


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("data.csv", b"text,n\nok,1\nshort\nok,2\n", "data.csv:3: has 1 fields"),
        ("data.csv", b'text,n\n"a\nb",1\nx,\xff\n', "data.csv:4: "),
        ("data.csv", b'text\nok\n"never\nclosed\n', "data.csv:3: not valid CSV up to line 4"),
        ("data.tsv", b"text\tn\nok\t1\na\tb\tc\n", "data.tsv:3: has 3 fields"),
        ("data.tsv", b"text\nok\n\xff\n", "data.tsv:3: not valid UTF-8"),
        ("data.txt", b"ok\n\xff\n", "data.txt:2: not valid UTF-8"),
        ("data.json", b'[{"text": "ok"},\n\n{"text": 3}]', "data.json:3: text is a number"),
    ],
)
def test_a_malformed_row_of_any_kind_of_file_is_named(tmp_path, name, content, place):
    content = content.replace(b"x,\xff", b"\xff,x")
    (tmp_path / name).write_bytes(content)
    counts = load(tmp_path, name)["train"].counts
    assert counts["malformed"] == 1
    assert counts["kept"] >= 1
    assert counts["first_malformed"][0].startswith(place)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.json", b'[{"text": "ok"},\n{"text" 3}]', "data.json:2: not valid JSON"),
        ("data.json", b'[{"text": "ok"}\n', "data.json:2: not valid JSON"),
        ("data.json", b'\n"\xff"', "data.json:2: not valid UTF-8"),
        ("data.json", b'["a"]\n["b"]', "data.json:1: something follows the list"),
        ("data.txt", "hello".encode("utf-16"), "data.txt: is UTF-16; save it as UTF-8"),
        ("data.csv", "text\nhello".encode("utf-16"), "data.csv: is UTF-16; save it as UTF-8"),
        ("data.parquet", b"no parquet", "data.parquet: not a parquet file"),
        ("data.txt.gz", b"no gzip", "data.txt.gz: cannot be read"),
        ("data.txt.gz", gzip.compress(b"hello\n" * 99)[:-9], "data.txt.gz: cannot be read"),
    ],
)
def test_a_file_that_is_broken_as_a_whole_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cache", [None, "cache"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_zero_usable_messages_is_an_error(tmp_path, content, cache):
    (tmp_path / "data.txt").write_text(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"data\.train=data\.txt: no usable message"):
            load(tmp_path, "data.txt", cache=cache)


def test_folders_and_globs_are_read_in_order_of_their_names(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / ".hidden").mkdir()
    for name in ("b.txt", "a.jsonl", "deep/c.txt.gz", "README.md", ".hidden/x.txt"):
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        content = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
        (tmp_path / "folder" / name).write_bytes(content)
    assert texts(load(tmp_path, "folder")["train"]) == ["a.jsonl", "b.txt", "deep/c.txt.gz"]
    assert texts(load(tmp_path, "folder/*.txt")["train"]) == ["b.txt"]
    assert texts(load(tmp_path, "folder/**/*.txt*")["train"]) == ["b.txt", "deep/c.txt.gz"]
    (tmp_path / "folder" / "b.txt").write_bytes(b"\xff\nok")
    counts = load(tmp_path, "folder")["train"].counts
    assert counts["first_malformed"] == ["folder/b.txt:1: not valid UTF-8"]


def test_paths_count_from_the_working_directory_and_then_from_the_project(tmp_path, monkeypatch):
    for place in ("here", "project"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "data.txt").write_text(place)
    (tmp_path / "project" / "only.txt").write_text("only")
    monkeypatch.chdir(tmp_path / "here")
    assert texts(load(tmp_path / "project", "data.txt")["train"]) == ["here"]
    assert texts(load(tmp_path / "project", "only.txt")["train"]) == ["only"]
    assert texts(load(tmp_path, str(tmp_path / "project" / "data.txt"))["train"]) == ["project"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nothing.jsonl", r"data\.train=nothing\.jsonl: no such file; expected .*\.parquet"),
        ("folder/nothing", r"data\.train=folder/nothing: no such file"),
        ("other/nothing.txt", r"data\.train=other/nothing\.txt: no such file"),
        ("data.md", r"data\.train=data\.md: unknown kind of file; expected .*\.tsv"),
        ("folder", r"data\.train=folder: no file there ends in"),
        ("folder/*.txt", r"data\.train=folder/\*\.txt: no file there"),
        (None, r"data\.train=null: give the messages to learn with data\.train=FILE"),
    ],
)
def test_what_cannot_be_found_is_named_with_its_key(tmp_path, value, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.md").write_text("x")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, value)
    assert "\n" not in str(caught.value)


def test_validation_is_split_off_by_hash_so_that_duplicates_stay_together(tmp_path):
    lines = [f"message {n % 700}" for n in range(2100)]
    (tmp_path / "data.txt").write_text("\n".join(lines))
    splits = load(tmp_path, "data.txt", None, validation=None, validation_fraction=0.2)
    train, validation = splits["train"], splits["validation"]
    assert set(splits) == {"train", "validation"}
    assert sorted(texts(train) + texts(validation)) == sorted(lines)
    assert not set(texts(train)) & set(texts(validation))
    assert 0.15 < len(validation.dataset) / len(lines) < 0.25
    assert validation.counts["in_train"] == 0
    assert train.counts["repeated"] + validation.counts["repeated"] == 1400
    assert train.counts["read"] == train.counts["kept"] + train.counts["held_out"]
    assert validation.counts["read"] + validation.counts["split_off"] == validation.counts["kept"]
    assert train.counts["held_out"] == validation.counts["split_off"] > 0
    assert train.counts["read"] + validation.counts["read"] == len(lines)  # each is counted once

    (tmp_path / "data.txt").write_text("\n".join(["another", *reversed(lines)]))
    again = load(tmp_path, "data.txt", None, validation=None, validation_fraction=0.2)
    assert set(texts(again["validation"])) - {"another"} == set(texts(validation))


def test_a_few_messages_still_give_one_to_validation(tmp_path):
    (tmp_path / "data.txt").write_text("a\nb\nc\nc\n")
    splits = load(tmp_path, "data.txt", None, validation=None, validation_fraction=0.001)
    assert len(set(texts(splits["validation"]))) == 1
    assert sorted(texts(splits["train"]) + texts(splits["validation"])) == ["a", "b", "c", "c"]
    (tmp_path / "data.txt").write_text("a\na\n")
    with pytest.raises(ValueError, match=r"too little to split validation off; give data\.valid"):
        load(tmp_path, "data.txt", None, validation=None)


def test_duplicates_of_training_examples_are_counted(tmp_path):
    (tmp_path / "train.txt").write_text("a\nb\nb\nc\n")
    (tmp_path / "test.txt").write_text("b\nx\nc\nc\n")
    splits = load(tmp_path, "train.txt", ("train", "test"), test="test.txt")
    assert splits["train"].counts["repeated"] == 1
    assert splits["test"].counts["in_train"] == 3
    assert (
        load(tmp_path, "train.txt", ("test",), test="test.txt")["test"].counts["in_train"] is None
    )


def test_limit_takes_the_first_training_examples_and_counts_the_rest(tmp_path):
    (tmp_path / "data.txt").write_text("a\nb\nc\n")
    splits = load(tmp_path, "data.txt", ("train", "validation"), limit=2)
    assert texts(splits["train"]) == ["a", "b"]
    assert texts(splits["validation"]) == ["a", "b", "c"]
    assert (splits["train"].counts["kept"], splits["train"].counts["over_limit"]) == (2, 1)
    assert splits["train"].key != load(tmp_path, "data.txt")["train"].key


def test_a_stream_is_one_text_whose_end_is_validation(tmp_path):
    text = "<EOS> Line\r\n\n" * 100
    (tmp_path / "data.txt").write_bytes(text.encode())
    stream = {"format": "stream", "overflow": "split", "validation_fraction": 0.1}
    splits = load(tmp_path, "data.txt", None, validation=None, **stream)
    assert [m.role for example in conversations(splits["train"]) for m in example] == ["stream"]
    (head,), (tail,) = texts(splits["train"]), texts(splits["validation"])
    assert head + tail == text
    assert len(tail) == len(text) // 10
    (tmp_path / "data.jsonl").write_text('"x"')
    with pytest.raises(
        ValueError, match=r"unknown kind of file; expected a file that ends in \.txt"
    ):
        load(tmp_path, "data.jsonl", **stream)
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff")
    with pytest.raises(ValueError, match=r"bad\.txt:2: not valid UTF-8"):
        load(tmp_path, "bad.txt", **stream)


def test_examples_come_from_the_cache_until_the_file_changes(tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text("a\n\xff\n", "latin-1")
    first = load(tmp_path, "data.txt", cache="cache")["train"]
    monkeypatch.setattr("wherelm.data.files.read_rows", None)
    again = load(tmp_path, "data.txt", cache="cache")["train"]
    assert texts(again) == texts(first) == ["a"]
    assert again.counts == first.counts
    assert again.key == first.key
    assert again.cache == tmp_path / "cache"
    (tmp_path / "data.txt").write_text("b\n")
    with pytest.raises(TypeError):
        load(tmp_path, "data.txt", cache="cache")
    assert not list((tmp_path / "cache").glob(".part-*"))


def test_a_cache_that_cannot_be_written_names_the_key(tmp_path):
    (tmp_path / "data.txt").write_text("a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache=.*file: cannot be written"):
        load(tmp_path, "data.txt", cache="file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "rows"}, "data.format=rows: expected one of messages, stream"),
        ({"learn": "some"}, "data.learn=some"),
        ({"overflow": "wrap"}, "data.overflow=wrap: expected one of truncate, split, skip"),
        ({"format": "stream"}, "data.overflow=truncate: expected split"),
        ({"validation_fraction": 0.0}, "data.validation_fraction=0.0"),
        ({"limit": 0}, "data.limit=0"),
        ({"extra": {"test": "x"}}, r"data\.extra\.test"),
        ({"extra": {"a/b": "x"}}, r"data\.extra\.a/b: expected a name without /"),
    ],
)
def test_impossible_settings_name_the_key(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_a_split_that_does_not_exist_is_named(tmp_path):
    (tmp_path / "data.txt").write_text("a")
    with pytest.raises(ValueError, match="no split is called test"):
        load(tmp_path, "data.txt", ("test",))


def corpus(name):
    if not (CORPORA / name).exists():
        pytest.skip(f"{name} is not at ../shared/corpora")
    return str(CORPORA / name)


def test_real_text_messages_are_all_kept_as_they_were_typed(tmp_path):
    train = load(tmp_path, corpus("sms.tsv"), text_column="SMS")["train"]
    assert (train.counts["read"], train.counts["malformed"]) == (5574, 0)
    lines = Path(corpus("sms.tsv")).read_text("utf-8").split("\n")[1:]
    expected = [line.split("\t")[1] for line in lines if "\t" in line]
    assert texts(train) == [text for text in expected if text.strip()]
    assert sum(text.count('"') % 2 for text in texts(train)) > 0


@pytest.mark.parametrize(("part", "size"), [("train", 4000), ("dev", 500), ("test", 500)])
def test_real_dialogues_are_all_kept(tmp_path, part, size):
    train = load(tmp_path, corpus(f"dialogues-{part}.jsonl"))["train"]
    assert train.counts["kept"] == train.counts["read"] == size
    assert {m.role for example in conversations(train) for m in example} == {"user", "assistant"}


def test_a_real_stream_is_kept_to_the_last_character(tmp_path):
    path = corpus("tinyshakespeare.txt")
    stream = {"format": "stream", "overflow": "split", "validation_fraction": 0.1}
    splits = load(tmp_path, path, None, validation=None, **stream)
    joined = texts(splits["train"]) + texts(splits["validation"])
    assert "".join(joined).encode() == Path(path).read_bytes()
