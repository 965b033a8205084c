"""fit_fast_tokenizer: numbers worked out another way, signatures, errors, and many processes at once."""

from __future__ import annotations

import filecmp
import inspect
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset_builder import build_v2, build_v3
from pi0_fast import FastTokenizer, Normalizer, cached_fitting, fit_fast_tokenizer
from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.data import LeRobotReader, LeRobotWriter
from pi0_fast.types import DatasetError, Feature, TokenizerError, UsageError

LENGTHS = [60, 45, 80, 5, 70, 50]


def walks(lengths: Sequence[int], width: int = 3, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.cumsum(random.normal(0, 0.05, (n, width)), axis=0).astype(np.float32) for n in lengths]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes in two files, of which the second holds the first episodes; the fourth is too short."""
    root = tmp_path_factory.mktemp("data") / "walk"
    return build_v3(root, walks(LENGTHS), files=[[3, 5, 4], [2, 0, 1]])


def fit(root: Path | None, cache: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "dataset_repo_id": "local/walk",
        "root": root,
        "cache_dir": cache,
        "base_tokenizer_name": None,
        "n_samples": 120,
        "chunk_size": 10,
        "vocab_size": 256,
    }
    path = fit_fast_tokenizer(**{**arguments, **changes})
    assert isinstance(path, str)
    return Path(path)


def no_fit(*_: Any, **__: Any) -> None:
    raise AssertionError("fitted again")


# --- the fit ----------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones() -> None:
    defaults = {k: p.default for k, p in inspect.signature(fit_fast_tokenizer).parameters.items()}
    documented = {
        "dataset_repo_id": inspect.Parameter.empty,
        "cache_dir": inspect.Parameter.empty,
        "base_tokenizer_name": "physical-intelligence/fast",
        "n_samples": 1024,
        "chunk_size": 50,
        "seed": 42,
        "root": None,
        "scale": 10.0,
        "vocab_size": 1024,
        "timeout_s": 1800.0,
    }
    assert {name: defaults[name] for name in documented} == documented


def test_the_tokenizer_is_ready_for_training(dataset: Path, tmp_path: Path) -> None:
    path = fit(dataset, tmp_path / "cache")
    assert path.parent == tmp_path / "cache"
    tokenizer = FastTokenizer.from_pretrained(path)
    assert (tokenizer.time_horizon, tokenizer.action_dim, tokenizer.scale) == (10, 3, 10.0)
    assert tokenizer.vocab_size <= 256
    normalizer = tokenizer.normalizer
    assert normalizer is not None
    frames = np.concatenate(walks(LENGTHS)).astype(np.float64)
    assert (normalizer.mode, normalizer.clip) == ("QUANTILES", True)
    np.testing.assert_array_equal(normalizer.low, np.quantile(frames, 0.01, axis=0))
    np.testing.assert_array_equal(normalizer.high, np.quantile(frames, 0.99, axis=0))
    chunk = walks(LENGTHS)[0][None, :10]
    restored = normalizer.invert(tokenizer.decode(tokenizer(normalizer.apply(chunk))))
    # Rounding errs by at most sqrt(H) / (2 scale) of half the range; the chunk has no value outside [q01, q99].
    assert np.abs(restored - np.clip(chunk, normalizer.low, normalizer.high)).max() < np.sqrt(10) / 20 * 1.3


def test_metadata_says_what_was_fitted(dataset: Path, tmp_path: Path) -> None:
    metadata = json.loads((fit(dataset, tmp_path) / "metadata.json").read_text())
    assert metadata["num_training_chunks"] == 5 * (120 // 6)  # of the six episodes one is too short
    assert metadata["skipped_episodes"] == 1
    assert metadata["signature"] in [path.name for path in tmp_path.iterdir()]
    assert metadata["encoded_dims"] == "0:3"
    assert metadata["normalization_mode"] == "QUANTILES"


def starts_of(root: Path, n_samples: int, chunk_size: int = 10, seed: int = 42) -> dict[int, list[int]]:
    settings = cached_fitting._Settings(n_samples, chunk_size, seed, 10.0, 256, "plain", 0.0, "frequency", None)
    reader = LeRobotReader("local/walk", root)
    found = cached_fitting._sampled_starts(reader, tuple(reader.episodes), settings)
    return {index: starts.tolist() for index, starts in found.items()}


def test_chunks_are_spread_over_the_episodes(dataset: Path) -> None:
    assert {index: len(starts) for index, starts in starts_of(dataset, 120).items()} == dict.fromkeys(
        (0, 1, 2, 4, 5), 20
    )
    # 60 of each are wanted, but 45 frames hold 36 windows: all of them, none twice.
    many = starts_of(dataset, 360)
    assert many[1] == list(range(36))
    for index, starts in many.items():
        assert len(set(starts)) == len(starts)
        assert min(starts) >= 0
        assert max(starts) <= LENGTHS[index] - 10
    # Fewer chunks than episodes: one of each, and never more than asked for; which ones depends on the seed.
    assert [len(starts) for starts in starts_of(dataset, 3).values()] == [1, 1, 1]
    assert len({tuple(sorted(starts_of(dataset, 3, seed=seed))) for seed in range(8)}) > 1


def test_starts_are_uniform(tmp_path: Path) -> None:
    """Over many seeds each of 11 windows is as likely as any other: 2200 draws, 200 expected, 5 sigma are 67."""
    build_v3(tmp_path / "one", walks([20]))
    drawn = np.zeros(11)
    for seed in range(2200):
        drawn[starts_of(tmp_path / "one", 1, seed=seed)[0][0]] += 1
    assert np.abs(drawn - 200).max() < 67


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_the_order_of_shards_does_not_matter(dataset: Path, tmp_path: Path, version: str) -> None:
    if version == "v3.0":
        build_v3(tmp_path / "other", walks(LENGTHS), row_group_size=7, kind="double")
    else:
        build_v2(tmp_path / "other", walks(LENGTHS))
    one, other = fit(dataset, tmp_path / "a"), fit(tmp_path / "other", tmp_path / "b")
    for name in ("tokenizer.json", "normalizer.json", "vocabulary.txt", "processor_config.json"):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


def test_only_the_columns_of_the_fit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build_v3(tmp_path / "data", walks(LENGTHS))
    asked: set[str] = set()
    iter_batches = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, columns: Sequence[str], **named: Any) -> Any:
        asked.update(columns)
        return iter_batches(self, *args, columns=columns, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    fit(root, tmp_path / "cache")
    assert asked == {"action", "episode_index", "frame_index"}


def test_only_the_episodes_asked_for_are_fitted_on(dataset: Path, tmp_path: Path) -> None:
    part = Path(fit(dataset, tmp_path / "cache", episodes=[5, 0, 3, 2]))
    chosen = [LENGTHS[index] for index in (0, 2, 3, 5)]
    values = [walk for index, walk in enumerate(walks(LENGTHS)) if index in (0, 2, 3, 5)]
    alone = Path(fit(build_v3(tmp_path / "alone", values), tmp_path / "other"))
    tokenizers = [FastTokenizer.from_pretrained(path) for path in (part, alone)]
    for tokenizer in tokenizers:  # statistics are of these episodes too
        assert tokenizer.normalizer is not None
        expected = np.quantile(np.concatenate(values).astype(np.float64), 0.99, axis=0)
        np.testing.assert_array_equal(tokenizer.normalizer.high, expected)
    metadata = json.loads((part / "metadata.json").read_text())
    assert metadata["episodes"] == [0, 2, 3, 5]
    assert metadata["skipped_episodes"] == sum(length < 10 for length in chosen) == 1
    assert metadata["num_training_chunks"] == 3 * (120 // 4)
    # All of them are not other ones; others are.
    whole = fit(dataset, tmp_path / "cache")
    assert fit(dataset, tmp_path / "cache", episodes=range(6)) == whole
    assert len({whole, part, fit(dataset, tmp_path / "cache", episodes=[0, 2, 5])}) == 3
    for episodes, message in (([6], "has no episode 6"), ([], "episodes is empty"), ([-1], "at least 0, not -1")):
        with pytest.raises(UsageError, match=message):
            fit(dataset, tmp_path / "cache", episodes=episodes)


def test_two_fits_are_byte_identical(dataset: Path, tmp_path: Path) -> None:
    one, two = fit(dataset, tmp_path / "a"), fit(dataset, tmp_path / "b")
    assert one.name == two.name
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert "metadata.json" in names
    assert filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])


@pytest.mark.golden
@pytest.mark.parametrize(("name", "size", "chunks"), [("g1_inspire_v21", 26, 1020), ("so101_record_test_v30", 6, 1024)])
def test_real_recordings(shared: Path, tmp_path: Path, name: str, size: int, chunks: int) -> None:
    path = Path(
        fit_fast_tokenizer(
            dataset_repo_id="local/real", root=shared / "data" / name, cache_dir=tmp_path, base_tokenizer_name=None
        )
    )
    tokenizer = FastTokenizer.from_pretrained(path)
    assert (tokenizer.time_horizon, tokenizer.action_dim, tokenizer.vocab_size) == (50, size, 1024)
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata["num_training_chunks"] == chunks  # 1024 // 60 * 60, and 1024 // 4 * 4
    assert metadata["compression_stats"]["compression_ratio"] > 7


# --- normalisation ----------------------------------------------------------------------------------------------------


def test_statistics_that_training_uses(dataset: Path, tmp_path: Path) -> None:
    statistics = {"q01": [-1, -2, -3], "q99": [1, 2, 3], "min": [-9, -9, -9], "max": [9, 9, 9]}
    normalizer = FastTokenizer.from_pretrained(fit(dataset, tmp_path, statistics=statistics)).normalizer
    assert normalizer is not None
    assert normalizer.low.tolist() == [-1, -2, -3]
    assert normalizer.high.tolist() == [1, 2, 3]
    with pytest.raises(UsageError, match="of 2 dimensions, the encoded dimensions of 'action' are 0:3"):
        fit(dataset, tmp_path, statistics={name: values[:2] for name, values in statistics.items()})


def write_with_state(root: Path) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    features = {"action": Feature("action", "float32", (3,)), "state": Feature("state", "float32", (2,))}
    actions = np.cumsum(random.normal(0, 0.05, (40, 3)), axis=0).astype(np.float32)
    with LeRobotWriter(root, fps=10, features=features) as writer:
        writer.add_episode({"action": actions, "state": actions[:, :2] - 0.5}, task="wander")
    return actions, actions[:, :2] - np.float32(0.5)


def test_a_normalizer_says_which_dimensions_are_encoded_and_relative_to_what(tmp_path: Path) -> None:
    actions, states = write_with_state(tmp_path / "data")
    selection = ActionSelection.create(3, encoded_dims="0,2", delta_dims="2", delta_state_dims="1", state_size=2)
    chunks = np.stack([actions[s : s + 10][:, [0, 2]] for s in range(31)])
    chunks[:, :, 1] -= states[:31, 1][:, None]
    normalizer = Normalizer.fit(lambda: [chunks], "MIN_MAX", selection=selection)
    path = fit(tmp_path / "data", tmp_path / "c", normalizer=normalizer, state_key="state", n_samples=31)
    tokenizer = FastTokenizer.from_pretrained(path)
    assert tokenizer.normalizer == normalizer
    # All 31 windows were fitted; so the same tokenizer comes out of a fit on them by hand, in any order.
    by_hand = FastTokenizer.fit(normalizer.apply(chunks), vocab_size=256, normalizer=normalizer)
    assert tokenizer == by_hand
    metadata = json.loads((path / "metadata.json").read_text())
    assert (metadata["encoded_dims"], metadata["delta_dims"], metadata["state_key"]) == ("0:1,2:3", "2", "state")
    with pytest.raises(DatasetError, match=r"no column 'observation\.state'; did you mean"):
        fit(tmp_path / "data", tmp_path / "c", normalizer=normalizer)


def test_two_normalisations_contradict(dataset: Path, tmp_path: Path) -> None:
    normalizer = Normalizer.fit(lambda: walks(LENGTHS), "MIN_MAX")
    fit(dataset, tmp_path, normalizer=normalizer, normalization_mode="MIN_MAX")
    with pytest.raises(UsageError, match="own mode and statistics"):
        fit(dataset, tmp_path, normalizer=normalizer, normalization_mode="QUANTILES")
    with pytest.raises(UsageError, match="own mode and statistics"):
        fit(dataset, tmp_path, normalizer=normalizer, statistics={"min": [0], "max": [1]})
    other = Normalizer.fit(lambda: walks(LENGTHS), "MIN_MAX", selection=ActionSelection(5, (0, 1, 2)))
    with pytest.raises(UsageError, match="actions of 5 dimensions, not of 3"):
        fit(dataset, tmp_path, normalizer=other)


def test_the_encoder_and_the_order_are_those_of_the_command(dataset: Path, tmp_path: Path) -> None:
    """Both travel with the tokenizer, and do what `FastTokenizer.fit` does with them."""
    plain, cheap = (FastTokenizer.from_pretrained(fit(dataset, tmp_path, rate_weight=weight)) for weight in (0, 2.0))
    assert (plain.rate_weight, cheap.rate_weight) == (0, 2.0)
    chunks = np.stack([walk[:10] for walk in walks(LENGTHS) if len(walk) >= 10])
    counts = [sum(map(len, made.encode_actions(chunks))) for made in (plain, cheap)]
    assert counts[1] < counts[0]
    by_dimension = FastTokenizer.from_pretrained(fit(dataset, tmp_path, order="dimension"))
    assert (plain.order, by_dimension.order) == ("frequency", "dimension")
    np.testing.assert_allclose(
        by_dimension.decode_actions(by_dimension.encode_actions(chunks)),
        plain.decode_actions(plain.encode_actions(chunks)),
        atol=1e-6,
    )
    for wrong in ({"rate_weight": -1}, {"rate_weight": float("nan")}, {"rate_weight": True}, {"order": "random"}):
        with pytest.raises(UsageError):
            fit(dataset, tmp_path, **wrong)


# --- signature and cache ----------------------------------------------------------------------------------------------


def test_everything_that_changes_the_result_changes_the_signature(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(cached_fitting, "run_once", lambda path, *_, **__: made.append(path.name) or str(path))
    published = tmp_path / "published"
    FastTokenizer.fit(np.zeros((2, 4, 1))).save_pretrained(published)
    fit(dataset, tmp_path)
    for changes in (
        {"n_samples": 121},
        {"chunk_size": 11},
        {"seed": 43},
        {"scale": 11},
        {"scale": [10, 10, 10]},
        {"vocab_size": 257},
        {"symbol_format": "reference"},
        {"rate_weight": 0.5},
        {"order": "dimension"},
        {"normalization_mode": "MIN_MAX"},
        {"statistics": {"q01": [0] * 3, "q99": [1] * 3, "min": [0] * 3, "max": [1] * 3}},
        {"normalizer": Normalizer.fit(lambda: walks(LENGTHS), "QUANTILES")},
        {
            "normalizer": Normalizer.fit(
                lambda: [w[:, :2] for w in walks(LENGTHS)], selection=ActionSelection(3, (0, 1))
            )
        },
        {"base_tokenizer_name": str(published)},
        {"base_tokenizer_name": "physical-intelligence/fast"},
        {"dataset_repo_id": "local/run"},
    ):
        fit(dataset, tmp_path, **changes)
    monkeypatch.setattr(cached_fitting, "FIT_VERSION", 2)
    fit(dataset, tmp_path)
    assert len(set(made)) == len(made) == 18


def test_what_does_not_change_the_result_does_not_change_the_signature(dataset: Path, tmp_path: Path) -> None:
    """A copy of the dataset with other times and without video, a cache elsewhere, other spellings of numbers."""
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1e9, 1e9))
    (copy / "videos").mkdir()
    info = json.loads((copy / "meta/info.json").read_text())
    (copy / "meta/info.json").write_text(json.dumps({**info, "robot_type": "another"}, indent=8))
    changes = {"scale": np.float32(10), "n_samples": np.int64(120), "timeout_s": 5, "normalization_mode": "quantiles"}
    changes |= {"rate_weight": 0, "order": "frequency"}
    assert fit(copy, tmp_path / "b", **changes).name == fit(dataset, tmp_path / "a").name


def test_a_corrected_value_changes_the_signature(dataset: Path, tmp_path: Path) -> None:
    """In place, with the times of the file and the smallest and largest value as they were."""
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    path = copy / "data/chunk-000/file-000.parquet"
    names = [fit(copy, tmp_path / "cache").name]
    for changed in ("timestamp", "action"):
        status, table = path.stat(), pq.read_table(path)
        at = table.schema.get_field_index(changed)
        column = table.column(at).combine_chunks()
        values = (column.flatten() if changed == "action" else column).to_numpy().copy()
        median = np.argsort(values)[len(values) // 2]
        values[median] = np.nextafter(values[median], np.float32(np.inf))
        new = pa.array(values) if changed == "timestamp" else pa.FixedSizeListArray.from_arrays(pa.array(values), 3)
        pq.write_table(table.set_column(at, changed, new), path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        names.append(fit(copy, tmp_path / "cache").name)
    assert names[0] == names[1]  # another column is none of its business
    assert names[1] != names[2]


def test_the_second_call_only_looks(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fit(dataset, tmp_path)
    monkeypatch.setattr(cached_fitting, "_fit", no_fit)
    monkeypatch.setattr(LeRobotReader, "iter_episodes", no_fit)
    assert fit(dataset, tmp_path) == first
    with pytest.raises(AssertionError, match="fitted again"):
        fit(dataset, tmp_path, seed=1)


def test_a_hub_dataset_is_known_by_its_commit(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot as huggingface_hub lays it out: no column is read for the signature, and each commit has its own."""
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "datasets--someone--walk"
    (repo / "refs").mkdir(parents=True)
    names = []
    for digit in "ab":
        shutil.copytree(dataset, repo / "snapshots" / (digit * 40))
        (repo / "refs/main").write_text(digit * 40)
        monkeypatch.setattr(LeRobotReader, "content_digest", no_fit)
        changes = {"dataset_repo_id": "someone/walk", "local_files_only": True}
        names.append(fit(None, tmp_path / "cache", **changes).name)
    assert names[0] != names[1]
    assert fit(None, tmp_path / "cache", **changes, revision="a" * 40).name == names[0]
    metadata = json.loads((tmp_path / "cache" / names[1] / "metadata.json").read_text())
    assert metadata["dataset_revision"] == "b" * 40


@pytest.mark.parametrize("lost", ["metadata.json", "normalizer.json", "tokenizer.json", "bpe_tokenizer", "half"])
def test_a_partial_directory_is_not_taken_for_a_finished_one(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    path = fit(dataset, tmp_path)
    whole = {name.relative_to(path): name.read_bytes() for name in path.rglob("*") if name.is_file()}
    if lost == "bpe_tokenizer":
        shutil.rmtree(path / lost)
    elif lost == "half":
        text = (path / "tokenizer.json").read_bytes()
        (path / "tokenizer.json").write_bytes(text[: len(text) // 2])
    else:
        (path / lost).unlink()
    (tmp_path / f".{path.name}.pi0-fast-tmp-0-1-2").mkdir()  # of a process that was killed while it wrote
    assert fit(dataset, tmp_path) == path
    assert {name.relative_to(path): name.read_bytes() for name in path.rglob("*") if name.is_file()} == whole
    assert "is not used, but fitted again" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f".{path.name}.attempt",
        f".{path.name}.lock",
        path.name,
    ]


def test_a_directory_of_another_signature_is_not_taken(dataset: Path, tmp_path: Path) -> None:
    one, other = fit(dataset, tmp_path), fit(dataset, tmp_path, seed=1)
    shutil.rmtree(one)
    shutil.copytree(other, one)
    assert json.loads((fit(dataset, tmp_path) / "metadata.json").read_text())["seed"] == 42


# --- the base ---------------------------------------------------------------------------------------------------------


def test_a_base_that_can_be_read_must_be_a_fast_tokenizer(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    FastTokenizer.fit(np.zeros((2, 4, 1)), scale=99.0, vocab_size=300).save_pretrained(base)
    tokenizer = FastTokenizer.from_pretrained(fit(dataset, tmp_path / "a", base_tokenizer_name=base))
    assert (tokenizer.scale, tokenizer.time_horizon) == (10.0, 10)  # the arguments, not the base's
    assert "base tokenizer" not in caplog.text
    with pytest.raises(TokenizerError, match=r"base_tokenizer_name .*walk' is no FAST tokenizer"):
        fit(dataset, tmp_path / "b", base_tokenizer_name=str(dataset))
    with pytest.raises(TokenizerError, match="is no directory, and no hub id"):
        fit(dataset, tmp_path / "b", base_tokenizer_name="./mistyped")


def test_a_base_that_cannot_be_read_is_logged(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fit(dataset, tmp_path / "cache", base_tokenizer_name="someone/fast", local_files_only=True)
    assert "the base tokenizer someone/fast cannot be read, so it is not checked" in caplog.text


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_missing_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'none'} is not a directory"):
        fit(tmp_path / "none", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no meta/info\.json"):
        fit(tmp_path, tmp_path)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    with pytest.raises(FileNotFoundError, match=r"no dataset someone/nothing in .*home/someone/nothing"):
        fit(None, tmp_path, dataset_repo_id="someone/nothing", local_files_only=True)
    assert list(tmp_path.iterdir()) == []


def test_no_shards(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "d")
    shutil.rmtree(tmp_path / "d/data/chunk-000")
    with pytest.raises(RuntimeError, match=f"{tmp_path / 'd/data'} holds no parquet shards"):
        fit(tmp_path / "d", tmp_path / "c")


def test_one_shard_missing_or_cut_short(dataset: Path, tmp_path: Path) -> None:
    for name in ("missing", "cut"):
        shutil.copytree(dataset, tmp_path / name)
    (tmp_path / "missing/data/chunk-000/file-001.parquet").unlink()
    path = tmp_path / "cut/data/chunk-000/file-001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    for name, message in (("missing", "file-001.parquet is missing"), ("cut", "file-001.parquet cannot be read")):
        with pytest.raises(DatasetError, match=message):
            fit(tmp_path / name, tmp_path / "c")


def test_no_usable_chunks(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"all of its 6 episodes are shorter than chunk_size 81 \(the longest has 80 frames\): take chunk_size=80",
    ):
        fit(dataset, tmp_path, chunk_size=81)
    path = fit(dataset, tmp_path, chunk_size=80)
    assert json.loads((path / "metadata.json").read_text())["num_training_chunks"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 0}, "n_samples must be a whole number of at least 1, not 0"),
        ({"chunk_size": 2.5}, "chunk_size must be a whole number"),
        ({"seed": -1}, "seed must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"scale": 0}, "scale must be a number above 0"),
        ({"scale": [1, float("nan"), 1]}, "scale must be a number above 0"),
        ({"scale": [1, 2]}, "scale has 2 values for 3 encoded dimensions"),
        ({"scale": "fine"}, "scale must be a number above 0"),
        ({"symbol_format": "bytes"}, "symbol_format must be"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"normalization_mode": "MEDIAN"}, "unknown normalization mode"),
        ({"revision": "main"}, "revision has no effect with root"),
    ],
)
def test_impossible_arguments(dataset: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(dataset, tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_too_few_ids_for_the_data_and_then_enough(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="more than vocab_size 20"):
        fit(dataset, tmp_path, vocab_size=20)
    assert [entry for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == []


# --- many processes ---------------------------------------------------------------------------------------------------


def spawned_fit(root: Path, cache: Path) -> str:
    return str(fit(root, cache))


def test_four_spawned_processes_get_one_tokenizer(dataset: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        paths = {
            future.result(timeout=120) for future in [pool.submit(spawned_fit, dataset, tmp_path) for _ in range(4)]
        }
    assert len(paths) == 1
    FastTokenizer.from_pretrained(paths.pop())


# A training process: its fit is slow before it saves, or fails, as its arguments say; each fit leaves a line in `log`.
TRAINING = """
import json, os, sys, time
from pathlib import Path
settings = json.loads(sys.argv[1])
from pi0_fast import cached_fitting
original = cached_fitting.FastTokenizer.save_pretrained
def save_pretrained(self, path, **named):
    with Path(settings["log"]).open("a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(settings["seconds"])
    if settings["fail"]:
        raise OSError("no space left on device")
    original(self, path, **named)
cached_fitting.FastTokenizer.save_pretrained = save_pretrained
try:
    print(cached_fitting.fit_fast_tokenizer(
        dataset_repo_id="local/walk", root=settings["root"], cache_dir=settings["cache"], base_tokenizer_name=None,
        n_samples=120, chunk_size=10, vocab_size=256, timeout_s=settings["timeout"],
    ))
except (RuntimeError, OSError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)
"""


def train(dataset: Path, tmp_path: Path, rank: int | None, **changes: Any) -> subprocess.Popen[str]:
    settings = {"log": str(tmp_path / "log"), "seconds": 1.0, "fail": False, "timeout": 120.0}
    settings |= {"root": str(dataset), "cache": str(tmp_path / "cache"), **changes}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if rank is not None:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
    command = [sys.executable, "-c", TRAINING, json.dumps(settings)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out.strip()


def wait_for_fit(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[None] * 4, [0, 1, 2, 3]], ids=["plain", "torchrun"])
def test_one_slow_fit_serves_all(dataset: Path, tmp_path: Path, ranks: list[int | None]) -> None:
    processes = [train(dataset, tmp_path, rank, seconds=6.0) for rank in ranks]
    ends = {end(process) for process in processes}
    assert len(ends) == 1
    code, path = ends.pop()
    assert code == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    whole = fit(dataset, tmp_path / "alone")
    names = sorted(str(name.relative_to(whole)) for name in whole.rglob("*") if name.is_file())
    assert filecmp.cmpfiles(whole, path, names, shallow=False) == (names, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[None] * 3, [0, 1, 2]], ids=["plain", "torchrun"])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_end_of_a_leader_ends_all_and_the_next_run_succeeds(
    dataset: Path, tmp_path: Path, ranks: list[int | None], how: str
) -> None:
    processes = [
        train(dataset, tmp_path, rank, seconds=300.0 if how == "killed" else 4.0, fail=how == "failed")
        for rank in ranks
    ]
    wait_for_fit(tmp_path)
    leader = int((tmp_path / "log").read_text())
    time.sleep(3)  # the others have come
    if how == "killed":
        next(process for process in processes if process.pid == leader).kill()
    for process in processes:
        code, text = end(process)
        if process.pid != leader:
            assert code == 3
            assert text.startswith("SharedWorkError: FAST tokenizer ")
            assert f"process {leader} on " in text
            assert text.endswith("died" if how == "killed" else "failed: OSError: no space left on device")
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.name[0] != "."] == []
    again = [train(dataset, tmp_path, rank, seconds=0.5) for rank in ranks]
    assert {code for code, _ in map(end, again)} == {0}
    assert len((tmp_path / "log").read_text().splitlines()) == 2


@pytest.mark.slow
def test_followers_time_out_and_the_leader_does_not(dataset: Path, tmp_path: Path) -> None:
    leader = train(dataset, tmp_path, 0, seconds=10.0, timeout=1.0)
    wait_for_fit(tmp_path)
    code, text = end(train(dataset, tmp_path, 1, timeout=2.0))
    assert code == 3
    assert f"no result after 2 s of waiting for process {leader.pid} on " in text
    assert end(leader)[0] == 0


def test_the_log_tells_of_skipped_episodes(dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pi0_fast"):
        fit(dataset, tmp_path)
    assert "1 of 6 episodes are shorter than chunk_size 10" in caplog.text
