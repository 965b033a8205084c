"""FastTokenizer: recorded ids and values, every input layout, every bad input, errors bounded by the quantiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions.normalize import NormalizationMode, Statistics
from pi0_fast.actions.tokenizer import TokenizerFitter
from pi0_fast.actions.vocabulary import SymbolFormat
from pi0_fast.types import TokenizerError, UsageError

FORMATS: list[SymbolFormat] = ["plain", "reference"]
H, D = 10, 7


def motion(rows: int, seed: int = 0, horizon: int = H, size: int = D, amplitude: float = 1.0) -> np.ndarray:
    """Smooth trajectories within [-amplitude, amplitude], float32 [rows, horizon, size]."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, horizon)[None, :, None]
    phase, speed = rng.uniform(0, 6, (2, rows, 1, size))
    return (amplitude * np.sin(phase + speed * time) * rng.uniform(0.2, 1, (rows, 1, size))).astype(np.float32)


@pytest.fixture(scope="module", params=FORMATS)
def tok(request: pytest.FixtureRequest) -> FastTokenizer:
    return FastTokenizer.fit(motion(400), vocab_size=400, symbol_format=request.param)


@pytest.fixture(scope="module")
def plain() -> FastTokenizer:
    return FastTokenizer.fit(motion(400), vocab_size=400)


def names_of(size: int) -> Normalizer:
    values = {q: [v] * size for q, v in zip(("min", "q01", "q99", "max"), (-2.0, -1.0, 1.0, 2.0), strict=True)}
    return Normalizer.from_statistics(values, "QUANTILES", names=[f"joint{d}" for d in range(size)])


# --- recorded numbers ---------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize(
    ("recorded", "tokenizer", "prefix"),
    [
        ("reference_fit_g1_h16", "golden/reference_fit_g1_h16", ""),
        ("fast_plus", "assets/fast_plus", "so101_h10_"),
        ("fast_plus", "assets/fast_plus", "so101_h50_"),
        ("fast_plus", "assets/fast_plus", "g1_h16_"),
        ("fast_plus", "assets/fast_plus", "g1_h50_"),
    ],
)
def test_ids_and_values_are_those_of_the_published_processor(
    shared: Path, recorded: str, tokenizer: str, prefix: str
) -> None:
    vectors = np.load(shared / "golden" / recorded / "vectors.npz")
    chunks, tokens, lengths, values = (vectors[prefix + name] for name in ("chunks", "tokens", "lengths", "decoded"))
    tok = FastTokenizer.from_pretrained(shared / tokenizer)
    assert (tok.symbol_format, tok.scale) == ("reference", 10.0)
    ids = tok.encode(chunks)
    assert [len(row) for row in ids] == lengths.tolist()
    assert [i for row in ids for i in row] == tokens.tolist()
    for forms in (ids, tok.encode_padded(chunks)):
        decoded = tok.decode(forms, time_horizon=chunks.shape[1], action_dim=chunks.shape[2])
        assert np.abs(decoded - values).max() < 1e-6
    alone = [tok.encode(chunk)[0] for chunk in chunks]
    assert alone == ids


# --- what encode takes --------------------------------------------------------------------------------------


class Tensor:
    """What is used of a torch tensor, where torch is not installed: on a device, with a gradient."""

    def __init__(self, array: np.ndarray, detached: bool = False, moved: bool = False) -> None:
        self.array, self.detached, self.moved = array, detached, moved
        self.ndim, self.shape, self.dtype = array.ndim, array.shape, f"torch.{array.dtype}"

    def detach(self) -> Tensor:
        return Tensor(self.array, True, self.moved)

    def cpu(self) -> Tensor:
        return Tensor(self.array, self.detached, True)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.detached, "Can't call numpy() on Tensor that requires grad"
        assert self.moved, "can't convert cuda:0 device type tensor to numpy"
        return self.array if dtype is None else self.array.astype(dtype)


def layouts(chunks: np.ndarray) -> dict[str, Any]:
    """The same [N, H, D] numbers in every form in which people hold them."""
    wide = np.zeros((*chunks.shape[:2], 2 * chunks.shape[2]), np.float32)
    wide[:, :, ::2] = chunks
    frozen = chunks.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"x" + chunks.tobytes(), np.float32, offset=1).reshape(chunks.shape)
    return {
        "float64": chunks.astype(np.float64),
        "long double": chunks.astype(np.longdouble),
        "other byte order": chunks.astype(">f4"),
        "not contiguous": wide[:, :, ::2],
        "Fortran": np.asfortranarray(chunks),
        "reversed": np.ascontiguousarray(chunks[::-1])[::-1],
        "swapped axes": np.ascontiguousarray(chunks.swapaxes(1, 2)).swapaxes(1, 2),
        "read-only": frozen,
        "unaligned": unaligned,
        "lists": chunks.tolist(),
        "list of arrays": list(chunks),
        "tuple": tuple(map(tuple, chunks.tolist())),
        "tensor": Tensor(chunks),
    }


def test_every_layout_gives_the_same_ids(tok: FastTokenizer) -> None:
    chunks = motion(6, seed=9)
    expected = tok.encode(chunks)
    assert tok(chunks) == expected
    for name, form in layouts(chunks).items():
        assert tok.encode(form) == expected, name
        ids, lengths = tok.encode_padded(form)
        assert [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)] == expected, name
    for n in range(6):
        assert tok.encode(chunks[n]) == [expected[n]]
        assert tok.encode(layouts(chunks)["Fortran"][n]) == [expected[n]]


def test_torch_itself(tok: FastTokenizer) -> None:
    torch = pytest.importorskip("torch")
    chunks = motion(3, seed=9)
    tensor = torch.from_numpy(chunks).requires_grad_()
    assert tok.encode(tensor) == tok.encode(chunks)
    ids, lengths = tok.encode_padded(chunks)
    np.testing.assert_array_equal(
        tok.decode((torch.from_numpy(ids), torch.from_numpy(lengths))), tok.decode((ids, lengths))
    )
    assert tok.encode(torch.zeros(2, H, D, dtype=torch.bfloat16)) == tok.encode(np.zeros((2, H, D)))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "bool", "float16"])
def test_integer_and_narrow_dtypes(tok: FastTokenizer, dtype: str) -> None:
    chunks = np.random.default_rng(0).integers(0, 2, (4, H, D))
    assert tok.encode(chunks.astype(dtype)) == tok.encode(chunks.astype(np.float32))


def test_empty_batches(tok: FastTokenizer) -> None:
    for empty in (np.zeros((0, H, D)), [], np.zeros(0)):
        assert tok.encode(empty) == []
        ids, lengths = tok.encode_padded(empty)
        assert (ids.shape, lengths.shape) == ((0, 0), (0,))
    rows, info = tok.encode([], return_info=True)
    assert (rows, info.saturations.tolist(), info.token_counts.tolist()) == ([], [], [])
    for nothing in ([], (np.zeros((0, 0), np.int32), np.zeros(0, np.int32)), np.zeros((0, 5), int)):
        assert tok.decode(nothing).shape == (0, H, D)


def test_padded_ids() -> None:
    fitted = FastTokenizer.fit(motion(50), vocab_size=300)
    chunks = motion(5, seed=3) * np.array([0, 1, 0.1, 0.5, 0])[:, None, None]
    ids, lengths = fitted.encode_padded(chunks)
    rows, info = fitted.encode(chunks, return_info=True)
    assert ids.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == info.token_counts.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [row + [-1] * (max(lengths) - len(row)) for row in rows]


# --- what encode refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.nan, "is nan"), (np.inf, "is inf"), (-np.inf, "is -inf"), (790.0, "is 790: no normalised action"),
     (-790.0, "is -790"), (1e300, "is inf")],
)  # fmt: skip
@pytest.mark.parametrize("row", [0, 137, 299])
def test_values_that_are_no_actions_are_named(tok: FastTokenizer, value: float, text: str, row: int) -> None:
    chunks = motion(300).astype(np.float64)
    chunks[row, 4, 5] = value
    chunks[-1, -1, -1] = value
    with pytest.raises(TokenizerError, match=f"row {row}, step 4, dimension 5 {text}"):
        tok.encode(chunks)
    with pytest.raises(TokenizerError, match=f"row 0, step 4, dimension 5 {text}"):
        tok.encode(chunks[row])
    with pytest.raises(TokenizerError, match=f"row {row}, step 4, dimension 5 {text}"):
        tok.encode_padded(chunks)


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ("north", "must be numbers"),
        ([["a"] * D] * H, "must be numbers"),
        (None, "must be numbers"),
        (np.zeros((2, H, D), complex), "must be numbers"),
        (np.zeros((2, H, D), object), "must be numbers"),
        ([[0.0] * D, [0.0]], "cannot be read as an array"),
        (0.5, r"have shape \[\]"),
        (np.zeros(D), r"have shape \[7\]; needed is \[N, 10, 7\]"),
        (np.zeros((2, H, D, 1)), r"have shape \[2, 10, 7, 1\]; needed is \[N, 10, 7\]"),
        (np.zeros((2, D, H)), "have 7 steps and 10 dimensions; needed is"),
        (np.zeros((2, H, 14)), "have 10 steps and 14 dimensions; needed is"),
        (np.zeros((2, H, 6)), "have 10 steps and 6 dimensions; needed is"),
        (np.zeros((0, H, 6)), "have 10 steps and 6 dimensions; needed is"),
        (np.zeros((50, D)), "have 50 steps and 7 dimensions; needed is"),
    ],
)
def test_other_shapes_and_types_are_refused(tok: FastTokenizer, chunks: Any, text: str) -> None:
    with pytest.raises(TokenizerError, match=text):
        tok.encode(chunks)


def test_threads_are_at_least_one(plain: FastTokenizer) -> None:
    for call in (plain.encode, plain.encode_padded):
        with pytest.raises(UsageError, match="number of threads must be at least 1"):
            call(motion(2), num_threads=0)
    with pytest.raises(UsageError, match="number of threads must be at least 1"):
        plain.decode([[0]], num_threads=-2)


# --- what decode takes --------------------------------------------------------------------------------------


def test_every_form_of_ids_gives_the_same_values(tok: FastTokenizer) -> None:
    chunks = motion(5, seed=4)
    rows = tok.encode(chunks)
    ids, lengths = tok.encode_padded(chunks)
    values = tok.decode(rows)
    assert values.dtype == np.float32
    assert values.shape == (5, H, D)
    wide = np.full((5, 40 + ids.shape[1]), 123456)
    wide[:, : ids.shape[1]] = ids
    forms = [
        (ids, lengths), (ids.astype(np.int64), lengths.astype(np.int64)), (ids.astype(np.int16), lengths.tolist()),
        (np.asfortranarray(ids), lengths), (wide, lengths), (wide[:, ::1], lengths), (Tensor(ids), Tensor(lengths)),
        tuple(rows), [np.array(row) for row in rows], [Tensor(np.array(row)) for row in rows],
        [tuple(row) for row in rows], [np.array(row, np.uint16) for row in rows], (row for row in rows),
    ]  # fmt: skip
    for form in forms:
        np.testing.assert_array_equal(tok.decode(form), values)
    for n, row in enumerate(rows):
        for flat in (row, tuple(row), np.array(row), np.array(row, np.uint8 if max(row) < 256 else np.int64),
                     [np.int64(i) for i in row], Tensor(np.array(row))):  # fmt: skip
            single = tok.decode(flat)
            assert single.shape == (H, D)
            np.testing.assert_array_equal(single, values[n])
    same = [rows[0]] * 3
    np.testing.assert_array_equal(tok.decode(np.array(same)), values[[0, 0, 0]])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4"])
def test_ids_of_every_integer_dtype(plain: FastTokenizer, dtype: str) -> None:
    ids = [i for i in plain.encode(np.zeros((H, D)))[0] if i < 127] or [0]
    expected = plain.decode([ids], on_error="pad")
    np.testing.assert_array_equal(plain.decode([np.array(ids, dtype)], on_error="pad"), expected)
    np.testing.assert_array_equal(plain.decode(np.array(ids, dtype)[None], on_error="pad"), expected)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (None, "list of lists of ids, or one flat list"),
        (7, "list of lists of ids, or one flat list"),
        ("abc", "must be numbers"),
        ([[1.0, 2.0]], "whole numbers"),
        (np.zeros((2, 3)), "whole numbers"),
        (np.array([[True, False]]), "whole numbers"),
        ([["a"]], "must be numbers"),
        ([[1, 2], 3], "list of lists of ids, or one flat list"),
        ([3, [1, 2]], "cannot be read"),
        ([[[1, 2]], [[3, 4]]], "list of lists of ids, or one flat list"),
        ([[[1], [2, 3]]], "list of lists of ids, or one flat list"),
        (np.zeros((2, 3, 4), int), r"ids have shape \[2, 3, 4\]"),
        ((np.zeros((2, 3), int), np.array([1])), r"lengths of shape \[1\] do not fit ids of shape \[2, 3\]"),
        ((np.zeros((2, 3), int), np.array([1, 4])), "do not fit"),
        ((np.zeros((2, 3), int), np.array([1, -1])), "do not fit"),
        ((np.zeros((2, 3), int), np.array([1.0, 2.0])), "whole numbers"),
        ([[2**70]], "must be numbers"),
    ],
)
def test_what_are_no_ids(tok: FastTokenizer, ids: Any, text: str) -> None:
    for on_error in ("raise", "pad"):
        with pytest.raises(TokenizerError, match=text):
            tok.decode(ids, on_error=on_error)


# --- invalid rows -------------------------------------------------------------------------------------------


def single(tok: FastTokenizer, coefficient: int = 0) -> list[int]:
    """The ids of one coefficient alone: of code points that form a word of their own in the reference format too."""
    ids, lengths = tok.vocabulary.encode(np.full((1, 1), coefficient, np.int32))
    return [int(i) for i in np.ravel(ids)[: int(lengths[0])]]


def test_a_dropped_id(tok: FastTokenizer) -> None:
    small = FastTokenizer.fit(motion(300, horizon=5), vocab_size=300, symbol_format=tok.symbol_format)
    rows = small.encode(motion(4, seed=1, horizon=5))
    rows[2] = rows[2][:-1]
    with pytest.raises(TokenizerError, match=r"^row 2: .*(a chunk needs 35|of 35).*on_error='pad' or 'hold'"):
        small.decode(rows)
    values, info = small.decode(rows, on_error="pad", return_info=True)
    assert info.valid.tolist() == [True, True, False, True]
    assert info.invalid_count == 1
    assert [problem is None for problem in info.problems] == [True, True, False, True]
    np.testing.assert_array_equal(values[[0, 1, 3]], small.decode([rows[0], rows[1], rows[3]]))
    assert np.isfinite(values).all()


@pytest.mark.parametrize("count", [0, 1, 68, 69, 71, 83, 300])
def test_counts_that_are_no_chunk(tok: FastTokenizer, count: int) -> None:
    good = tok.encode(motion(1))[0]
    row = single(tok) * count
    with pytest.raises(TokenizerError, match=rf"row 1: the {len(row)} ids hold {count} coefficients, a chunk needs 70"):
        tok.decode([good, row])
    values, info = tok.decode([good, row], on_error="pad", return_info=True)
    assert info.valid.tolist() == [True, False]
    assert (values[1] == 0).all()
    with pytest.raises(TokenizerError, match=r"row 0: .* \(and 2 more rows of 4\)"):
        tok.decode([row, row, good, row])


def test_padding_keeps_what_there_is_and_drops_the_surplus(plain: FastTokenizer) -> None:
    """The first coefficient is dimension 0 at frequency 0: 10 of them is 1 / sqrt(H) at every step."""
    short, long = single(plain, 10), single(plain, 10) + single(plain) * 69 + single(plain, 10) * 5
    expected = np.zeros((H, D))
    expected[:, 0] = 1 / np.sqrt(H)
    for row in (short, long):
        np.testing.assert_allclose(plain.decode(row, on_error="pad"), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [84967, -5, 400, 2**40, -(2**40), 10**6])
def test_ids_of_another_vocabulary_are_located(tok: FastTokenizer, bad: int) -> None:
    good = tok.encode(motion(1))[0]
    shown = f"id {bad}" if abs(bad) < 2**31 else "an id beyond 32 bits"
    bad_row = [*good[:2], bad, *good[3:]]
    with pytest.raises(TokenizerError, match=f"row 1: {shown} at position 2 is outside the vocabulary 0 to 399"):
        tok.decode([good, bad_row])
    _, info = tok.decode([bad_row, good], on_error="pad", return_info=True)
    assert info.valid.tolist() == [False, True]
    with pytest.raises(TokenizerError, match=f"{shown} at position 0"):
        tok.decode(np.array([bad, 0]))


def test_padded_ids_without_their_lengths(plain: FastTokenizer) -> None:
    ids, _ = plain.encode_padded(np.stack([np.zeros((H, D)), motion(1)[0]]))
    with pytest.raises(
        TokenizerError, match=r"row 0: id -1 at position \d+ .*padding\? pass decode\(\(ids, lengths\)\)"
    ):
        plain.decode(ids)


def test_ids_that_end_inside_a_coefficient() -> None:
    chunks = motion(200, amplitude=6.0)
    tok = FastTokenizer.fit(chunks, vocab_size=700, symbol_format="reference")
    text = {c: i for i, c in enumerate(tok.vocabulary.characters)}
    zeros = single(tok) * 3
    with pytest.raises(TokenizerError, match="the ids break off inside coefficient 3 of 70"):
        tok.decode([[*zeros, text["Ã"]]])
    values, info = tok.decode([[*zeros, text["Ã"]]], on_error="pad", return_info=True)
    assert not info.valid[0]
    assert (values == 0).all()  # never U+FFFD, a coefficient of 65,000


def test_holding(tok: FastTokenizer) -> None:
    good = tok.encode(motion(1))[0]
    ids = [good[:-1], good, [84967]]
    where = np.linspace(-1, 1, D)
    values, info = tok.decode(ids, on_error="hold", hold=where, return_info=True)
    assert info.invalid_count == 2
    np.testing.assert_allclose(values[[0, 2]], np.broadcast_to(where, (2, H, D)), rtol=1e-6)
    np.testing.assert_array_equal(values[1], tok.decode(good))
    each = np.arange(3 * D).reshape(3, D)
    held = tok.decode(ids, on_error="hold", hold=Tensor(each))
    assert (held[2] == each[2]).all()
    assert (held[0] == each[0]).all()


@pytest.mark.parametrize(
    "hold", [[0.0] * 6, np.zeros((2, D)), np.zeros((1, 1, D)), 0.0, [np.nan] * D, [np.inf] * D, "home"]
)
def test_actions_that_cannot_be_held_are_refused_before_they_are_needed(plain: FastTokenizer, hold: Any) -> None:
    with pytest.raises(TokenizerError, match="hold"):
        plain.decode([plain.encode(motion(1))[0]], on_error="hold", hold=hold)


def test_unknown_or_half_given_ways_to_handle_errors(plain: FastTokenizer) -> None:
    for arguments in (
        {"on_error": "zero"},
        {"on_error": "hold"},
        {"on_error": "pad", "hold": [0] * D},
        {"hold": [0] * D},
    ):
        with pytest.raises(UsageError, match="on_error"):
            plain.decode([[0]], **arguments)  # type: ignore[call-overload]


# --- H and D ------------------------------------------------------------------------------------------------


def test_shapes_are_bound_at_the_fit(tok: FastTokenizer) -> None:
    good = tok.encode(motion(1))
    np.testing.assert_array_equal(tok.decode(good, time_horizon=H, action_dim=D), tok.decode(good))
    with pytest.raises(
        TokenizerError, match="action_dim=32 contradicts the tokenizer, which was fitted with action_dim=7"
    ):
        tok.decode(good, action_dim=32)
    with pytest.raises(TokenizerError, match="time_horizon=50 contradicts"):
        tok.decode(good, time_horizon=50)


def test_a_tokenizer_of_any_shape_remembers_no_call(plain: FastTokenizer) -> None:
    free = FastTokenizer(plain.vocabulary)
    ids = free.encode(motion(2, horizon=5, size=3))
    assert free.decode(ids, time_horizon=5, action_dim=3).shape == (2, 5, 3)
    for arguments, text in (({}, "not bound to a time_horizon"), ({"time_horizon": 5}, "not bound to a action_dim"),
                            ({"time_horizon": 0, "action_dim": 3}, "at least 1")):  # fmt: skip
        with pytest.raises(TokenizerError, match=text):
            free.decode(ids, **arguments)
    free.encode(motion(1, horizon=8, size=2))
    assert free.decode(ids, time_horizon=3, action_dim=5).shape == (2, 3, 5)


def test_settings_that_contradict(plain: FastTokenizer) -> None:
    for arguments, text in (
        ({"time_horizon": 0}, "time_horizon must be at least 1"),
        ({"action_dim": -1}, "action_dim must be at least 1"),
        ({"scale": [1.0, 2.0], "action_dim": 3}, "scale has 2 values for 3 dimensions"),
        ({"normalizer": names_of(3), "action_dim": 4}, "normaliser has 3 dimensions, the tokenizer 4"),
    ):
        with pytest.raises(TokenizerError, match=text):
            FastTokenizer(plain.vocabulary, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="scale has 2 values, chunks have 7 dimensions"):
        FastTokenizer(plain.vocabulary, scale=[1.0, 2.0]).encode(motion(1))


@pytest.mark.parametrize(
    "scale", [0, -1.0, np.nan, np.inf, 1e39, 1e-46, [], [[1.0]], [1.0, 0.0], "ten", None, [1.0, None]]
)
def test_scales_that_are_none(scale: Any) -> None:
    with pytest.raises(TokenizerError, match="scale"):
        FastTokenizer.fit(motion(4, size=2), scale=scale)


# --- beyond the fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_larger_motion_than_fitted_is_clipped_and_counted(tok: FastTokenizer, factor: float) -> None:
    chunks = motion(100, seed=5)
    chunks /= np.abs(chunks).max()
    ids, info = tok.encode(factor * chunks, return_info=True)
    assert (info.saturations > 0).any()
    values = tok.decode(ids)
    low, high = tok.vocabulary.low, tok.vocabulary.high
    exact = np.sqrt(H) * 10 * (factor * chunks).mean(1)  # the coefficients of frequency 0
    outside = ((np.round(exact) < low) | (np.round(exact) > high)).sum(1)
    assert (info.saturations >= outside).all()
    # What was not clipped comes back as usual; what was, comes back as the nearest that there is.
    free = info.saturations == 0
    assert free.any() or factor > 2
    assert np.abs(values - factor * chunks)[free].max(initial=0) < 0.5 / 10 * np.sqrt(H)
    kept = np.sqrt(H) * 10 * values.mean(1)
    # In the reference format, a byte that was never seen is a hole in the alphabet: one more step away.
    np.testing.assert_allclose(
        kept, np.clip(np.round(exact), low, high), atol=0.6 if tok.symbol_format == "plain" else 1.6
    )
    again, more = tok.encode(values, return_info=True)
    assert (more.saturations == 0).all()
    assert again == ids


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("horizon", [1, 4, 50])
def test_what_was_fitted_is_never_taken_for_no_action(horizon: int, factor: float) -> None:
    """Actions in thousands, in one step alone: their coefficients are much smaller than the values."""
    chunks = np.zeros((horizon, horizon, 2))
    chunks[np.arange(horizon), np.arange(horizon)] = 1000
    fitted = FastTokenizer.fit(chunks, scale=0.1, vocab_size=600)
    rows, info = fitted.encode(factor * chunks, return_info=True)
    assert (info.saturations == 0).all() == (factor == 1.0)
    if factor == 1.0:
        assert np.abs(fitted.decode(rows) - chunks).max() <= 0.5 / 0.1 * np.sqrt(horizon)
    with pytest.raises(TokenizerError, match="no normalised action"):
        fitted.encode(1e6 * chunks)


# --- fit ----------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_never_larger_than_asked(tok: FastTokenizer) -> None:
    assert tok.vocab_size == len(tok) == 400
    few = FastTokenizer.fit(np.zeros((3, 4, 2)), vocab_size=100, symbol_format=tok.symbol_format)
    assert few.vocab_size < 20  # nothing is left to merge
    np.testing.assert_array_equal(few.decode(few.encode(np.zeros((4, 2)))), np.zeros((1, 4, 2)))


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_more_symbols_than_the_vocabulary(symbol_format: SymbolFormat) -> None:
    """One step, so that the coefficients are 10 times the values: -250 to 249."""
    chunks = np.zeros((500, 1, 3))
    chunks[:, 0, 1] = np.arange(-250, 250) / 10
    chunks[:, 0, 2] = np.arange(-250, 250) / 100
    with pytest.raises(TokenizerError) as caught:
        FastTokenizer.fit(chunks, vocab_size=100, symbol_format=symbol_format, normalizer=names_of(3))
    for part in (
        "need 500 symbols, more than vocab_size 100", "1 (joint1): -250 to 249", "2 (joint2): -25 to 25",
        "QUANTILES or MIN_MAX", "smaller scale than 10.0", "vocab_size above 500", "1000 or more",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert FastTokenizer.fit(chunks, vocab_size=1000, symbol_format=symbol_format).vocab_size <= 1000


def test_raw_ticks_without_normalisation() -> None:
    ticks = motion(50, amplitude=1.0) * 2048 + 2048
    identity = Normalizer.from_statistics({"min": [0.0] * D, "max": [4096.0] * D}, NormalizationMode.IDENTITY)
    with pytest.raises(
        TokenizerError, match=r"chunk \d+, dimension \d: coefficients exceed 32766.*other than IDENTITY"
    ):
        FastTokenizer.fit(ticks, normalizer=identity)
    with pytest.raises(TokenizerError, match=r"need \d{4,5} symbols, more than vocab_size 1024.*IDENTITY"):
        FastTokenizer.fit(ticks / 16, normalizer=identity)
    needed = FastTokenizer.fit(ticks / 16, vocab_size=20_000, normalizer=identity)
    assert np.abs(needed.decode(needed.encode(ticks / 16)) - ticks / 16).max() < 0.5 / 10 * np.sqrt(H) + 1e-3


def test_errors_of_a_fit_count_rows_over_all_blocks() -> None:
    """fit takes the chunks in blocks of some thousand; the row is that of the array."""
    chunks = np.zeros((9000, 2, 2), np.float32)
    chunks[8999, 1, 0] = np.nan
    with pytest.raises(TokenizerError, match="row 8999, step 1, dimension 0 is nan"):
        FastTokenizer.fit(chunks)
    chunks[8999, 1, 0] = 1e7
    with pytest.raises(TokenizerError, match="chunk 8999, dimension 0: coefficients exceed"):
        FastTokenizer.fit(chunks)


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        (np.zeros((0, 4, 2)), "there are no chunks to fit on"),
        (np.zeros((4, 2)), r"needs chunks of shape \[N, H, D\], got \[4, 2\]"),
        (np.zeros((1, 4, 2, 1)), r"needs chunks of shape"),
        ("all", "must be numbers"),
        (np.zeros((2, 0, 3)), "not supported"),
        (np.zeros((2, 300, 300)), "not supported"),
    ],
)
def test_what_cannot_be_fitted(chunks: Any, text: str) -> None:
    with pytest.raises(TokenizerError, match=text):
        FastTokenizer.fit(chunks)


@pytest.mark.parametrize("vocab_size", [300.0, "300", None, True])
def test_vocabulary_sizes_that_are_none(vocab_size: Any) -> None:
    with pytest.raises(TokenizerError, match="vocab_size must be a whole number"):
        FastTokenizer.fit(motion(4), vocab_size=vocab_size)


def test_unknown_formats() -> None:
    with pytest.raises(UsageError, match="symbol_format must be 'plain' or 'reference'"):
        FastTokenizer.fit(motion(4), symbol_format="bytes")  # type: ignore[arg-type]


def test_blocks_and_one_array_give_the_same_fit() -> None:
    chunks = motion(500)
    fitter = TokenizerFitter(H, D, scale=12.0)
    for part in (chunks[:1], chunks[1:7], chunks[7:7], chunks[7], chunks[8:]):
        fitter.add(part)
    tok = fitter.finish(vocab_size=300)
    assert tok == FastTokenizer.fit(chunks, scale=12.0, vocab_size=300)
    lengths, uses = fitter.token_usage(tok)
    rows = tok.encode(chunks)
    assert lengths.tolist() == [len(row) for row in rows]
    assert uses.tolist() == np.bincount([i for row in rows for i in row], minlength=tok.vocab_size).tolist()
    coefficients = np.rint(12 * np.sqrt(H) * chunks.mean(1))
    assert tok.coefficient_range is not None
    assert tok.coefficient_range[0] <= coefficients.min() + 1
    assert tok.coefficient_range[1] >= coefficients.max() - 1
    with pytest.raises(TokenizerError, match="have 9 steps"):
        fitter.add(motion(2, horizon=9))


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_any_number_of_threads_gives_the_same_files(symbol_format: SymbolFormat, tmp_path: Path) -> None:
    chunks = motion(700)
    contents = []
    for threads in (1, 2, 3, 8, None):
        tok = FastTokenizer.fit(chunks, vocab_size=300, symbol_format=symbol_format, num_threads=threads)
        folder = tmp_path / str(threads)
        tok.save_pretrained(folder)
        contents.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        ids = tok.encode(chunks, num_threads=threads)
        assert ids == tok.encode(chunks)
        np.testing.assert_array_equal(tok.decode(ids, num_threads=threads), tok.decode(ids))
    assert all(content == contents[0] for content in contents)
    assert len(contents[0]) >= 9


def test_progress_is_called_for_each_merge() -> None:
    calls: list[int] = []
    tok = FastTokenizer.fit(motion(50), vocab_size=200, progress=calls.append)
    assert calls == [1] * len(tok.vocabulary.merges.left)


def test_headroom_is_passed_on() -> None:
    chunks = motion(50)
    none, some = (FastTokenizer.fit(chunks, vocab_size=600, headroom=headroom) for headroom in (0.0, 0.5))
    assert none.coefficient_range == some.coefficient_range == (none.vocabulary.low, none.vocabulary.high)
    assert some.vocabulary.low < none.vocabulary.low
    assert some.vocabulary.high > none.vocabulary.high


# --- there and back -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1), st.sampled_from(FORMATS),
    st.sampled_from([1.0, 10.0, 25.0]), st.booleans(),
)  # fmt: skip
def test_errors_are_bounded_by_the_quantiser(
    horizon: int, size: int, seed: int, symbol_format: SymbolFormat, scale: float, many: bool
) -> None:
    """Each coefficient moves by at most half of 1 / scale, so a dimension by sqrt(H) times that."""
    rng = np.random.default_rng(seed)
    chunks = rng.uniform(-1, 1, (12, horizon, size)).astype(np.float32)
    scales: Any = (scale * rng.uniform(0.5, 2, size)).tolist() if many else scale
    tok = FastTokenizer.fit(chunks, scale=scales, vocab_size=2000, symbol_format=symbol_format)
    ids, info = tok.encode(chunks, return_info=True)
    assert (info.saturations == 0).all()
    error = np.linalg.norm(tok.decode(ids) - chunks, axis=1)
    bound = 0.5 * np.sqrt(horizon) / np.broadcast_to(scales, (size,))
    assert (error <= bound * (1 + 1e-3) + 1e-5).all()
    assert tok.encode(tok.decode(ids)) == ids


def test_a_scale_for_each_dimension() -> None:
    chunks = motion(60, size=3)
    fine = FastTokenizer.fit(chunks, scale=(100, 10, 1), vocab_size=2000)
    assert fine.scale == [100.0, 10.0, 1.0]
    error = np.abs(fine.decode(fine.encode(chunks)) - chunks).max((0, 1))
    assert (error < 0.5 * np.sqrt(H) / np.array([100, 10, 1])).all()
    assert error[0] < 0.02 < error[1] < error[2]


def test_the_example_of_the_docstring() -> None:
    chunk = np.full((4, 1), 0.5)
    tok = FastTokenizer.fit(np.stack([chunk] * 2), vocab_size=20, headroom=0)
    assert tok.vocabulary.merges.expansions[11:] == [(0, 0), (10, 0, 0), (10, 0, 0, 0)]
    np.testing.assert_array_equal(tok.decode(tok.encode(chunk)), chunk[None])


def test_equality_fingerprint_and_description(plain: FastTokenizer) -> None:
    same = FastTokenizer.fit(motion(400), vocab_size=400)
    assert same == plain
    assert same.fingerprint == plain.fingerprint
    others = [
        FastTokenizer.fit(motion(400), vocab_size=399),
        FastTokenizer.fit(motion(400), vocab_size=400, scale=11.0),
        FastTokenizer.fit(motion(400), vocab_size=400, symbol_format="reference"),
        FastTokenizer.fit(motion(400), vocab_size=400, normalizer=names_of(D)),
        FastTokenizer(plain.vocabulary, coefficient_range=plain.coefficient_range),
    ]
    assert len({other.fingerprint for other in [plain, *others]}) == 6
    assert all(other != plain for other in others)
    assert plain != "tokenizer"
    for part in ("vocab_size=400", "scale=10.0", "time_horizon=10", "action_dim=7", "'plain'"):
        assert part in repr(plain)


def test_statistics_are_kept_whole() -> None:
    complete = Statistics.from_mapping(
        {"min": [-2], "q01": [-1], "q10": [-0.5], "q50": [0], "q90": [0.5], "q99": [1], "max": [2], "mean": [0],
         "std": [1], "count": [9]}
    )  # fmt: skip
    tok = FastTokenizer.fit(np.zeros((2, 3, 1)), normalizer=Normalizer.from_statistics(complete))
    assert tok.normalizer is not None
    assert tok.normalizer.statistics == complete
