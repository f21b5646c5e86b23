"""What is read and what is learned of an example, and which rows are examples."""

import json

import pytest

from wherelm.data.messages import (
    EmptyExample,
    Message,
    check_encodable,
    messages_from_row,
    prompt_spans,
    spans,
)

TALK = [
    Message("system", "Be brief."),
    Message("user", "Which first?"),
    Message("assistant", "report"),
    Message("user", "And then?"),
    Message("assistant", "slides"),
]


def shown(parts):
    return "".join(part.text for part in parts)


def learned(parts):
    return [part.text for part in parts if part.learned]


def test_a_plain_text_is_learned_between_bos_and_eos():
    parts = spans([Message("text", "hello")])
    assert shown(parts) == "<BOS>hello<EOS>"
    assert learned(parts) == ["hello", "<EOS>"]
    assert [part.control for part in parts] == [True, False, True]


def test_a_conversation_marks_every_turn_and_ends_replies_with_eos():
    assert shown(spans(TALK)) == (
        "<BOS><SYSTEM>Be brief.<USER>Which first?<ASSISTANT>report<EOS>"
        "<USER>And then?<ASSISTANT>slides<EOS>"
    )


def test_replies_learns_what_the_assistant_says_and_its_eos():
    assert learned(spans(TALK, "replies")) == ["report", "<EOS>", "slides", "<EOS>"]


def test_all_learns_everything_but_bos():
    parts = spans(TALK, "all")
    assert [part.text for part in parts if not part.learned] == ["<BOS>"]


def test_a_conversation_that_ends_with_the_user_ends_without_eos():
    assert shown(spans(TALK[1:2])) == "<BOS><USER>Which first?"


@pytest.mark.parametrize("learn", ["replies", "all"])
def test_a_stream_has_no_control_tokens_and_is_learned_whole(learn):
    (part,) = spans([Message("stream", "<EOS> and on")], learn)
    assert part == ("<EOS> and on", False, True)


def test_content_that_looks_like_a_control_token_is_text():
    part = spans([Message("text", "<EOS>")])[1]
    assert part.text == "<EOS>"
    assert not part.control


def test_a_prompt_is_the_complete_example_up_to_its_reply():
    whole = spans(TALK)
    prompt = prompt_spans(TALK[:4])
    assert [part[:2] for part in prompt] == [part[:2] for part in whole[: len(prompt)]]
    assert prompt[-1].text == "<ASSISTANT>"
    assert learned(prompt) == []
    assert shown(prompt_spans([Message("text", "<EOS>")])) == "<BOS><EOS>"
    assert prompt_spans([Message("text", "<EOS>")])[-1].control is False


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "hi"}, [Message("text", "hi")]),
        ("hi", [Message("text", "hi")]),
        ({"text": " kept as it is \n"}, [Message("text", " kept as it is \n")]),
        (
            {"prompt": "a", "completion": "b", "text": "c"},
            [Message("user", "a"), Message("assistant", "b")],
        ),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, [Message("user", "a")]),
        ({"messages": json.dumps([{"role": "user", "content": "a"}])}, [Message("user", "a")]),
    ],
)
def test_the_columns_say_what_a_row_is(row, expected):
    assert messages_from_row(row) == expected


def test_a_named_text_column_comes_before_all_others():
    row = {"SMS": "hi", "text": "other", "messages": "other"}
    assert messages_from_row(row, "SMS") == [Message("text", "hi")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "bot", "content": "a"}]}, "role 'bot'; expected system, user"),
        ({"messages": [{"role": "user"}]}, "message 1 is not an object with role and content"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 is a number"),
        ({"messages": "no json"}, "not valid JSON"),
        ({"messages": {"role": "user"}}, "messages is an object, expected a list"),
        ({"text": ["a"]}, "text is a list, expected text"),
        ({"text": True}, "text is true or false"),
        ({"Label": "ham", "SMS": "hi"}, "has Label, SMS; expected text, messages"),
        ([1], "expected an object"),
        ({"text": "a\ud800"}, r"U\+D800 stands for half a character"),
    ],
)
def test_a_malformed_row_is_refused_with_its_reason(row, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        messages_from_row(row)
    assert not isinstance(caught.value, EmptyExample)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "way"),
    [
        ("question answer", "rename question to prompt and answer to completion"),
        ("prompt response", "rename response to completion"),
        ("Instruction Output", "rename Instruction to prompt and Output to completion"),
        (
            "instruction input output",
            "rename instruction to prompt and output to completion; what input holds goes to the "
            "end of prompt",
        ),
        ("input output", "rename input to prompt and output to completion"),
        ("id conversations", "rename conversations to messages, a list of {role, content}"),
        ("prompt chosen", "rename the columns of what is asked and of the reply"),
    ],
)
def test_columns_of_questions_and_answers_are_never_to_be_learned_as_one_text(columns, way):
    with pytest.raises(ValueError, match="expected text, messages, or prompt") as caught:
        messages_from_row(dict.fromkeys(columns.split(), "said"))
    assert str(caught.value).endswith(f"({way})")
    assert "text_column" not in str(caught.value)


def test_one_column_of_another_name_is_pointed_to_as_the_text():
    for column in ("sentence", "output"):
        with pytest.raises(
            ValueError, match=r"\(or name the text's column with data.text_column=…"
        ):
            messages_from_row({column: "said"})


@pytest.mark.parametrize(
    "row",
    [
        "",
        {"text": " \t"},
        {"text": None},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
    ],
)
def test_a_row_in_which_nothing_is_said_is_empty(row):
    with pytest.raises(EmptyExample):
        messages_from_row(row)


def test_text_outside_the_basic_plane_is_encodable():
    check_encodable("\U0001f600 é")
