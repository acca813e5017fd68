"""Studies and trainings in queues: what the examples start, and what a real queue does with a study."""

import getpass
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import yaml

from cxda_jax.config.reading import read
from tests.commands import command, wait_until
from tests.lines import ROOT
from tests.slow.test_mesh import free_port

FOLDER = ROOT / "docs" / "examples" / "cluster"

EXAMPLES = sorted(path for path in FOLDER.iterdir() if path.stem != "study")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_start_a_training_that_fits_their_devices(path):
    text = path.read_text()
    if path.suffix == ".yaml":
        (hosts,) = (job["template"]["spec"] for job in yaml.safe_load(text)["spec"]["replicatedJobs"])
        ((text,),) = (container["args"] for container in hosts["template"]["spec"]["containers"])
        assert hosts["parallelism"] == hosts["completions"] == int(re.findall(r"--num_processes=(\d+)", text)[0])
    subprocess.run(["bash", "-n", "-c", text], check=True)
    training = re.split(r"\|\||\ncode", text.partition("cxda train ")[2])[0]
    flags = dict(re.findall(r"--([\w.]+)(?:=(\S+))?", training))
    changes = [(name.removeprefix("config."), value) for name, value in flags.items() if name.startswith("config.")]
    devices = {"one_node.sbatch": 8, "tpu_slice.sh": 16}.get(path.name, 32)
    assert read(flags["config"], changes)["train"]["tasks_per_step"] == devices
    assert "workdir" in flags and ("distributed" in flags) == (path.name != "one_node.sbatch")


def test_the_studies_in_queues_start_each_job_that_is_listed_before_there_are_data(tmp_path):
    flags = f"--data_dir={tmp_path}", f"--study={tmp_path}/study"
    listed = command("reproduce", "--benchmark=cifar_c", "--list", *flags).splitlines()
    trainings, tests = re.fullmatch(r"trainings: (0-\d+); tests: (\d+-\d+)", listed[-1]).groups()
    script = (FOLDER / "study.sbatch").read_text()
    assert f"--array={trainings} " in script and f"--array={tests} " in script
    spec = yaml.safe_load((FOLDER / "study.yaml").read_text())["spec"]
    assert spec["completions"] == len(listed) - 2 and listed[-2].split()[0] == tests.partition("-")[2]
    assert not [*tmp_path.iterdir()]


SLURM = """
ClusterName=cxda
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={here}/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={host} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A Slurm of one node, with two processors."""
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))):
        pytest.skip("Slurm is not there: apt-get install slurm-wlm")
    here, ports, started = tmp_path / "slurm", (free_port(), free_port()), []
    for name in ("state", "spool"):
        (here / name).mkdir(parents=True)
    (here / "slurm.conf").write_text(
        SLURM.format(here=here, user=getpass.getuser(), host=socket.gethostname(), ports=ports)
    )
    monkeypatch.setenv("SLURM_CONF", str(here / "slurm.conf"))
    (here / "key").write_bytes(bytes(range(128)))
    (here / "key").chmod(0o600)
    files = [f"--{name}-file={here}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "--foreground", "--force", f"--socket={here}/munge", *files, f"--key-file={here}/key"]
    for line in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
        started.append(subprocess.Popen(line, stderr=subprocess.DEVNULL))
        wait_until(lambda: (here / "munge").exists(), started[0])
    yield
    for process in reversed(started):
        process.terminate()
        process.wait(30)


def ask(*words):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.weekly
def test_a_slurm_queue_works_a_study_off_though_a_job_comes_to_its_time_limit(queue, tmp_path):
    flags = ["--benchmark=glyphs", "--smoke", "--seeds=0", "--only=erm,cxda,ft_em", "--tests=usual"]
    flags += [f"--study={tmp_path}/study", f"--data_dir={tmp_path}/data"]
    script = (FOLDER / "study.sbatch").read_text()
    for old, new in {
        "--gpus-per-node=1 --cpus-per-task=2 --mem=16G --time=240": f"--output={tmp_path}/%a.out",
        "=0-35": "=0-1", "=36-61": "=2",
        "srun --cpus-per-task=2 cxda reproduce --benchmark=cifar_c":
            f"srun {sys.executable} -m cxda_jax reproduce {' '.join(flags)}",
    }.items():  # fmt: skip
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "study.sbatch").write_text(script)
    listed = command("reproduce", *flags, "--list").splitlines()
    assert [line.split()[2:4] for line in listed[:3]] == [["to", "do"]] * 3 and listed[2].endswith("after 0")
    ask("bash", tmp_path / "study.sbatch")
    log = tmp_path / "study" / "jobs" / f"{listed[0].split()[1]}.log"
    wait_until(lambda: log.exists() and "step 1" in log.read_text(), seconds=120)
    number = sorted(ask("squeue", "--noheader", "--array", "--format=%i").split())[0]
    ask("scancel", "--signal=USR2", number)  # as at the time limit

    def are_done():
        time.sleep(1)
        if "BeginTime" in ask("squeue", "--noheader", "--format=%r"):  # Slurm would wait for two minutes
            ask("scontrol", "update", f"jobid={number}", "starttime=now")
        return len([*log.parent.glob("*.done")]) == 3

    wait_until(are_done, seconds=400)
    assert "stopped by" in log.read_text() and "3 jobs, 3 done before" in command("reproduce", *flags)
