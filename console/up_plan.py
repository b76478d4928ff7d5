"""What ``pdconsole up`` was asked, ready to be carried out headless or with the console."""

from dataclasses import dataclass
from pathlib import Path

from cluster.control import SupervisorSpec


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The run directory exists and is this run's own."""

    spec: SupervisorSpec
    duration_s: float | None = None  # from ready; None = until a signal
    json: bool = False
    quiet: bool = False

    @property
    def run_dir(self) -> Path:
        return Path(self.spec.run_dir)
