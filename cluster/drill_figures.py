"""Every figure that a drill can expect something of, by name."""

from collections.abc import Callable
from typing import Final

from cluster import drill_cluster_figures as cluster
from cluster import drill_request_figures as requests
from cluster.drill_figure import Figure
from cluster.drill_story import DrillStory

FIGURES: Final[dict[str, Callable[[DrillStory, str], Figure]]] = {
    function.__name__: function
    for function in (
        requests.finished, requests.failed, requests.failed_without_rule, requests.rejected,
        requests.without_retry_after,
        requests.left, requests.left_noticed_ms, requests.unfinished, requests.unaccounted,
        requests.retried, requests.migrated, requests.fallbacks, requests.transfer_failures,
        requests.tokens_differ, requests.position_errors, requests.undisturbed_failed, requests.after_failed,
        requests.worst_ttft_added_s, requests.worst_gap_added_s, requests.after_ttft_added_s,
        requests.itl_p99_ratio,
        cluster.faults, cluster.noticed_s, cluster.recovered_s, cluster.serves_again_s, cluster.restarts,
        cluster.given_up, cluster.stranded_blocks, cluster.orphans, cluster.memory_growth_mib,
    )
}  # fmt: skip

GROUP: Final = "group"
FAULT: Final = "fault"
FREE: Final = "reason, process or phase"

KEYS: Final = {
    "finished": GROUP, "worst_ttft_added_s": GROUP, "worst_gap_added_s": GROUP, "itl_p99_ratio": GROUP,
    "noticed_s": FAULT, "recovered_s": FAULT, "serves_again_s": FAULT,
    "failed": FREE, "rejected": FREE, "left": FREE, "retried": FREE, "migrated": FREE, "fallbacks": FREE,
    "transfer_failures": FREE, "restarts": FREE, "memory_growth_mib": FREE,
}  # fmt: skip
"""What may stand behind the dot of a figure's name; the others take nothing."""
