"""Weights in files: lerobot's names, shared and separate heads, shards, every way a file can be wrong, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from pi0_fast.model import weights  # noqa: E402
from pi0_fast.model.architecture import Architecture  # noqa: E402
from pi0_fast.model.tiny import tiny_paligemma  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402

TINY = Architecture.tiny(300)
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
TABLE = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
PROJECTOR = "model.paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias"


def same(first, second) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.fixture
def saved(tmp_path: Path):
    """A model with separate head and table, its directory, and its tensors under lerobot's names."""
    model = tiny_paligemma(3, vocab_size=300, tied_head=False)
    weights.save(model, tmp_path, {"fingerprint": "abc"})
    return model, tmp_path, safetensors_torch.load_file(tmp_path / "model.safetensors")


@pytest.mark.golden
@pytest.mark.parametrize("name", ["pi0fast_tiny", "lerobot_checkpoint", "lerobot_checkpoint_relative"])
def test_lerobots_keys_exactly(shared: Path, tmp_path: Path, name: str) -> None:
    """What lerobot wrote loads, every tensor of it, and is written back under the same names with the same numbers."""
    directory = shared / "golden" / name
    config = directory / ("config.json" if name == "pi0fast_tiny" else "architecture.json")
    sizes = json.loads(config.read_text())
    model = weights.load(directory, Architecture.from_json({"text": sizes["text"], "vision": sizes["vision"]}))
    assert not model.tied_head
    weights.save(model, tmp_path, {})
    written = safetensors_torch.load_file(tmp_path / "model.safetensors")
    original = safetensors_torch.load_file(directory / "model.safetensors")
    assert set(written) == set(original)
    assert all(torch.equal(written[key], original[key]) for key in original)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [None, 20_000, 1])
def test_round_trip(tmp_path: Path, tied: bool, dtype, shard: int | None) -> None:
    model = tiny_paligemma(1, vocab_size=300, dtype=dtype, tied_head=tied)
    files = weights.save(model, tmp_path, {"fingerprint": "abc"}, max_shard_bytes=shard)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert (len(files) == 1) == (shard is None)
    loaded = weights.load(tmp_path, TINY, dtype)
    assert same(loaded, model)
    assert loaded.tied_head == tied
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    with weights.safe_open(files[0], framework="pt") as handle:
        assert handle.metadata() == {"fingerprint": "abc", "format": "pt"}


def test_both_keys_are_written_for_a_shared_head(tmp_path: Path) -> None:
    weights.save(tiny_paligemma(vocab_size=300), tmp_path, {})
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors[HEAD], tensors[TABLE])


@pytest.mark.parametrize("absent", [HEAD, TABLE])
def test_one_key_means_shared(saved, absent: str) -> None:
    model, directory, tensors = saved
    del tensors[absent]
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    loaded = weights.load(directory, TINY)
    assert loaded.tied_head
    kept = model.embed_tokens.weight if absent == HEAD else model.lm_head.weight
    assert torch.equal(loaded.embed_tokens.weight, kept)
    assert sum(1 for _ in loaded.parameters()) == sum(1 for _ in model.parameters()) - 1


def test_prefix_may_be_left_out_and_a_file_be_named(saved) -> None:
    model, directory, tensors = saved
    file = directory / "other.safetensors"
    safetensors_torch.save_file({key.removeprefix("model."): value for key, value in tensors.items()}, file)
    assert same(weights.load(file, TINY), model)


def test_other_formats_are_converted(saved) -> None:
    model, directory, tensors = saved
    safetensors_torch.save_file({key: value.half() for key, value in tensors.items()}, directory / "model.safetensors")
    loaded = weights.load(directory, TINY, torch.bfloat16)
    expected = model.embed_tokens.weight.half().bfloat16()
    assert torch.equal(loaded.embed_tokens.weight, expected)
    assert torch.equal(loaded.projector.weight, model.projector.weight.half().float())


def test_every_difference_is_listed(saved) -> None:
    _, directory, tensors = saved
    del tensors[PROJECTOR]
    tensors["model.extra"] = torch.zeros(1)
    tensors[HEAD] = torch.zeros(300, 63)
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(PolicyError) as caught:
        weights.load(directory, TINY)
    message = str(caught.value)
    assert f"1 keys missing: {PROJECTOR}" in message
    assert "1 unexpected: model.extra" in message
    assert f"1 of another shape: {HEAD} [300, 63] instead of [300, 64]" in message
    # A wrong shape stays an error when strictness is off.
    with pytest.raises(PolicyError, match=r"\[300, 63\] instead of"):
        weights.load(directory, TINY, strict=False)


def test_not_strict_says_what_it_did(saved) -> None:
    model, directory, tensors = saved
    missing = PROJECTOR.replace("bias", "weight")
    del tensors[missing]
    tensors["model.extra"] = torch.zeros(1)
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    with pytest.warns(UserWarning, match=r"(?s)1 keys missing: .*linear\.weight; 1 unexpected: model\.extra"):
        loaded = weights.load(directory, TINY, strict=False)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.projector.weight.std() > 0.05


def test_neither_head_nor_table(saved) -> None:
    _, directory, tensors = saved
    del tensors[HEAD], tensors[TABLE]
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(PolicyError, match="2 keys missing"):
        weights.load(directory, TINY)


def test_bad_files_are_named(saved) -> None:
    _, directory, tensors = saved
    with pytest.raises(PolicyError, match=r"neither model.safetensors nor .*; found: no such directory"):
        weights.load(directory / "nothing", TINY)
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PolicyError, match="only safetensors files are read"):
        weights.load(directory / "pytorch_model.bin", TINY)
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for damaged in (b"", b"abc", content[:200], content[:-5], content + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(PolicyError, match=r"model\.safetensors: no readable safetensors file"):
            weights.load(directory, TINY)
    safetensors_torch.save_file({**tensors, PROJECTOR: torch.zeros(64, dtype=torch.int32)}, file)
    with pytest.raises(PolicyError, match=r"linear\.bias holds I32 numbers"):
        weights.load(directory, TINY)
    file.unlink()
    with pytest.raises(PolicyError, match=r"found: \['pytorch_model.bin'\]"):
        weights.load(directory, TINY)


def test_bad_shards_are_named(saved) -> None:
    model, directory, _ = saved
    (directory / "model.safetensors").unlink()
    weights.save(model, directory, {}, max_shard_bytes=100_000)
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())
    places = index["weight_map"]

    def check(changed: dict, message: str) -> None:
        index_file.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(PolicyError, match=message):
            weights.load(directory, TINY)

    check({**places, PROJECTOR: "../else.safetensors"}, "no plain file name")
    check({**places, PROJECTOR: "absent.safetensors"}, r"are missing: \['absent.safetensors'\]")
    other = next(name for name in places.values() if name != places[PROJECTOR])
    check({**places, PROJECTOR: other}, r"index and the file disagree about .*linear\.bias")
    index_file.write_text("{}")
    with pytest.raises(PolicyError, match="damaged index"):
        weights.load(directory, TINY)


def test_initialize_is_deterministic_and_sized() -> None:
    first, again, other = (weights.initialize(TINY, seed=seed) for seed in (5, 5, 6))
    assert same(first, again)
    assert not same(first, other)
    hidden = first.hidden_states(
        first.embed(torch.arange(50)[None]), torch.ones(1, 1, 50, 50, dtype=torch.bool), torch.arange(50)[None]
    )
    assert 0.5 < first.logits(hidden).std() < 2
    assert same(weights.initialize(TINY, torch.bfloat16, 5), tiny_paligemma(5, vocab_size=300, dtype=torch.bfloat16))


MEMORY = """
import resource, sys, torch
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
architecture = Architecture(VisionSizes(32, 1, 2, 64), TextSizes(512, 8, 2048, 4, 1, 64, vocab_size=8192))
if sys.argv[1] == "write":
    weights.save(weights.initialize(architecture), sys.argv[2], {})
else:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = weights.load(sys.argv[2], architecture, dtype=getattr(torch, sys.argv[3]))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(sum(value.nbytes for value in model.parameters()), (after - before) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in other units elsewhere")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_little_more_memory_than_the_weights(tmp_path: Path, dtype: str) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", MEMORY, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run("write", str(tmp_path))
    size, peak = map(int, run("read", str(tmp_path), dtype).split())
    assert size > (120_000_000 if dtype == "float32" else 60_000_000)
    # The largest tensor of the file is mapped while it is copied: 17 MB here. And 30 MB for everything else.
    assert peak < size + 47_000_000
