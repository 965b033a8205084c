"""The files of a saved tokenizer, and the processor file in them, without transformers.

The processor file is run here on a stand-in for its base class and for the tokenizer that transformers hands to it, so
that its arithmetic is compared with FastTokenizer's on many chunks; tests/interop runs it in transformers itself.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pi0_fast.actions import layout
from pi0_fast.actions.tokenizer import FastTokenizer

SOURCE = layout.PROCESSING_SOURCE
TREE = ast.parse(SOURCE.read_text())


class StandInTokenizer:
    """What the processor uses of a transformers tokenizer, on `tokenizers`."""

    def __init__(self, path: Path) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, texts: list[str], add_special_tokens: bool, return_attention_mask: bool) -> dict[str, Any]:
        assert not add_special_tokens
        assert not return_attention_mask
        return {"input_ids": [self.backend_tokenizer.encode(text).ids for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class StandInMixin:
    def __init__(self, bpe_tokenizer: Any) -> None:
        self.bpe_tokenizer = bpe_tokenizer


@pytest.fixture(scope="module")
def processing() -> ModuleType:
    """The processor file as a module."""
    utilities = ModuleType("transformers.processing_utils")
    utilities.ProcessorMixin = StandInMixin  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        patch.setitem(sys.modules, "transformers.processing_utils", utilities)
        specification = importlib.util.spec_from_file_location("processing_under_test", SOURCE)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return module


def load(processing: ModuleType, directory: Path) -> Any:
    saved = json.loads((directory / layout.PROCESSOR_CONFIG).read_text())
    arguments = {key: value for key, value in saved.items() if key not in ("auto_map", "processor_class")}
    return getattr(processing, saved["processor_class"])(StandInTokenizer(directory / layout.TOKENIZER), **arguments)


@pytest.fixture(scope="module", params=["plain", "per_dimension", "reference", "dimension_first"])
def pair(
    request: pytest.FixtureRequest, processing: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FastTokenizer, Any]:
    """One tokenizer of [6, 4] chunks, in this package and as the processor loaded from what was saved."""
    walks = np.cumsum(np.random.default_rng(0).normal(0, 0.2, (400, 6, 4)), axis=1)
    scale: Any = [4.0, 8.0, 12.0, 20.0] if request.param == "per_dimension" else 10
    symbol_format: Any = "reference" if request.param == "reference" else "plain"
    order: Any = "dimension" if request.param == "dimension_first" else "frequency"
    tokenizer = FastTokenizer.fit(walks, scale=scale, vocab_size=300, symbol_format=symbol_format, order=order)
    directory = tmp_path_factory.mktemp("saved") / "tokenizer"
    tokenizer.save_pretrained(directory)
    return tokenizer, load(processing, directory)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(seed=st.integers(0, 2**32), amplitude=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 20.0]), count=st.integers(1, 5))
def test_the_processor_encodes_and_decodes_as_the_package(
    pair: tuple[FastTokenizer, Any], seed: int, amplitude: float, count: int
) -> None:
    tokenizer, processor = pair
    chunks = np.random.default_rng(seed).normal(0, amplitude, (count, 6, 4)).astype(np.float32)
    ids = tokenizer.encode(chunks)
    assert processor(chunks) == ids
    expected = tokenizer.decode(ids)
    np.testing.assert_allclose(processor.decode(ids), expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_array_equal(processor.decode(ids[0]), processor.decode(ids)[0])


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_the_processor_refuses_the_ids_that_the_package_refuses(pair: tuple[FastTokenizer, Any], data: Any) -> None:
    """Rows of arbitrary ids nearly never hold 24 coefficients; cut and altered rows sometimes do."""
    tokenizer, processor = pair
    row = tokenizer.encode(np.random.default_rng(data.draw(st.integers(0, 99))).normal(0, 0.4, (1, 6, 4)))[0]
    position = data.draw(st.integers(0, len(row) - 1))
    row[position : position + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.integers(-1, 305), max_size=2))
    _, info = tokenizer.decode([row], on_error="pad", return_info=True)
    if info.valid[0]:
        np.testing.assert_allclose(processor.decode([row]), tokenizer.decode([row]), rtol=1e-6, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="row 0"):
            processor.decode([row])


@pytest.mark.parametrize("horizon", [1, 2, 7, 16])
def test_coefficients_half_way_between_integers_get_the_same_ids(
    processing: ModuleType, tmp_path: Path, horizon: int
) -> None:
    """Actions on a grid, and robots that stand still: here any other rounding of the transform gives other ids."""
    grid = np.random.default_rng(3).integers(-80, 81, (600, horizon, 5)) * 0.0125
    still = np.repeat(grid[:, :1], horizon, axis=1)
    chunks = np.concatenate([grid, still]).astype(np.float32)
    tokenizer = FastTokenizer.fit(chunks, vocab_size=512)
    tokenizer.save_pretrained(tmp_path / "it")
    assert load(processing, tmp_path / "it")(chunks) == tokenizer.encode(chunks)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 790.0])
def test_what_is_no_normalised_action_is_refused_by_both(pair: tuple[FastTokenizer, Any], value: float) -> None:
    chunks = np.zeros((3, 6, 4))
    chunks[2, 1, 3] = value
    for encode in (pair[0].encode, pair[1]):
        with pytest.raises(ValueError, match="row 2, step 1, dimension 3 is"):
            encode(chunks)


def test_whoever_decodes_frequency_by_frequency_is_refused(processing: ModuleType, tmp_path: Path) -> None:
    """LeRobot's policy turns errors in the characters and in min_token into zeros, but not one in reading the scale."""
    walks = np.cumsum(np.random.default_rng(0).normal(0, 0.2, (100, 6, 4)), axis=1)
    FastTokenizer.fit(walks, vocab_size=200, order="dimension").save_pretrained(tmp_path / "it")
    processor = load(processing, tmp_path / "it")
    with pytest.raises(ValueError, match=r"order 'dimension', but .* LeRobot's .*decode\(\).*--order freq"):
        processor.scale  # noqa: B018
    assert vars(processor)["scale"] == 10.0


def test_every_named_file_is_saved(pair: tuple[FastTokenizer, Any], tmp_path: Path) -> None:
    pair[0].save_pretrained(tmp_path / "it")
    for name in layout.FILE_NAMES:
        assert (tmp_path / "it" / name).is_file(), name
    assert (tmp_path / "it" / SOURCE.name).read_bytes() == SOURCE.read_bytes()


def test_the_processor_file_needs_only_numpy_scipy_and_transformers() -> None:
    names = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"numpy", "scipy", "transformers"}


def test_every_saved_setting_is_a_positional_argument() -> None:
    """transformers gives nothing saved to keyword-only arguments."""
    found = next(node for node in TREE.body if isinstance(node, ast.ClassDef))
    constructor = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    saved = layout.processor_config(10.0, 512, -40, 10, 14)
    assert saved["processor_class"] == found.name
    assert saved["auto_map"] == {"AutoProcessor": f"{SOURCE.stem}.{found.name}"}
    arguments = [argument.arg for argument in constructor.args.args]
    assert arguments[:2] == ["self", layout.BPE_FOLDER]
    assert set(arguments[2:]) == set(saved) - {"processor_class", "auto_map"}
    assert not constructor.args.kwonlyargs


def test_both_places_that_write_tokenizer_config_agree(processing: ModuleType) -> None:
    assert layout.tokenizer_config() == processing._TOKENIZER_CONFIG
    assert layout.tokenizer_config()["clean_up_tokenization_spaces"] is False


def test_scales_are_written_as_plain_numbers() -> None:
    one = layout.processor_config(10.0, 512, -40, None, None)["scale"]
    many = layout.config(
        symbol_format="plain", scale=(1, 2.5), vocab_size=9, min_token=0, time_horizon=1, action_dim=2
    )["scale"]
    assert (one, many) == (10.0, [1.0, 2.5])
