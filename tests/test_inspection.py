"""`pi0-fast inspect` and `train-tokenizer --report`, on real recordings and on damaged settings."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi0_fast import FastTokenizer, TokenizerTrainingConfig, train_tokenizer
from pi0_fast.cli import main
from pi0_fast.configs import InspectConfig
from pi0_fast.data import LeRobotWriter
from pi0_fast.inspection import inspect, write_report
from pi0_fast.reports import pictures
from pi0_fast.reports.pictures import Picture
from pi0_fast.types import DatasetError, Feature, TokenizerError, UsageError

PNGS = {"token_lengths", "errors", "worst_chunk_1", "worst_chunk_2", "worst_chunk_3", "rate_distortion"}
PNGS |= {"rate_distortion_plane", "vocabulary_use"}
DATASET_PNGS = {"episode_lengths", "ranges", "distributions", "modes"}
NAMES = ("<b>lift</b>", "pan$", "grip & hold")


def write_dataset(
    root: Path,
    lengths: list[int],
    *,
    names: tuple[str, ...] = NAMES,
    seed: int = 0,
    change: Callable[[int, np.ndarray], None] | None = None,
) -> None:
    """Random walks; the state follows the action."""
    random = np.random.default_rng(seed)
    feature = Feature("", "float32", (len(names),), names)
    with LeRobotWriter(root, fps=10, features={"action": feature, "observation.state": feature}) as writer:
        for index, length in enumerate(lengths):
            path = np.cumsum(random.normal(0, 0.05, (length, len(names))), axis=0)
            if change is not None:
                change(index, path)
            columns = {"action": path, "observation.state": path - 0.01}
            writer.add_episode({k: v.astype(np.float32) for k, v in columns.items()}, task="wander")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "walk"
    write_dataset(root, [60, 45, 80, 5, 70, 50])
    return root


@pytest.fixture(scope="module")
def tokenizer(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("fit") / "tokenizer"
    train_tokenizer(training(dataset, output))
    return output


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are blank, for tests of everything else: drawing takes a second each."""
    monkeypatch.setattr(pictures, "draw_picture", lambda name, words, *_: Picture(name, words, b"<svg/>", b"\x89PNG"))


def training(dataset: Path, output: Path, **changes: Any) -> TokenizerTrainingConfig:
    base = TokenizerTrainingConfig(
        "local/walk", root=str(dataset), output_dir=str(output), sample_fraction=1.0, vocab_size=256
    )
    return replace(base, **changes)


def report_of(directory: Path) -> dict[str, Any]:
    """report.json, once the directory was seen to be whole."""
    content: dict[str, Any] = json.loads((directory / "report.json").read_text())
    assert content["format"] == "pi0-fast-report"
    page = (directory / "report.html").read_text()
    pngs = {path.stem for path in directory.glob("*.png")}
    assert {path.name for path in directory.iterdir()} == {"report.json", "report.html", *(f"{n}.png" for n in pngs)}
    assert page.count("data:image/svg+xml;base64,") == len(pngs)
    for outside in ("http:", "https:", "<script", "url(", "@import"):
        assert outside not in page
    content["pngs"] = pngs
    return content


def raw_actions(dataset: Path) -> tuple[np.ndarray, np.ndarray]:
    table = pq.read_table(dataset / "data/chunk-000/file-000.parquet")
    return np.array(table["action"].to_pylist(), np.float32), table["episode_index"].to_numpy()


# --- a tokenizer and a dataset ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inspected(dataset: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "report"
    inspect(InspectConfig("local/walk", root=str(dataset), tokenizer=str(tokenizer), output_dir=str(output)))
    return output


def test_numbers_are_those_of_the_fits_held_out_episodes(tokenizer: Path, inspected: Path) -> None:
    found = report_of(inspected)
    assert found["pngs"] == PNGS
    metadata = json.loads((tokenizer / "metadata.json").read_text())
    measured = found["measured"]
    for key in ("chunks", "tokens", "rmse", "worst", "clipped_values", "clipped_frames", "saturations"):
        assert measured[key] == metadata["held_out"][key], key
    counts = found["token_lengths"]["counts"]
    assert sum(counts) == measured["chunks"]
    assert found["token_lengths"]["first"] == measured["tokens"]["min_token_length"]
    assert len(counts) - 1 + found["token_lengths"]["first"] == measured["tokens"]["max_token_length"]
    total = sum(n * count for n, count in enumerate(counts, found["token_lengths"]["first"]))
    assert sum(found["vocabulary"]["uses"]) == total
    assert found["vocabulary"]["used"] == np.count_nonzero(found["vocabulary"]["uses"])
    points = found["rate_distortion"]["points"]
    assert [point["scale"] for point in points] == [2.5, 5.0, 10.0, 15.0, 20.0, 40.0]
    # At the tokenizer's own scale the refit is the tokenizer: it is fitted on the same episodes.
    assert points[2]["measured"]["tokens"] == measured["tokens"]
    assert points[2]["vocab_size"] == metadata["vocab_size"]
    lengths = [point["measured"]["tokens"]["mean_token_length"] for point in points]
    assert lengths == sorted(lengths)
    plane = found["rate_distortion"]["plane"]
    kinds = list(dict.fromkeys(point["kind"] for point in plane))
    assert kinds == [
        "reference",
        "frequency first, plain",
        "frequency first, rate weight 0.6",
        "dimension first, plain",
        "dimension first, rate weight 0.6",
    ]
    by_kind = {kind: [point for point in plane if point["kind"] == kind] for kind in kinds}
    # The same fit as the tokenizer's, on the same chunks.
    own = by_kind["frequency first, plain"][1]
    assert own["scale"] == 10.0
    assert own["tokens"] == pytest.approx(measured["tokens"]["mean_token_length"])
    assert own["rmse"] == pytest.approx(measured["normalized_rounding_rmse"], rel=1e-4)
    for points in by_kind.values():
        assert [point["scale"] for point in points] == [7.0, 10.0, 14.0]
        assert 0 < points[1]["noisy"] < points[1]["moved"] < 1
    assert by_kind["frequency first, rate weight 0.6"][1]["tokens"] < own["tokens"]


def test_worst_chunks_are_the_worst_of_all_windows(dataset: Path, tokenizer: Path, inspected: Path) -> None:
    found = report_of(inspected)
    loaded = FastTokenizer.from_pretrained(tokenizer)
    assert loaded.normalizer is not None
    (held,) = json.loads((tokenizer / "metadata.json").read_text())["held_out"]["episodes"]
    actions, episode = raw_actions(dataset)
    rows = actions[episode == held]
    chunks = np.stack([rows[start : start + 10] for start in range(len(rows) - 9)])
    ids = loaded.encode(loaded.normalizer.apply(chunks))
    restored = loaded.normalizer.invert(loaded.decode(ids))
    relative = (restored.astype(float) - chunks) * 2 / (loaded.normalizer.high - loaded.normalizer.low)
    errors = np.sqrt((relative**2).mean(axis=(1, 2)))
    worst = found["worst_chunks"][0]
    assert worst["start"] == errors.argmax()
    assert (worst["episode"], worst["tokens"]) == (held, len(ids[worst["start"]]))
    assert worst["error"] == pytest.approx(errors.max(), rel=1e-6)
    for chunk in found["worst_chunks"]:
        np.testing.assert_array_equal(np.array(chunk["original"], np.float32), chunks[chunk["start"]])
        np.testing.assert_array_equal(np.array(chunk["decoded"], np.float32), restored[chunk["start"]])
    starts = sorted(chunk["start"] for chunk in found["worst_chunks"])
    assert min(np.diff(starts)) >= 10


def test_names_are_escaped(inspected: Path) -> None:
    page = (inspected / "report.html").read_text()
    assert "<b>lift" not in page
    assert "0 &lt;b&gt;lift&lt;/b&gt;" in page


def test_the_same_inspection_gives_the_same_files(dataset: Path, tokenizer: Path, inspected: Path) -> None:
    again = inspected.parent / "again"
    config = InspectConfig("local/walk", root=str(dataset), tokenizer=str(tokenizer), output_dir=str(again))
    inspect(replace(config, num_workers=1))
    names = [path.name for path in inspected.iterdir()]
    assert filecmp.cmpfiles(inspected, again, names, shallow=False)[1:] == ([], [])


@pytest.mark.usefixtures("undrawn")
def test_max_chunks_spreads_over_the_episodes_and_scales_are_those_given(
    dataset: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            *("inspect", "--repo_id", "local/walk", "--root", str(dataset), "--tokenizer", str(tokenizer)),
            *("--output_dir", str(tmp_path / "r"), "--max_chunks", "12", "--scales", "[3, 1000]"),
        ]
    )
    assert status == 0
    found = report_of(tmp_path / "r")
    assert found["measured"]["chunks"] == 12
    fine, hopeless = found["rate_distortion"]["points"]
    assert fine["measured"]["chunks"] == 12
    assert hopeless["measured"] is None
    assert "more than vocab_size" in hopeless["problem"]
    out = capsys.readouterr().out
    assert "12 of " in out
    assert "none" in out
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Scale 1000:" in page


@pytest.mark.usefixtures("undrawn")
def test_of_more_episodes_than_chunks_some_are_chosen(dataset: Path, tokenizer: Path, tmp_path: Path) -> None:
    config = InspectConfig("local/walk", root=str(dataset), tokenizer=str(tokenizer), output_dir=str(tmp_path / "r"))
    inspect(replace(config, max_chunks=2, scales=[10.0]))
    assert report_of(tmp_path / "r")["rate_distortion"]["fitted_chunks"] == 2


@pytest.mark.usefixtures("undrawn")
def test_another_dataset_has_no_known_held_out_episodes(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "other", [40, 50, 60, 40, 40, 40], names=("a", "b", "c"), seed=5)
    config = InspectConfig("local/other", root=str(tmp_path / "other"), tokenizer=str(tokenizer))
    inspect(replace(config, output_dir=str(tmp_path / "one"), max_episodes=1))
    out, err = capsys.readouterr()
    assert "may have been fitted on" in out
    assert "<b>lift</b> / a" in err
    found = report_of(tmp_path / "one")
    assert (found["measured_on"], found["measured"]["chunks"]) == ("all episodes", 31)
    inspect(replace(config, output_dir=str(tmp_path / "all"), val_fraction=0.5, seed=1))
    assert report_of(tmp_path / "all")["measured_on"] == "chosen episodes"


@pytest.mark.usefixtures("undrawn")
def test_held_out_episodes_that_are_not_there_are_a_warning(
    dataset: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = json.loads((tokenizer / "metadata.json").read_text())
    metadata["held_out"]["episodes"] = [77]
    changed = FastTokenizer.from_pretrained(tokenizer)
    changed.save_pretrained(tmp_path / "t", metadata=metadata)
    inspect(
        InspectConfig("local/walk", root=str(dataset), tokenizer=str(tmp_path / "t"), output_dir=str(tmp_path / "r"))
    )
    assert "episodes [77]" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "held_out",
    [{"episodes": bad} for bad in (["x"], None, 5, [float("nan")], [1.5], [True], [-1], [[1]], {"1": 2})]
    + [{}, [1.5], "none", 7],
)
def test_held_out_episodes_that_are_no_indices_are_not_used(
    dataset: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], held_out: Any
) -> None:
    shutil.copytree(tokenizer, tmp_path / "t")
    path = tmp_path / "t/metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "held_out": held_out}))
    config = InspectConfig("local/walk", root=str(dataset), tokenizer=str(tmp_path / "t"))
    inspect(replace(config, output_dir=str(tmp_path / "r"), scales=[10.0], max_chunks=20))
    out, err = capsys.readouterr()
    assert "held_out of the tokenizer's metadata.json lists no episode indices" in err
    assert "not known" in out
    assert report_of(tmp_path / "r")["measured_on"] != "held-out episodes"


@pytest.mark.usefixtures("undrawn")
def test_deltas_are_taken_from_the_tokenizer(dataset: Path, tmp_path: Path) -> None:
    train_tokenizer(training(dataset, tmp_path / "t", use_delta_transform=True, delta_dims="0,2", encoded_dims="0,2"))
    config = InspectConfig("local/walk", root=str(dataset), tokenizer=str(tmp_path / "t"))
    inspect(replace(config, output_dir=str(tmp_path / "r")))
    found = report_of(tmp_path / "r")
    metadata = json.loads((tmp_path / "t" / "metadata.json").read_text())
    assert found["measured"]["rmse"] == metadata["held_out"]["rmse"]
    assert found["dimensions"] == ["0 <b>lift</b> (rel.)", "2 grip & hold (rel.)"]


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_an_encoder_is_about_that_encoder(dataset: Path, tmp_path: Path) -> None:
    """Order, rate weight and bound are the tokenizer's, in what is measured and in the refits at other scales."""
    train_tokenizer(training(dataset, tmp_path / "t", rate_weight=0.4, order="dimension"))
    inspect(
        InspectConfig("local/walk", root=str(dataset), tokenizer=str(tmp_path / "t"), output_dir=str(tmp_path / "r"))
    )
    found = report_of(tmp_path / "r")
    assert (found["tokenizer"]["order"], found["tokenizer"]["rate_weight"]) == ("dimension", 0.4)
    held = json.loads((tmp_path / "t/metadata.json").read_text())["held_out"]
    assert found["measured"]["tokens"] == held["tokens"]
    points = found["rate_distortion"]["points"]
    assert points[2]["measured"]["tokens"] == held["tokens"]
    assert "dimension first, rate weight 0.4" in {point["kind"] for point in found["rate_distortion"]["plane"]}
    page = (tmp_path / "r/report.html").read_text()
    assert "rate weight 0.4" in page
    assert "change in a frame" in page


def test_a_published_tokenizer_needs_to_be_told_the_normalisation(shared: Path, dataset: Path, tmp_path: Path) -> None:
    config = InspectConfig(
        "local/walk", root=str(dataset), tokenizer=str(shared / "assets/fast_plus"), output_dir=str(tmp_path / "r")
    )
    with pytest.raises(UsageError, match=r"--normalization_mode.*QUANTILES"):
        inspect(config)
    assert not (tmp_path / "r").exists()
    inspect(replace(config, normalization_mode="MIN_MAX", action_horizon=16, encoded_dims="1:3", scales=[10.0]))
    found = report_of(tmp_path / "r")
    assert found["normalizer"]["mode"] == "MIN_MAX"
    assert found["dimensions"] == ["1 pan$", "2 grip & hold"]
    assert (found["tokenizer"]["time_horizon"], found["tokenizer"]["action_dim"]) == (16, 2)
    assert found["vocabulary"]["unit"] == "bytes"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"action_horizon": 5}, UsageError, ["--action_horizon 5", "10 steps"]),
        ({"normalization_mode": "MIN_MAX"}, UsageError, ["MIN_MAX", "QUANTILES"]),
        ({"encoded_dims": "0:2"}, UsageError, ["--encoded_dims", "no effect"]),
        ({"use_delta_transform": True, "delta_dims": "0"}, UsageError, ["--use_delta_transform", "no effect"]),
        ({"state_key": "observation.state"}, UsageError, ["--state_key", "no effect"]),
        ({"tokenizer_revision": "main"}, UsageError, ["--tokenizer_revision", "local directory"]),
        ({"action_key": "actions"}, DatasetError, ["'actions'", "did you mean 'action'"]),
        ({"tokenizer": "no/where/at/all"}, TokenizerError, ["no/where/at/all"]),
    ],
)
def test_contradictions_are_refused(
    dataset: Path, tokenizer: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    config = InspectConfig(
        "local/walk", root=str(dataset), tokenizer=str(tokenizer), output_dir=str(tmp_path / "report")
    )
    with pytest.raises(error) as caught:
        inspect(replace(config, **changes))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "report").exists()


def test_a_tokenizer_of_another_robot_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "two", [40, 40], names=("a", "b"))
    with pytest.raises(TokenizerError, match=r"3 dimensions.*has 2"):
        inspect(InspectConfig("a/b", root=str(tmp_path / "two"), tokenizer=str(tokenizer)))


def test_states_of_another_size_are_refused(dataset: Path, tmp_path: Path) -> None:
    train_tokenizer(training(dataset, tmp_path / "t", use_delta_transform=True, delta_dims="0"))
    features = {"action": Feature("", "float32", (3,), NAMES), "observation.state": Feature("", "float32", (5,))}
    with LeRobotWriter(tmp_path / "data", fps=10, features=features) as writer:
        columns = {"action": np.zeros((40, 3), np.float32), "observation.state": np.zeros((40, 5), np.float32)}
        writer.add_episode(columns, task="rest")
    with pytest.raises(TokenizerError, match=r"states of 3 dimensions.*has 5"):
        inspect(InspectConfig("a/b", root=str(tmp_path / "data"), tokenizer=str(tmp_path / "t")))


def test_episodes_shorter_than_the_tokenizers_chunks(tokenizer: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "short", [4, 7])
    with pytest.raises(DatasetError, match=r"longest has 7.*bound to"):
        inspect(InspectConfig("a/b", root=str(tmp_path / "short"), tokenizer=str(tokenizer)))
    with pytest.raises(DatasetError, match=r"longest has 7\): take --action_horizon 7 or less"):
        inspect(InspectConfig("a/b", root=str(tmp_path / "short")))


# --- a dataset alone --------------------------------------------------------------------------------------------------


def test_a_dataset_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(index: int, path: np.ndarray) -> None:
        path[:, 1] = 0.5
        if index == 2:
            path[7, 2] = 300.0

    write_dataset(tmp_path / "data", [40, 30, 50, 6], change=change)
    command = ["inspect", "--repo_id", "local/walk", "--root", str(tmp_path / "data"), "--output_dir"]
    assert main([*command, str(tmp_path / "r")]) == 0
    out, err = capsys.readouterr()
    assert "1 of 4 episodes are shorter than --action_horizon 10" in err
    assert "never moves" in out
    found = report_of(tmp_path / "r")
    assert found["pngs"] == DATASET_PNGS
    actions, episode = raw_actions(tmp_path / "data")
    used = actions[episode != 3].astype(float)
    np.testing.assert_array_equal(found["statistics"]["q01"], np.quantile(used, 0.01, axis=0))
    assert found["statistics"]["count"] == [120]
    assert found["episode_lengths"]["frames"] == [40, 30, 50, 6]
    assert sum(found["episode_lengths"]["counts"]) == 4
    assert found["never_moves"] == [1]
    assert found["outliers"]["values"] == [0, 0, 1]
    assert found["outliers"]["furthest"] == [{"dim": 2, "value": 300.0, "episode": 2, "frame": 7}]
    quantiles = found["modes"]["QUANTILES"]
    low, high = np.array(quantiles["low"]), np.array(quantiles["high"])
    outside = (used < low) | (used > high)
    assert quantiles["outside_frames"] == pytest.approx(outside.any(axis=1).mean())
    assert found["modes"]["MIN_MAX"]["outside_values"] == 0.0
    assert 1 in quantiles["guarded"]


@pytest.mark.usefixtures("undrawn")
def test_a_dataset_of_deltas_is_surveyed_over_its_windows(dataset: Path, tmp_path: Path) -> None:
    config = InspectConfig("local/walk", root=str(dataset), output_dir=str(tmp_path / "r"), action_horizon=4)
    inspect(replace(config, use_delta_transform=True, delta_dims="0", encoded_dims="0:1"))
    actions, episode = raw_actions(dataset)
    deltas = []
    for index in np.unique(episode):
        rows = actions[episode == index, 0]
        deltas += [rows[start : start + 4] - (rows[start] - np.float32(0.01)) for start in range(len(rows) - 3)]
    found = report_of(tmp_path / "r")
    assert found["statistics"]["count"] == [np.size(deltas)]
    np.testing.assert_allclose(found["statistics"]["q99"], [np.quantile(deltas, 0.99)], atol=1e-6)


@pytest.mark.usefixtures("undrawn")
def test_values_that_are_not_finite_are_placed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [40, 30])
    path = tmp_path / "data/data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    for key in ("action", "observation.state"):
        values = table[key].to_pylist()
        values[40 + 13][2] = float("nan")
        column = pa.array(values, table.schema.field(key).type)
        table = table.set_column(table.schema.get_field_index(key), key, column)
    pq.write_table(table, path)
    with pytest.raises(DatasetError, match=r"episode 1, frame 13: dimension 2 \(grip & hold\) of 'action' is nan"):
        inspect(InspectConfig("a/b", root=str(tmp_path / "data"), output_dir=str(tmp_path / "r")))
    inspect(InspectConfig("a/b", root=str(tmp_path / "data"), output_dir=str(tmp_path / "r"), encoded_dims="0:2"))
    relative = InspectConfig("a/b", root=str(tmp_path / "data"), encoded_dims="0:2", use_delta_transform=True)
    with pytest.raises(DatasetError, match=r"episode 1, frame 13: dimension 2 .* of 'observation\.state' is nan"):
        inspect(replace(relative, delta_dims="0", delta_state_dims="2", output_dir=str(tmp_path / "s")))
    assert not list(tmp_path.glob(".*"))


# --- where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_only_a_report_is_replaced(dataset: Path, tmp_path: Path) -> None:
    config = InspectConfig("local/walk", root=str(dataset), output_dir=str(tmp_path / "r"))
    inspect(config)
    first = (tmp_path / "r" / "report.json").read_text()
    with pytest.raises(UsageError, match="--overwrite"):
        inspect(replace(config, encoded_dims="0:1"))
    assert (tmp_path / "r" / "report.json").read_text() == first
    inspect(replace(config, encoded_dims="0:1", overwrite=True))
    assert (tmp_path / "r" / "report.json").read_text() != first
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        inspect(replace(config, overwrite=True))
    with pytest.raises(UsageError, match=r"notes\.txt"):  # also where it came after the work had begun
        write_report(inspect(replace(config, output_dir=str(tmp_path / "other"))).report, tmp_path / "r")
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="no directory"):
        inspect(replace(config, output_dir=str(tmp_path / "file")))


@pytest.mark.usefixtures("undrawn")
def test_a_failure_while_writing_leaves_the_earlier_report(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = InspectConfig("local/walk", root=str(dataset), output_dir=str(tmp_path / "r"))
    inspect(config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pi0_fast.reports.save.install_directory", fail)
    with pytest.raises(OSError, match="disk full"):
        inspect(replace(config, overwrite=True, encoded_dims="0:1"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_without_matplotlib_nothing_is_begun(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", {"matplotlib": None}.get)
    common = ["--repo_id", "local/walk", "--root", str(dataset), "--output_dir", str(tmp_path / "out")]
    for command in (["inspect", *common], ["train-tokenizer", *common, "--report"]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert "pip install 'pi0-fast[report]'" in err
        assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


# --- train-tokenizer --report -----------------------------------------------------------------------------------------


def test_train_tokenizer_writes_the_same_report(
    dataset: Path, tokenizer: Path, inspected: Path, tmp_path: Path
) -> None:
    train_tokenizer(training(dataset, tmp_path / "t", report=True))
    found, direct = report_of(tmp_path / "t" / "report"), report_of(inspected)
    assert found["tokenizer"] == direct["tokenizer"]
    for part in ("measured", "token_lengths", "worst_chunks", "rate_distortion", "vocabulary", "dimensions", "pngs"):
        assert found[part] == direct[part], part
    assert str(tmp_path) not in (tmp_path / "t" / "report" / "report.html").read_text()
    others = [path.name for path in tokenizer.iterdir() if path.is_file()]
    assert filecmp.cmpfiles(tokenizer, tmp_path / "t", others, shallow=False)[1:] == ([], [])
    assert FastTokenizer.from_pretrained(tmp_path / "t") == FastTokenizer.from_pretrained(tokenizer)


@pytest.mark.usefixtures("undrawn")
def test_a_report_does_not_outlive_its_tokenizer(dataset: Path, tmp_path: Path) -> None:
    train_tokenizer(training(dataset, tmp_path / "t", report=True))
    (tmp_path / "t" / "notes.txt").write_text("mine")
    train_tokenizer(training(dataset, tmp_path / "t", scale=5.0, overwrite=True))
    assert not (tmp_path / "t" / "report").exists()
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("undrawn")
def test_a_folder_called_report_that_is_none_is_kept(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "t" / "report").mkdir(parents=True)
    (tmp_path / "t" / "report" / "thesis.tex").write_text("mine")
    train_tokenizer(training(dataset, tmp_path / "t", overwrite=True))
    assert (tmp_path / "t" / "report" / "thesis.tex").read_text() == "mine"
    before = (tmp_path / "t" / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        train_tokenizer(training(dataset, tmp_path / "t", overwrite=True, report=True, scale=5.0))
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == before


# --- real recordings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "size"),
    [
        ("g1_inspire_v21", [], 26),
        ("so101_record_test_v30", [], 6),
        ("so101_record_test_v30", ["--use_delta_transform=true", "--delta_dims", "0,1,2,3,4,5"], 6),
    ],
)
def test_the_commands_on_real_recordings(
    shared: Path, tmp_path: Path, name: str, flags: list[str], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--repo_id", "local/data", "--root", str(shared / "data" / name)]
    output = ["--output_dir", str(tmp_path / "t")]
    assert main(["train-tokenizer", *data, *flags, *output]) == 0
    report = ["--tokenizer", str(tmp_path / "t"), "--output_dir", str(tmp_path / "r"), "--max_chunks", "300"]
    assert main(["inspect", *data, *report, "--scales", "[5, 10]"]) == 0
    found = report_of(tmp_path / "r")
    assert (len(found["dimensions"]), found["measured_on"]) == (size, "held-out episodes")
    assert found["measured"]["chunks"] <= 300
    assert main(["inspect", *data, *flags, "--output_dir", str(tmp_path / "d")]) == 0
    assert len(report_of(tmp_path / "d")["statistics"]["q01"]) == size
    assert "What each normalisation mode would do" in capsys.readouterr().out
