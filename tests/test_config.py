"""The options in groups, and the flat form that config.json has."""

import json
from itertools import chain, combinations, product

import pytest
import tyro

from config import Config, GrpoConfig, ParityFlags
from lab.compare import STORED
from objectives import REJECTIONS, WEIGHTS


def test_the_flat_form_and_the_groups_are_inverse():
    config = Config.of(ParityFlags(fp32_head=False), lr=2e-3, engine="shared", eval_every=7)
    assert (config.grpo.lr, config.backend.engine, config.measure.eval_every) == (2e-3, "shared", 7)
    flat = config.flat()
    parity = ParityFlags(**flat.pop("parity"))
    assert Config.of(parity, **flat) == config
    assert config.but(lr=1e-3).flat() == config.flat() | {"lr": 1e-3}
    assert config.but(parity=ParityFlags()).parity == ParityFlags()


def test_no_option_stands_in_two_groups():
    config = Config()
    names = [name for group in vars(config).values() for name in vars(group)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["unknown", "fp32_head", "grpo"])
def test_an_option_that_does_not_exist_is_refused(name):
    with pytest.raises(TypeError, match=f"options must be those of Config, got {name}"):
        Config.of(**{name: 1})


def test_the_command_line_is_flat():
    words = ["--lr", "2e-3", "--parity.no-fp32-head", "--engine", "shared", "--eval-every", "7"]
    assert tyro.cli(Config, args=words) == Config.of(
        ParityFlags(fp32_head=False), lr=2e-3, engine="shared", eval_every=7)


def test_a_group_checks_itself():
    with pytest.raises(ValueError, match="lr must be positive and finite, got 0"):
        GrpoConfig(lr=0)


FIXES = ("processed_logprobs", "explicit_runtime", "inflight_keep", "fp32_head", "sampling_mask")
CORRECTIONS = [{"tis": tis, "reject": rule} for tis, rule in product(("off", *WEIGHTS), ("off", *REJECTIONS))][1:]


@pytest.mark.parametrize("off", [*chain.from_iterable(combinations(FIXES, n) for n in range(1, 6))], ids="-".join)
def test_every_correction_is_refused_whichever_fixes_are_off_with_one_way_around(off):
    parity, mask = ParityFlags(**dict.fromkeys(off, False)), {"top_p": 0.9} if "sampling_mask" in off else {}
    assert set(parity.off()) == set(off)
    for correction in CORRECTIONS:
        with pytest.raises(ValueError, match="a correction hides the broken backend") as refused:
            Config.of(parity, **mask, **correction)
        said = str(refused.value)
        assert all(f"{name} {kind}" in said for name, kind in correction.items() if kind != "off")
        assert all(fix in said.partition("without")[2] for fix in off)
        allowed = Config.of(parity, **mask, **correction, tis_over_a_broken_backend=True)
        assert allowed.grpo.corrections
    assert Config.of(parity, **mask).grpo.corrections == ""


def test_every_correction_is_allowed_with_all_fixes_and_refused_with_two_policies():
    assert len(CORRECTIONS) == 3 * 7 - 1
    for correction in CORRECTIONS:
        Config.of(**correction)
        for around in (False, True):
            with pytest.raises(ValueError, match="must be off with old_policy rollout"):
                Config.of(**correction, old_policy="rollout", tis_over_a_broken_backend=around)


def test_a_rule_has_its_usual_bounds_and_mean_unless_others_are_given():
    assert GrpoConfig(reject="sequence").rejection == REJECTIONS["sequence"]
    given = GrpoConfig(reject="sequence", reject_low=0.1, reject_mean="all").rejection
    assert (given.bounds, given.mean) == ((0.1, 2.0), "all")
    assert GrpoConfig(reject="trm", reject_high=0.5).rejection.bounds == (REJECTIONS["trm"].bounds[0], 0.5)


def test_the_options_of_the_stored_runs_are_still_options():
    for path in STORED.glob("*.json"):
        stored = json.loads(path.read_text())["options"]
        assert stored.keys() - {"out"} <= Config().flat().keys(), path.name
