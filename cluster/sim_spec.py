"""What a simulation is asked: workers, link, limits and costs. Plain data."""

from dataclasses import dataclass

from cluster.dispatch import RouterLimits
from cluster.metrics import Slos
from cluster.sim_cost import StepCosts
from cluster.sim_machine import SimMachine


@dataclass(frozen=True, slots=True)
class StepExcess:
    """What a step with decoding sequences takes beyond its cost: ``mean_s``, and how single steps lie about that
    (ascending, of mean 0; () = all alike)."""

    mean_s: float = 0.0
    deviations_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SimOverheads:
    """Seconds beside engine and link. ``router_s``: request read to its message at a worker; ``answer_s``: a token
    sampled to its bytes written; ``handoff_s``: of each handoff, beside its bytes; ``step``: while a core is idle,
    ``full_step``: while every core of the machine has a worker that steps."""

    router_s: float = 0.002
    answer_s: float = 0.001
    handoff_s: float = 0.002
    step: StepExcess = StepExcess()
    full_step: StepExcess = StepExcess()


@dataclass(frozen=True, slots=True)
class SimLink:
    """``bytes_per_s``: of every prefill worker's way out; ``delay_s`` one way. ``stream_from_tokens``: prompts from
    that length on leave while they are computed, 0 = none."""

    bytes_per_s: float
    delay_s: float = 0.0
    stream_from_tokens: int = 1


@dataclass(frozen=True, slots=True)
class SimSpec:
    """Every worker is alike. ``prefill`` 0: co-located. ``machine`` None: every worker has its cores to itself."""

    prefill: int
    decode: int
    costs: StepCosts
    link: SimLink
    slos: Slos
    limits: RouterLimits
    num_blocks: int  # of each worker's KV pool
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_bytes_per_token: int
    prefill_chunk_tokens: int = 0
    prefix_caching: bool = False
    overheads: SimOverheads = SimOverheads()
    machine: SimMachine | None = None

    @property
    def mode(self) -> str:
        return mode_of(self.prefill)

    @property
    def worker_ids(self) -> tuple[list[str], list[str]]:
        """Of the prefill workers and of the others, as the supervisor names them."""
        return (
            [f"prefill-{index}" for index in range(self.prefill)],
            [f"decode-{index}" for index in range(self.decode)],
        )


def mode_of(prefill: int) -> str:
    """The mode of a split with so many prefill workers."""
    return "disagg" if prefill else "colocated"
