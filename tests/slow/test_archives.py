"""Archives: a whole one is extracted; a hostile, damaged or cut one costs one line and leaves nothing."""

import gzip
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from cxda_jax.data.readers import archives
from cxda_jax.data.readers.archives import extract
from cxda_jax.data.store import open_store
from tests import raw_fixtures as raws
from tests.commands import command
from tests.lines import contents, refused

FILES = {"train/a.json": b'{"a": 1}', "train/deep/er/b.bin": bytes(range(256)) * 30, "empty": b""}


def pack(path, files, prefix=""):
    """An archive of the kind that the path's suffix says."""
    path.parent.mkdir(exist_ok=True)
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


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def assert_refused(archive, message, folder):
    """In one line, with everything in the folder left as it was."""
    before = tree(folder)
    with refused(f"^{{tmp}}: .*{message}", archive):
        extract(archive, archive.parent / "data")
    assert tree(folder) == before


@pytest.mark.parametrize("suffix", (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))
def test_a_whole_archive_is_extracted(tmp_path, suffix):
    prefix = {".zip": "data/", ".tar.gz": "./", ".tar.bz2": "./data/"}.get(suffix, "")
    beside = {"__MACOSX/x": b"", "LICENSE": b"free"} if "data" in prefix else {}
    archive = pack(tmp_path / f"data{suffix}", {prefix + k: v for k, v in FILES.items()} | beside)
    target = tmp_path / "raw" / "data"
    extract(archive, target)
    assert contents(target) == FILES
    assert [p.name for p in (tmp_path / "raw").iterdir()] == ["data"]
    assert not any(p.stat().st_mode & 0o7111 for p in target.rglob("*") if p.is_file())
    with refused(named=f"data{suffix}"):
        extract(archive, target)


def thing(name, kind=tarfile.REGTYPE, content=b"x", link="", size=None):
    """A member of a tar."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def tar(*things):
    return thing("first") + b"".join(things) + bytes(1024)


def zipped(name, mode=stat.S_IFREG, content=b"x"):
    """A zip of a plain file and this one."""
    info, file = zipfile.ZipInfo(name), io.BytesIO()
    info.external_attr, info.compress_type = (mode | 0o4755) << 16, zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("first", b"x")
        archive.writestr(info, content)
    return file.getvalue()


def in_directory(data, field, value):
    """Changes a field of the last entry in a zip's directory."""
    at = data.rindex(b"PK\x01\x02") + field
    return data[:at] + value + data[at + len(value) :]


LINK, AWAY, NO_FILE, DAMAGED = tarfile.SYMTYPE, "leads out of the folder", "is a link or a device", "damaged"
ATTACKS = [
    (tar(thing("/tmp/p_evil")), AWAY), *((tar(thing(name)), AWAY) for name in ("../evil", "a/b/../../../evil", "C:/evil")),
    (tar(thing("/" + "e" * 80 + "\x1b[2J")), r"'/e{32}\.\.\.e{10}\\x1b\[2J' "),
    *((tar(thing("a", kind, b"", "../outside")), NO_FILE) for kind in (LINK, tarfile.LNKTYPE, tarfile.FIFOTYPE)),
    (tar(thing("a"), thing("a/b/c")), DAMAGED), (tar(thing("a" * 70, size=2**34)), "1.0 GB"),
    (tar(*(thing(f"{i}") for i in range(20))), "20 files"),
    (tar(*(thing("x", tarfile.XHDTYPE, b"") for _ in range(3000))), DAMAGED),  # headers without end
    (zipped("/tmp/p_evil"), AWAY), (zipped("a", stat.S_IFLNK, b"/etc/passwd"), NO_FILE),
    (in_directory(zipped("a"), 24, b"\x00\x00\x00\x70"), "1.0 GB"), (zipped("a", content=bytes(10**6)), "200 times its size"),
    (in_directory(zipped("a", content=b"x" * 999), 24, b"\x09\x00"), DAMAGED),  # longer than it says
    (tar(thing("a"))[:1024] + b"b" + tar(thing("a"))[1025:], DAMAGED),  # a later header
    (gzip.compress(tar() + bytes(2 * 10**6)), DAMAGED),  # a bomb behind the end
    (b"PK\x03\x04not an archive", DAMAGED), (b"<!DOCTYPE html><title>Quota exceeded</title>", "web page"),
]  # fmt: skip


def test_hostile_archives_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch):
    for name, most in {"MEMBERS": 20, "SMALL": 10**5, "LIMIT": 10**9}.items():
        monkeypatch.setattr(archives, name, most)
    (raw := tmp_path / "outer" / "raw").mkdir(parents=True)
    (raw.parent / "outside").write_text("mine")
    for content, message in ATTACKS:
        (raw / "data.archive").write_bytes(content)
        assert_refused(raw / "data.archive", message, tmp_path)
        assert not Path("/tmp/p_evil").exists()


@pytest.mark.parametrize("suffix", (".zip", ".tar", ".tar.gz"))
def test_an_archive_without_files_or_cut_short_anywhere_is_refused(tmp_path, suffix):
    assert_refused(pack(tmp_path / f"none{suffix}", {}), "", tmp_path)
    content = pack(tmp_path / f"whole{suffix}", FILES | {"last": b"z" * 700}).read_bytes()
    archive = tmp_path / f"data{suffix}"
    end = content.rindex(b"z" * 188) + 512 if suffix == ".tar" else len(content)  # where the mark of the end stands
    for cut in {*range(0, end, 512), *range(1, end, max(1, end // 8)), end - 1}:
        archive.write_bytes(content[:cut])
        assert_refused(archive, DAMAGED, tmp_path)


def test_prepare_extracts_what_it_finds_packed(tmp_path):
    raws.write_femnist(tmp_path, images=3, writers=2)
    archive = pack(tmp_path / "a raw" / "femnist-data.zip", contents(tmp_path / "femnist"), "femnist-data/")
    output = command("prepare", "--benchmark=femnist", f"--raw_dir={archive.parent}", f"--data_dir={tmp_path}/data")
    assert f"{archive}: extracting to {archive.parent}/femnist\n" in output
    assert contents(archive.parent / "femnist") == contents(tmp_path / "femnist")
    assert sorted(p.name for p in archive.parent.iterdir()) == ["femnist", archive.name]
    assert len(open_store(tmp_path / "data" / "femnist").labels) == 18
