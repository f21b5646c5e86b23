import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from wherelm import run_folder
from wherelm.config import typed
from wherelm.data.sources import DataConfig
from wherelm.schemes import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
SPLITS = {"validation", "test", "longer", "padded_out", "shuffled"}

WRONG = {
    "model.widht=3": "model.widht: no such key; did you mean model.width?",
    "foo=1": "foo: no such key",
    "modl=small": "modl: no such key; did you mean model?",
    "+model.extra=3": "model.extra: no such key",
    "position.base.x=3": "position.base.x: no such key",
    "position=rop": "position=rop: no such option; expected one of",
    "training=debgu": "training=debgu: no such option; expected one of",
    "model.width=wide": "model.width='wide': expected a whole number",
    "optimizer.momentum=1": "optimizer.momentum=1.0: expected 0 or more, below 1",
    "optimizer.learning_rate=nan": "optimizer.learning_rate=nan: expected a number above 0",
    "optimizer.head_learning_rate=-1": "optimizer.head_learning_rate=-1.0: expected a number",
    "optimizer.weight_decay=-1": "optimizer.weight_decay=-1.0: expected 0 or more",
    "training.clip=nan": "training.clip=nan: expected a number above 0",
    "name=a/../../b": "name=a/../../b: expected the name of a folder",
    "name=..": "name=..: expected the name of a folder",
    "ablation.seeds=5": "ablation.seeds=5: acts on sweeps alone; add -m",
    "data.train=": "data.train=: empty; expected a file",
    "data.extra=5": "data.extra=5: expected a mapping",
    "position=rope,alibi": "position=rope,alibi: several values; for a sweep add -m",
    "optimizer.momentum=x": "optimizer.momentum='x': expected a number",
    "seed=1.5": "seed=1.5: expected a whole number",
    "model.qk_norm=3": "model.qk_norm=3: expected true or false",
    "model.heads=3": "model.heads=3: expected a divisor of width",
    "model.norm=batch": "model.norm=batch: expected one of",
    "model.dropout=1.5": "model.dropout=1.5: expected",
    "position.fraction=2": "position.fraction=2.0: expected",
    "schedule.cooldown=2": "schedule.cooldown=2.0: expected",
    "data.learn=reply": "data.learn=reply: expected one of",
    "tokenizer.vocab_size=10": "tokenizer.vocab_size=10: expected at least",
    "training.tokens=5": "training.tokens=5: expected exactly one",
    "training.batch_tokens=64": "training.batch_tokens=64: expected at least model.context",
    "training.batching=random": "training.batching=random: expected one of",
    "training.compile=true": "training.compile=true training.batching=bucketed: a graph",
    "evaluation.splits=[tset]": "evaluation.splits=tset: expected one of",
    "data=messages": "data.train=null: give the messages to learn",
    "data.train=absent.jsonl": "data.train=absent.jsonl: no such file",
    "tracking.mode=sometimes": "tracking.mode=sometimes: expected one of",
    "resume=absent": "resume=absent: no run there",
    "model.width=[": "model.width=[: expected key=value",
    "model": "model: expected key=value",
    "=3": "=3: expected key=value",
    "~name": "~name: expected key=value",
    "learning_rate=1": "learning_rate: no such key; did you mean optimizer.learning_rate?",
    "steps=5": "steps: no such key; did you mean training.steps?",
    "optimizer.lr=1": "optimizer.lr: no such key; did you mean optimizer.learning_rate?",
    "lr=1": "lr: no such key; did you mean optimizer.learning_rate?",
    "batch_size=8": "batch_size: no such key; did you mean training.batch_tokens?",
    "training.threads=100000": "training.threads=100000: expected at most",
    "--resume": "--resume: no such option; write resume=RUN",
    "--foo": "--foo: no such option; write key=value or group=option",
    "--learning-rate=3": "--learning-rate=3: no such option; write optimizer.learning_rate=…",
    "--vers": "--vers: no such option",
}


def run(*arguments, cwd=ROOT, timeout=120):
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_override_is_one_line_that_names_it(override, tmp_path, capsys, monkeypatch):
    import train

    folder = tmp_path / "of" / "run"
    monkeypatch.setattr(sys, "argv", ["train.py", override, f"hydra.run.dir={folder}"])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(train.command())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(f"error: {WRONG[override]}") or f" {WRONG[override]}" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the whole line in small, as a newcomer starts it."""
    folder = tmp_path_factory.mktemp("main job") / "run"
    result = run("training=debug", f"hydra.run.dir='{folder}'")
    assert result.returncode == 0, result.stderr
    return folder, result


def test_the_main_job_writes_the_whole_run_folder(finished):
    folder, result = finished
    expected = {"config.yaml", "tokenizer.json", "ledger.json", "metrics.jsonl", "summary.json"}
    expected |= {"samples.txt", "curve.png", "train.log", "environment.json", "checkpoints"}
    expected |= {"breakdowns.json", *(f"scores-{split}.npz" for split in SPLITS)}
    assert {path.name for path in folder.iterdir()} == expected
    (checkpoint,) = (folder / "checkpoints").iterdir()
    expected = "config.yaml model.safetensors optimizer.safetensors state.json tokenizer.json"
    assert sorted(path.name for path in checkpoint.iterdir()) == expected.split()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert set(summary["splits"]) == SPLITS
    assert all(0 <= split["exact_match"] <= 1 for split in summary["splits"].values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "split" not in line]
    assert [line["step"] for line in training] == list(range(1, summary["step"] + 1))
    assert training[-1]["loss"] < training[0]["loss"] / 2
    assert "exact match" in result.stdout
    assert "Traceback" not in result.stderr


def test_the_parts_that_a_run_writes_add_up_to_its_summary(finished):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    parts = json.loads((folder / "breakdowns.json").read_text())
    assert set(parts) == {"train", *SPLITS}
    learned = sum(entry["targets"] for entry in parts["train"]["learned"])
    assert learned == summary["targets"]
    for split, figures in summary["splits"].items():
        kept = np.load(folder / f"scores-{split}.npz")
        assert kept["targets"].sum() == figures["targets"]
        assert kept["replies"].sum() == figures["replies"] == len(kept["nats"])
        loss = kept["nats"].sum(dtype=float) / kept["targets"].sum()
        assert loss == pytest.approx(figures["loss"], abs=1e-6)
        assert kept["exact"].sum() / kept["replies"].sum() == figures["exact_match"]
        assert set(parts[split]) == {"position", "length", "turn", "group"}
        for entries in parts[split].values():
            assert sum(entry["targets"] for entry in entries) == figures["targets"]
            nats = sum(entry["targets"] * entry["loss"] for entry in entries)
            assert nats / figures["targets"] == pytest.approx(figures["loss"])
    groups = {split: [entry["group"] for entry in parts[split]["group"]] for split in SPLITS}
    assert groups["longer"] == ["5", "6", "7", "8"]
    assert groups["padded_out"] == groups["validation"] == ["2", "3", "4"]


def test_a_checkpoint_folder_alone_is_enough_to_sample_from(finished, tmp_path):
    folder, _ = finished
    (checkpoint,) = (folder / "checkpoints").iterdir()
    alone = checkpoint.rename(tmp_path / "alone")
    try:
        result = subprocess.run(
            [sys.executable, str(ROOT / "sample.py"), "--run", str(alone), "--json", "Send it."],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    finally:
        alone.rename(checkpoint)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == {"prompt", "text", "tokens", "finish"}


def test_resuming_refuses_overrides_that_differ_and_accepts_those_that_do_not(finished):
    import train

    folder, _ = finished
    with pytest.raises(ValueError, match=r"model\.width=64: differs from the run's own"):
        train.resume_arguments([f"resume={folder}", "model.width=64"])
    for more in (f"resume={folder}", "-m"):
        with pytest.raises(ValueError, match="goes on with one run"):
            train.resume_arguments([f"resume={folder}", more])
    arguments = train.resume_arguments([f"resume={folder}", "seed=0"])
    assert arguments == ["resume=true", f"hydra.run.dir='{folder}'"]


def test_resuming_compares_whole_groups_and_takes_another_length(finished):
    import train

    folder, _ = finished
    own = ["resume=true", f"hydra.run.dir='{folder}'"]
    same = ("position=rope", "training=debug", "optimizer=muon")
    assert train.resume_arguments([f"resume={folder}", *same]) == own
    for group in ("position=alibi", "training=default", "model=gpt2"):
        with pytest.raises(ValueError, match=rf"{group}: differs .* is .* there, not "):
            train.resume_arguments([f"resume={folder}", group])
    for more in (["position=rope", "position.base=5"], ["position.base=5"]):
        with pytest.raises(ValueError, match=r"position.*: differs from the run's own"):
            train.resume_arguments([f"resume={folder}", *more])
    longer = ["training=debug", "training.steps=60"]
    assert train.resume_arguments([f"resume={folder}", *longer]) == [*own, "training.steps=60"]
    with pytest.raises(ValueError, match=r"training\.tokens=60: differs from the run's own"):
        train.resume_arguments([f"resume={folder}", "training.tokens=60"])


def test_a_checkpoint_that_is_there_is_resumed_or_the_newest_is_named(finished, tmp_path):
    import train

    folder, _ = finished
    newest = folder / "checkpoints" / "step-00000030"
    arguments = train.resume_arguments([f"resume={newest}/"])
    assert arguments == ["resume=true", f"hydra.run.dir='{folder}'"]
    older = shutil.copytree(newest, newest.with_name("step-00000007"))
    try:
        with pytest.raises(ValueError, match=r"goes on from its newest checkpoint, which is .*30;"):
            train.resume_arguments([f"resume={older}"])
    finally:
        shutil.rmtree(older)
    alone = shutil.copytree(newest, tmp_path / "alone")
    with pytest.raises(ValueError, match="a checkpoint outside of its run"):
        train.resume_arguments([f"resume={alone}"])


def test_a_run_ends_with_the_commands_that_come_next(finished):
    folder, result = finished
    *_, sample, look, compare = result.stdout.splitlines()
    assert sample == f"sample it:   python sample.py --run '{folder}' \"…\""
    assert look == f"look at it:  python -m wherelm.visualize '{folder}' \"…\""
    assert compare == f"compare it:  python -m wherelm.evaluate '{folder}'"
    assert "s here, until " in result.stdout


def test_a_refused_command_leaves_what_was_there_and_a_held_folder_alone(finished, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    result = run("training.threads=100000", f"hydra.run.dir='{own / 'a' / 'b'}'")
    assert result.returncode == 2
    assert list(own.iterdir()) == []
    folder, _ = finished
    before = sorted(folder.rglob("*"))
    run_folder.hold(folder)
    try:
        for arguments in ([f"resume={folder}"], ["training=debug", f"hydra.run.dir='{folder}'"]):
            result = run(*arguments)
            assert result.returncode == 2
            assert result.stderr.count("\n") == 1
            assert f"process {os.getpid()} on " in result.stderr
    finally:
        run_folder.release(folder)
    assert sorted(folder.rglob("*")) == before


def test_train_tells_the_version_of_the_project(monkeypatch, capsys):
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", "--version"])
    assert train.command() == 0
    assert capsys.readouterr().out == f"wherelm {metadata.version('wherelm')}\n"


def test_a_finished_run_says_that_nothing_is_left_to_do(finished):
    folder, _ = finished
    result = run(f"resume={folder}")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "complete" in result.stderr


def test_a_split_of_any_name_is_added_on_the_command_line():
    from train import open_mappings

    given = ["data.extra={mine: my.jsonl}", "data.extra.other=b.jsonl", "data.extras=3", "seed=1"]
    opened = [f"++{argument}" for argument in given[:2]]
    assert open_mappings(given) == [*opened, *given[2:]]
    loader = ["data=errands", *opened]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        extra = compose("train", loader).data.extra
    assert list(extra) == ["longer", "padded_out", "shuffled", "mine", "other"]


@pytest.mark.parametrize("nothing", ["data.extra={}", "data.extra={ }", "data.extra=null"])
def test_an_empty_extra_takes_the_extra_splits_away(nothing):
    from train import open_mappings

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for more in ([], ["data.extra.mine=my.jsonl"]):
            composed = compose("train", open_mappings(["data=errands", nothing, *more])).data
            data = typed(DataConfig, OmegaConf.to_container(composed), "data")
            assert data.extra == dict(pair.removeprefix("data.extra.").split("=") for pair in more)


@pytest.mark.parametrize(
    ("typed_as", "meant"),
    [
        ("data.train=~/a.txt", "data.train=/home/me/a.txt"),
        ("data.train=[~/a.txt,b.txt,~/c]", "data.train=[/home/me/a.txt,b.txt,/home/me/c]"),
        ("data.extra={mine: ~/a.txt}", "data.extra={mine: /home/me/a.txt}"),
        ("resume=~/runs/x", "resume=/home/me/runs/x"),
        ("tokenizer.path=~/t.json", "tokenizer.path=/home/me/t.json"),
        ("data.train=a~/b.txt", "data.train=a~/b.txt"),
        ("~tracking", "~tracking"),
    ],
)
def test_a_tilde_is_the_home_wherever_a_path_begins(monkeypatch, typed_as, meant):
    import train

    monkeypatch.setenv("HOME", "/home/me")
    assert train.at_home(typed_as) == meant
    if "~" not in meant:
        train.check_options([meant])


@pytest.mark.parametrize("key", ["data.train", "data.extra.mine"])
def test_files_with_a_comma_between_are_told_the_list_that_works(tmp_path, key, capfd, monkeypatch):
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", f"{key}=a.txt,b.txt", "--cfg", "job"])
    assert train.command() == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {key}=a.txt,b.txt: several values; ")
    assert said.count("\n") == 1
    assert f"'{key}=[a.txt,b.txt]'" in said
    monkeypatch.setattr(sys, "argv", ["train.py", f"{key}=[a.txt,b.txt]", "--cfg", "job"])
    assert train.command() == 0
    assert "- a.txt\n" in capfd.readouterr().out


def test_a_run_is_never_written_over(finished):
    folder, _ = finished
    result = run("training=debug", f"hydra.run.dir='{folder}'")
    assert result.returncode == 2
    assert "holds a run" in result.stderr


def test_the_configuration_is_shown_and_nothing_is_trained(tmp_path, capsys, monkeypatch):
    import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--cfg", "job", "model.width=64"])
    assert train.command() == 0
    assert "  width: 64\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_help_shows_groups_keys_and_examples():
    result = run("--help")
    assert result.returncode == 0
    files = sorted(path.stem for path in (ROOT / "configs" / "position").glob("*.yaml"))
    assert set(files) >= set(SCHEMES)
    schemes = f"position: {', '.join(files)}"
    sweep = ("-m experiment=position_schemes", "hydra/launcher=joblib", "hydra.sweep.dir=DIR")
    for word in (schemes, "data.train=FILE", "resume=", "batch_tokens:", "baseline:", *sweep):
        assert word in result.stdout
