"""How the prefill part of one step's token budget is shared. A pure function of numbers."""

from collections.abc import Sequence


def share_prefill_budget(budget: int, demands: Sequence[int], *, short: int, chunk: int = 0) -> list[int]:
    """Tokens for each prompt in this step, in order of arrival; ``demands`` are their uncomputed tokens.

    Prompts are served in order of arrival, with one exception: a prompt of at most ``short`` uncomputed tokens
    does not wait behind a longer one. Half of the budget is open to such prompts; the oldest prompt keeps
    the other half whatever arrives. What one part does not use, the other gets. So a 64-token prompt is
    computed beside an 8,000-token one at once, and the long one is at worst half as fast, while two long prompts are
    computed one after the other (sharing between equals would delay the first and not speed up the second).

    ``chunk``: no prompt gets more than that in one step, and what it leaves is open to the next ones; 0 = no limit.
    """
    limits = [min(demand, chunk) if chunk else demand for demand in demands]
    shares = [0] * len(demands)
    if not demands:
        return shares
    shares[0] = min(limits[0], budget - budget // 2)
    left = budget - shares[0]
    for index in range(1, len(demands)):
        if demands[index] <= short:
            shares[index] = min(limits[index], left)
            left -= shares[index]
    for index, limit in enumerate(limits):
        extra = min(limit - shares[index], left)
        shares[index] += extra
        left -= extra
    return shares
