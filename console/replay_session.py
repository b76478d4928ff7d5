"""One replay from opening its logs to the end of the app."""

import contextlib
import functools
from collections.abc import Sequence

from cluster.run_dir import RunRecord
from cluster.run_log import EVENTS_FILE
from console.console_options import ConsoleOptions
from console.errors import UserError
from console.interactive import export_to
from console.replay_app import ReplayApp
from console.replay_log import ReplayLog
from console.run_console import run_console
from console.snapshot_store import SnapshotStore


def show(records: Sequence[RunRecord], where: str | None, options: ConsoleOptions) -> int:
    """The app's exit code. ``where``: see ``ReplayApp.begin``. Raises UserError."""
    with contextlib.ExitStack() as opened:
        logs = []
        stores: list[SnapshotStore | None] = []
        for record in records:
            log = ReplayLog(record.path / EVENTS_FILE)
            opened.callback(log.close)
            # A log that grows would be another one the next time.
            store = None if record.is_alive else SnapshotStore.open(log)
            if store is not None:
                opened.callback(store.close)
            logs.append(log)
            stores.append(store)
        app = ReplayApp(
            logs,
            functools.partial(export_to, records[0].path, records[0].path),
            [record.run for record in records],
            ascii_only=options.ascii_only,
            config=options.config,
            stores=stores,
        )
        try:
            app.begin(where)
        except ValueError as error:
            raise UserError(f"--at: {error}") from error
        return run_console(app)
