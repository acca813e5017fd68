"""Adapts a trained model to your own unlabelled images, and shows what that changed.

cxda adapt --model=runs/unipen/cxda_any/0 --buffer=DEVICE --images=NEW --out=OUT
cxda adapt --model=glyphs --buffer=DEVICE --images=NEW --out=OUT --labels=labels.csv
cxda adapt --model=runs/glyphs/erm/0 --method=t3a --buffer=DEVICE --images=NEW --out=OUT
cxda adapt --model=ADAPTER --encoder=model.onnx --buffer=DEVICE --images=NEW --out=OUT
cxda adapt --model=ADAPTER --predictions=predictions.json --out=OUT

--model is a run of cxda train, its folder model/, the name of a model that comes with the package, or what cxda fit
wrote; this last one needs the same --encoder as cxda features had. No data set is needed. Images may be of any size and
of the formats JPEG, PNG, WebP, TIFF, BMP, GIF and PNM, and HEIC where pillow-heif is installed; they are brought to the
model's size as its training images were. Folders inside a folder are read too. What cannot be read is named and left
out.

Writes into the folder of --out:

    predictions.csv  for each image the class that counts, those before and after adapting with their confidences, how
                     far the probabilities moved (0 to 1), and the images of the buffer that it attended to most
    adapted.html     one page for any browser: answers before and after, what gain to expect, the buffer, and an
                     explorer of what each answer attended to

The answer that counts is the adapted one where adapting helped in the validation of the model's own training, with so
many images. With fewer images it is the answer without adapting, and the command says so. --always takes the adapted
answer there too. --labels is a CSV file with the columns file and label, for scores.

--predictions, for an adapter of cxda features --predictions=..., takes the place of --buffer and --images: a JSON file
of SpeciesNet or MegaDetector. All images of a camera are its buffer, or --capacity of them, evenly spread. The folder
of an image is its camera, or --locations says it. OUT/predictions.json is the file with adapted scores, and
predictions.csv the table without nearest images.
"""

from typing import TYPE_CHECKING

from absl import flags

from . import cli

if TYPE_CHECKING:
    from pathlib import Path

flags.adopt_module_key_flags(cli)
_MODEL = flags.DEFINE_string(
    "model", "", "A run, its model/, or the name of a model of the package.", allow_override=True
)
_METHOD = flags.DEFINE_string(
    "method", "", "How to adapt, for a model of erm or erm_iid: t3a, lame, ...; else its own.", allow_override=True
)
_ENCODER = flags.DEFINE_string(
    "encoder", "", "For an adapter of cxda fit: the classifier, as for cxda features.", allow_override=True
)
_BUFFER = flags.DEFINE_string("buffer", "", "A folder of images to adapt to.")
_IMAGES = flags.DEFINE_string("images", "", "A folder of images to answer for.")
_OUT = flags.DEFINE_string("out", "", "The folder to write.", allow_override=True)
_LABELS = flags.DEFINE_string("labels", "", "A CSV file with the columns file and label.", allow_override=True)
_CAPACITY = flags.DEFINE_integer("capacity", 500, "How many images of a buffer count, the newest.", 1, 100_000)
_ALWAYS = flags.DEFINE_bool(
    "always", False, "Take the adapted answer even where adapting is not expected to help.", allow_override=True
)
_PREDICTIONS = flags.DEFINE_string("predictions", "", "A JSON file of SpeciesNet or MegaDetector.", allow_override=True)
_LOCATIONS = flags.DEFINE_string("locations", "", "A CSV file with the columns file and location.", allow_override=True)


def _out() -> "Path":
    from pathlib import Path

    from cxda_jax.errors import UserError

    out = Path(cli.insist(_OUT.value, "--out", "name the folder to write, such as --out=adapted")).expanduser()
    if out.exists() and not out.is_dir():
        raise UserError("is a file", "out", out, "name a folder")
    return out


def adapt_predictions() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.device.traps import Traps, adapt_predictions
        from cxda_jax.machine import backend
    backend.keep_compiled()
    model = cli.insist(_MODEL.value, "--model", "give the folder of an adapter of cxda fit")
    out, (model, predictions) = _out(), (Path(path).expanduser() for path in (model, _PREDICTIONS.value))
    locations, labels = (Path(flag.value).expanduser() if flag.value else None for flag in (_LOCATIONS, _LABELS))
    options = locations, labels, _CAPACITY.value, _ALWAYS.value
    adapt_predictions(Traps(model, predictions, out, *options))


def main() -> None:
    if cli.of_predictions(_PREDICTIONS, [_METHOD, _ENCODER, _BUFFER, _IMAGES], [_LOCATIONS]):
        return adapt_predictions()
    with cli.loading():
        from cxda_jax.device import adapting
        from cxda_jax.machine import backend
    backend.keep_compiled()
    model = cli.insist(_MODEL.value, "--model", "give a run of cxda train, or a model of the package such as glyphs")
    buffer = cli.insist(_BUFFER.value, "--buffer", "give a folder of images to adapt to")
    out = _out()
    images = cli.insist(_IMAGES.value, "--images", "give a folder of images to answer for")
    options = _METHOD.value, _CAPACITY.value, _ALWAYS.value, _ENCODER.value
    adapting.adapt_folder(adapting.Adaptation(model, buffer, images, out, _LABELS.value, *options))


if __name__ == "__main__":
    cli.run(main)
