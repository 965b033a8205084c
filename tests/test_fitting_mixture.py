"""One vocabulary for several datasets: who gives how much, in which units, and what a policy makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pi0_fast import FastTokenizer, TokenizerTrainingConfig, train_tokenizer
from pi0_fast.actions.bpe_training import Corpus, JoinedCorpus
from pi0_fast.actions.tokenizer import TokenizerFitter
from pi0_fast.actions.vocabulary import Vocabulary
from pi0_fast.cli import main
from pi0_fast.data import LeRobotWriter
from pi0_fast.types import UsageError

HORIZON = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    random = np.random.default_rng(0)
    for name, key, size, scale, lengths in (
        ("arm", "action", 3, 40.0, (60, 50, 70)),
        ("push", "move", 2, 0.01, (40, 45)),
    ):
        features = {key: {"dtype": "float32", "shape": [size]}}
        with LeRobotWriter(folder / name, fps=10, features=features) as writer:
            for length in lengths:
                walk = np.cumsum(random.normal(0, scale, (length, size)), axis=0).astype(np.float32)
                writer.add_episode({key: walk}, task="walk")
    return folder


def config(home: Path, output: Path, **changes: object) -> TokenizerTrainingConfig:
    base = TokenizerTrainingConfig(
        repo_id=["lab/arm", "lab/push"],
        root=[str(home / "arm"), str(home / "push")],
        action_key=["action", "move"],
        action_horizon=HORIZON,
        vocab_size=256,
        sample_fraction=1.0,
        output_dir=str(output),
    )
    return replace(base, **changes)


def test_one_vocabulary_for_robots_of_other_dimensions(home: Path, tmp_path: Path) -> None:
    result = train_tokenizer(config(home, tmp_path / "t", weights=[1, 3]))
    arm, push = result.metadata["datasets"]
    # Of 53 + 63 windows of the arm (an episode is held out), and 38 or 33 of the other, all of the latter are used.
    assert push["num_training_chunks"] in (38, 33)
    assert arm["num_training_chunks"] == round(push["num_training_chunks"] / 3)
    assert push["share"] == pytest.approx(0.75, abs=0.01)
    assert (arm["total_encoded_dims"], push["total_encoded_dims"]) == (3, 2)
    assert result.metadata["num_training_chunks"] == arm["num_training_chunks"] + push["num_training_chunks"]
    assert arm["held_out"]["episodes"]
    # Each in units of its own: both robots' values lie between -1 and 1, a factor of 4000 apart.
    for part in (arm, push):
        assert part["normalizer"]["mode"] == "QUANTILES"
    assert arm["normalizer"]["statistics"]["q99"][0] > 100 * push["normalizer"]["statistics"]["q99"][0]

    loaded = FastTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.time_horizon, loaded.action_dim, loaded.normalizer) == (None, None, None)
    assert loaded.fingerprint == result.tokenizer.fingerprint
    tables = list(result.tables())
    assert [row[0] for row in tables[0][1]] == ["lab/arm", "lab/push"]
    assert json.loads((tmp_path / "t" / "metadata.json").read_text())["repo_id"] == ["lab/arm", "lab/push"]


def test_the_vocabulary_is_that_of_all_chunks_together() -> None:
    """Beside the vocabulary of one long list of the same chunks, where the dimensions are equal."""
    random = np.random.default_rng(1)
    chunks = [random.uniform(-1, 1, (count, HORIZON, 2)).astype(np.float32) for count in (30, 50)]
    fitters = [TokenizerFitter(HORIZON, 2) for _ in chunks]
    for fitter, each in zip(fitters, chunks, strict=True):
        fitter.add(each)
    whole = TokenizerFitter(HORIZON, 2)
    whole.add(np.concatenate(chunks))
    for symbol_format in ("plain", "reference"):
        joined = JoinedCorpus([fitter.corpus for fitter in fitters])
        ours = Vocabulary.fit(joined, vocab_size=300, symbol_format=symbol_format)
        assert ours.to_json() == Vocabulary.fit(whole.corpus, vocab_size=300, symbol_format=symbol_format).to_json()


@pytest.mark.parametrize("symbol_format", ["plain", "reference"])
def test_rows_of_other_lengths_train_together(symbol_format: str) -> None:
    """Rows of 4 and of 6 symbols: the pair 5 5 is the most frequent only in both together."""
    short, long = Corpus(4), Corpus(6)
    short.add(np.array([[5, 5, 0, 1], [5, 5, 1, 0]] * 3, np.int32))
    long.add(np.array([[5, 5, 2, 3, 2, 3], [2, 0, 5, 5, 1, 3]] * 3, np.int32))
    joined = JoinedCorpus([short, long])
    assert (joined.rows, joined.row_length, joined.low, joined.high) == (12, 6, 0, 5)
    vocabulary = Vocabulary.fit(joined, vocab_size=20, symbol_format=symbol_format, headroom=None)
    ids, counts = vocabulary.encode(np.array([[5, 5, 0, 1]], np.int32))
    assert len(ids) == int(counts[0]) < 4
    assert [block.shape for block in joined.blocks()] == [(6, 4), (6, 6)]


def test_order_and_rate_weight_are_those_of_all(home: Path, tmp_path: Path) -> None:
    train_tokenizer(config(home, tmp_path / "t", order="dimension", rate_weight=0.4))
    loaded = FastTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.order, loaded.rate_weight) == ("dimension", 0.4)
    chunk = np.random.default_rng(0).normal(0, 0.3, (HORIZON, 2)).astype(np.float32)
    np.testing.assert_allclose(
        loaded.decode(loaded.encode(chunk, rate_weight=0.0)[0], time_horizon=HORIZON, action_dim=2),
        loaded.bound(HORIZON, 2).decode(loaded.bound(HORIZON, 2).encode(chunk, rate_weight=0.0)[0]),
    )
    assert loaded.bound(HORIZON, 2).rate_weight == 0.4


def test_equal_dimensions_stay_bound(home: Path, tmp_path: Path) -> None:
    twice = config(home, tmp_path / "t", root=[str(home / "arm")] * 2, action_key="action", repo_id=["a", "a"])
    result = train_tokenizer(twice)
    assert (result.tokenizer.time_horizon, result.tokenizer.action_dim) == (HORIZON, 3)
    assert [part["share"] for part in result.metadata["datasets"]] == [0.5, 0.5]
    assert list(result.further or {}) == ["a (2)"]


def test_chunks_in_proportion_without_weights(home: Path, tmp_path: Path) -> None:
    result = train_tokenizer(config(home, tmp_path / "t", max_chunks=50, val_fraction=0.0))
    arm, push = (part["num_training_chunks"] for part in result.metadata["datasets"])
    windows = [60 + 50 + 70 - 3 * 7, 40 + 45 - 2 * 7]
    assert arm == round(50 * windows[0] / sum(windows))
    assert arm + push == 50


def test_what_does_not_fit_is_refused(home: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"weights": [1]}, "--weights has 1 entries for 2 datasets"),
        ({"weights": [1, 0]}, "--weights must be above 0, not 0"),
        ({"weights": [1, 1e-6]}, "lab/push would give none"),
        ({"root": str(home / "arm")}, "--root must be a list with one for each dataset"),
        ({"action_key": ["action"]}, "--action_key has 1 entries for 2"),
        ({"repo_id": "lab/arm", "root": None, "action_key": "action", "weights": [1]}, "no effect with one dataset"),
        ({"repo_id": "lab/arm", "root": None}, "--action_key is a list for several datasets, but there is one"),
        ({"report": True}, "--report is of one dataset"),
        ({"repo_id": []}, "--repo_id is an empty list"),
    ):
        with pytest.raises(UsageError, match=message):
            train_tokenizer(config(home, tmp_path / "t", **changes))
    assert not (tmp_path / "t").exists()


def test_the_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = json.dumps([str(home / "arm"), str(home / "push")])
    line = ["train-tokenizer", '--repo_id=["lab/arm","lab/push"]', f"--root={roots}", '--action_key=["action","move"]']
    assert main([*line, "--weights=[0.5, 0.5]", "--vocab_size=200", f"--output_dir={tmp_path / 't'}"]) == 0
    printed = capsys.readouterr().out
    assert "lab/push" in printed
    assert "held-out tokens" in printed
    assert FastTokenizer.from_pretrained(tmp_path / "t").vocab_size <= 200


def test_one_vocabulary_for_recorded_robots(shared: Path, tmp_path: Path) -> None:
    """An arm of 6 joints and a humanoid of 26: beside what each needs with a tokenizer of its own."""
    roots = [str(shared / "data" / name) for name in ("so101_record_test_v30", "g1_inspire_v21")]
    common = {"action_horizon": 20, "sample_fraction": 0.1, "vocab_size": 1024}
    both = train_tokenizer(
        TokenizerTrainingConfig(
            repo_id=["local/so101", "local/g1"], root=roots, weights=[1, 1], output_dir=str(tmp_path / "both"), **common
        )
    )
    parts = both.metadata["datasets"]
    assert [part["total_encoded_dims"] for part in parts] == [6, 26]
    assert [part["share"] for part in parts] == [0.5, 0.5]
    for number, root in enumerate(roots):
        own = train_tokenizer(
            TokenizerTrainingConfig(repo_id="local/own", root=root, output_dir=str(tmp_path / f"own{number}"), **common)
        )
        alone, shared_one = own.metadata["held_out"], parts[number]["held_out"]
        assert shared_one["tokens"]["mean_token_length"] < 1.3 * alone["tokens"]["mean_token_length"]
        assert shared_one["normalized_rmse"] == pytest.approx(alone["normalized_rmse"], rel=0.25)
