"""Drills run for real, as a user runs them: verdict and exit code, and the run's log says the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.events import (
    Event,
    FaultInjected,
    FellBack,
    RequestMigrated,
    RequestRetried,
    RunStopped,
    TransferFailed,
    WorkerExited,
)
from cluster.run_log import EVENTS_FILE, read_events
from tests.e2e.conftest import run_pdconsole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Drilled = tuple[int, dict[str, Any], list[Event]]


@pytest.fixture
def drill(pdconsole_home: Path, tmp_path: Path) -> Callable[..., Drilled]:
    """``drill(name, *options)``: its exit code, its document and the events of its run. Nothing may be left."""

    def run(*argv: str) -> Drilled:
        run_dir = tmp_path / "run"
        ended = run_pdconsole("drill", *argv, "--json", "--run-dir", str(run_dir), timeout_s=280.0)
        assert ended.stdout, ended.stderr
        document = json.loads(ended.stdout)
        assert json.loads((run_dir / "verdict.json").read_text()) == document
        return ended.exit_code, document, list(read_events(run_dir / EVENTS_FILE))

    return run


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def failures(document: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in document["expectations"] if not row["ok"]}


def test_a_prefill_worker_is_killed_and_the_verdict_is_pass(drill: Callable[..., Drilled]) -> None:
    exit_code, document, events = drill("kill-prefill")
    assert failures(document) == {}
    assert (exit_code, document["verdict"]) == (0, "pass")
    (injected,) = of(events, FaultInjected)
    assert (injected.fault, injected.cause) == ("kill", "drill kill-prefill")
    assert [e.worker_id for e in of(events, WorkerExited) if e.cause == "operator"] == [injected.target]
    assert {e.reason for e in of(events, RequestRetried)} == {"prefill_died"}
    assert document["headline"].startswith("6/6 finished, ")
    assert document["summary"]["requests"]["failed"] == 0


def test_a_decode_worker_is_killed_and_its_streams_go_on(drill: Callable[..., Drilled]) -> None:
    exit_code, document, events = drill("kill-decode")
    assert failures(document) == {}
    assert (exit_code, document["verdict"]) == (0, "pass")
    migrated = [e for e in of(events, RequestMigrated) if e.delivered_tokens > 20]
    assert migrated
    assert of(events, RunStopped)[0].orphans == 0


def test_a_corrupt_frame_without_a_fallback_is_a_verdict_of_fail(drill: Callable[..., Drilled]) -> None:
    """The promise is broken on purpose: what the drill says then is what was broken, and where."""
    exit_code, document, events = drill("corrupt-frame", "--fallback", "off")
    assert (exit_code, document["verdict"]) == (1, "fail")
    assert of(events, FellBack) == []
    (failed_id,) = {e.request_id for e in of(events, TransferFailed) if e.reason == "checksum"}
    wrong = failures(document)
    assert set(wrong) == {"finished", "failed", "fallbacks.transfer_checksum"}
    assert wrong["failed"]["actual"] == 1
    assert any(failed_id in line for line in wrong["failed"]["look_at"])
    assert {row["name"]: row["actual"] for row in document["expectations"]}["tokens_differ"] == 0
