"""Training and evaluation over several devices and processes give what one device gives."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from cxda_jax.config.registry import METHODS
from cxda_jax.machine import hosts
from tests.commands import wait_until
from tests.lines import ROOT
from tests.nets import build_method

STEPS = 20


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(store, folder, names, processes=1, devices=1, source="device"):
    """The processes of one run, which write what they say into files."""
    folder.mkdir(exist_ok=True)
    port, started = free_port(), []
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    for which in range(processes):
        arguments = [os.path.dirname(store.images.filename), folder, names, STEPS, which, processes, port, source]
        line = [sys.executable, "-m", "tests.peers.mesh_process", *map(str, arguments)]
        with open(folder / f"out{which}.txt", "w") as out, open(folder / f"err{which}.txt", "w") as err:
            environment = os.environ | {"XLA_FLAGS": flags}
            started.append(subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=err, env=environment))
    return started


def finish(folder, started):
    for which, process in enumerate(started):
        assert process.wait(540) == 0, (folder / f"err{which}.txt").read_text()[-2000:]


def trained(store, folder, names, *layout):
    finish(folder, start(store, folder, names, *layout))


def arrays(folder, name):
    return dict(np.load(folder / f"{name}.npz"))


def assert_same(one, other, exact=False):
    """Sums in another order move the last bits: of losses and parameters by at most 1e-6, of what is larger by more."""
    assert one.keys() == other.keys() and len(one["losses"]) == STEPS
    for key in one.keys() - {"exchanges"}:
        if exact or not np.issubdtype(one[key].dtype, np.floating):
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)
        else:
            atol = 1e-5 if key.startswith("optimizer") else 5e-6 if "batch_stats" in key else 1e-6
            np.testing.assert_allclose(one[key], other[key], rtol=0, atol=atol, err_msg=key)
    momenta = [np.abs(array).max() for key, array in one.items() if key.startswith("optimizer")]
    assert max(momenta) > 0.1  # of something that was trained


@pytest.fixture(scope="module")
def alone(fixed_store, tmp_path_factory):
    """The folder of a run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    trained(fixed_store, folder, "small")
    return folder


def wait_for_step(folder, step, started):
    """Until the run has logged this step."""
    wait_until(lambda: f"step {step}/" in (folder / "out0.txt").read_text(), started[0], 300)


def ends(started):
    """The exit codes, all within a minute."""
    until = time.monotonic() + 60
    return [process.wait(max(0.1, until - time.monotonic())) for process in started]


@pytest.mark.parametrize(("processes", "which", "step", "sent"), [
    pytest.param(2, 0, 3, signal.SIGKILL, marks=pytest.mark.slow), pytest.param(4, 2, 7, signal.SIGKILL, marks=pytest.mark.weekly),
    pytest.param(2, 0, 3, signal.SIGSTOP, marks=pytest.mark.weekly),
])  # fmt: skip
def test_a_lost_process_ends_all_with_one_line_and_loses_nothing(
    fixed_store, alone, tmp_path, processes, which, step, sent
):
    """All others end within a minute; a restart, here by one process, ends as if nothing had been."""
    started = start(fixed_store, tmp_path, "small", processes)
    wait_for_step(tmp_path, step, started)
    if started[which].poll() is None:
        started[which].send_signal(sent)
        codes = {other: ends([started[other]])[0] for other in set(range(processes)) - {which}}
        started[which].kill()
        started[which].wait()
        for other in set(range(processes)) - {which}:
            said = (tmp_path / f"err{other}.txt").read_text().splitlines()
            assert codes[other] in (hosts.TEMPORARY, 1), (codes, said)
            assert len(said) == 1 and said[0].startswith("error: ") and hosts.AGAIN in said[0], said
        started = start(fixed_store, tmp_path, "small")
    finish(tmp_path, started)
    assert_same(arrays(alone, "small"), arrays(tmp_path, "small"))


def test_two_devices_train_and_test_as_one_and_take_over_what_one_saved(fixed_store, alone, tmp_path):
    """What one device saved is what two restore, bit for bit, and what two saved is what one restores."""
    shutil.copytree(alone / "small", tmp_path / "small_again")
    trained(fixed_store, tmp_path, "small,small_again", 1, 2, "rows")
    one, two = arrays(alone, "small"), arrays(tmp_path, "small")
    assert_same(one, arrays(tmp_path, "small_again"), exact=True)
    saved = load_file(tmp_path / "small" / "last" / str(STEPS) / "tree" / "arrays.safetensors")
    assert saved.keys() < two.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    assert_same(one, two)
    floats = [exchange for exchange in two["exchanges"] if "f" in exchange.partition(" ")[2]]
    assert floats == ["all-reduce f32"] and len(one["exchanges"]) == 0


@pytest.mark.weekly
def test_a_process_that_never_comes_ends_the_others_with_an_error():
    for which in range(2):
        code = "from cxda_jax.machine import hosts; hosts.MEET = 2\n"
        code += f"with hosts.joined('localhost:{free_port()}', 2, {which}): 1"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert "UserError: not all processes came within 2 s" in done.stderr.splitlines()[-1] and done.returncode == 1


@pytest.mark.weekly
def test_a_signal_reaches_a_process_that_works_with_others():
    code = "import os, signal, time; from cxda_jax.machine import hosts, stops; stops.watch()\n"
    code += f"with hosts.joined('localhost:{free_port()}', 1, 0): os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "stops.Stopped: 15" in done.stderr, done.stderr


@pytest.mark.weekly
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
