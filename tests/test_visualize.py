"""The pages in a real browser, and what their pictures are made of.

Shapes: T slots, P pairs.
"""

import base64
import html
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import browser
import numpy as np
import pytest
import torch
from helpers import CONTEXT, padded, ragged_store, random_decoder

from wherelm import checkpoint, lecture, message_page, visualize
from wherelm.config import run_config
from wherelm.model import initialize
from wherelm.page import NOT_IMPORTANCE, Page
from wherelm.scheme_pictures import pair_directions, scheme_figures
from wherelm.schemes import SCHEMES
from wherelm.schemes.relative import alibi_slopes
from wherelm.seeds import torch_generator
from wherelm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = ("Send the report.", "File <b>it</b> & the “slides” $now$.")
needs_browser = pytest.mark.skipif(
    browser.program() is None, reason="no Chromium on this machine to open the pages in"
)


def save_model(folder: Path, scheme: str = "rope", layers: int = 2, context: int = 256) -> Path:
    """A checkpoint with random weights over bytes."""
    config = run_config(
        {
            "name": "test",
            "seed": 0,
            "model": {"layers": layers, "width": 16, "heads": 2, "context": context},
            "position": {"name": scheme},
            "data": {},
            "tokenizer": {"kind": "bytes"},
            "optimizer": {"name": "adamw"},
            "schedule": {"name": "constant"},
            "training": {"steps": 1, "batch_tokens": 1024},
            "evaluation": {},
            "tracking": {},
        }
    )
    tokenizer = Tokenizer.train(config.tokenizer, ())
    model = checkpoint.build_model(config, tokenizer.vocab_size)
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch_generator(0, "noise", name))
            parameter.add_(noise * 0.3)
    state = {"step": 7, "share": 1.0, "validation_loss": 1.0}
    checkpoint.save(folder, model, tokenizer, config, state)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("runs") / "model")


@pytest.fixture(scope="module")
def messages_page(run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "page.html"
    assert visualize.main([str(run), *MESSAGES, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def lecture_page(run, tmp_path_factory) -> Path:
    """With the random model, and a random layer without positions beside it."""
    root = tmp_path_factory.mktemp("project")
    save_model(root / lecture.trained.WITHOUT, "none", layers=1)
    path = root / "lecture.html"
    path.write_text(lecture.page(root, str(run)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab():
    with browser.browser() as tab:
        yield tab


def figures_of(path: Path) -> list[list[dict]]:
    text = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data[1])


def texts(tab: browser.Tab, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({selector!r})].map(n => n.textContent)")


# In the browser


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", ["messages_page", "lecture_page"])
def test_a_page_is_drawn_without_an_error_and_fits_the_window(page, width, tab, request):
    path = request.getfixturevalue(page)
    tab.open(path, width)
    figures = figures_of(path)
    assert len(figures) > 5
    drawn = "[...document.querySelectorAll('[data-figure]')].map(n => n.children.length)"
    assert tab.run(drawn) == [len(pictures) for pictures in figures]
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.errors == []


@needs_browser
def test_pointing_at_a_token_shows_its_row_of_a_in_each_head(run, messages_page, tab):
    loaded = checkpoint.load(run)
    view = message_page.look(loaded, MESSAGES)[0][0]
    layers, heads = view.weights.shape[:2]
    rows, length = layers * heads, len(view.names)
    tab.open(messages_page)
    cells = ".picture.attention svg"
    fills = (
        f"[...document.querySelector({cells!r}).querySelectorAll('rect')]"
        ".map(n => n.getAttribute('fill'))"
    )
    before = tab.run(fills)
    assert len(before) == rows * length
    query = 5
    tab.point(".picture.attention .chip", query)
    after = tab.run(fills)
    assert after != before
    # A key that the query may not read is grey in every head; the others are shaded by weight.
    grey = after[length - 1]
    for row in range(rows):
        own = after[row * length : (row + 1) * length]
        assert [fill == grey for fill in own] == [key > query for key in range(length)]
        darkness = [-int(re.findall(r"\d+", fill)[0]) for fill in own[: query + 1]]
        weights = view.weights[row // heads, row % heads, query, : query + 1]
        assert np.argmax(darkness) == np.argmax(weights)
    for row, key in ((0, 3), (rows - 1, 0)):
        tab.point(f"{cells} rect", row * length + key)
        weight = view.weights[row // heads, row % heads, query, key]
        said = texts(tab, ".picture.attention .readout")[0]
        assert f"layer {row // heads + 1} head {row % heads + 1}" in said
        assert float(said.rsplit(" ", 1)[1]) == pytest.approx(weight, abs=6e-4)
    assert tab.errors == []


@needs_browser
def test_pointing_at_a_head_chooses_the_query(messages_page, tab):
    tab.open(messages_page)
    before = texts(tab, ".picture.attention .chosen")[0]
    tab.point(".picture.attention .map canvas")
    middle = len(tab.run("[...document.querySelector('.picture.attention .chips').children]")) // 2
    chips = texts(tab, ".picture.attention .chip")
    chosen = "[...document.querySelector('.picture.attention .chips').children]"
    assert tab.run(f"{chosen}.findIndex(n => n.classList.contains('chosen'))") == middle
    assert texts(tab, ".picture.attention .chosen")[0] == chips[middle]
    assert before != chips[middle] or middle > 0


@needs_browser
def test_pointing_at_masks_tokens_and_curves_tells_their_values(messages_page, tab):
    tab.open(messages_page)
    for selector, number, expected in (
        (".picture.tokens .chip", 3, r"slot 2: “S” at position 2 of segment 1; may be read"),
        (".picture.matrix rect[data-cell='0,1']", 0, r"“<BOS>” \(slot 0\) may not read “<USER>”"),
        (".picture.matrix rect[data-cell='1,0']", 0, r"“<USER>” \(slot 1\) may read “<BOS>”"),
        (".picture.lines svg", 0, r"slots back \d+: head 1 [\d.]+, head 2 [\d.]+, uniform 1/i"),
    ):
        tab.point(selector, number)
        kind = selector.split(" ")[0]
        assert re.search(expected, texts(tab, f"{kind} .readout")[0]), selector
    assert tab.errors == []


@needs_browser
def test_the_slider_moves_two_rope_arrows_together_while_the_score_stays(lecture_page, tab):
    tab.open(lecture_page)

    def arrows() -> np.ndarray:
        """Two arrows as vectors from the middle of the picture, y upwards."""
        ends = tab.run(
            "[...document.querySelectorAll('#claim-18 line.arrow')].map(n => "
            "['x1', 'y1', 'x2', 'y2'].map(a => +n.getAttribute(a)))"
        )
        return np.array([[x2 - x1, y1 - y2] for x1, y1, x2, y2 in ends])

    def angles() -> np.ndarray:
        return np.degrees(np.arctan2(arrows()[:, 1], arrows()[:, 0]))

    def said() -> str:
        return texts(tab, "#claim-18 .result")[0]

    before, score = angles(), said()
    assert before.tolist() == pytest.approx([0, 60], abs=0.1)
    assert "score q · k = 0.500000" in score
    tab.run("document.querySelector('#claim-18 input').focus()")
    for _ in range(3):
        tab.press("ArrowRight")
    assert angles().tolist() == pytest.approx([30, 90], abs=0.1)
    assert said() == score
    assert tab.errors == []


@needs_browser
def test_the_lecture_s_pictures_answer_to_pointer_and_sliders(lecture_page, tab):
    tab.open(lecture_page)
    assert "y = [1.1667, 1.6667] = [7/6, 5/3]" in texts(tab, "#claim-2 .result")[0]
    tab.run("document.querySelector('#claim-2 input').focus()")
    tab.press("ArrowLeft")
    assert "[1.1667" not in texts(tab, "#claim-2 .result")[0]

    tab.point("#claim-1 rect[data-cell='3,1']")
    assert texts(tab, "#claim-1 .readout")[0].startswith("q(report) · k(send) / √4 = (")
    tab.point("#claim-10 .picture:nth-child(3) rect[data-cell='2,5']")
    said = texts(tab, "#claim-10 .picture:nth-child(3) .readout")[0]
    assert said == "token 5 changed: the logits at position 2 move by up to 0"

    rows = "[...document.querySelectorAll('#claim-14 .frames text')].map(n => n.textContent)"
    before = tab.run(rows)
    tab.run("document.querySelector('#claim-14 input').focus()")
    tab.press("ArrowRight")
    assert tab.run(rows) != before
    assert tab.errors == []


@needs_browser
def test_every_picture_of_attention_in_the_browser_stands_over_the_caption(lecture_page, tab):
    tab.open(lecture_page)
    captions = tab.run(
        "[...document.querySelectorAll('.picture.attention')]"
        ".map(n => n.closest('figure').querySelector('figcaption').textContent)"
    )
    assert len(captions) == 4
    assert all(NOT_IMPORTANCE in caption for caption in captions)


@needs_browser
def test_the_browser_itself_would_report_a_picture_that_cannot_be_drawn(tmp_path, tab):
    """So that the absence of errors says something."""
    page = Page("broken")
    page.add(page.figure([{"kind": "no such picture"}], ""))
    path = tmp_path / "broken.html"
    path.write_text(page.html, encoding="utf-8")
    with pytest.raises(AssertionError, match="KINDS"):
        tab.open(path)
    path.write_text('<body data-drawn="1"><img src="https://example.com/a.png">', encoding="utf-8")
    with pytest.raises(AssertionError, match=r"example\.com"):
        tab.open(path)


# The pages' content


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
        (ROOT / "tests" / f"test_{name}.py").read_text(encoding="utf-8")
        for name in ("lecture", "visualize")
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
    text = lecture.page(tmp_path)
    assert "train one with <code>python train.py</code>" in text
    assert f"<code>{lecture.trained.WITHOUT}</code> is absent here" in text


def test_text_of_messages_stays_text(messages_page):
    text = messages_page.read_text(encoding="utf-8")
    assert "File &lt;b&gt;it&lt;/b&gt; &amp; the “slides” $now$." in text
    assert "<b>it</b>" not in text
    page = Page("</title><script>")
    page.add(page.figure([{"kind": "tokens", "name": "</script><script>"}], ""))
    assert page.html.count("<script") == 2


def test_two_messages_stand_in_one_padded_batch_with_the_model_s_answers(run):
    loaded = checkpoint.load(run)
    views, batch = message_page.look(loaded, MESSAGES)
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
    view = message_page.look(checkpoint.load(run), MESSAGES[:1])[0][0]
    picture = message_page.attention_picture(view.names, view.weights, view.asks)
    read = np.frombuffer(base64.b64decode(picture["weights"]), dtype="<u2") / 65535
    assert np.abs(read.reshape(view.weights.shape) - view.weights).max() <= 1e-5


HOOKS = {
    "none": [],
    "sinusoidal": ["embed"],
    "learned": ["embed"],
    "randomised": ["place", "rotate"],
    "rope": ["rotate"],
    "drope": ["rotate"],
    "pope": ["rotate"],
    "alibi": ["bias"],
    "t5": ["bias"],
    "kerple": ["bias"],
    "fire": ["bias"],
    "fox": ["token_value and value_bias"],
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


def test_a_scheme_without_a_hook_says_so_on_the_page(tmp_path):
    folder = save_model(tmp_path / "none", "none")
    path = tmp_path / "page.html"
    assert visualize.main([str(folder), "Hi.", "--out", str(path)]) == 0
    assert "No hook of this scheme acts" in path.read_text(encoding="utf-8")


# The command


def test_a_png_is_drawn_for_papers(run, tmp_path, capsys):
    from matplotlib.image import imread

    path = tmp_path / "pair.png"
    assert visualize.main([str(run), *MESSAGES, "--out", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    picture = imread(path)
    assert picture.shape[1] >= 1000
    assert picture[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere", "Hi."], "nowhere"),
        (["RUN", "Hi.", "--out", "page.pdf"], "page.pdf"),
        (["RUN", "Hi.", "--out", "no/such/folder/page.html"], "no/such/folder"),
        (["RUN", "a", "b", "c"], "3 messages"),
        (["RUN", " "], "empty message"),
        (["RUN", "word " * 200], "tokens"),
        (["RUN", "\udcff"], "UTF-8"),
        (["--lecture", "RUN", "Hi."], "--lecture"),
        (["--lecture", "nowhere"], "nowhere"),
        (["--lecture", "--out", "lecture.png"], "lecture.png"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_exit_2(
    arguments, named, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert visualize.main([str(run) if a == "RUN" else a for a in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert named in said
    assert list(tmp_path.iterdir()) == []


def test_a_message_past_a_scheme_s_limit_is_one_line(tmp_path, capsys):
    folder = save_model(tmp_path / "learned", "learned", context=16)
    assert (
        visualize.main([str(folder), "Send it before noon.", "--out", str(tmp_path / "a.html")])
        == 2
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "position=learned" in said


def test_help_answers_before_torch_is_imported():
    script = (
        "import sys\nfrom wherelm import visualize\n"
        "try: visualize.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for word in ("RUN", "MESSAGE", "--lecture", "--out", "FILE.png"):
        assert word in result.stdout
