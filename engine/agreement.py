"""How far greedy tokens agree with the reference: ``python -m engine.agreement --model DIR``.

The engine answers all prompts in one batch; then transformers, in the same dtype, is given each prompt with the
engine's answer, in one pass. Up to the first token that it would not have chosen itself, the two answers are equal.
Needs transformers, which only development installs bring.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.config import DTYPE_BYTES, EngineConfig
from engine.engine import Engine
from engine.model_ids import ModelError, resolve_model
from engine.request import Request, SamplingParams
from engine.tokenizer import load_tokenizer
from engine.weights import load_model

_FORMS = ("What is {}?", "Write three sentences about {}.", "Why do people like {}?", "The history of {} begins",
          "def {}(values):")  # fmt: skip
_TOPICS = (
    "a river",
    "music",
    "the moon",
    "bread",
    "a compiler",
    "football",
    "winter",
    "sorting",
    "trade",
    "a cat",
)
MOST_PROMPTS = len(_FORMS) * len(_TOPICS)


@dataclass(frozen=True)
class Divergence:
    """Where a prompt's answers part: at output ``position``; ``margin`` is the reference's between the two tokens."""

    prompt: int
    position: int
    margin: float


def prompts(count: int) -> Iterator[str]:
    """The same texts every time."""
    for index in range(count):
        yield _FORMS[index % len(_FORMS)].format(_TOPICS[index // len(_FORMS)])


def engine_answers(path: Path, dtype: str, asked: list[tuple[int, ...]], num_tokens: int) -> list[list[int]]:
    """Greedy, all in one batch, through the end-of-sequence token."""
    loaded = load_model(path, dtype)
    blocks = sum(-(-(len(ids) + num_tokens) // 16) + 1 for ids in asked)
    engine = Engine(EngineConfig(dtype=dtype, num_blocks=blocks, max_num_seqs=16), loaded)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in asked]
    for index, ids in enumerate(asked):
        engine.add(Request(str(index), ids, sampling))
    while engine.has_work():
        for token in engine.step().new_tokens:
            answers[int(token.request_id)].append(token.token_id)
    return answers


def divergences(
    path: Path, dtype: str, asked: list[tuple[int, ...]], answers: list[list[int]]
) -> Iterator[Divergence]:
    """The prompts whose answers are not those of transformers."""
    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    for index, (ids, answer) in enumerate(zip(asked, answers, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *answer[:-1]]])).logits[0, len(ids) - 1 :].float()
        parted = (logits.argmax(-1) != torch.tensor(answer)).nonzero()
        if len(parted):
            at = int(parted[0])
            yield Divergence(index, at, float(logits[at].max() - logits[at, answer[at]]))


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 agreement printed, 1 float32 answers differ, 2 wrong usage, 3 transformers is missing."""
    parser = argparse.ArgumentParser(prog="python -m engine.agreement", description=__doc__)
    parser.add_argument("--model", required=True, help="id or Hugging Face directory")
    parser.add_argument("--prompts", type=int, default=MOST_PROMPTS, help=f"1 to {MOST_PROMPTS}")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", choices=[*DTYPE_BYTES, "both"], default="both")
    options = parser.parse_args(arguments)
    if not 1 <= options.prompts <= MOST_PROMPTS:
        parser.error(f"--prompts is {options.prompts}; allowed is 1 to {MOST_PROMPTS}")
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; allowed is 1 or more")
    if find_spec("transformers") is None:
        print("engine.agreement needs transformers, which is not installed", file=sys.stderr)
        return 3
    try:
        source = resolve_model(options.model)
        if source.path is None or source.is_gguf:
            raise ModelError(f"{options.model} is not a Hugging Face directory: the reference cannot read it")
        tokenizer = load_tokenizer(source)
        asked = [tuple(tokenizer.encode(text)) for text in prompts(options.prompts)]
        longest = max(map(len, asked)) + options.tokens
        if longest >= source.config.max_model_len:
            raise ModelError(f"--tokens is {options.tokens}; with its prompt an answer must stay below the context of "
                             f"{source.config.max_model_len} tokens")  # fmt: skip
        torch.set_num_threads(1)
        exact = True
        for dtype in DTYPE_BYTES if options.dtype == "both" else [options.dtype]:
            answers = engine_answers(source.path, dtype, asked, options.tokens)
            parted = list(divergences(source.path, dtype, asked, answers))
            exact = exact and (dtype != "float32" or not parted)
            print(
                f"{dtype}: {len(asked) - len(parted)} of {len(asked)} answers of {options.tokens} tokens equal"
            )
            for each in parted:
                print(f"  prompt {each.prompt} parts at token {each.position}, margin {each.margin:.3g}")
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
