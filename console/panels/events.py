"""Panel 4: the event feed, newest first, by category and text. Enter opens the request or process a line is about."""

from rich.text import Text

from console.feed_text import FILTERS
from console.palette import LEVEL_STYLES
from console.panels.line_view import ChoiceLines
from console.text_format import fit, format_stamp
from console.view_state import FeedEntry, ViewState

SHOWN: int = 200


class EventsPanel(ChoiceLines):
    """``wanted`` is one of feed_text.FILTERS; ``filter_text`` is part of the lines shown, "" for all."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, newest_first=True, classes="panel")
        self.wanted = FILTERS[0]
        self.filter_text = ""
        self._count = 0
        self._entries: dict[str, FeedEntry] = {}

    def cycle(self) -> None:
        """Show the next category."""
        self.wanted = FILTERS[(FILTERS.index(self.wanted) + 1) % len(FILTERS)]
        self.chosen_key = ""
        self.scroll_to(y=0, animate=False)

    def entry(self, key: str) -> FeedEntry | None:
        return self._entries.get(key)

    def draw(self, state: ViewState) -> None:
        entries = state.feed.newest(self.wanted, SHOWN, self.filter_text.lower())
        added = sum(1 for entry in entries if entry.number >= self._count)
        self._count = state.feed.count
        title = Text("4 events ")
        for name in FILTERS:
            title.append(f" {name}", "bold reverse" if name == self.wanted else "")
        if self.filter_text:
            title.append(f"  /{fit(self.filter_text, min(len(self.filter_text), 20))}")
        self.border_title = title
        self._entries = {str(entry.number): entry for entry in entries}
        lines = [_entry_line(state, entry, self.text_width) for entry in entries]
        self.show_choices(lines, list(self._entries), added=added)


def _entry_line(state: ViewState, entry: FeedEntry, width: int) -> Text:
    line = Text(f"{format_stamp(state.since_start(entry.at)):>7} ", no_wrap=True)
    line.append(fit(entry.line.text, max(width - line.cell_len, 0)), LEVEL_STYLES[entry.line.level])
    return line
