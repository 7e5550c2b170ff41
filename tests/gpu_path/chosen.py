"""Which tests of the engine run on model runner V2 too, and what runner V1 would not have shown.

Names are the beginnings of node ids. `make test` runs PART, `make test-gpu-path` all but CANNOT.
"""

PART = {
    "test_runner_v2.py": "tests of V2 alone",
    "test_sleep.py::test_a_run_whose_sleep_loses_weights_and_cache_has_the_same_metrics_as_one_that_keeps_them[recompute]":
        "V2's request states over a sleep",
    "test_sleep.py::test_a_run_whose_sleep_loses_weights_and_cache_has_the_same_metrics_as_one_that_keeps_them[keep]":
        "V2's request states over a load without a sleep",
    "test_sleep.py::test_a_wake": "the same checks with V2's weights",
    # The sampler: vLLM has two, with other kernels.
    "test_engine_adapter.py::test_without_processed_logprobs": "the logits that V2's kernel reads",
    "test_engine_adapter.py::test_an_fp32_head": "the copy to float32 before V2's temperature",
    "test_engine_adapter.py::test_every_token": "V2's kernels for temperature, log-probabilities and stop tokens",
    "test_engine_adapter.py::test_seeds_decide": "V2 draws by seed and position, V1 by a generator for each row",
    "test_engine_adapter.py::test_the_audit_names": "each place from which the audit reads a setting",
    "test_sampling_mask.py::test_the_engines_kept_sets": "the kernel for top-k and top-p, the order of ids in a row",
    # The cache.
    "test_engine_adapter.py::test_without_uncached_runtime": "the stale cache: V2 has its own table of blocks",
    "test_engine_adapter.py::test_a_versioned_prefix_cache": "blocks by key, for requests that wait or run",
    "test_planted.py::test_a_planted_fault_is_refused_at_the_next_load_or_known_to_pass[blocks of": "an old key",
    # Requests over a load.
    "test_inflight.py::test_every_group_is_trained_on_once_or_in_flight[vllm-keep-4": "V1's async scheduling",
    "test_inflight.py::test_an_update_keeps_recomputes_or_aborts_what_was_computed[Qwen2-vllm": "V2's request states",
    "test_staleness.py::test_with_async_scheduling": "a step under way on V2's queue of outputs",
    # The rest.
    "test_probe.py::test_a_planted_fault_is_named_and_the_policy_is_unchanged[raw+prefix]": "two faults",
    "test_probe.py::test_a_planted_fault_is_named_and_the_policy_is_unchanged[no mask]": "another one",
    "test_resume.py::test_a_run_with_the_real_engine": "seeds that V2 draws for each request",
    "test_grpo.py::test_page_and_core_make": "the page's own calls of vLLM",
}  # fmt: skip

CANNOT = {
    "test_routes.py": "the hook of extras/routes.py reads runner V1's batch",
}
