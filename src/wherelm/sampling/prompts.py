"""What is asked of a model: prompts from text, rows and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherelm.data.messages import Message, check_encodable, messages_from_row


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: `given` as it was written, and its messages."""

    given: str | list
    messages: list[Message]


def text_prompt(text: str, raw: bool) -> Prompt:
    check_encodable(text, "the prompt")
    if not text.strip() and not raw:
        raise ValueError("an empty prompt: expected a message (or --raw, to start from nothing)")
    return Prompt(text, [Message("text" if raw else "user", text)])


def row_prompt(row: Any, raw: bool) -> Prompt:
    """The prompt of one parsed line of a .jsonl file."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return text_prompt(row["prompt"], raw)
    if not isinstance(row, dict) or "messages" not in row:
        raise ValueError('expected {"prompt": "…"} or {"messages": [{"role", "content"}, …]}')
    if raw:
        raise ValueError("--raw continues plain text, and here are messages")
    messages = messages_from_row(row)
    if messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("expected a message to answer")
    return Prompt(row["messages"], messages)


def file_prompts(path: Path, raw: bool) -> Iterator[Prompt]:
    """The prompts of a file; ValueError names file and line."""
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise ValueError(f"--file {path}: no such file")
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in numbered_lines(lines, str(path)):
            try:
                if path.suffix.lower() in (".jsonl", ".ndjson"):
                    yield row_prompt(json.loads(line), raw)
                else:
                    yield text_prompt(line, raw)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from error
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error


def numbered_lines(lines: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, without their ends, from number 1."""
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not valid UTF-8 ({error})") from error


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system is None or messages[0].role == "system":
        return messages
    return [Message("system", system), *messages]


def newest_tokens(ids: list[int], context: int, max_tokens: int, bos: int) -> list[int]:
    """A prompt longer than the context, cut as the help text says; any other as it is."""
    if len(ids) <= context:
        return ids
    room = max(context - max_tokens, context // 2, 1)
    if ids[0] == bos and room > 1:
        return [bos, *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]
