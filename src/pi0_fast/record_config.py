"""What `pi0-fast record` and `pi0-fast replay` can be told: every flag with its default and its explanation.

Plain values, checked as far as that needs no simulator and no data. Left out: the work (recording.py, replaying.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pi0_fast.configs import (
    NORMALIZATION_MODES,
    check_choice,
    check_number,
    check_text,
    check_whole,
    is_repository,
)
from pi0_fast.parsing import option
from pi0_fast.simulation_config import EnvConfig
from pi0_fast.types import UsageError

_DATA, _EPISODES, _NOISE, _PICTURES, _RUN = "Dataset", "Episodes", "Noise", "Pictures", "Run"
_ACTIONS, _TOKENIZER, _OUTPUT = "Actions", "Tokenizer", "Output"
#: Seeds of simulators are below this.
SEED_LIMIT = 2**31


@dataclass
class RecordConfig:
    """All of `pi0-fast record`; the same object is the argument of `recording.record` in Python."""

    repo_id: str = option(group=_DATA, help="Name of the dataset, owner/name.")
    env: EnvConfig = field(default_factory=EnvConfig)
    root: str | None = option(
        None, group=_DATA, help="Directory for the dataset.", shown="$HF_LEROBOT_HOME/{repo_id}, as in LeRobot"
    )
    overwrite: bool = option(False, group=_DATA, help="Replace a dataset, or an interrupted recording, that is there.")
    resume: bool = option(False, group=_DATA, help="Go on with an interrupted recording.")

    n_episodes: int = option(50, group=_EPISODES, help="Successful episodes to keep, of each task.")
    seed: int = option(
        0, group=_EPISODES, help="Seed of the first episode of each task; each further one has the next."
    )
    keep_after_success: int = option(0, group=_EPISODES, help="Steps that are recorded after the first successful one.")
    max_failures: int | None = option(
        None,
        group=_EPISODES,
        help="Give up on a task when more of its episodes than this failed.",
        shown="as many as n_episodes, at least 10",
    )

    noise_std: list[float] | float = option(  # noqa: RUF009 - a field, and its default cannot change
        0.0,
        group=_NOISE,
        help="Standard deviation of Gaussian noise that is added to each executed action, in its units; one number "
        "or one per dimension. Labels stay clean.",
    )
    burst_share: float = option(
        0.0, group=_NOISE, help="Probability that at a step a burst begins: one offset, held for some steps."
    )
    burst_std: list[float] | float | None = option(  # noqa: RUF009 - a field, and its default cannot change
        None, group=_NOISE, help="Standard deviation of the offset of a burst, as --noise_std.", shown="none"
    )
    burst_steps: list[int] | None = option(  # noqa: RUF009 - a field, and its default cannot change
        None, group=_NOISE, help="Fewest and most steps of a burst.", shown="[3, 7]"
    )

    every: int = option(
        1,
        group=_PICTURES,
        help="Render at every so many steps only (and at the first); the rows between repeat the last picture, and the "
        "column image_age says how old it is.",
    )
    video: bool = option(True, group=_PICTURES, help="Store pictures as video; false: as PNG, without any loss.")
    video_codec: str = option("h264", group=_PICTURES, help="Codec of the video: h264 or av1.")

    num_workers: int | None = option(
        None, group=_RUN, help="Processes that record; 0: this one. The result is the same.", shown="one a core"
    )
    timeout_s: float = option(
        120.0,
        group=_RUN,
        help="A simulator that gives no answer for so many seconds has failed its episode. Not with --num_workers=0.",
    )

    @property
    def burst_range(self) -> tuple[int, int]:
        """Fewest and most steps of a burst."""
        first, last = self.burst_steps or (3, 7)
        return first, last

    @property
    def failure_limit(self) -> int:
        """`max_failures`, or its default."""
        return max(10, self.n_episodes) if self.max_failures is None else self.max_failures

    def validate(self) -> None:
        """Refuse what no simulator could make right; UsageError names the flag, the value and what is allowed."""
        _check_dataset(self.repo_id, self.root)
        self.env.validate()
        if self.env.type is None:
            raise UsageError("--env.type and --env.task must be given: what is to be recorded?")
        for name, least in (("n_episodes", 1), ("keep_after_success", 0), ("every", 1)):
            check_whole(name, getattr(self, name), least)
        check_whole("seed", self.seed, 0, SEED_LIMIT - 1 - self.n_episodes)
        for name in ("max_failures", "num_workers"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0)
        _check_timeout(self)
        check_choice("video_codec", self.video_codec, ("h264", "av1"))
        if not self.video and self.video_codec != type(self).__dataclass_fields__["video_codec"].default:
            raise UsageError("--video_codec has no effect with --video=false")
        self._validate_noise()

    def _validate_noise(self) -> None:
        _check_deviations("noise_std", self.noise_std)
        if not 0 <= check_number("burst_share", self.burst_share) <= 1:
            raise UsageError(f"--burst_share must be from 0 to 1, not {self.burst_share}")
        if self.burst_share == 0:
            for name in ("burst_std", "burst_steps"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} has no effect without --burst_share")
            return
        if self.burst_std is None:
            raise UsageError("--burst_share needs --burst_std: how large are the bursts?")
        _check_deviations("burst_std", self.burst_std)
        steps = [3, 7] if self.burst_steps is None else self.burst_steps
        if len(steps) != 2:
            raise UsageError(f"--burst_steps must be the fewest and the most steps, such as [3, 7], not {steps}")
        check_whole("burst_steps", steps[0], 1)
        check_whole("burst_steps", steps[1], steps[0])


@dataclass
class ReplayConfig:
    """All of `pi0-fast replay`; the same object is the argument of `replaying.replay` in Python."""

    repo_id: str = option(group=_DATA, help="Name of the dataset, owner/name.")
    root: str | None = option(
        None, group=_DATA, help="Directory of the dataset.", shown="$HF_LEROBOT_HOME/{repo_id}, then the hub"
    )
    episodes: list[int] | None = option(  # noqa: RUF009 - a field, and its default cannot change
        None, group=_DATA, help="Indices of the episodes to replay.", shown="all"
    )
    action_key: str | None = option(
        None,
        group=_ACTIONS,
        help="Column of the actions to execute.",
        shown="executed_action where there is one, else action",
    )
    state_key: str = option("observation.state", group=_ACTIONS, help="Column of the state.")
    env: EnvConfig = field(default_factory=EnvConfig)
    seeds: list[int] | None = option(  # noqa: RUF009 - a field, and its default cannot change
        None,
        group=_ACTIONS,
        help="Seed of each episode of the dataset, for one that `pi0-fast record` did not write (with --env.*).",
        shown="what meta/recording.json says",
    )

    tokenizer: str | None = option(
        None,
        group=_TOKENIZER,
        help="Directory or hub id of a FAST tokenizer: the actions are also replayed through encode and decode.",
        shown="none",
    )
    normalization_mode: str | None = option(
        None,
        group=_TOKENIZER,
        help=f"One of {', '.join(NORMALIZATION_MODES)}; needed for tokenizers that do not say it, as published ones.",
        shown="the tokenizer's",
    )
    action_horizon: int | None = option(
        None, group=_TOKENIZER, help="Steps of a chunk, for tokenizers that take any.", shown="the tokenizer's"
    )

    num_workers: int | None = option(None, group=_OUTPUT, help="Processes; 0: this one.", shown="one a core")
    timeout_s: float = option(
        120.0,
        group=_OUTPUT,
        help="Seconds without an answer of the simulator after which the replay ends. Not with --num_workers=0.",
    )
    output_dir: str | None = option(
        None, group=_OUTPUT, help="Directory for replay.json.", shown="replay_{repo_id}, / as _"
    )
    overwrite: bool = option(False, group=_OUTPUT, help="Replace the replay.json in the output directory.")

    @property
    def output_path(self) -> Path:
        """`output_dir`, or `replay_{repo_id}` with `/` as `_`."""
        return Path(self.output_dir or f"replay_{self.repo_id.replace('/', '_')}").expanduser()

    def validate(self) -> None:
        """Refuse what no dataset could make right; UsageError names the flag, the value and what is allowed."""
        _check_dataset(self.repo_id, self.root)
        self.env.validate()
        for name in ("action_key", "state_key", "tokenizer", "output_dir"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        for number in self.episodes or []:
            check_whole("episodes", number, 0)
        if self.episodes == []:
            raise UsageError("--episodes is an empty list: name the episodes, or leave it out for all")
        for number in self.seeds or []:
            check_whole("seeds", number, 0, SEED_LIMIT - 1)
        if self.seeds is not None and self.env.type is None:
            raise UsageError("--seeds needs --env.type and --env.task: which simulator?")
        if len(self.env.tasks) > 1:
            raise UsageError("--env.task: one task, which all episodes of the dataset were recorded in")
        if self.num_workers is not None:
            check_whole("num_workers", self.num_workers, 0)
        _check_timeout(self)
        if self.normalization_mode is not None:
            check_choice("normalization_mode", self.normalization_mode, NORMALIZATION_MODES)
        if self.action_horizon is not None:
            check_whole("action_horizon", self.action_horizon, 1)
        for name in ("normalization_mode", "action_horizon"):
            if self.tokenizer is None and getattr(self, name) is not None:
                raise UsageError(f"--{name} has no effect without --tokenizer")


def _check_timeout(config: RecordConfig | ReplayConfig) -> None:
    """Above 0, and only where there are processes that can be ended."""
    if not check_number("timeout_s", config.timeout_s) > 0:
        raise UsageError(f"--timeout_s must be above 0, not {config.timeout_s}")
    if config.num_workers == 0 and config.timeout_s != type(config).__dataclass_fields__["timeout_s"].default:
        raise UsageError("--timeout_s has no effect with --num_workers=0: this process cannot end a simulator in it")


def _check_dataset(repo_id: str, root: str | None) -> None:
    check_text("repo_id", repo_id)
    if not is_repository(repo_id):
        raise UsageError(f"--repo_id must be a name such as owner/dataset, not {repo_id!r}")
    if root is not None:
        check_text("root", root)


def _check_deviations(name: str, value: Sequence[float] | float) -> None:
    """One number or a list of them, none negative."""
    numbers = list(value) if isinstance(value, Sequence) else [value]
    if not numbers:
        raise UsageError(f"--{name} is an empty list: one number, or one per dimension of the action")
    for number in numbers:
        if check_number(name, number) < 0:
            raise UsageError(f"--{name} must not be negative, not {number}")
