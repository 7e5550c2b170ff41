"""Routes of a mixture of experts: what the engine has chosen is recorded, compared and replayed."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from helpers import (
    MIXTURES,
    ROUNDING,
    SIXTEEN,
    close_live_engine,
    command,
    config_of,
    minibatches_of,
    move_and_load,
    qwen2,
    small_model,
    timeless,
    train_here,
)

from config import GrpoConfig, ParityFlags
from engine_adapter import Engine
from examples.toys import toy_tokenizer
from extras.gradient_checkpointing import checkpoint_layers
from extras.routes import RoutedEngine, Routes
from probe.diagnose import ALARMS
from probe.noise import self_noise
from rl import Policy, in_micro_batches, make_batch
from rollouts import Rollout, Sampling, reseed
from run import prepare

EXPERTS = dict(num_experts=16, num_local_experts=16, num_experts_per_tok=4)
PROMPTS = torch.randint(3, 96, (8, 24), generator=torch.Generator().manual_seed(0)).tolist()


@contextmanager
def hooked(model, hook):
    """`hook(index, module, inputs, output)` on each of transformers' routers."""
    routers = [each for each in model.modules() if type(each).__name__.endswith("Router")]
    handles = [each.register_forward_hook(partial(hook, index)) for index, each in enumerate(routers)]
    yield routers
    for handle in handles:
        handle.remove()


def own_choice(model, batch) -> torch.Tensor:
    """(B, T, layers, k)."""
    found = []
    with torch.no_grad(), hooked(model, lambda *args: found.append(args[3][2])):
        model.base_model(input_ids=batch.inputs)
    return torch.stack(found, dim=1).unflatten(0, batch.inputs.shape)


# ------------------------------------------------------------------------------------------------ the trainer
@pytest.mark.parametrize("name", MIXTURES)
def test_replay_uses_the_given_choice_with_the_models_own_weights_and_gradients(name):
    """The oracle: routers by hand with each architecture's formula."""
    model, generator = small_model(name, False, **EXPERTS), torch.Generator().manual_seed(0)
    policy, plain = Policy(model, **Routes(model).parts(replay=True)), Policy(model)
    batch = make_batch([Rollout(prompt[:5], None, prompt[5 : 9 + row], [0.0] * (4 + row))
                        for row, prompt in enumerate(PROMPTS)])  # fmt: skip
    own, usual = own_choice(model, batch), plain.logprobs(batch)
    foreign = torch.rand(*own.shape[:3], 16, generator=generator).argsort(dim=-1)[..., :4]  # (B, T, layers, k)

    def with_routes(routes):
        for rollout, row, length in zip(batch.rollouts, routes, batch.input_lengths, strict=True):
            rollout.routes = [*row[:length].numpy()]
        return policy.logprobs(batch)

    def by_hand(index, _module, _inputs, output):
        choice = foreign[:, :, index].flatten(0, 1)
        weights = output[0].softmax(dim=-1).gather(1, choice)
        if getattr(model.config, "norm_topk_prob", True):  # Mixtral always does
            weights = weights / weights.sum(dim=1, keepdim=True)
        return output[0], weights, choice

    assert torch.equal(with_routes(own), usual)
    with hooked(model, by_hand) as routers:
        expected = plain.logprobs(batch)
    logprobs = with_routes(foreign)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ROUNDING)
    assert torch.equal(plain.logprobs(batch), usual)  # the choice is the trainer's own again
    assert policy.free_body is plain.body
    found, wanted = (torch.autograd.grad(each.sum(), routers[0].weight)[0] for each in (logprobs, expected))
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


# ------------------------------------------------------------------------------------------------ the engine
def differing(rollouts, choice: torch.Tensor) -> float:
    """The share of T tokens and layers for which the recorded routes are not the choice, (B, T, layers, k)."""
    recorded = torch.tensor(numpy.stack([each.routes[: choice.shape[1]] for each in rollouts]))
    return (recorded.sort().values != choice.sort().values).any(dim=-1).float().mean().item()


@pytest.mark.engine
def test_recorded_routes_are_the_engines_after_preemptions_and_over_a_load_in_flight(tmp_path):
    """In float32 they are the choice of the trainer's weights before the load, token by token."""
    close_live_engine()
    model = small_model("Qwen2Moe", False, **EXPERTS)
    model.save_pretrained(tmp_path)
    policy = Policy(model)
    gib = 14 * 32 * 512 / 2**30  # 14 blocks of 32 tokens with 512 bytes each
    engine = RoutedEngine(str(tmp_path), policy.weights(), ParityFlags(), max_model_len=96, block_size=32,
                          kv_cache_gib=gib)
    engine.load(policy.weights(), policy.response_logprobs)
    rollouts = [each for prompt in PROMPTS for each in engine.submit(prompt, 2, Sampling(1.0, 60))]
    requests = list(engine.core.scheduler.requests.values())
    while engine.num_unfinished:
        engine.step()
    assert sum(request.num_preemptions for request in requests) > 0
    assert {len(each.routes) for each in rollouts} == {24 + 60 - 1}
    assert differing(rollouts, own_choice(model, make_batch(rollouts))) < 0.01  # ties within rounding
    rollouts = engine.submit(PROMPTS[0], 3, Sampling(1.0, 30))
    while len(rollouts[-1].token_ids) < 11:
        engine.step()
    before = own_choice(model, make_batch(rollouts))
    move_and_load(policy, engine)
    while engine.num_unfinished:
        engine.step()
    assert {len(each.routes) for each in rollouts} == {24 + 30 - 1}
    assert differing(rollouts, before) < 0.01 < differing(rollouts, own_choice(model, make_batch(rollouts)))


@pytest.mark.engine
def test_async_scheduling_computes_a_stopped_row_once_more_and_its_routes_still_fit(tmp_path):
    close_live_engine()
    model = small_model("Qwen2Moe", False, **EXPERTS)
    model.save_pretrained(tmp_path)
    policy = Policy(model, **Routes(model).parts(replay=False))
    parity = ParityFlags(uncached_runtime=False, variants=("async-scheduling",))
    engine = RoutedEngine(str(tmp_path), policy.weights(), parity, max_model_len=96)
    engine.load(policy.weights(), policy.response_logprobs)
    rollouts = engine.generate(PROMPTS, 2, Sampling(1.0, 60, stop_token_ids=tuple(range(0, 96, 2))))
    engine.close()
    longest = max(rollouts, key=lambda each: len(each.token_ids))
    assert longest.finish_reason == "stop"
    assert len(longest.routes) == 24 + len(longest.token_ids)  # one too many
    batch = make_batch(rollouts)
    assert (policy.token_metrics(batch)["routed_otherwise"].sum() / batch.mask.sum()) < 0.01


def figures_of_noise(folder: str) -> dict[tuple, dict]:
    """Of a 16-bit mixture without and with noise in the engine's routers, by noise and body of the trainer."""
    model = small_model("Qwen2Moe", False, **EXPERTS, num_hidden_layers=3, initializer_range=0.1).to(SIXTEEN)
    policies = [Policy(model, **Routes(model).parts(replay)) for replay in (False, True)]
    weights, score, found = policies[0].weights(), policies[0].response_logprobs, {}
    model.save_pretrained(folder)
    engine = RoutedEngine(folder, weights, ParityFlags(), max_model_len=96, dtype=model.dtype, canary_nats=10.0)
    grpo = GrpoConfig(temperature=1.0, num_minibatches=1)
    for noise in (0.0, 0.02):
        reseed(0)
        prompts = torch.randint(96, (16, 40)).tolist()
        engine.load({name: each + noise * each.std() * torch.randn_like(each)
                     if name.endswith(".gate.weight") else each for name, each in weights.items()}, score)
        batch = make_batch(engine.generate(prompts, 8, Sampling(1.0, 48)))
        batch = replace(batch, advantages=torch.ones(len(batch.inputs), 1))
        on, minibatches = batch.mask > 0, minibatches_of(batch, 1, grpo.micro_batch_tokens)
        for policy in policies:
            metrics = in_micro_batches(policy.token_metrics, batch, minibatches)
            old = metrics.pop("logprobs")
            metrics["mismatch"] = (old - batch.behavior_logprobs).abs()
            metrics["floor"] = self_noise(policy, replace(batch, old_logprobs=old), grpo).abs()
            found[noise, policy.body.__name__] = {name: values[on].mean() for name, values in metrics.items()}
    engine.close()
    return found


@pytest.mark.engine
def test_replay_leaves_the_noise_floor_and_hides_a_noisy_router_that_the_share_shows(tmp_path):
    close_live_engine()
    found = figures_of_noise(str(tmp_path))
    (plain, noisy), (replay, hidden) = ([found[noise, body] for noise in (0.0, 0.02)]
                                        for body in ("prompts_once", "replayed"))
    assert replay["mismatch"] / 1.3 < replay["floor"] < plain["floor"]
    assert replay["mismatch"] < plain["mismatch"]
    assert hidden["mismatch"] < noisy["mismatch"] / 1.4  # 0.39 to 0.48 of it with five seeds
    for clean, planted in ((plain, noisy), (replay, hidden)):
        assert planted["routed_otherwise"] > 2 * clean["routed_otherwise"]
    assert replay["router_noise"] < ALARMS["router_noise"] < hidden["router_noise"]
    assert hidden["router_noise"].item() == pytest.approx(0.02, rel=0.3)


# ------------------------------------------------------------------------------------------------ runs
@pytest.fixture
def run(good, tmp_path):
    small_model("Qwen3Moe", False).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")

    def start(name: str, options: str) -> list[dict]:
        options += " --dtype bfloat16 --lr 1e-3 --group-size 4 --max-new-tokens 12 --eval-problems 2"
        where = ("--task", f"{good}/task.py", "--model", f"{tmp_path}/model", "--out", f"{tmp_path}/{name}")
        train_here(command(good, options, *where))
        return timeless(tmp_path / name)[1:]

    return start


@pytest.mark.engine
def test_recording_and_measuring_change_no_other_figure_of_a_run(run, monkeypatch):
    measured = run("measured", "--steps 3")
    monkeypatch.setattr("run.is_routed", lambda *_: False)
    for row, without in zip(measured, run("without", "--steps 3"), strict=True):
        assert 0 <= row.pop("routed_otherwise") < 0.2
        assert 0 <= row.pop("router_noise") < 0.05
        assert row == without


@pytest.mark.engine
def test_a_noisy_router_raises_an_alarm_and_the_probe_names_it(run, monkeypatch, tmp_path):
    def load(engine, weights):
        return Engine._transfer(engine, {name: each + 0.1 * each.std() * torch.randn_like(each)
                                         if name.endswith(".gate.weight") else each for name, each in weights.items()})

    monkeypatch.setattr(RoutedEngine, "_transfer", load)
    monkeypatch.setattr(RoutedEngine, "_prove", lambda *_: None)  # it would name the routers
    run("noisy", "--steps 1 --replay-routes --probe-on-alarm")
    report = (tmp_path / "noisy" / "probe" / "step_000001.txt").read_text()
    assert "router_noise" in report.splitlines()[0]
    assert "=> numerics: router: " in report


def test_replay_is_refused_without_routers_with_checkpointing_and_on_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match="replay_routes must be off with Qwen2ForCausalLM"):
        Routes(qwen2(True)).parts(replay=True)
    model = small_model("Mixtral", False)
    checkpoint_layers(model)
    with pytest.raises(ValueError, match="replay_routes must be off with gradient_checkpointing"):
        Routes(model).parts(replay=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="replay_routes must be off on a GPU"):
        prepare(config_of(replay_routes=True))
