"""`--replay-routes`: the trainer sends each token to the experts that the engine has chosen (R3).

The weights of these experts are the trainer's own, with gradient. Without the option the engine's
choice is recorded as well, and the share of tokens that the trainer sends elsewhere is measured:
docs/fixes.md has the reasons. Source: Ma et al. 2025, arXiv 2510.11370.
"""

from functools import partial
from statistics import NormalDist
from typing import Any

import numpy
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from engine_adapter import Engine
from rl import Batch, Policy, default_body, plain_body

UNKNOWN = -1  # of a token that the engine has not computed, and of padding


# ---------------------------------------------------------------------------------- engine
class RoutedEngine(Engine):
    """An `Engine` whose rollouts have `routes`: a hook of vLLM's routers reports their choice.

    On a CPU alone; run.py makes no such engine on a GPU.
    """

    def _start(self, arguments: dict[str, Any]) -> None:
        super()._start(arguments)
        self._chosen = {}  # in this step, by layer in their order: (tokens, k)
        for module in self.vllm_model.modules():
            router = getattr(module, "router", None)
            if hasattr(router, "set_capture_fn"):
                router.set_capture_fn(partial(self._chosen.__setitem__, module.layer_id))
        self.vllm_model.register_forward_hook(self._note)

    def _note(self, *_) -> None:
        """Called after each forward pass. A preempted request computes its first tokens again."""
        if not self._chosen:  # vLLM's model has no such routers
            return
        rows = torch.stack([*self._chosen.values()], dim=1).short().numpy()  # (tokens, layers, k)
        batch, starts = self.runner.input_batch, self.runner.query_start_loc.np
        for index, name in enumerate(batch.req_ids):
            if name not in self._requests:  # finished: async scheduling computes it once more
                continue
            computed = int(batch.num_computed_tokens_cpu[index])
            routes = self._requests[name].routes
            del routes[computed:]
            # Tokens of a prompt in the prefix cache.
            routes += [numpy.full_like(rows[0], UNKNOWN)] * (computed - len(routes))
            routes += [*rows[starts[index] : starts[index + 1]]]


# ---------------------------------------------------------------------------------- trainer
class Router(TorchFunctionMode):
    """A router of a model: while it runs, `topk` over its experts returns the `given` routes.

    The values are the model's own, gathered, so no formula of an architecture is needed. Where the
    routes are UNKNOWN, and without them, the choice is the router's `own`, (tokens, k).
    """

    own = given = None

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.experts = len(module.weight)
        # A hook that returns something would replace the module's input.
        module.register_forward_pre_hook(lambda *_: self.__enter__() and None)
        module.register_forward_hook(lambda *_: self.__exit__(None, None, None), always_call=True)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self.experts:
            return found  # such as a choice among groups of experts
        self.own = found.indices
        if self.given is None:
            return found
        chosen = self.own.where(self.given < 0, self.given)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def routes_of(batch: Batch) -> Tensor | None:
    """(B, T, layers, k), UNKNOWN where the engine has computed nothing; None: it has not at all."""
    if not any(rollout.routes for rollout in batch.rollouts):
        return None
    # Async scheduling also computes the last token of some rows.
    known = [torch.from_numpy(numpy.stack(rollout.routes[:length])).long() for rollout, length
             in zip(batch.rollouts, batch.input_lengths.tolist(), strict=True)]
    return pad_sequence(known, batch_first=True, padding_value=UNKNOWN).to(batch.inputs.device)


class Routes:
    """The routers of a mixture: their choice is compared with the engine's, or replaced by it.

    `metrics` are a policy's `further_metrics`; with `replay`, `replayed` is its `body`.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.routers = [Router(module) for module in model.modules()
                        if type(module).__name__.lower().endswith("topkrouter")]

    @torch.no_grad()
    def parts(self, replay: bool) -> dict[str, Any]:
        """What a `Policy` of the model is given. Replay computes each row whole: copies of a prompt
        can be routed differently.

        Raises: ValueError with `replay` if a router does not choose with `topk`, and with gradient
        checkpointing, which would compute a layer again without its routes.
        """
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model.base_model(input_ids=token, use_cache=False)  # shows which routers use `topk`
        known = self.routers and all(router.own is not None for router in self.routers)
        if not replay:
            return {"further_metrics": (self.metrics,)} if known else {}
        if not known:
            raise ValueError(f"replay_routes must be off with {type(self.model).__name__} (it has"
                             " no routers that choose experts with topk), got True")
        if self.model.is_gradient_checkpointing:
            raise ValueError("replay_routes must be off with gradient_checkpointing, got True")
        # The trainer's own choice: `eval_agree` shows what replay hides.
        return {"further_metrics": (self.metrics,), "body": self.replayed,
                "free_body": default_body(self.model)}

    def replayed(self, policy: Policy, batch: Batch, response: Tensor) -> Tensor:
        """`rl.plain_body` with the engine's routes: (B, T) bool -> (N, H)."""
        routes = routes_of(batch)
        if routes is None:  # of the canary
            return plain_body(policy, batch, response)
        known = (routes[..., 0, 0] >= 0).sum(dim=1)
        assert known.equal(batch.input_lengths), f"{known=} {batch.input_lengths=}"
        by_layer = rearrange(routes, "b t layers k -> layers (b t) k")
        for router, given in zip(self.routers, by_layer, strict=True):
            router.given = given
        states = plain_body(policy, batch, response)
        for router in self.routers:
            router.given = None
        return states

    def metrics(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """Figures of the whole batch on each of its tokens, after its forward pass: (B, T) by name.

        `routed_otherwise`: the share of the responses' tokens and layers for which the engine chose
        another set of k of E experts. `router_noise`: the noise of Gaussian router logits that
        gives the share of the first router, in their standard deviations: share sqrt(pi) / (E
        phi(z)), with P(x > z) = k / (E + 1). E phi(z) is the density of logits at the threshold, so
        models can be compared. At later routers rounding has grown, and tokens that were routed
        otherwise arrive changed. A response's last token is no input.
        """
        routes = routes_of(batch)
        assert routes is not None or policy.body != self.replayed, "the engine recorded no routes"
        if routes is None or batch.input_lengths.equal(batch.prompt_lengths):
            return {}
        own = rearrange([router.own for router in self.routers],
                        "layers (b w) k -> b w layers k", b=len(batch.inputs))
        columns, starts = torch.arange(batch.inputs.shape[1]), batch.prompt_lengths[:, None]
        in_row = columns < batch.input_lengths[:, None]  # (B, T)
        response = in_row & (columns >= starts)  # (B, T), N of them
        theirs = routes[response]  # (N, layers, k)
        if own.shape[1] < len(columns):  # `prompts_once` has computed responses alone
            response = columns[: own.shape[1]] < batch.input_lengths[:, None] - starts
        other = (own[response].sort().values != theirs.sort().values).any(dim=-1)  # (N, layers)
        share, first = (each.float().mean() * (batch.mask > 0) for each in (other, other[:, 0]))
        normal, experts = NormalDist(), self.routers[0].experts
        density = experts * normal.pdf(normal.inv_cdf(own.shape[-1] / (experts + 1)))
        return {"routed_otherwise": share, "router_noise": first * torch.pi**0.5 / density}
