"""Where the time of a run goes: a table of its parts, and a trace of a few steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherelm.batches.batch import Batch
from wherelm.model.decoder import Decoder
from wherelm.run_folder import PROFILE, TRACE

TRACED = range(3, 6)  # the steps that the trace shows; the table begins behind them
PARTS = ("data", "forward", "attention", "head", "backward", "optimizer", "evaluation", "saving")
OTHER = "other"


class Profile:
    """Adds up the time from mark to mark under the part that ends there; idle unless it is `on`.

    `forward` is what attention and head leave of it. The head's gradient is made together with the
    loss and counts as `head`; a compiled graph is one piece, and its attention counts as `forward`.
    On CUDA every mark waits for the device. TRACE opens in Perfetto or chrome://tracing.
    """

    def __init__(self, on: bool, model: Decoder, folder: Path):
        self.on, self.folder, self.device = on, folder, model.embedding.weight.device
        self.seconds = dict.fromkeys((*PARTS, OTHER), 0.0)
        self.steps = 0
        self.last = time.perf_counter()
        self.tracer: Any = None
        if on:
            self._look_inside(model)

    def _look_inside(self, model: Decoder) -> None:
        def marks(part: str) -> Any:
            return lambda module, *_: self.mark(part) if module.training else None

        if model.compiled is None:
            for block in model.blocks:
                block.attention.register_forward_pre_hook(marks("forward"))
                block.attention.register_forward_hook(marks("attention"))
        read, mark = model.read, marks("forward")

        def read_and_mark(batch: Batch, first: int = 0) -> Tensor:
            x_BTD = read(batch, first)
            mark(model)
            return x_BTD

        model.read = read_and_mark

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to this part."""
        if not self.on:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.steps >= TRACED[-1]:
            self.seconds[part] += now - self.last
        self.last = now

    def step(self) -> None:
        """A step has ended."""
        if not self.on:
            return
        self.mark(OTHER)
        self.steps += 1
        if self.steps == TRACED[0] - 1:
            self.tracer = torch.profiler.profile()
            self.tracer.start()
        elif self.steps == TRACED[-1]:
            self.tracer.stop()
            self.tracer.export_chrome_trace(str(self.folder / TRACE))
            self.tracer = None
            self.last = time.perf_counter()

    def close(self) -> str:
        """Writes the table and returns it."""
        if self.tracer is not None:
            self.tracer.stop()
        steps = max(self.steps - TRACED[-1], 0)
        total = sum(self.seconds.values())
        lines = [f"{f'{steps} steps':12}{'seconds':>10}{'share':>8}{'ms a step':>12}"]
        if not steps:
            lines = [f"no step behind the first {TRACED[-1]}, so nothing to add up"]
        for part, seconds in self.seconds.items() if steps else ():
            each = 1000 * seconds / steps
            lines.append(f"{part:12}{seconds:10.2f}{seconds / total:8.1%}{each:12.2f}")
        text = "\n".join(lines)
        (self.folder / PROFILE).write_text(text + "\n", encoding="utf-8")
        return text
