"""Every key of the console in one table: bindings, command palette, help, footer and the README are made from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from textual.binding import Binding

from cluster.control import Command
from console.action_commands import (
    LONG_PROMPT_TOKENS,
    add_decode,
    add_prefill,
    auto_codec,
    burst,
    next_codec,
    next_handoff,
    other_mode,
    toggle_load,
)
from console.text_format import fit
from console.view_state import ViewState

BOTH: Final = "both"
LIVE: Final = "live"
REPLAY: Final = "replay"
LOG: Final = "log"

_KEY_NAMES: Final = {
    "question_mark": "?", "colon": ":", "slash": "/", "less_than_sign": "<", "greater_than_sign": ">", "plus": "+",
    "equals_sign": "=", "minus": "-", "comma": ",", "full_stop": ".", "left_square_bracket": "[",
    "right_square_bracket": "]",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """``run`` is what the binding calls: an action of the app, or of the main screen (``screen.``).

    ``keys`` "" = in the palette only. ``hint`` is the footer's word, "" keeps it out; an action of some ``panels`` has
    it in their lower border. ``asks`` says what is asked before anything happens; where that ``confirms``, the same
    key again does it. Where ``command`` is given, the action sends it to the cluster. ``where``: on a running cluster,
    in a replay, or both. ``page`` LOG: a key of a process's page, not of the main screen.
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
    where: str = BOTH
    panels: tuple[int, ...] = ()
    confirms: bool = False
    page: str = ""

    @property
    def key_text(self) -> str:
        """The keys as people read them: "q ctrl+c"."""
        return " ".join(_KEY_NAMES.get(key, key) for key in self.keys.split(",")) if self.keys else ""


def _sends(
    id: str, key: str, title: str, help: str, hint: str, command: Callable[[ViewState], Command]
) -> Action:
    return Action(id, key, title, help, f"send('{id}')", hint, command=command, changes_cluster=True)


ACTIONS: Final = (
    Action("play", "space,p", "Play, pause", "go on from here, or stop here", "play", "play", where=REPLAY),
    Action("back-1s", "left", "Back", "a second back", "step_time(-1)", where=REPLAY, priority=True),
    Action("on-1s", "right", "On", "a second on", "step_time(1)", where=REPLAY, priority=True),
    Action("back-event", "comma", "One event back", "to before the last event of the log", "step_event(-1)",
           where=REPLAY),
    Action("on-event", "full_stop", "One event on", "take in one more event of the log", "step_event(1)", where=REPLAY),
    Action("back-mark", "left_square_bracket", "Previous mark", "to what was done or broke before", "step_mark(-1)",
           where=REPLAY),
    Action("on-mark", "right_square_bracket", "Next mark", "to what is done or breaks next", "step_mark(1)", "mark",
           where=REPLAY),
    Action("go-to", "g", "Go to", "to a time or the next event of a kind", "go_to", "go to", asks="where",
           where=REPLAY),
    Action("go-start", "home", "Beginning", "to the beginning of the run", "go_end(0)", where=REPLAY,
           priority=True),
    Action("go-end", "end", "End", "to the end of the run", "go_end(1)", where=REPLAY, priority=True),
    Action("faster", "plus,equals_sign", "Faster", "play twice as fast, up to x64", "speed(1)", "speed",
           where=REPLAY),
    Action("slower", "minus", "Slower", "play half as fast, down to x0.25", "speed(-1)", where=REPLAY),
    Action("compare", "c", "Compare", "with --with: both runs, this one alone, the other alone", "compare",
           where=REPLAY),
    Action("help", "question_mark,f1", "Help", "show all keys", "help", "help"),
    _sends("burst", "b", "Burst", f"send 2 prompts of {LONG_PROMPT_TOKENS:,} tokens at once", "burst", burst),
    Action("burst-ask", "B", "Burst of...", "send as many prompts of as many tokens as you say", "ask('burst-ask')",
           asks="how many, how long", changes_cluster=True),
    Action("kill", "k", "Break a process", "kill, terminate or hang a process; k again: SIGKILL", "ask('kill')",
           "kill", asks="which process and how", changes_cluster=True, confirms=True, panels=(1,)),
    _sends("codec", "i", "Codec",
           "KV on the wire from now on: raw, INT8 (answers may differ), lossless, the profile's own",
           "int8", next_codec),
    _sends("mode", "m", "Mode", "disaggregated or co-located, from the next request on", "mode", other_mode),
    _sends("load", "s", "Load on/off", "start or stop the steady load (or the one that ran last)", "load", toggle_load),
    Action("drill", "d", "Drills", "stop the load, run one on this cluster, judge it; the verdict is in panel 5",
           "drill", "drill", asks="which drill", changes_cluster=True, confirms=True),
    Action("export", "e", "Export", "write the run's events to a file", "export", "export", asks="the format, once"),
    Action("link", "l", "Break or set a link", "cut, corrupt, stall, slow for a time; or set rate and delay",
           "ask('link')", "link", asks="which link and how", changes_cluster=True, confirms=True),
    Action("heal", "x", "Heal all", "end every fault that is on, and a drill", "heal",
           "heal", changes_cluster=True),
    Action("restart", "R", "Restart a worker", "drain, stop and start it anew; R again: the one under the cursor",
           "ask('restart')", asks="which worker", changes_cluster=True, confirms=True, panels=(1,), hint="restart"),
    Action("drain", "D", "Drain a worker", "no new requests for it, or again; D again: the one under the cursor",
           "ask('drain')", asks="which worker", changes_cluster=True, confirms=True, panels=(1,), hint="drain"),
    Action("pause", "p", "Freeze the view", "freeze what is shown; the run and its log go on", "pause", "freeze",
           where=LIVE),
    Action("note", "a", "Add a note", "write a note into the log and on the charts", "ask('note')",
           "note", asks="its text", changes_cluster=True),
    Action("logs", "L", "Logs", "the log of a process alone; enter on a process shows its page", "logs", "logs"),
    Action("zoom", "z", "Zoom", "show the focused panel alone; z or escape goes back", "screen.zoom", "zoom"),
    Action("filter", "slash", "Filter", "show only requests, or events, with this text", "screen.filter", "filter",
           asks="the text", panels=(2, 4)),
    Action("feed", "f", "Next category", "show the next category of events, or tab of the verdict", "screen.tab",
           "category", panels=(4, 5)),
    Action("sort-next", "greater_than_sign", "Sort by next", "order requests by the next column", "screen.sort(1)",
           "sort", panels=(2,)),
    Action("sort-back", "less_than_sign", "Sort by previous", "order requests by the previous column",
           "screen.sort(-1)"),
    Action("sort-invert", "I", "Invert the order", "turn the order of requests round", "screen.invert", "invert",
           panels=(2,)),
    Action("copy", "y", "Copy", "copy the id of the request or process under the cursor", "copy_id", "copy id",
           panels=(1, 2, 4)),
    Action("panel-1", "1", "Workers", "focus workers and links; enter shows one with its log", "screen.panel(1)"),
    Action("panel-2", "2", "Requests", "focus requests; enter shows one in detail", "screen.panel(2)"),
    Action("panel-3", "3", "Charts", "focus the charts", "screen.panel(3)"),
    Action("panel-4", "4", "Events", "focus the events; enter shows what one is about", "screen.panel(4)"),
    Action("panel-5", "5", "Verdict", "focus judgement, faults, ledger", "screen.panel(5)"),
    Action("panel-next", "tab", "Next panel", "focus the next panel", "screen.next_panel(1)", priority=True),
    Action("panel-back", "shift+tab", "Previous panel", "focus the previous panel", "screen.next_panel(-1)",
           priority=True),
    Action("back", "escape", "Back", "leave zoom, clear the filter", "screen.back"),
    Action("palette", "ctrl+p,colon", "Command palette", "find and run any of these by name", "command_palette", "all"),
    Action("screenshot", "ctrl+s", "Screenshot", "write the screen as SVG into the run's directory", "picture"),
    Action("quit", "q", "Quit", "leave; q again does what a console of its kind does: stop the cluster, or leave it",
           "quit", "quit", asks="stop, detach or stay"),
    Action("interrupt", "ctrl+c", "Interrupt", "as q; a second one within 3 s stops at once", "interrupt",
           priority=True),
    _sends("codec-auto", "", "Codec auto", "each transfer takes what its worker expects to be fastest", "", auto_codec),
    _sends("handoff", "", "Handoff", "where prompts are computed from the next request on: always, auto, never in turn",
           "", next_handoff),
    Action("load-ask", "", "Start a load...", "any load of the profile", "ask('load-ask')", asks="its name",
           changes_cluster=True),
    Action("role", "", "Switch the role of a worker...", "prefill, decode or both, for requests from now on",
           "ask('role')", asks="which worker and role", changes_cluster=True),
    _sends("add-prefill", "", "Add a prefill worker", "one more, on the least used cores", "", add_prefill),
    _sends("add-decode", "", "Add a decode worker", "one more, on the least used cores", "", add_decode),
    Action("remove", "", "Remove a worker...", "drain it, stop it, forget it", "ask('remove')", asks="which worker",
           changes_cluster=True),
    Action("last-fallback", "", "Show the last fallback", "the newest request that was hurt by a failure",
           "last_fallback"),
    Action("follow-request", "", "Follow a request...", "one in detail, while it goes on", "follow_request",
           asks="the beginning of its id"),
    Action("follow-events", "", "Follow the events", "their newest line, and stay there as lines come",
           "screen.follow"),
    Action("theme", "", "Theme...", "colours until the console ends; console.theme in config.toml keeps them",
           "change_theme", asks="which"),
    Action("curl", "", "Copy a curl command", "that sends a request to this cluster", "copy_curl", where=LIVE),
    Action("run-dir", "", "Copy the run's directory", "log, export and token lie there", "copy_run_dir"),
    Action("log-search", "slash", "Search", "mark lines with this text", "search", "search", asks="the text", page=LOG),
    Action("log-next", "n", "Next match", "to the next marked line", "match(1)", "next", page=LOG),
    Action("log-previous", "N", "Previous match", "to the marked line before", "match(-1)", page=LOG),
    Action("log-follow", "s", "Follow", "stay at the end as lines come, or stop that", "follow", "follow", page=LOG),
    Action("log-wrap", "w", "Wrap", "break long lines, or cut them", "wrap", "wrap", page=LOG),
    Action("log-time", "t", "Go to a time", "of the run, as the events say it: mm:ss", "time", "time", asks="the time",
           page=LOG),
    Action("log-source", "o", "Output or events", "what it printed, or what the run's log says of it", "source",
           "output/events", page=LOG),
    Action("log-turn-back", "left", "Process before", "the page of the process before", "turn(-1)", page=LOG,
           priority=True),
    Action("log-turn", "right", "Next process", "the page of the next process", "turn(1)", page=LOG, priority=True),
    Action("log-close", "q,escape", "Close", "back to the main screen", "dismiss_empty", "close", page=LOG),
)  # fmt: skip


def find_action(action_id: str) -> Action:
    """The row of that id. Raises KeyError."""
    return {action.id: action for action in ACTIONS}[action_id]


def actions_of(where: str, keymap: Mapping[str, str] = MappingProxyType({})) -> tuple[Action, ...]:
    """The rows for LIVE or REPLAY, with the keys that ``keymap`` gives some ids."""
    return tuple(
        replace(action, keys=keymap.get(action.id, action.keys))
        for action in ACTIONS
        if action.where in (where, BOTH)
    )


def bindings(where: str = LIVE, page: str = "") -> list[Binding]:
    """Textual bindings with the actions' ids, so that a keymap can change the keys."""
    return [
        Binding(a.keys, a.run, a.title, show=False, priority=a.priority, tooltip=a.help, id=a.id)
        for a in actions_of(where)
        if a.keys and a.page == page
    ]


def footer_text(width: int, *, read_only: bool, actions: Sequence[Action] = actions_of(LIVE)) -> str:
    """One line of at most ``width`` cells: keys and words of the actions that fit, quit always among them."""
    last = f" {find_key(actions, 'quit')} quit"
    text = ""
    for action in actions:
        if action.page or not action.keys or not action.hint or action.id == "quit":
            continue
        if (action.panels and not action.confirms) or (read_only and action.changes_cluster):
            continue
        hint = f" {action.key_text.split()[-1 if action.id == 'palette' else 0]} {action.hint} "
        if len(text) + len(hint) + len(last) > width:
            break
        text += hint
    return fit(text + last, width)


def panel_hint(number: int, *, read_only: bool, actions: Sequence[Action] = actions_of(LIVE)) -> str:
    """What can be done in the panel of that number, for its lower border."""
    hints = ["enter open"] if number in (1, 2, 4) else []
    for action in actions:
        if number in action.panels and action.keys and not (read_only and action.changes_cluster):
            hints.append(f"{action.key_text.split()[0]} {action.hint}")
    return "  ".join(hints)


def page_hint(page: str, actions: Sequence[Action] = actions_of(LIVE)) -> str:
    """The same for a page."""
    return "  ".join(
        f"{action.key_text.split()[0]} {action.hint}"
        for action in actions
        if action.page == page and action.hint
    )


def find_key(actions: Sequence[Action], action_id: str) -> str:
    """The first key of that action, as people read it."""
    return next(action.key_text.split()[0] for action in actions if action.id == action_id)


def help_rows(actions: Sequence[Action] = actions_of(LIVE)) -> list[tuple[str, str, str]]:
    """(keys, title, what it does) of every action; those of a process's page say so, the palette's have no key."""
    rows = []
    for action in sorted(actions, key=lambda a: (bool(a.page), not a.keys)):
        asked = f" (asks {action.asks})" if action.asks else ""
        title = f"{action.title} (page)" if action.page else action.title
        rows.append((action.key_text, title, action.help + asked))
    return rows


def readme_key_table(where: str = LIVE) -> str:
    """The keys of the main screen as a Markdown table; of REPLAY only those that a live console does not have."""
    rows = ["| key | does |", "|---|---|"]
    actions = [
        action
        for action in actions_of(where)
        if action.keys and not action.page and (where == LIVE or action.where == where)
    ]
    for keys, title, what in help_rows(actions):
        shown = " ".join(f"`{key}`" for key in keys.split())
        rows.append(f"| {shown} | {title}: {what} |")
    return "\n".join(rows) + "\n"
