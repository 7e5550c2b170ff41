"""The options in groups, and the flat form that config.json has."""

import json

import pytest
import tyro

from config import Config, GrpoConfig
from engine_adapter import ParityFlags
from lab.compare import STORED


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


def test_the_options_of_the_stored_runs_are_still_options():
    for path in STORED.glob("*.json"):
        stored = json.loads(path.read_text())["options"]
        assert stored.keys() - {"out"} <= Config().flat().keys(), path.name
