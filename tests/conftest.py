"""Small, seeded fixtures shared by the tests."""

import contextlib
import fcntl
import gc
import os
import shutil
from unittest import mock

from tests.budget import pytest_configure, start_counting  # noqa: F401
from tests.compiled import share_programs

start_counting()
gc.set_threshold(50_000)  # tracing makes many objects that stay; the usual 700 costs a twentieth of the time
# TensorFlow's start-up chatter would otherwise drown a failure.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Threads of OpenMP (PyTorch, scikit-learn) spin while they wait for each other, which starves the other test processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
share_programs()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault(
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0"
)  # a twentieth too: no test reads a program's source lines

import jax
import numpy as np
import pytest
from hypothesis import settings

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.store import SPLITS, Domain, StoreInfo, open_store, write_store
from cxda_jax.training.experiment import open_data
from cxda_jax.types import Episode, Images, Known

CLASSES = 4
# Tests, and the commands that they start, compile more than they compute.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Hypothesis derives its examples from the tests themselves, so each run tries the same ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test belongs to the ring of its folder; a test of it, or a case of a test, may be marked for a later one."""
    for item in items:
        if item.get_closest_marker("weekly"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
        elif item.path.parent.name != "fast":
            item.add_marker(item.path.parent.name)


@contextlib.contextmanager
def fully_compiled():
    """For tests of what the compiler makes, and for those that compute more than they compile."""
    with mock.patch.dict(os.environ, JAX_DISABLE_MOST_OPTIMIZATIONS="0"):  # of the processes that they start
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def full_compilation():
    with fully_compiled():
        yield


def make_episode(seed: int = 0) -> Episode:
    """Random uint8 images of 3 domains that differ in brightness and 4 classes that differ in a bright square."""
    rng = np.random.default_rng(seed)

    def images(domains, labels):
        pixels = rng.integers(0, 60, (len(labels), 16, 16, 1)) + 40 * domains[:, None, None, None]
        for i, label in enumerate(labels):
            row, column = divmod(int(label), 2)
            pixels[i, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 100
        return Images(jax.numpy.asarray(pixels.astype(np.uint8)), jax.numpy.asarray(domains, jax.numpy.int32))

    support_label, label = rng.integers(0, CLASSES, 15), rng.integers(0, CLASSES, 8)
    return Episode(
        support=images(np.arange(15) % 3, support_label),
        query=images(np.full(8, 1), label),
        label=jax.numpy.asarray(label, jax.numpy.int32),
        support_label=jax.numpy.asarray(support_label, jax.numpy.int32),
    )


def make_known(seed: int = 0) -> Known:
    """The images of an episode for calibrate(): its queries, and its support as unseen ones."""
    episode = make_episode(seed)
    return Known(
        episode.query.pixels, episode.label, episode.support.pixels, episode.support_label, episode.support.domain
    )


def make_domains(seed: int = 0, sizes=(30,) * 9) -> list[Domain]:
    rng, domains = np.random.default_rng(seed), []
    for i, n in enumerate(sizes):
        images, labels = rng.integers(0, 256, (n, 16, 16, 1), np.uint8), rng.integers(0, CLASSES, n)
        domains.append(Domain(f"d{i}", SPLITS[i * 3 // len(sizes)], images, labels))
    return domains


INFO = StoreInfo("tiny", tuple("abcd"), (0.5,), (0.5,))


def make_store(folder, **options):
    write_store(folder / "store", INFO, make_domains(**options))
    return open_store(folder / "store")


@pytest.fixture
def episode() -> Episode:
    return make_episode()


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path)


@pytest.fixture(scope="session")
def fixed_store(tmp_path_factory):
    """The same, for tests that leave it as it is."""
    return make_store(tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """The smoke config's data set in its place, of other images."""
    folder = tmp_path_factory.mktemp("data")
    config = replaced(read("glyphs:cxda,smoke"), data={"writers": [5, 5, 5], "drawings": 41})
    open_data(config, folder)
    return folder


@pytest.fixture
def peer():
    pytest.importorskip("torch")
    from tools.bench import torch_peer

    return torch_peer


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function that trains into a folder and gives what the command printed. One process trains, the others copy."""
    from tests.commands import command

    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained"

    def train(run, *arguments):
        kept, shown, data = shared / run.name, shared / f"{run.name}.txt", run.parent / "data"
        shared.mkdir(exist_ok=True)
        with open(shared / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if shown.exists():
                shutil.copytree(kept, run)
                shutil.copytree(shared / "data", data, dirs_exist_ok=True)
            else:
                printed = command("train", f"--workdir={run}", f"--data_dir={data}", *arguments)
                shutil.copytree(run, kept)
                shutil.copytree(data, shared / "data", dirs_exist_ok=True)
                shown.write_text(printed)
            return shown.read_text()

    return train


@pytest.fixture(scope="session")
def smoke(tmp_path_factory, trained):
    """A folder with a finished smoke run of cxda and its data, and what the command printed."""
    folder = tmp_path_factory.mktemp("smoke")
    return folder, trained(folder / "run", "--config=glyphs:cxda,smoke")


@pytest.fixture(scope="session")
def erm_run(smoke, trained):
    """A finished smoke run of erm beside the one of cxda."""
    changes = "--config.cotta.copies=2", "--config.finetune.steps=2", "--config.finetune.rate=1.0"
    trained(smoke[0] / "erm", "--config=glyphs:erm,smoke", *changes)
    return smoke[0] / "erm"
