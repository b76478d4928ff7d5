"""What this machine can do: cores, dtype, network namespaces, traffic shaping, models, ports. Everything is tried."""

import argparse
import json
from typing import Final

from cluster.doctor import DoctorReport, examine
from console.text_format import clean

EXIT_ENVIRONMENT: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    return show_report(examine(), as_json=args.json)


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
