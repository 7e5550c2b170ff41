"""Which package is missing, in a sentence instead of a traceback: imported before all others."""

from importlib.util import find_spec

# vLLM is looked for when its version is checked: not all engines need it.
NEEDED = "torch", "transformers", "tyro", "einops", "matplotlib", "datasets"

missing = [name for name in NEEDED if find_spec(name) is None]
if missing:
    raise SystemExit(f"error: this Python has no {', '.join(missing)}: install what is missing (the"
                     " versions that are tested are in requirements.txt), or run `make setup`,"
                     " which makes .venv")
