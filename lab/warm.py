"""What each run of a study imports. The process that runs are forked from imports it once."""

from engine_adapter import _prepare_environment

_prepare_environment()

import matplotlib.figure  # noqa: E402, F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
import vllm.v1.engine.llm_engine  # noqa: E402

import lab.bench  # noqa: E402
import lab.other_vllm  # noqa: E402, F401
