"""The console's one full screen: header, panels, footer. Chooses the layout for the size and draws the view state."""

from typing import Final

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from console.actions import footer_text
from console.own_cost import OwnCost
from console.panels.charts import ChartsPanel, StripsPanel
from console.panels.events import EventsPanel
from console.panels.header import header_lines
from console.panels.line_view import LineView
from console.panels.requests import RequestsPanel
from console.panels.workers import WIDE as WIDE_WORKERS
from console.panels.workers import wanted_height, worker_lines
from console.view_state import ViewState

MIN_WIDTH: Final = 80
MIN_HEIGHT: Final = 24
WIDE_WIDTH: Final = 120
WIDE_HEIGHT: Final = 30
_PANELS: Final = (1, 2, 3, 4)


def layout_for(width: int, height: int) -> str:
    """tiny (nothing fits) | narrow (strips) | wide (charts beside the panels)."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return "tiny"
    return "wide" if width >= WIDE_WIDTH and height >= WIDE_HEIGHT else "narrow"


class RequestChosen(Message):
    """Enter on a request."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class MainScreen(Screen[None]):
    """``draw`` is the only way facts get in; everything else here is about what is focused, zoomed or filtered."""

    AUTO_FOCUS = "#requests-table"

    def __init__(self, *, ascii_mode: bool, read_only: bool) -> None:
        super().__init__()
        self._ascii_mode = ascii_mode
        self._read_only = read_only
        self._zoomed = 0
        self._layout = ""
        self._workers_height = 0
        self._drawn: tuple[ViewState, float, OwnCost] | None = None
        # Kept here and never looked up: a refresh may come while the screen is already being taken apart.
        self._too_small = Static("", id="too-small", markup=False)
        self._header = Static("", id="header", markup=False)
        self._workers = LineView(id="workers", classes="panel")
        self._requests = RequestsPanel(id="requests")
        self._strips = StripsPanel(id="strips", ascii_mode=ascii_mode)
        self._events = EventsPanel(id="events")
        self._charts = ChartsPanel(id="charts", ascii_mode=ascii_mode)
        self._footer = Static("", id="footer", markup=False)

    def compose(self) -> ComposeResult:
        yield self._too_small
        yield self._header
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield self._workers
                yield self._requests
                yield self._strips
                yield self._events
            yield self._charts
        yield self._footer

    def on_mount(self) -> None:
        self._workers.border_title = "1 workers and links"

    def on_resize(self, event: Resize) -> None:
        self._fit(event.size.width, event.size.height)
        if self._drawn is not None:
            self.call_after_refresh(self._redraw)

    def draw(self, state: ViewState, now: float, cost: OwnCost, *, charts: bool = True) -> None:
        """Bring every visible panel up to date; ``charts`` False leaves the expensive ones as they are."""
        self._drawn = (state, now, cost)
        width, height = self.size
        if self._layout in ("", "tiny"):
            return
        self._header.update(header_lines(state, now, width, cost), layout=False)
        self._fit_workers(state, height)
        if self._workers.display:
            width, height = self._workers.text_width, self._workers.size.height
            self._workers.show(worker_lines(state, now, width, height, ascii_mode=self._ascii_mode))
        self._requests.draw(state)
        self._events.draw(state)
        if self._strips.display:
            self._strips.draw(state, now)
        if charts and self._charts.display:
            self._charts.draw(state, now)

    def action_panel(self, number: int) -> None:
        """Focus a panel; a zoom moves along."""
        if self._zoomed:
            self._zoom(number)
        self._focus(number)

    def action_zoom(self) -> None:
        self._zoom(0 if self._zoomed else self._focused_number())

    def action_back(self) -> None:
        """Leave what is narrowest: the zoom, else the filter."""
        if self._zoomed:
            self._zoom(0)
        elif self._requests.filter_text:
            self._requests.filter_text = ""
            self._redraw()
        self._requests.stop_filtering()

    def action_filter(self) -> None:
        self._requests.start_filtering()

    def action_feed(self) -> None:
        self._events.cycle()
        self._redraw()

    def action_sort(self, step: int) -> None:
        self._requests.cycle_sort(step)
        self._redraw()

    def action_invert(self) -> None:
        self._requests.descending = not self._requests.descending
        self._redraw()

    @on(Input.Submitted, "#requests-filter")
    def _filter_done(self, event: Input.Submitted) -> None:
        self._requests.filter_text = event.value.strip()
        self._requests.stop_filtering()
        self._redraw()

    @on(DataTable.RowSelected, "#requests-table")
    def _row_selected(self) -> None:
        selected = self._requests.selected_id
        if selected is not None:
            self.post_message(RequestChosen(selected))

    def _fit(self, width: int, height: int) -> None:
        self._layout = layout_for(width, height)
        for name in ("tiny", "narrow", "wide"):
            self.set_class(name == self._layout, f"-{name}")
        need = f"pdconsole needs {MIN_WIDTH}x{MIN_HEIGHT}; this terminal is {width}x{height}"
        self._too_small.update(Text(f"{need}\nq quit"), layout=False)
        self._footer.update(Text(footer_text(width, read_only=self._read_only), no_wrap=True), layout=False)

    def _fit_workers(self, state: ViewState, height: int) -> None:
        """As high as its lines, within a share of the screen that leaves the requests room."""
        lines = wanted_height(state, wide=self._workers.size.width >= WIDE_WORKERS)
        wanted = min(lines, 4 + (height - MIN_HEIGHT) // 2) + 2
        if self._zoomed != 1 and wanted != self._workers_height:
            self._workers.styles.height = self._workers_height = wanted

    def _zoom(self, number: int) -> None:
        self._zoomed = number
        for panel in _PANELS:
            self.set_class(panel == number, f"-zoom{panel}")
        if number == 1:
            self._workers.styles.height = "1fr"
            self._workers_height = 0
        if number:
            self._focus(number)
        self.call_after_refresh(self._redraw)

    def _focus(self, number: int) -> None:
        if number == 3:
            (self._charts if self._charts.display else self._strips).focus()
        else:
            {1: self._workers, 2: self._requests.table, 4: self._events}[number].focus()

    def _focused_number(self) -> int:
        """Number of the panel that has the focus; the requests where none has."""
        for node in self.focused.ancestors_with_self if self.focused is not None else ():
            match node.id:
                case "workers":
                    return 1
                case "strips" | "charts":
                    return 3
                case "events":
                    return 4
        return 2

    def _redraw(self) -> None:
        if self._drawn is not None:
            self.draw(*self._drawn)
