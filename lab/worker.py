"""A vLLM in an environment of its own, driven by lab/other_vllm.py through one pipe.

One file for V0 (0.8.5) and V1 (0.18.1, and 0.26 to 0.32). It imports the standard library, numpy,
torch and vLLM, nothing of this repository. The client sends a call and waits for the answer: both
sides never write at the same time, so a message may be larger than the pipe's buffer. The process
ends when the pipe is closed or its parent ends.
"""

import ctypes
import math
import os
import signal
import sys
from dataclasses import fields
from multiprocessing.connection import Connection
from operator import attrgetter

import numpy
import torch

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
ROW = [("request", "i8"), ("token", "i4"), ("logprob", "f4"), ("finish", "U8")]  # a sampled token


class Worker:
    """The client's calls by their names."""

    def start(self, version: str, gib: float, fp32_head: bool, given: dict) -> int:
        """Build the engine, with random weights. Returns the size of its vocabulary.

        `given` are arguments of EngineArgs; those that this version does not have are left out.
        """
        self.v0 = version.startswith("0.8.")
        # Read at import. The engine core is in this process, no kernel is compiled, the KV cache
        # has whole GiB (if not given, half of the memory), OMP_NUM_THREADS is obeyed.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
                       "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(gib)), "VLLM_NO_USAGE_STATS": "1"}
        os.environ |= {"VLLM_USE_V1": "0"} if self.v0 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # V0's CPU build has no other block size (and no prefix cache) without IPEX.
        arguments = given | ({"device": "cpu", "block_size": 16} if self.v0 else {})
        import vllm
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        if vllm.__version__ != version:
            raise ValueError(f"vLLM must be {version} in the environment of {sys.executable}, got"
                             f" {vllm.__version__}")
        self.settings = {"vllm": version, "torch": torch.__version__, "head": "its own"}
        if fp32_head and hasattr(LogitsProcessor, "_apply_head"):
            arguments |= {"hf_overrides": {"head_dtype": "float32"}}
        elif fp32_head:  # head_dtype does not act on a model that generates
            LogitsProcessor._get_logits = logits_in_fp32
            self.settings["head"] = "LogitsProcessor._get_logits replaced"
        known = arguments.keys() & {each.name for each in fields(vllm.EngineArgs)}
        chosen = vllm.EngineArgs(**{name: arguments[name] for name in known})
        self.engine = vllm.LLMEngine.from_engine_args(chosen)
        self.settings["generation"] = "V1" if ".v1." in type(self.engine).__module__ else "V0"
        self.config = self.engine.vllm_config
        self.core = self.engine if self.v0 else self.engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.model if self.v0 else self.runner.get_model()
        self.kept = []  # counters of preemptions, and their values at the last load
        head, = [each for each in self.model.modules() if isinstance(each, LogitsProcessor)]
        self.hook = head.register_forward_hook(self.observe_head)
        return self.config.model_config.get_vocab_size()

    def observe_head(self, _module, _inputs, logits: torch.Tensor) -> None:
        """Note the dtype in which the head's product is computed, from the first step's logits."""
        self.hook.remove()
        narrow = [dtype for dtype in (torch.bfloat16, torch.float16)
                  if torch.equal(logits.to(dtype).to(logits.dtype), logits)]
        self.settings["head_dtype"] = (narrow or [logits.dtype])[0]

    def audit(self) -> dict:
        """What is in force, read from the live engine. V0 has processed log-probabilities only."""
        config = self.config
        return self.settings | {
            "logprobs_mode": "processed_logprobs" if self.v0 else self.runner.sampler.logprobs_mode,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "async_scheduling": getattr(config.scheduler_config, "async_scheduling", "V0 has none"),
            "generation_config": config.model_config.generation_config,
            "model_dtype": config.model_config.dtype, "block_size": config.cache_config.block_size,
        }

    def submit(self, prompt: list, sampling: dict, requests: list, seeds: list) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        more = {"top_k": sampling["top_k"] or -1, "output_kind": RequestOutputKind.DELTA}
        for request, seed in zip(requests, seeds):  # noqa: B905, Python 3.9
            params = SamplingParams(**sampling | more | {"seed": seed})
            self.engine.add_request(str(request), {"prompt_token_ids": prompt}, params)

    def unfinished(self) -> int:
        return self.engine.get_num_unfinished_requests()

    def step(self, seed: int) -> numpy.ndarray:
        """One engine step. Returns an array of ROW."""
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        rows = []
        for output in self.engine.step():
            request = int(output.request_id.partition("-")[0])  # V1 may add a suffix
            new = output.outputs[0]
            if output.finished and not new.token_ids:
                raise RuntimeError(f"a request ended without a token: {new.finish_reason}")
            for token, likely in zip(new.token_ids, new.logprobs):  # noqa: B905
                rows.append((request, token, likely[token].logprob, new.finish_reason or ""))
        return numpy.array(rows, ROW)

    def abort(self, requests: list) -> None:
        self.engine.abort_request([str(request) for request in requests])

    def load(self, path: str, shapes: dict) -> int:
        """Copy the weights in the file, one after the other, into the live model.

        Returns the preemptions since the last load, in V1 those of requests that were kept then.
        """
        sizes = [math.prod(shape) for shape in shapes.values()]
        dtype = self.config.model_config.dtype
        memory = torch.from_file(path, shared=True, size=sum(sizes), dtype=dtype)
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = self.config.model_config.hf_config.tie_word_embeddings
        unnamed = {"lm_head.weight"} - names if tied else set()
        parts = zip(shapes, memory.split(sizes))  # noqa: B905
        weights = ((name, part.view(shapes[name])) for name, part in parts if name not in unnamed)
        if self.v0:
            self.model.load_weights(weights)
        else:  # also packs the weights again, as the CPU build keeps them
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        count = attrgetter("num_cumulative_preemption" if self.v0 else "num_preemptions")
        lost = sum(count(each) - before for each, before in self.kept)
        counting = self.engine.scheduler if self.v0 else self.core.scheduler.running
        self.kept = [(each, count(each)) for each in counting]
        return lost


def logits_in_fp32(self, hidden_states, lm_head, embedding_bias):
    """In place of LogitsProcessor._get_logits, on one device."""
    bias = None if embedding_bias is None else embedding_bias.float()
    logits = torch.nn.functional.linear(hidden_states.float(), lm_head.weight.float(), bias)
    return logits[..., : self.org_vocab_size]


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
