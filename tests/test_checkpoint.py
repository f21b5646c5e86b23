import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from wherelm import checkpoint
from wherelm.config import load_yaml, run_config, save_yaml
from wherelm.model.decoder import initialize
from wherelm.run_folder import STATE
from wherelm.tokenizer.training import TokenizerConfig, train_tokenizer


def config(tied=False, scheme="learned"):
    return run_config(
        {
            "name": "test",
            "seed": 0,
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 16, "tied": tied},
            "position": {"name": scheme},
            "data": {},
            "tokenizer": {"kind": "bytes"},
            "optimizer": {"name": "adamw"},
            "schedule": {"name": "constant"},
            "training": {"steps": 1, "batch_tokens": 64},
            "evaluation": {},
            "tracking": {},
        }
    )


def saved(folder, step=1, loss=1.0, tied=False, scheme="learned", seed=0):
    settings = config(tied, scheme)
    tokenizer = train_tokenizer(settings.tokenizer, ())
    model = checkpoint.build_model(settings, tokenizer.vocab_size)
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    place = folder / "checkpoints" / f"step-{step:08d}"
    state = {"step": step, "share": 1.0, "validation_loss": loss}
    checkpoint.save(place, model, tokenizer, settings, state, {"a.b": torch.ones(2)})
    return place, model


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_of_a_wrapped_model_load_where_every_name_has_its_prefix(tmp_path, prefix):
    place, model = saved(tmp_path)
    path = place / "model.safetensors"
    weights = load_file(path)
    save_file({prefix + name: tensor for name, tensor in weights.items()}, path)
    tokens, positions = torch.randint(0, 200, (2, 9)), torch.arange(9)[None]
    assert torch.equal(checkpoint.load(place).model(tokens, positions), model(tokens, positions))
    first, *others = weights
    mixed = {prefix + first: weights[first]} | {name: weights[name] for name in others}
    save_file(mixed, path)
    wanted = rf"{re.escape(prefix + first)} was saved .* save the state_dict of the inner one"
    with pytest.raises(ValueError, match=wanted):
        checkpoint.load(place)


@pytest.mark.parametrize("failing", ["save_file", "write_json"])
def test_a_save_that_fails_names_its_place_and_leaves_the_checkpoint_before_it(
    tmp_path, monkeypatch, failing
):
    before, _ = saved(tmp_path)
    files = {path: path.read_bytes() for path in before.iterdir()}

    def full(*arguments):
        if failing == "save_file":
            raise SafetensorError("No space left on device (os error 28)")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, failing, full)
    with pytest.raises(OSError, match=r"cannot be saved \(No space left on device") as error:
        saved(tmp_path, step=2)
    assert error.value.filename == str(tmp_path / "checkpoints" / "step-00000002")
    assert list((tmp_path / "checkpoints").iterdir()) == [before]
    assert {path: path.read_bytes() for path in before.iterdir()} == files
    checkpoint.load(before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["learned", "rope"])
def test_a_loaded_checkpoint_gives_the_same_logits(tmp_path, tied, scheme):
    place, model = saved(tmp_path, tied=tied, scheme=scheme)
    loaded = checkpoint.load(place)
    tokens, positions = torch.randint(0, 200, (2, 9)), torch.arange(9)[None]
    assert torch.equal(loaded.model(tokens, positions), model.eval()(tokens, positions))
    assert loaded.config == config(tied, scheme)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße")) == "Grüße"
    assert (loaded.model.head.weight is loaded.model.embedding.weight) == tied


def test_a_checkpoint_holds_tensors_and_plain_mappings_only(tmp_path):
    place, _ = saved(tmp_path)
    for path in place.iterdir():
        assert path.suffix in (".safetensors", ".json", ".yaml")


def test_saving_again_replaces_the_folder_and_leaves_no_part(tmp_path):
    saved(tmp_path, loss=2.0)
    place, model = saved(tmp_path, loss=1.0, seed=1)
    assert checkpoint.load_state(place)["validation_loss"] == 1.0
    assert torch.equal(checkpoint.load(place).model.head.weight, model.head.weight)
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_a_save_that_fails_leaves_the_former_one(tmp_path, monkeypatch):
    place, model = saved(tmp_path)
    monkeypatch.setattr(checkpoint, "save_yaml", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        saved(tmp_path, seed=1)
    assert torch.equal(checkpoint.load(place).model.head.weight, model.head.weight)
    assert checkpoint.checkpoints(tmp_path) == [place]


def test_a_checkpoint_without_its_state_is_passed_over(tmp_path):
    """As one is that was deleted or copied halfway."""
    place, _ = saved(tmp_path, 1)
    later, _ = saved(tmp_path, 2)
    assert checkpoint.last(tmp_path) == later
    (later / STATE).unlink()
    assert checkpoint.last(tmp_path) == place


def test_the_best_is_the_one_with_the_lowest_validation_loss(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        saved(tmp_path, step, loss)
    assert checkpoint.best(tmp_path).name == "step-00000002"
    assert checkpoint.last(tmp_path).name == "step-00000004"
    checkpoint.keep_best_and_last(tmp_path)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-00000002", "step-00000004"]


def test_a_run_is_found_behind_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place, _ = saved(tmp_path / "run")
    assert checkpoint.find("~/run", tmp_path) == place


def test_finding_takes_a_run_a_checkpoint_or_the_newest_run(tmp_path):
    run = tmp_path / "runs" / "errands" / "now"
    place, _ = saved(run)
    assert checkpoint.find(run, tmp_path) == place
    assert checkpoint.find(place, tmp_path) == place
    assert checkpoint.find(None, tmp_path) == place


@pytest.mark.parametrize("path", ["absent", "."])
def test_what_is_no_checkpoint_is_one_line_with_the_fix(tmp_path, path):
    with pytest.raises(ValueError, match=r"give a run folder such as runs/NAME/TIME"):
        checkpoint.find(tmp_path / path, tmp_path)


def test_without_any_run_the_shipped_checkpoint_or_a_fix(tmp_path):
    with pytest.raises(ValueError, match=r"train one first with python train\.py"):
        checkpoint.find(None, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("config.yaml", "a: [", checkpoint.load),
        ("config.yaml", "", checkpoint.load),
        ("config.yaml", "- a", checkpoint.load),
        ("state.json", "{}", checkpoint.load),
        ("state.json", "[]", checkpoint.load),
        ("optimizer.safetensors", "cut", checkpoint.load_optimizer),
    ],
)
def test_other_damaged_files_are_named_in_one_line(tmp_path, name, content, read):
    place, _ = saved(tmp_path)
    (place / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}: damaged") as caught:
        read(place)
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_named(tmp_path):
    place, _ = saved(tmp_path)
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        checkpoint.load(place)


def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path):
    place, _ = saved(tmp_path)
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(text.replace("width: 16", "width: 32"))
    with pytest.raises(ValueError, match=r"take both from one checkpoint"):
        checkpoint.load(place)


def test_a_missing_file_is_named(tmp_path):
    place, _ = saved(tmp_path)
    (place / "state.json").unlink()
    with pytest.raises(ValueError, match=r"state\.json is missing"):
        checkpoint.load(place)


def test_rereading_gives_the_same_weights_another_rotary_extension(tmp_path):
    place, model = saved(tmp_path, scheme="rope")
    loaded = checkpoint.load(place)
    again = checkpoint.reread(loaded, ["position.scaling=yarn", "position.factor=4"])
    for (name, p), (other, q) in zip(
        model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p, q)
    position = replace(loaded.config.position, scaling="yarn", factor=4.0)
    assert again.config == replace(loaded.config, position=position)
    expected = checkpoint.build_model(again.config, loaded.tokenizer.vocab_size).eval()
    expected.load_state_dict(model.state_dict())
    tokens, positions = torch.randint(0, 200, (2, 40)), torch.arange(40)[None]
    logits = again.model(tokens, positions)
    assert torch.equal(logits, expected(tokens, positions))
    assert (logits - loaded.model(tokens, positions)).abs().max() > 1e-2


@pytest.mark.parametrize("offset", [False, True])
def test_schemes_are_told_the_length_that_training_held_and_the_context_where_nobody_noted_it(
    tmp_path, offset
):
    place, _ = saved(tmp_path, scheme="t5")
    assert "trained_length" not in checkpoint.load_state(place)
    before = checkpoint.load(place).model.scheme
    assert (before.shape.context, before.shape.trained, before.shape.positions) == (16, 16, 16)
    settings = load_yaml(place / "config.yaml")
    settings["training"]["random_offset"] = offset
    save_yaml(settings, place / "config.yaml")
    state = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps(state | {"trained_length": 9}))
    loaded = checkpoint.load(place)
    for other in (loaded, checkpoint.reread(loaded, ["model.context=64"])):
        shape = other.model.scheme.shape
        assert (shape.context, shape.trained, shape.positions) == (16, 9, 16 if offset else 9)


def test_rereading_without_overrides_changes_nothing(tmp_path):
    loaded = checkpoint.load(saved(tmp_path, scheme="rope")[0])
    again = checkpoint.reread(loaded, [])
    tokens, positions = torch.randint(0, 200, (2, 9)), torch.arange(9)[None]
    assert torch.equal(again.model(tokens, positions), loaded.model(tokens, positions))
    assert again.config == loaded.config


def test_a_longer_context_cuts_the_data_and_leaves_the_trained_one_to_the_scheme(tmp_path):
    pairs = ["position.scaling=yarn", "position.factor=2"]
    loaded = checkpoint.reread(checkpoint.load(saved(tmp_path, scheme="rope")[0]), pairs)
    longer = checkpoint.reread(loaded, ["model.context=64"])
    assert longer.config.model.context == 64
    assert longer.model.config.context == 16
    assert torch.equal(longer.model.scheme.frequencies_P, loaded.model.scheme.frequencies_P)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["model.layers=3"], "model.layers=3: the checkpoint was trained with 2; expected another"),
        (["model.heads=4"], "model.heads=4: the checkpoint was trained with 2"),
        (["model.norm=layernorm"], "model.norm=layernorm: the checkpoint was trained with rmsnorm"),
        (["position=none"], "position=none: the checkpoint was trained with rope; expected settin"),
        (["position.name=alibi"], "position=alibi: the checkpoint was trained with rope; expected"),
        (["position.bas=3"], "position.bas: no such key; did you mean position.base?"),
        (["nosuch=3"], "nosuch: no such key"),
        (["evaluation.splits=[tset]"], "evaluation.splits=tset: expected one of train, validation"),
        (["training.steps=5"], "training.steps=5: changes nothing for weights that are trained"),
        (["optimizer.name=muon"], "optimizer.name=muon: changes nothing for weights that are tra"),
    ],
)
def test_what_the_weights_were_not_made_for_is_one_line(tmp_path, pairs, message):
    loaded = checkpoint.load(saved(tmp_path, scheme="rope")[0])
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        checkpoint.reread(loaded, pairs)
    assert "\n" not in str(caught.value)


def test_settings_that_would_add_parameters_are_refused(tmp_path):
    loaded = checkpoint.load(saved(tmp_path, scheme="fire")[0])
    with pytest.raises(
        ValueError, match=r", 32\) .*, 16\) .*: expected settings that add no param"
    ):
        checkpoint.reread(loaded, ["position.inner=16"])


def test_a_strangers_configuration_runs_no_code(tmp_path):
    place, _ = saved(tmp_path)
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(text + "_target_: os.system\n")
    with pytest.raises(ValueError, match="_target_: no such key"):
        checkpoint.load(place)


def test_the_tokenizer_config_of_a_checkpoint_is_plain():
    assert json.dumps(vars(TokenizerConfig(kind="bytes")))
