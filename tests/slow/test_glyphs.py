"""The rendered benchmark: who writes what, with which face, and what the drawings look like."""

import numpy as np
import pytest

from cxda_jax.data import glyphs

TINY = {"writers": (13, 3, 5), "drawings": 30}


@pytest.fixture(scope="module")
def writers():
    return list(glyphs.domains(**TINY))


def test_shapes_splits_labels_and_held_out_faces(writers):
    assert [w.split for w in writers] == ["train"] * 13 + ["val"] * 3 + ["test"] * 5
    for writer in writers:
        assert writer.images.shape == (30, 28, 28, 1) and writer.images.dtype == np.uint8
    names = glyphs.INFO.class_names
    assert len(names) == 62 and names[10] == "A" and names[36] == "a"
    assert set(np.concatenate([w.labels for w in writers])) == set(range(62))
    faces = {split: {w.name.split()[1] for w in writers if w.split == split} for split in glyphs.FACES}
    assert faces == {split: set(its) for split, its in glyphs.FACES.items()}


def test_a_writer_depends_on_the_seed_its_split_and_its_number_alone(writers):
    few = list(glyphs.domains(writers=(2, 1, 1), drawings=30))
    for again, writer in zip(few, [*writers[:2], writers[13], writers[16]], strict=True):
        assert again.images.tobytes() == writer.images.tobytes() and again.name == writer.name
    assert len({w.labels.tobytes() for w in writers}) == len(writers)
    assert next(glyphs.domains(seed=1, **TINY)).images.tobytes() != writers[0].images.tobytes()


def test_every_face_has_all_characters():
    for face in (face for faces in glyphs.FACES.values() for face in faces):
        fields, extents = glyphs.distance_fields(face)
        assert (fields.max((1, 2)) > 0.5).all() and (extents.min(1) > 1).all()
        shapes = {(f > 0).tobytes() for f in fields}
        assert len(shapes) >= 61  # at most one pair of look-alikes such as l and I
        ink = fields[0] > 0  # of one character, whose distances are looked for among all pixels
        places = np.moveaxis(np.indices(ink.shape), 0, -1)
        for sign, here, there in ((1, ink, ~ink), (-1, ~ink, ink)):
            gaps = np.linalg.norm(places[here][::200, None] - places[there], axis=-1).min(1)
            np.testing.assert_allclose(sign * fields[0][here][::200], gaps.clip(max=14) - 0.5, atol=1e-5)


def test_arguments_have_their_own_caches(tmp_path):
    wanted = [(0, (1, 1, 1), 3), (0, (1, 1, 1), 4), (1, (1, 1, 1), 3), (0, (2, 1, 1), 3)]
    stores = [glyphs.open_glyphs(tmp_path, *arguments) for arguments in wanted]
    assert len({store.sha256 for store in stores}) == len(list(tmp_path.iterdir())) == 4
    assert glyphs.open_glyphs(tmp_path, *wanted[0]).sha256 == stores[0].sha256
