"""What may be wrong with a user's raw files and split files: each costs one short line, the one that stands here."""

import io
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from cxda_jax.data.raw import read_pieces
from cxda_jax.experiment import READERS
from cxda_jax.types import UserError
from tests import raw_fixtures as raws
from tests.lines import (
    HTML,
    at_the_root,  # noqa: F401
    cut,
    edit_json,
    folder_in_place_of,
    is_as,
    npy,
    one_line,
    parametrised,
    set_to,
)

# Raw files: benchmark, what is done to good ones, line


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

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


W = "f0074_00"
FOG, SNOW, LABELS = "CIFAR-10-C/fog.npy", "CIFAR-10-C-new/train/snow_labels.npy", "CIFAR-10-C/labels.npy"
TINY = f"Tiny-ImageNet-C/fog/3/{raws.WNIDS[0]}/a.JPEG"
WILD = "iwildcam_v2.0"
MINE = "site 1/kind0/00.png"


def lines_of(name, change):
    def spoil(raw):
        path = raw / WILD / name
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return spoil


RAW = [
    ("femnist", "users is a number", leaf("users", to=5), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (no list 'users'); make it again"),
    ("femnist", "users is an object", leaf("users", to={"a": 1}), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (users and num_samples are not lists of one length); make it again"),
    ("femnist", "users of numbers", leaf("users", to=[1, 2, 3]), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (users and user_data differ); make it again"),
    ("femnist", "counts in words", leaf("num_samples", to=["45", "45", "45"]), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (num_samples are not whole numbers); make it again"),
    ("femnist", "one count too few", leaf("num_samples", to=[45, 45]), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (users and num_samples are not lists of one length); make it again"),
    ("femnist", "user_data is a list", leaf("user_data", to=[]), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not a LEAF file of users, num_samples and user_data (users and user_data differ); make it again"),
    ("femnist", "writer is a list", leaf("user_data", W, to=[1, 2]), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (list indices must be integers or slices, not str); fetch or make it again"),
    ("femnist", "writer without y", leaf("user_data", W, to={"x": []}), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (no 'y'); fetch or make it again"),
    ("femnist", "x of objects", leaf("user_data", W, "x", to={"a": 1}), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (float() argument must be a string or a real number, not 'dict'); fetch or make it again"),
    ("femnist", "x of words", leaf("user_data", W, "x", 0, to=["white"] * 784), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (could not convert string to float: 'white'); fetch or make it again"),
    ("femnist", "x has nan", leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: pixels in nan..nan, expected 0..1; fetch or make it again"),
    ("femnist", "y of fractions", leaf("user_data", W, "y", 0, to=1.5), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: labels are not integers in 0..61; fetch or make it again"),
    ("femnist", "y negative", leaf("user_data", W, "y", 0, to=-1), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: labels are not integers in 0..61; fetch or make it again"),
    ("femnist", "not JSON inside", lambda r: first_json(r).write_text(first_json(r).read_text().replace('"y": [', '"y": [oh ', 1)), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (...); fetch or make it again"),
    ("femnist", "deep", lambda r: first_json(r).write_text(first_json(r).read_text().replace('"y": [', '"y": [' + "[" * 9999 + "]" * 9999 + ", ", 1)), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00: not readable (nested too deeply); fetch or make it again"),
    ("femnist", "a folder for a file", lambda r: folder_in_place_of(first_json(r)), "{tmp}/raw/femnist/train/all_data_0_niid_1_keep_100_train_9.json: not readable (Is a directory); fetch or extract it again"),
    ("femnist", "raw_dir is a file", lambda r: (shutil.rmtree(r), r.write_text("")), "raw_dir={tmp}/raw: no such folder; give the one that holds femnist/"),
    ("cifar_c", "fog is a folder", lambda r: folder_in_place_of(r / FOG), "{tmp}/raw/CIFAR-10-C/fog.npy: not readable (Is a directory); fetch or extract it again"),
    ("cifar_c", "fog is a npz", put(FOG, b"PK\x03\x04" + b"\0" * 100), "{tmp}/raw/CIFAR-10-C/fog.npy: cut short or not a .npy file (the magic string is not correct; expected b'\\x93NUMPY...ot b'PK\\x03\\x04\\x00\\x00'); fetch it again"),
    ("cifar_c", "fog of another size", put(FOG, npy(np.zeros((5, 64, 64, 3), np.uint8))), "{tmp}/raw/CIFAR-10-C/fog.npy: holds uint8 (5, 64, 64, 3), expected uint8 (n, 32, 32, 3); fetch it again"),
    ("cifar_c", "fog of uint16", put(FOG, npy(np.zeros((5, 32, 32, 3), np.uint16))), "{tmp}/raw/CIFAR-10-C/fog.npy: holds uint16 (5, 32, 32, 3), expected uint8 (n, 32, 32, 3); fetch it again"),
    ("cifar_c", "fog channels first", put(FOG, npy(np.zeros((5, 3, 32, 32), np.uint8))), "{tmp}/raw/CIFAR-10-C/fog.npy: holds uint8 (5, 3, 32, 32), expected uint8 (n, 32, 32, 3); fetch it again"),
    ("cifar_c", "fog of nothing", put(FOG, npy(np.zeros((0, 32, 32, 3), np.uint8))), "{tmp}/raw/CIFAR-10-C/fog.npy: holds uint8 (0, 32, 32, 3), expected uint8 (n, 32, 32, 3); fetch it again"),
    ("cifar_c", "fog promises more", put(FOG, npy_header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (10**9, 32, 32, 3), }\n".replace(b"10**9", b"1000000000"))), "{tmp}/raw/CIFAR-10-C/fog.npy: cut short or not a .npy file (mmap length is greater than file size); fetch it again"),
    ("cifar_c", "fog with a senseless header", put(FOG, npy_header(b"{'descr': '|u1'" + b" " * 200 + b"\n")), "{tmp}/raw/CIFAR-10-C/fog.npy: cut short or not a .npy file (...); fetch it again"),
    ("cifar_c", "labels of fractions", put(SNOW, npy(np.full(225, 1.5))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: a label is 1.5, expected whole numbers in 0..9; fetch or make it again"),
    ("cifar_c", "labels are one number", put(SNOW, npy(np.uint8(3))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: holds uint8 (), expected whole numbers (n,) or (n, 1); fetch it again"),
    ("cifar_c", "labels in two columns", put(SNOW, npy(np.zeros((225, 2), int))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: holds int64 (225, 2), expected whole numbers (n,) or (n, 1); fetch it again"),
    ("cifar_c", "labels of nan", put(SNOW, npy(np.full(225, np.nan))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: a label is nan, expected whole numbers in 0..9; fetch or make it again"),
    ("cifar_c", "labels negative", put(SNOW, npy(np.full(225, -1))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: a label is -1, expected whole numbers in 0..9; fetch or make it again"),
    ("cifar_c", "labels too few", put(SNOW, npy(np.zeros(45, int))), "{tmp}/raw/CIFAR-10-C-new/train/snow_labels.npy: 45 labels for the 225 images of snow.npy; one of the two is not whole, fetch both again"),
    ("cifar_c", "labels objects", put(LABELS, npy(np.array([{}], object), allow_pickle=True)), "{tmp}/raw/CIFAR-10-C/labels.npy: holds Python objects, not numbers; refused, since loading could run code"),
    ("cifar_c", "labels HTML", put(LABELS, HTML), "{tmp}/raw/CIFAR-10-C/labels.npy: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("tiny_imagenet_c", "empty image", put(TINY, b""), "{tmp}/raw/Tiny-ImageNet-C/fog/3/n01443537/a.JPEG: not readable as an image (of no known format); fetch or extract it again"),
    ("tiny_imagenet_c", "cut image", put(TINY, lambda: picture(64, "JPEG")()[:-900]), "{tmp}/raw/Tiny-ImageNet-C/fog/3/n01443537/a.JPEG: not readable as an image (...); fetch or extract it again"),
    ("tiny_imagenet_c", "image of one pixel", put(TINY, picture(1, "JPEG")), "{tmp}/raw/Tiny-ImageNet-C/fog/3/n01443537/a.JPEG: 1x1 pixels, expected 64x64; fetch it again"),
    ("tiny_imagenet_c", "text for an image", put(TINY, b"see the other folder"), "{tmp}/raw/Tiny-ImageNet-C/fog/3/n01443537/a.JPEG: not readable as an image (of no known format); fetch or extract it again"),
    ("tiny_imagenet_c", "no classes", lambda r: [shutil.rmtree(p) for p in r.glob("*/**/n0*")] + [shutil.rmtree(p) for p in r.glob("*/**/n1*")], "{tmp}/raw/Tiny-ImageNet-C: no class folders (n and digits) anywhere in it; extract the download again"),
    ("tiny_imagenet_c", "a file for a corruption", lambda r: (shutil.rmtree(r / "Tiny-ImageNet-C/fog"), put("Tiny-ImageNet-C/fog", b"")(r)), "{tmp}/raw/Tiny-ImageNet-C/fog/1: no such folder; extract the download again"),
    ("iwildcam", "metadata empty", put(f"{WILD}/metadata.csv", b""), "{tmp}/raw/iwildcam_v2.0/metadata.csv: no column 'split'; is it WILDS version 2.0? fetch it again"),
    ("iwildcam", "metadata HTML", put(f"{WILD}/metadata.csv", HTML), "{tmp}/raw/iwildcam_v2.0/metadata.csv: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("iwildcam", "metadata has a header alone", lines_of("metadata.csv", lambda t: t[:1]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: no lines; fetch it again"),
    ("iwildcam", "metadata in another encoding", lambda r: (r / WILD / "metadata.csv").write_bytes((r / WILD / "metadata.csv").read_bytes() + "é".encode("latin-1")), "{tmp}/raw/iwildcam_v2.0/metadata.csv: not readable as CSV ('utf-8' codec can't decode byte 0xe9 in position 0: unexpected end of data); is it WILDS version 2.0? fetch it again"),
    ("iwildcam", "metadata cut", lines_of("metadata.csv", lambda t: [*t[:3], t[3][:12]]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: line 4 is not understood (split='id_test', location_remapped='8', y=None, filename=None); fetch it again"),
    ("iwildcam", "location in words", lines_of("metadata.csv", lambda t: [t[0], "0,test,north,1,0,s0,0,0,2013,a.jpg,a"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: line 2 is not understood (split='test', location_remapped='north', y='0', filename='a.jpg'); fetch it again"),
    ("iwildcam", "label of a fraction", lines_of("metadata.csv", lambda t: [t[0], "0,test,1,1,0,s0,0.5,0,2013,a.jpg,a"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: line 2 is not understood (split='test', location_remapped='1', y='0.5', filename='a.jpg'); fetch it again"),
    ("iwildcam", "file elsewhere", lines_of("metadata.csv", lambda t: [t[0], "0,test,1,1,0,s0,0,0,2013,../../a.jpg,a"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: line 2 is not understood (split='test', location_remapped='1', y='0', filename='../../a.jpg'); fetch it again"),
    ("iwildcam", "endless field", lines_of("metadata.csv", lambda t: [t[0], "0,test,1,1,0,s0,0,0,2013," + "a" * 140_000 + ",a"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: not readable as CSV (field larger than field limit (131072)); is it WILDS version 2.0? fetch it again"),
    ("iwildcam", "long line", lines_of("metadata.csv", lambda t: [t[0], "0,test,1,1,0,s0,x,0,2013," + "a" * 900 + ",a"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: line 2 is not understood (split='test', location_remapped='1', y='x', filename='aaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'); fetch it again"),
    ("iwildcam", "metadata is a folder", lambda r: folder_in_place_of(r / WILD / "metadata.csv"), "{tmp}/raw/iwildcam_v2.0/metadata.csv: not readable (Is a directory); fetch or extract it again"),
    ("iwildcam", "a location in two splits", lines_of("metadata.csv", lambda t: [t[0], "0,train,7,1,0,s0,0,0,2013,a.jpg,a", "0,test,7,1,0,s0,0,0,2013,b.jpg,b"]), "{tmp}/raw/iwildcam_v2.0/metadata.csv: location 7 is in train and in test; fetch it again"),
    ("iwildcam", "categories without a name", lines_of("categories.csv", lambda t: [t[0].replace("name", "animal"), *t[1:]]), "{tmp}/raw/iwildcam_v2.0/categories.csv: no column 'name'; fetch it again"),
    ("iwildcam", "categories cut", lines_of("categories.csv", lambda t: [*t[:2], "3,30"]), "{tmp}/raw/iwildcam_v2.0/categories.csv: line 3 is not understood (y='3', name=None); fetch it again"),
    ("iwildcam", "categories of words", lines_of("categories.csv", lambda t: [t[0], "one,1,a"]), "{tmp}/raw/iwildcam_v2.0/categories.csv: line 2 is not understood (y='one', name='a'); fetch it again"),
    ("folder", "no classes between", lambda r: [shutil.copytree(r, r.parent / "flat"), shutil.rmtree(r), shutil.move(r.parent / "flat" / "site 1", r)], "{tmp}/raw: no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp; found 27 .png, 15 .bmp, 3 .db"),
    ("folder", "raw_dir is a file", lambda r: (shutil.rmtree(r), r.write_text("")), "raw_dir={tmp}/raw: no such folder; give the one that holds DOMAIN/CLASS/IMAGE"),
    ("folder", "HTML image", put(MINE, HTML), "{tmp}/raw/site 1/kind0/00.png: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("folder", "empty image", put(MINE, b""), "{tmp}/raw/site 1/kind0/00.png: not readable as an image (of no known format); fetch or extract it again"),
    ("folder", "cut JPEG", put("site 1/kind0/a.jpg", lambda: picture(40, "JPEG")()[:300]), "{tmp}/raw/site 1/kind0/a.jpg: not readable as an image (...); fetch or extract it again"),
    ("folder", "cut PNG", put(MINE, lambda: picture(40, "PNG")()[:60]), "{tmp}/raw/site 1/kind0/00.png: not readable as an image (...); fetch or extract it again"),
    ("folder", "cut GIF", put("site 1/kind0/a.gif", b"GIF89a\x01"), "{tmp}/raw/site 1/kind0/a.gif: not readable as an image (of no known format); fetch or extract it again"),
    ("folder", "cut TIFF", put("site 1/kind0/a.tif", lambda: picture(40, "TIFF")()[:900]), "{tmp}/raw/site 1/kind0/a.tif: not readable as an image (...); fetch or extract it again"),
    ("folder", "cut WebP", put("site 1/kind0/a.webp", lambda: picture(40, "WEBP")()[:90]), "{tmp}/raw/site 1/kind0/a.webp: not readable as an image (...); fetch or extract it again"),
    ("folder", "bomb", put(MINE, bomb), "{tmp}/raw/site 1/kind0/00.png: not readable as an image (too many pixels); fetch or extract it again"),
    ("folder", "a folder named as an image", lambda r: (r / "site 1/kind0/zoo.png").mkdir(), "{tmp}/raw/site 1/kind0/zoo.png: not readable (Is a directory); fetch or extract it again"),
    ("folder", "a link to nowhere", lambda r: (r / "site 1/kind0/zoo.png").symlink_to(r / "gone"), "{tmp}/raw/site 1/kind0/zoo.png: missing; extract the download again"),
]  # fmt: skip


WRITERS = {
    "femnist": raws.write_femnist, "cifar_c": raws.write_cifar_c, "tiny_imagenet_c": raws.write_tiny_imagenet_c,
    "iwildcam": raws.write_iwildcam, "folder": raws.write_folder,
}  # fmt: skip


@pytest.fixture(scope="session")
def good_raws(tmp_path_factory):
    """Good raw files of each benchmark, made once."""
    root = tmp_path_factory.mktemp("raws")
    for name, fill in WRITERS.items():
        fill(root / name)
    return root


@parametrised([(f"{benchmark} {name}",) for benchmark, name, *_ in RAW])
def test_raw_files(tmp_path, good_raws, number):
    benchmark, _, spoil, line = RAW[number]
    shutil.copytree(good_raws / benchmark, tmp_path / "raw")
    spoil(tmp_path / "raw")
    with pytest.raises(UserError) as error:
        for _ in read_pieces(READERS[benchmark](tmp_path / "raw").pieces, 2, lambda done: None):
            pass
    fault, *_ = one_line(error.value, tmp_path).partition("; or give skip_bad=1 (1 bad of ")
    assert is_as(fault, line)


REGENERATED = [
    ("cifar_c", "no clean images", lambda r: (r / "cifar-10-batches-bin/data_batch_3.bin").unlink(), "{tmp}/raw/cifar-10-batches-bin/data_batch_3.bin: missing; extract cifar-10-binary.tar.gz again"),
    ("cifar_c", "cut clean images", lambda r: cut(r / "cifar-10-batches-bin/data_batch_3.bin", 100), "{tmp}/raw/cifar-10-batches-bin/data_batch_3.bin: 30630 bytes are not rows of a label and 3072 pixels; fetch it again"),
    ("cifar_c", "HTML for clean images", put("cifar-10-batches-bin/data_batch_1.bin", HTML), "{tmp}/raw/cifar-10-batches-bin/data_batch_1.bin: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("cifar_c", "a folder for clean images", lambda r: folder_in_place_of(r / "cifar-10-batches-bin/data_batch_1.bin"), "{tmp}/raw/cifar-10-batches-bin/data_batch_1.bin: not readable (Is a directory); fetch or extract it again"),
    ("cifar_c", "too few clean images", lambda r: [cut(p, 3073) for p in r.glob("cifar-10-batches-bin/*.bin")], "regenerate: 4 clean images of class 1, at least 5 are needed; extract them again"),
]  # fmt: skip


@parametrised([(f"{benchmark} {name}",) for benchmark, name, *_ in REGENERATED])
def test_raw_files_to_regenerate_from(tmp_path, number):
    benchmark, _, spoil, line = REGENERATED[number]
    raws.write_cifar_binary(tmp_path / "raw", per_class=1)
    spoil(tmp_path / "raw")
    with pytest.raises(UserError) as error:
        READERS[benchmark](tmp_path / "raw", regenerate=True)
    assert is_as(one_line(error.value, tmp_path), line)


SPLIT_FILES = [
    ("a folder", None, "{tmp}/split.csv: not readable (Is a directory); fetch or extract it again"),
    ("HTML", HTML, "{tmp}/split.csv: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("empty", b"", "{tmp}/split.csv: no column 'domain'; give a CSV file with the columns domain and split, in UTF-8"),
    ("another encoding", "domain,split\nsite 1,val\nforêt,val\n".encode("latin-1"), "{tmp}/split.csv: not readable as CSV ('utf-8' codec can't decode byte 0xea in position 27: invalid continuation byte); give a CSV file with the columns domain and split, in UTF-8"),
    ("a table of numbers", b"\x89PNG\r\n\x1a\n\0\0", "{tmp}/split.csv: not readable as CSV ('utf-8' codec can't decode byte 0x89 in position 0: invalid start byte); give a CSV file with the columns domain and split, in UTF-8"),
    ("semicolons", b"domain;split\nsite 1;val\n", "{tmp}/split.csv: no column 'domain'; give a CSV file with the columns domain and split, in UTF-8"),
    ("no split", b"domain,split\nsite 1\n", "{tmp}/split.csv: line 2: expected a domain and one of train, val, test, got 'site 1', None"),
    ("a long name", b"domain,split\n" + b"x" * 500 + b",dev\n", "{tmp}/split.csv: line 2: expected a domain and one of train, val, test, got 'xxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxx', 'dev'"),
    ("an unknown long name", b"domain,split\n" + b"x" * 500 + b",val\n", "{tmp}/split.csv: line 2: {raws}/folder/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxx holds no images; remove the line"),
    ("an endless field", b"domain,split\n" + b"x" * 140_000 + b",val\n", "{tmp}/split.csv: not readable as CSV (field larger than field limit (131072)); give a CSV file with the columns domain and split, in UTF-8"),
]  # fmt: skip


@parametrised(SPLIT_FILES)
def test_split_files(tmp_path, good_raws, number):
    _, data, line = SPLIT_FILES[number]
    path = tmp_path / "split.csv"
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises(UserError) as error:
        READERS["folder"](good_raws / "folder", split_csv=str(path))
    assert is_as(one_line(str(error.value).replace(str(good_raws), "{raws}"), tmp_path), line)


def test_a_split_file_of_a_spreadsheet(good_raws, tmp_path):
    """Excel begins its UTF-8 with a mark."""
    (tmp_path / "split.csv").write_text("domain,split\r\nsite 1,val\r\n", encoding="utf-8-sig")
    pieces = READERS["folder"](good_raws / "folder", split_csv=str(tmp_path / "split.csv")).pieces
    assert {(p.domain, p.split) for p in pieces} == {("site 1", "val")}
