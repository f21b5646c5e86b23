"""The command sample.py, asked as a user would, with a small random model behind it."""

import builtins
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import wherelm
from wherelm import runtime
from wherelm.data.messages import Message, prompt_spans
from wherelm.model.decoder import Decoder, ModelConfig, initialize
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate
from wherelm.sampling.printer import Printer
from wherelm.sampling.prompts import newest_tokens
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.seeds import torch_generator
from wherelm.tokenizer.training import TokenizerConfig, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sample  # noqa: E402

CONTEXT = 64


def byte_model(
    scheme: str = "rope", form: str = "messages", trained: int = CONTEXT
) -> SimpleNamespace:
    """What checkpoint.load gives, with random weights over a vocabulary of bytes."""
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    config = ModelConfig(layers=2, width=16, heads=2, context=CONTEXT)
    shape = replace(config.shape, trained=trained)
    model = Decoder(config, build_scheme(SCHEMES[scheme].Config(), shape), tokenizer.vocab_size)
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch_generator(0, "noise", name))
            parameter.add_(noise * 0.3)
    data = SimpleNamespace(format=form)
    return SimpleNamespace(
        model=model.eval(),
        tokenizer=tokenizer,
        config=SimpleNamespace(data=data),
        state={"step": 7},
    )


@pytest.fixture
def loaded(monkeypatch):
    """A loaded checkpoint that the command finds whatever it is asked for."""
    loaded = byte_model()
    use(monkeypatch, loaded)
    return loaded


def use(monkeypatch, loaded) -> None:
    fake = SimpleNamespace(find=lambda run, root: Path("runs/a"), load=lambda folder: loaded)
    monkeypatch.setattr(wherelm, "checkpoint", fake, raising=False)


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    return sample.command()


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.split("\n") if line]


def ids_of(loaded, *messages: Message) -> list[int]:
    return loaded.tokenizer.encode_spans(prompt_spans(messages))[0]


def test_help_answers_before_torch_is_imported_and_gives_the_defaults_of_sampling():
    script = (
        "import sys, sample\n"
        "try: sample.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & sys.modules.keys()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    default = Sampling()
    for option in ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed"):
        shown = rf"--{option.replace('_', '-')} [A-Z] [^()]*(\(greedy\))?[^()]*"
        assert re.search(rf"{shown}\({re.escape(str(getattr(default, option)))}\)", words), option


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "hot", "hi"], "temperature"),
        (["--temperature", "-1", "hi"], "temperature"),
        (["--top-k", "0", "hi"], "--top-k"),
        (["--top-p", "2", "hi"], "--top-p"),
        (["--max-tokens", "0", "hi"], "--max-tokens"),
        (["--num", "0", "hi"], "--num"),
        (["--num", "2", "--greedy", "hi"], "--num"),
        (["--greedy", "--top-k", "3", "hi"], "--top-k"),
        (["--temperature", "0", "--top-k", "3", "hi"], "--top-k"),
        (["--temperature", "0", "--num", "2", "hi"], "--num"),
        (["--max-tokens", "2000000", "hi"], "--max-tokens"),
        (["--repetition-penalty", "1e-40", "hi"], "--repetition-penalty"),
        (["--stop", "", "hi"], "--stop"),
        (["--raw", "--system", "Be brief.", "hi"], "--system"),
        (["--wrong", "hi"], "--wrong"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        ([""], "empty prompt"),
        (["\udcff"], "UTF-8"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_exit_2(
    arguments, named, loaded, monkeypatch, capsys
):
    try:
        code = run(monkeypatch, *arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert re.fullmatch(rf"error: [^\n]*{re.escape(named)}[^\n]*\n", captured.err), captured.err


def test_a_run_among_the_prompts_is_taken_for_a_mistake(loaded, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").touch()
    assert run(monkeypatch, str(tmp_path), "Hi") == 2
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path}: a run, not a prompt; give it as --run {tmp_path}\n"
    assert run(monkeypatch, "--greedy", "--max-tokens", "1", "x" * 9999) == 0


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_file_that_is_none_is_named(name, loaded, tmp_path, monkeypatch, capsys):
    path = tmp_path / name
    assert run(monkeypatch, "--file", str(path)) == 2
    assert capsys.readouterr().err == f"error: --file {path}: no such file\n"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not valid JSON [(]Expecting"),
        ("[]", "expected"),
        ('{"messages": []}', "empty"),
        ('{"messages": [{"role": "robot", "content": "hi"}]}', "robot"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "message to answer"),
        ('{"prompt": " "}', "empty prompt"),
    ],
)
def test_a_bad_line_of_a_file_is_named(line, named, loaded, tmp_path, monkeypatch, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi"}\n\n' + line + "\n", encoding="utf-8")
    assert run(monkeypatch, "--file", str(path)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:3: ")
    assert re.search(named, error)


def test_json_holds_prompt_text_tokens_and_finish_of_a_user_turn(loaded, monkeypatch, capsys):
    assert run(monkeypatch, "--json", "--greedy", "--max-tokens", "9", "Hé", "Send it.") == 0
    captured = capsys.readouterr()
    assert captured.err == "checkpoint: runs/a (step 7, position=rope)\n"
    sampling = Sampling(greedy=True, max_tokens=9)
    prompts = [ids_of(loaded, Message("user", text)) for text in ("Hé", "Send it.")]
    replies = generate(loaded.model, prompts, sampling, loaded.tokenizer.eos)
    assert json_lines(captured.out) == [
        {
            "prompt": text,
            "text": loaded.tokenizer.decode(reply.tokens),
            "tokens": reply.tokens,
            "finish": reply.finish,
        }
        for text, reply in zip(("Hé", "Send it."), replies, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--raw"], [Message("text", "Once")]),
        (["--system", "Be brief."], [Message("system", "Be brief."), Message("user", "Once")]),
    ],
)
def test_raw_and_system_change_what_the_model_reads(options, messages, loaded, monkeypatch, capsys):
    arguments = ["--json", "--greedy", "--max-tokens", "6", "Once"]
    assert run(monkeypatch, *options, *arguments) == 0
    line = json_lines(capsys.readouterr().out)[0]
    sampling = Sampling(greedy=True, max_tokens=6)
    reply = generate(loaded.model, [ids_of(loaded, *messages)], sampling, loaded.tokenizer.eos)[0]
    assert line["tokens"] == reply.tokens
    assert run(monkeypatch, *arguments) == 0
    assert json_lines(capsys.readouterr().out)[0]["tokens"] != reply.tokens


@pytest.mark.parametrize("quick", [True, False])
def test_bfloat16_casts_the_weights_and_warns_where_that_is_slower(
    quick, loaded, monkeypatch, capsys
):
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: quick)
    assert run(monkeypatch, "--json", "--greedy", "--bfloat16", "--max-tokens", "9", "Hi") == 0
    captured = capsys.readouterr()
    half, sampling = byte_model().model.bfloat16(), Sampling(greedy=True, max_tokens=9)
    prompt = ids_of(loaded, Message("user", "Hi"))
    reply = generate(half, [prompt], sampling, loaded.tokenizer.eos)[0]
    assert json_lines(captured.out)[0]["tokens"] == reply.tokens
    assert loaded.model.head.weight.dtype == torch.bfloat16
    assert ("warning: --bfloat16" in captured.err) != quick


def test_messages_of_a_file_are_asked_without_their_last_reply(
    loaded, tmp_path, monkeypatch, capsys
):
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n" + '{"prompt": "Hi"}\n', encoding="utf-8")
    assert run(monkeypatch, "--json", "--greedy", "--max-tokens", "6", "--file", str(path)) == 0
    lines = json_lines(capsys.readouterr().out)
    prompts = [
        ids_of(loaded, *(Message(*turn) for turn in turns[:3])),
        ids_of(loaded, Message("user", "Hi")),
    ]
    replies = generate(
        loaded.model, prompts, Sampling(greedy=True, max_tokens=6), loaded.tokenizer.eos
    )
    assert [line["tokens"] for line in lines] == [reply.tokens for reply in replies]
    assert [line["prompt"] for line in lines] == [row["messages"], "Hi"]


def test_arguments_text_files_and_standard_input_give_the_same(
    loaded, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "prompts.txt"
    path.write_text("One, two=3\n\nThree\n", encoding="utf-8")
    options = ("--json", "--num", "2", "--max-tokens", "5")
    outputs = []
    for arguments in (("One, two=3", "Three"), ("--file", str(path)), ()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        assert run(monkeypatch, *options, *arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    prompts = [line["prompt"] for line in json_lines(outputs[0])]
    assert prompts == ["One, two=3", "One, two=3", "Three", "Three"]
    replies = [tuple(line["tokens"]) for line in json_lines(outputs[0])]
    assert len(set(replies)) == 4, "each reply is drawn for itself"


def test_no_prompt_on_standard_input_is_an_error(loaded, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: no prompt")


def test_replies_do_not_depend_on_how_prompts_are_grouped(loaded, monkeypatch, capsys):
    arguments = ["--json", "--max-tokens", "4", *(f"prompt {n}" for n in range(7))]
    run(monkeypatch, *arguments)
    together = capsys.readouterr().out
    monkeypatch.setattr(sample, "GROUP", 3)
    run(monkeypatch, *arguments)
    assert capsys.readouterr().out == together


def test_one_prompt_streams_the_text_that_json_gives(loaded, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(sample, "print_now", written.append)
    run(monkeypatch, "--max-tokens", "12", "--seed", "5", "Hi")
    assert capsys.readouterr().out == "\n"
    run(monkeypatch, "--max-tokens", "12", "--seed", "5", "--json", "Hi")
    assert "".join(written) == json_lines(capsys.readouterr().out)[0]["text"]
    assert len(written) > 1


def push_all(printer, tokens) -> str:
    for token in tokens:
        if printer.push(token):
            break
    return printer.close()


def test_half_a_character_is_never_written():
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    text = "é→𝄞 naïve"
    written = []
    printer = Printer(tokenizer, [], written.append)
    assert push_all(printer, tokenizer.encode(text)) == text
    assert written == list(text)


def test_a_reply_cut_inside_a_character_is_written_at_its_end():
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    written = []
    printer = Printer(tokenizer, [], written.append)
    assert push_all(printer, tokenizer.encode("aé")[:-1]) == "a\ufffd"
    assert written == ["a", "\ufffd"]


@pytest.mark.parametrize("text", ["one END two", "END", "oEEND", "no stop", "only EN", "→ENDé"])
def test_text_ends_before_the_stop_and_nothing_of_it_is_written(text):
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    written = []
    printer = Printer(tokenizer, ["END", "\n\n"], written.append)
    expected = text.partition("END")[0]
    assert push_all(printer, tokenizer.encode(text)) == expected
    assert "".join(written) == expected
    assert printer.stopped == ("END" in text)


@pytest.mark.parametrize("pieces", [["yes x"], ["y", "e", "s", " ", "x"], ["ye", "s x"]])
def test_of_stops_that_overlap_the_one_that_is_complete_first_counts(pieces):
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    printer = Printer(tokenizer, ["es ", "s"])
    for piece in pieces:
        printer._take(piece)
        if printer.stopped:
            break
    assert printer.close() == "ye"


def test_stop_ends_a_reply_with_the_finish_stop(loaded, monkeypatch, capsys):
    run(monkeypatch, "--json", "--max-tokens", "30", "Hi")
    free = json_lines(capsys.readouterr().out)[0]
    stop = next(c for at, c in enumerate(free["text"]) if at > 2 and c not in free["text"][:at])
    run(monkeypatch, "--json", "--max-tokens", "30", "--stop", stop, "--stop", "never", "Hi")
    stopped = json_lines(capsys.readouterr().out)[0]
    assert stopped["finish"] == "stop"
    assert stopped["text"] == free["text"].partition(stop)[0]
    assert stopped["tokens"] == free["tokens"][: len(stopped["tokens"])]
    assert len(stopped["tokens"]) < len(free["tokens"])


@pytest.mark.parametrize(("max_tokens", "room"), [(20, CONTEXT - 20), (60, CONTEXT // 2)])
def test_a_prompt_beyond_the_context_keeps_bos_and_its_newest_tokens(
    max_tokens, room, loaded, monkeypatch, capsys
):
    text = "".join(chr(97 + n % 26) for n in range(100))
    arguments = ["--json", "--greedy", "--max-tokens", str(max_tokens), text]
    assert run(monkeypatch, *arguments) == 0
    captured = capsys.readouterr()
    ids = ids_of(loaded, Message("user", text))
    kept = [loaded.tokenizer.bos, *ids[-(room - 1) :]]
    assert len(kept) == room
    sampling = Sampling(greedy=True, max_tokens=max_tokens)
    reply = generate(loaded.model, [kept], sampling, loaded.tokenizer.eos)[0]
    assert json_lines(captured.out)[0]["tokens"] == reply.tokens
    warnings = [line for line in captured.err.splitlines() if "dropped" in line]
    assert len(warnings) == 1
    assert f"oldest {len(ids) - room} tokens" in warnings[0]


def test_a_prompt_within_the_context_is_kept_whole():
    ids = list(range(CONTEXT))
    assert newest_tokens(ids, CONTEXT, max_tokens=10**6, bos=0) == ids


@pytest.mark.parametrize("scheme", ["rope", "learned"])
def test_a_reply_that_reaches_the_context_runs_past_it_with_a_warning_or_ends_there(
    scheme, monkeypatch, capsys
):
    loaded = byte_model(scheme)
    loaded.tokenizer.eos = None  # so that nothing but the length ends the reply
    use(monkeypatch, loaded)
    assert run(monkeypatch, "--json", "--greedy", "--max-tokens", str(2 * CONTEXT), "Hi") == 0
    captured = capsys.readouterr()
    line = json_lines(captured.out)[0]
    prompt = len(ids_of(loaded, Message("user", "Hi")))
    assert line["finish"] == "length"
    if scheme == "learned":
        assert prompt + len(line["tokens"]) == CONTEXT + 1
        assert "warning" not in captured.err
    else:
        assert len(line["tokens"]) == 2 * CONTEXT
        assert f"past the trained length of {CONTEXT} tokens" in captured.err


def test_the_trained_length_is_what_training_held_and_not_the_context(monkeypatch, capsys):
    loaded = byte_model(trained=20)
    loaded.tokenizer.eos = None
    use(monkeypatch, loaded)
    room = 20 - len(ids_of(loaded, Message("user", "Hi")))
    for tokens, past in ((room + 1, False), (room + 2, True)):
        assert run(monkeypatch, "--greedy", "--max-tokens", str(tokens), "Hi") == 0
        warned = "past the trained length of 20 tokens" in capsys.readouterr().err
        assert warned == past


def test_a_model_of_a_stream_continues_the_bare_text_and_knows_no_turns(monkeypatch, capsys):
    loaded = byte_model(form="stream")
    use(monkeypatch, loaded)
    assert run(monkeypatch, "--greedy", "Once") == 2
    assert "--raw" in capsys.readouterr().err
    assert run(monkeypatch, "--raw", "--json", "--greedy", "--max-tokens", "5", "Once") == 0
    tokens = json_lines(capsys.readouterr().out)[0]["tokens"]
    sampling = Sampling(greedy=True, max_tokens=5)
    bare = [loaded.tokenizer.encode("Once")]
    assert tokens == generate(loaded.model, bare, sampling, loaded.tokenizer.eos)[0].tokens


def test_a_model_of_plain_texts_says_that_it_knows_no_turns(loaded, monkeypatch, capsys):
    loaded.state["turns"] = False
    assert run(monkeypatch, "Once") == 2
    assert "has learned plain text, not turns: add --raw" in capsys.readouterr().err
    assert run(monkeypatch, "--raw", "--max-tokens", "3", "Once") == 0


def test_a_chat_reads_the_turns_before_and_survives_a_mistake(loaded, monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    lines = iter(["Hi", "", "\udcff", "And now?"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)
    assert run(monkeypatch, "--json", "--greedy", "--max-tokens", "5", "--system", "Be brief.") == 0
    captured = capsys.readouterr()
    first, second = json_lines(captured.out)
    asked = [Message("system", "Be brief."), Message("user", "Hi")]
    asked += [Message("assistant", first["text"]), Message("user", "And now?")]
    sampling = Sampling(greedy=True, max_tokens=5)
    reply = generate(loaded.model, [ids_of(loaded, *asked)], sampling, loaded.tokenizer.eos)[0]
    assert second["tokens"] == reply.tokens
    assert captured.err.count("error: ") == 1


def test_ctrl_c_exits_130_without_a_traceback(loaded, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sample.Answerer, "answer", interrupt)
    assert run(monkeypatch, "Hi") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_closed_pipe_is_quiet():
    script = textwrap.dedent("""
        import sys
        import sample
        def main():
            while True:
                print("a reply that nobody reads any more")
        sample.main = main
        sys.exit(sample.command())
    """)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert os.read(reader, 10)
    os.close(reader)
    _, errors = process.communicate(timeout=30)
    assert errors == b""
    assert process.returncode == 0


def test_every_command_tells_the_version(capsys):
    import sample
    from wherelm import evaluate, probes, visualize

    for command in (sample, evaluate, probes, visualize):
        with pytest.raises(SystemExit) as stopped:
            command.main(["--version"])
        assert stopped.value.code in (0, None)
        assert re.fullmatch(r"wherelm \d+\.\d+\.\d+\n", capsys.readouterr().out)
