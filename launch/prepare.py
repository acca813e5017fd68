"""Turns the raw downloads of a benchmark, or your own images, into the one form that training reads.

cxda prepare --benchmark=femnist --raw_dir=DOWNLOADS
cxda prepare --benchmark=cifar_c --raw_dir=DOWNLOADS --strict
cxda prepare --benchmark=cifar_c --raw_dir=DOWNLOADS --tfds
cxda prepare --benchmark=tiny_imagenet_c --raw_dir=DOWNLOADS --regenerate
cxda prepare --benchmark=iwildcam --raw_dir=DOWNLOADS --size=112
cxda prepare --benchmark=unipen --raw_dir=DOWNLOADS
cxda prepare --benchmark=unipen --raw_dir=DOWNLOADS --scale=writer --name=unipen_sizes
cxda prepare --benchmark=qmnist --raw_dir=DOWNLOADS --split=students
cxda prepare --benchmark=cifar10_c --raw_dir=DOWNLOADS
cxda prepare --benchmark=folder --raw_dir=MY_IMAGES --name=mine --size=64 --fit=crop

--raw_dir holds the downloads. Where a folder of this list is missing, an archive with its name (femnist.zip,
CIFAR-10-C.tar) or with its published name (femnist-data.zip, tinyimagenet-c.zip) is extracted beside itself. An
archive is refused if it holds links or names that lead out of its folder, or if it unpacks to far too much.
  femnist           femnist/{train,val,test}/*.json, as LEAF writes them; also femnist-data/
  cifar_c           CIFAR-10-C/*.npy and CIFAR-10-C-new/{train,val}/*.npy
                    --regenerate: cifar-10-batches-bin/ in place of CIFAR-10-C-new
                    --tfds: nothing; tensorflow-datasets fetches into it what is not there yet
  tiny_imagenet_c   Tiny-ImageNet-C/ and Tiny-ImageNet-C-new/{train,val}/
                    --regenerate: tiny-imagenet-200/ in place of Tiny-ImageNet-C-new
  iwildcam          iwildcam_v2.0/{metadata.csv,categories.csv,train/}
  unipen            train_r01_v07/{data,include}/, pen strokes
                    --scale=writer: keep the sizes of a writer's characters to each other
                    --split=site: hold out whole donor sites, with their tablets
  qmnist            qmnist-{train,test}-labels-idx2-int.gz, and the images of QMNIST or of MNIST
                    --split=students: train on employees, test students
  cifar10_c         cifar-10-batches-bin/ or {train,test}/CLASS/IMAGE; all corruptions are made
  folder            DOMAIN/CLASS/IMAGE; a warning counts other files

An image that cannot be read stops the command, which names it. --skip_bad=N
leaves up to N such images out and names them.

The store is written under another name, and renamed to --data_dir/--name when it is whole. Its sheet.png shows some
images of some domains. A card of the splits is printed last: domains, images, classes, hash, and the paper's counts.
Results on regenerated domains are not comparable with the paper's, and every result says so.

--links prints the commands that fetch the published files which --raw_dir lacks, checks the size and the hash of
those that are there, and ends. For a benchmark whose addresses are not known it says where its files come from.
"""

from absl import flags

from . import cli

_BENCHMARK = flags.DEFINE_string(
    "benchmark", None, "Such as femnist, cifar_c, tiny_imagenet_c, iwildcam, unipen, qmnist, cifar10_c or folder."
)
flags.adopt_module_key_flags(cli)
_RAW_DIR = flags.DEFINE_string("raw_dir", None, "Where the downloads are.")
_NAME = flags.DEFINE_string("name", None, "Folder in --data_dir, config.data.name; the benchmark's name unless given.")
_LINKS = flags.DEFINE_bool("links", False, "Show where the published files are, check those in --raw_dir, and end.")
_STRICT = flags.DEFINE_bool("strict", False, "Refuse raw files whose counts are not the paper's.")
_SKIP_BAD = flags.DEFINE_integer(
    "skip_bad", 0, "tiny_imagenet_c, iwildcam, folder: leave out up to so many bad images.", lower_bound=0
)
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Threads that read and decode; one for each core unless given.", lower_bound=1, allow_override=True
)
_OPTIONS = [
    flags.DEFINE_bool("regenerate", None, "cifar_c, tiny_imagenet_c: make train and val domains from clean images."),
    flags.DEFINE_bool("tfds", None, "cifar_c: as --regenerate, all images through tensorflow-datasets."),
    flags.DEFINE_integer("size", None, "iwildcam (112), folder (64): side of the images.", lower_bound=8),
    flags.DEFINE_enum(
        "fit", None, ["squash", "crop", "pad"], "folder (squash): how an image that is no square becomes one."
    ),
    flags.DEFINE_enum("scale", None, ["box", "writer"], "unipen (box): the size of a character."),
    flags.DEFINE_enum(
        "split",
        None,
        ["writer", "site", "published", "students"],
        "unipen (writer or site), qmnist (published or students): what is held out.",
    ),
    flags.DEFINE_string("background", None, "folder (white): behind transparency and padding; white, black or R,G,B."),
    flags.DEFINE_string("split_csv", None, "folder: a CSV file with the columns domain and split."),
    flags.DEFINE_integer(
        "min_images", None, "folder (40), unipen (60), qmnist (40): leave domains with fewer images out.", lower_bound=1
    ),
    flags.DEFINE_integer(
        "seed",
        None,
        "folder, unipen, qmnist (0): of the split. --regenerate, cifar10_c (0): of the corruptions.",
        lower_bound=0,
    ),
]


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.errors import UserError, naming
        from cxda_jax.studies.preparing import prepare_benchmark, show_published
    benchmark = cli.insist(_BENCHMARK.value, "--benchmark", "name one, such as --benchmark=folder")
    raw_dir = Path(cli.insist(_RAW_DIR.value, "--raw_dir", "say where the downloads, or your images, are")).expanduser()
    name = _NAME.value or benchmark
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"--name={name}: give the name of one folder, which will lie in --data_dir")
    target = Path(cli.DATA_DIR.value) / name
    options = {flag.name: flag.value for flag in _OPTIONS if flag.value is not None}
    if _LINKS.value:
        return show_published(benchmark, raw_dir)
    with naming({flag.name: f"--{flag.name}" for flag in (_RAW_DIR, _SKIP_BAD, *_OPTIONS)}):  # parameters of readers
        prepare_benchmark(benchmark, raw_dir, target, options, _STRICT.value, _SKIP_BAD.value, _WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
