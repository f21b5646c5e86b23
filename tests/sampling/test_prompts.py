"""What is asked of a model, from files as a user names them."""

from pathlib import Path

import pytest

from wherelm.data.messages import Message
from wherelm.sampling.prompts import file_prompts


@pytest.mark.parametrize("name", ["asked.jsonl", "asked.ndjson", "asked.NDJSON", "asked.txt"])
def test_a_file_of_prompts_is_found_behind_a_tilde_and_read_by_its_suffix(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv("HOME", str(tmp_path))
    line = "why?" if name.endswith("txt") else '{"prompt": "why?"}'
    (tmp_path / name).write_text(f"{line}\n")
    (prompt,) = file_prompts(Path("~") / name, raw=False)
    assert prompt.messages == [Message("user", "why?")]
    with pytest.raises(ValueError, match=r"--file .*none\.txt: no such file"):
        list(file_prompts(Path("~/none.txt"), raw=False))
