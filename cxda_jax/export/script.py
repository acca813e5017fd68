"""An adapter as one file of JavaScript, which takes what a classifier says of images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cxda_jax.adapter.adapter import SIZES
from cxda_jax.device.attached import Attached
from cxda_jax.disk import files, safetensors
from cxda_jax.export.web import LIVE, ask_node, packed
from cxda_jax.methods.cxda_shares import ADAPTER_DEFAULTS
from cxda_jax.nets.shares import ShareAdapter
from cxda_jax.pages.document import in_script

SCRIPT = "adapter.js"
ASK = """
const { adapter } = require(process.argv[1]);
const tasks = JSON.parse(require("node:fs").readFileSync(process.argv[2], "utf8"));
const split = (row) => ({ logits: row.slice(0, CLASSES), style: row.slice(CLASSES) });
console.log(JSON.stringify(tasks.map(([support, query]) => {
  const buffer = adapter.remember(support.map(split));
  return query.map((row) => adapter.answer(buffer, split(row)).logits);
})));
"""


def write(model: Attached, folder: Path) -> None:
    """Writes adapter.js into the folder."""
    tensors, weights = packed(safetensors.named(model.variables))
    known = {
        "steps": ADAPTER_DEFAULTS.em_steps, "most": ShareAdapter.most, "tensors": tensors, "weights": weights,
        "classes": model.card.class_names,
        "temperatures": [[n, model.adapter.temperature(n)] for n in SIZES],
    }  # fmt: skip
    scripts = [(LIVE / name).read_text(encoding="utf-8") for name in ("shares.js", "adapter.js")]
    made = [
        f"const adapter = new Adapter({in_script(known)});",
        'if (typeof module === "object") module.exports = { adapter };\n',
    ]
    files.write_text(folder / SCRIPT, "\n".join([*scripts, *made]))


def answers(model: Attached, folder: Path, tasks: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """The logits of the script in Node.js for tasks of rows, support [n, columns] and query [m, columns]."""
    questions = [[part.tolist() for part in task] for task in tasks]
    ask = ASK.replace("CLASSES", str(model.adapter.classes))
    return [np.array(each) for each in ask_node("javascript", ["-e", ask, (folder / SCRIPT).resolve()], questions)]
