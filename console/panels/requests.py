"""Panel 2: the table of requests. Fixed-width columns, positional rows, only changed cells are written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import DataTable

from console.palette import BAD, GOOD, WARN
from console.request_view import TRANSFER, RequestView
from console.text_format import NONE, fit, format_mib, format_ms, format_short_ms, short_id
from console.view_state import ViewState

MAX_ROWS: Final = 200
SETTLED_S: Final = 3.0
"""A request that ended so long ago changes no more: its cells are kept, not written anew at every refresh."""
WIDE: Final = 94

_PHASE_STYLES: Final = {
    "prefill": WARN,
    "transfer": WARN,
    "decode": GOOD,
    "failed": f"bold {BAD}",
    "rejected": BAD,
}


@dataclass(frozen=True, slots=True)
class Column:
    """``width`` 0 takes what is left."""

    title: str
    width: int
    cell: Callable[[RequestView], str]
    right: bool = False


def _ttft(request: RequestView) -> str:
    return format_ms(request.first_token.ttft_ms if request.first_token is not None else None)


def _itl(request: RequestView) -> str:
    p50, p99 = request.itl_ms()
    return f"{format_short_ms(p50)}/{format_short_ms(p99):>3}" if p50 is not None else NONE


def _kv(request: RequestView) -> str:
    done, attempt = request.transfer, request.latest
    if done is not None:
        return f"{format_mib(done.wire_bytes)} {done.codec[:4]:<4}"
    if attempt is not None and attempt.transferring:
        return f"<{format_mib(attempt.transfer_raw_bytes)} {attempt.codec[:4]:<4}"
    return f"{NONE} {'':<4}"


def _exposed(request: RequestView) -> str:
    return ".." if request.phase == TRANSFER else format_ms(request.exposed_ms)


NARROW_COLUMNS: Final = (
    Column("ID", 8, lambda r: short_id(r.request_id)),
    Column("PHASE", 9, lambda r: r.phase),
    Column("PROMPT", 6, lambda r: f"{r.prompt_tokens:,}", right=True),
    Column("OUT", 5, lambda r: f"{r.out_tokens}", right=True),
    Column("TTFT", 8, _ttft, right=True),
    Column("ITL50/99", 10, _itl, right=True),
    Column("KV MiB     ", 12, _kv, right=True),
    Column(" PATH", 7, lambda r: f" {r.path or NONE}"),
    Column("OUTCOME", 0, lambda r: r.outcome or NONE),
)
WIDE_COLUMNS: Final = (
    *NARROW_COLUMNS[:5],
    Column("WAIT", 8, lambda r: format_ms(r.wait_ms), right=True),
    Column("PREFILL", 8, lambda r: format_ms(r.prefill_ms), right=True),
    Column("EXPOSED", 8, _exposed, right=True),
    *NARROW_COLUMNS[5:],
)


@dataclass(frozen=True, slots=True)
class SortOrder:
    """One way to order the table; ``key`` gives None for requests without the value, which come last."""

    name: str
    key: Callable[[RequestView], float | None]


SORTS: Final = (
    SortOrder("start", lambda r: r.arrived_at),
    SortOrder("prompt", lambda r: float(r.prompt_tokens)),
    SortOrder("out", lambda r: float(r.out_tokens)),
    SortOrder("ttft", lambda r: r.first_token.ttft_ms if r.first_token is not None else None),
    SortOrder("itl", lambda r: r.itl_ms()[1]),
    SortOrder("kv", lambda r: float(r.transfer.wire_bytes) if r.transfer is not None else None),
)


def matches(request: RequestView, wanted: str) -> bool:
    """The filter: any of the words a row shows, or the label, holds the text (case does not matter)."""
    words = (
        request.request_id, request.phase, request.path, request.outcome, request.codec, request.label,
        request.client_id, request.fallback,
    )  # fmt: skip
    return any(wanted in word.lower() for word in words)


def select_rows(
    state: ViewState, wanted: str, sort: SortOrder, *, descending: bool
) -> tuple[list[RequestView], int]:
    """At most MAX_ROWS requests in order, and how many matched.

    By start, the live ones come first, the longest-lived at the top: their rows stay where they are, and one that
    hangs cannot slip out of view.
    """
    found = [request for request in state.requests if not wanted or matches(request, wanted.lower())]

    def order(request: RequestView) -> tuple[bool, bool, float]:
        value = sort.key(request)
        live_first = sort.name == "start"
        falling = descending != (live_first and request.live)
        signed = 0.0 if value is None else -value if falling else value
        return (live_first and not request.live, value is None, signed)

    found.sort(key=order)
    return found[:MAX_ROWS], len(found)


class RequestsPanel(Vertical):
    """The table. The selected request stays selected while rows move."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self.filter_text = ""
        self.sort_index = 0
        self.descending = True
        self._columns: tuple[Column, ...] = ()
        self._widths: list[int] = []
        self._shown: list[list[str]] = []
        self._ids: list[str] = []
        self._settled: dict[str, list[str]] = {}

        self.table: DataTable[Text] = DataTable(cell_padding=0, cursor_type="row", id="requests-table")

    def compose(self) -> ComposeResult:
        yield self.table

    @property
    def selected_id(self) -> str | None:
        """Id of the request under the cursor."""
        row = self.table.cursor_row
        return self._ids[row] if 0 <= row < len(self._ids) else None

    def cycle_sort(self, step: int) -> None:
        self.sort_index = (self.sort_index + step) % len(SORTS)

    def draw(self, state: ViewState) -> None:
        """Bring the table up to date."""
        rows, matched = select_rows(
            state, self.filter_text, SORTS[self.sort_index], descending=self.descending
        )
        arrow = "v" if self.descending else "^"
        title = f"2 requests  load {state.load_names}  sort {SORTS[self.sort_index].name} {arrow}"
        title += f"  /{self.filter_text}" if self.filter_text else "  all"
        if matched > len(rows):
            title += f"  first {len(rows)} of {matched}"
        self.border_title = Text(fit(title, len(title)))
        self._fit_columns()
        if self._columns:
            self._write(rows, state.last_at - SETTLED_S)

    def _fit_columns(self) -> None:
        """Choose the column set for the width; rebuild the table when it changes."""
        room = self.table.size.width - 1  # the scrollbar's column
        if room < 20:
            return
        columns = WIDE_COLUMNS if room >= WIDE else NARROW_COLUMNS
        fixed = sum(column.width for column in columns)
        widths = [column.width or max(room - fixed, 7) for column in columns]
        if columns is self._columns and widths == self._widths:
            return
        self._columns, self._widths = columns, widths
        self.table.clear(columns=True)
        self._shown, self._ids, self._settled = [], [], {}
        for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
            self.table.add_column(
                Text(fit(column.title, width, right=column.right)), width=width, key=str(index)
            )

    def _write(self, rows: list[RequestView], settled_before: float) -> None:
        table = self.table
        selected = None if table.cursor_row == 0 else self.selected_id
        settled, self._settled = self._settled, {}
        texts = []
        for request in rows:
            cells = settled.get(request.request_id) or self._cells(request)
            if request.ended_at is not None and request.ended_at < settled_before:
                self._settled[request.request_id] = cells
            texts.append(cells)
        for row in range(len(self._shown), len(texts), 1):
            table.add_row(*map(self._cell, texts[row]), key=str(row))
        for row in range(len(self._shown) - 1, len(texts) - 1, -1):
            table.remove_row(str(row))
        for row, (old, new) in enumerate(zip(self._shown, texts, strict=False)):
            for column, (before, after) in enumerate(zip(old, new, strict=True)):
                if before != after:
                    table.update_cell(str(row), str(column), self._cell(after))
        self._shown, self._ids = texts, [request.request_id for request in rows]
        if selected is not None and selected in self._ids:
            place = self._ids.index(selected)
            if place != table.cursor_row:
                table.move_cursor(row=place, animate=False)

    def _cells(self, request: RequestView) -> list[str]:
        return [
            fit(column.cell(request), width, right=column.right)
            for column, width in zip(self._columns, self._widths, strict=True)
        ]

    def _cell(self, text: str) -> Text:
        word = text.strip()
        style = _PHASE_STYLES.get(word, "")
        if not style and word.startswith(("FALLBACK", "RETRY", "MIGRATED")):
            style = WARN
        elif not style and word.startswith("FAILED"):
            style = f"bold {BAD}"
        return Text(text, style, no_wrap=True)
