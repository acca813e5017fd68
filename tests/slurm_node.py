"""A real Slurm of one node, for tests: `with slurm_node(folder):` brings it up and down, all of it inside the folder.

It needs Debian's packages: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
The partition `low` is the default, and gives way to `high` at once. `patient` gives way a minute after a signal. Nothing of the machine's own Slurm is touched.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxda_jax.study.local import TIED

DAEMONS = ("munged", "slurmctld", "slurmd")
KILL_WAIT = 20  # seconds from SIGTERM to SIGKILL
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5,requeue_delay=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait={kill_wait}
CompleteWait=0
MinJobAge=300
OverTimeLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=patient Nodes={host} MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={host} MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why no Slurm can be brought up here, or ""."""
    if sys.platform != "linux":
        return "Slurm's daemons run on Linux alone"
    gone = [name for name in DAEMONS if not find(name)]
    return f"no {', '.join(gone)} here" if gone else ""


def find(name: str) -> str:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")


@contextlib.contextmanager
def slurm_node(folder: Path) -> Iterator[None]:
    """Inside, sbatch and its kin speak to a Slurm of this machine alone."""
    folder = folder.resolve()
    folder.mkdir(mode=0o700)
    host, ports = socket.gethostname(), free_ports(2)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    text = CONFIG.format(host=host, folder=folder, user=getpass.getuser(), ports=ports, kill_wait=KILL_WAIT)
    (folder / "slurm.conf").write_text(text)
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed",
             "log-file": "munge.log"}  # fmt: skip
    munged = [find("munged"), "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before))
        for command, ready in (
            (munged, (folder / "munge.socket").exists),
            ([find("slurmctld"), "-D"], lambda: "UP" in said("scontrol", "ping")),
            ([find("slurmd"), "-D"], lambda: said("sinfo", "--noheader", "--format=%t").split()[:1] == ["idle"]),
        ):
            stack.enter_context(daemon(command, folder / "said.log"))
            wait_until(ready, folder)
        stack.callback(end_jobs)
        yield


@contextlib.contextmanager
def daemon(command: list[str], log: Path) -> Iterator[None]:
    tied = [sys.executable, "-c", TIED, str(os.getpid()), *command]  # it must not outlive killed tests
    with open(log, "a") as out, subprocess.Popen(tied, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def end_jobs() -> None:
    """So that no job outlives the daemons."""
    subprocess.run(["scancel", f"--user={os.getuid()}"], capture_output=True)
    wait_until(lambda: not said("squeue", "--noheader"), None)


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def wait_until(ready, folder: Path | None, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError("" if folder is None else "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log")))
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
