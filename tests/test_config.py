"""The options in groups, and the flat form that config.json has. tests/test_bad_input.py has what is refused."""

import json
import math
from dataclasses import asdict, dataclass

import torch
import tyro
from helpers import bare_run, config_of, parametrize, value_error

from engine_adapter import SETTINGS, ParityFlags, Setting, wanted_settings
from train import Config


def test_the_command_line_the_flat_form_and_the_groups_are_the_same_options():
    words = "--lr 2e-3 --parity.no-fp32-head --engine vllm --eval-every 7"
    config = config_of(ParityFlags(fp32_head=False), lr=2e-3, eval_every=7)
    assert tyro.cli(Config, args=words.split()) == config
    flat = config.flat()
    assert config.given == {"lr", "eval_every"} and flat == config.defaults() | {
        "lr": 2e-3, "eval_every": 7, "parity": asdict(config.parity)}


def test_a_part_of_a_fix_goes_back_alone_and_a_16_bit_head_on_both_sides_is_the_trainers_too():
    def changed(option, *variants, inflight_groups=1):
        config = config_of(ParityFlags(**{option: False}), variants=variants, inflight_groups=inflight_groups)
        run = bare_run(config)
        config.extra.variants.install(run)
        return run.engine | run.further | run.policy

    assert changed("uncached_runtime") == changed("uncached_runtime", "prefix-cache", "async-scheduling") == {}
    assert changed("uncached_runtime", "prefix-cache") == {"async_scheduling": False}
    assert changed("uncached_runtime", "async-scheduling") == {"enable_prefix_caching": False}
    assert changed("fp32_head", "both-heads") == {"head_dtype": torch.float32}
    assert changed("inflight_keep", "recompute") == {"recomputes": True}
    assert changed("inflight_keep", "recompute", inflight_groups=0) == {}  # a notice names the idle switch


def test_a_flag_of_a_fork_needs_a_row_and_is_a_fix_only_if_it_is_on_by_default(monkeypatch):
    """A fork's fix in a run: full_kv_cache in test_forks.py."""
    @dataclass(frozen=True)
    class Fork(ParityFlags):
        fcfs: bool = True
        own: bool = False

    row = Setting("fcfs", "scheduling_policy", "fcfs", "priority")
    monkeypatch.setattr("engine_adapter.SETTINGS", [*SETTINGS, row])
    with value_error(r"a flag of ParityFlags must have a row of SETTINGS, \{'own'\} have none"):
        wanted_settings(Fork())
    assert (Fork().off(), Fork(fcfs=False).off()) == ([], ["fcfs"])


RANGES = """[0, 999999] steps
[0, 4294967295] seed
[2, 65536] group_size
[1, 65536] eval_samples
[0, 2147483647] top_k lr_warmup_steps lora_rank inflight_groups max_staleness probe_every
[1, 2147483647] checkpoint_every num_prompts max_new_tokens num_minibatches micro_batch_tokens max_num_seqs max_kept
[1, 2147483647] verify_loads max_prompt_tokens eval_every eval_problems
[16, 2147483647] block_size
[0.01, 2.0] temperature
[1e-6, 1.0] top_p
[0.0, 1.0] min_p clip_low
[1e-30, 1e30] lr clip_high tis_cap reject_high lora_alpha
[1e-30, 1.0] reject_low
[0.0, 1e30] kl_coef
[1e-30, 100.0] canary_nats
[1e-30, 1e6] kv_cache_gib reward_limit_s"""


def is_refused(name, value):
    try:
        config_of(**{name: value})
    except ValueError as error:
        return str(error).startswith(f"{name} must be in [")


@parametrize("line", RANGES.split("\n"))
def test_an_option_takes_the_ends_of_its_range_and_nothing_beyond(line):
    ends, names = json.loads(line[: line.index("]") + 1]), line.partition("] ")[2]
    beyond = [end + side if isinstance(end, int) else math.nextafter(end, side * math.inf)
              for end, side in zip(ends, (-1, 1), strict=True)]  # fmt: skip
    for name in names.split():
        assert not any(is_refused(name, end) for end in ends), name
        assert all(is_refused(name, value) for value in beyond), name
