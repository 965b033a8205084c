"""The whole story on one machine: record a simulated arm, fit a tokenizer on it, show what it measures.

`pi0-fast demo`. The arm has three links in a plane and a gripper; it reaches for random targets along minimum-jerk
paths and closes its gripper there. Everything lies in the output directory: a LeRobot v3.0 dataset, the tokenizer, and
summary.json. Left out: physics, images, and a policy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.configs import DemoConfig, TokenizerTrainingConfig
from pi0_fast.data import LeRobotReader, LeRobotWriter, open_dataset
from pi0_fast.display import print_table, progress, say
from pi0_fast.fitting import train_tokenizer
from pi0_fast.types import Feature, UsageError

DoubleArray = npt.NDArray[np.float64]

FPS = 30
EPISODES = 60
HORIZON = 16
LINKS = np.array([0.30, 0.25, 0.15])  # metres
JOINTS = ("shoulder.pos", "elbow.pos", "wrist.pos", "gripper.pos")
REPO_ID = "local/reaching_arm"
ROBOT_TYPE = "planar_arm"
#: Share of the way to the commanded position that a joint makes in one frame.
RESPONSE = 0.35
#: Of the positions that the arm measures, in radians.
SENSOR_NOISE = 0.002


def run(config: DemoConfig) -> None:
    """Run the demo.

    Raises:
        UsageError: the output directory holds an earlier demo (without `overwrite`), or files of the same names that
            no demo made (which are never replaced).
    """
    config.validate()
    output = Path(config.output_dir).expanduser()
    dataset, tokenizer, summary = output / "dataset", output / "tokenizer", output / "summary.json"
    _check_output(dataset, tokenizer, summary, overwrite=config.overwrite)
    say(f"1. Recording {EPISODES} reaches of a simulated arm ({len(JOINTS)} joints, {FPS} Hz) to {dataset}\n")
    record(dataset, seed=config.seed, overwrite=config.overwrite)
    say("\n2. Fitting a FAST tokenizer on them\n")
    result = train_tokenizer(
        TokenizerTrainingConfig(
            repo_id=REPO_ID,
            root=str(dataset),
            action_horizon=HORIZON,
            sample_fraction=1.0,
            vocab_size=512,
            output_dir=str(tokenizer),
            overwrite=config.overwrite,
            seed=config.seed,
        )
    )
    for title, rows, headers in result.tables():
        print_table(title, rows, headers)
    say("\n3. One held-out chunk, there and back\n")
    held_out = result.metadata["held_out"]["episodes"][0]
    _show_chunk(open_dataset(REPO_ID, root=dataset), held_out, FastTokenizer.from_pretrained(tokenizer))
    summary.write_text(json.dumps(result.metadata, indent=2) + "\n", encoding="utf-8")
    say(f"\nThe tokenizer is in {tokenizer}, and what was measured in {summary}.")


def _check_output(dataset: Path, tokenizer: Path, summary: Path, *, overwrite: bool) -> None:
    """Each of the three is new or, with `overwrite`, has the mark of a demo in its json."""
    marks = (
        (dataset, dataset / "meta" / "info.json", "robot_type", ROBOT_TYPE),
        (tokenizer, tokenizer / "metadata.json", "repo_id", REPO_ID),
        (summary, summary, "repo_id", REPO_ID),
    )
    for path, file, key, value in marks:
        if not os.path.lexists(path):
            continue
        if _value(file, key) != value:
            raise UsageError(f"{path} exists and is not of an earlier demo; give another --output_dir")
        if not overwrite:
            raise UsageError(f"{path.parent} holds an earlier demo; give another --output_dir, or --overwrite")


def _value(file: Path, key: str) -> Any:
    """What a json file says under a key; None where that cannot be read, which is no mark of a demo."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get(key) if isinstance(content, dict) else None


def record(root: Path, *, seed: int, overwrite: bool = False, episodes: int = EPISODES) -> None:
    """Write a LeRobot v3.0 dataset of reaching trajectories; the same seed gives the same dataset."""
    names = Feature("", "float32", (len(JOINTS),), JOINTS)
    features = {"action": names, "observation.state": names}
    random = np.random.default_rng(seed)
    with (
        LeRobotWriter(root, fps=FPS, features=features, robot_type=ROBOT_TYPE, overwrite=overwrite) as writer,
        progress("recording", episodes, "episodes") as advance,
    ):
        for _ in range(episodes):
            actions, states = reach(random)
            columns = {"action": actions, "observation.state": states}
            writer.add_episode(columns, task="Reach for the target and close the gripper.")
            advance()


def reach(random: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """One episode: commanded positions [T, 4] and measured positions [T, 4], in radians (the gripper from 0 to 1)."""
    start = np.array([0.4, 0.9, 0.4]) + random.normal(0.0, 0.15, 3)
    frames = int(random.integers(45, 90))
    time = np.linspace(0.0, 1.0, frames)
    smooth = 10 * time**3 - 15 * time**4 + 6 * time**5  # minimum jerk (Flash and Hogan 1985)
    begin = hand(start)
    radius, angle = random.uniform(0.25, 0.6), random.uniform(-0.3, 1.6)
    target = radius * np.array([np.cos(angle), np.sin(angle)])
    joints = np.empty((frames, 3))
    pose = start
    for t in range(frames):
        pose = follow(pose, begin + smooth[t] * (target - begin))
        joints[t] = pose
    grasp = int(random.integers(12, 20))
    closing = np.linspace(1.0, 0.0, grasp)[:, None]
    reaching = np.hstack([joints, np.ones((frames, 1))])
    grasping = np.hstack([np.repeat(joints[-1:], grasp, axis=0), closing])
    actions = np.vstack([reaching, grasping])
    states = np.empty_like(actions)
    measured = actions[0].copy()
    for t, command in enumerate(actions):
        states[t] = measured + random.normal(0.0, SENSOR_NOISE, len(JOINTS))
        measured += RESPONSE * (command - measured)
    return actions.astype(np.float32), states.astype(np.float32)


def hand(joints: DoubleArray) -> DoubleArray:
    """Position [2] of the hand in metres, for joint angles [3] in radians."""
    angles = np.cumsum(joints)
    return np.array([LINKS @ np.cos(angles), LINKS @ np.sin(angles)])


def follow(joints: DoubleArray, target: DoubleArray) -> DoubleArray:
    """Joint angles near `joints` that bring the hand to `target` [2], by damped least squares."""
    for _ in range(8):
        angles = np.cumsum(joints)
        steps = np.array([-LINKS * np.sin(angles), LINKS * np.cos(angles)])
        jacobian = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
        error = target - hand(joints)
        joints = joints + jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-3 * np.eye(2), error)
    return joints


def _show_chunk(reader: LeRobotReader, index: int, tokenizer: FastTokenizer) -> None:
    episode = next(iter(reader.iter_episodes(["action"], [index])))
    normalizer = tokenizer.normalizer
    assert normalizer is not None
    chunk = episode.columns["action"][episode.length // 3 :][:HORIZON]
    ids = tokenizer.encode(normalizer.apply(chunk))[0]
    restored = normalizer.invert(tokenizer.decode(ids))
    say(f"{chunk.size} numbers of episode {index} become {len(ids)} tokens: {ids}")
    rows = [
        [step, *(f"{chunk[step, d]:.3f} / {restored[step, d]:.3f}" for d in range(len(JOINTS)))]
        for step in range(0, HORIZON, 3)
    ]
    print_table("Recorded / decoded", rows, ["step", *JOINTS])
