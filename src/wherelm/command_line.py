"""What the commands of the package share. Nothing here imports torch: help answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Says a mistake in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows every option)\n")


def quoted(path: Path) -> str:
    """A path as a value of an override."""
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"
