"""A scripted expert for libero_object: pick an object up from above and let it fall into the basket.

It sees what no policy does: where the object's and the basket's shapes are. It looks at them anew at every step, and
begins again where the object is lost, so that it also finds back after disturbances. Left out: every other suite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_DOWN = np.array([0.0, 0.0, -1.0])
#: What an action of 1 moves the controller's goal by: metres, radians.
_METRES, _RADIANS = 0.05, 0.5
_GAIN = 1.5  # damps by 0.8, for robosuite's critically damped controller
_OPEN, _CLOSED = -1.0, 1.0
#: Metres: fingers reach so far over an object, stay so far above the floor, and objects are carried so high.
_REACH, _FLOOR, _CLEARANCE = 0.035, 0.008, 0.05
_STEPS_TO_CLOSE, _STEPS_TO_OPEN = 10, 8
#: Steps after which a movement that does not arrive counts as done: something is in the way.
_PATIENCE = 60


class PickAndPlace:
    """Called once a step; gives the action of LIBERO's relative control, float32 [7].

    Args:
        world: LIBERO's environment (robosuite's), of a task with the goal (In OBJECT BASKET_contain_region).
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        _, self._object, region = world.parsed_problem["goal_state"][0]
        self._basket = world.object_sites_dict[region].parent_name
        self._phase, self._steps = "above", 0

    # --- what there is ------------------------------------------------------------------------------------------------

    def _points(self, name: str) -> Vector:
        """Corners of an object's shapes in the world, metres, [n, 3]."""
        import mujoco

        model, data = self._world.sim.model._model, self._world.sim.data._data
        root = model.body_rootid[self._world.obj_body_id[name]]
        found = []
        for geom in range(model.ngeom):
            if model.body_rootid[model.geom_bodyid[geom]] != root or not model.geom_contype[geom]:
                continue
            if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
                mesh = model.geom_dataid[geom]
                begin = model.mesh_vertadr[mesh]
                corners = model.mesh_vert[begin : begin + model.mesh_vertnum[mesh]]
            else:
                corners = np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T * model.geom_size[geom]
            found.append(corners @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
        return np.concatenate(found)

    def _hand(self) -> tuple[Vector, Vector, Vector]:
        """Position between the fingertips, direction in which the hand points, direction in which it closes."""
        sim = self._world.sim
        site = self._world.robots[0].eef_site_id
        left, right = (sim.data.get_body_xpos(f"gripper0_{side}finger") for side in ("left", "right"))
        closing = (left - right) / np.linalg.norm(left - right)
        return np.array(sim.data.site_xpos[site]), np.array(sim.data.site_xmat[site].reshape(3, 3)[:, 2]), closing

    def _held(self, points: Vector, hand: Vector) -> bool:
        """Whether the object is where the fingers are."""
        low, high = points.min(0) - 0.02, points.max(0) + 0.02
        return bool(((low < hand) & (hand < high)).all())

    # --- what to do ---------------------------------------------------------------------------------------------------

    def __call__(self) -> npt.NDArray[np.float32]:
        points, basket = self._points(self._object), self._points(self._basket)
        hand, pointing, closing = self._hand()
        low, high = points.min(0), points.max(0)
        if self._phase in ("lift", "carry", "lower") and not self._held(points, hand):
            self._enter("above")
        across, middle = narrow(points[:, :2], closing[:2])
        height = max(np.clip((low[2] + high[2]) / 2, high[2] - _REACH, high[2] - 0.01), low[2] + _FLOOR)
        grasp = np.array([*middle, height])
        below = hand[2] - low[2]  # of the object, below the fingertips
        over = np.array([*(basket.min(0) + basket.max(0))[:2] / 2, basket[:, 2].max() + below + _CLEARANCE])
        if self._phase == "carry":  # the object, not the hand, is to be in the middle
            over[:2] += hand[:2] - (low + high)[:2] / 2
        goal, grip, turn = self._goal(hand, grasp, over, high[2])
        error = goal - hand
        rotation = np.cross(pointing, _DOWN)
        if turn:
            rotation[2] += _angle_between(closing[:2], across)
        self._advance(error, rotation)
        move = np.concatenate([error / _METRES, rotation / _RADIANS]) * _GAIN
        return np.concatenate([np.clip(move, -1, 1), [grip]]).astype(np.float32)

    def _goal(self, hand: Vector, grasp: Vector, over: Vector, top: float) -> tuple[Vector, float, bool]:
        """Where the hand is to go, what the gripper does, and whether the hand turns to the object."""
        if self._phase == "above":
            return np.array([grasp[0], grasp[1], max(top, grasp[2]) + 0.08]), _OPEN, True
        if self._phase == "down":
            return grasp, _OPEN, True
        if self._phase == "close":
            return hand, _CLOSED, False
        if self._phase == "lift":
            return np.array([hand[0], hand[1], over[2]]), _CLOSED, False
        if self._phase == "carry":
            return over, _CLOSED, False
        if self._phase == "lower":
            return over - [0, 0, 2 * _CLEARANCE], _CLOSED, False
        return hand, _OPEN, False  # open

    def _advance(self, error: Vector, rotation: Vector) -> None:
        """On to the next phase where this one is done."""
        self._steps += 1
        sideways, far, turned = np.linalg.norm(error[:2]), np.linalg.norm(error), np.linalg.norm(rotation) < 0.1
        late = self._steps >= _PATIENCE
        if self._phase == "above" and ((sideways < 0.008 and far < 0.02 and turned) or late):
            self._enter("down")
        elif self._phase == "down" and (far < 0.008 or late):
            self._enter("close")
        elif self._phase == "close" and self._steps >= _STEPS_TO_CLOSE:
            self._enter("lift")
        elif self._phase == "lift" and (abs(error[2]) < 0.02 or late):
            self._enter("carry")
        elif self._phase == "carry" and (sideways < 0.015 or late):
            self._enter("lower")
        elif self._phase == "lower" and (far < 0.015 or self._steps >= 12):
            self._enter("open")
        elif self._phase == "open" and self._steps >= _STEPS_TO_OPEN + _PATIENCE:
            self._enter("above")

    def _enter(self, phase: str) -> None:
        self._phase, self._steps = phase, 0


def narrow(points: Vector, closing: Vector) -> tuple[Vector, Vector]:
    """How to take hold of an outline from above.

    Args:
        points: [n, 2] of the outline.
        closing: [2], the direction in which the fingers close now; of almost equal directions the nearest is taken.

    Returns:
        The direction, [2], in which the outline is narrow, and the outline's middle, [2].

    A box of 1 x 2 is narrow along x: narrow([[0, 0], [1, 0], [0, 2], [1, 2]], [1, 0]) gives [1, 0] and [0.5, 1].
    """
    now = np.arctan2(closing[1], closing[0])
    turns = np.linspace(-np.pi / 2, np.pi / 2, 37)
    directions = np.stack([np.cos(now + turns), np.sin(now + turns)])
    shadows = points @ directions
    widths = shadows.max(0) - shadows.min(0)
    best = directions[:, int(np.argmin(widths + 0.005 * np.abs(turns)))]
    frame = np.stack([best, [-best[1], best[0]]])
    inside = points @ frame.T
    return best, (inside.min(0) + inside.max(0)) / 2 @ frame


def _angle_between(closing: Vector, wanted: Vector) -> float:
    """Radians from one direction to another where both ways round are the same, from -pi/2 to pi/2."""
    turn = np.arctan2(wanted[1], wanted[0]) - np.arctan2(closing[1], closing[0])
    return float((turn + np.pi / 2) % np.pi - np.pi / 2)
