"""Archives: a whole one is extracted; a hostile, damaged or cut one costs one line and leaves nothing."""

import errno
import gzip
import io
import os
import re
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cxda_jax.data.readers import archives
from cxda_jax.data.readers.archives import extract
from cxda_jax.data.store import open_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command
from tests.lines import one_line

pytestmark = pytest.mark.gate
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
FILES = {"train/a.json": b'{"a": 1}', "train/deep/er/b.bin": bytes(range(256)) * 30, "empty": b""}


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr(archives, "Counter", lambda what, total: lambda done: None)


def pack(path, files, prefix=""):
    """An archive of the kind that the path's suffix says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(prefix + name, content)
        return path
    kind = {"tgz": "gz", "tar": ""}.get(path.suffix[1:], path.suffix[1:])
    with tarfile.open(path, f"w:{kind}") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size, info.mode = len(content), 0o4777
            archive.addfile(info, io.BytesIO(content))
    return path


def pack_folder(path, folder, prefix=""):
    return pack(path, contents(folder), prefix)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def contents(folder):
    return {name: content for name, content in tree(folder).items() if content is not None}


def fault(work, *folders):
    """The line of the UserError that work() ends with."""
    with pytest.raises(UserError) as error:
        work()
    return one_line(error.value, *folders)


def refusal(archive, folder):
    """The line with which extract() refuses, having left everything in the folder as it was."""
    before = tree(folder)
    line = fault(lambda: extract(archive, archive.parent / "data"), archive)
    assert tree(folder) == before and line.startswith("{tmp}: ")
    return line


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_whole_archive_is_extracted(tmp_path, suffix):
    prefix = {".zip": "data/", ".tar.gz": "./", ".tar.bz2": "./data/"}.get(suffix, "")
    beside = {"__MACOSX/x": b"", "LICENSE": b"free"} if "data" in prefix else {}
    archive = pack(tmp_path / f"data{suffix}", {prefix + k: v for k, v in FILES.items()} | beside)
    target = tmp_path / "raw" / "data"
    extract(archive, target)
    assert contents(target) == FILES
    assert [p.name for p in (tmp_path / "raw").iterdir()] == ["data"]
    assert not any(p.stat().st_mode & 0o7111 for p in target.rglob("*") if p.is_file())
    (tmp_path / "usual").mkdir()
    assert target.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert f"delete it to extract data{suffix} again" in fault(lambda: extract(archive, target), tmp_path)


def thing(name, kind=tarfile.REGTYPE, content=b"x", link="", size=None):
    """A member of a tar."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def tar(*things):
    return thing("first") + b"".join(things) + bytes(1024)


def entry(name, mode=stat.S_IFREG, content=b"x"):
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = (mode | 0o4755) << 16, zipfile.ZIP_DEFLATED
    return info, content


def zipped(*entries):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for info, content in (entry("first"), *entries):
            archive.writestr(info, content)
    return file.getvalue()


def in_directory(data, field, value):
    """Changes a field of the last entry in a zip's directory."""
    at = data.rindex(b"PK\x01\x02") + field
    return data[:at] + value + data[at + len(value) :]


LINK, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
AWAY, BOTH, NO_FILE = (
    f"{what}; refused" for what in ("leads out of the folder", "both a file and a folder", "is a link or a device")
)
DAMAGED = r"damaged, cut short or not an archive \(.*; fetch it again"
ATTACKS = [
    (tar(thing("/tmp/p_evil")), f"'/tmp/p_evil' {AWAY}"),
    *((tar(thing(name)), AWAY) for name in ("../evil", "a/b/../../../evil", "C:/evil", "c:evil", "a\\..\\..\\evil")),
    (tar(thing("..", DIR, b"")), AWAY),
    (tar(thing("/" + "e" * 80 + "\x1b[2J")), r"'/e{32}\.\.\.e{10}\\x1b\[2J' " + AWAY),
    (tar(thing("a", LINK, b"", "/etc/passwd")), f"'a' {NO_FILE}"),
    (tar(thing("a", LINK, b"", ".."), thing("a/evil")), NO_FILE),
    (tar(thing("a", HARD, b"", "../outside")), NO_FILE),
    *((tar(thing("a", kind, b"")), NO_FILE) for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)),
    (tar(thing(".")), BOTH),
    (tar(thing("a", DIR, b""), thing("a")), BOTH),
    *((tar(thing("a"), thing(inside)), BOTH) for inside in ("a/b", "a/b/c")),
    (tar(thing("a" * 70, size=2**34)), "more than 1.0 GB; refused"),
    (tar(*(thing(f"{i}") for i in range(20))), "more than 20 files; refused"),
    (tar(*(thing("x", tarfile.XHDTYPE, b"") for _ in range(3000))), DAMAGED),  # headers without end
    (zipped(entry("/tmp/p_evil")), f"'/tmp/p_evil' {AWAY}"),
    *((zipped(entry(name)), AWAY) for name in ("a/../../evil", "C:\\evil", "..\\evil")),
    (zipped(entry("a", stat.S_IFLNK, b"/etc/passwd")), NO_FILE),
    (zipped(entry("a"), entry("a/", content=b"")), BOTH),
    (zipped(entry("a"), entry("a/b")), BOTH),
    (in_directory(zipped(entry("a")), 8, b"\x01"), "required for extraction"),  # encrypted
    (in_directory(zipped(entry("a")), 10, b"\x63"), DAMAGED),  # packed in an unknown way
    (in_directory(zipped(entry("a")), 24, b"\x00\x00\x00\x70"), "more than 1.0 GB; refused"),
    (in_directory(zipped(entry("a", content=b"x" * 999)), 24, b"\x09\x00"), DAMAGED),  # longer than it says
    (zipped(entry("a", content=bytes(10**6))), "more than 200 times its size; refused"),
    (zipped()[:-22], DAMAGED),
    (tar()[512:], DAMAGED),
    (tar(thing("a"))[:1024] + b"b" + tar(thing("a"))[1025:], DAMAGED),  # a later header
    (gzip.compress(tar() + bytes(2 * 10**6)), DAMAGED),  # a bomb behind the end
    *((start + b"not an archive", DAMAGED) for start in (b"", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"PK\x03\x04")),
    (b"", DAMAGED),
    (b"<!DOCTYPE html><title>Quota exceeded</title>", "a web page .*; the link .* fetch it again"),
]


def test_hostile_archives_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch):
    for name, most in {"MEMBERS": 20, "SMALL": 10**5, "LIMIT": 10**9}.items():
        monkeypatch.setattr(archives, name, most)
    raw = tmp_path / "outer" / "raw"
    raw.mkdir(parents=True)
    (raw.parent / "outside").write_text("mine")
    for content, message in ATTACKS:
        (raw / "data.archive").write_bytes(content)
        assert re.search(message, line := refusal(raw / "data.archive", tmp_path)), (message, line)
        assert not Path("/tmp/p_evil").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_without_files_or_cut_short_anywhere_or_changed_is_refused(tmp_path, suffix):
    assert "; fetch it again" in refusal(pack(tmp_path / f"none{suffix}", {}), tmp_path)
    content = pack(tmp_path / f"whole{suffix}", FILES | {"last": b"z" * 700}).read_bytes()
    archive = tmp_path / f"data{suffix}"
    end = content.rindex(b"z" * 188) + 512 if suffix == ".tar" else len(content)  # where the mark of the end stands
    cuts = {*range(0, end, 512), *range(1, end, max(1, end // 8)), end - 1}
    for cut in sorted(cuts):
        archive.write_bytes(content[:cut])
        assert re.search(DAMAGED, refusal(archive, tmp_path))
    # A changed byte is found where the format has a checksum.
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    content = bytearray(pack(tmp_path / f"noise{suffix}", {"a": noise}).read_bytes())
    content[100 if suffix == ".tar" else len(content) // 2] ^= 4  # plain tars have checksums for headers alone
    archive.write_bytes(content)
    assert re.search(DAMAGED, refusal(archive, tmp_path))


def test_faults_of_the_disk(tmp_path, monkeypatch):
    archive = pack(tmp_path / "a.zip", {"a": bytes(10)})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4105))
        assert re.search("needs 0.0 GB .* has 0.0 GB left; make room", refusal(archive, tmp_path))
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4106))
        extract(archive, tmp_path / "b")
    for number, fix in [(errno.ENOSPC, "free some space"), (errno.EIO, "extract a.zip by hand")]:
        failing = OSError(number, os.strerror(number), str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", lambda path, failing=failing: (_ for _ in ()).throw(failing))
            assert re.search(f"/a: .*; {fix}", fault(lambda: extract(archive, tmp_path / "a"), tmp_path))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "b"]


def test_a_folder_is_whole_and_the_first_of_two_processes_wins(tmp_path, monkeypatch):
    archive = pack(tmp_path / "data.zip", FILES)

    def other(what, total):
        assert not (tmp_path / "data").exists()
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "theirs").write_text("whole")
        return lambda done: None

    monkeypatch.setattr(archives, "Counter", other)
    extract(archive, tmp_path / "data")
    assert tree(tmp_path / "data") == {"theirs": b"whole"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "data.zip"]


def store_of(raw, benchmark="femnist"):
    """The identity of the store that launch.prepare makes of a folder of raw files."""
    preparing.prepare(preparing.unpacked(lambda: READERS[benchmark](raw)), raw.parent / f"store_{raw.name}", 2)
    return open_store(raw.parent / f"store_{raw.name}").sha256


def test_prepare_extracts_what_it_finds_packed(tmp_path):
    """As it is published, too."""
    raws.write_femnist(tmp_path / "a", images=3, writers=2)
    expected = store_of(tmp_path / "a")
    for number, (name, prefix) in enumerate([
        ("femnist-data.zip", "femnist-data/"), ("femnist.zip", "femnist-data/"), ("femnist-data.tgz", ""),
    ]):  # fmt: skip
        raw = tmp_path / f"packed {number}"
        raw.mkdir()
        archive = pack_folder(raw / name, tmp_path / "a" / "femnist", prefix)
        output = command("prepare", "--benchmark=femnist", f"--raw_dir={raw}", f"--data_dir={raw}/data")
        assert f"{archive}: extracting to {raw}/femnist\n" in output
        assert open_store(raw / "data" / "femnist").sha256 == expected
        assert sorted(p.name for p in raw.iterdir()) == ["data", "femnist", name]
    shutil.copytree(tmp_path / "a" / "femnist", tmp_path / "unpacked" / "femnist" / "femnist-data")
    assert store_of(tmp_path / "unpacked") == expected


def test_cifar_c_is_taken_as_it_is_published(tmp_path):
    raws.write_cifar_c(tmp_path / "a", size=2)
    (tmp_path / "b").mkdir()
    pack_folder(tmp_path / "b" / "CIFAR-10-C.tar", tmp_path / "a" / "CIFAR-10-C", "CIFAR-10-C/")
    pack_folder(tmp_path / "b" / "CIFAR-10-C-new.tgz", tmp_path / "a" / "CIFAR-10-C-new", "CIFAR-10-C-new/")
    assert store_of(tmp_path / "a", "cifar_c") == store_of(tmp_path / "b", "cifar_c")
    clean = tmp_path / "b" / "cifar-10-batches-bin"
    raws.write_cifar_binary(tmp_path / "b")
    pack_folder(tmp_path / "b" / "cifar-10-binary.tar.gz", clean, "cifar-10-batches-bin/")
    before = tree(clean)
    shutil.rmtree(clean)
    preparing.unpacked(lambda: READERS["cifar_c"](tmp_path / "b", regenerate=True))
    assert tree(clean) == before


def test_tiny_imagenet_c_is_taken_as_it_is_published(tmp_path):
    raws.write_tiny_imagenet_c(tmp_path, per_class=1)
    before = [p[:3] for p in READERS["tiny_imagenet_c"](tmp_path).pieces]
    by_hand = tmp_path / "tinyimagenet-c"
    by_hand.mkdir()
    (tmp_path / "Tiny-ImageNet-C-new").rename(by_hand / "Tiny-ImageNet-C-new")
    assert [p[:3] for p in READERS["tiny_imagenet_c"](tmp_path).pieces] == before
    pack_folder(tmp_path / "tinyimagenet-c.zip", by_hand)
    shutil.rmtree(by_hand)
    raw = preparing.unpacked(lambda: READERS["tiny_imagenet_c"](tmp_path))
    assert [p[:3] for p in raw.pieces] == before and len(raw.pieces[0].read()[0]) == 4
    shutil.rmtree(tmp_path / "Tiny-ImageNet-C")  # it is not in that archive
    line = fault(lambda: preparing.unpacked(lambda: READERS["tiny_imagenet_c"](tmp_path)), tmp_path)
    assert line.startswith("{tmp}/Tiny-ImageNet-C: no such folder")


def test_a_folder_around_all_is_taken_off_but_not_a_splits(tmp_path):
    for top, inside in [("other", False), ("train", True)]:
        files = {f"{top}/{k}": v for k, v in FILES.items()} | {"__MACOSX/x": b"", ".DS_Store": b""}
        data = tmp_path / f"of {top}" / "data"
        extract(pack(tmp_path / f"{top}.zip", files), data)
        assert (data / top).is_dir() == inside and (data / "empty").is_file() != inside
    extract(pack(tmp_path / "two.zip", {"a/x": b"1", "b/x": b"2"}), tmp_path / "two")
    assert tree(tmp_path / "two") == {"a": None, "b": None, "a/x": b"1", "b/x": b"2"}
