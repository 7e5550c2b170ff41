"""The options of problems, prompts and rewards."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from report.errors import stage
from report.ranges import SMALLEST, Count, Name, Range, check_ranges


@dataclass(frozen=True)
class Options:
    """Problems, prompts and rewards."""

    # Task to evaluate on, named as `task` is; if not given: the test or validation split of a
    # dataset, else a tenth of the problems.
    eval_task: Name | None = None
    # Columns of rows, also of eval_task; `outer.inner` is a column of a nested row, A+B joins the
    # texts of two. If not given, the first of the usual names, which tasks/problem_files.py lists.
    question_column: Name | None = None
    answer_column: Name | None = None
    # Refuse the run, or drop: rows without a question or a readable answer, and questions with two
    # answers.
    unreadable_answers: Literal["refuse", "drop"] = "refuse"
    # First message of each prompt; refused without a chat template, or if a prompt has its own.
    system_prompt: str | None = None
    # Variables of the chat template as JSON, such as {"enable_thinking": false}. They may change at
    # --resume, if the prompts do not.
    chat_template_args: str | None = None
    chat_template: bool = True  # Off: the prompt is the question alone, as for a base model.
    max_prompt_tokens: Count | None = None  # If not given, the context minus max_new_tokens.
    overlong_prompts: Literal["refuse", "drop"] = "refuse"  # Refuse the run, or drop and count.
    # Python file with `reward` or `rewards`, for the rows of a file or dataset; for those of
    # eval_task too.
    reward: Name | None = None
    # Seconds for one call of a task file's function, its import, or math-verify.
    reward_limit_s: Annotated[float, Range(SMALLEST, 1e6)] = 10.0
    # If a reward raises, hangs, or is no finite number, dictionary of these or None: stop the run,
    # or leave the response out of the loss and of its group's baseline.
    reward_errors: Literal["stop", "leave-out"] = "stop"
    # Keeps the toy model once it is taught.
    cache_dir: Name = str(Path(__file__).parents[1] / ".cache")

    def __post_init__(self):
        check_ranges(self)
        if self.system_prompt == "":
            raise ValueError("system_prompt must not be empty, leave it out")
        with stage('reading chat_template_args, which must be a JSON object, such as'
                   ' {"enable_thinking": false},'):
            dict(**self.template_args)

    @property
    def template_args(self) -> dict[str, Any]:
        return json.loads(self.chat_template_args or "{}")
