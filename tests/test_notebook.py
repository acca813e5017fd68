"""The notebook of the documentation runs from its first cell to its last, and makes what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "docs" / "notebooks" / "own_images.ipynb").read_text())
SIZES = [0, 1, 2, 5, 10, 20, 50, 100]


def test_all_cells_run_in_order_and_leave_a_page_and_a_curve(tmp_path):
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    ending = "import json\nPath('curve.json').write_text(json.dumps(list(curve.items())))\n"
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join([*cells, ending]))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [size for size, _ in curve] == SIZES
    assert all(0.5 < share < 1 for _, share in curve), curve
    said = {int(n): float(share) for n, share in re.findall(r"^ *(\d+) images: ([\d.]+) % right$", done.stdout, re.M)}
    assert said == {size: round(100 * share, 1) for size, share in curve}
    assert f"right without adapting: {100 * curve[0][1]:.1f} %" in done.stdout, "an empty buffer changes no answer"
    page = (tmp_path / "adapted" / "adapted.html").read_text()
    assert "What adapting changed: glyphs" in page and "Expected gain by buffer size" in page
    rows = (tmp_path / "adapted" / "predictions.csv").read_text().splitlines()
    assert len(rows) == 301 and rows[0].startswith("file,answer,before,")


def test_the_notebook_is_small_and_bears_no_outputs():
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in NOTEBOOK["cells"])
    assert max(len(cell["source"]) for cell in NOTEBOOK["cells"]) <= 15
