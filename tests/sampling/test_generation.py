"""Sampling: the filters against values computed by hand, and batches against single rows."""

import math

import pytest
import torch

from tests.helpers import CONTEXT, VOCABULARY, random_decoder, row_logits
from wherelm.sampling import generation as module
from wherelm.sampling.drawing import (
    Sampling,
    divide_by_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sampling_probabilities,
)
from wherelm.sampling.generation import generate, stream_tokens
from wherelm.sampling.samples import write_samples
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.schemes.patterns import Hybrid, Layer
from wherelm.seeds import torch_generator

END = 2
PROMPTS = [[1, 5, 7, 3, 9], [1, 4], [1, 8, 6, 11, 3, 3, 10], [1]]
INF = math.inf


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kept(logits_BV: torch.Tensor) -> list[bool]:
    return (logits_BV[0] > -INF).tolist()


def tokens_of(replies: list[module.Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("max_tokens", 0),
    ],
)
def test_an_impossible_setting_is_one_line_with_its_name_and_value(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value}: expected [^\n]+$"):
        Sampling(**{name: value})


def test_the_limits_of_each_setting_are_allowed():
    Sampling(temperature=0, top_k=1, top_p=1, min_p=1, repetition_penalty=0.5, max_tokens=1)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits_BV = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    seen_BV = torch.tensor([[True, True, False, False]])
    expected = torch.tensor([[1.5, -6.0, 3.0, -3.0]])
    assert torch.equal(penalize_repetition(logits_BV, seen_BV, 2.0), expected)


def test_temperature_one_half_squares_the_odds():
    p_BV = divide_by_temperature(logits_of(0.6, 0.3, 0.1), 0.5).softmax(-1)
    expected = torch.tensor([[0.36, 0.09, 0.01]]) / 0.46
    torch.testing.assert_close(p_BV, expected)


@pytest.mark.parametrize("temperature", [1e-40, 1e-46, 5e-324])
def test_the_smallest_temperature_stays_finite_and_takes_the_likeliest(temperature):
    p_BV = divide_by_temperature(torch.tensor([[70.0, 80.0, -90.0]]), temperature).softmax(-1)
    assert p_BV.tolist() == [[0.0, 1.0, 0.0]]


def test_top_k_keeps_the_k_largest_and_ties():
    assert kept(keep_top_k(logits_of(0.1, 0.4, 0.2, 0.3), 2)) == [False, True, False, True]
    assert kept(keep_top_k(logits_of(0.25, 0.4, 0.25, 0.1), 2)) == [True, True, True, False]
    assert kept(keep_top_k(logits_of(0.5, 0.5), 9)) == [True, True]


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_p():
    logits_BV = logits_of(0.125, 0.5, 0.125, 0.25)
    assert kept(keep_top_p(logits_BV, 0.45)) == [False, True, False, False]
    assert kept(keep_top_p(logits_BV, 0.55)) == [False, True, False, True]
    assert kept(keep_top_p(logits_BV, 0.8)) == [True, True, False, True]
    for p in (1e-9, 1e-46):  # the second is 0 in float32
        assert kept(keep_top_p(logits_BV, p)) == [False, True, False, False]


def test_top_p_ends_with_the_token_that_reaches_p_exactly():
    halves, quarters = torch.zeros(1, 2), torch.zeros(1, 4)
    assert kept(keep_top_p(halves, 0.5)) == [True, False]
    assert kept(keep_top_p(quarters, 0.5)) == [True, True, False, False]
    assert kept(keep_top_p(quarters, 0.75)) == [True, True, True, False]


def test_min_p_is_relative_to_the_likeliest():
    logits_BV = logits_of(0.6, 0.3, 0.1)
    assert kept(keep_min_p(logits_BV, 0.4)) == [True, True, False]
    assert kept(keep_min_p(logits_BV, 0.6)) == [True, False, False]
    assert kept(keep_min_p(logits_BV, 1.0)) == [True, False, False]


def test_filters_follow_each_other_after_the_temperature():
    # Squared odds: 0.25, 0.0625, 0.04, 0.0025. top-k leaves three of the mass 0.3525, whose first
    # holds 0.709 and whose second brings it to 0.887.
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.8)
    p_BV = sampling_probabilities(logits_of(0.5, 0.25, 0.2, 0.05), sampling)
    torch.testing.assert_close(p_BV, torch.tensor([[0.8, 0.2, 0.0, 0.0]]))
    # Without top-k two tokens hold 0.880: at p = 0.885 a third is needed, with top-k it is not.
    wide = sampling_probabilities(
        logits_of(0.5, 0.25, 0.2, 0.05), Sampling(temperature=0.5, top_p=0.885)
    )
    narrow = sampling_probabilities(
        logits_of(0.5, 0.25, 0.2, 0.05), Sampling(temperature=0.5, top_k=3, top_p=0.885)
    )
    assert [int((p > 0).sum()) for p in (wide, narrow)] == [3, 2]


@pytest.mark.parametrize(("top_p", "tokens"), [(0.95, 2), (0.999, 3), (1.0, 4)])
def test_top_p_cuts_whatever_lies_below_1(top_p, tokens):
    logits_BV = logits_of(0.9, 0.06, 0.0395, 0.0005)
    p_BV = sampling_probabilities(logits_BV, Sampling(temperature=1.0, top_p=top_p))
    assert int((p_BV > 0).sum()) == tokens


def test_draws_are_the_quantiles_and_never_hit_probability_zero():
    p_BV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    largest = 1 - 2**-24
    uniform_B = torch.tensor([0.0, 0.2499, 0.25, 0.9, largest])
    assert draw(p_BV, uniform_B).tolist() == [1, 1, 3, 3, 3]


def test_draws_follow_the_distribution():
    p_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    uniform_B = torch.rand(count, generator=torch_generator(0, "test"))
    shares = draw(p_V.repeat(count, 1), uniform_B).bincount(minlength=4) / count
    # Four standard deviations of the largest share.
    assert float((shares - p_V).abs().max()) < 4 * math.sqrt(0.25 / count)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batched_greedy_equals_single_greedy_and_the_argmax_of_whole_rows(scheme):
    model = random_decoder(scheme, context=24)
    sampling = Sampling(greedy=True, max_tokens=8)
    batched = tokens_of(generate(model, PROMPTS, sampling, END))
    single = [tokens_of(generate(model, [prompt], sampling, END))[0] for prompt in PROMPTS]
    plain = []
    for prompt in PROMPTS:
        reply: list[int] = []
        while len(reply) < sampling.max_tokens:
            limit = model.scheme.limit(len(prompt)) or 0
            token = int(row_logits(model, prompt + reply, longest=limit)[-1].argmax())
            if token == END:
                break
            reply.append(token)
        plain.append(reply)
    assert batched == single == plain
    assert len({tuple(reply) for reply in plain}) > 1, "all replies alike would prove little"


def test_each_row_stops_at_its_own_end_and_the_others_go_on():
    model = random_decoder(context=64)
    sampling = Sampling(greedy=True, max_tokens=20)
    free = generate(model, PROMPTS, sampling, None)
    assert all(reply.finish == "length" for reply in free)
    # A token that some rows reach, at different steps, and others do not.
    end = max(
        range(VOCABULARY),
        key=lambda t: len({r.tokens.index(t) for r in free if t in r.tokens}),
    )
    stopped = generate(model, PROMPTS, sampling, end)
    for with_end, without in zip(stopped, free, strict=True):
        at = without.tokens.index(end) if end in without.tokens else None
        assert with_end.tokens == without.tokens[:at]
        assert with_end.finish == ("length" if at is None else "end")
    assert len({len(reply.tokens) for reply in stopped}) > 1


def test_a_step_lists_the_unfinished_rows_alone():
    model = random_decoder(context=64)
    lengths = {10: 1, 11: 3, 12: 2, 13: 3}
    seen = dict.fromkeys(lengths, 0)

    def stop(row: int, token: int) -> bool:
        seen[row] += 1
        return seen[row] == lengths[row]

    steps = list(
        stream_tokens(model, PROMPTS, Sampling(greedy=True), None, rows=list(lengths), stop=stop)
    )
    assert [[chosen.row for chosen in step] for step in steps] == [
        [10, 11, 12, 13],
        [11, 12, 13],
        [11, 13],
    ]
    assert [chosen.finish for chosen in steps[1]] == [None, "stop", None]
    single = generate(model, PROMPTS, Sampling(greedy=True, max_tokens=3), None)
    assert [step[0].token for step in steps[1:]] == single[1].tokens[1:3]


def test_a_sampled_row_does_not_depend_on_its_neighbours():
    model = random_decoder(context=64)
    sampling = Sampling(temperature=1.5, top_p=0.95, max_tokens=12, seed=3)
    together = tokens_of(generate(model, PROMPTS, sampling, END))
    alone = [
        tokens_of(generate(model, [prompt], sampling, END, rows=[row]))[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    backwards = generate(model, PROMPTS[::-1], sampling, END, rows=[3, 2, 1, 0])
    assert tokens_of(backwards)[::-1] == together


def test_seed_and_row_change_what_is_drawn_and_nothing_else_does():
    model = random_decoder(context=64)
    prompts = [PROMPTS[0]] * 3
    first = tokens_of(generate(model, prompts, Sampling(temperature=2.0, max_tokens=12), END))
    torch.manual_seed(99)
    again = tokens_of(generate(model, prompts, Sampling(temperature=2.0, max_tokens=12), END))
    other = tokens_of(
        generate(model, prompts, Sampling(temperature=2.0, max_tokens=12, seed=1), END)
    )
    shorter = tokens_of(generate(model, prompts, Sampling(temperature=2.0, max_tokens=5), END))
    assert first == again
    assert len({tuple(reply) for reply in first + other}) == 6
    assert shorter == [reply[:5] for reply in first]


def test_sampling_leaves_the_global_generator_alone():
    model = random_decoder()
    before = torch.get_rng_state()
    generate(model, PROMPTS[:2], Sampling(temperature=1.0, max_tokens=4), END)
    assert torch.equal(before, torch.get_rng_state())


def test_the_first_greedy_token_is_drawn_from_the_penalized_logits():
    model = random_decoder(context=64)
    prompt = PROMPTS[2]
    logits_V = row_logits(model, prompt)[-1]
    seen_BV = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    seen_BV[0, prompt] = True
    expected = penalize_repetition(logits_V[None], seen_BV, 50.0).argmax(-1).tolist()
    sampling = Sampling(greedy=True, repetition_penalty=50.0, max_tokens=8)
    tokens = tokens_of(generate(model, [prompt], sampling, None))[0]
    assert tokens[:1] == expected
    assert len(set(tokens) | set(prompt)) == len(tokens) + len(set(prompt)), "nothing repeats"


@pytest.mark.parametrize("scheme", ["rope", "randomised"])
def test_rows_that_stay_keep_their_own_penalties_and_lengths(scheme):
    """When first the first and then the third row has ended."""
    model = random_decoder(scheme, context=8)
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[0], [1] * 9]
    ends = {0: 2, 1: 9, 2: 4, 3: 9}

    def finished(numbers):
        taken = dict.fromkeys(numbers, 0)

        def stop(row: int, token: int) -> bool:
            taken[row] += 1
            return taken[row] == ends[row]

        sampling = Sampling(greedy=True, repetition_penalty=1.3, max_tokens=9)
        chosen = [prompts[number] for number in numbers]
        return tokens_of(generate(model, chosen, sampling, None, numbers, stop))

    together = finished(list(ends))
    assert [len(reply) for reply in together] == list(ends.values())
    assert together == [finished([number])[0] for number in ends]


def test_the_end_is_never_penalized():
    model = random_decoder(context=64)
    prompt = PROMPTS[2]
    end = int(row_logits(model, prompt)[-1].argmax())
    sampling = Sampling(greedy=True, repetition_penalty=1e6, max_tokens=8)
    # The position of the earlier end does not matter here, only that the row holds one.
    with_end = [end, *prompt]
    assert int(row_logits(model, with_end)[-1].argmax()) == end
    assert generate(model, [with_end], sampling, end)[0].finish == "end"


def test_temperature_zero_is_greedy():
    model = random_decoder(context=64)
    greedy = generate(model, PROMPTS, Sampling(greedy=True, max_tokens=9), END)
    assert generate(model, PROMPTS, Sampling(temperature=0, max_tokens=9), END) == greedy


def test_many_prompts_in_small_batches_equal_one_batch(monkeypatch):
    model = random_decoder(context=64)
    prompts = [[1, *range(3, 3 + n % 7)] for n in range(30)]
    sampling = Sampling(temperature=1.2, max_tokens=6)
    whole = generate(model, prompts, sampling, END)
    monkeypatch.setattr(module, "BATCH_SLOTS", 40)
    assert generate(model, prompts, sampling, END) == whole


def test_a_scheme_with_a_limit_ends_there_and_the_others_run_past_it():
    sampling = Sampling(greedy=True, max_tokens=3 * CONTEXT)
    for name in SCHEMES:
        model = random_decoder(name)
        limit = model.scheme.limit(len(PROMPTS[0]))
        reply = generate(model, [PROMPTS[0], PROMPTS[1]], sampling, None)[0]
        assert reply.finish == "length"
        if limit is not None:
            assert limit == {"learned": CONTEXT, "randomised": 2 * CONTEXT}[name]
            # The last token of a reply is never read, so it takes no position.
            assert len(PROMPTS[0]) + len(reply.tokens) == limit + 1
        else:
            assert name not in ("learned", "randomised")
            assert len(reply.tokens) == 3 * CONTEXT


def test_a_reply_at_random_positions_does_not_depend_on_its_neighbours():
    model = random_decoder("randomised")
    short, long = [1, *range(2, 2 + CONTEXT // 3)], [1] * (3 * CONTEXT)
    sampling = Sampling(greedy=True, max_tokens=CONTEXT // 2)
    alone, _ = (generate(model, [prompt], sampling, None)[0] for prompt in (short, long))
    assert generate(model, [short, long], sampling, None)[0] == alone


@pytest.mark.parametrize("trained", [CONTEXT // 2, CONTEXT])
def test_a_lower_limit_of_tokens_gives_a_prefix_of_the_longer_reply(trained):
    """Across every multiple of the trained length, for every scheme."""
    for name in SCHEMES:
        model = random_decoder(name, trained=trained)
        replies = [
            generate(model, PROMPTS, Sampling(greedy=True, max_tokens=most), None)
            for most in range(1, 3 * CONTEXT, 5)
        ]
        for row, longest in enumerate(replies[-1]):
            tokens = [reply[row].tokens for reply in replies]
            assert len({len(reply) for reply in tokens}) > 1
            assert all(reply == longest.tokens[: len(reply)] for reply in tokens), name


def test_a_reply_at_random_positions_has_room_for_a_trained_length_and_ends_where_they_run_out():
    sampling = Sampling(greedy=True, max_tokens=5 * CONTEXT)
    for options, limits in (({}, (2, 2, 3)), ({"length": 2 * CONTEXT}, (2, 2, 2))):
        model = random_decoder("randomised", options)
        for prompt, limit in zip(([1, 2], [1] * CONTEXT, [1] * (CONTEXT + 1)), limits, strict=True):
            reply = generate(model, [prompt, [1]], sampling, None)[0]
            read = len(prompt) + len(reply.tokens) - 1
            assert (reply.finish, read) == ("length", limit * CONTEXT)


def test_a_pattern_has_the_least_limit_of_its_schemes():
    shape = random_decoder().config.shape
    learned, rope = (Layer(SCHEMES[name].Config()) for name in ("learned", "rope"))
    assert build_scheme(Hybrid.Config(pattern=(rope, learned)), shape).limit() == CONTEXT
    assert build_scheme(Hybrid.Config(pattern=(rope,)), shape).limit() is None


def test_a_prompt_beyond_a_limit_is_the_scheme_s_own_error():
    model = random_decoder("learned")
    with pytest.raises(ValueError, match=rf"position=learned has vectors for {CONTEXT}"):
        generate(model, [[1] * (CONTEXT + 1)], Sampling(greedy=True), END)


def test_generating_gives_the_model_its_mode_back():
    model = random_decoder(dropout=0.5).train()
    steps = stream_tokens(model, PROMPTS, Sampling(greedy=True, max_tokens=5), None)
    next(steps)
    assert not model.training
    steps.close()
    assert model.training
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_samples_show_who_speaks_and_greedy_replies():
    from wherelm.batches.store import TokenStore

    names = {1: "<BOS>", 2: "<EOS>", 3: "<USER>", 4: "<ASSISTANT>", 5: "<SYSTEM>"}

    class Tokenizer:
        assistant, eos, control_name = 4, END, staticmethod(names.get)

        def decode(self, ids):
            return " ".join(map(str, ids))

    model = random_decoder(context=16)
    ids = [1, 5, 7, 3, 9, 4, 11, 2, 3, 12, 4, 10, 2]
    text = [1, *range(6, 14), 2]
    examples = [ids, ids[3:8], text]
    store = TokenStore.from_lists([(tokens, [True] * len(tokens)) for tokens in examples])
    prompts = [ids[:11], ids[3:6], text[:3]]
    replies = generate(model, prompts, Sampling(greedy=True, max_tokens=8), END)
    shown = ["system: 7\nuser: 9\nassistant: 11\nuser: 12\nassistant: ", "user: 9\nassistant: "]
    expected = "\n".join(
        f"{prompt}{' '.join(map(str, reply.tokens))}\n"
        for prompt, reply in zip([*shown, "> 6 7\n"], replies, strict=True)
    )
    assert write_samples(model, Tokenizer(), store) == expected
