"""The schedule of a load: seeded, of the asked rate and length, in real text where the model has a language."""

import itertools
import random
import statistics

import pytest

from cluster.profile import LoadSection
from cluster.workload import (
    SYNTHETIC_TOKEN_IDS,
    PlannedRequest,
    PromptCorpus,
    arrival_offsets,
    burst_requests,
    corpus_text,
    steady_requests,
    synthetic_corpus,
)

CORPUS = PromptCorpus(list(range(1000)))


def first(count: int, load: LoadSection) -> list[PlannedRequest]:
    return list(itertools.islice(steady_requests(load, CORPUS), count))


def test_a_prompt_has_exactly_the_asked_length_wherever_it_is_cut() -> None:
    rng = random.Random(1)
    for num_tokens in (1, 7, 999, 1000, 1001, 2500):
        prompt = CORPUS.cut(rng, num_tokens)
        assert len(prompt) == num_tokens
        assert all(later == (earlier + 1) % 1000 for earlier, later in itertools.pairwise(prompt))


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        PromptCorpus([])


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    load = LoadSection(seed=3)
    assert first(20, load) == first(20, load)
    other = first(20, LoadSection(seed=4))
    assert [request.at_s for request in other] != [request.at_s for request in first(20, load)]
    assert [request.prompt_token_ids for request in other] != [r.prompt_token_ids for r in first(20, load)]


def test_another_prompt_length_leaves_the_arrivals_as_they_were() -> None:
    short, long = first(20, LoadSection(prompt_tokens=16)), first(20, LoadSection(prompt_tokens=512))
    assert [request.at_s for request in short] == [request.at_s for request in long]


def test_a_planned_request_asks_what_its_load_says() -> None:
    load = LoadSection(prompt_tokens=33, max_tokens=5, temperature=0.7, ignore_eos=False)
    for request in first(5, load):
        assert len(request.prompt_token_ids) == 33
        assert (request.max_tokens, request.temperature, request.ignore_eos) == (5, 0.7, False)
    assert len({request.seed for request in first(5, load)}) == 5


@pytest.mark.parametrize("rate_per_s", [0.5, 4.0, 250.0])
def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential(rate_per_s: float) -> None:
    offsets = list(itertools.islice(arrival_offsets(rate_per_s, random.Random(0)), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *offsets])]
    assert min(gaps) >= 0.0
    assert statistics.fmean(gaps) * rate_per_s == pytest.approx(1.0, abs=0.03)
    assert statistics.pstdev(gaps) * rate_per_s == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_the_spread_and_keeps_the_rate(burstiness: float, spread: float) -> None:
    offsets = list(itertools.islice(arrival_offsets(10.0, random.Random(0), burstiness), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *offsets])]
    assert statistics.fmean(gaps) * 10.0 == pytest.approx(1.0, abs=0.06)
    assert statistics.pstdev(gaps) * 10.0 == pytest.approx(spread, rel=0.08)


def test_a_rate_or_burstiness_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate_per_s is 0; allowed is above 0"):
        next(arrival_offsets(0, random.Random(0)))
    with pytest.raises(ValueError, match=r"burstiness is -1; allowed is above 0"):
        next(arrival_offsets(1, random.Random(0), -1))


def test_the_prompts_of_a_burst_differ_and_so_do_two_bursts() -> None:
    bursts = [burst_requests(3, 200, 16, CORPUS, seed) for seed in (0, 1)]
    prompts = {request.prompt_token_ids for burst in bursts for request in burst}
    assert len(prompts) == 6
    assert all(request.at_s == 0.0 and request.max_tokens == 16 for burst in bursts for request in burst)


def test_the_corpus_is_python_source_of_the_asked_size() -> None:
    text = corpus_text(100_000)
    assert len(text) == 100_000
    assert "import" in text
    assert '"""' in text
    compile(corpus_text(20_000).rpartition("\ndef ")[0], "corpus", "exec")  # real source, not noise


def test_synthetic_prompts_are_ids_that_every_vocabulary_has() -> None:
    prompt = synthetic_corpus().cut(random.Random(0), 5000)
    assert min(prompt) >= 0
    assert max(prompt) < SYNTHETIC_TOKEN_IDS
    assert len(set(prompt)) == SYNTHETIC_TOKEN_IDS
