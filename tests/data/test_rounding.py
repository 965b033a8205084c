"""float64 columns that float32 turns into staircases are told of; what loses nothing is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_builder import build_v2, build_v3
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast.data import open_dataset
from pi0_fast.data.rounding import Rounding


def read(root: Path, *keys: str) -> list[np.ndarray]:
    return [e.columns["action"] for e in open_dataset("local/it", root=root).iter_episodes(keys or ["action"])]


def episodes(*columns: tuple[float, float], count: int = 3, length: int = 50) -> list[np.ndarray]:
    """float64 [T, D]: each column is (offset, spread) of normal noise."""
    random = np.random.default_rng(0)
    return [
        np.stack([offset + random.normal(0, spread, length) for offset, spread in columns], axis=1)
        for _ in range(count)
    ]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("column", [(1e7, 1.5), (1.7e9, 1.0), (-1e7, 1.5)])
def test_a_staircase_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, column: tuple[float, float]
) -> None:
    values = episodes((0.0, 1.0), column)
    build_v3(tmp_path, values) if version == "v3.0" else build_v2(tmp_path, values)
    dataset = open_dataset("local/it", root=tmp_path)
    for _ in range(2):
        list(dataset.iter_episodes(["action"]))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    whole = np.concatenate(values)[:, 1]
    worst = np.abs(whole - whole.astype(np.float32))
    share = 100 * worst.max() / np.ptp(whole)
    for part in ("'action', dimension 1:", "float32", "Subtract an offset", f"up to {worst.max():.3g}"):
        assert part in message
    assert f"({share:.2g} % of their range, in episode {worst.argmax() // 50})" in message


def test_names_and_several_dimensions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_v3(tmp_path, episodes((1e7, 1.5), (0.0, 1.0), (1.7e9, 1.0)))
    path = tmp_path / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["action"]["names"] = ["x", "y", "clock"]
    path.write_text(json.dumps(info))
    read(tmp_path)
    (record,) = caplog.records
    assert "dimension 2 (clock) (and 1 more dimensions)" in record.getMessage()


def test_a_reading_that_is_broken_off_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_v3(tmp_path, episodes((1e7, 1.5)))
    iterator = open_dataset("local/it", root=tmp_path).iter_episodes(["action"])
    next(iterator)
    assert not caplog.records
    iterator.close()  # type: ignore[attr-defined]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "column",
    [(0.0, 1.0), (100.0, 1.0), (1e-3, 1e-4), (1.2345678, 0.0), (1.2345678, 1e-15), (0.04, 1e-11), (1e-30, 1e-40)],
)
def test_ordinary_float64_is_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: tuple[float, float]
) -> None:
    values = episodes(column)
    build_v2(tmp_path, values)
    np.testing.assert_array_equal(np.concatenate(read(tmp_path)), np.concatenate(values).astype(np.float32))
    assert not caplog.records


def test_the_range_is_that_of_all_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A joint that rests in one episode, and moves in another."""
    resting, moving = episodes((1.0, 1e-7), count=1)[0], episodes((1.0, 0.5), count=1)[0]
    dataset = open_dataset("local/it", root=build_v2(tmp_path, [resting, moving]))
    list(dataset.iter_episodes(["action"]))
    list(dataset.iter_episodes(["action"], [0]))
    assert not caplog.records


def test_float32_stored_as_doubles_and_values_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [v.astype(np.float32).astype(np.float64) for v in episodes((1e7, 1.5))]
    values[1][3] = np.nan
    values[2][3] = 1e300
    build_v2(tmp_path, values)
    found = read(tmp_path)
    assert np.isnan(found[1][3, 0])
    assert np.isinf(found[2][3, 0])
    assert not caplog.records


@given(
    pieces=st.lists(
        st.lists(st.floats(-1e12, 1e12) | st.sampled_from([np.nan, np.inf, 1e300]), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_against_the_slow_twin(pieces: list[list[float]]) -> None:
    rounding = Rounding("k", None)
    lost, low, high = 0.0, np.inf, -np.inf
    for episode, piece in enumerate(pieces):
        values = np.array(piece)[:, None]
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float32)
        rounding.add(values, rounded, episode)
        for value in piece:
            with np.errstate(over="ignore"):
                short = float(np.float32(value))
            if np.isfinite(value) and np.isfinite(short):
                lost = max(lost, abs(value - short))
            if not np.isnan(value):
                low, high = min(low, value), max(high, value)
    assert (rounding._largest[0], rounding._low[0], rounding._high[0]) == (lost, low, high)
    rounding.tell()


def test_matrices_and_scalars_of_float64(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = episodes((1e7, 1.5))
    build_v2(tmp_path, values)
    for number, episode in enumerate(values):
        path = tmp_path / f"data/chunk-000/episode_{number:06d}.parquet"
        table = pq.read_table(path)
        place = table.schema.get_field_index("action")
        pq.write_table(table.set_column(place, "action", pa.array(episode[:, 0])), path)
    np.testing.assert_array_equal(read(tmp_path)[0], values[0].astype(np.float32))
    assert len(caplog.records) == 1
