"""What the commands can be told: one dataclass per command, every flag with its default and its explanation.

A configuration holds plain values and checks what can be checked without data (`validate`); it opens no file
and knows no numpy, so that the command line and its help start at once. Left out: reading the values from
arguments and files, which is `parsing.py`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pi0_fast.parsing import expanded, nearest, option
from pi0_fast.types import UsageError

NORMALIZATION_MODES = ("MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY")
SYMBOL_FORMATS = ("plain", "reference")
#: Those of actions/dct.py, and the flag's own.
ORDERS = ("frequency", "dimension", "auto")
TARGETS = ("target_rmse", "target_error", "target_tokens")
#: Ids of tokens, and coefficients of a chunk, are counted in 16 bits (`MAX_VOCABULARY` of actions/bpe.py).
LARGEST_VOCABULARY = 65_535
#: Coefficients are computed in float32; beyond these scales nothing of them would be left.
SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e30
LARGEST_HEADROOM = 100.0

#: Flags of `TokenizerTrainingConfig` that each of several datasets may have its own value of.
_OF_EACH = ("root", "revision", "action_key", "state_key", "encoded_dims", "delta_dims", "delta_state_dims")
_PATHS = ("root", "cache_dir", "output_dir", "tokenizer")

_REPOSITORY = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*")

_DATA, _ACTIONS, _NORMALIZATION = "Dataset", "Action encoding", "Normalization"
_TOKENIZER, _TARGETS = "Tokenizer", "Targets instead of a scale"
_OUTPUT, _HUB, _STORY = "Output", "Hugging Face Hub", "Story"


@dataclass(frozen=True)
class TokenizerSource:
    """One of the datasets that a tokenizer is fitted on, with its own values of `TokenizerTrainingConfig`'s fields."""

    repo_id: str
    root: str | None
    revision: str | None
    action_key: str
    state_key: str
    encoded_dims: str | None
    delta_dims: str | None
    delta_state_dims: str | None
    weight: float | None

    def validate(self) -> None:
        """Refuse empty texts, and a revision of a local directory."""
        for name in ("repo_id", "action_key", "state_key"):
            check_text(name, getattr(self, name))
        for name in ("root", "revision", "encoded_dims", "delta_dims", "delta_state_dims"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if self.root is not None and self.revision is not None:
            raise UsageError("--revision has no effect with --root, which never touches the network")


@dataclass
class TokenizerTrainingConfig:
    """All of `pi0-fast train-tokenizer`; the same object is the argument of `train_tokenizer` in Python.

    Flags, names and defaults are LeRobot's, with two documented deviations: without `encoded_dims` every
    dimension is encoded, and a share `val_fraction` of the episodes is held out of the fit to measure on
    (0 fits them all). With several datasets the flags that are about one of them take one value for all, or a list.
    """

    repo_id: str | list[str] = option(  # noqa: RUF009 - a field
        group=_DATA,
        help="LeRobot dataset on the Hugging Face Hub, such as lerobot/pusht; with --root only a name for the result. "
        "A JSON list of them fits one vocabulary for all.",
    )
    root: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="Local directory of the dataset; the network is then never touched for it. Of several datasets a list.",
        shown="~/.cache/huggingface/lerobot/{repo_id} where it exists, else the Hub",
    )
    revision: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_DATA, help="Branch, tag or commit of the dataset on the Hub.", shown="the main branch"
    )
    weights: list[float] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="How many chunks each of several datasets gives to the fit, in any unit, such as '[0.7, 0.3]'.",
        shown="in proportion to their chunks",
    )
    cache_dir: str | None = option(
        None, group=_DATA, help="Where downloads are kept.", shown="the cache of huggingface_hub"
    )
    local_files_only: bool = option(
        False, group=_DATA, help="Use only what is downloaded already of the dataset; never ask the Hub for it."
    )
    max_episodes: int | None = option(
        None, group=_DATA, help="Use at most this many episodes, the first ones.", shown="all episodes"
    )
    sample_fraction: float = option(
        0.1,
        group=_DATA,
        help="Fraction of the action chunks to sample from each episode, above 0 and at most 1.",
    )
    max_chunks: int = option(
        200_000,
        group=_DATA,
        help="Fit on at most this many of the sampled chunks, chosen over all episodes, and measure on as many.",
    )
    val_fraction: float = option(
        0.1,
        group=_DATA,
        help="Fraction of the episodes to hold out of the fit and to measure errors on; at least one episode "
        "where there are two. 0 fits all of them.",
    )
    seed: int = option(0, group=_DATA, help="Seed of the sampled chunks and the held-out episodes.")

    action_key: str | list[str] = option(  # noqa: RUF009 - a field, and its default is a text
        "action", group=_ACTIONS, help="Column of the dataset that holds the actions."
    )
    action_horizon: int = option(10, group=_ACTIONS, help="Number of future actions in each chunk.")
    encoded_dims: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_ACTIONS,
        help='Comma-separated ranges of dimensions to encode, the end excluded, such as "0:6,7:23".',
        shown="all dimensions",
    )
    use_delta_transform: bool = option(
        False,
        group=_ACTIONS,
        help="Encode the actions of --delta_dims relative to the current state (action minus state).",
        aliases=("use_relative_transform",),
    )
    delta_dims: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_ACTIONS,
        help='Comma-separated action dimensions of the delta transform, such as "0,1,2,3,4,5".',
        aliases=("relative_dims",),
    )
    delta_state_dims: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_ACTIONS,
        help="Comma-separated state dimensions, one for each of --delta_dims; needed when state and action "
        "differ in size.",
        shown="the same numbers as --delta_dims",
    )
    state_key: str | list[str] = option(  # noqa: RUF009 - a field, and its default is a text
        "observation.state",
        group=_ACTIONS,
        help="Column of the dataset that holds the state of the delta transform.",
    )

    normalization_mode: str = option(
        "QUANTILES", group=_NORMALIZATION, help=f"One of {', '.join(NORMALIZATION_MODES)}."
    )

    vocab_size: int = option(1024, group=_TOKENIZER, help="Size of the BPE vocabulary.")
    scale: list[float] | float = option(  # noqa: RUF009 - a field, and its default is a number
        10.0,
        group=_TOKENIZER,
        help="DCT coefficients are multiplied by this and rounded: higher is finer and longer. One number, "
        "or a JSON list with one for each encoded dimension, such as '[10, 20]'. Where the search for a target begins.",
    )
    symbol_format: str = option(
        "plain",
        group=_TOKENIZER,
        help="plain: each coefficient is one BPE symbol; reference: the byte-level format of published tokenizers.",
    )
    headroom: float | None = option(
        None,
        group=_TOKENIZER,
        help="Share by which the plain format's range of coefficients is widened beyond those seen in the fit.",
        shown="0.25; the reference format has none",
    )
    rate_weight: float | None = option(
        None,
        group=_TOKENIZER,
        help="How much error a saved token is worth, in squared scaled coefficients (0.3 to 1 are usual): the encoder "
        "then looks for the cheapest tokens instead of rounding. Every FAST decoder understands them.",
        shown="0, plain rounding; with a target, chosen",
    )
    order: str = option(
        "frequency",
        group=_TOKENIZER,
        help="How coefficients follow each other: frequency (all dimensions of frequency 0 first, as published), "
        "dimension (often fewer tokens; LeRobot's own policy cannot decode it, and fails), or auto (what is better).",
    )
    target_rmse: float | None = option(
        None,
        group=_TARGETS,
        help="Choose scale and rate weight so that the root mean square error of the tokens stays below this, in "
        "normalised units, with the fewest tokens.",
    )
    target_error: list[float] | float | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_TARGETS,
        help="The same for the largest error of any single action, in the data's units: one number, or a JSON list "
        "with one for each encoded dimension.",
    )
    target_tokens: float | None = option(
        None,
        group=_TARGETS,
        help="Choose scale and rate weight so that a chunk takes this many tokens on average, with the smallest error.",
    )

    output_dir: str | None = option(
        None,
        group=_OUTPUT,
        help="Directory to save the tokenizer in.",
        shown="fast_tokenizer_{repo_id}, / as _",
    )
    overwrite: bool = option(False, group=_OUTPUT, help="Replace the output directory when it exists.")
    report: bool = option(
        False,
        group=_OUTPUT,
        help="Also write a report with pictures, as pi0-fast inspect makes it, to report/ in the output directory; "
        "needs the extra pi0-fast[report].",
    )
    num_workers: int | None = option(
        None, group=_OUTPUT, help="Number of threads to fit with, at most one per core.", shown="all cores"
    )

    push_to_hub: bool = option(False, group=_HUB, help="Upload the tokenizer to the Hugging Face Hub.")
    hub_repo_id: str | None = option(
        None, group=_HUB, help="Repository on the Hub to upload to.", shown="the name of the output directory"
    )
    hub_private: bool = option(False, group=_HUB, help="Make the repository on the Hub private.")

    @property
    def output_path(self) -> Path:
        """`output_dir`, or `fast_tokenizer_{repo_id}` with `/` as `_`, or `fast_tokenizer_mixture`."""
        name = "mixture" if isinstance(self.repo_id, list) else self.repo_id.replace("/", "_")
        return Path(self.output_dir or f"fast_tokenizer_{name}").expanduser()

    def sources(self) -> list[TokenizerSource]:
        """The datasets, one or several.

        Raises:
            UsageError: a flag is a list of another length than `repo_id`.
        """
        several = isinstance(self.repo_id, list)
        ids = self.repo_id if isinstance(self.repo_id, list) else [self.repo_id]
        if not ids:
            raise UsageError("--repo_id is an empty list")
        if several and isinstance(self.root, str):
            raise UsageError('--root must be a list with one for each dataset, such as \'["data/one", "data/two"]\'')
        values = {
            name: one_each(name, getattr(self, name), len(ids), several, isinstance(getattr(self, name), list))
            for name in _OF_EACH
        }
        weights = one_each("weights", self.weights, len(ids), True, self.weights is not None)
        return [
            TokenizerSource(repo_id=repo_id, weight=weights[number], **{name: values[name][number] for name in values})
            for number, repo_id in enumerate(ids)
        ]

    @property
    def hub_name(self) -> str:
        """`hub_repo_id`, or the name of the output directory, which then is the name under the token's own user."""
        return self.hub_repo_id or Path(os.path.abspath(self.output_path)).name

    def validate(self) -> None:
        """Refuse what no dataset could make right.

        Raises:
            UsageError: naming the flag, the value and what is allowed.
        """
        for source in self.sources():
            source.validate()
        for name in ("cache_dir", "output_dir", "hub_repo_id"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if self.weights is not None:
            check_weights("weights", self.weights)
            if not isinstance(self.repo_id, list):
                raise UsageError("--weights has no effect with one dataset: give --repo_id as a list")
        if isinstance(self.repo_id, list) and self.report:
            raise UsageError("--report is of one dataset: run pi0-fast inspect on each, with --tokenizer")
        check_whole("action_horizon", self.action_horizon, 1, LARGEST_VOCABULARY)
        check_whole("vocab_size", self.vocab_size, 2, LARGEST_VOCABULARY)
        check_whole("seed", self.seed, 0)
        check_whole("max_chunks", self.max_chunks, 1)
        for name in ("max_episodes", "num_workers"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if not 0 < check_number("sample_fraction", self.sample_fraction) <= 1:
            raise UsageError(f"--sample_fraction must be above 0 and at most 1, not {self.sample_fraction}")
        if not 0 <= check_number("val_fraction", self.val_fraction) < 1:
            raise UsageError(f"--val_fraction must be at least 0 and below 1, not {self.val_fraction}")
        if self.headroom is not None:
            if not 0 <= check_number("headroom", self.headroom) <= LARGEST_HEADROOM:
                raise UsageError(f"--headroom must be at least 0 and at most {LARGEST_HEADROOM:g}, not {self.headroom}")
            if self.symbol_format == "reference":
                raise UsageError("--headroom has no effect with --symbol_format reference, whose alphabet is the fit's")
        self._validate_scale()
        check_choice("normalization_mode", self.normalization_mode, NORMALIZATION_MODES)
        check_choice("symbol_format", self.symbol_format, SYMBOL_FORMATS)
        self._validate_rate()
        self._validate_combinations()

    def _validate_rate(self) -> None:
        check_choice("order", self.order, ORDERS)
        if self.rate_weight is not None and check_number("rate_weight", self.rate_weight) < 0:
            raise UsageError(f"--rate_weight must be at least 0, not {self.rate_weight}")
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"--{given[0]} and --{given[1]} cannot both be met: give one target")
        for name in given:
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)):
                values = [values]
            elif not values:
                raise UsageError(f"--{name} is an empty list: give one number, or one for each encoded dimension")
            for value in values:
                if check_number(name, value) <= 0:
                    raise UsageError(f"--{name} must be above 0, not {value}")
        if isinstance(self.repo_id, list):
            for name in given:
                raise UsageError(f"--{name} is of one dataset: fit on one, and give its --scale to the fit on several")
            if self.order == "auto":
                raise UsageError("--order auto is of one dataset: give --order frequency or dimension for several")

    @property
    def target_name(self) -> str | None:
        """The flag that is a target, if one is given."""
        return next((name for name in TARGETS if getattr(self, name) is not None), None)

    def _validate_scale(self) -> None:
        scales: Any = self.scale if isinstance(self.scale, (list, tuple)) else [self.scale]
        if not scales:
            raise UsageError("--scale is an empty list: give one number, or one for each encoded dimension")
        for position, scale in enumerate(scales):
            _scale("scale", scale, f" (number {position} of the list)" if len(scales) > 1 else "")

    def _validate_combinations(self) -> None:
        """A flag that would change nothing is a misunderstanding, not a wish."""
        if self.use_delta_transform and self.delta_dims is None:
            raise UsageError("--use_delta_transform needs --delta_dims: which action dimensions are relative?")
        if not self.use_delta_transform:
            default_key = type(self).__dataclass_fields__["state_key"].default
            for name, default in (
                ("delta_dims", None),
                ("delta_state_dims", None),
                ("state_key", default_key),
            ):
                if getattr(self, name) != default:
                    raise UsageError(f"--{name} has no effect without --use_delta_transform=true")
        local = [source.root is not None for source in self.sources()]
        if all(local) and self.cache_dir is not None:
            raise UsageError("--cache_dir has no effect with --root, which never touches the network")
        if self.push_to_hub:
            if not is_repository(self.hub_name):
                which = "--hub_repo_id" if self.hub_repo_id else "the name of the output directory"
                way_out = "" if self.hub_repo_id else "; give --hub_repo_id"
                raise UsageError(
                    f"{which}, {self.hub_name!r}, is no name for a repository on the Hub: owner/name or name, of "
                    f"letters, digits, - _ and .{way_out}"
                )
        else:
            for name in ("hub_repo_id", "hub_private"):
                if getattr(self, name):
                    raise UsageError(f"--{name} has no effect without --push_to_hub=true")


@dataclass
class InspectConfig:
    """All of `pi0-fast inspect`; the same object is the argument of `pi0_fast.inspection.inspect` in Python.

    Flags that `train-tokenizer` has too mean the same. What a tokenizer's directory says (steps, dimensions,
    normalisation, held-out episodes) need not be said again, and a flag that contradicts it is an error.
    """

    repo_id: str = option(
        group=_DATA,
        help="LeRobot dataset on the Hugging Face Hub, such as lerobot/pusht; with --root only a name for the report.",
    )
    root: str | None = option(
        None,
        group=_DATA,
        help="Local directory of the dataset; the network is then never touched for it.",
        shown="~/.cache/huggingface/lerobot/{repo_id} where it exists, else the Hub",
    )
    revision: str | None = option(
        None, group=_DATA, help="Branch, tag or commit of the dataset on the Hub.", shown="the main branch"
    )
    cache_dir: str | None = option(
        None, group=_DATA, help="Where downloads are kept.", shown="the cache of huggingface_hub"
    )
    local_files_only: bool = option(
        False, group=_DATA, help="Use only what is downloaded already; never touch the network."
    )
    max_episodes: int | None = option(
        None, group=_DATA, help="Use at most this many episodes, the first ones.", shown="all episodes"
    )

    tokenizer: str | None = option(
        None,
        group=_TOKENIZER,
        help="Directory or Hub id of the tokenizer to report on.",
        shown="none: the report is on the dataset alone",
    )
    tokenizer_revision: str | None = option(
        None, group=_TOKENIZER, help="Branch, tag or commit of the tokenizer on the Hub.", shown="the main branch"
    )
    max_chunks: int = option(
        5000,
        group=_TOKENIZER,
        help="Measure at most this many chunks, spread over the episodes, and fit other scales on at most as many.",
    )
    val_fraction: float = option(
        0.1,
        group=_TOKENIZER,
        help="Fraction of the episodes to measure on, where the tokenizer does not say which were held out of its fit.",
    )
    scales: list[float] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_TOKENIZER,
        help="Scales to refit the tokenizer at, as a JSON list, such as '[5, 10, 20]'.",
        shown="0.25 to 4 times the tokenizer's own",
    )
    seed: int = option(0, group=_TOKENIZER, help="Seed of the sampled chunks and of the episodes to measure on.")

    action_key: str = option("action", group=_ACTIONS, help="Column of the dataset that holds the actions.")
    action_horizon: int | None = option(
        None,
        group=_ACTIONS,
        help="Number of future actions in each chunk.",
        shown="the tokenizer's; 10 where it has none",
    )
    encoded_dims: str | None = option(
        None,
        group=_ACTIONS,
        help='Comma-separated ranges of dimensions to encode, the end excluded, such as "0:6,7:23".',
        shown="the tokenizer's; all where it does not say",
    )
    use_delta_transform: bool = option(
        False,
        group=_ACTIONS,
        help="Encode the actions of --delta_dims relative to the current state, where the tokenizer does not say.",
        aliases=("use_relative_transform",),
    )
    delta_dims: str | None = option(
        None,
        group=_ACTIONS,
        help='Comma-separated action dimensions of the delta transform, such as "0,1,2,3,4,5".',
        aliases=("relative_dims",),
    )
    delta_state_dims: str | None = option(
        None,
        group=_ACTIONS,
        help="Comma-separated state dimensions, one for each of --delta_dims; needed when state and action "
        "differ in size.",
        shown="the same numbers as --delta_dims",
    )
    state_key: str | None = option(
        None,
        group=_ACTIONS,
        help="Column of the dataset that holds the state of the delta transform.",
        shown="the tokenizer's; observation.state where it does not say",
    )

    normalization_mode: str | None = option(
        None,
        group=_NORMALIZATION,
        help=f"One of {', '.join(NORMALIZATION_MODES)}; needed for tokenizers that do not say it, as published ones.",
        shown="the tokenizer's",
    )

    output_dir: str | None = option(
        None, group=_OUTPUT, help="Directory for the report.", shown="inspect_{repo_id}, / as _"
    )
    overwrite: bool = option(False, group=_OUTPUT, help="Replace an earlier report in the output directory.")
    num_workers: int | None = option(
        None, group=_OUTPUT, help="Number of threads to encode and fit with.", shown="all cores"
    )

    @property
    def output_path(self) -> Path:
        """`output_dir`, or `inspect_{repo_id}` with `/` as `_`."""
        return Path(self.output_dir or f"inspect_{self.repo_id.replace('/', '_')}").expanduser()

    def validate(self) -> None:
        """Refuse what no dataset and no tokenizer could make right.

        Raises:
            UsageError: naming the flag, the value and what is allowed.
        """
        for name in ("repo_id", "action_key"):
            check_text(name, getattr(self, name))
        for name in (
            *("root", "revision", "cache_dir", "tokenizer", "tokenizer_revision", "encoded_dims", "delta_dims"),
            *("delta_state_dims", "state_key", "output_dir"),
        ):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        check_whole("max_chunks", self.max_chunks, 1)
        check_whole("seed", self.seed, 0)
        for name in ("max_episodes", "num_workers"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.action_horizon is not None:
            check_whole("action_horizon", self.action_horizon, 1, LARGEST_VOCABULARY)
        if not 0 <= check_number("val_fraction", self.val_fraction) < 1:
            raise UsageError(f"--val_fraction must be at least 0 and below 1, not {self.val_fraction}")
        if self.scales is not None:
            if not self.scales:
                raise UsageError("--scales is an empty list: give the scales to try, such as '[5, 10, 20]'")
            for scale in self.scales:
                _scale("scales", scale)
        if self.normalization_mode is not None:
            check_choice("normalization_mode", self.normalization_mode, NORMALIZATION_MODES)
        self._validate_combinations()

    def _validate_combinations(self) -> None:
        """A flag that would change nothing is a misunderstanding, not a wish."""
        fields = type(self).__dataclass_fields__
        if self.tokenizer is None:
            for name in (
                *("tokenizer_revision", "max_chunks", "val_fraction", "scales", "seed", "normalization_mode"),
                "num_workers",
            ):
                if getattr(self, name) != fields[name].default:
                    raise UsageError(f"--{name} has no effect without --tokenizer")
            if self.state_key is not None and not self.use_delta_transform:
                raise UsageError("--state_key has no effect without --use_delta_transform=true")
        if self.use_delta_transform and self.delta_dims is None:
            raise UsageError("--use_delta_transform needs --delta_dims: which action dimensions are relative?")
        for name in ("delta_dims", "delta_state_dims"):
            if getattr(self, name) is not None and not self.use_delta_transform:
                raise UsageError(f"--{name} has no effect without --use_delta_transform=true")
        if self.root is not None and self.revision is not None:
            raise UsageError("--revision has no effect with --root, which never touches the network")
        if self.root is not None and self.tokenizer is None and self.cache_dir is not None:
            raise UsageError("--cache_dir has no effect with --root, which never touches the network")


@dataclass
class DemoConfig:
    """All of `pi0-fast demo`."""

    output_dir: str = option("demo_output", group=_OUTPUT, help="Directory for everything that is made.")
    overwrite: bool = option(False, group=_OUTPUT, help="Replace an earlier demo in the output directory.")
    tasks: list[str] | str | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_STORY,
        help='Meta-World tasks that one policy is to learn: a,b or \'["a", "b"]\'. Of tasks with the same object it is '
        "also measured whether the policy does what it is told.",
        shown="drawer-open-v3",
        aliases=("task",),
    )
    quick: bool = option(False, group=_STORY, help="Less of everything: half the demonstrations, half the episodes.")
    blind: bool = option(
        False, group=_STORY, help="Also train a policy without images, to see how much seeing is worth."
    )
    seed: int = option(0, group=_STORY, help="Seed of the demonstrations and of training.")

    def validate(self) -> None:
        """Refuse empty names and a negative seed with a UsageError."""
        check_text("output_dir", self.output_dir)
        for name in self.task_list:
            check_text("tasks", name)
        if len(set(self.task_list)) < len(self.task_list):
            raise UsageError(f"--tasks names a task twice: {', '.join(self.task_list)}")
        check_whole("seed", self.seed, 0)

    @property
    def task_list(self) -> tuple[str, ...]:
        """The tasks asked for; empty where none are."""
        if self.tasks is None:
            return ()
        return tuple(name.strip() for name in (self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks))


def one_each(flag: str, value: Any, count: int, several: bool, nested: bool) -> list[Any]:
    """The value of a flag for each of `count` datasets; `nested`: it is a list with one for each, not one for all.

    Raises:
        UsageError: a list of another length, or for a single dataset (not `several`).
    """
    if not nested:
        return [value] * count
    if not several:
        raise UsageError(f"--{flag} is a list for several datasets, but there is one")
    if len(value) != count:
        raise UsageError(f"--{flag} has {len(value)} entries for {count} datasets")
    return list(value)


def check_weights(flag: str, weights: Sequence[Any]) -> None:
    """Finite numbers above zero; UsageError for anything else."""
    for weight in weights:
        if check_number(flag, weight) <= 0:
            raise UsageError(f"--{flag} must be above 0, not {weight}; leave that dataset out")


def is_repository(name: str) -> bool:
    """Whether this can be the name of a repository on the Hub: owner/name or name."""
    return _REPOSITORY.fullmatch(name) is not None


def check_text(name: str, value: Any) -> None:
    """A text that is not empty; as a path or a name it must be one that files and datasets can have.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"--{name} must be a text that is not empty, not {value!r}")
    is_path = name.rpartition(".")[2] in _PATHS
    # In paths lone surrogates stand for bytes that are not UTF-8, which file names may have.
    if "\0" in value or (not is_path and any("\ud800" <= c <= "\udfff" for c in value)):
        raise UsageError(f"--{name} holds a character that no name may: {value!a}")
    if is_path:
        expanded(name, value)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """A whole number of at least `least` and at most `most`; UsageError for anything else."""
    outside = isinstance(value, bool) or not isinstance(value, Integral) or value < least
    if outside or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise UsageError(f"--{name} must be a whole number of at least {least}{limit}, not {value!r}")


def check_number(name: str, value: Any) -> float:
    """The finite number that a flag gives; UsageError for anything else."""
    try:
        finite = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise UsageError(f"--{name} must be a finite number, not {value!r}")
    return float(value)


def _scale(name: str, value: Any, which: str = "") -> None:
    number = check_number(name, value)
    if number <= 0:
        raise UsageError(f"--{name} must be above 0, not {value}{which}")
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise UsageError(f"--{name} must be between {SMALLEST_SCALE:g} and {LARGEST_SCALE:g}, not {value}{which}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """One of the allowed texts; UsageError for anything else, with the nearest."""
    if value not in allowed:
        close = next((a for a in allowed if a.lower() == str(value).lower()), None) or nearest(str(value), allowed)
        hint = f"; did you mean {close}?" if close else ""
        raise UsageError(f"--{name} must be one of {', '.join(allowed)}, not {value!r}{hint}")
