"""Several datasets in one run: what a batch of them is, what they have in common, and what each keeps."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from tiny_runs import PIXELS, arguments, build_dataset, weights, write_architecture  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.data.writer import LeRobotWriter  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY  # noqa: E402
from pi0_fast.train_config import DatasetConfig, TrainConfig, parse_train  # noqa: E402
from pi0_fast.training.metrics import read_metrics  # noqa: E402
from pi0_fast.training.mixture import MixedPreparation  # noqa: E402
from pi0_fast.training.setup import Run, set_up  # noqa: E402
from pi0_fast.types import PolicyError, UsageError  # noqa: E402

TOP, WRIST = "observation.images.top", "observation.images.wrist"

pytestmark = pytest.mark.usefixtures("one_thread")


def build_other(root: Path) -> Path:
    """Another robot: two joints, five numbers of state, another frame rate, and two cameras of other sizes."""
    random = np.random.default_rng(1)
    features = {
        "state": {"dtype": "float32", "shape": [5]},
        "move": {"dtype": "float32", "shape": [2], "names": ["left", "right"]},
        TOP: {"dtype": "image", "shape": [PIXELS, PIXELS, 3]},
        WRIST: {"dtype": "image", "shape": [20, 36, 3]},
    }
    with LeRobotWriter(root, fps=25, features=features) as writer:
        for length in (16, 12):
            state = random.normal(0, 3, (length, 5)).astype(np.float32)
            columns = {
                "state": state,
                "move": np.cumsum(state[:, :2], axis=0),
                TOP: random.integers(0, 256, (length, PIXELS, PIXELS, 3), np.uint8),
                WRIST: random.integers(0, 256, (length, 20, 36, 3), np.uint8),
            }
            writer.add_episode(columns, task="push")
    return root


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    build_dataset(folder / "data")
    write_architecture(folder / "sizes.json")
    build_other(folder / "other")
    return folder


def line(home: Path, output: Path, **flags: object) -> list[str]:
    given = {
        "dataset.repo_id": '["lab/arm","lab/push"]',
        "dataset.root": json.dumps([str(home / "data"), str(home / "other")]),
        "dataset.state_key": '["observation.state","state"]',
        "dataset.action_key": '["action","move"]',
        "batch_size": 5,
        **flags,
    }
    return arguments(home, output, **given)


def run(home: Path, output: Path, **flags: object) -> Run:
    config = parse_train(TrainConfig, line(home, output, **flags)[1:], "pi0-fast train")
    config.validate()
    return set_up(config.resolved())


@pytest.fixture(scope="module")
def made(home: Path) -> Run:
    return run(home, home / "unused", **{"dataset.weights": "[0.5, 0.5]"})


def test_each_dataset_keeps_its_dimensions_and_units(made: Run) -> None:
    arm, push = made.datasets
    assert [each.member.name for each in made.datasets] == ["lab_arm", "lab_push"]
    assert arm.policy.model is push.policy.model
    assert [each.policy.config.action_dim for each in made.datasets] == [3, 2]
    assert [each.policy.config.state_dim for each in made.datasets] == [4, 5]
    assert arm.policy.config.image_keys == push.policy.config.image_keys == (TOP, WRIST)
    assert arm.columns.missing_cameras == (WRIST,)
    assert push.columns.missing_cameras == ()
    assert push.policy.config.action_feature_names == ["left", "right"]
    tokenizers = [each.policy.preparation.action_tokenizer for each in made.datasets]
    assert [tokenizer.action_dim for tokenizer in tokenizers] == [3, 2]
    for each in made.datasets:
        processors = each.policy.preparation.processors
        np.testing.assert_allclose(processors.state.statistics["q99"], each.statistics[STATE_KEY].q99, rtol=1e-6)
        np.testing.assert_allclose(processors.action.statistics["q99"], each.statistics[ACTION_KEY].q99, rtol=1e-6)


def test_the_loss_of_a_joined_batch_is_that_of_its_rows(made: Run) -> None:
    """Beside each dataset's rows alone, without any joining: the mean weighted by target ids."""
    made.policy.eval()
    with made.batches(0, 3) as batches, torch.no_grad():
        for step, joined in enumerate(batches):
            loss, info = made.policy(joined)
            indices, _ = made.sampler(5).batch(step)
            assert joined.dataset_of_row is not None
            assert joined.states.shape[1] == 5
            total = units = 0.0
            for number, each in enumerate(made.datasets):
                first = number * len(made.train_frames)
                rows = [i - first for i in indices.tolist() if first <= i < first + len(each.train_frames)]
                batch = each.train_frames.batch(rows)
                whole = np.flatnonzero(~batch["action_is_pad"].any(axis=1))
                if len(whole) == 0:
                    assert float(info["dataset_losses"][number, 1]) == 0
                    continue
                own, alone = each.policy(
                    {k: [v[r] for r in whole] if isinstance(v, list) else v[whole] for k, v in batch.items()}
                )
                ours = info["dataset_losses"][number]
                assert float(ours[0] / ours[1]) == pytest.approx(float(own), rel=1e-5)
                total, units = total + float(own) * alone["target_ids"], units + alone["target_ids"]
            assert float(loss) == pytest.approx(total / units, rel=1e-5)
            assert float(info["dataset_losses"][:, 0].sum()) == pytest.approx(float(loss), rel=1e-5)
            assert float(info["dataset_losses"][:, 1].sum()) == pytest.approx(1, rel=1e-5)


def test_rows_see_only_the_cameras_of_their_dataset(made: Run) -> None:
    with made.batches(0, 1) as batches:
        (joined,) = batches
    assert joined.cameras == (TOP, WRIST)
    assert joined.dataset_of_row is not None
    np.testing.assert_array_equal(
        joined.camera_valid, np.stack([joined.dataset_of_row >= 0, joined.dataset_of_row == 1], axis=1)
    )
    assert joined.images is not None
    assert torch.all(joined.images[joined.dataset_of_row == 0, 1] == -1)
    # What lies there changes nothing.
    made.policy.eval()
    with torch.no_grad():
        before, _ = made.policy(joined)
        joined.images[joined.dataset_of_row == 0, 1] = 0.7
        assert torch.equal(made.policy(joined)[0], before)
        joined.images[joined.dataset_of_row == 1, 1] = 0.7
        assert not torch.equal(made.policy(joined)[0], before)


@pytest.mark.parametrize(
    "flags",
    [
        {"policy.prompt_format": "openpi"},
        {"policy.attend_missing_cameras": "true"},
        {"policy.count_padding_in_positions": "true"},
        {"policy.empty_cameras": 1, "policy.attend_missing_cameras": "true"},
        {"policy.use_relative_actions": "true", "policy.action_feature_names": '["a","b","c"]'},
    ],
)
def test_the_variants_of_prompts_and_cameras(home: Path, tmp_path: Path, flags: dict[str, object]) -> None:
    """A joined batch of one dataset's rows is that dataset's batch, whatever else could be in it."""
    made = run(home, tmp_path / "out", **flags, **{"dataset.whole_chunks": "true"})
    made.policy.eval()
    for number, each in enumerate(made.datasets):
        batch = each.train_frames.batch([0, 3, 9])
        joined = MixedPreparation([one.policy.preparation for one in made.datasets]).training([(number, batch)])
        with torch.no_grad():
            alone, _ = each.policy(batch)
            loss, info = made.policy(joined)
        assert float(loss) == pytest.approx(float(alone), rel=1e-5)
        np.testing.assert_allclose(info["dataset_losses"][number], [float(alone), 1], rtol=1e-5)


def test_a_run_saves_each_robot_and_resumes_to_the_last_bit(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"dataset.weights": "[3, 1]", "eval_freq": 4, "dataset.val_fraction": 0.3, "max_eval_samples": 6}
    flags |= {"steps": 4, "save_freq": 3, "log_freq": 2}
    assert main(line(home, tmp_path / "whole", **flags)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert re.search(r"step 4: on \d+ held-out frames of lab_push loss", printed)
    assert re.search(r"step 4: on all \d+ of them loss", printed)
    check_report(tmp_path / "whole" / "report.json", printed)
    lines = [each for each in read_metrics(tmp_path / "whole") if each["kind"] == "train"]
    for each in lines:
        assert set(each["dataset_losses"]) == {"lab_arm", "lab_push"}
        assert (
            min(each["dataset_losses"].values()) - 1e-6 <= each["loss"] <= max(each["dataset_losses"].values()) + 1e-6
        )
    measured = [each for each in read_metrics(tmp_path / "whole") if each["kind"] == "validation"][-1]
    parts = measured["datasets"]
    assert [len(parts[name]["action_l1_by_dimension"]) for name in ("lab_arm", "lab_push")] == [3, 2]
    units = [parts[name]["loss_units"] for name in parts]
    assert measured["loss"] == pytest.approx(np.average([parts[name]["loss"] for name in parts], weights=units))

    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "000004")
    (tmp_path / "cut" / "checkpoints" / "last").unlink()
    assert main(["train", "--resume=true", f"--output_dir={tmp_path / 'cut'}"]) == 0
    printed = capsys.readouterr()
    assert "at step 3 of 4" in printed.out
    assert "will differ" not in printed.err
    assert weights(tmp_path / "cut", 4) == weights(tmp_path / "whole", 4)
    for name in ("loss", "dataset_losses"):
        assert [each[name] for each in read_metrics(tmp_path / "cut") if each["kind"] == "train"] == [
            each[name] for each in lines
        ]
    check_robots(tmp_path / "whole" / "checkpoints" / "last" / "pretrained_model", tmp_path)


def test_a_run_that_begins_with_a_mixture_takes_the_parts_of_its_own_datasets(home: Path, tmp_path: Path) -> None:
    """Not those of the checkpoint's first dataset, which would fit where robots have as many joints."""
    build_dataset(tmp_path / "twin", (12, 15))  # as many dimensions, other values
    both = {"dataset.repo_id": '["lab/arm","lab/twin"]', "dataset.state_key": "observation.state"}
    both |= {"dataset.action_key": "action"}
    roots = {"dataset.root": json.dumps([str(home / "data"), str(tmp_path / "twin")])}
    made = run(home, tmp_path / "out", **both, **roots)
    start = tmp_path / "start"
    start.mkdir()
    made.save_model(start)
    prints = {each.member.name: each.policy.checkpoint().fingerprints() for each in made.datasets}
    assert prints["lab_arm"]["action_tokenizer"] != prints["lab_twin"]["action_tokenizer"]

    def begun(**flags: object) -> Run:
        drop = ("--policy.type", "--policy.arch", "--policy.text", "--policy.auto", "--policy.fast")
        text = [each for each in line(home, tmp_path / "x", **flags) if not each.startswith(drop)]
        text.append(f"--policy.path={start}")
        return set_up(parse_train(TrainConfig, text[1:], "pi0-fast train").resolved())

    for again in (
        begun(**both, **roots),
        begun(**{**both, "dataset.repo_id": "lab/twin", "dataset.root": tmp_path / "twin"}),
        begun(
            **{**both, "dataset.repo_id": "lab/twin", "dataset.root": tmp_path / "twin"},
            **{"policy.statistics": "checkpoint"},
        ),
    ):
        for each in again.datasets:
            assert each.policy.checkpoint().fingerprints() == prints[each.member.name]
            (decision,) = (found for found in each.decisions if found.what == "action tokenizer")
            assert decision.why == f"that of {each.member.name} there"
    other = begun(**{**both, "dataset.repo_id": "lab/new", "dataset.root": tmp_path / "twin"})
    (decision,) = (found for found in other.decisions if found.what == "action tokenizer")
    assert decision.why == "that of lab_arm, the first dataset there"
    with pytest.raises(PolicyError, match=r"fitted on 3 dimensions, and the actions of lab/push have 2 \(--policy\.au"):
        begun()
    shutil.rmtree(start / "robots" / "lab_twin" / "tokenizers" / "action")
    shutil.copytree(start / "tokenizers" / "action", start / "robots" / "lab_twin" / "tokenizers" / "action")
    with pytest.raises(PolicyError, match="twin/action tokenizer has the fingerprint"):
        begun(**both, **roots)


def check_report(file: Path, printed: str) -> None:
    content = json.loads(file.read_text())
    arm, push = content["mixture"]
    assert (arm["dataset"], arm["weight"], arm["share"]) == ("lab_arm", 3, 0.75)
    assert (push["episodes"], push["fps"], push["chunk_s"]) == (1, 25, 4 / 25)
    assert push["ids_per_chunk"] == content["further"]["lab_push"]["tokens"]["target ids, mean"]
    assert content["further"]["lab_push"]["data"]["dataset"].startswith("lab/push")
    assert content["data"]["dataset"].startswith("lab/arm")
    assert "lab_push: Tokens" in printed
    assert printed.count(": Parameters") == 1


def check_robots(saved: Path, tmp_path: Path) -> None:
    files = sorted(str(path.relative_to(saved)) for path in (saved / "robots" / "lab_push").rglob("*.safetensors"))
    assert not any("model" in Path(name).name for name in files), "no weights"
    first = PI0FastPolicy.from_pretrained(saved)
    assert first.config.action_dim == 3
    assert PI0FastPolicy.from_pretrained(saved, robot="lab/arm").config == first.config
    push = PI0FastPolicy.from_pretrained(saved, robot="lab/push")
    assert (push.config.action_dim, push.config.state_dim) == (2, 5)
    for name, value in push.model.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[name])
    observation = {
        TOP: np.zeros((PIXELS, PIXELS, 3), np.uint8),
        WRIST: np.zeros((20, 36, 3), np.uint8),
        "state": np.zeros(5, np.float32),
        "task": "push",
    }
    chunk = push.predict_action_chunk(observation)
    assert chunk.shape == (1, 4, 2)
    # Saved by itself it is a policy like any other, also where the whole mixture was.
    shutil.copytree(saved, tmp_path / "alone")
    push.save_pretrained(tmp_path / "alone")
    assert not (tmp_path / "alone" / "robots").exists()
    again = PI0FastPolicy.from_pretrained(tmp_path / "alone")
    assert torch.equal(again.predict_action_chunk(observation), chunk)
    with pytest.raises(PolicyError, match="no robot 'lab_push'; it was trained on one dataset"):
        PI0FastPolicy.from_pretrained(tmp_path / "alone", robot="lab_push")
    with pytest.raises(PolicyError, match="no robot 'x'; it has lab_arm, lab_push"):
        PI0FastPolicy.from_pretrained(saved, robot="x")
    # Parts of another run's robot are noticed.
    other = shutil.copytree(saved, tmp_path / "mixed")
    shutil.rmtree(other / "robots" / "lab_push" / "tokenizers" / "action")
    shutil.copytree(saved / "tokenizers" / "action", other / "robots" / "lab_push" / "tokenizers" / "action")
    with pytest.raises(PolicyError, match=r"chunks of 4 steps and 3 dimensions|robots/lab_push/tokenizers/action"):
        PI0FastPolicy.from_pretrained(other, robot="lab_push")
    PI0FastPolicy.from_pretrained(other)


def test_a_shared_tokenizer_is_bound_to_each_robot(home: Path, tmp_path: Path) -> None:
    """Fitted on both, without dimensions and units, it takes those of each dataset."""
    command = [
        "train-tokenizer",
        '--repo_id=["lab/arm","lab/push"]',
        f"--root={json.dumps([str(home / 'data'), str(home / 'other')])}",
        '--action_key=["action","move"]',
        "--action_horizon=4",
        "--vocab_size=128",
        f"--output_dir={tmp_path / 'shared'}",
    ]
    assert main(command) == 0
    made = run(home, tmp_path / "out", **{"policy.action_tokenizer_name": tmp_path / "shared"})
    first, second = (each.policy.preparation.action_tokenizer for each in made.datasets)
    assert first.vocabulary.to_json() == second.vocabulary.to_json()
    assert [(each.time_horizon, each.action_dim) for each in (first, second)] == [(4, 3), (4, 2)]
    for each in made.datasets:
        statistics = each.policy.preparation.processors.action.statistics
        np.testing.assert_allclose(statistics["q99"], each.statistics[ACTION_KEY].q99, rtol=1e-6)
    with made.batches(0, 1) as batches:
        loss, _ = made.policy(next(batches))
    assert torch.isfinite(loss)
    folder = tmp_path / "saved"
    folder.mkdir()
    made.save_model(folder)
    push = PI0FastPolicy.from_pretrained(folder, robot="lab_push")
    assert push.preparation.action_tokenizer.fingerprint == second.fingerprint


def test_a_checkpoint_goes_on_to_a_mixture(made: Run, home: Path, tmp_path: Path) -> None:
    """The policy of the second robot: its cameras are the policy's, and the first dataset lacks one."""
    second = made.datasets[1].policy
    second.save_pretrained(tmp_path / "start")
    flags = {"policy.path": tmp_path / "start", "rename_map": json.dumps({WRIST: WRIST})}
    new = ("policy.type", "policy.architecture", "policy.text_tokenizer_name")
    text = [each for each in line(home, tmp_path / "out", **flags) if each.partition("=")[0][2:] not in new]
    config = parse_train(TrainConfig, text[1:], "pi0-fast train")
    config.validate()
    again = set_up(config.resolved())
    assert again.policy.config.image_keys == (TOP, WRIST)
    assert again.columns.missing_cameras == (WRIST,)
    assert torch.equal(again.policy.model.projector.weight, second.model.projector.weight)
    assert [each.policy.config.action_dim for each in again.datasets] == [3, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dataset.weights": "[1]"}, "--dataset.weights has 1 entries for 2 datasets"),
        ({"dataset.weights": "[1, 0]"}, "--dataset.weights must be above 0"),
        ({"dataset.root": "data"}, r"--dataset.root must be a list with one for each dataset"),
        ({"dataset.episodes": "[0, 1]"}, r"--dataset.episodes must be a list with one for each .*\[\[0, 1\], null\]"),
        ({"dataset.episodes": "[[0, 9], null]"}, "lab/arm has no episode 9"),
        ({"dataset.episodes": "[null, [1, 1]]"}, "--dataset.episodes names 1 twice"),
        ({"dataset.cameras": f'[["{TOP}"],["nothing"]]'}, "'nothing' is no image column of lab/push"),
        ({"rename_map": '{"nothing": "x"}'}, "none of the datasets lab/arm, lab/push has a column 'nothing'"),
        ({"rename_map": "[{}, {}, {}]"}, "--rename_map has 3 entries for 2 datasets"),
        ({"dataset.repo_id": "lab/arm"}, "is a list for several datasets, but there is one|names one"),
    ],
)
def test_what_does_not_fit_is_refused(home: Path, tmp_path: Path, flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(home, tmp_path / "out", **flags)


def test_cameras_and_names_of_each_dataset(home: Path, tmp_path: Path) -> None:
    """One camera of one dataset, under another name; some episodes of the other."""
    renames = [{TOP: "observation.images.front"}, {WRIST: "observation.images.front"}]
    made = run(
        home,
        tmp_path / "out",
        **{"dataset.cameras": json.dumps([[TOP], [WRIST]]), "rename_map": json.dumps(renames)},
        **{"dataset.episodes": "[[0, 2], null]"},
    )
    assert made.policy.config.image_keys == ("observation.images.front",)
    assert [each.train_frames.episodes for each in made.datasets] == [(0, 2), (0, 1)]
    assert [each.columns.cameras for each in made.datasets] == [(TOP,), (WRIST,)]
    with made.batches(0, 1) as batches:
        joined = next(batches)
    assert joined.camera_valid.all()


def test_names_of_directories_are_different() -> None:
    members = DatasetConfig(["a/b", "a/c", "a/b", "../x"]).members(None)
    assert [member.name for member in members] == ["a_b", "a_c", "a_b-2", "_x"]
    for ids, names in (
        (["lab/a", "lab_a"], "'lab/a' and 'lab_a' would both be 'lab_a'"),
        (["lab/a", "Lab/A"], "'lab/a' and 'Lab/A' would both be 'Lab_A'"),
        (["lab/a", "lab/a", "lab_a-2"], "'lab/a' and 'lab_a-2' would both be 'lab_a-2'"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"--dataset.repo_id: {names} in the checkpoint: give one")):
            DatasetConfig(ids).validate()


def test_a_run_of_other_datasets_is_not_resumed(made: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoints" / "000002" / "pretrained_model"
    folder.mkdir(parents=True)
    (folder.parent / "training_state").mkdir()
    (folder.parent / "training_state" / "training_step.json").write_text("{}")
    made.save_model(folder)
    made.config.write(folder)
    resume = ["--resume=true", f"--output_dir={tmp_path / 'out'}"]
    again = set_up(parse_train(TrainConfig, resume, "pi0-fast train").resolved())
    assert [each.policy.config.action_dim for each in again.datasets] == [3, 2]
    assert again.datasets[1].policy.model is again.policy.model
    assert again.conditions() == made.conditions()
    other = [*resume, '--dataset.repo_id=["lab/arm","lab/other"]']
    with pytest.raises(UsageError, match="the run has the datasets lab_arm, lab_push, the command names lab_arm, lab_"):
        set_up(parse_train(TrainConfig, other, "pi0-fast train").resolved())


def test_adapters_of_a_mixture(made: Run, home: Path, tmp_path: Path) -> None:
    """They are saved with the parts of each robot, resumed, and merged to a checkpoint of all robots."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("peft")
    from pi0_fast.training.lora import merge_adapters

    made.policy.save_pretrained(tmp_path / "start")
    dropped = ("policy.type", "policy.architecture", "policy.text_tokenizer_name")
    text = line(home, tmp_path / "out", **{"policy.path": tmp_path / "start", "peft.r": 2}, steps=2)
    assert main([each for each in text if each.partition("=")[0][2:] not in dropped]) == 0
    saved = tmp_path / "out" / "checkpoints" / "000002" / "pretrained_model"
    assert not (saved / "model.safetensors").exists()
    assert main(["train", "--resume=true", f"--output_dir={tmp_path / 'out'}", "--steps=3"]) == 0
    merge_adapters(saved, tmp_path / "merged")
    push = PI0FastPolicy.from_pretrained(tmp_path / "merged", robot="lab_push")
    assert push.config.action_dim == 2
    (saved / "robots" / "lab_push" / "tokenizers" / "action").rename(tmp_path / "own")
    shutil.copytree(saved / "tokenizers" / "action", saved / "robots" / "lab_push" / "tokenizers" / "action")
    with pytest.raises(PolicyError, match=r"chunks of 4 steps and 3 dimensions"):
        merge_adapters(saved, tmp_path / "again")


def test_a_recorded_humanoid_trains_with_another_robot(shared: Path, home: Path, tmp_path: Path) -> None:
    """26 dimensions and a video (v2.1) beside two joints, each in its own units."""
    recorded = shared / "data" / "g1_inspire_video_v21"
    made = run(
        home,
        tmp_path / "out",
        **{"dataset.root": json.dumps([str(recorded), str(home / "other")]), "dataset.weights": "[1, 1]"},
        **{"dataset.repo_id": '["local/g1","lab/push"]', "policy.tokenizer_max_length": 400},
        batch_size=4,
    )
    assert [each.policy.config.action_dim for each in made.datasets] == [26, 2]
    with made.batches(7, 8) as batches:
        joined = next(batches)
    assert joined.dataset_of_row is not None
    assert set(joined.dataset_of_row.tolist()) == {0, 1}
    loss, info = made.policy(joined)
    loss.backward()
    assert torch.isfinite(loss)
    assert bool((info["dataset_losses"] > 0).all())
    cameras = [{each.columns.policy_name(key) for key in each.columns.cameras} for each in made.datasets]
    assert not cameras[0] & cameras[1]
    for row, number in enumerate(joined.dataset_of_row.tolist()):
        seen = {name for name, valid in zip(joined.cameras, joined.camera_valid[row], strict=True) if valid}
        assert seen == cameras[number]


def test_a_dataset_without_cameras_is_refused(home: Path, tmp_path: Path) -> None:
    with LeRobotWriter(
        tmp_path / "blind",
        fps=10,
        features={
            "observation.state": {"dtype": "float32", "shape": [2]},
            "action": {"dtype": "float32", "shape": [2]},
        },
    ) as writer:
        values = np.zeros((12, 2), np.float32)
        writer.add_episode({"observation.state": values, "action": values}, task="push")
    flags = {
        "dataset.root": json.dumps([str(home / "data"), str(tmp_path / "blind")]),
        "dataset.state_key": "observation.state",
        "dataset.action_key": "action",
    }
    with pytest.raises(UsageError, match=r"lab/push has no camera, but the policy looks at observation.images.top"):
        run(home, tmp_path / "out", **flags)
