"""The console's one full screen: header, panels, footer. Chooses the layout for the size and draws the view state."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import DescendantFocus, Resize
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

from console.actions import LIVE, Action, actions_of, footer_text, panel_hint
from console.drill_verdict import DrillVerdict
from console.own_cost import OwnCost
from console.panels.charts import ChartsPanel, StripsPanel
from console.panels.events import EventsPanel
from console.panels.header import UNREAD, header_lines
from console.panels.line_view import ChoiceLines
from console.panels.requests import RequestsPanel
from console.panels.verdict import VerdictPanel
from console.panels.workers import WIDE as WIDE_WORKERS
from console.panels.workers import WorkersPanel, wanted_height
from console.view_state import ViewState

MIN_WIDTH: Final = 80
MIN_HEIGHT: Final = 24
WIDE_WIDTH: Final = 120
WIDE_HEIGHT: Final = 30
TALL_HEIGHT: Final = 32
"""From here on events and verdict both have room in a narrow terminal; below, one takes the other's place."""
ROOMY_HEIGHT: Final = 40
WORKERS, REQUESTS, CHARTS, EVENTS, VERDICT = PANELS = (1, 2, 3, 4, 5)


def layout_for(width: int, height: int) -> str:
    """tiny (nothing fits) | narrow (strips) | wide (charts beside the panels)."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return "tiny"
    return "wide" if width >= WIDE_WIDTH and height >= WIDE_HEIGHT else "narrow"


class RequestChosen(Message):
    """Enter on a request, or on an event about one."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class WorkerChosen(Message):
    """Enter on a process, or on an event about one."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self.worker_id = worker_id


class MainScreen(Screen[None]):
    """``draw`` is the only way facts get in; everything else here is about what is focused, zoomed or filtered."""

    AUTO_FOCUS = "#requests-table"

    def __init__(
        self, *, ascii_mode: bool, read_only: bool, actions: Sequence[Action] = actions_of(LIVE)
    ) -> None:
        super().__init__()
        self._actions = actions
        self._ascii_mode = ascii_mode
        self._read_only = read_only
        self._zoomed = 0
        self._layout = ""
        self._workers_height = 0
        self._drawn: tuple[ViewState, float, OwnCost] | None = None
        # Kept here and never looked up: a refresh may come while the screen is already being taken apart.
        self._too_small = Static("", id="too-small", markup=False)
        self._header = Static("", id="header", markup=False)
        self._workers = WorkersPanel(id="workers", ascii_mode=ascii_mode)
        self._requests = RequestsPanel(id="requests")
        self._strips = StripsPanel(id="strips", ascii_mode=ascii_mode)
        self._events = EventsPanel(id="events")
        self._verdict = VerdictPanel(id="verdict")
        self._charts = ChartsPanel(id="charts", ascii_mode=ascii_mode)
        self._footer = Static("", id="footer", markup=False)
        self._filter = Input(
            placeholder="part of a line; enter keeps, escape drops it", id="filter", compact=True
        )
        self._filtered: RequestsPanel | EventsPanel = self._requests

    def compose(self) -> ComposeResult:
        yield self._too_small
        yield self._header
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield self._workers
                yield self._requests
                yield self._strips
                yield self._events
                yield self._verdict
            yield self._charts
        yield self._filter
        yield self._footer

    def on_mount(self) -> None:
        self._workers.border_title = "1 workers and links"

    def on_resize(self, event: Resize) -> None:
        self._fit(event.size.width, event.size.height)
        if self._drawn is not None:
            self.call_after_refresh(self._redraw)

    @property
    def selected_request(self) -> str:
        """Id of the request that keys like copy are about: under the cursor of the requests or events; "" = none."""
        if self._focused_number() == EVENTS:
            entry = self._events.entry(self._events.key)
            return entry.request_id if entry is not None else ""
        return self._requests.selected_id or ""

    @property
    def selected_worker(self) -> str:
        """Id of the process under the cursor of the panel that has the focus, "" = none."""
        number = self._focused_number()
        if number == EVENTS:
            entry = self._events.entry(self._events.key)
            return entry.worker_id if entry is not None else ""
        return self._workers.key if number == WORKERS else ""

    def show_drill(self, drill: DrillVerdict | None) -> None:
        """What the verdict's panel says of a drill."""
        self._verdict.drill = drill
        self._redraw()

    def draw(self, state: ViewState, now: float, cost: OwnCost, *, charts: bool = True) -> None:
        """Bring every visible panel up to date; ``charts`` False leaves the costly ones as they are."""
        self._drawn = (state, now, cost)
        width, height = self.size
        if self._layout in ("", "tiny"):
            return
        self._header.update(header_lines(state, now, width, cost), layout=False)
        self._fit_workers(state, height)
        if self._workers.display:
            self._workers.draw(state, now)
        self._requests.draw(state)
        if self._events.display:
            self._events.draw(state)
        if charts and self._verdict.display:
            if cost.read_share is None:
                self._verdict.draw(state, now)
            else:
                self._verdict.show([Text(f" {UNREAD}", "dim")])
        if self._strips.display:
            self._strips.draw(state, now)
        if charts and self._charts.display:
            self._charts.draw(state, now)

    # --- actions of the table ------------------------------------------------------------------------------------

    def action_panel(self, number: int) -> None:
        """Focus a panel; a zoom moves along."""
        if self._zoomed:
            self._zoom(number)
        self._focus(number)

    def action_next_panel(self, step: int) -> None:
        self.action_panel(PANELS[(self._focused_number() - 1 + step) % len(PANELS)])

    def action_zoom(self) -> None:
        self._zoom(0 if self._zoomed else self._focused_number())

    def action_back(self) -> None:
        """Leave what is narrowest: the filter line, the zoom, else the filter itself."""
        panel = self._events if self._focused_number() == EVENTS else self._requests
        if self.has_class("-filtering"):
            self._stop_filtering()
        elif self._zoomed:
            self._zoom(0)
        elif panel.filter_text:
            panel.filter_text = ""
            self._redraw()

    def action_filter(self) -> None:
        """Ask for a text, for the events where they have the focus, else for the requests."""
        self._filtered = self._events if self._focused_number() == EVENTS else self._requests
        self.set_class(True, "-filtering")
        self._filter.value = self._filtered.filter_text
        self._filter.focus()

    def action_tab(self) -> None:
        """The next tab of the verdict where it has the focus, else of the events."""
        (self._verdict if self._focused_number() == VERDICT else self._events).cycle()
        self._redraw()

    def action_follow(self) -> None:
        """The newest event, and stay there."""
        self._events.follow()
        self.action_panel(EVENTS)

    def action_sort(self, step: int) -> None:
        self._requests.cycle_sort(step)
        self._redraw()

    def action_invert(self) -> None:
        self._requests.descending = not self._requests.descending
        self._redraw()

    @on(Input.Submitted, "#filter")
    def _filter_done(self, event: Input.Submitted) -> None:
        self._filtered.filter_text = event.value.strip()
        self._stop_filtering()
        self._redraw()

    @on(DataTable.RowSelected, "#requests-table")
    def _row_selected(self) -> None:
        selected = self._requests.selected_id
        if selected is not None:
            self.post_message(RequestChosen(selected))

    @on(ChoiceLines.Chosen)
    def _line_chosen(self, event: ChoiceLines.Chosen) -> None:
        if event.view is self._workers:
            self.post_message(WorkerChosen(event.key))
            return
        entry = self._events.entry(event.key)
        if entry is not None and entry.request_id:
            self.post_message(RequestChosen(entry.request_id))
        elif entry is not None and entry.worker_id:
            self.post_message(WorkerChosen(entry.worker_id))

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """What can be done in the focused panel stands in its lower border."""
        number = self._focused_number()
        panels: dict[int, Widget] = {
            WORKERS: self._workers, REQUESTS: self._requests, EVENTS: self._events, VERDICT: self._verdict,
        }  # fmt: skip
        for place, panel in panels.items():
            panel.border_subtitle = (
                Text(panel_hint(place, read_only=self._read_only, actions=self._actions))
                if place == number
                else ""
            )

    # --- layout --------------------------------------------------------------------------------------------------

    def _stop_filtering(self) -> None:
        self.set_class(False, "-filtering")
        self._focus(EVENTS if self._filtered is self._events else REQUESTS)

    def _fit(self, width: int, height: int) -> None:
        self._layout = layout_for(width, height)
        for name in ("tiny", "narrow", "wide"):
            self.set_class(name == self._layout, f"-{name}")
        self.set_class(self._layout == "narrow" and height < TALL_HEIGHT, "-one-of-two")
        self.set_class(height >= ROOMY_HEIGHT, "-roomy")
        need = f"pdconsole needs {MIN_WIDTH}x{MIN_HEIGHT}; this terminal is {width}x{height}"
        self._too_small.update(Text(f"{need}\nq quit"), layout=False)
        self._footer.update(
            Text(footer_text(width, read_only=self._read_only, actions=self._actions), no_wrap=True),
            layout=False,
        )

    def _fit_workers(self, state: ViewState, height: int) -> None:
        """As high as its lines, within a share of the screen that leaves the requests room."""
        lines = wanted_height(state, wide=self._workers.size.width >= WIDE_WORKERS)
        wanted = min(lines, 4 + (height - MIN_HEIGHT) // 2) + 2
        if self._zoomed != WORKERS and wanted != self._workers_height:
            self._workers.styles.height = self._workers_height = wanted

    def _zoom(self, number: int) -> None:
        self._zoomed = number
        for panel in PANELS:
            self.set_class(panel == number, f"-zoom{panel}")
        if number == WORKERS:
            self._workers.styles.height = "1fr"
            self._workers_height = 0
        if number:
            self._focus(number)
        self.call_after_refresh(self._redraw)

    def _focus(self, number: int) -> None:
        if number in (EVENTS, VERDICT):
            self.set_class(number == VERDICT, "-verdict")
            self.call_after_refresh(self._redraw)
        panels: dict[int, Widget] = {
            WORKERS: self._workers, REQUESTS: self._requests.table, EVENTS: self._events, VERDICT: self._verdict,
            CHARTS: self._charts if self._charts.display else self._strips,
        }  # fmt: skip
        self.set_focus(panels[number])  # at once: keys that come together must not reach the panel before

    def _focused_number(self) -> int:
        """Number of the panel that has the focus; the requests where none has."""
        for node in self.focused.ancestors_with_self if self.focused is not None else ():
            match node.id:
                case "workers":
                    return WORKERS
                case "strips" | "charts":
                    return CHARTS
                case "events":
                    return EVENTS
                case "verdict":
                    return VERDICT
        return REQUESTS

    def _redraw(self) -> None:
        if self._drawn is not None:
            self.draw(*self._drawn)
