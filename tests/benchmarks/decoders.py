"""What several benchmarks train and run: decoders in a shape of `configs/model`, and full rows."""

from __future__ import annotations

import numpy as np
import torch
import yaml

from tests.benchmarks.measure import ROOT
from wherelm.batches.batch import Batch, collate
from wherelm.batches.store import TokenStore
from wherelm.model.decoder import Decoder, ModelConfig, initialize
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.seeds import numpy_generator


def decoder(
    name: str, position: str, vocabulary: int, device: torch.device, shape: dict
) -> Decoder:
    """`configs/model/NAME.yaml` with the values of `shape`, initialised as a run's is."""
    values = yaml.safe_load((ROOT / "configs" / "model" / f"{name}.yaml").read_text())
    config = ModelConfig(**{**values, **shape})
    scheme = build_scheme(SCHEMES[position].Config(), config.shape)
    model = Decoder(config, scheme, vocabulary)
    initialize(model, 0)
    return model.to(device).train()


def full_rows(rows: int, context: int, vocabulary: int, device: torch.device) -> Batch:
    """Random tokens without padding, every target learned."""
    ids = numpy_generator(0, "full rows").integers(1, vocabulary, rows * (context + 1))
    offsets = np.arange(rows + 1) * (context + 1)
    store = TokenStore(ids, np.ones(len(ids), bool), offsets)
    return collate(store, range(rows), 0).to(device)
