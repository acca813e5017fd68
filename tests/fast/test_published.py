"""Published data: their counts, which readers compare with and plans take, and how to fetch them."""

import hashlib

from cxda_jax.studies import preparing
from tests.commands import command


def test_missing_files_get_a_command_and_others_are_checked(tmp_path, monkeypatch):
    content, raw = b"data" * 100, tmp_path / "raw files"
    files = [preparing.Download(name, f"https://a/{name}.zip", 400, hashlib.sha256(content).hexdigest())
             for name in ("whole", "part", "extracted")]  # fmt: skip
    monkeypatch.setattr(preparing, "DOWNLOADS", {"femnist": files})
    (raw / "extracted").mkdir(parents=True)
    (raw / "whole.zip").write_bytes(content)
    (raw / "part.zip").write_bytes(content[:7])
    arguments = ("--benchmark=femnist", "--links", f"--raw_dir={raw}")
    assert command("prepare", *arguments).splitlines() == [
        f"{raw}/whole.zip: has the published size and hash",
        f"curl -L -C - --create-dirs -o '{raw}/part.zip' https://a/part.zip",
        f"{raw}/extracted: is there",
    ]
    (raw / "whole.zip").write_bytes(content[:-1] + b"!")
    assert "whole.zip: not the published file" in command("prepare", *arguments, code=2)
