"""Paths as a user types them to rows: files, folders, globs, standard input, the hub, tasks."""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import os
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherelm.data import tasks
from wherelm.data.cache import code_of
from wherelm.data.readers import READERS, kind_of, read_bytes, read_rows, readers, suffix

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)
STANDARD_INPUT = "-"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
PATIENCE = 3  # seconds, for a hub that may not be reachable


@dataclass(frozen=True)
class Source:
    """Rows with their places, read when asked for; equal `content` names equal rows."""

    content: str
    rows: Callable[[], Iterator[tuple[str, Any]]]


def source_of(key: str, value: str, format: str, root: Path) -> Source:
    """What `key=value` is read from; paths count from the working directory, else from `root`.

    ValueError names the key and what it would accept.
    """
    split = key.rpartition(".")[2]
    if value.startswith(tasks.PREFIX):
        task = tasks.parse(value)
        content = f"{code_of('data.tasks').hex()} {task!r} {split}"
        return Source(content, lambda: ((value, row) for row in tasks.rows(task, split)))
    if value == STANDARD_INPUT:
        return _piped(key, format)
    files = find_files(key, value, format, root)
    if files is None:
        hub = _from_hub(key, value)
        return Source(
            hub._fingerprint,
            lambda: ((f"{value}:{number}", row) for number, row in enumerate(hub, start=1)),
        )
    content = repr([(name, _digest(path)) for name, path in files])
    return Source(
        content,
        lambda: (
            (f"{name}:{place}" if place else name, row)
            for name, path in files
            for place, row in read_rows(name, path, format)
        ),
    )


def find_files(key: str, value: str, format: str, root: Path) -> list[tuple[str, Path]] | None:
    """The files of a source, each with the name to show; None for a hub id.

    ValueError names the configuration's key and what it would accept.
    """
    given = Path(os.path.expanduser(value))
    places = [Path()] if given.is_absolute() else [Path(), root]
    for place in places:
        path = place / given
        if path.is_file():
            if suffix(path) in readers(format):
                return [(value, path)]
            if not suffix(path):
                log.info("%s=%s: a name without a suffix, so read as text", key, value)
                return [(value, path)]
            raise ValueError(f"{key}={value}: unknown kind of file; expected {accepted(format)}")
        if path.is_dir():
            found = [given / p.relative_to(path) for p in path.rglob("*") if not _hidden(p, path)]
        elif glob.has_magic(value):
            found = map(Path, glob.glob(str(given), root_dir=place, recursive=True))
        else:
            continue
        named = [(str(p), place / p) for p in sorted(found) if suffix(p) in readers(format)]
        files = [(name, path) for name, path in named if path.is_file()]
        if files:
            return files
        if path.is_dir() or place is places[-1]:
            raise ValueError(f"{key}={value}: no file there ends in {_suffixes(format)}")
    parent = value.split("/")[0]
    local = any((place / parent).is_dir() for place in places)
    known = suffix(Path(value)) in READERS
    if format == "messages" and HUB_ID.fullmatch(value) and not local and not known:
        return None
    several = f"; several are a list: '{key}=[{value}]'" if "," in value else ""
    raise ValueError(f"{key}={value}: no such file; expected {accepted(format)}{several}")


def _piped(key: str, format: str) -> Source:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(f"{key}=-: standard input is a terminal; pipe messages into it")
    content = _standard_input()
    if not content:
        raise ValueError(f"{key}=-: nothing came on standard input; pipe messages into it")
    kind = kind_of(content) if format == "messages" else ".txt"
    log.info("%s=-: standard input, read as %s", key, kind)
    digest = hashlib.sha256(content).hexdigest()

    def rows() -> Iterator[tuple[str, Any]]:
        for place, row in read_bytes("standard input", content, kind, format):
            yield f"standard input:{place}", row

    return Source(f"- {kind} {digest}", rows)


@functools.cache
def _standard_input() -> bytes:
    """All that is piped in: it can be read once, and several parts of a run ask for it."""
    return sys.stdin.buffer.read()


def _from_hub(key: str, value: str) -> datasets.Dataset:
    """A dataset of the hub, "user/name" or "user/name:split"; its local copy without a network."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging
    from huggingface_hub import constants

    # Without a network the hub's client tries for half a minute before it gives up, and its
    # settings are read from the environment when it is imported.
    reachable = constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT)
    if reachable:
        log.info("%s=%s: no such file, so asking the Hugging Face hub for it", key, value)
    name, _, split = value.partition(":")
    before = hub_logging.get_verbosity()
    offline = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub_logging.set_verbosity_error()
    if not reachable:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, split=split or key.rpartition(".")[2])
    except Exception as error:  # dozens of classes, from sockets to the builders of datasets
        why = " ".join(str(error).split())[:300]
        if not reachable:
            why = f"{constants.ENDPOINT} does not answer, and no copy of it is here"
        raise ValueError(
            f"{key}={value}: no such file, and as a dataset of the Hugging Face hub it cannot be "
            f"loaded ({why}); give a file, or USER/NAME:SPLIT"
        ) from error
    finally:
        hub_logging.set_verbosity(before)
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline


def _answers(address: str) -> bool:
    """Whether anything answers there within PATIENCE, whatever it says."""
    answered = []

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError) as error:
            if not isinstance(getattr(error, "reason", None), ssl.SSLError):
                return
        answered.append(True)

    # In a thread, for looking up a name has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answered)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _suffixes(format: str) -> str:
    return f"{', '.join(readers(format))} (each also .gz)"


def accepted(format: str) -> str:
    """What a data path may be, in words."""
    more = "a glob, a folder, - (standard input)"
    if format == "messages":
        more += ", a hub id USER/NAME, task:NAME"
    return f"a file that ends in {_suffixes(format)}, {more}, or a list of them"
