"""What a worker's prefix cache is believed to hold."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.prefix_memory import PrefixMemory, chain_of

BLOCK = 4


def test_prompts_share_the_blocks_they_begin_with() -> None:
    memory = PrefixMemory(100)
    memory.note(chain_of(range(17), BLOCK))
    assert memory.num_held(chain_of(range(17), BLOCK)) == 4
    assert memory.num_held(chain_of([*range(9), 99, 98, 97], BLOCK)) == 2
    assert memory.num_held(chain_of([99, *range(1, 17)], BLOCK)) == 0, (
        "the same tokens after another one are others"
    )


def test_a_token_is_always_left_to_compute() -> None:
    assert len(chain_of(range(16), BLOCK)) == 3
    assert len(chain_of(range(17), BLOCK)) == 4
    assert chain_of(range(BLOCK), BLOCK) == chain_of([], BLOCK) == ()


def test_the_least_recently_used_is_forgotten_and_of_one_prompt_the_end() -> None:
    memory = PrefixMemory(3)
    old, new = chain_of(range(9), BLOCK), chain_of(range(100, 109), BLOCK)
    memory.note(old)
    memory.note(new)
    assert (memory.num_held(old), memory.num_held(new)) == (1, 2)
    memory.note(old)
    assert (memory.num_held(old), memory.num_held(new)) == (2, 1)


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=8), st.lists(st.integers(0, 3), max_size=20)
)
def test_what_is_held_is_the_longest_common_beginning_in_whole_blocks(
    noted: list[list[int]], asked: list[int]
) -> None:
    memory = PrefixMemory(1000)
    for tokens in noted:
        memory.note(chain_of(tokens, BLOCK))
    best = 0
    for tokens in noted:
        usable = min(len(chain_of(tokens, BLOCK)), len(chain_of(asked, BLOCK)))
        same = 0
        while same < usable and tokens[: (same + 1) * BLOCK] == asked[: (same + 1) * BLOCK]:
            same += 1
        best = max(best, same)
    assert memory.num_held(chain_of(asked, BLOCK)) == best
