"""`--engine shared`, `--exact`: vLLM V1 samples with the trainer's own transformers module.

vLLM schedules, keeps the KV cache, computes attention and samples; the module computes the rest,
from the only copy of the weights. With `exact` the trainer scores with vLLM's attention kernel too:
equal values bit for bit (docs/findings.md).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

from config import BackendConfig, ParityFlags
from engine_adapter import Engine
from rl import Batch, Policy, longest_first

# Each product gets a multiple of 16 rows. With fewer rows torch's CPU product rounds a row
# differently, and MKL without AVX does so for the last rows of a product.
ROW_MULTIPLE = 16
NAME = "trainers_module"  # among vLLM's models and among transformers' attention functions


def products_differ() -> bool:
    """Whether a row of a product depends on the number of rows, although it is a multiple of 16.

    It does with MKL on Intel CPUs without AVX-512; then nothing is exact.
    """
    draw = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(count, 64, generator=draw) for count in (512, 128))
    whole = rows @ weight.T
    return any(not torch.equal(rows[:count] @ weight.T, whole[:count]) for count in (16, 32, 48))


class SharedEngine(Engine):
    """An `Engine` around the model of a `Policy`, whose weights the optimizer changes in place.

    The trainer then uses `policy`: of the same model, with products of a multiple of ROW_MULTIPLE
    rows, and with `exact` with vLLM's attention kernel.

    Raises: ValueError if vLLM cannot serve the module, and with `exact` on a GPU, or on a CPU whose
    products differ.
    """

    def __init__(
        self, model: str, policy: Policy, parity: ParityFlags, *, backend: BackendConfig,
        **options: Any,
    ):
        exact = backend.exact
        parts = {"head": replace(policy.head, row_multiple=ROW_MULTIPLE)}
        if exact:
            if policy.device.type == "cuda":
                raise ValueError("exact must be off on a GPU (its kernels have not been measured)")
            if products_differ():
                raise ValueError("exact must be off on this CPU (the number of rows of a product"
                                 " changes how a row is rounded)")
            # Threads that share a row's keys change the order of its sums.
            os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
            parts |= {"body": self.exact_body, "pack": longest_first}
        self.usual_body = policy.body
        self.policy = policy.changed(**parts)
        self._layers: dict[int, dict[str, Any]] = {}  # arguments of vLLM's Attention
        super().__init__(model, policy.weights(), parity, backend=backend, **options)
        self.settings |= {"module": f"the trainer's {type(policy.model).__name__}", "exact": exact}
        if exact:
            self.canary_tolerance = 0.0

    @torch.no_grad()
    def _start(self, arguments: dict[str, Any]) -> None:
        from vllm import ModelRegistry

        model = self.policy.model
        config = model.config
        ATTENTION.register(NAME, self._note_layer)
        self.hidden(*torch.zeros(2, 2, dtype=torch.long, device=model.device))
        ATTENTION.register(NAME, self._attend)
        own_attention = len(self._layers) < config.num_hidden_layers
        rope = re.search("dynamic|longrope", str(getattr(config, "rope_parameters", "")))
        if model._is_stateful or own_attention or rope:
            raise ValueError("it has recurrent layers, attention of another kind, or rotary"
                             " frequencies that depend on the longest row of a batch;"
                             " try --engine vllm")
        # A new one: vLLM remembers the class of a folder and a name.
        name = f"{NAME}_{len(ModelRegistry.models)}"
        ModelRegistry.register_model(name, _vllm_class(self))
        arguments["hf_overrides"] |= {"architectures": [name]}
        super()._start(arguments)
        self._experts = [weight for weight in model.parameters() if weight.ndim == 3]

    # ------------------------------------------------------------------------------ the module
    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Last hidden states of N tokens, whose requests vLLM's forward context has: -> (N, H)."""
        config = self.policy.model.config
        usual = config._attn_implementation
        self._count = len(ids)
        padding = (0, -len(ids) % ROW_MULTIPLE)
        config._attn_implementation = NAME
        try:
            states = self.policy.model.base_model(
                input_ids=pad(ids, padding)[None], position_ids=pad(positions, padding)[None],
                use_cache=False).last_hidden_state
            return states[0, : self._count]
        finally:
            config._attn_implementation = usual

    def _note_layer(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """As `_attend`, before vLLM's model is made: the arguments of its Attention of a layer."""
        if key.shape == value.shape and options.get("s_aux") is None:  # attention sinks
            size = query.shape[3]
            self._layers[module.layer_idx] = dict(
                num_heads=query.shape[1], num_kv_heads=key.shape[1], head_size=size,
                scale=options.get("scaling") or size**-0.5,
                logits_soft_cap=options.get("softcap"),
                per_layer_sliding_window=options.get("sliding_window"))
        return torch.zeros_like(query).transpose(1, 2), None

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Attention of a layer: (1, heads, N, size), keys, values -> (1, N, heads, size)."""
        inputs = [rearrange(each, "1 h n d -> n h d")[: self._count].contiguous()
                  for each in (query, key, value)]
        attended = self.vllm_model.layers[module.layer_idx](*inputs).view_as(inputs[0])
        padding = query.shape[2] - self._count
        return pad(attended, (0, 0, 0, 0, 0, padding))[None], None

    def exact_body(self, policy: Policy, batch: Batch, response: Tensor) -> Tensor:
        """The values of `kernel_body` with the gradient of the trainer's usual body: -> (n, H)."""
        states = self.kernel_body(batch, response)
        if torch.is_grad_enabled():
            usual = self.usual_body(policy, batch, response)
            states = states + (usual - usual.detach())  # adds 0
        return states

    @torch.no_grad()
    def kernel_body(self, batch: Batch, response: Tensor) -> Tensor:
        """`rl.plain_body` with vLLM's kernel and a KV cache of its own: (B, T) -> (n, H).

        As in the engine, a prompt is one query and each later token another one, because some
        kernels round by query length.
        """
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        columns = torch.arange(batch.inputs.shape[1])
        real = columns < batch.input_lengths[:, None]  # (B, T)
        row, position = real.nonzero(as_tuple=True)  # (N,) each
        begins = ((position == 0) | (position >= batch.prompt_lengths[row])).nonzero()[:, 0]  # (Q,)
        starts = pad(begins, (0, 1), value=len(row))  # (Q + 1,)
        config = self.llm.vllm_config
        size = config.cache_config.block_size
        # (B, blocks of a row)
        blocks = torch.arange(len(real) * -(-len(columns) // size)).view(len(real), -1)
        slots = (blocks[:, :1] * size + columns)[real]  # (N,): where keys and values go
        common = CommonAttentionMetadata(
            query_start_loc=starts.int(), query_start_loc_cpu=starts.int(),
            seq_lens=position[starts[1:] - 1].int() + 1, num_reqs=len(begins),
            num_actual_tokens=len(row), max_query_len=int(starts.diff().max()),
            max_seq_len=len(columns), block_table_tensor=blocks[row[begins]].int(),
            slot_mapping=slots)
        metadata = {}
        for groups in self.runner.attn_groups:
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
        layers = self.vllm_model.layers
        engines = [layer.kv_cache for layer in layers]
        for layer in layers:
            layer.kv_cache = layer.kv_cache.new_zeros((blocks.numel(), *layer.kv_cache.shape[1:]))
        mapping = dict.fromkeys(metadata, slots)
        with set_forward_context(metadata, config, len(row), slot_mapping=mapping):
            states = self.hidden(batch.inputs[real], position)
        for layer, cache in zip(layers, engines, strict=True):
            layer.kv_cache = cache
        return states[response[real]]

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing: they are the trainer's."""

    def _prove(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing: there is no copy."""


def _vllm_class(engine: SharedEngine) -> type[torch.nn.Module]:
    """The model that vLLM runs. The trainer's module is not in its tree, which vLLM fills."""
    from vllm.model_executor.layers.attention import Attention

    class TrainersModule(torch.nn.Module):
        parameters = engine.policy.model.parameters

        def __init__(self, *, vllm_config: Any, prefix: str = ""):
            super().__init__()
            cache = vllm_config.cache_config
            self.layers = torch.nn.ModuleList(
                Attention(**arguments, cache_config=cache, prefix=f"layers.{index}.attn")
                for index, arguments in sorted(engine._layers.items()))
            self.logits_processor = torch.nn.Module()  # the audit finds the head by this name
            self.logits_processor.forward = engine.policy.logits

        def embed_input_ids(self, input_ids: Tensor) -> Tensor:
            return engine.policy.model.get_input_embeddings()(input_ids)

        def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
            return engine.hidden(input_ids, positions)

        def compute_logits(self, hidden: Tensor) -> Tensor:
            return self.logits_processor(hidden)

    return TrainersModule


# ---------------------------------------------------------------------------------- exactness
class ExactError(RuntimeError):
    """A log-probability of the trainer is not the sampler's, bit for bit."""


def observe_exact(step: Any) -> dict[str, int]:
    """The number of tokens whose `old_logprobs` equal the sampler's values.

    Of the rollouts of a train.Step that were sampled with the current weights. Raises: ExactError
    with the first token that differs, and what can be the cause.
    """
    batch = step.current
    # NaN differs from itself.
    differing = (batch.old_logprobs != batch.behavior_logprobs) & (batch.mask > 0)
    compared = int(batch.mask.sum())
    if not differing.any():
        return {"exact_tokens": compared}
    row, column = differing.nonzero()[0].tolist()
    prompt = int(batch.prompt_lengths[row])
    theirs, ours = batch.behavior_logprobs[row, column], batch.old_logprobs[row, column]
    raise ExactError(
        f"exact: token {column + 1 - prompt} of request {row} (after a prompt of {prompt} tokens)"
        f" has log-probability {theirs:.9g} in the engine and {ours:.9g} in the trainer;"
        f" {int(differing.sum())} of {compared} tokens differ. Cause: a stale prefix cache, weights"
        " that were changed after this token was sampled, a request that vLLM preempted, or values"
        " that depend on what is computed beside them: of experts in float32, and with several"
        " threads of long prompts (try OMP_NUM_THREADS=1)")
