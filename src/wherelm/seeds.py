"""Random streams that depend on (seed, purpose) alone, the same in every process."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch


def named_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose (Python's own hash differs between processes)."""
    digest = hashlib.sha256(":".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(named_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> numpy.random.Generator:
    import numpy

    return numpy.random.default_rng(named_seed(seed, *purpose))
