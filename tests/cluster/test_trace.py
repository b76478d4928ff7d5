"""Public traces: read as they are, bent as asked, cut to the context, and said so."""

from pathlib import Path

import pytest

from cluster.trace import (
    Scaling,
    TraceError,
    TraceRequest,
    is_trace,
    planned_requests,
    read_trace,
    scale_trace,
)
from cluster.workload import PromptCorpus

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1300, "output_length": 60, "hash_ids": [0, 1, 7], "another": true}
"""
CORPUS = PromptCorpus(range(100_000))


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "azure.csv", AZURE))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(1.5)


def test_azure_requests_out_of_order_are_sorted(tmp_path: Path) -> None:
    head, early, late = AZURE.splitlines()
    requests = read_trace(written(tmp_path, "azure.csv", "\n".join((head, late, early))))
    assert [request.prompt_tokens for request in requests] == [4808, 110]
    assert requests[0].at_s == 0.0


def test_mooncake_keeps_its_prefix_ids(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert (first.prompt_tokens, first.output_tokens, first.prefix_ids) == (1100, 50, (0, 1, 2))
    assert second.at_s == pytest.approx(0.5)


def test_equal_prefix_ids_become_equal_tokens_and_no_others(tmp_path: Path) -> None:
    trace = scale_trace(read_trace(written(tmp_path, "trace.jsonl", MOONCAKE)), Scaling(), 8192)
    first, second = planned_requests(trace, CORPUS, seed=3)
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (1100, 1300)
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024:] != second.prompt_token_ids[1024:1100]
    (_, again) = planned_requests(trace, CORPUS, seed=3)
    assert again == second


def test_prompts_without_prefix_ids_differ(tmp_path: Path) -> None:
    trace = scale_trace([TraceRequest(0.0, 50, 1), TraceRequest(0.0, 50, 1)], Scaling(), 8192)
    first, second = planned_requests(trace, CORPUS)
    assert first.prompt_token_ids != second.prompt_token_ids


def test_scaling_shortens_hastens_and_keeps_prefixes_equal(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    trace = scale_trace(requests, Scaling(speed=2.0, lengths=0.25), 8192)
    first, second = planned_requests(trace, CORPUS)
    assert (len(first.prompt_token_ids), first.max_tokens) == (275, 12)
    assert second.at_s == pytest.approx(0.25)
    assert first.prompt_token_ids[:256] == second.prompt_token_ids[:256]
    assert "2 times as fast" in trace.detail
    assert "lengths times 0.25" in trace.detail


def test_what_does_not_fit_the_context_is_cut_and_counted() -> None:
    requests = [TraceRequest(0.0, 9000, 10), TraceRequest(1.0, 8000, 500), TraceRequest(2.0, 10, 10)]
    trace = scale_trace(requests, Scaling(), 8192)
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.requests] == [
        (8191, 1),
        (8000, 192),
        (10, 10),
    ]
    assert (trace.cut_prompts, trace.cut_outputs) == (1, 2)
    assert "1 prompts and 2 answers cut to a context of 8,192" in trace.detail


def test_only_the_first_requests_are_taken() -> None:
    requests = [TraceRequest(float(at), 10, 10) for at in range(5)]
    trace = scale_trace(requests, Scaling(max_requests=2), 8192)
    assert (len(trace.requests), trace.in_file) == (2, 5)
    assert trace.detail.startswith("2 of 5 requests over 1.0 s")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        ("a.csv", "", "column TIMESTAMP is missing"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "holds no request"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 4: Invalid isoformat string"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,1\n", "line 4"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,0,1\n", "line 4: 0 prompt and 1 output tokens"),
        ("a.csv", b"\xff\xfe\x00", "is not text"),
        ("a.jsonl", MOONCAKE + "{\n", "line 3"),
        ("a.jsonl", '{"timestamp": 1, "input_length": "x", "output_length": 1}\n', "Expected `int`"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}\n', "missing required field `output_length`"),
    ],
)
def test_bad_traces_are_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, name, content))
    assert complaint in str(caught.value)
    assert name in str(caught.value)


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


def test_traces_are_told_from_loads_by_their_ending() -> None:
    assert is_trace("traces/a.csv")
    assert is_trace("A.JSONL")
    assert not is_trace("steady")
