"""A policy in training that acts in a simulator now and then: with `--env.type`, at every `--env_eval_freq`.

The same episodes each time, those that `pi0-fast eval` begins with; several processes take every n-th of them. What
fails in a simulator does not end a training run: it is said, and written beside the numbers. Left out: the loop of
policy and simulator (closed_loop.py), and evaluating a checkpoint afterwards (evaluate.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pi0_fast.closed_loop import fitted_environment, run
from pi0_fast.display import say, warn
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.reports.evaluation import EpisodeResult, Summary
from pi0_fast.sims import preflight
from pi0_fast.simulation_config import FIRST_SEED
from pi0_fast.train_config import TrainConfig
from pi0_fast.training.processes import Processes
from pi0_fast.types import SimulatorError


class Simulation:
    """What a run evaluates in."""

    def __init__(self, policy: PI0FastPolicy, config: TrainConfig, processes: Processes) -> None:
        """Look whether the policy fits the simulator, before the first step.

        Raises:
            PolicyError: policy and simulator do not fit.
            SimulatorError: the simulator cannot be built.
        """
        preflight(str(config.env.type))
        self._policy, self._options, self._processes = policy, config.eval, processes
        self.environment, specs = fitted_environment(policy, config.simulation)
        cameras = ", ".join(specs[0].cameras) or "none"
        say(
            f"simulator: {config.env.type}, {', '.join(self.environment.tasks)}; cameras {cameras}; "
            f"{self._options.n_episodes} episodes of each task every {config.simulation_freq} steps"
        )

    def measure(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Let the policy act, in all processes at once.

        Returns:
            None where it was stopped, else the numbers of `reports.evaluation.Summary` of all tasks, and of each one
            under ``tasks``; ``problem`` alone where the simulator could not be begun.
        """
        rank, count = self._processes.rank, self._processes.count
        seeds = range(FIRST_SEED, FIRST_SEED + self._options.n_episodes)[rank::count]
        counts, found, problem = Counter(self._policy.counts), [], ""
        try:
            found = run(
                self._policy,
                self.environment,
                seeds,
                batch_size=self._options.batch_size,
                timeout_s=self._options.timeout_s,
                stop=stop,
            )
        except SimulatorError as error:
            problem = str(error)
        finally:
            self._policy.counts.clear()  # what was changed in these observations is no part of training
            self._policy.counts.update(counts)
        parts = self._processes.gather((found, problem, stop()))
        if any(stopped for _, _, stopped in parts):
            return None
        problems = [text for _, text, _ in parts if text]
        if problems:
            warn(f"not evaluated in the simulator: {problems[0]}")
            return {"problem": problems[0]}
        return self._values([episode for episodes, _, _ in parts for episode in episodes])

    def _values(self, episodes: list[EpisodeResult]) -> dict[str, Any]:
        failed = [episode for episode in episodes if episode.failure is not None]
        if failed:
            warn(
                f"in {len(failed)} of {len(episodes)} episodes the simulator failed, which counts as no success; the "
                f"first: {failed[0].failure}"
            )
        values = Summary.of(episodes).to_json()
        if len(self.environment.tasks) > 1:
            values["tasks"] = {
                task: Summary.of([episode for episode in episodes if episode.task == task]).to_json()
                for task in self.environment.tasks
            }
        return values


def said(step: int, values: dict[str, Any]) -> str:
    """The numbers in a line."""
    low, high = values["interval"]
    return (
        f"step {step}: in the simulator {values['successes']} of {values['episodes']} succeeded "
        f"(95 % interval {low:.1%} to {high:.1%}), malformed {values['malformed']:.1%}"
    )
