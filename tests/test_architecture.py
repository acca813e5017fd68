"""Imports run one way, and heavy or optional packages stay inside the functions that need them."""

import ast
import functools
import tomllib

from tests.lines import ROOT

# Each part may import those named here, and itself. LIBRARY stands for all before it.
ALLOWED = """
errors:
version:
stops:
types:
losses:
extensions: errors
fields: errors
registry: extensions fields methods
config: errors fields registry
machine: errors progress stops
metrics: errors
optimizers: errors fields
augment: errors types fields
disk: errors types fields
progress: errors disk
nets: errors extensions types machine fields disk
data: errors types fields disk machine progress
methods: errors types augment machine fields losses nets optimizers
train: errors types augment machine data disk progress
evaluation: errors types machine data metrics
experiment: errors types augment machine disk config fields registry data metrics nets optimizers train
results: errors fields config registry methods data disk metrics experiment pictures progress
runs: LIBRARY pictures results
fitted: errors fields types machine disk metrics nets methods
labels_alone: types machine losses methods nets
judging: errors types machine methods data metrics fitted labels_alone runs
fit_report: results fitted runs
fitting: LIBRARY fitted labels_alone judging fit_report
estimator: errors fitted fitting
encoders: errors fields stops disk data methods fitted
features: errors fields stops disk progress data encoders
ahead: LIBRARY runs
bench: LIBRARY runs
device: LIBRARY stops pictures progress results fitted encoders features
export: LIBRARY pictures device fitted encoders features
pictures: errors disk data
doctor: errors machine
__main__: stops
"""
LIBRARY = {line.partition(":")[0] for line in ALLOWED.partition("\nresults:")[0].split("\n")} - {""}
MAY = {}
for part, others in (line.split(":") for line in ALLOWED.strip().splitlines()):
    MAY[part] = {part, "version", "__version__", *others.split()} | (LIBRARY if "LIBRARY" in others else set())
OPTIONAL = {"tensorflow", "tensorflow_datasets", "torch", "pillow_heif", "wilds", "sklearn", "pandas", "onnx",
            "onnxruntime"}  # fmt: skip
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
        if name != "bench" or not path.name.startswith("torch_"):  # the peers, which are run by name
            assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & OPTIONAL, path
        if name == "__init__":
            continue
        assert {used.split(".")[1] for used in imports(path) if used.startswith("cxda_jax.")} <= MAY[name], path
        outside = {"absl", "launch", "configs", "tests"} | ({"ml_collections"} if name != "config" else set())
        assert not {used.split(".")[0] for used in imports(path)} & outside, path


def test_every_package_and_what_is_no_code_is_installed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES if path.name == "__init__.py"}
    assert set(setup["packages"]) == inside | set(setup["package-dir"])
    places = [(ROOT / package.replace(".", "/"), found) for package, found in setup["package-data"].items()]
    installed = {path for folder, patterns in places for pattern in patterns for path in folder.glob(pattern)}
    others = {p for p in (ROOT / "cxda_jax").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others and others <= installed


def test_nothing_that_is_read_is_run():
    for path in (*FILES, *COMMANDS, *CONFIGS):
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"), path
            assert options.get("allow_pickle", "False") == "False", path
            assert called != "torch.load" or options.get("weights_only") == "True", path
