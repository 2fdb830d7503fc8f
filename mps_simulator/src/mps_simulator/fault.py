class Fault(RuntimeError):
    """Raised if Metal leaves something undefined or ends the process: a race, an access out of bounds, a misused
    object.
    """
