import msgspec
import pytest

from cluster import link_backend
from cluster.link_backend import LinkBackend, pacing_problem, resolve_link
from cluster.link_prober import probe_bytes
from cluster.netns import Fabric, LinkShape, NetnsError
from cluster.profile import ClusterSection, LinkSection, Profile
from cluster.start_refused import StartRefused

PAIR = ("prefill-0", "decode-0")


def profile(backend: str, bandwidth: str = "1gbit", prefill: int = 1, **link: float) -> Profile:
    return Profile(
        cluster=ClusterSection(prefill=prefill),
        link=LinkSection(backend=backend, bandwidth=bandwidth, **link),  # type: ignore[arg-type]
    )


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_workers: int) -> Fabric:
        raise NetnsError("network namespaces need root (CAP_SYS_ADMIN)")

    monkeypatch.setattr(Fabric, "create", refuse)


@pytest.fixture
def no_pacing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_backend, "pacing_problem", lambda: "the kernel ignores SO_MAX_PACING_RATE")


@pytest.mark.usefixtures("no_namespaces")
def test_auto_without_root_paces() -> None:
    link = resolve_link(profile("auto", delay_ms=2.0, jitter_ms=0.5))
    assert link.name == "pacing"
    assert (link.namespace_fd(0), link.host(0)) == (-1, "127.0.0.1")
    told = link.worker_link()
    assert (told.bits_per_s, told.delay_ms, told.jitter_ms) == (1e9, 2.0, 0.5)
    assert link.limit == ""


@pytest.mark.usefixtures("no_namespaces", "no_pacing")
def test_auto_that_finds_nothing_warns() -> None:
    link = resolve_link(profile("auto"))
    assert link.name == "none"
    assert link.worker_link().bits_per_s == 0
    assert link.limit == (
        "no way to shape links here (netns: network namespaces need root (CAP_SYS_ADMIN); pacing: the kernel ignores "
        "SO_MAX_PACING_RATE); asked 1.00 Gb/s; backend none leaves loopback unshaped"
    )


@pytest.mark.usefixtures("no_namespaces", "no_pacing")
@pytest.mark.parametrize(
    ("backend", "reason"), [("netns", "need root"), ("pacing", "ignores SO_MAX_PACING_RATE")]
)
def test_backend_asked_for_by_name_is_not_replaced(backend: str, reason: str) -> None:
    with pytest.raises(StartRefused, match=f"link backend {backend} cannot work here: .*{reason}") as refused:
        resolve_link(profile(backend))
    assert refused.value.exit_code == 3


def test_none_does_not_shape_and_says_so() -> None:
    link = resolve_link(profile("none", "10gbit", delay_ms=1.0))
    assert "asked 10.00 Gb/s with 1 ms delay; backend none leaves loopback unshaped" in link.limit
    assert msgspec.to_builtins(link.worker_link())["bits_per_s"] == 0
    with pytest.raises(ValueError, match="does not shape; allowed: netns or pacing"):
        link.change(LinkShape(bits_per_s=1e9))


def test_loopback_profile_misses_nothing() -> None:
    assert resolve_link(profile("none", "unlimited")).limit == ""


def test_this_kernel_paces() -> None:
    assert pacing_problem() == ""


def measured(link: LinkBackend, way: tuple[str, str], bits_per_s: float, rtt_ms: float = 50.0) -> bool:
    return link.measured(way, bits_per_s, rtt_ms, carries_kv=way[0].startswith("prefill"))


def test_limit_says_what_was_reached() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e11))
    assert measured(link, PAIR, 9.3e9)
    assert link.limit == "asked 100.00 Gb/s; this host reached 9.30 Gb/s (prefill-0 to decode-0)"
    link.change(LinkShape(bits_per_s=1e9))
    assert link.limit == "", "what was measured belongs to the old shape"
    assert not measured(link, PAIR, 0.97e9)
    assert link.limit == ""


def test_slowest_pair_is_named() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e10))
    measured(link, ("prefill-0", "decode-0"), 5e9)
    measured(link, ("prefill-0", "decode-1"), 4e9)
    assert link.limit.endswith("this host reached 4.00 Gb/s (prefill-0 to decode-1)")


def test_achieved_is_of_the_way_that_kv_goes_but_a_slow_way_back_is_said_too() -> None:
    link = LinkBackend("netns", LinkShape(bits_per_s=1e10))
    measured(link, PAIR, 9.6e9)
    assert measured(link, ("decode-0", "prefill-0"), 2e9)
    assert link.achieved_bits_per_s == 9.6e9
    assert link.limit == "asked 10.00 Gb/s; this host reached 2.00 Gb/s (decode-0 to prefill-0)"


def test_a_delay_that_is_not_there_is_said() -> None:
    link = LinkBackend("netns", LinkShape(bits_per_s=1e9, delay_ms=20.0, jitter_ms=2.0))
    assert not measured(link, PAIR, 1e9, rtt_ms=36.5), "jitter may shorten both ways"
    assert measured(link, PAIR, 1e9, rtt_ms=20.4)
    assert link.limit == "asked 20 ms one way; the round trip is 20 ms (prefill-0 to decode-0)"
    link.change(LinkShape(bits_per_s=1e9))
    assert link.limit == ""


@pytest.mark.parametrize(("prefill", "decode", "shared"), [(1, 1, True), (2, 1, False), (1, 2, False)])
@pytest.mark.usefixtures("no_namespaces")
def test_pacing_says_that_connections_do_not_share_a_cable(prefill: int, decode: int, shared: bool) -> None:
    link = resolve_link(
        Profile(
            cluster=ClusterSection(prefill=prefill, decode=decode),
            link=LinkSection(backend="pacing", bandwidth="1gbit"),
        )
    )
    assert ("do not share a cable" not in link.limit) is shared


def test_pacing_says_so_too_of_a_pair_that_came_later() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e9))
    measured(link, PAIR, 1e9)
    measured(link, ("decode-0", "prefill-0"), 1e9)
    assert link.limit == ""
    assert measured(link, ("prefill-0", "decode-1"), 1e9)
    assert "do not share a cable" in link.limit


@pytest.mark.usefixtures("no_namespaces")
def test_what_pacing_cannot_do_is_said() -> None:
    link = resolve_link(profile("pacing", prefill=2, loss=0.01))
    assert "transfers between different workers do not share a cable" in link.limit
    assert "loss of 1.00% is not emulated" in link.limit


def test_configured_event_shows_asked_backend_and_limit() -> None:
    link = LinkBackend("pacing", LinkShape(bits_per_s=1e9, delay_ms=3, jitter_ms=1, loss=0.1))
    event = link.describe(7.0)
    assert (event.at, event.backend, event.asked_bits_per_s) == (7.0, "pacing", 1e9)
    assert (event.asked_delay_ms, event.asked_jitter_ms, event.asked_loss) == (3, 1, 0.1)
    assert event.limit == link.limit != ""


@pytest.mark.parametrize(
    ("rate", "expected"), [(1e6, 4 * 2**20), (1e9, 12_500_000), (1e11, 64 * 2**20), (0.0, 64 * 2**20)]
)
def test_probe_is_a_tenth_of_a_second_within_bounds(rate: float, expected: int) -> None:
    assert probe_bytes(rate) == expected
