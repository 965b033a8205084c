"""The conversion: the tree as Orbax writes it, LoRA, statistics, what is asked for, the command, memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorstore")

from trees import (  # noqa: E402
    ACTION,
    SIZES,
    STATE,
    settings,
    small_tree,
    statistics,
    write_params,
    write_statistics,
    write_tokenizer,
)

from pi0_fast.actions.normalize import NormalizationMode  # noqa: E402
from pi0_fast.checkpoint import read_checkpoint  # noqa: E402
from pi0_fast.cli import main  # noqa: E402
from pi0_fast.convert_config import PRESETS, ConvertConfig, parse_convert  # noqa: E402
from pi0_fast.openpi.convert import convert  # noqa: E402
from pi0_fast.openpi.leaves import ADAPTERS, PLACES, understand  # noqa: E402
from pi0_fast.openpi.orbax import find_params, leaves  # noqa: E402
from pi0_fast.openpi.statistics import cut, find_statistics, normalizer, read_statistics  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.types import PolicyError, UsageError  # noqa: E402

QUERY, OUTPUT = "PaliGemma/llm/layers/attn/q_einsum/w", "PaliGemma/llm/layers/attn/attn_vec_einsum/w"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with params/ and assets/; not to be changed."""
    folder = tmp_path_factory.mktemp("openpi")
    write_params(folder / "params", small_tree())
    write_statistics(folder)
    return folder


def converted(tree: dict[str, np.ndarray], folder: Path, tokenizer: Path, **changes: Any) -> PI0FastPolicy:
    """Write a tree, convert it, load the result."""
    layout = {name: changes.pop(name) for name in ("valued", "ocdbt", "chunks") if name in changes}
    write_params(folder / "checkpoint" / "params", tree, **layout)
    write_statistics(folder / "checkpoint")
    convert(settings(folder / "checkpoint", folder / "out", tokenizer, **changes))
    return PI0FastPolicy.from_pretrained(folder / "out")


# --- the tree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [{}, {"valued": True}, {"ocdbt": False}, {"chunks": 1}, {"chunks": 2}],
    ids=lambda layout: "-".join(layout) or "plain",
)
def test_every_weight_arrives(tmp_path: Path, tokenizer: Path, layout: dict[str, Any]) -> None:
    """Each leaf against openpi's own equations, with numpy; in every layout that Orbax writes."""
    tree = small_tree()
    weights = {
        name: value.numpy() for name, value in converted(tree, tmp_path, tokenizer, **layout).model.state_dict().items()
    }
    random, width = np.random.default_rng(1), SIZES["width"]
    x = random.normal(size=(5, width)).astype(np.float32)
    for layer in range(SIZES["layers"]):
        of = {
            path.removeprefix("PaliGemma/llm/layers/"): values[layer]
            for path, values in tree.items()
            if "/layers/" in path
        }
        ours = {
            name.removeprefix(f"decoder.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        heads = np.einsum("td,ndh->tnh", x, of["attn/q_einsum/w"]).reshape(5, -1)
        np.testing.assert_allclose(x @ ours["self_attn.q_proj.weight"].T, heads, rtol=1e-5, atol=1e-5)
        keys, values = np.einsum("sd,ckdh->cskh", x, of["attn/kv_einsum/w"]).reshape(2, 5, -1)
        np.testing.assert_allclose(x @ ours["self_attn.k_proj.weight"].T, keys, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(x @ ours["self_attn.v_proj.weight"].T, values, rtol=1e-5, atol=1e-5)
        mixed = np.einsum("tnh,nhd->td", heads.reshape(5, SIZES["heads"], -1), of["attn/attn_vec_einsum/w"])
        np.testing.assert_allclose(heads @ ours["self_attn.o_proj.weight"].T, mixed, rtol=1e-5, atol=1e-5)
        for place, name in enumerate(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            np.testing.assert_array_equal(ours[name], of["mlp/gating_einsum"][place].T)
        np.testing.assert_array_equal(ours["mlp.down_proj.weight"], of["mlp/linear"].T)
        np.testing.assert_array_equal(ours["input_layernorm.weight"], of["pre_attention_norm/scale"])
        np.testing.assert_array_equal(ours["post_attention_layernorm.weight"], of["pre_ffw_norm/scale"])
    assert torch.equal(torch.from_numpy(weights["lm_head.weight"]), torch.from_numpy(weights["embed_tokens.weight"]))
    vision = tree["PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/value/kernel"]
    patches = random.normal(size=(4, SIZES["vision_width"])).astype(np.float32)
    for layer in range(SIZES["vision_layers"]):
        found = patches @ weights[f"vision_tower.layers.{layer}.self_attn.v_proj.weight"].T
        np.testing.assert_allclose(
            found, np.einsum("pw,wnh->pnh", patches, vision[layer]).reshape(4, -1), rtol=1e-5, atol=1e-5
        )


def test_the_table_and_the_model_have_the_same_parameters(checkpoint: Path) -> None:
    tree = understand(leaves(find_params(checkpoint)), "here")
    from pi0_fast.model.weights import NAMES

    named = [name for place in PLACES.values() for name in place.names]
    assert sorted(named) == sorted(set(NAMES) - {"lm_head.weight"})
    assert tree.architecture.vision.image_size == 28
    assert tree.architecture.text.num_key_value_heads == 1


def test_bfloat16_in_and_out(tmp_path: Path, tokenizer: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tree = {path: values.astype(ml_dtypes.bfloat16) for path, values in small_tree().items()}
    policy = converted(tree, tmp_path, tokenizer, dtype="bfloat16")
    assert policy.model.embed_tokens.weight.dtype == torch.bfloat16
    assert policy.model.vision_tower.post_layernorm.weight.dtype == torch.float32
    table = tree["PaliGemma/llm/embedder/input_embedding"].astype(np.float32)
    np.testing.assert_array_equal(policy.model.embed_tokens.weight.float().detach().numpy(), table)


def refused(tree: dict[str, np.ndarray], folder: Path) -> str:
    write_params(folder / "params", tree)
    with pytest.raises(PolicyError) as caught:
        understand(leaves(find_params(folder)), "here")
    return str(caught.value)


def test_leaves_that_do_not_match_are_listed(tmp_path: Path) -> None:
    tree = small_tree()
    del tree["PaliGemma/img/head/bias"]
    tree["PaliGemma/llm/extra"] = np.zeros(2, np.float32)
    tree["PaliGemma/llm/final_norm/scale"] = np.zeros(7, np.float32)
    tree["PaliGemma/img/embedding/bias"] = np.zeros(SIZES["vision_width"], np.int32)
    message = refused(tree, tmp_path)
    assert "1 leaves missing: PaliGemma/img/head/bias" in message
    assert "1 leaves unexpected: PaliGemma/llm/extra" in message
    assert "PaliGemma/llm/final_norm/scale [7] instead of [width 16]" in message
    assert "PaliGemma/img/embedding/bias of int32" in message


@pytest.mark.parametrize(
    ("leaf", "hint"),
    [
        ("action_in_proj/kernel", "flow matching"),
        ("PaliGemma/llm/layers/attn/q_einsum_1/w", "flow matching"),
        ("PaliGemma/img/head/lora_a", "merge them in openpi"),
    ],
)
def test_what_a_strange_leaf_means(tmp_path: Path, leaf: str, hint: str) -> None:
    assert hint in refused({**small_tree(), leaf: np.zeros((2, 2), np.float32)}, tmp_path)


def test_damaged_directories(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such directory"):
        find_params(tmp_path / "nothing")
    with pytest.raises(PolicyError, match="download it first"):
        find_params(Path("gs://openpi-assets/checkpoints/pi0_fast_base"))
    (tmp_path / "file").touch()
    with pytest.raises(PolicyError, match="a file, no directory"):
        find_params(tmp_path / "file")
    with pytest.raises(PolicyError, match=r"no checkpoint of openpi, which has params/_METADATA in it; found: file$"):
        find_params(tmp_path)
    for step in ("5000", "29999"):
        (tmp_path / step).mkdir()
    with pytest.raises(PolicyError, match=r"steps of a training run, give one of them \(.*29999\)"):
        find_params(tmp_path)
    write_params(tmp_path / "params", small_tree(), ocdbt=False)
    arrays = leaves(tmp_path / "params")
    (next((tmp_path / "params").glob("*input_embedding")) / "0.0").write_bytes(b"damaged")
    with pytest.raises(PolicyError, match="input_embedding cannot be read, data are missing or damaged"):
        arrays["PaliGemma/llm/embedder/input_embedding"].read()
    next((tmp_path / "params").glob("*final_norm*/.zarray")).unlink()
    with pytest.raises(PolicyError, match="final_norm/scale is named in _METADATA, but cannot be opened"):
        leaves(tmp_path / "params")
    metadata = tmp_path / "params" / "_METADATA"
    for text, message in (
        ("{", "description of an Orbax"),
        ('{"tree_metadata": {}}', "no leaves"),
        (metadata.read_text().replace("jax.Array", "scalar", 1), "is no array but scalar"),
    ):
        metadata.write_text(text)
        with pytest.raises(PolicyError, match=message):
            leaves(tmp_path / "params")


def test_weights_that_are_not_finite(tmp_path: Path, tokenizer: Path) -> None:
    tree = small_tree()
    tree["PaliGemma/llm/layers/mlp/linear"][1, 0, 0] = np.nan
    with pytest.raises(PolicyError, match="mlp/linear, layer 1: weights are not finite"):
        converted(tree, tmp_path, tokenizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"], "nothing was left"


# --- LoRA ---------------------------------------------------------------------------------------------------


def test_adapters_are_merged_as_openpi_computes(tmp_path: Path, tokenizer: Path) -> None:
    """openpi's equations, in which the letter L replaces that of an axis; its mlp has no factor."""
    tree = small_tree(lora=True)
    weights = converted(tree, tmp_path, tokenizer, lora_alpha=6.0).model.state_dict()
    scale, layer = 6.0 / SIZES["rank_attn"], 1
    random = np.random.default_rng(2)
    x = random.normal(size=(1, 5, SIZES["width"])).astype(np.float32)
    mixed = random.normal(size=(1, 5, SIZES["heads"], SIZES["head"])).astype(np.float32)
    inner = random.normal(size=(1, 5, SIZES["mlp"])).astype(np.float32)

    def both(base: str) -> list[np.ndarray]:
        return [tree[path][layer] for path in (base, ADAPTERS[base].down, ADAPTERS[base].up)]

    def ours(name: str, values: np.ndarray) -> np.ndarray:
        return values.reshape(5, -1) @ weights[f"decoder.layers.{layer}.{name}.weight"].numpy().T

    def close(found: np.ndarray, wanted: np.ndarray) -> None:
        np.testing.assert_allclose(found, wanted.reshape(5, -1), rtol=1e-4, atol=1e-4)

    w, a, b = both(QUERY)
    low = np.einsum("BTD,NDL->BTNL", x, a)
    close(ours("self_attn.q_proj", x), np.einsum("BTD,NDH->BTNH", x, w) + scale * np.einsum("BTNL,NLH->BTNH", low, b))
    w, a, b = both("PaliGemma/llm/layers/attn/kv_einsum/w")
    low = np.einsum("BSD,zKDL->zBSKL", x, a)
    pair = np.einsum("BSD,zKDH->zBSKH", x, w) + scale * np.einsum("zBSKL,zKLH->zBSKH", low, b)
    close(ours("self_attn.k_proj", x), pair[0])
    close(ours("self_attn.v_proj", x), pair[1])
    w, a, b = both(OUTPUT)
    low = np.einsum("BTNH,NHL->BTL", mixed, a)
    close(
        ours("self_attn.o_proj", mixed),
        np.einsum("BTNH,NHD->BTD", mixed, w) + scale * np.einsum("BTL,NLD->BTD", low, b),
    )
    w, a, b = both("PaliGemma/llm/layers/mlp/gating_einsum")
    close(ours("mlp.gate_proj", x), x @ w[0] + x @ a[0] @ b[0])
    close(ours("mlp.up_proj", x), x @ w[1] + x @ a[1] @ b[1])
    w, a, b = both("PaliGemma/llm/layers/mlp/linear")
    close(ours("mlp.down_proj", inner), inner @ w + inner @ a @ b)


def test_what_lora_needs_to_be_told(tmp_path: Path, tokenizer: Path, checkpoint: Path) -> None:
    tree = small_tree(lora=True)
    write_params(tmp_path / "checkpoint" / "params", tree)
    write_statistics(tmp_path / "checkpoint")
    given = (tmp_path / "checkpoint", tmp_path / "out", tokenizer)
    with pytest.raises(UsageError, match="--lora_alpha must be given: the checkpoint has LoRA of rank 4"):
        convert(settings(*given))
    for wrong in ({"lora_alpha": 2.0}, {"lora_rank_stabilized": True}):
        with pytest.raises(UsageError, match="have no effect: the checkpoint has no LoRA leaves"):
            convert(settings(checkpoint, tmp_path / "out", tokenizer, **wrong))
    table = dict(row[:2] for row in convert(settings(*given, lora_alpha=2.0, lora_rank_stabilized=True)).decisions)
    assert table["LoRA, merged"] == "5 adapters, rank 4 in attn, rank 5 in mlp; attention's times 1"
    for path in [adapter.up for adapter in ADAPTERS.values()][:1]:
        del tree[path]
    assert "1 leaves missing: PaliGemma/llm/layers/attn/q_einsum/lora_b" in refused(tree, tmp_path / "half")


# --- statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["QUANTILES", "MEAN_STD"])
def test_normalised_values_are_openpis(tmp_path: Path, tokenizer: Path, mode: str) -> None:
    policy = converted(small_tree(), tmp_path, tokenizer, normalization=mode)
    random, stored = np.random.default_rng(3), statistics()
    processors = policy.preparation.processors
    for key, of, size in (("state", processors.state, STATE), ("actions", processors.action, ACTION)):
        values = random.normal(0, 3, (20, size))
        mean, std, q01, q99 = (np.array(stored[key][name][:size]) for name in ("mean", "std", "q01", "q99"))
        wanted = (values - q01) / (q99 - q01 + 1e-6) * 2 - 1 if mode == "QUANTILES" else (values - mean) / (std + 1e-6)
        np.testing.assert_allclose(of.apply(values), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(of.invert(wanted), values, rtol=1e-4, atol=1e-5)
    assert np.abs(processors.action.apply(np.full((1, ACTION), 50.0))).max() > 1, "openpi does not clip"


def test_relative_actions_are_openpis(tmp_path: Path, tokenizer: Path) -> None:
    """Dimensions 0 and 1 less the state's, before normalisation; more than ten names do not contain each other."""
    policy = converted(small_tree(), tmp_path, tokenizer)
    states = np.array([[1.0, -2.0, 3.0, 4.0]], np.float32)
    actions = np.random.default_rng(0).normal(size=(1, 6, 3)).astype(np.float32)
    processors = policy.preparation.processors
    made = processors.normalize_actions(actions, states)
    wanted = processors.action.apply(actions - np.array([1.0, -2.0, 0.0], np.float32))
    np.testing.assert_array_equal(made, wanted)
    np.testing.assert_allclose(processors.restore_actions(made, states), actions, atol=1e-5)
    from pi0_fast.processors import RelativeActions

    names = tuple(f"dim{dim:02}" for dim in range(12))
    assert RelativeActions(12, ("dim01",), names).mask == tuple(dim != 1 for dim in range(12))


def test_dimensions_that_never_move(recwarn: pytest.WarningsRecorder) -> None:
    vectors = {name: np.array([1.0, value]) for name, value in (("q01", 100.0), ("q99", 100.0))}
    vectors["q99"][0] = 2.0
    made = normalizer(vectors, NormalizationMode.QUANTILES, "action")
    assert "action: dimension 1 never moved" in str(recwarn.pop(UserWarning).message)
    np.testing.assert_allclose(made.apply([[1.5, 100.0]]), [[0.0, -1.0]], atol=1e-5)
    np.testing.assert_allclose(made.invert([[0.0, 1.0]]), [[1.5, 100.0]], atol=1e-4)


def test_padding_is_cut_and_nothing_else(tmp_path: Path) -> None:
    stored = read_statistics(write_statistics(tmp_path))
    state = cut(stored["observation.state"], None, "observation.state", "state_dim")
    assert {name: len(values) for name, values in state.items()} == {"mean": 4, "std": 4, "q01": 4, "q99": 4}
    assert len(cut(stored["action"], 5, "action", "action_dim")["q01"]) == 5, "a dimension of zeros may be the robot's"
    with pytest.raises(UsageError, match=r"--action_dim is 2, but dimension 2 of action is no padding \(mean "):
        cut(stored["action"], 2, "action", "action_dim")
    with pytest.raises(UsageError, match="--action_dim is 33, but the statistics of action have 32"):
        cut(stored["action"], 33, "action", "action_dim")
    zeros = {name: np.zeros(3) for name in ("mean", "std")}
    with pytest.raises(UsageError, match="no dimension of the statistics ever moves"):
        cut(zeros, None, "action", "action_dim")


def test_which_statistics(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no norm_stats\.json in .*assets: a checkpoint without statistics cannot act"
    ):
        find_statistics(tmp_path, None, None)
    one = write_statistics(tmp_path, "droid")
    assert find_statistics(tmp_path, None, None) == one
    assert find_statistics(tmp_path / "params", None, None) == one, "params/ itself was given"
    two = write_statistics(tmp_path, "physical-intelligence/libero")
    with pytest.raises(UsageError, match="which with --asset_id: droid, physical-intelligence/libero"):
        find_statistics(tmp_path, None, None)
    assert find_statistics(tmp_path, None, "physical-intelligence/libero") == two
    with pytest.raises(UsageError, match="--asset_id 'ur5': no norm_stats"):
        find_statistics(tmp_path, None, "ur5")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "there are: list"),
        ('{"norm_stats": {"state": {}}}', "there are: state"),
        ('{"state": {}, "actions": {}}', "different lengths, or none"),
        ('{"state": {"mean": [1], "std": [1, 2]}, "actions": {}}', "different lengths"),
        ('{"state": {"mean": ["a"]}, "actions": {}}', "no list of numbers"),
        ('{"state": {"mean": [null]}, "actions": {}}', "no list of finite numbers"),
        ('{"state": 3, "actions": {}}', "no map"),
    ],
)
def test_damaged_statistics(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "norm_stats.json").write_text(content)
    with pytest.raises(PolicyError, match=message):
        read_statistics(tmp_path / "norm_stats.json")


def test_a_mode_without_its_statistics() -> None:
    with pytest.raises(PolicyError, match="QUANTILES needs the statistics q01, q99"):
        normalizer({"mean": np.zeros(2), "std": np.ones(2)}, NormalizationMode.QUANTILES, "action")


# --- the command --------------------------------------------------------------------------------------------


def arguments(checkpoint: Path, output: Path, tokenizer: Path, *more: str) -> list[str]:
    given = settings(checkpoint, output, tokenizer)
    return [
        *("convert", "--from", "openpi", str(checkpoint), str(output), "--action_horizon=6", "--action_dim=3"),
        *(f"--cameras={json.dumps(given.cameras)}", "--relative_dims=0,1", "--normalization=QUANTILES"),
        *(f"--action_tokenizer={tokenizer}", "--text_tokenizer=byte", *more),
    ]


def test_the_command(checkpoint: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(arguments(checkpoint, output, tokenizer)) == 0
    printed, progress = capsys.readouterr()
    assert "MB, done in" in progress
    for text in ("QUANTILES", "3 of 32 dimensions", "dimension 0, 1", "base_0_rgb, base_1_rgb"):
        assert text in " ".join(printed.split())
    assert len({path.stat().st_mode for path in output.iterdir() if path.is_file()}) == 1, (
        "who may read one may read all"
    )
    policy = PI0FastPolicy.from_pretrained(output)
    batch = {
        "observation.state": np.zeros((2, STATE), np.float32),
        "task": "stop",
        "observation.images.base_0_rgb": np.zeros((2, 30, 40, 3), np.uint8),
    }
    assert policy.predict_action_chunk(batch).shape == (2, 6, ACTION)
    assert main(arguments(checkpoint, output, tokenizer)) == 2
    assert "exists: give another output directory, or --overwrite" in capsys.readouterr().err
    before = (output / "config.json").stat().st_mtime_ns
    assert main(arguments(checkpoint, output, tokenizer, "--overwrite")) == 0
    assert (output / "config.json").stat().st_mtime_ns > before
    assert main(arguments(checkpoint, checkpoint, tokenizer, "--overwrite")) == 2
    assert "holds the checkpoint" in capsys.readouterr().err
    read_checkpoint(output)


ASKED = ("action_horizon", "action_dim", "cameras", "relative_dims", "normalization", "action_tokenizer")


def test_what_is_missing_is_asked_for(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it at once, with what each is; a preset is asked for what it leaves open only."""

    def message(*given: str | Path) -> str:
        assert main(["convert", *map(str, given)]) == 2
        assert not list(tmp_path.glob("out*")), "nothing was begun"
        return capsys.readouterr().err

    where = (checkpoint, tmp_path / "out")
    for given, asked in (
        ([], ("from", "checkpoint", "output_dir", *ASKED)),
        (["--from=openpi", *where], ASKED),
        ([checkpoint], ("from", "output_dir", *ASKED)),
        (["--from=openpi", *where, "--preset=libero"], ("normalization",)),
        (["--from=openpi", *where, "--preset=base"], ("action_dim", "relative_dims")),
    ):
        found = message(*given)
        everything = ("from", "checkpoint", "output_dir", *ASKED)
        assert {name for name in everything if f"--{name} (" in found} == set(asked)
        preset = (
            "The preset l" if "libero" in str(given) else "The preset b" if "base" in str(given) else "--preset, one"
        )
        assert preset in found
    assert "pi0_fast_libero acts sensibly with MEAN_STD only" in message("--from=openpi", *where, "--preset=libero")


def test_what_a_checkpoint_makes_necessary_is_asked_for_with_the_rest(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alpha of an unusual LoRA, and which robot's statistics."""
    write_params(tmp_path / "in" / "params", small_tree(lora=True))
    for asset in ("droid", "ur5"):
        write_statistics(tmp_path / "in", asset)
    given = arguments(tmp_path / "in", tmp_path / "out", tokenizer)
    given.remove("--normalization=QUANTILES")
    assert main(given) == 2
    message = capsys.readouterr().err
    for text in ("--normalization (", "--lora_alpha must be given", "which with --asset_id: droid, ur5"):
        assert text in message
    assert "--action_dim (" not in message
    more = ("--normalization=QUANTILES", "--lora_alpha=4", "--asset_id=ur5")
    assert main([*given, *more]) == 0, capsys.readouterr().err


def test_presets() -> None:
    """What openpi's configurations say."""

    def made(*more: str) -> ConvertConfig:
        config = parse_convert(ConvertConfig, ["--from", "openpi", "in", "out", *more], "pi0-fast convert")
        config.validate()
        return config

    droid = made("--preset", "droid")
    assert (droid.setting("action_horizon"), droid.setting("action_dim"), droid.relative_numbers()) == (10, 8, [])
    assert (droid.setting("normalization"), droid.prompt_length()) == ("QUANTILES", 250)
    libero = made("--preset=libero", "--normalization=MEAN_STD", "--action_horizon", "20")
    assert libero.relative_numbers() == [0, 1, 2, 3, 4, 5]
    assert (libero.setting("action_horizon"), libero.setting("action_dim"), libero.prompt_length()) == (20, 7, 180)
    assert made("--preset=libero", "--normalization=MEAN_STD", "--max_token_len=150").prompt_length() == 150
    assert libero.camera_keys()[1] == "observation.images.left_wrist_0_rgb"
    base = made("--preset=base", "--action_dim=14", "--relative_dims=none")
    assert base.setting("action_horizon") == 32
    assert set(PRESETS) == {"base", "droid", "libero"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["third"], "unexpected argument 'third'"),
        (["--checkpoint=other"], "--checkpoint is given twice"),
        (["--cameras=[]"], "--cameras must be different names"),
        (['--cameras=["a", "observation.images.a"]'], "--cameras must be different names"),
        (["--relative_dims=0,0"], "--relative_dims must be numbers"),
        (["--relative_dims=0:2"], "--relative_dims must be numbers"),
        (["--relative_dims=8"], "names dimension 8, but --action_dim is 8"),
        (["--normalization=quantiles"], "did you mean QUANTILES"),
        (["--preset=aloha"], "--preset must be one of"),
        (["--dtype=float16"], "--dtype must be one of"),
        (["--from=lerobot"], "--from"),
        (["--norm_stats=a.json", "--asset_id=b"], "--asset_id has no effect"),
        (["--action_horizon=0"], "--action_horizon must be"),
        (["--max_token_len=0"], "--max_token_len must be"),
        (["--lora_alpha=0"], "--lora_alpha must be above 0"),
    ],
)
def test_wrong_flags(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = [] if any(flag.startswith("--from") for flag in more) else ["--from", "openpi"]
    preset = [] if any(flag.startswith("--preset") for flag in more) else ["--preset=droid"]
    assert main(["convert", *first, "in", "out", *preset, *more]) == 2
    assert message in capsys.readouterr().err


def test_relative_dimensions_that_the_state_lacks(checkpoint: Path, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="action dimension 2 is relative to that of the state, which has 2"):
        convert(settings(checkpoint, tmp_path / "out", tokenizer, relative_dims="2", norm_stats=_two(tmp_path)))


def _two(folder: Path) -> str:
    """Statistics of a state of two dimensions."""
    stored: dict[str, Any] = statistics()
    stored["state"] = {name: values[:2] for name, values in stored["state"].items()}
    (folder / "norm_stats.json").write_text(json.dumps(stored))
    return str(folder / "norm_stats.json")


def test_switches_and_places() -> None:
    """A bare switch does not swallow the directory behind it."""
    for given in (["--overwrite", "in", "out"], ["in", "--overwrite", "out"], ["in", "out", "--overwrite", "true"]):
        made = parse_convert(ConvertConfig, ["--from=openpi", *given], "pi0-fast convert")
        assert (made.checkpoint, made.output_dir, made.overwrite) == ("in", "out", True)
    made = parse_convert(ConvertConfig, ["--from=openpi", "in", "--preset=droid"], "pi0-fast convert")
    assert made.missing() == ["--output_dir (where to write, the second argument that is no flag)"]


def test_places_that_cannot_be_written(
    checkpoint: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before the first weight is read, not after the last."""
    monkeypatch.setattr("pi0_fast.openpi.convert.fill", lambda *_: pytest.fail("weights were read"))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for place, message in (
        ("file", "file exists and is no directory"),
        ("file/out", "file is no directory"),
        ("link", "which is missing"),
    ):
        assert main(arguments(checkpoint, tmp_path / place, tokenizer, "--overwrite")) == 1
        assert message in capsys.readouterr().err


KILLED = """
import os, signal, sys
from pi0_fast import checkpoint
written = checkpoint.write_files
def killed(*given, **named):
    written(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.write_files = killed
from pi0_fast.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_killed_midway(checkpoint: Path, tokenizer: Path, tmp_path: Path) -> None:
    """With all but the last step done there is no directory of that name yet, or the old one is as it was."""
    output = tmp_path / "out"
    for settings_ in ((), ("--overwrite", "--dtype=bfloat16")):
        before = {path.name: path.read_bytes() for path in output.glob("*.*")}
        given = [sys.executable, "-c", KILLED, *arguments(checkpoint, output, tokenizer, *settings_)]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert {path.name: path.read_bytes() for path in output.glob("*.*")} == before
        assert output.exists() == bool(before)
        assert len(list(tmp_path.iterdir())) > bool(before), "what was under way"
        assert main(arguments(checkpoint, output, tokenizer, *settings_)) == 0
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"], "and that is cleared away"
        read_checkpoint(output)


def test_without_the_extra(
    checkpoint: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    assert main(arguments(checkpoint, tmp_path / "out", tokenizer)) == 2
    assert "reading openpi's checkpoints needs tensorstore: pip install 'pi0-fast[openpi]'" in capsys.readouterr().err


MEMORY = """
import re, sys
from pathlib import Path
import torch
import pi0_fast.openpi.convert as module
from pi0_fast.convert_config import ConvertConfig
torch.set_num_threads(1)
filled, before = module.fill, []
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
def measured(*given):
    before.append(peak())
    filled(*given)
module.fill = measured
module.convert(ConvertConfig(**eval(sys.argv[1])))
print(peak() - before[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_near_one_copy(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """0.5 GB of weights in the proportions of the real ones: the mlp's leaf is two fifths of it all.

    In bfloat16 the new weights take half, but the largest leaf still comes in float32, and twice while it is unpacked.
    """
    for name, size in (
        ("width", 512),
        ("mlp", 4096),
        ("layers", 18),
        ("vocabulary", 16_384),
        ("head", 64),
        ("heads", 8),
    ):
        monkeypatch.setitem(SIZES, name, size)
    if not Path("/proc/self/status").is_file():
        pytest.skip("only Linux says what the most memory was")
    tree = small_tree()
    size = sum(values.nbytes for values in tree.values())
    assert size > 450_000_000
    write_params(tmp_path / "checkpoint" / "params", tree)
    write_statistics(tmp_path / "checkpoint")
    given = vars(settings(tmp_path / "checkpoint", tmp_path / "out", tokenizer, dtype=dtype))
    done = subprocess.run([sys.executable, "-c", MEMORY, repr(given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used = int(done.stdout.splitlines()[-1])
    print(f"\n{used / size:.2f} times the weights of {size / 1e9:.2f} GB")
    assert used < 1.25 * size


def test_errors_name_the_flags_of_this_command(
    checkpoint: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    given = arguments(checkpoint, tmp_path / "out", tokenizer)
    given[given.index("--text_tokenizer=byte")] = "--text_tokenizer=nobody/nothing"
    assert main(given) == 1
    message = capsys.readouterr().err
    assert "as --text_tokenizer" in message
    assert "--policy" not in message
