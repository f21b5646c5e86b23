import os
import subprocess
import sys
import time

import datasets
import pytest

from tests.training.test_loop import config
from wherelm import pipeline
from wherelm.data import cache
from wherelm.data.cache import key_of, stored, stored_text

DAY = 24 * 60 * 60


def entry(name):
    return f"tokens-{key_of(name)[:32]}"


def fill(folder, name, days, size=1000):
    """An entry of about `size` bytes, last used so many days ago."""
    stored_text(folder, entry(name), lambda: "x" * size)
    used = time.time() - days * DAY
    os.utime(folder / entry(name), (used, used))


def present(folder, *names):
    return [name for name in names if (folder / entry(name)).is_dir()]


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_built_is_read_again_without_building(tmp_path, kept):
    rows = [{"ids": [1, 2, 3], "group": "a"}, {"ids": [], "group": None}]
    built = []

    def build():
        built.append(1)
        return datasets.Dataset.from_list(rows), {"read": 2}

    for _ in range(3):
        table, counts = stored(tmp_path / "cache" if kept else None, entry("a"), build)
        assert table.to_pylist() == rows
        assert counts == {"read": 2}
    assert len(built) == (1 if kept else 3)


def test_a_table_of_several_files_is_read_whole(tmp_path):
    rows = [{"ids": list(range(i))} for i in range(7)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"), num_shards=3)
    assert cache._mapped(tmp_path / "table").to_pylist() == rows


def test_entries_longest_unused_make_room_for_new_ones(tmp_path, monkeypatch):
    for days, name in enumerate(("third", "second", "first"), start=2):
        fill(tmp_path, name, days)
    monkeypatch.setattr("wherelm.data.cache.MOST_BYTES", 2500)
    stored_text(tmp_path, entry("second"), pytest.fail)
    stored_text(tmp_path, entry("new"), lambda: "x" * 1000)
    assert present(tmp_path, "first", "second", "third", "new") == ["second", "new"]
    assert not list(tmp_path.glob(".part-*"))


def test_nothing_used_within_a_day_and_nothing_foreign_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("wherelm.data.cache.MOST_BYTES", 100)
    fill(tmp_path, "yesterday", 0.9)
    foreign = tmp_path / "photos-of-1999"
    foreign.mkdir()
    (foreign / "one").write_text("x" * 1000)
    os.utime(foreign, (0, 0))
    stored_text(tmp_path, entry("new"), lambda: "x" * 1000)
    assert present(tmp_path, "yesterday", "new") == ["yesterday", "new"]
    assert (foreign / "one").is_file()


STEP = """
import sys
from pathlib import Path
from tests.training.test_loop import config
from wherelm.training import loop as training

def stop(*_, **values):
    slow = {"datasets", "pandas", "torch._dynamo", "matplotlib", "scipy"} & sys.modules.keys()
    sys.exit(f"first step with {sorted(slow)}")

training.Tracker.write = stop
folder = Path(sys.argv[1])
training.fit(config(folder), folder / "run", folder)
"""


def test_a_warm_start_makes_its_first_step_without_slow_imports(tmp_path):
    run = config(tmp_path)
    pipeline.prepare(run, tmp_path, ["train", "validation"])
    process = subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path)], capture_output=True, text=True
    )
    assert process.stderr.splitlines()[-1] == "first step with []"


@pytest.mark.parametrize("name", ["counts.json", "state.json", "data-00000-of-00001.arrow"])
def test_a_damaged_entry_is_named_with_what_to_do(tmp_path, name):
    def build():
        return datasets.Dataset.from_dict({"n": [1, 2, 3]}), {"rows": 3}

    stored(tmp_path, "examples-x", build)
    (tmp_path / "examples-x" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"examples-x: damaged .*; delete this folder"):
        stored(tmp_path, "examples-x", build)
