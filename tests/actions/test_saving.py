"""Saved tokenizers: every field comes back, damage is named, a kill loses nothing, no code of a directory runs."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from scipy.fft import idct
from tokenizers import Tokenizer

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions import layout
from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.actions.vocabulary import SymbolFormat
from pi0_fast.hub import HubError
from pi0_fast.types import TokenizerError

FORMATS: list[SymbolFormat] = ["plain", "reference"]
H, D = 8, 3
STATISTICS = {
    "min": [-2, 0, 5], "q01": [-1, 0.1, 6], "q10": [-0.5, 0.2, 7], "q50": [0, 0.3, 8], "q90": [0.5, 0.4, 9],
    "q99": [1, 0.1 + 0.4, 10], "max": [2, 1, 11], "mean": [0, 1 / 3, 8], "std": [1, 0.1, 2], "count": [900],
}  # fmt: skip

CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


def motion(rows: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, H)[None, :, None]
    return np.sin(rng.uniform(0, 6, (rows, 1, D)) + rng.uniform(0, 4, (rows, 1, D)) * time).astype(np.float32)


def normalizer() -> Normalizer:
    selection = ActionSelection(5, (0, 2, 4), (0, 4), (1, 3), 6)
    return Normalizer.from_statistics(STATISTICS, names=["pan", "tilt", "grip"], selection=selection)


def fitted(symbol_format: SymbolFormat = "plain", **changes: Any) -> FastTokenizer:
    return FastTokenizer.fit(motion(), vocab_size=200, symbol_format=symbol_format, **changes)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fitted(normalizer=normalizer()).save_pretrained(tmp_path / "tok", metadata={"version": 1})
    return tmp_path / "tok"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- fields -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol_format", FORMATS)
@pytest.mark.parametrize("scale", [10.0, 25.5, (0.1 + 0.2, 10, 1 / 3)])
@pytest.mark.parametrize("with_normalizer", [True, False])
def test_every_field_comes_back(tmp_path: Path, symbol_format: SymbolFormat, scale: Any, with_normalizer: bool) -> None:
    tok = fitted(symbol_format, scale=scale, normalizer=normalizer() if with_normalizer else None)
    tok.save_pretrained(str(tmp_path / "tok"))
    again = FastTokenizer.from_pretrained(str(tmp_path / "tok"))
    assert again == tok
    assert again.vocabulary == tok.vocabulary
    names = "scale time_horizon action_dim normalizer coefficient_range symbol_format vocab_size min_token fingerprint"
    for name in names.split():
        assert getattr(again, name) == getattr(tok, name), name
    assert again.coefficient_range is not None
    if with_normalizer:
        assert again.normalizer is not None
        assert again.normalizer.selection == normalizer().selection
        assert again.normalizer.names == ("pan", "tilt", "grip")
    chunks = motion(seed=1)
    assert again.encode(chunks) == tok.encode(chunks)
    np.testing.assert_array_equal(again.decode(again.encode(chunks)), tok.decode(tok.encode(chunks)))


def test_a_tokenizer_of_any_shape_stays_one(tmp_path: Path) -> None:
    free = FastTokenizer(fitted().vocabulary, scale=7.0)
    free.save_pretrained(tmp_path / "tok")
    again = FastTokenizer.from_pretrained(tmp_path / "tok")
    assert (again.time_horizon, again.action_dim, again.coefficient_range, again.normalizer) == (None,) * 4
    assert again == free


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_equal_fits_are_equal_files(tmp_path: Path, symbol_format: SymbolFormat) -> None:
    for name in ("one", "two"):
        fitted(symbol_format, normalizer=normalizer()).save_pretrained(tmp_path / name, token_uses=np.arange(200))
    FastTokenizer.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "three", token_uses=list(range(200)))
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")
    names = set(contents(tmp_path / "one"))
    assert names == {*layout.FILE_NAMES, "normalizer.json", "vocabulary.txt"}
    for name, content in contents(tmp_path / "one").items():
        assert str(tmp_path).encode() not in content, name


def test_the_vocabulary_for_people(tmp_path: Path) -> None:
    chunk = np.full((4, 1), 0.5)
    tok = FastTokenizer.fit(np.stack([chunk] * 2), vocab_size=20, headroom=0)
    tok.save_pretrained(tmp_path, token_uses=[0] * 13 + [2])
    lines = (tmp_path / "vocabulary.txt").read_text().splitlines()
    assert lines[0] == "# id\tcount\tcoefficients"
    assert lines[1] == "0\t0\t0"
    assert lines[11:] == ["10\t0\t10", "11\t0\t0*2", "12\t0\t10 0*2", "13\t2\t10 0*3"]
    tok.save_pretrained(tmp_path)
    assert (tmp_path / "vocabulary.txt").read_text().splitlines()[1] == "0\t?\t0"
    for wrong in ([1, 2], [0] * 15):
        with pytest.raises(TokenizerError, match=f"token_uses has {len(wrong)} numbers for 14 ids"):
            tok.save_pretrained(tmp_path, token_uses=wrong)
    for bad in ([-1] + [0] * 13, [0.5] * 14, ["a"] * 14, 3, [[0]] * 14, [[0], 1], []):
        with pytest.raises(TokenizerError, match="token_uses must be 14 whole numbers of at least 0"):
            tok.save_pretrained(tmp_path, token_uses=bad)  # type: ignore[arg-type]


# --- read elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol_format", FORMATS)
@pytest.mark.parametrize("place", ["tokenizer.json", "bpe_tokenizer/tokenizer.json"])
def test_lerobots_way_of_decoding(tmp_path: Path, symbol_format: SymbolFormat, place: str) -> None:
    """bpe_tokenizer.decode(ids), ord(c) + min_token, / scale, inverse DCT: the same ids, characters and actions."""
    tok = fitted(symbol_format)
    tok.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    reader = Tokenizer.from_file(str(tmp_path / place))
    chunks = motion(40, seed=2)
    ids = tok.encode(chunks)
    for row, values in zip(ids, tok.decode(ids), strict=True):
        text = reader.decode(row)
        assert reader.encode(text).ids == row
        coefficients = np.array([ord(c) + settings["min_token"] for c in text], np.float64)
        theirs = idct(coefficients.reshape(settings["time_horizon"], -1) / settings["scale"], axis=0, norm="ortho")
        np.testing.assert_allclose(values, theirs, atol=1e-6)


@pytest.mark.golden
def test_published_layouts(shared: Path, tmp_path: Path) -> None:
    root = shared / "assets" / "fast_plus"
    expected = FastTokenizer.from_pretrained(root)
    assert (expected.vocab_size, expected.min_token, expected.time_horizon) == (2048, -354, None)
    for name in ("both", "subfolder"):
        folder = tmp_path / name
        (folder / "bpe_tokenizer").mkdir(parents=True)
        shutil.copyfile(root / "processor_config.json", folder / "processor_config.json")
        shutil.copyfile(root / "tokenizer.json", folder / "bpe_tokenizer" / "tokenizer.json")
    # Another version of tokenizers writes the same vocabulary in other words: merges joined by a space.
    content = json.loads((root / "tokenizer.json").read_text())
    content["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    (tmp_path / "both" / "tokenizer.json").write_text(json.dumps(content))
    for name in ("both", "subfolder"):
        assert FastTokenizer.from_pretrained(tmp_path / name) == expected
    expected.save_pretrained(tmp_path / "ours")
    assert FastTokenizer.from_pretrained(tmp_path / "ours") == expected


# --- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["processor_config.json", "config.json", "normalizer.json", "tokenizer.json",
                                  "bpe_tokenizer/tokenizer.json"])  # fmt: skip
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00", b'{"a":'])
def test_damaged_files_are_named(saved: Path, name: str, content: bytes) -> None:
    (saved / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        FastTokenizer.from_pretrained(saved)
    assert str(saved / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_of_any_length(saved: Path) -> None:
    whole = (saved / "tokenizer.json").read_bytes()
    for end in range(0, len(whole) - 2, 997):
        (saved / "tokenizer.json").write_bytes(whole[:end])
        with pytest.raises(TokenizerError, match=r"tok/tokenizer.json cannot be read"):
            FastTokenizer.from_pretrained(saved)


def test_missing_files(saved: Path) -> None:
    for name in ("config.json", "normalizer.json", "preprocessor_config.json", "metadata.json", "vocabulary.txt"):
        (saved / name).unlink()
        FastTokenizer.from_pretrained(saved)  # none of them is needed
    (saved / "tokenizer.json").unlink()
    assert FastTokenizer.from_pretrained(saved).vocab_size == 200  # there is the one in the folder
    (saved / "bpe_tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"holds neither tokenizer.json nor bpe_tokenizer/tokenizer.json"):
        FastTokenizer.from_pretrained(saved)
    (saved / "processor_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"processor_config.json is missing: .* holds no FAST tokenizer"):
        FastTokenizer.from_pretrained(saved)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("processor_config.json", {"scale": None}, "scale"),
        ("processor_config.json", {"scale": "25"}, "scale"),
        ("processor_config.json", {"scale": -1}, "scale"),
        ("processor_config.json", {"scale": [1.0, 2.0]}, "scale has 2 values for 3 dimensions"),
        ("processor_config.json", {"scale": {}}, "scale"),
        ("processor_config.json", {"min_token": "0"}, "min_token must be a whole number"),
        ("processor_config.json", {"min_token": 10**12}, "min_token"),
        ("processor_config.json", {"min_token": -40.5}, "min_token must be a whole number"),
        ("processor_config.json", {"time_horizon": "8"}, "time_horizon must be a whole number"),
        ("processor_config.json", {"time_horizon": 0}, "time_horizon must be at least 1"),
        ("processor_config.json", {"action_dim": 3.5}, "action_dim must be a whole number"),
        ("processor_config.json", {"action_dim": 4}, "normaliser has 3 dimensions, the tokenizer 4"),
        ("processor_config.json", {"vocab_size": "200"}, "vocab_size must be a whole number"),
        ("processor_config.json", {"vocab_size": 100}, "says vocab_size 100, but the vocabulary has 200 ids"),
        ("processor_config.json", {"order": "zigzag"}, "must be one of frequency, dimension, not 'zigzag'"),
        ("config.json", {"order": "dimension"}, "says order 'dimension', but processor_config.json says 'frequency'"),
        ("normalizer.json", {"mode": "MAGIC"}, "MAGIC"),
        ("normalizer.json", {"version": 99}, "version"),
        ("config.json", {"coefficient_range": 7}, "coefficient_range must be two numbers"),
        ("config.json", {"coefficient_range": [1]}, "coefficient_range must be two numbers"),
        ("config.json", {"coefficient_range": ["a", 1]}, "coefficient_range must be a whole number"),
        ("config.json", {"format_version": 2}, "has format_version 2, this pi0-fast reads 1"),
        ("config.json", {"scale": 25.0}, "says scale 25.0, but processor_config.json says 10.0"),
        ("config.json", {"min_token": 5}, "says min_token 5, but processor_config.json says"),
        ("config.json", {"time_horizon": 9}, "says time_horizon 9, but processor_config.json says 8"),
        ("config.json", {"symbol_format": "reference"}, "symbol_format 'reference', but tokenizer.json says 'plain'"),
    ],
)
def test_values_that_cannot_be_right(saved: Path, name: str, changes: dict[str, Any], text: str) -> None:
    path = saved / name
    content = json.loads(path.read_text())
    if name == "processor_config.json":  # else config.json would be found to contradict first
        (saved / "config.json").unlink()
    path.write_text(json.dumps(content | changes))
    with pytest.raises(TokenizerError) as caught:
        FastTokenizer.from_pretrained(saved)
    assert text in str(caught.value)
    assert str(saved) in str(caught.value)


def test_root_and_folder_that_contradict(saved: Path, tmp_path: Path) -> None:
    FastTokenizer.fit(motion(seed=5), vocab_size=200).save_pretrained(tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / "tokenizer.json", saved / "bpe_tokenizer" / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"tokenizer.json and .*bpe_tokenizer/tokenizer.json hold different vocab"):
        FastTokenizer.from_pretrained(saved)
    content = json.loads((saved / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    (saved / "bpe_tokenizer" / "tokenizer.json").write_text(json.dumps(content))  # the same model, other ids
    with pytest.raises(TokenizerError, match="different vocab"):
        FastTokenizer.from_pretrained(saved)


def change_files(change: str, saved: Path, other: Path) -> None:
    """What goes wrong when files are copied or edited by hand."""
    place = saved / "normalizer.json"
    if change == "normaliser exchanged":
        shutil.copyfile(other / "normalizer.json", place)
    elif change == "normaliser deleted":
        place.unlink()
    elif change == "normaliser edited":
        text = place.read_text()
        assert "0.3333333333333333" in text  # a mean
        place.write_text(text.replace("0.3333333333333333", "0.3333333333333334"))
    elif change == "vocabularies exchanged":
        for name in ("tokenizer.json", "bpe_tokenizer/tokenizer.json"):
            shutil.copyfile(other / name, saved / name)
    else:
        for name in ("config.json", "processor_config.json"):
            shutil.copyfile(other / name, saved / name)


@pytest.mark.parametrize(
    "change",
    [
        "normaliser exchanged",
        "normaliser deleted",
        "normaliser edited",
        "vocabularies exchanged",
        "settings exchanged",
    ],
)
def test_files_that_do_not_belong_together(saved: Path, tmp_path: Path, change: str) -> None:
    statistics = STATISTICS | {"max": [3, 1, 11], "q99": [1.5, 0.5, 10]}
    other = FastTokenizer.fit(
        motion()[:, ::-1].copy(),
        vocab_size=200,
        normalizer=Normalizer.from_statistics(
            statistics, names=["pan", "tilt", "grip"], selection=normalizer().selection
        ),
    )
    other.save_pretrained(tmp_path / "other")
    right = json.loads((saved / "config.json").read_text())
    assert right["fingerprint"] == FastTokenizer.from_pretrained(saved).fingerprint
    change_files(change, saved, tmp_path / "other")
    with pytest.raises(TokenizerError, match="holds files of different tokenizers") as caught:
        FastTokenizer.from_pretrained(saved)
    assert str(saved) in str(caught.value)
    assert "tokenizer.json, normalizer.json belong together" in str(caught.value)
    assert ("there is no normalizer.json" in str(caught.value)) == (change == "normaliser deleted")
    # Where the change is meant, there is a way to say so.
    if "normaliser" in change:
        del right["fingerprint"]
        (saved / "config.json").write_text(json.dumps(right))
        FastTokenizer.from_pretrained(saved)


# One process saves two tokenizers in turn, until it is told to stop.
SAVING = """
import sys
from pathlib import Path
from pi0_fast import FastTokenizer
first, second, target, stop = map(Path, sys.argv[1:])
both = [FastTokenizer.from_pretrained(first), FastTokenizer.from_pretrained(second)]
print("ready", flush=True)
while not stop.exists():
    for tokenizer in both:
        tokenizer.save_pretrained(target)
"""


def test_loading_during_a_save_gives_one_of_the_two(saved: Path, tmp_path: Path) -> None:
    bare = FastTokenizer.from_pretrained(saved)
    bare.normalizer = None
    bare.metadata = {"version": 2}
    bare.save_pretrained(tmp_path / "bare")
    expected = {FastTokenizer.from_pretrained(saved).fingerprint: 1, bare.fingerprint: 2}
    target, stop = tmp_path / "target", tmp_path / "stop"
    bare.save_pretrained(target)
    arguments = [sys.executable, "-c", SAVING, str(saved), str(tmp_path / "bare"), str(target), str(stop)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        try:
            for _ in range(60):
                found = FastTokenizer.from_pretrained(target)
                assert found.metadata == {"version": expected[found.fingerprint]}
        finally:
            stop.write_text("")
    assert writer.returncode == 0


def test_a_directory_that_is_never_the_same(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced between any two files: nothing is returned that may be a mixture."""
    twin = saved.parent / "twin"
    shutil.copytree(saved, twin)
    read_text = Path.read_text

    def exchange(path: Path, *arguments: Any, **named: Any) -> str:
        if path.name == "metadata.json":
            saved.rename(saved.parent / "aside")
            twin.rename(saved)
            (saved.parent / "aside").rename(twin)
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", exchange)
    with pytest.raises(TokenizerError, match="tok is replaced again and again"):
        FastTokenizer.from_pretrained(saved)


def test_a_swap_that_the_reader_may_not_finish(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.rename(saved.parent / ".tok.pi0-fast-new")
    (saved.parent / ".tok.pi0-fast-old").mkdir()

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(TokenizerError, match=r"tok was being replaced when its writer was killed, .*Permission"):
            FastTokenizer.from_pretrained(saved)
    assert FastTokenizer.from_pretrained(saved).vocab_size == 200


# --- directories --------------------------------------------------------------------------------------------


def test_other_files_stay(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "logs" / "deep").mkdir(parents=True)
    (saved / "logs" / "deep" / "run.log").write_text("1")
    (saved / "bpe_tokenizer" / "readme.md").write_text("theirs")
    (saved / "bpe_tokenizer" / "sub").mkdir()
    (saved / "bpe_tokenizer" / "sub" / "x").write_text("x")
    (saved / "link").symlink_to("notes.txt")
    (saved / "nowhere").symlink_to(saved / "no such file")
    (saved / "outside").symlink_to(saved.parent)
    os.mkfifo(saved / "pipe")
    tok = FastTokenizer.fit(motion(seed=5), vocab_size=150, symbol_format="reference")
    tok.save_pretrained(saved)
    assert FastTokenizer.from_pretrained(saved) == tok
    assert (saved / "notes.txt").read_text() == (saved / "link").read_text() == "mine"
    assert (saved / "link").readlink() == Path("notes.txt")
    assert (saved / "nowhere").is_symlink()
    assert (saved / "pipe").is_fifo()
    assert (saved / "outside").readlink() == saved.parent
    assert (saved / "logs" / "deep" / "run.log").read_text() == "1"
    assert (saved / "bpe_tokenizer" / "readme.md").read_text() == "theirs"
    assert (saved / "bpe_tokenizer" / "sub" / "x").read_text() == "x"
    assert not (saved / "normalizer.json").exists()  # it belonged to the old one
    assert not (saved / "metadata.json").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["tok"]


def test_what_is_written_during_a_save_stays(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New and replaced files, in folders too; those of the old tokenizer and its report go."""
    (saved / "log").write_text("early")
    (saved / "logs").mkdir()
    (saved / "logs" / "a").write_text("a")
    tok = FastTokenizer.fit(motion(seed=5), vocab_size=150)
    rename = os.rename

    def late(source: Path, destination: Path) -> None:
        if Path(source) == saved:
            (saved / "late").write_text("late")
            (saved / "logs" / "b").write_text("b")
            (saved / "more" / "deep").mkdir(parents=True)
            (saved / "more" / "deep" / "c").write_text("c")
            (saved / "log.part").write_text("newer")
            os.utime(saved / "log.part", ns=(2**62, 2**62))
            os.replace(saved / "log.part", saved / "log")
            (saved / "report").mkdir()
            (saved / "report" / "report.json").write_text("{}")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    tok.save_pretrained(saved)
    assert FastTokenizer.from_pretrained(saved) == tok
    names = ("log", "late", "logs/a", "logs/b", "more/deep/c")
    assert [(saved / name).read_text() for name in names] == ["newer", "late", "a", "b", "c"]
    for gone in ("report", "normalizer.json", "metadata.json"):
        assert not (saved / gone).exists()
    assert [path.name for path in saved.parent.iterdir()] == ["tok"]


def test_the_working_directory_is_not_deleted(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)
    (saved / "below").mkdir()
    for working in (saved, saved / "below"):
        monkeypatch.chdir(working)
        with pytest.raises(OSError, match=r"tok cannot be replaced, because the working directory .* name another"):
            fitted().save_pretrained(saved)
    assert contents(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["tok"]


@pytest.mark.parametrize("wrong", [None, 7, b"tok", "a\0b", ["x"]])
def test_what_is_no_path(wrong: Any) -> None:
    with pytest.raises(TokenizerError, match="must be a path, not"):
        FastTokenizer.from_pretrained(wrong)
    with pytest.raises(TokenizerError, match="must be a path, not"):
        fitted().save_pretrained(wrong)


def test_a_link_is_followed(saved: Path) -> None:
    link = saved.parent / "current"
    link.symlink_to(saved)
    tok = FastTokenizer.fit(motion(seed=5), vocab_size=150)
    tok.save_pretrained(link)
    assert link.is_symlink()
    assert FastTokenizer.from_pretrained(saved) == FastTokenizer.from_pretrained(link) == tok


def test_a_new_directory_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tok = fitted()
    tok.save_pretrained(tmp_path / "a" / "b" / "c")
    monkeypatch.chdir(tmp_path)
    tok.save_pretrained("here")
    monkeypatch.setenv("HOME", str(tmp_path))
    tok.save_pretrained("~/home")
    for name in ("a/b/c", "here", "~/home"):
        assert FastTokenizer.from_pretrained(name if "/" not in name or "~" in name else f"./{name}") == tok
    assert (tmp_path / "home").is_dir()


def test_files_are_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(NotADirectoryError, match="exists and is no directory"):
        fitted().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(OSError, match="file"):
        fitted().save_pretrained(tmp_path / "file" / "below")
    with pytest.raises(TokenizerError, match="file is no directory"):
        FastTokenizer.from_pretrained(tmp_path / "file")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"a": np.float32(1)}, r"metadata\['a'\] \(.*float32"),
        ({"a": {"b": [1, float("nan")]}}, r"metadata\['a'\]\['b'\]\[1\] \("),
        ({1j: 1}, r"metadata \("),
        ([1], "metadata must be a dictionary, not list"),
        (CYCLE, "metadata"),
    ],
)
def test_a_failed_save_leaves_what_was_there(saved: Path, metadata: Any, named: str) -> None:
    before = contents(saved)
    with pytest.raises(TokenizerError, match=named):
        FastTokenizer.fit(motion(seed=5), vocab_size=150).save_pretrained(saved, metadata=metadata)
    assert contents(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["tok"]


def test_a_full_disk_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)
    write_text = Path.write_text

    def full(self: Path, *arguments: Any, **named: Any) -> int:
        if self.name == "vocabulary.txt":
            raise OSError(28, "No space left on device")
        return write_text(self, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        FastTokenizer.fit(motion(seed=5), vocab_size=150).save_pretrained(saved)
    assert contents(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["tok"]


# Forks a child for every step, which kills itself there; the parent looks at what is left.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from pi0_fast import FastTokenizer
target = Path(sys.argv[1]) / "tok"
chunks = np.sin(np.arange(240.0)).reshape(30, 8, 1)
old, new = (FastTokenizer.fit(chunks, vocab_size=size, num_threads=1) for size in (60, 80))
names = {old.fingerprint: "old", new.fingerprint: "new"}
report, left = [], None
def counted(function):
    def call(*arguments, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments, **named)
    return call
while True:
    for path in target.parent.iterdir():
        shutil.rmtree(path)
    old.save_pretrained(target)
    (target / "mine.txt").write_text("mine")
    child = os.fork()
    if child == 0:
        left = len(report)
        os.rename, os.link, os.mkdir, os.fsync = map(counted, (os.rename, os.link, os.mkdir, os.fsync))
        shutil.rmtree, Path.write_text = counted(shutil.rmtree), counted(Path.write_text)
        new.save_pretrained(target)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    gap = not target.exists()
    found = names[FastTokenizer.from_pretrained(target).fingerprint]
    mine = (target / "mine.txt").read_text()
    new.save_pretrained(target)  # what the kill left is no obstacle
    again = names[FastTokenizer.from_pretrained(target).fingerprint]
    report.append([os.WTERMSIG(status), found, gap, mine, again])
    if status == 0:
        break
print(json.dumps(report))
"""


def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(work)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    signals, found, gaps, mine, again = zip(*report, strict=True)
    assert signals == (9,) * (len(report) - 1) + (0,)
    assert len(report) > 15
    first_new = found.index("new")
    assert set(found[:first_new]) == {"old"}
    assert set(found[first_new:]) == {"new"}
    assert gaps[first_new]  # killed between the two renames: loading has finished the swap
    assert sum(gaps) == 1
    assert set(mine) == {"mine"}
    assert set(again) == {"new"}


# --- no code, and the hub -----------------------------------------------------------------------------------


def test_no_code_of_the_directory_is_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("processing_action_tokenizer.py", "tokenizer.py", "json.py", "numpy.py", "__init__.py", "conftest.py"):
        (saved / name).write_text("raise SystemExit('code of the directory was run')")
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")
    monkeypatch.chdir(saved)
    before = set(sys.modules)
    FastTokenizer.from_pretrained(".")
    FastTokenizer.from_pretrained(saved)
    assert not [
        name for name in set(sys.modules) - before if str(saved) in str(getattr(sys.modules[name], "__file__", ""))
    ]
    probe = "from pi0_fast import FastTokenizer; print(FastTokenizer.from_pretrained('.').vocab_size)"
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    # Python 3.10 has no safe path: there the script's own directory must not be the tokenizer's.
    script = saved.parent / "probe.py"
    script.write_text(probe)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=saved,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "200"), done.stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, saved: Path) -> list[dict[str, Any]]:
    """Calls of snapshot_download, which answers with the saved directory."""
    calls: list[dict[str, Any]] = []

    def answer(repo_id: str, **named: Any) -> str:
        calls.append({"repo_id": repo_id, **named})
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    return calls


def test_the_hub_is_asked_with_every_argument(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tok = FastTokenizer.from_pretrained(
        "physical-intelligence/fast",
        revision="abc",
        token="secret",
        cache_dir=tmp_path / "cache",
        local_files_only=True,
    )
    assert tok.vocab_size == 200
    (call,) = asked
    patterns = call.pop("allow_patterns")
    assert call == {
        "repo_id": "physical-intelligence/fast", "repo_type": "model", "revision": "abc", "token": "secret",
        "cache_dir": tmp_path / "cache", "local_files_only": True,
    }  # fmt: skip

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    for name in (
        "processor_config.json",
        "tokenizer.json",
        "bpe_tokenizer/tokenizer.json",
        "normalizer.json",
        "config.json",
    ):
        assert wanted(name)
    for name in (
        "processing_action_tokenizer.py",
        "pytorch_model.bin",
        "model.safetensors",
        "bpe_tokenizer/x.py",
        "a.pkl",
    ):
        assert not wanted(name)
    FastTokenizer.from_pretrained("owner/name")
    assert (asked[1]["revision"], asked[1]["token"], asked[1]["local_files_only"]) == (None, None, False)


def test_what_is_here_is_never_looked_up(
    asked: list[dict[str, Any]], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent.parent)
    name = f"{saved.parent.name}/{saved.name}"  # looks like owner/name, and is a directory
    assert FastTokenizer.from_pretrained(name).vocab_size == 200
    shutil.rmtree(saved / "bpe_tokenizer")
    (saved / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="holds neither"):
        FastTokenizer.from_pretrained(name)
    (saved.parent / "file").write_text("")
    for missing in (saved / "x", "./owner/name", "~/owner/name", "/owner/name", "../x/y", "name", "a/b/c", "",
                    f"{saved.parent.name}/file", Path("owner/name")):  # fmt: skip
        with pytest.raises(TokenizerError):
            FastTokenizer.from_pretrained(missing)
    assert asked == []


def test_a_hub_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("the cable is out\nand more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HubError, match=r"no model owner/name in the directory .* pass a local directory") as caught:
        FastTokenizer.from_pretrained("owner/name")
    assert "\n" not in str(caught.value)
