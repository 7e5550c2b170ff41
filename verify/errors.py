"""What a check raises."""


class EngineStateError(RuntimeError):
    """A call that the engine's state does not allow: generate while asleep, load before wake."""


class WeightLoadError(RuntimeError):
    """The engine does not hold, or would not hold, the trainer's weights."""


class AuditError(RuntimeError):
    """A requested setting is not in force, or a side's distribution is not the stated one."""
