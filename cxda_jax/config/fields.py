"""Fields of a config: default, range or choices, help; and the values that they have.

FIELDS holds those of every config. A method declares its own groups in its file, and registry.schema() is the table of
all. The config files, --config.field=value, all checks, --help_config and the documentation follow from it. A default
of 0 or '' may stand for a value that is derived elsewhere; the help then says so.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cxda_jax.errors import UserError, brief


class Values(dict[str, Any]):
    """Values that fields have, as JSON has them. They are attributes too, and cannot be changed."""

    def __init__(self, values: Mapping[str, Any], **about: Any):
        super().__init__({name: Values(v) if isinstance(v, Mapping) else v for name, v in values.items()})
        vars(self).update(about)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a config cannot be changed; cxda_jax.config.reading.replaced() gives another one")

    __setattr__ = __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no field {name!r} here; fields: {', '.join(self)}")
        return self[name]

    def __deepcopy__(self, memo: Any) -> "Values":
        return self


class Config(Values):
    """A config, once each of its values is in its range: checked() of reading.py makes it.

    Attributes:
      hash: of the fields that its method reads; see hashed().
    """

    hash: str
    benchmark: str
    method: str
    seed: int
    smoke: bool


class Range(NamedTuple):
    """Numbers from low to high; `closed` says whether each end belongs to it."""

    low: float
    high: float = float("inf")
    closed: tuple[bool, bool] = (True, True)

    def holds(self, number: float) -> bool:
        above = self.low <= number if self.closed[0] else self.low < number
        return above and (number <= self.high if self.closed[1] else number < self.high)

    @property
    def expected(self) -> str:
        """In words."""
        least = f"{'at least' if self.closed[0] else 'above'} {self.low:.10g}"
        most = f" and {'at most' if self.closed[1] else 'below'} {self.high:.10g}"
        return least + most * math.isfinite(self.high)

    def __str__(self) -> str:
        end = "]" if self.closed[1] and self.high < float("inf") else ")"
        return f"{'[' if self.closed[0] else '('}{self.low:.10g}, {self.high:.10g}{end}"


class Field(NamedTuple):
    """A field of a config. Its type is that of its default."""

    default: Any
    help: str
    within: Range | None = None  # of a number
    choices: tuple[Any, ...] = ()
    optional: bool = False  # a run that lacks the field gets its default, so a new field leaves older runs usable
    smoke: Any = None  # its value where all programs run in seconds; None: the config's own

    def check(self, name: str, value: Any) -> None:
        """Raises a UserError if the value is outside the range or the choices; `name` is that of the field."""
        if self.choices:
            choose(name, value, self.choices)
        if self.within and not self.within.holds(value):
            fault = "must be" if math.isfinite(value) or math.isfinite(self.within.high) else "must be a finite number"
            raise UserError(f"{fault} {self.within.expected}", name, value)


class Group(NamedTuple):
    """Fields that are written group.field."""

    help: str
    fields: dict[str, Field]
    at_test: bool = False  # evaluation may change them, since a checkpoint does not depend on them

    def defaults(self) -> dict[str, Any]:
        return {name: field.default for name, field in self.fields.items()}


COUNT = Range(1, 10_000)
TASKS = Range(1, 1_000_000)
SEED = Range(0, 2**32 - 1)  # JAX ignores all bits but the last 32
SHARE = Range(0, 1)
POSITIVE = Range(0, float("inf"), (False, False))
NOT_NEGATIVE = Range(0, float("inf"), (True, False))

AUGMENT = Group("Augmentation in training.", {
    "crop": Field(True, "Random crops."),
    "flip": Field(True, "Horizontal flips."),
    "rotate": Field(30.0, "Greatest rotation in degrees; 0 is off.", Range(0, 180)),
    "fill": Field(0.0, "Pixels from outside the image: 0 black, 1 white.", SHARE),
    "probability": Field(0.5, "Of each of crop, flip and rotation.", SHARE),
})  # fmt: skip
FIELDS: dict[str, Field | Group] = {
    "benchmark": Field("", "The data set; the config's file sets it."),
    "method": Field("cxda", "The method; the part after the colon of --config."),
    "seed": Field(0, "Of the training: initial weights, episodes and augmentation.", SEED),
    "smoke": Field(False, "All sizes are too small for useful results, and results say so."),
    "net": Group("The network.", {
        "name": Field("cnn", "The backbone: cnn, resnet50, or another one of NETS."),
        "weights": Field("", "resnet50: file of PyTorch's weights to start from, .safetensors or .pth; '': none."),
        "dont_load": Field(("fc",), "Layers of that file to leave out, by the beginnings of their names."),
        "stages": Field((3, 4, 6, 3), "resnet50: blocks of each stage; published weights need these.",
                        smoke=(1, 1, 1)),
        "width": Field(128, "cnn: channels.", Range(1, 8192), smoke=16),  # 8 heads of one channel each
        "padding": Field("arm", "cnn: arm pads its layers by 2, 0, 0 pixels; same by 2, 2, 2.",
                         choices=("arm", "same")),
        "dtype": Field("float32", "Of convolutions and products; bfloat16 is for accelerators.",
                       choices=("float32", "bfloat16")),
        "precision": Field("default", "Of float32 products on TPUs (GPUs): default one pass of bfloat16 (TF32); high "
                                      "three passes (TF32); highest six passes (float32). CPUs always have float32.",
                           choices=("default", "high", "highest"), optional=True),
        "init": Field("torch", "Kernels and biases start as PyTorch's, U(-1, 1) / sqrt(fan_in), or as flax's, "
                               "LeCun-normal and 0.", choices=("torch", "flax"), optional=True),
    }),
    "episode": Group("A task.", {
        "num_domains": Field(5, "Domains of the support.", COUNT),
        "per_domain": Field(20, "Support images of each domain.", COUNT),
        "num_query": Field(20, "Query images.", COUNT),
        "replacement": Field(False, "Draw images with replacement."),
        "shares": Field("natural", "Of a domain's classes: natural its own; even; dirichlet drawn for each task; any "
                                   "likewise, with a concentration that is drawn too, from 0.1 to 10.",
                        choices=("natural", "even", "dirichlet", "any"), optional=True),
        "concentration": Field(0.3, "Of dirichlet: 0.1 leaves a device few classes, 100 nearly equal shares.",
                               Range(0.001, 1e6), optional=True),
        "mixture": Field("even", "Parts of the support that domains have: even; any draws for each task how many of "
                                 "its domains it has, from one to all, and their parts.",
                         choices=("even", "any"), optional=True),
        "skip_small": Field(False, "Leave out domains that have too few images for a task.", optional=True),
    }, at_test=True),
    "augment": AUGMENT,
    "optimizer": Group("Optimizer of the training, at a constant rate.", {
        "name": Field("sgd", "The optimizer.", choices=("sgd", "adam")),
        "learning_rate": Field(1e-2, "Learning rate.", POSITIVE),
        "momentum": Field(0.9, "Momentum of sgd.", Range(0, 1, (True, False))),
        "weight_decay": Field(1e-4, "L2, which is added to the gradient as PyTorch does.", NOT_NEGATIVE),
    }),
    "train": Group("The training.", {
        "epochs": Field(100, "Epochs of (training images // 100) episodes each.", Range(0, 100_000)),
        "steps": Field(0, "Training steps; 0: from epochs.", Range(0, 2**31 - 1), smoke=20),
        "tasks_per_step": Field(1, "Episodes of a step.", COUNT),
        "steps_per_call": Field(0, "Steps in one program; 0: 1 on CPUs, 20 elsewhere.", Range(0, 10_000)),
        "support_loss": Field("none", "The support's labels teach too: own in bn and cxda*, leave_one_out in cxda*.",
                              choices=("none", "own", "leave_one_out")),
        "held_out": Field(0.0, "The part of the training data, by domains, that erm and erm_iid leave out. Of cxda, "
                               "cxda_loo, cxda_any and icrm: that their trunk, a trained one that stays, was not "
                               "trained on, and they are.",
                          Range(0, 1, (True, False)), optional=True),
        "source": Field("device", "device: images are in the device's memory; tfdata: they are streamed.",
                        choices=("device", "tfdata")),
        "log_every": Field(100, "Steps between lines.", Range(1, 2**31 - 1), smoke=5),
        "save_every": Field(1000, "Steps between checkpoints.", Range(1, 2**31 - 1)),
        "tensorboard": Field(False, "Write event files too."),
    }),
    "evaluation": Group("Validation and test.", {
        "every_epochs": Field(10, "Epochs between validations.", Range(0, 100_000)),
        "every_steps": Field(0, "Steps between validations; 0: from every_epochs.", Range(0, 2**31 - 1), smoke=10),
        "val_tasks": Field(400, "Tasks of a validation.", TASKS, smoke=4),
        "test_tasks": Field(400, "Tasks of the test.", TASKS, smoke=10),
        "select": Field("mean", "The score that chooses the best checkpoint.", choices=("mean", "worst_decile")),
        "seed": Field(0, "Of the tasks, which are the same for all methods and training seeds.", SEED),
        "per_call": Field(0, "Tasks in one program; 0: 1 on CPUs, 16 elsewhere.", Range(0, 10_000)),
        "tasks": Field("random", "random: val_tasks or test_tasks are drawn; exhaustive: each image is a query once.",
                       choices=("random", "exhaustive"), optional=True),
        "f1": Field("labels", "Macro-F1 is over the classes in a task's labels, or the union with the predicted ones.",
                    choices=("labels", "union"), optional=True),
        "reshaped_queries": Field("per_domain", "Queries of --num_domains, --support_size: as many as a domain has "
                                                "support images; fixed: episode.num_query.",
                                  choices=("per_domain", "fixed"), optional=True),
    }, at_test=True),
    "data": Group("The benchmark's own fields; the config's file sets them.", {}),
}  # fmt: skip


def choose(name: str, value: Any, allowed: Any) -> Any:
    """Returns the value if it is allowed. Otherwise raises a UserError that suggests the nearest one."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), map(str, allowed), n=1)
        hint, known = f"did you mean {near[0]!r}? " if near else "", ", ".join(map(str, sorted(allowed)))
        raise UserError("unknown", name, value, f"{hint}choose from {brief(known, 100)}")
    return value


def lookup(name: str, key: str, table: Mapping[str, Any]) -> Any:
    """The table's entry of this key. Raises a UserError that suggests the nearest key if there is none."""
    return table[choose(name, key, table)]
