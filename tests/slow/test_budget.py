"""What a run of the tests costs is counted, and what one run compiled is kept for the next."""

import os
import re
import subprocess
import sys

from tests.lines import ROOT


def test_a_program_has_one_name_in_the_folder_of_every_run(tmp_path):
    told = re.findall(r"^export (JAX_\w+)=(\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    script = [sys.executable, "-c", "import jax, numpy as np; jax.jit(lambda x: 2 * x)(np.ones(3))"]
    for folder in "ab":
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / folder)}
        subprocess.run(script, env=os.environ | dict(told) | cache, check=True)
    one, other = ([path.name for path in (tmp_path / folder).glob("*-cache")] for folder in "ab")
    assert one == other and len(one) == 1
