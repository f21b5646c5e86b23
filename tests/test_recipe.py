import math

import pytest
import torch
import torch.nn.functional as F

from tests.benchmarks import recipe
from tests.test_config import composed
from wherelm.config import run_config
from wherelm.model.decoder import ModelConfig


def random_gpt():
    torch.manual_seed(0)
    model = recipe.GPT(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def test_the_recipe_scores_every_character_but_the_first_once():
    model = random_gpt()
    for length in (3 * recipe.CONTEXT + 1, 3 * recipe.CONTEXT + 20):
        ids = torch.randint(11, (length,))
        nats = []
        for start in range(0, length - 1, recipe.CONTEXT):
            window = ids[start : start + recipe.CONTEXT + 1]
            logits = model(window[None, :-1])[0]
            nats += F.cross_entropy(logits, window[1:], reduction="none").tolist()
        figures = recipe.whole_split(model, ids)
        assert figures["targets"] == len(nats) == length - 1
        assert figures["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


def test_the_recipes_future_characters_never_change_past_logits():
    model = random_gpt()
    tokens = torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().amax() > 1e-3


def test_the_recipe_learns_what_repeats():
    torch.manual_seed(0)
    ids = torch.arange(5).repeat(200)
    model = recipe.GPT(5)
    recipe.train(model, ids, steps=40)
    assert recipe.whole_split(model, ids)["loss"] < math.log(5) / 4


def test_the_recipes_learning_rate_peaks_after_the_warmup_and_ends_at_a_tenth():
    rates = [recipe.learning_rate(step) for step in range(recipe.STEPS)]
    assert max(rates) == rates[recipe.WARMUP] == recipe.PEAK
    assert rates[-1] == pytest.approx(recipe.FINAL, rel=1e-3)
    assert rates[0] == recipe.PEAK / recipe.WARMUP


def test_the_experiment_reads_characters_of_a_stream_with_the_nanochat_style_model():
    values = composed("experiment=shakespeare_characters", "data.train=plays.txt")
    config = run_config(values)
    assert (config.data.format, config.tokenizer.kind) == ("stream", "characters")
    assert config.data.validation_fraction == 0.1
    style = run_config(composed("model=nanochat_style")).model
    assert config.model == ModelConfig(**{**vars(style), "context": config.model.context})
    longer = run_config(composed("experiment=shakespeare_characters", *recipe.LONGER))
    assert longer.model.context > config.model.context
