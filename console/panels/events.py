"""Panel 4: the event feed, newest first, by category."""

from rich.text import Text

from console.feed_text import FILTERS
from console.palette import LEVEL_STYLES
from console.panels.line_view import LineView
from console.text_format import fit, format_stamp
from console.view_state import FeedEntry, ViewState

SHOWN: int = 200


class EventsPanel(LineView):
    """``wanted`` is one of feed_text.FILTERS."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, newest_first=True, classes="panel")
        self.wanted = FILTERS[0]
        self._count = 0

    def cycle(self) -> None:
        """Show the next category."""
        self.wanted = FILTERS[(FILTERS.index(self.wanted) + 1) % len(FILTERS)]
        self.scroll_to(y=0, animate=False)

    def draw(self, state: ViewState) -> None:
        entries = state.feed.newest(self.wanted, SHOWN)
        added = sum(1 for entry in entries if entry.number >= self._count)
        self._count = state.feed.count
        title = Text("4 events ")
        for name in FILTERS:
            title.append(f" {name}", "bold reverse" if name == self.wanted else "")
        self.border_title = title
        self.show([_entry_line(state, entry, self.text_width) for entry in entries], added=added)


def _entry_line(state: ViewState, entry: FeedEntry, width: int) -> Text:
    line = Text(f"{format_stamp(state.since_start(entry.at)):>7} ", no_wrap=True)
    line.append(fit(entry.line.text, max(width - line.cell_len, 0)), LEVEL_STYLES[entry.line.level])
    return line
