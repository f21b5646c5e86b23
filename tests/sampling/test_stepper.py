"""The decoder laid out for one new token a row, beside the plain one.

Shapes: B rows, T slots, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import difference, inputs, padded, ragged_store, random_decoder, row_logits
from tests.schemes.test_conformance import CASES, VARIANTS, build
from wherelm.model.cache import KeyValueCache
from wherelm.runtime import autocast, multiplies_bfloat16
from wherelm.sampling import stepper
from wherelm.sampling.stepper import Norm, Product, Stepper

CPU = torch.device("cpu")
NEW = 3  # the last slots, read one at a time


def read_then_step(model, batch, keep: list[int]) -> torch.Tensor:
    """Logits (B, NEW, V) of the kept rows at the last slots; the other rows go after the first."""
    length = batch.tokens_BT.shape[1]
    prompt = slice(0, length - NEW)
    longest_B1 = batch.positions_BT[:, -1:] + 1
    cache = KeyValueCache(model.config.layers, len(batch.tokens_BT), length, CPU, longest_B1)
    mask_BT = None if bool(batch.key_mask_BT.all()) else batch.key_mask_BT
    model.hidden(
        batch.tokens_BT[:, prompt],
        batch.positions_BT[:, prompt],
        None if mask_BT is None else mask_BT[:, prompt],
        side="left",
        cache=cache,
    )
    step, rows, logits = Stepper(model, cache), torch.arange(len(batch.tokens_BT)), []
    for slot in range(length - NEW, length):
        logits.append(step(batch.tokens_BT[rows, slot], batch.positions_BT[rows, slot, None]))
        if len(logits) == 1:
            logits[0] = logits[0][keep]
            rows = torch.tensor(keep)
            step.keep_rows(rows)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_give_the_logits_of_each_message_alone(case, variant, monkeypatch):
    """Left-padded rows of unequal length, of which some are dropped on the way."""
    if variant == "default":
        # Also small matrices are shared out to threads.
        monkeypatch.setattr(stepper, "LARGE", 0)
    model, store = build(case, variant), ragged_store((9, 4, 6, 12))
    batch = padded(store, range(len(store)), "left")
    with torch.inference_mode():
        several = read_then_step(model, batch, [3, 0, 1])
    for logits_TV, index in zip(several, [3, 0, 1], strict=True):
        expected_TV = row_logits(model, inputs(store, index))[-NEW:]
        assert difference(logits_TV, expected_TV) <= 1e-5


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [0, stepper.LARGE])
def test_a_stacked_product_equals_its_linear_layers(large, rows, bias, threads, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(stepper, "LARGE", large)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layers = [nn.Linear(5, outputs, bias=bias) for outputs in (6, 3, 3)]
    x_BC = torch.randn(rows, 5)
    with torch.no_grad():
        product = Product(rows, *layers)
        packed = "packed" if stepper.ONE_DNN else "plain"
        assert product.form == ("plain" if large else "pieces" if rows == 1 else packed)
        if product.form == "pieces":
            assert len(product.weights) == threads
        expected_BN = torch.cat([layer(x_BC) for layer in layers], dim=-1)
        assert difference(product(x_BC), expected_BN) <= 1e-6


@pytest.mark.parametrize("emulated", [False, True])
def test_bfloat16_is_laid_out_for_one_dnn_only_where_the_processor_multiplies_it(
    emulated, monkeypatch
):
    monkeypatch.setattr(stepper, "LARGE", 0)
    if emulated:
        monkeypatch.setattr(stepper, "multiplies_bfloat16", lambda device: False)
    torch.manual_seed(0)
    layer, x_BC = nn.Linear(5, 6).bfloat16(), torch.randn(3, 5)
    with torch.no_grad():
        product = Product(3, layer)
        laid_out = stepper.ONE_DNN and multiplies_bfloat16(CPU) and not emulated
        assert product.form == ("packed" if laid_out else "plain")
        assert difference(product(x_BC).float(), layer(x_BC.bfloat16()).float()) <= 0.02


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_an_rms_norm_equals_torch_s_also_at_zero(dtype, tolerance):
    torch.manual_seed(0)
    x, weight_D = torch.randn(4, 3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    x[1] *= 1e-4
    x[2] = 0
    expected = torch.rms_norm(x, (8,), weight_D, eps=1e-6)
    assert difference(Norm(weight_D, eps=1e-6)(x), expected) <= tolerance


@pytest.mark.parametrize("large", [0, stepper.LARGE])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_steps_in_bfloat16_stay_near_the_plain_decoder(weights, large, monkeypatch):
    """Of bfloat16 weights, and by autocast; the products in bfloat16, or small and in float32.

    bfloat16 keeps 8 bits: a rounding unit of 0.4 % on logits of size 3.
    """
    monkeypatch.setattr(stepper, "LARGE", large)
    exact = random_decoder(layers=3, width=64)
    model, store = random_decoder(layers=3, width=64).to(weights), ragged_store((9, 9))
    precision = "bfloat16" if weights == torch.float32 else "float32"
    with torch.inference_mode(), autocast(precision, CPU):
        several = read_then_step(model, padded(store, range(2), "left"), [0, 1])
        for logits_TV, index in zip(several, range(2), strict=True):
            assert logits_TV.dtype == torch.float32
            expected_TV = row_logits(exact, inputs(store, index))[-NEW:]
            assert difference(logits_TV, expected_TV) <= 0.2
