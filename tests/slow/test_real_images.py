"""The readers of unipen, qmnist and cifar10_c, on tiny files in the exact layouts that are published."""

import collections
import gzip
import struct

import numpy as np
import pytest
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.path import Path as Outline
from matplotlib.transforms import IdentityTransform
from PIL import Image

from cxda_jax.data.readers import cifar10, cifar_c, qmnist, unipen
from cxda_jax.data.readers.raw import read_pieces
from tests.raw_fixtures import write_cifar_binary

DOCUMENT = ".VERSION 1.0\n.HIERARCHY CHARACTER\n.COORD {coord}\n.SETUP words of\n  .PEN_DOWN and .PEN_UP.\n{units}"
STROKES = """.INCLUDE {site}/{site}.doc
.WRITER_ID {writer}
.PEN_DOWN
{down}
.PEN_UP
.DT 100
.PEN_DOWN
 0 0 7
 0 90 8
 30 90 9
.PEN_UP
 40 40 1
 50 50 2
.PEN_DOWN
 60 0 1
 60 10 2
"""


def write_writer(root, site, writer, segments, part="1c", down=" 5 5 0\n 6 6 0", coord="X Y T", units=""):
    """A writer's three files: a document, the strokes, which have four components with points, and the segments."""
    include, data = root / "include" / site / "data", root / "data" / part / site
    include.mkdir(parents=True, exist_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    (root / "include" / site / f"{site}.doc").write_text(DOCUMENT.format(coord=coord, units=units))
    (include / f"{writer}.dat").write_text(STROKES.format(site=site, writer=writer, down=down))
    lines = [".VERSION 1.0", f".INCLUDE {site}/data/{writer}.dat", *(f".SEGMENT {segment}" for segment in segments)]
    (data / f"{writer}.dat").write_text("\n".join(lines) + "\n")
    return data / f"{writer}.dat"


def strokes_of(tmp_path, text, **options):
    file = write_writer(tmp_path, "aga", "w", [f'CHARACTER {text} ? "a"'], **options)
    writer, [(strokes, label)] = unipen.read_file(file, tmp_path / "include")
    assert (writer, label) == ("w", "a")
    return [stroke.tolist() for stroke in strokes]


def test_components_are_counted_without_empty_ones(tmp_path):
    for text, strokes in (
        ("0-1", [[[5, 5], [6, 6]], [[0, 0], [0, 90], [30, 90]]]),
        ("1-3", [[[0, 0], [0, 90], [30, 90]], [[60, 0], [60, 10]]]),  # component 2 is under a lifted pen
        ("1:1-3:0", [[[0, 90], [30, 90]], [[60, 0]]]),  # ends belong to it
        ("3,0", [[[60, 0], [60, 10]], [[5, 5], [6, 6]]]),
    ):
        assert strokes_of(tmp_path, text) == strokes
    units = ".X_POINTS_PER_INCH 254\n.Y_POINTS_PER_MM 20\n"
    turned = strokes_of(tmp_path, "1", coord="T Y X", units=units)
    assert np.allclose(turned, [[[0.7, 0], [0.8, 4.5], [0.9, 4.5]]])


def write_unipen(raw, writers=9, characters=6):
    for i in range(writers):
        segments = [f'CHARACTER 1 ? "{"Ao"[n % 2]}"' for n in range(characters)]
        write_writer(raw / "train_r01_v07", f"s{i % 4}", f"w{i}", segments, down=f" 0 0 0\n 0 {10 + i} 0\n {i} 0 0")
    root, others = raw / "train_r01_v07", ['CHARACTER 0 ? "7"', 'CHARACTER 0 ? "%"', 'CHARACTER 3 ? "7"']
    write_writer(root, "s0", "w0", others, "1a", down=" 0 0 0\n 0 9 0\n 9 0 0")
    write_writer(root, "s1", "few", ['CHARACTER 1 ? "b"'])


def test_a_domain_is_a_writer(tmp_path):
    write_unipen(tmp_path)
    raw = unipen.find(tmp_path, min_images=6)
    assert len(raw.warnings) == 3 and "s1 few (1)" in raw.warnings[2]  # short ones, other characters and a writer
    domains = {d.name: d for d in read_pieces(raw.pieces, 1, lambda n: None)}
    assert sorted(domains) == sorted(f"s{i % 4} w{i}" for i in range(9))
    assert domains["s1 w1"].images.shape == (6, 28, 28, 1)
    assert domains["s0 w0"].labels.tolist() == [7, 10, 50, 10, 50, 10, 50]  # digits, capitals, small letters
    splits = {name: d.split for name, d in domains.items()}
    assert set(splits.values()) == {"train", "val", "test"}
    by_site = {p.domain: p.split for p in unipen.find(tmp_path, min_images=6, split="site").pieces}
    of_sites = {site: {by_site[name] for name in by_site if name.startswith(site)} for site in ("s0", "s1", "s2", "s3")}
    assert all(len(parts) == 1 for parts in of_sites.values())


def agg(strokes, side, pen, finer):
    """Matplotlib's agg, on so many times finer pixels: there its overlapping edges hardly count twice."""
    renderer = RendererAgg(side * finer, side * finer, 72)
    context = renderer.new_gc()
    context.set_linewidth(pen * finer)
    context.set_capstyle("round")
    context.set_joinstyle("round")
    context.set_snap(False)
    for stroke in strokes:
        renderer.draw_path(context, Outline(stroke * finer), IdentityTransform(), None)
    ink = np.asarray(renderer.buffer_rgba())[..., 3].reshape(side, finer, side, finer)
    return 255 - ink.mean(axis=(1, 3))


def test_a_drawing_is_what_agg_draws():
    rng = np.random.default_rng(0)
    strokes = [np.cumsum(rng.normal(size=(n, 2)), axis=0).astype(np.float32) for n in rng.integers(2, 30, 3)]
    drawn = unipen.draw(strokes, 18.0)
    points = np.concatenate(strokes).astype(float)
    middle, factor = (points.min(0) + points.max(0)) / 2, 18 / np.ptp(points, axis=0).max()
    expected = agg([(s - middle) * factor + 14 for s in strokes], 28, 2.0, 16)  # agg's y points up too
    difference = np.abs(drawn - expected)
    assert difference.max() < 48 and difference.mean() < 1


def write_idx(path, array):
    code = {np.dtype("u1"): 8, np.dtype(">i4"): 12}[array.dtype]
    data = struct.pack(f">HBB{array.ndim}i", 0, code, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_qmnist(raw, mnist=False, count=5, digits=8):
    """The first writers of each series are in train, three more in test. Employees count from 0, students from 2100."""
    raw.mkdir(parents=True, exist_ok=True)
    for part, numbers in (("train", np.arange(count)), ("test", np.arange(count, count + 3))):
        writers = np.random.default_rng(0).permutation(np.repeat([*numbers, *(2100 + numbers)], digits))
        rows = np.zeros((len(writers), 8), ">i4")
        rows[:, 0], rows[:, 1], rows[:, 2] = np.arange(len(writers)) % 10, 4 * (writers > 2000), writers
        images = np.zeros((len(writers), 28, 28), np.uint8)
        images[:, 0, 0], images[:, 0, 1] = rows[:, 0], writers % 200
        write_idx(raw / f"qmnist-{part}-labels-idx2-int.gz", rows)
        if mnist:  # of the test file it has the first part alone
            name = {"train": "train", "test": "t10k"}[part]
            write_idx(raw / f"{name}-images-idx3-ubyte", images if part == "train" else images[:20])
        else:
            write_idx(raw / f"qmnist-{part}-images-idx3-ubyte.gz", images)


@pytest.mark.parametrize("mnist", [False, True])
def test_a_digit_has_its_class_and_writer(tmp_path, mnist):
    write_qmnist(tmp_path / "QMNIST" / "raw", mnist)
    domains = list(read_pieces(qmnist.find(tmp_path, min_images=1).pieces, 1, lambda n: None))
    assert sum(len(d.labels) for d in domains) == (80 + 20 if mnist else 80 + 48)
    for domain in domains:
        who, number = domain.name.split()[0], int(domain.name.split()[1])
        assert domain.images.shape[1:] == (28, 28, 1)
        assert (domain.images[:, 0, 0, 0] == domain.labels).all()
        assert (domain.images[:, 0, 1, 0] == number % 200).all()
        assert (domain.split == "test") == (5 <= number <= 7 or number >= 2105)
        assert who == ("student" if number > 2000 else "employee")
    pieces = qmnist.find(tmp_path, split="students", min_images=1).pieces
    assert {(p.domain.split()[0], p.split == "test") for p in pieces} == {("student", True), ("employee", False)}


def write_cifar10(raw, per_class=12):
    """Equal images in the two forms, and what they are in the order of their files."""
    made = {}
    for part, names in (("train", cifar_c.TRAIN_BATCHES), ("test", ["test_batch"])):
        images, labels = write_cifar_binary(raw / "bin", per_class, names)
        order = np.argsort(labels)  # files are read class by class
        made["bin", part], made["files", part] = (images, labels), (images[order], labels[order])
        for i, (image, label) in enumerate(zip(*made["files", part], strict=True)):
            folder = raw / "files" / part / cifar10.INFO.class_names[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i:04}.png")
    return made


@pytest.mark.parametrize("form", ["bin", "files"])
def test_clean_images_are_equal_in_all_forms_and_all_domains_are_made(tmp_path, form):
    made = write_cifar10(tmp_path)
    for part, (images, labels, _) in cifar10.read_clean(tmp_path / form).items():
        assert (images == made[form, part][0]).all() and (labels == made[form, part][1]).all()
    pieces = cifar10.find(tmp_path / form).pieces
    assert collections.Counter(piece.split for piece in pieces) == {"train": 56, "val": 17, "test": 22}
    (fog,) = [p.read() for p in pieces if (p.domain, p.split) == ("fog 3", "test")]
    assert np.bincount(fog.labels).tolist() == [12] * 10  # all test images, under each corruption
