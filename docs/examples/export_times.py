"""Times and memory of exported programs on this machine, beside a method that fine-tunes.

python -m docs.examples.export_times --erm=runs/glyphs/erm/0 --out=docs/results/export-times.json

Each case runs in a process of its own, on one thread. Its peak memory is that of the whole process, with the
runtime. Python and numpy alone need some 30 MB of it. The images are random; times do not depend on them.
The scripts of the web page run in Node.js.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

_ERM = flags.DEFINE_string("erm", "", "A run of erm, which ft_em starts from.")
_MODEL = flags.DEFINE_string("model", "glyphs", "The model to export.")
_OUT = flags.DEFINE_string("out", "", "The JSON file to write.", allow_override=True)

PLACES = (20, 100, 500)
KINDS = ("jax", "litert", "litert_float16", "litert_int8", "onnx", "web")
TIMED = """
import statistics, time

def timed(call, least=20, seconds=3.0):
    call()
    times, began = [], time.perf_counter()
    while len(times) < 3 or (len(times) < least and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)

def peak_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # of this program alone
    return int(line.split()[1]) / 1024
"""
# Each defines encode() and predict() for `folder`, `places` and `image_shape`.
OPENED = {
    "jax": """
import jax, numpy as np
from safetensors.numpy import load_file
weights = load_file(folder + "/weights.safetensors")
programs = [jax.jit(jax.export.deserialize(bytearray(open(f"{folder}/{p}.cpu.jax", "rb").read())).call) for p in ("encode", "predict")]
run = [lambda inputs, program=program: jax.block_until_ready(program(weights, inputs)) for program in programs]
""",
    "litert": """
import numpy as np
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(folder + "/model.tflite", num_threads=1)
run = [lambda inputs, r=interpreter.get_signature_runner(p): r(**inputs) for p in ("encode", "predict")]
""",
    "onnx": """
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
run = []
for part in ("encode", "predict"):
    session = onnxruntime.InferenceSession(f"{folder}/{part}.onnx", options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    taken = [i.name for i in session.get_inputs()]
    run.append(lambda x, s=session, n=names, t=taken: dict(zip(n, s.run(n, {name: x[name] for name in t}))))
""",
}
MEASURED = """
import json
rng = np.random.default_rng(0)
images = rng.integers(0, 256, (places, *image_shape), np.uint8)
present = np.ones(places, np.float32)
memory = run[0]({"images": images, "present": present})
encode = timed(lambda: run[0]({"images": images, "present": present}))
predict = timed(lambda: run[1]({**memory, "image": images[:1]}), 200)
print(json.dumps({"encode_ms": encode, "predict_ms": predict, "peak_mb": peak_mb()}))
"""
PAGE = """
const fs = require("node:fs"), vm = require("node:vm");
const [path, places] = process.argv.slice(2), page = fs.readFileSync(path, "utf8");
const held = (id) => page.match(new RegExp(`<script[^>]* id="${id}">([^]*?)</script>`))[1];
vm.runInThisContext(`${held("engine")}\nObject.assign(globalThis, { Engine, finish, fromBase64 });`);
const model = JSON.parse(held("model"));
const engine = new Engine(model, fromBase64(held("weights")), fromBase64(model.kernel));
if (engine.kind !== "WebAssembly") throw new Error("this Node.js has no WebAssembly with vectors");
const images = Array.from({ length: Number(places) }, () => Float32Array.from({ length: model.shape[0] ** 2 }, Math.random));
function timed(call, least, seconds) {
  call();
  const times = [], began = performance.now();
  while (times.length < 3 || (times.length < least && performance.now() - began < 1e3 * seconds)) {
    const start = performance.now();
    call();
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[times.length >> 1];
}
const adapted = finish(engine.adapt(images));
const encode_ms = timed(() => finish(engine.adapt(images)), 20, 3);
const predict_ms = timed(() => engine.predict(adapted, images[0]), 200, 3);
const peak_mb = Number(fs.readFileSync("/proc/self/status", "utf8").match(/VmHWM:\s*(\d+)/)[1]) / 1024;
console.log(JSON.stringify({ encode_ms, predict_ms, peak_mb }));
"""
TUNED = """
import json, numpy as np, jax
import cxda_jax
model = cxda_jax.load(folder, "ft_em")
rng = np.random.default_rng(0)
images = list(rng.integers(0, 256, (places, *image_shape), np.uint8))
support = model.as_images(images)
adapt = timed(lambda: jax.block_until_ready(model.programs.adapt(model.variables, support, jax.random.key(0))))
adapted = model.programs.adapt(model.variables, support, jax.random.key(0))
query = model.as_images(images[:1])
predict = timed(lambda: jax.block_until_ready(model.programs.predict(adapted, query)), 200)
print(json.dumps({"encode_ms": adapt, "predict_ms": predict, "peak_mb": peak_mb()}))
"""


def child(code, folder, places, shape):
    """The output of a process of its own, which has one core."""
    given = f"folder, places, image_shape = {str(folder)!r}, {places}, {tuple(shape)!r}\n"
    threads = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = os.environ | {"XLA_FLAGS": threads, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", given + TIMED + code]
    if code is PAGE:
        command = ["node", "--single-threaded", "-e", code, "-", f"{folder}/index.html", str(places)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(_):
    import cxda_jax
    from cxda_jax.export import web
    from cxda_jax.export.formats import FORMATS
    from cxda_jax.export.pair import pair_of
    from cxda_jax.study.training import commit

    model, rows = cxda_jax.load(_MODEL.value), []
    for places in PLACES:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                if kind == "web":
                    web.write(model, Path(folder))
                    code = PAGE
                else:
                    FORMATS[kind].write(pair_of(model, places), Path(folder))
                    code = OPENED[kind.partition("_")[0]] + MEASURED
                found = child(code, folder, places, model.card.shape)
            rows.append({"format": kind, "places": places, **found})
            print(rows[-1], flush=True)
        if _ERM.value:
            found = child(TUNED, _ERM.value, places, model.card.shape)
            rows.append({"format": "ft_em", "places": places, **found})
            print(rows[-1], flush=True)
    record = {"commit": commit(), "model": _MODEL.value, "threads": 1, "rows": rows}
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
