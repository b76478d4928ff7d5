"""One process: what it does, how fast, who holds its blocks, what happened to it, and its log."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import LOG, bindings, page_hint
from console.held_blocks import HeldBlocks
from console.log_tail import LogTailText
from console.panels.line_view import LineView
from console.panels.worker_facts import fact_lines
from console.screens.dialog import Dialog, TextDialog, titled
from console.screens.log_lines import LogLines
from console.text_format import clean
from console.view_state import ViewState

BLOCKS_EVERY_S: Final = 2.0
OUTPUT: Final = "output"
EVENTS: Final = "events"

FetchBlocks = Callable[[str], HeldBlocks]
"""From the router's URL; may block, runs in a thread."""


class WorkerPage(Dialog[None]):
    """Left and right change the process. ``log_only`` leaves the facts out.

    ``fetch`` None: there is no running cluster to ask who holds blocks.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(page=LOG),
        Binding("question_mark,f1", "app.help", "Help", id="help"),
    ]

    def __init__(
        self,
        log_dir: Path,
        worker_ids: list[str],
        selected: str,
        fetch: FetchBlocks | None,
        *,
        ascii_mode: bool,
        log_only: bool = False,
    ) -> None:
        super().__init__()
        self._log_dir = log_dir
        self._worker_ids = worker_ids
        self._index = worker_ids.index(selected)
        self._fetch = fetch
        self._ascii_mode = ascii_mode
        self._log_only = log_only
        self._facts = LineView(id="facts", classes="page")
        self._log = LogLines(id="log", classes="page")
        self._tail = LogTailText(self._path())
        self._source = ""  # chosen by what there is, until a key says otherwise
        self._blocks = HeldBlocks(
            error="not asked yet" if fetch is not None else "only a running cluster can be asked"
        )
        self._asked_at = -BLOCKS_EVERY_S
        self._state = ViewState()

    def compose(self) -> ComposeResult:
        yield self._facts
        yield self._log

    def on_mount(self) -> None:
        self._facts.display = not self._log_only
        self._log.focus()
        self._log.border_subtitle = titled(page_hint(LOG))

    @property
    def worker_id(self) -> str:
        return self._worker_ids[self._index]

    def draw(self, state: ViewState, now: float) -> None:
        self._state = state
        self._tail.read_new()
        worker = state.topology.workers.get(self.worker_id)
        if not self._log_only:
            self._facts.border_title = titled(clean(self.worker_id))
            lines = [Text("this process is no longer part of the cluster")]
            if worker is not None:
                held = self._blocks.of(self.worker_id)
                lines = fact_lines(
                    state, worker, held, now, self._facts.text_width, ascii_mode=self._ascii_mode
                )
            self._facts.styles.height = min(len(lines) + 2, max(self.size.height * 3 // 5, 8))
            self._facts.show(lines)
            self._ask_blocks(state, now)
        source = self._source or (OUTPUT if self._tail.lines else EVENTS)
        story = [(state.since_start(at), text, level) for at, text, level in worker.story] if worker else []
        output = [(None, line, "info") for line in self._tail.lines]
        title = Text("log ")
        for index, name in enumerate(self._worker_ids):
            title.append(f" {clean(name)}", "bold reverse" if index == self._index else "")
        title.append(f"  {source} {len(output) if source == OUTPUT else len(story)} lines")
        if self._log.wanted:
            title.append(f"  /{clean(self._log.wanted)} {len(self._log.matches)}")
        title.append("  following" if self._log.follow else "  s follows")
        self._log.border_title = title
        empty = f"{self._tail.path} has no lines yet" if source == OUTPUT else "no events of this process yet"
        self._log.fill((output if source == OUTPUT else story) or [(None, empty, "info")])

    def action_turn(self, step: int) -> None:
        self._index = (self._index + step) % len(self._worker_ids)
        self._tail = LogTailText(self._path())
        self._log.follow = True
        self._redraw()

    def action_source(self) -> None:
        shown = self._source or (OUTPUT if self._tail.lines else EVENTS)
        self._source = EVENTS if shown == OUTPUT else OUTPUT
        self._redraw()

    def action_follow(self) -> None:
        self._log.toggle_follow()
        self._redraw()

    def action_wrap(self) -> None:
        self._log.wrap = not self._log.wrap
        self._redraw()

    def action_search(self) -> None:
        self.app.push_screen(TextDialog("Search for", initial=self._log.wanted), self._search)

    def action_match(self, step: int) -> None:
        if not self._log.go_to_match(step):
            self.notify("no line has this text; / searches", timeout=2.0, markup=False)

    def action_time(self) -> None:
        self.app.push_screen(TextDialog("Go to time of the run, mm:ss", explain=_explain_time), self._go_to)

    def _search(self, text: str | None) -> None:
        self._log.wanted = text or ""
        self._log.follow = self._log.follow and not text
        self._redraw()
        if text:
            self.action_match(1)

    def _go_to(self, text: str | None) -> None:
        if text:
            self._source = EVENTS  # only these have times
            self._log.follow = False
            self._redraw()
            self._log.go_to_time(parse_time(text))

    def _redraw(self) -> None:
        self.draw(self._state, self._state.last_at)

    def _path(self) -> Path:
        return self._log_dir / f"{self._worker_ids[self._index]}.log"

    def _ask_blocks(self, state: ViewState, now: float) -> None:
        if self._fetch is None or not state.url or now - self._asked_at < BLOCKS_EVERY_S:
            return
        self._asked_at = now
        self.run_worker(self._fetch_blocks(self._fetch, state.url), exclusive=True, exit_on_error=True)

    async def _fetch_blocks(self, fetch: FetchBlocks, url: str) -> None:
        self._blocks = await asyncio.to_thread(fetch, url)


def parse_time(text: str) -> float:
    """ "4:07.9" -> 247.9 seconds; plain seconds too. Raises ValueError saying what is allowed."""
    seconds = 0.0
    for part in text.split(":"):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            raise ValueError(f"{text!r} is not a time of the run; allowed: seconds, mm:ss or h:mm:ss")
        seconds = seconds * 60 + value
    return seconds


def _explain_time(text: str) -> str:
    return f"{parse_time(text):.1f} s after the run began"
