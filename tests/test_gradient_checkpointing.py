"""`--gradient-checkpointing`: backward computes each layer again with the same result, or the option is refused."""

import torch
import transformers
from helpers import ARCHITECTURES, ROWS, parametrize, qwen2, small_model, value_error

from extras.gradient_checkpointing import checkpoint_layers
from extras.lora import Options
from extras.shared.adapters import Adapters, factors
from model_folder import attention_for
from rl import Policy

# A layer of Zamba 2 is inside of another one; OPT's layers pass their own `training` to dropout.
CASES = [(name, 0) for name in ("Zamba2", "OPT", *ARCHITECTURES) if "," not in name]
CASES += [(name, 2) for name in ("Llama", "GPTNeoX", "Gemma2")]


@parametrize("name, rank", CASES)
def test_each_layer_is_computed_twice_and_no_gradient_changes(name, rank):
    """Also those of adapters with this rank, which have grown; 0: without."""
    dtype = torch.bfloat16 if rank else torch.float32
    model = small_model(name, dropout=0.5).to(dtype)
    model.set_attn_implementation(attention_for(model.config))
    if rank:
        for layer in Adapters(model, Options(rank), seed=0).layers.values():
            factors(layer)[1].data.normal_(0, 0.1)
    policy, passes = Policy(model), []
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = lambda: torch.autograd.grad(policy.logprobs(ROWS).sum(), trained)  # noqa: E731
    expected = gradients()
    checkpoint_layers(model)
    assert all(each.grad is None for each in trained)
    layers = model.base_model.get_submodule({"GPT2": "h", "OPT": "decoder.layers"}.get(name, "layers"))
    for index, layer in enumerate(layers):
        next(layer.children()).register_forward_pre_hook(lambda *_, index=index: passes.append(index))
    assert all(map(torch.equal, gradients(), expected))
    assert sorted(passes) == sorted([*range(len(layers))] * 2)


def test_a_layer_that_backward_does_not_compute_again_is_refused():
    """transformers 5.23 moved its decision behind the hooks of a layer, and the option did nothing."""
    model = qwen2(tied=True)
    layer = model.model.layers[1]
    layer.__class__ = type("Never", (type(layer),), {"training": property(lambda _: False, lambda *_: None)})
    with value_error(f"transformers {transformers.__version__} .* 1 of 2 layers of Qwen2"):
        checkpoint_layers(model)
