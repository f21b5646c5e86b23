import re
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from wherelm.config import (
    RunConfig,
    load_yaml,
    plain,
    run_config,
    save_yaml,
    unknown_key,
    with_overrides,
)
from wherelm.schemes import SCHEMES

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONFIGS.glob("*/*.yaml"))
    if path.parent.name != "hydra"
]
# What an option cannot be composed without.
GIVEN = {("tokenizer", "file"): ["tokenizer.path=tokenizer.json"]}


def composed(*overrides):
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = hydra.compose("train", ["name=test", *overrides], return_hydra_config=False)
    values = OmegaConf.to_container(values, resolve=True)
    del values["resume"], values["ablation"]  # which train.py reads itself
    return values


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes_and_types(group, option):
    config = run_config(composed(f"{group}={option}", *GIVEN.get((group, option), [])))
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_a_group_has_at_most_about_fifteen_fields(group, option):
    if group != "experiment":
        assert len(load_yaml(CONFIGS / group / f"{option}.yaml")) <= 15


def test_every_position_file_sets_up_a_scheme_with_every_field():
    files = sorted((CONFIGS / "position").glob("*.yaml"))
    assert {path.stem for path in files} > set(SCHEMES)
    for path in files:
        values = load_yaml(path)
        assert set(values) == set(vars(SCHEMES[values["name"]].Config())), path
        own = run_config(composed(f"position={path.stem}")).position
        assert own.name == values["name"]
        # What is named otherwise is another setting of a scheme.
        assert (own == SCHEMES[own.name].Config()) == (path.stem == own.name), path


def test_a_setting_of_one_scheme_in_an_experiment_stands_in_no_others_way():
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        for name in SCHEMES:
            config = run_config(composed(f"experiment={path.stem}", f"position={name}"))
            assert config.position == SCHEMES[name].Config()
    own = run_config(composed("experiment=shakespeare_characters")).position
    assert (own.name, own.base) == ("rope", 100.0)


def test_every_scheme_has_its_yaml_with_the_same_defaults():
    for name, scheme in SCHEMES.items():
        config = run_config(composed(f"position={name}"))
        assert config.position == scheme.Config()


def test_no_file_but_hydras_own_instantiates_anything():
    for path in set(CONFIGS.rglob("*.yaml")) - set((CONFIGS / "hydra").rglob("*.yaml")):
        assert "_target_" not in path.read_text(), path


def test_a_saved_configuration_is_the_same_when_it_is_loaded(tmp_path):
    config = run_config(composed("position=learned", "evaluation.splits=[test,longer]"))
    save_yaml(plain(config), tmp_path / "config.yaml")
    assert run_config(load_yaml(tmp_path / "config.yaml")) == config


def test_an_old_configuration_without_a_new_field_takes_its_default():
    values = composed()
    del values["model"]["softcap"]
    assert run_config(values).model.softcap is None


def test_overrides_without_hydra_type_like_those_with_it():
    values = plain(run_config(composed()))
    changed = with_overrides(values, ["evaluation.splits=[test]", "training.steps=7"])
    assert run_config(changed).evaluation.splits == ("test",)
    assert run_config(changed).training.steps == 7
    with pytest.raises(ValueError, match=r"model\.widht: no such key; did you mean model\.width"):
        with_overrides(values, ["model.widht=3"])
    for pair in ("model", "=3"):
        with pytest.raises(ValueError, match=r"expected key=value"):
            with_overrides(values, [pair])
    for pair in ("data.extra={", "seed=${", "seed=${absent}"):
        expected = re.escape(f"{pair}: cannot be read; expected a value such as")
        with pytest.raises(ValueError, match=expected) as caught:
            with_overrides(values, [pair])
        assert "\n" not in str(caught.value)


def test_no_split_at_all_is_refused():
    with pytest.raises(
        ValueError, match=r"evaluation\.splits=\[\]: expected at least one, or null"
    ):
        run_config(composed("evaluation.splits=[]"))


def test_whole_numbers_serve_as_numbers_but_not_the_other_way_round():
    values = composed("training.clip=2")
    assert run_config(values).training.clip == 2.0
    values["training"]["steps"] = 2.5
    with pytest.raises(ValueError, match=r"training\.steps=2\.5: expected a whole number"):
        run_config(values)


def test_a_missing_group_is_named():
    values = composed()
    del values["model"]
    with pytest.raises(ValueError, match="model: missing"):
        run_config(values)


def test_an_unknown_key_guesses_the_nearest_one():
    assert "did you mean a.width?" in unknown_key("a.widht", ["width", "depth"])
    assert "did you mean" not in unknown_key("a.zzz", ["width"])


def test_an_empty_mapping_replaces_what_is_there_and_null_is_one():
    values = {"data": {"extra": {"longer": "a.jsonl"}, "train": "b.jsonl"}}
    for pair, expected in {
        "data.extra={}": {},
        "data.extra=null": None,
        "data.extra={mine: c.jsonl}": {"longer": "a.jsonl", "mine": "c.jsonl"},
    }.items():
        assert with_overrides(values, [pair])["data"] == {"extra": expected, "train": "b.jsonl"}
    assert run_config(composed("++data.extra=null")).data.extra == {}


def test_a_list_of_paths_survives_saving_and_loading(tmp_path):
    config = run_config(composed("data.train=[a.txt,b.jsonl]", "++data.extra.mine=[c.txt]"))
    assert config.data.train == ("a.txt", "b.jsonl")
    save_yaml(plain(config), tmp_path / "config.yaml")
    assert run_config(load_yaml(tmp_path / "config.yaml")) == config
    changed = with_overrides(plain(config), ["data.train=[d.txt]", "data.test=e.txt"])
    assert run_config(changed).data.paths["train"] == ("d.txt",)
    with pytest.raises(ValueError, match=r"data\.train=\{'a': 1\}: expected text"):
        run_config(composed("data.train={a: 1}"))
