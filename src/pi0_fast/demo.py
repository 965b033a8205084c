"""The whole story on one computer without a GPU: demonstrations in a simulator, tokenizer, policy, closed loop.

`pi0-fast demo`. Each chapter is a command that can be typed; it is printed before it runs, and nothing else is done.
The policy is a small one with two cameras and a vocabulary of its own; docs/demo.md says what comes out. All lies in
one directory:

    dataset/          recorded with a scripted expert (`record`)
    tokenizer/        fitted on it (`train-tokenizer`), and tokenizer_report/ (`inspect`)
    policy/           the run that trained the policy (`train`), and blind_policy/ without images (--blind)
    evaluation/       the policy in the simulator (`eval`); free_evaluation/ without constrained decoding,
                      told_otherwise/TASK/ with another task's text, blind_evaluation/
    demo.json, demo.html, demo.md, demo.png     what was measured, for programs, for people, and for the README

Left out: everything that the commands do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pi0_fast.configs import DemoConfig
from pi0_fast.display import print_table, say
from pi0_fast.parsing import nearest
from pi0_fast.reports.demo import THE_POLICY, Story, Told, Variant, write_story
from pi0_fast.sims import preflight, task_names, task_text
from pi0_fast.sims.rendering import APT_PACKAGES
from pi0_fast.types import SimulatorError, UsageError

FORMAT = {"format": "pi0-fast-demo", "version": 1}
RESULTS_FILE, PAGE_FILE = "demo.json", "demo.html"
ARCHITECTURE_FILE, TOLD_OTHERWISE = "architecture.json", "told_otherwise"
#: Everything that a demo writes into its directory; only this is ever replaced.
OWN = (
    *("dataset", "tokenizer", "tokenizer_report", "policy", "blind_policy", "frames", ARCHITECTURE_FILE),
    *(
        "evaluation",
        "free_evaluation",
        "blind_evaluation",
        TOLD_OTHERWISE,
        RESULTS_FILE,
        PAGE_FILE,
        "demo.md",
        "demo.png",
    ),
)
#: Beside these, what commands leave that were killed: directories that are not finished, and interrupted recordings.
_LEFT_BY_A_KILL = re.compile(rf"\.({'|'.join(map(re.escape, OWN))})\.pi0-fast-.+")
REPO_ID = "local/demo"
#: Runs the arguments of a command line; what it raises ends the demo.
Command = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Plan:
    """How much of everything; the numbers are explained in docs/demo.md.

    Attributes:
        env_type, tasks, cameras, image_size: of the simulator.
        episodes: that are recorded of each task; `every`, `keep_after_success` and `noise`: as in `record`.
        horizon: steps of a chunk, of which `executed` are executed.
        vocab_size: of the action tokenizer.
        patch, width, layers: of the model.
        steps, batch_size, peak_rate: of training; `steps` for each task.
        eval_episodes, eval_steps: episodes of each task that are driven, and steps of each.
        free: whether to measure also without constrained decoding.
    """

    env_type: str = "metaworld"
    tasks: tuple[str, ...] = ("drawer-open-v3",)
    cameras: tuple[str, ...] = ("corner4", "behindGripper")
    image_size: int = 64
    episodes: int = 80
    every: int = 5
    keep_after_success: int = 16
    noise: tuple[str, ...] = (
        "--noise_std=[0.15, 0.15, 0.15, 0.045]",
        "--burst_share=0.05",
        "--burst_std=[0.3, 0.3, 0.3, 0.0]",
    )
    horizon: int = 8
    executed: int = 4
    vocab_size: int = 256
    patch: int = 16
    width: int = 128
    layers: int = 3
    steps: int = 350
    batch_size: int = 64
    peak_rate: float = 1e-3
    eval_episodes: int = 40
    eval_steps: int = 150
    free: bool = True


#: For a quick look, and for continuous integration.
QUICK = replace(Plan(), episodes=40, steps=250, eval_episodes=20, free=False)


@dataclass(frozen=True)
class Chapter:
    """A heading, and the command line below it (without the program's name).

    Attributes:
        title: the heading.
        arguments: the command line.
        makes: of a training run: its directory within the demo's.
        steps: of a training run: how many it has.
    """

    title: str
    arguments: tuple[str, ...]
    makes: str = ""
    steps: int | None = None


def run(config: DemoConfig, command: Command) -> None:
    """Tell the story.

    Args:
        config: of the command.
        command: runs one command line of `pi0-fast`, such as ``["inspect", "--repo_id=..."]``.

    Raises:
        UsageError: packages are missing, or the directory holds something else than an earlier demo.
        SimulatorError: the simulator cannot run here.
        Whatever a command raises.
    """
    config.validate()
    plan = QUICK if config.quick else Plan()
    tell(replace(plan, tasks=config.task_list or plan.tasks), config, command)


def tell(plan: Plan, config: DemoConfig, command: Command) -> None:
    """The story with other numbers; see `run`."""
    output = Path(config.output_dir).expanduser()
    _require_packages(plan.env_type)
    _check_output(output, overwrite=config.overwrite)
    _settle_renderer(plan.env_type)
    _check_tasks(plan)
    _begin(output, plan)
    seconds: dict[str, float] = {}
    for number, chapter in enumerate(chapters(plan, output, config), start=1):
        say(f"\n{number}. {chapter.title}\n\n{_shown(chapter.arguments)}\n")
        begun = time.perf_counter()
        command(chapter.arguments)
        if chapter.steps is not None:
            _check_trained(output / chapter.makes, chapter.steps)
        seconds[chapter.title] = time.perf_counter() - begun
    story = Story(
        title=f"{plan.env_type}, {', '.join(plan.tasks)}",
        variants=_variants(output),
        told=tuple(
            Told.read(task, other, output / "evaluation", output / TOLD_OTHERWISE / task)
            for task, other in pairs_of_one_object(plan.tasks)
        ),
        seconds=seconds,
        commands=tuple(_shown(chapter.arguments) for chapter in chapters(plan, output, config)),
        run=output / "policy",
        report=output / "tokenizer_report",
        videos=tuple(sorted((output / "evaluation" / "videos").glob("*.mp4"))),
    )
    write_story(story, output, FORMAT)
    say("")
    for title, rows, headers in story.tables():
        print_table(title, rows, headers)
    say(f"Look at {output / PAGE_FILE}; the policy is in {output / 'policy/checkpoints/last/pretrained_model'}.")


# --- the commands -----------------------------------------------------------------------------------------------


def chapters(plan: Plan, output: Path, config: DemoConfig) -> list[Chapter]:
    """The story's commands in order."""
    tasks = f"--env.task={','.join(plan.tasks)}"
    dataset = (f"--repo_id={REPO_ID}", f"--root={output / 'dataset'}")
    each = "" if len(plan.tasks) == 1 else " of each task"
    found = [
        Chapter(
            f"Recording {plan.episodes} demonstrations{each} by a scripted expert",
            (
                *("record", *_simulator(plan), tasks, *dataset, f"--n_episodes={plan.episodes}"),
                *(f"--every={plan.every}", f"--keep_after_success={plan.keep_after_success}", *plan.noise),
                f"--seed={config.seed}",
            ),
        ),
        Chapter(
            "Fitting an action tokenizer on them",
            (
                *("train-tokenizer", *dataset, f"--action_horizon={plan.horizon}", f"--vocab_size={plan.vocab_size}"),
                *("--normalization_mode=IDENTITY", "--sample_fraction=1.0", f"--output_dir={output / 'tokenizer'}"),
            ),
        ),
        Chapter(
            "Looking at what it keeps of the actions",
            (
                *("inspect", *dataset, f"--tokenizer={output / 'tokenizer'}", "--max_chunks=1000"),
                f"--output_dir={output / 'tokenizer_report'}",
            ),
        ),
        Chapter(
            "Training a small pi0-FAST policy",
            _training(plan, output, config, blind=False),
            makes="policy",
            steps=plan.steps * len(plan.tasks),
        ),
        Chapter(
            f"Letting it act in {plan.eval_episodes} scenes{each} that it has never seen",
            (*_evaluation(plan, output, "policy", "evaluation"), tasks, "--save_videos=true"),
        ),
    ]
    if plan.free:
        free = _evaluation(plan, output, "policy", "free_evaluation")
        found.append(Chapter("The same without constrained decoding", (*free, tasks, "--policy.constrained=false")))
    for task, other in pairs_of_one_object(plan.tasks):
        told = _evaluation(plan, output, "policy", f"{TOLD_OTHERWISE}/{task}")
        text = f"--env.text={task_text(plan.env_type, other)}"
        found.append(Chapter(f"The scenes of {task}, told to do {other}", (*told, f"--env.task={task}", text)))
    if config.blind:
        training = _training(plan, output, config, blind=True)
        title, steps = "Training the same policy without images", plan.steps * len(plan.tasks)
        found.append(Chapter(title, training, makes="blind_policy", steps=steps))
        blind = _evaluation(plan, output, "blind_policy", "blind_evaluation")
        found.append(Chapter("Letting it act without seeing", (*blind, tasks)))
    return found


def _check_trained(run: Path, steps: int) -> None:
    """Training that a signal ends saves and ends well; the story must not go on with half a policy."""
    last = (run / "checkpoints/last").resolve().name
    if not last.isdigit() or int(last) != steps:
        raise UsageError(f"the training in {run} was stopped before its {steps} steps, and with it the demo")


def pairs_of_one_object(tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Each task with another one of the same object, such as drawer-open and drawer-close, where there is one."""
    found = []
    for task in tasks:
        others = [other for other in tasks if other != task and other.split("-")[0] == task.split("-")[0]]
        found += [(task, others[0])] if others else []
    return found


def _simulator(plan: Plan) -> tuple[str, ...]:
    return (
        *(f"--env.type={plan.env_type}", f"--env.cameras={json.dumps(plan.cameras)}"),
        f"--env.image_size={plan.image_size}",
        *(("--env.fast_rendering=true",) if plan.env_type == "metaworld" else ()),
    )


def _training(plan: Plan, output: Path, config: DemoConfig, *, blind: bool) -> tuple[str, ...]:
    steps = plan.steps * len(plan.tasks)
    return (
        *("train", f"--dataset.repo_id={REPO_ID}", f"--dataset.root={output / 'dataset'}"),
        *(("--dataset.cameras=[]",) if blind else (f"--dataset.cache_dir={output / 'frames'}",)),
        *("--policy.type=pi0_fast", f"--policy.architecture={output / ARCHITECTURE_FILE}"),
        *("--policy.text_tokenizer_name=byte", f"--policy.action_tokenizer_name={output / 'tokenizer'}"),
        *(f"--policy.chunk_size={plan.horizon}", f"--policy.n_action_steps={plan.executed}"),
        '--policy.normalization_mapping={"STATE": "MIN_MAX", "ACTION": "IDENTITY"}',
        *("--policy.device=cpu", f"--policy.optimizer_lr={plan.peak_rate}"),
        f"--policy.scheduler_warmup_steps={max(plan.steps // 7, 1)}",
        *(f"--policy.scheduler_decay_steps={steps}", f"--policy.scheduler_decay_lr={0.03 * plan.peak_rate:g}"),
        *(f"--steps={steps}", f"--batch_size={plan.batch_size}", "--num_workers=0", "--eval_freq=0"),
        *(f"--log_freq={max(steps // 35, 1)}", f"--seed={config.seed}"),
        f"--output_dir={output / ('blind_policy' if blind else 'policy')}",
    )


def _evaluation(plan: Plan, output: Path, policy: str, place: str) -> tuple[str, ...]:
    return (
        *("eval", f"--policy.path={output / policy / 'checkpoints/last/pretrained_model'}", *_simulator(plan)),
        *(f"--eval.n_episodes={plan.eval_episodes}", f"--eval.max_steps={plan.eval_steps}", "--eval.batch_size=8"),
        f"--output_dir={output / place}",
    )


def _shown(arguments: Sequence[str]) -> str:
    """A command line as it can be typed, a flag a line."""
    name, *flags = arguments
    return " \\\n    ".join([f"pi0-fast {name}", *map(shlex.quote, flags)])


def architecture(plan: Plan) -> dict[str, Any]:
    """Sizes of the model, as `--policy.architecture` takes them."""
    heads = max(plan.width // 32, 1)
    return {
        "vision": {
            "hidden_size": plan.width,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "intermediate_size": 4 * plan.width,
            "image_size": plan.image_size,
            "patch_size": plan.patch,
        },
        "text": {
            "hidden_size": plan.width,
            "num_hidden_layers": plan.layers,
            "intermediate_size": 4 * plan.width,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "head_dim": plan.width // heads,
            "vocab_size": 4096,
        },
    }


# --- before the first chapter -----------------------------------------------------------------------------------


def _require_packages(env_type: str) -> None:
    missing = [name for name in ("torch", "av", "safetensors", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        extras = "policy" if env_type == "toy" else f"policy,{env_type}"
        raise UsageError(f"the demo needs {', '.join(missing)}: pip install 'pi0-fast[{extras}]'")


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Nothing but an earlier demo is replaced, and that only when asked."""
    if not output.exists():
        return
    strange = [entry.name for entry in sorted(output.iterdir()) if not _is_own(entry)] if output.is_dir() else ["it"]
    if strange or not _is_demo(output):
        what = f"holds {strange[0]}, which no demo made" if output.is_dir() and strange else "exists and is no demo's"
        if output.is_dir() and not any(output.iterdir()):
            return
        raise UsageError(f"{output} {what}: choose another --output_dir")
    if not overwrite:
        raise UsageError(f"{output} holds an earlier demo: pass --overwrite, or choose another --output_dir")


def _check_tasks(plan: Plan) -> None:
    """Before an earlier demo is replaced."""
    there = task_names(plan.env_type)
    for task in plan.tasks:
        if task not in there:
            near = nearest(task, there)
            hint = f"did you mean {near}?" if near else f"there are {len(there)}, from {there[0]} to {there[-1]}"
            raise UsageError(f"{plan.env_type} has no task {task!r}; {hint}")


def _is_own(entry: Path) -> bool:
    return entry.name in OWN or _LEFT_BY_A_KILL.fullmatch(entry.name) is not None


def _is_demo(output: Path) -> bool:
    try:
        content = json.loads((output / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT["format"]


def _settle_renderer(env_type: str) -> None:
    """See to it that the simulator can draw; as root on Debian or Ubuntu what is missing is installed.

    Raises:
        SimulatorError: it cannot run here; the message says what to type.
    """
    try:
        preflight(env_type)
        return
    except SimulatorError as error:
        packages = next((names for names in APT_PACKAGES.values() if names[0] in str(error)), None)
        apt = shutil.which("apt-get")
        if packages is None or apt is None or os.geteuid() != 0:
            raise
        say(f"{error}\nInstalling {' and '.join(packages)}.")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", *packages]):
        done = subprocess.run([apt, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise SimulatorError(f"apt-get {shlex.join(arguments)} failed: {' '.join(last)}")
    preflight(env_type)


def _begin(output: Path, plan: Plan) -> None:
    """An empty directory with the demo's mark, and the file of the model's sizes."""
    output.mkdir(parents=True, exist_ok=True)
    # The mark first: what a kill leaves from here on can be replaced.
    (output / RESULTS_FILE).write_text(json.dumps({**FORMAT, "finished": False}) + "\n", encoding="utf-8")
    for place in [entry for entry in output.iterdir() if _is_own(entry) and entry.name != RESULTS_FILE]:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
    (output / ARCHITECTURE_FILE).write_text(json.dumps(architecture(plan), indent=2) + "\n", encoding="utf-8")


# --- after the last one -----------------------------------------------------------------------------------------


def _variants(output: Path) -> tuple[Variant, ...]:
    names = {
        "evaluation": THE_POLICY,
        "free_evaluation": "without constrained decoding",
        "blind_evaluation": "trained without images",
    }
    return tuple(
        variant
        for folder, name in names.items()
        if (output / folder).is_dir()
        for variant in Variant.read(name, output / folder)
    )
