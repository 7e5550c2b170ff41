"""What a run measures and what it leaves: metrics, log lines, tables, pictures, checkpoints."""

from importlib.util import find_spec

# All files of ours import this one first, so a user gets one sentence. vLLM is checked later: not
# all engines need it.
NEEDED = "torch", "transformers", "tyro", "einops", "matplotlib"
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise SystemExit(f"error: this Python has no {', '.join(missing)}: install what is missing (the"
                     " versions that are tested are in requirements.txt), or run `make setup`,"
                     " which makes .venv")
