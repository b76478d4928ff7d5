"""A run's summary as a page for a person. Pure: text in, text out."""

from typing import Any, Final

from cluster.targets import FLATTERS_FROM, rho_of_targets
from cluster.units import format_bits_per_s, format_bytes
from console.text_format import clean, format_skipped

_LATENCIES: Final = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2EL", "e2el_ms"))
_PERCENTILES: Final = ("p50", "p90", "p99", "max", "mean")
_PART_NAMES: Final = {
    "queue": "waiting in the router and for prefill",
    "prefill": "prefill",
    "transfer_exposed": "transfer after prefill's end",
    "admit_wait": "waiting for admission to decode",
    "first_decode": "first step on decode",
    "router": "router",
    "residual": "not accounted for",
}


def render_page(summary: dict[str, Any], *, alive: bool, path: str, event_lines: list[str]) -> str:
    """Sections apart by a blank line; a section without anything to say is left out."""
    sections = [
        _head(summary, alive, path),
        _requests(summary["requests"], summary["throughput"]),
        _latency(summary),
        _ttft_parts(summary),
        _kv(summary["kv"]),
        _handoff(summary.get("handoff")),
        _link(summary),
        _workers(summary),
        ["events", *event_lines] if event_lines else [],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(summary: dict[str, Any], alive: bool, path: str) -> list[str]:
    state = (
        "up now"
        if alive
        else f"ended ({clean(summary['stop_reason']) or 'without a stop: it crashed or was killed'})"
    )
    return [
        f"run {clean(summary['run'])}: {state}",
        f"profile {clean(summary['profile'])}, model {clean(summary['model'])} {summary['dtype']}, "
        f"mode {' > '.join(summary['modes'])}, codec {' > '.join(summary['codecs'])}, "
        f"served {summary['duration_s']:.1f} s",
        f"in {clean(path)}",
    ]


def _requests(requests: dict[str, Any], throughput: dict[str, Any]) -> list[str]:
    lines = ["requests"]
    names = (
        "arrived",
        "finished",
        "failed",
        "rejected",
        "cancelled",
        "cut_off",
        "in_flight",
        "retried",
        "migrated",
    )
    shown = [
        f"{requests[name]} {name.replace('_', ' ')}" for name in names if requests[name] or name in names[:3]
    ]
    lines.append("  " + ", ".join(shown))
    for title, key in (("failed", "failed_by_reason"), ("rejected", "rejected_by_reason"), ("fallbacks", "fallbacks"),
                       ("retries", "retries_by_reason")):  # fmt: skip
        if requests[key]:
            lines.append(
                f"  {title}: " + ", ".join(f"{count} {clean(why)}" for why, count in requests[key].items())
            )
    if requests["position_errors"]:
        lines.append(f"  WRONG: {requests['position_errors']} batches of tokens had a gap or came twice")
    if throughput["output_tokens_per_s"] is not None:
        lines.append(
            f"  {throughput['requests_per_s']:.2f} requests/s, {throughput['prompt_tokens_per_s']:,.0f} prompt "
            f"tokens/s, {throughput['output_tokens_per_s']:,.0f} output tokens/s"
        )
    return lines


def _latency(summary: dict[str, Any]) -> list[str]:
    rows = [(name, summary[key]) for name, key in _LATENCIES]
    by_label = summary["itl_ms_by_label"]
    if len(by_label) > 1:
        rows += [(f"ITL {clean(label)}", values) for label, values in by_label.items()]
    width = max(len(name) for name, _ in rows) + 2
    lines = [
        "latency, ms".ljust(width + 2) + "".join(f"{name:>10}" for name in _PERCENTILES) + f"{'count':>10}"
    ]
    for name, values in rows:
        cells = "".join(f"{number(values[percentile]):>10}" for percentile in _PERCENTILES)
        lines.append(f"  {name:{width}}{cells}{values['count']:>10}")
    return lines


def _ttft_parts(summary: dict[str, Any]) -> list[str]:
    parts, mean = summary["ttft_parts_ms"], summary["ttft_ms"]["mean"]
    if mean is None:
        return []
    lines = ["mean TTFT is made of, ms"]
    lines += [f"  {number(value):>10}  {_PART_NAMES[part]}" for part, value in parts.items()]
    lines.append(f"  {number(sum(parts.values())):>10}  together; measured {number(mean)}")
    return lines


def _kv(kv: dict[str, Any]) -> list[str]:
    failures = ", ".join(f"{count} {clean(why)}" for why, count in kv["failures"].items())
    if not kv["transfers"]:
        return ["KV", f"  transfers failed: {failures}"] if failures else []
    # an older run's summary does not say what was skipped: nothing was
    skipped = format_skipped(kv.get("skipped_tokens", 0), kv.get("skipped_bytes", 0))
    lines = [
        "KV",
        f"  {kv['transfers']} transfers, {kv['tokens']:,} tokens, {format_bytes(kv['raw_bytes'])} raw, "
        f"{format_bytes(kv['wire_bytes'])} on the wire{skipped}",
        f"  transfer p50 {number(kv['transfer_ms']['p50'])} p99 {number(kv['transfer_ms']['p99'])} ms, "
        f"exposed p50 {number(kv['exposed_ms']['p50'])} p99 {number(kv['exposed_ms']['p99'])} ms",
    ]
    if kv["achieved_bytes_per_s"] is not None:
        lines.append(f"  {format_bits_per_s(kv['achieved_bytes_per_s'] * 8)} while the socket was busy")
    if kv["formula_ok"] is not None:
        verdict = "equal" if kv["formula_ok"] else "NOT equal"
        lines.append(f"  raw bytes {verdict} to tokens x {kv['bytes_per_token']:,} bytes")
    if failures:
        lines.append(f"  transfers failed: {failures}")
    return lines


def _handoff(handoff: dict[str, Any] | None) -> list[str]:
    """Nothing where nothing was weighed; an older run's summary has none."""
    if handoff is None or not handoff["remote"] + handoff["local"]:
        return []
    unweighed = f" ({handoff['unweighed']} for want of measurements)" if handoff["unweighed"] else ""
    lines = [
        f"handoff {' > '.join(clean(setting) for setting in handoff['settings'])}",
        f"  {handoff['remote']} remote{unweighed}, {handoff['local']} local",
    ]
    error = handoff["forecast_error_ms"]
    if error["count"]:
        lines.append(
            f"  forecasts of dispatch to first token off by p50 {number(error['p50'])} p90 {number(error['p90'])} "
            f"max {number(error['max'])} ms, {handoff['forecast_error_share']:.0%} of what it took; "
            f"mean {handoff['forecast_bias_ms']:+.1f} ms ({error['count']} forecasts)"
        )
    return lines


def _link(summary: dict[str, Any]) -> list[str]:
    link, rho, b_star = summary["link"], summary["rho"], summary["b_star_bytes_per_s"]
    if not link["backend"]:
        return []
    achieved = link["achieved_bits_per_s"]
    jitter = f" +- {link['asked_jitter_ms']:g}" if link["asked_jitter_ms"] else ""
    reached = "not probed"
    if achieved:
        back, rtt_ms = link.get("achieved_back_bits_per_s"), link.get("achieved_rtt_ms")
        reached = format_bits_per_s(achieved)
        reached += f", back {format_bits_per_s(back)}" if back else ""
        reached += f", round trip {number(rtt_ms)} ms" if rtt_ms is not None else ""
    lines = [
        "link",
        f"  {link['backend']}: asked {format_bits_per_s(link['asked_bits_per_s'])}, "
        f"{link['asked_delay_ms']:g}{jitter} ms one way; achieved {reached}",
    ]
    if link["limit"]:
        lines.append(f"  {clean(link['limit'])}")
    if b_star is not None:
        tokens_per_s = f"{summary['prefill_tokens_per_s']:,.0f} tokens/s"
        lines.append(f"  B* {format_bits_per_s(b_star * 8)} (one worker prefills {tokens_per_s})")
    if rho is not None:
        word = (
            "moving KV is faster than computing it again"
            if rho > 1
            else "computing KV again is faster than moving it"
        )
        lines.append(f"  rho {rho:.3g}: {word}")
        lines += [f"  {line}" for line in [flattery(summary)] if line]
    return lines


def flattery(summary: dict[str, Any]) -> str:
    """A run's rho (not None) beside the one it stands for, and whether the run shows disaggregation too good.

    Without a target it is compared with all of them on a link of the same rate; "" where there is nothing to say.
    """
    rho, asked_bits_per_s = summary["rho"], summary["link"]["asked_bits_per_s"]
    target_rho = summary.get("target_rho")  # an older run's summary has none: none was asked
    if target_rho is not None:
        named = f"target {clean(summary['target'])}:" if summary["target"] else "asked:"
        at_start = summary["rho_at_start"]  # the run's own moves with the prompts it happened to get
        too_good = "; this run flatters disaggregation" if at_start > FLATTERS_FROM * target_rho else ""
        return f"{named} rho {target_rho:.3g}; this link at start {at_start:.3g}{too_good}"
    if asked_bits_per_s <= 0:
        return ""
    low, high = rho_of_targets(asked_bits_per_s)
    if rho <= FLATTERS_FROM * high:
        return ""
    return (
        f"GPUs on a link of this rate have rho {low:.2g} to {high:.2g}: this run flatters disaggregation "
        "(--target NAME gives the link a GPU's ratio)"
    )


def _workers(summary: dict[str, Any]) -> list[str]:
    processes = [*summary["workers"], *([summary["router"]] if summary["router"] else [])]
    if not processes:
        return []
    lines = ["processes             pid  restarts  held blocks  peak memory"]
    for process in processes:
        held = "-" if process["held_blocks"] is None else str(process["held_blocks"])
        failed = f"  FAILED: {clean(process['failed'])}" if process["failed"] else ""
        lines.append(
            f"  {clean(process['id']):12}{process['pid']:>11}{process['restarts']:>10}{held:>13}"
            f"{format_bytes(process['peak_rss_bytes']):>13}{failed}"
        )
    if summary["orphans"]:
        lines.append(f"  WRONG: {summary['orphans']} processes were left at the end")
    return lines


def number(value: float | None) -> str:
    """Three or so digits: "0.42", "14.2", "2,711"; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
