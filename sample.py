"""Sample text from a trained model: python sample.py [options] "prompt" …

`python sample.py --help` shows every option. Torch is imported after the options are read, so that
help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherelm.command_line import ArgumentParser

if TYPE_CHECKING:
    from wherelm.checkpoint import Loaded
    from wherelm.data.messages import Message
    from wherelm.sampling.drawing import Sampling
    from wherelm.sampling.prompts import Prompt

ROOT = Path(__file__).resolve().parent
GROUP = 256  # replies of one batch, and of one step of the progress bar

EPILOG = """\
Prompts come from the arguments, from --file, else from standard input (one a line); with a
terminal and no prompt, this is a chat, which Ctrl-D ends. A reply to one prompt is shown as it is
written.

A prompt longer than the model's context (model.context, in tokens) keeps <BOS> and its newest
tokens: as many as leave room for --max-tokens, but at least half of the context. A reply may run
past the context, except with a position scheme that has a limit (learned, randomised), where it
ends there.
Dropped tokens and replies that run past are said on standard error.

--json prints {"prompt", "text", "tokens", "finish"}: `tokens` are the ids as they were sampled,
without <EOS>; `finish` is "end" (<EOS>), "stop" (--stop) or "length".

examples:
  python sample.py "Send the report before the slides."
  python sample.py --run runs/errands/2026-01-31_12-00-00 --greedy --json --file prompts.txt
  echo "Sign the contract after you file the invoice." | python sample.py --num 3
"""


def argument_parser() -> ArgumentParser:
    """The options. Those of `Sampling` are absent where they were not given."""
    parser = ArgumentParser(
        prog="sample.py",
        description="Samples text from a trained model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a user's message")
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="run or checkpoint folder (default: the newest run's best checkpoint below runs/, "
        "else data/pretrained/errands)",
    )
    parser.add_argument(
        "--file",
        metavar="PATH",
        help='prompts of a file: one a line, or .jsonl lines with {"prompt"} or {"messages"}, '
        "whose last assistant turn, if there is one, is left out and asked for",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, not as a message"
    )
    parser.add_argument("--num", type=int, default=1, metavar="N", help="replies a prompt (1)")
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="weights in bfloat16: faster for a large model and many prompts where the machine "
        "multiplies it; replies may differ",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a reply")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a reply before this text (may be given several times)",
    )
    drawing = parser.add_argument_group("how tokens are drawn")
    drawing.add_argument(
        "--greedy", action="store_true", help="always the likeliest token", **absent
    )
    drawing.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (0.7)", **absent
    )
    drawing.add_argument(
        "--top-k", type=int, metavar="K", help="only the K likeliest tokens (all)", **absent
    )
    drawing.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="only the fewest likeliest tokens that hold the probability P (1.0)",
        **absent,
    )
    drawing.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="only tokens at least P times as likely as the likeliest (0.0)",
        **absent,
    )
    drawing.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1 makes tokens that are already there less likely (1.0)",
        **absent,
    )
    drawing.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest reply in tokens (128)", **absent
    )
    drawing.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same replies (0)", **absent
    )
    return parser


def check_together(options: argparse.Namespace) -> None:
    """ValueError for options that are wrong by themselves, or contradict each other."""
    if options.num < 1:
        raise ValueError(f"--num {options.num}: expected a whole number of 1 or more")
    if "" in options.stop:
        raise ValueError("--stop '': expected a text that is not empty")
    if options.raw and options.system is not None:
        raise ValueError("--system: a plain text has no system message; leave out --raw")
    greedy = getattr(options, "greedy", False)
    if greedy or getattr(options, "temperature", None) == 0:
        why = "--greedy" if greedy else "--temperature 0"
        for name in (*(["temperature"] if greedy else []), "top_k", "top_p", "min_p"):
            if hasattr(options, name):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option}: has no effect with {why}; leave out one of the two")
        if options.num > 1:
            raise ValueError(f"--num {options.num}: all replies are the same with {why}")


def sampling_of(options: argparse.Namespace) -> Sampling:
    from dataclasses import fields

    from wherelm.sampling.drawing import Sampling

    names = [field.name for field in fields(Sampling)]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    try:
        return Sampling(**given)
    except ValueError as error:  # NAME=VALUE: why
        name, _, rest = str(error).partition("=")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from error


def read_prompts(options: argparse.Namespace) -> list[Prompt]:
    """All prompts, with the system message before them; none at all means a chat."""
    from wherelm.run_folder import CONFIG
    from wherelm.sampling.prompts import (
        Prompt,
        file_prompts,
        numbered_lines,
        text_prompt,
        with_system,
    )

    for text in options.prompts:
        if os.path.isfile(os.path.join(text, CONFIG)):  # False for a text of any length
            raise ValueError(f"{text}: a run, not a prompt; give it as --run {text}")
    prompts = [text_prompt(text, options.raw) for text in options.prompts]
    if options.file is not None:
        prompts += file_prompts(Path(options.file), options.raw)
    elif not prompts:
        if sys.stdin is not None and sys.stdin.isatty():
            return []
        lines = numbered_lines(sys.stdin or (), "standard input")
        prompts = [text_prompt(line, options.raw) for _, line in lines]
    if not prompts:
        raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
    return [Prompt(p.given, with_system(p.messages, options.system)) for p in prompts]


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


class Answerer:
    """A loaded model, and how it is asked."""

    def __init__(self, loaded: Loaded, options: argparse.Namespace, sampling: Sampling):
        import torch

        from wherelm import runtime

        runtime.keep_freed_memory()
        device = runtime.choose_device("auto")
        self.model = loaded.model.to(device, torch.bfloat16 if options.bfloat16 else None)
        if options.bfloat16 and not runtime.multiplies_bfloat16(device):
            warn("--bfloat16: this machine does not multiply bfloat16, so it is slower")
        self.tokenizer, self.options, self.sampling = loaded.tokenizer, options, sampling
        self.streams = loaded.config.data.format == "stream"
        if not options.raw and not loaded.state.get("turns", not self.streams):
            raise ValueError("this model has learned plain text, not turns: add --raw")

    def prompt_tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, cut to the context; a warning counts what was dropped."""
        from wherelm.data.messages import Message, prompt_spans
        from wherelm.sampling.prompts import newest_tokens

        context, kept, dropped = self.model.config.context, [], 0
        for prompt in prompts:
            messages = prompt.messages
            if self.streams:
                messages = [Message("stream", messages[0].content)]
            ids = list(self.tokenizer.encode_spans(prompt_spans(messages))[0])
            if not ids:
                raise ValueError("an empty prompt: expected a text to continue")
            limits = (context, self.sampling.max_tokens, self.tokenizer.bos)
            kept.append(newest_tokens(ids, *limits))
            dropped += len(ids) - len(kept[-1])
        if dropped:
            warn(
                f"longer than the context of {context} tokens (model.context): "
                f"the oldest {dropped} tokens of the prompt{'s' * (len(kept) > 1)} were dropped"
            )
        return kept

    def answer(self, prompts: Sequence[Prompt], first_row: int = 0) -> list[str]:
        """Prints `options.num` replies to each prompt; returns the texts.

        `first_row` numbers the first reply, for its random numbers.
        """
        from wherelm.sampling.generation import generate
        from wherelm.sampling.printer import Printer

        options, trained = self.options, self.model.scheme.shape.trained
        ids = [tokens for tokens in self.prompt_tokens(prompts) for _ in range(options.num)]
        prompts = [prompt for prompt in prompts for _ in range(options.num)]
        streamed = len(prompts) == 1 and not options.json
        write = print_now if streamed else None
        rows = range(first_row, first_row + len(prompts))
        printers = {row: Printer(self.tokenizer, options.stop, write) for row in rows}
        replies = generate(
            self.model,
            ids,
            self.sampling,
            self.tokenizer.eos,
            rows,
            lambda row, token: printers[row].push(token),
        )
        texts = [printer.close() for printer in printers.values()]
        finishes = [
            "stop" if printer.stopped else reply.finish
            for printer, reply in zip(printers.values(), replies, strict=True)
        ]
        for prompt, text, reply, finish in zip(prompts, texts, replies, finishes, strict=True):
            if options.json:
                line = {"prompt": prompt.given, "text": text}
                line |= {"tokens": reply.tokens, "finish": finish}
                print(json.dumps(line, ensure_ascii=False))
            else:
                print("" if streamed else f"> {shown(prompt)}\n{text}\n")
        sys.stdout.flush()
        # The last token of a reply has been read only where the end came behind it.
        read = [
            len(i) + len(r.tokens) - (r.finish != "end") for i, r in zip(ids, replies, strict=True)
        ]
        past = sum(length > trained for length in read)
        if past:
            what = "the reply ran" if len(replies) == 1 else f"{past} replies ran"
            warn(f"{what} past the trained length of {trained} tokens")
        return texts

    def answer_all(self, prompts: Sequence[Prompt]) -> None:
        """Answers in groups, so that a long file shows its first replies early."""
        from tqdm import tqdm

        size = max(1, GROUP // self.options.num)
        starts = range(0, len(prompts), size)
        # No bar without a terminal, nor where the replies themselves show how far it is.
        hidden = len(starts) == 1 or not sys.stderr.isatty() or sys.stdout.isatty()
        for start in tqdm(starts, delay=2, disable=hidden, unit="batch"):
            self.answer(prompts[start : start + size], start * self.options.num)

    def chat(self) -> None:
        """Answers lines from the terminal until it is closed; each turn sees those before it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history of the input line)

        from wherelm.data.messages import Message
        from wherelm.sampling.prompts import Prompt, text_prompt, with_system

        history: list[Message] = []
        turn = 0
        while True:
            try:
                line = input("> ")
            except EOFError:
                print(file=sys.stderr)
                return
            if not line.strip():
                continue
            try:
                asked = history + text_prompt(line, self.options.raw).messages
                prompt = Prompt(line, with_system(asked, self.options.system))
                texts = self.answer([prompt], turn * self.options.num)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            turn += 1
            if not self.options.raw:
                history = [*asked, Message("assistant", texts[-1])]


def print_now(text: str) -> None:
    print(text, end="", flush=True)


def shown(prompt: Prompt) -> str:
    """A prompt in one line: its text, or its last message."""
    text = prompt.given if isinstance(prompt.given, str) else prompt.messages[-1].content
    return text.replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; ValueError and OSError say what is wrong in one line."""
    options = argument_parser().parse_intermixed_args(arguments)
    check_together(options)
    sampling = sampling_of(options)
    prompts = read_prompts(options)

    from wherelm import checkpoint

    folder = checkpoint.find(options.run, ROOT)
    loaded = checkpoint.load(folder)
    step = loaded.state.get("step")
    print(
        f"checkpoint: {os.path.relpath(folder)} (step {step}, "
        f"position={loaded.model.scheme.config.name})",
        file=sys.stderr,
    )
    answerer = Answerer(loaded, options, sampling)
    if prompts:
        answerer.answer_all(prompts)
    else:
        answerer.chat()
    return 0


def command() -> int:
    # Some programs put a byte order mark first.
    for stream, encoding in ((sys.stdin, "utf-8-sig"), (sys.stdout, "utf-8")):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding=encoding)
    try:
        return main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(command())
