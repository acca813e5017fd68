"""What is written on command lines, and how what went wrong becomes one line."""

import re
import shutil

import pytest

from cxda_jax.config.reading import read
from cxda_jax.training.experiment import open_data
from launch import cli
from tests.commands import command
from tests.lines import one_line, write_run


def test_changes_are_taken_with_and_without_equals():
    arguments = ["x", "--config=a", "--config.data.name=a=b", "--config.net.width", "8", "--debug"]
    assert cli.take_changes(arguments) == ["x", "--config=a", "--debug"]
    assert cli.CHANGES == [("data.name", "a=b"), ("net.width", "8")]
    assert cli.take_changes(["x"]) == ["x"] and cli.CHANGES == []


TRAIN = ("--config=glyphs:cxda,smoke", "--workdir={tmp}/w")
OF_RUN = ("--config.data.writers=(5, 5, 5)", "--config.data.drawings=41")  # the data of the run
MADE = "--data_dir={tmp}/made"
PREPARE = ("--benchmark=folder", "--raw_dir={tmp}/raw")
RUN, STUDY = "--runs={tmp}/run", ("--study={tmp}/w", "--smoke")
COMMANDS = [  # command, arguments, what the line names
    ("train", (*TRAIN, "--confg.seed=1"), "confg.seed"), ("train", TRAIN[:1], "--workdir"),
    ("train", (*TRAIN, MADE, "--config.method=ft_em"), "'ft_em' .*'erm'"),
    ("train", (*TRAIN, "--config.seed"), "--config.seed"), ("train", (*TRAIN, "--config.net.widht=3"), "'width'"),
    ("train", (TRAIN[0], *OF_RUN, "--workdir={tmp}/run/lock"), "--workdir={tmp}/run/lock"),
    ("train", (TRAIN[0], *OF_RUN, "--config.seed=3", "--workdir={tmp}/held"), "config.seed=0, not 3"),
    ("evaluate", (RUN, "--num_tasks=-4"), "--num_tasks=-4"), ("evaluate", (RUN, "--methods=cxda,exda"), "--methods=exda"),
    ("evaluate", (RUN, "--from=cxda"), "--from=cxda"), ("evaluate", (RUN, "--against=bm"), "--against=bm"),
    ("evaluate", (RUN, "--support_size=3"), "--support_size=3"), ("evaluate", (RUN, "--config.net.width=4"), "net.width"),
    ("report", ("--runs={tmp}/bare", "--report={tmp}/r"), "{tmp}/bare"), ("prepare", (*PREPARE, "--regenerate"), "--regenerate"),
    ("reproduce", (*STUDY, "--benchmark=cifar_c"), "--benchmark=cifar_c"),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments, said", COMMANDS, ids=[f"{name}_{given[-1]}" for name, given, _ in COMMANDS])
def test_a_mistake_costs_one_line_and_exit_code_2(tmp_path, data_dir, name, arguments, said):
    config = read("glyphs:cxda,smoke", [flag.removeprefix("--config.").split("=") for flag in OF_RUN])
    write_run(tmp_path / "run", open_data(config, data_dir).sha256)
    shutil.copytree(tmp_path / "run", tmp_path / "held")
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "held" / "last" / "5").mkdir(parents=True)  # it has saved something
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "manifest.json"):
        shutil.copy(tmp_path / "run" / file, tmp_path / "bare")
    arguments = [a.replace("{tmp}", str(tmp_path)) for a in arguments]
    error = command(name, f"--data_dir={data_dir}", *arguments, code=2)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(said, line := one_line(error.removeprefix("error: "), tmp_path)), line
    assert not (tmp_path / "w").exists()
