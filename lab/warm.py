"""What each run of a study imports. The process that runs are forked from imports it once."""
# ruff: noqa: E402, F401

from engine_adapter import _prepare_environment

_prepare_environment()

import matplotlib.figure
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import vllm.v1.engine.llm_engine

import lab.bench
