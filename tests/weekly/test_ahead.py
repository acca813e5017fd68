"""Programs compiled for accelerators that are not there."""

import json
import os
import subprocess
import sys

import jax
import pytest

from cxda_jax.config import reading
from cxda_jax.data.published import sample_store
from cxda_jax.training import loop
from cxda_jax.training.experiment import build_on
from tests.lines import ROOT
from tests.slow.test_ahead import SIZES
from tools.ahead import passport as ahead


def test_a_tpu_step_exchanges_its_float32_gradients_once(tmp_path):
    """And nothing else of more than a kilobyte, though its products are bfloat16."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("CXDA_TEST_LIBTPU", "")}
    if subprocess.run([sys.executable, "-c", "import libtpu"], env=environment, capture_output=True).returncode:
        pytest.skip("the TPU compiler is not there: pip install --no-deps --target=DIR libtpu; CXDA_TEST_LIBTPU=DIR")
    line = [
        sys.executable, "-m", "tools.ahead", "--config=femnist:bn,smoke", "--topology=v5e:2x2",
        *(f"--config.{name}={value}" for name, value in SIZES.items()), "--tasks_per_step=4",
        "--config.net.dtype=bfloat16", f"--out={tmp_path}/passport.json", f"--data_dir={tmp_path}",
    ]  # fmt: skip
    subprocess.run(line, cwd=ROOT, check=True, env=environment)
    said = json.loads((tmp_path / "passport.json").read_text())
    step = said["programs"]["step"]
    (large,) = [x for x in step["exchanges"] if x["bytes"] > ahead.SMALL]
    assert large["operation"] == "all-reduce" and large["types"] == "f32"
    e = build_on(reading.read("femnist:bn,smoke", [*SIZES.items()]), sample_store("femnist"))
    variables = jax.eval_shape(lambda: loop.init_state(e.method, e.optimizer, 0, e.example)).variables
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(variables))
    assert whole <= large["bytes"] < whole + ahead.SMALL
    assert not said["programs"]["evaluation"]["exchanges"] and step["fits"] and step["bytes_accessed"] > whole
