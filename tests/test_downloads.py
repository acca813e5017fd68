"""Downloads: they arrive checked and go on where they stopped; faults of the server are one line and leave nothing."""

import contextlib
import errno
import hashlib
import os
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cxda_jax.data import archives, downloads
from cxda_jax.data.downloads import fetch
from cxda_jax.experiment import READERS
from launch import prepare
from tests import raw_fixtures as raws
from tests.raw_fixtures import command
from tests.test_archives import fault, pack_folder, tree

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


def test_download_of_a_reader_that_nobody_listed(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "mine", READERS["femnist"])
    line = command(monkeypatch, "--benchmark=mine", "--download", f"--raw_dir={tmp_path}/r", code=2)
    assert line.startswith("error: --download: no address of mine is known; ") and "by hand" in line
    assert line.count("\n") == 1 and not list(tmp_path.iterdir())


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
