"""What a load asks for and when: seeded arrivals and prompts of exact length. Knows no HTTP, no clock and no event.

The same section and seed give the same prompts at the same offsets, so that two runs can be compared.
"""

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.profile import LoadSection

CORPUS_MODULES: Final = (
    "argparse", "ast", "calendar", "configparser", "csv", "datetime", "difflib", "doctest", "enum", "fractions",
    "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "optparse", "pathlib", "pdb", "platform",
    "shutil", "smtplib", "ssl", "statistics", "subprocess", "tarfile", "textwrap", "threading", "typing", "zipfile",
)  # fmt: skip
"""Modules of Python's standard library whose source is the text of the prompts: every machine has it."""

SYNTHETIC_TOKEN_IDS: Final = 256
"""Prompts for models of random weights are ids below this: every such model's vocabulary has the 256 bytes."""

_SYNTHETIC_CORPUS_TOKENS: Final = 1 << 16
_MAX_SEED: Final = 2**31


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send ``at_s`` seconds after its load began."""

    at_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True


class PromptCorpus:
    """A ring of token ids that prompts are cut from.

    Raises ValueError when there is not one token.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt corpus has no tokens; allowed is 1 or more")
        self._token_ids = tuple(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def cut(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        """Exactly ``num_tokens`` consecutive ids from a drawn place, going round where the ring ends."""
        begin = rng.randrange(len(self._token_ids))
        piece = self._token_ids[begin : begin + num_tokens]
        while len(piece) < num_tokens:
            piece += self._token_ids[: num_tokens - len(piece)]
        return piece


def corpus_text(max_chars: int) -> str:
    """Python source and docstrings, the first ``max_chars`` of ``CORPUS_MODULES`` in order.

    Raises OSError when this Python has no standard library source.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    missing = max_chars
    for module in CORPUS_MODULES:
        file = stdlib / f"{module}.py"
        if not file.is_file():  # a module may move into a package in a later Python
            file = stdlib / module / "__init__.py"
        parts.append(file.read_text(encoding="utf-8")[:missing])
        missing -= len(parts[-1])
        if missing <= 0:
            break
    return "".join(parts)


def synthetic_corpus(seed: int = 0) -> PromptCorpus:
    """Seeded random ids below ``SYNTHETIC_TOKEN_IDS``: models of random weights know no language."""
    rng = random.Random(seed)
    return PromptCorpus([rng.randrange(SYNTHETIC_TOKEN_IDS) for _ in range(_SYNTHETIC_CORPUS_TOKENS)])


def arrival_offsets(rate_per_s: float, rng: random.Random, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds from the start of each arrival, without end.

    Gaps are gamma distributed with mean ``1 / rate_per_s`` and shape ``burstiness``: 1 is a Poisson process, below 1
    comes in clumps, above 1 is more even. Raises ValueError for a rate or burstiness that is not above 0.
    """
    if rate_per_s <= 0:
        raise ValueError(f"rate_per_s is {rate_per_s}; allowed is above 0")
    if burstiness <= 0:
        raise ValueError(f"burstiness is {burstiness}; allowed is above 0")
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))
        yield at_s


def steady_requests(
    load: LoadSection, corpus: PromptCorpus, burstiness: float = 1.0
) -> Iterator[PlannedRequest]:
    """The endless schedule of a load. Arrivals and prompts have streams of their own: another prompt length leaves
    the arrivals as they were."""
    arrivals = arrival_offsets(load.rate_per_s, random.Random(f"arrivals {load.seed}"), burstiness)
    rng = random.Random(f"prompts {load.seed}")
    for at_s in arrivals:
        yield PlannedRequest(
            at_s=at_s,
            prompt_token_ids=corpus.cut(rng, load.prompt_tokens),
            max_tokens=load.max_tokens,
            temperature=load.temperature,
            seed=rng.randrange(_MAX_SEED),
            ignore_eos=load.ignore_eos,
        )


def burst_requests(
    prompts: int, prompt_tokens: int, max_tokens: int, corpus: PromptCorpus, seed: int
) -> list[PlannedRequest]:
    """``prompts`` different requests for the same instant. Another ``seed`` gives other prompts, so that a second
    burst is not answered from the prefix cache."""
    rng = random.Random(f"burst {seed}")
    return [
        PlannedRequest(
            at_s=0.0,
            prompt_token_ids=corpus.cut(rng, prompt_tokens),
            max_tokens=max_tokens,
            seed=rng.randrange(_MAX_SEED),
        )
        for _ in range(prompts)
    ]
