"""What is lost where examples are longer than the context, and the context that would hold them."""

import json

import numpy as np
import pytest

from wherelm.data.messages import messages_of, spans
from wherelm.data.sources import DataConfig, load_examples
from wherelm.tokenizer.table import WHOLE, fitting_context, tokenize
from wherelm.tokenizer.training import TokenizerConfig, train_tokenizer

BYTES = train_tokenizer(TokenizerConfig(kind="bytes"), [])


def talk(prompt, reply):
    return {"prompt": "p" * prompt, "completion": "r" * reply}


def examples_of(folder, rows):
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(train="data.jsonl", validation="data.jsonl", cache=str(folder / "cache"))
    return load_examples(config, folder, ["train"])["train"]


def counts_of(examples, overflow, context, learn="replies"):
    return tokenize(examples, BYTES, learn=learn, overflow=overflow, context=context)[1]


@pytest.mark.parametrize("seed", range(8))
def test_the_context_that_is_proposed_is_the_smallest_step_that_keeps_the_share_whole(seed):
    random = np.random.default_rng(seed)
    lengths = random.geometric(random.choice([0.3, 0.01, 0.001]), size=random.integers(1, 400)) + 1
    steps = sorted([*(1 << np.arange(2, 20)), *(3 << np.arange(1, 20))])
    whole = [(lengths - 1 <= step).mean() for step in steps]
    expected = next(s for s, share in zip(steps, whole, strict=True) if share >= WHOLE)
    assert fitting_context(lengths) == expected


@pytest.mark.parametrize("context", [14, 17, 40])
def test_lost_tokens_are_those_that_no_piece_holds(tmp_path, context):
    random = np.random.default_rng(context)
    rows = [talk(*random.integers(1, 30, size=2)) for _ in range(50)]
    examples = examples_of(tmp_path, rows)
    lengths = np.array(
        [len(BYTES.encode_spans(spans(each))[0]) for each in messages_of(examples.dataset)]
    )
    for overflow in ("truncate", "skip", "split"):
        table, counts = tokenize(
            examples, BYTES, learn="replies", overflow=overflow, context=context
        )
        assert counts["tokens"] == lengths.sum()
        kept = sum(len(row["ids"]) for row in table.to_pylist())
        assert counts["lost_tokens"] == (0 if overflow == "split" else lengths.sum() - kept)
        fits = (lengths - 1 <= counts["fitting_context"]).mean()
        assert counts["fitting_share"] == fits >= WHOLE
    assert counts_of(examples, "truncate", context)["lost_tokens"] > 0


def test_a_prompt_longer_than_the_context_is_counted_and_kept_with_the_table(tmp_path, monkeypatch):
    rows = [talk(3, 3), talk(30, 3), talk(30, 40), talk(3, 40), {"text": "x" * 50}]
    examples = examples_of(tmp_path, rows)
    first = counts_of(examples, "truncate", 16)
    assert (first["prompt_too_long"], first["nothing_learned"], first["truncated"]) == (2, 2, 4)
    monkeypatch.setattr("wherelm.tokenizer.table._tokenized", None)
    assert counts_of(examples, "truncate", 16) == first


def test_prompts_that_leave_no_room_for_a_reply_are_told_as_the_cause(tmp_path):
    with pytest.raises(ValueError, match="no example is left of 2: 2 with a prompt that") as caught:
        counts_of(examples_of(tmp_path, [talk(30, 3), talk(40, 3)]), "truncate", 16)
    assert "(model.context=48 keeps 100 % whole)" in str(caught.value)
    assert "data.learn" not in str(caught.value)
    assert counts_of(examples_of(tmp_path, [talk(30, 3), talk(40, 3)]), "truncate", 48)


def test_examples_that_are_all_too_long_are_told_with_what_holds_them(tmp_path):
    with pytest.raises(ValueError, match="3 longer than model") as caught:
        counts_of(examples_of(tmp_path, [talk(3, 60)] * 3), "skip", 16)
    fix = "(model.context=96 keeps 100 % whole, data.overflow=split loses nothing)"
    assert str(caught.value).endswith(f"model.context=16 (data.overflow=skip) {fix}")


def test_conversations_without_a_reply_are_told_to_learn_every_turn(tmp_path):
    asked = {"messages": [{"role": "user", "content": "why?"}]}
    with pytest.raises(ValueError, match=r"1 without anything to learn .*data\.learn=all learns"):
        counts_of(examples_of(tmp_path, [asked]), "truncate", 16)
    assert counts_of(examples_of(tmp_path, [asked]), "truncate", 16, "all")["pieces"] == 1
