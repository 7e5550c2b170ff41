"""The memory of a run on one GPU, as a formula: bytes of each term in each phase of a step.

    python -m lab.memory --gib 40 --model PATH --dtype bfloat16 --max-prompt-tokens 512 \\
        --max-new-tokens 1024 --micro-batch-tokens 8192 --kv-cache-gib 16

Full training in 16 bits holds 18 bytes a parameter in the update: weights 2, fp32 masters 4, Adam's
moments 8, gradients 4. With --lora-rank R it holds 2 a parameter and 16 for each of the adapters,
which are R times the sum of in + out over the linear layers of the body. It takes the options of
train.py, and needs no GPU and no weights.
"""

from dataclasses import dataclass

import torch
import tyro
from torch.nn import Linear
from transformers import AutoModelForCausalLM, PretrainedConfig

import extras
from report.errors import exit_with_message, stage
from rl import head_chunk
from train import Config

GIB = 2**30
CONTEXT = 1.5 * GIB  # estimate: CUDA context, workspaces, vLLM's buffers that sleep does not free
HEAD_CHUNKS = 4  # chunks of logits that the head holds at once, in fp32


def phases(
    config: Config, model_config: PretrainedConfig, prompt_tokens: int, chunk_elements: int
) -> dict[str, dict[str, float]]:
    """Bytes by term, in the phases with the largest peaks.

    Activations of a layer, a position: 16 H for the norms, which compute in fp32, and
    b (8 H + 4 I) for attention and MLP, with b bytes a number. Attention's scores are not kept
    (flash attention). With checkpointing each layer keeps its input, and one layer all of this.
    """
    given = config.flat()  # without the file of an option its name is not there
    size = getattr(torch, config.dtype).itemsize
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    parameters = sum(each.numel() for each in model.parameters())
    weights = size * parameters
    adapters = given.get("lora_rank", 0) * sum(
        sum(each.weight.shape) for each in model.base_model.modules() if type(each) is Linear)
    trained = adapters or parameters
    copied = 4 * adapters or weights  # bytes
    hidden, layers = model_config.hidden_size, model_config.num_hidden_layers
    inner = getattr(model_config, "intermediate_size", None) or 4 * hidden
    positions = max(config.micro_batch_tokens, prompt_tokens + config.max_new_tokens)
    layer = positions * (16 * hidden + size * (8 * hidden + 4 * inner))
    activations = layers * layer
    if given.get("gradient_checkpointing"):
        activations = layers * positions * size * hidden + layer
    masters = 0 if adapters or size == 4 else 4 * trained  # adapters are fp32, their own masters
    probed = given.get("probe_every") or given.get("probe_on_alarm")
    copies = bool(config.kl_coef) + 2 * bool(probed)  # a probe needs the earlier weights, too
    always = {"weights": weights + 4 * adapters + copies * copied, "context": CONTEXT}
    optimizer = {"optimizer": masters + 8 * trained}
    # The engine of the trainer's own modules has the trainer's weights.
    engine = weights * ("engine" not in config.given) + config.kv_cache_gib * GIB
    # The sampler's logits, probabilities and noise, (sequences, V) in fp32.
    sampler = 4 * config.max_num_seqs * model_config.vocab_size * 4
    generate = always | {"engine": engine + sampler}
    if not given.get("offload_optimizer"):
        generate |= optimizer
    head = HEAD_CHUNKS * chunk_elements * 4
    update = always | optimizer | {"gradients": 4 * trained, "activations": activations + head}
    kept = config.parity.inflight_keep  # sleep would drop the KV cache
    if given.get("inflight_groups") and kept:
        update["engine"] = engine
    return {"generate": generate, "update": update}


@dataclass(frozen=True)
class Options(Config):
    """The options of train.py, and the memory of the GPU."""

    gib: float = 80.0  # Memory of the GPU in GiB; the command says whether the run fits.


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 fits, 1 does not, 2 bad input."""
    with exit_with_message(2):
        config = tyro.cli(Options, args=arguments, description=__doc__)
        name = config.model
        with stage(f"reading a model folder or a reachable hub name, {name},"):
            model_config = extras.folder(name).config()
    prompt_tokens = config.data.max_prompt_tokens or 0
    by_phase = phases(config, model_config, prompt_tokens, head_chunk(config.gib))
    print("GiB on one GPU:")
    for phase, terms in by_phase.items():
        print(f"{phase}:", ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms.items()))
    peak = max(sum(terms.values()) for terms in by_phase.values()) / GIB
    fits = peak <= config.gib
    print(f"peak {peak:.2f}: {'fits' if fits else 'does NOT fit'} {config.gib:g} GiB (without CUDA"
          " graphs and fragmentation)")
    return int(not fits)


if __name__ == "__main__":
    raise SystemExit(main())
