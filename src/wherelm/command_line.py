"""What the commands of the package share. Nothing here imports torch: help answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Says a mistake in one line, without the usage before it, and its version."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.add_argument("--version", action=ShowVersion, help="show the version and exit")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows every option)\n")


class ShowVersion(argparse.Action):
    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> NoReturn:
        print(version())
        parser.exit()


def version() -> str:
    """The name and version of this project as it was installed."""
    from importlib import metadata

    return f"wherelm {metadata.version('wherelm')}"


def quoted(path: Path) -> str:
    """A path as a value of an override."""
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"
