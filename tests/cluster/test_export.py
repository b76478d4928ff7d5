import csv
import io
import os
from pathlib import Path

import pytest

from cluster.atomic_file import write_atomically
from cluster.events import Event, RequestArrived, RequestFailed, encode_event
from cluster.export import CSV_COLUMNS, FORMATS, ExportError, export_run, write_export
from cluster.run_log import EVENTS_FILE, RunLogError, write_events
from tests.cluster.histories import arrived, handed_off, run_started, run_stopped


def rows_of(run_dir: Path, *events: Event) -> list[dict[str, str]]:
    write_events(run_dir / EVENTS_FILE, [*run_started(), *events, *run_stopped(22.0)])
    return list(csv.DictReader(io.StringIO(export_run(run_dir, "csv").decode())))


def test_csv_has_a_row_per_request_in_order_of_arrival(tmp_path: Path) -> None:
    first, second = handed_off("a"), handed_off("b", at=10.001, codec="int8")
    rows = rows_of(tmp_path, first[0], *second, *first[1:], arrived("c"))

    assert [row["request_id"] for row in rows] == ["a", "b", "c"]
    assert tuple(rows[0]) == CSV_COLUMNS
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


@pytest.mark.parametrize("fmt", ["parquet", "perfetto", "vllm-bench", "xml"])
def test_other_formats_name_those_there_are(tmp_path: Path, fmt: str) -> None:
    with pytest.raises(ExportError, match="available: jsonl, csv"):
        export_run(tmp_path, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_run_without_a_log_is_refused(tmp_path: Path, fmt: str) -> None:
    with pytest.raises(ExportError, match=r"events\.jsonl cannot be read: No such file"):
        export_run(tmp_path, fmt)


def test_damaged_log_is_refused_as_csv(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text("nonsense\n")
    with pytest.raises(RunLogError, match="line 1"):
        export_run(tmp_path, "csv")


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
