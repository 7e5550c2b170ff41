"""The proof of a load: which tensors in vLLM differ from what was sent?

Bit for bit, in the dtype that the engine computes with. One file for any trainer beside vLLM; it
imports torch and vllm only:

    print(proof.differing(llm, model.state_dict()))  # after the load

An engine in another process, such as the default LLM, is reached through its worker: LLM(...,
worker_extension_cls="proof.Worker"). The weights go there through a file (TMPDIR=/dev/shm: in
memory), and names come back.

The weights go by the names of the checkpoint, and vLLM's own renaming leads to its tensors. The
`state_dict` of a mixture in transformers 5 has all experts in one tensor; each expert is compared.
Print the whole report, because a tensor that it lists as not compared may differ. If a class has
other names in memory than in its checkpoint, transformers' `revert_weight_conversion` leads back.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Layers of vLLM that hold several of the checkpoint's, in this order of rows, if the model's class
# does not say it (`packed_modules_mapping`).
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "w13": ("w1", "w3")}  # fmt: skip
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
TRANSPOSED = {"c_attn", "c_fc", "c_proj"}  # (in, out) in GPT-2's checkpoints
IDENTITY_ROWS = 512  # of a product that reads a packed layer


class Report(NamedTuple):
    """Names of tensors, each once."""

    differing: list[str]
    not_compared: list[str]  # sent, but held in no form that can be compared
    not_given: list[str]  # held, by vLLM's names, and compared with nothing


class Held(NamedTuple):
    """A tensor that the engine holds, or one of its copies."""

    parameter: str  # of the module
    name: str  # vLLM's for the tensor of the checkpoint
    values: Tensor
    sent: Tensor  # the same, as it was sent
    part: str = ""  # which expert of a tensor that has all of them


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


class OutOfReach(RuntimeError):
    """The engine's tensors cannot be seen from here."""


def is_here(llm: Any) -> bool:
    """Whether the engine of an LLM runs in this process."""
    core = getattr(getattr(llm, "llm_engine", llm), "engine_core", None)  # V0 has none
    return core is None or hasattr(core, "engine_core")


def in_worker(llm: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(worker, *arguments)` in the one worker of an LLM. Raises: OutOfReach."""
    config = getattr(llm, "llm_engine", llm).vllm_config.parallel_config
    if config.world_size * getattr(config, "data_parallel_size", 1) > 1:
        raise OutOfReach("each of the engine's workers has a part of the tensors")
    by_name = config.worker_extension_cls.endswith(".Worker") and not is_here(llm)
    try:
        (answer,) = llm.collective_rpc(function.__name__ if by_name else function, args=arguments)
    except Exception as error:
        if is_here(llm):
            raise
        raise OutOfReach("the engine runs in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0"
                         " before vllm is imported, or LLM(...,"
                         ' worker_extension_cls="parity.Worker"), proof.Worker without'
                         " parity.py") from error
    return answer


def differing(
    engine: Any, weights: Mapping[str, Tensor], modules: slice = slice(None)
) -> Report:
    """Compare what vLLM's modules (all, or those of the slice) hold with what was sent.

    `engine`: an LLM, its LLMEngine, or a worker. Each sent tensor is read only while it is
    compared. Raises: ValueError if no name is the engine's; OutOfReach.
    """
    if hasattr(engine, "get_model"):
        return differing_in(engine, weights, modules)
    if is_here(engine):
        return in_worker(engine, differing_in, weights, modules)
    with NamedTemporaryFile() as file:
        torch.save(dict(weights), file.name)
        return Report(*in_worker(engine, differing_from, file.name))


def differing_from(worker: Any, path: str) -> list[list[str]]:
    """A worker's Report for the weights in a file of `torch.save`."""
    return [*differing_in(worker, torch.load(path, "cpu", mmap=True))]


class Worker:
    """What LLM(..., worker_extension_cls="proof.Worker") adds to vLLM's worker."""

    differing_from = differing_from


def differing_in(
    worker: Any, weights: Mapping[str, Tensor], modules: slice = slice(None)
) -> Report:
    """As `differing`, in a worker."""
    from vllm.config import set_current_vllm_config

    differ: list[str] = []  # the checkpoint's names
    compared: set[str] = set()  # the checkpoint's names, too
    names_of: dict[Any, str] = {}  # vLLM's names, by storage
    storages_given, modules_done = set(), set()
    model = worker.get_model()
    sent = Sent(weights, renaming(model))
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():  # to apply packed layers
        # A module that stands in two places is known to the checkpoint by one of them.
        for path, module in [*model.named_modules(remove_duplicate=False)][modules]:
            names_of |= {storage(module, kind): f"{path}.{kind}"
                         for kind, _ in module.named_parameters(recurse=False)}
            if module in modules_done:
                continue
            for held in held_by(model, path, module, sent):
                name = sent.original[held.name]
                compared.add(name)
                modules_done.add(module)
                storages_given.add(storage(module, held.parameter))
                if not same_bits(held.values, held.sent.to(held.values.device, held.values.dtype)):
                    differ.append(name + held.part)
    if not compared and modules == slice(None):
        raise ValueError(f"the engine has none of the names that were sent: {[*weights][:3]} ...")
    not_given = sorted(names_of[tensor] for tensor in names_of.keys() - storages_given)
    return Report(list(dict.fromkeys(differ)), sorted(weights.keys() - compared), not_given)
def storage(module: Any, parameter: str) -> tuple[int, Any]:
    """Equal for two names of one tensor; a layer that packs its weight has a copy of its own."""
    tensor = getattr(module, parameter)
    packed = getattr(module, "cpu_linear", None) if parameter == "weight" else None
    return tensor.data_ptr() or id(tensor), packed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of one dtype; NaN is equal to itself, and 0 to -0, which a packed layer does not give back.
    """
    if torch.equal(one, other) or one.shape != other.shape:
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def held_by(model: Any, path: str, module: Any, sent: Sent) -> Iterator[Held]:
    """What a module of vLLM's model holds. What has another form here is left out."""
    if hasattr(module, "w13_weight"):
        yield from experts(path.removesuffix(".routed_experts"), module, sent)
        return
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if hasattr(module, "quant_method"):
        if not hasattr(module, "weight"):  # AWQ and others hold packed integers
            return
        yield from linear(model, path, module, sent)
        own = {kind: tensor for kind, tensor in own.items() if kind not in ("weight", "bias")}
    yield from plain(path, own, sent)


def plain(path: str, own: dict[str, Tensor], sent: Sent) -> Iterator[Held]:
    """Tensors by their kind: of a norm, a recurrent layer or a router, and loaded buffers."""
    for kind, held in own.items():
        name = f"{path}.{kind}"
        if kind == "A" and name not in sent:
            name = f"{path}.A_log"
        if name in sent:
            is_log = kind == "A" and sent.original[name].endswith(".A_log")  # Mamba's
            yield Held(kind, name, held, -sent[name].float().exp() if is_log else sent[name])


def linear(model: Any, path: str, module: Any, sent: Sent) -> Iterator[Held]:
    """A linear layer or an embedding: maybe fused of several, packed, or transposed."""
    above, _, last = path.rpartition(".")
    parts = [path]
    if f"{path}.weight" not in sent:
        fused = FUSED | (getattr(model, "packed_modules_mapping", None) or {})
        parts = [f"{above}.{part}" for part in fused.get(last, ())]
    if hasattr(module, "_cpu_unpacked_conv_weight") and f"{path}.weight" in sent:
        from vllm._custom_ops import causal_conv1d_weight_pack

        wanted = sent[f"{path}.weight"].squeeze(1)  # (channels, width)
        yield Held("weight", f"{path}.weight", module.weight, causal_conv1d_weight_pack(wanted))
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
            end = start + len(wanted)
            if name == names[-1]:  # vLLM pads the vocabulary, and nothing else
                end = max(end, getattr(module, "org_vocab_size", len(rows)))
            yield Held(kind, name, rows[start:end], wanted)
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
        columns, dtype = [], getattr(module, "params_dtype", module.weight.dtype)
        # vLLM 0.26 packs embeddings too, which have another name for it.
        width = getattr(module, "input_size", None) or module.embedding_dim
        for start in range(0, width, IDENTITY_ROWS):
            count = min(IDENTITY_ROWS, width - start)
            identity = torch.zeros(count, width, dtype=dtype)
            identity.diagonal(start).fill_(1)
            columns.append(module.quant_method.apply(module, identity))
        yield "weight", torch.cat(columns).T
    if getattr(module, "bias", None) is not None:
        yield "bias", module.bias


def experts(path: str, module: Any, sent: Sent) -> Iterator[Held]:
    """Each matrix of a layer's experts. On a GPU they have the layout of their kernel: left out."""
    method = module.quant_method
    kernel = getattr(method.moe_kernel, "fused_experts", None)
    kernel = kernel or getattr(method, "cpu_fused_moe", None)  # vLLM 0.26
    if not hasattr(kernel, "isa"):
        return
    kinds = "w13_weight", "w13_weight", "w2_weight"
    for number, (names, tensors, part) in enumerate(sent_experts(path, module, sent)):
        inner, width = tensors[0].shape
        both = unpacked(module.w13_weight[number], (-1, width), kernel.isa)
        halves = *both.chunk(2), unpacked(module.w2_weight[number], (width, -1), kernel.isa)
        for kind, name, held, tensor in zip(kinds, names, halves, tensors, strict=True):
            rows = held[:, :inner] if kind == "w2_weight" else held[:inner]  # vLLM pads them
            yield Held(kind, name, rows, tensor, part)


def sent_experts(
    path: str, module: Any, sent: Sent
) -> Iterator[tuple[list[str], list[Tensor], str]]:
    """Names and tensors of each expert's gate, up and down projection, and which expert it is."""
    fused, down = f"{path}.gate_up_proj", f"{path}.down_proj"
    # (E, 2 I, H) and (E, H, I). Some classes have them transposed: not compared.
    if {fused, down} <= sent.original.keys() and sent[fused].shape[2] == sent[down].shape[1]:
        for number, (both, last) in enumerate(zip(sent[fused], sent[down], strict=True)):
            yield [fused, fused, down], [*both.chunk(2), last], f"[{number}]"
        return
    for parts in EXPERT_PARTS:
        experts = [[f"{path}.{number}.{part}.weight" for part in parts]
                   for number in range(len(module.w13_weight))]
        if all(name in sent for names in experts for name in names):  # else none is compared
            for names in experts:
                yield names, [sent[name] for name in names], ""


def unpacked(packed: Tensor, shape: tuple[int, int], isa: str) -> Tensor:
    """An expert's matrix; no product reads it back exactly, but its packing only moves values."""
    values = torch.empty_like(packed).reshape(-1)
    values[places(packed.numel(), shape, packed.dtype, isa)] = packed.reshape(-1)
    return values.view(shape)


@lru_cache(4)
def places(count: int, shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """Where each packed value comes from: the packing is asked with the positions as values.

    A value has 15 bits of its position, so there are two packings.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    positions = torch.arange(count).view(1, *shape)
    low, high = (cpu_prepack_moe_weight((part & 0x7FFF).to(integer).view(dtype), isa)
                 .reshape(-1).view(integer).long() for part in (positions, positions >> 15))
    return low | high << 15
