"""The report of agreement finds the first token that the reference would not have chosen."""

from pathlib import Path

import pytest

from engine.agreement import MOST_PROMPTS, divergences, engine_answers, main, prompts
from tests.engine.helpers import VOCAB_SIZE, make_prompt, write_checkpoint


def test_a_changed_token_is_where_answers_part(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    asked = [make_prompt(length, seed=length) for length in (3, 20, 40)]
    answers = engine_answers(tmp_path, "float32", asked, 12)
    assert [len(answer) for answer in answers] == [12, 12, 12]
    assert list(divergences(tmp_path, "float32", asked, answers)) == []
    answers[1][7] = (answers[1][7] + 1) % VOCAB_SIZE
    (parted,) = divergences(tmp_path, "float32", asked, answers)
    assert (parted.prompt, parted.position) == (1, 7)
    assert parted.margin > 0


def test_prompts_are_different_texts() -> None:
    assert len(set(prompts(MOST_PROMPTS))) == MOST_PROMPTS == 50


@pytest.mark.parametrize("wrong", [["--prompts", "0"], ["--prompts", "51"], ["--tokens", "0"]])
def test_a_number_out_of_range_is_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "tiny", *wrong])
    assert stopped.value.code == 2
    assert f"{wrong[0]} is {wrong[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["synthetic:nano", "no-such-model"])
def test_a_model_that_the_reference_cannot_read_is_named(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model]) == 2
    assert model in capsys.readouterr().err
