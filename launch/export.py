"""Writes a trained model as programs that run without this package, and compares them with the model.

cxda export --model=glyphs --format=litert --out=exported
cxda export --model=runs/unipen/cxda_any/0 --format=jax --out=exported --places=500
cxda export --model=runs/mine/cxda_any/0 --format=litert_float16 --out=exported --check_images=DEVICE
cxda export --model=unipen --format=web --out=page
cxda export --model=ADAPTER --encoder=model.onnx --format=onnx --out=exported --check_images=DEVICE
cxda export --model=ADAPTER --format=litert --out=exported --check_images=features.npz

--format is one of:

    jax             programs of jax.export for CPU, CUDA and TPU, and the weights
    litert          one .tflite file with two signatures, for LiteRT (TensorFlow Lite)
    litert_float16  the same, with weights of half the size
    litert_int8     the same, with weights of 8 bits in products; the last to try, since it differs most
    onnx            two .onnx files; with --encoder a third one
    web             a page for browsers in one file; it says itself what it can do
    javascript      of an adapter alone: one file for browsers and Node.js

All but the page are made of two functions, encode(images, present) -> memory and predict(memory, image) -> logits,
attention. The buffer has a fixed number of places; `present` says which of them hold an image, so one program serves
every fill. The file export.json beside the programs names and describes all that they take and give.

Before anything is left in the folder of --out, the programs run on test tasks of the model's own data set, and their
answers are compared with the model's. Programs that do not agree are not kept. --check_images takes a folder of your
own images in place of the data set; they need no labels. --check_tasks says how many tasks are compared: three or more,
with 0, 1 and all images in the buffer. --tolerance says by how much logits may differ, in place of the format's limit.

Of an adapter of cxda fit, the programs take rows of logits and style, and --check_images is a file of cxda features.
With --encoder, an ONNX file, and a folder of images, there is a third program, describe(image) -> row. An adapter that
cxda fit did not trust is exported with --always alone.

pip install 'cxda_jax[export]' installs what all formats need; jax and web need nothing more,
but web needs Node.js for the comparison.
"""

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)
_MODEL = flags.DEFINE_string(
    "model", "", "A run, its model/, or the name of a model of the package.", allow_override=True
)
_METHOD = flags.DEFINE_string(
    "method", "", "How to adapt, for a model of erm or erm_iid: t3a, lame, ...; else its own.", allow_override=True
)
_ENCODER = flags.DEFINE_string("encoder", "", "For an adapter: the classifier, an ONNX file.", allow_override=True)
_FORMAT = flags.DEFINE_string("format", "", "jax, litert, litert_float16, litert_int8, onnx, web or javascript.")
_OUT = flags.DEFINE_string("out", "", "The folder to write.", allow_override=True)
_PLACES = flags.DEFINE_integer("places", 100, "Images in the buffer at most.", 1, 100_000)
_CHECK_TASKS = flags.DEFINE_integer("check_tasks", 20, "Tasks to compare on, 3 or more.", 1, 10_000)
_CHECK_IMAGES = flags.DEFINE_string("check_images", "", "A folder of images to compare on, in place of test tasks.")
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.0, "Largest accepted difference of logits, in parts of the largest; 0: that of the format.", 0.0
)
_ALWAYS = flags.DEFINE_bool(
    "always", False, "Export an adapter even where adapting is not expected to help.", allow_override=True
)


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.config.fields import choose
        from cxda_jax.export.exporting import Check, Source, export
        from cxda_jax.export.formats import FORMATS
        from cxda_jax.machine import backend
    backend.keep_compiled()
    model = cli.insist(_MODEL.value, "--model", "give a run of cxda train, or a model of the package such as glyphs")
    kind = cli.insist(_FORMAT.value, "--format", f"choose from {', '.join(FORMATS)}, web, javascript")
    choose("--format", kind, (*FORMATS, "web", "javascript"))
    out = Path(cli.insist(_OUT.value, "--out", "name the folder to write, such as --out=exported"))
    check = Check(cli.DATA_DIR.value, _CHECK_TASKS.value, _CHECK_IMAGES.value, _TOLERANCE.value)
    export(Source(model, _METHOD.value, _ENCODER.value, _ALWAYS.value), kind, out, _PLACES.value, check)


if __name__ == "__main__":
    cli.run(main)
