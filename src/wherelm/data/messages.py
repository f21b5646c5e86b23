"""Messages, conversations, and the spans of text and control tokens that they are read as.

A message is one turn. An example is what is learned as one: a plain text (one message of the role
"text"), a long text that is cut into windows (one of the role "stream"), or a conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import datasets

ROLES = ("system", "user", "assistant")
LEARN = ("replies", "all")
COLUMNS = "text, messages, or prompt and completion"
# Names that others give to a question and its answer. One of them learned alone would be harm.
ASKING = ("prompt", "instruction", "question", "query", "problem", "request", "input")
BESIDE = ("input", "context")  # belong to the question that they stand beside
REPLYING = ("completion", "output", "response", "answer", "reply", "solution")
TURNS = ("conversations", "conversation", "dialogue", "dialog", "turns", "chat")
LONGEST_GROUP = 40  # characters; longer ones are no names of groups


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `role` is one of ROLES, or "text" or "stream" where the message stands alone."""

    role: str
    content: str


class Span(NamedTuple):
    """A piece of an example: text as it stands, or (`control`) one control token by its name.

    `learned` spans are targets of the loss; the others are only read.
    """

    text: str
    control: bool
    learned: bool


BOS, EOS = Span("<BOS>", True, False), Span("<EOS>", True, True)
OPENINGS = {
    (r, learned): Span(f"<{r.upper()}>", True, learned) for r in ROLES for learned in (False, True)
}


class EmptyExample(ValueError):
    """An example in which nothing, or nothing but white space, is said."""


def spans(messages: Sequence[Message], learn: str = "replies") -> list[Span]:
    """A complete example as spans.

    - a plain text: <BOS> text <EOS>, text and <EOS> learned;
    - a conversation: <BOS> <USER> … <ASSISTANT> … <EOS> <USER> …; `learn="replies"` learns what
      the assistant says and its <EOS>, `learn="all"` everything but <BOS>. Only an assistant's
      turn ends with <EOS>;
    - a stream: the bare text, learned.
    """
    assert learn in LEARN, learn
    if messages[0].role == "stream":
        return [Span(messages[0].content, False, True)]
    if messages[0].role == "text":
        return [BOS, Span(messages[0].content, False, True), EOS]
    everything = learn == "all"
    result = [BOS]
    for message in messages:
        reply = message.role == "assistant"
        result.append(OPENINGS[message.role, everything])
        result.append(Span(message.content, False, everything or reply))
        if reply:
            result.append(EOS)
    return result


def prompt_spans(messages: Sequence[Message]) -> list[Span]:
    """Spans ready to be continued: by a reply, or by the rest of a plain text. None is learned.

    A conversation ends in <ASSISTANT>, a plain text without <EOS>.
    """
    result = [span._replace(learned=False) for span in spans(messages)]
    if messages[0].role in ROLES:
        return [*result, OPENINGS["assistant", False]]
    return result[:-1] if messages[0].role == "text" else result


def messages_of(dataset: datasets.Dataset, batch: int = 4096) -> Iterator[list[Message]]:
    """The examples of a dataset with the column `messages`, in order."""
    arrow = dataset.with_format("arrow")
    for start in range(0, len(dataset), batch):
        column = arrow[start : start + batch]["messages"].combine_chunks()
        turns = column.flatten()
        roles, contents = turns.field("role").to_pylist(), turns.field("content").to_pylist()
        messages = list(map(Message, roles, contents))
        ends = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
        yield from (messages[a:b] for a, b in itertools.pairwise(ends))


def messages_from_row(row: Any, text_column: str = "text") -> list[Message]:
    """The example in a row with the column `messages`, `prompt` and `completion`, or `text`.

    With a `text_column` other than "text" that column alone is taken. A bare string counts as a
    text, and `messages` may be JSON. ValueError says what is wrong, EmptyExample that nothing is
    said.
    """
    if isinstance(row, str):
        return [_message("text", row, "the text")]
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with {COLUMNS}, found {_kind(row)}")
    if text_column != "text":
        if text_column not in row:
            raise ValueError(f"has {_columns(row)}; expected {text_column} (data.text_column)")
        return [_message("text", row[text_column], text_column)]
    if "messages" in row:
        return _conversation(row["messages"])
    if "prompt" in row and "completion" in row:
        pairs = (("user", "prompt"), ("assistant", "completion"))
        return [_message(role, row[column], column) for role, column in pairs]
    if "text" in row:
        return [_message("text", row["text"], "text")]
    raise ValueError(f"has {_columns(row)}; expected {COLUMNS} ({_renaming(row)})")


def _renaming(row: dict) -> str:
    """How a row of other columns becomes one that is read whole."""
    names = {str(column).lower(): str(column) for column in row}
    asks, replies, beside, turns = (
        next((names[name] for name in known if name in names), None)
        for known in (ASKING, REPLYING, BESIDE, TURNS)
    )
    if asks and replies:
        wanted = ((asks, "prompt"), (replies, "completion"))
        renamed = " and ".join(f"{old} to {new}" for old, new in wanted if old != new)
        if beside in (None, asks):
            return f"rename {renamed}"
        return f"rename {renamed}; what {beside} holds goes to the end of prompt"
    if turns:
        return f"rename {turns} to messages, a list of {{role, content}}"
    if (asks or replies) and len(row) > 1:
        return "rename the columns of what is asked and of the reply"
    return "or name the text's column with data.text_column=…"


def _columns(row: dict) -> str:
    return (", ".join(map(str, row)) or "nothing")[:200]


def group_of_row(row: Any) -> str | None:
    """What a row is counted under when replies are measured: its `group`, a short text or number.

    None where it has none.
    """
    group = row.get("group") if isinstance(row, dict) else None
    if not isinstance(group, (str, int, float)):
        return None
    name = str(group)
    return name if 0 < len(name) <= LONGEST_GROUP else None


def _conversation(turns: Any) -> list[Message]:
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError as error:
            raise ValueError("messages is text, but not valid JSON") from error
    if turns is None or turns == []:
        raise EmptyExample("messages is empty")
    if not isinstance(turns, list):
        raise ValueError(f"messages is {_kind(turns)}, expected a list")
    result = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise ValueError(f"message {number} is not an object with role and content")
        if turn["role"] not in ROLES:
            expected = ", ".join(ROLES)
            raise ValueError(f"message {number} has role {turn['role']!r}; expected {expected}")
        result.append(_message(turn["role"], turn["content"], f"message {number}"))
    return result


def _message(role: str, content: Any, name: str) -> Message:
    if content is None:
        raise EmptyExample(f"{name} is empty")
    if not isinstance(content, str):
        raise ValueError(f"{name} is {_kind(content)}, expected text")
    check_encodable(content, name)
    if not content or content.isspace():
        raise EmptyExample(f"{name} is empty")
    return Message(role, content)


def check_encodable(text: str, name: str = "the text") -> None:
    """ValueError for text with lone surrogates, which no UTF-8 file or tokenizer can hold."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid UTF-8: U+{ord(text[error.start]):04X} stands for half a "
            "character or a broken byte"
        ) from error


def _kind(value: Any) -> str:
    names: Iterable[tuple[type, str]] = (
        (bool, "true or false"),
        ((int, float), "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "nothing")
