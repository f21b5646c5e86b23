import subprocess
import sys

import pytest

from tests.pages.conftest import MESSAGES, save_model
from wherelm import visualize


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
