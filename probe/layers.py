"""Which layer of the engine differs from the trainer's, and which half of it.

Forward hooks keep what enters and leaves attention and MLP, and the residual stream after each
layer. The trainer computes each part alone, from the engine's input of that part, so that an
earlier fault cannot hide a later one.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from engine_adapter import Engine
from probe.noise import precisely, rounded_otherwise, twice_precise
from rl import Policy
from rollouts import Sampling

HALVES = dict.fromkeys(("self_attn", "attn", "attention"), "attention")  # by module of a layer
HALVES |= dict.fromkeys(("mlp", "block_sparse_moe", "feed_forward"), "MLP")
# The squared rounding of both sides, in squares of the trainer's against twice the precision; and
# the RMS of one rounding more, in machine epsilons. In fp32 kernels add long sums in other orders,
# and transformers computes norms in fp32 whatever the weights are.
ROUNDING = {torch.float32: (16.0, 2.0), torch.bfloat16: (2.0, 0.21), torch.float16: (2.0, 0.21)}
FLOORS = 1.3  # largest mean of BLOCK neighbouring positions that is no fault
BLOCK = 32
MOST = 10.0  # floors that a token counts at most: rounding sends a few tokens to another expert
# Layer (-1: embedding; their number: final norm), and "attention", "MLP", "output", or "input of"
# one of the first two, where the norm before it shows.
Place = tuple[int, str]
States = dict[Place, Tensor]  # (T, H) each


def find_modules(model: Module, count: int) -> dict[Place, Module]:
    """Attention, MLP and the whole of each decoder layer, and the model."""
    found: dict[Place, Module] = {(count, "output"): model}
    lists = [each for each in model.modules() if isinstance(each, ModuleList)]
    layers = [each for each in lists if len(each) == count]
    if not layers:
        raise ValueError(f"model must have its {count} decoder layers in a list (their outputs are"
                         f" compared), got {type(model).__name__}")
    for index, layer in enumerate(layers[0]):
        found |= {(index, HALVES[name]): each for name, each in layer.named_children()
                  if name in HALVES} | {(index, "output"): layer}
    return found


def collect(modules: dict[Place, Module], run: Callable[[], Any],
            given: States | None = None) -> tuple[Any, States]:
    """The result of `run`, and the states at each place, which those `given` then replace.

    `given` has both forms of vLLM's residual streams; the one that fits is left in it.
    """
    seen = defaultdict(list)

    def visit(place: Place, states: Tensor) -> None:
        seen[place].append(states.flatten(0, -2).clone())  # vLLM's norms write in place
        if not given:
            return
        if place[1] == "output" and (place[0], "sum") in given:
            both = given[place], given.pop((place[0], "sum"))
            given[place] = min(both, key=lambda each: (each.view_as(states) - states).norm())
        states.copy_(given[place].view_as(states))

    def enter(place: Place, _module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        visit(place, next(each for each in tensors if each.is_floating_point()))

    def leave(place: Place, _module: Module, _args: tuple, output: Any) -> None:
        if place[1] == "output" and isinstance(output, tuple):
            visit((place[0], "sum"), output[0] + output[1])
        visit(place, output if isinstance(output, Tensor) else output[0])

    entries = {(layer, part): (layer, f"input of {part}") for layer, part in modules
               if part != "output"} | {(0, "output"): (-1, "output")}
    hooks = [each.register_forward_hook(partial(leave, place)) for place, each in modules.items()]
    hooks += [modules[place].register_forward_pre_hook(partial(enter, entry), with_kwargs=True)
              for place, entry in entries.items()]
    try:
        result = run()
    finally:
        for hook in hooks:
            hook.remove()
    return result, {place: torch.cat(parts) for place, parts in seen.items()}


@torch.no_grad()
def compare_layers(policy: Policy, engine: Engine, prompts: list[list[int]], seeds: list[int],
                   sampling: Sampling) -> list[dict[str, Any]]:
    """Compare a live engine's layers with the trainer's, one request after another.

    Returns the figures of each place. Raises: ValueError if hooks would miss layers.
    """
    model, count = engine.runner.get_model(), policy.model.config.num_hidden_layers
    _refuse_what_hooks_miss(policy, engine)
    trainers, engines = find_modules(policy.model.base_model, count), find_modules(model, count)
    trainers = {place: module for place, module in trainers.items() if place in engines}
    engines = {place: engines[place] for place in trainers}
    figures, positions, decoded = [], [], []
    twice = twice_precise(policy, dict(policy.model.named_parameters()))
    for prompt, seed in zip(prompts, seeds, strict=True):
        run = partial(engine.generate, [prompt], 1, sampling, [seed])
        (rollout,), theirs = collect(engines, run)
        ids = (prompt + rollout.token_ids)[:-1]
        places, values = _differences(policy, twice, trainers, ids, theirs)
        figures.append(values)
        positions.append(torch.arange(len(ids)))
        decoded.append(positions[-1] >= len(prompt))
    order = torch.cat(positions).argsort()
    decoded = torch.cat(decoded)[order]
    phases = {"prefill": order[~decoded], "decode": order[decoded]}
    ends = {-1: "embedding", count: "final norm"}
    return [{"title": ends.get(layer, f"layer {layer}, {part}"), "layer": layer, "part": part}
            | _row(phases, *values)
            for (layer, part), values in zip(places, torch.cat(figures, dim=2), strict=True)]


def _refuse_what_hooks_miss(policy: Policy, engine: Engine) -> None:
    recurrent = any(hasattr(module, "chunk_size") for module in policy.model.modules())
    for what, there in {"prefix cache": not engine.parity.uncached_runtime,
                        "recurrent layers": recurrent}.items():
        if there:
            raise ValueError(f"engine must have no {what} (hooks do not see inside), got {what}")


def _differences(policy: Policy, twice: dict[str, Tensor], modules: dict[Place, Module],
                 ids: list[int], theirs: States) -> tuple[list[Place], Tensor]:
    """P places; |engine - trainer| / |trainer| and its noise floor: (P, 2, T).

    The floor is the trainer's difference to its second path (probe/noise.py), but at least the
    rounding of both sides, measured against `twice` the precision.
    """
    run = partial(policy.hidden, torch.tensor([ids], device=policy.device))

    def ours() -> States:
        return collect(modules, run, theirs)[1]

    def relative(states: States) -> Tensor:  # (P, T)
        pairs = [(states[place].double(), alone[place].double()) for place in alone]
        return torch.stack([(one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)
                            for one, other in pairs])

    alone = ours()
    with rounded_otherwise(policy):
        second = relative(ours())
    both, one = ROUNDING[policy.model.dtype]
    with precisely(policy, twice):
        squares = both * relative(ours()).square()
    squares = squares + (one * torch.finfo(policy.model.dtype).eps) ** 2
    floor = squares.sqrt().maximum(second)
    return list(alone), torch.stack([relative(theirs), floor], dim=1).cpu()


def _row(phases: dict[str, Tensor], difference: Tensor, floor: Tensor) -> dict[str, Any]:
    """The figures of one place from those of N tokens, (N,) each; `phases` has ordered tokens."""
    worst = {}
    for phase, tokens in phases.items():
        floors = (difference / floor)[tokens].clamp(max=MOST)
        blocks = floors.tensor_split(len(tokens) // BLOCK or 1)
        worst[phase] = max(block.mean().item() for block in blocks)
    return {"difference": difference.mean().item(), "floor": floor.mean().item(),
            "floors": max(worst.values()),
            "beyond": [phase for phase, mean in worst.items() if mean > FLOORS]}


def report(rows: list[dict[str, Any]], title: str) -> str:
    """A line a place (*: beyond its noise floor), and a sentence about the first one beyond."""
    lines = [f"{'place':<28} {'differs':>8} {'floor':>8} floors"]
    for row in rows:
        lines.append(f"{row['title']:<28} {row['difference']:8.1e} {row['floor']:8.1e}"
                     f" {row['floors']:6.2f}{' *' * bool(row['beyond'])}")
    beyond = [f"{row['title']}: {row['difference']:.1e}, noise floor {row['floor']:.1e}, in"
              f" {' and '.join(row['beyond'])}" for row in rows if row["beyond"]]
    first = next(iter(beyond), "all layers are within their noise floors")
    return "\n".join([*lines, f"=> {title}: {first}"])
