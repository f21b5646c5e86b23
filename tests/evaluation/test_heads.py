"""Probes, proven on attention whose answer is known.

Shapes: B rows, T query slots, S key slots, H heads.
"""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import batch_logits, difference, padded, ragged_store, random_decoder
from wherelm import probes
from wherelm.evaluation.heads import (
    attention_weights,
    by_distance,
    entropy,
    first_token,
    induction_score,
    kept_weights,
    measure,
    previous_token_score,
    readable,
    repeated_blocks,
    uniform_weights,
)
from wherelm.schemes import SCHEMES
from wherelm.tokenizer.tokenizer import Tokenizer
from wherelm.tokenizer.training import TokenizerConfig, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind="bytes"), [])


def reading(queries_to_keys, length: int) -> torch.Tensor:
    """One head, (1, 1, T, T), whose query reads one key alone."""
    weights = torch.zeros(1, 1, length, length)
    for query in range(length):
        weights[0, 0, query, queries_to_keys(query)] = 1
    return weights


def whole(length: int, rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("name", SCHEMES)
def test_kept_weights_are_those_that_make_the_logits(name):
    model, batch = random_decoder(name), padded(ragged_store(), range(4))
    before = batch_logits(model, batch)
    layers = attention_weights(model, batch)
    assert len(layers) == 2
    for weights in layers:
        assert weights.shape == (4, 4, 9, 9)
        assert difference(weights.sum(-1), torch.ones(4, 4, 9)) <= 1e-5
        # Real queries read nothing that they may not read.
        real_BT = batch.key_mask_BT[:, None, :, None]
        assert (weights * real_BT * ~readable(batch)[:, None]).max() == 0
    with kept_weights(model):
        textbook = batch_logits(model, batch)
    real = batch.key_mask_BT
    assert difference(textbook[real], before[real]) <= 1e-4


def test_the_fast_path_runs_again_afterwards_and_also_after_an_error():
    model = random_decoder("rope")

    def fail():
        with kept_weights(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for block in model.blocks:
        assert block.attention.keep_weights is False
        assert block.attention.weights_BHTS is None


def test_by_distance_of_a_head_that_reads_three_back():
    profile = by_distance(reading(lambda i: max(0, i - 3), 8), whole(8))[0]
    assert profile[3] == 1  # every query from slot 3 on
    # The first four queries read slot 0: one of the 8 - d queries at each of the distances 0 to 2.
    assert profile[:3].tolist() == pytest.approx([1 / 8, 1 / 7, 1 / 6])
    assert profile[4:].tolist() == [0, 0, 0, 0]


def test_by_distance_of_equal_weights_is_the_mean_of_1_over_i():
    allowed = whole(5)
    profile = by_distance(uniform_weights(allowed), allowed)[0]
    for d in range(5):
        expected = sum(1 / i for i in range(d + 1, 6)) / (5 - d)
        assert profile[d].item() == pytest.approx(expected)


def test_padding_counts_in_no_average():
    model, store = random_decoder("rope"), ragged_store()
    together = padded(store, [0, 3])
    alone = [padded(store, [i]) for i in (0, 3)]
    allowed = readable(together)
    assert allowed.shape[1] == 9 > alone[1].tokens_BT.shape[1]
    for layer in range(2):
        weights = attention_weights(model, together)[layer]
        for function in (entropy, first_token):
            sums = torch.zeros(4)
            queries = 0
            for batch in alone:
                count = batch.tokens_BT.shape[1] - (function is first_token)
                own = attention_weights(model, batch)[layer]
                sums += function(own, readable(batch)) * count
                queries += count
            assert difference(function(weights, allowed), sums / queries) <= 1e-5
        short = attention_weights(model, alone[1])[layer]
        long = attention_weights(model, alone[0])[layer]
        counts = [max(0, b.tokens_BT.shape[1] - 1) for b in alone]
        mixed = sum(
            by_distance(w, readable(b))[:, 1] * n
            for w, b, n in zip((long, short), alone, counts, strict=True)
        ) / sum(counts)
        assert difference(by_distance(weights, allowed)[:, 1], mixed) <= 1e-5


def test_entropy_is_0_for_one_key_and_log_i_for_equal_weights():
    assert entropy(reading(lambda i: 0, 6), whole(6)).item() == 0
    expected = sum(math.log(i) for i in range(1, 7)) / 6
    assert entropy(uniform_weights(whole(6)), whole(6)).item() == pytest.approx(expected)


def test_first_token_counts_later_queries_alone():
    assert first_token(reading(lambda i: 0, 6), whole(6)).item() == 1
    assert first_token(reading(lambda i: i, 6), whole(6)).item() == 0
    # Behind two empty slots the first token stands in slot 2.
    allowed = whole(6)
    allowed[:, :, :2] = False
    allowed[:, :2] = False
    assert first_token(reading(lambda i: min(i, 2), 6), allowed).item() == 1


def test_repeated_blocks_repeat_and_hold_each_token_once_a_copy(tokenizer):
    batch, block = repeated_blocks(tokenizer, context=16, rows=5)
    assert (block, batch.tokens_BT.shape) == (7, (5, 15))
    first, second = batch.tokens_BT[:, 1 : block + 1], batch.tokens_BT[:, block + 1 :]
    assert torch.equal(first, second)
    assert (batch.tokens_BT[:, 0] == tokenizer.bos).all()
    for row in first.tolist():
        assert len(set(row)) == block
        assert all(tokenizer.control_name(token) is None for token in row)
    assert len({tuple(row) for row in first.tolist()}) == 5
    assert torch.equal(repeated_blocks(tokenizer, 16, 5)[0].tokens_BT, batch.tokens_BT)
    with pytest.raises(ValueError, match=r"model\.context=4"):
        repeated_blocks(tokenizer, context=4)


def test_scores_are_1_for_the_head_they_look_for_and_0_for_others(tokenizer):
    batch, block = repeated_blocks(tokenizer, context=16, rows=1)
    tokens = batch.tokens_BT[0].tolist()

    def follower(query: int) -> int:
        """The slot behind the same token's earlier occurrence."""
        earlier = [s for s in range(query) if tokens[s] == tokens[query]]
        return earlier[-1] + 1 if earlier else query

    induction = reading(follower, len(tokens))
    previous = reading(lambda i: max(0, i - 1), len(tokens))
    assert induction_score(induction, block).item() == 1
    assert previous_token_score(previous).item() == 1
    assert induction_score(previous, block).item() == 0
    assert previous_token_score(induction).item() == 0


def test_probes_are_json_with_a_number_for_each_layer_and_head(tokenizer):
    model = random_decoder("alibi")
    # Ids of the random decoder's small vocabulary alone.
    small = SimpleNamespace(
        vocab_size=23, bos=1, eos=2, pad=0, control_name=lambda i: "<…>" if i < 6 else None
    )
    values = json.loads(json.dumps(measure(model, small, padded(ragged_store(), range(4)))))
    assert (values["layers"], values["heads"], values["examples"]) == (2, 4, 4)
    for key in ("entropy", "first_token", "previous_token", "induction"):
        assert np.array(values[key]).shape == (2, 4)
        assert np.ptp(values[key]) > 1e-3, key
    assert np.array(values["by_distance"]).shape == (2, 4, 9)
    assert values["uniform_by_distance"][8] == pytest.approx(1 / 9, abs=1e-6)


def test_help_answers_before_torch_is_imported():
    script = (
        "import sys\nfrom wherelm import probes\n"
        "try: probes.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "induction" in result.stdout


def test_a_mistake_is_one_line_and_exit_2(tmp_path, capsys):
    assert probes.main([str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "nowhere" in said
    with pytest.raises(SystemExit) as stopped:
        probes.main(["a", "b", "--out", "c.json"])
    assert stopped.value.code == 2
