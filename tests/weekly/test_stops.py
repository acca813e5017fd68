"""Ctrl-C and SIGTERM: they end a command at once while it is imported, and get a line while it has work to save."""

import os
import signal
import subprocess
import sys
import textwrap

from cxda_jax.machine import stops
from tests.lines import ROOT


def test_a_signal_while_imports_run_is_one_line(tmp_path):
    """Also where the import swallows whatever is raised in it."""
    sent = signal.SIGTERM
    code = f"""
        import os, time
        try:
            os.kill(os.getpid(), {int(sent)})
            time.sleep(1)
        except BaseException:
            pass
        raise SystemExit("the signal was swallowed")
    """
    (tmp_path / "jax.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config=configs/glyphs.py:cxda,smoke", f"--workdir={tmp_path}/w"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + sent, "")
    assert done.stderr == stops.EARLY.format(sent.name) + "\n"
