"""Panel 4: the event feed, newest first, by category and text. Enter opens the request or process a line is about."""

import textwrap
from typing import Final

from rich.text import Text

from console.feed_text import FILTERS
from console.palette import LEVEL_STYLES
from console.panels.line_view import ChoiceLines
from console.text_format import fit, format_stamp
from console.view_state import FeedEntry, ViewState

SHOWN: Final = 200
WRAP_WIDTH: Final = 90


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
        self.follow()

    def follow(self) -> None:
        """Show the newest line, and go on to."""
        self.chosen_key = ""
        self.scroll_to(y=0, animate=False)

    def entry(self, key: str) -> FeedEntry | None:
        return self._entries.get(key)

    def draw(self, state: ViewState) -> None:
        entries = state.feed.newest(self.wanted, SHOWN, self.filter_text.lower())
        seen, self._count = self._count, state.feed.count
        title = Text("4 events ")
        for name in FILTERS:
            title.append(f" {name}", "bold reverse" if name == self.wanted else "")
        if self.filter_text:
            title.append(f"  /{fit(self.filter_text, min(len(self.filter_text), 20))}")
        self.border_title = title
        self._entries = {str(entry.number): entry for entry in entries}
        lines: list[Text] = []
        keys: list[str] = []
        num_added = 0
        for entry in entries:
            parts = _entry_lines(state, entry, self.text_width)
            lines += parts
            keys += [str(entry.number)] * len(parts)
            num_added += len(parts) if entry.number >= seen else 0
        self.show_choices(lines, keys, added=num_added)


def _entry_lines(state: ViewState, entry: FeedEntry, width: int) -> list[Text]:
    """One line; what does not fit goes on in a second one where lines are long."""
    stamp = f"{format_stamp(state.since_start(entry.at)):>7} "
    room = max(width - len(stamp), 0)
    texts = [entry.text]
    if width >= WRAP_WIDTH and len(entry.text) > room:
        texts = textwrap.wrap(entry.text, room, max_lines=2, placeholder=" ~")
    style = LEVEL_STYLES[entry.line.level]
    heads = [stamp, " " * len(stamp)]
    return [
        Text(head, no_wrap=True).append(fit(text, room), style)
        for head, text in zip(heads, texts, strict=False)
    ]
