"""The letters that charts, replay and reports mark moments with. Pure."""

from typing import Final

from cluster.events import (
    BlocksStranded,
    BurstInjected,
    CodecChanged,
    Event,
    FaultHealed,
    FaultInjected,
    FellBack,
    LinkConfigured,
    LoadStarted,
    LoadStopped,
    ModeChanged,
    NoteAdded,
    RequestMigrated,
    RoleChanged,
    WorkerDraining,
    WorkerExited,
    WorkerFailed,
)

_LETTERS: Final[dict[type, str]] = {
    BurstInjected: "b",
    FaultInjected: "K",
    WorkerFailed: "K",
    BlocksStranded: "K",
    WorkerExited: "K",
    FaultHealed: "h",
    WorkerDraining: "D",
    RoleChanged: "D",
    FellBack: "f",
    RequestMigrated: "g",
    ModeChanged: "m",
    CodecChanged: "i",
    LoadStarted: "s",
    LoadStopped: "s",
    LinkConfigured: "l",
    NoteAdded: "a",
}
_ASKED: Final = ("stop", "restart", "operator")
"""Causes of an exit that somebody wanted, and that is marked otherwise."""


def mark_letter(event: Event) -> str:
    """Letter drawn on the charts where something was done or went wrong, "" for all other events."""
    if type(event) is WorkerExited and event.cause in _ASKED:
        return ""
    return _LETTERS.get(type(event), "")
