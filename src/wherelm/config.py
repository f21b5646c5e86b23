"""The table of contents of a run, typed and checked before any data is read."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherelm.batches.sampler import BATCHINGS
from wherelm.data.sources import DataConfig
from wherelm.model.decoder import ModelConfig
from wherelm.optim.optimizer import OPTIMIZERS, OptimizerConfig
from wherelm.optim.schedules import SCHEDULES, Schedule
from wherelm.runtime import DEVICES, PRECISIONS
from wherelm.schemes import SCHEMES
from wherelm.schemes.base import PositionScheme
from wherelm.tokenizer.training import TokenizerConfig

LENGTHS = ("steps", "epochs", "tokens")  # of training: one of them is given
NAME = re.compile(r"(?!\.{1,2}$)[^/\\]+")


@dataclass(frozen=True)
class TrainingConfig:
    """How long, in which portions and on what; one of steps, epochs and tokens is the length.

    `random_offset` lets the positions of an example begin anywhere within the context, `compile`
    makes one graph of the decoder, `profile` writes where the time went.
    """

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    batch_tokens: int = 4096
    micro_tokens: int | None = None
    batching: str = "bucketed"
    random_offset: bool = False
    clip: float | None = 1.0
    precision: str = "auto"
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    profile: bool = False
    show_batch: bool = False

    def __post_init__(self):
        lengths = {key: getattr(self, key) for key in LENGTHS}
        given = {key: value for key, value in lengths.items() if value is not None}
        if len(given) != 1:
            shown = ", ".join(f"training.{key}={given.get(key, 'null')}" for key in lengths)
            raise ValueError(f"{shown}: expected exactly one of them (set the others to null)")
        positive = ("batch_tokens", "micro_tokens", "threads", "clip", *given)
        _expect_positive("training", self, positive)
        _expect_option("training.batching", self.batching, BATCHINGS)
        _expect_option("training.precision", self.precision, PRECISIONS)
        _expect_option("training.device", self.device, DEVICES)
        if self.compile and self.batching != "packed":
            raise ValueError(
                f"training.compile=true training.batching={self.batching}: a graph serves one "
                "shape; give training.batching=packed, whose rows all have it"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation `every` so many steps, and at the end `splits` (null: all that the data has).

    `extrapolation` measures at the end beyond the trained length too.
    """

    every: int = 100
    splits: tuple[str, ...] | None = None
    batch_tokens: int = 8192
    extrapolation: bool = False

    def __post_init__(self):
        _expect_positive("evaluation", self, ("every", "batch_tokens"))


@dataclass(frozen=True)
class TrackingConfig:
    """`name` is none or wandb; metrics.jsonl is always written."""

    name: str = "none"
    project: str = "wherelm"
    mode: str = "online"

    def __post_init__(self):
        _expect_option("tracking.name", self.name, ("none", "wandb"))
        _expect_option("tracking.mode", self.mode, ("online", "offline"))


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    name: str
    seed: int
    model: ModelConfig
    position: PositionScheme.Config
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: Schedule
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig

    def __post_init__(self):
        if self.training.batch_tokens < self.model.context:
            raise ValueError(
                f"training.batch_tokens={self.training.batch_tokens}: expected at least "
                f"model.context={self.model.context}, so that the longest example fits into a batch"
            )
        if self.evaluation.splits == ():
            raise ValueError("evaluation.splits=[]: expected at least one, or null for all")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name}: expected the name of a folder, without / in it")
        for split in self.evaluation.splits or ():
            _expect_option("evaluation.splits", split, ["train", *self.held_out])

    @property
    def held_out(self) -> tuple[str, ...]:
        """The splits that the data has beside train."""
        return ("validation", *(["test"] if self.data.test else []), *self.data.extra)

    @property
    def final_splits(self) -> tuple[str, ...]:
        """The splits that are measured at the end."""
        return self.held_out if self.evaluation.splits is None else self.evaluation.splits


def _expect_option(key: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ValueError(f"{key}={value}: expected {_one_of(options)}{_closest(value, options)}")


def _expect_positive(group: str, config: Any, keys: Sequence[str]) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{group}.{key}={value}: expected a number above 0")


def _one_of(options: Sequence[str]) -> str:
    return f"one of {', '.join(options)}"


def _closest(word: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(word), options, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """The typed form of a plain nested mapping; ValueError names the key that is wrong."""
    return typed(RunConfig, values, "")


def typed(kind: type, values: Any, path: str) -> Any:
    """A dataclass from a mapping: no unknown key, no missing key, every value of its type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}={values!r}: expected a group of keys")
    prefix = f"{path}." if path else ""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise ValueError(unknown_key(f"{prefix}{key}", names))
    given = {}
    for field in dataclasses.fields(kind):
        key = prefix + field.name
        if field.name in values:
            given[field.name] = _convert(hints[field.name], values[field.name], key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{key}: missing; give it a value with {key}=…")
    return kind(**given)


# What other projects call our keys.
ALIASES = {
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "batch_size": "training.batch_tokens",
    "max_steps": "training.steps",
    "iterations": "training.steps",
    "num_epochs": "training.epochs",
    "block_size": "model.context",
    "context_length": "model.context",
    "max_length": "model.context",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "num_heads": "model.heads",
    "n_head": "model.heads",
    "d_model": "model.width",
    "hidden_size": "model.width",
}


def unknown_key(key: str, accepted: Sequence[str]) -> str:
    """The one line that answers a key that does not exist."""
    *groups, last = key.split(".")
    if not accepted:
        return f"{key}: no such key, for {'.'.join(groups)} is a value and has none"
    near = difflib.get_close_matches(last, accepted, n=1)
    elsewhere = [place for place in places(last) if place != key]
    meant = elsewhere or [".".join([*groups, word]) for word in near]
    guess = f"; did you mean {' or '.join(meant)}?" if meant else ""
    where = ".".join(groups) or "the configuration"
    return f"{key}: no such key{guess} (keys of {where}: {', '.join(accepted)})"


def places(word: str) -> list[str]:
    """The full names of the keys that are called so in any group, or by other projects.

    None for `name`, which group=option chooses.
    """
    if word in ALIASES or word == "name":
        return [ALIASES[word]] if word in ALIASES else []
    found = []
    for group, hint in typing.get_type_hints(RunConfig).items():
        kinds = (_kinds(hint) or {group: hint}).values()
        if any(word in typing.get_type_hints(kind) for kind in kinds):
            found.append(f"{group}.{word}")
    return found


def _kinds(hint: Any) -> dict[str, type] | None:
    """Groups of several kinds, which their `name` tells apart."""
    if hint is PositionScheme.Config:
        return {name: scheme.Config for name, scheme in SCHEMES.items()}
    if hint is OptimizerConfig:
        return {name: config for name, (config, _) in OPTIMIZERS.items()}
    return SCHEDULES if hint is Schedule else None


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert(hint: Any, value: Any, key: str) -> Any:
    kinds = _kinds(hint)
    if kinds is not None and isinstance(value, Mapping):
        _expect_option(f"{key}.name", value.get("name"), list(kinds))
        hint = kinds[value["name"]]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return typed(hint, value, key)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in arguments if a is not type(None)]
        if value is None and len(options) < len(arguments):
            return None
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        fitting = [a for a in options if (typing.get_origin(a) is tuple) == listed]
        return _convert((fitting or options)[0], value, key)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{key}={value!r}: expected a list such as {key}=[a,b]")
        return tuple(_convert(arguments[0], v, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise ValueError(f"{key}={value!r}: expected a mapping such as {key}={{name: value}}")
        return {str(k): _convert(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        shown = "null" if value is None else repr(value) if isinstance(value, str) else value
        raise ValueError(f"{key}={shown}: expected {WORDS[hint]}")
    return value


def plain(config: Any) -> dict[str, Any]:
    """The plain nested mapping of a configuration: what is saved, and what `run_config` reads."""
    return _listed(dataclasses.asdict(config))


def _listed(value: Any) -> Any:
    """Tuples as lists, all the way down: YAML knows no tuples."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def save_yaml(values: Mapping[str, Any], path: Path) -> None:
    from omegaconf import OmegaConf

    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(values))), encoding="utf-8")


def load_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{path}: damaged (expected keys and values)")
    return values


def with_overrides(values: Mapping[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """The mapping with `key=value` pairs applied; ValueError for a key that it does not have."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    config = OmegaConf.create(dict(values))
    for pair in pairs:
        key, equals, _ = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"{pair}: expected key=value")
        parent, _, last = key.rpartition(".")
        group = OmegaConf.select(config, parent) if parent else config
        if not OmegaConf.is_dict(group) or last not in group:
            accepted = list(group) if OmegaConf.is_dict(group) else list(config)
            raise ValueError(unknown_key(key, accepted))
        try:
            change = OmegaConf.from_dotlist([pair])
            if OmegaConf.select(change, key) == {}:  # merging would leave what is there
                OmegaConf.update(config, key, {}, merge=False)
            config = OmegaConf.merge(config, change)
            values = OmegaConf.to_container(config, resolve=True)
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(
                f"{pair}: cannot be read; expected a value such as 3, a, [a,b] or {{name: value}}"
            ) from error
    return dict(values)


def project_root() -> Path:
    """The checkout that holds configs/ and data/, else the working directory."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "configs").is_dir() else Path.cwd()
