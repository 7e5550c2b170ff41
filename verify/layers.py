"""Which layer of the engine differs from the trainer's, and which half of it.

    python -m verify.layers --model PATH --dtype bfloat16

Exit status: 0 none, 1 a layer, 2 bad input, or an error of the command itself (with a traceback).
Forward hooks keep what enters and leaves attention and MLP, and the residual stream after each
layer. The trainer computes each part alone, from the engine's input of that part, so that an
earlier fault cannot hide a later one.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from torch.nn import Module, ModuleList

import model_folder
import verify
from engine_adapter import Engine, ParityFlags, Sampling
from report.errors import exit_with_message, stage
from rl import Policy
from verify.head import check_head
from verify.parity import twice_as_precise

HALVES = {  # by module of a layer
    "self_attn": "attention", "attn": "attention", "attention": "attention",
    "mlp": "MLP", "block_sparse_moe": "MLP", "feed_forward": "MLP",
}
# The squared rounding of both sides, in squares of the trainer's against twice the precision; and
# the RMS of one rounding more, in machine epsilons. In fp32 kernels add long sums in other orders,
# transformers computes norms in fp32 whatever the weights are, and vLLM's CPU kernel computes a
# soft cap with an error that is relative to the cap.
ROUNDING = {torch.float32: (64.0, 4.0), torch.bfloat16: (2.0, 0.21), torch.float16: (2.0, 0.21)}
FLOORS = 1.3  # largest mean of BLOCK neighbouring positions that is no fault
BLOCK = 32
# Random prompts, sent one after another, and the lengths of prompt and response.
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 48, 64
MOST = 10.0  # floors that a token counts at most: rounding sends a few tokens to another expert
# By place, such as "layer 0, input of MLP" or "final norm": (F, T, H). If a layer of vLLM returns
# two tensors, the residual stream is the first or their sum, and F is 2.
States = dict[str, Tensor]
Points = dict[str, tuple[Module, bool]]  # by place: a module, and whether what enters it is kept


def find_modules(model: Module, count: int) -> Points:
    """Around attention and MLP, and after each layer and the model."""
    layers = next((each for each in model.modules()
                   if isinstance(each, ModuleList) and len(each) == count), None)
    if layers is None:
        raise ValueError(f"model must have its {count} decoder layers in a list (their outputs are"
                         f" compared), got {type(model).__name__}")
    points = {"embedding": (layers[0], True), "final norm": (model, False)}
    for index, layer in enumerate(layers):
        points[f"layer {index}, output"] = (layer, False)
        for name, module in layer.named_children():
            if name in HALVES:
                points[f"layer {index}, input of {HALVES[name]}"] = (module, True)
                points[f"layer {index}, {HALVES[name]}"] = (module, False)
    return points


def nearest(forms: Tensor, states: Tensor) -> Tensor:
    """That of the forms which is nearest to the trainer's states: (F, T, H), (T, H) -> (T, H)."""
    return min(forms, key=lambda form: (form - states).norm())


def collect(points: Points, run: Callable[[], Any],
            given: States | None = None) -> tuple[Any, States]:
    """The result of `run`, and the states at each place, which those `given` then replace."""
    seen = defaultdict(list)

    def visit(place: str, *forms: Tensor) -> None:
        flat = torch.stack(forms).flatten(1, -2)  # copies: vLLM's norms write in place
        seen[place].append(flat)
        if given:
            forms[0].copy_(nearest(given[place], flat[0]).view_as(forms[0]))

    def enter(place: str, _module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        visit(place, next(each for each in (*args, *kwargs.values())
                          if isinstance(each, Tensor) and each.is_floating_point()))

    def leave(place: str, _module: Module, _args: tuple, output: Any) -> None:
        first, *rest = [output] if isinstance(output, Tensor) else output[:2]
        alike = [each for each in rest if isinstance(each, Tensor) and each.shape == first.shape]
        visit(place, first, *(first + each for each in alike))

    with ExitStack() as hooks:
        for place, (module, enters) in points.items():
            if enters:
                hook = module.register_forward_pre_hook(partial(enter, place), with_kwargs=True)
            else:
                hook = module.register_forward_hook(partial(leave, place))
            hooks.callback(hook.remove)
        result = run()
    return result, {place: torch.cat(parts, dim=1) for place, parts in seen.items()}


@torch.no_grad()
def compare_layers(policy: Policy, engine: Engine, prompts: list[list[int]],
                   max_new_tokens: int) -> list[dict[str, Any]]:
    """Compare a live engine's layers with the trainer's, one request after another.

    The engine has no prefix cache. Returns the figures of each place. Raises: ValueError if hooks
    would miss layers.
    """
    if any(hasattr(module, "chunk_size") for module in policy.model.modules()):
        raise ValueError("model must have no recurrent layers (hooks do not see inside)")
    count = policy.model.config.num_hidden_layers
    sampling = Sampling(temperature=0.7, max_new_tokens=max_new_tokens)
    ours = find_modules(policy.model.base_model, count)
    theirs = find_modules(engine.vllm_model, count)
    points = {place: ours[place] for place in ours if place in theirs}
    figures = []
    positions = []
    for seed, prompt in enumerate(prompts):
        run = partial(engine.generate, [prompt], 1, sampling, [seed])
        (rollout,), states = collect(theirs, run)
        ids = (prompt + rollout.token_ids)[:-1]
        figures.append(_differences(policy, points, ids, states))
        positions += range(len(ids))
    order = torch.tensor(positions).argsort()
    return [_row(place, *torch.cat([each[place] for each in figures], dim=1)[:, order])
            for place in figures[0]]


def _differences(policy: Policy, points: Points, ids: list[int],
                 theirs: States) -> dict[str, Tensor]:
    """|engine - trainer| / |trainer| and its noise floor, by place: (2, T).

    The floor is the rounding of both sides, measured against twice the precision.
    """
    run = partial(policy.hidden, torch.tensor([ids], device=policy.device))
    _, alone = collect(points, run, theirs)
    with twice_as_precise(policy.model):
        _, precise = collect(points, run, theirs)
    both, one = ROUNDING[policy.model.dtype]
    rounding = (one * torch.finfo(policy.model.dtype).eps) ** 2
    figures = {}
    for place, (own,) in alone.items():
        floor = (both * _relative(precise[place], own).square() + rounding).sqrt()
        figures[place] = torch.stack([_relative(theirs[place], own), floor]).cpu()
    return figures


def _relative(forms: Tensor, own: Tensor) -> Tensor:
    """|other - own| / |own| of each token: (F, T, H), (T, H) -> (T,)."""
    difference = nearest(forms, own).double() - own.double()
    return difference.norm(dim=-1) / own.double().norm(dim=-1).clamp(min=1e-30)


def _row(place: str, difference: Tensor, floor: Tensor) -> dict[str, Any]:
    """The figures of one place from those of N tokens in the order of their positions, (N,)."""
    floors = (difference / floor).nan_to_num(MOST).clamp(max=MOST)
    worst = max(block.mean().item() for block in floors.tensor_split(len(floors) // BLOCK or 1))
    return {"title": place, "difference": difference.mean().item(), "floor": floor.mean().item(),
            "floors": worst, "beyond": worst > FLOORS}


def report(rows: list[dict[str, Any]], title: str) -> str:
    """A line a place (*: beyond its noise floor), and a sentence about the first one beyond."""
    lines = [f"{'place':<28} {'differs':>8} {'floor':>8} floors"]
    for row in rows:
        lines.append(f"{row['title']:<28} {row['difference']:8.1e} {row['floor']:8.1e}"
                     f" {row['floors']:6.2f}{' *' * row['beyond']}")
    beyond = [f"{row['title']}: {row['difference']:.1e}, noise floor {row['floor']:.1e}"
              for row in rows if row["beyond"]]
    first = next(iter(beyond), "all layers are within their noise floors")
    return "\n".join([*lines, f"=> {title}: {first}"])


# ---------------------------------------------------------------------------------- the command
@dataclass(frozen=True, kw_only=True)
class Options:
    """Tell which layer of the model differs in the installed vLLM, and which half of it."""

    model: str  # Folder or hub name of a Hugging Face causal language model.
    # Dtype of the weights, on both sides.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def main(arguments: list[str] | None = None) -> None:
    with exit_with_message(2):
        options = tyro.cli(Options, args=arguments)
        with stage(f"loading the model in {options.model}"):
            model = model_folder.load(options.model, getattr(torch, options.dtype))
            policy = Policy(model.to("cuda" if torch.cuda.is_available() else "cpu"))
            check_head(policy)
        weights = policy.weights()
        engine = Engine(options.model, weights.keys(), ParityFlags(), dtype=policy.model.dtype,
                        max_model_len=PROMPT_TOKENS + NEW_TOKENS)
        # A wrong engine is to be measured, not refused.
        checks = verify.Checks(engine, verify.Options(canary_nats=100))
        engine.load(weights)
        checks.prove(weights)
        checks.run_canary(policy)
        draw = torch.Generator().manual_seed(0)
        shape = NUM_PROMPTS, PROMPT_TOKENS
        prompts = torch.randint(len(policy.head.weight), shape, generator=draw).tolist()
        rows = compare_layers(policy, engine, prompts, NEW_TOKENS)
        engine.close()
        print(report(rows, f"vLLM {engine.vllm_version}, {options.dtype}"))
        sys.exit(int(any(row["beyond"] for row in rows)))


if __name__ == "__main__":
    main()
