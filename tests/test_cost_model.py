"""The formulae of memory and time against what torch counts, and against numbers worked out by hand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes  # noqa: E402
from pi0_fast.model.paligemma import PaliGemma  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = Architecture(VisionSizes(64, 2, 2, 128, 56, 14), TextSizes(128, 8, 512, 4, 1, 32, vocab_size=4096))


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("scaling")
    torch.set_num_threads(threads)


@pytest.fixture
def cost_model(scaling: ModuleType) -> ModuleType:
    return importlib.import_module(scaling.Parameters.__module__)


@pytest.mark.parametrize("variant", ["gemma_2b", "gemma_300m", "tiny"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(scaling: ModuleType, variant: str, tied: bool) -> None:
    sizes = Architecture.tiny() if variant == "tiny" else Architecture.variant(variant)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with torch.device("meta"):
            model = PaliGemma(sizes, tied_head=tied, dtype=dtype)
        found = scaling.Parameters.of(sizes, tied_head=tied)
        assert found.total == sum(parameter.numel() for parameter in model.parameters())
        assert found.weight_bytes(name) == sum(parameter.nbytes for parameter in model.parameters())


def test_adapters_have_the_parameters_of_the_formula(cost_model: ModuleType) -> None:
    pytest.importorskip("peft")
    from pi0_fast.model.weights import initialize
    from pi0_fast.train_config import PeftConfig
    from pi0_fast.training.lora import add_adapters

    model = initialize(Architecture.tiny())
    add_adapters(model, PeftConfig(r=4), seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == cost_model.lora_parameters(Architecture.tiny().text, 4)


def test_kept_bytes_and_operations_equal_what_torch_counts(
    scaling: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling.check_layers()  # ends the process where they differ
    assert capsys.readouterr().out.count("\n") == 6


def test_a_wrong_formula_ends_the_run(scaling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "text_saved_bytes", lambda *_: 1)
    with pytest.raises(SystemExit, match="the formula is wrong"):
        scaling.check_layers()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_training_step(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: str, checkpointing: bool
) -> None:
    monkeypatch.setattr(scaling, "SMALL", SMALL)
    counted, said = scaling.check_peak(dtype, checkpointing, scaling.Load(rows=8, cameras=2, prompt=16, target=16))
    assert counted == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_with_adapters(scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(scaling, "SMALL", SMALL)
    load = scaling.Load(rows=8, cameras=2, prompt=16, target=16)
    counted, said = scaling.check_peak("bfloat16", checkpointing, load, rank=4)
    # What frozen norms need not keep is left out of the formula.
    assert counted == pytest.approx(said, rel=0.05 if checkpointing else 0.2)


def test_traffic_is_what_operations_read_and_write(scaling: ModuleType) -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    weight = torch.zeros(4, 4)
    forward, backward = scaling.traffic_of(lambda: (x @ weight).view(12).mul(2.0))
    assert forward == 2 * 48  # the product and the view are left out
    assert backward == 2 * 48


def test_traffic_of_the_constants(scaling: ModuleType) -> None:
    """Small widths, scaled up: bytes per column are proportional to the widths but for a few numbers per head."""
    tenth = Architecture(VisionSizes(288, 1, 4, 1076, 56, 14), TextSizes(256, 1, 2048, 8, 1, 32, vocab_size=16))
    found = scaling.measure_traffic(tenth)
    assert found.text == pytest.approx(scaling.TRAFFIC.text / 8, rel=0.03)
    assert found.text_backward == pytest.approx(scaling.TRAFFIC.text_backward / 8, rel=0.03)
    assert found.vision == pytest.approx(scaling.TRAFFIC.vision / 4, rel=0.03)
    assert found.vision_backward == pytest.approx(scaling.TRAFFIC.vision_backward / 4, rel=0.03)


def test_memory_by_hand(scaling: ModuleType, cost_model: ModuleType) -> None:
    sizes, load = Architecture.variant("gemma_2b"), scaling.Load(rows=32)
    full = scaling.training_memory(sizes, load, scaling.Training())
    total = scaling.Parameters.of(sizes).total
    assert total == 2_923_335_408
    # A bfloat16 parameter and a float32 one both take 16 bytes.
    assert full.weights + full.state + full.gradients == 16 * total
    # 632 columns of 32 rows, 18 layers' inputs in bfloat16; 512 patches, 27 layers' inputs in float32.
    assert full.activations == 32 * (632 * 18 * 2048 * 2 + 512 * 27 * 1152 * 4)
    eighth = scaling.training_memory(sizes, load, scaling.Training(gpus=8))
    assert eighth.weights + eighth.state + eighth.gradients == 2 * total
    assert eighth.activations == full.activations
    assert eighth.peak < full.peak / 2
    lora = scaling.training_memory(sizes, load, scaling.Training(rank=16))
    assert lora.state == 12 * cost_model.lora_parameters(sizes.text, 16)
    assert lora.peak < full.peak / 3


def test_lora_parameters_by_hand(cost_model: ModuleType) -> None:
    text = TextSizes(8, 3, 32, 4, 1, 2, vocab_size=16)
    # q, o: 8 + 8; k, v: 8 + 2; gate, up, down: 8 + 32
    assert cost_model.lora_parameters(text, 5) == 3 * 5 * (2 * 16 + 2 * 10 + 3 * 40)


def test_time_by_hand(scaling: ModuleType) -> None:
    sizes = Architecture.variant("gemma_2b")
    gpu = scaling.GPUS["H200"]
    one = scaling.Load(rows=1)
    token = scaling.generation_time(sizes, one, gpu).token
    # 1.98 billion bfloat16 parameters, 1,024 head rows, norms, a cache of 632 columns, at 0.8 x 4.8 TB/s.
    read = 2 * (1_981_808_640 + 1024 * 2048) + 4 * 75_776 + 2 * 18 * 256 * 2 * 632
    assert token == pytest.approx(read / (0.8 * 4.8e12))
    load = scaling.Load(rows=32)
    slow = scaling.training_time(sizes, load, scaling.Training(), gpu, scaling.TRAFFIC)
    quick = scaling.training_time(sizes, load, scaling.Training(), gpu, scaling.TRAFFIC, tf32=True)
    assert slow.vision / quick.vision == pytest.approx(494 / 67)
    assert slow.decoder == quick.decoder
    plain = scaling.training_time(sizes, load, scaling.Training(checkpointing=False), gpu, scaling.TRAFFIC)
    assert plain.decoder == pytest.approx(0.75 * slow.decoder)
    assert slow.link == 0
    spread = scaling.training_time(sizes, load, scaling.Training(gpus=8), gpu, scaling.TRAFFIC)
    assert spread.link == pytest.approx(3 * 6_676_429_760 * 7 / 8 / (0.7 * 450e9))
    assert spread.update == pytest.approx(slow.update / 8)


def test_tables_leave_out_what_does_not_fit(scaling: ModuleType) -> None:
    lines = scaling.tables(scaling.Load(rows=32), scaling.TRAFFIC)
    (full,) = [line for line in lines if line.startswith("| full |")]
    cells = [cell.strip() for cell in full.split("|")[2:-1]]
    assert cells[:2] == ["-", "-"]  # 24 and 48 GB
    assert all(cell.endswith(" s") for cell in cells[2:])


def test_the_page_shows_what_the_script_prints(scaling: ModuleType) -> None:
    page = (REPOSITORY / "docs/scaling.md").read_text()
    for line in scaling.tables(scaling.Load(rows=32), scaling.TRAFFIC):
        assert line in page, line
    readme = (REPOSITORY / "README.md").read_text()
    for line in scaling.short_memory_table(Architecture.variant("gemma_2b")):
        assert line in readme, line


def test_data_at_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("av")
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    data_scaling = importlib.import_module("data_scaling")
    data_scaling.make_dataset(tmp_path / "made")
    rates = data_scaling.measure(tmp_path / "made", 20)
    assert (rates.fps, rates.cameras) == (30, 1)
    # 14 + 14 float32 and a few numbers of a frame; on disk two of float32 or their dictionary, with six more columns.
    assert 2 * 14 * 4 <= rates.held_bytes < 2 * 14 * 4 + 100
    assert 2 * 14 * 4 <= rates.number_bytes < 1000
    assert rates.video_bytes == pytest.approx(
        sum(path.stat().st_size for path in (tmp_path / "made/videos").rglob("*.mp4")) / 160
    )
    lines = data_scaling.table(
        data_scaling.Rates(10, 2, 100, 1e4, 200, 400, 100, 1e5, 2e4, 30.0), hours=1000, rows_per_s=50
    )
    cells = dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    assert cells["frames"] == "36,000,000"
    assert cells["disk, numbers"] == "4 GB"
    assert cells["disk, video"] == "0.7 TB"
    assert cells["memory of a training process, numbers"] == "7 GB"
    assert cells["decoding every picture once, in random order"] == "200.0 core hours"
    assert cells["reading all numbers"] == "360.0 s of one core"
    assert cells["cores that decode for 50 rows/s"] == "1.0"
