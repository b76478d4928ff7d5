"""What ``pdconsole up`` was asked, ready to be carried out headless or with the console."""

from dataclasses import dataclass, field
from pathlib import Path

from cluster.control import SupervisorSpec
from cluster.run_dir import runs_home
from console.console_options import ConsoleOptions


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The run directory exists and is this run's own."""

    spec: SupervisorSpec
    duration_s: float | None = None  # from ready; None = until a signal
    json: bool = False
    quiet: bool = False
    console: ConsoleOptions = field(default_factory=ConsoleOptions)

    @property
    def detached_line(self) -> str:
        """What is to be said of a cluster that goes on without a console."""
        name = self.spec.run if self.run_dir.parent == runs_home() else str(self.run_dir)
        return f"run {self.spec.run} goes on; back: pdconsole attach {name}, end: pdconsole stop {name}"

    @property
    def run_dir(self) -> Path:
        return Path(self.spec.run_dir)
