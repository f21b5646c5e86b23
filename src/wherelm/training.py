"""One run, from files to a trained decoder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from wherelm import breakdowns, checkpoint, extrapolation, pipeline, runtime
from wherelm.batch_view import batch_text
from wherelm.batches import Batch, Rows, Sampler, TokenStore, collate, examples_of
from wherelm.config import RunConfig, plain, save_yaml
from wherelm.evaluate import Scores, measures, score, table
from wherelm.generate import write_samples
from wherelm.model import Decoder, initialize, next_token_loss
from wherelm.optim import Optimizer
from wherelm.profiling import OTHER, TABLE, Profile
from wherelm.seeds import named_seed
from wherelm.tracking import METRICS, Tracker, draw_curve

log = logging.getLogger(__name__)

SUMMARY = "summary.json"


@dataclass
class State:
    """Where a run stands; beside weights and optimiser all that resuming needs.

    `positions` counts the targets that were learned at each position. `turns` is False where all
    that train holds is plain text, so that a prompt can only be continued. `digests` tell what
    each split holds.
    """

    step: int = 0
    targets: int = 0
    seconds: float = 0.0
    epoch: int = 0
    position: int = 0
    batches_hash: str = ""
    share: float = 0.0
    validation_loss: float = math.inf
    positions: list[int] = field(default_factory=list)
    turns: bool = True
    digests: dict[str, str] = field(default_factory=dict)


def fit(config: RunConfig, folder: Path, root: Path, resume: bool = False) -> dict[str, Any]:
    """Trains into the run folder and returns what is written to its summary.json."""
    started = time.perf_counter()
    check_folder(folder, resume)
    runtime.keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    device = runtime.choose_device(config.training.device)
    precision = runtime.choose_precision(config.training.precision, device)
    autocast = runtime.autocast(precision, device)
    runtime.reset_peak_memory(device)
    if config.training.compile:
        runtime.expect_compiler(device)
    last = checkpoint.last(folder) if resume else None
    state = State(**checkpoint.load_state(last)) if last else State()

    splits = ("train", "validation", *config.final_splits)
    tokenizer = checkpoint.load_tokenizer(last) if last else None
    data = pipeline.prepare(config, root, splits, tokenizer)
    expect_same_data(state, data)
    model = checkpoint.build_model(config, data.tokenizer.vocab_size)
    initialize(model, config.seed)
    if last:
        checkpoint.load_weights(model, last)
    model.to(device).train()
    if config.training.compile:
        model.compile_training()
    optimizer = Optimizer(model, config.optimizer, config.schedule)
    if last:
        optimizer.load_state(checkpoint.load_optimizer(last))
    store = data.stores["train"]
    state.turns = bool((store.ids == data.tokenizer.assistant).any())
    sampler = Sampler(
        store.lengths,
        config.training.batch_tokens,
        config.training.batching,
        config.seed,
        state.epoch,
        state.position,
        capacity=config.model.context,
    )
    describe(config, folder, data, model, sampler, device, precision)

    share = share_done(config, state.step, state.targets, sampler)
    model.scheme.progress(share)
    before, scores = state.seconds, None
    tracker = Tracker(folder, config, state.step if last else None)
    profile = Profile(config.training.profile, model, folder)
    with logging_redirect_tqdm(), runtime.stop_on_signals() as stop:
        # A run that ended in its final measurement has no step left to make.
        for rows in sampler if share < 1 else ():
            step_started = time.perf_counter()
            micro_batches = collated(data, config, sampler, rows)
            targets = sum(batch.targets for batch in micro_batches)
            profile.mark("data")
            done = share_done(config, state.step + 1, state.targets + targets, sampler)
            loss = accumulate(model, micro_batches, config, state.step, autocast, profile.mark)
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {state.step + 1}: lower optimizer.learning_rate, "
                    "or lengthen schedule.warmup"
                )
            norm = optimizer.step((share + done) / 2, config.training.clip)
            profile.mark("optimizer")
            share = state.share = done
            model.scheme.progress(share)
            state.step, state.targets = state.step + 1, state.targets + targets
            state.epoch, state.position = sampler.epoch, sampler.position
            state.batches_hash = chained_hash(state.batches_hash, rows, store)
            state.positions = counted(state.positions, micro_batches, model)
            state.seconds = before + time.perf_counter() - started
            step_seconds = time.perf_counter() - step_started
            rate = targets / step_seconds
            tokens = sum(int(batch.key_mask_BT.sum()) for batch in micro_batches)
            tracker.write(
                step=state.step,
                loss=loss,
                learning_rate=optimizer.learning_rate,
                gradient_norm=norm,
                targets=state.targets,
                targets_per_second=round(rate, 1),
                tokens_per_second=round(tokens / step_seconds, 1),
                seconds=round(state.seconds, 3),
            )
            line = f"step {state.step} loss {loss:.3f} lr {optimizer.learning_rate:.1e}"
            tracker.progress(min(share, 1.0), f"{line} {rate:,.0f} targets/s")
            if state.step == 1 and config.training.show_batch:
                log.info("%s", batch_text(micro_batches[0], data.tokenizer))
            if state.step == 1:
                log.info("first step after %.1f s; attention: %s", state.seconds, model.mask_path)
                if config.training.compile:
                    log.info("of them %.1f s to compile and to make this step", step_seconds)
            ended = share >= 1 or bool(stop)
            if ended or state.step % config.evaluation.every == 0:
                profile.mark(OTHER)
                scores = watch(model, data, config, state, tracker, autocast)
                profile.mark("evaluation")
                save(folder, model, data, config, state, optimizer)
                profile.mark("saving")
            profile.step()
            if ended:
                break
        if config.training.profile and scores is not None:
            log.info("\n%s\ntable and trace: %s", profile.close(), folder / TABLE)
        if share < 1:
            tracker.close()
            return summarize(folder, state, "interrupted", stop.exit_code)

        found = measure(model, data, config, state, scores, root, folder, autocast)
        for split, figures in found["splits"].items():
            line = {**figures, "targets": state.targets}
            tracker.write(step=state.step, split=split, final=True, **line)
        watched = data.stores["validation"]
        (folder / "samples.txt").write_text(write_samples(model, data.tokenizer, watched), "utf-8")
        tracker.close()
        draw_curve(folder)
        state.seconds = before + time.perf_counter() - started
        found |= costs(model, folder)
        return summarize(folder, state, "complete", stop.exit_code, **found)


def check_folder(folder: Path, resume: bool) -> None:
    """ValueError where a run would be written over, or has nothing left to do."""
    if not resume and (folder / METRICS).exists():
        raise ValueError(
            f"{folder}: holds a run already; go on with resume={folder}, or give another folder"
        )
    if resume and (folder / SUMMARY).exists():
        try:
            summary = json.loads((folder / SUMMARY).read_text())
        except ValueError as error:
            raise ValueError(f"{folder / SUMMARY}: damaged ({error}); delete it") from error
        if summary.get("status") == "complete":
            raise ValueError(f"{folder}: this run is complete, with {summary['step']} steps")


def expect_same_data(state: State, data: pipeline.Data) -> None:
    """Notes the digests of the splits; ValueError where a run that goes on had others."""
    digests = {split: store.digest for split, store in data.stores.items()}
    for split, digest in digests.items():
        if state.digests.get(split, digest) != digest:
            raise ValueError(
                f"the split {split} has changed since this run was stopped: restore its data, or "
                "begin a new run"
            )
    state.digests = digests


def share_done(config: RunConfig, step: int, targets: int, sampler: Sampler) -> float:
    """The share of training done after this many steps, supervised tokens or epochs."""
    length = config.training
    if length.steps is not None:
        return step / length.steps
    if length.tokens is not None:
        return targets / length.tokens
    return sampler.epochs_done / length.epochs


def micro_shape(config: RunConfig) -> tuple[int, tuple[int, int] | None]:
    """The most slots of a micro-batch; for a compiled graph also the shape of all: rows, slots."""
    budget = config.training.micro_tokens or config.training.batch_tokens
    context = config.model.context
    return budget, (max(1, budget // context), context) if config.training.compile else None


def collated(data: pipeline.Data, config: RunConfig, sampler: Sampler, rows: Rows) -> list[Batch]:
    """The micro-batches of one step; for a compiled graph all of one shape."""
    budget, shape = micro_shape(config)
    room = config.model.context if config.training.random_offset else 0
    key = named_seed(config.seed, "positions", sampler.epoch)
    return [
        collate(data.stores["train"], part, data.tokenizer.pad, key=key, shape=shape, room=room)
        for part in sampler.micro_batches(rows, budget)
    ]


def accumulate(
    model: Decoder,
    micro_batches: list[Batch],
    config: RunConfig,
    step: int,
    autocast: Any,
    mark: Callable[[str], None] = lambda part: None,
) -> float:
    """Adds the gradient of the batch's mean loss, micro-batch after micro-batch; returns the loss.

    Each micro-batch gives a sum, divided by the number of targets in the whole batch, so that the
    gradient does not depend on how the batch was cut. `mark` is told what has just been done.
    """
    device = model.embedding.weight.device
    targets = sum(batch.targets for batch in micro_batches)
    total = torch.zeros((), device=device)
    for number, batch in enumerate(micro_batches):
        if config.model.dropout:
            # Torch's dropout takes no generator: reseeding leaves nothing to save and restore.
            torch.manual_seed(named_seed(config.seed, "dropout", step, number))
        with autocast:
            loss = next_token_loss(model, batch.to(device))
        mark("head")
        (loss / targets).backward()
        mark("backward")
        total += loss.detach()
    return float(total) / targets


def counted(former: list[int], micro_batches: list[Batch], model: Decoder) -> list[int]:
    """The targets learned so far at each position, as the scheme numbers them, from 0."""
    places = [
        model.scheme.place(batch.positions_BT, batch.keys_BT, 0)
        .expand_as(batch.loss_mask_BT)[batch.loss_mask_BT]
        .long()
        for batch in micro_batches
    ]
    counts_P = np.bincount(torch.cat(places).numpy(), minlength=len(former))
    counts_P[: len(former)] += np.array(former, dtype=np.int64)
    return counts_P.tolist()


def watch(
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    tracker: Tracker,
    autocast: Any,
) -> Scores:
    """Measures the whole validation split, says so, and returns its scores."""
    store, budget = data.stores["validation"], config.evaluation.batch_tokens
    scores = score(model, store, data.tokenizer.pad, budget, autocast)
    figures = measures(scores, store, data.tokenizer)
    state.validation_loss = figures["loss"]
    tracker.write(step=state.step, split="validation", **{**figures, "targets": state.targets})
    exact = f", exact match {figures['exact_match']:.1%}" if "exact_match" in figures else ""
    log.info(
        "step %d: validation loss %.4f, %.4f bits a byte%s, %.0f s",
        state.step,
        figures["loss"],
        figures["bits_per_byte"],
        exact,
        state.seconds,
    )
    return scores


def measure(
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    watched: Scores | None,
    root: Path,
    folder: Path,
    autocast: Any,
) -> dict[str, Any]:
    """The final figures of every split, and beyond the trained context where that is asked for.

    Breakdowns and the scores of every example are written into the run folder, and beside the
    breakdowns, as `learned` of `train`, how often each position was learned. `watched` are the
    scores of validation by these weights, if there are any yet.
    """
    budget = config.evaluation.batch_tokens
    figures, parts = {}, {"train": {"learned": breakdowns.histogram(state.positions)}}
    for split in config.final_splits:
        store = data.stores[split]
        scores = watched if split == "validation" else None
        if scores is None:
            scores = score(model, store, data.tokenizer.pad, budget, autocast)
        figures[split] = measures(scores, store, data.tokenizer)
        own = breakdowns.breakdowns(scores, store, data.tokenizer)
        parts[split] = parts.get(split, {}) | own
        breakdowns.save_examples(folder, split, scores, store, data.tokenizer)
    place = folder / breakdowns.FILE
    place.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    log.info("\n%s\nby position, length, turn and group: %s", table(figures), place)
    if not config.evaluation.extrapolation:
        return {"splits": figures}
    beyond = extrapolation.beyond_context(model, data.tokenizer, config, root, autocast)
    log.info("\n%s", extrapolation.table(beyond))
    return {"splits": figures, "extrapolation": beyond}


def costs(model: Decoder, folder: Path) -> dict[str, Any]:
    """Parameters, those that the scheme adds, peak memory, and the median speed of training."""
    lines = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "scheme_parameters": sum(p.numel() for p in model.scheme.parameters()),
        "tokens_per_second": statistics.median(speeds),
        "peak_memory_mb": runtime.peak_memory_mb(model.embedding.weight.device),
    }


def save(
    folder: Path,
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    optimizer: Optimizer,
) -> None:
    place = folder / "checkpoints" / f"step-{state.step:08d}"
    checkpoint.save(place, model, data.tokenizer, config, asdict(state), optimizer.state())
    checkpoint.keep_best_and_last(folder)


def chained_hash(former: str, rows: Rows, store: TokenStore) -> str:
    """A hash over all batches so far: equal hashes mean equal batches in equal order.

    Of what their examples hold, so that other data or another tokeniser is another hash.
    """
    digest = hashlib.sha256(former.encode())
    for index in examples_of(rows):
        for part in store[index]:
            digest.update(part.tobytes())
    return digest.hexdigest()


def describe(
    config: RunConfig,
    folder: Path,
    data: pipeline.Data,
    model: Decoder,
    sampler: Sampler,
    device: torch.device,
    precision: str,
) -> None:
    """Writes config, tokeniser, ledger and environment, and logs what will be trained on what."""
    ledger = pipeline.full_ledger(data, sampler, *micro_shape(config))
    folder.mkdir(parents=True, exist_ok=True)
    save_yaml(plain(config), folder / "config.yaml")
    data.tokenizer.save(folder / "tokenizer.json")
    (folder / "ledger.json").write_text(json.dumps(ledger, indent=1) + "\n")
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "device": str(device),
        "precision": precision,
        "threads": torch.get_num_threads(),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    for line in model.scheme.warnings():
        log.warning("warning: %s", line)
    log.info("%s\n", pipeline.ledger_table(ledger))
    count = sum(p.numel() for p in model.parameters())
    log.info(
        "%s: %s parameters, position=%s, %s, %s, %d threads; run folder %s",
        config.name,
        f"{count:,}",
        config.position.name,
        device,
        precision,
        torch.get_num_threads(),
        folder,
    )


def summarize(
    folder: Path, state: State, status: str, exit_code: int, **more: Any
) -> dict[str, Any]:
    """What a program would read: written to summary.json and returned.

    `exit_code` is that of the signal that came, if one did: a run may have been complete by then.
    """
    summary = {"status": status, "exit_code": exit_code, **asdict(state), **more}
    del summary["positions"]  # long, and in the breakdowns
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    return summary
