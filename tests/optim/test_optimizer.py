import math

import pytest
import torch
from torch import nn

from wherelm.model.decoder import Decoder, ModelConfig, initialize
from wherelm.optim import updates
from wherelm.optim.optimizer import AdamWConfig, MuonConfig, Optimizer
from wherelm.optim.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Linear,
    WarmupStableDecay,
    learning_rate_factor,
)
from wherelm.optim.updates import AdamW, Muon, orthogonalize
from wherelm.schemes import SCHEMES, build_scheme


def decoder(seed=0, **options):
    config = ModelConfig(layers=2, width=16, heads=2, context=16, **options)
    scheme = build_scheme(SCHEMES["learned"].Config(), config.shape)
    model = Decoder(config, scheme, 20)
    initialize(model, seed)
    return model


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 20, (4, 9))
        logits = model(tokens[:, :-1], torch.arange(8)[None])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step((step + 0.5) / 20, clip=1.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_rises_in_a_line_and_peaks_at_one(name):
    schedule = SCHEDULES[name](warmup=0.1)
    assert learning_rate_factor(schedule, 0.0) == 0
    assert learning_rate_factor(schedule, 0.05) == pytest.approx(0.5)
    assert learning_rate_factor(schedule, 0.1) == pytest.approx(1.0)


def test_a_warm_up_never_meets_the_cool_down():
    WarmupStableDecay(warmup=0.5, cooldown=0.5)
    with pytest.raises(ValueError, match=r"warmup=0\.6, schedule\.cooldown=0\.5: expected"):
        WarmupStableDecay(warmup=0.6, cooldown=0.5)


def test_schedules_by_hand():
    assert learning_rate_factor(Cosine(warmup=0.0, final=0.1), 0.5) == pytest.approx(0.55)
    assert learning_rate_factor(Cosine(warmup=0.2, final=0.1), 1.0) == pytest.approx(0.1)
    assert learning_rate_factor(Linear(warmup=0.0, final=0.2), 0.75) == pytest.approx(0.4)
    assert learning_rate_factor(Constant(warmup=0.0), 0.99) == 1.0
    wsd = WarmupStableDecay(warmup=0.0, cooldown=0.4, final=0.0)
    assert learning_rate_factor(wsd, 0.6) == pytest.approx(1.0)
    assert learning_rate_factor(wsd, 0.8) == pytest.approx(0.5)
    assert learning_rate_factor(wsd, 1.7) == pytest.approx(0.0)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 24, 24), (2, 64, 16), (2, 16, 64)):
        generator = torch.Generator().manual_seed(0)
        matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, values, vh = torch.linalg.svd(matrices, full_matrices=False)
        turned = u.mT @ orthogonalize(matrices) @ vh.mT
        assert torch.allclose(
            turned, torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1)), atol=1e-4
        )
        # The five polynomials are made for values down to about a hundredth of the norm.
        large = values > 0.01 * matrices.norm(dim=(-2, -1))[:, None]
        assert large.float().mean() > 0.9
        assert (turned.diagonal(dim1=-2, dim2=-1)[large] - 1).abs().max() < 0.3


@pytest.mark.parametrize("bfloat16", [False, True])
def test_orthogonalised_in_bfloat16_an_update_has_nearly_the_same_direction(bfloat16, monkeypatch):
    """Fifteen products, each rounded by up to 0.4 %: some percent of an update."""
    monkeypatch.setattr(updates, "multiplies_bfloat16", lambda device: bfloat16)
    matrices = torch.randn((3, 48, 32), generator=torch.Generator().manual_seed(0))
    exact, actual = orthogonalize(matrices.double()), orthogonalize(matrices)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.double(), exact, atol=1e-5) != bfloat16
    cosine = torch.nn.functional.cosine_similarity(actual.double().flatten(1), exact.flatten(1))
    assert cosine.min() > 0.995


def test_stacked_muon_equals_one_matrix_at_a_time():
    def run(stacked):
        torch.manual_seed(0)
        matrices = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
        groups = [matrices] if stacked else [[m] for m in matrices]
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        optimizers = [Muon([{"params": group}], **options) for group in groups]
        for _ in range(3):
            for m in matrices:
                m.grad = torch.randn(8, 8)
            for optimizer in optimizers:
                optimizer.step()
        return torch.stack([m.detach() for m in matrices])

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


def test_a_step_of_muon_by_hand():
    """Nesterov's momentum, and a decay that the learning rate scales."""
    torch.manual_seed(0)
    start, *gradients = torch.randn(3, 4, 6, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([{"params": [parameter]}], lr=0.1, momentum=0.9, weight_decay=0.5)
    average, expected = torch.zeros_like(start), start
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient
        update = orthogonalize(0.1 * gradient + 0.9 * average)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update * 0.2 * 6**0.5
    torch.testing.assert_close(parameter.detach(), expected)


def test_an_update_of_muon_has_rms_near_two_tenths_of_the_learning_rate():
    parameter = nn.Parameter(torch.zeros(32, 96))
    parameter.grad = torch.randn(32, 96, generator=torch.Generator().manual_seed(1))
    Muon([{"params": [parameter]}], lr=1.0, momentum=0.95, weight_decay=0.0).step()
    assert parameter.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.1)


def test_adamw_equals_that_of_torch_to_the_last_bit():
    def run(make):
        torch.manual_seed(0)
        matrix, vector = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))
        groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "lr": 0.3}]
        optimizer = make(groups)
        for step in range(4):
            matrix.grad = torch.randn(5, 7)
            vector.grad = torch.randn(9) if step != 1 else None
            optimizer.step()
        return [p.detach() for p in (matrix, vector)]

    ours = run(lambda g: AdamW(g, lr=0.2, weight_decay=0.0, beta1=0.8, beta2=0.9, eps=1e-6))
    settings = {"lr": 0.2, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
    for a, b in zip(ours, run(lambda g: torch.optim.AdamW(g, **settings)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_updated_exactly_by_one_optimizer(config, tied):
    model = decoder(tied=tied)
    optimizer = Optimizer(model, config, Constant(warmup=0.0))
    listed = [id(p) for part in optimizer.parts for g in part.param_groups for p in g["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, 3)
    unchanged = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert unchanged == []


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig(weight_decay=0.1)])
def test_decay_acts_on_the_decoder_s_matrices_and_on_no_scheme_s_parameter(name, config):
    shape = ModelConfig(layers=2, width=16, heads=2, context=16)
    model = Decoder(shape, build_scheme(SCHEMES[name].Config(), shape.shape), 20)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed = {
        names[parameter]
        for part in Optimizer(model, config, Constant()).parts
        for group in part.param_groups
        for parameter in group["params"]
        if group["weight_decay"] > 0
    }
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    expected = {name for name in matrices if not name.startswith("scheme.")}
    if config.name == "muon":
        expected -= {"embedding.weight", "head.weight"}
    assert decayed == expected


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()])
def test_a_restored_optimizer_goes_on_to_the_same_bits(config):
    straight = decoder()
    optimizer = Optimizer(straight, config, Cosine())
    train(straight, optimizer, 6)

    first = decoder()
    optimizer = Optimizer(first, config, Cosine())
    train(first, optimizer, 3)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    second = decoder(seed=5)
    second.load_state_dict(first.state_dict())
    optimizer = Optimizer(second, config, Cosine())
    optimizer.load_state(state)
    train(second, optimizer, 3, start=3)
    for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_clipping_bounds_the_norm_and_reports_the_one_before():
    model = nn.Linear(3, 3, bias=False)
    model.weight.grad = torch.full((3, 3), 2.0)
    optimizer = Optimizer(model, AdamWConfig(), Constant())
    assert optimizer.step(0.5, clip=1.0) == pytest.approx(6.0)
    assert math.isclose(optimizer.learning_rate, AdamWConfig().learning_rate)
