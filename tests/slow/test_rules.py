"""The three rules of docs/reliability.md, over all commands."""

import json
import shutil

import pytest

from cxda_jax.__main__ import COMMANDS
from cxda_jax.disk import manifest, models
from tests.commands import TOOLS, command
from tests.fast.test_records import runs  # noqa: F401
from tests.lines import flip, write_run
from tests.raw_fixtures import write_images


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos", 3, 0)


def adapting(model, photos, out):
    return "adapt", f"--model={model}", f"--buffer={photos}", f"--images={photos}", f"--out={out}"


def test_what_is_replaced_is_ours(tmp_path, photos, runs, data_dir):
    """Each command that writes meets a file of somebody else under the name of one of its own, and leaves it."""
    report = "report", f"--runs={tmp_path}/runs/*/*", f"--report={tmp_path}/out"
    compiled = "ahead", "--config=cifar_c:cxda,smoke", "--topology=v5e:1x1"
    # The first two write into runs, whose lock and manifest are theirs; the others write nothing.
    walked = {"evaluate", "reproduce", "doctor", "diagnose"}
    for name, arguments in (
        ("predictions.csv", adapting("glyphs", photos, tmp_path / "out")),
        ("adapted.html", adapting("glyphs", photos, tmp_path / "out")),
        ("labels.csv", ("demo", f"--out={tmp_path}/out")),
        ("buffer/mine.png", ("demo", f"--out={tmp_path}/out")),
        ("config.json", ("train", "--config=glyphs:erm,smoke", f"--workdir={tmp_path}/out")),
        ("weights.safetensors", ("export", "--model=glyphs", "--format=jax", f"--out={tmp_path}/out")),
        ("index.html", ("export", "--model=unipen", "--format=web", f"--out={tmp_path}/out")),
        ("store.json", ("prepare", "--benchmark=folder", f"--raw_dir={tmp_path}", "--name=out")),
        ("report.html", report),
        ("a.records", (*report[:2], f"--report={tmp_path}/new", f"--record={tmp_path}/out/a.records")),
        ("a.npz", ("features", "--encoder=math:floor", f"--images={photos.parent}", f"--out={tmp_path}/out/a.npz")),
        ("card.json", ("fit", f"--features={tmp_path}/features.npz", f"--out={tmp_path}/out")),
        ("a.json", ("bench", "--suite=gpu", f"--out={tmp_path}/out/a.json")),
        ("a.json", (*compiled, f"--out={tmp_path}/out/a.json")),
    ):
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        where = tmp_path if arguments[0] == "prepare" else data_dir
        said = command(*arguments, f"--data_dir={where}", code=2)
        assert path.name in said and path.read_text() == "mine", said
        walked.add(arguments[0])
        shutil.rmtree(tmp_path / "out")
    assert walked == {*COMMANDS, *TOOLS}


def test_a_second_call_says_what_it_does_with_the_first(tmp_path, photos, smoke):
    """With other arguments, in the same folder. Tests of train, demo, prepare, reproduce and export have theirs."""
    copied = shutil.copytree(smoke[0] / "run", tmp_path / "run")
    again = command("evaluate", f"--runs={copied}", "--num_tasks=5", f"--data_dir={smoke[0]}/data")
    assert "result.json: replaces that of" in again
    command(*adapting("glyphs", photos, tmp_path / "out"))
    again = command(*adapting("unipen", photos, tmp_path / "out"))
    assert all(f"{tmp_path}/out/{name}: replaces" in again for name in ("predictions.csv", "adapted.html"))
    report = "report", f"--runs={copied}", f"--report={tmp_path}/report"
    command(*report)
    assert f"{tmp_path}/report/report.html: replaces" in command(*report, "--against=paper")


def test_a_reader_says_what_is_checked_and_not_what_was_sent(tmp_path, photos, smoke):
    """A manifest that does not list the damaged file, beside it."""
    where, model = f"--data_dir={smoke[0]}/data", shutil.copytree(smoke[0] / "run" / "model", tmp_path / "model")
    flip(model / models.WEIGHTS)
    content = json.loads((model / manifest.NAME).read_text())
    manifest.write(model, [name for name in content["sha256"] if name != models.WEIGHTS], about=content["about"])
    for arguments in (
        adapting(model, photos, tmp_path / "out"),
        ("export", f"--model={model}", "--format=jax", f"--out={tmp_path}/out", f"--check_images={photos}"),
        ("evaluate", f"--runs={model}", where),
    ):
        assert "weights.safetensors differs from its recorded hash" in command(*arguments, code=2)
    write_run(tmp_path / "a")
    (tmp_path / "a" / manifest.NAME).write_text(json.dumps({"format": 1, "sha256": {}}))
    said = command("report", f"--runs={tmp_path}/a", f"--report={tmp_path}/report", code=2)
    assert "config.json differs from its recorded hash" in said
