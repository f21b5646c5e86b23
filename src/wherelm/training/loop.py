"""One run, from files to a trained decoder."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from wherelm import checkpoint, pipeline, runtime
from wherelm.batches.sampler import Sampler
from wherelm.batches.view import batch_text
from wherelm.config import RunConfig
from wherelm.model.decoder import Decoder, initialize
from wherelm.optim.optimizer import Optimizer
from wherelm.run_folder import PROFILE, SAMPLES, checkpoint_folder
from wherelm.sampling.samples import write_samples
from wherelm.training.description import describe
from wherelm.training.forecast import Forecast
from wherelm.training.measuring import costs, measure, summarize, watch
from wherelm.training.profiling import OTHER, Profile
from wherelm.training.resuming import check_new, resumed_from
from wherelm.training.steps import State, accumulate, chained_hash, collated, counted, share_done
from wherelm.training.tracking import Tracker, draw_curve

log = logging.getLogger(__name__)


def fit(config: RunConfig, folder: Path, root: Path, resume: bool = False) -> dict[str, Any]:
    """Trains into the run folder and returns what is written to its summary.json."""
    started = time.perf_counter()
    last = resumed_from(folder, config) if resume else check_new(folder)
    runtime.keep_freed_memory()
    torch.set_num_threads(runtime.choose_threads(config.training.threads))
    device = runtime.choose_device(config.training.device)
    precision = runtime.choose_precision(config.training.precision, device)
    autocast = runtime.autocast(precision, device)
    runtime.reset_peak_memory(device)
    if config.training.compile:
        runtime.expect_compiler(device)
    state = State(**checkpoint.load_state(last)) if last else State()

    splits = ("train", "validation", *config.final_splits)
    tokenizer = checkpoint.load_tokenizer(last) if last else None
    data = pipeline.prepare(config, root, splits, tokenizer)
    expect_same_data(state, data)
    store = data.stores["train"]
    if last is None:
        state.trained_length = len(store.trained_positions())
    model = checkpoint.build_model(config, data.tokenizer.vocab_size, state.trained_length)
    initialize(model, config.seed)
    if last:
        checkpoint.load_weights(model, last)
    model.to(device).train()
    if config.training.compile:
        model.compile_training()
    optimizer = Optimizer(model, config.optimizer, config.schedule)
    if last:
        optimizer.load_state(checkpoint.load_optimizer(last))
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
    forecast = Forecast(config, data, started, share)
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
            forecast.note(share, step_seconds, tokens)
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
            log.info("\n%s\ntable and trace: %s", profile.close(), folder / PROFILE)
        if share < 1:
            tracker.close()
            return summarize(folder, state, "interrupted", stop.exit_code)

        found = measure(model, data, config, state, scores, root, folder, autocast)
        for split, figures in found["splits"].items():
            line = {**figures, "targets": state.targets}
            tracker.write(step=state.step, split=split, final=True, **line)
        watched = data.stores["validation"]
        samples = write_samples(model, data.tokenizer, watched)
        (folder / SAMPLES).write_text(samples, encoding="utf-8")
        tracker.close()
        draw_curve(folder)
        state.seconds = before + time.perf_counter() - started
        found |= costs(model, folder)
        return summarize(folder, state, "complete", stop.exit_code, **found)


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


def save(
    folder: Path,
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    optimizer: Optimizer,
) -> None:
    place = checkpoint_folder(folder, state.step)
    checkpoint.save(place, model, data.tokenizer, config, asdict(state), optimizer.state())
    checkpoint.keep_best_and_last(folder)
