import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import random_decoder
from wherelm import checkpoint
from wherelm.batches.batch import collate
from wherelm.batches.store import TokenStore
from wherelm.config import project_root
from wherelm.evaluate import main
from wherelm.evaluation.measures import evaluate, exact_matches, measures, replies, score
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate

BYTES = np.array([0, 0, 0, 0, 0, 0, *([1] * 9), *([3] * 8)])


class Ids:
    """The ids of a tokenizer of 23 tokens."""

    pad, bos, eos, user, assistant, system = range(6)
    byte_lengths = BYTES


def conversations(count=30, seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids, learned = [Ids.bos], [False]
        for _ in range(generator.integers(1, 3)):
            for role, is_learned in ((Ids.user, False), (Ids.assistant, True)):
                said = generator.integers(6, 23, generator.integers(1, 4)).tolist()
                end = [Ids.eos] if is_learned else []
                ids += [role, *said, *end]
                learned += [False, *[is_learned] * len(said), *[True] * len(end)]
        rows.append((ids[:16], learned[:16]))
    return TokenStore.from_lists(rows)


STORE = conversations()


@pytest.mark.parametrize("batch_tokens", [1, 48, 128])
def test_the_loss_does_not_depend_on_the_batch_size(batch_tokens):
    model = random_decoder()
    whole = evaluate(model, STORE, Ids, 10**6)
    parts = evaluate(model, STORE, Ids, batch_tokens)
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert parts["exact_match"] == whole["exact_match"]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_loss_at_so_many_rows_a_batch_is_the_cross_entropy_of_each_alone(rows):
    model = random_decoder()
    nats, targets = 0.0, 0
    for start in range(0, len(STORE), rows):
        batch = collate(STORE, range(start, min(start + rows, len(STORE))), Ids.pad)
        logits = model(batch.tokens_BT, batch.positions_BT).detach()
        kept = batch.loss_mask_BT
        nats += float(F.cross_entropy(logits[kept], batch.targets_BT[kept], reduction="sum"))
        targets += int(kept.sum())
    result = evaluate(model, STORE, Ids, 64)
    assert result["targets"] == targets
    assert result["loss"] == pytest.approx(nats / targets, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    said = sum(BYTES[ids[1:][flags[1:]]].sum() for ids, flags in map(STORE.__getitem__, range(30)))
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / said, rel=1e-5)


def test_exact_match_is_what_greedy_decoding_reproduces():
    model = random_decoder(seed=6)
    with torch.no_grad():
        model.head.weight[Ids.eos] *= 3  # so that some replies end
    rows = []
    for index in range(len(STORE)):
        ids = STORE[index][0].tolist()
        start = ids.index(Ids.assistant) + 1
        (reply,) = generate(model, [ids[:start]], Sampling(greedy=True, max_tokens=3), Ids.eos)
        is_text = reply.finish == "end" and all(token > 5 for token in reply.tokens)
        said = reply.tokens if is_text else [7, 8]
        complete = [*ids[:start], *said, Ids.eos]
        rows.append((complete, [False] * start + [True] * (len(said) + 1)))
    store = TokenStore.from_lists(rows)
    scores = score(model, store, Ids.pad, 64)
    matches = exact_matches(scores, replies(store, Ids))
    expected = []
    for ids, flags in rows:
        start = flags.index(True)
        length = len(ids) - start
        (reply,) = generate(model, [ids[:start]], Sampling(greedy=True, max_tokens=length), Ids.eos)
        expected.append(reply.finish == "end" and reply.tokens == ids[start:-1])
    assert matches.tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_replies_are_numbered_and_truncated_ones_left_out():
    rows = [
        ([1, 3, 9, 4, 8, 8, 2, 3, 9, 4, 7, 2], [False] * 12),
        ([1, 3, 9, 4, 8, 8], [False] * 6),
        ([1, 3, 4, 7, 2], [False] * 5),
    ]
    store = TokenStore.from_lists(rows)
    expected = [-1, -1, -1, -1, 0, 0, 0, -1, -1, -1, 1, 1]
    assert replies(store, Ids)[:12].tolist() == expected
    assert (replies(store, Ids)[12:18] == -1).all()
    assert (replies(store, Ids)[-2:] >= 0).all()


def test_scores_stand_where_their_targets_stand():
    model = random_decoder()
    scores = score(model, STORE, Ids.pad, 64)
    learned = STORE.learned.copy()
    assert (scores.scored_E == learned).all()
    ids = torch.tensor(STORE[4][0].astype(np.int64))
    logits = model(ids[None, :-1], torch.arange(len(ids) - 1)[None])[0]
    nats = F.cross_entropy(logits, ids[1:], reduction="none").detach().numpy()
    here = slice(STORE.offsets[4], STORE.offsets[5])
    flags = STORE[4][1][1:]
    assert scores.nats_E[here][1:][flags] == pytest.approx(nats[flags], abs=1e-5)


def test_evaluation_restores_the_training_mode():
    model = random_decoder().train()
    evaluate(model, STORE, Ids, 64)
    assert model.training


def test_nothing_to_measure_is_said():
    store = TokenStore.from_lists([([1, 7, 8], [False] * 3)])
    model = random_decoder()
    with pytest.raises(ValueError, match="no learned target"):
        measures(score(model, store, 0, 64), store, Ids)


def test_the_command_names_what_is_no_run(tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


SHIPPED = project_root() / "data" / "pretrained" / "errands"
needs_shipped = pytest.mark.skipif(not SHIPPED.is_dir(), reason="no shipped checkpoint here")


@needs_shipped
def test_the_command_measures_the_shipped_checkpoint(capsys):
    assert main([str(SHIPPED), "evaluation.splits=[validation]", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["splits"]["validation"]
    assert figures["exact_match"] > 0.85


@needs_shipped
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_command_measures_in_the_precision_of_the_run_and_says_which(precision, capsys, few):
    found = []
    for name in (precision, "float32"):
        assert main([str(SHIPPED), *few, f"training.precision={name}", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["precision"] == precision
    same = found[0]["splits"] == found[1]["splits"]
    assert same == (precision == "float32")


@pytest.fixture
def few(tmp_path):
    """The override that validates on the first requests of errands alone."""
    lines = (project_root() / "data/errands/validation.jsonl").read_text("utf-8").splitlines()
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(lines[:40]), "utf-8")
    return [f"data.validation={path}", "evaluation.splits=[validation]"]


@needs_shipped
def test_the_command_gives_all_that_is_asked_for_of_every_checkpoint(capsys, few):
    asked = ["--breakdowns", "--shuffled-prefix", "--extrapolation", "training.precision=float32"]
    assert main([str(SHIPPED), *asked, str(SHIPPED), "--json", *few]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second
    kinds = ["checkpoint", "precision", "splits", "breakdowns", "shuffled_prefix", "extrapolation"]
    assert list(first) == kinds
    whole = first["splits"]["validation"]
    assert first["shuffled_prefix"]["validation"]["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert first["shuffled_prefix"]["validation"]["change"] > 0.1
    groups = first["breakdowns"]["validation"]["group"]
    assert [entry["group"] for entry in groups] == ["2", "3", "4"]
    assert sum(entry["replies"] for entry in groups) == whole["replies"] == 40

    assert main([str(SHIPPED), *few, *asked]) == 0
    out, err = capsys.readouterr()
    assert "validation by group" in out
    assert "beyond the trained length: not measured; it needs a text of 129 tokens" in out
    assert err == ""


@needs_shipped
def test_the_command_reads_a_checkpoint_with_another_rotary_extension(capsys, few):
    losses = []
    for pairs in ([], ["position.scaling=yarn", "position.factor=4"]):
        assert main([str(SHIPPED), *few, *pairs, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["splits"]["validation"]["loss"])
    assert losses[1] > losses[0] + 1e-3
    assert main([str(SHIPPED), *few, "position.scaling=yarn"]) == 0
    expected = "warning: position.scaling=yarn changes nothing with position.factor=1\n"
    assert capsys.readouterr().err == expected


@needs_shipped
@pytest.mark.parametrize("pair", ["model.layers=3", "position=none", "nosuch=1", "data.extra={"])
def test_the_command_answers_a_wrong_override_with_one_line(capsys, pair):
    assert main([str(SHIPPED), pair]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {pair.partition('=')[0]}")
    assert err.count("\n") == 1


@needs_shipped
def test_without_a_folder_the_command_takes_the_default_and_says_which(capsys, few, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint, "find", lambda path, root: asked.append(path) or SHIPPED)
    assert main(few) == 0
    assert asked == [None]
    assert capsys.readouterr().out.startswith(f"{SHIPPED}, step 1200, ")
