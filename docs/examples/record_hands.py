"""Records some drawings of UNIPEN's test writers for the live page. In a clone,
with the folder that holds train_r01_v07:

python -m docs.examples.record_hands --raw_dir=DOWNLOADS

It writes cxda_jax/export/live/hands.json. The writers are those that `cxda prepare --benchmark=unipen` holds
out for the test. Of each site that has a test writer with 100 drawings and 55 classes, one such writer is
drawn at random, and 60 drawings of theirs. Of a pen's points those are left out that change a line by less
than 0.8 % of the character's longer side.
"""

import argparse
import base64
import json
from pathlib import Path

import numpy as np

from cxda_jax.data.readers import unipen
from cxda_jax.export.web import HANDS

DRAWINGS, LEAST, CLASSES = 60, 100, 55
UNITS = 255  # of the longer side
SLACK = 2.0  # units by which a line may change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw_dir", type=Path, required=True, help="the folder that holds train_r01_v07")
    held_out = writers_of_test(parser.parse_args().raw_dir)
    rng = np.random.default_rng(0)
    sites: dict[str, list[str]] = {}
    for writer, characters in sorted(held_out.items()):
        if len(characters) >= LEAST and len({c.label for c in characters}) >= CLASSES:
            sites.setdefault(writer.split()[0], []).append(writer)
    hands = []
    for number, (site, writers) in enumerate(sites.items(), 1):
        characters = held_out[str(rng.choice(writers))]
        chosen = [characters[i] for i in rng.permutation(len(characters))[:DRAWINGS]]
        labels = "".join(unipen.INFO.class_names[c.label] for c in chosen)
        strokes = b"".join(packed(placed(c.strokes)) for c in chosen)
        hands.append(
            {"name": f"Hand {number} ({site})", "labels": labels, "strokes": base64.b64encode(strokes).decode()}
        )
    content = {"source": unipen.INFO.provenance, "hands": hands}
    HANDS.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{HANDS}: {len(hands)} hands, {HANDS.stat().st_size} bytes")


def writers_of_test(raw_dir: Path) -> dict[str, list[unipen.Character]]:
    """The characters of each writer that is held out for the test."""
    found = unipen.find(raw_dir)
    names = {piece.domain for piece in found.pieces if piece.split == "test"}
    writers, _ = unipen._writers(raw_dir / "train_r01_v07")
    return {name: characters for name, characters in writers.items() if name in names}


def placed(strokes: list[unipen.Stroke]) -> list[list[tuple[int, int]]]:
    """Strokes in units 0..255, y down, without the points that a line does not need."""
    points = np.concatenate(strokes)
    scale = UNITS / max(unipen.longer_side(strokes), 1e-6)
    made = []
    for stroke in strokes:
        x, y = ((stroke - points.min(0)) * scale).T
        height = np.ptp(points[:, 1]) * scale
        whole = np.rint(np.stack([x, height - y], 1)).astype(int)
        kept = [(int(a), int(b)) for a, b in whole[needed(whole)]]
        made.append([point for i, point in enumerate(kept) if not i or point != kept[i - 1]])
    return made


def needed(points: np.ndarray) -> list[int]:
    """Numbers of the points that remain (Ramer, 1972; Douglas and Peucker, 1973)."""
    if len(points) < 3:
        return list(range(len(points)))
    start, along = points[0], points[-1] - points[0]
    length = max(float(along @ along), 1e-9)
    share = np.clip((points - start) @ along / length, 0, 1)
    far = np.linalg.norm(points - start - share[:, None] * along, axis=1)
    worst = int(far.argmax())
    if far[worst] <= SLACK:
        return [0, len(points) - 1]
    return [*needed(points[: worst + 1])[:-1], *(worst + i for i in needed(points[worst:]))]


def packed(strokes: list[list[tuple[int, int]]]) -> bytes:
    """As read_hands() in cxda_jax/export/web.py takes them."""
    assert len(strokes) < 256 and max(map(len, strokes)) < 256
    return bytes(
        [len(strokes), *(n for stroke in strokes for n in (len(stroke), *(n for point in stroke for n in point)))]
    )


if __name__ == "__main__":
    main()
