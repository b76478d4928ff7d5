"""Make the model that ships: ``python -m engine.models.recipe [--out DIR] [--minutes N]``.

Reads the interpreter's own library, trains a tokenizer and a model, measures it on modules it has never seen, and
writes a Hugging Face directory with its own model card.
"""

import argparse
import dataclasses
import hashlib
import json
import platform
import random
import shutil
import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.models.corpus import (
    ASSISTANT,
    END_IDS,
    END_OF_TEXT_ID,
    END_OF_TURN,
    SPECIAL_TOKENS,
    USER,
    Corpus,
    build_corpus,
)
from engine.models.measuring import bits_per_byte, greedy
from engine.models.model_directory import Recipe, Sample, write_directory
from engine.models.training import Packer, TrainingReport, train
from engine.models.training_model import Shape, TrainingModel

MIX = {"modules": 0.50, "pieces": 0.17, "prose": 0.06, "chats": 0.27}
"""Share of training tokens by kind of document."""

EXCERPT_TOKENS = 8192
SAMPLE_TOKENS = 160
SAMPLE_PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file',
    "class Queue:\n",
    "import os\nimport sys\n",
    f"{USER}Return the absolute path of a file.{END_OF_TURN}{ASSISTANT}",
    f"{USER}Write a Python function `is_empty`: return True if the queue is empty.{END_OF_TURN}{ASSISTANT}",
    f"{USER}What is str.split?{END_OF_TURN}{ASSISTANT}",
)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any UTF-8 text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus.modules, *corpus.prose], trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: tuple[str, ...]) -> list[list[int]]:
    """Token ids of each document, ended by the end-of-text token."""
    return [[*encoding.ids, END_OF_TEXT_ID] for encoding in tokenizer.encode_batch_fast(list(documents))]


def bytes_per_token(tokenizer: Tokenizer) -> torch.Tensor:
    """(vocab,) UTF-8 bytes each token stands for; a byte-level token has one character per byte."""
    sizes = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.long)
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= len(SPECIAL_TOKENS):
            sizes[token_id] = len(token)
    return sizes


def make(
    out: Path,
    minutes: float,
    *,
    corpus: Corpus,
    shape: Shape,
    seed: int,
    compiled: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The whole recipe; replaces ``out`` only when everything is done."""
    tokenizer = train_tokenizer(corpus, shape.vocab_size)
    kinds = {kind: encode_documents(tokenizer, documents_of(corpus, kind)) for kind in MIX}
    for kind, documents in kinds.items():
        print(f"{kind}: {len(documents)} documents, {sum(map(len, documents))} tokens", flush=True)
    torch.manual_seed(seed)
    model = TrainingModel(shape)
    packer = Packer(list(kinds.values()), list(MIX.values()), lanes=8, seed=seed)
    budget_s = 60 * minutes * torch.get_num_threads()
    report = train(
        model, packer, budget_s, compiled=compiled, dtype=dtype, report=lambda line: print(line, flush=True)
    )
    # Measured as stored: rounded to bfloat16, computed in float32.
    model.to(torch.bfloat16).to(torch.float32)
    recipe = measure(
        model, tokenizer, corpus, report, minutes=minutes, seed=seed, compiled=compiled, dtype=dtype
    )
    staging = Path(tempfile.mkdtemp(prefix=".tiny-", dir=out.parent))
    write_directory(staging, model, tokenizer, recipe)
    replace_directory(staging, out)
    print(json.dumps(dataclasses.asdict(recipe), indent=1))


def documents_of(corpus: Corpus, kind: str) -> tuple[str, ...]:
    """The training documents of one kind of ``MIX``."""
    by_kind = {
        "modules": corpus.modules,
        "pieces": corpus.pieces,
        "prose": corpus.prose,
        "chats": corpus.chats,
    }
    return by_kind[kind]


def held_out_excerpt(text: str, tokenizer: Tokenizer) -> str:
    """The beginning of a text, about as many tokens as the model has positions."""
    # Cutting text at a token's edge may not encode to the same tokens; decoding and encoding again is exact.
    excerpt: str = tokenizer.decode(tokenizer.encode(text).ids[: EXCERPT_TOKENS - 64])
    while len(tokenizer.encode(excerpt).ids) > EXCERPT_TOKENS:
        excerpt = excerpt[:-1]
    return excerpt


def measure(
    model: TrainingModel,
    tokenizer: Tokenizer,
    corpus: Corpus,
    report: TrainingReport,
    *,
    minutes: float,
    seed: int,
    compiled: bool,
    dtype: torch.dtype,
) -> Recipe:
    """Figures for the card."""
    stream = [END_OF_TEXT_ID] + [
        token for document in encode_documents(tokenizer, corpus.held_out) for token in document
    ]
    sizes = bytes_per_token(tokenizer)
    held_out = bits_per_byte(model, stream, sizes)
    excerpt = held_out_excerpt(max(corpus.held_out, key=len), tokenizer)
    row = torch.tensor([[END_OF_TEXT_ID, *tokenizer.encode(excerpt).ids]])
    with torch.no_grad():
        excerpt_bits = model.losses(row).double().sum().item() / torch.log(torch.tensor(2.0)).item()
    samples = []
    for prompt in SAMPLE_PROMPTS:
        new = greedy(model, tokenizer.encode(prompt).ids, SAMPLE_TOKENS, frozenset(END_IDS))
        samples.append(Sample(prompt, tokenizer.decode(new, skip_special_tokens=False), new[-1] in END_IDS))
    recipe = Recipe(
        seed=seed,
        python=platform.python_version(),
        torch=torch.__version__,
        tokenizers=tokenizers.__version__,
        machine=f"{platform.machine()} CPU",
        threads=torch.get_num_threads(),
        minutes=minutes,
        compiled=compiled,
        products=str(dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=report.steps,
        tokens=report.tokens,
        training_s=round(report.wall_s, 1),
        tokens_per_s=round(report.tokens / report.wall_s, 1),
        training_loss_nats=round(report.last_loss, 4),
        bits_per_byte=round(held_out.overall, 4),
        bits_per_byte_by_position={name: round(value, 4) for name, value in held_out.by_position.items()},
        held_out_bytes=sum(len(text.encode()) for text in corpus.held_out),
        excerpt_bytes=len(excerpt.encode()),
        excerpt_sha256=hashlib.sha256(excerpt.encode()).hexdigest(),
        excerpt_bits_per_byte=round(excerpt_bits / len(excerpt.encode()), 4),
        samples=tuple(samples),
    )
    return recipe


def replace_directory(new: Path, old: Path) -> None:
    """Move ``new`` to where ``old`` is, so that a reader finds either the one or the other."""
    new.chmod(0o755)
    if old.exists():
        aside = Path(tempfile.mkdtemp(prefix=".tiny-", dir=old.parent))
        old.rename(aside / "old")
        new.rename(old)
        shutil.rmtree(aside)
    else:
        new.rename(old)


def main(argv: list[str] | None = None) -> int:
    """Command line of the recipe; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.models.recipe", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny", metavar="DIR")
    parser.add_argument(
        "--minutes",
        type=float,
        default=50.0,
        help="processor time to train for, per thread (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the model; needs a C++ compiler"
    )
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="matrix products in bfloat16: much faster on processors with AMX, slower on those without",
    )
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0 or arguments.threads < 1:
        parser.error(f"--minutes {arguments.minutes} --threads {arguments.threads}: both must be above 0")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out {arguments.out}: its parent directory does not exist")
    torch.set_num_threads(arguments.threads)
    random.seed(arguments.seed)
    make(
        arguments.out.resolve(),
        arguments.minutes,
        corpus=build_corpus(seed=arguments.seed),
        shape=Shape(),
        seed=arguments.seed,
        compiled=arguments.compile,
        dtype=torch.bfloat16 if arguments.bfloat16 else torch.float32,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
