"""What a run works on: a task, the folder of a model, and the task's prompts in its tokens."""

import math
from pathlib import Path
from typing import Any

from model_folder import check_rows, describe, local_folder
from report.log import shown
from tasks import Task
from tasks.options import Options
from tasks.problem_files import load_task
from tasks.prompts import encode, fitting


def find_job(
    task: str, seed: int, data: Options, model: str, max_new_tokens: int
) -> tuple[Task, str]:
    """The task that --task names, and the folder of --model; without the model's weights.

    The prompts fit into the model's context. The toy's folder is there after `teach_toy`.

    Raises: ValueError that says what is wrong with the task, with the model, or with both.
    """
    problems = load_task(task, seed, data)
    if model == "toy":
        from tasks.toys import EOS, toy_config, toy_folder, toy_tokenizer

        folder = str(toy_folder(data.cache_dir, seed, task))
        config, tokenizer, stop = toy_config(task), toy_tokenizer(), (EOS,)
    else:
        folder = local_folder(model)
        config, tokenizer, stop = describe(folder)
    problems = encode(tokenizer, problems, stop, data)
    largest = max(map(max, [*problems.prompts, stop]))
    if largest >= config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the"
                         f" vocabulary of {config.vocab_size}")
    context = getattr(config, "max_position_embeddings", math.inf)
    problems = fitting(problems, context, max_new_tokens, data)
    check_rows(config, max_new_tokens + max(map(len, problems.prompts)))
    print(f"first prompt: {shown(problems.prompts_record['first'])}")
    return problems, folder


def teach_toy(config: Any) -> None:
    """With `--model toy`: teach it if the cache does not have it. Raises: ValueError."""
    if config.model == "toy":
        from tasks.toys import toy_model

        toy_model(config.data.cache_dir, config.seed, config.task)


def digests(run: Any) -> dict[str, str]:
    """Of the task and of the model's files, by the names that the user has given."""
    from report.files import digest_of

    config = run.config
    names = " with ".join(filter(None, [config.task, config.data.reward, config.data.eval_task]))
    files = {f"{config.model}/{path.name}": digest_of(path) for path in Path(run.folder).glob("*")
             if path.is_file() and path.suffix not in (".md", ".pt")}  # a checkpoint's state.pt
    return {names: run.task.fingerprint} | files
