"""A real Slurm of one node for a test, all of it inside a folder. The machine's own Slurm is not touched.

It needs Debian's packages: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cxda_jax.study.local import TIED
from tests.commands import wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
DAEMONS = {name: shutil.which(name, path=PATH) for name in ("munged", "slurmctld", "slurmd")}
needs_slurm = pytest.mark.skipif(sys.platform != "linux" or None in DAEMONS.values(), reason=f"no Slurm: {DAEMONS}")
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
KillWait=20
CompleteWait=0
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=60 State=UP
"""


@contextlib.contextmanager
def slurm_node(folder: Path):
    """Inside, sbatch and its kin speak to a Slurm of this machine alone."""
    folder = folder.resolve()
    folder.mkdir(mode=0o700)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ports = [each.getsockname()[1] for each in (a, b)]
    text = CONFIG.format(host=socket.gethostname(), folder=folder, user=getpass.getuser(), ports=ports)
    (folder / "slurm.conf").write_text(text)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    munge = ["--foreground", "--force", *(f"--{flag}={folder}/munge.{name}" for flag, name in files.items())]
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SLURM_CONF", str(folder / "slurm.conf"))
        for name, options, ready in (
            ("munged", munge, (folder / "munge.socket").exists),
            ("slurmctld", ["-D"], lambda: "UP" in said("scontrol", "ping")),
            ("slurmd", ["-D"], lambda: said("sinfo", "--noheader", "--format=%t").split()[:1] == ["idle"]),
        ):
            wait_until(ready, stack.enter_context(daemon([DAEMONS[name], *options], folder / "said.log")))
        stack.callback(end_jobs)  # before the daemons, which no job must outlive
        yield


@contextlib.contextmanager
def daemon(command, log):
    tied = [sys.executable, "-c", TIED, str(os.getpid()), *command]  # it must not outlive killed tests
    with open(log, "a") as out, subprocess.Popen(tied, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


def end_jobs():
    subprocess.run(["scancel", f"--user={os.getuid()}"], capture_output=True)
    wait_until(lambda: not said("squeue", "--noheader"))


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
