"""Public request traces as workloads: who sent how much when. Holds no text, so prompts are made up to its lengths.

Formats: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens;
https://github.com/Azure/AzurePublicDataset) and Mooncake's (JSON lines with timestamp in ms, input_length,
output_length and hash_ids, one per 512 tokens of the prompt, where equal ids are equal tokens after equal tokens;
https://github.com/kvcache-ai/Mooncake).
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from cluster.workload import PlannedRequest, PromptCorpus

TRACE_ENDINGS: Final = (".csv", ".jsonl")
MOONCAKE_BLOCK_TOKENS: Final = 512

_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace cannot be used; the message is one line that names file, line and what is allowed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``prefix_ids`` name the prompt's blocks of ``block_tokens`` tokens; () = a prompt like no other."""

    at_s: float  # from the first request
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is bent to fit a small cluster. ``speed`` 2: twice as fast; ``lengths`` 0.25: a quarter as long."""

    speed: float = 1.0
    lengths: float = 1.0
    max_requests: int = 0  # 0 = all of them


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """What will be sent, and what was done to the trace for it."""

    requests: tuple[TraceRequest, ...]
    in_file: int
    cut_prompts: int  # shortened to leave room for an answer in the model's context
    cut_outputs: int
    detail: str  # one line for the operator


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def is_trace(name: str) -> bool:
    """A load that is a file and no name of a profile's load."""
    return name.lower().endswith(TRACE_ENDINGS)


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests in order of arrival, the first at 0. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(_azure(path, file) if path.suffix.lower() == ".csv" else _mooncake(path, file))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text: {error.reason} at byte {error.start}") from error
    if not lines:
        raise TraceError(f"{path} holds no request")
    lines.sort(key=lambda request: request.at_s)
    first_s = lines[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in lines]


def scale_trace(requests: Sequence[TraceRequest], scaling: Scaling, max_model_len: int) -> ScaledTrace:
    """Shorter, faster, and cut to ``max_model_len`` tokens of prompt and answer together.

    A prompt leaves room for one token at least; then the answer takes what is left. Raises ValueError for a factor
    that is not above 0.
    """
    for name, factor in (("speed", scaling.speed), ("lengths", scaling.lengths)):
        if not 0 < factor < float("inf"):
            raise ValueError(f"{name} is {factor}; allowed is above 0")
    taken = requests[: scaling.max_requests or None]
    scaled = []
    cut_prompts = cut_outputs = 0
    for request in taken:
        prompt, output = (
            max(1, round(tokens * scaling.lengths))
            for tokens in (request.prompt_tokens, request.output_tokens)
        )
        prompt_room = max_model_len - 1
        cut_prompts += prompt > prompt_room
        prompt = min(prompt, prompt_room)
        cut_outputs += output > max_model_len - prompt
        output = min(output, max_model_len - prompt)
        scaled.append(
            TraceRequest(
                request.at_s / scaling.speed,
                prompt,
                output,
                request.prefix_ids,
                max(1, round(request.block_tokens * scaling.lengths)),
            )
        )
    span_s = scaled[-1].at_s if scaled else 0.0
    parts = [f"{len(scaled):,} of {len(requests):,} requests over {span_s:,.1f} s"]
    if scaling.speed != 1.0:
        parts.append(f"{scaling.speed:g} times as fast")
    if scaling.lengths != 1.0:
        parts.append(f"lengths times {scaling.lengths:g}")
    if cut_prompts or cut_outputs:
        parts.append(f"{cut_prompts} prompts and {cut_outputs} answers cut to a context of {max_model_len:,}")
    return ScaledTrace(tuple(scaled), len(requests), cut_prompts, cut_outputs, ", ".join(parts))


def planned_requests(trace: ScaledTrace, corpus: PromptCorpus, seed: int = 0) -> Iterator[PlannedRequest]:
    """Requests to send. Equal prefix ids become equal tokens, in any order of sending and in any process."""
    rng = random.Random(f"trace {seed}")
    for request in trace.requests:
        yield PlannedRequest(
            at_s=request.at_s,
            prompt_token_ids=_prompt(request, corpus, rng, seed),
            max_tokens=request.output_tokens,
            seed=rng.randrange(2**31),
        )


def _prompt(request: TraceRequest, corpus: PromptCorpus, rng: random.Random, seed: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    for prefix_id in request.prefix_ids:
        if len(tokens) >= request.prompt_tokens:
            break
        tokens += corpus.cut(random.Random(f"block {seed} {prefix_id}"), request.block_tokens)
    tokens = tokens[: request.prompt_tokens]
    return tokens + corpus.cut(rng, request.prompt_tokens - len(tokens))


def _azure(path: Path, file: Iterator[str]) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file)
    missing = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"{path}: column {missing[0]} is missing; a trace has {', '.join(_AZURE_COLUMNS)}")
    for row in reader:
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from error
        yield _checked(path, reader.line_num, TraceRequest(at_s, prompt, output))


def _mooncake(path: Path, file: Iterator[str]) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        request = TraceRequest(line.timestamp / 1000.0, line.input_length, line.output_length, line.hash_ids)
        yield _checked(path, number, request)


def _checked(path: Path, number: int, request: TraceRequest) -> TraceRequest:
    if request.prompt_tokens < 1 or request.output_tokens < 0:
        raise TraceError(
            f"{path}, line {number}: {request.prompt_tokens} prompt and {request.output_tokens} output tokens; "
            "allowed are 1 or more and 0 or more"
        )
    return request
