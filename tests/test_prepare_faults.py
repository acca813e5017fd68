"""Raw files and commands that launch.prepare cannot read: each fault is one line, and leaves nothing behind."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from cxda_jax.experiment import READERS
from cxda_jax.types import UserError
from launch import prepare
from tests import raw_fixtures as raws
from tests.lines import HTML
from tests.raw_fixtures import WRITERS, command


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_json(raw):
    return sorted((raw / "femnist" / "train").glob("all*.json"))[0]


def resave(path, change):
    array = change(np.load(path))
    np.save(path, array, allow_pickle=array.dtype == object)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def replace_in(path, old, new):
    path.write_text(path.read_text().replace(old, new, 1))


OFFICIAL, NEW = "CIFAR-10-C", "CIFAR-10-C-new"
WILD = "iwildcam_v2.0"
FAULTS = [
    ("femnist", lambda r: shutil.rmtree(r / "femnist"), "/femnist: no such folder; --raw_dir is the folder that holds femnist/"),
    ("femnist", lambda r: (shutil.rmtree(r / "femnist"), write(r / "femnist.zip", HTML)),
     "/femnist.zip: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("femnist", lambda r: (shutil.rmtree(r / "femnist"), write(r / "femnist.zip", b"PK")),
     "/femnist.zip: damaged, cut short or not an archive ("),
    ("femnist", lambda r: [p.unlink() for p in (r / "femnist" / "test").glob("all*.json")],
     "/femnist/test: no .json files; FEMNIST is read from femnist/train, femnist/val and femnist/test"),
    ("femnist", lambda r: write(first_json(r), HTML), "train_9.json: a web page (HTML), not the data"),
    ("femnist", lambda r: write(first_json(r), b""), "train_9.json: empty; fetch or make it again"),
    ("femnist", lambda r: write(first_json(r), first_json(r).read_bytes()[:-2000]),
     "train_9.json: cut short (ends inside a JSON value); fetch or make it again"),
    ("femnist", lambda r: write(first_json(r), b'[{"a": 1}]'), "train_9.json: not a LEAF file of users, num_samples and user_data"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["users"].pop()), "train_9.json: not a LEAF file of users"),
    ("femnist", lambda r: shutil.copy(first_json(r), first_json(r).with_name("z.json")),
     "z.json: writer f0074_00 is also in all_data_0_niid_1_keep_100_train_9.json; keep one of them"),
    ("femnist", lambda r: shutil.copy(first_json(r), r / "femnist" / "test" / first_json(r).name),
     "/test/all_data_0_niid_1_keep_100_train_9.json: writer f0074_00 is also in train/all_data_0_niid_1_keep_100_train_9.json; splits share no writers, keep one of the files"),
    ("femnist", lambda r: shutil.copy(first_json(r), r / "femnist" / "val" / "copy.json"),
     "/val/copy.json: writer f0074_00 is also in train/all_data_0_niid_1_keep_100_train_9.json; splits share no writers"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["y"].__setitem__(0, 62)),
     "train_9.json: writer f0074_00: labels are not integers in 0..61; fetch or make it again"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"][3].pop()), "train_9.json: writer f0074_00: "),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"].pop()),
     "train_9.json: writer f0074_00: x (44, 784) and y (45,), expected (45, 784) and (45,); fetch or make it again"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"][3].__setitem__(0, 255)),
     "train_9.json: writer f0074_00: pixels in 0..255, expected 0..1; fetch or make it again"),
    ("cifar_c", lambda r: shutil.rmtree(r / NEW), "/CIFAR-10-C-new: no such folder; --raw_dir is the folder that holds CIFAR-10-C-new/"),
    ("cifar_c", lambda r: shutil.rmtree(r / NEW / "val"), "/CIFAR-10-C-new/val: no such folder; CIFAR-C is read from CIFAR-10-C and"),
    ("cifar_c", lambda r: (r / OFFICIAL / "fog.npy").unlink(), "/CIFAR-10-C/fog.npy: missing; extract the download again"),
    ("cifar_c", lambda r: (r / NEW / "val" / "saturate_labels.npy").unlink(), "/val/saturate_labels.npy: missing; extract"),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", HTML), "/CIFAR-10-C/fog.npy: a web page (HTML), not the data"),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", (r / OFFICIAL / "fog.npy").read_bytes()[:-9]),
     "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", b"\x93NUMPY"), "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", b""), "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a.astype(object)),
     "/CIFAR-10-C/fog.npy: holds Python objects, not numbers; refused, since loading could run code"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a.astype(np.float32)),
     "/CIFAR-10-C/fog.npy: holds float32 (225, 32, 32, 3), expected uint8 (n, 32, 32, 3)"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a[:-1]),
     "/CIFAR-10-C/fog.npy: 224 images, expected five equal blocks, by severity; fetch it again"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "labels.npy", lambda a: np.roll(a, 1)[np.r_[0:225]] + np.eye(225, dtype=np.uint8)[0]),
     "/CIFAR-10-C/labels.npy: 225 labels that are not one list five times over; fetch it again"),
    ("cifar_c", lambda r: resave(r / NEW / "train" / "snow_labels.npy", lambda a: a + 1),
     "/train/snow_labels.npy: a label is 10, expected whole numbers in 0..9; fetch or make it again"),
    ("tiny_imagenet_c", lambda r: shutil.rmtree(r / "Tiny-ImageNet-C" / "fog"), "/Tiny-ImageNet-C/fog/1: no such folder; extract the download again"),
    ("tiny_imagenet_c", lambda r: shutil.rmtree(r / "Tiny-ImageNet-C-new" / "train" / "frost" / "2" / raws.WNIDS[1]),
     "/Tiny-ImageNet-C-new/train/frost/2: class folder n01629819 is missing (3 of 4); labels would shift, extract it again"),
    ("tiny_imagenet_c", lambda r: shutil.copytree(r / "Tiny-ImageNet-C-new/val/saturate/3" / raws.WNIDS[0], r / "Tiny-ImageNet-C-new/val/saturate/3/n99999999"),
     "/Tiny-ImageNet-C-new/val/saturate/3: class folder n99999999 is not in the others (5 of 4); labels would shift, extract it again"),
    ("tiny_imagenet_c", lambda r: [p.unlink() for p in (r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0]).iterdir()],
     "/Tiny-ImageNet-C/fog/3/n01443537: no images; extract the download again"),
    ("tiny_imagenet_c", lambda r: write(r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0] / "a.JPEG", HTML), "/n01443537/a.JPEG: a web page (HTML)"),
    ("tiny_imagenet_c", lambda r: Image.new("RGB", (32, 64)).save(r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0] / "a.JPEG"),
     "/n01443537/a.JPEG: 32x64 pixels, expected 64x64"),
    ("iwildcam", lambda r: (r / WILD / "metadata.csv").unlink(), "/metadata.csv: missing; extract the download again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", "location_remapped", "place"),
     "/metadata.csv: no column 'location_remapped'; is it WILDS version 2.0? fetch it again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", "0,id_test,", "0,id_toast,"), "/metadata.csv: line 2 is not understood (split='id_toast'"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", ",1,0,2013", ",9,0,2013"), "/metadata.csv: labels y are not 0..5 without gaps; fetch it again"),
    ("iwildcam", lambda r: (r / WILD / "categories.csv").unlink(), "/categories.csv: missing; extract the download again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "categories.csv", "4,40,animal 4\n", ""), "/categories.csv: no category with y=4, which metadata.csv uses; fetch it again"),
    ("iwildcam", lambda r: [p.unlink() for p in (r / WILD / "train").iterdir()][:0], ".jpg: missing; extract the download again"),
    ("iwildcam", lambda r: [p.write_bytes(p.read_bytes()[:300]) for p in (r / WILD / "train").iterdir()][:0], ".jpg: not readable as an image ("),
    ("folder", lambda r: shutil.rmtree(r), ": no such folder; give the one that holds DOMAIN/CLASS/IMAGE"),
    ("folder", lambda r: [shutil.rmtree(p) for p in r.iterdir()], ": no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, "),
    ("folder", lambda r: [shutil.rmtree(p) for p in r.iterdir() if p.name != "site 0"], ": no domain has 40 images; add images or lower --min_images"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_each_fault_is_one_line_that_names_the_file_and_the_fix(tmp_path, monkeypatch, number):
    benchmark, spoil, message = FAULTS[number]
    raw = tmp_path / "raw"
    WRITERS[benchmark](raw)
    spoil(raw)
    line = command(monkeypatch, f"--benchmark={benchmark}", f"--raw_dir={raw}", f"--data_dir={tmp_path}/data", code=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and message in line
    assert str(tmp_path) in line
    assert not (tmp_path / "data").exists() or {p.name for p in (tmp_path / "data").iterdir()} <= {
        f".{benchmark}.decoded"
    }


@pytest.mark.parametrize("benchmark", sorted(READERS))
def test_no_reader_may_give_a_domain_to_two_splits(tmp_path, benchmark):
    WRITERS[benchmark](tmp_path / "raw")
    raw, read = READERS[benchmark](tmp_path / "raw"), []
    pieces = [piece._replace(read=lambda: read.append(1)) for piece in raw.pieces]
    first, other = pieces[0], next(piece for piece in pieces if piece.split != pieces[0].split)
    pieces += [first._replace(split=other.split)]
    with pytest.raises(UserError) as error:
        prepare.prepare(raw._replace(pieces=pieces), tmp_path / "store", 1)
    assert f"domain {first.domain!r} is in {first.split} and in {other.split}; " in str(error.value)
    assert not read and [p.name for p in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "split_csv={}: No such file or directory; give a CSV file with the columns domain and split"),
        ("domain,split\n", "{}: no lines; give a CSV file with the columns domain and split"),
        (
            "domain,split\nsite 1,dev\n",
            "{}: line 2: expected a domain and one of train, val, test, got 'site 1', 'dev'",
        ),
        ("name,part\nsite 1,val\n", "{}: no column 'domain'; give a CSV file with the columns domain and split"),
        ("domain,split\nsite 99,val\n", "{}: line 2: "),
        ("domain,split\nsite 1,val\nsite 1,test\n", "{}: line 3: 'site 1' is already in 'val'"),
    ],
)
def test_faults_of_split_files(tmp_path, content, message):
    raws.write_folder(tmp_path / "raw")
    path = tmp_path / "split.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        READERS["folder"](tmp_path / "raw", split_csv=str(path))
    assert str(error.value).startswith(message.format(path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--benchmark=femnits",), "--benchmark='femnits' is unknown; did you mean 'femnist'?"),
        (("--benchmark=femnist", "--tfds"), "--tfds: femnist has no such option; see --help"),
        (("--benchmark=femnist", "--skip_bad=1"), "--skip_bad: femnist has no such option; see --help"),
        (("--benchmark=femnist", "--skip_bad=-1"), "flag --skip_bad=-1"),
        (("--benchmark=folder", "--fit=stretch"), "flag --fit=stretch"),
        (("--benchmark=femnist", "--strict"), "--strict: train domains: 6, but the paper's 262; fetch the files again"),
        (("--benchmark=femnist", "--size=4"), "flag --size=4"),
    ],
)
def test_faults_of_the_command_line(tmp_path, monkeypatch, arguments, message):
    raws.write_femnist(tmp_path / "raw")
    line = command(monkeypatch, *arguments, f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data", code=2)
    assert message in line and line.count("\n") == 1 and not (tmp_path / "data").exists()
