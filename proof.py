"""The proof of a load: which tensors does vLLM hold otherwise than they were sent?

Bit for bit, in the dtype that the engine computes with. One file for any trainer that shares a
process with vLLM; it imports torch and vllm only:

    print(proof.differing(llm.llm_engine, model.state_dict()))  # after the load

The weights go by the names of the checkpoint, and vLLM's own renaming leads to its tensors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Layers of vLLM that hold several of the checkpoint's, in this order of rows, if the model's class
# does not say it (`packed_modules_mapping`).
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "w13": ("w1", "w3")}  # fmt: skip
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
TRANSPOSED = {"c_attn", "c_fc", "c_proj"}  # (in, out) in GPT-2's checkpoints
IDENTITY_ROWS = 512  # of a product that reads a packed layer
Held = Iterator[tuple[str, Tensor, Tensor]]  # vLLM's name for a tensor, held, sent


class Report(NamedTuple):
    """Names of tensors, each once."""

    differing: list[str]
    not_compared: list[str]  # sent, but held in no form that can be compared


class Sent:
    """The weights under vLLM's names for them; `original` leads back."""

    def __init__(self, weights: Mapping[str, Tensor], rename: Callable[[str], str | None]):
        self.weights = weights
        self.original = {rename(name): name for name in weights}

    def __contains__(self, name: str) -> bool:
        return name in self.original

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.original[name]]


def renaming(model: Any) -> Callable[[str], str | None]:
    """vLLM's own renaming of a checkpoint's tensors: name -> its name, None if it is not loaded.

    Parts of a fused layer keep their own names.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return replace(mapper, orig_to_new_stacked={})._map_name if mapper else str


def vllm_model(engine: Any) -> Any:
    """The live module of an LLM or LLMEngine in this process."""
    engine = getattr(engine, "llm_engine", engine)
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


@torch.no_grad()
def differing(
    engine: Any, weights: Mapping[str, Tensor], modules: slice = slice(None)
) -> Report:
    """Compare what vLLM's modules (all, or those of the slice) hold with what was sent.

    A tensor is asked for only while it is compared. Experts are named by their layer.
    """
    from vllm.config import set_current_vllm_config

    engine = getattr(engine, "llm_engine", engine)
    model = vllm_model(engine)
    sent = Sent(weights, renaming(model))
    found, proven, seen = [], set(), set()
    with set_current_vllm_config(engine.vllm_config):
        # A module that stands in two places is known to the checkpoint by one of them.
        for path, module in [*model.named_modules(remove_duplicate=False)][modules]:
            if module in seen:
                continue
            for name, held, wanted in held_and_sent(model, path, module, sent):
                seen.add(module)
                original = layer_of(sent.original[name])
                proven.add(original)
                if not torch.equal(held, wanted.to(held.dtype)):
                    found.append(original)
    return Report(list(dict.fromkeys(found)), sorted({*map(layer_of, weights)} - proven))


def layer_of(name: str) -> str:
    """Experts go by their layer, all other tensors by their own name."""
    return re.sub(r"\.experts\..*", ".experts", name)


def held_and_sent(model: Any, path: str, module: Any, sent: Sent) -> Held:
    """The tensors that a module of vLLM's model holds. What has another form here is left out."""
    if hasattr(module, "w13_weight"):
        yield from experts(path.removesuffix(".routed_experts"), module, sent)
        return
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if hasattr(module, "quant_method"):
        yield from linear(model, path, module, sent)
        own = {kind: each for kind, each in own.items() if kind not in ("weight", "bias")}
    yield from plain(path, own, sent)


def plain(path: str, own: dict[str, Tensor], sent: Sent) -> Held:
    """Tensors by their kind: of a norm, a recurrent layer or a router, and loaded buffers."""
    for kind, held in own.items():
        name = f"{path}.{kind}"
        if kind == "A" and name not in sent:
            name = f"{path}.A_log"
        if name in sent:
            is_log = kind == "A" and sent.original[name].endswith(".A_log")  # Mamba's
            yield name, held, -sent[name].float().exp() if is_log else sent[name]


def linear(model: Any, path: str, module: Any, sent: Sent) -> Held:
    """A linear layer or an embedding: maybe fused of several, packed, or transposed."""
    above, _, last = path.rpartition(".")
    parts = [path]
    if f"{path}.weight" not in sent:
        fused = FUSED | (getattr(model, "packed_modules_mapping", None) or {})
        parts = [f"{above}.{part}" for part in fused.get(last, ())]
    if hasattr(module, "_cpu_unpacked_conv_weight") and f"{path}.weight" in sent:
        from vllm._custom_ops import causal_conv1d_weight_pack

        wanted = sent[f"{path}.weight"].squeeze(1)  # (channels, width)
        yield f"{path}.weight", module.weight, causal_conv1d_weight_pack(wanted)
    transposed = model.config.model_type == "gpt2" and last in TRANSPOSED
    for kind, held in copies(module):
        names = [f"{part}.{kind}" for part in parts]
        if not all(name in sent for name in names):
            continue
        rows = held.T if transposed and kind == "weight" else held
        start = 0
        for name in names:
            # vLLM keeps some biases in fp32, after it has rounded them to the layer's dtype.
            wanted = sent[name].to(getattr(module, "params_dtype", held.dtype))
            end = start + len(wanted)  # vLLM pads the vocabulary
            yield name, rows[start:end], wanted
            start = end


def copies(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Each copy of the weight that a linear layer or an embedding computes with, and the bias.

    vLLM's CPU build packs the weight. The packed layer is applied to the identity, which gives the
    weight back exactly: each value is one product by 1, plus products by 0. Beside a packed
    convolution vLLM keeps an unpacked copy.
    """
    if hasattr(module, "_cpu_unpacked_conv_weight"):
        yield "weight", module._cpu_unpacked_conv_weight[:, None]
    elif module.weight.numel():
        yield "weight", module.weight
    if hasattr(module, "cpu_linear"):
        columns = []
        # vLLM 0.26 packs embeddings too, which have another name for it.
        width = getattr(module, "input_size", None) or module.embedding_dim
        for start in range(0, width, IDENTITY_ROWS):
            count = min(IDENTITY_ROWS, width - start)
            identity = torch.zeros(count, width, dtype=module.params_dtype)
            identity.diagonal(start).fill_(1)
            columns.append(module.quant_method.apply(module, identity))
        yield "weight", torch.cat(columns).T
    if getattr(module, "bias", None) is not None:
        yield "bias", module.bias


def experts(path: str, module: Any, sent: Sent) -> Held:
    """A layer's experts. On a CPU they are packed, and no product reads them back exactly, so what
    was sent is packed again. On a GPU they have the layout of their kernel and are left out.
    """
    method = module.quant_method
    kernel = getattr(method.moe_kernel, "fused_experts", None)
    kernel = kernel or getattr(method, "cpu_fused_moe", None)  # vLLM 0.26
    if not hasattr(kernel, "isa"):
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = len(module.w13_weight)
    for parts in EXPERT_PARTS:
        first = f"{path}.0.{parts[0]}.weight"
        if first not in sent:
            continue
        gate, up, down = (torch.stack([sent[f"{path}.{expert}.{part}.weight"]
                                       for expert in range(count)]) for part in parts)
        inner = module.w2_weight.numel() // (count * down.shape[1])  # vLLM pads it
        more = inner - down.shape[2]
        both = torch.cat([pad(each, (0, 0, 0, more)) for each in (gate, up)], dim=1)
        for held, wanted in ((module.w13_weight, both), (module.w2_weight, pad(down, (0, more)))):
            yield first, held, cpu_prepack_moe_weight(wanted, kernel.isa)
