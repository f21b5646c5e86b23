"""Rows of files: each kind by its own reader, which knows the line that a row stands on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# The place of a row in its file (a line number, where the file has lines), and the row or what is
# wrong with it.
Rows = Iterator[tuple[str, Any]]


def read_rows(name: str, path: Path, format: str = "messages") -> Rows:
    """Every row of a file with its place, or with a ValueError in its stead where it is malformed.

    ValueError if the file as a whole cannot be read.
    """
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rb") as file:
            yield from _rows(name, file, suffix(path) or ".txt", format)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name}: cannot be read ({error})") from error


def read_bytes(name: str, content: bytes, kind: str, format: str) -> Rows:
    """As `read_rows`, of what is no file, read as a file that ends in `kind`."""
    yield from _rows(name, io.BytesIO(content), kind, format)


def kind_of(content: bytes) -> str:
    """.jsonl for what begins with an object on one line, else .txt."""
    first = content.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    try:
        return ".jsonl" if isinstance(json.loads(first), dict) else ".txt"
    except (ValueError, RecursionError):
        return ".txt"


def _rows(name: str, file: BinaryIO, kind: str, format: str) -> Rows:
    try:
        yield from readers(format)[kind](file)
    except UnreadableFile as error:
        raise ValueError(f"{name}{error}") from error


class UnreadableFile(ValueError):
    """A file that is broken as a whole; the text continues the file's name."""


def _text_rows(file: BinaryIO) -> Rows:
    yield from _lines(file)


def _stream_rows(file: BinaryIO) -> Rows:
    try:
        yield "", file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(f":{line}: not valid UTF-8") from error


def _json_line_rows(file: BinaryIO) -> Rows:
    for place, line in _lines(file):
        if isinstance(line, ValueError) or not line.strip():
            yield place, line
            continue
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield place, ValueError(f"not valid JSON ({error})")


def _json_rows(file: BinaryIO) -> Rows:
    """A list of rows, or rows one after the other."""
    text = _whole_text(file)
    decoder = json.JSONDecoder()
    blank = re.compile(r"[\s,]*")
    at, line, counted = 0, 1, 0
    inside = text.lstrip().startswith("[")
    if inside:
        at = text.index("[") + 1
    while True:
        at = blank.match(text, at).end()
        if at == len(text) or (inside and text[at] == "]"):
            break
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            at_line = getattr(error, "lineno", line)
            raise UnreadableFile(f":{at_line}: not valid JSON ({error})") from error
        yield str(line), row
    if inside and text[at + 1 :].strip():
        place = text.count("\n", 0, at) + 1
        raise UnreadableFile(f":{place}: something follows the list; expected one list, or none")
    if inside and at == len(text):
        raise UnreadableFile(f":{text.count(chr(10)) + 1}: not valid JSON (the list does not end)")


def _csv_rows(file: BinaryIO) -> Rows:
    """Quoted as RFC 4180 has it; the first row names the columns."""
    csv.field_size_limit(2**31 - 1)
    # Broken bytes become lone surrogates, which are then refused row by row.
    lines = (line.decode("utf-8", "surrogateescape") for line in _without_mark(file))
    reader = csv.reader(lines, strict=True)
    header = None
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            until = f" up to line {reader.line_num}" if reader.line_num > first else ""
            yield str(first), ValueError(f"not valid CSV{until} ({error})")
            continue
        if header is None:
            header = cells
        else:
            yield str(first), _named(header, cells)


def _tsv_rows(file: BinaryIO) -> Rows:
    """Tabs and line ends separate, quotes are text; the first row names the columns."""
    header = None
    for place, line in _lines(file):
        if isinstance(line, ValueError):
            yield place, line
        elif header is None:
            header = line.split("\t")
        else:
            yield place, _named(header, line.split("\t") if line else [])


def _parquet_rows(file: BinaryIO) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(io.BytesIO(file.read()))
        number = 0
        for batch in parquet.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except pa.ArrowException as error:
        raise UnreadableFile(f": not a parquet file ({' '.join(str(error).split())})") from error


READERS: dict[str, Callable[[BinaryIO], Rows]] = {
    ".txt": _text_rows,
    ".jsonl": _json_line_rows,
    ".ndjson": _json_line_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".parquet": _parquet_rows,
}
STREAM_READERS = {".txt": _stream_rows}


def readers(format: str) -> dict[str, Callable[[BinaryIO], Rows]]:
    """The reader of each kind of file that data.format allows, by the end of its name."""
    return STREAM_READERS if format == "stream" else READERS


def _without_mark(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, without the byte order mark that some programs put first."""
    for number, line in enumerate(file):
        if number == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UnreadableFile(": is UTF-16; save it as UTF-8")
        yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line


def _lines(file: BinaryIO) -> Iterator[tuple[str, str | ValueError]]:
    for number, line in enumerate(_without_mark(file), start=1):
        try:
            yield str(number), line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            yield str(number), ValueError("not valid UTF-8")


def _whole_text(file: BinaryIO) -> str:
    return next(iter(_stream_rows(file)))[1]


def _named(header: list[str], cells: list[str]) -> dict[str, str] | str | ValueError:
    if not cells:
        return ""
    if len(cells) != len(header):
        return ValueError(f"has {len(cells)} fields, the first row names {len(header)}")
    return dict(zip(header, cells, strict=True))


def suffix(path: Path) -> str:
    """The end of a file's name that says its kind, without a .gz after it."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix
