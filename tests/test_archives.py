"""Downloads and archives: what is whole arrives, what is hostile, damaged or cut short is one line and leaves nothing."""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cxda_jax.data import archives, downloads, store
from cxda_jax.data.archives import extract
from cxda_jax.data.downloads import fetch
from cxda_jax.data.raw import Packed, find_folder
from cxda_jax.data.store import open_store
from cxda_jax.experiment import READERS
from cxda_jax.types import UserError
from launch import prepare
from tests import raw_fixtures as raws
from tests.test_prepare import command

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
    (errno.EIO, "Input/output error; extract a.zip by hand, and point --raw_dir there"),
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


CONTENT = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8).tobytes()
SHA256, MD5 = (f"{kind}:{hashlib.new(kind, CONTENT).hexdigest()}" for kind in ("sha256", "md5"))


class Server(ThreadingHTTPServer):
    """Answers by `answer`(request); `asked` has the Range headers that came."""

    daemon_threads = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.answer = [], whole
        self.url = f"http://127.0.0.1:{self.server_port}/data.zip"

    def handle_error(self, request, client_address):
        pass  # clients that leave


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.headers.get("Range"))
        with contextlib.suppress(ConnectionError):
            self.server.answer(self)

    def log_message(self, *_):
        pass

    def reply(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def start(self):
        return int((self.headers.get("Range") or "bytes=0-")[6:-1])


def whole(request):
    """As a server that knows ranges."""
    start = request.start()
    if start >= len(CONTENT):
        request.reply(416, Content_Range=f"bytes */{len(CONTENT)}")
    elif start:
        request.reply(206, CONTENT[start:], Content_Range=f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
    else:
        request.reply(200, CONTENT)


def without_ranges(request):
    request.reply(200, CONTENT)


def broken_off(after):
    """Ends each connection after some bytes."""

    def answer(request):
        start = request.start()
        headers = {"Content_Length": len(CONTENT) - start}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        request.reply(206 if start else 200, CONTENT[start : start + after], **headers)

    return answer


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(downloads, "PAUSE", 0.01)
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_a_download_arrives_checked(tmp_path, server):
    for i, (size, digest) in enumerate(
        [(None, None), (len(CONTENT), SHA256), (None, MD5), (None, SHA256.upper()[:6].lower() + SHA256[6:].upper())]
    ):
        path = tmp_path / "new" / f"{i}.zip"
        fetch(server.url, path, size, digest)
        assert path.read_bytes() == CONTENT
    assert server.asked == [None] * 4 and len(list((tmp_path / "new").iterdir())) == 4
    fetch(server.url, path, len(CONTENT), SHA256)
    assert len(server.asked) == 4  # it is there already
    path.write_bytes(CONTENT[:-1])
    line = fault(lambda: fetch(server.url, path, len(CONTENT)))
    assert line == f"{path}: 299999 bytes, expected 300000; delete it to fetch it again"
    assert "sha256 is " in fault(lambda: fetch(server.url, path, None, SHA256))


def test_a_dropped_connection_is_resumed(tmp_path, server, capsys, monkeypatch):
    monkeypatch.setattr(archives, "MB", 1000)
    server.answer, told = broken_off(40_000), []
    fetch(server.url, tmp_path / "a.zip", len(CONTENT), SHA256, lambda what, total: told.append(what) or told.append)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.asked == [None, *(f"bytes={n}-" for n in range(40_000, 300_000, 40_000))]
    assert "a.zip.part: the connection ended after 40000 of 300000 bytes; next try in 0s" in capsys.readouterr().out
    assert told.count("MB of a.zip") == 8 and [t for t in told if t != "MB of a.zip"][-1] == 300


def test_a_download_goes_on_in_a_later_run(tmp_path, server):
    (tmp_path / "a.zip.part").write_bytes(CONTENT[:123_456])
    fetch(server.url, tmp_path / "a.zip", digest=SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT and server.asked == ["bytes=123456-"]
    (tmp_path / "b.zip.part").write_bytes(CONTENT)  # stopped before it was renamed
    fetch(server.url, tmp_path / "b.zip", len(CONTENT), SHA256)
    assert (tmp_path / "b.zip").read_bytes() == CONTENT and len(server.asked) == 1


def other_range(request):
    if request.start():
        request.reply(206, CONTENT[5:], Content_Range=f"bytes 5-{len(CONTENT) - 1}/{len(CONTENT)}")
    else:
        request.reply(200, CONTENT)


@pytest.mark.parametrize("answer, part, asked", [
    (without_ranges, 1000, ["bytes=1000-"]),
    (other_range, 1000, ["bytes=1000-", None]),
    (whole, 300_000, ["bytes=300000-", None]),  # of unknown size
    (whole, 400_000, ["bytes=400000-", None]),
])  # fmt: skip
def test_what_cannot_be_resumed_starts_anew(tmp_path, server, answer, part, asked):
    server.answer = answer
    (tmp_path / "a.zip.part").write_bytes(bytes(part))
    fetch(server.url, tmp_path / "a.zip", digest=SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT and server.asked == asked


def test_servers_that_are_busy_or_slow_or_tell_no_length(tmp_path, server, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", 0.3)

    def busy(request):
        if len(server.asked) < 3:
            request.reply(503, b"later")
        elif len(server.asked) == 3:
            time.sleep(0.6)
        elif len(server.asked) == 4:
            request.reply(301, Location="/elsewhere")
        else:
            request.reply(200, CONTENT, Content_Length=None)

    server.answer = busy
    fetch(server.url, tmp_path / "a.zip", None, SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT and len(server.asked) == 5


def redirected(to):
    return lambda request: request.reply(302, Location=to)


HTML = b"<!DOCTYPE html><html>Google Drive - Virus scan warning</html>"
FAULTS = [
    (lambda r: r.reply(200, CONTENT[1:]), {"digest": SHA256},
     "a.zip: sha256 is {bad}..., published is {good}...; what 127.0.0.1 sent is deleted, run again or fetch it by hand", 1),
    (lambda r: r.reply(200, CONTENT[1:]), {"size": 300_000},
     "a.zip.part: 127.0.0.1 sends 299999 bytes, expected 300000; fetch it by hand", 1),
    (lambda r: r.reply(200, CONTENT, Content_Length=None), {"size": 1000},
     "a.zip.part: 127.0.0.1 sends more than 1000 bytes; fetch it by hand", 1),
    (lambda r: r.reply(200, HTML), {"size": 300_000},
     "a.zip.part: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again", 1),
    (lambda r: r.reply(200, b""), {"size": 300_000},
     "a.zip: 0 bytes, expected 300000; what 127.0.0.1 sent is deleted, run again or fetch it by hand", 1),
    (lambda r: r.reply(404), {}, "a.zip.part: 127.0.0.1 answers 404, Not Found; fetch it by hand", 1),
    (lambda r: r.reply(503), {},
     "a.zip.part: 127.0.0.1 answers 503 Service Unavailable, 5 times; run again to go on from here, or fetch it by hand", 5),
    (redirected("file:///etc/passwd"), {},
     "a.zip.part: 127.0.0.1 answers 302, a redirection that is not followed; fetch it by hand", 1),
    (redirected("ftp://127.0.0.1/x"), {},
     "a.zip.part: 127.0.0.1 answers 302, a redirection that is not followed; fetch it by hand", 1),
    (redirected("/data.zip"), {},
     "a.zip.part: 127.0.0.1 answers 302, a redirection that is not followed; fetch it by hand", None),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_faults_of_a_download_are_one_line_and_leave_nothing(tmp_path, server, number):
    server.answer, known, message, tries = FAULTS[number]
    line = fault(lambda: fetch(server.url, tmp_path / "a.zip", **known))
    bad = hashlib.sha256(CONTENT[1:]).hexdigest()[:12]
    assert line == f"{tmp_path}/" + message.format(bad=bad, good=SHA256[7:19])
    assert not list(tmp_path.iterdir()) and len(server.asked) == (tries or len(server.asked))


def test_a_body_that_is_always_short_is_given_up_and_kept(tmp_path, server):
    server.answer = lambda request: request.reply(200, CONTENT[:50], Content_Length=100)
    line = fault(lambda: fetch(server.url, tmp_path / "a.zip"))
    short = "the connection ended after 50 of 100 bytes, 5 times"
    assert line == f"{tmp_path}/a.zip.part: {short}; run again to go on from here, or fetch it by hand"
    assert tree(tmp_path) == {"a.zip.part": CONTENT[:50]} and len(server.asked) == 5


def test_a_server_that_never_lets_a_download_go_on_is_given_up(tmp_path, server):
    cut = broken_off(1000)
    server.answer = lambda request: request.reply(416) if request.start() else cut(request)
    line = fault(lambda: fetch(server.url, tmp_path / "a.zip"))
    assert "5 times; run again to go on from here" in line
    assert server.asked == [None, "bytes=1000-", None, "bytes=1000-", None]


def test_nobody_answers(tmp_path, server):
    url = server.url
    server.server_close()
    line = fault(lambda: fetch(url, tmp_path / "a.zip"))
    assert "a.zip.part: 127.0.0.1: Connection refused, 5 times; run again" in line and not list(tmp_path.iterdir())


def test_files_and_other_addresses(tmp_path):
    (tmp_path / "there").write_bytes(CONTENT)
    fetch((tmp_path / "there").as_uri(), tmp_path / "a.zip", len(CONTENT), MD5)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    missing = fault(lambda: fetch((tmp_path / "none").as_uri(), tmp_path / "b.zip"))
    assert "b.zip.part: file:" in missing and "(No such file or directory); fetch it by hand" in missing
    other = fault(lambda: fetch("ftp://host/x.zip", tmp_path / "b.zip"))
    assert other == f"{tmp_path}/b.zip: host is not an https, http or file address; fetch it by hand"


def test_a_full_disk_keeps_what_came(tmp_path, server, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    line = fault(lambda: fetch(server.url, tmp_path / "a.zip"))
    assert line == f"{tmp_path}/a.zip: No space left on device; free some space and run the same command again"
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip.part"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    line = fault(lambda: fetch(server.url, tmp_path / "b.zip"))
    assert line == f"{tmp_path}/b.zip.part: needs 0.0 GB in {tmp_path}, which has 0.0 GB left; make room"


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


def test_prepare_downloads_what_is_published(tmp_path, monkeypatch, server):
    raws.write_femnist(tmp_path / "a")
    content = pack_folder(tmp_path / "x.zip", tmp_path / "a" / "femnist", "femnist/").read_bytes()
    server.answer = lambda request: request.reply(200, content)
    known = len(content), f"sha256:{hashlib.sha256(content).hexdigest()}"
    file = prepare.Download("femnist", "femnist.zip", server.url, *known)
    monkeypatch.setattr(prepare, "PUBLISHED", {"femnist": (file,)})
    arguments = ("--benchmark=femnist", "--download", f"--raw_dir={tmp_path}/raw")
    output = command(monkeypatch, *arguments, f"--data_dir={tmp_path}/data")
    assert f"{tmp_path}/raw/femnist.zip: fetching {server.url}\n" in output and "sha256 " in output
    (tmp_path / "raw" / "femnist.zip").unlink()
    command(monkeypatch, *arguments, f"--data_dir={tmp_path}/again")
    assert len(server.asked) == 1  # what is extracted is not fetched again
    (tmp_path / "file").write_text("")
    line = command(monkeypatch, *arguments[:2], f"--raw_dir={tmp_path}/file", f"--data_dir={tmp_path}/c", code=2)
    assert line == f"error: --raw_dir={tmp_path}/file: File exists; give a folder that can be written to\n"


@pytest.mark.parametrize("benchmark", sorted(set(READERS) - set(prepare.PUBLISHED)))
def test_download_says_what_to_do_where_no_address_is_known(tmp_path, monkeypatch, benchmark):
    line = command(monkeypatch, f"--benchmark={benchmark}", "--download", f"--raw_dir={tmp_path}/r",
                   f"--data_dir={tmp_path}/d", code=2)  # fmt: skip
    assert line == f"error: --download: no address of {benchmark} is known; {prepare.BY_HAND[benchmark]}\n"
    assert len(line) <= 200 and not list(tmp_path.iterdir())


def test_what_is_published_is_what_tensorflow_datasets_states():
    folder = Path(pytest.importorskip("tensorflow_datasets").__file__).parent / "url_checksums"
    lines = [
        line.split("\t")
        for name in ("cifar10", "cifar10_corrupted")
        for line in (folder / f"{name}.txt").read_text().splitlines()
    ]
    stated = {url: (int(size), f"sha256:{digest}") for url, size, digest, _ in lines}
    for download in prepare.PUBLISHED["cifar_c"]:
        assert stated[download.url] == (download.size, download.digest)
