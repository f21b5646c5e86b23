"""What a run says and writes before its first step."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import torch

from wherelm import pipeline
from wherelm.batches.ledger import cut_warning, full_ledger, ledger_table
from wherelm.batches.sampler import Sampler
from wherelm.config import RunConfig, plain, save_yaml
from wherelm.model.decoder import Decoder
from wherelm.run_folder import (
    CONFIG,
    ENVIRONMENT,
    LEDGER,
    SUMMARY,
    TOKENIZER,
    write_json,
)
from wherelm.schemes.base import PositionScheme
from wherelm.training.steps import micro_shape

log = logging.getLogger(__name__)


def idle_settings(config: RunConfig, scheme: PositionScheme) -> list[str]:
    """Settings that cannot act on this run, a line each."""
    lines = scheme.warnings()
    window, context = config.model.window, config.model.context
    if window is not None and window >= context:
        lines.append(
            f"model.window={window} hides nothing in training: no message is longer than "
            f"model.context={context}"
        )
    if config.training.random_offset and scheme.shift_invariant:
        lines.append(
            f"training.random_offset=true changes nothing: position={config.position.name} reads "
            "the same wherever positions begin"
        )
    return lines


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
    ledger = full_ledger(data.ledger, data.stores, sampler, *micro_shape(config))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # of an end that is none any more
    save_yaml(plain(config), folder / CONFIG)
    data.tokenizer.save(folder / TOKENIZER)
    write_json(folder / LEDGER, ledger)
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "device": str(device),
        "precision": precision,
        "threads": torch.get_num_threads(),
    }
    write_json(folder / ENVIRONMENT, environment)
    for line in idle_settings(config, model.scheme):
        log.warning("warning: %s", line)
    log.info("%s\n", ledger_table(ledger))
    cut = cut_warning(
        ledger, config.model.context, config.data.overflow, config.training.batch_tokens
    )
    if cut is not None:
        log.warning("warning: %s\n", cut)
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
