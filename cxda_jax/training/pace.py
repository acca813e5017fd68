"""A training that keeps to a time: steps are left out where it is short, and the rate still falls to 0 at the last."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cxda_jax.errors import UserError
from cxda_jax.machine.progress import duration
from cxda_jax.training.loop import TrainState

TIMED = 5  # steps, after which the first guess of their number is made; later ones follow each EVERY steps
EVERY = 50
AHEAD = 8  # so many steps may wait with their tasks, or up to twice as many: all at once would fill the memory
LEAST_STEPS = 100  # with fewer an adapter learns next to nothing
SPOKEN = 10.0  # seconds between two lines of progress


class TimeLimit:
    """The time that several trainings of so many steps may take, one after another.

    Args:
      began: when it began, by now().
      seconds: from then on.
      trainings: their number.
      after: what follows the last training takes as long as so many validations.
      log: takes lines of progress.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, began: float, seconds: float, trainings: int, after: int, log: Callable[[str], None]):
        self.began, self.end, self.trainings, self.after, self.log = began, began + seconds, trainings, after, log
        self.training = 0  # the number of this one
        self.spoken = began

    def tell(self, line: str, now: float, left: float) -> None:
        """Says a line of progress with the seconds that are left, unless one was said a moment ago."""
        if now - self.spoken >= SPOKEN:
            self.spoken = now
            self.log(f"training {self.training} of {self.trainings}, {line}  eta {duration(max(1.0, left))}")


class Pace:
    """The Schedule of a training that keeps to its part of a time limit. It needs optax.inject_hyperparams.

    Args:
      limit: of this training and those that follow it.
      steps: at most.
      rate: the learning rate at the start; a cosine leads to 0, however many steps are taken.
      validations: how often the best weights are looked for.
      choices: how many validations the choice among them takes at the end.
      validation: the seconds of one.
    """

    log_every = save_every = 2**31  # nothing of it is written
    tasks_per_step, tensorboard = 1, False

    def __init__(
        self, limit: TimeLimit, steps: int, rate: float, validations: int, choices: int, validation: float
    ) -> None:
        self.limit, self.asked, self.validations, self.choices = limit, steps, validations, choices
        self.start_rate, self.validation = rate, validation
        self.taken, self.left, self.progress = 0, steps, 0.0
        self.began, self.until, self.a_step = 0.0, math.inf, 0.0
        self._due = False
        self._earlier: Callable[[], Any] = lambda: None  # returns when the steps but for the last AHEAD are done
        limit.training += 1

    @property
    def steps(self) -> int:
        return self.taken + self.left

    @property
    def rate(self) -> float:
        return self.start_rate * (1 + math.cos(math.pi * self.progress)) / 2

    def due(self, step: int) -> bool:
        return self._due

    def next_call(self, step: int) -> int:
        return 1

    def before_step(self, state: TrainState) -> TrainState:
        # A number of NumPy, as to make one of JAX takes 0.2 ms.
        state.optimizer.hyperparams["learning_rate"] = np.float32(self.rate)
        return state

    def after_step(self, step: int, wait: Callable[[], Any]) -> None:
        """Counts a step, and leaves out some of those to come where time is short."""
        before, self.progress = self.progress, self.progress + (1 - self.progress) / self.left
        self.taken, self.left = self.taken + 1, self.left - 1
        if self.taken == 1:  # it was compiled
            wait()
            self.began = self.limit.now()
            share = 1 / (self.limit.trainings + 1 - self.limit.training)
            rest = self.limit.end - self.limit.after * self.validation - self.began
            self.until = self.began + rest * share
        elif self.left and (self.taken == 1 + TIMED or self.taken % EVERY == 0):
            wait()
            self._keep_to_time(self.limit.now())
        elif self.taken % AHEAD == 0:  # the steps since then go on: to wait for all takes a tenth more time
            self._earlier()
            self._earlier = wait
        part = self.validations * self.progress + 1e-9
        self._due = not self.left or int(part) > int(self.validations * before + 1e-9)

    def to_come(self, progress: float) -> float:
        """The number of validations that a training still has."""
        return (1 - progress) * self.validations + 1 + self.choices

    def _keep_to_time(self, now: float) -> None:
        self.a_step = max(1e-9, (now - self.began) / (self.taken - 1))
        room = int((self.until - self.to_come(self.progress) * self.validation - now) / self.a_step)
        limit = self.limit
        if room < self.left:
            if limit.training == 1 and self.taken + room < min(LEAST_STEPS, self.asked):
                raise UserError(self._too_short(now, max(0, room)))
            self.left = max(1, room)
            told = f"time is short: {self.steps} of {self.asked} steps"
            limit.log(f"{told}, in training {limit.training} of {limit.trainings}")
        others = limit.trainings - limit.training
        validations = self.to_come(self.progress) + others * self.to_come(0) + limit.after
        seconds = (self.left + others * self.asked) * self.a_step + validations * self.validation
        limit.tell(f"step {self.taken}/{self.steps}", now, min(seconds, limit.end - now))

    def _too_short(self, now: float, room: int) -> str:
        limit, each = self.limit, self.asked * self.a_step + self.to_come(0) * self.validation
        seconds = now - limit.began + limit.trainings * each + limit.after * self.validation
        given = (limit.end - limit.began) / 60
        needed = math.ceil(12 * seconds / 60) / 10  # with a fifth to spare
        fitting = f"only {self.taken + room} of {self.asked} steps of each training fit on this machine"
        return f"minutes={given:g}: {fitting}; give minutes={needed:g}"
