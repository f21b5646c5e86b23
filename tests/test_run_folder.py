import subprocess
import sys
import types

import pytest

from wherelm import run_folder
from wherelm.run_folder import CONFIG, LOCK, LOG, claim, hold, release

HOLD = "import sys; from pathlib import Path; from wherelm.run_folder import *; "
WAIT = "print(claim(Path(sys.argv[1]), sys.argv[2] or None), flush=True); sys.stdin.read()"


def holder(folder, given=""):
    """A process that claims the folder and keeps it; gives which one it got."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("*", "claim") + WAIT, str(folder), given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


@pytest.fixture(params=["fcntl", "msvcrt"])
def locks(request, monkeypatch):
    """With the locks of this system, and with a stand-in for those of Windows."""
    fcntl = pytest.importorskip("fcntl")
    if request.param == "msvcrt":

        def locking(file, mode, count):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        monkeypatch.setitem(sys.modules, "fcntl", None)
        stand_in = types.SimpleNamespace(locking=locking, LK_NBLCK=1)
        monkeypatch.setitem(sys.modules, "msvcrt", stand_in)


def test_a_folder_is_held_by_one_process_whose_end_frees_it(tmp_path, locks):
    folder = tmp_path / "runs" / "run"
    other, got = holder(folder)
    assert got == str(folder)
    with pytest.raises(BlockingIOError, match=f"process {other.pid} on .* writes there"):
        hold(folder)
    with pytest.raises(ValueError, match=f"^resume=run: process {other.pid} on "):
        claim(folder, "resume=run")
    assert claim(folder, None) == folder.with_name("run-2")
    third = holder(folder)
    assert third[1] == str(folder.with_name("run-3"))
    for process in (other, third[0]):
        process.kill()
        process.communicate()
    assert (folder / LOCK).exists()  # the note of a process that is gone
    assert claim(folder, "resume=run") == folder
    release()
    third_folder = folder.with_name("run-3")
    assert sorted(folder.parent.iterdir()) == [folder, third_folder]
    assert list(folder.iterdir()) == []


def test_a_folder_in_which_no_run_began_is_deleted_with_the_parents_made_for_it(tmp_path):
    folder = tmp_path / "runs" / "name" / "time"
    hold(folder)
    (folder / LOG).write_text("tokenising\n")
    release(folder)
    assert list(tmp_path.iterdir()) == []
    folder.parent.mkdir(parents=True)
    hold(folder)
    release(folder)
    assert list(folder.parents[1].iterdir()) == [folder.parent]
    hold(folder)
    (folder / CONFIG).write_text("name: x\n")
    (folder / LOG).write_text("a step\n")
    release(folder)
    assert {path.name for path in folder.iterdir()} == {CONFIG, LOG}


def test_a_folder_that_was_there_stays_with_its_log(tmp_path):
    (tmp_path / LOG).write_text("of before\n")
    hold(tmp_path)
    release(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


def test_a_lock_deleted_while_it_was_opened_is_taken_anew(tmp_path, monkeypatch):
    """Its owner ends between our opening and our locking."""
    lock, opened = run_folder._lock, []

    def deleted_first(file):
        if not opened:
            (tmp_path / LOCK).unlink()
        opened.append(file)
        lock(file)

    monkeypatch.setattr(run_folder, "_lock", deleted_first)
    hold(tmp_path)
    try:
        assert len(opened) == 2
        with pytest.raises(BlockingIOError):
            hold(tmp_path)
    finally:
        release(tmp_path)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert claim(tmp_path / "run", "hydra.run.dir=run") == tmp_path / "run"
    release()
    assert list(tmp_path.iterdir()) == []
