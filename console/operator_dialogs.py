"""What is asked before an action of the table changes the cluster: targets, numbers, names. Sends nothing itself."""

from collections.abc import Callable
from typing import Any, Final

from textual.screen import Screen

from cluster.control import AddNote, ChangeLink, Command, SetLoad
from cluster.netns import LinkShape, shaping_commands
from cluster.units import parse_bits_per_s
from console.action_commands import LONG_PROMPT_TOKENS, burst
from console.fault_picks import FaultPicks
from console.screens.dialog import TextDialog
from console.screens.pick_target import Deed, Picked, PickTarget, Target
from console.view_state import ViewState

LINK_HELP: Final = "Link: rate [delay [jitter]], e.g. 1gbit 5ms 1ms; unlimited for no limit"
MAX_PROMPTS: Final = 1000


class OperatorDialogs:
    """``begin`` opens the dialog of an action; what comes of it goes to ``deliver``.

    ``selected`` is the process under the cursor, "" = none; ``push`` shows a dialog and calls back with its result.
    """

    def __init__(
        self,
        token_path: str,
        *,
        push: Callable[[Screen[Any], Callable[[Any], None]], object],
        deliver: Callable[[Command, str], None],
        selected: Callable[[], str],
    ) -> None:
        self._state = ViewState()
        self._token_path = token_path
        self._push = push
        self._deliver = deliver
        self._selected = selected

    def begin(self, action_id: str, state: ViewState) -> None:
        """Raises KeyError for an action that asks nothing."""
        self._state = state
        picks = FaultPicks(state, self._token_path)
        match action_id:
            case "kill":
                self._pick("Break a process", "k", picks.processes(), picks.process_deeds())
            case "link":
                self._pick("Break or set a link", "l", picks.links(), picks.link_deeds())
            case "restart":
                self._pick("Restart a worker", "R", picks.workers(), picks.restart_deeds())
            case "drain":
                self._pick("Drain a worker, or end its drain", "D", picks.workers(), picks.drain_deeds())
            case "role":
                self._pick("Switch the role of a worker", "", picks.workers(), picks.role_deeds())
            case "remove":
                self._pick("Remove a worker", "", picks.workers(), picks.remove_deeds())
            case "note":
                self._ask("Note", lambda text: AddNote(text=text))
            case "burst-ask":
                self._ask(
                    "Burst: number of prompts [tokens of each]", self._burst, initial=f"2 {LONG_PROMPT_TOKENS}",
                    explain=self._explain_burst,
                )  # fmt: skip
            case "load-ask":
                self._ask(
                    "Load of the profile to start", lambda name: SetLoad(name=name, cause="operator, palette")
                )
            case _:
                raise KeyError(action_id)

    def _pick(self, question: str, key: str, targets: list[Target], deeds: list[Deed]) -> None:
        chosen = self._selected() or next(
            (t.target_id for t in targets if t.target_id.startswith("prefill")), ""
        )
        self._push(PickTarget(question, key, targets, deeds, chosen), self._picked)

    def _picked(self, picked: Picked | None) -> None:
        if picked is None:
            return
        if picked.deed.asks:
            self._ask(LINK_HELP, parse_link, initial=self._link_text(), explain=self._explain_link)
        else:
            self._deliver(picked.command, f"{picked.deed.word} {picked.target.target_id}")

    def _ask(
        self,
        question: str,
        command: Callable[[str], Command],
        *,
        initial: str = "",
        explain: Callable[[str], str] | None = None,
    ) -> None:
        def answered(text: str | None) -> None:
            if text:
                self._deliver(command(text), question.split(":")[0])

        self._push(TextDialog(question, initial=initial, explain=explain), answered)

    def _burst(self, text: str) -> Command:
        prompts, tokens = parse_burst(text)
        return burst(self._state, prompts, tokens)

    def _explain_burst(self, text: str) -> str:
        prompts, tokens = parse_burst(text)
        planned = burst(self._state, prompts, tokens)
        return f"{prompts} prompts of {planned.prompt_tokens:,} tokens at once"

    def _link_text(self) -> str:
        asked = self._state.topology.asked
        if asked is None or asked.asked_bits_per_s <= 0:
            return "unlimited"
        rate, unit = asked.asked_bits_per_s, "bit"
        for prefix in ("k", "m", "g"):
            if rate >= 1000:
                rate, unit = rate / 1000, f"{prefix}bit"
        return f"{rate:g}{unit} {asked.asked_delay_ms:g}ms {asked.asked_jitter_ms:g}ms"

    def _explain_link(self, text: str) -> str:
        change = parse_link(text)
        asked = self._state.topology.asked
        if asked is None or asked.backend != "netns":
            return f"the {asked.backend if asked is not None else 'link'} backend is told; no tc line"
        shape = LinkShape(
            bits_per_s=change.bits_per_s,
            delay_ms=change.delay_ms,
            jitter_ms=change.jitter_ms,
            loss=asked.asked_loss,
        )
        return "\n".join(f"$ tc {line}" for line in shaping_commands("kv0", shape))


def parse_burst(text: str) -> tuple[int, int]:
    """ "4 2000" -> (4, 2000). Raises ValueError saying what is allowed."""
    words = text.replace(",", "").split()
    if not 1 <= len(words) <= 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{text!r} is not a burst; allowed: a number of prompts, and of tokens each")
    prompts, tokens = int(words[0]), int(words[1]) if len(words) > 1 else LONG_PROMPT_TOKENS
    if prompts > MAX_PROMPTS:
        raise ValueError(f"{prompts} prompts are too many; allowed: 1 to {MAX_PROMPTS}")
    return prompts, tokens


def parse_link(text: str) -> ChangeLink:
    """ "1gbit 5ms 1ms" -> the command. Raises ValueError saying what is allowed."""
    words = text.split()
    if not 1 <= len(words) <= 3:
        raise ValueError(f"{text!r}: allowed is rate [delay [jitter]], e.g. 1gbit 5ms 1ms")
    delays_ms = [_milliseconds(word) for word in words[1:]]
    return ChangeLink(
        bits_per_s=parse_bits_per_s(words[0]), delay_ms=delays_ms[0] if delays_ms else 0.0,
        jitter_ms=delays_ms[1] if len(delays_ms) > 1 else 0.0, cause="operator, key l",
    )  # fmt: skip


def _milliseconds(word: str) -> float:
    digits = word.lower().removesuffix("ms")
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10_000:
        raise ValueError(f"{word!r} is not a delay; allowed: 0 to 10000 ms")
    return value
