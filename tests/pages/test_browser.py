import re

import numpy as np
import pytest

from tests import browser
from tests.pages.conftest import MESSAGES, figures_of
from wherelm import checkpoint
from wherelm.pages.page import NOT_IMPORTANCE, Page
from wherelm.pages.views import look

needs_browser = pytest.mark.skipif(
    browser.program() is None, reason="no Chromium on this machine to open the pages in"
)


@pytest.fixture(scope="module")
def tab():
    with browser.browser() as tab:
        yield tab


def texts(tab: browser.Tab, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({selector!r})].map(n => n.textContent)")


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
    view = look(loaded, MESSAGES)[0][0]
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
