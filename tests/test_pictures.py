"""lab/pictures.py draws the stored record and makes the table of docs/dose.md."""

import re

from helpers import ROOT

from lab import pictures
from lab.study import RECORDS


def test_the_record_of_the_doses_is_drawn_and_the_page_has_its_rows(tmp_path, capsys):
    pictures.main(RECORDS / "dose.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    page = (ROOT / "docs/dose.md").read_text().splitlines()
    rows = {line for line in page if re.search(r"\d\.\d\d/\d\.\d\d", line) and line.count("|") == 11}
    assert len(rows) == 8
    assert rows <= {*capsys.readouterr().out.splitlines()}
