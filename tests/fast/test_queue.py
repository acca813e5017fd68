"""Studies in queues: the examples of the documentation have as many jobs as the study."""

import re

import yaml

from tests.commands import command
from tests.lines import ROOT

FOLDER = ROOT / "docs" / "examples" / "cluster"


def test_the_studies_in_queues_start_each_job_that_is_listed_before_there_are_data(tmp_path):
    flags = f"--data_dir={tmp_path}", f"--study={tmp_path}/study"
    listed = command("reproduce", "--benchmark=cifar_c", "--list", *flags).splitlines()
    trainings, tests = re.fullmatch(r"trainings: (0-\d+); tests: (\d+-\d+)", listed[-1]).groups()
    script = (FOLDER / "study.sbatch").read_text()
    assert f"--array={trainings} " in script and f"--array={tests} " in script
    spec = yaml.safe_load((FOLDER / "study.yaml").read_text())["spec"]
    assert spec["completions"] == len(listed) - 2 and listed[-2].split()[0] == tests.partition("-")[2]
    assert not [*tmp_path.iterdir()]
