"""The library's messages name its own parameters; experiment.py makes the config's fields of them, launchers flags."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

from configs import common
from cxda_jax import augment
from cxda_jax.data import glyphs
from cxda_jax.data.episodes import EpisodeSpec, check_spec
from cxda_jax.experiment import as_fields
from cxda_jax.methods.cotta import cotta
from cxda_jax.methods.cxda import cxda
from cxda_jax.methods.erm import bn
from cxda_jax.methods.finetune import FineTuning, ft_em, sf_ocda
from cxda_jax.nets.attention import check
from cxda_jax.nets.pretrained import convert, read_weights
from cxda_jax.train import NotFinite
from cxda_jax.types import UserError
from tests.nets import make_net

ROOT = Path(__file__).parent.parent
CONFIG = common.default().to_dict()
NET = make_net((16, 16, 1), 4)
TUNING = FineTuning(optax.sgd(0.1))
FREE = "analysis", "experiment", "reading"  # made for the commands


@pytest.mark.parametrize(("call", "begins", "groups", "field"), [
    (lambda: bn(NET, momentum=2.0), "momentum=2.0 lies", ["batch_norm"], "batch_norm.momentum=2.0 lies"),
    (lambda: cxda(NET, statistics="no"), "statistics='no' is", ["batch_norm"], "batch_norm.statistics='no' is"),
    (lambda: cxda(NET, support_loss="no"), "support_loss='no' is", ["train"], "train.support_loss='no' is"),
    (lambda: ft_em(NET, TUNING._replace(steps=0)), "steps=0 must", ["finetune", "train"], "finetune.steps=0 must"),
    (lambda: sf_ocda(NET, TUNING, augment.Strong(), 2.0), "probability=2.0", ["sf_ocda"], "sf_ocda.probability=2.0"),
    (lambda: cotta(NET, TUNING, augment.Strong(), copies=0), "copies=0 must", ["cotta"], "cotta.copies=0 must"),
    (lambda: augment.check(augment.Weak(rotate=181)), "rotate=181 lies", ["augment"], "augment.rotate=181 lies"),
    (lambda: augment.check_strong(augment.Strong(hue=1)), "hue=1 lies", ["strong"], "strong.hue=1 lies"),
    (lambda: check(16, 3, 2, "paper"), "heads=3 with ratio=2", ["attention"], "attention.heads=3 with attention.ratio=2"),
    (lambda: read_weights(Path("a/weights=b.txt")), "weights=a/weights=b.txt:", ["net"], "net.weights=a/weights=b.txt:"),
    (lambda: convert({"a": np.ones(1)}, {"params": {}, "batch_stats": {}}), "weights: ", ["net"], "net.weights: "),
    (lambda: glyphs._check(-1, (1, 1, 1), 1), "seed=-1 must", ["data"], "data.seed=-1 must"),
])  # fmt: skip
def test_a_parameter_becomes_a_field(call, begins, groups, field):
    with pytest.raises(UserError) as bare:
        call()
    assert str(bare.value).startswith(begins)
    with pytest.raises(UserError) as told, as_fields(CONFIG | {"data": {"seed": -1}}, *groups):
        call()
    assert str(told.value).startswith(field)


def test_names_amid_a_message_become_fields_and_words_do_not(store):
    with pytest.raises(UserError, match=r"images, per_domain \+ num_query needs 40;"):
        check_spec(EpisodeSpec(num_domains=2), store, "train")
    as_field = pytest.raises(UserError, match=r"images, episode.per_domain \+ episode.num_query needs 40;")
    with as_field, as_fields(CONFIG, "episode"):
        check_spec(EpisodeSpec(num_domains=2), store, "train")
    text = "the steps of 'num_query=3' in train.steps=2, x/steps=1: epochs, --steps=3"
    with pytest.raises(UserError) as kept, as_fields(CONFIG, "train", "episode"):
        raise UserError(text)
    assert str(kept.value) == text


def test_the_launcher_adds_the_flag_that_shows_a_step(tmp_path, data_dir):
    bare = str(NotFinite(1))
    assert bare.startswith("step 1: the loss") and "--" not in bare
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config=configs/glyphs.py:erm,smoke", f"--workdir={tmp_path}/run",
         f"--data_dir={data_dir}", "--config.data.writers=(5, 5, 5)", "--config.data.drawings=41",
         "--config.optimizer.learning_rate=1e15", "--config.train.log_every=1", "--config.net.width=8"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and re.search(
        r"step (\d+): the loss or its gradients are not finite; .*; the same command with --replay_step=\1 shows its "
        "episode; a lower optimizer.learning_rate may help",
        done.stderr,
    ), done.stderr


def test_the_library_knows_neither_fields_nor_flags():
    groups = "|".join(name for name, value in CONFIG.items() if isinstance(value, dict))
    foreign = re.compile(rf"(?<![\w/.])(({groups})\.[a-z_]+(=| |$)|--[a-z])")
    found = []
    for path in sorted((ROOT / "cxda_jax").rglob("*.py")):
        if path.relative_to(ROOT / "cxda_jax").as_posix().startswith(FREE):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "UserError":
                texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                found += [f"{path.name}:{call.lineno}: {text}" for text in texts if foreign.search(text)]
    assert not found
