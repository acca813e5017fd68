"""What a run of the tests costs is counted, and what one run compiled is kept for the next."""

import os
import zlib

from tests import compiled


def test_a_kept_program_is_taken_again_and_what_is_broken_is_not(tmp_path):
    run, cache, entries = tmp_path / "run", tmp_path / "cache", {}
    run.mkdir()
    for name in ("one", "two"):
        entries[f"jit_{name}-1-cache"] = zlib.compress(name.encode() * 99)
        (run / f"jit_{name}-1-cache").write_bytes(entries[f"jit_{name}-1-cache"])
    (run / "jit_half-1-cache").write_bytes(zlib.compress(b"half" * 99)[:-3])  # its process was killed
    (run / "jit_other-1-cache").write_bytes(b"no stream")
    (run / "jit_one-1-atime").write_bytes(b"")
    assert compiled.take(tmp_path / "cold", cache) == 0
    assert (compiled.keep(run, cache), compiled.keep(run, cache)) == (2, 0)

    def taken(folder):
        assert compiled.take(folder, cache) == len(list(folder.iterdir()))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert taken(tmp_path / "warm") == entries
    first = next(cache.glob("jit_one*"))
    first.write_bytes(first.read_bytes()[:-1])
    (cache / "foreign").write_bytes(b"x")
    (cache / "folder").mkdir()
    assert taken(tmp_path / "again") == {"jit_two-1-cache": entries["jit_two-1-cache"]}
    assert not first.exists() and not (cache / "foreign").exists()
    old = next(cache.glob("jit_two*"))
    os.utime(old, (0, 0))
    assert taken(tmp_path / "old") == {} and not old.exists()
