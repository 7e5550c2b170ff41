"""Record what a vLLM samples and reports, as a trace (docs/audit.md).

One file that needs vLLM 0.8.5 or newer (V0 or V1) and numpy, nothing else. Copy it into the
environment in question:

    python record_vllm.py --model PATH --out TRACE.npz --engine-args '{"dtype": "float32"}'

or, from a program that holds an `LLM` already (the state of that engine is recorded, with the
weights it has now):

    from record_vllm import record
    record(llm, "TRACE.npz")

The workload: 64 prompts of 4 to 48 random token ids, 128 new tokens each, a seed per request. This
file loads no weights into the engine and changes no setting. The trace names versions and settings.
`python -m probe diagnose --model PATH TRACE.npz` says which layer is at
fault; it runs elsewhere, without vLLM. Exit status: 0 recorded, 2 bad input.
"""

import argparse
import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path

import numpy

NUM_PROMPTS, NEW_TOKENS = 64, 128
PROMPT_TOKENS = 4, 49  # from 4 to 48
SAMPLING = {"temperature": 0.7}  # at temperature 1 raw log-probabilities do not show
# Named in every request, so that no default of the model acts.
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0}
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton", "flash-attn",
            "flashinfer-python", "xformers", "trl")
SECRETS = ("key", "key_id", "token", "secret", "password", "credentials", "authorization")
# vLLM sets more later. A trace is passed on, so it must have no secret.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name.startswith("VLLM_") and not name.lower().endswith(SECRETS)}
SETTINGS = (  # places in vLLM's VllmConfig; no version has all of them
    "model_config.dtype", "model_config.quantization", "model_config.logprobs_mode",
    "model_config.max_logprobs", "model_config.head_dtype", "model_config.hf_overrides",
    "model_config.generation_config", "model_config.enforce_eager", "model_config.max_model_len",
    "model_config.seed", "model_config.disable_cascade_attn", "cache_config.enable_prefix_caching",
    "cache_config.block_size", "cache_config.cache_dtype", "scheduler_config.async_scheduling",
    "scheduler_config.enable_chunked_prefill", "scheduler_config.chunked_prefill_enabled",
    "scheduler_config.max_num_seqs", "scheduler_config.max_num_batched_tokens",
    "parallel_config.tensor_parallel_size", "speculative_config.method", "compilation_config.mode",
    "compilation_config.level", "attention_config.backend",
)


def record(llm, out, sampling=None, prompts=None, new_tokens=NEW_TOKENS, from_files=False):
    """Sample the workload with a live vllm.LLM and write the trace.

    `from_files`: the engine still has the weights of its model's files.
    """
    from vllm import SamplingParams

    sampling = SAMPLING | (sampling or {})
    check_sampling(sampling)
    config = llm.llm_engine.vllm_config
    if prompts is None:
        generator = numpy.random.RandomState(0)  # the same numbers in every version of numpy
        # Some versions refuse unused entries, which may be the last tenth of a vocabulary.
        vocabulary = config.model_config.get_vocab_size() * 9 // 10
        prompts = [generator.randint(vocabulary, size=generator.randint(*PROMPT_TOKENS)).tolist()
                   for _ in range(NUM_PROMPTS)]
    requests = [SamplingParams(max_tokens=new_tokens, logprobs=0, ignore_eos=True,
                               seed=1000 + index, **NEUTRAL | sampling)
                for index in range(len(prompts))]
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    answers = [each.outputs[0] for each in llm.generate(inputs, requests, use_tqdm=False)]
    tokens = [list(each.token_ids) for each in answers]
    logprobs = [[entry[token].logprob
                 for entry, token in zip(each.logprobs, each.token_ids)]  # noqa: B905, Python 3.9
                for each in answers]

    path = config.model_config.model
    generation = "V1" if ".v1." in type(llm.llm_engine).__module__ else "V0"
    meta = {
        "format": 1, "groups": {"sampled": sampling},
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "versions": versions(), "engine": f"vLLM {generation}", "device": device(),
        "settings": settings_of(config), "environment": ENVIRONMENT,
        "model": {"path": path, "weights": weights_of(path) if from_files else None},
    }
    save(out, meta, "sampled", prompts, tokens, logprobs)
    print(f"{out}: {sum(map(len, tokens))} tokens of {meta['engine']} on {meta['device']}")


def save(out, meta, group, prompts, tokens, logprobs):
    """Write a trace with one group; docs/audit.md has the layout."""
    numpy.savez_compressed(out, **{
        "prompt_ids": table(prompts, -1, numpy.int32),
        f"{group}/tokens": table(tokens, -1, numpy.int32),
        f"{group}/logprobs": table(logprobs, 0.0, numpy.float32),
        "meta": numpy.array(json.dumps(meta, default=str))})


def check_sampling(sampling):
    """Raises: ValueError for what the probe does not reproduce."""
    unknown = sampling.keys() - {"temperature", *NEUTRAL}
    if unknown:
        raise ValueError(f"sampling must have no {', '.join(sorted(unknown))}")


def settings_of(config):
    """The settings in force, by their place."""
    settings = {}
    for place in SETTINGS:
        with suppress(AttributeError):
            settings[place] = attrgetter(place)(config)
    return settings


def versions():
    """The version of each package that is installed."""
    import vllm

    packages = {"vllm": vllm.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return packages


def device():
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def weights_of(folder):
    """SHA-256 over the size and 64 blocks of 4 KiB of each weight file; None for a hub name."""
    files = sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")])
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for index in range(64):
                file.seek(index * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest() if files else None


def table(rows, padding, kind):
    """Rows of unequal length as an array: (B, longest)."""
    columns = list(zip_longest(*rows, fillvalue=padding))
    return numpy.array(columns, kind).T


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--out", required=True, help="the trace, .npz")
    parser.add_argument("--engine-args", type=json.loads, default={},
                        help="JSON: the arguments of your vllm.LLM")
    parser.add_argument("--sampling", type=json.loads, default=SAMPLING,
                        help="JSON: temperature, top_p, top_k, ...")
    parser.add_argument("--prompts",
                        help="JSON file with rows of token ids, in place of random prompts")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    words = parser.parse_args()
    try:
        given = words.engine_args
        prompts = json.loads(Path(words.prompts).read_text()) if words.prompts else None
        check_sampling(words.sampling)
        if not given.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
            # GiB. On a CPU vLLM would reserve nearly all memory; a GPU ignores it.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM

        llm = LLM(model=words.model, **given)
        record(llm, words.out, words.sampling, prompts, words.new_tokens, from_files=True)
    except Exception as error:  # of this file, of vLLM, of the file system: one sentence
        parser.error(f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}")


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
