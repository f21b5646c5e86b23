"""What every position scheme must keep, whatever it does: one suite over `SCHEMES`.

Every parameter is random and there are two layers or more. A new scheme joins by its entry in
`SCHEMES` and its equation in tests/oracle.py.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mode

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    VOCABULARY,
    alone_logits,
    batch_logits,
    difference,
    inputs,
    packed,
    padded,
    ragged_store,
    random_decoder,
    real_logits,
    row_logits,
    with_random_pads,
)
from tests.oracle import NaiveDecoder
from wherelm.batches.batch import Batch
from wherelm.batches.sampler import Sampler
from wherelm.model import attention
from wherelm.model.cache import KeyValueCache
from wherelm.model.decoder import ModelConfig, next_token_loss
from wherelm.runtime import autocast
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate
from wherelm.schemes import SCHEMES
from wherelm.schemes.patterns import Layer

# Settings beside the defaults that take another path through a scheme.
ROPE, NONE, FOX, OFFSET = (
    Layer(SCHEMES[name].Config()) for name in ("rope", "none", "fox", "key_offset")
)
FURTHER_OPTIONS = {
    "rope": {
        "narrow": {"fraction": 0.5, "base": 100.0},
        "p": {"p": 0.5},
        "linear": {"scaling": "linear", "factor": 4.0},
        "ntk": {"scaling": "ntk", "factor": 4.0},
        "yarn": {"scaling": "yarn", "factor": 4.0},
        "llama3": {"scaling": "llama3", "factor": 4.0},
        "dynamic": {"scaling": "dynamic", "factor": 2.0},
        "self_extend": {"scaling": "self_extend", "factor": 4.0},
    },
    "key_offset": {"all": {"fraction": 0.0}},
    "drope": {"dropped": {"drop_at": 0.0}},
    "cope": {"few": {"positions": 3}},
    "t5": {"few": {"buckets": 4, "max_distance": 6}},
    "kerple": {"power": {"form": "power"}},
    "hybrid": {
        "window": {"pattern": (replace(ROPE, window=4), NONE)},
        "fox": {"pattern": (replace(ROPE, window=4), FOX)},
        "offset": {"pattern": (replace(OFFSET, window=4), ROPE)},
    },
    "randomised": {"learned": {"scheme": SCHEMES["learned"].Config()}},
}
CASES = {name: (name, {}) for name in SCHEMES} | {
    f"{name}-{label}": (name, options)
    for name, several in FURTHER_OPTIONS.items()
    for label, options in several.items()
}
VARIANTS = {
    "default": {},
    "grouped-swiglu": {
        "kv_heads": 2,
        "norm": "layernorm",
        "mlp": "swiglu",
        "bias": True,
        "qk_norm": False,
        "tied": True,
        "softcap": 3.0,
        "score_scale": "learned",
        "layers": 3,
    },
    "windowed-gelu": {
        "kv_heads": 1,
        "norm": "layernorm",
        "mlp": "gelu",
        "window": 5,
        "score_scale": "log",
    },
}
ROWS = [[0, 1], [2, 3]]
CPU = torch.device("cpu")


pytestmark = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture
def store():
    return ragged_store()


@pytest.fixture(autouse=True)
def kernel(request, monkeypatch):
    """One variant runs on torch's fused kernel, which short rows on a CPU would not see else."""
    if request.node.callspec.params.get("variant") == "grouped-swiglu":
        monkeypatch.setattr(attention, "SHORT", 0)


def build(case, variant="default", **changes):
    name, options = case
    # A whole round of the default pattern.
    layers = {"layers": 4} if (name, options) == ("hybrid", {}) else {}
    return random_decoder(name, options, **{**VARIANTS[variant], **changes, **layers})


def arrangements(store) -> dict[str, Batch]:
    """The same examples in every form of a batch, with random ids in the empty slots."""
    everything = range(len(store))
    return {
        "right": with_random_pads(padded(store, everything, "right")),
        "left": with_random_pads(padded(store, everything, "left")),
        "packed": with_random_pads(packed(store, ROWS)),
    }


def gradients(model, batches: list[Batch], targets: int | None = None) -> dict[str, torch.Tensor]:
    """Of the loss of all batches over the number of their targets, accumulated as in training."""
    model.zero_grad()
    targets = sum(batch.targets for batch in batches) if targets is None else targets
    for batch in batches:
        (next_token_loss(model, batch) / targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected, tolerance: float) -> None:
    """Norm-wise for each tensor; one that is zero but for rounding is held to the others' size."""
    assert actual.keys() == expected.keys()
    floor = 1e-2 * max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        error = float((actual[name] - gradient).norm())
        assert error <= tolerance * max(float(gradient.norm()), floor), (name, error)


@every_variant
def test_the_suite_is_not_vacuous(case, variant, store):
    """Tokens and their order matter, logits are far from equal, and every parameter learns."""
    model = build(case, variant)
    tokens = inputs(store, 0)
    logits_TV = row_logits(model, tokens)
    assert logits_TV.std() > 0.3
    for other in (tokens.roll(1), torch.cat((tokens[1:2], tokens[:1], tokens[2:]))):
        assert difference(row_logits(model, other)[-1], logits_TV[-1]) > 1e-4
    received = gradients(model, [padded(store, range(len(store)))])
    for name, _ in model.named_parameters():
        # A key's bias adds the same to all scores of a query, so without rotation it has no effect.
        assert name.endswith("key.bias") or received[name].norm() > 1e-6, name


@every_variant
def test_naive_float64_model_agrees(case, variant, store):
    exact, fast = build(case, variant, dtype=torch.float64), build(case, variant)
    naive = NaiveDecoder(exact)
    for index in range(len(store)):
        tokens = inputs(store, index)
        expected = torch.from_numpy(naive.logits(tokens.tolist()))
        assert difference(row_logits(exact, tokens), expected) <= 1e-6
        assert difference(row_logits(fast, tokens), expected) <= 1e-5


@pytest.mark.parametrize("form", ["right", "left", "packed"])
@every_variant
def test_padded_and_packed_logits_equal_those_of_each_message_alone(case, variant, form, store):
    model = build(case, variant)
    several = real_logits(model, arrangements(store)[form])
    assert len(several) == len(store)
    for index, logits_TV in enumerate(several):
        assert difference(logits_TV, alone_logits(model, store, index)) <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@every_variant
def test_every_form_of_a_batch_has_the_same_loss_and_gradients(
    case, variant, dtype, tolerance, store
):
    model = build(case, variant, dtype=dtype)
    forms = arrangements(store)
    losses = {form: next_token_loss(model, batch).item() for form, batch in forms.items()}
    expected = gradients(model, [forms["right"]])
    for form in ("left", "packed"):
        assert losses[form] == pytest.approx(losses["right"], rel=tolerance)
        assert_same_gradients(gradients(model, [forms[form]]), expected, tolerance)


def partitions(items: list[int]) -> list[list[list[int]]]:
    """All ways to split these into groups."""
    if not items:
        return [[]]
    first, *rest = items
    ways = []
    for groups in partitions(rest):
        ways.append([[first], *groups])
        for i in range(len(groups)):
            ways.append([*groups[:i], [first, *groups[i]], *groups[i + 1 :]])
    return ways


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_gradients_of_all_splits_into_micro_batches_agree(case, dtype, tolerance, store):
    """Micro-batches add up their gradients, each over the targets of all of them."""
    model = build(case, "grouped-swiglu", dtype=dtype, layers=2)
    ways = partitions(list(range(len(store))))
    assert len(ways) == 15
    whole = padded(store, range(len(store)))
    expected = gradients(model, [whole])
    parts = {
        tuple(group): gradients(model, [padded(store, group)], whole.targets)
        for group in {tuple(group) for way in ways for group in way}
    }
    for way in ways:
        several = [parts[tuple(group)] for group in way]
        actual = {name: sum(part[name] for part in several) for name in expected}
        assert_same_gradients(actual, expected, tolerance)


@pytest.mark.parametrize("form", ["right", "left", "packed"])
@every_variant
def test_future_tokens_never_change_past_logits(case, variant, form, store):
    model = build(case, variant)
    batch = arrangements(store)[form]
    with torch.no_grad():
        before_BTV = batch_logits(model, batch)
    for slot in range(1, batch.tokens_BT.shape[1]):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[:, slot:] = (tokens_BT[:, slot:] + 5) % VOCABULARY
        with torch.no_grad():
            after_BTV = batch_logits(model, replace(batch, tokens_BT=tokens_BT))
        assert difference(after_BTV[:, :slot], before_BTV[:, :slot]) <= 1e-6
        assert difference(after_BTV[:, slot], before_BTV[:, slot]) > 1e-3


def read_in_chunks(model, tokens_BT, positions_BT, key_mask_BT, sizes) -> torch.Tensor:
    """Logits (B, T, V) of a sequence that a cache receives in chunks of these sizes.

    Rows end with the last chunk, each at its own length.
    """
    batch, length = tokens_BT.shape
    assert sum(sizes) == length
    cache = KeyValueCache(model.config.layers, batch, length, CPU, positions_BT[:, -1:] + 1)
    parts = []
    for part in torch.arange(length).split(sizes):
        mask_BT = None if key_mask_BT is None else key_mask_BT[:, part]
        with torch.no_grad():
            parts.append(model(tokens_BT[:, part], positions_BT[:, part], mask_BT, cache=cache))
    assert cache.length == length
    return torch.cat(parts, dim=1)


@every_variant
def test_cached_logits_equal_full_logits_for_every_prefix(case, variant, store):
    model = build(case, variant)
    tokens = inputs(store, 0)
    full_TV, length = row_logits(model, tokens), len(tokens)
    positions_1T = torch.arange(length)[None]
    for prefix in range(1, length + 1):
        sizes = [prefix] + [1] * (length - prefix)
        cached_TV = read_in_chunks(model, tokens[None], positions_1T, None, sizes)[0]
        assert difference(cached_TV, full_TV) <= 1e-5


@every_variant
def test_prefill_in_two_chunks_equals_full_logits(case, variant, store):
    model = build(case, variant)
    tokens = inputs(store, 0)
    full_TV, length = row_logits(model, tokens), len(tokens)
    positions_1T = torch.arange(length)[None]
    for first in range(1, length):
        sizes = [first, length - first]
        cached_TV = read_in_chunks(model, tokens[None], positions_1T, None, sizes)[0]
        assert difference(cached_TV, full_TV) <= 1e-5


@every_variant
def test_a_left_padded_cache_equals_each_message_alone(case, variant, store):
    """Prompts of different lengths, one of them a single token, and their continuations."""
    model = build(case, variant)
    batch = arrangements(store)["left"]
    length = batch.tokens_BT.shape[1]
    for sizes in ([length], [length - 3, 1, 1, 1], [3, 4, length - 7], [1] * length):
        cached_BTV = read_in_chunks(
            model, batch.tokens_BT, batch.positions_BT, batch.key_mask_BT, sizes
        )
        for index, mask in enumerate(batch.key_mask_BT):
            alone_TV = row_logits(model, inputs(store, index))
            assert difference(cached_BTV[index, mask], alone_TV) <= 1e-5


def test_dropping_rows_of_a_cache_leaves_the_others_as_they_were(case, store):
    model = build(case, "grouped-swiglu")
    batch = arrangements(store)["left"]
    length = batch.tokens_BT.shape[1]
    longest_B1 = batch.positions_BT[:, -1:] + 1
    cache = KeyValueCache(model.config.layers, len(store), length, CPU, longest_B1)
    start, end = slice(0, length - 2), slice(length - 2, length)
    rows = torch.tensor([3, 0])
    with torch.no_grad():
        model(
            batch.tokens_BT[:, start],
            batch.positions_BT[:, start],
            batch.key_mask_BT[:, start],
            cache=cache,
        )
        cache.keep_rows(rows)
        last_BTV = model(
            batch.tokens_BT[rows, end],
            batch.positions_BT[rows, end],
            batch.key_mask_BT[rows, end],
            cache=cache,
        )
    for row, index in enumerate(rows.tolist()):
        alone_TV = row_logits(model, inputs(store, index))
        assert difference(last_BTV[row], alone_TV[-2:]) <= 1e-5


def greedy_by_hand(model, prompt: list[int], steps: int, end: int | None = None) -> list[int]:
    """The likeliest token again and again, each from the whole row and of nothing before it."""
    row, limit = list(prompt), model.scheme.limit(len(prompt))
    for _ in range(steps):
        token = int(row_logits(model, row, longest=limit or 0)[-1].argmax())
        if token == end:
            break
        row.append(token)
    return row[len(prompt) :]


@every_variant
def test_batched_greedy_equals_single_greedy(case, variant, store):
    """Prompts of unequal length, one of them a single token; rows end at different steps."""
    model = build(case, variant, dtype=torch.float64, tied=False)
    prompts, steps = [inputs(store, i).tolist() for i in range(len(store))], 7
    free = [greedy_by_hand(model, prompt, steps) for prompt in prompts]
    end = mode(token for reply in free for token in reply)
    expected = [greedy_by_hand(model, prompt, steps, end) for prompt in prompts]
    assert len({len(reply) for reply in expected}) > 1
    sampling = Sampling(greedy=True, max_tokens=steps)
    batched = [reply.tokens for reply in generate(model, prompts, sampling, end)]
    single = [generate(model, [prompt], sampling, end)[0].tokens for prompt in prompts]
    assert single == expected
    assert batched == expected


@pytest.mark.parametrize("form", ["right", "left", "packed"])
@pytest.mark.parametrize("lengths", [(9, 1, 6, 4), (1, 1, 1, 1)])
def test_logits_and_gradients_are_finite_everywhere(case, lengths, form):
    """In empty slots too, and where every row is a single token."""
    model = build(case, "grouped-swiglu")
    batch = arrangements(ragged_store(lengths))[form]
    assert batch_logits(model, batch).isfinite().all()
    for name, gradient in gradients(model, [batch]).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_without_any_real_token_is_finite_and_changes_nothing(case, side, store):
    model = build(case)
    batch = padded(store, range(len(store)), side)
    masks = {n: getattr(batch, n).clone() for n in ("key_mask_BT", "loss_mask_BT", "segments_BT")}
    for mask_BT in masks.values():
        mask_BT[0] = 0
    emptied = replace(batch, **masks)
    assert batch_logits(model, emptied).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, [emptied]).values())
    for index, logits_TV in enumerate(real_logits(model, emptied), start=1):
        assert difference(logits_TV, alone_logits(model, store, index)) <= 1e-5


def test_adding_a_constant_to_all_positions_acts_as_the_scheme_says(case, store):
    model = build(case, dtype=torch.float64)
    tokens_1T = inputs(store, 0)[None]
    positions_1T = torch.arange(tokens_1T.shape[1])[None]
    with torch.no_grad():
        change = difference(model(tokens_1T, positions_1T + 7), model(tokens_1T, positions_1T))
    assert change <= 1e-5 if model.scheme.shift_invariant else change > 1e-2


def test_runs_at_four_times_the_trained_length_or_says_why_not(case):
    model = build(case)
    length = 4 * CONTEXT
    tokens_1T = torch.arange(length)[None] % VOCABULARY
    reason = ""
    try:
        with torch.no_grad():
            logits = model(tokens_1T, torch.arange(length)[None])
    except ValueError as error:
        reason = str(error)
    if reason:
        assert case[0] in reason
        assert str(CONTEXT) in reason
        assert "\n" not in reason
    else:
        assert logits.isfinite().all()


def test_the_same_batch_can_be_evaluated_and_then_learned(case, store):
    """What a scheme remembers of a forward pass without gradients must not break one with them."""
    model = build(case)
    batch = padded(store, range(len(store)))
    with torch.inference_mode():
        evaluated = next_token_loss(model, batch).item()
    loss = next_token_loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(evaluated, rel=1e-6)


def test_positions_changed_in_place_are_noticed(case, store):
    model = build(case)
    tokens_1T = inputs(store, 0)[None]
    positions_1T = torch.arange(tokens_1T.shape[1])[None]
    with torch.no_grad():
        model(tokens_1T, positions_1T)
        # Another order, so that shift-invariant schemes change too.
        positions_1T.copy_(positions_1T.flip(1))
        again = model(tokens_1T, positions_1T)
        expected = model(tokens_1T, positions_1T.clone())
    assert difference(again, expected) <= 1e-6


# The default's own path: the default model on bucketed batches, in bfloat16 by autocast.


def default_path(case):
    name, options = case
    default = ModelConfig()
    shape = {key: getattr(default, key) for key in ("layers", "width", "heads", "context")}
    model = random_decoder(name, options, **shape)
    store = ragged_store((18, 3, 11, 1, 14, 2))
    sampler = Sampler(store.lengths, 36, "bucketed", seed=0)
    indices = [part for rows in sampler.batches_of(0) for part in sampler.micro_batches(rows, 36)]
    assert len(indices) > 2
    assert sorted(i for group in indices for i in group) == list(range(len(store)))
    return model, store, indices


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_the_default_path_gives_the_logits_of_each_message_alone(case, precision, tolerance):
    """bfloat16 keeps 8 bits: a rounding unit of 0.4 % on logits of size 3, through four layers."""
    model, store, groups = default_path(case)
    assert any(len({int(store.lengths[i]) for i in group}) > 1 for group in groups)
    for group in groups:
        for side in ("right", "left"):
            batch = with_random_pads(padded(store, group, side))
            with autocast(precision, CPU):
                several = real_logits(model, batch)
            for index, logits_TV in zip(group, several, strict=True):
                assert logits_TV.dtype == torch.float32
                exact_TV = alone_logits(model, store, index)
                assert difference(logits_TV, exact_TV) <= tolerance


def test_future_tokens_never_change_past_logits_under_autocast(case):
    model, store, groups = default_path(case)
    batch = with_random_pads(padded(store, groups[-1]))
    with torch.no_grad(), autocast("bfloat16", CPU):
        before_BTV = batch_logits(model, batch)
    for slot in range(1, batch.tokens_BT.shape[1], 3):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[:, slot:] = (tokens_BT[:, slot:] + 5) % VOCABULARY
        with torch.no_grad(), autocast("bfloat16", CPU):
            after_BTV = batch_logits(model, replace(batch, tokens_BT=tokens_BT))
        assert difference(after_BTV[:, :slot], before_BTV[:, :slot]) <= 1e-6
        assert difference(after_BTV[:, slot], before_BTV[:, slot]) > 1e-3


def test_bucketed_micro_batches_have_the_gradients_of_one_padded_batch(case):
    model, store, groups = default_path(case)
    whole = gradients(model, [padded(store, range(len(store)))])
    bucketed = [padded(store, group) for group in groups]
    assert_same_gradients(gradients(model, bucketed), whole, 1e-5)
    with autocast("bfloat16", CPU):
        assert_same_gradients(gradients(model, bucketed), whole, 0.05)
