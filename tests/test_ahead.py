"""Programs compiled for accelerators that are not there: the step over several devices, what their text says, passports."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend, config, train
from cxda_jax.ahead import hlo, passport
from cxda_jax.ahead.chips import CHIPS, devices, read_target
from cxda_jax.data.published import sample_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import build_on
from tests.lines import ROOT

RECORDS = ROOT / "docs/results/passports"
SMALL = (
    "--config.net.width=16", "--config.episode.per_domain=2", "--config.episode.num_query=4",
    "--config.evaluation.per_call=1", "--config.net.dtype=bfloat16",
)  # fmt: skip
# Steps of four tasks on one device and on four, from one state: prints the greatest difference, and the exchanges of a step.
ON_FOUR = """
import functools, json, sys
import jax, numpy as np
from cxda_jax import augment, backend, config, train
from cxda_jax.ahead import hlo
from cxda_jax.data.published import sample_store
from cxda_jax.experiment import build_on

store = sample_store("femnist")
c = config.read("femnist:cxda,smoke", [("train.tasks_per_step", "4"), ("episode.per_domain", "2"), ("episode.num_query", "4")])
e = build_on(c, store)
mesh = jax.make_mesh((4,), ("tasks",), (jax.sharding.AxisType.Auto,))
key, found = jax.random.key(1), []
for chips in (1, 4):
    state = train.init_state(e.method, e.optimizer, 0, e.example)
    call = functools.partial(train.train_call, e.method, e.optimizer, e.weak, e.source, 1)
    run = backend.jit(train.over_devices(call, mesh, 1) if chips > 1 else call)
    for batch in e.source.batches(e.train_plans, 0, 3):
        text = run.lower(state, e.source.resident, batch, key).compile().as_text() if chips > 1 and not int(state.step) else ""
        exchanges = hlo.collectives(hlo.parse(text)) if text else []
        seen = exchanges or (seen if chips > 1 and int(state.step) else [])
        state, measured = run(state, e.source.resident, batch, key)
    found.append(jax.tree.map(np.asarray, (state.variables, measured)))
differ = jax.tree.map(lambda a, b: float(abs(a - b).max()), *found)
print(json.dumps({"differ": max(jax.tree.leaves(differ)), "exchanges": [x._asdict() for x in seen]}))
"""


def python(*arguments, **environment):
    environment = {"JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_four_devices_take_the_step_of_one():
    done = python("-c", ON_FOUR, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differ"] < 1e-5
    assert found["exchanges"] and {x["operation"] for x in found["exchanges"]} == {"all-reduce"}
    assert {x["types"] for x in found["exchanges"]} == {"f32"}


def test_a_tpu_step_exchanges_its_float32_gradients_once(tmp_path):
    """And nothing else of more than a kilobyte, though its products are bfloat16."""
    folder = os.environ.get("CXDA_TEST_LIBTPU", "")
    found = python("-c", "import libtpu", PYTHONPATH=folder)
    if found.returncode:
        pytest.skip("the TPU compiler is not there: pip install --no-deps --target=DIR libtpu; CXDA_TEST_LIBTPU=DIR")
    out = tmp_path / "passport.json"
    done = python(
        "-m", "cxda_jax", "compile", "--config=femnist:cxda,smoke", "--topology=v5e:2x2", "--tasks_per_step=4", f"--out={out}",
        f"--data_dir={tmp_path}", *SMALL, PYTHONPATH=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(out.read_text())
    (large,) = [x for x in said["programs"]["step"]["collectives"] if x["bytes"] > passport.SMALL]
    assert large["operation"] == "all-reduce" and large["types"] == "f32"
    assert said["exchanged_bytes"] <= large["bytes"] < said["exchanged_bytes"] + passport.SMALL
    assert not said["programs"]["evaluation"]["collectives"]
    step = said["programs"]["step"]
    assert step["fits"] and step["flops"] > 1e6 and step["fusions"] > 10 and step["estimated_ms"] > 0


def test_the_target_is_a_context_and_leaves_nothing_behind():
    before = backend.platform_name(), backend.rewrites_layers()
    for platform in ("tpu", "gpu"):
        with backend.target(platform):
            assert backend.platform_name() == platform and not backend.rewrites_layers() and backend.donates_state()
    assert (backend.platform_name(), backend.rewrites_layers()) == before


def test_bytes_in_a_programs_text_are_those_that_the_compiler_counts():
    """Of a product and of reductions, on this machine; of a choice of rows the text counts the rows alone."""

    def work(x, y):
        return jnp.tanh(x @ y).sum(0), x.max(1)

    compiled = jax.jit(work).lower(*(jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2).compile()
    counted = compiled.cost_analysis()["bytes accessed"]
    assert abs(hlo.traffic(hlo.parse(compiled.as_text())) - counted) < 0.35 * counted
    rows = jax.jit(lambda x, i: jnp.take(x, i, axis=0)).lower(
        jax.ShapeDtypeStruct((10_000, 64), jnp.uint8), jax.ShapeDtypeStruct((8,), jnp.int32)
    )
    assert hlo.traffic(hlo.parse(rows.compile().as_text())) < 10_000


TEXT = """HloModule step

%fused (param_0: bf16[8,128]) -> bf16[8,128] {
  %param_0 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %neg = bf16[8,128]{1,0:T(8,128)(2,1)} negate(%param_0)
}

ENTRY %main (a: bf16[8,128], b: f32[16]) -> (bf16[8,128], f32[16]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = f32[16]{0:T(128)} parameter(1)
  %fusion = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"12"}
  %sum = (f32[16]{0:T(128)}, bf16[8,128]{1,0}) all-reduce(%b, %fusion), to_apply=%add, backend_config={"estimated_cycles":"30"}
  ROOT %out = (f32[16]{0:T(128)}, bf16[8,128]{1,0}) tuple(%sum, %fusion)
}
"""


def test_the_text_of_a_tpu_program_is_read():
    program = hlo.parse(TEXT)
    assert hlo.fusions(program) == 1 and hlo.cycles(TEXT) == 42
    assert hlo.collectives(program) == [hlo.Collective("all-reduce", "bf16 f32", 2, 64 + 2048)]
    # The operand of the fusion lies in fast memory; its result, and both sides of the exchange, do not.
    assert hlo.traffic(program) == 2048 + 2 * (64 + 2048)


@pytest.mark.parametrize("text", ["v5e", "v9:2x2", "v5e:0x2", "h100:2x2", "v5e:8", "v5e:2x2x2x2", ""])
def test_a_wrong_topology_is_named(text):
    with pytest.raises(UserError, match=re.escape(repr(text))):
        read_target(text)


def test_a_missing_compiler_is_told_with_its_command(monkeypatch):
    for module, text, package in (
        ("libtpu", "v5e:1x1", "libtpu"),
        ("jax_plugins.xla_cuda12", "h100:1", "nvidia-cuda-nvcc-cu12"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=rf"pip install --no-deps .*{package}"), devices(read_target(text)):
            pass


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("precision, wanted", [("default", "DEFAULT"), ("high", "HIGH"), ("highest", "HIGHEST")])
@pytest.mark.parametrize("method", ["bn", "cml", "cxda_any", "icrm"])
def test_the_precision_is_that_of_every_product_of_a_step(method, precision, wanted, platform):
    """Those of gradients too, as JAX hands the program to the compiler."""
    sizes = [("net.precision", precision), ("net.width", "16"), ("episode.per_domain", "2"), ("episode.num_query", "4")]
    e = build_on(config.read(f"femnist:{method},smoke", sizes), sample_store("femnist"))
    with backend.target(platform):
        state = jax.eval_shape(lambda: train.init_state(e.method, e.optimizer, 0, e.example))
        call = functools.partial(train.train_call, e.method, e.optimizer, e.weak, e.source, 1)
        batch = next(iter(e.source.batches(e.train_plans, 0, 1)))
        text = jax.jit(call).lower(state, e.source.resident, batch, jax.random.key(0)).as_text()
    products = [
        line for line in text.splitlines() if "stablehlo.dot_general" in line or "stablehlo.convolution" in line
    ]
    found = [re.findall(r"\b(?:DEFAULT|HIGH|HIGHEST)\b", line) for line in products]
    assert len(products) > 10 and found == [2 * [wanted]] * len(products)


def test_the_precision_changes_nothing_on_a_cpu():
    def answers(precision):
        e = build_on(config.read("femnist:cxda_any,smoke", [("net.precision", precision)]), sample_store("femnist"))
        variables = e.method.init(jax.random.key(0), e.example)
        return e.method.predict(e.method.adapt(variables, e.example, jax.random.key(1)), e.example)

    np.testing.assert_array_equal(answers("default"), answers("highest"))


def test_times_are_bounds_of_what_the_maker_states():
    chip = CHIPS["v5e"]
    found = passport.roofline(197e12, 819e6, chip, "bfloat16")
    assert found == {"products_ms": 1000.0, "memory_ms": pytest.approx(1.0), "bound_ms": 1000.0}
    high, highest = (passport.roofline(197e12, 0, chip, "float32", precision) for precision in ("high", "highest"))
    assert (high["products_ms"], highest["products_ms"]) == (3000.0, 6000.0)
    assert passport.roofline(67e12, 0, CHIPS["h100"], "float32", "highest")["products_ms"] == pytest.approx(1000)
    assert passport.all_reduce_ms(90e9, 1, chip) == 0
    assert passport.all_reduce_ms(90e9, 2, chip) == pytest.approx(1000 + 2 * 1e-3)
    assert passport.all_reduce_ms(1e6, 16, CHIPS["h100"]) > 2 * passport.all_reduce_ms(1e6, 8, CHIPS["h100"])


def test_the_page_shows_the_records():
    page, records = (ROOT / "docs/accelerators.md").read_text(), passport.read_all(RECORDS)
    assert passport.table(records) in page
    for record in records:
        assert re.fullmatch(r"[0-9a-f]{7,}", record["commit"]), "of files as they were committed"
        for program in record["programs"].values():
            assert program["compile_s"] > 0 and np.isfinite(program.get("bound_ms", 0))
