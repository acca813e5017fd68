"""What a user may get wrong on the command line and in configs: each costs one short line, the one that stands here."""

import contextlib
import io
import shutil
import sys
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from cxda_jax import backend
from cxda_jax.data.store import open_store
from cxda_jax.experiment import build_on, open_data
from cxda_jax.types import UserError
from launch import cli, evaluate, prepare, report, train
from tests.lines import (
    at_the_root,  # noqa: F401
    is_as,
    one_line,
    parametrised,
    write_run,
)

# Config files: name, text, spec after --config=, line

CONFIG_FILES = [
    ("missing", "", "other.py", "--config=other.py: no file other.py; run from the repository's root, or give the file's path"),
    ("missing near", None, "configs/glyphz.py:cxda", "--config=configs/glyphz.py:cxda: no file configs/glyphz.py; did you mean configs/glyphs.py?"),
    ("a folder", None, "configs", "--config=configs: no file configs; did you mean configs/glyphs.py?"),
    ("no file name", None, ":cxda", "--config=:cxda: no file ''; run from the repository's root, or give the file's path"),
    ("unknown variant", None, "configs/glyphs.py:cxda,smok", "--config=configs/glyphs.py:cxda,smok: variant 'smok' is unknown; the only one is 'smoke', as in :cxda,smoke"),
    ("syntax error", "def get_config(:\n", "mine.py", "--config=mine.py: SyntaxError: invalid syntax (mine.py, line 1); --debug shows where"),
    ("binary", b"x = '\xff'\n", "mine.py", "--config=mine.py: SyntaxError: (...); --debug shows where"),
    ("no get_config", "c = 1\n", "mine.py:cxda", "--config=mine.py:cxda: defines no get_config(argument); see configs/glyphs.py"),
    ("raises", "def get_config(argument=None):\n    return 1 / 0\n", "mine.py", "--config=mine.py: ZeroDivisionError: division by zero; --debug shows where"),
    ("raises a value error", "def get_config(argument=None):\n    raise ValueError('a\\n' + 'b ' * 400)\n", "mine.py", "--config=mine.py: a b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b b ...b b b b b b b b b b b b b b b b b b b"),
    ("imports what is not there", "import no_such_package\n", "mine.py", "--config=mine.py: ModuleNotFoundError: No module named 'no_such_package'; --debug shows where"),
    ("takes no variant", "def get_config():\n    pass\n", "mine.py:cxda", "--config=mine.py:cxda: TypeError: get_config() takes 0 positional arguments but 1 was given; --debug shows where"),
    ("returns nothing", "def get_config(argument=None):\n    pass\n", "mine.py", "--config=mine.py: get_config() returns a NoneType; start from configs.common.default()"),
    ("returns a part", "from ml_collections import ConfigDict\nget_config = lambda _: ConfigDict({'benchmark': 'x', 'seed': 1})\n",
     "mine.py", "--config=mine.py: get_config() returns a config without attention; start from configs.common.default()"),
]  # fmt: skip


@parametrised(CONFIG_FILES)
def test_config_files(tmp_path, monkeypatch, number):
    _, text, spec, line = CONFIG_FILES[number]
    if text is not None:
        monkeypatch.chdir(tmp_path)
        Path("mine.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    flags.FLAGS.mark_as_parsed()  # --debug is looked at
    with pytest.raises(UserError) as error:
        cli.load_config(spec)
    assert is_as(one_line(error.value, tmp_path), line)


# Overrides: --config.NAME=TEXT of configs/glyphs.py:METHOD, line

OVERRIDES = [
    ("cxda", "optimizer.learning_rat", "1", "--config.optimizer.learning_rat: config.optimizer has no field 'learning_rat'; did you mean 'learning_rate'?"),
    ("cxda", "zzz", "1", "--config.zzz: config has no field 'zzz'; fields: attention, augment, batch_norm, benchmark, cml, cotta, data, episode, evaluation, finetune, method, net, optimizer, seed, sf_ocda, sla, smoke, ..."),
    ("cxda", "seed.x", "1", "--config.seed.x: config.seed is a single value, it has no field 'x'"),
    ("cxda", "episode", "5", "--config.episode is a group; set one of its fields: num_domains, num_query, per_domain, replacement"),
    ("cxda", "train.steps", "ten", "--config.train.steps=ten: expected a int such as 0"),
    ("cxda", "train.steps", "1e3", "--config.train.steps=1e3: expected a int such as 0"),
    ("cxda", "train.steps", "", "--config.train.steps=: expected a int such as 0"),
    ("cxda", "train.steps", "-1", "train.steps=-1 must be at least 0"),
    ("cxda", "train.epochs", "-1", "train.epochs=-1 must be at least 0"),
    ("cxda", "train.tasks_per_step", "0", "train.tasks_per_step=0 must be at least 1"),
    ("cxda", "train.steps_per_call", "-1", "train.steps_per_call=-1 must be at least 0"),
    ("cxda", "train.source", "disk", "train.source='disk' is unknown; choose from device, tfdata"),
    ("cxda", "train.support_loss", "both", "train.support_loss='both' is not one of none, own, leave_one_out for this method"),
    ("erm_iid", "train.log_every", "0", "train.log_every=0 must be at least 1"),
    ("cxda", "optimizer.learning_rate", "nan", "--config.optimizer.learning_rate=nan: expected a finite float such as 0.03"),
    ("cxda", "optimizer.learning_rate", "0.01,", "--config.optimizer.learning_rate=0.01,: expected a finite float such as 0.03"),
    ("cxda", "optimizer.learning_rate", "-0.1", "optimizer.learning_rate=-0.1 must be a finite number above 0"),
    ("cxda", "optimizer.momentum", "1", "optimizer.momentum=1.0 must be a number from 0 to below 1"),
    ("cxda", "optimizer.weight_decay", "-1e-4", "optimizer.weight_decay=-0.0001 must be a finite number, 0 or more"),
    ("cxda", "optimizer.name", "adamw", "optimizer.name='adamw' is unknown; did you mean 'adam'? choose from adam, sgd"),
    ("cxda", "episode.num_domains", "0", "episode.num_domains=0 must be at least 1"),
    ("cxda", "episode.num_domains", "4", "episode.num_domains=4 but split 'train' of tiny has 3 domains"),
    ("cxda", "episode.per_domain", "11", "domain 'd0' of split 'train' has 30 images, episode.per_domain + episode.num_query needs 31; drop the domain or ask for fewer"),
    ("erm", "episode.num_query", "9999", "domain 'd0' of split 'train' has 30 images, episode.per_domain + episode.num_query needs 10009; drop the domain or ask for fewer"),
    ("cxda", "episode.replacement", "maybe", "--config.episode.replacement=maybe: expected a bool such as False"),
    ("cxda", "attention.heads", "7", "attention.heads=7 with attention.ratio=2 does not divide the 16 features; choose heads * ratio among the divisors of 16"),
    ("cxda", "attention.features", "patches", "attention.features='patches' is unknown; did you mean 'patch'? choose from flat, patch, pool"),
    ("cxda", "attention.scale", "root", "attention.scale='root' is not one of paper, head_dim"),
    ("bn", "batch_norm.momentum", "1.5", "batch_norm.momentum=1.5 lies outside 0..1; 1 takes the support's statistics alone"),
    ("bn", "batch_norm.statistics", "flows", "batch_norm.statistics='flows' is not one of flow, stop, own"),
    ("cxda", "net.name", "resnet", "net.name='resnet' is unknown; did you mean 'resnet50'? choose from cnn, resnet50"),
    ("cxda", "net.dtype", "float23", "net.dtype='float23' is unknown; did you mean 'float32'? choose from bfloat16, float32"),
    ("cxda", "net.width", "0", "net.width=0 must be at least 1"),
    ("cxda", "net.padding", "valid", "net.padding='valid' is unknown; choose from arm, same"),
    ("cml", "cml.convs", "4", "cml.convs=4 is unknown; choose from 2, 3"),
    ("sla", "sla.adapters", "0", "sla.adapters=0 must be at least 1"),
    ("ft_em", "finetune.steps", "0", "finetune.steps=0 must be at least 1"),
    ("ft_em", "finetune.trainable", "head", "finetune.trainable='head' is not one of all, batch_norm"),
    ("cotta", "cotta.average", "2", "cotta.average=2.0 lies outside 0..1"),
    ("sf_ocda", "strong.hue", "0.7", "strong.hue=0.7 lies outside 0..0.5; 0 switches it off"),
    ("cxda", "augment.rotate", "-5", "augment.rotate=-5.0 lies outside 0..180 degrees; 0 switches it off"),
    ("cxda", "evaluation.val_tasks", "0", "evaluation.val_tasks=0 must be at least 1"),
    ("cxda", "evaluation.every_steps", "-2", "evaluation.every_steps=-2 must be at least 0"),
    ("cxda", "evaluation.select", "best", "evaluation.select='best' is unknown; choose from mean, worst_decile"),
    ("cxda", "seed", "-1", "seed=-1 must be at least 0"),
    ("cxda", "seed", "99999999999999999999", "--config.seed=99999999999999999999: expected a int such as 0"),
    ("cxda", "method", "cxdaa", "method='cxdaa' is unknown; did you mean 'cxda'? choose from bn, cml, cotta, cxda, cxda_loo, cxda_p2p, cxda_supervised, erm, erm_iid, ft_em, ft_im, sf_ocda, sla"),
]  # fmt: skip


@parametrised([(f"{name}={text}",) for _, name, text, _ in OVERRIDES])
def test_overrides(tmp_path, store, number):
    method, name, text, line = OVERRIDES[number]
    config = cli.load_config(f"configs/glyphs.py:{method}")
    small = {"episode.num_domains": "3", "episode.per_domain": "10", "train.steps": "5", "evaluation.every_steps": "5"}
    with pytest.raises(UserError) as error:
        for field, value in {**small, name: text}.items():
            cli.override(config, field, value)
        build_on(cli.resolve(config), store)
    assert is_as(one_line(error.value, tmp_path), line)


DATA = [
    ("glyphs", "data.writers", "(6, 5)", "data.writers=(6, 5): give three counts of at least 1, for train, val and test"),
    ("glyphs", "data.writers", "(6, 5, 0)", "data.writers=(6, 5, 0): give three counts of at least 1, for train, val and test"),
    ("glyphs", "data.writers", "[6, 5, 5]", "--config.data.writers=[6, 5, 5]: expected a tuple such as (6, 5, 5)"),
    ("glyphs", "data.drawings", "0", "data.drawings=0 must be at least 1"),
    ("glyphs", "data.drawing", "100", "--config.data.drawing: config.data has no field 'drawing'; did you mean 'drawings'?"),
    ("glyphs_c", "data.images", "-3", "data.images=-3 must be at least 1"),
    ("glyphs_c", "data.seed", "-3", "data.seed=-3 must not be negative"),
    ("glyphs", "benchmark", "glyphs_d", "benchmark='glyphs_d' is unknown; did you mean 'glyphs_c'? choose from cifar_c, femnist, folder, glyphs, glyphs_c, iwildcam, tiny_imagenet_c"),
    ("folder", "data.name", "mine", "{tmp}/mine: no prepared data; python -m launch.prepare --benchmark=folder --raw_dir=DIR --name=mine"),
    ("femnist", "data.name", "../elsewhere", "{tmp}/../elsewhere: no prepared data; python -m launch.prepare --benchmark=femnist --raw_dir=DIR --name=../elsewhere"),
]  # fmt: skip


@parametrised([(f"{benchmark} {name}={text}",) for benchmark, name, text, _ in DATA])
def test_data_options(tmp_path, number):
    benchmark, name, text, line = DATA[number]
    config = cli.load_config(f"configs/{benchmark}.py:cxda,smoke")
    with pytest.raises(UserError) as error:
        cli.override(config, name, text)
        open_data(cli.resolve(config), tmp_path)
    assert is_as(one_line(error.value, tmp_path), line)
    assert not list(tmp_path.iterdir())


# Command lines, run in this process: launcher, arguments, line

MAINS = {"train": train.main, "evaluate": evaluate.main, "report": report.main, "prepare": prepare.main}
REQUIRED = {"train": ("config", "workdir"), "evaluate": (), "report": (), "prepare": ("benchmark", "raw_dir")}
TRAIN = ("--config=configs/glyphs.py:cxda,smoke", "--workdir={tmp}/w")
PREPARE = ("--benchmark=folder", "--raw_dir={tmp}/raw")
COMMANDS = [
    ("train", (*TRAIN, "--confg.seed=1"), "Unknown command line flag 'confg.seed'"),
    ("train", (*TRAIN, "cxda"), "unexpected argument 'cxda'; flags are written --name=value"),
    ("train", TRAIN[:1], "flag --workdir=None: Flag --workdir must have a value other than None."),
    ("train", TRAIN[1:], "flag --config=None: Flag --config must have a value other than None."),
    ("train", (*TRAIN, "--config.seed"), "--config.seed has no value; write --config.seed=VALUE"),
    ("train", (*TRAIN, "--config.=3"), "--config.: config has no field ''; fields: attention, augment, batch_norm, benchmark, cml, cotta, data, episode, evaluation, finetune, method, net, optimizer, seed, sf_ocda, sla, smoke, strong, train"),
    ("train", (*TRAIN, "--debug=maybe"), "flag --debug=maybe: ('Non-boolean argument to boolean flag', 'maybe')"),
    ("train", ("--config=configs/glyphs.py:erm", "--workdir={tmp}/w", "--config.net.widht=3"), "--config.net.widht: config.net has no field 'widht'; did you mean 'width'?"),
    ("train", ("--config=configs/glyphs.py:erm,smoke", "--config.data.writers=(5, 5, 5)", "--config.data.drawings=41",
               "--workdir={tmp}/run/config.json"),
     "--workdir={tmp}/run/config.json: cannot be written (File exists); choose another"),
    ("evaluate", (), "--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'"),
    ("evaluate", ("--runs={tmp}/none*",), "--runs={tmp}/none*: nothing matches; name run directories that launch.train made"),
    ("evaluate", ("--runs={tmp}/run/config.json",), "--runs={tmp}/run/config.json: nothing that matches holds a config.json; name run directories that launch.train made"),
    ("evaluate", ("--runs={tmp}/run", "--num_tasks=-4"), "flag --num_tasks=-4: -4 is not a positive integer"),
    ("evaluate", ("--runs={tmp}/run", "--num_tasks=many"), "flag --num_tasks=many: invalid literal for int() with base 10: 'many'"),
    ("evaluate", ("--runs={tmp}/run", "--methods=cxda,exda"), "--methods=exda: no such method; choose from all, erm, erm_iid, bn, cml, cxda, cxda_p2p, cxda_supervised, cxda_loo, ft_em, ft_im, sf_ocda, cotta, sla"),
    ("evaluate", ("--runs={tmp}/run", "--methods=ft_em"), "--methods=ft_em: --runs={tmp}/run holds no run to test it on; train one first"),
    ("evaluate", ("--runs={tmp}/run", "--against=bm"), "--against=bm: no such method among the runs; choose from cxda"),
    ("evaluate", ("--runs={tmp}/run", "--num_domains=0,5"), "--num_domains=0: give whole numbers of at least 1, such as 1,10"),
    ("evaluate", ("--runs={tmp}/run", "--support_size=3"), "--support_size=3: 3 support images cannot come from 5 domains; ask for more images"),
    ("evaluate", ("--runs={tmp}/run", "--config.net.width=4"), "--config.net.width: a trained run fixes it; this command can change batch_norm, cotta, episode, evaluation, finetune, sf_ocda, strong"),
    ("evaluate", ("--runs={tmp}/run", "--config.episode.per_domain=x"), "--config.episode.per_domain=x: expected a int such as 20"),
    ("report", ("--runs={tmp}/run",), "--report is missing; name the folder to write, such as --report=runs/report"),
    ("report", ("--runs={tmp}/bare", "--report={tmp}/r"), "--runs={tmp}/bare: nothing to report; the first fault: {tmp}/bare: no result.json; evaluate it: python -m launch.evaluate --runs={tmp}/bare"),
    ("report", ("--runs={tmp}/run", "--report={tmp}/r", "--against=bn"), "--against=bn: a report compares with the paper alone; give paper, paper_stand_ins, or nothing"),
    ("prepare", PREPARE[1:], "flag --benchmark=None: Flag --benchmark must have a value other than None."),
    ("prepare", PREPARE[:1], "flag --raw_dir=None: Flag --raw_dir must have a value other than None."),
    ("prepare", ("--benchmark=glyphs", PREPARE[1]), "--benchmark='glyphs' is unknown; choose from cifar_c, femnist, folder, iwildcam, tiny_imagenet_c"),
    ("prepare", ("--benchmark=cifar10_c", PREPARE[1]), "--benchmark='cifar10_c' is unknown; did you mean 'cifar_c'? choose from cifar_c, femnist, folder, iwildcam, tiny_imagenet_c"),
    ("prepare", (*PREPARE, "--workers=0"), "flag --workers=0: 0 is not a positive integer"),
    ("prepare", (*PREPARE, "--size=large"), "flag --size=large: invalid literal for int() with base 10: 'large'"),
    ("prepare", (*PREPARE, "--regenerate"), "--regenerate: folder has no such option; see --help"),
]  # fmt: skip


def printed(monkeypatch, name, arguments) -> str:
    """What a launcher prints to stderr before it exits with code 2."""
    err, given = io.StringIO(), [a.partition("=")[0] for a in arguments]
    others = {flag for others in REQUIRED.values() for flag in others} | {"out"}
    unused = [f"--{f}=unused" for f in others - set(REQUIRED[name]) if f in flags.FLAGS and f"--{f}" not in given]
    monkeypatch.setattr(sys, "argv", [name, *unused, *arguments])
    monkeypatch.setattr(backend, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(cli, "keep_compiled", lambda: None)
    with flagsaver.flagsaver(), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
        cli.run(MAINS[name])
    cli._overrides.clear()
    assert exit.value.code == 2, err.getvalue()
    return err.getvalue()


@parametrised([(f"{name} {' '.join(arguments)}",) for name, arguments, _ in COMMANDS])
def test_command_lines(tmp_path, monkeypatch, data_dir, number):
    name, arguments, line = COMMANDS[number]
    write_run(tmp_path / "run", open_store(next(data_dir.glob("glyphs*"))).sha256)
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "manifest.json"):
        shutil.copy(tmp_path / "run" / file, tmp_path / "bare")
    arguments = [a.replace("{tmp}", str(tmp_path)) for a in arguments]
    error = printed(monkeypatch, name, (f"--data_dir={data_dir}", *arguments))
    assert error.startswith("error: ") and error.count("\n") == 1
    assert is_as(one_line(error.removeprefix("error: "), tmp_path), line)
    assert not (tmp_path / "w").exists()


def test_a_traceback_is_for_those_who_ask(tmp_path, monkeypatch, capsys):
    arguments = ("--runs=nowhere",)
    assert "Traceback" not in printed(monkeypatch, "evaluate", arguments)
    error = printed(monkeypatch, "evaluate", (*arguments, "--debug"))
    assert error.startswith("Traceback") and error.splitlines()[-1].startswith("error: --runs=nowhere: ")
