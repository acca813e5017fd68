"""Archives: what is whole arrives, what is hostile, damaged or cut short is one line and leaves nothing."""

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

from cxda_jax.data import archives, store
from cxda_jax.data.archives import extract
from cxda_jax.data.raw import Packed, find_folder
from cxda_jax.data.store import open_store
from cxda_jax.experiment import READERS
from cxda_jax.types import UserError
from launch import prepare
from tests import raw_fixtures as raws
from tests.raw_fixtures import command

ROOT = Path(__file__).parent.parent
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
FILES = {"train/a.json": b'{"a": 1}', "train/deep/er/b.bin": bytes(range(256)) * 300, "empty": b""}


def silent(what, total):
    return lambda done: None


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
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return pack(path, files, prefix)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def fault(work):
    """The line of the UserError that work() ends with."""
    with pytest.raises(UserError) as error:
        work()
    line = str(error.value)
    assert "\n" not in line and len(re.sub(r"/\S*/", "", line)) <= 200
    return line


def refusal(folder, archive, limit=archives.LIMIT):
    """The line with which extract() refuses, having left everything as it was."""
    before = tree(folder)
    line = fault(lambda: extract(archive, archive.parent / "data", limit, silent))
    assert tree(folder) == before
    assert line.startswith(f"{archive}: ")
    return line.removeprefix(f"{archive}: ")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("prefix", ["", "./", "data/", "./data/"])
def test_what_is_whole_arrives(tmp_path, suffix, prefix):
    beside = {"__MACOSX/x": b"", "LICENSE": b"free"} if "data" in prefix else {}
    archive = pack(tmp_path / f"data{suffix}", {prefix + k: v for k, v in FILES.items()} | beside)
    told = []
    extract(archive, tmp_path / "raw" / "data", report=lambda what, total: told.append((what, total)) or told.append)
    found = {k: v for k, v in tree(tmp_path / "raw" / "data").items() if v is not None}
    assert found == FILES and told[0] == (f"MB of data{suffix}", 0)
    assert [p.name for p in (tmp_path / "raw").iterdir()] == ["data"]
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "raw" / "data").rglob("*") if p.is_file()]
    usual = tmp_path / "usual"
    usual.mkdir()
    assert not any(mode & 0o7111 for mode in modes)
    assert (tmp_path / "raw" / "data").stat().st_mode == usual.stat().st_mode
    again = fault(lambda: extract(archive, tmp_path / "raw" / "data"))
    assert again.endswith(f"/raw/data: is there already; delete it to extract data{suffix} again")


def test_progress_is_of_bytes_and_only_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MB", 1000)
    monkeypatch.setattr(archives, "CHUNK", 500)
    told = []
    extract(
        pack(tmp_path / "a.zip", FILES), tmp_path / "a", report=lambda what, total: told.append(total) or told.append
    )
    assert told[0] == told[-1] == 76 and told[1:] == sorted(set(told[1:])) and len(told) == 78


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


LINK, DIR = tarfile.SYMTYPE, tarfile.DIRTYPE
AWAY = " leads out of the folder; refused, extract it by hand if you trust it"
BOTH = " is both a file and a folder; refused, extract it by hand if you trust it"
IS_LINK = " is a link; refused, extract it by hand if you trust it"
DEVICE = " is a device or pipe; refused, extract it by hand if you trust it"
ATTACKS = [
    (tar(thing("/tmp/p_evil")), "'/tmp/p_evil'" + AWAY),
    (tar(thing("../evil")), "'../evil'" + AWAY),
    (tar(thing("a/b/../../../evil")), "'a/b/../../../evil'" + AWAY),
    (tar(thing("..", DIR, b"")), "'..'" + AWAY),
    (tar(thing("C:/evil")), "'C:/evil'" + AWAY),
    (tar(thing("c:evil")), "'c:evil'" + AWAY),
    (tar(thing("a\\..\\..\\evil")), r"'a\\..\\..\\evil'" + AWAY),
    (tar(thing("\\\\host\\evil")), r"'\\\\host\\evil'" + AWAY),
    (tar(thing("/" + "e" * 80 + "\x1b[2J")), "'/" + "e" * 32 + "..." + "e" * 10 + r"\x1b[2J'" + AWAY),
    (tar(thing("a", LINK, b"", "/etc/passwd")), "'a'" + IS_LINK),
    (tar(thing("a", LINK, b"", "first")), "'a'" + IS_LINK),
    (tar(thing("a", LINK, b"", ".."), thing("a/evil")), "'a'" + IS_LINK),
    (tar(thing("a", tarfile.LNKTYPE, b"", "../outside")), "'a'" + IS_LINK),
    (tar(thing("a", tarfile.LNKTYPE, b"", "first")), "'a'" + IS_LINK),
    (tar(thing("a", tarfile.FIFOTYPE, b"")), "'a'" + DEVICE),
    (tar(thing("a", tarfile.CHRTYPE, b"")), "'a'" + DEVICE),
    (tar(thing("a", tarfile.BLKTYPE, b"")), "'a'" + DEVICE),
    (tar(thing("a", tarfile.GNUTYPE_SPARSE, b"")), "'a' is sparse; refused, extract it by hand if you trust it"),
    (tar(thing(".", content=b"x")), "holds a file without a name; refused, extract it by hand if you trust it"),
    (tar(thing("a"), thing("a", DIR, b"")), "'a'" + BOTH),
    (tar(thing("a", DIR, b""), thing("a")), "'a'" + BOTH),
    (tar(thing("a"), thing("a/b")), "'a/b'" + BOTH),
    (tar(thing("a"), thing("a/b/c")), "'a/b/c'" + BOTH),
    (tar(thing("a" * 70, size=2**34)), "unpacks to more than 1.0 GB; refused, extract it by hand if you trust it"),
    (tar(*(thing(f"{i}") for i in range(20))), "holds more than 20 files; refused, extract it by hand if you trust it"),
    (tar(thing("x", tarfile.XHDTYPE, b"x" * 2**21)),
     "damaged, cut short or not an archive (a header of a size that none has); fetch it again"),
    (tar(thing("x", tarfile.GNUTYPE_LONGNAME, b"x" * 2**21)),
     "damaged, cut short or not an archive (a header of a size that none has); fetch it again"),
    (tar(*(thing("x", tarfile.XHDTYPE, b"") for _ in range(3000))), "damaged, cut short or not an archive ("),
    (zipped(entry("/tmp/p_evil")), "'/tmp/p_evil'" + AWAY),
    (zipped(entry("a/../../evil")), "'a/../../evil'" + AWAY),
    (zipped(entry("C:\\evil")), r"'C:\\evil'" + AWAY),
    (zipped(entry("..\\evil")), r"'..\\evil'" + AWAY),
    (zipped(entry("a", stat.S_IFLNK, b"/etc/passwd")), "'a'" + IS_LINK),
    (zipped(entry("a", stat.S_IFIFO)), "'a'" + DEVICE),
    (zipped(entry("a"), entry("a/", content=b"")), "'a/'" + BOTH),
    (zipped(entry("a"), entry("a/b")), "'a/b'" + BOTH),
    (in_directory(zipped(entry("a")), 8, b"\x01"), "'a' is encrypted; refused, extract it by hand if you trust it"),
    (in_directory(zipped(entry("a")), 10, b"\x63"), "damaged, cut short or not an archive ("),
    (in_directory(zipped(entry("a")), 24, b"\x00\x00\x00\x70"),
     "unpacks to more than 1.0 GB; refused, extract it by hand if you trust it"),
    (in_directory(zipped(entry("a", content=b"x" * 999)), 24, b"\x09\x00"), "damaged, cut short or not an archive ("),
    (in_directory(zipped(entry("a")), 24, b"\x09\x00"), "damaged, cut short or not an archive ("),
    (zipped(entry("a", content=bytes(10**6))), "unpacks to more than 200 times its size; refused, extract it by hand"),
    (zipped()[:-22], "damaged, cut short or not an archive ("),
    (tar()[512:], "damaged, cut short or not an archive ("),
    (b"", "damaged, cut short or not an archive ("),
    (b"not an archive", "damaged, cut short or not an archive ("),
    (b"\x1f\x8bnot an archive", "damaged, cut short or not an archive ("),
    (b"BZhnot an archive", "damaged, cut short or not an archive ("),
    (b"\xfd7zXZ\x00not an archive", "damaged, cut short or not an archive ("),
    (b"PK\x03\x04not an archive", "damaged, cut short or not an archive ("),
    (b"<!DOCTYPE html><title>Quota exceeded</title>",
     "a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_hostile_archives_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch, number):
    content, message = ATTACKS[number]
    monkeypatch.setattr(archives, "MEMBERS", 20)
    monkeypatch.setattr(archives, "SMALL", 10**5)
    raw = tmp_path / "outer" / "raw"
    raw.mkdir(parents=True)
    (raw.parent / "outside").write_text("mine")
    (raw / "data.archive").write_bytes(content)
    line = refusal(tmp_path, raw / "data.archive", limit=10**9)
    assert line.startswith(message) if message.endswith(("(", "by hand")) else line == message
    assert not Path("/tmp/p_evil").exists()


def test_a_bomb_behind_the_end_is_found_and_an_empty_archive_too(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar() + bytes(10**6)))
    assert refusal(tmp_path, tmp_path / "a.tar.gz", 10**5).startswith("unpacks to more than 0.0 GB; refused")
    for suffix in SUFFIXES:
        archive = pack(tmp_path / f"none{suffix}", {})
        assert "; fetch it again" in refusal(tmp_path, archive)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_cut_short_anywhere_is_refused(tmp_path, suffix):
    content = pack(tmp_path / f"whole{suffix}", FILES | {"last": b"z" * 700}).read_bytes()
    archive = tmp_path / f"data{suffix}"
    end = content.rindex(b"z" * 188) + 512 if suffix == ".tar" else len(content)  # where the mark of the end stands
    cuts = {*range(0, end, 512), *range(1, end, max(1, end // 30)), end - 1}
    for cut in sorted(cuts):
        archive.write_bytes(content[:cut])
        assert "damaged, cut short or not an archive (" in refusal(tmp_path, archive)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_byte_is_found_where_the_format_has_a_checksum(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    content = bytearray(pack(tmp_path / f"whole{suffix}", {"a": noise}).read_bytes())
    content[100 if suffix == ".tar" else len(content) // 2] ^= 4  # plain tars have checksums for headers alone
    archive = tmp_path / f"data{suffix}"
    archive.write_bytes(content)
    assert "damaged, cut short or not an archive (" in refusal(tmp_path, archive)


def test_a_disk_that_is_too_small_is_told_beforehand(tmp_path, monkeypatch):
    archive = pack(tmp_path / "a.zip", {"a": bytes(10)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4105))
    assert refusal(tmp_path, archive) == f"needs 0.0 GB in {tmp_path}, which has 0.0 GB left; make room"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4106))
    extract(archive, tmp_path / "a")


@pytest.mark.parametrize("number, message", [
    (errno.ENOSPC, "No space left on device; free some space and run the same command again"),
    (errno.EIO, "Input/output error; extract a.zip by hand, and point raw_dir there"),
])  # fmt: skip
def test_faults_of_the_disk(tmp_path, monkeypatch, number, message):
    archive = pack(tmp_path / "a.zip", FILES)

    def full(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "utime", full)
    assert fault(lambda: extract(archive, tmp_path / "a", report=silent)) == f"{tmp_path / 'a'}: {message}"
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_a_killed_extraction_leaves_nothing_that_is_taken_for_finished(tmp_path):
    archive = pack(tmp_path / "data.tar.gz", FILES)
    code = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from cxda_jax.data.archives import extract
stop = lambda done: (print("half", flush=True), time.sleep(60))
extract(Path({str(archive)!r}), Path({str(tmp_path / "data")!r}), report=lambda what, total: stop)
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
    assert {k: v for k, v in tree(tmp_path / "data").items() if v is not None} == FILES
    assert partial.exists()  # it may belong to a process that is still at work
    for path in (partial, *partial.iterdir()):
        os.utime(path, (0, time.time() - store.ABANDONED - 60))
    shutil.rmtree(tmp_path / "data")
    extract(archive, tmp_path / "data")
    assert not partial.exists()


def test_the_first_of_two_processes_wins(tmp_path):
    archive = pack(tmp_path / "data.zip", FILES)

    def other(what, total):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "theirs").write_text("whole")
        return lambda done: None

    extract(archive, tmp_path / "data", report=other)
    assert tree(tmp_path / "data") == {"theirs": b"whole"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "data.zip"]


def test_prepare_extracts_what_it_finds_packed(tmp_path, monkeypatch):
    raws.write_femnist(tmp_path / "a")
    (tmp_path / "b").mkdir()
    archive = pack_folder(tmp_path / "b" / "femnist.zip", tmp_path / "a" / "femnist")  # no folder of its name inside
    outputs = [
        command(monkeypatch, "--benchmark=femnist", f"--raw_dir={tmp_path / raw}", f"--data_dir={tmp_path}/data_{raw}")
        for raw in "ab"
    ]
    assert f"{archive}: extracting to {tmp_path}/b/femnist\n" in outputs[1] and "extracting" not in outputs[0]
    assert open_store(tmp_path / "data_a" / "femnist").sha256 == open_store(tmp_path / "data_b" / "femnist").sha256
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["femnist", "femnist.zip"]


@pytest.mark.parametrize(
    "archive, prefix", [("femnist-data.zip", "femnist-data/"), ("femnist.zip", "femnist-data/"), ("femnist-data.tgz", ""),
                        ("femnist.zip", "femnist/"), (None, "femnist-data"), (None, "femnist/femnist-data")],
)  # fmt: skip
def test_femnist_is_taken_as_it_is_published(tmp_path, archive, prefix):
    raws.write_femnist(tmp_path / "a", writers=2)
    raw = tmp_path / "b"
    raw.mkdir()
    if archive:
        pack_folder(raw / archive, tmp_path / "a" / "femnist", prefix)
    else:
        shutil.copytree(tmp_path / "a" / "femnist", raw / prefix)
    for name in "ab":
        found = prepare.unpacked(lambda name=name: READERS["femnist"](tmp_path / name))
        prepare.prepare(found, tmp_path / f"store_{name}", 2)
    assert open_store(tmp_path / "store_a").sha256 == open_store(tmp_path / "store_b").sha256


@pytest.mark.parametrize("by_hand", [False, True])
def test_tiny_imagenet_c_is_taken_as_it_is_published(tmp_path, by_hand):
    raws.write_tiny_imagenet_c(tmp_path, per_class=1)
    before = [p[:3] for p in READERS["tiny_imagenet_c"](tmp_path).pieces]
    new = tmp_path / "Tiny-ImageNet-C-new"
    if by_hand:
        new.rename(tmp_path / "new")
        (tmp_path / "tinyimagenet-c").mkdir()
        (tmp_path / "new").rename(tmp_path / "tinyimagenet-c" / new.name)
    else:
        pack_folder(tmp_path / "tinyimagenet-c.zip", new, "Tiny-ImageNet-C-new/")
        shutil.rmtree(new)
    found = prepare.unpacked(lambda: READERS["tiny_imagenet_c"](tmp_path))
    assert [p[:3] for p in found.pieces] == before and len(found.pieces[0].read()[0]) == 4
    shutil.rmtree(tmp_path / "Tiny-ImageNet-C")  # of which that archive has nothing
    assert fault(lambda: prepare.unpacked(lambda: READERS["tiny_imagenet_c"](tmp_path))).startswith(
        f"{tmp_path}/Tiny-ImageNet-C: no such folder"
    )


@pytest.mark.parametrize("top, inside", [("other", False), ("train", True)])
def test_a_folder_around_all_is_taken_off_but_not_a_splits(tmp_path, top, inside):
    beside = {"__MACOSX/x": b"", ".DS_Store": b""}
    extract(pack(tmp_path / "data.zip", {f"{top}/{k}": v for k, v in FILES.items()} | beside), tmp_path / "data")
    assert (tmp_path / "data" / top).is_dir() == inside and (tmp_path / "data" / "empty").is_file() != inside
    extract(pack(tmp_path / "two.zip", {"a/x": b"1", "b/x": b"2"}), tmp_path / "two")
    assert tree(tmp_path / "two") == {"a": None, "b": None, "a/x": b"1", "b/x": b"2"}


def test_a_benchmark_of_several_archives(tmp_path):
    raws.write_cifar_c(tmp_path / "a", size=2)
    (tmp_path / "b").mkdir()
    pack_folder(tmp_path / "b" / "CIFAR-10-C.tar", tmp_path / "a" / "CIFAR-10-C", "CIFAR-10-C/")
    pack_folder(tmp_path / "b" / "CIFAR-10-C-new.tgz", tmp_path / "a" / "CIFAR-10-C-new", "CIFAR-10-C-new/")
    for raw in "ab":
        found = prepare.unpacked(lambda raw=raw: READERS["cifar_c"](tmp_path / raw))
        prepare.prepare(found, tmp_path / f"store_{raw}", 2)
    assert open_store(tmp_path / "store_a").sha256 == open_store(tmp_path / "store_b").sha256


def test_clean_images_are_found_under_their_archives_own_name(tmp_path):
    raws.write_cifar_c(tmp_path, size=2)
    raws.write_cifar_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    pack_folder(tmp_path / "cifar-10-binary.tar.gz", folder, "cifar-10-batches-bin/")
    wanted = tree(folder)
    shutil.rmtree(folder)
    prepare.unpacked(lambda: READERS["cifar_c"](tmp_path, regenerate=True))
    assert tree(folder) == wanted
