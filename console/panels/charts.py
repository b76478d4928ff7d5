"""Panel 3: three charts where there is room, three one-line strips where there is not."""

from collections.abc import Callable
from typing import Final

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from console.charts import ChartData, itl_chart, kv_chart, plot_chart, strip_columns, strip_line, ttft_chart
from console.text_format import fit
from console.view_state import ViewState

ChartMaker = Callable[[ViewState, float, int], ChartData]

CHARTS: Final[tuple[tuple[str, ChartMaker], ...]] = (
    ("itl", itl_chart),
    ("ttft", ttft_chart),
    ("kv", kv_chart),
)
MIN_WIDTH: Final = 20
MIN_HEIGHT: Final = 5
_AXIS_COLUMNS: Final = 8


class StripsPanel(Static):
    """ITL, TTFT and KV rate, one line each."""

    can_focus = True

    def __init__(self, *, id: str, ascii_mode: bool) -> None:
        super().__init__("", id=id, markup=False)
        self._ascii_mode = ascii_mode
        self._shown = Text()

    def draw(self, state: ViewState, now: float) -> None:
        width = self.size.width
        columns = strip_columns(width)
        lines = [
            strip_line(make(state, now, columns), width, ascii_mode=self._ascii_mode) for _, make in CHARTS
        ]
        text = Text("\n", no_wrap=True, overflow="crop").join(lines)
        if text != self._shown:
            self._shown = text
            self.update(text, layout=False)


class ChartPanel(Static):
    """One chart drawn by plotext at exactly this widget's size."""

    def __init__(self, make: ChartMaker, *, id: str, number: str, ascii_mode: bool) -> None:
        super().__init__("", id=id, classes="panel chart", markup=False)
        self._make = make
        self._number = number
        self._ascii_mode = ascii_mode

    def draw(self, state: ViewState, now: float) -> None:
        width, height = self.size.width, self.size.height
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            return
        chart = self._make(state, now, 2 * (width - _AXIS_COLUMNS))
        title = f"{self._number}{chart.title}"
        self.border_title = Text(fit(title, min(len(title), width - 4)))
        self.update(plot_chart(chart, width, height, ascii_mode=self._ascii_mode), layout=False)


class ChartsPanel(Vertical, can_focus=True):
    """The three charts, one above the other."""

    def __init__(self, *, id: str, ascii_mode: bool) -> None:
        super().__init__(id=id)
        self._charts = [
            ChartPanel(make, id=f"chart-{name}", number="" if index else "3 ", ascii_mode=ascii_mode)
            for index, (name, make) in enumerate(CHARTS)
        ]

    def compose(self) -> ComposeResult:
        yield from self._charts

    def draw(self, state: ViewState, now: float) -> None:
        for chart in self._charts:
            chart.draw(state, now)
