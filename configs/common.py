"""What all configs share: the paper's defaults, and how `file.py:method,smoke` is read.

A benchmark's file sets what differs. Every field can be overridden: --config.optimizer.learning_rate=0.003
"""

from typing import Any

from ml_collections import ConfigDict


def default() -> Any:
    """The paper's protocol. Zeros stand for a value derived elsewhere, as the comment says."""
    c = ConfigDict()
    c.benchmark = ""
    c.method = "cxda"
    c.seed = 0
    c.smoke = False  # too small to mean anything; results say so

    c.net = ConfigDict()
    c.net.name = "cnn"  # cnn, resnet50
    c.net.weights = ""  # resnet50: PyTorch's, .safetensors or .pth; '': a random start
    c.net.dont_load = ("fc",)  # layers of that file to leave out, by their first letters
    c.net.stages = (3, 4, 6, 3)  # of resnet50: blocks; published weights need these
    c.net.width = 128  # of cnn
    c.net.padding = "arm"  # arm: 2, 0, 0; same: 2, 2, 2
    c.net.dtype = "float32"  # of matrix work; bfloat16 on accelerators

    c.attention = ConfigDict()
    c.attention.features = "pool"  # what attends: pool, flat (cxda_p2p: always patch)
    c.attention.heads = 8
    c.attention.ratio = 2
    c.attention.scale = "paper"  # paper: sqrt(C / heads); head_dim: sqrt(C / ratio / heads)
    c.attention.shared_norm = True
    c.attention.zero_out = False

    c.batch_norm = ConfigDict()
    c.batch_norm.statistics = "flow"  # training query: flow, stop (gradients through the support's), own
    c.batch_norm.momentum = 1.0  # share of the support's statistics in what the query sees
    c.batch_norm.test_time_only = False  # bn without training of its own, on the checkpoints of erm

    c.cml = ConfigDict()
    c.cml.width = 64  # of the context network
    c.cml.convs = 3  # of the main network; 2: ARM's

    c.sla = ConfigDict()
    c.sla.adapters = 2
    c.sla.zero_adapters = False  # start as the plain network

    c.finetune = ConfigDict()  # ft_em, ft_im, sf_ocda, cotta
    c.finetune.steps = 10
    c.finetune.rate = 0.1  # share of optimizer.learning_rate
    c.finetune.trainable = "all"  # all, batch_norm (scales and biases of normalisation layers)
    c.finetune.statistics = "frozen"  # frozen: the checkpoint's; support: the support's

    c.sf_ocda = ConfigDict()
    c.sf_ocda.probability = 0.3  # of augmented input
    c.sf_ocda.draw = "step"  # step: for the whole support at once; image
    c.sf_ocda.confidence = 0.0  # support images of which the checkpoint is less sure do not teach

    c.cotta = ConfigDict()
    c.cotta.copies = 32
    c.cotta.average = 0.999
    c.cotta.restore = 0.01
    c.cotta.quantile = 0.05  # threshold: this quantile of the confidences on training images ...
    c.cotta.margin = 0.05  # ... minus this
    c.cotta.answer = "student"  # student, teacher

    c.strong = ConfigDict()  # augmentation in sf_ocda and cotta; 0 switches a part off
    c.strong.brightness = 0.4
    c.strong.contrast = 0.3
    c.strong.saturation = 0.5
    c.strong.hue = 0.06
    c.strong.gamma = 0.3
    c.strong.rotate = 15.0
    c.strong.translate = 0.125
    c.strong.scale = 0.1
    c.strong.blur = 0.5
    c.strong.flip = True
    c.strong.noise = 0.005
    c.strong.invert = False  # augment 1 - pixels

    c.episode = ConfigDict()
    c.episode.num_domains = 5
    c.episode.per_domain = 20
    c.episode.num_query = 20
    c.episode.replacement = False

    c.augment = ConfigDict()
    c.augment.crop = True
    c.augment.flip = True
    c.augment.rotate = 30.0  # degrees; 0 is off
    c.augment.fill = 0.0
    c.augment.probability = 0.5

    c.optimizer = ConfigDict()
    c.optimizer.name = "sgd"
    c.optimizer.learning_rate = 1e-2
    c.optimizer.momentum = 0.9
    c.optimizer.weight_decay = 1e-4

    c.train = ConfigDict()
    c.train.epochs = 100  # of (training images // 100) episodes each
    c.train.steps = 0  # 0: from epochs
    c.train.tasks_per_step = 1
    c.train.steps_per_call = 0  # steps in one program; 0: 1 on CPUs, 20 elsewhere
    c.train.support_loss = "none"  # none; own (bn, cxda*), leave_one_out (cxda*): the support's labels teach too
    c.train.source = "device"  # device: images resident; tfdata: streamed
    c.train.log_every = 100
    c.train.save_every = 1000
    c.train.tensorboard = False

    c.evaluation = ConfigDict()
    c.evaluation.every_epochs = 10
    c.evaluation.every_steps = 0  # 0: from every_epochs
    c.evaluation.val_tasks = 400
    c.evaluation.test_tasks = 400
    c.evaluation.select = "mean"  # mean, worst_decile
    c.evaluation.seed = 0  # of the tasks; the same for all methods and training seeds
    c.evaluation.per_call = 0  # tasks at once; 0: 1 on CPUs, 16 elsewhere

    c.data = ConfigDict()
    return c


def variant(argument: str | None) -> tuple[str, bool]:
    """'cxda,smoke' to ("cxda", True): a method, and whether to shrink everything to seconds."""
    method, _, rest = (argument or "cxda").partition(",")
    if rest not in ("", "smoke"):
        raise ValueError(f"variant {rest!r} is unknown; the only one is 'smoke', as in :{method},smoke")
    return method, rest == "smoke"


def shrink(c: Any) -> None:
    """A config's smoke twin: the same paths in seconds."""
    c.smoke = True
    c.net.width = 16  # 8 heads of one channel each
    c.net.stages = (1, 1, 1)
    c.cml.width = 8
    c.cotta.copies = 2
    c.finetune.steps = 2
    c.train.steps = 20
    c.train.log_every = 5
    c.evaluation.every_steps = 10
    c.evaluation.val_tasks = 4
    c.evaluation.test_tasks = 10
