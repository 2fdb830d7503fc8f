class Fault(RuntimeError):
    """Raised where Metal is undefined or ends the process: a race, an access out of bounds, a misused object."""
