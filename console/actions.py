"""Every key of the console in one table: bindings, command palette, help, footer and the README are made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from textual.binding import Binding

from cluster.control import Command, InjectBurst, SetCodec, SetLoad, SetMode
from console.text_format import fit
from console.view_state import ViewState

LONG_PROMPT_TOKENS: Final = 8000
STEADY: Final = "steady"

_KEY_NAMES: Final = {
    "question_mark": "?", "colon": ":", "slash": "/", "less_than_sign": "<", "greater_than_sign": ">",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """``run`` is what the binding calls: an action of the app, or of the main screen (``screen.``).

    ``hint`` is the footer's word, "" keeps it out. ``asks`` says what is asked before anything happens. Where
    ``command`` is given, the action sends it to the cluster.
    """

    id: str
    keys: str
    title: str
    help: str
    run: str
    hint: str = ""
    asks: str = ""
    command: Callable[[ViewState], Command] | None = None
    changes_cluster: bool = False
    priority: bool = False

    @property
    def key_text(self) -> str:
        """The keys as people read them: "q ctrl+c"."""
        return " ".join(_KEY_NAMES.get(key, key) for key in self.keys.split(","))


def _burst(state: ViewState) -> Command:
    """Two long prompts, shortened where the model cannot take them."""
    plain = InjectBurst()
    longest = (
        state.described.max_model_len - plain.max_tokens
        if state.described is not None
        else LONG_PROMPT_TOKENS
    )
    return InjectBurst(prompt_tokens=min(LONG_PROMPT_TOKENS, longest), cause="operator, key b")


def _codec(state: ViewState) -> Command:
    return SetCodec(codec="raw" if state.codec == "int8" else "int8", cause="operator, key i")


def _mode(state: ViewState) -> Command:
    return SetMode(mode="disagg" if state.mode == "colocated" else "colocated", cause="operator, key m")


def _load(state: ViewState) -> Command:
    return SetLoad(name="" if state.loads else STEADY, cause="operator, key s")


def _sends(
    id: str, key: str, title: str, help: str, hint: str, command: Callable[[ViewState], Command]
) -> Action:
    return Action(id, key, title, help, f"send('{id}')", hint, command=command, changes_cluster=True)


ACTIONS: Final = (
    Action("help", "question_mark,f1", "Help", "show all keys", "help", "help"),
    _sends("burst", "b", "Burst", f"send 2 prompts of {LONG_PROMPT_TOKENS:,} tokens at once", "burst", _burst),
    Action(
        "kill", "k", "Kill a process", "pick a process and send it a signal; k again: SIGKILL", "kill", "kill",
        asks="which process and signal", changes_cluster=True,
    ),
    _sends("codec", "i", "INT8 on/off", "KV on the wire: raw or INT8, from the next transfer on", "int8", _codec),
    _sends("mode", "m", "Mode", "disaggregated or co-located, from the next request on", "mode", _mode),
    _sends("load", "s", "Steady load on/off", "start or stop the steady load", "load", _load),
    Action("export", "e", "Export", "write the run's events to a file", "export", "export", asks="the format, once"),
    Action("pause", "p", "Freeze the view", "freeze what is shown; the run and its log go on", "pause", "pause"),
    Action("note", "a", "Add a note", "write a note into the log and on the charts", "note", "note",
           asks="its text", changes_cluster=True),
    Action("logs", "L", "Logs", "show the log of a process; left and right change the process", "logs", "logs"),
    Action("zoom", "z", "Zoom", "show the focused panel alone; z or escape goes back", "screen.zoom", "zoom"),
    Action("filter", "slash", "Filter requests", "show only requests with this text", "screen.filter", "filter"),
    Action("feed", "f", "Feed category", "show the next category of events", "screen.feed", "feed"),
    Action("sort-next", "greater_than_sign", "Sort by next", "order requests by the next column", "screen.sort(1)"),
    Action("sort-back", "less_than_sign", "Sort by previous", "order requests by the previous column",
           "screen.sort(-1)"),
    Action("sort-invert", "I", "Invert the order", "turn the order of requests round", "screen.invert"),
    Action("panel-1", "1", "Workers", "focus workers and links", "screen.panel(1)"),
    Action("panel-2", "2", "Requests", "focus requests; enter shows one in detail", "screen.panel(2)"),
    Action("panel-3", "3", "Charts", "focus the charts", "screen.panel(3)"),
    Action("panel-4", "4", "Events", "focus the event feed", "screen.panel(4)"),
    Action("back", "escape", "Back", "leave zoom, clear the filter", "screen.back"),
    Action("palette", "ctrl+p,colon", "Command palette", "find and run any of these by name", "command_palette", "all"),
    Action("screenshot", "ctrl+s", "Screenshot", "write the screen as SVG into the run's directory", "picture"),
    Action("quit", "q", "Quit", "stop the cluster and leave; q again or enter stops", "quit", "quit",
           asks="stop or stay"),
    Action("interrupt", "ctrl+c", "Interrupt", "as q; a second one within 3 s stops at once", "interrupt",
           priority=True),
)  # fmt: skip


def find_action(action_id: str) -> Action:
    """The row of that id. Raises KeyError."""
    return {action.id: action for action in ACTIONS}[action_id]


def bindings() -> list[Binding]:
    """Textual bindings with the actions' ids, so that a keymap can change the keys."""
    return [
        Binding(a.keys, a.run, a.title, show=False, priority=a.priority, tooltip=a.help, id=a.id)
        for a in ACTIONS
    ]


def footer_text(width: int, *, read_only: bool) -> str:
    """One line of at most ``width`` cells: keys and words of the actions that fit, quit always among them."""
    last = " q quit"
    text = ""
    for action in ACTIONS:
        if not action.hint or action.id == "quit" or (read_only and action.changes_cluster):
            continue
        hint = f" {action.key_text.split()[-1 if action.id == 'palette' else 0]} {action.hint} "
        if len(text) + len(hint) + len(last) > width:
            break
        text += hint
    return fit(text + last, width)


def help_rows() -> list[tuple[str, str, str]]:
    """(keys, title, what it does) of every action."""
    return [(a.key_text, a.title, a.help + (f" (asks {a.asks})" if a.asks else "")) for a in ACTIONS]


def readme_key_table() -> str:
    """The keys as a Markdown table."""
    rows = ["| key | does |", "|---|---|"]
    for keys, title, what in help_rows():
        shown = " ".join(f"`{key}`" for key in keys.split())
        rows.append(f"| {shown} | {title}: {what} |")
    return "\n".join(rows) + "\n"
