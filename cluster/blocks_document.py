"""What ``GET /admin/blocks`` answers: every held KV block's owner, over all workers. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cluster.control import BlocksReported
from cluster.routed_request import RoutedRequest


def blocks_document(
    reports: Sequence[BlocksReported | str], requests: Mapping[str, RoutedRequest]
) -> dict[str, Any]:
    """``reports``: of each worker, or the id of one that did not answer; ``requests``: those the router follows.

    A holder ``is_wanted`` while the router still follows that very attempt on that worker; one that is not is being
    given up, which takes an abort's way to the worker, or until the wire lets go of the blocks.
    """
    workers = [
        _worker(report, requests)
        if isinstance(report, BlocksReported)
        else {"worker_id": report, "error": "no answer"}
        for report in reports
    ]
    answered = [report for report in reports if isinstance(report, BlocksReported)]
    return {
        "held_blocks": sum(report.held_blocks for report in answered),
        "stranded_blocks": sum(report.stranded_blocks for report in answered),
        "workers": workers,
    }


def _worker(report: BlocksReported, requests: Mapping[str, RoutedRequest]) -> dict[str, Any]:
    holders = []
    for holder in report.holders:
        request = requests.get(holder.request_id)
        is_wanted = (
            request is not None and request.attempt == holder.attempt and request.is_on(report.worker_id)
        )
        holders.append(msgspec.to_builtins(holder) | {"is_wanted": is_wanted})
    return {
        "worker_id": report.worker_id,
        "total_blocks": report.total_blocks,
        "held_blocks": report.held_blocks,
        "stranded_blocks": report.stranded_blocks,
        "holders": holders,
    }
