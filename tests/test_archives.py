"""Archives: a whole one is extracted; a hostile, damaged or cut one costs one line and leaves nothing."""

import errno
import gzip
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cxda_jax.data import store
from cxda_jax.data.readers import archives
from cxda_jax.data.readers.archives import extract
from cxda_jax.data.readers.raw import Packed, find_folder
from cxda_jax.data.store import open_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command

ROOT = Path(__file__).parent.parent
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
FILES = {"train/a.json": b'{"a": 1}', "train/deep/er/b.bin": bytes(range(256)) * 300, "empty": b""}


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


def fault(work):
    """The line of the UserError that work() ends with."""
    with pytest.raises(UserError) as error:
        work()
    line = str(error.value)
    assert "\n" not in line and len(re.sub(r"/\S*/", "", line)) <= 200
    return line


def refusal(folder, archive):
    """The line with which extract() refuses, having left everything as it was."""
    before = tree(folder)
    line = fault(lambda: extract(archive, archive.parent / "data"))
    assert tree(folder) == before
    assert line.startswith(f"{archive}: ")
    return line.removeprefix(f"{archive}: ")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("prefix", ["", "./", "data/", "./data/"])
def test_a_whole_archive_is_extracted(tmp_path, suffix, prefix):
    beside = {"__MACOSX/x": b"", "LICENSE": b"free"} if "data" in prefix else {}
    archive = pack(tmp_path / f"data{suffix}", {prefix + k: v for k, v in FILES.items()} | beside)
    target = tmp_path / "raw" / "data"
    extract(archive, target)
    assert contents(target) == FILES
    assert [p.name for p in (tmp_path / "raw").iterdir()] == ["data"]
    assert not any(p.stat().st_mode & 0o7111 for p in target.rglob("*") if p.is_file())
    (tmp_path / "usual").mkdir()
    assert target.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert f"delete it to extract data{suffix} again" in fault(lambda: extract(archive, target))


def test_progress_is_of_bytes_and_only_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MB", 1000)
    told = []
    monkeypatch.setattr(archives, "Counter", lambda *what: told.append(what) or told.append)
    extract(pack(tmp_path / "a.zip", {f"{i}": bytes(700) for i in range(10)}), tmp_path / "a")
    assert told == [("MB of a.zip", 7), *range(8)]


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
AWAY, BOTH = "leads out of the folder; refused", "both a file and a folder; refused"
NO_FILE = "is a link or a device; refused"
DAMAGED = r"damaged, cut short or not an archive \(.*; fetch it again"
ATTACKS = {
    "absolute": (tar(thing("/tmp/p_evil")), "'/tmp/p_evil' " + AWAY),
    "above": (tar(thing("../evil")), AWAY),
    "above later": (tar(thing("a/b/../../../evil")), AWAY),
    "above, a folder": (tar(thing("..", DIR, b"")), AWAY),
    "drive": (tar(thing("C:/evil")), AWAY),
    "drive, relative": (tar(thing("c:evil")), AWAY),
    "backslashes": (tar(thing("a\\..\\..\\evil")), AWAY),
    "host": (tar(thing("\\\\host\\evil")), AWAY),
    "long and coloured": (tar(thing("/" + "e" * 80 + "\x1b[2J")), r"'/e{32}\.\.\.e{10}\\x1b\[2J' " + AWAY),
    "link outside": (tar(thing("a", LINK, b"", "/etc/passwd")), "'a' " + NO_FILE),
    "link inside": (tar(thing("a", LINK, b"", "first")), NO_FILE),
    "through a link": (tar(thing("a", LINK, b"", ".."), thing("a/evil")), NO_FILE),
    "hard link outside": (tar(thing("a", HARD, b"", "../outside")), NO_FILE),
    "hard link inside": (tar(thing("a", HARD, b"", "first")), NO_FILE),
    "pipe": (tar(thing("a", tarfile.FIFOTYPE, b"")), NO_FILE),
    "character device": (tar(thing("a", tarfile.CHRTYPE, b"")), NO_FILE),
    "block device": (tar(thing("a", tarfile.BLKTYPE, b"")), NO_FILE),
    "no name": (tar(thing(".")), BOTH),
    "folder, then file": (tar(thing("a", DIR, b""), thing("a")), BOTH),
    "file, then in it": (tar(thing("a"), thing("a/b")), BOTH),
    "file, then deep in it": (tar(thing("a"), thing("a/b/c")), BOTH),
    "huge": (tar(thing("a" * 70, size=2**34)), "more than 1.0 GB; refused"),
    "less than nothing": (tar(thing("a", size=-512)), "more than 1.0 GB; refused"),
    "many": (tar(*(thing(f"{i}") for i in range(20))), "more than 20 files; refused"),
    "endless headers": (tar(*(thing("x", tarfile.XHDTYPE, b"") for _ in range(3000))), DAMAGED),
    "zip, absolute": (zipped(entry("/tmp/p_evil")), "'/tmp/p_evil' " + AWAY),
    "zip, above": (zipped(entry("a/../../evil")), AWAY),
    "zip, drive": (zipped(entry("C:\\evil")), AWAY),
    "zip, backslashes": (zipped(entry("..\\evil")), AWAY),
    "zip, link": (zipped(entry("a", stat.S_IFLNK, b"/etc/passwd")), NO_FILE),
    "zip, pipe": (zipped(entry("a", stat.S_IFIFO)), NO_FILE),
    "zip, file, then folder": (zipped(entry("a"), entry("a/", content=b"")), BOTH),
    "zip, file, then in it": (zipped(entry("a"), entry("a/b")), BOTH),
    "zip, encrypted": (in_directory(zipped(entry("a")), 8, b"\x01"), "required for extraction"),
    "zip, unknown packing": (in_directory(zipped(entry("a")), 10, b"\x63"), DAMAGED),
    "zip, huge": (in_directory(zipped(entry("a")), 24, b"\x00\x00\x00\x70"), "more than 1.0 GB; refused"),
    "zip, too long": (in_directory(zipped(entry("a", content=b"x" * 999)), 24, b"\x09\x00"), DAMAGED),
    "zip bomb": (zipped(entry("a", content=bytes(10**6))), "more than 200 times its size; refused"),
    "zip without its end": (zipped()[:-22], DAMAGED),
    "tar without its start": (tar()[512:], DAMAGED),
    "damaged later header": (tar(thing("a"))[:1024] + b"b" + tar(thing("a"))[1025:], DAMAGED),
    "bomb behind the end": (gzip.compress(tar() + bytes(2 * 10**6)), DAMAGED),
    "nothing": (b"", DAMAGED),
    "text": (b"not an archive", DAMAGED),
    "gzip of nothing": (b"\x1f\x8bnot an archive", DAMAGED),
    "bzip2 of nothing": (b"BZhnot an archive", DAMAGED),
    "xz of nothing": (b"\xfd7zXZ\x00not an archive", DAMAGED),
    "zip of nothing": (b"PK\x03\x04not an archive", DAMAGED),
    "web page": (b"<!DOCTYPE html><title>Quota exceeded</title>", "a web page .*; the link .* fetch it again"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_archives_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch, name):
    content, message = ATTACKS[name]
    monkeypatch.setattr(archives, "MEMBERS", 20)
    monkeypatch.setattr(archives, "SMALL", 10**5)
    monkeypatch.setattr(archives, "LIMIT", 10**9)
    raw = tmp_path / "outer" / "raw"
    raw.mkdir(parents=True)
    (raw.parent / "outside").write_text("mine")
    (raw / "data.archive").write_bytes(content)
    assert re.search(message, refusal(tmp_path, raw / "data.archive"))
    assert not Path("/tmp/p_evil").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_without_files_or_cut_short_anywhere_or_changed_is_refused(tmp_path, suffix):
    assert "; fetch it again" in refusal(tmp_path, pack(tmp_path / f"none{suffix}", {}))
    content = pack(tmp_path / f"whole{suffix}", FILES | {"last": b"z" * 700}).read_bytes()
    archive = tmp_path / f"data{suffix}"
    end = content.rindex(b"z" * 188) + 512 if suffix == ".tar" else len(content)  # where the mark of the end stands
    cuts = {*range(0, end, 512), *range(1, end, max(1, end // 30)), end - 1}
    for cut in sorted(cuts):
        archive.write_bytes(content[:cut])
        assert re.search(DAMAGED, refusal(tmp_path, archive))
    # A changed byte is found where the format has a checksum.
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    content = bytearray(pack(tmp_path / f"noise{suffix}", {"a": noise}).read_bytes())
    content[100 if suffix == ".tar" else len(content) // 2] ^= 4  # plain tars have checksums for headers alone
    archive.write_bytes(content)
    assert re.search(DAMAGED, refusal(tmp_path, archive))


def test_a_disk_that_is_too_small_is_told_beforehand(tmp_path, monkeypatch):
    archive = pack(tmp_path / "a.zip", {"a": bytes(10)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4105))
    assert re.search("needs 0.0 GB .* has 0.0 GB left; make room", refusal(tmp_path, archive))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4106))
    extract(archive, tmp_path / "a")


@pytest.mark.parametrize("number, fix", [(errno.ENOSPC, "free some space"), (errno.EIO, "extract a.zip by hand")])
def test_faults_of_the_disk(tmp_path, monkeypatch, number, fix):
    archive = pack(tmp_path / "a.zip", FILES)

    def full(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "utime", full)
    assert re.search(f"/a: .*; {fix}", fault(lambda: extract(archive, tmp_path / "a")))
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_a_killed_extraction_leaves_nothing_that_is_taken_for_finished(tmp_path):
    archive = pack(tmp_path / "data.tar.gz", FILES)
    code = f"""
import time
from pathlib import Path
from cxda_jax.data.readers import archives
archives.Counter = lambda what, total: lambda done: (print("half", flush=True), time.sleep(60))
archives.extract(Path({str(archive)!r}), Path({str(tmp_path / "data")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (partial,) = (p for p in tmp_path.iterdir() if p != archive)
    assert partial.name.startswith(".data.partial-") and any(p.is_file() for p in partial.rglob("*"))
    with pytest.raises(Packed):
        find_folder(tmp_path, "data")
    extract(archive, tmp_path / "data")
    assert contents(tmp_path / "data") == FILES
    assert partial.exists()  # it may belong to a process that is still at work
    for path in (partial, *partial.iterdir()):
        os.utime(path, (0, time.time() - store.ABANDONED - 60))
    shutil.rmtree(tmp_path / "data")
    extract(archive, tmp_path / "data")
    assert not partial.exists()


def test_the_first_of_two_processes_wins(tmp_path, monkeypatch):
    archive = pack(tmp_path / "data.zip", FILES)

    def other(what, total):
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
    raws.write_femnist(tmp_path / "a", writers=2)
    expected = store_of(tmp_path / "a")
    for number, (name, prefix) in enumerate([
        ("femnist-data.zip", "femnist-data/"), ("femnist.zip", "femnist-data/"), ("femnist-data.tgz", ""),
        ("femnist.zip", "femnist/"), ("femnist.zip", ""),
    ]):  # fmt: skip
        raw = tmp_path / f"packed {number}"
        raw.mkdir()
        archive = pack_folder(raw / name, tmp_path / "a" / "femnist", prefix)
        output = command("prepare", "--benchmark=femnist", f"--raw_dir={raw}", f"--data_dir={raw}/data")
        assert f"{archive}: extracting to {raw}/femnist\n" in output
        assert open_store(raw / "data" / "femnist").sha256 == expected
        assert sorted(p.name for p in raw.iterdir()) == ["data", "femnist", name]
    for number, path in enumerate(("femnist-data", "femnist/femnist-data")):
        shutil.copytree(tmp_path / "a" / "femnist", tmp_path / f"unpacked {number}" / path)
        assert store_of(tmp_path / f"unpacked {number}") == expected


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
    line = fault(lambda: preparing.unpacked(lambda: READERS["tiny_imagenet_c"](tmp_path)))
    assert line.startswith(f"{tmp_path}/Tiny-ImageNet-C: no such folder")


@pytest.mark.parametrize("top, inside", [("other", False), ("train", True)])
def test_a_folder_around_all_is_taken_off_but_not_a_splits(tmp_path, top, inside):
    beside = {"__MACOSX/x": b"", ".DS_Store": b""}
    extract(pack(tmp_path / "data.zip", {f"{top}/{k}": v for k, v in FILES.items()} | beside), tmp_path / "data")
    assert (tmp_path / "data" / top).is_dir() == inside and (tmp_path / "data" / "empty").is_file() != inside
    extract(pack(tmp_path / "two.zip", {"a/x": b"1", "b/x": b"2"}), tmp_path / "two")
    assert tree(tmp_path / "two") == {"a": None, "b": None, "a/x": b"1", "b/x": b"2"}
