"""Faults of raw files, split files and the command line: each costs one short line that names the file and the fix."""

import io
import re
import shutil
import struct

import numpy as np
import pytest
from PIL import Image

from cxda_jax.data.readers.raw import read_pieces
from cxda_jax.errors import UserError
from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command
from tests.lines import HTML, at_the_root, cut, edit_json, folder_in_place_of, npy, one_line, set_to  # noqa: F401
from tests.raw_fixtures import WRITERS


def first_json(raw):
    return sorted((raw / "femnist" / "train").glob("all*.json"))[0]


def leaf(*places, to):
    return lambda raw: edit_json(first_json(raw), set_to(*places, to=to))


def put(name, data):
    """Writes what does not belong there."""

    def spoil(raw):
        path = raw / name
        if path.is_file():
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data() if callable(data) else data)

    return spoil


def npy_header(text):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def picture(side, kind, **options):
    def data():
        buffer = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(buffer, kind, **options)
        return buffer.getvalue()

    return data


def bomb():
    """A PNG whose header promises 40000 x 40000 pixels."""
    return raws.png(40_000, 40_000, 8, 2, b"\0" * 1000)


def resaved(name, change):
    def spoil(raw):
        array = change(np.load(raw / name))
        np.save(raw / name, array, allow_pickle=array.dtype == object)

    return spoil


def gone(name):
    return lambda raw: shutil.rmtree(raw / name) if (raw / name).is_dir() else (raw / name).unlink()


def folder_at(name):
    return lambda raw: folder_in_place_of(raw / name)


def lines_of(name, change):
    def spoil(raw):
        path = raw / WILD / name
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return spoil


def replaced(old, new, name="metadata.csv"):
    return lines_of(name, lambda lines: "\n".join(lines).replace(old, new, 1).splitlines())


def row(*fields):
    """metadata.csv with one line."""
    return lines_of("metadata.csv", lambda lines: [lines[0], *fields])


def splits(*lines):
    return put("split.csv", b"\n".join([b"domain,split", *lines]) + b"\n")


W, JSON = "f0074_00", "all_data_0_niid_1_keep_100_train_9.json"
OFFICIAL, NEW = "CIFAR-10-C", "CIFAR-10-C-new"
FOG, SNOW, LABELS = f"{OFFICIAL}/fog.npy", f"{NEW}/train/snow_labels.npy", f"{OFFICIAL}/labels.npy"
TINY = f"Tiny-ImageNet-C/fog/3/{raws.WNIDS[0]}/a.JPEG"
WILD, META, NAMES = "iwildcam_v2.0", "iwildcam_v2.0/metadata.csv", "iwildcam_v2.0/categories.csv"
MINE, CLEAN = "site 1/kind0/00.png", "cifar-10-batches-bin/data_batch_1.bin"
PAGE, FOLDER = r"a web page \(HTML\).* fetch it again", r"not readable \(Is a directory\); fetch or extract it again"
UNREADABLE, MISSING = r"not readable as an image \(.*; fetch or extract it again", "missing; extract the download again"
NOT_NPY, NO_FOLDER = r"cut short or not a .npy file \(.*; fetch it again", "no such folder; extract the download again"
UNKNOWN = r"not readable as an image \(of no known format\)"
SPLIT, FIX = "{tmp}/raw/split.csv:", "; give a CSV file with the columns domain and split"
EXPECTED = "expected a domain and one of train, val, test, got"
RAW = {  # benchmark: what is wrong, how good files are spoilt, the file and what is said of it
    "femnist": [
        ("no folder", gone("femnist"), "/femnist: no such folder; .* holds femnist/"),
        ("web page for an archive", lambda r: (gone("femnist")(r), put("femnist.zip", HTML)(r)), f"/femnist.zip: {PAGE}"),
        ("no files", lambda r: [p.unlink() for p in (r / "femnist/test").glob("all*.json")], "/test: no .json files; FEMNIST is read from"),
        ("web page", lambda r: first_json(r).write_bytes(HTML), f"{JSON}: {PAGE}"),
        ("empty", lambda r: first_json(r).write_bytes(b""), f"{JSON}: not a LEAF file .*empty file.*; fetch or make it again"),
        ("cut", lambda r: cut(first_json(r), 2000), f"{JSON}: not a LEAF file .*cut short.*; fetch or make it again"),
        ("a list", lambda r: first_json(r).write_bytes(b'[{"a": 1}]'), f"{JSON}: not a LEAF file of users, .*; fetch or make it again"),
        ("users is a number", leaf("users", to=5), f"{JSON}: not a LEAF file .*no list 'users'.*; fetch or make it again"),
        ("users is an object", leaf("users", to={"a": 1}), "users and num_samples are not lists of one length"),
        ("users of numbers", leaf("users", to=[1, 2, 3]), "users and user_data differ"),
        ("counts in words", leaf("num_samples", to=["45", "45", "45"]), "num_samples are not whole numbers"),
        ("one count too few", leaf("num_samples", to=[45, 45]), "users and num_samples are not lists of one length"),
        ("user_data is a list", leaf("user_data", to=[]), "users and user_data differ"),
        ("writer twice", lambda r: shutil.copy(first_json(r), first_json(r).with_name("z.json")), f"z.json: writer {W} is also in train/{JSON}; .* keep one"),
        ("writer in train and test", lambda r: shutil.copy(first_json(r), r / "femnist/test"), f"/test/{JSON}: writer {W} is also in train/{JSON}; .* keep one"),
        ("writer in train and val", lambda r: shutil.copy(first_json(r), r / "femnist/val/a.json"), f"/val/a.json: writer {W} is also in train/{JSON}; .* keep one"),
        ("writer is a list", leaf("user_data", W, to=[1, 2]), f"{JSON}: writer {W}: not readable .*; fetch or make it again"),
        ("writer without y", leaf("user_data", W, to={"x": []}), rf"writer {W}: not readable \(no 'y'\); fetch or make"),
        ("x of objects", leaf("user_data", W, "x", to={"a": 1}), f"writer {W}: not readable .*; fetch or make"),
        ("x of words", leaf("user_data", W, "x", 0, to=["white"] * 784), f"writer {W}: not readable .*'white'.*; fetch or make"),
        ("x with a short row", leaf("user_data", W, "x", 3, to=[0.5] * 783), f"writer {W}: .*; fetch or make"),
        ("x with a row less", lambda r: edit_json(first_json(r), lambda c: c["user_data"][W]["x"].pop() and None), r"x \(44, 784\) .* expected \(45, 784\)"),
        ("x in 0..255", leaf("user_data", W, "x", 3, 0, to=255), "pixels in 0..255, expected 0..1; fetch or make"),
        ("x has nan", leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "pixels in nan..nan, expected 0..1; fetch or make"),
        *((f"y with {y}", leaf("user_data", W, "y", 0, to=y), f"writer {W}: labels are not integers in 0..61; fetch or make") for y in (62, 1.5, -1)),
        ("not JSON inside", lambda r: first_json(r).write_text(first_json(r).read_text().replace('"y": [', '"y": [oh ', 1)), f"writer {W}: not readable"),
        ("deep", lambda r: first_json(r).write_text(first_json(r).read_text().replace('"y": [', '"y": [' + "[" * 9999 + "]" * 9999 + ", ", 1)), "nested too deeply"),
        ("a folder for a file", lambda r: folder_in_place_of(first_json(r)), f"{JSON}: {FOLDER}"),
        ("raw_dir is a file", lambda r: (shutil.rmtree(r), r.write_text("")), "raw_dir={tmp}/raw: no such folder; give the one that holds femnist/"),
    ],
    "cifar_c": [
        ("no new folder", gone(NEW), f"/{NEW}: no such folder; .* holds {NEW}/"),
        ("no val", gone(f"{NEW}/val"), f"/{NEW}/val: no such folder; CIFAR-C is read from"),
        ("no fog", gone(FOG), f"/{FOG}: {MISSING}"),
        ("no labels", gone(f"{NEW}/val/saturate_labels.npy"), f"/val/saturate_labels.npy: {MISSING}"),
        ("fog is a web page", put(FOG, HTML), f"/{FOG}: {PAGE}"),
        ("fog is a folder", folder_at(FOG), f"/{FOG}: {FOLDER}"),
        ("fog is cut", lambda r: cut(r / FOG, 9), f"/{FOG}: {NOT_NPY}"),
        ("fog is empty", put(FOG, b""), f"/{FOG}: {NOT_NPY}"),
        ("fog is a mark", put(FOG, b"\x93NUMPY"), f"/{FOG}: {NOT_NPY}"),
        ("fog is a npz", put(FOG, b"PK\x03\x04" + b"\0" * 100), f"/{FOG}: {NOT_NPY}"),
        ("fog promises more", put(FOG, npy_header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000, 32, 32, 3), }\n")), f"/{FOG}: {NOT_NPY}"),
        ("fog with a senseless header", put(FOG, npy_header(b"{'descr': '|u1'" + b" " * 200 + b"\n")), f"/{FOG}: {NOT_NPY}"),
        ("fog of objects", resaved(FOG, lambda a: a.astype(object)), f"/{FOG}: holds Python objects, .*refused"),
        ("fog of floats", resaved(FOG, lambda a: a.astype(np.float32)), r"holds float32 .* expected uint8 \(n, 32, 32, 3\); fetch"),
        *((f"fog of {kind} {shape}", put(FOG, npy(np.zeros(shape, kind))), rf"holds {kind} {re.escape(str(shape))}, expected uint8 \(n, 32, 32, 3\); fetch")
          for kind, shape in [("uint8", (5, 64, 64, 3)), ("uint16", (5, 32, 32, 3)), ("uint8", (5, 3, 32, 32)), ("uint8", (0, 32, 32, 3))]),
        ("fog lacks one", resaved(FOG, lambda a: a[:-1]), f"/{FOG}: 24 images, expected five equal blocks, .*; fetch it again"),
        ("labels differ between blocks", resaved(LABELS, lambda a: a + np.eye(25, dtype=np.uint8)[0]), f"/{LABELS}: .* not one list five times over; fetch"),
        ("labels too few", put(SNOW, npy(np.zeros(5, int))), f"/{SNOW}: 5 labels for the 25 images of snow.npy; .* fetch both again"),
        *((f"labels of {v}", put(SNOW, npy(np.full(25, v))), f"/{SNOW}: a label is {v}, expected whole numbers in 0..9; fetch") for v in (1.5, np.nan, -1, 10)),
        *((f"labels of shape {a.shape}", put(SNOW, npy(a)), rf"holds .* {re.escape(str(a.shape))}, expected whole numbers \(n,\) or \(n, 1\); fetch")
          for a in (np.array(3), np.zeros((25, 2), int))),
    ],
    "regenerated": [
        ("no clean images", gone(CLEAN), f"/{CLEAN}: {MISSING}"),
        ("clean images cut", lambda r: cut(r / CLEAN, 100), f"/{CLEAN}: 30630 bytes are not rows of a label .*; fetch it again"),
        ("web page", put(CLEAN, HTML), f"/{CLEAN}: {PAGE}"),
        ("a folder for a file", folder_at(CLEAN), f"/{CLEAN}: {FOLDER}"),
        ("too few", lambda r: [cut(p, 3073) for p in r.glob("cifar-10-batches-bin/*.bin")], "regenerate: 4 clean images of class 1, at least 5 are needed; extract"),
    ],
    "tiny_imagenet_c": [
        ("no fog", gone("Tiny-ImageNet-C/fog"), f"/fog/1: {NO_FOLDER}"),
        ("fog is a file", lambda r: (gone("Tiny-ImageNet-C/fog")(r), put("Tiny-ImageNet-C/fog", b"")(r)), f"/fog/1: {NO_FOLDER}"),
        ("a class less", gone(f"Tiny-ImageNet-C-new/train/frost/2/{raws.WNIDS[1]}"), r"/train/frost/2: class folder n01629819 is missing \(3 of 4\); .* extract"),
        ("a class more", put("Tiny-ImageNet-C-new/val/saturate/3/n99999999/a.JPEG", b"x"), r"/val/saturate/3: class folder n99999999 is not in the others \(5 of 4\); .* extract"),
        ("no classes", lambda r: [shutil.rmtree(p) for kind in "01" for p in r.glob(f"*/**/n{kind}*")], "/Tiny-ImageNet-C: no class folders .*; extract"),
        ("no images", lambda r: [p.unlink() for p in (r / TINY).parent.iterdir()], "/fog/3/n01443537: no images; extract"),
        ("web page", put(TINY, HTML), f"/{TINY}: {PAGE}"),
        ("another size", put(TINY, picture(32, "JPEG")), f"/{TINY}: 32x32 pixels, expected 64x64; fetch it again"),
        ("empty image", put(TINY, b""), f"/{TINY}: {UNKNOWN}"),
        ("cut image", put(TINY, lambda: picture(64, "JPEG")()[:-900]), f"/{TINY}: {UNREADABLE}"),
        ("text", put(TINY, b"see the other folder"), f"/{TINY}: {UNKNOWN}"),
    ],
    "iwildcam": [
        ("no metadata", gone(META), f"/{META}: {MISSING}"),
        ("metadata is a folder", folder_at(META), f"/{META}: {FOLDER}"),
        ("metadata is a web page", put(META, HTML), f"/{META}: {PAGE}"),
        ("metadata is empty", put(META, b""), f"/{META}: no column 'split'; is it WILDS version 2.0"),
        ("another column", replaced("location_remapped", "place"), "no column 'location_remapped'; is it WILDS version 2.0"),
        ("a header alone", row(), f"/{META}: no lines; fetch it again"),
        ("another encoding", lambda r: (r / META).write_bytes((r / META).read_bytes() + "é".encode("latin-1")), "not readable as CSV .*; is it WILDS"),
        ("cut line", lines_of("metadata.csv", lambda t: [*t[:3], t[3][:12]]), "line 4 is not understood .*y=None, filename=None.*; fetch"),
        ("another split", replaced("0,id_test,", "0,id_toast,"), r"line 2 is not understood \(split='id_toast'"),
        ("location in words", row("0,test,north,1,0,s0,0,0,2013,a.jpg,a"), "line 2 is not understood .*location_remapped='north'"),
        ("label of a fraction", row("0,test,1,1,0,s0,0.5,0,2013,a.jpg,a"), "line 2 is not understood .*y='0.5'"),
        ("file elsewhere", row("0,test,1,1,0,s0,0,0,2013,../../a.jpg,a"), "line 2 is not understood .*filename='../../a.jpg'"),
        ("endless field", row("0,test,1,1,0,s0,0,0,2013," + "a" * 140_000 + ",a"), "not readable as CSV .*field larger"),
        ("long line", row("0,test,1,1,0,s0,x,0,2013," + "a" * 900 + ",a"), r"line 2 is not understood .*a\.\.\.a.*; fetch it again"),
        ("labels with gaps", replaced(",1,0,2013", ",9,0,2013"), "labels y are not 0..5 without gaps; fetch it again"),
        ("a location in two splits", row("0,train,7,1,0,s0,0,0,2013,a.jpg,a", "0,test,7,1,0,s0,0,0,2013,b.jpg,b"), "location 7 is in train and in test; fetch"),
        ("no categories", gone(NAMES), f"/{NAMES}: {MISSING}"),
        ("a category less", replaced("4,40,animal 4\n", "", "categories.csv"), "no category with y=4, .*; fetch it again"),
        ("categories without a name", replaced("name", "animal", "categories.csv"), f"/{NAMES}: no column 'name'; fetch it again"),
        ("categories cut", lines_of("categories.csv", lambda t: [*t[:2], "3,30"]), r"line 3 is not understood \(y='3', name=None\); fetch"),
        ("categories of words", lines_of("categories.csv", lambda t: [t[0], "one,1,a"]), r"line 2 is not understood \(y='one', name='a'\); fetch"),
        ("no images", lambda r: [p.unlink() for p in (r / WILD / "train").iterdir()], f".jpg: {MISSING}"),
        ("cut images", lambda r: [p.write_bytes(p.read_bytes()[:300]) for p in (r / WILD / "train").iterdir()], f".jpg: {UNREADABLE}"),
    ],
    "folder": [
        ("nothing", shutil.rmtree, "raw_dir={tmp}/raw: no such folder; give the one that holds DOMAIN/CLASS/IMAGE"),
        ("raw_dir is a file", lambda r: (shutil.rmtree(r), r.write_text("")), "raw_dir={tmp}/raw: no such folder; give the one"),
        ("an empty folder", lambda r: [shutil.rmtree(p) for p in r.iterdir()], "/raw: no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, "),
        ("no classes between", lambda r: [shutil.copytree(r, r.parent / "flat"), shutil.rmtree(r), shutil.move(r.parent / "flat" / "site 1", r)], "/raw: no images; .*; found 27 .png, 15 .bmp, 3 .db"),
        ("small domains", lambda r: [shutil.rmtree(p) for p in r.iterdir() if p.name != "site 0"], "no domain has 40 images; add images or lower min_images"),
        ("web page", put(MINE, HTML), f"/{MINE}: {PAGE}"),
        ("empty image", put(MINE, b""), f"/{MINE}: {UNKNOWN}"),
        ("bomb", put(MINE, bomb), rf"/{MINE}: not readable as an image \(too many pixels\)"),
        *((f"cut {kind}", put(f"site 1/kind0/a.{kind}", lambda kind=kind, size=size: picture(40, kind)()[:size]), f"/a.{kind}: {UNREADABLE}")
          for kind, size in [("JPEG", 300), ("PNG", 60), ("GIF", 7), ("TIFF", 900), ("WEBP", 90)]),
        ("a folder named as an image", lambda r: (r / "site 1/kind0/zoo.png").mkdir(), f"/zoo.png: {FOLDER}"),
        ("a link to nowhere", lambda r: (r / "site 1/kind0/zoo.png").symlink_to(r / "gone"), f"/zoo.png: {MISSING}"),
    ],
    "split_csv": [
        ("missing", lambda r: None, f"split_csv={{tmp}}/raw/split.csv: No such file or directory{FIX}"),
        ("empty", put("split.csv", b""), f"{SPLIT} no column 'domain'{FIX}"),
        ("semicolons", put("split.csv", b"domain;split\nsite 1;val\n"), f"{SPLIT} no column 'domain'{FIX}"),
        ("a picture", put("split.csv", b"\x89PNG\r\n\x1a\n\0\0"), f"{SPLIT} not readable as CSV .*{FIX}"),
        ("no lines", splits(), f"{SPLIT} no lines{FIX}"),
        ("another split", splits(b"site 1,dev"), f"{SPLIT} line 2: {EXPECTED} 'site 1', 'dev'"),
        ("no split", splits(b"site 1"), f"{SPLIT} line 2: {EXPECTED} 'site 1', None"),
        ("a long name", splits(b"x" * 500 + b",dev"), rf"{SPLIT} line 2: {EXPECTED} 'x+\.\.\.x+', 'dev'"),
        ("unknown", splits(b"site 99,val"), f"{SPLIT} line 2: .*site 99 holds no images; remove the line"),
        ("an unknown long name", splits(b"x" * 500 + b",val"), rf"{SPLIT} line 2: .*x\.\.\.x+ holds no images; remove the line"),
        ("two splits", splits(b"site 1,val", b"site 1,test"), f"{SPLIT} line 3: 'site 1' is already in 'val'; remove a line"),
    ],
}  # fmt: skip
FIND = READERS | {
    "regenerated": lambda raw: READERS["cifar_c"](raw, regenerate=True),
    "split_csv": lambda raw: READERS["folder"](raw, split_csv=f"{raw}/split.csv"),
}
FILL = WRITERS | {
    "cifar_c": lambda raw: raws.write_cifar_c(raw, size=5),
    "tiny_imagenet_c": lambda raw: raws.write_tiny_imagenet_c(raw, per_class=1),
    "regenerated": lambda raw: raws.write_cifar_binary(raw, per_class=1),
    "split_csv": raws.write_folder,
}
CASES = [pytest.param(name, *case[1:], id=f"{name} {case[0]}") for name, cases in RAW.items() for case in cases]


@pytest.fixture(scope="session")
def good_raws(tmp_path_factory):
    """Good raw files of each benchmark, made once."""
    root = tmp_path_factory.mktemp("raws")
    for name, fill in FILL.items():
        fill(root / name)
    return root


def line_of(work, tmp_path, message):
    """The line of the UserError that work() raises, which matches `message`."""
    with pytest.raises(UserError) as error:
        work()
    fault, *_ = str(error.value).partition("; or give skip_bad=1 (1 bad of ")
    line = one_line(fault, tmp_path)
    assert re.search(message, line), line
    return line


@pytest.mark.parametrize("benchmark, spoil, message", CASES)
def test_raw_files(tmp_path, good_raws, benchmark, spoil, message):
    shutil.copytree(good_raws / benchmark, tmp_path / "raw")
    spoil(tmp_path / "raw")

    def read():
        raw = preparing.unpacked(lambda: FIND[benchmark](tmp_path / "raw"))
        return list(read_pieces(raw.pieces, 2, lambda done: None))

    assert re.search("{tmp}/raw|^regenerate: ", line_of(read, tmp_path, message))


@pytest.mark.parametrize("benchmark", WRITERS)
def test_the_command_prints_the_line_and_leaves_nothing(tmp_path, good_raws, benchmark):
    shutil.copytree(good_raws / benchmark, tmp_path / "raw")
    _, spoil, message = next(case for case in RAW[benchmark] if case[0].endswith("web page") or case[0] == "no images")
    spoil(tmp_path / "raw")
    arguments = (f"--benchmark={benchmark}", f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data")
    line = command("prepare", *arguments, code=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and re.search(message, line)
    assert {p.name for p in tmp_path.glob("data/*")} <= {f".{benchmark}.decoded"}


@pytest.mark.parametrize("benchmark", sorted(WRITERS))
def test_no_reader_may_give_a_domain_to_two_splits(tmp_path, good_raws, benchmark):
    raw, read = READERS[benchmark](good_raws / benchmark), []
    pieces = [piece._replace(read=lambda: read.append(1)) for piece in raw.pieces]
    first, other = pieces[0], next(piece for piece in pieces if piece.split != pieces[0].split)
    raw = raw._replace(pieces=[*pieces, first._replace(split=other.split)])
    message = f"domain {first.domain!r} is in {first.split} and in {other.split}; "
    line_of(lambda: preparing.prepare(raw, tmp_path / "store", 1), tmp_path, message)
    assert not read and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, message", [
    (("--benchmark=femnits",), "--benchmark='femnits' is unknown; did you mean 'femnist'"),
    (("--benchmark=femnist", "--tfds"), "--tfds: femnist has no such option; see --help"),
    (("--benchmark=femnist", "--skip_bad=1"), "--skip_bad: femnist has no such option; see --help"),
    (("--benchmark=femnist", "--skip_bad=-1"), "flag --skip_bad=-1"),
    (("--benchmark=folder", "--fit=stretch"), "flag --fit=stretch"),
    (("--benchmark=femnist", "--strict"), "--strict: train domains: 6, but the paper's 262; fetch the files again"),
    (("--benchmark=femnist", "--size=4"), "flag --size=4"),
])  # fmt: skip
def test_faults_of_the_command_line(tmp_path, good_raws, arguments, message):
    line = command("prepare", *arguments, f"--raw_dir={good_raws}/femnist", f"--data_dir={tmp_path}/data", code=2)
    assert message in line and line.count("\n") == 1 and not (tmp_path / "data").exists()
