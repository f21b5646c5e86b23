from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers import (
    inputs,
    ragged_store,
    random_decoder,
    row_logits,
)
from tests.schemes.conftest import scheme
from wherelm.schemes import SCHEMES
from wherelm.schemes.base import PositionScheme


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_documented_and_knows_its_name(name):
    assert SCHEMES[name].Config().name == name
    assert SCHEMES[name].__doc__
    assert issubclass(SCHEMES[name], PositionScheme)


def test_the_base_class_is_the_scheme_none_and_every_hook_the_identity():
    none = scheme("none")
    assert type(none) is PositionScheme
    positions, x_BTD, q_BHTK = torch.arange(5)[None], torch.randn(1, 5, 8), torch.randn(1, 2, 5, 4)
    assert none.place(positions) is positions
    assert none.embed(x_BTD, positions) is x_BTD
    assert none.rotate(q_BHTK, positions, "query") is q_BHTK
    assert none.shift(q_BHTK, None) is q_BHTK
    assert none.bias(positions, positions) is None
    assert none.for_layer(1) is none
    assert list(none.parameters()) == []


@pytest.mark.parametrize("name", SCHEMES)
def test_a_copy_of_a_used_model_gives_the_same_logits(name):
    model = random_decoder(name)
    tokens = inputs(ragged_store(), 0)
    logits_TV = row_logits(model, tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(row_logits(twin, tokens), logits_TV)
    assert set(twin.state_dict()) == {name for name, _ in model.named_parameters()}


def test_settings_that_act_give_no_warning():
    for name in SCHEMES:
        one = scheme(name, width=128, heads=4, context=128, layers=4)
        assert one.warnings() == [], name
