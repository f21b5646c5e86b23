"""The decoder's settings, its initial values and its loss.

Shapes: B rows, T slots, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers import (
    CONTEXT,
    PAD,
    VOCABULARY,
    batch_logits,
    difference,
    inputs,
    padded,
    ragged_store,
    random_decoder,
    row_logits,
    with_random_pads,
)
from wherelm.batches.batch import collate
from wherelm.model.decoder import (
    MLP,
    Decoder,
    ModelConfig,
    initialize,
    learned_logits,
    next_token_loss,
)
from wherelm.schemes import SCHEMES, build_scheme


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_a_decoder_compiles_to_one_graph_whatever_the_lengths(name, monkeypatch):
    model, graphs = random_decoder(name), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiler = partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    torch.compiler.reset()
    batches = [
        collate(ragged_store(lengths), [np.array(row) for row in rows], PAD, shape=(2, CONTEXT))
        for lengths, rows in (((9, 4, 6), ((0, 1), (2,))), ((2, 11, 5, 3), ((0, 1), (2, 3))))
    ]
    plain = [model.read(batch) for batch in batches]
    assert not graphs
    model.compile_training()
    model.train()
    for batch, expected_BTD in zip(batches, plain, strict=True):
        assert difference(model.read(batch), expected_BTD) <= 1e-6
    assert len(graphs) == 1


def fresh_decoder(name: str = "rope", seed: int = 0, **changes) -> Decoder:
    """As training starts."""
    config = ModelConfig(**{"layers": 2, "width": 64, "heads": 4, "context": 32, **changes})
    model = Decoder(config, build_scheme(SCHEMES[name].Config(), config.shape), VOCABULARY)
    initialize(model, seed)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batchnorm"}, "model.norm=batchnorm: expected one of rmsnorm, layernorm"),
        ({"mlp": "relu"}, "model.mlp=relu: expected one of swiglu, gelu, relu2"),
        ({"layers": 0}, "model.layers=0: expected a number above 0"),
        ({"context": -1}, "model.context=-1: expected a number above 0"),
        ({"softcap": 0.0}, "model.softcap=0.0: expected a number above 0"),
        ({"mlp_width": 0}, "model.mlp_width=0: expected a number above 0"),
        ({"heads": 3}, "model.heads=3: expected a divisor of width=128"),
        ({"kv_heads": 3}, "model.kv_heads=3: expected a divisor of heads=4"),
        ({"dropout": 1.0}, "model.dropout=1.0: expected 0 or more and below 1"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_the_key(changes, message):
    with pytest.raises(ValueError, match="model") as error:
        ModelConfig(**changes)
    assert str(error.value) == message


def test_the_mlp_is_four_widths_wide_and_swiglu_spends_as_many_parameters():
    assert ModelConfig(width=96, heads=4).inner_width == 384
    swiglu = ModelConfig(width=96, heads=4, mlp="swiglu")
    assert swiglu.inner_width == 256
    assert ModelConfig(mlp_width=40).inner_width == 40
    sizes = {
        kind: sum(p.numel() for p in MLP(ModelConfig(width=96, heads=4, mlp=kind)).parameters())
        for kind in ("relu2", "gelu", "swiglu")
    }
    assert len(set(sizes.values())) == 1


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = fresh_decoder(tied=True), fresh_decoder()
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    count = {id(m): sum(p.numel() for p in m.parameters()) for m in (tied, untied)}
    assert count[id(untied)] - count[id(tied)] == VOCABULARY * 64


def test_a_soft_cap_bounds_logits_and_leaves_small_ones():
    tokens = inputs(ragged_store(), 0)
    free, capped = random_decoder(), random_decoder(softcap=2.0)
    raw_TV, capped_TV = row_logits(free, tokens), row_logits(capped, tokens)
    assert raw_TV.abs().max() > 2 > capped_TV.abs().max()
    assert difference(capped_TV, 2 * torch.tanh(raw_TV / 2)) <= 1e-6


# Initial values


def test_training_starts_from_the_uniform_prediction():
    """Outputs of the blocks and the head are zero: the loss is log V, no token is favoured."""
    model = fresh_decoder()
    batch = padded(ragged_store(), range(4))
    logits_NV, _ = learned_logits(model, batch)
    assert (logits_NV == 0).all()
    assert next_token_loss(model, batch).item() / batch.targets == pytest.approx(
        math.log(VOCABULARY), rel=1e-6
    )


def test_token_embeddings_enter_at_rms_1():
    model = fresh_decoder(width=512)
    entering = []
    model.blocks[0].register_forward_pre_hook(lambda block, given: entering.append(given[0]))
    model(torch.arange(VOCABULARY)[None], torch.arange(VOCABULARY)[None])
    assert entering[0].pow(2).mean().sqrt().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_added_positions_neither_drown_the_tokens_nor_are_drowned(name):
    model = fresh_decoder(name, width=512)
    added = model.scheme.embed(torch.zeros(1, 32, 512), torch.arange(32)[None])
    assert added.pow(2).mean().sqrt().item() == pytest.approx(0.5**0.5, abs=0.02)


def test_matrices_keep_the_size_of_what_they_read():
    model = fresh_decoder(width=256)
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        weight = model.get_parameter(f"blocks.1.{name}.weight")
        assert weight.std().item() == pytest.approx(256**-0.5, rel=0.03)


def test_norms_start_at_one_and_biases_at_zero():
    model = fresh_decoder(norm="layernorm", bias=True)
    seen = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == float(name.endswith("norm.weight"))).all(), name
            seen += 1
    assert seen == 2 * (2 * 2 + 4 + 2) + 2


def values(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_two_schemes_start_from_the_same_shared_weights():
    reference = values(fresh_decoder("none"))
    for name in SCHEMES:
        others = values(fresh_decoder(name))
        for parameter, value in reference.items():
            assert torch.equal(others[parameter], value), (name, parameter)


def test_a_value_depends_on_the_seed_and_the_name_and_not_on_what_else_there_is():
    first = values(fresh_decoder())
    torch.manual_seed(123)
    torch.rand(7)
    again, deeper = values(fresh_decoder()), values(fresh_decoder(layers=3))
    other = values(fresh_decoder(seed=1))
    for name, value in first.items():
        assert torch.equal(again[name], value)
        assert torch.equal(deeper[name], value)
    drawn = [name for name, value in first.items() if len(value.unique()) > 1]
    assert len(drawn) == 1 + 2 * 4
    assert all(not torch.equal(other[name], first[name]) for name in drawn)
    shapes_agree = [n for n in drawn if first[n].shape == (64, 64)]
    for one, two in itertools.combinations(shapes_agree, 2):
        assert not torch.equal(first[one], first[two])


def test_initial_values_are_the_same_in_another_process():
    names = ["embedding.weight", "blocks.1.mlp.up.weight", "scheme.table_LD"]
    program = (
        "import json\n"
        "from wherelm.model.decoder import Decoder, ModelConfig, initialize\n"
        "from wherelm.schemes import SCHEMES\n"
        "config = ModelConfig(layers=2, width=64, heads=4, context=32)\n"
        "learned = SCHEMES['learned']\n"
        f"model = Decoder(config, learned(learned.Config(), config.shape), {VOCABULARY})\n"
        "initialize(model, 0)\n"
        f"print(json.dumps([model.get_parameter(n).flatten()[:5].tolist() for n in {names}]))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    model = fresh_decoder("learned")
    here = [model.get_parameter(name).flatten()[:5].tolist() for name in names]
    assert json.loads(result.stdout) == here


def test_evaluation_is_deterministic_and_dropout_follows_the_global_generator():
    model = random_decoder(dropout=0.3)
    tokens = inputs(ragged_store(), 0)
    assert torch.equal(row_logits(model, tokens), row_logits(model, tokens))
    model.train()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(row_logits(model, tokens))
    assert torch.equal(drawn[0], drawn[1])
    assert difference(drawn[2], drawn[0]) > 1e-2


# Precision


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_at_least_float32(name):
    tokens = inputs(ragged_store(), 0)
    exact = row_logits(random_decoder(name, dtype=torch.float64), tokens)
    assert exact.dtype == torch.float64
    half = row_logits(random_decoder(name, dtype=torch.bfloat16), tokens)
    assert half.dtype == torch.float32
    assert difference(half, exact) <= 0.2
    assert half.std() > 0.3


# The loss


def loss_by_hand(model: Decoder, batch) -> float:
    """Sum of -log softmax of the target, in Python's own floats."""
    with torch.no_grad():
        logits_BTV = batch_logits(model, batch).double()
    total = 0.0
    for b, t in itertools.product(*map(range, batch.tokens_BT.shape)):
        if batch.loss_mask_BT[b, t]:
            row = logits_BTV[b, t].tolist()
            normalizer = math.log(sum(math.exp(value) for value in row))
            total += normalizer - row[batch.targets_BT[b, t]]
    return total


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_is_the_cross_entropy_computed_by_hand_on_a_padded_batch(side):
    model = random_decoder()
    batch = with_random_pads(padded(ragged_store(), range(4), side))
    assert 0 < batch.targets < batch.key_mask_BT.sum() < batch.tokens_BT.numel()
    logits_NV, _ = learned_logits(model, batch)
    assert logits_NV.shape == (batch.targets, VOCABULARY)
    assert next_token_loss(model, batch).item() == pytest.approx(
        loss_by_hand(model, batch), rel=1e-6
    )


def test_targets_that_are_only_read_do_not_count():
    model = random_decoder()
    batch = padded(ragged_store(), range(4))
    loss = next_token_loss(model, batch).item()
    unread_BT = batch.key_mask_BT & ~batch.loss_mask_BT
    assert unread_BT.any()
    targets_BT = torch.where(unread_BT, (batch.targets_BT + 1) % VOCABULARY, batch.targets_BT)
    assert next_token_loss(model, replace(batch, targets_BT=targets_BT)).item() == loss
    learned_BT = torch.where(batch.loss_mask_BT, (batch.targets_BT + 1) % VOCABULARY, targets_BT)
    assert next_token_loss(model, replace(batch, targets_BT=learned_BT)).item() != loss


def test_a_batch_without_any_target_has_loss_zero_and_no_gradient():
    model = random_decoder()
    batch = padded(ragged_store(), range(4))
    batch = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    loss = next_token_loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_rows():
    model = random_decoder(dtype=torch.float64)
    store = ragged_store()
    whole = next_token_loss(model, padded(store, range(4))).item()
    alone = [next_token_loss(model, padded(store, [i])).item() for i in range(4)]
    assert whole == pytest.approx(sum(alone), rel=1e-12)
    assert len({round(loss, 6) for loss in alone}) == 4
