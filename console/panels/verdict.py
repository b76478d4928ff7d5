"""Panel 5: does disaggregation pay here, what failures cost, and the last drill's verdict."""

import textwrap
from typing import Final

from rich.text import Text

from console.drill_verdict import PASS, DrillVerdict, ended_drill
from console.fallback_ledger import LedgerRow
from console.judgement import MIXED, OPEN, PAYS, PAYS_NOT
from console.palette import BAD, GOOD, WARN
from console.panels.line_view import LineView
from console.text_format import clean, fit, format_ms, format_stamp, short_id, short_worker
from console.view_state import ViewState

ALL: Final = "all"
TABS: Final = (ALL, "judgement", "drill", "faults", "ledger")
_ANSWER_STYLES: Final = {PAYS: f"bold {GOOD}", PAYS_NOT: f"bold {BAD}", MIXED: f"bold {WARN}", OPEN: "bold"}


class VerdictPanel(LineView):
    """``wanted`` is one of TABS."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self.wanted = ALL
        self.drill: DrillVerdict | None = None
        """The drill that runs or ran last."""

    def cycle(self) -> None:
        """Show the next tab."""
        self.wanted = TABS[(TABS.index(self.wanted) + 1) % len(TABS)]
        self.scroll_to(y=0, animate=False)

    def draw(self, state: ViewState, now: float) -> None:
        title = Text("5 verdict ")
        for name in TABS:
            title.append(f" {name}", "bold reverse" if name == self.wanted else "")
        self.border_title = title
        self.show(verdict_lines(state, now, self.text_width, self.wanted, self.drill))


def verdict_lines(
    state: ViewState, now: float, width: int, wanted: str = ALL, drill: DrillVerdict | None = None
) -> list[Text]:
    """The panel's lines of at most ``width`` cells: what is broken and a drill's verdict first, while there are any."""
    parts = {
        "faults": _faults(state, now, width),
        "drill": _drill(drill, width),
        "judgement": _judgement(state, width),
        "ledger": _ledger(state, width),
    }
    if wanted == ALL:
        return [line for lines in parts.values() for line in lines]
    if wanted == "drill":
        parts[wanted] += _earlier_drills(state, drill, width)
    return parts[wanted] or [Text(f" no {wanted} in this run yet", "dim")]


def _drill(drill: DrillVerdict | None, width: int) -> list[Text]:
    """Its expectations, those not met first with where to look."""
    if drill is None:
        return []
    name = clean(drill.drill)
    if not drill.verdict:
        return _styled(f" drill {name} RUNNING: {drill.headline}", width, f"bold {WARN}")
    is_pass = drill.verdict == PASS
    word = f"{drill.verdict.upper()} {drill.num_met}/{len(drill.expectations)}"
    style = f"bold {GOOD if is_pass else BAD}"
    lines = _styled(f" drill {name} {word}: {drill.headline}", width, style)
    for missed in (line for line in drill.expectations if not line.ok):
        where = f"; look at {', '.join(missed.look_at)}" if missed.look_at else ""
        text = f" XX {missed.name}: {missed.text} (expected {missed.expected}){where}"
        lines += _styled(text, width, style)
    met = "   ".join(f"ok {line.text}" for line in drill.expectations if line.ok)
    return [*lines, *_styled(f" {met}", width, GOOD)]


def _earlier_drills(state: ViewState, drill: DrillVerdict | None, width: int) -> list[Text]:
    """How those before it ended, newest first."""
    lines = []
    for age, note in enumerate(reversed(state.drills)):
        name, is_pass = ended_drill(note.text) or ("", False)
        if age == 0 and drill is not None and drill.verdict and drill.drill == name:
            continue  # its verdict stands above
        stamp = format_stamp(state.since_start(note.at))
        lines += _styled(f" earlier, {stamp}: {note.text}", width, GOOD if is_pass else BAD)
    return lines


def _judgement(state: ViewState, width: int) -> list[Text]:
    judged = state.judgement()
    lines = _wrapped(f" P/D {judged.answer}: {judged.modes}", width)
    lines[0].stylize(_ANSWER_STYLES[judged.answer], 0, len(f" P/D {judged.answer}"))
    return [*lines, *_wrapped(f" KV  {judged.transfer}", width)]


def _faults(state: ViewState, now: float, width: int) -> list[Text]:
    lines = []
    for fault in state.topology.faults.values():
        left = f", heals in {max(fault.at + fault.seconds - now, 0.0):.0f} s" if fault.seconds else ""
        text = f" ! broken now: {fault.fault} {clean(fault.target)} for {now - fault.at:.0f} s{left} (x heals all)"
        lines += _styled(text, width, f"bold {WARN}")
    return lines


def _ledger(state: ViewState, width: int) -> list[Text]:
    rows = state.requests.ledger.rows()
    if not rows:
        return [
            Text(fit(" ledger: no fallback, no retry, no migration in this run", width), "dim", no_wrap=True)
        ]
    head = f" {'kind':<10}{'cause':<22}{'n':>4} {'tokens again':>12} {'time lost':>9}  whom it hurt"
    lines = [Text(fit(head, width), "bold", no_wrap=True)]
    for row in rows:
        lines += _styled(_ledger_text(state, row), width, WARN)
    return lines


def _ledger_text(state: ViewState, row: LedgerRow) -> str:
    hurt = " ".join(short_id(victim) for victim in reversed(row.victims))
    more = f" +{row.count - len(row.victims)}" if row.count > len(row.victims) else ""
    where = f" on {','.join(sorted(map(short_worker, row.workers)))}" if row.workers else ""
    beside = f" beside {row.beside} streams" if row.beside else ""
    return (
        f" {row.kind:<10}{fit(row.cause, 21)} {row.count:>4} {row.tokens:>12,} {format_ms(row.lost_ms):>9}  "
        f"{hurt}{more}{where}{beside} (last {format_stamp(state.since_start(row.last_at))})"
    )


def _styled(text: str, width: int, style: str) -> list[Text]:
    return [Text(part.plain, style, no_wrap=True) for part in _wrapped(text, width)]


def _wrapped(text: str, width: int) -> list[Text]:
    parts = textwrap.wrap(clean(text), max(width, 20), subsequent_indent="     ", drop_whitespace=False)
    return [Text(part, no_wrap=True) for part in parts] or [Text()]
