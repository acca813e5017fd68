"""Programs compiled for accelerators that are not there: what their text says, and passports."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from cxda_jax import backend, config, train
from cxda_jax.ahead import hlo, passport
from cxda_jax.ahead.chips import CHIPS, devices, read_target
from cxda_jax.data.published import sample_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import build_on
from tests.lines import ROOT

gate = pytest.mark.gate
RECORDS = ROOT / "docs/results/passports"
SIZES = {"net.width": "16", "episode.per_domain": "2", "episode.num_query": "4", "evaluation.per_call": "1"}


@pytest.mark.exhaustive
def test_a_tpu_step_exchanges_its_float32_gradients_once(tmp_path):
    """And nothing else of more than a kilobyte, though its products are bfloat16."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("CXDA_TEST_LIBTPU", "")}
    if subprocess.run([sys.executable, "-c", "import libtpu"], env=environment, capture_output=True).returncode:
        pytest.skip("the TPU compiler is not there: pip install --no-deps --target=DIR libtpu; CXDA_TEST_LIBTPU=DIR")
    line = [
        sys.executable, "-m", "cxda_jax", "compile", "--config=femnist:bn,smoke", "--topology=v5e:2x2",
        *(f"--config.{name}={value}" for name, value in SIZES.items()), "--tasks_per_step=4",
        "--config.net.dtype=bfloat16", f"--out={tmp_path}/passport.json", f"--data_dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "passport.json").read_text())
    step = said["programs"]["step"]
    (large,) = [x for x in step["collectives"] if x["bytes"] > passport.SMALL]
    assert large["operation"] == "all-reduce" and large["types"] == "f32"
    assert said["exchanged_bytes"] <= large["bytes"] < said["exchanged_bytes"] + passport.SMALL
    assert not said["programs"]["evaluation"]["collectives"]
    assert step["fits"] and step["flops"] > 1e6 and step["fusions"] > 10 and step["estimated_ms"] > 0


@gate
def test_the_target_is_a_context_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(backend, "_deterministic", False)
    before = backend.platform_name(), backend.rewrites_layers(), backend.compiler_options()
    backend.make_deterministic()
    assert backend.compiler_options() == before[2]  # determinism is asked of GPUs alone
    for platform, options in (("tpu", None), ("gpu", {"xla_gpu_deterministic_ops": True})):
        with backend.target(platform):
            assert backend.platform_name() == platform and backend.compiler_options() == options
            assert not backend.rewrites_layers() and backend.donates_state()
    assert (backend.platform_name(), backend.rewrites_layers(), backend.compiler_options()) == before


TEXT = """HloModule step

%fused (param_0: bf16[8,128]) -> bf16[8,128] {
  %param_0 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %neg = bf16[8,128]{1,0:T(8,128)(2,1)} negate(%param_0)
}

ENTRY %main (a: bf16[8,128], b: f32[16], c: u8[9000,64]) -> (bf16[8,128], f32[16]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = f32[16]{0:T(128)} parameter(1)
  %c = u8[9000,64]{1,0} parameter(2)
  %rows = u8[8,64]{1,0} gather(%c, %b), offset_dims={1}
  %fusion = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%a), calls=%fused, backend_config={"estimated_cycles":"12"}
  %sum = (f32[16]{0:T(128)}, bf16[8,128]{1,0}) all-reduce(%b, %fusion), backend_config={"estimated_cycles":"30"}
  ROOT %out = (f32[16]{0:T(128)}, bf16[8,128]{1,0}) tuple(%sum, %fusion)
}
"""


def test_the_text_of_a_tpu_program_is_read():
    program = hlo.parse(TEXT)
    assert hlo.fusions(program) == 1 and hlo.cycles(TEXT) == 42
    assert hlo.collectives(program) == [hlo.Collective("all-reduce", "bf16 f32", 2, 64 + 2048)]
    # The operand of the fusion lies in fast memory; its result, and both sides of the exchange, do not.
    # Of the choice of rows the rows alone count.
    assert hlo.traffic(program) == 2048 + 2 * (64 + 2048) + 2 * 8 * 64


@gate
def test_a_wrong_topology_and_a_missing_compiler_are_one_line(monkeypatch):
    for text in ("v5e", "v9:2x2", "v5e:0x2", "h100:2x2", "v5e:8", ""):
        with pytest.raises(UserError, match=re.escape(repr(text))):
            read_target(text)
    for module, text in (("libtpu", "v5e:1x1"), ("jax_plugins.xla_cuda12", "h100:1")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match="pip install --no-deps "), devices(read_target(text)):
            pass


@gate
@pytest.mark.parametrize(("method", "precision", "platform"), [
    ("bn", "default", "gpu"), ("cml", "highest", "tpu"), ("icrm", "high", "gpu"),
])  # fmt: skip
def test_the_precision_is_that_of_every_product_of_a_step(method, precision, platform):
    """Those of gradients too, as JAX hands the program to the compiler."""
    changes = [*SIZES.items(), ("icrm.layers", "2"), ("net.precision", precision)]
    e = build_on(config.read(f"femnist:{method},smoke", changes), sample_store("femnist"))
    with backend.target(platform):
        state = jax.eval_shape(lambda: train.init_state(e.method, e.optimizer, 0, e.example))
        call = functools.partial(train.train_call, e.method, e.optimizer, e.weak, e.source, 1)
        batch = next(iter(e.source.batches(e.train_plans, 0, 1)))
        text = jax.jit(call).lower(state, e.source.resident, batch, jax.random.key(0)).as_text()
    products = [line for line in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)", line)]
    found = [re.findall(r"\b(?:DEFAULT|HIGH|HIGHEST)\b", line) for line in products]
    assert len(products) > 10 and found == [2 * [precision.upper()]] * len(products)


def test_times_are_bounds_of_what_the_maker_states():
    chip, gpu = CHIPS["v5e"], CHIPS["h100"]
    found = passport.roofline(197e12, 819e6, chip, "bfloat16")
    assert found == {"products_ms": 1000.0, "memory_ms": pytest.approx(1.0), "bound_ms": 1000.0}
    for rate, of, precision, expected in ((197e12, chip, "high", 3000), (67e12, gpu, "highest", 1000)):
        assert passport.roofline(rate, 0, of, "float32", precision)["products_ms"] == pytest.approx(expected)
    assert passport.all_reduce_ms(90e9, 1, chip) == 0
    assert passport.all_reduce_ms(90e9, 2, chip) == pytest.approx(1000 + 2 * 1e-3)
    assert passport.all_reduce_ms(1e6, 16, gpu) > 2 * passport.all_reduce_ms(1e6, 8, gpu)


def test_the_page_shows_the_records():
    records = passport.read_all(RECORDS)
    assert passport.table(records) in (ROOT / "docs/accelerators.md").read_text()
    assert all(re.fullmatch(r"[0-9a-f]{7,}", record["commit"]) for record in records), "of files as they were committed"
