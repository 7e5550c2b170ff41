"""Print docs/records/vllm-rl.json, a row for each fault: `python -m lab.faults`."""

import json

from lab.study import RECORDS, table

ROWS = json.loads((RECORDS / "vllm-rl.json").read_text())["rows"]
TITLES = ["fault", "0.26", "0.32", "reached on", "noticed by", "shown"]
print(table(TITLES, [
    [row["title"], row["v0_26"]["has"], row["v0_32"]["has"],
     row["device"] if row["reached"] else "not reached",
     ", ".join(row["noticed"]["by"]), row["noticed"]["how"]] for row in ROWS]))  # fmt: skip
