"""The recipe of the model that ships, piece by piece, on a library of three files and a model of two layers."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.corpus import (
    END_IDS,
    END_OF_TEXT_ID,
    HELD_OUT,
    SPECIAL_TOKENS,
    Chat,
    Corpus,
    Module,
    build_corpus,
    read_modules,
    split_chats,
    split_pieces,
)
from engine.models.measuring import bits_per_byte, greedy
from engine.models.model_directory import model_config
from engine.models.recipe import (
    bytes_per_token,
    encode_documents,
    main,
    replace_directory,
    train_tokenizer,
)
from engine.models.training import (
    STAGES,
    Packer,
    Stage,
    orthogonalise,
    rate_share,
    skipped_positions,
    stage_at,
    train,
)
from engine.models.training_model import Shape, TrainingModel

SOURCE = '''\
"""A module."""


class Pair:
    @property
    def total(self):
        """Return the sum of both members of the pair.

        Never fails.
        """
        return self.first + self.second + 0  # a comment that makes the piece long enough


def undocumented(value):
    return value
'''
SMALL = Shape(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=8192,
)


class FirstChoice:
    """Stands in for a random source: always the first choice, and never the rare case."""

    def choice(self, options):
        return options[0]

    def random(self):
        return 1.0


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in {
        "pair.py": SOURCE,
        "csv.py": f'"""Held out."""\n{SOURCE}\nHELD = "out"\n',
        "test/test_pair.py": SOURCE,
        "site-packages/other.py": SOURCE,
        "encodings/cp1.py": SOURCE,
        "table.py": "TABLE = [" + ", ".join(map(str, range(500))) + "]\n",
        "broken.py": "def (:\n",
        "latin.py": "# -*- coding: latin-1 -*-\nname = 'caf\u00e9'\n",
        "empty.py": "\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="latin-1")
    return tmp_path


def test_only_usable_sources_are_read_each_in_its_own_encoding(library):
    modules = {module.name: module.source for module in read_modules(library)}
    assert sorted(modules) == ["csv.py", "latin.py", "pair.py"]
    assert "caf\u00e9" in modules["latin.py"]


def test_a_directory_without_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}.*no usable Python source"):
        read_modules(tmp_path)


def test_a_piece_is_dedented_and_keeps_its_decorators():
    method = next(piece for piece in split_pieces(Module("pair.py", SOURCE)) if "def total" in piece[:30])
    assert method.startswith("@property\ndef total(self):\n    ")
    assert method.endswith("long enough\n")


def test_a_documented_function_becomes_a_request_and_its_answer():
    (chat,) = split_chats(Module("pair.py", SOURCE), FirstChoice())
    assert chat.user == "Return the sum of both members of the pair."
    assert chat.assistant.startswith("@property\ndef total(self):")
    assert chat.render() == f"<|user|>{chat.user}<|end|><|assistant|>{chat.assistant}<|end|>"


def test_held_out_modules_are_in_no_training_document(library):
    corpus = build_corpus(library)
    assert [text for text in corpus.held_out if "Held out." in text]
    for kind in (corpus.modules, corpus.pieces, corpus.prose, corpus.chats):
        assert not [text for text in kind if 'HELD = "out"' in text]


def test_a_corpus_depends_on_nothing_but_library_and_seed(library):
    assert build_corpus(library, seed=3) == build_corpus(library, seed=3)
    assert build_corpus(library, seed=3).chats != build_corpus(library, seed=4).chats


def test_every_held_out_name_exists_in_this_interpreter():
    library = Path(json.__file__).parents[1]
    assert [name for name in HELD_OUT if not (library / name).is_file()] == []


@pytest.fixture(scope="module")
def tokenizer():
    corpus = Corpus(modules=(SOURCE,), pieces=(), prose=("A naïve café. " * 20,), chats=(), held_out=())
    return train_tokenizer(corpus, 300)


def test_special_tokens_come_first_and_are_one_token_each(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    ids = tokenizer.encode(Chat("a", "b").render()).ids
    assert ids[0] == SPECIAL_TOKENS.index("<|user|>")
    assert ids[-1] in END_IDS


def test_token_bytes_add_up_to_the_text(tokenizer):
    text = "def naïve():\n    return '\U0001f600'\n"
    sizes = bytes_per_token(tokenizer)
    assert sizes[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_documents_end_with_the_end_of_text_token(tokenizer):
    (ids,) = encode_documents(tokenizer, ("x = 1",))
    assert ids[-1] == END_OF_TEXT_ID
    assert tokenizer.decode(ids[:-1]) == "x = 1"


def test_packed_rows_continue_each_other_and_keep_the_share_of_each_kind():
    packer = Packer([[[1] * 40 + [0]] * 3, [[2, 2, 0]] * 5], weights=[0.75, 0.25], lanes=2, seed=0)
    rows = [packer.batch(2, 64) for _ in range(200)]
    assert all(row.shape == (2, 65) for row in rows)
    assert all(torch.equal(a[:, -1], b[:, 0]) for a, b in itertools.pairwise(rows))
    tokens = torch.cat([row[:, 1:].flatten() for row in rows])
    share = (tokens == 1).sum().item() / (tokens != 0).sum().item()
    assert share == pytest.approx(0.75 * 40 / 41 / (0.75 * 40 / 41 + 0.25 * 2 / 3), abs=0.03)


def test_orthogonalised_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_rate_rises_then_falls_and_stages_follow_the_clock():
    assert rate_share(0.0, 0.02) == 0.02
    assert rate_share(0.02, 0.02) == pytest.approx(1.0)
    assert rate_share(0.5, 0.02) > rate_share(0.9, 0.02) > rate_share(0.999, 0.02) == 0.02
    assert [stage_at(progress) for progress in (0.0, 0.75, 0.99, 1.5)] == [0, 1, 2, 2]
    assert sum(stage.share for stage in STAGES) == pytest.approx(1.0)
    assert STAGES[-1].tokens == Shape().max_positions


def test_skipped_positions_rise_within_the_context_and_start_at_zero():
    torch.manual_seed(0)
    drawn = [skipped_positions(16, 64) for _ in range(200)]
    assert all(positions[0] == 0 and (positions.diff() >= 1).all() for positions in drawn)
    assert all((positions.diff() > 1).sum() <= 1 for positions in drawn)
    assert max(int(positions[-1]) for positions in drawn) == 63


def test_only_differences_of_positions_matter():
    torch.manual_seed(0)
    model = TrainingModel(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    row = torch.randint(0, 300, (1, 24))
    apart = torch.cat((torch.arange(12), torch.arange(4000, 4012)))
    torch.testing.assert_close(model(row), model(row, torch.arange(24) + 100), atol=1e-2, rtol=1e-3)
    assert (model(row) - model(row, apart)).abs().max() > 0.5


def test_training_lowers_the_loss_and_stops_on_the_clock():
    torch.manual_seed(0)
    model = TrainingModel(SMALL)
    packer = Packer([[[5, 6, 7, 8, 9, 0]]], [1.0], lanes=4, seed=0)
    ticks = itertools.count()
    before = model.losses(packer.batch(4, 32)).mean().item()
    report = train(
        model,
        packer,
        budget_s=200,
        stages=(Stage(0.5, 4, 32), Stage(0.5, 2, 64, skips=True)),
        clock=lambda: float(next(ticks)),
        report=lambda line: None,
    )
    after = model.losses(packer.batch(4, 32)).mean().item()
    assert before > 5
    assert after < 0.5
    assert all(report.steps)
    assert report.tokens == report.steps[0] * 4 * 32 + report.steps[1] * 2 * 64
    assert greedy(model, [5, 6], 10, frozenset({0})) == [7, 8, 9, 0]


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary():
    torch.manual_seed(0)
    model = TrainingModel(dataclasses.replace(SMALL, num_layers=1))
    model.model.embed_tokens.weight.data.zero_()  # all logits equal
    measured = bits_per_byte(model, [1] * 8200, torch.full((300,), 2))
    expected = torch.log2(torch.tensor(300.0)).item() / 2
    assert measured.overall == pytest.approx(expected, rel=1e-5)
    assert list(measured.by_position.values()) == pytest.approx([expected] * 4, rel=1e-5)


def test_a_stream_too_short_to_measure_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="100 tokens; at least 8193"):
        bits_per_byte(TrainingModel(SMALL), [1] * 100, torch.ones(300))


def test_parameter_names_are_those_of_the_shipped_checkpoint():
    shipped = load_file(Path(__file__).parents[2] / "engine" / "models" / "tiny" / "model.safetensors")
    model = TrainingModel(Shape())
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in shipped.items()
    }
    config = json.loads(
        (Path(__file__).parents[2] / "engine" / "models" / "tiny" / "config.json").read_text()
    )
    assert config == model_config(Shape(), list(END_IDS))


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    old, new = tmp_path / "tiny", tmp_path / "new"
    for directory in (old, new):
        directory.mkdir()
        (directory / directory.name).touch()
    replace_directory(new, old)
    assert [path.name for path in old.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--minutes", "0"], "--minutes 0.0"), (["--out", "/nonexistent/x/tiny"], "/nonexistent/x/tiny")],
)
def test_wrong_usage_is_one_clear_line(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
