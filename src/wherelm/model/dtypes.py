"""The number types between and in matrix products."""

from __future__ import annotations

import torch


def for_products(x: torch.Tensor) -> torch.Tensor:
    """In the type that autocast multiplies in, if it is on: once for all products that read it."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def step_dtype(x: torch.Tensor) -> torch.dtype:
    """The type between the large products of one query: at least float32 on a CPU.

    torch's attention and small products take twice as long there in bfloat16.
    """
    on_cpu = x.device.type == "cpu"
    return torch.promote_types(x.dtype, torch.float32) if on_cpu else x.dtype
