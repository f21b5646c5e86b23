"""The command that draws a model's messages, or the lecture, as a page or as a PNG.

Torch is imported after the options are read, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wherelm.command_line import ArgumentParser
from wherelm.pages.page import write

EPILOG = """\
The page needs no network and no other file. It shows the tokens with their masks, segments and
positions; for the token under the pointer, its row of attention in each layer and head; mean
attention by distance; and the shape of the position scheme. Two messages stand side by side, each
with the model's own answer, which is read as well. --out FILE.png draws the same for papers.

Without a message the pair of the lecture is shown; without a RUN, the newest run's best checkpoint
below runs/, else data/pretrained/errands.

examples:
  python -m wherelm.visualize runs/errands/2026-01-31_12-00-00 "Send the report before the slides."
  python -m wherelm.visualize data/pretrained/errands --out pair.png
  python -m wherelm.visualize --lecture
"""


def argument_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m wherelm.visualize",
        description="Draws what a trained model does with one or two messages, or the lecture "
        '"Attention and Position" as a page whose numbers are computed by this project.',
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="run or checkpoint folder")
    parser.add_argument("messages", nargs="*", metavar="MESSAGE", help="one or two messages")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="FILE.html or FILE.png (default: visualize.html, or lecture.html with --lecture)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="read messages as plain text, not as conversations"
    )
    parser.add_argument("--lecture", action="store_true", help="write the lecture's page")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = argument_parser().parse_intermixed_args(arguments)
    if options.run is not None and not options.lecture and not is_path(options.run):
        options.run, options.messages = None, [options.run, *options.messages]
    try:
        path = check(options)
        content = lecture(options) if options.lecture else message_picture(options, path)
        write(path, content)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(path)
    return 0


def is_path(word: str) -> bool:
    """Whether this means a run and not a message: it exists, or it is one word."""
    return os.path.exists(word) or not any(map(str.isspace, word))


def check(options: argparse.Namespace) -> Path:
    """Where to write; ValueError for options that cannot stand together."""
    default = "lecture.html" if options.lecture else "visualize.html"
    path = Path(os.path.expanduser(options.out or default))
    endings = (".html",) if options.lecture else (".html", ".png")
    if path.suffix not in endings:
        expected = " or ".join(f"a name that ends in {ending}" for ending in endings)
        raise ValueError(f"--out {path}: expected {expected}")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: the folder {path.parent} does not exist")
    if options.lecture and (options.messages or options.raw):
        raise ValueError("--lecture takes no messages and no --raw: it shows its own sentences")
    if len(options.messages) > 2:
        raise ValueError(
            f"{len(options.messages)} messages: expected one or two (put each in quotes)"
        )
    if any(not message.strip() for message in options.messages):
        raise ValueError("an empty message: give it some text")
    return path


def lecture(options: argparse.Namespace) -> str:
    from wherelm.config import project_root
    from wherelm.pages.lecture.lecture_page import lecture_page

    return lecture_page(project_root(), options.run)


def message_picture(options: argparse.Namespace, path: Path) -> str | bytes:
    from wherelm import checkpoint
    from wherelm.config import project_root
    from wherelm.pages.message_page import message_page
    from wherelm.pages.views import PAIR, look

    folder = checkpoint.find(options.run, project_root())
    loaded = checkpoint.load(folder)
    raw = options.raw or loaded.config.data.format == "stream"
    views, batch = look(loaded, options.messages or PAIR, raw)
    if path.suffix == ".png":
        from wherelm.pages.figures import message_figure

        return message_figure(views, loaded)
    return message_page(views, batch, loaded, os.path.relpath(folder))


if __name__ == "__main__":
    sys.exit(main())
