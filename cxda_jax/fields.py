"""The table of all fields of a config: default, range or choices, and help.

The config files, --config.field=value, all checks, --help_config and the documentation follow from it. A default of 0
or '' may stand for a value that is derived elsewhere; the help then says so.
"""

from typing import Any, NamedTuple


class Range(NamedTuple):
    """Numbers from low to high; `closed` says whether each end belongs to it."""

    low: float
    high: float = float("inf")
    closed: tuple[bool, bool] = (True, True)

    def holds(self, number: float) -> bool:
        above = self.low <= number if self.closed[0] else self.low < number
        return above and (number <= self.high if self.closed[1] else number < self.high)

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


class Group(NamedTuple):
    """Fields that are written group.field."""

    help: str
    fields: dict[str, Field]
    at_test: bool = False  # evaluation may change them, since a checkpoint does not depend on them
    optional: bool = False  # a run that lacks the group gets its defaults, so a new method leaves older runs usable


COUNT = Range(1, 10_000)
TASKS = Range(1, 1_000_000)
SEED = Range(0, 2**32 - 1)  # JAX ignores all bits but the last 32
SHARE = Range(0, 1)
POSITIVE = Range(0, float("inf"), (False, False))
NOT_NEGATIVE = Range(0, float("inf"), (True, False))
BLUR = Range(0, 1)  # the kernel of 5 pixels is too small for wider Gaussians

FIELDS: dict[str, Field | Group] = {
    "benchmark": Field("", "The data set; the config's file sets it."),
    "method": Field("cxda", "The method; the part after the colon of --config."),
    "seed": Field(0, "Of the training: initial weights, episodes and augmentation.", SEED),
    "smoke": Field(False, "All sizes are too small for useful results, and results say so."),
    "net": Group("The network.", {
        "name": Field("cnn", "The backbone.", choices=("cnn", "resnet50")),
        "weights": Field("", "resnet50: file of PyTorch's weights to start from, .safetensors or .pth; '': random "
                             "ones."),
        "dont_load": Field(("fc",), "Layers of that file to leave out, by the beginnings of their names."),
        "stages": Field((3, 4, 6, 3), "resnet50: blocks of each stage; published weights need these."),
        "width": Field(128, "cnn: channels.", Range(1, 8192)),
        "padding": Field("arm", "cnn: arm pads its layers by 2, 0, 0 pixels; same by 2, 2, "
                                "2.", choices=("arm", "same")),
        "dtype": Field("float32", "Of convolutions and products; bfloat16 is for accelerators.",
                       choices=("float32", "bfloat16")),
        "precision": Field("default", "Of float32 products on accelerators: default is one pass of bfloat16 on TPUs "
                                      "and TF32 on GPUs; "
                           "high three passes, TF32; highest six passes, float32. CPUs always have float32.",
                           choices=("default", "high", "highest"), optional=True),
        "init": Field("torch", "Kernels and biases start as PyTorch's, U(-1, 1) / sqrt(fan_in), or as flax's, "
                               "LeCun-normal and 0.",
                      choices=("torch", "flax"), optional=True),
    }),
    "attention": Group("Cross-attention of the cxda methods.", {
        "features": Field("pool", "Tokens: pooled or flat features of an image, or its patches (always in cxda_p2p).",
                          choices=("pool", "flat", "patch")),
        "heads": Field(8, "Attention heads.", Range(1)),
        "ratio": Field(2, "Attention has so many times fewer features than the network.", Range(1)),
        "scale": Field("paper", "Scores are divided by: paper sqrt(C / heads); head_dim sqrt(C / ratio / heads).",
                       choices=("paper", "head_dim")),
        "shared_norm": Field(True, "Queries and support share one layer normalisation."),
        "zero_out": Field(False, "The output layer starts at zero, so the network starts as one without attention."),
    }),
    "cxda_any": Group("Method cxda_any.", {
        "full": Field(0.0, "Share of the training images that see all others; the rest see a random number of "
                           "them.", SHARE),
        "learned": Field(32, "Learned tokens, which each image attends to beside the "
                             "support.", Range(0, 100_000), optional=True),
        "prior": Field(20.0, "Number N in the share n / (n + N) of n support images in the statistics; 0: running "
                             "ones alone.",
                       NOT_NEGATIVE, optional=True),
    }, optional=True),
    "batch_norm": Group("Batch normalisation of bn and the cxda methods.", {
        "statistics": Field("flow", "Of training queries: flow the support's with gradients; stop without; own their "
                                    "own.",
                            choices=("flow", "stop", "own")),
        "momentum": Field(1.0, "Share of the support's statistics for the query; the rest are the running "
                               "ones.", SHARE),
        "test_time_only": Field(False, "bn adapts the checkpoints of erm and has no training of its own."),
        "prior": Field(0.0, "Above 0: n support images have the share n / (n + prior), in place of "
                            "momentum.", NOT_NEGATIVE,
                       optional=True),
    }, at_test=True),
    "bn_alpha": Group("Method bn_alpha.", {
        "prior": Field(16.0, "n support images have the share n / (n + prior) in the statistics; the rest are the "
                             "running ones.",
                       POSITIVE),
    }, at_test=True, optional=True),
    "t3a": Group("Method t3a.", {
        "keep": Field(20, "Vectors that make a class's prototype, those of the lowest entropy; 0: "
                          "all.", Range(0, 10_000)),
    }, at_test=True, optional=True),
    "lame": Group("Method lame.", {
        "affinity": Field("knn", "Of two images: knn 1 for neighbours, else 0; rbf a Gaussian of the distance; "
                                 "linear the cosine.",
                          choices=("knn", "rbf", "linear")),
        "neighbours": Field(5, "knn: neighbours of an image; rbf: the last of them gives the width.", COUNT),
        "steps": Field(50, "Fixed-point steps.", COUNT),
    }, at_test=True, optional=True),
    "feature_shift": Group("Method feature_shift.", {
        "gamma": Field(1.0, "Share of the shift that is applied.", NOT_NEGATIVE),
    }, at_test=True, optional=True),
    "cml": Group("Method cml.", {
        "width": Field(64, "Channels of the context network.", Range(1, 8192)),
        "convs": Field(3, "cnn: convolutions of the main network; 2 as ARM has.", choices=(2, 3)),
    }),
    "icrm": Group("Method icrm.", {
        "features": Field("flat", "Tokens: flat features of an image, or pooled ones.", choices=("flat", "pool")),
        "width": Field(128, "Features of an image in the transformer.", Range(1, 8192)),
        "layers": Field(12, "Blocks of the transformer.", Range(1, 1000)),
        "heads": Field(4, "Attention heads of a block; they divide the width.", Range(1)),
        "context": Field(100, "The most support images that count; of more, a random choice.", COUNT),
    }, optional=True),
    "sla": Group("Method sla.", {
        "adapters": Field(2, "Adapters after each layer.", Range(1, 1000)),
        "zero_adapters": Field(False, "They start at zero, so the network starts as one without them."),
        "all_convs": Field(False, "resnet50: adapters beside convolutions with kernels of one pixel "
                                  "too.", optional=True),
    }),
    "finetune": Group("Methods ft_em, ft_im, sf_ocda and cotta.", {
        "steps": Field(10, "Gradient steps a task.", COUNT),
        "rate": Field(0.1, "Share of optimizer.learning_rate.", NOT_NEGATIVE),
        "trainable": Field("all", "batch_norm: scales and biases of normalisation layers alone.",
                           choices=("all", "batch_norm")),
        "statistics": Field("frozen", "Of normalisation layers: frozen the checkpoint's; support the support's.",
                            choices=("frozen", "support")),
    }, at_test=True),
    "sf_ocda": Group("Method sf_ocda.", {
        "probability": Field(0.3, "Probability of augmented input.", SHARE),
        "draw": Field("step", "One decision for the whole support at each step, or one for each image.",
                      choices=("step", "image")),
        "confidence": Field(0.0, "Images whose largest probability is below this do not "
                                 "teach.", Range(0, 1, (True, False))),
    }, at_test=True),
    "cotta": Group("Method cotta.", {
        "copies": Field(32, "Augmented copies that the teacher averages over.", COUNT),
        "average": Field(0.999, "The teacher keeps this share of itself at each step.", SHARE),
        "restore": Field(0.01, "Share of weights that return to the checkpoint's at each step.", SHARE),
        "quantile": Field(0.05, "The threshold is this quantile of the confidences on training images ...", SHARE),
        "margin": Field(0.05, "... minus this.", Range(-1, 1)),
        "answer": Field("student", "Whose predictions count.", choices=("student", "teacher")),
    }, at_test=True),
    "strong": Group("Augmentation in sf_ocda and cotta; 0 switches a part off.", {
        "brightness": Field(0.4, "Greatest change of brightness.", SHARE),
        "contrast": Field(0.3, "Greatest change of contrast.", SHARE),
        "saturation": Field(0.5, "Greatest change of saturation.", SHARE),
        "hue": Field(0.06, "Greatest change of hue, in "
                           "turns.", Range(0, 0.5)),  # half a turn to both sides is the circle
        "gamma": Field(0.3, "Greatest change of gamma.", SHARE),
        "rotate": Field(15.0, "Greatest rotation in degrees.", Range(0, 180)),
        "translate": Field(0.125, "Greatest shift, as a share of the side.", SHARE),
        "scale": Field(0.1, "Greatest change of scale.", Range(0, 0.9)),
        "blur": Field(0.5, "Greatest deviation of the Gaussian blur in pixels; 0, or from 0.001.", BLUR),
        "flip": Field(True, "Flip half of the images."),
        "noise": Field(0.005, "Deviation of Gaussian noise.", SHARE),
        "invert": Field(False, "Augment 1 - pixels, for dark ink on white."),
    }, at_test=True),
    "episode": Group("A task.", {
        "num_domains": Field(5, "Domains of the support.", COUNT),
        "per_domain": Field(20, "Support images of each domain.", COUNT),
        "num_query": Field(20, "Query images.", COUNT),
        "replacement": Field(False, "Draw images with replacement."),
    }, at_test=True),
    "augment": Group("Augmentation in training.", {
        "crop": Field(True, "Random crops."),
        "flip": Field(True, "Horizontal flips."),
        "rotate": Field(30.0, "Greatest rotation in degrees; 0 is off.", Range(0, 180)),
        "fill": Field(0.0, "Pixels from outside the image: 0 black, 1 white.", SHARE),
        "probability": Field(0.5, "Of each of crop, flip and rotation.", SHARE),
    }),
    "optimizer": Group("Optimizer of the training, at a constant rate unless a chain has a schedule.", {
        "name": Field("sgd", "The optimizer.", choices=("sgd", "adam")),
        "learning_rate": Field(1e-2, "Learning rate.", POSITIVE),
        "momentum": Field(0.9, "Momentum of sgd.", Range(0, 1, (True, False))),
        "weight_decay": Field(1e-4, "L2, which is added to the gradient as PyTorch does.", NOT_NEGATIVE),
        "chain": Field("", "optax's calls in place of the fields above, such as clip(1.0), adamw(1e-3); '': none.",
                       optional=True),
    }),
    "train": Group("The training.", {
        "epochs": Field(100, "Epochs of (training images // 100) episodes each.", Range(0, 100_000)),
        "steps": Field(0, "Training steps; 0: from epochs.", Range(0, 2**31 - 1)),
        "tasks_per_step": Field(1, "Episodes of a step.", COUNT),
        "steps_per_call": Field(0, "Steps in one program; 0: 1 on CPUs, 20 elsewhere.", Range(0, 10_000)),
        "support_loss": Field("none", "The support's labels teach too: own in bn and cxda*, leave_one_out in cxda*.",
                              choices=("none", "own", "leave_one_out")),
        "source": Field("device", "device: images are in the device's memory; tfdata: they are streamed.",
                        choices=("device", "tfdata")),
        "log_every": Field(100, "Steps between lines.", Range(1, 2**31 - 1)),
        "save_every": Field(1000, "Steps between checkpoints.", Range(1, 2**31 - 1)),
        "tensorboard": Field(False, "Write event files too."),
    }),
    "evaluation": Group("Validation and test.", {
        "every_epochs": Field(10, "Epochs between validations.", Range(0, 100_000)),
        "every_steps": Field(0, "Steps between validations; 0: from every_epochs.", Range(0, 2**31 - 1)),
        "val_tasks": Field(400, "Tasks of a validation.", TASKS),
        "test_tasks": Field(400, "Tasks of the test.", TASKS),
        "select": Field("mean", "The score that chooses the best checkpoint.", choices=("mean", "worst_decile")),
        "seed": Field(0, "Of the tasks, which are the same for all methods and training seeds.", SEED),
        "per_call": Field(0, "Tasks in one program; 0: 1 on CPUs, 16 elsewhere.", Range(0, 10_000)),
        "tasks": Field("random", "random: val_tasks or test_tasks are drawn; exhaustive: each image is a query once.",
                       choices=("random", "exhaustive"), optional=True),
        "f1": Field("labels", "Macro-F1 is over the classes in a task's labels, or the union with those in its "
                              "predictions.",
                    choices=("labels", "union"), optional=True),
        "reshaped_queries": Field("per_domain", "Of --num_domains, --support_size: as many queries as support images "
                                                "of a "
                                  "domain; fixed: episode.num_query.", choices=("per_domain", "fixed"), optional=True),
    }, at_test=True),
    "data": Group("The benchmark's own fields; the config's file sets them.", {}),
}  # fmt: skip
