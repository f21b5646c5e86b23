"""The command that measures what heads do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wherelm.command_line import ArgumentParser
from wherelm.run_folder import PROBES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m wherelm.probes",
        description="Measures what the heads of trained models do, and writes it as JSON: mean "
        "attention by distance, entropy and attention on the first token over held-out examples; "
        "previous-token and induction scores on repeated random tokens.",
        epilog="example: python -m wherelm.probes runs/errands/2026-01-31_12-00-00",
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="run or checkpoint folders")
    parser.add_argument(
        "--out", metavar="FILE", help=f"where to write (default: RUN/{PROBES}); for one RUN only"
    )
    options = parser.parse_args(arguments)
    if options.out and len(options.run) > 1:
        parser.error("--out takes the probes of one RUN; leave it out to write into each")
    try:
        for run in map(os.path.expanduser, options.run):
            path = Path(os.path.expanduser(options.out) if options.out else Path(run) / PROBES)
            _write(path, _measured(Path(run)))
            print(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measured(run: Path) -> dict[str, Any]:
    from wherelm import checkpoint, pipeline
    from wherelm.config import project_root
    from wherelm.evaluation.heads import held_out, measure

    loaded = checkpoint.load(checkpoint.find(run, project_root()))
    data = pipeline.prepare(loaded.config, project_root(), ["validation"], loaded.tokenizer)
    batch = held_out(data.stores["validation"], loaded.tokenizer.pad)
    return {"step": loaded.state["step"]} | measure(loaded.model, loaded.tokenizer, batch)


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    sys.exit(main())
