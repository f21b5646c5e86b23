"""A checkpoint is one self-contained folder: safetensors, JSON and YAML."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wherelm.config import RunConfig, load_yaml, plain, run_config, save_yaml, with_overrides
from wherelm.model.decoder import Decoder
from wherelm.run_folder import (
    CHECKPOINTS,
    CONFIG,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    WEIGHTS,
    checkpoints,
    write_json,
)
from wherelm.schemes import build_scheme
from wherelm.tokenizer.tokenizer import Tokenizer

REREAD = ("data", "evaluation", "position", "model")  # groups that matter to trained weights
# Where torch's parallel and compiled models hold the model that they wrap.
WRAPPERS = ("module", "_orig_mod")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: the model on the CPU in evaluation mode."""

    model: Decoder
    tokenizer: Tokenizer
    config: RunConfig
    state: dict[str, Any]


def build_model(config: RunConfig, vocab_size: int, trained: int | None = None) -> Decoder:
    """The decoder of a configuration, its parameters not yet initialised.

    `trained` is how many tokens the longest row of training holds; None, as in checkpoints that do
    not say it: as many as model.context.
    """
    shape = config.model.shape
    if trained:
        positions = shape.positions if config.training.random_offset else trained
        shape = replace(shape, trained=trained, positions=positions)
    scheme = build_scheme(config.position, shape)
    return Decoder(config.model, scheme, vocab_size)


def save(
    folder: Path,
    model: Decoder,
    tokenizer: Tokenizer,
    config: RunConfig,
    state: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the folder beside its place and renames it: it is there whole or not at all.

    OSError, which names it, where that fails, as on a full disk; other checkpoints stay as they
    were.
    """
    part = folder.with_name(f".{folder.name}.part")
    # Parameters are listed once each, so a tied head, which safetensors refuses, is left out.
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(weights, part / WEIGHTS)
        if optimizer is not None:
            tensors = {name: t.cpu().contiguous() for name, t in optimizer.items()}
            save_file(tensors, part / OPTIMIZER)
        tokenizer.save(part / TOKENIZER)
        save_yaml(plain(config), part / CONFIG)
        write_json(part / STATE, state)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        cause = getattr(error, "strerror", None) or error
        why = f"cannot be saved ({cause}); the checkpoints before it are whole"
        raise OSError(getattr(error, "errno", None) or errno.EIO, why, str(folder)) from error


def load(folder: Path) -> Loaded:
    """A saved checkpoint; ValueError where a file is missing or does not fit the others."""
    folder = Path(folder)
    for name in (WEIGHTS, STATE, CONFIG, TOKENIZER):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: no checkpoint, for {name} is missing in it")
    config = run_config(load_yaml(folder / CONFIG))
    tokenizer = load_tokenizer(folder)
    state = load_state(folder)
    model = build_model(config, tokenizer.vocab_size, state.get("trained_length"))
    load_weights(model, folder)
    model.scheme.progress(state["share"])
    return Loaded(model.eval(), tokenizer, config, state)


def reread(loaded: Loaded, pairs: Sequence[str]) -> Loaded:
    """The same weights under `key=value` overrides, such as a rotary extension, at no training.

    Of the model its window may change, and `model.context` cuts the data alone: to the scheme the
    trained length stays what it was. ValueError for what the weights were not made for, and for
    what changes nothing when they are read.
    """
    before = plain(loaded.config)
    values = with_overrides(before, pairs)
    name, position = before["position"]["name"], values["position"]
    if not isinstance(position, Mapping) or position.get("name") != name:
        other = position["name"] if isinstance(position, Mapping) else position
        raise ValueError(
            f"position={other}: the checkpoint was trained with {name}; expected settings of that, "
            "position.KEY=VALUE"
        )
    config = run_config(values)
    for pair in pairs:
        key = pair.partition("=")[0]
        if key.partition(".")[0] not in REREAD and key not in ("seed", "training.precision"):
            raise ValueError(
                f"{pair}: changes nothing for weights that are trained; expected keys of "
                f"{', '.join(REREAD)}, or training.precision, or seed"
            )
    for key, value in before["model"].items():
        if values["model"][key] != value and key not in ("context", "window"):
            raise ValueError(
                f"model.{key}={values['model'][key]}: the checkpoint was trained with {value}; "
                "expected another context or window, or nothing of the model"
            )
    shape = replace(config.model, context=loaded.config.model.context)
    trained = loaded.state.get("trained_length")
    model = build_model(replace(config, model=shape), loaded.tokenizer.vocab_size, trained)
    fix = "expected settings that add no parameters"
    _fill(model, dict(loaded.model.named_parameters()), f"position={name}", fix)
    model.scheme.progress(loaded.state["share"])
    return replace(loaded, model=model.eval(), config=config)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / TOKENIZER)


def load_weights(model: Decoder, folder: Path) -> None:
    place = folder / WEIGHTS
    weights = _unwrapped(_tensors(place))
    if wrapped := [name for name in weights if set(name.split(".")) & set(WRAPPERS)]:
        raise ValueError(
            f"{place}: {wrapped[0]} was saved from a model inside another; save the state_dict of "
            "the inner one (its .module, or ._orig_mod)"
        )
    _fill(model, weights, str(place), "take both from one checkpoint")


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what torch's parallel and compiled models put before the name of every weight."""
    for prefix in WRAPPERS:
        if weights and all(name.startswith(f"{prefix}.") for name in weights):
            return _unwrapped({name.removeprefix(f"{prefix}."): t for name, t in weights.items()})
    return weights


def _fill(model: Decoder, weights: Mapping[str, Tensor], place: str, fix: str) -> None:
    """Copies the weights into the model; ValueError, with the fix, where names or shapes differ."""
    parameters = dict(model.named_parameters())
    expected = {name: tuple(p.shape) for name, p in parameters.items()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()))[0][0]
        raise ValueError(
            f"{place}: {wrong} is {found.get(wrong, 'missing')} in the checkpoint and "
            f"{expected.get(wrong, 'absent')} by its configuration: {fix}"
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def load_optimizer(folder: Path) -> dict[str, Tensor]:
    if not (folder / OPTIMIZER).is_file():
        raise ValueError(
            f"{folder}: holds weights alone, without {OPTIMIZER}, and cannot be resumed"
        )
    return _tensors(folder / OPTIMIZER)


def _tensors(place: Path) -> dict[str, Tensor]:
    try:
        return load_file(place)
    except SafetensorError as error:
        raise ValueError(f"{place}: damaged ({error}); take another copy") from error


def load_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / STATE}: not valid JSON ({error})") from error
    if not isinstance(state, dict) or not {"step", "share", "validation_loss"} <= state.keys():
        raise ValueError(f"{folder / STATE}: damaged (expected step, share, validation_loss, …)")
    return state


def best(run: Path) -> Path:
    """The checkpoint with the lowest validation loss; ValueError where the run has none."""
    found = checkpoints(run)
    if not found:
        raise ValueError(f"{run}: this run has no checkpoint yet")
    return min(found, key=lambda path: load_state(path)["validation_loss"])


def last(run: Path) -> Path:
    """The newest checkpoint; ValueError where the run has none."""
    found = checkpoints(run)
    if not found:
        raise ValueError(f"{run}: this run has no checkpoint yet, so there is nothing to resume")
    return found[-1]


def keep_best_and_last(run: Path) -> None:
    found = checkpoints(run)
    for path in set(found) - {best(run), last(run)}:
        shutil.rmtree(path)


def find(path: str | Path | None, root: Path) -> Path:
    """The checkpoint that `path` means: a checkpoint, or a run's best; ValueError names the fix.

    Without a path: the best of the newest run below `root`/runs, else the one that is shipped.
    """
    if path is not None:
        path = Path(os.path.expanduser(path))
        if (path / WEIGHTS).is_file():
            return path
        if (path / CHECKPOINTS).is_dir():
            return best(path)
        what = "holds no checkpoint" if path.exists() else "does not exist"
        raise ValueError(
            f"{path}: {what}; give a run folder such as runs/NAME/TIME, or a checkpoint"
        )
    runs = {found.parents[1] for found in (root / "runs").glob(f"*/*/{CHECKPOINTS}/step-*")}
    for run in sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True):
        if checkpoints(run):
            return best(run)
    shipped = root / "data" / "pretrained" / "errands"
    if (shipped / WEIGHTS).is_file():
        return shipped
    raise ValueError("no run and no shipped checkpoint here: train one first with python train.py")
