"""From datasets to saved tokenizers: real recordings, damaged settings, and numbers worked out another way."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi0_fast import FastTokenizer, TokenizerTrainingConfig, fit_fast_tokenizer, train_tokenizer
from pi0_fast.actions.choosing import RATE_WEIGHTS
from pi0_fast.actions.dct import ORDERS
from pi0_fast.actions.details import rounding_rmse
from pi0_fast.cli import main
from pi0_fast.data import LeRobotWriter
from pi0_fast.fitting import TokenizerTrainingResult
from pi0_fast.types import DatasetError, Feature, TokenizerError, UsageError

#: The documented keys, in the documented order, and the two that are ours.
METADATA_KEYS = [
    "repo_id",
    "vocab_size",
    "scale",
    "encoded_dims",
    "encoded_dim_ranges",
    "total_encoded_dims",
    "delta_dims",
    "delta_dim_list",
    "use_delta_transform",
    "state_key",
    "normalization_mode",
    "action_horizon",
    "num_training_chunks",
    "compression_stats",
    "held_out",
    "versions",
]


def write_dataset(
    root: Path, lengths: list[int], *, action_size: int = 3, state_size: int = 3, seed: int = 0, offset: float = 0.0
) -> None:
    """Smooth random trajectories; the state follows the action."""
    random = np.random.default_rng(seed)
    features = {
        "action": Feature("action", "float32", (action_size,), tuple(f"joint_{i}" for i in range(action_size))),
        "observation.state": Feature("observation.state", "float32", (state_size,)),
    }
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for length in lengths:
            path = np.cumsum(random.normal(0, 0.05, (length, max(action_size, state_size))), axis=0) + offset
            columns = {"action": path[:, :action_size], "observation.state": path[:, :state_size] - 0.01}
            writer.add_episode({k: v.astype(np.float32) for k, v in columns.items()}, task="wander")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "walk"
    write_dataset(root, [60, 45, 80, 5, 70, 50])
    return root


def config(dataset: Path, output: Path, **changes: object) -> TokenizerTrainingConfig:
    base = TokenizerTrainingConfig(
        repo_id="local/walk", root=str(dataset), output_dir=str(output), sample_fraction=1.0, vocab_size=256
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerTrainingResult:
    return train_tokenizer(config(dataset, tmp_path_factory.mktemp("fit") / "tokenizer"))


def test_metadata_has_the_documented_keys_with_resolved_values(result: TokenizerTrainingResult) -> None:
    metadata = json.loads((result.output_dir / "metadata.json").read_text())
    assert list(metadata) == METADATA_KEYS
    assert metadata == json.loads(json.dumps(result.metadata))
    assert metadata["encoded_dims"] == "0:3"
    assert metadata["encoded_dim_ranges"] == [[0, 3]]
    assert (metadata["delta_dims"], metadata["delta_dim_list"]) == (None, None)
    assert list(metadata["compression_stats"]) == [
        "compression_ratio",
        "mean_token_length",
        "p99_token_length",
        "min_token_length",
        "max_token_length",
    ]


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"target_rmse": 0.03}, lambda result: rounding(result) / 0.03),
        ({"target_error": 0.02, "order": "auto"}, lambda result: result.measured.quantization_worst.max() / 0.02),
        ({"target_tokens": 8}, lambda result: result.measured.tokens["mean_token_length"] / 8),
    ],
)
def test_targets_are_met_on_held_out_episodes(
    dataset: Path, tmp_path: Path, changes: dict[str, object], used: Callable[[TokenizerTrainingResult], float]
) -> None:
    result = train_tokenizer(config(dataset, tmp_path / "t", **changes))
    assert 0.8 < used(result) <= 1.0
    written = json.loads((tmp_path / "t/metadata.json").read_text())["choice"]
    best = written["tried"][written["chosen"]]
    loaded = FastTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.rate_weight, loaded.order) == (best["rate_weight"], best["order"])
    assert (loaded.max_error is not None) == ("target_error" in changes)
    assert {each["order"] for each in written["tried"]} == (set(ORDERS) if "order" in changes else {"frequency"})
    assert {each["rate_weight"] for each in written["tried"]} == set(RATE_WEIGHTS)
    shown = [
        row for _, rows, _ in result.tables() for row in rows if row[0] == "chunks beyond the largest error asked for"
    ]
    assert [row[-1] for row in shown] == ([0] if "target_error" in changes else [])
    titles = [title for title, _, _ in result.tables()]
    assert titles[0].startswith("What was tried, fitted on")


def rounding(result: TokenizerTrainingResult) -> float:
    assert result.tokenizer.normalizer is not None
    return rounding_rmse(result.measured, result.tokenizer.normalizer)


def test_the_rate_weight_is_saved_and_its_tokens_are_counted(dataset: Path, tmp_path: Path) -> None:
    plain = train_tokenizer(config(dataset, tmp_path / "plain"))
    result = train_tokenizer(config(dataset, tmp_path / "t", rate_weight=0.6, order="dimension"))
    loaded = FastTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.rate_weight, loaded.order, loaded.scale) == (0.6, "dimension", 10.0)
    for name in ("fitted", "held out"):
        mean = [
            (each.metadata["compression_stats"] if name == "fitted" else each.measured.tokens)["mean_token_length"]
            for each in (plain, result)
        ]
        assert mean[1] < 0.95 * mean[0], name
    uses = [int(line.split("\t")[1]) for line in (tmp_path / "t/vocabulary.txt").read_text().splitlines()[1:]]
    fitted = result.metadata["compression_stats"]["mean_token_length"] * result.metadata["num_training_chunks"]
    assert sum(uses) == round(fitted)
    assert "choice" not in result.metadata


def test_a_target_that_cannot_be_met_fails_and_saves_nothing(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--repo_id=a/b", f"--root={dataset}", f"--output_dir={tmp_path / 't'}", "--vocab_size=256"]
    assert main(["train-tokenizer", *arguments, "--target_error", "0.00001"]) == 1
    assert "no tokenizer of 256 ids meets the target of largest error 1e-05" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
    assert main(["train-tokenizer", *arguments, "--target_error=[0.1, 0.1]"]) == 2
    assert "--target_error has 2 values for 3 encoded dimensions" in capsys.readouterr().err


def test_metadata_stays_with_the_tokenizer(result: TokenizerTrainingResult, tmp_path: Path) -> None:
    """Loaded and saved again; a tokenizer without any removes that of another."""
    assert result.tokenizer.metadata == result.metadata
    loaded = FastTokenizer.from_pretrained(result.output_dir)
    assert loaded.metadata == result.metadata
    loaded.save_pretrained(tmp_path / "t")
    written = (tmp_path / "t/metadata.json").read_bytes()
    assert written == (result.output_dir / "metadata.json").read_bytes()
    loaded.metadata = None
    loaded.save_pretrained(tmp_path / "t")
    assert not (tmp_path / "t/metadata.json").exists()
    (tmp_path / "t/metadata.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"metadata\.json holds no JSON object"):
        FastTokenizer.from_pretrained(tmp_path / "t")


def test_numbers_are_those_of_encoding_every_window_by_hand(dataset: Path, result: TokenizerTrainingResult) -> None:
    """All chunks of the fitted, and of the held-out episodes, encoded again through the public interface."""
    table = pq.read_table(dataset / "data/chunk-000/file-000.parquet")
    episode = table["episode_index"].to_numpy()
    actions = np.array(table["action"].to_pylist(), np.float32)
    held = result.metadata["held_out"]["episodes"]
    assert len(held) == 1
    tokenizer = FastTokenizer.from_pretrained(result.output_dir)
    assert tokenizer.normalizer is not None
    by_set: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for index in np.unique(episode):
        rows = actions[episode == index]
        for start in range(len(rows) - 9):
            by_set[bool(index in held)].append(rows[start : start + 10])
    for is_held, stats in ((False, result.metadata["compression_stats"]), (True, result.measured.tokens)):
        chunks = np.stack(by_set[is_held])
        lengths = [len(ids) for ids in tokenizer.encode(tokenizer.normalizer.apply(chunks))]
        assert stats["mean_token_length"] == pytest.approx(np.mean(lengths), rel=1e-12)
        assert (stats["min_token_length"], stats["max_token_length"]) == (min(lengths), max(lengths))
        assert stats["compression_ratio"] == pytest.approx(30 / np.mean(lengths), rel=1e-12)
    chunks = np.stack(by_set[True])
    normalized = tokenizer.normalizer.apply(chunks)
    restored = tokenizer.normalizer.invert(tokenizer.decode(tokenizer.encode(normalized)))
    error = restored.astype(np.float64) - chunks
    np.testing.assert_allclose(result.measured.rmse, np.sqrt((error**2).mean(axis=(0, 1))), rtol=1e-6)
    np.testing.assert_allclose(result.measured.worst, np.abs(error).max(axis=(0, 1)), rtol=1e-6)
    fitted_frames = actions[~np.isin(episode, [*held, 3])]
    np.testing.assert_allclose(tokenizer.normalizer.low, np.quantile(fitted_frames.astype(float), 0.01, axis=0))
    outside = (chunks < tokenizer.normalizer.low) | (chunks > tokenizer.normalizer.high)
    assert result.measured.clipped_values == pytest.approx(outside.mean())
    assert result.measured.clipped_frames == pytest.approx(outside.any(axis=2).mean())


def test_equal_fits_give_byte_identical_files(dataset: Path, result: TokenizerTrainingResult, tmp_path: Path) -> None:
    train_tokenizer(config(dataset, tmp_path / "again", num_workers=1))
    compared = filecmp.dircmp(result.output_dir, tmp_path / "again")
    assert not compared.left_only
    assert not compared.right_only
    names = [path.relative_to(result.output_dir) for path in result.output_dir.rglob("*") if path.is_file()]
    assert len(names) > 8
    match, mismatch, errors = filecmp.cmpfiles(result.output_dir, tmp_path / "again", names, shallow=False)
    assert (mismatch, errors) == ([], [])
    assert len(match) == len(names)


def test_another_seed_samples_other_chunks(dataset: Path, tmp_path: Path) -> None:
    one = train_tokenizer(config(dataset, tmp_path / "a", sample_fraction=0.3, seed=1, val_fraction=0.0))
    two = train_tokenizer(config(dataset, tmp_path / "b", sample_fraction=0.3, seed=2, val_fraction=0.0))
    assert one.metadata["num_training_chunks"] == two.metadata["num_training_chunks"]
    assert one.tokenizer.vocabulary != two.tokenizer.vocabulary


def test_max_chunks_bounds_the_fit_and_says_what_it_left_out(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train_tokenizer(config(dataset, tmp_path / "t", max_chunks=50, val_fraction=0.0))
    assert result.metadata["num_training_chunks"] == 50
    assert result.measured.chunks == 50
    sampled = sum(length - 9 for length in (60, 45, 80, 70, 50))
    assert f"50 of {sampled} windows of 10 steps to fit ({sampled - 50} more were sampled" in capsys.readouterr().out
    whole = train_tokenizer(config(dataset, tmp_path / "u", max_chunks=sampled, val_fraction=0.0))
    assert whole.metadata["num_training_chunks"] == sampled
    assert "more were sampled" not in capsys.readouterr().out


def test_nothing_held_out_measures_on_the_fitted_episodes(dataset: Path, tmp_path: Path) -> None:
    result = train_tokenizer(config(dataset, tmp_path / "t", val_fraction=0.0))
    assert result.measured_on == "fitted episodes"
    assert result.metadata["held_out"] is None
    assert result.measured.tokens == result.metadata["compression_stats"]
    assert result.metadata["num_training_chunks"] == sum(length - 9 for length in (60, 45, 80, 70, 50))


def test_statistics_of_deltas_are_those_of_the_deltas(dataset: Path, tmp_path: Path) -> None:
    result = train_tokenizer(
        config(dataset, tmp_path / "t", val_fraction=0.0, use_delta_transform=True, delta_dims="0,2", seed=3)
    )
    table = pq.read_table(dataset / "data/chunk-000/file-000.parquet")
    episode = table["episode_index"].to_numpy()
    actions = np.array(table["action"].to_pylist(), np.float32)
    states = np.array(table["observation.state"].to_pylist(), np.float32)
    values: list[np.ndarray] = []
    for index in np.unique(episode):
        rows, held = actions[episode == index], states[episode == index]
        for start in range(len(rows) - 9):
            chunk = rows[start : start + 10].copy()
            chunk[:, [0, 2]] -= held[start, [0, 2]]
            values.append(chunk)
    every = np.concatenate(values).astype(np.float64)
    normalizer = result.tokenizer.normalizer
    assert normalizer is not None
    np.testing.assert_allclose(normalizer.low, np.quantile(every, 0.01, axis=0), atol=1e-6)
    np.testing.assert_allclose(normalizer.high, np.quantile(every, 0.99, axis=0), atol=1e-6)
    assert result.metadata["delta_dims"] == "0,2"
    assert result.metadata["delta_dim_list"] == [0, 2]


def test_state_of_another_size_needs_an_explicit_map(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [40, 40], action_size=3, state_size=5)
    wanted = config(tmp_path / "data", tmp_path / "t", use_delta_transform=True, delta_dims="0,1")
    with pytest.raises(UsageError, match="--delta_state_dims"):
        train_tokenizer(wanted)
    with pytest.raises(UsageError, match=r"2 delta dims .* but 3"):
        train_tokenizer(replace(wanted, delta_state_dims="0,1,2"))
    result = train_tokenizer(replace(wanted, delta_state_dims="3,4"))
    selection = result.tokenizer.normalizer.selection  # type: ignore[union-attr]
    assert selection is not None
    assert selection.delta_state_dims == (3, 4)


def test_short_episodes_are_counted_and_none_left_is_an_error(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(config(dataset, tmp_path / "t"))
    assert "1 of 6 episodes are shorter than --action_horizon 10" in capsys.readouterr().err
    with pytest.raises(DatasetError, match=r"none of the 6 episodes has 100 frames \(the longest has 80\)"):
        train_tokenizer(config(dataset, tmp_path / "u", action_horizon=100))
    assert not (tmp_path / "u").exists()


def test_one_episode_of_exactly_one_chunk(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [10])
    result = train_tokenizer(config(tmp_path / "data", tmp_path / "t"))
    assert result.metadata["num_training_chunks"] == 1
    assert result.measured_on == "fitted episodes"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"encoded_dims": "0:6,7:23"}, UsageError, "outside the data, which has 3 dimensions"),
        ({"action_key": "actions"}, DatasetError, "'action'"),
        ({"action_key": "timestamps"}, DatasetError, "timestamp"),
        ({"scale": [10.0, 20.0]}, UsageError, "2 values for 3 encoded dimensions"),
        ({"vocab_size": 20}, TokenizerError, "vocab_size 20; the widest dimensions are .*joint_"),
        ({"root": "/nowhere"}, DatasetError, "/nowhere"),
    ],
)
def test_settings_that_do_not_fit_the_data(
    dataset: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_tokenizer(config(dataset, tmp_path / "t", **changes))
    assert not (tmp_path / "t").exists()


def test_a_failed_or_refused_command_leaves_the_old_tokenizer(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t"
    arguments = ["train-tokenizer", "--repo_id", "local/walk", "--root", str(dataset), "--output_dir", str(output)]
    assert main([*arguments, "--vocab_size", "256"]) == 0
    (output / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*arguments, "--vocab_size", "256"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--vocab_size", "20", "--overwrite"]) == 1
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert main([*arguments, "--vocab_size", "300", "--overwrite"]) == 0
    assert (output / "notes.txt").read_text() == "mine"
    assert json.loads((output / "metadata.json").read_text())["vocab_size"] != 256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/proc", "mount point"),
        ("file/x", "is no directory"),
        ("dangling", "is a link to"),
        ("n" * 240, "File name too long"),
        (".", "working directory"),
    ],
)
def test_an_impossible_place_is_refused_before_the_work(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pi0_fast.fitting.open_dataset", None)
    with pytest.raises(UsageError, match=f"--output_dir: .*{message}"):
        train_tokenizer(config(dataset, Path(place), overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_an_interrupted_save_counts_as_a_tokenizer(dataset: Path, tmp_path: Path) -> None:
    """A run without --overwrite does not replace what loading would restore."""
    new = train_tokenizer(config(dataset, tmp_path / ".t.pi0-fast-new")).tokenizer
    (tmp_path / ".t.pi0-fast-old").mkdir()
    with pytest.raises(UsageError, match="--overwrite"):
        train_tokenizer(config(dataset, tmp_path / "t"))
    assert FastTokenizer.from_pretrained(tmp_path / "t") == new
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_clipping_is_told_apart_from_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frames that quantiles cut off: a warning that names MIN_MAX, which then cuts nothing off."""
    write_dataset(tmp_path / "data", [60, 60, 60])
    quantiles = train_tokenizer(config(tmp_path / "data", tmp_path / "q", normalization_mode="QUANTILE10"))
    assert "--normalization_mode MIN_MAX" in capsys.readouterr().err
    assert quantiles.measured.clipping_worst.max() > quantiles.measured.quantization_worst.max()
    whole = train_tokenizer(
        config(tmp_path / "data", tmp_path / "m", normalization_mode="MIN_MAX", val_fraction=0.0, scale=[10, 20, 40])
    )
    assert "warning" not in capsys.readouterr().err
    assert whole.measured.clipping_worst.max() < 1e-6
    assert whole.measured.clipped_frames == 0


def test_the_suggested_scale_reaches_the_error(dataset: Path, tmp_path: Path) -> None:
    """A finer scale per dimension, as the table suggests, brings the worst rounding error to about the target."""
    base = config(dataset, tmp_path / "t", normalization_mode="MIN_MAX", val_fraction=0.0, vocab_size=4096)
    first = train_tokenizer(base)
    target = float(first.measured.quantization_worst.min()) / 4
    scales = first.measured.scale_for(first.tokenizer.scale, target)
    second = train_tokenizer(replace(base, scale=scales.tolist(), output_dir=str(tmp_path / "u")))
    assert (second.measured.quantization_worst < 2 * target).all()
    assert (second.measured.quantization_worst > target / 2).all()


def test_a_joint_that_never_moves_and_one_that_hardly_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    feature = Feature("action", "float32", (3,), ("moving", "still", "rare"))
    frames = 1000
    actions = np.zeros((frames, 3), np.float32)
    actions[:, 0] = np.sin(np.arange(frames) / 7) + random.normal(0, 0.01, frames)
    actions[:, 1] = 1.5
    actions[500:505, 2] = 0.8  # half a percent of the frames
    with LeRobotWriter(tmp_path / "data", fps=10, features={"action": feature}) as writer:
        writer.add_episode({"action": actions}, task="mostly still")
    result = train_tokenizer(config(tmp_path / "data", tmp_path / "t"))
    warned = capsys.readouterr().err
    assert "still" in warned
    assert "rare" in warned
    assert result.measured.worst[1] == 0
    assert result.measured.worst[2] < 0.15  # rounding; clipped away it would be 0.8
    assert result.measured.clipping_worst[2] == 0


def test_a_recording_with_nan_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [30, 30])
    path = tmp_path / "data/data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    values = table["action"].combine_chunks().flatten().to_numpy().copy()
    values[3 * 41 + 1] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), 3)
    at = table.schema.get_field_index("action")
    pq.write_table(table.set_column(at, "action", column), path)
    with pytest.raises(DatasetError, match=r"joint_1.*nan"):
        train_tokenizer(config(tmp_path / "data", tmp_path / "t", val_fraction=0.0))


def write_scalars(root: Path, numbers: np.ndarray, dtype: str, shape: list[int]) -> None:
    """Two episodes whose action and state are one number a frame, stored as numbers and not as lists."""
    half = len(numbers) // 2
    write_dataset(root, [half, half], action_size=1, state_size=1)
    info = json.loads((root / "meta/info.json").read_text())
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    for key in ("action", "observation.state"):
        info["features"][key] = {"dtype": dtype, "shape": shape, "names": None}
        table = table.set_column(table.schema.get_field_index(key), key, pa.array(numbers))
    (root / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(table, path)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("shape", [[1], []])
@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "uint16", "bool"])
def test_actions_of_one_number_a_frame(tmp_path: Path, dtype: str, shape: list[int], delta: bool) -> None:
    numbers = (np.arange(80) // 5 % 2).astype(dtype)
    write_scalars(tmp_path / "data", numbers, dtype, shape)
    changes = {"use_delta_transform": delta, "delta_dims": "0" if delta else None}
    result = train_tokenizer(config(tmp_path / "data", tmp_path / "t", val_fraction=0.0, **changes))
    normalizer = result.tokenizer.normalizer
    assert normalizer is not None
    statistics = normalizer.statistics
    assert statistics.max.dtype.kind == "f"
    assert (statistics.min.tolist(), statistics.max.tolist()) == ([-1.0 if delta else 0.0], [1.0])
    path = fit_fast_tokenizer(
        dataset_repo_id="local/it",
        root=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        chunk_size=10,
        vocab_size=256,
        base_tokenizer_name=None,
        normalizer=normalizer,
    )
    assert FastTokenizer.from_pretrained(path).action_dim == 1


def test_an_integer_action_that_float32_cannot_hold_is_named(tmp_path: Path) -> None:
    numbers = np.arange(80)
    numbers[43] = 2**24 + 1
    write_scalars(tmp_path / "data", numbers, "int64", [1])
    with pytest.raises(DatasetError, match=r"'action' of frame 3 of episode 1 .* 16777217, .*float32.*offset"):
        train_tokenizer(config(tmp_path / "data", tmp_path / "t", val_fraction=0.0))


def test_float64_that_float32_turns_into_a_staircase_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the errors, measured against the staircase, would say that nothing is lost."""
    numbers = 1e7 + np.random.default_rng(0).normal(0, 1.5, 80)
    write_scalars(tmp_path / "data", numbers, "float64", [1])
    train_tokenizer(config(tmp_path / "data", tmp_path / "t", val_fraction=0.5))
    told = [record.getMessage() for record in caplog.records if record.name == "pi0_fast.data.rounding"]
    assert len(told) == 1
    assert "column 'action', dimension 0: float64 values between" in told[0]


@pytest.mark.parametrize("shape", [[0], [10**12], [10**30]])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_impossible_shapes_of_an_action(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    write_scalars(tmp_path / "data", np.arange(80), dtype, shape)
    with pytest.raises(DatasetError, match=r"action.*shape"):
        train_tokenizer(config(tmp_path / "data", tmp_path / "t"))
    assert main(["inspect", "--repo_id", "a/b", "--root", str(tmp_path / "data"), "--output_dir", str(tmp_path / "r")])


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "flags", "size", "chunks"),
    [
        ("g1_inspire_v21", ["--action_horizon", "16"], 26, 22042 - 60 * 15),
        ("so101_record_test_v30", [], 6, 1492 - 4 * 9),
        ("so101_record_test_v30", ["--use_delta_transform=true", "--delta_dims", "0,1,2,3,4,5"], 6, 1492 - 4 * 9),
    ],
)
def test_the_command_on_real_recordings(
    shared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    flags: list[str],
    size: int,
    chunks: int,
) -> None:
    arguments = ["train-tokenizer", "--repo_id", "local/real", "--root", str(shared / "data" / name)]
    assert main([*arguments, "--sample_fraction", "1.0", "--output_dir", str(tmp_path / "out"), *flags]) == 0
    printed = capsys.readouterr()
    assert "tokens per chunk, mean" in printed.out
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert metadata["total_encoded_dims"] == size
    assert metadata["num_training_chunks"] + metadata["held_out"]["chunks"] == chunks
    tokenizer = FastTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.action_dim == size
    assert max(metadata["held_out"]["quantization_worst"]) > 0
    assert metadata["compression_stats"]["compression_ratio"] > 7
    # Rounding a coefficient errs by at most half a step, so a value by at most sqrt(H) / (2 scale) of half the range.
    normalizer = tokenizer.normalizer
    assert normalizer is not None
    horizon = metadata["action_horizon"]
    bound = np.sqrt(horizon) / 20 * (normalizer.high - normalizer.low) / 2
    assert (np.array(metadata["held_out"]["quantization_worst"]) < bound + 1e-5).all()
