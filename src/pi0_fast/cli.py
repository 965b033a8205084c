"""The command `pi0-fast`: its subcommands and how they end. No logic; a subcommand parses, validates, calls.

Exit status: 0 done, 1 failed (one line on stderr), 2 wrong usage (one line on stderr), 130 interrupted; a
traceback only with `--debug`. Nobody has to listen: where stdout or stderr is closed, or read no further, the
work is done all the same and the status is 0; only where stdout cannot be written to (a full disk) is it 1, at
the end. What does the work is imported when a subcommand runs, so that help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pi0_fast import __version__
from pi0_fast.configs import DemoConfig, InspectConfig, TokenizerTrainingConfig
from pi0_fast.convert_config import ConvertConfig, parse_convert
from pi0_fast.display import shown_warnings
from pi0_fast.eval_config import EvalConfig, parse_eval
from pi0_fast.parsing import help_text, nearest, parse
from pi0_fast.record_config import RecordConfig, ReplayConfig
from pi0_fast.streams import forgiving, visible
from pi0_fast.train_config import TrainConfig, parse_train
from pi0_fast.types import Pi0FastError, UsageError

PROGRAM = "pi0-fast"


def _train_tokenizer(config: TokenizerTrainingConfig) -> None:
    from pi0_fast.display import print_table
    from pi0_fast.fitting import train_tokenizer

    for title, rows, headers in train_tokenizer(config).tables():
        print_table(title, rows, headers)


def _train(config: TrainConfig) -> None:
    try:
        from pi0_fast.training.loop import train
    except ImportError as error:
        raise UsageError(f"training needs {error.name}: pip install 'pi0-fast[policy]'") from error

    train(config)


def _evaluate(config: EvalConfig) -> None:
    try:
        from pi0_fast.evaluate import evaluate
    except ImportError as error:
        raise UsageError(f"evaluation needs {error.name}: pip install 'pi0-fast[policy]'") from error

    evaluate(config)


def _inspect(config: InspectConfig) -> None:
    from pi0_fast.display import print_table
    from pi0_fast.inspection import inspect

    for title, rows, headers in inspect(config).tables():
        print_table(title, rows, headers)


def _record(config: RecordConfig) -> None:
    from pi0_fast.display import print_table
    from pi0_fast.recording import record

    for title, rows, headers in record(config).tables():
        print_table(title, rows, headers)


def _replay(config: ReplayConfig) -> None:
    from pi0_fast.display import print_table
    from pi0_fast.replaying import replay

    for title, rows, headers in replay(config).tables():
        print_table(title, rows, headers)


def _convert(config: ConvertConfig) -> None:
    from pi0_fast.display import print_table

    try:
        from pi0_fast.openpi.convert import convert
    except ImportError as error:
        raise UsageError(f"converting needs {error.name}: pip install 'pi0-fast[openpi]'") from error

    for title, rows, headers in convert(config).tables():
        print_table(title, rows, headers)


def _demo(config: DemoConfig) -> None:
    from pi0_fast.demo import run

    run(config, lambda arguments: _run(list(arguments)))


@dataclass(frozen=True)
class Command:
    """A subcommand: one line about it, its configuration class (with `validate`), what it calls, and how it parses.

    `examples` are command lines for its help.
    """

    summary: str
    config_class: type[Any]
    run: Callable[[Any], None]
    parse: Callable[[type[Any], Sequence[str], str], Any] = parse
    examples: tuple[str, ...] = ()


COMMANDS = {
    "train-tokenizer": Command(
        "Fit a FAST action tokenizer on a LeRobot dataset, measure it and save it.",
        TokenizerTrainingConfig,
        _train_tokenizer,
        examples=(
            "pi0-fast train-tokenizer --repo_id=user/my-dataset --action_horizon=16 --output_dir=my_tokenizer",
            "pi0-fast train-tokenizer --repo_id=user/my-dataset --root=path/to/dataset --target_tokens=20",
        ),
    ),
    "train": Command(
        "Train a pi0-FAST policy on a LeRobot dataset, from a checkpoint or from nothing.",
        TrainConfig,
        _train,
        parse_train,
        examples=(
            "pi0-fast train --dataset.repo_id=user/my-dataset --policy.path=lerobot/pi0fast-base \\\n"
            "    --policy.chunk_size=16 --policy.n_action_steps=16 --output_dir=outputs/my_policy",
            "pi0-fast train --resume=true --output_dir=outputs/my_policy",
        ),
    ),
    "eval": Command(
        "Let a policy, or two, act in a simulator: success with intervals, times, videos.",
        EvalConfig,
        _evaluate,
        parse_eval,
        examples=(
            "pi0-fast eval --policy.path=outputs/my_policy/checkpoints/last/pretrained_model \\\n"
            "    --env.type=metaworld --env.task=drawer-open-v3 --output_dir=outputs/eval/mine",
            "pi0-fast eval --compare outputs/eval/mine outputs/eval/other",
        ),
    ),
    "inspect": Command(
        "Report on a tokenizer or a dataset: tables, pictures, json.",
        InspectConfig,
        _inspect,
        examples=(
            "pi0-fast inspect --repo_id=user/my-dataset",
            "pi0-fast inspect --repo_id=user/my-dataset --tokenizer=my_tokenizer --output_dir=report",
        ),
    ),
    "record": Command(
        "Record a simulator's scripted expert as a LeRobot dataset.",
        RecordConfig,
        _record,
        examples=(
            "pi0-fast record --env.type=metaworld --env.task=drawer-open-v3 --env.fast_rendering \\\n"
            "    --repo_id=local/drawer --root=drawer --n_episodes=80",
        ),
    ),
    "replay": Command(
        "Execute a dataset's actions in the simulator again, also through a tokenizer.",
        ReplayConfig,
        _replay,
        examples=("pi0-fast replay --repo_id=local/drawer --root=drawer --tokenizer=my_tokenizer",),
    ),
    "convert": Command(
        "Convert a checkpoint of openpi's pi0-FAST: --from openpi CHECKPOINT OUTPUT.",
        ConvertConfig,
        _convert,
        parse_convert,
        examples=(
            "pi0-fast convert --from openpi pi0_fast_droid my_policy --preset droid",
            "pi0-fast convert --from openpi checkpoints/my_run/29999 my_policy --action_horizon 16 \\\n"
            '    --action_dim 7 --cameras \'["base_0_rgb", "wrist_0_rgb"]\' --relative_dims 0,1,2,3,4,5 \\\n'
            "    --normalization QUANTILES --action_tokenizer physical-intelligence/fast",
        ),
    ),
    "demo": Command(
        "Record, fit, train and drive a small policy in a simulator: the whole story.",
        DemoConfig,
        _demo,
        examples=(
            "pi0-fast demo",
            "pi0-fast demo --quick --tasks=drawer-open-v3,drawer-close-v3 --output_dir=two_tasks",
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name; None: the process's own); returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    with forgiving() as (stdout, _), shown_warnings():
        status = _status(arguments, debug)
        stdout.flush()
        # A reader that has left (`pi0-fast --help | head -1`) has seen what it wanted.
        if status == 0 and stdout.error is not None and not isinstance(stdout.error, BrokenPipeError):
            return _fail(f"done, but its output could not be printed: {stdout.error}", 1, debug=False)
    return status


def _status(arguments: list[str], debug: bool) -> int:
    try:
        _run(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, debug)
    except UsageError as error:
        return _fail(str(error), 2, debug)
    except (Pi0FastError, OSError) as error:
        return _fail(str(error) or type(error).__name__, 1, debug)
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)"
        return _fail(message, 1, debug)
    return 0


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_overview(), end="")
        return
    if arguments[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return
    name, *flags = arguments
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}; {hint}")
    command, program = COMMANDS[name], f"{PROGRAM} {name}"
    if "--help" in flags or "-h" in flags:
        print(help_text(command.config_class, program, command.summary, command.examples), end="")
        return
    config = command.parse(command.config_class, flags, program)
    config.validate()
    command.run(config)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [flags]",
            "",
            "The FAST action tokenizer and the pi0-FAST robot policy.",
            "",
            "Commands:",
            *commands,
            "",
            f"{PROGRAM} COMMAND --help lists the flags of a command; {PROGRAM} --version prints the version.",
            "",
        ]
    )


def _fail(message: str, status: int, debug: bool) -> int:
    """Say in one line on stderr what went wrong; with --debug after the exception's traceback."""
    if debug:
        import traceback

        print(visible(traceback.format_exc()), end="", file=sys.stderr)
    line = " ".join(part.strip() for part in message.splitlines())
    print(f"{PROGRAM}: error: {visible(line)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
