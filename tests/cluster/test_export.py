import csv
import io
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from cluster.atomic_file import write_atomically
from cluster.events import (
    Event,
    RequestArrived,
    RequestFailed,
    RequestRejected,
    TransferCompleted,
    TransferStarted,
    WorkerExited,
    encode_event,
)
from cluster.export import FORMATS, ExportError, export_run, write_export
from cluster.export_table import COLUMNS, MissingLibraryError
from cluster.run_log import EVENTS_FILE, PassedOver, RunLogError, write_events
from tests.cluster.histories import arrived, handed_off, run_started, run_stopped


def rows_of(run_dir: Path, *events: Event) -> list[dict[str, str]]:
    write_events(run_dir / EVENTS_FILE, [*run_started(), *events, *run_stopped(22.0)])
    return list(csv.DictReader(io.StringIO(export_run(run_dir, "csv").decode())))


def test_csv_has_a_row_per_request_in_order_of_arrival(tmp_path: Path) -> None:
    first, second = handed_off("a"), handed_off("b", at=10.001, codec="int8")
    rows = rows_of(tmp_path, first[0], *second, *first[1:], arrived("c"))

    assert [row["request_id"] for row in rows] == ["a", "b", "c"]
    assert tuple(rows[0]) == COLUMNS
    row = rows[1]
    assert (row["label"], row["outcome"], row["reason"]) == ("steady", "finished", "length")
    assert (row["prefill_worker"], row["decode_worker"], row["codec"]) == ("prefill-0", "decode-0", "int8")
    assert (row["prompt_tokens"], row["output_tokens"]) == ("100", "4")
    assert float(row["ttft_ms"]) == 100.0
    parts = ("queue", "prefill", "transfer_exposed", "admit_wait", "first_decode", "router", "residual")
    assert sum(float(row[f"{part}_ms"]) for part in parts) == pytest.approx(float(row["ttft_ms"]))
    assert float(row["itl_p50_ms"]) == pytest.approx(10.0)
    assert float(row["itl_max_ms"]) == pytest.approx(20.0)
    assert float(row["arrived_at_s"]) == pytest.approx(10.001)
    assert int(row["kv_raw_bytes"]) == 4 * int(row["kv_wire_bytes"]) == 51200


def test_csv_tells_moved_tokens_from_those_that_decode_held(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, *handed_off("a", skipped_tokens=64))
    assert (row["prompt_tokens"], row["kv_tokens"], row["kv_skipped_tokens"]) == ("100", "36", "64")
    assert int(row["kv_raw_bytes"]) == 36 * 512


def test_csv_leaves_cells_empty_where_nothing_was_measured(tmp_path: Path) -> None:
    failed, running = rows_of(
        tmp_path, arrived("a"), RequestFailed(at=11.0, request_id="a", reason="no_worker"), arrived("b")
    )
    assert (failed["outcome"], failed["reason"]) == ("failed", "no_worker")
    assert running["outcome"] == "in_flight"
    for row in (failed, running):
        assert (
            row["ttft_ms"]
            == row["queue_ms"]
            == row["itl_p99_ms"]
            == row["tpot_ms"]
            == row["transfer_ms"]
            == ""
        )


def test_csv_holds_every_request_of_a_long_run_and_no_probe(tmp_path: Path) -> None:
    events = [event for number in range(1500) for event in handed_off(f"r{number}", gaps_s=())]
    assert len(rows_of(tmp_path, *events, *handed_off("p", label="probe"))) == 1500


def test_csv_disarms_what_a_spreadsheet_would_run(tmp_path: Path) -> None:
    event = RequestArrived(
        at=1.0, request_id="a", prompt_tokens=1, max_tokens=1, client_id='=HYPERLINK("x"),\n"'
    )
    (row,) = rows_of(tmp_path, event)
    assert row["client_id"] == '\'=HYPERLINK("x"),\n"'


def test_jsonl_is_the_log_without_a_half_line(tmp_path: Path) -> None:
    events = [*run_started(), *handed_off()]
    write_events(tmp_path / EVENTS_FILE, events)
    whole = (tmp_path / EVENTS_FILE).read_bytes()
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(encode_event(events[0])[:25])
    assert export_run(tmp_path, "jsonl") == whole


def test_csv_of_a_log_cut_in_mid_line(tmp_path: Path) -> None:
    events = handed_off("a")
    write_events(tmp_path / EVENTS_FILE, events[:-1])
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(encode_event(events[-1])[:-1])
    (row,) = csv.DictReader(io.StringIO(export_run(tmp_path, "csv").decode()))
    assert row["outcome"] == "in_flight"


@pytest.mark.parametrize("fmt", ["xml", "CSV", ""])
def test_other_formats_name_those_there_are(tmp_path: Path, fmt: str) -> None:
    with pytest.raises(ExportError, match="available: jsonl, csv, parquet, perfetto, vllm-bench"):
        export_run(tmp_path, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_run_without_a_log_is_refused(tmp_path: Path, fmt: str) -> None:
    with pytest.raises(ExportError, match=r"events\.jsonl cannot be read: No such file"):
        export_run(tmp_path, fmt)


def test_damaged_log_is_refused_as_csv(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text("nonsense\n")
    with pytest.raises(RunLogError, match="line 1"):
        export_run(tmp_path, "csv")


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_one_lost_line_leaves_the_rest_readable(tmp_path: Path, fmt: str) -> None:
    log = tmp_path / EVENTS_FILE
    write_events(log, [*run_started(), *handed_off("a"), *handed_off("b", at=12.0), *run_stopped(22.0)])
    lines = log.read_bytes().splitlines(keepends=True)
    for lost in range(len(lines)):
        log.write_bytes(b"".join([*lines[:lost], b"nonsense\n", *lines[lost + 1 :]]))
        passed = PassedOver()
        export_run(tmp_path, fmt, passed)
        assert passed.numbers == (set() if fmt == "jsonl" else {lost + 1})


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    write_events(tmp_path / EVENTS_FILE, [*run_started(), *handed_off("a"), arrived("b")])
    table = pq.read_table(io.BytesIO(export_run(tmp_path, "parquet")))
    assert tuple(table.column_names) == COLUMNS
    assert table.column("request_id").to_pylist() == ["a", "b"]
    assert table.column("ttft_ms").to_pylist() == [pytest.approx(100.0), None]
    assert table.column("prompt_tokens").to_pylist() == [100, 100]


def test_parquet_of_a_run_without_requests_has_its_columns(tmp_path: Path) -> None:
    write_events(tmp_path / EVENTS_FILE, run_started())
    table = pq.read_table(io.BytesIO(export_run(tmp_path, "parquet")))
    assert (tuple(table.column_names), table.num_rows) == (COLUMNS, 0)


def test_parquet_without_its_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(tmp_path / EVENTS_FILE, run_started())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingLibraryError, match="pip install"):
        export_run(tmp_path, "parquet")


def trace_of(run_dir: Path, *events: Event) -> list[dict[str, Any]]:
    write_events(run_dir / EVENTS_FILE, [*run_started(), *events])
    records: list[dict[str, Any]] = json.loads(export_run(run_dir, "perfetto"))["traceEvents"]
    return records


def test_trace_has_a_process_per_worker_and_a_track_per_request(tmp_path: Path) -> None:
    records = trace_of(tmp_path, *handed_off("a"), *handed_off("b", at=11.0))
    processes = {r["args"]["name"]: r["pid"] for r in records if r["name"] == "process_name"}
    assert set(processes) == {"cluster", "clients", "prefill-0", "decode-0"}
    tracks = {(r["pid"], r["args"]["name"]) for r in records if r["name"] == "thread_name"}
    assert (processes["clients"], "a (steady)") in tracks
    assert (processes["prefill-0"], "b transfer") in tracks
    assert (processes["decode-0"], "b decode") in tracks


def test_trace_of_a_request_sums_to_its_ttft_and_stays_inside_it(tmp_path: Path) -> None:
    records = trace_of(tmp_path, *handed_off("a"))
    (whole,) = [r for r in records if r["ph"] == "X" and r["name"] == "a"]
    parts = [
        r for r in records if r["ph"] == "X" and r["pid"] == whole["pid"] and r["name"] not in ("a", "tokens")
    ]
    assert sum(part["dur"] for part in parts) == pytest.approx(100_000.0)
    assert all(whole["ts"] <= part["ts"] for part in parts)
    assert max(part["ts"] + part["dur"] for part in parts) <= whole["ts"] + whole["dur"] + 1e-3
    assert whole["ts"] == pytest.approx(10e6)


def test_trace_leads_an_arrow_from_transfer_to_decode(tmp_path: Path) -> None:
    records = trace_of(tmp_path, *handed_off("a"))
    (start,) = [r for r in records if r["ph"] == "s"]
    (end,) = [r for r in records if r["ph"] == "f"]
    assert start["id"] == end["id"] == 1  # a number: Perfetto drops arrows with any other id
    assert start["pid"] != end["pid"]
    assert start["ts"] <= end["ts"]
    for point in (start, end):  # an arrow is drawn only from and to a slice
        assert any(
            r["ph"] == "X" and r["pid"] == point["pid"] and r["tid"] == point["tid"]
            and r["ts"] <= point["ts"] < r["ts"] + r["dur"]
            for r in records
        )  # fmt: skip


def test_an_arrow_does_not_go_back_in_time(tmp_path: Path) -> None:
    """The acknowledgement, which ends the transfer, comes after decode has begun."""
    late = [
        msgspec.structs.replace(event, at=event.at + 0.02) if isinstance(event, TransferCompleted) else event
        for event in handed_off("a")
    ]
    records = trace_of(tmp_path, *late)
    start, end = (next(r for r in records if r["ph"] == ph) for ph in "sf")
    assert start["ts"] <= end["ts"]
    assert start["ts"] >= next(r["ts"] for r in records if r["name"] == "transfer a")


def test_a_decode_without_a_transfer_gets_no_arrow(tmp_path: Path) -> None:
    local = [event for event in handed_off("a") if not isinstance(event, TransferStarted | TransferCompleted)]
    assert {r["ph"] for r in trace_of(tmp_path, *local)}.isdisjoint({"s", "f"})


def test_slices_of_a_track_that_meet_do_not_overlap(tmp_path: Path) -> None:
    """Whatever the clock's last digits: a trace processor drops slices that overlap by a nanosecond."""
    starts = [10 + number / 3 for number in range(40)]
    records = trace_of(tmp_path, *[event for at in starts for event in handed_off(f"r{at}", at=at)])
    for name in (f"r{at}" for at in starts):
        (whole,) = [r for r in records if r["ph"] == "X" and r["name"] == name]
        track = [
            r for r in records if r["ph"] == "X" and (r["pid"], r["tid"]) == (whole["pid"], whole["tid"])
        ]
        parts = [(_ns(r["ts"]), _ns(r["ts"] + r["dur"])) for r in track if r is not whole]
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(parts)))
        assert max(end for _, end in parts) <= _ns(whole["ts"] + whole["dur"])


def _ns(us: float) -> int:
    return round(us * 1000)


def test_trace_closes_what_a_death_ended(tmp_path: Path) -> None:
    before_end = handed_off("a")[:3]
    death = WorkerExited(at=10.04, worker_id="prefill-0", role="prefill", pid=11, signal=9)
    records = trace_of(tmp_path, *before_end, death)
    (prefill,) = [r for r in records if r["name"] == "prefill a"]
    assert prefill["dur"] == pytest.approx(30_000.0)
    assert prefill["args"]["ended by"] == "crash"


def test_vllm_bench_has_its_fields_in_its_units(tmp_path: Path) -> None:
    failed = RequestFailed(at=11.0, request_id="f", reason="no_worker")
    ended = [*handed_off("a"), arrived("f", at=10.5), failed]
    uncounted = [arrived("open", at=12.0), *handed_off("p", label="probe")]
    write_events(tmp_path / EVENTS_FILE, [*run_started(), *ended, *uncounted])
    document = json.loads(export_run(tmp_path, "vllm-bench"))
    assert (document["completed"], document["failed"], document["num_prompts"]) == (1, 1, 2)
    assert document["model_id"] == "tiny"
    assert document["ttfts"] == [pytest.approx(0.1), 0.0]
    assert document["itls"] == [pytest.approx([0.01, 0.01, 0.02]), []]
    assert document["input_lens"] == [100, 100]
    assert document["output_lens"] == [4, 0]
    assert document["errors"] == ["", "failed: no_worker"]
    assert document["mean_ttft_ms"] == document["p99_ttft_ms"] == pytest.approx(100.0)
    assert document["median_itl_ms"] == pytest.approx(10.0)
    assert document["duration"] == pytest.approx(1.0)
    assert document["output_throughput"] == pytest.approx(4.0)
    assert document["max_concurrent_requests"] == 1


def test_vllm_bench_counts_what_was_refused(tmp_path: Path) -> None:
    refused = [RequestRejected(at=10.0 + i, reason="queue full", status=429) for i in range(3)]
    write_events(tmp_path / EVENTS_FILE, [*run_started(), *handed_off("a"), *refused, *run_stopped(22.0)])
    document = json.loads(export_run(tmp_path, "vllm-bench"))
    assert (document["num_prompts"], document["completed"], document["failed"]) == (4, 1, 3)
    assert document["errors"] == ["", *["rejected 429: queue full"] * 3]
    assert document["request_rate"] == pytest.approx(1.5)  # four in two seconds
    columns = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts")
    assert {len(document[name]) for name in columns} == {4}


def test_vllm_bench_of_a_run_without_requests_is_all_zeros(tmp_path: Path) -> None:
    write_events(tmp_path / EVENTS_FILE, run_started())
    document = json.loads(export_run(tmp_path, "vllm-bench"))
    assert document["completed"] == document["request_throughput"] == document["p99_itl_ms"] == 0


def test_export_replaces_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    write_export(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["link.csv", "out.csv"]


def test_export_to_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "out.csv", tmp_path):
        with pytest.raises(ExportError, match="cannot be written"):
            write_export(place, b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"through")
        assert os.read(reader, 100) == b"through"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
