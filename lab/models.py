"""What cells of a study need: models, written for each seed, and the task of the gpu study."""

import random
from pathlib import Path
from typing import Any

SHAPES = {
    "qwen2.5-0.5b": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864,
                         num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960,
                         num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2),
}  # fmt: skip
# Whatever the name, on a CPU.
NARROW = dict(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=2)


def write_model(folder: Path, name: str, seed: int) -> None:
    """A model of a shape of SHAPES, on a CPU a narrow one; taught-SHAPE has the ladder's habit."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from report.files import appears_whole, write_folder
    from tasks.toys import TOYS, teach, toy_tokenizer

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = name.removeprefix("taught-")
    sizes = NARROW if device == "cpu" else SHAPES[shape]
    config = Qwen2Config(**sizes, max_position_embeddings=4096, tie_word_embeddings=True,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if shape != name:
        toy = TOYS["digits"]._replace(logit_offset=0.0)  # the head is tied
        if device == "cuda":
            toy = toy._replace(steps=10**6, lr=5e-4, warm_up=50, seconds=60, loss=0.53)
        model = teach(toy, config, seed, device)
    else:
        model = Qwen2ForCausalLM(config).to(device)
        follow_digits(model)
    with appears_whole(folder) as new:
        write_folder(model.to(torch.bfloat16), toy_tokenizer(), new)


def follow_digits(model: Any) -> None:
    """Teach that the next digit is the successor in half of the cases, else any digit.

    A model that only counts is nearly certain: the answers of a group and their rewards are equal,
    so nothing is updated, and log-probabilities of 0 have no mismatch (entropy 1e-6 on an H200).
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(60):
        successor = torch.rand(64, 32, device=model.device) < 0.5
        steps = torch.where(successor, 1, torch.randint(10, (64, 32), device=model.device))
        ids = 3 + steps.cumsum(dim=1) % 10  # (64, 32), the toy's digits
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# Of prompts of 128 tokens, with random rewards: no answer is right, and hardly a group is flat.
def sample(rng: random.Random) -> tuple[str, str]:
    return "".join(rng.choices("0123456789", k=127)), "none"  # <bos> is the first token


def reward(problem, response: str) -> float:
    return float(random.Random(problem.question + response).random() < 0.5)
