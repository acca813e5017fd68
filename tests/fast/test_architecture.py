"""Imports run one way, and heavy or optional packages stay inside the functions that need them."""

import ast
import functools
import re
import tomllib

from tests.lines import ROOT
from tools import mistakes

# Each room may import those named here, and itself. registry.py and reading.py of config/ know the methods, whose files
# need its fields.
ALLOWED = """
errors:
version:
types:
losses:
config: errors methods
disk: errors types config
machine: errors disk
nets: errors types config disk machine
data: errors types config disk machine
methods: errors types losses config data machine nets
pages: errors disk methods
training: errors types losses config data disk machine nets methods
adapter: errors types losses config data disk machine nets methods training pages
studies: errors types losses config data disk machine nets methods training adapter pages
device: errors types losses config data disk machine nets methods training adapter pages
export: errors types losses config data disk machine nets methods training adapter device pages
__main__: machine
"""
MAY = {}

for room, others in (line.split(":") for line in ALLOWED.strip().splitlines()):
    MAY[room] = {room, "version", "__version__", *others.split()}

OPTIONAL = {"tensorflow", "tensorflow_datasets", "torch", "pillow_heif", "wilds", "sklearn", "pandas", "onnx",
            "onnxruntime", "timm", "torchvision", "transformers", "huggingface_hub"}  # fmt: skip
FILES = sorted((ROOT / "cxda_jax").rglob("*.py"))
CONFIGS, COMMANDS = (sorted((ROOT / folder).glob("*.py")) for folder in ("configs", "launch"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def imports(path, top_level_only=False):
    for node in tree(path).body if top_level_only else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "cxda_jax":
            yield from (f"cxda_jax.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_run_one_way_and_optional_packages_where_they_are_used():
    for path in FILES:
        name = path.relative_to(ROOT / "cxda_jax").parts[0].removesuffix(".py")
        assert not {used.split(".")[0] for used in imports(path, top_level_only=True)} & OPTIONAL, path
        if name == "__init__":
            continue
        assert {used.split(".")[1] for used in imports(path) if used.startswith("cxda_jax.")} <= MAY[name], path
        outside = {"absl", "launch", "configs", "tests", "tools"} | ({"ml_collections"} if name != "config" else set())
        assert not {used.split(".")[0] for used in imports(path)} & outside, path


def test_each_mistake_that_tests_should_notice_can_still_be_made():
    mistakes.check(ROOT)


def test_nothing_that_is_read_is_run():
    for path in (*FILES, *COMMANDS, *CONFIGS):
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"), path
            assert options.get("allow_pickle", "False") == "False", path
            assert called != "torch.load" or options.get("weights_only") == "True", path


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
EXTRA = re.compile(r"pip install (?:-q )?(?:-e )?'(?:cxda_jax|\.)\[([\w,]+)\]'")


def test_each_extra_that_is_named_is_there():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.py"), *ROOT.glob("cxda_jax/**/*.py")]
    named = {extra for file in files for both in EXTRA.findall(file.read_text()) for extra in both.split(",")}
    assert named <= {*EXTRAS} and {"onnx", "export", "sklearn", "dev"} <= named
