"""What this machine can do: cores, dtype, network namespaces, traffic shaping, models, ports. Everything is tried."""

import argparse
import json
from collections.abc import Iterator

from cluster.doctor import OK, WARN, Check, DoctorReport, examine
from console.actions import ACTIONS
from console.config import ConfigError, config_path, load_config
from console.errors import EXIT_ENVIRONMENT
from console.text_format import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    checks = (*examine().checks, *config_checks())
    return show_report(DoctorReport(checks), as_json=args.json)


def config_checks() -> Iterator[Check]:
    """The operator's own settings, each with where it came from."""
    path = config_path()
    try:
        config = load_config(path)
    except ConfigError as error:
        yield Check("config", WARN, str(path), f"no console opens: {error}")
        return
    yield Check("config", OK, str(path), "" if path.exists() else "not there: every setting has its default")
    ids = ", ".join(action.id for action in ACTIONS)
    yield Check("config keys", OK, f"{len(config.keymap)} changed", f"ids for [keys]: {ids}")
    for name, value, source in config.rows():
        yield Check(f"config {name}", OK, value, f"from {source}")


def show_report(report: DoctorReport, *, as_json: bool) -> int:
    """Print it. Exit code 0 when a cluster can run here, 3 when something required is missing."""
    if as_json:
        print(json.dumps(report.document(), indent=2))
    else:
        for check in report.checks:
            print(f"{check.status:8} {check.name:18} {clean(check.value)}")
            if check.detail:
                print(f"{'':8} {'':18} {clean(check.detail)}")
        print()
        if report.can_run:
            print("a cluster can run here")
        else:
            print(f"a cluster cannot run here; missing: {', '.join(check.name for check in report.missing)}")
    return 0 if report.can_run else EXIT_ENVIRONMENT
