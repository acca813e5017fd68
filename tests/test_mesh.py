"""Training and evaluation over several devices and processes give what one device gives."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cxda_jax import hosts
from cxda_jax.experiment import METHODS
from tests.commands import command
from tests.nets import build_method

ROOT = Path(__file__).parent.parent
TRAINED = [name for name in METHODS if not build_method(name).trains_as]
STEPS = 20
HERE = "A"  # a file that says that a process has come to its first step


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(store, folder, names, processes=1, devices=1, source="device", steps=STEPS, late=-1):
    """The processes of one run, which write what they say into files."""
    folder.mkdir(exist_ok=True)
    port, started = free_port(), []
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    for which in range(processes):
        arguments = [store.path, folder, names, steps, which, processes, port, source, late]
        command = [sys.executable, "-m", "tests.peers.mesh_process", *map(str, arguments)]
        with open(folder / f"out{which}.txt", "w") as out, open(folder / f"err{which}.txt", "w") as err:
            started.append(
                subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=os.environ | {"XLA_FLAGS": flags})
            )
    return started


def finish(started, folder, timeout=540):
    for which, process in enumerate(started):
        assert process.wait(timeout) == 0, (folder / f"err{which}.txt").read_text()[-2000:]


def arrays(folder, name):
    return dict(np.load(folder / f"{name}.npz"))


def assert_same(one, other, exact=False):
    """Sums in another order move the last bits: losses and parameters by at most 1e-6, and what may be larger by a little more."""
    assert one.keys() == other.keys() and len(one["losses"]) == STEPS
    for key, array in one.items():
        if exact or key == "answers" or not np.issubdtype(array.dtype, np.floating):
            np.testing.assert_array_equal(array, other[key], err_msg=key)
        else:
            atol = 1e-5 if key.startswith("optimizer") else 5e-6 if "batch_stats" in key else 1e-6
            np.testing.assert_allclose(array, other[key], rtol=0, atol=atol, err_msg=key)
    assert (
        max(np.abs(one[key]).max() for key in one if key.startswith("optimizer")) > 0.1
    )  # of something that was trained


class Stored:
    """Where the tests' store lies."""

    def __init__(self, path):
        self.path = path


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    from tests.conftest import make_store

    folder = tmp_path_factory.mktemp("mesh")
    make_store(folder)
    return Stored(folder / "store")


@pytest.fixture(scope="module")
def alone(stored, tmp_path_factory):
    """The folder of the runs on one device, by the methods' names."""
    folders = {}

    def of(names):
        if names not in folders:
            folders[names] = tmp_path_factory.mktemp("alone")
            finish(start(stored, folders[names], names), folders[names])
        return folders[names]

    return of


def one_as_many(stored, alone, folder, names, processes, devices, source):
    if source == "tfdata":
        pytest.importorskip("tensorflow")
    finish(start(stored, folder, names, processes, devices, source), folder)
    for name in names.split(","):
        assert_same(arrays(alone(names), name), arrays(folder, name))


@pytest.mark.parametrize(
    ("processes", "devices", "source"),
    [(1, 2, "device"), (1, 8, "rows"), (2, 1, "device"), (2, 4, "rows"), (2, 2, "tfdata")],
)
def test_all_devices_and_processes_train_and_test_as_one(stored, alone, tmp_path, processes, devices, source):
    one_as_many(stored, alone, tmp_path, "cxda,erm_iid", processes, devices, source)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize(
    ("processes", "devices", "source"),
    [(1, 2, "device"), (1, 8, "device"), (2, 1, "device"), (4, 1, "device"), (4, 2, "rows")],
)
def test_each_method_is_trained_and_tested_as_by_one(stored, alone, tmp_path, processes, devices, source, method):
    one_as_many(stored, alone, tmp_path, method, processes, devices, source)


def test_a_run_goes_on_exactly_with_other_devices_and_processes(stored, alone, tmp_path):
    """What one process saved is what two restore, bit for bit; and the end is that of a run of one device."""
    whole = alone("cxda")
    finish(start(stored, tmp_path, "cxda", 2, 1), tmp_path)
    shutil.copytree(tmp_path, tmp_path / "again")
    before = arrays(tmp_path, "cxda")
    for processes, devices in ((1, 8), (1, 1), (4, 1)):
        (tmp_path / "again" / "cxda.npz").unlink()
        finish(start(stored, tmp_path / "again", "cxda", processes, devices), tmp_path / "again")
        assert_same(before, arrays(tmp_path / "again", "cxda"), exact=True)
    shutil.rmtree(tmp_path / "again" / "cxda" / "last" / "20")  # from step 15 on
    finish(start(stored, tmp_path / "again", "cxda", 1, 8), tmp_path / "again")
    assert_same(arrays(whole, "cxda"), arrays(tmp_path / "again", "cxda"))


def wait_for_step(folder, step, started, seconds=300):
    """Until the run has logged this step."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and all(p.poll() is None for p in started):
        with contextlib.suppress(OSError):
            if f"step {step}/" in (folder / "out0.txt").read_text():
                return
        time.sleep(0.05)
    raise AssertionError("".join(p.read_text() for p in folder.glob("err*.txt"))[-2000:])


def ends(started, seconds=60):
    """The exit codes, all within the promised time."""
    until = time.monotonic() + seconds
    return [process.wait(max(0.1, until - time.monotonic())) for process in started]


@pytest.mark.parametrize("late", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(stored, alone, tmp_path, late):
    started = start(stored, tmp_path, "cxda", 2, 1, late=late)
    wait_for_step(tmp_path, 3, started)
    started[1].send_signal(signal.SIGTERM)
    assert ends(started) == [128 + signal.SIGTERM] * 2
    for which in range(2):
        assert (tmp_path / f"err{which}.txt").read_text().splitlines()[-1].startswith("stopped by SIGTERM; nothing")
    steps = [max(int(p.name) for p in (tmp_path / "cxda" / "last").iterdir() if p.name.isdecimal())]
    assert 3 <= steps[0] < STEPS
    finish(start(stored, tmp_path, "cxda", 2, 1), tmp_path)
    assert_same(arrays(alone("cxda"), "cxda"), arrays(tmp_path, "cxda"))


def kill_one(stored, folder, whole, processes, which, step, delay):
    """Kills a process; all others end within a minute with one line; a restart ends as if nothing had been. Gives seconds."""
    started = start(stored, folder, "cxda", processes, 1)
    wait_for_step(folder, step, started)
    time.sleep(delay)
    if started[which].poll() is not None:
        finish(started, folder)
        return 0.0
    started[which].kill()
    began = time.monotonic()
    codes = ends(started)
    took = time.monotonic() - began
    for other in set(range(processes)) - {which}:
        said = (folder / f"err{other}.txt").read_text().splitlines()
        assert codes[other] in (hosts.TEMPORARY, 1), (codes, said)
        assert len(said) == 1 and said[0].startswith("error: ") and hosts.AGAIN in said[0], said
    finish(start(stored, folder, "cxda", processes, 1), folder)
    assert_same(whole, arrays(folder, "cxda"))
    return took


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_process_ends_all_with_one_line_and_loses_nothing(stored, alone, tmp_path, which):
    kill_one(stored, tmp_path, arrays(alone("cxda"), "cxda"), 2, which, 3, 0.0)


@pytest.mark.parametrize("trial", range(20))
def test_a_process_killed_at_a_random_moment(stored, alone, tmp_path, trial):
    rng = random.Random(trial)
    processes = rng.choice((2, 2, 4))
    which, step, delay = rng.randrange(processes), rng.randrange(1, STEPS - 2), rng.random() / 4
    took = kill_one(stored, tmp_path, arrays(alone("cxda"), "cxda"), processes, which, step, delay)
    print(f"process {which} of {processes} killed after step {step} + {delay:.2f} s, all ended in {took:.1f} s")
    assert 0 < took < 60


def test_a_missing_process_is_one_line(stored, tmp_path, monkeypatch):
    command = "import sys; from cxda_jax import hosts; hosts.MEET = 3; from tests.peers import mesh_process as m; m.main(*sys.argv[1:])"
    arguments = f"{stored.path!s}", str(tmp_path), "cxda", 1, 0, 2, free_port()
    code = command.replace("m.main(*sys.argv[1:])", f"m.main(*{arguments!r})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode and "not all processes came within 3 s" in done.stderr.splitlines()[-1], done.stderr[-1500:]


def in_two(folder, *arguments):
    """What each of two processes says, that work on one command together."""
    meet = "--distributed", f"--coordinator=localhost:{free_port()}", "--num_processes=2"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "cxda_jax", *map(str, arguments), *meet, f"--process_id={which}"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) for which in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return [out for out, _ in said]


def test_the_commands_train_and_test_in_two_processes_as_in_one(smoke, tmp_path):
    one, two, wide = tmp_path / "one", tmp_path / "two", "--config.train.tasks_per_step=4"
    same = "--config=glyphs:cxda,smoke", wide, f"--data_dir={smoke[0]}/data"
    command("train", *same, f"--workdir={one}")
    first, second = in_two(tmp_path, "train", *same, f"--workdir={two}")
    assert "accuracy" in first and "process 1" in second and len(second.splitlines()) < len(first.splitlines())
    rows = [json.loads((run / "result.json").read_text()) for run in (one, two)]
    assert abs(rows[0]["avg"] - rows[1]["avg"]) < 1 and rows[0]["config_hash"] == rows[1]["config_hash"]
    wanted, got = (dict(np.load(run / "predictions.npz")) for run in (one, two))
    assert wanted.keys() == got.keys()
    for name, array in wanted.items():
        assert (array == got[name]).mean() > 0.99, name  # sums in another order move the last bits of the weights
    (two / "predictions.npz").unlink()
    first, _ = in_two(tmp_path, "evaluate", f"--runs={two}", f"--data_dir={smoke[0]}/data")
    assert "cxda" in first
    again = dict(np.load(two / "predictions.npz"))
    for name, array in got.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)
