"""lab/pictures.py draws the stored records and the steps of a run."""

import json

import pytest

from lab import pictures
from lab.study import RECORDS


@pytest.mark.parametrize("study", ["dose", "staleness", "transfer"])
def test_the_record_of_a_study_is_drawn(study, tmp_path):
    pictures.main(RECORDS / f"{study}.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_phases_of_a_step_follow_each_other(tmp_path):
    steps = [{"step": 0}, *({"step": step, "sync_gib": 3.0} | {f"{phase}_s": step for phase in pictures.PHASES}
                            for step in (1, 2, 3))]  # fmt: skip
    for step in steps[1:]:
        step |= {f"{phase}_gib": 2.0 for phase in pictures.PHASES if phase not in ("load", "proof", "canary")}
    who, memory = pictures.draw_step(steps).axes
    bars = [(bar.get_x(), bar.get_width()) for bar in who.patches]
    assert bars == [(2 * place, 2) for place in range(len(pictures.PHASES))]  # of the medians
    assert [bar.get_height() for bar in memory.patches] == [2, 2, 2, 2, 2, 3, 3, 3]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    pictures.main(tmp_path / "metrics.jsonl", tmp_path / "step.png")
