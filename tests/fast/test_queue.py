"""Studies and trainings in queues: what the examples start, and what a real queue does with a study."""

import re

import pytest
import yaml

from cxda_jax.config.reading import read
from tests.commands import command
from tests.lines import ROOT

FOLDER = ROOT / "docs" / "examples" / "cluster"
EXAMPLES = sorted(path for path in FOLDER.iterdir() if path.stem != "study")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_start_a_training_that_fits_their_devices(path):
    text = path.read_text()
    training = re.split(r"\|\||\ncode", text.partition("cxda train ")[2])[0]
    flags = dict(re.findall(r"--([\w.]+)(?:=(\S+))?", training))
    changes = [(name.removeprefix("config."), value) for name, value in flags.items() if name.startswith("config.")]
    devices = {"one_node.sbatch": 8, "tpu_slice.sh": 16}.get(path.name, 32)
    assert read(flags["config"], changes)["train"]["tasks_per_step"] == devices


def test_the_studies_in_queues_start_each_job_that_is_listed_before_there_are_data(tmp_path):
    flags = f"--data_dir={tmp_path}", f"--study={tmp_path}/study"
    listed = command("reproduce", "--benchmark=cifar_c", "--list", *flags).splitlines()
    trainings, tests = re.fullmatch(r"trainings: (0-\d+); tests: (\d+-\d+)", listed[-1]).groups()
    script = (FOLDER / "study.sbatch").read_text()
    assert f"--array={trainings} " in script and f"--array={tests} " in script
    spec = yaml.safe_load((FOLDER / "study.yaml").read_text())["spec"]
    assert spec["completions"] == len(listed) - 2 and listed[-2].split()[0] == tests.partition("-")[2]
    assert not [*tmp_path.iterdir()]
