"""Training and evaluation over several devices and processes give what one device gives."""

import subprocess
import sys

import pytest

from cxda_jax.config.registry import METHODS
from tests.fast.test_mesh import STEPS, arrays, assert_same, finish, free_port, start, trained  # noqa: F401
from tests.lines import ROOT
from tests.nets import build_method


def test_a_process_that_never_comes_ends_the_others_with_an_error():
    for which in range(2):
        code = "from cxda_jax.machine import hosts; hosts.MEET = 2\n"
        code += f"with hosts.joined('localhost:{free_port()}', 2, {which}): 1"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert "UserError: not all processes came within 2 s" in done.stderr.splitlines()[-1] and done.returncode == 1


def test_a_signal_reaches_a_process_that_works_with_others():
    code = "import os, signal, time; from cxda_jax import stops; from cxda_jax.machine import hosts; stops.watch()\n"
    code += f"with hosts.joined('localhost:{free_port()}', 1, 0): os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "stops.Stopped: 15" in done.stderr, done.stderr


def test_processes_that_were_started_with_other_seeds_end_before_they_train(smoke, tmp_path):
    port, started = free_port(), []
    for number in range(2):
        own = [f"--config.seed={number}", f"--process_id={number}", "--num_processes=2", "--distributed"]
        own += [f"--coordinator=localhost:{port}", "--config.train.tasks_per_step=2", f"--data_dir={smoke[0]}/data"]
        line = [sys.executable, "-m", "launch.train", "--config=glyphs:bn,smoke", f"--workdir={tmp_path}/run", *own]
        started.append(subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[1] for process in started]
    assert "process 1 was started with other facts" in said[0]
    assert "config.seed: 1 in process 1, 0 in process 0" in said[1]
    assert [process.returncode for process in started] == [2, 2] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("names", "layout"), [
    (",".join(name for name in METHODS if not build_method(name).trains_as), (1, 4, "rows")),
    ("cxda,erm_iid", (2, 2, "tfdata")),
])  # fmt: skip
def test_all_devices_and_processes_train_and_test_each_method_as_one(fixed_store, tmp_path, names, layout):
    pytest.importorskip("tensorflow")
    trained(fixed_store, tmp_path / "one", names)
    trained(fixed_store, tmp_path / "many", names, *layout)
    for name in names.split(","):
        assert_same(arrays(tmp_path / "one", name), arrays(tmp_path / "many", name))
