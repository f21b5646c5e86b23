"""The command that measures checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from wherelm.command_line import ArgumentParser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m wherelm.evaluate",
        description="Measures checkpoints on splits: loss, bits per byte, exact match of replies.",
        epilog="examples: python -m wherelm.evaluate runs/errands/… evaluation.splits=[test,longer]"
        "; … position.scaling=yarn position.factor=4 reads the same weights with another rotary "
        "extension; … model.context=512 reads texts up to that length, whatever was trained. What "
        "heads do: python -m wherelm.probes RUN.",
    )
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN | key=value",
        help="run or checkpoint folders (default: the newest run, else the shipped checkpoint), "
        "and overrides",
    )
    parser.add_argument(
        "--breakdowns",
        action="store_true",
        help="loss by position, length and turn as well, and exact match by group",
    )
    parser.add_argument(
        "--shuffled-prefix",
        action="store_true",
        help="the loss of replies when the tokens before each are shuffled",
    )
    parser.add_argument(
        "--extrapolation",
        action="store_true",
        help="the validation loss at 1 to 8 times the trained length, measured in three ways",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_intermixed_args(arguments)

    from wherelm import checkpoint, runtime
    from wherelm.config import project_root
    from wherelm.evaluation import everything

    root = project_root()
    pairs = [word for word in options.run if "=" in word and not Path(word).exists()]
    try:
        for path in [word for word in options.run if word not in pairs] or [None]:
            folder = checkpoint.find(path, root)
            trained = checkpoint.load(folder)
            loaded = checkpoint.reread(trained, pairs)
            for line in loaded.model.scheme.warnings():
                if line not in trained.model.scheme.warnings():
                    print(f"warning: {line}", file=sys.stderr)
            # As in the run's own final measurement.
            device = loaded.model.embedding.weight.device
            precision = runtime.choose_precision(loaded.config.training.precision, device)
            found = everything.measured(
                loaded,
                root,
                runtime.autocast(precision, device),
                breakdowns=options.breakdowns,
                shuffled_prefix=options.shuffled_prefix,
                extrapolation=options.extrapolation,
            )
            if options.json:
                line = {"checkpoint": str(path or folder), "precision": precision}
                print(json.dumps(line | found))
            else:
                print(f"{path or folder}, step {loaded.state['step']}, {precision}")
                print(everything.text(found))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
