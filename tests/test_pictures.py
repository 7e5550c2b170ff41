"""lab/pictures.py draws the stored record."""

from lab import pictures
from lab.study import RECORDS


def test_the_record_of_the_doses_is_drawn(tmp_path):
    pictures.main(RECORDS / "dose.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
