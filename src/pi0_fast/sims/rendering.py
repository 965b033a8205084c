"""MuJoCo pictures without a screen: which OpenGL is used, and one renderer for all cameras and sizes of a world.

`choose_backend` sets MUJOCO_GL where it is unset. A renderer opens OpenGL at its first picture, so that physics alone
needs none, and by the backend's own class, since MuJoCo's choice is made when it is first imported, by whomever.
Left out: windows, depth, segmentation.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np

from pi0_fast.sims.packages import load
from pi0_fast.types import SimulatorError

BACKEND = "MUJOCO_GL"
#: Debian and Ubuntu packages that bring a renderer, by backend; either one suffices, no GPU is needed.
APT_PACKAGES = {"egl": ("libegl1", "libgl1", "libgl1-mesa-dri"), "osmesa": ("libosmesa6",)}
APT_LINE = f"apt-get install -y {' '.join(APT_PACKAGES['egl'])}"

_PROBE = """
import mujoco
context = mujoco.GLContext(16, 16)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
"""


def _works(backend: str) -> str | None:
    """None where MuJoCo can open an OpenGL context by a backend, else what it said, in a line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    # In a process of its own: a driver may crash, and PyOpenGL cannot change its mind after a first try.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_PROBE}"],
        env={**environment, BACKEND: backend},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line and not line[0].isspace() and "Error" in line]
    return lines[0].strip() if lines else f"it ended with status {done.returncode}"


def choose_backend() -> str | None:
    """How MuJoCo renders here: what MUJOCO_GL says, else EGL where it works, else OSMesa; sets MUJOCO_GL so.

    Nothing is chosen where MUJOCO_GL is set, where MuJoCo is missing, or where the system brings its own (macOS).
    Where neither works MUJOCO_GL stays unset, and the first picture fails with the remedy.

    Returns:
        The backend's name, or None for MuJoCo's own choice.
    """
    if os.environ.get(BACKEND):
        return os.environ[BACKEND]
    if sys.platform != "linux" or importlib.util.find_spec("mujoco") is None:
        return None
    for backend in APT_PACKAGES:
        if _works(backend) is None:
            os.environ[BACKEND] = backend  # worker processes inherit it, and need not try again
            return backend
    return None


def load_with_mujoco(module: str, extra: str, package: str | None = None) -> ModuleType:
    """`packages.load` for what builds on MuJoCo: the backend is chosen first, since MuJoCo loads it when imported.

    Raises:
        SimulatorError: the package is missing, or MUJOCO_GL names a backend that is; with the line to run.
    """
    choose_backend()
    if "mujoco" not in sys.modules and importlib.util.find_spec("mujoco") is not None:
        try:
            importlib.import_module("mujoco")
        except Exception as error:  # PyOpenGL without a library raises AttributeError, and others
            raise SimulatorError(_no_renderer(f"{type(error).__name__}: {error}")) from error
    return load(module, extra, package)


def check_renderer() -> None:
    """Try to render; SimulatorError with the remedy where nothing does."""
    backend = os.environ.get(BACKEND)
    tried = [backend] if backend else ["egl", "osmesa"] if sys.platform == "linux" else [""]
    reasons = {name: _works(name) for name in tried}
    if None not in reasons.values():
        raise SimulatorError(_no_renderer("; ".join(f"{name or 'default'}: {why}" for name, why in reasons.items())))


def _no_renderer(reason: str) -> str:
    backend = os.environ.get(BACKEND)
    said = f" with {BACKEND}={backend}" if backend else ""
    packages = APT_PACKAGES.get(backend or "egl", APT_PACKAGES["egl"])
    remedy = f"install a renderer: apt-get install -y {' '.join(packages)}"
    return f"MuJoCo cannot render here{said} ({reason}): {remedy}" + (f", or unset {BACKEND}" if backend else "")


def _context_class() -> Any:
    """The class that opens OpenGL by the backend that is set, whatever was set when MuJoCo was imported."""
    backend = os.environ.get(BACKEND)
    if sys.platform == "linux" and backend in APT_PACKAGES:
        return importlib.import_module(f"mujoco.{backend}").GLContext
    if sys.platform == "linux" and not backend:
        check_renderer()  # nothing could be chosen: it says why
    return importlib.import_module("mujoco").GLContext


class OffscreenRenderer:
    """Pictures of one MuJoCo model.

    Args:
        model: mujoco.MjModel; with `fast` its rendering quality is lowered for good.
        fast: no shadows and no antialiasing, which is several times quicker without a GPU.
        hidden_groups: of shapes, which are not drawn beside those that MuJoCo hides itself.
    """

    def __init__(self, model: Any, *, fast: bool = False, hidden_groups: tuple[int, ...] = ()) -> None:
        self.model = model
        self._hidden_groups = hidden_groups
        self._opened: tuple[Any, Any, Any, Any] | None = None
        if fast:
            model.vis.quality.shadowsize = 0
            model.vis.quality.offsamples = 0

    def _open(self, height: int, width: int) -> tuple[Any, Any, Any, Any]:
        """OpenGL, the scene, MuJoCo's context with room for the size, and what is shown."""
        import mujoco

        if self._opened is None:
            buffer = self.model.vis.global_
            buffer.offheight, buffer.offwidth = max(buffer.offheight, height), max(buffer.offwidth, width)
            try:
                opengl = _context_class()(buffer.offwidth, buffer.offheight)
                opengl.make_current()
                context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_150)
            except SimulatorError:
                raise
            except Exception as error:  # what drivers and PyOpenGL raise has no common class
                raise SimulatorError(_no_renderer(f"{type(error).__name__}: {error}")) from error
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
            option = mujoco.MjvOption()
            for group in self._hidden_groups:
                option.geomgroup[group] = 0
            self._opened = opengl, mujoco.MjvScene(self.model, maxgeom=10_000), context, option
        opengl, _, context, _ = self._opened
        opengl.make_current()
        if height > context.offHeight or width > context.offWidth:
            mujoco.mjr_resizeOffscreen(max(width, context.offWidth), max(height, context.offHeight), context)
        return self._opened

    def render(self, data: Any, camera: str, height: int, width: int) -> np.ndarray:
        """What a camera sees of a mujoco.MjData, uint8 [height, width, 3], rows from the top as the camera is held."""
        import mujoco

        _, scene, context, option = self._open(height, width)
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = self.model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, data, option, None, view, everything, scene)
        area = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(area, scene, context)
        pixels = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, area, context)
        return np.ascontiguousarray(pixels[::-1])

    def close(self) -> None:
        """Give OpenGL back; before the interpreter ends, when drivers no longer answer."""
        if self._opened is not None:
            opengl, _, context, _ = self._opened
            self._opened = None
            opengl.make_current()
            context.free()
            opengl.free()
