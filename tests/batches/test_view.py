"""A batch as text says of every slot what the batch holds."""

import re

import torch

from tests.helpers import packed, padded
from wherelm.batches.store import TokenStore
from wherelm.batches.view import batch_text, slots
from wherelm.data.messages import Message, spans
from wherelm.tokenizer.training import TokenizerConfig, train_tokenizer

TOKENIZER = train_tokenizer(TokenizerConfig(kind="bytes"), [])


def store() -> TokenStore:
    examples = [
        [Message("user", "a b"), Message("assistant", "cd")],
        [Message("user", "x"), Message("assistant", "y")],
    ]
    return TokenStore.from_lists([TOKENIZER.encode_spans(spans(e)) for e in examples])


def columns(text: str, label: str) -> list[str]:
    """The cells of all lines of one label, in order."""
    lines = re.findall(rf"^  {label} +(.*)$", text, flags=re.MULTILINE)
    return [cell for line in lines for cell in line.split()]


def test_every_slot_shows_token_target_position_segment_and_masks():
    batch = padded(store(), [0, 1])
    text = batch_text(batch, TOKENIZER, width=100)
    first, second = text.split("row 2")
    assert columns(first, "token") == ["<BOS>", "<USER>", "a", "␣", "b", "<ASSISTANT>", "c", "d"]
    assert columns(first, "target") == ["<USER>", "a", "␣", "b", "<ASSISTANT>", "c", "d", "<EOS>"]
    assert columns(first, "position") == list("01234567")
    assert columns(first, "key mask") == ["x"] * 8
    assert columns(first, "loss mask") == [*["."] * 5, "x", "x", "x"]
    assert columns(second, "token") == ["<BOS>", "<USER>", "x", "<ASSISTANT>", "y", *["<PAD>"] * 3]
    assert columns(second, "key mask") == [*["x"] * 5, *["."] * 3]
    assert columns(second, "segment") == [*["1"] * 5, *["0"] * 3]
    assert "2 rows of 8 slots, right; 13 real, 3 empty, 5 learned targets" in text


def test_packed_rows_show_where_positions_begin_anew():
    text = batch_text(packed(store(), [[0, 1]], spare=1), TOKENIZER, width=200)
    assert columns(text, "segment") == [*["1"] * 8, *["2"] * 5, "0"]
    assert columns(text, "position")[7:10] == ["7", "0", "1"]


def test_long_rows_wrap_to_the_terminal_and_further_rows_are_counted():
    batch = padded(store(), [0, 1, 0])
    text = batch_text(batch, TOKENIZER, rows=1, width=45)
    assert max(map(len, text.splitlines()[1:])) <= 45
    assert text.count("loss mask") > 1
    assert columns(text, "position") == list("01234567")
    assert text.endswith("… and 2 more rows")


def test_padding_shows_as_padding_whatever_id_stands_there():
    batch = padded(store(), [0, 1])
    batch.tokens_BT[1, 5:] = TOKENIZER.encode("z")[0]
    assert [slot.token for slot in slots(batch, TOKENIZER)[1][5:]] == ["<PAD>"] * 3
    assert torch.equal(
        torch.tensor([[s.learned for s in row] for row in slots(batch, TOKENIZER)]),
        batch.loss_mask_BT,
    )
