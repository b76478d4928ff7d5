"""The pages about one thing: a request as it goes on, a process with its log. Opens them over the main screen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from textual.screen import Screen

from console.held_blocks import HeldBlocks, fetch_held_blocks
from console.screens.dialog import TextDialog
from console.screens.request_detail import RequestDetail
from console.screens.worker_page import WorkerPage
from console.view_state import ViewState


class PagesApp(Protocol):
    """What this needs of the app."""

    state: ViewState

    def tell(self, text: str, *, ok: bool = True) -> None: ...
    def draw(self, *, charts: bool = True) -> None: ...
    def push_screen(self, screen: Screen[Any], callback: Callable[[Any], None] | None = None) -> object: ...
    def call_after_refresh(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> bool: ...


class DetailPages:
    """``asks_workers``: a process of the run can be asked what it holds while the run lives."""

    def __init__(self, app: PagesApp, run_dir: Path, *, ascii_mode: bool, asks_workers: bool) -> None:
        self._app = app
        self._run_dir = run_dir
        self._ascii_mode = ascii_mode
        self._asks_workers = asks_workers

    def open_request(self, request_id: str) -> None:
        self._show(RequestDetail(request_id, ascii_mode=self._ascii_mode))

    def open_last_victim(self) -> None:
        """The newest request that was hurt by a failure."""
        victim = self._app.state.requests.ledger.last_victim
        if victim:
            self.open_request(victim)
        else:
            self._app.tell("no fallback, retry or migration in this run")

    def ask_request(self) -> None:
        """Ask which request, by the beginning of its id."""
        self._app.push_screen(
            TextDialog("Follow the request whose id begins with", explain=self._explain), self._asked
        )

    def open_log(self, worker_id: str) -> None:
        """The log of that process, "": of the one that something happened to last."""
        workers = self._app.state.topology.by_role()
        if not workers:
            self._app.tell("Logs: no process has started yet", ok=False)
            return
        newest = max(workers, key=lambda worker: (worker.state != "ready", worker.state_at))
        self.open_worker(worker_id or newest.worker_id, log_only=True)

    def open_worker(self, worker_id: str, *, log_only: bool = False) -> None:
        state, run_dir = self._app.state, self._run_dir
        ids = [worker.worker_id for worker in state.topology.by_role()]
        if worker_id not in ids:
            self._app.tell(f"{worker_id} is no process of the cluster now", ok=False)
            return

        def fetch(url: str) -> HeldBlocks:
            return fetch_held_blocks(url, run_dir)

        asks = self._asks_workers and not state.stopped
        self._show(
            WorkerPage(
                run_dir / "logs", ids, worker_id, fetch if asks else None,
                ascii_mode=self._ascii_mode, log_only=log_only,
            )
        )  # fmt: skip

    def _show(self, page: Screen[Any]) -> None:
        self._app.push_screen(page)
        self._app.call_after_refresh(self._app.draw, charts=False)

    def _asked(self, text: str | None) -> None:
        if text:
            self.open_request(self._find(text))

    def _explain(self, text: str) -> str:
        request = self._app.state.requests.get(self._find(text))
        return f"{request.request_id}  {request.phase}" if request is not None else ""

    def _find(self, text: str) -> str:
        """Raises ValueError saying why it is none."""
        found = [
            request.request_id for request in self._app.state.requests if request.request_id.startswith(text)
        ]
        if not found:
            raise ValueError(f"no request that is kept begins with {text!r}; panel 2 lists them")
        return found[-1]
