import base64
import html
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import CONTEXT, padded, ragged_store, random_decoder
from tests.pages.conftest import MESSAGES, figures_of, save_model
from wherelm import checkpoint, visualize
from wherelm.pages.lecture import trained
from wherelm.pages.lecture.lecture_page import lecture_page as lecture_html
from wherelm.pages.message_page import attention_picture
from wherelm.pages.page import NOT_IMPORTANCE, Page
from wherelm.pages.scheme_pictures import pair_directions, scheme_figures
from wherelm.pages.views import look
from wherelm.schemes import SCHEMES
from wherelm.schemes.relative import alibi_slopes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["messages_page", "lecture_page"])
def test_claim_9_every_attention_picture_says_that_weights_are_not_importance(page, request):
    path = request.getfixturevalue(page)
    text, figures = path.read_text(encoding="utf-8"), figures_of(path)
    captions = re.findall(r'data-figure="(\d+)"></div><figcaption>(.*?)</figcaption>', text)
    assert [int(number) for number, _ in captions] == list(range(len(figures)))
    pictured = [
        caption
        for (_, caption), pictures in zip(captions, figures, strict=True)
        if '"attention":true' in json.dumps(pictures, separators=(",", ":"))
    ]
    assert len(pictured) >= 5
    assert all(NOT_IMPORTANCE in caption for caption in pictured)
    # No picture of weights goes unmarked: these are the kinds and names that show them.
    for pictures in figures:
        for picture in pictures:
            weights = picture["kind"] == "attention" or picture.get("name", "").startswith("A ")
            assert picture.get("attention", False) or not weights


def test_the_lecture_has_every_claim_with_equation_and_code_that_exists(lecture_page):
    text = lecture_page.read_text(encoding="utf-8")
    cards = re.findall(r'<section class="card" id="claim-(\d+)">(.*?)</section>', text, re.DOTALL)
    assert [int(number) for number, _ in cards] == list(range(1, 20))
    for number, card in cards:
        equation = re.search(r'<div class="equation">(.+?)</div>', card)
        assert equation, number
        assert re.search(r"data-figure|<table>", card), number
        links = re.findall(
            r"<summary><code>(.*?)</code></summary><pre>(.*?)</pre>", card, re.DOTALL
        )
        assert links, number
        for name, shown in links:
            file, _, path = html.unescape(name).partition(": ")
            assert (ROOT / "src" / "wherelm" / file).is_file(), name
            found = importlib.import_module("wherelm." + file[: -len(".py")].replace("/", "."))
            for part in path.split("."):
                found = getattr(found, part)
            keyword = "class" if isinstance(found, type) else "def"
            assert re.search(rf"^{keyword} {path.split('.')[-1]}\b", html.unescape(shown), re.M)


def test_every_claim_has_a_test_named_after_it():
    tests = "".join(
        path.read_text(encoding="utf-8")
        for room in ("lecture", "pages")
        for path in (ROOT / "tests" / room).glob("test_*.py")
    )
    for number in range(1, 20):
        assert re.search(rf"def test_claim_{number}_", tests), number


def test_a_layer_without_positions_cannot_flip_its_answer(lecture_page):
    text = lecture_page.read_text(encoding="utf-8")
    cards = re.findall(r"<h3>(With positions|One layer, no positions)</h3>(.*?)</section>", text)
    cards = dict(cards) or dict(
        re.findall(
            r"<h3>(With positions|One layer, no positions)</h3>(.*?)</section>", text, re.DOTALL
        )
    )
    assert len(cards) == 2
    apart = {
        title: float(re.search(r"up to <b>(.*?)</b>", card)[1].replace("−", "-"))
        for title, card in cards.items()
    }
    assert apart["One layer, no positions"] <= 1e-4
    assert apart["With positions"] > 1e-2
    answers = {t: re.findall(r"→ <b>(.*?)</b>", card, re.DOTALL) for t, card in cards.items()}
    first, second = answers["One layer, no positions"]
    assert first == second


@pytest.mark.parametrize("word", ["a b", "this/or that", "x " * 9999])
def test_the_first_word_is_a_message_unless_it_is_a_path(word):
    assert not visualize.is_path(word)


@pytest.mark.parametrize("word", ["runs/errands/absent", "nowhere", str(Path(__file__).parent)])
def test_what_exists_or_is_one_word_is_a_run(word):
    assert visualize.is_path(word)


def test_without_a_checkpoint_the_lecture_says_what_is_absent(tmp_path):
    text = lecture_html(tmp_path)
    assert "train one with <code>python train.py</code>" in text
    assert f"<code>{trained.WITHOUT}</code> is absent here" in text


def test_text_of_messages_stays_text(messages_page):
    text = messages_page.read_text(encoding="utf-8")
    assert "File &lt;b&gt;it&lt;/b&gt; &amp; the “slides” $now$." in text
    assert "<b>it</b>" not in text
    page = Page("</title><script>")
    page.add(page.figure([{"kind": "tokens", "name": "</script><script>"}], ""))
    assert page.html.count("<script") == 2


def test_two_messages_stand_in_one_padded_batch_with_the_model_s_answers(run):
    loaded = checkpoint.load(run)
    views, batch = look(loaded, MESSAGES)
    assert batch.tokens_BT.shape[0] == 2
    lengths = batch.key_mask_BT.sum(-1).tolist()
    assert lengths[0] != lengths[1]
    for view, length, message in zip(views, lengths, MESSAGES, strict=True):
        assert view.weights.shape == (2, 2, length, length)
        assert np.abs(view.weights.sum(-1) - 1).max() <= 1e-4
        assert [slot.real for slot in view.slots].index(True) == 0
        assert sum(slot.real for slot in view.slots) == length
        asked = 3 + len(message.encode())
        assert view.asks == asked - 1
        assert view.names[view.asks] == "<ASSISTANT>"
        learned = [slot.learned for slot in view.slots]
        assert learned == [asked - 1 <= t < length for t in range(len(view.slots))]
        # What is learned are the answer's tokens, the likeliest ones.
        ids = batch.tokens_BT[views.index(view), :length]
        logits = loaded.model(ids[None], torch.arange(length)[None])[0]
        targets = batch.targets_BT[views.index(view), asked - 1 : length]
        assert torch.equal(logits[asked - 1 :].argmax(-1), targets)


def test_the_picture_s_weights_are_those_of_the_model(run):
    view = look(checkpoint.load(run), MESSAGES[:1])[0][0]
    picture = attention_picture(view.names, view.weights, view.asks)
    read = np.frombuffer(base64.b64decode(picture["weights"]), dtype="<u2") / 65535
    assert np.abs(read.reshape(view.weights.shape) - view.weights).max() <= 1e-5


HOOKS = {
    "none": [],
    "sinusoidal": ["embed"],
    "learned": ["embed"],
    "randomised": ["place", "rotate"],
    "rope": ["rotate"],
    "drope": ["rotate"],
    "key_offset": ["rotate", "shift"],
    "pope": ["rotate"],
    "alibi": ["bias"],
    "t5": ["bias"],
    "kerple": ["bias"],
    "fire": ["bias"],
    "fox": ["token_value and value_bias"],
    "cope": ["content_bias"],
    "hybrid": ["rotate"],
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_s_shape_is_found_through_its_hooks(name):
    figures = scheme_figures(random_decoder(name, layers=4), padded(ragged_store(), range(4)))
    assert [re.split("[:,]", figure.caption)[0] for figure in figures] == HOOKS[name]
    json.dumps([figure.pictures for figure in figures], allow_nan=False)


def test_a_dropped_rope_has_no_shape_left():
    model = random_decoder("drope")
    model.scheme.progress(1.0)
    assert scheme_figures(model, padded(ragged_store(), range(4))) == []


def test_a_hybrid_names_the_layers_that_rotate():
    figures = scheme_figures(random_decoder("hybrid", layers=4), padded(ragged_store(), [0]))
    rotating = [
        layer + 1
        for layer in range(4)
        if random_decoder("hybrid", layers=4).scheme.for_layer(layer).config.name == "rope"
    ]
    words = re.findall(r"layers? ([\d, ]+):", " ".join(figure.caption for figure in figures))
    assert sorted(int(n) for word in words for n in word.split(",")) == rotating != [1, 2, 3, 4]


def test_hands_and_curves_are_the_scheme_s_own_numbers():
    rope = random_decoder("rope", width=32).scheme
    positions = torch.arange(10)[None]
    directions = pair_directions(rope, positions)
    for i in range(4):
        angles = torch.arange(10) * 10_000 ** (-2 * i / 8)
        expected = torch.stack((angles.cos(), angles.sin()), dim=-1)
        assert (directions[:, i] - expected).abs().max() <= 1e-5

    (figure,) = scheme_figures(random_decoder("alibi"), padded(ragged_store(), [0]))
    for series, slope in zip(figure.pictures[0]["series"], alibi_slopes(4), strict=True):
        expected = [-slope.item() * d for d in range(CONTEXT)]
        assert series["y"] == pytest.approx(expected, abs=1e-4)


def test_the_picture_of_offset_keys_names_the_slot_that_an_entry_comes_from():
    model = random_decoder("key_offset")
    _, figure = scheme_figures(model, padded(ragged_store(), [0]))
    assert "2 of 4 entries" in figure.caption
    (picture,) = figure.pictures
    assert [row[5] for row in picture["details"]] == [
        f"entry {i} of the key at slot 5: from slot {4 if i >= 2 else 5}" for i in range(4)
    ]


def test_a_scheme_without_a_hook_says_so_on_the_page(tmp_path):
    folder = save_model(tmp_path / "none", "none")
    path = tmp_path / "page.html"
    assert visualize.main([str(folder), "Hi.", "--out", str(path)]) == 0
    assert "No hook of this scheme acts" in path.read_text(encoding="utf-8")
