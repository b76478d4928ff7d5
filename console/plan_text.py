"""Plan rows as a table for a person. Pure."""

from collections.abc import Sequence

from cluster.planner import PlanRow
from cluster.units import format_bytes
from console.run_page import number


def plan_text(rows: Sequence[PlanRow]) -> str:
    """A header and a line per row, in the rows' order."""
    lines = [f"{'LINK':10}{'TOKENS':>8}{'KV':>12}{'MOVE ms':>11}{'COMPUTE ms':>12}{'RHO':>9}  VERDICT"]
    for row in rows:
        rho = "-" if row.rho is None else f"{row.rho:.3g}"
        lines.append(
            f"{row.link:10}{row.tokens:>8}{format_bytes(row.kv_bytes):>12}{number(row.transfer_ms):>11}"
            f"{number(row.recompute_ms):>12}{rho:>9}  {row.verdict}"
        )
    return "\n".join(lines)
