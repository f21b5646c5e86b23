"""What may be typed as a data path: homes, lists, names without suffix, standard input, hub ids."""

import gzip
import io
import json
import logging
import socket
import sys
import time

import datasets
import pytest
from huggingface_hub import constants

from tests.data.test_sources import conversations, load, texts
from wherelm.config import typed
from wherelm.data import files
from wherelm.data.messages import Message
from wherelm.data.sources import DataConfig, load_examples


class Pipe(io.TextIOWrapper):
    """Standard input, of a pipe or of a terminal."""

    def __init__(self, content, terminal=False):
        super().__init__(io.BytesIO(content))
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def pipe(monkeypatch):
    def put(content, **options):
        files._standard_input.cache_clear()
        monkeypatch.setattr(sys, "stdin", Pipe(content, **options))

    yield put
    files._standard_input.cache_clear()


def test_a_home_is_found_behind_a_tilde_for_files_folders_and_globs(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "folder" / "a.txt").write_text("a\n")
    monkeypatch.setenv("HOME", str(home))
    for path in ("~/folder/a.txt", "~/folder", "~/folder/*.txt"):
        assert texts(load(tmp_path, path)["train"]) == ["a"]
    with pytest.raises(ValueError, match=r"data\.train=~nobody-has-this/a\.txt: no such file"):
        load(tmp_path, "~nobody-has-this/a.txt")


def test_a_list_of_files_folders_globs_and_tasks_is_read_in_turn_by_every_split(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "folder/b.txt", "folder/c.txt", "c1.txt", "c2.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "p", "completion": "r"}))
    several = ["d.jsonl", "folder", "c?.txt", "a.txt", "task:copy?examples=3"]
    config = typed(
        DataConfig,
        {"train": several, "validation": several[:2], "test": ["a.txt"]}
        | {"extra": {"more": several[3:], "one": "a.txt"}, "cache": None},
        "data",
    )
    splits = load_examples(config, tmp_path)
    found = conversations(splits["train"])
    assert found[0] == [Message("user", "p"), Message("assistant", "r")]
    said = [example[0].content for example in found[1:-3]]
    assert said == ["folder/b.txt", "folder/c.txt", "c1.txt", "c2.txt", "a.txt"]
    assert all(example[0].content.startswith("copy ") for example in found[-3:])
    assert [len(splits[n].table) for n in ("validation", "test", "more", "one")] == [3, 1, 4, 1]
    other = load(tmp_path, tuple(reversed(several)))["train"]
    assert other.key != splits["train"].key


def test_a_list_is_split_into_validation_as_one_file_is(tmp_path):
    lines = [f"message {n}" for n in range(400)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    (tmp_path / "a.txt").write_text("\n".join(lines[:150]))
    (tmp_path / "b.txt").write_text("\n".join(lines[150:]))
    one = load(tmp_path, "all.txt", None, validation=None)
    two = load(tmp_path, ("a.txt", "b.txt"), None, validation=None)
    for split in ("train", "validation"):
        assert texts(one[split]) == texts(two[split])
        assert one[split].counts == two[split].counts


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], r"data\.train=\[\]: empty; expected a file"),
        (["a.txt", " "], r"data\.train=\[a\.txt, \]: empty"),
        (["a.txt", "none.txt"], r"data\.train=none\.txt: no such file"),
        (["a.txt", "task:order?x=1"], r"data\.train=task:order\?x=1: no option 'x'"),
        (["empty.txt", "empty.txt"], r"data\.train=\[empty\.txt,empty\.txt\]: no usable message"),
        ("a.txt,b.txt", r"several are a list: 'data\.train=\[a\.txt,b\.txt\]'"),
    ],
)
def test_what_is_wrong_in_a_list_is_named_as_it_is_typed(tmp_path, paths, message):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    values = {"train": paths, "validation": "a.txt", "cache": None}
    with pytest.raises(ValueError, match=message):
        load_examples(typed(DataConfig, values, "data"), tmp_path, ["train"])


@pytest.mark.parametrize("name", ["notes", "notes.gz"])
def test_a_file_without_a_suffix_is_read_as_text_and_said_so(tmp_path, name, caplog):
    content = b"one\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with caplog.at_level(logging.INFO, "wherelm"):
        assert texts(load(tmp_path, name)["train"]) == ["one", "two"]
    assert caplog.messages == [f"data.train={name}: a name without a suffix, so read as text"]
    stream = {"format": "stream", "overflow": "split"}
    assert texts(load(tmp_path, name, **stream)["train"]) == ["one\ntwo\n"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\n{two}\n", ["one", "{two}"]),
        (b"{no json\nat all", ["{no json", "at all"]),
        (b'\xef\xbb\xbf\n{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        (b'{"prompt": "p", "completion": "r"}\n', ["p", "r"]),
        (b'"quoted"\n', ['"quoted"']),
    ],
)
def test_standard_input_is_read_as_lines_or_as_json_lines(tmp_path, pipe, content, expected):
    pipe(content)
    assert texts(load(tmp_path, "-", validation="x.txt")["train"]) == expected


def test_standard_input_is_read_once_and_split_and_cached(tmp_path, pipe, monkeypatch):
    lines = [f"message {n}" for n in range(300)]
    pipe("\n".join(lines).encode())
    config = DataConfig(train="-", cache="cache")
    train = load_examples(config, tmp_path, ["train"])["train"]
    validation = load_examples(config, tmp_path, ["validation"])["validation"]
    assert sorted(texts(train) + texts(validation)) == sorted(lines)
    assert len(validation.table) > 0
    pipe("\n".join(lines).encode())
    monkeypatch.setattr(files, "read_bytes", None)
    assert load_examples(config, tmp_path, ["train"])["train"].key == train.key
    pipe(b"others")
    with pytest.raises(TypeError):
        load_examples(config, tmp_path, ["train"])


def test_a_broken_line_of_standard_input_is_named(tmp_path, pipe):
    pipe(b'{"text": "good"}\n{broken\n')
    counts = load(tmp_path, "-", validation="x.txt")["train"].counts
    assert (counts["kept"], counts["malformed"]) == (1, 1)
    assert counts["first_malformed"][0].startswith("standard input:2: not valid JSON")


def test_standard_input_that_cannot_be_read_is_one_line(tmp_path, pipe):
    pipe(b"", terminal=True)
    with pytest.raises(ValueError, match=r"data\.train=-: standard input is a terminal; pipe"):
        load(tmp_path, "-", validation="x.txt")
    pipe(b"")
    with pytest.raises(ValueError, match=r"data\.train=-: nothing came on standard input; pipe"):
        load(tmp_path, "-", validation="x.txt")
    with pytest.raises(ValueError, match=r"data\.test=-: standard input is data\.train already"):
        DataConfig(train="-", test=("a.txt", "-"))


def test_a_hub_id_is_loaded_through_datasets(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_dict({"text": ["hello", "NA", "", None]})

    monkeypatch.setattr(files, "_answers", lambda address: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = load(tmp_path, "user/name", ("train", "validation", "more"),
                  validation="user/name", extra={"more": "user/name:test"})  # fmt: skip
    assert asked == [("user/name", "train"), ("user/name", "validation"), ("user/name", "test")]
    assert texts(splits["train"]) == ["hello", "NA"]
    assert splits["train"].counts["empty"] == 2


def test_a_hub_that_refuses_is_one_clear_line(tmp_path, monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("no\nsuch name")

    monkeypatch.setattr(files, "_answers", lambda address: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"data\.train=user/name: no such file, and .*\(no such name\)"
    ):
        load(tmp_path, "user/name")


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "closed"])
def test_a_hub_that_does_not_answer_takes_seconds_and_one_line(
    tmp_path, monkeypatch, silent, caplog
):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:  # takes the connection and says nothing
            listener.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(files, "PATIENCE", 0.5)
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        started = time.perf_counter()
        with (
            caplog.at_level(logging.INFO, "wherelm"),
            pytest.raises(ValueError, match=f"user/name: .*{address} does not answer") as caught,
        ):
            load(tmp_path, "user/name")
    assert time.perf_counter() - started < 5
    assert "\n" not in str(caught.value)
    assert not caplog.messages
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_a_hub_that_answers_with_an_error_is_reachable():
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.handle_request, daemon=True).start()
    assert files._answers(f"http://127.0.0.1:{server.server_port}")
    server.server_close()
    assert not files._answers(f"http://127.0.0.1:{server.server_port}")
