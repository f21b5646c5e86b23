"""The vocabulary head in chunks against cross entropy over all logits at once."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import difference, padded, ragged_store, random_decoder
from wherelm.model import cross_entropy
from wherelm.model.cross_entropy import head_cross_entropy
from wherelm.model.decoder import learned_logits, next_token_loss

ROWS, VOCABULARY, WIDTH = 23, 11, 8


def head(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets_N = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return x_ND.requires_grad_(), weight_VD.requires_grad_(), targets_N


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("multiple", [1, 6, 64])
@pytest.mark.parametrize("rows", [WIDTH, WIDTH + 1, ROWS, 1000])
def test_chunks_give_the_loss_and_gradients_of_all_logits_at_once(
    monkeypatch, rows, multiple, softcap
):
    monkeypatch.setattr(cross_entropy, "CHUNK", rows * VOCABULARY)
    monkeypatch.setattr(cross_entropy, "MULTIPLE", multiple)
    x_ND, weight_VD, targets_N = head()
    logits_NV = x_ND @ weight_VD.T
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    expected = F.cross_entropy(logits_NV, targets_N, reduction="sum") * 0.7
    expected_grads = torch.autograd.grad(expected, (x_ND, weight_VD))
    loss = head_cross_entropy(x_ND, weight_VD, targets_N, softcap) * 0.7
    grads = torch.autograd.grad(loss, (x_ND, weight_VD))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert expected_grad.abs().max() > 0.1
        assert difference(grad, expected_grad) <= 1e-12


def test_gradients_agree_with_finite_differences():
    x_ND, weight_VD, targets_N = head()

    def loss(x_ND, weight_VD):
        return head_cross_entropy(x_ND, weight_VD, targets_N, 3.0)

    assert torch.autograd.gradcheck(loss, (x_ND, weight_VD))


def test_only_the_gradients_that_are_wanted_are_needed():
    x_ND, weight_VD, targets_N = head()
    with torch.no_grad():
        unlearned = head_cross_entropy(x_ND, weight_VD, targets_N)
    assert not unlearned.requires_grad
    frozen = head_cross_entropy(x_ND, weight_VD.detach(), targets_N)
    (x_grad_ND,) = torch.autograd.grad(frozen, x_ND)
    whole = head_cross_entropy(x_ND, weight_VD, targets_N)
    assert frozen.item() == whole.item() == unlearned.item()
    assert difference(x_grad_ND, torch.autograd.grad(whole, x_ND)[0]) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_learns_from_chunks_what_it_learns_from_all_logits(monkeypatch, tied):
    monkeypatch.setattr(cross_entropy, "CHUNK", 100)
    model = random_decoder(dtype=torch.float64, tied=tied, softcap=5.0)
    batch = padded(ragged_store(lengths=(16, 1, 13, 14, 15, 12, 16, 11)), range(8))
    assert batch.targets > 2 * model.config.width  # three chunks or more
    next_token_loss(model, batch).backward()
    in_chunks = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits_NV, targets_N = learned_logits(model, batch)
    F.cross_entropy(logits_NV, targets_N, reduction="sum").backward()
    for grad, parameter in zip(in_chunks, model.parameters(), strict=True):
        assert difference(grad, parameter.grad) <= 1e-12


def test_huge_logits_stay_finite_and_bfloat16_products_give_a_float32_loss():
    x_ND, weight_VD, targets_N = head(torch.float32)
    assert torch.isfinite(head_cross_entropy(x_ND * 1e4, weight_VD, targets_N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_cross_entropy(x_ND, weight_VD, targets_N)
    assert loss.dtype == torch.float32
    exact = head_cross_entropy(x_ND, weight_VD, targets_N)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    (grad,) = torch.autograd.grad(loss, weight_VD)
    assert grad.dtype == torch.float32
