"""What a run measures and what it leaves: metrics, log lines, tables, pictures, checkpoints."""
