import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 300, 20
TINY = (
    "tokenizer=bytes optimizer=adamw model.layers=2 model.width=16 model.heads=2 "
    f"model.mlp_width=16 model.context=48 training.batch_tokens=256 training.steps={STEPS} "
    f"training.device=cpu training.threads=1 evaluation.every={EVERY}"
).split()
# The first diverges at once; the others are what it would be without it.
RATES = ("1e30", "0.001", "0.002", "0.004", "0.008")
FIVE = [
    f"optimizer.learning_rate={','.join(RATES)}",
    'ablation.baseline="rope optimizer.learning_rate=0.001"',
    "ablation.seeds=1",
]


def data(folder):
    """Letters and the same in order, as data=messages reads them."""
    draw = random.Random(0)
    rows = [[draw.choice("abcdef") for _ in range(draw.randint(2, 6))] for _ in range(200)]
    pairs = [{"prompt": " ".join(row), "completion": " ".join(sorted(row))} for row in rows]
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["data=messages", f"data.train='{path}'", f"data.cache='{folder / 'cache'}'"]


@contextlib.contextmanager
def started(*arguments):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process):
    """(exit status, what it printed, its errors)"""
    out, error = process.communicate(timeout=240)
    return process.returncode, out, error


def wait_for_checkpoint(sweep, rate, process):
    """The folder of the job with this learning rate, once it has saved and trains on."""
    while process.poll() is None:
        for config in sweep.glob("*/config.yaml"):
            if f"  learning_rate: {rate}\n" in config.read_text() and any(
                config.parent.glob("checkpoints/step-*/state.json")
            ):
                return config.parent
        time.sleep(0.005)
    raise AssertionError(process.communicate())


def summaries(sweep):
    """{learning rate: (summary, when it was written)} by results.csv's names of folders."""
    found = {}
    for path in sweep.glob("*/summary.json"):
        written = path.stat().st_mtime_ns
        found[path.parent.name] = (json.loads(path.read_text()), written)
    return found


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "split" not in line]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def weights(folder):
    return (folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """A sweep of five jobs, one of which fails: stopped in its third, killed in its fourth, ended.

    Gives what each of the three commands left and printed.
    """
    folder = tmp_path_factory.mktemp("five")
    sweep = folder / "sweep"
    command = ["-m", *data(folder), *TINY, *FIVE, f"hydra.sweep.dir='{sweep}'"]
    after = []
    with started(*command) as process:
        stopped = wait_for_checkpoint(sweep, "0.002", process)
        process.send_signal(signal.SIGINT)
        after.append((*ended(process), summaries(sweep), losses(stopped)))
    with started(*command) as process:
        killed = wait_for_checkpoint(sweep, "0.004", process)
        process.kill()
        after.append((*ended(process), summaries(sweep), losses(killed)))
    with started(*command) as process:
        after.append((*ended(process), summaries(sweep), None))
    return folder, sweep, stopped, killed, after


def test_ctrl_c_stops_a_sweep_with_130_and_says_how_it_goes_on(five):
    _, sweep, stopped, _, ((code, _, error, found, _), *_) = five
    assert code == 130
    assert found[stopped.name][0]["status"] == "interrupted"
    assert sorted(summary["status"] for summary, _ in found.values()) == [
        "complete",
        "failed",
        "interrupted",
    ]
    assert f"hydra.sweep.dir={sweep}" in error
    assert "Traceback" not in error


def test_a_sweep_skips_what_is_complete_goes_on_with_what_is_not_and_repeats_what_failed(five):
    _, _, stopped, killed, (first, second, third) = five
    assert (second[0], third[0]) == (-signal.SIGKILL, 1)
    for before, later in ((first[3], second[3]), (second[3], third[3])):
        for name, (summary, written) in before.items():
            if summary["status"] == "complete":
                assert later[name] == (summary, written)
            else:
                assert later[name][1] > written
    assert stopped.name in second[3]
    assert killed.name not in second[3]
    for folder, before in ((stopped, first[4]), (killed, second[4])):
        assert steps(folder) == list(range(1, STEPS + 1))
        kept = len(before) // (EVERY + 1) * (EVERY + 1)
        assert 0 < kept < STEPS
        assert losses(folder)[:kept] == before[:kept]
    (header, *lines) = third[1].splitlines()
    assert header.split() == ["job", "arm", "seed", "lr", "loss", "time", "left"]
    ran = [line.split()[2] for line in lines[: lines.index("")]]
    assert ran == [f"optimizer.learning_rate={rate}" for rate in ("1e+30", "0.004", "0.008")]


def test_a_job_that_fails_leaves_a_row_and_an_exit_status_and_the_others_go_on(five):
    _, sweep, _, _, (*_, (code, out, error, _, _)) = five
    assert code == 1
    rows = list(csv.DictReader((sweep / "results.csv").open()))
    assert [row["status"] for row in rows] == ["failed", *4 * ["complete"]]
    assert rows[0]["error"].startswith("the loss is")
    assert len({row["batches_hash"] for row in rows[1:]}) == 1
    assert [row["learning_rate"] for row in rows] == [str(float(rate)) for rate in RATES]
    *_, listed, hint = error.splitlines()
    assert listed == f"failed: {rows[0]['folder']} {rows[0]['error']}"
    assert f"hydra.sweep.dir={sweep}" in hint
    assert "Traceback" not in error
    assert "Traceback" not in out
    compared = json.loads((sweep / "comparison.json").read_text())[0]["differences"]
    assert [one["arm"].rpartition("=")[2] for one in compared] == list(RATES[2:])


@pytest.mark.parametrize("which", ["continued in a process of others", "after others"])
def test_jobs_that_share_a_process_equal_jobs_with_one_of_their_own(five, which):
    """To the bit, and one of them killed on the way."""
    folder, sweep, *_ = five
    rate = "0.004" if which == "continued in a process of others" else "0.008"
    (job,) = (
        path.parent
        for path in sweep.glob("*/config.yaml")
        if f"  learning_rate: {rate}\n" in path.read_text()
    )
    alone = folder / f"alone {rate}"
    arguments = [*data(folder), *TINY, f"optimizer.learning_rate={rate}"]
    with started(*arguments, f"hydra.run.dir='{alone}'") as process:
        assert ended(process)[0] == 0
    assert weights(job) == weights(alone)
    assert losses(job) == losses(alone)
    for name in ("breakdowns.json", "samples.txt", "ledger.json"):
        assert (job / name).read_bytes() == (alone / name).read_bytes()


WRONG = {
    "ablation.baseline=alibi": "ablation.baseline=alibi: expected one of rope, none",
    "ablation.metric=longer.loss": "ablation.metric=longer.loss: expected one of the splits",
    "ablation.metric=validation": "ablation.metric=validation: expected SPLIT.FIGURE",
    "ablation.seeds=0": "ablation.seeds=0: expected 1 to 999",
    "ablation.sedes=3": "ablation.sedes: no such key; did you mean ablation.seeds?",
    "seed=1,2": "seed=…: a sweep draws its own; give ablation.seeds=N, and seed=FIRST",
    "training.threads=1,2": "rope training.threads=2: the same run as rope training.threads=1",
    "position=rope,none,rope": "rope: the same run as rope",
    "position=rope,alibbi": "position=alibbi: no such option; expected one of alibi",
    "model.width=16,15": "model.heads=2: expected a divisor of width",
    "experiment=nothing": "experiment=nothing: no such option; expected one of",
    "hydra/launcher=jobib": "hydra/launcher=jobib: no such option; expected one of",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_override_of_a_sweep_is_one_line_before_anything_is_trained(
    override, tmp_path, capsys, monkeypatch
):
    import train

    sweep = tmp_path / "sweep"
    usual = [] if override.startswith("position") else ["position=rope,none"]
    arguments = [*data(tmp_path), *TINY, *usual, override, f"hydra.sweep.dir='{sweep}'"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(train.command())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(f"error: {WRONG[override]}")
    assert error.count("\n") == 1
    assert not sweep.exists()


def test_a_sweep_in_a_folder_that_another_one_holds_is_one_line(tmp_path, capsys, monkeypatch):
    import train
    from wherelm import run_folder

    sweep = tmp_path / "sweep"
    arguments = [*data(tmp_path), *TINY, "position=rope,none", f"hydra.sweep.dir='{sweep}'"]
    run_folder.hold(sweep)
    file, made = run_folder._held.pop(sweep)
    try:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
        assert train.command() == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: hydra.sweep.dir='{sweep}': process {os.getpid()} on ")
        assert error.count("\n") == 1
        assert [path.name for path in sweep.iterdir()] == [".lock"]
    finally:
        run_folder._held[sweep] = file, made
        run_folder.release(sweep)
    assert not sweep.exists()


def test_a_job_that_begins_anew_keeps_its_log_and_its_lock(tmp_path):
    from wherelm import run_folder
    from wherelm.ablation.folder import ready

    (tmp_path / "train.log").write_text("failed\n")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    run_folder.hold(tmp_path)
    assert not ready(tmp_path)
    with pytest.raises(BlockingIOError):
        run_folder.hold(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"train.log", ".lock"}
    run_folder.release(tmp_path)


def test_a_sweep_needs_no_folder_and_names_arms_by_what_varies(capsys, monkeypatch):
    import train

    override = 'ablation.baseline="rope model.layers=3"'
    arguments = ["-m", "position=rope,none", "model.layers=1,2", override]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert train.command() == 2
    assert capsys.readouterr().err == (
        "error: ablation.baseline=rope model.layers=3: expected one of rope, none, "
        "rope model.layers=1, rope model.layers=2, none model.layers=1, none model.layers=2\n"
    )


def test_without_a_named_baseline_arms_are_compared_to_the_first(tmp_path, monkeypatch):
    import train

    sweep = tmp_path / "sweep"
    arguments = [*data(tmp_path), *TINY, "training.steps=5", "model.layers=2,1", "ablation.seeds=1"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments, f"hydra.sweep.dir='{sweep}'"])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(train.command())
    assert stopped.value.code == 0
    (found,) = json.loads((sweep / "comparison.json").read_text())
    (difference,) = found["differences"]
    assert difference["baseline"] == "rope model.layers=2"


def test_two_files_of_one_scheme_are_two_arms_and_a_metric_that_no_run_has_is_an_error(tmp_path):
    own = tmp_path / "conf" / "position" / "rope_50.yaml"
    own.parent.mkdir(parents=True)
    shipped = (ROOT / "configs" / "position" / "rope.yaml").read_text()
    own.write_text(shipped.replace("base: 10000.0", "base: 50.0"))
    assert "base: 50.0\n" in own.read_text()
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"line {number}\n" for number in range(90)))
    command = [
        *("--config-dir", str(own.parents[1]), *TINY, "training.steps=2", "ablation.seeds=1"),
        *("-m", "position=rope,rope_50", "data=messages", f"data.train='{texts}'"),
        *("ablation.metric=validation.exact_match", f"hydra.sweep.dir='{tmp_path / 'sweep'}'"),
    ]
    with started(*command) as process:
        code, _, error = ended(process)
    rows = list(csv.DictReader((tmp_path / "sweep" / "results.csv").open()))
    assert [(row["arm"], float(row["position.base"])) for row in rows] == [
        ("rope", 10_000),
        ("rope_50", 50),
    ]
    assert code == 1
    assert "ablation.metric=validation.exact_match: no run has it" in error


def test_an_experiment_of_several_schemes_is_a_sweep_without_being_told(tmp_path):
    sweep = tmp_path / "sweep"
    tiny = [each for each in TINY if not each.startswith("training.steps")]
    arguments = [*tiny, "training.steps=2", "ablation.seeds=1", "evaluation.extrapolation=false"]
    command = ["experiment=position_schemes", *data(tmp_path), *arguments]
    with started(*command, f"hydra.sweep.dir='{sweep}'") as process:
        code, out, error = ended(process)
    assert code == 0, error
    rows = list(csv.DictReader((sweep / "results.csv").open()))
    assert len({row["scheme"] for row in rows}) == len(rows) == 10
    assert len({row["batches_hash"] for row in rows}) == 1
    assert "too few seeds" in out
    assert error == ""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_worker_that_is_killed_costs_its_own_jobs_alone(launcher, tmp_path):
    """And the next command goes on with them, to the bits of a sweep in one process."""
    if find_spec(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher") is None:
        pytest.skip("its extra is not installed")
    sweep, plain = tmp_path / "sweep", tmp_path / "plain"
    command = ["-m", *data(tmp_path), *TINY, *FIVE]
    parallel = [*command, f"hydra.sweep.dir='{sweep}'", f"hydra/launcher={launcher}"]
    with started(*parallel) as process:
        killed = wait_for_checkpoint(sweep, "0.002", process)
        os.kill(writer_of(killed), signal.SIGKILL)
        code, _, error = ended(process)
    assert code == 1
    assert "ended early" in error
    assert f"killed: {killed.name}" in error
    begun = {path.parent.name for path in sweep.glob("*/config.yaml")}
    assert len(begun) == 5
    with started(*parallel) as process:
        assert ended(process)[0] == 1
    with started(*command, f"hydra.sweep.dir='{plain}'") as process:
        assert ended(process)[0] == 1
    for name, (summary, _) in summaries(plain).items():
        if summary["status"] == "complete":
            assert weights(sweep / name) == weights(plain / name)
            assert losses(sweep / name) == losses(plain / name)


def writer_of(folder):
    """The process that has the metrics of a run open."""
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if place.readlink() == folder / "metrics.jsonl":
                return int(place.parts[2])
    raise AssertionError(f"nobody writes {folder}")
