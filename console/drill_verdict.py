"""A drill's verdict as its run's directory keeps it (``verdict.json``), to be shown beside the run."""

import re
from pathlib import Path
from typing import Final

import msgspec

VERDICT_FILE: Final = "verdict.json"
PASS: Final = "pass"
_END: Final = re.compile(r"drill (\S+) (PASS|FAIL): ")


class JudgedLine(msgspec.Struct, frozen=True):
    """One expectation with its figure."""

    name: str
    expected: str
    ok: bool
    text: str
    look_at: tuple[str, ...] = ()


class DrillVerdict(msgspec.Struct, frozen=True):
    """``verdict`` pass | fail, or "" while the drill goes on: then ``headline`` says where it is."""

    drill: str
    verdict: str = ""
    headline: str = ""
    promise: str = ""
    expectations: tuple[JudgedLine, ...] = ()

    @property
    def num_met(self) -> int:
        return sum(1 for line in self.expectations if line.ok)


def end_of_drill(drill: str, *, is_pass: bool) -> str:
    """How the note begins that tells in the log, and on the screen, how a drill ended."""
    return f"drill {drill} {'PASS' if is_pass else 'FAIL'}: "


def ended_drill(note: str) -> tuple[str, bool] | None:
    """(drill, whether it passed) of a note that begins so; None: it does not."""
    found = _END.match(note)
    return (found[1], found[2] == "PASS") if found is not None else None


def read_verdict(run_dir: Path) -> DrillVerdict | None:
    """The last drill's verdict; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode((run_dir / VERDICT_FILE).read_bytes(), type=DrillVerdict)
    except (OSError, msgspec.DecodeError):
        return None
