"""What is off in a run? `python -m exercises.mystery 3 none` answers for mystery-3.csv."""

import sys
from csv import DictReader
from hashlib import sha384
from pathlib import Path

HERE = Path(__file__).parent
# What shows that a fix is off: {0[...]} is of step 1, before any update, {1[...]} of step 2, and
# {11[...]} of the last one.
SIGNS = {
    "none": "With all fixes on, rollouts of the current weights differ by the trainer's own noise,"
    " and no request is aborted. Here, in step 2, current_mismatch_abs_mean is"
    " {1[current_mismatch_abs_mean]} and self_noise_abs_mean {1[self_noise_abs_mean]}; the last"
    " tokens_wasted is {11[tokens_wasted]}. Its last reward is {11[reward]}, so reward alone shows"
    " only the stale cache (0.52) and raw log-probabilities (0.87).",
    "processed_logprobs": "Without processed_logprobs, the trainer's and the reported probabilities"
    " have a mean ratio other than 1 before any update. Here, in step 1, backend_ratio_mean is"
    " {0[backend_ratio_mean]}.",
    "uncached_runtime": "Without uncached_runtime, the load after the first update raises the"
    " mismatch of current rollouts more than tenfold. Here current_mismatch_abs_mean is"
    " {0[current_mismatch_abs_mean]} in step 1 and {1[current_mismatch_abs_mean]} in step 2.",
    "inflight_keep": "Without inflight_keep, a load aborts requests, so few tokens are stale. Here"
    " the last tokens_wasted is {11[tokens_wasted]}, and the last staleness_mean"
    " {11[staleness_mean]}. Young tokens are why its reward ends above that of all fixes; what it"
    " throws away is the price.",
    "fp32_head": "Without fp32_head, the mismatch exceeds the trainer's own noise before any"
    " update, but the mean ratio is 1. Here, in step 1, current_mismatch_abs_mean is"
    " {0[current_mismatch_abs_mean]}, self_noise_abs_mean {0[self_noise_abs_mean]} and"
    " backend_ratio_mean {0[backend_ratio_mean]}.",
}
ORDER = sorted(SIGNS, key=lambda fix: sha384(fix.encode()).digest())  # of the runs


def verdict(number, fix):
    """Whether `fix` is off in a run, and the figures that would show it."""
    rows = [*DictReader((HERE / f"mystery-{number}.csv").open())]
    answer = "Yes" if ORDER[int(number) - 1] == fix else "No"
    return f"{answer}. {SIGNS[fix].format(*rows)}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case number, fix if number in {*"12345"} and fix in SIGNS:
            print(verdict(number, fix))
        case given:
            sys.exit("error: give the number of a run, 1 to 5, and what is off in it, one of"
                     f" {', '.join(SIGNS)}; got {' '.join(given)}")
