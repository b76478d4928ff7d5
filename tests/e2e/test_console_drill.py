"""The console on a real cluster: a drill by its key, judged on the same screen, and who holds a process's blocks."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cluster.control import Command, CommandDone
from cluster.events import NoteAdded
from cluster.run_log import EVENTS_FILE
from console.app import ConsoleApp
from console.drill_verdict import read_verdict
from tests.console.harness import Console, Recorder
from tests.e2e.client import Client
from tests.e2e.conftest import EXACT, RunningCluster

pytestmark = pytest.mark.slow


async def test_a_drill_runs_from_the_console_and_the_cluster_goes_on(
    running_cluster: Callable[..., RunningCluster],
) -> None:
    cluster = running_cluster(*EXACT, "--set", "engine.prefix_caching=false")
    await asyncio.to_thread(cluster.wait_ready)
    with Client(cluster) as client:

        async def send(command: Command) -> CommandDone:
            answer = await asyncio.to_thread(client.command, msgspec.to_builtins(command))
            done = answer.json()
            return CommandDone(command_id=0, ok=done["ok"], message=done["message"])

        def export(wanted: str) -> Path:
            raise OSError("nothing is exported here")

        app = ConsoleApp(cluster.run_dir / EVENTS_FILE, send, export, "run")
        async with app.run_test(size=(160, 45), notifications=True) as pilot:
            shown = Console(app, pilot, Recorder(), cluster.run_dir / EVENTS_FILE, [])
            await shown.wait_for("cluster READY")
            await pilot.press("d")
            await shown.wait_for("Run a drill on this cluster")
            await pilot.press("down", "down")
            await shown.wait_for("The checksum finds it")
            await pilot.press("d")
            await shown.wait_for("drill corrupt-frame RUNNING")
            await shown.wait_for("drill corrupt-frame PASS")
            await pilot.press("1", "down", "enter")
            await shown.wait_for("held by     nobody")
        verdict = read_verdict(cluster.run_dir)
        assert verdict is not None
        assert (verdict.drill, verdict.verdict) == ("corrupt-frame", "pass")
        assert "orphans" not in [line.name for line in verdict.expectations]
        notes = [event.text for event in cluster.events() if isinstance(event, NoteAdded)]
        assert notes[0] == "drill corrupt-frame begins"
        assert notes[1].startswith("drill corrupt-frame PASS: 4/4 finished")
        assert await asyncio.to_thread(client.complete, [5, 6, 7])  # it goes on serving
