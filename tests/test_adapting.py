"""`cxda adapt` and `cxda demo`: what they write, what they leave out, when they fall back, and what a user gets wrong."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

import cxda_jax
from cxda_jax.device import adapting
from cxda_jax.disk import models
from cxda_jax.errors import UserError
from tests.commands import command

RNG = np.random.default_rng(0)


def write_images(folder, count, seed=0):
    """Characters-like images of mixed sizes and kinds."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        height, width = rng.integers(10, 60, 2)
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        kind = ("png", "jpg", "webp", "bmp", "tif")[i % 5]
        Image.fromarray(pixels).save(folder / f"image{i:03d}.{kind}")
    return folder


@pytest.fixture(scope="module")
def model(smoke, tmp_path_factory):
    """A model whose card says that adapting helps from 5 images on."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(smoke[0] / "run" / "model", folder)
    change_gain(folder, (0.0, -1.0, 0.5, 2.0), (0, 1, 5, 100))
    return folder


def change_gain(folder, means, sizes):
    import json

    from cxda_jax.disk import manifest

    card = json.loads((folder / models.CARD).read_text())
    card["gain"] = {**dict.fromkeys(("score", "mean", "low", "high"), means), "sizes": sizes, "tasks": 4}
    (folder / models.CARD).write_text(json.dumps(card))
    manifest.write(folder, [path.name for path in folder.iterdir() if path.name != manifest.NAME])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    return write_images(root / "buffer", 12, 1), write_images(root / "images", 70, 2)


def row_that_moved(far):
    return adapting.Row(adapting.Answered("", RNG, "", 0, "", 0, float(far), ()), None)


def read(out):
    with open(out / "predictions.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def adapt(model, buffer, images, out, *flags, code=0):
    return command(
        "adapt", f"--model={model}", f"--buffer={buffer}", f"--images={images}", f"--out={out}", *flags, code=code
    )


def test_the_csv_says_what_the_model_says(model, folders, tmp_path):
    buffer, images = folders
    said = adapt(model, buffer, images, tmp_path / "out")
    rows, loaded = read(tmp_path / "out"), cxda_jax.load(model)
    files = sorted(images.iterdir())
    assert [row["file"] for row in rows] == [path.name for path in files] and len(rows) == 70
    held = sorted(buffer.iterdir())
    before, adapted = loaded.predict(files), loaded.adapt(held)
    after, weights = adapted.predict(files), adapted.attention(files).mean(1)
    for i, row in enumerate(rows):
        assert (row["before"], row["after"], row["answer"]) == (before.names[i], after.names[i], after.names[i])
        assert abs(float(row["before_confidence"]) - before.confidences[i]) < 1e-4
        assert abs(float(row["after_confidence"]) - after.confidences[i]) < 1e-4
        gap = 0.5 * np.abs(before.probabilities[i] - after.probabilities[i]).sum()
        assert abs(float(row["moved"]) - gap) < 1e-4
        assert row["nearest_1"] == held[weights[i].argmax()].name
    assert "adapting cxda (glyphs" in said and "to 12 images" in said
    assert "With 5 images, adapting brought +0.5 points" in said and "so the adapted answer counts" in said
    page = (tmp_path / "out" / "adapted.html").read_text()
    assert all(path.name in page for path in (*files, *held))


def test_it_falls_back_below_the_size_where_adapting_helped(model, folders, tmp_path):
    buffer, images = write_images(tmp_path / "few", 3), folders[1]
    said = adapt(model, buffer, images, tmp_path / "out")
    assert "It helps from 5 images on, here are 3, so the answer without it counts" in said
    assert all(row["answer"] == row["before"] for row in read(tmp_path / "out"))
    adapt(model, buffer, images, tmp_path / "always", "--always")
    rows = read(tmp_path / "always")
    assert all(row["answer"] == row["after"] for row in rows)
    assert [row["after"] for row in rows] == [row["after"] for row in read(tmp_path / "out")]
    (tmp_path / "none").mkdir()
    assert "here are 0" in adapt(model, tmp_path / "none", images, tmp_path / "empty")
    rows = read(tmp_path / "empty")
    assert all(row["moved"] == "0.0000" and row["nearest_1"] == "" for row in rows)


def test_a_method_that_never_helped_is_not_taken(model, folders, tmp_path):
    shutil.copytree(model, tmp_path / "it")
    change_gain(tmp_path / "it", (0.0, 2.0, 0.5, -0.1), (0, 1, 5, 100))
    said = adapt(tmp_path / "it", *folders, tmp_path / "out")
    assert "did not help at the largest size, so the answer without it counts" in said


def test_labels_give_scores(model, folders, tmp_path):
    buffer, images = folders
    adapt(model, buffer, images, tmp_path / "out")
    rows, labels = read(tmp_path / "out"), tmp_path / "labels.csv"
    labels.write_text("file,label\n" + "".join(f"{row['file']},{row['after']}\n" for row in rows[:20]))
    said = adapt(model, buffer, images, tmp_path / "scored", f"--labels={labels}")
    right = np.mean([row["before"] == row["after"] for row in rows[:20]])
    assert f"Right of 20 with labels: before {100 * right:.1f} %, after 100.0 %" in said
    assert sum(row["label"] != "" for row in read(tmp_path / "scored")) == 20
    labels.write_text("file,label\na.png,house\n")
    assert "labels.csv, line 2: label='house' is no class of the model" in adapt(
        model, buffer, images, tmp_path / "wrong", f"--labels={labels}", code=2
    )


def test_what_cannot_be_read_is_named_and_left_out(model, folders, tmp_path):
    images = shutil.copytree(folders[1], tmp_path / "images")
    (images / "broken.jpg").write_bytes((images / "image001.jpg").read_bytes()[:200])
    (images / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (images / "notes.txt").write_text("no image")
    (images / ".hidden.png").write_bytes(b"")
    (images / "folder").mkdir()
    shutil.copy(images / "image000.png", images / "folder" / "inner.png")
    said = adapt(model, folders[0], images, tmp_path / "out")
    files = [row["file"] for row in read(tmp_path / "out")]
    assert len(files) == 71 and "folder/inner.png" in files and "notes.txt" not in files
    assert re.search(r"left out: .*broken.jpg: not readable as an image", said)
    assert re.search(r"left out: .*phone.heic: HEIC needs a decoder: pip install pillow-heif", said)
    page = (tmp_path / "out" / "adapted.html").read_text()
    assert "broken.jpg" in page and "pillow-heif" in page


def test_a_large_buffer_counts_its_newest_images(model, folders, tmp_path):
    buffer = shutil.copytree(folders[0], tmp_path / "buffer")
    for i, path in enumerate(sorted(buffer.iterdir())):
        os.utime(path, (1000 + (i * 5) % 12, 1000 + (i * 5) % 12))
    newest = sorted(sorted(buffer.iterdir(), key=lambda p: p.stat().st_mtime)[-4:])
    assert "the newest 4 of 12 images count" in adapt(model, buffer, folders[1], tmp_path / "out", "--capacity=4")
    named = {row[f"nearest_{i}"] for row in read(tmp_path / "out") for i in range(1, 6)} - {""}
    assert named == {path.name for path in newest}


def test_many_images_take_no_more_memory(model, folders, tmp_path):
    """Rows come one after another; 64 images at a time are held."""
    loaded = cxda_jax.load(model)
    faults, most, live = [], 0, []

    class Watched(np.ndarray):
        pass

    paths = sorted(folders[1].iterdir()) * 6
    rows = adapting.answered(loaded, loaded, paths, folders[1], {}, faults)
    for row in rows:
        live.append(row.answer.image.nbytes)
        most = max(most, row.answer.image.nbytes)
    assert len(live) == 420 and not faults and most == 28 * 28
    shown = []
    for i in range(1000):
        adapting.keep_most_moved(shown, i, row_that_moved((i * 7) % 1000))
    assert sorted(row.answer.moved for *_, row in shown) == [float(i) for i in range(800, 1000)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--buffer=X", "--images=X", "--out=X"], "--model is missing; give a run of launch.train"),
        (["--model=nothing", "--buffer=X", "--images=X", "--out=X"], "nothing: no such folder; give a run of cxda train"),
        (["--model=MODEL", "--images=X", "--out=X"], "--buffer is missing"),
        (["--model=MODEL", "--buffer=NONE", "--images=IMAGES", "--out=X"], "NONE: no such folder; give one that holds images"),
        (["--model=MODEL", "--buffer=IMAGES", "--images=EMPTY", "--out=X"], "no images in it; answered are files that end in"),
        (["--model=MODEL", "--buffer=IMAGES", "--out=X"], "--images is missing"),
        (["--model=MODEL", "--method=t3a", "--buffer=IMAGES", "--images=IMAGES", "--out=X"], "trained as cxda, from which it cannot"),
        (["--model=MODEL", "--buffer=IMAGES", "--images=IMAGES", "--watch", "--out=X"], "--watch answers for the images of --buffer"),
        (["--model=MODEL", "--buffer=IMAGES", "--images=BAD", "--out=X"], "none of 1 could be read; the first: "),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(model, folders, tmp_path, flags, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BAD").mkdir()
    (tmp_path / "BAD" / "it.png").write_bytes(b"nothing")
    places = {"MODEL": model, "IMAGES": folders[1], **{name: tmp_path / name for name in ("EMPTY", "BAD", "NONE", "X")}}
    given = [re.sub(r"=([A-Z]+)$", lambda m: f"={places[m[1]]}", flag) for flag in flags]
    said = command("adapt", *given, code=2)
    assert message in said.replace(f"{tmp_path}/", "") and said.count("\n") == 1


def test_a_folder_that_fills_is_followed(model, tmp_path):
    incoming = tmp_path / "incoming"
    incoming.mkdir()

    made = sorted(write_images(tmp_path / "made", 4, 7).iterdir())

    def fill():
        for path in made:
            time.sleep(0.3)
            shutil.copy(path, incoming)
        (incoming / "broken.png").write_bytes(b"nothing")

    thread = threading.Thread(target=fill)
    thread.start()
    said = command("adapt", f"--model={model}", f"--buffer={incoming}", "--watch", "--idle=3", f"--out={tmp_path}/out")
    thread.join()
    rows, loaded = read(tmp_path / "out"), cxda_jax.load(model)
    assert [row["file"] for row in rows] == [
        f"image{i:03d}.{kind}" for i, kind in enumerate(("png", "jpg", "webp", "bmp"))
    ]
    paths = [incoming / row["file"] for row in rows]
    for i, row in enumerate(rows):  # each is answered for with those before it
        assert row["after"] == loaded.adapt(paths[:i]).predict([paths[i]]).names[0]
        assert row["answer"] == row["before"], "so few images do not help this model"
    assert "left out: " in said and "4 images in the buffer" in said
    assert "broken.png" in (tmp_path / "out" / "adapted.html").read_text()


def test_seconds_that_an_answer_takes_are_not_idle(model, tmp_path, monkeypatch):
    first, second = sorted(write_images(tmp_path / "made", 2).iterdir())
    (incoming := tmp_path / "incoming").mkdir()
    shutil.copy(first, incoming)
    rows_of = adapting.rows_of

    def slow(*arguments):
        if not (incoming / second.name).exists():
            time.sleep(1.5)
            shutil.copy(second, incoming)
        return rows_of(*arguments)

    monkeypatch.setattr(adapting, "rows_of", slow)
    command("adapt", f"--model={model}", f"--buffer={incoming}", "--watch", "--idle=1", f"--out={tmp_path}/out")
    assert [row["file"] for row in read(tmp_path / "out")] == [first.name, second.name]


def test_a_file_that_comes_slowly_is_answered_for_once_it_is_whole(model, tmp_path):
    whole = write_images(tmp_path / "made", 1) / "image000.png"
    (incoming := tmp_path / "incoming").mkdir()
    content, path = whole.read_bytes(), incoming / "slow.png"
    path.write_bytes(content[:60])
    flags = [f"--model={model}", f"--buffer={incoming}", "--watch", "--idle=3", f"--out={tmp_path}/out"]
    with subprocess.Popen(
        [sys.executable, "-m", "cxda_jax", "adapt", *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        said = ""
        while "left out: " not in said and process.poll() is None:
            said += process.stdout.readline()
        path.write_bytes(content)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 0 and said.count("left out: ") == 1
    assert [row["file"] for row in read(tmp_path / "out")] == ["slow.png"]
    assert "not readable" not in (tmp_path / "out" / "adapted.html").read_text()


def test_ctrl_c_ends_following_with_a_page(model, tmp_path):
    incoming = write_images(tmp_path / "incoming", 2)
    shutil.copy(incoming / "image000.png", os.fsencode(incoming) + b"/odd\xe9.png")
    flags = [f"--model={model}", f"--buffer={incoming}", "--watch", f"--out={tmp_path}/out"]
    with subprocess.Popen(
        [sys.executable, "-m", "cxda_jax", "adapt", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said = ""
        while "3 images in the buffer" not in said and process.poll() is None:
            said += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, faults = process.communicate(timeout=60)
    assert process.returncode == 0 and "goes on from there" not in faults, faults
    assert "adapted.html: 3 images" in rest
    assert len(read(tmp_path / "out")) == 3 and (tmp_path / "out" / "adapted.html").exists()


def test_the_demo_shows_a_page_in_seconds(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cxda_jax", "demo", f"--out={tmp_path}/demo"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert "Right of 300 with labels: before" in done.stdout and "left out" not in done.stdout
    page = (tmp_path / "demo" / "adapted.html").read_text()
    assert len(read(tmp_path / "demo")) == 300 and "writer4" in page and "✓" in page


def test_the_model_of_the_package_gains_on_new_writers():
    """Over five demonstrations the adapted answers are better; each has five writers and 300 questions."""
    from cxda_jax.data import glyphs
    from cxda_jax.device import demo

    model, gaps = cxda_jax.load("glyphs"), []
    assert model.card.gain and model.card.gain.helps_from()
    for seed in range(5):
        drawn = list(glyphs.domains(demo.FIRST_SEED + seed, (0, 0, demo.WRITERS), demo.OF_EACH + demo.ASKED))
        support = np.concatenate([domain.images[: demo.OF_EACH] for domain in drawn])
        query = np.concatenate([domain.images[demo.OF_EACH :] for domain in drawn])
        labels = [glyphs.CHARACTERS[n] for domain in drawn for n in domain.labels[demo.OF_EACH :]]
        right = [
            np.mean([a == b for a, b in zip(m.predict(query).names, labels, strict=True)])
            for m in (model, model.adapt(support))
        ]
        gaps.append(right[1] - right[0])
    assert np.mean(gaps) > 0.005


def test_a_gain_is_expected_from_the_nearest_smaller_size(model):
    loaded = cxda_jax.load(model)
    for count, helps, said in (
        (0, False, "With 0 images"),
        (4, False, "With 1 images"),
        (5, True, "With 5"),
        (700, True, "With 100"),
    ):
        answer, sentence = adapting.expected(loaded, count)
        assert answer is helps and sentence.startswith(said)
    loaded.card = loaded.card._replace(gain=None)
    assert adapting.expected(loaded, 0)[0] and "was not measured" in adapting.expected(loaded, 0)[1]
    with pytest.raises(UserError, match="no such folder"):
        adapting.listed(model / "none")
