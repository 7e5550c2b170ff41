"""Is my stack hit? Compare a vLLM engine with the transformers model whose weights it should have.

For a program that holds both (vLLM 0.8.5 or newer); proof.py, beside this file, proves the loads.

    from parity import check
    print(check(llm, model, sync=load_weights))  # between two steps

    python parity.py --model PATH --engine-args '{"dtype": "bfloat16"}'  # without a trainer

`sync` is the program's own load: it is called with the weights a little moved, and again when they
are back. Weights, random states and requests are afterwards as before; the prefix cache has blocks
of random prompts more. Differences are in nats. Rounding alone is no hit, but a 16-bit head is one
if it adds to the rounding of the layers before it. Exit status: 0 no hit, 1 a hit, 2 bad input.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

try:
    from . import proof
except ImportError:  # beside another program
    import proof

SIXTEEN = torch.bfloat16, torch.float16
MOVE, LEAST = 0.1, 0.01  # of a tensor's standard deviation, or of LEAST: how far weights are moved
FLOOR = 1e-5  # nats: 118 of 122 random models in float32 are below it
NOISE, WRONG = 2.0, 8.0  # times the model's own noise: an engine that rounds; more than rounding
STALE = 2.5  # times the larger of noise and the error on other prompts: a stale cache
SIGMAS = 4.0  # standard errors by which the nearest hypothesis must be nearer than each other one
HEAD = 1.25  # times the noise of a float32 head; less is hidden by the layers before it
EDGE = 0.05  # share of the tokens that rounding may put on the other side of a mask's edge

NEUTRAL = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0}  # vLLM's names
PARTS = {"the temperature": [*NEUTRAL][:1], "the mask": [*NEUTRAL][1:4],
         "penalties": [*NEUTRAL][4:]}  # fmt: skip
PROCESSED = "processed"
SHIFTS = {"of the place before": -1, "of the place after": 1}
HEADS = FLOAT32, IN_16_BITS = "float32", "16 bits"
OWN = "own weights"
Row = tuple[list[int], list[int]]  # token ids of a prompt and of its response

HIT, OK, CANNOT_TELL = "hit", "ok", "cannot tell"
ALL = "every objective, with a correction or without"
REPAIRS = {  # by line: what to paste, and for which objectives a hit matters
    "semantics": ('LLM(..., logprobs_mode="processed_logprobs")  # since vLLM 0.10',
                  "a loss with the engine's values: two policies (a ratio to them), corrections"),
    "head": ('LLM(..., hf_overrides={"head_dtype": "float32"})  # since 0.26; in the trainer:'
             " states.float() @ head.weight.float().T", f"{ALL}; the least of the faults"),
    "numerics": ("python -m verify.layers  # names the layer (docs/probe.md)", ALL),
    "weights": ('LLM(..., dtype="float32")  # or give both sides the rounded ones', ALL),
    "cache": ("LLM(..., enable_prefix_caching=False)  # or reset_prefix_cache() after each load",
              ALL),
    "loads": ("send each tensor of state_dict() in each load, a tied head under its own name too",
              ALL),
    "trainer": ("score the sampled tokens, with the sampler's temperature and mask", ALL),
}  # fmt: skip
Found = tuple[str, str, dict[str, float]]  # verdict, what was found, figures


# ------------------------------------------------------------------------- the distribution
def sampling_of(given: Any) -> dict[str, float]:
    """The entries of NEUTRAL, from a dictionary or an object such as SamplingParams.

    Raises: ValueError.
    """
    if not isinstance(given, dict):
        given = {name: getattr(given, name, None) for name in NEUTRAL}
    given = {name: value for name, value in given.items() if value is not None}
    are_numbers = all(isinstance(value, int | float) for value in given.values())
    if given.keys() - NEUTRAL.keys() or not are_numbers or given.get("temperature", 1) <= 0:
        raise ValueError(f"sampling must have some of {', '.join(NEUTRAL)}, and a temperature above"
                         f" 0, got {given}")
    return NEUTRAL | given | {"top_k": given.get("top_k") or -1}  # 0 is off, too


def hypotheses(sampling: dict[str, float]) -> dict[str, dict[str, float]]:
    """The distributions that a side may report for `sampling`, by name."""
    found = {PROCESSED: sampling, "raw": NEUTRAL}
    for part, names in PARTS.items():
        lacking = sampling | {name: NEUTRAL[name] for name in names}
        if lacking not in found.values():
            found[f"without {part}"] = lacking
    return {name: each for name, each in found.items() if name == PROCESSED or each != sampling}


def drawn_from(
    logits: Tensor, prompt: Tensor, response: Tensor, *, temperature: float, top_k: int,
    top_p: float, min_p: float, repetition_penalty: float, presence_penalty: float,
    frequency_penalty: float,
) -> Tensor:
    """Log-probabilities of the distribution that vLLM samples the response from: (n, V) -> (n, V).

    Source: vLLM's v1/sample/sampler.py: penalties, temperature, min-p, top-k, top-p. V0 applied
    min-p last.
    """
    width = logits.shape[-1]
    sampled = one_hot(response, width)
    counts = sampled.cumsum(0) - sampled  # of the tokens before
    seen = counts + prompt.bincount(minlength=width) > 0
    repeated = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    logits = torch.where(seen, repeated, logits)
    logits = logits - frequency_penalty * counts - presence_penalty * (counts > 0)
    ordered, order = (logits / temperature).sort(descending=True)
    kept = ordered.softmax(-1) >= min_p * ordered.softmax(-1)[:, :1]
    if top_k > 0:
        kept &= ordered >= ordered[:, :top_k][:, -1:]
    left = ordered.masked_fill(~kept, -inf).softmax(-1)
    if top_p < 1:
        kept &= left.cumsum(-1) - left < top_p  # of all likelier ones
    cut = ordered.masked_fill(~kept, -inf)
    return torch.empty_like(cut).scatter(-1, order, cut).log_softmax(-1)


# ------------------------------------------------------------------------- the model's values
class Widened(TorchFunctionMode):
    """Each function of torch gets narrower floats as wide ones: no second model is in memory."""

    def __init__(self, wide: torch.dtype):
        super().__init__()
        self.wide = wide
        self.narrow = {torch.float32: SIXTEEN, torch.float64: (torch.float32, *SIXTEEN)}[wide]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(self.wide) if value.dtype in self.narrow else value
            return self.wide if value in self.narrow else value

        if function in (Tensor.data.__get__, Tensor.data.__set__):  # a program swaps parameters
            return function(*args)
        return function(*tree_map(widened, args), **tree_map(widened, kwargs or {}))


def wide_dtype(model: Any) -> torch.dtype:
    return torch.float64 if model.dtype == torch.float32 else torch.float32


@contextmanager
def twice_as_precise(model: Any) -> Iterator[None]:
    """Experts run eagerly: torch has no grouped float64 product."""
    usual = getattr(model, "get_experts_implementation", lambda: None)()
    if usual:  # transformers 5
        model.set_experts_implementation("eager")
    try:
        with Widened(wide_dtype(model)):
            yield
    finally:
        if usual:
            model.set_experts_implementation(usual)


def logits_of(model: Any, ids: Tensor, weights: dict[str, Tensor], head: str,
              old: dict[str, Tensor] | None = None, cached: int = 0) -> Tensor:
    """Logits with these weights in place of the model's: (L,) -> (L, V).

    `head` FLOAT32: the head and what follows it compute in float32. The first `cached` tokens have
    keys and values of the `old` weights, as in a stale cache; the logits of these tokens are 0.
    """
    call = partial(torch.func.functional_call, model)
    inputs = {"input_ids": ids[None, cached:], "use_cache": cached > 0}
    if cached:
        first = call(old, (), inputs | {"input_ids": ids[None, :cached]})
        inputs["past_key_values"] = first.past_key_values
    with ExitStack() as stack:
        def widen(*_: Any) -> None:
            stack.enter_context(Widened(torch.float32))

        for module in (model, model.get_output_embeddings()):
            if own := vars(module).pop("forward", None):  # a trainer's autocast or float32 head
                stack.callback(setattr, module, "forward", own)
        if head == FLOAT32:
            stack.enter_context(model.get_output_embeddings().register_forward_pre_hook(widen))
        return pad(call(weights, (), inputs).logits[0], (0, 0, cached, 0))


def size_of(error: Tensor, edge: float = EDGE) -> Tensor:
    """|error| (N,); NaN for a few tokens at the edge of a mask, 1 nat for more than a few."""
    outside = ~error.isfinite()
    few = outside.double().mean() <= edge
    return error.abs().masked_fill(outside, nan if few else 1.0)


def beyond_chance(values: Tensor) -> bool:
    """Whether their mean, or that of their signs, is above 0 by SIGMAS standard errors. NaN is left
    out.
    """
    known = values[values.isfinite()]
    if len(known) < 4:  # too few tokens for a standard deviation
        return False
    by_size, by_sign = known.mean() / known.std(), known.sign().mean()
    return bool(max(by_size, by_sign) * len(known) ** 0.5 > SIGMAS)


class Sampled:
    """What the engine reports of N sampled tokens, and the model's own values of them.

    `values`: (N,) by hypothesis, in twice the model's precision, from weights that are rounded to
    the engine's `dtype`; `by_rounding`: how far those of the weights as they are differ. `noise`:
    by head, how far the values in that dtype differ. With `old` weights, the full blocks of each
    prompt (of `block` tokens) have keys and values computed by them, as in a stale cache.
    """

    def __init__(self, model: Any, sampling: dict[str, float], dtype: torch.dtype,
                 rows: Sequence[Row], reported: Sequence[float],
                 old: dict[str, Tensor] | None = None, block: int = 0):
        self.rows, self.reported = rows, torch.as_tensor(reported, dtype=torch.float64)
        rounded = {name: tensor.to(dtype) for name, tensor in model.named_parameters()
                   if tensor.is_floating_point() and tensor.dtype != dtype}
        values = defaultdict(list)
        for row in rows:
            prompt, response = (torch.tensor(ids, device=model.device) for ids in row)
            cached = (len(prompt) - 1) // block * block if old else 0  # a full hit leaves one token
            compute = partial(logits_of, model, torch.cat([prompt, response]), old=old,
                              cached=cached)
            with twice_as_precise(model):
                exact = compute(rounded, "")
                own = compute({}, "") if rounded else exact
            readings = {name: (exact, 0, each) for name, each in hypotheses(sampling).items()}
            readings[OWN] = own, 0, sampling
            readings |= {name: (exact, shift, sampling) for name, shift in SHIFTS.items()}
            readings |= {head: (compute(rounded, head), 0, sampling) for head in HEADS}
            for name, (logits, shift, each) in readings.items():
                places = logits[len(prompt) - 1 + shift:][:len(response)]
                wide = places.to(torch.promote_types(places.dtype, torch.float32))
                logprobs = drawn_from(wide, prompt, response, **each)
                values[name].append(logprobs.gather(-1, response[:, None])[:, 0].double().cpu())
        self.values = {name: torch.cat(parts) for name, parts in values.items()}
        apart = {name: size_of(self.values.pop(name) - self.values[PROCESSED]).nanmean().item()
                 for name in (OWN, *HEADS)}
        self.by_rounding, self.noise = apart.pop(OWN), apart

    def judged(self, reported: Tensor, names: Iterable[str]) -> tuple[str, bool, dict[str, float]]:
        """The hypothesis that is nearest to `reported`; whether it is so beyond chance; the mean
        error under each.
        """
        sizes = {name: size_of(reported - self.values[name]) for name in names}
        errors = {name: size.nanmean().item() for name, size in sizes.items()}
        best = min(errors, key=errors.get)
        excess = [size - sizes[best] for name, size in sizes.items() if name != best]
        return best, all(map(beyond_chance, excess)), errors

    @property
    def head_noise_ratio(self) -> float:
        """The noise with a head in 16 bits, in multiples of that with a float32 head."""
        return self.noise[IN_16_BITS] / max(self.noise[FLOAT32], FLOOR)

    def times_noise(self, reports: str, head: str) -> float:
        """The engine's mean error in multiples of the model's own noise."""
        error = size_of(self.reported - self.values[reports]).nanmean().item()
        return error / max(self.noise[head], FLOOR / NOISE)


# ------------------------------------------------------------------------- what is checked
@dataclass
class Line:
    """One thing that was checked; `figures` are in nats."""

    name: str
    verdict: str  # HIT, OK or CANNOT_TELL
    text: str
    figures: dict[str, float]

    def __str__(self) -> str:
        text = f"{self.name:<10} {self.verdict:<12} {self.text}"
        if self.verdict == HIT:
            paste, objectives = REPAIRS[self.name]
            text += f"\n{'paste':>23} {paste}\n{'matters for':>23} {objectives}"
        return text


class Report(list[Line]):
    """What `check` found."""

    @property
    def status(self) -> int:
        return int(HIT in [line.verdict for line in self])

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def head_dtype(worker: Any) -> str:
    """The dtype in which a worker computes its head's product."""
    model, config = worker.get_model(), worker.model_config
    width = config.get_hidden_size()
    states = torch.linspace(-1, 1, 8 * width).view(8, width).to(worker.device, config.dtype)
    unused = [None] * (len(signature(model.compute_logits).parameters) - 1)  # of older versions
    with torch.no_grad():
        return dtype_of_values(model.compute_logits(states, *unused), config.dtype)


def dtype_of_values(logits: Tensor, likely: torch.dtype) -> str:
    """16 bits if these hold the values, because a cast to float32 may follow the product."""
    for dtype in (likely, *SIXTEEN):
        if dtype in SIXTEEN and torch.equal(logits.to(dtype).to(logits.dtype), logits):
            return name_of(dtype)
    return name_of(logits.dtype)


class Worker(proof.Worker):
    """For an engine in another process: LLM(..., worker_extension_cls="parity.Worker")."""

    head_dtype = head_dtype


class Audit:
    """An engine, the model that it should be, and what both say of tokens that it samples."""

    def __init__(self, llm: Any, model: Any, sampling: Any, new_tokens: int):
        self.llm, self.model, self.given, self.new_tokens = llm, model, sampling, new_tokens
        self.sampling = sampling_of(sampling or {"temperature": 0.7})  # raw values show there
        self.config = llm.llm_engine.vllm_config
        self.dtype = name_of(self.config.model_config.dtype)
        self.prompts = self.random_prompts()
        self.first = self.read(self.generate(self.prompts))
        self.reports, self.is_sure, self.errors = self.first.judged(
            self.first.reported, hypotheses(self.sampling))
        self.engine_head = IN_16_BITS  # as long as nothing is known

    def random_prompts(self) -> list[list[int]]:
        """Others at each call, longer than a block of the cache. The end of a vocabulary may be
        unused.
        """
        config, generator = self.config.model_config, torch.Generator()
        generator.seed()
        length = self.config.cache_config.block_size + 16
        shape = 16, min(length, config.max_model_len - self.new_tokens)
        return torch.randint(config.get_vocab_size() * 9 // 10, shape, generator=generator).tolist()

    def generate(self, prompts: list[list[int]]) -> list[Any]:
        """Each request has a seed, so that no random state outside moves."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        requests = [SamplingParams(**self.sampling, max_tokens=self.new_tokens, logprobs=0,
                                   seed=seed, ignore_eos=True, detokenize=False)
                    for seed in range(len(prompts))]
        return self.llm.generate(inputs, requests, use_tqdm=False)

    def read(self, outputs: Sequence[Any]) -> Sampled:
        pairs = [(each.prompt_token_ids, each.outputs[0]) for each in outputs]
        reported = [entry[token].logprob for _, answer in pairs
                    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        rows = [([*prompt], [*answer.token_ids]) for prompt, answer in pairs]
        dtype = self.config.model_config.dtype
        return Sampled(self.model, self.sampling, dtype, rows, reported)

    def semantics(self) -> Found:
        """Which distribution the engine reports."""
        given = ", ".join(f"{name} {value}" for name, value in self.sampling.items()
                          if value != NEUTRAL[name])
        shown = ", ".join(f"{error:.1e} if {name}" for name, error in self.errors.items())
        shown += f" (at {given or 'temperature 1'})"
        if len(self.errors) == 1:
            return OK, f"raw and processed values are equal with this sampling: {shown}", {}
        best, second, *_ = sorted(self.errors.values())
        if second < 2 * best and self.first.times_noise(self.reports, IN_16_BITS) > WRONG:
            return CANNOT_TELL, f"far from each distribution: {shown}", self.errors
        if not self.is_sure:
            return CANNOT_TELL, f"distributions differ by less than the error: {shown}", self.errors
        verdict = OK if self.reports == PROCESSED else HIT
        return verdict, f"{self.reports} log-probabilities: {shown}", self.errors

    def head(self) -> Found:
        """Whether the engine's last product adds to the rounding of the layers before it."""
        kind, times = proof.in_worker(self.llm, head_dtype), self.first.head_noise_ratio
        if kind == FLOAT32:
            self.engine_head = kind
            return OK, kind, {}
        text = f"{kind}, {times:.1f} times the rounding of a float32 head"
        return HIT if times > HEAD else OK, text, self.first.noise

    def numerics(self) -> Found:
        """The rest, against the model's own rounding in the engine's dtype."""
        times = self.first.times_noise(self.reports, self.engine_head)
        error = self.errors[self.reports]
        text = f"{error:.1e}, {times:.1f} times the model's own noise in {self.dtype}"
        figures = {"error": error, **self.first.noise}
        if wrong := int((~self.first.reported.isfinite()).sum()):
            return HIT, f"{wrong} of {len(self.first.reported)} log-probabilities not finite", {}
        if times < NOISE:
            return OK, f"as good as {self.dtype} allows: {text}", figures
        return (HIT if times > WRONG else CANNOT_TELL, f"more than rounding: {text}; look at the"
                " loads, then at the model's class and kernels, and repeat it in float32", figures)

    def weights(self) -> Found:
        """Whether the engine rounds the model's weights, and what that changes."""
        apart, own = self.first.by_rounding, name_of(self.model.dtype)
        if not apart:
            return OK, f"{own} in the model, {self.dtype} in the engine", {}
        text = f"rounded to {self.dtype} in the engine, which changes the values by {apart:.1e}"
        verdict = HIT if apart > WRONG * self.first.noise[IN_16_BITS] else OK
        return verdict, text, {"by_rounding": apart}

    def defaults(self) -> Found:
        """Values of generation_config.json, which vLLM gives to requests that do not name them."""
        default = sampling_of(self.llm.get_default_sampling_params())
        acting = dict(default.items() - NEUTRAL.items())
        if self.given or not acting:
            return OK, "none acts", {}
        return CANNOT_TELL, (f"requests that name none have {acting}: give check your sampling, or"
                             ' LLM(..., generation_config="vllm")'), {}

    def trainer(self, logprobs: Callable[[list[int], list[int]], Sequence[float]]) -> Found:
        """Which distribution the trainer scores, and of which tokens."""
        try:
            trained = [[float(value) for value in logprobs(*row)] for row in self.first.rows]
        except (TypeError, RuntimeError) as error:  # None, or rows of several values
            raise ValueError(f"trainer must return one row of numbers ({error})") from error
        if [*map(len, trained)] != [len(response) for _, response in self.first.rows]:
            raise ValueError("trainer must return a number for each token of the response")
        values = torch.tensor([*chain(*trained)], dtype=torch.float64)
        if wrong := int((values.isnan() | (values == inf)).sum()):
            return HIT, f"{wrong} of {len(values)} values are not finite", {}
        own = Sampled(self.model, self.sampling, self.model.dtype, self.first.rows, values)
        fits = [each.judged(values, each.values) for each in (self.first, own)]  # it may round, too
        scores, is_sure, errors = min(fits, key=lambda fit: fit[2][fit[0]])
        text = f"{errors[PROCESSED]:.1e} from the sampler's distribution"
        times = errors[scores] / (self.first.noise[IN_16_BITS] + FLOOR)
        if times > WRONG:
            return HIT, f"{text}: other weights or tokens", errors
        if not is_sure:
            return CANNOT_TELL, f"{text}, and others differ from it by less than rounding", errors
        if scores != PROCESSED:
            return HIT, f"{text}, {errors[scores]:.1e} from that {scores}", errors
        return OK if times < NOISE else CANNOT_TELL, f"{text}, {times:.1f} times the noise", errors

    def cache(self, before: list[Any]) -> Found:
        """After a load: prompts that were sampled twice before it, and others."""
        outputs, others = self.generate(self.prompts), self.generate(self.random_prompts())
        seen, self.fresh = (self.read(each).times_noise(self.reports, self.engine_head)
                            for each in (outputs, others))
        were, are = (sum(each.num_cached_tokens or 0 for each in some)
                     for some in (before, outputs))
        text = (f"after a load {are} of {were} prompt tokens are still cached: {seen:.1f} times the"
                f" noise, on other prompts {self.fresh:.1f}")
        if are or seen > STALE * max(self.fresh, 1):
            return HIT, text, {}
        if self.config.cache_config.enable_prefix_caching and not were:
            return CANNOT_TELL, "no prompt of this check fills a block of the cache", {}
        return OK, text, {}

    def loads(self) -> Found:
        """Every tensor of the engine against the model's."""
        try:
            report = proof.differing(self.llm, self.model.state_dict())
        except ValueError as error:
            return CANNOT_TELL, str(error), {}
        rest = [*report.not_compared, *report.not_given]
        shown = f"not compared: {', '.join(rest[:3])} ({len(rest)})" if rest else "equal bits"
        if report.differing:
            return HIT, f"wrong: {', '.join(report.differing[:3])} ({len(report.differing)})", {}
        return CANNOT_TELL if rest else OK, shown, {}

    def path(self, sync: Callable[[], Any] | None) -> Iterator[Line]:
        """The lines about a load."""
        loads = self.line("loads", self.loads)
        if sync is None or loads.verdict == HIT:  # the engine would not get its own weights back
            is_on = self.config.cache_config.enable_prefix_caching
            text = "on; with sync=your load, and the same weights on both sides, it is tested"
            yield loads
            yield Line("cache", CANNOT_TELL if is_on else OK, text if is_on else "off", {})
            return
        before = self.generate(self.prompts)
        with moved(self.model, sync):
            yield self.line("cache", partial(self.cache, before))
            loads = self.line("loads", self.loads)
        if loads.verdict == CANNOT_TELL and self.fresh > WRONG > self.first.times_noise(
                self.reports, self.engine_head):
            loads = replace(loads, verdict=HIT, text="the moved weights did not arrive")
        yield loads

    def line(self, name: str, make: Callable[[], Found]) -> Line:
        try:
            return Line(name, *make())
        except proof.OutOfReach as reason:
            return Line(name, CANNOT_TELL, str(reason), {})


@contextmanager
def moved(model: Any, sync: Callable[[], Any]) -> Iterator[None]:
    """Other weights, loaded; afterwards the same as before, to the bit, and loaded again."""
    trained = [each for each in model.parameters() if each.requires_grad] or [*model.parameters()]
    saved = [each.detach().to("cpu", copy=True) for each in trained]
    generator = torch.Generator().manual_seed(0)
    try:
        for each, before in zip(trained, saved, strict=True):
            scale = MOVE * before.double().std(correction=0).clamp(min=LEAST).float()
            each.copy_(before.float() + scale * torch.randn(before.shape, generator=generator))
        sync()
        yield
    finally:
        for each, before in zip(trained, saved, strict=True):
            each.copy_(before)
        sync()
        if not all(map(torch.equal, (each.cpu() for each in trained), saved)):
            raise ValueError("sync must not change the model: its weights are others now")


# ------------------------------------------------------------------------- the check
@torch.no_grad()
def check(
    llm: Any, model: Any, sync: Callable[[], Any] | None = None, *, sampling: Any = None,
    trainer: Callable[[list[int], list[int]], Sequence[float]] | None = None, new_tokens: int = 32,
) -> Report:
    """Compare a vllm.LLM with the transformers model whose weights it should have.

    `sampling`: the program's own, a SamplingParams or a dictionary (else temperature 0.7).
    `trainer(prompt, response)`: its log-probabilities of the response, from lists of token ids.
    Raises: ValueError if the engine is asleep or has unfinished requests.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise ValueError("the engine must have no unfinished request: check between two steps")
    if llm.llm_engine.is_sleeping():
        raise ValueError("the engine must be awake: llm.wake_up()")
    longest = llm.llm_engine.vllm_config.model_config.max_model_len
    if not 0 < new_tokens < longest:
        raise ValueError(f"new_tokens must be from 1 to {longest - 1} (max_model_len), got"
                         f" {new_tokens}")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng():
            audit = Audit(llm, model, sampling, new_tokens)
            report = Report(audit.line(each.__name__, each) for each in (
                audit.semantics, audit.head, audit.numerics, audit.weights, audit.defaults))
            if trainer:
                report.append(Line("trainer", *audit.trainer(trainer)))
            report += audit.path(sync)
    finally:
        for module, mode in modes:
            module.training = mode
    return report


def by_checkpoint(model: Any) -> dict[str, Tensor]:
    """The weights by their names in a checkpoint, which transformers 5 changes for mixtures."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return model.state_dict()
    return revert_weight_conversion(model, dict(model.state_dict()))


def reload(worker: Any, weights: dict[str, Tensor]) -> None:
    """vLLM's own load, in a worker."""
    load = getattr(worker.model_runner, "reload_weights", None)
    if load and "weights_iterator" in signature(load).parameters:
        worker.reload_weights(weights_iterator=iter(weights.items()))
    else:  # older versions
        worker.get_model().load_weights(weights.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, of your LLM")
    parser.add_argument("--sampling", type=json.loads, help="JSON: temperature, top_p, top_k, ...")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each of 16 prompts")
    parser.add_argument("--json", help="write the lines to this file, too")
    words = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; else nearly all memory
    try:
        sampling_of(words.sampling or {})  # before vLLM starts
        from transformers import AutoModelForCausalLM
        from vllm import LLM

        llm = LLM(**{"gpu_memory_utilization": 0.5} | words.engine_args, model=words.model)
        model = AutoModelForCausalLM.from_pretrained(words.model)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device, llm.llm_engine.vllm_config.model_config.dtype)
        report = check(llm, model, lambda: proof.in_worker(llm, reload, by_checkpoint(model)),
                       sampling=words.sampling, new_tokens=words.new_tokens)
        print(report)
        if words.json:
            Path(words.json).write_text(json.dumps([*map(asdict, report)], indent=1))
    except Exception as error:  # of this file, of vLLM, of the file system: one sentence
        parser.error(f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}")
    sys.exit(report.status)


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
