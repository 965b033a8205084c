"""Saved tokenizers in other programs: transformers 4.57.6, 5.5.4 and the newest, without pi0-fast, and lerobot.

PI0_FAST_INTEROP names the environments to run, e.g. ``5.5.4,newest``; they are made when they are not there
(make_environments.py). PI0_FAST_LEROBOT_PYTHON names an interpreter with lerobot 0.6.1. Everything unnamed is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_environments import HUBS, REQUIREMENTS, TRANSFORMERS, make_environment
from tokenizers import Tokenizer

from pi0_fast.actions import layout
from pi0_fast.actions.reference_format import byte_characters
from pi0_fast.actions.tokenizer import FastTokenizer

pytestmark = pytest.mark.interop

NAMED = [name.strip() for name in os.environ.get("PI0_FAST_INTEROP", "").split(",") if name.strip()]
WANTED = [name for name in NAMED if name not in HUBS]  # test_hub.py has those
PROBE = Path(__file__).with_name("probe.py")
# The byte-level kind is one of several in which transformers could change something; all are loaded everywhere.
KINDS = ["plain", "per_dimension", "reference", "dimension_first", "published", "published_fit"]


@dataclass(frozen=True)
class Saved:
    """A tokenizer directory, and what this package makes of some chunks with it.

    Attributes:
        directory: as saved, or as published with the processor file of this package beside it.
        tokenizer: loaded by this package from `directory`.
        chunks: [N, H, D], some of them far outside what was fitted.
        shape: to be passed to decode; empty where the tokenizer has its own.
        texts: symbol strings with every code point alone, first and last.
    """

    directory: Path
    tokenizer: FastTokenizer
    chunks: np.ndarray
    shape: dict[str, int]
    texts: list[str]


def random_walks(seed: int, count: int, horizon: int, size: int) -> np.ndarray:
    steps = np.random.default_rng(seed).normal(0, 0.15, size=(count, horizon, size))
    return np.cumsum(steps, axis=1).astype(np.float32)


def symbol_texts(directory: Path) -> list[str]:
    """Every character that can be written alone, doubled, first and last; white space and controls in rows."""
    content = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    if content["pre_tokenizer"] is None:
        characters = [token for token in vocabulary if len(token) == 1]
    else:
        characters = [chr(byte) for byte, character in enumerate(byte_characters()[:128]) if character in vocabulary]
    around = [text for c in characters for text in (c, c + c, c + "0", "0" + c)]
    blank = [c for c in characters if c.isspace()]
    marks = [c for c in " .  ?  !  ,  '  n't" if c in characters]  # what clean_up_tokenization_spaces would eat
    texts = [characters, characters[::-1], blank, blank[::-1], [" ", *blank, " "], marks]
    return [*around, *("".join(text) for text in texts)]


def save_fitted(directory: Path, scale: float | list[float], symbol_format: Any, order: Any) -> np.ndarray:
    """Fit on random walks of [10, 14] and save; returns chunks to try."""
    walks = random_walks(0, 600, 10, 14)
    tokenizer = FastTokenizer.fit(walks, scale=scale, vocab_size=512, symbol_format=symbol_format, order=order)
    tokenizer.save_pretrained(directory)
    wild = np.random.default_rng(1).normal(0, 3, size=(8, 10, 14)).astype(np.float32)
    return np.concatenate([walks[:32], 4 * walks[:8], wild, np.zeros((1, 10, 14), np.float32)])


def publish(source: Path, directory: Path) -> None:
    """Copy a published tokenizer into the layout of this package, byte-level vocabulary unchanged."""
    settings = json.loads((source / "processor_config.json").read_text())
    saved = {key: settings[key] for key in ("scale", "vocab_size", "min_token", "time_horizon", "action_dim")}
    contents = {
        layout.PROCESSOR_CONFIG: layout.processor_config(**saved),
        layout.PREPROCESSOR_CONFIG: layout.preprocessor_config(),
        layout.CONFIG: layout.config(symbol_format="reference", **saved),
        layout.TOKENIZER_CONFIG: layout.tokenizer_config(),
        f"{layout.BPE_FOLDER}/{layout.TOKENIZER_CONFIG}": layout.tokenizer_config(),
    }
    (directory / layout.BPE_FOLDER).mkdir(parents=True)
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content))
    for folder in (directory, directory / layout.BPE_FOLDER):
        shutil.copy(source / layout.TOKENIZER, folder)
    shutil.copy(layout.PROCESSING_SOURCE, directory)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Saved]:
    """Saved tokenizers by kind; each is made once."""
    made: dict[str, Saved] = {}

    def make(kind: str) -> Saved:
        directory = tmp_path_factory.mktemp(kind) / "tokenizer"
        shape: dict[str, int] = {}
        if kind.startswith("published"):
            shared: Path = request.getfixturevalue("shared")
            fit = shared / "golden" / "reference_fit_g1_h16"
            chunks = np.load(fit / "vectors.npz")["chunks"]
            publish(fit if kind == "published_fit" else shared / "assets" / "fast_plus", directory)
            if kind == "published":
                shape = {"time_horizon": 16, "action_dim": 26}
        else:
            scale = [5.0 + d for d in range(14)] if kind == "per_dimension" else 10.0
            chunks = save_fitted(
                directory,
                scale,
                "reference" if kind == "reference" else "plain",
                "dimension" if kind == "dimension_first" else "frequency",
            )
        tokenizer = FastTokenizer.from_pretrained(directory)
        return Saved(directory, tokenizer, chunks, shape, symbol_texts(directory))

    def get(kind: str) -> Saved:
        if kind not in made:
            made[kind] = make(kind)
        return made[kind]

    return get


@pytest.fixture(scope="session", params=WANTED or ["no environment"])
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of one of the environments."""
    if not WANTED:
        pytest.skip(f"PI0_FAST_INTEROP names no environments; there are {', '.join(TRANSFORMERS)}")
    assert request.param in REQUIREMENTS, f"PI0_FAST_INTEROP names {request.param}; there are {list(REQUIREMENTS)}"
    return make_environment(request.param)


def run(python: Path, arguments: list[str], directory: Path, **variables: str) -> str:
    """Run isolated (-I: no PYTHONPATH, no user packages), offline, warnings as errors; returns what it printed.

    Anything on stderr is a failure: loading must not print warnings.
    """
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PI0_FAST_", "HF_"))
    }
    environment |= {
        "HF_HOME": str(directory / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that torch is not there
        **variables,
    }
    done = subprocess.run(
        [str(python), "-I", "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@dataclass(frozen=True)
class Probed:
    """What probe.py found: `report` as in its dictionary of that name, `values` its arrays."""

    saved: Saved
    report: dict[str, Any]
    values: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, saved: Callable[[str], Saved]) -> Callable[[Path, str], Probed]:
    """probe.py's findings by interpreter and kind; each is run once."""
    found: dict[tuple[Path, str], Probed] = {}

    def probe(python: Path, kind: str) -> Probed:
        if (python, kind) not in found:
            what, directory = saved(kind), tmp_path_factory.mktemp("probe")
            np.save(directory / "chunks.npy", what.chunks)
            job = {
                "directory": str(what.directory),
                "chunks": str(directory / "chunks.npy"),
                "texts": what.texts,
                "shape": list(what.shape.values()) or None,
                "again": str(directory / "again"),
                "results": str(directory / "results"),
            }
            (directory / "job.json").write_text(json.dumps(job))
            run(python, [str(PROBE), str(directory / "job.json")], directory)
            with np.load(directory / "results.npz") as values:
                report = json.loads((directory / "results.json").read_text())
                found[python, kind] = Probed(what, report, dict(values))
        return found[python, kind]

    return probe


@pytest.fixture(params=KINDS)
def probed(request: pytest.FixtureRequest, python: Path, results: Callable[[Path, str], Probed]) -> Probed:
    """Each kind of tokenizer in each environment."""
    return results(python, request.param)


def test_the_environment_is_foreign(probed: Probed, python: Path) -> None:
    assert probed.report["pi0_fast is there"] is False
    wanted = REQUIREMENTS[python.parent.parent.name][0].removeprefix("transformers")
    if wanted.startswith("=="):
        assert probed.report["transformers"] == wanted.removeprefix("==")
    else:
        assert [int(n) for n in probed.report["transformers"].split(".")[:2]] >= [5, 24]


def test_ids_are_the_same(probed: Probed) -> None:
    assert probed.report["ids"] == probed.saved.tokenizer.encode(probed.saved.chunks)


def test_ids_do_not_depend_on_the_kind_of_array(probed: Probed) -> None:
    for ids in probed.report["ids of other layouts"]:
        assert ids == probed.report["ids"]


def test_values_are_the_same(probed: Probed) -> None:
    expected = probed.saved.tokenizer.decode(probed.report["ids"], **probed.saved.shape)
    values = probed.values
    assert values["decoded"].dtype == expected.dtype == np.float32
    np.testing.assert_allclose(values["decoded"], expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_array_equal(values["one flat"], values["decoded"][0])
    np.testing.assert_array_equal(values["flat array"], values["decoded"][0])
    np.testing.assert_array_equal(values["kept special"], values["decoded"])


def test_lerobots_arithmetic_gives_the_same_values(probed: Probed) -> None:
    if probed.saved.tokenizer.order == "frequency":
        np.testing.assert_allclose(probed.values["as lerobot"], probed.values["decoded"], rtol=0, atol=3e-6)
    else:  # which that arithmetic does not know, and must not get wrong in silence
        assert "this action tokenizer flattens in the order 'dimension'" in probed.report["as lerobot"]


def test_every_saved_field_comes_back(probed: Probed) -> None:
    written = json.loads((probed.saved.directory / layout.PROCESSOR_CONFIG).read_text())
    fields = probed.report["fields"]
    assert probed.report["class"] == written["processor_class"]
    assert fields == {key: written[key] for key in fields}
    assert set(written) - set(fields) == {"auto_map", "processor_class"}


def test_saving_there_keeps_fields_and_ids(probed: Probed) -> None:
    assert probed.report["fields again"] == probed.report["fields"]
    assert probed.report["ids again"] == probed.report["ids"]


def test_no_symbol_is_stripped_or_altered(probed: Probed) -> None:
    """White space and control characters are coefficients like any others, at the start and end of a string too."""
    own = Tokenizer.from_file(str(probed.saved.directory / layout.TOKENIZER))
    assert probed.report["texts"] == probed.saved.texts
    assert probed.report["text ids"] == [own.encode(text).ids for text in probed.saved.texts]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("short", r"row 1: the (\d+ ids hold \d+ coefficients, a chunk needs \d+|ids break off inside coefficient)"),
        ("long", r"row 1: the (\d+ ids hold \d+ coefficients, a chunk needs \d+|ids break off inside coefficient)"),
        ("foreign", r"row 1, position \d+: id \d+ is outside the vocabulary \[0, \d+\)"),
        ("negative", r"row 0, position 0: id -1 is outside the vocabulary"),
        ("fractions", r"token ids must be .* of whole numbers"),
        ("number", r"token ids must be a list of id lists or one flat list, not 7"),
        ("nan", r"the action in row 1, step 2, dimension 3 is nan"),
        ("infinite", r"the action in row 1, step 2, dimension 3 is -inf"),
        ("beyond float32", r"the action in row 1, step 2, dimension 3 is inf"),
        ("text", r"action chunks must be numbers, not <U"),
        ("no steps", r"action chunks have shape \[\d+, 0, \d+\]"),
        ("one step", r"action chunks have shape \[\d+\]; needed is"),
        ("order", r"order 'zigzag' is not known"),
        ("scale", r"scale must be one positive number"),
    ],
)
def test_bad_input_is_an_error(probed: Probed, what: str, message: str) -> None:
    assert re.match(f"ValueError: {message}", probed.report["errors"][what]), probed.report["errors"][what]


def test_no_chunks_are_no_ids(probed: Probed) -> None:
    assert probed.report["of nothing"] == [[], [0, *probed.saved.chunks.shape[1:]]]


def test_shapes_that_contradict_the_tokenizer_are_errors(probed: Probed) -> None:
    found = probed.report["errors"]
    if probed.saved.shape:  # it takes any shape; then the count of coefficients is wrong
        assert found["fewer dimensions"] == "nothing"
        assert re.match(r"ValueError: .*pass decode\(ids, action_dim=", found["other horizon"])
    else:
        assert re.match(r"ValueError: chunks of shape \[\d+, \d+\] given to a tokenizer of", found["fewer dimensions"])
        assert re.match(r"ValueError: time_horizon=\d+ contradicts the tokenizer", found["other horizon"])


@pytest.mark.golden
@pytest.mark.parametrize(
    ("kind", "folder", "prefixes"),
    [
        ("published", "fast_plus", ["so101_h10_", "so101_h50_", "g1_h16_", "g1_h50_"]),
        ("published_fit", "reference_fit_g1_h16", [""]),
    ],
)
def test_recorded_ids_of_published_tokenizers(
    python: Path,
    saved: Callable[[str], Saved],
    shared: Path,
    tmp_path: Path,
    kind: str,
    folder: str,
    prefixes: list[str],
) -> None:
    code = """
import sys
import numpy as np
from transformers import AutoProcessor
tokenizer = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
recorded = np.load(sys.argv[2])
for prefix in sys.argv[3:]:
    chunks, tokens, lengths, decoded = (recorded[prefix + key] for key in ("chunks", "tokens", "lengths", "decoded"))
    ids = tokenizer(chunks)
    assert [len(row) for row in ids] == lengths.tolist()
    assert np.concatenate(ids).tolist() == tokens.tolist()
    values = tokenizer.decode(ids, time_horizon=chunks.shape[1], action_dim=chunks.shape[2])
    print(np.abs(values - decoded).max() < 1e-6)
"""
    vectors = str(shared / "golden" / folder / "vectors.npz")
    printed = run(python, ["-c", code, str(saved(kind).directory), vectors, *prefixes], tmp_path)
    assert printed.split() == ["True"] * len(prefixes)


SNIPPET = """
from transformers import AutoProcessor

# From local directory
tokenizer = AutoProcessor.from_pretrained(
    "./my_tokenizer",
    trust_remote_code=True
)

import numpy as np

# Action chunk: [horizon, action_dim]
action_chunk = np.random.randn(10, 14)

# Encode to tokens
tokens = tokenizer(action_chunk[None])[0]  # Add batch dim
print(f"Tokens: {tokens}")  # e.g., [123, 456, 789, ...]
print(f"Compression: {action_chunk.size} -> {len(tokens)} tokens")

# Decode tokens back to actions
reconstructed = tokenizer.decode(tokens)
print(f"Reconstructed shape: {reconstructed.shape}")  # (10, 14)

# Check reconstruction error
error = np.abs(action_chunk - reconstructed).mean()
print(f"Mean absolute error: {error:.4f}")
"""


@pytest.mark.parametrize("kind", ["plain", "per_dimension", "reference"])
def test_the_documented_snippet(python: Path, saved: Callable[[str], Saved], tmp_path: Path, kind: str) -> None:
    shutil.copytree(saved(kind).directory, tmp_path / "my_tokenizer")
    printed = run(python, ["-c", SNIPPET], tmp_path)
    assert "Reconstructed shape: (10, 14)\n" in printed
    assert re.search(r"Compression: 140 -> \d+ tokens\n", printed)
    assert float(printed.split("Mean absolute error: ")[1]) < 0.1


def test_one_version_reads_what_another_saves(python: Path, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """The processor's own save_pretrained writes for all versions, not only for its own; and for this package."""
    again = tmp_path / "again"
    code = """
import sys
import numpy as np
from transformers import AutoProcessor
tokenizer = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
if sys.argv[2]:
    tokenizer.save_pretrained(sys.argv[2])
print(tokenizer(np.load(sys.argv[3])))
"""
    what = saved("plain")
    np.save(tmp_path / "chunks.npy", what.chunks)
    expected = what.tokenizer.encode(what.chunks)
    run(python, ["-c", code, str(what.directory), str(again), str(tmp_path / "chunks.npy")], tmp_path)
    for name in WANTED:
        other = make_environment(name)
        printed = run(other, ["-c", code, str(again), "", str(tmp_path / "chunks.npy")], tmp_path)
        assert json.loads(printed) == expected, name
    assert FastTokenizer.from_pretrained(again).encode(what.chunks) == expected


LEROBOT = """
import sys
import shim_torchvision
shim_torchvision.install()
from types import SimpleNamespace
import numpy as np
import torch
from transformers import AutoProcessor
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy
from lerobot.processor.tokenizer_processor import ActionTokenizerProcessorStep

directory, text_tokenizer, chunks, output = sys.argv[1:]
chunks = torch.from_numpy(np.load(chunks))
step = ActionTokenizerProcessorStep(
    action_tokenizer_name=directory, paligemma_tokenizer_name=text_tokenizer, max_action_tokens=600
)
tokens, mask = step._tokenize_action(chunks)
assert not mask[:, -1].any(), "a chunk was cut"
policy = PI0FastPolicy.__new__(PI0FastPolicy)
torch.nn.Module.__init__(policy)
policy.config = SimpleNamespace(validate_action_token_prefix=False, fast_skip_tokens=step.fast_skip_tokens)
policy.action_tokenizer = AutoProcessor.from_pretrained(directory, trust_remote_code=True)
policy._paligemma_tokenizer = step._paligemma_tokenizer
actions = policy.detokenize_actions(tokens[:, 1:], action_horizon=chunks.shape[1], action_dim=chunks.shape[2])
as_tensor = policy.action_tokenizer(chunks.double().requires_grad_())
ids = [row.tolist() for row in map(torch.tensor, as_tensor)]
back = policy.action_tokenizer.decode([torch.tensor(row) for row in ids])
np.savez(output, actions=actions.numpy(), back=back, one=policy.action_tokenizer.decode(torch.tensor(ids[0])))
"""


@pytest.mark.parametrize("kind", ["plain", "per_dimension", "reference"])
def test_lerobots_policy_turns_the_ids_into_the_same_actions(
    saved: Callable[[str], Saved], shared: Path, tmp_path: Path, kind: str
) -> None:
    """lerobot 0.6.1's own training step writes the ids into a prompt, its policy reads them out and decodes them."""
    interpreter = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not interpreter:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    what = saved(kind)
    np.save(tmp_path / "chunks.npy", what.chunks)
    text_tokenizer = shared / "golden" / "lerobot_checkpoint" / "tokenizers" / "text_tok_4096"
    arguments = [str(what.directory), str(text_tokenizer), str(tmp_path / "chunks.npy"), str(tmp_path / "actions.npz")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    # The shared directory is read-only: an import from it must not leave bytecode there.
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(shared / "tools")
    done = subprocess.run(
        [interpreter, "-c", LEROBOT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Error decoding tokens" not in done.stderr
    expected = what.tokenizer.decode(what.tokenizer.encode(what.chunks))
    with np.load(tmp_path / "actions.npz") as found:
        np.testing.assert_allclose(found["actions"], expected, rtol=0, atol=3e-6)
        np.testing.assert_allclose(found["back"], expected, rtol=0, atol=3e-6)
        np.testing.assert_array_equal(found["one"], found["back"][0])
