"""Describes images by an encoder that you have, for cxda_jax.fit: from a folder to one file of arrays.

cxda features --encoder=model.onnx --images=LABELLED --out=features.npz
cxda features --encoder=model.onnx --images=list.csv --out=features.npz --mean=0.5 --std=0.5 --classes=names.txt
cxda features --encoder=timm:resnet18 --images=LABELLED --out=features.npz
cxda features --encoder=module:function --images=LABELLED --out=features.npz
cxda features --encoder=vit.onnx --images=LABELLED --out=features.npz --logits=none --features=TENSOR
cxda features --predictions=predictions.json --labels=labels.csv --out=features.npz

--images is a folder DOMAIN/CLASS/IMAGE, a folder DOMAIN/IMAGE of unlabelled images, or a CSV file with the columns
path (seen from the file's folder), domain and, where it is known, label. Images are read as cxda prepare reads them.
What cannot be read is named and left out.

--encoder is an ONNX file, whose input is float images [n, 3, h, w] or [n, h, w, 3]; timm:MODEL, torchvision:MODEL or
transformers:MODEL, with the weights and the preprocessing of that package; or a Python function. The function takes
images, uint8 [n, h, w, 3], and gives a dict of arrays: logits [n, classes]; style [n, d], or maps, a list of arrays
[n, h, w, channels] whose means and deviations become the style; and features [n, d] if it likes. Features may stand
without logits: then cxda fit learns the last layer too.

--out gets logits, style, features, labels (-1: unknown), domains, classes, paths, and in `about` how it was made. The
columns of logits are the sorted classes of the images, or those of --classes. A stopped command goes on where it was.

--predictions takes the place of --encoder and --images: the JSON file that SpeciesNet or MegaDetector wrote for images
of camera traps. --labels is a CSV file with the columns file and label, of some of the images. The folder of an image
is its camera, or --locations says it: a CSV file with the columns file and location. The columns of logits are the
sorted labels, or those of --classes. There is no style.

    f = np.load("features.npz"); known = f["labels"] >= 0
    adapter = cxda_jax.fit(f["logits"][known], f["labels"][known], f["domains"][known], f["style"][known])
"""

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)
_ENCODER = flags.DEFINE_string(
    "encoder", "", "X.onnx, timm:MODEL or the like, or module:function.", allow_override=True
)
_IMAGES = flags.DEFINE_string("images", "", "A folder of images, or a CSV file.", allow_override=True)
_OUT = flags.DEFINE_string("out", "", "The .npz file to write.", allow_override=True)
_CLASSES = flags.DEFINE_string("classes", "", "A text file with the name of each column of logits, one a line.")
_FIT = flags.DEFINE_enum(
    "fit",
    None,
    ["squash", "crop", "pad"],
    "How an image becomes a square (the model's, or squash).",
    allow_override=True,
)
_PREDICTIONS = flags.DEFINE_string("predictions", "", "A JSON file of SpeciesNet or MegaDetector.", allow_override=True)
_LABELS = flags.DEFINE_string("labels", "", "A CSV file with the columns file and label.", allow_override=True)
_LOCATIONS = flags.DEFINE_string("locations", "", "A CSV file with the columns file and location.", allow_override=True)
_OPTIONS = [
    flags.DEFINE_integer("size", None, "Side of the images (the model's, or 224).", lower_bound=8, allow_override=True),
    flags.DEFINE_integer("batch", 32, "Images at once; a graph of a fixed number takes that.", lower_bound=1),
    flags.DEFINE_list("mean", [], "Taken from pixels of 0..1, for each channel (the model's, or ImageNet's)."),
    flags.DEFINE_list("std", [], "Divides what is left (likewise). --mean=0 --std=1/255 leaves 0..255."),
    flags.DEFINE_string(
        "logits", "", "ONNX: the tensor of logits, where several outputs have two axes; none: there are none."
    ),
    flags.DEFINE_string(
        "features",
        "",
        "ONNX: the tensor of features [n, d], or of tokens [n, tokens, d], the class's first.",
        allow_override=True,
    ),
    flags.DEFINE_list("maps", [], "The tensors or modules whose moments are the style (up to 6)."),
]


def of_predictions() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.adapter.features import read_classes
        from cxda_jax.adapter.predictions import read_predictions, write_labelled
        from cxda_jax.errors import naming
    labels = Path(cli.insist(_LABELS.value, "--labels", "give a CSV file with the columns file and label")).expanduser()
    out = Path(cli.insist(_OUT.value, "--out", "name the file to write, such as --out=features.npz")).expanduser()
    locations = Path(_LOCATIONS.value).expanduser() if _LOCATIONS.value else None
    with naming({flag.name: f"--{flag.name}" for flag in (_OUT, _CLASSES)}):
        classes = read_classes(Path(_CLASSES.value).expanduser()) if _CLASSES.value else []
        write_labelled(read_predictions(Path(_PREDICTIONS.value).expanduser()), labels, locations, classes, out)


def main() -> None:
    if cli.of_predictions(_PREDICTIONS, [_ENCODER, _IMAGES, _FIT, *_OPTIONS], [_LABELS, _LOCATIONS]):
        return of_predictions()
    with cli.loading(goes_on=True):
        from pathlib import Path

        from cxda_jax.adapter.encoders import Options, open_encoder
        from cxda_jax.adapter.features import listed, read_classes, write_features
        from cxda_jax.errors import naming
    name = cli.insist(_ENCODER.value, "--encoder", "give a file that ends in .onnx, timm:MODEL or module:function")
    images = Path(cli.insist(_IMAGES.value, "--images", "give a folder DOMAIN/CLASS/IMAGE, or a CSV file")).expanduser()
    out = Path(cli.insist(_OUT.value, "--out", "name the file to write, such as --out=features.npz")).expanduser()
    with naming({flag.name: f"--{flag.name}" for flag in (_ENCODER, _IMAGES, _OUT, _CLASSES, *_OPTIONS)}):
        classes = read_classes(Path(_CLASSES.value).expanduser()) if _CLASSES.value else []
        encoder = open_encoder(name, Options(**{flag.name: flag.value for flag in _OPTIONS}))
        write_features(listed(images), encoder, out, _FIT.value or encoder.fit, classes)


if __name__ == "__main__":
    cli.run(main)
