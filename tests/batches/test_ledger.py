"""What a run says of examples that do not fit into its context."""

import logging
import re
from pathlib import Path

import pytest

from tests.training.test_loop import config
from wherelm import pipeline
from wherelm.batches.ledger import cut_warning
from wherelm.training import loop

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpora" / "dialogues-train.jsonl"


def ledger(**splits):
    """Of each split: examples, how many are truncated, left out, and have too long a prompt."""
    return {
        split: {
            "messages": {"kept": kept},
            "rows": {
                "truncated": truncated,
                "too_long": too_long,
                "prompt_too_long": late,
                "tokens": 1000,
                "lost_tokens": 10 * (truncated + too_long),
                "fitting_context": 64 * (1 + (split == "test")),
                "fitting_share": 0.969,
            },
        }
        for split, (kept, truncated, too_long, late) in splits.items()
    } | {"trained_positions": []}


def test_one_percent_of_a_split_is_cut_in_silence_and_more_is_said_with_the_fix():
    assert (
        cut_warning(ledger(train=(100, 1, 0, 0), test=(100, 0, 1, 0)), 32, "truncate", 64) is None
    )
    said = cut_warning(ledger(train=(100, 1, 0, 0), test=(100, 2, 0, 0)), 32, "truncate", 4096)
    assert said == (
        "examples longer than model.context=32 are cut: 2.0 % of test, and with them 20 tokens "
        "(2.0 %); model.context=128 keeps 96 % whole, data.overflow=split loses nothing"
    )


def test_the_warning_names_every_split_that_is_cut_and_prompts_that_teach_nothing():
    cut = ledger(train=(100, 50, 0, 7), test=(10, 5, 0, 1), validation=(100, 0, 0, 0))
    said = cut_warning(cut, 32, "truncate", 4096)
    assert "50 % of train, 50 % of test, and with them 550 tokens (28 %)" in said
    assert "; 8 have a prompt that alone is longer and teach nothing;" in said
    assert "\n" not in said


def test_examples_left_out_are_told_and_a_batch_grows_with_the_context():
    said = cut_warning(ledger(train=(100, 0, 40, 0)), 32, "skip", 48)
    assert "are left out: 40 % of train" in said
    assert "; model.context=64 training.batch_tokens=64 keeps 96 % whole" in said


def test_a_run_that_is_cut_says_so_once_before_its_first_step(tmp_path, caplog, monkeypatch):
    class Begun(Exception):
        pass

    def begin(*_):
        raise Begun

    monkeypatch.setattr(loop, "Tracker", begin)
    for overflow, times in {"truncate": 1, "split": 0}.items():
        caplog.clear()
        run = config(tmp_path, model={"context": 40}, data={"overflow": overflow})
        with caplog.at_level(logging.WARNING, "wherelm"), pytest.raises(Begun):
            loop.fit(run, tmp_path / overflow, tmp_path)
        assert caplog.text.count("examples longer than model.context=40 are cut") == times


def test_real_dialogues_fit_into_the_context_that_is_proposed(tmp_path):
    if not CORPUS.exists():
        pytest.skip("dialogues-train.jsonl is not at ../shared/corpora")

    def prepared(context):
        run = config(
            tmp_path,
            data={"train": str(CORPUS)},
            model={"context": context},
            training={"batch_tokens": 8192},
        )
        return pipeline.prepare(run, tmp_path, ["train", "validation"]).ledger

    said = cut_warning(prepared(128), 128, "truncate", 8192)
    context, share = re.search(r"model\.context=(\d+) keeps (\d+) % whole", said).groups()
    roomy = prepared(int(context))
    for split in roomy.values():
        cut = split["rows"]["truncated"] / split["messages"]["kept"]
        assert cut <= 0.05
    assert int(share) >= 95
