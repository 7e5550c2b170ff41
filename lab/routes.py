"""What `--replay-routes` changes, and how noise in the engine's routers shows, on random mixtures.

    python -m lab.routes docs/records/routes.json
"""

import json
import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from config import GrpoConfig, ParityFlags
from extras.routes import RoutedEngine, RoutedPolicy
from probe.noise import self_noise
from records import provenance
from rl import frozen_measures, make_batch
from rollouts import Sampling, reseed

CASES = [("Qwen3Moe", 48, 8, "bfloat16"), ("Qwen2Moe", 24, 4, "bfloat16"),
         ("Mixtral", 12, 2, "bfloat16"), ("Mixtral", 12, 2, "bfloat16", 48),
         ("Qwen3Moe", 48, 8, "float32")]  # fmt: skip
NOISES = 0.0, 0.02, 0.1  # planted in the engine's router weights, in their standard deviations


def measure(kind: str, experts: int, chosen: int, dtype: str, layers: int = 3) -> dict[str, Any]:
    """By noise and body: |mismatch| and its floor in nats, and both figures of the routes."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1, norm_topk_prob=True,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=experts,
        num_local_experts=experts, num_experts_per_tok=chosen)).to(getattr(torch, dtype))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    policies = [RoutedPolicy(model, replay=each) for each in (False, True)]
    weights, score, found = policies[0].weights(), policies[0].response_logprobs, {}
    contract = {name: tensor.shape for name, tensor in weights.items()}
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = RoutedEngine(folder, contract, ParityFlags(), max_model_len=96, dtype=model.dtype)
    engine.canary_tolerance = 10.0
    grpo = GrpoConfig(temperature=1.0, num_minibatches=1)
    for noise in NOISES:
        reseed(0)
        prompts = torch.randint(96, (16, 40)).tolist()
        engine.load({name: each + noise * each.std() * torch.randn_like(each)
                     if name.endswith(".gate.weight") else each
                     for name, each in weights.items()}, score)
        batch = make_batch(engine.generate(prompts, 8, Sampling(1.0, 48)))
        batch = replace(batch, advantages=torch.ones(len(batch.inputs), 1))
        on, cut = batch.mask > 0, batch.cut(batch.lengths > 0, 1, grpo.micro_batch_tokens)
        for policy in policies:
            measured = frozen_measures(policy, batch, cut, 1.0)
            old = measured["logprobs"]
            row = found[f"{noise} {policy.body.__name__}"] = {
                "mismatch": old - batch.behavior_logprobs,
                "floor": self_noise(policy, replace(batch, old_logprobs=old), grpo)}
            for name in row:
                size = row[name][on].abs()
                row[name] = [size.mean().item(), size.quantile(0.999).item(), size.max().item()]
            for name in sorted(measured.keys() - {"logprobs", "entropy"}):
                row[name] = measured[name][on].mean().item()
    engine.close()
    return found


if __name__ == "__main__":
    record = {"command": f"python -m lab.routes {sys.argv[1]}"} | provenance(torch.device("cpu"))
    record |= {"nats": ["mean", "99.9th percentile", "largest"],
               "cells": {" ".join(map(str, case)): measure(*case) for case in CASES}}
    with open(sys.argv[1], "w") as file:
        json.dump(record, file, indent=1)
