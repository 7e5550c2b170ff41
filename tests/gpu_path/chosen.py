"""Which tests of the engine run on model runner V2 too. Names are the beginnings of node ids.

`make test` runs PART: by name, what V1 would not have shown; and the fault in V2's path that turned the test red when
it was planted once. `make test-gpu-path` runs all.
"""

PART = {
    "test_runner_v2.py": "V2 alone; a temperature that is applied twice",
    # The sampler: vLLM has two, with different kernels.
    "test_engine_adapter.py::test_every_token": "V2's log-probabilities and stop tokens; those of another row",
    "test_engine_adapter.py::test_seeds_decide": "V2 draws by seed and position; seeds that depend on the batch",
    "test_engine_adapter.py::test_the_audit_names": "where a setting is read on V2; a sampler that is raw after all",
    "test_sampling_mask.py::test_the_engines_kept_sets": "V2's kernel for masks; half of top-p",
    # The cache.
    "test_engine_adapter.py::test_a_versioned_prefix_cache": "V2's table of blocks; blocks of an earlier request",
    "test_planted.py::test_a_planted_fault_is_refused_at_the_next_load_or_known_to_pass[blocks of": "V2; an old key",
    # Requests over a load.
    "test_inflight.py::test_every_group_is_trained_on_once_or_in_flight[keep-4":
        "V1's async scheduling with V2; blocks of an earlier request",
    "test_inflight.py::test_where_held_requests": "V2's places; one that is given away while its request is held",
    "test_inflight.py::test_an_update_keeps_recomputes_or_aborts_what_was_computed[Qwen2":
        "V2's request states; last tokens exchanged between requests",
    "test_sleep.py::test_a_run_whose_sleep_loses_weights_and_cache_has_the_same_metrics_as_one_that_keeps_them[recompute]":
        "V2's request states over a sleep; last tokens exchanged",
    # The rest.
    "test_probe.py::test_a_planted_fault_is_named_and_the_policy_is_unchanged[raw+head+prefix]":
        "the probe on V2; a temperature that is not applied",
    "test_probe.py::test_a_planted_fault_is_named_and_the_policy_is_unchanged[no mask]": "the same",
    "test_resume.py::test_a_run_with_the_real_engine": "V2 draws a seed for each request; seeds of the system",
    "test_grpo.py::test_page_and_core_make": "the page's calls of vLLM with V2; log-probabilities of another row",
}  # fmt: skip
