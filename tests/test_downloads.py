"""Published files: how to fetch them, and whether those that are there are the published ones."""

import hashlib
from pathlib import Path

import pytest

from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests.commands import command


def test_missing_files_get_a_command_and_others_are_checked(tmp_path, monkeypatch):
    content, raw = b"data" * 100, tmp_path / "raw files"
    files = [preparing.Download(name, f"https://a/{name}.zip", 400, hashlib.sha256(content).hexdigest())
             for name in ("whole", "part", "missing", "extracted")]  # fmt: skip
    monkeypatch.setattr(preparing, "PUBLISHED", {"femnist": files})
    (raw / "extracted").mkdir(parents=True)
    (raw / "whole.zip").write_bytes(content)
    (raw / "part.zip").write_bytes(content[:7])
    arguments = ("--benchmark=femnist", "--links", f"--raw_dir={raw}")
    assert command("prepare", *arguments).splitlines() == [
        f"{raw}/whole.zip: has the published size and hash",
        f"curl -L -C - --create-dirs -o '{raw}/part.zip' https://a/part.zip",
        f"curl -L -C - --create-dirs -o '{raw}/missing.zip' https://a/missing.zip",
        f"{raw}/extracted: is there",
    ]
    for other in (content[:-1] + b"!", content + b"!"):
        (raw / "whole.zip").write_bytes(other)
        assert "whole.zip: not the published file" in command("prepare", *arguments, code=2)


@pytest.mark.parametrize("benchmark", [*sorted(set(READERS) - set(preparing.PUBLISHED)), "mine"])
def test_where_no_address_is_known_it_says_what_to_do(tmp_path, monkeypatch, benchmark):
    monkeypatch.setitem(READERS, "mine", READERS["femnist"])  # a reader that nobody listed
    line = command("prepare", f"--benchmark={benchmark}", "--links", f"--raw_dir={tmp_path}/r", code=2)
    assert line.startswith(f"error: --links: no address of {benchmark} is known; ")
    assert preparing.BY_HAND.get(benchmark, "by hand") in line
    assert line.count("\n") == 1 and len(line) <= 200 and not list(tmp_path.iterdir())


def test_what_is_published_is_what_tensorflow_datasets_states():
    folder = Path(pytest.importorskip("tensorflow_datasets").__file__).parent / "url_checksums"
    files = (folder / "cifar10.txt", folder / "cifar10_corrupted.txt")
    lines = [line.split("\t") for file in files for line in file.read_text().splitlines()]
    stated = {url: (int(size), digest) for url, size, digest, _ in lines}
    for download in preparing.PUBLISHED["cifar_c"]:
        assert stated[download.url] == (download.size, download.sha256)
