class Fault(RuntimeError):
    """What Metal leaves undefined or ends the process for: a race, an access out of bounds, an object misused."""
