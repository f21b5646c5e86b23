import gzip
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ragged_store, random_decoder
from wherelm import checkpoint, pipeline
from wherelm.batches.batch import collate
from wherelm.batches.sampler import cut
from wherelm.batches.store import TokenStore
from wherelm.config import run_config
from wherelm.run_folder import PROFILE, TRACE
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.training import loop as training
from wherelm.training import profiling
from wherelm.training.description import idle_settings
from wherelm.training.tracking import Tracker

WORDS = ["report", "slides", "agenda", "contract", "invoice", "budget", "letter", "memo"]


def config(folder, **changes):
    """A run of a tiny decoder on a file of two things and their order."""
    path = folder / "messages.jsonl"
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        a, b = generator.choice(WORDS, 2, replace=False)
        text = f"Send the {a} before the {b}." + " Thank you." * int(generator.integers(4))
        rows.append({"prompt": text, "completion": f"{a}, then {b}."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "tiny",
        "seed": 0,
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 64},
        "position": {"name": "rope"},
        "data": {"train": str(path), "cache": str(folder / "cache")},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "optimizer": {"name": "muon"},
        "schedule": {"name": "wsd"},
        "training": {"steps": 12, "batch_tokens": 512, "device": "cpu", "precision": "float32"},
        "evaluation": {"every": 4, "batch_tokens": 512},
        "tracking": {"name": "none"},
    }
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    return run_config(values)


def weights(folder):
    return checkpoint.load(checkpoint.last(folder)).model.state_dict()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained_positions(folder):
    """How many targets were learned in each bin of positions, by its first."""
    bins = json.loads((folder / "breakdowns.json").read_text())["train"]["learned"]
    return {entry["from"]: entry["targets"] for entry in bins}


@pytest.fixture
def fit(tmp_path):
    def run(name, resume=False, **changes):
        return training.fit(config(tmp_path, **changes), tmp_path / name, tmp_path, resume)

    return run


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """The process gets a signal while it writes the metrics of this step."""
    write = Tracker.write

    def write_and_stop(self, **values):
        write(self, **values)
        if values["step"] == step and "split" not in values:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Tracker, "write", write_and_stop)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    fit, tmp_path, monkeypatch, dropout, optimizer
):
    changes = {"model": {"dropout": dropout}, "optimizer": {"name": optimizer}}
    straight = fit("straight", **changes)
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        stopped = fit("stopped", **changes)
    assert (stopped["status"], stopped["step"], stopped["exit_code"]) == ("interrupted", 7, 143)
    resumed = fit("stopped", resume=True, **changes)
    assert resumed["status"] == "complete"
    assert resumed["batches_hash"] == straight["batches_hash"]
    assert trained_positions(tmp_path / "stopped") == trained_positions(tmp_path / "straight")
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name]), name
    keys = ("step", "loss", "learning_rate", "targets")
    for a, b in zip(
        (line for line in metrics(tmp_path / "straight") if "split" not in line),
        (line for line in metrics(tmp_path / "stopped") if "split" not in line),
        strict=True,
    ):
        assert [a[k] for k in keys] == [b[k] for k in keys]


def test_lines_beyond_the_checkpoint_are_cut_back(fit, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5, signal.SIGINT)
        assert fit("run")["exit_code"] == 130
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 99.0}\n{"step": 7, "lo')
    fit("run", resume=True)
    steps = [line["step"] for line in metrics(tmp_path / "run") if "split" not in line]
    assert steps == list(range(1, 13))
    assert all(line["loss"] < 99 for line in metrics(tmp_path / "run"))


def test_evaluating_more_often_changes_nothing_in_training(fit, tmp_path):
    fit("seldom", evaluation={"every": 100}, model={"dropout": 0.1})
    fit("often", evaluation={"every": 1}, model={"dropout": 0.1})
    often = weights(tmp_path / "often")
    for name, tensor in weights(tmp_path / "seldom").items():
        assert torch.equal(tensor, often[name]), name


def test_the_logged_loss_is_the_one_that_was_optimised(fit, tmp_path, monkeypatch):
    seen = []
    accumulate = training.accumulate

    def spy(model, micro_batches, *rest):
        nats, targets = 0.0, 0
        with torch.no_grad():
            for batch in micro_batches:
                logits = model(batch.tokens_BT, batch.positions_BT)
                kept = batch.loss_mask_BT
                nats += float(
                    F.cross_entropy(logits[kept], batch.targets_BT[kept], reduction="sum")
                )
                targets += int(kept.sum())
        seen.append(nats / targets)
        return accumulate(model, micro_batches, *rest)

    monkeypatch.setattr(training, "accumulate", spy)
    fit("run", training={"micro_tokens": 128})
    logged = [line["loss"] for line in metrics(tmp_path / "run") if "split" not in line]
    assert logged == pytest.approx(seen, abs=1e-5)


def test_micro_batches_change_nothing_but_rounding(fit, tmp_path):
    fit("whole")
    fit("parts", training={"micro_tokens": 100})
    a, b = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    first = [[line["loss"] for line in lines if "split" not in line][:4] for lines in (a, b)]
    assert first[0] == pytest.approx(first[1], abs=1e-4)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"tokens": 3000}])
def test_epochs_and_tokens_end_where_they_say(fit, length):
    summary = fit("run", training={"steps": None, **length})
    if "epochs" in length:
        assert (summary["epoch"] == 2) or (summary["epoch"] == 1 and summary["position"] > 0)
    else:
        assert summary["targets"] >= 3000 > summary["targets"] - 512


def test_schemes_see_the_same_batches_and_start_from_the_same_shared_weights(fit, tmp_path):
    hashes = {
        name: fit(name, position={"name": name}, training={"steps": 3})["batches_hash"]
        for name in SCHEMES
    }
    assert len(set(hashes.values())) == 1
    assert fit("seed", seed=1, training={"steps": 3})["batches_hash"] not in hashes.values()


def test_a_loss_that_is_no_number_is_one_clear_error(fit, monkeypatch):
    monkeypatch.setattr(training, "accumulate", lambda *arguments: float("nan"))
    with pytest.raises(ValueError, match=r"the loss is nan at step 1: lower optimizer"):
        fit("run")


def test_only_the_best_and_the_last_checkpoint_are_kept(fit, tmp_path):
    fit("run", evaluation={"every": 2})
    found = checkpoint.checkpoints(tmp_path / "run")
    assert found[-1].name == "step-00000012"
    assert len(found) <= 2
    losses = [checkpoint.load_state(path)["validation_loss"] for path in found]
    watched = [
        line["loss"]
        for line in metrics(tmp_path / "run")
        if line.get("split") == "validation" and not line.get("final")
    ]
    assert min(losses) == pytest.approx(min(watched))


def test_a_checkpoint_says_whether_its_model_has_read_turns(fit, tmp_path):
    fit("turns")
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"Send the {a} and the {b}.\n" for a in WORDS for b in WORDS))
    fit("texts", data={"train": str(texts)})
    states = [checkpoint.load_state(checkpoint.last(tmp_path / n)) for n in ("turns", "texts")]
    assert [state["turns"] for state in states] == [True, False]


@pytest.mark.parametrize("pattern", [False, True], ids=["alone", "in a pattern"])
def test_a_scheme_is_told_how_far_training_is_and_again_when_it_is_loaded(fit, tmp_path, pattern):
    def position(drop_at):
        own = {"name": "drope", "drop_at": drop_at}
        layers = [{"scheme": own, "window": None}, {"scheme": {"name": "none"}, "window": None}]
        return {"name": "hybrid", "pattern": layers} if pattern else own

    fit("half", position=position(0.5))
    fit("whole", position=position(1.0))
    losses = [
        [line["loss"] for line in metrics(tmp_path / run) if "split" not in line]
        for run in ("half", "whole")
    ]
    # Step 7 of 12 is the first that begins with half of training done.
    assert losses[0][:6] == losses[1][:6]
    assert losses[0][6] != losses[1][6]
    scheme = checkpoint.load(checkpoint.last(tmp_path / "half")).model.scheme.for_layer(0)
    assert scheme.dropped


def test_chained_hashes_tell_other_batches_and_other_orders_apart():
    def chain(*batches, shift=0, learned=True):
        store = TokenStore.from_lists([([i + shift, 9], [learned, True]) for i in range(4)])
        value = ""
        for batch in batches:
            value = training.chained_hash(value, np.array(batch), store)
        return value

    assert chain([1, 2], [3]) == chain([1, 2], [3])
    orders = {chain([1, 2], [3]), chain([1], [2, 3]), chain([3], [1, 2]), chain([2, 1], [3])}
    others = {chain([1, 2], [3], shift=1), chain([1, 2], [3], learned=False)}
    assert len(orders | others) == 6


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_a_run_killed_in_its_final_measurement_makes_no_further_step(
    fit, tmp_path, monkeypatch, batching
):
    changes = {"training": {"batching": batching, "micro_tokens": 64}}
    straight = fit("run", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(training, "draw_curve", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit("killed", **changes)
    assert not (tmp_path / "killed" / "summary.json").exists()
    resumed = fit("killed", resume=True, **changes)
    for key in ("status", "step", "targets", "batches_hash", "splits", "validation_loss"):
        assert resumed[key] == straight[key], key
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "killed")] == names
    keys = ("step", "split", "final", "loss", "targets")
    lines = [
        [[line.get(k) for k in keys] for line in metrics(tmp_path / run)]
        for run in ("run", "killed")
    ]
    assert lines[0] == lines[1]


def test_a_run_whose_data_has_changed_does_not_go_on(fit, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        fit("run")
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    changed = config(tmp_path)
    messages = tmp_path / "messages.jsonl"
    messages.write_text(messages.read_text().replace("Send", "Mail"))
    with pytest.raises(ValueError, match="split train has changed since this run was stopped"):
        training.fit(changed, tmp_path / "run", tmp_path, resume=True)
    assert files == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_signal_during_the_final_measurement_lets_it_end_and_is_told(fit, tmp_path, monkeypatch):
    measure = training.measure

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return measure(*arguments)

    monkeypatch.setattr(training, "measure", interrupted)
    summary = fit("run")
    assert (summary["status"], summary["exit_code"]) == ("complete", 130)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 130


def test_positions_learned_stand_beside_the_breakdowns_of_an_evaluated_train_split(fit, tmp_path):
    summary = fit("run", evaluation={"splits": ["train", "validation"]})
    parts = json.loads((tmp_path / "run" / "breakdowns.json").read_text())["train"]
    assert sum(entry["targets"] for entry in parts["learned"]) == summary["targets"]
    evaluated = sum(entry["targets"] for entry in parts["position"])
    assert evaluated == summary["splits"]["train"]["targets"] != summary["targets"]


def test_accumulated_gradients_do_not_depend_on_how_a_batch_is_cut(tmp_path):
    data_config = config(tmp_path)
    model = checkpoint.build_model(data_config, 40)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    store = TokenStore.from_lists(
        [(np.arange(n) % 40, [False] + [i % 3 == 0 for i in range(n - 1)]) for n in range(5, 30)]
    )
    gradients = []
    for budget in (10**6, 64, 90):
        model.zero_grad()
        parts = [collate(store, rows, 0) for rows in cut(store.lengths, np.arange(25), budget)]
        training.accumulate(model, parts, data_config, 0, nullcontext())
        gradients.append([p.grad.clone() for p in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm()


def test_the_micro_batches_that_are_accumulated_drop_different_entries(tmp_path):
    with_dropout = config(tmp_path, model={"dropout": 0.5})
    model = random_decoder(dropout=0.5).train()
    batch = collate(ragged_store(), range(4), 0)

    def loss(*micro_batches):
        return training.accumulate(model, list(micro_batches), with_dropout, 3, nullcontext())

    assert loss(batch) == loss(batch)
    assert abs(loss(batch, batch) - loss(batch)) > 1e-3


def test_the_design_folder_of_a_run_is_described(fit, tmp_path):
    fit("run", training={"steps": 2})
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    train = ledger["train"]
    assert train["messages"]["read"] == 300
    assert sum(ledger["trained_positions"]) == train["tokens"]["supervised"]
    assert Path(tmp_path / "run" / "curve.png").stat().st_size > 5000


def test_every_line_of_the_metrics_counts_the_targets_learned_so_far(fit, tmp_path):
    summary = fit("run", evaluation={"every": 2})
    lines = metrics(tmp_path / "run")
    assert [line["targets"] for line in lines] == sorted(line["targets"] for line in lines)
    final = [line for line in lines if line.get("final")]
    assert {line["split"] for line in final} >= {"validation"}
    assert {line["targets"] for line in final} == {summary["targets"]}


def test_every_learned_target_is_counted_at_its_position(fit, tmp_path):
    summary = fit("run", training={"micro_tokens": 64})
    counts = trained_positions(tmp_path / "run")
    assert sum(counts.values()) == summary["targets"]
    assert counts[0] == 0  # a request stands before every reply


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_the_trained_length_is_that_of_the_longest_row_of_training(
    fit, tmp_path, monkeypatch, batching
):
    changes = {"position": {"name": "fire"}, "training": {"batching": batching}}
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        fit("run", **changes)
    summary = fit("run", resume=True, **changes)
    settings = config(tmp_path, **changes)
    store = pipeline.prepare(settings, tmp_path, ["train"]).stores["train"]
    # The last token of a row is always learned here: its <EOS>.
    assert summary["trained_length"] == store.lengths.max() < settings.model.context
    loaded = checkpoint.load(checkpoint.last(tmp_path / "run"))
    assert (
        loaded.state["trained_length"] == loaded.model.scheme.shape.trained == store.lengths.max()
    )
    assert loaded.model.scheme.start == store.lengths.max() / 4


def test_rows_longer_than_all_of_training_are_said_in_the_figures(fit, tmp_path, caplog):
    longer = tmp_path / "longer.jsonl"
    row = {"prompt": "Send the report before the slides." * 3, "completion": "report, then slides."}
    longer.write_text(json.dumps(row) + "\n")
    data = {"extra": {"longer": str(longer)}}
    with caplog.at_level("INFO", logger="wherelm"):
        splits = fit("run", position={"name": "alibi"}, data=data)["splits"]
    assert splits["validation"]["untrained_reads"] == 0.0
    assert 0 < splits["longer"]["untrained_reads"] < 1
    assert "untrained" in caplog.text


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_random_offsets_train_positions_that_few_messages_reach(fit, tmp_path, batching):
    plain = fit("plain", training={"batching": batching})
    offset = fit("offset", training={"batching": batching, "random_offset": True})
    late, spread = (trained_positions(tmp_path / arm)[48] for arm in ("plain", "offset"))
    assert spread > 10 * late
    assert offset["batches_hash"] == plain["batches_hash"]


def test_rope_learns_the_same_from_any_offset_and_learned_positions_do_not(fit):
    def losses(name):
        arms = [
            fit(
                f"{name}-{on}",
                position={"name": name},
                training={"random_offset": on},
                optimizer={"learning_rate": 0.01},
            )
            for on in (False, True)
        ]
        return [arm["splits"]["validation"]["loss"] for arm in arms]

    plain, offset = losses("rope")
    assert offset == pytest.approx(plain, abs=1e-3)
    plain, offset = losses("learned")
    assert abs(offset - plain) > 1e-2


def test_settings_that_cannot_act_are_told_before_training_and_others_are_not(fit, caplog):
    def told(**model):
        caplog.clear()
        fit(f"run-{len(model)}", model=model, training={"steps": 1, "random_offset": True})
        return [line for line in caplog.messages if line.startswith("warning: ")]

    offset = "warning: training.random_offset=true changes nothing: position=rope reads the same"
    (line,) = told()
    assert line.startswith(offset)
    window, line = told(window=64)
    assert window.startswith("warning: model.window=64 hides nothing in training")
    assert line.startswith(offset)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_random_offset_and_a_window_are_told_only_where_they_cannot_act(name, tmp_path):
    def idle(window, **training):
        one = config(tmp_path, model={"window": window}, position={"name": name}, training=training)
        scheme = build_scheme(one.position, one.model.shape)
        # Beside what the scheme says of itself.
        return len(idle_settings(one, scheme)) - len(scheme.warnings())

    acts = name in ("sinusoidal", "learned", "fire", "randomised")
    assert [idle(63), idle(None), idle(64), idle(65)] == [0, 0, 1, 1]
    assert [idle(None, random_offset=on) for on in (False, True)] == [0, not acts]


def test_a_profile_accounts_for_the_time_and_changes_nothing(fit, tmp_path):
    fit("plain")
    summary = fit("profiled", training={"profile": True})
    for name, tensor in weights(tmp_path / "plain").items():
        assert torch.equal(tensor, weights(tmp_path / "profiled")[name]), name
    lines = (tmp_path / "profiled" / PROFILE).read_text().splitlines()
    assert lines[0].split()[:2] == [str(12 - profiling.TRACED[-1]), "steps"]
    seconds = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert list(seconds) == [*profiling.PARTS, profiling.OTHER]
    assert 0 < sum(seconds.values()) < summary["seconds"]
    with gzip.open(tmp_path / "profiled" / TRACE) as file:
        events = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in events


def test_a_profile_counts_every_moment_behind_the_trace_under_the_part_that_it_took(
    fit, monkeypatch, tmp_path
):
    """By a clock that stands still but for the writing of metrics, checkpoints and the trace."""
    now = [0.0]

    def taking(seconds, function):
        def slow(*arguments, **named):
            now[0] += seconds
            return function(*arguments, **named)

        return slow

    tracer = torch.profiler.profile
    for owner, name, seconds in (
        (Tracker, "write", 1.0),
        (training, "save", 10.0),
        (tracer, "export_chrome_trace", 100.0),
    ):
        monkeypatch.setattr(owner, name, taking(seconds, getattr(owner, name)))
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    fit("run", training={"profile": True, "steps": 8})
    lines = (tmp_path / "run" / PROFILE).read_text().splitlines()
    seconds = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    # Steps 6 to 8, each with a line of metrics; the last one is validated and saved too.
    expected = {"evaluation": 1.0, "saving": 10.0, profiling.OTHER: 3.0}
    assert seconds == dict.fromkeys(profiling.PARTS, 0.0) | expected


def test_a_profile_of_fewer_steps_than_it_traces_says_so(fit, tmp_path):
    fit("run", training={"profile": True, "steps": 3})
    assert "no step" in (tmp_path / "run" / PROFILE).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "alibi", "sinusoidal", "learned", "randomised"])
def test_a_compiled_run_learns_what_an_eager_one_does(fit, tmp_path, position):
    packed = {"batching": "packed", "micro_tokens": 256}
    eager = fit("eager", position={"name": position}, training=packed)
    compiled = fit("compiled", position={"name": position}, training=packed | {"compile": True})
    assert compiled["batches_hash"] == eager["batches_hash"]
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-3)
